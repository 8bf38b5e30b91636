"""What the use cases of the bulk worker share: the ports, the threads for what blocks, and who works on which job."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from qinfer.bulk.store import ObjectStore
from qinfer.clock import ServerClock
from qinfer.control.base import ControlStore
from qinfer.control.capacity import capacity_of
from qinfer.delivery.jobs import JobRecord, Jobs
from qinfer.errors import BrokerUnavailable
from qinfer.settings import Settings

S = TypeVar("S")
T = TypeVar("T")

_STALE_ROUNDS = 3
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
        store_for: Callable[[str], ObjectStore],
    ) -> None:
        self.settings = settings.bulk
        self.jobs = jobs
        self.store = store
        self.clock = clock
        self.store_for = store_for
        self.stale_s = _STALE_ROUNDS * self.settings.sweep_every_s
        self._in_hand: set[str] = set()
        self._threads = ThreadPoolExecutor(self.settings.plan_threads, thread_name_prefix="bulk")

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Runs what blocks in a thread; at most `bulk.plan_threads` at once."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def each_in_thread(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Runs what blocks for each item, in threads; the results are in the order of the items."""
        results: list[T] = []
        for begin in range(0, len(items), _AT_ONCE):
            some = items[begin : begin + _AT_ONCE]
            results += await asyncio.gather(*(self.in_thread(function, item) for item in some))
        return results

    async def workers_for(self, record: JobRecord) -> int:
        """Returns how many live workers have a job's model version, at least 1."""
        return max(1, capacity_of(await self.store.workers(), record.model, record.version).workers)

    def age_s(self, record: JobRecord) -> float:
        """Returns how long ago anything about a job changed."""
        return self.clock.now_s() - record.updated_at

    def is_stale(self, record: JobRecord) -> bool:
        """Tells whether nobody works on a job, as far as its record tells."""
        return record.id not in self._in_hand and self.age_s(record) > self.stale_s

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
                with contextlib.suppress(BrokerUnavailable):
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
