"""The worker's sign of life and its statistics: every second, at every change of a model's state, and at drain."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from qinfer.batching.batcher import Batcher
from qinfer.clock import ServerClock
from qinfer.codec.frame import FRAME_VERSION
from qinfer.control.base import ControlStore, VersionState, WorkerRecord
from qinfer.errors import BrokerUnavailable
from qinfer.settings import WorkerSettings

logger = logging.getLogger(__name__)

_States = Callable[[], dict[str, dict[int, VersionState]]]


class Heartbeat:
    """Writes the worker's record and adds its statistics.

    Args:
        store: Where to.
        worker_id: The worker's id.
        settings: How often, and for how long a record lives.
        clock: The broker's time.
        states: Tells the models' states.
        batchers: Tells what runs.
    """

    def __init__(
        self,
        store: ControlStore,
        worker_id: str,
        settings: WorkerSettings,
        clock: ServerClock,
        states: _States,
        batchers: Callable[[], Iterable[Batcher]],
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._settings = settings
        self._clock = clock
        self._started_at = clock.now_s()
        self._states = states
        self._batchers = batchers
        self._changed = asyncio.Event()
        self._last_beat_s = self._started_at
        self._last_completed = 0
        self._unsent: dict[tuple[str, int], Counter[str]] = {}

    def changed(self) -> None:
        """Makes the next beat come at once, and wakes everyone who reads the records."""
        self._changed.set()

    async def run(self) -> None:
        """Beats until cancelled."""
        while True:
            woken = self._changed.is_set()
            self._changed.clear()
            try:
                await self.beat()
                if woken:
                    await self._store.wake()
            except BrokerUnavailable as error:
                logger.warning("no heartbeat", extra={"reason": error.message})
            try:
                async with asyncio.timeout(self._settings.heartbeat_every_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def beat(self) -> None:
        """Writes one record, and adds the statistics since the last."""
        batchers = list(self._batchers())
        now_s, completed = self._clock.now_s(), sum(batcher.completed for batcher in batchers)
        rps = max(completed - self._last_completed, 0) / max(now_s - self._last_beat_s, 1e-3)
        self._last_beat_s, self._last_completed = now_s, completed
        record = WorkerRecord(
            id=self._worker_id,
            started_at=self._started_at,
            models=self._states(),
            executing=sum(batcher.executing for batcher in batchers),
            throughput_rps=round(rps, 1),
            clock_offset_s=now_s - time.time(),
            frame_versions=(FRAME_VERSION,),
        )
        await self._store.heartbeat(record, self._settings.heartbeat_ttl_s)
        for batcher in batchers:
            self.collect(batcher)
        await self.flush()

    def collect(self, batcher: Batcher) -> None:
        """Takes a batcher's statistics since the last time, to be added at the next beat."""
        deltas = batcher.tally.drain()
        if deltas:
            self._unsent.setdefault((batcher.model.spec.name, batcher.model.version), Counter()).update(deltas)

    async def flush(self) -> None:
        """Adds what was collected; what can't be added now is added later."""
        for key in list(self._unsent):
            deltas = self._unsent.pop(key)
            try:
                await self._store.add_stats(*key, deltas)
            except BaseException:
                self._unsent.setdefault(key, Counter()).update(deltas)
                raise
