"""What the use cases of the bulk worker share: the ports, the threads for what blocks, and who works on which job."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from qinfer.clock import ServerClock
from qinfer.control.base import ControlStore
from qinfer.control.readiness import capacity_of
from qinfer.delivery.jobs import JobRecord, Jobs
from qinfer.errors import QinferError
from qinfer.settings import Settings
from qinfer.storage.store import Store

S = TypeVar("S")
T = TypeVar("T")

_STALE_ROUNDS = 3
_IDLE_ROUNDS = 10
_IDLE_S = 600.0
_AT_ONCE = 1000


class NotWanted(Exception):
    """The job is in another state by now, or somebody in this process works on it already."""


class Office:
    """The ports and the threads; used on one event loop.

    Args:
        settings: Everything that can be set.
        jobs: The jobs in the queue.
        store: Models, statistics and heartbeats.
        clock: The broker's time.
        store_for: Returns the object store of a URL.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        jobs: Jobs,
        store: ControlStore,
        clock: ServerClock,
        store_for: Callable[[str], Store],
    ) -> None:
        self.settings = settings.bulk
        self.jobs = jobs
        self.store = store
        self.clock = clock
        self.store_for = store_for
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

    async def each_in_thread(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Runs what blocks for each item, in threads; the results are in the order of the items.

        The first error ends it: what has not begun by then is not begun.
        """
        results: list[T] = []
        for begin in range(0, len(items), _AT_ONCE):
            some = items[begin : begin + _AT_ONCE]
            tasks = [asyncio.create_task(self.in_thread(function, item)) for item in some]
            try:
                results += await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                raise
        return results

    def hanging(self, longer_than_s: float) -> int:
        """Returns how many threads go on so long after whoever waited for them has given up; for any thread."""
        before_s = time.monotonic() - longer_than_s
        return sum(since_s < before_s for since_s in list(self._left_s.values()))

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

    @contextlib.asynccontextmanager
    async def hold(self, record: JobRecord) -> AsyncIterator[None]:
        """Keeps a job's record fresh while it is worked on, which tells sweeps that somebody does.

        Raises:
            NotWanted: This process works on it already, or its state changed meanwhile: the work is broken off.
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
                    lost = not await self.jobs.move(record.id, {record.state}, record.state)
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
