"""Walks the fields of an encoded protobuf message without parsing it.

The parser makes objects of all fields at once and blocks all threads, so large messages are counted first.
"""

from typing import Any

import numpy as np

from qinfer.errors import InvalidRequest, PayloadTooLarge
from qinfer.tensors import Bytes

MAX_FIELDS = 65_536
"""The most fields of a large message: each costs more than its bytes."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


def malformed() -> InvalidRequest:
    """Returns the error of an unreadable message."""
    return InvalidRequest("the request is not a message of this call's type; send the message of its .proto file")


def varint(message: Bytes, position: int) -> tuple[int, int]:
    """Returns a number and the next position, or raises `IndexError`."""
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
    """Refuses too many fields and list elements."""
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
    if field is None or field.message_type is not None or field.cpp_type == _TEXT:
        return 0
    return int(np.count_nonzero(np.frombuffer(value, np.uint8) < 0x80))


_TEXT = 9  # FieldDescriptor.CPPTYPE_STRING, also of bytes
