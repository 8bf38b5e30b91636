"""The use case of the task `sweep`: jobs that nothing moves on any more, because a process died at a bad moment.

What moves a job on is a task, a worker, or the notice of a shard's end. Each leaves a mark on the record; a job without
one for `Office.stale_s` is looked at: its task is sent again, its lane filled, its end told.
"""

import logging
from typing import Protocol

from qinfer.bulk.job import JobState
from qinfer.bulk.plan import ShardTicket, encode_ticket
from qinfer.delivery.jobs import JobRecord
from qinfer_workers.bulk.documents import read_plan, spec_of
from qinfer_workers.bulk.finalise import too_many
from qinfer_workers.bulk.office import Office

logger = logging.getLogger("qinfer_workers.bulk")

CREATION_S = 600.0
"""Creating a job lists its inputs, and takes no longer."""


class Sender(Protocol):
    """Sends tasks; blocking: `qinfer.bulk.queue.BulkTasks`."""

    def plan(self, job_id: str) -> None:
        """Has a job planned."""
        ...

    def finalise(self, job_id: str) -> None:
        """Has a job finished."""
        ...


class Sweeper:
    """Looks after jobs that are stuck.

    Args:
        office: The ports.
        tasks: Sends the others' tasks.
    """

    def __init__(self, office: Office, tasks: Sender) -> None:
        self._office = office
        self._tasks = tasks

    async def run(self, _: str = "") -> None:
        """Looks at all jobs that have not ended.

        Raises:
            BrokerUnavailable: The next sweep goes on.
        """
        jobs, office = self._office.jobs, self._office
        for record in await jobs.overdue():
            if await jobs.stop(record.id, JobState.EXPIRED, error="its deadline has passed", in_hand=True):
                await office.in_thread(self._tasks.finalise, record.id)
        for record in await jobs.unfinished():
            if office.is_stale(record):
                await self._move_on(record)

    async def _move_on(self, record: JobRecord) -> None:
        match record.state:
            case JobState.VALIDATING if self._office.age_s(record) > CREATION_S:
                await self._office.jobs.stop(record.id, JobState.FAILED, error="its creation was broken off")
            case JobState.PLANNING:
                await self._send_again(record)
            case JobState.FINALIZING:
                await self._send_again(record)
            case JobState.RUNNING:
                await self._keep_running(record)
            case JobState.CANCELLING:
                if await self._office.jobs.stop(record.id, JobState.CANCELLED, in_hand=True):
                    await self._office.in_thread(self._tasks.finalise, record.id)

    async def _send_again(self, record: JobRecord) -> None:
        """Sends a task that was lost, or whose worker died; the mark on the record keeps others from doing the same."""
        if not await self._office.jobs.move(record.id, {record.state}, record.state):
            return
        logger.warning("task sent again", extra={"job": record.id, "state": record.state})
        send = self._tasks.plan if record.state == JobState.PLANNING else self._tasks.finalise
        await self._office.in_thread(send, record.id)

    async def _keep_running(self, record: JobRecord) -> None:
        office, jobs = self._office, self._office.jobs
        if lost := set(await jobs.missing(record.id)):
            plan = await office.in_thread(read_plan, office.store_for, record.id, spec_of(record).output.url)
            if plan is not None:
                shards = [shard for shard in plan.shards if shard.index in lost]
                frames = [(shard.index, encode_ticket(ShardTicket(record.id, shard))) for shard in shards]
                await jobs.requeue(record.id, frames, expected={JobState.RUNNING})
                await jobs.note(record.id, f"{len(frames)} shards were lost by the queue and are run again")
        standing = await jobs.advance(record.id, workers=await office.workers_for(record))
        if standing is None or standing.state != JobState.RUNNING:
            return
        if standing.has_failed:
            why = too_many(record.rows_failed, record.max_errors)
            if await jobs.stop(record.id, JobState.FAILED, error=why, in_hand=True):
                await office.in_thread(self._tasks.finalise, record.id)
        elif standing.is_settled and await jobs.move(record.id, {JobState.RUNNING}, JobState.FINALIZING):
            await office.in_thread(self._tasks.finalise, record.id)
