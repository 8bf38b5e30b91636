"""Models are loaded, changed and unloaded across worker processes, around a real Redis, while requests come."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from onnx import helper

from qinfer.core.settings import LimitSettings, RepositorySettings
from qinfer.errors import ModelLoadFailed, ModelNotFound
from qinfer.models.catalog import Catalog
from qinfer.models.control import ModelControl
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import State
from qinfer.models.sync import sync
from qinfer.tensors import to_numpy
from qinfer.testing import eventually
from qinfer.wire.bodies import ModelIndexEntry
from tests.support import models
from tests.support.worker_processes import Process, WorkerProcesses, worker_processes

pytestmark = pytest.mark.timeout(120)


def write(repository: Path, factor: float, name: str = "scale", version: int = 1) -> bytes:
    """Writes a model that multiplies by a factor; returns its file."""
    nodes = [
        helper.make_node("Constant", [], ["factor"], value_float=factor),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    port = [("x", "FP32", (1,))], [("y", "FP32", (1,))]
    directory = models.write(repository, name, nodes, *port, version=version)
    return (directory / "model.onnx").read_bytes()


class Scene:
    """Two worker processes, and a gateway's side of control."""

    def __init__(self, pool: WorkerProcesses, directory: Path) -> None:
        self.pool = pool
        self.repository = directory / "repository"
        self.overlay = directory / "overlay"
        settings = RepositorySettings(
            path=str(self.repository), overlay=str(self.overlay), control_mode="explicit", load_timeout_s=40.0
        )
        self.source = open_repositories(settings)
        self.catalog = Catalog(pool.store, LimitSettings())
        self.control = ModelControl(self.source, pool.store, pool.delivery, settings, self.catalog.refresh)

    def start(self) -> Process:
        return self.pool.start(QINFER_REPOSITORY__OVERLAY=str(self.overlay), QINFER_WORKER__DRAIN_S="10")

    async def worker(self) -> Process:
        """Starts a worker, and waits for its first sign of life."""
        process = self.start()

        async def is_live() -> bool:
            return any(f"-{process.pid}-" in record.id for record in await self.pool.store.workers())

        await eventually(is_live, 40.0, "a live worker")
        return process

    async def ask(self, value: float = 1.0, name: str = "scale") -> float:
        """Asks the version that the catalog serves, as a gateway would; returns the answer."""
        self.pool._generations[name] = self.catalog.resolve(name, 0).generation
        (answer,) = await self.pool.answered(self.pool.submit(value, name))
        assert answer.failure is None, answer.failure
        return float(to_numpy(answer.outputs[0]).ravel()[0])

    async def everywhere(self, generation: int, name: str = "scale") -> None:
        """Waits until every worker serves a generation."""

        async def is_so() -> bool:
            records = await self.pool.store.workers()
            found = [state for record in records for state in record.models.get(name, {}).values()]
            return len(found) == len(records) and all(
                state.state is State.READY and state.generation == generation for state in found
            )

        await eventually(is_so, 40.0, "every worker")

    async def generation(self, name: str = "scale") -> int:
        stored = await self.pool.store.model(name)
        assert stored is not None
        return stored.generation


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    (tmp_path / "repository").mkdir()
    async with worker_processes(tmp_path) as pool:
        scene = Scene(pool, tmp_path)
        write(scene.repository, 2.0)
        first, second = scene.start(), scene.start()
        pids = {first.pid, second.pid}

        async def are_live() -> bool:
            return len(await pool.store.workers()) == len(pids)

        await eventually(are_live, 40.0, "two live workers")
        yield scene


async def test_models_come_change_and_go(scene: Scene) -> None:
    """Load, change of a file, override, files with the request, failures, unload: each as Triton has it."""
    assert await scene.control.index() == [ModelIndexEntry(name="scale")]
    await scene.control.load("scale")
    assert await scene.ask() == 2.0

    write(scene.repository, 3.0)
    await scene.control.load("scale")
    await scene.everywhere(await scene.generation())
    assert await scene.ask() == 3.0

    override = json.loads(scene.catalog.config_json("scale", 0)) | {"max_batch_size": "16"}
    await scene.control.load("scale", json.dumps(override))
    assert scene.catalog.resolve("scale", 0).spec.max_batch_size == 16

    content = write(scene.overlay.parent / "elsewhere", 5.0)
    await scene.control.load("scale", json.dumps(override), {"1/model.onnx": content})
    await scene.everywhere(await scene.generation())
    assert await scene.ask() == 5.0

    with pytest.raises(ModelLoadFailed, match=r"^failed to load 'scale', "):
        await scene.control.load("scale", json.dumps(override), {"1/model.onnx": b"no model"})
    await scene.everywhere(await scene.generation())
    assert await scene.ask() == 5.0
    third = await scene.worker()
    await scene.everywhere(await scene.generation())
    third.terminate()
    await asyncio.to_thread(third.wait)

    await scene.control.unload("scale")
    with pytest.raises(ModelNotFound, match="has no available versions"):
        scene.catalog.resolve("scale", 0)
    await eventually(
        lambda: _is_index(
            scene, [ModelIndexEntry(name="scale", version="1", state=State.UNAVAILABLE, reason="unloaded")]
        ),
        20.0,
    )
    await scene.control.load("scale")
    assert await scene.ask() == 3.0
    assert list(scene.overlay.glob("scale/*")) == []


async def _is_index(scene: Scene, expected: list[ModelIndexEntry]) -> bool:
    return await scene.control.index() == expected


async def test_no_request_fails_while_a_model_is_reloaded(scene: Scene) -> None:
    """Requests come all the time; each is answered by one of the generations."""
    await scene.control.load("scale")
    await scene.everywhere(await scene.generation())
    answers: list[float] = []
    is_over = False

    async def caller() -> None:
        while not is_over:
            answers.append(await scene.ask())

    async with asyncio.TaskGroup() as callers:
        for _ in range(8):
            callers.create_task(caller())
        for factor in (3.0, 4.0, 5.0):
            write(scene.repository, factor)
            await scene.control.load("scale")
            await scene.everywhere(await scene.generation())
        is_over = True

    assert set(answers) <= {2.0, 3.0, 4.0, 5.0}
    assert {2.0, 5.0} & set(answers) or len(answers) > 50
    assert await scene.ask() == 5.0


async def test_what_waits_is_answered_before_a_model_goes(scene: Scene) -> None:
    """By whichever worker; nothing is left in the lane."""
    await scene.control.load("scale")
    scene.pool._generations["scale"] = await scene.generation()
    requests = [scene.pool.submit(float(number), "scale") for number in range(500)]

    await scene.control.unload("scale")

    answers = await scene.pool.answered(*requests)
    assert [float(to_numpy(answer.outputs[0]).ravel()[0]) for answer in answers] == [2.0 * n for n in range(500)]
    await scene.pool.empty("scale")


PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        config.set_max_batch_size(4)
        return config

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", value * FACTOR)]) for value in inputs]
"""


async def test_a_model_of_code_is_completed_by_a_worker_and_reloaded_without_a_gap(scene: Scene) -> None:
    """Its instances are processes of their own; the configuration is completed once for each content."""
    path = scene.repository / "code" / "1" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(PYTHON.replace("FACTOR", "2"))

    await scene.control.load("code")
    await scene.everywhere(await scene.generation("code"), "code")
    first = await scene.ask(1.0, "code")
    path.write_text(PYTHON.replace("FACTOR", "30"))
    await scene.control.load("code")
    await scene.everywhere(await scene.generation("code"), "code")
    second = await scene.ask(1.0, "code")
    path.write_text("nonsense =")
    with pytest.raises(ModelLoadFailed, match="load failed for model 'code': "):
        await scene.control.load("code")

    assert (first, second, await scene.ask(1.0, "code")) == (2.0, 30.0, 30.0)


async def test_a_repository_is_followed(scene: Scene) -> None:
    """Models that are added, changed, half written, repaired and removed, as mode `poll` sees them."""
    store, delivery = scene.pool.store, scene.pool.delivery
    await sync(scene.source, store, delivery)
    await scene.everywhere(await scene.generation())
    config = scene.repository / "scale" / "config.pbtxt"
    text = config.read_text()

    config.write_text(text[: len(text) // 2])
    (half,) = await sync(scene.source, store, delivery)
    await scene.catalog.refresh()
    assert half.error.endswith("the model loaded before stays in service")
    assert not half.changed
    assert await scene.ask() == 2.0

    config.write_text(text)
    write(scene.repository, 3.0)
    write(scene.repository, 7.0, "other")
    await sync(scene.source, store, delivery)
    for name in ("scale", "other"):
        await scene.everywhere(await scene.generation(name), name)
    await scene.catalog.refresh()
    assert [await scene.ask(1.0, name) for name in ("scale", "other")] == [3.0, 7.0]

    (scene.repository / "other").rename(scene.repository / ".other")
    await sync(scene.source, store, delivery)
    await eventually(lambda: _is_gone(scene, "other"), 20.0, "other gone")


async def _is_gone(scene: Scene, name: str) -> bool:
    return not any(name in record.models for record in await scene.pool.store.workers())
