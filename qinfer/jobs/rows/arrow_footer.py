"""How many rows each record batch of an Arrow file has, of its footer and the batches' headers.

pyarrow tells it only by reading the batches whole. The layout is that of Arrow's columnar format: the file ends with a
flatbuffer `Footer`, that footer's length and `ARROW1`; each of the footer's blocks points to a flatbuffer `Message`.
"""

import struct
from typing import BinaryIO

_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")
_BLOCK = struct.Struct("<qi4xq")  # offset, length of the message's metadata, length of its body
_CONTINUATION = b"\xff\xff\xff\xff"
_MAX_FOOTER_BYTES = 256 * 2**20

_FOOTER_BATCHES = 3  # Footer: version, schema, dictionaries, recordBatches
_MESSAGE_HEADER = 2  # Message: version, the header's type, the header
_BATCH_LENGTH = 0  # RecordBatch: length, …


def batch_rows(file: BinaryIO) -> tuple[int, ...]:
    """Returns the rows of each record batch.

    Args:
        file: A file in Arrow's file format.

    Raises:
        ValueError: It is none, or damaged.
    """
    try:
        return tuple(_length(file, offset, size) for offset, size in _blocks(file))
    except (struct.error, IndexError) as error:
        raise ValueError(f"its footer is damaged: {error}") from None


def _blocks(file: BinaryIO) -> list[tuple[int, int]]:
    """Reads where the record batches are."""
    end = file.seek(0, 2)
    file.seek(max(0, end - _TAIL.size))
    size, magic = _TAIL.unpack(file.read(_TAIL.size))
    if magic != _MAGIC or not 0 < size <= min(end, _MAX_FOOTER_BYTES):
        raise ValueError("it does not end as Arrow's file format does")
    file.seek(end - _TAIL.size - size)
    footer = file.read(size)
    field = _field(footer, _root(footer), _FOOTER_BATCHES)
    if not field:
        return []
    vector = field + _unsigned(footer, field)
    first, count = vector + 4, _unsigned(footer, vector)
    return [
        (offset, length)
        for offset, length, _ in (_BLOCK.unpack_from(footer, first + _BLOCK.size * i) for i in range(count))
    ]


def _length(file: BinaryIO, offset: int, size: int) -> int:
    """Reads a record batch's number of rows."""
    if not 0 < size <= _MAX_FOOTER_BYTES:
        raise ValueError(f"a record batch's header has {size} bytes")
    file.seek(offset)
    data = file.read(size)
    message = data[8:] if data.startswith(_CONTINUATION) else data[4:]
    header = _field(message, _root(message), _MESSAGE_HEADER)
    batch = header + _unsigned(message, header)
    field = _field(message, batch, _BATCH_LENGTH)
    rows = struct.unpack_from("<q", message, field)[0] if field else 0
    if not header or rows < 0:
        raise ValueError("a record batch's header is damaged")
    return int(rows)


def _root(buffer: bytes) -> int:
    return _unsigned(buffer, 0)


def _field(buffer: bytes, table: int, number: int) -> int:
    """Returns where a table's field is; 0 = it has its default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    size = struct.unpack_from("<H", buffer, vtable)[0]
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", buffer, vtable + place)[0] if place < size else 0
    return table + offset if offset else 0


def _unsigned(buffer: bytes, position: int) -> int:
    value: int = struct.unpack_from("<I", buffer, position)[0]
    return value
