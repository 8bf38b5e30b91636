"""Quotas over several gateways: each with its keys and leases, on one real Redis."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from qinfer.core.api_keys import ApiKey, hash_key
from qinfer.errors import QuotaExceeded
from qinfer.queue.tenants import Quotas
from qinfer.testing import eventually
from qinfer_api.auth import Auth, CallerContext
from qinfer_api.quotas import Quota
from tests.support.servers.servers import Database

CALLER = CallerContext(key="secret")
COUNT = 3


class Gateways:
    """What three gateways know of a tenant."""

    def __init__(self, auths: list[Auth]) -> None:
        self.auths = auths

    def quotas(self) -> list[Quota]:
        return [auth._quotas["acme"] for auth in self.auths]

    def let_in(self, auth: Auth, *, stays: bool = False) -> bool:
        """Admits a request, which stays in flight or has its answer at once; tells whether it was let in."""
        try:
            context = auth.authorize_inference(CALLER)
        except QuotaExceeded:
            return False
        assert context.principal is not None
        context.principal.quota.in_flight += int(stays)
        return True

    async def leased(self) -> None:
        """Waits until every gateway has heard of all others: twice of an exchange."""
        for _ in range(2):
            before = [quota._leased_until_s for quota in self.quotas()]

            def have_changed(before: list[float] = before) -> bool:
                now = [quota._leased_until_s for quota in self.quotas()]
                return all(one > other for one, other in zip(now, before, strict=True))

            await eventually(have_changed, description="an exchange of each gateway")

    async def drain(self, *, stays: bool = False) -> int:
        """Lets in what can be at any gateway, until none lets in more; returns how many there were."""
        count, last = 0, -1
        while count != last:
            last = count
            for auth in self.auths:
                while self.let_in(auth, stays=stays):
                    count += 1
            await self.leased()
        return count


async def running(database: Database, tasks: asyncio.TaskGroup, **limits: Any) -> Gateways:
    """Starts the leases of gateways of which each has been asked once."""
    key = ApiKey(id="k", sha256=hash_key("secret"), tenant="acme", **limits)
    auths = []
    for number in range(COUNT):
        auth, delivery = Auth([key]), await database.delivery()
        tasks.create_task(auth.lease(Quotas(delivery.router, f"g{number}")).run())
        auths.append(auth)
    gateways = Gateways(auths)
    assert all(gateways.let_in(auth) for auth in auths)
    await gateways.leased()
    return gateways


@pytest.fixture
async def tasks() -> AsyncIterator[asyncio.TaskGroup]:
    class Ended(Exception):
        """The test is over."""

    try:
        async with asyncio.TaskGroup() as group:
            yield group
            raise Ended
    except* Ended:
        pass


async def test_a_burst_is_one_over_all_gateways(database: Database, tasks: asyncio.TaskGroup) -> None:
    """Not one for each, and no part of it is lost."""
    gateways = await running(database, tasks, rate_per_s=0.001, burst=60)

    count = COUNT + await gateways.drain()

    assert 60 - COUNT <= count <= 60


async def test_what_all_let_in_before_they_knew_is_paid(database: Database, tasks: asyncio.TaskGroup) -> None:
    """Three gateways that were asked for the whole burst at once let in nothing more until it has come again."""
    gateways = await running(database, tasks, rate_per_s=0.001, burst=1)

    assert await gateways.drain() == 0


async def test_requests_in_flight_are_counted_over_all_gateways(database: Database, tasks: asyncio.TaskGroup) -> None:
    """Where one gets its answer, another may be sent, at whichever gateway."""
    gateways = await running(database, tasks, max_in_flight=8)

    assert await gateways.drain(stays=True) == 8
    held = max(gateways.quotas(), key=lambda quota: quota.in_flight)
    held.in_flight -= 2
    assert await gateways.drain(stays=True) == 2
    for quota in gateways.quotas():
        quota.in_flight = 0
