"""The contract of asynchronous requests on each server: deadlines, those that watch, and webhooks."""

from qinfer.queue import keys
from qinfer.queue.entries import RequestState, reply_address
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import listening
from tests.support.requests import HOOKS, LANE, accept, address, ended, fetch, settle, webhooks

HOOK = "https://example.org/hook"


# --- deadlines (promise 5) ---


async def test_requests_are_due_when_their_deadline_has_passed(queue: RedisQueue) -> None:
    """The oldest deadline first, as many as asked for, with zero workers; the others not yet."""
    delivery = await queue.connect()
    for name, timeout_s in (("r1", 0.03), ("r2", 0.01), ("r3", 0.02), ("r4", 60.0)):
        await accept(delivery, name, timeout_s=timeout_s)

    async def are_three() -> bool:
        return len(await delivery.requests.due("digits", 0, 10)) == 3

    await eventually(are_three)
    due = await delivery.requests.due("digits", 0, 10)
    deadlines = [record.deadline_at for name in due if (record := await delivery.requests.record(name))]
    assert deadlines == sorted(deadlines)
    assert {name.id for name in due} == {"r1", "r2", "r3"}
    assert await delivery.requests.due("digits", 0, 2) == due[:2]


async def test_a_request_that_ended_is_not_due(queue: RedisQueue) -> None:
    """However it ended; a held one is due like a waiting one."""
    delivery = await queue.connect()
    for name in ("r1", "r2"):
        await accept(delivery, name, timeout_s=0.01)
    await fetch(delivery)
    await settle(delivery, ended("r1"))

    async def is_one() -> bool:
        return await delivery.requests.due("digits", 0, 10) == [address("r2")]

    await eventually(is_one)
    await settle(delivery, ended("r2", RequestState.EXPIRED))
    assert await delivery.requests.due("digits", 0, 10) == []
    assert await delivery.depth([LANE]) == [0]


async def test_each_model_has_its_own_deadlines_and_webhooks(queue: RedisQueue) -> None:
    """A janitor asks for those of one partition."""
    delivery = await queue.connect()
    for model in ("digits", "other"):
        await accept(delivery, model=model, timeout_s=0.01, webhook=HOOK)

    async def is_due() -> bool:
        return await delivery.requests.due("other", 0, 10) == [address(model="other")]

    await eventually(is_due)
    await settle(delivery, ended(model="other"))
    assert await webhooks(delivery) == []
    [item] = await webhooks(delivery, "other")
    assert (item.model, item.text) == ("other", "request:r1")


# --- those that watch ---


async def test_who_watches_is_told_of_the_end(queue: RedisQueue) -> None:
    """Once each, with the request's id and nothing else; what is watched is not changed by it."""
    worker, gateway, other = await queue.connect(), await queue.connect(), await queue.connect()
    for name in ("r1", "r2", "r3"):
        await accept(gateway, name)
    async with listening(gateway, "g1") as first, listening(other, "g2") as second:
        for reply_to in ("g1", "g2", "g1"):
            record = await gateway.requests.record(address("r1"), reply_address(reply_to))
            assert record == await gateway.requests.record(address("r1"))
        await gateway.requests.record(address("r2"), reply_address("g1"))

        await settle(worker, *(ended(name) for name in ("r1", "r2", "r3")))

        hints = decode_responses(await first.get())
        while len(hints) < 2:
            hints += decode_responses(await first.get())
        assert [(hint.request_id, hint.final, hint.outputs) for hint in hints] == [("r1", True, ()), ("r2", True, ())]
        assert [hint.request_id for hint in decode_responses(await second.get())] == ["r1"]
        assert first.empty()


async def test_who_watches_too_late_reads_the_end_at_once(queue: RedisQueue) -> None:
    """The record says so; there will be no hint."""
    delivery = await queue.connect()
    await accept(delivery)
    await settle(delivery, ended())
    async with listening(delivery, "g1") as blobs:
        record = await delivery.requests.record(address(), reply_address("g1"))

        assert record is not None
        assert record.state is RequestState.SUCCEEDED
        assert await settle(delivery, ended()) == [False]
        await delivery.publish(reply_address("g1"), b"end")
        assert await blobs.get() == b"end"


async def test_a_watcher_that_is_gone_is_no_trouble(queue: RedisQueue) -> None:
    """The watcher's hint goes nowhere, and makes no stream."""
    delivery = await queue.connect()
    await accept(delivery)
    await delivery.requests.record(address(), reply_address("gone"))

    assert await settle(delivery, ended()) == [True]

    assert not await delivery.publish(reply_address("gone"), b"x")


# --- webhooks (promise 6) ---


async def test_the_end_of_a_request_with_a_webhook_is_to_be_told(queue: RedisQueue) -> None:
    """Once, by its first terminal state; there is nothing to tell of requests without one."""
    delivery = await queue.connect()
    await accept(delivery, "r1", webhook=HOOK)
    await accept(delivery, "r2")
    assert await webhooks(delivery) == []

    await settle(delivery, ended("r1"), ended("r2"), ended("r1", RequestState.CANCELLED))

    [item] = await webhooks(delivery)
    assert (item.text, item.attempts) == ("request:r1", 1)
    record = await delivery.requests.record(address("r1"))
    assert record is not None
    assert record.webhook_state == "pending"


async def test_a_webhook_outlives_its_request(queue: RedisQueue) -> None:
    """It is done though the tombstone is gone, and brings nothing back."""
    delivery = await queue.connect()
    await accept(delivery, webhook=HOOK, result_ttl_s=0.01, tombstone_ttl_s=0.01)
    await settle(delivery, ended())

    async def is_gone() -> bool:
        return await delivery.requests.record(address()) is None

    await eventually(is_gone)
    [item] = await webhooks(delivery)
    note = (keys.request("digits", 0, "r1").encode(), "webhook_state", "delivered")
    await delivery.deliveries.done("digits", 0, HOOKS, [item.id], note=note)

    assert await delivery.requests.record(address()) is None
