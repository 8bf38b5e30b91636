"""Quotas of tenants, which hold over all gateways: each gateway leases a part of what is left, ahead of use.

    exchange ──▶ tokens and places that this gateway holds: it decides by them, without asking ──▶ exchange …

The promises, each a test in `tests/contract/queue/test_quotas.py`:

1. Gateways never hold more tokens together than the bucket has, nor more places than there are.
2. What a gateway has used beyond what it held is a debt of the tenant: it is paid before anything else is granted.
3. A gateway that alone is asked holds all; of several, each holds a part by what it is asked for.
4. What a gateway holds that is gone is free again when its lease ends.
"""

from typing import NamedTuple

from qinfer.queue import keys
from qinfer.queue.router import Router, load_script, ttl_ms

_EXCHANGE = load_script("quotas/exchange", "now_ms")


class Limits(NamedTuple):
    """The quota of a tenant.

    Attributes:
        rate: Tokens that come a second; 0 = there is no rate.
        burst: Tokens that there are at most.
        places: Requests that may be in flight.
    """

    rate: float
    burst: float
    places: int


class Use(NamedTuple):
    """The use of a tenant's quota at one gateway, as it tells it in an exchange.

    Attributes:
        used: Tokens used since the last exchange.
        demand: How much is asked for, in tokens; what counts is how it compares to other gateways'.
        in_flight: Requests in flight.
    """

    used: float = 0.0
    demand: float = 0.0
    in_flight: int = 0


class Leased(NamedTuple):
    """The part of a tenant's quota that one gateway holds after an exchange.

    Attributes:
        tokens: That it may use.
        level: All that there are over all gateways; below 0 = a debt.
        part: Its part of those that come from now on.
        places: Requests that it may have in flight.
    """

    tokens: float
    level: float
    part: float
    places: int


class Quotas:
    """The quotas as one gateway leases them; every coroutine raises `BrokerUnavailable` without Redis.

    Args:
        router: The way to Redis.
        gateway: The gateway.
    """

    def __init__(self, router: Router, gateway: str) -> None:
        self._router = router
        self._gateway = gateway

    async def exchange(self, tenant: str, limits: Limits, use: Use, lease_s: float) -> Leased:
        """Tells what was used, and leases anew.

        Args:
            tenant: Whose quota.
            limits: What it is.
            use: What this gateway has used, and is asked for.
            lease_s: What it holds is free again after so long without an exchange; 0 = it gives back all now.
        """
        key = keys.quota(tenant).encode()
        words = (*limits, *use, ttl_ms(lease_s) if lease_s else 0)
        tokens, level, part, places = await self._router.run(keys.slot(key), _EXCHANGE, [key], self._gateway, *words)
        return Leased(float(tokens), float(level), float(part), places)
