"""The joint search of a mix of models: each is tuned beside the best of the others, again when another has changed.

Each measurement is one of the whole load. A configuration that is better beyond the interval lets the other models be
tuned again: the search ends after a round that improves nothing. It replaces the present one only then; of two others,
the better one stays. The winners together are at last measured by turns with the present configurations together, so
that a slow minute of the machine hits both. Pure.
"""

from collections.abc import Callable, Generator, Mapping

from qinfer.cli.analyze.figures import Figures, Goal, Interval
from qinfer.cli.analyze.search import TURNS, Beside, Outcome, Search, Wanted, budget_of, gain_of
from qinfer.cli.analyze.space import Candidate, Point, Space

ROUNDS = 3


def most_measurements(spaces: Mapping[str, Space], mode: str) -> int:
    """Returns how many measurements a joint search makes at most."""
    once = sum(budget_of(space, mode) for space in spaces.values())
    return ROUNDS * once + 2 * TURNS if len(spaces) > 1 else once


def joint(
    spaces: Mapping[str, Space], goal: Goal, search: Callable[[Space, Goal], Search]
) -> Generator[Wanted, Figures, dict[str, Outcome]]:
    """Tunes each model, and again after another one has improved, `ROUNDS` times at most; returns their outcomes.

    The gain of several models is that of all winners together.
    """
    present = {name: space.today for name, space in spaces.items()}
    best, outcomes, levels = dict(present), dict[str, Outcome](), list[int]()
    waiting = set(spaces)
    for name in list(spaces) * ROUNDS:
        if name not in waiting:
            continue
        waiting.remove(name)
        space, is_present = spaces[name]._replace(today=best[name]), best[name] == present[name]
        found = yield from _placed(search(space, goal), name, _others(best, name))
        earlier = outcomes[name].measured if name in outcomes else 0
        outcomes[name] = found._replace(measured=earlier + found.measured)
        chosen = found.winner if is_present else found.leader
        levels = [levels[0] if levels else found.today.level, chosen.level]
        if found.winner.candidate != best[name]:
            waiting.update(other for other in spaces if other != name)
        best[name] = chosen.candidate
    if len(spaces) == 1 or all(
        one.winner.candidate == one.today.candidate == present[name] for name, one in outcomes.items()
    ):
        return outcomes
    old, new = yield from _compared(_all_of(present, levels[0]), _all_of(best, levels[1]))
    gain = gain_of(goal.score(new), goal.score(old))
    if gain.low <= 1.0:
        best, levels, new, gain = present, levels[:1] * 2, old, Interval(1.0, 1.0, 1.0)
    for name, one in outcomes.items():
        today, winner = Point(present[name], levels[0]), Point(best[name], levels[1])
        figures = {today: old, **one.figures, winner: new}
        outcomes[name] = one._replace(winner=winner, today=today, gain=gain, figures=figures)
    return outcomes


def _others(candidates: Mapping[str, Candidate], name: str) -> Beside:
    return tuple((other, candidate) for other, candidate in candidates.items() if other != name)


def _all_of(candidates: Mapping[str, Candidate], level: int) -> Wanted:
    """Returns the measurement of the models together, as one of the first of them."""
    name = next(iter(candidates))
    return Wanted(Point(candidates[name], level), model=name, beside=_others(candidates, name))


def _placed(search: Search, name: str, beside: Beside) -> Search:
    """Passes on the measurements that a model's search wants beside the others."""
    try:
        wanted = next(search)
        while True:
            wanted = search.send((yield wanted._replace(model=name, beside=beside)))
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


def _compared(one: Wanted, other: Wanted) -> Generator[Wanted, Figures, tuple[Figures, Figures]]:
    """Measures both by turns; searches have had the turns before."""
    first, second = Figures(()), Figures(())
    for turn in range(TURNS + 1, 2 * TURNS + 1):
        first = first.joined((yield one._replace(turn=turn)))
        second = second.joined((yield other._replace(turn=turn)))
    return first, second
