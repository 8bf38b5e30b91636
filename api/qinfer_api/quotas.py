"""Quotas of tenants: a token bucket and a limit of requests in flight, over all gateways.

A gateway decides by its lease from Redis (`qinfer.queue.quotas`), exchanged every `EVERY_S`, and at once after a
refusal or a first request. Without a lease, the gateway uses a bucket of its own; the next exchange reports that use.
"""

import asyncio
import logging
import math
from collections.abc import Callable

from qinfer.core.api_keys import ApiKey
from qinfer.core.retry import OutageLog
from qinfer.errors import QinferError, QuotaExceeded
from qinfer.queue.quotas import QuotaLease, QuotaLimits, Quotas, QuotaUse

logger = logging.getLogger(__name__)

EVERY_S = 0.1
"""Seconds between two exchanges of an active tenant."""

LEASE_S = 2.0
"""Seconds without an exchange after which a lease is free again."""

_IDLE_S = 2.0  # after a request
_PAUSE_S = 0.005  # after an exchange
_TENANTS_PER_S = 2000  # exchange their leases; more active tenants wait longer
_KEPT_DEMAND = 0.5  # the older demand's share


class Quota:
    """The quota of one tenant at this gateway; the quota calls `wake` when it needs a lease."""

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
        """Applies the limits of an API key."""
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
        """Charges a request to the rate."""
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
        """Refunds the last charge."""
        self._tokens = min(self._tokens + 1.0, self._burst)
        self._used -= 1.0

    def spare(self, now_s: float) -> float:
        """Returns the room for background requests; half the burst is kept."""
        if not self._rate:
            return math.inf
        self._fill(now_s)
        others = max(self._level - self._used - self._tokens, 0.0) if self._is_leased(now_s) else 0.0
        return max(min(self._tokens, self._tokens + others - self._burst // 2), 0.0)

    def check_in_flight(self, now_s: float) -> None:
        """Checks the requests in flight."""
        most = self._max_in_flight
        if not most:
            return
        self._count_request(now_s)
        if self.in_flight >= (min(self._places, most) if self._is_leased(now_s) else most):
            self.wake(self)
            raise QuotaExceeded(
                f"tenant '{self.tenant}' has {most} requests in flight, as many as it may; wait for an answer first"
            )

    def take_use(self) -> QuotaUse:
        """Returns the use since the last report, and resets it; `not_told` restores it."""
        self._demand *= _KEPT_DEMAND
        use = QuotaUse(self._used, self._demand, self.in_flight)
        self._used = 0.0
        return use

    def not_told(self, use: QuotaUse) -> None:
        """Restores a use that could not be reported; it counts twice if Redis got the report."""
        self._used += use.used

    def lease(self, leased: QuotaLease, now_s: float) -> None:
        """Applies a lease, less the use since the exchange began."""
        self._tokens = leased.tokens - self._used
        self._level, self._part, self._places = leased.level, leased.part, leased.places
        self._filled_at_s, self._leased_until_s = now_s, now_s + LEASE_S

    def return_lease(self, leased: QuotaLease, now_s: float) -> None:
        """Ends the lease; the quota's level over all gateways decides about the next requests."""
        self._tokens, self._filled_at_s, self._leased_until_s = leased.level - self._used, now_s, -math.inf

    def is_idle(self, now_s: float) -> bool:
        """Returns whether there is no recent request."""
        return not self.in_flight and now_s - self._asked_at_s > _IDLE_S

    def _count_request(self, now_s: float) -> None:
        """Counts a request; the first after a pause asks for a lease."""
        was_idle = now_s - self._asked_at_s > _IDLE_S
        self._asked_at_s = now_s
        self._demand += 1.0
        if was_idle:
            self.wake(self)

    def _is_leased(self, now_s: float) -> bool:
        return now_s < self._leased_until_s

    def _fill(self, now_s: float) -> None:
        """Adds the tokens since the last call; without a lease, at the full rate."""
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
        self._outage = OutageLog(logger, "quotas count in this gateway alone", "quotas count over all gateways again")

    def wake(self, quota: Quota) -> None:
        """Exchanges a tenant's lease soon; see `Quota.wake`."""
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
