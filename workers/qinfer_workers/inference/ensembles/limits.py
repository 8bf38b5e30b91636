"""The bound on the requests of each step of an ensemble that are in flight in a worker (`max_inflight_requests`).

Steps beyond it are parked. When a step has ended, the oldest parked one is submitted; one fails when its time is over.
As in Triton, the bound holds for the whole process (core #482).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.errors import TIMED_OUT, DeadlineExceeded, QinferError
from qinfer.models.ensemble_graph import PlanStep
from qinfer.submission.pending import ResponseSink, Timer
from qinfer_workers.inference.ensembles.run import StepHandle, StepSubmitter


class StepLimits:
    """Bounds the requests in flight of each step of one plan."""

    def __init__(
        self, most: int, now_s: Callable[[], float], call_later: Callable[[float, Callable[[], None]], Timer]
    ) -> None:
        self.now_s = now_s
        self.call_later = call_later
        self._most = most
        self._in_flight: Counter[int] = Counter()
        self._parked: dict[int, OrderedDict[_LimitedStep, None]] = {}
        self._is_going_on = False

    def over(self, steps: StepSubmitter) -> StepSubmitter:
        """Returns one request's way of steps within the bound."""
        return _LimitedSteps(steps, self)

    def enter(self, limited: "_LimitedStep") -> bool:
        """Counts a step's request; parks it without room."""
        if self._in_flight[limited.key] < self._most:
            self._in_flight[limited.key] += 1
            return True
        self._parked.setdefault(limited.key, OrderedDict())[limited] = None
        return False

    def unpark(self, limited: "_LimitedStep") -> None:
        """Removes a parked request."""
        parked = self._parked[limited.key]
        del parked[limited]
        if not parked:
            del self._parked[limited.key]

    def release_slot(self, key: int) -> None:
        """Notes the end of a request, and submits parked requests."""
        self._in_flight[key] -= 1
        if self._is_going_on:
            return  # no recursion
        self._is_going_on = True
        try:
            while limited := self._next():
                limited.go_on()
        finally:
            self._is_going_on = False

    def _next(self) -> "_LimitedStep | None":
        for key, parked in self._parked.items():
            if self._in_flight[key] < self._most:
                self._in_flight[key] += 1
                limited = next(iter(parked))
                self.unpark(limited)
                return limited
        return None


class _LimitedSteps:
    def __init__(self, steps: StepSubmitter, limits: StepLimits) -> None:
        self._steps = steps
        self._limits = limits

    def submit_step(self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float) -> StepHandle:
        until_s = self._limits.now_s() + timeout_s

        def submit(taker: ResponseSink) -> StepHandle:
            left_s = until_s - self._limits.now_s()
            if left_s <= 0:
                raise DeadlineExceeded(TIMED_OUT)
            return self._steps.submit_step(step, request, taker, left_s)

        limited = _LimitedStep(self._limits, id(step), submit, sink)
        if self._limits.enter(limited):
            limited.submit_request()
        else:
            limited.set_timer(timeout_s)
        return limited


class _LimitedStep:
    __slots__ = ("_has_begun", "_is_over", "_limits", "_sink", "_submit", "_submitted", "_timer", "_was_taken", "key")
    no_stream = ""

    def __init__(
        self, limits: StepLimits, key: int, submit: Callable[[ResponseSink], StepHandle], sink: ResponseSink
    ) -> None:
        self.key = key
        self._limits = limits
        self._submit = submit
        self._sink = sink
        self._submitted: StepHandle | None = None
        self._timer: Timer | None = None
        self._has_begun = self._is_over = self._was_taken = False

    @property
    def is_taken(self) -> bool:
        return self._was_taken or (self._submitted is not None and self._submitted.is_taken)

    def submit_request(self) -> None:
        self._has_begun = True
        try:
            self._submitted = self._submit(self)
        except QinferError:
            self._leave_limits()
            raise

    def set_timer(self, timeout_s: float) -> None:
        self._timer = self._limits.call_later(timeout_s, self._expire)

    def go_on(self) -> None:
        self._stop_timer()
        try:
            self.submit_request()
        except QinferError as error:
            self._deliver_failure(error)

    def deliver(self, response: Response) -> None:
        if not response.final:
            self._sink.deliver(response)
            return
        self._was_taken = self.is_taken
        # breaks a reference cycle
        self._submitted = None
        self._sink.deliver(response)
        self._leave_limits()

    def cancel(self) -> None:
        if self._submitted is not None:
            self._submitted.cancel()
        self._leave_limits()

    def took(self, nbytes: int) -> None:
        if self._submitted is not None:
            self._submitted.took(nbytes)

    def _expire(self) -> None:
        self._leave_limits()
        self._deliver_failure(DeadlineExceeded(TIMED_OUT))

    def _deliver_failure(self, error: QinferError) -> None:
        self._sink.deliver(Response(request_id="", failure=Failure.from_error(error)))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave_limits(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._has_begun:
            self._limits.release_slot(self.key)
        else:
            self._stop_timer()
            self._limits.unpark(self)
