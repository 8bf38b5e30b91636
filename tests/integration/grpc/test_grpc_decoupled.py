"""Decoupled models through gRPC (reference §2.3): what ModelInfer refuses, and streams as they come and are taken."""

import asyncio
import queue
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient as BlockingClient
from tritonclient.grpc import InferInput, InferResult
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from qinfer.core.messages import Failure
from qinfer.testing import eventually
from tests.support.rpc import ROW, Rpc, infer_request, rpc, value_of
from tests.support.streaming import StreamWorker, stream_worker

WINDOW_BYTES = 100_000


@pytest.fixture
async def server() -> AsyncIterator[Rpc]:
    async with rpc(limits={"stream_window_bytes": WINDOW_BYTES}) as server:
        yield server


@pytest.fixture
async def worker(server: Rpc) -> AsyncIterator[StreamWorker]:
    async with stream_worker(server.running.delivery, "flow") as by_hand:
        yield by_hand


async def is_idle(server: Rpc) -> bool:
    return server.running.gateway.dispatcher.in_flight == 0 and await server.running.depth("flow") == 0


def ids(replies: Sequence[Any]) -> list[str]:
    return [reply.infer_response.id for reply in replies]


def is_final(reply: Any) -> bool:
    return bool(reply.infer_response.parameters["triton_final_response"].bool_param)


async def test_a_single_call_refuses_a_decoupled_model(server: Rpc) -> None:
    """With Triton's text, and without executing it."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await server.stub.ModelInfer(infer_request("flow"))

    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.value.details() == "ModelInfer RPC doesn't support models with decoupled transaction policy"
    assert await is_idle(server)


async def test_responses_of_several_requests_interleave(server: Rpc, worker: StreamWorker) -> None:
    """As they come, also where a request has only one; each request's own are in order."""
    call = server.stub.ModelStreamInfer()
    for name in ("a", "b", "c"):
        await call.write(infer_request("flow", id=name))
    a, b, c = await worker.fetched(3)
    await worker.send(c, 0, final=True)
    await worker.send(b, 0)
    await worker.send(a, 0)
    await worker.send(b, 1)
    await worker.send(a, 1, final=True)
    await worker.send(b, 2, final=True)
    await call.done_writing()

    replies = [reply async for reply in call]

    assert ids(replies) == ["c", "b", "a", "b", "a", "b"]
    assert [is_final(reply) for reply in replies] == [True, False, False, False, True, True]
    assert [value_of(reply.infer_response) for reply in replies] == [1.0] * 6
    assert await call.code() is grpc.StatusCode.OK


async def test_an_open_stream_holds_back_nobody(server: Rpc, worker: StreamWorker) -> None:
    """Requests to other models are answered in their own order."""
    call = server.stub.ModelStreamInfer()
    await call.write(infer_request("flow", id="open"))
    (request,) = await worker.fetched()
    for name in ("1", "2"):
        await call.write(infer_request("echo", id=name))

    echoed = [await call.read() for _ in range(2)]
    await worker.end(request, 0)
    await call.done_writing()

    assert ids(echoed) == ["1", "2"]
    assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("count", [0, 2])
async def test_an_empty_end_is_sent_where_it_is_wanted(
    server: Rpc, worker: StreamWorker, count: int, *, wanted: bool
) -> None:
    """With the request's id, the model and its version, after responses or instead of them."""
    parameters = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)} if wanted else {}
    call = server.stub.ModelStreamInfer()
    await call.write(infer_request("flow", id="i", parameters=parameters))
    (request,) = await worker.fetched()
    for index in range(count):
        await worker.send(request, index)
    await worker.end(request, count)
    await call.done_writing()

    replies = [reply async for reply in call]

    assert [is_final(reply) for reply in replies] == [False] * count + [True] * wanted
    if wanted:
        end = replies[-1].infer_response
        assert (end.id, end.model_name, end.model_version, len(end.outputs)) == ("i", "flow", "1", 0)


async def test_errors_are_told_in_the_stream(server: Rpc, worker: StreamWorker) -> None:
    """Those among responses, and those that end a request; the call goes on."""
    call = server.stub.ModelStreamInfer()
    await call.write(infer_request("flow", id="i"))
    (request,) = await worker.fetched()
    await worker.send(request, 0, outputs=(), failure=Failure("inference_failed", "a bad frame"))
    await worker.send(request, 1)
    await worker.send(request, 2, final=True, outputs=(), failure=Failure("inference_failed", "broken"))
    await call.done_writing()

    replies = [reply async for reply in call]

    assert ids(replies) == ["i"] * 3
    assert [reply.error_message for reply in replies] == ["a bad frame", "", "broken"]
    assert await call.code() is grpc.StatusCode.OK


async def test_the_first_error_ends_a_strict_stream(server: Rpc, worker: StreamWorker) -> None:
    """With a status; the stream that is open leaves the queue."""
    call = server.stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    await call.write(infer_request("flow", id="i"))
    (request,) = await worker.fetched()
    await worker.send(request, 0)
    await call.read()
    await worker.send(request, 0, attempt=2)

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "ended after 1 responses; send the request again" in (error.value.details() or "")
    await eventually(lambda: is_idle(server), description="the entry is taken out")


async def test_who_leaves_cancels(server: Rpc, worker: StreamWorker) -> None:
    """Its entry leaves the queue, though a worker executes it."""
    call = server.stub.ModelStreamInfer()
    await call.write(infer_request("flow"))
    (request,) = await worker.fetched()
    await worker.send(request, 0)
    await call.read()

    call.cancel()

    await eventually(lambda: is_idle(server), description="the entry is taken out")


async def test_a_reader_that_does_not_read_holds_a_window(server: Rpc, worker: StreamWorker) -> None:
    """Of 100 MB, in gateway and Redis together; it gets the rest when it reads on."""
    total, each = 100_000_000, 50_000
    call = server.stub.ModelStreamInfer()
    await call.write(infer_request("flow"))
    (request,) = await worker.fetched()
    pouring = asyncio.create_task(worker.pour(request, total, each, WINDOW_BYTES))

    await worker.is_stuck(request.id)
    sent, on_its_way = worker.sent_bytes[request.id], worker.on_its_way(request.id)
    for _ in range(sent // each + 10):
        await call.read()

    assert on_its_way <= WINDOW_BYTES
    assert sent < total / 4  # what sockets and the client hold, besides
    assert worker.sent_bytes[request.id] > sent
    pouring.cancel()
    call.cancel()
    await eventually(lambda: server.running.gateway.dispatcher.in_flight == 0, description="nothing is in flight")


async def test_tritons_client_reads_a_stream(server: Rpc, worker: StreamWorker) -> None:
    """By `async_stream_infer`, as Triton's own tests do."""
    came: queue.Queue[tuple[InferResult | None, InferenceServerException | None]] = queue.Queue()

    def talk() -> list[float]:
        x = InferInput("x", [1, 4], "FP32")
        x.set_data_from_numpy(ROW)
        with BlockingClient(server.running.grpc_target) as client:
            client.start_stream(callback=lambda result, error: came.put((result, error)))
            client.async_stream_infer("flow", [x], request_id="r", enable_empty_final_response=True)
            values: list[float] = []
            while True:
                result, error = came.get(timeout=20)
                assert error is None
                assert result is not None
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return values
                values.append(float(np.ravel(result.as_numpy("y"))[3]))

    talking = asyncio.create_task(asyncio.to_thread(talk))
    (request,) = await worker.fetched()
    for index in range(5):
        await worker.send(request, index)
    await worker.end(request, 5)

    assert await talking == [4.0] * 5
