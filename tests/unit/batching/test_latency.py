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


def test_gaps_between_executions_are_averaged() -> None:
    """One long gap, when the machine was busy with something else, hardly counts."""
    model = LatencyModel()
    for end_s in range(1, 101):
        model.observe_gap(end_s - 1 + 0.002, end_s, waited_s=5.0, instances=1)
    assert model.gap_s == pytest.approx(0.002)

    model.observe_gap(160.0, 161.0, waited_s=100.0, instances=1)

    assert model.gap_s < 0.004


def test_a_gap_counts_only_where_requests_waited() -> None:
    """An instance that nobody asks is not slow."""
    model = LatencyModel()
    model.observe_gap(0.0, 1.0, waited_s=5.0, instances=1)
    model.observe_gap(9.0, 10.0, waited_s=8.9, instances=1)

    assert model.gap_s == 0.0


def test_gaps_are_of_the_instance_that_was_free_first() -> None:
    model = LatencyModel()
    for begin_s, end_s in ((0.0, 1.0), (0.0, 1.5), (1.01, 2.0), (1.51, 2.5)):
        model.observe_gap(begin_s, end_s, waited_s=5.0, instances=2)

    assert model.gap_s == pytest.approx(0.01)
