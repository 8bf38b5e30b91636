"""Shadows in a worker: behind online work, in batches of their own, executed once at most."""

import asyncio

import pytest

from qinfer.core.messages import Response
from qinfer.queue.entries import shadow_lane
from qinfer.testing import eventually
from qinfer.traffic.endpoints import Endpoint, Role, Target
from qinfer.traffic.store import EndpointStore
from qinfer.wire.frame import encode_request
from qinfer_workers.inference.bulk import arbiter
from tests.support.inline_workers import InlineWorkers, value

LANE = shadow_lane("stub", 1)


async def declare(scene: InlineWorkers) -> None:
    """Declares the model `stub` as a shadow."""
    stable = Target(model="other", version=1, role=Role.STABLE)
    shadow = Target(model="stub", version=1, role=Role.SHADOW, weight=1.0)
    await EndpointStore(scene.store).put(Endpoint(name="e", targets=(stable, shadow)), 0)


def submit(scene: InlineWorkers, number: float, rows: int = 1) -> "asyncio.Future[Response]":
    request = scene.request(number, model="stub", rows=rows)
    return scene.submit_frame(request.id, encode_request(request), LANE)


async def held(scene: InlineWorkers, count: int) -> None:
    """Waits until workers hold so many shadows."""

    async def is_so() -> bool:
        return await scene.delivery.in_flight([LANE]) == [count]

    await eventually(is_so, description=f"{count} shadows that a worker holds")


async def emptied(scene: InlineWorkers) -> None:
    async def is_so() -> bool:
        return await scene.delivery.depth([LANE]) == [0]

    await eventually(is_so, description="an empty shadow lane")


async def test_a_shadow_waits_while_another_model_has_online_work(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arbiter, "PATIENCE_S", 3600.0)
    await scene.model()
    await scene.model("other")
    await declare(scene)
    await scene.worker()
    scene.hold("other")
    online = scene.submit(1.0, model="other")
    await scene.started(model="other")

    shadow = submit(scene, 2.0)
    await held(scene, 1)
    executed = [backend.sizes for backend in scene.backends["w1"] if backend.model == "stub"]
    scene.go("other")

    assert executed == [[]]
    assert value(await online) == 1.0
    assert value(await shadow) == 2.0
    await emptied(scene)


async def test_shadows_share_no_batch_with_online_requests(scene: InlineWorkers) -> None:
    await scene.model()
    await scene.model("other")
    await declare(scene)
    await scene.worker()
    scene.hold("stub")
    shadows = [submit(scene, 1.0)]
    await scene.started(model="stub")

    online = [scene.submit(float(number)) for number in range(3)]
    shadows.append(submit(scene, 2.0))
    await scene.queued(3)
    scene.go("stub")

    assert [value(answer) for answer in await asyncio.gather(*online)] == [0.0, 1.0, 2.0]
    answers = await asyncio.gather(*shadows)
    assert [value(answer) for answer in answers] == [1.0, 2.0]
    assert [answer.timing and answer.timing.batch_size for answer in answers] == [1, 1]


async def test_a_shadow_is_not_executed_again_when_its_worker_died(scene: InlineWorkers) -> None:
    await scene.model()
    await scene.model("other")
    await declare(scene)
    await scene.worker(lease_s=0.5)
    scene.hold("stub")
    lost = submit(scene, 1.0)
    await scene.started(model="stub")
    await scene.kill()

    await scene.worker("w2", lease_s=0.5)
    scene.forget_started()
    await emptied(scene)

    assert not lost.done()
    assert value(await submit(scene, 2.0)) == 2.0
    (sizes,) = [backend.sizes for backend in scene.backends["w2"] if backend.model == "stub"]
    assert sizes == [1]


async def test_a_paused_or_drained_worker_gives_its_shadows_back(scene: InlineWorkers) -> None:
    """What executes ends, and is answered; what waits is another worker's."""
    await scene.model()
    await scene.model("other")
    await declare(scene)
    await scene.worker()
    scene.hold("stub")
    first = submit(scene, 1.0)
    await scene.started(model="stub")
    rest = [submit(scene, float(number)) for number in range(2, 5)]

    stopped = asyncio.create_task(scene.stop())
    scene.go("stub")
    await stopped
    await scene.worker("w2")

    assert value(await first) == 1.0
    assert [value(answer) for answer in await asyncio.gather(*rest)] == [2.0, 3.0, 4.0]
    await emptied(scene)
