"""Just enough of protobuf's encoding to move tensor bytes in and out of messages without copying them.

A message is a sequence of (tag, value); the tag's low three bits say how long the value is, the others which field it
is. So a large field can be cut out before the message is parsed, and put in after it was printed.
"""

from qinfer.errors import InvalidRequest
from qinfer.tensors import Bytes

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}

MAX_FIELDS = 65_536
"""Top-level fields of a message that is cut up: walking over them costs more than their bytes say."""


def cut_out(message: bytes, field: int) -> tuple[bytes, list[memoryview]]:
    """Takes all values of a `bytes` field out of a message.

    Args:
        message: The encoded message; the values become views into it.
        field: The field's number, at most 15.

    Returns:
        The message without the field, and the field's values in order.

    Raises:
        InvalidRequest: The message is cut off, holds what protobuf does not know, or more than `MAX_FIELDS` fields.
    """
    view, end, position, kept = memoryview(message), len(message), 0, 0
    wanted = field << 3 | _LENGTH
    rest: list[Bytes] = []
    found: list[memoryview] = []
    count = 0
    try:
        while position < end:
            count += 1
            if count > MAX_FIELDS:
                raise InvalidRequest(f"the request has more than {MAX_FIELDS} inputs, outputs and parameters")
            start = position
            tag, position = _varint(message, position)
            kind = tag & 7
            if kind == _LENGTH:
                size, position = _varint(message, position)
            elif kind == _VARINT:
                size, position = 0, _varint(message, position)[1]
            else:
                size = _FIXED_BYTES[kind]
            if tag == wanted:
                rest.append(view[kept:start])
                found.append(view[position : position + size])
                kept = position + size
            position += size
    except (IndexError, KeyError):
        raise malformed() from None
    if position != end:
        raise malformed()
    if not found:
        return message, found
    rest.append(view[kept:])
    return b"".join(rest), found


def values_of(message: bytes) -> memoryview:
    """Returns the value of the only field of a message, a field with a length.

    The packed form of numbers of fixed size, and of booleans, is their bytes in little-endian order.
    """
    _, position = _varint(message, 0)
    size, position = _varint(message, position)
    return memoryview(message)[position : position + size]


def prefix(field: int, size: int) -> bytes:
    """Returns what stands before a value of `size` bytes of the field with this number, at most 15."""
    if size < 0x80:
        return bytes((field << 3 | _LENGTH, size))
    parts = [field << 3 | _LENGTH]
    while size > 0x7F:
        parts.append(size & 0x7F | 0x80)
        size >>= 7
    parts.append(size)
    return bytes(parts)


def malformed() -> InvalidRequest:
    """Returns the error of a message that can't be read."""
    return InvalidRequest("the request is no message of the kind that this call takes; send what its .proto says")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Reads a number; returns it, and where the next thing begins."""
    value = message[position]
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    shift = 7
    while shift < 70:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise malformed()
