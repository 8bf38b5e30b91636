"""The protocol of tensors beside the queue, explored completely: every interleaving of two gateways and two workers."""

from functools import partial
from graphlib import TopologicalSorter
from operator import attrgetter

import pytest

from tests.support.exploration import Checks, explore
from tests.support.tensor_protocol import FAULTS, Faults, Rules, State, first_state, missing, moves

LONG = [pytest.mark.long, pytest.mark.timeout(1200)]

OTHERS_BYTES = "a model gets bytes that are not its request's"
TORN = "a caller gets bytes that are not its reply's"
ENDLESS = "a request never ends"


CHECKS = Checks(FAULTS.__contains__, attrgetter("broken"), missing)


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
    count, problem, path = explore(first_state(gateways, faults), partial(moves, rules=Rules()), CHECKS)

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

    assert explore(begin, partial(moves, rules=Rules()), CHECKS)[1] == ""
    assert explore(begin, partial(moves, rules=Rules()._replace(**{rule: False})), CHECKS)[1] == expected
