"""ModelStreamInfer of a real gateway: order, errors, several responses, ends (reference §2.3)."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.aio import InferenceServerClient, InferInput

from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.queue.entries import Lane
from qinfer.tensors import pack_bytes
from qinfer.testing import eventually
from qinfer.wire.frame import decode_request, encode_responses
from qinfer_api.rpc import infer
from tests.support.rpc import ROW, Rpc, infer_request, rpc, value_of


async def _write(call: Any, requests: Iterable[Any]) -> None:
    for request in requests:
        await call.write(request)


async def _fetched(server: Rpc, count: int, model: str = "stuck") -> list[InferRequest]:
    """Takes so many requests out of the lane of a model that nobody answers."""
    requests: list[InferRequest] = []
    while len(requests) < count:
        leases = await server.running.delivery.fetch([Lane(model, 1)], "hand", 64, 100)
        requests += [decode_request(lease.frame) for lease in leases]
        await server.running.delivery.finish([lease.entry for lease in leases])
    return requests


async def _respond(server: Rpc, request: InferRequest, **fields: Any) -> None:
    outputs = tuple(msgspec.structs.replace(tensor, name="y") for tensor in request.inputs)
    response = Response(
        request_id=request.id, model=request.model, version=request.version, **{"outputs": outputs, **fields}
    )
    await server.running.delivery.publish(request.reply_to, encode_responses([response]))


def _final(reply: Any) -> bool:
    return bool(reply.infer_response.parameters["triton_final_response"].bool_param)


async def test_the_client_gets_its_answers(server: Rpc) -> None:
    """Through tritonclient, whose requests end with a half-close."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(3):
            x = InferInput("x", [1, 4], "FP32")
            x.set_data_from_numpy(ROW * np.float32(number))
            yield {"model_name": "echo", "inputs": [x], "request_id": str(number)}

    async with InferenceServerClient(server.running.grpc_target) as client:
        replies = [reply async for reply in client.stream_infer(requests())]

    assert [error for _, error in replies] == [None] * 3
    assert [(r.get_response().id, float(r.as_numpy("y")[0, 1])) for r, _ in replies] == [
        ("0", 0.0),
        ("1", 2.0),
        ("2", 4.0),
    ]


async def test_answers_come_in_the_order_of_the_requests(server: Rpc) -> None:
    """Though the requests were executed at once and finished in another order."""
    call = server.stub.ModelStreamInfer()
    await _write(call, [infer_request("stuck", value=n, id=str(n)) for n in range(1, 5)])
    requests = await _fetched(server, 4)
    for request in reversed(requests):
        await _respond(server, request)
    await call.done_writing()

    replies = [reply async for reply in call]

    assert [reply.infer_response.id for reply in replies] == ["1", "2", "3", "4"]
    assert [value_of(reply.infer_response) for reply in replies] == [1, 2, 3, 4]
    assert all(_final(reply) for reply in replies)
    assert await call.code() is grpc.StatusCode.OK


async def test_several_responses_overtake_those_that_wait(server: Rpc) -> None:
    """A request that gets several is not kept back by an earlier one; the first keeps its turn before the third."""
    call = server.stub.ModelStreamInfer()
    await _write(call, [infer_request("stuck", id=name) for name in ("one", "many", "three")])
    one, many, three = await _fetched(server, 3)
    await _respond(server, three)
    await _respond(server, many, index=0, final=False)
    await _respond(server, many, index=1, final=False)
    first = [await call.read() for _ in range(2)]
    await _respond(server, one)
    await _respond(server, many, index=2, final=True)
    await call.done_writing()

    rest = [await call.read() for _ in range(3)]

    assert [(r.infer_response.id, _final(r)) for r in first] == [("many", False)] * 2
    ids = [(r.infer_response.id, _final(r)) for r in rest]
    assert sorted(ids) == [("many", True), ("one", True), ("three", True)]
    assert ids.index(("one", True)) < ids.index(("three", True))


@pytest.mark.parametrize("wanted", [True, False])
async def test_an_empty_last_response_is_sent_where_it_is_wanted(server: Rpc, *, wanted: bool) -> None:
    """A request that has had its responses ends without one more, unless its client asks for it."""
    parameters = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)} if wanted else {}
    call = server.stub.ModelStreamInfer()
    await call.write(infer_request("stuck", id="i", parameters=parameters))
    (request,) = await _fetched(server, 1)
    await _respond(server, request, index=0, final=False)
    await _respond(server, request, index=1, final=True, outputs=())
    await call.done_writing()

    replies = [reply async for reply in call]

    assert [(r.infer_response.id, len(r.infer_response.outputs), _final(r)) for r in replies] == [
        ("i", 1, False),
        ("i", 0, True),
    ][: 1 + wanted]
    assert await call.code() is grpc.StatusCode.OK


async def test_a_single_call_takes_no_second_response(server: Rpc) -> None:
    """ModelInfer refuses what a decoupled model does, and forgets the request."""
    call = server.stub.ModelInfer(infer_request("stuck"))
    (request,) = await _fetched(server, 1)
    await _respond(server, request, index=0, final=False)

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call

    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "ModelInfer RPC doesn't support models with decoupled transaction policy" in (error.value.details() or "")
    dispatcher = server.running.gateway.dispatcher
    await eventually(lambda: dispatcher.in_flight == 0, description="nothing is in flight")


async def test_errors_are_told_in_the_stream(server: Rpc) -> None:
    """With the id of their request, in its turn; the stream goes on."""
    call = server.stub.ModelStreamInfer()
    await _write(
        call, [infer_request("echo", id="a"), infer_request("nothing", id="b"), infer_request("fails", id="c")]
    )
    await _write(call, [infer_request("echo", id="d", value=4)])
    await call.done_writing()

    replies = [reply async for reply in call]

    assert [reply.infer_response.id for reply in replies] == ["a", "b", "c", "d"]
    assert [bool(reply.error_message) for reply in replies] == [False, True, True, False]
    assert "'nothing' is not found" in replies[1].error_message
    assert "boom" in replies[2].error_message
    assert await call.code() is grpc.StatusCode.OK


async def test_the_first_error_ends_a_strict_stream(server: Rpc) -> None:
    """With a status of its own, when the client asks for it; what is in flight is withdrawn."""
    call = server.stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    await call.write(infer_request("nothing"))

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()

    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'nothing' is not found" in (error.value.details() or "")


async def test_a_strict_stream_withdraws_what_waits(server: Rpc) -> None:
    """Its error is another request's."""
    call = server.stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    await _write(call, [infer_request("stuck"), infer_request("stuck")])
    first, _ = await _fetched(server, 2)
    await _respond(server, first, outputs=(), failure=Failure("inference_failed", "broken"))

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()

    assert error.value.code() is grpc.StatusCode.INTERNAL
    await eventually(lambda: _is_idle(server), description="nothing is in flight")


async def _is_idle(server: Rpc) -> bool:
    return server.running.gateway.dispatcher.in_flight == 0 and await server.running.depth("stuck") == 0


async def test_garbage_in_a_stream_is_an_error_of_its_request(server: Rpc) -> None:
    """A message that is none does not end the stream."""
    call = server.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    await call.write(b"\xff")
    await call.write(infer_request(id="good").SerializeToString())
    await call.done_writing()

    first, second = [pb.ModelStreamInferResponse.FromString(reply) async for reply in call]

    assert "is not a message" in first.error_message
    assert second.infer_response.id == "good"


async def test_a_cancelled_stream_leaves_the_queue(server: Rpc) -> None:
    """All that it has in flight is withdrawn."""
    call = server.stub.ModelStreamInfer()
    await _write(call, [infer_request("stuck") for _ in range(5)])
    await eventually(lambda: _depth_is(server, 5), description="five requests wait")

    call.cancel()

    await eventually(lambda: _is_idle(server), description="nothing is in flight")


async def _depth_is(server: Rpc, depth: int) -> bool:
    return await server.running.depth("stuck") == depth


async def test_too_many_requests_are_not_read(server: Rpc, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway reads on when one is answered."""
    monkeypatch.setattr(infer, "MAX_IN_FLIGHT", 3)
    call = server.stub.ModelStreamInfer()
    await _write(call, [infer_request("stuck", id=str(n)) for n in range(5)])
    await call.done_writing()
    first = await _fetched(server, 3)
    await asyncio.sleep(0)

    assert await server.running.depth("stuck") == 0

    for request in first:
        await _respond(server, request)
    for request in await _fetched(server, 2):
        await _respond(server, request)
    assert [reply.infer_response.id async for reply in call] == ["0", "1", "2", "3", "4"]


async def test_a_client_that_does_not_read_is_not_read(server: Rpc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers may not fill the memory; it gets all of them when it reads on."""
    monkeypatch.setattr(infer, "MAX_UNWRITTEN_BYTES", 3_000_000)
    request = pb.ModelInferRequest(model_name="text", raw_input_contents=[pack_bytes([bytes(1_000_000)])])
    request.inputs.add(name="x", datatype="BYTES", shape=[1, 1])
    call = server.stub.ModelStreamInfer()

    async def write() -> None:
        for count in range(40):
            await call.write(request)
            await eventually(lambda: len(server.running.requests) > count)  # noqa: B023 - asked at once

    writing = asyncio.create_task(write())
    streams = server.running.gateway.rpc._infer.streams  # type: ignore[union-attr]

    async def is_full() -> bool:
        return any(one._unwritten_bytes > 3_000_000 for one in streams)

    await eventually(is_full, description="answers wait for the client")
    await asyncio.sleep(0.1)  # nothing tells that nothing happens
    executed = len(server.running.requests)
    replies = [await call.read() for _ in range(40)]
    await writing
    await call.done_writing()

    assert executed < 40
    assert all(len(reply.infer_response.raw_output_contents[0]) == 1_000_004 for reply in replies)
    assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]


async def test_a_defect_is_an_error_of_its_request(server: Rpc, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither ends the stream nor tells the client what went wrong inside."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("/secret/path")

    call = server.stub.ModelStreamInfer()
    with monkeypatch.context() as patch:
        patch.setattr(infer, "encode_streamed", broken)
        await call.write(infer_request(id="first"))
        first = await call.read()
    await call.write(infer_request(id="second"))
    second = await call.read()

    assert (first.infer_response.id, first.error_message) == (
        "first",
        "internal error; the server's log has the request id",
    )
    assert (second.infer_response.id, second.error_message) == ("second", "")


async def test_a_client_that_does_not_read_keeps_nobody() -> None:
    """Its answers wait for it no longer than the drain time; then its connection ends."""
    async with rpc(http={"drain_s": 0.1}) as server:
        request = pb.ModelInferRequest(model_name="text", raw_input_contents=[pack_bytes([bytes(1_000_000)])])
        request.inputs.add(name="x", datatype="BYTES", shape=[1, 1])
        call = server.stub.ModelStreamInfer()
        await _write(call, [request] * 30)
        await call.done_writing()
        await eventually(lambda: _executed(server, 20), description="more was executed than the connection holds")
        server.running.gateway.stop()
        assert server.running.serving is not None

        await asyncio.wait_for(asyncio.shield(server.running.serving), 20)
        assert await call.code() == grpc.StatusCode.UNAVAILABLE


async def _executed(server: Rpc, count: int) -> bool:
    return len(server.running.requests) >= count


async def test_a_stream_that_had_its_end_ends_well(server: Rpc) -> None:
    """Its client sends no more: the gateway that goes has nothing to refuse."""
    call = server.stub.ModelStreamInfer()
    await call.write(infer_request("stuck", id="last"))
    await call.done_writing()
    (request,) = await _fetched(server, 1)
    streams = server.running.gateway.rpc._infer.streams  # type: ignore[union-attr]

    async def is_read() -> bool:
        return all(one._is_read for one in streams)

    await eventually(is_read, description="the client's end is seen")
    server.running.gateway.stop()
    await _respond(server, request)

    assert [reply.infer_response.id async for reply in call] == ["last"]
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_ends_with_the_gateway(server: Rpc) -> None:
    """What is in flight is answered, then the stream ends with Triton's status."""
    call = server.stub.ModelStreamInfer()
    await call.write(infer_request("stuck", id="last"))
    (request,) = await _fetched(server, 1)
    server.running.gateway.stop()
    await _respond(server, request)

    assert (await call.read()).infer_response.id == "last"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error.value.details() == "GRPC server is shutting down and has stopped accepting new requests."
    assert "('grpc-retry-pushback-ms', '1000')" in str(error.value.trailing_metadata())
