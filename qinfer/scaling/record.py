"""The record of an autoscaler, a JSON line per observation and decision, and the traffic derived from it.

    arrived so far = executed so far + waiting or executing        of each version, in rows

Instants are Unix time, and totals of executed rows outlive the autoscaler, so that lines after a restart continue the
record. It has no data of requests.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median_high

import msgspec

from qinfer.errors import SettingsError
from qinfer.scaling.policy import QueueObservation, ScalingDecision, Version
from qinfer.scaling.work import VersionWork

LAG_S = 15.0
"""The time after which rows that left the queue count as cancelled or failed."""

MOST_S = 31 * 86400.0
"""The longest readable record: the traffic is computed per second."""


class VersionTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The work of one version: waiting or executing requests and rows, and all executed rows."""

    model: str
    version: int
    requests: int = 0
    rows: int = 0
    executed: int = 0
    rows_per_s: float = 0.0


class Moment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An observation and its decision.

    `before` is the previously decided number of workers.
    """

    at_s: float
    work_s: float = 0.0
    entries: int = 0
    executed: bool = False
    used: float = 0.0
    live: int = 0
    starting: int = 0
    draining: int = 0
    load_s: float = 0.0
    floor: int = 0
    sequence_workers: int = 0
    before: int = 0
    target: int = 0
    wanted: int = 0
    reason: str = ""
    versions: tuple[VersionTrace, ...] = ()

    @classmethod
    def from_decision(
        cls,
        at_s: float,
        seen: QueueObservation,
        decision: ScalingDecision,
        *,
        before: int,
        draining: int,
        versions: tuple[VersionTrace, ...],
    ) -> "Moment":
        """Returns the line of an observation and a decision."""
        given = asdict(seen) | asdict(decision)
        del given["now_s"]
        given |= {"work_s": round(seen.work_s, 4), "used": round(seen.used, 4), "load_s": round(seen.load_s, 3)}
        return cls(at_s=round(at_s, 3), **given, before=before, draining=draining, versions=versions)

    @property
    def seen(self) -> QueueObservation:
        """The observation."""
        own = {one.name: getattr(self, one.name) for one in fields(QueueObservation) if one.name != "now_s"}
        return QueueObservation(now_s=self.at_s, **own)


_DECODER = msgspec.json.Decoder(Moment)


def encode(moment: Moment) -> bytes:
    """Encodes a line."""
    return msgspec.json.encode(moment) + b"\n"


def decode(lines: Iterable[bytes]) -> list[Moment]:
    """Decodes lines, except damaged lines and lines that go back in time."""
    moments: list[Moment] = []
    broken: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            moment = _DECODER.decode(line)
        except msgspec.DecodeError:
            broken.append(number)
            continue
        if not moments or moment.at_s > moments[-1].at_s:
            moments.append(moment)
    if len(broken) > len(moments):
        raise SettingsError(f"line {broken[0]} is not a line of an autoscaler's record, which --record writes")
    if len(moments) < 2:
        raise SettingsError("an autoscaler's record has at least two lines; --record writes one each second")
    if moments[-1].at_s - moments[0].at_s > MOST_S:
        raise SettingsError(f"the record is of more than {MOST_S / 86400:g} days; cut out the lines that matter")
    return moments


class RecordFile:
    """The file of a record; opened for each line, so that it may be rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_s = time.time() - time.monotonic()
        self._executed: dict[Version, int] = {}
        self._is_broken = False
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            raise SettingsError(
                f"QINFER_AUTOSCALE__RECORD={path} can't be written: {error.strerror}; name a writable file"
            ) from None

    def add(
        self,
        seen: QueueObservation,
        decision: ScalingDecision,
        *,
        before: int,
        draining: int,
        work: Iterable[VersionWork],
        rows: Mapping[Version, int],
    ) -> str:
        """Adds a line with the versions that have waiting or newly executed rows.

        Returns why the file can't be written, for the first of several failures.
        """
        versions = []
        for one in work:
            key = (one.model, one.version)
            executed = rows.get(key, 0)
            if one.rows or self._executed.get(key) != executed:
                versions.append(
                    VersionTrace(
                        model=one.model,
                        version=one.version,
                        requests=one.requests,
                        rows=one.rows,
                        executed=executed,
                        rows_per_s=round(one.rows_per_s, 3),
                    )
                )
        moment = Moment.from_decision(
            seen.now_s + self._offset_s, seen, decision, before=before, draining=draining, versions=tuple(versions)
        )
        was_broken = self._is_broken
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(encode(moment))
        except OSError as error:
            self._is_broken = True
            return "" if was_broken else error.strerror or "unknown"
        self._is_broken = False
        self._executed.update({(one.model, one.version): one.executed for one in versions})
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of a record, second by second; rows of all versions are converted to equal work.

    Attributes:
        arrivals: Rows that arrived.
        served: Rows that left the queue.
        workers: Workers that serve, start or drain.
        targets: The decided numbers of workers.
        load_s: The time from a worker's start until it served.
        drain_s: The time from a worker's dismissal until its end.
    """

    arrivals: tuple[int, ...]
    served: tuple[int, ...]
    workers: tuple[int, ...]
    targets: tuple[int, ...]
    rows_per_s: float
    load_s: float
    drain_s: float
    floor: int


def traffic_of(moments: Sequence[Moment]) -> Traffic:
    """Derives the traffic; `SettingsError` without executed rows or a known speed."""
    arrived, waiting = [0.0] * len(moments), [0.0] * len(moments)
    rows = 0
    for key, speed in _speeds(moments).items():
        came_and_there = _rows_of(moments, key)
        for index, (came, there) in enumerate(came_and_there):
            arrived[index] += came / speed
            waiting[index] += there / speed
        rows += came_and_there[-1][0]
    if not rows:
        raise SettingsError("nothing arrived, or no speed was measured, while this was recorded; record some traffic")
    rows_per_s = rows / arrived[-1]
    times = [moment.at_s - moments[0].at_s for moment in moments]
    came_by = _each_second(times, [work_s * rows_per_s for work_s in arrived])
    gone_by = _each_second(times, [(a - w) * rows_per_s for a, w in zip(arrived, waiting, strict=True)])
    at = _indexes(times)
    return Traffic(
        arrivals=_steps(came_by),
        served=_steps(gone_by),
        workers=tuple(moments[i].live + moments[i].starting + moments[i].draining for i in at),
        targets=tuple(moments[i].target for i in at),
        rows_per_s=rows_per_s,
        load_s=_mean_s(times, [moment.starting for moment in moments]) or max(m.load_s for m in moments),
        drain_s=_mean_s(times, [moment.draining for moment in moments]),
        floor=max(moment.floor for moment in moments),
    )


def _speeds(moments: Sequence[Moment]) -> dict[Version, float]:
    found: dict[Version, list[float]] = {}
    for moment in moments:
        for one in moment.versions:
            if one.rows_per_s > 0:
                found.setdefault((one.model, one.version), []).append(one.rows_per_s)
    return {key: median_high(speeds) for key, speeds in found.items()}


def _rows_of(moments: Sequence[Moment], key: Version) -> list[tuple[int, int]]:
    """Returns (rows arrived so far, waiting rows) at each moment; workers report executed rows late."""
    found: list[tuple[int, int]] = []
    totals: deque[tuple[float, int]] = deque()
    arrived = executed = 0
    for moment in moments:
        one = next((one for one in moment.versions if (one.model, one.version) == key), None)
        waiting = 0 if one is None else one.rows
        executed = executed if one is None else one.executed
        total = executed + waiting
        while len(totals) > 1 and totals[0][0] <= moment.at_s - LAG_S:
            totals.popleft()
        if totals:
            arrived += max(total - max(past for _, past in totals), 0)
        elif one is not None:
            # Rows executed before are no part of the record.
            arrived = waiting
        if totals or one is not None:
            totals.append((moment.at_s, total))
        found.append((arrived, min(waiting, arrived)))
    return found


def _indexes(times: Sequence[float]) -> list[int]:
    found, index = [], 0
    for second in range(math.ceil(times[-1]) + 1):
        while index + 1 < len(times) and times[index + 1] <= second:
            index += 1
        found.append(index)
    return found


def _each_second(times: Sequence[float], totals: Sequence[float]) -> list[int]:
    found = []
    for second, index in enumerate(_indexes(times)):
        value = totals[index]
        if index + 1 < len(times):
            share = (second - times[index]) / (times[index + 1] - times[index])
            value += (totals[index + 1] - value) * share
        found.append(math.floor(value + 1e-6))
    return found


def _steps(totals: Sequence[int]) -> tuple[int, ...]:
    """Returns the increases; a total that falls back counts once it is exceeded again."""
    steps, reached = [], 0
    for total in totals:
        steps.append(max(total - reached, 0))
        reached = max(reached, total)
    return tuple(steps)


def _mean_s(times: Sequence[float], counts: Sequence[int]) -> float:
    began = sum(max(b - a, 0) for a, b in zip([0, *counts], counts, strict=False))
    lasted_s = sum(count * (end - start) for count, start, end in zip(counts, times, times[1:], strict=False))
    return lasted_s / began if began else 0.0
