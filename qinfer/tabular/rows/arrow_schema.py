"""Measures the memory of an Arrow schema before pyarrow reads it, where no process of its own does.

In the flatbuffer (https://github.com/apache/arrow/blob/main/format/Schema.fbs), fields, names and metadata are offsets:
a thousand fields can share one name of a megabyte, which pyarrow copies a thousand times. A schema is in an Arrow
footer, and in a stream's first message.
"""

import struct

import numpy as np
import numpy.typing as npt

from qinfer.tensors import Bytes

_MAX_METADATA_BYTES = 128 * 2**20

_TABLE_BYTES = 1000  # of a field or metadata entry in Arrow and Python
_MAX_DEPTH = 128  # the limit of Arrow's verifier
_HARMLESS_BYTES = 2048  # Arrow's verifier follows at most eight offsets a byte
_CONTINUATION = b"\xff\xff\xff\xff"

Positions = npt.NDArray[np.int64]

_MESSAGE_HEADER = 2
_SCHEMA_FIELDS, _SCHEMA_METADATA = 1, 2
_FIELD_NAME, _FIELD_KIND, _FIELD_TYPE, _FIELD_CHILDREN, _FIELD_METADATA = 0, 2, 3, 5, 6
_TIMESTAMP, _UNION = 10, 14  # with a time zone; with a number for each child
_TYPE_ITEMS = 1  # the field of either
_TYPE_ITEM_BYTES = 4
_KEY, _VALUE = 0, 1


class SchemaTooLarge(ValueError):
    """A schema takes more memory than it may."""


def check_schema_message(data: Bytes) -> None:
    """Checks the schema in a length-prefixed message."""
    try:
        begin = 8 if bytes(data[:4]) == _CONTINUATION else 4
        message = bytes(data[begin : begin + unsigned(data, begin - 4)])
        if len(message) > _HARMLESS_BYTES:
            header = field_of(message, unsigned(message, 0), _MESSAGE_HEADER)
            if header:
                _Size(message).take_schema(header + unsigned(message, header))
    except (struct.error, IndexError) as error:
        raise ValueError(f"its schema is damaged: {error}") from None


class _Size:
    """Adds up memory; shared parts count at each reference.

    It follows all tables of a level at once: int64[tables] are positions, 0 = absent.
    """

    def __init__(self, buffer: bytes) -> None:
        self._bytes = np.frombuffer(buffer, np.uint8)
        self._left_bytes = _MAX_METADATA_BYTES

    def take_schema(self, table: int) -> None:
        self.take_pairs(np.array([table]), _SCHEMA_METADATA)
        fields = self._tables(np.array([table]), _SCHEMA_FIELDS)
        for _ in range(_MAX_DEPTH):
            self._take_items(fields, _FIELD_NAME)
            kinds, types = self._fields(fields, _FIELD_KIND), self._fields(fields, _FIELD_TYPE)
            types = types[np.isin(self._bytes[kinds], (_TIMESTAMP, _UNION)) & (kinds > 0) & (types > 0)]
            self._take_items(types + self._numbers(types, 4), _TYPE_ITEMS, _TYPE_ITEM_BYTES)
            self.take_pairs(fields, _FIELD_METADATA)
            fields = self._tables(fields, _FIELD_CHILDREN)
            if not len(fields):
                return
        raise SchemaTooLarge("its columns are nested too deeply")

    def take_pairs(self, tables: Positions, number: int) -> None:
        pairs = self._tables(tables, number)
        for item in (_KEY, _VALUE):
            self._take_items(pairs, item)

    def _tables(self, tables: Positions, number: int) -> Positions:
        vectors = self._vectors(tables, number)
        counts = self._numbers(vectors, 4)
        self._add_bytes(_TABLE_BYTES * int(counts.sum()))
        ends = np.cumsum(counts)
        index = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
        places: Positions = np.repeat(vectors, counts) + 4 + 4 * index
        return places + self._numbers(places, 4)

    def _take_items(self, tables: Positions, number: int, item_bytes: int = 1) -> None:
        self._add_bytes(item_bytes * int(self._numbers(self._vectors(tables, number), 4).sum()))

    def _vectors(self, tables: Positions, number: int) -> Positions:
        fields = self._fields(tables, number)
        fields = fields[fields > 0]
        return fields + self._numbers(fields, 4)

    def _fields(self, tables: Positions, number: int) -> Positions:
        vtables = tables - self._numbers(tables, 4).astype(np.int32)
        place = 4 + 2 * number
        offsets = np.zeros(len(tables), np.int64)
        has = self._numbers(vtables, 2) > place
        offsets[has] = self._numbers(vtables[has] + place, 2)
        return np.where(offsets, tables + offsets, 0)

    def _numbers(self, places: Positions, size: int) -> Positions:
        if len(places) and places.min() < 0:
            raise IndexError("a flatbuffer points outside")
        raw = self._bytes[places[:, None] + np.arange(size)]
        numbers: Positions = raw.view(f"<u{size}")[:, 0].astype(np.int64)
        return numbers

    def _add_bytes(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise SchemaTooLarge("its schema takes too much memory; write fewer columns, or shorter names and notes")


def text_of(buffer: bytes, table: int, number: int) -> bytes:
    """Returns a table's text field."""
    field = field_of(buffer, table, number)
    if not field:
        return b""
    place = field + unsigned(buffer, field)
    return buffer[place + 4 : place + 4 + unsigned(buffer, place)]


def field_of(buffer: Bytes, table: int, number: int) -> int:
    """Returns the position of a table's field; 0 = default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise ValueError("a flatbuffer points outside")
    size = struct.unpack_from("<H", buffer, vtable)[0]
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", buffer, vtable + place)[0] if place < size else 0
    return table + offset if offset else 0


def unsigned(buffer: Bytes, position: int) -> int:
    """Returns an unsigned number; at position 0, the root table."""
    value: int = struct.unpack_from("<I", buffer, position)[0]
    return value
