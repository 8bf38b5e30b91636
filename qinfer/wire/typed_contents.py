"""Reads an input's typed contents over gRPC without protobuf, which would make an object of each at once.

numpy turns packed numbers and strings into a tensor's bytes, window by window. Contents in several pieces are one list.
The fields of a large message are counted before protobuf makes objects of all of them at once.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest, PayloadTooLarge
from qinfer.tensors import DATATYPES, Bytes

MAX_FIELDS = 65_536
"""The most fields of a large message: each costs more than its bytes."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


def malformed() -> InvalidRequest:
    """Returns the error of an unreadable message."""
    return InvalidRequest("the request is not a message of this call's type; send the message of its .proto file")


def varint(message: Any, position: int) -> tuple[int, int]:
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


def fields_of(message: Any, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Yields start, tag, and the value's place of each field of a part of a message: bytes, or a file's `Ranges`."""
    position, end = begin, len(message) if end is None else end
    try:
        while position < end:
            start = position
            tag, position = varint(message, position)
            kind = tag & 7
            if kind == LENGTH:
                size, position = varint(message, position)
            elif kind == VARINT:
                size = varint(message, position)[1] - position
            else:
                size = FIXED_BYTES[kind]
            if position + size > end:
                raise malformed()
            yield start, tag, position, position + size
            position += size
    except (IndexError, KeyError):
        raise malformed() from None


def check_fields(message: Bytes, kind: Any) -> None:
    """Refuses too many fields and list elements."""
    parts, count = [(0, len(message), kind)], 0
    while parts:
        begin, end, kind = parts.pop()
        for _, tag, at, stop in fields_of(message, begin, end):
            field = kind.fields_by_number.get(tag >> 3)
            count += 1
            if tag & 7 == LENGTH:
                count += _more(memoryview(message)[at:stop], field)
                if field is not None and field.message_type is not None:
                    parts.append((at, stop, field.message_type))
            if count > MAX_FIELDS:
                raise PayloadTooLarge(
                    f"the request of {len(message)} bytes has more than {MAX_FIELDS} fields and elements of lists"
                )


def _more(value: memoryview, field: Any) -> int:
    if field is None or field.message_type is not None or field.cpp_type == _TEXT:
        return 0
    return int(np.count_nonzero(np.frombuffer(value, np.uint8) < 0x80))


_TEXT = 9  # FieldDescriptor.CPPTYPE_STRING, also of bytes


WINDOW_BYTES = 64 * 1024
"""Processed at once; other threads run in between."""

TYPED = {  # field → datatypes, its own first
    1: ("BOOL",),
    2: ("INT32", "INT16", "INT8"),
    3: ("INT64",),
    4: ("UINT32", "UINT16", "UINT8"),
    5: ("UINT64",),
    6: ("FP32",),
    7: ("FP64",),
    8: ("BYTES",),
}

_WIDTHS = {6: 4, 7: 8}  # of fixed-size numbers
_STRINGS = 8 << 3 | LENGTH
_MAX_VARINT_BYTES = 10
_PREFIX_BYTES = 4  # of BYTES elements
_JUMPS = 4  # strings are followed 16 at a time

_Bytes = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[np.int64]


class TypedContents:
    """One input's contents, in field number `field` (0 = empty)."""

    def __init__(self, text: Bytes) -> None:
        self._text = memoryview(text)
        self.field, self.is_mixed = 0, False
        self._numbers: Bytes = b""
        if len(text) and text[0] == _STRINGS:
            self.field = _STRINGS >> 3
        else:
            self._numbers = self._joined_lists()

    def tensor_bytes(self, name: str, datatype: str, count: int, most: int) -> Bytes:
        """Returns `count` elements, at most `most` bytes."""
        itemsize = DATATYPES[datatype].itemsize or _PREFIX_BYTES
        if count * itemsize > most:
            raise _too_large(name, count * itemsize, most)
        if datatype == "BYTES":
            return self._strings(name, count, most)
        is_fixed = self.field in _WIDTHS
        text = memoryview(self._numbers)
        found = len(text) // itemsize if is_fixed else _count_numbers(text)
        if found != count:
            raise _miscounted(name, found, count)
        if is_fixed:
            return text
        out = bytearray()
        for numbers in _numbers(text):
            if datatype == "BOOL":
                out += (numbers != 0).tobytes()
            else:  # too large numbers keep their low bytes, as in Triton
                out += numbers.astype(DATATYPES[datatype].numpy).tobytes()
        return out

    def _joined_lists(self) -> Bytes:
        """Returns the filled field's packed numbers."""
        lists: list[memoryview] = []
        for count, (_, tag, begin, end) in enumerate(fields_of(self._text), 1):
            if count > MAX_FIELDS:
                raise PayloadTooLarge(
                    f"the contents of an input have more than {MAX_FIELDS} fields; send their numbers packed, as "
                    "proto3 does, or as raw_input_contents"
                )
            if tag >> 3 not in TYPED:
                continue  # protobuf skips unknown fields
            self.is_mixed = self.is_mixed or self.field not in (0, tag >> 3)
            self.field = tag >> 3
            lists.append(self._text[begin:end])
        size = _WIDTHS.get(self.field, 0)
        if any(len(one) % size if size else len(one) and one[-1] >= 0x80 for one in lists):
            raise malformed()
        return lists[0] if len(lists) == 1 else b"".join(lists)

    def _strings(self, name: str, count: int, most: int) -> bytearray:
        text, position, end = self._text, 0, len(self._text)
        out, found = bytearray(), 0
        while position < end:
            window = np.frombuffer(text[position : position + WINDOW_BYTES], np.uint8)
            run = None if (window[1:3] >= 0x80).sum() == 2 else _find_strings(window)
            if run is None:  # long
                position = self._long_string(position, out)
                found += 1
            else:
                out += _joined(window, run)
                position += run.end
                found += len(run.begins)
            if found > count:
                raise _miscounted(name, found, count)
            if len(out) > most:
                raise _too_large(name, len(out), most)
        if found != count:
            raise _miscounted(name, found, count)
        return out

    def _long_string(self, position: int, out: bytearray) -> int:
        try:
            tag, begin = varint(self._text, position)
            size, begin = varint(self._text, begin)
        except IndexError:
            raise malformed() from None
        end = begin + size
        if tag != _STRINGS or end > len(self._text):
            raise malformed()
        out += size.to_bytes(_PREFIX_BYTES, "little")
        out += self._text[begin:end]
        return end


class _StringRun(NamedTuple):
    begins: _Numbers
    heads: _Numbers
    sizes: _Numbers
    end: int


def _find_strings(window: _Bytes) -> _StringRun | None:
    """Returns a run of strings; `None` if the first is incomplete or long."""
    count = len(window)
    padded = np.concatenate((window, np.zeros(2, np.uint8)))
    first, second = padded[1 : count + 1].astype(np.int32), padded[2:].astype(np.int32)
    is_wide = first >= 0x80
    heads = np.where(is_wide, 3, 2)
    sizes = np.where(is_wide, first & 0x7F | second << 7, first)
    ends = np.arange(count) + heads + sizes
    ends[(is_wide & (second >= 0x80)) | (ends > count)] = count + 1  # unknown data follows
    following = np.append(np.minimum(ends, count), count)
    jumps = [following]
    for _ in range(_JUMPS):
        jumps.append(jumps[-1][jumps[-1]])
    far, place, coarse = jumps.pop(), 0, list[int]()
    while place < count:
        coarse.append(place)
        place = int(far[place])
    begins = np.array(coarse, np.int64)
    for jump in reversed(jumps):
        begins = np.concatenate((begins, jump[begins]))
    begins = np.unique(begins)
    begins = begins[begins < count]
    if (window[begins] != _STRINGS).any():
        raise malformed()
    begins = begins[ends[begins] <= count]
    if not len(begins):
        return None
    return _StringRun(begins, heads[begins], sizes[begins], int(ends[begins[-1]]))


def _joined(window: _Bytes, run: _StringRun) -> bytes:
    is_text = np.ones(run.end, bool)
    is_text[run.begins] = is_text[run.begins + 1] = False
    is_text[run.begins[run.heads == 3] + 2] = False
    sizes = run.sizes.astype(np.int64)
    places = np.cumsum(sizes + _PREFIX_BYTES) - sizes - _PREFIX_BYTES
    out = np.empty(int(sizes.sum()) + _PREFIX_BYTES * len(sizes), np.uint8)
    is_own = np.ones(len(out), bool)
    for byte in range(_PREFIX_BYTES):
        out[places + byte] = sizes >> 8 * byte & 0xFF
        is_own[places + byte] = False
    out[is_own] = window[: run.end][is_text]
    return out.tobytes()


def _count_numbers(text: memoryview) -> int:
    """Counts last bytes, which have no high bit."""
    return sum(
        int(np.count_nonzero(np.frombuffer(text[at : at + WINDOW_BYTES], np.uint8) < 0x80))
        for at in range(0, len(text), WINDOW_BYTES)
    )


def _numbers(text: memoryview) -> Iterator[npt.NDArray[np.uint64]]:
    position = 0
    while position < len(text):
        window = np.frombuffer(text[position : position + WINDOW_BYTES], np.uint8)
        ends = np.flatnonzero(window < 0x80)
        if not len(ends):
            raise malformed()
        begins = np.concatenate(([0], ends[:-1] + 1))
        widths = ends - begins + 1
        longest = int(widths.max())
        if longest > _MAX_VARINT_BYTES:
            raise malformed()
        numbers: npt.NDArray[np.uint64] = window[begins].astype(np.uint64) & np.uint64(0x7F)
        for byte in range(1, longest):
            has = widths > byte
            numbers[has] |= (window[begins[has] + byte].astype(np.uint64) & np.uint64(0x7F)) << np.uint64(7 * byte)
        position += int(ends[-1]) + 1
        yield numbers


def _miscounted(name: str, found: int, count: int) -> InvalidRequest:
    return InvalidRequest(f"input '{name}' has {found} elements in its contents, and its shape takes {count}")


def _too_large(name: str, nbytes: int, most: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"input '{name}' takes {nbytes} bytes as a tensor, and {most} are left of the limit for a request's inputs "
        "(QINFER_GRPC__MAX_MESSAGE_BYTES)"
    )
