"""AMQP 0-9-1 (RabbitMQ): kombu opens the connection, py-amqp the channel; frames of messages are moved here.

py-amqp's system calls, three a read frame and one a written message, are most of a message's cost. Here arrived data is
split at once, and a batch is one write: of the methods that occur once per message, deliver, publish and acknowledge.
py-amqp gets all other frames.
"""

import logging
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from struct import Struct
from typing import Any, NamedTuple

from amqp import spec
from amqp.exceptions import AMQPError, ChannelError, NotFound
from amqp.serialization import loads
from kombu import Connection

from qinfer_workers.bridge.config import SourceOptions
from qinfer_workers.bridge.messages import MessageRefused, Outgoing, Receipt, SettledMessages, SourceMessage


class Due(NamedTuple):
    """The messages to acknowledge: all messages up to a tag (0 = none), and single messages."""

    up_to: int = 0
    tags: Sequence[int] = ()


class AckLine:
    """The acknowledgements of one AMQP channel, which numbers its messages from 1.

    After `patience_s`, messages done out of order are acknowledged singly, so that one slow message does not stop
    the source.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._done_to = 0  # all tags up to it are done
        self._beyond: set[int] = set()  # done, and not acknowledged
        self._single: set[int] = set()  # acknowledged singly, beyond `_done_to`
        self._waits_since_s: float | None = None

    def due(self, done: Iterable[int], now_s: float) -> Due:
        """Adds finished tags; returns due acknowledgements."""
        beyond, single = self._beyond, self._single
        beyond.update(done)
        up_to, following = 0, self._done_to + 1
        while True:
            if following in beyond:
                beyond.remove(following)
                up_to = following  # RabbitMQ refuses repeated tags
            elif following in single:
                single.remove(following)
            else:
                break
            following += 1
        self._done_to = following - 1
        if up_to or not beyond:
            self._waits_since_s = now_s if beyond else None
        elif self._waits_since_s is None:
            self._waits_since_s = now_s
        if self._waits_since_s is None or now_s - self._waits_since_s < self._patience_s:
            return Due(up_to)
        singly = sorted(beyond)
        single.update(singly)
        beyond.clear()
        self._waits_since_s = None
        return Due(up_to, singly)

    @property
    def waits(self) -> bool:
        """Whether finished messages lack an acknowledgement."""
        return bool(self._beyond)

    def left(self) -> list[int]:
        """Returns finished, unacknowledged tags."""
        return sorted(self._beyond)


Frame = tuple[int, int, bytes]

_METHOD, _HEADER, _BODY = 1, 2, 3
_END = 0xCE
_HEAD = Struct(">BHI")
_DELIVER = b"\x00\x3c\x00\x3c"
_RETURN = b"\x00\x3c\x00\x32"
_ACK = b"\x00\x3c\x00\x50"
_NACK = b"\x00\x3c\x00\x78"
_PUBLISH = b"\x00\x3c\x00\x28\x00\x00"
_TAG = Struct(">Q")
_ACK_FRAME = Struct(">BHI4sQBB")
_CONTENT = Struct(">HHQH")
_PERSISTENT = b"\x02"
_MANDATORY = b"\x01"
_OVERHEAD_BYTES = 8
_MAX_SHORT_BYTES = 255
_WRITTEN = "surrogatepass"
"""Undecodable bytes survive, as in py-amqp."""
_UNREADABLE = (IndexError, struct.error, ValueError, OverflowError, OSError, RecursionError, AMQPError)


class BrokenFrames(Exception):
    """The received bytes are no AMQP."""


class ReturnedMessage(NamedTuple):
    """A message that no queue took."""

    exchange: bytes
    routing_key: bytes
    message_id: bytes


def _ignore(*_: object) -> None:
    """Does nothing."""


class FrameReader:
    """Splits a connection's data into messages, confirms, and frames for py-amqp.

    `confirmed` gets a tag, whether it covers all before, and whether the broker took them.
    """

    def __init__(
        self,
        channel: int,
        epoch: int,
        other: Callable[[Frame], object],
        confirmed: Callable[[int, bool, bool], None] = _ignore,
        returned: Callable[[ReturnedMessage], None] = _ignore,
    ) -> None:
        self._channel = channel
        self._epoch = epoch
        self._other = other
        self._confirmed = confirmed
        self._returned = returned
        self._rest = b""
        self._method = b""  # the method of the message whose content follows
        self._header = b""
        self._left_bytes = 0
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[SourceMessage]:
        """Adds received data; returns complete messages."""
        if self._rest:
            data = self._rest + data
        messages: list[SourceMessage] = []
        position, end = 0, len(data)
        while end - position > 7:
            kind, channel, size = _HEAD.unpack_from(data, position)
            stop = position + 7 + size
            if stop >= end:
                break
            if data[stop] != _END:
                raise BrokenFrames("the broker sent an invalid AMQP frame")
            payload = data[position + 7 : stop]
            position = stop + 1
            if channel != self._channel or not self._read_frame(kind, payload, messages):
                self._other((kind, channel, payload))
        self._rest = data[position:]
        return messages

    def _read_frame(self, kind: int, payload: bytes, messages: list[SourceMessage]) -> bool:
        if kind == _METHOD:
            method = payload[:4]
            if method in (_DELIVER, _RETURN):
                self._method = payload
            elif method in (_ACK, _NACK):
                self._confirmed(_TAG.unpack_from(payload, 4)[0], bool(payload[12] & 1), method == _ACK)
            else:
                return False
            return True
        if not self._method:
            return False
        if kind == _HEADER:
            self._header = payload
            self._left_bytes = _CONTENT.unpack_from(payload)[2]
        elif kind == _BODY:
            self._parts.append(payload)
            self._left_bytes -= len(payload)
        else:
            return False
        if self._left_bytes <= 0:
            self._complete(messages)
        return True

    def _complete(self, messages: list[SourceMessage]) -> None:
        method, body = self._method, b"".join(self._parts)
        self._method, self._parts = b"", []
        if method.startswith(_DELIVER):
            tag = _TAG.unpack_from(method, 5 + method[4])[0]
            messages.append(message_of(Receipt(self._epoch, tag), self._header, body))
            return
        _, position = _short_at(method, 6)
        exchange, position = _short_at(method, position)
        routing_key, _ = _short_at(method, position)
        message_id = message_of(Receipt(self._epoch, 0), self._header, b"").message_id
        self._returned(ReturnedMessage(exchange, routing_key, message_id))


def message_of(receipt: Receipt, header: bytes, body: bytes) -> SourceMessage:
    """Makes a message; notes unreadable properties in `broken`."""
    message = SourceMessage(receipt=receipt, body=body)
    try:
        _read_properties(message, header)
    except _UNREADABLE:
        message.broken = "the message's AMQP properties or headers can't be read; send headers of plain types"
    return message


def _read_properties(message: SourceMessage, header: bytes) -> None:
    flags = _CONTENT.unpack_from(header)[3]
    position = _CONTENT.size
    if flags & 0x8000:
        word, position = _short_at(header, position)
        message.content_type = _decode_word(word)
    if flags & 0x4000:
        word, position = _short_at(header, position)
        message.content_encoding = _decode_word(word)
    if flags & 0x2000:
        (message.headers,), position = loads("F", header, position)
    position += ((flags & 0x1000) >> 12) + ((flags & 0x0800) >> 11)  # delivery mode, priority
    if flags & 0x0400:
        message.correlation_id, position = _short_at(header, position)
    if flags & 0x0200:
        message.reply_to, position = _short_at(header, position)
    if flags & 0x0100:  # expiration
        _, position = _short_at(header, position)
    if flags & 0x0080:
        message.message_id, position = _short_at(header, position)


def _short_at(data: bytes, position: int) -> tuple[bytes, int]:
    start = position + 1
    stop = start + data[position]
    if stop > len(data):
        raise IndexError
    return data[start:stop], stop


@lru_cache(maxsize=256)
def _decode_word(word: bytes) -> str:
    return word.decode("utf-8", "replace")


def ack_frames(channel: int, due: Due) -> bytes:
    """Returns the frames that acknowledge messages."""
    singly = [_ack_frame(channel, tag, is_multiple=False) for tag in due.tags]
    return b"".join([_ack_frame(channel, due.up_to, is_multiple=True), *singly] if due.up_to else singly)


def _ack_frame(channel: int, tag: int, *, is_multiple: bool) -> bytes:
    return _ACK_FRAME.pack(_METHOD, channel, 13, _ACK, tag, is_multiple, _END)


def publish_frames(channel: int, message: Outgoing, max_frame_bytes: int) -> bytes:
    """Returns a message's frames: persistent, and returned if no queue takes it.

    Ids and keys have at most 255 bytes. `ValueError`: properties beyond a frame would end the connection.
    """
    body = message.body
    method = _publish_method(channel, message.exchange, message.routing_key)
    header = _content_header(message, len(body))
    head = _HEAD.pack(_HEADER, channel, len(header))
    longest = max_frame_bytes - _OVERHEAD_BYTES
    if len(header) > longest:
        raise ValueError(f"a message's headers take {len(header)} bytes, more than the {longest} of one frame")
    if len(body) <= longest:
        if not body:
            return b"".join((method, head, header, b"\xce"))
        return b"".join((method, head, header, b"\xce", _HEAD.pack(_BODY, channel, len(body)), body, b"\xce"))
    parts = [method, head, header, b"\xce"]
    for start in range(0, len(body), longest):
        part = body[start : start + longest]
        parts += (_HEAD.pack(_BODY, channel, len(part)), part, b"\xce")
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _publish_method(channel: int, exchange: bytes, routing_key: bytes) -> bytes:
    payload = b"".join((_PUBLISH, _short(exchange), _short(routing_key), _MANDATORY))
    return _HEAD.pack(_METHOD, channel, len(payload)) + payload + b"\xce"


def _content_header(message: Outgoing, size: int) -> bytes:
    flags = 0x8000 | 0x2000 | 0x1000
    content_type = message.content_type.encode("utf-8", _WRITTEN)[:_MAX_SHORT_BYTES]
    parts = [_short(content_type), _table(message.headers), _PERSISTENT]
    for flag, value in ((0x0400, message.correlation_id), (0x0200, message.reply_to), (0x0080, message.message_id)):
        if value:
            flags |= flag
            parts.append(_short(value))
    return b"".join((_CONTENT.pack(60, 0, size, flags), *parts))


def _table(headers: Mapping[str, str]) -> bytes:
    parts: list[bytes] = []
    for name, value in headers.items():
        text = value.encode("utf-8", _WRITTEN)
        parts += (_encode_name(name), len(text).to_bytes(4, "big"), text)
    table = b"".join(parts)
    return len(table).to_bytes(4, "big") + table


@lru_cache(maxsize=256)
def _encode_name(name: str) -> bytes:
    return _short(name.encode("utf-8", _WRITTEN)) + b"S"


def _short(word: bytes) -> bytes:
    return len(word).to_bytes(1, "big") + word


class Waker:
    """Waits for another owner's socket, or for `wake`."""

    def __init__(self, watched: socket.socket) -> None:
        self._watched = watched
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(watched, selectors.EVENT_READ)
        self._selector.register(self._ours, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> bool:
        """Waits; returns whether the socket has data."""
        pending = getattr(self._watched, "pending", None)
        if pending is not None and pending():  # in TLS
            return True
        is_ready = False
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._ours:
                with suppress(BlockingIOError):
                    self._ours.recv(4096)
            else:
                is_ready = True
        return is_ready

    def wake(self) -> None:
        """Ends the present `wait`, or else the next; other threads call it."""
        with suppress(OSError):  # full: it wakes up anyway; closed: no thread waits
            self._theirs.send(b"\0")

    def close(self) -> None:
        """Closes everything except the watched socket."""
        self._selector.close()
        self._ours.close()
        self._theirs.close()


logger = logging.getLogger(__name__)

CONNECT_S = 5.0
HEARTBEAT_S = 10.0

_ACK_PATIENCE_S = 0.2
_BEAT_EVERY_S = 1.0
_CLOSE_S = 2.0
_RECEIVE_BYTES = 256 * 1024
_WRITE_BYTES = 256 * 1024


def missing_queues(client: Connection, queues: Sequence[str], exchange: str) -> list[str]:
    """Returns the missing queues; changes nothing."""
    channel: Any = client.channel()
    if exchange:
        channel.exchange_declare(exchange, "", passive=True)
    return [queue for queue in queues if not _is_there(channel, queue)]


def _is_there(channel: Any, queue: str) -> bool:
    try:
        channel.queue_declare(queue, passive=True)
    except NotFound:
        return False
    return True


class _Link:
    def __init__(self, client: Connection) -> None:
        self._client = client
        self._connection: Any = client.connection
        self._channel: Any = client.channel()
        self._beat_at_s = 0.0
        self._reader: FrameReader
        self._waker: Waker

    def _attach_reader(self, reader: FrameReader) -> None:
        self._reader = reader
        self._waker = Waker(self._connection.transport.sock)

    def _receive_messages(self, timeout_s: float) -> list[SourceMessage]:
        now_s = time.monotonic()
        if now_s - self._beat_at_s >= _BEAT_EVERY_S:
            self._beat_at_s = now_s
            self._connection.heartbeat_tick()
        if not self._waker.wait(timeout_s):
            return []
        data = self._connection.transport.sock.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the broker closed the connection")
        self._connection.bytes_recv += 1  # heartbeats are due only in silence
        return self._reader.feed(data)

    def _send_bytes(self, data: bytes) -> None:
        self._connection.transport.write(data)
        self._connection.bytes_sent += 1

    def _declare(self, queues: Sequence[str]) -> None:
        for queue in queues:
            if not _is_there(self._channel, queue):
                self._channel.queue_declare(queue, durable=True, auto_delete=False)

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        connection, deadline_s = self._connection, time.monotonic() + _CLOSE_S
        with suppress(Exception):  # the connection may be broken
            connection.send_method(spec.Connection.Close, "BsBB", (0, "", 0, 0))
            while connection.connected and time.monotonic() < deadline_s:
                self._receive_messages(0.1)
        self._waker.close()
        self._client.collect()


class AmqpSource(_Link):
    """`MessageSource` over AMQP."""

    def __init__(self, client: Connection, options: SourceOptions, epoch: int) -> None:
        super().__init__(client)
        self.epoch = epoch
        self._acks = AckLine(_ACK_PATIENCE_S)
        if options.declare:
            self._declare([options.queue])
        self._channel.basic_qos(0, options.prefetch, False)
        self._channel.basic_consume(options.queue, callback=_unexpected)
        self._attach_reader(FrameReader(self._channel.channel_id, epoch, self._connection.on_inbound_frame))

    def receive(self, timeout_s: float) -> list[SourceMessage]:
        """Implements `MessageSource.receive`."""
        if self._acks.waits:
            timeout_s = min(timeout_s, _ACK_PATIENCE_S)
            self._acknowledge([])
        return self._receive_messages(timeout_s)

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        """Implements `MessageSource.acknowledge`."""
        self._acknowledge([int(receipt.tag) for receipt in receipts if receipt.epoch == self.epoch])

    def close(self) -> None:
        """Acknowledges settled messages, and disconnects."""
        with suppress(OSError):
            self._send_bytes(ack_frames(self._channel.channel_id, Due(0, self._acks.left())))
        super().close()

    def _acknowledge(self, tags: Sequence[int]) -> None:
        due = self._acks.due(tags, time.monotonic())
        if due.up_to or due.tags:
            self._send_bytes(ack_frames(self._channel.channel_id, due))


class AmqpSink(_Link):
    """`MessageSink` over AMQP, with publisher confirms."""

    def __init__(self, client: Connection, queues: Sequence[str], exchange: str = "") -> None:
        super().__init__(client)
        self._declare(queues)
        if exchange:
            self._channel.exchange_declare(exchange, "", passive=True)
        self._channel.confirm_select()
        self._sent: dict[int, Outgoing] = {}  # unconfirmed, by ascending tag
        self._last_tag = 0
        self._returned: set[int] = set()  # tags
        self._taken: list[Outgoing] = []
        self._refused: list[Outgoing] = []
        self._unroutable: list[Outgoing] = []
        self._attach_reader(
            FrameReader(
                self._channel.channel_id, 0, self._connection.on_inbound_frame, self._on_confirm, self._on_return
            )
        )

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Implements `MessageSink.send`."""
        channel_id, longest = self._channel.channel_id, self._connection.frame_max
        pieces: list[bytes] = []
        size = 0
        for message in messages:
            try:
                pieces.append(publish_frames(channel_id, message, longest))
            except ValueError:  # sent, it would end every connection
                logger.exception("a message can't be published")
                self._refused.append(message)
                continue
            self._last_tag += 1
            self._sent[self._last_tag] = message
            size += len(pieces[-1])
            if size >= _WRITE_BYTES:
                self._send_bytes(b"".join(pieces))
                pieces, size = [], 0
        if pieces:
            self._send_bytes(b"".join(pieces))

    def wait_settled(self, timeout_s: float) -> SettledMessages:
        """Implements `MessageSink.wait_settled`."""
        try:
            self._receive_messages(0.0 if self._refused else timeout_s)
        except ChannelError as error:  # such as a too large message
            raise MessageRefused(str(error)) from error
        settled = SettledMessages(self._taken, self._refused, self._unroutable)
        self._taken, self._refused, self._unroutable = [], [], []
        return settled

    def _on_confirm(self, tag: int, is_multiple: bool, is_taken: bool) -> None:  # noqa: FBT001 - as it is in the frame
        tags = list(takewhile(lambda sent: sent <= tag, self._sent)) if is_multiple else [tag]
        for each in tags:
            message = self._sent.pop(each, None)
            if message is None:
                continue
            if each in self._returned:
                self._returned.discard(each)
                self._unroutable.append(message)
            elif is_taken:
                self._taken.append(message)
            else:
                self._refused.append(message)

    def _on_return(self, returned: ReturnedMessage) -> None:
        for tag, message in self._sent.items():
            if tag not in self._returned and returned == (message.exchange, message.routing_key, message.message_id):
                self._returned.add(tag)
                return


def _unexpected(*_: object) -> None:
    raise AssertionError("a message went by the reader")
