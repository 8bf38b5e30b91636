"""Steps of explicit sequences in the lane of their owner: it numbers them, refuses them, and ends their lives."""

import asyncio
from typing import Any

import msgspec
import pytest

from qinfer.batching.sequences.batcher import SequenceBatcher
from qinfer.core.messages import Failure
from qinfer.errors import LEFT, BrokerUnavailable, Cancelled, InvalidRequest, QueueFull, SequenceEnded, SequenceLost
from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import answer_lost, answer_rest
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import (
    DeliveredSteps,
    OwnedLife,
    SequenceId,
    SubmitLimits,
    SubmittedStep,
    UnansweredStep,
)
from qinfer.testing import eventually
from tests.support.inline_workers import InlineWorkers, failure, value
from tests.support.sequence_scene import Sequencing, entry_of

ONE = SequenceId("", 1)


@pytest.fixture
async def sums(scene: InlineWorkers) -> Sequencing:
    """Provides callers of a stub that would have its state in memory, served by `w1`."""
    sequencing = Sequencing(scene, explicit=True, idle_s=60.0)
    await sequencing.model()
    await scene.worker("w1", lease_s=2.0)
    return sequencing


async def begin(sums: Sequencing, *, numbered: bool = False) -> None:
    """Executes two steps, after which the gateway knows the owner."""
    for number in (1, 2):
        answer = await sums.send(number, start=number == 1, step=number if numbered else 0)
        assert value(await answer) == number


def lane_of(submitted: SubmittedStep) -> Lane:
    """Returns the lane of an appended step."""
    return entry_of(submitted).lane


async def call(sums: Sequencing, *words: object) -> object:
    """Asks Redis."""
    return await sums.scene.delivery.router.call(keys.slot(keys.sequences("stub", 0)), *words)


async def record_of(sums: Sequencing) -> object:
    """Returns the record."""
    return await call(sums, b"HGETALL", keys.sequence("stub", 0, ONE.name))


def other_gateway(sums: Sequencing) -> Sequencing:
    """Returns callers of another gateway, which has not seen the sequence yet."""
    queue = sums.scene.delivery

    class Elsewhere(Sequencing):
        @property
        def sequences(self) -> Sequences:
            return of_other

    of_other = Sequences(
        queue.router, queue._values, queue.durability, "stub", is_fragile=bool(sums.sequences._begin[1])
    )
    return Elsewhere(sums.scene, explicit=True, generation=sums.generation)


async def test_a_step_is_an_entry_of_the_owners_lane_and_changes_no_record(sums: Sequencing) -> None:
    await begin(sums)
    before = await record_of(sums)

    answers = [value(await (await sums.send(number))) for number in (3, 4, 5)]

    lane = lane_of(sums.submitted[-1])
    assert answers == [3, 4, 5]
    assert lane.name.startswith(f"seq@w1-1-{sums.generation}-")
    assert await record_of(sums) == before
    assert await call(sums, b"XLEN", keys.lane(lane)) == 0


async def test_steps_that_are_sent_without_waiting_are_executed_in_order(sums: Sequencing) -> None:
    await begin(sums)
    sums.scene.hold()
    answers = [await sums.send(number, end=number == 8) for number in range(3, 9)]
    sums.scene.go()

    assert [value(await answer) for answer in answers] == list(range(3, 9))


async def test_a_large_step_finds_its_tensors(sums: Sequencing) -> None:
    await begin(sums)

    assert value(await (await sums.send(3, apart=True))) == 3
    assert value(await (await sums.send(4))) == 4
    assert await call(sums, b"KEYS", b"*payload*") == []


async def test_the_owner_refuses_gaps_and_steps_after_the_end_and_answers_repeated_ones(sums: Sequencing) -> None:
    await begin(sums, numbered=True)

    gap = failure(await (await sums.send(9, step=4)))
    third = await (await sums.send(3, step=3))
    again = await (await sums.send(3, step=3))
    fourth = await (await sums.send(4, step=4))
    old = failure(await (await sums.send(3, step=3)))
    sums.scene.hold()
    end, behind = await sums.send(5, step=5, end=True), await other_gateway(sums).send(6)
    sums.scene.go()

    assert "leaves a gap: send step 3 first" in gap.message
    assert [value(answer) for answer in (third, again, fourth, await end)] == [3, 3, 4, 5]
    assert "is no longer kept: step 4 is committed" in old.message
    assert "must specify the START flag" in failure(await behind).message


async def test_a_repeated_step_waits_for_the_first_of_its_number(sums: Sequencing) -> None:
    await begin(sums, numbered=True)
    sums.scene.hold()
    answers = [await sums.send(3, step=3) for _ in range(3)]
    sums.scene.go()

    assert [value(await answer) for answer in answers] == [3, 3, 3]


async def test_the_owner_refuses_a_step_behind_too_many(sums: Sequencing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that knows the owner appends the step, so that only the owner can count."""
    await begin(sums)
    beside = other_gateway(sums)
    assert value(await (await beside.send(3))) == 3
    sums.scene.hold()
    monkeypatch.setattr(Sequences.submit, "__defaults__", (SubmitLimits(steps=2),))
    waiting = [await sums.send(number) for number in (4, 5)]
    refused = await beside.send(6)
    await eventually(refused.done, description="a refusal")
    sums.scene.go()

    assert "too many steps" in failure(await refused).message
    assert [value(await answer) for answer in waiting] == [4, 5]


async def test_a_start_lets_earlier_steps_finish_and_takes_later_ones_along(sums: Sequencing) -> None:
    """Steps of another gateway, which knows the former owner's lane, go on to the new life in their order."""
    await begin(sums)
    beside = other_gateway(sums)
    assert value(await (await beside.send(3))) == 3
    sums.scene.hold()
    before = await sums.send(4)
    start = await sums.send(5, start=True)
    after = [await beside.send(number, end=number == 8) for number in (6, 7, 8)]
    sums.scene.go()

    assert value(await before) == 4
    assert value(await start) == 5
    assert [value(await answer) for answer in after] == [6, 7, 8]


async def test_a_start_after_the_end_is_another_life_at_a_gateway_that_knows_the_old_owner(sums: Sequencing) -> None:
    await begin(sums)
    beside = other_gateway(sums)
    assert value(await (await beside.send(3))) == 3
    assert value(await (await sums.send(4, end=True))) == 4
    assert value(await (await sums.send(5, start=True))) == 5

    assert value(await (await beside.send(6))) == 6
    assert value(await (await beside.send(7, end=True))) == 7


async def test_a_step_that_is_not_read_yet_keeps_an_idle_sequence(sums: Sequencing) -> None:
    await sums.scene.stop("w1")
    await sums.sequences.join("w2", [1], 60.0)
    await sums.send(1, start=True)
    (owned,) = await sums.sequences.own("w2", 1, 1) or []
    first = await sums.sequences.take_steps("w2", 1)
    assert first is not None
    (start,) = first.taken
    assert start.lease is not None
    await sums.sequences.finish([(start.place, start.lease.entry)])
    await sums.send(2)

    is_over = [await sums.sequences.end_idle(start.place, owned.token, first.ticket)]
    second = await sums.sequences.take_steps("w2", 1, first.ticket)
    assert second is not None
    is_over.append(await sums.sequences.end_idle(start.place, owned.token, second.ticket))

    assert is_over == [False, True]


async def test_an_idle_sequence_ends(scene: InlineWorkers) -> None:
    sums = Sequencing(scene, explicit=True, idle_s=0.3)
    await sums.model()
    await scene.worker("w1")
    await begin(sums)

    async def is_over() -> bool:
        return (await sums.sequences.sizes([1])).open == 0

    await eventually(is_over, description="the end of the idle sequence")
    assert "must specify the START flag" in failure(await (await sums.send(3))).message
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        await other_gateway(sums).send(3)


async def test_a_cancelled_waiting_step_ends_its_sequence(scene: InlineWorkers) -> None:
    sums = Sequencing(scene, explicit=True)
    await sums.model()
    worker = await scene.worker("w1")
    (batcher,) = worker._sequences.batchers()
    assert isinstance(batcher, SequenceBatcher)
    await begin(sums)
    sums.scene.hold()
    running, cancelled, behind = [await sums.send(number) for number in (3, 4, 5)]
    await sums.scene.started("w1")
    submitted = sums.submitted[-2]

    await sums.sequences.cancel(submitted.place, entry_of(submitted), Failure.from_error(Cancelled(LEFT)))
    await eventually(lambda: not batcher.waiting, description="the word of the cancelled step")
    third = await sums.send(6)
    sums.scene.go()

    assert value(await running) == 3
    assert failure(await third).code == "cancelled"
    assert [failure(await each).code for each in (cancelled, behind)] == ["cancelled", "cancelled"]


async def test_an_append_to_a_dead_owner_fails_and_what_it_left_is_answered(sums: Sequencing) -> None:
    await begin(sums)
    sums.scene.hold()
    running, waiting = await sums.send(3), await sums.send(4)
    await sums.scene.started("w1")
    await sums.scene.kill("w1")
    sums.scene.go()
    unread = await sums.send(5)

    async def is_lost() -> bool:
        await sums.sequences.reap()
        return (await sums.sequences.sizes([1])).lost == 1

    await eventually(is_lost, description="the end of the lease")
    with pytest.raises(SequenceLost, match="begin it again"):
        await sums.send(6)
    await answer_rest(sums.scene.delivery, sums.sequences)

    assert [failure(await each).code for each in (running, waiting, unread)] == ["sequence_lost"] * 3
    assert await call(sums, b"KEYS", b"*closed*") == []


async def test_lanes_of_one_name_that_are_closed_in_one_millisecond_keep_their_steps(sums: Sequencing) -> None:
    lanes, lane = keys.sequence_lanes("stub", 0), keys.prefix("stub", 0) + "1:seq@again"
    await sums.sequences.end_lease("again", [1])
    step = (b"XADD", lane, b"*", b"s", ONE.name, b"l", b"1", b"f", b"frame")

    await asyncio.gather(
        *(
            work
            for _ in range(100)
            for work in (
                call(sums, b"SADD", lanes, b"1:seq@again"),
                call(sums, *step),
                sums.sequences.end_lease("again", [1]),
            )
        )
    )

    assert await call(sums, b"SCARD", keys.sequence_closed("stub", 0)) == 100
    left = await sums.sequences.unanswered(200)
    assert len({each.entry for each in left}) == 100


async def test_a_committed_end_gets_its_response_after_the_owner_has_died(
    sums: Sequencing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner may die between the commit of END and its response, which is stored."""
    await begin(sums)
    publish = Queue.publish

    async def lost(*_: object) -> bool:
        await asyncio.get_running_loop().create_future()
        return False

    monkeypatch.setattr(Queue, "publish", lost)
    end = await sums.send(3, end=True)

    async def is_over() -> bool:
        return (await sums.sequences.sizes([1])).open == 0

    await eventually(is_over, description="the commit of the last step")
    await sums.scene.kill("w1")
    monkeypatch.setattr(Queue, "publish", publish)

    async def is_answered() -> bool:
        await sums.sequences.reap()
        await answer_rest(sums.scene.delivery, sums.sequences)
        return end.done()

    await eventually(is_answered, description="the stored response")
    assert value(await end) == 3


async def test_a_step_is_executed_once_though_the_reply_to_a_read_of_its_lane_is_lost(
    sums: Sequencing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner reads on behind the steps that it has: unnumbered ones would get other numbers, and run again."""
    take, read = Sequences.take_steps, list[DeliveredSteps]()

    async def lossy(*words: Any, **more: Any) -> DeliveredSteps | None:
        news = await take(*words, **more)
        if news is not None and news.taken:
            read.append(news)
            if len(read) == 1:
                raise BrokerUnavailable("the connection broke")
        return news

    assert value(await (await sums.send(1, start=True))) == 1
    sums.scene.hold()
    second = await sums.send(2)
    await sums.scene.started("w1")
    monkeypatch.setattr(Sequences, "take_steps", lossy)
    third = await sums.send(3)
    await eventually(lambda: len(read) == 2, description="another read")
    sums.scene.go()

    assert [value(await answer) for answer in (second, third)] == [2, 3]
    assert value(await (await sums.send(4, end=True))) == 4
    assert sum(sum(backend.sizes) for backend in sums.scene.backends["w1"]) == 3


async def test_a_worker_that_owns_a_life_unknowingly_ends_it(sums: Sequencing) -> None:
    """If the reply that gave the life was lost, no step may go round in the lane for ever."""
    await sums.scene.stop("w1")
    await sums.sequences.join("w2", [1], 60.0)
    await sums.send(1, start=True)
    assert len(await sums.sequences.own("w2", 1, 1) or []) == 1
    step = await sums.send(2)
    news = await sums.sequences.take_steps("w2", 1)
    assert news is not None
    taken = news.taken[-1]
    assert taken.lease is not None

    unknown = UnansweredStep(taken.place, taken.lease.entry, taken.lease.frame, None)
    await answer_lost(sums.scene.delivery, sums.sequences, unknown, taken.token)

    assert failure(await step).code == "sequence_lost"


async def test_steps_for_an_owner_that_does_not_number_them_go_by_tickets(sums: Sequencing) -> None:
    """Workers of earlier versions take only tickets."""
    await sums.scene.stop("w1")
    await sums.sequences.join("old", [1], 60.0)
    await sums.send(1, start=True)
    await sums.sequences.own("old", 1, 1)
    key = keys.sequence("stub", 0, ONE.name)
    packed = await call(sums, b"HGET", key, b"of")
    assert isinstance(packed, bytes)
    record = msgspec.msgpack.decode(packed)
    await call(sums, b"HSET", key, b"of", msgspec.msgpack.encode(record | {"direct": 0}))

    await sums.send(2)
    await sums.send(3)
    news = await sums.sequences.take_steps("old", 1)

    assert news is not None
    assert [(taken.place.number, taken.what.value) for taken in news.taken] == [(n, "ticket") for n in (1, 2, 3)]


async def test_a_restart_of_redis_that_may_lose_steps_ends_lives_in_memory(scene: InlineWorkers) -> None:
    """An owner that sees another era executes no further step."""
    sums = Sequencing(scene, explicit=True)
    await sums.model()
    worker = await scene.worker("w1")
    service_of = worker._sequences._services
    await begin(sums)
    (service,) = service_of.values()
    service._era = b"another"

    answer = await sums.send(3)

    assert failure(await answer).code == "sequence_lost"
    with pytest.raises((SequenceEnded, SequenceLost)):
        await other_gateway(sums).send(4)


async def test_an_owner_reads_its_lane_anew_after_a_restart_of_redis(scene: InlineWorkers) -> None:
    """Entries of a Redis that has lost some may have lower ids than the last one that was read."""
    sums = Sequencing(scene, explicit=True)
    await sums.model()
    worker = await scene.worker("w1")
    await begin(sums)
    (service,) = worker._sequences._services.values()
    service._era, service._ticket = b"another", f"{2**53}-0"

    answer = await sums.send(1, 2, start=True)
    await eventually(answer.done, description="an answer")

    assert value(await answer) == 1


async def test_a_restart_before_the_first_read_of_the_lane_ends_the_life(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script that gave the worker its life ran in another era."""
    sums = Sequencing(scene, explicit=True)
    own = Sequences.own

    async def own_before(*words: Any, **more: Any) -> list[OwnedLife] | None:
        owned = await own(*words, **more)
        return owned and [msgspec.structs.replace(each, era=b"another") for each in owned]

    monkeypatch.setattr(Sequences, "own", own_before)
    await sums.model()
    await scene.worker("w1")

    assert failure(await (await sums.send(1, start=True))).code == "sequence_lost"


async def test_a_lane_that_is_not_read_is_full(sums: Sequencing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway asks after as many steps as may wait."""
    await sums.scene.stop("w1")
    await sums.sequences.join("w2", [1], 60.0)
    await sums.send(1, start=True)
    assert len(await sums.sequences.own("w2", 1, 1) or []) == 1
    monkeypatch.setattr(Sequences.submit, "__defaults__", (SubmitLimits(steps=5),))

    async def flood() -> None:
        for number in range(2, 20):
            await sums.send(number)

    with pytest.raises(QueueFull, match="too many steps"):
        await flood()
    assert 5 <= len(sums.submitted) <= 10


@pytest.mark.parametrize("numbered", [False, True])
async def test_an_equal_start_behind_another_step_begins_a_life(sums: Sequencing, *, numbered: bool) -> None:
    """The content tells a repeated START only while no step follows it, committed or not."""
    assert value(await (await sums.send(1, start=True, step=1))) == 1
    assert value(await (await sums.send(1, start=True, step=1))) == 1
    sums.scene.hold()
    second = await sums.send(2, step=2 if numbered else 0)
    again = await sums.send(1, start=True, step=1)
    sums.scene.go()

    assert [value(await answer) for answer in (second, again)] == [2, 1]
    assert sums.submitted[-1].place.life == 2


async def test_a_step_for_a_later_life_in_a_dead_owners_lane_may_be_repeated(sums: Sequencing) -> None:
    """A closed lane does not tell whose steps those of a gateway are that knew the owner of the life before."""
    await begin(sums)
    beside = other_gateway(sums)
    assert value(await (await beside.send(3))) == 3
    assert value(await (await sums.send(4, end=True))) == 4
    await sums.scene.kill("w1")
    await sums.scene.worker("w2", lease_s=60.0)
    assert value(await (await sums.send(5, start=True))) == 5
    step = await beside.send(6)

    async def is_answered() -> bool:
        await sums.sequences.reap()
        await answer_rest(sums.scene.delivery, sums.sequences)
        return step.done()

    await eventually(is_answered, description="the end of the lease")
    assert failure(await step).code == "sequence_lost"
