"""One request of an ensemble on its way through the steps, driven by answers, without a task or a thread.

Each response of a decoupled step becomes a branch (`_Branch`) that goes through the steps behind it; responses are sent
in the step's order. A response is taken when its branch has left, so that the step's window bounds the responses here.
Names and shapes of tensors change between the steps; bytes are never copied.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import msgspec

from qinfer.batching.execution import WorkItem, due
from qinfer.core.call_chain import extended
from qinfer.core.messages import Failure, OutgoingRequest, ResourceHolder, Response, Scalar, SequenceFlags, Timing
from qinfer.errors import TIMED_OUT, DeadlineExceeded, InferenceFailed, InvalidRequest, OutputMismatch, QinferError
from qinfer.models.ensemble_checks import fit, refit
from qinfer.models.ensemble_graph import EnsemblePlan, Flow, PlanStep
from qinfer.models.spec import Reshape
from qinfer.submission.pending import ResponseSink
from qinfer.tensors import Tensor, element_count

MAX_BRANCHES = 16


class StepHandle(Protocol):
    """A submitted step."""

    @property
    def is_taken(self) -> bool:
        """Whether the queue has the sequence's step."""
        ...

    def cancel(self) -> None:
        """Cancels the step unless it has begun."""
        ...

    def took(self, nbytes: int) -> None:
        """Reports bytes taken of responses."""
        ...


class StepSubmitter(Protocol):
    """Submits steps to their models."""

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> StepHandle:
        """Submits a step; the sink gets its answer or failure later."""
        ...


class EnsembleResponses(Protocol):
    """Takes a decoupled ensemble's responses, except a failure or an empty last response."""

    def send(self, outputs: tuple[Tensor, ...], *, final: bool) -> bool:
        """Sends a response, or returns false without room: call `EnsembleRun.go_on` later."""
        ...


Outcome = tuple[Tensor, ...] | Failure
"""The outputs (none if decoupled), or the failure."""


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


class _Branch:
    """The way of a request through one stage of the plan.

    `failure` ends it behind earlier responses; its numbers are failed nested ensembles. `source` is the decoupled step
    at the stage's end, `came` its responses without a branch, `parts` earlier branches.
    """

    __slots__ = ("came", "failure", "flow", "nbytes", "open", "parts", "source")

    def __init__(self, flow: Flow[Value], nbytes: int = 0) -> None:
        self.flow = flow
        self.open: dict[int, StepHandle] = {}
        self.failure: tuple[Failure, tuple[int, ...]] | None = None
        self.source: tuple[int, StepHandle] | None = None
        self.came: deque[Response] = deque()
        self.parts: deque[_Branch] = deque()
        self.nbytes = nbytes

    @property
    def is_at_its_end(self) -> bool:
        return len(self.parts) == 1 and not (self.came or self.open or self.failure)

    def cancel(self) -> None:
        for submitted in self.open.values():
            submitted.cancel()
        self.open.clear()

    def stop(self) -> None:
        self.cancel()
        for part in self.parts:
            part.stop()
        self.parts.clear()
        self.came.clear()


class EnsembleRun:
    """Runs one request of an ensemble.

    `ended` is called once, unless it is stopped. `nested` and `failed_in` are positions of nested ensembles.
    """

    __slots__ = (
        "_ended", "_is_over", "_item", "_most", "_now_s", "_responses", "_root", "_steps", "failed_in",
        "nested", "parameters", "plan", "spent",
    )  # fmt: skip

    def __init__(
        self,
        item: WorkItem,
        plan: EnsemblePlan,
        steps: StepSubmitter,
        now_s: Callable[[], float],
        ended: "Callable[[EnsembleRun, WorkItem, Outcome], None]",
        responses: EnsembleResponses | None = None,
    ) -> None:
        self.plan = plan
        self.spent = StepTimes(time.perf_counter_ns())
        self.nested: dict[int, StepTimes] = {}
        self.failed_in: tuple[int, ...] = ()
        self.parameters: Mapping[str, Scalar] = {}
        self._item = item
        self._steps = steps
        self._now_s = now_s
        self._ended = ended
        self._responses = responses
        self._most = plan.spec.max_inflight or MAX_BRANCHES
        self._root = _Branch(plan.flow(item.request.outputs))
        self._is_over = False

    def submit_first_steps(self) -> None:
        """Submits the first steps."""
        spec = self.plan.spec
        rows = self._item.rows if spec.max_batch_size else 0
        given = {tensor.name: Value(tensor, rows) for tensor in self._item.request.inputs}
        self._submit_all(self._root, self._root.flow.start(given))
        self.go_on()

    def stop(self) -> None:
        """Ends the run without an answer."""
        self._is_over = True
        self._root.stop()

    def go_on(self) -> None:
        """Sends ready responses; ends after the last."""
        if not self._is_over and self._has_left(self._root) and not self._is_over:
            self._over(())

    def stepped(self, branch: _Branch, number: int, response: Response, rows: int) -> None:
        """Takes a step's answer, and submits the next steps."""
        if self._is_over or not response.final or branch.open.pop(number, None) is None:
            return
        step = self.plan.steps[number]
        if response.failure is not None:
            self._fail(branch, step, response.failure)
        else:
            self._spend(step, response.timing)
            made = {tensor.name: Value(tensor, rows, response.parameters) for tensor in response.outputs}
            self._submit_all(branch, branch.flow.put(number, made))
        self.go_on()

    def streamed(self, branch: _Branch, number: int, response: Response, rows: int) -> None:
        """Takes a response of a decoupled step."""
        del rows  # a response may have another number
        if self._is_over or number not in branch.open:
            return
        step = self.plan.steps[number]
        if response.failure is not None:
            if response.final:
                del branch.open[number]
            self._fail(branch, step, response.failure)
        else:
            if response.outputs or not response.final:
                branch.came.append(response)
            if response.final:
                del branch.open[number]
                self._spend(step, response.timing)
        self.go_on()

    def _spend(self, step: PlanStep, timing: Timing | None) -> None:
        now_ns = time.perf_counter_ns()
        self.spent.add(timing, now_ns)
        for position in step.within:
            self.nested[position].add(timing, now_ns)

    def _has_left(self, branch: _Branch, *, is_last: bool = True) -> bool:
        """Returns whether all responses have left; the first failure ends the run.

        As in Triton, a response is final if nothing else is in flight.
        """
        self._branch_off(branch)
        while branch.parts:
            part = branch.parts[0]
            if not self._has_left(part, is_last=is_last and branch.is_at_its_end):
                return False
            branch.parts.popleft()
            assert branch.source is not None, "parts are of its responses"
            branch.source[1].took(part.nbytes)
            self._branch_off(branch)
        if branch.failure is not None:
            failure, self.failed_in = branch.failure
            self._over(failure)
            return False
        if branch.open:
            return False
        return branch.source is not None or self._send_outputs(branch, is_last=is_last)

    def _branch_off(self, branch: _Branch) -> None:
        while branch.came and len(branch.parts) < self._most:
            response = branch.came.popleft()
            assert branch.source is not None, "it is its response"
            number, _ = branch.source
            step = self.plan.steps[number]
            flow: Flow[Value] = self.plan.flow(self._item.request.outputs, step.stage + 1)
            part = _Branch(flow, response.nbytes)
            branch.parts.append(part)
            is_batched = step.model.max_batch_size > 0
            made = {
                t.name: Value(t, t.shape[0] if is_batched and t.shape else 0, response.parameters)
                for t in response.outputs
            }
            self._submit_all(part, flow.receive(number, made))

    def _submit_all(self, branch: _Branch, ready: list[int]) -> None:
        for number in ready:
            step = self.plan.steps[number]
            for position in step.within:
                if position not in self.nested:
                    self.nested[position] = StepTimes(time.perf_counter_ns())
            try:
                self._submit(branch, number, step)
            except QinferError as error:
                self._fail(branch, step, Failure.from_error(error))
                return

    def _submit(self, branch: _Branch, number: int, step: PlanStep) -> None:
        timeout_s = self._item.deadline_s - self._now_s()
        if timeout_s <= 0:
            raise DeadlineExceeded(TIMED_OUT)
        asked, model, dims = self._item.request, step.model, step.dims
        batched = model.max_batch_size > 0
        taken = branch.flow.step_inputs(number)
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
        take = self.streamed if model.decoupled else self.stepped
        submitted = self._steps.submit_step(step, request, _StepSink(partial(take, branch, number), rows), timeout_s)
        branch.open[number] = submitted
        if model.decoupled:
            branch.source = number, submitted

    def _send_outputs(self, branch: _Branch, *, is_last: bool) -> bool:
        """Returns whether the run continues."""
        spec, flow = self.plan.spec, branch.flow
        dims = {output.name: output.dims for output in spec.outputs}
        batched, made = spec.max_batch_size > 0, flow.outputs()
        if self.plan.reshapes:
            try:
                made = reshaped(made, self.plan.reshapes)
            except InvalidRequest as mismatch:
                self._over(Failure.from_error(OutputMismatch(f"in ensemble '{spec.name}', {mismatch}")))
                return False
        outputs = tuple(renamed(value, name, dims[name], batched=batched) for name, value in made)
        self.parameters = _of_sequence(self._item.request.sequence, [value for _, value in made])
        if self._responses is not None:
            return self._responses.send(outputs, final=is_last)
        asked = due(self._item.request)
        if missing := [name for name in flow.missing() if name in asked]:
            error = InferenceFailed(
                f"in ensemble '{spec.name}', unexpected deadlock, output '{missing[0]}' is not set while no more "
                "ensemble steps can be made"
            )
            self._over(Failure.from_error(error))
        else:
            self._over(outputs)
        return False

    def _fail(self, branch: _Branch, step: PlanStep, failure: Failure) -> None:
        """The code of the failure stays, as in Triton."""
        branch.cancel()
        text = f"in ensemble '{self.plan.spec.name}', step of model '{step.model.name}': {failure.message}"
        branch.failure = Failure(failure.code, text, failure.retryable), step.within

    def _over(self, outcome: Outcome) -> None:
        self.stop()
        self.spent.end_ns = time.perf_counter_ns()
        self._ended(self, self._item, outcome)


def _of_sequence(flags: SequenceFlags | None, made: list[Value]) -> dict[str, Scalar]:
    """Parameters of a step may name another sequence; as in Triton."""
    if not made:
        return {}
    flags = flags or SequenceFlags(0)
    told: dict[str, Scalar] = {"sequence_id": flags.callers_id}
    told |= {"sequence_start": flags.start, "sequence_end": flags.end}
    for value in made:
        if value.parameters and (other := {name: value.parameters[name] for name in told if name in value.parameters}):
            told |= {"sequence_start": False, "sequence_end": False, **other}
    return told


class _StepSink:
    __slots__ = ("_rows", "_take")
    no_stream = ""

    def __init__(self, take: Callable[[Response, int], None], rows: int) -> None:
        self._take = take
        self._rows = rows

    def deliver(self, response: Response) -> None:
        self._take(response, self._rows)


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
