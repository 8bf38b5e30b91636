"""Fresh statistics: before a read of statistics, the gateway asks the workers to add their counts.

Concurrent reads share one question. A gateway asks at most four questions a second on average, but up to four in a row
after a pause, because a measuring client reads before and after a short load. A read waits at most a quarter of a
second
for the answers.
"""

import asyncio
import logging
import time

from qinfer.errors import BrokerUnavailable
from qinfer.models.catalog import Catalog
from qinfer.models.store import ControlStore
from qinfer.queue.count_pushes import ALL, CountPushes, Underway, concerns

logger = logging.getLogger(__name__)

EVERY_S = 0.25

AHEAD_S = 3 * EVERY_S
"""How far questions may run ahead of one every `EVERY_S` seconds, in seconds."""

WITHIN_S = 0.25


class FreshCounts:
    """Asks the workers for their counts."""

    def __init__(self, catalog: Catalog, store: ControlStore) -> None:
        self._catalog = catalog
        self._pushes = CountPushes(store.client)
        self._lock = asyncio.Lock()
        self._wanted: dict[str, int] = {}  # model → its last read
        self._reads = 0
        self._answered = 0  # the last answered read
        self.underway: dict[str, Underway] = {}
        # The time at which the questions so far average one every EVERY_S.
        self._even_at_s = 0.0

    async def added(self, model: str = ALL) -> None:
        """Waits until the model's workers have added their counts, or until the limits of time are reached."""
        if not self._hosts({model}):
            return
        self._reads += 1
        read = self._wanted[model] = self._reads
        async with self._lock:
            if self._answered >= read:
                return
            await asyncio.sleep(max(self._even_at_s - AHEAD_S - time.monotonic(), 0.0))
            self._even_at_s = max(self._even_at_s, time.monotonic()) + EVERY_S
            reads, models = self._reads, set(self._wanted)
            await self._request_counts(models)
            self._answered = reads
            self._wanted = {name: last for name, last in self._wanted.items() if last > reads}

    async def _request_counts(self, models: set[str]) -> None:
        self.underway = {}
        try:
            question, workers = await self._pushes.ask(models), self._hosts(models)
            found = await self._pushes.answers(question, workers, WITHIN_S)
            if not found.keys() >= workers:
                logger.debug("statistics read before all workers have added theirs")
            self.underway = {worker: one for worker, one in found.items() if one is not None}
        except BrokerUnavailable:
            logger.debug("workers not asked for their counts")

    def _hosts(self, models: set[str]) -> set[str]:
        return {worker.id for worker in self._catalog.workers() if concerns(models, worker.models)}
