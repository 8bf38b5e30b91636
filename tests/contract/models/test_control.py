"""The control contract on each server, as two processes see it."""

import asyncio

import msgspec
import pytest

from qinfer.core.settings import LimitSettings, RedisSettings
from qinfer.errors import BrokerUnavailable
from qinfer.models.catalog import Catalog
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.installation import is_claimed, read_snapshot, write_model
from qinfer.models.readiness import Pin
from qinfer.models.repository.open import Repositories
from qinfer.models.state import (
    SCALED_DOWN,
    SCALED_UP,
    DesiredState,
    ScalerRecord,
    Speed,
    State,
    StoredModel,
    VersionState,
    WorkerRecord,
)
from qinfer.models.store import ControlStore
from qinfer.models.sync import sync
from qinfer.observe.logs import RecentLine, WorkerLog
from qinfer.queue import keys
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from qinfer.wire.versions import encode_document
from tests.contract.conftest import ControlPair, RedisQueue
from tests.support.servers.servers import free_port

LONG_S, SHORT_S = 30.0, 0.05
STORED = StoredModel(
    model="m", generation=3, config='{"name":"m"}', versions=(1, 20), content_hash="h", error="é\n'", min_workers=0
)
WORKER = WorkerRecord(
    id="w1",
    started_at=12.5,
    models={"m": {1: VersionState(State.READY, 3), 20: VersionState(State.UNAVAILABLE, 3, "no file")}},
    executing=7,
    speeds={"m": {1: 123.5}},
)


async def test_desired_state_is_seen_by_all(stores: ControlPair) -> None:
    """What one writes the other reads, model by model."""
    await stores.one.set_desired(DesiredState("a", 1))
    await stores.one.set_desired(DesiredState("b", 2, load=False))

    assert await stores.other.desired() == {"a": DesiredState("a", 1), "b": DesiredState("b", 2, load=False)}


async def test_an_older_wish_replaces_no_newer_one(stores: ControlPair) -> None:
    """A slow writer can't undo what a faster one wrote; the same generation may change its action."""
    await stores.one.set_desired(DesiredState("m", 5))
    await stores.other.set_desired(DesiredState("m", 4))
    await stores.other.set_desired(DesiredState("m", 5, load=False))

    assert await stores.one.desired() == {"m": DesiredState("m", 5, load=False)}


async def test_a_model_comes_back_as_it_was_put(stores: ControlPair) -> None:
    """Every field survives."""
    assert await stores.one.model("m") is None
    assert await stores.one.put_model(STORED)

    assert await stores.other.model("m") == STORED


@pytest.mark.parametrize("generation", [2, 3])
async def test_the_first_writer_of_a_generation_wins(stores: ControlPair, generation: int) -> None:
    """An equal or older generation is refused, and its writer learns it."""
    await stores.one.put_model(STORED)

    late = StoredModel(model="m", generation=generation, config="{}", versions=())

    assert not await stores.other.put_model(late)
    assert await stores.one.model("m") == STORED


async def test_models_are_read_together(stores: ControlPair) -> None:
    """Each by its name; those that nobody has stored are left out."""
    second = msgspec.structs.replace(STORED, model="second", generation=1)
    await stores.one.put_model(STORED)
    await stores.one.put_model(second)

    assert await stores.other.models(["second", "never known", "m"]) == {"second": second, "m": STORED}
    assert await stores.other.models([]) == {}


async def test_a_worker_is_live_while_it_beats(stores: ControlPair) -> None:
    """Its last record is what others see, until it retires."""
    await stores.one.heartbeat(WORKER, LONG_S)
    await stores.one.heartbeat(WorkerRecord(id="w2", started_at=1.0, models={}), LONG_S)

    assert sorted(await stores.other.workers(), key=lambda w: w.id)[0] == WORKER

    await stores.one.retire("w1")

    assert [worker.id for worker in await stores.other.workers()] == ["w2"]


async def test_a_silent_worker_disappears(stores: ControlPair) -> None:
    """Its record ends with its time to live, and the other worker stays."""
    await stores.one.heartbeat(WORKER, 0.001)
    await stores.one.heartbeat(WorkerRecord(id="w2", started_at=1.0, models={}), LONG_S)

    async with asyncio.timeout(LONG_S):
        while len(live := await stores.other.workers()) > 1:  # noqa: ASYNC110 (see below)
            await asyncio.sleep(0)  # the server ends it, and announces nothing

    assert [worker.id for worker in live] == ["w2"]


async def test_only_a_live_worker_is_asked_to_drain(stores: ControlPair) -> None:
    """The next heartbeat of a live worker says by which key; no trace is left of a dead one."""
    assert await stores.one.heartbeat(WORKER, LONG_S) is None
    assert await stores.other.ask_drain("w1", "root")
    assert not await stores.other.ask_drain("gone", "root")

    assert await stores.one.heartbeat(WORKER, LONG_S) == "root"
    assert not await stores.one.client.exists(keys.worker("gone"))


async def test_a_log_outlives_its_worker(stores: ControlPair) -> None:
    log = WorkerLog([RecentLine(at="", level="WARNING", logger="", event="é\n", about={"a": "b"})] * 2)
    await stores.one.put_worker_log("w1", log, LONG_S)
    await stores.one.retire("w1")

    assert await stores.other.worker_log("w1") == log.lines
    assert await stores.other.worker_log("w2") == []
    assert 0 < await stores.one.client.pttl(keys.worker_log("w1")) <= LONG_S * 1000


async def test_a_speed_outlives_its_worker(stores: ControlPair) -> None:
    """The last one counts; each version has its own."""
    assert await stores.one.speeds([("m", 1)]) == {}
    await stores.one.put_speed("m", 1, Speed(2.5))
    await stores.one.put_speed("m", 2, Speed(7.0))
    await stores.other.put_speed("m", 1, Speed(3.5, 12.25))

    speeds = {("m", 1): Speed(3.5, 12.25), ("m", 2): Speed(7.0)}
    assert await stores.one.speeds([("m", 2), ("m", 3), ("other", 1), ("m", 1)]) == speeds


async def test_a_wake_before_the_wait_counts(stores: ControlPair) -> None:
    """Nothing that happens between reading and waiting is missed."""
    await stores.other.wait(SHORT_S)
    await stores.one.wake()

    async with asyncio.timeout(LONG_S):
        await stores.other.wait(2 * LONG_S)


async def test_a_wake_ends_a_wait(stores: ControlPair) -> None:
    """Everyone who waits goes on at once."""
    await stores.one.wait(SHORT_S)
    await stores.other.wait(SHORT_S)

    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        group.create_task(stores.one.wait(2 * LONG_S))
        group.create_task(stores.other.wait(2 * LONG_S))
        await asyncio.sleep(0)
        await stores.one.wake()


async def test_a_wake_is_seen_once(stores: ControlPair) -> None:
    """After it the next wait lasts until its timeout."""
    await stores.one.wake()
    await stores.other.wait(LONG_S)
    loop = asyncio.get_running_loop()

    before_s = loop.time()
    await stores.other.wait(SHORT_S)

    assert loop.time() - before_s >= SHORT_S * 0.9


async def test_statistics_add_up(stores: ControlPair) -> None:
    """Deltas of all workers make one total for each version."""
    await stores.one.add_stats("m", 1, {"success_count": 2, "queue:0.001": 1})
    await stores.other.add_stats("m", 1, {"success_count": 3})
    await stores.other.add_stats("m", 2, {})

    assert await stores.one.stats("m", 1) == {"success_count": 5, "queue:0.001": 1}
    assert await stores.one.stats("m", 2) == {}


async def test_of_the_last_inference_the_latest_stays(stores: ControlPair) -> None:
    """It is no sum, and a worker whose news comes late does not turn it back."""
    for store, at_ms in ((stores.one, 1_700_000_000_500), (stores.other, 1_700_000_000_700), (stores.one, 5)):
        await store.add_stats("m", 1, {"last_inference_ms": at_ms, "success_count": 1})

    assert await stores.other.stats("m", 1) == {"last_inference_ms": 1_700_000_000_700, "success_count": 3}


async def test_damaged_statistics_begin_again_and_hide_no_others(
    stores: ControlPair, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.one
    for version in (1, 2, 3):
        await store.add_stats("m", version, {"last_inference_ms": 7, "success_count": 1, "failure_count": 2})
    damage = {"success_count": "x", "last_inference_ms": "", b"\xff": "9" * 30}
    await store.client.hset(keys.stats("m", 1), mapping=damage)
    await store.client.delete(keys.stats("m", 2))
    await store.client.set(keys.stats("m", 2), "x")

    versions = [("m", 1), ("m", 2), ("m", 3)]
    damaged = [await store.all_stats(versions) for _ in range(3)][-1]
    some = [await store.some_stats(versions[:1], ("success_count", "failure_count")) for _ in range(3)][-1]
    for version in (1, 2):
        await store.add_stats("m", version, {"last_inference_ms": 9, "success_count": 5, "failure_count": 1})
    await store.client.hdel(keys.stats("m", 1), b"\xff")

    whole = {"last_inference_ms": 7, "success_count": 1, "failure_count": 2}
    assert damaged == {("m", 1): {"failure_count": 2}, ("m", 2): {}, ("m", 3): whole}
    assert some == {("m", 1): {"failure_count": 2}}
    assert await store.stats("m", 1) == {"last_inference_ms": 9, "success_count": 5, "failure_count": 3}
    assert await store.stats("m", 2) == {"last_inference_ms": 9, "success_count": 5, "failure_count": 1}
    assert len([record for record in caplog.records if record.message == "stored record unusable"]) == 4


async def test_a_damaged_record_is_logged_once_until_it_is_well(
    stores: ControlPair, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.one
    good = encode_document(DesiredState("m", 1))

    written = list[bytes]()
    for value in (b"{", b"{", b"[]", b"[]", good, b"{", b"{"):
        written.append(value)
        await store.client.hset(keys.desired(), "m", value)
        assert bool(await store.desired()) == (good in written)
    for value in (b"{", b"{", b"1"):
        await store.client.hset(keys.settings(), "logging/x", value)
        assert bool(await store.settings()) == (value == b"1")

    told = [vars(record)["whose"] for record in caplog.records if record.message == "stored record unusable"]
    assert told == ["m", "m", "m", "logging/x"]


class Repository(Repositories):
    def __init__(self, *models: StoredModel) -> None:
        self._models = models

    def scan(self) -> list[StoredModel]:
        return list(self._models)


async def test_a_pin_ends_unless_it_is_renewed(stores: ControlPair) -> None:
    """Or at once, where its holder lets it go; pins of several holders are side by side."""
    one = Pin(model="m", version=1, content_hash="sha256:1", reason="job", holder="a", expires_at=1.0)
    other = msgspec.structs.replace(one, holder="b")
    await stores.one.put_pin(one, 60.0)
    await stores.one.put_pin(other, 60.0)
    both = await stores.other.pins()

    await stores.one.put_pin(one, 0.0)

    assert both == [one, other]
    assert await stores.other.pins() == [other]


def model(content_hash: str) -> StoredModel:
    tensor = "data_type: TYPE_FP32 dims: 1"
    text = f'backend: "x" input {{ name: "i" {tensor} }} output {{ name: "o" {tensor} }}'
    return StoredModel(model="m", config=to_json(normalise(parse(text), "m")), versions=(1,), content_hash=content_hash)


async def test_concurrent_syncs_end_in_one_state(queue: RedisQueue, stores: ControlPair) -> None:
    """Gateways that start together do not fight: one configuration, its wish, and a quiet next sync."""
    delivery = await queue.connect()
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(sync(Repository(model(f"content {number % 2}")), stores[number % 2], delivery))

    stored = await stores.one.model("m")
    assert stored is not None
    assert await stores.other.desired() == {"m": DesiredState("m", stored.generation)}
    assert await delivery.depth([Lane("m", 1)]) == [0]

    (again,) = await sync(Repository(model(stored.content_hash)), stores.one, delivery)

    assert not again.changed
    assert again.generation == stored.generation


async def test_without_a_server_calls_fail_as_broker_unavailable() -> None:
    """Nobody has to know redis-py's errors."""
    settings = RedisSettings.model_validate({"url": f"redis://127.0.0.1:{free_port()}"})
    store = ControlStore(admin_client(settings))

    with pytest.raises(BrokerUnavailable):
        await store.desired()
    with pytest.raises(BrokerUnavailable):
        await store.wait(SHORT_S)
    await store.close()


async def test_a_record_that_cannot_be_read_hides_no_other(redis_queue: RedisQueue) -> None:
    """What a newer qinfer wrote in another form is skipped."""
    store = ControlStore(admin_client(redis_queue.settings))
    await store.set_desired(DesiredState("m", 1))
    await store.put_model(STORED)
    await store.put_model(msgspec.structs.replace(STORED, model="n"))
    await store.heartbeat(WORKER, LONG_S)
    await store.heartbeat(WorkerRecord(id="new", started_at=1.0, models={}), LONG_S)
    redis_queue.on_owner("HSET", keys.desired(), "new", b'{"wish": 1}')
    redis_queue.on_owner("HSET", keys.config("m"), "model", b"\xff")
    redis_queue.on_owner("HSET", keys.worker("new"), "record", b"[]")

    assert await store.desired() == {"m": DesiredState("m", 1)}
    assert await store.model("m") is None
    assert await store.models(["m", "n"]) == {"n": msgspec.structs.replace(STORED, model="n")}
    assert await store.workers() == [WORKER]
    await store.close()


async def test_the_secret_of_shared_memory_is_read_while_redis_is_full(own_redis: RedisQueue) -> None:
    """A gateway that starts then keeps tensors in its memory."""
    store = ControlStore(admin_client(own_redis.settings))
    secret = await store.segment_secret()
    with own_redis.nodes[0].client() as client:
        client.set("qinfer:large", bytes(3_000_000), ex=60)
        client.config_set("maxmemory", "2mb")

    found = await store.segment_secret()

    await store.close()
    assert found == secret != b""


async def test_addresses_of_tensors_are_announced_while_a_process_lives(own_redis: RedisQueue) -> None:
    store = ControlStore(admin_client(own_redis.settings))
    told = [asyncio.create_task(store.announce_tensors(f"gateway-{name}@10.0.0.7:8004")) for name in "ab"]

    async def known(*names: str) -> bool:
        return await store.announced_tensors() == [f"gateway-{name}@10.0.0.7:8004" for name in names]

    await eventually(lambda: known("a", "b"), description="two addresses")
    told[0].cancel()
    await eventually(lambda: known("b"), description="one address")
    told[1].cancel()
    await asyncio.gather(*told, return_exceptions=True)
    await store.close()


async def test_a_heartbeat_of_a_newer_qinfer_is_refused_clearly(
    redis_queue: RedisQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names both versions and what to upgrade; the other workers are seen."""
    store = ControlStore(admin_client(redis_queue.settings))
    await store.heartbeat(WORKER, LONG_S)
    newer = msgspec.structs.replace(WORKER, id="newer")
    await store.heartbeat(newer, LONG_S)
    document = {"wire": 2} | msgspec.to_builtins(newer)
    redis_queue.on_owner("HSET", keys.worker("newer"), "record", msgspec.json.encode(document))

    assert await store.workers() == [WORKER]

    [told] = [record for record in caplog.records if record.message == "stored record unusable"]
    assert "wire version 2" in told.__dict__["error"]
    assert "this program reads version 1: upgrade this program first" in told.__dict__["error"]
    await store.close()


async def test_many_models_are_one_round_trip(redis_queue: RedisQueue) -> None:
    """Every gateway reads them every few seconds; in a cluster it is one to each node."""
    store = ControlStore(admin_client(redis_queue.settings))
    names = [f"m{number}" for number in range(100)]
    for name in names:
        await store.put_model(msgspec.structs.replace(STORED, model=name))

    def reads() -> int:
        """What the servers have read from sockets."""
        return sum(info["total_reads_processed"] for info in redis_queue.on_every_node("INFO", "stats"))

    before = reads()
    assert (await store.models(names)).keys() == set(names)
    assert len(await store.speeds([(name, 1) for name in names])) == 0

    assert reads() - before < len(names) / 2
    await store.close()


async def test_each_who_waits_sees_every_wake(stores: ControlPair) -> None:
    """Several tasks of one process share a store: what one has seen, another has not."""

    async def see(times: int) -> int:
        for _ in range(times):
            await stores.one.wait(5.0)
        return times

    await stores.one.wake()
    async with asyncio.timeout(4.0):
        assert await asyncio.create_task(see(1)) == 1
        assert await asyncio.create_task(see(1)) == 1


async def test_signs_of_life_are_seen_while_they_hold(stores: ControlPair) -> None:
    """By program; one that is given again holds on, one that is over is gone."""
    await stores.one.report_liveness("bulk", "b@host", LONG_S)
    await stores.one.report_liveness("bulk", "a@host", LONG_S)
    await stores.one.report_liveness("bulk", "c@host", SHORT_S)
    await stores.one.report_liveness("other", "d@host", LONG_S)
    await asyncio.sleep(2 * SHORT_S)

    assert await stores.other.live_processes("bulk") == ["a@host", "b@host"]
    assert await stores.other.live_processes("nobody") == []


async def test_the_turn_to_sweep_is_one_process_s_for_a_time(stores: ControlPair) -> None:
    assert await stores.one.take_sweep(SHORT_S)

    await eventually(lambda: stores.other.take_sweep(LONG_S))
    assert not await stores.one.take_sweep(SHORT_S)


async def test_autoscalers_say_what_they_do_while_they_live(stores: ControlPair) -> None:
    """Each has a record that ends by itself, or at once; what all counted stays, and adds up."""
    record = ScalerRecord(id="b", places=("m*",), target=2, reason="23.1 s of work", work_s=23.1)
    await stores.one.put_scaler(record, {SCALED_UP: 1}, LONG_S)
    await stores.one.put_scaler(msgspec.structs.replace(record, id="a"), {SCALED_UP: 2, SCALED_DOWN: 1}, LONG_S)
    await stores.one.put_scaler(msgspec.structs.replace(record, id="c"), {}, SHORT_S)
    await asyncio.sleep(2 * SHORT_S)

    assert [one.id for one in await stores.other.scalers()] == ["a", "b"]
    assert (await stores.other.scalers())[1] == record
    await stores.other.put_scaler(record, {SCALED_DOWN: 1}, 0.0)
    assert [one.id for one in await stores.one.scalers()] == ["a"]
    assert await stores.one.scaler_counts() == {SCALED_UP: 3, SCALED_DOWN: 2}


async def test_what_a_node_has_lost_is_written_again(redis_queue: RedisQueue) -> None:
    """A gateway does it; each node of a cluster has some of the models, and other keys of those that all share."""
    store, delivery = ControlStore(admin_client(redis_queue.settings)), await redis_queue.connect()
    tensors = (f'{kind} {{ name: "{kind}" data_type: TYPE_FP32 dims: 2 }}' for kind in ("input", "output"))
    config = to_json(normalise(parse(f'backend: "stub" max_batch_size: 8 {" ".join(tensors)}'), "m"))
    for number in range(12):
        model = msgspec.structs.replace(STORED, model=f"m{number}", config=config, versions=(1,), error="")
        await write_model(model, None, store, delivery)
    await store.put_setting("logging/log_info", "false")
    catalog = Catalog(store, LimitSettings(), delivery)

    for node in redis_queue.nodes:
        await catalog.refresh()
        before = await read_snapshot(store)
        with node.client() as client:
            client.flushall()
        await catalog.refresh()
        now = await read_snapshot(store)

        assert now.installation
        assert not is_claimed(now.installation)
        assert now.settings == before.settings
        assert {name: wish.load for name, wish in now.desired.items()} == dict.fromkeys(before.desired, True)
        assert {name: one.generation for name, one in now.stored.items()} == {
            name: wish.generation for name, wish in now.desired.items()
        }
        lost = [name for name in before.stored if now.stored[name] != before.stored[name]]
        assert lost
        assert all(now.stored[name].generation > before.stored[name].generation for name in lost)
        assert all(now.stored[name].config == config for name in lost)
        assert await delivery.depth([Lane(lost[0], 1)]) == [0]
    await store.close()
