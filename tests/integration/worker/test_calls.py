"""Models that call models, in one worker and in two, on a real Redis."""

import asyncio

import pytest

from qinfer.backends.base import Batch, Context, respond_rows
from qinfer.backends.stub import StubBackend
from qinfer.core.messages import Failure, InferRequest
from qinfer.core.settings import LimitSettings
from qinfer.queue.entries import Lane
from qinfer.tensors import from_numpy, to_numpy
from qinfer.testing import eventually
from qinfer_workers.inference.worker import Worker
from tests.support.inline_workers import InlineWorkers, value

FRONT, BACK = "front", "back"


async def models(scene: InlineWorkers, back: str = "echo", dims: int = 2) -> None:
    """Stores `front`, which calls `back`."""
    await scene.model(FRONT, mode=f"call:{BACK}")
    await scene.model(BACK, mode=back, dims=dims)


async def failure(scene: InlineWorkers, timeout_s: float = 30.0) -> Failure:
    answer = (await scene.submit(model=FRONT, timeout_s=timeout_s)).failure
    assert answer is not None
    return answer


def executed(scene: InlineWorkers, worker_id: str, model: str) -> int:
    return sum(len(backend.sizes) for backend in scene.backends[worker_id] if backend.model == model)


async def are_paused(worker: Worker) -> None:
    """Waits until a draining worker asks for nothing more."""
    await eventually(lambda: all(batcher.paused for batcher in worker._batchers()), description="all models paused")


async def test_a_model_calls_another_of_its_worker(scene: InlineWorkers) -> None:
    """The answer is the called model's, and nothing stays in the lanes."""
    await models(scene)
    await scene.worker()
    scene.forget_started()

    answers = await asyncio.gather(*[scene.submit(float(i), model=FRONT) for i in range(20)])

    assert [value(answer) for answer in answers] == [float(i) for i in range(20)]
    assert executed(scene, "w1", BACK)
    await scene.queued(0, model=FRONT)
    await scene.queued(0, model=BACK)


async def test_a_model_calls_one_of_another_worker(scene: InlineWorkers) -> None:
    """A worker calls what it does not host."""
    await models(scene)
    await scene.worker("w1", models=(FRONT,))
    await scene.worker("w2", models=(BACK,))
    scene.forget_started()

    assert value(await scene.submit(3.0, model=FRONT)) == 3.0
    assert executed(scene, "w2", BACK) == 1


async def test_a_chain_of_calls(scene: InlineWorkers) -> None:
    """What is called calls on."""
    await models(scene, back="call:last")
    await scene.model("last")
    await scene.worker()

    assert value(await scene.submit(3.0, model=FRONT)) == 3.0


async def test_a_call_of_an_unknown_model_is_the_models_failure(scene: InlineWorkers) -> None:
    """Its client named no unknown model."""
    await scene.model(FRONT, mode="call:nobody")
    await scene.worker()

    assert await failure(scene) == Failure(
        "inference_failed", "a call failed: Request for unknown model: 'nobody' is not found"
    )


async def test_a_call_that_does_not_fit_is_the_models_failure(scene: InlineWorkers) -> None:
    """Its client sent what the model asks for."""
    await models(scene, dims=3)
    await scene.worker()

    failed = await failure(scene)

    assert failed.code == "inference_failed"
    assert failed.message.startswith("a call failed: unexpected shape for input 'x' for model 'back'")
    await scene.queued(0, model=BACK)


async def test_a_called_models_failure_is_passed_on(scene: InlineWorkers) -> None:
    """With its text, and the name of the model that it is about."""
    await models(scene, back="raise")
    await scene.worker()

    assert await failure(scene) == Failure("inference_failed", "model 'back' failed: the stub was told to raise")


async def test_a_call_ends_with_the_deadline_of_the_batch(scene: InlineWorkers) -> None:
    """The called request leaves the queue, though a worker still executes it."""
    await models(scene)
    await scene.worker()
    await scene.submit(model=FRONT)  # from now on a call takes no longer than its model
    scene.hold(BACK)

    failed = await failure(scene, timeout_s=1.0)

    assert failed.code == "deadline_exceeded"
    await scene.started(model=BACK)
    await scene.queued(0, model=BACK)
    scene.go()
    assert value(await scene.submit(3.0, model=FRONT)) == 3.0


async def test_drain_ends_a_batch_that_calls_when_all_is_paused(scene: InlineWorkers) -> None:
    """A worker that drains serves on what its last batches call."""
    await models(scene)
    worker = await scene.worker()
    scene.hold(FRONT)
    call = scene.submit(3.0, model=FRONT)
    await scene.started(model=FRONT)

    stopping = asyncio.create_task(scene.stop())
    await are_paused(worker)
    scene.go()

    assert value(await call) == 3.0
    await stopping
    await scene.queued(0, model=FRONT)
    await scene.queued(0, model=BACK)


async def test_drain_ends_a_call_that_waits_in_the_queue(scene: InlineWorkers) -> None:
    """The model that is called is paused last."""
    await models(scene)
    await scene.worker()
    scene.hold(BACK)
    before = scene.submit(1.0, model=BACK)
    await scene.started(model=BACK)
    call = scene.submit(3.0, model=FRONT)
    await scene.queued(2, model=BACK)

    stopping = asyncio.create_task(scene.stop())
    await scene.queued(2, model=BACK)
    scene.go()

    assert [value(await before), value(await call)] == [1.0, 3.0]
    await stopping


async def test_a_drain_that_takes_too_long_abandons_its_calls(scene: InlineWorkers) -> None:
    """The called request leaves the queue; the caller's own stays, for another worker."""
    await models(scene)
    await scene.worker("w2", models=(BACK,))
    await scene.worker("w1", models=(FRONT,), drain_s=0.2)
    scene.hold(BACK)
    call = scene.submit(3.0, model=FRONT)
    await scene.started("w2", model=BACK)

    await scene.stop("w1")

    await scene.queued(0, model=BACK)
    await scene.queued(1, model=FRONT)
    scene.go()
    await scene.worker("w3", models=(FRONT,), lease_s=0.2, renew_every_s=0.05)
    assert value(await call) == 3.0


async def test_a_suspect_calls_a_model_of_its_worker(scene: InlineWorkers) -> None:
    """It runs alone but for what it calls; then the worker goes on."""
    await models(scene)
    call = scene.submit(3.0, model=FRONT)
    assert len(await scene.delivery.fetch([Lane(FRONT, 1)], "dead", 1, 1.0)) == 1
    await scene.worker(lease_s=0.3, renew_every_s=0.05)

    assert value(await call) == 3.0
    assert (await call).attempt == 2
    assert value(await scene.submit(4.0, model=FRONT)) == 4.0


class Countdown(StubBackend):
    """Calls its target, by default itself, with one less for as long as `x` is more than 0; answers how deep it was."""

    def execute(self, batch: Batch, ctx: Context) -> None:
        x = batch.inputs["x"]
        self.sizes.append(batch.size)
        if x.max() > 0:
            call = InferRequest(model=self._target or self.model, inputs=(from_numpy("x", x - 1),))
            x = to_numpy(ctx.call(call).outputs[0]) + 1
        respond_rows(batch, ctx, {"y": x}, {"y": "FP32"})


async def told(scene: InlineWorkers, depth: float, model: str = FRONT) -> float | str:
    answer = await scene.submit(depth, model=model)
    # Each model on the way back says which one failed.
    return value(answer) if answer.failure is None else answer.failure.message.rpartition(" failed: ")[2]


@pytest.mark.parametrize("hosts", [1, 2])
async def test_a_recursion_that_ends_works_and_a_deeper_one_is_refused_at_once(
    scene: InlineWorkers, hosts: int
) -> None:
    """With four instances, of one worker or of two, a model can be in the middle of three calls to itself."""
    scene.backend = Countdown
    await scene.model(FRONT, instances=4 // hosts)
    for number in range(hosts):
        await scene.worker(f"w{number}")
    scene.forget_started()

    assert await told(scene, 3) == 3
    assert await told(scene, 4) == (
        "model 'front' can't be called by model 'front': all 4 instances of 'front' would wait for this call "
        "(front -> front -> front -> front -> front); give 'front' more instances than its calls to itself are deep"
    )
    assert await told(scene, 3) == 3


@pytest.mark.parametrize("scheduler", ["", "dynamic_batching { }"], ids=["one by one", "batches"])
@pytest.mark.parametrize(("instances", "depth"), [(2, 1), (3, 2), (4, 1)])
async def test_many_chains_that_need_instances_of_one_model_go_on(
    scene: InlineWorkers, instances: int, depth: int, scheduler: str
) -> None:
    """Though all instances begin with a chain of their own, and none is left for the calls of any."""
    scene.backend = Countdown
    await scene.model(FRONT, instances=instances, scheduler=scheduler)
    await scene.worker()

    answers = await asyncio.gather(*[told(scene, depth) for _ in range(30)])

    assert answers == [depth] * 30
    await scene.queued(0, model=FRONT)


async def test_many_chains_that_need_more_instances_than_there_are_are_refused_at_once(scene: InlineWorkers) -> None:
    scene.backend = Countdown
    await scene.model(FRONT, instances=2, scheduler="")
    await scene.worker()

    answers = await asyncio.gather(*[told(scene, 5) for _ in range(30)])

    assert {str(answer).partition(" (")[0] for answer in answers} == {
        "model 'front' can't be called by model 'front': all 2 instances of 'front' would wait for this call"
    }


async def test_models_that_call_one_another_are_told_before_they_wait_for_themselves(scene: InlineWorkers) -> None:
    """Also in two workers: the chain travels with the request."""
    scene.backend = Countdown
    await scene.model(FRONT, mode=f"call:{BACK}")
    await scene.model(BACK, mode=f"call:{FRONT}")
    await scene.worker("w1", models=(FRONT,))
    await scene.worker("w2", models=(BACK,))

    assert await told(scene, 1) == 1
    assert await told(scene, 2) == (
        "model 'front' can't be called by model 'back': the only instance of 'front' would wait for this call "
        "(front -> back -> front); give 'front' more instances than its calls to itself are deep"
    )


async def test_the_second_call_works_once_another_worker_has_the_model(scene: InlineWorkers) -> None:
    """The view of the models is read again before a refusal."""
    scene.backend = Countdown
    await scene.model(FRONT)
    await scene.worker("w1")
    assert "would wait for this call" in str(await told(scene, 1))

    await scene.worker("w2")

    async def is_answered() -> bool:
        return await told(scene, 1) == 1

    await eventually(is_answered, description="a view of the models that has the second worker")


async def test_models_call_one_another_only_so_deep(scene: InlineWorkers) -> None:
    """The limit is a setting, and the refusal names the chain."""
    scene.backend, scene.limits = Countdown, LimitSettings(max_call_depth=2)
    await scene.model(FRONT, instances=5)
    await scene.worker()

    assert await told(scene, 2) == 2
    assert await told(scene, 3) == (
        "model 'front' can't be called: calls between models may be 2 deep, and this one is deeper "
        "(front -> front -> front -> front); end the recursion sooner, or raise QINFER_LIMITS__MAX_CALL_DEPTH"
    )
