"""What is refused at the door: a full lane, and a deadline that can't be met; and how much waits in the lanes.

The decisions are pure; their texts and codes are Triton's where Triton has the case (reference §3.3), and `Retry-After`
tells when it is worth trying again, as far as is known. A lane's depth is what the broker says every `POLL_S` seconds,
less what of it was this process's own, plus what is its own now: its own requests are counted exactly, those of others
are up to `POLL_S` old. Nothing is polled while nothing is asked.
"""

import asyncio
import math
from collections.abc import Sequence

from qinfer.errors import BrokerUnavailable, DeadlineInfeasible, Overloaded, QueueFull
from qinfer.models.catalog import Catalog, Served
from qinfer.models.readiness import Capacity
from qinfer.models.routes import Route
from qinfer.models.spec import QueuePolicy
from qinfer.queue.base import Delivery, Lane

POLL_S = 0.1
"""Seconds between two looks at the depths."""

_QUIET_POLLS = 20
"""Looks without a request after which a version is no longer polled."""

MAX_RETRY_AFTER_S = 300.0
"""The longest `Retry-After`: the load will be another by then."""


class Load:
    """What is known of one lane.

    Attributes:
        lane: The lane.
        own: This process's requests in it: submitted, and not yet answered.
        left: This process's requests that were answered or given up since the last look.
        others: Those of others, at the last look.
        most: Up to so many entries nothing needs to be judged, for a request of the default timeout.
    """

    __slots__ = ("lane", "left", "most", "others", "own")

    def __init__(self, lane: Lane, most: int) -> None:
        self.lane = lane
        self.own = 0
        self.left = 0
        self.others = 0
        self.most = most

    @property
    def waiting(self) -> int:
        """Entries in the lane."""
        return self.own + self.others


class _Group:
    """The lanes of one version, which are looked at together."""

    def __init__(self, served: Served, loads: Sequence[Load]) -> None:
        self.served = served
        self.loads = loads
        self.lanes = [load.lane for load in loads]
        self.asked = True
        self.quiet_polls = 0


class Backlog:
    """The loads of the lanes in use; see the module docstring.

    Args:
        delivery: Tells the depths.
        catalog: Tells the lanes of a version, and how fast they are worked off.
    """

    def __init__(self, delivery: Delivery, catalog: Catalog) -> None:
        self._delivery = delivery
        self._catalog = catalog
        self._loads: dict[Lane, tuple[Load, _Group]] = {}
        self._groups: dict[tuple[str, int], _Group] = {}
        self._wanted = asyncio.Event()

    def load(self, served: Served, lane: Lane) -> Load:
        """Returns the load of a lane, which is polled from now on."""
        found = self._loads.get(lane)
        if found is None:
            found = self._begin(served, lane)
        load, group = found
        group.asked, group.served = True, served
        return load

    def judge(self, served: Served, route: Route, limit: int, timeout_s: float) -> Overloaded | None:
        """Decides whether a request may enter; `limit` is how many entries its lane may hold."""
        waiting = self.load(served, route.lane).waiting
        ahead = sum(self.load(served, lane).waiting for lane in route.ahead)
        return judge(waiting=waiting, ahead=ahead, limit=limit, capacity=self._capacity(served), timeout_s=timeout_s)

    async def run(self) -> None:
        """Looks at the lanes in use until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._groups:
                await self.poll()
                await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Looks once, in one write for all; versions that nobody asks for any more are forgotten."""
        for key, group in list(self._groups.items()):
            group.quiet_polls = 0 if group.asked or any(load.own for load in group.loads) else group.quiet_polls + 1
            group.asked = False
            if group.quiet_polls > _QUIET_POLLS:
                del self._groups[key]
                for lane in group.lanes:
                    del self._loads[lane]
        await asyncio.gather(*(self._look(group) for group in self._groups.values()))

    async def _look(self, group: _Group) -> None:
        own = [load.own for load in group.loads]
        # Workers finish entries a little after they have answered: until then they are in the lane, and nobody's.
        unfinished = [min(load.left, self._in_hands(group.served)) for load in group.loads]
        for load in group.loads:
            load.left = 0
        try:
            depths = await self._delivery.depth(group.lanes)
        except BrokerUnavailable:
            return  # requests can't be submitted either, and are told so
        most = self._most(group.served)
        for load, depth, mine, nobodys in zip(group.loads, depths, own, unfinished, strict=True):
            load.others = max(depth - mine - nobodys, 0)
            load.most = most

    def _begin(self, served: Served, lane: Lane) -> tuple[Load, _Group]:
        key, most = (served.spec.name, served.version), self._most(served)
        known = self._groups.get(key)  # a new generation may have other lanes
        lanes = dict.fromkeys((*self._catalog.lanes(*key), lane, *(known.lanes if known else ())))
        loads = [self._loads[one][0] if one in self._loads else Load(one, most) for one in lanes]
        group = self._groups[key] = _Group(served, loads)
        for load in loads:
            self._loads[load.lane] = load, group
        self._wanted.set()
        return self._loads[lane]

    def _most(self, served: Served) -> int:
        spec = served.spec
        return most_waiting(spec.lane_capacity, self._capacity(served), spec.default_timeout_s)

    def _in_hands(self, served: Served) -> int:
        """Returns how many entries the live workers may have answered and not finished: two batches an instance."""
        spec = served.spec
        return 2 * self._capacity(served).workers * spec.instance_count * max(spec.max_batch_size, 1)

    def _capacity(self, served: Served) -> Capacity:
        return self._catalog.capacity(served.spec.name, served.version)


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
