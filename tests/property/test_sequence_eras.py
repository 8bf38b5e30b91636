"""Lives of a sequence over restarts of Redis, explored completely."""

import pytest

from tests.support.sequence_eras import Rules, State, first_state, lost_for_nothing, moves, unsound


def explore(rules: Rules, lives: int, restarts: int) -> tuple[int, str]:
    """Goes through all states; returns how many there are, and the first promise that is broken, with its moves."""
    begin = first_state(restarts)
    came_by: dict[State, list[str]] = {begin: []}
    frontier = [begin]
    while frontier:
        state = frontier.pop()
        for name, after in moves(state, lives, rules):
            if after in came_by:
                continue
            came_by[after] = [*came_by[state], name]
            frontier.append(after)
            if problem := after.broken or unsound(after, rules) or lost_for_nothing(after, rules):
                return len(came_by), f"{problem}: {came_by[after]}"
    return len(came_by), ""


@pytest.mark.parametrize(("lives", "restarts"), [(3, 0), (2, 2), (3, 2)])
def test_no_restart_makes_a_life_whole_that_is_not(lives: int, restarts: int) -> None:
    """No life ends as lost where nothing was restarted, either."""
    count, problem = explore(Rules(), lives, restarts)

    assert problem == ""
    assert count > 50


@pytest.mark.parametrize("rule", Rules._fields)
def test_each_rule_is_needed(rule: str) -> None:
    _, problem = explore(Rules()._replace(**{rule: False}), 3, 2)

    assert problem
