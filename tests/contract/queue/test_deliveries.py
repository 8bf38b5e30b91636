"""The queue of deliveries (the numbered promises of `qinfer.queue.deliveries`) on each server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qinfer.queue import keys
from qinfer.queue.deliveries import Deliveries, DeliveryItem, DeliveryKind
from qinfer.queue.entries import Lane, bulk_lanes
from qinfer.queue.router import Router
from tests.contract.conftest import RedisQueue

KIND = DeliveryKind("tests", 60.0, 900.0)
NOW = DeliveryKind("tests", 0.0, 0.0)
READY = keys.deliveries("digits", 0, "tests")
LATER = READY + "|later"
WEEK_S = 7 * 86400.0
LUA = Path(keys.__file__).parent / "lua" / "common"
PUT = "\n".join((LUA / f"{name}.lua").read_text() for name in ("now_ms", "deliveries")) + (
    "\nlocal id"
    "\nredis.call('ZREM', later_of(KEYS[1]), '')"
    "\nfor i = 2, #ARGV do id = deliver(KEYS[1], ARGV[i], 'notes', tonumber(ARGV[1])) end"
    "\nreturn id"
)


@pytest.fixture
async def deliveries(redis_queue: RedisQueue) -> AsyncIterator[Deliveries]:
    router = await Router.connect(redis_queue.settings)
    yield Deliveries(router)
    await router.close()


def put(queue: RedisQueue, *texts: str, kind: str = "tests", kept_s: float = WEEK_S) -> str:
    """Puts items, as the scripts that end records do; returns the id of the last."""
    name = keys.deliveries("digits", 0, kind)
    return queue.on_owner("EVAL", PUT, 1, name, int(kept_s * 1000), *texts).decode()  # type: ignore[no-any-return]  # of redis-py


def rest(queue: RedisQueue, item: DeliveryItem, seconds: float) -> None:
    """Makes an item look as if it had rested for so long: its time to come again is so much nearer."""
    queue.on_owner("ZINCRBY", LATER, -1000 * seconds, item.id)


async def take(deliveries: Deliveries, count: int = 10, kind: DeliveryKind = KIND) -> list[DeliveryItem]:
    return await deliveries.take_due("digits", 0, kind, count)


async def done(deliveries: Deliveries, *items: DeliveryItem) -> None:
    await deliveries.done("digits", 0, KIND, [item.id for item in items])


async def test_an_item_is_taken_by_one(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    assert await take(deliveries) == []
    put(redis_queue, "r1", "r2")
    last = put(redis_queue, "r3")

    first, second = await take(deliveries, 1), await take(deliveries)

    assert [item.text for item in first + second] == ["r1", "r2", "r3"]
    assert second[-1] == DeliveryItem("digits", 0, last, "r3", b"notes", 1)
    assert await take(deliveries) == []


@pytest.mark.parametrize(("attempts", "pause_s"), [(1, 60.0), (2, 120.0), (3, 240.0), (5, 900.0), (60, 900.0)])
async def test_the_pause_doubles_with_each_attempt(
    redis_queue: RedisQueue, deliveries: Deliveries, attempts: int, pause_s: float
) -> None:
    """Up to the longest of the kind; the item keeps its id, and is due not a moment earlier."""
    put(redis_queue, "r1")
    [item] = await take(deliveries)
    while item.attempts < attempts:
        rest(redis_queue, item, 900.0)
        [item] = await take(deliveries)

    rest(redis_queue, item, pause_s - 10.0)
    assert await take(deliveries) == []

    rest(redis_queue, item, 10.0)
    [again] = await take(deliveries)
    assert (again.id, again.text, again.attempts) == (item.id, "r1", attempts + 1)


async def test_attempts_are_counted_up_to_a_bound(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    put(redis_queue, "r1")

    for number in range(1100):
        [item] = await take(deliveries, kind=NOW)
        assert item.attempts == min(number + 1, 1023)


async def test_what_is_done_is_gone(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    """Many by one call, never taken ones too; the others stay, and to do it again is no error."""
    texts = [f"r{number}" for number in range(2500)]
    put(redis_queue, *texts)
    taken = await take(deliveries, 2400)

    await done(deliveries, *taken[:-1])
    await done(deliveries, *taken[:-1])
    await done(deliveries)

    assert redis_queue.on_owner("XLEN", READY) == 101
    assert redis_queue.on_owner("ZRANGE", LATER, 0, -1) == [taken[-1].id.encode()]


async def test_what_became_of_it_is_noted_in_its_record(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    """Where there still is one: none comes back."""
    record, gone = (keys.request("digits", 0, name).encode() for name in ("r1", "r2"))
    redis_queue.on_owner("HSET", record, "state", "failed")
    redis_queue.on_owner("EXPIRE", record, 60)
    put(redis_queue, "r1", "r2")

    for item, name in zip(await take(deliveries), (record, gone), strict=True):
        await deliveries.done("digits", 0, KIND, [item.id], note=(name, "webhook_state", "delivered"))

    assert redis_queue.on_owner("HGET", record, "webhook_state") == b"delivered"
    assert redis_queue.on_owner("EXISTS", gone) == 0


async def test_each_kind_and_each_model_has_its_own(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    put(redis_queue, "r1")
    put(redis_queue, "r2", kind="tests:other")

    assert [item.text for item in await take(deliveries, kind=DeliveryKind("tests:other", 1.0, 1.0))] == ["r2"]
    assert await deliveries.take_due("other", 0, KIND, 10) == []
    assert [item.text for item in await take(deliveries)] == ["r1"]


async def test_100000_items_that_rest_do_not_hold_up_new_ones(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    """A receiver that is down for hours leaves as many; nor do they where all of them are due again."""
    texts = [f"r{number}" for number in range(5000)]
    for _ in range(20):
        put(redis_queue, *texts)
    while await take(deliveries, 5000):
        pass
    for weight in (1.0, 0.5):  # of when they are due again: in a minute, long ago
        redis_queue.on_owner("ZUNIONSTORE", LATER, 1, LATER, "WEIGHTS", weight)
        put(redis_queue, "new 1", "new 2")

        found = await take(deliveries, 4)

        assert [item.text for item in found if item.text.startswith("new")] == ["new 1", "new 2"]
        await done(deliveries, *found)


async def test_one_at_a_time_is_a_new_one_or_one_that_is_due_again(
    redis_queue: RedisQueue, deliveries: Deliveries
) -> None:
    """By turns of the clock: neither holds up the other."""
    put(redis_queue, "old")
    await take(deliveries, kind=NOW)
    texts: set[str] = set()

    for number in range(2000):
        put(redis_queue, f"new {number}")
        [item] = await take(deliveries, 1, NOW)
        texts.add(item.text[:3])
        if item.text != "old":
            await done(deliveries, item)
        if texts == {"old", "new"}:
            break

    assert texts == {"old", "new"}


async def test_an_item_is_there_as_long_as_it_is_to_be(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    """The queue's keys live as long as the longest-lived item; a short-lived one takes nothing away."""
    for kept_s in (1000.0, 5000.0, 500.0):
        put(redis_queue, "r1", kept_s=kept_s)
        await take(deliveries, 1)

    for key in (READY, LATER):
        assert float(redis_queue.on_owner("PTTL", key)) / 1000 == pytest.approx(5000.0, abs=30.0)


async def test_an_item_that_was_trimmed_is_forgotten(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    """Somebody's XDEL or XTRIM leaves no ghost among those that were taken."""
    put(redis_queue, "r1")
    [item] = await take(deliveries, kind=NOW)
    redis_queue.on_owner("XDEL", READY, item.id)

    assert await take(deliveries, kind=NOW) == []

    assert redis_queue.on_owner("EXISTS", LATER) == 0


async def test_full_memory_stops_no_delivery(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    """Neither the first that anyone takes, nor one that comes again, nor their end."""
    put(redis_queue, "r1")
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "1")
    try:
        [item] = await take(deliveries, kind=NOW)
        [again] = await take(deliveries, kind=NOW)
        put(redis_queue, "r2")
        await done(deliveries, again)
    finally:
        redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")

    assert (item.id, again.attempts) == (again.id, 2)
    assert [each.text for each in await take(deliveries)] == ["r2"]


async def test_no_item_counts_as_work_that_waits(redis_queue: RedisQueue, deliveries: Deliveries) -> None:
    """Autoscalers and limits look at lanes, where none is: neither one that is ready, nor one that was taken."""
    delivery = await redis_queue.connect()
    lanes = [Lane("digits", 1), *bulk_lanes("digits", 1)]
    await delivery.ensure(lanes)
    put(redis_queue, "r1", "r2")
    await take(deliveries, 1)

    assert [size.entries for size in await delivery.sizes(lanes)] == [0] * len(lanes)
    assert await delivery.in_flight(lanes) == [0] * len(lanes)


async def test_what_was_taken_survives_the_servers_restart(own_redis: RedisQueue) -> None:
    """It rests as before, and what is new is new."""
    put(own_redis, "r1", "r2")
    router = await Router.connect(own_redis.settings)
    await take(Deliveries(router), 1)
    await router.close()
    [server] = own_redis.nodes
    server.kill()
    server.start()

    router = await Router.connect(own_redis.settings)
    found = [await take(Deliveries(router)), await take(Deliveries(router))]
    await router.close()

    assert [[item.text for item in part] for part in found] == [["r2"], []]
