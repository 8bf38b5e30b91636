"""Streams in the client: events read from pieces that end anywhere, and what ends a stream."""

import json
from base64 import b64encode

import httpx
import numpy as np
import pytest

from qinfer.client.results import EventReader, StreamEvent, result_of
from qinfer.errors import (
    Cancelled,
    DeadlineExceeded,
    InferenceFailed,
    InvalidRequest,
    ModelNotReady,
    OutputMismatch,
    QinferError,
    StreamBroken,
    Unreachable,
)
from tests.support.scripted_gateway import Server, X, reply

DATA = np.array([[1 / 3, float("nan")]], np.float32)


def response(value: float = 0.5) -> bytes:
    output = {"name": "y", "datatype": "FP32", "shape": [1], "data": [value]}
    body = {"model_name": "m", "model_version": "3", "id": "mine", "outputs": [output]}
    return b"event: response\ndata: %b\n\n" % json.dumps(body).encode()


def binary() -> bytes:
    output = {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    text = json.dumps({"model_name": "m", "model_version": "3", "outputs": [output]}).encode()
    return b"event: response\ndata: %b\ndata: %b\n\n" % (text, b64encode(DATA.tobytes()))


def error(code: str) -> bytes:
    return b'event: error\ndata: {"error": "boom", "code": "%b"}\n\n' % code.encode()


def stream(*events: bytes, status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=b"".join(events), headers={"content-type": "text/event-stream"})


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_pieces_end_anywhere(size: int) -> None:
    text = b": still here\n\nevent: a\ndata: 1\ndata: 2\n\nid: 7\ndata:3\n\ndata: unfinished"
    reader = EventReader()

    found = [event for at in range(0, len(text), size) for event in reader.feed(text[at : at + size])]

    assert found == [StreamEvent("a", [b"1", b"2"]), StreamEvent("message", [b"3"], "7")]


def test_each_response_is_a_result() -> None:
    server = Server(stream(response(0.5), response(1.5)))

    results = list(server.client().infer_stream("m", {"x": X}, version=3, id="mine"))

    assert [(one.version, one.id, one["y"].tolist()) for one in results] == [(3, "mine", [0.5]), (3, "mine", [1.5])]
    assert server.paths == ["POST /v1/models/m/versions/3/infer_stream"]
    sent = server.requests[0]
    length = int(sent.headers["inference-header-content-length"])
    assert json.loads(sent.content[:length])["parameters"] == {"binary_data_output": True}


def test_a_stream_without_responses() -> None:
    assert list(Server(stream()).client().infer_stream("m", {"x": X})) == []


def test_binary_outputs_are_exact() -> None:
    [result] = Server(stream(binary())).client().infer_stream("m", {"x": X})

    assert result["y"].tobytes() == DATA.tobytes()


def test_a_failure_ends_a_stream_after_its_responses() -> None:
    """It is not repeated: what has been handed out would come again."""
    server = Server(stream(response(), error("stream_broken")))
    results = server.client().infer_stream("m", {"x": X})

    assert next(results)["y"].tolist() == [0.5]
    with pytest.raises(StreamBroken, match="boom"):
        next(results)
    assert len(server.requests) == 1


def test_a_failure_that_comes_first_is_that_of_the_call() -> None:
    """By its code, and repeated where that can help."""
    server = Server(stream(error("model_not_ready"), status=503), stream(error("inference_failed"), status=500))

    with pytest.raises(InferenceFailed, match="boom"):
        next(server.client().infer_stream("m", {"x": X}))
    with pytest.raises(ModelNotReady):
        next(Server(stream(error("model_not_ready"), status=503)).client(max_retries=0).infer_stream("m", {"x": X}))

    assert len(server.requests) == 2


def test_an_overloaded_gateway_is_asked_again() -> None:
    server = Server(reply(429, {"Retry-After": "2"}, error="full"), stream(response()))

    assert len(list(server.client().infer_stream("m", {"x": X}))) == 1
    assert server.pauses == [pytest.approx(2, abs=0.3)]


def test_a_connection_that_breaks_in_the_middle_is_an_error() -> None:
    class Broken(httpx.SyncByteStream):
        def __iter__(self):  # type: ignore[no-untyped-def]  # a generator of bytes
            yield response()
            raise httpx.RemoteProtocolError("peer closed connection")

    class Transport(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=Broken())

    import qinfer

    with qinfer.Client("http://gateway", transport=Transport()) as client:
        results = client.infer_stream("m", {"x": X})
        next(results)
        with pytest.raises(Unreachable, match="peer closed connection"):
            next(results)


@pytest.mark.parametrize(
    ("event", "raised"),
    [
        (StreamEvent("response", [b"{}"]), OutputMismatch),
        (StreamEvent("response", [b"no JSON"]), OutputMismatch),
        (StreamEvent("response", [b"{}", b"*"]), OutputMismatch),
        (StreamEvent("error", [b"no JSON"]), InferenceFailed),
        (StreamEvent("error", [b'{"error": "x", "code": "of another version"}']), InferenceFailed),
    ],
)
def test_what_can_not_be_read_is_an_error(event: StreamEvent, raised: type[QinferError]) -> None:
    with pytest.raises(raised):
        result_of(event)


def test_events_of_later_versions_are_skipped() -> None:
    assert result_of(StreamEvent("progress", [b"{}"])) is None


def state(name: str, event_id: str, **fields: object) -> bytes:
    return b"event: state\nid: %b\ndata: %b\n\n" % (event_id.encode(), json.dumps({"state": name, **fields}).encode())


def numbered(event_id: str, value: float) -> bytes:
    return response(value).replace(b"\ndata", b"\nid: %b\ndata" % event_id.encode(), 1)


def test_a_stored_request_is_followed_over_several_connections() -> None:
    """Each goes on after the last event of the one before, until the request has ended."""
    server = Server(
        stream(state("running", "1-running"), numbered("1-running.1", 0.5)),
        stream(numbered("1-running.2", 1.5)),
        stream(state("succeeded", "1-succeeded.2")),
    )

    results = list(server.client().responses("01JX.0.m"))

    assert [one["y"].tolist() for one in results] == [[0.5], [1.5]]
    seen = [request.headers.get("last-event-id") for request in server.requests]
    assert seen == [None, "1-running.1", "1-running.2"]
    assert server.pauses == [0.5, 0.5]


def test_a_request_that_had_ended_when_its_reader_came_back() -> None:
    server = Server(stream(numbered("1-running.1", 0.5)), httpx.Response(204))

    assert len(list(server.client().responses("01JX.0.m"))) == 1


@pytest.mark.parametrize(
    ("name", "code", "raised"),
    [
        ("failed", "stream_broken", StreamBroken),
        ("failed", "inference_failed", InferenceFailed),
        ("expired", "deadline_exceeded", DeadlineExceeded),
        ("cancelled", "cancelled", Cancelled),
    ],
)
def test_how_a_stored_request_ended_is_raised_after_its_responses(
    name: str, code: str, raised: type[QinferError]
) -> None:
    end = state(name, f"1-{name}.1", error={"code": code, "message": "boom"})
    results = Server(stream(numbered("1-running.1", 0.5), end)).client().responses("01JX.0.m")

    next(results)
    with pytest.raises(raised, match="boom"):
        next(results)


def test_a_gateway_that_is_gone_ends_the_reading() -> None:
    server = Server(stream(numbered("1-running.1", 0.5)), httpx.ConnectError("refused"))

    results = server.client(max_retries=2).responses("01JX.0.m")

    next(results)
    with pytest.raises(Unreachable):
        next(results)
    assert len(server.requests) == 4


def test_the_result_of_a_decoupled_model_is_read_by_its_responses() -> None:
    server = Server(reply(200, responses=[]))

    with pytest.raises(InvalidRequest, match=r"responses\(\)"):
        server.client().result("01JX.0.m")
