"""A model version that a worker serves: its batcher, the lanes that it reads, and its reads of external payloads."""

import asyncio
import time
from collections.abc import Callable

from qinfer.batching.batcher import Batcher
from qinfer.batching.sequences.iterations import IterativeBatcher
from qinfer.core.settings_metrics import MetricsSettings
from qinfer.errors import QinferError
from qinfer.models.routes import NAMES, lanes_of
from qinfer.observe.latencies import latency_tally
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer_workers.inference.ensembles.batcher import EnsembleBatcher

LaneBatcher = Batcher | IterativeBatcher | EnsembleBatcher
"""The batcher of a model version whose requests come by lanes."""

_LOOK_S = 0.05
# Gateways learn at the same time as the worker that a model is to be unloaded.
_GRACE_S = 0.2


MAX_READS = 16
"""While the payloads of so many requests are being read, no more are begun until some have come."""

SLOW_S = 0.25
"""Reads that take longer count no more as requests in the worker: a slow store holds up only those who need it."""

STALLED_S = 2.0
"""When `MAX_READS` are open and none came for so long, requests without external payloads are fetched."""


class PayloadReads:
    """The tasks that read the external payloads of one model version's requests.

    Attributes:
        open: The tasks that have not ended → how many requests each reads for, and since when.
    """

    def __init__(self) -> None:
        self.open: dict[asyncio.Task[None], tuple[int, float]] = {}
        self._changed_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether no more should be read now."""
        return sum(count for count, _ in self.open.values()) >= MAX_READS

    def add(self, task: "asyncio.Task[None]", count: int) -> None:
        """Takes a task that reads the payloads of `count` requests, and admits these."""
        self._changed_s = time.monotonic()
        self.open[task] = count, self._changed_s
        task.add_done_callback(self._ended)

    async def room(self, count: int) -> int:
        """Returns how many of `count` requests may be fetched besides; if none may, waits for a read and returns 0.

        Args:
            count: How many there would be room for if no read were open.
        """
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
        """Cancels the open reads; their requests are given back."""
        if tasks := list(self.open):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        del self.open[task]
        self._changed_s = time.monotonic()


class Serving:
    """A model version that the worker serves.

    Args:
        batcher: Runs what was fetched.
        metrics: What is to be counted.

    Attributes:
        batcher: The same.
        lanes: What to read, in order; those of an earlier configuration last, until they are empty.
        quiet: Set while no fetch is under way: what a cancelled fetch had taken would be lost until its lease ends.
        reads: The reads of payloads for requests that were fetched and are not in the batcher yet.
        is_settled: Nothing is left in lanes that only an earlier configuration had.
    """

    fetcher: "asyncio.Task[None]"
    """The task that fetches for it."""

    def __init__(self, batcher: LaneBatcher, metrics: MetricsSettings) -> None:
        self.batcher = batcher
        batcher.tally.latencies = latency_tally(metrics)
        self.lanes = self._own()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.reads = PayloadReads()
        self.is_settled = False

    def is_still(self, *, ends: bool) -> bool:
        """Tells whether it is paused, as `pause` does it."""
        executes = self.batcher.executing and not self._is_held(ends=ends)
        return self.batcher.paused and not executes and self.quiet.is_set() and not self.reads.open

    async def pause(self, *, ends: bool = True) -> None:
        """Takes nothing more in, and returns when nothing is under way.

        Args:
            ends: Whether the requests of an ensemble end, too. If not, they go on afterwards: they execute nothing.
        """
        if isinstance(self.batcher, EnsembleBatcher) and self._is_held(ends=ends):
            self.batcher.hold()
        else:
            await self.batcher.pause()
        # By the end of this wait each payload read has begun, and gives back its requests when it is stopped.
        await self.quiet.wait()
        await self.reads.stop()
        if not self._is_held(ends=ends):
            await self.batcher.idle()

    def _is_held(self, *, ends: bool) -> bool:
        return isinstance(self.batcher, EnsembleBatcher) and not ends

    def reread(self) -> None:
        """Takes note of another configuration of the model; the lanes of the last are read on for now."""
        own = self._own()
        self.lanes = own + tuple(lane for lane in self.lanes if lane not in own)
        self.is_settled = False

    async def find_leftovers(self, queue: Queue) -> None:
        """Has lanes read that only an earlier configuration had, as long as they hold anything."""
        if self.is_settled:
            return
        own = self._own()
        first = own[0]
        others = [Lane(first.model, first.version, name, first.partition) for name in NAMES]
        others = [lane for lane in others if lane not in own]
        depths = await queue.depth(others)
        if own != self._own():
            return  # reconfigured meanwhile
        left = tuple(lane for lane, depth in zip(others, depths, strict=True) if depth)
        self.lanes = own + left
        self.is_settled = not left

    async def drain(self, queue: Queue, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Serves on until the lanes are empty, for the limit at most; returns false once it is wanted again."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        was_empty = False
        while not is_wanted():
            try:
                is_empty = not any(await queue.depth(self.lanes))
            except QinferError:  # what waits can't be seen now
                is_empty = False
            if (is_empty and was_empty) or loop.time() >= until_s:
                return True
            was_empty = is_empty
            await asyncio.sleep(_GRACE_S if is_empty else _LOOK_S)
        return False

    def _own(self) -> tuple[Lane, ...]:
        return lanes_of(self.batcher.model.spec, self.batcher.model.version)
