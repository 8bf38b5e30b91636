"""Shares and stickiness of the choice among targets, whatever the weights."""

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.traffic.endpoints import Endpoint, Role, Target
from qinfer.traffic.routing import ChoiceInput, TargetSplit, Weights, by_key

REQUESTS = 100_000
MOST_DEVIATIONS = 3.2905
"""Those of the two-sided interval of a normal distribution that 99.9 % are in; the binomial's is as wide here."""

KEYS = [f"user-{number}" for number in range(500)]
shares = st.lists(st.integers(0, 100), min_size=1, max_size=5)


def endpoint_of(*weights: float, sticky: str = "tenant") -> Endpoint:
    """Returns an endpoint whose canaries have these weights."""
    stable = Target(model="m", version=1, role=Role.STABLE)
    canaries = [Target(model="m", version=n, weight=weight) for n, weight in enumerate(weights, start=2)]
    return Endpoint(name="e", targets=(stable, *canaries), sticky=sticky)


def weights_of(parts: Sequence[int]) -> Weights:
    """Returns targets with shares as the parts; a part of 1 more keeps one of them above 0."""
    total = sum(parts) + 1
    targets = [Target(model="m", version=version) for version in range(1, len(parts) + 1)]
    last = Target(model="m", version=len(parts) + 1)
    return tuple(zip((*targets, last), [part / total for part in (*parts, 1)], strict=True))


@pytest.mark.parametrize("weights", [(0.5,), (0.1,), (0.01,), (0.3, 0.2, 0.05)])
@pytest.mark.parametrize("is_sticky", [True, False], ids=["by key", "by chance"])
def test_shares_are_those_of_the_weights(weights: tuple[float, ...], is_sticky: bool) -> None:  # noqa: FBT001
    """Of 100,000 requests within the binomial interval of 99.9 %, for each target."""
    endpoint = endpoint_of(*weights, sticky="tenant" if is_sticky else "")
    split = TargetSplit(endpoint, Random(26).random)

    counts = Counter(split.choose(ChoiceInput(f"user-{number}")) for number in range(REQUESTS))

    for target in endpoint.targets:
        share = endpoint.weight_of(target)
        allowed = MOST_DEVIATIONS * math.sqrt(REQUESTS * share * (1 - share)) + 1
        assert abs(counts[target] - REQUESTS * share) <= allowed, target.label


@given(shares, st.integers(0, 4), st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_only_what_a_target_gains_moves(parts: list[int], place: int, gain: int) -> None:
    """Nobody changes between two targets of which neither has gained."""
    place %= len(parts)
    more = [part + gain if n == place else part for n, part in enumerate(parts)]
    before, after = weights_of(parts), weights_of(more)
    gained = before[place][0]

    for key in KEYS:
        old, new = by_key(before, "e", key), by_key(after, "e", key)
        assert new in (old, gained)


def test_the_share_that_moves_is_that_of_the_change() -> None:
    """From 10 to 20 % a tenth of all keys go to the canary, and none leave it."""
    before, after = TargetSplit(endpoint_of(0.1)), TargetSplit(endpoint_of(0.2))

    moves = Counter(
        (before.choose(ChoiceInput(key)).version, after.choose(ChoiceInput(key)).version)
        for key in (f"user-{number}" for number in range(REQUESTS))
    )

    assert moves[2, 1] == 0
    assert abs(moves[1, 2] - REQUESTS * 0.1) <= MOST_DEVIATIONS * math.sqrt(REQUESTS * 0.1 * 0.9)


@given(shares, st.text(max_size=20))
@settings(deadline=None)
def test_a_key_always_has_the_same_target(parts: list[int], key: str) -> None:
    """Whatever the order of the targets; one without a weight is none's."""
    weights = weights_of(parts)
    chosen = by_key(weights, "e", key)

    assert by_key(weights[::-1], "e", key) == chosen
    assert {target.version: weight for target, weight in weights}[chosen.version] > 0
