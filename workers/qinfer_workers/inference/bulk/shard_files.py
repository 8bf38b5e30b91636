"""A shard's files: one thread reads its rows, another writes and commits its part. All calls block.

The pieces of an unfinished shard lie in the folder `_resume`. Readers never mistake a piece for a part: they skip the
folder, and its metadata names more rows than it has.
"""

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from qinfer.core.retry import Backoff
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import Conflict, ErrorCode, QinferError, StoreError, StoreNotFound, StoreUnavailable
from qinfer.jobs.examiner import OpenShard
from qinfer.jobs.job import JobSpec
from qinfer.jobs.outputs import OutputColumns
from qinfer.jobs.parts import PartColumns, PartWriter, part_metadata
from qinfer.jobs.plan import ExpectedParts, PartInfo, PlanHead, Shard, url_of
from qinfer.jobs.queue.records import ShardOutcome
from qinfer.jobs.resumption import KeptPiece, PieceFile, RowSpan, pieces_folder, rows_of
from qinfer.jobs.shard_rows import RowReader
from qinfer.models.spec import ModelSpec
from qinfer.storage.open import Within, store_for, writable
from qinfer.storage.store import CommitOutcome, StoreFor
from qinfer.tabular.batches import BAD_FILE, RowBatch, RowErrors
from qinfer.tabular.inputs import InputColumns
from qinfer.tabular.schemas import decode_schema, select
from qinfer.tabular.source import ReadLimits
from qinfer.tabular.texts import TypedColumns, typed
from qinfer_workers.inference.bulk.chunks import Chunk, Chunks
from qinfer_workers.inference.bulk.scoring import EXECUTION_FAILED

SPOOL_PREFIX = "qinfer-part-"

MODEL_CHANGED = (
    "model '{model}' has changed since the job was planned; load the former one and resume the job, or make a new job"
)

DEADLY = "the row kills workers: two workers died, or passed the execution limit, while they executed this row alone"
"""The `error_message` of deadly rows."""

_FIRST_ROWS = 256
_MOST_ROWS = 65_536
_MOST_SHARED_ROWS = 8192
_STREAMED_ROWS = 64
"""Few, since a decoupled model's responses may be large."""
_STREAMED_DIVISOR = 16
_GROWTH = 8
_COMMITS = 5
_FIRST_COMMIT_S = 1.0
_LAST_COMMIT_S = 30.0
_turnstile = threading.Lock()

T = TypeVar("T")


class PieceLost(StoreError):
    """A piece is gone, or damaged."""


class TooManyFailed(Exception):
    """More rows of a shard failed than the job allows."""

    def __init__(self, text: str, failed_rows: int) -> None:
        super().__init__(text)
        self.failed_rows = failed_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringTask:
    """A shard to score; `model_hash` is the hash of this worker's files, `max_errors` the job's limit (-1 = none)."""

    job_id: str
    spec: JobSpec
    shard: Shard
    model: ModelSpec
    head: PlanHead
    model_hash: str
    max_errors: int
    spool: Path
    read_bytes: int
    grant: UrlGrant
    store_for: StoreFor = store_for
    open_reader: Callable[[OpenShard], RowReader]
    read_part: Callable[[ExpectedParts], PartInfo | str]

    @property
    def url(self) -> str:
        """The URL of the part."""
        return f"{self.spec.output.url.rstrip('/')}/{self.shard.part}"

    @property
    def outputs(self) -> Within:
        """The stores that the job may write."""
        return writable(self.grant, self.store_for)


class ShardFiles:
    """Reads and writes the files of a task.

    `on_delay` is called in a thread when the commit is delayed. `keeps` saves the scored rows of stopped chunks for
    `take_piece`.
    """

    def __init__(self, task: ScoringTask) -> None:
        self.on_delay: Callable[[QinferError], None] = lambda _: None
        self.faults: dict[str, None] = {}
        self.step = RowSpan(0, task.shard.rows)
        self.keeps = False
        self.errors_before = 0
        self._task = task
        self._piece: PartWriter | None = None
        self._outputs: OutputColumns | None = None

    def failed(self, error: str, failed_rows: int | None = None) -> ShardOutcome:
        """Returns the outcome of a shard without a part."""
        shard = self._task.shard
        rows = shard.rows if failed_rows is None else failed_rows
        return ShardOutcome(shard.index, rows, rows, error)

    def existing(self) -> ShardOutcome | None:
        """Returns the outcome of a part that is already committed."""
        task, output = self._task, self._task.spec.output
        if task.outputs(task.url).stat(task.url) is None:
            return None
        shards = (task.shard,)
        parts = ExpectedParts(
            task.job_id, task.head.model_hash, output.url, shards, task.grant, is_split=output.is_split
        )
        found = task.read_part(parts)
        return None if isinstance(found, str) else ShardOutcome(task.shard.index, found.rows, found.errors)

    def read(self, chunks: Chunks) -> None:
        """Reads all rows into chunks, unless stopped."""
        task = self._task
        task.outputs.check(task.url)  # before rows are scored in vain
        if task.model_hash != task.head.model_hash:
            raise Conflict(MODEL_CHANGED.format(model=task.model.name))
        schema = decode_schema(task.head.schema)
        urls = [part.url for part in task.shard.ranges]
        # first, since it checks all names
        self._outputs = OutputColumns(task.spec, task.model, typed(schema), urls)
        inputs = InputColumns(task.spec, task.model, typed(schema))
        columns = tuple(dict.fromkeys((*inputs.columns, *self._outputs.copied)))
        values = TypedColumns(select(schema, columns), task.spec.csv_form.decimal_point)
        shard = rows_of(task.shard, self.step.first, self.step.stop)
        work = OpenShard(shard, columns, task.head.schema, task.spec, task.grant, task.read_bytes)
        with closing(task.open_reader(work)) as reader:
            rows = _STREAMED_ROWS if task.model.decoupled else _FIRST_ROWS
            while chunks.reserve():
                with _one_at_a_time(chunks):
                    batch = reader.read(rows)
                    if batch is None:
                        break
                    self.faults |= dict.fromkeys(fault.message for fault in batch.faults)
                    errors = _unread(batch, ReadLimits.from_read_bytes(task.read_bytes).rows_bytes)
                    if self.step.is_deadly:
                        errors.mark(np.ones(batch.record.num_rows, np.bool_), EXECUTION_FAILED, DEADLY)
                    batch = values.parse_texts(batch, errors)
                    chunk = Chunk(batch, inputs.decode(batch.record, errors))
                chunks.add(chunk)
                if not task.model.decoupled:
                    most = _MOST_SHARED_ROWS if chunks.is_shared else _MOST_ROWS
                    rows = min(rows * _GROWTH, most)
        chunks.end_input()

    def write(self, chunks: Chunks) -> ShardOutcome | None:
        """Writes the scored rows and commits the part; `None` for stopped chunks, or a piece.

        While the store is unavailable or full, only the commit is repeated.
        """
        first = chunks.next_scored()
        if self._outputs is None or (chunks.is_stopped and not self.keeps):
            return None
        writer = self._new_writer(self._outputs)
        try:
            self._write_all(writer, first, chunks)
            # else a driver's exception may keep the chunk in memory for long
            del first
            is_stopped, is_whole = chunks.is_stopped, self.step == (0, self._task.shard.rows, False)
            if self.keeps if is_stopped else not is_whole:
                self._piece = writer
                return None
            return None if is_stopped else self._commit_at_last(writer, chunks)
        finally:
            if self._piece is not writer:
                writer.abort()

    def _new_writer(self, outputs: OutputColumns) -> PartWriter:
        task = self._task
        split = PartColumns(outputs.good, outputs.failed) if task.spec.output.is_split else None
        metadata = part_metadata(task.job_id, task.shard, task.model_hash)
        return PartWriter(self._spooled(), outputs.schema, task.spec.output, metadata, split)

    def _spooled(self) -> Path:
        return self._task.spool / f"{SPOOL_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"

    def _write_all(self, writer: PartWriter, chunk: Chunk | None, chunks: Chunks) -> None:
        assert self._outputs is not None
        while chunk is not None:
            with _one_at_a_time(chunks):
                writer.write(self._outputs.encode(chunk.batch, chunk.scored(), chunk.errors))
            errors = self.errors_before + writer.errors
            if 0 <= self._task.max_errors < errors:
                rows = self.step.first + writer.rows
                example = f", such as {_first_failed(chunk)}" if chunk.errors.count else ""
                raise TooManyFailed(f"{errors} of its first {rows} rows failed{example}", errors)
            chunks.written()
            chunk = chunks.next_scored()

    def take_piece(self, chunks: Chunks) -> KeptPiece | None:
        """Stores the scored rows as a piece; waits for the store unless stopped."""
        writer, self._piece = self._piece, None
        if writer is None:
            return None
        assert self._outputs is not None
        try:
            if chunks.is_stopped:
                for chunk, rows in chunks.rest():
                    record = self._outputs.encode(chunk.batch, chunk.scored(), chunk.errors)
                    writer.write(record.slice(0, rows))
            writer.close_files()
            if not writer.rows:
                return None

            store = partial(self._store_piece, writer)
            return store() if chunks.is_stopped else self._at_last(store, chunks)
        finally:
            writer.abort()

    def join(self, pieces: Sequence[KeptPiece], chunks: Chunks) -> ShardOutcome | None:
        """Joins the pieces into the part and commits it."""
        task = self._task
        schema = typed(decode_schema(task.head.schema))
        writer = self._new_writer(
            OutputColumns(task.spec, task.model, schema, [part.url for part in task.shard.ranges])
        )
        try:
            for piece in pieces:
                with self._fetched_piece(piece) as paths:
                    writer.add(paths, piece.rows, piece.errors)
            return self._commit_at_last(writer, chunks)
        finally:
            writer.abort()

    def _store_piece(self, writer: PartWriter) -> KeptPiece:
        """Stores a piece under new names."""
        name, files = secrets.token_hex(8), list[PieceFile]()
        for path, suffix in zip(writer.paths, ("", ".failed"), strict=False):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            file_name = f"{self._pieces}/{name}{suffix}"
            url = url_of(self._task.spec.output.url, file_name)
            self._task.outputs(url).commit_if_absent(path, url)
            files.append(PieceFile(file_name, digest))
        return KeptPiece(writer.rows, writer.errors, files[0], files[1] if len(files) > 1 else None, tuple(self.faults))

    @contextmanager
    def _fetched_piece(self, piece: KeptPiece) -> Iterator[Sequence[Path]]:
        """Fetches and checks the files of a piece."""
        path, files = self._spooled(), [piece.good] if piece.failed is None else [piece.good, piece.failed]
        paths = [path, path.with_name(f"{path.name}.failed")][: len(files)]
        try:
            for file, target in zip(files, paths, strict=True):
                url = url_of(self._task.spec.output.url, file.name)
                try:
                    self._task.outputs(url).fetch(url, target)
                except StoreNotFound:
                    raise PieceLost(f"'{url}' is gone") from None
                with target.open("rb") as content:
                    if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                        raise PieceLost(f"'{url}' has other content than was written")
            yield paths
        finally:
            for target in paths:
                target.unlink(missing_ok=True)

    def forget_pieces(self) -> None:
        """Deletes the shard's pieces."""
        url = url_of(self._task.spec.output.url, self._pieces)
        with suppress(QinferError):
            self._task.outputs(url).delete_folder(url)

    @property
    def _pieces(self) -> str:
        return f"{pieces_folder(self._task.job_id)}/{self._task.shard.part}"

    def _commit_at_last(self, writer: PartWriter, chunks: Chunks) -> ShardOutcome | None:
        writer.close()
        return self._at_last(lambda: self._commit(writer.paths[0], writer), chunks)

    def _at_last(self, commit: Callable[[], T], chunks: Chunks) -> T | None:
        backoff = Backoff(_FIRST_COMMIT_S, _LAST_COMMIT_S)
        while True:
            try:
                return commit()
            except QinferError as error:
                if not error.retryable:
                    raise
                self.on_delay(error)
            if chunks.wait_stopped(backoff.next_s()):
                return None

    def _commit(self, path: Path, writer: PartWriter) -> ShardOutcome:
        task = self._task
        store = task.outputs(task.url)
        writer.prepare(store, task.spec.output.url.rstrip("/"), task.shard.part)
        for _ in range(_COMMITS):
            if store.commit_if_absent(path, task.url) is CommitOutcome.CREATED:
                return ShardOutcome(task.shard.index, task.shard.rows, writer.errors)
            found = store.stat(task.url)
            if found is not None:
                if (outcome := self.existing()) is not None:
                    return outcome
                store.set_aside(task.url, found.etag)
        raise StoreUnavailable(f"'{task.url}' can't be committed: each try found another broken part there; try again")


def streamed_bytes(read_bytes: int) -> int:
    """Returns the limit of responses to a row."""
    # a chunk's responses become one array with 32-bit offsets
    return min(read_bytes // _STREAMED_DIVISOR, 2**31 // _STREAMED_ROWS)


def clear_spool(folder: Path, older_than_at: float) -> None:
    """Deletes files of dead workers."""
    with suppress(OSError):
        for path in folder.glob(f"{SPOOL_PREFIX}*"):
            with suppress(OSError):
                if path.stat().st_mtime < older_than_at:
                    path.unlink()


def _unread(batch: RowBatch, max_bytes: int) -> RowErrors:
    errors = RowErrors(batch.record.num_rows)
    errors.mark(
        np.array(batch.too_large, np.int64),
        ErrorCode.INVALID_REQUEST,
        f"the row takes more than {max_bytes} bytes when it is decoded; make it smaller, or raise "
        "QINFER_BULK__MAX_READ_BYTES, which is six times as much",
    )
    for fault in batch.faults:
        errors.mark(np.arange(fault.first, fault.first + fault.rows), BAD_FILE, fault.message)
    return errors


def _one_at_a_time(chunks: Chunks) -> AbstractContextManager[Any]:
    """Admits one thread at a time beside online requests, because each thread takes a core."""
    return _turnstile if chunks.is_shared else nullcontext()


def _first_failed(chunk: Chunk) -> str:
    assert chunk.errors.bad is not None
    first = int(chunk.errors.bad.argmax())
    ((number, url),) = chunk.batch.origins([first])
    return f"row {number} of '{url}': {chunk.errors.columns()[1][first].as_py()}"
