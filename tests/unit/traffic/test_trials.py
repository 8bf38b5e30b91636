"""Trials of canaries: when they begin, what becomes of the endpoint, and what people may do."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from qinfer.errors import Conflict, InvalidRequest
from qinfer.traffic.canary import Action, Trial, TrialChange, advanced, begun, by_hand, confirmed, count_names, parts_of
from qinfer.traffic.endpoints import Endpoint, Role, read_endpoint
from qinfer.traffic.evidence import Counts, EvidenceBlock
from qinfer.traffic.routing import ChoiceInput, TargetSplit
from qinfer.wire.versions import decode_document, encode_document

STABLE = {"model": "m", "version": 3, "role": "stable"}
STEPS = [{"shadow": 0.2, "least_s": 0, "least_requests": 10}, {"weight": 0.5, "least_s": 0, "least_requests": 10}]
PLAN = {"steps": STEPS, "checks": [{"of": "errors"}]}
NOW_S = 1000.0


def declared(version: Any = 4, plan: dict[str, Any] = PLAN, **fields: Any) -> Endpoint:
    targets = [STABLE, {"model": "m", "version": version, **fields}]
    return replace(read_endpoint({"name": "e", "targets": targets, "canary": plan}), revision=7)


def stored(endpoint: Endpoint, change: TrialChange | None) -> tuple[Endpoint, Trial]:
    """Returns what is read after a change was stored: its endpoint and trial have the next revision."""
    assert change is not None
    revision = endpoint.revision + (change.endpoint is not None)
    after = replace(change.endpoint or endpoint, revision=revision)
    return after, replace(change.trial, state=replace(change.trial.state, revision=revision))


def on_trial(endpoint: Endpoint, *ready: int) -> tuple[Endpoint, Trial]:
    return stored(endpoint, begun(endpoint, None, ready or (3, 4), NOW_S))


def counts(stable: int, tried: int, tried_bad: int = 0) -> dict[str, int]:
    of_stable, of_tried = count_names(Role.STABLE, "errors", ""), count_names(Role.CANARY, "errors", "")
    return {of_stable[0]: stable, of_tried[0]: tried, of_tried[1]: tried_bad}


def shares(endpoint: Endpoint) -> list[tuple[str, int, float]]:
    return [(target.role.value, target.number, endpoint.weight_of(target)) for target in endpoint.targets]


def test_counts_have_the_tenants_whose_requests_they_are() -> None:
    """Those without one are of a server without keys, or of a gateway that knows no tenants yet."""
    of_acme, of_nobody = count_names(Role.CANARY, "errors", "", "acme"), count_names(Role.STABLE, "errors", "")

    assert parts_of({of_acme[0]: 3, of_acme[1]: 2, of_nobody[0]: 5}) == {
        "acme": {"errors": {"": EvidenceBlock(Counts(), Counts(3, 2))}},
        "": {"errors": {"": EvidenceBlock(Counts(5, 0), Counts())}},
    }


@pytest.mark.parametrize(
    ("version", "ready", "tried"),
    [(4, (3, 4), 4), (4, (3,), None), (2, (2, 3), 2), ("latest", (3, 4, 5), 5), ("latest", (2, 3), None)],
)
def test_a_trial_begins_with_a_ready_version(version: Any, ready: tuple[int, ...], tried: int | None) -> None:
    """Of a number, or for `latest` the newest, if that is newer than the stable one."""
    change = begun(declared(version), None, ready, NOW_S)

    assert (None if change is None else change.trial.state.canary) == tried


def test_before_its_trial_a_canary_gets_nothing() -> None:
    """Whoever meets its conditions."""
    endpoint = declared(when=[{"tenant": "t"}])

    assert shares(endpoint) == [("stable", 3, 1), ("canary", 4, 0)]
    assert TargetSplit(endpoint, lambda: 0.99).choose(ChoiceInput("t")).role is Role.STABLE
    running, _ = on_trial(endpoint)
    assert TargetSplit(running, lambda: 0.5).choose(ChoiceInput("t")).role is Role.CANARY


def test_steps_are_written_into_the_endpoint() -> None:
    """A shadow first, then a weight; in the end the version is stable, and `latest` waits for the next one."""
    endpoint, trial = on_trial(declared("latest"))
    assert shares(endpoint) == [("stable", 3, 1), ("canary", 4, 0), ("shadow", 4, 0.2)]
    assert decode_document(encode_document(endpoint), Endpoint) == endpoint

    endpoint, trial = stored(endpoint, advanced(endpoint, trial, counts(50, 10), {}, NOW_S))
    assert shares(endpoint) == [("stable", 3, 0.5), ("canary", 4, 0.5)]

    endpoint, trial = stored(endpoint, advanced(endpoint, trial, counts(50, 10), {}, NOW_S))
    assert shares(endpoint) == [("stable", 4, 1), ("canary", 0, 0)]
    assert endpoint.targets[1].version == "latest"
    assert begun(endpoint, trial, (3, 4), NOW_S) is None
    assert begun(endpoint, trial, (3, 4, 5), NOW_S) is not None


def test_a_canary_by_number_becomes_the_stable_target() -> None:
    endpoint, trial = on_trial(declared(plan=PLAN | {"steps": STEPS[1:]}))

    change = advanced(endpoint, trial, counts(50, 10), {}, NOW_S)

    assert change.endpoint is not None
    assert shares(change.endpoint) == [("stable", 4, 1)]
    assert change.event is not None
    assert change.event.event == "finish"


def test_another_model_of_the_same_version_is_tried_too() -> None:
    """Such as one with another configuration: a shadow first, then a share, and in the end the stable target."""
    endpoint = declared(version=3, model="quick")
    assert begun(endpoint, None, (), NOW_S) is None
    endpoint, trial = on_trial(endpoint, 3)
    assert [target.label for target in endpoint.targets] == ["m:3", "quick:3", "quick:3"]
    assert trial.reason == "quick:3 is ready"

    endpoint, trial = stored(endpoint, advanced(endpoint, trial, counts(50, 10), {}, NOW_S))
    change = advanced(endpoint, trial, counts(50, 10), {}, NOW_S)

    assert change.endpoint is not None
    assert [(target.label, target.role) for target in change.endpoint.targets] == [("quick:3", Role.STABLE)]
    assert change.event is not None
    assert (change.event.event, change.event.model, change.event.version) == ("finish", "quick", 3)


def test_what_stays_out_is_the_model_that_was_rolled_back() -> None:
    """And not the same version of another."""
    endpoint, trial = on_trial(declared(version=4, model="quick"))
    endpoint, trial = stored(endpoint, advanced(endpoint, trial, counts(50, 50, 50), {}, NOW_S))
    assert (trial.is_rolled_back, trial.model) == (True, "quick")

    assert begun(declared(version=4, model="quick"), trial, (4,), NOW_S) is None
    assert begun(declared(version=4), trial, (4,), NOW_S) is not None
    assert begun(declared(version=4, model="quicker"), trial, (4,), NOW_S) is not None
    again = by_hand(endpoint, trial, Action.RESUME, "by hand", (4,), NOW_S)
    assert (again.trial.is_on, again.trial.model) == (True, "quick")


def test_a_newer_version_waits_for_the_end_of_a_trial() -> None:
    """`latest` stays the version on trial; one that was rolled back stays out, and a newer one begins."""
    endpoint, trial = on_trial(declared("latest"))

    endpoint, trial = stored(endpoint, advanced(endpoint, trial, counts(50, 50, 50), {}, NOW_S))

    assert trial.is_rolled_back
    assert shares(endpoint) == [("stable", 3, 1), ("canary", 0, 0)]
    assert begun(endpoint, trial, (3, 4), NOW_S) is None
    change = begun(endpoint, trial, (3, 4, 5), NOW_S)
    assert change is not None
    assert change.trial.state.canary == 5


def test_nothing_is_counted_twice() -> None:
    """Gateways add to counts; a decision sees what was added, and all of it where Redis has lost them."""
    endpoint, trial = on_trial(declared())
    for counted, requests in ((counts(9, 3), 3), (counts(9, 3), 3), (counts(20, 5), 5), (counts(2, 1), 6)):
        endpoint, trial = stored(endpoint, advanced(endpoint, trial, counted, {}, NOW_S))

        assert trial.state.requests == requests
        assert endpoint.revision == 8


def test_people_decide_too() -> None:
    endpoint, trial = on_trial(declared())

    paused = by_hand(endpoint, trial, Action.PAUSE, "by hand", (), NOW_S)
    assert paused.trial.state.paused == "by hand"
    with pytest.raises(Conflict, match="not paused already"):
        by_hand(endpoint, trial, Action.RESUME, "by hand", (), NOW_S)
    endpoint, trial = stored(endpoint, by_hand(endpoint, trial, Action.ROLL_BACK, "by hand", (), NOW_S))
    with pytest.raises(Conflict, match="version 4 was rolled back; resume tries it again"):
        by_hand(endpoint, trial, Action.PROMOTE, "by hand", (3, 4), NOW_S)
    again = by_hand(endpoint, trial, Action.RESUME, "by hand", (3, 4), NOW_S)
    assert (again.trial.is_on, again.trial.state.step) == (True, 0)
    with pytest.raises(Conflict, match="has no plan"):
        by_hand(replace(endpoint, canary=None), trial, Action.PROMOTE, "", (), NOW_S)


def test_people_are_told_why_there_is_nothing_to_decide() -> None:
    endpoint, trial = on_trial(declared())

    def refused(trial: Trial | None) -> str:
        with pytest.raises(Conflict, match="endpoint 'e' has no canary on trial: ") as raised:
            by_hand(endpoint, trial, Action.PAUSE, "by hand", (3, 4), NOW_S)
        return str(raised.value)

    assert "the first trial begins when a version of the canary target is ready" in refused(None)
    assert "version 4 was promoted" in refused(replace(trial, state=replace(trial.state, ended="finish")))
    assert "the endpoint was put again" in refused(replace(trial, state=replace(trial.state, revision=1)))


def test_a_rollback_is_done_when_every_gateway_has_confirmed_it() -> None:
    endpoint, trial = on_trial(declared())
    assert confirmed(endpoint, trial, (), NOW_S) is None
    endpoint, trial = stored(endpoint, by_hand(endpoint, trial, Action.ROLL_BACK, "by hand", (), NOW_S))

    assert confirmed(endpoint, trial, (trial.state.revision, trial.state.revision - 1), NOW_S) is None
    change = confirmed(endpoint, trial, (trial.state.revision, trial.state.revision + 1), NOW_S + 2)

    assert change is not None
    assert (change.endpoint, change.trial.done_s) == (None, NOW_S + 2)
    assert confirmed(endpoint, change.trial, (), NOW_S) is None


def test_a_declaration_that_was_read_can_be_put_back() -> None:
    """What a trial has written into it is not a person's: the trial begins anew."""
    running, _ = on_trial(declared("latest", when=[{"tenant": "t"}]))

    again = read_endpoint(msgspec.to_builtins(running))

    assert shares(again) == [("stable", 3, 1), ("canary", 0, 0)]
    assert again.canary == running.canary


@pytest.mark.parametrize(
    ("targets", "plan", "text"),
    [
        ([{"model": "m", "version": 4}, {"model": "m", "version": 5}], PLAN, "the plan is for one canary, not 2"),
        ([{"model": "n", "version": "latest"}], PLAN, "a plan follows the latest version of 'm' only; write a number"),
        ([{"model": "m", "version": 4, "weight": 0.1}], PLAN, "'m:4': the steps of the plan set its weight; leave"),
        ([], {"steps": []}, "a canary has no steps"),
        ([], {"steps": [{"weight": 2}]}, "step 1 has weight 2"),
        ([], {"steps": [{"wieght": 0.1}]}, "a step of an endpoint has no 'wieght'"),
        ([], PLAN | {"alpha": 1}, "the canary's plan of an endpoint has no 'alpha'"),
        ([], PLAN | {"checks": [{"of": "errors", "quantil": 1}]}, "a check of an endpoint has no 'quantil'"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said(targets: list[Any], plan: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read_endpoint({"name": "e", "targets": [STABLE, *targets], "canary": plan})
