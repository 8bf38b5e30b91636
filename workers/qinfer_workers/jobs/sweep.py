"""The sweep revives jobs that are stuck because a process died at a bad moment.

Every bulk worker has the loop; one of them sweeps per `bulk.sweep_every_s`, the first to take the turn.

If a job's record has not changed for `JobServices.stale_s`, the sweep sends the task again, fills the lane, or ends the
job. It also renews the pins of open jobs on their model versions, and removes other jobs' pins.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import NoReturn

from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.jobs.job import JobState
from qinfer.jobs.plan import frames_of
from qinfer.jobs.queue.records import JobRecord, spec_of, why_failed
from qinfer.jobs.tasks import BulkTasks
from qinfer.models.readiness import Pin
from qinfer_workers.jobs.services import PIN_REASON, PIN_TTL_S, JobServices

logger = logging.getLogger("qinfer_workers.jobs")

RESUMED_S = 45.0
"""Workers retry to load a pinned version within this time."""
CREATION_S = 600.0
"""Creating a job takes less than this."""
SWEEP_LIMIT_S = 120.0
TURN = 0.9
"""The part of the interval for which a turn lasts: its taker is back a whole interval later."""


class Sweeper:
    """Revives stuck jobs."""

    def __init__(self, services: JobServices, tasks: BulkTasks) -> None:
        self._services = services
        self._tasks = tasks

    async def run_rounds(self) -> NoReturn:
        """Takes the turn and sweeps, every few seconds until cancelled."""
        every_s = self._services.settings.sweep_every_s
        while True:
            try:
                async with asyncio.timeout(SWEEP_LIMIT_S):
                    if await self._services.store.take_sweep(TURN * every_s):
                        await self.run()
            except (QinferError, TimeoutError) as error:
                logger.warning("open jobs can't be checked now", extra={"reason": str(error) or "timeout"})
            except Exception:  # stuck jobs need the next round
                logger.exception("the sweep failed")
            await asyncio.sleep(every_s)

    async def run(self) -> None:
        """Checks all open jobs."""
        services = self._services
        # Pins are read first, so that a job that is resumed meanwhile is among the unfinished jobs.
        held = {pin.id: pin for pin in await services.store.pins() if pin.reason == PIN_REASON}
        for record in await services.jobs.overdue():
            await self._attend(self._expire, record)
        unfinished = await services.jobs.unfinished()
        workers, desired = await services.store.workers(), await services.store.desired()
        for record in unfinished:
            mine = [held.pop(pin.id) for pin in list(held.values()) if pin.holder == record.id]
            await self._attend(partial(self._hold, mine), record)
            await self._attend(lambda job: self._check_version(job, services.why_lost(job, workers, desired)), record)
            if services.is_stale(record):
                await self._attend(self._move_on, record)
        for pin in held.values():
            await services.store.put_pin(pin, 0.0)

    async def _hold(self, held: Sequence[Pin], record: JobRecord) -> None:
        """Renews a job's pins after half of their time, and when its plan changes them."""
        services = self._services
        wanted = {(pin.id, pin.content_hash) for pin in services.pins_of(record)}
        renew_before = services.clock.now_s() + PIN_TTL_S / 2
        if not wanted <= {(pin.id, pin.content_hash) for pin in held if pin.expires_at >= renew_before}:
            await services.pin(record)

    async def _check_version(self, record: JobRecord, why: str) -> None:
        """Sets or clears why the version is unavailable, or fails the job if it asks for that.

        The job fails only after two sweeps, since files may be changing, and after a resumption workers need time to
        load.
        """
        if record.state not in (JobState.PLANNING, JobState.RUNNING):
            return
        is_resumed = self._services.clock.now_s() < record.resumed_at + RESUMED_S
        has_failed = why and why == record.waiting and spec_of(record).on_version_change == "fail"
        if has_failed and not is_resumed:
            await self._end_job(record, JobState.FAILED, why)
        elif why != record.waiting and (why or record.state == JobState.RUNNING):
            await self._services.say_waiting(record, why)

    async def _attend(self, what: Callable[[JobRecord], Awaitable[None]], record: JobRecord) -> None:
        try:
            await what(record)
        except BrokerUnavailable:
            raise
        except QinferError as error:
            logger.warning("job can't be continued now", extra={"job": record.id, "reason": error.message})
        except Exception:  # the other jobs need the sweep
            logger.exception("a job can't be checked", extra={"job": record.id})

    async def _expire(self, record: JobRecord) -> None:
        await self._end_job(record, JobState.EXPIRED, "its deadline has passed")

    async def _end_job(self, record: JobRecord, state: JobState, why: str) -> None:
        if await self._services.jobs.stop(record.id, state, error=why, in_hand=True):
            await self._services.in_thread(self._tasks.finalise, record.id)

    async def _move_on(self, record: JobRecord) -> None:
        match record.state:
            case JobState.VALIDATING if self._services.age_s(record) > CREATION_S:
                await self._services.jobs.stop(record.id, JobState.FAILED, error="its creation was interrupted")
            case JobState.PLANNING:
                await self._send_again(record)
            case JobState.FINALIZING:
                await self._send_again(record)
            case JobState.RUNNING:
                await self._keep_running(record)
            case JobState.CANCELLING:
                await self._end_job(record, JobState.CANCELLED, "")

    async def _send_again(self, record: JobRecord) -> None:
        """Sends the record's task again; the fresh record keeps other sweeps from it."""
        await self._services.note_idle(record)
        if not await self._services.jobs.move(record.id, {record.state}, record.state):
            return
        logger.warning("task sent again", extra={"job": record.id, "state": record.state})
        send = self._tasks.request_plan if record.state == JobState.PLANNING else self._tasks.finalise
        await self._services.in_thread(send, record.id)

    async def _keep_running(self, record: JobRecord) -> None:
        services, jobs = self._services, self._services.jobs
        if lost := set(await jobs.missing(record.id)):
            try:
                await self._run_again(record, lost)
            except QinferError as error:
                if error.retryable:
                    raise
                await self._end_job(
                    record, JobState.FAILED, f"{len(lost)} shards were lost by the queue; {error.message}"
                )
                return
        standing = await jobs.advance(record.id, workers=await services.workers_for(record))
        if standing is None or standing.state != JobState.RUNNING:
            return
        if standing.has_failed:
            why = why_failed((await jobs.outcomes(record.id)).values(), record.max_errors, record.shards)
            await self._end_job(record, JobState.FAILED, why)
        elif standing.is_settled and await jobs.move(record.id, {JobState.RUNNING}, JobState.FINALIZING):
            await services.in_thread(self._tasks.finalise, record.id)

    async def _run_again(self, record: JobRecord, lost: Collection[int]) -> None:
        services, jobs = self._services, self._services.jobs
        plan = await services.plan_there(record)
        frames = frames_of(record.id, [shard for shard in plan.shards if shard.index in lost])
        if await jobs.requeue(record.id, frames, expected={JobState.RUNNING}):
            await jobs.note(record.id, f"{len(frames)} shards were lost by the queue and are run again")
