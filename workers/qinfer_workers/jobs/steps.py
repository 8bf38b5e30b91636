"""The tasks of a job: `plan` splits its inputs into shards that wait for workers, `finalise` completes its output.

    footers ──▶ plan ──conditional create──▶ <output>/_plan.json ──▶ todo ──▶ lane

A repeated task, or a resumption, reads the existing plan, so shards and parts stay the same.

    check every part ──▶ _manifest.json ──▶ _SUCCESS ──▶ completed
           └── broken or gone: set aside, run again

The parts determine the counts. Each step can be repeated, even by two processes at once: documents are made by
conditional creates, and the job's state changes by compare-and-set. For a job that ended early,
`_manifest.partial.json` lists the existing parts. `Sweeper` repeats tasks that were lost.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NoReturn

import msgspec

from qinfer.core.settings import LimitSettings
from qinfer.errors import BrokerUnavailable, CorruptEntry, InvalidRequest, ModelNotFound, ModelNotReady, QinferError
from qinfer.jobs.examiner_pool import ExaminerDied
from qinfer.jobs.job import ENDED_EARLY, JobSpec, JobState
from qinfer.jobs.plan import SHOWN_FILES, JobPlan, PartInfo, Shard, UnplannedJob, encode_plan_head, frames_of
from qinfer.jobs.queue.records import JobRecord, ShardOutcome, spec_of, too_many, why_failed
from qinfer.jobs.shards import pace_of
from qinfer.jobs.tasks import BulkTasks
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.dependents import kind_of_ensemble, labels_of
from qinfer.models.installation import refuse_lost
from qinfer.models.readiness import executed, is_executed, joint_hash
from qinfer.models.spec import ModelSpec
from qinfer.models.state import StoredModel
from qinfer.storage.store import StoreFor
from qinfer_workers.jobs import documents
from qinfer_workers.jobs.services import FINISHING, MAX_DEATHS, PIN_REASON, PLANNING, JobServices, NotWanted

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
        return await services.in_thread(documents.write_plan, services.outputs_of(record), record, data)

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
        earlier = await services.in_thread(documents.earlier_output, services.outputs_of(record), record)
        if earlier is None:
            return
        other = await services.jobs.get(earlier.job_id)
        if other is not None and other.id != record.id and not other.is_over:
            raise InvalidRequest(
                f"output '{spec_of(record).output.url}' belongs to job '{other.id}', which is {other.state}; cancel "
                "that one, or wait for its end, and resume this one"
            )
        await services.in_thread(documents.clear, services.outputs_of(record), earlier, threads)
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
        manifest = await services.in_thread(documents.write_manifest, services.outputs_of(record), plan, parts, now_s)
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
    parts = await _read_parts(services, record, plan)
    found = [(shard, part) for shard, part in zip(plan.shards, parts, strict=True) if isinstance(part, PartInfo)]
    now_s = services.clock.now_s()
    await services.in_thread(documents.write_partial, services.outputs_of(record), plan, found, record.ended_at, now_s)


async def _read_parts(services: JobServices, record: JobRecord, plan: JobPlan) -> list[PartInfo | str]:
    """Counts deaths here: an ended job has no attempts in its log."""
    parts, reason = services.parts_of(record, plan, plan.shards), ""
    for deaths in range(MAX_DEATHS):
        try:
            return await services.examiners.read_parts(parts, services.readers(deaths))
        except ExaminerDied as error:
            reason = error.message
    raise CorruptEntry(f"{reason}; is a file damaged?")


RESUMED_S = 45.0
"""Workers retry to load a pinned version within this time."""
CREATION_S = 600.0
"""Creating a job takes less than this."""
SWEEP_LIMIT_S = 120.0
TURN = 0.9
"""The part of the interval for which a turn lasts: its taker is back a whole interval later."""


class Sweeper:
    """Revives jobs that are stuck because a process died at a bad moment.

    Every bulk worker has the loop; one of them sweeps per `bulk.sweep_every_s`, the first to take the turn. If a job's
    record has not changed for `JobServices.stale_s`, the sweep sends the task again, fills the lane, or ends the job.
    It also renews the pins of open jobs on their model versions, and removes other jobs' pins.
    """

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
            await self._attend(partial(services.pin, held=mine), record)
            await self._attend(lambda job: self._check_version(job, services.why_lost(job, workers, desired)), record)
            if services.is_stale(record):
                await self._attend(self._move_on, record)
        for pin in held.values():
            await services.store.put_pin(pin, 0.0)

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
            case JobState.PLANNING | JobState.FINALIZING:
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
        if await jobs.settle(record, standing) != JobState.RUNNING:
            await services.in_thread(self._tasks.finalise, record.id)

    async def _run_again(self, record: JobRecord, lost: Collection[int]) -> None:
        services, jobs = self._services, self._services.jobs
        plan = await services.plan_there(record)
        frames = frames_of(record.id, [shard for shard in plan.shards if shard.index in lost])
        if await jobs.requeue(record.id, frames, expected={JobState.RUNNING}):
            await jobs.note(record.id, f"{len(frames)} shards were lost by the queue and are run again")
