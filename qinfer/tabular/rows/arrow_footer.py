"""Row counts and memory needs of an Arrow file's record batches, from footer and headers.

pyarrow needs whole batches to count rows, and allocates a compressed buffer's declared size before it reads it. An
Arrow file ends with a flatbuffer `Footer`, its length and `ARROW1`; the footer's blocks point to flatbuffers `Message`.
"""

import struct
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from qinfer.tabular.rows.arrow_schema import check_schema, field_of, text_of, unsigned

_MAGIC = b"ARROW1"
TAIL = struct.Struct("<i6s")
END_BYTES = 64 * 1024
"""The end of a file that is read at once; it has most footers."""
BLOCK = struct.Struct("<qi4xq")
_CONTINUATION = b"\xff\xff\xff\xff"
FOOTER_BYTES = 16 * 2**20
_MAX_HEADER_BYTES = 16 * 2**20

_FOOTER_SCHEMA, _FOOTER_DICTIONARIES, _FOOTER_BATCHES, _FOOTER_METADATA = 1, 2, 3, 4
# version, header type, header, body length, metadata
_MESSAGE_HEADER, _MESSAGE_BODY_LENGTH, _MESSAGE_METADATA = 2, 3, 4
_KEY, _VALUE = 0, 1  # KeyValue
_BATCH_LENGTH, _BATCH_BUFFERS, _BATCH_COMPRESSION, _BATCH_VARIADIC = 0, 2, 3, 4  # RecordBatch: length, nodes, …
_DICTIONARY_DATA = 1  # DictionaryBatch: id, data
_BUFFER = struct.Struct("<qq")  # offset within the body, length
_LENGTH = struct.Struct("<q")  # a compressed buffer's decompressed length, -1 = not compressed


class MessageBlock(NamedTuple):
    """Place of a message: offset, header with prefix, body."""

    offset: int
    header: int
    body: int


def open_arrow(file: BinaryIO | Any, footer_bytes: int = FOOTER_BYTES) -> pa.ipc.RecordBatchFileReader:
    """Opens an untrusted Arrow file; `ValueError` for its footer."""
    try:
        footer = _footer(file, footer_bytes)
        schema = field_of(footer, unsigned(footer, 0), _FOOTER_SCHEMA)
        if schema:
            check_schema(footer, schema + unsigned(footer, schema), _FOOTER_METADATA)
    except (struct.error, IndexError) as error:
        raise ValueError(f"its footer is damaged: {error}") from None
    return pa.ipc.open_file(file)


def batch_rows(file: BinaryIO, footer_bytes: int = FOOTER_BYTES) -> tuple[int, ...]:
    """Returns the rows of each record batch."""
    try:
        return tuple(_length(file, block) for block in _blocks(file, _FOOTER_BATCHES, footer_bytes))
    except (struct.error, IndexError) as error:
        raise ValueError(f"its footer is damaged: {error}") from None


def batch_metadata(file: BinaryIO, number: int) -> dict[bytes, bytes]:
    """Returns a record batch's metadata."""
    try:
        message = _message(file, _blocks(file, _FOOTER_BATCHES)[number])
        pairs = _tables(message, unsigned(message, 0), _MESSAGE_METADATA)
        return {text_of(message, pair, _KEY): text_of(message, pair, _VALUE) for pair in pairs}
    except (struct.error, IndexError) as error:
        raise ValueError(f"a record batch's header is damaged: {error}") from None


class BatchSizes:
    """The memory that some columns of record batches take."""

    def __init__(
        self,
        file: BinaryIO | Any,
        schema: pa.Schema,
        columns: Collection[str],
        footer_bytes: int = FOOTER_BYTES,
    ) -> None:
        self._file, self._schema, self._columns = file, schema, columns
        try:
            self._blocks = _blocks(file, _FOOTER_BATCHES, footer_bytes)
            dictionaries = _blocks(file, _FOOTER_DICTIONARIES, footer_bytes)
            self._dictionaries = sum(_buffer_bytes(file, block) for block in dictionaries)
        except (struct.error, IndexError) as error:
            raise ValueError(f"its footer is damaged: {error}") from None

    def batch_bytes(self, number: int) -> int:
        """Returns the bytes of a batch's stored and decompressed buffers and all dictionaries."""
        try:
            own = _buffer_bytes(self._file, self._blocks[number], (self._schema, self._columns))
        except (struct.error, IndexError) as error:
            raise ValueError(f"a record batch's header is damaged: {error}") from None
        return self._dictionaries + own


def _buffer_bytes(
    file: BinaryIO | Any, block: MessageBlock, of: tuple[pa.Schema, Collection[str]] | None = None
) -> int:
    """Returns the bytes of a record batch, or without `of`, those of a dictionary."""
    message, table = _header(file, block)
    if of is None:
        table = _table(message, table, _DICTIONARY_DATA)
    field = field_of(message, table, _BATCH_BUFFERS)
    if not field:
        return 0
    vector = field + unsigned(message, field)
    count = unsigned(message, vector)
    chosen: Any = range(count) if of is None else _chosen(*of, _variadic(message, table))
    is_compressed = bool(field_of(message, table, _BATCH_COMPRESSION))
    total = 0
    for index in chosen:
        if index >= count:
            raise ValueError("a record batch has fewer buffers than its columns need")
        place, length = _BUFFER.unpack_from(message, vector + 4 + _BUFFER.size * index)
        if place < 0 or length < 0:
            raise ValueError("a buffer is outside its record batch")
        total += length
        if is_compressed and length:
            file.seek(block.offset + block.header + place)
            total += max(0, _LENGTH.unpack(file.read(_LENGTH.size))[0])
    return total


def _chosen(schema: pa.Schema, columns: Collection[str], variadic: Iterator[int]) -> Iterator[int]:
    first = 0
    for field in schema:
        count = _buffers(field.type, variadic)
        if field.name in columns:
            yield from range(first, first + count)
        first += count


def _buffers(kind: pa.DataType, variadic: Iterator[int]) -> int:
    """Views have data buffers (`variadic`)."""
    if isinstance(kind, pa.BaseExtensionType):
        return _buffers(kind.storage_type, variadic)
    if pa.types.is_null(kind):
        return 0
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return 2 + next(variadic, 0)
    if pa.types.is_dictionary(kind):
        return 2
    own = next((count for is_of, count in _OWN_BUFFERS if is_of(kind)), 2)
    return own + sum(_buffers(kind.field(child).type, variadic) for child in range(kind.num_fields))


_OWN_BUFFERS = (
    (pa.types.is_run_end_encoded, 0),
    (pa.types.is_struct, 1),
    (pa.types.is_fixed_size_list, 1),
    (lambda kind: pa.types.is_union(kind) and kind.mode == "sparse", 1),
    (pa.types.is_list_view, 3),
    (pa.types.is_large_list_view, 3),
    (pa.types.is_string, 3),
    (pa.types.is_binary, 3),
    (pa.types.is_large_string, 3),
    (pa.types.is_large_binary, 3),
)
"""Buffers of a type, without those of child columns; other types have two."""


def _variadic(message: bytes, table: int) -> Iterator[int]:
    field = field_of(message, table, _BATCH_VARIADIC)
    if field:
        vector = field + unsigned(message, field)
        for index in range(unsigned(message, vector)):
            yield _LENGTH.unpack_from(message, vector + 4 + _LENGTH.size * index)[0]


def _blocks(file: BinaryIO, number: int, footer_bytes: int = FOOTER_BYTES) -> list[MessageBlock]:
    footer = _footer(file, footer_bytes)
    field = field_of(footer, unsigned(footer, 0), number)
    if not field:
        return []
    vector = field + unsigned(footer, field)
    first, count = vector + 4, unsigned(footer, vector)
    end, blocks = file.seek(0, 2), []
    for place in range(first, first + BLOCK.size * count, BLOCK.size):
        block = MessageBlock._make(BLOCK.unpack_from(footer, place))
        if min(block) < 0 or sum(block) > end:
            raise ValueError("its footer names a record batch that is not within the file")
        blocks.append(block)
    return blocks


def check_footer_size(size: int, most: int, parts: str) -> None:
    """Raises `ValueError` if a footer is too large."""
    if size > most:
        raise ValueError(
            f"its footer has {size} bytes, and may have {most}; write fewer {parts} or columns, or raise "
            "QINFER_BULK__MAX_FOOTER_BYTES"
        )


def _footer(file: BinaryIO, footer_bytes: int) -> bytes:
    end = file.seek(0, 2)
    file.seek(max(0, end - END_BYTES))
    data = file.read(min(end, END_BYTES))
    size, magic = TAIL.unpack(data[-TAIL.size :])
    if magic != _MAGIC or not 0 < size <= end - TAIL.size:
        raise ValueError("it does not end as Arrow's file format does")
    check_footer_size(size, footer_bytes, "record batches")
    if size > len(data) - TAIL.size:
        file.seek(end - TAIL.size - size)
        return file.read(size)
    return data[-TAIL.size - size : -TAIL.size]


def _length(file: BinaryIO, block: MessageBlock) -> int:
    message, batch = _header(file, block)
    field = field_of(message, batch, _BATCH_LENGTH)
    rows = struct.unpack_from("<q", message, field)[0] if field else 0
    if rows < 0:
        raise ValueError("a record batch's header is damaged")
    return int(rows)


def _header(file: BinaryIO, block: MessageBlock) -> tuple[bytes, int]:
    message = _message(file, block)
    return message, _table(message, unsigned(message, 0), _MESSAGE_HEADER)


def _message(file: BinaryIO, block: MessageBlock) -> bytes:
    if not 0 < block.header <= _MAX_HEADER_BYTES:
        raise ValueError(f"a record batch's header has {block.header} bytes")
    file.seek(block.offset)
    data = file.read(block.header)
    message = data[8:] if data.startswith(_CONTINUATION) else data[4:]
    field = field_of(message, unsigned(message, 0), _MESSAGE_BODY_LENGTH)
    body = _LENGTH.unpack_from(message, field)[0] if field else 0
    # pyarrow allocates this size before it compares the two
    if body != block.body:
        raise ValueError(f"a record batch has {block.body} bytes by the footer, {body} by its header")
    return message


def _table(message: bytes, table: int, number: int) -> int:
    field = field_of(message, table, number)
    if not field:
        raise ValueError("a record batch's header is damaged")
    return field + unsigned(message, field)


def _tables(buffer: bytes, table: int, number: int) -> Iterator[int]:
    field = field_of(buffer, table, number)
    if field:
        vector = field + unsigned(buffer, field)
        for place in range(vector + 4, vector + 4 + 4 * unsigned(buffer, vector), 4):
            yield place + unsigned(buffer, place)
