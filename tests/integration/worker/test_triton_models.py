"""Models as Triton's users write and load them, by its own clients, with a real gateway, worker and Redis."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import silero_vad
from onnx import TensorProto, helper, save
from tritonclient.utils import InferenceServerException

from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from tests.support import models, python_models
from tests.support.served_models import ServedModels, models_served

pytestmark = pytest.mark.timeout(60)

ROW = np.array([[1, 2]], np.float32)
COUNTER = python_models.execute(
    """self.count = getattr(self, "count", 0) + 1
return [reply(np.full_like(x(request), self.count)) for request in requests]"""
)
CALLER = python_models.execute(
    """for request in requests:
    tensors = [pb_utils.Tensor("x", np.ones((1, 1), np.float32))]
    asked = pb_utils.InferenceRequest(model_name="counter", requested_output_names=["y"], inputs=tensors)
    answer = asked.exec()
    if answer.has_error():
        raise pb_utils.TritonModelException(answer.error().message())
return [pb_utils.InferenceResponse([]) for _ in requests]"""
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


@pytest.fixture
async def scene(repository: Path, tmp_path: Path) -> AsyncIterator[ServedModels]:
    async with models_served(repository, overlay=str(tmp_path / "overlay")) as one:
        yield one


async def test_code_is_first_executed_by_a_request(scene: ServedModels, repository: Path) -> None:
    """A model that counts begins with one."""
    python_models.write_model(repository, COUNTER, "counter", dims=1)

    await scene.http.load_model("counter")
    first = await scene.infer("counter", x=np.zeros((1, 1), np.float32))

    assert first.as_numpy("y").tolist() == [[1]]


async def test_the_configuration_of_a_load_stays(scene: ServedModels, repository: Path) -> None:
    """Until the model is unloaded, or loaded with another; loads without one keep it."""
    models.identity(repository, "FP32")
    name = "identity_fp32"

    async def batch_size() -> int:
        return int((await scene.http.get_model_config(name))["max_batch_size"])

    await scene.http.load_model(name)
    own = await batch_size()
    sizes = []
    for config in ({"max_batch_size": 3}, None, {"max_batch_size": 5}, None):
        await scene.http.load_model(name, config=None if config is None else json.dumps(config))
        sizes.append(await batch_size())
    await scene.grpc.load_model(name)
    sizes.append(await batch_size())
    await scene.http.unload_model(name)
    await scene.http.load_model(name)

    assert sizes == [3, 3, 5, 5, 5]
    assert await batch_size() == own not in sizes


async def test_models_that_only_call_others(scene: ServedModels, repository: Path) -> None:
    """A configuration without inputs and outputs is one: the code is asked with nothing, and answers so."""
    python_models.write_model(repository, COUNTER, "counter", dims=1)
    caller = python_models.write_model(repository, CALLER, "caller")
    (caller.parent / "config.pbtxt").write_text('backend: "python"')
    await scene.http.load_model("counter")

    await scene.http.load_model("caller")
    answer = await scene.infer("caller")
    counted = await scene.infer("counter", x=np.zeros((1, 1), np.float32))

    assert list(answer.get_response().outputs) == []
    assert counted.as_numpy("y").tolist() == [[2]]
    metadata = await scene.http.get_model_metadata("caller")
    assert (metadata["inputs"], metadata["outputs"]) == ([], [])


async def test_a_version_that_can_not_be_loaded(scene: ServedModels, repository: Path) -> None:
    """Status and text are those of Triton's core."""
    python_models.write_model(repository, "raise ValueError('cold')", "broken", dims=1)

    for client, status in ((scene.http, "400"), (scene.grpc, "StatusCode.INVALID_ARGUMENT")):
        with pytest.raises(InferenceServerException) as refused:
            await client.load_model("broken")
        assert refused.value.status() == status
        text = str(refused.value.message())
        assert text.startswith("load failed for model 'broken': version 1 is at UNAVAILABLE state: Internal: "), text
        assert "cold" in text


async def test_scalars_of_a_model_without_configuration(scene: ServedModels, repository: Path) -> None:
    """Clients see [1], the model what it declares."""
    (repository / "scaled" / "1").mkdir(parents=True)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (("x", [3]), ("by", []))]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (("y", [3]), ("s", []))]
    nodes = [helper.make_node("Mul", ["x", "by"], ["y"]), helper.make_node("ReduceSum", ["y"], ["s"], keepdims=0)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ports, results), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 8
    save(model, repository / "scaled" / "1" / "model.onnx")

    await scene.http.load_model("scaled")
    answer = await scene.infer("scaled", x=np.array([1, 2, 3], np.float32), by=np.array([2], np.float32))

    assert answer.as_numpy("y").tolist() == [2, 4, 6]
    assert answer.as_numpy("s").tolist() == [12]


async def test_silero_as_its_package_has_it(scene: ServedModels, repository: Path) -> None:
    """The file alone: its sampling rate is a scalar."""
    directory = repository / "vad" / "1"
    directory.mkdir(parents=True)
    packaged = Path(silero_vad.__file__).parent / "data" / "silero_vad.onnx"
    (directory / "model.onnx").write_bytes(packaged.read_bytes())

    await scene.http.load_model("vad")
    answer = await scene.infer(
        "vad",
        input=np.zeros((1, 576), np.float32),
        state=np.zeros((2, 1, 128), np.float32),
        sr=np.array([16000], np.int64),
    )

    assert answer.as_numpy("output").shape == (1, 1)


async def test_a_file_whose_name_is_too_long(scene: ServedModels) -> None:
    """As in NVIDIA's example of model control: the server lives on, and the error is its own."""
    for client, internal in ((scene.http, "500"), (scene.grpc, "StatusCode.INTERNAL")):
        with pytest.raises(InferenceServerException, match="Invalid file path") as refused:
            await client.load_model("simple", config="{}", files={"file:" + "A" * 256: b"a"})
        assert str(refused.value.status()) == internal
        assert await client.is_server_live()


async def test_a_second_repository_with_the_same_model(tmp_path: Path) -> None:
    """The model is unloaded, and the index says why, until one of them is gone."""
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.mkdir()
    models.identity(first, "FP32")
    name = "identity_fp32"

    async with models_served(first, path=f"{first},{second}", control_mode="poll", poll_s=0.1) as scene:

        async def is_ready() -> bool:
            return bool(await scene.http.is_model_ready(name))

        async def reasons() -> list[str]:
            return [entry.get("reason", "") for entry in await scene.http.get_model_repository_index()]

        async def is_unloaded() -> bool:
            return not await is_ready() and all("two or more repositories" in reason for reason in await reasons())

        await eventually(is_ready, 20.0, description="the model")
        models.identity(second, "FP32")
        await eventually(is_unloaded, 20.0, description="the end of the model")
        with pytest.raises(InferenceServerException, match="has no available versions"):
            await scene.infer(name, x=ROW)

        shutil.rmtree(second / name)
        await eventually(is_ready, 20.0, description="the model again")
        assert (await scene.infer(name, x=ROW)).as_numpy("y").tolist() == ROW.tolist()


async def test_statistics_are_as_new_as_the_reply_before_them(scene: ServedModels, repository: Path) -> None:
    """Over both protocols, and in the metrics; heartbeats come later."""
    models.identity(repository, "FP32")
    name, count = "identity_fp32", "nv_inference_count"
    await scene.worker("w2", heartbeat_every_s=60.0)
    await scene.http.load_model(name)

    for number in range(1, 9):
        await scene.infer(name, x=ROW)
        if number % 3 == 0:
            counted = (await scene.http.get_inference_statistics(name))["model_stats"][0]["inference_count"]
        elif number % 3 == 1:
            counted = (await scene.grpc.get_inference_statistics()).model_stats[0].inference_count
        else:
            async with httpx.AsyncClient(base_url=scene.gateway.url) as client:
                lines = (await client.get("/metrics")).text.splitlines()
            (line,) = [line for line in lines if line.startswith(f'{count}{{model="{name}"')]
            counted = int(line.rpartition(" ")[2])
        assert counted == number


async def test_a_request_that_waits_in_a_worker_counts_against_the_queue(scene: ServedModels, repository: Path) -> None:
    """One waits for its batch to fill, the next ones are refused; what executes does not count."""
    policy = "default_queue_policy { max_queue_size: 1 }"
    batching = f"dynamic_batching {{ preferred_batch_size: 8 max_queue_delay_microseconds: 2000000 {policy} }}"
    gate = repository / "gate"
    held = f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\nreturn [reply(x(r)) for r in requests]"
    python_models.write_model(repository, python_models.execute(held), "slow", dims=2, scheduling=batching)
    await scene.http.load_model("slow")

    lane = keys.lane(Lane("slow", 1))

    async def is_held() -> bool:
        return bool((await scene.store.client.xpending(lane, keys.GROUP))["pending"])

    async def executes() -> bool:
        return bool(await scene.store.client.scard(lane + b"~executing"))

    first = asyncio.create_task(scene.infer("slow", x=ROW))
    await eventually(is_held, 10.0, description="a request that waits in the worker")
    assert not await executes()
    for _ in range(4):
        with pytest.raises(InferenceServerException, match="Exceeds maximum queue size"):
            await scene.infer("slow", x=ROW)

    await eventually(executes, 10.0, description="its execution")
    second = asyncio.create_task(scene.infer("slow", x=2 * ROW))
    await eventually(lambda: scene.waits("slow", 2), 10.0, description="another one")
    with pytest.raises(InferenceServerException, match="Exceeds maximum queue size"):
        await scene.infer("slow", x=ROW)
    gate.touch()

    assert [(await call).as_numpy("y").tolist() for call in (first, second)] == [ROW.tolist(), (2 * ROW).tolist()]
