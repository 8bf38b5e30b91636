"""What the Redis adapter promises beyond the contract: reconnects, cleanliness, refusal while the server is away."""

import asyncio
from collections.abc import Callable

import pytest

from qinfer.errors import BrokerUnavailable, QinferError, QueueFull, SettingsError
from qinfer.queue import clients, keys
from qinfer.queue import lanes as adapter
from qinfer.queue.entries import DELAYED, Entry, Lane, reply_address
from qinfer.queue.lanes import Queue
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import HIGH, LOW, fetch, frames, listening, ready, submit
from tests.support.leases import renew

DELAYED_LANE = Lane(HIGH.model, HIGH.version, HIGH.name + DELAYED)
KILL = ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - another program's state can't be subscribed to
        await asyncio.sleep(0.02)


async def test_a_listener_gets_what_was_published_while_its_connection_was_down(redis_queue: RedisQueue) -> None:
    """It reads again from the start; duplicates are the caller's to drop."""
    gateway, worker = await redis_queue.connect(), await redis_queue.connect()
    sent = {b"%d" % number for number in range(50)}
    got: set[bytes] = set()
    async with listening(gateway, "g1") as blobs:
        for number, blob in enumerate(sorted(sent)):
            if number % 10 == 5:
                redis_queue.on_every_node(*KILL)
            while True:
                try:
                    assert await worker.publish(reply_address("g1"), blob)
                    break
                except BrokerUnavailable:  # the worker's own connection was killed too
                    continue

        while got != sent:
            got.add(await blobs.get())


async def test_a_reply_stream_has_a_time_to_live_and_is_trimmed(redis_queue: RedisQueue) -> None:
    """What was read does not stay; a dead gateway's stream goes by itself."""
    delivery = await redis_queue.connect()
    key = keys.reply(reply_address("g1")).encode()
    async with listening(delivery, "g1") as blobs:
        assert 0 < redis_queue.on_owner("PTTL", key) <= 60_000
        await delivery.publish(reply_address("g1"), b"x")
        await blobs.get()

        await eventually(lambda: redis_queue.on_owner("XLEN", key) == 0)


async def test_a_reply_stream_that_was_flushed_comes_back(redis_queue: RedisQueue) -> None:
    """An idle listener notices at its next look."""
    delivery = await redis_queue.connect()
    async with listening(delivery, "g1") as blobs:
        redis_queue.on_every_node("FLUSHALL")

        while not await delivery.publish(reply_address("g1"), b"x"):
            continue

        assert await blobs.get() == b"x"


async def test_a_worker_survives_a_flush(redis_queue: RedisQueue) -> None:
    """A lane that is gone is created again by the next fetch."""
    delivery = await ready(redis_queue, b"x")
    assert frames(await fetch(delivery)) == [b"x"]
    redis_queue.on_every_node("FLUSHALL")

    assert await fetch(delivery) == []
    await submit(delivery, HIGH, b"y")

    assert frames(await fetch(delivery)) == [b"y"]


async def test_a_blocked_fetch_survives_a_flush(redis_queue: RedisQueue) -> None:
    """Also when the lane goes while it waits."""
    delivery, gateway = await ready(redis_queue), await redis_queue.connect()
    waiting = asyncio.create_task(fetch(delivery, wait_s=30.0))
    await gateway.depth([HIGH])
    redis_queue.on_every_node("FLUSHALL")

    await submit(gateway, HIGH, b"x")

    assert frames(await waiting) == [b"x"]


@pytest.mark.parametrize("released", [False, True])
async def test_an_entry_whose_body_is_gone_is_forgotten(redis_queue: RedisQueue, *, released: bool) -> None:
    """Somebody's XDEL or XTRIM leaves no ghost among the pending entries."""
    delivery = await ready(redis_queue, b"ghost", b"real")
    ghost, real = await fetch(delivery)
    if released:
        await delivery.release([ghost, real])
    key = keys.lane(HIGH)
    redis_queue.on_owner("XDEL", key, ghost.entry.entry_id)

    taken = await (fetch(delivery, "b") if released else delivery.reclaim([HIGH, LOW], "b", 0.0, 10))

    assert frames(taken) == [b"real"]
    assert redis_queue.on_owner("XPENDING", key, keys.GROUP)["pending"] == 1


async def test_consumers_that_are_long_gone_are_forgotten(
    redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not one that still owns an entry, nor the one that holds what was released."""
    delivery = await ready(redis_queue, b"1", b"2")
    await delivery.finish([lease.entry for lease in await fetch(delivery, "gone", count=1)])
    await fetch(delivery, "owner", count=1)
    await submit(delivery, HIGH, b"3")
    await delivery.release(await fetch(delivery, "owner", count=1))
    monkeypatch.setattr(adapter, "_CONSUMER_GONE_MS", -1)

    await delivery.reclaim([HIGH], "b", idle_s=60.0, count=10)

    key = keys.lane(HIGH)
    consumers = redis_queue.on_owner("XINFO CONSUMERS", key, keys.GROUP)
    assert {consumer["name"] for consumer in consumers} == {b"owner", keys.RELEASED}


async def test_models_do_not_share_a_slot_but_lanes_of_one_do() -> None:
    """Scripts stay legal in a cluster, and models are spread over it."""
    assert keys.lane_slot(HIGH) == keys.lane_slot(LOW) == keys.lane_slot(Lane("digits", 2))
    assert keys.lane_slot(Lane("digits", 1, partition=1)) != keys.lane_slot(HIGH)


async def test_submit_fails_at_once_while_the_server_is_away_and_recovers(own_redis: RedisQueue) -> None:
    """And what was confirmed before is still there: the file was synced before the confirmation."""
    delivery = await ready(own_redis, b"before")
    [server] = own_redis.nodes
    server.stop()

    with pytest.raises(BrokerUnavailable):
        await submit_until_refused(delivery)
    server.start()

    got: list[bytes] = []
    await submit_when_up(delivery, b"after")
    while len(got) < 2:
        got += frames(await fetch(delivery, wait_s=0.5))
    assert got == [b"before", b"after"]


async def submit_until_refused(delivery: Queue) -> None:
    while True:  # until the loss is noticed, callbacks get the error; then `submit` raises it
        future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
        delivery.submit(HIGH, b"lost", future.set_result)
        assert isinstance(await future, BrokerUnavailable)


async def submit_when_up(delivery: Queue, frame: bytes) -> None:
    await delivery.depth([HIGH])  # a coroutine waits for the connection; `submit` never does
    await submit(delivery, HIGH, frame)


async def test_full_memory_is_an_overload(own_redis: RedisQueue) -> None:
    """The caller may try again later: it is no fault of the request."""
    delivery = await ready(own_redis)
    own_redis.on_every_node("CONFIG", "SET", "maxmemory", "1")
    answers: asyncio.Queue[Entry | QinferError] = asyncio.Queue()

    delivery.submit(HIGH, b"x", answers.put_nowait)

    assert isinstance(await answers.get(), QueueFull)


async def test_full_memory_stops_no_answer(redis_queue: RedisQueue) -> None:
    """What was queued is answered and finished: that is what makes room."""
    delivery = await ready(redis_queue, b"x")
    async with listening(delivery, "g1") as blobs:
        redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "1")
        try:
            leases = await fetch(delivery)
            assert await delivery.publish(reply_address("g1"), b"y")
            assert not await delivery.publish(reply_address("nobody"), b"y")
            await delivery.finish([lease.entry for lease in leases])

            assert await blobs.get() == b"y"
            assert await delivery.depth([HIGH]) == [0]
        finally:
            redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")


async def test_full_memory_stops_no_entry_from_leaving_its_lane(redis_queue: RedisQueue) -> None:
    """To bury or to delay it takes no more memory than it gives back."""
    delivery = await ready(redis_queue, b"x", b"y")
    first, second = await fetch(delivery)
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "1")
    try:
        assert await delivery.bury(first, "", "corrupt_entry", "it is no frame")
        await delivery.delay([second], DELAYED_LANE.name)
    finally:
        redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")

    assert await delivery.depth([HIGH, DELAYED_LANE]) == [0, 1]


async def test_close_forgets_no_callback(redis_queue: RedisQueue) -> None:
    """Each submit gets its answer: the entry, or that nothing is known."""
    delivery = await redis_queue.connect()
    answers: list[Entry | QinferError] = []
    delivery.submit(HIGH, b"x", answers.append)

    await delivery.close()

    assert len(answers) == 1


async def test_the_mode_must_match_the_server(redis_queue: RedisQueue) -> None:
    """A cluster that is not called one, and the reverse, is refused with the remedy."""
    with pytest.raises(SettingsError, match="QINFER_REDIS__CLUSTER="):
        await redis_queue.connect(cluster=not redis_queue.settings.cluster)


async def test_the_admin_client_reads_what_delivery_wrote(redis_queue: RedisQueue) -> None:
    """Same URL, same servers, replies in bytes."""
    await ready(redis_queue, b"x")
    client = clients.admin_client(redis_queue.settings)

    entries = await client.xrange(keys.lane(HIGH))
    await client.aclose()

    assert [fields for _, fields in entries or ()] == [{b"f": b"x"}]


async def test_a_lane_that_is_gone_costs_the_others_no_renewal(redis_queue: RedisQueue) -> None:
    """Its own leases are lost; those of the other lane are renewed."""
    delivery = await ready(redis_queue, b"gone")
    await submit(delivery, LOW, b"stays")
    gone, stays = await fetch(delivery)
    redis_queue.on_owner("DEL", keys.lane(HIGH))
    redis_queue.on_owner("XCLAIM", keys.lane(LOW), keys.GROUP, "a", 0, stays.entry.entry_id, "IDLE", 60_000)

    assert renew(delivery, [gone, stays]) == [gone]

    assert await delivery.reclaim([LOW], "b", 30.0, 10) == []


async def test_what_is_given_back_to_a_lane_that_is_gone_is_forgotten(redis_queue: RedisQueue) -> None:
    """There is nothing left to release: no error."""
    delivery = await ready(redis_queue, b"x")
    leases = await fetch(delivery)
    redis_queue.on_every_node("FLUSHALL")

    await delivery.release(leases)


async def test_lanes_that_were_left_keep_no_connection(redis_queue: RedisQueue) -> None:
    """A worker may serve thousands of versions, one after the other; and each of them again."""
    delivery = await ready(redis_queue, b"x", b"y")

    def readers() -> int:
        return sum(listed.count(b"name=qinfer-lanes") for listed in redis_queue.on_every_node("CLIENT", "LIST"))

    others = readers()
    first = await fetch(delivery, count=1)
    open_then = readers()
    await delivery.close_reader([HIGH])
    await eventually(lambda: readers() == others)

    assert open_then == others + 1
    assert frames(first + await fetch(delivery)) == [b"x", b"y"]
    await delivery.close_reader([LOW])
