"""Services that the steps of the bulk worker share: the ports, threads for blocking calls, and locks on jobs."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from qinfer.core.clock import ServerClock
from qinfer.core.settings import Settings
from qinfer.errors import QinferError
from qinfer.jobs.examiner_pool import ExaminerPool
from qinfer.jobs.job import JobState
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord
from qinfer.models.readiness import capacity_of
from qinfer.models.store import ControlStore
from qinfer.storage.store import Store

logger = logging.getLogger("qinfer_workers.jobs")

T = TypeVar("T")

_STALE_ROUNDS = 3
_IDLE_ROUNDS = 10
_IDLE_S = 600.0


class NotWanted(Exception):
    """The job is in another state by now, or somebody in this process works on it already."""


class JobServices:
    """The ports and the threads; used on one event loop.

    Args:
        settings: Everything that can be set.
        jobs: The jobs in the queue.
        store: Models, statistics and heartbeats.
        clock: The broker's time.
        store_for: Returns the object store of a URL, for the job's own documents.
        examiners: Parse the inputs and the parts.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        jobs: Jobs,
        store: ControlStore,
        clock: ServerClock,
        store_for: Callable[[str], Store],
        examiners: ExaminerPool,
    ) -> None:
        self.settings = settings.bulk
        self.jobs = jobs
        self.store = store
        self.clock = clock
        self.store_for = store_for
        self.examiners = examiners
        self.stale_s = _STALE_ROUNDS * self.settings.sweep_every_s
        self._in_hand: set[str] = set()
        self._left_s: dict[Future[Any], float] = {}  # threads that nobody waits for any more, since when
        self._threads = ThreadPoolExecutor(self.settings.plan_threads, thread_name_prefix="bulk")

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Runs what blocks in a thread; at most `bulk.plan_threads` at once."""
        future = self._threads.submit(function, *args)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.running():
                self._left_s[future] = time.monotonic()
                future.add_done_callback(lambda done: self._left_s.pop(done, None))
            raise

    def hanging(self, longer_than_s: float) -> int:
        """Returns how many threads go on so long after whoever waited for them has given up; for any thread."""
        before_s = time.monotonic() - longer_than_s
        return sum(since_s < before_s for since_s in list(self._left_s.values()))

    def readers(self, deaths: int) -> int:
        """Returns how many files are read at once, after so many deaths of the process that reads them.

        One file at a time needs less memory, and tells which file it is that the process dies of.
        """
        return max(1, self.settings.plan_threads >> deaths)

    async def workers_for(self, record: JobRecord) -> int:
        """Returns how many live workers have a job's model version, at least 1."""
        return max(1, capacity_of(await self.store.workers(), record.model, record.version).workers)

    def age_s(self, record: JobRecord) -> float:
        """Returns how long ago anything about a job changed."""
        return self.clock.now_s() - record.updated_at

    def is_stale(self, record: JobRecord) -> bool:
        """Tells whether nobody works on a job, as far as its record tells."""
        return record.id not in self._in_hand and self.age_s(record) > self.stale_s

    async def note_idle(self, record: JobRecord) -> None:
        """Notes that no bulk worker ran for long, in the job's log: that time is not its step's (`attempts_of`)."""
        age_s = self.age_s(record)
        if age_s > max(_IDLE_S, _IDLE_ROUNDS * self.settings.sweep_every_s):
            await self.jobs.note(record.id, f"no bulk worker ran for {age_s:.0f} s")

    async def fail(self, record: JobRecord, why: str) -> None:
        """Ends a job that can't go on; its log and record say why."""
        await self.jobs.stop(record.id, JobState.FAILED, error=why)
        logger.warning("job failed", extra={"job": record.id, "reason": why})

    @contextlib.asynccontextmanager
    async def hold(self, record: JobRecord, leads_to: frozenset[JobState]) -> AsyncIterator[None]:
        """Keeps a job's record fresh while it is worked on, which tells sweeps that somebody does.

        Args:
            record: The job, in the state in which the work begins.
            leads_to: The states to which the work itself moves the job.

        Raises:
            NotWanted: This process works on it already, or somebody else changed its state: the work is broken off.
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
