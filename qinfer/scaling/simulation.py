"""A queue and its workers, simulated second by second around the scaling policy that production runs.

Rows come as a trace says, wait in order, and are served by the workers that have loaded. A worker that was started
loads first, one that was told to leave drains first; both cost, and neither serves. `as_recorded` tells the same of
what really was (`scaling_record.py`).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from qinfer.scaling.policy import Observation, ScalingPolicy, ScalingState, Throughput, decide
from qinfer.scaling.record import Traffic

_KEY = ("m", 1)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What workers are like.

    Attributes:
        rows_per_s: What one serves.
        load_s: From its start until it serves.
        drain_s: From SIGTERM to its end.
        speed_error: Times `rows_per_s` that is measured.
        floor: Live workers that some model wants in order to be READY.
    """

    rows_per_s: float = 10.0
    load_s: float = 15.0
    drain_s: float = 2.0
    speed_error: float = 1.0
    floor: int = 0

    @classmethod
    def of(cls, traffic: Traffic) -> "Machine":
        """Returns what the workers of a record were like."""
        return cls(rows_per_s=traffic.rows_per_s, load_s=traffic.load_s, drain_s=traffic.drain_s, floor=traffic.floor)


@dataclass
class Outcome:
    """What came of a trace.

    Attributes:
        ideal_s: The seconds of work that it had, for one worker.
        worker_s: Seconds of workers that there were: serving, starting or draining.
        most: The most workers that were decided.
        left: Rows that waited at its end.
        waits: (seconds, rows) that were waited; of those that are left: until the end.
        targets: The number of workers that was decided in each second.
    """

    ideal_s: float = 0.0
    worker_s: float = 0.0
    most: int = 0
    left: int = 0
    waits: list[tuple[float, int]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """How many there were."""
        return sum(count for _, count in self.waits)

    def late_rows(self, bound_s: float) -> int:
        """Returns how many rows waited longer."""
        return sum(count for wait_s, count in self.waits if wait_s > bound_s)

    def late(self, bound_s: float) -> float:
        """Returns the share of rows that waited longer."""
        return self.late_rows(bound_s) / max(self.rows, 1)

    def wait_s(self, share: float) -> float:
        """Returns what this share of the rows waited at most; 0 without any."""
        due, seen = math.ceil(share * self.rows), 0
        for wait_s, count in sorted(self.waits):
            seen += count
            if seen >= due:
                return wait_s
        return 0.0

    @property
    def excess(self) -> float:
        """Seconds of workers for each second of work."""
        return self.worker_s / self.ideal_s if self.ideal_s else math.inf

    @property
    def changes(self) -> int:
        """How often the number of workers was changed."""
        return sum(one != other for one, other in pairwise(self.targets))

    @property
    def turns(self) -> int:
        """How often a change went the other way than the one before: what flapping is made of."""
        steps = [b - a for a, b in pairwise(self.targets) if a != b]
        return sum(one * other < 0 for one, other in pairwise(steps))


class _Waiting:
    """Rows that wait, in order."""

    def __init__(self) -> None:
        self._groups: deque[tuple[int, int]] = deque()
        self.count = 0

    def add(self, now: int, count: int) -> None:
        """Adds rows that arrive now."""
        if count:
            self._groups.append((now, count))
            self.count += count

    def take(self, now: int, count: int, outcome: Outcome) -> None:
        """Takes the first rows out, and notes what they waited."""
        self.count -= count
        while count:
            arrived, there = self._groups.popleft()
            taken = min(there, count)
            outcome.waits.append((now - arrived, taken))
            count -= taken
            if there > taken:
                self._groups.appendleft((arrived, there - taken))

    def end(self, now: int, outcome: Outcome) -> None:
        """Notes what is left."""
        outcome.left = self.count
        self.take(now, self.count, outcome)


def simulate(policy: ScalingPolicy, arrivals: Sequence[int], machine: Machine | None = None) -> Outcome:
    """Runs a policy on a trace.

    Args:
        policy: What decides.
        arrivals: The rows that come in each second.
        machine: What workers are like.
    """
    machine = machine or Machine()
    state = ScalingState.begin(0.0, policy.min_workers)
    throughput, outcome = Throughput(), Outcome(ideal_s=sum(arrivals) / machine.rows_per_s)
    ready_at: list[float] = [machine.load_s] * policy.min_workers
    leaving: list[float] = []
    waiting = _Waiting()
    served_rows, credit = 0, 0.0
    speed = machine.rows_per_s * machine.speed_error
    for now, count in enumerate(arrivals):
        waiting.add(now, count)
        live = sum(at_s <= now for at_s in ready_at)
        credit = credit % 1 + live * machine.rows_per_s
        served = min(waiting.count, int(credit))
        credit -= served
        served_rows += served
        waiting.take(now, served, outcome)
        leaving = [ends_s for ends_s in leaving if ends_s > now]
        outcome.worker_s += len(ready_at) + len(leaving)
        there = waiting.count + min(live, served)  # with those in flight
        used = throughput.observe(now, {_KEY: served_rows}, {_KEY: speed}, live, there / speed)
        seen = Observation(
            now_s=now,
            work_s=there / speed,
            entries=there,
            executed=throughput.executed,
            used=used,
            live=live,
            starting=len(ready_at) - live,
            load_s=machine.load_s if served_rows else 0.0,
            floor=machine.floor,
        )
        decision, state = decide(policy, state, seen)
        outcome.targets.append(decision.target)
        while len(ready_at) < decision.target:
            ready_at.append(now + machine.load_s)
        while len(ready_at) > decision.target:
            ready_at.remove(max(ready_at))
            leaving.append(now + machine.drain_s)
    outcome.most = max(outcome.targets, default=0)
    waiting.end(len(arrivals), outcome)
    return outcome


def as_recorded(traffic: Traffic) -> Outcome:
    """Returns what really came of the traffic of a record."""
    outcome = Outcome(
        ideal_s=sum(traffic.arrivals) / traffic.rows_per_s,
        worker_s=float(sum(traffic.workers)),
        most=max(traffic.targets),
        targets=list(traffic.targets),
    )
    waiting = _Waiting()
    for now, (count, served) in enumerate(zip(traffic.arrivals, traffic.served, strict=True)):
        waiting.add(now, count)
        waiting.take(now, min(served, waiting.count), outcome)
    waiting.end(len(traffic.arrivals), outcome)
    return outcome
