"""Quotas of tenants, shared by all gateways: each gateway leases a part ahead of use.

`qinfer_api.quotas` decides by the tokens and places that its gateway holds until the next `exchange`.

The guarantees, each with a test in `tests/contract/queue/test_quotas.py`:

1. Gateways together never hold more tokens than the bucket has, nor more places than the quota.
2. A gateway that uses more than its part puts the tenant into debt, which later tokens pay first.
3. A single active gateway holds all; several divide it by demand.
4. The part of a dead gateway is free again when its lease ends.
"""

from typing import NamedTuple

from qinfer.queue import keys
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
