"""What malformed and hostile frames get: each has its answer, and costs the connections of others nothing."""

import asyncio
import struct
from collections.abc import Callable

import pytest

from qinfer_api.rpc import frames
from qinfer_api.rpc.streams import FrameWriter, GrpcStream
from tests.support.http2 import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    LIMITS,
    MAX_MESSAGE_BYTES,
    PING,
    PRIORITY,
    PUSH_PROMISE,
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

CONNECTION_FAULTS: dict[str, tuple[Callable[[Wire], bytes], int]] = {
    "SETTINGS that are too large": (lambda w: frames.frame(SETTINGS, 0, 0, bytes(LIMITS.frame_bytes + 6)), 6),
    "a frame of an unknown type that is too large": (lambda w: b"\xff\xff\xff\x4d" + bytes(5), 6),
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
    "CONTINUATION on stream 0": (lambda w: w.headers(1, b"", 0) + frames.frame(CONTINUATION, 4, 0, b""), 1),
    "HEADERS within a header block": (lambda w: w.headers(1, w.block(), 0) + w.headers(3, w.block()), 1),
    "CONTINUATION without HEADERS": (lambda w: frames.frame(CONTINUATION, 4, 1, b""), 1),
    "CONTINUATION after END_HEADERS": (lambda w: w.headers(1, w.block()) + frames.frame(CONTINUATION, 4, 1, b""), 1),
    "an endless header block": (
        lambda w: w.headers(1, b"", 0) + frames.frame(CONTINUATION, 0, 1, bytes(1000)) * 20, 11),
    "empty CONTINUATIONs": (
        lambda w: w.headers(1, b"", 0) + frames.frame(CONTINUATION, 0, 1) * (LIMITS.idle_frames + 1), 11),
    "CONTINUATIONs of a byte": (
        lambda w: w.headers(1, b"", 0) + frames.frame(CONTINUATION, 0, 1, b"\x82") * (LIMITS.idle_frames + 1), 11),
    "a literal whose name's index the table lacks": (lambda w: w.headers(1, b"\x7f\x80\x01\x01a"), 9),
    "a length of 2^35": (lambda w: w.headers(1, b"\x00\x7f\xff\xff\xff\xff\x7fa"), 9),
    "a block that ends in an integer": (lambda w: w.headers(1, b"\xff"), 9),
    "a damaged block of trailers": (lambda w: w.headers(1, w.block()) + w.headers(1, b"\x80", 5), 9),
    "a damaged block on a closed stream": (lambda w: w.call(1, b"x") + w.headers(1, b"\x80", 5), 9),
    "an index that the table lacks": (lambda w: w.headers(1, b"\xff\x80\x01"), 9),
    "index 0": (lambda w: w.headers(1, b"\x80"), 9),
    "an integer without end": (lambda w: w.headers(1, b"\xff" + b"\xff" * 20), 9),
    "a string that is cut off": (lambda w: w.headers(1, b"\x00\x05ab"), 9),
    "a Huffman string with the end's code": (lambda w: w.headers(1, b"\x00\x84\xff\xff\xff\xff\x01a"), 9),
    "a Huffman string with a byte of padding": (lambda w: w.headers(1, b"\x00\x82\x1f\xff\xff\x01a"), 9),
    "a table larger than allowed": (lambda w: w.headers(1, b"\x3f\xe2\x1f" + w.block()), 9),
    "a table whose size changes three times": (lambda w: w.headers(1, b"\x20\x20\x20" + w.block()), 9),
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
    "flood of acknowledged SETTINGS": (lambda w: settings_frame(flags=1) * (LIMITS.idle_frames + 1), 11),
    "flood of answers to PING": (lambda w: frames.frame(PING, 1, 0, bytes(8)) * (LIMITS.idle_frames + 1), 11),
    "GOAWAY flood": (lambda w: frames.frame(GOAWAY, 0, 0, bytes(8)) * (LIMITS.idle_frames + 1), 11),
    "RST_STREAM flood on a closed stream": (lambda w: w.call(1, b"") + reset(1) * (LIMITS.idle_frames + 9), 11),
    "WINDOW_UPDATE flood on a closed stream": (
        lambda w: w.call(1, b"") + window(1, 1) * (LIMITS.idle_frames + 9), 11),
    "DATA of padding only": (
        lambda w: w.headers(1, w.block()) + frames.frame(DATA, 8, 1, b"\xff" + bytes(255)) * (LIMITS.idle_frames + 1),
        11),
    "a flood of malformed heads": (
        lambda w: b"".join(w.headers(n, w.block("")) for n in range(1, 2 * LIMITS.idle_frames + 9, 2)), 11),
    "resets that the client provokes by WINDOW_UPDATE": (
        lambda w: b"".join(w.call(n, b"", "/t.T/Hang") + window(n, 0) for n in range(1, 200, 2)), 11),
    "resets that the client provokes by DATA": (
        lambda w: b"".join(w.call(n, b"", "/t.T/Hang") + data_frame(n, b"") for n in range(1, 200, 2)), 11),
    "resets that the client provokes by HEADERS": (
        lambda w: b"".join(w.call(n, b"", "/t.T/Hang") + w.headers(n, w.block(), 5) for n in range(1, 200, 2)), 11),
    "trailers of a stream that was reset, without end": (
        lambda w: w.headers(1, w.block("")) + w.headers(1, w.block(), 5) * (LIMITS.idle_frames + 1), 11),
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


@pytest.mark.parametrize("name", CONNECTION_FAULTS)
async def test_what_ends_a_connection(wire: Wire, name: str) -> None:
    make, code = CONNECTION_FAULTS[name]

    wire.send(make(wire))

    last = wire.read()[-1]
    assert last.kind == GOAWAY
    assert struct.unpack(">I", last.payload[4:8])[0] == code, last.payload
    assert wire.is_closed
    assert not wire.server.connections


STREAM_FAULTS: dict[str, tuple[Callable[[Wire], bytes], int]] = {
    "DATA after END_STREAM": (lambda w: w.call(1, b"", "/t.T/Hang") + data_frame(1, b""), 5),
    "HEADERS after END_STREAM": (lambda w: w.call(1, b"", "/t.T/Hang") + w.headers(1, w.block(), 5), 5),
    "trailers without END_STREAM": (lambda w: w.headers(1, w.block()) + w.headers(1, w.block()), 1),
    "WINDOW_UPDATE by 0": (lambda w: w.call(1, b"", "/t.T/Hang") + window(1, 0), 1),
    "a stream's window above 2^31-1": (lambda w: w.call(1, b"", "/t.T/Hang") + window(1, 2**31 - 1), 3),
    "more DATA than the stream's window": (
        lambda w: w.headers(1, w.block()) + (frames.frame(DATA, 0, 1, prefixed(bytes(60_000)))
        + frames.frame(DATA, 0, 1, bytes(30_000))), 3),
    "no :scheme": (lambda w: w.headers(1, w.encoder.encode([(":method", "POST"), (":path", "/")])), 1),
    "no fields": (lambda w: w.headers(1, b""), 1),
    ":status in a request": (lambda w: w.headers(1, w.encoder.encode([(":status", "200")]) + w.block()), 1),
    "upgrade": (lambda w: w.headers(1, w.block("/t.T/Echo", ("upgrade", "h2c"))), 1),
    "a value that ends with a tab": (lambda w: w.headers(1, w.block("/t.T/Echo", ("a", "b\t"))), 1),
    "a name that is too long to be remembered": (lambda w: w.headers(1, w.block("/t.T/Echo", ("x" * 80 + ":", ""))), 1),
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
    "a value that begins with a tab": (lambda w: w.headers(1, w.block("/t.T/Echo", ("a", "\tb"))), 1),
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
    "a flag of compression that is none": (
        lambda w: w.headers(1, w.block()) + frames.frame(DATA, 1, 1, b"\2\0\0\0\1a"), "13"),
    "trailers before the message is whole": (
        lambda w: w.headers(1, w.block()) + frames.frame(DATA, 0, 1, b"\0\0\0\0\5ab") + w.headers(1, b"", 5), "13"),
    "one byte more than a message may have": (
        lambda w: w.headers(1, w.block()) + frames.frame(DATA, 0, 1, b"\0" + (MAX_MESSAGE_BYTES + 1).to_bytes(4)), "8"),
    "a path without a slash": (lambda w: w.call(1, b"", "t.T/Echo"), "12"),
    "one large field of the table, named a thousand times": (
        lambda w: w.headers(1, w.block("/t.T/Echo", ("x", "y" * 1000)) + b"\xbe" * 1000), "8"),
    "a table whose size changes twice": (lambda w: w.headers(1, b"\x20\x3f\xe1\x1f" + w.block("/t.T/Nope")), "12"),
    "a timeout without digits": (lambda w: w.headers(1, w.block("/t.T/Echo", ("grpc-timeout", "S"))), "3"),
    "a timeout below 0": (lambda w: w.headers(1, w.block("/t.T/Echo", ("grpc-timeout", "-1S"))), "3"),
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


ODD_BUT_RIGHT: dict[str, Callable[[Wire], bytes]] = {
    "a frame of an unknown type": lambda w: frames.frame(77, 255, 1, b"abc") + w.call(1, b"odd"),
    "an unknown setting": lambda w: settings_frame((999, 2**32 - 1)) + w.call(1, b"odd"),
    "flags that mean nothing": lambda w: w.headers(1, w.block(), 4 | 0x52) + data_frame(1, b"odd", 1 | 0x76),
    "the reserved bit of a stream's number": lambda w: w.headers(1 | 2**31, w.block()) + data_frame(1 | 2**31, b"odd"),
    "PRIORITY of an idle stream": lambda w: frames.frame(PRIORITY, 0, 99, bytes(5)) + w.call(1, b"odd"),
    "a stream that depends on itself": lambda w: (
        w.headers(1, b"\0\0\0\1\7" + w.block(), 4 | 0x20) + data_frame(1, b"odd")
    ),
    "HEADERS with padding and priority": lambda w: (
        w.headers(1, b"\3" + bytes(5) + w.block() + bytes(3), 4 | 0x28) + data_frame(1, b"odd")
    ),
    "an empty CONTINUATION": lambda w: (
        w.headers(1, w.block(), 0) + frames.frame(CONTINUATION, 4, 1) + data_frame(1, b"odd")
    ),
    "numbers of streams that are left out": lambda w: w.call(99, b"") + w.call(2**31 - 1, b"odd"),
    "trailers behind a message": lambda w: (
        w.headers(1, w.block()) + data_frame(1, b"odd", 0) + w.headers(1, w.encoder.encode([("x-sum", "1")]), 5)
    ),
    "an empty DATA with the end": lambda w: (
        w.headers(1, w.block()) + data_frame(1, b"odd", 0) + frames.frame(DATA, 1, 1)
    ),
    "a message cut within its prefix": lambda w: (
        w.headers(1, w.block()) + frames.frame(DATA, 0, 1, b"\0\0") + frames.frame(DATA, 1, 1, b"\0\0\3odd")
    ),
    "RST_STREAM of a stream that has ended": lambda w: w.call(1, b"") + reset(1) + w.call(3, b"odd"),
    "WINDOW_UPDATE of a stream that has ended": lambda w: w.call(1, b"") + window(1, 1) + w.call(3, b"odd"),
    "GOAWAY before the last call": lambda w: frames.frame(GOAWAY, 0, 0, bytes(8)) + w.call(1, b"odd"),
    "neither te nor :authority": lambda w: (
        w.headers(
            1,
            w.encoder.encode(
                [(":method", "POST"), (":scheme", "http"), (":path", "/t.T/Echo"), ("content-type", "application/grpc")]
            ),
        )
        + data_frame(1, b"odd")
    ),
}


@pytest.mark.parametrize("name", ODD_BUT_RIGHT)
async def test_what_is_odd_and_right_is_answered(wire: Wire, name: str) -> None:
    wire.send(ODD_BUT_RIGHT[name](wire))

    assert [frame.payload for frame in wire.read() if frame.kind == DATA][-1:] == [prefixed(b"odd")]
    assert not wire.is_closed


async def test_of_many_settings_in_a_frame_the_last_counts() -> None:
    """Each stream's window changes once, by the last of them; the values before have to be right all the same."""
    wire = Wire().greet((frames.INITIAL_WINDOW_SIZE, 50_000))
    wire.send(wire.call(1, b"x" * 60_000))
    sent = sum(len(frame.payload) for frame in wire.read() if frame.kind == DATA)

    wire.send(window(0, 80_000) + settings_frame(*[(frames.INITIAL_WINDOW_SIZE, 0), (4, 50_010)] * 10))

    assert sent == 50_000
    assert [len(frame.payload) for frame in wire.read() if frame.kind == DATA] == [10]
    wire.send(settings_frame((frames.INITIAL_WINDOW_SIZE, 2**31), (frames.INITIAL_WINDOW_SIZE, 1)))
    assert wire.is_closed


async def test_streams_without_a_window_are_not_looked_at_when_the_connections_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each WINDOW_UPDATE would cost as much as all the streams that the client lets wait."""
    wire = Wire(LIMITS._replace(streams=100)).greet((frames.INITIAL_WINDOW_SIZE, 0))
    for number in range(1, 201, 2):
        wire.send(wire.call(number, b"waits"))
    looked_at: list[int] = []
    pump = FrameWriter.pump

    def looking(self: FrameWriter, stream: GrpcStream) -> None:
        looked_at.append(stream.number)
        pump(self, stream)

    monkeypatch.setattr(FrameWriter, "pump", looking)
    wire.send(window(0, 1) * 10 + window(5, 100))

    assert looked_at == [5]
    assert [frame.payload for frame in wire.read() if frame.kind == DATA] == [prefixed(b"waits")]


async def test_large_heads_are_not_remembered(wire: Wire) -> None:
    """A client could fill the gateway's memory with them."""
    for number in range(1, 41, 2):
        wire.send(wire.headers(number, wire.block("/t.T/Deny") + b"\0\1x\x7f\xe1\x07" + b"%04d" % number * 280))

    assert not wire.is_closed
    assert [len(block) for block in wire.connection._heads if len(block) > 1024] == []


@pytest.mark.parametrize("windows", ["none", "a byte at a time"])
async def test_a_reply_that_its_client_does_not_take_is_dropped(windows: str) -> None:
    """It would be kept as long as the client likes, and its connection may have a thousand."""
    wire = Wire(LIMITS._replace(body_s=10)).greet((frames.INITIAL_WINDOW_SIZE, 0))
    now_s = asyncio.get_running_loop().time()
    wire.send(wire.call(1, b"reply") + wire.call(3, b"taken"))
    wire.read()

    for second in range(0, 12, 2):
        wire.connection.check(now_s + second)
        wire.send(window(1, 1) if windows != "none" else b"")
        wire.send(window(3, 100) if second == 10 else b"")

    found = [frame for frame in wire.read() if frame.kind in (DATA, HEADERS, RST_STREAM) and frame.number == 3]
    wire.connection.check(now_s + 12)
    assert [frame.kind for frame in found] == [DATA, HEADERS]
    assert [(frame.kind, frame.number, frame.payload[3]) for frame in wire.read()] == [(RST_STREAM, 1, frames.CANCEL)]
    assert not wire.is_closed


async def test_what_a_closed_connection_has_left_to_write_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read what was written last would keep its socket and that memory."""
    wire = Wire(LIMITS._replace(body_s=0.0)).greet()
    monkeypatch.setattr(wire, "get_write_buffer_size", lambda: 1)
    aborted = asyncio.Event()
    monkeypatch.setattr(wire, "abort", aborted.set)

    wire.send(data_frame(0, b""))

    assert wire.is_closed
    await aborted.wait()
