"""What is refused at the door: pure decisions about a full lane, a deadline that can't be met, and a queue timeout.

The texts and codes are Triton's where Triton has the case (reference §3.3); `Retry-After` tells when it is worth trying
again, as far as is known.
"""

import math

from qinfer.control.capacity import Capacity
from qinfer.errors import DeadlineInfeasible, Overloaded, QueueFull
from qinfer.repository.spec import QueuePolicy

MAX_RETRY_AFTER_S = 300.0
"""The longest `Retry-After`: the load will be another by then."""


def judge(*, waiting: int, ahead: int, limit: int, capacity: Capacity, timeout_s: float) -> Overloaded | None:
    """Decides whether a request may enter a lane.

    Where nobody is ahead it may always: a model that is scaled to zero must be able to wake, however long that takes.
    Where the speed is unknown, only the lane's limit counts.

    Args:
        waiting: Entries in its lane.
        ahead: Entries in its lane and those of higher priority.
        limit: Entries that its lane may hold.
        capacity: How fast they are executed.
        timeout_s: How long its answer is worth waiting for.

    Returns:
        Why it is refused; `None` when it may enter.
    """
    rps = capacity.rps
    if waiting >= limit:
        return QueueFull("Exceeds maximum queue size", _bounded((waiting - limit + 1) / rps if rps else 1.0))
    if not rps or not ahead:
        return None
    wait_s = capacity.start_s + ahead / rps
    if wait_s <= timeout_s:
        return None
    return DeadlineInfeasible(
        f"the requests ahead take about {wait_s:.1f} s, and this one is worth waiting for {timeout_s:g} s; "
        "try again later, or with a longer timeout",
        _bounded(wait_s - timeout_s),
    )


def most_waiting(limit: int, capacity: Capacity, timeout_s: float) -> int:
    """Returns how many entries a lane may hold before `judge` could refuse a request with this timeout."""
    if not capacity.rps:
        return limit
    return min(limit, max(int((timeout_s - capacity.start_s) * capacity.rps), 1))


def queue_timeout_s(policy: QueuePolicy, asked_s: float) -> float:
    """Returns how long a request may wait; 0 = as long as its deadline allows.

    Its own `timeout` counts only where the policy allows it, and only to shorten a timeout that there is: Triton's
    rule `0 < asked < default` (reference §3.3).
    """
    if policy.allow_override and 0 < asked_s < policy.timeout_s:
        return asked_s
    return policy.timeout_s


def _bounded(seconds: float) -> float:
    return float(min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S))
