"""Messages with tensors between two processes: a Unix socket for small messages, shared memory for large messages.

    ┌──────────────┬───────────────────────────────────────┬─────────────────┐
    │ two lengths  │ msgpack: segment, sizes, freed, body  │ small buffers   │      on the socket
    └──────────────┴───────────────────────────────────────┴─────────────────┘
    ┌────────────────────────────────────────────────────────────────────────┐
    │ large buffers, each aligned to 64 bytes                                │      in a segment
    └────────────────────────────────────────────────────────────────────────┘

A segment is an anonymous file in memory (`memfd_create`), outside the limit of `/dev/shm`, that ends with its
processes. When the last array of a segment is gone, the receiver's next message says so, and the sender reuses it.
"""

import mmap
import os
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.backends.python_host.messages import (
    CallerLeft,
    CallReturned,
    CancelledAnswer,
    ManageReply,
    Message,
    TakenAnswer,
)
from qinfer.tensors import Bytes

Buffer = npt.NDArray[np.uint8]

INLINE_BYTES = 32 * 1024
"""Smaller messages travel on the socket: no page to map."""

KEPT_BYTES = 256 * 1024 * 1024
"""The bytes of unused segments that are kept."""

KEPT_COUNT = 4
"""The most unused segments that are kept."""

_LENGTHS = struct.Struct("<II")
_ALIGNMENT = 64
_INLINE_ALIGNMENT = 16
_PADDING = bytes(_INLINE_ALIGNMENT)
_SMALLEST_BYTES = 256 * 1024
_READ_BYTES = 64 * 1024
_DESCRIPTOR_BYTES = socket.CMSG_LEN(4)


class UnreadError(EOFError):
    """The other process ended before it read all messages."""


class Joined(NamedTuple):
    """A buffer in parts that are not empty."""

    parts: Sequence[Bytes | npt.NDArray[Any]]
    nbytes: int


class _Head(msgspec.Struct, array_like=True):
    """The head of a message; `sizes` are bytes of its buffers.

    Attributes:
        segment: The segment with the buffers; 0 = the socket.
        capacity: Bytes of a new segment, whose descriptor comes along.
    """

    body: Message
    sizes: tuple[int, ...] = ()
    segment: int = 0
    capacity: int = 0
    freed: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class _Segment:
    __slots__ = ("capacity", "number", "view")

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.view: Buffer = np.empty(0, np.uint8)

    def create(self) -> int:
        """Maps new shared memory and returns its descriptor, which the caller closes."""
        descriptor = -1
        try:
            descriptor = os.memfd_create("qinfer", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, self.capacity)
            self.view = np.frombuffer(mmap.mmap(descriptor, self.capacity), np.uint8)
        except OSError as error:
            if descriptor != -1:
                os.close(descriptor)
            raise MemoryError(f"no {self.capacity} bytes of shared memory: {error.strerror}") from None
        return descriptor


class _Reserved(NamedTuple):
    segment: _Segment
    descriptor: int | None


class Channel:
    """A Unix stream socket: any thread may send, one at a time may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._sending = threading.Lock()
        self._owning = threading.Lock()
        """Guards the three below; never held while the socket may block."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Head)
        self._free: list[_Segment] = []
        self._used: dict[int, _Segment] = {}
        self._dropped: list[int] = []
        self._count = 0
        self._reserved: _Reserved | None = None
        self._read = memoryview(bytearray(_READ_BYTES))
        self._begin = self._end = 0
        self._descriptors: deque[int] = deque()
        self._seen: dict[int, mmap.mmap] = {}
        self._leases: dict[int, weakref.ref[Buffer]] = {}
        self._freed: deque[int] = deque()

    def send(self, message: Message, buffers: Sequence[Bytes | Joined] = ()) -> None:
        """Sends a message, or raises `OSError`; at a `MemoryError` nothing was sent."""
        sizes = tuple([buffer.nbytes if isinstance(buffer, Joined) else len(buffer) for buffer in buffers])
        with self._sending:
            head = _Head(message, sizes)
            if self._freed:
                head.freed = tuple(self._freed.popleft() for _ in range(len(self._freed)))
            if sum(sizes) > INLINE_BYTES:
                self._send_segment(head, buffers)
                return
            head.dropped = self._take_dropped()
            parts: list[Any] = []
            for buffer, size in zip(buffers, sizes, strict=True):
                parts += _parts(buffer)
                parts.append(_PADDING[: -size % _INLINE_ALIGNMENT])
            encoded, data = self._encoder.encode(head), b"".join(parts)
            self._socket.sendall(b"".join((_LENGTHS.pack(len(encoded), len(data)), encoded, data)))

    def reserve(self, sizes: Sequence[int]) -> list[Buffer]:
        """Returns memory for the buffers of the next message, or raises `MemoryError`."""
        self._forgo()
        self._reserved = _Reserved(*self._segment(sum(map(_aligned, sizes))))
        return _split(self._reserved.segment.view, sizes, _ALIGNMENT)

    def receive(self) -> tuple[Message, list[Buffer]]:
        """Waits for a message and its buffers.

        Raises:
            UnreadError: The other process is gone, and has not read all messages.
            EOFError: The other process is gone, or sent no message.
        """
        try:
            head_length, inline_length = _LENGTHS.unpack(self._take(_LENGTHS.size))
        except ConnectionResetError:
            raise UnreadError from None
        except OSError:
            raise EOFError from None
        try:
            head = self._decoder.decode(self._take(head_length))
            whole = np.frombuffer(bytearray(self._take(inline_length)), np.uint8)
        except (OSError, msgspec.MsgspecError):  # of another program
            raise EOFError from None
        if head.capacity:
            self._map(head.segment, head.capacity)
        for number in head.dropped:
            self._seen.pop(number, None)
        if head.freed:
            self._reuse(head.freed)
        if not head.segment:
            return head.body, _split(whole, head.sizes, _INLINE_ALIGNMENT)
        whole = np.frombuffer(self._seen[head.segment], np.uint8)
        self._lend(head.segment, whole)
        return head.body, _split(whole, head.sizes, _ALIGNMENT)

    def has_message(self) -> bool:
        """Returns whether `receive` returns at once."""
        return self._begin < self._end or bool(self._poll.poll(0))

    def disown(self) -> None:
        """Leaves shared memory to the parent process."""
        self._leases.clear()

    def shutdown(self) -> None:
        """Ends the connection; arrived messages stay readable."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; discards arrived messages."""
        self.shutdown()
        self._socket.close()
        self._forgo()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _send_segment(self, head: _Head, buffers: Sequence[Bytes | Joined]) -> None:
        reserved = self._reserved
        lies_there = reserved is not None and _lies_in(buffers, head.sizes, reserved.segment.view)
        if lies_there and (taken := self._take_reserved()) is not None:
            segment, descriptor = taken
        else:
            segment, descriptor = self._segment(sum(map(_aligned, head.sizes)))
            _copy(buffers, _split(segment.view, head.sizes, _ALIGNMENT))
        try:
            with self._owning:
                self._used[segment.number] = segment
            head.segment = segment.number
            head.dropped = self._take_dropped()
            if descriptor is None:
                encoded = self._encoder.encode(head)
                self._socket.sendall(_LENGTHS.pack(len(encoded), 0) + encoded)
                return
            head.capacity = segment.capacity
            encoded = self._encoder.encode(head)
            data = _LENGTHS.pack(len(encoded), 0) + encoded
            sent = socket.send_fds(self._socket, [data], [descriptor])
            self._socket.sendall(data[sent:])
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _segment(self, needed: int) -> tuple[_Segment, int | None]:
        with self._owning:
            for index, segment in enumerate(self._free):
                if segment.capacity >= needed:
                    return self._free.pop(index), None
        self._count += 1
        segment = _Segment(self._count, max(1 << (needed - 1).bit_length(), _SMALLEST_BYTES))
        return segment, segment.create()

    def _take_reserved(self) -> _Reserved | None:
        with self._owning:
            reserved, self._reserved = self._reserved, None
            return reserved

    def _forgo(self) -> None:
        reserved = self._take_reserved()
        if reserved is None:
            return
        if reserved.descriptor is not None:  # the other process does not know it
            os.close(reserved.descriptor)
            return
        with self._owning:
            self._free.append(reserved.segment)
            self._free.sort(key=lambda segment: segment.capacity)

    def _reuse(self, numbers: Sequence[int]) -> None:
        """Keeps the largest segments, except huge segments."""
        with self._owning:
            self._free.extend(self._used.pop(number) for number in numbers)
            self._free.sort(key=lambda segment: segment.capacity)
            while (kept := sum(s.capacity for s in self._free)) > KEPT_BYTES or len(self._free) > KEPT_COUNT:
                self._dropped.append(self._free.pop(-1 if kept > KEPT_BYTES else 0).number)

    def _lend(self, number: int, whole: Buffer) -> None:
        """Frees the segment once no array refers to `whole`, to which all of numpy's views refer.

        A huge segment's memory is freed at once.
        """
        memory = self._seen[number]

        def ended(_: "weakref.ref[Buffer]") -> None:
            if len(memory) > KEPT_BYTES:
                memory.madvise(mmap.MADV_REMOVE)
            del self._leases[number]
            self._freed.append(number)

        self._leases[number] = weakref.ref(whole, ended)

    def _take_dropped(self) -> tuple[int, ...]:
        with self._owning:
            dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _map(self, number: int, capacity: int) -> None:
        if not self._descriptors:
            raise EOFError
        descriptor = self._descriptors.popleft()
        try:
            self._seen[number] = mmap.mmap(descriptor, capacity)
        finally:
            os.close(descriptor)

    def _take(self, length: int) -> memoryview:
        """Returns bytes that the next call may overwrite."""
        if self._end - self._begin < length:
            has = self._end - self._begin
            target = self._read if length <= _READ_BYTES else memoryview(bytearray(length))
            target[:has] = self._read[self._begin : self._end]
            self._begin, self._end = 0, has
            while self._end < length:
                self._end += self._read_into(target[self._end :])
            if target is not self._read:
                self._begin = self._end = 0
                return target
        self._begin += length
        return self._read[self._begin - length : self._begin]

    def _read_into(self, target: memoryview) -> int:
        count, ancillary, _, _ = self._socket.recvmsg_into([target], _DESCRIPTOR_BYTES, socket.MSG_CMSG_CLOEXEC)
        if ancillary:
            self._descriptors.extend(np.frombuffer(ancillary[0][2], np.int32).tolist())
        if not count:
            raise EOFError
        return count


def _lies_in(buffers: Sequence[Bytes | Joined], sizes: Sequence[int], memory: Buffer) -> bool:
    places = _split(memory, sizes, _ALIGNMENT)
    return all(
        not isinstance(buffer, Joined)
        and (not size or _address(np.frombuffer(buffer, np.uint8)) == _address(place))
        and place.size == size
        for buffer, size, place in zip(buffers, sizes, places, strict=True)
    )


def _address(array: Buffer) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _copy(buffers: Sequence[Bytes | Joined], places: Sequence[Buffer]) -> None:
    for buffer, place in zip(buffers, places, strict=True):
        begin = 0
        for part in _parts(buffer) if place.size else ():
            copied = np.frombuffer(part, np.uint8)
            place[begin : begin + copied.size] = copied
            begin += copied.size


def _parts(buffer: Bytes | Joined) -> Sequence[Bytes | npt.NDArray[Any]]:
    return buffer.parts if isinstance(buffer, Joined) else (buffer,)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _split(whole: Buffer, sizes: Sequence[int], alignment: int) -> list[Buffer]:
    views, position = [], 0
    for size in sizes:
        views.append(whole[position : position + size])
        position += -(-size // alignment) * alignment
    return views


def raw(array: npt.NDArray[Any]) -> Bytes:
    """Returns an array's bytes, copied unless contiguous."""
    if not array.size:
        return b""
    return (array if array.flags.c_contiguous else np.ascontiguousarray(array)).data.cast("B")


Received = tuple[Message, list[Buffer]]


class ChannelInbox:
    """One of the waiting threads reads for all threads."""

    def __init__(self, channel: Channel, unwanted: Callable[[CallerLeft], None]) -> None:
        self._channel = channel
        self._unwanted = unwanted
        self._changed = threading.Condition()
        self._is_read = False
        self._commands: deque[Received] = deque()
        self._answers: dict[int, Received | None] = {}
        self._count = 0

    def expect(self) -> int:
        """Returns a new number for a question."""
        with self._changed:
            self._count += 1
            self._answers[self._count] = None
            return self._count

    def command(self) -> Received:
        """Waits for the next command."""
        with self._changed:
            while not self._commands:
                self._step()
            return self._commands.popleft()

    def wait_answer(self, number: int) -> Received:
        """Waits for the answer to a question."""
        with self._changed:
            while (received := self._answers[number]) is None:
                self._step()
            del self._answers[number]
            return received

    def poll(self) -> None:
        """Reads messages, unless another thread does."""
        with self._changed:
            while not self._is_read and self._channel.has_message():
                self._step()

    def drop_question(self, number: int) -> None:
        """Drops a question; takes no lock, because the garbage collector may call it."""
        self._answers.pop(number, None)

    def _step(self) -> None:
        if self._is_read:
            self._changed.wait()
            return
        self._is_read = True
        self._changed.release()
        received = None
        try:
            received = self._channel.receive()
        finally:
            self._changed.acquire()
            self._is_read = False
            if received is not None:
                self._sort(received)
            self._changed.notify_all()

    def _sort(self, received: Received) -> None:
        message, _ = received
        if isinstance(message, CallerLeft):
            self._unwanted(message)
        elif not isinstance(message, CallReturned | CancelledAnswer | TakenAnswer | ManageReply):
            self._commands.append(received)
        elif message.number in self._answers:
            self._answers[message.number] = received
