"""The rules of a canary, one by one."""

from typing import Any

import pytest
from msgspec.structs import replace

from qinfer.errors import InvalidRequest
from qinfer.traffic.canary import (
    BY_HAND,
    NO_DATA,
    Action,
    CanaryDecision,
    decide,
    initial_state,
    numbers_of,
    pause_canary,
    promote,
    resume_canary,
    roll_back,
    with_limits,
)
from qinfer.traffic.endpoints import CanaryPlan, Check, Step, checked
from qinfer.traffic.evidence import Counts, EvidenceBlock

STABLE, CANARY, REVISION = 3, 4, 7
PLAN = CanaryPlan(
    steps=(Step(shadow=0.1, least_s=10, least_requests=50), Step(weight=0.5, least_s=60, least_requests=100)),
    checks=(Check(of="errors"), Check(of="execution", quantile=0.5)),
    false_rollbacks=0.02,
    no_data_s=100,
)
GOOD = EvidenceBlock(Counts(100, 1), Counts(50, 0))


class Controller:
    """A canary with its state and a clock."""

    def __init__(self, plan: CanaryPlan = PLAN) -> None:
        self.plan = checked(plan)
        self.now_s = 1000.0
        self.state = initial_state(plan, STABLE, CANARY, REVISION, self.now_s)

    def see(self, after_s: float = 1.0, errors: EvidenceBlock | None = GOOD, **more: Any) -> CanaryDecision:
        """Counts, after some seconds."""
        self.now_s += after_s
        blocks = {} if errors is None else {"errors": {"": errors}}
        decision = decide(self.plan, self.state, self.now_s, {"": more.get("blocks", blocks)})
        self.state = decision.state
        return decision


@pytest.fixture
def controller() -> Controller:
    return Controller()


def test_a_step_lasts_its_least_time(controller: Controller) -> None:
    assert controller.see(5).action == Action.HOLD
    assert controller.see(4.9).action == Action.HOLD
    assert controller.see(0.2).action == Action.PROMOTE


def test_a_step_lasts_its_least_number_of_requests(controller: Controller) -> None:
    decision = controller.see(11, EvidenceBlock(Counts(1000, 0), Counts(49, 0)))

    assert decision.action == Action.HOLD
    assert decision.reason == "step 1 of 2: 11 s of at least 10 s, 49 requests of at least 50"
    assert controller.see(1, EvidenceBlock(Counts(1, 0), Counts(1, 0))).action == Action.PROMOTE


def test_a_promotion_begins_the_next_step(controller: Controller) -> None:
    controller.see(11)

    state = controller.state
    assert (state.step, state.requests, state.since_s) == (1, 0, controller.now_s)
    assert state.revision == REVISION + 1
    assert state.evidence["errors"].seen == GOOD, "the evidence lasts over all steps"


def test_after_the_last_step_the_canary_is_stable(controller: Controller) -> None:
    controller.see(11)
    assert controller.see(61).action == Action.HOLD, "fewer requests than the step's"

    decision = controller.see(1)

    assert decision.action == Action.FINISH
    assert controller.state.stable == CANARY
    assert controller.state.ended == "finish"
    assert controller.see(1).reason == "it has ended: finish"


def test_a_worse_canary_is_rolled_back_with_the_numbers(controller: Controller) -> None:
    decision = controller.see(1, EvidenceBlock(Counts(100, 1), Counts(20, 20)))

    assert decision.action == Action.ROLL_BACK
    assert decision.state.stable == STABLE
    assert decision.reason.startswith("errors: 20 of 20 requests (100.00%) of the canary, 1 of 100 (1.00%) of stable; ")
    assert decision.reason.endswith(", 100 decides"), "two checks share 2 %"
    verdict = numbers_of(PLAN, decision.state)[0]
    assert verdict.has_decided
    assert verdict.seen == EvidenceBlock(Counts(100, 1), Counts(20, 20))


def test_evidence_that_is_close_to_a_decision_holds_back(controller: Controller) -> None:
    decision = controller.see(11, EvidenceBlock(Counts(200, 0), Counts(50, 3)))

    assert not numbers_of(PLAN, decision.state)[0].has_decided
    assert decision.action == Action.HOLD
    assert decision.reason.startswith("close: errors: 3 of 50 requests")


@pytest.mark.parametrize(
    ("silent", "block"),
    [("the canary", EvidenceBlock(Counts(10, 0), Counts())), ("stable", EvidenceBlock(Counts(), Counts(10, 0)))],
)
def test_a_canary_without_data_pauses_until_there_are_some(silent: str, block: EvidenceBlock) -> None:
    controller = Controller(replace(PLAN, steps=(Step(weight=0.5, least_s=10, least_requests=130),)))
    controller.see(1)
    assert controller.see(99, block).action == Action.HOLD

    decision = controller.see(1, block)

    assert decision.action == Action.PAUSE
    assert decision.reason == f"no data: {silent} has had no requests for 100 s"
    assert controller.state.paused == NO_DATA
    assert controller.see(50, block).reason == "paused: no data"
    assert controller.see(1).action == Action.RESUME
    assert controller.see(1).action == Action.FINISH


def test_a_canary_paused_by_hand_goes_on_by_hand(controller: Controller) -> None:
    controller.state = pause_canary(controller.state, BY_HAND, "the team sleeps").state

    assert controller.see(11).reason == "paused: by hand"
    assert controller.see(500).action == Action.HOLD

    controller.state = resume_canary(controller.state, "by hand").state
    assert controller.see(1).action == Action.PROMOTE


def test_a_paused_canary_is_rolled_back_all_the_same(controller: Controller) -> None:
    controller.state = pause_canary(controller.state, BY_HAND, "").state

    assert controller.see(1, EvidenceBlock(Counts(100, 0), Counts(20, 20))).action == Action.ROLL_BACK


def test_promotion_and_roll_back_by_hand(controller: Controller) -> None:
    promoted = promote(PLAN, controller.state, 1001.0, "by hand")
    state = promoted.state
    ended = roll_back(state, "by hand").state

    assert promoted.action == Action.PROMOTE
    assert (state.step, state.revision) == (1, REVISION + 1)
    assert ended.stable == STABLE
    assert (ended.ended, ended.revision) == ("roll back", REVISION + 2)


def test_limits_are_stables_at_the_steps_beginning(controller: Controller) -> None:
    slow = {"execution": {"1": {"": [float(n) for n in range(101)]}, "8": {"": [1.0] * 99}}}
    controller.state = with_limits(PLAN, controller.state, slow, controller.now_s)
    assert controller.state.limits == {"execution p50": {"1": 50.0}}, "99 are too few"

    later = {"execution": {"1": {"": [7.0] * 200}, "8": {"": [8.0] * 200}}}
    controller.state = with_limits(PLAN, controller.state, later, controller.now_s)
    assert controller.state.limits == {"execution p50": {"1": 50.0, "8": 8.0}}, "the first one stays"

    controller.see(11)
    assert controller.state.limits == {}
    limits = with_limits(PLAN, controller.state, later, controller.now_s).limits
    assert limits == {"execution p50": {"1": 7.0, "8": 8.0}}


def test_what_waits_for_the_other_target_ends_with_the_step(controller: Controller) -> None:
    """Its requests were counted by the limits of the step before."""
    blocks = {"errors": {"": GOOD}, "execution p50": {"8": EvidenceBlock(Counts(9, 5), Counts())}}

    controller.see(11, blocks=blocks)

    evidence = controller.state.evidence["execution p50"]
    assert evidence.waiting == {}
    assert evidence.seen == EvidenceBlock(Counts(9, 5), Counts())


def test_a_tolerated_difference_is_none() -> None:
    worse = EvidenceBlock(Counts(5000, 500), Counts(5000, 650))
    strict = Controller(replace(PLAN, checks=(Check(of="errors"),)))
    lenient = Controller(replace(PLAN, checks=(Check(of="errors", tolerated=1.5),)))

    assert strict.see(1, worse).action == Action.ROLL_BACK
    assert numbers_of(lenient.plan, lenient.see(1, worse).state)[0].evidence < 1


def test_disagreements_are_compared_with_the_allowed_share() -> None:
    checks = (Check(of="errors"), Check(of="disagreements", allowed=0.05))
    controller = Controller(replace(PLAN, checks=checks))

    few = controller.see(1, blocks={"disagreements": {"": EvidenceBlock(Counts(), Counts(200, 8))}})
    many = controller.see(1, blocks={"disagreements": {"": EvidenceBlock(Counts(), Counts(200, 50))}})

    assert few.action == Action.HOLD
    assert many.action == Action.ROLL_BACK
    assert "disagreements: 58 of 400 requests (14.50%) of the canary, 5.00% allowed" in many.reason


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"steps": ()}, "no steps"),
        ({"steps": (Step(weight=1.0),)}, "step 1 has weight 1 and shadow 0"),
        ({"steps": (Step(),)}, "step 1 has weight 0 and shadow 0"),
        ({"steps": (Step(weight=0.1, least_requests=0),)}, "step 1 lasts 60 s and 0 requests"),
        ({"checks": (Check(of="latency", quantile=0.5),)}, "errors among them"),
        ({"checks": (Check(of="errors"), Check(of="errors"))}, "name each once"),
        ({"checks": (Check(of="errors"), Check(of="latency"))}, "make it one between 0 and 1"),
        ({"checks": (Check(of="errors", quantile=0.5),)}, "leave it out"),
        ({"checks": (Check(of="errors", tolerated=0.5),)}, "an odds ratio from 1 to 100"),
        ({"checks": (Check(of="errors"), Check(of="disagreements"))}, "allows no share"),
        ({"checks": (Check(of="errors"), Check(of="latency", quantile=0.5, allowed=0.5))}, "the quantile says it"),
        ({"checks": (Check(of="errors", allowed=1.0),)}, "a share from 0 to less than 1"),
        ({"false_rollbacks": 0.0}, "false_rollbacks is 0"),
        ({"most_errors": 0.0}, "most_errors is 0"),
    ],
)
def test_a_plan_that_cannot_be_carried_out(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        checked(replace(PLAN, **change))
