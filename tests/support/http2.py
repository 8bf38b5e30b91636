"""A client of a gRPC server's connection that sends raw frames, without a network, and a server to talk to."""

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import hpack

from qinfer.errors import DeadlineInfeasible
from qinfer.tensors import Bytes
from qinfer_api.receiving import ReceivingBudget
from qinfer_api.rpc import frames
from qinfer_api.rpc.frames import ConnectionLimits
from qinfer_api.rpc.headers import Abort, Method
from qinfer_api.rpc.heads import Server
from qinfer_api.rpc.http2 import Http2Connection
from qinfer_api.rpc.protocol import GrpcCall
from qinfer_api.turns import Turns

LIMITS = ConnectionLimits(streams=4, header_bytes=2000, idle_frames=50, connection_window_bytes=200_000)
MAX_MESSAGE_BYTES = 100_000

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)


class Frame(NamedTuple):
    """A frame, as the server wrote it."""

    kind: int
    flags: int
    number: int
    payload: bytes


class Requests:
    """Encodes the requests of one connection."""

    def __init__(self) -> None:
        self.encoder: hpack.Encoder = hpack.Encoder()

    def block(self, path: str = "/t.T/Echo", *extra: tuple[str, str], **pseudo: str) -> bytes:
        """Encodes the head of a call, with other pseudo-header fields than usual and extra fields."""
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        fields = [(name, pseudo.get(name[1:], value)) for name, value in fields]
        return self.encoder.encode([*fields, ("content-type", "application/grpc"), ("te", "trailers"), *extra])

    def headers(self, number: int, block: bytes, flags: int = frames.END_HEADERS) -> bytes:
        return frames.frame(HEADERS, flags, number, block)

    def call(self, number: int, message: bytes, path: str = "/t.T/Echo") -> bytes:
        """Returns the frames of a call of one message."""
        return self.headers(number, self.block(path)) + data_frame(number, message)


class Unhurried(Turns):
    """Turns that never end: a busy machine changes nothing."""

    def may_read(self) -> bool:
        return True


class Short(Turns):
    """Turns of one slice."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self._is_used = False

    def may_read(self) -> bool:
        super().may_read()
        self._is_used = not self._is_used
        return self._is_used

    def wait(self, go_on: Callable[[], None], *, is_fresh: bool) -> None:
        self.waits += 1
        super().wait(go_on, is_fresh=is_fresh)


class Wire(Requests):
    """A client of a connection, without a network: sends bytes, and reads the frames that the server writes.

    The server has the methods `/t.T/Echo`, `/t.T/Chat`, which echoes a stream of messages, `/t.T/Hang`, which never
    answers, `/t.T/Busy`, which refuses work, and `/t.T/Deny`, which nobody may call.

    Attributes:
        server: The server.
        connection: Its side of the connection.
        written: What it has written since the last `read`.
        is_closed: It has closed the connection.
        is_aborted: It has done so without a word.
        is_reading_paused: It reads nothing at the moment.
        protocol: Takes what the client sends, into buffers of its own if it names any.
        decoder: Decodes the server's.
        cancelled: The streams of `/t.T/Hang` whose clients have left.
    """

    def __init__(self, limits: ConnectionLimits = LIMITS, budget_bytes: int = 10**9) -> None:
        super().__init__()
        self.cancelled: list[int] = []
        self.server = Server(_methods(self.cancelled), limits, ReceivingBudget(budget_bytes))
        self.server.new_id = lambda: "the-id"
        self.server.turns = Unhurried()
        self.connection = Http2Connection(self.server)
        self.protocol: asyncio.BaseProtocol = self.connection
        self.written = bytearray()
        self.is_closed = self.is_aborted = self.is_reading_paused = False
        self.decoder = hpack.Decoder()
        self.connection.connection_made(self)  # type: ignore[arg-type]  # what it uses of a transport is here

    # -- what the connection uses of a transport -------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, pieces: Iterable[Bytes]) -> None:
        self.written += b"".join(pieces)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True
        self.connection.connection_lost(None)

    def get_extra_info(self, name: str) -> object:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    # -- the client ------------------------------------------------------------------------------------------

    def greet(self, *settings: tuple[int, int]) -> "Wire":
        """Sends the preface and settings, and reads the answer."""
        self.send(frames.PREFACE + settings_frame(*settings))
        self.read()
        return self

    def send(self, data: bytes) -> None:
        rest = memoryview(data)
        while not self.is_closed and isinstance(self.protocol, asyncio.BufferedProtocol) and rest:
            buffer = memoryview(self.protocol.get_buffer(-1))
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            self.protocol.buffer_updated(size)
            rest = rest[size:]
        if rest and not self.is_closed:
            self.connection.data_received(bytes(rest))

    def read(self) -> list[Frame]:
        """Returns the frames that were written since the last time."""
        found = []
        while self.written:
            word, flags, number = struct.unpack_from(">IBI", self.written)
            size = word >> 8
            found.append(Frame(word & 0xFF, flags, number, bytes(self.written[9 : 9 + size])))
            del self.written[: 9 + size]
        return found

    def fields(self, block: bytes) -> dict[str, str]:
        """Decodes a header block of the server's."""
        return {str(name): str(value) for name, value in self.decoder.decode(block)}


def settings_frame(*settings: tuple[int, int], flags: int = 0, number: int = 0) -> bytes:
    return frames.frame(SETTINGS, flags, number, b"".join(struct.pack(">HI", *setting) for setting in settings))


def data_frame(number: int, message: bytes, flags: int = frames.END_STREAM) -> bytes:
    return frames.frame(DATA, flags, number, prefixed(message))


def prefixed(message: bytes) -> bytes:
    """Returns a message as gRPC sends it."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def window(number: int, size: int) -> bytes:
    return frames.frame(WINDOW_UPDATE, 0, number, struct.pack(">I", size))


def reset(number: int, code: int = frames.CANCEL) -> bytes:
    return frames.frame(RST_STREAM, 0, number, struct.pack(">I", code))


def _echo(call: GrpcCall, message: Any) -> None:
    call.finish((message,))


async def _chat(call: GrpcCall) -> None:
    while (message := await call.read()) is not None:
        await call.write((message,))
    call.finish_stream()


def _busy(call: GrpcCall, _: Any) -> None:
    call.fail(DeadlineInfeasible("the requests ahead take at least 9.5 s", 8.5))


def _admit(*_: Any) -> None:
    """Lets a call in."""


def _refuse(*_: Any) -> None:
    raise Abort("UNAUTHENTICATED", "100 % no «key»")


def _methods(cancelled: list[int]) -> dict[str, Method]:
    """Returns the methods of a server; streams that are cancelled while they hang are added to the list."""

    def hang(call: GrpcCall, _: Any) -> None:
        call.on_cancel = lambda: cancelled.append(call.number)

    return {
        "/t.T/Echo": Method(_admit, _echo, False, MAX_MESSAGE_BYTES),
        "/t.T/Hang": Method(_admit, hang, False, MAX_MESSAGE_BYTES),
        "/t.T/Busy": Method(_admit, _busy, False, MAX_MESSAGE_BYTES),
        "/t.T/Deny": Method(_refuse, _echo, False, MAX_MESSAGE_BYTES),
        "/t.T/Chat": Method(_admit, lambda call, _: call.run(_chat(call)), True, MAX_MESSAGE_BYTES),
    }


def status_of(wire: Wire, found: list[Frame]) -> str:
    """Returns the gRPC status of the reply in these frames."""
    fields: dict[str, str] = {}
    for frame in found:
        if frame.kind == HEADERS:
            fields |= wire.fields(frame.payload)
    return fields.get("grpc-status", fields.get(":status", "none"))
