"""What a gateway does when Redis comes back without its data, or without a part of it."""

import asyncio
import logging

import msgspec
import pytest

from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelNotFound
from qinfer.models.catalog import Catalog
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.installation import InstallationState, is_claimed, loss, read_snapshot, write_model
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from tests.support.servers.servers import Database

CONFIG = """
backend: "stub" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""
TTL_S = 60.0


def model(name: str) -> StoredModel:
    return StoredModel(model=name, config=to_json(normalise(parse(CONFIG), name)), versions=(1,), content_hash="1")


class Gateway:
    """A gateway's catalog, with a store and a queue of its own."""

    def __init__(self, store: ControlStore, queue: Queue) -> None:
        self.store, self.queue = store, queue
        self.catalog = Catalog(store, LimitSettings(), queue)

    async def write(self, *names: str) -> None:
        """Stores models, has a worker that serves them, and looks at them."""
        for name in names:
            await write_model(model(name), None, self.store, self.queue)
        await self.beat()
        await self.catalog.refresh()

    async def beat(self) -> None:
        desired = await self.store.desired()
        states = {name: {1: VersionState(State.READY, wish.generation)} for name, wish in desired.items()}
        await self.store.heartbeat(WorkerRecord(id="w", started_at=0.0, models=states), TTL_S)

    async def look(self) -> None:
        """Looks twice, a worker's heartbeat in between: once to restore, once to see it."""
        await self.catalog.refresh()
        await self.beat()
        await self.catalog.refresh()


@pytest.fixture
def gateway(store: ControlStore, delivery: Queue) -> Gateway:
    return Gateway(store, delivery)


@pytest.fixture
async def other(database: Database) -> Gateway:
    """Another gateway on the same Redis."""
    return Gateway(database.store(), await database.delivery())


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_first_start_writes_the_id(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    await gateway.catalog.refresh()
    first = await gateway.store.installation()
    await gateway.catalog.refresh()

    assert first
    assert await gateway.store.installation() == first
    assert gateway.catalog.is_server_ready()
    assert errors(caplog) == []


async def test_what_was_lost_is_written_again(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """Models with their wishes, lanes and newer generations, and settings; under another id, and said once."""
    await gateway.write("a", "b")
    await gateway.store.set_desired(msgspec.structs.replace((await gateway.store.desired())["b"], load=False))
    await gateway.store.put_setting("logging/log_info", "false")
    await gateway.catalog.refresh()
    before = await read_snapshot(gateway.store)
    await gateway.store.client.flushdb()

    await gateway.look()
    now = await read_snapshot(gateway.store)

    assert now.installation not in ("", before.installation)
    assert not is_claimed(now.installation)
    assert {name: wish.load for name, wish in now.desired.items()} == {"a": True, "b": False}
    assert all(now.stored[name].generation > before.stored[name].generation for name in "ab")
    assert now.stored["a"].config == before.stored["a"].config
    assert now.settings == before.settings
    assert await gateway.queue.depth([Lane("a", 1)]) == [0]
    assert await gateway.store.client.exists(keys.lane(Lane("a", 1)))
    [error] = errors(caplog)
    assert error.__dict__["models"] == ("a", "b")
    assert gateway.catalog.is_server_ready()


async def test_meanwhile_the_last_view_serves_on_and_the_server_is_not_ready(gateway: Gateway) -> None:
    await gateway.write("a")
    generation = gateway.catalog.resolve("a", 1).generation
    await gateway.store.client.flushdb()

    await gateway.catalog.refresh()

    assert gateway.catalog.resolve("a", 1).generation == generation
    assert not gateway.catalog.is_server_ready()


async def test_the_view_waits_for_the_heartbeats_that_were_lost(gateway: Gateway) -> None:
    """What is loaded is not known before: a model may not be gone for that time."""
    await gateway.write("a")
    await gateway.store.client.flushdb()
    await gateway.catalog.refresh()

    await gateway.catalog.refresh()
    assert gateway.catalog.resolve("a", 1)
    assert not gateway.catalog.is_server_ready()

    await gateway.look()
    assert gateway.catalog.is_server_ready()


async def test_one_of_several_gateways_restores(
    gateway: Gateway, other: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    """The others find it done: each says so, and no generation is written twice."""
    await gateway.write("a")
    await other.catalog.refresh()
    await gateway.store.client.flushdb()

    await asyncio.gather(gateway.catalog.refresh(), other.catalog.refresh())
    written = await read_snapshot(gateway.store)
    await gateway.look()
    await other.look()

    assert await read_snapshot(gateway.store) == written
    assert gateway.catalog.is_server_ready()
    assert other.catalog.is_server_ready()
    assert len(errors(caplog)) == 2


async def test_a_claim_that_is_not_ended_expires(gateway: Gateway) -> None:
    """A gateway that dies while it restores leaves that to the next."""
    await gateway.write("a")
    await gateway.store.client.flushdb()
    await gateway.store.exchange_installation("", "restoring:x", 60.0)

    await gateway.catalog.refresh()
    assert await gateway.store.desired() == {}
    assert not gateway.catalog.is_server_ready()

    await gateway.store.client.delete(keys.installation())
    await gateway.look()
    assert gateway.catalog.is_server_ready()


async def test_what_a_new_gateway_wrote_first_is_completed(gateway: Gateway, other: Gateway) -> None:
    """It has seen nothing of what was there: it takes the empty Redis for a first start."""
    await gateway.write("a", "b")
    await gateway.store.client.flushdb()
    await other.write("a")
    theirs = (await other.store.desired())["a"]

    await gateway.look()

    desired = await gateway.store.desired()
    assert set(desired) == {"a", "b"}
    assert desired["a"] == theirs
    assert gateway.catalog.is_server_ready()


async def test_the_configuration_that_a_node_lost_is_written_again(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.write("a", "b")
    before = await read_snapshot(gateway.store)
    await gateway.store.client.delete(keys.config("a"), keys.lane(Lane("a", 1)))

    await gateway.look()
    now = await read_snapshot(gateway.store)

    assert now.stored["a"].generation == now.desired["a"].generation > before.stored["a"].generation
    assert now.stored["b"] == before.stored["b"]
    assert await gateway.store.client.exists(keys.lane(Lane("a", 1)))
    [error] = errors(caplog)
    assert error.__dict__["configurations"] == ("a",)


async def test_who_restores_nothing_keeps_its_view(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """Workers whose models call others, and bridges: they wait until a gateway has restored it, and say nothing."""
    await gateway.write("a", "b")
    follower = Catalog(gateway.store, LimitSettings())
    await follower.refresh()
    generation = follower.resolve("a", 1).generation

    await gateway.store.client.delete(keys.config("a"))
    await follower.refresh()
    assert follower.resolve("a", 1).generation == generation

    await gateway.store.client.flushdb()
    await follower.refresh()
    assert follower.resolve("b", 1)
    assert await gateway.store.installation() == ""
    assert errors(caplog) == []

    await gateway.look()
    await follower.refresh()
    assert follower.resolve("a", 1).generation > generation


async def test_a_failover_to_an_older_replica_is_no_loss(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """It has the id, and lacks what was written last."""
    await gateway.write("a", "b")
    await gateway.store.put_setting("logging/log_info", "false")
    await gateway.catalog.refresh()
    installation = await gateway.store.installation()
    await gateway.store.client.hdel(keys.desired(), "b")
    await gateway.store.client.delete(keys.settings())

    await gateway.catalog.refresh()

    assert await gateway.store.installation() == installation
    assert gateway.catalog.is_server_ready()
    assert errors(caplog) == []
    with pytest.raises(ModelNotFound):
        gateway.catalog.resolve("b", 1)


async def test_what_a_newer_qinfer_wrote_is_not_lost(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """It can't be read here, and is not to be replaced."""
    await gateway.write("a")
    newer = b'{"v": 99}'
    await gateway.store.client.hset(keys.config("a"), "model", newer)
    caplog.clear()

    await gateway.catalog.refresh()

    assert await gateway.store.client.hget(keys.config("a"), "model") == newer
    assert not [record for record in errors(caplog) if "lost" in record.message]


def test_nothing_is_lost_for_who_knew_nothing() -> None:
    assert loss(InstallationState(), InstallationState(installation="x")) is None
    assert loss(InstallationState(installation="x"), InstallationState(installation="x")) is None


def test_data_with_another_id_is_another() -> None:
    before = InstallationState(installation="x", desired={"a": DesiredState("a", 1)}, settings={"s": "1"})

    found = loss(before, InstallationState(installation="y", desired={"b": DesiredState("b", 1)}))

    assert found is not None
    assert (found.whole, found.wishes, found.configs, found.settings) == (True, ("a",), (), ("s",))
