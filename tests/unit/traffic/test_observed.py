"""What a gateway counts of canaries on trial."""

from typing import Any

import pytest
from msgspec.structs import replace

from qinfer.core.messages import Response, Timing
from qinfer.errors import ErrorCode
from qinfer.traffic.canary import Trial, initial_state
from qinfer.traffic.endpoints import CanaryPlan, Check, Endpoint, Role, Step, Target
from qinfer.traffic.tally import MOST_LATENCIES, ObservedTrials, TargetCounts

P50, P99 = Check(of="execution", quantile=0.5), Check(of="execution", quantile=0.99)
PLAN = CanaryPlan(steps=(Step(weight=0.5),), checks=(Check(of="errors"), P50, P99, Check(of="latency", quantile=0.9)))
LIMITS = {
    "execution p50": {"2": 0.010},
    "execution p99": {"2": 0.020},
    "latency p90": {"": 0.5},
    "deadline": {"": 2.0},
}


def answer(infer_ms: float = 0.0, batch_size: int = 2, **fields: Any) -> Response:
    return Response(request_id="r", timing=Timing(infer_ns=int(infer_ms * 1e6), batch_size=batch_size), **fields)


def counts_of(*, is_stable: bool = False) -> TargetCounts:
    counts = TargetCounts(Role.STABLE if is_stable else Role.CANARY, PLAN)
    counts.set_limits(LIMITS)
    return counts


def test_times_are_compared_with_the_limits_of_their_stratum() -> None:
    """Executions with those of the same batch size; where there is no limit yet nothing is counted."""
    counts = counts_of()
    counts.count_answered(0.1, answer(5))
    counts.count_answered(0.6, answer(15))
    counts.count_answered(0.1, answer(25))
    counts.count_answered(0.1, answer(25.5, batch_size=3))

    assert counts.new_counts()[0] == {
        "canary|errors||requests": 4,
        "canary|latency p90||requests": 4,
        "canary|latency p90||bad": 1,
        "canary|execution p50|2|requests": 3,
        "canary|execution p50|2|bad": 2,
        "canary|execution p99|2|requests": 3,
        "canary|execution p99|2|bad": 1,
    }
    assert counts.new_counts() == ({}, [])


def test_a_batch_counts_once() -> None:
    """Its requests are late together; they have the same time to the nanosecond, and come one behind the other."""
    counts = counts_of()
    for _ in range(3):
        counts.count_answered(0.6, answer(15))

    found, _ = counts.new_counts()

    assert (found["canary|errors||requests"], found["canary|execution p50|2|requests"]) == (3, 1)
    assert (found["canary|latency p90||requests"], found["canary|latency p90||bad"]) == (1, 1)


def test_a_batch_is_the_tenants_whose_request_came_first() -> None:
    """All its requests count by themselves for errors."""
    counts = counts_of()
    for tenant in ("acme", "evil", "evil"):
        counts.count_answered(0.6, answer(15), tenant)

    found, _ = counts.new_counts()

    assert {name: n for name, n in found.items() if "errors" in name} == {
        "canary|errors||requests|acme": 1,
        "canary|errors||requests|evil": 2,
    }
    assert [name for name in found if "execution p50" in name] == [
        "canary|execution p50|2|requests|acme",
        "canary|execution p50|2|bad|acme",
    ]


@pytest.mark.parametrize("code", [ErrorCode.DEADLINE_EXCEEDED, ErrorCode.DEADLINE_INFEASIBLE])
@pytest.mark.parametrize(("limits", "given_s", "bad"), [(LIMITS, 1.9, 0), (LIMITS, 2.1, 1), ({}, 60.0, 0)])
def test_a_short_deadline_is_its_callers(code: ErrorCode, limits: Any, given_s: float, bad: int) -> None:
    """Shorter than nearly all of stable's answers take; one of its own is, while that is not known."""
    counts = TargetCounts(Role.CANARY, PLAN)
    counts.set_limits(limits)

    counts.failed(code, given_s=given_s)
    counts.failed(code)

    assert counts.new_counts()[0] == {"canary|errors||requests": 1 + bad, "canary|errors||bad": 1 + bad}


def test_stable_lends_latencies_for_deadlines_where_no_check_needs_them() -> None:
    plan = CanaryPlan(steps=(Step(weight=0.5),), checks=(Check(of="errors"),))
    counts = TargetCounts(Role.STABLE, plan)
    counts.count_answered(0.1, answer(), "acme")
    assert counts.new_counts()[1] == ["latency||0.100000000|acme"]

    counts.set_limits({"deadline": {"": 2.0}})
    counts.count_answered(0.1, answer(), "acme")
    assert counts.new_counts()[1] == []


def test_a_flood_of_one_tenant_leaves_the_samples_of_the_others() -> None:
    counts = TargetCounts(Role.STABLE, PLAN)
    counts.count_answered(0.1, answer(1), "acme")
    for number in range(2 * MOST_LATENCIES):
        counts.count_answered(0.1, answer(number + 2), "evil")

    assert [one for one in counts.new_counts()[1] if one.endswith("|acme")] == [
        "execution|2|0.001000000|acme",
        "latency||0.100000000|acme",
    ]


def test_what_the_cache_answered_says_nothing_about_time() -> None:
    counts = counts_of()
    counts.count_answered(0.1, answer(15, cache="hit"))

    assert counts.new_counts()[0] == {"canary|errors||requests": 1}


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        (ErrorCode.INFERENCE_FAILED, 1),
        (ErrorCode.INTERNAL, 1),
        (ErrorCode.DEADLINE_EXCEEDED, 1),
        (ErrorCode.INVALID_REQUEST, None),
        (ErrorCode.QUOTA_EXCEEDED, None),
        (ErrorCode.CANCELLED, None),
        (ErrorCode.BROKER_UNAVAILABLE, None),
    ],
)
def test_failures_are_the_servers_only(code: ErrorCode, bad: int | None) -> None:
    counts = counts_of()
    counts.failed(code.value)

    assert counts.new_counts()[0].get("canary|errors||bad") == bad


def test_what_was_executed_as_a_shadow_is_a_request_too() -> None:
    counts = counts_of()
    counts.compared(disagrees=True)
    counts.compared(disagrees=False)

    assert counts.new_counts()[0] == {
        "canary|errors||requests": 2,
        "canary|disagreements||requests": 2,
        "canary|disagreements||bad": 1,
    }


def test_stable_lends_a_bounded_sample_where_limits_lack() -> None:
    counts = counts_of(is_stable=True)
    for number in range(2 * MOST_LATENCIES):
        counts.count_answered(0.1, answer(number + 1, batch_size=5))
    counts.count_answered(0.1, answer(7, batch_size=2))

    latencies = counts.new_counts()[1]

    assert len(latencies) == MOST_LATENCIES
    assert latencies[-1] == f"execution|5|{2 * MOST_LATENCIES / 1000:.9f}"
    assert counts.new_counts() == ({}, [])


def test_targets_of_the_same_version_are_told_apart() -> None:
    stable = Target(model="m", version=3, role=Role.STABLE)
    endpoint = Endpoint(name="e", targets=(stable, Target(model="quick", version=3, trial=3)), canary=PLAN, revision=7)
    observed = ObservedTrials()
    observed.follow({"e": endpoint}, {"e": Trial(state=initial_state(PLAN, 3, 3, 7, 0.0), model="quick")})

    observed.by_target["e", "m:3"].count_answered(0.1, answer())
    observed.by_target["e", "quick:3"].failed(ErrorCode.INTERNAL)

    [(_, _, found, _)] = observed.new_counts()
    assert found == {"stable|errors||requests": 1, "canary|errors||requests": 1, "canary|errors||bad": 1}


def test_counts_belong_to_a_revision() -> None:
    """With the next one they begin anew; what has ended is not counted."""
    stable = Target(model="m", version=3, role=Role.STABLE)
    endpoint = Endpoint(name="e", targets=(stable, Target(model="m", version=4, trial=4)), canary=PLAN, revision=7)
    trial = Trial(state=initial_state(PLAN, 3, 4, 7, 0.0))
    observed = ObservedTrials()
    observed.follow({"e": endpoint}, {"e": trial})
    assert set(observed.by_target) == {("e", "m:3"), ("e", "m:4")}
    observed.by_target["e", "m:4"].failed(ErrorCode.INTERNAL)
    observed.by_target["e", "m:3"].count_answered(0.1, answer())

    [(name, revision, found, latencies)] = observed.new_counts()
    assert (name, revision, len(latencies)) == ("e", 7, 2)
    assert found == {"stable|errors||requests": 1, "canary|errors||requests": 1, "canary|errors||bad": 1}

    observed.by_target["e", "m:4"].failed(ErrorCode.INTERNAL)
    later = replace(trial, state=replace(trial.state, revision=8))
    observed.follow({"e": endpoint}, {"e": later})  # the endpoint of that revision was not read yet
    assert not observed.by_target
    observed.follow({"e": replace(endpoint, revision=8)}, {"e": later})
    assert [*observed.new_counts()] == []
    ended = replace(later, state=replace(later.state, ended="finish"))
    observed.follow({"e": replace(endpoint, revision=8)}, {"e": ended})
    assert not observed.by_target
