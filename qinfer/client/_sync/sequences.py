# Made by scripts/generate_client.py from qinfer/client/_async/sequences.py; `make docs` writes it anew.
"""A sequence: consecutive requests (steps) to a stateful model.

with client.sequence("counter") as sequence:
sequence.infer({"x": x})             START, step 1
sequence.infer({"x": x})             step 2
sequence.infer({"x": x}, end=True)   step 3, END
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from threading import Lock
from types import TracebackType
from typing import Self

from qinfer.client.flows import StepFlags
from qinfer.client.model_flows import Inputs
from qinfer.client.results import InferResult
from qinfer.client.steps import FlowRunner
from qinfer.core.messages import Scalar


class Sequence:
    """A sequence of requests to a stateful model; made by `Client.sequence`.

    Its first step is sent with START. Without a step with `end=True`, the sequence ends after its model's idle time.
    """

    def __init__(self, run: FlowRunner, steps: StepFlags) -> None:
        self._run, self._steps = run, steps
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<Sequence {self.correlation_id}>"

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Sends nothing: only a step can carry END."""

    @property
    def correlation_id(self) -> int | str:
        """The id by which the server knows the sequence."""
        return self._steps.correlation_id

    def infer(
        self,
        inputs: Inputs,
        *,
        end: bool = False,
        outputs: Items[str] | None = None,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> InferResult:
        """Sends the next step and waits for its answer; concurrent steps are sent one after the other.

        The call is repeated like `Client.infer`. If it still fails without an answer (`Unreachable`,
        `Overloaded`), repeat it with the same inputs: the server executes the step once. After `InferenceFailed` the
        sequence continues from the state before that step.

        Args:
            inputs: As in `Client.infer`, with a batch dimension of 1 if the model has one.
            end: Whether it is the last step.
            outputs: As in `Client.infer`.
            parameters: As in `Client.infer`.

        Raises:
            SequenceLost: The state is lost with its worker, or with Redis; begin another sequence.
            SequenceEnded: The sequence has ended, by an error at an earlier step, or by its idle time.
            InvalidRequest: Also: the last step was sent, or an unanswered step was not repeated.
            QinferError: As `Client.infer`.
        """
        with self._lock:
            return self._run(self._steps.infer(inputs, outputs, parameters, end=end))
