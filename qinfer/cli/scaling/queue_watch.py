"""Reads the work of the queue in a thread, so that an unreachable Redis blocks nothing else."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qinfer.cli.overview import connected
from qinfer.core.clock import Clock, SystemClock
from qinfer.core.settings import RedisSettings
from qinfer.errors import QinferError
from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.readiness import is_placed
from qinfer.models.state import ScalerRecord, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.models.work import VersionWork, read_work
from qinfer.observe.stats import INFERENCE_COUNT
from qinfer.queue.lanes import Queue
from qinfer.scaling.policy import Version
from qinfer.scaling.shares import RECORD_TTL_S

logger = logging.getLogger(__name__)

CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The state of the queue and its workers at one instant.

    Attributes:
        at_s: The monotonic time.
        work: The work of each version.
        rows: Rows executed so far, of each version.
        workers: The heartbeats of all live workers.
        load_s: The longest load time of a model.
        floors: Model → live workers that it needs to be READY, where it needs any.
        scalers: The records of all live autoscalers, of whatever models.
    """

    at_s: float
    work: tuple[VersionWork, ...]
    rows: Mapping[Version, int]
    workers: tuple[WorkerRecord, ...]
    load_s: float
    floors: Mapping[str, int]
    scalers: tuple[ScalerRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Away:
    """A failure to read the queue."""

    reason: str


async def read(store: ControlStore, delivery: Queue, globs: Sequence[str], clock: Clock) -> Reading:
    """Reads the input of an autoscaler, about the models that its workers load.

    Raises:
        BrokerUnavailable: The store or the queue can't be reached.
    """
    models = await read_work(store, delivery, Jobs(delivery).open_rows)
    work = tuple(one for one in models if is_placed(one.model, globs))
    versions = [(one.model, one.version) for one in work]
    workers, counts, speeds, scalers = await asyncio.gather(
        store.workers(), store.some_stats(versions, (INFERENCE_COUNT,)), store.speeds(versions), store.scalers()
    )
    stored = await store.models(sorted({model for model, _ in versions}))
    measured = [worker.load_s.get(model, {}).get(version, 0.0) for worker in workers for model, version in versions]
    return Reading(
        at_s=clock.monotonic_s(),
        work=work,
        rows={key: counts.get(key, {}).get(INFERENCE_COUNT, 0) for key in versions},
        workers=tuple(workers),
        load_s=max([*measured, *(speed.load_s for speed in speeds.values())], default=0.0),
        floors={name: one.min_workers for name, one in stored.items() if one.min_workers and not one.error},
        scalers=tuple(scalers),
    )


class QueueWatch:
    """Reads the queue every few seconds until closed, and publishes the autoscaler's own record.

    Args:
        redis: The Redis with the queue.
        globs: The models that count.
        every_s: Seconds between two readings.
        on_news: Called in the thread when there is a new reading; must not block.
    """

    def __init__(self, redis: RedisSettings, globs: Sequence[str], every_s: float, on_news: Callable[[], None]) -> None:
        self._redis = redis
        self._globs = globs
        self._every_s = every_s
        self._on_news = on_news
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._latest: Reading | Away | None = None
        self._record: ScalerRecord | None = None
        self._counts: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._has_record = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="queue-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self) -> Reading | Away | None:
        """Returns the latest reading, if there was one since the last call."""
        with self._lock:
            latest, self._latest = self._latest, None
        return latest

    def publish(self, record: ScalerRecord, counts: Mapping[str, int]) -> None:
        """Writes a record at once, or before the first reading, and adds to counters."""
        with self._lock:
            self._record = record
            self._add(counts)
        self._call(self._has_record.set)

    def close(self) -> None:
        """Removes the record and ends the thread; gives up on a Redis that does not answer."""
        if self._thread.is_alive():
            self._call(self._end)
            self._thread.join(CLOSE_S)
        elif not self._loop.is_closed():
            self._loop.close()

    def _call(self, callback: Callable[[], None]) -> None:
        # The thread may have just ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _end(self) -> None:
        self._stop.set()
        self._has_record.set()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._watch())

    async def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                await self._while_connected()
            except QinferError as error:
                self._put(Away(error.message))
            # The loop boundary: an unexpected error may pass, and the workers are to be kept.
            except Exception:
                logger.exception("queue not read")
                self._put(Away("its state can't be read"))
            await self._pause()

    async def _while_connected(self) -> None:
        async with connected(self._redis) as (store, delivery):
            # The record comes before the first reading, so that autoscalers that start together know one another.
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
        """Waits until the next reading is due; meanwhile writes new records at once, as the others need them."""
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

    def _put(self, latest: Reading | Away) -> None:
        with self._lock:
            self._latest = latest
        self._on_news()
