"""`repository.min_workers`: what a model needs whose configuration does not say."""

from collections.abc import Mapping

import pytest

from qinfer.core.settings import RepositorySettings
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.control import ModelControl
from qinfer.models.installation import Completion, put_completion
from qinfer.models.repository.open import Repositories
from qinfer.models.state import StoredModel
from qinfer.models.store import ControlStore
from qinfer.models.sync import start, sync
from qinfer.queue.lanes import Queue
from qinfer_api.app import RepositoryWatch

CONFIG = """
backend: "stub"
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""
SAYS_ONE = CONFIG + 'parameters { key: "qinfer.min_workers" value { string_value: "1" } }'
ASLEEP = RepositorySettings(control_mode="explicit", load_models=("*",), min_workers=0)


def model(name: str, config: str = CONFIG, pending: str = "") -> StoredModel:
    return StoredModel(model=name, config=to_json(normalise(parse(config), name)), versions=(1,), pending=pending)


class Source(Repositories):
    """Two models; one says what it needs."""

    def __init__(self, *models: StoredModel) -> None:
        self.models = models

    def names(self) -> list[str]:
        return [one.model for one in self.models]

    def scan(self) -> list[StoredModel]:
        return list(self.models)

    def read(self, name: str, override: str = "", location: str = "") -> StoredModel:
        return next(one for one in self.models if one.model == name)

    def put_files(self, model: str, files: Mapping[str, bytes]) -> str:
        raise NotImplementedError

    def drop_files(self, location: str) -> None:
        raise NotImplementedError


class Scene:
    """An empty store, before a repository."""

    def __init__(self, store: ControlStore, delivery: Queue) -> None:
        self.source = Source(model("quiet"), model("says", SAYS_ONE))
        self.store, self.delivery = store, delivery

    async def needs(self) -> dict[str, int]:
        stored = await self.store.models(["quiet", "says"])
        return {name: one.min_workers for name, one in stored.items()}


@pytest.fixture
def scene(store: ControlStore, delivery: Queue) -> Scene:
    return Scene(store, delivery)


async def test_everyone_who_writes_a_model_writes_it(scene: Scene) -> None:
    """A start in each mode, a sync, a look in mode `poll`, a load: all the same, or they would undo each other."""
    await start(scene.source, scene.store, scene.delivery, ASLEEP)
    assert await scene.needs() == {"quiet": 0, "says": 1}

    again = await start(scene.source, scene.store, scene.delivery, ASLEEP.model_copy(update={"control_mode": "none"}))
    synced = await sync(scene.source, scene.store, scene.delivery, min_workers=0)
    await RepositoryWatch(scene.source, scene.store, scene.delivery, 1.0, 0).sync_models()
    before = await scene.store.desired()

    async def refresh() -> None: ...

    await ModelControl(scene.source, scene.store, scene.delivery, ASLEEP, refresh).load("quiet")

    assert not any(one.changed for one in (*again, *synced))
    assert await scene.store.desired() == before
    assert await scene.needs() == {"quiet": 0, "says": 1}


async def test_one_worker_is_the_default(scene: Scene) -> None:
    """A model is ready when a worker has it."""
    await start(scene.source, scene.store, scene.delivery, RepositorySettings())

    assert await scene.needs() == {"quiet": 1, "says": 1}


@pytest.mark.parametrize(("config", "needs"), [(CONFIG, 0), (SAYS_ONE, 1)])
async def test_a_worker_that_completes_a_configuration_keeps_it(scene: Scene, config: str, needs: int) -> None:
    """The worker has no such setting: what the gateway wrote holds, unless the completed configuration says more."""
    scene.source.models = (model("quiet", pending="python"), model("says"))
    await sync(scene.source, scene.store, scene.delivery, min_workers=0)
    pending = await scene.store.model("quiet")
    assert pending is not None
    assert pending.pending

    await put_completion(pending, Completion(config=to_json(normalise(parse(config), "quiet"))), scene.store)

    assert (await scene.needs())["quiet"] == needs
