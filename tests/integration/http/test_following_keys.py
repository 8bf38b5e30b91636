"""A gateway follows its file of API keys: on open connections, in long polls, in every kind of stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import httpx
import msgspec
import pytest

from qinfer.core.api_keys import Scope, add_key, revoke_key, rotate_key
from qinfer.core.messages import Response
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from qinfer.wire.frame import decode_request, encode_responses
from qinfer_api.auth import Auth
from tests.support.gateway import Running, running_gateway, settings_of

BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/echo/infer"
SUBMIT = "/v1/models/stuck/requests"
REVOKED = "key 'acme' was revoked; use another"


class Door:
    """A gateway that asks for keys, a client with the key `acme`, and the file."""

    def __init__(self, running: Running, client: httpx.AsyncClient, file: Path) -> None:
        self.running, self.client, self.file = running, client, file

    async def revoke(self) -> None:
        """Removes the client's key from the file, and waits until the gateway knows."""
        revoke_key(self.file, "acme")
        auth = self.running.gateway.dispatcher._auth
        assert isinstance(auth, Auth)
        await eventually(lambda: not auth.has_key("acme"), description="the new content of the file")


@pytest.fixture(params=["fast", "route"])
async def door(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Door]:
    file = tmp_path / "keys.json"
    _, key = add_key(file, "acme", (Scope.INFER,), "acme")
    add_key(file, "ops", (Scope.ADMIN,), "admin")
    settings = settings_of({"fast_path": request.param == "fast"}, auth={"mode": "keys", "keys_file": str(file)})
    headers = {"authorization": f"Bearer {key}"}
    async with (
        running_gateway(settings) as running,
        httpx.AsyncClient(base_url=running.url, headers=headers, limits=httpx.Limits(max_connections=8)) as client,
    ):
        yield Door(running, client, file)


async def test_a_new_key_is_served_and_a_revoked_one_refused(door: Door) -> None:
    """On a connection that was open before, too."""
    assert (await door.client.post(INFER, json=BODY)).status_code == 200

    _, key = add_key(door.file, "other", (Scope.INFER,), "other")

    async def is_served() -> bool:
        reply = await door.client.post(INFER, json=BODY, headers={"authorization": f"Bearer {key}"})
        return reply.status_code == 200

    await eventually(is_served, description="the new key's turn")
    await door.revoke()
    refused = await door.client.post(INFER, json=BODY)
    assert (refused.status_code, refused.json()) == (401, {"error": "the API key is not known; ask for another"})
    assert await is_served()


async def test_a_file_without_keys_shuts_nobody_out(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """As when a Secret is emptied by mistake."""
    door.file.write_text("")
    await eventually(lambda: "API keys can't be read" in caplog.text, description="the error")

    assert (await door.client.post(INFER, json=BODY)).status_code == 200


async def test_a_key_that_expires_is_refused(door: Door) -> None:
    """Its successor is served: nothing has to be restarted for that."""
    _, key = rotate_key(door.file, "acme", timedelta(0))

    async def is_refused() -> bool:
        return (await door.client.post(INFER, json=BODY)).status_code == 401

    await eventually(is_refused, description="the end of the overlap")
    assert "has expired" in (await door.client.post(INFER, json=BODY)).json()["error"]
    reply = await door.client.post(INFER, json=BODY, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200


@pytest.mark.parametrize("path", [INFER, "/v1/models/echo/requests", "/v1/jobs"])
async def test_a_body_that_ends_after_the_revocation_is_refused(door: Door, path: str) -> None:
    """Its head was authorized before."""
    text = json.dumps(BODY).encode() + b" " * 50_000
    revoked = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield text[:-1]
        await revoked.wait()
        yield text[-1:]

    headers = {"content-length": str(len(text))}
    call = asyncio.create_task(door.client.post(path, content=body(), headers=headers))
    await eventually(lambda: door.running.gateway.receiving.held_bytes > 0, description="a body that is received")
    await door.revoke()
    revoked.set()

    assert (await call).status_code == 401
    assert door.running.requests == []


async def test_a_long_poll_ends_with_the_key(door: Door) -> None:
    accepted = await door.client.post(SUBMIT, json=BODY)
    waits = door.running.gateway.requests.waits
    poll = asyncio.create_task(
        door.client.get(f"{accepted.headers['location']}/result", params={"wait": 30}, timeout=40)
    )
    await eventually(lambda: waits._places.taken == 1, description="a client that waits")

    await door.revoke()

    reply = await poll
    assert (reply.status_code, reply.json()) == (401, {"error": REVOKED})


async def test_an_event_stream_ends_with_the_key(door: Door) -> None:
    """And asking again is refused."""
    accepted = await door.client.post(SUBMIT, json=BODY)
    path = f"{accepted.headers['location']}/events"

    async with door.client.stream("GET", path) as reply:
        lines = reply.aiter_lines()
        assert await anext(lines) == "event: state"
        await door.revoke()
        rest = [line async for line in lines]

    assert [line for line in rest if line.startswith("event:")] == []
    assert (await door.client.get(path)).status_code == 401
    assert door.running.gateway.requests.waits._places.taken == 0


async def test_a_stream_of_responses_ends_with_the_key(door: Door) -> None:
    """Its last event is the error, and its request leaves the queue."""
    delivery = door.running.delivery
    call = asyncio.create_task(door.client.post("/v2/models/stuck/generate_stream", json={"x": [1, 2, 3, 4]}))
    while not (leases := await delivery.fetch([Lane("stuck", 1)], "hand", 1, 100)):
        pass
    request = decode_request(leases[0].frame)
    outputs = tuple(msgspec.structs.replace(tensor, name="y") for tensor in request.inputs)
    first = Response(request_id=request.id, model="stuck", version=1, outputs=outputs, final=False)
    await delivery.publish(request.reply_to, encode_responses([first]))
    await door.revoke()

    await delivery.publish(request.reply_to, encode_responses([msgspec.structs.replace(first, index=1)]))

    events = [json.loads(line[6:]) for line in (await call).text.splitlines() if line]
    assert "error" not in events[0]
    assert events[1:] == [{"error": REVOKED}]
    await eventually(lambda: door.running.gateway.dispatcher.in_flight == 0, description="the end of the request")
