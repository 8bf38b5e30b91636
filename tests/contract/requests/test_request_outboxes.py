"""The contract of outboxes that programs name (promises 2, 3 and 6 of `qinfer.queue.requests`) on each server."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import InvalidRequest
from qinfer.queue import keys
from qinfer.queue.deliveries import DeliveryKind, outbox
from qinfer.queue.entries import MAX_NOTES_BYTES, AcceptOutcome, Ending, RequestState, reply_address
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses
from tests.contract.conftest import RedisQueue
from tests.contract.queue.test_delivery import listening
from tests.support.requests import accept, address, ended, fetch, frame_of, settle, webhooks

HOOK = "https://example.org/hook"
BOX = "bridge:digits"
LARGE = 2**20 + 1
KIND = outbox(BOX, 600.0)
NOW = outbox(BOX, 0.0)
QUEUE = keys.deliveries("digits", 0, KIND.name)
LATER = QUEUE + "|later"


async def take(delivery: Queue, count: int = 100, *, kind: DeliveryKind = KIND) -> list[Ending]:
    """Takes once."""
    return await delivery.requests.endings("digits", 0, kind, count)


async def take_again(queue: RedisQueue, delivery: Queue, count: int = 100) -> list[Ending]:
    """Takes once what was taken, as if it had rested for long enough, and what is new."""
    for item_id in queue.on_owner("ZRANGE", LATER, 0, -1):
        queue.on_owner("ZINCRBY", LATER, -900_000, item_id)
    return await take(delivery, count)


async def take_all(delivery: Queue) -> list[Ending]:
    """Takes until none comes."""
    taken: list[Ending] = []
    while found := await take(delivery):
        taken += found
    return taken


async def confirm(delivery: Queue, *endings: Ending) -> None:
    await delivery.deliveries.done("digits", 0, KIND, [ending.id for ending in endings])


async def told(delivery: Queue, request_id: str = "r1", *, kind: DeliveryKind = KIND, **changes: Any) -> Ending:
    """Ends a request that has an outbox, and takes its end."""
    await accept(delivery, request_id, **{"outbox": BOX, **changes})
    await settle(delivery, ended(request_id))
    [ending] = await take(delivery, kind=kind)
    return ending


# --- what an ending is ---


async def test_the_end_of_a_request_comes_with_its_record_and_result(queue: RedisQueue) -> None:
    """All that is needed to answer, by one call; nothing of a request that runs, or that has no outbox."""
    delivery = await queue.connect()
    await accept(delivery, "r1", outbox=BOX, notes=b"\x00reply to", client_id="mine", tenant="t", plan=b"\xff")
    await accept(delivery, "r2", outbox=BOX)
    await accept(delivery, "r3")
    assert await take(delivery) == []

    await settle(delivery, ended("r1", attempt=2), ended("r3"))

    [ending] = await take(delivery)
    assert (ending.request_id, ending.notes, ending.blob, ending.attempts) == (
        "r1",
        b"\x00reply to",
        b"blob of succeeded",
        1,
    )
    assert ending.record == await delivery.requests.record(address())
    assert ending.record is not None
    assert (ending.record.state, ending.record.has_result) == (RequestState.SUCCEEDED, True)


@pytest.mark.parametrize("state", [RequestState.FAILED, RequestState.EXPIRED, RequestState.CANCELLED])
async def test_a_request_that_failed_is_told_too(queue: RedisQueue, state: RequestState) -> None:
    """With its error, and with a blob only where there is one."""
    delivery = await queue.connect()
    for name, blob in (("r1", b"why"), ("r2", b"")):
        await accept(delivery, name, outbox=BOX)
        await settle(delivery, ended(name, state, code="no", message="not today", blob=blob))

    first, second = await take(delivery)

    assert (first.blob, second.blob) == (b"why", None)
    for ending in (first, second):
        assert ending.record is not None
        assert (ending.record.state, ending.record.code, ending.record.message) == (state, "no", "not today")


async def test_results_of_all_sizes_are_complete(queue: RedisQueue) -> None:
    """However large; those that are too large for one reply come with later calls."""
    delivery = await queue.connect()
    sizes = [10, LARGE, 700_000, 700_000, 20, 5 * 2**20, 600_000, 30]
    for number, size in enumerate(sizes):
        await accept(delivery, f"r{number}", outbox=BOX)
        await settle(delivery, ended(f"r{number}", blob=bytes([number]) * size))

    taken = await take_all(delivery)

    assert [(ending.request_id, ending.blob) for ending in taken] == [
        (f"r{number}", bytes([number]) * size) for number, size in enumerate(sizes)
    ]


async def test_a_result_whose_time_is_over_is_gone(queue: RedisQueue) -> None:
    """The record still says how the request ended; later there is no record either, and the notes are still there."""
    delivery = await queue.connect()
    await accept(delivery, outbox=BOX, notes=b"n", result_ttl_s=0.01, tombstone_ttl_s=0.3)
    await settle(delivery, ended())

    async def has_no_result() -> bool:
        return await delivery.requests.result(address()) is None

    await eventually(has_no_result)
    [ending] = await take(delivery)
    assert ending.record is not None
    assert (ending.record.state, ending.record.has_result, ending.blob) == (RequestState.SUCCEEDED, False, None)

    async def is_forgotten() -> bool:
        return await delivery.requests.record(address()) is None

    await eventually(is_forgotten)
    [ending] = await take_again(queue, delivery)
    assert (ending.request_id, ending.record, ending.blob, ending.notes) == ("r1", None, None, b"n")


async def test_each_outbox_is_its_own(queue: RedisQueue) -> None:
    """Two names, two models, and the webhooks'; a request that nobody reads the outbox of is in nobody's way."""
    delivery = await queue.connect()
    await accept(delivery, "r1", outbox=BOX)
    await accept(delivery, "r2", outbox="other")
    await accept(delivery, "r3", webhook=HOOK)
    await accept(delivery, "r4", "model", outbox=BOX)
    await settle(delivery, *(ended(name) for name in ("r1", "r2", "r3")), ended("r4", model="model"))

    assert [ending.request_id for ending in await take(delivery)] == ["r1"]
    assert [ending.request_id for ending in await take(delivery, kind=outbox("other", 1.0))] == ["r2"]
    assert [item.text for item in await webhooks(delivery)] == ["request:r3"]
    [ending] = await delivery.requests.endings("model", 0, KIND, 9)
    assert ending.request_id == "r4"
    assert await take(delivery, kind=outbox("nobody's", 1.0)) == []


# --- handed out until confirmed ---


async def test_endings_are_shared_out_among_readers(queue: RedisQueue) -> None:
    """In the order of their ends, up to what is asked for, and none twice."""
    delivery, other = await queue.connect(), await queue.connect()
    names = [f"r{number}" for number in range(250)]
    for name in names:
        await accept(delivery, name, outbox=BOX, notes=name.encode())
    await settle(delivery, *map(ended, names))

    taken = [
        await take(delivery, 120),
        await take(other, 120),
        await take(delivery, 120),
    ]

    assert [len(part) for part in taken] == [120, 120, 10]
    assert [(ending.request_id, ending.notes) for part in taken for ending in part] == [
        (name, name.encode()) for name in names
    ]


async def test_what_is_not_confirmed_comes_again_before_what_is_new(queue: RedisQueue) -> None:
    """To any reader, once it was at rest for so long."""
    delivery, other = await queue.connect(), await queue.connect()
    first = await told(delivery, notes=b"n")
    await accept(delivery, "r2", outbox=BOX)
    await settle(delivery, ended("r2"))

    assert [ending.request_id for ending in await take(other)] == ["r2"]
    again = await take_again(queue, other, 1)

    assert [(ending.id, ending.request_id, ending.notes, ending.attempts) for ending in again] == [
        (first.id, "r1", b"n", 2)
    ]
    assert again[0].blob == b"blob of succeeded"
    assert len(await take_again(queue, other)) == 2


async def test_many_come_again_at_once(queue: RedisQueue) -> None:
    """A reader that was killed leaves hundreds."""
    delivery = await queue.connect()
    names = [f"r{number}" for number in range(350)]
    for name in names:
        await accept(delivery, name, outbox=BOX)
    await settle(delivery, *map(ended, names))
    assert len(await take_all(delivery)) == 350

    again = await take_again(queue, delivery, 300)

    assert len({ending.request_id for ending in again}) == 300
    assert {ending.attempts for ending in again} == {2}


async def test_what_is_confirmed_is_gone(queue: RedisQueue) -> None:
    """Many by one call; the others stay, and to confirm again is no error. Their results stay."""
    delivery = await queue.connect()
    names = [f"r{number}" for number in range(5)]
    for name in names:
        await accept(delivery, name, outbox=BOX)
    await settle(delivery, *map(ended, names))
    taken = await take(delivery)

    await confirm(delivery, *taken[:3])
    await confirm(delivery, *taken[:4])
    await confirm(delivery)

    assert [ending.request_id for ending in await take_again(queue, delivery)] == ["r4"]
    assert await delivery.requests.result(address("r0")) == b"blob of succeeded"


# --- repetitions (promise 3) ---


@pytest.mark.parametrize("way", ["id", "key", "found"])
async def test_a_repetition_after_the_end_is_told_again(queue: RedisQueue, way: str) -> None:
    """The stored answer, without running the request again: by id or by key, by a server that takes nothing too."""
    delivery = await queue.connect()
    same: dict[str, Any] = {
        "outbox": BOX,
        "notes": b"n",
        "idempotency_key": "k" if way == "key" else "",
        "body_hash": "same",
    }
    await confirm(delivery, await told(delivery, **same))
    assert await take_again(queue, delivery) == []

    again: AcceptOutcome | None
    if way == "found":
        again = await delivery.requests.find(address("r1"), "same", notes=b"n")
    else:
        again = await accept(delivery, "r2" if way == "key" else "r1", **same)

    assert again is not None
    assert (again.id, again.is_new) == ("r1", False)
    [ending] = await take(delivery)
    assert (ending.request_id, ending.notes, ending.blob) == ("r1", b"n", b"blob of succeeded")
    assert ending.record is not None
    assert await fetch(delivery) == []


async def test_a_repetition_before_the_end_changes_nothing(queue: RedisQueue) -> None:
    """It is told once, with the notes that it had first."""
    delivery = await queue.connect()
    await accept(delivery, outbox=BOX, notes=b"first")
    await accept(delivery, outbox=BOX, notes=b"second")
    assert await take(delivery) == []

    await settle(delivery, ended())

    assert [ending.notes for ending in await take(delivery)] == [b"first"]


async def test_a_repetition_with_another_body_is_not_told(queue: RedisQueue) -> None:
    """It is another request: a conflict, which its caller is told of by the hash."""
    delivery = await queue.connect()
    await confirm(delivery, await told(delivery, body_hash="first"))

    again = await accept(delivery, outbox=BOX, body_hash="second")

    assert (again.is_new, again.body_hash) == (False, "first")
    assert await take_again(queue, delivery) == []


async def test_what_waits_to_be_told_is_not_told_twice(queue: RedisQueue) -> None:
    """A source that delivers everything again and again does not fill the outbox; once confirmed, it is told again."""
    delivery = await queue.connect()
    ending = await told(delivery)

    for _ in range(3):
        await accept(delivery, outbox=BOX)

    assert [again.id for again in await take_again(queue, delivery)] == [ending.id]
    await confirm(delivery, ending)
    await accept(delivery, outbox=BOX)
    await accept(delivery, outbox=BOX)
    assert len(await take_again(queue, delivery)) == 1


async def test_a_repetition_from_elsewhere_is_answered_there(queue: RedisQueue) -> None:
    """Both callers are told, each with its own notes; a caller without an outbox changes nothing."""
    delivery = await queue.connect()
    first = await told(delivery, notes=b"first")

    await accept(delivery, outbox=BOX, notes=b"second")

    [second] = await take(delivery)
    assert (second.request_id, second.notes, second.blob) == ("r1", b"second", b"blob of succeeded")
    await confirm(delivery, first, second)
    await accept(delivery)
    assert [ending.notes for ending in await take(delivery)] == [b"first"]


async def test_a_repetition_of_a_request_without_an_outbox_is_not_told(queue: RedisQueue) -> None:
    """The first acceptance counts."""
    delivery = await queue.connect()
    await accept(delivery, "r1")
    await accept(delivery, "r2", webhook=HOOK)
    await settle(delivery, ended("r1"), ended("r2"))

    for name in ("r1", "r2"):
        assert not (await accept(delivery, name, outbox=BOX)).is_new

    assert await take(delivery) == []
    assert len(await webhooks(delivery)) == 1


# --- watchers, dead letters, wrong arguments ---


async def test_the_watcher_is_told_from_the_start(queue: RedisQueue) -> None:
    """Once per batch or request, with the ids and nothing else; by then the outbox has them."""
    worker, reader = await queue.connect(), await queue.connect()
    async with listening(reader, "b1") as hints:
        for name in ("r1", "r2"):
            await accept(reader, name, outbox=BOX, watcher=reply_address("b1"))

        await settle(worker, ended("r1"), ended("r2"))

        found: set[str] = set()
        while len(found) < 2:
            found |= {response.request_id for response in decode_responses(await hints.get())}
        assert found == {"r1", "r2"}
        assert len(await take(reader)) == 2


async def test_those_that_watch_later_are_told_beside_the_watcher(queue: RedisQueue) -> None:
    """Who asks for a request in `/v1` does not take the bridge's place."""
    delivery = await queue.connect()
    async with listening(delivery, "b1") as first, listening(delivery, "g1") as second:
        await accept(delivery, outbox=BOX, watcher=reply_address("b1"))
        await delivery.requests.record(address(), reply_address("g1"))

        await settle(delivery, ended())

        assert [decode_responses(await hints.get())[0].request_id for hints in (first, second)] == ["r1", "r1"]


async def test_a_dead_letter_is_told_and_told_again_after_its_replay(queue: RedisQueue) -> None:
    """The first end is told only until the letter is put back: then the request will have another end."""
    delivery = await queue.connect()
    await accept(delivery, frame=frame_of("r1"), outbox=BOX, notes=b"n")
    [lease] = await fetch(delivery)
    assert await delivery.bury(lease, "r1", "failed", "why")
    await settle(delivery, ended("r1", RequestState.FAILED, lease.entry))
    [ending] = await take(delivery)
    assert ending.record is not None
    assert ending.record.state is RequestState.FAILED

    [letter] = await delivery.dead_letters.list("digits")
    assert await delivery.dead_letters.replay("digits", letter.id)

    assert await take_again(queue, delivery) == []
    [lease] = await fetch(delivery)
    await settle(delivery, ended("r1", RequestState.SUCCEEDED, lease.entry))
    [ending] = await take(delivery)
    assert ending.record is not None
    assert (ending.record.state, ending.notes, ending.blob) == (RequestState.SUCCEEDED, b"n", b"blob of succeeded")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"outbox": BOX, "webhook": HOOK}, "no webhook"),
        ({"outbox": BOX, "notes": bytes(MAX_NOTES_BYTES + 1)}, "8193 bytes, more than 8192"),
        ({"outbox": "x" * 201}, "longer than 200"),
        ({"notes": b"x"}, "no outbox"),
    ],
    ids=["webhook too", "long notes", "long name", "notes only"],
)
async def test_what_can_not_be_is_refused(queue: RedisQueue, changes: dict[str, Any], why: str) -> None:
    """Nothing is accepted then; at the bound it is."""
    delivery = await queue.connect()

    with pytest.raises(InvalidRequest, match=why):
        await accept(delivery, **changes)

    assert await delivery.requests.record(address()) is None
    ending = await told(delivery, notes=bytes(MAX_NOTES_BYTES))
    assert ending.notes == bytes(MAX_NOTES_BYTES)


# --- what only a server can do ---


async def test_the_outbox_lives_a_day_longer_than_the_records(redis_queue: RedisQueue) -> None:
    """Where nobody reads it any more, nothing is left; what is read leaves nothing before."""
    delivery = await redis_queue.connect()
    ending = await told(delivery, result_ttl_s=500.0, tombstone_ttl_s=500.0)

    assert float(redis_queue.on_owner("PTTL", QUEUE)) / 1000 == pytest.approx(1000.0 + 86400.0, abs=30.0)
    await confirm(delivery, ending)
    assert (redis_queue.on_owner("XLEN", QUEUE), redis_queue.on_owner("EXISTS", LATER)) == (0, 0)


async def test_an_outbox_that_nobody_reads_does_not_grow_for_ever(redis_queue: RedisQueue) -> None:
    """New entries drop those that are older than any record, although a reader holds them."""
    delivery = await redis_queue.connect()
    for number in range(400):  # as if they had ended in 1970; whole nodes of the stream go at once
        redis_queue.on_owner("XADD", QUEUE, f"{number + 1}-0", "i", "old", "n", "")
    await take(delivery, 10)

    ending = await told(delivery)

    assert redis_queue.on_owner("XLEN", QUEUE) <= 100
    await confirm(delivery, ending)
    await take_again(redis_queue, delivery)
    assert redis_queue.on_owner("ZCARD", LATER) <= 100


async def test_full_memory_stops_no_ending(redis_queue: RedisQueue) -> None:
    """Neither the end, nor that it is told, told again, and confirmed: all that makes room."""
    delivery = await redis_queue.connect()
    for name in ("r1", "r2"):
        await accept(delivery, name, outbox=BOX, body_hash="same")
    redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "1")
    try:
        await settle(delivery, ended("r1"), ended("r2"))
        endings = await take(delivery)
        await confirm(delivery, *endings)
        assert not (await accept(delivery, "r1", outbox=BOX, body_hash="same")).is_new
        again = await take(delivery)
    finally:
        redis_queue.on_every_node("CONFIG", "SET", "maxmemory", "0")

    assert [ending.request_id for ending in endings] == ["r1", "r2"]
    assert [ending.request_id for ending in again] == ["r1"]


async def test_thousands_are_confirmed_by_one_call(redis_queue: RedisQueue) -> None:
    """However many: a script takes only so many arguments."""
    delivery = await redis_queue.connect()
    await asyncio.gather(*(accept(delivery, f"r{number}", outbox=BOX) for number in range(2500)))
    await settle(delivery, *(ended(f"r{number}") for number in range(2500)))
    taken: list[Ending] = []
    while found := await take(delivery, 500):
        taken += found
    assert len(taken) == 2500

    await confirm(delivery, *taken)

    assert redis_queue.on_owner("XLEN", QUEUE) == 0


async def test_a_result_that_an_outbox_tells_is_not_removed(queue: RedisQueue) -> None:
    """It is the reader's of the outbox."""
    delivery = await queue.connect()
    await accept(delivery, outbox=BOX)
    await settle(delivery, ended())

    await delivery.requests.remove_result(address())

    assert [ending.blob for ending in await take_all(delivery)] == [b"blob of succeeded"]


async def test_a_removed_result_leaves_no_object(object_queue: RedisQueue) -> None:
    delivery = await object_queue.connect()
    await accept(delivery)
    await settle(delivery, ended())
    name = object_queue.on_owner("HGET", keys.result("digits", 0, "r1"), "name").decode()
    store = Path(object_queue.limits.payload_url.removeprefix("file://"))

    await delivery.requests.remove_result(address())
    await delivery.requests._values.wait_for_deletions()

    assert not (store / name).exists()


async def test_an_object_that_was_deleted_is_a_result_that_is_gone(object_queue: RedisQueue) -> None:
    """The others come with theirs."""
    delivery = await object_queue.connect()
    for name in ("r1", "r2"):
        await accept(delivery, name, outbox=BOX)
    await settle(delivery, ended("r1"), ended("r2"))
    name = object_queue.on_owner("HGET", keys.result("digits", 0, "r1"), "name").decode()
    store = object_queue.limits.payload_url.removeprefix("file://")
    await asyncio.to_thread(_delete, store, name)

    first, second = await take_all(delivery)

    assert (first.request_id, first.blob, second.blob) == ("r1", None, b"blob of succeeded")


def _delete(store: str, name: str) -> None:
    (Path(store) / name).unlink()
