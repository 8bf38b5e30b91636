"""Steps that are submitted again, until the deadline, while Redis is away, so that an outage does not fail the request.

Steps of asynchronous requests are also repeated while a model is overloaded. Answers of earlier submissions are
dropped; a numbered step of a sequence executes once.
"""

import asyncio

import msgspec

from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.core.retry import pause_s
from qinfer.errors import TIMED_OUT, DeadlineExceeded, ErrorCode, QinferError
from qinfer.models.ensemble_graph import PlanStep
from qinfer.submission.pending import ResponseSink
from qinfer_workers.inference.ensembles.run import StepHandle, StepSubmitter

_FIRST_S, _LAST_S = 0.05, 1.0
_AWAY = frozenset({ErrorCode.BROKER_UNAVAILABLE.value})
_OF_STORED = _AWAY | {ErrorCode.QUEUE_FULL.value, ErrorCode.DEADLINE_INFEASIBLE.value}


class RetryingSteps:
    """Submits steps repeatedly; `is_stored` = asynchronous."""

    def __init__(self, steps: StepSubmitter, *, is_stored: bool) -> None:
        self.steps = steps
        self.is_stored = is_stored
        self.failures = _OF_STORED if is_stored else _AWAY
        self.loop = asyncio.get_running_loop()

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> StepHandle:
        """Submits a step, repeatedly if that may help."""
        insisted = _RetriedStep(self, step, request, sink)
        insisted.submit_first(timeout_s)
        return insisted


class _RetriedStep:
    __slots__ = (
        "_failures", "_has_responded", "_queue_timeout_s", "_request", "_sink", "_step", "_submitted", "_timer",
        "_until_s", "_was_taken", "_way",
    )  # fmt: skip
    no_stream = ""

    def __init__(self, way: RetryingSteps, step: PlanStep, request: OutgoingRequest, sink: ResponseSink) -> None:
        self._way = way
        self._step = step
        self._request = request
        self._sink = sink
        self._queue_timeout_s = request.timeout_s
        self._until_s = 0.0
        self._failures = 0
        self._submitted: StepHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._was_taken = self._has_responded = False

    @property
    def is_taken(self) -> bool:
        return self._was_taken or (self._submitted is not None and self._submitted.is_taken)

    def submit_first(self, timeout_s: float) -> None:
        self._until_s = self._way.loop.time() + timeout_s
        try:
            self._submitted = self._way.steps.submit_step(self._step, self._request, self, timeout_s)
        except QinferError as error:
            if not self._waits(error.code):
                raise (DeadlineExceeded(TIMED_OUT) if self._expires(error.code) else error) from None

    def deliver(self, response: Response) -> None:
        failure = response.failure
        if failure is not None and not self._has_responded:
            self._was_taken = self.is_taken
            if self._waits(failure.code):
                return
            if self._expires(failure.code):
                response = msgspec.structs.replace(response, failure=Failure.from_error(DeadlineExceeded(TIMED_OUT)))
        self._has_responded = True
        if response.final:
            # breaks a reference cycle
            self._was_taken, self._submitted = self.is_taken, None
        self._sink.deliver(response)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._submitted is not None:
            self._submitted.cancel()

    def took(self, nbytes: int) -> None:
        if self._submitted is not None:
            self._submitted.took(nbytes)

    def _expires(self, code: str) -> bool:
        return self._way.is_stored and code in _OF_STORED

    def _waits(self, code: str) -> bool:
        if code not in self._way.failures:
            return False
        self._failures += 1
        wait_s = pause_s(self._failures, _FIRST_S, _LAST_S)
        if self._way.loop.time() + wait_s >= self._until_s:
            return False
        self._submitted = None
        self._timer = self._way.loop.call_later(wait_s, self._again)
        return True

    def _again(self) -> None:
        self._timer = None
        # an earlier submission changed these
        request = msgspec.structs.replace(
            self._request, generation=0, attempt=0, timeout_s=self._queue_timeout_s, payload=False
        )
        try:
            left_s = self._until_s - self._way.loop.time()
            self._submitted = self._way.steps.submit_step(self._step, request, self, left_s)
        except QinferError as error:
            self.deliver(Response(request_id="", failure=Failure.from_error(error)))
