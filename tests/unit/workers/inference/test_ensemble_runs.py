"""The way of a request through an ensemble with decoupled steps: order, the window, the last response, failures."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from qinfer.batching.execution import WorkItem
from qinfer.core.messages import Failure, InferRequest, OutgoingRequest, Response, Scalar, SequenceFlags
from qinfer.errors import InferenceFailed, QueueFull
from qinfer.models.ensemble_graph import EnsemblePlan, PlanStep, ResolvedModel, plan_ensemble
from qinfer.models.spec import EnsembleStep, ModelSpec
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.submission.pending import ResponseSink
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer.testing import stub_spec
from qinfer_workers.inference.ensembles.run import MAX_BRANCHES, EnsembleRun, StepFailed
from qinfer_workers.inference.ensembles.steps import StepWay
from tests.support.timers import settle_loop

NBYTES = 4
FAILED = Failure.from_error(InferenceFailed("no"))


def value(number: float, name: str = "y") -> Tensor:
    return from_numpy(name, np.array([[number]], "<f4"))


def number_of(tensors: Iterable[Tensor]) -> float:
    (tensor,) = tensors
    return float(to_numpy(tensor).flat[0])


class Open:
    """A step that was submitted: its request, its sink, and what was done with it."""

    def __init__(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink) -> None:
        self.model, self.request, self.sink = step.model.name, request, sink
        self.number = number_of(request.inputs)
        self.taken_bytes = 0
        self.is_cancelled = self.is_taken = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def took(self, nbytes: int) -> None:
        self.taken_bytes += nbytes

    def give(self, *numbers: float, final: bool = False) -> None:
        """Gives responses, the last of which may be the final one."""
        for index, number in enumerate(numbers):
            is_final = final and index == len(numbers) - 1
            self.sink.deliver(Response(request_id="s", outputs=(value(number),), final=is_final))

    def answer(self, number: float) -> None:
        self.give(number, final=True)

    def end(self, failure: Failure | None = None, *, final: bool = True) -> None:
        """Ends without a response, or fails."""
        self.sink.deliver(Response(request_id="s", failure=failure, final=final))


class Scene:
    """A run of a chain of models `x` → `y`, with steps that the test answers; names with an `s` are decoupled."""

    def __init__(self, *models: str, most: int = 0, dims: tuple[int, ...] | None = None) -> None:
        specs = {name: self._model(name) for name in models}
        tensors = ["x", *[f"t{index}" for index in range(1, len(models))], "y"]
        steps = tuple(
            EnsembleStep(name, 0, {"x": tensors[index]}, {"y": tensors[index + 1]}) for index, name in enumerate(models)
        )
        spec = replace(self._model("e"), steps=steps, max_inflight=most)
        if dims is not None:
            outputs = tuple(replace(output, dims=dims, reshape=output.dims) for output in spec.outputs)
            spec = replace(spec, outputs=outputs)
        self.plan: EnsemblePlan = plan_ensemble(spec, lambda step: ResolvedModel(specs[step.model], 1))
        self.opened: list[Open] = []
        self.refused: set[str] = set()
        self.room_count = 10**6
        self.sent: list[tuple[float, bool]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.told: list[Mapping[str, Scalar]] = []
        self.has_room = asyncio.Event()
        request = InferRequest(model="e", inputs=(value(7, "x"),), sequence=SequenceFlags(5, end=True))
        lease = Lease(Entry(Lane("e", 1), "1-0"), "", b"")
        item = WorkItem(rows=1, key=None, enqueued_s=0.0, deadline_s=9.0, lease=lease, request=request)
        self.run = EnsembleRun(item, self.plan, StepWay(self, lambda: 1.0), self)
        self.running = asyncio.create_task(self.run.run())

    def _model(self, name: str) -> ModelSpec:
        return replace(stub_spec(), name=name, decoupled=name.startswith("s"))

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> Open:
        assert timeout_s == 8.0
        if step.model.name in self.refused:
            raise QueueFull("full")
        self.opened.append(Open(step, request, sink))
        return self.opened[-1]

    async def look_again(self) -> None:
        """Every model is ready."""

    def send(self, outputs: tuple[Tensor, ...], *, final: bool) -> bool:
        if len(self.sent) >= self.room_count:
            return False
        self.sent.append((number_of(outputs), final))
        self.shapes.append(outputs[0].shape)
        self.told.append(self.run.parameters)
        return True

    async def room(self) -> None:
        await self.has_room.wait()

    async def open(self, model: str) -> list[Open]:
        await settle_loop()
        return [one for one in self.opened if one.model == model and not one.is_cancelled]

    async def has_ended(self) -> bool:
        await settle_loop()
        return self.running.done()

    async def outcome(self) -> tuple[Tensor, ...]:
        async with asyncio.timeout(5.0):
            return await self.running

    async def left(self) -> list[tuple[float, bool]]:
        """Returns the responses that have left, and whether each was final."""
        await settle_loop()
        return self.sent

    async def source(self) -> Open:
        """Returns the first step, once it is submitted."""
        await settle_loop()
        return self.opened[0]

    async def make_room(self, room: int) -> None:
        """Lets so many responses leave."""
        self.room_count = room
        self.has_room.set()
        await settle_loop()


@pytest.fixture
async def scene() -> Scene:
    """Returns a run of a decoupled step and one behind it."""
    return Scene("source", "twice")


async def test_each_response_goes_through_the_steps_behind_it(scene: Scene) -> None:
    source = await scene.source()
    source.give(1, 2)
    first, second = await scene.open("twice")

    second.answer(4)
    assert await scene.left() == []
    first.answer(2)

    assert (first.number, second.number) == (1, 2)
    assert await scene.left() == [(2, False), (4, False)]
    assert not await scene.has_ended()
    source.end()
    assert await scene.outcome() == ()


async def test_the_last_response_is_final_if_the_step_says_so(scene: Scene) -> None:
    source = await scene.source()
    source.give(1, 2, final=True)

    for step in await scene.open("twice"):
        step.answer(step.number * 2)

    assert await scene.left() == [(2, False), (4, True)]
    assert await scene.outcome() == ()


async def test_the_last_response_is_final_if_the_step_ends_before_it_leaves(scene: Scene) -> None:
    """A client that asked for no empty responses sees the end by it."""
    source = await scene.source()
    source.give(1, 2)
    first, second = await scene.open("twice")

    source.end()
    first.answer(2)
    second.answer(4)

    assert await scene.left() == [(2, False), (4, True)]
    assert await scene.outcome() == ()


async def test_a_response_that_waits_for_room_is_final_if_the_step_ends_meanwhile(scene: Scene) -> None:
    source = await scene.source()
    scene.room_count = 0
    source.give(1)
    (await scene.open("twice"))[0].answer(2)
    await settle_loop()

    source.end()
    await scene.make_room(1)

    assert await scene.left() == [(2, True)]
    assert await scene.outcome() == ()


async def test_behind_two_decoupled_steps_the_last_response_of_both_is_final() -> None:
    scene = Scene("source", "second", "twice")
    source = await scene.source()
    source.give(1, 2)
    source.end()
    first, second = await scene.open("second")

    for step in (first, second):
        step.give(step.number)
        step.end()
    for step in await scene.open("twice"):
        step.answer(step.number)
    (await scene.open("twice"))[-1].answer(2)

    assert await scene.left() == [(1, False), (2, True)]
    assert await scene.outcome() == ()


async def test_each_response_names_the_sequence_of_the_request(scene: Scene) -> None:
    """A step's response may tell of another one, whose flags are false unless it tells them, too."""
    source = await scene.source()
    source.give(1, 2)
    first, second = await scene.open("twice")

    first.answer(2)
    parameters: dict[str, Scalar] = {"sequence_id": "other", "sequence_start": True, "more": 1}
    second.sink.deliver(Response(request_id="s", outputs=(value(4),), parameters=parameters))

    assert len(await scene.left()) == 2
    assert scene.told == [
        {"sequence_id": 5, "sequence_start": False, "sequence_end": True},
        {"sequence_id": "other", "sequence_start": True, "sequence_end": False},
    ]


async def test_no_response_is_final_before_a_failure(scene: Scene) -> None:
    source = await scene.source()
    source.give(1)
    (step,) = await scene.open("twice")
    source.end(FAILED)

    step.answer(1)

    assert await scene.left() == [(1, False)]
    with pytest.raises(StepFailed):
        await scene.outcome()


async def test_no_response_at_all(scene: Scene) -> None:
    scene.opened[0].end()

    assert await scene.left() == []
    assert await scene.outcome() == ()


async def test_what_has_no_room_waits_and_keeps_the_source_waiting(scene: Scene) -> None:
    source = await scene.source()
    source.give(1, 2)
    scene.room_count = 1
    for step in await scene.open("twice"):
        step.answer(step.number)
    assert (await scene.left(), source.taken_bytes) == ([(1, False)], NBYTES)

    await scene.make_room(2)

    assert (await scene.left(), source.taken_bytes) == ([(1, False), (2, False)], 2 * NBYTES)


@pytest.mark.parametrize("most", [0, 3])
async def test_few_responses_are_under_way_at_once(most: int) -> None:
    scene = Scene("source", "twice", most=most)
    source = await scene.source()
    source.give(*range(100))
    limit = most or MAX_BRANCHES
    await settle_loop()
    assert [step.number for step in scene.opened[1:]] == list(range(limit))

    scene.opened[1].answer(0)
    await settle_loop()

    assert scene.opened[-1].number == limit
    assert len(scene.opened) == limit + 2
    assert source.taken_bytes == NBYTES


async def test_decoupled_steps_behind_one_another() -> None:
    """Order is that of the first, and within each of its responses that of the second."""
    scene = Scene("source", "second", "twice")
    source = await scene.source()
    source.give(1, 2, final=True)
    first, second = await scene.open("second")

    second.give(21, 22, final=True)
    assert await scene.open("twice") == []
    first.give(11)
    for step in await scene.open("twice"):
        step.answer(step.number)
    await settle_loop()
    first.end()
    for step in (await scene.open("twice"))[1:]:
        step.answer(step.number)

    assert await scene.left() == [(11, False), (21, False), (22, True)]
    assert first.taken_bytes == NBYTES
    assert await scene.outcome() == ()


async def test_a_step_before_a_decoupled_one() -> None:
    scene = Scene("twice", "source")
    (await scene.open("twice"))[0].answer(3)
    (source,) = await scene.open("source")

    source.give(source.number, 4)
    await settle_loop()
    source.end()

    assert await scene.left() == [(3, False), (4, False)]
    assert await scene.outcome() == ()


async def failure_of(scene: Scene) -> str:
    with pytest.raises(StepFailed) as failed:
        await scene.outcome()
    return failed.value.failure.message


async def test_a_failure_leaves_behind_the_responses_before_it(scene: Scene) -> None:
    source = await scene.source()
    source.give(1, 2, 3)
    first, second, third = await scene.open("twice")

    second.end(FAILED)
    third.answer(3)
    assert (await scene.left(), await scene.has_ended()) == ([], False)
    first.answer(1)

    assert await scene.left() == [(1, False)]
    assert await failure_of(scene) == "in ensemble 'e', step of model 'twice': no"
    assert source.is_cancelled


@pytest.mark.parametrize("final", [True, False])
async def test_the_failure_of_a_decoupled_step(scene: Scene, final: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A failure is the last that an ensemble sends, even where the step would go on."""
    source = await scene.source()
    source.give(1)

    source.end(FAILED, final=final)
    assert not await scene.has_ended()
    (await scene.open("twice"))[0].answer(1)

    assert await scene.left() == [(1, False)]
    assert await failure_of(scene) == "in ensemble 'e', step of model 'source': no"
    assert source.is_cancelled is not final


async def test_a_response_that_does_not_fit_the_reshape_of_the_output() -> None:
    """Those before it have left in their new shape; it ends the run."""
    scene = Scene("source", dims=(1, 1))
    source = await scene.source()
    source.give(1)

    source.sink.deliver(Response(request_id="s", outputs=(from_numpy("y", np.ones((1, 3), "<f4")),), final=False))

    assert (await scene.left(), scene.shapes) == ([(1, False)], [(1, 1, 1)])
    expected = "in ensemble 'e', 'y' gets FP32[1, 3], but an ensemble's configuration reshapes it to [1, 1, 1]"
    assert await failure_of(scene) == expected
    assert source.is_cancelled


async def test_a_step_that_is_refused(scene: Scene) -> None:
    scene.refused.add("twice")

    scene.opened[0].give(1)

    assert await failure_of(scene) == "in ensemble 'e', step of model 'twice': full"
    assert scene.opened[0].is_cancelled


async def test_nothing_goes_on_after_a_stop(scene: Scene) -> None:
    source = await scene.source()
    source.give(1)
    (step,) = await scene.open("twice")

    scene.running.cancel()
    await settle_loop()

    assert source.is_cancelled
    assert step.is_cancelled
    step.answer(1)
    source.give(2)
    assert (await scene.left(), scene.running.cancelled(), len(scene.opened)) == ([], True, 2)


async def test_a_stop_while_a_response_leaves(scene: Scene) -> None:
    """The parts behind it wait for it, and the request waits for the last of them."""
    source = await scene.source()
    source.give(1, 2, final=True)
    first, _ = await scene.open("twice")

    first.answer(1)
    scene.running.cancel()
    await settle_loop()

    assert scene.running.cancelled()
