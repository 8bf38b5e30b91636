"""What canaries of several tenants do over many requests: as those of one, whatever one of the tenants sends."""

import msgspec
import numpy as np
import pytest

from qinfer.traffic.canary import Action, CanaryDecision, CanaryState, decide, initial_state
from qinfer.traffic.endpoints import CanaryPlan, Check, Step, checked
from qinfer.traffic.evidence import Blocks, Counts, EvidenceBlock
from tests.property.test_canary import most

CANARIES, ROUNDS = 200, 100
FALSE_ROLLBACKS = 0.05
PLAN = checked(
    CanaryPlan(
        steps=tuple(Step(weight=weight, least_s=5, least_requests=200) for weight in (0.1, 0.5)),
        checks=(
            Check(of="errors"),
            Check(of="execution", quantile=0.5),
            Check(of="latency", quantile=0.99),
            Check(of="disagreements", allowed=0.01),
        ),
        false_rollbacks=FALSE_ROLLBACKS,
    )
)
SHARES = {"errors": 0.02, "execution p50": 0.5, "latency p99": 0.01}
"""The share of bad requests of each check, but for disagreements."""


class Tenant(msgspec.Struct, frozen=True):
    """How much a tenant sends, and the share of its requests that fail at each target: `None` = as all fail."""

    rps: float
    at_stable: float | None = None
    at_canary: float | None = None


class Simulation:
    """A canary whose requests are those of tenants.

    Args:
        seed: Of the random numbers.
        tenants: The tenants.
    """

    def __init__(self, seed: int, *tenants: Tenant) -> None:
        self._random = np.random.default_rng(seed)
        self._tenants = {f"t{number}": tenant for number, tenant in enumerate(tenants)}
        self.state = initial_state(PLAN, 3, 4, 1, 0.0)
        self.requests = 0

    def run(self) -> CanaryDecision:
        """Returns the decision that ends the canary, or the last one."""
        for second in range(1, ROUNDS + 1):
            decision = decide(PLAN, self.state, float(second), self._seen(self.state))
            self.state = decision.state
            if self.state.ended:
                break
        return decision

    def _seen(self, state: CanaryState) -> dict[str, Blocks]:
        weight, load = PLAN.steps[state.step].weight, self._random.uniform(0.7, 1.5)
        parts: dict[str, Blocks] = {}
        for name, tenant in self._tenants.items():
            requests = int(self._random.poisson(tenant.rps * load))
            at_canary = int(self._random.binomial(requests, weight))
            self.requests += at_canary
            parts[name] = self._part(tenant, requests - at_canary, at_canary, load)
        return parts

    def _part(self, tenant: Tenant, at_stable: int, at_canary: int, load: float) -> Blocks:
        part = {"disagreements": {"": EvidenceBlock(Counts(), self._counts(at_canary, 0.01))}}
        for check, share in SHARES.items():
            own = check == "errors"
            stable = share * load if tenant.at_stable is None or not own else tenant.at_stable
            canary = share * load if tenant.at_canary is None or not own else tenant.at_canary
            block = EvidenceBlock(self._counts(at_stable, min(stable, 1.0)), self._counts(at_canary, min(canary, 1.0)))
            part[check] = {"": block}
        return part

    def _counts(self, requests: int, share: float) -> Counts:
        return Counts(requests, int(self._random.binomial(requests, share)))


def rolled_back(count: int, *tenants: Tenant) -> list[str]:
    """Returns why canaries of these tenants were rolled back, of so many that were tried."""
    decisions = [Simulation(seed, *tenants).run() for seed in range(count)]
    return [one.reason for one in decisions if one.action is Action.ROLL_BACK]


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(60.0,), (40.0, 20.0), (50.0, 5.0, 0.1)])
def test_canaries_as_good_as_stable_are_hardly_ever_rolled_back(sizes: tuple[float, ...]) -> None:
    """As rarely as the plan says, within the binomial's 99.9 % bound, of one tenant and of several."""
    assert len(rolled_back(CANARIES, *map(Tenant, sizes))) <= most(CANARIES, FALSE_ROLLBACKS)


@pytest.mark.parametrize("others", [(20.0,), (10.0, 10.0), (2.0,)])
def test_a_tenant_whose_requests_fail_at_the_canary_only_decides_nothing(others: tuple[float, ...]) -> None:
    """Such as one that chooses by a sticky header which of its requests go there."""
    assert rolled_back(30, *map(Tenant, others), Tenant(50.0, 0.0, 1.0)) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_version_that_only_fails_is_found_as_soon_whose_ever_its_requests_are(seed: int) -> None:
    one, several = (
        Simulation(seed, *(Tenant(rps, None, 1.0) for rps in sizes)) for sizes in ((60.0,), (30.0, 20.0, 10.0))
    )

    assert one.run().action is several.run().action is Action.ROLL_BACK
    assert max(one.requests, several.requests) <= 200


@pytest.mark.parametrize("seed", range(20))
def test_a_bad_version_is_not_promoted_because_one_tenant_hides_it(seed: int) -> None:
    simulation = Simulation(seed, Tenant(20.0, 0.0, 0.5), Tenant(100.0, 1.0, 0.0))

    assert simulation.run().action is Action.HOLD
    assert simulation.state.step == 0
