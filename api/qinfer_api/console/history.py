"""An hour of counts, for the console's charts: each gateway writes its own to Redis every few seconds.

A slot is a hash that expires: gateway → its counts by model version, as JSON. A gateway adds up what all have written.
Counts of more than `MOST_SERIES` model versions are added up as one, so that a slot is bounded.
"""

import asyncio
import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from qinfer.errors import QinferError
from qinfer.observe.stats import QUEUE_BUCKETS_S, GatewayTally
from qinfer.queue import keys
from qinfer.queue.router import Router

SLOT_S = 5.0
SLOTS = 720
"""An hour."""
LATE_S = 1.5
"""Seconds after the end of a slot within which gateways have written it."""
MOST_SERIES = 200
OTHERS = "(others)"
TOTAL = ""
"""The series of all requests."""

_KEPT_MS = int((SLOTS + 24) * SLOT_S * 1000)
_WORK = "work"
_TOGETHER = 120

Work = tuple[float, float]
"""Seconds of waiting work, and the age of the oldest request."""


class SeriesCounts(msgspec.Struct, array_like=True):
    """The requests of one series in a slot: failures, and answers by `QUEUE_BUCKETS_S`."""

    failed: int = 0
    answered: list[int] = msgspec.field(default_factory=lambda: [0] * (len(QUEUE_BUCKETS_S) + 1))

    def add(self, other: "SeriesCounts") -> None:
        """Adds the counts of another."""
        self.failed += other.failed
        self.answered = [own + more for own, more in zip(self.answered, other.answered, strict=True)]


class HistorySlot(NamedTuple):
    """The counts of all gateways by series, the work by series, if it was measured, and the figures of charts."""

    counts: Mapping[str, SeriesCounts]
    work: Mapping[str, Work]
    points: "dict[str, ChartPoint]"


class ChartPoint(NamedTuple):
    """The figures of a series in a slot: per second, in seconds; NaN = unknown."""

    at_s: float
    rate: float
    errors: float
    p50_s: float
    p99_s: float
    work_s: float
    oldest_s: float


def series_of(model: str, version: int) -> str:
    """Returns the name of a model version's series."""
    return f"{model}:{version}"


def quantile(answered: Sequence[int], share: float) -> float:
    """Estimates a quantile in seconds from counts by `QUEUE_BUCKETS_S`, linear in a bucket; NaN without counts."""
    sums = list(accumulate(answered))
    if not sums or not sums[-1]:
        return math.nan
    wanted = share * sums[-1]
    at = bisect_left(sums, wanted)
    low = QUEUE_BUCKETS_S[at - 1] if at else 0.0
    high = QUEUE_BUCKETS_S[min(at, len(QUEUE_BUCKETS_S) - 1)]
    before = sums[at - 1] if at else 0
    return low + (high - low) * (wanted - before) / answered[at]


def point_of(number: int, slot: HistorySlot | None, series: str) -> ChartPoint:
    """Returns the figures of a series, computed once for each slot; a slot without counts had no requests."""
    if slot is None or (series not in slot.counts and series not in slot.work):
        return ChartPoint(number * SLOT_S, 0.0, 0.0, math.nan, math.nan, math.nan, math.nan)
    if series not in slot.points:
        counts, work = slot.counts.get(series, SeriesCounts()), slot.work.get(series, (math.nan, math.nan))
        total = sum(counts.answered) + counts.failed
        latencies = (quantile(counts.answered, 0.5), quantile(counts.answered, 0.99))
        figures = (total / SLOT_S, counts.failed / SLOT_S, *latencies, *work)
        slot.points[series] = ChartPoint._make((number * SLOT_S, *(round(figure, 6) for figure in figures)))
    return slot.points[series]


class CountHistory:
    """Writes one gateway's counts, and reads those of all; `work` reads the work, while `is_watched` says so."""

    def __init__(self, router: Router, tally: GatewayTally, now_s: Callable[[], float]) -> None:
        self._router, self._tally, self._now_s = router, tally, now_s
        self._before: dict[str, SeriesCounts] = {}
        self._slots: dict[int, HistorySlot | None] = {}
        self._reading = asyncio.Lock()
        self.is_watched: Callable[[], bool] = lambda: False
        self.work: Callable[[], Awaitable[Mapping[str, Work]]] | None = None

    async def run(self) -> None:
        """Writes every few seconds until cancelled."""
        self._before = self._totals()
        while True:
            now_s = self._now_s()
            await asyncio.sleep(SLOT_S - now_s % SLOT_S)
            try:
                await self.write(round(self._now_s() / SLOT_S) - 1)
            except (QinferError, TimeoutError):  # Redis is away, or full
                continue

    async def write(self, number: int) -> None:
        """Writes the counts since the last call as those of a slot."""
        key = keys.count_history(number).encode()
        totals, before = self._totals(), self._before
        self._before = totals
        changed = {name: made for name, now in totals.items() if (made := _since(now, before.get(name))) is not None}
        if changed:
            await self._put(key, self._tally.process, msgspec.json.encode(_bounded(changed)))
        if self.work is not None and self.is_watched():
            await self._put(key, _WORK, msgspec.json.encode(dict([*(await self.work()).items()][:MOST_SERIES])))

    async def _put(self, key: bytes, field: str, value: bytes) -> None:
        slot = keys.slot(key)
        await asyncio.gather(  # in one write
            self._router.call(slot, b"HSET", key, field.encode(), value),
            self._router.call(slot, b"PEXPIRE", key, _KEPT_MS),
        )

    async def points(self, series: str, count: int = SLOTS) -> list[ChartPoint]:
        """Returns the last points of a series, oldest first."""
        last = await self._read()
        return [point_of(number, self._slots.get(number), series) for number in range(last - count + 1, last + 1)]

    async def latest(self) -> tuple[int, HistorySlot | None]:
        """Returns the number of the last complete slot, and its counts."""
        last = await self._read()
        return last, self._slots.get(last)

    async def _read(self) -> int:
        """Reads slots that are new or may have changed; returns the number of the last complete one."""
        async with self._reading:
            last = int((self._now_s() - LATE_S) / SLOT_S) - 1
            if self._slots and max(self._slots) == last:
                return last
            known = max(self._slots, default=last - SLOTS) - 1  # another gateway may have been late
            wanted = range(max(known, last - SLOTS) + 1, last + 1)
            for start in range(0, len(wanted), _TOGETHER):
                part = wanted[start : start + _TOGETHER]
                found = await asyncio.gather(*map(self._read_slot, part))
                self._slots.update(zip(part, found, strict=True))
            self._slots = {number: slot for number, slot in self._slots.items() if number > last - SLOTS}
            return last

    async def _read_slot(self, number: int) -> HistorySlot | None:
        key = keys.count_history(number).encode()
        found = await self._router.call(keys.slot(key), b"HGETALL", key)
        counts: dict[str, SeriesCounts] = {}
        work: dict[str, Work] = {}
        for name, value in zip(found[::2], found[1::2], strict=True):
            if name == _WORK.encode():
                work = msgspec.json.decode(value, type=dict[str, Work])
                work[TOTAL] = _all_work(work.values())
                continue
            for series, made in msgspec.json.decode(value, type=dict[str, SeriesCounts]).items():
                for each in (series, TOTAL):
                    counts.setdefault(each, SeriesCounts()).add(made)
        return HistorySlot(counts, work, {}) if counts or work else None

    def _totals(self) -> dict[str, SeriesCounts]:
        totals: dict[str, SeriesCounts] = {}
        for (model, version), series in self._tally.durations.items():
            totals[series_of(model, version)] = SeriesCounts(0, list(series.counts))
        for (model, version, _), count in self._tally.failures.items():
            totals.setdefault(series_of(model, version), SeriesCounts()).failed += count
        return totals


def _all_work(work: Iterable[Work]) -> Work:
    parts = list(work)
    return sum(work_s for work_s, _ in parts), max((oldest_s for _, oldest_s in parts), default=0.0)


def _since(now: SeriesCounts, before: SeriesCounts | None) -> SeriesCounts | None:
    if before is None:
        before = SeriesCounts()
    answered = [own - less for own, less in zip(now.answered, before.answered, strict=True)]
    failed = now.failed - before.failed
    return SeriesCounts(failed, answered) if failed or any(answered) else None


def _bounded(changed: dict[str, SeriesCounts]) -> dict[str, SeriesCounts]:
    if len(changed) <= MOST_SERIES:
        return changed
    ranked = sorted(changed, key=lambda name: -sum(changed[name].answered) - changed[name].failed)
    kept = {name: changed[name] for name in ranked[:MOST_SERIES]}
    others = kept[OTHERS] = SeriesCounts()
    for name in ranked[MOST_SERIES:]:
        others.add(changed[name])
    return kept
