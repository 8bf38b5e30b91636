"""The watchdog of a worker's executions: warns of late executions, and ends those over their model's limit.

It kills the process of an interruptible backend (`python`), and the items of the batch execute again, alone. For
another backend, the worker gives back everything else, and ends abruptly. If a model holds the GIL, the renewer process
ends the worker (`qinfer_workers.renewer`).
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from qinfer.backends.base import Backend
from qinfer.batching.execution import TOLD, WorkItem
from qinfer.batching.watched import ExecutionClock, Lateness, TimeLimits, WatchedBackend, lateness
from qinfer.core.retry import PATIENCE_S
from qinfer.errors import ExecutionOverdue, QinferError
from qinfer.models.spec import ModelSpec
from qinfer.models.state import Executing
from qinfer.observe.stats import OVERDUE
from qinfer_workers.inference.publisher import Publisher
from qinfer_workers.inference.serving import LaneBatcher
from qinfer_workers.liveness import exit_process
from qinfer_workers.renewer import GRACE_S, DueTable

logger = logging.getLogger(__name__)

LOOK_S = 0.25

SHOWN_S = 1.0

STATUS = 70
"""The exit code, EX_SOFTWARE of sysexits.h."""

_STARVED_S = 1.0
"""A look that comes later than this ends no execution, because the whole process may have stalled."""

_SETTLE_S = 1.0
_OTHERS_S = GRACE_S - 2 * _SETTLE_S

Key = tuple[str, int]
Leave = Callable[[ExecutionClock], None]


class _WatchedExecution(NamedTuple):
    clock: ExecutionClock
    interrupt: Callable[[], bool] | None
    unready: Callable[[], str] | None


class ExecutionWatchdog:
    """Watches a worker's instances; `table` has their limits for the renewer."""

    def __init__(self, table: DueTable | None = None) -> None:
        self.table = table
        self.changed: Callable[[], None] = lambda: None
        self._watched: list[_WatchedExecution] = []
        self._lock = threading.Lock()
        self._warned: dict[ExecutionClock, int] = {}
        self._ended: Counter[Key] = Counter()
        self._stop = threading.Event()

    def watched(self, backend: Backend, spec: ModelSpec, version: int) -> WatchedBackend:
        """Wraps an instance, watched until it is unloaded."""
        clock = ExecutionClock(spec.name, version, TimeLimits.from_spec(spec), self._left)
        watched = WatchedBackend(backend, clock)
        if watched.interrupt is None and self.table is not None:
            clock.due = self.table.place(f"{spec.name}:{version}")
        with self._lock:
            self._watched.append(_WatchedExecution(clock, watched.interrupt, watched.unready))
        return watched

    async def run(self, leave: Leave) -> None:
        """Looks until cancelled; calls `leave` once if the worker has to end."""
        loop = asyncio.get_running_loop()

        def call_soon(clock: ExecutionClock) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(leave, clock)

        def changed() -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self.changed)

        threading.Thread(target=self._watch_instances, args=(call_soon, changed), name="watchdog", daemon=True).start()
        try:
            await loop.create_future()
        finally:
            self._stop.set()

    def executing(self, now_s: float) -> list[Executing]:
        """Returns long executions and loads; `now_s` is on Redis' clock."""
        found = []
        with self._lock:
            clocks = [one.clock for one in self._watched]
        for clock in clocks:
            elapsed_s, limit = clock.elapsed_s(), clock.limit
            if elapsed_s >= SHOWN_S:
                limit_s = limit.seconds if limit.seconds < float("inf") else 0.0
                what = limit.what.split()[-1]
                since, seconds = round(now_s - elapsed_s, 3), round(elapsed_s, 3)
                found.append(Executing(clock.model, clock.version, since, seconds, limit_s, what))
        return found

    def unready(self) -> dict[Key, str]:
        """Returns versions not ready by their `is_ready`, and why."""
        with self._lock:
            watched = [(one.clock, one.unready) for one in self._watched if one.unready is not None]
        return {(clock.model, clock.version): reason for clock, unready in watched if (reason := _reason(unready))}

    def drain(self) -> dict[Key, dict[str, int]]:
        """Returns the counts of ended executions, as fields of the statistics."""
        with self._lock:
            ended, self._ended = self._ended, Counter()
        return {key: {OVERDUE: count} for key, count in ended.items()}

    def check_instances(self, leave: Leave, *, may_end: bool = True) -> None:
        """Looks once at every instance."""
        with self._lock:
            watched = list(self._watched)
        for clock, interrupt, _ in watched:
            began, elapsed_s = clock.began, clock.elapsed_s()
            late = lateness(elapsed_s, clock.limit.seconds)
            if late is Lateness.FINE:
                continue
            if self._warned.get(clock) != began:
                self._warned[clock] = began
                logger.warning("execution is late: it has used half of its limit", extra=_log_fields(clock, elapsed_s))
            if late is Lateness.OVER and may_end:
                self._end_overdue(clock, interrupt, leave, elapsed_s)

    def _end_overdue(
        self, clock: ExecutionClock, interrupt: Callable[[], bool] | None, leave: Leave, elapsed_s: float
    ) -> None:
        extra = _log_fields(clock, elapsed_s)
        if interrupt is not None:
            if clock.expire(interrupt):
                self._count_overdue(clock)
                logger.error("execution over its limit: the model's process was killed", extra=extra)
        elif clock.limit is clock.limits.execute:  # a load is given up by its waiter
            self._count_overdue(clock)
            logger.error("execution over its limit: the worker gives back what it can, and ends", extra=extra)
            leave(clock)

    def _count_overdue(self, clock: ExecutionClock) -> None:
        with self._lock:
            self._ended[clock.model, clock.version] += 1

    def _left(self, clock: ExecutionClock) -> None:
        with self._lock:
            self._watched = [one for one in self._watched if one.clock is not clock]
        self._warned.pop(clock, None)
        if self.table is not None:
            self.table.free(clock.due)

    def _watch_instances(self, leave: Leave, changed: Callable[[], None]) -> None:
        is_leaving, unready = False, self.unready()

        def once(clock: ExecutionClock) -> None:
            nonlocal is_leaving
            is_leaving = True
            leave(clock)

        looked_s = time.monotonic()
        while not (is_leaving or self._stop.wait(LOOK_S)):
            now_s = time.monotonic()
            is_starved, looked_s = now_s - looked_s > LOOK_S + _STARVED_S, now_s
            try:
                self.check_instances(once, may_end=not is_starved)
                before, unready = unready, self.unready()
                if unready != before:
                    reasons = {f"{model}:{version}": reason for (model, version), reason in unready.items()}
                    logger.warning("readiness of models changed by their own is_ready", extra={"unready": reasons})
                    changed()
            except Exception:
                logger.exception("a check of the watchdog failed")


def overdue_error(clock: ExecutionClock) -> ExecutionOverdue:
    """Returns the error of an execution over its limit."""
    return ExecutionOverdue(clock.limit.text(clock.model))


def fail_overdue(batcher: LaneBatcher, item: WorkItem, error: ExecutionOverdue) -> None:
    """Answers an item that is late even alone."""
    if (streams := batcher.model.streams) is not None:
        streams.cancel(item, error)
    else:
        batcher.fail([item], error)


async def end_worker(
    pauses: Sequence[Coroutine[Any, Any, Any]], publisher: Publisher, retire: Callable[[], Awaitable[None]]
) -> None:
    """Gives back unexecuted items, publishes finished ones, exits."""
    tasks = [asyncio.ensure_future(pause) for pause in pauses]
    await asyncio.wait(tasks, timeout=_OTHERS_S)
    with suppress(TimeoutError, QinferError):
        async with asyncio.timeout(_SETTLE_S):
            await publisher.finish_accepted()
            await retire()
    logger.error("worker ends: an instance hangs", extra={"status": STATUS})
    exit_process(STATUS)


def cut_short(drain: asyncio.Timeout, away_s: float) -> None:
    """Ends a drain if Redis is away for too long."""
    if away_s >= PATIENCE_S and not drain.expired():
        logger.warning("drain cut short: nothing executes, and redis is away", extra={"away_s": round(away_s, 1)})
        drain.reschedule(asyncio.get_running_loop().time())


def _reason(unready: Callable[[], str]) -> str:
    try:
        return unready()
    except Exception as error:  # noqa: BLE001  a backend of others may raise anything
        return f"{type(error).__name__}: {error}"


def _log_fields(clock: ExecutionClock, elapsed_s: float) -> dict[str, object]:
    requests = [item.request.id for item in clock.items[:TOLD]]
    limit = clock.limit
    return {
        "model": clock.model,
        "version": clock.version,
        "what": limit.what,
        "seconds": round(elapsed_s, 1),
        "limit_s": limit.seconds,
        "parameter": limit.parameter,
        "request_ids": requests,
    }
