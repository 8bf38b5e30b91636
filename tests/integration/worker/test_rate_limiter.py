"""Workers that limit rates: the models of a worker share its resources."""

import asyncio
from pathlib import Path

import pytest

from qinfer.core.settings_sections import RateLimitSettings
from qinfer.models.state import State
from qinfer.testing import eventually
from qinfer_workers.inference.worker import Worker
from tests.support.inline_workers import InlineWorkers, failure, value
from tests.support.jobs.shard_runs import job_spec, outcomes, scored_rows, shards_of, submit_job, write_rows
from tests.support.sequence_scene import Sequencing

ALONE = "resources { name: 'r' count: 1 }"
TWO = "resources { name: 'r' count: 2 }"
GLOBAL = "resources { name: 'g' count: 1 global: true }"


def limited(needs: str, instances: int = 1) -> str:
    """Returns the number of instances as the configuration has it, with what each needs."""
    return f"{instances} rate_limiter {{ {needs} }}"


@pytest.fixture(autouse=True)
def limits(scene: InlineWorkers) -> None:
    scene.rate_limit = RateLimitSettings(mode="execution_count")


async def waiting(worker: Worker, *models: str) -> None:
    """Waits until instances of exactly these models wait for resources."""

    def found() -> list[str]:
        assert worker._limiter is not None
        return sorted(instance.model for instance in worker._limiter.ledger._waiting)

    await eventually(lambda: found() == sorted(models), description=f"that {models} wait")


def started(scene: InlineWorkers, model: str) -> int:
    return sum(len(backend.sizes) for mine in scene.backends.values() for backend in mine if backend.model == model)


# --- resources of a worker ---


async def test_two_models_that_need_the_same_execute_in_turn(scene: InlineWorkers) -> None:
    await scene.model("a", instances=limited(ALONE))
    await scene.model("b", instances=limited(ALONE))
    worker = await scene.worker()
    scene.hold()

    first = scene.submit(1.0, model="a")
    await scene.started(model="a")
    second = scene.submit(2.0, model="b")
    await waiting(worker, "b")

    assert started(scene, "b") == 0
    scene.go()
    assert value(await first) == 1.0
    assert value(await second) == 2.0
    await waiting(worker)


async def test_requests_that_wait_for_resources_share_a_batch(scene: InlineWorkers) -> None:
    await scene.model("a", instances=limited(ALONE))
    await scene.model("b", instances=limited(ALONE))
    worker = await scene.worker()
    scene.hold()
    first = scene.submit(1.0, model="a")
    await scene.started(model="a")

    one = scene.submit(2.0, model="b")
    await waiting(worker, "b")
    others = [scene.submit(float(i), model="b") for i in range(3)]
    batcher = worker._serving["b", 1].batcher
    await eventually(lambda: len(getattr(batcher, "_pending", ())) == 4, description="that all wait here")
    scene.go()
    await asyncio.gather(first, one, *others)

    assert [backend.sizes for backend in scene.backends["w1"] if backend.model == "b"] == [[4]]


async def test_a_request_expires_while_it_waits_for_resources(scene: InlineWorkers) -> None:
    await scene.model("a", instances=limited(ALONE))
    await scene.model("b", instances=limited(ALONE))
    worker = await scene.worker()
    scene.hold()
    first = scene.submit(1.0, model="a")
    await scene.started(model="a")

    late = await scene.submit(2.0, model="b", timeout_s=0.1)

    assert failure(late).code == "deadline_exceeded"
    assert started(scene, "b") == 0
    scene.go()
    assert value(await first) == 1.0
    await waiting(worker)


async def test_requests_are_given_back_to_workers_that_can_run_them(scene: InlineWorkers) -> None:
    """The first worker waits for its own resource; the second one has another."""
    await scene.model("a", instances=limited(ALONE))
    await scene.model("b", instances=limited(ALONE))
    worker = await scene.worker("w1")
    scene.hold()
    first = scene.submit(1.0, model="a")
    await scene.started(model="a")
    second = scene.submit(2.0, model="b")
    await waiting(worker, "b")

    await scene.worker("w2", models=("b",))

    assert value(await second) == 2.0
    assert not first.done()
    scene.go()
    assert value(await first) == 1.0


async def test_a_model_has_its_turn_although_its_requests_are_in_the_queue_again(scene: InlineWorkers) -> None:
    """Its worker fetches them when the resources are free, before the other model takes these again."""
    await scene.model("a", instances=limited(ALONE), scheduler="")
    await scene.model("b", instances=limited(ALONE))
    worker = await scene.worker()
    scene.hold()
    first = scene.submit(1.0, model="a")
    await scene.started(model="a")
    second = scene.submit(2.0, model="b")
    await waiting(worker, "b")

    def held() -> set[str]:
        return {item.lease.entry.lane.model for item in worker._keeper.held()}

    await eventually(lambda: held() == {"a"}, description="that the request is given back")
    third = scene.submit(3.0, model="a")
    await waiting(worker, "b")

    scene.go("a")
    await scene.started(model="b")

    assert value(await first) == 1.0
    assert started(scene, "a") == 1
    scene.go()
    assert [value(await second), value(await third)] == [2.0, 3.0]


async def test_a_model_without_needs_does_not_wait(scene: InlineWorkers) -> None:
    """Triton's dead-lock (#8358): `a` holds the resource and calls `free`, while `b`, which is first, waits for it."""
    await scene.model("a", instances=limited(ALONE), mode="call:free")
    await scene.model("b", instances=limited(ALONE))
    await scene.model("free")
    worker = await scene.worker()
    scene.hold("a")
    first = scene.submit(1.0, model="a")
    await scene.started(model="a")
    second = scene.submit(2.0, model="b")
    await waiting(worker, "b")

    scene.go()

    assert value(await first) == 1.0
    assert value(await second) == 2.0


@pytest.mark.parametrize("needs", [ALONE, GLOBAL])
async def test_a_called_model_uses_what_its_caller_holds(scene: InlineWorkers, needs: str) -> None:
    await scene.model("caller", instances=limited(needs), mode="call:between")
    await scene.model("between", mode="call:called")
    await scene.model("called", instances=limited(needs))
    await scene.worker()

    answers = await asyncio.gather(*[scene.submit(float(i), model="caller") for i in range(5)])

    assert [value(answer) for answer in answers] == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_a_call_does_not_stay_behind_requests_that_wait_for_its_caller(scene: InlineWorkers) -> None:
    """The worker has requests to the called model that wait for its caller's units, and more are in the lane."""
    await scene.model("caller", instances=limited(GLOBAL), mode="call:called")
    await scene.model("called", instances=limited(GLOBAL), scheduler="")
    worker = await scene.worker()
    scene.hold("caller")
    first = scene.submit(1.0, model="caller")
    await scene.started(model="caller")
    others = [scene.submit(float(i), model="called") for i in range(10)]
    await waiting(worker, "called")

    scene.go()

    assert value(await first) == 1.0
    assert [value(await other) for other in others] == [float(i) for i in range(10)]


@pytest.mark.parametrize("needs", [ALONE, GLOBAL])
async def test_a_called_model_of_another_worker_has_resources_of_its_own(scene: InlineWorkers, needs: str) -> None:
    await scene.model("caller", instances=limited(needs), mode="call:called")
    await scene.model("called", instances=limited(needs))
    await scene.worker("w1", models=("caller",))
    await scene.worker("w2", models=("called",))

    answer = await scene.submit(3.0, model="caller")

    assert value(answer) == 3.0


async def test_a_called_model_that_is_loaded_anew_is_not_refused(scene: InlineWorkers) -> None:
    await scene.model("caller", instances=limited(GLOBAL), mode="call:called")
    await scene.model("called", instances=limited(GLOBAL))
    await scene.worker()
    assert value(await scene.submit(1.0, model="caller")) == 1.0

    await scene.model(
        "called", instances=limited(GLOBAL), more='parameters { key: "delay_s" value { string_value: "0" } }'
    )
    await scene.ready()

    assert value(await scene.submit(2.0, model="caller")) == 2.0


async def test_a_called_model_that_needs_more_than_its_caller_holds_is_refused(scene: InlineWorkers) -> None:
    await scene.model("caller", instances=limited(ALONE), mode="call:called")
    await scene.model("called", instances=limited(TWO))
    await scene.worker()

    refused = failure(await scene.submit(model="caller"))

    assert refused.code == "inference_failed"
    assert "model 'called' needs 2 of resource 'r', of which its caller, model 'caller', holds 1" in refused.message


async def test_a_step_of_a_sequence_waits_for_its_resources(scene: InlineWorkers) -> None:
    sums = Sequencing(scene)
    await sums.model(instances=limited(ALONE))  # type: ignore[arg-type]
    await scene.model("a", instances=limited(ALONE))
    worker = await scene.worker()
    scene.hold("a")
    first = scene.submit(1.0, model="a")
    await scene.started(model="a")

    step = await sums.send(1, start=True)
    await waiting(worker, "stub")

    assert started(scene, "stub") == 0
    scene.go()
    assert value(await first) == 1.0
    assert value(await step) == 1.0
    assert await sums.sum(1, 2, 3, correlation_id=2) == [1, 3, 6]


async def test_bulk_jobs_hold_resources_as_well(scene: InlineWorkers, tmp_path: Path) -> None:
    await scene.model(instances=limited(ALONE, 2))
    await scene.model("a", instances=limited(ALONE))
    worker = await scene.worker()
    url = write_rows(tmp_path / "in.parquet", 200, group=50)
    (tmp_path / "out").mkdir()
    scene.hold("a")
    first = scene.submit(1.0, model="a")
    await scene.started(model="a")

    await submit_job(scene.delivery, job_spec([url], tmp_path / "out"), shards_of(url))
    await waiting(worker, "stub", "stub")

    assert started(scene, "stub") == 0
    scene.go()
    assert value(await first) == 1.0
    answers = [scene.submit(float(i), model="a") for i in range(10)]
    await outcomes(scene.delivery, 4)
    assert [value(await answer) for answer in answers] == [float(i) for i in range(10)]
    assert scored_rows(tmp_path / "out") == [(row, float(row)) for row in range(200)]


async def test_models_execute_as_often_as_their_priorities_say(scene: InlineWorkers) -> None:
    """Of requests that wait all the time, twice as many with priority 1 as with priority 2."""
    for name, priority in (("once", 2), ("twice", 1)):
        needs = limited(f"{ALONE} priority: {priority}")
        delay = 'parameters { key: "delay_s" value { string_value: "0.08" } }'
        await scene.model(name, instances=needs, scheduler="", more=delay)
    await scene.worker()
    ended: list[str] = []

    async def send(name: str) -> None:
        await scene.submit(model=name)
        ended.append(name)

    await asyncio.gather(*[send(name) for _ in range(20) for name in ("once", "twice")])

    assert 16 <= ended[:27].count("twice") <= 20, ended


async def test_a_model_that_needs_more_than_there_is_is_not_loaded(scene: InlineWorkers) -> None:
    scene.rate_limit = RateLimitSettings(mode="execution_count", resources=("r:1", "s:4"))
    await scene.model("a", instances=limited(TWO))
    await scene.worker(ready=False)

    async def reason() -> str:
        states = [v for record in await scene.store.workers() for v in record.models.get("a", {}).values()]
        return states[0].reason if states and states[0].state is State.UNAVAILABLE else ""

    async def is_there() -> bool:
        return bool(await reason())

    await eventually(is_there, description="a reason")
    assert await reason() == (
        'Resource count for "r" is limited to 1 which will prevent scheduling of one or more model instances, the '
        "minimum required count is 2"
    )


async def test_without_the_setting_resources_mean_nothing(scene: InlineWorkers) -> None:
    scene.rate_limit = RateLimitSettings()
    await scene.model("a", instances=limited(ALONE))
    await scene.model("b", instances=limited(ALONE))
    worker = await scene.worker()
    scene.hold()

    answers = [scene.submit(1.0, model="a"), scene.submit(2.0, model="b")]
    await scene.started(model="a")
    await scene.started(model="b")

    assert worker._limiter is None
    scene.go()
    await asyncio.gather(*answers)


async def test_a_model_is_loaded_anew_with_other_needs(scene: InlineWorkers) -> None:
    """What was limited is not any more, and the other way round; its requests are answered throughout."""
    await scene.model("a", instances=limited(ALONE))
    worker = await scene.worker()
    assert value(await scene.submit(1.0, model="a")) == 1.0

    for needs in ("1", limited(TWO, 2), limited(ALONE)):
        answers = [scene.submit(float(i), model="a") for i in range(5)]
        await scene.model("a", instances=needs)
        await scene.ready()
        answers += [scene.submit(float(i), model="a") for i in range(5)]
        for answer in answers:
            assert (await answer).failure is None

    assert worker._limiter is not None
    await eventually(lambda: len(worker._limiter.ledger._instances) == 1, description="only the last generation")  # type: ignore[union-attr]


@pytest.mark.parametrize("needs", [ALONE, GLOBAL])
async def test_workers_have_resources_of_their_own(scene: InlineWorkers, needs: str) -> None:
    """Two workers execute at once, though each of them has one unit."""
    await scene.model("a", instances=limited(needs))
    await scene.model("b", instances=limited(needs))
    await scene.worker("w1", models=("a",))
    await scene.worker("w2", models=("b",))
    scene.hold()

    answers = [scene.submit(1.0, model="a"), scene.submit(2.0, model="b")]
    await scene.started("w1")
    await scene.started("w2")

    scene.go()
    assert [value(await answer) for answer in answers] == [1.0, 2.0]


async def test_a_worker_drains_though_it_waits_for_units(scene: InlineWorkers) -> None:
    """Another worker executes its waiting requests."""
    await scene.model("a", instances=limited(GLOBAL))
    await scene.model("b", instances=limited(GLOBAL))
    worker = await scene.worker()
    scene.hold("a")
    first = scene.submit(1.0, model="a")
    await scene.started(model="a")
    second = scene.submit(2.0, model="b")
    await waiting(worker, "b")

    stopping = asyncio.create_task(scene.stop("w1"))
    await scene.worker("w2", models=("b",))

    assert value(await second) == 2.0
    scene.go()
    await stopping
    assert value(await first) == 1.0


async def test_units_of_a_global_resource_are_for_all_devices_together(scene: InlineWorkers) -> None:
    scene.rate_limit = RateLimitSettings(mode="execution_count", resources=("g:2",))
    for name in ("a", "b", "c"):
        await scene.model(name, instances=limited(GLOBAL))
    worker = await scene.worker()
    scene.hold()

    answers = [scene.submit(1.0, model=name) for name in ("a", "b")]
    await scene.started(model="a")
    await scene.started(model="b")
    third = scene.submit(1.0, model="c")
    await waiting(worker, "c")

    assert started(scene, "c") == 0
    scene.go()
    for answer in (*answers, third):
        assert value(await answer) == 1.0
