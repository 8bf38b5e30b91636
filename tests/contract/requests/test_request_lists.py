"""Lists of stored requests (promise 8 of `qinfer.queue.requests`) on each server, and what the index costs."""

import time

import pytest

from qinfer.queue import keys
from qinfer.queue.entries import RequestExecution, RequestState
from qinfer.queue.lanes import Queue
from qinfer.queue.requests import LISTED, UNFINISHED, ListedRequest, ListPlace
from tests.contract.conftest import RedisQueue
from tests.support.requests import LANE, accept, address, ended, fetch, settle

CANCELLED, EXPIRED, FAILED = RequestState.CANCELLED, RequestState.EXPIRED, RequestState.FAILED
QUEUED, RUNNING, SUCCEEDED = RequestState.QUEUED, RequestState.RUNNING, RequestState.SUCCEEDED


async def listed(
    delivery: Queue, indexes: tuple[str, ...] = LISTED, count: int = 100, after: ListPlace | None = None
) -> list[ListedRequest]:
    return await delivery.requests.list_requests("digits", 0, after or ListPlace(), count, indexes)


def shown(found: list[ListedRequest]) -> list[tuple[str, str]]:
    return [(one.place.id, one.record.state.value if one.record else "") for one in found]


async def paged(delivery: Queue, count: int) -> list[str]:
    """Reads all pages, and returns the ids in order."""
    ids: list[str] = []
    place: ListPlace | None = ListPlace()
    while place is not None:
        page = await listed(delivery, count=count, after=place)
        ids += [one.place.id for one in page]
        place = page[-1].place if page else None
    return ids


async def test_unfinished_requests_come_first_and_then_each_state(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    for name, timeout_s in (("late", 90.0), ("soon", 30.0), ("ok", 60.0), ("bad", 60.0), ("old", 60.0), ("left", 60.0)):
        await accept(delivery, name, timeout_s=timeout_s)
    for name, state in (("ok", SUCCEEDED), ("bad", FAILED), ("old", EXPIRED), ("left", CANCELLED)):
        await settle(delivery, ended(name, state))

    found = await listed(delivery)

    unfinished = [("soon", "queued"), ("late", "queued")]
    ends = [("bad", "failed"), ("old", "expired"), ("left", "cancelled"), ("ok", "succeeded")]
    assert shown(found) == unfinished + ends
    assert shown(await listed(delivery, (FAILED, SUCCEEDED))) == [("bad", "failed"), ("ok", "succeeded")]
    assert await delivery.requests.has_any("digits", 0)
    assert not await delivery.requests.has_any("other", 0)


async def test_a_listed_request_has_its_whole_record(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await accept(delivery, "held", tenant="acme")
    await fetch(delivery, "w1")
    execution = RequestExecution("w1", 1.0, 2.0, 3.5, 1, 8)
    await accept(delivery, "done")
    await settle(delivery, ended("done", SUCCEEDED, execution=execution))

    records = [one.record for one in await listed(delivery)]

    assert records == [await delivery.requests.record(address(name)) for name in ("held", "done")]
    held, done = records
    assert held is not None
    assert (held.state, held.worker, held.attempts, held.tenant) == (RUNNING, "w1", 1, "acme")
    assert done is not None
    assert (done.execution, done.worker) == (execution, "")


@pytest.mark.parametrize("count", [1, 3, 7])
async def test_pages_have_each_request_once(queue: RedisQueue, count: int) -> None:
    """Many requests may have one deadline, or end in one millisecond."""
    delivery = await queue.connect()
    names = [f"r{number:02}" for number in range(20)]
    for name in names:
        await accept(delivery, name)
    await settle(delivery, *(ended(name, FAILED) for name in names[10:]))
    due = keys.due("digits")
    queue.on_owner("ZADD", due, *(word for name in names[:10] for word in (10**13, name)))

    ids = await paged(delivery, count)

    assert sorted(ids) == names
    assert sorted(ids[:10]) == names[:10]


async def test_a_list_goes_on_where_its_last_request_has_ended_meanwhile(queue: RedisQueue) -> None:
    """Requests may come twice then, as the one that ended does, and none is left out."""
    delivery = await queue.connect()
    for name in ("a", "b", "c"):
        await accept(delivery, name)
        await settle(delivery, ended(f"gone-{name}"))
    first = await listed(delivery, count=2)
    await settle(delivery, ended(first[-1].place.id, FAILED))

    rest = await listed(delivery, after=first[-1].place)

    assert {one.place.id for one in (*first, *rest)} == {"a", "b", "c"}


async def test_without_an_id_a_list_continues_at_the_instant(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    for name in ("a", "b"):
        await accept(delivery, name)
    queue.on_owner("ZADD", keys.due("digits"), 10**13, "a", 10**13, "b")

    found = await listed(delivery, after=ListPlace(UNFINISHED, str(10**13), ""))

    assert shown(found) == [("a", "queued"), ("b", "queued")]


async def test_a_replayed_request_is_unfinished_again(queue: RedisQueue) -> None:
    """The index of its first end keeps it for a while, and lists no request for it."""
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)
    await delivery.bury(lease, "r1", "inference_failed", "no")
    await settle(delivery, ended("r1", FAILED))
    [letter] = await delivery.dead_letters.list("digits")
    await delivery.dead_letters.replay("digits", letter.id)

    assert shown(await listed(delivery)) == [("r1", "queued"), ("r1", "")]

    await settle(delivery, ended("r1", SUCCEEDED))
    assert shown(await listed(delivery)) == [("r1", ""), ("r1", "succeeded")]


async def test_expired_records_leave_the_index_with_the_next_end(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    for name in ("short", "long"):
        kept_s = 0.01 if name == "short" else 100.0
        await accept(delivery, name, result_ttl_s=kept_s, tombstone_ttl_s=kept_s)
        await settle(delivery, ended(name, FAILED))
    index = keys.ended("digits", 0, FAILED)
    assert 0 < queue.on_owner("PTTL", index) <= 200_000
    until_s = time.monotonic() + 5.0
    while queue.on_owner("EXISTS", keys.request("digits", 0, "short")) and time.monotonic() < until_s:
        await listed(delivery)
    await accept(delivery, "next")
    await settle(delivery, ended("next", FAILED))

    assert sorted(queue.on_owner("ZRANGE", index, 0, -1)) == [b"long", b"next"]


async def test_the_index_costs_little(queue: RedisQueue) -> None:
    """At most 160 bytes a request, nothing at its acceptance, and nothing for synchronous requests."""
    delivery = await queue.connect()
    names = [f"01JX3M3TC8Z6Q5RYB7WS{number:06}.0.digits" for number in range(200)]
    for name in names:
        await accept(delivery, name)
    assert not queue.on_owner("EXISTS", keys.ended("digits", 0, SUCCEEDED))
    entries = {lease.frame.decode(): lease.entry for lease in [*await fetch(delivery), *await fetch(delivery)]}

    await settle(delivery, *(ended(name, SUCCEEDED, entries[name]) for name in names))

    index = keys.ended("digits", 0, SUCCEEDED)
    assert queue.on_owner("ZCARD", index) == 200
    assert queue.on_owner("MEMORY", "USAGE", index, "SAMPLES", 0) <= 160 * 200
    assert await delivery.depth([LANE]) == [0]
