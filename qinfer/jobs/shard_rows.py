"""Reads the rows of a shard in batches, across row groups and files, in an examiner for a worker.

    worker ── OpenShard, ReadShard, …, CloseShard ──▶ examiner
    examiner ── RowsRead, an Arrow stream of each column in memory of both ──▶ worker

A file's etag is compared with the plan before its first and after its last row. Small remote files are fetched ahead. A
file that kills two examiners at the same rows is unreadable from there on.
"""

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import groupby, islice, pairwise
from typing import Any, Self, TypeVar

import msgspec
import pyarrow as pa

from qinfer.core.store_urls import is_below
from qinfer.errors import QinferError, StoreChanged, StoreNotFound
from qinfer.jobs.columns import input_form, partition_arrays
from qinfer.jobs.examiner import CloseShard, OpenShard, ReadShard, RowsRead
from qinfer.jobs.examiner_pool import BorrowedExaminer, ExaminerDied, ExaminerPool
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import ExpectedParts, PartInfo, Shard
from qinfer.jobs.resumption import rows_of
from qinfer.storage.hive import partition_values
from qinfer.storage.local import local_path
from qinfer.storage.open import readable, store_for, writable
from qinfer.storage.s3_objects import open_native
from qinfer.storage.store import Stat, Store, StoreFor, store_error
from qinfer.tabular.batches import Fault, FileRows, RowBatch, Segment
from qinfer.tabular.footers import FOOTER_BYTES
from qinfer.tabular.row_files import RowFile, TextRows, WantedColumns, open_rows
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.source import FileFormat, ReadLimits, SourceBroken, format_of, is_text, reason_of
from qinfer.tabular.spec import NO_GROUPS, Range
from qinfer.tabular.text_rows import header_of
from qinfer.tabular.text_streams import InputForm, TextStream, kept_text, open_stream

READ_BYTES = 64 * 2**20

_T = TypeVar("_T")
_decoder = msgspec.msgpack.Decoder(RowsRead)

_LIMITS = ReadLimits.from_read_bytes(READ_BYTES)
_AHEAD = 8
_SMALL_BYTES = 4 * 2**20
_LOST_ROWS = 4096
_ANY_JOB = JobSpec(model="", inputs=(), output=Output(""))
_REMEDY = "a new job can skip such files with 'bad_files': \"skip\""
_OF_STORE = "AWS Error"  # tells S3 errors from `OSError`s of damaged files


class SourceChanged(StoreChanged):
    """An input file has changed since planning, or is gone."""


class ShardReader:
    """Reads a shard's rows; blocking, for one thread. Close it.

    `store` also finds kept pieces (`InputForm.kept_url`).
    """

    def __init__(
        self,
        shard: Shard,
        columns: Sequence[str],
        schema: pa.Schema,
        spec: JobSpec = _ANY_JOB,
        store: StoreFor = store_for,
        *,
        limits: ReadLimits = _LIMITS,
    ) -> None:
        self.limits = limits
        self.position = 0
        """The first row of the shard that is not decoded."""
        self.on_position: Callable[[int], None] = lambda _: None
        """Called at the beginning of files and row groups."""
        self.unreadable: Mapping[int, str] = {}
        """Why rows of the shard can't be read."""
        self.schema = WantedColumns.from_paths(schema, columns).columns
        ranges = shard.ranges if shard.rows else ()
        partitions = partition_values(ranges[0].url) if ranges and spec.partitioning else {}
        self._partitions = pa.schema([field for field in self.schema if field.name in partitions])
        stored = WantedColumns.from_paths(schema, [name for name in columns if name not in partitions])
        stored = stored._replace(may_lack=spec.merge_schema is True)
        self._stored = stored.columns
        self._files = _SourceFiles(ranges, stored, input_form(spec), store, self.limits)
        self._skips_bad_files = spec.bad_files == "skip"
        self._chunks = self._read_chunks()
        self._rest: _Chunk | None = None

    @classmethod
    def opened(cls, work: OpenShard, footer_bytes: int = FOOTER_BYTES) -> Self:
        """Opens a shard within the grant of its job."""
        kept_url, inputs, outputs = input_form(work.spec).kept_url, readable(work.grant), writable(work.grant)
        reader = cls(
            *(work.shard, work.columns, decode_schema(work.schema), work.spec),
            lambda url: outputs(url) if is_below(url, kept_url) else inputs(url),
            limits=ReadLimits.from_read_bytes(work.read_bytes, footer_bytes),
        )
        reader.unreadable = work.unreadable
        return reader

    def read(self, rows: int) -> RowBatch | None:
        """Reads the next rows, fewer at the memory limit; `None` = the end."""
        records: list[pa.RecordBatch] = []
        segments: list[Segment] = []
        too_large: list[int] = []
        faults: list[Fault] = []
        have = size_bytes = 0
        while have < rows:
            self._rest = self._rest or next(self._chunks, None)
            if self._rest is None or (records and size_bytes + self._rest[0].size_bytes > self.limits.rows_bytes):
                break
            (chunk, segment), self._rest = self._rest, None
            count = min(rows - have, segment.rows)
            if count < segment.rows:
                chunk, self._rest = _split(chunk, segment, count)
            records.append(chunk.record)
            _extend(segments, segment._replace(rows=count))
            too_large += [have] * chunk.is_too_large
            faults += [Fault(have, count, chunk.fault)] * bool(chunk.fault)
            have, size_bytes = have + count, size_bytes + chunk.size_bytes
        if not records:
            return None
        record = records[0] if len(records) == 1 else pa.concat_batches(records)
        return RowBatch(record, tuple(segments), tuple(too_large), tuple(faults))

    def close(self) -> None:
        """Closes all files."""
        self._chunks.close()
        self._files.close()

    def _read_chunks(self) -> Generator["_Chunk", None, None]:
        for source, ranges in self._files:
            left = deque(ranges)
            while left:
                try:
                    yield from self._read_file(source, left)
                except SourceBroken as error:
                    if not self._skips_bad_files:
                        raise SourceBroken(f"{error.message} (from row {left[0].first_row} on); {_REMEDY}") from None
                    yield from self._unread(source, left, error.message)
            source.check_again()

    def _read_file(self, source: "_Source", left: deque[Range]) -> Generator["_Chunk", None, None]:
        self._begin_range(source)
        with _explained(source), closing(self._files.open(source, left)) as file:
            while left:
                self._begin_range(source)
                for rows in self._with_partitions(source.url, file.batches(left[0])):
                    now, left[0] = left[0].split(rows.record.num_rows)
                    self.position += now.rows
                    yield rows, Segment(source.url, now.row_group, now.first_row, now.rows)
                left.popleft()

    def _begin_range(self, source: "_Source") -> None:
        if why := self.unreadable.get(self.position):
            raise SourceBroken(f"'{source.url}' can't be read; is it damaged? {why}")
        self.on_position(self.position)

    def _unread(self, source: "_Source", left: deque[Range], why: str) -> Generator["_Chunk", None, None]:
        """Yields null rows for the rest of a row group, or of a file without row groups."""
        is_last = False
        while left and not is_last:
            lost = left.popleft()
            self.position += lost.rows
            is_last = lost.row_group != NO_GROUPS
            message = f"rows {lost.first_row} to {lost.first_row + lost.rows - 1}: {why}"
            most = max(1, min(_LOST_ROWS, self.limits.rows_bytes // max(1, self._nulls(1).nbytes)))
            while lost.rows:
                now, lost = lost.split(min(most, lost.rows))
                record = self._nulls(now.rows)
                segment = Segment(source.url, now.row_group, now.first_row, now.rows)
                for rows in self._with_partitions(source.url, [FileRows(record, record.nbytes, fault=message)]):
                    yield rows, segment._replace(rows=rows.record.num_rows)

    def _nulls(self, rows: int) -> pa.RecordBatch:
        columns = [pa.nulls(rows, field.type) for field in self._stored]
        return pa.RecordBatch.from_arrays(columns, schema=self._stored)

    def _with_partitions(self, url: str, read: Iterable[FileRows]) -> Iterator[FileRows]:
        if not self._partitions.names:
            yield from read
            return
        row_bytes = sum(array.nbytes for array in partition_arrays(url, self._partitions, 1).values())
        most = max(1, self.limits.rows_bytes // (2 * row_bytes))
        for rows in read:
            for begin in range(0, rows.record.num_rows, most):
                part = rows.record.slice(begin, most)
                arrays = partition_arrays(url, self._partitions, part.num_rows)
                columns = [arrays[name] if name in arrays else part.column(name) for name in self.schema.names]
                size_bytes = rows.size_bytes * part.num_rows // rows.record.num_rows + row_bytes * part.num_rows
                record = pa.RecordBatch.from_arrays(columns, schema=self.schema)
                yield rows._replace(record=record, size_bytes=size_bytes)


_Chunk = tuple[FileRows, Segment]


def _split(rows: FileRows, segment: Segment, count: int) -> tuple[FileRows, _Chunk]:
    first_bytes = rows.size_bytes * count // segment.rows
    first = rows._replace(record=rows.record.slice(0, count), size_bytes=first_bytes)
    rest = rows._replace(record=rows.record.slice(count), size_bytes=rows.size_bytes - first_bytes)
    return first, (rest, segment._replace(first_row=segment.first_row + count, rows=segment.rows - count))


def _extend(segments: list[Segment], new: Segment) -> None:
    last = segments[-1] if segments else None
    if last is not None and last[:2] == new[:2] and last.first_row + last.rows == new.first_row:
        segments[-1] = last._replace(rows=last.rows + new.rows)
    else:
        segments.append(new)


class _Source:
    """`is_far` = each read takes long."""

    def __init__(self, planned: Stat, store: Store) -> None:
        self.url, self.etag = planned.url, planned.etag
        self._planned = planned
        self._store = store
        self._is_seen = store.sees_changes and planned.size_bytes > 0
        self.is_far = local_path(planned.url) is None

    def check(self) -> Stat:
        found = self._store.stat(self.url)
        if found is None:
            raise SourceChanged(f"'{self.url}' does not exist any more; bring it back, and resume the job")
        if not found.is_still(self.etag):
            raise SourceChanged(
                f"'{self.url}' has changed since the job was planned; its output would mix two contents. Make a new job"
            )
        return found

    def check_again(self) -> None:
        if not self._is_seen:
            self.check()

    def content(self, format_: FileFormat) -> Any:
        """Opens the file; a small remote one is read whole."""
        found, sequential = self._planned if self._is_seen else self.check(), is_text(format_)
        if not self.is_far:
            return self._store.open(self.url) if sequential else pa.OSFile(str(local_path(self.url)))
        if found.size_bytes > _SMALL_BYTES:
            is_native = self.url.startswith("s3://") and format_ == "arrow"  # Parquet fetches large parts
            native = open_native(self._store, self.url) if is_native else None
            self._is_seen = self._is_seen and native is None  # Arrow's client sends no condition
            return native or self._store.open_known(found, sequential=sequential)
        with self._store.open_known(found, sequential=True) as file:
            return pa.BufferReader(file.read())


class _SourceFiles:
    def __init__(
        self, ranges: Sequence[Range], wanted: WantedColumns, form: InputForm, store: StoreFor, limits: ReadLimits
    ) -> None:
        self._wanted, self._limits, self._form, self._store = wanted, limits, form, store
        self._list = [
            (_Source(file, store(file.url)), tuple(own))
            for file, own in groupby(ranges, lambda r: Stat(r.url, r.size_bytes, r.etag))
        ]
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[_Source, Future[Any]]] = deque()

    def __iter__(self) -> Iterator[tuple[_Source, tuple[Range, ...]]]:
        """Yields the files with their ranges; each must be opened before the next."""
        waiting = iter(self._list)
        several = len(self._list) > 1 and self._list[0][0].is_far
        for source, ranges in self._list:
            if several:
                self._pool = self._pool or ThreadPoolExecutor(_AHEAD, thread_name_prefix="qinfer-rows")
                for following in islice(waiting, _AHEAD + 1 - len(self._ahead)):
                    self._ahead.append((following[0], self._pool.submit(self._content, *following)))
            yield source, ranges

    def open(self, source: _Source, ranges: Sequence[Range]) -> RowFile:
        is_ahead = self._ahead and self._ahead[0][0] is source
        content = self._ahead.popleft()[1].result() if is_ahead else self._content(source, ranges)
        try:
            format_ = format_of(source.url, self._form.format)
            if is_text(format_):
                return TextRows(content, format_, self._wanted, source.url, self._limits, self._form.csv)
            wanted = self._wanted._replace(groups=tuple(dict.fromkeys(one.row_group for one in ranges)))
            return open_rows(content, format_, wanted, source.url, far=source.is_far, limits=self._limits)
        except BaseException:
            content.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for _, future in self._ahead:
            future.add_done_callback(_close)
        self._ahead.clear()

    def _content(self, source: _Source, ranges: Sequence[Range]) -> Any:
        format_ = format_of(source.url, self._form.format)
        content = source.content(format_)
        if not is_text(format_):
            return content
        text, begin = open_stream(content, source.url, format_, self._form), ranges[0].begin
        if not begin:
            return text
        header = header_of(text, format_, self._form.csv)
        if not self._form.is_decoded(source.url, format_):
            content.seek(begin)
            return TextStream.of_file(content, header)
        text.close()
        pieces = kept_text(self._store, self._form.kept_url, source.url, source.etag, begin)
        return TextStream(pieces, pieces.close, header)


@contextmanager
def _explained(source: _Source) -> Iterator[None]:
    try:
        yield
    except (StoreChanged, StoreNotFound):
        source.check()
        raise
    except (QinferError, MemoryError):
        raise
    except (pa.ArrowException, ValueError, OSError) as error:
        source.check()
        if isinstance(error, OSError) and (error.errno is not None or _OF_STORE in str(error)):
            raise store_error(error, source.url) from None
        raise SourceBroken(f"'{source.url}' can't be read; is it damaged? {reason_of(error)}") from None


def _close(future: "Future[Any]") -> None:
    if not future.cancelled():
        with suppress(Exception):  # the result is no longer needed
            future.result().close()


class ShardRows:
    """The open shard of an examiner."""

    def __init__(self, descriptor: int, footer_bytes: int, limit: Callable[[int], None]) -> None:
        self._descriptor, self._footer_bytes, self._limit = descriptor, footer_bytes, limit
        self._reader: ShardReader | None = None

    def answer(self, work: OpenShard | ReadShard | CloseShard, note: Callable[[str], None]) -> bytes:
        """Does a part of the work on a shard; notes at which row it reads."""
        if isinstance(work, ReadShard):
            assert self._reader is not None
            return self._read(self._reader, work.rows)
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if isinstance(work, OpenShard):
            self._limit(ReadLimits.from_read_bytes(work.read_bytes, self._footer_bytes).process_bytes)
            self._reader = ShardReader.opened(work, self._footer_bytes)
            self._reader.on_position = lambda position: note(str(position))
        return b""

    def _read(self, reader: ShardReader, rows: int) -> bytes:
        reader.on_position(reader.position)
        batch = reader.read(rows)
        if batch is None:
            return b""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        ends = [0]
        with open(self._descriptor, "wb", buffering=0, closefd=False) as file:
            for name in batch.record.schema.names:
                column = batch.record.select([name])
                with pa.ipc.new_stream(file, column.schema) as stream:
                    stream.write_batch(column)
                ends.append(file.tell())
        return msgspec.msgpack.encode(RowsRead(ends, batch.segments, batch.too_large, batch.faults))


class ExaminedShard:
    """Reads a shard by examiners; used by a thread beside the event loop of `pool`."""

    def __init__(self, pool: ExaminerPool, loop: asyncio.AbstractEventLoop, work: OpenShard) -> None:
        self._pool, self._loop, self._work = pool, loop, work
        self._rows = self._begin = 0
        self._died_at = -1
        self._unreadable: dict[int, str] = {}
        self._examiner: BorrowedExaminer | None = None
        self._asked: Future[bytes] | None = None

    def read(self, rows: int) -> RowBatch | None:
        """Reads the next rows, fewer at the memory limit; `None` = the end."""
        while True:
            try:
                if self._examiner is None:
                    self._begin = self._rows
                    self._examiner = self._wait(self._pool.borrow(self._rest()))
                asked, self._asked = self._asked or self._ask(self._examiner, rows), None
                result = asked.result()
            except ExaminerDied as died:
                self._examiner = None
                position = max([self._rows, *(self._begin + int(place) for place in died.files)])
                if position == self._died_at:
                    self._unreadable[position] = f"the process that read it died ({died.how})"
                self._died_at = position
                continue
            if not result:
                return None
            batch = self._decoded(_decoder.decode(result))
            self._rows += batch.record.num_rows
            assert self._examiner is not None
            self._asked = self._ask(self._examiner, rows)  # it reads while these rows are scored
            return batch

    def close(self) -> None:
        """Returns the examiner."""
        if self._asked is not None and isinstance(self._asked.exception(), ExaminerDied):
            self._examiner = None
        if self._examiner is not None:
            self._wait(self._examiner.give_back())
            self._examiner = None

    def _rest(self) -> OpenShard:
        shard = self._work.shard
        unreadable = {position - self._rows: why for position, why in self._unreadable.items()}
        return msgspec.structs.replace(self._work, shard=rows_of(shard, self._rows, shard.rows), unreadable=unreadable)

    def _decoded(self, found: RowsRead) -> RowBatch:
        assert self._examiner is not None
        fields, columns = list[pa.Field](), list[pa.Array]()
        for begin, end in pairwise(found.ends):
            memory = mmap.mmap(-1, end - begin)  # one of its own: a writer may keep some columns for long
            self._examiner.read_rows(memory, begin)
            record = pa.ipc.open_stream(pa.py_buffer(memory)).read_next_batch()
            fields.append(record.schema.field(0))
            columns.append(record.column(0))
        record = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
        segments = tuple(map(Segment._make, found.segments))
        return RowBatch(record, segments, tuple(found.too_large), tuple(map(Fault._make, found.faults)))

    def _ask(self, examiner: BorrowedExaminer, rows: int) -> "Future[bytes]":
        return asyncio.run_coroutine_threadsafe(examiner.ask(ReadShard(rows)), self._loop)

    def _wait(self, call: "Coroutine[Any, Any, _T]") -> _T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


RowReader = ShardReader | ExaminedShard


def examined_part(pool: ExaminerPool, loop: asyncio.AbstractEventLoop, parts: ExpectedParts) -> PartInfo | str:
    """Has the part of the only shard read; returns it, or a message. For threads beside the event loop of `pool`."""
    try:
        (found,) = asyncio.run_coroutine_threadsafe(pool.read_parts(parts, 1), loop).result()
    except ExaminerDied as died:
        return died.message
    return found
