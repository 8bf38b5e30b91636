"""Steps in the lanes of owners that died or left (promise 9 of `qinfer.queue.sequences.ownership`), on each server."""

from typing import Any

import msgspec
import pytest

from qinfer.core.messages import Failure
from qinfer.queue.router import run_each
from qinfer.queue.sequences import ownership
from qinfer.queue.sequences.records import CommittedStep, SequenceId, StepPlace, StepRequest, done_name
from qinfer.testing import EmbeddedServer
from tests.contract.conftest import RedisQueue
from tests.support.sequences import EIGHT, LEASE_S, SEVEN, Gateway, Worker, first, later, sequences_of
from tests.support.servers.servers import Database

LATE = Failure("deadline_exceeded", "Request timeout expired")


@pytest.fixture
async def gateway(queue: RedisQueue) -> Gateway:
    """A gateway on each kind of server."""
    return Gateway(sequences_of(await queue.connect()))


@pytest.fixture
async def later_on(timed: EmbeddedServer, database: Database) -> Gateway:
    """A gateway on a server whose time moves."""
    return Gateway(sequences_of(await database.delivery()))


async def begun(gateway: Gateway, *more: StepRequest) -> Worker:
    """Has a worker own a sequence that waits for it, of which it has executed the first two steps; sends more."""
    worker = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1), later(2))
    await worker.work()
    await gateway.send(SEVEN, *more)
    await worker.take()
    return worker


async def test_the_next_owner_executes_what_is_in_the_lane_of_the_one_before(gateway: Gateway) -> None:
    """In the order in which it was sent: to the first owner, by script, and to the next owner."""
    one = await begun(gateway, later(3), later(4))
    await one.commit(one.waiting[0])
    await one.leave()
    await gateway.send(SEVEN, later(5))
    other = await Worker(gateway, "w2").join()
    await other.own()
    await gateway.send(SEVEN, later(6, end=True))

    await other.work()

    assert gateway.texts == ["=1", "=3", "=6", "=10", "=15", "=21"]
    assert [place.number for place in other.executed] == [4, 5, 6]
    assert await gateway.sequences.sizes([1]) == (0, 0, 1, 0)


async def test_steps_before_the_first_owner_go_before_those_in_its_lane(gateway: Gateway) -> None:
    one = await Worker(gateway, "w1").join()
    await gateway.send(SEVEN, first(1), later(2))
    await one.own()
    await gateway.send(SEVEN, later(3), later(4))
    await one.leave()
    await gateway.send(SEVEN, later(5))
    two = await Worker(gateway, "w2").join()
    await two.own()
    await gateway.send(SEVEN, later(6))
    await two.leave()
    other = await Worker(gateway, "w3").join()

    await other.work()

    assert gateway.texts == ["=1", "=3", "=6", "=10", "=15", "=21"]


async def test_another_version_that_owns_new_sequences_hides_no_closed_lane(gateway: Gateway) -> None:
    """The services of a process share what was read in closed lanes; new sequences have none there."""
    one = await begun(gateway, later(3))
    await one.leave()
    other, newer = await Worker(gateway, "w2").join(), await Worker(gateway, "w3", version=2).join()
    await gateway.send(EIGHT, first(1, version=2))

    (owned,) = await gateway.sequences.own(other.name, 1, 1) or []
    await newer.own()
    left = await gateway.sequences.left_steps(other.name, owned)

    assert [step.lease.frame for step in left if step.lease is not None] == [b"3"]


async def test_a_response_that_was_not_published_is_published_by_the_next_owner(gateway: Gateway) -> None:
    """Also if its former owner finishes the step after its lane was closed."""
    one = await begun(gateway, later(3), later(4))
    third, fourth = one.waiting
    await one.commit(third)
    await one.commit(fourth)
    await gateway.sequences.close_lanes("w1", [1])
    await one.finish(fourth)
    await one.leave()
    other = await Worker(gateway, "w2").join()

    await other.work()

    assert gateway.texts == ["=1", "=3", "=6", "=10"]
    assert other.executed == []
    assert other.held[SEVEN].total == 10


async def test_only_the_first_step_of_a_dead_owner_is_a_suspect(later_on: Gateway, timed: EmbeddedServer) -> None:
    """Deaths while nothing waits do not count."""
    await begun(later_on)
    names = iter(["w2", "w3", "w4"])
    for _ in range(2):
        timed.advance(LEASE_S + 1)
        await later_on.sequences.reap()
        worker = await Worker(later_on, next(names)).join()
        await worker.work()
    await later_on.send(SEVEN, later(3), later(4))
    timed.advance(LEASE_S + 1)
    await later_on.sequences.reap()
    last = await Worker(later_on, next(names)).join()
    await last.own()

    leases = [taken.lease for taken in last.waiting if taken.lease is not None]
    assert [(lease.deliveries, lease.suspect) for lease in leases] == [(2, True), (1, False)]
    await last.work()
    assert later_on.texts == ["=1", "=3", "=6", "=10"]


async def test_janitors_answer_a_closed_lane_only_of_lives_that_are_over(gateway: Gateway) -> None:
    one = await begun(gateway, later(3))
    await one.leave()

    assert await gateway.sequences.unanswered() == []
    assert await gateway.sequences.fail(StepPlace(SEVEN, 1, 3), LATE)
    (left,) = await gateway.sequences.unanswered()
    assert left.place == StepPlace(SEVEN, 1, 0)
    assert left.entry.lane.name.startswith("closed:1:seq@w1:")


async def test_a_worker_that_left_gets_no_steps_of_gateways_that_knew_it(gateway: Gateway) -> None:
    """The next step of such a gateway finds no lane, and goes by script."""
    one = await begun(gateway)
    await one.leave()
    other = await Worker(gateway, "w2").join()

    (sent,) = await gateway.send(SEVEN, later(3))
    await other.work()

    assert sent.entry is not None
    assert sent.entry.lane.name.startswith("steps:")
    assert gateway.texts == ["=1", "=3", "=6"]


async def test_a_commit_has_bounded_bytes(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps beyond the bound are committed by another script."""
    calls = 0
    each = run_each

    async def counted(*words: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        return await each(*words, **more)

    worker = await Worker(gateway, "w1").join()
    ids = [SequenceId("acme", n) for n in range(1, 6)]
    for one in ids:
        await gateway.send(one, first(1))
    await worker.own()
    await worker.take()
    monkeypatch.setattr(ownership, "_MOST_BYTES", 25)
    monkeypatch.setattr(ownership, "run_each", counted)
    steps = [
        CommittedStep(place=taken.place, token=taken.token, response=b"x" * 10, state=b"") for taken in worker.waiting
    ]

    assert await gateway.sequences.commit(steps) == [True] * 5
    assert calls == 3


async def test_a_step_with_the_id_of_one_in_another_stream_is_another_step(gateway: Gateway) -> None:
    """Ids are instants: a step in a lane, and one that came by script in the same millisecond, may have equal ones."""
    one = await begun(gateway, later(3))
    (third,) = one.waiting
    assert third.lease is not None
    await one.commit(third)  # it is not finished
    await one.leave()
    (sent,) = await gateway.send(SEVEN, later(4))
    assert sent.entry is not None
    twin = msgspec.structs.replace(sent.entry, entry_id=third.lease.entry.entry_id)

    (owned,) = await (other := await Worker(gateway, "w2").join()).own()

    assert done_name(third.lease.entry) in owned.done
    assert done_name(twin) not in owned.done
    await other.work()
    assert gateway.texts == ["=1", "=3", "=6", "=10"]
