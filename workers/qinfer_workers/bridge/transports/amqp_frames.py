"""AMQP 0-9-1 frames of the methods that occur once per message: deliver, publish and acknowledge. Pure.

py-amqp's system calls, three a read frame and one a written message, are most of a message's cost. Here arrived data is
split at once, and a batch is one write. py-amqp gets all other frames.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct, error
from typing import NamedTuple

from amqp.exceptions import AMQPError
from amqp.serialization import loads

from qinfer_workers.bridge.messages import Outgoing, Receipt, SourceMessage


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
_UNREADABLE = (IndexError, error, ValueError, OverflowError, OSError, RecursionError, AMQPError)


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
