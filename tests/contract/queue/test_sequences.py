"""The contract of sequences (the numbered promises of `qinfer.queue.sequences.ownership`) on each server."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr

from qinfer.core.messages import Failure
from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, InvalidRequest, PayloadTooLarge, QueueFull, SequenceEnded, SequenceLost
from qinfer.queue import keys
from qinfer.queue.doorbell import Doorbell
from qinfer.queue.entries import Payload
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences import ownership
from qinfer.queue.sequences.records import (
    NOBODYS,
    CommittedStep,
    Delivery,
    SequenceId,
    StepPlace,
    StepRequest,
    SubmitLimits,
    SubmittedStep,
)
from qinfer.testing import EmbeddedServer, eventually
from tests.contract.conftest import RedisQueue
from tests.support.sequences import EIGHT, LEASE_S, SEVEN, Gateway, Worker, first, later, sequences_of
from tests.support.servers.servers import Database, RedisServer, system_redis, wait_until

LATE = Failure("deadline_exceeded", "Request timeout expired")
LEFT = Failure("cancelled", "the request was cancelled")


@pytest.fixture
async def gateway(queue: RedisQueue) -> Gateway:
    """A gateway on each kind of server."""
    return Gateway(sequences_of(await queue.connect()))


@pytest.fixture
async def later_on(timed: EmbeddedServer, database: Database) -> Gateway:
    """A gateway on a server whose time moves."""
    return Gateway(sequences_of(await database.delivery()))


# --- order and owners (promises 1 and 2) ---


async def test_steps_are_executed_in_order_by_one_owner(gateway: Gateway) -> None:
    await gateway.send(SEVEN, first(1), later(2), later(3, end=True))
    await gateway.send(EIGHT, first(10))
    one, other = await Worker(gateway, "w1").join(), await Worker(gateway, "w2").join()

    assert [owned.sequence for owned in await one.own(1)] == [SEVEN]
    assert [(owned.sequence, owned.generation) for owned in await other.own(5)] == [(EIGHT, 3)]
    for worker in (one, other):
        await worker.work()

    assert gateway.texts == ["=1", "=3", "=6", "=10"]
    assert len(one.executed) == 3
    assert await gateway.sequences.sizes([1]) == (1, 0, 0, 0)


async def test_a_step_goes_to_the_owner_of_its_sequence(gateway: Gateway) -> None:
    one, other = await Worker(gateway, "w1").join(), await Worker(gateway, "w2").join()
    await gateway.send(SEVEN, first(1))
    await one.work()

    await gateway.send(SEVEN, later(2))

    assert not await waits(gateway, "w2", "", has_slots=True)
    assert await waits(gateway, "w1", one.ticket, has_slots=False)
    assert await other.take() == []
    await one.work()
    assert gateway.texts == ["=1", "=3"]


async def waits(gateway: Gateway, worker_id: str, after: str, *, has_slots: bool) -> bool:
    """Waits for a moment as a worker does; tells whether there is anything new."""
    reader = gateway.sequences.reader(worker_id, 1, Doorbell(gateway.sequences._router, time.monotonic))
    try:
        return any(await reader.wait(after, 0.01, has_slots=has_slots))
    finally:
        await reader.close()


async def test_a_worker_is_woken_by_a_sequence_that_waits_only_with_free_slots(gateway: Gateway) -> None:
    await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1))

    assert await waits(gateway, "w1", "", has_slots=True)
    assert not await waits(gateway, "w1", "", has_slots=False)


async def test_steps_that_were_told_come_again_until_they_are_confirmed(gateway: Gateway) -> None:
    """The reply to `take` may be lost with its connection."""
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1), later(2))
    await worker.own()

    lost, again = [await gateway.sequences.take_steps("w1", 1, "") for _ in range(2)]
    assert lost is not None
    assert lost == again
    rest = await gateway.sequences.take_steps("w1", 1, lost.ticket)

    assert [taken.place.number for taken in lost.taken] == [1, 2]
    assert rest is not None
    assert rest.taken == []


async def test_a_reply_has_bounded_bytes(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, *(StepRequest(frame=b"x" * 600, timeout_s=9.0, start=first(1).start) for _ in range(1)))
    await gateway.send(SEVEN, *(StepRequest(frame=b"x" * 600, timeout_s=9.0) for _ in range(3)))
    await worker.own()

    parts, ticket = [], ""
    for _ in range(4):
        news = await gateway.sequences.take_steps("w1", 1, ticket, max_bytes=1200)
        assert news is not None
        parts.append([taken.place.number for taken in news.taken])
        ticket = news.ticket

    assert parts == [[1, 2], [3, 4], [], []]


async def test_large_tensors_do_not_change_the_order(gateway: Gateway) -> None:
    large = Payload("r1", b"x" * 3_000_000, 60.0)
    steps = [StepRequest(frame=b"1", timeout_s=60.0, start=first(1).start, payload=large), later(2), later(3)]

    await asyncio.gather(*(gateway.sequences.submit(SEVEN, step) for step in steps))
    worker = await Worker(gateway, "w1").join()
    await worker.own()
    await worker.take()

    leases = [taken.lease for taken in worker.waiting if taken.lease is not None]
    assert [lease.frame for lease in leases] == [b"1", b"2", b"3"]
    assert leases[0].entry.payload_id == "r1"
    await worker.work()
    assert gateway.texts == ["=1", "=3", "=6"]


async def test_steps_submitted_together_are_not_overtaken(gateway: Gateway) -> None:
    """By a step that comes while a script runs, and theirs is one of the next."""
    steps = [(SequenceId("acme", n), first(n)) for n in range(1, 2 * ownership.AT_ONCE + 2)]
    early, late = steps[0][0], steps[-1][0]
    steps.append((early, later(1)))
    together = asyncio.create_task(gateway.sequences.submit_together(steps))
    await asyncio.sleep(0)
    assert late in gateway.sequences._locks

    found = [await gateway.sequences.submit(sequence, later(2)) for sequence in (early, late)]

    assert [submitted.place.number for submitted in found] == [3, 2]
    outcomes = await together
    assert {type(outcome) for outcome in outcomes} == {SubmittedStep}
    assert late not in gateway.sequences._locks


async def test_ids_of_tenants_and_types_are_never_confused(gateway: Gateway) -> None:
    ids = [
        SequenceId("a", 7),
        SequenceId("a", "7"),
        SequenceId("a:n7", 7),
        SequenceId("a", ":n7"),
        SequenceId("", "a:7"),
    ]
    for number, each in enumerate(ids):
        await gateway.send(each, first(number))

    worker = await Worker(gateway, "w1").join()

    assert {owned.sequence for owned in await worker.own()} == set(ids)


async def test_limits_refuse_steps_and_sequences(gateway: Gateway) -> None:
    await gateway.send(SEVEN, first(1), later(2))

    with pytest.raises(QueueFull):
        await gateway.sequences.submit(SEVEN, later(3), SubmitLimits(steps=2))
    with pytest.raises(QueueFull):
        await gateway.sequences.submit(EIGHT, first(1), SubmitLimits(open=1))
    assert await gateway.sequences.submit(SEVEN, later(3), SubmitLimits(steps=3, open=1))


# --- lives ---


async def test_a_sequence_begins_with_start(gateway: Gateway) -> None:
    with pytest.raises(InvalidRequest, match="must specify the START flag on the first request of the sequence"):
        await gateway.send(SEVEN, later(1))


async def test_after_its_end_a_sequence_is_not_known(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1), later(2, end=True))

    with pytest.raises(InvalidRequest, match="START"):
        await gateway.send(SEVEN, later(1))
    await worker.work()
    with pytest.raises(InvalidRequest, match="START"):
        await gateway.send(SEVEN, later(1))

    assert await gateway.sequences.sizes([1]) == (0, 0, 0, 0)
    await worker.take()
    assert worker.held == {}
    assert await gateway.sequences.end_lease("w1", [1])


async def test_a_start_ends_the_life_that_runs_and_waits_behind_it(gateway: Gateway) -> None:
    """Also of another version, which other workers have."""
    old, new = await Worker(gateway, "w1").join(), await Worker(gateway, "w2", version=2).join()
    await gateway.send(SEVEN, first(1), later(2), first(10, version=2), later(20), first(100), later(200, end=True))

    await new.work()
    assert gateway.texts == []
    await old.work()
    await new.work()
    await old.work()

    assert gateway.texts == ["=1", "=3", "=10", "=30", "=100", "=300"]
    assert len(new.executed) == 2


async def test_a_start_of_a_life_of_which_nothing_waits_begins_at_once(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1), later(2))
    await worker.work()

    await gateway.send(SEVEN, first(10))
    await worker.work()

    assert gateway.texts == ["=1", "=3", "=10"]


# --- commits (promise 3) ---


async def test_a_committed_step_is_published_and_not_executed_by_the_next_owner(gateway: Gateway) -> None:
    one, other = await Worker(gateway, "w1").join(), await Worker(gateway, "w2").join()
    await gateway.send(SEVEN, first(1), later(2))
    await one.own()
    await one.take()
    await one.commit(one.waiting[0])

    await gateway.sequences.hand_over("w1", [SEVEN])
    await other.work()

    assert gateway.texts == ["=1", "=3"]
    assert [place.number for place in other.executed] == [2]


async def test_a_commit_by_a_former_owner_does_nothing(gateway: Gateway) -> None:
    one, other = await Worker(gateway, "w1").join(), await Worker(gateway, "w2").join()
    await gateway.send(SEVEN, first(1))
    await one.own()
    await one.take()

    await gateway.sequences.hand_over("w1", [SEVEN])
    assert not await one.commit(one.waiting[0])
    await other.work()

    assert one.held == {}
    assert gateway.texts == ["=1"]
    assert await gateway.sequences.state(SEVEN) == b"1"


async def test_a_commit_is_repeated_without_harm(gateway: Gateway) -> None:
    """Its reply may be lost; also that of the last step."""
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1, end=True))
    await worker.own()
    await worker.take()
    (taken,) = worker.waiting
    assert taken.lease is not None

    for response in (b"one", b"another"):
        step = CommittedStep(place=taken.place, token=taken.token, response=response, state=b"1")
        assert await gateway.sequences.commit([step]) == [True]

    assert await gateway.sequences.response(taken.place) == b"one"


async def test_large_states_and_responses_replace_one_another(queue: RedisQueue, gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1), later(2), later(3, end=True))
    await worker.own()
    await worker.take()
    for taken in list(worker.waiting):
        assert taken.lease is not None
        blob = b"%d" % taken.place.number * 2_000_000
        is_last = taken.place.number == 3
        step = CommittedStep(place=taken.place, token=taken.token, response=blob, state=blob, ends=is_last)
        assert await gateway.sequences.commit([step]) == [True]
        assert await gateway.sequences.response(taken.place) == blob
        assert await gateway.sequences.state(SEVEN) == (blob if taken.place.number < 3 else None)
        await worker.finish(taken)

    assert await gateway.sequences.response(StepPlace(SEVEN, 1, 1)) is None


async def test_a_gateway_forgets_owners_of_sequences_that_were_left(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without END, too, each owner that a gateway learns replaces those that it would look up again."""
    monkeypatch.setattr(ownership, "_LANE_KNOWN_S", 0.0)
    worker, ids = await Worker(gateway, "w1").join(), [SequenceId("acme", number) for number in range(1, 9)]
    for one in ids:
        await gateway.send(one, first(1))
    await worker.own()

    for one in ids:
        await gateway.send(one, later(2))

    assert list(gateway.sequences._lanes) == ids[-1:]


async def test_a_state_has_bounded_bytes(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "MAX_STATE_BYTES", 3)
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1000))
    await worker.own()
    await worker.take()

    with pytest.raises(PayloadTooLarge, match="4 bytes, more than 3"):
        await worker.commit(worker.waiting[0])


async def test_the_response_before_the_last_is_kept_until_it_is_answered(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1), later(2))
    await worker.own()
    await worker.take()
    one, two = worker.waiting
    for taken in (one, two):
        await worker.commit(taken)

    assert await gateway.sequences.response(one.place) == b"=1"
    await worker.finish(one)
    assert await gateway.sequences.response(one.place) is None
    await worker.finish(two)
    assert await gateway.sequences.response(two.place) == b"=3"


# --- errors (promise 5) ---


async def test_an_error_at_a_step_answers_those_behind_it_and_later_ones(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1), later(2), later(3))
    await worker.own()
    await worker.take()
    one, two, _ = worker.waiting
    await worker.commit(one)

    assert await gateway.sequences.fail(two.place, LATE, two.token)
    await gateway.answer_rest()

    ended = "sequence 7 of model 'sum' was ended at step 2: Request timeout expired; begin it again with the START flag"
    assert gateway.texts == ["=1", f"{LATE.code}: {LATE.message}", f"sequence_ended: {ended}"]
    with pytest.raises(SequenceEnded, match="at step 2: Request timeout expired"):
        await gateway.send(SEVEN, later(4))
    assert await gateway.sequences.unanswered() == []
    await worker.take()
    assert worker.held == {}
    await gateway.send(SEVEN, first(5))
    await worker.work()
    assert gateway.texts[-1] == "=5"


async def test_only_the_owner_and_whoever_needs_no_token_end_a_life(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1), later(2))
    await worker.own()
    await worker.take()
    one, two = worker.waiting
    await worker.commit(one)

    assert not await gateway.sequences.fail(two.place, LATE, two.token + 1)
    assert not await gateway.sequences.fail(one.place, LATE)
    assert await gateway.sequences.fail(two.place, LATE)
    assert not await gateway.sequences.fail(two.place, LATE)


async def test_what_no_worker_came_for_ends_only_where_nobody_owns_it(gateway: Gateway) -> None:
    """A life that a worker executes goes on; one that waits behind it, or for a worker, does not."""
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1))
    await worker.own()
    (behind,) = await gateway.send(SEVEN, first(2))
    (alone,) = await gateway.send(EIGHT, first(3))
    running = StepPlace(SEVEN, 1, 1)

    assert not await gateway.sequences.fail(running, LATE, NOBODYS)
    assert await gateway.sequences.fail(behind.place, LATE, NOBODYS)
    assert await gateway.sequences.fail(alone.place, LATE, NOBODYS)
    await worker.work()
    await gateway.answer_rest()

    assert gateway.texts == ["=1", *[f"{LATE.code}: {LATE.message}"] * 2]


async def test_a_life_that_waits_ends_when_it_would_begin(gateway: Gateway) -> None:
    """The life before it goes on, and the one behind it begins."""
    worker = await Worker(gateway, "w1").join()
    steps = await gateway.send(SEVEN, first(1), first(10), later(20), first(100))

    assert await gateway.sequences.fail(steps[2].place, LATE)
    await worker.work()
    await gateway.answer_rest()

    assert [text.partition(":")[0] for text in gateway.texts] == ["=1", "sequence_ended", LATE.code, "=100"]


# --- numbers (promise 6) ---


async def test_a_repeated_step_gets_the_stored_response(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1, number=1), later(2, number=2))
    await worker.work()
    await worker.leave()

    (again,) = await gateway.send(SEVEN, later(2, number=2))

    assert again.entry is None
    assert await gateway.sequences.response(again.place) == b"=3"
    assert len(worker.executed) == 2


async def test_a_repeated_step_in_flight_waits_for_the_first(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    sent = await gateway.send(SEVEN, first(1, number=1), first(1, number=1), later(2, number=2), later(2, number=2))
    await worker.work()

    assert [submitted.place.number for submitted in sent] == [1, 1, 2, 2]
    assert gateway.texts == ["=1", "=3"]
    assert len(worker.executed) == 2


async def test_a_gap_and_a_step_long_past_are_refused(gateway: Gateway) -> None:
    """A sequence with an owner leaves that to the owner."""
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1, number=1), later(2, number=2))
    with pytest.raises(InvalidRequest, match="step 4 of sequence 7 to model 'sum' leaves a gap: send step 3 first"):
        await gateway.send(SEVEN, later(4, number=4))
    await worker.work()
    await worker.leave()
    with pytest.raises(InvalidRequest, match=r"response to step 1 .* no longer kept: step 2 is committed"):
        await gateway.send(SEVEN, later(1, number=1))
    with pytest.raises(InvalidRequest, match="send step 1 first"):
        await gateway.send(EIGHT, first(4, number=4))


async def test_the_last_step_is_repeated_after_the_end(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1, number=1, end=True))
    await worker.work()

    (again,) = await gateway.send(SEVEN, first(1, number=1, end=True))
    (new,) = await gateway.send(SEVEN, first(2, number=1))

    assert (again.entry, again.place.life, new.place.life) == (None, 1, 2)
    assert await gateway.sequences.response(again.place) == b"=1"


# --- steps without a commit (promise 3) ---


async def test_explicit_steps_need_no_commit_but_the_last_one(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1, explicit=True), later(2), later(3, end=True))
    await worker.own()
    await worker.take()

    for taken in worker.waiting[:2]:
        await worker.answer(taken)
    await worker.work()

    assert gateway.texts == ["=1", "=3", "=6"]
    assert await gateway.sequences.sizes([1]) == (0, 0, 0, 0)


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_life_without_end_is_over_when_its_last_step_is_answered(gateway: Gateway, *, is_early: bool) -> None:
    """Before the next START came, or after it; in whichever order the steps are finished."""
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1, explicit=True), later(2))
    await worker.own()
    await worker.take()
    steps = list(worker.waiting)
    if not is_early:
        await gateway.send(SEVEN, first(10, explicit=True))
    for taken in (steps[1], steps[0]):
        await worker.answer(taken)
    if is_early:
        await gateway.send(SEVEN, first(10, explicit=True))

    await worker.work()

    assert gateway.texts[2] == "=10"
    assert worker.held[SEVEN].owned.life == 2


# --- hand-over (promise 4) ---


async def test_a_drain_gives_sequences_to_others(gateway: Gateway) -> None:
    one, other = await Worker(gateway, "w1").join(), await Worker(gateway, "w2").join()
    await gateway.send(SEVEN, first(1), later(2))
    await gateway.send(EIGHT, first(5, explicit=True))
    await one.own()

    assert await gateway.sequences.hand_over("w1", [SEVEN, EIGHT]) == 2
    await other.work()
    await gateway.answer_rest()

    assert await gateway.sequences.end_lease("w1", [1])
    assert not await gateway.sequences.end_lease("w2", [1])
    assert gateway.texts[:2] == ["=1", "=3"]
    assert gateway.texts[2].startswith("sequence_lost: ")
    assert await gateway.sequences.sizes([1]) == (1, 0, 1, 1)


async def test_counts_that_are_damaged_begin_again(gateway: Gateway) -> None:
    one = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1))
    await one.own()
    name = keys.sequence_counts("sum", 0)
    await gateway.sequences._router.call(keys.slot(name), b"HSET", name.encode(), b"handed_over", b"x", b"lost", b"")

    assert await gateway.sequences.sizes([1]) == (1, 0, 0, 0)
    assert await gateway.sequences.hand_over("w1", [SEVEN]) == 1
    assert await gateway.sequences.sizes([1]) == (1, 1, 1, 0)


async def test_sequences_of_a_dead_worker_go_on_at_others(later_on: Gateway, timed: EmbeddedServer) -> None:
    """What was handed over goes before new sequences; the step that killed its worker is a suspect."""
    one = await Worker(later_on, "w1").join()
    await later_on.send(SEVEN, first(1), later(2), later(3))
    await one.own()
    await one.take()
    await one.commit(one.waiting[0])
    await later_on.send(EIGHT, first(10))

    timed.advance(LEASE_S / 2)
    assert await later_on.sequences.renew("w1", [1], LEASE_S)
    timed.advance(LEASE_S - 1)
    assert await later_on.sequences.reap() == 0
    timed.advance(2.0)
    assert await later_on.sequences.reap() == 1
    other = await Worker(later_on, "w2").join()
    owned = await other.own(1)
    await other.take()

    assert [(each.sequence, each.token, each.committed) for each in owned] == [(SEVEN, 2, 1)]
    deliveries = [taken.lease.deliveries for taken in other.waiting if taken.lease is not None]
    assert deliveries == [1, 2, 1]
    await other.work()
    assert later_on.texts == ["=1", "=3", "=6", "=10"]
    assert not await later_on.sequences.renew("w1", [1], LEASE_S)
    assert await later_on.sequences.take_steps("w1", 1) is None
    assert await later_on.sequences.own("w1", 1, 1) is None


async def test_a_worker_that_comes_back_begins_with_nothing(later_on: Gateway, timed: EmbeddedServer) -> None:
    one = await Worker(later_on, "w1").join()
    await later_on.send(SEVEN, first(1))
    await one.own()
    timed.advance(LEASE_S + 1)

    await later_on.sequences.reap(0)
    again = await Worker(later_on, "w1").join()
    await again.work()

    assert later_on.texts == ["=1"]
    assert [held.owned.token for held in again.held.values()] == [2]


async def test_state_in_memory_is_lost_with_its_worker(later_on: Gateway, timed: EmbeddedServer) -> None:
    """What was committed is answered by its response, never executed in the middle of another life."""
    one, other = await Worker(later_on, "w1").join(), Worker(later_on, "w2")
    await later_on.send(SEVEN, first(1, explicit=True), later(2))
    await one.own()
    await one.take()
    await one.commit(one.waiting[0])

    timed.advance(LEASE_S + 1)
    await other.join()
    await later_on.sequences.reap()
    await other.work()
    await later_on.answer_rest()

    assert later_on.texts[0] == "=1"
    assert later_on.texts[1].startswith("sequence_lost: sequence 7 of model 'sum' was ended at step 2: the worker")
    with pytest.raises(SequenceLost):
        await later_on.send(SEVEN, later(3))
    assert other.executed == []


@pytest.mark.parametrize("is_told", [True, False])
async def test_the_lane_of_a_dead_worker_expires(later_on: Gateway, timed: EmbeddedServer, *, is_told: bool) -> None:
    """Even where it had expired already when a step, or the end of a life, was to be told."""
    worker = await Worker(later_on, "w1").join()
    await later_on.send(SEVEN, first(1, explicit=True))
    await worker.own()
    timed.advance(4 * LEASE_S + 1)
    if is_told:
        await later_on.send(SEVEN, later(2))
    await later_on.sequences.reap()

    one = later_on.sequences
    assert await one._router.call(one._slot, b"PTTL", one._own_lane(1, "w1")) != -1


async def test_an_error_names_the_first_step_without_a_response(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1, explicit=True), later(2))
    await gateway.send(EIGHT, first(1, explicit=True))
    await worker.own()
    await worker.take()
    for taken in (worker.waiting[0], worker.waiting[2]):
        await worker.answer(taken)

    await gateway.sequences.hand_over("w1", [SEVEN, EIGHT])
    await gateway.answer_rest()

    assert "ended at step 2: the worker" in gateway.texts[1]
    with pytest.raises(SequenceLost, match="ended at step 2: the worker"):
        await gateway.send(EIGHT, later(3))


async def test_the_steps_of_a_sequence_that_waits_are_cancelled_together(gateway: Gateway) -> None:
    _, second, _ = await gateway.send(SEVEN, first(1), later(2), later(3))

    assert await gateway.sequences.fail(second.place, LEFT)
    await gateway.answer_rest()

    assert [text.partition(":")[0] for text in gateway.texts] == [LEFT.code] * 3
    with pytest.raises(SequenceEnded, match="ended at step 2: the request was cancelled"):
        await gateway.send(SEVEN, later(4))


async def test_an_owner_is_told_of_a_step_that_is_cancelled(gateway: Gateway) -> None:
    """The worker knows which step executes: the sequence ends when the worker says so."""
    worker = await Worker(gateway, "w1").join()
    _, second = await gateway.send(SEVEN, first(1), later(2))
    await worker.own()
    await worker.take()

    assert not await gateway.sequences.fail(second.place, LEFT)

    (told,) = await worker.take()
    assert (told.place, told.lease, told.what) == (second.place, None, Delivery.CANCEL)
    assert await worker.commit(worker.waiting[0])
    assert await gateway.sequences.fail(second.place, LEFT, told.token)
    assert await gateway.sequences.unanswered() != []


@pytest.mark.parametrize("is_committed", [False, True])
async def test_a_sequence_with_a_cancelled_step_ends_with_its_owner(gateway: Gateway, *, is_committed: bool) -> None:
    """If the owner has committed the step, the sequence goes on."""
    worker = await Worker(gateway, "w1").join()
    (only,) = await gateway.send(SEVEN, first(1))
    await worker.own()
    await worker.take()
    await gateway.sequences.fail(only.place, LEFT)
    if is_committed:
        await worker.commit(worker.waiting[0])

    await gateway.sequences.hand_over("w1", [SEVEN])

    assert (await gateway.sequences.sizes([1])).open == int(is_committed)


async def test_the_first_of_several_cancelled_steps_ends_the_sequence(gateway: Gateway) -> None:
    worker = await Worker(gateway, "w1").join()
    _, second, third = await gateway.send(SEVEN, first(1), later(2), later(3))
    await worker.own()
    await worker.take()
    await gateway.sequences.fail(second.place, LEFT)
    await gateway.sequences.fail(third.place, LEFT)

    await gateway.sequences.hand_over("w1", [SEVEN])
    await Worker(gateway, "w2").join()
    await gateway.sequences.own("w2", 1, 32)
    await gateway.answer_rest()

    with pytest.raises(SequenceEnded, match="ended at step 2: the request was cancelled"):
        await gateway.send(SEVEN, later(4))


async def test_what_nobody_answered_comes_again(later_on: Gateway, timed: EmbeddedServer) -> None:
    """Whoever was to answer died with it; an owner of a committed last step, too."""
    worker = await Worker(later_on, "w1").join()
    await later_on.send(SEVEN, first(1, end=True))
    await later_on.send(EIGHT, first(5), later(6))
    await worker.own()
    await worker.take()
    await worker.commit(worker.waiting[0])
    await later_on.sequences.fail(worker.waiting[1].place, LATE)

    assert len(await later_on.sequences.unanswered()) == 2
    assert await later_on.sequences.unanswered() == []
    timed.advance(11.0)
    await later_on.answer_rest()

    assert [text.partition(":")[0] for text in later_on.texts] == ["=1", LATE.code, "sequence_ended"]
    timed.advance(11.0)
    assert await later_on.sequences.unanswered() == []


# --- time (promises 5 and 8) ---


async def test_what_nobody_owns_ends_at_its_deadline(later_on: Gateway, timed: EmbeddedServer) -> None:
    await later_on.send(SEVEN, first(1), later(2, timeout_s=5.0))
    assert await later_on.sequences.sweep() == 0

    timed.advance(6.0)
    assert await later_on.sequences.sweep() == 1
    await later_on.answer_rest()

    assert later_on.texts == ["deadline_exceeded: timeout of the corresponding sequence has been expired"] * 2
    worker = await Worker(later_on, "w1").join()
    assert await worker.own() == []


async def test_an_idle_sequence_that_nobody_owns_ends_after_a_minute(later_on: Gateway, timed: EmbeddedServer) -> None:
    worker = await Worker(later_on, "w1").join()
    await later_on.send(SEVEN, first(1))
    await worker.work()
    await later_on.sequences.hand_over("w1", [SEVEN])

    timed.advance(30.0)
    assert await later_on.sequences.sweep() == 0
    timed.advance(31.0)
    assert await later_on.sequences.sweep() == 1
    assert (await later_on.sequences.sizes([1]))[:2] == (0, 0)


async def test_the_janitor_hands_over_what_its_owner_has_left(later_on: Gateway, timed: EmbeddedServer) -> None:
    """A second way, should the first one have been interrupted."""
    worker = await Worker(later_on, "w1").join()
    await later_on.send(SEVEN, first(1))
    await worker.own()
    await later_on.sequences._router.call(0, b"ZREM", keys.sequence_owners("sum", 0), "w1")

    timed.advance(61.0)
    await later_on.sequences.sweep()

    other = await Worker(later_on, "w2").join()
    assert [owned.sequence for owned in await other.own()] == [SEVEN]


async def test_an_end_is_forgotten_after_minutes(later_on: Gateway, timed: EmbeddedServer, database: Database) -> None:
    worker = await Worker(later_on, "w1").join()
    await later_on.send(SEVEN, first(1, end=True))
    await worker.work()

    timed.advance(301.0)

    left = {key.decode().partition("}:")[2] for key in await later_on.sequences._router.call(0, b"KEYS", b"*")}
    assert left <= {"sequence-owners", "1:seq", "1:seq~acme", "1:seq@w1", "sequence-lanes"}


# --- Redis that may lose what it has confirmed (promise 7) ---


@pytest.mark.parametrize(
    ("changes", "may_lose"),
    [
        ({}, True),
        ({"durability": "always"}, False),
        ({"durability": "always", "cluster": True}, True),
        ({"durability": "always", "cluster": True, "min_replicas": 1}, False),
        ({"durability": "always", "url": "redis+sentinel://a:1,b:2/queue"}, True),
    ],
)
def test_a_replica_that_lags_may_lose_steps_as_a_late_sync_does(changes: dict[str, Any], *, may_lose: bool) -> None:
    assert ownership.may_lose(RedisSettings.model_validate({"url": "redis://a:1", **changes})) is may_lose


@pytest.mark.parametrize("is_fragile", [True, False])
async def test_a_restart_ends_sequences_where_something_may_be_lost(own_redis: RedisQueue, *, is_fragile: bool) -> None:
    gateway = Gateway(sequences_of(await own_redis.connect(), is_fragile=is_fragile))
    worker = await Worker(gateway, "w1").join(lease_s=600.0)
    await gateway.send(SEVEN, first(1))
    await worker.work()

    own_redis.nodes[0].stop()
    own_redis.nodes[0].start()

    async def has_ended() -> bool:
        try:
            await gateway.send(SEVEN, later(2))
        except SequenceLost:
            return True
        except Exception:  # noqa: BLE001 - not connected yet
            return False
        return not is_fragile

    await eventually(has_ended)
    await worker.work()
    assert gateway.texts == (["=1"] if is_fragile else ["=1", "=3"])
    assert worker.held.keys() == (set() if is_fragile else {SEVEN})


async def explicit_lives(gateway: Gateway) -> Worker:
    """Begins a life behind one that executes; the first is finished by the last call: so the second begins."""
    worker = await Worker(gateway, "w1").join(lease_s=600.0)
    await gateway.send(SEVEN, first(1, explicit=True), later(2))
    await worker.own()
    await worker.take()
    await worker.answer(worker.waiting[0])
    await gateway.send(SEVEN, first(10, explicit=True))
    return worker


async def go_on(worker: Worker) -> None:
    """Answers all steps that there are."""
    await worker.own()
    await worker.take()
    while worker.waiting:
        await worker.answer(worker.waiting[0])
        await worker.own()
        await worker.take()


async def test_a_life_that_begins_behind_another_goes_on_where_redis_may_lose(own_redis: RedisQueue) -> None:
    """Redis was not restarted: START, a step, START of the same id, END."""
    gateway = Gateway(sequences_of(await own_redis.connect(), is_fragile=True))
    worker = await explicit_lives(gateway)
    await go_on(worker)

    await gateway.send(SEVEN, later(20, end=True))
    await go_on(worker)

    assert gateway.texts == ["=1", "=3", "=10", "=30"]


@pytest.mark.parametrize("restarts_before", ["the end of the life before it", "its first step", "its second step"])
async def test_a_restart_ends_a_life_that_waited_behind_another(own_redis: RedisQueue, restarts_before: str) -> None:
    """Steps of both may be lost, so both end; whoever ends the first of them must not call the second one sound."""
    gateway = Gateway(sequences_of(await own_redis.connect(), is_fragile=True))
    worker = await explicit_lives(gateway)
    if restarts_before != "the end of the life before it":
        await worker.answer(worker.waiting[0])
    if restarts_before == "its second step":
        await go_on(worker)
    own_redis.nodes[0].stop()
    own_redis.nodes[0].start()
    await eventually(lambda: is_up(gateway))

    if restarts_before == "the end of the life before it":
        await worker.answer(worker.waiting[0])
    with pytest.raises(SequenceLost, match="Redis was restarted or failed over"):
        await gateway.send(SEVEN, later(20, end=True))
    await go_on(worker)
    assert "=30" not in gateway.texts


async def is_up(gateway: Gateway) -> bool:
    """Tells whether Redis answers again."""
    try:
        await gateway.sequences.sizes([1])
    except BrokerUnavailable:
        return False
    return True


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_life_without_an_era_is_sound_if_redis_has_run_since(
    own_redis: RedisQueue, *, is_restarted: bool
) -> None:
    """Earlier versions wrote such a record where a life began behind another."""
    gateway = Gateway(sequences_of(await own_redis.connect(), is_fragile=True))
    worker = await Worker(gateway, "w1").join(lease_s=600.0)
    call, slot = gateway.sequences._router.call, gateway.sequences._slot

    async def is_old() -> bool:
        """Redis tells its age in whole seconds."""
        return b"uptime_in_seconds:0" not in await call(slot, b"INFO", b"server")

    await eventually(is_old)
    await gateway.send(SEVEN, first(1))
    await worker.work()
    key = keys.sequence("sum", 0, SEVEN.name)
    record = msgspec.msgpack.decode(await call(slot, b"HGET", key, b"of"))
    await call(slot, b"HSET", key, b"of", msgspec.msgpack.encode(record | {"era": ""}))
    if is_restarted:
        own_redis.nodes[0].stop()
        own_redis.nodes[0].start()
        await eventually(lambda: is_up(gateway))

    if is_restarted:
        with pytest.raises(SequenceLost, match="Redis was restarted or failed over"):
            await gateway.send(SEVEN, later(2))
    else:
        await gateway.send(SEVEN, later(2))
        await worker.work()
        assert gateway.texts == ["=1", "=3"]


async def test_a_failover_ends_sequences(own_redis: RedisQueue, tmp_path: Path) -> None:
    """A replica that takes over may lag behind what the primary has confirmed."""
    gateway = Gateway(sequences_of(await own_redis.connect(), is_fragile=True))
    worker = await Worker(gateway, "w1").join(lease_s=600.0)
    await gateway.send(SEVEN, first(1))
    await worker.work()
    (tmp_path / "replica").mkdir()
    primary = ("--replicaof", "127.0.0.1", str(own_redis.nodes[0].port))

    with RedisServer(system_redis(), tmp_path / "replica", *primary) as replica, replica.client() as client:
        wait_until(lambda: b"connected" in client.execute_command("ROLE"))
        client.replicaof("NO", "ONE")
        settings = own_redis.settings.model_copy(update={"url": SecretStr(replica.url)})
        queue = await Queue.connect(settings)
        after = Gateway(sequences_of(queue, is_fragile=True))
        with pytest.raises(SequenceLost, match="Redis was restarted or failed over, and may have lost steps of it"):
            await after.send(SEVEN, later(2))
        await queue.close()
