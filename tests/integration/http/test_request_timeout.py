"""`Request-Timeout` and the parameter `timeout` of synchronous requests, through both ways of infer, and generate."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.gateway import Running, running_gateway, settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one gateway for each way

INPUT = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
BODY: dict[str, Any] = {"inputs": [INPUT]}
GENERATED: dict[str, Any] = {"x": [1, 2, 3, 4]}
CALLS = [
    ("/v2/models/{}/infer", BODY),
    ("/v2/models/{}/generate", GENERATED),
    ("/v2/models/{}/generate_stream", GENERATED),
    ("/v1/models/{}/infer_stream", BODY),
]
EXPIRED = "Request timeout expired"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[True, False], ids=["fast", "route"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    async with running_gateway(settings_of({"fast_path": request.param}, {"default_timeout_s": 3000})) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_it_ends_a_request_without_an_answer(client: httpx.AsyncClient, path: str, body: object) -> None:
    """As the model's own timeout would, long before that."""
    reply = await client.post(path.format("stuck"), json=body, headers={"request-timeout": "0.05"})

    assert (reply.status_code, EXPIRED in reply.text) == (503, True)


@pytest.mark.parametrize(("path", "body"), [*CALLS, ("/v1/models/{}/requests", BODY)])
@pytest.mark.parametrize("value", ["soon", "nan", "-1", "1e999", ""])
async def test_what_is_no_number_of_seconds_is_named(
    client: httpx.AsyncClient, path: str, body: object, value: str
) -> None:
    reply = await client.post(path.format("echo"), json=body, headers={"request-timeout": value})

    assert reply.status_code == 400
    assert f"Request-Timeout is a number of seconds, such as 2.5; got '{value}'" in reply.json()["error"]


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("value", ["0", "0.0001", "41"])
async def test_what_is_too_short_or_too_long_is_refused(
    client: httpx.AsyncClient, path: str, body: object, value: str
) -> None:
    """By the longest timeout of the model; 0 is too short."""
    reply = await client.post(path.format("hasty"), json=body, headers={"request-timeout": value})

    assert reply.status_code == 400
    assert f"a request timeout of {value} s is not possible; choose one from 0.001 to 40 seconds" in reply.text


@pytest.mark.parametrize("path", ["infer", "generate"])
async def test_it_may_be_longer_than_the_default(client: httpx.AsyncClient, running: Running, path: str) -> None:
    body = BODY if path == "infer" else GENERATED

    await client.post(f"/v2/models/echo/{path}", json=body, headers={"request-timeout": "3500"})

    assert running.requests[-1].timeout_s == 3500


async def test_several_headers_are_refused_by_their_first(client: httpx.AsyncClient) -> None:
    headers = [("request-timeout", "soon"), ("request-timeout", "1")]

    reply = await client.post("/v2/models/echo/infer", content=json.dumps(BODY), headers=headers)

    assert reply.status_code == 400


async def test_the_parameter_shortens_a_queue_timeout(client: httpx.AsyncClient) -> None:
    """As Triton's does, where the policy of the model allows it."""
    reply = await client.post("/v2/models/patient/infer", json={**BODY, "parameters": {"timeout": 1000}})

    assert (reply.status_code, EXPIRED in reply.text) == (503, True)
