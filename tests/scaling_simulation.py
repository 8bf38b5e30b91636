"""A queue and its workers, simulated second by second around the scaling policy that production runs.

Requests come as a trace says, wait in order, and are served by the workers that have loaded. A worker that was started
loads first, one that was told to leave drains first; both cost, and neither serves.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from qinfer.control.scaling import Observation, ScalingPolicy, ScalingState, Throughput, decide

KEY = ("m", 1)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What workers are like.

    Attributes:
        rows_per_s: What one serves.
        load_s: From its start until it serves.
        drain_s: From SIGTERM to its end.
        speed_error: Times `rows_per_s` that is measured.
    """

    rows_per_s: float = 10.0
    load_s: float = 15.0
    drain_s: float = 2.0
    speed_error: float = 1.0


@dataclass
class Outcome:
    """What came of a trace; `ideal_s` are the seconds of work that it had, for one worker."""

    ideal_s: float = 0.0
    worker_s: float = 0.0
    most: int = 0
    left: int = 0
    waits: list[tuple[float, int]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def late(self, bound_s: float) -> float:
        """The share of requests that waited longer."""
        return sum(count for wait_s, count in self.waits if wait_s > bound_s) / sum(count for _, count in self.waits)

    @property
    def excess(self) -> float:
        """Seconds of workers for each second of work."""
        return self.worker_s / self.ideal_s

    @property
    def changes(self) -> int:
        """How often the number of workers was changed."""
        return sum(one != other for one, other in pairwise(self.targets))

    @property
    def turns(self) -> int:
        """How often a change went the other way than the one before: what flapping is made of."""
        steps = [b - a for a, b in pairwise(self.targets) if a != b]
        return sum(one * other < 0 for one, other in pairwise(steps))


def run(policy: ScalingPolicy, trace: Sequence[int], machine: Machine | None = None) -> Outcome:
    """Runs a policy on a trace: the requests of each second."""
    machine = machine or Machine()
    state = ScalingState.begin(0.0, policy.min_workers)
    throughput, outcome = Throughput(), Outcome(ideal_s=sum(trace) / machine.rows_per_s)
    ready_at: list[float] = [machine.load_s] * policy.min_workers
    leaving: list[float] = []
    queue: deque[list[int]] = deque()
    waiting, served_rows, credit = 0, 0, 0.0
    for now, arrivals in enumerate(trace):
        if arrivals:
            queue.append([now, arrivals])
            waiting += arrivals
        live = sum(at_s <= now for at_s in ready_at)
        credit = min(credit % 1, 1.0) + live * machine.rows_per_s
        served = min(waiting, int(credit))
        credit -= served
        waiting, served_rows = waiting - served, served_rows + served
        _serve(queue, served, now, outcome)
        leaving = [ends_s for ends_s in leaving if ends_s > now]
        outcome.worker_s += len(ready_at) + len(leaving)
        speed = machine.rows_per_s * machine.speed_error
        in_flight = min(live, served)
        work_s = (waiting + in_flight) / speed
        used = throughput.observe(now, {KEY: served_rows}, {KEY: speed}, live, work_s)
        seen = Observation(
            now_s=now,
            work_s=work_s,
            entries=waiting + in_flight,
            executed=throughput.executed,
            used=used,
            live=live,
            starting=len(ready_at) - live,
            load_s=machine.load_s if served_rows else 0.0,
        )
        decision, state = decide(policy, state, seen)
        outcome.targets.append(decision.target)
        outcome.most = max(outcome.most, decision.target)
        while len(ready_at) < decision.target:
            ready_at.append(now + machine.load_s)
        while len(ready_at) > decision.target:
            ready_at.remove(max(ready_at))
            leaving.append(now + machine.drain_s)
    outcome.left = waiting
    return outcome


def _serve(queue: deque[list[int]], count: int, now: int, outcome: Outcome) -> None:
    while count:
        arrived, there = queue[0]
        taken = min(there, count)
        outcome.waits.append((now - arrived, taken))
        count -= taken
        if taken == there:
            queue.popleft()
        else:
            queue[0][1] -= taken


def counts(rates: Sequence[float], seed: int) -> list[int]:
    """Returns how many requests come in each second, at random around the rates."""
    rng = random.Random(seed)
    return [max(0, round(rng.gauss(rate, math.sqrt(rate)))) if rate else 0 for rate in rates]


def burst(seed: int = 1) -> list[int]:
    """Nothing, a minute of much, nothing again."""
    return counts([0.0] * 60 + [60.0] * 60 + [0.0] * 900, seed)


def ramp(seed: int = 2) -> list[int]:
    """Up to six workers' worth within twenty minutes, and down again, and nothing."""
    up = [60.0 * second / 1200 for second in range(1200)]
    return counts([*up, *reversed(up), *([0.0] * 600)], seed)


def diurnal(seed: int = 3) -> list[int]:
    """A day within two hours: from a fifth of a worker to five and back."""
    return counts([26.0 - 24.0 * math.cos(2 * math.pi * second / 7200) for second in range(7200)], seed)


def steady(rate: float, seconds: int = 1800, seed: int = 4) -> list[int]:
    """The same rate all the time."""
    return counts([rate] * seconds, seed)


def recorded(seed: int = 5) -> list[int]:
    """An hour as services see it: a level that wanders, noise that has a memory, spikes, and minutes of silence."""
    rng, rates, drift = random.Random(seed), [], 0.0
    for second in range(3600):
        drift = 0.99 * drift + rng.gauss(0, 0.06)
        level = 20.0 * math.exp(drift) * (1.4 if 900 <= second < 2100 else 0.7)
        spike = 40.0 if second % 700 < 20 else 0.0
        rates.append(0.0 if 2700 <= second < 3100 else level + spike)
    return counts(rates, seed)
