"""The use case of the task `plan`: a job's inputs become shards that wait for workers (DESIGN.md §6).

    footers ──▶ plan ──conditional create──▶ <output>/_plan.json ──▶ todo ──▶ lane

The plan is written once. Whoever comes later, because a task came twice, its worker died, or the job was resumed, reads
the one that is there: so shards and parts are the same ones, however often it is planned.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from qinfer.bulk.job import JobSpec, JobState
from qinfer.bulk.plan import Plan, Shard, ShardTicket, encode_plan, encode_plan_head, encode_ticket
from qinfer.bulk.planning import Unplanned, make_plan
from qinfer.bulk.shards import Pace
from qinfer.delivery.jobs import JobRecord, ShardOutcome
from qinfer.errors import InvalidRequest, ModelNotFound, ModelNotReady
from qinfer.repository.config import from_json, to_spec
from qinfer.settings import LimitSettings
from qinfer.storage.store import Outcome
from qinfer_workers.bulk.attempts import PLANNING
from qinfer_workers.bulk.documents import MAX_BYTES, PLAN_NAME, StoreFor, read_plan, spec_of, url_of
from qinfer_workers.bulk.early_end import leave_partial
from qinfer_workers.bulk.office import NotWanted, Office
from qinfer_workers.bulk.part_check import part_of, set_aside
from qinfer_workers.bulk.speed import rows_per_s
from qinfer_workers.bulk.turn import take_turn

logger = logging.getLogger("qinfer_workers.bulk")


class Planner:
    """Plans jobs, for the first time and when they are resumed.

    Args:
        office: The ports.
        limits: For the models' configurations.
    """

    def __init__(self, office: Office, limits: LimitSettings) -> None:
        self._office = office
        self._limits = limits

    async def run(self, job_id: str) -> None:
        """Plans a job, where it is to be planned; where it has ended early, by that or before, lists its parts.

        Raises:
            QinferError: It did not work for now, and is to be tried again.
        """
        record = await self._office.jobs.get(job_id)
        if record is not None and record.state == JobState.PLANNING:
            await take_turn(self._office, PLANNING, record, partial(self._plan, record))
        await leave_partial(self._office, job_id)

    async def _plan(self, record: JobRecord) -> None:
        office, jobs = self._office, self._office.jobs
        spec = spec_of(record)
        plan = await office.in_thread(read_plan, office.store_for, record.id, spec.output.url)
        is_new = plan is None
        if plan is None:
            plan = await self._make(record, spec)
        else:
            await self._check_model(record, plan)
        done = {} if is_new else await jobs.outcomes(record.id)
        again = await self._to_be_made_again(plan, done)
        most = spec.max_errors(plan.rows)
        head = encode_plan_head(plan)
        if not await jobs.move(record.id, {JobState.PLANNING}, JobState.PLANNING, max_errors=most, head=head):
            raise NotWanted
        frames = [(shard.index, encode_ticket(ShardTicket(record.id, shard))) for shard in plan.shards]
        if not await jobs.plan(record.id, frames, plan.rows, complete=True):
            raise NotWanted
        if again:
            running = {JobState.RUNNING, JobState.FINALIZING}  # and not one that was cancelled meanwhile
            await jobs.requeue(record.id, [frames[shard.index] for shard in again], expected=running)
        await jobs.note(record.id, _summary(plan, sum(not outcome.error for outcome in done.values()), len(again)))
        await jobs.advance(record.id, workers=await office.workers_for(record))
        logger.info("job planned", extra={"job": record.id, "shards": len(plan.shards), "rows": plan.rows})

    async def _make(self, record: JobRecord, spec: JobSpec) -> Plan:
        office = self._office
        stored = await office.store.model(record.model)
        if stored is None:
            raise ModelNotFound(f"model '{record.model}' is not known any more; load it, and resume the job")
        if stored.error or stored.pending:
            raise ModelNotReady(f"model '{record.model}' is not ready: {stored.error or 'no worker has completed it'}")
        model = to_spec(from_json(stored.config), self._limits, stored.labels)
        pace = Pace(
            rows_per_s=rows_per_s(await office.store.stats(record.model, record.version)),
            shard_s=office.settings.shard_s,
            default_rows=office.settings.default_rows_per_shard,
            max_rows=office.settings.max_rows_per_shard,
            workers=await office.workers_for(record),
        )
        resolved = msgspec.structs.replace(spec, version=record.version)
        job = Unplanned(record.id, resolved, model, stored.content_hash)
        wanted = True
        try:
            return await office.in_thread(self._make_and_write, job, pace, lambda: wanted)
        finally:
            wanted = False  # the thread goes on when this is cancelled

    def _make_and_write(self, job: Unplanned, pace: Pace, is_wanted: Callable[[], bool]) -> Plan:
        plan = make_plan(job, pace, threads=self._office.settings.plan_threads, is_wanted=is_wanted)
        url = url_of(job.spec.output.url, PLAN_NAME)
        data = encode_plan(plan)
        if len(data) > MAX_BYTES:  # nobody could read it
            raise InvalidRequest(
                f"the job's plan has {len(data)} bytes, {MAX_BYTES} are allowed; make several jobs of it"
            )
        if self._office.store_for(url).put_if_absent(data, url) is Outcome.CREATED:
            return plan
        other = read_plan(self._office.store_for, job.job_id, job.spec.output.url)
        assert other is not None, "a plan that exists can't be read"
        return other

    async def _check_model(self, record: JobRecord, plan: Plan) -> None:
        """Refuses to go on with other files of the model: one output would be of two models."""
        stored = await self._office.store.model(record.model)
        if stored is not None and not stored.pending and stored.content_hash != plan.model_hash:
            raise InvalidRequest(
                f"model '{record.model}' has changed since the job was planned; load the former one, or make a new job"
            )

    async def _to_be_made_again(self, plan: Plan, outcomes: Mapping[int, ShardOutcome]) -> list[Shard]:
        """Looks at what a job that goes on has already, and at the inputs that it needs still.

        Returns:
            The shards that were committed and whose parts are not there any more, or broken: those are set aside.

        Raises:
            InvalidRequest: An input that is still needed is gone, or not what it was.
        """
        if not outcomes:
            return []
        office = self._office
        committed = [shard for shard in plan.shards if shard.index in outcomes and not outcomes[shard.index].error]
        found = await office.each_in_thread(partial(part_of, office.store_for, plan), committed)
        again = [shard for shard, part in zip(committed, found, strict=True) if isinstance(part, str)]
        await office.each_in_thread(partial(set_aside, office.store_for, plan), again)
        kept = {shard.index for shard in committed} - {shard.index for shard in again}
        needed = {r.url: r.etag for shard in plan.shards if shard.index not in kept for r in shard.ranges}
        problems = await office.each_in_thread(partial(_changed, office.store_for), list(needed.items()))
        if changed := [problem for problem in problems if problem]:
            more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise InvalidRequest(f"{changed[0]}{more}; make a new job, or put back what was there")
        return again


def _changed(store_for: StoreFor, file: tuple[str, str]) -> str:
    """Says what is wrong with an input, if anything is."""
    url, etag = file
    stat = store_for(url).stat(url)
    if stat is None:
        return f"input '{url}' is gone"
    return "" if stat.etag == etag else f"input '{url}' has changed since the job was planned"


def _summary(plan: Plan, committed: int, again: int) -> str:
    text = f"planned: {len(plan.shards)} shards of {len(plan.sources)} files, {plan.rows} rows"
    if committed:
        text += f"; {committed} were done before"
    return f"{text}, {again} of their parts are gone or broken and are made again" if again else text
