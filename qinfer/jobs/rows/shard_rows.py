"""The rows of a shard, in batches of the size that is asked for, whatever the files are like.

Batches go across row groups and files, so that many small ones do not make small batches. A file is compared with the
plan by its etag before its first and after its last row; small files in a store that is far are fetched ahead, several
at a time.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from types import TracebackType
from typing import NamedTuple

import pyarrow as pa

from qinfer.jobs.columns.schemas import without_dictionary
from qinfer.jobs.job import InputFormat
from qinfer.jobs.plan import Shard
from qinfer.jobs.rows.row_files import SourceBroken
from qinfer.jobs.rows.row_sources import SourceChanged, SourceFiles, explained
from qinfer.storage.open import store_for
from qinfer.storage.store import Store

__all__ = ["RowBatch", "Segment", "ShardReader", "SourceBroken", "SourceChanged"]


class Segment(NamedTuple):
    """Rows of a batch that come from one row group.

    Attributes:
        url: The file.
        row_group: The row group (Parquet), record batch (Arrow), or -1.
        first_row: The number of the first row within the file.
        rows: How many rows.
    """

    url: str
    row_group: int
    first_row: int
    rows: int


class RowBatch(NamedTuple):
    """Rows of a shard.

    Attributes:
        record: Their columns.
        segments: Where they come from, in order.
    """

    record: pa.RecordBatch
    segments: tuple[Segment, ...]


class ShardReader:
    """Reads the rows of one shard in order; blocking, for one thread.

    Args:
        shard: The shard.
        columns: The columns that are wanted (`InputColumns.columns` and `OutputColumns.copied`); each is read once.
        schema: The inputs' columns, in the types that they are read as (of the plan).
        input_format: What the job says of the files' format.
        store: Finds the store of a URL.

    Attributes:
        schema: The columns of the batches; those that have dictionaries in the files have their values.
    """

    def __init__(
        self,
        shard: Shard,
        columns: Sequence[str],
        schema: pa.Schema,
        input_format: InputFormat = "",
        store: Callable[[str], Store] = store_for,
    ) -> None:
        fields = [schema.field(name) for name in dict.fromkeys(columns)]
        self.schema = pa.schema([(field.name, without_dictionary(field.type)) for field in fields])
        self._files = SourceFiles(shard.ranges if shard.rows else (), self.schema, input_format, store)
        self._chunks = self._read_chunks()
        self._rest: _Chunk | None = None

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def read(self, rows: int) -> RowBatch | None:
        """Reads the next rows.

        Args:
            rows: So many, or what is left if that is less.

        Returns:
            The rows; `None` after the last.

        Raises:
            SourceChanged: A file is not the planned one any more.
            SourceBroken: A file is damaged, or has other columns.
            StoreError: A store fails; `retryable` tells whether another try helps.
        """
        records: list[pa.RecordBatch] = []
        segments: list[Segment] = []
        have = 0
        while have < rows:
            self._rest = self._rest or next(self._chunks, None)
            if self._rest is None:
                break
            record, segment = self._rest
            count = min(rows - have, record.num_rows)
            self._rest = None
            if count < record.num_rows:
                after = segment._replace(first_row=segment.first_row + count, rows=segment.rows - count)
                self._rest = record.slice(count), after
                record = record.slice(0, count)
            records.append(record)
            _extend(segments, segment._replace(rows=count))
            have += count
        if not records:
            return None
        return RowBatch(records[0] if len(records) == 1 else pa.concat_batches(records), tuple(segments))

    def close(self) -> None:
        """Closes what is open."""
        self._chunks.close()
        self._files.close()

    def _read_chunks(self) -> Generator["_Chunk", None, None]:
        for source, ranges in self._files:
            with explained(source), closing(self._files.open(source)) as file:
                for wanted in ranges:
                    row = wanted.first_row
                    for record in file.batches(wanted):
                        yield record, Segment(source.url, wanted.row_group, row, record.num_rows)
                        row += record.num_rows
            source.check()


_Chunk = tuple[pa.RecordBatch, Segment]


def _extend(segments: list[Segment], new: Segment) -> None:
    """Adds a segment, or makes the last one longer."""
    last = segments[-1] if segments else None
    if last is not None and last[:2] == new[:2] and last.first_row + last.rows == new.first_row:
        segments[-1] = last._replace(rows=last.rows + new.rows)
    else:
        segments.append(new)
