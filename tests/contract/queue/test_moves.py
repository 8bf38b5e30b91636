"""Moves of what waits to the lanes of another version, on each server (promise 15 of `qinfer.queue.lanes`)."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from qinfer.errors import QinferError, QueueFull
from qinfer.queue import keys, submitter
from qinfer.queue.entries import DELAYED, Entry, Lane, Lease, Payload, RequestState, share_of
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.support.requests import accept, address, ended, settle

BAD, STABLE = Lane("digits", 2, "p1"), Lane("digits", 1, "p1")
BAD_LOW, STABLE_LOW = Lane("digits", 2, "p2"), Lane("digits", 1, "p2")
BAD_LATE, STABLE_LATE = Lane("digits", 2, "p1" + DELAYED), Lane("digits", 1, "p1" + DELAYED)
BY = "classify"


async def ready(queue: RedisQueue) -> Queue:
    delivery = await queue.connect()
    await delivery.ensure([BAD, BAD_LOW, STABLE, STABLE_LOW])
    return delivery


async def offer(delivery: Queue, frame: bytes, lane: Lane = BAD, **about: Any) -> Entry | QinferError:
    future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
    delivery.submit(lane, frame, future.set_result, **{"endpoint": BY, **about})
    return await future


async def submit(delivery: Queue, *frames: bytes, **about: Any) -> list[Entry]:
    """Submits frames that came by the endpoint, unless `endpoint` says something else."""
    entries = []
    for frame in frames:
        answer = await offer(delivery, frame, **about)
        assert isinstance(answer, Entry), answer
        entries.append(answer)
    return entries


async def move(delivery: Queue) -> int:
    return await delivery.moves.move([BAD, BAD_LATE, BAD_LOW], STABLE.version, BY)


async def fetch(delivery: Queue, *lanes: Lane, count: int = 1000) -> list[Lease]:
    return await delivery.fetch(lanes or (STABLE,), "a", count, 0.0)


def frames(leases: list[Lease]) -> list[bytes]:
    return [lease.frame for lease in leases]


async def test_what_waits_is_moved_in_order(queue: RedisQueue) -> None:
    """Moved entries are in the other lane alone, behind what was there, as of when they were enqueued first."""
    delivery = await ready(queue)
    await submit(delivery, b"there", lane=STABLE)
    first, _ = await submit(delivery, b"1", b"2")

    assert await move(delivery) == 2

    assert await delivery.depth([BAD, STABLE]) == [0, 3]
    leases = await fetch(delivery)
    assert frames(leases) == [b"there", b"1", b"2"]
    assert leases[1].entry.enqueued_s == first.enqueued_s
    assert (leases[1].entry.origin, leases[1].deliveries) == (first.entry_id, 1)
    assert await move(delivery) == 0
    await delivery.finish([lease.entry for lease in leases])
    assert await delivery.depth([BAD, STABLE]) == [0, 0]


async def test_what_did_not_come_by_the_endpoint_stays(queue: RedisQueue) -> None:
    """Callers who named the version want its answer; so do those who asked another endpoint."""
    delivery = await ready(queue)
    await submit(delivery, b"by number", endpoint="")
    await submit(delivery, b"1")
    await submit(delivery, b"another's", endpoint="other")

    assert await move(delivery) == 1

    assert frames(await fetch(delivery, BAD)) == [b"by number", b"another's"]
    assert frames(await fetch(delivery)) == [b"1"]


async def test_what_a_worker_holds_stays(queue: RedisQueue) -> None:
    """And what it gives back is moved the next time; not what is suspect, which other workers try alone."""
    delivery = await ready(queue)
    await submit(delivery, b"1", b"2", b"3")
    one, two = await fetch(delivery, BAD, count=2)

    assert await move(delivery) == 1
    assert await delivery.depth([BAD]) == [2]

    await delivery.release([one])
    assert await move(delivery) == 1
    leases = await fetch(delivery)
    assert frames(leases) == [b"3", b"1"]
    assert [lease.deliveries for lease in leases] == [1, 1]
    assert queue.on_owner("XPENDING", keys.lane(BAD), keys.GROUP)["pending"] == 1

    (suspect,) = await delivery.reclaim([BAD], "b", idle_s=0.0, count=10)
    await delivery.release([suspect])
    assert (suspect.entry, await move(delivery)) == (two.entry, 0)
    assert frames(await delivery.reclaim([BAD], "b", idle_s=0.0, count=10)) == [b"2"]


async def test_priorities_and_what_was_delayed_keep_their_lanes(queue: RedisQueue) -> None:
    delivery = await ready(queue)
    late, _ = await submit(delivery, b"late", b"high")
    await delivery.delay(await fetch(delivery, BAD, count=1), BAD_LATE.name)
    await submit(delivery, b"low", lane=BAD_LOW)

    assert await move(delivery) == 3

    assert await delivery.depth([BAD, BAD_LOW, BAD_LATE]) == [0, 0, 0]
    assert await delivery.depth([STABLE, STABLE_LOW, STABLE_LATE]) == [1, 1, 1]
    assert (await fetch(delivery, STABLE_LATE))[0].entry.origin == late.entry_id


async def test_tenants_have_their_shares_there(queue: RedisQueue) -> None:
    """Those of the other lane, with the weights that they had; so a flood that is moved is none for the others."""
    delivery = await ready(queue)
    delivery.places.weigh = {"heavy": 2, "light": 4, "there": 1}.__getitem__
    await submit(delivery, b"there", lane=STABLE, tenant="there")
    await submit(delivery, *[b"heavy"] * 20, tenant="heavy")
    await submit(delivery, *[b"light"] * 20, tenant="light")

    assert await move(delivery) == 40

    (shares,) = await delivery.shares([STABLE], named=True)
    assert [(share.tenants, share.entries, share.weight) for share in shares] == [
        (("there",), 1, 1),
        (("heavy",), 20, 2),
        (("light",), 20, 4),
    ]
    assert Counter(frames(await fetch(delivery, count=7))) == {b"there": 1, b"heavy": 2, b"light": 4}


async def test_many_are_moved_in_parts(queue: RedisQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script looks at so many entries, or so many bytes, and the next goes on behind them, share by share."""
    monkeypatch.setattr(submitter, "MOVES_AT_ONCE", 3)
    monkeypatch.setattr(submitter, "MOVED_BYTES_AT_ONCE", 100)
    delivery = await ready(queue)
    sent = [b"%02d" % number + b"x" * (number % 5 * 20) for number in range(25)]
    for number, frame in enumerate(sent):
        await submit(delivery, frame, tenant=f"t{number % 3}", endpoint="" if number % 7 == 0 else BY)

    assert await move(delivery) == 21

    assert sorted(frames(await fetch(delivery))) == [one for number, one in enumerate(sent) if number % 7]
    assert sorted(frames(await fetch(delivery, BAD))) == sent[::7]


async def test_a_limit_counts_what_was_moved(queue: RedisQueue) -> None:
    """It was let in already; nothing new is, until there is room."""
    delivery = await ready(queue)
    await submit(delivery, b"1", b"2", limit=2)
    await submit(delivery, b"there", lane=STABLE, limit=2)

    assert await move(delivery) == 2

    assert isinstance(await offer(delivery, b"4", lane=STABLE, limit=2), QueueFull)
    await delivery.finish([lease.entry for lease in await fetch(delivery, count=2)])
    assert isinstance(await offer(delivery, b"4", lane=STABLE, limit=2), Entry)


async def test_a_payload_goes_with_its_entry(queue: RedisQueue) -> None:
    delivery = await ready(queue)
    await submit(delivery, b"1", payload=Payload("r1", b"tensors", 60.0))

    await move(delivery)

    (lease,) = await fetch(delivery)
    assert await delivery.payload(lease.entry, lease.entry.payload_id) == b"tensors"
    await delivery.finish([lease.entry])
    assert await delivery.payload(lease.entry, "r1") is None


async def test_who_cancels_finds_what_was_moved(queue: RedisQueue) -> None:
    """By the place that it was submitted to; a worker that holds it there is told."""
    delivery = await ready(queue)
    waiting, held = await submit(delivery, b"1", b"2", payload=Payload("r1", b"tensors", 60.0))
    await move(delivery)
    _, lease = await fetch(delivery, count=2)
    mark = str(int(delivery.clock.now_s() * 1000) - 60_000)

    await delivery.cancel([waiting, held])

    assert await delivery.depth([STABLE]) == [0]
    assert await delivery.payload(lease.entry, "r1") is None
    told = await delivery.marks.list_cancelled("digits", 0, mark)
    assert (STABLE, lease.entry.entry_id) in [(lane, entry_id) for _, lane, entry_id in told]


async def test_who_withdraws_finds_what_was_moved(queue: RedisQueue) -> None:
    """What waits is removed, and what a worker holds there is left to it."""
    delivery = await ready(queue)
    held, waiting, stayed = *await submit(delivery, b"1", b"2"), *await submit(delivery, b"3", endpoint="")
    await move(delivery)
    (lease,) = await fetch(delivery, count=1)

    assert await delivery.withdraw([held, waiting, stayed]) == [False, True, True]

    assert await delivery.depth([BAD, STABLE]) == [0, 1]
    assert lease.frame == b"1"


async def test_notes_are_kept_for_a_while(queue: RedisQueue) -> None:
    delivery = await ready(queue)
    await submit(delivery, b"1", endpoint="")
    await move(delivery)
    assert queue.on_owner("EXISTS", keys.moved("digits")) == 0

    await submit(delivery, b"1")
    await move(delivery)
    assert 0 < queue.on_owner("PTTL", keys.moved("digits")) <= submitter.NOTES_KEPT_S * 1000


async def test_a_stored_request_is_found_where_it_went(queue: RedisQueue) -> None:
    """Its record tells the version that will answer, a repetition is known, and it ends once, there."""
    delivery = await ready(queue)
    about: dict[str, Any] = {"lane": BAD, "endpoint": BY, "tenant": "t", "idempotency_key": "k", "payload": b"tensors"}
    await accept(delivery, "r1", **about)

    assert await move(delivery) == 1

    record = await delivery.requests.record(address("r1"))
    assert record is not None
    assert (record.state, record.version) == (RequestState.QUEUED, 1)
    assert not (await accept(delivery, "r1", **about)).is_new
    assert not (await accept(delivery, "r2", **{**about, "body_hash": "hash of r1"})).is_new
    (lease,) = await fetch(delivery)
    record = await delivery.requests.record(address("r1"))
    assert record is not None
    assert (record.state, record.attempts) == (RequestState.RUNNING, 1)
    assert await settle(delivery, ended("r1", entry=lease.entry), ended("r1", entry=lease.entry)) == [True, False]
    assert await delivery.depth([BAD, STABLE]) == [0, 0]
    assert queue.on_owner("EXISTS", keys.moved("digits")) == 0


async def test_a_record_that_is_gone_is_not_made_again(queue: RedisQueue) -> None:
    """Its entry is moved like others, for whoever takes it to find out."""
    delivery = await ready(queue)
    await accept(delivery, "r1", lane=BAD, endpoint=BY)
    queue.on_owner("DEL", keys.request("digits", 0, "r1"))

    assert await move(delivery) == 1

    assert await delivery.requests.record(address("r1")) is None


async def test_a_stored_request_is_cancelled_where_it_went(queue: RedisQueue) -> None:
    """And at its deadline: whoever ends it looks at its record."""
    delivery = await ready(queue)
    await accept(delivery, "r1", lane=BAD, endpoint=BY, timeout_s=0.05)
    await move(delivery)

    async def is_due() -> bool:
        return bool(await delivery.requests.due("digits", 0, 10))

    await eventually(is_due, description="a deadline")
    assert await settle(delivery, ended("r1", RequestState.EXPIRED)) == [True]
    assert await delivery.depth([BAD, STABLE]) == [0, 0]


async def test_a_worker_that_waits_is_woken(queue: RedisQueue) -> None:
    """By the first entry of a tenant whose stream is made by the move, too: it goes to the lane that is waited for."""
    delivery, worker = await ready(queue), await queue.connect()
    await submit(delivery, b"0", lane=STABLE, tenant="one")
    await delivery.finish([lease.entry for lease in await fetch(delivery)])
    await submit(delivery, b"1", b"2", tenant="two")
    async with asyncio.TaskGroup() as group:
        taking = group.create_task(worker.fetch([STABLE], "w", 1, 30.0))
        await asyncio.sleep(0)
        assert await move(delivery) == 2
    (first,), (second,) = taking.result(), await worker.fetch([STABLE], "w", 5, 30.0)
    assert (first.frame, first.entry.lane) == (b"1", STABLE)
    assert (second.frame, second.entry.lane) == (b"2", share_of(STABLE, 1))


async def test_lanes_that_do_not_exist(queue: RedisQueue) -> None:
    """There is nothing to move, and no lane is made; where the other one is missing, it is made with all of it."""
    delivery = await queue.connect()
    assert await move(delivery) == 0
    assert queue.on_owner("EXISTS", keys.lane(BAD)) == 0

    await submit(delivery, b"1")
    assert await move(delivery) == 1
    await delivery.ensure([STABLE])
    assert frames(await fetch(delivery)) == [b"1"]


async def test_two_that_move_at_once(queue: RedisQueue) -> None:
    """As when the lease of the controller changes hands: each entry is moved once."""
    delivery, other = await ready(queue), await queue.connect()
    sent = [b"%03d" % number for number in range(600)]
    await asyncio.gather(*(submit(delivery, frame) for frame in sent))

    counts = await asyncio.gather(move(delivery), move(other))

    assert sum(counts) == 600
    assert sorted(frames(await fetch(delivery))) == sent
