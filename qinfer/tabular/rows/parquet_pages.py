"""Reads and checks the sizes that a Parquet file declares, before anything is allocated for them.

pyarrow allocates a page's declared size before it reads the page, so all headers of a column chunk are checked first.
They are Thrift structures in the compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), defined in parquet.thrift
(https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift).
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.tabular.rows.arrow_footer import END_BYTES, FOOTER_BYTES, check_footer_size
from qinfer.tabular.rows.arrow_schema import MAX_METADATA_BYTES, SchemaTooLarge, check_schema_text
from qinfer.tabular.rows.parquet_instants import ARROW_SCHEMA

MAX_PAGES = 100_000
PADDING_BYTES = 100
"""Old parquet-mr omits the dictionary's header from a chunk's size (PARQUET-816)."""

_ITEMS = 100_000
_SMALL_FOOTER_BYTES = 128 * 1024  # too small to take much memory
_ITEM_BYTES = (200, 800)  # of a schema element or row group, of a column chunk, in Arrow
_INNER_ITEM_BYTES = 32
_NEXT_IS_BINARY, _STOP = b"\x18", b"\0"
_LONG_TEXT = 4096
_TAIL = struct.Struct("<I4s")
_MAGIC = (b"PAR1", b"PARE")
_FIRST_READ_BYTES = 512
_MAX_HEADER_BYTES = 2**20

_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_TYPE, _DECOMPRESSED, _COMPRESSED = 1, 2, 3
_HEADERS = {_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}
_VALUES = 1  # of all three
_LEVELS_BYTES = 6  # DataPageHeaderV2: repetition_levels_byte_length
_ENCODINGS = {_DATA_PAGE: 2, _DICTIONARY_PAGE: 2, _DATA_PAGE_V2: 4}
_PLAIN_DICTIONARY, _DELTA_BYTE_ARRAY, _RLE_DICTIONARY = 2, 7, 8

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_LONG_LIST = 15  # a length follows
_MAX_DEPTH = 8

ReadAt = Callable[[int, int], bytes]
"""Reads `size` bytes at an offset, fewer at the end."""


class ChunkPages(NamedTuple):
    """Decompressed pages; `value_bytes` is for pages without indices."""

    values: int = 0
    largest_bytes: int = 0
    dictionary_bytes: int = 0
    dictionary_values: int = 0
    value_bytes: float = 0.0
    has_indices: bool = False
    begins_with_indices: bool = False

    def with_page(self, header: dict[int, Any]) -> "ChunkPages":
        """Adds a page."""
        kind, size = header.get(_TYPE, -1), header[_DECOMPRESSED]
        if kind not in _HEADERS:  # readers skip index pages
            return self
        own = header.get(_HEADERS[kind])
        if not isinstance(own, dict):
            raise ValueError("a page's header is incomplete")
        values, encoding = own.get(_VALUES, -1), own.get(_ENCODINGS[kind])
        if not isinstance(values, int) or values < 0:
            raise ValueError(f"a page's header says that it has {values!r} values")
        if kind == _DICTIONARY_PAGE:
            return self._replace(dictionary_bytes=size, dictionary_values=values)
        pages = self._replace(values=self.values + values, largest_bytes=max(self.largest_bytes, size))
        if encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
            return pages._replace(has_indices=True, begins_with_indices=self.begins_with_indices or not self.values)
        # Each value may share the previous one's bytes.
        each = float(size) if encoding == _DELTA_BYTE_ARRAY else size / max(values, 1)
        return pages._replace(value_bytes=max(self.value_bytes, each))


def read_metadata(content: BinaryIO | Any, footer_bytes: int = FOOTER_BYTES) -> pq.FileMetaData:
    """Reads an untrusted footer, which may take `footer_bytes` eightfold."""
    end = content.seek(0, 2)
    content.seek(max(0, end - END_BYTES))
    data = content.read(min(end, END_BYTES))
    if len(data) < _TAIL.size or data[-len(_MAGIC[0]) :] not in _MAGIC:
        raise ValueError("it does not end as Parquet files do")
    size, _ = _TAIL.unpack(data[-_TAIL.size :])
    check_footer_size(size, footer_bytes, "row groups")
    if size > len(data) - _TAIL.size:
        content.seek(max(0, end - _TAIL.size - size))
        data = content.read(size + _TAIL.size)
    _check_metadata(data[-_TAIL.size - size : -_TAIL.size], footer_bytes)
    footer = pa.BufferReader(pa.py_buffer(data).slice(len(data) - _TAIL.size - size))  # no second request to the store
    file = pq.ParquetFile(
        footer, pre_buffer=False, thrift_string_size_limit=footer_bytes, thrift_container_size_limit=_ITEMS
    )
    return file.metadata


def _check_metadata(footer: bytes, footer_bytes: int) -> None:
    """Refuses a footer that takes too much memory: a column chunk of three bytes takes 800."""
    items = _Items(footer, MAX_METADATA_BYTES * footer_bytes // FOOTER_BYTES)
    try:
        schemas = _arrow_schemas(footer)
        if schemas is None or len(footer) > _SMALL_FOOTER_BYTES:
            items.of_structure(0)
    except IndexError:
        raise ValueError("its footer is cut off") from None
    for text in schemas or ():
        check_schema_text(text)
    for text in items.texts if schemas is None else ():
        try:
            check_schema_text(text)
        except SchemaTooLarge:
            raise
        except ValueError:  # no schema
            continue


def _arrow_schemas(footer: bytes) -> list[bytes] | None:
    """Returns the schemas that Arrow has stored; `None` if a value may not follow its key."""
    found = []
    place = footer.find(ARROW_SCHEMA)
    while place >= 0:
        place += len(ARROW_SCHEMA)
        if footer[place : place + 1] != _NEXT_IS_BINARY:
            return None
        size, begin = varint(footer, place + 1)
        if footer[begin + size : begin + size + 1] != _STOP:
            return None
        found.append(footer[begin : begin + size])
        place = footer.find(ARROW_SCHEMA, place)
    return found


class _Items:
    """Adds up the memory of a footer's list items; collects `texts` that may be a large schema."""

    def __init__(self, data: bytes, limit_bytes: int) -> None:
        self.texts: list[bytes] = []
        self._data = data
        self._left_bytes = limit_bytes

    def of_structure(self, at: int, depth: int = 0) -> int:
        data = self._data
        while head := data[at]:
            at += 1
            if not head >> 4:
                _, at = varint(data, at)
            at = self._of_value(at, head & 15, depth)
        return at + 1

    def _of_value(self, at: int, kind: int, depth: int) -> int:
        if kind == _STRUCT and depth < _MAX_DEPTH:
            return self.of_structure(at, depth)
        if kind not in (_LIST, _SET) or depth >= _MAX_DEPTH:
            end = _read_value(self._data, at, kind, 0)[1]
            if kind == _BINARY and end - at > _LONG_TEXT:
                self.texts.append(self._data[varint(self._data, at)[1] : end])
            return end
        head = self._data[at]
        count, at = (head >> 4, at + 1) if head >> 4 < _LONG_LIST else varint(self._data, at + 1)
        self._left_bytes -= count * (_ITEM_BYTES[depth] if depth < len(_ITEM_BYTES) else _INNER_ITEM_BYTES)
        if self._left_bytes < 0:
            raise ValueError(
                "its footer takes too much memory; write fewer row groups, or files of fewer columns, or raise "
                "QINFER_BULK__MAX_FOOTER_BYTES"
            )
        for _ in range(count):
            at = at + 1 if head & 15 in (_TRUE, _FALSE) else self._of_value(at, head & 15, depth + 1)
        return at


class PageData(NamedTuple):
    """A stored page; `levels_bytes` -1 = a length precedes the repetition levels."""

    data: bytes
    decompressed_bytes: int
    values: int
    levels_bytes: int


def read_pages(read_at: ReadAt, chunk: Any) -> ChunkPages:
    """Reads and checks a chunk's page headers."""
    found = ChunkPages()
    for header, _ in _headers(read_at, chunk):
        found = found.with_page(header)
    return found


def data_pages(read_at: ReadAt, chunk: Any) -> Iterator[PageData]:
    """Reads the data pages of a checked chunk."""
    for header, place in _headers(read_at, chunk):
        kind = header[_TYPE]
        if kind in (_DATA_PAGE, _DATA_PAGE_V2):
            own = header[_HEADERS[kind]]
            levels_bytes = own.get(_LEVELS_BYTES, 0) if kind == _DATA_PAGE_V2 else -1
            data = bytes(read_at(header[_COMPRESSED], place))
            yield PageData(data, header[_DECOMPRESSED], own[_VALUES], levels_bytes)


def chunk_begin(chunk: Any) -> int:
    """Returns the offset of a column chunk."""
    dictionary = chunk.dictionary_page_offset
    return int(dictionary if dictionary and 0 < dictionary < chunk.data_page_offset else chunk.data_page_offset)


def _headers(read_at: ReadAt, chunk: Any) -> Iterator[tuple[dict[int, Any], int]]:
    place = chunk_begin(chunk)
    end = place + chunk.total_compressed_size
    values = count = 0
    while values < chunk.num_values and place < end:
        header, size = _header(read_at, place)
        stored, decompressed = header.get(_COMPRESSED, -1), header.get(_DECOMPRESSED, -1)
        if not (isinstance(stored, int) and 0 <= stored <= end + PADDING_BYTES - place - size):
            raise ValueError(f"a page's header says that it has {stored!r} bytes, more than its column chunk")
        if not (isinstance(decompressed, int) and 0 <= decompressed <= chunk.total_uncompressed_size):
            raise ValueError(
                f"a page's header says that it becomes {decompressed!r} bytes; the footer says "
                f"{chunk.total_uncompressed_size} for all pages of the column chunk"
            )
        count += 1
        if count > MAX_PAGES:
            raise ValueError(f"a column chunk has more than {MAX_PAGES} pages; write larger ones")
        yield header, place + size
        kind = header.get(_TYPE)
        if kind in (_DATA_PAGE, _DATA_PAGE_V2):
            values += header[_HEADERS[kind]][_VALUES]
        place += size + stored


def _header(read_at: ReadAt, place: int) -> tuple[dict[int, Any], int]:
    size = _FIRST_READ_BYTES
    while True:
        data = read_at(size, place)
        try:
            return _structure(data, 0, _MAX_DEPTH)
        except IndexError:
            if len(data) < size or size >= _MAX_HEADER_BYTES:
                raise ValueError("a page's header is cut off, or too large") from None
            size = min(size * 16, _MAX_HEADER_BYTES)


def _structure(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    found: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            coded, at = varint(data, at)
            number = coded >> 1 ^ -(coded & 1)
        found[number], at = _read_value(data, at, head & 15, depth)
    return found, at + 1


def _read_value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        coded, at = varint(data, at)
        return coded >> 1 ^ -(coded & 1), at
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind == _STRUCT and depth:
        return _structure(data, at, depth - 1)
    if kind == _BINARY:
        size, at = varint(data, at)
        return None, _within(data, at + size)
    if kind in (_BYTE, _DOUBLE):
        return None, _within(data, at + (1 if kind == _BYTE else 8))
    if kind in (_LIST, _SET) and depth:
        return None, _after_list(data, at, depth - 1)
    raise ValueError("a page's header is no Thrift structure")


def _after_list(data: bytes, at: int, depth: int) -> int:
    head = data[at]
    count, at = (head >> 4, at + 1) if head >> 4 < _LONG_LIST else varint(data, at + 1)
    for _ in range(count):
        # in a list, a boolean is a byte
        at = _within(data, at + 1) if head & 15 in (_TRUE, _FALSE) else _read_value(data, at, head & 15, depth)[1]
    return at


def _within(data: bytes, at: int) -> int:
    if at > len(data):
        raise IndexError(at)
    return at


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads a ULEB128 number of up to 64 bits, and its end."""
    number = shift = 0
    while (byte := data[at]) & 0x80:
        number |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError("a page's header has a number of more than 64 bits")
    return number | byte << shift, at + 1
