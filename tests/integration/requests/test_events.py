"""`…/events` as server-sent events, `Prefer` on `/v2` and `/v1`, and what a shutdown ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer.errors import BrokerUnavailable
from qinfer.testing import eventually
from qinfer_api.requests import routes
from tests.support.gateway import Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

INFER = "/v2/models/{}/infer"
REQUESTS = "/v1/models/{}/requests"
TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
BODY: dict[str, Any] = {"inputs": [TENSOR]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, headers={"accept-encoding": "identity"}) as opened:
        yield opened


async def submitted(client: httpx.AsyncClient, model: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.post(REQUESTS.format(model), json=BODY)).json()
    return found


def states(text: str) -> list[str]:
    return [json.loads(line[6:])["state"] for line in text.splitlines() if line.startswith("data: ")]


# --- events ---


async def test_events_follow_a_request_to_its_end(client: httpx.AsyncClient, running: Running) -> None:
    """The stream has the state now and each change, and then ends."""
    record = await submitted(client, "stuck")
    seen: list[str] = []

    async with client.stream("GET", record["links"]["events"]) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for line in reply.aiter_lines():
            seen += states(line)
            if seen == ["queued"] and line == "":
                await client.delete(record["links"]["self"])

    assert seen == ["queued", "cancelled"]
    assert running.gateway.requests.waits._watched == {}


async def test_a_stream_ends_when_the_queue_is_away(
    client: httpx.AsyncClient, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Properly, so that whoever listens comes again."""
    record = await submitted(client, "stuck")
    monkeypatch.setattr(routes, "HEARTBEAT_S", 0.01)

    async def away(*_: object) -> None:
        raise BrokerUnavailable("the queue can't be reached")

    async with client.stream("GET", record["links"]["events"]) as reply:
        lines = reply.aiter_lines()
        first = await anext(lines)
        monkeypatch.setattr(running.gateway.requests.waits._requests, "record", away)
        rest = [line async for line in lines]
    monkeypatch.undo()
    await client.delete(record["links"]["self"])

    assert (first, reply.status_code) == ("event: state", 200)
    assert states("\n".join(rest)) == ["queued"]


async def test_the_events_of_a_request_that_has_ended(client: httpx.AsyncClient) -> None:
    """One event with an id; who has seen it is told not to come back."""
    record = await submitted(client, "echo")
    await client.get(record["links"]["result"] + "?wait=20")

    text = (await client.get(record["links"]["events"])).text
    last = next(line[4:] for line in text.splitlines() if line.startswith("id: "))
    again = await client.get(record["links"]["events"], headers={"last-event-id": last})

    assert states(text) == ["succeeded"]
    assert text.startswith("event: state\nid: ")
    assert (again.status_code, again.content) == (204, b"")


async def test_a_quiet_stream_is_kept_alive(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """By comments, which are no events; who comes back is not told again what it knows."""
    monkeypatch.setattr(routes, "HEARTBEAT_S", 0.01)
    record = await submitted(client, "stuck")

    async with client.stream("GET", record["links"]["events"], headers={"last-event-id": "0-queued"}) as reply:
        async for line in reply.aiter_lines():
            assert line == ": still here"
            break


async def test_too_many_watchers(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 and when to come back; a long poll is answered at once instead."""
    monkeypatch.setattr("qinfer_api.requests.service.MAX_WAITS", 0)
    record = await submitted(client, "stuck")

    stream = await client.get(record["links"]["events"])
    poll = await client.get(record["links"]["result"] + "?wait=30")

    assert (stream.status_code, stream.headers["retry-after"]) == (503, "1")
    assert (poll.status_code, poll.headers["retry-after"]) == (202, "1")


async def test_a_shutdown_ends_waits_and_streams() -> None:
    """202 and the end of the stream, at once, and the requests stay."""
    async with running_gateway() as running, httpx.AsyncClient(base_url=running.url) as client:
        record = await submitted(client, "stuck")
        polling = asyncio.ensure_future(client.get(record["links"]["result"] + "?wait=30"))
        async with client.stream("GET", record["links"]["events"]) as reply:
            lines = reply.aiter_lines()
            assert await anext(lines) == "event: state"
            (watched,) = running.gateway.requests.waits._watched[record["id"]].values()
            await eventually(lambda: len(watched.events) == 2)
            running.gateway.stop()
            rest = [line async for line in lines]

        assert (await polling).status_code == 202
        assert states("\n".join(rest)) == ["queued"]
        assert await running.depth("stuck") == 1


# --- Prefer (RFC 7240) ---


@pytest.mark.parametrize("url", [INFER, REQUESTS])
async def test_respond_async(client: httpx.AsyncClient, url: str) -> None:
    """202 on both, and the result where it says."""
    reply = await client.post(url.format("echo"), json=BODY, headers={"prefer": "respond-async"})

    assert (reply.status_code, reply.headers["preference-applied"]) == (202, "respond-async")
    result = await client.get(reply.headers["location"] + "/result?wait=20")
    assert result.json()["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("url", [INFER, REQUESTS])
@pytest.mark.parametrize("prefer", ["wait=20", "respond-async, wait=20", 'foo; bar="a,b", Wait = 20'])
async def test_a_result_in_time_is_the_answer(client: httpx.AsyncClient, url: str, prefer: str) -> None:
    """The answer is that of the synchronous call, and can be read again."""
    synchronous = await client.post(INFER.format("echo"), json=BODY)

    reply = await client.post(url.format("echo"), json=BODY, headers={"prefer": prefer})

    assert (reply.status_code, reply.content) == (200, synchronous.content)
    assert (reply.headers["preference-applied"], reply.headers["qinfer-request-state"]) == ("wait=20", "succeeded")
    assert (await client.get(reply.headers["location"] + "/result")).content == synchronous.content


@pytest.mark.parametrize("prefer", ["respond-async, wait=0", "wait=0"])
async def test_no_result_in_time(client: httpx.AsyncClient, prefer: str) -> None:
    """202: the request goes on."""
    reply = await client.post(INFER.format("stuck"), json=BODY, headers={"prefer": prefer})

    assert (reply.status_code, reply.json()["state"]) == (202, "queued")
    assert reply.headers["preference-applied"] == prefer


async def test_a_failure_in_time_is_the_answer(client: httpx.AsyncClient) -> None:
    """With its status."""
    reply = await client.post(INFER.format("fails"), json=BODY, headers={"prefer": "wait=20"})

    assert (reply.status_code, "the model raised: boom" in reply.json()["error"]) == (500, True)


@pytest.mark.parametrize("prefer", ["handling=strict", "wait=soon", "wait", "wait=-1", "respond_async", ',,;;="', ""])
async def test_other_preferences_change_nothing(client: httpx.AsyncClient, prefer: str) -> None:
    """Unknown and malformed ones are ignored (RFC 7240 §2)."""
    reply = await client.post(INFER.format("echo"), json=BODY, headers={"prefer": prefer})

    assert (reply.status_code, "location" in reply.headers) == (200, False)


async def test_errors_on_v2_keep_its_statuses(client: httpx.AsyncClient) -> None:
    """A full lane is 503 there, with when to try again."""
    prefer = {"prefer": "respond-async"}
    for _ in range(3):
        await client.post(INFER.format("bounded"), json=BODY, headers=prefer)

    reply = await client.post(INFER.format("bounded"), json=BODY, headers=prefer)

    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"].endswith("Exceeds maximum queue size")
