"""The scaling policy on recorded traces (tests/data/scaling): what it costs, and who waits too long.

The bounds are a little above what it does now: a change of the policy that makes it worse has to say so here.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from qinfer.scaling.policy import ScalingPolicy
from tests.support.scaling_simulation import SimulationOutcome, WorkerProfile, simulate

TRACES = Path(__file__).parents[2] / "data" / "scaling"
POLICY = ScalingPolicy(max_workers=4, target_s=3, down_after_s=10, idle_s=15, cooldown_s=5)
"""That which was at work when they were recorded."""

EXCESS = {"burst": 2.8, "ramp": 1.6, "diurnal": 1.6}
"""Seconds of workers for each second of work, at most. Over a burst that is over soon, patience weighs more."""


@cache
def traffic(shape: str) -> tuple[list[int], WorkerProfile]:
    """Returns the arrivals of each second, and the workers."""
    read = json.loads((TRACES / f"{shape}.json").read_bytes())
    return read.pop("arrivals"), WorkerProfile(**read)


def run(shape: str, policy: ScalingPolicy = POLICY, *, load_s: float | None = None) -> SimulationOutcome:
    arrivals, profile = traffic(shape)
    return simulate(policy, arrivals, profile if load_s is None else replace(profile, load_s=load_s))


def is_good(shape: str, outcome: SimulationOutcome, load_s: float) -> bool:
    """Nobody waits for longer than the target and the start of a worker, and few workers stand idle."""
    return not outcome.late(POLICY.target_s + load_s + 1) and not outcome.left and outcome.excess <= EXCESS[shape]


@pytest.mark.parametrize("shape", EXCESS)
def test_recorded_traffic_is_served_in_time_by_few_workers(shape: str) -> None:
    """A hundredth may wait for as long as a worker takes to start, besides its share of a worker's work."""
    outcome = run(shape)

    assert is_good(shape, outcome, traffic(shape)[1].load_s)
    assert outcome.late(POLICY.target_s) <= 0.01
    assert outcome.turns == 1
    assert (outcome.most, outcome.targets[-1]) == (3, 0)


@pytest.mark.parametrize("shape", EXCESS)
def test_slow_starts_cost_waits_and_no_more(shape: str) -> None:
    """The same traffic with workers that take a quarter of a minute to start."""
    outcome = run(shape, load_s=15.0)

    assert outcome.left == 0
    assert outcome.late(POLICY.target_s + 15.0) == 0
    assert outcome.turns == 1
    assert outcome.excess <= 1.3 * EXCESS[shape]


@pytest.mark.parametrize("shape", EXCESS)
@pytest.mark.parametrize(
    "bad",
    [
        replace(POLICY, max_workers=1),
        replace(POLICY, min_workers=4),
        replace(POLICY, down_after_s=600, idle_s=600),
        replace(POLICY, target_s=60),
        replace(POLICY, up_after_s=20),
    ],
    ids=["never scales", "always the most", "never leaves", "too late", "too slow"],
)
def test_these_traces_tell_bad_policies(shape: str, bad: ScalingPolicy) -> None:
    """Each makes somebody wait or keeps workers that nobody needs: the proof that what is asserted above can fail."""
    assert not is_good(shape, run(shape, bad), traffic(shape)[1].load_s)
