"""What bulk jobs on Redis promise beyond the contract: slots, lifetimes, full memory, what a dead process left."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from qinfer.errors import BrokerUnavailable, QueueFull
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import ShardOutcome
from qinfer.queue import keys
from qinfer.queue.durability import Durability
from qinfer.queue.lanes import Queue
from tests.contract.conftest import RedisQueue
from tests.support.bulk_jobs import LANES, fetch, finish, known, planned, record, running, shards, top_up
from tests.support.leases import renew

PARTS = ("todo", "in_lane", "outcomes", "log")
RECORD = keys.job("digits", 0, "j1")


def lifetimes(queue: RedisQueue) -> dict[str, int]:
    """Returns the time to live of what there is of a job, in ms; -1 = for ever."""
    names = {"record": RECORD, **{part: keys.job_part("digits", 0, "j1", part) for part in PARTS}}
    found = {name: queue.on_owner("PTTL", key) for name, key in names.items()}
    return {name: left for name, left in found.items() if left != -2}


async def test_all_of_a_job_but_the_index_is_in_its_models_slot(redis_queue: RedisQueue) -> None:
    """With its lanes, dead letters and notices: the scripts would be refused in a cluster otherwise."""
    delivery = await redis_queue.connect()
    await running(delivery, 9)
    [lease, other] = await fetch(delivery, 2)
    await finish(delivery, lease)
    await Jobs(delivery).bury_shard("j1", other, ShardOutcome(1, 10, 10, "no"), "internal")
    await Jobs(delivery).stop("j1", "cancelled")

    names = {key.decode() for on_node in redis_queue.on_every_node("KEYS", "*") for key in on_node}

    index = {keys.jobs(), keys.open_jobs(), keys.job_places()}
    assert names - index == {name for name in names if name.startswith("qinfer:{digits#0}:")}
    assert keys.open_jobs() not in names


async def test_a_job_is_known_for_its_time_after_the_end(redis_queue: RedisQueue) -> None:
    """Before it, for ever; when it goes on, for ever again. What is gone leaves the listing."""
    delivery = await redis_queue.connect()
    await running(delivery, 9, kept_s=1000.0, created_at=1000.0)
    leases = await fetch(delivery, 2)
    await finish(delivery, leases[0])
    await Jobs(delivery).note("j1", "a line")
    assert lifetimes(redis_queue) == dict.fromkeys(("record", *PARTS), -1)

    await Jobs(delivery).stop("j1", "cancelled")
    await Jobs(delivery).note("j1", "another line")
    ending = lifetimes(redis_queue)
    await Jobs(delivery).requeue("j1", shards(*range(1, 9)))
    going_on = lifetimes(redis_queue)
    await Jobs(delivery).stop("j1", "failed", in_hand=True)
    redis_queue.on_owner("PEXPIRE", RECORD, 0)

    assert set(ending) == {"record", "in_lane", "outcomes", "log"}
    assert all(900_000 < left <= 1_000_000 for left in ending.values())
    assert set(going_on.values()) == {-1}
    assert await Jobs(delivery).get("j1") is None
    assert (await Jobs(delivery).list()).records == []
    assert redis_queue.on_owner("ZCARD", keys.jobs()) == 0
    assert redis_queue.on_owner("HLEN", keys.job_places()) == 0


async def test_a_page_is_bounded_in_bytes(redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may be megabytes, and a page a thousand jobs."""
    monkeypatch.setattr("qinfer.jobs.queue.jobs._PAGE_BYTES", 25)
    delivery = await redis_queue.connect()
    for number in range(5):
        await Jobs(delivery).create(record(f"j{number}", created_at=1000.0 + number, spec=b'"ten bytes"'))

    first = await Jobs(delivery).list(count=100)
    rest = await Jobs(delivery).list(after=first.after, count=100)

    assert [[found.id for found in page.records] for page in (first, rest)] == [["j4", "j3", "j2"], ["j1", "j0"]]
    assert rest.after == ""


async def test_the_index_is_repaired(redis_queue: RedisQueue) -> None:
    """A creation that never came to its record leaves it in time; a job that has ended is closed."""
    delivery = await redis_queue.connect()
    await Jobs(delivery).create(record())
    for name, created_s in (("dead", 1000.0), ("being-made", delivery.clock.now_s())):
        redis_queue.on_owner("HSET", keys.job_places(), name, "0 digits")
        redis_queue.on_owner("ZADD", keys.jobs(), int(created_s * 1000), name)
        redis_queue.on_owner("ZADD", keys.open_jobs(), "+inf", name)

    assert [found.id for found in await Jobs(delivery).unfinished()] == ["j1"]
    assert set(redis_queue.on_owner("ZRANGE", keys.open_jobs(), 0, -1)) == {b"j1", b"being-made"}
    assert await Jobs(delivery).create(record("being-made"))

    await Jobs(delivery).stop("j1", "cancelled")
    redis_queue.on_owner("ZADD", keys.open_jobs(), "+inf", "j1")  # its closing was lost
    assert [found.id for found in await Jobs(delivery).unfinished()] == ["being-made"]
    assert redis_queue.on_owner("ZSCORE", keys.open_jobs(), "j1") is None


async def test_a_creation_that_is_repeated_by_the_connection_is_one(
    redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node had changed: the script runs twice, and the job is its caller's."""
    delivery = await redis_queue.connect()
    write = Durability.write

    async def twice(self: Durability, model: str, partition: int, operation: Callable[..., Awaitable[Any]]) -> Any:
        await write(self, model, partition, operation)
        return await write(self, model, partition, operation)

    monkeypatch.setattr(Durability, "write", twice)

    assert await Jobs(delivery).create(record())
    assert not await Jobs(delivery).create(record())


async def test_full_memory_refuses_jobs_and_lets_shards_end(redis_queue: RedisQueue) -> None:
    """Nothing is half done: what frees memory goes on, what takes some is refused as a whole."""
    delivery = await redis_queue.connect()
    await running(delivery, 9, max_errors=0)
    await Jobs(delivery).create(record("j3", state="planning"))
    first, second, third = await fetch(delivery, 3)
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(QueueFull, match="memory is full"):
            await Jobs(delivery).create(record("j2"))
        with pytest.raises(QueueFull, match="memory is full"):
            await Jobs(delivery).add_shards("j3", shards(0), 10, complete=True)
        assert await finish(delivery, first)
        await Jobs(delivery).bury_shard("j1", second, ShardOutcome(1, 10, 10, "no"), "internal")
        await Jobs(delivery).drop_shard("j1", third, 2)
        assert await Jobs(delivery).stop("j1", "failed", error="too many", in_hand=True)
    finally:
        redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")

    found = await known(delivery)
    assert (found.state, found.error, found.rows_done, found.rows_failed) == ("failed", "too many", 10, 10)
    assert await delivery.depth(LANES) == [0, 0, 0]
    assert (await known(delivery, "j3")).state == "planning"
    assert await Jobs(delivery).get("j2") is None


async def test_a_stop_that_was_cut_off_is_taken_up(redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process died between its steps: nothing comes to the lane any more, and the next one clears it."""
    delivery, other = await redis_queue.connect(), await redis_queue.connect()
    await running(delivery, 9)

    async def cut_off(*_: Any, **__: Any) -> None:
        raise BrokerUnavailable("the connection is down; try again")

    with monkeypatch.context() as patch:
        patch.setattr(Jobs, "_withdraw", cut_off)
        with pytest.raises(BrokerUnavailable):
            await Jobs(delivery).stop("j1", "cancelled")
    assert await top_up(Jobs(other), "digits") == 0
    assert await other.depth(LANES) == [0, 4, 0]

    assert await Jobs(other).stop("j1", "cancelled")

    assert await other.depth(LANES) == [0, 0, 0]
    assert (await known(other)).in_lane == 0


async def test_a_stop_that_comes_late_takes_nothing_from_a_job_that_goes_on(
    redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was resumed between the stop's steps: its plan left out what is in the lane."""
    delivery, other = await redis_queue.connect(), await redis_queue.connect()
    await running(delivery, 3)
    withdraw = Jobs._withdraw

    async def resumed(*arguments: Any, **options: Any) -> None:
        await Jobs(other).move("j1", {"cancelled"}, "planning")
        await Jobs(other).add_shards("j1", shards(0, 1, 2), 30, complete=True)
        await withdraw(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Jobs, "_withdraw", resumed)
        await Jobs(delivery).stop("j1", "cancelled")

    assert [lease.frame for lease in await fetch(other, 9)] == [b"j1:0", b"j1:1", b"j1:2"]
    assert (await known(other)).shards == 3


async def test_lanes_that_were_deleted_are_lost_shards(redis_queue: RedisQueue) -> None:
    """Nothing hangs: they are named, requeued, and fetched from a lane that is made anew."""
    delivery = await redis_queue.connect()
    await running(delivery, 5)
    [lease] = await fetch(delivery)
    redis_queue.on_owner("DEL", keys.lane(LANES[1]))

    assert await Jobs(delivery).missing("j1") == [0, 1, 2, 3]
    assert renew(delivery, [lease]) == [lease]
    assert not await Jobs(delivery).bury_shard("j1", lease, ShardOutcome(0, 10, 10, "no"), "internal")
    assert await Jobs(delivery).requeue("j1", shards(0, 1, 2, 3))
    await Jobs(delivery).advance("j1")

    assert [found.frame for found in await fetch(delivery, 9)] == [b"j1:0", b"j1:1", b"j1:2", b"j1:3"]


@pytest.mark.parametrize("redis_queue", ["redis-system"], indirect=True)
async def test_ten_thousand_shards_delay_no_job_of_higher_priority(redis_queue: RedisQueue) -> None:
    """They wait in todo, not in the lane; to plan and to cancel them takes bounded steps."""
    delivery: Queue = await redis_queue.connect()
    await running(delivery, 10_000, "low", priority=3)
    held = await fetch(delivery, 2)

    await planned(delivery, 2, "high", priority=1)
    await top_up(Jobs(delivery), "digits")

    assert await delivery.depth(LANES) == [2, 0, 4]
    assert [lease.frame for lease in await fetch(delivery, 3)] == [b"high:0", b"high:1", b"low:2"]
    assert await Jobs(delivery).stop("low", "cancelled", in_hand=True)
    assert renew(delivery, held) == held
    assert await delivery.depth(LANES) == [2, 0, 0]


async def test_an_id_that_is_used_again_is_found_where_it_is_now(redis_queue: RedisQueue) -> None:
    """By processes too that knew the job of that id before, which was another model's."""
    one, other = await redis_queue.connect(), await redis_queue.connect()
    await Jobs(one).create(record(created_at=1000.0))
    before = await Jobs(other).models()
    await Jobs(one).stop("j1", "cancelled")
    await Jobs(one).delete("j1")

    await Jobs(one).create(record(model="letters", created_at=1000.0))

    assert (before, await Jobs(other).models()) == ([("digits", 0)], [("letters", 0)])
    assert [found.model for found in await Jobs(other).unfinished()] == ["letters"]
    found = await Jobs(other).get("j1")
    assert found is not None
    assert found.model == "letters"
    assert [found.id for found in (await Jobs(one).list()).records] == ["j1"]


@pytest.mark.parametrize("model", ["digits", "letters"])
async def test_an_id_whose_record_is_gone_is_a_new_jobs(redis_queue: RedisQueue, model: str) -> None:
    """It is as old as its creation, whatever is left of the other in the index."""
    delivery = await redis_queue.connect()
    await Jobs(delivery).create(record(created_at=1000.0))
    await Jobs(delivery).create(record("j2", created_at=2000.0))
    redis_queue.on_owner("PEXPIRE", RECORD, 0)

    created = await Jobs(delivery).create(record(model=model, created_at=3000.0))

    assert created
    assert [found.id for found in (await Jobs(delivery).list()).records] == ["j1", "j2"]
    assert {found.id for found in await Jobs(delivery).unfinished()} == {"j1", "j2"}
    assert not await Jobs(delivery).create(record(model="else", created_at=3000.0))
