"""ModelInfer of a real gateway: answers, errors with their codes, deadlines, cancellation."""

import asyncio
import threading
import zlib
from typing import Any, cast

import grpc
import hpack
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.aio import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from qinfer.testing import eventually
from qinfer.wire.kserve_grpc import parse_infer
from qinfer_api.rpc import frames, infer
from tests.support.http2 import DATA, HEADERS, Requests, data_frame, settings_frame
from tests.support.rpc import ROW, Rpc, infer_request, rpc, value_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def server(common_server: Rpc) -> Rpc:
    return common_server


async def test_the_client_gets_its_answer(server: Rpc) -> None:
    """Through tritonclient: id, version, parameters of the request, and the outputs as arrays."""
    x = InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(ROW)
    async with InferenceServerClient(server.running.grpc_target) as client:
        result = await client.infer("echo", [x], request_id="7", model_version="1", parameters={"a": "b"}, priority=2)

    assert np.array_equal(result.as_numpy("y"), ROW)
    reply = result.get_response()
    assert (reply.id, reply.model_name, reply.model_version) == ("7", "echo", "1")
    request = server.running.requests[-1]
    assert (request.parameters, request.priority) == ({"a": "b"}, 2)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_compressed_calls_are_answered(server: Rpc, algorithm: str) -> None:
    """GRPC compresses by itself; the client chooses."""
    x = InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(ROW)
    async with InferenceServerClient(server.running.grpc_target) as client:
        result = await client.infer("echo", [x], compression_algorithm=algorithm)

    assert np.array_equal(result.as_numpy("y"), ROW)


@pytest.mark.parametrize("level", ["low", "medium", "high"])
async def test_infer_responses_are_compressed_for_those_who_accept_it(level: str) -> None:
    long, short = text_request(b"x" * 10_000), text_request(b"x")
    async with rpc({"infer_response_compression": level}) as server:
        (answer,) = [reply async for reply in server.stub.ModelStreamInfer(iter([long]))]
        assert answer.infer_response.raw_output_contents == long.raw_input_contents
        for accepted in ("identity, deflate, gzip", "deflate", "identity"):
            for method in ("ModelInfer", "ModelStreamInfer"):
                encoding, is_compressed, message = await raw_call(server, method, long, accepted)
                *_, is_short_compressed, short_message = await raw_call(server, method, short, accepted)

                algorithm = accepted.rpartition(" ")[2]
                assert (encoding, is_compressed) == ((None, 0) if algorithm == "identity" else (algorithm, 1))
                if is_compressed:
                    assert len(message) < 200
                    message = zlib.decompress(message, wbits=zlib.MAX_WBITS | 32)
                kind = pb.ModelInferResponse if method == "ModelInfer" else pb.ModelStreamInferResponse
                reply = kind.FromString(message)
                reply = reply if method == "ModelInfer" else reply.infer_response
                assert reply.raw_output_contents == long.raw_input_contents
                assert is_short_compressed == 0
                assert b"x" in short_message


async def test_infer_responses_are_not_compressed_unless_told(server: Rpc) -> None:
    encoding, is_compressed, _ = await raw_call(server, "ModelInfer", text_request(b"x" * 10_000), "gzip")

    assert (encoding, is_compressed) == (None, 0)


def text_request(text: bytes) -> Any:
    request = pb.ModelInferRequest(model_name="text")
    request.inputs.add(name="x", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    return request


async def raw_call(server: Rpc, method: str, request: Any, accepted: str) -> tuple[str | None, int, bytes]:
    """Calls without a library that decompresses; returns the reply's encoding, its first byte, and its message."""
    client, decoder = Requests(), hpack.Decoder()
    head = client.block(INFER.replace("ModelInfer", method), ("grpc-accept-encoding", accepted))
    host, _, port = server.running.grpc_target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(frames.PREFACE + settings_frame() + client.headers(1, head))
    writer.write(data_frame(1, request.SerializeToString()))
    fields: dict[str, str] = {}
    body = b""
    while "grpc-status" not in fields:
        word, _, number = frames.HEAD.unpack(await reader.readexactly(frames.HEAD_BYTES))
        payload = await reader.readexactly(word >> 8)
        if number and word & 0xFF == HEADERS:
            fields |= {str(name): str(value) for name, value in decoder.decode(payload)}
        elif number and word & 0xFF == DATA:
            body += payload
    writer.close()
    assert fields["grpc-status"] == "0"
    assert len(body) == 5 + int.from_bytes(body[1:5])
    return fields.get("grpc-encoding"), body[0], body[5:]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_compressed_message_waits_for_the_memory_of_what_comes_of_it(*, is_streamed: bool) -> None:
    """It is let in when another has come in whole, and holds nothing once it is in the queue."""
    request = infer_request(id="x" * 300_000)
    async with rpc(limits={"max_receiving_bytes": 2**20}) as server:
        receiving = server.running.gateway.receiving
        first = receiving.reserve("another", 2**20, lambda: None)
        zipped = {"compression": grpc.Compression.Gzip}
        if is_streamed:
            call = server.stub.ModelStreamInfer(iter([request]), **zipped)
            answer = asyncio.create_task(call.read())
        else:
            answer = asyncio.ensure_future(server.stub.ModelInfer(request, **zipped))
        await eventually(lambda: receiving.waiting == 1, description="a message that waits")

        assert first is not None
        first.release()
        reply = await answer

        assert (reply.infer_response if is_streamed else reply).id == request.id
        await eventually(lambda: receiving.held_bytes == 0, description="no memory held")


async def test_large_tensors_pass(server: Rpc) -> None:
    """A request that is read, and an answer that is put together, off the event loop."""
    texts = np.array([[b"x" * 100_000] * 8], dtype=object)
    x = InferInput("x", [1, 8], "BYTES")
    x.set_data_from_numpy(texts)
    async with InferenceServerClient(server.running.grpc_target) as client:
        result = await client.infer("text", [x])

    assert result.as_numpy("y").tolist() == texts.tolist()


async def test_classes_can_be_asked_for(server: Rpc) -> None:
    """As over HTTP."""
    x = InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(ROW)
    async with InferenceServerClient(server.running.grpc_target) as client:
        result = await client.infer("echo", [x], outputs=[InferRequestedOutput("y", class_count=2)])

    assert result.as_numpy("y").tolist() == [[b"4.000000:3", b"3.000000:2:two"]]


async def _refused(server: Rpc, request: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await server.stub.ModelInfer(request, **options)
    return error.value.code(), error.value.details() or ""


def _classified(**count: Any) -> Any:
    request = infer_request()
    request.outputs.add(name="y").parameters["classification"].CopyFrom(pb.InferParameter(**count))
    return request


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (infer_request("nothing"), "NOT_FOUND", "Request for unknown model: 'nothing' is not found"),
        (infer_request("nothing", model_version="3"), "NOT_FOUND", "unknown model: 'nothing' is not found"),
        (infer_request(model_version="9"), "NOT_FOUND", "Request for unknown model: 'echo' version 9 is not found"),
        (
            infer_request(model_version="x"),
            "INVALID_ARGUMENT",
            "failed to get model version from specified version string 'x'",
        ),
        (infer_request("loading", model_version="1"), "UNAVAILABLE", "'loading' version 1 is not at ready state"),
        (infer_request("fails", id="i"), "INTERNAL", "the model raised: boom"),
        (
            pb.ModelInferRequest(model_name="echo"),
            "INVALID_ARGUMENT",
            "] expected 1 inputs but got 0 inputs for model 'echo'",
        ),
        (
            pb.ModelInferRequest(
                model_name="echo", inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32")]
            ),
            "INVALID_ARGUMENT",
            "unable to find data for input tensor 'x' for model 'echo' in request.",
        ),
        (
            infer_request(parameters={"triton_x": pb.InferParameter(bool_param=True)}),
            "INVALID_ARGUMENT",
            "parameter keys starting with 'triton_' are reserved",
        ),
        (
            _classified(string_param="2"),
            "INVALID_ARGUMENT",
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
        (
            _classified(int64_param=0),
            "INVALID_ARGUMENT",
            "invalid value for 'classification' parameter, expected >= 0",
        ),
    ],
)
async def test_what_is_refused(server: Rpc, request_: Any, code: str, text: str) -> None:
    """Each with Triton's code and text."""
    got, details = await _refused(server, request_)

    assert got.name == code
    assert text.removeprefix("Request for ") in details


async def test_garbage_is_an_invalid_request(server: Rpc) -> None:
    """What is no protobuf, and calls that do not exist."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await server.channel.unary_unary(INFER)(b"\xff\xff")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await server.channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b"")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED

    assert value_of(await server.stub.ModelInfer(infer_request())) == 1.0


async def test_messages_have_a_limit() -> None:
    """A larger one is refused by gRPC, and the next one is answered."""
    async with rpc({"max_message_bytes": 10_000}) as server:
        request = infer_request(id="x" * 10_000)

        code, _ = await _refused(server, request)

        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert value_of(await server.stub.ModelInfer(infer_request())) == 1.0


async def test_large_messages_are_read_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it: also the parsing, which takes long for typed contents."""
    threads: dict[int, bool] = {}

    def parse(blob: bytes) -> Any:
        threads[len(blob)] = threading.current_thread() is threading.main_thread()
        return parse_infer(blob)

    monkeypatch.setattr(infer, "parse_infer", parse)
    large = pb.ModelInferRequest(model_name="wide")
    large.inputs.add(name="x", datatype="FP32", shape=[70_000, 1]).contents.fp32_contents.extend([1.0] * 70_000)
    small = infer_request()
    async with rpc() as server:
        await server.stub.ModelInfer(large)
        await server.stub.ModelInfer(small)

    assert threads == {large.ByteSize(): False, small.ByteSize(): True}


@pytest.mark.parametrize("letter", ["n", "%", "é", "😀"])
async def test_the_text_of_a_status_fits(server: Rpc, letter: str) -> None:
    """GRPC's clients take 8 KiB of metadata: a text with what the client sent in it is made shorter."""
    code, details = await _refused(server, pb.ModelInferRequest(model_name="echo", id=letter * 100_000))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"[request id: {letter * 100}")
    assert details.endswith("Please provide all required input(s).")


async def test_large_metadata_is_refused() -> None:
    """And does not end the connection for others; it uses up most of what a connection may send in vain."""
    async with rpc() as server:
        code, _ = await _refused(server, infer_request(), metadata=(("x", "y" * 200_000),))

        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert value_of(await server.stub.ModelInfer(infer_request())) == 1.0


async def test_a_full_queue_is_unavailable(server: Rpc) -> None:
    """With the text that clients look for."""
    waiting = [server.stub.ModelInfer(infer_request("bounded")) for _ in range(3)]
    await eventually(lambda: _depth_is(server, "bounded", 3), description="three requests wait")

    code, details = await _refused(server, infer_request("bounded"))

    assert code is grpc.StatusCode.UNAVAILABLE
    assert details.endswith("Exceeds maximum queue size")
    for call in waiting:
        call.cancel()


async def _depth_is(server: Rpc, model: str, depth: int) -> bool:
    return await server.running.depth(model) == depth


async def test_a_cancelled_call_leaves_the_queue(server: Rpc) -> None:
    """The client's cancel withdraws what has not been executed."""
    call = server.stub.ModelInfer(infer_request("stuck"))
    await eventually(lambda: _depth_is(server, "stuck", 1), description="the request waits")

    call.cancel()

    await eventually(lambda: _depth_is(server, "stuck", 0), description="the request is withdrawn")
    await eventually(_answered(server), description="nothing is in flight")


def _answered(server: Rpc) -> Any:
    async def is_so() -> bool:
        return server.running.gateway.dispatcher.in_flight == 0

    return is_so


async def test_a_broken_connection_leaves_the_queue(server: Rpc) -> None:
    """As a cancelled call does."""
    async with grpc.aio.insecure_channel(server.running.grpc_target) as channel:
        call = cast(Any, channel).unary_unary(INFER)(infer_request("stuck").SerializeToString())
        await eventually(lambda: _depth_is(server, "stuck", 1), description="the request waits")
    del call

    await eventually(lambda: _depth_is(server, "stuck", 0), description="the request is withdrawn")


async def test_the_clients_deadline_is_the_requests(server: Rpc) -> None:
    """The client sees DEADLINE_EXCEEDED, its own or the gateway's; the queue a timeout that is no longer."""
    x = InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(ROW)
    async with InferenceServerClient(server.running.grpc_target) as client:
        with pytest.raises(InferenceServerException) as raised:
            await client.infer("stuck", [x], client_timeout=0.2)
        await client.infer("echo", [x], client_timeout=5)

    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED", raised.value
    await eventually(lambda: _depth_is(server, "stuck", 0), description="the request is withdrawn")
    assert 0 < server.running.requests[-1].timeout_s < 6  # gRPC rounds up


async def test_metadata_is_forwarded_where_it_matches() -> None:
    """Names that match the pattern become string parameters."""
    async with rpc({"header_forward_pattern": "x-.*"}) as server:
        await server.stub.ModelInfer(infer_request(), metadata=(("x-user", "u"), ("other", "o")))

    assert server.running.requests[-1].parameters == {"x-user": "u"}


async def test_concurrent_calls_get_their_own_answers(server: Rpc) -> None:
    """Hundreds at once on one connection."""
    replies = await asyncio.gather(*[server.stub.ModelInfer(infer_request(value=i)) for i in range(1, 301)])

    assert [value_of(reply) for reply in replies] == list(range(1, 301))
