"""What an autoscaler saw and decided, a line of JSON each time; and the traffic that such lines tell.

    arrived so far = executed so far + what waits or executes        of each version, in rows

Instants are Unix time, and totals of executed rows outlive the autoscaler: lines that follow a restart go on where
those before it ended. Nothing of a request is in them.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from qinfer.errors import SettingsError
from qinfer.scaling.policy import Decision, Observation, Version

LAG_S = 15.0
"""Within this, rows that left the queue are counted as executed; those that never are were cancelled, or failed."""

MOST_S = 31 * 86400.0
"""The longest record that is read: each second of it is looked at."""


class VersionTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What there was of one model version.

    Attributes:
        model: The model's name.
        version: The version.
        requests: Online requests that wait or execute.
        rows: Rows that wait or execute, those of bulk jobs too.
        executed: Rows that were executed so far, since its statistics began.
        rows_per_s: What one worker does, as it was measured; 0 = not known.
    """

    model: str
    version: int
    requests: int = 0
    rows: int = 0
    executed: int = 0
    rows_per_s: float = 0.0


class Moment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An observation and what was decided; fields as in `Observation` and `Decision`, where they are not told here.

    Attributes:
        at_s: When; Unix time.
        work_s: Seconds that one worker would need for all that waits or executes.
        entries: Requests and rows of bulk jobs that wait or execute.
        executed: Whether anything was executed since the line before.
        used: Workers that the throughput of late keeps busy.
        live: Workers that serve.
        starting: Workers that were started and do not serve yet.
        draining: Workers that end what they have in hand.
        load_s: Seconds from the start of a worker until it serves.
        floor: Live workers that some model wants in order to be READY.
        before: How many workers there should have been until now.
        target: How many there should be.
        wanted: What the present work alone asks for.
        reason: Why it is this number, for people.
        versions: What there was of each version.
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
    before: int = 0
    target: int = 0
    wanted: int = 0
    reason: str = ""
    versions: tuple[VersionTrace, ...] = ()

    @classmethod
    def of(
        cls,
        at_s: float,
        seen: Observation,
        decision: Decision,
        *,
        before: int,
        draining: int,
        versions: tuple[VersionTrace, ...],
    ) -> "Moment":
        """Makes it of what was seen and decided; see `Moment` for the others.

        Args:
            at_s: When; Unix time.
            seen: What was seen.
            decision: What was decided.
            before: How many workers there should have been until then.
            draining: Workers that end what they have in hand.
            versions: What there was of each version.
        """
        return cls(
            at_s=round(at_s, 3),
            work_s=round(seen.work_s, 4),
            entries=seen.entries,
            executed=seen.executed,
            used=round(seen.used, 4),
            live=seen.live,
            starting=seen.starting,
            draining=draining,
            load_s=round(seen.load_s, 3),
            floor=seen.floor,
            before=before,
            target=decision.target,
            wanted=decision.wanted,
            reason=decision.reason,
            versions=versions,
        )

    @property
    def seen(self) -> Observation:
        """What the policy was given, in the time of the record."""
        return Observation(
            now_s=self.at_s,
            work_s=self.work_s,
            entries=self.entries,
            executed=self.executed,
            used=self.used,
            live=self.live,
            starting=self.starting,
            load_s=self.load_s,
            floor=self.floor,
        )


_DECODER = msgspec.json.Decoder(Moment)


def encode(moment: Moment) -> bytes:
    """Returns a moment as a line."""
    return msgspec.json.encode(moment) + b"\n"


def decode(lines: Iterable[bytes]) -> list[Moment]:
    """Reads the lines of a record; those that a crash cut off are left out, and what goes back in time too.

    Args:
        lines: The lines, with or without their ends.

    Raises:
        SettingsError: It is no record, has fewer than two lines, or is of more than `MOST_S`.
    """
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
        raise SettingsError(f"line {broken[0]} is none of an autoscaler's record; --record writes one")
    if len(moments) < 2:
        raise SettingsError("an autoscaler's record has at least two lines; --record writes one each second")
    if moments[-1].at_s - moments[0].at_s > MOST_S:
        raise SettingsError(f"the record is of more than {MOST_S / 86400:g} days; cut out the lines that matter")
    return moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a record tells, second by second; rows of all versions are made rows of one, by the work they are.

    Attributes:
        arrivals: Rows that arrived.
        served: Rows that left the queue.
        workers: Worker processes that there were: serving, starting or draining.
        targets: How many workers there should have been.
        rows_per_s: Rows that one worker does a second.
        load_s: Seconds from the start of a worker until it served.
        drain_s: Seconds from its dismissal until its end.
        floor: Live workers that some model wanted, at most.
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
    """Makes out the traffic of a record, whatever its steps are.

    Args:
        moments: At least two, in order, as `decode` returns them.

    Raises:
        SettingsError: Nothing was executed in it, or no speed is known: there is nothing to go by.
    """
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
    """Returns the median of the speeds that were measured of each version; those without any are left out."""
    found: dict[Version, list[float]] = {}
    for moment in moments:
        for one in moment.versions:
            if one.rows_per_s > 0:
                found.setdefault((one.model, one.version), []).append(one.rows_per_s)
    return {key: sorted(speeds)[len(speeds) // 2] for key, speeds in found.items()}


def _rows_of(moments: Sequence[Moment], key: Version) -> list[tuple[int, int]]:
    """Returns (rows that arrived so far, rows that wait) of one version at each moment.

    Workers tell what they executed a little after it left the queue. So what is missing is taken for executed until it
    was missing for `LAG_S`: then it was cancelled, or failed. A version that is left out of a line is as it was, and
    nothing of it waits.
    """
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
            arrived = waiting  # what was executed before is no part of the record
        if totals or one is not None:
            totals.append((moment.at_s, total))
        found.append((arrived, min(waiting, arrived)))
    return found


def _indexes(times: Sequence[float]) -> list[int]:
    """Returns which moment holds at each whole second."""
    found, index = [], 0
    for second in range(math.ceil(times[-1]) + 1):
        while index + 1 < len(times) and times[index + 1] <= second:
            index += 1
        found.append(index)
    return found


def _each_second(times: Sequence[float], totals: Sequence[float]) -> list[int]:
    """Returns a total at each whole second; between two moments it grows evenly."""
    found = []
    for second, index in enumerate(_indexes(times)):
        value = totals[index]
        if index + 1 < len(times):
            share = (second - times[index]) / (times[index + 1] - times[index])
            value += (totals[index + 1] - value) * share
        found.append(math.floor(value + 1e-6))
    return found


def _steps(totals: Sequence[int]) -> tuple[int, ...]:
    """Returns what was added in each second; a total that goes back stands still until it is reached again."""
    steps, reached = [], 0
    for total in totals:
        steps.append(max(total - reached, 0))
        reached = max(reached, total)
    return tuple(steps)


def _mean_s(times: Sequence[float], counts: Sequence[int]) -> float:
    """Returns for how long one counted on average; 0 where nothing ever did."""
    began = sum(max(b - a, 0) for a, b in zip([0, *counts], counts, strict=False))
    lasted_s = sum(count * (end - start) for count, start, end in zip(counts, times, times[1:], strict=False))
    return lasted_s / began if began else 0.0
