"""One open input file of a shard: its rows as Arrow batches, in bounded memory.

Rows are split before dictionaries, run lengths and other types are decoded, so that decoded rows are bounded, too.

Rows of Parquet are read in few row batches at a time, fewer where they take too much memory. The process has a memory
limit, since a small file may become gigabytes. Pages are read while they are decoded. A read of a store takes tens of
milliseconds, and may be billed. So neighbouring column chunks of a remote file are fetched together as a window before
they are decoded, and the next window is fetched meanwhile.
"""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.storage.store import PlacedFile
from qinfer.tabular.batches import FileRows, cut
from qinfer.tabular.footers import INT96, arrow_schema, exact, open_arrow, read_metadata
from qinfer.tabular.schemas import Fields, as_read, cast, common_field, pick, pruned, select
from qinfer.tabular.source import FileFormat, ReadLimits, SourceBroken, is_text
from qinfer.tabular.spec import Csv, Range
from qinfer.tabular.text_rows import FAULT, text_batches
from qinfer.tabular.text_streams import TextFormat, TextStream

_PADDING_BYTES = 100  # old parquet-mr omits the dictionary's header from a chunk's size (PARQUET-816)
_MOST_BYTES = 48 * 2**20  # unless one chunk is larger
_SMALL_GAP_BYTES = 256 * 1024  # faster than another read
_MOST_GAP_BYTES = 4 * 2**20
_FETCHES = 16  # fetches of one file at once

ReadAt = Callable[[int, int], bytes]
"""Reads `size` bytes at an offset, fewer at the end."""


class ByteRange(NamedTuple):
    """Bytes of a file."""

    begin: int
    end: int


def spans_of(group: Any, leaves: Iterable[int], file_bytes: int) -> list[ByteRange]:
    """Returns the column chunks of a row group's leaf columns."""
    found = []
    for chunk in map(group.column, leaves):
        first, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset or 0
        begin = min(max(0, dictionary if 0 < dictionary < first else first), file_bytes)
        end = begin + max(0, chunk.total_compressed_size) + _PADDING_BYTES
        found.append(ByteRange(begin, min(end, file_bytes)))
    return found


def windows_of(spans: Iterable[ByteRange]) -> list[ByteRange]:
    """Returns few windows that cover the spans."""
    windows: list[ByteRange] = []
    useful = 0
    for span in sorted(spans):
        begin, end = windows[-1] if windows else span
        gap, allowed = span.begin - end, max(_SMALL_GAP_BYTES, min(useful, _MOST_GAP_BYTES))
        if windows and gap <= allowed and span.end - begin <= _MOST_BYTES:
            windows[-1] = ByteRange(begin, max(end, span.end))
            useful += span.end - span.begin
        else:
            windows.append(span)
            useful = span.end - span.begin
    return windows


class Windows(PlacedFile):
    """A file with spans fetched ahead, for one thread; closes `content` with itself."""

    def __init__(self, content: Any, read_at: ReadAt, groups: Mapping[int, Sequence[ByteRange]]) -> None:
        self._content, self._read_at = content, read_at
        super().__init__(content.seek(0, io.SEEK_END))
        self._windows = windows_of(span for spans in groups.values() for span in spans)
        self._begins = [window.begin for window in self._windows]
        self._of = {group: [self._window_at(span.begin) for span in spans] for group, spans in groups.items()}
        self._held: dict[int, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(_FETCHES, thread_name_prefix="qinfer-window")

    def prepare(self, group: int) -> None:
        """Starts fetching a row group and the next; drops earlier windows."""
        needed = set(self._of[group])
        following = max(needed, default=-1) + 1
        wanted = needed | ({following} if following < len(self._windows) else set())
        for number in self._held.keys() - wanted:
            del self._held[number]
        for number in sorted(wanted - self._held.keys()):
            begin, end = self._windows[number]
            self._held[number] = self._pool.submit(self._read_at, end - begin, begin)

    def read_at(self, size: int, place: int) -> bytes:
        """Reads up to `size` bytes."""
        number = self._window_at(place)
        held = self._held.get(number)
        if held is None or place >= self._windows[number].end:
            return self._read_at(size, place)
        first = place - self._windows[number].begin
        data = held.result()[first : first + size]
        return data if len(data) == size else self._read_at(size, place)

    def close(self) -> None:
        """Closes the file; does not wait for fetches."""
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for fetch in self._held.values():
                fetch.add_done_callback(_heard)
            self._held.clear()
            self._content.close()
        super().close()

    def _window_at(self, place: int) -> int:
        return bisect_right(self._begins, place) - 1


def _heard(fetch: "Future[bytes]") -> None:
    with suppress(Exception):  # its result is not needed
        fetch.result()


_MOST_ROWS = 65_536
_MOST_TEXT_ROWS = 8192  # a dictionary may be much smaller than the values
_FEWER = 8

_BUFFERS = (16 * 2**20, 64 * 1024, 2**20)  # all of a file, and the least and most of one
_FAR_BUFFERS = (128 * 2**20, 2**20, 16 * 2**20)
_FETCHED_BYTES = 96 * 2**20  # compressed row groups up to this are fetched before decoding

_TEXT = "BYTE_ARRAY"
_VALUE_BYTES = 16  # with its levels


class ParquetGroups:
    """The row groups of a Parquet file; closes `content` with itself.

    Empty `wanted` = all row groups.
    """

    def __init__(
        self, content: Any, names: Sequence[str], url: str, *, far: bool, limits: ReadLimits, wanted: Sequence[int] = ()
    ) -> None:
        self._content, self._names, self._url = content, list(names), url
        self._far = far and not isinstance(content, pa.NativeFile)  # which is in memory
        self._rows_bytes = limits.rows_bytes
        self._metadata = read_metadata(content, limits.footer_bytes)
        self.count = self._metadata.num_row_groups
        self.schema: pa.Schema = arrow_schema(content, self._metadata)
        self._leaves = _leaves(self._metadata, self._names)
        self._int96 = _int96(self._metadata, self._names, self._leaves)
        groups = range(self.count)
        self._windows = self._fetched(set(wanted).intersection(groups) if wanted else groups) if self._far else None

    def batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        """Reads from the group's first row."""
        group = wanted.row_group
        if not 0 <= group < self.count:
            raise SourceBroken(f"'{self._url}' has no row group {group}")
        if self._windows is not None:
            self._windows.prepare(group)
        rows, done = self._rows_at_once(group), 0
        while True:
            try:
                for record in self._read(group, rows, done):
                    done += record.num_rows
                    yield record
            except MemoryError:
                if rows == 1:
                    raise SourceBroken(
                        f"a row of '{self._url}', with its pages and dictionaries, takes more memory than a worker may "
                        "use to read it; write smaller pages and dictionaries, or raise QINFER_BULK__MAX_READ_BYTES"
                    ) from None
                rows = max(1, rows // _FEWER)
                pa.default_memory_pool().release_unused()
            else:
                return

    def close(self) -> None:
        """Closes the file."""
        self._content.close()

    def _read(self, group: int, rows: int, skip: int) -> Iterator[pa.RecordBatch]:
        read = self._open_file().iter_batches(rows, [group], self._names, use_threads=False)
        instants = self._open_file("us").iter_batches(rows, [group], self._int96, use_threads=False)
        for record in read:
            coarse = next(instants) if self._int96 else None
            if skip >= record.num_rows:
                skip -= record.num_rows
                continue
            whole = record if coarse is None else self._exact(record, coarse)
            yield whole.slice(skip)
            skip = 0

    def _exact(self, record: pa.RecordBatch, coarse: pa.RecordBatch) -> pa.RecordBatch:
        columns, problem = exact(record.select(coarse.schema.names), coarse, self.schema)
        if problem:
            raise SourceBroken(f"'{self._url}': {problem}")
        for name, column in columns.items():
            record = record.set_column(record.schema.get_field_index(name), name, column)
        return record

    def _open_file(self, unit: str | None = None) -> pq.ParquetFile:
        return pq.ParquetFile(
            self._content,
            metadata=self._metadata,
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

    def _rows_at_once(self, group: int) -> int:
        whole = self._metadata.row_group(group)
        chunks = [whole.column(leaf) for leaf in self._leaves]
        most = _MOST_TEXT_ROWS if any(chunk.physical_type == _TEXT for chunk in chunks) else _MOST_ROWS
        size = sum(max(chunk.total_uncompressed_size, chunk.num_values * _VALUE_BYTES) for chunk in chunks)
        return int(max(1, min(most, self._rows_bytes * whole.num_rows // max(1, size))))


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
    whole, least, most = _FAR_BUFFERS if far else _BUFFERS
    return max(least, min(most, whole // max(1, columns)))


class WantedColumns(NamedTuple):
    """Columns and struct fields to read, in order.

    `columns` are named by path, in the type to return; `nested` are the files' columns that contain them.
    """

    columns: pa.Schema
    nested: pa.Schema
    may_lack: bool = False
    groups: tuple[int, ...] = ()

    @classmethod
    def from_paths(cls, schema: pa.Schema, paths: Iterable[str]) -> "WantedColumns":
        """Selects fields of a schema."""
        chosen = tuple(dict.fromkeys(paths))
        columns = [field.with_type(as_read(field.type)) for field in select(schema, chosen)]
        return cls(pa.schema([(field.name, field.type) for field in columns]), pruned(schema, chosen))


def open_rows(
    content: Any, format_: FileFormat, wanted: WantedColumns, url: str, *, far: bool, limits: ReadLimits
) -> "GroupRows":
    """Opens a Parquet or Arrow file; the rows close it."""
    if format_ == "parquet":
        names = wanted.columns.names
        groups = ParquetGroups(content, names, url, far=far, limits=limits, wanted=wanted.groups)
        return GroupRows(groups, wanted, url, limits)
    return GroupRows(_ArrowBatches(content, wanted.columns.names, url, limits), wanted, url, limits)


class _ArrowBatches:
    def __init__(self, content: Any, names: Sequence[str], url: str, limits: ReadLimits) -> None:
        self._content, self._url = content, url
        self.schema: pa.Schema = open_arrow(content, limits.footer_bytes).schema
        fields = [self.schema.get_field_index(name) for name in pruned(self.schema, names).names]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        self._reader = pa.ipc.open_file(content, options=options)
        self.count = self._reader.num_record_batches

    def batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        if not 0 <= wanted.row_group < self.count:
            raise SourceBroken(f"'{self._url}' has no record batch {wanted.row_group}")
        try:
            whole = self._reader.get_batch(wanted.row_group)
        except MemoryError:
            raise SourceBroken(
                f"record batch {wanted.row_group} of '{self._url}', with its dictionaries, takes more memory than a "
                "worker may use to read it; write record batches of fewer rows, or raise QINFER_BULK__MAX_READ_BYTES"
            ) from None
        whole.validate(full=True)  # damaged offsets could point anywhere
        yield whole

    def close(self) -> None:
        self._content.close()


class TextRows:
    """CSV or JSON lines from the first range's cut point."""

    def __init__(
        self, content: TextStream, format_: TextFormat, wanted: WantedColumns, url: str, limits: ReadLimits, csv: Csv
    ) -> None:
        self._content, self._wanted, self._url, self._limits = content, wanted, url, limits
        self._opened = partial(text_batches, content, format_, wanted.nested, csv)
        self._read: Iterator[pa.RecordBatch]
        self._row = -1  # the first unread row

    def batches(self, wanted: Range) -> Iterator[FileRows]:
        """Reads the next range."""
        if self._row < 0:
            self._row = wanted.first_row - wanted.first_in_group
            self._read = self._opened(self._row)
        skip = wanted.first_row - self._row
        for record in _within(self._read, skip, wanted.rows, self._url, self._put_back):
            fault = (record.schema.metadata or {}).get(FAULT, b"").decode()
            for rows in cut(pick(record, self._wanted.columns.names), self._limits.rows_bytes):
                yield rows._replace(fault=fault)
        self._row = wanted.first_row + wanted.rows

    def _put_back(self, rest: pa.RecordBatch) -> None:
        self._read = chain([rest], self._read)

    def close(self) -> None:
        """Closes the text."""
        self._content.close()


def first_rows(
    content: Any, format_: FileFormat, wanted: WantedColumns, url: str, limits: ReadLimits, csv: Csv
) -> Iterator[pa.RecordBatch]:
    """Yields all rows of an open file, or of a text's stream, in bounded batches; their number need not be known.

    Errors are those of `RowFile.batches`. The caller closes the file.
    """
    names = wanted.columns.names
    if is_text(format_):
        read = text_batches(content, format_, wanted.nested, csv, 0)
    else:
        groups: ParquetGroups | _ArrowBatches = (
            ParquetGroups(content, names, url, far=False, limits=limits)
            if format_ == "parquet"
            else _ArrowBatches(content, names, url, limits)
        )
        read = chain.from_iterable(groups.batches(Range(url, "", one, 0, 0, 0)) for one in range(groups.count))
    for record in read:
        for rows in cut(pick(record, names), limits.rows_bytes):
            yield rows.record


class GroupRows:
    """Rows of the groups of a Parquet file, or the record batches of an Arrow file."""

    def __init__(
        self, groups: ParquetGroups | _ArrowBatches, wanted: WantedColumns, url: str, limits: ReadLimits
    ) -> None:
        self._groups, self._wanted, self._url, self._rows_bytes = groups, wanted.columns, url, limits.rows_bytes
        self._here = []
        fields = Fields(groups.schema)
        for field in self._wanted:
            one = fields.field(field.name)
            if one is None and wanted.may_lack and not fields.places(field.name):
                continue
            if one is None:
                count = len(fields.places(field.name))
                state = f"has {count} columns" if count else "lacks the column"
                raise SourceBroken(f"'{url}' {state} '{field.name}', which the job reads")
            found = one.with_type(as_read(one.type))
            common = common_field(found, field)
            if found.type != field.type and (common is None or common.type != field.type):
                raise SourceBroken(self._type_mismatch(field, one.type))
            self._here.append(field.name)

    def batches(self, wanted: Range) -> Iterator[FileRows]:
        """Reads a range."""
        for record in _within(self._groups.batches(wanted), wanted.first_in_group, wanted.rows, self._url):
            for rows in cut(pick(record, self._here), self._rows_bytes):
                yield rows._replace(record=self._cast_columns(rows.record))

    def close(self) -> None:
        """Closes the file."""
        self._groups.close()

    def _cast_columns(self, record: pa.RecordBatch) -> pa.RecordBatch:
        here = dict(zip(self._here, record.columns, strict=True))
        columns = []
        for field in self._wanted:
            column = here.get(field.name)
            if column is None:
                columns.append(pa.nulls(record.num_rows, field.type))
                continue
            try:
                columns.append(column if column.type == field.type else cast(column, field.type))
            except pa.ArrowException:
                raise SourceBroken(self._type_mismatch(field, column.type)) from None
        return pa.RecordBatch.from_arrays(columns, schema=self._wanted)

    def _type_mismatch(self, field: pa.Field, found: pa.DataType) -> str:
        return (
            f"column '{field.name}' of '{self._url}' is of type {found}, which can't be made the {field.type} that it "
            "was planned to be"
        )


RowFile = GroupRows | TextRows
"""An open input file.

`batches` reads a range. It raises `SourceBroken` if the range is not in the file or values do not fit,
`pyarrow.ArrowException` and `OSError` if the file is damaged or can't be read.
"""


def _within(
    read: Iterator[pa.RecordBatch],
    skip: int,
    rows: int,
    url: str,
    put_back: Callable[[pa.RecordBatch], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    left = rows
    while left:
        record = next(read, None)
        if record is None:
            raise SourceBroken(f"'{url}' has {left} rows less than it had when the job was planned")
        if skip >= record.num_rows:
            skip -= record.num_rows
            continue
        if put_back is not None and skip + left < record.num_rows:
            put_back(record.slice(skip + left))
        if skip or left < record.num_rows:
            record = record.slice(skip, left)
        skip = 0
        left -= record.num_rows
        yield record
