"""What a worker may hold at a time, and the threads that do bulk work."""

import asyncio
import os
import sys
import threading

import pytest

from qinfer_workers.inference.bulk.hands import Hands
from qinfer_workers.inference.bulk.priority import LowThreads


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


def test_calls_run_at_once_in_threads_that_are_kept() -> None:
    """As many as there are calls; none is started for a call that follows."""
    threads, both = LowThreads(), threading.Barrier(2, timeout=10)
    seen: list[int] = []

    def call() -> None:
        seen.append(threading.get_ident())
        both.wait()

    callers = [threading.Thread(target=threads.run, args=(call,)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    threads.run(lambda: seen.append(threading.get_ident()))

    assert seen[0] != seen[1]
    assert seen[2] in seen[:2]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_bulk_threads_give_way() -> None:
    """The thread that asks keeps its priority."""
    niceness: list[int] = []
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    LowThreads().run(lambda: niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    assert niceness[0] > before or niceness == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
