"""Reads the rows of a Parquet file in few row batches at a time, fewer where they take too much memory.

The process has a memory limit, since a small file may become gigabytes. Pages are read while they are decoded. A read
of a store takes tens of milliseconds, and may be billed. So neighbouring column chunks of a remote file are fetched
together as a window before they are decoded, and the next window is fetched meanwhile.
"""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.tabular.footers import INT96, arrow_schema, exact, read_metadata
from qinfer.tabular.source import ReadLimits, SourceBroken
from qinfer.tabular.spec import Range

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


class Windows(io.RawIOBase):
    """A file with spans fetched ahead, for one thread; closes `content` with itself."""

    def __init__(self, content: Any, read_at: ReadAt, groups: Mapping[int, Sequence[ByteRange]]) -> None:
        self._content, self._read_at = content, read_at
        self._size = content.seek(0, io.SEEK_END)
        self._windows = windows_of(span for spans in groups.values() for span in spans)
        self._begins = [window.begin for window in self._windows]
        self._of = {group: [self._window_at(span.begin) for span in spans] for group, spans in groups.items()}
        self._held: dict[int, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(_FETCHES, thread_name_prefix="qinfer-window")
        self._at = 0

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
        return held.result()[first : first + size]

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads at the current position."""
        size = 0 if size is None or size < 0 else size
        data = self.read_at(size, self._at)
        if len(data) < size:
            data = self._read_at(size, self._at)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position of this object; the position of the file is free for the threads."""
        self._at = self._size + offset if whence == io.SEEK_END else offset + self._at * whence
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def readable(self) -> bool:
        """Returns true."""
        return True

    def seekable(self) -> bool:
        """Returns true."""
        return True

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

_BUFFERS_BYTES = 16 * 2**20
_FAR_BUFFERS_BYTES = 128 * 2**20
_LEAST_BUFFER_BYTES = 64 * 1024
_MOST_BUFFER_BYTES = 2**20
_FAR_LEAST_BUFFER_BYTES = 2**20
_FAR_MOST_BUFFER_BYTES = 16 * 2**20
_FETCHED_BYTES = 96 * 2**20  # compressed row groups up to this are fetched before decoding

_TEXT = "BYTE_ARRAY"
_VALUE_BYTES = 16  # with its levels


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
        self._rows_bytes = limits.rows_bytes
        self._metadata = read_metadata(content, limits.footer_bytes)
        self.schema: pa.Schema = arrow_schema(content, self._metadata)
        self._leaves = _leaves(self._metadata, self._names)
        self._int96 = _int96(self._metadata, self._names, self._leaves)
        groups = range(self._metadata.num_row_groups)
        self._windows = self._fetched(set(wanted).intersection(groups) if wanted else groups) if self._far else None

    def batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        """Reads from the group's first row."""
        group = wanted.row_group
        if not 0 <= group < self._metadata.num_row_groups:
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
    whole = _FAR_BUFFERS_BYTES if far else _BUFFERS_BYTES
    least = _FAR_LEAST_BUFFER_BYTES if far else _LEAST_BUFFER_BYTES
    most = _FAR_MOST_BUFFER_BYTES if far else _MOST_BUFFER_BYTES
    return max(least, min(most, whole // max(1, columns)))
