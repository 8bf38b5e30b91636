"""What canaries do over many requests: those as good as stable are hardly ever rolled back, bad ones are, and early."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.traffic.canary import (
    TRIALS,
    Action,
    CanaryDecision,
    CanaryState,
    Trial,
    decide,
    initial_state,
    numbers_of,
    with_limits,
)
from qinfer.traffic.endpoints import CanaryPlan, Check, Step, checked
from qinfer.traffic.evidence import Blocks, Counts, EvidenceBlock

CANARIES = 200
FALSE_ROLLBACKS = 0.05
REQUESTS = 5000
"""Requests of a canary."""
LATENCIES = 2000
"""Those of stable that limits are made from."""
PLAN = checked(
    CanaryPlan(
        steps=tuple(Step(weight=weight, least_s=0, least_requests=REQUESTS // 3) for weight in (0.05, 0.2, 0.5)),
        checks=(
            Check(of="errors"),
            Check(of="execution", quantile=0.5),
            Check(of="execution", quantile=0.99),
            Check(of="disagreements", allowed=0.01),
        ),
        false_rollbacks=FALSE_ROLLBACKS,
    )
)


class Target(msgspec.Struct, kw_only=True):
    """How a target behaves: its share of errors, how many times longer it takes, its share of disagreements."""

    errors: float = 0.02
    slower: float = 1.0
    disagreements: float = 0.01


class Simulation:
    """A canary beside a stable target, whose load and share of errors change all the time, for both alike.

    Args:
        seed: Of the random numbers.
        canary: How the canary behaves.
        spread: The standard deviation of the latencies' logarithms.
    """

    def __init__(self, seed: int, canary: Target, spread: float = 0.5) -> None:
        self._random = np.random.default_rng(seed)
        self._stable, self._canary, self._spread = Target(), canary, spread
        self.requests = 0

    def run(self) -> CanaryDecision:
        """Returns the decision that ends the canary, or the last before its requests have ended."""
        state = self._limited(initial_state(PLAN, 3, 4, 1, 0.0))
        while True:
            blocks = self._seen(state)
            decision = decide(PLAN, state, float(self.requests), {"": blocks})
            after = decision.state
            if after.ended:
                return decision
            state = self._limited(after) if after.step != state.step else after

    def _limited(self, state: CanaryState) -> CanaryState:
        latencies = {"execution": {"": {"": self._latencies(LATENCIES, self._stable).tolist()}}}
        return with_limits(PLAN, state, latencies, float(self.requests))

    def _seen(self, state: CanaryState) -> Blocks:
        weight = PLAN.steps[state.step].weight
        canaries = int(self._random.integers(1, 60))
        stables = int(self._random.poisson(canaries * (1 - weight) / weight))
        self.requests += canaries
        load = self._random.uniform(1.0, 1.5)
        latencies = [load * self._latencies(stables, self._stable), load * self._latencies(canaries, self._canary)]
        blocks = {
            "errors": self._block(stables, canaries, lambda target: target.errors * load),
            "disagreements": self._block(0, canaries, lambda target: target.disagreements),
        }
        for name, limits in state.limits.items():
            slow = [Counts(len(found), int((found > limits[""]).sum())) for found in latencies]
            blocks[name] = EvidenceBlock(*slow)
        return {name: {"": block} for name, block in blocks.items()}

    def _block(self, stables: int, canaries: int, share: Callable[[Target], float]) -> EvidenceBlock:
        bad = self._random.binomial([stables, canaries], [min(share(one), 1.0) for one in (self._stable, self._canary)])
        return EvidenceBlock(Counts(stables, int(bad[0])), Counts(canaries, int(bad[1])))

    def _latencies(self, count: int, target: Target) -> npt.NDArray[np.float64]:
        return target.slower * self._random.lognormal(0.0, self._spread, count)


def most(cases: int, rate: float, tail: float = 0.001) -> int:
    """Returns the least number that a binomial draw exceeds with a probability of `tail` at most."""
    total = 0.0
    for n in range(cases):
        total += math.comb(cases, n) * rate**n * (1 - rate) ** (cases - n)
        if total >= 1 - tail:
            return n
    return cases


@pytest.mark.long
def test_canaries_as_good_as_stable_are_promoted() -> None:
    """False rollbacks are as rare as the plan says, within the binomial's 99.9 % bound."""
    decisions = [Simulation(seed, Target()).run() for seed in range(CANARIES)]

    rolled_back = [one.reason for one in decisions if one.action == Action.ROLL_BACK]
    assert len(rolled_back) <= most(CANARIES, FALSE_ROLLBACKS), rolled_back
    assert all(one.state.stable == 4 for one in decisions if one.action == Action.FINISH)


@pytest.mark.parametrize("seed", range(20))
def test_a_version_that_only_fails_is_found_within_200_requests(seed: int) -> None:
    simulation = Simulation(seed, Target(errors=1.0))

    decision = simulation.run()

    assert decision.action == Action.ROLL_BACK
    assert decision.state.stable == 3
    assert simulation.requests <= 200


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_a_version_30_percent_slower_is_found_within_5000_requests(seed: int, spread: float) -> None:
    """Whether latencies are all alike or spread widely."""
    simulation = Simulation(seed, Target(slower=1.3), spread)

    decision = simulation.run()

    assert decision.action == Action.ROLL_BACK
    assert "execution" in decision.reason
    assert simulation.requests <= REQUESTS


@pytest.mark.parametrize("seed", range(5))
def test_a_version_with_wrong_answers_is_found(seed: int) -> None:
    simulation = Simulation(seed, Target(disagreements=0.1))

    decision = simulation.run()

    assert decision.action == Action.ROLL_BACK
    assert decision.reason.startswith("disagreements: ")
    assert simulation.requests <= REQUESTS // 3


@st.composite
def sights(draw: st.DrawFn) -> tuple[float, dict[str, dict[str, EvidenceBlock]]]:
    """The seconds until somebody looks, and what was counted meanwhile."""
    strata = st.sampled_from(["", "1", "8"])
    counts = st.integers(0, 50).flatmap(lambda n: st.builds(Counts, st.just(n), st.integers(0, n)))
    blocks = st.dictionaries(strata, st.builds(EvidenceBlock, counts, counts), max_size=3)
    names = st.sampled_from([check.name for check in PLAN.checks])
    return draw(st.floats(0, 400)), draw(st.dictionaries(names, blocks))


@settings(max_examples=60)
@given(st.lists(sights(), max_size=15))
def test_every_state_can_be_stored_and_leads_to_another(
    seen: list[tuple[float, dict[str, dict[str, EvidenceBlock]]]],
) -> None:
    """Whatever is counted: transitions raise the revision by one, steps go up, and what has ended stays so."""
    now_s, state = 0.0, initial_state(PLAN, 3, 4, 1, 0.0)
    for after_s, blocks in seen:
        now_s += after_s
        decision = decide(PLAN, state, now_s, {"": blocks})
        after = decision.state

        assert TRIALS.decode(TRIALS.encode(Trial(state=after))).state == after
        assert after.revision == state.revision + (decision.action != Action.HOLD)
        assert after.step == state.step + (decision.action == Action.PROMOTE)
        assert bool(after.ended) == bool(state.ended or decision.action in (Action.FINISH, Action.ROLL_BACK))
        assert all(math.isfinite(verdict.evidence) for verdict in numbers_of(PLAN, after))
        state = after
