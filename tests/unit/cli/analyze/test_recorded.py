"""Quick searches replayed on sweeps of real models, whose best point is known: `tests.support.sweeps` tells how."""

from pathlib import Path
from random import Random
from statistics import median

import pytest

from qinfer.cli.analyze.figures import Figures, LoadWindow
from qinfer.cli.analyze.journal import FILE, Journal, Subject
from qinfer.cli.analyze.search import Outcome, Wanted, drive, quick
from qinfer.cli.analyze.space import Point
from tests.support.sweeps import (
    GOAL,
    LEAST_SHARE,
    MODELS,
    PRESENT,
    SPACE,
    Replay,
    Sweep,
    by_chance,
    by_quick_search,
    path_of,
    read_sweep,
    write_sweep,
)

SEEDS = range(20)
NEEDLES = {"conv"}
"""Models of which two points alone have `LEAST_SHARE`, while repeats of one point differ by 6 %."""


@pytest.fixture(scope="module", params=MODELS)
def sweep(request: pytest.FixtureRequest) -> Sweep:
    path = path_of(request.param)
    if not path.exists():
        pytest.skip(f"no sweep is recorded: python -m benchmarks.analyzer sweep {request.param}")
    found = read_sweep(path)
    return found._replace(info={**found.info, "model": request.param})


def test_the_whole_grid_was_measured_and_has_something_to_find(sweep: Sweep) -> None:
    assert sweep.measured.keys() == set(SPACE.points())
    assert sweep.gain >= 1.5


def test_a_quick_search_finds_most_with_few_measurements(sweep: Sweep) -> None:
    """Every search finds `LEAST_SHARE`; of `NEEDLES`, half of them."""
    found = [by_quick_search(sweep, seed) for seed in SEEDS]
    shares = [one.share for one in found]
    assert max(one.measured for one in found) <= 0.08 * SPACE.size
    assert (median(shares) if sweep.info["model"] in NEEDLES else min(shares)) >= LEAST_SHARE


def test_as_many_points_chosen_at_random_find_less(sweep: Sweep) -> None:
    assert any(by_chance(sweep, seed).share < LEAST_SHARE for seed in SEEDS)


def test_a_search_that_was_killed_at_any_moment_has_the_same_result(sweep: Sweep, tmp_path: Path) -> None:
    """The journal may end at any byte, in the middle of a line, too; each search goes on with it in a new process."""
    whole = journaled_search(sweep, tmp_path / "whole")
    written = (tmp_path / "whole" / FILE).read_bytes()

    for kill in Random(1).sample(range(len(written)), 10):
        directory = tmp_path / str(kill)
        directory.mkdir()
        (directory / FILE).write_bytes(written[:kill])

        assert journaled_search(sweep, directory) == whole
        assert (directory / FILE).read_bytes() == written


def journaled_search(sweep: Sweep, directory: Path) -> Outcome:
    """Searches with a journal, which may have measurements."""
    subject = Subject("", {"m": SPACE}, GOAL, "quick", 1.0)
    journal, replay = Journal(directory, subject), Replay(sweep, 0)

    def measure(wanted: Wanted) -> Figures:
        if wanted.key not in journal.known:
            journal.add(wanted, replay.measure(wanted))
        return journal.known[wanted.key]

    try:
        return drive(quick(SPACE, GOAL), measure)
    finally:
        journal.close()


def test_the_truth_about_a_point_that_was_chosen_is_that_of_its_repeats(tmp_path: Path) -> None:
    """A lucky first measurement does not make it the best, and no other counts as better than the repeats."""
    lucky, steady, once = (Point(PRESENT, level) for level in (1, 8, 32))
    rates = [(lucky, 120.0), (steady, 110.0), (once, 115.0), (lucky, 99.0), (steady, 104.0), (lucky, 101.0)]
    figures = [
        (point, Figures((LoadWindow(rate - 1, 1.0, 2.0, 0.0), LoadWindow(rate + 1, 1.0, 2.0, 0.0))))
        for point, rate in rates
    ]
    failed = Figures((LoadWindow(200.0, 1.0, 2.0, 0.0, errors=1),), batches=((4, 0.5),))
    write_sweep(tmp_path / "m.parquet", [*figures, (Point(PRESENT, 128), failed)], {"window_s": 0.1})

    sweep = read_sweep(tmp_path / "m.parquet")

    assert sweep.best == steady
    assert sweep.truth == {lucky: 100.0, steady: 104.0, once: 104.0, Point(PRESENT, 128): 0.0}
    assert sweep.gain == 1.0
    assert sorted(sweep.drifts) == pytest.approx([-0.01 * 2**0.5, 0.01 * 2**0.5])
    assert sweep.measured[Point(PRESENT, 128)][0].batches == ((4, 0.5),)
    assert sweep.info == {"window_s": 0.1}
    assert Replay(sweep, 1).measure(Wanted(steady)) == Replay(sweep, 1).measure(Wanted(steady))
