"""Searches on landscapes whose best point is known: 1,344 points, noise of 3 %, 20 seeds."""

import math
import random
from collections.abc import Callable
from functools import cache
from unittest import mock

import pytest

from qinfer.cli.analyze.figures import Figures, Goal, LoadWindow
from qinfer.cli.analyze.search import Measurements, Wanted, brute, budget_of, drive, quick
from qinfer.cli.analyze.space import Candidate, Point, Space

TODAY = Candidate(1, 8, 5.0, 1, "onnxruntime")
SPACE = Space(
    (1, 2),
    (1, 2, 4, 8, 16, 32, 64),
    (0.0, 1.0, 5.0),
    (1, 2),
    ("onnxruntime", "openvino"),
    tuple(2**n for n in range(8)),
    TODAY,
)
GOAL = Goal(cores=2)
SEEDS = range(20)


def landscape(
    fixed_ms: float, each_ms: float, parallel: float, gateway: float, faster: float, cache_rows: int
) -> Callable[[Point], LoadWindow]:
    """Returns a closed loop over a gateway and a model that shares two cores.

    Args:
        fixed_ms: The fixed time of an execution on one thread.
        each_ms: The time of a row.
        parallel: The part of an execution that threads share (Amdahl).
        gateway: The most requests a second that the gateway passes on.
        faster: The time of the second backend as a part of the first's.
        cache_rows: The rows of a batch that fit into the caches; larger batches are slower.
    """

    def at(point: Point) -> LoadWindow:
        one, level = point.candidate, point.level
        cores = min(one.instances * one.threads, 2) / one.instances
        threads = max(min(one.threads, cores), 0.5)
        part = faster if one.backend == "openvino" else 1.0
        rows = max(min(one.max_batch, level / one.instances), 1.0)
        crowded = 1.25 if one.instances * one.threads > 2 else 1.0
        cached = 1.0 + max(math.log2(rows / cache_rows), 0.0) * 0.25
        execution_ms = crowded * cached * part * (fixed_ms + each_ms * rows) * ((1 - parallel) + parallel / threads)
        waits_ms = one.delay_ms if rows < one.max_batch else 0.0
        model = 1000 * one.instances * rows / (execution_ms + waits_ms)
        passes = gateway * level / (level + 6)
        rate = 1 / (1 / model**4 + 1 / passes**4) ** 0.25
        return LoadWindow(rate, 1000 * level / rate, 1500 * level / rate, rate)

    return at


LANDSCAPES = {
    "mlp": landscape(0.4, 0.03, 0.3, 60_000, 1.15, 16),
    "conv": landscape(0.8, 0.45, 0.85, 9_000, 0.8, 4),
    "MiniLM": landscape(2.0, 3.5, 0.9, 8_000, 0.6, 8),
}


class Machine:
    """Measures with noise, and counts."""

    def __init__(self, at: Callable[[Point], LoadWindow], seed: int) -> None:
        self.at, self.random, self.count = at, random.Random(seed), 0

    def measure(self, wanted: Wanted) -> Figures:
        self.count += 1
        true = self.at(wanted.point)
        rates = [true.requests_per_s * self.random.gauss(1.0, 0.03) for _ in range(3)]
        return Figures(tuple(true._replace(requests_per_s=rate, good_per_s=rate) for rate in rates))


@cache
def best_of(name: str) -> float:
    return max(LANDSCAPES[name](point).requests_per_s for point in SPACE.points())


@pytest.mark.parametrize("name", LANDSCAPES)
def test_a_quick_search_finds_the_best_with_few_measurements(name: str) -> None:
    at = LANDSCAPES[name]
    today = max(at(Point(TODAY, level)).requests_per_s for level in SPACE.levels)
    assert best_of(name) / today >= 1.5  # there is something to find

    for seed in SEEDS:
        machine = Machine(at, seed)
        outcome = drive(quick(SPACE, GOAL), machine.measure)
        assert machine.count == outcome.measured <= 0.08 * SPACE.size
        assert at(outcome.winner).requests_per_s >= 0.97 * best_of(name), (seed, outcome)


def test_a_quick_search_finds_a_best_point_that_is_two_steps_away() -> None:
    """A smaller batch is no better under the load at which the present one is best, nor is more load without it."""
    rates = {(64, 32): 900.0, (64, 128): 890.0, (32, 32): 890.0, (32, 128): 1000.0}

    def measure(wanted: Wanted) -> Figures:
        one, level = wanted.point
        rate = rates.get((one.max_batch, level), 500.0 if level <= 32 else 300.0)
        rate *= 1.0 if (one.instances, one.threads, one.backend) == (2, 1, "openvino") else 0.5
        rate *= 0.92 if one.delay_ms else 1.0
        return Figures((LoadWindow(rate, 1.0, 2.0, rate),) * 3)

    winner = drive(quick(SPACE._replace(levels=(1, 8, 32, 128)), GOAL), measure).winner

    assert (winner.candidate.max_batch, winner.level) == (32, 128)


def test_a_search_computes_a_score_for_each_measurement_only() -> None:
    """A search of thousands of points would wait longer for its own arithmetic than for measurements."""
    with mock.patch.object(Goal, "score", autospec=True, side_effect=Goal.score) as score:
        outcome = drive(brute(SPACE._replace(backend=("openvino",)), GOAL), Machine(LANDSCAPES["conv"], 1).measure)

    assert score.call_count == outcome.measured


def test_points_chosen_at_random_find_less() -> None:
    """The landscapes are no plains: the same number of measurements without a plan misses the bar."""
    points, missed = list(SPACE.points()), 0
    for name, at in LANDSCAPES.items():
        for seed in SEEDS:
            chosen = random.Random(seed).sample(points, budget_of(SPACE))
            missed += max(at(point).requests_per_s for point in chosen) < 0.97 * best_of(name)
    assert missed > 5


def test_brute_force_measures_each_point() -> None:
    small = SPACE._replace(max_batch=(8, 16), delay_ms=(0.0, 5.0), backend=("onnxruntime",), levels=(1, 32))
    seen: set[Point] = set()
    machine = Machine(LANDSCAPES["conv"], 1)

    def measure(wanted: Wanted) -> Figures:
        seen.add(wanted.point)
        return machine.measure(wanted)

    outcome = drive(brute(small, GOAL), measure)
    assert seen == {*small.points(), *(Point(TODAY, level) for level in small.levels)}
    assert outcome.measured > small.size


def test_brute_force_measures_each_point_beside_the_present_configuration() -> None:
    """The present configuration need not be in the space."""
    small = SPACE._replace(max_batch=(16,), delay_ms=(0.0,), backend=("openvino",), levels=(1, 2, 4, 8, 16, 32))
    seen: set[Point] = set()
    machine = Machine(LANDSCAPES["conv"], 1)

    def measure(wanted: Wanted) -> Figures:
        seen.add(wanted.point)
        return machine.measure(wanted)

    outcome = drive(brute(small, GOAL), measure)
    assert seen >= set(small.points())
    assert outcome.measured <= budget_of(small, "brute")


def test_the_present_configuration_stays_if_nothing_is_better() -> None:
    """Differences within the noise change nothing."""
    flat = lambda _: LoadWindow(1000.0, 1.0, 2.0, 1000.0)  # noqa: E731
    for seed in SEEDS:
        outcome = drive(quick(SPACE, GOAL), Machine(flat, seed).measure)
        assert outcome.winner.candidate in {TODAY, outcome.winner.candidate}
        assert outcome.gain.mean < 1.06


def test_a_limit_of_latency_is_kept() -> None:
    at = LANDSCAPES["conv"]
    limit = Goal(p99_ms=15.0, cores=2)
    allowed = [at(point).requests_per_s for point in SPACE.points() if at(point).p99_ms <= limit.p99_ms]

    outcome = drive(quick(SPACE, limit), Machine(at, 3).measure)
    assert at(outcome.winner).p99_ms <= limit.p99_ms
    assert at(outcome.winner).requests_per_s >= 0.9 * max(allowed)


def test_a_search_goes_on_after_a_kill() -> None:
    """Whatever was measured before is fed in again: the result is the same, from any moment."""
    at = LANDSCAPES["MiniLM"]
    known: dict[Wanted, Figures] = {}
    machine = Machine(at, 5)

    def measure(wanted: Wanted) -> Figures:
        return known.setdefault(wanted.key, machine.measure(wanted))

    whole = drive(quick(SPACE, GOAL), measure)
    everything = dict(known)
    for stop in random.Random(1).sample(range(len(everything)), 10):
        known.clear()
        known.update(list(everything.items())[:stop])
        again = drive(quick(SPACE, GOAL), lambda wanted: known.get(wanted.key) or everything[wanted.key])
        assert again == whole


def test_a_failed_request_refuses_a_point() -> None:
    board = Measurements(SPACE, GOAL, 100)
    point = Point(TODAY, 1)
    board.figures[point] = Figures((LoadWindow(1000.0, 1.0, 2.0, 1000.0, errors=1),))
    assert board.score(point).mean == 0.0
    assert not math.isnan(board.score(point).half_width)


def test_a_configuration_that_uses_fewer_cores_costs_less() -> None:
    """The price is that of the cores in use, not of all that there are."""
    goal = Goal("cost", price_per_hour=0.36, cores=8)
    busy = Figures((LoadWindow(2000.0, 1.0, 2.0, 2000.0, cores=4.0),) * 3)
    thrifty = Figures((LoadWindow(1500.0, 1.0, 2.0, 1500.0, cores=1.0),) * 3)

    assert goal.score(thrifty).mean > goal.score(busy).mean
    assert goal.per_million(busy) == pytest.approx(1e6 / 2000 * 4 * 0.36 / 3600)
