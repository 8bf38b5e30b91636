"""One batch of steps on its way through an instance, with the inputs and states that the server adds and keeps.

    steps, their states → assemble_steps → Batch → StepExecution → answers, and the states after them
                                                  or StreamedSteps → streams, where the model is decoupled

The strategy `direct` pads rows of empty slots.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from qinfer.backends.base import Array, Backend, Batch
from qinfer.batching.assemble import assemble, stack
from qinfer.batching.execution import Answer, Execution
from qinfer.batching.sequences.controls import control_inputs, padded
from qinfer.batching.sequences.steps import StepBatch
from qinfer.batching.streams import ItemStream, StreamedExecution
from qinfer.core.messages import InferRequest, Scalar
from qinfer.errors import InferenceFailed, OutputMismatch, QinferError, SequenceLost
from qinfer.models.sequence_spec import SequenceSpec, StateSpec
from qinfer.models.spec import ModelSpec
from qinfer.tensors import Tensor, to_numpy

States = tuple[Tensor, ...]
"""States in the order of `SequenceSpec.states`."""


def assemble_steps(batch: StepBatch[Any], states: Sequence[States], spec: ModelSpec) -> Batch:
    """Builds a batch of steps, with controls and states."""
    assert spec.sequences is not None, "only a model with sequences has steps"
    steps = batch.steps
    requests = [step.item.request for step in steps]
    own = assemble(requests, [1] * len(steps)).inputs
    columns = [list(column) for column in zip(*states, strict=True)]
    kept = {
        column[0].name: stack(column[0], column, len(steps)) if len(steps) > 1 else to_numpy(column[0])
        for column in columns
    }
    controls = control_inputs(batch.rows, spec.sequences.controls, batched=spec.max_batch_size > 0)
    inputs: Mapping[str, Array] = {**padded({**own, **kept}, batch.rows), **controls}
    filling = InferRequest(model=spec.name, inputs=())
    return Batch(
        requests=[filling if step is None else step.item.request for step in batch.rows],
        rows=[1] * len(batch.rows),
        inputs=inputs,
        states=tuple(state.output for state in spec.sequences.states),
    )


class StreamedSteps(StreamedExecution, kw_only=True, eq=False):
    """A decoupled iterative model's batch: streams continue in the next execution."""

    steps: StepBatch[Any]
    positions: list[int] = msgspec.field(default_factory=list)
    again: set[int] = msgspec.field(default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.positions = positions_of(self.steps)

    @property
    def states(self) -> list[States]:
        """Empty: stateful models have one response."""
        return [()] * len(self.items)

    def respond(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Sends a response, except to padding."""
        if self.positions[item] >= 0:
            super().respond(self.positions[item], outputs, final=final, parameters=parameters)

    def offer(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Sends a response at once, except to padding."""
        if self.positions[item] >= 0:
            super().offer(self.positions[item], outputs, final=final, parameters=parameters)

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        """Calls back; see `Context.on_taken`."""
        if self.positions[item] >= 0:
            super().on_taken(self.positions[item], callback)

    def cancelled(self, item: int) -> bool:
        """Returns whether the caller has left; true for padding."""
        return self.positions[item] < 0 or super().cancelled(self.positions[item])

    def waits(self, item: int) -> bool:
        """Returns whether the model waits for this caller."""
        return self.positions[item] >= 0 and super().waits(self.positions[item])

    def reschedule(self, item: int, states: States = ()) -> None:
        """Executes an item again; see `Context.reschedule`."""
        del states
        if self.positions[item] >= 0:
            self.again.add(self.positions[item])

    def run(self, backend: Backend) -> None:
        """Executes the batch; an error ends all streams."""
        super().run(backend)
        open_ = {at for at, stream in enumerate(self.streams) if not (stream.has_ended or stream.is_over)}
        self.again &= open_ if self.error is None else set()

    def _open_streams(self) -> list[ItemStream]:
        steps = self.steps.steps
        return [(self.table.open if step.start else self.table.reopen_stream)(step.item, self) for step in steps]

    def _ended_by(self, error: QinferError, stream: ItemStream) -> QinferError:
        """Turns a lost sequence into a failure, since no item starts again."""
        del stream
        return InferenceFailed(error.message) if isinstance(error, SequenceLost) else error


class StepExecution(Execution, kw_only=True, eq=False):
    """A batch of steps that runs or has run.

    Attributes:
        states: The states after each item; empty = unchanged.
    """

    steps: StepBatch[Any]
    sequences: SequenceSpec
    positions: list[int] = msgspec.field(default_factory=list)
    states: list[States] = msgspec.field(default_factory=list)
    again: set[int] = msgspec.field(default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.positions = positions_of(self.steps)
        self.states = [()] * len(self.items)

    def respond(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Takes an answer; drops answers to padding."""
        position = self.positions[item]
        if position >= 0:
            super().respond(position, outputs, final=final, parameters=parameters)

    def reschedule(self, item: int, states: States = ()) -> None:
        """Executes an item again; see `Context.reschedule`."""
        if not self.sequences.iterative:
            super().reschedule(item, states)
        position = self.positions[item]
        if position >= 0:
            super().respond(position, states)
            self.again.add(position)

    def cancelled(self, item: int) -> bool:
        """Returns whether the caller has left; true for padding."""
        position = self.positions[item]
        return position < 0 or super().cancelled(position)

    def run(self, backend: Backend) -> None:
        """Executes the batch; if it raises, all steps fail, as in Triton."""
        super().run(backend)
        if self.error is not None:
            self.answers = [self.error if answer is None else answer for answer in self.answers]
        if self.sequences.states:
            self.answers = [self._split_states(position, answer) for position, answer in enumerate(self.answers)]
        self.again = {position for position in self.again if isinstance(self.answers[position], tuple)}
        for position in self.again:
            self.answers[position] = None
        self.rows_again = len(self.again)

    def _split_states(self, position: int, answer: Answer | None) -> Answer | None:
        """Returns an answer without its states."""
        if not isinstance(answer, tuple):
            return answer
        specs = self.sequences.states
        states = answer[-len(specs) :]
        if len(states) != len(specs):
            return OutputMismatch(f"the model returned {len(answer)} tensors, fewer than its {len(specs)} states")
        try:
            self.states[position] = tuple([_state(spec, state) for spec, state in zip(specs, states, strict=True)])
        except OutputMismatch as error:
            return error
        return answer[: -len(specs)]


AnySteps = StepExecution | StreamedSteps
"""Steps of any kind of model."""


def positions_of(batch: StepBatch[Any]) -> list[int]:
    """Returns each row's position; -1 for padding."""
    taken = count()
    return [-1 if step is None else next(taken) for step in batch.rows]


def _state(spec: StateSpec, tensor: Tensor) -> Tensor:
    lead, dims = tensor.shape[: -len(spec.dims)], tensor.shape[-len(spec.dims) :]
    fits = (
        len(dims) == len(spec.dims)
        and lead in ((), (1,))
        and all(wanted in (-1, dim) for wanted, dim in zip(spec.dims, dims, strict=True))
    )
    if tensor.name != spec.output or tensor.datatype != spec.datatype or not fits:
        raise OutputMismatch(
            f"the model returned state '{tensor.name}' as {tensor.datatype}{list(tensor.shape)}; "
            f"its configuration says '{spec.output}' {spec.datatype}{list(spec.dims)}"
        )
    # A copy, to free the batch's array.
    return msgspec.structs.replace(tensor, name=spec.input, data=bytes(tensor.data))


def state_shapes(states: States) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of states."""
    return tuple(state.shape for state in states)
