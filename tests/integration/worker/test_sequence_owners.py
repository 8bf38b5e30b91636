"""Owners of sequences that end, come, and lose their lease: every step runs once in effect, on the right state."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from qinfer.core.settings import LimitSettings
from qinfer.errors import SequenceLost
from qinfer.models.state import GATEWAY
from qinfer.queue import keys
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences import ownership
from qinfer.queue.sequences.answers import answer_rest
from qinfer.queue.sequences.records import SequenceId
from qinfer.tensors import to_numpy
from qinfer.testing import eventually
from tests.support.inline_workers import InlineWorkers, failure, inline_workers, value
from tests.support.sequence_scene import Sequencing
from tests.support.servers.servers import Database


@pytest.fixture
async def sums(scene: InlineWorkers) -> Sequencing:
    """Provides callers of a stub with an implicit state, which no worker serves yet."""
    sequencing = Sequencing(scene)
    await sequencing.model()
    return sequencing


@pytest.fixture
async def explicit(scene: InlineWorkers) -> Sequencing:
    """Provides callers of a stub that would have its state in memory, which no worker serves yet."""
    sequencing = Sequencing(scene, explicit=True)
    await sequencing.model()
    return sequencing


async def owners(sums: Sequencing, ids: range) -> Mapping[int, tuple[str, int]]:
    """Returns the owner of each sequence, and its token."""
    found = {}
    for number in ids:
        key = keys.sequence("stub", 0, SequenceId("", number).name).encode()
        packed = await sums.scene.delivery.router.call(keys.slot(key), b"HGET", key, b"of")
        record = msgspec.msgpack.decode(packed)
        found[number] = record["owner"], record["token"]
    return found


async def is_draining(sums: Sequencing, worker_id: str) -> None:
    """Waits until a worker has said that it drains."""

    async def is_so() -> bool:
        return any(record.draining for record in await sums.scene.store.workers() if record.id == worker_id)

    await eventually(is_so, description=f"{worker_id} draining")


async def lose_lease(sums: Sequencing, worker_id: str) -> None:
    """Ends a worker's lease, as if it had stood still for so long, and hands over what it owns."""
    key = keys.sequence_owners("stub", 0).encode()
    found = await sums.scene.delivery.router.call(keys.slot(key), b"ZRANGE", key, 0, -1)
    (owner,) = [one.decode() for one in found if one.decode().startswith(f"{worker_id}-1-{sums.generation}-")]

    async def is_lost() -> bool:
        await sums.sequences.renew(owner, [1], 0.0)
        return bool(await sums.sequences.reap())

    await eventually(is_lost, description="a hand-over")


# --- drain ---


async def a_gateway_is_live(sums: Sequencing) -> None:
    """Somebody may send further steps."""
    await sums.scene.store.report_liveness(GATEWAY, "g@host", 60.0)


async def test_a_drain_waits_for_the_end_of_a_sequence_whose_state_is_in_memory(explicit: Sequencing) -> None:
    await a_gateway_is_live(explicit)
    await explicit.scene.worker("w1", drain_s=60.0)
    await (await explicit.send(1, start=True))

    ending = asyncio.create_task(explicit.scene.stop("w1"))
    await is_draining(explicit, "w1")
    second = await (await explicit.send(2))
    third = await (await explicit.send(3, end=True))
    await ending

    assert [value(each) for each in (second, third)] == [2, 3]
    assert (await explicit.sequences.sizes([1])).lost == 0


async def test_nobody_waits_for_sequences_once_the_last_gateway_has_ended(explicit: Sequencing) -> None:
    """What was answered stays so; a caller who comes back by a new gateway is told that the sequence is lost."""
    await a_gateway_is_live(explicit)
    await explicit.scene.worker("w1", drain_s=100.0)
    first = await (await explicit.send(1, start=True))
    ending = asyncio.create_task(explicit.scene.stop("w1"))
    await is_draining(explicit, "w1")

    await explicit.scene.store.report_liveness(GATEWAY, "g@host", 0.0)
    async with asyncio.timeout(40.0):  # half of the drain's time is 50 s
        await ending

    assert value(first) == 1
    with pytest.raises(SequenceLost, match="begin it again"):
        await explicit.send(2)


async def test_a_worker_that_drains_owns_no_new_sequence(explicit: Sequencing) -> None:
    await a_gateway_is_live(explicit)
    await explicit.scene.worker("w1", drain_s=60.0)
    await (await explicit.send(1, start=True))
    ending = asyncio.create_task(explicit.scene.stop("w1"))
    await is_draining(explicit, "w1")

    another = await explicit.send(1, 2, start=True)
    await explicit.scene.worker("w2")
    await another
    found = await owners(explicit, range(1, 3))

    assert [owner.partition("-")[0] for owner, _ in found.values()] == ["w1", "w2"]
    await asyncio.gather(await explicit.send(2, end=True), await explicit.send(2, 2, end=True))
    await ending


async def test_a_sequence_whose_state_is_in_memory_is_lost_when_the_drain_has_waited(explicit: Sequencing) -> None:
    """A step behind the one that executes at the end of the wait is answered; a later one is refused."""
    await a_gateway_is_live(explicit)
    worker = await explicit.scene.worker("w1", drain_s=3.0)
    (batcher,) = worker._sequences.batchers()
    await (await explicit.send(1, start=True))
    explicit.scene.hold()
    running, waiting = await explicit.send(2), await explicit.send(3)
    await explicit.scene.started("w1")

    ending = asyncio.create_task(explicit.scene.stop("w1"))
    await eventually(lambda: batcher.paused, description="the end of the wait")
    explicit.scene.go()
    await ending
    await answer_rest(explicit.scene.delivery, explicit.sequences)

    outcomes = [value(await running), failure(await waiting).code]
    assert outcomes == [2, "sequence_lost"]
    assert (await explicit.sequences.sizes([1])).lost == 1


async def test_implicit_sequences_move_while_their_steps_wait_and_execute(sums: Sequencing) -> None:
    """The worker waits for what executes, and for no more: what waits runs at the other one."""
    await sums.scene.worker("w1")
    await sums.scene.worker("w2")
    sums.scene.hold()
    answers = {n: [await sums.send(n, n, start=step == 1, end=step == 9) for step in range(1, 10)] for n in range(1, 9)}
    await sums.scene.started("w1")

    ending = asyncio.create_task(sums.scene.stop("w1"))
    await is_draining(sums, "w1")
    sums.scene.go()
    await ending

    found = {n: [value(each) for each in await asyncio.gather(*of)] for n, of in answers.items()}
    assert found == {n: [n * step for step in range(1, 10)] for n in answers}
    assert [len(sums.scene.responses[r]) for r in sums.scene.responses] == [1] * 72


# --- workers that come ---


async def test_a_worker_that_comes_takes_no_sequence_from_another(sums: Sequencing) -> None:
    """All keep owner and token, until one ends."""
    ids = range(1, 15)
    await sums.scene.worker("w1")
    await sums.scene.worker("w2")
    await asyncio.gather(*[await sums.send(1, n, start=True) for n in ids])
    before = await owners(sums, ids)

    await sums.scene.worker("w3")
    await asyncio.gather(*[await sums.send(1, n) for n in ids])
    joined = await owners(sums, ids)
    await sums.scene.stop("w1")
    last = await asyncio.gather(*[await sums.send(1, n) for n in ids])
    left = await owners(sums, ids)

    moved = {n for n, (owner, _) in before.items() if owner.startswith("w1-")}
    assert 0 < len(moved) < len(ids)
    assert joined == before
    assert {n for n in ids if left[n] != before[n]} == moved
    assert {left[n][1] - before[n][1] for n in moved} == {1}
    assert [value(each) for each in last] == [3] * len(ids)


# --- leases that are lost ---


async def test_a_worker_that_has_lost_its_lease_owns_its_sequences_anew(sums: Sequencing) -> None:
    ids = range(1, 9)
    await sums.scene.worker()
    await asyncio.gather(*[await sums.send(n, n, start=True) for n in ids])
    before = await owners(sums, ids)

    await lose_lease(sums, "w1")
    second = await asyncio.gather(*[await sums.send(n, n) for n in ids])
    third = await asyncio.gather(*[await sums.send(n, n, end=True) for n in ids])

    assert [value(each) for each in second] == [2 * n for n in ids]
    assert [value(each) for each in third] == [3 * n for n in ids]
    assert {token for _, token in before.values()} == {1}
    assert {token for _, token in (await owners_of_ended(sums, ids)).values()} == {2}


async def owners_of_ended(sums: Sequencing, ids: range) -> Mapping[int, tuple[str, int]]:
    """Returns the last tokens of sequences that have ended, once all have."""

    async def have_ended() -> bool:
        return (await sums.sequences.sizes([1])).open == 0

    await eventually(have_ended, description="the end of all sequences")
    return await owners(sums, ids)


async def test_what_executes_while_the_lease_is_lost_counts_once(sums: Sequencing) -> None:
    """It is executed again, from the state that was committed, and answered once."""
    await sums.scene.worker()
    assert value(await (await sums.send(1, start=True))) == 1
    sums.scene.hold()
    second, third = await sums.send(2), await sums.send(3)
    await sums.scene.started()

    await lose_lease(sums, "w1")
    sums.scene.go()
    responses = [await second, await third]

    assert [value(each) for each in responses] == [3, 6]
    assert value(await (await sums.send(4, end=True))) == 10
    assert {len(each) for each in sums.scene.responses.values()} == {1}


async def test_another_worker_goes_on_with_what_a_worker_has_lost(sums: Sequencing) -> None:
    """The one whose execution hangs meanwhile commits nothing, and serves new sequences afterwards."""
    await sums.scene.worker("w1")
    assert value(await (await sums.send(1, start=True))) == 1
    sums.scene.hold()
    second = await sums.send(2)
    await sums.scene.started("w1")
    await sums.scene.worker("w2", ready=False)
    await sums.scene.ready("w2")

    await lose_lease(sums, "w1")

    assert value(await second) == 3
    sums.scene.go()
    assert value(await (await sums.send(3))) == 6
    await sums.scene.stop("w2")
    assert value(await (await sums.send(4, end=True))) == 10
    assert await sums.sum(5, 6, correlation_id=2) == [5, 11]


async def test_a_step_whose_workers_die_again_and_again_is_given_up(sums: Sequencing) -> None:
    """Its sequence ends with it; others are not harmed."""
    for name in ("w1", "w2", "w3"):
        await sums.scene.worker(name, lease_s=1.0, max_deliveries=2)
    assert value(await (await sums.send(1, start=True))) == 1
    assert value(await (await sums.send(1, 2, start=True))) == 1
    sums.scene.hold()
    bad, behind = await sums.send(2), await sums.send(3)
    for _ in range(2):
        name = await executing_owner(sums)
        sums.scene.forget_started()
        await sums.scene.kill(name)
        await eventually(lambda: handed_over(sums), description="a hand-over")

    failures = [failure(await each) for each in (bad, behind)]
    sums.scene.go()

    assert "the request was given up: 2 executions did not end" in failures[0].message
    assert "was ended at step 2" in failures[1].message
    assert value(await (await sums.send(2, 2))) == 3


async def executing_owner(sums: Sequencing) -> str:
    """Waits until the worker that owns sequence 1 executes a step; returns its name."""
    names = [""]

    async def is_executing() -> bool:
        names[0] = (await owners(sums, range(1, 2)))[1][0].partition("-")[0]
        return any(backend.started.acquire(blocking=False) for backend in sums.scene.backends.get(names[0], ()))

    await eventually(is_executing, description="an execution in the owner")
    return names[0]


async def handed_over(sums: Sequencing) -> bool:
    """Hands over what dead workers owned, as janitors do; tells whether anything was."""
    return bool(await sums.sequences.reap())


# --- states ---


@asynccontextmanager
async def object_scene(directory: Path) -> AsyncIterator[InlineWorkers]:
    """Workers whose large values go to a directory: those of more than 100 bytes."""
    limits = LimitSettings(payload_url=directory.as_uri(), payload_url_min_bytes=100)
    async with Database() as database:
        queue = await Queue.connect(database.settings, limits, clock=database.server.clock)
        async with inline_workers(queue, database.store()) as scene:
            scene.limits = limits
            yield scene
        await queue.close()


async def test_a_state_in_an_object_store_goes_through_a_hand_over(tmp_path: Path) -> None:
    """It is replaced with each step, and deleted at the end, as are the responses."""

    def objects() -> int:
        return sum(path.is_file() for path in tmp_path.rglob("*"))

    async with object_scene(tmp_path) as scene:
        sums = Sequencing(scene, width=100)
        await sums.model(dims=100)
        await scene.worker("w1")
        first = [value(await (await sums.send(1, start=True))), value(await (await sums.send(2)))]
        stored = objects()
        await scene.worker("w2")
        await scene.stop("w1")
        last = await (await sums.send(3)), await (await sums.send(4, end=True))

        assert first == [1, 3]
        assert stored >= 2  # the state, and a response
        assert [to_numpy(each.outputs[0]).ravel().tolist() for each in last] == [[6.0] * 100, [10.0] * 100]
        assert await sums.sequences.state(SequenceId("", 1)) is None


async def test_a_state_that_is_too_large_ends_its_sequence(sums: Sequencing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "MAX_STATE_BYTES", 20)
    await sums.scene.worker()

    first, second = await sums.send(1, start=True), await sums.send(2)
    failures = [failure(await each) for each in (first, second)]

    assert failures[0].code == "payload_too_large"
    assert "the state of a sequence has" in failures[0].message
    assert "was ended at step 1" in failures[1].message
    monkeypatch.undo()
    assert await sums.sum(1, 2) == [1, 3]


async def test_states_of_variable_dims_grow_and_shrink_with_their_sequence(scene: InlineWorkers) -> None:
    """Sequences with states of different shapes share a worker, and no batch; a hand-over keeps the shape."""
    narrow, wide = Sequencing(scene, width=2), Sequencing(scene, width=5)
    await narrow.model(dims=-1)
    wide.generation = narrow.generation
    await scene.worker("w1")

    async def step(number: int, *, end: bool = False) -> list[list[float]]:
        start = number == 1
        of = ((narrow, 1), (wide, 2), (narrow, 3))
        answers = [await sums.send(number, correlation_id, start=start, end=end) for sums, correlation_id in of]
        return [to_numpy(each.outputs[0]).ravel().tolist() for each in await asyncio.gather(*answers)]

    outputs = [await step(1), await step(2)]
    await scene.worker("w2")
    await scene.stop("w1")
    outputs.append(await step(3, end=True))

    assert outputs == [[[total] * 2, [total] * 5, [total] * 2] for total in (1.0, 3.0, 6.0)]
