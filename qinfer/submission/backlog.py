"""Backlog: the depth of lanes, and admission.

Full lanes, and infeasible deadlines or queue timeouts, are refused, with Triton's texts and codes where it has the case
(reference §3.3). A request is refused only if it would be late at best: at the workers' highest plausible speed
(`LatencyModel.best_s`), with the fewest plausible requests of higher lanes (`Overtaking`). Shares wait
by their weights (ADR 0024).
"""

import asyncio
import math
from collections.abc import Sequence

import msgspec

from qinfer.errors import BrokerUnavailable, DeadlineInfeasible, Overloaded, QueueFull
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.readiness import Capacity
from qinfer.models.spec import LaneRoute, ModelSpec, QueuePolicy
from qinfer.queue.entries import FULL, Lane, Share, undivided
from qinfer.queue.lanes import Queue
from qinfer.queue.tenants import is_placed

POLL_S = 0.1

_BEST_START = 0.5
"""The part of the last load's time in which a worker may start, because one load is little evidence."""

_QUIET_POLLS = 20

MAX_RETRY_AFTER_S = 300.0
"""The longest `Retry-After`; beyond it the load can't be predicted."""

_HORIZONS_S = (0.5, 2.0, 8.0, 32.0, 128.0)
"""A request that may wait for a minute needs the rate of a minute."""

_DOUBT = 2.0
"""Standard deviations subtracted from the count of ended requests."""

_OCCUPIED_S = 1.0


class Overtaking:
    """The part of a model's speed that a lane takes from lower ones.

    Of the ended requests alone, one quick request between two looks has the rate of a flood; and a lane of slow
    requests is never empty. The smaller of the two is the least part. `occupied` is the part of the last second.
    """

    def __init__(self) -> None:
        self.occupied = 0.0
        self._ended = [0.0] * len(_HORIZONS_S)

    def observe(self, ended: int, passed_s: float, *, is_occupied: bool) -> None:
        """Learns from one look."""
        for number, horizon_s in enumerate(_HORIZONS_S):
            self._ended[number] = self._ended[number] * math.exp(-passed_s / horizon_s) + ended
        self.occupied += (is_occupied - self.occupied) * -math.expm1(-passed_s / _OCCUPIED_S)

    def least_rps(self, wait_s: float) -> float:
        """Returns the fewest plausible requests per second ahead of this wait."""
        longest = len(_HORIZONS_S) - 1
        number = next((at for at, horizon_s in enumerate(_HORIZONS_S) if horizon_s >= wait_s), longest)
        ended = self._ended[number]
        return max(ended - _DOUBT * math.sqrt(ended), 0.0) / _HORIZONS_S[number]

    def least_part(self, wait_s: float, rps: float) -> float:
        """Returns the least part of `rps` that the lane takes."""
        return min(self.least_rps(wait_s) / rps, self.occupied)


class LaneLoad(msgspec.Struct, eq=False):
    """The load of a lane, or of a tenant's share of it; others' parts are of the last look.

    Attributes:
        left: Own requests that ended since the last look.
        most: Below this many entries no default timeout needs a judgement.
    """

    lane: Lane
    most: int
    own: int = 0
    left: int = 0
    executed: int = 0
    others: int = 0
    overtaking: Overtaking = msgspec.field(default_factory=Overtaking)
    beside: int = 0
    part: float = 1.0

    @property
    def waiting(self) -> int:
        """The entries in the stream."""
        return self.own + self.others

    @property
    def ahead(self) -> float:
        """The entries ahead of a new one, as shares take turns."""
        waiting = self.own + self.others
        return waiting + min(self.beside, (waiting + 1) * (1 - self.part) / self.part) if self.beside else waiting

    @property
    def all(self) -> int:
        """The entries in all shares of the lane."""
        return self.own + self.others + self.beside


class _Group:
    """Lanes of one version, polled together."""

    def __init__(self, served: ServedVersion, loads: Sequence[LaneLoad]) -> None:
        self.served = served
        self.loads = loads
        self.lanes = [load.lane for load in loads]
        self.asked = True
        self.quiet_polls = 0
        self.looked_s = 0.0
        self.asked_s: float | None = None


class LaneLoads:
    """The loads of the lanes in use."""

    def __init__(self, queue: Queue, catalog: Catalog) -> None:
        self._queue = queue
        self._catalog = catalog
        self._loads: dict[Lane, tuple[LaneLoad, _Group]] = {}
        self._groups: dict[tuple[str, int], _Group] = {}
        self._wanted = asyncio.Event()

    def load(self, served: ServedVersion, lane: Lane) -> LaneLoad:
        """Returns the load of a lane, polled from now on."""
        found = self._loads.get(lane)
        if found is None:
            found = self._add_group(served, lane)
        load, group = found
        group.asked, group.served = True, served
        return load

    def judge(
        self, served: ServedVersion, route: LaneRoute, timeout_s: float, asked_s: float = 0.0, *, tenant: str = ""
    ) -> Overloaded | None:
        """Judges a request that is useful for `timeout_s` and asks for a queue timeout of `asked_s`."""
        limit = served.spec.lane_capacity
        load = self.load(served, self._queue.places.last(route.lane, tenant) if tenant else route.lane)
        ahead = sum(self.load(served, lane).all for lane in route.ahead[:-1]) + math.ceil(load.ahead)
        waiting = load.all if load.waiting >= limit * load.part else min(load.all, limit - 1)
        queue_s = 0.0 if route.policy.delay else queue_timeout_s(route.policy, asked_s)
        worth_s = min(timeout_s, queue_s or timeout_s)
        capacity = self._at_best(served, route, worth_s)
        # Executing batches may be about to end.
        at_once = capacity.workers * _batch_size(served.spec)
        return judge(waiting=waiting, ahead=ahead, at_once=at_once, limit=limit, capacity=capacity, timeout_s=worth_s)

    def known(self, lane: Lane) -> LaneLoad:
        """Returns the load of a polled lane, else one that counts nowhere."""
        found = self._loads.get(lane)
        return LaneLoad(lane, 0) if found is None else found[0]

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._groups:
                await self.poll()
                await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Reads all backlogs in one write; drops versions without recent requests."""
        for key, group in list(self._groups.items()):
            group.quiet_polls = 0 if group.asked or any(load.own for load in group.loads) else group.quiet_polls + 1
            group.asked = False
            if group.quiet_polls > _QUIET_POLLS:
                del self._groups[key]
                for lane in group.lanes:
                    del self._loads[lane]
        await asyncio.gather(*(self._poll_group(group) for group in self._groups.values()))

    async def _poll_group(self, group: _Group) -> None:
        own = [load.own for load in group.loads]
        # Tenants with unknown places are in some share of their lane.
        unplaced = {undivided(load.lane.name): load.own for load in group.loads if not is_placed(load.lane)}
        # Workers remove entries a little after they answered: until then these count as known.
        unfinished = [min(load.left, self._unfinished(group.served)) for load in group.loads]
        now_s = asyncio.get_running_loop().time()
        passed_s, group.looked_s = max(now_s - group.looked_s, POLL_S), now_s
        for load in group.loads:
            load.overtaking.observe(load.executed, passed_s, is_occupied=load.own + load.others > 0)
            load.left = load.executed = 0
        if self._capacity(group.served).workers or not any(load.waiting for load in group.loads):
            group.asked_s = None
        elif group.asked_s is None:
            group.asked_s = now_s
        try:
            shares = await self._queue.shares([lane for lane in group.lanes if undivided(lane.name) == lane.name])
        except BrokerUnavailable:
            return  # requests fail for the same reason
        most = self._most(group.served)
        of_lane = {each[0].lane.name: each for each in shares}
        for load, mine, nobodys in zip(group.loads, own, unfinished, strict=True):
            lane = undivided(load.lane.name)
            _note(load, of_lane[lane], mine + nobodys, unplaced.get(lane, 0))
            load.most = most

    def _add_group(self, served: ServedVersion, lane: Lane) -> tuple[LaneLoad, _Group]:
        key, most = (served.spec.name, served.version), self._most(served)
        known = self._groups.get(key)  # a new generation may have other lanes
        lanes = dict.fromkeys((*self._catalog.lanes(*key), lane, *(known.lanes if known else ())))
        loads = [self._loads[one][0] if one in self._loads else LaneLoad(one, most) for one in lanes]
        group = self._groups[key] = _Group(served, loads)
        for load in loads:
            self._loads[load.lane] = load, group
        self._wanted.set()
        return self._loads[lane]

    def _most(self, served: ServedVersion) -> int:
        spec = served.spec
        return most_waiting(spec.lane_capacity, self._capacity(served), spec.default_timeout_s)

    def _unfinished(self, served: ServedVersion) -> int:
        """Returns how many entries may be answered and not yet removed: two batches per instance."""
        return 2 * self._capacity(served).workers * _batch_size(served.spec)

    def _at_best(self, served: ServedVersion, route: LaneRoute, wait_s: float) -> Capacity:
        capacity = self._capacity(served)
        group = self._loads[route.ahead[-1]][1] if route.ahead[-1] in self._loads else None
        if group is None or not capacity.rps:
            return capacity
        if capacity.start_s:
            passed_s = 0.0 if group.asked_s is None else asyncio.get_running_loop().time() - group.asked_s
            capacity = capacity._replace(start_s=max(capacity.start_s * _BEST_START - passed_s, 0.0))
        above = {lane.name for lane in route.ahead[:-1]}
        higher = [load for load in group.loads if undivided(load.lane.name) in above]
        return capacity.behind(sum(load.overtaking.least_part(wait_s, capacity.rps) for load in higher))

    def _capacity(self, served: ServedVersion) -> Capacity:
        return self._catalog.capacity(served.spec.name, served.version)


def _note(load: LaneLoad, shares: Sequence[Share], known: int, unplaced: int) -> None:
    """Notes the shares; `known` are this process's entries, `unplaced` those in an unknown share."""
    total = sum(share.entries for share in shares)
    share = next((each for each in shares if each.lane == load.lane), None) or Share(load.lane, 0)
    load.others = max(share.entries - known - unplaced, 0)
    load.beside = max(total - share.entries - (unplaced if not is_placed(load.lane) else 0), 0)
    weights = sum(other.weight for other in shares if other.entries and other is not share)
    load.part = share.weight / (share.weight + weights)


def judge(
    *, waiting: int, ahead: int, at_once: int = 0, limit: int, capacity: Capacity, timeout_s: float
) -> Overloaded | None:
    """Decides whether a request may enter a lane; returns the refusal, or `None`.

    With no request ahead it always may, because a model scaled to zero must wake. At unknown speed only the limit
    counts. With `at_once` requests ahead it may enter, too: they may be about to end, or it may join their batch.
    """
    rps = capacity.rps
    if waiting >= limit:
        return QueueFull(FULL, _bounded((waiting - limit + 1) / rps if rps else 1.0))
    if not rps or ahead <= at_once:
        return None
    wait_s = capacity.start_s + ahead / rps
    if wait_s <= timeout_s:
        return None
    return DeadlineInfeasible(
        f"the requests ahead take at least {wait_s:.1f} s, and this one is worth waiting for {timeout_s:g} s; "
        "try again later, or with a longer timeout",
        _bounded(wait_s - timeout_s),
    )


def _batch_size(spec: ModelSpec) -> int:
    return spec.instance_count * max(spec.max_batch_size, 1)


def most_waiting(limit: int, capacity: Capacity, timeout_s: float) -> int:
    """Returns how many may wait before `judge` refuses this timeout."""
    if not capacity.rps:
        return limit
    return min(limit, max(int((timeout_s - capacity.start_s) * capacity.rps), 1))


def queue_timeout_s(policy: QueuePolicy, asked_s: float) -> float:
    """Returns how long a request may wait; 0 = until its deadline.

    The request's own `timeout` may only shorten the timeout of the policy: Triton's rule `0 < asked < default`
    (reference §3.3).
    """
    if policy.allow_override and 0 < asked_s < policy.timeout_s:
        return asked_s
    return policy.timeout_s


def _bounded(seconds: float) -> float:
    return float(min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S))
