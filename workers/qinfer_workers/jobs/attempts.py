"""An attempt at a step of a job, planning or finishing it: what its log says before and after, and how it may end.

An attempt that ends badly for now writes why; one whose process is killed writes nothing: so a beginning that follows
a beginning tells that the bulk worker died of it, or with it. The log also has each death of a process that read the
job's files. The attempts that went before are read from the log alone (`attempts_of`, pure).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from qinfer.errors import ModelNotReady, QinferError
from qinfer.jobs.examiner_pool import DIED, ExaminerDied
from qinfer.jobs.job import JobState
from qinfer.jobs.queue.records import JobRecord, LogLine
from qinfer_workers.jobs.services import JobServices, NotWanted

logger = logging.getLogger("qinfer_workers.jobs")

MAX_DEATHS = 5
"""So often a process may die over one job before that is taken for the job's fault."""


class Step(NamedTuple):
    """A step of the bulk worker that is attempted.

    Attributes:
        name: `planning` or `finishing`.
        leads_to: The states to which the step itself moves the job.
    """

    name: str
    leads_to: frozenset[JobState]

    @property
    def began(self) -> str:
        """The line of a beginning."""
        return f"{self.name} began"

    @property
    def waits(self) -> str:
        """How the line begins that says why it is tried again."""
        return f"{self.name} is tried again: "


PLANNING = Step("planning", frozenset({JobState.RUNNING, JobState.FINALIZING}))
FINISHING = Step("finishing", frozenset({JobState.RUNNING, JobState.COMPLETED}))


class Attempts(NamedTuple):
    """The attempts so far.

    Attributes:
        since_at: When the first began, in the broker's time; 0 = there was none.
        deaths: In how many of them the bulk worker died, or the process that read the files.
        reason: Why the last is tried again; empty = there is no such line.
    """

    since_at: float = 0.0
    deaths: int = 0
    reason: str = ""


def attempts_of(step: Step, log: Sequence[LogLine]) -> Attempts:
    """Reads the attempts since the job came to this step: the lines at the end of its log that are about the step."""
    lines: list[LogLine] = []
    for line in reversed(log):
        if line.text != step.began and not line.text.startswith(step.waits):
            break
        lines.append(line)
    if not lines:
        return Attempts()
    last = lines[0].text
    reason = last.removeprefix(step.waits) if last != step.began else ""
    silent = max(0, sum(line.text == step.began for line in lines) - bool(reason))
    told = sum(line.text.startswith(step.waits + DIED) for line in lines)
    return Attempts(lines[-1].at, silent + told, reason)


def verdict(step: Step, attempts: Attempts, now_s: float, timeout_s: float) -> str:
    """Says why a step is not to be tried again; empty = it is."""
    if attempts.deaths >= MAX_DEATHS:
        return given_up(step, attempts.deaths, attempts.reason)
    if attempts.since_at and now_s - attempts.since_at > timeout_s:
        return too_long(step, timeout_s, attempts.reason)
    return ""


def given_up(step: Step, deaths: int, reason: str) -> str:
    """Says that too many processes died over a step, and of what as far as that is known."""
    if reason.startswith(DIED):
        return f"{step.name} was broken off {deaths} times: {reason}; is a file damaged?"
    return f"{step.name} was broken off {deaths} times by the end of the bulk worker; its log says why"


def too_long(step: Step, timeout_s: float, reason: str) -> str:
    """Says that a step took too long, and why or what to do."""
    why = f": {reason}" if reason else "; is a store slow or stuck? resume the job when it is well"
    return f"{step.name} took more than {timeout_s:g} s{why}"


async def attempt(services: JobServices, step: Step, record: JobRecord, work: Callable[[int], Awaitable[None]]) -> None:
    """Does a step of a job, unless it was tried too long or too often; what the user can mend ends the job.

    Args:
        services: The ports.
        step: Which step.
        record: The job; nobody else may change its state while the work goes on.
        work: The step itself; learns in how many attempts a process died.

    Raises:
        QinferError: It did not work for now, and is to be tried again.
    """
    jobs = services.jobs
    await services.note_idle(record)
    attempts = attempts_of(step, await jobs.log(record.id))
    try:
        async with services.hold(record, step.leads_to):
            if why := verdict(step, attempts, services.clock.now_s(), services.settings.plan_timeout_s):
                await services.fail(record, why)
                return
            if not attempts.reason:
                await jobs.note(record.id, step.began)
            await _in_time(services, step, record, attempts, work)
    except NotWanted:
        return
    except asyncio.CancelledError:  # the process is asked to end: another takes over
        await jobs.note(record.id, f"{step.waits}the bulk worker was stopped")
        raise
    except QinferError as error:
        if not error.retryable and not isinstance(error, ModelNotReady):
            await services.fail(record, error.message)
            return
        has_died = isinstance(error, ExaminerDied)
        if has_died or error.message != attempts.reason:
            await jobs.note(record.id, step.waits + error.message)
        if has_died and attempts.deaths + 1 >= MAX_DEATHS:
            await services.fail(record, given_up(step, attempts.deaths + 1, error.message))
            return
        raise
    except Exception as error:  # the boundary: else it would be tried again and again
        logger.exception("a job's step failed", extra={"job": record.id, "step": step.name})
        await services.fail(record, f"{step.name} failed: {type(error).__name__}; the bulk worker's log says more")


async def _in_time(
    services: JobServices, step: Step, record: JobRecord, attempts: Attempts, work: Callable[[int], Awaitable[None]]
) -> None:
    """Does the work, and ends the job where it takes too long."""
    limit_s = services.settings.plan_timeout_s
    spent_s = services.clock.now_s() - attempts.since_at if attempts.since_at else 0.0
    try:
        async with asyncio.timeout(limit_s - spent_s) as limit:
            await work(attempts.deaths)
    except TimeoutError:
        if not limit.expired():
            raise
        await services.fail(record, too_long(step, limit_s, attempts.reason))
