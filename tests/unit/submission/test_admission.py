"""What is refused at the door: tables of decisions."""

import pytest

from qinfer.errors import DeadlineInfeasible, QueueFull
from qinfer.models.readiness import Capacity
from qinfer.models.spec import QueuePolicy
from qinfer.submission.backlog import judge, most_waiting, queue_timeout_s

LIVE = Capacity(10.0, 0.0, 1)
UNKNOWN = Capacity()
ASLEEP = Capacity(10.0, 30.0, 0)


@pytest.mark.parametrize(
    ("waiting", "ahead", "capacity", "timeout_s"),
    [
        (0, 0, UNKNOWN, 1.0),
        (99, 99, UNKNOWN, 1.0),
        (99, 99, LIVE, 60.0),
        (10, 10, LIVE, 1.0),
        (0, 0, ASLEEP, 1.0),
        (20, 300, ASLEEP, 60.0),
    ],
    ids=["empty", "speed unknown", "in time", "just in time", "wakes the model", "in time after the start"],
)
def test_what_may_enter(waiting: int, ahead: int, capacity: Capacity, timeout_s: float) -> None:
    """Room, and time enough; where nothing is known or nobody waits, time is not asked about."""
    assert judge(waiting=waiting, ahead=ahead, limit=100, capacity=capacity, timeout_s=timeout_s) is None


@pytest.mark.parametrize(
    ("waiting", "capacity", "retry_after_s"),
    [(100, UNKNOWN, 1.0), (100, LIVE, 1.0), (149, LIVE, 5.0), (100_000, LIVE, 300.0)],
    ids=["speed unknown", "soon", "later", "at most five minutes"],
)
def test_a_full_lane(waiting: int, capacity: Capacity, retry_after_s: float) -> None:
    """Triton's text, and when there will be room."""
    refusal = judge(waiting=waiting, ahead=waiting, limit=100, capacity=capacity, timeout_s=1e9)

    assert type(refusal) is QueueFull
    assert (refusal.message, refusal.retry_after_s) == ("Exceeds maximum queue size", retry_after_s)


@pytest.mark.parametrize(
    ("ahead", "capacity", "timeout_s", "wait", "retry_after_s"),
    [
        (50, LIVE, 1.0, "5.0 s", 4.0),
        (11, LIVE, 1.0, "1.1 s", 1.0),
        (1, ASLEEP, 10.0, "30.1 s", 21.0),
        (1_000_000, LIVE, 60.0, "100000.0 s", 300.0),
    ],
    ids=["backlog", "a little late", "cold start", "at most five minutes"],
)
def test_a_deadline_that_cannot_be_met(
    ahead: int, capacity: Capacity, timeout_s: float, wait: str, retry_after_s: float
) -> None:
    """Refused with the expected wait and the timeout, and with the time until it would be feasible."""
    refusal = judge(waiting=0, ahead=ahead, limit=100, capacity=capacity, timeout_s=timeout_s)

    assert type(refusal) is DeadlineInfeasible
    assert refusal.message == (
        f"the requests ahead take at least {wait}, and this one is worth waiting for {timeout_s:g} s; "
        "try again later, or with a longer timeout"
    )
    assert refusal.retry_after_s == retry_after_s


@pytest.mark.parametrize(
    ("capacity", "timeout_s", "most"),
    [(UNKNOWN, 1.0, 100), (LIVE, 60.0, 100), (LIVE, 2.0, 20), (ASLEEP, 1.0, 1)],
    ids=["speed unknown", "room counts", "time counts", "never below one"],
)
def test_up_to_so_many_nothing_is_judged(capacity: Capacity, timeout_s: float, most: int) -> None:
    """And up to there `judge` refuses nothing."""
    assert most_waiting(100, capacity, timeout_s) == most
    assert judge(waiting=most - 1, ahead=most - 1, limit=100, capacity=capacity, timeout_s=timeout_s) is None


@pytest.mark.parametrize(
    ("policy", "asked_s", "timeout_s"),
    [
        (QueuePolicy(), 0.5, 0.0),
        (QueuePolicy(allow_override=True), 0.5, 0.0),
        (QueuePolicy(timeout_s=1.0), 0.5, 1.0),
        (QueuePolicy(timeout_s=1.0, allow_override=True), 0.5, 0.5),
        (QueuePolicy(timeout_s=1.0, allow_override=True), 0.0, 1.0),
        (QueuePolicy(timeout_s=1.0, allow_override=True), 1.0, 1.0),
        (QueuePolicy(timeout_s=1.0, allow_override=True), 2.0, 1.0),
    ],
    ids=["none", "no default", "not allowed", "shorter", "not asked", "equal", "longer"],
)
def test_a_request_may_only_shorten_a_queue_timeout(policy: QueuePolicy, asked_s: float, timeout_s: float) -> None:
    """Triton's rule: 0 < asked < default (reference §3.3)."""
    assert queue_timeout_s(policy, asked_s) == timeout_s
