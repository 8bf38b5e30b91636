"""Services that the bulk worker's use cases share.

A job's log records the beginning and outcome of each attempt, and deaths of processes that read files. A killed bulk
worker logs nothing: a beginning after a beginning means that it died in between.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from qinfer.core.clock import ServerClock
from qinfer.core.settings import BulkSettings, StoreSettings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import InvalidRequest, ModelNotReady, QinferError
from qinfer.jobs.examiner_pool import DIED, ExaminerDied, ExaminerPool
from qinfer.jobs.job import JobState
from qinfer.jobs.plan import ExpectedParts, JobPlan, Shard, decode_plan_head
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord, LogLine, granted
from qinfer.models.readiness import ExecutedVersion, Pin, capacity_of, why_lost
from qinfer.models.state import DesiredState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.observe.stats import PUT_OFF
from qinfer.storage.open import Within, readable, store_for, writable
from qinfer.storage.store import StoreFor
from qinfer_workers.jobs.documents import read_plan

logger = logging.getLogger("qinfer_workers.jobs")

T = TypeVar("T")

_STALE_ROUNDS = 3
_IDLE_ROUNDS = 10
_IDLE_S = 600.0


PIN_REASON = "job"
PIN_TTL_S = 3600.0
"""A pin holds a version this long unless renewed."""

MAX_DEATHS = 5
"""A job fails after this many deaths of processes."""


class NotWanted(Exception):
    """The job's state has changed, or it is in work here."""


class JobStep(NamedTuple):
    """The state during a step, and states to which it moves the job."""

    name: str
    state: JobState
    leads_to: frozenset[JobState]

    @property
    def began(self) -> str:
        """The line of a beginning."""
        return f"{self.name} began"

    @property
    def waits(self) -> str:
        """The prefix of a failure's line."""
        return f"{self.name} is tried again: "


PLANNING = JobStep("planning", JobState.PLANNING, frozenset({JobState.RUNNING, JobState.FINALIZING}))
FINISHING = JobStep("finishing", JobState.FINALIZING, frozenset({JobState.RUNNING, JobState.COMPLETED}))


class Attempts(NamedTuple):
    """The attempts at a step: the time of the first (0 = no attempt), the deaths of processes, and the last failure."""

    since_at: float = 0.0
    deaths: int = 0
    reason: str = ""


def attempts_of(step: JobStep, log: Sequence[LogLine]) -> Attempts:
    """Returns the attempts since this step began."""
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


Work = Callable[[JobRecord, int], Awaitable[None]]
"""Works on a job; gets the number of deadly attempts."""


@dataclass(kw_only=True)
class JobServices:
    """The queue, stores and examiners with which a bulk worker plans and finishes jobs."""

    settings: BulkSettings
    stores: StoreSettings
    jobs: Jobs
    store: ControlStore
    clock: ServerClock
    store_for: StoreFor = store_for
    examiners: ExaminerPool
    _in_hand: set[str] = field(default_factory=set)
    _left_s: dict[Future[Any], float] = field(default_factory=dict)  # abandoned threads → since when

    def __post_init__(self) -> None:
        self.stale_s = _STALE_ROUNDS * self.settings.sweep_every_s
        self._threads = ThreadPoolExecutor(self.settings.plan_threads, thread_name_prefix="bulk")

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Runs a blocking call in one of `bulk.plan_threads` threads."""
        future = self._threads.submit(function, *args)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.running():
                self._left_s[future] = time.monotonic()
                future.add_done_callback(lambda done: self._left_s.pop(done, None))
            raise

    async def plan_of(self, record: JobRecord) -> JobPlan | None:
        """Reads a job's plan, if planned."""
        return await self.in_thread(read_plan, self.outputs_of(record), record)

    async def plan_there(self, record: JobRecord) -> JobPlan:
        """Reads a planned job's plan."""
        plan = await self.plan_of(record)
        if plan is None:
            raise InvalidRequest("the job's plan is gone from its output; make a new job")
        return plan

    def grant_of(self, record: JobRecord) -> UrlGrant:
        """Returns the URL prefixes that a job may use."""
        return granted(record, self.stores)

    def inputs_of(self, record: JobRecord) -> Within:
        """Returns the stores to read."""
        return readable(self.grant_of(record), self.store_for)

    def outputs_of(self, record: JobRecord) -> Within:
        """Returns the stores to write."""
        return writable(self.grant_of(record), self.store_for)

    def parts_of(self, record: JobRecord, plan: JobPlan, shards: Iterable[Shard]) -> ExpectedParts:
        """Returns the planned parts of some shards."""
        output, grant = plan.spec.output, self.grant_of(record)
        return ExpectedParts(plan.job_id, plan.model_hash, output.url, tuple(shards), grant, output.is_split)

    def hanging(self, longer_than_s: float) -> int:
        """Returns how many abandoned threads have run longer."""
        before_s = time.monotonic() - longer_than_s
        return sum(since_s < before_s for since_s in list(self._left_s.values()))

    def readers(self, deaths: int) -> int:
        """Returns how many files to read at once: fewer need less memory, and show which one is deadly."""
        return max(1, self.settings.plan_threads >> deaths)

    async def workers_for(self, record: JobRecord) -> int:
        """Returns the live workers with a job's model, at least 1."""
        return max(1, capacity_of(await self.store.workers(), record.model, record.version).workers)

    def age_s(self, record: JobRecord) -> float:
        """Returns the seconds since a job's last change."""
        return self.clock.now_s() - record.updated_at

    def is_stale(self, record: JobRecord) -> bool:
        """Returns whether a job seems abandoned."""
        return record.id not in self._in_hand and self.age_s(record) > self.stale_s

    async def note_idle(self, record: JobRecord) -> None:
        """Logs a long absence of workers, which does not count as the step's time."""
        age_s = self.age_s(record)
        if age_s > max(_IDLE_S, _IDLE_ROUNDS * self.settings.sweep_every_s):
            await self.jobs.note(record.id, f"no bulk worker ran for {age_s:.0f} s")

    def pins_of(self, record: JobRecord) -> list[Pin]:
        """Returns a job's pins: its model version, or an ensemble's steps."""
        executes: tuple[ExecutedVersion, ...] = ()
        if record.head:
            head = decode_plan_head(record.head)
            executes = head.executes or (ExecutedVersion(record.model, record.version, head.model_hash),)
        held = {(one.model, one.version): one.content_hash for one in executes} or {(record.model, record.version): ""}
        about: dict[str, Any] = {"reason": PIN_REASON, "holder": record.id}
        about["expires_at"] = self.clock.now_s() + PIN_TTL_S
        return [Pin(model=model, version=version, content_hash=one, **about) for (model, version), one in held.items()]

    async def pin(self, record: JobRecord, held: Sequence[Pin] = ()) -> None:
        """Pins what a job executes; `held` pins with half of their time left suffice."""
        pins, renew_before = self.pins_of(record), self.clock.now_s() + PIN_TTL_S / 2
        fresh = {(pin.id, pin.content_hash) for pin in held if pin.expires_at >= renew_before}
        if not {(pin.id, pin.content_hash) for pin in pins} <= fresh:
            for pin in pins:
                await self.store.put_pin(pin, PIN_TTL_S)

    def why_lost(self, record: JobRecord, workers: Sequence[WorkerRecord], desired: Mapping[str, DesiredState]) -> str:
        """Returns why the version is unavailable or changed, if known."""
        reasons = (why_lost(pin, workers, desired.get(pin.model)) for pin in self.pins_of(record))
        return next(filter(None, reasons), "")

    async def say_waiting(self, record: JobRecord, why: str) -> None:
        """Sets why a job waits (empty = it goes on), and refreshes its record."""
        if why != record.waiting:
            await self.jobs.note(record.id, f"waits: {why}" if why else "goes on")
        await self.jobs.move(record.id, {record.state}, record.state, waiting=why)

    async def fail(self, record: JobRecord, why: str) -> None:
        """Fails a job."""
        await self.jobs.stop(record.id, JobState.FAILED, error=why)
        logger.warning("job failed", extra={"job": record.id, "reason": why})

    async def attempt(self, step: JobStep, job_id: str, work: Work) -> None:
        """Attempts a step of a job in the step's state; ends the job after too many or too long attempts.

        Errors that a retry can't mend end the job, too. A change of its state elsewhere cancels the work.
        """
        record = await self.jobs.get(job_id)
        if record is None or record.state != step.state:
            return
        await self.note_idle(record)
        attempts = attempts_of(step, await self.jobs.log(record.id))
        try:
            async with self._hold(record, step.leads_to):
                await self._run_work(step, record, attempts, work)
        except NotWanted:
            return
        except asyncio.CancelledError:  # the process ends: another takes over
            await self.jobs.note(record.id, f"{step.waits}the bulk worker was stopped")
            raise
        except QinferError as error:
            if not error.retryable and not isinstance(error, ModelNotReady):
                await self.fail(record, error.message)
                return
            has_died = isinstance(error, ExaminerDied)
            if has_died or error.message != attempts.reason:
                await self.jobs.note(record.id, step.waits + error.message)
            if has_died and attempts.deaths + 1 >= MAX_DEATHS:
                await self.fail(record, _given_up(step, attempts.deaths + 1, error.message))
                return
            await self.jobs.move(record.id, {record.state}, record.state, waiting=step.waits + error.message)
            await self.store.add_stats(record.model, record.version, {PUT_OFF + error.code: 1})
            raise
        except Exception as error:  # otherwise it would be retried without end
            logger.exception("a job's step failed", extra={"job": record.id, "step": step.name})
            await self.fail(record, f"{step.name} failed: {type(error).__name__}; the bulk worker's log says more")

    async def _run_work(self, step: JobStep, record: JobRecord, attempts: Attempts, work: Work) -> None:
        limit_s = self.settings.plan_timeout_s
        spent_s = self.clock.now_s() - attempts.since_at if attempts.since_at else 0.0
        if attempts.deaths >= MAX_DEATHS:
            await self.fail(record, _given_up(step, attempts.deaths, attempts.reason))
            return
        if spent_s > limit_s:
            await self.fail(record, _too_long(step, limit_s, attempts.reason))
            return
        if not attempts.reason:
            await self.jobs.note(record.id, step.began)
        try:
            async with asyncio.timeout(limit_s - spent_s) as limit:
                await work(record, attempts.deaths)
        except TimeoutError:
            if not limit.expired():
                raise
            await self.fail(record, _too_long(step, limit_s, attempts.reason))

    @contextlib.asynccontextmanager
    async def _hold(self, record: JobRecord, leads_to: frozenset[JobState]) -> AsyncIterator[None]:
        """Sweeps skip jobs with a fresh record.

        `NotWanted` = its state changed, or it is in work here.
        """
        if record.id in self._in_hand:
            raise NotWanted
        worker = asyncio.current_task()
        assert worker is not None
        lost = False

        async def keep_fresh() -> None:
            nonlocal lost
            while not lost:
                await asyncio.sleep(self.settings.sweep_every_s / 2)
                with contextlib.suppress(QinferError):
                    if await self.jobs.move(record.id, {record.state}, record.state):
                        continue
                    now = await self.jobs.get(record.id)
                    if now is not None and now.state in leads_to:
                        return
                    lost = True
            worker.cancel()

        self._in_hand.add(record.id)
        fresh = asyncio.create_task(keep_fresh())
        try:
            yield
        except asyncio.CancelledError:
            if not lost or worker.uncancel():
                raise
            raise NotWanted from None
        finally:
            fresh.cancel()
            self._in_hand.discard(record.id)


def _given_up(step: JobStep, deaths: int, reason: str) -> str:
    if reason.startswith(DIED):
        return f"{step.name} was interrupted {deaths} times: {reason}; is a file damaged?"
    return f"{step.name} was interrupted {deaths} times by the end of the bulk worker; its log says why"


def _too_long(step: JobStep, timeout_s: float, reason: str) -> str:
    why = f": {reason}" if reason else "; is a store slow or stuck? resume the job when it has recovered"
    return f"{step.name} took more than {timeout_s:g} s{why}"
