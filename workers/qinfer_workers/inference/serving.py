"""A model version that a worker serves: its batcher, its lanes, and its reads of external payloads.

`Lookout` chooses the lanes in which to look for entries of dead workers: a worker watches the lanes from which it has
fetched, and all lanes after a broken connection or a missing heartbeat; it watches quiet lanes in turns.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from qinfer.batching.batcher import Batcher
from qinfer.batching.sequences.iterations import IterativeBatcher
from qinfer.core.settings import WorkerSettings
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.models.spec import LANE_NAMES, lanes_of
from qinfer.models.store import ControlStore
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer_workers.inference.ensembles.runs import EnsembleBatcher

LaneBatcher = Batcher | IterativeBatcher | EnsembleBatcher

_LOOK_S = 0.05
_GRACE_S = 0.2


MAX_READS = 16

SLOW_S = 0.25
"""Slower reads no longer count: they delay only their own requests."""

STALLED_S = 2.0
"""If all reads stall this long, only requests without external payloads are fetched."""


class PayloadReads:
    """Tasks that read external payloads of a model version; `open` maps them to (requests, monotonic start)."""

    def __init__(self) -> None:
        self.open: dict[asyncio.Task[None], tuple[int, float]] = {}
        self._changed_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether no further read may begin."""
        return sum(count for count, _ in self.open.values()) >= MAX_READS

    def add(self, task: "asyncio.Task[None]", count: int) -> None:
        """Tracks a task that admits `count` requests."""
        self._changed_s = time.monotonic()
        self.open[task] = count, self._changed_s
        task.add_done_callback(self._on_read_end)

    async def limit_fetch(self, count: int) -> int:
        """Returns how many of `count` to fetch; if none, waits for a read."""
        now_s = time.monotonic()
        fresh = [(number, began_s) for number, began_s in self.open.values() if now_s - began_s < SLOW_S]
        left = count - sum(number for number, _ in fresh)
        wait_s = 0.0
        if self.is_full:
            wait_s = self._changed_s + STALLED_S - now_s
        elif left <= 0:
            wait_s = min(began_s for _, began_s in fresh) + SLOW_S - now_s
        if wait_s <= 0:
            return max(left, 1)
        await asyncio.wait(list(self.open), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        return 0

    async def stop(self) -> None:
        """Cancels open reads, which give back their requests."""
        if tasks := list(self.open):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _on_read_end(self, task: "asyncio.Task[None]") -> None:
        del self.open[task]
        self._changed_s = time.monotonic()


class Serving:
    """A model version that the worker serves.

    `lanes` of an earlier configuration come last. `quiet` = no fetch is in progress: a cancelled one would leave
    leases.
    """

    fetcher: "asyncio.Task[None]"

    def __init__(self, batcher: LaneBatcher, metrics: MetricsSettings) -> None:
        self.batcher = batcher
        batcher.tally.with_summaries = metrics.summary_latencies
        batcher.tally.with_histogram = metrics.histogram_latencies
        self.lanes = self._own()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.reads = PayloadReads()
        self.is_settled = False

    def is_still(self, *, ends: bool) -> bool:
        """Returns whether serving is paused and nothing of it executes or is read."""
        executes = self.batcher.executing and not self._is_held(ends=ends)
        return self.batcher.paused and not executes and self.quiet.is_set() and not self.reads.open

    async def pause_serving(self, *, ends: bool = True) -> None:
        """Takes no more requests, and waits for current requests; without `ends`, those of ensembles are held."""
        if isinstance(self.batcher, EnsembleBatcher) and self._is_held(ends=ends):
            self.batcher.hold()
        else:
            await self.batcher.pause_batching()
        # Begun reads can give back their requests.
        await self.quiet.wait()
        await self.reads.stop()
        if not self._is_held(ends=ends):
            await self.batcher.idle()

    def _is_held(self, *, ends: bool) -> bool:
        return isinstance(self.batcher, EnsembleBatcher) and not ends

    def reread(self) -> None:
        """Takes a new configuration; the last one's lanes are still read."""
        own = self._own()
        self.lanes = own + tuple(lane for lane in self.lanes if lane not in own)
        self.is_settled = False

    async def find_leftovers(self, queue: Queue) -> None:
        """Finds lanes of an earlier configuration that still hold entries."""
        if self.is_settled:
            return
        own = self._own()
        first = own[0]
        others = [Lane(first.model, first.version, name, first.partition) for name in LANE_NAMES]
        others = [lane for lane in others if lane not in own]
        depths = await queue.depth(others)
        if own != self._own():
            return
        left = tuple(lane for lane, depth in zip(others, depths, strict=True) if depth)
        self.lanes = own + left
        self.is_settled = not left

    async def drain(self, queue: Queue, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Serves until the lanes are empty or the time is over; returns false if the version is wanted again."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        was_empty = False
        while not is_wanted():
            try:
                is_empty = not any(await queue.depth(self.lanes))
            except QinferError:
                is_empty = False
            if (is_empty and was_empty) or loop.time() >= until_s:
                return True
            was_empty = is_empty
            await asyncio.sleep(_GRACE_S if is_empty else _LOOK_S)
        return False

    def _own(self) -> tuple[Lane, ...]:
        return lanes_of(self.batcher.model.spec, self.batcher.model.version)


T = TypeVar("T", bound=Serving)
Key = tuple[str, int]

_LOOKS_PER_S = 1.0

_SILENT_BEATS = 3

_LEASES = 2.5


class Lookout:
    """Chooses the lanes of one worker."""

    def __init__(self, queue: Queue, store: ControlStore, settings: WorkerSettings, worker_id: str) -> None:
        self._queue = queue
        self._store = store
        self._settings = settings
        self._id = worker_id
        self._beats: dict[str, tuple[float, float]] = {}
        """Worker → its last heartbeat, and the time at which this heartbeat was first seen."""
        self._silent: set[str] = set()
        self._turn = 0
        queue.doorbell.stirred_s = _LEASES * settings.lease_s
        queue.doorbell.alarm()

    async def chosen(self, servings: Mapping[Key, T]) -> list[tuple[Key, T]]:
        """Returns servings whose lanes to look at now."""
        if await self._is_one_missing():
            self._queue.doorbell.alarm()
        every = list(servings.items())
        count = max(1, round(_LOOKS_PER_S * self._settings.lease_s / 2))
        first, self._turn = self._turn, (self._turn + count) % max(len(every), 1)
        turns = {every[(first + number) % len(every)][0] for number in range(min(count, len(every)))}
        return [
            (key, serving)
            for key, serving in every
            if key in turns or not serving.is_settled or self._queue.is_stirred(serving.lanes)
        ]

    async def _is_one_missing(self) -> bool:
        try:
            beats = await self._store.beats()
        except BrokerUnavailable:
            return True
        now_s, before = time.monotonic(), self._beats
        self._beats = {
            worker: before[worker] if worker in before and before[worker][0] == at else (at, now_s)
            for worker, at in beats.items()
            if worker != self._id
        }
        silent_s = _SILENT_BEATS * self._settings.heartbeat_every_s
        silent = {worker for worker, (_, since_s) in self._beats.items() if now_s - since_s >= silent_s}
        is_news = not silent <= self._silent or not before.keys() <= self._beats.keys()
        self._silent = silent
        return is_news
