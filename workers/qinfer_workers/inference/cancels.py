"""Watches for cancelled requests, so that a worker drops them within half a second.

    gateway ── Queue.cancel ──▶ `cancels` of the model's slot ── read here ──▶ LeaseKeeper.cancel

The watch looks at items held for a while, so that fast models cost nothing.
"""

import asyncio
import logging
import time

from qinfer.core.retry import OutageLog
from qinfer.errors import QinferError
from qinfer.queue.lanes import Queue
from qinfer_workers.inference.publisher import HeldWork, LeaseKeeper

logger = logging.getLogger(__name__)

EVERY_S = 0.2

HELD_S = 0.1
"""Items held for less are not looked up."""


class CancelWatch:
    """Drops the items of a worker that were cancelled."""

    def __init__(self, queue: Queue, keeper: LeaseKeeper) -> None:
        self._queue = queue
        self._keeper = keeper
        self._read: dict[tuple[str, int], str] = {}
        """The last known mark."""
        self._outage = OutageLog(logger, "cancelled requests not read", "cancelled requests are read again")

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.check_cancels()
                self._outage.over()
            except QinferError as error:
                self._outage.failed(error.message)

    async def check_cancels(self) -> None:
        """Looks once."""
        partitions: dict[tuple[str, int], list[HeldWork]] = {}
        for item in self._keeper.held_before(time.monotonic() - HELD_S):
            lane = item.lease.entry.lane
            partitions.setdefault((lane.model, lane.partition), []).append(item)
        self._read = {place: mark for place, mark in self._read.items() if place in partitions}
        for (model, partition), items in partitions.items():
            since = min([item.lease.entry.enqueued_s for item in items])
            after = self._read.get((model, partition), str(int(since * 1000) - 1))
            found = await self._queue.marks.list_cancelled(model, partition, after)
            if found:
                self._read[model, partition] = found[-1][0]
                self._keeper.cancel([(lane, entry_id) for _, lane, entry_id in found])
