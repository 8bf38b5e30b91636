"""The stored responses of requests to decoupled models: appended in order, once, by the holder of the entry."""

from collections.abc import Sequence

import pytest

from qinfer.errors import PayloadTooLarge, StreamBroken
from qinfer.queue import keys
from qinfer.queue.entries import MARGIN_S, Lease, RequestState, reply_address
from qinfer.queue.lanes import Queue
from qinfer.queue.requests import hint
from qinfer.queue.values import LARGE_BYTES
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import listening
from tests.support.requests import LANE, accept, address, ended, fetch, frame_of, settle

RESPONSES = keys.stored_responses("digits", 0, "r1")


async def append(
    queue: Queue,
    lease: Lease,
    index: int,
    *blobs: bytes,
    request_id: str = "r1",
    resumes: bool = False,
    max_bytes: int = 1000,
) -> bool:
    return await queue.requests.responses.append(lease, request_id, index, blobs, resumes=resumes, max_bytes=max_bytes)


async def read(queue: Queue, index: int = 0) -> Sequence[bytes]:
    return await queue.requests.responses.read(address(), index)


async def taken_over(queue: Queue) -> Lease:
    """Returns the lease of the consumer that reclaims the entry from the one before."""
    [lease] = await queue.reclaim([LANE], "b", 0.0, 10)
    return lease


async def test_responses_are_read_in_order_from_any_on(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)

    assert await append(delivery, lease, 0, b"a")
    assert await append(delivery, lease, 1, b"b", b"c")

    assert await read(delivery) == [b"a", b"b", b"c"]
    assert await read(delivery, 2) == [b"c"]
    assert await read(delivery, 3) == []
    record = await delivery.requests.record(address())
    assert record is not None
    assert (record.state, record.responses) == (RequestState.RUNNING, 3)


async def test_responses_are_removed_with_the_result(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)
    await append(delivery, lease, 0, b"a")
    await settle(delivery, ended("r1", entry=lease.entry))

    await delivery.requests.remove_result(address())

    assert await read(delivery) == []
    assert not queue.on_owner("EXISTS", RESPONSES)


async def test_a_repetition_stores_nothing_twice(queue: RedisQueue) -> None:
    """After a lost reply the worker appends the same again, perhaps together with what has come since."""
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)

    assert await append(delivery, lease, 0, b"a", b"b")
    assert await append(delivery, lease, 0, b"a", b"b")
    assert await append(delivery, lease, 0, b"a")
    assert await append(delivery, lease, 1, b"b", b"c")

    assert await read(delivery) == [b"a", b"b", b"c"]


async def test_a_gap_breaks_the_stream(queue: RedisQueue) -> None:
    """Redis lost what was confirmed: the rest would be a stream with a hole."""
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)
    await append(delivery, lease, 0, b"a")

    with pytest.raises(StreamBroken, match="after 1 responses"):
        await append(delivery, lease, 2, b"c")

    assert await read(delivery) == [b"a"]


async def test_only_the_holder_appends(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await accept(delivery)
    [first] = await fetch(delivery)
    await append(delivery, first, 0, b"a")
    second = await taken_over(delivery)

    assert not await append(delivery, first, 1, b"of the first", resumes=True)
    assert await append(delivery, second, 1, b"b", resumes=True)

    assert await read(delivery) == [b"a", b"b"]


async def test_the_same_consumer_holds_a_later_delivery_under_another_number(queue: RedisQueue) -> None:
    """A worker that lost its lease and took the entry again: what the first execution still gives is dropped."""
    delivery = await queue.connect()
    await accept(delivery)
    [first] = await fetch(delivery, "b")
    second = await taken_over(delivery)

    assert not await append(delivery, first, 0, b"late")
    assert await append(delivery, second, 0, b"a")


async def test_another_execution_breaks_the_stream(queue: RedisQueue) -> None:
    """The other execution may give other responses: the caller is told after how many the stream ended."""
    delivery = await queue.connect()
    await accept(delivery)
    [first] = await fetch(delivery)
    await append(delivery, first, 0, b"a", b"b")
    second = await taken_over(delivery)

    with pytest.raises(StreamBroken, match="after 2 responses") as broken:
        await append(delivery, second, 0, b"another")

    assert broken.value.retryable
    assert await read(delivery) == [b"a", b"b"]


async def test_another_execution_begins_a_stream_of_which_nothing_is_stored(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await accept(delivery)
    await fetch(delivery)
    second = await taken_over(delivery)

    assert await append(delivery, second, 0, b"a")


async def test_a_model_that_resumes_goes_on_where_it_was(queue: RedisQueue) -> None:
    """It is executed again from its first response; the caller sees one unbroken list."""
    delivery = await queue.connect()
    await accept(delivery)
    [first] = await fetch(delivery)
    await append(delivery, first, 0, b"a", b"b", resumes=True)
    second = await taken_over(delivery)

    for index, blob in enumerate([b"a", b"b", b"c"]):
        assert await append(delivery, second, index, blob, resumes=True)

    assert await read(delivery) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("state", [RequestState.SUCCEEDED, RequestState.CANCELLED])
async def test_nothing_is_appended_to_what_has_ended(queue: RedisQueue, state: RequestState) -> None:
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)
    await append(delivery, lease, 0, b"a")
    await settle(delivery, ended(state=state))

    assert not await append(delivery, lease, 1, b"late")
    assert not await append(delivery, lease, 0, b"late", request_id="unknown")

    assert await read(delivery) == [b"a"]


async def test_stored_bytes_are_bounded(queue: RedisQueue) -> None:
    """The bound holds over several calls, and no refused response is stored in part."""
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)
    await append(delivery, lease, 0, bytes(6), max_bytes=10)

    with pytest.raises(PayloadTooLarge, match=r"more than 10 bytes, after 1 .* QINFER_LIMITS__STREAM_RESULT_BYTES"):
        await append(delivery, lease, 1, bytes(4), bytes(1), max_bytes=10)

    assert await append(delivery, lease, 0, bytes(6), bytes(4), max_bytes=10)
    assert await read(delivery) == [bytes(6), bytes(4)]


async def test_a_large_response(queue: RedisQueue) -> None:
    """It is read alone, over a connection where no small command waits for it."""
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)
    large = b"x" * (LARGE_BYTES + 1)

    await append(delivery, lease, 0, b"a", max_bytes=4 * LARGE_BYTES)
    await append(delivery, lease, 1, large, b"c", max_bytes=4 * LARGE_BYTES)

    assert await read(delivery) == [b"a"]
    assert await read(delivery, 1) == [large]
    assert await read(delivery, 2) == [b"c"]


async def test_many_responses_are_read_in_pages(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)
    blobs = [number.to_bytes(4) + bytes(2000) for number in range(1200)]
    await append(delivery, lease, 0, *blobs, max_bytes=10 * LARGE_BYTES)

    pages: list[Sequence[bytes]] = []
    found: list[bytes] = []
    while page := await read(delivery, len(found)):
        pages.append(page)
        found += page

    assert found == blobs
    assert len(pages) == 3
    assert max(sum(map(len, page)) for page in pages) <= LARGE_BYTES


async def test_watchers_are_told_of_new_responses(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)
    async with listening(delivery, "gateway") as hints:
        await delivery.requests.record(address(), reply_address("gateway"))

        await append(delivery, lease, 0, b"a")
        await append(delivery, lease, 0, b"a")
        await append(delivery, lease, 1, b"b")
        await settle(delivery, ended())

        told = [await hints.get() for _ in range(3)]
    assert told == [hint([address()])] * 3
    assert hints.empty()


async def test_responses_live_as_long_as_their_result(redis_queue: RedisQueue) -> None:
    delivery = await redis_queue.connect()
    await accept(delivery, timeout_s=100.0, result_ttl_s=200.0, tombstone_ttl_s=300.0)
    [lease] = await fetch(delivery)
    await append(delivery, lease, 0, b"a")

    before = redis_queue.on_owner("PTTL", RESPONSES) / 1000
    await settle(delivery, ended())
    after = redis_queue.on_owner("PTTL", RESPONSES) / 1000

    assert before == pytest.approx(600.0 + MARGIN_S, abs=30.0)
    assert after == pytest.approx(200.0, abs=30.0)


async def test_a_dead_letter_that_is_put_back_begins_anew(queue: RedisQueue) -> None:
    """The next execution stores its own responses, with no former ones before them."""
    delivery = await queue.connect()
    await accept(delivery, frame=frame_of("r1"))
    [lease] = await fetch(delivery)
    await append(delivery, lease, 0, b"old")
    await delivery.bury(lease, "r1", "internal", "it was too often tried")
    await settle(delivery, ended(state=RequestState.FAILED))
    [letter] = await delivery.dead_letters.list("digits")
    assert await delivery.dead_letters.replay("digits", letter.id)

    assert await read(delivery) == []
    [again] = await fetch(delivery)
    assert await append(delivery, again, 0, b"new")
    assert await read(delivery) == [b"new"]
