"""One request of an ensemble on its way through the steps, as a coroutine.

    _pass ─▶ _run_steps ─▶ _answer (one step) … ─▶ outputs
                  └─▶ _stream (a decoupled step) ─▶ _part (one response) ─▶ _pass (the steps behind it)

Each part waits until the part before it has left. Only then is its response taken, so that the step's window bounds the
responses here. Names and shapes of tensors change between the steps; bytes are never copied.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from qinfer.batching.execution import Responder, WorkItem, due
from qinfer.batching.streams import ItemStream, WorkerStreams
from qinfer.core.call_chain import extended
from qinfer.core.messages import Failure, OutgoingRequest, ResourceHolder, Response, Scalar, SequenceFlags, Timing
from qinfer.errors import Cancelled, InferenceFailed, InvalidRequest, OutputMismatch, QinferError
from qinfer.models.config.ensembles import fit, refit
from qinfer.models.ensemble_graph import EnsemblePlan, Flow, PlanStep
from qinfer.models.spec import Reshape
from qinfer.tensors import Tensor, element_count
from qinfer_workers.inference.ensembles.steps import StepCall, StepWay

MAX_BRANCHES = 16


class EnsembleResponses(Protocol):
    """Takes a decoupled ensemble's responses, except a failure or an empty last response."""

    def send(self, outputs: tuple[Tensor, ...], *, final: bool) -> bool:
        """Sends a response, or returns false without room."""
        ...

    async def room(self) -> None:
        """Waits for room."""
        ...


class StepFailed(Exception):
    """The failure of a request; `within` = failed nested ensembles."""

    def __init__(self, failure: Failure, within: tuple[int, ...] = ()) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.within = within


class Value(msgspec.Struct, frozen=True):
    """A tensor, with its response's parameters; `rows` = 0: no batch dimension."""

    tensor: Tensor
    rows: int
    parameters: Mapping[str, Scalar] = {}


class StepTimes(msgspec.Struct):
    """The summed times of steps."""

    begin_ns: int
    end_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, timing: Timing | None, now_ns: int) -> None:
        """Adds an ended step."""
        self.end_ns = now_ns
        if timing is not None:
            self.input_ns += timing.input_ns
            self.infer_ns += timing.infer_ns
            self.output_ns += timing.output_ns

    @property
    def computed_ns(self) -> int:
        """Nanoseconds without waits."""
        return self.input_ns + self.infer_ns + self.output_ns


class EnsembleRun:
    """Runs one request; `nested` = times of nested ensembles by position."""

    __slots__ = ("_in_flight", "_responses", "_way", "failed_in", "item", "nested", "parameters", "plan", "spent")

    def __init__(
        self, item: WorkItem, plan: EnsemblePlan, way: StepWay, responses: EnsembleResponses | None = None
    ) -> None:
        self.item = item
        self.plan = plan
        self.spent = StepTimes(time.perf_counter_ns())
        self.nested: dict[int, StepTimes] = {}
        self.failed_in: tuple[int, ...] = ()
        self.parameters: Mapping[str, Scalar] = {}
        self._way = way
        self._responses = responses
        self._in_flight = 0
        """Open decoupled steps, and their responses that have not left."""

    async def run(self) -> tuple[Tensor, ...]:
        """Returns the outputs, none if the ensemble is decoupled; raises `StepFailed`."""
        rows = self.item.rows if self.plan.spec.max_batch_size else 0
        given = {tensor.name: Value(tensor, rows) for tensor in self.item.request.inputs}
        flow: Flow[Value] = self.plan.flow(self.item.request.outputs)
        try:
            return await self._pass(flow, flow.start(given), 0, None)
        except StepFailed as failed:
            self.failed_in = failed.within
            raise
        finally:
            self.spent.end_ns = time.perf_counter_ns()

    async def _pass(
        self, flow: Flow[Value], ready: list[int], stage: int, turn: asyncio.Event | None
    ) -> tuple[Tensor, ...]:
        """Goes through a stage and those behind it; sends responses after `turn`."""
        await self._run_steps(flow, ready)
        if flow.source is not None:
            await self._stream(flow, flow.source, turn)
            return ()
        if turn is not None:
            await turn.wait()
        if self._responses is None:
            return self._unary(flow)
        # As in Triton, a response is final if nothing else is in flight.
        while not self._responses.send(self._outputs(flow), final=self._in_flight == stage):
            await self._responses.room()
        return ()

    async def _run_steps(self, flow: Flow[Value], ready: list[int]) -> None:
        """Runs a stage's steps, except a decoupled one."""
        while len(ready) == 1:
            ready = flow.put(ready[0], await self._answer(flow, ready[0]))
        if ready:
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._run_beside(flow, ready, tasks)
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None

    async def _run_beside(self, flow: Flow[Value], ready: list[int], tasks: asyncio.TaskGroup) -> None:
        while ready:
            number, *others = ready
            for other in others:
                tasks.create_task(self._run_beside(flow, [other], tasks))
            ready = flow.put(number, await self._answer(flow, number))

    async def _answer(self, flow: Flow[Value], number: int) -> Mapping[str, Value]:
        step = self.plan.steps[number]
        try:
            with self._open(flow, number) as call:
                response = await call.first()
                while not response.final:
                    response = await call.next()
        except QinferError as error:
            raise self._failed(step, Failure.from_error(error)) from None
        if response.failure is not None:
            raise self._failed(step, response.failure)
        self._spend(step, response.timing)
        return {tensor.name: Value(tensor, call.rows, response.parameters) for tensor in response.outputs}

    async def _stream(self, flow: Flow[Value], number: int, turn: asyncio.Event | None) -> None:
        step, room = self.plan.steps[number], asyncio.Semaphore(self.plan.spec.max_inflight or MAX_BRANCHES)
        self._in_flight += 1
        try:
            call = self._open(flow, number)
        except QinferError as error:
            raise self._failed(step, Failure.from_error(error)) from None
        try:
            with call:
                async with asyncio.TaskGroup() as parts:
                    response = await call.first()
                    if turn is not None:  # the parts of an earlier response go first
                        await turn.wait()
                    turn = None
                    while response.failure is None:
                        if response.outputs or not response.final:
                            self._in_flight += 1
                            await room.acquire()
                            left = asyncio.Event()
                            parts.create_task(self._part(call, number, response, turn, left, room))
                            turn = left
                        if response.final:
                            self._in_flight -= 1
                            self._spend(step, response.timing)
                            break
                        response = await call.next()
                    else:
                        call.close()
                    if turn is not None:
                        await turn.wait()
                    if response.failure is not None:
                        raise self._failed(step, response.failure)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _part(
        self,
        call: StepCall,
        number: int,
        response: Response,
        turn: asyncio.Event | None,
        left: asyncio.Event,
        room: asyncio.Semaphore,
    ) -> None:
        step = self.plan.steps[number]
        flow: Flow[Value] = self.plan.flow(self.item.request.outputs, step.stage + 1)
        is_batched = step.model.max_batch_size > 0
        made = {
            tensor.name: Value(tensor, tensor.shape[0] if is_batched and tensor.shape else 0, response.parameters)
            for tensor in response.outputs
        }
        try:
            await self._pass(flow, flow.put(number, made), step.stage + 1, turn)
        except StepFailed:
            if turn is not None:  # responses before it leave
                await turn.wait()
            raise
        self._in_flight -= 1
        call.took(response.nbytes)
        room.release()
        left.set()

    def _spend(self, step: PlanStep, timing: Timing | None) -> None:
        now_ns = time.perf_counter_ns()
        self.spent.add(timing, now_ns)
        for position in step.within:
            self.nested[position].add(timing, now_ns)

    def _open(self, flow: Flow[Value], number: int) -> StepCall:
        asked, step = self.item.request, self.plan.steps[number]
        model, dims = step.model, step.dims
        for position in step.within:
            if position not in self.nested:
                self.nested[position] = StepTimes(time.perf_counter_ns())
        batched = model.max_batch_size > 0
        taken = flow.step_inputs(number)
        if step.reshapes:
            taken = reshaped(taken, step.reshapes)
        inputs = tuple([renamed(value, name, dims[name], batched=batched) for name, value in taken])
        rows = inputs[0].shape[0] if batched and inputs and inputs[0].shape else 0
        request = OutgoingRequest(
            model=model.name,
            version=step.version,
            client_id=asked.client_id,
            inputs=inputs,
            outputs=step.wanted,
            spares_outputs=bool(step.wanted),
            parameters=asked.parameters,
            priority=asked.priority,
            timeout_s=asked.queue_timeout_s,
            tenant=asked.tenant,
            trace=asked.trace,
            calls=asked.calls,
        )
        if asked.holders:  # a model called the ensemble, and its instance waits
            request.holders = extended([asked.holders], ResourceHolder("", asked.model, {}, asked.version))
        return StepCall(self._way, step, request, self.item.deadline_s, rows)

    def _outputs(self, flow: Flow[Value]) -> tuple[Tensor, ...]:
        spec, dims, made = self.plan.spec, self.plan.dims, flow.outputs()
        if self.plan.reshapes:
            try:
                made = reshaped(made, self.plan.reshapes)
            except InvalidRequest as mismatch:
                error = OutputMismatch(f"in ensemble '{spec.name}', {mismatch}")
                raise StepFailed(Failure.from_error(error)) from None
        self.parameters = _of_sequence(self.item.request.sequence, [value for _, value in made])
        return tuple([renamed(value, name, dims[name], batched=spec.max_batch_size > 0) for name, value in made])

    def _unary(self, flow: Flow[Value]) -> tuple[Tensor, ...]:
        outputs, asked = self._outputs(flow), due(self.item.request)
        if missing := [name for name in flow.missing() if name in asked]:
            error = InferenceFailed(
                f"in ensemble '{self.plan.spec.name}', unexpected deadlock, output '{missing[0]}' is not set while no "
                "more ensemble steps can be made"
            )
            raise StepFailed(Failure.from_error(error))
        return outputs

    def _failed(self, step: PlanStep, failure: Failure) -> StepFailed:
        """The code of the failure stays, as in Triton."""
        text = f"in ensemble '{self.plan.spec.name}', step of model '{step.model.name}': {failure.message}"
        return StepFailed(Failure(failure.code, text, failure.retryable), step.within)


class StreamedResponses:
    """A decoupled run's responses, as a stream of the worker.

    A response that does not fit waits until the caller takes others. `counted` gets each that leaves, `dropped` is
    called when the caller takes no more.
    """

    can_ask = False

    def __init__(
        self,
        table: WorkerStreams,
        item: WorkItem,
        responder: Responder,
        counted: Callable[[EnsembleRun, Response], None],
        dropped: Callable[[WorkItem], None],
    ) -> None:
        self.responder = responder
        self._table = table
        self._item = item
        self._counted = counted
        self._dropped = dropped
        self._begin_ns = time.perf_counter_ns()
        self._has_room = asyncio.Event()
        self._run: EnsembleRun
        self._stream = table.open(item, self)

    def follow(self, run: EnsembleRun) -> None:
        """Takes the responses of a run."""
        self._run = run
        self._stream.on_taken(self._took)
        self._table.watch()

    def send(self, outputs: tuple[Tensor, ...], *, final: bool) -> bool:
        """Sends a response if there is room; a misfit ends the stream."""
        with suppress(Cancelled):
            if not self._stream.offer(outputs, final=final, parameters=self._run.parameters):
                return False
            if final or not self._stream.has_ended:
                return True
        self._dropped(self._item)
        return False

    async def room(self) -> None:
        """Waits until the caller has taken responses."""
        await self._has_room.wait()
        self._has_room.clear()

    def send_final(self, failure: Failure | None) -> None:
        """Sends the final response, at most once."""
        with suppress(Cancelled, OutputMismatch):
            self._stream.send(failure or (), final=True, wait=False)

    def timing(self, item: WorkItem, now_s: float) -> Timing:
        """Returns the times of the request so far."""
        lasted_ns = time.perf_counter_ns() - self._begin_ns
        waited_ns = int((now_s - item.enqueued_s) * 1e9) - lasted_ns
        return Timing(max(waited_ns, 0), 0, lasted_ns, 0, item.rows)

    def count(self, stream: ItemStream, response: Response) -> None:
        """Counts a response."""
        del stream
        self._counted(self._run, response)

    def _took(self, nbytes: int) -> None:
        if nbytes:
            self._has_room.set()
        else:
            self._dropped(self._item)


def _of_sequence(flags: SequenceFlags | None, made: list[Value]) -> dict[str, Scalar]:
    """Parameters of a step may name another sequence; as in Triton."""
    if not made:
        return {}
    flags = flags or SequenceFlags(0)
    told: dict[str, Scalar] = {
        "sequence_id": flags.callers_id,
        "sequence_start": flags.start,
        "sequence_end": flags.end,
    }
    for value in made:
        if value.parameters and (other := {name: value.parameters[name] for name in told if name in value.parameters}):
            told |= {"sequence_start": False, "sequence_end": False, **other}
    return told


def renamed(value: Value, name: str, dims: tuple[int, ...], *, batched: bool) -> Tensor:
    """Returns a tensor as a model's input, or as the ensemble's output."""
    tensor = value.tensor
    return Tensor(name, tensor.datatype, fit(tensor.shape, value.rows, dims, batched=batched), tensor.data)


def reshaped(values: list[tuple[str, Value]], reshapes: Mapping[str, tuple[Reshape, ...]]) -> list[tuple[str, Value]]:
    """Returns tensors in the shapes that ensembles on their way give them."""
    found = []
    for name, value in values:
        tensor = value.tensor
        shape, rows = refit(tensor.shape, value.rows, reshapes.get(name, ()))
        if element_count(shape) != element_count(tensor.shape):
            raise InvalidRequest(
                f"'{name}' gets {tensor.datatype}{list(tensor.shape)}, but an ensemble's configuration reshapes it to "
                f"{list(shape)}"
            )
        reshaped_tensor = Tensor(tensor.name, tensor.datatype, shape, tensor.data)
        found.append((name, Value(reshaped_tensor, rows, value.parameters)))
    return found
