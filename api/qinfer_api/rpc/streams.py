"""The way out of a connection of HTTP/2: the replies of its streams, as its windows let them through (RFC 9113, 5.2).

A reply that fits the windows is written at once, in one piece. What does not fit is queued at its stream, and written
when the client opens its windows or takes what was written.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qinfer.tensors import Bytes
from qinfer_api.rpc import frames
from qinfer_api.rpc.hpack import EMPTY_TABLE

if TYPE_CHECKING:
    from qinfer_api.rpc.http2 import Connection


_LARGE_PIECE_BYTES = 1024


class Trailers(bytes):
    """The header block at the end of a stream's queue."""


class Stream:
    """One request and its reply; subclasses say what its bytes mean.

    Args:
        connection: Its connection.
        number: Its number.
        is_ended: The client sends nothing after the head.

    Attributes:
        connection: As given.
        number: As given.
        is_ended: The client has sent all, or what it sends is not wanted.
        is_closed: The reply is complete, or the stream was reset.
        send_window: Bytes of DATA that the client takes.
        receive_window: Bytes of DATA that the client may send.
        queue: What waits for the client's windows.
    """

    __slots__ = ("connection", "is_closed", "is_ended", "number", "queue", "receive_window", "send_window")

    def __init__(self, connection: "Connection", number: int, *, is_ended: bool) -> None:
        self.connection = connection
        self.number = number
        self.is_ended = is_ended
        self.is_closed = False
        self.send_window = connection.output.initial_window
        self.receive_window = connection.service.limits.window_bytes
        self.queue: deque[Bytes] = deque()

    # -- called by the connection --------------------------------------------------------------------------------------

    def opened(self) -> None:
        """The connection knows the stream: it may be answered."""

    def data_received(self, data: bytes) -> None:
        """Takes bytes of the request's body; `is_ended` is set before the last ones."""

    def withdraw(self) -> None:
        """The connection is lost: gives up what the stream waits for, before any of its streams is cancelled."""

    def cancelled(self) -> None:
        """The client has reset the stream, or its connection is lost."""

    def drained(self) -> None:
        """All that was queued is written."""

    def closed(self) -> None:
        """The stream has ended, one way or another."""

    def check(self, now_s: float) -> None:
        """Applies limits of time; called about once a second."""

    # -- called by the request's handler -------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the reply that wait for the client's windows."""
        return sum([len(part) for part in self.queue])

    def send_headers(self, block: bytes, *, is_last: bool = False) -> None:
        """Sends header fields: the reply's head, or with `is_last` all that there is."""
        if not self.is_closed:
            self.connection.output.write_headers(self.number, block, is_last=is_last)
            if is_last:
                self.connection.finished(self)

    def send(self, parts: Sequence[Bytes]) -> None:
        """Sends bytes of the reply's body, or queues them."""
        if not self.is_closed:
            self.queue.extend([part for part in parts if len(part)])
            self.connection.output.pump(self)

    def send_trailers(self, block: bytes) -> None:
        """Ends the reply, behind what is queued."""
        if not self.queue:
            self.send_headers(block, is_last=True)
        elif not self.is_closed:
            self.queue.append(Trailers(block))

    def reply(self, head: bytes, body: bytes, trailers: bytes) -> None:
        """Sends a whole reply."""
        if self.is_closed:
            return
        if self.connection.output.write_reply(self, head, body, trailers):
            self.connection.finished(self)
        else:
            self.send_headers(head)
            self.send((body,))
            self.send_trailers(trailers)

    def reset(self, code: int) -> None:
        """Ends the stream without a (whole) reply."""
        if not self.is_closed:
            self.connection.abandon(self, code)

    def grant(self, size: int) -> None:
        """Lets the client send so many bytes more."""
        if size > 0 and not (self.is_ended or self.is_closed):
            self.receive_window += size
            self.connection.output.write_window(self.number, size)


class Output:
    """Writes the frames of a connection.

    Attributes:
        transport: Where they go; set when the connection is made.
        initial_window: Bytes of DATA that the client takes for a new stream.
        window: Bytes of DATA that it takes for all streams.
        max_frame: The largest payload that it takes.
        is_paused: The transport has more than it can send.
        is_closed: Nothing is written any more.
        block_prefix: Precedes the next header block.
        progress: Frames of DATA that were written since `Connection` looked last, but those cut small by the windows.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.initial_window = self.window = frames.FIRST_WINDOW_BYTES
        self.max_frame = frames.MIN_FRAME_BYTES
        self.is_paused = self.is_closed = False
        self.block_prefix = b""
        self.progress = 0
        self._waiting: dict[int, Stream] = {}  # by number: those that wait for the connection, not for their window

    def write(self, kind: int, flags: int, number: int, payload: Bytes = b"") -> None:
        """Writes a frame."""
        if not self.is_closed:
            self.transport.write(frames.frame(kind, flags, number, payload))

    def write_headers(self, number: int, block: bytes, *, is_last: bool) -> None:
        """Writes a header block; replies' are smaller than a frame."""
        if self.block_prefix:
            block, self.block_prefix = self.block_prefix + block, b""
        flags = frames.END_HEADERS | frames.END_STREAM if is_last else frames.END_HEADERS
        self.write(frames.HEADERS, flags, number, block)

    def write_reply(self, stream: Stream, head: bytes, body: bytes, trailers: bytes) -> bool:
        """Writes a whole reply, or nothing: returns whether the windows let it through."""
        size, number = len(body), stream.number
        if size > stream.send_window or size > self.window or size > self.max_frame or self.is_paused:
            return False
        if self.block_prefix or self.is_closed or stream.queue:
            return False
        self.window -= size
        pack = frames.HEAD.pack
        self.transport.write(
            b"".join(
                (
                    pack(len(head) << 8 | frames.HEADERS, frames.END_HEADERS, number),
                    head,
                    pack(size << 8, 0, number),
                    body,
                    pack(len(trailers) << 8 | frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number),
                    trailers,
                )
            )
        )
        return True

    def write_window(self, number: int, size: int) -> None:
        """Lets the client send so many bytes more, of one stream or (0) of all."""
        self.write(frames.WINDOW_UPDATE, 0, number, frames.WORD.pack(size))

    def resize(self, streams: Iterable[Stream], size: int) -> None:
        """Follows the client's SETTINGS_INITIAL_WINDOW_SIZE; `pump_all` is called next.

        Raises:
            ConnectionFault: A window becomes too large.
        """
        change, self.initial_window = size - self.initial_window, size
        for stream in streams:
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW_BYTES:
                raise frames.ConnectionFault(frames.FLOW_CONTROL_ERROR, "a window is larger than 2^31-1")
            if stream.queue and stream.send_window > 0:
                self._waiting[stream.number] = stream

    def shrink_table(self) -> None:
        """Confirms a smaller header table, of which replies use nothing (RFC 7541, section 4.2)."""
        self.block_prefix = EMPTY_TABLE

    def pump(self, stream: Stream) -> None:
        """Writes what the windows let through of a stream's queue."""
        queue = stream.queue
        while queue and not self.is_paused and not self.is_closed:
            part = queue[0]
            if isinstance(part, Trailers):
                queue.clear()
                self._waiting.pop(stream.number, None)
                stream.send_headers(part, is_last=True)
                return
            room = min(stream.send_window, self.window, self.max_frame)
            if room <= 0:
                break
            if len(part) <= room:
                piece = queue.popleft()
            else:
                view = memoryview(part)
                piece, queue[0] = view[:room], view[room:]
            stream.send_window -= len(piece)
            self.window -= len(piece)
            if piece is part or len(piece) >= _LARGE_PIECE_BYTES:
                self.progress += 1
            self.write(frames.DATA, 0, stream.number, piece)
        if queue and (stream.send_window > 0 or self.is_paused):
            self._waiting[stream.number] = stream
        else:
            self._waiting.pop(stream.number, None)
        if not queue:
            stream.drained()

    def pump_all(self) -> None:
        """Writes on where the connection's window, or the transport, was what held it up."""
        for stream in list(self._waiting.values()):
            if self.window <= 0 or self.is_paused:
                break
            self.pump(stream)

    def pump_one(self, stream: Stream) -> None:
        """Writes on if something of that stream is queued."""
        if stream.queue:
            self.pump(stream)

    def forget(self, stream: Stream) -> None:
        """Drops what is queued of a stream."""
        self._waiting.pop(stream.number, None)
        stream.queue.clear()
