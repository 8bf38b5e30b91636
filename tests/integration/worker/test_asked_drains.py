"""A worker that a gateway asks to drain: what it finishes, what it leaves to others, and that it ends."""

from qinfer.testing import eventually
from tests.support.inline_workers import InlineWorkers, value


async def test_a_worker_finishes_what_executes_leaves_the_rest_and_ends(scene: InlineWorkers) -> None:
    await scene.model()
    await scene.worker(heartbeat_every_s=0.05)
    first = await scene.busy()
    waiting = scene.submit(2.0)

    assert await scene.store.ask_drain("w1", "root")

    async def drains() -> bool:
        return [record.condition for record in await scene.store.workers()] == ["draining"]

    await eventually(drains, description="the drain")
    scene.go()
    assert value(await first) == 0.0
    _, ending = scene._stops.pop("w1")
    await ending
    assert await scene.store.workers() == []
    await scene.worker("w2")
    assert value(await waiting) == 2.0


async def test_another_worker_goes_on(scene: InlineWorkers) -> None:
    await scene.model()
    for name in ("w1", "w2"):
        await scene.worker(name, heartbeat_every_s=0.05)

    assert await scene.store.ask_drain("w1", "")
    await scene._stops.pop("w1")[1]

    assert [record.id for record in await scene.store.workers()] == ["w2"]
    assert value(await scene.submit(3.0)) == 3.0
