"""Dead letters on each server: `bury` (promise 12 of `qinfer.queue.lanes`), and what can be done with them."""

import asyncio

import pytest

from qinfer.core.messages import InferRequest
from qinfer.errors import InvalidRequest, QinferError
from qinfer.queue import keys, lanes
from qinfer.queue.dead_letters import DeadLetter
from qinfer.queue.entries import (
    Acceptance,
    Entry,
    EntryAddress,
    Lane,
    Lease,
    Payload,
    RequestOutcome,
    RequestState,
    Settlement,
)
from qinfer.queue.lanes import Queue
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request, encode_request_apart
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import HIGH, LOW, fetch, frames, ready, submit
from tests.support.leases import renew
from tests.support.requests import accept, address, ended

MODEL = "digits"
DLQ = keys.dead_letters(MODEL)
CODE, REASON = "inference_failed", "3 executions did not end"


def request(request_id: str = "r1") -> InferRequest:
    return InferRequest(
        model=MODEL, id=request_id, inputs=(Tensor("x", "UINT8", (8,), bytes(range(8))),), timeout_s=60.0
    )


async def bury_all(delivery: Queue, consumer: str = "a") -> list[Lease]:
    """Fetches what waits and buries it; request ids are the frames' text."""
    leases = await fetch(delivery, consumer)
    for lease in leases:
        assert await delivery.bury(lease, lease.frame[:20].decode(), CODE, REASON)
    return leases


async def letters(delivery: Queue) -> list[DeadLetter]:
    return await delivery.dead_letters.list(MODEL)


async def submit_apart(delivery: Queue, request_id: str = "r1") -> Entry:
    """Submits a request whose tensors are stored beside the stream."""
    frame, payload = encode_request_apart(request(request_id))
    future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
    delivery.submit(HIGH, frame, future.set_result, payload=Payload(request_id, payload, 60.0))
    entry = await future
    assert isinstance(entry, Entry)
    return entry


# --- bury ---


async def test_a_buried_entry_is_gone_from_its_lane_and_kept_with_why(queue: RedisQueue) -> None:
    """Frame, code, reason, count and time can be read by anyone."""
    delivery, other = await ready(queue, b"r1"), await queue.connect()
    before_s = delivery.clock.now_s()

    [lease] = await bury_all(delivery)

    assert await delivery.depth([HIGH]) == [0]
    assert renew(delivery, [lease]) == [lease]
    [listed] = await letters(other)
    assert (listed.lane, listed.request_id, listed.code, listed.reason) == (HIGH, "r1", CODE, REASON)
    assert (listed.deliveries, listed.size, listed.frame) == (1, 2, b"")
    assert before_s - 0.1 <= listed.buried_at <= other.clock.now_s() + 0.1
    shown = await other.dead_letters.show(MODEL, listed.id)
    assert shown is not None
    assert (shown.frame, shown.payload, shown.id) == (b"r1", b"", listed.id)


async def test_a_payload_is_buried_with_its_entry(queue: RedisQueue) -> None:
    """It is in the dead letter, and no longer beside the stream."""
    delivery = await ready(queue)
    entry = await submit_apart(delivery)
    [lease] = await fetch(delivery)

    assert await delivery.bury(lease, "r1", CODE, REASON)

    [listed] = await letters(delivery)
    shown = await delivery.dead_letters.show(MODEL, listed.id)
    assert shown is not None
    assert shown.payload == bytes(range(8))
    assert shown.size == len(lease.frame) + 8
    assert await delivery.payload(entry, "r1") is None


async def test_only_the_owner_buries(queue: RedisQueue) -> None:
    """Nothing happens where the entry is another's, or finished."""
    delivery = await ready(queue, b"r1")
    [old] = await fetch(delivery, "a")
    [new] = await delivery.reclaim([HIGH, LOW], "b", idle_s=0.0, count=10)

    assert not await delivery.bury(old, "r1", CODE, REASON)
    assert renew(delivery, [new]) == []
    await delivery.finish([new.entry])
    assert not await delivery.bury(new, "r1", CODE, REASON)

    assert await letters(delivery) == []


async def test_the_count_of_deliveries_is_kept(queue: RedisQueue) -> None:
    """How often it was handed out before it was given up."""
    delivery = await ready(queue, b"r1")
    await fetch(delivery, "a")
    await delivery.reclaim([HIGH], "b", idle_s=0.0, count=10)
    [lease] = await delivery.reclaim([HIGH], "c", idle_s=0.0, count=10)

    await delivery.bury(lease, "", "corrupt_entry", "frame of 2 bytes is too short")

    [letter] = await letters(delivery)
    assert (letter.deliveries, letter.request_id, letter.code) == (3, "", "corrupt_entry")


async def test_a_buried_request_is_held_by_nobody(queue: RedisQueue) -> None:
    """Until it is settled it is known as queued, to be expired at its deadline."""
    delivery = await ready(queue)
    await accept(delivery, lane=HIGH)
    [lease] = await fetch(delivery)

    await delivery.bury(lease, "r1", CODE, REASON)

    record = await delivery.requests.record(address())
    assert record is not None
    assert (record.state, record.attempts) == (RequestState.QUEUED, 0)


# --- bounds ---


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_BYTES", 200_000)


@pytest.mark.usefixtures("small_bounds")
async def test_the_oldest_go_when_all_together_are_too_large(queue: RedisQueue) -> None:
    """The newest stay, as many as there is room for."""
    delivery = await ready(queue)
    for number in range(10):
        await submit(delivery, HIGH, b"%d" % number + bytes(50_000))
        [lease] = await fetch(delivery)
        await delivery.bury(lease, f"r{number}", CODE, REASON)

    assert [letter.request_id for letter in await letters(delivery)] == ["r7", "r8", "r9"]


@pytest.mark.usefixtures("small_bounds")
async def test_the_newest_is_kept_whatever_its_size(queue: RedisQueue) -> None:
    """Rather one too large than none."""
    delivery = await ready(queue, b"old")
    await bury_all(delivery)
    await submit(delivery, HIGH, b"new" + bytes(1_000_000))
    [lease] = await fetch(delivery)

    await delivery.bury(lease, "new", CODE, REASON)

    assert [letter.request_id for letter in await letters(delivery)] == ["new"]


async def test_what_is_too_old_goes_when_another_comes(queue: RedisQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Age counts from the burial; younger ones stay."""
    monkeypatch.setattr(lanes, "MAX_AGE_S", 0.2)
    delivery = await ready(queue, b"old")
    await bury_all(delivery)

    kept = ["old"]
    while "old" in kept:
        await submit(delivery, HIGH, b"young")
        await bury_all(delivery)
        kept = [letter.request_id for letter in await letters(delivery)]

    assert set(kept) == {"young"}


async def test_no_more_of_the_oldest_go_than_must(redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of a few bytes takes many more in Redis: these count too."""
    delivery = await ready(redis_queue, *(b"%d" % number for number in range(500)))
    while await bury_all(delivery):
        pass
    used = redis_queue.on_owner("MEMORY", "USAGE", DLQ, "SAMPLES", 0)
    monkeypatch.setattr(lanes, "MAX_BYTES", used)
    await submit(delivery, HIGH, bytes(used // 2))
    [lease] = await fetch(delivery)

    await delivery.bury(lease, "large", CODE, REASON)

    kept = redis_queue.on_owner("XLEN", DLQ)
    assert redis_queue.on_owner("MEMORY", "USAGE", DLQ, "SAMPLES", 0) <= used
    assert 100 < kept < 500


async def test_a_replayed_request_is_known_beyond_its_deadline(redis_queue: RedisQueue) -> None:
    """Though what was left of its record's time was less than the new timeout."""
    delivery = await ready(redis_queue)
    await accept(delivery, lane=HIGH, timeout_s=100.0, result_ttl_s=1.0, tombstone_ttl_s=1.0, payload=b"x")
    [lease] = await fetch(delivery)
    await delivery.bury(lease, "r1", CODE, REASON)
    await delivery.requests.settle([ended(state=RequestState.FAILED)])
    [letter] = await letters(delivery)

    await delivery.dead_letters.replay(MODEL, letter.id)

    for key in (keys.request(MODEL, 0, "r1"), keys.payload(MODEL, 0, "r1")):
        assert redis_queue.on_owner("PTTL", key) > 100_000


async def test_dead_letters_end_by_themselves(redis_queue: RedisQueue) -> None:
    """The stream lives as long as its newest letter may."""
    delivery = await ready(redis_queue, b"r1")

    await bury_all(delivery)

    assert 0 < redis_queue.on_owner("PTTL", b"qinfer:{digits#0}:dlq") <= 7 * 86_400_000


# --- list, purge ---


async def test_letters_are_listed_in_pages_in_the_order_of_burial(queue: RedisQueue) -> None:
    """From behind the id given; a model without any has none."""
    delivery = await ready(queue, *[b"r%d" % number for number in range(7)])
    await bury_all(delivery)

    got: list[DeadLetter] = []
    while page := await delivery.dead_letters.list(MODEL, after=got[-1].id if got else "", count=3):
        assert len(page) <= 3
        got += page

    assert [letter.request_id for letter in got] == [f"r{number}" for number in range(7)]
    assert await delivery.dead_letters.list("nobody") == []


async def test_a_letter_that_is_not_there_is_none(queue: RedisQueue) -> None:
    """Shown, replayed or purged: it is gone."""
    delivery = await ready(queue, b"r1")
    await bury_all(delivery)

    for letter_id in ("1-1", "9999999999999-0", "no id", "-", "1-1-1"):
        assert await delivery.dead_letters.show(MODEL, letter_id) is None
        assert not await delivery.dead_letters.replay(MODEL, letter_id)
        assert await delivery.dead_letters.purge(MODEL, [letter_id]) == 0
    assert len(await letters(delivery)) == 1
    with pytest.raises(InvalidRequest, match="not a dead letter's id"):
        await delivery.dead_letters.list(MODEL, after="no id")


async def test_purge_removes_the_named_ones_or_all(queue: RedisQueue) -> None:
    """And says how many there were."""
    delivery = await ready(queue, b"r1", b"r2", b"r3")
    await bury_all(delivery)
    first, *_ = await letters(delivery)

    assert await delivery.dead_letters.purge(MODEL, []) == 0
    assert await delivery.dead_letters.purge(MODEL, [first.id, first.id]) == 1
    assert await delivery.dead_letters.purge(MODEL) == 2
    assert await delivery.dead_letters.purge(MODEL) == 0
    assert await letters(delivery) == []


# --- replay ---


async def test_a_replayed_letter_is_fetched_as_never_delivered(queue: RedisQueue) -> None:
    """From the lane it was in, behind what waits there; once."""
    delivery = await ready(queue, b"r1")
    await bury_all(delivery)
    [letter] = await letters(delivery)
    await submit(delivery, HIGH, b"before")

    assert await delivery.dead_letters.replay(MODEL, letter.id)
    assert not await delivery.dead_letters.replay(MODEL, letter.id)

    leases = await fetch(delivery, "b")
    assert frames(leases) == [b"before", b"r1"]
    assert [(lease.deliveries, lease.suspect, lease.entry.lane) for lease in leases] == [(1, False, HIGH)] * 2
    assert await letters(delivery) == []


async def test_a_replayed_letter_has_its_payload_again(queue: RedisQueue) -> None:
    """For as long as its timeout lets it be executed."""
    delivery = await ready(queue)
    await submit_apart(delivery)
    [lease] = await fetch(delivery)
    await delivery.bury(lease, "r1", CODE, REASON)
    [letter] = await letters(delivery)

    await delivery.dead_letters.replay(MODEL, letter.id)

    [again] = await fetch(delivery, "b")
    assert again.entry.payload_id == "r1"
    assert await delivery.payload(again.entry, "r1") == bytes(range(8))


@pytest.mark.parametrize("apart", [False, True], ids=["inline", "payload"])
async def test_a_replayed_asynchronous_request_is_queued_again(queue: RedisQueue, *, apart: bool) -> None:
    """Its failure is forgotten, its deadline is ahead again, and it can end a second time."""
    delivery = await ready(queue)
    address = EntryAddress(MODEL, 0, "r1")
    frame, payload = encode_request_apart(request()) if apart else (encode_request(request()), b"")
    acceptance = Acceptance(address=address, lane=HIGH, frame=frame, payload=payload, timeout_s=60.0)
    await delivery.requests.accept(acceptance)
    first = await delivery.requests.record(address)
    [lease] = await fetch(delivery)
    await delivery.bury(lease, "r1", CODE, REASON)
    failed = RequestOutcome(state=RequestState.FAILED, blob=b"failure", code=CODE, message=REASON, attempt=1)
    assert await delivery.requests.settle([Settlement(address=address, outcome=failed, entry=lease.entry)]) == [True]
    [letter] = await letters(delivery)

    assert await delivery.dead_letters.replay(MODEL, letter.id)

    record = await delivery.requests.record(address)
    assert record is not None
    assert first is not None
    assert (record.state, record.code, record.message, record.finished_at) == (RequestState.QUEUED, "", "", 0.0)
    assert record.deadline_at >= first.deadline_at
    assert await delivery.requests.result(address) is None
    [again] = await fetch(delivery, "b")
    assert (await delivery.requests.record(address)).state is RequestState.RUNNING  # type: ignore[union-attr]
    assert (await delivery.payload(again.entry, "r1") is not None) == apart
    done = RequestOutcome(state=RequestState.SUCCEEDED, blob=b"outputs")
    assert await delivery.requests.settle([Settlement(address=address, outcome=done, entry=again.entry)]) == [True]
    assert await delivery.requests.result(address) == b"outputs"
    assert await delivery.depth([HIGH]) == [0]


async def test_a_replayed_asynchronous_request_has_a_deadline_again(queue: RedisQueue) -> None:
    """With its old timeout, from the replay on; a request that has ended has none."""
    delivery = await ready(queue)
    address = EntryAddress(MODEL, 0, "r1")
    frame = encode_request(request())
    await delivery.requests.accept(Acceptance(address=address, lane=HIGH, frame=frame, timeout_s=0.2))
    [lease] = await fetch(delivery)
    await delivery.bury(lease, "r1", CODE, REASON)
    await delivery.requests.settle(
        [Settlement(address=address, outcome=RequestOutcome(state=RequestState.FAILED, blob=b""))]
    )
    [letter] = await letters(delivery)
    first = await delivery.requests.record(address)
    assert first is not None
    await eventually(lambda: delivery.clock.now_s() > first.created_at + 0.05)

    await delivery.dead_letters.replay(MODEL, letter.id)

    async def is_due() -> bool:
        return await delivery.requests.due(MODEL, 0, 10) == [address]

    record = await delivery.requests.record(address)
    assert record is not None
    assert record.deadline_at > first.deadline_at
    await eventually(is_due)


async def test_an_asynchronous_request_that_is_delayed_can_still_be_cancelled(queue: RedisQueue) -> None:
    """Its record follows the entry to the other lane."""
    delivery = await ready(queue)
    behind = Lane(MODEL, 1, "p1.delayed")
    await delivery.ensure([behind])
    address = EntryAddress(MODEL, 0, "r1")
    frame = encode_request(request())
    await delivery.requests.accept(Acceptance(address=address, lane=HIGH, frame=frame, timeout_s=60.0))

    await delivery.delay(await fetch(delivery), behind.name)
    record = await delivery.requests.record(address)
    cancelled = RequestOutcome(state=RequestState.CANCELLED, blob=b"")
    ended = await delivery.requests.settle([Settlement(address=address, outcome=cancelled)])

    assert record is not None
    assert record.state is RequestState.QUEUED
    assert ended == [True]
    assert await delivery.depth([HIGH, behind]) == [0, 0]
