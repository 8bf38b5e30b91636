"""Models that call endpoints: the target is chosen in the worker, by the declarations that gateways go by."""

import pytest

from qinfer.observe.stats import INFERENCE_COUNT
from qinfer.testing import eventually
from qinfer.traffic.endpoints import Endpoint, Role, Target
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.store import EndpointStore, TrialStore
from tests.support.inline_workers import InlineWorkers, value

FRONT, BACK, ENDPOINT = "front", "back", "reader"


async def models(scene: InlineWorkers) -> None:
    """Stores `front`, which calls the endpoint, and two versions of `back`."""
    await scene.model(FRONT, mode=f"call:{ENDPOINT}")
    await scene.model(BACK, versions=(1, 2), more="version_policy { all { } }")


async def declare(scene: InlineWorkers, weight: float) -> int:
    """Declares the endpoint; returns the revision."""
    stable = Target(model=BACK, version=1, role=Role.STABLE)
    endpoint = Endpoint(name=ENDPOINT, targets=(stable, Target(model=BACK, version=2, weight=weight)))
    return (await EndpointStore(scene.store).put(endpoint, None)).revision


async def executed(scene: InlineWorkers, count: int = 1) -> list[int]:
    """Asks `front` so many times, one after the other; returns how often the versions of `back` were executed."""
    before = await counts(scene)
    for number in range(count):
        assert value(await scene.submit(float(number), model=FRONT)) == float(number)

    async def are_told() -> bool:
        return sum(await counts(scene)) == sum(before) + count

    await eventually(are_told, description="the statistics of the executions")
    return [now - then for now, then in zip(await counts(scene), before, strict=True)]


async def counts(scene: InlineWorkers) -> list[int]:
    return [(await scene.store.stats(BACK, version)).get(INFERENCE_COUNT, 0) for version in (1, 2)]


async def test_calls_are_shared_out(scene: InlineWorkers) -> None:
    await models(scene)
    await declare(scene, 0.5)
    await scene.worker()

    shares = await executed(scene, 40)

    assert min(shares) > 0


async def test_calls_follow_a_change_and_the_worker_confirms_it(scene: InlineWorkers) -> None:
    await models(scene)
    await declare(scene, 1.0)
    await scene.worker()
    assert await executed(scene) == [0, 1]

    revision = await declare(scene, 0.0)

    async def is_confirmed() -> bool:
        return (await TrialStore(scene.store).heard()).get("worker-w1") == revision

    await eventually(is_confirmed, description="a confirmed revision")
    assert await executed(scene, 5) == [5, 0]


async def test_a_worker_that_hears_of_no_changes_calls_the_stable_target(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await models(scene)
    await declare(scene, 1.0)
    await scene.worker()
    assert await executed(scene) == [0, 1]

    monkeypatch.setattr(Endpoints, "is_stale", True)

    assert await executed(scene, 3) == [3, 0]
