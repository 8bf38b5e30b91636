"""Answers of a model with `preserve_ordering`, over connections of both protocols."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from qinfer.core.messages import InferRequest, Response
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from qinfer.wire.frame import decode_request, encode_responses
from tests.support.gateway import declare_more
from tests.support.rpc import Rpc, infer_request, rpc, value_of

BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.fixture
async def server() -> AsyncIterator[Rpc]:
    async with rpc() as one:
        await declare_more(one.running, "ordered", is_ready=True, more="dynamic_batching { preserve_ordering: true }")
        await one.running.refresh()
        yield one


async def respond(server: Rpc, *requests: InferRequest) -> None:
    """Answers requests, and waits until the gateway has taken the answers."""
    left = server.running.gateway.dispatcher.in_flight - len(requests)
    for request in requests:
        response = Response(request_id=request.id, model="ordered", version=1, outputs=(request.inputs[0],))
        await server.running.delivery.publish(request.reply_to, encode_responses([response]))
    await eventually(lambda: server.running.gateway.dispatcher.in_flight == left, description="the answers")


async def asked(server: Rpc, *calls: Any) -> tuple[list["asyncio.Task[Any]"], list[InferRequest]]:
    """Begins calls, each once the request of the last one is in the queue; returns them, and their requests."""
    tasks, requests = [], []
    for call in calls:
        tasks.append(asyncio.create_task(call))
        (lease,) = await server.running.delivery.fetch([Lane("ordered", 1)], "hand", 1, 10.0)
        await server.running.delivery.finish([lease.entry])
        requests.append(decode_request(lease.frame))
    return tasks, requests


async def asked_by_both(server: Rpc, client: httpx.AsyncClient) -> tuple[list[asyncio.Task[Any]], list[InferRequest]]:
    """Sends a request over HTTP, and then one over gRPC; returns the calls, and the requests that a worker took."""
    over_http = client.post(f"{server.running.url}/v2/models/ordered/infer", json=BODY)
    return await asked(server, over_http, _call(server, infer_request("ordered", 2.0)))


async def test_answers_keep_the_order_across_connections(server: Rpc) -> None:
    """A later request's answer waits for that of an earlier one, which came by another connection and protocol."""
    async with httpx.AsyncClient() as client:
        (first, second), requests = await asked_by_both(server, client)

        await respond(server, requests[1])
        await server.stub.ModelInfer(infer_request("echo"))  # by the connection of the second one, behind its answer
        assert not second.done()
        await respond(server, requests[0])

        assert (await first).json()["outputs"][0]["data"] == [1, 2, 3, 4]
        assert value_of(await second) == 2.0


async def test_a_client_that_leaves_holds_no_other(server: Rpc) -> None:
    async with httpx.AsyncClient() as client:
        (first, second), requests = await asked_by_both(server, client)
        await respond(server, requests[1])

        first.cancel()

        assert value_of(await second) == 2.0


async def _call(server: Rpc, request: Any) -> Any:
    return await server.stub.ModelInfer(request)
