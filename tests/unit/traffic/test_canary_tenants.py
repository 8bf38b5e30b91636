"""The rules for canaries of several tenants: none of them decides alone."""

from typing import Any

import pytest
from msgspec.structs import replace

from qinfer.traffic.canary import Action, CanaryDecision, decide, initial_state, numbers_of, with_limits
from qinfer.traffic.endpoints import CanaryPlan, Check, Step, checked
from qinfer.traffic.evidence import (
    ALONE_S,
    LEAST_OF_OTHERS,
    MOST_TENANTS,
    Blocks,
    Counts,
    EvidenceBlock,
)

PLAN = checked(
    CanaryPlan(
        steps=(Step(weight=0.5, least_s=10, least_requests=100),) * 2,
        checks=(Check(of="errors"), Check(of="disagreements", allowed=0.01)),
        no_data_s=100,
    )
)
GOOD, BAD, QUIET = (
    EvidenceBlock(Counts(60, 0), Counts(60, 0)),
    EvidenceBlock(Counts(60, 0), Counts(60, 60)),
    EvidenceBlock(),
)


class Controller:
    """A canary with its state and a clock."""

    def __init__(self, plan: CanaryPlan = PLAN) -> None:
        self.plan, self.now_s = plan, 1000.0
        self.state = initial_state(plan, 3, 4, 7, self.now_s)

    def see(self, after_s: float = 1.0, of: str = "errors", **tenants: EvidenceBlock) -> CanaryDecision:
        """Counts requests of tenants, after some seconds."""
        self.now_s += after_s
        parts: dict[str, Blocks] = {name: {of: {"": block}} for name, block in tenants.items()}
        decision = decide(self.plan, self.state, self.now_s, parts)
        self.state = decision.state
        return decision


@pytest.fixture
def controller() -> Controller:
    return Controller()


def test_one_tenant_does_not_roll_back_what_is_good_for_the_others(controller: Controller) -> None:
    """However much it sends, and whenever it begins."""
    assert controller.see(acme=GOOD, evil=BAD).action is Action.HOLD
    for _ in range(50):
        decision = controller.see(acme=GOOD, evil=EvidenceBlock(Counts(5000, 0), Counts(5000, 5000)))

    assert decision.action is Action.HOLD
    assert numbers_of(controller.plan, decision.state)[0].has_decided
    assert decision.reason.startswith("one tenant alone is no reason to roll back; decide by hand: errors: ")


def test_what_is_bad_for_several_tenants_is_rolled_back(controller: Controller) -> None:
    assert controller.see(acme=BAD, other=BAD).action is Action.ROLL_BACK


def test_a_small_tenants_evidence_adds_to_that_of_a_large_one(controller: Controller) -> None:
    """It needs three quarters of the way, no more."""
    controller.see(large=BAD, small=EvidenceBlock(Counts(1, 0), Counts(0, 0)))

    decision = controller.see(large=BAD, small=EvidenceBlock(Counts(12, 0), Counts(12, 8)))

    assert decision.action is Action.ROLL_BACK
    assert controller.state.without["large"]["errors"].value < PLAN.decides


def test_a_tenant_alone_decides_alone(controller: Controller) -> None:
    assert controller.see(evil=BAD).action is Action.ROLL_BACK


def test_the_others_have_some_time_to_be_heard(controller: Controller) -> None:
    """A version that is bad for the only tenant that uses it much is not kept because another has looked in."""
    looked_in = EvidenceBlock(Counts(2, 0), Counts(LEAST_OF_OTHERS - 1, 0))
    controller.see(acme=BAD, other=looked_in)

    assert controller.see(ALONE_S - 2, acme=GOOD).action is Action.HOLD
    assert controller.see(1.5, acme=GOOD).action is Action.ROLL_BACK


def test_who_was_heard_is_there_until_there_are_no_data(controller: Controller) -> None:
    controller.see(acme=BAD, other=EvidenceBlock(Counts(9, 0), Counts(LEAST_OF_OTHERS, 0)))

    assert controller.see(PLAN.no_data_s - 1, acme=BAD).action is Action.HOLD
    assert controller.see(1, acme=BAD).action is Action.ROLL_BACK


def test_one_tenants_requests_are_half_of_a_steps_until_the_others_have_sent_some(controller: Controller) -> None:
    flood, few = EvidenceBlock(Counts(5000, 0), Counts(5000, 0)), EvidenceBlock(Counts(4, 0), Counts(4, 0))

    decision = controller.see(11, acme=few, evil=flood)

    assert decision.action is Action.HOLD
    assert decision.reason == (
        "step 1 of 2: 11 s of at least 10 s, 54 requests of at least 100, of one tenant 50 at most"
    )
    assert controller.see(acme=few, evil=flood).action is Action.PROMOTE
    assert controller.state.tenants.keys() == {"acme", "evil"}
    assert controller.see(11, evil=flood).action is Action.HOLD, "it is so in each step"
    assert controller.see(ALONE_S, evil=flood).action is Action.FINISH, "nobody else is there"


def test_one_tenant_does_not_hide_what_the_others_show(controller: Controller) -> None:
    """Here by requests to stable that fail, as long as it may: the canary is not promoted."""
    hides = EvidenceBlock(Counts(3000, 3000), Counts(3000, 0))
    for after_s in (11, 1):
        decision = controller.see(after_s, acme=BAD, evil=hides)

    assert not numbers_of(controller.plan, decision.state)[0].is_close
    assert decision.action is Action.HOLD
    assert decision.reason.startswith("the requests of the other tenants alone would decide; decide by hand: ")


def test_disagreements_of_one_tenant_do_not_roll_back_either(controller: Controller) -> None:
    differs, agrees = EvidenceBlock(Counts(), Counts(200, 100)), EvidenceBlock(Counts(), Counts(200, 0))
    controller.see(acme=GOOD, evil=GOOD)

    assert controller.see(of="disagreements", acme=agrees, evil=differs).action is Action.HOLD
    assert controller.see(of="disagreements", acme=differs, evil=differs).action is Action.ROLL_BACK


def test_many_tenants_are_told_apart_up_to_a_number(controller: Controller) -> None:
    """All that come later are one: a record has an end, and what is counted as one decides nothing alone."""
    first: dict[str, Any] = {f"t{number}": GOOD for number in range(MOST_TENANTS)}
    controller.see(**first)

    decision = controller.see(**first, evil=BAD, evil2=BAD)

    assert decision.action is Action.HOLD
    assert len(controller.state.tenants) == len(controller.state.without) == MOST_TENANTS + 1


def test_a_tenant_that_comes_late_has_what_was_counted_before_as_the_others(controller: Controller) -> None:
    """That of the first tenant has nothing of it."""
    controller.see(acme=EvidenceBlock(Counts(100, 1), Counts(20, 3)))
    before = controller.state.evidence["errors"]

    controller.see(other=QUIET)

    assert controller.state.without["other"]["errors"] == before
    assert controller.state.without["acme"]["errors"].value == pytest.approx(1.0)


# --- the share of errors that goes on ---


@pytest.mark.parametrize(("most", "action"), [(0.1, Action.HOLD), (0.99, Action.HOLD), (1.0, Action.PROMOTE)])
def test_a_canary_that_mostly_fails_is_not_promoted_because_stable_fails_too(most: float, action: Action) -> None:
    controller = Controller(replace(PLAN, most_errors=most))
    as_bad = EvidenceBlock(Counts(100, 100), Counts(100, 100))

    decision = controller.see(11, acme=as_bad)

    assert decision.action is action
    if action is Action.HOLD:
        assert decision.reason == (
            "100 of 100 requests of the canary in this step have failed; "
            f"most_errors allows {most:.2%}, however many of stable's fail"
        )


def test_the_errors_of_one_tenants_requests_do_not_hold_it_back(controller: Controller) -> None:
    """Its inputs fail wherever they go; those of two do hold it back."""
    fails = EvidenceBlock(Counts(100, 100), Counts(100, 100))
    decision = controller.see(11, sloppy=fails, acme=EvidenceBlock(Counts(100, 0), Counts(100, 0)))
    both = Controller().see(11, sloppy=fails, acme=EvidenceBlock(Counts(100, 20), Counts(100, 20)))

    assert decision.action is Action.PROMOTE
    assert both.reason.startswith("120 of 200 requests of the canary in this step have failed")


# --- limits of times ---


def of_tenants(**seconds: list[float]) -> dict[str, dict[str, dict[str, list[float]]]]:
    return {"latency": {"": dict(seconds)}}


def test_a_limit_is_the_median_of_the_tenants_own(controller: Controller) -> None:
    """So one of them does not choose it: here by answers that it makes slow."""
    controller.see(acme=GOOD, beta=GOOD, evil=GOOD)

    state = with_limits(
        PLAN, controller.state, of_tenants(acme=[1.0] * 30, beta=[2.0] * 30, evil=[9.0] * 2000), controller.now_s
    )

    assert state.limits == {"deadline": {"": 2.0}}


def test_a_limit_waits_a_while_for_a_second_tenant(controller: Controller) -> None:
    controller.see(acme=GOOD, evil=GOOD)
    flood = of_tenants(acme=[1.0] * 9, evil=[9.0] * 2000)

    early = with_limits(PLAN, controller.state, flood, controller.now_s)
    late = with_limits(PLAN, controller.state, flood, controller.state.since_s + ALONE_S)

    assert early.limits == {}
    assert late.limits == {"deadline": {"": 9.0}}


def test_small_tenants_have_a_limit_together(controller: Controller) -> None:
    few = {f"t{number}": [1.0] * 10 for number in range(10)}

    assert with_limits(PLAN, controller.state, of_tenants(**few), 1000.0).limits == {"deadline": {"": 1.0}}
