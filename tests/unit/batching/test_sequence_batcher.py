"""The batcher of sequences: the inputs that it adds, the states that it keeps, and what it tells its outlet."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qinfer.backends.base import Array, Batch, Context
from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import Execution
from qinfer.batching.sequences.batcher import SequenceBatcher
from qinfer.batching.sequences.execution import IDLE_SLACK_S
from qinfer.batching.sequences.steps import PendingStep
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import QinferError, SequenceLost
from qinfer.models.sequence_spec import ControlKind, ControlSpec, DirectSpec, SequenceSpec, StateSpec
from qinfer.models.spec import ModelSpec
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.sequences.records import SequenceId, StepPlace
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer.testing import FakeClock, stub_spec
from tests.support.batching import Done

STATE = StateSpec(input="s", output="t", datatype="FP32", dims=(-1,), initial_dims=(1,))
CONTROLS = (
    ControlSpec(name="start", kind=ControlKind.START, datatype="FP32", true=1),
    ControlSpec(name="ready", kind=ControlKind.READY, datatype="INT32", true=1),
)


class Model:
    """Answers each row with the sum of `x` and `s`; remembers its inputs. Raises what it is told to.

    Attributes:
        grows: The state becomes longer by one with each step.
    """

    short_on_loop = False

    def __init__(self) -> None:
        self.inputs: list[Mapping[str, Array]] = []
        self.error: Exception | None = None
        self.grows = False
        self.answers_state = True
        self.deepens = False

    def execute(self, batch: Batch, ctx: Context) -> None:
        """See the class."""
        self.inputs.append(batch.inputs)
        if self.error is not None:
            raise self.error
        for item in range(len(batch.requests)):
            x, s = batch.inputs["x"][item : item + 1], batch.inputs.get("s")
            if s is None:
                ctx.respond(item, (from_numpy("y", x),))
                continue
            state = s[item : item + 1] + x[:, :1]
            if self.grows:
                state = np.concatenate([state, np.zeros((1, 1), "<f4")], axis=1)
            if self.deepens:
                state = state[np.newaxis]
            kept = (from_numpy("t", state),) if self.answers_state else ()
            ctx.respond(item, (from_numpy("y", state.reshape(1, -1)[:, :1]), *kept))


class Scene:
    """A batcher whose executions end when they are told to, and an outlet that remembers."""

    def __init__(self, sequences: SequenceSpec, instances: int = 1) -> None:
        spec = stub_spec()
        self.spec: ModelSpec = replace(
            spec,
            inputs=(replace(spec.inputs[0], dims=(1,)),),
            outputs=(replace(spec.outputs[0], dims=(1,)),),
            batching=None,
            sequences=sequences,
        )
        self.count = instances
        self.model = Model()
        self.running: list[tuple[Execution, Done, int]] = []
        self.done: list[tuple[PendingStep, Response]] = []
        self.ended: list[tuple[StepPlace, str]] = []
        self.idled: list[SequenceId] = []
        self.gone: list[SequenceId] = []
        clock = FakeClock()
        self.time = clock
        loaded = LoadedModel(spec=self.spec, version=1, generation=1, executor=self)
        initial = tuple(state.initial(None, batched=True) for state in sequences.states)
        self.batcher = SequenceBatcher(loaded, ServerClock(clock), self, initial=initial)
        self._numbers: dict[int, int] = {}

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """See `Executor`."""
        del execution, expected_s, instance
        return False

    def start(self, execution: Execution, done: Done, instance: int = 0) -> None:
        """See `Executor`."""
        self.running.append((execution, done, instance))

    def recall(self) -> list[Execution]:
        """See `Executor`."""
        return []

    def retire(self) -> None:
        """See `Executor`."""

    def executed(self, steps: Sequence[PendingStep], responses: Sequence[Response]) -> None:
        """See `StepOutlet`."""
        self.done += zip(steps, responses, strict=True)

    def broken(self, step: PendingStep, error: QinferError) -> None:
        """See `StepOutlet`."""
        self.ended.append((step.place, error.code))

    def idle(self, sequences: Sequence[SequenceId]) -> None:
        """See `StepOutlet`."""
        self.idled += sequences

    def lost(self, sequences: Sequence[SequenceId], error: QinferError) -> None:
        """See `StepOutlet`."""
        assert isinstance(error, SequenceLost)
        self.gone += sequences

    def adopt(self, correlation_id: int, committed: int = 0, states: tuple[Tensor, ...] | None = None) -> None:
        """Takes a sequence."""
        self._numbers[correlation_id] = committed
        self.batcher.adopt(SequenceId("", correlation_id), committed, states)

    def send(self, correlation_id: int, x: float, *, end: bool = False, left_s: float = 60.0) -> PendingStep:
        """Admits the next step of a sequence."""
        number = self._numbers[correlation_id] = self._numbers[correlation_id] + 1
        name = f"{correlation_id}.{number}"
        now_s = self.batcher._clock.now_s()
        request = InferRequest(model="stub", id=name, inputs=(from_numpy("x", np.full((1, 1), x, "<f4")),))
        lease = Lease(Entry(Lane("stub", 0, "steps"), f"{number}-0"), "w", b"", 1)
        place = StepPlace(SequenceId("", correlation_id), 1, number)
        step = PendingStep(
            rows=1,
            key=None,
            enqueued_s=now_s,
            deadline_s=now_s + left_s,
            lease=lease,
            request=request,
            place=place,
            token=1,
            start=number == 1,
            end=end,
        )
        self.batcher.add_step(step)
        self.batcher.pump()
        return step

    def end(self) -> None:
        """Ends all executions that run now."""
        running, self.running = self.running, []
        for execution, done, _ in running:
            execution.run(self.model)  # type: ignore[arg-type]  # a backend that only executes
            done(execution)

    @property
    def values(self) -> dict[str, Any]:
        """Request id → its output, or the code of its failure."""
        return {
            r.request_id: float(to_numpy(r.outputs[0]).ravel()[0]) if r.failure is None else r.failure.code
            for _, r in self.done
        }


def direct(*, states: tuple[StateSpec, ...] = (STATE,), slots: int = 4) -> SequenceSpec:
    """Returns sequences of the strategy `direct`."""
    return SequenceSpec(
        strategy=DirectSpec(), slots=slots, max_rows=slots, max_idle_s=5.0, controls=CONTROLS, states=states
    )


async def test_rows_of_other_slots_are_padding() -> None:
    scene = Scene(direct())
    for correlation_id in (1, 2, 3):
        scene.adopt(correlation_id)
    scene.send(1, 1.0)
    scene.end()
    scene.send(2, 2.0)
    scene.end()
    scene.send(3, 3.0)
    scene.end()
    scene.send(3, 4.0)
    scene.end()

    last = scene.model.inputs[-1]
    assert last["ready"].ravel().tolist() == [0, 0, 1]
    assert last["start"].ravel().tolist() == [0, 0, 0]
    assert last["x"].ravel().tolist() == [0, 0, 4]
    assert last["s"].ravel().tolist() == [0, 0, 3]
    assert scene.values == {"1.1": 1, "2.1": 2, "3.1": 3, "3.2": 7}


async def test_states_of_other_shapes_run_in_other_batches() -> None:
    scene = Scene(direct())
    scene.model.grows = True
    scene.adopt(1)
    scene.adopt(2)
    scene.send(1, 1.0)
    scene.end()
    scene.send(1, 1.0)
    assert len(scene.running) == 1
    scene.send(2, 5.0)
    scene.send(1, 1.0)
    scene.end()
    while scene.running:
        scene.end()

    assert scene.values == {"1.1": 1, "1.2": 2, "1.3": 3, "2.1": 5}
    assert [inputs["s"].shape[1] for inputs in scene.model.inputs] == [1, 2, 1, 3]


async def test_a_step_that_fails_leaves_the_state_as_it_was() -> None:
    scene = Scene(direct())
    scene.adopt(1)
    scene.send(1, 1.0)
    scene.end()
    scene.model.error = ValueError("no")
    failed = scene.send(1, 2.0)
    scene.end()
    scene.model.error = None
    scene.send(1, 3.0)
    scene.end()

    assert scene.values == {"1.1": 1, "1.2": "inference_failed", "1.3": 4}
    assert failed.state == ()


@pytest.mark.parametrize("fault", [{"answers_state": False}, {"deepens": True}], ids=["left out", "another rank"])
async def test_a_state_that_is_not_as_declared_fails_the_step(fault: dict[str, bool]) -> None:
    """Outputs of other shapes are passed on; states are stored as they are declared only."""
    scene = Scene(direct())
    vars(scene.model).update(fault)
    scene.adopt(1)
    scene.send(1, 1.0)
    scene.end()

    assert scene.values == {"1.1": "output_mismatch"}


async def test_an_adopted_sequence_goes_on_from_its_states() -> None:
    scene = Scene(direct())
    scene.adopt(1, 4, (from_numpy("s", np.array([[10.0]], "<f4")),))
    step = scene.send(1, 1.0)
    scene.end()

    assert scene.values == {"1.5": 11}
    assert to_numpy(step.state[0]).tolist() == [[11.0]]
    assert scene.model.inputs[0]["start"].tolist() == [[0.0]]


async def test_a_dropped_sequence_is_not_answered() -> None:
    scene = Scene(direct())
    scene.adopt(1)
    running, waiting = scene.send(1, 1.0), scene.send(1, 2.0)
    scene.batcher.drop(SequenceId("", 1))
    scene.end()

    assert scene.done == []
    assert (running.lost, waiting.lost) == (True, True)
    assert (scene.batcher.has_work, scene.batcher.free_slots) == (False, 4)


async def test_a_step_that_expires_breaks_its_sequence_once() -> None:
    scene = Scene(direct())
    scene.adopt(1)
    scene.send(1, 1.0)
    scene.send(1, 2.0, left_s=1.0)
    scene.send(1, 3.0)
    scene.time.advance(2.0)
    scene.end()

    assert scene.ended == [(StepPlace(SequenceId("", 1), 1, 2), "deadline_exceeded")]
    assert scene.running == []
    assert not scene.batcher.has_work


async def test_the_cancel_of_a_step_that_waits_breaks_its_sequence_there() -> None:
    scene = Scene(direct())
    scene.adopt(1)
    for number in (1.0, 2.0, 3.0, 4.0):
        scene.send(1, number)

    is_broken = scene.batcher.cancel(SequenceId("", 1), 3)
    scene.end()
    scene.end()

    assert is_broken
    assert scene.ended == [(StepPlace(SequenceId("", 1), 1, 3), "cancelled")]
    assert scene.values == {"1.1": 1, "1.2": 3}
    assert not scene.batcher.has_work


async def test_a_step_that_executes_or_is_not_here_is_not_cancelled() -> None:
    scene = Scene(direct())
    scene.adopt(1)
    scene.send(1, 1.0)

    assert not scene.batcher.cancel(SequenceId("", 1), 1)
    assert not scene.batcher.cancel(SequenceId("", 1), 2)
    assert not scene.batcher.cancel(SequenceId("", 2), 1)


async def test_an_idle_sequence_is_told() -> None:
    scene = Scene(direct())
    scene.adopt(1)
    scene.send(1, 1.0)
    scene.end()
    scene.time.advance(5.0)
    scene.adopt(2)
    scene.send(2, 1.0)
    assert scene.idled == []
    scene.time.advance(IDLE_SLACK_S)
    scene.end()

    assert scene.idled == [SequenceId("", 1)]


async def test_a_lost_memory_ends_the_sequences_of_its_instance_only() -> None:
    """None of their steps is executed any more."""
    scene = Scene(direct(states=(), slots=1), instances=2)
    scene.adopt(1)
    scene.send(1, 1.0)
    scene.end()
    scene.adopt(2)
    scene.send(2, 1.0)
    scene.end()
    scene.model.error = SequenceLost("the process died")
    scene.send(2, 1.0)
    scene.send(2, 1.0)
    scene.end()

    assert scene.gone == [SequenceId("", 2)]
    assert scene.values == {"1.1": 1, "2.1": 1}
    assert (scene.running, scene.batcher.waiting) == ([], 0)


async def test_nothing_begins_while_it_is_paused() -> None:
    scene = Scene(direct())
    scene.adopt(1)
    await scene.batcher.pause_batching()
    scene.send(1, 1.0)
    assert scene.running == []

    scene.batcher.resume_batching()

    assert len(scene.running) == 1


@pytest.mark.parametrize("end", [True, False])
async def test_end_frees_the_slot(end: bool) -> None:  # noqa: FBT001
    scene = Scene(direct(slots=1))
    scene.adopt(1)
    scene.send(1, 1.0, end=end)
    scene.end()

    assert scene.batcher.free_slots == int(end)
