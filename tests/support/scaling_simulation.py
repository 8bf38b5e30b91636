"""A simulation of a queue and its workers, second by second, around the production scaling policy.

Rows wait in order for loaded workers. A started worker loads first, a dismissed one drains; both cost without serving.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from qinfer.scaling.policy import QueueObservation, ScalingPolicy, ScalingState, Throughput, decide

_KEY = ("m", 1)


@dataclass(frozen=True, kw_only=True)
class WorkerProfile:
    """Simulated workers.

    Attributes:
        load_s: The time from a worker's start until it serves.
        drain_s: The time from SIGTERM to a worker's end.
        speed_error: Measured speed divided by `rows_per_s`.
    """

    rows_per_s: float = 10.0
    load_s: float = 15.0
    drain_s: float = 2.0
    speed_error: float = 1.0


@dataclass
class SimulationOutcome:
    """The outcome of a trace.

    Attributes:
        ideal_s: Seconds that one worker would need for the work.
        worker_s: Seconds in which workers served, started or drained, added up.
        most: The highest decided number of workers.
        left: Rows that waited at the end.
        waits: (seconds of waiting, rows).
        targets: The decided workers in each second.
    """

    ideal_s: float = 0.0
    worker_s: float = 0.0
    most: int = 0
    left: int = 0
    waits: list[tuple[float, int]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(count for _, count in self.waits)

    def late_rows(self, bound_s: float) -> int:
        """Counts rows that waited longer than `bound_s`."""
        return sum(count for wait_s, count in self.waits if wait_s > bound_s)

    def late(self, bound_s: float) -> float:
        """Returns the share of rows that waited longer than a bound."""
        return self.late_rows(bound_s) / max(self.rows, 1)

    def wait_s(self, share: float) -> float:
        """Returns the longest wait of this share of the rows."""
        due, seen = math.ceil(share * self.rows), 0
        for wait_s, count in sorted(self.waits):
            seen += count
            if seen >= due:
                return wait_s
        return 0.0

    @property
    def excess(self) -> float:
        """Worker-seconds per second of work."""
        return self.worker_s / self.ideal_s if self.ideal_s else math.inf

    @property
    def changes(self) -> int:
        """Changes of the target."""
        return sum(one != other for one, other in pairwise(self.targets))

    @property
    def turns(self) -> int:
        """Reversals, which measure flapping."""
        steps = [b - a for a, b in pairwise(self.targets) if a != b]
        return sum(one * other < 0 for one, other in pairwise(steps))


class _WaitingRows:
    def __init__(self) -> None:
        self._groups: deque[tuple[int, int]] = deque()
        self.count = 0

    def add(self, now: int, count: int) -> None:
        if count:
            self._groups.append((now, count))
            self.count += count

    def take_rows(self, now: int, count: int, outcome: SimulationOutcome) -> None:
        self.count -= count
        while count:
            arrived, there = self._groups.popleft()
            taken = min(there, count)
            outcome.waits.append((now - arrived, taken))
            count -= taken
            if there > taken:
                self._groups.appendleft((arrived, there - taken))

    def take_rest(self, now: int, outcome: SimulationOutcome) -> None:
        outcome.left = self.count
        self.take_rows(now, self.count, outcome)


def simulate(policy: ScalingPolicy, arrivals: Sequence[int], profile: WorkerProfile | None = None) -> SimulationOutcome:
    """Runs a policy on arriving rows per second."""
    profile = profile or WorkerProfile()
    state = ScalingState.initial(0.0, policy.min_workers)
    throughput, outcome = Throughput(), SimulationOutcome(ideal_s=sum(arrivals) / profile.rows_per_s)
    ready_at: list[float] = [profile.load_s] * policy.min_workers
    leaving: list[float] = []
    waiting = _WaitingRows()
    served_rows, credit = 0, 0.0
    speed = profile.rows_per_s * profile.speed_error
    for now, count in enumerate(arrivals):
        waiting.add(now, count)
        live = sum(at_s <= now for at_s in ready_at)
        credit = credit % 1 + live * profile.rows_per_s
        served = min(waiting.count, int(credit))
        credit -= served
        served_rows += served
        waiting.take_rows(now, served, outcome)
        leaving = [ends_s for ends_s in leaving if ends_s > now]
        outcome.worker_s += len(ready_at) + len(leaving)
        there = waiting.count + min(live, served)
        used = throughput.observe(now, {_KEY: served_rows}, {_KEY: speed}, live, there / speed)
        seen = QueueObservation(
            now_s=now,
            work_s=there / speed,
            entries=there,
            executed=throughput.executed,
            used=used,
            live=live,
            starting=len(ready_at) - live,
            load_s=profile.load_s if served_rows else 0.0,
        )
        decision, state = decide(policy, state, seen)
        outcome.targets.append(decision.target)
        while len(ready_at) < decision.target:
            ready_at.append(now + profile.load_s)
        while len(ready_at) > decision.target:
            ready_at.remove(max(ready_at))
            leaving.append(now + profile.drain_s)
    outcome.most = max(outcome.targets, default=0)
    waiting.take_rest(len(arrivals), outcome)
    return outcome
