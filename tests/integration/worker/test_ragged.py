"""Ragged batches over HTTP and gRPC: a gateway, a worker with a real ONNX model, a real Redis."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.testing import eventually
from tests.support.ensembles import EnsemblesServed, ensembles_served
from tests.support.ragged_models import write_ragged

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[EnsemblesServed]:
    write_ragged(tmp_path / "repository", delay_us=50_000)
    async with ensembles_served(tmp_path / "repository") as one:
        await one.sync()
        await one.worker()
        await one.ready()
        yield one


async def over_http(scene: EnsemblesServed, numbers: list[float]) -> dict[str, list[float]]:
    tensor = {"name": "x", "shape": [1, len(numbers)], "datatype": "FP32", "data": numbers}
    reply = await scene.client.post("/v2/models/ragged/infer", json={"inputs": [tensor]})
    assert reply.status_code == 200, reply.text
    return {output["name"]: output["data"] for output in reply.json()["outputs"]}


async def over_grpc(scene: EnsemblesServed, numbers: list[float]) -> dict[str, list[float]]:
    request = pb.ModelInferRequest(model_name="ragged")
    request.inputs.add(name="x", datatype="FP32", shape=[1, len(numbers)])
    request.raw_input_contents.append(np.array(numbers, "<f4").tobytes())
    reply: Any = await scene.stub.ModelInfer(request)
    pairs = zip(reply.outputs, reply.raw_output_contents, strict=True)
    return {output.name: np.frombuffer(raw, "<f4").tolist() for output, raw in pairs}


async def test_requests_of_different_lengths_share_batches(scene: EnsemblesServed) -> None:
    """Each gets what it would alone; there are fewer executions than requests."""
    draw = random.Random(7)
    rows = [[float(draw.randint(-99, 99)) for _ in range(draw.randint(1, 30))] for _ in range(48)]

    answers = await asyncio.gather(
        *[(over_http if place % 2 else over_grpc)(scene, numbers) for place, numbers in enumerate(rows)]
    )

    for numbers, answer in zip(rows, answers, strict=True):
        assert answer == {"sum": [sum(numbers)], "twice": [2 * n for n in numbers], "count": [len(numbers)]}

    async def are_counted() -> bool:
        (stats,) = (await scene.client.get("/v2/models/ragged/stats")).json()["model_stats"]
        return bool(stats["inference_count"] == len(rows) and stats["execution_count"] < len(rows))

    await eventually(are_counted, description="fewer executions than requests")


async def test_the_server_makes_batch_inputs_and_not_the_client(scene: EnsemblesServed) -> None:
    """Metadata has the inputs of requests only, and a request with a batch input is refused in Triton's words."""
    metadata = (await scene.client.get("/v2/models/ragged")).json()
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    extra = {"name": "sizes", "shape": [1, 1], "datatype": "FP32", "data": [1]}

    reply = await scene.client.post("/v2/models/ragged/infer", json={"inputs": [tensor, extra]})

    assert [(i["name"], i["shape"]) for i in metadata["inputs"]] == [("x", [-1, -1])]
    assert reply.status_code == 400
    assert "expected 1 inputs but got 2 inputs for model 'ragged'" in reply.json()["error"]
