"""One open input file of a shard: its rows as Arrow batches, a bounded part of it in memory at a time.

Of Parquet, a row group's pages are read through buffers as they are decoded, so that memory does not depend on the size
of row groups; small row groups in a store that is far are fetched ahead, all columns at once. An Arrow file is read by
record batches, which its writer chose, CSV and JSON lines by blocks.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns.schemas import common_type
from qinfer.jobs.plan import Range
from qinfer.jobs.rows.source import FileFormat
from qinfer.jobs.rows.text_rows import open_text

CHUNK_BYTES = 16 * 2**20
"""About so many bytes are decoded at a time."""

MAX_CHUNK_ROWS = 65_536
_TEXT_CHUNK_ROWS = 8192  # of a column that a dictionary may make much smaller than its values are
_LEAST_CHUNK_ROWS = 64

_BUFFERS_BYTES = 16 * 2**20  # of all columns together
_FAR_BUFFERS_BYTES = 128 * 2**20
_LEAST_BUFFER_BYTES = 64 * 1024
_MOST_BUFFER_BYTES = 2**20
_FAR_LEAST_BUFFER_BYTES = 2**20
_FAR_MOST_BUFFER_BYTES = 16 * 2**20
_FETCHED_BYTES = 96 * 2**20  # the largest row group, compressed, that is fetched at once


class SourceBroken(InvalidRequest):
    """An input file is damaged, or its columns are not the planned ones; the message names the URL."""


def open_rows(content: BinaryIO | Any, format_: FileFormat, wanted: pa.Schema, url: str, *, far: bool) -> "RowFile":
    """Opens an input file.

    Args:
        content: What pyarrow reads of: it is closed with the rows.
        format_: What it is.
        wanted: The columns that are wanted, in order, and their types.
        url: Its URL, for messages.
        far: Whether each read takes long, as those of object stores do.

    Raises:
        SourceBroken: A column is missing, or of a type that can't be made the wanted one.
        pyarrow.ArrowException, OSError: The file is damaged, or can't be read.
    """
    if format_ == "parquet":
        return _Parquet(content, wanted, url, far=far)
    if format_ == "arrow":
        return _Arrow(content, wanted, url)
    return _Text(content, format_, wanted, url)


class _Parquet:
    def __init__(self, content: Any, wanted: pa.Schema, url: str, *, far: bool) -> None:
        self._content, self._url = content, url
        metadata = pq.read_metadata(content)
        self._leaves = _leaves(metadata, wanted.names)
        groups = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
        largest = self._bytes(metadata, groups.index(max(groups)))[0] if groups else 0
        fetched = far and largest <= _FETCHED_BYTES
        self._file = pq.ParquetFile(
            content,
            metadata=metadata,
            pre_buffer=fetched,
            buffer_size=0 if fetched else _buffer_bytes(len(self._leaves), far=far),
        )
        self._columns = _Columns(self._file.schema_arrow, wanted, url)

    def batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        metadata = self._file.metadata
        if not 0 <= wanted.row_group < metadata.num_row_groups:
            raise SourceBroken(f"'{self._url}' has no row group {wanted.row_group}")
        size = self._chunk_rows(metadata, wanted.row_group)
        read = self._file.iter_batches(size, [wanted.row_group], self._columns.wanted.names, use_threads=False)
        for record in _within(read, wanted.first_in_group, wanted.rows, self._url):
            yield self._columns.of(record)

    def close(self) -> None:
        self._file.close()
        self._content.close()

    def _bytes(self, metadata: Any, group: int) -> tuple[int, int]:
        """Returns the compressed and the decoded size of a row group's wanted columns."""
        chunks = [metadata.row_group(group).column(leaf) for leaf in self._leaves]
        return sum(c.total_compressed_size for c in chunks), sum(c.total_uncompressed_size for c in chunks)

    def _chunk_rows(self, metadata: Any, group: int) -> int:
        rows = int(metadata.row_group(group).num_rows)
        per_row = max(1, self._bytes(metadata, group)[1] // max(1, rows))
        texts = any(
            metadata.schema.column(leaf).physical_type == "BYTE_ARRAY"
            and metadata.row_group(group).column(leaf).has_dictionary_page
            for leaf in self._leaves
        )
        most = _TEXT_CHUNK_ROWS if texts else MAX_CHUNK_ROWS
        return max(_LEAST_CHUNK_ROWS, min(most, CHUNK_BYTES // per_row))


class _Arrow:
    def __init__(self, content: Any, wanted: pa.Schema, url: str) -> None:
        self._content, self._url = content, url
        there = pa.ipc.open_file(content).schema
        self._columns = _Columns(there, wanted, url)
        fields = [there.get_field_index(name) for name in self._columns.wanted.names]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        self._reader = pa.ipc.open_file(content, options=options)

    def batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        if not 0 <= wanted.row_group < self._reader.num_record_batches:
            raise SourceBroken(f"'{self._url}' has no record batch {wanted.row_group}")
        whole = self._reader.get_batch(wanted.row_group)
        whole.validate(full=True)  # or damaged offsets would lead anywhere in memory
        for record in _within(iter([whole]), wanted.first_in_group, wanted.rows, self._url):
            yield self._columns.of(record)

    def close(self) -> None:
        self._content.close()


class _Text:
    """CSV or JSON lines, in the types of the plan: whether columns have them shows as they are read."""

    def __init__(self, content: BinaryIO, format_: FileFormat, wanted: pa.Schema, url: str) -> None:
        assert format_ in ("csv", "jsonl")
        self._content, self._wanted, self._url = content, wanted, url
        self._reader = open_text(content, format_, wanted)
        self._read = iter(self._reader) if self._reader is not None else iter(())
        self._row = 0  # the first that was not read yet

    def batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        end = wanted.first_row + wanted.rows
        for record in _within(self._read, wanted.first_row - self._row, wanted.rows, self._url, self._put_back):
            yield record.select(self._wanted.names)
        self._row = end

    def _put_back(self, rest: pa.RecordBatch) -> None:
        self._read = chain([rest], self._read)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._content.close()


RowFile = _Parquet | _Arrow | _Text
"""An open input file, to be closed.

`batches` reads a range in order, in batches of the wanted columns and types. It raises `SourceBroken` where the range
is not in the file or values do not fit, `pyarrow.ArrowException` and `OSError` where the file is damaged or can't be
read.
"""


class _Columns:
    """Makes a file's batches those of the job: the wanted columns in order, in the types that all files can have."""

    def __init__(self, there: pa.Schema, wanted: pa.Schema, url: str) -> None:
        self.wanted = wanted
        self._url = url
        self._cast: list[int] = []
        counts = Counter(there.names)
        for index, field in enumerate(wanted):
            if (count := counts[field.name]) != 1:
                state = f"has {count} columns" if count else "lacks the column"
                raise SourceBroken(f"'{url}' {state} '{field.name}', which the job reads")
            found = there.field(field.name).type
            if found != field.type:
                self._cast.append(index)
                if common_type(found, field.type) != field.type:
                    raise SourceBroken(self._text(field, found))

    def of(self, record: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the wanted columns of a batch.

        Raises:
            SourceBroken: A value does not fit the wanted type.
        """
        columns = [record.column(name) for name in self.wanted.names]
        for index in self._cast:
            field, column = self.wanted.field(index), columns[index]
            try:
                columns[index] = pc.cast(column, options=pc.CastOptions(field.type, allow_float_truncate=True))
            except pa.ArrowException:
                raise SourceBroken(self._text(field, column.type)) from None
        return pa.RecordBatch.from_arrays(columns, schema=self.wanted)

    def _text(self, field: pa.Field, found: pa.DataType) -> str:
        return (
            f"column '{field.name}' of '{self._url}' is of type {found}, which can't be made the {field.type} that it "
            "was planned to be"
        )


def _within(
    read: Iterator[pa.RecordBatch],
    skip: int,
    rows: int,
    url: str,
    put_back: Callable[[pa.RecordBatch], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Passes on the rows of a range.

    Args:
        read: Batches of a row group, or of a file.
        skip: How many rows are before the range.
        rows: Its rows.
        url: The file, for messages.
        put_back: Gets what is left of the last batch.

    Raises:
        SourceBroken: There are not as many.
    """
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


def _leaves(metadata: Any, names: list[str]) -> list[int]:
    """Returns the numbers of the leaf columns that top-level columns are made of."""
    wanted = set(names)
    found = []
    for leaf in range(metadata.num_columns):
        path = metadata.schema.column(leaf).path
        parts = path.split(".")  # names may have dots, too
        if any(".".join(parts[: end + 1]) in wanted for end in range(len(parts))):
            found.append(leaf)
    return found


def _buffer_bytes(columns: int, *, far: bool) -> int:
    """Returns the size of the buffer that each column is read through."""
    whole = _FAR_BUFFERS_BYTES if far else _BUFFERS_BYTES
    least = _FAR_LEAST_BUFFER_BYTES if far else _LEAST_BUFFER_BYTES
    most = _FAR_MOST_BUFFER_BYTES if far else _MOST_BUFFER_BYTES
    return max(least, min(most, whole // max(1, columns)))
