"""Notes on a shard that is run: only its owner writes them, and only if it has read the last one."""

from qinfer.jobs.queue.jobs import Jobs
from qinfer.queue.lanes import Queue
from tests.contract.conftest import RedisQueue
from tests.support.bulk_jobs import LANES, fetch, finish, index_of, known, running


async def noted(delivery: Queue, job: str = "j1") -> dict[int, bytes]:
    return dict((await known(delivery, job)).resumptions)


async def test_the_owner_of_a_shard_notes_what_is_known(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await running(delivery, 2)
    [lease] = await fetch(delivery, 1)
    jobs, index = Jobs(delivery), index_of(lease)

    assert await jobs.keep("j1", lease, index, b"", b"one")
    assert await jobs.keep("j1", lease, index, b"one", b"two", "a line")
    assert await noted(delivery) == {index: b"two"}
    assert [line.text for line in await jobs.log("j1")][-1] == "a line"


async def test_what_was_noted_is_noted_again_where_the_reply_was_lost(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await running(delivery, 1)
    [lease] = await fetch(delivery, 1)

    for _ in range(2):
        assert await Jobs(delivery).keep("j1", lease, 0, b"", b"one")


async def test_an_owner_that_has_not_read_the_latest_notes_nothing(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await running(delivery, 1)
    [lease] = await fetch(delivery, 1)
    await Jobs(delivery).keep("j1", lease, 0, b"", b"one")

    assert not await Jobs(delivery).keep("j1", lease, 0, b"", b"other")
    assert await noted(delivery) == {0: b"one"}


async def test_a_former_owner_notes_nothing(queue: RedisQueue) -> None:
    """Another has reclaimed the shard, or it was given back."""
    delivery = await queue.connect()
    await running(delivery, 2)
    first, second = await fetch(delivery, 2)
    taken = await delivery.reclaim(LANES, "b", 0.0, 2)
    jobs = Jobs(delivery)

    assert {index_of(lease) for lease in taken} == {index_of(first), index_of(second)}
    assert not await jobs.keep("j1", first, index_of(first), b"", b"stale")
    assert await jobs.keep("j1", taken[0], index_of(taken[0]), b"", b"new")
    await delivery.release(taken)
    assert not await jobs.keep("j1", taken[0], index_of(taken[0]), b"new", b"newer")


async def test_what_is_known_of_a_shard_ends_with_it(queue: RedisQueue) -> None:
    delivery = await queue.connect()
    await running(delivery, 2)
    first, second = await fetch(delivery, 2)
    jobs = Jobs(delivery)
    for lease in (first, second):
        assert await jobs.keep("j1", lease, index_of(lease), b"", b"one")

    assert await finish(delivery, first)
    await jobs.drop_shard("j1", second, index_of(second))

    assert not await noted(delivery)
    assert not await jobs.keep("j1", first, index_of(first), b"one", b"two")
