"""What a worker makes of changed desired state while requests come, on a real Redis."""

import asyncio

from qinfer.models.state import State, VersionState
from qinfer.testing import eventually
from tests.support.inline_workers import InlineWorkers, value


async def states(scene: InlineWorkers, name: str = "stub", worker_id: str = "w1") -> dict[int, VersionState]:
    """Returns the versions of a model as a worker reports them."""
    records = {record.id: record for record in await scene.store.workers()}
    return records[worker_id].models.get(name, {}) if worker_id in records else {}


async def until(scene: InlineWorkers, expected: dict[int, State], name: str = "stub") -> None:
    """Waits until a worker reports exactly these versions."""

    async def is_so() -> bool:
        return {version: state.state for version, state in (await states(scene, name)).items()} == expected

    await eventually(is_so, description=f"{name} {expected}")


async def test_an_unload_answers_what_waits_first(scene: InlineWorkers) -> None:
    """What was admitted before is executed, what is in the lane too; then the instance is unloaded."""
    await scene.model()
    await scene.worker()
    first = await scene.busy()
    waiting = [scene.submit(float(number)) for number in range(1, 30)]
    await scene.queued(30)

    await scene.unload()
    await until(scene, {1: State.UNLOADING})
    scene.go()

    assert [value(answer) for answer in await asyncio.gather(first, *waiting)] == [float(n) for n in range(30)]
    await until(scene, {})
    await eventually(lambda: not scene.backends["w1"][0].loaded)
    await scene.queued(0)


async def test_a_model_that_is_wanted_again_is_not_let_go(scene: InlineWorkers) -> None:
    """While it drains; the same instance serves on."""
    await scene.model()
    await scene.worker()
    first = await scene.busy()
    wish = await scene.unload()
    await until(scene, {1: State.UNLOADING})

    await scene.store.set_desired(wish)
    await scene.store.wake()
    await until(scene, {1: State.READY})
    scene.go()

    assert [value(answer) for answer in (await first, await scene.submit(2.0))] == [0.0, 2.0]
    assert [backend.loaded for backend in scene.backends["w1"]] == [True]


async def test_more_and_fewer_instances_are_no_reload(scene: InlineWorkers) -> None:
    """The ones that are there serve on while others come, and those that are too many end when they are idle."""
    await scene.model()
    await scene.worker()
    (first,) = scene.backends["w1"]
    await scene.model(instances=3)
    await scene.ready()
    three = list(scene.backends["w1"])
    scene.hold()
    calls = [scene.submit(float(number), rows=8) for number in range(3)]
    await scene.started(count=3)

    await scene.model(instances=1)
    await scene.ready()
    loaded = [backend.loaded for backend in three]
    scene.go()
    await asyncio.gather(*calls)
    await eventually(lambda: sum(backend.loaded for backend in three) == 1)

    assert three[0] is first
    assert loaded == [True] * 3
    assert len(scene.backends["w1"]) == 3
    assert value(await scene.submit(7.0)) == 7.0


async def test_a_generation_with_the_same_content_is_not_loaded(scene: InlineWorkers) -> None:
    """It only changes its number, such as when a failed reload is taken back."""
    await scene.model()
    await scene.worker()
    generation = await scene.model()
    await scene.ready()

    assert len(scene.backends["w1"]) == 1
    assert (await states(scene))[1].generation == generation
    assert value(await scene.submit(3.0)) == 3.0


async def test_a_failed_reload_is_told_apart_from_what_serves(scene: InlineWorkers) -> None:
    """The record says what serves, what was tried, and why it failed."""
    serving = await scene.model()
    await scene.worker()
    tried = await scene.model(mode="no-such-mode")

    async def has_failed() -> bool:
        return (await states(scene))[1].tried == tried

    await eventually(has_failed)
    state = (await states(scene))[1]
    assert (state.state, state.generation) == (State.READY, serving)
    assert "no-such-mode" in state.reason
    assert value(await scene.submit(1.0, generation=serving)) == 1.0


async def test_a_version_is_let_go_when_its_successor_serves(scene: InlineWorkers) -> None:
    """The version policy moves on: there is no time without either."""
    await scene.model(versions=(1,))
    await scene.worker()
    await scene.model(versions=(2,))

    await until(scene, {2: State.READY})
    await eventually(
        lambda: [backend.loaded for backend in scene.backends["w1"]] == [False, True], description="one version only"
    )


async def test_a_version_stays_when_its_successor_fails(scene: InlineWorkers) -> None:
    """And serves on."""
    serving = await scene.model(versions=(1,))
    await scene.worker()
    await scene.model(versions=(2,), mode="no-such-mode")

    await until(scene, {1: State.READY, 2: State.UNAVAILABLE})
    assert value(await scene.submit(4.0, generation=serving)) == 4.0


async def test_versions_of_several_models_share_a_worker(scene: InlineWorkers) -> None:
    """Each with its own instances, which run at once."""
    await scene.model("a", versions=(1, 2), instances=2)
    await scene.model("b")
    await scene.worker()
    scene.hold()

    calls = [scene.submit(float(n), model=name, rows=8) for n, name in enumerate(("a", "a", "b"))]
    await scene.started(count=3)
    scene.go()

    assert [value(answer) for answer in await asyncio.gather(*calls)] == [0.0, 1.0, 2.0]
    assert len(scene.backends["w1"]) == 5
