"""A Redis whose memory is full takes no new steps, and stops none of those that it has: their ends make room."""

from collections.abc import AsyncIterator

import pytest

from qinfer.core.messages import Failure
from qinfer.errors import QueueFull
from qinfer.queue.sequences.records import StepPlace
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.support.sequences import EIGHT, LEASE_S, SEVEN, Gateway, Worker, first, later, sequences_of


@pytest.fixture
async def gateway(redis_queue: RedisQueue) -> AsyncIterator[Gateway]:
    """A gateway with steps of two sequences, and its memory full from `fill` on."""
    gateway = Gateway(sequences_of(await redis_queue.connect()))
    await gateway.send(SEVEN, first(1), later(2))
    await gateway.send(EIGHT, first(10), later(20, end=True))
    yield gateway
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")


def fill(redis_queue: RedisQueue) -> None:
    """Has a server refuse what needs memory."""
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "1")


async def test_steps_run_and_end(redis_queue: RedisQueue, gateway: Gateway) -> None:
    fill(redis_queue)

    worker = await Worker(gateway, "w1").join()
    await worker.work()

    assert gateway.texts == ["=1", "=3", "=10", "=30"]
    with pytest.raises(QueueFull):
        await gateway.send(SEVEN, later(3))


async def test_a_lease_goes_on(redis_queue: RedisQueue, gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    fill(redis_queue)

    assert await worker.sequences.renew("w1", [1], LEASE_S)


async def test_what_was_taken_is_told(redis_queue: RedisQueue, gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await worker.own()
    fill(redis_queue)

    await worker.take()

    assert len(worker.waiting) == 4


async def test_a_life_ends_by_an_error_and_is_answered(redis_queue: RedisQueue, gateway: Gateway) -> None:
    fill(redis_queue)

    assert await gateway.sequences.fail(StepPlace(SEVEN, 1, 1), Failure("inference_failed", "no"))
    await gateway.answer_rest()

    assert gateway.texts[0] == "inference_failed: no"
    assert len(gateway.texts) == 2


async def test_a_drain_gives_back(redis_queue: RedisQueue, gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await worker.own()
    fill(redis_queue)

    assert await gateway.sequences.hand_over("w1", [SEVEN, EIGHT]) == 2


async def test_a_dead_worker_is_reaped(redis_queue: RedisQueue, gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await worker.own()
    await worker.sequences.renew("w1", [1], 0.0)
    fill(redis_queue)

    await eventually(lambda: reaped(gateway), description="a hand-over")

    assert (await gateway.sequences.sizes([1])).waiting == 2
    assert await gateway.sequences.sweep() == 0


async def reaped(gateway: Gateway) -> bool:
    """Hands over what dead workers owned; tells whether anything was."""
    return await gateway.sequences.reap() == 2
