"""The tasks of a job: `plan` splits its inputs into shards that wait for workers, `finalise` completes its output.

    footers ──▶ plan ──conditional create──▶ <output>/_plan.json ──▶ todo ──▶ lane

A repeated task, or a resumption, reads the existing plan, so shards and parts stay the same.

    check every part ──▶ _manifest.json ──▶ _SUCCESS ──▶ completed
           └── broken or gone: set aside, run again

The parts determine the counts. Each step can be repeated, even by two processes at once: documents are made by
conditional creates, and the job's state changes by compare-and-set. For a job that ended early,
`_manifest.partial.json` lists the existing parts.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from qinfer.core.settings import LimitSettings
from qinfer.errors import CorruptEntry, InvalidRequest, ModelNotFound, ModelNotReady, QinferError
from qinfer.jobs.examiner_pool import ExaminerDied
from qinfer.jobs.job import ENDED_EARLY, JobSpec, JobState
from qinfer.jobs.plan import (
    PLAN_NAME,
    SHOWN_FILES,
    ExpectedParts,
    JobPlan,
    PartInfo,
    Shard,
    UnplannedJob,
    decode_plan,
    encode_plan_head,
    frames_of,
    url_of,
)
from qinfer.jobs.queue.records import JobRecord, ShardOutcome, spec_of, too_many, why_failed
from qinfer.jobs.shards import pace_of
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.dependents import kind_of_ensemble, labels_of
from qinfer.models.installation import refuse_lost
from qinfer.models.readiness import executed, is_executed, joint_hash
from qinfer.models.spec import ModelSpec
from qinfer.models.state import StoredModel
from qinfer.storage.store import CommitOutcome
from qinfer_workers.jobs.documents import (
    MAX_BYTES,
    StoreFor,
    clear,
    earlier_output,
    read_plan,
    write_manifest,
    write_partial,
)
from qinfer_workers.jobs.services import FINISHING, MAX_DEATHS, PLANNING, JobServices, NotWanted

logger = logging.getLogger("qinfer_workers.jobs")


class JobPlanner:
    """Plans new and resumed jobs."""

    def __init__(self, services: JobServices, limits: LimitSettings) -> None:
        self._services = services
        self._limits = limits

    async def run(self, job_id: str) -> None:
        """Plans a job; lists the parts of a job that ended early."""
        await self._await_model(job_id)
        await self._services.attempt(PLANNING, job_id, self._plan)
        await leave_partial(self._services, job_id)

    async def _await_model(self, job_id: str) -> None:
        """Pins the version; `ModelNotReady` until workers report what they execute.

        The wait is no attempt at planning, and has no time limit.
        """
        services = self._services
        record = await services.jobs.get(job_id)
        if record is None or record.state != JobState.PLANNING:
            return
        await services.pin(record)
        await services.store.wake()  # a worker may have to load the pinned version again
        if record.head:
            return
        stored = await services.store.model(record.model)
        if stored is None or stored.error or stored.pending:  # planning reports it
            return
        workers = await services.store.workers()
        if executed(workers, record.model, record.version):
            if record.waiting and not record.waiting.startswith(PLANNING.waits):
                await services.say_waiting(record, "")
            return
        version = f"version {record.version} of model '{record.model}'"
        is_ready = any(worker.is_ready(record.model, record.version) for worker in workers)
        unknown = f"workers have loaded {version} with different contents, or are of an earlier qinfer"
        why = services.why_lost(record, workers, await services.store.desired())
        why = why or (unknown if is_ready else f"no worker has {version} ready yet")
        await services.say_waiting(record, why)
        raise ModelNotReady(f"job '{job_id}' is not planned: {why}")

    async def _plan(self, record: JobRecord, deaths: int) -> None:
        services, jobs = self._services, self._services.jobs
        spec = spec_of(record)
        plan = await services.plan_of(record)
        is_new = plan is None
        if plan is None:
            plan = await self._make(record, spec, services.readers(deaths))
        else:
            await self._check_model(record, plan)
        done = {} if is_new else await jobs.outcomes(record.id)
        again = await self._to_be_made_again(record, plan, done, services.readers(deaths))
        most = spec.max_errors(plan.rows)
        head = encode_plan_head(plan)
        planning = JobState.PLANNING
        if not await jobs.move(record.id, {planning}, planning, max_errors=most, head=head, waiting=""):
            raise NotWanted
        await services.pin(msgspec.structs.replace(record, head=head))
        frames = frames_of(record.id, plan.shards)
        if not await jobs.add_shards(record.id, frames, plan.rows, complete=True):
            raise NotWanted
        if again:
            running = {JobState.RUNNING, JobState.FINALIZING}  # not if it was cancelled meanwhile
            await jobs.requeue(record.id, [frames[shard.index] for shard in again], expected=running)
        if is_new:
            for file in plan.skipped[:SHOWN_FILES]:
                await jobs.note(record.id, f"skipped: {file}")
        await jobs.note(record.id, _summary(plan, sum(not outcome.error for outcome in done.values()), len(again)))
        await jobs.advance(record.id, workers=await services.workers_for(record))
        logger.info("job planned", extra={"job": record.id, "shards": len(plan.shards), "rows": plan.rows})

    async def _make(self, record: JobRecord, spec: JobSpec, readers: int) -> JobPlan:
        services = self._services
        stored = await services.store.model(record.model)
        if stored is None:
            await refuse_lost(services.store)
            raise ModelNotFound(f"model '{record.model}' is not known any more; load it, and resume the job")
        if stored.error or stored.pending:
            raise ModelNotReady(f"model '{record.model}' is not ready: {stored.error or 'no worker has completed it'}")
        executes = executed(await services.store.workers(), record.model, record.version)
        if not executes:
            raise ModelNotReady(f"no worker has version {record.version} of model '{record.model}' ready any more")
        model = await self._spec_of(stored)
        stats = await services.store.stats(record.model, record.version)
        pace = pace_of(services.settings, stats, await services.workers_for(record))
        resolved = msgspec.structs.replace(spec, version=record.version)
        job = UnplannedJob(
            job_id=record.id,
            spec=resolved,
            model=model,
            model_hash=joint_hash(executes),
            grant=services.grant_of(record),
            created_at=record.created_at,
            executes=executes if model.steps else (),
        )
        data = await services.examiners.plan(job, pace, readers)
        if spec.overwrite:
            await self._clear(record, readers)
        return await services.in_thread(_written, services.outputs_of(record), record, data)

    async def _spec_of(self, stored: StoredModel) -> ModelSpec:
        used: dict[str, StoredModel] = {}
        missing = {use.model for use in stored.uses}
        while missing:
            found = await self._services.store.models(missing)
            used.update(found)
            missing = {use.model for one in found.values() for use in one.uses} - used.keys()
        spec = to_spec(from_json(stored.config), self._limits, labels_of(stored, used))
        return replace(spec, **kind_of_ensemble(stored, used)._asdict()) if spec.steps else spec

    async def _clear(self, record: JobRecord, threads: int) -> None:
        services = self._services
        earlier = await services.in_thread(earlier_output, services.outputs_of(record), record)
        if earlier is None:
            return
        other = await services.jobs.get(earlier.job_id)
        if other is not None and other.id != record.id and not other.is_over:
            raise InvalidRequest(
                f"output '{spec_of(record).output.url}' belongs to job '{other.id}', which is {other.state}; cancel "
                "that one, or wait for its end, and resume this one"
            )
        await services.in_thread(clear, services.outputs_of(record), earlier, threads)
        await services.jobs.note(record.id, f"removed {len(earlier.files)} files of job '{earlier.job_id}'")

    async def _check_model(self, record: JobRecord, plan: JobPlan) -> None:
        """Refuses a plan of an earlier qinfer if the model changed: one output would mix two models."""
        if is_executed(plan.model_hash):
            return
        stored = await self._services.store.model(record.model)
        if stored is not None and not stored.pending and stored.content_hash != plan.model_hash:
            raise InvalidRequest(
                f"model '{record.model}' has changed since the job was planned; load the former one, or make a new job"
            )

    async def _to_be_made_again(
        self, record: JobRecord, plan: JobPlan, outcomes: Mapping[int, ShardOutcome], readers: int
    ) -> list[Shard]:
        """Sets broken parts aside; returns the shards of broken and missing parts.

        `InvalidRequest` = their input is gone or changed.
        """
        if not outcomes:
            return []
        services = self._services
        committed = [shard for shard in plan.shards if shard.index in outcomes and not outcomes[shard.index].error]
        found = await services.examiners.read_parts(services.parts_of(record, plan, committed), readers)
        again = [shard for shard, part in zip(committed, found, strict=True) if isinstance(part, str)]
        await services.examiners.set_aside(services.parts_of(record, plan, again), readers)
        kept = {shard.index for shard in committed} - {shard.index for shard in again}
        needed = {r.url: r.etag for shard in plan.shards if shard.index not in kept for r in shard.ranges}
        if changed := await services.in_thread(_changed, services.inputs_of(record), needed, readers):
            more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise InvalidRequest(f"{changed[0]}{more}; make a new job")
        return again


def _written(store_for: StoreFor, record: JobRecord, data: bytes) -> JobPlan:
    output_url = spec_of(record).output.url
    url = url_of(output_url, PLAN_NAME)
    if len(data) > MAX_BYTES:  # readers would reject it
        raise InvalidRequest(f"the job's plan has {len(data)} bytes, {MAX_BYTES} are allowed; make several jobs of it")
    if store_for(url).put_if_absent(data, url) is CommitOutcome.CREATED:
        return decode_plan(data)
    other = read_plan(store_for, record)
    if other is None:
        raise InvalidRequest(f"another job writes to output '{output_url}' meanwhile; name a folder for each job")
    return other


def _changed(store_for: StoreFor, etags: Mapping[str, str], threads: int) -> list[str]:
    def problem(url: str) -> str:
        stat = store_for(url).stat(url)
        if stat is None:
            return f"input '{url}' is gone"
        return "" if stat.is_still(etags[url]) else f"input '{url}' has changed since the job was planned"

    with ThreadPoolExecutor(threads, thread_name_prefix="bulk-inputs") as pool:
        return [text for text in pool.map(problem, etags) if text]


def _summary(plan: JobPlan, committed: int, again: int) -> str:
    text = f"planned: {len(plan.shards)} shards of {len(plan.sources)} files, {plan.rows} rows"
    if plan.skipped:
        text += f"; {len(plan.skipped)} files that can't be read are skipped"
    if committed:
        text += f"; {committed} were done before"
    return f"{text}, {again} of their parts are gone or broken and are made again" if again else text


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
