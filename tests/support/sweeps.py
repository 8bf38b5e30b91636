"""Sweeps of real models that were recorded by `python -m benchmarks.analyzer sweep`, and searches replayed on them.

A file has each point of `SPACE` once, as `qinfer analyze --mode brute` measured it, and then the best points and the
present configuration again by turns. The best of many noisy figures is too high, so the *truth* about a point that was
measured again is the mean of those repeats alone, and the best is the best of these. A point that was measured once
has the mean of its windows, and counts at most as the best.

A replayed measurement is the truth with two kinds of recorded noise: a repeat's distance from the mean of its point's
repeats, and for each window that of a recorded window, under the same load, from the mean of its measurement. Windows
follow until the analyzer's own rule ends the measurement.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet

from qinfer.cli.analyze.figures import Figures, Goal, LoadWindow
from qinfer.cli.analyze.measure import is_enough
from qinfer.cli.analyze.search import Wanted, budget_of, drive, quick
from qinfer.cli.analyze.space import Candidate, Point, Space

DIRECTORY = Path(__file__).parents[1] / "data" / "sweeps"
MODELS = ("mlp", "conv", "minilm")

PRESENT = Candidate(1, 4, 0.0, 1, "onnxruntime")
"""The configuration that the models have: one instance, and batches of 4, as Triton completes a configuration."""
SPACE = Space(
    (1, 2),
    (1, 2, 4, 8, 16, 32, 64),
    (0.0, 1.0, 5.0),
    (1, 2),
    ("onnxruntime", "openvino"),
    (1, 8, 32, 128),
    PRESENT,
)
"""The grid, fixed before anything was measured."""
GOAL = Goal(cores=2)

LEAST_SHARE = 0.97
"""The part of the best that a search has to find."""

_INFO = b"qinfer.sweep"
_SCHEMA = pa.schema(
    {
        "instances": pa.int8(),
        "max_batch": pa.int16(),
        "delay_ms": pa.float32(),
        "threads": pa.int8(),
        "backend": pa.dictionary(pa.int8(), pa.string()),
        "concurrency": pa.int16(),
        "turn": pa.int8(),
        "requests_per_s": pa.list_(pa.float32()),
        "p50_ms": pa.float32(),
        "p99_ms": pa.float32(),
        "batch_rows": pa.list_(pa.int16()),
        "batch_ms": pa.list_(pa.float32()),
        "errors": pa.int32(),
    }
)


class Sweep(NamedTuple):
    """A recorded model.

    Attributes:
        measured: The measurements of each point: that of the sweep, then its repeats.
        info: How it was recorded.
        truth: Requests per second of each point.
        best: The point with the best repeats.
        drifts: Distances of repeats from the mean of their point's, as parts of it.
        noise: Concurrent requests → distances of windows from the mean of their measurement, as parts of it.
    """

    measured: Mapping[Point, Sequence[Figures]]
    info: Mapping[str, Any]
    truth: Mapping[Point, float]
    best: Point
    drifts: Sequence[float]
    noise: Mapping[int, Sequence[float]]

    @property
    def gain(self) -> float:
        """The best as times the present configuration under its best load."""
        today = max(rate for point, rate in self.truth.items() if point.candidate == PRESENT)
        return self.truth[self.best] / today

    def share(self, point: Point) -> float:
        """Returns a point's throughput as a part of the best."""
        return self.truth[point] / self.truth[self.best]


def sweep_of(measured: Mapping[Point, Sequence[Figures]], info: Mapping[str, Any]) -> Sweep:
    """Computes the truth and the noise of measurements."""
    rates = {point: [rate_of(one) for one in found] for point, found in measured.items()}
    repeated = {point: fmean(found[1:]) for point, found in rates.items() if len(found) > 1}
    best = max(repeated, key=lambda point: repeated[point])
    truth = {point: repeated.get(point, min(found[0], repeated[best])) for point, found in rates.items()}
    drifts = [drift for found in rates.values() for drift in distances(found[1:])]
    noise: dict[int, list[float]] = defaultdict(list)
    for point, found in measured.items():
        for one in found:
            noise[point.level] += distances([window.requests_per_s for window in one.windows])
    return Sweep(measured, info, truth, best, drifts, noise)


def rate_of(found: Figures) -> float:
    """Returns requests per second; 0 where one failed."""
    return 0.0 if found.errors else found.throughput.mean


def distances(values: Sequence[float]) -> list[float]:
    """Returns how far values are from their mean, as parts of it; wider for few values, whose mean is near to them."""
    mean, count = fmean(values) if values else 0.0, len(values)
    return [(value / mean - 1) * (count / (count - 1)) ** 0.5 for value in values] if count > 1 and mean else []


def path_of(model: str, directory: Path = DIRECTORY) -> Path:
    """Returns the path of a model's file."""
    return directory / f"{model}.parquet"


def write_sweep(path: Path, measured: Iterable[tuple[Point, Figures]], info: Mapping[str, Any]) -> None:
    """Writes measurements in the order in which they were made."""
    rows, turns = [], defaultdict[Point, int](int)
    for point, found in measured:
        row = {**point.candidate._asdict(), "concurrency": point.level, "turn": turns[point], "errors": found.errors}
        row |= {"requests_per_s": [one.requests_per_s for one in found.windows]}
        row |= {"p50_ms": found.p50_ms, "p99_ms": found.p99_ms}
        row |= {"batch_rows": [rows for rows, _ in found.batches], "batch_ms": [ms for _, ms in found.batches]}
        rows.append({name: row[name] for name in _SCHEMA.names})
        turns[point] += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows, _SCHEMA.with_metadata({_INFO: json.dumps(info)}))
    parquet.write_table(table, path, compression="zstd")


def read_sweep(path: Path) -> Sweep:
    """Reads a file of `write_sweep`."""
    table = parquet.read_table(path)
    measured: dict[Point, list[Figures]] = defaultdict(list)
    for row in table.to_pylist():
        values = (row["instances"], row["max_batch"], row["delay_ms"], row["threads"], row["backend"])
        latencies = (row["p50_ms"], row["p99_ms"])
        windows = [LoadWindow(rate, *latencies, rate) for rate in row["requests_per_s"]]
        windows[0] = windows[0]._replace(errors=row["errors"])
        batches = tuple(zip(row["batch_rows"], row["batch_ms"], strict=True))
        measured[Point(Candidate(*values), row["concurrency"])].append(Figures(tuple(windows), batches=batches))
    return sweep_of(measured, json.loads(table.schema.metadata[_INFO]))


class Replay:
    """Measures points of a sweep with its noise, and counts; one seed, point and turn always give the same figures."""

    def __init__(self, sweep: Sweep, seed: int) -> None:
        self.count = 0
        self._sweep, self._seed = sweep, seed

    def measure(self, wanted: Wanted) -> Figures:
        """Returns the figures of a point."""
        self.count += 1
        point = wanted.point
        random, first = Random(f"{self._seed} {point} {wanted.turn}"), self._sweep.measured[point][0]
        expected = self._sweep.truth[point] * (1 + random.choice(self._sweep.drifts))
        found = Figures((), batches=first.batches)
        while not is_enough(found, wanted, GOAL):
            rate = max(expected * (1 + random.choice(self._sweep.noise[point.level])), 0.0)
            found = found._replace(windows=(*found.windows, LoadWindow(rate, first.p50_ms, first.p99_ms, rate)))
        return found


class Found(NamedTuple):
    """The result of a replayed search: the part of the best that it found, and its measurements."""

    share: float
    measured: int


def by_quick_search(sweep: Sweep, seed: int) -> Found:
    """Replays a quick search."""
    replay = Replay(sweep, seed)
    outcome = drive(quick(SPACE, GOAL), replay.measure)
    return Found(sweep.share(outcome.winner), replay.count)


def by_chance(sweep: Sweep, seed: int) -> Found:
    """Replays a search that measures as many points, chosen at random, once each."""
    replay = Replay(sweep, seed)
    chosen = Random(seed).sample(sorted(sweep.truth), budget_of(SPACE))
    scores = {point: GOAL.score(replay.measure(Wanted(point))).mean for point in chosen}
    return Found(sweep.share(max(scores, key=lambda point: scores[point])), replay.count)
