"""Sequences of both clients: consecutive requests (steps) to a stateful model.

    with client.sequence("counter") as sequence:
        sequence.infer({"x": x})             START, step 1
        sequence.infer({"x": x})             step 2
        sequence.infer({"x": x}, end=True)   step 3, END

Each step has a number, so that it can be sent again after a broken connection: the server executes it once, and answers
a repetition with the stored response.
"""

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Items
from secrets import randbelow
from threading import Lock
from types import TracebackType
from typing import Self

from qinfer.client.flows import Ask, infer_request, send_encoded
from qinfer.client.model_flows import Inputs, with_datatypes
from qinfer.client.results import InferResult
from qinfer.client.steps import AsyncRun, Flow, FlowRunner, Policy, Send
from qinfer.core.messages import Scalar
from qinfer.errors import (
    START_MISSING,
    InferenceFailed,
    InvalidRequest,
    OutputMismatch,
    RequestError,
    SequenceEnded,
)

_OWN = frozenset({"sequence_id", "sequence_start", "sequence_end", "qinfer_step"})


class StepFlags:
    """The flags and numbers of a sequence's steps; pure, so that both clients share it."""

    def __init__(self, policy: Policy, model: str, version: int | None, correlation_id: int | str | None) -> None:
        self._policy, self._model, self._version = policy, model, version
        self.correlation_id = _checked(correlation_id)
        self._number = 1
        self._has_ended = False
        self._unanswered: Send | None = None

    def infer(
        self, inputs: Inputs, outputs: Items[str] | None, parameters: Mapping[str, Scalar] | None, *, end: bool
    ) -> Flow[InferResult]:
        """Sends the next step, and returns its answer; see `Sequence.infer`."""
        inputs = yield from with_datatypes(self._policy, self._model, self._version, inputs)
        send = self._request(inputs, outputs, parameters or {}, end=end)
        self._unanswered = send
        try:
            result = yield from send_encoded(self._policy, send)
        except (InferenceFailed, OutputMismatch):
            # The failure is the step's answer; the state is the one before the step.
            self._complete_step(end=end)
            raise
        except (RequestError, SequenceEnded) as error:
            self._unanswered = None
            if self._number > 1 and error.message.endswith(START_MISSING):
                raise SequenceEnded(self._over("the server no longer has it")) from None
            raise
        self._complete_step(end=end)
        return result

    def _request(
        self, inputs: Inputs, outputs: Items[str] | None, parameters: Mapping[str, Scalar], *, end: bool
    ) -> Send:
        if self._has_ended:
            raise InvalidRequest(self._over("a step had end=True"))
        if own := sorted(_OWN & set(parameters)):
            raise InvalidRequest(f"the sequence sets these parameters itself: {', '.join(own)}")
        flags = sequence_parameters(self.correlation_id, start=self._number == 1, end=end)
        flags["qinfer_step"] = self._number
        send = infer_request(Ask(self._model, inputs, self._version, outputs, {**parameters, **flags}))
        if self._unanswered not in (None, send):
            raise InvalidRequest(
                f"step {self._number} of sequence {self.correlation_id} has no answer yet, and may be executed: send "
                "it again with the same inputs, or begin another sequence"
            )
        return send

    def _complete_step(self, *, end: bool) -> None:
        self._number += 1
        self._has_ended = end
        self._unanswered = None

    def _over(self, why: str) -> str:
        return f"sequence {self.correlation_id} of model '{self._model}' has ended: {why}; begin another one"


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

        The call is repeated like `Client.infer`. If it still fails without an answer (`Unreachable`, `Overloaded`),
        repeat it with the same inputs: the server executes the step once. After `InferenceFailed` the sequence
        continues from the state before that step.

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


class AsyncSequence:
    """A sequence of requests to a stateful model, for one event loop; made by `AsyncClient.sequence`."""

    def __init__(self, run: AsyncRun, steps: StepFlags) -> None:
        self._run, self._steps = run, steps
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<AsyncSequence {self.correlation_id}>"

    async def __aenter__(self) -> Self:
        """Returns itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Sends nothing; see `Sequence.__exit__`."""

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
        """Sends the next step and waits for its answer; see `Sequence.infer`.

        A cancelled call may be repeated with the same inputs: its step continues.
        """
        async with self._lock:
            return await self._run(self._steps.infer(inputs, outputs, parameters, end=end))


def sequence_parameters(correlation_id: int | str, *, start: bool = False, end: bool = False) -> dict[str, Scalar]:
    """Returns the parameters of a request that is a step of a sequence (reference §3.4)."""
    flags: dict[str, Scalar] = {"sequence_id": correlation_id}
    flags |= {"sequence_start": True} if start else {}
    return flags | ({"sequence_end": True} if end else {})


def _checked(correlation_id: int | str | None) -> int | str:
    if correlation_id is None:
        return 1 + randbelow(2**63 - 1)
    is_number = type(correlation_id) is int and 0 < correlation_id < 2**64
    if not is_number and not (isinstance(correlation_id, str) and correlation_id):
        raise InvalidRequest(f"correlation_id is {correlation_id!r}; make it a positive integer below 2**64, or a text")
    return correlation_id
