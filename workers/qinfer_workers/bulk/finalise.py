"""The use case of the task `finalise`: a job whose shards are all settled becomes an output that is complete, or not.

    check every part ──▶ _manifest.json ──▶ _SUCCESS ──▶ completed
           └── broken or gone: set aside, run again

What is counted is what is in the parts. Every step can be repeated, also by two processes at once: documents are made
by conditional creates, and the job's state by compare-and-set.
"""

import logging
from collections.abc import Sequence
from functools import partial

from qinfer.bulk.failures import too_many, why_failed
from qinfer.bulk.job import JobState
from qinfer.bulk.plan import Plan, Shard, ShardTicket, encode_ticket
from qinfer.delivery.jobs import JobRecord
from qinfer.errors import InvalidRequest
from qinfer_workers.bulk.attempts import FINISHING, PLANNING
from qinfer_workers.bulk.documents import PLAN_GONE, read_plan, spec_of, write_manifest
from qinfer_workers.bulk.early_end import leave_partial
from qinfer_workers.bulk.office import NotWanted, Office
from qinfer_workers.bulk.part_check import part_of, set_aside
from qinfer_workers.bulk.turn import fail, take_turn

logger = logging.getLogger("qinfer_workers.bulk")

MAX_ROUNDS = 3
"""So often broken parts are made again before something else must be wrong."""

_BROKEN = "parts are made again: "


class Finaliser:
    """Finishes jobs.

    Args:
        office: The ports.
    """

    def __init__(self, office: Office) -> None:
        self._office = office

    async def run(self, job_id: str) -> None:
        """Finishes a job whose shards are settled, or leaves a list of what is there of one that has ended early.

        Raises:
            QinferError: It did not work for now, and is to be tried again.
        """
        record = await self._office.jobs.get(job_id)
        if record is not None and record.state == JobState.FINALIZING:
            await take_turn(self._office, FINISHING, record, partial(self._finish, record))
        await leave_partial(self._office, job_id)

    async def _finish(self, record: JobRecord) -> None:
        office, jobs = self._office, self._office.jobs
        plan = await office.in_thread(read_plan, office.store_for, record.id, spec_of(record).output.url)
        if plan is None:
            raise InvalidRequest(PLAN_GONE)
        outcomes = await jobs.outcomes(record.id)
        if why := why_failed(outcomes.values(), record.max_errors, len(plan.shards)):
            await fail(office, record, why)
            return
        found = await office.each_in_thread(partial(part_of, office.store_for, plan), plan.shards)
        wrong = [(shard, part) for shard, part in zip(plan.shards, found, strict=True) if isinstance(part, str)]
        if wrong:
            await self._make_again(record, plan, wrong)
            return
        parts = [part for part in found if not isinstance(part, str)]
        failed_rows = sum(part.errors for part in parts)
        if 0 <= record.max_errors < failed_rows:
            await fail(office, record, too_many(failed_rows, record.max_errors))
            return
        now_s = office.clock.now_s()
        manifest = await office.in_thread(write_manifest, office.store_for, plan, parts, now_s)
        if failed_rows != record.rows_failed:
            await jobs.note(record.id, f"{record.rows_failed} failed rows were counted; the parts have {failed_rows}")
        if not await jobs.move(record.id, {JobState.FINALIZING}, JobState.COMPLETED, error=""):
            raise NotWanted
        await jobs.note(record.id, f"completed: {manifest.rows} rows, {manifest.errors} of them failed")
        logger.info("job completed", extra={"job": record.id, "rows": manifest.rows, "errors": manifest.errors})

    async def _make_again(self, record: JobRecord, plan: Plan, wrong: Sequence[tuple[Shard, str]]) -> None:
        office, jobs = self._office, self._office.jobs
        first = wrong[0][1]
        if await self._rounds(record) >= MAX_ROUNDS:
            await fail(office, record, f"{len(wrong)} parts were broken or gone {MAX_ROUNDS + 1} times: {first}")
            return
        shards = [shard for shard, _ in wrong]
        await office.each_in_thread(partial(set_aside, office.store_for, plan), shards)
        frames = [(shard.index, encode_ticket(ShardTicket(record.id, shard))) for shard in shards]
        await jobs.note(record.id, f"{len(wrong)} {_BROKEN}{first}")
        if not await jobs.requeue(record.id, frames, expected={JobState.FINALIZING}):
            raise NotWanted
        await jobs.advance(record.id, workers=await office.workers_for(record))
        logger.warning("parts made again", extra={"job": record.id, "parts": len(wrong), "first": first})

    async def _rounds(self, record: JobRecord) -> int:
        """Returns how often parts were made again since the job was planned, or resumed."""
        rounds = 0
        for line in await self._office.jobs.log(record.id):
            rounds = 0 if line.text == PLANNING.began else rounds + (_BROKEN in line.text)
        return rounds
