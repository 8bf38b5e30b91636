"""The fields of an encoded protobuf message, looked at without parsing it.

A message is a sequence of (tag, value); the tag's low three bits say how long the value is, the others which field it
is. The parser makes objects of all fields at once, and no other thread runs meanwhile: large messages are counted
before.
"""

from typing import Any

import numpy as np

from qinfer.errors import InvalidRequest, PayloadTooLarge
from qinfer.tensors import Bytes

MAX_FIELDS = 65_536
"""Fields of a large message: walking over them costs more than their bytes say."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Kinds of values."""

FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
"""The sizes of the kinds that have one."""


def malformed() -> InvalidRequest:
    """Returns the error of a message that can't be read."""
    return InvalidRequest("the request is no message of the kind that this call takes; send what its .proto says")


def varint(message: Bytes, position: int) -> tuple[int, int]:
    """Reads a number; returns it, and where the next thing begins.

    Raises:
        IndexError: The message is cut off.
        InvalidRequest: It is not a number.
    """
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


def check_fields(message: Bytes, kind: Any) -> None:
    """Checks how many fields a message has, with those of the messages in it, and the elements of its lists.

    Args:
        message: The encoded message.
        kind: Its descriptor.

    Raises:
        InvalidRequest: It is damaged.
        PayloadTooLarge: There are more than `MAX_FIELDS`.
    """
    parts, count = [(0, len(message), kind)], 0
    try:
        while parts:
            position, end, kind = parts.pop()
            while position < end:
                tag, position = varint(message, position)
                field, size = kind.fields_by_number.get(tag >> 3), 0
                count += 1
                if tag & 7 == LENGTH:
                    size, position = varint(message, position)
                    count += _more(memoryview(message)[position : position + size], field)
                    if field is not None and field.message_type is not None:
                        parts.append((position, position + size, field.message_type))
                elif tag & 7 == VARINT:
                    position = varint(message, position)[1]
                else:
                    size = FIXED_BYTES[tag & 7]
                position += size
                if count > MAX_FIELDS:
                    raise PayloadTooLarge(
                        f"the request of {len(message)} bytes has more than {MAX_FIELDS} fields and elements of lists"
                    )
            if position != end:
                raise malformed()
    except (IndexError, KeyError):
        raise malformed() from None


def _more(value: memoryview, field: Any) -> int:
    """Returns how many numbers a packed list has; 0 for other values."""
    if field is None or field.message_type is not None or field.cpp_type == _TEXT:
        return 0
    return int(np.count_nonzero(np.frombuffer(value, np.uint8) < 0x80))


_TEXT = 9  # FieldDescriptor.CPPTYPE_STRING, that of bytes, too
