"""One lease on a shard, seen through to its end: run and finished, or dropped, buried, released.

What ends it is one step in the queue each time, tried again while the broker is away for as long as the lease holds.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from qinfer.core.retry import Backoff, OutageLog
from qinfer.errors import BrokerUnavailable, CorruptEntry, ErrorCode, QinferError, QueueFull
from qinfer.jobs.plan import ShardTicket, decode_ticket
from qinfer.jobs.queue.records import PLANNING, RUNNING, JobRecord, ShardOutcome
from qinfer.observe.stats import DEAD_LETTERS, ROWS_DONE, ROWS_FAILED
from qinfer.queue.base import Lease
from qinfer_workers.inference.tracing import ShardPlace
from qinfer_workers.jobs.scoring.desk import Abandoned, Begin, Desk, PutOff, Run
from qinfer_workers.jobs.scoring.hands import HeldShard

logger = logging.getLogger(__name__)

STALLED_S = 1800.0
"""A shard that makes no progress for so long is left to another worker: the model hangs. A batch may take so long, and
so may the upload of a part."""

LEAST_DELIVERIES = 2
"""A worker may be killed for reasons of its own: one execution that did not end says nothing about a shard."""

WANTED_EVERY_S = 2.0
"""How often a job is asked whether it still wants its shards."""

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0

T = TypeVar("T")


class Errand:
    """See the module docstring.

    Args:
        desk: What the worker's loops share.
        lease: The lease.
        begin: Makes the run of the shard.

    Attributes:
        free: Set when the next may begin: the model has no more to do for it, or will have in a moment.
        was_put_off: Whether the shard could not be run now.
    """

    def __init__(self, desk: Desk, lease: Lease, begin: Begin) -> None:
        self.free = asyncio.Event()
        self.was_put_off = False
        self._desk = desk
        self._lease = lease
        self._begin = begin
        self._run: Run | None = None
        self._held = HeldShard(lease, desk.delivery.clock.now_s() + STALLED_S)
        self._outage = OutageLog(logger, "shard not finished, trying again", "shards are finished again")

    async def do(self, put_off_s: float) -> None:
        """Does it; cancelled, it releases the shard, its delivery count as it was before.

        Args:
            put_off_s: How long a shard that can't be run now is held back from the others.
        """
        self._desk.keeper.hold([self._held])
        about = {"entry_id": self._lease.entry.entry_id}
        try:
            await self._do()
        except PutOff as error:
            self.was_put_off = True
            logger.warning("shard put off", extra={**about, "reason": str(error)})
            self.free.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(put_off_s)
            await self._release()
        except asyncio.CancelledError:
            if self._run is None or not self._run.is_stuck:
                await self._release()
            raise
        except QinferError as error:  # refused by the broker: the lease will end
            logger.error("shard not finished", extra={**about, "reason": error.message})
        finally:
            self._desk.keeper.drop([self._held])
            self.free.set()

    async def _do(self) -> None:
        jobs, lease = self._desk.delivery.jobs, self._lease
        try:
            ticket = decode_ticket(lease.frame)
        except CorruptEntry as error:
            code, reason = error.code.value, error.message
            logger.error("corrupt shard", extra={"entry_id": lease.entry.entry_id, "reason": reason})
            await self._insist(lambda: self._desk.delivery.bury(lease, "", code, reason))
            return
        job_id, index = ticket.job_id, ticket.shard.index
        record = await self._insist(lambda: jobs.get(job_id))
        if record is None or record.state not in (RUNNING, PLANNING):
            await self._insist(lambda: jobs.drop_shard(job_id, lease, index))
        elif lease.deliveries > max(self._desk.max_deliveries, LEAST_DELIVERIES):
            await self._give_up(ticket)
        else:
            await self._run_through(ticket, record)

    async def _give_up(self, ticket: ShardTicket) -> None:
        jobs, shard = self._desk.delivery.jobs, ticket.shard
        logger.error("shard given up", extra={"job": ticket.job_id, "shard": shard.index})
        text = f"the shard was given up: {self._lease.deliveries - 1} executions did not end"
        outcome = ShardOutcome(shard.index, shard.rows, shard.rows, text)
        code = ErrorCode.INFERENCE_FAILED.value
        if await self._insist(lambda: jobs.bury_shard(ticket.job_id, self._lease, outcome, code)):
            self._count(outcome)
            self._desk.counts.add(self._lease.entry.lane.model, self._lease.entry.lane.version, DEAD_LETTERS)

    async def _run_through(self, ticket: ShardTicket, record: JobRecord) -> None:
        """Runs the shard and finishes it; drops it when the job is over."""
        jobs, lease = self._desk.delivery.jobs, self._lease
        run = self._run = self._begin(self._held, ticket, record, self.free)
        self._held.on_lost = run.stop
        watch = asyncio.create_task(self._watch(run, record.id))
        try:
            outcome = await self._recorded(run, ticket, record)
        finally:
            watch.cancel()
            self.free.set()
        if self._held.lost:
            logger.info("shard abandoned: its lease is lost", extra={"job": record.id, "shard": ticket.shard.index})
        elif outcome is None:
            await self._insist(lambda: jobs.drop_shard(record.id, lease, ticket.shard.index))
        else:
            await self._finish(record, outcome)

    async def _recorded(self, run: Run, ticket: ShardTicket, record: JobRecord) -> ShardOutcome | None:
        """Runs the shard, which is a span where somebody records the job; `None` = it was abandoned."""
        spans, now_s = self._desk.spans, self._desk.delivery.clock.now_s
        begin_s, outcome = now_s(), None
        error: tuple[str, str] | None = ErrorCode.INTERNAL.value, "the worker's log says why"
        try:
            outcome = await run.run()
            error = (ErrorCode.INFERENCE_FAILED.value, outcome.error) if outcome.error else None
        except Abandoned:
            error = "abandoned", "nobody wants the shard any more, or another worker has it"
        except PutOff as raised:
            error = "put_off", str(raised)
            raise
        except asyncio.CancelledError:
            error = "cancelled", "it was handed back: the worker drains, or the model goes"
            raise
        finally:
            if spans is not None:
                place = ShardPlace(record, ticket.shard.index, ticket.shard.rows, self._lease.deliveries)
                spans.shard(place, outcome, begin_s, error)
        return outcome

    async def _finish(self, record: JobRecord, outcome: ShardOutcome) -> None:
        jobs = self._desk.delivery.jobs
        is_counted = await self._insist(lambda: jobs.finish_shard(record.id, self._lease, outcome))
        if is_counted:
            self._count(outcome)
        about = {"job": record.id, "shard": outcome.index, "rows": outcome.rows, "failed_rows": outcome.failed_rows}
        logger.info("shard finished", extra={**about, "counted": is_counted, "error": outcome.error})

    def _count(self, outcome: ShardOutcome) -> None:
        """Counts the rows of a shard that was settled."""
        lane, failed = self._lease.entry.lane, outcome.failed_rows
        self._desk.counts.add(lane.model, lane.version, ROWS_DONE, outcome.rows - failed)
        self._desk.counts.add(lane.model, lane.version, ROWS_FAILED, failed)

    async def _watch(self, run: Run, job_id: str) -> None:
        """Stops the run when its job does not want it any more."""
        while True:
            await asyncio.sleep(WANTED_EVERY_S)
            with suppress(QinferError):
                if not await self._desk.delivery.jobs.is_wanted(job_id):
                    run.stop()
                    return

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Does a step in the queue, again and again while the broker is away.

        Raises:
            QinferError: It is refused, or the lease is lost meanwhile.
        """
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

    async def _release(self) -> None:
        """Gives the shard back; what does not arrive is reclaimed when the lease ends."""
        if not self._held.lost:
            with suppress(QinferError):
                await self._desk.delivery.release([self._lease])
