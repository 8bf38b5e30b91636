"""What becomes of the entries of workers that died: on the memory delivery and on a real Redis."""

import asyncio

import pytest

from qinfer.control.base import State
from qinfer.messages import Response
from qinfer.testing import eventually
from tests.stage import Stage, value


async def test_dead_workers_entries_run_elsewhere(scene: Stage) -> None:
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


async def test_entry_that_outlived_its_workers_is_given_up(scene: Stage) -> None:
    """More deliveries than allowed are answered with a failure, not executed."""
    await scene.model()
    await scene.worker("w1")
    scene.hold()
    call = scene.submit()
    await scene.started("w1")
    await scene.kill("w1")
    scene.go()
    await scene.worker("w2", lease_s=0.2, renew_every_s=0.05, max_deliveries=1)
    scene.forget_started()

    failure = (await call).failure

    assert failure is not None
    assert "given up" in failure.message
    assert scene.backends["w2"][0].sizes == []


async def dead_entry(scene: Stage) -> asyncio.Future[Response]:
    """Submits a request, and fetches it in the name of a worker that is gone."""
    call = scene.submit(7.0)
    assert len(await scene.delivery.fetch([scene.lane], "dead", 1, 1.0)) == 1
    return call


async def seconds_pass(scene: Stage, seconds: float) -> None:
    """Lets leases end that nobody renews."""
    until_s = scene.delivery.clock.now_s() + seconds
    await eventually(lambda: scene.delivery.clock.now_s() > until_s)


async def test_a_suspect_is_held_while_the_worker_empties_its_hands(
    scene: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A long execution before it does not cost it its lease, and so counts no attempt."""
    await scene.model()
    suspect = await dead_entry(scene)
    await scene.worker(lease_s=0.6, renew_every_s=0.05)
    first = await scene.busy()
    await eventually(lambda: "reclaimed" in caplog.text)
    await seconds_pass(scene, 0.7)

    assert await scene.delivery.reclaim([scene.lane], "other", 0.6, 10) == []
    scene.go()

    assert value(await first) == 0.0
    assert value(await suspect) == 7.0
    assert (await suspect).attempt == 2


async def test_a_suspect_of_an_unloaded_model_waits_for_the_model(
    scene: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that unloads the model meanwhile lets the suspect go, and goes on."""
    await scene.model()
    suspect = await dead_entry(scene)
    await scene.worker(lease_s=0.6, renew_every_s=0.05)
    first = await scene.busy()
    await scene.store.forget("stub")
    await scene.store.wake()

    async def is_unloading() -> bool:
        (record,) = await scene.store.workers()
        return record.models["stub"][1].state is State.UNLOADING

    await eventually(is_unloading)
    await eventually(lambda: "reclaimed" in caplog.text)
    scene.go()
    assert value(await first) == 0.0
    await eventually(lambda: not scene.backends["w1"][0].loaded)
    await scene.model()
    await scene.ready()

    assert value(await suspect) == 7.0
