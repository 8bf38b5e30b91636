"""Bulk jobs of several tenants: their shards are in the tenants' shares of a bulk lane, and the promises hold there."""

from collections import Counter

from qinfer.errors import ErrorCode
from qinfer.jobs.queue.jobs import Jobs
from qinfer.queue import keys
from qinfer.queue.entries import Lease, share_of
from qinfer.queue.lanes import Queue
from tests.contract.conftest import RedisQueue
from tests.support.bulk_jobs import LANES, counts, fetch, fine, finish, index_of, known, running, shards
from tests.support.leases import renew

NORMAL = LANES[1]


async def two_jobs(queue: RedisQueue, **changes: object) -> Queue:
    """Returns a queue with a job of 40 shards whose lane is filled with 20, and after it one of 4 of another tenant."""
    delivery = await queue.connect()
    await delivery.ensure(LANES)
    await running(delivery, 40, "big", tenant="heavy", max_parallel=10)
    await running(delivery, 4, "small", tenant="light", max_parallel=10, **changes)
    return delivery


def of_job(leases: list[Lease], job_id: str) -> list[Lease]:
    return [lease for lease in leases if lease.frame.startswith(job_id.encode())]


async def test_a_tenants_jobs_delay_no_others(queue: RedisQueue) -> None:
    """Each has its turn, however many shards of one are in the lane; as these end, others of the same job come."""
    delivery = await two_jobs(queue)

    first = await fetch(delivery, 4)
    for lease in of_job(first, "big"):
        assert await finish(delivery, lease, "big")

    assert (len(of_job(first, "big")), len(of_job(first, "small"))) == (2, 2)
    assert (await known(delivery, "big")).in_lane == 20
    later = await fetch(delivery, 6)
    assert (len(of_job(later, "big")), len(of_job(later, "small"))) == (4, 2)
    assert [index_of(lease) for lease in of_job(later, "big")] == [2, 3, 4, 5]


async def test_shares_of_jobs_are_by_their_tenants_weights(queue: RedisQueue) -> None:
    """As the tenant had them when the job was created."""
    delivery = await queue.connect()
    await delivery.ensure(LANES)
    delivery.places.weigh = {"one": 1, "three": 3}.__getitem__
    for tenant in ("one", "three"):
        await running(delivery, 20, tenant, tenant=tenant, max_parallel=10)

    taken = Counter(lease.frame.partition(b":")[0] for lease in await fetch(delivery, 8))

    assert taken == {b"one": 2, b"three": 6}


async def test_a_shard_of_a_share_ends_once(queue: RedisQueue) -> None:
    """It is reported, renewed, finished and counted; a second end changes nothing."""
    delivery = await two_jobs(queue)
    [one, two] = of_job(await fetch(delivery, 4), "small")

    assert one.entry.lane == share_of(NORMAL, 1)
    assert await Jobs(delivery).report("small", one, index_of(one), 7)
    assert (await known(delivery, "small")).rows_scored == 7
    assert renew(delivery, [one, two]) == []
    assert [await finish(delivery, one, "small") for _ in range(2)] == [True, False]
    assert await counts(delivery, "small") == (10, 0, 1, 0)
    assert renew(delivery, [one, two]) == [one]


async def test_a_shard_of_a_share_is_buried_or_dropped(queue: RedisQueue) -> None:
    """The dead letter is of the lane; what was dropped waits again."""
    delivery = await two_jobs(queue)
    [one, two] = of_job(await fetch(delivery, 4), "small")

    assert await Jobs(delivery).bury_shard("small", one, fine(one), ErrorCode.INFERENCE_FAILED.value)
    await Jobs(delivery).drop_shard("small", two, index_of(two))

    [letter] = await delivery.dead_letters.list("digits")
    assert (letter.lane, letter.request_id) == (NORMAL, "small")
    left = of_job(await fetch(delivery, 20), "small")
    assert sorted(index_of(lease) for lease in left) == [1, 2, 3]


async def test_a_stopped_job_leaves_its_share(queue: RedisQueue) -> None:
    """What waits of it at once, what is in hand if it is told so; the other tenant's job goes on."""
    delivery = await two_jobs(queue)
    held = of_job(await fetch(delivery, 4), "small")

    assert await Jobs(delivery).stop("small", "cancelling")
    assert (await known(delivery, "small")).in_lane == 2
    assert await Jobs(delivery).stop("small", "cancelled", in_hand=True)

    assert renew(delivery, held) == held
    [depth] = await delivery.depth([NORMAL])
    assert depth == 20
    assert len(of_job(await fetch(delivery, 50), "big")) == 18


async def test_a_shard_that_its_share_lost_is_missing_and_requeued(redis_queue: RedisQueue) -> None:
    """Somebody deleted the stream."""
    delivery = await two_jobs(redis_queue)
    redis_queue.on_owner("DEL", keys.lane(share_of(NORMAL, 1)))

    missing = await Jobs(delivery).missing("small")
    assert missing
    assert await Jobs(delivery).requeue("small", shards(*missing, job_id="small"))
    await Jobs(delivery).advance("small")

    left = of_job(await fetch(delivery, 50), "small")
    assert sorted(index_of(lease) for lease in left) == [0, 1, 2, 3]
    assert [await finish(delivery, lease, "small") for lease in left] == [True] * 4


async def test_jobs_of_nobody_have_the_lane_itself(queue: RedisQueue) -> None:
    """As without keys."""
    delivery = await queue.connect()
    await delivery.ensure(LANES)
    await running(delivery, 3, "one")
    await running(delivery, 3, "two")

    assert {lease.entry.lane for lease in await fetch(delivery, 10)} == {NORMAL}
