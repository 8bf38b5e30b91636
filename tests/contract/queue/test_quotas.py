"""Quotas that hold over all gateways (the numbered promises of `qinfer.queue.tenants`), on each server."""

import random

import pytest

from qinfer.queue import keys
from qinfer.queue.tenants import QuotaLease, QuotaLimits, Quotas, QuotaUse
from tests.contract.conftest import RedisQueue

LEASE_S = 60.0
SLOW = QuotaLimits(0.001, 100.0, 10)
"""Next to nothing comes while a test runs."""


async def gateways(queue: RedisQueue, count: int) -> list[Quotas]:
    return [Quotas((await queue.connect()).router, f"g{number}") for number in range(count)]


async def exchange(quotas: Quotas, limits: QuotaLimits = SLOW, lease_s: float = LEASE_S, **use: float) -> QuotaLease:
    return await quotas.exchange("acme", limits, QuotaUse(**use), lease_s)  # type: ignore[arg-type]


async def test_a_gateway_alone_holds_all(queue: RedisQueue) -> None:
    """As if there were no others; it tells what it has used, and the rest is its own again."""
    [one] = await gateways(queue, 1)

    first, second = await exchange(one, demand=1.0), await exchange(one, used=30.0, demand=1.0, in_flight=4)

    assert (first.tokens, first.level, first.part, first.places) == (100.0, 100.0, 1.0, 10)
    assert second.tokens == pytest.approx(70.0, abs=0.1)
    assert second.places == 10


async def test_what_is_asked_for_elsewhere_goes_there(queue: RedisQueue) -> None:
    """Half of a part is by demand, half is equal, so that each can begin."""
    busy, quiet = await gateways(queue, 2)
    await exchange(busy, demand=30.0)

    waits = await exchange(quiet, demand=10.0)
    given = await exchange(busy, demand=30.0)
    got = await exchange(quiet, demand=10.0)

    assert (waits.tokens, given.tokens, got.tokens) == pytest.approx((0.0, 62.5, 37.5), abs=0.1)
    assert (waits.places, given.places, got.places) == (0, 7, 3)


async def test_what_was_used_beyond_is_paid_first(queue: RedisQueue) -> None:
    """A gateway that decided alone has a debt, which is all gateways'."""
    one, other = await gateways(queue, 2)
    await exchange(one, used=100.0, demand=1.0)

    late = await exchange(other, used=100.0, demand=1.0)

    assert late.tokens == 0.0
    assert late.level == pytest.approx(-100.0, abs=0.1)
    assert (await exchange(one, demand=1.0)).tokens == 0.0


async def test_tokens_come_with_time_up_to_the_burst(queue: RedisQueue) -> None:
    """By Redis' clock, for all gateways together."""
    one, other = await gateways(queue, 2)
    fast = QuotaLimits(1000.0, 5.0, 0)
    await exchange(one, fast, used=5.0, demand=1.0)

    levels = [(await exchange(other, fast, demand=1.0)).level]
    while levels[-1] < 5.0:
        levels.append((await exchange(other, fast, demand=1.0)).level)

    assert levels == sorted(levels)
    assert levels[-1] == 5.0


async def test_what_a_dead_gateway_held_is_free_when_its_lease_ends(queue: RedisQueue) -> None:
    """At the next exchange; one that leaves frees it at once."""
    one, other, third = await gateways(queue, 3)
    await exchange(one, demand=1.0, lease_s=0.001, in_flight=4)
    found = await exchange(other, demand=1.0)
    while found.tokens < 99.0:
        found = await exchange(other, demand=1.0)
    assert found.places == 10

    await exchange(other, lease_s=0.0)

    assert (await exchange(third, demand=1.0)).tokens == pytest.approx(100.0, abs=0.1)


async def test_what_is_in_flight_keeps_its_place(queue: RedisQueue) -> None:
    """Though a gateway has more than its part; others get what is left."""
    one, other = await gateways(queue, 2)
    await exchange(one, in_flight=9, demand=1.0)

    assert (await exchange(other, demand=50.0)).places == 0
    assert (await exchange(one, in_flight=9, demand=1.0)).places == 10
    await exchange(one, in_flight=2, demand=1.0)
    assert (await exchange(other, demand=50.0)).places == 10 - (await exchange(one, in_flight=2, demand=1.0)).places


@pytest.mark.parametrize("seed", range(5))
async def test_gateways_never_hold_more_together_than_there_is(queue: RedisQueue, seed: int) -> None:
    """Whatever they ask for, use and tell, in whatever order."""
    chance, limits = random.Random(seed), QuotaLimits(50.0, 40.0, 12)
    group = await gateways(queue, 4)
    held = [QuotaLease(0.0, 0.0, 0.0, 0)] * 4
    for _ in range(150):
        number = chance.randrange(4)
        used = chance.uniform(0.0, held[number].tokens)
        flying = chance.randint(0, held[number].places)
        leased = await exchange(group[number], limits, used=used, demand=chance.uniform(0, 9), in_flight=flying)
        held[number] = leased

        assert sum(each.tokens for each in held) <= max(leased.level, 0.0) + 1e-6
        assert leased.level <= limits.burst
        assert sum(each.places for each in held) <= limits.places


async def test_nothing_of_a_quota_stays_for_ever(queue: RedisQueue) -> None:
    """Nor does it end before the bucket is full again."""
    [one] = await gateways(queue, 1)

    await exchange(one, QuotaLimits(0.01, 100.0, 0), used=100.0)

    left_ms = queue.on_owner("PTTL", keys.quota("acme"))
    assert 10_000_000 < left_ms < 10_200_000
