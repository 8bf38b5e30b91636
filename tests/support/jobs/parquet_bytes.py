"""Parquet files made byte by byte, for what no writer writes: lying page headers, delta encodings, repeated values.

The structures are those of parquet.thrift (https://github.com/apache/parquet-format), in Thrift's compact protocol.
"""

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
BYTE_ARRAY, INT64 = 6, 2
PLAIN, RLE, DELTA_BINARY_PACKED, DELTA_BYTE_ARRAY, RLE_DICTIONARY = 0, 3, 5, 7, 8
DATA_PAGE, DICTIONARY_PAGE = 0, 2
MAGIC = b"PAR1"

Fields = Mapping[int, tuple[int, Any]]


def varint(number: int) -> bytes:
    """Returns an unsigned number, seven bits a byte."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def zigzag(number: int) -> bytes:
    """Returns a signed number as a variable-length integer."""
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def thrift(fields: Fields) -> bytes:
    """Returns a structure: field number → its type and value; a list's value is its items' type and the items.

    A structure within may be given as its bytes.
    """
    found, last = b"", 0
    for number, (kind, value) in sorted(fields.items()):
        found += bytes([(number - last) << 4 | kind]) + _value(kind, value)
        last = number
    return found + b"\0"


def _value(kind: int, value: Any) -> bytes:
    if kind == BINARY:
        return varint(len(value)) + bytes(value)
    if kind == STRUCT:
        return value if isinstance(value, bytes) else thrift(value)
    if kind == LIST:
        of, items = value
        head = bytes([len(items) << 4 | of]) if len(items) < 15 else bytes([0xF0 | of]) + varint(len(items))
        return head + b"".join(_value(of, item) for item in items)
    return zigzag(value)


class Page(NamedTuple):
    """A page of a column chunk.

    Attributes:
        data: What follows its header, uncompressed.
        values: How many values its header says it has.
        encoding: How they are encoded.
        kind: Whether it is a data page or a dictionary.
        declared: The decompressed size that its header says; `None` = the true one.
        stored: The size in the file that its header says; `None` = the true one.
    """

    data: bytes
    values: int
    encoding: int = PLAIN
    kind: int = DATA_PAGE
    declared: int | None = None
    stored: int | None = None

    def whole(self) -> bytes:
        """Returns header and data."""
        header: dict[int, tuple[int, Any]] = {
            1: (I32, self.kind),
            2: (I32, len(self.data) if self.declared is None else self.declared),
            3: (I32, len(self.data) if self.stored is None else self.stored),
        }
        if self.kind == DICTIONARY_PAGE:
            header[7] = (STRUCT, {1: (I32, self.values), 2: (I32, self.encoding)})
        else:
            header[5] = (
                STRUCT,
                {1: (I32, self.values), 2: (I32, self.encoding), 3: (I32, RLE), 4: (I32, RLE)},
            )
        return thrift(header) + self.data


class Leaf(NamedTuple):
    """A column: in `schema` its elements of the schema, in depth-first order, and the pages of its one chunk."""

    path: Sequence[str]
    schema: Sequence[Fields]
    kind: int
    pages: Sequence[Page]
    codec: int = 0


def column(name: str, kind: int, pages: Sequence[Page], codec: int = 0) -> Leaf:
    """Returns a required column, such as `x`."""
    return Leaf([name], [{1: (I32, kind), 3: (I32, 0), 4: (BINARY, name.encode())}], kind, pages, codec)


def lists(name: str, kind: int, pages: Sequence[Page]) -> Leaf:
    """Returns a required column of lists of required values; its pages begin with the repetition levels."""
    schema: list[Fields] = [
        {3: (I32, 0), 4: (BINARY, name.encode()), 5: (I32, 1), 6: (I32, 3)},
        {3: (I32, 2), 4: (BINARY, b"list"), 5: (I32, 1)},
        {1: (I32, kind), 3: (I32, 0), 4: (BINARY, b"element")},
    ]
    return Leaf([name, "list", "element"], schema, kind, pages)


def parquet(rows: int, *leaves: Leaf, extra: Fields | None = None) -> bytes:
    """Returns a file of one row group.

    Args:
        rows: How many rows it says it has.
        leaves: The columns.
        extra: Fields of the footer's `FileMetaData` beside the usual, or instead of them.
    """
    data, chunks = MAGIC, []
    for leaf in leaves:
        begin, written = len(data), b"".join(page.whole() for page in leaf.pages)
        data += written
        dictionary = leaf.pages[0].kind == DICTIONARY_PAGE
        meta: dict[int, tuple[int, Any]] = {
            1: (I32, leaf.kind),
            2: (LIST, (I32, [PLAIN, RLE, RLE_DICTIONARY])),
            3: (LIST, (BINARY, [part.encode() for part in leaf.path])),
            4: (I32, leaf.codec),
            5: (I64, sum(page.values for page in leaf.pages if page.kind == DATA_PAGE)),
            6: (I64, len(written)),
            7: (I64, len(written)),
            9: (I64, begin + (len(leaf.pages[0].whole()) if dictionary else 0)),
        }
        if dictionary:
            meta[11] = (I64, begin)
        chunks.append({2: (I64, begin), 3: (STRUCT, meta)})
    root: Fields = {4: (BINARY, b"schema"), 5: (I32, len({leaf.path[0] for leaf in leaves}))}
    footer = thrift(
        {
            1: (I32, 1),
            2: (LIST, (STRUCT, [root, *(element for leaf in leaves for element in leaf.schema)])),
            3: (I64, rows),
            4: (LIST, (STRUCT, [{1: (LIST, (STRUCT, chunks)), 2: (I64, len(data)), 3: (I64, rows)}])),
            **(extra or {}),
        }
    )
    return data + footer + struct.pack("<I", len(footer)) + MAGIC


def plain(*values: bytes) -> bytes:
    """Returns byte arrays in the encoding PLAIN."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def run(count: int, index: int, width: int = 1) -> bytes:
    """Returns dictionary indices that are all the same: the bit width, and one run."""
    return bytes([width]) + varint(count << 1) + index.to_bytes((width + 7) // 8, "little")


def levels(*runs: tuple[int, int]) -> bytes:
    """Returns repetition or definition levels of one bit: (count, level) for each run."""
    data = b"".join(varint(count << 1) + bytes([level]) for count, level in runs)
    return struct.pack("<I", len(data)) + data


def delta(values: Sequence[int]) -> bytes:
    """Returns numbers in the encoding DELTA_BINARY_PACKED, each difference in 32 bits."""
    block, minis = 128, 4
    found = varint(block) + varint(minis) + varint(len(values)) + zigzag(values[0] if values else 0)
    deltas = [after - before for before, after in pairwise(values)]
    for begin in range(0, len(deltas), block):
        own = deltas[begin : begin + block]
        least = min(own)
        found += zigzag(least) + bytes([32] * minis)
        padded = [value - least for value in own] + [0] * (block - len(own))
        found += struct.pack(f"<{block}I", *padded)
    return found
