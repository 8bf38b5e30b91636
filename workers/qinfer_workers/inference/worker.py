"""The worker: fetches what its models have room for, hands it to their batchers, sees to suspects and drain.

    delivery.fetch ─▶ Intake ─▶ Batcher ─▶ instance threads ─▶ Publisher ─▶ delivery.publish, delivery.finish

One fetch loop for each model version; everything but the model code and lease renewal runs on one event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from qinfer.batching.batcher import Batcher
from qinfer.batching.execution import Pending
from qinfer.core.retry import OutageLog
from qinfer.core.settings import Settings
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.models.catalog import Catalog
from qinfer.models.store import ControlStore
from qinfer.queue.base import Lane, Lease
from qinfer.queue.redis import Delivery
from qinfer_workers.inference.caller import Caller
from qinfer_workers.inference.executor import ThreadExecutor
from qinfer_workers.inference.heartbeat import Heartbeat
from qinfer_workers.inference.intake import Intake
from qinfer_workers.inference.leases import Held, LeaseKeeper, Renewals
from qinfer_workers.inference.loader import Loaded, Loader
from qinfer_workers.inference.models import Key, Models
from qinfer_workers.inference.publisher import Publisher
from qinfer_workers.inference.serving import Serving
from qinfer_workers.inference.tasks import end
from qinfer_workers.inference.tracing import Spans
from qinfer_workers.jobs.scoring.shard_service import ShardService

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_MAX_RECLAIMS = 100  # in a row that yield nothing to run


class Worker:
    """Serves models until told to stop.

    Args:
        settings: Its settings.
        delivery: The queue.
        store: Desired state, heartbeats and statistics.
        loader: Loads model versions.
        worker_id: Unique for each start; the consumer name too.
        renewals: Renews the leases; by default in a thread.

    Attributes:
        spans: Records what it does; `None` = nobody wants to know. To be set before it runs.
    """

    def __init__(
        self,
        settings: Settings,
        delivery: Delivery,
        store: ControlStore,
        loader: Loader,
        worker_id: str,
        renewals: Renewals,
    ) -> None:
        self.spans: Spans | None = None
        self._settings, self._metrics = settings.worker, settings.metrics
        self._delivery = delivery
        self._store = store
        self._id = worker_id
        self._limits = settings.limits
        self._serving: dict[Key, Serving] = {}
        self._exclusive = asyncio.Lock()
        self._catalog = Catalog(store, settings.limits)
        self._hands_empty = False
        """Hands are being emptied or empty: only what the batches in hand call goes on."""
        self._keeper = LeaseKeeper(renewals, delivery.clock, settings.worker.lease_s, self._lanes, self._lost)
        self._bulk = ShardService(settings, delivery, self._keeper, worker_id)
        self._models = Models(store, settings.worker, settings.limits, loader, self)
        self._heartbeat = Heartbeat(
            store, worker_id, settings.worker, delivery.clock, self._models.states, self._batchers
        )
        self._heartbeat.gpus, self._heartbeat.leases = loader.gpus, self._keeper
        self._heartbeat.load_times = self._models.load_times

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then drains: ends what runs, releases what does not, retires the heartbeat."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._publisher = Publisher(self._delivery, self._keeper, tasks, self.spans)
            self._heartbeat.tallies = (self._publisher.durations, self._bulk.counts)
            self._intake = Intake(self._delivery, self._publisher, self._settings.max_deliveries)
            self._caller = Caller(self._delivery, self._catalog, self._id, tasks, self._limits, self._called)
            renewals = tasks.create_task(self._keeper.run())
            bulk = self._bulk.start(tasks, self.spans)
            models = tasks.create_task(self._models.run(self._heartbeat.changed))
            heartbeat = tasks.create_task(self._heartbeat.run())
            reclaimer = tasks.create_task(self._reclaim_loop())
            try:
                await stop.wait()
                await end(models, reclaimer, bulk)
                await self._drain(heartbeat)
            finally:
                self._publisher.close()  # first: that its calls end makes no answer of what did not end in time
                calls = self._caller.close()
                self._bulk.hurry()
            serving = self._serving.values()
            readings = [task for one in serving for task in one.readings.tasks()]
            await end(heartbeat, *calls, *readings, *(one.fetcher for one in serving), *self._bulk.loops())
            await self._caller.discard()
            await end(renewals)

    def serve(self, loaded: Loaded) -> None:
        """Serves a model version, in place of its earlier generation if there is one."""
        spec, key = loaded.spec, (loaded.spec.name, loaded.version)
        executor = ThreadExecutor(loaded.instances, asyncio.get_running_loop(), f"{spec.name}-{loaded.version}")
        model = loaded.on(executor, self._caller, self.spans)
        serving = self._serving.get(key)
        if serving is not None:
            batcher = serving.batcher
            batcher.admit([i for i in batcher.replace(model, loaded.latency) if self._intake.fits(batcher, i)])
            serving.reread()
            self._bulk.serve(batcher, loaded)
            return
        batcher = Batcher(model, self._delivery.clock, self._publisher, loaded.latency)
        serving = self._serving[key] = Serving(batcher, self._metrics)
        serving.fetcher = self._tasks.create_task(self._fetch_loop(serving))
        self._bulk.serve(batcher, loaded)

    def resize(self, loaded: Loaded, surplus: int) -> None:
        """Goes on with the instances of a version that is served, more or fewer of them, under a new generation."""
        batcher = self._serving[loaded.spec.name, loaded.version].batcher
        executor = batcher.model.executor
        assert isinstance(executor, ThreadExecutor)
        executor.grow(loaded.instances)
        executor.shrink(surplus)
        batcher.model = replace(batcher.model, spec=loaded.spec, generation=loaded.generation)
        batcher.admit(())  # more instances may start what waits
        self._bulk.serve(batcher, loaded)

    async def retire(self, model: str, version: int, is_wanted: Callable[[], bool]) -> bool:
        """Answers what waits for a model version and unloads it; tells whether it did, and was not wanted again."""
        serving = self._serving[model, version]
        if not await serving.drain(self._delivery, self._settings.drain_s, is_wanted):
            return False
        await self._end_serving(model, version)
        return True

    async def _end_serving(self, model: str, version: int) -> None:
        async with self._exclusive:
            serving = self._serving[model, version]
            await self._bulk.retire(serving.batcher)
            await self._pause(serving)
            serving.fetcher.cancel()
            await asyncio.wait([serving.fetcher])
            await self._delivery.leave(serving.lanes)
            del self._serving[model, version]
        serving.batcher.model.executor.retire()
        self._heartbeat.collect(serving.batcher)

    def _batchers(self) -> list[Batcher]:
        return [serving.batcher for serving in self._serving.values()]

    def _lanes(self) -> list[Lane]:
        return [lane for serving in self._serving.values() for lane in serving.lanes]

    async def _fetch_loop(self, serving: Serving) -> None:
        """Fetches whenever the batcher has room."""
        batcher, quiet, longest_s = serving.batcher, serving.quiet, self._settings.max_wait_s
        outage = OutageLog(logger, "nothing fetched", "fetching again")
        await self._keeper.watch(serving.lanes)
        while True:
            if not self._keeper.can_renew(serving.lanes):
                await self._keeper.watch(serving.lanes)
            await batcher.fetchable()
            count, wait_s = batcher.room()
            if serving.readings and not (count := await serving.readings.room(count)):
                continue
            quiet.clear()
            try:
                leases = await self._delivery.fetch(serving.lanes, self._id, count, min(wait_s, longest_s))
                outage.over()
                if leases:
                    self._take_in(serving, leases)
                    await asyncio.sleep(0)  # answers that are ready leave in one write with the next fetch
            except QinferError as error:  # the broker's state, or its refusal: either may pass
                outage.failed(error.message)
                await asyncio.sleep(_RETRY_S)
            finally:
                quiet.set()

    def _take_in(self, serving: Serving, leases: Sequence[Lease]) -> None:
        """Makes items of leases, holds and admits them; what has its tensors beside the stream once they have come."""
        batcher = serving.batcher
        whole, apart = self._intake.items(batcher, leases)
        self._keeper.hold(whole)
        self._admit(batcher, whole)
        if apart:
            self._keeper.hold(apart)
            if batcher.paused:
                self._publisher.give_back(apart)
            elif serving.readings.is_full:
                self._intake.put_off(apart)
            else:
                serving.readings.add(self._tasks.create_task(self._read(batcher, apart)), len(apart))

    async def _read(self, batcher: Batcher, apart: Sequence[Pending]) -> None:
        self._admit(batcher, await self._intake.complete(batcher, apart))

    def _admit(self, batcher: Batcher, items: Sequence[Pending]) -> None:
        if items and batcher.paused:
            self._publisher.give_back(items)
        else:
            batcher.admit(items)

    def _lost(self, item: Held) -> None:
        serving = self._serving.get((item.lease.entry.lane.model, item.lease.entry.lane.version))
        if isinstance(item, Pending) and serving is not None:
            serving.batcher.lost(item)
        else:
            item.lose()

    async def _reclaim_loop(self) -> None:
        """Looks for entries of dead workers, twice in a lease time."""
        outage = OutageLog(logger, "nothing reclaimed", "reclaiming again")
        while True:
            await asyncio.sleep(self._settings.lease_s / 2)
            reasons: list[str] = []
            for key, serving in list(self._serving.items()):
                try:
                    await serving.find_leftovers(self._delivery)
                    if await self._has_suspects(serving):
                        await self._run_suspects(key, serving)
                except QinferError as error:
                    reasons.append(error.message)
            for reason in reasons:
                outage.failed(reason)
            if not reasons:
                outage.over()

    async def _has_suspects(self, serving: Serving) -> bool:
        """Tells whether there is anything to reclaim, and leaves it where it is.

        To hold it until this worker's hands are empty would count an execution, should the worker die before; and
        another worker may have its hands free sooner.
        """
        for _ in range(_MAX_RECLAIMS):
            leases = await self._reclaim(serving)
            if not leases:
                break
            if self._intake.is_readable(serving.batcher, leases[0]):
                lane = leases[0].entry.lane
                logger.warning("suspects found", extra={"model": lane.model, "version": lane.version})
                await self._delivery.release(leases)
                return True
        return False

    async def _run_suspects(self, key: Key, serving: Serving) -> None:
        """Runs dead workers' entries one by one, while this worker holds nothing else (DESIGN.md §2.5).

        But what a suspect calls: a model that it calls serves on until the suspect has ended, or it would wait for it.
        """
        async with self._alone():
            # Hands take a while to empty: the model may be gone by now.
            while self._serving.get(key) is serving and (suspects := await self._next_suspect(serving)):
                serving.batcher.admit(suspects)
                await serving.batcher.idle()
                await self._empty_hands()  # of what the suspect called
                await self._publisher.flush()  # or a crash of the next would count against this one

    async def _next_suspect(self, serving: Serving) -> list[Pending]:
        """Takes and holds one entry, if any: were there more, a crash on the first would count against the others."""
        for _ in range(_MAX_RECLAIMS):
            leases = await self._reclaim(serving)
            for lease in leases:
                logger.warning("reclaimed", extra={"entry_id": lease.entry.entry_id, "deliveries": lease.deliveries})
            whole, apart = self._intake.items(serving.batcher, leases)
            self._keeper.hold([*whole, *apart])
            items = whole or await self._intake.complete(serving.batcher, apart)
            if items or not leases:
                return items
        return []

    async def _reclaim(self, serving: Serving) -> list[Lease]:
        """Reclaims one entry, if there is any that this worker does not hold already."""
        for _ in range(_MAX_RECLAIMS):
            leases = await self._delivery.reclaim(serving.lanes, self._id, self._settings.lease_s, 1)
            mine = [lease for lease in leases if not self._keeper.holds(lease.entry)]
            if mine or not leases:
                return mine
        return []

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Empties the worker's hands, and lets it go on afterwards."""
        async with self._exclusive:
            try:
                await self._bulk.pause()
                await self._empty_hands()
                await self._publisher.settle()
                yield
            finally:
                self._hands_empty = False
                self._bulk.resume()
                for batcher in self._batchers():
                    batcher.resume()

    async def _empty_hands(self) -> None:
        """Pauses all models and waits until nothing executes; a model that a batch in hand calls is paused after it."""
        self._hands_empty = True
        while moving := {key: serving for key, serving in self._serving.items() if not serving.is_still}:
            first = [serving for key, serving in moving.items() if not self._caller.is_target(*key)]
            async with asyncio.TaskGroup() as pauses:
                for serving in first or moving.values():  # models that call one another can't wait for one another
                    pauses.create_task(self._pause(serving))

    def _called(self, lane: Lane) -> None:
        """Lets a model that a batch in hand calls go on, where it was paused already."""
        serving = self._serving.get((lane.model, lane.version))
        if self._hands_empty and serving is not None:
            serving.batcher.resume()

    async def _pause(self, serving: Serving) -> None:
        await serving.batcher.pause()
        await serving.quiet.wait()  # by then each reading has begun, and gives back what it has when it is stopped
        await serving.readings.stop()
        await serving.batcher.idle()

    async def _drain(self, heartbeat: asyncio.Task[None]) -> None:
        """Ends what runs within `drain_s`; what does not end in time is reclaimed by another worker."""
        self._heartbeat.drains()
        logger.info("draining", extra={"executing": sum(b.executing for b in self._batchers())})
        try:
            async with asyncio.timeout(self._settings.drain_s):
                async with self._exclusive:
                    await self._bulk.pause()
                    await self._empty_hands()
                self._hands_empty = False
                for model, version in list(self._serving):
                    await self._end_serving(model, version)
                await self._publisher.settle()
                await end(heartbeat)  # or it could beat once more after the last beat
                await self._heartbeat.beat()
                await self._store.retire(self._id)
        except TimeoutError:
            logger.error("drain timed out", extra={"executing": sum(b.executing for b in self._batchers())})
        except BrokerUnavailable as error:
            logger.warning("drained without the broker", extra={"reason": error.message})
