"""The protocol of sequences, explored completely: every interleaving of two workers, two sequences and three steps."""

from functools import partial

import pytest

from tests.support.exploration import Checks, explore
from tests.support.sequence_protocol import Rules, first_state, missing, moves

LONG = [pytest.mark.long, pytest.mark.timeout(1200)]


def checks(steps: int) -> Checks:
    """Returns the promises to callers that submit so many steps."""
    return Checks(
        lambda move: move.name in {"die", "stall"},
        lambda state: "".join(each.broken for each in state.sequences),
        lambda state: "".join(missing(each, steps) for each in state.sequences),
    )


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
    following = partial(moves, steps=steps, rules=Rules())
    count, problem, path = explore(first_state(sequences, deaths, stalls), following, checks(steps))

    assert (problem, path) == ("", [])
    assert count > 1000


@pytest.mark.parametrize("rule", Rules._fields)
def test_each_rule_is_needed(rule: str) -> None:
    """The exploration finds what breaks without it."""
    following = partial(moves, steps=3, rules=Rules()._replace(**{rule: False}))
    _, problem, _ = explore(first_state(1, 1, 1), following, checks(3))

    assert problem
