"""One request of an ensemble on its way through the steps: no task and no thread, only answers that come.

begin ─▶ submit steps ─▶ (answers) ─▶ stepped ─▶ submit more … ─▶ ended: outputs, or the failure of a step
"""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from qinfer.batching.execution import Pending
from qinfer.core.call_chain import extended
from qinfer.core.messages import Failure, Holder, InferRequest, Response, Timing
from qinfer.errors import TIMED_OUT, DeadlineExceeded, InferenceFailed, QinferError
from qinfer.models.ensemble_graph import Flow, Plan, PlanStep, fit
from qinfer.submission.pending import Sink
from qinfer.tensors import Tensor


class Submitted(Protocol):
    """A step that was submitted."""

    def cancel(self) -> None:
        """Has the step not executed, if it has not begun; its answer will not come."""
        ...


class Steps(Protocol):
    """The way of steps to their models."""

    def submit_step(self, step: PlanStep, request: InferRequest, sink: Sink, timeout_s: float) -> Submitted:
        """Submits a step; its answer, or its failure, goes to the sink, and not before this returns.

        Raises:
            QinferError: It is refused.
        """
        ...


Outcome = tuple[Tensor, ...] | Failure
"""What a request ends with."""


class _Value(msgspec.Struct, frozen=True):
    """A tensor, and the rows of the request that made it; 0 = its maker has no batch dimension."""

    tensor: Tensor
    rows: int


class Spent(msgspec.Struct):
    """The time that steps have taken, from the beginning of the first to the end of the last one."""

    begin_ns: int
    end_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, timing: Timing | None, now_ns: int) -> None:
        """Adds a step that has ended."""
        self.end_ns = now_ns
        if timing is not None:
            self.input_ns += timing.input_ns
            self.infer_ns += timing.infer_ns
            self.output_ns += timing.output_ns

    @property
    def computed_ns(self) -> int:
        """Nanoseconds of all steps together, without their waits."""
        return self.input_ns + self.infer_ns + self.output_ns


class Run:
    """See the module docstring.

    Args:
        item: The request that the worker holds.
        plan: What it runs.
        steps: Where steps go.
        now_s: Returns the broker's time.
        ended: Called once, with the outputs or the failure, unless it is stopped.

    Attributes:
        plan: The same.
        spent: The time that it took so far.
        nested: The same of each ensemble within it, by its position in the plan.
        failed_in: Positions of the ensembles within it in which a step has failed.
    """

    __slots__ = (
        "_deadline_s", "_ended", "_flow", "_is_over", "_item", "_now_s", "_open", "_steps", "failed_in", "nested",
        "plan", "spent",
    )  # fmt: skip

    def __init__(
        self,
        item: Pending,
        plan: Plan,
        steps: Steps,
        now_s: Callable[[], float],
        ended: "Callable[[Run, Pending, Outcome], None]",
    ) -> None:
        self.plan = plan
        self.spent = Spent(time.perf_counter_ns())
        self.nested: dict[int, Spent] = {}
        self.failed_in: tuple[int, ...] = ()
        self._item = item
        self._steps = steps
        self._now_s = now_s
        self._ended = ended
        self._flow: Flow[_Value] = plan.flow(item.request.outputs)
        self._open: dict[int, Submitted] = {}
        self._is_over = False

    def begin(self) -> None:
        """Submits the first steps."""
        spec = self.plan.spec
        rows = self._item.rows if spec.max_batch_size else 0
        given = {tensor.name: _Value(tensor, rows) for tensor in self._item.request.inputs}
        self._go_on(self._flow.start(given))

    def stop(self) -> None:
        """Ends it without an answer: nobody waits for it any more."""
        self._is_over = True
        for submitted in self._open.values():
            submitted.cancel()
        self._open.clear()

    def stepped(self, number: int, response: Response, rows: int) -> None:
        """Takes the answer of a step, and goes on."""
        if self._is_over:
            return
        del self._open[number]
        step, now_ns = self.plan.steps[number], time.perf_counter_ns()
        if response.failure is not None:
            self._fail(step, response.failure)
            return
        self.spent.add(response.timing, now_ns)
        for position in step.within:
            self.nested[position].add(response.timing, now_ns)
        made = {tensor.name: _Value(tensor, rows) for tensor in response.outputs}
        self._go_on(self._flow.put(number, made))

    def _go_on(self, ready: list[int]) -> None:
        """Submits the steps that may run; ends when nothing runs any more."""
        for number in ready:
            step = self.plan.steps[number]
            for position in step.within:
                if position not in self.nested:
                    self.nested[position] = Spent(time.perf_counter_ns())
            try:
                self._submit(number, step)
            except QinferError as error:
                self._fail(step, Failure.of(error))
                return
        if not self._open:
            self._end()

    def _submit(self, number: int, step: PlanStep) -> None:
        timeout_s = self._item.deadline_s - self._now_s()
        if timeout_s <= 0:
            raise DeadlineExceeded(TIMED_OUT)
        asked, model = self._item.request, step.model
        dims, batched = {tensor.name: tensor.dims for tensor in model.inputs}, model.max_batch_size > 0
        inputs = tuple(_renamed(value, name, dims[name], batched=batched) for name, value in self._flow.take(number))
        rows = inputs[0].shape[0] if batched and inputs and inputs[0].shape else 0
        request = InferRequest(
            model=model.name,
            version=step.version,
            client_id=asked.client_id,
            inputs=inputs,
            outputs=tuple(step.outputs),
            parameters=asked.parameters,
            priority=asked.priority,
            timeout_s=asked.queue_timeout_s,
            tenant=asked.tenant,
            trace=asked.trace,
        )
        if asked.holders:  # a model has asked, and its instance waits
            request.holders = extended([asked.holders], Holder("", asked.model, {}, asked.version))
        self._open[number] = self._steps.submit_step(step, request, _StepSink(self, number, rows), timeout_s)

    def _end(self) -> None:
        spec, outputs = self.plan.spec, dict(self._flow.outputs())
        if missing := self._flow.missing():
            error = InferenceFailed(
                f"in ensemble '{spec.name}', unexpected deadlock, output '{missing[0]}' is not set while no more "
                "ensemble steps can be made"
            )
            self._over(Failure.of(error))
            return
        dims = {output.name: output.dims for output in spec.outputs}
        batched = spec.max_batch_size > 0
        self._over(tuple(_renamed(value, name, dims[name], batched=batched) for name, value in outputs.items()))

    def _fail(self, step: PlanStep, failure: Failure) -> None:
        """Ends it with the failure of a step, whose code stays as in Triton; the message names ensemble and step."""
        self.failed_in = step.within
        text = f"in ensemble '{self.plan.spec.name}', step of model '{step.model.name}': {failure.message}"
        self._over(Failure(failure.code, text, failure.retryable))

    def _over(self, outcome: Outcome) -> None:
        self.stop()
        self.spent.end_ns = time.perf_counter_ns()
        self._ended(self, self._item, outcome)


class _StepSink:
    """Receiver of the answer of one step."""

    __slots__ = ("_number", "_rows", "_run")
    no_stream = ""

    def __init__(self, run: Run, number: int, rows: int) -> None:
        self._run = run
        self._number = number
        self._rows = rows

    def deliver(self, response: Response) -> None:
        """See `Sink`."""
        if response.final:
            self._run.stepped(self._number, response, self._rows)


def _renamed(value: _Value, name: str, dims: tuple[int, ...], *, batched: bool) -> Tensor:
    """Returns a tensor as a model's input, or as the ensemble's output; its bytes are not copied."""
    tensor = value.tensor
    return Tensor(name, tensor.datatype, fit(tensor.shape, value.rows, dims, batched=batched), tensor.data)
