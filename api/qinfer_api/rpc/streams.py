"""The output of an HTTP/2 connection, under flow control (RFC 9113, 5.2)."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from qinfer.submission.memory import Landing
from qinfer.tensors import Bytes
from qinfer_api.rpc import frames
from qinfer_api.rpc.hpack import EMPTY_TABLE

if TYPE_CHECKING:
    from qinfer_api.rpc.http2 import Http2Connection


_LARGE_PIECE_BYTES = 1024

_COPIED_BYTES = 256 * 1024
"""Smaller replies are copied, since a part keeps all of its memory."""

_MOST_WRITTEN_BYTES = 2**20
"""A transport takes as many bytes before it says that its client does not read."""


class Trailers(bytes):
    """The header block that ends a stream's queue."""


class GrpcStream(msgspec.Struct, eq=False, kw_only=True):
    """One request and its reply; subclasses interpret the bytes.

    `is_ended`: the client has sent everything. `is_closed`: the reply is complete or reset. The windows count DATA
    bytes that the peer may still send. `landing` has the message that is received, if its method gave memory for it.
    `moved_s` is 0 after bytes came. `body_bytes` is the size of a body that is to come whole, 0 before its first frame,
    and -1 of a body that is read frame by frame.
    """

    connection: "Http2Connection"
    number: int
    is_ended: bool
    send_window: int
    receive_window: int
    body_bytes: int = 0
    is_closed: bool = False
    queue: deque[Bytes] = msgspec.field(default_factory=deque)
    landing: Landing | None = None
    moved_s: float = 0.0

    __repr__ = object.__repr__  # no payload is logged

    # -- called by the connection --------------------------------------------------------------------------------------

    def opened(self) -> None:
        """Handles the head; replies may begin."""

    def data_received(self, data: Bytes) -> None:
        """Handles a body's bytes, which may be overwritten later; `is_ended` is set before the last."""

    def expects(self, begin: Bytes) -> int:
        """Returns the bytes of a body by those of its first frame, or -1: it is read frame by frame."""
        return -1

    def body_received(self, parts: Sequence[Bytes]) -> None:
        """Handles a whole body, as `expects` had it; its parts may be overwritten later."""

    def withdraw(self) -> None:
        """Gives up waits on a lost connection."""

    def on_reset(self) -> None:
        """Handles a reset or a lost connection."""

    def drained(self) -> None:
        """Handles the end of the queue."""

    def closed(self) -> None:
        """Handles the end of the stream."""

    def check(self, now_s: float) -> None:
        """Applies time limits; called once a second."""

    # -- called by the request's handler -------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        """Reply bytes that wait for windows."""
        return sum([len(part) for part in self.queue])

    def send_headers(self, block: bytes, *, is_last: bool = False) -> None:
        """Sends a reply's head, or all of it."""
        if not self.is_closed:
            self.connection.output.write_headers(self.number, block, is_last=is_last)
            if is_last:
                self.connection.finished(self)

    def send(self, parts: Sequence[Bytes]) -> None:
        """Sends or queues bytes of the body."""
        if not self.is_closed:
            self.queue.extend([part for part in parts if len(part)])
            self.connection.output.pump(self)

    def send_trailers(self, block: bytes) -> None:
        """Ends the reply after its queue, once the client reads."""
        if not (self.queue or self.connection.output.is_paused):
            self.send_headers(block, is_last=True)
        elif not self.is_closed:
            self.queue.append(Trailers(block))
            self.connection.output.pump(self)

    def reply(self, head: bytes, parts: Sequence[Bytes], size: int, trailers: bytes) -> None:
        """Sends a whole reply of `size` bytes."""
        if self.is_closed:
            return
        if self.connection.output.write_reply(self, head, parts, size, trailers):
            self.connection.finished(self)
        else:
            self.send_headers(head)
            self.send(parts if size > _COPIED_BYTES else (b"".join(parts),))
            self.send_trailers(trailers)

    def reset(self, code: int) -> None:
        """Resets the stream before its reply is complete."""
        if not self.is_closed:
            self.connection.abandon(self, code)

    def grant(self, size: int) -> None:
        """Lets the client send `size` more bytes."""
        if size > 0 and not (self.is_ended or self.is_closed):
            self.receive_window += size
            self.connection.output.write_window(self.number, size)


class FrameWriter:
    """Writes a connection's frames; `progress` counts DATA frames, except those that the windows cut small."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.initial_window = self.window = frames.FIRST_WINDOW_BYTES
        self.max_frame = frames.MIN_FRAME_BYTES
        self.is_paused = self.is_closed = False
        self.block_prefix = b""
        self.progress = 0
        self._waiting: dict[int, GrpcStream] = {}  # streams that wait for the connection's window

    def write(self, kind: int, flags: int, number: int, payload: Bytes = b"") -> None:
        """Writes a frame."""
        if not self.is_closed:
            self.transport.write(frames.frame(kind, flags, number, payload))

    def write_headers(self, number: int, block: bytes, *, is_last: bool) -> None:
        """Writes a header block, which fits a frame."""
        if self.block_prefix:
            block, self.block_prefix = self.block_prefix + block, b""
        flags = frames.END_HEADERS | frames.END_STREAM if is_last else frames.END_HEADERS
        self.write(frames.HEADERS, flags, number, block)

    def write_reply(self, stream: GrpcStream, head: bytes, parts: Sequence[Bytes], size: int, trailers: bytes) -> bool:
        """Writes a whole reply of `size` bytes, if the windows allow."""
        if size > stream.send_window or size > self.window or size > _MOST_WRITTEN_BYTES or self.is_paused:
            return False
        if self.block_prefix or self.is_closed or stream.queue:
            return False
        self.window -= size
        number, most, pack = stream.number, self.max_frame, frames.HEAD.pack
        self.progress += size // most
        pieces = (
            pack(len(head) << 8 | frames.HEADERS, frames.END_HEADERS, number),
            head,
            *((pack(size << 8, 0, number), *parts) if size <= most else frames.data_frames(number, parts, most)),
            pack(len(trailers) << 8 | frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number),
            trailers,
        )
        if size > _COPIED_BYTES:
            self.transport.writelines(pieces)
        else:
            self.transport.write(b"".join(pieces))
        return True

    def write_window(self, number: int, size: int) -> None:
        """Grants the client `size` bytes, of one stream, or of all streams (0)."""
        if not self.is_closed:
            self.transport.write(frames.WINDOW.pack(frames.WORD.size << 8 | frames.WINDOW_UPDATE, 0, number, size))

    def resize(self, streams: Iterable[GrpcStream], size: int) -> None:
        """Applies the client's SETTINGS_INITIAL_WINDOW_SIZE; `pump_all` follows."""
        change, self.initial_window = size - self.initial_window, size
        for stream in streams:
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW_BYTES:
                raise frames.ConnectionFault(frames.FLOW_CONTROL_ERROR, "a window is larger than 2^31-1")
            if stream.queue and stream.send_window > 0:
                self._waiting[stream.number] = stream

    def shrink_table(self) -> None:
        """Confirms a smaller header table (RFC 7541, section 4.2)."""
        self.block_prefix = EMPTY_TABLE

    def pump(self, stream: GrpcStream) -> None:
        """Writes what the windows allow."""
        queue = stream.queue
        while queue and not self.is_paused and not self.is_closed:
            part = queue[0]
            if isinstance(part, Trailers):
                queue.clear()
                self._waiting.pop(stream.number, None)
                stream.send_headers(part, is_last=True)
                return
            room = min(stream.send_window, self.window, _MOST_WRITTEN_BYTES)
            if room <= 0:
                break
            self._write_data(stream, room)
        if queue and (stream.send_window > 0 or self.is_paused):
            self._waiting[stream.number] = stream
        else:
            self._waiting.pop(stream.number, None)
        if not queue:
            stream.drained()

    def _write_data(self, stream: GrpcStream, room: int) -> None:
        queue, parts, left, is_cut = stream.queue, list[Bytes](), room, False
        while left and queue and not isinstance(queue[0], Trailers):
            part = queue.popleft()
            if len(part) > left:
                view, is_cut = memoryview(part), True
                part = view[:left]
                queue.appendleft(view[left:])
            parts.append(part)
            left -= len(part)
        size = room - left
        stream.send_window -= size
        self.window -= size
        if size >= _LARGE_PIECE_BYTES or len(parts) > is_cut:
            self.progress += -(-size // self.max_frame)
        pieces = frames.data_frames(stream.number, parts, self.max_frame)
        if size > _COPIED_BYTES:
            self.transport.writelines(pieces)
        else:
            self.transport.write(b"".join(pieces))

    def pump_all(self) -> None:
        """Continues the streams that waited for the connection."""
        for stream in list(self._waiting.values()):
            if self.is_paused:
                break
            self.pump(stream)  # without a window, trailers that wait

    def pump_one(self, stream: GrpcStream) -> None:
        """Continues a stream that has a queue."""
        if stream.queue:
            self.pump(stream)

    def drop_queued(self, stream: GrpcStream) -> None:
        """Drops a stream's queue."""
        self._waiting.pop(stream.number, None)
        stream.queue.clear()
