"""What becomes of the entries of workers that died, on a real Redis."""

import asyncio

import pytest

from qinfer.core.messages import Response
from qinfer.models.state import State
from qinfer.queue.entries import Lease, RequestState
from qinfer.testing import eventually
from qinfer.wire.frame import FRAME_VERSION, encode_request
from tests.support.inline_workers import InlineWorkers, value


async def test_dead_workers_entries_run_elsewhere(scene: InlineWorkers) -> None:
    """What a worker held when it died is reclaimed, and runs alone."""
    await scene.model()
    await scene.worker("w1")
    scene.hold()
    calls = [scene.submit(float(i)) for i in range(3)]
    await scene.started("w1")
    await scene.kill("w1")
    scene.go()
    await scene.worker("w2", lease_s=0.2, renew_every_s=0.05)

    answers = await asyncio.gather(*calls)

    assert [value(a) for a in answers] == [0.0, 1.0, 2.0]


async def test_entry_that_outlived_its_workers_is_given_up(scene: InlineWorkers) -> None:
    """Two workers died with it, with the second it was alone: it becomes a dead letter, and is not executed."""
    await scene.model()
    call = await dead_entry(scene)
    await scene.worker("w1", lease_s=0.2, renew_every_s=0.05, max_deliveries=1)
    scene.hold()
    await scene.started("w1")
    await scene.kill("w1")
    scene.go()
    await scene.worker("w2", lease_s=0.2, renew_every_s=0.05, max_deliveries=1)
    scene.forget_started()

    response = await call

    assert response.failure is not None
    assert response.failure.message == "the request was given up: 2 executions did not end"
    assert scene.backends["w2"][0].sizes == []
    (letter,) = await scene.delivery.dead_letters.list("stub")
    assert (letter.request_id, letter.code, letter.deliveries) == (response.request_id, "inference_failed", 3)
    await scene.queued(0)
    await scene.stop("w2")
    stats = await scene.store.stats("stub", 1)
    assert (stats["dead_letters"], stats["failures:inference_failed"]) == (1, 1)


async def test_an_asynchronous_request_that_is_given_up_has_failed(scene: InlineWorkers) -> None:
    """Its record counts the executions, and says why."""
    await scene.model()
    address = await scene.accept()
    for consumer in ("dead1", "dead2"):
        await eventually(lambda c=consumer: is_taken(scene, c))  # type: ignore[misc]  # of a loop's variable
    await scene.worker(lease_s=0.2, renew_every_s=0.05, max_deliveries=2)

    record = await scene.ended(address)

    assert (record.state, record.code, record.attempts) == (RequestState.FAILED, "inference_failed", 2)
    assert record.message == "the request was given up: 2 executions did not end"
    assert len(await scene.delivery.dead_letters.list("stub")) == 1


async def is_taken(scene: InlineWorkers, consumer: str) -> bool:
    """Takes the only entry, new or from a dead worker."""
    leases = await scene.delivery.fetch([scene.lane], consumer, 1, 0.0)
    return bool(leases or await scene.delivery.reclaim([scene.lane], consumer, 0.1, 1))


async def dead_entry(scene: InlineWorkers) -> asyncio.Future[Response]:
    """Submits a request, and fetches it in the name of a worker that is gone."""
    call = scene.submit(7.0)
    assert len(await scene.delivery.fetch([scene.lane], "dead", 1, 1.0)) == 1
    return call


async def test_a_suspect_waits_while_the_worker_empties_its_hands(
    scene: InlineWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody holds it meanwhile: others may have it, and it counts no execution."""
    await scene.model()
    suspect = await dead_entry(scene)
    await scene.worker(lease_s=0.6, renew_every_s=0.05)
    first = await scene.busy()
    await eventually(lambda: "suspects found" in caplog.text)
    found: list[Lease] = []

    async def is_free() -> bool:
        found.extend(await scene.delivery.reclaim([scene.lane], "other", 60.0, 1))
        return bool(found)

    await eventually(is_free)
    assert (found[0].deliveries, found[0].suspect) == (2, True)
    await scene.delivery.release(found)
    assert await scene.delivery.fetch([scene.lane], "other", 1, 0.0) == []
    scene.go()

    assert value(await first) == 0.0
    assert value(await suspect) == 7.0
    assert (await suspect).attempt == 2


async def test_an_idle_worker_runs_what_a_busy_one_found(
    scene: InlineWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    """A long execution keeps no suspect waiting."""
    await scene.model()
    suspect = await dead_entry(scene)
    await scene.worker("w1", lease_s=0.6, renew_every_s=0.05)
    first = await scene.busy()
    await eventually(lambda: "suspects found" in caplog.text)
    await scene.worker("w2", lease_s=0.6, renew_every_s=0.05)

    assert ((await suspect).attempt, value(await suspect)) == (2, 7.0)
    assert not first.done()
    scene.go()
    await first


async def test_a_suspect_that_only_newer_workers_can_read_stops_nobody(
    scene: InlineWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    """What is behind it is found, and hands are not emptied for it."""
    await scene.model()
    request = scene.request()
    newer = scene.submit_frame(request.id, bytes([FRAME_VERSION + 1]) + encode_request(request)[1:])
    assert len(await scene.delivery.fetch([scene.lane], "dead", 1, 1.0)) == 1
    suspect = await dead_entry(scene)
    await scene.worker(lease_s=0.2, renew_every_s=0.05)

    assert ((await suspect).attempt, value(await suspect)) == (2, 7.0)
    caplog.clear()
    await eventually(lambda: caplog.text.count("frame of a newer qinfer released") > 1)
    assert "suspects found" not in caplog.text
    assert not newer.done()


async def test_a_suspect_of_an_unloaded_model_waits_for_the_model(
    scene: InlineWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that unloads the model meanwhile lets the suspect go, and goes on."""
    await scene.model()
    suspect = await dead_entry(scene)
    await scene.worker(lease_s=0.6, renew_every_s=0.05)
    first = await scene.busy()
    await scene.unload()

    async def is_unloading() -> bool:
        (record,) = await scene.store.workers()
        return record.models["stub"][1].state is State.UNLOADING

    await eventually(is_unloading)
    await eventually(lambda: "suspects found" in caplog.text)
    scene.go()
    assert value(await first) == 0.0
    await eventually(lambda: not scene.backends["w1"][0].loaded)
    await scene.model()
    await scene.ready()

    assert value(await suspect) == 7.0
