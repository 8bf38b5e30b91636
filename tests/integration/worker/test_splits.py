"""Requests larger than `max_batch_size`, split: over HTTP, gRPC and from a model, against workers with real models."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2 as pb

from qinfer.models.spec import MAX_PARTS
from qinfer.testing import eventually
from tests.support.ensembles import EnsemblesServed, ensembles_served, scale
from tests.support.python_models import execute, write_model

pytestmark = [pytest.mark.timeout(90), pytest.mark.asyncio(loop_scope="module")]

SPLIT = 'parameters { key: "qinfer.split" value { string_value: "true" } }'

STRICT = execute(
    """
for request in requests:
    if (x(request) == 666).any():
        raise pb_utils.TritonModelException("no such number")
return [reply(x(request)) for request in requests]
"""
)

CALLER = execute(
    """
rows = pb_utils.Tensor("x", np.arange(40, dtype="f4").reshape(20, 2))
call = pb_utils.InferenceRequest(model_name="split", requested_output_names=["y"], inputs=[rows])
response = call.exec()
if response.has_error():
    raise pb_utils.TritonModelException(response.error().message())
total = pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
return [reply(np.array([[total.shape[0], total.sum()]], "f4")) for _ in requests]
"""
)


def write_scales(repository: Path) -> Path:
    """Writes `split`, whose requests are split, and `plain`, whose are not."""
    for name in ("split", "plain"):
        scale(repository, name, 2.0)
    file = repository / "split" / "config.pbtxt"
    file.write_text(file.read_text() + SPLIT)
    return repository


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnsemblesServed]:
    repository = write_scales(tmp_path_factory.mktemp("repository"))
    write_model(repository, STRICT, "strict", dims=2, max_batch_size=4, more=SPLIT)
    write_model(repository, CALLER, "caller", dims=2)
    async with ensembles_served(repository) as one:
        await one.sync()
        await one.worker("w1")
        await one.worker("w2")
        await one.ready()
        yield one


async def over_http(scene: EnsemblesServed, rows: np.ndarray, model: str = "split") -> Any:
    tensor = {"name": "x", "shape": list(rows.shape), "datatype": "FP32", "data": rows.ravel().tolist()}
    return await scene.client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor], "id": "mine"})


async def over_grpc(scene: EnsemblesServed, rows: np.ndarray) -> np.ndarray:
    request = pb.ModelInferRequest(model_name="split")
    request.inputs.add(name="x", datatype="FP32", shape=rows.shape)
    request.raw_input_contents.append(rows.astype("<f4").tobytes())
    reply: Any = await scene.stub.ModelInfer(request)
    return np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(list(reply.outputs[0].shape))


async def test_requests_of_any_size_are_answered_as_if_whole(scene: EnsemblesServed) -> None:
    draw = random.Random(3)
    requests = [np.random.default_rng(n).integers(-99, 99, (draw.randint(1, 200), 2)) for n in range(40)]

    replies = await asyncio.gather(*[over_http(scene, rows) for rows in requests[::2]])
    arrays = await asyncio.gather(*[over_grpc(scene, rows) for rows in requests[1::2]])

    for rows, reply in zip(requests[::2], replies, strict=True):
        assert reply.status_code == 200, reply.text
        document = reply.json()
        assert document["id"] == "mine"
        (output,) = document["outputs"]
        assert output["shape"] == list(rows.shape)
        assert output["data"] == (2 * rows).ravel().tolist()
    for rows, array in zip(requests[1::2], arrays, strict=True):
        np.testing.assert_array_equal(array, 2 * rows)
    assert scene.gateway.dispatcher.in_flight == 0


async def test_a_model_may_call_with_more_rows(scene: EnsemblesServed) -> None:
    reply = await over_http(scene, np.zeros((1, 2)), "caller")

    assert reply.status_code == 200, reply.text
    assert reply.json()["outputs"][0]["data"] == [20, 2 * sum(range(40))]


async def test_one_part_that_fails_is_the_failure_of_all(scene: EnsemblesServed) -> None:
    rows = np.zeros((30, 2))
    rows[17, 1] = 666

    reply = await over_http(scene, rows, "strict")

    assert reply.status_code == 500
    assert "no such number" in reply.json()["error"]
    assert scene.gateway.dispatcher.in_flight == 0


async def test_what_is_refused(scene: EnsemblesServed) -> None:
    """Without the parameter, beyond the bound, and where requests are stored."""
    plain = await over_http(scene, np.zeros((9, 2)), "plain")
    large = await over_http(scene, np.zeros((8 * MAX_PARTS + 1, 2)))
    tensor = {"name": "x", "shape": [9, 2], "datatype": "FP32", "data": [0] * 18}
    stored = await scene.client.post("/v1/models/split/requests", json={"inputs": [tensor]})

    assert "inference request batch-size must be <= 8 for 'plain'" in plain.json()["error"]
    assert f"inference request batch-size must be <= {8 * MAX_PARTS} for 'split'" in large.json()["error"]
    assert (plain.status_code, large.status_code, stored.status_code) == (400, 400, 400)
    assert "requests that are stored are not split" in stored.text


async def test_a_caller_that_leaves_takes_its_parts_along(tmp_path: Path) -> None:
    async with ensembles_served(write_scales(tmp_path / "repository")) as scene:
        await scene.sync()
        await scene.worker("w1")
        await scene.ready()
        await scene.stop("w1")
        asking = asyncio.create_task(over_http(scene, np.zeros((80, 2))))

        async def are_queued() -> bool:
            return await scene.depth("split") == 10

        async def are_gone() -> bool:
            return await scene.depth("split") == 0 and scene.gateway.dispatcher.in_flight == 0

        await eventually(are_queued, description="ten parts in the lane")
        asking.cancel()
        await asyncio.wait([asking])

        await eventually(are_gone, description="an empty lane")
