"""Payloads and results that are objects in a store: Redis refers to them, and each is deleted with its reference."""

import asyncio
import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.settings import LimitSettings
from qinfer.errors import BrokerUnavailable, CorruptEntry, QinferError, QueueFull
from qinfer.queue import keys
from qinfer.queue.dead_letters import MAX_AGE_S
from qinfer.queue.entries import MARGIN_S, Entry, Payload, RequestState
from qinfer.queue.lanes import Queue
from qinfer.queue.object_store import ObjectStore
from qinfer.queue.router import Router, Script
from qinfer.storage.local import LocalStore
from qinfer.storage.store import mapped
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request_apart
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_dead_letters import MODEL, request
from tests.contract.queue.test_delivery import HIGH, fetch, ready
from tests.support.requests import LANE, accept, address, ended, settle

TENSORS = b"tensors\r\n\x00" * 100
PAYLOAD, RESULT = keys.payload(MODEL, 0, "r1"), keys.result(MODEL, 0, "r1")
EVICTED = "they were deleted there before their time"


def objects(directory: Path) -> list[Path]:
    """Returns the objects that are there."""
    return [path for path in directory.rglob("*") if path.is_file()]


def ends_in_s(path: Path) -> float:
    """Returns how long an object is kept, at least."""
    return int(path.parent.name) - time.time()


async def offer(delivery: Queue, data: bytes = TENSORS, *, limit: int = 0) -> Entry | QinferError:
    """Submits a request whose tensors are beside the stream."""
    frame, _ = encode_request_apart(request())
    future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
    delivery.submit(HIGH, frame, future.set_result, payload=Payload("r1", data, 60.0), limit=limit)
    return await future


async def offered(delivery: Queue, data: bytes = TENSORS) -> Entry:
    entry = await offer(delivery, data)
    assert isinstance(entry, Entry)
    return entry


async def gone(directory: Path) -> None:
    await eventually(lambda: objects(directory) == [], description="no object")


# --- payloads of synchronous requests ---


async def test_redis_refers_to_a_large_payload(object_queue: RedisQueue, tmp_path: Path) -> None:
    """By a hash of a few bytes with a time to live; the object's is longer."""
    delivery, other = await ready(object_queue), await object_queue.connect()

    entry = await offered(delivery)

    assert object_queue.on_owner("TYPE", PAYLOAD) == b"hash"
    assert object_queue.on_owner("HLEN", PAYLOAD) == 3
    (path,) = objects(tmp_path)
    assert 0 < object_queue.on_owner("PTTL", PAYLOAD) / 1000 <= 60.0 <= ends_in_s(path) + 1 <= 121
    assert path.read_bytes() == TENSORS
    assert await other.payload(entry, "r1") == TENSORS


async def test_a_payload_below_the_threshold_stays_in_redis(object_queue: RedisQueue, tmp_path: Path) -> None:
    """As before."""
    delivery = await ready(object_queue)

    entry = await offered(delivery, b"x")

    assert object_queue.on_owner("TYPE", PAYLOAD) == b"string"
    assert objects(tmp_path) == []
    assert await delivery.payload(entry, "r1") == b"x"


async def test_no_bytes_are_taken_for_a_reference(object_queue: RedisQueue, tmp_path: Path) -> None:
    """Whatever a client sends is what a worker reads: references are of another type than bytes."""
    delivery = await ready(object_queue)
    await offered(delivery)
    (path,) = objects(tmp_path)
    forged = b"v\n1\nname\n%s/%s\nsize\n1000" % (path.parent.name.encode(), path.name.encode())
    object_queue.on_owner("SET", keys.payload(MODEL, 0, "r2"), forged, "PX", 60000)

    assert await delivery.payload(Entry(HIGH, "1-0"), "r2") == forged


@pytest.mark.parametrize("end", ["finish", "withdraw"])
async def test_an_object_goes_with_its_entry(object_queue: RedisQueue, tmp_path: Path, end: str) -> None:
    """Whoever removes it, knowing the object or not."""
    delivery, other = await ready(object_queue), await object_queue.connect()
    entry = await offered(delivery)

    if end == "finish":
        await other.finish([entry])
    else:
        assert await other.withdraw([entry]) == [True]

    await gone(tmp_path)
    assert await delivery.payload(entry, "r1") is None


async def test_a_full_lane_leaves_no_object(object_queue: RedisQueue, tmp_path: Path) -> None:
    """It was written before the lane was asked."""
    delivery = await ready(object_queue, b"waits")

    assert isinstance(await offer(delivery, limit=1), QueueFull)

    await gone(tmp_path)
    assert object_queue.on_owner("EXISTS", PAYLOAD) == 0


async def test_an_entry_that_is_held_keeps_its_object(object_queue: RedisQueue, tmp_path: Path) -> None:
    """Neither `withdraw` nor `release` nor a move touches it."""
    delivery = await ready(object_queue)
    entry = await offered(delivery)
    [lease] = await fetch(delivery)

    assert await delivery.withdraw([entry]) == [False]
    await delivery.delay([lease], "p1.delayed")

    assert len(objects(tmp_path)) == 1
    assert await delivery.payload(entry, "r1") == TENSORS


# --- results of synchronous requests ---


async def test_a_large_result_is_taken_once_and_deleted(object_queue: RedisQueue, tmp_path: Path) -> None:
    """Once it has arrived; a second one takes the place of the first, object and all."""
    delivery, gateway = await object_queue.connect(), await object_queue.connect()
    await delivery.store_result(HIGH, "r1", b"first" * 100, 60.0)
    await delivery.store_result(HIGH, "r1", TENSORS, 60.0)
    await eventually(lambda: len(objects(tmp_path)) == 1, description="one object")

    assert await gateway.take_result(HIGH, "r1") == TENSORS

    await gone(tmp_path)
    assert await gateway.take_result(HIGH, "r1") is None


async def test_what_is_stored_anew_while_it_is_read_is_read_anew(
    object_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference that was read first leads to nothing any more; the one that is there does."""
    delivery, gateway = await object_queue.connect(), await object_queue.connect()
    await delivery.store_result(HIGH, "r1", b"first" * 100, 60.0)
    whole = ObjectStore.read
    found: list[object] = []

    async def late(store: ObjectStore, reference: object) -> bytes | None:
        if not found:
            found.append(reference)
            await delivery.store_result(HIGH, "r1", TENSORS, 60.0)
            return None
        return await whole(store, reference)  # type: ignore[arg-type]  # what it was given

    monkeypatch.setattr(ObjectStore, "read", late)

    assert await gateway.take_result(HIGH, "r1") == TENSORS


# --- asynchronous requests ---


async def test_an_accepted_request_has_its_object_as_long_as_it_is_known(
    object_queue: RedisQueue, tmp_path: Path
) -> None:
    """And its result for the result's time to live; then they go, the first at once and the second with the sweep."""
    delivery = await ready(object_queue)
    await accept(delivery, payload=TENSORS, timeout_s=100.0, result_ttl_s=200.0, tombstone_ttl_s=300.0)
    (payload,) = objects(tmp_path)
    assert object_queue.on_owner("PTTL", PAYLOAD) / 1000 <= 600.0 + MARGIN_S <= ends_in_s(payload) <= 1260 + MARGIN_S
    assert await delivery.payload(Entry(LANE, "1-0"), "r1") == TENSORS

    await settle(delivery, ended(blob=b"result" * 100))

    await eventually(lambda: not payload.exists())
    (result,) = objects(tmp_path)
    assert object_queue.on_owner("PTTL", RESULT) / 1000 <= 200.0 <= ends_in_s(result) <= 860.0
    for _ in range(2):
        assert await delivery.requests.result(address()) == b"result" * 100
    record = await delivery.requests.record(address())
    assert record is not None
    assert record.has_result


async def test_a_repetition_keeps_the_first_object_and_not_its_own(object_queue: RedisQueue, tmp_path: Path) -> None:
    """By id, and by idempotency key."""
    delivery = await ready(object_queue)
    await accept(delivery, payload=TENSORS, idempotency_key="k")

    again = await accept(delivery, payload=TENSORS, idempotency_key="k")
    other = await accept(delivery, "r2", payload=TENSORS, idempotency_key="k")

    assert (again.is_new, other.is_new, other.id) == (False, False, "r1")
    await eventually(lambda: len(objects(tmp_path)) == 1)
    assert await delivery.payload(Entry(LANE, "1-0"), "r1") == TENSORS


async def test_nothing_is_left_of_what_was_refused_or_late(object_queue: RedisQueue, tmp_path: Path) -> None:
    """A full lane; an end that another came before."""
    delivery = await ready(object_queue)
    await accept(delivery)
    with pytest.raises(QueueFull):
        await accept(delivery, "r2", payload=TENSORS, limit=1)
    await gone(tmp_path)
    await settle(delivery, ended(state=RequestState.CANCELLED, blob=b""))

    assert await settle(delivery, ended(blob=TENSORS)) == [False]

    await gone(tmp_path)


# --- dead letters ---


async def buried(delivery: Queue) -> str:
    """Makes a dead letter of a request with an object; returns its id."""
    await offered(delivery, request().inputs[0].data)  # type: ignore[arg-type]  # they are bytes
    [lease] = await fetch(delivery)
    assert await delivery.bury(lease, "r1", "inference_failed", "why")
    (letter,) = await delivery.dead_letters.list(MODEL)
    return letter.id


async def test_a_dead_letter_keeps_its_object_as_long_as_itself(object_queue: RedisQueue, tmp_path: Path) -> None:
    """A copy with a later end: the first one ends with the request."""
    delivery = await ready(object_queue)

    letter_id = await buried(delivery)

    await eventually(lambda: len(objects(tmp_path)) == 1)
    (path,) = objects(tmp_path)
    assert ends_in_s(path) > MAX_AGE_S
    shown = await delivery.dead_letters.show(MODEL, letter_id)
    assert shown is not None
    assert shown.payload == bytes(range(8))
    assert shown.size == len(shown.frame) + 8
    assert object_queue.on_owner("EXISTS", PAYLOAD) == 0


@pytest.mark.parametrize("trouble", ["away", "none", "damaged"])
async def test_an_entry_is_buried_whatever_is_the_matter_with_the_store(
    object_queue: RedisQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Or it would come again and again: its dead letter has the object as long as the request would have had it."""
    delivery = await ready(object_queue)
    await offered(delivery)
    before = objects(tmp_path)
    if trouble == "none":
        object_queue.limits = object_queue.limits.model_copy(update={"payload_url": ""})
    if trouble == "damaged":
        object_queue.on_owner("HSET", PAYLOAD, "name", "../../etc/passwd")
    other = await object_queue.connect()
    [lease] = await fetch(other)

    async def away(*_: object) -> None:
        raise BrokerUnavailable("the payload store can't be reached; try again")

    with monkeypatch.context() as patch:
        if trouble == "away":
            patch.setattr(ObjectStore, "copy", away)
        assert await other.bury(lease, "r1", "inference_failed", "why")

    assert objects(tmp_path) == before
    (letter,) = await delivery.dead_letters.list(MODEL)
    if trouble != "damaged":
        shown = await delivery.dead_letters.show(MODEL, letter.id)
        assert shown is not None
        assert shown.payload == TENSORS
    assert await delivery.dead_letters.purge(MODEL) == 1


@pytest.mark.parametrize("fields", [("v", "1"), ("v", "1", "name", "n", "size", "many"), ("x", "y")])
async def test_a_damaged_reference_is_corrupt(object_queue: RedisQueue, fields: tuple[str, ...]) -> None:
    """It ends no process."""
    delivery = await ready(object_queue)
    object_queue.on_owner("HSET", PAYLOAD, *fields)
    object_queue.on_owner("PEXPIRE", PAYLOAD, 60000)

    with pytest.raises(CorruptEntry, match="damaged"):
        await delivery.payload(Entry(HIGH, "1-0"), "r1")


async def test_what_is_not_buried_leaves_no_copy(object_queue: RedisQueue, tmp_path: Path) -> None:
    """The entry is another's meanwhile."""
    delivery = await ready(object_queue)
    await offered(delivery)
    [lease] = await fetch(delivery)
    await delivery.reclaim([HIGH], "b", idle_s=0.0, count=10)
    before = objects(tmp_path)

    assert not await delivery.bury(lease, "r1", "inference_failed", "why")

    await eventually(lambda: objects(tmp_path) == before)


async def test_a_replayed_dead_letter_has_an_object_of_its_own(object_queue: RedisQueue, tmp_path: Path) -> None:
    """With the times of a new request, and nothing else is left."""
    delivery = await ready(object_queue)
    letter_id = await buried(delivery)

    assert await delivery.dead_letters.replay(MODEL, letter_id)

    [lease] = await fetch(delivery)
    assert lease.entry.payload_id == "r1"
    assert await delivery.payload(lease.entry, "r1") == bytes(range(8))
    await eventually(lambda: len(objects(tmp_path)) == 1)
    (path,) = objects(tmp_path)
    assert object_queue.on_owner("PTTL", PAYLOAD) / 1000 <= ends_in_s(path) + 1 < 1000
    await delivery.finish([lease.entry])
    await gone(tmp_path)
    assert not await delivery.dead_letters.replay(MODEL, letter_id)
    await gone(tmp_path)


async def test_a_replayed_asynchronous_request_keeps_its_object_as_long_as_its_record(
    object_queue: RedisQueue, tmp_path: Path
) -> None:
    """That is long after its deadline; its old result goes, object and all."""
    delivery = await ready(object_queue)
    frame, tensors = encode_request_apart(request())
    await accept(delivery, lane=HIGH, frame=frame, payload=tensors, timeout_s=100.0)
    [lease] = await fetch(delivery)
    await delivery.bury(lease, "r1", "inference_failed", "why")
    await settle(delivery, ended(state=RequestState.FAILED, blob=TENSORS))
    (letter,) = await delivery.dead_letters.list(MODEL)

    assert await delivery.dead_letters.replay(MODEL, letter.id)

    await eventually(lambda: len(objects(tmp_path)) == 1)
    (path,) = objects(tmp_path)
    ttl_s = object_queue.on_owner("PTTL", PAYLOAD) / 1000
    assert MARGIN_S < ttl_s <= ends_in_s(path) + 1
    assert await delivery.payload(Entry(HIGH, "1-0"), "r1") == tensors


@pytest.mark.parametrize("by_id", [True, False], ids=["one", "all"])
async def test_purged_dead_letters_leave_no_object(object_queue: RedisQueue, tmp_path: Path, *, by_id: bool) -> None:
    """Who removes them wants them gone."""
    delivery = await ready(object_queue)
    letter_id = await buried(delivery)

    assert await delivery.dead_letters.purge(MODEL, [letter_id] if by_id else None) == 1

    assert objects(tmp_path) == []  # at once: the process that purges ends after it


async def test_a_dead_letter_whose_object_was_deleted_is_shown_and_not_replayed(
    object_queue: RedisQueue, tmp_path: Path
) -> None:
    """It stays, to be purged."""
    delivery = await ready(object_queue)
    letter_id = await buried(delivery)
    for path in objects(tmp_path):
        path.unlink(missing_ok=True)  # that of the request is deleted meanwhile

    shown = await delivery.dead_letters.show(MODEL, letter_id)
    assert shown is not None
    assert shown.payload == b""
    with pytest.raises(CorruptEntry, match="purge"):
        await delivery.dead_letters.replay(MODEL, letter_id)
    assert len(await delivery.dead_letters.list(MODEL)) == 1


# --- trouble ---


async def test_what_was_deleted_before_its_time_is_told(object_queue: RedisQueue, tmp_path: Path) -> None:
    """Not confused with what was finished; the dead letter that becomes of it has no tensors."""
    delivery = await ready(object_queue)
    entry = await offered(delivery)
    [lease] = await fetch(delivery)
    os.unlink(objects(tmp_path)[0])

    with pytest.raises(CorruptEntry, match=EVICTED):
        await delivery.payload(entry, "r1")
    assert await delivery.bury(lease, "r1", "corrupt_entry", "why")

    (letter,) = await delivery.dead_letters.list(MODEL)
    shown = await delivery.dead_letters.show(MODEL, letter.id)
    assert shown is not None
    assert shown.payload == b""


async def test_a_process_without_the_store_says_what_it_lacks(object_queue: RedisQueue, tmp_path: Path) -> None:
    """And changes nothing: another one can read it."""
    delivery = await ready(object_queue)
    object_queue.limits = object_queue.limits.model_copy(update={"payload_url": ""})
    without = await object_queue.connect()
    entry = await offered(delivery)

    with pytest.raises(BrokerUnavailable, match="QINFER_LIMITS__PAYLOAD_URL"):
        await without.payload(entry, "r1")

    assert await delivery.payload(entry, "r1") == TENSORS
    assert await without.sweep() == 0
    await without.finish([entry])
    assert len(objects(tmp_path)) == 1  # it is the sweep's now


async def test_tensors_are_on_disk_before_redis_refers_to_them(
    own_redis: RedisQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `always`: the file, and the folders that name it, new or not; copies for dead letters too."""
    steps: list[str] = []
    whole, run = os.fsync, Router.run

    def fsync(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        whole(descriptor)

    async def sent(router: Router, slot: int, script: Script, *rest: Any, **options: Any) -> Any:
        steps.append("redis")
        return await run(router, slot, script, *rest, **options)

    (tmp_path / "payloads").mkdir()
    own_redis.limits = LimitSettings(payload_url=(tmp_path / "payloads").as_uri(), payload_url_min_bytes=1)
    delivery = await own_redis.connect(durability="always")
    await delivery.ensure([LANE])
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Router, "run", sent)

    await accept(delivery, payload=TENSORS)

    assert steps[:4] == ["file", "folder", "folder", "redis"]
    [lease] = await delivery.fetch([LANE], "a", 1, 0.0)
    steps.clear()
    assert await delivery.bury(lease, "r1", "inference_failed", "why")
    assert steps[-3:] == ["file", "folder", "folder"]  # `bury` sends its own script after it


async def test_a_full_disk_loses_nothing_that_was_accepted(
    object_queue: RedisQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New tensors are refused; accepted requests and their results wait, and what is there can be read."""
    delivery = await ready(object_queue)
    await accept(delivery, payload=TENSORS)
    await accept(delivery, "r2")
    before = objects(tmp_path)

    def full(self: LocalStore, data: object, url: str, *, synced: bool = False) -> None:
        with mapped(url):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write", full)
        for action in (accept(delivery, "r3", payload=TENSORS), settle(delivery, ended("r2", blob=TENSORS))):
            with pytest.raises(BrokerUnavailable, match="disk is full"):
                await action
        assert await delivery.requests.record(address("r3")) is None
        await delivery.store_result(HIGH, "r4", TENSORS, 60.0)  # its caller waits: Redis takes it
        assert await delivery.take_result(HIGH, "r4") == TENSORS
        assert await delivery.payload(Entry(LANE, "1-0"), "r1") == TENSORS
        assert objects(tmp_path) == before
        assert await settle(delivery, ended(blob=b"")) == [True]  # it frees some space
        await gone(tmp_path)

    assert await settle(delivery, ended("r2", blob=TENSORS)) == [True]
    assert await delivery.requests.result(address("r2")) == TENSORS
    assert (await accept(delivery, "r3", payload=TENSORS)).is_new


async def test_a_store_that_is_away_refuses_and_loses_nothing(
    object_queue: RedisQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Redis that is away: what comes is refused, what is there can be read later."""
    delivery = await ready(object_queue)
    entry = await offered(delivery)
    await accept(delivery, "r2")

    async def away(*_: object) -> None:
        raise BrokerUnavailable("the payload store can't be reached; try again")

    with monkeypatch.context() as patch:
        for method in ("write", "read", "copy"):
            patch.setattr(ObjectStore, method, away)
        assert isinstance(await offer(delivery), BrokerUnavailable)
        for action in (
            delivery.payload(entry, "r1"),
            accept(delivery, "r3", payload=TENSORS),
            delivery.store_result(HIGH, "r1", TENSORS, 60.0),
            settle(delivery, ended("r2", blob=TENSORS)),
        ):
            with pytest.raises(BrokerUnavailable, match="payload store"):
                await action

    assert await delivery.payload(entry, "r1") == TENSORS
    assert await settle(delivery, ended("r2", blob=TENSORS)) == [True]
    assert await delivery.depth([HIGH]) == [1]
