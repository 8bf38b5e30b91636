"""How a worker follows the desired state: with loads that take as long as a test wants."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest

from qinfer.core.settings import LimitSettings, WorkerSettings
from qinfer.errors import ModelFilesUnreachable, ModelLoadFailed
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.installation import Completion, find_completion
from qinfer.models.readiness import Pin
from qinfer.models.spec import Device, ModelSpec
from qinfer.models.state import DesiredState, State, StoredModel, VersionState
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.testing import eventually
from qinfer_workers.inference import models as following_models
from qinfer_workers.inference.ensembles.plans import PlannedEnsemble
from qinfer_workers.inference.loader import LoadChange, LoadedVersion, Loader, LoadKind
from qinfer_workers.inference.models import Models

HASH = "sha256:1"
CONFIG = (
    'backend: "stub" input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 2 }'
)


class Slow:
    """A loader whose loads end when a test lets them."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.began: list[str] = []
        self.executed: dict[int, str] = {}
        self.discarded: list[LoadChange] = []
        self.completion: Completion | Exception = Completion(error="not asked for")

    def hold(self, model: str) -> None:
        self.gates[model] = threading.Event()

    def load(
        self,
        spec: ModelSpec,
        version: int,
        stored: StoredModel,
        serving: LoadedVersion | None = None,
        pinned: Collection[str] = (),
        _: PlannedEnsemble | None = None,
    ) -> LoadChange:
        self.began.append(spec.name)
        if spec.name in self.gates:
            assert self.gates[spec.name].wait(20)
        if stored.content_hash == "bad":
            raise ModelLoadFailed("bad file")
        if stored.content_hash == "away" and len(self.began) < 3:
            raise ModelFilesUnreachable("can't be reached now")
        loaded = LoadedVersion(
            spec=spec,
            version=version,
            generation=stored.generation,
            identity="",
            devices=(Device(),),
            executed_hash=self.executed.get(version, HASH),
        )
        if pinned and not loaded.executes(pinned):
            raise ModelLoadFailed("other content")
        return LoadChange(kind=LoadKind.NEW, loaded=loaded)

    def complete(self, stored: StoredModel) -> Completion:
        if isinstance(self.completion, Exception):
            raise self.completion
        return self.completion

    def discard(self, change: LoadChange) -> None:
        self.discarded.append(change)


class Host:
    """Notes what is served."""

    def __init__(self) -> None:
        self.served: dict[tuple[str, int], int] = {}

    def serve(self, loaded: LoadedVersion) -> None:
        self.served[loaded.spec.name, loaded.version] = loaded.generation

    def resize(self, loaded: LoadedVersion, surplus: int) -> None:
        raise AssertionError

    async def retire(self, model: str, version: int, is_wanted: Callable[[], bool]) -> bool:
        del self.served[model, version]
        return True


class Scene:
    def __init__(self, store: ControlStore, threads: int = 4) -> None:
        self.store, self.loader, self.host = store, Slow(), Host()
        settings = WorkerSettings(models=("*",), load_threads=threads)
        self.models = Models(self.store, settings, LimitSettings(), cast("Loader", self.loader), self.host)

    async def want(
        self, name: str, generation: int = 1, *, digest: str = "", pending: str = "", version: int = 1
    ) -> None:
        config = to_json(normalise(parse(CONFIG), name))
        stored = StoredModel(name, generation, config, (version,), content_hash=digest, pending=pending)
        await self.store.put_model(stored)
        await self.store.set_desired(DesiredState(name, generation))
        await self.store.wake()

    async def unwant(self, name: str, generation: int = 1) -> None:
        await self.store.set_desired(DesiredState(name, generation, load=False))
        await self.store.wake()

    async def pin(self, content_hash: str = HASH, version: int = 1, ttl_s: float = 60.0) -> None:
        """Pins a version of the model `m`, or lets go of it."""
        pin = Pin(model="m", version=version, content_hash=content_hash, reason="job", holder="j", expires_at=1.0)
        await self.store.put_pin(pin, ttl_s)
        await self.store.wake()

    async def until(self, name: str, state: State | None) -> VersionState | None:
        def is_so() -> bool:
            found = self.models.states().get(name, {}).get(1)
            return (found.state if found else None) is state

        await eventually(is_so, description=f"{name} {state}")
        return self.models.states().get(name, {}).get(1)


@asynccontextmanager
async def following(scene: Scene) -> AsyncIterator[Scene]:
    task = asyncio.create_task(scene.models.run(lambda: None))
    try:
        yield scene
    finally:
        for gate in scene.loader.gates.values():
            gate.set()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_redis_without_its_data_unloads_nothing(store: ControlStore, caplog: pytest.LogCaptureFixture) -> None:
    """Models stay until a gateway has written again what they should be."""
    async with following(Scene(store)) as scene:
        await store.exchange_installation("", "first")
        await scene.want("kept")
        await scene.want("gone")
        await scene.until("kept", State.READY)
        await scene.until("gone", State.READY)

        await store.client.flushdb()
        await store.wake()
        await eventually(lambda: "Redis has lost its data" in caplog.text)
        await store.exchange_installation("", "restoring:second", 60.0)
        await scene.want("kept", 2)
        assert scene.host.served == {("kept", 1): 1, ("gone", 1): 1}

        await store.exchange_installation("restoring:second", "second")
        await store.wake()
        await scene.until("gone", None)
        await eventually(lambda: scene.host.served == {("kept", 1): 2})


async def test_a_lost_configuration_unloads_nothing(store: ControlStore) -> None:
    """One node of a cluster has lost its data: the wish is still there."""
    async with following(Scene(store)) as scene:
        await scene.want("m")
        await scene.until("m", State.READY)

        await store.client.delete(keys.config("m"))
        await scene.want("other")
        await scene.until("other", State.READY)

        assert scene.host.served == {("m", 1): 1, ("other", 1): 1}


async def test_a_long_load_holds_up_no_other_model(store: ControlStore) -> None:
    """Neither its load nor its unload."""
    async with following(Scene(store)) as scene:
        scene.loader.hold("slow")
        await scene.want("slow")
        await scene.until("slow", State.LOADING)

        await scene.want("quick")
        await scene.until("quick", State.READY)
        await scene.unwant("quick")
        await scene.until("quick", None)

        assert scene.models.states()["slow"][1].state is State.LOADING


async def test_loads_are_timed(store: ControlStore) -> None:
    """A version that is loaded has a time; one that is not, or is loaded no more, has none."""
    async with following(Scene(store)) as scene:
        scene.loader.hold("slow")
        await scene.want("slow")
        await scene.want("quick")
        await scene.want("broken", digest="bad")
        await scene.until("slow", State.LOADING)
        await scene.until("quick", State.READY)
        await scene.until("broken", State.UNAVAILABLE)
        during = scene.models.load_times()
        scene.loader.gates["slow"].set()
        await scene.until("slow", State.READY)
        after = scene.models.load_times()
        await scene.unwant("quick")
        await scene.until("quick", None)

        assert {name: list(versions) for name, versions in during.items()} == {"quick": [1]}
        assert min(after["slow"][1], during["quick"][1]) > 0
        assert list(scene.models.load_times()) == ["slow"]


async def test_a_pinned_version_stays_as_it_is_until_it_is_let_go(store: ControlStore) -> None:
    """The version policy has dropped it; it is not even loaded again."""
    async with following(Scene(store)) as scene:
        await scene.want("m")
        await scene.until("m", State.READY)
        await scene.pin()
        await scene.want("m", 2, version=2)
        await eventually(lambda: ("m", 2) in scene.host.served)
        await eventually(lambda: scene.models.states()["m"][1].pinned)
        kept = dict(scene.host.served)
        begun = len(scene.loader.began)

        await scene.pin(ttl_s=0.0)
        await scene.until("m", None)

    assert kept == {("m", 1): 1, ("m", 2): 2}
    assert begun == 2
    assert scene.host.served == {("m", 2): 2}


async def test_a_pinned_version_is_loaded_by_a_worker_that_starts(store: ControlStore) -> None:
    """As what it was pinned for: empty = anything."""
    scene = Scene(store)
    await scene.pin("", version=1)
    await scene.want("m", 2, version=2)

    async with following(scene):
        state = await scene.until("m", State.READY)

        assert state == VersionState(State.READY, 2, "", 2, HASH, pinned=True)
        await eventually(lambda: scene.host.served == {("m", 1): 2, ("m", 2): 2})


async def test_other_content_is_not_served_in_place_of_a_pinned_version(
    store: ControlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, for the files may come back."""
    monkeypatch.setattr(following_models, "RELOAD_S", 0.0)
    scene = Scene(store)
    scene.loader.executed[1] = "sha256:other"
    await scene.pin()
    await scene.want("m", 2, version=2)

    async with following(scene):
        failed = await scene.until("m", State.UNAVAILABLE)
        await eventually(lambda: ("m", 2) in scene.host.served)
        others = dict(scene.host.served)
        scene.loader.executed.clear()
        await store.wake()
        await scene.until("m", State.READY)

    assert failed is not None
    assert failed.reason == "other content"
    assert others == {("m", 2): 2}


async def test_so_many_models_load_at_once(store: ControlStore) -> None:
    """`worker.load_threads`; the others wait for their turn."""
    async with following(Scene(store, threads=2)) as scene:
        for name in "abc":
            scene.loader.hold(name)
            await scene.want(name)
            await scene.until(name, State.LOADING)
        await eventually(lambda: len(scene.loader.began) == 2)

        scene.loader.gates[scene.loader.began[0]].set()
        await eventually(lambda: len(scene.loader.began) == 3)


async def test_what_is_unloaded_while_it_loads_is_never_served(store: ControlStore) -> None:
    """What was loaded is discarded."""
    async with following(Scene(store)) as scene:
        scene.loader.hold("m")
        await scene.want("m")
        await eventually(lambda: scene.loader.began == ["m"])

        await scene.unwant("m")
        await eventually(lambda: not scene.models._wanted)
        scene.loader.gates["m"].set()
        await scene.until("m", None)

        assert scene.host.served == {}
        assert len(scene.loader.discarded) == 1


async def test_the_newest_generation_is_loaded_in_the_end(store: ControlStore) -> None:
    """However many came while one was loading."""
    async with following(Scene(store)) as scene:
        scene.loader.hold("m")
        await scene.want("m", 1)
        await eventually(lambda: scene.loader.began == ["m"])
        for generation in (2, 3, 4):
            await scene.want("m", generation)
        await eventually(lambda: scene.models._wanted["m"].stored.generation == 4)
        scene.loader.gates["m"].set()

        await eventually(lambda: scene.host.served == {("m", 1): 4})
        assert len(scene.loader.began) == 2


async def test_what_failed_is_not_tried_twice(store: ControlStore) -> None:
    """Until its generation changes."""
    async with following(Scene(store)) as scene:
        await scene.want("m", digest="bad")
        failed = await scene.until("m", State.UNAVAILABLE)
        await scene.store.wake()
        await scene.want("other")
        await scene.until("other", State.READY)
        tries = scene.loader.began.count("m")
        await scene.want("m", 2)
        await scene.until("m", State.READY)

    assert failed == VersionState(State.UNAVAILABLE, 1, "bad file", 1)
    assert tries == 1


async def test_a_failure_that_explains_itself_is_one_line(
    store: ControlStore, caplog: pytest.LogCaptureFixture
) -> None:
    """No stack where the message says it all."""
    async with following(Scene(store)) as scene:
        await scene.want("m", digest="bad")
        await scene.until("m", State.UNAVAILABLE)

    (record,) = [record for record in caplog.records if record.message == "load failed"]
    assert record.exc_info is None
    assert record.__dict__["error"] == "bad file"


async def test_what_could_not_be_reached_is_tried_again(store: ControlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts while the storage is away must not stay without its models."""
    monkeypatch.setattr(following_models, "RELOAD_S", 0.0)
    monkeypatch.setattr(following_models, "REREAD_S", 0.01)
    async with following(Scene(store)) as scene:
        await scene.want("m", digest="away")
        await scene.until("m", State.READY)

    assert scene.loader.began == ["m"] * 3


async def test_tries_that_fail_again_come_more_seldom(store: ControlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 200 models whose store is away the log stays readable."""
    failures: list[int] = []

    def at_once(count: int, *_: float) -> float:
        failures.append(count)
        return 0.0

    monkeypatch.setattr(following_models, "pause_s", at_once)
    monkeypatch.setattr(following_models, "REREAD_S", 0.01)
    async with following(Scene(store)) as scene:
        await scene.want("m", digest="away")
        await scene.until("m", State.READY)

    assert failures == [1, 2]


async def test_a_pending_configuration_is_completed_and_then_loaded(store: ControlStore) -> None:
    """Under the next generation, which everyone sees."""
    async with following(Scene(store)) as scene:
        scene.loader.completion = Completion(config=to_json(normalise(parse(CONFIG), "m")))
        await scene.want("m", pending="python")

        await eventually(lambda: scene.host.served == {("m", 1): 2})
        stored = await scene.store.model("m")

    assert stored is not None
    assert (stored.pending, stored.error) == ("", "")


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_configuration_that_can_not_be_completed_says_why(store: ControlStore, *, is_ours: bool) -> None:
    """The model's mistake is stored for all; what is missing here is told by this worker only."""
    async with following(Scene(store)) as scene:
        scene.loader.completion = ModelLoadFailed("no runtime") if is_ours else Completion(error="no such module")
        await scene.want("m", pending="python")
        if is_ours:
            state = await scene.until("m", State.UNAVAILABLE)
            assert state == VersionState(State.UNAVAILABLE, 1, "no runtime", 1)
            stored = await scene.store.model("m")
            assert stored is not None
            assert await find_completion(stored, scene.store) is None
        else:
            await scene.until("m", State.UNAVAILABLE)
            stored = await scene.store.model("m")
            assert stored is not None
            assert stored.error == "no such module"
