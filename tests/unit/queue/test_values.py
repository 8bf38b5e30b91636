"""The order in which large values travel: a few bytes at a time, tenants in turn."""

import asyncio
from collections.abc import Sequence

from qinfer.queue.values import Transfers


class Road:
    """Values that travel until they are told to arrive.

    Attributes:
        began: The tenants whose values have begun to travel, in order.
    """

    def __init__(self, most_bytes: int) -> None:
        self.transfers = Transfers(most_bytes)
        self.began: list[str] = []
        self._ways: dict[str, list[asyncio.Event]] = {}

    async def send(self, tenant: str, nbytes: int) -> "asyncio.Task[None]":
        """Sends a value; returns its journey."""

        async def travel() -> None:
            async with self.transfers.turn(tenant, nbytes):
                self.began.append(tenant)
                arrived = asyncio.Event()
                self._ways.setdefault(tenant, []).append(arrived)
                await arrived.wait()

        task = asyncio.create_task(travel())
        await asyncio.sleep(0)
        return task

    async def arrive(self, tenants: Sequence[str]) -> None:
        """Has the first value of each of these tenants arrive, one after the other."""
        for tenant in tenants:
            self._ways[tenant].pop(0).set()
            for _ in range(3):
                await asyncio.sleep(0)


async def test_tenants_take_turns() -> None:
    """However many values one of them has."""
    road = Road(10)
    for _ in range(4):
        await road.send("evil", 10)
    await road.send("acme", 10)

    await road.arrive(["evil", "evil", "acme", "evil"])

    assert road.began == ["evil", "evil", "acme", "evil", "evil"]


async def test_few_bytes_travel_at_a_time() -> None:
    road = Road(10)
    for _ in range(5):
        await road.send("acme", 4)

    assert road.began == ["acme"] * 2
    await road.arrive(["acme"])
    assert road.began == ["acme"] * 3


async def test_a_value_that_is_too_large_travels_alone() -> None:
    road = Road(10)
    await road.send("acme", 1)
    await road.send("acme", 100)
    await road.send("acme", 1)
    assert road.began == ["acme"]

    await road.arrive(["acme"])
    assert road.began == ["acme"] * 2
    await road.arrive(["acme"])
    assert road.began == ["acme"] * 3


async def test_one_that_is_given_up_keeps_no_turn() -> None:
    """Neither while it waits nor while it travels."""
    road = Road(10)
    first = await road.send("acme", 10)
    second = await road.send("acme", 10)
    await road.send("evil", 10)

    for task in (second, first):
        task.cancel()
        await asyncio.wait([task])

    await asyncio.sleep(0)
    assert road.began == ["acme", "evil"]
