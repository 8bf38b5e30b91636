"""What a gateway tells of itself and of the whole system: metrics, statistics, and settings that clients change."""

import asyncio
import logging
from dataclasses import replace

from qinfer.control.base import ControlStore
from qinfer.control.catalog import Catalog
from qinfer.control.shared_settings import follow_log_settings
from qinfer.delivery.base import Delivery
from qinfer.errors import BrokerUnavailable
from qinfer.observability.host import HostMeter
from qinfer.observability.metrics import GatewayTally, render
from qinfer.observability.stats import add
from qinfer.settings import Settings
from qinfer_api.scrape import take_snapshot
from qinfer_api.server_settings import LogSettings, TraceSettings
from qinfer_api.statistics import Statistics

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 1.0
"""Seconds between two additions to the statistics, as of workers."""


class Reporting:
    """See the module docstring; one per gateway.

    Args:
        settings: What the process started with.
        catalog: Knows the models.
        store: Where statistics and settings are.
        delivery: Knows how much waits.
        tally: What this gateway counts.

    Attributes:
        statistics: The statistics extension.
        log_settings: The logging extension.
        trace_settings: The trace extension.
    """

    def __init__(
        self, settings: Settings, catalog: Catalog, store: ControlStore, delivery: Delivery, tally: GatewayTally
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._delivery = delivery
        self._tally = tally
        self._host = HostMeter()
        self._unsent: dict[tuple[str, int], dict[str, int]] = {}
        self._flushing = asyncio.Lock()  # of two at once, the later one would add what the other is about to
        self.statistics = Statistics(catalog, store)
        self.log_settings = LogSettings(store, settings.log)
        self.trace_settings = TraceSettings(store, catalog)

    async def metrics(self) -> bytes:
        """Returns the text of `/metrics`."""
        snapshot = await take_snapshot(self._catalog, self._store, self._delivery)
        return render(self._tally, replace(snapshot, host=await asyncio.to_thread(self._host.read)))

    async def run(self) -> None:
        """Follows the log settings and adds to the statistics, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(follow_log_settings(self._store, self.log_settings.first))
            group.create_task(self._flush_again_and_again())

    async def flush(self) -> None:
        """Adds what this gateway ended itself to the models' statistics; what can't be added now is added later."""
        async with self._flushing:
            for key, deltas in self._tally.refusals.drain().items():
                add(self._unsent.setdefault(key, {}), deltas)
            for key in list(self._unsent):
                try:
                    await self._store.add_stats(*key, self._unsent[key])
                except BrokerUnavailable:  # others tell
                    return
                del self._unsent[key]

    async def _flush_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            await self.flush()
