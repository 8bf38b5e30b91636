"""Steps in the lanes of owners, explored completely: every interleaving of two gateways and two workers."""

from operator import attrgetter

import pytest

from tests.support.exploration import Checks, explore
from tests.support.lane_protocol import FAULTS, Faults, Protocol, Rules, Script, first_state, missing

LONG = [pytest.mark.long, pytest.mark.timeout(1200)]
CHECKS = Checks(FAULTS.__contains__, attrgetter("broken"), missing)

START, STEP, END = (True, False), (False, False), (False, True)


def script(*steps: tuple[int, tuple[bool, bool]], waits: bool = False) -> Script:
    """Returns what a caller sends: the gateway and the kind of each step."""
    return Script(tuple((gateway, *kind) for gateway, kind in steps), waits)


PIPELINED = script((0, START), (0, STEP), (0, STEP), (0, END))
"""Sent by one gateway, without waiting for answers."""
RESTARTED = script((0, START), (0, STEP), (0, STEP), (0, START), (0, END))
BALANCED = script((0, START), (1, STEP), (0, STEP), (1, END), waits=True)
"""Sent by both gateways, each step after the answer to the one before."""
RESTARTED_ELSEWHERE = script((0, START), (1, STEP), (0, START), (1, STEP), (1, END), waits=True)
ENDED_ELSEWHERE = script((0, START), (1, STEP), (0, END), (0, START), (1, STEP), waits=True)
TWO_SENDERS = script((0, START), (1, STEP), (1, STEP), (0, START), (1, STEP))
"""A caller that does not wait has an order between two gateways only as long as no fault happens."""


def committed(sent: Script) -> Script:
    """Returns the same for a model whose states are committed."""
    return sent._replace(is_implicit=True)


NO_FAULT = Faults()
ONE_FAULT = {name: Faults(**{name: 1}) for name in Faults._fields}


@pytest.mark.parametrize("fault", ["", *ONE_FAULT])
@pytest.mark.parametrize("sent", [PIPELINED, BALANCED, RESTARTED_ELSEWHERE, ENDED_ELSEWHERE])
@pytest.mark.parametrize("is_implicit", [False, True])
def test_no_interleaving_breaks_a_promise(sent: Script, fault: str, *, is_implicit: bool) -> None:
    """Each step is in effect once at most, in order, in its own life, and has an answer; nothing is left."""
    sent, faults = (committed(sent) if is_implicit else sent), ONE_FAULT.get(fault, NO_FAULT)
    count, problem, path = explore(first_state(sent, faults), Protocol(sent, Rules()).moves, CHECKS)

    assert (problem, path) == ("", [])
    assert count > 50


@pytest.mark.parametrize(
    ("sent", "faults"),
    [
        (RESTARTED, NO_FAULT),
        (TWO_SENDERS, NO_FAULT),
        (RESTARTED, Faults(idles=1)),
        (RESTARTED, Faults(owners=1)),
        (committed(RESTARTED), NO_FAULT),
        (committed(TWO_SENDERS), NO_FAULT),
        (committed(RESTARTED), Faults(idles=1)),
        (committed(RESTARTED), Faults(commits=1)),
        (committed(PIPELINED), Faults(leaves=1, expiries=1)),
        (committed(ENDED_ELSEWHERE), Faults(kills=1, expiries=1)),
        pytest.param(committed(PIPELINED), Faults(kills=1, leaves=1), marks=LONG),
        pytest.param(committed(PIPELINED), Faults(kills=1, commits=1, expiries=1), marks=LONG),
        pytest.param(committed(RESTARTED), Faults(kills=1), marks=LONG),
        pytest.param(committed(RESTARTED), Faults(leaves=1), marks=LONG),
        pytest.param(committed(RESTARTED), Faults(restarts=1), marks=LONG),
        pytest.param(committed(PIPELINED), Faults(kills=1, stalls=1), marks=LONG),
        pytest.param(committed(RESTARTED_ELSEWHERE), Faults(kills=1, stalls=1, idles=1), marks=LONG),
        pytest.param(RESTARTED, Faults(restarts=1), marks=LONG),
        pytest.param(RESTARTED, Faults(kills=1), marks=LONG),
        pytest.param(RESTARTED, Faults(stalls=1), marks=LONG),
        pytest.param(PIPELINED, Faults(kills=1, stalls=1), marks=LONG),
        pytest.param(RESTARTED_ELSEWHERE, Faults(kills=1, stalls=1, idles=1), marks=LONG),
        pytest.param(ENDED_ELSEWHERE, Faults(*[1] * len(Faults._fields)), marks=LONG),
    ],
)
def test_no_interleaving_of_restarts_breaks_a_promise(sent: Script, faults: Faults) -> None:
    """A START lets earlier steps finish, and later ones belong to its life."""
    count, problem, path = explore(first_state(sent, faults), Protocol(sent, Rules()).moves, CHECKS)

    assert (problem, path) == ("", [])
    assert count > 500


OUT_OF_ORDER = "a step is not executed once, in order, in its own life"
NEEDLESS = "a step gets an error without a fault"
UNANSWERED = "has no answer"

NEEDED: dict[str, tuple[Script, Faults, str]] = {
    "appends_to_open_lanes_only": (PIPELINED, Faults(kills=1), UNANSWERED),
    "closes_lanes_with_their_entries": (PIPELINED, Faults(kills=1), UNANSWERED),
    "answers_closed_lanes": (PIPELINED, Faults(kills=1), ""),
    "keeps_old_steps_from_later_lives": (RESTARTED_ELSEWHERE, Faults(kills=1), OUT_OF_ORDER),
    "never_appends_again": (PIPELINED, Faults(replies=1), OUT_OF_ORDER),
    "appends_in_order": (RESTARTED, Faults(kills=1), OUT_OF_ORDER),
    "asks_the_owner_for_a_restart": (RESTARTED, NO_FAULT, NEEDLESS),
    "makes_way_when_all_is_answered": (RESTARTED, NO_FAULT, NEEDLESS),
    "moves_steps_behind_a_restart": (TWO_SENDERS, NO_FAULT, OUT_OF_ORDER),
    "moves_and_removes_at_once": (TWO_SENDERS, NO_FAULT, OUT_OF_ORDER),
    "idles_only_after_reading": (PIPELINED, Faults(idles=1), "an idle life ends with a waiting step"),
    "drops_a_life_that_is_over": (BALANCED, Faults(idles=1), OUT_OF_ORDER),
    "checks_the_token_of_steps": (RESTARTED, NO_FAULT, NEEDLESS),
    "commits_by_token": (ENDED_ELSEWHERE, Faults(stalls=1), "a former owner ends another life"),
    "keeps_the_response_of_the_end": (PIPELINED, Faults(kills=1), "a committed step gets an error"),
    "finishes_after_publishing": (PIPELINED, Faults(kills=1), UNANSWERED),
    "finishes_what_it_has_read_later": (PIPELINED, Faults(kills=1), UNANSWERED),
    "compares_eras": (PIPELINED, Faults(restarts=1), OUT_OF_ORDER),
    "ends_lives_it_does_not_know": (PIPELINED, Faults(owners=1), UNANSWERED),
    "tells_new_owners_of_successors": (RESTARTED, NO_FAULT, UNANSWERED),
    "knows_what_a_gateway_sent_before": (RESTARTED, Faults(idles=1), OUT_OF_ORDER),
    "reads_on_after_an_outage": (PIPELINED, Faults(reads=1), OUT_OF_ORDER),
    "begins_with_the_committed_state": (committed(PIPELINED), Faults(kills=1), OUT_OF_ORDER),
    "reads_closed_lanes": (committed(PIPELINED), Faults(kills=1), OUT_OF_ORDER),
    "orders_steps_by_owners": (committed(PIPELINED), Faults(kills=1), OUT_OF_ORDER),
    "knows_committed_entries": (committed(PIPELINED), Faults(kills=1), OUT_OF_ORDER),
    "forgets_entries_that_it_removes": (committed(PIPELINED), Faults(stalls=1), OUT_OF_ORDER),
    "leaves_open_lives_to_their_owners": (committed(PIPELINED), Faults(kills=1), OUT_OF_ORDER),
    "publishes_after_commit": (committed(PIPELINED), NO_FAULT, "a step is answered that is not committed"),
    "commits_again_as_it_was": (committed(PIPELINED), Faults(commits=1), "a commit does not follow the one before"),
    "closes_its_lane_to_leave": (committed(PIPELINED), Faults(leaves=1, expiries=1), OUT_OF_ORDER),
    "names_its_lane_anew": (committed(PIPELINED), Faults(leaves=1, expiries=1), OUT_OF_ORDER),
    "leaves_after_a_lost_reply": (committed(PIPELINED), Faults(owners=1), UNANSWERED),
}
"""Rule → where the exploration finds what breaks without it."""


@pytest.mark.parametrize("rule", Rules._fields)
def test_each_rule_is_needed(rule: str) -> None:
    """Without a rule, the exploration finds what breaks."""
    sent, faults, found = NEEDED[rule]
    rules = Rules()._replace(**{rule: False})
    _, problem, _ = explore(first_state(sent, faults), Protocol(sent, rules).moves, CHECKS)

    assert problem
    assert found in problem
