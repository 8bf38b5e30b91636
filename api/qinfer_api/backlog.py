"""How much waits in the lanes that this gateway is asked for: their depths, polled, and its own requests since.

A lane's depth is what the broker says every `POLL_S` seconds, less what of it was this gateway's own, plus what is its
own now: its own requests are counted exactly, those of others are up to `POLL_S` old. Nothing is polled while nothing
is asked.
"""

import asyncio
import logging
from collections.abc import Sequence

from qinfer.control.admission import judge, most_waiting
from qinfer.control.capacity import Capacity
from qinfer.control.catalog import Catalog, Served
from qinfer.control.routes import Route
from qinfer.delivery.base import Delivery, Lane
from qinfer.errors import BrokerUnavailable, Overloaded

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two looks at the depths."""

_QUIET_POLLS = 20
"""Looks without a request after which a version is no longer polled."""


class Load:
    """What is known of one lane.

    Attributes:
        lane: The lane.
        own: This gateway's requests in it: submitted, and not yet answered.
        left: This gateway's requests that were answered or given up since the last look.
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
