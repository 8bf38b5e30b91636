"""Tensors in the memory of a worker that submits requests: steps of ensembles, and calls of models, in two workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock

import numpy as np
import pytest

from qinfer.core.settings_sections import SegmentSettings
from qinfer.queue.entries import worker_owner
from qinfer.submission.memory import MEMORY, NO_MEMORY, OLD_WORKER, TensorMemory
from qinfer.testing import eventually
from tests.support.ensembles import ensemble, scale
from tests.support.python_models import execute, write_model
from tests.support.served_models import ServedModels, models_served

pytestmark = pytest.mark.timeout(90)

IMAGE = np.arange(150_528, dtype="f4").reshape(1, -1)
"""602,112 bytes."""

CALLER = execute(
    """
found = []
for request in requests:
    inputs = [pb_utils.Tensor("x", x(request))]
    response = pb_utils.InferenceRequest(model_name="first", requested_output_names=["y"], inputs=inputs).exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    found.append(reply(pb_utils.get_output_tensor_by_name(response, "y").as_numpy()))
return found
"""
)
FRONT, BACK = ("both", "caller"), ("first", "second")
"""The models of the worker that submits requests, and of the one that executes these."""

REQUESTS = 8


@asynccontextmanager
async def served(directory: Path, *, most_bytes: int = 2**26) -> AsyncIterator[ServedModels]:
    """Runs a gateway that shares its memory, without workers."""
    repository = directory / "repository"
    scale(repository, "first", 2.0, width=-1)
    scale(repository, "second", 5.0, width=-1)
    steps = ("first", {"x": "x"}, {"y": "t"}), ("second", {"x": "t"}, {"y": "y"})
    ensemble(repository, "both", *steps, width=-1)
    write_model(repository, CALLER, "caller", max_batch_size=4)
    segments = SegmentSettings(directory=str(directory / "m"), least_bytes=16_384, most_bytes=most_bytes)
    async with models_served(repository, {"segments": segments}) as scene:
        await scene.kill("w1")
        yield scene


async def start(scene: ServedModels, worker: str, *models: str) -> None:
    await scene.worker(worker, models=models, lease_s=1.0, renew_every_s=0.3)


async def load(scene: ServedModels) -> None:
    for model in (*BACK, *FRONT):
        await scene.http.load_model(model)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[ServedModels]:
    async with served(tmp_path) as scene:
        await start(scene, "front", *FRONT)
        await start(scene, "back", *BACK)
        await load(scene)
        await shared(scene, "front", "back")
        yield scene


def memory_of(scene: ServedModels, worker: str) -> TensorMemory:
    memory = scene.workers[worker]._caller._submission.memory
    assert memory is not None
    return memory


async def shared(scene: ServedModels, *workers: str) -> None:
    """Waits until these workers and the gateway read one another's memory."""
    segments = scene.gateway._segments
    assert segments is not None
    theirs = [memory_of(scene, worker)._sharing.shelf for worker in workers]
    names = {worker_owner(worker) for worker in workers}

    def are_known() -> bool:
        at_workers = all(shelf.readers >= names | {scene.gateway.name} for shelf in theirs)
        return at_workers and segments.shelf.readers >= names

    await eventually(are_known, description=f"the gateway and {workers} at one another's memory")


def held(scene: ServedModels) -> list[int]:
    """Returns the bytes of tensors that each worker holds."""
    return [memory_of(scene, worker)._memory.held_bytes for worker in scene._workers]


async def bytes_of_redis(scene: ServedModels) -> int:
    """Returns the bytes that Redis has received."""
    found = await scene.store.client.info("stats")
    return int(found["total_net_input_bytes"])


async def ask(scene: ServedModels, model: str, number: int = 0) -> None:
    """Sends an image of its own, and checks the answer."""
    factor = {"both": 10, "caller": 2}[model]
    answer = await scene.infer(model, x=IMAGE + number)
    assert np.array_equal(answer.as_numpy("y"), (IMAGE + number) * factor)


@pytest.mark.parametrize(("model", "asked"), [("both", 2), ("caller", 1)])
async def test_tensors_of_steps_and_calls_do_not_pass_through_redis(
    scene: ServedModels, model: str, asked: int
) -> None:
    """Nor do their answers."""
    await ask(scene, model)
    before = await bytes_of_redis(scene)

    await asyncio.gather(*[ask(scene, model, number) for number in range(REQUESTS)])

    ways = {MEMORY: asked * (1 + REQUESTS)}
    assert memory_of(scene, "front").ways == ways

    async def are_shown() -> bool:
        return [one.tensor_ways for one in await scene.store.workers() if one.id == "front"] == [ways]

    await eventually(are_shown, description="counts in the heartbeat")
    assert await bytes_of_redis(scene) - before < IMAGE.nbytes / 2
    await eventually(lambda: held(scene) == [0, 0], description="memory that was given back")


@pytest.mark.parametrize("model", FRONT)
async def test_a_worker_that_executes_its_own_requests_reads_its_own_memory(tmp_path: Path, model: str) -> None:
    async with served(tmp_path) as scene:
        await start(scene, "only", "*")
        await load(scene)
        await shared(scene, "only")
        local = scene.workers["only"]._local
        local.try_admit = lambda *_, **__: False  # type: ignore[method-assign]  # as if others waited in the lane
        before = await bytes_of_redis(scene)

        await asyncio.gather(*[ask(scene, model, number) for number in range(REQUESTS)])

        assert set(memory_of(scene, "only").ways) == {MEMORY}
        assert await bytes_of_redis(scene) - before < IMAGE.nbytes
        await eventually(lambda: held(scene) == [0], description="memory that was given back")


async def test_steps_of_a_dead_worker_are_dropped_and_its_requests_taken_over(
    scene: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker ends between the submission of a step and its read."""
    pending = scene.workers["front"]._caller._submission.pending
    monkeypatch.setattr(pending, "discard", AsyncMock())  # a dead worker takes nothing out of the queue
    first = scene.workers["back"]._serving["first", 1]
    await first.pause_serving()
    asked = asyncio.create_task(ask(scene, "both"))
    await eventually(lambda: scene.waits("first", 1), description="a step in the lane")
    assert held(scene)[0] > 0

    await scene.kill("front")
    await start(scene, "heir", *FRONT)
    await eventually(lambda: scene.waits("first", 2), 30.0, "the step of the worker that took over")
    first.batcher.resume_batching()
    await asked

    await eventually(lambda: scene.waits("first", 0), description="an empty lane")
    assert first.batcher.completed == 1
    await eventually(lambda: held(scene) == [0, 0], description="memory that was given back")


async def test_without_room_steps_travel_through_redis(tmp_path: Path) -> None:
    async with served(tmp_path, most_bytes=2**20) as scene:
        await start(scene, "front", *FRONT)
        await start(scene, "back", *BACK)
        await load(scene)
        await shared(scene, "front", "back")

        full = memory_of(scene, "front")._memory.take(2**19, "")
        assert full is not None, "room for no image is left"
        await asyncio.gather(*[ask(scene, "both", number) for number in range(REQUESTS)])

        full.release()
        ways = memory_of(scene, "front").ways
        assert ways[NO_MEMORY] > 0
        assert ways.keys() <= {MEMORY, NO_MEMORY}
        await eventually(lambda: held(scene) == [0, 0], description="memory that was given back")


async def test_an_older_worker_gets_whole_steps(scene: ServedModels) -> None:
    """A worker that does not read the memory of workers: of an older qinfer, or of another machine."""
    sections, scene._sections = scene._sections, {}
    await start(scene, "old", *BACK)
    live = scene.workers["front"].catalog.workers
    await eventually(lambda: any(one.id == "old" and one.is_ready("first", 1) for one in live()), 20.0, "old")

    await asyncio.gather(*[ask(scene, model, number) for model in FRONT for number in range(REQUESTS)])

    assert memory_of(scene, "front").ways == {OLD_WORKER: 3 * REQUESTS}
    scene._sections = sections
