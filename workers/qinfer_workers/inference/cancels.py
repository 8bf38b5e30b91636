"""Word of cancelled requests: a worker learns within half a second that nobody waits for what it executes.

    gateway ── Queue.cancel ──▶ `cancels` of the model's slot ── read here ──▶ LeaseKeeper.cancel

Only what has been held for a while is asked about, so that models that answer at once cost nothing.
"""

import asyncio
import logging
import time

from qinfer.core.retry import OutageLog
from qinfer.errors import QinferError
from qinfer.queue.lanes import Queue
from qinfer_workers.inference.publisher import Held, LeaseKeeper

logger = logging.getLogger(__name__)

EVERY_S = 0.2
"""The pause between two looks."""

HELD_S = 0.1
"""What has been held for less is not asked about."""


class CancelWatch:
    """Drops what a worker holds and what was cancelled.

    Args:
        queue: Tells what was cancelled.
        keeper: Holds the worker's leases.
    """

    def __init__(self, queue: Queue, keeper: LeaseKeeper) -> None:
        self._queue = queue
        self._keeper = keeper
        self._read: dict[tuple[str, int], str] = {}
        """Of each partition that was asked about, the mark of the last that is known."""
        self._outage = OutageLog(logger, "cancelled requests not read", "cancelled requests are read again")

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
                self._outage.over()
            except QinferError as error:
                self._outage.failed(error.message)

    async def look(self) -> None:
        """Asks once about each partition of which something has been held for a while."""
        partitions: dict[tuple[str, int], list[Held]] = {}
        for item in self._keeper.held_before(time.monotonic() - HELD_S):
            lane = item.lease.entry.lane
            partitions.setdefault((lane.model, lane.partition), []).append(item)
        self._read = {place: mark for place, mark in self._read.items() if place in partitions}
        for (model, partition), items in partitions.items():
            # Nothing is cancelled before it is enqueued.
            since = min([item.lease.entry.enqueued_s for item in items])
            after = self._read.get((model, partition), str(int(since * 1000) - 1))
            found = await self._queue.marks.cancelled(model, partition, after)
            if found:
                self._read[model, partition] = found[-1][0]
                self._keeper.cancel([(lane, entry_id) for _, lane, entry_id in found])
