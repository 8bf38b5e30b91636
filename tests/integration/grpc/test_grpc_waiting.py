"""Requests for models without a live worker: they wait for one in the queue, for a while, on every way in."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import httpx
import pytest

from qinfer.models.state import State, VersionState, WorkerRecord
from qinfer.testing import eventually
from tests.support.gateway import Running, work
from tests.support.rpc import Rpc, infer_request, rpc, value_of

BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}

Ask = Callable[[Rpc, httpx.AsyncClient], Coroutine[Any, Any, tuple[str, str]]]
"""Asks `loading`; returns how that ended (`ok`, or the status), and the value or text."""


async def by_http(path: str, client: httpx.AsyncClient) -> tuple[str, str]:
    body = {"x": [1, 2, 3, 4]} if "generate" in path else BODY
    reply = await client.post(path, json=body)
    if reply.status_code != 200:
        assert reply.headers["retry-after"] == "1"
        return str(reply.status_code), json.loads(reply.text.removeprefix("data:"))["error"]
    return "ok", reply.text


async def infer(_: Rpc, client: httpx.AsyncClient) -> tuple[str, str]:
    return await by_http("/v2/models/loading/infer", client)


async def infer_version(_: Rpc, client: httpx.AsyncClient) -> tuple[str, str]:
    return await by_http("/v2/models/loading/versions/1/infer", client)


async def generate(_: Rpc, client: httpx.AsyncClient) -> tuple[str, str]:
    return await by_http("/v2/models/loading/generate", client)


async def generate_stream(_: Rpc, client: httpx.AsyncClient) -> tuple[str, str]:
    return await by_http("/v2/models/loading/generate_stream", client)


async def call(server: Rpc, _: httpx.AsyncClient) -> tuple[str, str]:
    try:
        reply = await server.stub.ModelInfer(infer_request("loading"))
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "ok", str(value_of(reply))


async def stream(server: Rpc, _: httpx.AsyncClient) -> tuple[str, str]:
    calls = server.stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    await calls.write(infer_request("loading"))
    await calls.done_writing()
    try:
        (reply,) = [reply async for reply in calls]
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "ok", str(value_of(reply.infer_response))


WAYS = {
    "infer": infer,
    "a version": infer_version,
    "generate": generate,
    "generate_stream": generate_stream,
    "gRPC": call,
    "gRPC stream": stream,
}
every_way = pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)


@pytest.fixture
async def patient() -> AsyncIterator[Rpc]:
    """A gateway whose callers wait for a worker."""
    async with rpc(limits={"wait_for_workers_s": 30}) as server:
        yield server


@pytest.fixture
async def hasty() -> AsyncIterator[Rpc]:
    """A gateway whose callers hardly wait."""
    async with rpc(limits={"wait_for_workers_s": 0.05}) as server:
        yield server


async def load(running: Running, state: State = State.READY, reason: str = "") -> None:
    """Has a worker say how it has `loading`."""
    states = {"loading": {1: VersionState(state, 1, reason, 1)}}
    await running.store.heartbeat(WorkerRecord(id="w2", started_at=0.0, models=states), ttl_s=60)
    await running.refresh()


@every_way
async def test_a_worker_that_comes_in_time_answers(patient: Rpc, ask: Ask) -> None:
    running = patient.running
    async with httpx.AsyncClient(base_url=running.url, timeout=30) as client, asyncio.TaskGroup() as group:
        asked = group.create_task(ask(patient, client))
        await eventually(lambda: running.gateway.dispatcher.in_flight == 1, description="a request that waits")

        await load(running)
        worker = group.create_task(work(running, "loading"))

        outcome, _ = await asked
        worker.cancel()

    assert outcome == "ok"


@every_way
async def test_without_a_worker_the_wait_ends(hasty: Rpc, ask: Ask) -> None:
    """The request is taken out of the queue, and may be tried again."""
    async with httpx.AsyncClient(base_url=hasty.running.url, timeout=30) as client:
        outcome, text = await ask(hasty, client)

    assert outcome in ("503", "UNAVAILABLE")
    assert "no worker took the request for 'loading' version 1 within 0.05 s" in text
    await hasty.running.emptied("loading")


@every_way
async def test_what_every_worker_failed_to_load_is_refused_at_once(patient: Rpc, ask: Ask) -> None:
    await load(patient.running, State.UNAVAILABLE, "the file is damaged")

    async with httpx.AsyncClient(base_url=patient.running.url, timeout=30) as client:
        outcome, text = await ask(patient, client)

    assert outcome in ("503", "UNAVAILABLE")
    assert text.endswith(": the file is damaged")
    assert await patient.running.depth("loading") == 0
