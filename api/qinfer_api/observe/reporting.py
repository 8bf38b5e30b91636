"""What a gateway tells of itself and of the whole system: metrics, statistics, and settings that clients change."""

import asyncio
import logging
import time
from dataclasses import replace

from qinfer.core.settings import Settings
from qinfer.errors import BrokerUnavailable
from qinfer.models.catalog import Catalog
from qinfer.models.shared_settings import follow_log_settings
from qinfer.models.state import ControlStore
from qinfer.observe.catalogue import MetricScope
from qinfer.observe.host import HostMeter
from qinfer.observe.latencies import SlidingWindow
from qinfer.observe.metrics import GatewayTally, Snapshot, render, scopes_of
from qinfer.observe.process_use import read_use
from qinfer.observe.stats import add
from qinfer.observe.triton_metrics import Wanted
from qinfer.queue.base import Delivery
from qinfer_api.observe.dead_letter_counts import LetterCounts
from qinfer_api.observe.scrape import ANSWERS_WITHIN_S, take_snapshot
from qinfer_api.observe.statistics import Statistics
from qinfer_api.observe.trace_file import TraceFile
from qinfer_api.server_settings import LogSettings, TraceSettings

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
        traces: Triton's traces, which follow the settings; `None` = none are written.

    Attributes:
        statistics: The statistics extension.
        log_settings: The logging extension.
        trace_settings: The trace extension.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        store: ControlStore,
        delivery: Delivery,
        tally: GatewayTally,
        traces: TraceFile | None = None,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._delivery = delivery
        self._tally = tally
        self._settings = settings.metrics
        self._host = HostMeter()
        self._letters = LetterCounts(delivery.dead_letters)
        self._window = SlidingWindow()
        self._unsent: dict[tuple[str, int], dict[str, int]] = {}
        self._flushing = asyncio.Lock()  # of two at once, the later one would add what the other is about to
        self.statistics = Statistics(catalog, store)
        self.log_settings = LogSettings(store, settings.log)
        self._traces = traces
        self.trace_settings = TraceSettings(store, catalog, traces)

    async def metrics(self, scope: str = "") -> bytes:
        """Returns the text of `/metrics`.

        Args:
            scope: `cluster`, `process`, or empty for both.

        Raises:
            InvalidRequest: There is no such scope.
        """
        scopes = scopes_of(scope)
        if MetricScope.CLUSTER in scopes:
            snapshot = await take_snapshot(self._catalog, self._store, self._delivery, self._letters)
        else:
            snapshot = Snapshot(store_up=await self._is_store_up())
        if MetricScope.PROCESS in scopes:
            host, use = await asyncio.to_thread(lambda: (self._host.read(), read_use()))
            snapshot = replace(snapshot, host=host, use=use)
        return render(self._tally, snapshot, scopes, self._wanted(snapshot))

    def _wanted(self, snapshot: Snapshot) -> Wanted:
        """Returns which of Triton's metrics to show."""
        settings, quantiles = self._settings, self._settings.quantiles
        return Wanted(
            counters=settings.counter_latencies,
            quantiles=quantiles,
            histogram=settings.histogram_latencies,
            recent=self._window.move(time.monotonic(), snapshot.stats) if quantiles and snapshot.stats else {},
        )

    async def _is_store_up(self) -> bool:
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await self._store.settings()
        except (BrokerUnavailable, TimeoutError):
            return False
        return True

    async def run(self) -> None:
        """Follows the log settings and adds to the statistics, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(follow_log_settings(self._store, self.log_settings.first))
            group.create_task(self._flush_again_and_again())
            if self._traces is not None:
                group.create_task(self._traces.follow(self._store))

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
