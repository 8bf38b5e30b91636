"""The memory and disk that tenants share for results of asynchronous requests: no tenant fills them."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from qinfer.errors import PayloadTooLarge, QueueFull, QuotaExceeded
from qinfer.queue import keys
from qinfer.queue.entries import AcceptOutcome, RequestState
from qinfer.queue.lanes import Queue
from qinfer.queue.stored_responses import TOO_MUCH_STORED
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_objects import objects
from tests.support.requests import LANE, accept, acceptance, address, ended, fetch, settle

MIB = 2**20
LARGE = b"x" * (12 * MIB)
STORED = keys.stored("digits", 0, "evil")
UNTIL = STORED.replace("stored:", "stored-until:")
IN_FILES = keys.stored_files("digits", 0, "evil")


@pytest.fixture
def small(redis_queue: RedisQueue) -> Iterator[RedisQueue]:
    """A Redis in which 120 MiB are free."""
    info = redis_queue.on_owner("INFO", "memory")
    used = info["used_memory"] if isinstance(info, dict) else int(info.partition(b"used_memory:")[2].split()[0])
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", str(used + 120 * MIB))
    yield redis_queue
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk of 2000 MiB whose free space, 140 MiB, does not change by itself; payloads leave a twentieth free."""
    about = SimpleNamespace(f_frsize=MIB, f_blocks=2000, f_bavail=140)
    monkeypatch.setattr(os, "statvfs", lambda _: about)
    return about


async def stored(queue: Queue, name: str, blob: bytes = LARGE, share: str = "evil") -> RequestState:
    """Returns how a request ends whose result is so large."""
    await accept(queue, name, share=share)
    assert await settle(queue, ended(name, blob=blob)) == [True]
    record = await queue.requests.record(address(name))
    assert record is not None
    return record.state


async def result_stored(queue: Queue, name: str) -> bool:
    """Tells whether large outputs are stored beside a reply stream."""
    try:
        await queue.store_result(LANE, name, LARGE, 60.0, "evil")
    except QuotaExceeded:
        return False
    return True


async def fill(queue: Queue) -> int:
    """Stores results until one is not stored; returns how many are."""
    count = 0
    while count < 20 and await stored(queue, f"r{count}") is RequestState.SUCCEEDED:
        count += 1
    return count


async def test_results_take_as_much_as_is_free_at_most(small: RedisQueue) -> None:
    """A request that executes then ends as a failure, with the reason."""
    queue = await small.connect()

    count = await fill(queue)

    assert 2 <= count <= 5
    record = await queue.requests.record(address(f"r{count}"))
    assert record is not None
    assert (record.state, record.code) == (RequestState.FAILED, "quota_exceeded")
    assert record.message == TOO_MUCH_STORED
    assert TOO_MUCH_STORED.startswith("the results that the tenant has stored take as much of the queue's memory or")
    assert await queue.depth([LANE]) == [0]


async def test_the_others_store_theirs_meanwhile(small: RedisQueue) -> None:
    queue = await small.connect()
    await fill(queue)

    assert await stored(queue, "other", share="acme") is RequestState.SUCCEEDED
    assert await stored(queue, "nobody", share="", blob=b"small") is RequestState.SUCCEEDED


async def test_a_tenant_that_has_more_than_is_free_is_refused(small: RedisQueue) -> None:
    queue = await small.connect()
    count = await fill(queue)
    for number in range(24):  # of Redis' memory, a large command takes several times its size
        small.on_owner("SET", keys.result("digits", 0, f"filler{number}"), b"x" * MIB, "PX", 60_000)

    with pytest.raises(QuotaExceeded):
        await accept(queue, "next", share="evil")
    await accept(queue, "next", share="acme")
    for number in range(count):
        await queue.requests.remove_result(address(f"r{number}"))
    assert (await accept(queue, "again", share="evil")).is_new


async def test_what_is_removed_makes_room(small: RedisQueue) -> None:
    queue = await small.connect()
    count = await fill(queue)

    await queue.requests.remove_result(address("r0"))

    assert await stored(queue, "again") is RequestState.SUCCEEDED
    assert int(small.on_owner("HGET", STORED, "")) == pytest.approx(count * 12 * MIB, rel=0.01)


async def test_what_has_expired_makes_room(small: RedisQueue) -> None:
    queue = await small.connect()
    await fill(queue)
    small.on_owner("ZADD", UNTIL, 1, "r0")
    small.on_owner("DEL", keys.result("digits", 0, "r0"))

    assert await stored(queue, "again") is RequestState.SUCCEEDED


async def test_full_memory_stores_nothing_though_results_have_expired(small: RedisQueue) -> None:
    """Expired results are forgotten by the next write: a script that writes before the refusal is not refused."""
    queue = await small.connect()
    await stored(queue, "r0", b"small")
    await accept(queue, "r1", share="evil")
    [lease] = await fetch(queue)
    small.on_owner("ZADD", UNTIL, 1, "r0")
    small.on_every_node("CONFIG", "SET", "maxmemory", "1")

    with pytest.raises(QueueFull):
        await accept(queue, "r2", share="evil")
    with pytest.raises(QueueFull):
        await queue.requests.responses.append(lease, "r1", 0, [b"response"], resumes=False, max_bytes=MIB)
    assert await settle(queue, ended("r1", entry=lease.entry, blob=b"end")) == [True]

    assert small.on_owner("ZRANGE", UNTIL, 0, -1) == [b"r1"]


async def test_responses_of_streams_count(small: RedisQueue) -> None:
    """While they come, and with the result."""
    queue = await small.connect()
    await accept(queue, share="evil")
    [lease] = await fetch(queue)
    append, count = queue.requests.responses.append, 0
    try:
        while await append(lease, "r1", count, [LARGE], resumes=False, max_bytes=1000 * MIB):
            count += 1
    except PayloadTooLarge as error:
        refusal = error.message
    await settle(queue, ended("r1", entry=lease.entry, blob=b"end"))

    assert refusal == TOO_MUCH_STORED
    assert 2 <= count <= 5
    assert int(small.on_owner("HGET", STORED, "r1")) == pytest.approx(count * 12 * MIB, rel=0.01)


async def test_without_a_limit_of_memory_there_is_no_share(redis_queue: RedisQueue) -> None:
    queue = await redis_queue.connect()

    assert [await stored(queue, f"r{number}") for number in range(4)] == [RequestState.SUCCEEDED] * 4


async def test_a_share_leaves_nothing_behind(redis_queue: RedisQueue) -> None:
    queue = await redis_queue.connect()
    await stored(queue, "r1", b"small")
    assert 0 < redis_queue.on_owner("PTTL", STORED) <= 3600_000

    await queue.requests.remove_result(address("r1"))

    assert not redis_queue.on_owner("EXISTS", STORED)


async def test_a_result_that_is_stored_again_counts_once(small: RedisQueue) -> None:
    """A worker repeats a write whose reply was lost."""
    queue, count = await small.connect(), 0
    while await result_stored(queue, f"r{count}"):
        count += 1

    assert [await result_stored(queue, f"r{number}") for number in range(count)] == [True] * count
    assert small.on_owner("HGET", STORED, "") == str(count * len(LARGE)).encode()


async def test_large_results_that_come_together_are_stored_one_by_one(small: RedisQueue) -> None:
    """Those that fit are, though all of them together take more than there is."""
    queue = await small.connect()
    names = [f"r{number}" for number in range(12)]
    for name in names:
        await accept(queue, name, share="evil")

    assert await queue.requests.settle([ended(name, blob=LARGE) for name in names]) == [True] * 12

    records = [await queue.requests.record(address(name)) for name in names]
    states = [record.state for record in records if record is not None]
    assert set(states) == {RequestState.SUCCEEDED, RequestState.FAILED}
    assert 2 <= states.count(RequestState.SUCCEEDED) <= 5


async def test_outputs_beside_the_reply_streams_count_until_they_are_read_or_dropped(small: RedisQueue) -> None:
    """A tenant that reads none of its large answers gets no more of them."""
    queue, count = await small.connect(), 0
    while await result_stored(queue, f"r{count}"):
        count += 1

    assert 2 <= count <= 5
    await queue.store_result(LANE, "other", LARGE, 60.0, "acme")
    assert await queue.take_result(LANE, "r0", "evil") == LARGE
    for number in range(1, count):
        await queue.drop_result(LANE, f"r{number}", "evil")
    await queue.store_result(LANE, "next", LARGE, 60.0, "evil")
    assert small.on_owner("HGET", STORED, "") == str(len(LARGE)).encode()


async def test_results_in_files_share_the_disk(object_queue: RedisQueue, disk: SimpleNamespace) -> None:
    """A tenant's files take at most what is free beyond the reserve; other tenants store theirs meanwhile."""
    queue = await object_queue.connect()

    assert await fill(queue) == 3

    record = await queue.requests.record(address("r3"))
    assert record is not None
    assert (record.code, record.message) == ("quota_exceeded", TOO_MUCH_STORED)
    assert await stored(queue, "other", share="acme") is RequestState.SUCCEEDED
    await queue.requests.remove_result(address("r0"))
    assert await stored(queue, "again") is RequestState.SUCCEEDED
    assert object_queue.on_owner("HGET", IN_FILES, "") == str(3 * len(LARGE)).encode()
    for name in ("r1", "r2", "again"):
        await queue.requests.remove_result(address(name))
    assert not object_queue.on_owner("EXISTS", IN_FILES)


async def test_a_tenant_whose_files_take_more_than_is_free_is_refused(
    object_queue: RedisQueue, disk: SimpleNamespace
) -> None:
    queue = await object_queue.connect()
    await fill(queue)
    disk.f_bavail = 130

    with pytest.raises(QuotaExceeded) as refusal:
        await accept(queue, "next", share="evil")

    assert refusal.value.retry_after_s == 10.0
    many = [acceptance("many1", share="evil"), acceptance("many2", share="acme")]
    refused, accepted = await queue.requests.accept_all(many)
    assert isinstance(refused, QuotaExceeded)
    assert isinstance(accepted, AcceptOutcome)
    await queue.requests.remove_result(address("r0"))
    assert (await accept(queue, "again", share="evil")).is_new


async def test_files_and_memory_are_counted_apart(object_queue: RedisQueue, disk: SimpleNamespace) -> None:
    """A full disk leaves each tenant 16 MiB, whatever the tenant has in Redis, and files that expire make room."""
    queue = await object_queue.connect()
    disk.f_bavail = 90
    await stored(queue, "small", b"x")  # one byte stays in Redis
    assert await stored(queue, "r0") is RequestState.SUCCEEDED
    assert await stored(queue, "r1") is RequestState.FAILED

    object_queue.on_owner("ZADD", IN_FILES.replace("stored:", "stored-until:"), 1, "r0")

    assert await stored(queue, "r2") is RequestState.SUCCEEDED
    assert object_queue.on_owner("HGETALL", IN_FILES) == {b"r2": b"%d" % len(LARGE), b"": b"%d" % len(LARGE)}
    assert object_queue.on_owner("HGET", STORED, "small") == b"1"


async def test_answers_beyond_the_share_of_the_disk_pass_through_redis(
    object_queue: RedisQueue, disk: SimpleNamespace, tmp_path: Path
) -> None:
    """Both counts end with the answers."""
    queue = await object_queue.connect()
    names = [f"r{number}" for number in range(4)]

    for name in names:
        assert await result_stored(queue, name)

    sizes = [object_queue.on_owner("HGET", key, "") for key in (IN_FILES, STORED)]
    assert sizes == [b"%d" % (3 * len(LARGE)), b"%d" % len(LARGE)]
    assert len(objects(tmp_path)) == 3
    for name in names[:2]:
        assert await queue.take_result(LANE, name, "evil") == LARGE
    for name in names[2:]:
        await queue.drop_result(LANE, name, "evil")
    assert [object_queue.on_owner("EXISTS", key) for key in (IN_FILES, STORED)] == [0, 0]


async def test_a_tenant_alone_has_the_whole_disk(object_queue: RedisQueue, disk: SimpleNamespace) -> None:
    queue = await object_queue.connect()

    states = [await stored(queue, f"r{number}", share="") for number in range(4)]

    assert states == [RequestState.SUCCEEDED] * 4
