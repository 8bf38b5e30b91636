"""The scaling policy on traces: what it costs, who waits too long, and how often it changes its mind.

The bounds are a little above what it does now: a change of the policy that makes it worse has to say so here.
"""

import pytest

from qinfer.scaling.policy import ScalingPolicy
from tests.support.scaling_simulation import WorkerProfile, simulate
from tests.support.scaling_traces import burst, diurnal, ramp, steady, wandering

POLICY = ScalingPolicy(max_workers=8, target_s=10, down_after_s=60, idle_s=300, cooldown_s=30)
LOAD_S = WorkerProfile().load_s
LATE_S = POLICY.target_s + LOAD_S
"""What a request may wait: its share of a worker's work, and the load of the worker."""


def test_a_burst_is_served_and_then_there_is_nobody() -> None:
    """All workers come for it at once, and leave once; nobody is there at the end."""
    outcome = simulate(POLICY, burst())

    assert outcome.left == 0
    assert outcome.late(LATE_S) == 0
    assert outcome.most == 8
    assert outcome.targets[-1] == 0
    assert outcome.turns == 1
    assert outcome.excess <= 3.6  # of which 2.6 are the minute of patience, and five minutes of idleness


def test_a_ramp_is_followed() -> None:
    """Up and down again, once."""
    outcome = simulate(POLICY, ramp())

    assert outcome.left == 0
    assert outcome.late(POLICY.target_s) <= 0.01
    assert outcome.late(LATE_S) == 0
    assert outcome.turns == 1
    assert outcome.excess <= 1.35


def test_a_day_is_followed() -> None:
    """With few changes: at most one for each worker that the day needs, each way."""
    outcome = simulate(POLICY, diurnal())

    assert outcome.left <= 100
    assert outcome.late(POLICY.target_s) <= 0.005
    assert outcome.turns == 1
    assert outcome.changes <= 10
    assert outcome.excess <= 1.3


def test_an_hour_that_wanders_is_served() -> None:
    """With spikes, and minutes of silence that are shorter than what counts as idle."""
    outcome = simulate(POLICY, wandering())

    assert outcome.left <= 100
    assert outcome.late(LATE_S) <= 0.01
    assert outcome.turns <= 2 * 6  # it has six spikes
    assert outcome.excess <= 3.2


@pytest.mark.parametrize("speed_error", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rate", [9.0, 25.0, 48.0])
def test_a_steady_load_is_left_alone(rate: float, speed_error: float) -> None:
    """There is no backlog where workers keep up, and they stay; even where the speed that is measured is wrong."""
    outcome = simulate(POLICY, steady(rate), WorkerProfile(speed_error=speed_error))

    assert outcome.late(LATE_S) == 0
    assert outcome.turns <= 1
    assert len(set(outcome.targets[1200:])) == 1
    assert outcome.targets[-1] >= rate / WorkerProfile().rows_per_s


@pytest.mark.parametrize(("load_s", "turns"), [(1.0, 1), (60.0, 3), (180.0, 5)])
def test_slow_loads_make_no_flapping(load_s: float, turns: int) -> None:
    """The cooldown is longer than the load, whatever it is set to; what piles up meanwhile has to be worked off."""
    outcome = simulate(POLICY, diurnal(), WorkerProfile(load_s=load_s))

    assert outcome.left <= 100
    assert outcome.turns <= turns
    assert outcome.late(POLICY.target_s + 1.5 * load_s) <= 0.01


def test_a_request_now_and_then_keeps_one_worker() -> None:
    """None of them is seen in the queue, and all are answered at once, but for the first."""
    trace = [int(second % 200 == 7) for second in range(4000)]

    outcome = simulate(POLICY, trace)

    assert outcome.changes == 1
    assert outcome.late(1.0) == 1 / sum(trace)


def test_sight_of_the_backlog_alone_would_flap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the throughput counts: the proof that these traces can tell."""
    monkeypatch.setattr("qinfer.scaling.policy.Throughput.observe", lambda *_: 0.0)
    monkeypatch.setattr("qinfer.scaling.policy.MAX_PATIENCE", 1)

    assert simulate(POLICY, steady(25.0)).turns > 20
