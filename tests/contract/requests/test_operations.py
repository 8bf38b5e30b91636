"""Operations on many requests (the numbered promises of `qinfer.queue.operations`) on each server."""

import asyncio

from qinfer.core.messages import IdFactory, InferRequest
from qinfer.queue import keys
from qinfer.queue.entries import RequestState
from qinfer.queue.lanes import Queue
from qinfer.queue.operations import Operation, OperationProgress, Operations, OperationState
from qinfer.wire.frame import encode_request
from tests.contract.conftest import RedisQueue
from tests.support.requests import LANE, accept, address, ended, fetch, settle

CANCELLED, FAILED, SUCCEEDED = RequestState.CANCELLED, RequestState.FAILED, RequestState.SUCCEEDED


async def created(delivery: Queue, model: str = "digits") -> tuple[Operations, Operation]:
    operations = Operations(delivery.router)
    operation = Operation(
        id=IdFactory().request_id(model), model=model, about=b"{}", created_at=delivery.clock.now_s(), total=7
    )
    await operations.create(operation)
    return operations, operation


async def changed(operations: Operations, operation: Operation) -> int:
    found = await operations.find(operation.id)
    assert found is not None
    return found.changed


async def buried(delivery: Queue, *names: str, tenant: str = "") -> list[str]:
    """Accepts requests, buries them and ends them as failed; returns the ids of their letters."""
    for name in names:
        frame = encode_request(InferRequest(model="digits", inputs=(), id=name, version=1, tenant=tenant))
        await accept(delivery, name, frame=frame, tenant=tenant)
    for lease, name in zip(await fetch(delivery), names, strict=True):
        await delivery.bury(lease, name, "inference_failed", "no")
        await settle(delivery, ended(name, FAILED))
    return [letter.id for letter in await delivery.dead_letters.list("digits")]


async def test_an_operation_is_open_until_it_ends(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    operations, operation = await created(delivery)
    progress = OperationProgress(("a", "1", "b"), 5, 3, 1, "gone", ("r1",))

    assert await operations.open() == await operations.newest(10) == [operation.id]
    assert await operations.find(operation.id) is not None
    assert await operations.save(operation, progress)
    assert await operations.end(operation.id, OperationState.DONE, 1.0)

    found = await operations.find(operation.id)
    assert found is not None
    assert (found.state, found.progress, found.total, found.ended_at) == (OperationState.DONE, progress, 7, 1.0)
    assert await operations.open() == []
    assert await operations.newest(10) == [operation.id]


async def test_an_operation_that_has_ended_stays_as_it_is(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    operations, operation = await created(delivery)
    await operations.end(operation.id, OperationState.STOPPED, 1.0)

    assert not await operations.save(operation, OperationProgress(looked=9))
    assert not await operations.end(operation.id, OperationState.DONE, 2.0)

    found = await operations.find(operation.id)
    assert found is not None
    assert (found.state, found.progress.looked, found.ended_at) == (OperationState.STOPPED, 0, 1.0)


async def test_one_gateway_at_a_time_leads_an_operation(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    operations, operation = await created(delivery)

    assert await operations.lead(operation.id, "g1")
    assert await operations.lead(operation.id, "g1")
    assert not await operations.lead(operation.id, "g2")
    assert await operations.lead(operation.id, "g1", 0.0)
    assert await operations.lead(operation.id, "g2")


async def test_unknown_operations_are_none(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    operations = Operations(delivery.router)

    assert await operations.find("nonsense") is None
    assert await operations.find(IdFactory().request_id("digits")) is None
    assert not await operations.end(IdFactory().request_id("digits"), OperationState.DONE, 1.0)


async def test_cancelled_requests_are_counted_once(queue: RedisQueue) -> None:
    """Two operations, and requests that had ended or are unknown."""
    delivery = await queue.connect()
    (operations, first), (_, second) = await created(delivery), await created(delivery)
    for name in ("a", "b", "c"):
        await accept(delivery, name)
    await settle(delivery, ended("c", SUCCEEDED))
    ends = [ended(name, CANCELLED) for name in ("a", "b", "c", "unknown")]

    await asyncio.gather(*(delivery.requests.settle(ends, one.key) for one in (first, second)))

    counts = [await changed(operations, one) for one in (first, second)]
    assert sum(counts) == 2
    assert await delivery.depth([LANE]) == [0]
    record = await delivery.requests.record(address("c"))
    assert record is not None
    assert record.state is SUCCEEDED


async def test_a_letter_that_two_operations_replay_becomes_one_request(queue: RedisQueue) -> None:
    delivery, other = await queue.connect(), await queue.connect()
    (operations, first), (_, second) = await created(delivery), await created(delivery)
    [letter] = await buried(delivery, "a")

    outcomes = await asyncio.gather(
        delivery.dead_letters.replay("digits", letter, first.key),
        other.dead_letters.replay("digits", letter, second.key),
    )

    assert sorted(outcomes) == [False, True]
    assert await changed(operations, first) + await changed(operations, second) == 1
    assert await delivery.depth([LANE]) == [1]
    assert [lease.entry.lane for lease in await fetch(delivery)] == [LANE]


async def test_results_are_purged_and_counted_once(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    operations, operation = await created(delivery)
    await accept(delivery, "a")
    await accept(delivery, "b")
    await settle(delivery, ended("a", SUCCEEDED))

    for _ in range(2):
        for name in ("a", "b", "unknown"):
            await delivery.requests.remove_result(address(name), operation.key)

    assert await changed(operations, operation) == 1
    assert await delivery.requests.result(address("a")) is None


async def test_letters_are_discarded_and_counted_once(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    operations, operation = await created(delivery)
    letters = await buried(delivery, "a", "b", "c", tenant="acme")
    assert {letter.tenant for letter in await delivery.dead_letters.list("digits")} == {"acme"}

    for _ in range(2):
        await delivery.dead_letters.purge_counted("digits", letters[:2], operation.key)

    assert await changed(operations, operation) == 2
    assert [letter.id for letter in await delivery.dead_letters.list("digits")] == letters[2:]


async def test_an_expired_operation_counts_nothing(queue: RedisQueue) -> None:
    """A count alone would make a record without a time to live."""
    delivery = await queue.connect()
    operations, operation = await created(delivery)
    queue.on_owner("DEL", operation.key)
    await accept(delivery, "a")

    assert await delivery.requests.settle([ended("a", CANCELLED)], operation.key) == [True]

    assert await operations.find(operation.id) is None
    assert queue.leaked() == []
    assert queue.on_owner("PTTL", keys.request("digits", 0, "a")) > 0
