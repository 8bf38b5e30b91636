"""The task `finalise` completes the output of a job whose shards are all settled, or fails the job.

    check every part ──▶ _manifest.json ──▶ _SUCCESS ──▶ completed
           └── broken or gone: set aside, run again

The parts determine the counts. Each step can be repeated, even by two processes at once: documents are made by
conditional creates, and the job's state changes by compare-and-set.

For a job that ended early, `_manifest.partial.json` lists the existing parts.
"""

import logging
from collections.abc import Sequence

from qinfer.errors import CorruptEntry, InvalidRequest, QinferError
from qinfer.jobs.examiner_pool import ExaminerDied
from qinfer.jobs.job import ENDED_EARLY, JobState
from qinfer.jobs.plan import ExpectedParts, JobPlan, PartInfo, Shard, frames_of
from qinfer.jobs.queue.records import JobRecord, too_many, why_failed
from qinfer_workers.jobs.documents import write_manifest, write_partial
from qinfer_workers.jobs.services import FINISHING, MAX_DEATHS, PLANNING, JobServices, NotWanted

logger = logging.getLogger("qinfer_workers.jobs")

MAX_ROUNDS = 3
"""The job fails after this many rounds of making broken parts again."""

_BROKEN = "parts are made again: "


class Finaliser:
    """Finishes jobs."""

    def __init__(self, services: JobServices) -> None:
        self._services = services

    async def run(self, job_id: str) -> None:
        """Finishes a settled job, or lists the parts of one that ended early."""
        await self._services.attempt(FINISHING, job_id, self._finish)
        await leave_partial(self._services, job_id)

    async def _finish(self, record: JobRecord, deaths: int) -> None:
        services, jobs = self._services, self._services.jobs
        plan = await services.plan_there(record)
        outcomes = await jobs.outcomes(record.id)
        if why := why_failed(outcomes.values(), record.max_errors, len(plan.shards)):
            await services.fail(record, why)
            return
        parts_of_all = services.parts_of(record, plan, plan.shards)
        found = await services.examiners.read_parts(parts_of_all, services.readers(deaths))
        wrong = [(shard, part) for shard, part in zip(plan.shards, found, strict=True) if isinstance(part, str)]
        if wrong:
            await self._make_again(record, plan, wrong, services.readers(deaths))
            return
        parts = [part for part in found if not isinstance(part, str)]
        failed_rows = sum(part.errors for part in parts)
        if 0 <= record.max_errors < failed_rows:
            await services.fail(record, too_many(failed_rows, record.max_errors))
            return
        now_s = services.clock.now_s()
        manifest = await services.in_thread(write_manifest, services.outputs_of(record), plan, parts, now_s)
        if failed_rows != record.rows_failed:
            await jobs.note(record.id, f"{record.rows_failed} failed rows were counted; the parts have {failed_rows}")
        if not await jobs.move(record.id, {JobState.FINALIZING}, JobState.COMPLETED, error=""):
            raise NotWanted
        skipped = f"; {len(plan.skipped)} files were skipped" if plan.skipped else ""
        await jobs.note(record.id, f"completed: {manifest.rows} rows, {manifest.errors} of them failed{skipped}")
        logger.info("job completed", extra={"job": record.id, "rows": manifest.rows, "errors": manifest.errors})

    async def _make_again(
        self, record: JobRecord, plan: JobPlan, wrong: Sequence[tuple[Shard, str]], readers: int
    ) -> None:
        services, jobs = self._services, self._services.jobs
        first = wrong[0][1]
        if await self._rounds(record) >= MAX_ROUNDS:
            await services.fail(record, f"{len(wrong)} parts were broken or gone {MAX_ROUNDS + 1} times: {first}")
            return
        shards = [shard for shard, _ in wrong]
        await services.examiners.set_aside(services.parts_of(record, plan, shards), readers)
        frames = frames_of(record.id, shards)
        await jobs.note(record.id, f"{len(wrong)} {_BROKEN}{first}")
        if not await jobs.requeue(record.id, frames, expected={JobState.FINALIZING}):
            raise NotWanted
        await jobs.advance(record.id, workers=await services.workers_for(record))
        logger.warning("parts made again", extra={"job": record.id, "parts": len(wrong), "first": first})

    async def _rounds(self, record: JobRecord) -> int:
        rounds = 0
        for line in await self._services.jobs.log(record.id):
            rounds = 0 if line.text == PLANNING.began else rounds + (_BROKEN in line.text)
        return rounds


async def leave_partial(services: JobServices, job_id: str) -> None:
    """Lists the parts of a planned job that ended early."""
    listed_at: float | None = None
    record = await services.jobs.get(job_id)
    while record is not None and record.shards and record.state in ENDED_EARLY and record.ended_at != listed_at:
        try:
            await _list_parts(services, record)
        except QinferError as error:
            if error.retryable and services.clock.now_s() - record.ended_at < services.settings.plan_timeout_s:
                raise
            logger.warning("partial manifest not written", extra={"job": record.id, "reason": error.message})
        listed_at = record.ended_at
        record = await services.jobs.get(job_id)  # it may have ended again


async def _list_parts(services: JobServices, record: JobRecord) -> None:
    try:
        plan = await services.plan_of(record)
    except InvalidRequest:  # the output belongs to another job
        return
    if plan is None:
        return
    parts = await _read_parts(services, services.parts_of(record, plan, plan.shards))
    found = [(shard, part) for shard, part in zip(plan.shards, parts, strict=True) if isinstance(part, PartInfo)]
    now_s = services.clock.now_s()
    await services.in_thread(write_partial, services.outputs_of(record), plan, found, record.ended_at, now_s)


async def _read_parts(services: JobServices, parts: ExpectedParts) -> list[PartInfo | str]:
    """Counts deaths here: an ended job has no attempts in its log."""
    reason = ""
    for deaths in range(MAX_DEATHS):
        try:
            return await services.examiners.read_parts(parts, services.readers(deaths))
        except ExaminerDied as error:
            reason = error.message
    raise CorruptEntry(f"{reason}; is a file damaged?")
