"""Reads the rows of a Parquet file in bounded memory, regardless of its layout.

Pages are read while they are decoded, or fetched before (`parquet_windows`). Page headers determine how many rows are
decoded at a time. A column of byte arrays whose dictionary has long values is read as indices and dictionary, and split
before rows get values (`decoded_sizes`).
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from qinfer.tabular.rows.parquet_instants import INT96, arrow_schema, exact
from qinfer.tabular.rows.parquet_levels import RowLengths
from qinfer.tabular.rows.parquet_pages import ChunkPages, ReadAt, data_pages, read_metadata, read_pages
from qinfer.tabular.rows.parquet_windows import Windows, spans_of
from qinfer.tabular.rows.source import ReadLimits, SourceBroken
from qinfer.tabular.spec import Range

_MOST_ROWS = 65_536
_MOST_TEXT_ROWS = 8192  # a dictionary may be much smaller than the values
_FEW_ROWS = 256  # fewer rows are slow: indices are read instead of values

_BUFFERS_BYTES = 16 * 2**20
_FAR_BUFFERS_BYTES = 128 * 2**20
_LEAST_BUFFER_BYTES = 64 * 1024
_MOST_BUFFER_BYTES = 2**20
_FAR_LEAST_BUFFER_BYTES = 2**20
_FAR_MOST_BUFFER_BYTES = 16 * 2**20
_FETCHED_BYTES = 96 * 2**20  # compressed row groups up to this are fetched before decoding
_THREADS = 16
_PEEKED_ROWS = 1024

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, INT96: 24}  # INT96 is read twice
_LEVELS_BYTES = 4
_TEXT_BYTES = 16  # in a decoder: pointer and length
_INDEX_BYTES = 48  # rebuilt, with its hash


class _Leaf(NamedTuple):
    """A leaf column in a row group.

    Attributes:
        width: The bytes of each value; 0 = they differ.
        max_level: The highest repetition level; 0 = each row has one value.
        longest_bytes: The length of the dictionary's longest value, unless all are short.
        longest_row: The most values of a row, unless all rows are short.
        is_distinct: The dictionary has no value twice, as pyarrow's indices require.
    """

    path: str
    kind: str
    width: int
    max_level: int
    pages: ChunkPages
    longest_bytes: int = 0
    longest_row: int = 0
    is_distinct: bool = True

    @property
    def is_text(self) -> bool:
        return self.kind == "BYTE_ARRAY" and self.pages.has_indices

    def value_bytes(self, *, as_indices: bool) -> float:
        each = self.width or max(self.pages.value_bytes, 0 if as_indices else self.longest_bytes) + _LEVELS_BYTES
        return each + _LEVELS_BYTES

    def row_bytes(self, rows: int, *, as_indices: bool) -> float:
        """Returns the bytes of a row; for short lists, of an average one."""
        if not self.max_level:
            return self.value_bytes(as_indices=as_indices)
        values = self.longest_row or max(self.pages.values / max(rows, 1), 1.0)
        return self.value_bytes(as_indices=as_indices) * values

    def held_bytes(self, *, as_indices: bool) -> int:
        """Returns the bytes of a page, and of the dictionary in stored and decoded form."""
        pages = self.pages
        copies, entry = (4, _INDEX_BYTES) if as_indices else (2, _TEXT_BYTES)
        return self.width + pages.largest_bytes + copies * pages.dictionary_bytes + entry * pages.dictionary_values


class _Reading(NamedTuple):
    rows: int
    indices: tuple[str, ...]


class ParquetGroups:
    """The row groups of a Parquet file; closes `content` with itself.

    Empty `wanted` = all row groups.
    """

    def __init__(
        self,
        content: Any,
        names: Sequence[str],
        url: str,
        *,
        far: bool,
        limits: ReadLimits,
        wanted: Sequence[int] = (),
    ) -> None:
        self._content, self._names, self._url = content, list(names), url
        self._far = far and not isinstance(content, pa.NativeFile)  # which is in memory
        self._rows_bytes, self._page_bytes = limits.rows_bytes, limits.page_bytes
        self._metadata = read_metadata(content, limits.footer_bytes)
        self.schema: pa.Schema = arrow_schema(content, self._metadata)
        self._leaves = _leaves(self._metadata, self._names)
        self._int96 = _int96(self._metadata, self._names, self._leaves)
        groups = range(self._metadata.num_row_groups)
        self._windows = self._fetched(set(wanted).intersection(groups) if wanted else groups) if self._far else None

    def batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        """Reads from the group's first row; byte arrays may be indices and dictionary."""
        group = wanted.row_group
        if not 0 <= group < self._metadata.num_row_groups:
            raise SourceBroken(f"'{self._url}' has no row group {group}")
        if self._windows is not None:
            self._windows.prepare(group)
        reading = self._reading(group)
        file = self._open_file(reading.indices)
        has_indices = any("dictionary<" in str(kind) for kind in file.schema_arrow.types)
        instants = self._open_file((), "us").iter_batches(reading.rows, [group], self._int96, use_threads=False)
        for record in file.iter_batches(reading.rows, [group], self._names, use_threads=False):
            if has_indices:
                record.validate(full=True)  # pyarrow does not check indices
            yield self._exact(record, next(instants)) if self._int96 else record

    def close(self) -> None:
        """Closes the file."""
        self._content.close()

    def _exact(self, record: pa.RecordBatch, coarse: pa.RecordBatch) -> pa.RecordBatch:
        columns, problem = exact(record.select(coarse.schema.names), coarse, self.schema)
        if problem:
            raise SourceBroken(f"'{self._url}': {problem}")
        for name, column in columns.items():
            record = record.set_column(record.schema.get_field_index(name), name, column)
        return record

    def _open_file(self, indices: Sequence[str], unit: str | None = None) -> pq.ParquetFile:
        return pq.ParquetFile(
            self._content,
            metadata=self._metadata,
            read_dictionary=list(indices) or None,
            coerce_int96_timestamp_unit=unit,
            pre_buffer=False,
            buffer_size=0 if self._windows else _buffer_bytes(len(self._leaves), far=self._far),
        )

    def _fetched(self, groups: Iterable[int]) -> Windows | None:
        size = self._content.seek(0, 2)
        spans = {group: spans_of(self._metadata.row_group(group), self._leaves, size) for group in sorted(groups)}
        if any(sum(span.end - span.begin for span in own) > _FETCHED_BYTES for own in spans.values()):
            return None
        self._content = windows = Windows(self._content, _read_at(self._content), spans)
        return windows

    def _reading(self, group: int) -> _Reading:
        rows = max(1, int(self._metadata.row_group(group).num_rows))
        leaves = self._pages_of(group)
        self._check_held(sum(leaf.held_bytes(as_indices=False) for leaf in leaves))
        most = _MOST_TEXT_ROWS if any(leaf.is_text for leaf in leaves) else _MOST_ROWS
        enough = self._rows_bytes / max(1, sum(leaf.is_text for leaf in leaves)) / _FEW_ROWS
        measured = [self._with_longest(leaf, group, rows, most) for leaf in leaves]
        long = {leaf.path for leaf in measured if leaf.row_bytes(rows, as_indices=False) > enough and leaf.is_text}
        if doubled := next((one for one in measured if one.path in long and not one.is_distinct), None):
            raise SourceBroken(
                f"'{self._url}' has a dictionary of column '{doubled.path}' with a value in it twice, and long values; "
                "write each value once, or without a dictionary"
            )
        self._check_held(sum(leaf.held_bytes(as_indices=leaf.path in long) for leaf in measured))
        measured = [
            self._with_longest_row(leaf, number, group, as_indices=leaf.path in long)
            for number, leaf in zip(self._leaves, measured, strict=True)
        ]
        row_bytes = sum(leaf.row_bytes(rows, as_indices=leaf.path in long) for leaf in measured)
        return _Reading(int(max(1, min(most, self._rows_bytes // max(1.0, row_bytes)))), tuple(long))

    def _check_held(self, held_bytes: int) -> None:
        if held_bytes > self._page_bytes:
            raise SourceBroken(
                f"the pages of '{self._url}' take {held_bytes} bytes at once when they are decompressed, one of each "
                f"column that the job reads, and may take {self._page_bytes}; write smaller pages and "
                "dictionaries, or raise QINFER_BULK__MAX_READ_BYTES"
            )

    def _pages_of(self, group: int) -> list[_Leaf]:
        read_at, whole = _read_at(self._content), self._metadata.row_group(group)

        def leaf_of(number: int) -> _Leaf:
            column, chunk = self._metadata.schema.column(number), whole.column(number)
            kind = column.physical_type
            width = column.length if kind == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS.get(kind, 0)
            return _Leaf(column.path, kind, width, column.max_repetition_level, read_pages(read_at, chunk))

        if not self._far or self._windows:
            return [leaf_of(number) for number in self._leaves]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="qinfer-pages") as pool:
            return list(pool.map(leaf_of, self._leaves))

    def _with_longest(self, leaf: _Leaf, group: int, rows: int, most: int) -> _Leaf:
        """Assumes the worst of a small dictionary."""
        pages = leaf.pages
        count = pages.values if leaf.max_level else min(rows, most)
        if not leaf.is_text or count * pages.dictionary_bytes <= self._rows_bytes:
            return leaf._replace(longest_bytes=pages.dictionary_bytes if leaf.is_text else 0)
        self._check_held(leaf.held_bytes(as_indices=True))
        values = self._dictionary_of(leaf, group) if pages.begins_with_indices else None
        if values is None:
            return leaf._replace(longest_bytes=pages.dictionary_bytes)
        longest = pc.max(pc.binary_length(values)).as_py() or 0
        return leaf._replace(longest_bytes=longest, is_distinct=len(values) >= pages.dictionary_values)

    def _with_longest_row(self, leaf: _Leaf, number: int, group: int, *, as_indices: bool) -> _Leaf:
        """Refuses too long rows; small column chunks are not measured."""
        each = leaf.value_bytes(as_indices=as_indices)
        if not leaf.max_level or each * leaf.pages.values <= self._page_bytes / 2:
            return leaf
        chunk = self._metadata.row_group(group).column(number)
        lengths = RowLengths(leaf.max_level)
        for page in data_pages(_read_at(self._content), chunk):
            lengths.add(page, chunk.compression)
            if lengths.longest * each > self._page_bytes:
                raise SourceBroken(
                    f"a row of '{self._url}' has {lengths.longest} values or more in column '{leaf.path}', which take "
                    f"more than {self._page_bytes} bytes; write shorter lists, or raise QINFER_BULK__MAX_READ_BYTES"
                )
        return leaf._replace(longest_row=lengths.longest)

    def _dictionary_of(self, leaf: _Leaf, group: int) -> pa.Array | None:
        for record in self._open_file([leaf.path]).iter_batches(_PEEKED_ROWS, [group], [leaf.path], use_threads=False):
            values = _dictionary_in(record.column(0))
            if values is not None and len(values):
                return values
        return None


def _dictionary_in(array: pa.Array) -> pa.Array | None:
    if isinstance(array, pa.DictionaryArray):
        return array.dictionary
    if pa.types.is_struct(array.type):
        return next((found for n in range(array.type.num_fields) if (found := _dictionary_in(array.field(n)))), None)
    if pa.types.is_map(array.type):
        keys = _dictionary_in(array.keys)
        return keys if keys is not None else _dictionary_in(array.items)
    return _dictionary_in(array.values) if pa.types.is_nested(array.type) else None


def _read_at(content: Any) -> ReadAt:
    if hasattr(content, "read_at"):
        return lambda size, place: bytes(content.read_at(size, place))
    lock = Lock()

    def read(size: int, place: int) -> bytes:
        with lock:
            content.seek(place)
            return bytes(content.read(size))

    return read


def _leaves(metadata: Any, names: Sequence[str]) -> list[int]:
    wanted = set(names)
    return [leaf for leaf in range(metadata.num_columns) if wanted.intersection(_prefixes(metadata, leaf))]


def _int96(metadata: Any, names: Sequence[str], leaves: Sequence[int]) -> list[str]:
    found = [_prefixes(metadata, leaf) for leaf in leaves if metadata.schema.column(leaf).physical_type == INT96]
    return [name for name in names if any(name in prefixes for prefixes in found)]


def _prefixes(metadata: Any, leaf: int) -> set[str]:
    parts = metadata.schema.column(leaf).path.split(".")
    return {".".join(parts[: end + 1]) for end in range(len(parts))}


def _buffer_bytes(columns: int, *, far: bool) -> int:
    whole = _FAR_BUFFERS_BYTES if far else _BUFFERS_BYTES
    least = _FAR_LEAST_BUFFER_BYTES if far else _LEAST_BUFFER_BYTES
    most = _FAR_MOST_BUFFER_BYTES if far else _MOST_BUFFER_BYTES
    return max(least, min(most, whole // max(1, columns)))
