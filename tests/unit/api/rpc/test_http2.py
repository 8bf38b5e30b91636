"""The rules of an HTTP/2 connection, frame by frame: what is answered, resets a stream, or ends the connection."""

import asyncio
import struct

import pytest

from qinfer_api.rpc import frames
from qinfer_api.rpc.frames import ConnectionLimits
from qinfer_api.rpc.http2 import Http2Connection
from tests.support.http2 import (
    DATA,
    GOAWAY,
    HEADERS,
    LIMITS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Wire,
    data_frame,
    prefixed,
    reset,
    settings_frame,
    status_of,
    window,
)


async def test_the_server_begins_with_its_settings() -> None:
    wire = Wire()

    wire.send(frames.PREFACE)
    first, second = wire.read()

    assert first.kind == SETTINGS
    assert dict(struct.iter_unpack(">HI", first.payload))[frames.MAX_CONCURRENT_STREAMS] == LIMITS.streams
    assert (second.kind, second.number) == (WINDOW_UPDATE, 0)


async def test_a_call_is_answered(wire: Wire) -> None:
    wire.send(wire.call(1, b"hello"))

    head, body, trailers = wire.read()

    assert wire.fields(head.payload)[":status"] == "200"
    assert body.payload == prefixed(b"hello")
    assert trailers.flags & frames.END_STREAM
    assert wire.fields(trailers.payload) == {"grpc-status": "0"}


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n\r\nXX"])
async def test_what_is_no_http2_is_told_so(first: bytes) -> None:
    wire = Wire()

    wire.send(first)

    assert wire.written.startswith(b"HTTP/1.1 400 ")
    assert wire.written.endswith(b"on the HTTP port\n")
    assert wire.is_closed


async def test_metadata_may_begin_and_end_with_spaces(wire: Wire) -> None:
    """Clients of gRPC send them as their callers say."""
    wire.send(wire.headers(1, wire.block("/t.T/Echo", ("a", " b "))) + data_frame(1, b"hello"))

    _, body, trailers = wire.read()

    assert body.payload == prefixed(b"hello")
    assert wire.fields(trailers.payload) == {"grpc-status": "0"}


async def test_the_first_frame_is_settings() -> None:
    wire = Wire()

    wire.send(frames.PREFACE + frames.frame(PING, 0, 0, bytes(8)))

    assert wire.read()[-1].kind == GOAWAY


async def test_a_status_text_is_percent_encoded(wire: Wire) -> None:
    wire.send(wire.call(1, b"", "/t.T/Deny"))

    (head,) = [frame for frame in wire.read() if frame.kind == HEADERS]

    assert wire.fields(head.payload)["grpc-message"] == "100 %25 no %C2%ABkey%C2%BB"


async def test_a_refusal_tells_when_to_try_again(wire: Wire) -> None:
    """As whole seconds over HTTP, so here, in milliseconds (gRFC A6); other failures don't."""
    found = []
    for number, path in ((1, "/t.T/Busy"), (3, "/t.T/Deny")):
        wire.send(wire.call(number, b"", path))
        (head,) = [frame for frame in wire.read() if frame.kind == HEADERS]
        fields = wire.fields(head.payload)
        found.append((fields["grpc-status"], fields.get("grpc-retry-pushback-ms")))

    assert found == [("14", "9000"), ("16", None)]


async def test_too_many_streams_are_refused_one_by_one(wire: Wire) -> None:
    for number in range(1, 11, 2):
        wire.send(wire.call(number, b"", "/t.T/Hang"))

    (refused,) = wire.read()

    assert (refused.kind, refused.number) == (RST_STREAM, 9)
    assert struct.unpack(">I", refused.payload)[0] == frames.REFUSED_STREAM


@pytest.mark.parametrize("how", ["reset", "lost"])
async def test_a_call_whose_client_leaves_is_cancelled(wire: Wire, how: str) -> None:
    wire.send(wire.call(1, b"", "/t.T/Hang"))

    if how == "reset":
        wire.send(reset(1))
    else:
        wire.connection.connection_lost(None)

    assert wire.cancelled == [1]


async def test_a_reply_waits_for_the_clients_windows() -> None:
    wire = Wire().greet((frames.INITIAL_WINDOW_SIZE, 10))
    wire.send(wire.call(1, b"x" * 100))

    head, first = wire.read()
    wire.send(window(1, 20))
    (second,) = wire.read()
    wire.send(settings_frame((frames.INITIAL_WINDOW_SIZE, 1000)))
    _, third, trailers = wire.read()

    assert [len(frame.payload) for frame in (first, second, third)] == [10, 20, 75]
    assert wire.fields(head.payload)[":status"] == "200"
    assert wire.fields(trailers.payload) == {"grpc-status": "0"}


async def test_a_window_that_shrinks_below_zero_is_waited_for() -> None:
    wire = Wire().greet((frames.INITIAL_WINDOW_SIZE, 50))
    wire.send(wire.call(1, b"x" * 100))
    wire.read()

    wire.send(settings_frame((frames.INITIAL_WINDOW_SIZE, 0)) + window(1, 40))
    before = [frame for frame in wire.read() if frame.kind == DATA]
    wire.send(window(1, 11))

    assert before == []
    assert [len(frame.payload) for frame in wire.read() if frame.kind == DATA] == [1]


async def test_a_client_that_takes_nothing_is_not_read_from(wire: Wire) -> None:
    wire.connection.pause_writing()
    wire.send(wire.call(1, b"held"))

    held = wire.read()
    wire.connection.resume_writing()

    assert [frame.kind for frame in held if frame.kind == DATA] == []
    assert [frame.payload for frame in wire.read() if frame.kind == DATA] == [prefixed(b"held")]
    assert not wire.is_reading_paused


async def test_a_smaller_header_table_is_confirmed() -> None:
    wire = Wire().greet((frames.HEADER_TABLE_SIZE, 0))
    wire.send(wire.call(1, b""))

    (head, *_) = wire.read()

    assert head.payload[0] == 0x20


async def test_a_large_message_is_let_in_by_its_length() -> None:
    wire = Wire().greet((frames.INITIAL_WINDOW_SIZE, 200_000))
    wire.send(window(0, 200_000))
    message = bytes(90_000)
    wire.send(wire.headers(1, wire.block()) + frames.frame(DATA, 0, 1, prefixed(message)[:30_000]))

    granted = sum(
        struct.unpack(">I", frame.payload)[0] for frame in wire.read() if frame.kind == WINDOW_UPDATE and frame.number
    )
    for at in range(30_000, len(message) + 5, 15_000):
        wire.send(frames.frame(DATA, 0, 1, prefixed(message)[at : at + 15_000]))
    wire.send(frames.frame(DATA, frames.END_STREAM, 1, b""))

    assert granted + LIMITS.window_bytes == len(message) + 5
    assert sum(len(frame.payload) for frame in wire.read() if frame.kind == DATA) == len(message) + 5


async def test_messages_share_the_memory_of_the_gateway() -> None:
    """The second one's client may send no more before the first one has come in whole; refused calls hold nothing."""
    wire = Wire(budget_bytes=100_000).greet()
    message = prefixed(bytes(80_000))
    for number in (1, 3):
        wire.send(wire.headers(number, wire.block()) + frames.frame(DATA, 0, number, message[:30_000]))
    granted = [frame.number for frame in wire.read() if frame.kind == WINDOW_UPDATE and frame.number]
    for at in range(30_000, len(message), 30_000):
        wire.send(frames.frame(DATA, 0, 1, message[at : at + 30_000]))
    wire.send(frames.frame(DATA, frames.END_STREAM, 1, b""))
    later = [frame.number for frame in wire.read() if frame.kind == WINDOW_UPDATE and frame.number]

    assert (granted, later) == ([1], [3])
    assert wire.server.receiving.held_bytes == 80_000
    wire.send(reset(3))
    assert wire.server.receiving.held_bytes == 0


async def test_a_message_that_finds_no_memory_is_refused() -> None:
    wire = Wire(budget_bytes=40_000).greet()
    for number in (1, 3):
        wire.send(wire.headers(number, wire.block()) + frames.frame(DATA, 0, number, prefixed(bytes(30_000))[:9]))

    (head,) = [frame for frame in wire.read() if frame.kind == HEADERS]
    fields = wire.fields(head.payload)

    assert (fields["grpc-status"], fields.get("grpc-retry-pushback-ms")) == ("8", "1000")


async def test_a_reply_has_the_id_of_its_request(wire: Wire) -> None:
    for number, path in ((1, "/t.T/Echo"), (3, "/t.T/Deny")):
        wire.send(wire.call(number, b"", path))
        head = next(frame for frame in wire.read() if frame.kind == HEADERS)
        assert wire.fields(head.payload)["qinfer-request-id"] == "the-id"


async def test_a_shutdown_lets_in_what_is_under_way(wire: Wire) -> None:
    wire.send(wire.call(1, b"", "/t.T/Hang"))
    wire.connection.shutdown()
    goaway, ping = wire.read()
    wire.send(wire.call(3, b"in time"))
    in_time = [frame.payload for frame in wire.read() if frame.kind == DATA]

    wire.send(frames.frame(PING, frames.ACK, 0, ping.payload))
    (last,) = wire.read()
    wire.send(wire.call(5, b"too late"))

    assert struct.unpack(">II", goaway.payload) == (2**31 - 1, 0)
    assert in_time == [prefixed(b"in time")]
    assert struct.unpack(">II", last.payload) == (3, 0)
    assert wire.read() == []
    assert not wire.is_closed
    wire.send(reset(1))
    assert wire.is_closed


async def test_who_connects_while_the_port_closes_is_sent_away() -> None:
    """Also one that has not said anything yet: a GOAWAY before the settings would not be understood."""
    mute = Wire()
    mute.connection.shutdown()
    mute.server.is_closing = True
    late = Http2Connection(mute.server)
    was_closed, mute.is_closed = mute.is_closed, False

    late.connection_made(mute)  # type: ignore[arg-type]  # what it uses of a transport is here

    assert was_closed
    assert mute.is_closed
    assert mute.read() == []
    assert not mute.server.connections


async def test_limits_of_time() -> None:
    now_s = asyncio.get_running_loop().time()
    mute, silent, stuck, idle, deaf = (
        Wire(ConnectionLimits(preface_s=1)),
        Wire(ConnectionLimits(preface_s=1)),
        Wire(ConnectionLimits(body_s=1)),
        Wire(ConnectionLimits(idle_s=1)),
        Wire(ConnectionLimits(ping_s=1, pong_s=1)),
    )
    for each in (stuck, idle, deaf):
        each.greet()
    silent.send(frames.PREFACE)
    silent.read()
    stuck.send(stuck.headers(1, stuck.block()) + frames.frame(DATA, 0, 1, b"\0\0\0\0\5ab"))

    deaf.connection.check(now_s)
    for each in (mute, silent, stuck, idle, deaf):
        each.connection.check(now_s + 2)
    stuck.connection.check(now_s + 4)
    asked = deaf.read()
    deaf.connection.check(now_s + 4)

    assert (mute.is_closed, mute.read()) == (True, [])
    assert silent.read()[-1].kind == GOAWAY
    assert status_of(stuck, stuck.read()) == "1"
    assert idle.read()[0].kind == GOAWAY
    assert [frame.kind for frame in asked] == [PING]
    assert deaf.is_closed


@pytest.mark.parametrize("is_alive", [True, False])
async def test_a_client_that_waits_is_asked_for_a_sign_of_life(*, is_alive: bool) -> None:
    """One that is gone has its call cancelled; any frame is a sign."""
    now_s = asyncio.get_running_loop().time()
    wire = Wire(ConnectionLimits(ping_s=1, pong_s=1)).greet()
    wire.send(wire.call(1, b"a", "/t.T/Hang"))
    wire.connection.check(now_s)
    wire.connection.check(now_s + 2)
    (asked,) = wire.read()

    if is_alive:
        wire.send(window(0, 1))
    wire.connection.check(now_s + 4)

    assert asked.kind == PING
    assert wire.is_closed is not is_alive
    assert wire.cancelled == ([] if is_alive else [1])
