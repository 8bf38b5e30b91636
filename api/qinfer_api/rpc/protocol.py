"""gRPC over HTTP/2 (gRPC's doc/PROTOCOL-HTTP2.md): calls, messages, deadlines and statuses.

A call is admitted or refused by its head. A unary method gets the whole message and answers with `GrpcCall.finish` or
`GrpcCall.fail`; a streaming method is a coroutine.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from qinfer.core.messages import Failure
from qinfer.errors import Overloaded, PayloadTooLarge, QinferError
from qinfer.submission.pending import Memory
from qinfer.tensors import Bytes
from qinfer_api.http.infer import (
    CACHE_HEADER,
    ID_HEADER,
    TARGET_HEADER,
    Encoding,
    compress,
    decompress,
    header_value,
    room_of,
)
from qinfer_api.receiving import AGAIN_S, SMALL_BYTES, SPENT, TOO_SLOW, Reservation
from qinfer_api.rpc import frames, hpack
from qinfer_api.rpc.headers import (
    HEAD,
    Abort,
    CallHead,
    status_fields,
    trailers_only,
)
from qinfer_api.rpc.streams import GrpcStream
from qinfer_api.status import grpc_status, retry_after_s

if TYPE_CHECKING:
    from qinfer_api.rpc.heads import Server

logger = logging.getLogger(__name__)

LARGE_BYTES = 256 * 1024

LANDED_BYTES = 64 * 1024
"""Messages of this size get memory of their own, once `LANDS_FROM_BYTES` have come."""

LANDS_FROM_BYTES = 8 * 1024

MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest message that protobuf reads."""

MAX_UNSENT_BYTES = 256 * 1024
"""A stream's method waits at this many unsent bytes."""

_PREFIX_BYTES = 5  # compression flag and length
_OK = hpack.field(b"grpc-status", b"0")
_HEAD_WITH_ID = HEAD + hpack.named(ID_HEADER)

_TOO_LATE = "the message did not come in time"
_MIN_BYTES_PER_S = 64 * 1024


class _Message(NamedTuple):
    content: Bytes
    is_compressed: bool
    reservation: Reservation | None


class GrpcCall(GrpcStream, eq=False, kw_only=True):
    """One call, from its head to its status.

    `on_cancel` is called once: the client cancels, the deadline passes, or the connection is lost. `until_s` is the
    time on the event loop's clock at which the client gives up.
    """

    server: "Server"
    head: CallHead
    context: Any = None
    on_cancel: Callable[[], None] | None = None
    request_id: str = ""
    cache: str = ""
    target: str = ""
    until_s: float = math.inf
    _refusal: Exception | None = None
    _prefix: bytes = b""
    _body: bytearray | None = None
    _size: int = 0
    _is_compressed: bool = False
    _is_reading: bool = True  # the client owes a message
    _messages: deque[_Message] = msgspec.field(default_factory=deque)
    _reservation: Reservation | None = None
    _answer_memory: Memory | None = None
    # Of the message that was decompressed last.
    _opened_memory: Reservation | None = None
    _reserved_s: float = 0.0
    # Bytes that came before memory was granted for them.
    _unread: bytearray | None = None
    _has_begun: bool = False
    _is_headed: bool = False
    _change: asyncio.Event | None = None
    _task: "asyncio.Task[None] | None" = None
    _timer: asyncio.TimerHandle | None = None
    _taken_by_s: float = 0.0

    # -- the client's side ---------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """Admits or refuses the call."""
        head = self.head
        if head.method is None:
            self.send_headers(head.refusal, is_last=True)
            return
        if head.timeout_s < math.inf:
            self.until_s = asyncio.get_running_loop().time() + head.timeout_s
        try:
            self.context = head.method.admit(head, self.connection.peer)
            if head.method.takes_stream:
                self._start_method(b"")
            if self.is_ended:
                self._on_client_end()
        except Exception as error:  # noqa: BLE001 - the boundary of a call: `fail` reports it
            if head.method.takes_stream and not self.is_ended:
                # A client that is about to write, such as grpc.aio, would miss the status.
                self._refusal = error
            else:
                self.fail(error)

    def expects(self, begin: Bytes) -> int:
        """Returns the bytes of the only message; one of several frames needs memory, as in `_read_prefix`."""
        method, size = self.head.method, int.from_bytes(begin[1:_PREFIX_BYTES])
        if method is None or method.takes_stream or len(begin) < _PREFIX_BYTES or begin[0]:
            return -1
        if size > min(method.max_message_bytes, SMALL_BYTES):
            return -1
        if size + _PREFIX_BYTES > len(begin) and not self.server.receiving.has_room(self._owner, size):
            return -1
        return size + _PREFIX_BYTES

    def body_received(self, parts: Sequence[Bytes]) -> None:
        """Starts the method with the only message."""
        begin = parts[0][_PREFIX_BYTES:]
        self.is_ended, self._is_reading = True, False
        self._start_method(b"".join((begin, *parts[1:])))
        if self._task is not None and (size := self.body_bytes - _PREFIX_BYTES) > len(begin):
            self._opened_memory = self.server.receiving.reserve(self._owner, size, self._let_in)

    def data_received(self, data: Bytes) -> None:
        """Reads bytes of messages, which the connection may overwrite."""
        landing, size = self.landing, len(data)
        if landing is not None and size <= (left := len(landing.rest)) and (size == left) is self.is_ended:
            self.moved_s = 0.0
            landing.add(data)
            if self.is_ended:
                self._landed(landing.body)
            return
        if self._refusal is not None:
            self.fail(self._refusal)
            return
        try:
            size = len(data) - _PREFIX_BYTES
            if self._body is None and not self._prefix and size >= 0 and int.from_bytes(data[1:5]) == size:
                self._check_size(size)
                if self.is_ended and data[0] == 0 and not (self._has_begun or self._messages):
                    self._is_reading = False
                    self._start_method(bytes(data[_PREFIX_BYTES:]))
                    return
                self._arrived(_Message(bytes(data[_PREFIX_BYTES:]), data[0] != 0, None))
            elif data:
                self._collect(data)
            if self.is_ended and not self.is_closed:
                self._on_client_end()
        except Abort as abort:
            self.fail(abort)

    def _landed(self, message: Bytes) -> None:
        self._opened_memory, self._reservation, self._body = self._reservation, None, None
        if self._opened_memory is not None:
            self._opened_memory.unwatch()
        self._is_reading = False
        self._start_method(message)
        if self._task is None:
            self.taken()

    def _collect(self, data: Bytes) -> None:
        self.moved_s = 0.0
        if self._unread is not None:
            self._unread += data
            return
        view = memoryview(data)
        while (view or self._body is not None) and not self.is_closed:
            if self._body is None:
                view = self._read_prefix(view)
            body = self._body
            if body is None:
                return
            came = len(body) if self.landing is None else self._arrived_bytes()
            missing = self._size - came
            piece, view = view[:missing], view[missing:]
            lands = self.landing is None and self._size >= LANDED_BYTES
            if lands and came < LANDS_FROM_BYTES <= came + len(piece) < self._size:
                self._land(body)
            if self.landing is not None:
                self.landing.add(piece)
            else:
                body += piece
            if len(piece) < missing:
                return
            content: Bytes = body if len(body) > LARGE_BYTES else bytes(body)
            if self.landing is not None:
                content = self.landing.body
            message = _Message(content, self._is_compressed, self._reservation)
            self._body = self._reservation = None
            self._arrived(message)

    def _read_prefix(self, view: memoryview) -> memoryview:
        missing = _PREFIX_BYTES - len(self._prefix)
        self._prefix += view[:missing]
        view = view[missing:]
        if len(self._prefix) < _PREFIX_BYTES:
            return view
        size = int.from_bytes(self._prefix[1:])
        self._check_size(size)
        if self._messages:
            self._refuse_second()
        if size:
            room = self._room(size) if self._prefix[0] else size
            self._reservation = self.server.receiving.reserve(self._owner, room, self._let_in)
            if self._reservation is None:
                raise Abort("RESOURCE_EXHAUSTED", SPENT, AGAIN_S)
            self._reservation.watch(self._arrived_bytes, self._give_up)
            if not self._reservation.is_granted:
                self._unread = bytearray(view)
                return view
        self._make_room(len(view))
        return view

    def _let_in(self) -> None:
        data, self._unread = self._unread or b"", None
        self._make_room(len(data))
        try:
            self._collect(data)
        except Abort as abort:
            self.fail(abort)

    def _make_room(self, arrived: int) -> None:
        self._size = int.from_bytes(self._prefix[1:])
        self._is_compressed = self._prefix[0] != 0
        self._prefix, self._body = b"", bytearray()
        self._reserved_s = asyncio.get_running_loop().time()
        self.grant(self._size - arrived - self.receive_window)

    def _land(self, body: bytearray) -> None:
        self.connection.read_into_buffers()
        method = self.head.method
        if method is not None and method.land is not None and not self._is_compressed and not self._messages:
            self.landing = method.land(self, self._size)
            if self.landing is not None and body:
                self.landing.add(body)
                body.clear()

    def _arrived_bytes(self) -> int:
        if self._body is None:
            return self._size
        return len(self._body) if self.landing is None else self._size - len(self.landing.rest)

    def _give_up(self) -> None:
        self.fail(Abort("CANCELLED", TOO_SLOW))

    @property
    def _owner(self) -> Hashable:
        return getattr(self.context, "tenant", "") or self.connection

    def _room(self, size: int) -> int:
        assert self.head.method is not None
        return room_of(size, self.head.encoding, self.head.method.max_message_bytes)

    def _check_size(self, size: int) -> None:
        assert self.head.method is not None
        most = self.head.method.max_message_bytes
        if size > most:
            raise Abort("RESOURCE_EXHAUSTED", f"Received message larger than max ({size} vs. {most})")

    def _refuse_second(self) -> None:
        assert self.head.method is not None
        if not self.head.method.takes_stream:
            raise Abort("INTERNAL", "the call takes one message, and there is a second one")

    def _arrived(self, message: _Message) -> None:
        assert self.head.method is not None
        self._messages.append(message)
        if message.reservation is not None and (self.is_ended or self.head.method.takes_stream):
            message.reservation.unwatch()
        if len(self._messages) > 1:
            self._refuse_second()
        if message.is_compressed and self.head.encoding is None:
            raise Abort("INTERNAL", "a message is compressed, but there is no grpc-encoding")
        if self._change is not None:
            self._change.set()

    def _on_client_end(self) -> None:
        if self._body is not None or self._prefix:
            raise Abort("INTERNAL", "the last message is cut off")
        self._is_reading = False
        if self._change is not None:
            self._change.set()
        elif self.head.method is not None and self.head.method.takes_stream:
            return
        elif not self._messages:
            raise Abort("INTERNAL", "the call takes one message, and there is none")
        else:
            message = self._messages.popleft()
            if message.is_compressed:
                if message.reservation is not None:
                    message.reservation.unwatch()
                self.run(self._begin_decompressed(message))
            else:
                self._opened_memory = message.reservation
                self._start_method(message.content)
                if self._task is None:
                    self.taken()

    async def _begin_decompressed(self, message: _Message) -> None:
        self._start_method(await self._opened(message))

    async def _opened(self, message: _Message) -> Bytes:
        assert self.head.method is not None
        self.taken()
        self._opened_memory = message.reservation
        if not message.is_compressed or self.head.encoding is None:
            return message.content
        try:
            return await self._decompressed(message.content, self.head.encoding, self.head.method.max_message_bytes)
        except BaseException:
            self.taken()
            raise

    async def _decompressed(self, content: Bytes, encoding: Encoding, most: int) -> bytes:
        try:
            if self._opened_memory is None:
                room, within_s = self._room(len(content)), self.connection.service.limits.body_s
                self._opened_memory = await self.server.receiving.granted(self._owner, room, within_s)
            plain = await asyncio.to_thread(decompress, content, encoding, most)
        except PayloadTooLarge:
            text = f"Received message larger than max (after decompression; max is {most})"
            raise Abort("RESOURCE_EXHAUSTED", text) from None
        except Overloaded as error:
            raise Abort("RESOURCE_EXHAUSTED", error.message, retry_after_s(error.code, error)) from None
        if self._opened_memory is not None:
            self._opened_memory.shrink(max(len(plain), 1))
        return plain

    def taken(self) -> None:
        """Releases the decoded message's memory."""
        memory, self._opened_memory = self._opened_memory, None
        if memory is not None:
            memory.release()

    def _start_method(self, message: Bytes) -> None:
        assert self.head.method is not None
        if self.is_closed:
            return
        self._has_begun = True
        try:
            self.head.method.start(self, message)
        except Exception as error:  # noqa: BLE001 - the boundary of a call: `fail` reports it
            self.fail(error)

    def withdraw(self) -> None:
        """Gives up waiting for memory, for a lost connection."""
        if self._reservation is not None and not self._reservation.is_granted:
            self._reservation.release()

    def on_reset(self) -> None:
        """Cancels the work of the call."""
        on_cancel, self.on_cancel = self.on_cancel, None
        if self._task is not None:
            self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._forget_messages()
        if on_cancel is not None:
            on_cancel()

    def keep(self, memory: Memory) -> None:
        """Holds memory until the answer is gone."""
        if self.is_closed:
            memory.release()
        else:
            self._answer_memory = memory

    def closed(self) -> None:
        """Releases the call's resources."""
        if self._answer_memory is not None:
            self._answer_memory.release()
        if self._timer is not None:
            self._timer.cancel()
        if self._reservation is not None or self._opened_memory is not None or self._messages or self.landing:
            self._forget_messages()
        self._body = None
        self.server.closed(self.head)

    def _forget_messages(self) -> None:
        if self.landing is not None:
            self.landing.leave()
            self.landing = None
        self.taken()
        reservations = [self._reservation, *(message.reservation for message in self._messages)]
        self._messages.clear()
        self._body = self._reservation = self._unread = None
        for reservation in reservations:
            if reservation is not None:
                reservation.release()

    def check(self, now_s: float) -> None:
        """Ends an overdue call."""
        limits, one = self.connection.service.limits, self._reservation
        is_awaited = self._body is not None or bool(self._prefix) or (self._is_reading and self._change is None)
        if self._refusal is not None:
            self.fail(self._refusal)
        elif not is_awaited:
            self.moved_s = 0.0
            if self.queue and self.head.method is not None and not self.head.method.takes_stream:
                self._check_taken(now_s)
        elif now_s > self.until_s:
            self.fail(Abort("DEADLINE_EXCEEDED", "Deadline Exceeded"))
        elif not self.moved_s:
            self.moved_s = now_s
        elif now_s - self.moved_s > limits.body_s:
            is_waiting = one is not None and not one.is_granted
            self.fail(Abort("RESOURCE_EXHAUSTED", SPENT, AGAIN_S) if is_waiting else Abort("CANCELLED", _TOO_LATE))
        elif self._body is not None and now_s - self._reserved_s > limits.body_s + self._size / _MIN_BYTES_PER_S:
            self.fail(Abort("CANCELLED", _TOO_LATE))

    def _check_taken(self, now_s: float) -> None:
        if not self._taken_by_s:
            self._taken_by_s = now_s + self.connection.service.limits.body_s + self.unsent_bytes / _MIN_BYTES_PER_S
        elif now_s > self._taken_by_s:
            self.on_reset()
            self.reset(frames.CANCEL)

    # -- the method's side ---------------------------------------------------------------------------------------------

    def time_remaining(self) -> float:
        """Returns the seconds until the client gives up; may be infinite."""
        return self.until_s - asyncio.get_running_loop().time() if self.until_s < math.inf else math.inf

    def run(self, coroutine: Coroutine[Any, Any, None], *, has_deadline: bool = False) -> None:
        """Runs a coroutine; its exception becomes the status."""
        self._task = asyncio.get_running_loop().create_task(coroutine)
        self._task.add_done_callback(self._ran)
        if has_deadline and self.until_s < math.inf and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self.until_s, self._expire)

    def _ran(self, task: "asyncio.Task[None]") -> None:
        if self._task is task:
            self._task = None
            self.taken()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _expire(self) -> None:
        self._timer = None
        self.fail(Abort("DEADLINE_EXCEEDED", "Deadline Exceeded"))

    async def read(self) -> Bytes | None:
        """Returns the next message of a stream; `None` at its end."""
        self.taken()
        if self._change is None:
            self._change = asyncio.Event()
        while not self._messages:
            if self.is_ended:
                return None
            self.grant(self.connection.service.limits.window_bytes - self.receive_window)
            self._change.clear()
            await self._change.wait()
        return await self._opened(self._messages.popleft())

    def packed(self, parts: Sequence[Bytes]) -> tuple[Sequence[Bytes], bool]:
        """Compresses a message if that makes it smaller; tells whether."""
        packing = self.head.packing
        if packing is None:
            return parts, False
        content = compress(b"".join(parts), packing.encoding, packing.level)
        return ((content,), True) if len(content) < sum(map(len, parts)) else (parts, False)

    async def write(self, parts: Sequence[Bytes], *, is_compressed: bool = False) -> None:
        """Writes a message; waits while the client does not read."""
        if not self._is_headed:
            self._is_headed = True
            self.send_headers(self._initial())
        self.send((_prefix(sum(map(len, parts)), is_compressed), *parts))
        while self.unsent_bytes > MAX_UNSENT_BYTES and not self.is_closed:
            if self._change is None:
                self._change = asyncio.Event()
            self._change.clear()
            await self._change.wait()

    def drained(self) -> None:
        """Wakes a stream that waits to write."""
        if self._change is not None:
            self._change.set()

    def finish(self, parts: Sequence[Bytes], *, is_compressed: bool = False) -> None:
        """Answers a unary call."""
        size = sum(map(len, parts))
        if self._answer_memory is not None:
            self._answer_memory.become(size)
        self.on_cancel = None
        if self._timer is not None:
            self._release()
        try:
            self.reply(self._initial(), (_prefix(size, is_compressed), *parts), _PREFIX_BYTES + size, _OK)
        except Abort as abort:
            self.fail(abort)

    def _initial(self) -> bytes:
        name = header_value(self.request_id or self.server.new_id())
        block = b"".join((_HEAD_WITH_ID, hpack.length(len(name)), name))
        if self.head.packing is not None:
            block += hpack.field(b"grpc-encoding", self.head.packing.encoding.encode())
        if self.target:
            block += hpack.field(TARGET_HEADER, header_value(self.target))
        return block + hpack.field(CACHE_HEADER, self.cache.encode()) if self.cache else block

    def finish_stream(self) -> None:
        """Ends a stream with status OK."""
        self._release()
        if not self._is_headed:
            self._is_headed = True
            self.send_headers(self._initial())
        self.send_trailers(_OK)

    def fail(self, error: BaseException) -> None:
        """Ends the call with the status of an error."""
        if self.is_closed:
            return
        abort = self._status(error)
        if self._has_begun or self._task is not None:
            self.on_reset()
        self._release()
        if self._is_headed:
            self.send_trailers(status_fields(abort))
        else:
            self.send_headers(trailers_only(abort, initial=self._initial()), is_last=True)

    def _status(self, error: BaseException) -> Abort:
        if isinstance(error, Abort):
            return error
        if not isinstance(error, QinferError):
            logger.error("call failed", exc_info=error)
        return self.status_of(Failure.from_error(error), error)

    def status_of(self, failure: Failure, error: BaseException | None = None) -> Abort:
        """Returns a failure's status; DEADLINE_EXCEEDED is for the client's own deadline."""
        if failure.code == "deadline_exceeded" and self.time_remaining() <= 0:
            return Abort("DEADLINE_EXCEEDED", failure.message)
        return Abort(grpc_status(failure.code), failure.message, retry_after_s(failure.code, error))

    def _release(self) -> None:
        self.on_cancel = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _prefix(size: int, is_compressed: bool) -> bytes:  # noqa: FBT001 - the first byte
    if size > MAX_MESSAGE_BYTES:
        raise Abort("RESOURCE_EXHAUSTED", f"the reply has {size} bytes; a message may have {MAX_MESSAGE_BYTES}")
    return (is_compressed << 32 | size).to_bytes(_PREFIX_BYTES)
