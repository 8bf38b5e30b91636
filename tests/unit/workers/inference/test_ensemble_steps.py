"""Steps of stateful ensembles: the numbers that their stateful models get, and when a sequence can't go on."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from qinfer.batching.batcher import LoadedModel
from qinfer.batching.sequences.steps import PendingStep
from qinfer.core.clock import ServerClock
from qinfer.core.messages import Failure, InferRequest, OutgoingRequest, Response
from qinfer.core.messages import SequenceFlags as Flags
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import DeadlineExceeded, InferenceFailed, QinferError, QueueFull, SequenceLost
from qinfer.models.ensemble_graph import PlanStep, ResolvedModel, plan_ensemble
from qinfer.models.sequence_spec import DirectSpec, SequenceSpec
from qinfer.models.spec import EnsembleStep, ModelSpec
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.sequences.records import SequenceId, StepPlace
from qinfer.submission.pending import ResponseSink
from qinfer.tensors import from_numpy, to_numpy
from qinfer.testing import FakeClock, stub_spec
from qinfer_workers.inference.ensembles.runs import EnsembleSteps, NestedCounts, NoInstances, RunParts
from tests.support.timers import settle_loop

ID = SequenceId("", 5)
OUTPUT = from_numpy("y", np.zeros((1, 2), "<f4"))


def spec_of(name: str) -> ModelSpec:
    """Returns a model; one whose name begins with `s` is stateful."""
    sequences = SequenceSpec(strategy=DirectSpec(), slots=1, max_rows=1)
    return replace(stub_spec(), name=name, sequences=sequences if name.startswith("s") else None)


class Open:
    """A step of the plan that was submitted."""

    def __init__(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, *, is_near: bool) -> None:
        self.model, self.request, self.is_near = step.model.name, request, is_near
        self._sink = sink
        self.is_taken = step.model.is_stateful
        self.is_cancelled = False
        self.is_executed = True

    def cancel(self) -> None:
        self.is_cancelled = True

    def took(self, nbytes: int) -> None:
        raise AssertionError("no step is decoupled", nbytes)

    async def answer(self, error: QinferError | None = None) -> None:
        failure = None if error is None else Failure.from_error(error)
        response = Response(request_id="s", outputs=() if failure else (OUTPUT,), failure=failure)
        self._sink.deliver(msgspec.structs.replace(response, model=self.model if self.is_executed else ""))
        await settle_loop()


class Way:
    """A way of steps to the test."""

    def __init__(self, opened: list[Open], *, is_near: bool) -> None:
        self._opened, self._is_near = opened, is_near

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> Open:
        assert timeout_s > 0
        self._opened.append(Open(step, request, sink, is_near=self._is_near))
        return self._opened[-1]

    async def look_again(self) -> None:
        """Every model is ready."""


class Scene:
    """An ensemble of models one behind the other, and what becomes of the steps of its sequence 5."""

    def __init__(self, *models: str, are_parallel: bool = False) -> None:
        tensors = ["x", *[f"t{index}" for index in range(1, len(models))], "y"]
        steps = tuple(
            EnsembleStep(name, 0, {"x": tensors[index]}, {"y": tensors[index + 1]}) for index, name in enumerate(models)
        )
        spec = replace(stub_spec("e"), steps=steps)
        if are_parallel:
            steps = tuple(EnsembleStep(name, 0, {"x": "x"}, {"y": name}) for name in models)
            outputs = tuple(replace(spec.outputs[0], name=name) for name in models)
            spec = replace(spec, steps=steps, outputs=outputs)
        made = plan_ensemble(spec, lambda step: ResolvedModel(spec_of(step.model), 1))
        self.opened: list[Open] = []
        self.done: list[tuple[PendingStep, Response]] = []
        self.ended: list[tuple[PendingStep, QinferError]] = []
        near, far = Way(self.opened, is_near=True), Way(self.opened, is_near=False)
        parts = RunParts(ServerClock(FakeClock(1.0), 0.0), near, far, NestedCounts(MetricsSettings()), self._follow)
        model = LoadedModel(spec=made.spec, version=1, generation=1, executor=NoInstances())
        self.steps = EnsembleSteps(model, made, parts, self)
        self.steps.adopt(ID, 0, None)

    async def _follow(self) -> None:
        """Waits for nothing."""

    def executed(self, steps: Sequence[PendingStep], responses: Sequence[Response]) -> None:
        self.done += zip(steps, responses, strict=True)

    def broken(self, step: PendingStep, error: QinferError) -> None:
        self.ended.append((step, error))

    def idle(self, sequences: Sequence[SequenceId]) -> None:
        """Is of no interest."""

    def lost(self, sequences: Sequence[SequenceId], error: QinferError) -> None:
        """Is of no interest."""

    async def send(
        self, number: int, *, deliveries: int = 1, end: bool = False, deadline_s: float = 1e12
    ) -> PendingStep:
        """Sends a step to the ensemble."""
        request = InferRequest(
            model="e",
            id=f"r{number}",
            reply_to="reply:g",
            inputs=(from_numpy("x", np.zeros((1, 2), "<f4")),),
            sequence=Flags(5, start=number == 1, end=end),
        )
        step = PendingStep(
            rows=1,
            key=None,
            enqueued_s=0.0,
            deadline_s=deadline_s,
            alone=deliveries > 1,
            lease=Lease(Entry(Lane("e", 1), "1-0"), "", b"", deliveries),
            request=request,
            place=StepPlace(ID, 1, number),
            token=1,
            start=number == 1,
            end=end,
        )
        self.steps.add_step(step)
        self.steps.pump()
        await settle_loop()
        return step

    def counts(self) -> list[int]:
        """Returns the state that the last step has left."""
        return list(to_numpy(self.done[-1][0].state[0]))


@pytest.fixture
async def scene() -> Scene:
    return Scene("before", "state", "behind")


async def test_stateful_models_get_flags_and_numbers(scene: Scene) -> None:
    for number in (1, 2):
        await scene.send(number, end=number == 2)
        for _ in range(3):
            await scene.opened[-1].answer()

    assert [one.model for one in scene.opened] == ["before", "state", "behind"] * 2
    assert [one.request.sequence for one in scene.opened[:3]] == [None, Flags(5, start=True, step=1), None]
    assert scene.opened[4].request.sequence == Flags(5, end=True, step=2)
    assert [one.request.step_key for one in scene.opened if one.request.sequence] == ["r1/state", ""]
    assert scene.counts() == [2]


async def test_one_step_of_a_sequence_at_a_time(scene: Scene) -> None:
    await scene.send(1)
    await scene.send(2)
    assert (len(scene.opened), scene.steps.waiting, scene.steps.executing) == (1, 1, 1)

    for _ in range(3):
        await scene.opened[-1].answer()

    assert [one.model for one in scene.opened[3:]] == ["before"]
    assert (scene.steps.waiting, scene.steps.executing) == (0, 1)


async def test_a_failure_behind_a_stateful_model_has_changed_it(scene: Scene) -> None:
    step = await scene.send(1)
    for error in (None, None, InferenceFailed("no")):
        await scene.opened[-1].answer(error)

    assert scene.done[0][1].failure is not None
    assert (scene.counts(), step.changes_failing) == ([1], True)


async def test_a_failure_before_a_stateful_model_has_not(scene: Scene) -> None:
    await scene.send(1)
    await scene.opened[-1].answer(InferenceFailed("no"))
    assert scene.counts() == [0]

    await scene.send(2)
    await scene.opened[-1].answer()

    assert "must specify the START flag" in str(scene.done[-1][1].failure)


async def test_whoever_takes_over_goes_on_with_the_numbers(scene: Scene) -> None:
    state = (from_numpy("steps", np.array([7], "<i8")),)
    scene.steps.drop(ID)
    scene.steps.adopt(ID, 9, state)

    await scene.send(10)
    await scene.opened[-1].answer()

    assert scene.opened[-1].request.sequence == Flags(5, step=8)


async def test_a_refused_step_has_no_number(scene: Scene) -> None:
    await scene.send(1)
    await scene.opened[-1].answer()
    scene.opened[-1].is_taken = scene.opened[-1].is_executed = False
    await scene.opened[-1].answer(QueueFull("full"))

    assert (scene.counts(), scene.ended) == ([0], [])


@pytest.mark.parametrize("error", [None, InferenceFailed("no")])
async def test_an_answer_that_comes_before_the_word_that_a_step_was_taken(
    scene: Scene, error: QinferError | None
) -> None:
    await scene.send(1)
    await scene.opened[-1].answer()
    scene.opened[-1].is_taken = False
    await scene.opened[-1].answer(error)
    if error is None:
        await scene.opened[-1].answer()

    assert (scene.counts(), scene.ended) == ([1], [])


@pytest.mark.parametrize("error", [SequenceLost("gone"), DeadlineExceeded("late")])
async def test_failures_that_end_a_sequence(scene: Scene, error: QinferError) -> None:
    """No further step is run; the error is of the kind that the step had."""
    await scene.send(1)
    await scene.send(2)
    await scene.opened[-1].answer()
    await scene.opened[-1].answer(error)

    ((step, ended),) = scene.ended
    assert (step.place.number, type(ended)) == (1, type(error))
    assert (scene.done, len(scene.opened)) == ([], 2)


async def test_a_failure_of_a_step_that_may_have_come_further_before(scene: Scene) -> None:
    """Its worker has died, and nobody knows whether the stateful model has got it."""
    await scene.send(1, deliveries=2)
    assert not scene.opened[-1].is_near

    await scene.opened[-1].answer(InferenceFailed("no"))

    assert [type(error) for _, error in scene.ended] == [InferenceFailed]


async def test_a_step_that_is_too_late(scene: Scene) -> None:
    await scene.send(1, deadline_s=0.0)

    assert [type(error) for _, error in scene.ended] == [DeadlineExceeded]
    assert scene.opened == []


async def test_what_is_dropped_is_not_answered(scene: Scene) -> None:
    step = await scene.send(1)
    await scene.send(2)

    scene.steps.drop(ID)
    await scene.opened[-1].answer()
    await scene.steps.pause_batching()

    assert step.lost
    assert scene.opened[0].is_cancelled
    assert (scene.steps.waiting, scene.steps.executing, scene.done) == (0, 0, [])


async def test_a_pause_begins_nothing(scene: Scene) -> None:
    scene.steps.hold()
    await scene.send(1)
    assert scene.opened == []

    scene.steps.resume_batching()
    await settle_loop()

    assert len(scene.opened) == 1


async def test_a_failure_beside_a_step_whose_fate_is_unknown() -> None:
    """Steps side by side are submitted at once; one that fails cancels the others."""
    scene = Scene("before", "state", are_parallel=True)
    scene.steps.adopt(ID, 0, None)
    await scene.send(1)
    plain, stateful = sorted(scene.opened, key=lambda one: one.model)
    stateful.is_taken = False

    await plain.answer(InferenceFailed("no"))

    assert [type(error) for _, error in scene.ended] == [InferenceFailed]
    assert stateful.is_cancelled


@pytest.mark.parametrize("is_taken", [True, False])
async def test_a_failure_beside_a_step_that_was_answered(*, is_taken: bool) -> None:
    scene = Scene("before", "state", are_parallel=True)
    scene.steps.adopt(ID, 0, None)
    await scene.send(1)
    plain, stateful = sorted(scene.opened, key=lambda one: one.model)
    stateful.is_taken = is_taken

    await asyncio.gather(stateful.answer(), plain.answer(InferenceFailed("no")))

    assert (scene.counts(), scene.ended) == ([1], [])
