"""The protocol of tensors beside the queue, explored completely: every interleaving of two gateways and two workers."""

from graphlib import TopologicalSorter

import pytest

from tests.support.tensor_protocol import FAULTS, Faults, Rules, State, first_state, missing, moves

LONG = [pytest.mark.long, pytest.mark.timeout(1200)]

OTHERS_BYTES = "a model gets bytes that are not its request's"
TORN = "a caller gets bytes that are not its reply's"
ENDLESS = "a request never ends"


def explore(rules: Rules, begin: State) -> tuple[int, str, list[str]]:
    """Goes through all states.

    Returns:
        How many there are, the first promise that is broken (empty = none), and the moves that lead there.
    """
    came_by: dict[State, tuple[State, str] | None] = {begin: None}
    frontier = [begin]
    while frontier:
        reached: list[State] = []
        for state in frontier:
            is_end = True
            for move, after in moves(state, rules):
                is_end = is_end and move in FAULTS
                if after in came_by:
                    continue
                came_by[after] = (state, move)
                reached.append(after)
                if after.broken:
                    return len(came_by), after.broken, _path(came_by, after)
            if is_end and (problem := missing(state)):
                return len(came_by), problem, _path(came_by, state)
        frontier = reached
    return len(came_by), "", []


def _path(came_by: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    path: list[str] = []
    while (before := came_by[state]) is not None:
        state, move = before
        path.append(move)
    return path[::-1]


@pytest.mark.parametrize(
    ("gateways", "faults"),
    [
        ((0, 0), Faults(worker_stalls=1, losses=1)),
        ((0, 0), Faults(worker_stalls=1, leaves=1)),
        ((0, 0), Faults(gateway_kills=1, worker_stalls=1)),
        ((0, 0), Faults(gateway_stalls=1, worker_stalls=1)),
        ((0, 0), Faults(worker_kills=1, losses=1)),
        ((0, 1), Faults(gateway_kills=1, worker_stalls=1)),
        pytest.param((0, 0), Faults(worker_kills=1, worker_stalls=1), marks=LONG),
        pytest.param((0, 1), Faults(worker_kills=1, losses=1), marks=LONG),
        pytest.param((0,), Faults(1, 1, 1, 1, 1, 1), marks=LONG),
    ],
)
def test_no_interleaving_breaks_a_promise(gateways: tuple[int, ...], faults: Faults) -> None:
    """Each request ends with its own bytes or an error, once; no entry and no memory is left."""
    count, problem, path = explore(Rules(), first_state(gateways, faults))

    assert (problem, path) == ("", [])
    assert count > 5000


@pytest.mark.parametrize("faults", [Faults(worker_kills=1), Faults(losses=2)])
def test_nothing_goes_on_for_ever(faults: Faults) -> None:
    """No moves lead back to an earlier state, so each request ends after finitely many."""
    left, following = [first_state((0, 0), faults)], dict[State, list[State]]()
    while left:
        state = left.pop()
        if state not in following:
            following[state] = [after for _, after in moves(state, Rules())]
            left += following[state]

    TopologicalSorter(following).prepare()  # raises for a cycle
    assert len(following) > 500


NEEDED: dict[str, tuple[tuple[int, ...], Faults, str]] = {
    "checks_the_generation_after_copying": ((0, 0), Faults(worker_stalls=1), OTHERS_BYTES),
    "raises_the_generation_first": ((0, 0), Faults(worker_stalls=1), OTHERS_BYTES),
    "references_name_the_epoch": ((0, 0), Faults(gateway_kills=1), OTHERS_BYTES),
    "writes_replies_into_its_own_memory": ((0, 0), Faults(worker_stalls=1), OTHERS_BYTES),
    "reuses_after_the_confirmation": ((0, 1), Faults(), TORN),
    "finishes_after_the_confirmation": ((0,), Faults(worker_kills=1, losses=1), ENDLESS),
    "confirmations_name_the_generation": ((0, 0), Faults(losses=2), ENDLESS),
    "ignores_repeats_of_what_it_sends": ((0, 1), Faults(losses=1), TORN),
    "publishes_again": ((0,), Faults(losses=1), ENDLESS),
    "frees_what_a_dead_gateway_leaves": ((0, 0), Faults(gateway_kills=1), "an entry is left"),
    "drops_only_after_the_lease": ((0,), Faults(), ENDLESS),
    "ends_requests_with_the_lease": ((0,), Faults(gateway_stalls=1), ENDLESS),
    "keeps_tensors_until_the_end": ((0, 0), Faults(worker_kills=1), ENDLESS),
    "answers_once": ((0,), Faults(losses=1), "a caller gets two answers"),
    "counts_what_is_appended_again": ((0,), Faults(worker_kills=1), "a delivery was not counted"),
}


@pytest.mark.parametrize("rule", Rules._fields)
def test_each_rule_is_needed(rule: str) -> None:
    """The exploration finds what breaks without it."""
    gateways, faults, expected = NEEDED[rule]
    begin = first_state(gateways, faults)

    assert explore(Rules(), begin)[1] == ""
    assert explore(Rules()._replace(**{rule: False}), begin)[1] == expected
