"""Quotas of tenants: a token bucket and a limit of requests in flight, over all gateways.

`Quota.charge` and `Quota.check_in_flight` decide about each request without asking Redis, by the gateway's *lease* of a
part of the quota (`qinfer.queue.tenants`). The gateway exchanges the lease every `EVERY_S` seconds, and at once after a
refusal or a first request. Without a lease it uses a bucket of its own, and reports that use at the next exchange.
`qinfer.submission.pending` counts the requests in flight.
"""

import asyncio
import logging
import math
from collections.abc import Callable

from qinfer.core.api_keys import ApiKey
from qinfer.core.retry import OutageLog
from qinfer.errors import QinferError, QuotaExceeded
from qinfer.queue.tenants import QuotaLease, QuotaLimits, Quotas, QuotaUse

logger = logging.getLogger(__name__)

EVERY_S = 0.1

LEASE_S = 2.0
"""Seconds without an exchange after which a lease is free again."""

# Seconds after its last request for which a tenant counts as active.
_IDLE_S = 2.0
# The shortest pause between two rounds of exchanges.
_PAUSE_S = 0.005
# Tenants whose leases are exchanged in a second; with more active ones, each waits longer.
_TENANTS_PER_S = 2000
# The part of the earlier demand that an exchange keeps.
_KEPT_DEMAND = 0.5


class Quota:
    """One tenant's quota at this gateway; it calls `wake` when it needs a lease."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.tenant = key.tenant
        self.in_flight = 0
        self.wake: Callable[[Quota], None] = lambda _: None
        self._filled_at_s = now_s
        self._used = self._demand = 0.0
        self._asked_at_s = -math.inf
        self._level, self._part = math.inf, 1.0
        self._leased_until_s = -math.inf
        self.limit(key)
        self._tokens = self._burst

    def limit(self, key: ApiKey) -> None:
        """Takes the limits of one of the tenant's keys."""
        self._rate = key.rate_per_s
        self._burst = float(key.burst or max(key.rate_per_s, 1.0))
        self._max_in_flight: int = key.max_in_flight
        self._places = self._max_in_flight
        self.weight = key.weight

    @property
    def limits(self) -> QuotaLimits:
        """The limits over all gateways."""
        return QuotaLimits(self._rate, self._burst, self._max_in_flight)

    def charge(self, now_s: float) -> None:
        """Takes a token for a request, or raises `QuotaExceeded`."""
        if not self._rate:
            return
        self._count_request(now_s)
        self._fill(now_s)
        if self._tokens < 1.0:
            self.wake(self)
            raise QuotaExceeded(
                f"tenant '{self.tenant}' has used up its rate of {self._rate:g} requests a second; send fewer",
                (1.0 - self._tokens) / self._rate,
            )
        self._tokens -= 1.0
        self._used += 1.0

    def give_back(self) -> None:
        """Gives back the token of the last charge."""
        self._tokens = min(self._tokens + 1.0, self._burst)
        self._used -= 1.0

    def spare(self, now_s: float) -> float:
        """Returns how many background requests have room; half the burst stays for others."""
        if not self._rate:
            return math.inf
        self._fill(now_s)
        others = max(self._level - self._used - self._tokens, 0.0) if self._is_leased(now_s) else 0.0
        return max(min(self._tokens, self._tokens + others - self._burst // 2), 0.0)

    def check_in_flight(self, now_s: float) -> None:
        """Raises `QuotaExceeded` if all places of the tenant are taken."""
        most = self._max_in_flight
        if not most:
            return
        self._count_request(now_s)
        if self.in_flight >= (min(self._places, most) if self._is_leased(now_s) else most):
            self.wake(self)
            raise QuotaExceeded(
                f"tenant '{self.tenant}' has {most} requests in flight, the most that it may have; wait for an answer"
            )

    def take_use(self) -> QuotaUse:
        """Returns the use to report, and counts from zero again; `not_told` adds a use whose report failed."""
        self._demand *= _KEPT_DEMAND
        use = QuotaUse(self._used, self._demand, self.in_flight)
        self._used = 0.0
        return use

    def not_told(self, use: QuotaUse) -> None:
        """Adds a use whose report failed; if it did arrive, the use counts twice."""
        self._used += use.used

    def lease(self, leased: QuotaLease, now_s: float) -> None:
        """Takes a lease, less the tokens that were used since it was asked for."""
        self._tokens = leased.tokens - self._used
        self._level, self._part, self._places = leased.level, leased.part, leased.places
        self._filled_at_s, self._leased_until_s = now_s, now_s + LEASE_S

    def return_lease(self, leased: QuotaLease, now_s: float) -> None:
        """Ends the lease; until the next, the tokens of all gateways together decide."""
        self._tokens, self._filled_at_s, self._leased_until_s = leased.level - self._used, now_s, -math.inf

    def is_idle(self, now_s: float) -> bool:
        """Returns whether the tenant has no request in flight, nor sent one lately."""
        return not self.in_flight and now_s - self._asked_at_s > _IDLE_S

    def _count_request(self, now_s: float) -> None:
        was_idle = now_s - self._asked_at_s > _IDLE_S
        self._asked_at_s = now_s
        self._demand += 1.0
        if was_idle:
            self.wake(self)

    def _is_leased(self, now_s: float) -> bool:
        return now_s < self._leased_until_s

    def _fill(self, now_s: float) -> None:
        rate = self._rate * self._part if self._is_leased(now_s) else self._rate
        self._tokens = min(self._tokens + (now_s - self._filled_at_s) * rate, self._burst)
        self._filled_at_s = now_s


class QuotaLeases:
    """Exchanges the leases of active tenants."""

    def __init__(self, quotas: Quotas, now_s: Callable[[], float]) -> None:
        self._quotas = quotas
        self._now_s = now_s
        self._active: dict[str, Quota] = {}
        self._woken = asyncio.Event()
        self._outage = OutageLog(logger, "quotas hold for this gateway alone", "quotas hold for all gateways again")

    def wake(self, quota: Quota) -> None:
        """Makes `run` exchange a tenant's lease soon; see `Quota.wake`."""
        self._active[quota.tenant] = quota
        self._woken.set()

    async def run(self) -> None:
        """Exchanges leases until cancelled."""
        while True:
            if not self._active:
                await self._woken.wait()
            self._woken.clear()
            count = len(self._active)
            await asyncio.gather(*map(self._exchange, list(self._active.values())))
            await asyncio.sleep(_PAUSE_S)
            try:
                async with asyncio.timeout(max(EVERY_S, count / _TENANTS_PER_S)):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _exchange(self, quota: Quota) -> None:
        leaves, use = quota.is_idle(self._now_s()), quota.take_use()
        try:
            leased = await self._quotas.exchange(quota.tenant, quota.limits, use, 0.0 if leaves else LEASE_S)
        except QinferError as error:
            quota.not_told(use)
            self._outage.failed(error.message)
            return
        except asyncio.CancelledError:
            quota.not_told(use)
            raise
        self._outage.over()
        if not leaves:
            quota.lease(leased, self._now_s())
            return
        quota.return_lease(leased, self._now_s())
        if quota.is_idle(self._now_s()):
            self._active.pop(quota.tenant, None)
