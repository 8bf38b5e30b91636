"""How many rows each record batch of an Arrow file has, of its footer and the batches' headers.

pyarrow tells it only by reading the batches whole. The layout is that of Arrow's columnar format: the file ends with a
flatbuffer `Footer`, that footer's length and `ARROW1`; each of the footer's blocks points to a flatbuffer `Message`.
"""

import struct
from typing import BinaryIO

_MAGIC = b"ARROW1"
TAIL = struct.Struct("<i6s")
BLOCK = struct.Struct("<qi4xq")  # offset, length of the message's metadata, length of its body
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
    file.seek(max(0, end - TAIL.size))
    size, magic = TAIL.unpack(file.read(TAIL.size))
    if magic != _MAGIC or not 0 < size <= min(end, _MAX_FOOTER_BYTES):
        raise ValueError("it does not end as Arrow's file format does")
    file.seek(end - TAIL.size - size)
    footer = file.read(size)
    field = field_of(footer, unsigned(footer, 0), _FOOTER_BATCHES)
    if not field:
        return []
    vector = field + unsigned(footer, field)
    first, count = vector + 4, unsigned(footer, vector)
    return [
        (offset, length)
        for offset, length, _ in (BLOCK.unpack_from(footer, first + BLOCK.size * i) for i in range(count))
    ]


def _length(file: BinaryIO, offset: int, size: int) -> int:
    """Reads a record batch's number of rows."""
    if not 0 < size <= _MAX_FOOTER_BYTES:
        raise ValueError(f"a record batch's header has {size} bytes")
    file.seek(offset)
    data = file.read(size)
    message = data[8:] if data.startswith(_CONTINUATION) else data[4:]
    header = field_of(message, unsigned(message, 0), _MESSAGE_HEADER)
    batch = header + unsigned(message, header)
    field = field_of(message, batch, _BATCH_LENGTH)
    rows = struct.unpack_from("<q", message, field)[0] if field else 0
    if not header or rows < 0:
        raise ValueError("a record batch's header is damaged")
    return int(rows)


def field_of(buffer: bytes, table: int, number: int) -> int:
    """Returns where the field of a flatbuffer's table is; 0 = it has its default.

    Raises:
        ValueError: The flatbuffer points outside.
        struct.error: So it does, or it is cut off.
    """
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise ValueError("a flatbuffer points outside")
    size = struct.unpack_from("<H", buffer, vtable)[0]
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", buffer, vtable + place)[0] if place < size else 0
    return table + offset if offset else 0


def unsigned(buffer: bytes, position: int) -> int:
    """Returns an unsigned number of a flatbuffer; at 0 it leads to the root table."""
    value: int = struct.unpack_from("<I", buffer, position)[0]
    return value
