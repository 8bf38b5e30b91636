"""Batches of steps on their way through an instance, with the inputs and states that the server adds and keeps.

    SequenceScheduler.decide ─▶ assemble_steps ─▶ executor ─▶ SequenceScheduler.end_batch ─▶ decide …

    steps, their states → assemble_steps → Batch → StepExecution → answers, and the states after them
                                                  or StreamedSteps → streams, where the model is decoupled

The strategy `direct` pads rows of empty slots. Control inputs follow reference §3.4. Subclasses of `StepRunner` keep
the states and answer: `SequenceBatcher` for stateful models, `Iterations` for iterative models.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from qinfer.backends.base import Array, Backend, Batch, Context, MemoryLost, Wrapper
from qinfer.batching.assemble import KeyFunction, assemble, key_function, stack
from qinfer.batching.batcher import LoadedModel
from qinfer.batching.execution import Answer, Execution, Responder, WorkItem
from qinfer.batching.policy import Item, LatencyModel
from qinfer.batching.sequences.scheduler import SequenceDecision, SequenceScheduler
from qinfer.batching.sequences.steps import SequenceStep, StepBatch
from qinfer.batching.streams import ItemStream, StreamedExecution
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import InferenceFailed, OutputMismatch, QinferError, SequenceLost
from qinfer.models.sequence_spec import ControlKind, ControlSpec, SequenceSpec, StateSpec
from qinfer.models.spec import ModelSpec
from qinfer.observe.stats import StatsTally
from qinfer.tensors import Tensor, datatype, to_numpy

States = tuple[Tensor, ...]
"""States in the order of `SequenceSpec.states`."""

Rows = Sequence[SequenceStep[Any] | None]
"""The steps of a batch, with `None` for padding."""


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


class _PaddedBackend(Wrapper):
    """A backend that sees rows of padding."""

    def __init__(self, backend: Backend, positions: Sequence[int]) -> None:
        super().__init__(backend)
        self._positions = positions

    def execute(self, batch: Batch, ctx: Context) -> None:
        self.inner.execute(batch, _PaddedContext(ctx, self._positions))


class _PaddedContext(Wrapper):
    """Drops answers to padding, whose callers count as gone; other rows have their step's position."""

    def __init__(self, ctx: Context, positions: Sequence[int]) -> None:
        super().__init__(ctx)
        self._positions = positions

    def respond(self, item: int, *about: Any, **more: Any) -> None:
        self._pass_on(self.inner.respond, item, *about, **more)

    def offer(self, item: int, *about: Any, **more: Any) -> None:
        self._pass_on(self.inner.offer, item, *about, **more)

    def on_taken(self, item: int, *about: Any, **more: Any) -> None:
        self._pass_on(self.inner.on_taken, item, *about, **more)

    def reschedule(self, item: int, *about: Any, **more: Any) -> None:
        self._pass_on(self.inner.reschedule, item, *about, **more)

    def cancelled(self, item: int) -> bool:
        return self._positions[item] < 0 or self.inner.cancelled(self._positions[item])

    def waits(self, item: int) -> bool:
        return self._positions[item] >= 0 and self.inner.waits(self._positions[item])

    def _pass_on(self, call: Callable[..., None], item: int, *about: Any, **more: Any) -> None:
        if self._positions[item] >= 0:
            call(self._positions[item], *about, **more)


def _seeing(backend: Backend, rows: Rows) -> Backend:
    if all(rows):
        return backend
    taken = count()
    return _PaddedBackend(backend, [-1 if step is None else next(taken) for step in rows])


def _unharmed(error: QinferError | None, batch: StepBatch[Any]) -> set[int]:
    """Returns the positions of steps that may run again after an error: those that had no state in the lost memory."""
    return {at for at, step in enumerate(batch.steps) if step.start} if isinstance(error, MemoryLost) else set()


class StreamedSteps(StreamedExecution, kw_only=True, eq=False):
    """A decoupled iterative model's batch: streams continue in the next execution."""

    steps: StepBatch[Any]
    again: set[int] = msgspec.field(default_factory=set)

    @property
    def states(self) -> list[States]:
        """Empty: stateful models have one response."""
        return [()] * len(self.items)

    def reschedule(self, item: int, states: States = ()) -> None:
        """Executes an item again; see `Context.reschedule`."""
        del states
        self.again.add(item)

    def run(self, backend: Backend) -> None:
        """Executes the batch; an error ends all streams."""
        super().run(_seeing(backend, self.steps.rows))
        open_ = {at for at, stream in enumerate(self.streams) if not (stream.has_ended or stream.is_over)}
        if self.error is not None:
            self.again = _unharmed(self.error, self.steps)
        self.again &= open_

    def _open_streams(self) -> list[ItemStream]:
        steps = self.steps.steps
        return [(self.table.open if step.start else self.table.reopen_stream)(step.item, self) for step in steps]

    def _ended_by(self, error: QinferError, stream: ItemStream) -> QinferError | None:
        """Turns a lost sequence into a failure; a stream of `_unharmed` begins anew."""
        if self.streams.index(stream) in _unharmed(error, self.steps):
            return None
        return InferenceFailed(error.message) if isinstance(error, SequenceLost) else error


class StepExecution(Execution, kw_only=True, eq=False):
    """A batch of steps that runs or has run.

    Attributes:
        states: The states after each item; empty = unchanged.
    """

    steps: StepBatch[Any]
    sequences: SequenceSpec
    states: list[States] = msgspec.field(default_factory=list)
    again: set[int] = msgspec.field(default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.states = [()] * len(self.items)

    def reschedule(self, item: int, states: States = ()) -> None:
        """Executes an item again; see `Context.reschedule`."""
        if not self.sequences.iterative:
            super().reschedule(item, states)
        self.respond(item, states)
        self.again.add(item)

    def run(self, backend: Backend) -> None:
        """Executes the batch; if it raises, all steps fail, as in Triton."""
        super().run(_seeing(backend, self.steps.rows))
        if self.error is not None:
            self.answers = [self.error if answer is None else answer for answer in self.answers]
        if self.sequences.iterative and (unharmed := _unharmed(self.error, self.steps)):
            self.again = unharmed
            self.answers = [None if at in unharmed else answer for at, answer in enumerate(self.answers)]
            return
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


def control_inputs(rows: Rows, controls: Sequence[ControlSpec], *, batched: bool) -> dict[str, Array]:
    """Makes the control inputs: `datatype[rows, 1]`, or `datatype[1]` without a batch dimension.

    In rows of padding (`None`), all control inputs are false, 0 or empty. A correlation id that is too large for the
    datatype of a CORRID input loses its high bits, as in Triton; an input of BYTES gets a number in decimal digits.
    """
    shape = (len(rows), 1) if batched else (1,)
    return {control.name: _control_values(rows, control).reshape(shape) for control in controls}


def padded(inputs: Mapping[str, Array], rows: Rows) -> Mapping[str, Array]:
    """Spreads the inputs of the steps over a batch's rows; rows of padding are zeros, or empty BYTES."""
    taken = [position for position, step in enumerate(rows) if step is not None]
    if len(taken) == len(rows):
        return inputs
    return {name: _spread(array, taken, len(rows)) for name, array in inputs.items()}


def _spread(array: Array, taken: list[int], rows: int) -> Array:
    filling: Any = b"" if array.dtype == object else 0
    spread = np.full((rows, *array.shape[1:]), filling, dtype=array.dtype)
    spread[taken] = array
    return spread


def _control_values(rows: Rows, control: ControlSpec) -> Array:
    if control.kind is ControlKind.CORRID:
        return _correlation_ids(rows, control.datatype)
    holds = [_holds(control.kind, step) for step in rows]
    return np.where(holds, control.true, control.false).astype(datatype(control.datatype).numpy)


def _holds(kind: ControlKind, step: SequenceStep[Item] | None) -> bool:
    if step is None:
        return False
    return {ControlKind.START: step.start, ControlKind.END: step.end, ControlKind.READY: True}[kind]


def _correlation_ids(rows: Rows, name: str) -> Array:
    ids = [None if step is None else _sequence_id(step) for step in rows]
    kind = datatype(name)
    if kind.numpy is None:
        texts = np.empty(len(ids), dtype=object)
        texts[:] = [b"" if of_step is None else str(of_step).encode() for of_step in ids]
        return texts
    low_bits = 2 ** (8 * kind.itemsize) - 1
    numbers = [of_step & low_bits if isinstance(of_step, int) else 0 for of_step in ids]
    return np.array(numbers, dtype=f"<u{kind.itemsize}").view(kind.numpy)


def _sequence_id(step: SequenceStep[Any]) -> int | str | None:
    if step.told_id is not None or step.sequence is None:
        return step.told_id
    return step.sequence.correlation_id


IDLE_SLACK_S = 0.1
"""Redis counts idle time from a step's commit."""

P = TypeVar("P", bound=WorkItem)


class StepRunner(ABC, Generic[P]):
    """Runs a model's steps; instants are on Redis' clock."""

    def __init__(
        self, model: LoadedModel, clock: ServerClock, tally: StatsTally, latency: LatencyModel | None = None
    ) -> None:
        assert model.spec.sequences is not None, "only a model with sequences has steps"
        self.model = model
        self.executing = 0
        self.expected_ends: dict[AnySteps, float] = {}
        self.paused = False
        self._clock = clock
        self._tally = tally
        self._latency = latency or LatencyModel()
        self._sequences = model.spec.sequences
        later = replace(self._sequences, max_idle_s=self._sequences.max_idle_s + IDLE_SLACK_S)
        self._scheduler = SequenceScheduler[P](model.spec.name, later, model.executor.count)
        self._responder = Responder(model.spec, model.version, model.observer)
        self._key_of: KeyFunction = key_function(model.spec)
        self._has_keys = any(-1 in state.dims for state in self._sequences.states)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def speed_rps(self, *, at_best: bool = False) -> float:
        """Returns steps per second; 0 = unknown."""
        rows = self._sequences.max_rows
        full_s = (self._latency.best_s if at_best else self._latency.full_s)(rows)
        return self.model.executor.count * rows / full_s if full_s else 0.0

    def pump(self) -> None:
        """Starts and breaks due steps; one call serves many steps."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while not self.paused:
            now_s = self._clock.now_s()
            decision = self._scheduler.decide(now_s, self._latency)
            self._report_decision(decision)
            if not decision.batches:
                wait_s = decision.wake_at_s - now_s
                if wait_s != float("inf"):
                    self._timer = self._loop.call_later(max(wait_s, 0.0), self.pump)
                return
            for batch in decision.batches:
                self._start_batch(batch, now_s)

    @abstractmethod
    def _report_decision(self, decision: SequenceDecision[P]) -> None:
        """Handles refused steps and ended sequences."""

    @abstractmethod
    def _begin_batch(self, batch: StepBatch[P]) -> list[States]:
        """Begins a batch, and returns the states of its steps."""

    @abstractmethod
    def _refuse(self, items: Sequence[P], responses: Sequence[Response]) -> None:
        """Answers items that can't be assembled."""

    @abstractmethod
    def _finish_execution(self, execution: AnySteps, now_s: float, begin_s: float) -> None:
        """Keeps the results of an execution and answers."""

    def _batch_key(self, request: InferRequest, states: States) -> object:
        key = self._key_of(request)
        return (key, state_shapes(states)) if self._has_keys else key

    def _start_batch(self, batch: StepBatch[P], now_s: float) -> None:
        begin_ns = time.perf_counter_ns()
        items = [step.item for step in batch.steps]
        states = self._begin_batch(batch)
        try:
            assembled = assemble_steps(batch, states, self.model.spec)
        except QinferError as error:
            self._scheduler.end_batch(batch, now_s)
            self._refuse(items, self._responder.failures(items, error, now_s, self._tally))
            return
        execution = self._execution(batch, assembled, time.perf_counter_ns() - begin_ns)
        expected_s = self._latency.estimate_s(len(items))
        self.executing += len(items)
        self.expected_ends[execution] = now_s + expected_s
        # Iterations on the event loop would block it.
        may_run_now = not self._sequences.iterative
        if may_run_now and self.model.executor.run_now(execution, expected_s, batch.instance):
            self._count_execution(execution)
        else:
            self.model.executor.start(execution, self._on_execution_end, batch.instance)

    def _execution(self, steps: StepBatch[P], batch: Batch, input_ns: int) -> AnySteps:
        model, items = self.model, [step.item for step in steps.steps]
        if model.streams is None:
            return StepExecution(items, batch, input_ns, model.caller, steps=steps, sequences=self._sequences)
        return StreamedSteps(
            items,
            batch,
            input_ns,
            model.caller,
            steps=steps,
            table=model.streams,
            responder=self._responder,
            tally=self._tally,
        )

    def _on_execution_end(self, execution: Execution) -> None:
        assert isinstance(execution, AnySteps), "it was started here"
        self._count_execution(execution)
        self.pump()

    def _count_execution(self, execution: AnySteps) -> None:
        now_s = self._clock.now_s()
        del self.expected_ends[execution]
        self.executing -= len(execution.items)
        if execution.error is None:
            seconds = (execution.end_ns - execution.begin_ns) / 1e9
            self._latency.observe(execution.batch.size, seconds, now_s)
        self._finish_execution(execution, now_s, now_s - (time.perf_counter_ns() - execution.begin_ns) / 1e9)
