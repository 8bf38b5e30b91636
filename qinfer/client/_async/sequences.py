"""A sequence: consecutive requests (steps) to a stateful model.

async with client.sequence("counter") as sequence:
await sequence.infer({"x": x})             START, step 1
await sequence.infer({"x": x})             step 2
await sequence.infer({"x": x}, end=True)   step 3, END
"""

from asyncio import Lock
from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import TracebackType
from typing import Self

from qinfer.client.flows import StepFlags
from qinfer.client.model_flows import Inputs
from qinfer.client.results import InferResult
from qinfer.client.steps import AsyncFlowRunner
from qinfer.core.messages import Scalar


class AsyncSequence:
    """A sequence of requests to a stateful model, for one event loop; made by `AsyncClient.sequence`.

    Its first step is sent with START. Without a step with `end=True`, the sequence ends after its model's idle time.
    """

    def __init__(self, run: AsyncFlowRunner, steps: StepFlags) -> None:
        self._run, self._steps = run, steps
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<AsyncSequence {self.correlation_id}>"

    async def __aenter__(self) -> Self:
        """Returns itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Sends nothing: only a step can carry END."""

    @property
    def correlation_id(self) -> int | str:
        """The id by which the server knows the sequence."""
        return self._steps.correlation_id

    async def infer(
        self,
        inputs: Inputs,
        *,
        end: bool = False,
        outputs: Items[str] | None = None,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> InferResult:
        """Sends the next step and waits for its answer; concurrent steps are sent one after the other.

        The call is repeated like `AsyncClient.infer`. If it still fails without an answer (`Unreachable`,
        `Overloaded`), repeat it with the same inputs: the server executes the step once. After `InferenceFailed` the
        sequence continues from the state before that step.

        In an event loop, a cancelled call may be repeated with the same inputs: its step continues.

        Args:
            inputs: As in `AsyncClient.infer`, with a batch dimension of 1 if the model has one.
            end: Whether it is the last step.
            outputs: As in `AsyncClient.infer`.
            parameters: As in `AsyncClient.infer`.

        Raises:
            SequenceLost: The state is lost with its worker, or with Redis; begin another sequence.
            SequenceEnded: The sequence has ended, by an error at an earlier step, or by its idle time.
            InvalidRequest: Also: the last step was sent, or an unanswered step was not repeated.
            QinferError: As `AsyncClient.infer`.
        """
        async with self._lock:
            return await self._run(self._steps.infer(inputs, outputs, parameters, end=end))
