"""Rows of a shard that an examiner reads for a worker.

    worker ── OpenShard, ReadShard, …, CloseShard ──▶ examiner
    examiner ── RowsRead, an Arrow stream of each column in memory of both ──▶ worker

A file that kills two examiners at the same rows is unreadable from there on.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import msgspec
import pyarrow as pa

from qinfer.jobs.examiner import CloseShard, OpenShard, ReadShard, RowsRead
from qinfer.jobs.examiner_pool import BorrowedExaminer, ExaminerDied, ExaminerPool
from qinfer.jobs.plan import ExpectedParts, PartInfo
from qinfer.jobs.resumption import rows_of
from qinfer.jobs.shard_rows import ShardReader
from qinfer.tabular.batches import Fault, RowBatch, Segment
from qinfer.tabular.source import ReadLimits

_T = TypeVar("_T")
_decoder = msgspec.msgpack.Decoder(RowsRead)


class RowReader(Protocol):
    """Reads a shard's rows; blocking, for one thread."""

    def read(self, rows: int) -> RowBatch | None:
        """Reads the next rows, fewer at the memory limit; `None` = the end."""

    def close(self) -> None:
        """Closes all files."""


class ShardRows:
    """The open shard of an examiner."""

    def __init__(self, descriptor: int, limit: Callable[[int], None]) -> None:
        self._descriptor, self._limit = descriptor, limit
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
            self._limit(ReadLimits.from_read_bytes(work.read_bytes, work.footer_bytes).process_bytes)
            self._reader = ShardReader.opened(work)
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


def examined_part(pool: ExaminerPool, loop: asyncio.AbstractEventLoop, parts: ExpectedParts) -> PartInfo | str:
    """Has the part of the only shard read; returns it, or a message. For threads beside the event loop of `pool`."""
    try:
        (found,) = asyncio.run_coroutine_threadsafe(pool.read_parts(parts, 1), loop).result()
    except ExaminerDied as died:
        return died.message
    return found
