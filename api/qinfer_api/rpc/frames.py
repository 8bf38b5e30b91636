"""HTTP/2 frames (RFC 9113), the limits of a connection, and checks of request headers."""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from qinfer.tensors import Bytes
from qinfer_api.rpc.hpack import Field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR = range(
    7
)
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM = range(7, 12)

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

FIRST_WINDOW_BYTES = 65_535
MAX_WINDOW_BYTES = 2**31 - 1
MIN_FRAME_BYTES, MAX_FRAME_BYTES = 16_384, 2**24 - 1
LAST_STREAM = 2**31 - 1

LEAST_BYTES = 1024
"""Smaller frames of a body cost more than their bytes."""

HEAD = struct.Struct(">IBI")

HEAD_BYTES, KIND_AT = 9, 3
SETTING = struct.Struct(">HI")
WORD = struct.Struct(">I")
TWO_WORDS = struct.Struct(">II")
WINDOW = struct.Struct(">IBII")
"""A WINDOW_UPDATE frame."""


class ConnectionLimits(NamedTuple):
    """Limits of a connection.

    Attributes:
        header_bytes: The size of a header list (section 6.5.2), and of its encoded form.
        window_bytes: One request may send as much before it is admitted.
        connection_window_bytes: All requests together may send as much.
        idle_frames: Frames that advance no request, in one burst.
        body_s: The time without a byte of an unfinished message.
        idle_s: The time without a request; 0 = unlimited.
        age_s: The time until the connection takes no more requests; 0 = unlimited.
        ping_s: Silence before a PING.
    """

    streams: int = 1000
    header_bytes: int = 64 * 1024
    frame_bytes: int = 64 * 1024
    window_bytes: int = 64 * 1024
    connection_window_bytes: int = 16 * 2**20
    idle_frames: int = 2000
    idle_frames_per_s: int = 500
    preface_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 0.0
    age_s: float = 0.0
    ping_s: float = 7200.0
    pong_s: float = 20.0


class ConnectionFault(Exception):
    """An error that ends a connection; `code` is HTTP/2's."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Malformed(Exception):
    """A request that breaks section 8.1.1; its stream is reset."""


def frame(kind: int, flags: int, number: int, payload: Bytes = b"") -> bytes:
    """Encodes a frame."""
    return b"".join((HEAD.pack(len(payload) << 8 | kind, flags, number), payload))


def data_frames(number: int, parts: Iterable[Bytes], most: int) -> list[Bytes]:
    """Encodes DATA frames of `most` bytes and the rest, as views."""
    pieces: list[Bytes] = []
    begun: list[Bytes] = []
    held, head = 0, HEAD.pack(most << 8, 0, number)
    for part in filter(len, parts):
        size, begin = len(part), most - held
        if size < begin:
            begun.append(part)
            held += size
            continue
        view, held = memoryview(part), (size - begin) % most
        pieces += (head, *begun, view[:begin])
        for at in range(begin, size - held, most):
            pieces += (head, view[at : at + most])
        begun = [view[size - held :]] if held else []
    if held:
        pieces += (HEAD.pack(held << 8, 0, number), *begun)
    return pieces


def plain_body(data: Bytes, start: int, number: int, most: int) -> tuple[list[memoryview], int, bool]:
    """Returns the contents of a body's frames from `start` on, their end, and whether they end the body.

    Frames that have not come whole are left out. There are no contents if another frame comes before the end, or one
    that is padded, small, or beyond `most` bytes.
    """
    view, position, end, flags = memoryview(data), start, len(data), 0
    parts: list[memoryview] = []
    while not flags and (begin := position + HEAD_BYTES) <= end:
        head, flags, stream = HEAD.unpack_from(data, position)
        stop = begin + (head >> 8)
        is_small = stop - begin < LEAST_BYTES and not flags
        if head & 0xFF or flags > END_STREAM or stream != number or is_small or stop - start > most:
            return [], start, False
        if stop > end:
            return parts, position, False
        parts.append(view[begin:stop])
        position = stop
    return parts, position, flags > 0


def word(payload: bytes, what: str) -> int:
    """Parses a payload that is one number."""
    if len(payload) != WORD.size:
        raise ConnectionFault(FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes")
    value: int = WORD.unpack(payload)[0]
    return value


def check_setting(key: int, value: int) -> None:
    """Checks a client's setting (section 6.5.2)."""
    if key == INITIAL_WINDOW_SIZE and value > MAX_WINDOW_BYTES:
        raise ConnectionFault(FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE of {value}")
    if key == MAX_FRAME_SIZE and not MIN_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
        raise ConnectionFault(PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE of {value}")
    if key == ENABLE_PUSH and value > 1:
        raise ConnectionFault(PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH of {value}")


def unpadded(flags: int, data: Bytes, begin: int, stop: int) -> tuple[int, int]:
    """Returns the bounds of a DATA or HEADERS frame's content, without padding and priority."""
    if flags & PADDED:
        if begin == stop:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a padded frame without the length of its padding")
        begin, stop = begin + 1, stop - data[begin]
    if flags & HAS_PRIORITY:
        begin += 5
    if begin > stop:
        raise ConnectionFault(PROTOCOL_ERROR, "the padding is longer than its frame")
    return begin, stop


# -- header fields (sections 8.2 and 8.3) ------------------------------------------------------------------------------

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_BAD_BYTES = b"\0\r\n"
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_MAX_REMEMBERED = 32
_REMEMBERED_BYTES = 64


@lru_cache(maxsize=1024)
def _is_name(name: bytes) -> bool:
    return name[:1] == b":" or (_NAME(name) is not None and name not in _OF_CONNECTIONS)


def check_fields(fields: Sequence[Field]) -> None:
    """Checks each field by itself."""
    for name, value in fields:
        is_name = _is_name if len(name) <= _REMEMBERED_BYTES else _is_name.__wrapped__
        # HTTP/2 forbids outer spaces, but gRPC clients send them.
        is_value = len(value.translate(None, _BAD_BYTES).strip(b"\t")) == len(value)
        if not (is_value and is_name(name)) or (name == b"te" and value != b"trailers"):
            raise Malformed(f"the header field {name!r} may not be sent, or not with this value")


def places(names: tuple[bytes, ...]) -> Mapping[str, int]:
    """Returns each name's first place; pseudo-headers must come first and once."""
    found = _remembered_places(names) if len(names) <= _MAX_REMEMBERED else _places(names)
    if found is None:
        raise Malformed("a pseudo-header field is unknown, repeated or out of place")
    return found


def _places(names: tuple[bytes, ...]) -> Mapping[str, int] | None:
    found: dict[str, int] = {}
    is_rest = False
    for place, name in enumerate(names):
        text = name.decode("latin-1")
        if name[:1] != b":":
            is_rest = True
        elif is_rest or text in found or name not in _PSEUDO:
            return None
        found.setdefault(text, place)
    return found


_remembered_places = lru_cache(maxsize=64)(_places)
