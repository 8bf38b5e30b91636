"""The rules of an HTTP/2 connection, frame by frame: what is answered, resets a stream, or ends the connection."""

import asyncio
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hpack
import pytest

from qinfer_api.receiving import ReceivingBudget
from qinfer_api.rpc import frames
from qinfer_api.rpc.frames import Limits
from qinfer_api.rpc.headers import Abort, Method
from qinfer_api.rpc.http2 import Connection
from qinfer_api.rpc.protocol import Call, Server

LIMITS = Limits(streams=4, header_bytes=2000, idle_frames=50, connection_window_bytes=200_000)
MAX_MESSAGE_BYTES = 100_000

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)


class Frame(NamedTuple):
    """A frame, as the server wrote it."""

    kind: int
    flags: int
    number: int
    payload: bytes


class Wire:
    """A client of a connection, without a network: sends bytes, and reads the frames that the server writes."""

    def __init__(self, limits: Limits = LIMITS, budget_bytes: int = 10**9) -> None:
        self.server = Server(METHODS, limits, ReceivingBudget(budget_bytes))
        self.server.new_id = lambda: "the-id"
        self.connection = Connection(self.server)
        self.written = bytearray()
        self.is_closed = self.is_reading_paused = False
        self.encoder: hpack.Encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self.connection.connection_made(self)  # type: ignore[arg-type]  # what it uses of a transport is here

    # -- what the connection uses of a transport -------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    # -- the client ------------------------------------------------------------------------------------------

    def greet(self, *settings: tuple[int, int]) -> "Wire":
        self.send(frames.PREFACE + settings_frame(*settings))
        self.read()
        return self

    def send(self, data: bytes) -> None:
        if not self.is_closed:
            self.connection.data_received(data)

    def read(self) -> list[Frame]:
        found = []
        while self.written:
            word, flags, number = struct.unpack_from(">IBI", self.written)
            size = word >> 8
            found.append(Frame(word & 0xFF, flags, number, bytes(self.written[9 : 9 + size])))
            del self.written[: 9 + size]
        return found

    def block(self, path: str = "/t.T/Echo", *extra: tuple[str, str], **pseudo: str) -> bytes:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a")]
        fields = [(name, pseudo.get(name[1:], value)) for name, value in fields]
        return self.encoder.encode([*fields, ("content-type", "application/grpc"), ("te", "trailers"), *extra])

    def headers(self, number: int, block: bytes, flags: int = frames.END_HEADERS) -> bytes:
        return frames.frame(HEADERS, flags, number, block)

    def call(self, number: int, message: bytes, path: str = "/t.T/Echo") -> bytes:
        return self.headers(number, self.block(path)) + data_frame(number, message)

    def fields(self, block: bytes) -> dict[str, str]:
        return {str(name): str(value) for name, value in self.decoder.decode(block)}


def settings_frame(*settings: tuple[int, int], flags: int = 0, number: int = 0) -> bytes:
    return frames.frame(SETTINGS, flags, number, b"".join(struct.pack(">HI", *setting) for setting in settings))


def data_frame(number: int, message: bytes, flags: int = frames.END_STREAM) -> bytes:
    return frames.frame(DATA, flags, number, prefixed(message))


def prefixed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def window(number: int, size: int) -> bytes:
    return frames.frame(WINDOW_UPDATE, 0, number, struct.pack(">I", size))


def reset(number: int, code: int = frames.CANCEL) -> bytes:
    return frames.frame(RST_STREAM, 0, number, struct.pack(">I", code))


cancelled: list[int] = []


def _echo(call: Call, message: Any) -> None:
    call.finish((message,))


def _hang(call: Call, _: Any) -> None:
    call.on_cancel = lambda: cancelled.append(call.number)


def _refuse(_: Any) -> None:
    raise Abort("UNAUTHENTICATED", "100 % no «key»")


METHODS = {
    "/t.T/Echo": Method(lambda _: None, _echo, False, MAX_MESSAGE_BYTES),
    "/t.T/Hang": Method(lambda _: None, _hang, False, MAX_MESSAGE_BYTES),
    "/t.T/Deny": Method(_refuse, _echo, False, MAX_MESSAGE_BYTES),
}


@pytest.fixture
async def wire() -> Wire:
    return Wire().greet()


def status_of(wire: Wire, found: list[Frame]) -> str:
    """Returns the gRPC status of the reply in these frames."""
    fields: dict[str, str] = {}
    for frame in found:
        if frame.kind == HEADERS:
            fields |= wire.fields(frame.payload)
    return fields.get("grpc-status", fields.get(":status", "none"))


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


@pytest.mark.parametrize("seed", range(20))
async def test_any_split_of_the_bytes_gives_the_same(seed: int) -> None:
    chosen = random.Random(seed)
    whole, pieces = Wire(), Wire()
    encoder = Wire()
    sent = frames.PREFACE + settings_frame((frames.INITIAL_WINDOW_SIZE, 200_000))
    for number in range(1, 2 * chosen.randrange(2, 12), 2):
        block = encoder.block("/t.T/Echo", ("x-id", str(chosen.random())))
        cut = chosen.randrange(len(block) + 1)
        sent += encoder.headers(number, block[:cut], 0)
        sent += frames.frame(CONTINUATION, frames.END_HEADERS, number, block[cut:])
        message = prefixed(chosen.randbytes(chosen.randrange(5000)))
        cut = chosen.randrange(len(message) + 1)
        sent += frames.frame(DATA, 0, number, message[:cut])
        sent += frames.frame(DATA, frames.END_STREAM | frames.PADDED, number, b"\3" + message[cut:] + b"\0\0\0")

    whole.send(sent)
    position = 0
    while position < len(sent):
        step = chosen.randrange(1, 40)
        pieces.send(sent[position : position + step])
        position += step

    expected = [frame for frame in whole.read() if frame.kind in (HEADERS, DATA)]
    assert [frame for frame in pieces.read() if frame.kind in (HEADERS, DATA)] == expected
    assert len(expected) >= 6


CONNECTION_FAULTS: dict[str, tuple[Callable[[Wire], bytes], int]] = {
    "a frame that is too large": (lambda w: frames.frame(DATA, 0, 1, bytes(LIMITS.frame_bytes + 1)), 6),
    "DATA on stream 0": (lambda w: data_frame(0, b""), 1),
    "DATA on an idle stream": (lambda w: data_frame(5, b""), 1),
    "DATA on an even stream": (lambda w: data_frame(2, b""), 1),
    "padding longer than DATA": (lambda w: w.headers(1, w.block()) + frames.frame(DATA, 8, 1, b"\5abc"), 1),
    "padded DATA without a length": (lambda w: w.headers(1, w.block()) + frames.frame(DATA, 8, 1, b""), 6),
    "HEADERS on stream 0": (lambda w: w.headers(0, w.block()), 1),
    "HEADERS on an even stream": (lambda w: w.headers(2, w.block()), 1),
    "padding longer than HEADERS": (lambda w: frames.frame(HEADERS, 4 | 8, 1, b"\xff" + w.block()), 1),
    "HEADERS of a priority that is cut off": (lambda w: frames.frame(HEADERS, 4 | 0x20, 1, b"abc"), 1),
    "HEADERS on a closed stream": (lambda w: w.call(1, b"x") + w.headers(1, w.block(), 5), 5),
    "a smaller stream number than the last": (lambda w: w.call(5, b"x") + w.headers(3, w.block(), 5), 5),
    "a frame within a header block": (lambda w: w.headers(1, w.block(), 0) + frames.frame(PING, 0, 0, bytes(8)), 1),
    "CONTINUATION of another stream": (lambda w: w.headers(1, b"", 0) + frames.frame(CONTINUATION, 4, 3, b""), 1),
    "CONTINUATION without HEADERS": (lambda w: frames.frame(CONTINUATION, 4, 1, b""), 1),
    "CONTINUATION after END_HEADERS": (lambda w: w.headers(1, w.block()) + frames.frame(CONTINUATION, 4, 1, b""), 1),
    "an endless header block": (
        lambda w: w.headers(1, b"", 0) + frames.frame(CONTINUATION, 0, 1, bytes(1000)) * 20, 11),
    "empty CONTINUATIONs": (
        lambda w: w.headers(1, b"", 0) + frames.frame(CONTINUATION, 0, 1) * (LIMITS.idle_frames + 1), 11),
    "an index that the table lacks": (lambda w: w.headers(1, b"\xff\x80\x01"), 9),
    "index 0": (lambda w: w.headers(1, b"\x80"), 9),
    "an integer without end": (lambda w: w.headers(1, b"\xff" + b"\xff" * 20), 9),
    "a string that is cut off": (lambda w: w.headers(1, b"\x00\x05ab"), 9),
    "a Huffman string with the end's code": (lambda w: w.headers(1, b"\x00\x84\xff\xff\xff\xff\x01a"), 9),
    "a Huffman string with a byte of padding": (lambda w: w.headers(1, b"\x00\x82\x1f\xff\xff\x01a"), 9),
    "a table larger than allowed": (lambda w: w.headers(1, b"\x3f\xe2\x1f" + w.block()), 9),
    "a table's size after a field": (lambda w: w.headers(1, b"\x82\x20"), 9),
    "RST_STREAM on stream 0": (lambda w: reset(0), 1),
    "RST_STREAM on an idle stream": (lambda w: reset(1), 1),
    "RST_STREAM of a wrong length": (lambda w: w.call(1, b"") + frames.frame(RST_STREAM, 0, 1, b"abc"), 6),
    "SETTINGS on a stream": (lambda w: settings_frame(number=1), 1),
    "SETTINGS of a wrong length": (lambda w: frames.frame(SETTINGS, 0, 0, b"abc"), 6),
    "an acknowledgement with settings": (lambda w: settings_frame((1, 1), flags=1), 6),
    "ENABLE_PUSH of 2": (lambda w: settings_frame((frames.ENABLE_PUSH, 2)), 1),
    "INITIAL_WINDOW_SIZE of 2^31": (lambda w: settings_frame((frames.INITIAL_WINDOW_SIZE, 2**31)), 3),
    "MAX_FRAME_SIZE of 16383": (lambda w: settings_frame((frames.MAX_FRAME_SIZE, 16383)), 1),
    "MAX_FRAME_SIZE of 2^24": (lambda w: settings_frame((frames.MAX_FRAME_SIZE, 2**24)), 1),
    "a stream's window grows too large by SETTINGS": (
        lambda w: w.call(1, b"", "/t.T/Hang") + window(1, 2**31 - 1 - 65_535)
        + settings_frame((frames.INITIAL_WINDOW_SIZE, 2**31 - 1)), 3),
    "PUSH_PROMISE": (lambda w: frames.frame(PUSH_PROMISE, 4, 1, bytes(4)), 1),
    "PING on a stream": (lambda w: frames.frame(PING, 0, 1, bytes(8)), 1),
    "PING of a wrong length": (lambda w: frames.frame(PING, 0, 0, bytes(7)), 6),
    "GOAWAY on a stream": (lambda w: frames.frame(GOAWAY, 0, 1, bytes(8)), 1),
    "PRIORITY on stream 0": (lambda w: frames.frame(PRIORITY, 0, 0, bytes(5)), 1),
    "WINDOW_UPDATE by 0": (lambda w: window(0, 0), 1),
    "WINDOW_UPDATE on an idle stream": (lambda w: window(1, 1), 1),
    "WINDOW_UPDATE of a wrong length": (lambda w: frames.frame(WINDOW_UPDATE, 0, 0, b"abc"), 6),
    "a window above 2^31-1": (lambda w: window(0, 2**31 - 1), 3),
    "more DATA than the connection's window": (
        lambda w: w.headers(1, w.block("/t.T/Hang")) + frames.frame(DATA, 0, 1, bytes(60_000)) * 1, 0),
    "PING flood": (lambda w: frames.frame(PING, 0, 0, bytes(8)) * (LIMITS.idle_frames + 1), 11),
    "SETTINGS flood": (lambda w: settings_frame((8, 1)) * (LIMITS.idle_frames + 1), 11),
    "PRIORITY flood": (lambda w: frames.frame(PRIORITY, 0, 1, bytes(5)) * (LIMITS.idle_frames + 1), 11),
    "flood of unknown frames": (lambda w: frames.frame(77, 0, 0, b"") * (LIMITS.idle_frames + 1), 11),
    "empty DATA flood": (
        lambda w: w.headers(1, w.block()) + frames.frame(DATA, 0, 1, b"") * (LIMITS.idle_frames + 1), 11),
    "WINDOW_UPDATE flood": (lambda w: window(0, 1) * (LIMITS.idle_frames + 1), 11),
    "rapid reset": (
        lambda w: b"".join(w.call(n, b"", "/t.T/Hang") + reset(n) for n in range(1, 200, 2)), 11),
    "rapid reset of streams that are too many": (
        lambda w: b"".join(w.call(n, b"", "/t.T/Hang") for n in range(1, 200, 2)), 11),
    "DATA on closed streams without end": (
        lambda w: w.call(1, b"") + data_frame(1, b"") * (LIMITS.idle_frames + 9), 11),
}  # fmt: skip
del CONNECTION_FAULTS["more DATA than the connection's window"]  # has a test of its own


@pytest.mark.parametrize("name", CONNECTION_FAULTS)
async def test_what_ends_a_connection(wire: Wire, name: str) -> None:
    make, code = CONNECTION_FAULTS[name]

    wire.send(make(wire))

    last = wire.read()[-1]
    assert last.kind == GOAWAY
    assert struct.unpack(">I", last.payload[4:8])[0] == code, last.payload
    assert wire.is_closed
    assert not wire.server.connections


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n\r\nXX"])
async def test_what_is_no_http2_is_told_so(first: bytes) -> None:
    wire = Wire()

    wire.send(first)

    assert wire.written.startswith(b"HTTP/1.1 400 ")
    assert wire.written.endswith(b"on the HTTP port\n")
    assert wire.is_closed


async def test_the_first_frame_is_settings() -> None:
    wire = Wire()

    wire.send(frames.PREFACE + frames.frame(PING, 0, 0, bytes(8)))

    assert wire.read()[-1].kind == GOAWAY


STREAM_FAULTS: dict[str, tuple[Callable[[Wire], bytes], int]] = {
    "DATA after END_STREAM": (lambda w: w.call(1, b"", "/t.T/Hang") + data_frame(1, b""), 5),
    "HEADERS after END_STREAM": (lambda w: w.call(1, b"", "/t.T/Hang") + w.headers(1, w.block(), 5), 5),
    "trailers without END_STREAM": (lambda w: w.headers(1, w.block()) + w.headers(1, w.block()), 1),
    "WINDOW_UPDATE by 0": (lambda w: w.call(1, b"", "/t.T/Hang") + window(1, 0), 1),
    "a stream's window above 2^31-1": (lambda w: w.call(1, b"", "/t.T/Hang") + window(1, 2**31 - 1), 3),
    "more DATA than the stream's window": (
        lambda w: w.headers(1, w.block()) + (frames.frame(DATA, 0, 1, prefixed(bytes(60_000)))
        + frames.frame(DATA, 0, 1, bytes(30_000))), 3),
    "no :path": (lambda w: w.headers(1, w.encoder.encode([(":method", "POST"), (":scheme", "http")])), 1),
    "an empty :path": (lambda w: w.headers(1, w.block("")), 1),
    "no :method": (lambda w: w.headers(1, w.encoder.encode([(":path", "/"), (":scheme", "http")])), 1),
    "a pseudo-header field twice": (
        lambda w: w.headers(1, w.encoder.encode([(":path", "/"), (":path", "/"), (":method", "POST")])), 1),
    "an unknown pseudo-header field": (lambda w: w.headers(1, w.encoder.encode([(":x", "y")]) + w.block()), 1),
    "a pseudo-header field after others": (lambda w: w.headers(1, w.block("/", (":status", "200"))), 1),
    "a name in capitals": (lambda w: w.headers(1, w.block("/t.T/Echo", ("X-A", "b"))), 1),
    "a name with a space": (lambda w: w.headers(1, w.block("/t.T/Echo", ("a b", "c"))), 1),
    "an empty name": (lambda w: w.headers(1, w.block("/t.T/Echo", ("", "c"))), 1),
    "a value with a line end": (lambda w: w.headers(1, w.block("/t.T/Echo", ("a", "b\r\nc: d"))), 1),
    "a value with a zero": (lambda w: w.headers(1, w.block("/t.T/Echo", ("a", "b\0"))), 1),
    "a value that begins with a space": (lambda w: w.headers(1, w.block("/t.T/Echo", ("a", " b"))), 1),
    "connection": (lambda w: w.headers(1, w.block("/t.T/Echo", ("connection", "close"))), 1),
    "transfer-encoding": (lambda w: w.headers(1, w.block("/t.T/Echo", ("transfer-encoding", "chunked"))), 1),
    "te other than trailers": (lambda w: w.headers(1, w.block("/t.T/Echo", ("te", "gzip"))), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAM_FAULTS)
async def test_what_resets_a_stream(wire: Wire, name: str) -> None:
    """Its connection goes on for others."""
    make, code = STREAM_FAULTS[name]

    wire.send(make(wire))
    resets = [frame for frame in wire.read() if frame.kind == RST_STREAM]
    wire.send(wire.call(9, b"next"))

    assert [(frame.number, struct.unpack(">I", frame.payload)[0]) for frame in resets] == [(1, code)]
    assert [frame.payload for frame in wire.read() if frame.kind == DATA] == [prefixed(b"next")]


REFUSALS: dict[str, tuple[Callable[[Wire], bytes], str]] = {
    "an unknown method": (lambda w: w.call(1, b"", "/t.T/Nope"), "12"),
    "one that may not": (lambda w: w.call(1, b"", "/t.T/Deny"), "16"),
    "a message that is too large": (
        lambda w: w.headers(1, w.block()) + frames.frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"), "8"),
    "a message that is cut off": (
        lambda w: w.headers(1, w.block()) + frames.frame(DATA, 1, 1, b"\0\0\0\0\5ab"), "13"),
    "a prefix that is cut off": (lambda w: w.headers(1, w.block()) + frames.frame(DATA, 1, 1, b"\0\0"), "13"),
    "no message": (lambda w: w.headers(1, w.block(), 5), "13"),
    "two messages": (
        lambda w: w.headers(1, w.block()) + data_frame(1, b"a", 0) + data_frame(1, b"b"), "13"),
    "a message said to be compressed": (
        lambda w: w.headers(1, w.block()) + frames.frame(DATA, 1, 1, b"\1\0\0\0\1a"), "13"),
    "an unknown encoding": (lambda w: w.headers(1, w.block("/t.T/Echo", ("grpc-encoding", "br"))), "12"),
    "a timeout that is none": (lambda w: w.headers(1, w.block("/t.T/Echo", ("grpc-timeout", "1x"))), "3"),
    "a timeout of nine digits": (lambda w: w.headers(1, w.block("/t.T/Echo", ("grpc-timeout", "123456789S"))), "3"),
    "metadata that is too large": (lambda w: w.headers(1, w.block("/t.T/Echo", ("x", "y" * 2500))), "8"),
    "another content type": (
        lambda w: w.headers(1, w.encoder.encode(
            [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("content-type", "text/html")])), "415"),
    "GET": (lambda w: w.headers(1, w.block(method="GET")), "405"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
async def test_what_is_refused(wire: Wire, name: str) -> None:
    """With one block of headers; what the client goes on to send is not wanted."""
    make, status = REFUSALS[name]

    wire.send(make(wire))
    found = wire.read()
    wire.send(wire.call(9, b"next"))

    assert status_of(wire, found) == status
    assert [frame.payload for frame in wire.read() if frame.kind == DATA] == [prefixed(b"next")]


async def test_a_status_text_is_percent_encoded(wire: Wire) -> None:
    wire.send(wire.call(1, b"", "/t.T/Deny"))

    (head,) = [frame for frame in wire.read() if frame.kind == HEADERS]

    assert wire.fields(head.payload)["grpc-message"] == "100 %25 no %C2%ABkey%C2%BB"


async def test_too_many_streams_are_refused_one_by_one(wire: Wire) -> None:
    for number in range(1, 11, 2):
        wire.send(wire.call(number, b"", "/t.T/Hang"))

    (refused,) = wire.read()

    assert (refused.kind, refused.number) == (RST_STREAM, 9)
    assert struct.unpack(">I", refused.payload)[0] == frames.REFUSED_STREAM


@pytest.mark.parametrize("how", ["reset", "lost"])
async def test_a_call_whose_client_leaves_is_cancelled(wire: Wire, how: str) -> None:
    cancelled.clear()
    wire.send(wire.call(1, b"", "/t.T/Hang"))

    if how == "reset":
        wire.send(reset(1))
    else:
        wire.connection.connection_lost(None)

    assert cancelled == [1]


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

    assert status_of(wire, wire.read()) == "8"


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


@pytest.fixture(autouse=True)
def _no_leak() -> Iterator[None]:
    yield
    cancelled.clear()


async def test_limits_of_time() -> None:
    now_s = asyncio.get_running_loop().time()
    mute, silent, stuck, idle, deaf = (
        Wire(Limits(preface_s=1)),
        Wire(Limits(preface_s=1)),
        Wire(Limits(body_s=1)),
        Wire(Limits(idle_s=1)),
        Wire(Limits(ping_s=1, pong_s=1)),
    )
    for each in (stuck, idle, deaf):
        each.greet()
    silent.send(frames.PREFACE)
    silent.read()
    stuck.send(stuck.headers(1, stuck.block()) + frames.frame(DATA, 0, 1, b"\0\0\0\0\5ab"))

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
