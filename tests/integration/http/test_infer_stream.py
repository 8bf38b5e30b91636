"""`/v1/…/infer_stream`: the body of infer in, each response as a server-sent event with exact tensors out."""

import json
from base64 import b64decode
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from tests.support.gateway import Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

URL = "/v1/models/{}/infer_stream"
VALUES = [1 / 3, float("inf"), -0.0, 1e-45]  # as float32: no short decimals, no JSON, a sign that gets lost, a denormal


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, headers={"accept-encoding": "identity"}) as opened:
        yield opened


def body(**parameters: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    return {"id": "mine", "inputs": [tensor], "parameters": parameters}


def events(text: str) -> list[tuple[str, list[str]]]:
    """Returns the name of each event and the lines of its data."""
    found = []
    for block in text.split("\n\n")[:-1]:
        first, *data = block.split("\n")
        found.append((first.removeprefix("event: "), [line.removeprefix("data: ") for line in data]))
    return found


@pytest.mark.parametrize("responses", [0, 1, 3])
async def test_each_response_is_an_event(client: httpx.AsyncClient, responses: int) -> None:
    """As infer answers it; of a model that gives one, one."""
    plain = await client.post("/v2/models/echo/infer", json=body())

    reply = await client.post(URL.format("echo"), json=body(responses=responses))

    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [(name, json.loads(data)) for name, [data] in events(reply.text)] == [("response", plain.json())] * responses


async def test_binary_outputs_are_exact(client: httpx.AsyncClient) -> None:
    """Their bytes are the second line of the data."""
    data = np.array([VALUES], np.float32).tobytes()
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True, "responses": 2}}).encode()

    headers = {"inference-header-content-length": str(len(text))}
    reply = await client.post(URL.format("echo"), content=text + data, headers=headers)

    found = events(reply.text)
    assert [b64decode(binary) for _, [_, binary] in found] == [data] * 2
    assert json.loads(found[0][1][0])["outputs"][0]["parameters"] == {"binary_data_size": len(data)}


async def test_a_version(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/models/echo/versions/1/infer_stream", json=body())

    [(_, [data])] = events(reply.text)
    assert json.loads(data)["model_version"] == "1"


async def test_a_failure_has_its_code(client: httpx.AsyncClient) -> None:
    """The first one decides the status of the reply."""
    reply = await client.post(URL.format("fails"), json=body())

    assert reply.status_code == 500
    [(name, [data])] = events(reply.text)
    problem = {"error": "the model raised: boom", "code": "inference_failed"}
    assert (name, json.loads(data)) == ("error", problem)


@pytest.mark.parametrize(
    ("model", "content", "status"), [("missing", body(), 404), ("echo", {"inputs": []}, 400), ("echo", {}, 400)]
)
async def test_a_request_that_is_refused_has_a_plain_reply(
    client: httpx.AsyncClient, model: str, content: dict[str, Any], status: int
) -> None:
    reply = await client.post(URL.format(model), json=content)

    assert reply.status_code == status
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json()["error"]


async def test_a_caller_that_leaves_cancels(client: httpx.AsyncClient, running: Running) -> None:
    """Its request is taken out of the queue."""
    with pytest.raises(httpx.ReadTimeout):
        await client.post(URL.format("stuck"), json=body(), timeout=0.2)

    await running.emptied("stuck")
