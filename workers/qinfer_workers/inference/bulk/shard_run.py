"""Runs one shard: rows are read ahead and parts written behind.

    read thread ─▶ chunks ─▶ instance threads ─▶ chunks ─▶ write thread ─▶ commit

The event loop only gives out turns.
"""

import asyncio
import ctypes
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from qinfer.batching.batcher import Batcher, LoadedModel
from qinfer.errors import Cancelled, CorruptEntry, DeliveryError, ErrorCode, QinferError
from qinfer.jobs.job import decode_spec
from qinfer.jobs.plan import PlanHead, Shard, ShardTicket, decode_plan_head
from qinfer.jobs.queue.records import JobRecord, ShardOutcome, granted
from qinfer.jobs.resumption import MOST_DEADLY_ROWS, KeptPiece, Resumption, RowSpan, bound_to, rows_of
from qinfer.jobs.shard_rows import ExaminedShard, examined_part
from qinfer.models.readiness import is_executed
from qinfer.queue.entries import Lease
from qinfer_workers.inference.bulk.arbiter import Turn
from qinfer_workers.inference.bulk.chunks import Chunks
from qinfer_workers.inference.bulk.ensembles import EnsembleExecutor
from qinfer_workers.inference.bulk.scoring import BorrowedInstance, Purpose, Scorer
from qinfer_workers.inference.bulk.shard_files import PieceLost, ScoringTask, ShardFiles, TooManyFailed, streamed_bytes
from qinfer_workers.inference.bulk.shard_loop import Abandoned, GivenUp, HeldShard, PutOff, ScoredVersion, cancel_once
from qinfer_workers.inference.executor import InstanceBorrower, ThreadExecutor, in_thread

logger = logging.getLogger(__name__)

WAITS_S = 30.0
"""A shard waits this long for the previous one before others get it."""

MODEL_LOADS_WITHIN_S = 600.0

KEEPS_WITHIN_S = 120.0

_BROKEN = "the shard could not be run; the worker's log says why"

# more threads would take cores from online requests
pa.set_cpu_count(1)


Note = Callable[[bytes, bytes, str], Awaitable[bool]]
"""Replaces the note on a shard and logs a line; returns false if the shard has another owner."""


class Resuming:
    """The notes of one run of a shard, which continues interrupted ones as `qinfer.jobs.resumption` decides.

    Notes are fenced: the queue accepts them only from the owner who has read the latest note. So an owner that lost its
    lease can't record its work.
    """

    def __init__(self, lease: Lease, shard: Shard, bound: str, noted: bytes) -> None:
        self.note: Note
        self.rows = shard.rows
        self.is_again = lease.suspect or lease.deliveries > 1 or bool(noted)
        self._is_suspect = lease.suspect
        self._worker = lease.consumer
        self._shard = shard
        self._noted = noted
        self._step: RowSpan | None = RowSpan(0, shard.rows)
        self._work: asyncio.Future[None] | None = None
        known = _decode_noted(noted, bound)
        self.known = known.taken(shard.rows, is_suspect=lease.suspect) if shard.rows else known

    @property
    def is_whole(self) -> bool:
        """Whether no earlier run left anything."""
        return not self.known.pieces and not self.known.size

    @property
    def faults(self) -> tuple[str, ...]:
        """Unreadable inputs among the kept rows."""
        return tuple(fault for piece in self.known.pieces for fault in piece.faults)

    async def next_step(self) -> RowSpan | None:
        """Begins the next rows; `None` = all are kept."""
        known, self._step = self.known, None
        if known.is_hopeless:
            raise GivenUp(
                f"the shard was given up: {len(known.alone)} workers died or hung over {self._place()}, "
                f"{known.idle} more outside its rows, after {known.deadly} rows that kill workers "
                f"(at most {MOST_DEADLY_ROWS}); `qinfer jobs resume` tries it again"
            )
        if known.done == self.rows:
            return None
        self._step = step = known.step(self.rows)
        if self._is_suspect:
            await self._finish(self._put(known.begins(step, self._worker)))
        return step

    async def finish_step(self, take: Callable[[], KeptPiece | None]) -> None:
        """Keeps the step's scored rows."""
        await self._finish(self._store_step(take))

    async def broken_off(self, take: Callable[[], KeptPiece | None], scored: int) -> None:
        """Keeps a step's scored rows before the shard is released."""
        if self._work is not None and not self._work.done():
            await self._work
        if self._step is not None:
            piece = await in_thread("bulk-keep", take)
            has_scored = 0 < scored < self._step.stop - self._step.first
            known = self.known.broken_off(self._step, piece, has_scored=has_scored)
            if known is not self.known:
                await self._put(known)
            logger.info("shard interrupted", extra={"rows_kept": known.done, "rows": self.rows})

    async def let_go(self) -> None:
        """Removes the mark of a step without a death."""
        if self._step is not None and self.known.begun is not None:
            await self._put(self.known.broken_off(self._step, None, has_scored=False))

    async def discard_kept(self) -> None:
        """Drops the kept rows."""
        await self._put(self.known.forgotten())

    async def _store_step(self, take: Callable[[], KeptPiece | None]) -> None:
        assert self._step is not None
        step, piece = self._step, await in_thread("bulk-keep", take)
        if piece is None:
            raise Abandoned
        line = ""
        if step.is_deadly:
            line = f"{self._place()} failed: it killed {' and '.join(self.known.alone)} while it was executed alone"
        await self._put(self.known.with_piece(step, piece), line)
        self._step = None

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Continues when its caller is cancelled; `broken_off` waits for it."""
        self._work = asyncio.ensure_future(work)
        await asyncio.shield(self._work)

    async def _put(self, known: Resumption, line: str = "") -> None:
        now = known.encoded()
        if not await self.note(self._noted, now, line):
            raise Abandoned
        self._noted, self.known = now, known

    def _place(self) -> str:
        done = min(self.known.done, self.rows - 1)
        (found,) = rows_of(self._shard, done, done + 1).ranges
        return f"row {found.first_row} of '{found.url}'"


def _decode_noted(noted: bytes, bound: str) -> Resumption:
    try:
        known = Resumption.decoded(noted) if noted else Resumption(bound=bound)
    except CorruptEntry as error:
        logger.warning("the note on a shard is damaged", extra={"reason": error.message})
        known = Resumption(bound="")
    return known if known.bound == bound else Resumption(bound=bound, attempt=known.attempt + 1)


class ShardRun:
    """The run of a shard; `free` is set when the next shard may begin.

    `is_stuck` = an execution did not end after a cancellation.
    """

    def __init__(
        self,
        files: ShardFiles,
        purpose: Purpose,
        served: ScoredVersion,
        free: asyncio.Event,
        resuming: Resuming,
        *,
        ensemble: EnsembleExecutor | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._patience: asyncio.Timeout | None = None  # waits for the previous shard
        self._files, self._purpose, self._served = files, purpose, served
        self._chunks = self._new_chunks(free)
        self._scorer = Scorer(purpose, self._chunks)
        self._is_stopped = False
        self._writing: asyncio.Future[ShardOutcome | None] | None = None
        self._free, self.resuming, self._ensemble = free, resuming, ensemble
        self.is_stuck = False
        self.on_delay: Callable[[QinferError], None] = lambda _: None
        files.on_delay = lambda error: self._call_soon(self._delayed, error)

    @property
    def rows_scored(self) -> int:
        """Rows with an output or an error."""
        return self.resuming.known.done + self._chunks.rows_scored

    def statistics(self) -> dict[str, int]:
        """Returns the statistics since the last call."""
        return self._scorer.executions.drain()

    @property
    def faults(self) -> tuple[str, ...]:
        """Unreadable inputs that the job skips."""
        return tuple(dict.fromkeys((*self.resuming.faults, *self._files.faults)))

    def stop(self) -> None:
        """Stops the run at the next batch."""
        self._stop_scoring()
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(self._loop.time())

    def _new_chunks(self, free: asyncio.Event) -> Chunks:
        return Chunks(self._served.size, partial(self._set, self._more), partial(self._set, free))

    def _stop_scoring(self) -> None:
        self._is_stopped = True
        self._chunks.stop()
        if self._ensemble is not None:
            self._ensemble.stop()

    def _set(self, event: asyncio.Event) -> None:
        self._call_soon(event.set)

    def _call_soon(self, what: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(what, *arguments)

    def _delayed(self, error: QinferError) -> None:
        self._purpose.progress()
        self.on_delay(error)

    async def run(self) -> ShardOutcome:
        """Runs the shard; cancelled, it keeps scored rows and completes a running commit."""
        try:
            outcome = await self._run_or_keep()
        except TooManyFailed as error:
            return self._files.failed(str(error), error.failed_rows)
        except PieceLost as error:
            await self.resuming.discard_kept()
            raise PutOff.by(error) from error
        except QinferError as error:
            if error.retryable or isinstance(error, DeliveryError | Cancelled):
                raise PutOff.by(error) from error
            return self._files.failed(error.message)
        except OSError as error:
            text = f"the part can't be written to the spool folder: {error.strerror}"
            raise PutOff(text, ErrorCode.STORE_UNAVAILABLE) from error
        except (PutOff, GivenUp, Abandoned):
            raise
        except Exception:  # the boundary to the files' libraries
            logger.exception("shard failed", extra={"shard": self._purpose.request_id})
            return self._files.failed(_BROKEN)
        if outcome is None:
            raise Abandoned
        return outcome

    async def _run_or_keep(self) -> ShardOutcome | None:
        try:
            return await self._run_shard()
        except asyncio.CancelledError:
            if self.is_stuck or (outcome := await self._rest()) is None:
                raise
            return outcome

    async def _run_shard(self) -> ShardOutcome | None:
        resuming = self.resuming
        if resuming.is_again and (found := await in_thread("bulk-look", self._files.existing)):
            return found
        if resuming.is_whole:
            return await self._run_step()
        while (step := await resuming.next_step()) is not None:
            self._files.step, self._files.errors_before = step, resuming.known.errors
            is_last = step.stop == resuming.rows
            self._chunks = self._scorer.chunks = self._new_chunks(self._free if is_last else asyncio.Event())
            await self._run_step(is_last=is_last)
            if self._is_stopped:
                return None
            await resuming.finish_step(partial(self._files.take_piece, self._chunks))
            self._chunks = self._new_chunks(asyncio.Event())
        self._free.set()
        if self._is_stopped:
            return None
        pieces = resuming.known.pieces
        self._writing = asyncio.ensure_future(in_thread("bulk-join", lambda: self._files.join(pieces, self._chunks)))
        outcome = await asyncio.shield(self._writing)
        if outcome is not None:
            await in_thread("bulk-forget", self._files.forget_pieces)
        return outcome

    async def _run_step(self, *, is_last: bool = True) -> ShardOutcome | None:
        reading = asyncio.ensure_future(in_thread("bulk-read", lambda: self._files.read(self._chunks)))
        writing = asyncio.ensure_future(in_thread("bulk-write", lambda: self._files.write(self._chunks)))
        scoring = asyncio.ensure_future(self._score(is_last=is_last))
        self._writing = writing
        parts: tuple[asyncio.Future[Any], ...] = (reading, scoring, writing)
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            self._files.keeps = True
            raise
        finally:
            if not all(part.done() for part in parts):
                self._stop_scoring()  # the threads end, and commit nothing any more
                await cancel_once([scoring])
        for part in parts:
            if part.done() and not part.cancelled() and (error := part.exception()) is not None:
                raise self._scorer.error or error
        if self._scorer.error is not None:
            raise self._scorer.error
        return await writing

    async def _rest(self) -> ShardOutcome | None:
        """Keeps scored rows unless `hurry` is set; returns a running commit's outcome."""
        keeping = asyncio.ensure_future(self._keep_progress())
        hurry = asyncio.ensure_future(self._served.hurry.wait())
        await asyncio.wait((keeping, hurry), timeout=KEEPS_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not keeping.done():
            return None
        try:
            return await keeping
        except (QinferError, OSError, Abandoned) as error:
            logger.warning("scored rows are lost", extra={"shard": self._purpose.request_id, "reason": str(error)})
            return None

    async def _keep_progress(self) -> ShardOutcome | None:
        self._chunks.stop()
        try:
            if self._writing is not None and (outcome := await self._writing) is not None:
                return outcome
            await self.resuming.broken_off(partial(self._files.take_piece, self._chunks), self._chunks.rows_scored)
            return None
        finally:
            await self.resuming.let_go()

    async def _score(self, *, is_last: bool) -> None:
        async with self._in_line():
            while not self._chunks.has_ended:
                await self._more.wait()
                self._more.clear()
                while self._chunks.has_work:
                    async with self._served.arbiter.turn(self._served.batcher) as turn:
                        self._chunks.share(is_shared=turn.is_shared)
                        await self._lend(turn)
        if is_last:
            self._free.set()

    @asynccontextmanager
    async def _in_line(self) -> AsyncIterator[None]:
        line = self._served.line
        try:
            async with asyncio.timeout(0 if self._chunks.is_stopped else WAITS_S) as self._patience:
                await line.acquire()
        except TimeoutError:
            if self._chunks.is_stopped:
                raise Abandoned from None
            raise PutOff("the previous shard does not end") from None
        finally:
            self._patience = None
        try:
            yield
        finally:
            line.release()

    async def _lend(self, turn: Turn) -> None:
        """Lets every instance score; cancelled, it waits unless `hurry` is set."""
        executor, batcher = self._ensemble or self._executor(self._purpose.model), self._served.batcher
        left = executor.count
        back = asyncio.get_running_loop().create_future()

        def ended(_: InstanceBorrower) -> None:
            nonlocal left
            left -= 1
            if isinstance(batcher, Batcher) and batcher.model.executor is executor:
                batcher.lend(-1)
            if not left:
                back.set_result(None)

        if isinstance(batcher, Batcher):
            batcher.lend(executor.count)
        for _ in range(executor.count):
            executor.lend(BorrowedInstance(self._scorer, turn), ended)
        try:
            await asyncio.shield(back)
        except asyncio.CancelledError:
            self._stop_scoring()
            hurry = asyncio.ensure_future(self._served.hurry.wait())
            await asyncio.wait((back, hurry), return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            self.is_stuck = not back.done()
            raise

    def _executor(self, model: LoadedModel) -> ThreadExecutor:
        if self._served.batcher.model.executor is not model.executor:
            raise PutOff("the model was reloaded")
        assert isinstance(model.executor, ThreadExecutor)
        return model.executor


async def release_memory() -> None:
    """Returns memory of ended shards to the system; without it, a worker grows."""
    # only in the main thread mimalloc reclaims the memory of ended threads
    pa.default_memory_pool().release_unused()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # only glibc has it
        await in_thread("bulk-trim", lambda: trim(0))


async def make_run(
    served: ScoredVersion, held: HeldShard, ticket: ShardTicket, record: JobRecord, free: asyncio.Event
) -> ShardRun:
    """Makes a shard's run; `PutOff` if this worker can't read or score it."""
    try:
        spec, head, grant = decode_spec(record.spec), decode_plan_head(record.head), granted(record, served.stores)
    except QinferError as error:
        raise PutOff.by(error) from error
    spec = spec.with_escape(head.csv_escape)
    model, model_hash, ensemble = served.batcher.model, served.loaded.hash_like(head.model_hash), None
    if model.spec.steps:
        ensemble, model_hash = await _ensemble_of(served, model, head), head.model_hash
        model = replace(model, spec=ensemble.spec)
    # of an earlier qinfer: fails in the end, since nothing tells whether its model will be back
    is_patient = is_executed(head.model_hash) or served.clock.now_s() < record.started_at + MODEL_LOADS_WITHIN_S
    if head.model_hash != model_hash and is_patient:
        raise PutOff("this worker has not loaded the model that the job was planned with")

    task = ScoringTask(
        job_id=record.id,
        spec=spec,
        shard=ticket.shard,
        model=model.spec,
        head=head,
        model_hash=model_hash,
        max_errors=record.max_errors,
        spool=served.spool,
        read_bytes=served.read_bytes,
        open_reader=partial(ExaminedShard, served.readers, asyncio.get_running_loop()),
        read_part=partial(examined_part, served.readers, asyncio.get_running_loop()),
        grant=grant,
    )
    name = f"{record.id}-{ticket.shard.index}"
    purpose = Purpose(
        model=model,
        clock=served.clock,
        request_id=name,
        tenant=record.tenant,
        progress=held.progress,
        outputs=spec.output.tensors,
        row_bytes=streamed_bytes(served.read_bytes),
    )
    bound = bound_to(record.head, ticket.shard, model_hash)
    resuming = Resuming(held.lease, ticket.shard, bound, record.resumptions.get(ticket.shard.index, b""))
    return ShardRun(ShardFiles(task), purpose, served, free, resuming, ensemble=ensemble)


async def _ensemble_of(served: ScoredVersion, model: LoadedModel, head: PlanHead) -> EnsembleExecutor:
    assert served.ensembles is not None
    try:
        await served.ensembles.caller.follow()
        planned = await served.ensembles.planner.again(head.executes)
    except QinferError as error:
        raise PutOff.by(error) from error
    return EnsembleExecutor(model, planned, served.ensembles, served.clock)
