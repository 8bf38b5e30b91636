"""Access to a device: online requests of any model first, bulk batches in between.

Bulk takes *turns*. A turn begins when no model with an instance on the device has online work, which is checked again
after each batch. So an online request waits for at most one bulk batch of each instance.

Under continuous online load bulk gets one batch all the same:

- at once, behind the executing online batch, while online batches are at most half full: requests that arrive meanwhile
  make the next batch larger, which costs little (`Batcher.lend`). If the online work belongs to another model, bulk
  first waits as long as the last turn that it forced;
- else after `PATIENCE_S`: the device has no time to spare.

An ensemble uses the devices of its steps' models, and the steps of its batch end its turn.

`BatchSize` finds the fewest rows of a batch at nearly the best speed, within a time limit. The search begins with one
row and grows while larger batches make a row cheaper, since they delay online requests. Now and then a neighbouring
size is tried, since speeds may change. If a single row exceeds the limit, batches may take twice as long while there
are no online requests; otherwise a model that scores many rows as fast as one would score single rows.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from qinfer.batching.batcher import Batcher
from qinfer.models.spec import Device
from qinfer_workers.inference.ensembles.runs import EnsembleBatcher

JobBatcher = Batcher | EnsembleBatcher

PATIENCE_S = 1.0
"""How long bulk batches wait for a device that has no time to spare."""

LATELY_S = 2.0
"""How long after online work a device counts as shared."""

TURN_S = 0.1
"""How long a turn lasts if another model's job waits for the device."""


class Turn:
    """Permission to use devices, for one thread; ends if the owner's model is reloaded.

    Online work of the `batchers` ends it; `lines` are the queues for the devices. A forced turn began despite online
    work, and ends after one batch.
    """

    def __init__(
        self,
        mine: JobBatcher,
        batchers: Sequence[JobBatcher],
        lines: "Sequence[_DeviceLock]",
        *,
        is_forced: bool = False,
        is_shared: bool = False,
    ) -> None:
        self.is_shared = is_shared
        self._mine = mine
        self._executor = mine.model.executor
        self._batchers, self._lines, self._is_forced = batchers, lines, is_forced
        self._ends_s = time.monotonic() + TURN_S

    def goes_on(self) -> bool:
        """Returns whether another batch may begin, after the first."""
        if self._is_forced or any(batcher.has_work for batcher in self._batchers):
            return False
        if self._mine.model.executor is not self._executor:
            return False
        return time.monotonic() < self._ends_s or not any(line.waiting for line in self._lines)


class _DeviceLock:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # first come, first served
        self.waiting = 0

    @asynccontextmanager
    async def mine(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self.lock.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.lock.release()


class DeviceArbiter:
    """The arbiter of a worker's devices; for the event loop."""

    def __init__(self) -> None:
        self._places: dict[JobBatcher, frozenset[Device]] = {}
        self._lines: dict[Device, _DeviceLock] = {}
        self._batch_s = PATIENCE_S
        """How long the last forced turn took."""
        self._online_s = float("-inf")
        """When online work was last seen, on any device, since most workers have one."""

    def place(self, batcher: JobBatcher, devices: Collection[Device]) -> None:
        """Registers a version's devices."""
        self._places[batcher] = frozenset(devices)

    def remove_batcher(self, batcher: JobBatcher) -> None:
        """Unregisters a model version."""
        self._places.pop(batcher, None)

    @asynccontextmanager
    async def turn(self, batcher: JobBatcher) -> AsyncIterator[Turn]:
        """Waits for devices without online work, or long enough."""
        devices = self._devices(batcher)
        lines = [self._lines.setdefault(device, _DeviceLock()) for device in sorted(devices)]
        async with AsyncExitStack() as mine:
            for line in lines:
                await mine.enter_async_context(line.mine())
            is_forced = not await self._quiet(batcher, devices)
            is_shared = time.monotonic() - self._online_s < LATELY_S
            batchers = self._neighbours(devices)
            begin_s = time.monotonic()
            yield Turn(batcher, batchers, lines, is_forced=is_forced, is_shared=is_shared)
            if is_forced:
                self._batch_s = time.monotonic() - begin_s

    async def _quiet(self, mine: JobBatcher, devices: frozenset[Device]) -> bool:
        begin_s = time.monotonic()
        while busy := [batcher for batcher in self._neighbours(devices) if batcher.has_work]:
            self._online_s = time.monotonic()
            patience_s = PATIENCE_S
            if all(batcher.has_room for batcher in busy if isinstance(batcher, Batcher)):
                patience_s = 0.0 if busy == [mine] else min(self._batch_s, PATIENCE_S)
            left_s = begin_s + patience_s - self._online_s
            if left_s <= 0:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await busy[0].idle()
        return True

    def _neighbours(self, devices: frozenset[Device]) -> list[JobBatcher]:
        return [batcher for batcher in self._places if self._devices(batcher) & devices]

    def _devices(self, batcher: JobBatcher) -> frozenset[Device]:
        if isinstance(batcher, Batcher):
            return self._places[batcher]
        versions, found = batcher.versions, frozenset[Device]()
        for other, devices in self._places.items():
            if (other.model.spec.name, other.model.version) in versions:
                found |= devices
        return found


_TRIALS = 3
_MOST_TRIALS = 32
_ENOUGH_S = 0.03
"""The least total time of a size's batches before the size is judged."""
_HOPELESS = 4
_SINGLE_ROWS = 2
_QUICK = 4
_SLOW = 2
_GAIN = 0.97
"""Per row, a better size costs at most this share of the cost of a smaller size."""
_SHARED_GAIN = 0.85
_SHARED_TIME = 0.25
_MISSES = 2
_EVERY = 64
_RECENT = 8


class BatchSize:
    """Chooses batch sizes; for one thread at a time."""

    def __init__(self, most: int, limit_s: float) -> None:
        self.rows = 1
        self.is_settled = most <= 1
        self.is_shared = False
        self._most = max(most, 1)
        self._limit_s = limit_s
        self._home = 1
        self._seconds: list[float] = []
        self._row_s: dict[int, float] = {}
        self._misses = 0
        self._count = 0
        self._goes_up = True

    def share(self, *, is_shared: bool) -> None:
        """Updates whether there are online requests."""
        if is_shared != self.is_shared:
            self.is_shared = is_shared
            if self.is_settled:
                self._seconds.clear()
                self._choose_best()

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from a batch, unless the end of the rows shortened it."""
        if rows != self.rows:
            return
        self._seconds.append(seconds)
        if self.is_settled and self.rows == self._home:
            self._stay()
        elif self._is_enough():
            self._try_next(_usual(self._seconds))

    def _is_enough(self) -> bool:
        count, whole_s = len(self._seconds), sum(self._seconds)
        is_hopeless = self.rows > 1 and self._seconds[-1] > _HOPELESS * self._longest_s()
        if is_hopeless or (count >= _TRIALS and whole_s >= _ENOUGH_S):
            return True
        return count >= _MOST_TRIALS

    def _try_next(self, seconds: float) -> None:
        self._seconds.clear()
        is_better = not self._row_s or seconds / self.rows <= _GAIN * min(self._row_s.values())
        self._misses = 0 if is_better else self._misses + 1
        self._note(seconds)
        is_over = seconds > self._longest_s() or (self._misses > 0 and seconds > self._limit_s)
        if self.is_settled or is_over or self._misses == _MISSES or self.rows == self._most:
            self._choose_best()
        else:
            factor = _QUICK if seconds * _QUICK * _SLOW < self._longest_s() else _SLOW
            self.rows = min(self.rows * factor, self._most)

    def _longest_s(self) -> float:
        return self._limit_s if self.is_shared else max(self._limit_s, _SINGLE_ROWS * self._row_s.get(1, 0.0))

    def _note(self, seconds: float) -> None:
        if seconds <= self._longest_s() or self.rows == 1:
            self._row_s[self.rows] = seconds / self.rows
        else:
            self._row_s.pop(self.rows, None)

    def _choose_best(self) -> None:
        self.is_settled = True
        known = self._row_s
        if self.is_shared:
            limit_s = self._limit_s * _SHARED_TIME
            known = {rows: row_s for rows, row_s in known.items() if rows * row_s <= limit_s}
        enough_s = min(known.values(), default=0.0) / (_SHARED_GAIN if self.is_shared else _GAIN)
        self._home = self.rows = min((rows for rows, row_s in known.items() if row_s <= enough_s), default=1)

    def _stay(self) -> None:
        self._count += 1
        if len(self._seconds) < _RECENT:
            return
        self._note(_usual(self._seconds))
        self._seconds.clear()
        if self._home not in self._row_s:  # a slower device, or larger rows
            self._row_s = {rows: row_s for rows, row_s in self._row_s.items() if rows < self._home}
            self._row_s.setdefault(max(self._home // _SLOW, 1), 0.0)
            self._home = self.rows = max(self._home // _SLOW, 1)
        elif self._count >= _EVERY:
            self._count = 0
            self._goes_up = not self._goes_up
            wanted = self._home * _SLOW if self._goes_up else self._home // _SLOW
            self.rows = max(1, min(wanted, self._most))


def _usual(seconds: list[float]) -> float:
    """Returns the mean without the slowest, which may be the first of its size."""
    if len(seconds) < _TRIALS:
        return min(seconds)
    return (sum(seconds) - max(seconds)) / (len(seconds) - 1)
