"""The benchmark's callers of sequences and streams: what they send, count, and leave behind."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2 as pb

from benchmarks import bodies
from benchmarks.callers import Calls, call

STEPS = 5
Steps = dict[int, list[tuple[bool, bool]]]
"""Id of a sequence → START and END of its steps, in their order."""


def _calls(port: int, encoding: str, **more: Any) -> Calls:
    return Calls(host="127.0.0.1", port=port, model="m", encoding=encoding, callers=3, example=[1.0, 2.0], **more)


@contextmanager
def _http_server(answer: Callable[[dict[str, Any]], int]) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == "/v2/models/m/infer"
            status = answer(msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"]))))
            self.wfile.write(f"HTTP/1.1 {status} x\r\ncontent-LENGTH: 2\r\n\r\nok".encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _grpc_server(path: str, handler: Any) -> Iterator[int]:
    service, _, method = path[1:].partition("/")
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def _assert_whole(seen: Steps) -> None:
    """Every sequence began, and ended, with those steps between that it may have."""
    assert len(seen) >= 3
    for steps in seen.values():
        assert steps[0] == (True, False)
        assert steps[-1] == (False, True)
        assert set(steps[1:-1]) <= {(False, False)}
        assert len(steps) <= STEPS
    assert [steps for steps in seen.values() if len(steps) == STEPS]


def test_steps_over_http_begin_and_end_their_sequences() -> None:
    seen: Steps = defaultdict(list)

    def answer(request: dict[str, Any]) -> int:
        parameters = request["parameters"]
        seen[parameters["sequence_id"]].append((parameters["sequence_start"], parameters["sequence_end"]))
        return 200

    with _http_server(answer) as port:
        result = call(_calls(port, bodies.JSON, steps=STEPS), 0.3)

    _assert_whole(seen)
    assert result["errors"] == {}
    assert 0 < result["requests"] <= sum(map(len, seen.values())) == result["requests"] + result["late"]


def test_steps_over_grpc_begin_and_end_their_sequences() -> None:
    seen: Steps = defaultdict(list)

    def answer(message: bytes, _: grpc.ServicerContext) -> bytes:
        parameters = pb.ModelInferRequest.FromString(message).parameters
        flags = parameters["sequence_start"].bool_param, parameters["sequence_end"].bool_param
        seen[parameters["sequence_id"].int64_param].append(flags)
        return b"answer"

    with _grpc_server(bodies.GRPC_PATH, grpc.unary_unary_rpc_method_handler(answer)) as port:
        result = call(_calls(port, bodies.GRPC, steps=STEPS, reply_bytes=5 + len(b"answer")), 0.3)

    _assert_whole(seen)
    assert result["errors"] == {}
    assert sum(map(len, seen.values())) == result["requests"] + result["late"]


def test_plain_requests_have_no_parameters() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> int:
        seen.append(request)
        return 200

    with _http_server(answer) as port:
        call(_calls(port, bodies.JSON), 0.1)

    assert {"inputs"} == {key for request in seen for key in request}


def test_a_step_that_fails_is_an_error() -> None:
    with _http_server(lambda _: 400) as port:
        result = call(_calls(port, bodies.JSON, steps=STEPS), 0.1)

    assert result["errors"]["status"] >= result["requests"] > 0


@pytest.mark.parametrize("size", [6, 7])
def test_all_responses_of_streams_are_counted(size: int) -> None:
    """Streams whose responses have another length than those before the load are failed ones."""
    requests: list[bytes] = []

    def answer(messages: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            requests.append(message)
            yield from [b"x" * size] * 10

    with _grpc_server(bodies.GRPC_STREAM_PATH, grpc.stream_stream_rpc_method_handler(answer)) as port:
        result = call(_calls(port, bodies.GRPC, responses=10, reply_bytes=10 * (5 + 6)), 0.3)

    if size == 6:
        assert result["errors"] == {}
        assert result["requests"] + result["late"] == 10 * len(requests)
    else:
        assert result["errors"]["length"] > 0


def test_a_stream_that_ends_is_an_error() -> None:
    def answer(_messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        raise AssertionError

    with _grpc_server(bodies.GRPC_STREAM_PATH, grpc.stream_stream_rpc_method_handler(answer)) as port:
        result = call(_calls(port, bodies.GRPC, responses=10, reply_bytes=110), 0.1)

    assert result["errors"]["ended"] > 0
