"""Decoupled models through HTTP: what infer refuses, what generate takes, and streams as they come and are taken."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from qinfer.cli.client import GatewayClient
from qinfer.core.messages import Failure, InferRequest
from qinfer.testing import eventually
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.streaming import StreamWorker, stream_worker

X = [1, 2, 3, 4]
DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
WINDOW_BYTES = 100_000
MB = 10**6


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway(settings_of(limits={"stream_window_bytes": WINDOW_BYTES})) as gateway:
        yield gateway


@pytest.fixture
async def worker(running: Running) -> AsyncIterator[StreamWorker]:
    async with stream_worker(running.delivery, "flow") as by_hand:
        yield by_hand


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=20) as client:
        yield client


async def is_idle(running: Running, model: str = "flow") -> bool:
    return running.gateway.dispatcher.in_flight == 0 and await running.depth(model) == 0


@pytest.mark.parametrize("large", [False, True])
async def test_infer_refuses_a_decoupled_model(running: Running, client: httpx.AsyncClient, *, large: bool) -> None:
    """With Triton's text, and without executing it."""
    count = 200_000 if large else 4
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, count], "data": [1] * count}]}

    reply = await client.post("/v2/models/flow/infer", json=body)

    assert (reply.status_code, reply.json()) == (501, {"error": DECOUPLED})
    assert await is_idle(running)


@pytest.mark.parametrize(("model", "is_decoupled"), [("flow", True), ("echo", False)])
async def test_the_command_line_knows_what_streams(running: Running, model: str, *, is_decoupled: bool) -> None:
    """So that the example of `qinfer up` is one that the model answers."""
    with GatewayClient(running.url) as gateway:
        config = await asyncio.to_thread(gateway.config, model)
        assert config.get("model_transaction_policy", {}).get("decoupled", False) is is_decoupled


@pytest.mark.parametrize(("count", "is_one"), [(0, False), (1, True), (2, False)])
async def test_generate_takes_exactly_one_response(
    running: Running, client: httpx.AsyncClient, worker: StreamWorker, count: int, *, is_one: bool
) -> None:
    """The end, which is empty, is none."""
    asking = asyncio.create_task(client.post("/v2/models/flow/generate", json={"x": X}))
    (request,) = await worker.fetched()
    for index in range(count):
        await worker.send(request, index)
    if count < 2:
        await worker.end(request, count)

    reply = await asking

    assert reply.status_code == (200 if is_one else 400)
    assert (reply.json().get("y") == X) is is_one
    await eventually(lambda: is_idle(running), description="nothing is left")


async def test_generate_tells_why_there_is_no_end(client: httpx.AsyncClient, worker: StreamWorker) -> None:
    """The one response that came may have been all, or not."""
    asking = asyncio.create_task(client.post("/v2/models/flow/generate", json={"x": X}))
    (request,) = await worker.fetched()
    await worker.send(request, 0)
    await worker.send(request, 0, attempt=2)

    reply = await asking

    assert reply.status_code == 503
    assert "ended after 1 responses; send the request again" in reply.json()["error"]


async def test_events_come_as_responses_do(running: Running, client: httpx.AsyncClient, worker: StreamWorker) -> None:
    """One by one; an error among them is told, and the stream goes on."""
    async with streamed(client, worker) as (request, events):
        got: list[Any] = []
        for index in range(3):
            await worker.send(request, index)
            got.append((await anext(events))["y"])
        await worker.send(request, 3, outputs=(), failure=Failure("inference_failed", "a bad frame"))
        got.append(await anext(events))
        await worker.send(request, 4)
        got.append((await anext(events))["y"])
        await worker.end(request, 5)
        rest = [event async for event in events]

    assert got == [X, X, X, {"error": "a bad frame"}, X]
    assert rest == []
    await eventually(lambda: is_idle(running), description="nothing is left")


async def test_what_was_read_is_told_to_the_worker(client: httpx.AsyncClient, worker: StreamWorker) -> None:
    async with streamed(client, worker) as (request, events):
        for index in range(3):
            await worker.send(request, index)
            await anext(events)

        await worker.taken(request.id, 48)
        await worker.end(request, 3)

    assert {credit.attempt for credit in worker.credits} == {1}


async def test_another_execution_ends_a_stream_that_has_begun(
    running: Running, client: httpx.AsyncClient, worker: StreamWorker
) -> None:
    """With an error that says how far it came, and that it may be sent again; its entry leaves the queue."""
    async with streamed(client, worker) as (request, events):
        await worker.send(request, 0)
        await anext(events)
        await worker.send(request, 0, attempt=2)
        rest = [event async for event in events]

    assert [event["error"] for event in rest] == [
        "the worker that executed the request ended after 1 responses; send the request again"
    ]
    await eventually(lambda: is_idle(running), description="the entry is taken out")


async def test_a_first_failure_decides_the_status(client: httpx.AsyncClient, worker: StreamWorker) -> None:
    asking = asyncio.create_task(client.post("/v2/models/flow/generate_stream", json={"x": X}))
    (request,) = await worker.fetched()
    await worker.send(request, 0, final=True, outputs=(), failure=Failure("stream_broken", "gone", retryable=True))

    reply = await asking

    assert reply.status_code == 503
    assert "ended after 0 responses; send the request again" in reply.text


async def test_a_model_that_repeats_itself_goes_on(running: Running, client: httpx.AsyncClient) -> None:
    """Its caller sees one unbroken stream."""
    async with (
        stream_worker(running.delivery, "resuming") as worker,
        streamed(client, worker, "resuming") as (request, events),
    ):
        for index in range(2):
            await worker.send(request, index, parameters={"told": index})
        got = [(await anext(events))["told"] for _ in range(2)]
        for index in range(4):
            await worker.send(request, index, attempt=2, parameters={"told": index})
        await worker.send(request, 4, attempt=2, final=True, outputs=())
        got += [event["told"] async for event in events]

    assert got == [0, 1, 2, 3]


async def test_who_leaves_cancels(running: Running, client: httpx.AsyncClient, worker: StreamWorker) -> None:
    """Its entry leaves the queue, though a worker executes it."""
    async with streamed(client, worker) as (request, events):
        await worker.send(request, 0)
        await anext(events)

    await eventually(lambda: is_idle(running), description="the entry is taken out")


async def test_a_reader_that_does_not_read_holds_a_window(running: Running, worker: StreamWorker) -> None:
    """Of 100 MB, in gateway and Redis together; others are served meanwhile."""
    total, each = 100 * MB, 50_000
    _, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=2**16)
    body = json.dumps({"x": X}).encode()
    head = f"POST /v2/models/flow/generate_stream HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    (request,) = await worker.fetched()
    pouring = asyncio.create_task(worker.pour(request, total, each, WINDOW_BYTES))

    await worker.is_stuck(request.id)
    sent, on_its_way = worker.sent_bytes[request.id], worker.on_its_way(request.id)
    async with httpx.AsyncClient(base_url=running.url) as other:
        echoed = await other.post("/v2/models/echo/generate", json={"x": X})

    assert on_its_way <= WINDOW_BYTES
    assert sent < total / 4  # what sockets hold, besides
    assert echoed.status_code == 200
    pouring.cancel()
    writer.close()
    await eventually(lambda: running.gateway.dispatcher.in_flight == 0, description="nothing is in flight")


class streamed:
    """Asks for a stream, whose request a worker takes; gives the request and the events as they come."""

    def __init__(self, client: httpx.AsyncClient, worker: StreamWorker, model: str = "flow") -> None:
        self._asking = client.stream("POST", f"/v2/models/{model}/generate_stream", json={"x": X})
        self._worker = worker

    async def __aenter__(self) -> tuple[InferRequest, AsyncIterator[Any]]:
        self._entering = asyncio.create_task(self._asking.__aenter__())
        (request,) = await self._worker.fetched()
        return request, self._events()

    async def __aexit__(self, *_: object) -> None:
        await (await self._entering).aclose()

    async def _events(self) -> AsyncIterator[Any]:
        reply = await self._entering
        async for line in reply.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))
