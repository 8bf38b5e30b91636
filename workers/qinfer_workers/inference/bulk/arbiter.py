"""Access to a device: online requests of any model first, bulk batches in between.

Bulk takes *turns*. A turn begins when no model with an instance on the device has online work, which is checked again
after each batch. So an online request waits for at most one bulk batch of each instance.

Under continuous online load bulk gets one batch all the same:

- at once, behind the executing online batch, while online batches are at most half full: requests that arrive meanwhile
  make the next batch larger, which costs little (`Batcher.lend`). If the online work belongs to another model, bulk
  first waits as long as the last turn that it forced;
- else after `PATIENCE_S`: the device has no time to spare.

An ensemble uses the devices of its steps' models, and the steps of its batch end its turn.
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
        self._batchers = batchers
        self._lines = lines
        self._is_forced = is_forced
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
