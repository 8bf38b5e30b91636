"""The contract of asynchronous requests (the numbered promises of `qinfer.queue.requests`) on each server."""

import asyncio

import pytest

from qinfer.errors import QueueFull
from qinfer.queue import keys
from qinfer.queue.entries import AcceptOutcome, Lane, RequestState, reply_address
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.support.leases import renew
from tests.support.requests import LANE, LONG_S, accept, address, ended, fetch, frame_of, outcome, settle

CANCELLED, EXPIRED, FAILED = RequestState.CANCELLED, RequestState.EXPIRED, RequestState.FAILED
QUEUED, RUNNING, SUCCEEDED = RequestState.QUEUED, RequestState.RUNNING, RequestState.SUCCEEDED


# --- one terminal state (promise 1) ---


async def test_an_accepted_request_is_fetched_and_known(queue: RedisQueue) -> None:
    """The frame waits in the lane, and the record tells what was given with it."""
    delivery = await queue.connect()
    before_s = delivery.clock.now_s()

    accepted = await accept(delivery, tenant="t", client_id="mine", plan=b"\x00\xff", webhook="https://example.org/x")

    assert (accepted.id, accepted.is_new, accepted.body_hash) == ("r1", True, "hash of r1")
    record = await delivery.requests.record(address())
    assert record is not None
    assert (record.address, record.state, record.version, record.attempts) == (address(), QUEUED, 1, 0)
    assert (record.tenant, record.client_id, record.plan) == ("t", "mine", b"\x00\xff")
    assert (record.webhook, record.webhook_state) == ("https://example.org/x", "")
    assert record.created_at == pytest.approx(before_s, abs=5.0)
    assert record.deadline_at - record.created_at == pytest.approx(LONG_S)
    assert (record.finished_at, record.expires_at, record.has_result) == (0.0, 0.0, False)
    [lease] = await fetch(delivery)
    assert (lease.frame, lease.entry.payload_id) == (b"r1", "")


async def test_nothing_is_known_of_a_request_that_never_was(queue: RedisQueue) -> None:
    """Neither a record nor a result; to end it or to watch it is no error."""
    requests = (await queue.connect()).requests

    assert await requests.record(address()) is None
    assert await requests.result(address()) is None
    assert await requests.record(address(), reply_address("g1")) is None
    assert await requests.settle([ended()]) == [False]


async def test_a_request_is_running_while_a_worker_holds_it(queue: RedisQueue) -> None:
    """State and attempts follow the entry: fetched, released, reclaimed, given back as a suspect."""
    delivery = await queue.connect()
    await accept(delivery)

    async def seen() -> tuple[RequestState, int]:
        record = await delivery.requests.record(address())
        assert record is not None
        return record.state, record.attempts

    leases = await fetch(delivery)
    assert await seen() == (RUNNING, 1)
    await delivery.release(leases)
    assert await seen() == (QUEUED, 0)
    await fetch(delivery)
    suspects = await delivery.reclaim([LANE], "b", 0.0, 10)
    assert await seen() == (RUNNING, 2)
    await delivery.release(suspects)
    assert await seen() == (QUEUED, 1)


async def test_a_settled_request_has_its_outcome_and_leaves_the_queue(queue: RedisQueue) -> None:
    """State, error, times and result in the record; nothing in the lane."""
    delivery = await queue.connect()
    await accept(delivery, result_ttl_s=100.0)
    [lease] = await fetch(delivery)
    delivery.marks.mark_begun([lease])
    for _ in range(2):  # a node that does not know the script is sent it behind the first reply
        await delivery.depth([LANE])
    assert queue.on_owner("SCARD", keys.lane(LANE) + b"~executing") == 1

    assert await settle(
        delivery, ended("r1", FAILED, lease.entry, code="inference_failed", message="no", attempt=1)
    ) == [True]

    record = await delivery.requests.record(address())
    assert record is not None
    assert (record.state, record.code, record.message, record.attempts) == (FAILED, "inference_failed", "no", 1)
    assert record.finished_at >= record.created_at
    assert record.expires_at - record.finished_at == pytest.approx(100.0)
    assert record.has_result
    assert await delivery.requests.result(address()) == b"blob of failed"
    assert await delivery.depth([LANE]) == [0]
    assert renew(delivery, [lease]) == [lease]
    assert not queue.on_owner("EXISTS", keys.lane(LANE) + b"~executing")


async def test_of_several_that_end_a_request_one_is_first(queue: RedisQueue) -> None:
    """Cancel, expiry and success at once, from three processes: one is told that it was first, and is what is seen."""
    worker, gateway, janitor = await queue.connect(), await queue.connect(), await queue.connect()
    ways = [(worker, SUCCEEDED), (gateway, CANCELLED), (janitor, EXPIRED)]
    for number in range(20):
        name = f"r{number}"
        await accept(gateway, name)
        [lease] = await fetch(worker)
        ways.append(ways.pop(0))

        answers = await asyncio.gather(
            *(
                settle(delivery, ended(name, state, lease.entry if state is SUCCEEDED else None))
                for delivery, state in ways
            )
        )

        [first] = [state for (_, state), [is_first] in zip(ways, answers, strict=True) if is_first]
        record = await gateway.requests.record(address(name))
        assert record is not None
        assert record.state == first
        assert await gateway.requests.result(address(name)) == outcome(first).blob
    assert await gateway.depth([LANE]) == [0]


async def test_to_end_a_request_again_changes_nothing(queue: RedisQueue) -> None:
    """The same caller, whose reply was lost, may repeat itself."""
    delivery = await queue.connect()
    await accept(delivery)
    await settle(delivery, ended())
    before = await delivery.requests.record(address())

    assert await settle(delivery, ended("r1", CANCELLED), ended("r1", EXPIRED, blob=b"")) == [False, False]

    assert await delivery.requests.record(address()) == before
    assert await delivery.requests.result(address()) == b"blob of succeeded"


@pytest.mark.parametrize("state", [SUCCEEDED, FAILED])
async def test_a_result_can_be_removed_before_its_time(queue: RedisQueue, state: RequestState) -> None:
    """The record stays, and what has failed tells why; id and idempotency key are known as before."""
    delivery = await queue.connect()
    first = await accept(delivery, idempotency_key="key", idempotency_ttl_s=100.0)
    await settle(delivery, ended("r1", state, code="" if state is SUCCEEDED else "inference_failed"))
    before = await delivery.requests.record(address())

    await delivery.requests.remove_result(address())

    record = await delivery.requests.record(address())
    assert before is not None
    assert record is not None
    assert (record.state, record.code, record.has_result) == (state, before.code, False)
    assert (record.expires_at < before.expires_at) == (state is SUCCEEDED)
    assert await delivery.requests.result(address()) is None
    again = await accept(delivery, idempotency_key="key", idempotency_ttl_s=100.0)
    assert (again.id, again.is_new) == (first.id, False)


async def test_what_has_not_ended_is_not_removed(queue: RedisQueue) -> None:
    """Nor does anything come of an id that is not known."""
    delivery = await queue.connect()
    await accept(delivery)

    for name in ("r1", "unknown"):
        await delivery.requests.remove_result(address(name))

    assert [lease.frame for lease in await fetch(delivery)] == [b"r1"]
    assert await delivery.requests.record(address("unknown")) is None
    assert await settle(delivery, ended()) == [True]
    assert await delivery.requests.result(address()) == b"blob of succeeded"


async def test_the_items_of_a_batch_end_each_for_itself(queue: RedisQueue) -> None:
    """In one call: one is new to its end, one had ended before, one is unknown."""
    delivery = await queue.connect()
    for name in ("r1", "r2", "r3"):
        await accept(delivery, name)
    await settle(delivery, ended("r2", CANCELLED))
    entries = {lease.frame.decode(): lease.entry for lease in await fetch(delivery)}

    firsts = await settle(delivery, *(ended(name, SUCCEEDED, entries.get(name)) for name in ("r1", "r2", "other")))

    assert firsts == [True, False, False]
    assert await delivery.depth([LANE]) == [1]


# --- the terminal step takes the entry with it (promise 2) ---


async def test_a_request_that_nobody_fetched_can_be_cancelled(queue: RedisQueue) -> None:
    """With zero workers, and before its lane has a group: it never runs."""
    delivery = await queue.connect()
    await accept(delivery)

    assert await settle(delivery, ended("r1", CANCELLED)) == [True]

    assert await fetch(delivery) == []
    record = await delivery.requests.record(address())
    assert record is not None
    assert (record.state, record.attempts) == (CANCELLED, 0)


async def test_a_request_that_another_holds_is_taken_from_it(queue: RedisQueue) -> None:
    """The holder learns it when it renews; the record keeps the number of attempts."""
    worker, gateway = await queue.connect(), await queue.connect()
    await accept(gateway)
    await fetch(worker, "a")
    held = await worker.reclaim([LANE], "b", 0.0, 10)

    await settle(gateway, ended("r1", CANCELLED))

    assert renew(worker, held) == held
    record = await gateway.requests.record(address())
    assert record is not None
    assert record.attempts == 2


async def test_a_request_that_was_moved_is_found_where_it_is(queue: RedisQueue) -> None:
    """The record follows the move; an end with the old entry removes the new one too."""
    delivery = await queue.connect()
    delayed = Lane("digits", 1, "p1.delayed")
    for name in ("r1", "r2"):
        await accept(delivery, name, frame=frame_of(name))
    leases = await fetch(delivery)
    await delivery.delay(leases, "p1.delayed")
    assert await delivery.depth([LANE, delayed]) == [0, 2]

    await settle(delivery, ended("r1", EXPIRED), ended("r2", SUCCEEDED, leases[1].entry))

    assert await delivery.depth([LANE, delayed]) == [0, 0]


async def test_the_entry_of_an_unknown_request_is_removed(queue: RedisQueue) -> None:
    """A request without a record can't be asked for, and must not run for ever."""
    delivery = await queue.connect()
    await accept(delivery)
    [lease] = await fetch(delivery)

    assert await settle(delivery, ended("other", SUCCEEDED, lease.entry)) == [False]

    assert await delivery.depth([LANE]) == [0]


@pytest.mark.parametrize("size", [100, 50 * 2**20], ids=["small", "large"])
async def test_a_payload_is_there_until_the_request_ends(queue: RedisQueue, size: int) -> None:
    """The worker reads it beside the frame; afterwards nothing of it is left."""
    delivery = await queue.connect()
    payload = b"x" * size
    await accept(delivery, payload=payload)

    [lease] = await fetch(delivery)

    assert (lease.frame, lease.entry.payload_id) == (b"r1", "r1")
    assert await delivery.payload(lease.entry, "r1") == payload
    await settle(delivery, ended("r1", SUCCEEDED, lease.entry))
    assert await delivery.payload(lease.entry, "r1") is None


async def test_a_large_result_is_read_as_it_was_stored(queue: RedisQueue) -> None:
    """However large; that of a caller who came too late is nowhere."""
    delivery = await queue.connect()
    await accept(delivery)
    blob = bytes(range(256)) * 20_000

    assert await settle(delivery, ended(blob=blob)) == [True]
    assert await settle(delivery, ended(blob=blob[::-1])) == [False]

    assert await delivery.requests.result(address()) == blob


async def test_the_end_frees_a_place_in_the_lane(queue: RedisQueue) -> None:
    """`depth` and the limit see it at once."""
    delivery = await queue.connect()
    await accept(delivery, limit=1)

    await settle(delivery, ended("r1", CANCELLED))

    assert (await accept(delivery, "r2", limit=1)).is_new


# --- repetitions (promise 3) ---


async def test_an_id_is_accepted_once(queue: RedisQueue) -> None:
    """Repeated, it enqueues nothing, and the caller can tell a repetition from another request by the hash."""
    delivery = await queue.connect()
    await accept(delivery, body_hash="first", payload=b"payload")

    again = await accept(delivery, body_hash="second", frame=b"another", payload=b"another")

    assert (again.id, again.is_new, again.body_hash) == ("r1", False, "first")
    [lease] = await fetch(delivery)
    assert lease.frame == b"r1"
    assert await delivery.payload(lease.entry, "r1") == b"payload"


async def test_a_large_payload_of_a_repetition_replaces_nothing(queue: RedisQueue) -> None:
    """It is on its way before it is known that the request is not new."""
    delivery = await queue.connect()
    first, second = bytes(2**20 + 1), bytes(range(256)) * 2**13
    await accept(delivery, payload=first)

    assert not (await accept(delivery, payload=second)).is_new

    [lease] = await fetch(delivery)
    assert await delivery.payload(lease.entry, "r1") == first


async def test_an_id_that_has_ended_is_still_taken(queue: RedisQueue) -> None:
    """A repetition after the end does not run the request again."""
    delivery = await queue.connect()
    await accept(delivery)
    await settle(delivery, ended())

    assert not (await accept(delivery)).is_new

    assert await fetch(delivery) == []


async def test_duplicates_with_one_key_collapse_into_one(queue: RedisQueue) -> None:
    """At once, from several gateways, each with an id of its own: all get the same one."""
    gateways = [await queue.connect() for _ in range(3)]

    answers = await asyncio.gather(
        *(
            accept(gateways[number % 3], f"r{number}", idempotency_key="k", body_hash="same", payload=b"x")
            for number in range(12)
        )
    )

    assert len({answer.id for answer in answers}) == 1
    assert [answer.is_new for answer in answers].count(True) == 1
    assert {answer.body_hash for answer in answers} == {"same"}
    assert await gateways[0].depth([LANE]) == [1]


async def test_a_key_is_its_tenants_and_its_models_own(queue: RedisQueue) -> None:
    """Two tenants, or two models, may use the same one; a request without a key is never a duplicate."""
    delivery = await queue.connect()

    answers = [
        await accept(delivery, "r1", tenant="a", idempotency_key="k"),
        await accept(delivery, "r2", tenant="b", idempotency_key="k"),
        await accept(delivery, "r3", "other", tenant="a", idempotency_key="k"),
        await accept(delivery, "r4", tenant="a"),
        await accept(delivery, "r5", tenant="a"),
    ]

    assert all(answer.is_new for answer in answers)


async def test_a_key_is_forgotten_after_its_time(queue: RedisQueue) -> None:
    """Then it is a new request's."""
    delivery = await queue.connect()
    await accept(delivery, "r1", idempotency_key="k", idempotency_ttl_s=0.05)

    async def is_new() -> bool:
        return (await accept(delivery, "r2", idempotency_key="k")).is_new

    await eventually(is_new)


async def test_a_full_lane_takes_no_more(queue: RedisQueue) -> None:
    """Waiting requests count, fetched or not, also in the delayed lane; a refusal leaves no trace."""
    delivery = await queue.connect()
    for name in ("r1", "r2"):
        await accept(delivery, name, frame=frame_of(name), limit=2, reports_start=True)

    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        await accept(delivery, "r3", idempotency_key="k", payload=b"x", limit=2, reports_start=True)

    assert await delivery.requests.record(address("r3")) is None
    leases = await fetch(delivery)
    with pytest.raises(QueueFull):
        await accept(delivery, "r3", limit=2, reports_start=True)
    delivery.marks.mark_begun(leases)
    for _ in range(2):  # a node that does not know the script is sent it behind the first reply
        await delivery.depth([LANE])
    assert (await accept(delivery, "r3", idempotency_key="k", payload=b"x", limit=2, reports_start=True)).is_new
    await delivery.delay(leases[:1], "p1.delayed")
    with pytest.raises(QueueFull):
        await accept(delivery, "r4", limit=2, reports_start=True)
    await delivery.release(leases[1:])
    with pytest.raises(QueueFull):
        await accept(delivery, "r4", limit=3, reports_start=True)


async def test_what_workers_hold_waits_no_longer_where_they_do_not_say_what_executes(queue: RedisQueue) -> None:
    """As that of a model without `max_queue_size`, whose lane has other limits."""
    delivery = await queue.connect()
    await accept(delivery, "r1", frame=frame_of("r1"), limit=1)
    with pytest.raises(QueueFull):
        await accept(delivery, "r2", limit=1)

    leases = await fetch(delivery)
    assert (await accept(delivery, "r2", frame=frame_of("r2"), limit=1)).is_new
    await delivery.release(leases)

    with pytest.raises(QueueFull):
        await accept(delivery, "r3", limit=2)


async def test_what_was_accepted_before_is_found_without_accepting_anything(queue: RedisQueue) -> None:
    """By key and by id, in a lane that has room: for a server that takes nothing new."""
    delivery = await queue.connect()
    await accept(delivery, "r1", idempotency_key="k")

    by_key = await delivery.requests.find(address("r2"), "hash of r2", idempotency_key="k")
    by_id = await delivery.requests.find(address("r1"), "hash of r1")
    neither = await delivery.requests.find(address("r3"), "hash of r3", idempotency_key="other")

    assert neither is None
    assert by_key == by_id == AcceptOutcome("r1", is_new=False, body_hash="hash of r1")
    assert await delivery.requests.record(address("r3")) is None
    assert await delivery.depth([LANE]) == [1]
    assert (await accept(delivery, "r3", idempotency_key="other")).is_new


# --- results and tombstones (promise 4) ---


async def test_a_result_can_be_read_again_and_again(queue: RedisQueue) -> None:
    """By everyone who asks."""
    delivery, other = await queue.connect(), await queue.connect()
    await accept(delivery)
    await settle(delivery, ended())

    assert [await of.requests.result(address()) for of in (delivery, other, delivery)] == [b"blob of succeeded"] * 3


async def test_an_outcome_without_a_blob_has_no_result(queue: RedisQueue) -> None:
    """The record tells that it ended."""
    delivery = await queue.connect()
    await accept(delivery)

    await settle(delivery, ended("r1", CANCELLED, blob=b""))

    assert await delivery.requests.result(address()) is None
    record = await delivery.requests.record(address())
    assert record is not None
    assert not record.has_result


async def test_a_tombstone_stays_when_the_result_is_gone(queue: RedisQueue) -> None:
    """So that a reader who comes too late learns that there was one."""
    delivery = await queue.connect()
    await accept(delivery, result_ttl_s=0.05)
    await settle(delivery, ended())

    async def is_gone() -> bool:
        return await delivery.requests.result(address()) is None

    await eventually(is_gone)
    record = await delivery.requests.record(address())
    assert record is not None
    assert (record.state, record.has_result) == (SUCCEEDED, False)


async def test_a_tombstone_goes_after_its_time(queue: RedisQueue) -> None:
    """Then the request never was, and its id is free."""
    delivery = await queue.connect()
    await accept(delivery, result_ttl_s=0.02, tombstone_ttl_s=0.02)
    await settle(delivery, ended())

    async def is_gone() -> bool:
        return await delivery.requests.record(address()) is None

    await eventually(is_gone)
    assert (await accept(delivery)).is_new
