"""The longest row of a Parquet column of lists, from the repetition levels of its pages.

One row may have all values of a column chunk, which page headers do not show. A row begins at repetition level 0.
Levels are runs and bit-packed groups (https://parquet.apache.org/docs/file-format/data-pages/encodings/#RLE), mostly of
few bytes per row, where plain integers are faster than arrays.
"""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from qinfer.tabular.batches import Mask
from qinfer.tabular.rows.parquet_pages import PageData, varint

_LENGTH = struct.Struct("<I")
_BIG_LENGTHS = struct.Struct(">II")  # Hadoop's LZ4 block: decompressed, compressed
_SHORT_BYTES = 16


class RowLengths:
    """Rows of a column chunk; `longest` is the most values of a row."""

    def __init__(self, max_level: int) -> None:
        self.longest = 0
        self._bits = max_level.bit_length()
        self._current = 0

    def add(self, page: PageData, codec: str) -> None:
        """Adds a data page, compressed with Parquet's `codec`."""
        left = page.values
        for levels, values in _runs(_levels_of(page, codec), self._bits):
            count = min(values, left)
            if isinstance(levels, int):
                self._add_run(levels, count)
            elif isinstance(levels, bytes):
                self._add_bits(levels, count)
            else:
                self._add_group(levels[:count])
            left -= count
            if not left:
                return
        if left:
            raise ValueError("a page has fewer repetition levels than values")

    def _add_run(self, level: int, count: int) -> None:
        self._current = self._current + count if level else 1
        self.longest = max(self.longest, self._current)

    def _add_bits(self, levels: bytes, count: int) -> None:
        begins = ~int.from_bytes(levels, "little") & ((1 << count) - 1)
        at = 0
        while begins:
            first = (begins & -begins).bit_length() - 1
            self.longest = max(self.longest, self._current + first - at)
            self._current, at = 0, first
            begins &= begins - 1
        self._add_run(1, count - at)

    def _add_group(self, levels: Mask) -> None:
        begins = np.flatnonzero(~levels)
        if not len(begins):
            self._add_run(1, len(levels))
            return
        within = int(np.diff(begins).max()) if len(begins) > 1 else 0
        last = len(levels) - int(begins[-1])
        self.longest = max(self.longest, self._current + int(begins[0]), within, last)
        self._current = last


def _levels_of(page: PageData, codec: str) -> bytes:
    if page.levels_bytes >= 0:  # version 2: first, uncompressed
        return page.data[: page.levels_bytes]
    data = _decompressed(page, codec)
    size = _LENGTH.unpack_from(data)[0]
    return data[_LENGTH.size : _LENGTH.size + size]


def _decompressed(page: PageData, codec: str) -> bytes:
    if codec == "UNCOMPRESSED":
        return page.data
    if codec != "LZ4":
        found: bytes = pa.decompress(page.data, page.decompressed_bytes, codec=codec.lower(), asbytes=True)
        return found
    try:
        raw: bytes = pa.decompress(page.data, page.decompressed_bytes, codec="lz4_raw", asbytes=True)
        return raw
    except (pa.ArrowException, OSError):
        size, _ = _BIG_LENGTHS.unpack_from(page.data)
        if size > page.decompressed_bytes:
            raise ValueError("a page's first block is larger than the page") from None
        block = page.data[_BIG_LENGTHS.size :]
        first: bytes = pa.decompress(block, size, codec="lz4_raw", asbytes=True)
        return first


def _runs(data: bytes, bits: int) -> Iterator[tuple[Any, int]]:
    """Values are one level, or flags (array or bits) of levels above 0."""
    at, width = 0, (bits + 7) // 8
    while at < len(data):
        head, at = varint(data, at)
        if not head & 1:
            yield int.from_bytes(data[at : at + width], "little"), head >> 1
            at += width
            continue
        size = (head >> 1) * bits
        if bits == 1 and size <= _SHORT_BYTES:
            yield data[at : at + size], min(size, len(data) - at) * 8
            at += size
            continue
        packed = np.frombuffer(data, np.uint8, count=min(size, len(data) - at), offset=at)
        flags = np.unpackbits(packed, bitorder="little")
        levels: Mask = np.any(flags[: len(flags) // bits * bits].reshape(-1, bits), axis=1)
        yield levels, len(levels)
        at += size
