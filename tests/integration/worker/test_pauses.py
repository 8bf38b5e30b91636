"""Paused models in workers: what waits, what goes on and what restarts change; and the records of executions."""

from itertools import pairwise
from typing import Any

import pytest

from qinfer.models.state import ModelPause
from qinfer.queue.entries import Lane, RequestState
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request
from qinfer_workers.inference.worker import Worker
from tests.support.inline_workers import InlineWorkers, value

QUEUED, SUCCEEDED = RequestState.QUEUED, RequestState.SUCCEEDED


async def paused(scene: InlineWorkers, worker: Worker, model: str = "stub", version: int = 0) -> None:
    """Pauses a model, and waits until the worker knows."""
    await scene.store.put_pause(ModelPause(model=model, version=version))
    await eventually(lambda: worker._models.paused.has(model, version or 1), description="the pause in the worker")


async def passed(scene: InlineWorkers) -> None:
    """Lets the worker's loops go round: it answers requests of another model meanwhile."""
    for number in range(3):
        assert value(await scene.submit(float(number), model="other")) == number


@pytest.fixture
async def both(scene: InlineWorkers) -> InlineWorkers:
    await scene.model()
    await scene.model("other")
    return scene


async def executed(scene: InlineWorkers, model: str = "stub") -> int:
    return sum(sum(backend.sizes) for backend in scene.backends["w1"] if backend.model == model)


async def test_requests_of_a_paused_model_wait_and_others_go_on(both: InlineWorkers) -> None:
    worker = await both.worker()
    await paused(both, worker)
    both.forget_started()

    stored, call = await both.accept(1.0), both.submit(2.0)
    await passed(both)

    record = await both.delivery.requests.record(stored)
    assert record is not None
    assert (record.state, record.attempts, call.done(), await executed(both)) == (QUEUED, 0, False, 0)
    assert await both.store.remove_pause("stub", 0)
    assert value(await call) == 2.0
    assert (await both.ended(stored)).state is SUCCEEDED


async def test_begun_requests_of_a_paused_model_end(both: InlineWorkers) -> None:
    worker = await both.worker()
    first = await both.busy()

    await paused(both, worker)
    both.go()

    assert value(await first) == 0.0


async def test_deadlines_go_on_while_a_model_is_paused(both: InlineWorkers) -> None:
    worker = await both.worker()
    await paused(both, worker)

    stored = await both.accept(1.0, timeout_s=0.05)
    await passed(both)
    await eventually(lambda: _is_due(both), description="the deadline")

    record = await both.delivery.requests.record(stored)
    assert record is not None
    assert record.state is QUEUED


async def _is_due(scene: InlineWorkers) -> bool:
    return bool(await scene.delivery.requests.due("stub", 0, 10))


async def test_a_pause_outlives_the_worker(both: InlineWorkers) -> None:
    worker = await both.worker()
    await paused(both, worker)
    await both.stop()
    call = both.submit(3.0)

    await both.worker()
    await passed(both)

    assert not call.done()
    await both.store.remove_pause("stub", 0)
    assert value(await call) == 3.0


async def test_entries_of_a_dead_worker_wait_too(both: InlineWorkers) -> None:
    await both.worker(lease_s=0.4)
    call = await both.busy()
    await both.kill()
    both.go()
    await both.store.put_pause(ModelPause(model="stub"))

    await both.worker("w2", lease_s=0.4)
    for _ in range(3):
        await passed(both)

    assert not call.done()
    await both.store.remove_pause("stub", 0)
    assert value(await call) == 0.0


async def test_one_version_is_paused(scene: InlineWorkers) -> None:
    await scene.model(versions=(1, 2))
    await scene.model("other")
    worker = await scene.worker()
    await paused(scene, worker, version=1)

    first, request = scene.submit(1.0), scene.request(2.0)
    second = scene.submit_frame(request.id, encode_request(request), Lane("stub", 2))

    assert value(await second) == 2.0
    assert not first.done()
    await scene.store.remove_pause("stub", 1)
    assert value(await first) == 1.0


async def test_shards_of_a_paused_model_are_not_taken(both: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate of its shard loop, which opens while it has open jobs, stays closed until it is resumed."""
    worker = await both.worker()

    async def models(*_: Any) -> list[tuple[str, int]]:
        return [("stub", 0), ("other", 0)]

    monkeypatch.setattr(worker._bulk._context.jobs, "models", models)
    gates = {model: worker._bulk._served[model, 1].is_open for model in ("stub", "other")}
    await eventually(lambda: all(gate.is_set() for gate in gates.values()), description="open jobs")

    await paused(both, worker)

    await eventually(lambda: not gates["stub"].is_set(), description="the closed gate")
    assert gates["other"].is_set()
    await both.store.remove_pause("stub", 0)
    await eventually(gates["stub"].is_set, description="the open gate")


async def test_a_record_tells_which_worker_executed_in_which_batch(scene: InlineWorkers) -> None:
    await scene.model(delay_us=200_000)
    await scene.worker()
    first = await scene.busy()
    stored = [await scene.accept(1.0), await scene.accept(2.0, rows=2)]
    await scene.queued(3)
    scene.go()
    records = [await scene.ended(address) for address in stored]
    await first

    for record, rows in zip(records, (1, 2), strict=True):
        done = record.execution
        assert done is not None
        assert (done.worker, done.rows, done.batch_rows) == ("w1", rows, 3)
        instants = (record.created_at, done.fetched_at, done.began_at, done.ended_at, record.finished_at)
        assert all(late - early > -0.05 for early, late in pairwise(instants))
