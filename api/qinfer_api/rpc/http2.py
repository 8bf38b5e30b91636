"""The server side of an HTTP/2 connection (RFC 9113).

A `Service` makes a `GrpcStream` of each request. Nothing here waits. All input is bounded (`ConnectionLimits`): frames
that advance no request (PING, SETTINGS, RST_STREAM, empty DATA, …) use up an allowance that replies and time refill;
without it the connection ends with ENHANCE_YOUR_CALM.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from typing import Any, Protocol, cast

from qinfer.tensors import Bytes
from qinfer_api.receiving import READ_BYTES, SwitchingConnection
from qinfer_api.rpc import frames
from qinfer_api.rpc.frames import ConnectionFault, ConnectionLimits, Malformed
from qinfer_api.rpc.hpack import MAX_TABLE_BYTES, Decoder, Field, HpackError
from qinfer_api.rpc.streams import FrameWriter, GrpcStream
from qinfer_api.turns import SLICE_BYTES, SMALL_BYTES, Turns

logger = logging.getLogger(__name__)

_CACHED_BLOCKS, _CACHED_BLOCK_BYTES = 256, 1024  # their product bounds a client's memory
_REMEMBERED_STREAMS = 256
# Bytes of header blocks without a stream that are charged as one idle frame.
_BYTES_PER_FRAME = 128
# Streams with a changed window that are charged as one idle frame.
_STREAMS_PER_FRAME = 64
# Idle frames that a client earns by the end of a stream or a DATA frame. It keeps what all streams earn that end at
# once: its frames about them come later.
_PROGRESS = 4
_NOT_HTTP2 = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"this port speaks gRPC, over HTTP/2 only; HTTP/1.1 is spoken on the HTTP port\n"
)
_LAST_SECOND_S = 1.0
_NO_BUFFER = memoryview(b"")
_SIGN_OF_LIFE, _SHUTDOWN = b"liveness", b"shutdown"


class Service(Protocol):
    """Handles the requests of all connections."""

    limits: ConnectionLimits
    turns: Turns
    buffer: memoryview
    connections: "set[Http2Connection]"
    is_closing: bool

    def read_head(self, fields: list[Field] | None) -> Any:
        """Parses a request's header fields, `None` if too large.

        Raises:
            Malformed: The fields are not those of a request.
        """

    def stream(self, connection: "Http2Connection", number: int, head: Any, *, is_ended: bool) -> GrpcStream:
        """Creates the stream of a request; `GrpcStream.opened` follows."""


class Http2Connection(SwitchingConnection):
    """One connection; `output` writes its frames."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.output = FrameWriter()
        self.peer = ""
        self._decoder = Decoder(service.limits.header_bytes)
        # Header block → its request; cleared when the decoder's table changes.
        self._heads: dict[bytes, Any] = {}
        self._generation = 0
        # The decoder's table may have fields that requests must not use.
        self._is_tainted = False
        self._rest = b""
        self._buffer = _NO_BUFFER
        # `_rest` waits for its turn.
        self._awaits_turn = False
        # The next frame, or the body of a call, is to come whole.
        self._is_partial = False
        # Of a frame that was read in part.
        self._begun: GrpcStream | None = None
        self._missing = 0
        self._has_preface = self._has_settings = False
        # The stream, the flags and the start of an unfinished header block.
        self._block: tuple[int, int, bytearray] | None = None
        self._streams: dict[int, GrpcStream] = {}
        self._abandoned: deque[int] = deque(maxlen=_REMEMBERED_STREAMS)
        self._last = 0
        self._last_taken = frames.LAST_STREAM
        self._window = service.limits.connection_window_bytes
        self._least_window = self._window >> 1
        self._allowance = service.limits.idle_frames
        self._most_allowance = self._allowance + _PROGRESS * service.limits.streams
        self._age_s = service.limits.age_s * random.uniform(0.9, 1.1)  # noqa: S311 - spreads reconnections
        self._made_s = self._busy_s = self._heard_s = 0.0
        self._pinged_s = self._goes_s = self._stuck_s = 0.0  # 0 = not the case
        self._is_heard = False
        self._takes_no_more = asyncio.Event()

    # -- asyncio's calls -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the preface: earlier settings would hide the answer to HTTP/1.1."""
        self.output.transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else ""
        self._made_s = self._busy_s = self._heard_s = asyncio.get_running_loop().time()
        if self.service.is_closing:
            self.close()
        else:
            self.service.connections.add(self)

    def read_into_buffers(self) -> None:
        """Reads into `get_buffer` from now on."""
        if not self._is_buffered:
            output = self.output
            self._buffer_reads(output.transport, is_paused=self._awaits_turn or output.is_paused)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns a buffer of all connections, behind the rest of this one's last read."""
        rest, self._buffer = self._rest, self.service.buffer
        if not rest:
            return self._buffer
        size = len(rest)
        if size > len(self._buffer) // 2:  # it had no turn yet
            self._buffer = memoryview(bytearray(size + READ_BYTES))
        self._buffer[:size] = rest
        return self._buffer[size:]

    def buffer_updated(self, nbytes: int) -> None:
        """Reads the complete frames in the buffer."""
        size, self._rest = len(self._rest) + nbytes, b""
        self.data_received(self._buffer[:size])
        self._buffer = _NO_BUFFER

    def data_received(self, data: Bytes) -> None:
        """Reads the complete frames."""
        if self.output.is_closed:
            return
        self._is_heard = True
        if self._rest:
            data = self._rest + data
        try:
            position, size = 0 if self._has_preface else self._read_preface(bytes(data)), len(data)
            if self._missing:
                position = self._land(data, 0)
            self._is_partial, last = False, size - frames.HEAD_BYTES
            if size - position > SMALL_BYTES and not self._awaits_turn:
                if self._is_buffered:  # before, no message has memory
                    position = self._land(data, position)
                position = self._read_frames(data, position, min(position, last))  # a call alone needs no turn
            if size - position > SMALL_BYTES and not self._is_partial:
                position = self._read_in_turns(data, position)
            elif position <= last and not self._is_partial:
                position = self._read_frames(data, position, last)
        except (ConnectionFault, HpackError) as fault:
            self._fail(fault.code, str(fault))
        else:
            self._rest = bytes(data[position:])

    def _read_in_turns(self, data: Bytes, position: int) -> int:
        """Messages land at once, as over HTTP; other frames wait for turns."""
        turns, before, last, is_fresh = self.service.turns, -1, len(data) - frames.HEAD_BYTES, True
        while before < position <= last and not self._awaits_turn:
            before = position
            if self._is_buffered:
                position = self._land(data, position)
            if position > last:
                break
            if turns.may_read():
                position = self._read_frames(data, position, min(position + SLICE_BYTES, last))
            else:
                self._awaits_turn = True
                self.output.transport.pause_reading()
                turns.wait(self._go_on, is_fresh=is_fresh)
            is_fresh = False
        return position

    def _go_on(self) -> None:
        self._awaits_turn = False
        if not (self.output.is_paused or self.output.transport.is_closing()):
            self.data_received(b"")
            if not (self._awaits_turn or self.output.is_paused or self.output.is_closed):
                self.output.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the requests in flight."""
        self.output.is_closed = True
        self._takes_no_more.set()
        self.service.connections.discard(self)
        self._rest = b""
        streams = list(self._streams.values())
        for stream in streams:
            stream.withdraw()
        for stream in streams:
            self._drop(stream)
            stream.on_reset()

    def pause_writing(self) -> None:
        """Pauses reading while replies are unread."""
        self.output.is_paused = True
        self._stuck_s = asyncio.get_running_loop().time()
        self.output.transport.pause_reading()

    def resume_writing(self) -> None:
        """Resumes writing and reading."""
        self.output.is_paused = False
        self._stuck_s = 0.0
        self.output.pump_all()
        if not self._awaits_turn:
            self._go_on()

    # -- frames --------------------------------------------------------------------------------------------------------

    def _read_preface(self, data: bytes) -> int:
        if data.startswith(frames.PREFACE):
            self._has_preface = True
            self._send_settings()
            return len(frames.PREFACE)
        if not frames.PREFACE.startswith(data):
            self.output.transport.write(_NOT_HTTP2)
            raise ConnectionFault(frames.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface")
        return 0

    def _send_settings(self) -> None:
        limits = self.service.limits
        settings = (
            (frames.MAX_CONCURRENT_STREAMS, limits.streams),
            (frames.INITIAL_WINDOW_SIZE, limits.window_bytes),
            (frames.MAX_FRAME_SIZE, limits.frame_bytes),
            (frames.MAX_HEADER_LIST_SIZE, limits.header_bytes),
        )
        self.output.write(frames.SETTINGS, 0, 0, b"".join([frames.SETTING.pack(*setting) for setting in settings]))
        self.output.write_window(0, limits.connection_window_bytes - frames.FIRST_WINDOW_BYTES)

    def _read_frames(self, data: Bytes, position: int, last: int) -> int:
        end, most, self._is_partial = len(data), self.service.limits.frame_bytes, False
        while position <= last and self._has_preface:
            size, flags, number = frames.HEAD.unpack_from(data, position)
            kind, size, number = size & 0xFF, size >> 8, number & frames.LAST_STREAM
            begin = position + frames.HEAD_BYTES
            stop = begin + size
            if size > most:
                raise ConnectionFault(frames.FRAME_SIZE_ERROR, f"a frame of {size} bytes, more than {most}")
            if stop > end:
                self._is_partial = True
                break
            if self._block is not None and (kind != frames.CONTINUATION or number != self._block[0]):
                raise ConnectionFault(frames.PROTOCOL_ERROR, "a header block is interrupted")
            if not self._has_settings and kind != frames.SETTINGS:
                raise ConnectionFault(frames.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            if kind == frames.DATA:
                stop = self._read_data(flags, number, data, begin, stop)
                if self._is_partial:
                    break
            elif kind == frames.HEADERS:
                self._read_headers(flags, number, data, begin, stop)
                has_body = stop <= end - frames.HEAD_BYTES and data[stop + frames.KIND_AT] == frames.DATA
                last = max(last, stop) if has_body else last  # its first frame goes with the head
            else:
                self._read_other(kind, flags, number, bytes(data[begin:stop]))
            if self.output.is_closed:
                return end
            position = stop
        return position

    def _read_data(self, flags: int, number: int, data: Bytes, begin: int, stop: int) -> int:
        """Reads a frame of a body, or all of the body; returns the end."""
        stream = self._streams.get(number)
        if stream is not None and stream.body_bytes >= 0 and not stream.is_ended:
            end = self._read_body(stream, data, begin - frames.HEAD_BYTES)
            if end or self._is_partial:
                return end
            stream.body_bytes = -1
        size, end = stop - begin, stop
        self._window -= size
        if self._window < self._least_window:
            self._renew_window()
        if stream is None or stream.is_ended:
            self._refuse_data(number, stream)
            return end
        if flags & frames.PADDED:
            begin, stop = frames.unpadded(frames.PADDED, data, begin, stop)
        stream.receive_window -= size
        if stream.receive_window < 0:
            self._reset(stream, frames.FLOW_CONTROL_ERROR)
            return end
        if flags & frames.END_STREAM:
            stream.is_ended = True
        else:
            if begin == stop:
                self._count_idle("empty DATA")
            if flags & frames.PADDED:
                stream.grant(size - (stop - begin))  # padding counts as read
        stream.data_received(data[begin:stop])
        return end

    def _read_body(self, stream: GrpcStream, data: Bytes, start: int) -> int:
        """Reads a whole small body at once, if its frames one by one would lead to nothing else.

        Returns its end, or 0: then it is to come whole (`_is_partial`), or is read frame by frame.
        """
        room = min(self._window - self._least_window, stream.receive_window, self.service.limits.frame_bytes)
        parts, end, is_ended = frames.plain_body(data, start, stream.number, room)
        if not parts:
            return 0
        size, expected = sum(map(len, parts)), stream.body_bytes or stream.expects(parts[0])
        if size > expected or expected > room or (is_ended and size < expected):
            return 0
        stream.body_bytes = expected
        if not is_ended:
            self._is_partial = True
            return 0
        self._window -= size
        stream.body_received(parts)
        return end

    def _renew_window(self) -> None:
        if self._window < 0:
            raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        most = self.service.limits.connection_window_bytes
        self.output.write_window(0, most - self._window)
        self._window = most

    def _land(self, data: Bytes, position: int) -> int:
        """Reads a message into its memory, except its last frame, and returns the end."""
        unpack, end, missing = frames.HEAD.unpack_from, len(data), self._missing
        stream = self._begun if missing else self._streams.get(unpack(data, position)[2])
        landing = None if stream is None or stream.is_ended or self._block is not None else stream.landing
        came = 0
        if missing:
            came = min(missing, end - position)
            self._missing -= came
            position += came
        if stream is None or landing is None:
            return position
        rest, used, size, most = landing.rest, 0, 0, self.service.limits.frame_bytes
        head: Bytes = b""
        room = min(len(rest) - missing, self._window, stream.receive_window)
        rest[:came] = data[position - came : position]
        while (begin := position + frames.HEAD_BYTES) <= end:
            if data[position:begin] != head:
                head = data[position:begin]
                word, flags, number = unpack(data, position)
                size = word >> 8
                if word & 0xFF or flags or number != stream.number or not frames.LEAST_BYTES <= size <= most:
                    break
            if used + size >= room:
                break
            used += size
            position = begin + size
            if position > end:
                self._begun, self._missing = stream, position - end
                position = end
            rest[came : came + position - begin] = data[begin:position]
            came += position - begin
        if came or used:
            landing.came(came)
            stream.moved_s = 0.0
            stream.receive_window -= used
            self._window -= used
            if self._window < self._least_window:
                self._renew_window()
        return position

    def _refuse_data(self, number: int, stream: GrpcStream | None) -> None:
        self._check_opened(number, "DATA")
        self._count_idle("DATA of closed streams")
        if stream is not None:
            self._reset(stream, frames.STREAM_CLOSED)

    def _read_headers(self, flags: int, number: int, data: Bytes, begin: int, stop: int) -> None:
        if not number & 1:
            raise ConnectionFault(frames.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & (frames.PADDED | frames.HAS_PRIORITY):
            begin, stop = frames.unpadded(flags, data, begin, stop)
        if flags & frames.END_HEADERS:
            self._read_block(number, bytes(data[begin:stop]), is_ended=bool(flags & frames.END_STREAM))
        else:
            self._count_idle("HEADERS in pieces")
            self._block = number, flags, bytearray(data[begin:stop])

    def _read_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        number, first_flags, block = self._block
        block += payload
        if len(block) > 4 * self.service.limits.header_bytes:
            raise ConnectionFault(frames.ENHANCE_YOUR_CALM, f"a header block of more than {len(block)} bytes")
        if flags & frames.END_HEADERS:
            self._block = None
            self._read_block(number, bytes(block), is_ended=bool(first_flags & frames.END_STREAM))
        else:
            self._count_idle("CONTINUATION")

    def _read_block(self, number: int, block: bytes, *, is_ended: bool) -> None:
        head = self._heads.get(block)
        if head is None or number <= self._last:
            head = self._read_head(number, block, is_ended=is_ended)
        if head is None:
            return
        self._last = number
        if number > self._last_taken:  # the client knows by GOAWAY
            return
        if len(self._streams) >= self.service.limits.streams:
            self._count_idle("more streams than allowed")
            self._write_reset(number, frames.REFUSED_STREAM)
            return
        stream = self._streams[number] = self.service.stream(self, number, head, is_ended=is_ended)
        stream.opened()

    def _read_head(self, number: int, block: bytes, *, is_ended: bool) -> Any:
        """Decodes a block; `None` if it begins no request."""
        fields, literals = self._decoder.decode(block)
        is_stable = self._generation == self._decoder.generation
        if len(self._heads) >= _CACHED_BLOCKS or not is_stable:
            self._generation = self._decoder.generation
            self._heads.clear()
        cost = 1 + len(block) // _BYTES_PER_FRAME
        if number <= self._last:
            self._read_trailers(number, cost, is_ended=is_ended)
            return None
        self._last = number
        if fields is None:
            self._is_tainted = True
            self._count_idle("heads that are too large", cost)
        try:
            frames.check_fields(fields or () if self._is_tainted else literals)
            head = self.service.read_head(fields)
        except Malformed as error:
            self._is_tainted = True
            self._count_idle(str(error), cost)
            self._write_reset(number, frames.PROTOCOL_ERROR)
            return None
        if is_stable and len(block) <= _CACHED_BLOCK_BYTES:
            self._heads[block] = head
        return head

    def _read_trailers(self, number: int, cost: int, *, is_ended: bool) -> None:
        stream = self._streams.get(number)
        self._count_idle("trailers", cost)
        if stream is None:
            if number not in self._abandoned:
                raise ConnectionFault(frames.STREAM_CLOSED, f"HEADERS on stream {number}, which is closed")
        elif stream.is_ended:
            self._reset(stream, frames.STREAM_CLOSED)
        elif not is_ended:
            self._reset(stream, frames.PROTOCOL_ERROR)
        else:
            stream.is_ended = True
            stream.data_received(b"")

    def _read_other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.WINDOW_UPDATE:
            self._read_window(number, payload)
        elif kind == frames.SETTINGS:
            self._read_settings(flags, number, payload)
        elif kind == frames.PING:
            self._read_ping(flags, number, payload)
        elif kind == frames.RST_STREAM:
            self._read_reset(number, payload)
        elif kind == frames.CONTINUATION:
            self._read_continuation(flags, payload)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        elif kind == frames.PRIORITY and number == 0:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "PRIORITY on stream 0")
        elif kind == frames.GOAWAY and number:
            raise ConnectionFault(frames.PROTOCOL_ERROR, f"GOAWAY on stream {number}")
        else:
            self._count_idle("PRIORITY, GOAWAY and frames of unknown types")

    def _read_window(self, number: int, payload: bytes) -> None:
        size = frames.word(payload, "WINDOW_UPDATE") & frames.LAST_STREAM
        self._count_idle("WINDOW_UPDATE")
        if number == 0:
            self.output.window += size
            if size == 0:
                raise ConnectionFault(frames.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            if self.output.window > frames.MAX_WINDOW_BYTES:
                raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "the connection's window is larger than 2^31-1")
            self.output.pump_all()
            return
        self._check_opened(number, "WINDOW_UPDATE")
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.send_window += size
        if size == 0:
            self._reset(stream, frames.PROTOCOL_ERROR)
        elif stream.send_window > frames.MAX_WINDOW_BYTES:
            self._reset(stream, frames.FLOW_CONTROL_ERROR)
        else:
            self.output.pump_one(stream)

    def _read_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(frames.PROTOCOL_ERROR, f"SETTINGS on stream {number}")
        if len(payload) % frames.SETTING.size or (flags & frames.ACK and payload):
            raise ConnectionFault(frames.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        self._count_idle("SETTINGS", max(len(payload) // frames.SETTING.size, 1))
        if flags & frames.ACK:
            return
        for key, value in frames.SETTING.iter_unpack(payload):
            frames.check_setting(key, value)
            if key == frames.HEADER_TABLE_SIZE and value < MAX_TABLE_BYTES:
                self.output.shrink_table()
        settings = dict(frames.SETTING.iter_unpack(payload))  # a frame may repeat it
        self.output.max_frame = settings.get(frames.MAX_FRAME_SIZE, self.output.max_frame)
        if frames.INITIAL_WINDOW_SIZE in settings:
            self._count_idle("SETTINGS of windows", len(self._streams) // _STREAMS_PER_FRAME)
            self.output.resize(self._streams.values(), settings[frames.INITIAL_WINDOW_SIZE])
        self._has_settings = True
        self.output.write(frames.SETTINGS, frames.ACK, 0)
        self.output.pump_all()

    def _read_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(frames.PROTOCOL_ERROR, f"PING on stream {number}")
        if len(payload) != 8:
            raise ConnectionFault(frames.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        self._count_idle("PING")
        if not flags & frames.ACK:
            self.output.write(frames.PING, frames.ACK, 0, payload)
        elif payload == _SHUTDOWN and self._goes_s:
            self._take_no_more()

    def _read_reset(self, number: int, payload: bytes) -> None:
        frames.word(payload, "RST_STREAM")
        self._check_opened(number, "RST_STREAM")
        self._count_idle("RST_STREAM")
        stream = self._streams.get(number)
        if stream is not None:
            self._drop(stream)
            stream.on_reset()
            self._close_if_done()

    def _check_opened(self, number: int, what: str) -> None:
        if number == 0 or number > self._last:
            raise ConnectionFault(frames.PROTOCOL_ERROR, f"{what} on stream {number}, which was never opened")

    def _count_idle(self, what: str, cost: int = 1) -> None:
        self._allowance -= cost
        if self.output.progress:  # clients answer DATA with WINDOW_UPDATE, and time it with PING
            self._allowance = min(self._allowance + _PROGRESS * self.output.progress, self._most_allowance)
            self.output.progress = 0
        if self._allowance < 0:
            raise ConnectionFault(frames.ENHANCE_YOUR_CALM, f"too many frames that advance no request: {what}")

    # -- ends of streams -----------------------------------------------------------------------------------------------

    def finished(self, stream: GrpcStream) -> None:
        """Removes a stream whose reply is written."""
        if not stream.is_ended:
            self._write_reset(stream.number, frames.NO_ERROR)
        self._drop(stream)
        if self._allowance < self._most_allowance:
            self._allowance += _PROGRESS
        if self._last_taken < frames.LAST_STREAM:
            self._close_if_done()

    def abandon(self, stream: GrpcStream, code: int) -> None:
        """Resets a stream without its reply."""
        self._write_reset(stream.number, code)
        self._drop(stream)
        self._close_if_done()

    def _reset(self, stream: GrpcStream, code: int) -> None:
        self.abandon(stream, code)
        stream.on_reset()

    def _write_reset(self, number: int, code: int) -> None:
        self._abandoned.append(number)
        self.output.write(frames.RST_STREAM, 0, number, frames.WORD.pack(code))

    def _drop(self, stream: GrpcStream) -> None:
        stream.is_closed = stream.is_ended = True
        if stream.queue:
            self.output.drop_queued(stream)
        if self._streams.pop(stream.number, None) is not None:
            stream.closed()

    # -- the connection's end ------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Ends the connection after its requests (RFC 9113, section 6.8).

        The PING behind the first GOAWAY shows by its answer that earlier requests have arrived.
        """
        if not self._has_preface:
            self.close()
            self.connection_lost(None)
        elif not (self._goes_s or self.output.is_closed):
            self._goes_s = asyncio.get_running_loop().time()
            self.output.write(frames.GOAWAY, 0, 0, frames.TWO_WORDS.pack(frames.LAST_STREAM, frames.NO_ERROR))
            self.output.write(frames.PING, 0, 0, _SHUTDOWN)

    async def shut(self) -> None:
        """Shuts down; returns when no more requests are accepted."""
        self.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECOND_S):
                await self._takes_no_more.wait()
        self._take_no_more()

    def _take_no_more(self) -> None:
        if self._last_taken == frames.LAST_STREAM and not self.output.is_closed:
            self._last_taken = self._last
            self._takes_no_more.set()
            self.output.write(frames.GOAWAY, 0, 0, frames.TWO_WORDS.pack(self._last, frames.NO_ERROR))
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._last_taken < frames.LAST_STREAM and not self._streams:
            self.close()

    def close_now(self) -> None:
        """Ends the connection now, without answers."""
        if not self.output.is_closed:
            self._fail(frames.NO_ERROR, "the server ends")

    def close(self) -> None:
        """Closes once the output is written, or after a reply's time."""
        self.output.is_closed = True
        transport = self.output.transport
        transport.close()
        if transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(self.service.limits.body_s, transport.abort)

    def _fail(self, code: int, reason: str) -> None:
        logger.debug("connection ended", extra={"code": code, "reason": reason})
        payload = frames.TWO_WORDS.pack(self._last, code) + reason.encode()[:200]
        if self._has_preface:
            self.output.write(frames.GOAWAY, 0, 0, payload)
        self.close()
        self.connection_lost(None)

    def check(self, now_s: float) -> None:
        """Applies the time limits; called once a second."""
        limits = self.service.limits
        self._allowance = max(self._allowance, min(self._allowance + limits.idle_frames_per_s, limits.idle_frames))
        if self._streams:
            self._busy_s = now_s
        if self._is_heard or self.output.is_paused:
            self._is_heard, self._heard_s, self._pinged_s = False, now_s, 0.0
        for stream in list(self._streams.values()):
            stream.check(now_s)
        if not self._has_settings and now_s - self._made_s > limits.preface_s:
            self._fail(frames.SETTINGS_TIMEOUT, "no SETTINGS in time")
        elif (self._stuck_s and now_s - self._stuck_s > limits.body_s) or (
            self._pinged_s and now_s - self._pinged_s > limits.pong_s
        ):
            self.output.transport.abort()
        elif self._goes_s:
            if now_s - self._goes_s > _LAST_SECOND_S:
                self._take_no_more()
        elif 0 < self._age_s < now_s - self._made_s or 0 < limits.idle_s < now_s - self._busy_s:
            self.shutdown()
        elif not self._pinged_s and now_s - self._heard_s > limits.ping_s:
            self._pinged_s = now_s
            self.output.write(frames.PING, 0, 0, _SIGN_OF_LIFE)
