"""The shards that a worker may hold at a time."""

import asyncio

from qinfer_workers.inference.bulk.shard_loop import ShardSlots


async def test_a_suspect_waits_until_all_slots_are_free() -> None:
    """And nothing is taken beside it."""
    slots = ShardSlots()
    assert slots.take_slot()
    order: list[str] = []

    async def suspect() -> None:
        async with slots.alone():
            order.append("alone")
            assert slots.take_slot(is_suspect=True)
            assert not slots.take_slot()
            slots.free_slot()

    task = asyncio.create_task(suspect())
    await asyncio.sleep(0)
    refused = not slots.take_slot()
    order.append("given back")
    slots.free_slot()
    await task
    await slots.ready()

    assert (order, refused, slots.take_slot()) == (["given back", "alone"], True, True)


async def test_nothing_is_fetched_until_the_suspect_has_ended() -> None:
    """Its run goes on in the background."""
    slots = ShardSlots()
    order: list[str] = []

    async def suspect() -> None:
        async with slots.alone():
            slots.take_slot(is_suspect=True)
        order.append("over")

    task = asyncio.create_task(suspect())
    ready = asyncio.create_task(slots.ready())
    await asyncio.sleep(0.01)
    order.append("given back")
    slots.free_slot()
    await asyncio.wait([task, ready])

    assert order == ["given back", "over"]
