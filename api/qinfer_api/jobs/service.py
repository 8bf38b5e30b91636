"""Bulk jobs: creation, status, cancellation, resumption and deletion; see docs/reference/jobs-api.md.

A job is checked before it is created. Celery plans and finishes it, workers execute its shards, and the queue keeps its
record.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from qinfer.core.messages import IdFactory
from qinfer.core.settings import Settings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import (
    BrokerUnavailable,
    Conflict,
    InvalidRequest,
    JobNotFound,
    ModelNotFound,
    Overloaded,
    QinferError,
    QuotaExceeded,
    SettingsError,
    StoreUnavailable,
    UnsupportedFeature,
)
from qinfer.jobs.examiner import PreviewJob, PreviewOf
from qinfer.jobs.job import ENDED_EARLY, JobSpec, JobState, encode_spec, with_checked_urls
from qinfer.jobs.plan import Estimate, UnplannedJob, decode_plan_head
from qinfer.jobs.queue.jobs import TOP_UP_COUNT, Jobs
from qinfer.jobs.queue.records import JobRecord, LogLine, RecordChange, Standing, damage_told, spec_of
from qinfer.jobs.shards import ShardPace
from qinfer.jobs.tasks import BulkTasks
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.spec import ModelSpec
from qinfer.observe.tracing import JOB_ID
from qinfer.queue.deliveries import JOBS, DeliveryItem
from qinfer.queue.lanes import Queue
from qinfer.wire.bodies import JobEstimate, JobPreview
from qinfer_api.auth import CallerContext
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.jobs import records
from qinfer_api.requests.webhooks import Targets
from qinfer_api.turns import SharedLimit

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXAMINE_S = 60.0
PREVIEW_S = 20.0
MOST_PREVIEW_SHARDS = 100
"""Shards among whose files a preview looks for rows, the first ones."""
MAX_WATCHERS = 512
"""The most clients that may follow jobs at a gateway: each of them costs two reads a second."""
LOOK_S = 1.0
"""Seconds within which the event stream of a follower ends at a shutdown."""

LOOK_EVERY_S = 5.0

_NOTICES = 50
_LATEST = 100
_TOGETHER = 16
# Few, because a call of Celery's broker may hang and keep its thread.
_SENDING = 2
_STATES = tuple(state.value for state in JobState)
_FULL_AGAIN_S = 30.0
_WAITS = "waits for a bulk worker, which plans it"
# A pool of its own, because a call of Celery's broker may hang and keep its thread.
_threads = ThreadPoolExecutor(4, "bulk-tasks")


JobTicket = tuple[JobRecord, bool]
"""A job, and whether `create` created it."""


@dataclass(slots=True, kw_only=True)
class BulkJobs:
    """The bulk jobs of a gateway.

    A lock in `turns` lets each tenant check one job at a time: its slow files leave examiners to others.
    """

    jobs: Jobs
    now_s: Callable[[], float]
    resolve: Callable[[str, int], ServedVersion]
    dispatcher: Dispatcher
    settings: Settings
    targets: Targets
    tasks: BulkTasks
    check: Callable[[JobSpec, ModelSpec, UrlGrant], Awaitable[None]]
    estimate: Callable[[UnplannedJob, ShardPace], Awaitable[Estimate]]
    look: Callable[[PreviewJob], Awaitable[JobPreview]]
    pace: Callable[[str, int], Awaitable[ShardPace]]
    ids: IdFactory = field(default_factory=IdFactory)
    watchers: SharedLimit = field(default_factory=SharedLimit)
    turns: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def create(self, context: CallerContext, body: bytes, key: str, *, resume: bool = False) -> JobTicket:
        """Checks and stores a job and requests its plan, or finds the earlier job of an id or key.

        With `resume`, a job that ended early is resumed; with `overwrite`, a completed one runs anew.
        """
        grant = self._grant_of(context)
        spec, chosen = await asyncio.to_thread(records.decode_job, body, grant)
        if chosen and key:
            raise InvalidRequest("the job has an 'id' and an Idempotency-Key; either names it: leave one out")
        made = records.chosen_id if chosen else records.keyed_id
        job_id = made(chosen or key, context.tenant) if chosen or key else ""
        if resume and not job_id:
            raise InvalidRequest("resume=true finds a job by its id; give the job an 'id', or an Idempotency-Key")
        known = await self.jobs.get(job_id) if job_id else None
        is_anew = known is not None and resume and bool(spec.overwrite) and known.state == JobState.COMPLETED
        if known is not None and not is_anew:
            return await self._again(context, known, spec, resume=resume)
        spec, served, endpoint = self._pinned(spec)
        self.dispatcher.charge(context)
        await _in_thread(self._check_tasks)
        await self._check_count(context, spec)
        if spec.webhook:
            await self.targets.check(spec.webhook)
        await self._in_turn(context, spec, lambda: self.check(spec, served.spec, grant))
        if is_anew:
            await self.jobs.delete(job_id)
        job_id = job_id or self.ids.ulid()
        record = records.new_record(
            job_id,
            spec,
            tenant=context.tenant,
            now_s=self.now_s(),
            kept_s=self.settings.bulk.record_ttl_s,
            trace=self.dispatcher.traces.trace_of(context, served, {JOB_ID: job_id}),
        )
        if not await self.jobs.create(
            msgspec.structs.replace(record, grant=msgspec.json.encode(grant), endpoint=endpoint)
        ):
            return await self._again(context, await self._known(record.id), spec, resume=resume)
        stands_for = f" for endpoint '{endpoint}', which is {spec.model}:{spec.version} now" if endpoint else ""
        await self.jobs.note(record.id, f"created{stands_for}; {_WAITS}")
        await self._planned(record.id)
        return await self._known(record.id), True

    async def validate(self, context: CallerContext, body: bytes) -> JobEstimate:
        """Checks and estimates a job; creates nothing."""
        grant = self._grant_of(context)
        spec, _ = await asyncio.to_thread(records.decode_job, body, grant)
        spec, served, _ = self._pinned(spec)
        self.dispatcher.charge(context)
        if spec.webhook:
            await self.targets.check(spec.webhook)
        pace = await self.pace(spec.model, spec.version)
        job = UnplannedJob("", spec, served.spec, "", grant)
        found = await self._in_turn(context, spec, lambda: self.estimate(job, pace))
        return records.shown_estimate(job.spec, found, pace)

    async def get(self, context: CallerContext, job_id: str) -> JobRecord:
        """Returns a job's record, or raises `JobNotFound`."""
        record = await self.jobs.get(records.inner_id(job_id, context.tenant))
        if record is None or record.tenant != context.tenant:
            raise records.unknown_job(job_id)
        return record

    async def list(
        self, context: CallerContext, state: str, after: str, limit: int, wanted: records.JobFilter
    ) -> tuple[Sequence[JobRecord], str]:
        """Returns a page of a tenant's jobs, and the next one's start."""
        if state and state not in _STATES:
            raise InvalidRequest(f"'{state[:40]}' is not a state of a job; use one of {', '.join(_STATES)}")
        page = await self.jobs.list(context.tenant, state or None, after, limit, wanted.fits)
        return page.records, page.after

    async def cancel(self, context: CallerContext, job_id: str) -> JobRecord:
        """Cancels a job unless it has ended; its parts stay."""
        record = await self.get(context, job_id)
        if not record.is_over:
            await self.jobs.stop(record.id, JobState.CANCELLING)
        return await self.get(context, job_id)

    async def resume(self, context: CallerContext, job_id: str, changes: records.Changes) -> JobRecord:
        """Resumes a job, keeping finished work."""
        self._check_enabled()
        record = await self.get(context, job_id)
        if record.state == JobState.COMPLETED:
            raise Conflict(f"job '{job_id}' is completed; there is nothing to resume")
        if record.state == JobState.CANCELLING:
            raise Conflict(f"job '{job_id}' is cancelling; resume it once it is cancelled")
        if record.state not in ENDED_EARLY:
            return record
        grant = self._grant_of(context)
        spec = with_checked_urls(records.changed(spec_of(record), changes), grant)
        self.resolve(record.model, 0)  # the policy may have dropped its version
        self.dispatcher.charge(context)
        await _in_thread(self._check_tasks)
        await self._check_count(context, spec)
        change: RecordChange = {
            "error": "",
            "spec": encode_spec(spec),
            "grant": msgspec.json.encode(grant),
            "max_parallel": spec.max_parallel,
            "deadline_at": records.deadline_at(spec, self.now_s()),
            "resumed_at": self.now_s(),
            "rows_before": record.rows_done + record.rows_failed,
        }
        if await self.jobs.move(record.id, ENDED_EARLY, JobState.PLANNING, **change):
            await self.jobs.note(record.id, f"resumed; {_WAITS}")
            await self._sent(record.id)
        return await self.get(context, job_id)

    async def delete(self, context: CallerContext, job_id: str) -> None:
        """Deletes an ended job's record; its output stays."""
        record = await self.get(context, job_id)
        if not await self.jobs.delete(record.id):
            record = await self.get(context, job_id)
            raise Conflict(
                f"job '{job_id}' is {record.state}; cancel it first (POST /v1/jobs/{job_id}/cancel), and delete it "
                "once it has ended"
            )

    async def log(self, context: CallerContext, job_id: str) -> Sequence[LogLine]:
        """Returns a job's log, oldest line first."""
        record = await self.get(context, job_id)
        return await self.jobs.log(record.id)

    async def preview(self, context: CallerContext, job_id: str, of: PreviewOf, rows: int) -> JobPreview:
        """Returns the first rows of a job's inputs or output, or failed ones; charges the tenant's quota."""
        grant = self._grant_of(context)
        record = await self.get(context, job_id)
        spec = spec_of(record)
        with damage_told(record.id):
            grant = msgspec.json.decode(record.grant, type=UrlGrant).narrowed(grant) if record.grant else grant
            spec = spec.with_escape(decode_plan_head(record.head).csv_escape) if record.head else spec
        shards: list[int] = []
        if of != "input":
            outcomes = await self.jobs.outcomes(record.id)
            shards = [index for index, one in sorted(outcomes.items()) if one.failed_rows or of == "output"]
            if not shards:
                return JobPreview(of=of)
        self.dispatcher.charge(context)
        work = PreviewJob(of, rows, spec, grant, tuple(shards[:MOST_PREVIEW_SHARDS]))
        return await self._in_turn(context, spec, lambda: self.look(work), PREVIEW_S)

    async def changes(
        self, context: CallerContext, record: JobRecord, heartbeat_s: float
    ) -> AsyncIterator[JobRecord | None]:
        """Yields a job at each change, and `None` after `heartbeat_s`."""
        with self.watchers.place(self.dispatcher.sharing(context)):
            yield record
            quiet_s = 0.0
            while not (record.is_over or self.dispatcher.draining):
                wait_s = min(LOOK_S, heartbeat_s)
                found = await self.jobs.wait_for_change(record.id, record.revision, wait_s)
                self.dispatcher.recheck(context)
                if found is None:
                    return
                quiet_s = 0.0 if found.revision != record.revision else quiet_s + wait_s
                if not quiet_s:
                    yield found
                elif quiet_s >= heartbeat_s:
                    quiet_s = 0.0
                    yield None
                record = found

    def check_watchers(self, context: CallerContext) -> None:
        """Raises `Overloaded` if a caller follows too many jobs."""
        if self.dispatcher.draining:
            raise Overloaded("Server exiting")
        if not self.watchers.has_room(MAX_WATCHERS, self.dispatcher.sharing(context)):
            raise Overloaded("too many clients follow jobs at this server; poll the job's state, or try again")

    def _pinned(self, spec: JobSpec) -> tuple[JobSpec, ServedVersion, str]:
        """Returns the job bound to one version, that version, and the endpoint that the job named, if any.

        An endpoint stands for its stable target, so that the output can be reproduced. A named version of a hidden
        model need not be a target: versions are compared before they get requests.
        """
        endpoints = self.dispatcher.endpoints
        routed = endpoints.by_name.get(spec.model)
        endpoint = "" if routed is None or (spec.version and routed.endpoint.hides_model) else spec.model
        place = endpoints.stable(endpoint, spec.version) if endpoint else (spec.model, spec.version)
        served = self._served(*place)
        return msgspec.structs.replace(spec, model=served.spec.name, version=served.version), served, endpoint

    def _served(self, model: str, version: int) -> ServedVersion:
        """Returns a version; the error for a version that is not served names the one that is."""
        try:
            return self.resolve(model, version)
        except ModelNotFound as error:
            newest = 0
            if version:
                with contextlib.suppress(QinferError):
                    newest = self.resolve(model, 0).version
            if not newest:
                raise
            raise ModelNotFound(
                f"{error.message}; version {newest} is served, and 'version_policy' of the configuration may hide "
                "others: it serves the latest one by default"
            ) from None

    def _check_enabled(self) -> None:
        if not self.settings.bulk.enabled:
            raise UnsupportedFeature("this server takes no bulk jobs; set QINFER_BULK__ENABLED=true to enable them")

    def _check_tasks(self) -> None:
        try:
            self.tasks.check()
        except SettingsError as error:
            raise UnsupportedFeature(error.message) from None

    def _grant_of(self, context: CallerContext) -> UrlGrant:
        self._check_enabled()
        return self.settings.stores.grant_of(context.tenant, is_shared=self.dispatcher.has_tenants)

    async def _check_count(self, context: CallerContext, spec: JobSpec) -> None:
        unfinished = await self.jobs.unfinished()
        records.check_unshared(context.tenant, spec, unfinished)
        count = sum(record.tenant == context.tenant for record in unfinished)
        if count >= self.settings.bulk.max_jobs:
            raise QuotaExceeded(
                f"{count} jobs are unfinished, the most that QINFER_BULK__MAX_JOBS allows; wait until one has ended",
                _FULL_AGAIN_S,
            )

    async def _in_turn(
        self, context: CallerContext, spec: JobSpec, look: Callable[[], Awaitable[T]], within_s: float | None = None
    ) -> T:
        within_s = EXAMINE_S if within_s is None else within_s
        is_shared = self.dispatcher.has_tenants
        turn = self.turns.setdefault(context.tenant, asyncio.Lock()) if is_shared else contextlib.nullcontext()
        try:
            async with asyncio.timeout(within_s), turn:
                return await look()
        except TimeoutError:
            raise StoreUnavailable(
                f"the stores of '{spec.inputs[0]}' and '{spec.output.url}' did not answer within {within_s:g} s; "
                "try again"
            ) from None

    async def _again(self, context: CallerContext, known: JobRecord, spec: JobSpec, *, resume: bool) -> JobTicket:
        records.check_same(context.tenant, known, spec, any_limits=resume or bool(known.resumed_at))
        if resume and known.state in ENDED_EARLY:
            limits = records.Changes(**{name: getattr(spec, name) for name in records.Changes.__struct_fields__})
            known = await self.resume(context, records.shown_job_id(known), limits)
        return known, False

    async def _planned(self, job_id: str) -> None:
        """Deletes the job if Celery's broker is away."""
        try:
            await _in_thread(self.tasks.request_plan, job_id)
        except QinferError:
            await self.jobs.stop(job_id, JobState.CANCELLED, in_hand=True)
            await self.jobs.delete(job_id)
            raise

    async def _sent(self, job_id: str) -> None:
        """If Celery's broker is away, a bulk worker's sweep requests the plan again."""
        try:
            await _in_thread(self.tasks.request_plan, job_id)
        except BrokerUnavailable as error:
            logger.warning("job waits to be planned", extra={"job_id": job_id, "error": error.message})

    async def _known(self, job_id: str) -> JobRecord:
        record = await self.jobs.get(job_id)
        if record is None:
            raise JobNotFound(f"job '{job_id}' was deleted meanwhile; create it again")
        return record


async def _in_thread(call: Callable[..., T], *arguments: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads, call, *arguments)


class JobJanitor:
    """The janitor's work on bulk jobs: it fills their lanes, and asks Celery to finish them. Gateways need no leader.

    A *notice* is a delivery that says that a job's state may have to change: nothing is left to run, too many rows
    failed, or no shard of a cancelled job waits or runs. The janitor confirms it after the last step, so the notice
    comes again after a failure; steps are idempotent. `finalise` blocks, and may be called twice for a job.
    """

    def __init__(self, delivery: Queue, catalog: Catalog, finalise: Callable[[str], None]) -> None:
        self._jobs = Jobs(delivery)
        self._deliveries = delivery.deliveries
        self._catalog = catalog
        self._finalise = finalise
        self._together = asyncio.Semaphore(_TOGETHER)
        self._sending = asyncio.Semaphore(_SENDING)
        # Models and partitions that may have notices; it forgets none, because an ended job may have a notice left.
        self._places: dict[tuple[str, int], None] = {}
        self._has_looked_back = False
        self._look_at_s = 0.0

    async def round(self) -> None:
        """Handles notices, and every `LOOK_EVERY_S` all running jobs."""
        now_s = asyncio.get_running_loop().time()
        await self.attend()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_EVERY_S
            await self.fill_lanes()

    async def attend(self) -> int:
        """Handles the due notices, and returns their number; failed ones come again."""
        outcomes: list[BaseException | None] = []
        for model, partition in await self._known():
            notices = await self._deliveries.take_due(model, partition, JOBS, _NOTICES)
            outcomes += await asyncio.gather(*map(self._act_on, notices), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        return len(outcomes)

    async def fill_lanes(self) -> None:
        """Fills the lanes of running jobs, in the order in which jobs are served."""
        for record in await self._jobs.unfinished():
            if record.state == JobState.RUNNING:
                await self._fill(record)

    async def _known(self) -> list[tuple[str, int]]:
        if not self._has_looked_back:
            latest = (await self._jobs.list(count=_LATEST)).records
            self._places |= dict.fromkeys((record.model, record.partition) for record in latest)
            self._has_looked_back = True
        self._places |= dict.fromkeys(await self._jobs.models())
        return list(self._places)

    async def _act_on(self, notice: DeliveryItem) -> None:
        async with self._together:
            record = await self._jobs.get(notice.text)
            standing = None if record is None else await self._fill(record)
            state = await self._jobs.settle(record, standing) if record is not None and standing is not None else ""
            if state == JobState.FINALIZING or state in ENDED_EARLY:
                async with self._sending:
                    await asyncio.to_thread(self._finalise, notice.text)
            await self._deliveries.done(notice.model, notice.partition, JOBS, [notice.id])

    async def _fill(self, record: JobRecord) -> Standing | None:
        workers = self._catalog.capacity(record.model, record.version).workers
        while True:
            standing = await self._jobs.advance(record.id, workers=workers)
            if standing is None or standing.moved < TOP_UP_COUNT:
                return standing
