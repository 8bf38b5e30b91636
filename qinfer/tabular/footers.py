"""Footers of Parquet and Arrow files: bounded in size, and read without rows.

pyarrow needs whole record batches to count their rows. An Arrow file ends with a flatbuffer `Footer`, its length and
`ARROW1`; the footer's blocks point to flatbuffers `Message`.

In the flatbuffer of a schema (https://github.com/apache/arrow/blob/main/format/Schema.fbs), fields, names and metadata
are offsets: a thousand fields can share one name of a megabyte, which pyarrow copies a thousand times. So the memory of
a message's schema is measured before pyarrow reads it, as no process of its own does.

Spark, Hive and Impala write timestamps of Parquet's deprecated type INT96. pyarrow reads them as 64-bit nanoseconds,
which silently wrap after 2262. Here such a column has microseconds, unless its file was written from Arrow nanoseconds
(`ARROW:schema`). Each batch is read in both units, which reveals values that one of them can't represent.
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.errors import CorruptEntry
from qinfer.tabular.schemas import INT96_INSTANT, decode_schema
from qinfer.tensors import Bytes

FOOTER_BYTES = 16 * 2**20

_TAIL = struct.Struct("<i6s")
_BLOCK = struct.Struct("<qi4xq")
_ARROW_MAGIC = b"ARROW1"
_PARQUET_TAIL = struct.Struct("<I4s")
_PARQUET_MAGIC = (b"PAR1", b"PARE")
_END_BYTES = 64 * 1024  # the end of a file that is read at once; it has most footers
_MAX_HEADER_BYTES = 16 * 2**20
_CONTINUATION = b"\xff\xff\xff\xff"
_ITEMS = 100_000

_FOOTER_BATCHES = 3
_MESSAGE_HEADER, _MESSAGE_METADATA = 2, 4  # Message: version, header type, header, body length, metadata
_KEY, _VALUE = 0, 1  # KeyValue
_BATCH_LENGTH = 0  # RecordBatch


class MessageBlock(NamedTuple):
    """Place of a message: offset, header with prefix, body."""

    offset: int
    header: int
    body: int


def read_metadata(content: BinaryIO | Any, footer_bytes: int = FOOTER_BYTES) -> pq.FileMetaData:
    """Reads a Parquet file's footer."""
    data = _end_of(content, _PARQUET_TAIL.size)
    if len(data) < _PARQUET_TAIL.size or data[-len(_PARQUET_MAGIC[0]) :] not in _PARQUET_MAGIC:
        raise ValueError("it does not end as Parquet files do")
    size, _ = _PARQUET_TAIL.unpack(data[-_PARQUET_TAIL.size :])
    _check_footer_size(size, footer_bytes, "row groups")
    footer = pa.BufferReader(_end_of(content, size + _PARQUET_TAIL.size, data))  # no second request to the store
    file = pq.ParquetFile(
        footer, pre_buffer=False, thrift_string_size_limit=footer_bytes, thrift_container_size_limit=_ITEMS
    )
    return file.metadata


def open_arrow(file: BinaryIO | Any, footer_bytes: int = FOOTER_BYTES) -> pa.ipc.RecordBatchFileReader:
    """Opens an Arrow file; `ValueError` for its footer."""
    _arrow_footer(file, footer_bytes)
    return pa.ipc.open_file(file)


def batch_rows(file: BinaryIO, footer_bytes: int = FOOTER_BYTES) -> tuple[int, ...]:
    """Returns the rows of each record batch."""
    try:
        return tuple(_length(file, block) for block in _blocks(file, footer_bytes))
    except (struct.error, IndexError) as error:
        raise ValueError(f"its footer is damaged: {error}") from None


def batch_metadata(file: BinaryIO, number: int) -> dict[bytes, bytes]:
    """Returns a record batch's metadata."""
    try:
        message = _message(file, _blocks(file)[number])
        pairs = _tables(message, unsigned(message, 0), _MESSAGE_METADATA)
        return {text_of(message, pair, _KEY): text_of(message, pair, _VALUE) for pair in pairs}
    except (struct.error, IndexError) as error:
        raise ValueError(f"a record batch's header is damaged: {error}") from None


def _blocks(file: BinaryIO, footer_bytes: int = FOOTER_BYTES) -> list[MessageBlock]:
    footer = _arrow_footer(file, footer_bytes)
    field = field_of(footer, unsigned(footer, 0), _FOOTER_BATCHES)
    if not field:
        return []
    vector = field + unsigned(footer, field)
    first, count = vector + 4, unsigned(footer, vector)
    end, blocks = file.seek(0, 2), []
    for place in range(first, first + _BLOCK.size * count, _BLOCK.size):
        block = MessageBlock._make(_BLOCK.unpack_from(footer, place))
        if min(block) < 0 or sum(block) > end:
            raise ValueError("its footer names a record batch that is not within the file")
        blocks.append(block)
    return blocks


def _check_footer_size(size: int, most: int, parts: str) -> None:
    """Raises `ValueError` if a footer is too large."""
    if size > most:
        raise ValueError(
            f"its footer has {size} bytes, and may have {most}; write fewer {parts} or columns, or raise "
            "QINFER_BULK__MAX_FOOTER_BYTES"
        )


def _end_of(file: BinaryIO | Any, least: int, data: bytes = b"") -> bytes:
    """Returns the last bytes of a file, or `data` if it has them."""
    if data and least <= len(data):
        return data[-least:]
    end = file.seek(0, 2)
    size = min(end, max(least, 0 if data else _END_BYTES))
    file.seek(end - size)
    found: bytes = file.read(size)
    return found


def _arrow_footer(file: BinaryIO | Any, footer_bytes: int = FOOTER_BYTES) -> bytes:
    data = _end_of(file, _TAIL.size)
    size, magic = _TAIL.unpack(data[-_TAIL.size :]) if len(data) >= _TAIL.size else (0, b"")
    if magic != _ARROW_MAGIC or not 0 < size <= file.seek(0, 2) - _TAIL.size:
        raise ValueError("it does not end as Arrow's file format does")
    _check_footer_size(size, footer_bytes, "record batches")
    return _end_of(file, size + _TAIL.size, data)[: -_TAIL.size]


def _length(file: BinaryIO, block: MessageBlock) -> int:
    message = _message(file, block)
    header = field_of(message, unsigned(message, 0), _MESSAGE_HEADER)
    if not header:
        raise ValueError("a record batch's header is damaged")
    batch = header + unsigned(message, header)
    field = field_of(message, batch, _BATCH_LENGTH)
    rows = struct.unpack_from("<q", message, field)[0] if field else 0
    if rows < 0:
        raise ValueError("a record batch's header is damaged")
    return int(rows)


def _message(file: BinaryIO, block: MessageBlock) -> bytes:
    if not 0 < block.header <= _MAX_HEADER_BYTES:
        raise ValueError(f"a record batch's header has {block.header} bytes")
    file.seek(block.offset)
    data = file.read(block.header)
    return data[8:] if data.startswith(_CONTINUATION) else data[4:]


def _tables(buffer: bytes, table: int, number: int) -> Iterator[int]:
    field = field_of(buffer, table, number)
    if field:
        vector = field + unsigned(buffer, field)
        for place in range(vector + 4, vector + 4 + 4 * unsigned(buffer, vector), 4):
            yield place + unsigned(buffer, place)


_MAX_METADATA_BYTES = 128 * 2**20

_TABLE_BYTES = 1000  # of a field or metadata entry in Arrow and Python
_MAX_DEPTH = 128  # the limit of Arrow's verifier
_HARMLESS_BYTES = 2048  # Arrow's verifier follows at most eight offsets a byte

Positions = npt.NDArray[np.int64]

_SCHEMA_FIELDS, _SCHEMA_METADATA = 1, 2
_FIELD_NAME, _FIELD_KIND, _FIELD_TYPE, _FIELD_CHILDREN, _FIELD_METADATA = 0, 2, 3, 5, 6
_TIMESTAMP, _UNION = 10, 14  # with a time zone; with a number for each child
_TYPE_ITEMS = 1  # the field of either
_TYPE_ITEM_BYTES = 4


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
        raise ValueError("its columns are nested too deeply")

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
            raise ValueError("its schema takes too much memory; write fewer columns, or shorter names and notes")


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


INT96 = "INT96"
ARROW_SCHEMA = b"ARROW:schema"
"""Key of the footer's metadata."""

_NS_IN_US = 1000
_MOST_US = (2**63 - 1) // _NS_IN_US


def arrow_schema(content: Any, metadata: pq.FileMetaData) -> pa.Schema:
    """Returns a file's columns, with INT96 in the unit that fits."""
    schema = metadata.schema.to_arrow_schema()
    if not any(metadata.schema.column(leaf).physical_type == INT96 for leaf in range(metadata.num_columns)):
        return schema
    coarse = pq.ParquetFile(content, metadata=metadata, coerce_int96_timestamp_unit="us").schema_arrow
    written = _written(metadata)
    for number, field in enumerate(coarse):
        if field.type != schema.field(number).type and not _has_nanoseconds(written, field.name):
            is_plain = pa.types.is_timestamp(field.type)
            schema = schema.set(number, field.with_metadata({INT96_INSTANT: b"1"}) if is_plain else field)
    return schema


def exact(fine: pa.RecordBatch, coarse: pa.RecordBatch, schema: pa.Schema) -> tuple[dict[str, pa.Array], str]:
    """Chooses INT96 columns from rows in nanoseconds (`fine`) and microseconds (`coarse`).

    Returns a message if a value has no exact form.
    """
    columns = {}
    for name in fine.schema.names:
        is_fine = _has_nanoseconds(schema, name)
        columns[name] = (fine if is_fine else coarse).column(name)
        for ns, us in zip(_instants(fine.column(name)), _instants(coarse.column(name)), strict=True):
            if is_fine and len(us) and np.abs(us).max() > _MOST_US:
                return {}, f"column '{name}' has INT96 timestamps beyond the years 1678 to 2261, and its type says ns"
            if not is_fine and (us * _NS_IN_US != ns).any():  # both overflow alike
                return {}, (
                    f"column '{name}' has INT96 timestamps with parts of a microsecond; write the column as "
                    "timestamps of nanoseconds that are INT64"
                )
    return columns, ""


def _written(metadata: pq.FileMetaData) -> pa.Schema:
    text = (metadata.metadata or {}).get(ARROW_SCHEMA, b"")
    with suppress(CorruptEntry, UnicodeDecodeError):
        return decode_schema(text.decode())
    return pa.schema([])


def _has_nanoseconds(schema: pa.Schema, name: str) -> bool:
    number = schema.get_field_index(name)
    return number >= 0 and "timestamp[ns" in str(schema.field(number).type)


def _instants(array: pa.Array) -> Iterator[npt.NDArray[np.int64]]:
    if pa.types.is_timestamp(array.type):
        yield array.drop_null().cast(pa.int64()).to_numpy()
    elif pa.types.is_map(array.type):
        yield from _instants(array.keys)
        yield from _instants(array.items)
    elif pa.types.is_struct(array.type):
        for inner in array.flatten():
            yield from _instants(inner)
    elif pa.types.is_nested(array.type):
        yield from _instants(array.flatten())
