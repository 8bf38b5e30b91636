"""Quotas of tenants at one gateway: what it holds of them, and what it does until it knows."""

import asyncio
import math
from typing import Any

import pytest

from qinfer.core.api_keys import ApiKey
from qinfer.errors import BrokerUnavailable, QuotaExceeded
from qinfer.queue.tenants import QuotaLease, QuotaLimits, Quotas, QuotaUse
from qinfer.testing import FakeClock, eventually
from qinfer_api.quotas import LEASE_S, Quota, QuotaLeases


def quota_of(clock: FakeClock, **limits: Any) -> Quota:
    return Quota(ApiKey(id="k", sha256="0" * 64, tenant="acme", **limits), clock.monotonic_s())


def let_in(quota: Quota, clock: FakeClock, most: int = 1000) -> int:
    """Charges until it is refused; returns how many were let in."""
    for count in range(most):
        try:
            quota.charge(clock.monotonic_s())
        except QuotaExceeded:
            return count
    return most


def test_a_gateway_decides_alone_until_it_has_a_lease() -> None:
    """By the whole quota; what it let in is told."""
    clock = FakeClock()
    quota = quota_of(clock, rate_per_s=2.0, burst=5)

    assert let_in(quota, clock) == 5
    assert quota.take_use().used == 5.0
    assert quota.take_use().used == 0.0


def test_with_a_lease_it_lets_in_what_it_holds() -> None:
    """And its part of what comes; what was let in while the lease was asked for is a part of it."""
    clock = FakeClock()
    quota = quota_of(clock, rate_per_s=2.0, burst=20)
    quota.take_use()
    quota.charge(clock.monotonic_s())

    quota.lease(QuotaLease(tokens=4.0, level=20.0, part=0.5, places=0), clock.monotonic_s())

    assert let_in(quota, clock) == 3
    clock.advance(1.0)
    assert let_in(quota, clock) == 1
    assert quota.take_use().used == 5.0


def test_a_lease_that_was_not_renewed_leaves_it_alone_again() -> None:
    """Redis is away: it goes on with what it had, and with the whole rate."""
    clock = FakeClock()
    quota = quota_of(clock, rate_per_s=10.0, burst=100)
    quota.lease(QuotaLease(tokens=0.0, level=0.0, part=0.25, places=0), clock.monotonic_s())
    assert let_in(quota, clock) == 0

    clock.advance(LEASE_S)
    assert let_in(quota, clock) == LEASE_S * 10.0
    clock.advance(1.0)
    assert let_in(quota, clock) == 10


def test_who_leaves_begins_again_with_what_there_was() -> None:
    """A gateway that was idle for a while has no burst of its own."""
    clock = FakeClock()
    quota = quota_of(clock, rate_per_s=1.0, burst=50)

    quota.return_lease(QuotaLease(tokens=0.0, level=3.0, part=0.0, places=0), clock.monotonic_s())

    assert let_in(quota, clock) == 3


def test_places_in_flight_are_those_it_holds() -> None:
    """Without a lease all of them."""
    clock = FakeClock()
    quota = quota_of(clock, max_in_flight=8)
    quota.in_flight = 4
    quota.check_in_flight(clock.monotonic_s())

    quota.lease(QuotaLease(tokens=0.0, level=0.0, part=0.5, places=4), clock.monotonic_s())

    with pytest.raises(QuotaExceeded, match="tenant 'acme' has 8 requests in flight, the most that it may have"):
        quota.check_in_flight(clock.monotonic_s())
    quota.in_flight = 3
    quota.check_in_flight(clock.monotonic_s())


def test_what_nobody_waits_for_leaves_half_of_the_burst_over_all_gateways() -> None:
    """The room is that of all, and no more than is held here."""
    clock = FakeClock()
    quota = quota_of(clock, rate_per_s=1.0, burst=20)
    assert quota.spare(clock.monotonic_s()) == 10.0

    for tokens, level, room in ((5.0, 20.0, 5.0), (5.0, 12.0, 2.0), (5.0, 8.0, 0.0)):
        quota.lease(QuotaLease(tokens=tokens, level=level, part=0.5, places=0), clock.monotonic_s())
        assert quota.spare(clock.monotonic_s()) == room


def test_a_lease_is_asked_for_by_the_first_and_by_who_is_refused() -> None:
    """Not by each request."""
    clock = FakeClock()
    woken: list[Quota] = []
    quota = quota_of(clock, rate_per_s=0.01, burst=3)
    quota.wake = woken.append

    for _ in range(3):
        quota.charge(clock.monotonic_s())
    assert woken == [quota]
    with pytest.raises(QuotaExceeded):
        quota.charge(clock.monotonic_s())
    assert woken == [quota, quota]


def test_a_tenant_without_limits_is_never_asked_for() -> None:
    """It costs nothing."""
    clock = FakeClock()
    quota = quota_of(clock)
    quota.wake = pytest.fail  # type: ignore[assignment]

    quota.check_in_flight(clock.monotonic_s())
    quota.charge(clock.monotonic_s())

    assert quota.spare(clock.monotonic_s()) == math.inf
    assert quota.is_idle(clock.monotonic_s())


class Exchanges(Quotas):
    """Quotas that note what they are told, and are away when told to be."""

    def __init__(self) -> None:
        self.told: list[tuple[QuotaUse, float]] = []
        self.is_away = False

    async def exchange(self, tenant: str, limits: QuotaLimits, use: QuotaUse, lease_s: float) -> QuotaLease:
        self.told.append((use, lease_s))
        if self.is_away:
            raise BrokerUnavailable("gone")
        return QuotaLease(limits.burst, limits.burst, 1.0, limits.places)


async def test_an_active_tenant_is_exchanged_until_it_is_idle() -> None:
    """What could not be told is told again; the last exchange gives back."""
    clock, quotas = FakeClock(), Exchanges()
    leases = QuotaLeases(quotas, clock.monotonic_s)
    quota = quota_of(clock, rate_per_s=5.0, burst=10)
    quota.wake = leases.wake
    running = asyncio.create_task(leases.run())

    quotas.is_away = True
    let_in(quota, clock, 4)
    await eventually(lambda: len(quotas.told) >= 2, description="two exchanges")
    quotas.is_away = False
    await eventually(lambda: len(quotas.told) >= 4, description="two more")
    clock.advance(60.0)
    await eventually(lambda: quotas.told[-1][1] == 0.0, description="the last exchange")
    count = len(quotas.told)
    quota.charge(clock.monotonic_s())
    await eventually(lambda: len(quotas.told) > count, description="an exchange of the next request")

    running.cancel()
    used = [use.used for use, _ in quotas.told]
    assert used[:3] == [4.0, 4.0, 4.0]
    assert sum(used[3:count]) == 0.0
    assert used[count] == 1.0
