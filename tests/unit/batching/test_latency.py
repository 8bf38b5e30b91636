"""The learned latency model."""

import pytest

from qinfer.batching.policy import LatencyModel


def test_knows_nothing_at_first() -> None:
    """Estimates 0 and expires nothing before an observation."""
    model = LatencyModel()

    assert not model.known
    assert model.estimate_s(8) == 0
    assert model.floor_s(0.0) == 0


def test_learns_base_and_slope() -> None:
    """Finds a and b of t = a + b·rows."""
    model = LatencyModel()
    for rows in (1, 4, 16, 64, 1, 4, 16, 64):
        model.observe(rows, 0.010 + 0.001 * rows, 0.0)

    assert model.estimate_s(32) == pytest.approx(0.042, rel=1e-3)


def test_one_size_extrapolates_in_proportion() -> None:
    """Having seen one size only, takes a larger batch to take proportionally longer."""
    model = LatencyModel()
    model.observe(1, 0.01, 0.0)

    assert model.estimate_s(10) == pytest.approx(0.1)


def test_follows_a_change() -> None:
    """Old observations fade."""
    model = LatencyModel()
    for rows in range(1, 101):
        model.observe(rows % 8 + 1, 0.1, 0.0)
    for rows in range(1, 301):
        model.observe(rows % 8 + 1, 0.01, 0.0)

    assert model.estimate_s(4) == pytest.approx(0.01, rel=0.1)


def test_never_estimates_below_zero() -> None:
    """Neither base nor slope is negative, whatever the noise."""
    model = LatencyModel()
    for rows, seconds in ((1, 0.05), (8, 0.01), (2, 0.04), (64, 0.001)):
        model.observe(rows, seconds, 0.0)

    assert model.estimate_s(0) >= 0
    assert model.estimate_s(1000) >= 0


def test_floor_needs_many_recent_observations() -> None:
    """The floor is the fastest of many runs, and forgotten when they are old."""
    model = LatencyModel()
    for index in range(40):
        model.observe(1, 0.2 + index / 1000, 10.0)

    assert model.floor_s(10.0) == pytest.approx(0.2)
    assert model.floor_s(60.0) == 0
