"""The joint search of models that share two cores: tuned once in turn, they stay far from the best."""

import random
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest

from qinfer.cli.analyze import mix
from qinfer.cli.analyze.figures import Figures, Goal, Interval, LoadWindow
from qinfer.cli.analyze.journal import FILE, Journal, Subject
from qinfer.cli.analyze.mix import joint, most_measurements
from qinfer.cli.analyze.search import TURNS, Outcome, Search, Wanted, budget_of, drive, quick
from qinfer.cli.analyze.space import Candidate, Point, Space

TODAY = {"light": Candidate(1, 2, 0.0, 1, "onnxruntime"), "heavy": Candidate(1, 1, 0.0, 1, "onnxruntime")}
SPACES = {
    name: Space((1, 2), (1, 2, 4, 8, 16, 32, 64), (0.0, 1.0), (1, 2), ("onnxruntime",), (1, 4, 16, 64, 128), today)
    for name, today in TODAY.items()
}
COSTS_MS = {"light": (1.0, 0.05), "heavy": (2.0, 0.2)}
"""The fixed time of an execution on one core, and that of a row."""
GOAL = Goal(cores=2)
SEEDS = range(20)


def rate_of(candidates: dict[str, Candidate], level: int) -> float:
    """Returns the rate of a closed loop that asks both models by turns: the slower one, or the cores, limit it."""
    limits, work_ms, threads = [], 0.0, 0
    for name, one in candidates.items():
        fixed_ms, each_ms = COSTS_MS[name]
        rows = max(min(one.max_batch, level / 2 / one.instances), 1.0)
        spread = one.threads**0.5
        execution_ms = (fixed_ms + each_ms * rows) / spread
        waits_ms = one.delay_ms if rows < one.max_batch else 0.0
        limits.append(2 * 1000 * one.instances * rows / (execution_ms + waits_ms))
        work_ms += execution_ms * one.threads / rows / 2
        threads += one.instances * one.threads
    crowded = 1.0 + 0.15 * max(threads - 2, 0)
    limits.append(1000 * 2 / work_ms)
    return float(1 / sum((crowded / limit) ** 6 for limit in limits) ** (1 / 6))


@cache
def best_rate() -> float:
    each = [list(space.candidates()) for space in SPACES.values()]
    levels = SPACES["light"].levels
    return max(rate_of(dict(zip(SPACES, one, strict=True)), level) for one in product(*each) for level in levels)


class Machine:
    """Measures with noise of 3 %, and keeps what it measured."""

    def __init__(self, seed: int | str) -> None:
        self.random, self.known = random.Random(seed), dict[Wanted, Figures]()

    def measure(self, wanted: Wanted) -> Figures:
        if wanted.key not in self.known:
            true = rate_of(wanted.candidates, wanted.point.level)
            rates = [true * self.random.gauss(1.0, 0.03) for _ in range(3)]
            self.known[wanted.key] = Figures(tuple(LoadWindow(rate, 1.0, 2.0, rate) for rate in rates))
        return self.known[wanted.key]


def found_by(measure: Callable[[Wanted], Figures]) -> dict[str, Outcome]:
    return drive(joint(SPACES, GOAL, quick), measure)


def rate_found(outcomes: dict[str, Outcome]) -> float:
    return rate_of({name: one.winner.candidate for name, one in outcomes.items()}, outcomes["light"].winner.level)


def test_rounds_find_the_best_where_one_pass_stays_far_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model can't win anything while the second one, as it is, limits both."""
    joined = []
    for seed in SEEDS:
        machine = Machine(seed)
        joined.append(rate_found(found_by(machine.measure)) / best_rate())
        assert len(machine.known) <= most_measurements(SPACES, "quick")
    monkeypatch.setattr(mix, "ROUNDS", 1)
    in_turn = [rate_found(found_by(Machine(seed).measure)) / best_rate() for seed in SEEDS]

    assert min(joined) >= 0.97
    assert max(in_turn) < 0.9


def test_a_joint_search_that_was_killed_at_any_moment_has_the_same_result(tmp_path: Path) -> None:
    """The journal may end at any byte of any round; what it has is not measured again."""
    whole, measured = journaled(tmp_path / "whole")
    written = (tmp_path / "whole" / FILE).read_bytes()

    for kill in random.Random(1).sample(range(len(written)), 10):
        directory = tmp_path / str(kill)
        directory.mkdir()
        (directory / FILE).write_bytes(written[:kill])
        kept = max(written[:kill].count(b"\n") - 1, 0)

        assert journaled(directory) == (whole, measured - kept)
        assert (directory / FILE).read_bytes() == written


def journaled(directory: Path) -> tuple[dict[str, Outcome], int]:
    """Searches with a journal, which may have measurements; returns the outcomes, and how many it measured."""
    journal = Journal(directory, Subject("", SPACES, GOAL, "quick", 1.0))
    before = len(journal.known)

    def measure(wanted: Wanted) -> Figures:
        if wanted.key not in journal.known:
            journal.add(wanted, Machine(repr(wanted.key)).measure(wanted))
        return journal.known[wanted.key]

    try:
        return found_by(measure), len(journal.known) - before
    finally:
        journal.close()


def test_the_winners_are_compared_with_the_present_set_by_turns() -> None:
    machine = Machine(3)
    outcomes = found_by(machine.measure)

    winners = {name: one.winner.candidate for name, one in outcomes.items()}
    last = list(machine.known)[-2 * TURNS :]
    assert [one.candidates for one in last] == [TODAY, winners] * TURNS
    true = rate_of(winners, 128) / rate_of(TODAY, 128)
    assert {one.gain for one in outcomes.values()} == {outcomes["light"].gain}
    assert outcomes["light"].gain.mean == pytest.approx(true, rel=0.1)
    assert all({one.winner, one.today} <= one.figures.keys() for one in outcomes.values())


def test_the_present_set_stays_if_the_winners_are_not_better_together() -> None:
    """What each search saw was chance."""

    def measure(wanted: Wanted) -> Figures:
        is_luck = wanted.turn <= TURNS and wanted.candidates != TODAY
        return Figures((LoadWindow(2000.0 if is_luck else 1000.0, 1.0, 2.0, 1000.0),) * 3)

    outcomes = found_by(measure)

    assert {name: one.winner.candidate for name, one in outcomes.items()} == TODAY
    assert all(one.gain.mean == 1.0 for one in outcomes.values())


def test_a_round_that_improves_nothing_is_the_last() -> None:
    """Each model is tuned once, and nothing is left to compare."""
    asked = list[Wanted]()

    def measure(wanted: Wanted) -> Figures:
        asked.append(wanted)
        return Figures((LoadWindow(1000.0, 1.0, 2.0, 1000.0),) * 3)

    outcomes = found_by(measure)

    assert len(asked) == len({one.key for one in asked}) == sum(one.measured for one in outcomes.values())
    assert {one.beside for one in asked} == {(item,) for item in TODAY.items()}


def test_a_single_model_is_searched_as_before() -> None:
    """The joint search of one model is its search."""
    space, plain, joined = SPACES["heavy"], list[Wanted](), list[Wanted]()
    only = {"heavy": space}

    def measure(wanted: Wanted, asked: list[Wanted]) -> Figures:
        asked.append(wanted)
        return Machine(len(asked)).measure(wanted._replace(model="heavy", beside=tuple(TODAY.items())[:1]))

    outcome = drive(quick(space, GOAL), partial(measure, asked=plain))
    outcomes = drive(joint(only, GOAL, quick), partial(measure, asked=joined))

    assert [one._replace(model="") for one in joined] == plain
    assert outcomes == {"heavy": outcome}
    assert most_measurements(only, "quick") == budget_of(space)


def test_only_the_present_configuration_stays_where_another_is_hardly_better() -> None:
    """Of two others, the better one is taken, but no model is tuned again for its sake."""
    light, heavy = TODAY.values()
    scripted = {
        light: [(light, light._replace(max_batch=8)), (light._replace(max_batch=16),) * 2],
        heavy: [(heavy._replace(max_batch=16),) * 2],
        light._replace(max_batch=16): [(light._replace(max_batch=16), light._replace(max_batch=32))],
        heavy._replace(max_batch=16): [(heavy._replace(max_batch=16), heavy._replace(max_batch=32))],
    }
    tuned, machine = list[Candidate](), Machine(1)

    def search(space: Space, _: Goal) -> Search:
        today = Point(space.today, 64)
        tuned.append(space.today)
        found = yield Wanted(today)
        winner, leader = (Point(one, 64) for one in scripted[space.today].pop(0))
        return Outcome(winner, today, Interval(1.0, 1.0, 1.0), 1, [today], {today: found}, leader)

    outcomes = drive(joint(SPACES, GOAL, search), machine.measure)

    assert tuned == [light, heavy, light, heavy._replace(max_batch=16)]
    assert [one.winner.candidate.max_batch for one in outcomes.values()] == [16, 32]
