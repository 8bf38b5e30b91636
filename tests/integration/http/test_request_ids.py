"""Every reply names the request that it answers: the id that its frame, its span and its log lines have."""

import asyncio
import json
import re
import socket

import httpx
import pytest

from tests.support.gateway import running_gateway, settings_of

HEADER = "qinfer-request-id"
ULID = re.compile("[0-9A-HJKMNP-TV-Z]{26}")
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("model", ["echo", "fails"])
async def test_a_reply_names_the_request_that_a_worker_answered(fast: bool, model: str) -> None:  # noqa: FBT001
    """Whichever way it took, and however it ended."""
    async with running_gateway(settings_of({"fast_path": fast})) as running, httpx.AsyncClient() as client:
        replies = [await client.post(f"{running.url}/v2/models/{model}/infer", json=BODY) for _ in range(3)]

        names = [reply.headers[HEADER] for reply in replies]
        assert names == [request.id for request in running.requests]
        assert len(set(names)) == 3


@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
async def test_a_stream_names_its_request(kind: str) -> None:
    """In its head, once."""
    async with running_gateway() as running, httpx.AsyncClient() as client:
        reply = await client.post(f"{running.url}/v2/models/echo/{kind}", json={"x": [1, 2, 3, 4]})

        assert reply.headers.get_list(HEADER) == [running.requests[0].id]


async def test_an_asynchronous_request_is_named_by_all_its_replies() -> None:
    """That to its submission, and those about it later."""
    async with running_gateway() as running, httpx.AsyncClient(base_url=running.url) as client:
        accepted = await client.post("/v1/models/echo/requests", json=BODY)
        name = accepted.json()["id"]
        asked = [await client.get(f"/v1/requests/{name}"), await client.delete(f"/v1/requests/{name}")]

        assert [reply.headers[HEADER] for reply in (accepted, *asked)] == [name] * 3


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v2/models/echo/infer", b"{", 400),
        ("POST", "/v2/models/none/infer", json.dumps(BODY).encode(), 404),
        ("POST", "/v2/models/echo/infer", json.dumps(BODY).replace("[1, 4]", "[1, 5]").encode(), 500),
        ("GET", "/v2/health/live", b"", 200),
        ("GET", "/nowhere", b"", 404),
        ("DELETE", "/v2", b"", 405),
        ("GET", "/v1/requests/none", b"", 404),
    ],
)
async def test_what_became_no_request_has_a_new_id(
    fast: bool,  # noqa: FBT001
    method: str,
    path: str,
    content: bytes,
    status: int,
) -> None:
    """Another one each time, refused or not."""
    async with running_gateway(settings_of({"fast_path": fast})) as running, httpx.AsyncClient() as client:
        replies = [await client.request(method, running.url + path, content=content) for _ in range(2)]

        assert [reply.status_code for reply in replies] == [status] * 2
        names = [reply.headers[HEADER] for reply in replies]
        assert all(ULID.fullmatch(name) for name in names)
        assert names[0] != names[1]


async def test_a_caller_without_a_key_is_refused_with_an_id() -> None:
    """Restrictions are checked before anything else."""
    restricted = settings_of({"restricted": ["inference:secret=s"]})
    async with running_gateway(restricted) as running, httpx.AsyncClient() as client:
        reply = await client.post(f"{running.url}/v2/models/echo/infer", json=BODY)

        assert reply.status_code == 403
        assert ULID.fullmatch(reply.headers[HEADER])


@pytest.mark.parametrize("data", [b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\na: " + b"b" * 200_000])
async def test_what_is_no_http_is_refused_with_an_id(data: bytes) -> None:
    """Below ASGI, too."""
    async with running_gateway() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, family=socket.AF_INET)
        writer.write(data)

        head = (await reader.readuntil(b"\r\n\r\n")).decode()

        assert re.search(f"\r\n{HEADER}: {ULID.pattern}\r\n", head)
        writer.close()


async def test_a_name_that_is_no_ascii_is_percent_encoded() -> None:
    """As in gRPC."""
    async with running_gateway() as running, httpx.AsyncClient() as client:
        reply = await client.post(f"{running.url}/v2/models/sp%C3%A4te%20modelle/infer", json=BODY)

        assert reply.headers[HEADER] == running.requests[0].id.replace("ä", "%C3%A4")
