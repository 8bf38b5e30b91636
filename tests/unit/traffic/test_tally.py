"""What the metrics say of the trials of canaries."""

from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from qinfer.observe import catalogue
from qinfer.traffic.canary import BY_HAND, NO_DATA, Trial, initial_state
from qinfer.traffic.endpoints import CanaryPlan, Endpoint, Role, Step, Target
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.store import DeclaredEndpoints
from qinfer.traffic.tally import TargetTally

PLAN = CanaryPlan(steps=(Step(shadow=1.0), Step(weight=0.1)))
STATE = initial_state(PLAN, 1, 2, 7, 0.0)


def shown(trial: Trial, plan: CanaryPlan | None = PLAN, revision: int = 7) -> dict[str, float]:
    """Returns the metrics of a trial of an endpoint: name and reason → value."""
    stable = Target(model="m", version=1, role=Role.STABLE)
    endpoints = Endpoints(Mock())
    endpoints.show(
        DeclaredEndpoints({"e": Endpoint(name="e", targets=(stable,), canary=plan, revision=revision)}, revision)
    )
    endpoints.trials = {"e": trial}
    wanted = (catalogue.CANARY_STEP, catalogue.CANARY_PAUSED, catalogue.CANARY_ROLLED_BACK)
    return {
        f"{family.info.name.removeprefix('qinfer_endpoint_canary_')} {dict(sample.labels).get('reason', '')}".strip(): (
            sample.value
        )
        for family in TargetTally(endpoints).families()
        if family.info in wanted
        for sample in family.samples
    }


def values(step: int = 0, no_data: int = 0, by_hand: int = 0, rolled_back: int = 0) -> dict[str, float]:
    return {"step": step, "paused no_data": no_data, "paused by_hand": by_hand, "rolled_back": rolled_back}


def test_a_trial_is_in_its_step() -> None:
    assert shown(Trial(state=replace(STATE, step=1))) == values(step=2)


@pytest.mark.parametrize(("why", "reason"), [(BY_HAND, "by_hand"), (NO_DATA, "no_data")])
def test_a_pause_has_its_reason(why: str, reason: str) -> None:
    assert shown(Trial(state=replace(STATE, paused=why))) == values(step=1, **{reason: 1})


def test_what_was_rolled_back_is_in_no_step_and_not_paused() -> None:
    assert shown(Trial(state=replace(STATE, paused=NO_DATA, ended="roll back"))) == values(rolled_back=1)


def test_a_trial_of_a_declaration_that_was_replaced_is_over() -> None:
    """It begins anew, or never: where the version is not ready any more, nobody is to be told that it is paused."""
    assert shown(Trial(state=replace(STATE, paused=BY_HAND)), revision=8) == values()


def test_an_endpoint_that_plans_no_canaries_any_more_has_none() -> None:
    assert shown(Trial(state=replace(STATE, ended="roll back")), plan=None) == {}
