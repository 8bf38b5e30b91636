"""The shard loop of a model version fetches shards; a shard task takes each one to its end.

One shard is scored at a time. The next shard is fetched just before the end, and begins while the previous part is
still being committed. Other shards are left to idle workers.

A worker holds any number of healthy shards, or one suspect alone: it may kill the worker, and shards beside it would
count an execution without fault.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from qinfer.core.clock import ServerClock
from qinfer.core.retry import Backoff, OutageLog, pause_s
from qinfer.core.settings import StoreSettings
from qinfer.errors import BrokerUnavailable, CorruptEntry, ErrorCode, QinferError, QueueFull
from qinfer.jobs.examiner_pool import ExaminerPool
from qinfer.jobs.job import JobState
from qinfer.jobs.plan import ShardTicket, decode_ticket
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.observe.stats import DEAD_LETTERS, PUT_OFF, ROWS_DONE, ROWS_FAILED, ModelCounts
from qinfer.queue.entries import Lane, Lease
from qinfer.queue.lanes import Queue
from qinfer_workers.inference.bulk.arbiter import BatchSize, DeviceArbiter, JobBatcher
from qinfer_workers.inference.bulk.ensembles import EnsembleParts
from qinfer_workers.inference.loader import LoadedVersion
from qinfer_workers.inference.publisher import LeaseKeeper
from qinfer_workers.inference.tracing import ShardPlace, Spans

if TYPE_CHECKING:
    from qinfer_workers.inference.bulk.shard_run import ShardRun

logger = logging.getLogger(__name__)

STALLED_S = 1800.0
"""A shard without progress goes to another worker after this; also limits a batch and an upload."""

WANTED_EVERY_S = 2.0

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0

_RETRY_S = 0.5
_FIRST_REST_S = 1.0
_LAST_REST_S = 30.0
_LEFT_TO_OTHERS_S = 5.0

T = TypeVar("T")


class HeldShard:
    """A held shard, renewed until `deadline_s`.

    `lost` = another worker runs it, or its job does not want it.
    """

    def __init__(self, lease: Lease, clock: ServerClock) -> None:
        self.lease = lease
        self._clock = clock
        self.deadline_s = clock.now_s() + STALLED_S
        self.lost = False
        self.on_lost: Callable[[], None] = lambda: None

    def progress(self) -> None:
        """Notes that the shard has gone on, in any thread."""
        self.deadline_s = self._clock.now_s() + STALLED_S

    def lose(self) -> None:
        """Marks the lease as lost."""
        self.lost = True
        self.on_lost()


class ShardSlots:
    """A worker's slots for shards; for the event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._alone = asyncio.Lock()
        self._waiting: dict[object, Callable[[], None]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_empty(self) -> bool:
        """Whether no shard is held."""
        return not self._count

    async def ready(self) -> None:
        """Waits until no suspect is held or waiting."""
        async with self._alone:
            return

    def take_slot(self, *, is_suspect: bool = False) -> bool:
        """Takes a slot; returns false while a suspect is to be alone."""
        if self._alone.locked() and not is_suspect:
            return False
        self._count += 1
        self._empty.clear()
        return True

    def on_suspect(self, holder: object, stop: Callable[[], None] | None) -> None:
        """Registers how to stop a shard that waits for its store."""
        if stop is None:
            self._waiting.pop(holder, None)
        elif self._alone.locked():
            stop()
        else:
            self._waiting[holder] = stop

    def free_slot(self) -> None:
        """Returns a slot."""
        self._count -= 1
        if not self._count:
            self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Waits for all slots, and keeps them free."""
        async with self._alone:
            for stop in list(self._waiting.values()):
                stop()
            await self._empty.wait()
            yield
            await self._empty.wait()


@dataclass(slots=True, kw_only=True)
class ScoredVersion:
    """A served model version, its shard loop, and how its shards are scored.

    `hurry` is set when running executions are no longer waited for. `spool` is a folder for uncommitted parts. The
    scored shard holds `line`; the next one is read meanwhile. `is_open` is set while the model has open jobs.
    """

    batcher: JobBatcher
    loaded: LoadedVersion
    arbiter: DeviceArbiter
    size: BatchSize
    clock: ServerClock
    hurry: asyncio.Event
    spool: Path
    read_bytes: int
    stores: StoreSettings
    readers: ExaminerPool
    ensembles: EnsembleParts | None = None
    line: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    loop: "asyncio.Task[None] | None" = None

    async def make_run(
        self, held: HeldShard, ticket: ShardTicket, record: JobRecord, free: asyncio.Event
    ) -> "ShardRun":
        """Makes the run of a shard; imports its libraries with the first one."""
        from qinfer_workers.inference.bulk.shard_run import make_run

        return await make_run(self, held, ticket, record, free)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContext:
    """The parts of a worker that its shard loops share."""

    delivery: Queue
    jobs: Jobs
    keeper: LeaseKeeper
    worker_id: str
    slots: ShardSlots
    lease_s: float
    max_wait_s: float
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    counts: ModelCounts = field(default_factory=ModelCounts)
    spans: Spans | None = None


class PutOff(Exception):
    """A shard can't run now; `code` is for the metric."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.MODEL_NOT_READY) -> None:
        super().__init__(text)
        self.code = code

    @classmethod
    def by(cls, error: QinferError) -> "PutOff":
        """Wraps the error that is the reason."""
        return cls(error.message, error.code)


class GivenUp(Exception):
    """A shard kills workers repeatedly."""


class Abandoned(Exception):
    """A shard was stopped, and its work is discarded."""


MakeRun = Callable[[HeldShard, ShardTicket, JobRecord, asyncio.Event], Awaitable["ShardRun"]]


class JobRests:
    """Jobs whose shards could not be run here rest for a while.

    A rest doubles from a second to half a minute, and is never shorter than the last attempt, which leaves other jobs
    as much time.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._delayed: Counter[str] = Counter()
        self._jobs: dict[str, tuple[float, int]] = {}
        """Job → the end of its rest, and failures in a row."""

    def left_s(self, job_id: str) -> float:
        """Returns how long a job still rests."""
        if self._delayed[job_id]:
            return _LAST_REST_S
        return max(self._jobs.get(job_id, (0.0, 0))[0] - self._now_s(), 0.0)

    def begin_rest(self, job_id: str, tried_s: float) -> None:
        """Begins the rest of a job."""
        now_s = self._now_s()
        self._jobs = {job: rest for job, rest in self._jobs.items() if rest[0] + _LAST_REST_S > now_s}
        count = self._jobs.get(job_id, (0.0, 0))[1] + 1
        self._jobs[job_id] = now_s + max(pause_s(count, _FIRST_REST_S, _LAST_REST_S), tried_s), count

    def delay(self, job_id: str, count: int) -> None:
        """Counts delayed commits of a job."""
        self._delayed += Counter({job_id: count})  # drops counts that are not positive

    def end_rest(self, job_id: str) -> None:
        """Ends a job's rests."""
        self._jobs.pop(job_id, None)


class ShardTask:
    """One lease on a shard, taken to its end: run and finished, or dropped, buried, released.

    Each end is one step in the queue, retried while the lease holds. `free`: the next shard may begin; `left`: this one
    has ended or its part waits for its store.
    """

    def __init__(self, context: ShardContext, lease: Lease, make_run: MakeRun, rests: JobRests) -> None:
        self.free, self.left = asyncio.Event(), asyncio.Event()
        self._context, self._lease, self._make_run, self._rests = context, lease, make_run, rests
        self._shard_run: ShardRun | None = None
        self._reported: ShardTicket | None = None
        self._delay = ""
        self._held = HeldShard(lease, context.delivery.clock)
        self._outage = OutageLog(logger, "shard not finished, trying again", "shards are finished again")

    async def run(self) -> None:
        """Runs to the end; cancelled, it releases the shard with an unchanged delivery count."""
        self._context.keeper.hold([self._held])
        about = {"entry_id": self._lease.entry.entry_id}
        try:
            await self._run_or_drop()
        except asyncio.CancelledError:
            if self._shard_run is None or not self._shard_run.is_stuck:
                await self._release()
            raise
        except QinferError as error:  # refused: the lease will expire
            logger.error("shard not finished", extra={**about, "reason": error.message})
        finally:
            self._context.keeper.drop([self._held])
            self.free.set()
            self.left.set()

    async def _run_or_drop(self) -> None:
        jobs, lease = self._context.jobs, self._lease
        try:
            ticket = decode_ticket(lease.frame)
        except CorruptEntry as error:
            code, reason = error.code.value, error.message
            logger.error("corrupt shard", extra={"entry_id": lease.entry.entry_id, "reason": reason})
            await self._insist(lambda: self._context.delivery.bury(lease, "", code, reason))
            return
        job_id, index = ticket.job_id, ticket.shard.index
        if rest_s := self._rests.left_s(job_id):
            await self._release(rest_s)
            return
        try:
            record = await self._insist(lambda: jobs.get(job_id))
        except CorruptEntry as error:
            await self._put_off(ticket, PutOff.by(error))
            return
        if record is None or record.state not in (JobState.RUNNING, JobState.PLANNING):
            await self._insist(lambda: jobs.drop_shard(job_id, lease, index))
        else:
            await self._try(ticket, record)

    async def _try(self, ticket: ShardTicket, record: JobRecord) -> None:
        began_s = time.monotonic()
        try:
            await self._run_through(ticket, record)
        except PutOff as error:
            await self._put_off(ticket, error, time.monotonic() - began_s)
        except GivenUp as error:
            await self._give_up(ticket, str(error))
        else:
            self._rests.end_rest(record.id)

    async def _put_off(self, ticket: ShardTicket, error: PutOff, took_s: float = 0.0) -> None:
        self._note_put_off(ticket, str(error), error.code)
        self._rests.begin_rest(ticket.job_id, took_s)
        self._reported, self._delay = ticket, str(error)
        if self._shard_run is not None:
            with suppress(QinferError, Abandoned):
                await self._shard_run.resuming.let_go()
        await self._release(self._rests.left_s(ticket.job_id))

    def _note_put_off(self, ticket: ShardTicket, reason: str, code: ErrorCode) -> None:
        lane, about = self._lease.entry.lane, {"job": ticket.job_id, "shard": ticket.shard.index, "reason": reason}
        logger.warning("shard put off", extra=about)
        self._context.counts.add(lane.model, lane.version, PUT_OFF + code)

    def _delayed(self, ticket: ShardTicket, run: "ShardRun", error: QinferError) -> None:
        self._note_put_off(ticket, error.message, error.code)
        if not self._delay:
            self._rests.delay(ticket.job_id, 1)
            self._context.slots.on_suspect(self, run.stop)
        self._delay = error.message
        self.left.set()

    async def _give_up(self, ticket: ShardTicket, text: str) -> None:
        jobs, shard = self._context.jobs, ticket.shard
        logger.error("shard given up", extra={"job": ticket.job_id, "shard": shard.index, "reason": text})
        outcome = ShardOutcome(shard.index, shard.rows, shard.rows, text)
        code = ErrorCode.INFERENCE_FAILED.value
        if await self._insist(lambda: jobs.bury_shard(ticket.job_id, self._lease, outcome, code)):
            self._count_rows(outcome)
            self._context.counts.add(self._lease.entry.lane.model, self._lease.entry.lane.version, DEAD_LETTERS)

    async def _run_through(self, ticket: ShardTicket, record: JobRecord) -> None:
        jobs, lease = self._context.jobs, self._lease
        run = self._shard_run = await self._make_run(self._held, ticket, record, self.free)
        self._held.on_lost = run.stop
        run.on_delay = partial(self._delayed, ticket, run)
        run.resuming.note = partial(self._note, ticket)
        if self._held.lost:
            run.stop()
        watch = asyncio.create_task(self._watch(run, ticket))
        try:
            outcome = await self._recorded(run, ticket, record)
        finally:
            watch.cancel()
            if self._delay:
                self._rests.delay(record.id, -1)
                self._context.slots.on_suspect(self, None)
                self._delay = ""
            self.free.set()
            self._note_executions(run)
        if self._held.lost:
            logger.info("shard abandoned: its lease is lost", extra={"job": record.id, "shard": ticket.shard.index})
        elif outcome is None:
            await self._insist(lambda: jobs.drop_shard(record.id, lease, ticket.shard.index))
        else:
            await self._finish(record, outcome, run.faults)

    async def _recorded(self, run: "ShardRun", ticket: ShardTicket, record: JobRecord) -> ShardOutcome | None:
        spans, now_s = self._context.spans, self._context.delivery.clock.now_s
        begin_s, outcome = now_s(), None
        error: tuple[str, str] | None = ErrorCode.INTERNAL.value, "the worker's log says why"
        try:
            outcome = await run.run()
            error = (ErrorCode.INFERENCE_FAILED.value, outcome.error) if outcome.error else None
        except Abandoned:
            error = "abandoned", "the job does not want the shard any more, or another worker has it"
        except PutOff as raised:
            error = "put_off", str(raised)
            raise
        except GivenUp as raised:
            error = ErrorCode.INFERENCE_FAILED.value, str(raised)
            raise
        except asyncio.CancelledError:
            error = "cancelled", "the shard was handed back: the worker drains, or the model is being unloaded"
            raise
        finally:
            if spans is not None:
                place = ShardPlace(record, ticket.shard.index, ticket.shard.rows, self._lease.deliveries)
                spans.shard(place, outcome, begin_s, error)
        return outcome

    async def _finish(self, record: JobRecord, outcome: ShardOutcome, faults: Sequence[str]) -> None:
        jobs = self._context.jobs
        is_counted = await self._insist(lambda: jobs.finish_shard(record.id, self._lease, outcome))
        if is_counted:
            self._count_rows(outcome)
            if faults:
                more = f", and {len(faults) - 1} more ranges" if len(faults) > 1 else ""
                await self._insist(lambda: jobs.note(record.id, f"can't be read: {faults[0]}{more}"))
        about = {"job": record.id, "shard": outcome.index, "rows": outcome.rows, "failed_rows": outcome.failed_rows}
        logger.info("shard finished", extra={**about, "counted": is_counted, "error": outcome.error})

    def _count_rows(self, outcome: ShardOutcome) -> None:
        lane, failed = self._lease.entry.lane, outcome.failed_rows
        self._context.counts.add(lane.model, lane.version, ROWS_DONE, outcome.rows - failed)
        self._context.counts.add(lane.model, lane.version, ROWS_FAILED, failed)

    def _note_executions(self, run: "ShardRun") -> None:
        lane = self._lease.entry.lane
        self._context.counts.merge(lane.model, lane.version, run.statistics())

    async def _watch(self, run: "ShardRun", ticket: ShardTicket) -> None:
        while True:
            await asyncio.sleep(WANTED_EVERY_S)
            self._note_executions(run)
            with suppress(QinferError):
                self._reported = ticket
                if not await self._report(ticket, run.rows_scored):
                    run.stop()
                    return

    async def _note(self, ticket: ShardTicket, was: bytes, now: bytes, line: str) -> bool:
        jobs, index = self._context.jobs, ticket.shard.index
        is_noted = await self._insist(lambda: jobs.keep(ticket.job_id, self._lease, index, was, now, line))
        if not is_noted:
            self._held.lose()
        return is_noted

    async def _report(self, ticket: ShardTicket, rows: int) -> bool:
        return await self._context.jobs.report(ticket.job_id, self._lease, ticket.shard.index, rows, self._delay)

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S)
        while True:
            try:
                answer = await call()
            except (BrokerUnavailable, QueueFull) as error:
                if self._held.lost:
                    raise
                self._outage.failed(error.message)
            else:
                self._outage.over()
                return answer
            await asyncio.sleep(backoff.next_s())

    async def _release(self, rest_s: float = 0.0) -> None:
        if not self._held.lost:
            with suppress(QinferError):
                if self._reported is not None:
                    await self._report(self._reported, 0)
                await self._context.delivery.release([self._lease], rest_s=min(rest_s, _LEFT_TO_OTHERS_S))


class ShardLoop:
    """Idle unless `is_open` is set; cancelling `run` releases its shards."""

    def __init__(self, context: ShardContext, lanes: Sequence[Lane], make_run: MakeRun, is_open: asyncio.Event) -> None:
        self._context, self._lanes, self._make_run, self._is_open = context, lanes, make_run, is_open
        self._reclaim_at_s = 0.0
        self._rests = JobRests()
        self._outage = OutageLog(logger, "no shards fetched", "shards are fetched again")
        self._tasks: set[asyncio.Task[None]] = set()
        self._shards: set[ShardTask] = set()

    async def run(self) -> None:
        """Serves until cancelled."""
        try:
            while True:
                await self._is_open.wait()
                await self._context.slots.ready()
                with self._outage.noted():  # an outage or a refusal, which may pass
                    await self._step()
                if self._outage.is_out:
                    await asyncio.sleep(_RETRY_S)
        finally:
            await cancel_once(self._tasks)

    async def _step(self) -> None:
        context, now_s = self._context, time.monotonic()
        if not context.keeper.can_renew(self._lanes):
            await context.keeper.watch(self._lanes)
        if now_s >= self._reclaim_at_s:
            self._reclaim_at_s = now_s + context.lease_s / 2
            if leases := await self._reclaim():
                # The shards stay suspects while this waits for all slots.
                await context.delivery.release(leases)
                await self._run_suspect()
                return
        for lease in await context.delivery.fetch(self._lanes, context.worker_id, 1, context.max_wait_s):
            if context.slots.take_slot():
                await self._start_shard(lease)
            else:
                await context.delivery.release([lease])

    async def _run_suspect(self) -> None:
        async with self._context.slots.alone():
            for lease in await self._reclaim():
                about = {"entry_id": lease.entry.entry_id, "deliveries": lease.deliveries}
                logger.warning("shard reclaimed", extra=about)
                self._context.slots.take_slot(is_suspect=True)
                await self._start_shard(lease)

    async def _reclaim(self) -> list[Lease]:
        context = self._context
        leases = await context.delivery.reclaim(self._lanes, context.worker_id, context.lease_s, 1)
        return [lease for lease in leases if not context.keeper.holds(lease.entry)]

    async def _start_shard(self, lease: Lease) -> None:
        """Returns just before the shard is scored, once the previous one has ended."""
        shard = ShardTask(self._context, lease, self._make_run, self._rests)
        before = list(self._shards)
        self._shards.add(shard)
        task = asyncio.create_task(self._run_task(shard))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await shard.free.wait()
        for one in before:
            await one.left.wait()

    async def _run_task(self, shard: ShardTask) -> None:
        try:
            await shard.run()
        except Exception:  # the lease will expire, so the try counts
            logger.exception("shard task failed")
        finally:
            self._shards.discard(shard)
            self._context.slots.free_slot()
        # It holds the run; shards in a row reuse the memory.
        del shard
        if self._context.slots.is_empty:
            from qinfer_workers.inference.bulk.shard_run import release_memory

            await release_memory()


async def cancel_once(tasks: Collection["asyncio.Task[None]"]) -> None:
    """Cancels tasks, once, since they keep their work, and waits for their ends."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
