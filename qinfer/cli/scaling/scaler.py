"""The autoscaler of `qinfer autoscale` and `qinfer up`: reads the queue, decides, starts and drains workers.

    QueueWatch (thread): Redis ──▶ QueueReading ──▶ decide_share (pure) ──▶ ScalingPool: workers under the supervisor

Autoscalers of the same models read each other's records; each decides for all, and does its share. While the queue
can't be read, running workers are kept. Decisions are logged; Redis has the latest.

Each worker of a pool has a *slot*, even while draining: its share of the cores, for the maximum number of workers, so
that all are equally fast.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from qinfer.cli.local.machine import child_environment, share_cpus, usable_cpus
from qinfer.cli.local.supervisor import KILL_MARGIN_S, Process, Program, RestartPolicy, Supervisor
from qinfer.cli.overview import connected
from qinfer.core.clock import Clock, SystemClock
from qinfer.core.processes import WORKER, program_environment, protect_process
from qinfer.core.settings import AutoscaleSettings, RedisSettings, Settings, load_settings
from qinfer.errors import QinferError
from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.readiness import is_placed
from qinfer.models.state import KILLED, RESTARTED, SCALED_DOWN, SCALED_UP, ScalerRecord, State, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.observe import logs
from qinfer.observe.stats import INFERENCE_COUNT
from qinfer.queue.lanes import Queue
from qinfer.scaling.policy import (
    RECORD_TTL_S,
    Peers,
    QueueObservation,
    ScalingPolicy,
    ScalingState,
    SharedDecision,
    Throughput,
    Version,
    decide_share,
    policy_of_all,
)
from qinfer.scaling.work import SequenceWork, VersionWork, read_sequences, read_work

MODULE = "qinfer_workers.inference"
_MAX_STARTS = 3
"""Starts after which a crashing worker no longer counts as starting."""


class PoolWorker(Program):
    """A worker process of a pool, with its history."""

    def __init__(self, slot: int, env: Mapping[str, str], cpus: Sequence[int], clock: Clock) -> None:
        super().__init__(f"worker {slot}", MODULE, env, cpus)
        self.slot = slot
        self.starts = 0
        self.kills = 0
        self.started_s = 0.0
        self.is_ready = False
        self.executing = 0
        self._clock = clock

    def start(self) -> None:
        """Counts, and starts the worker."""
        self.starts += 1
        self.started_s = self._clock.monotonic_s()
        self.is_ready = False
        super().start()

    def send_signal(self, number: int) -> None:
        """Sends a signal, and counts kills."""
        self.kills += number == signal.SIGKILL
        super().send_signal(number)


class ScalingPool:
    """A pool of workers, at most one for each slot of `shares`."""

    def __init__(
        self,
        supervisor: Supervisor,
        env: Mapping[str, str],
        shares: Sequence[Sequence[int]],
        *,
        stop_s: float,
        policy: RestartPolicy,
        clock: Clock | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._env = env
        self._shares = shares
        self._stop_s = stop_s
        self._policy = policy
        self._clock = clock or SystemClock()
        self._here: list[PoolWorker] = []
        self._leaving: list[PoolWorker] = []
        self._gone_restarts = 0
        self._gone_kills = 0
        self.start_s = 0.0

    @property
    def size(self) -> int:
        """Workers that serve, start, or wait for a restart."""
        return len(self._here)

    @property
    def live(self) -> int:
        """Serving workers."""
        return sum(worker.is_ready for worker in self._here)

    @property
    def starting(self) -> int:
        """Starting workers."""
        return sum(not worker.is_ready and worker.starts <= _MAX_STARTS for worker in self._here)

    @property
    def draining(self) -> int:
        """Draining workers."""
        return len(self._leaving)

    @property
    def processes(self) -> list[Process]:
        """All processes that may be running."""
        return [*self._here, *self._leaving]

    @property
    def restarts(self) -> int:
        """Restarts of crashed workers."""
        return self._gone_restarts + sum(worker.starts - 1 for worker in self._here + self._leaving)

    @property
    def kills(self) -> int:
        """Workers that did not end in time."""
        return self._gone_kills + sum(worker.kills for worker in self._here + self._leaving)

    def update(self, records: Iterable[WorkerRecord]) -> None:
        """Takes live workers' heartbeats."""
        host = socket.gethostname()
        # An id is <host>-<pid>-<random>.
        by_start = {record.id.rpartition("-")[0]: record for record in records}
        now_s = self._clock.monotonic_s()
        for worker in self._here:
            record = by_start.get(f"{host}-{worker.pid}")
            was_ready, worker.is_ready = worker.is_ready, record is not None and _serves(record)
            worker.executing = record.executing if record else 0
            if worker.is_ready and not was_ready:
                self.start_s = max(self.start_s, now_s - worker.started_s)
        for worker in [one for one in self._leaving if not self._supervisor.supervises(one)]:
            self._leaving.remove(worker)
            self._gone_restarts += worker.starts - 1
            self._gone_kills += worker.kills

    def resize(self, target: int) -> None:
        """Starts or drains workers until there are `target`, once slots are free.

        Workers that are not serving leave first, then the least busy, then the latest.
        """
        while self.size > target:
            worker = min(self._here, key=lambda one: (one.is_ready, one.executing, -one.started_s))
            self._here.remove(worker)
            self._leaving.append(worker)
            self._supervisor.dismiss(worker)
        taken = {worker.slot for worker in self._here + self._leaving}
        free = [slot for slot in range(1, len(self._shares) + 1) if slot not in taken]
        for slot in free[: max(target - self.size, 0)]:
            worker = PoolWorker(slot, self._env, self._shares[slot - 1], self._clock)
            self._supervisor.add(worker, self._policy, stop_s=self._stop_s)
            self._here.append(worker)


def _serves(record: WorkerRecord) -> bool:
    states = [version.state for versions in record.models.values() for version in versions.values()]
    return State.LOADING not in states and bool(states)


logger = logging.getLogger("qinfer.autoscale")

CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReading:
    """The state of the queue at a monotonic instant.

    `rows` were executed so far; `floors` are the live workers that models need to be READY.
    """

    at_s: float
    work: tuple[VersionWork, ...]
    rows: Mapping[Version, int]
    workers: tuple[WorkerRecord, ...]
    load_s: float
    floors: Mapping[str, int]
    scalers: tuple[ScalerRecord, ...] = ()
    sequences: tuple[SequenceWork, ...] = ()


@dataclass(frozen=True, slots=True)
class Away:
    """A failure to read the queue."""

    reason: str


async def read(store: ControlStore, delivery: Queue, globs: Sequence[str], clock: Clock) -> QueueReading:
    """Reads an autoscaler's input."""
    models = await read_work(store, delivery, Jobs(delivery).open_rows)
    work = tuple(one for one in models if is_placed(one.model, globs))
    versions = [(one.model, one.version) for one in work]
    workers, counts, speeds, scalers = await asyncio.gather(
        store.workers(), store.some_stats(versions, (INFERENCE_COUNT,)), store.speeds(versions), store.scalers()
    )
    stored = await store.models(sorted({model for model, _ in versions}))
    measured = [worker.load_s.get(model, {}).get(version, 0.0) for worker in workers for model, version in versions]
    return QueueReading(
        at_s=clock.monotonic_s(),
        work=work,
        rows={key: counts.get(key, {}).get(INFERENCE_COUNT, 0) for key in versions},
        workers=tuple(workers),
        load_s=max([*measured, *(speed.load_s for speed in speeds.values())], default=0.0),
        floors={name: one.min_workers for name, one in stored.items() if one.min_workers and not one.error},
        scalers=tuple(scalers),
        sequences=await read_sequences(delivery, stored),
    )


class QueueWatch:
    """Reads the queue every few seconds, and publishes the autoscaler's record.

    `on_news`, called in the thread, must not block.
    """

    def __init__(self, redis: RedisSettings, globs: Sequence[str], every_s: float, on_news: Callable[[], None]) -> None:
        self._redis = redis
        self._globs = globs
        self._every_s = every_s
        self._on_news = on_news
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._latest: QueueReading | Away | None = None
        self._record: ScalerRecord | None = None
        self._counts: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._has_record = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, name="queue-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def new_reading(self) -> QueueReading | Away | None:
        """Returns the latest reading, once."""
        with self._lock:
            latest, self._latest = self._latest, None
        return latest

    def publish(self, record: ScalerRecord, counts: Mapping[str, int]) -> None:
        """Writes a record, and adds to counters."""
        with self._lock:
            self._record = record
            self._add(counts)
        self._call_soon(self._has_record.set)

    def close(self) -> None:
        """Removes the record, and ends the thread."""
        if self._thread.is_alive():
            self._call_soon(self._stop_watching)
            self._thread.join(CLOSE_S)
        elif not self._loop.is_closed():
            self._loop.close()

    def _call_soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the thread may have ended
            self._loop.call_soon_threadsafe(callback)

    def _stop_watching(self) -> None:
        self._stop.set()
        self._has_record.set()

    def _run_loop(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._watch())

    async def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                await self._while_connected()
            except QinferError as error:
                self._put(Away(error.message))
            # it may pass, and must not end workers
            except Exception:
                logger.exception("queue not read")
                self._put(Away("its state can't be read"))
            await self._pause()

    async def _while_connected(self) -> None:
        async with connected(self._redis) as (store, delivery):
            # concurrent starters must know one another
            await self._publish(store, RECORD_TTL_S)
            while not self._stop.is_set():
                self._put(await read(store, delivery, self._globs, self._clock))
                await self._publish_until_next(store)
            await self._publish(store, 0.0)

    async def _publish(self, store: ControlStore, ttl_s: float) -> None:
        self._has_record.clear()
        with self._lock:
            record, counts, self._counts = self._record, self._counts, {}
        if record is None:
            return
        try:
            await store.put_scaler(record, counts, ttl_s)
        except QinferError:
            with self._lock:
                self._add(counts)
            raise

    async def _publish_until_next(self, store: ControlStore) -> None:
        """Writes new records at once, for the other autoscalers, until the next observation."""
        next_s = self._loop.time() + self._every_s
        while not self._stop.is_set() and (left_s := next_s - self._loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._has_record.wait()
            if self._has_record.is_set() and not self._stop.is_set():
                await self._publish(store, RECORD_TTL_S)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._every_s):
                await self._stop.wait()

    def _add(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def _put(self, latest: QueueReading | Away) -> None:
        with self._lock:
            self._latest = latest
        self._on_news()


def policy_of(settings: AutoscaleSettings) -> ScalingPolicy:
    """Returns the policy; default maximum: the cores."""
    return ScalingPolicy(
        min_workers=settings.min_workers,
        max_workers=settings.max_workers or max(len(usable_cpus()), settings.min_workers, 1),
        target_s=settings.target_s,
        up_after_s=settings.up_after_s,
        down_after_s=settings.down_after_s,
        idle_s=settings.idle_s,
        cooldown_s=settings.cooldown_s,
    )


def crowded(policy: ScalingPolicy) -> str:
    """Returns a warning if workers may outnumber the cores."""
    cores = len(usable_cpus())
    if not cores or policy.max_workers <= cores:
        return ""
    return f"up to {policy.max_workers} workers will share {cores} core{'s' * (cores != 1)}"


class Autoscaler:
    """Keeps as many workers running as the work needs; without `say`, changes and problems are logged."""

    def __init__(
        self,
        policy: ScalingPolicy,
        pool: ScalingPool,
        watch: QueueWatch,
        places: Sequence[str],
        say: Callable[[str], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._watch = watch
        self._places = tuple(places)
        self._say = say
        self._clock = clock or SystemClock()
        self._host = socket.gethostname()
        self._id = f"{self._host}-{secrets.token_hex(4)}"
        self._throughput = Throughput()
        self._peers = Peers(self._id, places)
        self._state = ScalingState.initial(self._clock.monotonic_s(), policy.min_workers)
        self._share = policy.min_workers
        self._is_away = False
        self._demanding: frozenset[str] = frozenset()
        self._published = {RESTARTED: 0, KILLED: 0}

    @property
    def processes(self) -> list[Process]:
        """All workers that may be running."""
        return self._pool.processes

    @property
    def least(self) -> int:
        """Minimum number of workers."""
        return self._policy.min_workers

    @property
    def about(self) -> str:
        """The workers in words."""
        limits = f"{self._policy.min_workers} to {self._policy.max_workers}"
        text = f"{limits}, one for each {self._policy.target_s:g} s of work"
        return text if self._policy.min_workers else f"{text}; the models are ready without one"

    def start(self) -> None:
        """Starts the minimum of workers, and the reading."""
        self._pool.resize(self._share)
        self._watch.publish(self._own_record(), {})
        self._watch.start()

    def close(self) -> None:
        """Stops reading; the supervisor stops the workers."""
        self._watch.close()

    def step(self) -> None:
        """Decides by a new reading of the queue, and starts or drains workers."""
        reading = self._watch.new_reading()
        if reading is None:
            return
        if isinstance(reading, Away):
            self._keep_workers(reading.reason)
            return
        if self._is_away:
            self._is_away = False
            self._state = self._state.after_gap(reading.at_s)
            self._note("queue read again", "the queue can be read again", {})
        self._pool.update(reading.workers)
        self._peers.update(reading.at_s, reading.scalers)
        self._report_floors(reading)
        seen = self._observation(reading)
        others, share = self._peers.others, self._share
        decided = decide_share(
            self._policy, self._state, seen, self._own_record(), others, has_lost_peers=self._peers.has_lost_peers
        )
        self._state, self._share = decided.state, decided.share
        self._log(decided, seen, share)
        try:
            self._pool.resize(self._share)
        except (QinferError, OSError) as error:
            self._note("worker not started", f"a worker could not be started: {error}", {"reason": str(error)})
        self._publish(decided, seen, share)

    def _observation(self, reading: QueueReading) -> QueueObservation:
        speeds = {(one.model, one.version): one.rows_per_s for one in reading.work}
        work_s = sum(one.work_s for one in reading.work)
        live = self._pool.live + sum(one.live for one in self._peers.others)
        used = self._throughput.observe(reading.at_s, reading.rows, speeds, live, work_s)
        return QueueObservation(
            now_s=reading.at_s,
            work_s=work_s,
            entries=sum((one.requests + one.bulk_rows) or int(one.rows > 0) for one in reading.work),
            executed=self._throughput.executed,
            used=used,
            live=live,
            starting=self._pool.starting + sum(one.starting for one in self._peers.others),
            load_s=max(reading.load_s, self._pool.start_s),
            floor=max(reading.floors.values(), default=0),
            sequence_workers=max((one.workers for one in reading.sequences), default=0),
        )

    def _keep_workers(self, reason: str) -> None:
        if not self._is_away:
            self._is_away = True
            self._peers.distrust_missing()
            numbers = {"reason": reason, "kept": self._pool.size}
            self._note("queue not read", f"the queue can't be read, the workers are kept: {reason}", numbers)

    def _report_floors(self, reading: QueueReading) -> None:
        least = policy_of_all(self._policy, self._peers.others).min_workers
        demanding = frozenset(name for name, count in reading.floors.items() if count > least)
        if demanding - self._demanding:
            names = ", ".join(sorted(demanding))
            remedy = "QINFER_REPOSITORY__MIN_WORKERS=0 for all gateways, or qinfer.min_workers of the models"
            text = f"a live worker is kept for {names}; {remedy}, lets their requests wait for one"
            self._note("models want live workers", text, {"models": sorted(demanding), "remedy": remedy})
        self._demanding = demanding

    def _log(self, decided: SharedDecision, seen: QueueObservation, before: int) -> None:
        share, total = decided.share, decided.total
        numbers = {
            "from": before,
            "to": share,
            "reason": total.reason,
            "wanted": total.wanted,
            "work_s": round(seen.work_s, 3),
            "entries": seen.entries,
            "sequence_workers": seen.sequence_workers,
            "used": round(seen.used, 2),
            "live": seen.live,
            "starting": seen.starting,
            "draining": self._draining,
            "load_s": round(seen.load_s, 3),
        }
        with_others = ""
        if self._peers.others:
            numbers |= {"total": total.target, "autoscalers": len(self._peers.others) + 1}
            with_others = f", {total.target} with those of other autoscalers"
        if share == before:
            logger.debug("workers kept", extra=numbers)
            return
        logger.info("workers scaled", extra=numbers)
        if self._say is not None:
            self._say(f"{share} worker{'s' * (share != 1)} instead of {before}{with_others}: {total.reason}")

    @property
    def _draining(self) -> int:
        return self._pool.draining + sum(one.draining for one in self._peers.others)

    def _note(self, event: str, text: str, about: Mapping[str, object]) -> None:
        if self._say is not None:
            self._say(text)
        else:
            logger.warning(event, extra=dict(about))

    def _publish(self, decided: SharedDecision, seen: QueueObservation, before: int) -> None:
        totals = {RESTARTED: self._pool.restarts, KILLED: self._pool.kills}
        counts = {
            name: total - self._published[name] for name, total in totals.items() if total > self._published[name]
        }
        self._published = totals
        if self._share != before:
            counts[SCALED_UP if self._share > before else SCALED_DOWN] = 1
        news = {"reason": decided.total.reason, "work_s": round(seen.work_s, 3), "entries": seen.entries}
        self._watch.publish(msgspec.structs.replace(self._own_record(), **news), counts)

    def _own_record(self) -> ScalerRecord:
        return ScalerRecord(
            id=self._id,
            host=self._host,
            places=self._places,
            min_workers=self._policy.min_workers,
            max_workers=self._policy.max_workers,
            target=self._share,
            live=self._pool.live,
            starting=self._pool.starting,
            draining=self._pool.draining,
        )


def run_autoscaler(redis: RedisSettings, options: Mapping[str, float], variables: Mapping[str, str]) -> None:
    """Runs until a signal asks to stop, then drains; `variables` replace those of the workers' environment."""
    protect_process(os.environ)
    settings = load_settings()
    scaling = settings.autoscale.model_copy(update=dict(options))
    settings = settings.model_copy(update={"autoscale": scaling, "redis": redis})
    base = child_environment(os.environ, variables)
    env = program_environment(WORKER, base, [*settings.pass_env, *settings.worker.model_env])
    with Supervisor(lambda line: logger.warning("workers", extra={"what": line})) as supervisor:
        autoscaler = make_autoscaler(settings, supervisor, env)
        logs.configure(settings.log, "autoscale", unknown=settings.unknown)
        logger.info("autoscale started", extra={"limits": autoscaler.about, "models": list(settings.worker.models)})
        try:
            autoscaler.start()
            supervisor.run(autoscaler.step)
            logger.info("stopping", extra={"workers": len(autoscaler.processes)})
        finally:
            autoscaler.close()
            supervisor.stop(autoscaler.processes)
        logger.info("autoscale stopped")


def make_autoscaler(
    settings: Settings, supervisor: Supervisor, env: Mapping[str, str], say: Callable[[str], None] | None = None
) -> Autoscaler:
    """Returns an autoscaler with supervised workers."""
    policy = policy_of(settings.autoscale)
    if warning := crowded(policy):
        if say is not None:
            say(warning)
        else:
            logger.warning("workers share cores", extra={"what": warning})
    shares = share_cpus(usable_cpus(), policy.max_workers)
    stop_s = settings.worker.drain_s + KILL_MARGIN_S
    pool = ScalingPool(supervisor, env, shares, stop_s=stop_s, policy=RestartPolicy())
    watch = QueueWatch(settings.redis, settings.worker.models, settings.autoscale.every_s, supervisor.poke)
    return Autoscaler(policy, pool, watch, settings.worker.models, say)
