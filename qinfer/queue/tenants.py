"""The parts of the queue that tenants may use: quotas, shared by all gateways, and shares of lanes.

Each gateway leases a part of a quota ahead of use: `qinfer_api.quotas` decides by the tokens and places that it holds
until the next `exchange`. The guarantees, each with a test in `tests/contract/queue/test_quotas.py`:

1. Gateways together never hold more tokens than the bucket has, nor more places than the quota.
2. A gateway that uses more than its part puts the tenant into debt, which later tokens pay first.
3. A single active gateway holds all; several divide it by demand.
4. The part of a dead gateway is free again when its lease ends.

`lua/common/places.lua` gives a tenant its stream of a lane (ADR 0024); a process remembers it, to submit without the
script. An outdated answer is harmless: a deleted stream takes no entries (`XADD NOMKSTREAM`), and an entry in another
tenant's stream is fetched like any other.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from qinfer.queue import keys
from qinfer.queue.connection import Argument, Template
from qinfer.queue.entries import Lane, divided_of, share_of
from qinfer.queue.router import Router, load_script, ttl_ms

_EXCHANGE = load_script("quotas/exchange", "now_ms")


class QuotaLimits(NamedTuple):
    """The quota of a tenant: tokens per second (0 = unlimited), most tokens, and places, one a request in flight."""

    rate: float
    burst: float
    places: int


class QuotaUse(NamedTuple):
    """One gateway's use: tokens used since the last exchange, requests that came lately, and requests in flight."""

    used: float = 0.0
    demand: float = 0.0
    in_flight: int = 0


class QuotaLease(NamedTuple):
    """A gateway's part of a quota: tokens and places; `level` is the tokens of all gateways, negative = a debt.

    `part` is the gateway's share of new tokens, from 0 to 1.
    """

    tokens: float
    level: float
    part: float
    places: int


class Quotas:
    """The quotas of one gateway."""

    def __init__(self, router: Router, gateway: str) -> None:
        self._router = router
        self._gateway = gateway

    async def exchange(self, tenant: str, limits: QuotaLimits, use: QuotaUse, lease_s: float) -> QuotaLease:
        """Reports use, and renews the lease for `lease_s` seconds; 0 gives everything back."""
        key = keys.quota(tenant).encode()
        words = (*limits, *use, ttl_ms(lease_s) if lease_s else 0)
        tokens, level, part, places = await self._router.run(keys.slot(key), _EXCHANGE, [key], self._gateway, *words)
        return QuotaLease(float(tokens), float(level), float(part), places)


KNOWN_S = 30.0
"""Half of the time until Redis may reassign a place."""

CROWDED_S = 1.0
"""The same for shared places; their tenants use the shorter of two streams."""

_ASKING_S = 1.0
_NOT_KNOWN = -1
_MAX_PLACES = 65536


class Places:
    """Known places; `weigh` returns a tenant's weight, 0 = unknown."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self.weigh: Callable[[str], int] = _unknown
        self._places: dict[tuple[Lane, str], tuple[Lane, float]] = {}

    def find(self, lane: Lane, tenant: str) -> Lane | None:
        """Returns the stream for a tenant's entries; `None` = the script decides."""
        known = self._places.get((lane, tenant))
        if known is None:
            return None
        stream, until_s = known
        now_s = self._monotonic_s()
        if now_s < until_s:
            return stream
        # One entry asks; the next entries go to the last stream.
        self._places[lane, tenant] = stream, now_s + _ASKING_S
        return None

    def last(self, lane: Lane, tenant: str) -> Lane:
        """Returns a tenant's last stream, or an empty share."""
        known = self._places.get((lane, tenant))
        return share_of(lane, _NOT_KNOWN) if known is None else known[0]

    def learn(self, lane: Lane, tenant: str, number: int, *, is_shared: bool) -> None:
        """Remembers a tenant's share of a lane."""
        if len(self._places) >= _MAX_PLACES:
            self._places.clear()
        kept_s = CROWDED_S if is_shared else KNOWN_S
        self._places[lane, tenant] = share_of(lane, number), self._monotonic_s() + kept_s

    def drop_place(self, lane: Lane, tenant: str) -> None:
        """Forgets a tenant's stream, which is gone."""
        self._places.pop((lane, tenant), None)


@lru_cache(maxsize=65536)
def adding(lane: Lane, endpoint: str = "", tenant: str = "") -> tuple[int, Template]:
    """Returns a lane's slot, and the command that adds a frame."""
    return keys.lane_slot(lane), Template(b"XADD", keys.lane(lane), b"*", b"f", after=_mark(endpoint, tenant))


@lru_cache(maxsize=65536)
def adding_to_share(stream: Lane, endpoint: str, tenant: str) -> tuple[int, Template]:
    """Returns a share's slot, and the command that adds a frame if the stream exists."""
    words = (b"XADD", keys.lane(stream), b"NOMKSTREAM", b"*", b"f")
    return keys.lane_slot(stream), Template(*words, after=_mark(endpoint, tenant))


def _mark(endpoint: str, tenant: str) -> tuple[Argument, ...]:
    if not endpoint:
        return ()
    return (b"e", endpoint, b"t", tenant) if tenant else (b"e", endpoint)


def is_placed(stream: Lane) -> bool:
    """Tells whether `Places.last` knew the stream."""
    return divided_of(stream)[1] != _NOT_KNOWN


def _unknown(_: str) -> int:
    return 0
