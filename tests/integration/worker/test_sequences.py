"""Sequences in workers, on a real Redis: states go from step to step, and outlive their worker."""

import asyncio

import pytest

from qinfer.errors import BrokerUnavailable
from qinfer.queue.sequences.answers import answer_rest
from qinfer.queue.sequences.records import SequenceId
from qinfer.testing import eventually
from qinfer_workers.inference import models
from tests.support.inline_workers import InlineWorkers, value
from tests.support.sequence_scene import Sequencing


@pytest.fixture
async def sums(scene: InlineWorkers) -> Sequencing:
    """Provides callers of a stub with an implicit state, which no worker serves yet."""
    sequencing = Sequencing(scene)
    await sequencing.model()
    return sequencing


async def test_a_sequence_gets_its_state_from_step_to_step(sums: Sequencing) -> None:
    await sums.scene.worker()

    assert await sums.sum(1, 2, 3) == [1, 3, 6]


async def test_steps_that_were_sent_before_a_worker_came_run_in_order(sums: Sequencing) -> None:
    answers = [await sums.send(n, start=n == 1, end=n == 5) for n in range(1, 6)]
    await sums.scene.worker()

    assert [value(a) for a in await asyncio.gather(*answers)] == [1, 3, 6, 10, 15]


async def test_sequences_share_batches_and_not_states(sums: Sequencing) -> None:
    await sums.scene.worker()

    sums_of = await asyncio.gather(*[sums.sum(*[n] * 4, correlation_id=n) for n in range(1, 30)])

    assert sums_of == [[n, 2 * n, 3 * n, 4 * n] for n in range(1, 30)]


async def test_a_sequence_goes_on_at_another_worker_when_its_own_drains(sums: Sequencing) -> None:
    await sums.scene.worker("w1")
    assert value(await (await sums.send(1, start=True))) == 1
    await sums.scene.worker("w2")

    await sums.scene.stop("w1")

    assert value(await (await sums.send(2))) == 3
    assert value(await (await sums.send(3, end=True))) == 6


async def test_a_sequence_goes_on_at_another_worker_when_its_own_dies(sums: Sequencing) -> None:
    await sums.scene.worker("w1", lease_s=1.0)
    assert value(await (await sums.send(1, start=True))) == 1
    await sums.scene.kill("w1")
    await sums.scene.worker("w2", lease_s=1.0)

    later = await sums.send(2)
    await eventually(lambda: handed_over(sums), description="a hand-over")

    assert value(await later) == 3


async def handed_over(sums: Sequencing) -> bool:
    """Hands over what dead workers owned, as janitors do; tells whether anything was."""
    return bool(await sums.sequences.reap())


async def test_a_step_that_its_worker_has_not_committed_runs_again(sums: Sequencing) -> None:
    await sums.scene.worker("w1", lease_s=1.0)
    assert value(await (await sums.send(1, start=True))) == 1
    sums.scene.hold()
    second = await sums.send(2)
    await sums.scene.started("w1")
    await sums.scene.kill("w1")
    sums.scene.go()
    await sums.scene.worker("w2", lease_s=1.0)
    await eventually(lambda: handed_over(sums), description="a hand-over")

    response = await second

    assert (value(response), response.attempt) == (3, 2)
    assert value(await (await sums.send(3))) == 6


async def test_a_repeated_step_gets_the_stored_response(sums: Sequencing) -> None:
    await sums.scene.worker()
    first = await (await sums.send(1, start=True, step=1))
    second = await (await sums.send(2, step=2))

    again = await (await sums.send(2, step=2))

    assert [value(r) for r in (first, second, again)] == [1, 3, 3]
    assert value(await (await sums.send(3, step=3))) == 6


async def test_a_step_that_is_repeated_while_it_executes_is_executed_once(sums: Sequencing) -> None:
    await sums.scene.worker()
    assert value(await (await sums.send(1, start=True, step=1))) == 1
    sums.scene.hold()
    second = await sums.send(2, step=2)
    await sums.scene.started()
    again = await sums.send(2, step=2)
    sums.scene.go()

    assert [value(r) for r in await asyncio.gather(second, again)] == [3, 3]
    assert value(await (await sums.send(3, step=3))) == 6


async def test_a_start_while_the_sequence_runs_begins_another(sums: Sequencing) -> None:
    await sums.scene.worker()
    assert value(await (await sums.send(1, start=True))) == 1

    assert value(await (await sums.send(10, start=True))) == 10
    assert value(await (await sums.send(1, end=True))) == 11


async def test_a_step_that_expires_ends_its_sequence(sums: Sequencing) -> None:
    await sums.scene.worker()
    assert value(await (await sums.send(1, start=True))) == 1
    sums.scene.hold()
    running = await sums.send(2)
    await sums.scene.started()
    late = await sums.send(3, timeout_s=0.2)
    behind = await sums.send(4)

    failures = [(await answer).failure for answer in (late, behind)]
    sums.scene.go()

    assert failures[0] is not None
    assert failures[0].code == "deadline_exceeded"
    assert failures[1] is not None
    assert "was ended at step 3" in failures[1].message
    del running


async def test_a_sequence_that_is_idle_ends(scene: InlineWorkers) -> None:
    sums = Sequencing(scene, idle_s=0.3)
    await sums.model()
    await scene.worker()
    assert value(await (await sums.send(1, start=True))) == 1

    async def has_ended() -> bool:
        return (await sums.sequences.sizes([1])).open == 0

    await eventually(has_ended, description="the end of an idle sequence")


async def test_a_tensor_beside_the_stream_keeps_the_order(sums: Sequencing) -> None:
    await sums.scene.worker()
    answers = [
        await sums.send(1, start=True, apart=True),
        await sums.send(2),
        await sums.send(3, apart=True),
        await sums.send(4, end=True),
    ]

    assert [value(a) for a in await asyncio.gather(*answers)] == [1, 3, 6, 10]


async def test_more_sequences_than_slots_wait_for_one(sums: Sequencing) -> None:
    await sums.scene.worker()
    open_ones = [value(await (await sums.send(n, n, start=True))) for n in range(1, 9)]
    waiting = await sums.send(9, 9, start=True)

    assert value(await (await sums.send(1, 1, end=True))) == 2
    assert value(await waiting) == 9
    assert open_ones == list(range(1, 9))


async def test_a_sequence_whose_state_is_in_memory_ends_with_its_worker(scene: InlineWorkers) -> None:
    sums = Sequencing(scene, explicit=True)
    await sums.model()
    await scene.worker("w1", lease_s=1.0)
    assert value(await (await sums.send(1, start=True))) == 1
    scene.hold()
    second = await sums.send(2)
    await scene.started("w1")
    await scene.kill("w1")
    scene.go()
    await scene.worker("w2", lease_s=1.0)
    await eventually(lambda: handed_over(sums), description="a hand-over")
    await scene.stop("w2")

    await answer_rest(scene.delivery, sums.sequences)

    failure = (await second).failure
    assert failure is not None
    assert failure.code == "sequence_lost"


async def test_another_generation_takes_new_sequences_and_the_old_one_ends_its_own(sums: Sequencing) -> None:
    await sums.scene.worker()
    assert value(await (await sums.send(1, start=True))) == 1
    await sums.model(instances=2)
    await sums.scene.ready()

    assert value(await (await sums.send(10, 2, start=True))) == 10
    assert value(await (await sums.send(2, end=True))) == 3
    assert value(await (await sums.send(11, 2, end=True))) == 21


async def test_a_model_is_unloaded_when_its_sequences_have_ended(sums: Sequencing) -> None:
    await sums.scene.worker()
    assert value(await (await sums.send(1, start=True))) == 1
    await sums.scene.unload()

    assert value(await (await sums.send(2, end=True))) == 3

    async def is_gone() -> bool:
        return not any(record.models for record in await sums.scene.store.workers())

    await eventually(is_gone, description="the model unloaded")


async def test_a_sequence_stays_on_its_version_until_it_ends(sums: Sequencing, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version takes new sequences meanwhile; the old one is pinned, and unloaded afterwards."""
    monkeypatch.setattr(models, "PIN_EVERY_S", 0.05)
    store = sums.scene.store
    await sums.scene.worker()
    assert value(await (await sums.send(1, start=True))) == 1
    await sums.model(versions=(2,))

    async def is_pinned() -> bool:
        served = {v for record in await store.workers() for v in record.models.get("stub", {})}
        return [(pin.version, pin.reason) for pin in await store.pins()] == [(1, "sequences")] and served == {1, 2}

    await eventually(is_pinned, description="both versions")
    sums.version = 2
    assert await sums.sum(5, 6, correlation_id=2) == [5, 11]
    assert value(await (await sums.send(2))) == 3
    assert value(await (await sums.send(3, end=True))) == 6

    async def is_unloaded() -> bool:
        served = {v for record in await store.workers() for v in record.models.get("stub", {})}
        return not await store.pins() and served == {2}

    await eventually(is_unloaded, description="the old version unloaded")


async def test_a_state_that_can_not_be_read_now_ends_nothing(sums: Sequencing, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence is given back, and goes on at whoever can read it."""
    await sums.scene.worker("w1")
    assert value(await (await sums.send(1, start=True))) == 1
    read, failures = sums.sequences.state, [BrokerUnavailable("away"), BrokerUnavailable("away")]

    async def state(sequence: SequenceId) -> bytes | None:
        if failures:
            raise failures.pop()
        return await read(sequence)

    monkeypatch.setattr(sums.sequences, "state", state)
    await sums.scene.worker("w2")
    await sums.scene.stop("w1")

    assert value(await (await sums.send(2, end=True))) == 3
    assert not failures
