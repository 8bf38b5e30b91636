"""Footers of Parquet and Arrow files: bounded in size, and read without rows.

pyarrow needs whole record batches to count their rows. An Arrow file ends with a flatbuffer `Footer`, its length and
`ARROW1`; the footer's blocks point to flatbuffers `Message`.
"""

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.tabular.rows.arrow_schema import field_of, text_of, unsigned

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
    return data[8:] if data.startswith(_CONTINUATION) else data[4:]


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
