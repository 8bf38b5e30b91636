"""Load, unload and index as use cases: with repositories and workers that do what a test says."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import msgspec
import pytest

from qinfer.core.settings import LimitSettings, RepositorySettings
from qinfer.errors import (
    BrokerUnavailable,
    ControlDisabled,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    QinferError,
    VersionsFailed,
)
from qinfer.models.catalog import Catalog
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.control import ModelControl
from qinfer.models.installation import Completion, put_completion
from qinfer.models.repository.open import Repositories
from qinfer.models.state import ErrorKind, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer.wire.bodies import ModelIndexEntry

CONFIG = """
backend: "stub" max_batch_size: {rows}
input {{ name: "x" data_type: TYPE_FP32 dims: 2 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 2 }}
"""
TTL_S = 600.0


def found(name: str = "m", *, rows: int = 8, digest: str = "1", versions: tuple[int, ...] = (1,)) -> StoredModel:
    config = normalise(parse(CONFIG.format(rows=rows)), name)
    return StoredModel(model=name, config=to_json(config), versions=versions, content_hash=digest)


class Source(Repositories):
    """Repositories and an overlay that hold what a test put there."""

    def __init__(self) -> None:
        self.models: dict[str, StoredModel] = {}
        self.overlay: dict[str, Mapping[str, bytes]] = {}
        self._puts = 0

    def put(self, model: StoredModel) -> None:
        self.models[model.model] = model

    def names(self) -> list[str]:
        return sorted(self.models)

    def scan(self) -> list[StoredModel]:
        return [self.models[name] for name in self.names()]

    def read(self, name: str, override: str = "", location: str = "") -> StoredModel:
        if location:
            return msgspec.structs.replace(found(name, rows=int(override), digest=location), location=location)
        if name not in self.models:
            raise ModelNotFound("no repository has it")
        return found(name, rows=int(override), digest=override) if override else self.models[name]

    def put_files(self, model: str, files: Mapping[str, bytes]) -> str:
        self._puts += 1
        location = f"{model}/{self._puts}"
        self.overlay[location] = files
        return location

    def drop_files(self, location: str) -> None:
        self.overlay.pop(location, None)


class Scene:
    """A gateway's side of control, and a worker that loads what it is told to, or fails to, when a test says so."""

    def __init__(
        self, store: ControlStore, delivery: Queue, mode: str = "explicit", load_timeout_s: float = 20.0
    ) -> None:
        self.source = Source()
        self.store, self.delivery = store, delivery
        self.catalog = Catalog(self.store, LimitSettings())
        settings = RepositorySettings.model_validate({"control_mode": mode, "load_timeout_s": load_timeout_s})
        self.control = ModelControl(self.source, self.store, delivery, settings, self.catalog.refresh)
        self.reason: dict[str, str] = {}
        """Worker → why it can't load anything."""
        self.loads: list[int] = []

    async def is_desired(self, after: int = 0) -> bool:
        wish = (await self.store.desired()).get("m")
        return wish is not None and wish.generation > after

    async def has_workers(self, count: int) -> bool:
        return len(await self.store.workers()) == count

    async def stored(self, model: str = "m") -> StoredModel:
        stored = await self.store.model(model)
        assert stored is not None
        return stored

    async def report(self, worker: str, models: Mapping[str, Mapping[int, VersionState]]) -> None:
        record = WorkerRecord(id=worker, started_at=0.0, models={name: dict(of) for name, of in models.items()})
        await self.store.heartbeat(record, TTL_S)
        await self.store.wake()

    async def work(self, worker: str) -> None:
        """Plays a worker: loads each new generation at once, or fails and keeps what it has."""
        states: dict[str, dict[int, VersionState]] = {}
        await self.report(worker, states)
        while True:
            before_look = {name: dict(of) for name, of in states.items()}
            for name, wish in (await self.store.desired()).items():
                stored = await self.stored(name)
                if not wish.load:
                    states.pop(name, None)
                    continue
                for version in () if stored.pending else stored.versions:
                    before = states.get(name, {}).get(version)
                    if before is not None and before.tried >= stored.generation:
                        continue
                    self.loads.append(stored.generation)
                    states.setdefault(name, {})[version] = self._loaded(worker, stored, before)
            if states != before_look:
                await self.report(worker, states)
            await self.store.wait(TTL_S)

    def _loaded(self, worker: str, stored: StoredModel, before: VersionState | None) -> VersionState:
        reason = "" if stored.config and '"max_batch_size":8' in stored.config else self.reason.get(worker, "")
        if not reason:
            return VersionState(State.READY, stored.generation, tried=stored.generation)
        if before is not None and before.state is State.READY:
            return VersionState(State.READY, before.generation, reason, stored.generation)
        return VersionState(State.UNAVAILABLE, stored.generation, reason, stored.generation)


@pytest.fixture
async def scene(store: ControlStore, delivery: Queue) -> AsyncIterator[Scene]:
    scene = Scene(store, delivery)
    scene.source.put(found())
    worker = asyncio.create_task(scene.work("w1"))
    await eventually(lambda: scene.has_workers(1))
    yield scene
    worker.cancel()


async def refused(call: "asyncio.Future[None] | asyncio.Task[None]") -> QinferError:
    with pytest.raises(QinferError) as caught:
        await call
    return caught.value


def load(scene: Scene, model: str = "m", *arguments: object) -> "asyncio.Task[None]":
    return asyncio.create_task(scene.control.load(model, *arguments))  # type: ignore[arg-type]  # as tests give them


async def test_a_load_returns_when_the_model_can_be_asked(scene: Scene) -> None:
    """On this gateway at once: a client that asks next must not be refused."""
    await scene.control.load("m")

    assert scene.catalog.resolve("m", 0).version == 1
    assert await scene.control.index() == [ModelIndexEntry(name="m", version="1", state=State.READY)]


async def test_an_unchanged_model_is_not_loaded_again(scene: Scene) -> None:
    """Triton's no-op."""
    await scene.control.load("m")
    await scene.control.load("m")

    assert len(scene.loads) == 1


async def test_a_changed_model_is_loaded_again(scene: Scene) -> None:
    """By its files, and by a configuration that comes with the request, which stays until the model is unloaded."""
    await scene.control.load("m")
    scene.source.put(found(digest="2"))
    await scene.control.load("m")
    await scene.control.load("m", "4")
    await scene.control.load("m")
    overridden = await scene.stored()
    await scene.control.unload("m")
    await scene.control.load("m")

    assert len(scene.loads) == 4
    assert '"max_batch_size":4' in overridden.config
    assert '"max_batch_size":8' in (await scene.stored()).config


@pytest.mark.parametrize(
    ("model", "arguments", "error", "text"),
    [
        ("x", (), ModelLoadFailed, "failed to load 'x', failed to poll from model repository"),
        ("bad", (), ModelLoadFailed, "failed to load 'bad', failed to poll from model repository: line 1"),
        ("none", (), ModelLoadFailed, "failed to load 'none', no version is available"),
        ("", (), InvalidRequest, "Model name cannot be empty"),
        ("../m", (), InvalidRequest, "model name must not contain path traversal characters"),
        ("m", (None, {"1/f": b""}), ModelLoadFailed, "failed to load 'm', failed to poll from model repository: p"),
    ],
)
async def test_what_can_not_be_loaded_changes_nothing(
    scene: Scene, model: str, arguments: tuple[object, ...], error: type[QinferError], text: str
) -> None:
    """The texts are Triton's, with the reason behind them."""
    scene.source.put(StoredModel(model="bad", error="line 1: a version must be available"))
    scene.source.put(StoredModel(model="none", error="no version", error_kind=ErrorKind.NO_VERSION))

    caught = await refused(load(scene, model, *arguments))

    assert type(caught) is error
    assert caught.message.startswith(text)
    assert await scene.store.desired() == {}


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_only_mode_explicit_loads_on_request(store: ControlStore, delivery: Queue, mode: str) -> None:
    """Triton's text."""
    scene = Scene(store, delivery, mode)
    for call in (scene.control.load("m"), scene.control.unload("m")):
        with pytest.raises(
            ControlDisabled, match=r"^explicit model load / unload is not allowed if polling is enabled$"
        ):
            await call


async def test_a_load_that_all_workers_fail_says_why(scene: Scene) -> None:
    """And the model is not there; another try loads it anew, though nothing has changed."""
    scene.source.put(found(rows=4))
    scene.reason["w1"] = "out of memory"

    caught = await refused(load(scene))

    assert (type(caught), caught.message) == (
        VersionsFailed,
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: out of memory;",
    )
    assert await scene.control.index() == [
        ModelIndexEntry(name="m", version="1", state=State.UNAVAILABLE, reason="out of memory")
    ]
    scene.reason.clear()
    await scene.control.load("m")
    assert scene.catalog.resolve("m", 1).version == 1


async def test_one_worker_that_loads_it_is_enough(scene: Scene) -> None:
    """Though another fails."""
    scene.source.put(found(rows=4))
    scene.reason["w2"] = "needs GPU 1; this worker has no GPU"
    second = asyncio.create_task(scene.work("w2"))
    await eventually(lambda: scene.has_workers(2))

    await scene.control.load("m")

    assert scene.catalog.resolve("m", 1).version == 1
    second.cancel()


async def test_a_reload_that_fails_leaves_what_there_was(scene: Scene) -> None:
    """It serves on, its configuration is stored again for workers to come, and the files that came along are gone."""
    await scene.control.load("m")
    before = await scene.stored()
    scene.reason["w1"] = "no such operator"

    caught = await refused(load(scene, "m", "4", {"1/model.stub": b"1"}))

    after = await scene.stored()
    assert caught.message == "load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: no such operator;"
    assert (after.config, after.location) == (before.config, "")
    assert after.generation > before.generation
    assert scene.source.overlay == {}
    await scene.catalog.refresh()
    assert scene.catalog.resolve("m", 1).spec.max_batch_size == 8


async def test_files_of_a_request_are_kept_until_others_replace_them(scene: Scene) -> None:
    """Workers that join later need them."""
    await scene.control.load("m", "8", {"1/model.stub": b"1"})
    first = dict(scene.source.overlay)
    await scene.control.load("m", "8", {"1/model.stub": b"2"})
    second = dict(scene.source.overlay)
    await scene.control.load("m")

    assert [list(kept.values()) for kept in (first, second)] == [[{"1/model.stub": b"1"}], [{"1/model.stub": b"2"}]]
    assert scene.source.overlay == {}


async def test_files_of_a_load_that_another_overtook_are_removed(store: ControlStore, delivery: Queue) -> None:
    """Nobody would load them any more."""
    scene, settings = Scene(store, delivery), RepositorySettings(control_mode="explicit")
    scene.source.put(found())
    await scene.report("w1", {})
    other = ModelControl(scene.source, scene.store, scene.delivery, settings, scene.catalog.refresh)
    first = load(scene, "m", "2", {"1/model.stub": b"1"})
    await eventually(scene.is_desired)
    second = asyncio.create_task(other.load("m", "4", {"1/model.stub": b"2"}))
    await refused(first)
    worker = asyncio.create_task(scene.work("w1"))
    await second
    worker.cancel()

    assert list(scene.source.overlay) == [(await scene.stored()).location]


async def test_a_load_whose_caller_went_away_is_seen_through(store: ControlStore, delivery: Queue) -> None:
    """Above all one that fails: what was loaded before is stored again all the same."""
    scene = Scene(store, delivery)
    scene.source.put(found())
    await scene.report("w1", {})
    loading = load(scene)
    await eventually(scene.is_desired)
    first = (await scene.stored()).generation
    await scene.report("w1", {"m": {1: VersionState(State.READY, first, tried=first)}})
    await loading
    calling = load(scene, "m", "4", {"1/model.stub": b"1"})
    await eventually(lambda: scene.is_desired(after=first))

    calling.cancel()
    await asyncio.wait([calling])
    failed = VersionState(State.READY, first, "no such operator", (await scene.stored()).generation)
    await scene.report("w1", {"m": {1: failed}})

    await eventually(lambda: not scene.control._loads)
    assert calling.cancelled()
    assert '"max_batch_size":8' in (await scene.stored()).config
    assert scene.source.overlay == {}


async def test_a_load_without_workers_waits_for_one(store: ControlStore, delivery: Queue) -> None:
    """And is given up in the end, with the reason; the model stays asked for."""
    scene = Scene(store, delivery, load_timeout_s=0.05)
    scene.source.put(found())

    caught = await refused(load(scene))

    assert type(caught) is ModelNotReady
    assert caught.message == "failed to load 'm' within 0.05 s, no live worker places it; it stays requested"
    assert (await scene.store.desired())["m"].load


async def test_a_model_that_needs_no_worker_is_loaded_without(store: ControlStore, delivery: Queue) -> None:
    """`qinfer.min_workers` 0: it is ready to accept."""
    scene = Scene(store, delivery)
    config = CONFIG.format(rows=8) + 'parameters { key: "qinfer.min_workers" value { string_value: "0" } }'
    scene.source.put(StoredModel(model="m", config=to_json(normalise(parse(config), "m")), versions=(1,)))

    await scene.control.load("m")

    assert scene.catalog.resolve("m", 1).version == 1


async def test_of_two_loads_the_later_one_counts(store: ControlStore, delivery: Queue) -> None:
    """Through different gateways; the earlier one is told."""
    scene, settings = Scene(store, delivery), RepositorySettings(control_mode="explicit")
    scene.source.put(found())
    await scene.report("w1", {})
    other = ModelControl(scene.source, scene.store, scene.delivery, settings, scene.catalog.refresh)
    first = load(scene, "m", "2")
    await eventually(scene.is_desired)
    second = asyncio.create_task(other.load("m", "4"))

    assert (await refused(first)).message == "failed to load 'm', another load of it came in between"
    assert '"max_batch_size":4' in (await scene.stored()).config
    worker = asyncio.create_task(scene.work("w1"))
    await second
    worker.cancel()


async def test_a_gateway_that_ends_tells_who_waits_for_a_load(store: ControlStore, delivery: Queue) -> None:
    """The model stays asked for, and workers load it."""
    scene = Scene(store, delivery)
    scene.source.put(found())
    first = load(scene)
    await eventually(scene.is_desired)

    scene.control.cancel_loads()

    caught = await refused(first)
    assert (type(caught), caught.message) == (Overloaded, "Server exiting")
    assert (await scene.store.desired())["m"].load


async def test_an_unload_ends_a_load_under_way(store: ControlStore, delivery: Queue) -> None:
    """Nobody waits for what is not wanted any more."""
    scene = Scene(store, delivery)
    scene.source.put(found())
    first = load(scene)
    await eventually(scene.is_desired)

    await scene.control.unload("m")

    assert (await refused(first)).message == "failed to load 'm', it was unloaded meanwhile"


async def test_an_unloaded_model_is_refused_at_once(scene: Scene) -> None:
    """In Triton's words, while its worker still has it; the index says what became of it, and it can come back."""
    await scene.control.load("m")
    generation = (await scene.stored()).generation

    await scene.control.unload("m")

    with pytest.raises(ModelNotFound, match=r"^Request for unknown model: 'm' has no available versions$"):
        scene.catalog.resolve("m", 0)
    with pytest.raises(ModelNotReady, match=r"^Request for unknown model: 'm' version 1 is not at ready state$"):
        scene.catalog.resolve("m", 1)
    assert scene.catalog.is_server_ready()

    async def is_idle() -> bool:
        return not any(record.models for record in await scene.store.workers())

    await eventually(is_idle)
    assert await scene.control.index() == [
        ModelIndexEntry(name="m", version="1", state=State.UNAVAILABLE, reason="unloaded")
    ]
    assert await scene.control.index(ready=True) == []
    await scene.control.load("m")
    assert (await scene.stored()).generation > generation


async def test_unloading_what_is_not_loaded_does_nothing(scene: Scene) -> None:
    """Known or not."""
    await scene.store.exchange_installation("", "here")
    await scene.control.unload("m")
    await scene.control.unload("nobody")

    assert await scene.control.index() == [ModelIndexEntry(name="m")]


@pytest.mark.parametrize("installation", ["", "restoring:x"])
async def test_nothing_is_unloaded_while_redis_lacks_its_data(scene: Scene, installation: str) -> None:
    """The model would come back, when a gateway writes again what it knows."""
    if installation:
        await scene.store.exchange_installation("", installation)

    with pytest.raises(BrokerUnavailable, match="Redis has lost its data"):
        await scene.control.unload("m")


async def test_a_version_that_is_draining_is_unloading(scene: Scene) -> None:
    """Until its worker has let it go."""
    await scene.control.load("m")
    state = {"m": {1: VersionState(State.UNLOADING, (await scene.stored()).generation)}}
    await scene.control.unload("m")
    await scene.report("w2", state)

    assert await scene.control.index() == [ModelIndexEntry(name="m", version="1", state=State.UNLOADING)]


async def test_a_load_waits_for_the_completion_of_its_configuration(scene: Scene) -> None:
    """By a worker, under a generation of its own; the same content is not completed twice."""
    incomplete = parse('backend: "stub"')
    pending = StoredModel(model="m", config=to_json(incomplete), versions=(1,), content_hash="1", pending="stub")
    scene.source.put(pending)
    loading = load(scene)
    await eventually(scene.is_desired)
    assert (await scene.control.index())[0].state == State.LOADING
    assert "completed by a worker" in (await scene.control.index())[0].reason

    completed = Completion(config=to_json(normalise(parse(CONFIG.format(rows=8)), "m")))
    await put_completion(await scene.stored(), completed, scene.store)
    await loading
    await scene.control.unload("m")
    await scene.control.load("m")  # ends by what is stored: nobody completes it again

    assert not (await scene.stored()).pending
    assert scene.catalog.resolve("m", 1).spec.max_batch_size == 8


async def test_a_completion_that_failed_fails_the_load(scene: Scene) -> None:
    """With the model's own words."""
    scene.source.put(StoredModel(model="m", config=to_json(parse('backend: "stub"')), versions=(1,), pending="stub"))
    loading = load(scene)
    await eventually(scene.is_desired)

    await put_completion(await scene.stored(), Completion(error="name 'np' is not defined"), scene.store)

    assert (await refused(loading)).message == "load failed for model 'm': name 'np' is not defined"
