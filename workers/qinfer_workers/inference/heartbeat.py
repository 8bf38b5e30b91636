"""The worker's heartbeat and its statistics: every second, at every change of a model's state, and at drain."""

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from qinfer.batching.sequences.batcher import SequenceBatcher
from qinfer.core.clock import ServerClock
from qinfer.core.retry import OutageLog
from qinfer.core.settings import WorkerSettings
from qinfer.errors import BrokerUnavailable
from qinfer.models.state import Executing, Speed, VersionState, WorkerRecord
from qinfer.models.store import ControlStore, CountPushes, Underway, concerns
from qinfer.observe import exposition, stats
from qinfer.observe.host import GpuMeter, GpuUse, MemoryUse, ProcessUse, read_use
from qinfer.observe.logs import LogRing
from qinfer.submission.memory import TensorMemory
from qinfer.wire.frame import FRAME_VERSION, OLDEST_READABLE
from qinfer_workers.inference.devices import named
from qinfer_workers.inference.ensembles.runs import EnsembleSteps
from qinfer_workers.inference.executor import ThreadExecutor
from qinfer_workers.inference.models import Key, by_model
from qinfer_workers.inference.publisher import LeaseKeeper
from qinfer_workers.inference.serving import LaneBatcher

logger = logging.getLogger(__name__)

SPEEDS_EVERY_S = 10.0
LOG_TTL_S = 3600.0
"""Seconds that the last lines of a worker's log outlive it."""
_SPEEDS_AGAIN = 20
"""Each beat writes as many unchanged speeds again."""
_NO_METRICS = exposition.record_of(())

_States = Callable[[], dict[str, dict[int, VersionState]]]
AnyBatcher = LaneBatcher | SequenceBatcher | EnsembleSteps
_LoadTimes = Callable[[], dict[str, dict[int, float]]]
_Memory = Callable[[], dict[str, dict[int, tuple[MemoryUse, ...]]]]
USAGE_EVERY_S = 2.0
"""Triton measures as often."""


class Tally(Protocol):
    """Counts of model versions."""

    def drain(self) -> Mapping[Key, Mapping[str, int]]:
        """Returns the counts since the last drain, as fields of the statistics."""
        ...


class Heartbeat:
    """Writes the worker's record and adds its statistics.

    `missed` gets the seconds since the first of the failed beats.
    """

    def __init__(
        self,
        store: ControlStore,
        worker_id: str,
        settings: WorkerSettings,
        clock: ServerClock,
        states: _States,
        batchers: Callable[[], Iterable[AnyBatcher]],
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._settings = settings
        self._clock = clock
        self._started_at = clock.now_s()
        self._states = states
        self._batchers = batchers
        self.gpus: Collection[int] = ()
        self.leases: LeaseKeeper | None = None
        self.tallies: Sequence[Tally] = ()
        self._usage: ResourceUsage | None = None
        self.load_times: _LoadTimes = dict
        self.direct: Callable[[], dict[Key, int]] = dict
        self.tensors: TensorMemory | None = None
        self.beaten: Callable[[WorkerRecord], None] = lambda _: None
        self.missed: Callable[[float], None] = lambda _: None
        self.unready: Callable[[], dict[Key, str]] = dict
        self.long: Callable[[float], Sequence[Executing]] = lambda _: ()
        self.drain_asked: Callable[[], None] = lambda: None
        self.log: LogRing | None = None
        self._log_put = (0, self._started_at)
        self._draining = False
        self._changed = asyncio.Event()
        self._last_beat_s = self._started_at
        self._last_completed = 0
        self._unsent: dict[Key, dict[str, int]] = {}
        self._pushes = CountPushes(store.client)
        self._adding = asyncio.Lock()
        self._metrics = _NO_METRICS
        self._metrics_put_at_s = self._started_at
        self._speeds: dict[Key, Speed] = {}
        self._speeds_put: dict[Key, Speed] = {}
        self._speeds_put_at_s = self._started_at

    def changed(self) -> None:
        """Triggers a beat, and wakes all readers."""
        self._changed.set()

    def drains(self) -> None:
        """Announces that the worker fetches no more."""
        self._draining = True
        self.changed()

    async def run(self) -> None:
        """Beats until cancelled."""
        self._usage = ResourceUsage(self.gpus, self._memory)
        self._usage.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat_on())
                tasks.create_task(self._answer_reads())
        finally:
            self._usage.stop()

    async def _beat_on(self) -> None:
        outage = OutageLog(logger, "heartbeat not written", "heartbeats are written again")
        is_news = False
        while True:
            is_news = is_news or self._changed.is_set()
            self._changed.clear()
            try:
                await self.beat()
                if is_news:
                    await self._store.wake()
                    is_news = False
                outage.over()
            except BrokerUnavailable as error:
                outage.failed(error.message)
                self.missed(outage.lasts_s)
            try:
                async with asyncio.timeout(self._settings.heartbeat_every_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def beat(self) -> None:
        """Writes one record and the statistics since the last."""
        batchers, states = list(self._batchers()), self._states()
        for (model, version), reason in self.unready().items():
            if (state := states.get(model, {}).get(version)) is not None:
                states[model][version] = msgspec.structs.replace(state, unready=reason)
        now_s, completed = self._clock.now_s(), sum(batcher.completed for batcher in batchers)
        rps = max(completed - self._last_completed, 0) / max(now_s - self._last_beat_s, 1e-3)
        self._last_beat_s, self._last_completed = now_s, completed
        process, underway = self._usage.process if self._usage else None, self._underway()
        record = WorkerRecord(
            id=self._worker_id,
            started_at=self._started_at,
            models=states,
            device=named(self.gpus),
            places=self._settings.models,
            executing=sum(batcher.executing for batcher in batchers),
            throughput_rps=round(rps, 1),
            clock_offset_s=now_s - time.time(),
            frame_versions=tuple(range(OLDEST_READABLE, FRAME_VERSION + 1)),
            speeds=_speeds(batchers, at_best=False),
            best_speeds=_speeds(batchers, at_best=True),
            busy=underway.busy,
            direct=underway.direct,
            load_s=self.load_times(),
            host=socket.gethostname(),
            draining=self._draining,
            renewals=self.leases.renewals if self.leases else 0,
            leases_lost=self.leases.losses if self.leases else 0,
            cpu_s=round(process.cpu_s, 3) if process else 0.0,
            memory_bytes=process.memory_bytes if process else 0,
            gpus=self._usage.gpus if self._usage else (),
            memory=self._usage.memory if self._usage else {},
            long=tuple(self.long(now_s)),
            tensor_bytes=self.tensors.held_bytes if self.tensors else 0,
            tensor_ways=dict(self.tensors.ways) if self.tensors else {},
        )
        asked_by = await self._store.heartbeat(record, self._settings.heartbeat_ttl_s)
        if asked_by is not None and not self._draining:
            logger.info("drain asked", extra={"by": asked_by})
            self.drain_asked()
        self.beaten(record)
        await self.add_counts()
        await self.put_log()
        await self._put_speeds({_batcher_key(batcher) for batcher in batchers}, now_s)

    async def add_counts(self) -> None:
        """Adds all counts so far to the statistics."""
        async with self._adding:
            for batcher in list(self._batchers()):
                self.collect(batcher)
            for tally in self.tallies:
                for key, deltas in tally.drain().items():
                    stats.add(self._unsent.setdefault(key, {}), deltas)
            await self._tell_metrics()
            await self.flush()

    async def put_log(self) -> None:
        """Writes the end of the log if it has new lines, and lets no known ones expire."""
        number, now_s = 0 if self.log is None else self.log.number, self._clock.now_s()
        known, put_at_s = self._log_put
        if self.log is not None and number and (number != known or now_s - put_at_s > LOG_TTL_S / 2):
            await self._store.put_worker_log(self._worker_id, self.log.kept_lines(), LOG_TTL_S)
            self._log_put = number, now_s

    async def _tell_metrics(self) -> None:
        """Writes changed model metrics, and sometimes all metrics; a thread reads them, since there may be many."""
        executors = [one.model.executor for one in list(self._batchers())]
        loaded = [each for each in executors if isinstance(each, ThreadExecutor)]
        record = await asyncio.to_thread(lambda: exposition.record_of(one for each in loaded for one in each.metrics()))
        now_s = self._clock.now_s()
        is_new = now_s - self._metrics_put_at_s < SPEEDS_EVERY_S
        if record == self._metrics and (is_new or record == _NO_METRICS):
            return
        await self._store.put_model_metrics(self._worker_id, record, self._settings.heartbeat_ttl_s)
        self._metrics, self._metrics_put_at_s = record, now_s

    async def _answer_reads(self) -> None:
        last = "0-0"
        while True:
            try:
                question = await self._pushes.asked(last)
                if concerns(question.models, self._states()):
                    await self.add_counts()
                    await self._pushes.send_answer(self._worker_id, question.id, self._underway())
                last = question.id
            except BrokerUnavailable:  # the heartbeat logs it
                await asyncio.sleep(self._settings.heartbeat_every_s)

    def collect(self, batcher: AnyBatcher) -> None:
        """Takes a batcher's statistics and speed for the next beat."""
        key, deltas, rps = _batcher_key(batcher), batcher.tally.drain(), batcher.speed_rps()
        if deltas:
            stats.add(self._unsent.setdefault(key, {}), deltas)
        if rps:
            load_s = self.load_times().get(key[0], {}).get(key[1], 0.0)
            self._speeds[key] = Speed(round(rps, 3), round(load_s, 3), round(batcher.speed_rps(at_best=True), 3))

    def _underway(self) -> Underway:
        batchers, direct = list(self._batchers()), Counter(self.direct())
        for batcher in batchers:
            if isinstance(batcher, SequenceBatcher):  # steps are in no lane
                direct[_batcher_key(batcher)] += batcher.executing + batcher.waiting
        return Underway(busy=_busy(batchers), direct=by_model(direct))

    def _memory(self) -> dict[str, dict[int, tuple[MemoryUse, ...]]]:
        executors = {_batcher_key(batcher): batcher.model.executor for batcher in list(self._batchers())}
        found = {key: one.memory() for key, one in executors.items() if isinstance(one, ThreadExecutor)}
        return by_model({key: uses for key, uses in found.items() if uses})

    async def flush(self) -> None:
        """Adds the collected statistics, or keeps them for later."""
        for key in list(self._unsent):
            deltas = self._unsent.pop(key)
            try:
                # A drain cancels a beat and beats again: no write may be repeated.
                await asyncio.shield(self._store.add_stats(*key, deltas))
            except Exception:
                stats.add(self._unsent.setdefault(key, {}), deltas)
                raise

    async def _put_speeds(self, served: set[Key], now_s: float) -> None:
        """Redis may have lost speeds, so some unchanged ones are written in turns."""
        due = {key for key in self._speeds if key not in served}
        if now_s - self._speeds_put_at_s >= SPEEDS_EVERY_S:
            self._speeds_put_at_s = now_s
            due |= {key for key, speed in self._speeds.items() if self._speeds_put.get(key) != speed}
            due.update(list(self._speeds_put)[:_SPEEDS_AGAIN])
        for key in due:
            self._speeds_put.pop(key, None)
            if (speed := self._speeds.get(key)) is not None:
                await self._store.put_speed(*key, speed)
                self._speeds_put[key] = speed
            if key not in served:
                self._speeds.pop(key, None)
                self._speeds_put.pop(key, None)


def _batcher_key(batcher: AnyBatcher) -> Key:
    return batcher.model.spec.name, batcher.model.version


def _speeds(batchers: Iterable[AnyBatcher], *, at_best: bool) -> dict[str, dict[int, float]]:
    return by_model({_batcher_key(one): round(rps, 3) for one in batchers if (rps := one.speed_rps(at_best=at_best))})


def _busy(batchers: Iterable[AnyBatcher]) -> dict[str, dict[int, int]]:
    busy = {}
    for batcher in batchers:
        queued = sum(len(execution.items) for execution in batcher.expected_ends if not execution.begin_ns)
        busy[_batcher_key(batcher)] = batcher.executing - queued
    return by_model({key: count for key, count in busy.items() if count > 0})


class ResourceUsage:
    """Measures CPU time, memory and GPUs in a thread: drivers may be slow."""

    def __init__(self, gpus: Collection[int], models: _Memory = dict, every_s: float = USAGE_EVERY_S) -> None:
        self.process: ProcessUse | None = None
        self.gpus: tuple[GpuUse, ...] = ()
        self.memory: dict[str, dict[int, tuple[MemoryUse, ...]]] = {}
        self._models = models
        self._meter = GpuMeter(gpus)
        self._every_s = every_s
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._sample_usage, name="resource-usage", daemon=True).start()

    def stop(self) -> None:
        """Ends after the current measurement."""
        self._ended.set()

    def read(self) -> None:
        """Measures once; CPU time never falls."""
        use = read_use()
        if use is not None:
            cpu_s = max(use.cpu_s, self.process.cpu_s if self.process is not None else 0.0)
            self.process = ProcessUse(cpu_s, use.memory_bytes)
        self.gpus = self._meter.read()
        try:
            self.memory = self._models()
        except Exception:  # the boundary to backends: one may be unloaded meanwhile
            logger.debug("memory of models not measured", exc_info=True)

    def _sample_usage(self) -> None:
        while True:
            self.read()
            if self._ended.wait(self._every_s):
                return
