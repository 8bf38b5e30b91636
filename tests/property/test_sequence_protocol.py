"""The protocol of sequences, explored completely: every interleaving of two workers, two sequences and three steps."""

import pytest

from tests.support.sequence_protocol import Move, Rules, State, first_state, missing, moves

LONG = [pytest.mark.long, pytest.mark.timeout(1200)]


def explore(rules: Rules, begin: State, steps: int) -> tuple[int, str]:
    """Goes through all states.

    Returns:
        How many there are, and the first promise that is broken, with the moves that lead to it; empty = none.
    """
    came_by: dict[State, tuple[State, Move] | None] = {begin: None}
    frontier = [begin]
    while frontier:
        reached: list[State] = []
        for state in frontier:
            is_end = True
            for move, after in moves(state, steps, rules):
                is_end = is_end and move.name in {"die", "stall"}
                if after in came_by:
                    continue
                came_by[after] = (state, move)
                reached.append(after)
                if problem := "".join(each.broken for each in after.sequences):
                    return len(came_by), f"{problem}: {_path(came_by, after)}"
            if is_end and (problem := "".join(missing(each, steps) for each in state.sequences)):
                return len(came_by), f"{problem}: {_path(came_by, state)}"
        frontier = reached
    return len(came_by), ""


def _path(came_by: dict[State, tuple[State, Move] | None], state: State) -> list[Move]:
    path: list[Move] = []
    while (before := came_by[state]) is not None:
        state, move = before
        path.append(move)
    return path[::-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sequences", "steps", "deaths", "stalls"),
    [
        (1, 3, 1, 1),
        (1, 3, 2, 0),
        (2, 2, 1, 0),
        pytest.param(2, 3, 1, 0, marks=LONG),
        pytest.param(2, 2, 0, 1, marks=LONG),
    ],
)
def test_no_interleaving_breaks_a_promise(sequences: int, steps: int, deaths: int, stalls: int) -> None:
    """Each step in effect once and in order, one response each, no former owner commits, nothing is lost."""
    count, problem = explore(Rules(), first_state(sequences, deaths, stalls), steps)

    assert problem == ""
    assert count > 1000


@pytest.mark.parametrize("rule", Rules._fields)
def test_each_rule_is_needed(rule: str) -> None:
    """The exploration finds what breaks without it."""
    _, problem = explore(Rules()._replace(**{rule: False}), first_state(1, 1, 1), 3)

    assert problem
