"""What entries do between submit and finish: limits, withdrawal, delay, suspects, payloads (promises 9 to 11)."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from qinfer.errors import QinferError, QueueFull
from qinfer.queue import keys, values
from qinfer.queue.entries import DELAYED, FULL, Entry, Lane, Lease, Payload
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import HIGH, LOW, fetch, frames, ready, submit
from tests.support.leases import renew

BEHIND = Lane("digits", 1, "p1" + DELAYED)
OTHER = Lane("digits", 2, "p1")


async def offer(
    delivery: Queue, frame: bytes, *, lane: Lane = HIGH, payload: bytes | None = None, limit: int = 0, id: str = "r1"
) -> Entry | QinferError:
    """Submits with a limit or a payload; returns what `done` was called with."""
    future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
    stored = None if payload is None else Payload(id, payload, 60.0)
    delivery.submit(lane, frame, future.set_result, payload=stored, limit=limit)
    return await future


async def with_payload(delivery: Queue, frame: bytes, payload: bytes, id: str = "r1") -> Entry:
    answer = await offer(delivery, frame, payload=payload, id=id)
    assert isinstance(answer, Entry)
    return answer


async def begin(delivery: Queue, leases: list[Lease]) -> None:
    """Has entries begin; a node that does not know the script is sent it behind the first reply."""
    delivery.marks.mark_begun(leases)
    for _ in range(2):
        await delivery.depth([HIGH])


def executing(queue: RedisQueue) -> set[str]:
    """Returns the entries that execute."""
    return {entry_id.decode() for entry_id in queue.on_owner("SMEMBERS", keys.lane(HIGH) + b"~executing")}


async def suspects(delivery: Queue, consumer: str = "b") -> list[Lease]:
    """Takes what another consumer holds, as if it had died."""
    return await delivery.reclaim([HIGH, LOW], consumer, idle_s=0.0, count=100)


# --- one of several ---


async def test_cancelling_one_of_four_leaves_the_other_three(queue: RedisQueue) -> None:
    """They stay their owner's, can be renewed and finished, and nobody else sees them."""
    delivery, gateway = await ready(queue, b"1", b"2", b"3", b"4"), await queue.connect()
    leases = await fetch(delivery)

    await gateway.finish([leases[1].entry])

    mates = [leases[0], *leases[2:]]
    assert renew(delivery, leases) == [leases[1]]
    assert await delivery.depth([HIGH]) == [3]
    assert await fetch(gateway, "b") == []
    await delivery.finish([lease.entry for lease in mates])
    assert await delivery.depth([HIGH]) == [0]


# --- limits (promise 9) ---


async def test_a_limit_refuses_what_is_beyond_it(queue: RedisQueue) -> None:
    """With Triton's text, and nothing is enqueued."""
    delivery = await ready(queue, b"1")

    second, third = await offer(delivery, b"2", limit=2), await offer(delivery, b"3", limit=2)

    assert isinstance(second, Entry)
    assert isinstance(third, QueueFull)
    assert third.message == FULL
    assert frames(await fetch(delivery)) == [b"1", b"2"]


@pytest.mark.parametrize("limit", [3, 100])
async def test_of_those_submitted_at_once_the_first_find_room(queue: RedisQueue, limit: int) -> None:
    """In their order; also where they are more than one script appends."""
    delivery = await ready(queue, b"there")
    given = [b"%d" % number for number in range(130)]

    answers = await asyncio.gather(*(offer(delivery, frame, limit=limit) for frame in given))

    assert [isinstance(answer, Entry) for answer in answers] == [True] * (limit - 1) + [False] * (131 - limit)
    assert frames(await fetch(delivery, count=200)) == [b"there", *given[: limit - 1]]


async def test_entries_that_execute_do_not_count_against_a_limit(queue: RedisQueue) -> None:
    """Only what waits does, fetched or not; what was given back waits again, suspects too."""
    delivery = await ready(queue, b"1", b"2")
    leases = await fetch(delivery, "a")
    assert isinstance(await offer(delivery, b"3", limit=2), QueueFull)
    await begin(delivery, leases)
    assert isinstance(await offer(delivery, b"3", limit=1), Entry)
    assert isinstance(await offer(delivery, b"4", limit=1), QueueFull)

    await delivery.release(leases[:1])
    assert isinstance(await offer(delivery, b"4", limit=2), QueueFull)
    await delivery.release([lease for lease in await suspects(delivery) if lease.suspect])

    assert isinstance(await offer(delivery, b"4", limit=3), QueueFull)
    assert isinstance(await offer(delivery, b"4", limit=4), Entry)


async def test_what_executes_is_its_workers_as_before(queue: RedisQueue) -> None:
    """It is renewed, released, buried and finished by the leases on it, and its delivery count stays."""
    delivery = await ready(queue, b"1", b"2", b"3")
    leases = await fetch(delivery, "a")
    await begin(delivery, leases)

    assert renew(delivery, leases) == []
    await delivery.release(leases[:1])
    assert await delivery.bury(leases[1], "2", "internal", "why")
    (again,) = await fetch(delivery, "b")
    await begin(delivery, leases[::-1])  # of which one is another's by now, and one is gone

    assert (again.frame, again.deliveries) == (b"1", 1)
    assert renew(delivery, leases) == leases[:2]
    await delivery.finish([lease.entry for lease in (again, *leases)])
    assert await delivery.depth([HIGH]) == [0]


@pytest.mark.parametrize("way", ["finish", "cancel", "release", "delay", "bury", "reclaim"])
async def test_what_has_ended_is_no_longer_among_those_that_execute(queue: RedisQueue, way: str) -> None:
    """However its lease ends; the others execute on."""
    delivery = await ready(queue, b"1", b"2")
    leases = await fetch(delivery, "a")
    await begin(delivery, leases)
    first = leases[0]
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "finish": lambda: delivery.finish([first.entry]),
        "cancel": lambda: delivery.cancel([first.entry]),
        "release": lambda: delivery.release([first]),
        "delay": lambda: delivery.delay([first], BEHIND.name),
        "bury": lambda: delivery.bury(first, "1", "internal", "why"),
        "reclaim": lambda: delivery.reclaim([HIGH], "b", idle_s=0.0, count=1),
    }

    await ways[way]()

    assert executing(queue) == {leases[1].entry.entry_id}


async def test_what_another_version_removed_is_found_not_to_execute(queue: RedisQueue) -> None:
    """One that knows no set: whoever reclaims looks."""
    delivery = await ready(queue, b"1", b"2")
    leases = await fetch(delivery, "a")
    await begin(delivery, leases)
    gone = leases[0].entry.entry_id
    queue.on_owner("XACK", keys.lane(HIGH), keys.GROUP, gone)
    queue.on_owner("XDEL", keys.lane(HIGH), gone)

    await delivery.reclaim([HIGH], "b", idle_s=60.0, count=1)

    assert executing(queue) == {leases[1].entry.entry_id}


async def test_what_a_dead_worker_executed_waits_once_it_is_reclaimed(queue: RedisQueue) -> None:
    """Until then it counts as executing."""
    delivery = await ready(queue, b"1")
    await begin(delivery, await fetch(delivery, "a"))
    assert isinstance(await offer(delivery, b"2", limit=1), Entry)

    (lease,) = await suspects(delivery)

    assert lease.frame == b"1"
    assert isinstance(await offer(delivery, b"3", limit=2), QueueFull)
    await begin(delivery, [lease])
    assert isinstance(await offer(delivery, b"3", limit=2), Entry)


async def test_delayed_entries_count_against_a_limit(queue: RedisQueue) -> None:
    """They wait too; those of other lanes are others' affair."""
    delivery = await ready(queue, b"1")
    await delivery.ensure([BEHIND])
    await submit(delivery, LOW, b"low")
    await delivery.delay(await delivery.fetch([HIGH], "a", 1, 0.0), BEHIND.name)

    assert isinstance(await offer(delivery, b"2", limit=1), QueueFull)
    assert isinstance(await offer(delivery, b"2", limit=2), Entry)


async def test_a_limit_holds_in_a_lane_that_nobody_reads_yet(queue: RedisQueue) -> None:
    """Without a consumer group nothing is in flight."""
    delivery = await queue.connect()

    answers = [await offer(delivery, b"x", lane=OTHER, limit=2) for _ in range(3)]

    assert [type(answer) for answer in answers] == [Entry, Entry, QueueFull]


async def test_of_many_concurrent_submits_a_limit_lets_exactly_so_many_in(queue: RedisQueue) -> None:
    """Two gateways together: Redis counts, not they."""
    first, second = await ready(queue), await queue.connect()

    answers = await asyncio.gather(*(offer(d, b"x", limit=7) for d in [first, second] * 10))

    assert sum(isinstance(answer, Entry) for answer in answers) == 7
    assert await first.depth([HIGH]) == [7]


# --- withdraw (promise 10) ---


async def test_waiting_entries_are_withdrawn_and_held_ones_are_not(queue: RedisQueue) -> None:
    """Undelivered, released and gone ones, in the order asked."""
    delivery = await ready(queue)
    held, released, gone, waiting = await submit(delivery, HIGH, b"held", b"released", b"gone", b"waiting")
    leases = await fetch(delivery, "a", count=3)
    await delivery.release(leases[1:2])
    await delivery.finish([gone])

    removed = await delivery.withdraw([waiting, held, gone, released])

    assert removed == [True, False, False, True]
    assert await delivery.depth([HIGH]) == [1]
    assert renew(delivery, leases[:1]) == []


async def test_what_was_withdrawn_is_neither_fetched_nor_reclaimed(queue: RedisQueue) -> None:
    """It is gone for every reader; suspects that wait can be withdrawn as well."""
    delivery = await ready(queue, b"suspect")
    await fetch(delivery, "a")
    [suspect] = await suspects(delivery)
    await delivery.release([suspect])
    [new] = await submit(delivery, HIGH, b"new")

    assert await delivery.withdraw([new, suspect.entry]) == [True, True]

    assert await fetch(delivery, "c") == []
    assert await suspects(delivery) == []


async def test_entries_of_several_lanes_are_withdrawn_together(queue: RedisQueue) -> None:
    """Also where no consumer group exists yet, and when there are none."""
    delivery = await ready(queue)
    entries = [(await submit(delivery, lane, b"x"))[0] for lane in (HIGH, OTHER, LOW)]

    assert await delivery.withdraw(entries) == [True, True, True]
    assert await delivery.withdraw([]) == []
    assert await delivery.depth([HIGH, LOW, OTHER]) == [0, 0, 0]


# --- suspects ---


async def test_a_released_suspect_stays_one(queue: RedisQueue) -> None:
    """`reclaim` has it at once whatever the idle time, its count as before; `fetch` never."""
    delivery, other = await ready(queue, b"x"), await queue.connect()
    await fetch(delivery, "a")
    [suspect] = await suspects(delivery, "b")

    await delivery.release([suspect])

    assert await fetch(other, "c") == []
    [again] = await other.reclaim([HIGH, LOW], "c", idle_s=3600.0, count=10)
    assert again == Lease(suspect.entry, "c", b"x", deliveries=2, suspect=True)
    assert renew(delivery, [suspect]) == [suspect]


async def test_a_released_suspect_may_have_to_rest(queue: RedisQueue) -> None:
    """An entry that rests is reclaimed afterwards, though its owner was silent for a lease's time long before."""
    delivery = await ready(queue, b"x", b"y")
    await fetch(delivery, "a")
    long, short = await suspects(delivery, "b")

    await delivery.release([long], rest_s=600.0)
    await delivery.release([short], rest_s=0.01)

    found: list[Lease] = []

    async def is_back() -> bool:
        found.extend(await delivery.reclaim([HIGH, LOW], "c", idle_s=0.0, count=10))
        return bool(found)

    await eventually(is_back, description="the suspect whose rest is over")
    assert [(lease.frame, lease.deliveries, lease.suspect) for lease in found] == [(b"y", 2, True)]


# --- delay (promise 11) ---


async def test_a_delayed_entry_moves_behind_what_waits(queue: RedisQueue) -> None:
    """It is fetched from its new lane as never delivered, and remembers when it was enqueued first."""
    delivery = await ready(queue, b"late", b"fresh")
    lanes = [HIGH, BEHIND, LOW]
    await delivery.ensure(lanes)
    [late] = await delivery.fetch(lanes, "a", 1, 0.0)

    await delivery.delay([late], BEHIND.name)

    fresh, moved = await delivery.fetch(lanes, "b", 10, 0.0)
    assert (fresh.frame, moved.frame) == (b"fresh", b"late")
    assert (moved.entry.lane, moved.deliveries, moved.suspect) == (BEHIND, 1, False)
    assert moved.entry.origin == late.entry.entry_id
    assert moved.entry.enqueued_s == late.entry.enqueued_s
    assert await delivery.depth(lanes) == [1, 1, 0]
    assert renew(delivery, [late]) == [late]


async def test_an_entry_that_is_moved_twice_remembers_its_first_lane(queue: RedisQueue) -> None:
    """Not the one between; its payload comes along."""
    delivery = await ready(queue)
    await delivery.ensure([BEHIND])
    entry = await with_payload(delivery, b"x", b"tensors")

    await delivery.delay(await fetch(delivery), BEHIND.name)
    await delivery.delay(await delivery.fetch([BEHIND], "a", 1, 0.0), LOW.name)
    [lease] = await fetch(delivery)

    assert (lease.entry.lane, lease.entry.origin, lease.entry.payload_id) == (LOW, entry.entry_id, "r1")
    assert await delivery.payload(lease.entry, "r1") == b"tensors"


async def test_delay_leaves_alone_what_another_owns(queue: RedisQueue) -> None:
    """A late decision can't move the work of a new owner, nor bring back what is finished."""
    delivery = await ready(queue, b"x", b"y")
    await delivery.ensure([BEHIND])
    leases = await fetch(delivery, "a")
    await delivery.finish([leases[1].entry])
    [new] = await suspects(delivery)

    await delivery.delay(leases, BEHIND.name)

    assert renew(delivery, [new]) == []
    assert await delivery.depth([HIGH, BEHIND]) == [1, 0]


# --- several lanes ---


async def test_a_waiting_fetch_of_several_lanes_takes_what_came_together(queue: RedisQueue) -> None:
    """The first wakes it, the rest of that write comes along."""
    delivery, gateway = await ready(queue), await queue.connect()
    waiting = asyncio.create_task(fetch(delivery, count=8, wait_s=30.0))
    await asyncio.sleep(0)

    await submit(gateway, LOW, *[b"%d" % number for number in range(20)])

    got = frames(await waiting)
    while len(got) < 20:
        more = frames(await fetch(delivery, count=8, wait_s=5.0))
        assert len(more) <= 8
        got += more
    assert sorted(got, key=int) == [b"%d" % number for number in range(20)]


async def test_a_fetch_that_waits_on_several_lanes_exceeds_no_count(queue: RedisQueue) -> None:
    """Though each lane may give it one entry at once; none is lost."""
    delivery, gateway = await ready(queue), await queue.connect()
    got: list[bytes] = []

    while len(got) < 40:
        waiting = asyncio.create_task(fetch(delivery, count=1, wait_s=30.0))
        await asyncio.sleep(0)
        if not len(got) % 2:
            await asyncio.gather(submit(gateway, LOW, b"low%d" % len(got)), submit(gateway, HIGH, b"high%d" % len(got)))
        leases = await waiting
        assert [lease.deliveries for lease in leases] == [1]
        got += frames(leases)

    assert len(set(got)) == 40


async def test_what_woke_a_fetch_is_kept_when_another_lane_is_gone(redis_queue: RedisQueue) -> None:
    """An error of the second read costs nothing that the first one took."""
    delivery = await ready(redis_queue)
    waiting = asyncio.create_task(fetch(delivery, count=8, wait_s=30.0))
    await eventually(lambda: b" flags=b " in b"".join(redis_queue.on_every_node("CLIENT", "LIST", "TYPE", "normal")))
    script = "redis.call('XADD', KEYS[1], '*', 'f', 'x') redis.call('DEL', KEYS[2])"

    redis_queue.on_owner("EVAL", script, 2, keys.lane(HIGH), keys.lane(LOW))

    [lease] = await waiting
    assert (lease.frame, lease.deliveries, lease.suspect) == (b"x", 1, False)


# --- payloads ---


@pytest.mark.parametrize("size", [0, 1000, 3_000_000], ids=["empty", "small", "large"])
async def test_a_payload_is_read_until_its_entry_is_finished(queue: RedisQueue, size: int) -> None:
    """Byte for byte, by the worker that has the entry; finish removes it."""
    gateway, worker = await ready(queue), await queue.connect()
    payload = bytes(range(256)) * (size // 256)

    entry = await with_payload(gateway, b"frame", payload)
    [lease] = await fetch(worker)
    read = await worker.payload(lease.entry, "r1")
    await worker.finish([lease.entry])

    assert (lease.frame, lease.entry) == (b"frame", entry)
    assert read == payload
    assert await worker.payload(entry, "r1") is None


async def test_a_refused_entry_leaves_no_payload(queue: RedisQueue) -> None:
    """Small or large: nothing is stored of what the lane has no room for."""
    delivery = await ready(queue, b"x")

    for name, size in (("small", 10), ("large", 2_000_000)):
        assert isinstance(await offer(delivery, b"y", payload=bytes(size), limit=1, id=name), QueueFull)
        assert await delivery.payload(Entry(HIGH, "0-1"), name) is None


async def test_a_withdrawn_entry_leaves_no_payload(queue: RedisQueue) -> None:
    """The one that is held keeps its own."""
    delivery = await ready(queue)
    held = await with_payload(delivery, b"1", b"held", "r1")
    await fetch(delivery)
    plain = (await submit(delivery, HIGH, b"2"))[0]
    waiting = await with_payload(delivery, b"3", b"waiting", "r2")

    assert await delivery.withdraw([plain, held, waiting]) == [True, False, True]

    assert await delivery.payload(held, "r1") == b"held"
    assert await delivery.payload(waiting, "r2") is None


async def test_a_finish_of_many_removes_all_their_payloads(queue: RedisQueue) -> None:
    """Mixed with entries that have none."""
    delivery = await ready(queue, b"plain")
    entries = [await with_payload(delivery, b"x", b"p%d" % number, f"r{number}") for number in range(5)]
    leases = await fetch(delivery)

    await delivery.finish([lease.entry for lease in leases])

    assert await delivery.depth([HIGH]) == [0]
    for number, entry in enumerate(entries):
        assert await delivery.payload(entry, f"r{number}") is None


async def test_a_stored_result_is_taken_once(queue: RedisQueue) -> None:
    """Large outputs of a synchronous call; nobody else can want them."""
    worker, gateway = await queue.connect(), await queue.connect()
    blob = bytes(range(256)) * 8000

    await worker.store_result(HIGH, "r1", blob, 60.0)

    assert await gateway.take_result(HIGH, "r1") == blob
    assert await gateway.take_result(HIGH, "r1") is None


async def test_a_large_payload_is_not_in_the_stream(redis_queue: RedisQueue) -> None:
    """A tensor of 50 MB: the entry stays small, the payload has an end."""
    delivery = await ready(redis_queue)
    entry = await with_payload(delivery, b"frame", bytes(50_000_000))

    [(_, fields)] = redis_queue.on_owner("XRANGE", b"qinfer:{digits#0}:1:p1", "-", "+")

    assert sum(map(len, fields.values())) < 100
    assert 0 < redis_queue.on_owner("PTTL", b"qinfer:{digits#0}:payload:r1") <= 60_000
    await delivery.finish([entry])


async def test_scripts_that_the_server_forgot_are_sent_again(redis_queue: RedisQueue) -> None:
    """A restart or SCRIPT FLUSH is no error of a submit."""
    delivery = await ready(redis_queue)
    redis_queue.on_every_node("SCRIPT FLUSH")

    assert isinstance(await offer(delivery, b"x", payload=b"tensors", limit=5), Entry)


async def test_close_answers_submits_whose_payload_is_on_its_way(
    redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it answers all others: nothing is known of them."""
    delivery = await redis_queue.connect()
    monkeypatch.setattr(values, "LARGE_BYTES", 1)
    answers: list[Entry | QinferError] = []
    delivery.submit(HIGH, b"x", answers.append, payload=Payload("r1", b"tensors", 60.0))
    await asyncio.sleep(0)

    await delivery.close()

    await eventually(lambda: len(answers) == 1)


# --- oldest (promise 13) ---


async def test_the_oldest_entries_are_shown_page_by_page(queue: RedisQueue) -> None:
    """Waiting and held ones alike, with frame and payload's id, and nothing about them changes."""
    delivery = await ready(queue, b"1", b"2")
    (held,) = await fetch(delivery, count=1)
    await with_payload(delivery, b"3", b"x", id="r3")

    first = await delivery.oldest(HIGH, -1.0, 2)
    rest = await delivery.oldest(HIGH, -1.0, 2, after=first[-1][0].entry_id)

    assert [frame for _, frame in first + rest] == [b"1", b"2", b"3"]
    assert first[0][0] == held.entry
    assert rest[0][0].payload_id == "r3"
    assert renew(delivery, [held]) == []
    assert frames(await fetch(delivery, "b")) == [b"2", b"3"]


async def test_young_entries_are_not_shown(queue: RedisQueue) -> None:
    """And a lane that does not exist is empty."""
    delivery = await ready(queue, b"1")

    assert await delivery.oldest(HIGH, 60.0, 10) == []
    assert await delivery.oldest(OTHER, 0.0, 10) == []
