"""The worker: fetches what its models have room for, hands it to their batchers, sees to suspects and drain.

    delivery.fetch ─▶ Intake ─▶ Batcher ─▶ instance threads ─▶ Publisher ─▶ delivery.publish, delivery.finish

One fetch loop for each model version; everything but the model code and lease renewal runs on one event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from qinfer.backends import registry
from qinfer.backends.base import BackendFactory
from qinfer.batching.batcher import Batcher, LoadedModel
from qinfer.batching.execution import Pending
from qinfer.control.base import ControlStore
from qinfer.delivery.base import Delivery, Lane, Lease
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.settings import Settings
from qinfer_workers.inference.executor import ThreadExecutor
from qinfer_workers.inference.heartbeat import Heartbeat
from qinfer_workers.inference.intake import Intake
from qinfer_workers.inference.leases import LeaseKeeper
from qinfer_workers.inference.models import Key, Loaded, Loader, Models
from qinfer_workers.inference.publisher import Publisher

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_MAX_RECLAIMS = 100  # in a row that yield nothing to run


class Serving(NamedTuple):
    """A model version that is served."""

    batcher: Batcher
    lanes: tuple[Lane, ...]
    fetcher: asyncio.Task[None]
    quiet: asyncio.Event
    """Set while no fetch is under way: what a cancelled fetch had taken would be lost until its lease ends."""


class Worker:
    """Serves models until told to stop.

    Args:
        settings: Its settings.
        delivery: The queue.
        store: Desired state, heartbeats and statistics.
        version_dir: Tells where the files of a (model, version) are.
        worker_id: Unique for each start; the consumer name too.
        factory: Backend name → factory.
    """

    def __init__(
        self,
        settings: Settings,
        delivery: Delivery,
        store: ControlStore,
        version_dir: Callable[[str, int], Path],
        worker_id: str,
        factory: Callable[[str], BackendFactory] = registry.factory,
    ) -> None:
        self._settings = settings.worker
        self._delivery = delivery
        self._store = store
        self._id = worker_id
        self._serving: dict[Key, Serving] = {}
        self._exclusive = asyncio.Lock()
        self._keeper = LeaseKeeper(delivery, settings.worker.renew_every_s, self._lost)
        loader = Loader(version_dir, factory, delivery.clock)
        self._models = Models(store, settings.worker.models, settings.limits, loader, self)
        self._heartbeat = Heartbeat(
            store, worker_id, settings.worker, delivery.clock, self._models.states, self._batchers
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then drains: ends what runs, releases what does not, retires the heartbeat."""
        self._keeper.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._publisher = Publisher(self._delivery, self._keeper, tasks)
                self._intake = Intake(self._publisher, self._settings.max_deliveries)
                models = tasks.create_task(self._models.run(self._heartbeat.changed))
                heartbeat = tasks.create_task(self._heartbeat.run())
                reclaimer = tasks.create_task(self._reclaim_loop())
                try:
                    await stop.wait()
                    await _end(models, reclaimer)
                    await self._drain(heartbeat)
                finally:
                    self._publisher.close()
                await _end(heartbeat, *(serving.fetcher for serving in self._serving.values()))
        finally:
            self._keeper.stop()

    def serve(self, loaded: Loaded) -> None:
        """Serves a model version, in place of its earlier generation if there is one."""
        spec, key = loaded.spec, (loaded.spec.name, loaded.version)
        executor = ThreadExecutor(loaded.instances, asyncio.get_running_loop(), f"{spec.name}-{loaded.version}")
        model = LoadedModel(spec=spec, version=loaded.version, generation=loaded.generation, executor=executor)
        serving = self._serving.get(key)
        if serving is not None:
            batcher = serving.batcher
            batcher.admit([i for i in batcher.replace(model, loaded.latency) if self._intake.fits(batcher, i)])
            return
        batcher = Batcher(model, self._delivery.clock, self._publisher, loaded.latency)
        lanes, quiet = (Lane(spec.name, loaded.version),), asyncio.Event()
        quiet.set()
        fetcher = self._tasks.create_task(self._fetch_loop(batcher, lanes, quiet))
        self._serving[key] = Serving(batcher, lanes, fetcher, quiet)

    async def retire(self, model: str, version: int) -> None:
        """Drains a model version and unloads it."""
        async with self._exclusive:
            serving = self._serving[model, version]
            await self._pause(serving)
            serving.fetcher.cancel()
            del self._serving[model, version]
        serving.batcher.model.executor.retire()
        self._heartbeat.collect(serving.batcher)

    def _batchers(self) -> list[Batcher]:
        return [serving.batcher for serving in self._serving.values()]

    async def _fetch_loop(self, batcher: Batcher, lanes: Sequence[Lane], quiet: asyncio.Event) -> None:
        """Fetches whenever the batcher has room."""
        longest_s = self._settings.max_wait_s
        while True:
            await batcher.fetchable()
            count, wait_s = batcher.room()
            quiet.clear()
            try:
                leases = await self._delivery.fetch(lanes, self._id, count, min(wait_s, longest_s))
                if leases:
                    self._take_in(batcher, leases)
                    await asyncio.sleep(0)  # answers that are ready leave in one write with the next fetch
            except QinferError as error:  # the broker's state, or its refusal: either may pass
                logger.warning("nothing fetched", extra={"reason": error.message})
                await asyncio.sleep(_RETRY_S)
            finally:
                quiet.set()

    def _take_in(self, batcher: Batcher, leases: Sequence[Lease]) -> None:
        items = self._intake.items(batcher, leases)
        self._keeper.hold(items)
        if batcher.paused:
            self._publisher.give_back(items)
        else:
            batcher.admit(items)

    def _lost(self, item: Pending) -> None:
        serving = self._serving.get((item.lease.entry.lane.model, item.lease.entry.lane.version))
        if serving is None:
            item.lost = True
        else:
            serving.batcher.lost(item)

    async def _reclaim_loop(self) -> None:
        """Looks for entries of dead workers, twice in a lease time."""
        while True:
            await asyncio.sleep(self._settings.lease_s / 2)
            for key, serving in list(self._serving.items()):
                try:
                    suspects = await self._reclaim_one(serving)
                    if suspects:
                        await self._run_suspects(key, serving, suspects)
                except QinferError as error:
                    logger.warning("nothing reclaimed", extra={"reason": error.message})

    async def _reclaim_one(self, serving: Serving) -> list[Pending]:
        """Takes and holds one entry, if any: were there more, a crash on the first would count against the others."""
        for _ in range(_MAX_RECLAIMS):
            leases = await self._delivery.reclaim(serving.lanes, self._id, self._settings.lease_s, 1)
            if not leases:
                break
            mine = [lease for lease in leases if not self._keeper.holds(lease.entry)]
            for lease in mine:
                logger.warning("reclaimed", extra={"entry_id": lease.entry.entry_id, "deliveries": lease.deliveries})
            items = self._intake.items(serving.batcher, mine)
            if items:
                self._keeper.hold(items)
                return items
        return []

    async def _run_suspects(self, key: Key, serving: Serving, suspects: list[Pending]) -> None:
        """Runs a dead worker's entries one by one, while this worker holds nothing else (DESIGN.md §2.5)."""
        batcher = serving.batcher
        try:
            async with self._alone():
                # Hands take a while to empty: the model may be another by now, or gone, and the lease lost.
                while suspects and self._serving.get(key) is serving:
                    fit = [item for item in suspects if not item.lost and self._intake.fits(batcher, item)]
                    suspects = []
                    batcher.admit(fit)
                    await batcher.idle()
                    suspects = await self._reclaim_one(serving)
        finally:
            self._keeper.drop(suspects)  # not released, which would clear them of suspicion

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Empties the worker's hands, and lets it go on afterwards."""
        async with self._exclusive:
            try:
                for serving in list(self._serving.values()):
                    await self._pause(serving)
                yield
            finally:
                for batcher in self._batchers():
                    batcher.resume()

    async def _pause(self, serving: Serving) -> None:
        await serving.batcher.pause()
        await serving.quiet.wait()
        await serving.batcher.idle()

    async def _drain(self, heartbeat: asyncio.Task[None]) -> None:
        """Ends what runs within `drain_s`; what does not end in time is reclaimed by another worker."""
        logger.info("draining", extra={"executing": sum(b.executing for b in self._batchers())})
        try:
            async with asyncio.timeout(self._settings.drain_s):
                async with self._exclusive, asyncio.TaskGroup() as drains:
                    for serving in self._serving.values():
                        drains.create_task(self._pause(serving))
                for model, version in list(self._serving):
                    await self.retire(model, version)
                await self._publisher.settle()
                await _end(heartbeat)  # or it could beat once more after the last beat
                await self._heartbeat.beat()
                await self._store.retire(self._id)
        except TimeoutError:
            logger.error("drain timed out", extra={"executing": sum(b.executing for b in self._batchers())})
        except BrokerUnavailable as error:
            logger.warning("drained without the broker", extra={"reason": error.message})


async def _end(*tasks: "asyncio.Task[None]") -> None:
    """Cancels tasks until they are done: redis-py swallows a cancellation that comes while it connects."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_RETRY_S)
