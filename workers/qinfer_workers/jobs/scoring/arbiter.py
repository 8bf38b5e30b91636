"""Access to a device: online requests of any model first, bulk batches in between.

Bulk takes *turns*. One begins when no model with an instance on the device has online work, waiting or executing, and
it looks again after each batch: so an online request waits for one bulk batch at most, of each instance. Jobs of
several models take turns in order. Online work asks nobody and tells nobody: what there is of it is read here.

Under online load without a gap bulk would wait for ever. It gets one batch all the same:

- at once, behind the online batch that executes, while online batches are half full at most. What comes meanwhile waits
  and makes the next one larger, which costs little (`Batcher.lend`): so this is time that the device has to spare, and
  the two take turns, a batch each. If the online work is another model's, which would execute at the same time, then
  after as long as the last such batch took;
- else after `PATIENCE_S`: the device has none to spare.

A turn also tells whether there were online requests lately, for then its batches should be small.

An ensemble uses the devices of its steps' models. Steps of a job's batch are requests to those, and end its turn: it
has one batch of each instance.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from qinfer.batching.batcher import Batcher
from qinfer.models.spec import Device
from qinfer_workers.inference.ensembles.batcher import EnsembleBatcher

JobBatcher = Batcher | EnsembleBatcher
"""The batcher of a model version whose jobs are run here."""

PATIENCE_S = 1.0
"""How long bulk waits for a moment without online work on a device that has no time to spare."""

LATELY_S = 2.0
"""For how long a device counts as shared after it had online work."""

TURN_S = 0.1
"""How long a turn lasts where another model's job waits for the device, or until its rows are scored."""


class Turn:
    """Leave to use a device; `goes_on` is for any thread, one at a time.

    Args:
        mine: Whose turn it is; it ends when that model is loaded anew.
        batchers: Those whose online work ends it.
        lines: Those who wait for the devices.
        is_forced: It began though there was online work, and ends after one batch.
        is_shared: There was online work lately.

    Attributes:
        is_shared: The same.
    """

    def __init__(
        self,
        mine: JobBatcher,
        batchers: Sequence[JobBatcher],
        lines: "Sequence[_Line]",
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
        """Tells whether another batch may begin, after the first."""
        if self._is_forced or any(batcher.has_work for batcher in self._batchers):
            return False
        if self._mine.model.executor is not self._executor:
            return False
        return time.monotonic() < self._ends_s or not any(line.waiting for line in self._lines)


class _Line:
    """Lock of one device, with the number of waiters."""

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
    """One for each worker; see the module docstring. Used on the event loop."""

    def __init__(self) -> None:
        self._places: dict[JobBatcher, frozenset[Device]] = {}
        self._lines: dict[Device, _Line] = {}
        self._batch_s = PATIENCE_S
        """How long the last turn took that did not wait for a moment without online work."""
        self._online_s = float("-inf")
        """When there was online work beside a job last; of any device, for most workers have one."""

    def place(self, batcher: JobBatcher, devices: Collection[Device]) -> None:
        """Takes note of the devices on which a model version has its instances."""
        self._places[batcher] = frozenset(devices)

    def forget(self, batcher: JobBatcher) -> None:
        """Takes note that a model version is not served any more."""
        self._places.pop(batcher, None)

    @asynccontextmanager
    async def turn(self, batcher: JobBatcher) -> AsyncIterator[Turn]:
        """Waits for the devices of a model version to be free of online work, and gives leave to use them."""
        devices = self._devices(batcher)
        lines = [self._lines.setdefault(device, _Line()) for device in sorted(devices)]
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
        """Waits until there is no online work; returns whether that happened."""
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
        """Returns the devices of a model version; of an ensemble, those of its steps' models that are here."""
        if isinstance(batcher, Batcher):
            return self._places[batcher]
        versions, found = batcher.versions, frozenset[Device]()
        for other, devices in self._places.items():
            if (other.model.spec.name, other.model.version) in versions:
                found |= devices
        return found
