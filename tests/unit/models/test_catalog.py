"""The gateway's view of the models, and what `models sync` makes of a repository."""

import asyncio
import logging
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qinfer.core.settings import LimitSettings, RepositorySettings
from qinfer.errors import BrokerUnavailable, ModelNotFound, ModelNotReady, QinferError, SettingsError
from qinfer.models.catalog import Catalog
from qinfer.models.readiness import Capacity
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import DesiredState, ScalerRecord, Speed, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.models.sync import SyncedModel, start, sync
from qinfer.observe.stats import Objective
from qinfer.queue import keys
from qinfer.queue.entries import Lane, bulk_lanes
from qinfer.queue.lanes import Queue
from qinfer.wire.versions import encode_document
from tests.support.servers.servers import Database

CONFIG = """
backend: "onnxruntime"
version_policy { all { } }
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
TTL_S = 60.0


class Stack:
    """A repository on disk, a store, and a catalog."""

    def __init__(self, path: Path, store: ControlStore, delivery: Queue) -> None:
        self.path = path
        self.repository = open_repositories(RepositorySettings(path=str(path), autocomplete=False))
        self.store, self.delivery = store, delivery
        self.catalog = Catalog(self.store, LimitSettings())

    def write(self, name: str, *versions: int, config: str = CONFIG) -> None:
        for version in versions:
            (self.path / name / str(version)).mkdir(parents=True, exist_ok=True)
        (self.path / name).mkdir(exist_ok=True)
        (self.path / name / "config.pbtxt").write_text(config)

    async def sync(self) -> dict[str, SyncedModel]:
        return {model.model: model for model in await sync(self.repository, self.store, self.delivery)}

    async def load(self, model: str, *versions: int, state: State = State.READY, worker: str = "w") -> None:
        """Pretends that a worker has the versions, at the generation desired."""
        generation = (await self.store.desired())[model].generation
        states = {version: VersionState(state, generation) for version in versions}
        await self.store.heartbeat(WorkerRecord(id=worker, started_at=0.0, models={model: states}), TTL_S)
        await self.catalog.refresh()


@pytest.fixture
def stack(tmp_path: Path, store: ControlStore, delivery: Queue) -> Stack:
    return Stack(tmp_path, store, delivery)


def refusal(catalog: Catalog, model: str, version: int) -> QinferError:
    with pytest.raises(QinferError) as caught:
        catalog.resolve(model, version)
    return caught.value


async def test_a_ready_version_is_resolved(stack: Stack) -> None:
    """By its number, with what a request needs to be sent."""
    stack.write("m", 1)
    generation = (await stack.sync())["m"].generation
    await stack.load("m", 1)

    served = stack.catalog.resolve("m", 1)

    assert (served.version, served.generation, served.lane) == (1, generation, Lane("m", 1, "p1"))
    assert served.spec.inputs[0].name == "x"
    assert stack.catalog.is_server_ready()


async def test_without_a_version_the_highest_ready_one_answers(stack: Stack) -> None:
    """Not the highest that exists."""
    stack.write("m", 1, 2, 10)
    await stack.sync()
    await stack.load("m", 1, 2)

    assert stack.catalog.resolve("m", 0).version == 2
    assert stack.catalog.ready_versions("m") == (1, 2)
    assert stack.catalog.readiness() == {("m", 1): True, ("m", 2): True, ("m", 10): False}
    assert not stack.catalog.is_server_ready()


async def test_counts_name_only_what_there_is(stack: Stack) -> None:
    """The highest version where none is asked for, or none that there is: clients make no series of what they guess."""
    stack.write("m", 1, 2)
    await stack.sync()
    await stack.catalog.refresh()

    assert [stack.catalog.named("m", version) for version in (0, 1, 7)] == [("m", 2), ("m", 1), ("m", 2)]
    assert stack.catalog.named("guess", 1) == ("", 0)


async def test_a_model_names_its_objective(stack: Stack) -> None:
    """Or has the server's."""
    named = 'parameters { key: "qinfer.slo_latency_s" value { string_value: "0.2" } }'
    stack.write("m", 1, config=CONFIG + named)
    stack.write("n", 1)
    await stack.sync()
    await stack.catalog.refresh()

    assert stack.catalog.objectives(Objective(1.0, 0.99)) == {
        ("m", 1): Objective(0.2, 0.99),
        ("n", 1): Objective(1.0, 0.99),
    }


async def test_a_server_that_has_started_stays_so(stack: Stack) -> None:
    """Models that fail later, and workers that are gone, take no gateway out of its load balancer."""
    stack.write("m", 1)
    await stack.sync()
    before = stack.catalog.has_started()
    await stack.load("m", 1)
    loaded = stack.catalog.has_started()
    await stack.store.retire("w")
    await stack.catalog.refresh()

    assert (before, loaded) == (False, True)
    assert stack.catalog.ready_versions("m") == ()
    assert stack.catalog.has_started()


async def test_a_version_that_only_pins_keep_answers_those_who_name_it(stack: Stack) -> None:
    """Also where it is higher than those of the version policy: the model was rolled back."""
    stack.write("m", 1)
    generation = (await stack.sync())["m"].generation
    states = {1: VersionState(State.READY, generation), 2: VersionState(State.READY, generation, pinned=True)}
    await stack.store.heartbeat(WorkerRecord(id="w", started_at=0.0, models={"m": states}), TTL_S)

    await stack.catalog.refresh()

    assert [stack.catalog.resolve("m", version).version for version in (0, 1, 2)] == [1, 1, 2]
    assert stack.catalog.accepting("m", 0).version == 1


@pytest.mark.parametrize(
    ("model", "version", "error", "text"),
    [
        ("x", 0, ModelNotFound, "Request for unknown model: 'x' is not found"),
        ("x", 3, ModelNotFound, "Request for unknown model: 'x' is not found"),
        ("m", 3, ModelNotFound, "Request for unknown model: 'm' version 3 is not found"),
        ("m", 1, ModelNotReady, "Request for unknown model: 'm' version 1 is not at ready state"),
        ("m", 0, ModelNotFound, "Request for unknown model: 'm' has no available versions"),
    ],
)
async def test_refusals_are_tritons(
    stack: Stack, model: str, version: int, error: type[QinferError], text: str
) -> None:
    """Class and text of reference §1.3."""
    stack.write("m", 1)
    await stack.sync()
    await stack.load("m", 1, state=State.LOADING)

    caught = refusal(stack.catalog, model, version)

    assert type(caught) is error
    assert caught.message == text


async def test_the_configuration_is_shown_of_what_can_be_asked(stack: Stack) -> None:
    """GET …/config of a version that is not READY is refused as its requests are."""
    stack.write("m", 1)
    await stack.sync()
    await stack.catalog.refresh()

    with pytest.raises(ModelNotReady):
        stack.catalog.config_json("m", 1)

    await stack.load("m", 1)

    assert '"name":"m"' in stack.catalog.config_json("m", 0)


async def test_a_retired_worker_takes_its_models_with_it(stack: Stack) -> None:
    """At the next refresh."""
    stack.write("m", 1)
    await stack.sync()
    await stack.load("m", 1)

    await stack.store.retire("w")
    await stack.catalog.refresh()

    assert isinstance(refusal(stack.catalog, "m", 1), ModelNotReady)


async def test_a_reload_keeps_the_old_spec_until_the_new_generation_is_loaded(stack: Stack) -> None:
    """Requests are checked against what is loaded."""
    stack.write("m", 1)
    await stack.sync()
    await stack.load("m", 1)

    stack.write("m", 1, config=CONFIG.replace('"x"', '"z"'))
    await stack.sync()
    await stack.catalog.refresh()

    assert stack.catalog.resolve("m", 1).spec.inputs[0].name == "x"

    await stack.load("m", 1)

    assert stack.catalog.resolve("m", 1).spec.inputs[0].name == "z"


async def test_a_fresh_gateway_stamps_the_generation_of_the_spec_it_has(stack: Stack) -> None:
    """A worker that has not loaded it yet sees that, and checks the request again."""
    stack.write("m", 1)
    await stack.sync()
    await stack.load("m", 1)
    stack.write("m", 1, config=CONFIG.replace('"x"', '"z"'))
    newest = (await stack.sync())["m"].generation

    fresh = Catalog(stack.store, LimitSettings())
    await fresh.refresh()

    served = fresh.resolve("m", 1)
    assert (served.spec.inputs[0].name, served.generation) == ("z", newest)


async def test_what_is_served_stays_when_its_new_configuration_can_not_be_used(stack: Stack) -> None:
    """A runtime completes a configuration after it is stored: when that fails, workers serve the old one on."""
    stack.write("m", 1)
    await stack.sync()
    await stack.load("m", 1)
    good = await stack.store.model("m")
    assert good is not None

    await stack.store.put_model(
        msgspec.structs.replace(good, generation=good.generation + 1, config="", error="no such module")
    )
    await stack.catalog.refresh()

    assert stack.catalog.resolve("m", 1).generation == good.generation
    assert stack.catalog.config_json("m", 1) == good.config
    assert stack.catalog.lanes("m", 1) == (Lane("m", 1),)


async def test_a_configuration_that_can_not_be_used_is_logged_once(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    stack.write("m", 1)
    await stack.sync()
    [stored] = (await stack.store.models(["m"])).values()
    for config in ("{", "{", "["):
        damaged = encode_document(msgspec.structs.replace(stored, config=config))
        await stack.store.client.hset(keys.config("m"), "model", damaged)
        await stack.catalog.refresh()

    assert [record.message for record in caplog.records] == ["stored configuration unusable"] * 2


class Hasty(ControlStore):
    """A store in which a model is reloaded at the moment at which its configurations have been read."""

    reload: StoredModel | None = None

    async def models(self, names: Collection[str]) -> dict[str, StoredModel]:
        read = await super().models(names)
        if self.reload is not None:
            await self.put_model(self.reload)
            states = {1: VersionState(State.READY, self.reload.generation)}
            await self.heartbeat(WorkerRecord(id="w", started_at=0.0, models={self.reload.model: states}), TTL_S)
        return read


async def test_a_reload_while_the_store_is_read_makes_no_gap(database: Database, stack: Stack) -> None:
    """Workers must not be seen ahead of the configuration that they have."""
    stack.store = store = database.store(Hasty)
    stack.catalog = Catalog(store, LimitSettings())
    stack.write("m", 1)
    await stack.sync()
    await stack.load("m", 1)
    good = await store.model("m")
    assert good is not None

    store.reload = msgspec.structs.replace(good, generation=good.generation + 1)
    await stack.catalog.refresh()

    assert stack.catalog.resolve("m", 1).version == 1


async def test_before_the_first_refresh_nothing_is_ready(stack: Stack) -> None:
    """A gateway that has seen nothing yet must get no traffic."""
    assert not stack.catalog.is_server_ready()

    await stack.catalog.refresh()

    assert stack.catalog.is_server_ready()


async def test_a_bad_model_is_known_and_makes_the_server_not_ready(stack: Stack) -> None:
    """Its error is kept, and the other model is served."""
    stack.write("bad", 1, config="max_batch: 1")
    stack.write("m", 1)
    synced = await stack.sync()
    await stack.load("m", 1)

    assert "line 1" in synced["bad"].error
    assert stack.catalog.known() == ("bad", "m")
    assert "line 1" in stack.catalog.status("bad").error
    assert not stack.catalog.is_server_ready()
    assert stack.catalog.resolve("m", 1).version == 1


class Absent(ControlStore):
    """A store that goes away and comes back, and says when it was asked."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.is_away = False
        self.asked = asyncio.Event()

    async def desired(self) -> dict[str, DesiredState]:
        self.asked.set()
        if self.is_away:
            raise BrokerUnavailable("gone")
        return await super().desired()


async def test_the_last_view_serves_while_the_store_is_away(
    database: Database, stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """`run` survives it, and says so once."""
    store = database.store(Absent)
    stack.store, stack.catalog = store, Catalog(store, LimitSettings())
    stack.write("m", 1)
    await stack.sync()
    await stack.load("m", 1)
    store.is_away = True
    store.asked.clear()

    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(stack.catalog.run())
        await store.wake()
        await store.asked.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    assert stack.catalog.resolve("m", 1).version == 1
    assert [r.message for r in caplog.records] == ["control store unreachable, serving the last view"]


async def test_changes_are_logged_once(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """Not at every refresh."""
    stack.write("m", 1)
    await stack.sync()
    with caplog.at_level(logging.INFO, "qinfer.models.catalog"):
        await stack.load("m", 1)
        await stack.catalog.refresh()
        await stack.catalog.refresh()

    assert [r.message for r in caplog.records] == ["model version state"]


@pytest.mark.parametrize("version", [0, 1])
async def test_a_configuration_without_versions_is_a_refusal(stack: Stack, version: int) -> None:
    """As a damaged one has none."""
    stack.write("m", 1)
    await stack.sync()
    [stored] = (await stack.store.models(["m"])).values()
    damaged = encode_document(msgspec.structs.replace(stored, versions=()))
    await stack.store.client.hset(keys.config("m"), "model", damaged)
    await stack.catalog.refresh()

    with pytest.raises((ModelNotFound, ModelNotReady)):
        stack.catalog.asked("m", version)


@pytest.mark.parametrize(("asked", "version"), [(0, 2), (1, 1), (2, 2)])
async def test_what_may_wait_is_accepted_without_a_worker(stack: Stack, asked: int, version: int) -> None:
    """Version 0 is the highest that can be loaded, until one is READY."""
    stack.write("m", 1, 2)
    await stack.sync()
    await stack.catalog.refresh()

    served = stack.catalog.accepting("m", asked)

    assert (served.version, served.lane) == (version, Lane("m", version))
    assert isinstance(refusal(stack.catalog, "m", 1), ModelNotReady)

    await stack.load("m", 1)

    assert stack.catalog.accepting("m", 0).version == 1


async def test_what_is_asked_waits_for_a_worker(stack: Stack) -> None:
    """As long as the setting says, or an autoscaler takes; not at all once a worker has it."""
    stack.write("m", 1)
    await stack.sync()
    await stack.catalog.refresh()
    assert (stack.catalog.asked("m", 0).version, stack.catalog.asked("m", 1).wait_s) == (1, 10.0)

    await stack.store.put_scaler(ScalerRecord(id="s", places=("m*",), max_workers=2), {}, TTL_S)
    await stack.catalog.refresh()
    assert stack.catalog.asked("m", 1).wait_s == LimitSettings().cold_start_s + 10.0

    await stack.load("m", 1)
    assert stack.catalog.asked("m", 1) is stack.catalog.resolve("m", 0)
    assert stack.catalog.asked("m", 1).wait_s == 0


async def test_nobody_waits_where_that_is_set(stack: Stack) -> None:
    stack.catalog = Catalog(stack.store, LimitSettings(wait_for_workers_s=0))
    stack.write("m", 1)
    await stack.sync()
    await stack.catalog.refresh()

    for version in (0, 1):
        with pytest.raises(ModelNotReady):
            stack.catalog.asked("m", version)


async def test_nobody_waits_for_what_no_worker_can_load(stack: Stack) -> None:
    """The refusal says why; of a model that is not to be loaded it stays what it was."""
    stack.write("m", 1)
    generation = (await stack.sync())["m"].generation
    failed = {"m": {1: VersionState(State.UNAVAILABLE, generation, "no such file", generation)}}
    await stack.store.heartbeat(WorkerRecord(id="w", started_at=0.0, models=failed), TTL_S)
    await stack.catalog.refresh()

    for version in (0, 1):
        with pytest.raises(ModelNotReady, match=r": no such file$"):
            stack.catalog.asked("m", version)

    await stack.store.set_desired(DesiredState("m", generation, load=False))
    await stack.catalog.refresh()
    with pytest.raises(ModelNotFound, match=r"'m' has no available versions$"):
        stack.catalog.asked("m", 0)


async def test_a_version_that_was_unloaded_is_not_ready(stack: Stack) -> None:
    """As in Triton; one that was never there is not found."""
    stack.write("m", 1, 2)
    await stack.sync()
    await stack.load("m", 1, 2)
    stack.write("m", 1, 2, config=CONFIG.replace("all { }", "specific { versions: 2 }"))
    await stack.sync()
    await stack.load("m", 2)

    with pytest.raises(ModelNotReady, match="Request for unknown model: 'm' version 1 is not at ready state"):
        stack.catalog.asked("m", 1)
    with pytest.raises(ModelNotFound, match="Request for unknown model: 'm' version 3 is not found"):
        stack.catalog.asked("m", 3)


async def test_what_nobody_can_load_accepts_nothing(stack: Stack) -> None:
    """A request would wait for ever."""
    stack.write("m", 1)
    stack.write("bad", 1, config="max_batch: 1")
    await stack.sync()
    await stack.load("m", 1, state=State.UNAVAILABLE)

    with pytest.raises(ModelNotReady, match="Request for unknown model: 'm' version 1 is not at ready state"):
        stack.catalog.accepting("m", 1)
    with pytest.raises(ModelNotReady, match=r"Request for unknown model: 'bad' has no available versions: .*max_batch"):
        stack.catalog.accepting("bad", 0)
    with pytest.raises(ModelNotFound, match="Request for unknown model: 'x' is not found"):
        stack.catalog.accepting("x", 0)


async def test_speeds_of_live_workers_add_up(stack: Stack) -> None:
    """What a worker has not READY, or has not measured, makes no capacity."""
    stack.write("m", 1)
    generation = (await stack.sync())["m"].generation
    ready, loading = ({"m": {1: VersionState(state, generation)}} for state in (State.READY, State.LOADING))
    for worker_id, models, rps in (("a", ready, 10.0), ("b", ready, 5.0), ("c", loading, 7.0)):
        record = WorkerRecord(id=worker_id, started_at=0.0, models=models, best_speeds={"m": {1: rps}})
        await stack.store.heartbeat(record, TTL_S)
    await stack.catalog.refresh()
    known = stack.catalog.capacity("m", 1)

    await stack.store.heartbeat(WorkerRecord(id="d", started_at=0.0, models=ready), TTL_S)
    await stack.catalog.refresh()

    assert known == Capacity(15.0, 0.0, 2)
    assert stack.catalog.capacity("m", 1) == Capacity(0.0, 0.0, 3)
    assert stack.catalog.capacity("unknown", 1) == Capacity()


@pytest.mark.parametrize("load_s", [12.0, 0.0])
async def test_without_a_worker_the_last_speed_counts(stack: Stack, load_s: float) -> None:
    """And the time that a load took, if it was measured: an assumption refuses nothing."""
    stack.write("m", 1)
    await stack.sync()
    await stack.store.put_speed("m", 1, Speed(8.0, load_s, 10.0))
    await stack.catalog.refresh()

    assert stack.catalog.capacity("m", 1) == Capacity(10.0, load_s, 0)


async def test_sync_is_idempotent(stack: Stack) -> None:
    """The same repository changes nothing the second time, and wakes nobody."""
    stack.write("m", 1)

    first, second = await stack.sync(), await stack.sync()

    assert first["m"].changed
    assert not second["m"].changed
    assert first["m"].generation == second["m"].generation


async def test_a_changed_file_raises_the_generation(stack: Stack) -> None:
    """So that workers load it again."""
    stack.write("m", 1)
    first = await stack.sync()

    (stack.path / "m" / "1" / "weights.bin").write_bytes(b"1234")
    second = await stack.sync()

    assert second["m"].changed
    assert second["m"].generation > first["m"].generation


async def test_an_empty_repository_unloads_nothing_unasked(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """Mostly it is one that is not mounted: a sync says so, a gateway that joins others leaves what they serve."""
    stack.write("m", 1)
    await stack.sync()
    shutil.rmtree(stack.path / "m")

    with pytest.raises(SettingsError, match=r"no model, but 1 should be served \(m\).*--may-empty"):
        await sync(stack.repository, stack.store, stack.delivery, may_empty=False)
    assert await start(stack.repository, stack.store, stack.delivery, RepositorySettings()) == []
    assert "models left unchanged" in caplog.messages
    assert (await stack.store.desired())["m"].load

    again = await start(stack.repository, stack.store, stack.delivery, RepositorySettings(), again=True)
    assert [(model.model, model.removed) for model in again] == [("m", True)]
    assert not (await stack.store.desired())["m"].load
    assert await sync(stack.repository, stack.store, stack.delivery, may_empty=False) == []  # nothing is served now


async def test_a_model_that_is_gone_is_forgotten(stack: Stack) -> None:
    """And one that comes back has a newer generation than before."""
    stack.write("m", 1)
    first = await stack.sync()
    (stack.path / "m").rename(stack.path / ".m")

    gone = await stack.sync()
    (stack.path / ".m").rename(stack.path / "m")
    back = await stack.sync()

    assert gone["m"].removed
    assert back["m"].generation > first["m"].generation


async def test_lanes_exist_before_a_model_is_desired(database: Database, stack: Stack) -> None:
    """An admitted request always has a queue."""
    stack.write("m", 1)
    ensured: list[Lane] = []

    class Spy(Queue):
        async def ensure(self, lanes: Sequence[Lane]) -> None:
            assert await stack.store.desired() == {}
            ensured.extend(lanes)

    await sync(stack.repository, stack.store, await database.delivery(Spy))

    assert ensured == [Lane("m", 1, "p1"), *bulk_lanes("m", 1)]


async def test_every_level_has_its_lanes(stack: Stack) -> None:
    """They are made by the sync, known to the catalog, and where requests go."""
    policy = "priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 9 } }"
    levels = f"dynamic_batching {{ priority_levels: 2 default_priority_level: 2 {policy} }}"
    stack.write("m", 1, config=f"{CONFIG} max_batch_size: 8 {levels}")
    stack.write("free", 1, config=f'{CONFIG} parameters {{ key: "qinfer.min_workers" value {{ string_value: "0" }} }}')
    await stack.sync()
    await stack.catalog.refresh()

    lanes = stack.catalog.lanes("m", 1)

    assert [lane.name for lane in lanes] == ["p1", "p1.delayed", "p2"]
    assert await stack.delivery.depth(lanes) == [0, 0, 0]
    assert stack.catalog.accepting("m", 0).lane == Lane("m", 1, "p2")
    assert stack.catalog.lanes("unknown", 1) == (Lane("unknown", 1),)
    assert stack.catalog.resolve("free", 1).version == 1
