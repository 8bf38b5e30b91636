"""Instance groups that change while a model is asked, by Triton's own clients: nothing in flight is lost."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qinfer.testing import eventually
from tests.support import python_models
from tests.support.models import CONTROLS, DIRECT, sequence_batching
from tests.support.served_models import ServedModels, models_served, tensor

pytestmark = pytest.mark.timeout(90)

ONE = "instance_group { count: 1 kind: KIND_CPU }"
PID = python_models.execute("time.sleep(0.2)\nreturn [reply(np.full_like(x(r), os.getpid())) for r in requests]")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


@pytest.fixture
async def scene(repository: Path) -> AsyncIterator[ServedModels]:
    async with models_served(repository) as one:
        yield one


async def resize(scene: ServedModels, model: str, count: int, kind: str = "KIND_CPU") -> None:
    """Loads a model with nothing changed but its instances."""
    config = await scene.http.get_model_config(model)
    config["instance_group"] = [{"count": count, "kind": kind}]
    await scene.http.load_model(model, config=json.dumps(config))


async def processes(scene: ServedModels, calls: int) -> set[int]:
    """Returns the processes that answer so many requests at once; each is busy for a while."""
    answers = await asyncio.gather(*(scene.infer("pid", x=np.zeros((1, 1), np.float32)) for _ in range(calls)))
    return {int(answer.as_numpy("y")[0, 0]) for answer in answers}


async def test_instances_come_and_go_beside_those_that_stay(scene: ServedModels, repository: Path) -> None:
    """Another kind of the same device changes nothing; another batch size loads all of them anew."""
    python_models.write_model(repository, PID, "pid", dims=1, max_batch_size=1, scheduling="", more=ONE)
    await scene.http.load_model("pid")
    first = await processes(scene, 1)

    await resize(scene, "pid", 3)
    three = await processes(scene, 9)
    await resize(scene, "pid", 3, "KIND_MODEL")
    same = await processes(scene, 9)
    await resize(scene, "pid", 1)
    one = await processes(scene, 3)

    assert (len(first), len(three), len(one)) == (1, 3, 1)
    assert first < three == same
    assert one < three
    config = await scene.http.get_model_config("pid")
    await scene.http.load_model("pid", config=json.dumps({**config, "max_batch_size": 2}))
    assert await processes(scene, 1) not in (one, first)


async def test_no_request_is_lost_while_instances_come_and_go(scene: ServedModels, repository: Path) -> None:
    python_models.write_model(repository, PID, "pid", dims=1, max_batch_size=1, scheduling="", more=ONE)
    await scene.http.load_model("pid")
    calls = [asyncio.create_task(processes(scene, 3)) for _ in range(4)]

    for count in (3, 1, 2, 1):
        await resize(scene, "pid", count)

    for call in calls:
        assert await call


async def test_a_sequence_goes_on_while_instances_come_and_go(scene: ServedModels, repository: Path) -> None:
    """Its sums are in its process, which stays until it has ended; NVIDIA's server forgets it."""
    batching = sequence_batching(DIRECT, CONTROLS, "max_sequence_idle_microseconds: 60000000")
    python_models.write_accumulator(repository, "sums", scheduling=batching, more=ONE)
    await scene.http.load_model("sums")

    async def step(value: float, **flags: Any) -> float:
        inputs = [tensor("x", np.array([[value]], np.float32))]
        answer = await scene.grpc.infer("sums", inputs, sequence_id=9, **flags)
        return float(answer.as_numpy("y")[0, 0])

    sums = [await step(1, sequence_start=True)]
    for value, count in ((2, 2), (4, 1)):
        await resize(scene, "sums", count)
        sums.append(await step(value))
    sums.append(await step(8, sequence_end=True))

    assert sums == [1, 3, 7, 15]
    assert await step(5, sequence_start=True, sequence_end=True) == 5


async def test_instances_of_a_direct_model_come_and_go_beside_those_with_sequences(
    scene: ServedModels, repository: Path
) -> None:
    """No instance is loaded again; the instance without a sequence ends, although it is the oldest."""
    batching = sequence_batching(DIRECT, CONTROLS, "max_sequence_idle_microseconds: 60000000")
    python_models.write_model(repository, PID, "pid", dims=1, max_batch_size=1, scheduling=batching, more=ONE)
    await scene.http.load_model("pid")

    async def step(sequence: int, **flags: Any) -> int:
        inputs = [tensor("x", np.zeros((1, 1), np.float32))]
        return int((await scene.grpc.infer("pid", inputs, sequence_id=sequence, **flags)).as_numpy("y")[0, 0])

    first = await step(1, sequence_start=True)
    await resize(scene, "pid", 2)
    second = await step(2, sequence_start=True)
    goes_on = await step(1, sequence_end=True)
    third = await step(3, sequence_start=True)

    assert first == goes_on == third
    assert second != first
    await step(3, sequence_end=True)
    await resize(scene, "pid", 1)
    assert await step(2, sequence_end=True) == await step(4, sequence_start=True, sequence_end=True) == second


async def test_a_stream_goes_on_while_instances_come_and_go(scene: ServedModels, repository: Path) -> None:
    gate = repository / "gate"
    code = f"""for request in requests:
    sender = request.get_response_sender()
    for number in range(5):
        while number == 1 and not os.path.exists({str(gate)!r}):
            time.sleep(0.01)
        sender.send(reply(np.full_like(x(request), number)))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
return None"""
    more = python_models.DECOUPLED + ONE
    python_models.write_model(repository, python_models.execute(code), "stream", dims=1, more=more)
    await scene.http.load_model("stream")
    numbers: list[int] = []

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "stream", "inputs": [tensor("x", np.zeros((1, 1), np.float32))]}

    async def read() -> None:
        async for answer, error in scene.grpc.stream_infer(requests()):
            assert error is None
            numbers.append(int(answer.as_numpy("y")[0, 0]))

    async def has_begun() -> bool:
        return bool(numbers)

    reader = asyncio.create_task(read())
    await eventually(has_begun, 20.0, description="the first response")
    await resize(scene, "stream", 3)
    resized = asyncio.create_task(resize(scene, "stream", 1))
    gate.touch()
    await asyncio.gather(reader, resized)

    assert numbers == [0, 1, 2, 3, 4]
