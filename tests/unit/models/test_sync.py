"""What a sync and a start make of the repositories, by control mode; and mode `poll`'s look at them."""

import asyncio
import logging

import msgspec
import pytest

from qinfer.core.settings import RepositorySettings
from qinfer.errors import ModelNotFound, SettingsError
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.repository.open import Repositories
from qinfer.models.state import DesiredState, ModelUse, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.models.sync import start, sync
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer_api.app import RepositoryWatch

CONFIG = """
backend: "stub"
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""


def model(name: str, digest: str = "1") -> StoredModel:
    return StoredModel(model=name, config=to_json(normalise(parse(CONFIG), name)), versions=(1,), content_hash=digest)


class Source(Repositories):
    """A repository that holds what a test put there."""

    def __init__(self, *models: StoredModel) -> None:
        self.models = {one.model: one for one in models}
        self.is_away = False

    def names(self) -> list[str]:
        return sorted(self.models)

    def scan(self) -> list[StoredModel]:
        if self.is_away:
            raise SettingsError("bucket can't be read")
        return [self.models[name] for name in self.names()]

    def read(self, name: str, override: str = "", location: str = "") -> StoredModel:
        if name not in self.models:
            raise ModelNotFound("no repository has it")
        return self.models[name]


class Scene:
    def __init__(self, store: ControlStore, delivery: Queue) -> None:
        self.source = Source(model("a"))
        self.store, self.delivery = store, delivery

    async def start(self, mode: str = "explicit", *load: str, again: bool = False) -> list[str]:
        """Starts; returns the names that were written."""
        settings = RepositorySettings.model_validate({"control_mode": mode, "load_models": load})
        synced = await start(self.source, self.store, self.delivery, settings, again=again)
        return [one.model for one in synced if one.changed]

    async def loaded(self) -> list[str]:
        return sorted(name for name, wish in (await self.store.desired()).items() if wish.load)

    async def is_b_gone(self) -> bool:
        return "b" not in await self.loaded()

    async def serve(self, name: str) -> None:
        """Pretends that a worker serves a model."""
        generation = (await self.store.desired())[name].generation
        states = {name: {1: VersionState(State.READY, generation)}}
        await self.store.heartbeat(WorkerRecord(id="w", started_at=0.0, models=states), 60.0)


@pytest.fixture
def scene(store: ControlStore, delivery: Queue) -> Scene:
    return Scene(store, delivery)


@pytest.mark.parametrize(
    ("mode", "load", "loaded"),
    [
        ("none", (), ["a", "b"]),
        ("none", ("a",), ["a", "b"]),
        ("poll", (), ["a", "b"]),
        ("explicit", (), []),
        ("explicit", ("b", "b"), ["b"]),
        ("explicit", ("*",), ["a", "b"]),
    ],
)
async def test_what_a_start_loads(scene: Scene, mode: str, load: tuple[str, ...], loaded: list[str]) -> None:
    """All models, or in mode explicit those that are named."""
    scene.source.models["b"] = model("b")

    await scene.start(mode, *load)

    assert await scene.loaded() == loaded


async def test_a_start_loads_what_an_ensemble_uses(scene: Scene) -> None:
    """As loaded for it, so that it may go with it."""
    scene.source.models["b"] = msgspec.structs.replace(model("b"), uses=(ModelUse("a"), ModelUse("nobody")))

    await scene.start("explicit", "b")

    wishes = await scene.store.desired()
    assert {name: wish.dependent for name, wish in wishes.items() if wish.load} == {"a": True, "b": False}


async def test_a_change_of_a_model_is_a_new_generation_of_its_ensembles(scene: Scene) -> None:
    """Workers load them again, with what the model has become."""
    scene.source.models["b"] = msgspec.structs.replace(model("b"), uses=(ModelUse("a"),))
    await scene.start("none")
    before = await scene.store.models(["a", "b"])

    scene.source.models["a"] = model("a", "2")
    await scene.start("none")

    after = await scene.store.models(["a", "b"])
    assert all(after[name].generation > before[name].generation for name in "ab")


@pytest.mark.parametrize(
    ("load", "text"), [(("a", "x"), "names 'x', which no model repository has"), (("*", "a"), "among other names")]
)
async def test_what_a_start_can_not_load_is_a_wrong_setting(scene: Scene, load: tuple[str, ...], text: str) -> None:
    """The message names the setting and the option."""
    with pytest.raises(SettingsError, match=rf"QINFER_REPOSITORY__LOAD_MODELS \(--load-model\) .*{text}"):
        await scene.start("explicit", *load)


async def test_a_gateway_that_joins_leaves_alone_what_others_were_told(scene: Scene) -> None:
    """A model that was unloaded on request stays so; the one who decides, at its start, loads it again."""
    await scene.start("explicit", "a")
    (wish,) = (await scene.store.desired()).values()
    await scene.store.set_desired(DesiredState("a", wish.generation, load=False))

    assert await scene.start("explicit", "a") == []
    assert await scene.loaded() == []
    assert await scene.start("explicit", "a", again=True) == ["a"]
    assert (await scene.store.desired())["a"].generation > wish.generation


async def test_what_becomes_unreadable_stays_while_it_is_served(scene: Scene) -> None:
    """Its error is reported; without a worker that serves it, it is the model's state."""
    await sync(scene.source, scene.store, scene.delivery)
    await scene.serve("a")
    scene.source.models["a"] = StoredModel(model="a", error="line 1")

    (served,) = await sync(scene.source, scene.store, scene.delivery)
    kept = await scene.store.model("a")
    await scene.store.retire("w")
    (unserved,) = await sync(scene.source, scene.store, scene.delivery)

    assert (served.error, served.changed) == ("line 1; the model loaded before stays in service", False)
    assert kept is not None
    assert not kept.error
    assert (unserved.error, unserved.changed) == ("line 1", True)


async def test_a_model_that_is_gone_is_reported_once(scene: Scene) -> None:
    """It stays known, for requests may be left of it."""
    await sync(scene.source, scene.store, scene.delivery)
    scene.source.models.clear()

    first, second = [await sync(scene.source, scene.store, scene.delivery) for _ in range(2)]

    assert [one.removed for one in first] == [True]
    assert second == []
    assert list(await scene.store.desired()) == ["a"]


async def test_a_look_that_goes_wrong_ends_no_gateway(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is: the next look may be better."""

    def scan() -> list[StoredModel]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(scene.source, "scan", scan)
        watch = RepositoryWatch(scene.source, scene.store, scene.delivery, 0.005)
        await watch.sync_models()
    await watch.sync_models()

    assert caplog.messages == ["model repository can't be read"]
    assert await scene.loaded() == ["a"]


async def test_the_watch_follows_changes(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Each is logged; a repository that is away for a while changes nothing."""
    watch = RepositoryWatch(scene.source, scene.store, scene.delivery, 0.005)
    with caplog.at_level(logging.INFO, "qinfer_api.app"):
        await watch.sync_models()
        scene.source.is_away = True
        await watch.sync_models()
        scene.source.is_away = False
        scene.source.models |= {"b": model("b"), "bad": StoredModel(model="bad", error="line 1")}
        await watch.sync_models()
        await watch.sync_models()
        del scene.source.models["b"]
        running = asyncio.create_task(watch.run())
        await eventually(scene.is_b_gone)
        running.cancel()

    assert [(record.message, record.__dict__.get("model")) for record in caplog.records][:4] == [
        ("model changed", "a"),
        ("model repository can't be read", None),
        ("model repository is read again", None),
        ("model changed", "b"),
    ]
    assert await scene.loaded() == ["a", "bad"]
