"""What a worker may hold at a time."""

import asyncio

from qinfer_workers.jobs.scoring.hands import Hands


async def test_a_suspect_waits_until_hands_are_empty() -> None:
    """And nothing is taken beside it."""
    hands = Hands()
    assert hands.take()
    order: list[str] = []

    async def suspect() -> None:
        async with hands.alone():
            order.append("alone")
            assert hands.take(is_suspect=True)
            assert not hands.take()
            hands.put()

    task = asyncio.create_task(suspect())
    await asyncio.sleep(0)
    refused = not hands.take()
    order.append("put")
    hands.put()
    await task
    await hands.ready()

    assert (order, refused, hands.take()) == (["put", "alone"], True, True)


async def test_hands_are_alone_until_the_suspect_has_ended() -> None:
    """Its run goes on in the background."""
    hands = Hands()
    order: list[str] = []

    async def suspect() -> None:
        async with hands.alone():
            hands.take(is_suspect=True)
        order.append("over")

    task = asyncio.create_task(suspect())
    ready = asyncio.create_task(hands.ready())
    await asyncio.sleep(0.01)
    order.append("put")
    hands.put()
    await asyncio.wait([task, ready])

    assert order == ["put", "over"]
