"""One try of planning or finishing a job: what is written to its log before and after, and how it may end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from qinfer.bulk.job import JobState
from qinfer.delivery.jobs import JobRecord
from qinfer.errors import ModelNotReady, QinferError
from qinfer_workers.bulk.attempts import Attempts, Step, attempts_of, too_long, verdict
from qinfer_workers.bulk.office import NotWanted, Office

logger = logging.getLogger("qinfer_workers.bulk")


async def take_turn(office: Office, step: Step, record: JobRecord, work: Callable[[], Awaitable[None]]) -> None:
    """Does a step of a job, unless it was tried too long or too often; what the user can mend ends the job.

    Args:
        office: The ports.
        step: Which step.
        record: The job; its state must stay what it is for as long as the work goes on.
        work: The step itself.

    Raises:
        QinferError: It did not work for now, and is to be tried again.
    """
    jobs = office.jobs
    await office.note_idle(record)
    attempts = attempts_of(step, await jobs.log(record.id))
    try:
        async with office.hold(record):
            if why := verdict(step, attempts, office.clock.now_s(), office.settings.plan_timeout_s):
                await fail(office, record, why)
                return
            if not attempts.reason:
                await jobs.note(record.id, step.began)
            await _in_time(office, step, record, attempts, work)
    except NotWanted:
        return
    except asyncio.CancelledError:  # the process is asked to end: another takes over
        await jobs.note(record.id, f"{step.waits}the bulk worker was stopped")
        raise
    except QinferError as error:
        if not error.retryable and not isinstance(error, ModelNotReady):
            await fail(office, record, error.message)
            return
        if error.message != attempts.reason:
            await jobs.note(record.id, step.waits + error.message)
        raise
    except Exception as error:  # the boundary: else it would be tried again and again
        logger.exception("a job's step failed", extra={"job": record.id, "step": step.name})
        await fail(office, record, f"{step.name} failed: {type(error).__name__}; the bulk worker's log says more")


async def _in_time(
    office: Office, step: Step, record: JobRecord, attempts: Attempts, work: Callable[[], Awaitable[None]]
) -> None:
    """Does the work, and ends the job where it takes too long."""
    limit_s = office.settings.plan_timeout_s
    spent_s = office.clock.now_s() - attempts.since_at if attempts.since_at else 0.0
    try:
        async with asyncio.timeout(limit_s - spent_s) as limit:
            await work()
    except TimeoutError:
        if not limit.expired():
            raise
        await fail(office, record, too_long(step, limit_s, attempts.reason))


async def fail(office: Office, record: JobRecord, why: str) -> None:
    """Ends a job that can't go on; its log and record say why."""
    await office.jobs.stop(record.id, JobState.FAILED, error=why)
    logger.warning("job failed", extra={"job": record.id, "reason": why})
