"""The steps of a sequence as flows (`qinfer.client.steps`), without I/O.

Each step has a number, so that it can be sent again after a broken connection: the server executes it once, and answers
a repetition with the stored response.
"""

from collections.abc import Mapping, Sequence
from secrets import randbelow

from qinfer.client.flows import Ask, infer_request, send_encoded
from qinfer.client.model_flows import Inputs, with_datatypes
from qinfer.client.results import InferResult
from qinfer.client.steps import Flow, Policy, Send
from qinfer.core.messages import Scalar
from qinfer.errors import START_MISSING, InferenceFailed, InvalidRequest, OutputMismatch, RequestError, SequenceEnded

_OWN = frozenset({"sequence_id", "sequence_start", "sequence_end", "qinfer_step"})


class StepFlags:
    """The flags and numbers of a sequence's steps; pure."""

    def __init__(self, policy: Policy, model: str, version: int | None, correlation_id: int | str | None) -> None:
        self._policy, self._model, self._version = policy, model, version
        self.correlation_id = _checked(correlation_id)
        self._number = 1
        self._has_ended = False
        self._unanswered: Send | None = None

    def infer(
        self, inputs: Inputs, outputs: Sequence[str] | None, parameters: Mapping[str, Scalar] | None, *, end: bool
    ) -> Flow[InferResult]:
        """Sends the next step, and returns its answer."""
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
        self, inputs: Inputs, outputs: Sequence[str] | None, parameters: Mapping[str, Scalar], *, end: bool
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
