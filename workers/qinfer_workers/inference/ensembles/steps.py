"""A step of an ensemble's request, from its submission to its last response.

It is submitted again, until the deadline, while Redis is away, so that an outage does not fail the request. Steps of
asynchronous requests are also repeated while a model is overloaded. A model that this worker does not know to be ready
is looked for once more, because the gateway has seen it. Answers of earlier submissions are dropped; a
numbered step of a sequence executes once.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import count
from typing import Protocol

import msgspec

from qinfer.core.messages import Failure, OutgoingRequest, Response
from qinfer.core.retry import pause_s
from qinfer.errors import TIMED_OUT, DeadlineExceeded, ErrorCode, QinferError
from qinfer.models.ensemble_graph import PlanStep
from qinfer.submission.pending import ResponseSink
from qinfer_workers.inference.tracing import RunTrace, StepSpan

LEFT = Failure("cancelled", "the caller has left")
_FIRST_S, _LAST_S = 0.05, 1.0
AWAY = frozenset({ErrorCode.BROKER_UNAVAILABLE.value})
OF_STORED = AWAY | {ErrorCode.QUEUE_FULL.value, ErrorCode.DEADLINE_INFEASIBLE.value}
_UNREADY = (ErrorCode.MODEL_NOT_FOUND.value, ErrorCode.MODEL_NOT_READY.value)


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

    async def look_again(self) -> None:
        """Reads anew which models are ready."""
        ...


class StepLimits:
    """The bound on the requests of each step in flight in a worker (`max_inflight_requests`).

    As in Triton, it holds for the whole process (core #482).
    """

    def __init__(self, most: int) -> None:
        self._slots = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(most))

    async def enter(self, step: PlanStep, timeout_s: float) -> None:
        """Waits for room, in order of arrival."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots[id(step)].acquire()
        except TimeoutError:
            raise DeadlineExceeded(TIMED_OUT) from None

    def leave(self, step: PlanStep) -> None:
        """Makes room for another request."""
        self._slots[id(step)].release()


class StepWay(msgspec.Struct, frozen=True):
    """The way of a request's steps: failures `retried` are submitted again; `numbers` sets a step's sequence."""

    steps: StepSubmitter
    now_s: Callable[[], float]
    retried: frozenset[str] = frozenset()
    limits: StepLimits | None = None
    trace: RunTrace | None = None
    numbers: "Callable[[StepCall], None] | None" = None


class StepCall:
    """An awaited step; the end of its block cancels it."""

    __slots__ = (
        "_came", "_handle", "_has_begun", "_has_ended", "_has_slot", "_span", "_until_s", "_waiter", "_was_taken",
        "_way", "request", "rows", "step",
    )  # fmt: skip
    no_stream = ""

    def __init__(self, way: StepWay, step: PlanStep, request: OutgoingRequest, until_s: float, rows: int = 0) -> None:
        self.step = step
        self.request = request
        self.rows = rows
        self._way = way
        self._until_s = until_s
        self._came: deque[Response] | None = None
        self._waiter: asyncio.Future[Response] | None = None
        self._handle: StepHandle | None = None
        self._span: StepSpan | None = None
        self._has_begun = self._has_ended = self._has_slot = self._was_taken = False
        if way.numbers is not None and step.model.is_stateful:
            way.numbers(self)

    def __enter__(self) -> "StepCall":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_ended:
            self.close()

    @property
    def is_taken(self) -> bool:
        """Whether the stateful model gets the step."""
        return self._was_taken or (self._handle is not None and self._handle.is_taken)

    @property
    def is_known(self) -> bool:
        """Whether `is_taken` is final."""
        return not self._has_begun or self._has_ended or self.is_taken

    async def first(self) -> Response:
        """Submits the step; returns its first response or failure."""
        way, step, queue_timeout_s = self._way, self.step, self.request.timeout_s
        if way.trace is not None:
            self._span = way.trace.begin(step, self.request)
        if way.limits is not None:
            try:
                await way.limits.enter(step, self._until_s - way.now_s())
            except DeadlineExceeded as error:
                return self._passed(Response(request_id="", failure=Failure.from_error(error)))
            self._has_slot = True
        for failures in count(1):
            failure = self._submit()
            if failure is not None and failure.code in _UNREADY:
                await way.steps.look_again()
                failure = self._submit()
            if failure is None:
                response = await self._received()
                failure = response.failure
            else:
                response = Response(request_id="", failure=failure)
            if failure is None or failure.code not in way.retried:
                break
            self._was_taken = self.is_taken
            wait_s = pause_s(failures, _FIRST_S, _LAST_S)
            if way.now_s() + wait_s >= self._until_s:
                if way.retried == OF_STORED:  # it would have waited longer
                    response = msgspec.structs.replace(response, failure=_EXPIRED)
                break
            self._handle = None
            await asyncio.sleep(wait_s)
            # The earlier submission has changed these.
            self.request = msgspec.structs.replace(
                self.request, generation=0, attempt=0, timeout_s=queue_timeout_s, payload=False
            )
        return self._passed(response)

    async def next(self) -> Response:
        """Returns the next response."""
        return self._passed(await self._received())

    def took(self, nbytes: int) -> None:
        """Reports bytes taken of responses."""
        if self._handle is not None:
            self._handle.took(nbytes)

    def close(self) -> None:
        """Cancels the step unless it has ended."""
        if not self._has_ended and self._handle is not None:
            self._handle.cancel()
        self._release(LEFT)

    def deliver(self, response: Response) -> None:
        """Takes a response of the submitted step."""
        if self._waiter is None or self._waiter.done():
            if self._came is None:
                self._came = deque()
            self._came.append(response)
        else:
            self._waiter.set_result(response)

    def _submit(self) -> Failure | None:
        left_s = self._until_s - self._way.now_s()
        if left_s <= 0:
            return _EXPIRED
        self._has_begun = True
        try:
            self._handle = self._way.steps.submit_step(self.step, self.request, self, left_s)
        except QinferError as error:
            return Failure.from_error(error)
        return None

    def _received(self) -> "asyncio.Future[Response]":
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        if self._came:
            waiter.set_result(self._came.popleft())
        return waiter

    def _passed(self, response: Response) -> Response:
        if response.final:
            # An answer may arrive before the note that the step was taken; only workers' answers name the model.
            self._was_taken = response.failure is None or bool(response.model) or self.is_taken
            self._has_ended = True
            self._handle = self._waiter = None  # breaks a reference cycle
            self._release(response.failure)
        return response

    def _release(self, failure: Failure | None) -> None:
        if self._has_slot and self._way.limits is not None:
            self._has_slot = False
            self._way.limits.leave(self.step)
        if self._span is not None:
            self._span.end(failure)
            self._span = None


_EXPIRED = Failure.from_error(DeadlineExceeded(TIMED_OUT))
