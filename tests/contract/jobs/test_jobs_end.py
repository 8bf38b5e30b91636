"""The end and the resumption of bulk jobs (promises 6 and 8 of `qinfer.jobs.queue.jobs`): stop, requeue, delete."""

import asyncio
import random

import pytest

from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobAddress, JobRecord, ShardOutcome, Standing
from qinfer.queue import keys
from qinfer.queue.entries import Lease
from qinfer.queue.lanes import Queue
from tests.contract.conftest import RedisQueue
from tests.support.bulk_jobs import (
    LANES,
    counts,
    fetch,
    finish,
    index_of,
    known,
    noticed,
    planned,
    record,
    running,
    shards,
    top_up,
)
from tests.support.leases import renew
from tests.support.requests import HOOKS, webhooks


async def waiting(delivery: Queue) -> list[str]:
    """Takes all that is in the lanes; returns the frames."""
    return [lease.frame.decode() for lease in await fetch(delivery, 100, "z")]


# --- stop (promise 6) ---


async def test_a_stopped_job_leaves_the_lane_and_no_other_does(queue: RedisQueue) -> None:
    """What waits, undelivered or given back, is gone; what is in hand stays in hand, and ends uncounted."""
    delivery = await queue.connect()
    await running(delivery, 9)
    await running(delivery, 3, "j2")
    [first, second, third] = await fetch(delivery, 3)
    await delivery.release([second])
    await delivery.reclaim(LANES, "b", 0.0, 0)

    assert await Jobs(delivery).stop("j1", "cancelled", error="")
    assert await Jobs(delivery).stop("j1", "cancelled")
    assert not await Jobs(delivery).stop("j1", "failed", error="too late")

    found = await known(delivery)
    assert (found.state, found.in_lane) == ("cancelled", 2)
    assert await waiting(delivery) == ["j2:0", "j2:1", "j2:2"]
    assert not await Jobs(delivery).report("j1", first, 0, 0)
    assert await Jobs(delivery).report("j2", first, 0, 0)
    assert renew(delivery, [first, third]) == []
    assert not await finish(delivery, first)
    await Jobs(delivery).drop_shard("j1", third, index_of(third))
    assert await counts(delivery) == (0, 0, 0, 0)
    assert (await known(delivery)).in_lane == 0
    assert await delivery.depth(LANES) == [0, 3, 0]


async def test_what_is_in_hand_can_be_taken_back(queue: RedisQueue) -> None:
    """Its worker learns it when it renews; a suspect that was given back goes without being told."""
    delivery = await queue.connect()
    await running(delivery, 4)
    held = await fetch(delivery, 2)
    suspects = await delivery.reclaim(LANES, "b", 0.0, 1)
    await delivery.release(suspects)

    await Jobs(delivery).stop("j1", "failed", error="no more")
    assert (await known(delivery)).in_lane == 1
    await Jobs(delivery).stop("j1", "failed", in_hand=True)

    found = await known(delivery)
    assert (found.state, found.error, found.in_lane) == ("failed", "no more", 0)
    assert renew(delivery, held) == held
    assert await delivery.depth(LANES) == [0, 0, 0]
    assert [line.text for line in await Jobs(delivery).log("j1")] == ["failed: no more"]


async def test_a_job_that_is_being_cancelled_keeps_what_its_workers_still_finish(queue: RedisQueue) -> None:
    """Nothing more comes to the lane; the last that ends leaves a notice."""
    delivery = await queue.connect()
    await running(delivery, 9)
    first, second = await fetch(delivery, 2)

    await Jobs(delivery).stop("j1", "cancelling")
    assert await noticed(delivery) == []
    assert await finish(delivery, first)
    assert await noticed(delivery) == []
    assert await finish(delivery, second)

    assert await noticed(delivery) == ["j1"]
    assert await Jobs(delivery).advance("j1") == Standing("cancelling", 0, 0, 0, has_failed=False)
    assert await counts(delivery) == (20, 0, 2, 0)
    assert await Jobs(delivery).move("j1", {"cancelling"}, "cancelled")
    assert (await known(delivery)).ended_at > 0


async def test_a_job_without_shards_in_hand_is_looked_at_when_it_is_stopped(queue: RedisQueue) -> None:
    """Nobody else would end it."""
    delivery = await queue.connect()
    await running(delivery, 9)

    await Jobs(delivery).stop("j1", "cancelling")

    assert await noticed(delivery) == ["j1"]


async def test_an_unknown_job_is_not_stopped(queue: RedisQueue) -> None:
    """Nor does a step of its shards do harm: the entry is gone, nothing is counted."""
    delivery = await queue.connect()
    await running(delivery, 2)
    leases = await fetch(delivery, 2)

    assert not await Jobs(delivery).stop("j2", "cancelled")
    assert not await Jobs(delivery).finish_shard("j2", leases[0], ShardOutcome(0, 10))
    await Jobs(delivery).drop_shard("j2", leases[1], 1)

    assert await delivery.depth(LANES) == [0, 0, 0]
    assert await counts(delivery) == (0, 0, 0, 0)
    assert await Jobs(delivery).missing("j1") == [0, 1]
    assert await Jobs(delivery).advance("j2") is None
    assert not await Jobs(delivery).requeue("j2", shards(0))
    assert not await Jobs(delivery).delete("j2")
    assert not await Jobs(delivery).report("j2", leases[0], 0, 5)
    assert list(await Jobs(delivery).missing("j2")) == []


# --- going on (promise 6) ---


async def test_a_cancelled_job_is_planned_again(queue: RedisQueue) -> None:
    """What it did stays done; a shard that had been given up and those that never ran are run."""
    delivery = await queue.connect()
    await running(delivery, 6)
    first, second, third = await fetch(delivery, 3)
    await finish(delivery, first, failed_rows=1)
    await Jobs(delivery).finish_shard("j1", second, ShardOutcome(index_of(second), 10, 10, "no"))
    await Jobs(delivery).stop("j1", "cancelled")
    assert not await finish(delivery, third)

    assert await Jobs(delivery).move("j1", {"cancelled"}, "planning", deadline_at=1.0)
    assert [found.id for found in await Jobs(delivery).overdue()] == ["j1"]
    assert await Jobs(delivery).add_shards("j1", shards(*range(6)), 60, complete=True)
    await Jobs(delivery).advance("j1")

    found = await known(delivery)
    assert (found.state, found.shards, found.rows, found.error, found.ended_at) == ("running", 6, 60, "", 0.0)
    assert await counts(delivery) == (9, 1, 1, 0)
    assert await waiting(delivery) == ["j1:1", "j1:2", "j1:3", "j1:4"]
    assert [job.id for job in await Jobs(delivery).unfinished()] == ["j1"]


async def test_a_shard_in_hand_is_not_planned_twice(queue: RedisQueue) -> None:
    """Its worker was not told that the job had stopped: it may as well finish it, or give it back to the job."""
    delivery = await queue.connect()
    await running(delivery, 2)
    first, second = await fetch(delivery, 2)
    await Jobs(delivery).stop("j1", "cancelled")
    await Jobs(delivery).move("j1", {"cancelled"}, "planning")
    await Jobs(delivery).add_shards("j1", shards(0, 1), 20, complete=True)

    assert (await known(delivery)).shards == 2
    assert await finish(delivery, first)
    await Jobs(delivery).drop_shard("j1", second, 1)

    assert await waiting(delivery) == ["j1:1"]
    assert await counts(delivery) == (10, 0, 1, 0)


async def test_a_shard_that_ends_while_its_job_is_planned_leaves_no_notice(queue: RedisQueue) -> None:
    """It counts; but what is to be run besides is not all known."""
    delivery = await queue.connect()
    await running(delivery, 2)
    [lease, _] = await fetch(delivery, 2)
    await Jobs(delivery).move("j1", {"running"}, "planning")
    assert await Jobs(delivery).add_shards("j1", shards(0, 1, 2))
    await Jobs(delivery).drop_shard("j1", (await delivery.reclaim(LANES, "b", 0.0, 2))[1], 1)

    assert await finish(delivery, lease)

    assert await noticed(delivery) == []
    assert await counts(delivery) == (10, 0, 1, 0)
    await Jobs(delivery).add_shards("j1", [], 30, complete=True)
    assert await Jobs(delivery).advance("j1") == Standing("running", 2, 0, 2, has_failed=False)


async def test_a_job_is_not_finished_before_its_last_shard(queue: RedisQueue) -> None:
    """Somebody who saw it settled may come late: it was requeued meanwhile."""
    delivery = await queue.connect()
    await planned(delivery, 1)
    assert not await Jobs(delivery).move("j1", {"running"}, "finalizing")
    await Jobs(delivery).advance("j1")
    assert not await Jobs(delivery).move("j1", {"running"}, "finalizing")
    [lease] = await fetch(delivery)
    await finish(delivery, lease)

    assert await Jobs(delivery).move("j1", {"running"}, "finalizing")


@pytest.mark.parametrize("state", ["finalizing", "running", "failed"])
async def test_broken_parts_are_requeued(queue: RedisQueue, state: str) -> None:
    """Though their shards had succeeded: the counts follow, and the job runs until they are done."""
    delivery = await queue.connect()
    await running(delivery, 3)
    for lease in await fetch(delivery, 3):
        await finish(delivery, lease)
    await Jobs(delivery).move("j1", {"running"}, state)
    await noticed(delivery)
    await Jobs(delivery).advance("j1")

    assert not await Jobs(delivery).requeue("j1", shards(1), expected={"validating"})
    assert await Jobs(delivery).requeue("j1", shards(1))

    assert await counts(delivery) == (20, 0, 2, 0)
    assert await noticed(delivery) == ["j1"]
    assert await Jobs(delivery).advance("j1") == Standing("running", 1, 0, 1, has_failed=False)
    [lease] = await fetch(delivery, 9)
    await finish(delivery, lease)
    found = await known(delivery)
    assert (found.rows, found.rows_done, found.shards, found.deadline_at) == (30, 30, 3, 0.0)
    assert await noticed(delivery) == ["j1"]


async def test_a_shard_that_the_queue_lost_is_named_and_requeued(queue: RedisQueue) -> None:
    """Its entry was deleted by hand; the late finish of a shard that was requeued counts nothing."""
    delivery = await queue.connect()
    await running(delivery, 3)
    [lost, held] = await fetch(delivery, 2)
    await delivery.finish([lost.entry])

    assert await Jobs(delivery).missing("j1") == [0]
    assert await Jobs(delivery).requeue("j1", shards(0, 1))
    assert await Jobs(delivery).missing("j1") == []
    assert not await finish(delivery, held)
    await Jobs(delivery).advance("j1")

    assert sorted(await waiting(delivery)) == ["j1:0", "j1:1", "j1:2"]
    assert (await known(delivery)).shards == 3


# --- after the end (promise 8) ---


async def test_only_a_job_that_has_ended_is_deleted(queue: RedisQueue) -> None:
    """Nothing of it is left; a worker that holds a shard of it drops it."""
    delivery, other = await queue.connect(), await queue.connect()
    await running(delivery, 5)
    [lease] = await fetch(delivery)
    await Jobs(delivery).note("j1", "a line")
    assert await Jobs(other).get("j1") is not None

    assert not await Jobs(delivery).delete("j1")
    await Jobs(delivery).stop("j1", "cancelled")
    assert await Jobs(delivery).delete("j1")
    assert not await Jobs(delivery).delete("j1")

    assert await Jobs(other).get("j1") is None
    assert (await Jobs(delivery).list()).records == []
    assert list(await Jobs(delivery).log("j1")) == []
    assert not await Jobs(other).report("j1", lease, 0, 5)
    await Jobs(other).drop_shard("j1", lease, 0)
    assert await delivery.depth(LANES) == [0, 0, 0]
    assert await Jobs(delivery).create(record())


async def test_a_delete_that_was_interrupted_is_completed_by_the_next(redis_queue: RedisQueue) -> None:
    """The job's keys are gone, and the index still lists it."""
    delivery = await redis_queue.connect()
    await running(delivery, 1)
    await Jobs(delivery).stop("j1", "cancelled", in_hand=True)
    redis_queue.on_owner("DEL", JobAddress("digits", 0, "j1").record)

    assert await Jobs(delivery).delete("j1")
    assert not await Jobs(delivery).delete("j1")

    assert not redis_queue.on_owner("EXISTS", keys.jobs())


async def test_a_webhook_is_told_of_the_end_once(queue: RedisQueue) -> None:
    """As that of a request; what became of it is in the record."""
    delivery = await queue.connect()
    hook = "https://example.org/hook"
    await running(delivery, 1, webhook=hook)
    await Jobs(delivery).create(record("j2"))
    await Jobs(delivery).stop("j1", "cancelling")
    assert await webhooks(delivery) == []

    await Jobs(delivery).move("j1", {"cancelling"}, "cancelled")
    await Jobs(delivery).stop("j1", "cancelled")
    await Jobs(delivery).stop("j2", "failed", error="no")

    [item] = await webhooks(delivery)
    assert item.text == "job:j1"
    assert (await known(delivery)).webhook_state == "pending"
    note = (keys.job("digits", 0, "j1").encode(), "webhook_state", "delivered")
    await delivery.deliveries.done("digits", 0, HOOKS, [item.id], note=note)
    assert (await known(delivery)).webhook_state == "delivered"


# --- all together ---


async def test_whatever_happens_the_counts_agree(queue: RedisQueue) -> None:
    """Three workers that finish, steal, drop and bury; jobs that are stopped and go on: each shard counts once."""
    sides = [await queue.connect() for _ in range(3)]
    names = [f"j{number}" for number in range(6)]
    for number, name in enumerate(names):
        await planned(sides[0], 12, name, priority=1 + number % 3, max_parallel=1 + number % 2)
    choice = random.Random(7)

    working = (_work(side, f"w{number}", choice) for number, side in enumerate(sides))
    await asyncio.gather(*working, _disturb(sides[0], names, choice))
    while await top_up(Jobs(sides[0]), "digits") or sum(await sides[0].depth(LANES)):
        for lease in [*await fetch(sides[0], 100, "last"), *await sides[0].reclaim(LANES, "last", 0.0, 100)]:
            await Jobs(sides[0]).finish_shard(_job_of(lease), lease, ShardOutcome(index_of(lease), 10))

    for name in names:
        await _agrees(sides[0], await known(sides[0], name))


async def _work(delivery: Queue, consumer: str, choice: random.Random) -> None:
    for _ in range(40):
        steals = choice.random() < 0.3
        taken = delivery.reclaim(LANES, consumer, 0.0, 1) if steals else fetch(delivery, 2, consumer)
        for lease in await taken:
            outcome = ShardOutcome(index_of(lease), 10, choice.randrange(3))
            way = choice.random()
            if way < 0.1:
                await Jobs(delivery).drop_shard(_job_of(lease), lease, outcome.index)
            elif way < 0.2:
                lost = ShardOutcome(outcome.index, 10, 10, "no")
                await Jobs(delivery).bury_shard(_job_of(lease), lease, lost, "internal")
            elif way < 0.9:
                await Jobs(delivery).finish_shard(_job_of(lease), lease, outcome)


async def _disturb(delivery: Queue, names: list[str], choice: random.Random) -> None:
    for _ in range(20):
        name = choice.choice(names)
        if choice.random() < 0.5:
            await Jobs(delivery).stop(name, "cancelled", in_hand=choice.random() < 0.5)
        await top_up(Jobs(delivery), "digits", workers=2)
        if await Jobs(delivery).move(name, {"cancelled"}, "planning"):
            await Jobs(delivery).add_shards(name, shards(*range(12), job_id=name), 120, complete=True)


def _job_of(lease: Lease) -> str:
    return lease.frame.decode().partition(":")[0]


async def _agrees(delivery: Queue, found: JobRecord) -> None:
    outcomes = await Jobs(delivery).outcomes(found.id)
    lost = [outcome for outcome in outcomes.values() if outcome.error]
    failed = sum(outcome.failed_rows for outcome in outcomes.values())
    assert sorted(outcomes) == list(range(12))
    assert (found.state, found.in_lane, found.shards) == ("running", 0, 12)
    assert (found.shards_failed, found.shards_done) == (len(lost), 12 - len(lost))
    assert (found.rows_failed, found.rows_done) == (failed, 120 - failed)
    standing = await Jobs(delivery).advance(found.id)
    assert standing is not None
    assert standing.is_settled
