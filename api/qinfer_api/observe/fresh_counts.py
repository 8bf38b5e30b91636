"""Statistics that are as new as the reply before them: whoever reads them has the workers add their counts first.

Reads that come at the same time share one question to the workers. There are at most four a second over time, and four
in a row after a pause: a measuring client reads before and after its load, and the first read must not outlast the
load. A read waits for its turn, and a quarter of a second for the answers. Then it reads what is there.
"""

import asyncio
import logging
import time

from qinfer.errors import BrokerUnavailable
from qinfer.models.catalog import Catalog
from qinfer.models.count_pushes import ALL, CountPushes, Underway, concerns
from qinfer.models.store import ControlStore

logger = logging.getLogger(__name__)

EVERY_S = 0.25
"""Seconds between two questions of a gateway, over time."""

AHEAD_S = 3 * EVERY_S
"""How far questions may run ahead of that, after a pause."""

WITHIN_S = 0.25
"""Longest wait for the workers' answers."""


class FreshCounts:
    """See the module docstring; one per gateway.

    Args:
        catalog: Knows which workers have which models.
        store: Where counts are added.

    Attributes:
        underway: Worker → what was under way in it at the last question, of those that have said it.
    """

    def __init__(self, catalog: Catalog, store: ControlStore) -> None:
        self._catalog = catalog
        self._pushes = CountPushes(store.client)
        self._lock = asyncio.Lock()
        self._wanted: dict[str, int] = {}  # model → the number of the last read that wants it
        self._reads = 0
        self._answered = 0  # the last read that a question answered which was asked after it came
        self.underway: dict[str, Underway] = {}
        self._even_at_s = 0.0  # from then on, the questions were no more than one in EVERY_S

    async def added(self, model: str = ALL) -> None:
        """Returns when the workers have added what they counted of a model before the call, or after a while."""
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
            await self._ask(models)
            self._answered = reads
            self._wanted = {name: last for name, last in self._wanted.items() if last > reads}

    async def _ask(self, models: set[str]) -> None:
        self.underway = {}
        try:
            question, workers = await self._pushes.ask(models), self._hosts(models)
            found = await self._pushes.answers(question, workers, WITHIN_S)
            if not found.keys() >= workers:
                logger.debug("statistics read before all workers have added theirs")
            self.underway = {worker: one for worker, one in found.items() if one is not None}
        except BrokerUnavailable:  # the read says so itself
            logger.debug("workers not asked for their counts")

    def _hosts(self, models: set[str]) -> set[str]:
        """Returns the ids of the live workers that have one of these models."""
        return {worker.id for worker in self._catalog.workers() if concerns(models, worker.models)}
