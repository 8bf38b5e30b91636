"""A measurement: windows of load on a gateway until the interval is narrow, or the point can't win any more.

The first window after a change is thrown away. A window in which others took more than `MOST_NOISE` of the machine is
repeated: stolen time of a virtual machine, and pauses of a cgroup's quota.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qinfer.cli.analyze.figures import Figures, Goal, LoadWindow
from qinfer.cli.analyze.loads import LoadPlan
from qinfer.cli.analyze.search import Wanted
from qinfer.cli.analyze.stack import TrialServer
from qinfer.cli.client import GatewayClient
from qinfer.cli.load import LoadPart, LoadReport, percentile, run_load

LEAST_WINDOWS, MOST_WINDOWS = 3, 8
NARROW = 0.03
"""Half of an interval as a part of its mean, at which a measurement ends."""
MOST_NOISE, REPEATS = 0.05, 3


class Meter(NamedTuple):
    """Measures a load on a server."""

    server: TrialServer
    plan: LoadPlan
    goal: Goal
    window_s: float

    def measure(self, wanted: Wanted) -> Figures:
        """Loads the server and returns what was found; batches are those of the wanted model.

        Raises:
            CommandFailed: No more load may be sent.
            KeyboardInterrupt: Ctrl-C; nothing of the measurement is kept.
        """
        client, level = self.server.client, wanted.point.level
        self._window(level)  # connections, arenas and caches grow
        before = _executions(client, wanted.model)
        found = Figures(())
        while not is_enough(found, wanted, self.goal):
            found = found._replace(windows=(*found.windows, self._window(level)))
        ran = _executed_since(before, _executions(client, wanted.model))
        batches = sum(count for count, _ in ran.values())
        return found._replace(
            mean_batch=round(sum(rows * count for rows, (count, _) in ran.items()) / max(batches, 1), 2),
            memory_mb=self.server.use().memory_bytes / 2**20,
            batches=tuple((rows, ns / count / 1e6) for rows, (count, ns) in ran.items()),
        )

    def _window(self, level: int) -> LoadWindow:
        for left in reversed(range(REPEATS)):
            clock, used = _Machine.now(), self.server.use().cpu_s
            report = LoadReport(level, self.goal.deadline_ms / 1000)
            for part in self.plan.parts:
                part.latencies_s.clear()
            run_load(self.plan.target, report, self.window_s, self.plan.load())
            if report.interrupted:
                raise KeyboardInterrupt
            self.server.check()
            noise = clock.noise_until(_Machine.now())
            if noise <= MOST_NOISE or not left:
                return _as_window(report, self.plan.parts, noise, self.server.use().cpu_s - used)
        raise AssertionError("a window is measured at least once")


def _as_window(report: LoadReport, parts: Sequence[LoadPart], noise: float, cpu_s: float) -> LoadWindow:
    each = [part.latencies_s for part in parts if part.latencies_s] if len(parts) > 1 else []
    return LoadWindow(
        report.requests_per_s,
        report.percentile_s(50) * 1000,
        max(percentile(one, 99) for one in each or [report.latencies_s]) * 1000,
        report.goodput_per_s,
        report.errors + (report.sequences_lost if not report.errors else 0),
        noise,
        report.first_error,
        cpu_s / report.duration_s,
        percentile(report.first_s or (), 99) * 1000,
        percentile(report.between_s, 99) * 1000,
    )


def is_enough(found: Figures, wanted: Wanted, goal: Goal) -> bool:
    """Tells whether a measurement of a point needs no more windows."""
    count = len(found.windows)
    if count < 2:
        return False
    score = goal.score(found)
    if score.mean and score.high < wanted.to_beat:
        return True
    return count >= MOST_WINDOWS or (count >= LEAST_WINDOWS and (score.half_width <= NARROW or not score.mean))


class _Machine(NamedTuple):
    """Counters of the machine: ticks in all and stolen, seconds of throttling, and the time."""

    ticks: int
    stolen: int
    throttled_s: float
    at_s: float

    @classmethod
    def now(cls) -> "_Machine":
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        throttled = 0.0
        quota = Path("/sys/fs/cgroup/cpu.stat")
        if quota.exists():
            values = dict(line.split() for line in quota.read_text().splitlines())
            throttled = int(values.get("throttled_usec", 0)) / 1e6
        return cls(sum(fields), fields[7], throttled, time.monotonic())

    def noise_until(self, later: "_Machine") -> float:
        stolen = (later.stolen - self.stolen) / max(later.ticks - self.ticks, 1)
        cores = os.cpu_count() or 1
        return stolen + (later.throttled_s - self.throttled_s) / max(later.at_s - self.at_s, 1e-9) / cores


_Executions = Mapping[int, tuple[int, int]]
"""Rows of a batch → executions, and nanoseconds of all."""


def _executions(client: GatewayClient, model: str) -> _Executions:
    found: dict[int, tuple[int, int]] = {}
    for version in client.statistics(model):
        batches: list[dict[str, Any]] = version.fields.get("batch_stats") or []
        for one in batches:
            count, ns = found.get(int(one["batch_size"]), (0, 0))
            spent = one["compute_infer"]
            found[int(one["batch_size"])] = (count + int(spent["count"]), ns + int(spent["ns"]))
    return found


def _executed_since(before: _Executions, after: _Executions) -> _Executions:
    ran = {}
    for rows, (count, ns) in sorted(after.items()):
        earlier_count, earlier_ns = before.get(rows, (0, 0))
        if count > earlier_count:
            ran[rows] = (count - earlier_count, ns - earlier_ns)
    return ran
