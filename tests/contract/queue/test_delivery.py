"""The delivery contract (the numbered promises of `qinfer.queue.lanes`) on each server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from qinfer.errors import QinferError
from qinfer.queue import keys
from qinfer.queue.entries import Entry, Lane, Lease, reply_address
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.support.leases import renew

HIGH, LOW = Lane("digits", 1, "p1"), Lane("digits", 1, "p2")
LONG_S = 60.0


async def submit(delivery: Queue, lane: Lane, *frames: bytes) -> list[Entry]:
    futures = []
    for frame in frames:
        future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
        delivery.submit(lane, frame, future.set_result)
        futures.append(future)
    entries = []
    for future in futures:
        answer = await future
        assert isinstance(answer, Entry)
        entries.append(answer)
    return entries


async def ready(queue: RedisQueue, *frames: bytes) -> Queue:
    """Returns a connected delivery whose two lanes exist; `frames` wait in the first."""
    delivery = await queue.connect()
    await delivery.ensure([HIGH, LOW])
    await submit(delivery, HIGH, *frames)
    return delivery


async def fetch(delivery: Queue, consumer: str = "a", count: int = 100, wait_s: float = 0.0) -> list[Lease]:
    return await delivery.fetch([HIGH, LOW], consumer, count, wait_s)


def frames(leases: Sequence[Lease]) -> list[bytes]:
    return [lease.frame for lease in leases]


@asynccontextmanager
async def listening(delivery: Queue, owner: str) -> AsyncIterator[asyncio.Queue[bytes]]:
    blobs: asyncio.Queue[bytes] = asyncio.Queue()
    is_ready = asyncio.Event()
    task = asyncio.create_task(delivery.listen(owner, blobs.put_nowait, is_ready.set))
    await is_ready.wait()
    yield blobs
    task.cancel()
    await asyncio.wait([task])


# --- submit and fetch (promise 1) ---


async def test_a_submitted_frame_is_fetched_byte_for_byte(queue: RedisQueue) -> None:
    """What goes in comes out, zero bytes and line ends included, with its entry and a count of one."""
    delivery = await ready(queue)
    frame = bytes(range(256)) + b"\r\n$3\r\n" + bytes(100_000)

    [entry] = await submit(delivery, HIGH, frame)
    [lease] = await fetch(delivery)

    assert lease == Lease(entry, "a", frame, deliveries=1, suspect=False)


async def test_frames_may_be_any_bytes_like(queue: RedisQueue) -> None:
    """A frame may be bytes, a bytearray or a memoryview."""
    delivery = await ready(queue)

    for frame in (b"one", bytearray(b"two"), memoryview(b"-three-")[1:6]):
        delivery.submit(HIGH, frame, lambda _: None)

    got: list[bytes] = []
    while len(got) < 3:
        got += frames(await fetch(delivery, wait_s=0.5))
    assert got == [b"one", b"two", b"three"]


async def test_entries_are_fetched_in_the_order_of_their_submission(queue: RedisQueue) -> None:
    """A lane is first in, first out."""
    sent = [b"%d" % number for number in range(200)]
    delivery = await ready(queue, *sent)

    got = frames(await fetch(delivery, count=150)) + frames(await fetch(delivery, count=150))

    assert got == sent


async def test_an_entry_knows_when_it_was_enqueued(queue: RedisQueue) -> None:
    """The entry's time and the delivery's clock are the same clock: the broker's."""
    delivery = await ready(queue)

    before_s = delivery.clock.now_s()
    [entry] = await submit(delivery, HIGH, b"x")
    after_s = delivery.clock.now_s()

    assert before_s - 0.1 <= entry.enqueued_s <= after_s + 0.1


async def test_what_was_submitted_before_the_first_ensure_is_not_lost(queue: RedisQueue) -> None:
    """The group starts at the first entry of the lane, not at its end."""
    delivery = await queue.connect()
    await submit(delivery, HIGH, b"early")

    await delivery.ensure([HIGH, LOW])

    assert frames(await fetch(delivery)) == [b"early"]


async def test_ensure_again_changes_nothing(queue: RedisQueue) -> None:
    """Everyone may ensure at every start."""
    delivery = await ready(queue, b"x")
    leases = await fetch(delivery)

    await delivery.ensure([HIGH, LOW])

    assert renew(delivery, leases) == []
    assert await fetch(delivery) == []


async def test_lanes_are_fetched_in_strict_priority_within_the_count(queue: RedisQueue) -> None:
    """`count` is the total: a lower lane gets what the higher one leaves."""
    delivery = await ready(queue)
    await submit(delivery, LOW, b"low1", b"low2", b"low3")
    await submit(delivery, HIGH, b"high1", b"high2")

    assert frames(await fetch(delivery, count=1)) == [b"high1"]
    assert frames(await fetch(delivery, count=3)) == [b"high2", b"low1", b"low2"]


async def test_a_fetch_of_nothing_ends_when_its_wait_ends(queue: RedisQueue) -> None:
    """An empty lane gives an empty list, after the wait."""
    delivery = await ready(queue)

    assert await fetch(delivery, wait_s=0.05) == []


async def test_a_fetch_of_no_entries_takes_none(queue: RedisQueue) -> None:
    """A count of zero is no reason to read without a bound."""
    delivery = await ready(queue, b"x")

    assert await fetch(delivery, count=0) == []
    assert await delivery.depth([HIGH]) == [1]


async def test_a_waiting_fetch_wakes_when_something_is_submitted(queue: RedisQueue) -> None:
    """An idle worker needs no second look."""
    delivery, gateway = await ready(queue), await queue.connect()
    waiting = asyncio.create_task(fetch(delivery, wait_s=LONG_S))
    await asyncio.sleep(0)

    await submit(gateway, LOW, b"wake")

    assert frames(await waiting) == [b"wake"]


async def test_a_cancelled_fetch_loses_nothing(queue: RedisQueue) -> None:
    """What a cancelled read took anyway is given back, undelivered."""
    worker, other = await ready(queue), await queue.connect()
    waiting = asyncio.create_task(fetch(worker, wait_s=LONG_S))
    await asyncio.sleep(0)
    await submit(other, HIGH, b"x")

    waiting.cancel()
    await asyncio.wait([waiting])

    leases = [] if waiting.cancelled() else waiting.result()
    await worker.release(leases)
    [lease] = await fetch(other, "b", wait_s=5.0)
    assert (lease.frame, lease.deliveries) == (b"x", 1)


async def test_two_consumers_share_a_lane_without_overlap(queue: RedisQueue) -> None:
    """Every entry is fetched once, whoever comes first."""
    first = await ready(queue, *[b"%d" % number for number in range(100)])
    second = await queue.connect()
    got: dict[str, list[bytes]] = {"a": [], "b": []}

    async def work(delivery: Queue, consumer: str) -> None:
        while leases := await fetch(delivery, consumer, count=7):
            got[consumer] += frames(leases)

    await asyncio.gather(work(first, "a"), work(second, "b"))

    assert sorted(got["a"] + got["b"], key=int) == [b"%d" % number for number in range(100)]
    assert got["a"]
    assert got["b"]


# --- leases (promise 2) ---


async def test_renewal_keeps_the_lease_and_its_delivery_count(queue: RedisQueue) -> None:
    """However often it is renewed, the entry counts as delivered once."""
    delivery = await ready(queue, b"x")
    leases = await fetch(delivery)

    for _ in range(3):
        assert await asyncio.to_thread(renew, delivery, leases) == []

    await delivery.release(leases)
    [again] = await fetch(delivery, "b")
    assert again.deliveries == 1


async def test_renewal_never_takes_an_entry_back_from_a_new_owner(queue: RedisQueue) -> None:
    """The old owner learns that its lease is lost, and the new owner keeps its own."""
    delivery = await ready(queue, b"x")
    old = await fetch(delivery, "a")
    new = await delivery.reclaim([HIGH, LOW], "b", idle_s=0.0, count=10)

    assert renew(delivery, old) == old
    assert renew(delivery, new) == []


async def test_renewal_reports_what_was_finished(queue: RedisQueue) -> None:
    """A worker learns of a cancelled request by its renewal."""
    delivery = await ready(queue, b"x", b"y")
    leases = await fetch(delivery)

    await delivery.finish([leases[0].entry])

    assert renew(delivery, leases) == leases[:1]


# --- release (promise 3) ---


async def test_released_entries_are_fetched_at_once_and_first(queue: RedisQueue) -> None:
    """They come before newer work of their lane, and the count is as it was before."""
    delivery, other = await ready(queue, b"first", b"second"), await queue.connect()
    [first] = await fetch(delivery, "a", count=1)

    await delivery.release([first])

    assert [(lease.frame, lease.deliveries) for lease in await fetch(other, "b")] == [(b"first", 1), (b"second", 1)]


async def test_released_entries_wait_for_those_of_a_higher_priority(queue: RedisQueue) -> None:
    """A drain of many workers gives back much that is not urgent: it stays so."""
    delivery = await ready(queue)
    await submit(delivery, LOW, b"low", b"newer")
    held = await fetch(delivery, "a", count=1)
    await submit(delivery, HIGH, b"high")

    await delivery.release(held)

    assert [lease.frame for lease in await fetch(delivery, "b")] == [b"high", b"low", b"newer"]


async def test_release_of_an_entry_that_another_owns_changes_nothing(queue: RedisQueue) -> None:
    """A late release can't take work away from its new owner."""
    delivery = await ready(queue, b"x")
    old = await fetch(delivery, "a")
    new = await delivery.reclaim([HIGH, LOW], "b", idle_s=0.0, count=10)

    await delivery.release(old)

    assert await fetch(delivery, "c") == []
    assert renew(delivery, new) == []


async def test_a_released_entry_may_have_to_rest(queue: RedisQueue) -> None:
    """Nobody gets it meanwhile, whoever asks; then it comes before newer work, its count as it was before."""
    delivery, other = await ready(queue, b"long", b"short", b"new"), await queue.connect()
    long, short = await fetch(delivery, "a", count=2)

    await delivery.release([long], rest_s=600.0)
    await delivery.release([short], rest_s=0.2)

    assert [lease.frame for lease in await fetch(other, "b", count=1)] == [b"new"]
    assert await delivery.reclaim([HIGH, LOW], "c", idle_s=1.0, count=10) == []
    [again] = await other.fetch([HIGH, LOW], "b", 10, 30.0)
    assert (again.frame, again.deliveries, again.suspect) == (b"short", 1, False)
    assert await delivery.depth([HIGH]) == [3]
    assert await delivery.withdraw([long.entry]) == [True]


async def test_a_released_entry_is_no_suspect(queue: RedisQueue) -> None:
    """`reclaim` leaves to `fetch` what was handed back in order."""
    delivery = await ready(queue, b"x")
    await delivery.release(await fetch(delivery))

    assert await delivery.reclaim([HIGH, LOW], "b", idle_s=0.0, count=10) == []
    assert [lease.suspect for lease in await fetch(delivery, "b")] == [False]


# --- reclaim (promise 4) ---


async def test_reclaim_takes_silent_owners_entries_as_suspects(queue: RedisQueue) -> None:
    """The entry is counted once more, and marked."""
    delivery = await ready(queue, b"x")
    [lost] = await fetch(delivery, "a")

    [taken] = await delivery.reclaim([HIGH, LOW], "b", idle_s=0.0, count=10)

    assert taken == Lease(lost.entry, "b", b"x", deliveries=2, suspect=True)


async def test_reclaim_spares_what_is_renewed(queue: RedisQueue) -> None:
    """Only the owner that went silent loses its entry."""
    delivery = await ready(queue, b"silent", b"alive")
    silent, alive = await fetch(delivery, "a")

    taken: list[Lease] = []
    while not taken:
        assert renew(delivery, [alive]) == []
        taken = await delivery.reclaim([HIGH, LOW], "b", idle_s=1.0, count=10)
        await asyncio.sleep(0.02)

    assert [lease.entry for lease in taken] == [silent.entry]


async def test_reclaim_takes_no_more_than_its_count(queue: RedisQueue) -> None:
    """Over all lanes together."""
    delivery = await ready(queue, b"1", b"2", b"3")
    await submit(delivery, LOW, b"4")
    await fetch(delivery, "a")

    assert frames(await delivery.reclaim([HIGH, LOW], "b", idle_s=0.0, count=2)) == [b"1", b"2"]


# --- finish and depth (promises 5, 6) ---


async def test_finish_removes_delivered_and_undelivered_entries(queue: RedisQueue) -> None:
    """Whoever owns them, or nobody: they are gone for every reader."""
    delivery = await ready(queue)
    entries = await submit(delivery, HIGH, b"1", b"2", b"3")
    await fetch(delivery, count=1)

    await delivery.finish(entries[:2])

    assert await delivery.depth([HIGH]) == [1]
    assert frames(await fetch(delivery, "b")) == [b"3"]
    assert frames(await delivery.reclaim([HIGH, LOW], "c", idle_s=0.0, count=10)) == [b"3"]


async def test_finish_again_is_no_error(queue: RedisQueue) -> None:
    """Gateway, worker and janitor may all finish the same entry."""
    delivery = await ready(queue, b"x")
    [lease] = await fetch(delivery)

    for _ in range(2):
        await delivery.finish([lease.entry])

    assert await delivery.depth([HIGH]) == [0]


async def test_a_finished_entry_is_neither_released_nor_reclaimed(queue: RedisQueue) -> None:
    """`finish` is terminal."""
    delivery = await ready(queue, b"x")
    leases = await fetch(delivery)
    await delivery.finish([lease.entry for lease in leases])

    await delivery.release(leases)

    assert await fetch(delivery, "b") == []
    assert await delivery.reclaim([HIGH, LOW], "b", idle_s=0.0, count=10) == []


async def test_many_entries_of_several_lanes_finish_together(queue: RedisQueue) -> None:
    """More than one script call can carry."""
    delivery = await ready(queue)
    entries = await submit(delivery, HIGH, *[b"x"] * 2500)
    entries += await submit(delivery, LOW, b"y")

    await delivery.finish(entries)

    assert await delivery.depth([HIGH, LOW]) == [0, 0]


async def test_depth_counts_what_waits_and_what_is_in_flight(queue: RedisQueue) -> None:
    """A fetched entry still counts; a lane that never was counts zero."""
    delivery = await ready(queue, b"1", b"2")
    await submit(delivery, LOW, b"3")
    await fetch(delivery, count=1)

    assert await delivery.depth([HIGH, LOW, Lane("nobody", 7)]) == [2, 1, 0]


async def test_in_flight_counts_what_a_consumer_holds(queue: RedisQueue) -> None:
    """Not what waits, was given back, or is to be tried alone; a lane that never was counts zero."""
    delivery = await ready(queue, b"1", b"2", b"3", b"4")
    await submit(delivery, LOW, b"5")
    first, second, _ = await fetch(delivery, count=3)
    before = await delivery.in_flight([HIGH, LOW, Lane("nobody", 7)])
    await delivery.release([first])
    await delivery.finish([second.entry])
    released = await delivery.in_flight([HIGH])
    (suspect,) = await delivery.reclaim([HIGH], "other", 0.0, 9)
    await delivery.release([suspect])

    assert (before, released, await delivery.in_flight([HIGH])) == ([3, 0, 0], [1], [0])


# --- replies (promises 7, 8) ---


async def test_a_published_blob_is_delivered(queue: RedisQueue) -> None:
    """In order, byte for byte."""
    gateway, worker = await queue.connect(), await queue.connect()
    async with listening(gateway, "g1") as blobs:
        for blob in (b"one\r\n", bytes(1000), bytearray(b"three")):
            assert await worker.publish(reply_address("g1"), blob)

        assert [await blobs.get() for _ in range(3)] == [b"one\r\n", bytes(1000), b"three"]


async def test_publish_to_a_stream_that_is_gone_says_so(queue: RedisQueue) -> None:
    """And does not bring it to life: twice the same answer."""
    delivery = await queue.connect()

    assert not await delivery.publish(reply_address("nobody"), b"x")
    assert not await delivery.publish(reply_address("nobody"), b"x")


async def test_a_blob_is_published_without_a_task(queue: RedisQueue) -> None:
    """In the write of the tick; the reply says whether the stream was there."""
    gateway, worker = await queue.connect(), await queue.connect()
    replies: list[object] = []
    async with listening(gateway, "g1") as blobs:
        worker.publish_now(reply_address("g1"), b"one", replies.append)
        worker.publish_now(reply_address("nobody"), b"two", replies.append)

        assert await blobs.get() == b"one"
        await eventually(lambda: len(replies) == 2)
    assert [type(reply) for reply in replies] == [bytes, type(None)]


async def test_listeners_get_their_own_replies_only(queue: RedisQueue) -> None:
    """A reply address is one process's."""
    first, second = await queue.connect(), await queue.connect()
    async with listening(first, "g1") as to_first, listening(second, "g2") as to_second:
        await first.publish(reply_address("g2"), b"for g2")
        await second.publish(reply_address("g1"), b"for g1")

        assert (await to_first.get(), await to_second.get()) == (b"for g1", b"for g2")


@pytest.mark.parametrize("instead", [b"", b"of another type"])
async def test_a_listener_whose_stream_is_gone_says_so(queue: RedisQueue, instead: bytes) -> None:
    """Somebody deleted it, or put something else in its place: replies to what was submitted before may be lost."""
    delivery = await queue.connect()
    blobs: asyncio.Queue[bytes] = asyncio.Queue()
    is_ready, is_lost = asyncio.Event(), asyncio.Event()
    slot, key = keys.reply_stream(reply_address("g1"))
    task = asyncio.create_task(delivery.listen("g1", blobs.put_nowait, is_ready.set, is_lost.set))
    await is_ready.wait()
    assert not is_lost.is_set()

    await delivery.router.call(slot, *((b"SET", key, instead) if instead else (b"DEL", key)))
    await is_lost.wait()

    assert await delivery.publish(reply_address("g1"), b"again")
    assert await blobs.get() == b"again"
    task.cancel()
    await asyncio.wait([task])


async def test_a_listener_whose_delivery_raises_goes_on(queue: RedisQueue, caplog: pytest.LogCaptureFixture) -> None:
    """One blob that can't be handled costs nobody else an answer."""
    delivery = await queue.connect()
    blobs: asyncio.Queue[bytes] = asyncio.Queue()
    is_ready = asyncio.Event()

    def deliver(blob: bytes) -> None:
        if blob == b"bad":
            raise ValueError("bad blob")
        blobs.put_nowait(blob)

    task = asyncio.create_task(delivery.listen("g1", deliver, is_ready.set))
    await is_ready.wait()
    for blob in (b"bad", b"good"):
        await delivery.publish(reply_address("g1"), blob)

    assert await blobs.get() == b"good"
    assert "a reply could not be delivered" in caplog.text
    task.cancel()
    await asyncio.wait([task])


# --- cancel (promise 5), and marks ---


async def test_cancel_removes_entries_and_tells_of_those_that_are_held(queue: RedisQueue) -> None:
    """What waits is removed without a word; the consumer of the other learns that nobody waits for it."""
    delivery = await ready(queue)
    held, waiting = await submit(delivery, HIGH, b"1", b"2")
    await fetch(delivery, count=1)

    await delivery.cancel([held, waiting])

    assert await delivery.depth([HIGH]) == [0]
    ((mark, lane, entry_id),) = await delivery.marks.list_cancelled("digits", 0, "0")
    assert (lane, entry_id) == (HIGH, held.entry_id)
    assert await delivery.marks.list_cancelled("digits", 0, mark) == []


async def test_what_is_cancelled_is_told_from_an_instant_on(queue: RedisQueue) -> None:
    """Nothing that was enqueued later can have been cancelled before."""
    delivery = await ready(queue)
    (entry,) = await submit(delivery, HIGH, b"1")
    await fetch(delivery)
    await delivery.cancel([entry])

    before = str(int(entry.enqueued_s * 1000) - 1)
    assert len(await delivery.marks.list_cancelled("digits", 0, before)) == 1
    after = str(int((entry.enqueued_s + 3600) * 1000))
    assert await delivery.marks.list_cancelled("digits", 0, after) == []


async def test_cancel_again_tells_nothing(queue: RedisQueue) -> None:
    delivery = await ready(queue, b"x")
    [lease] = await fetch(delivery)

    for _ in range(2):
        await delivery.cancel([lease.entry])

    assert len(await delivery.marks.list_cancelled("digits", 0, "0")) == 1


async def test_an_entry_of_a_lane_that_nobody_read_is_cancelled(queue: RedisQueue) -> None:
    """There is no consumer group yet."""
    delivery = await queue.connect()
    (entry,) = await submit(delivery, HIGH, b"x")

    await delivery.cancel([entry])

    assert await delivery.depth([HIGH]) == [0]


async def test_an_entry_is_marked_for_a_while(queue: RedisQueue) -> None:
    delivery = await ready(queue)
    first, second = await submit(delivery, HIGH, b"1", b"2")

    await delivery.marks.mark_sent(first, 60.0)

    assert await delivery.marks.was_sent(first)
    assert not await delivery.marks.was_sent(second)
    key = keys.sent(HIGH, first.entry_id)
    assert 0 < await delivery.router.call(keys.slot(key), b"PTTL", key) <= 60_000

    await delivery.marks.remove_marks([first, second])

    assert not await delivery.marks.was_sent(first)
