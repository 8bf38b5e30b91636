"""The state that all pages share, read every two seconds or less often, and its changes as server-sent events.

    event: figures    the figures that changed, `null` = gone:  {"digits:1/rate": 12.4, "/p99": 0.012, …}
    event: topics     the lists that changed, which pages fetch again:  ["jobs", "workers"]

A browser has one stream for all of its pages (`static/live.js`). The state is read once for all streams, and only while
there are any; so the cost does not grow with pages, nor with requests.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from qinfer.errors import BrokerUnavailable
from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.catalog import Catalog
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.lanes import Queue
from qinfer.scaling.work import VersionWork, read_work
from qinfer_api.console.history import SLOT_S, TOTAL, ChartPoint, CountHistory, HistorySlot, Work, point_of, series_of
from qinfer_api.turns import SharedLimit

TICK_S = 2.0
HEARTBEAT_S = 15.0
MOST_STREAMS = 256
USED_FOR_S = 3600.0
"""Seconds after the last page for which the history has the work as well."""

MOST_SHARE, MOST_EVERY_S = 0.01, 60.0
"""The share of a core for reads of the work, as far as they are then at most a minute apart."""

MOST_TICK_S = 10.0

_LETTERS_EVERY_S, _COUNTED_PER_S = 10.0, 20.0
"""Dead letters are counted so often, with more models less often."""
_LETTERS = "letters"

Figures = dict[str, float]


class ConsoleState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the installation's state that pages show; `letters` counts dead letters by model, `jobs` by state."""

    at_s: float
    work: tuple[VersionWork, ...] = ()
    jobs: Mapping[str, int] = {}
    letters: Mapping[str, int] = {}
    slot_number: int = 0
    slot: HistorySlot | None = None
    figures: Figures = {}
    is_store_up: bool = True

    def point(self, series: str) -> ChartPoint:
        """Returns the last figures of a series."""
        return point_of(self.slot_number, self.slot, series)


class Live:
    """Reads the state, and tells streams what changed."""

    def __init__(self, catalog: Catalog, store: ControlStore, queue: Queue, history: CountHistory) -> None:
        self._catalog, self._store, self._queue, self._history = catalog, store, queue, history
        self._jobs = Jobs(queue)
        self._reading = asyncio.Lock()
        self._read_s = self._letters_s = self._used_s = -math.inf
        self._work_s, self._work_every_s = -math.inf, 0.0
        self._versions: tuple[VersionWork, ...] = ()
        self._letters: dict[str, int] = {}
        self._topics: dict[str, int] = {}
        self._told: Figures = {}
        self._before: Figures = {}
        self._changed: dict[str, float | None] = {}
        self._changed_topics: tuple[str, ...] = ()
        self._ticked = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._number = 0
        self._streams = SharedLimit()
        self.state = ConsoleState(at_s=0.0)
        history.is_watched, history.work = self._is_used, self._work

    async def run(self) -> None:
        """Reads the state while there are streams, until cancelled."""
        while True:
            await self._wanted.wait()
            began_s = time.thread_time()
            await self._tick()
            await asyncio.sleep(min(max(TICK_S, (time.thread_time() - began_s) / MOST_SHARE), MOST_TICK_S))
            if not self._streams.taken:
                self._wanted.clear()

    async def now(self) -> ConsoleState:
        """Returns a state that is at most two seconds old; the last one while Redis is away."""
        self._used_s = time.monotonic()
        return await self._fresh()

    async def _fresh(self) -> ConsoleState:
        async with self._reading:
            if time.monotonic() - self._read_s >= TICK_S / 2:
                try:
                    self.state = await self._read()
                except (BrokerUnavailable, TimeoutError):
                    self.state = msgspec.structs.replace(self.state, is_store_up=False)
                self._read_s = time.monotonic()
            return self.state

    async def events(self, is_valid: Callable[[], bool], tenant: str, *, sees_all: bool) -> AsyncIterator[bytes]:
        """Yields server-sent events while the user's key is valid; `sees_all` adds the topics of lists.

        A browser that reads too slowly misses states, but no figure and no topic.
        """
        with self._streams.place(tenant):
            self._wanted.set()
            shown, told = (await self.now()).figures, self._number
            yield _event("figures", self._as_data(shown, sees_all=sees_all)) + b"retry: 3000\n\n"
            quiet_s = 0.0
            while is_valid():
                async with self._ticked:
                    while self._number == told:
                        await self._ticked.wait()
                    topics = self._changed_topics if self._number == told + 1 else tuple(self._topics)
                    changed = self._changed if shown is self._before else _changes(shown, self._told)
                    shown, told = self._told, self._number
                changes = self._as_data(changed, sees_all=sees_all) if changed else b""
                self._used_s = time.monotonic()
                text = (_event("figures", changes) if changes else b"") + (
                    _event("topics", msgspec.json.encode(topics)) if topics and sees_all else b""
                )
                quiet_s = 0.0 if text else quiet_s + TICK_S
                if text or quiet_s >= HEARTBEAT_S:
                    quiet_s = 0.0
                    yield text or b": still here\n\n"

    def _as_data(self, figures: Mapping[str, float | None], *, sees_all: bool) -> bytes:
        """Encodes figures; the count of all tenants' dead letters is for those who see all."""
        shown = figures if sees_all else {name: value for name, value in figures.items() if name != _LETTERS}
        return msgspec.json.encode(shown)

    def is_full(self, tenant: str) -> bool:
        """Returns whether too many of a tenant's browsers follow this gateway."""
        return not self._streams.has_room(MOST_STREAMS, tenant)

    async def _tick(self) -> None:
        state, before, topics = await self._fresh(), self._told, self._topics
        marks = self._fingerprints(state)
        async with self._ticked:
            self._before, self._told, self._topics = before, state.figures, marks
            self._changed = _changes(before, state.figures)
            self._changed_topics = tuple(name for name, mark in self._topics.items() if topics.get(name) != mark)
            self._number += 1
            self._ticked.notify_all()

    async def _read(self) -> ConsoleState:
        self._queue.router.check_up(keys.slot(keys.job_places()))
        async with asyncio.timeout(TICK_S * 2):
            work, jobs, (number, slot), letters = await asyncio.gather(
                self._read_work(),
                self._jobs.states(),
                self._history.latest(),
                self._count_letters(),
            )
        state = ConsoleState(
            at_s=self._queue.clock.now_s(), work=work, jobs=jobs, letters=letters, slot_number=number, slot=slot
        )
        return msgspec.structs.replace(state, figures=self._figures(state))

    async def _read_work(self) -> tuple[VersionWork, ...]:
        """Reads the work of all versions, with many models less often: at a hundredth of a core."""
        if time.monotonic() - self._work_s >= self._work_every_s:
            began_s = time.thread_time()
            self._versions = await read_work(self._store, self._queue, self._jobs.open_rows)
            cost_s = time.thread_time() - began_s
            self._work_every_s = min(max(TICK_S / 2, cost_s / MOST_SHARE), MOST_EVERY_S)
            self._work_s = time.monotonic()
        return self._versions

    async def _count_letters(self) -> dict[str, int]:
        names = self._catalog.known()
        if time.monotonic() - self._letters_s >= max(_LETTERS_EVERY_S, len(names) / _COUNTED_PER_S):
            counts = await asyncio.gather(*map(self._queue.dead_letters.count, names))
            self._letters = dict(zip(names, counts, strict=True))
            self._letters_s = time.monotonic()
        return self._letters

    def recount(self) -> None:
        """Has the next read count dead letters anew, and read the state anew."""
        self._letters_s = self._read_s = self._work_s = -math.inf

    def _figures(self, state: ConsoleState) -> Figures:
        workers = self._catalog.workers()
        found: Figures = {
            "slot": state.slot_number * SLOT_S,
            "workers": len(workers),
            "executing": sum(worker.executing for worker in workers),
            _LETTERS: sum(state.letters.values()),
        }
        for one in state.work:
            series = series_of(one.model, one.version)
            _add_point(found, series, state.point(series))
            parts = {"work": one.work_s, "oldest": one.oldest_age_s, "waiting": float(one.requests)}
            found |= {f"{series}/{name}": _rounded(value) for name, value in parts.items()}
        _add_point(found, TOTAL, state.point(TOTAL))
        found["/work"] = _rounded(sum(one.work_s for one in state.work))
        found["/oldest"] = _rounded(max((one.oldest_age_s for one in state.work), default=0.0))
        found["/waiting"] = sum(one.requests for one in state.work)
        return found

    def _fingerprints(self, state: ConsoleState) -> dict[str, int]:
        workers = [
            (one.id, one.draining, len(one.long), {name: [*of.items()] for name, of in one.models.items()})
            for one in self._catalog.workers()
        ]
        return {
            "workers": hash(repr(workers)),
            "models": hash((tuple(self._catalog.readiness().items()), tuple(self._catalog.load_failures().items()))),
            "letters": hash(tuple(state.letters.items())),
            "jobs": hash((tuple(state.jobs.items()), tuple((one.model, one.bulk_rows) for one in state.work))),
            "queues": hash(tuple((one.model, one.version, one.requests, one.rows) for one in state.work)),
        }

    def _is_used(self) -> bool:
        return time.monotonic() - self._used_s < USED_FOR_S

    async def _work(self) -> dict[str, Work]:
        state = await self._fresh()
        return {
            series_of(one.model, one.version): (_rounded(one.work_s), _rounded(one.oldest_age_s)) for one in state.work
        }


def _add_point(found: Figures, series: str, point: ChartPoint) -> None:
    for name, value in (("rate", point.rate), ("errors", point.errors), ("p50", point.p50_s), ("p99", point.p99_s)):
        if not math.isnan(value):
            found[f"{series}/{name}"] = _rounded(value)


def _changes(before: Figures, now: Figures) -> dict[str, float | None]:
    """Returns the figures that changed; `None` = gone."""
    changed: dict[str, float | None] = {name: value for name, value in now.items() if before.get(name) != value}
    return changed | dict.fromkeys(before.keys() - now.keys())


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
