"""The worker: fetches entries for its models, makes items of them, runs suspects alone, drains.

    queue.fetch ─▶ LeaseIntake ─▶ Batcher ─▶ instance threads ─▶ Publisher ─▶ queue.publish, queue.finish

Each stateless model version has a fetch loop, each stateful one a `SequenceService`. Only model code and lease renewal
run outside the event loop.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from qinfer.batching.batcher import Batcher, Executor, LoadedModel
from qinfer.batching.execution import WorkItem
from qinfer.batching.sequences.batcher import SequenceBatcher
from qinfer.batching.sequences.iterations import IterativeBatcher
from qinfer.batching.streams import WorkerStreams
from qinfer.batching.watched import ExecutionClock
from qinfer.core.messages import IdFactory
from qinfer.core.retry import OutageLog
from qinfer.core.settings import Settings
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.jobs.examiner_pool import READ_SHARES, READERS, ExaminerPool
from qinfer.models.catalog import Catalog
from qinfer.models.state import WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.observe.logs import LogRing
from qinfer.observe.stats import ModelCounts
from qinfer.queue.entries import Lane, Lease, worker_owner
from qinfer.queue.lanes import Queue
from qinfer.segments.sharing import SegmentSharing
from qinfer.submission.memory import TensorMemory
from qinfer.submission.response_cache import ResponseCache
from qinfer.traffic.controller import EndpointFollower
from qinfer.traffic.store import EndpointStore
from qinfer_workers.inference.bulk.arbiter import JobBatcher
from qinfer_workers.inference.bulk.ensembles import EnsembleParts
from qinfer_workers.inference.bulk.shard_service import ShardService
from qinfer_workers.inference.calls.caller import FarSteps, WorkerCaller
from qinfer_workers.inference.ensembles.local import LocalSteps
from qinfer_workers.inference.ensembles.plans import EnsemblePlanner
from qinfer_workers.inference.ensembles.runs import EnsembleBatcher, NestedCounts, NoInstances, RunParts
from qinfer_workers.inference.executor import ThreadExecutor
from qinfer_workers.inference.heartbeat import AnyBatcher, Heartbeat
from qinfer_workers.inference.intake import LeaseIntake
from qinfer_workers.inference.loader import LoadedVersion, Loader
from qinfer_workers.inference.models import Key, Models, VersionPins
from qinfer_workers.inference.publisher import CancelWatch, HeldWork, LeaseKeeper, Publisher, Renewals
from qinfer_workers.inference.rate_limiter import LimitedExecutor, RateLimiter
from qinfer_workers.inference.reply_memory import ReplyMemory
from qinfer_workers.inference.sequences.service import Parts
from qinfer_workers.inference.sequences.services import SequenceServices
from qinfer_workers.inference.serving import LaneBatcher, Lookout, Serving
from qinfer_workers.inference.streams import StreamPublisher, UnreadStreams
from qinfer_workers.inference.tracing import Spans
from qinfer_workers.inference.watchdog import cut_short, end_worker, fail_overdue, overdue_error

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_MAX_RECLAIMS = 100
_AGAIN_S = 0.5


class Worker:
    """Serves models until it is stopped; set `spans`, `catalog` and `readers` before `run`."""

    def __init__(
        self,
        settings: Settings,
        queue: Queue,
        store: ControlStore,
        loader: Loader,
        worker_id: str,
        renewals: Renewals,
    ) -> None:
        self.spans: Spans | None = None
        self.readers = ExaminerPool(settings, {}, processes=READERS, shares=READ_SHARES)
        self._settings, self._metrics = settings.worker, settings.metrics
        self._queue = queue
        self._store = store
        self._id = worker_id
        self._limits, self._segments = settings.limits, settings.segments
        self._cache, self._cached = settings.cache.plan, ModelCounts()
        self._serving: dict[Key, Serving] = {}
        self._leaving: dict[asyncio.Task[None], Serving] = {}
        self._nested = NestedCounts(settings.metrics)
        self._step_pins = VersionPins(store, queue.clock, worker_id, "ensembles", self._steps)
        self._exclusive = asyncio.Lock()
        self._sharing: asyncio.Task[None] | None = None
        self.catalog = Catalog(store, settings.limits)
        self._is_quiescing = False
        """While the worker quiesces, only models that executing batches call go on."""
        self._is_ending = False
        """While the worker ends, a pause ends the requests of ensembles instead of holding them."""
        self._keeper = LeaseKeeper(renewals, queue.clock, settings.worker.lease_s, self._lanes, self._lost)
        self._bulk = ShardService(settings, queue, self._keeper, worker_id)
        self._planner = EnsemblePlanner(store, settings.limits)
        self._limiter = None
        if settings.rate_limit.mode != "off":
            self._limiter = RateLimiter(settings.rate_limit.maxima, loader.gpus)
            loader.limiter = self._limiter.check
        self._models = Models(store, settings.worker, settings.limits, loader, self)
        self._bulk.paused = self._models.paused.has
        self._heartbeat = Heartbeat(store, worker_id, settings.worker, queue.clock, self._models.states, self._batchers)
        self._heartbeat.gpus, self._heartbeat.leases = loader.gpus, self._keeper
        self._heartbeat.load_times = self._models.load_times
        self._watchdog = loader.watchdog
        self._heartbeat.long = self._watchdog.executing
        self._heartbeat.unready, self._watchdog.changed = self._watchdog.unready, self._heartbeat.changed

    def follow_heartbeats(self, beaten: Callable[[WorkerRecord], None]) -> None:
        """Sends each written heartbeat to `beaten`."""
        self._heartbeat.beaten = beaten

    def keep_log(self, log: LogRing) -> None:
        """Lets gateways show the last lines of the worker's log."""
        self._heartbeat.log = log

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, or a gateway asks for it, then drains."""
        self._heartbeat.drain_asked = stop.set
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._publisher = Publisher(self._queue, self._keeper, tasks, self.spans)
            self._heartbeat.tallies = (
                self._publisher.durations, self._bulk.counts, self._nested, self._cached, self._models.counts,
                self._watchdog,
            )  # fmt: skip
            sharing = self._share_memory(tasks)
            memory = (None, None) if sharing is None else (sharing.others, sharing.far)
            self._intake = LeaseIntake(self._queue, self._publisher, self._settings.max_deliveries, *memory)
            self._caller = self._open_caller(tasks, sharing)
            self._local = LocalSteps(self._publisher, self._queue.clock, self._plain_batcher, self._step_called)
            self._caller.use_local_steps(self._local)
            self._heartbeat.direct = self._local.counts
            self._caller.limiter = None if self._limiter is None else self._limiter.ledger
            self._streams = self._open_streams(tasks)
            parts = Parts(
                self._queue, self._keeper, self._publisher, tasks, self._store, self._settings, self._id, self._metrics
            )
            self._ensemble_parts = RunParts(
                self._queue.clock, self._caller, FarSteps(self._caller), self._nested, self._caller.follow
            )
            self._sequences = SequenceServices(parts, self._heartbeat.collect, self._ensemble_parts)
            pins = [tasks.create_task(self._sequences.pins.run()), tasks.create_task(self._step_pins.run())]
            cancels = tasks.create_task(CancelWatch(self._queue, self._keeper).run())
            renewals = tasks.create_task(self._keeper.run())
            bulk = self._bulk.start(tasks, EnsembleParts(self._planner, self._caller), self.readers, self.spans)
            readers = tasks.create_task(self.readers.run(self._bulk.is_prepared))
            shadows = self._bulk.start_shadows(EndpointStore(self._store), self._publisher, self._intake)
            models = tasks.create_task(self._models.run(self._heartbeat.changed))
            heartbeat = tasks.create_task(self._heartbeat.run())
            reclaimer = tasks.create_task(self._reclaim_loop())
            watchdog = tasks.create_task(self._watchdog.run(self._give_up))
            try:
                await stop.wait()
                await cancel_tasks(models, reclaimer, bulk, shadows, *pins)
                await self._drain(heartbeat)
            finally:
                # First: ending its calls must not answer an unfinished batch.
                self._publisher.close()
                calls = self._caller.close()
                self._bulk.hurry()
                await self._sequences.close()
            servings = self._servings()
            reads = [task for one in servings for task in (*one.reads.open, one.fetcher)]
            await cancel_tasks(heartbeat, cancels, watchdog, *calls, *reads, *self._leaving, *self._bulk.loops())
            await self._caller.discard()
            await cancel_tasks(renewals, readers, *filter(None, [self._sharing]))

    def _share_memory(self, tasks: asyncio.TaskGroup) -> SegmentSharing | None:
        segments = self._segments
        if not segments.directory:
            return None
        name = f"worker-{IdFactory().ulid()}"
        kinds, reader, secret = ("gateway-", "worker-"), worker_owner(self._id), self._store.segment_secret
        sharing = SegmentSharing(segments, name, kinds, secret, reader=reader, registry=self._store)
        self._publisher.memory = ReplyMemory(sharing.own, sharing.shelf, segments.least_bytes, sharing.far)
        self._sharing = tasks.create_task(sharing.run())
        self._sharing.add_done_callback(lambda _: sharing.close())
        return sharing

    def _open_caller(self, tasks: asyncio.TaskGroup, sharing: SegmentSharing | None) -> WorkerCaller:
        caller = WorkerCaller(self._queue, self.catalog, self._id, tasks, self._limits, self._called)
        caller.endpoints = EndpointFollower(self.catalog, self._store, worker_owner(self._id), self._queue)
        if sharing is not None:
            self._heartbeat.tensors = TensorMemory(sharing, self._segments.least_bytes, self.catalog)
            caller.set_memory(self._heartbeat.tensors)
        if self._cache is not None:
            most = self._limits.max_in_flight
            summaries = self._metrics.summary_latencies
            cache = ResponseCache(self._cache, self._queue, self._cached, most, at_once=False, summaries=summaries)
            caller.set_cache(cache)
        return caller

    def _open_streams(self, tasks: asyncio.TaskGroup) -> WorkerStreams:
        limits, lease_s = self._limits, self._settings.lease_s
        outlet = StreamPublisher(self._queue, self._keeper, self._publisher, self._resumes, limits, lease_s)
        streams = outlet.streams = WorkerStreams(
            outlet, self._caller.address, limits.stream_window_bytes, limits.stream_stall_s, self._queue.clock.now_s
        )
        self._caller.credited = streams.credit
        self._unread = UnreadStreams(self._queue, tasks, self._serving.get)
        streams.unread = self._unread.found
        return streams

    def serve(self, loaded: LoadedVersion) -> None:
        """Serves a model version, in place of its earlier generation."""
        spec, key = loaded.spec, (loaded.spec.name, loaded.version)
        if spec.is_cached and self._cache is None:
            extra = {"model": spec.name, "version": loaded.version, "hint": "set QINFER_CACHE__CONFIG"}
            logger.warning("response cache enabled by the model, but the server has none", extra=extra)
        name, pinned = f"{spec.name}-{loaded.version}", spec.sequences is not None
        executor: Executor = NoInstances()
        if loaded.plan is None:
            loop = asyncio.get_running_loop()
            if self._limiter is not None and spec.is_limited:
                executor = self._limiter.executor(loaded, loop, name)
            else:
                executor = ThreadExecutor(loaded.instances, loop, name, pinned=pinned)
        model = LoadedModel(
            spec=spec,
            version=loaded.version,
            generation=loaded.generation,
            executor=executor,
            caller=self._caller,
            observer=self.spans,
            streams=self._streams if spec.decoupled else None,
            limited=executor if isinstance(executor, LimitedExecutor) and not pinned else None,
            initial_states=loaded.initial_states,
            begun=self._begun if spec.batching is not None and spec.batching.is_bounded else None,
        )
        if spec.is_stateful:
            self._sequences.serve(model, loaded)
            self._step_pins.changed()
            return
        serving = self._serving.get(key)
        if loaded.plan is not None:
            self._serve_ensemble(model, loaded, serving)
            return
        kind = IterativeBatcher if pinned else Batcher
        if serving is not None and type(serving.batcher) is kind:
            batcher = serving.batcher
            batcher.add_items([i for i in batcher.replace(model, loaded.latency) if self._intake.fits(batcher, i)])
            serving.reread()
            self._serve_bulk(batcher, loaded)
            return
        batcher = kind(model, self._queue.clock, self._local, loaded.latency)
        self._begin_serving(key, batcher, serving)
        self._serve_bulk(batcher, loaded)

    def _begun(self, items: Sequence[WorkItem]) -> None:
        self._queue.marks.mark_begun([item.lease for item in items if item.lease.consumer])

    def _serve_ensemble(self, model: LoadedModel, loaded: LoadedVersion, serving: Serving | None) -> None:
        plan = loaded.plan
        assert plan is not None
        if serving is not None and isinstance(serving.batcher, EnsembleBatcher):
            serving.batcher.replace_plan(model, plan)
            serving.reread()
            self._step_pins.changed()
            self._bulk.serve(serving.batcher, loaded)
            return
        batcher = EnsembleBatcher(model, plan, self._ensemble_parts, self._publisher)
        self._begin_serving((model.spec.name, model.version), batcher, serving)
        self._step_pins.changed()
        self._bulk.serve(batcher, loaded)

    def _plain_batcher(self, model: str, version: int) -> Batcher | None:
        serving = self._serving.get((model, version))
        return serving.batcher if serving is not None and isinstance(serving.batcher, Batcher) else None

    def _steps(self) -> dict[Key, str]:
        batchers = [*self._ensembles(), *self._sequences.batchers()]
        return {key: "" for one in batchers if not isinstance(one, SequenceBatcher) for key in one.versions}

    def _begin_serving(self, key: Key, batcher: LaneBatcher, before: Serving | None) -> None:
        if before is not None:
            task = self._tasks.create_task(self._retire_serving(before))
            self._leaving[task] = before
            task.add_done_callback(self._leaving.pop)
        serving = self._serving[key] = Serving(batcher, self._metrics)
        serving.fetcher = self._tasks.create_task(self._fetch_loop(serving))

    def _serve_bulk(self, batcher: LaneBatcher, loaded: LoadedVersion) -> None:
        if isinstance(batcher, Batcher):
            self._bulk.serve(batcher, loaded)

    async def _retire_serving(self, serving: Serving) -> None:
        if isinstance(serving.batcher, JobBatcher):
            await self._bulk.retire(serving.batcher)
        await serving.pause_serving()
        await cancel_tasks(serving.fetcher)
        serving.batcher.model.executor.retire()
        self._heartbeat.collect(serving.batcher)

    def resize(self, loaded: LoadedVersion, surplus: int) -> None:
        """Changes the number of instances, under a new generation."""
        key = loaded.spec.name, loaded.version
        if key in self._sequences:
            self._sequences.go_on(loaded, surplus)
            return
        batcher = self._serving[key].batcher
        executor = batcher.model.executor
        assert isinstance(executor, ThreadExecutor)
        executor.grow(loaded.instances)
        executor.shrink(surplus)
        batcher.model = replace(batcher.model, spec=loaded.spec, generation=loaded.generation)
        batcher.add_items(())  # new instances may start them
        self._serve_bulk(batcher, loaded)

    async def retire(self, model: str, version: int, is_wanted: Callable[[], bool]) -> bool:
        """Answers waiting requests and unloads a version; returns false if the version is wanted again."""
        if (model, version) in self._sequences:
            return await self._sequences.retire((model, version), is_wanted)
        serving = self._serving[model, version]
        if not await serving.drain(self._queue, self._settings.drain_s, is_wanted):
            return False
        await self._end_serving(model, version)
        return True

    async def _end_serving(self, model: str, version: int) -> None:
        async with self._exclusive:
            serving = self._serving[model, version]
            if isinstance(serving.batcher, JobBatcher):
                await self._bulk.retire(serving.batcher)
            await serving.pause_serving()
            serving.fetcher.cancel()
            await asyncio.wait([serving.fetcher])
            await self._queue.close_reader(serving.lanes)
            del self._serving[model, version]
        serving.batcher.model.executor.retire()
        self._heartbeat.collect(serving.batcher)

    def _resumes(self, item: WorkItem) -> bool:
        lane = item.lease.entry.lane
        serving = self._serving.get((lane.model, lane.version))
        return serving is not None and serving.batcher.model.spec.stream_resume

    def _batchers(self) -> list[AnyBatcher]:
        return [*(serving.batcher for serving in self._servings()), *self._sequences.batchers()]

    def _servings(self) -> list[Serving]:
        return [*self._serving.values(), *self._leaving.values()]

    def _lanes(self) -> list[Lane]:
        return [lane for serving in self._serving.values() for lane in self._queue.sources(serving.lanes)]

    async def _fetch_loop(self, serving: Serving) -> None:
        batcher, quiet, longest_s = serving.batcher, serving.quiet, self._settings.max_wait_s
        key, paused = (batcher.model.spec.name, batcher.model.version), self._models.paused
        outage = OutageLog(logger, "requests not fetched, trying again", "requests are fetched again")
        await self._keeper.watch(serving.lanes)
        while True:
            if not self._keeper.can_renew(serving.lanes):
                await self._keeper.watch(serving.lanes)
            await batcher.fetchable()
            await paused.resumed(*key)
            if self._publisher.is_behind(*key):
                await self._publisher.catch_up(*key)
                continue
            count, wait_s = batcher.plan_fetch()
            if serving.reads.open and not (count := await serving.reads.limit_fetch(count)):
                continue
            quiet.clear()
            try:
                await self._connect(batcher)
                lanes = batcher.welcome(serving.lanes)
                leases = await self._queue.fetch(lanes, self._id, count, min(wait_s, longest_s))
                if outage.is_out:
                    outage.over()
                if leases and paused.has(*key):  # this read began before the pause
                    await self._queue.release(leases)
                elif leases:
                    self._take_in(serving, leases)
                    await asyncio.sleep(0)  # ready answers leave with the next fetch
                else:
                    batcher.add_items(())
            # either failure may pass
            except QinferError as error:
                outage.failed(error.message)
                await asyncio.sleep(_RETRY_S)
            finally:
                quiet.set()

    def _take_in(self, serving: Serving, leases: Sequence[Lease]) -> None:
        batcher = serving.batcher
        ready, external = self._intake.items(batcher, leases)
        self._keeper.hold(ready)
        self._admit(batcher, ready)
        if external:
            self._keeper.hold(external)
            if batcher.paused:
                self._publisher.give_back(external)
            elif serving.reads.is_full:
                self._intake.put_off(external)
            else:
                serving.reads.add(self._tasks.create_task(self._complete_payloads(batcher, external)), len(external))

    async def _complete_payloads(self, batcher: LaneBatcher, external: Sequence[WorkItem]) -> None:
        self._admit(batcher, await self._intake.complete(batcher, external))

    def _admit(self, batcher: LaneBatcher, items: Sequence[WorkItem]) -> None:
        if items and batcher.paused:
            self._publisher.give_back(items)
            return
        if items and batcher.model.streams is not None and not isinstance(batcher, EnsembleBatcher):
            items = self._unread.refused(batcher, items)
        batcher.add_items(items)

    def _lost(self, item: HeldWork) -> None:
        serving = self._serving.get((item.lease.entry.lane.model, item.lease.entry.lane.version))
        if isinstance(item, WorkItem) and serving is not None:
            serving.batcher.lost(item)
        else:
            item.lose()
        if isinstance(item, WorkItem):
            for leaving in self._leaving.values():
                leaving.batcher.lost(item)
            self._streams.lose(item)

    async def _reclaim_loop(self) -> None:
        outage = OutageLog(logger, "lost workers' entries not reclaimed, trying again", "entries are reclaimed again")
        lookout = Lookout(self._queue, self._store, self._settings, self._id)
        while True:
            # In step with others, a worker would get the entries again that it has left to them.
            share = random.uniform(0.75, 1.0)  # noqa: S311
            await asyncio.sleep(self._settings.lease_s / 2 * share)
            reasons: list[str] = []
            for key, serving in await lookout.chosen(self._serving):
                if self._models.paused.has(*key):
                    continue
                try:
                    await serving.find_leftovers(self._queue)
                    await self._connect(serving.batcher)
                    if isinstance(serving.batcher, EnsembleBatcher):
                        await self._begin_again(serving, serving.batcher)
                    elif await self._has_suspects(serving):
                        await self._run_suspects(key, serving)
                except QinferError as error:
                    reasons.append(error.message)
            for reason in reasons:
                outage.failed(reason)
            if not reasons:
                outage.over()

    async def _begin_again(self, serving: Serving, batcher: EnsembleBatcher) -> None:
        """Restarts requests of an ensemble that dead workers held.

        It does not wait for them: their steps may be suspects that run afterwards.
        """
        while batcher.has_room and (suspects := await self._next_suspect(serving)):
            batcher.add_items(suspects)

    async def _connect(self, batcher: LaneBatcher) -> None:
        """Waits until the steps of an ensemble may be submitted, and credits of streams arrive."""
        if isinstance(batcher, EnsembleBatcher):
            await self._caller.follow()
        elif batcher.model.spec.decoupled:
            await self._caller.listen()

    async def _has_suspects(self, serving: Serving) -> bool:
        """Returns whether there is an entry to reclaim, and gives it back, so that it counts no delivery."""
        for _ in range(_MAX_RECLAIMS):
            leases = await self._reclaim(serving)
            if not leases:
                break
            if self._intake.is_readable(serving.batcher, leases[0]):
                lane = leases[0].entry.lane
                logger.warning("suspects found", extra={"model": lane.model, "version": lane.version})
                await self._queue.release(leases)
                return True
        return False

    async def _run_suspects(self, key: Key, serving: Serving) -> None:
        """Runs dead workers' entries one by one, while the worker holds no other entry.

        A model that a suspect calls still serves requests; otherwise both would wait.
        """
        async with self._quiesced():
            while self._serving.get(key) is serving and (suspects := await self._next_suspect(serving)):
                serving.batcher.add_items(suspects)
                await serving.batcher.idle()
                await self._quiesce()
                # A crash of the next one must not count against this one.
                await self._publisher.flush()

    async def _next_suspect(self, serving: Serving) -> list[WorkItem]:
        """Takes at most one entry: its crash must not count against other entries."""
        for _ in range(_MAX_RECLAIMS):
            leases = await self._reclaim(serving)
            ready, external = self._intake.items(serving.batcher, leases)
            for item in (*ready, *external):
                _log_reclaimed(item)
            self._keeper.hold([*ready, *external])
            items = ready or await self._intake.complete(serving.batcher, external)
            if items or not leases:
                return items
        return []

    async def _reclaim(self, serving: Serving) -> list[Lease]:
        for _ in range(_MAX_RECLAIMS):
            leases = await self._queue.reclaim(serving.lanes, self._id, self._settings.lease_s, 1)
            mine = [lease for lease in leases if not self._keeper.holds(lease.entry)]
            mine = await self._intake.whole(serving.batcher, mine)
            if mine or not leases:
                return mine
        return []

    @asynccontextmanager
    async def _quiesced(self) -> AsyncIterator[None]:
        async with self._exclusive:
            try:
                await self._bulk.pause()
                await self._sequences.pause_services()
                await self._quiesce()
                await self._publisher.finish_accepted()
                yield
            finally:
                self._is_quiescing = False
                self._bulk.resume()
                self._sequences.resume_services()
                for serving in self._serving.values():
                    serving.batcher.resume_batching()

    async def _quiesce(self) -> None:
        """Pauses all models and waits until nothing executes; a model that a batch calls is paused after it."""
        self._is_quiescing = True
        if self._leaving:
            await asyncio.wait(self._leaving)
        ends = self._is_ending
        while moving := {key: serving for key, serving in self._serving.items() if not serving.is_still(ends=ends)}:
            first = [serving for key, serving in moving.items() if not self._caller.is_target(*key)]
            async with asyncio.TaskGroup() as pauses:
                for serving in first or moving.values():  # models that call one another can't wait for one another
                    pauses.create_task(serving.pause_serving(ends=ends))

    def _ensembles(self) -> list[EnsembleBatcher]:
        return [one.batcher for one in self._servings() if isinstance(one.batcher, EnsembleBatcher)]

    def _step_called(self, lane: Lane) -> None:
        if self._is_quiescing and (self._is_ending or not all(batcher.paused for batcher in self._ensembles())):
            self._called(lane)

    def _called(self, lane: Lane) -> None:
        serving = self._serving.get((lane.model, lane.version))
        if self._is_quiescing and serving is not None:
            serving.batcher.resume_batching()

    async def _drain(self, heartbeat: asyncio.Task[None]) -> None:
        """Finishes executing batches within `drain_s`, then waits at most `PATIENCE_S` for writes."""
        self._heartbeat.drains()
        logger.info("draining", extra={"executing": sum(b.executing for b in self._batchers())})
        try:
            async with asyncio.timeout(self._settings.drain_s) as limit:
                await self._sequences.drain_ensembles()
                await asyncio.gather(self._sequences.drain(), self._end_batches())
                self._heartbeat.missed = partial(cut_short, limit)
                for model, version in list(self._serving):
                    await self._end_serving(model, version)
                await self._publisher.finish_accepted()
                # The heartbeat must not beat after the last beat.
                await cancel_tasks(heartbeat)
                await self._heartbeat.beat()
                await self._store.retire(self._id)
        except TimeoutError:
            logger.error("drain timed out", extra={"executing": sum(b.executing for b in self._batchers())})
        except BrokerUnavailable as error:
            logger.warning("drained, but Redis is unavailable", extra={"reason": error.message})
        finally:
            self._heartbeat.missed = lambda _: None

    def _give_up(self, clock: ExecutionClock) -> None:
        """Gives back unexecuted items and ends the process, because an instance hangs."""
        self._heartbeat.drains()
        self._bulk.hurry()
        key, item, error = (clock.model, clock.version), clock.alone(), overdue_error(clock)
        if (serving := self._serving.get(key)) is not None and item is not None:
            fail_overdue(serving.batcher, item, error)
        pauses = [
            self._sequences.give_up(key, item, error),
            self._bulk.pause(),
            *(one.pause_serving() for one in self._servings()),
        ]
        self._tasks.create_task(end_worker(pauses, self._publisher, self._retire))

    async def _retire(self) -> None:
        await self._heartbeat.add_counts()
        await self._heartbeat.put_log()
        await self._store.retire(self._id)

    async def _end_batches(self) -> None:
        async with self._exclusive:
            await self._bulk.pause()
            self._is_ending = True
            await self._quiesce()
            await self._streams.wait_closed()
            await self._quiesce()
        self._is_quiescing = False


async def cancel_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels tasks until they are done: redis-py swallows a cancellation while it connects."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)


def _log_reclaimed(item: WorkItem) -> None:
    lease, request = item.lease, item.request
    extra = {"request_id": request.id, "model": request.model, "version": request.version, "tenant": request.tenant}
    logger.warning(
        "request reclaimed", extra={**extra, "entry_id": lease.entry.entry_id, "deliveries": lease.deliveries}
    )
