"""`POST …/generate` and `…/generate_stream`."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.gateway import Running, running_gateway, settings_of

NUMBERS = [1, 2, 3, 4]
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_gateway(settings_of({"header_forward_pattern": "told_.*"})) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


async def until_in_flight(running: Running, count: int) -> None:
    while running.gateway.dispatcher.in_flight != count:  # noqa: ASYNC110 - a count has no event
        await asyncio.sleep(0.001)


def events(reply: httpx.Response) -> list[Any]:
    """Splits a stream into its events."""
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    pieces = reply.text.split("\n\n")
    assert pieces.pop() == ""
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


async def test_one_response(client: httpx.AsyncClient) -> None:
    """Outputs, parameters and what the server tells, flat in one object."""
    reply = await client.post(
        "/v2/models/echo/generate",
        json={"id": "7", "x": NUMBERS, "parameters": {"told_it": "a"}},
        headers={"told_me": "b"},
    )

    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {
        "id": "7",
        "model_name": "echo",
        "model_version": "2",
        "y": [1.0, 2.0, 3.0, 4.0],
        "told_it": "a",
        "told_me": "b",
    }


async def test_one_element_is_a_scalar(client: httpx.AsyncClient) -> None:
    """Of a version that is named, and both ways."""
    reply = await client.post("/v2/models/one/versions/1/generate", json={"x": "hello"})

    assert reply.json() == {"model_name": "one", "model_version": "1", "y": "hello"}


@pytest.mark.parametrize("responses", [0, 2, 3])
async def test_generate_wants_one_response(client: httpx.AsyncClient, running: Running, responses: int) -> None:
    """Neither none nor several; nothing is left behind."""
    reply = await client.post("/v2/models/echo/generate", json={"x": NUMBERS, "responses": responses})

    assert (reply.status_code, reply.json()) == (400, {"error": NOT_ONE})
    assert running.gateway.dispatcher.in_flight == 0


@pytest.mark.parametrize("responses", [0, 1, 3])
async def test_a_stream_has_each_response(client: httpx.AsyncClient, responses: int) -> None:
    """As an event."""
    reply = await client.post("/v2/models/echo/generate_stream", json={"x": NUMBERS, "responses": responses})

    assert reply.status_code == 200
    one = {"model_name": "echo", "model_version": "2", "y": [1.0, 2.0, 3.0, 4.0]}
    assert events(reply) == [one] * responses


async def test_a_stream_of_a_named_version(client: httpx.AsyncClient) -> None:
    """The version is told."""
    reply = await client.post("/v2/models/echo/versions/1/generate_stream", json={"id": "a", "x": NUMBERS})

    assert [(event["id"], event["model_version"]) for event in events(reply)] == [("a", "1")]


async def test_a_failure_decides_the_status_of_a_stream(client: httpx.AsyncClient) -> None:
    """When it is the first response; it comes as an event, too."""
    reply = await client.post("/v2/models/fails/generate_stream", json={"x": NUMBERS})

    assert reply.status_code == 500
    assert events(reply) == [{"error": "the model raised: boom"}]


async def test_a_failure_of_generate(client: httpx.AsyncClient) -> None:
    """As in infer."""
    reply = await client.post("/v2/models/fails/generate", json={"x": NUMBERS})

    assert reply.status_code == 500
    assert reply.json() == {"error": "the model raised: boom"}


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("echo", {"x": [1, 2, 3]}, 400, "The schema can not convert input 'x' to tensor with proper shape"),
        ("echo", {}, 400, "expected 1 inputs but got 0 inputs for model 'echo'"),
        (
            "echo",
            {"x": [1, 2, 3, 4], "parameters": {"nested": {"twice": 1}}},
            400,
            "Converting keyword: 'parameters': parameter 'nested' has invalid type.",
        ),
        ("echo", {"x": [1, 2, 3, 4], "nested": {}}, 400, "parameter 'nested' has invalid type."),
        ("echo", [], 500, "attempt to get members for non-object"),
        ("nope", {"x": 1}, 404, "Request for unknown model: 'nope' is not found"),
        ("echo/versions/9", {"x": 1}, 404, "Request for unknown model: 'echo' version 9 is not found"),
        ("echo/versions/x", {"x": 1}, 400, "failed to get model version from specified version string"),
        ("loading/versions/1", {"x": 1}, 503, "'loading' version 1 is not at ready state"),
        ("half", {"x": [1, 2]}, 400, "receiving FP16 data via JSON is not supported"),
    ],
)
async def test_bad_requests(
    client: httpx.AsyncClient, route: str, path: str, body: Any, status: int, text: str
) -> None:
    """An error and no stream."""
    reply = await client.post(f"/v2/models/{path}/{route}", json=body)

    assert (reply.status_code, text in reply.json()["error"]) == (status, True), reply.text
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
async def test_bodies_are_not_compressed(client: httpx.AsyncClient, encoding: str) -> None:
    """Triton's text, whatever the encoding; and no reply is compressed."""
    reply = await client.post("/v2/models/echo/generate", content=b"", headers={"content-encoding": encoding})

    assert reply.status_code == 400
    assert reply.json() == {"error": "Unsupported content-encoding, only 'identity' is supported."}
    plain = await client.post("/v2/models/echo/generate", json={"x": NUMBERS}, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers


async def test_other_methods_are_refused(client: httpx.AsyncClient) -> None:
    """As everywhere."""
    reply = await client.get("/v2/models/echo/generate")

    assert (reply.status_code, reply.json()) == (405, {"error": "Method Not Allowed"})


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
async def test_a_client_that_leaves_cancels(running: Running, route: str) -> None:
    """Nobody executes what nobody waits for."""
    body = json.dumps({"x": NUMBERS}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(
        b"POST /v2/models/stuck/%b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
        % (route.encode(), len(body), body)
    )
    await until_in_flight(running, 1)
    writer.close()
    await writer.wait_closed()
    await until_in_flight(running, 0)

    await running.emptied("stuck")
