"""Calls between models: requests of model code go into the queue, the answers to the waiting threads.

The instance's thread resolves and checks; the event loop submits. The worker can call models that it does not host. Its
reply stream, opened at the first call, also carries credits. A gateway marks traced requests (`InferRequest.calls`);
notes of their calls and steps return with the last response (`Response.called`).

Model code may also load and unload models, by the desired state that all workers follow. Like a gateway, the worker
needs the repository's control mode and overlay in its settings.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec

from qinfer.batching.rate_limiter import Ledger
from qinfer.core.call_chain import depth_of, endless, level_of, names_of
from qinfer.core.messages import CalledTensor, CallRecord, CallTraces, Credit, Failure, OutgoingRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import (
    BrokerUnavailable,
    Cancelled,
    CorruptEntry,
    DeadlineExceeded,
    InferenceFailed,
    ModelNotFound,
    ModelNotReady,
    QinferError,
)
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.control import ModelControl
from qinfer.models.ensemble_graph import PlanStep
from qinfer.observe.logs import ErrorLogger
from qinfer.queue.entries import Lane, reply_address, worker_owner
from qinfer.queue.lanes import Queue
from qinfer.submission.memory import TensorMemory
from qinfer.submission.pending import PendingCall, PendingRequests, ResponseSink
from qinfer.submission.response_cache import ResponseCache
from qinfer.submission.submit import Entrance, Submission, check
from qinfer.tensors import Tensor
from qinfer.traffic.controller import EndpointFollower
from qinfer.wire.frame import decode_credits, is_credits
from qinfer_workers.inference.calls.answers import EXPIRED, GRACE_S, CallAnswer, CallResponses, StreamInbox, raised
from qinfer_workers.inference.ensembles.local import LocalSteps

_FENCE = ErrorLogger(logging.getLogger(__name__), "traces of calls lost, the calls continue")

MOST_TENSOR_BYTES = 16 * 1024

MOST_BYTES = 64 * 1024
"""Further tensors are left out."""


def traced(
    request: OutgoingRequest, sink: ResponseSink, now_s: Callable[[], float]
) -> tuple[OutgoingRequest, ResponseSink]:
    """Returns a call's request and sink, with a note if it serves a traced request."""
    if request.calls is None:
        return request, sink
    own = msgspec.structs.replace(request, calls=CallTraces(has_tensors=request.calls.has_tensors))
    return own, _NotingSink(sink, own, request.calls, now_s)


class _NotingSink:
    def __init__(
        self, sink: ResponseSink, request: OutgoingRequest, into: CallTraces, now_s: Callable[[], float]
    ) -> None:
        self.no_stream = sink.no_stream
        self._sink = sink
        self._request = request
        self._into = into
        self._now_s = now_s
        self._begin_s = now_s()
        self._tensors: list[CalledTensor] = []
        with _FENCE:
            self._note_tensors(request.inputs, is_output=False)

    def deliver(self, response: Response) -> None:
        with _FENCE:
            self._note_tensors(response.outputs, is_output=True)
            if response.final:
                self._into.add(self._called(response))
        self._sink.deliver(response)

    def _called(self, response: Response) -> CallRecord:
        request, tensors = self._request, tuple(self._tensors)
        model, version = response.model or request.model, response.version or request.version
        times = self._begin_s, self._now_s()
        return CallRecord(model, version, request.client_id, *times, response.timing, tensors, response.called)

    def _note_tensors(self, tensors: Sequence[Tensor], *, is_output: bool) -> None:
        if not self._into.has_tensors:
            return
        left = MOST_BYTES - sum([len(tensor.data) for tensor in self._tensors])
        for tensor in tensors:
            data = bytes(memoryview(tensor.data)[:MOST_TENSOR_BYTES])
            left -= len(data)
            if left >= 0:
                self._tensors.append(CalledTensor(is_output, tensor.name, tensor.datatype, tuple(tensor.shape), data))


T = TypeVar("T")

_ENDING = "the worker ends"


class ModelLoads:
    """The `ManagesModels` of a worker's models; called from other threads."""

    def __init__(self, control: ModelControl, catalog: Catalog) -> None:
        self._control = control
        self._catalog = catalog
        self._loop = asyncio.get_running_loop()
        self._is_over = False

    def load(self, model: str, config: str, files: Mapping[str, bytes]) -> None:
        """Loads a model."""
        self._done(self._control.load(model, config, files))

    def unload(self, model: str, *, unload_dependents: bool) -> None:
        """Unloads a model."""
        self._done(self._control.unload(model, unload_dependents=unload_dependents))

    def is_ready(self, model: str, version: int) -> bool:
        """Returns whether a model version is ready."""
        return self._done(self._is_ready(model, version))

    async def end_with(self, stop: asyncio.Event) -> None:
        """Waits for the worker's end, then ends current loads and refuses further loads."""
        await stop.wait()
        self._is_over = True
        self._control.cancel_loads()

    async def _is_ready(self, model: str, version: int) -> bool:
        await self._catalog.refresh()
        try:
            return self._catalog.says_ready(model, version)
        except (ModelNotFound, ModelNotReady):
            return False

    def _done(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_over:
            work.close()
            raise Cancelled(_ENDING)
        try:
            outcome = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise Cancelled(_ENDING) from None
        try:
            return outcome.result()
        except CancelledError:
            raise Cancelled(_ENDING) from None


logger = logging.getLogger(__name__)

FRESH_S = 2.0

RECHECK_S = 0.25

_DECOUPLED = (
    "Model {model} is using the decoupled. The current BLS request call doesn't support models using the decoupled "
    "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models."
)


class WorkerCaller:
    """Calls of a worker's executions; made on the event loop, called from instance threads.

    `called` gets the lane of each called model, `credited` arriving credits.
    """

    local: LocalSteps
    limiter: Ledger | None = None
    endpoints: EndpointFollower | None = None

    def __init__(
        self,
        queue: Queue,
        catalog: Catalog,
        worker_id: str,
        tasks: asyncio.TaskGroup,
        limits: LimitSettings,
        called: Callable[[Lane], None] = lambda _: None,
    ) -> None:
        self._queue = queue
        self._catalog = catalog
        self._owner = worker_owner(worker_id)
        self._tasks = tasks
        self._called = called
        self._is_following_endpoints = False
        self.address = reply_address(self._owner)
        self.credited: Callable[[list[Credit]], None] = lambda _: None
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._max_depth = limits.max_call_depth
        self._submission = Submission(queue, catalog, limits, self._owner, _deliver_response, _deliver_failure)
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._listening = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._is_following = False

    def use_local_steps(self, local: LocalSteps) -> None:
        """Sets the short cut of steps."""
        self.local = local
        local.submission = self._submission

    def set_cache(self, cache: ResponseCache) -> None:
        """Caches responses of called models."""
        self._submission.set_cache(cache)

    def set_memory(self, memory: TensorMemory) -> None:
        """Keeps large tensors of calls in memory; before the first call."""
        self._submission.set_memory(memory)

    def call(self, request: OutgoingRequest, deadline_s: float) -> Response:
        """Implements `ModelCaller.call`."""
        deadline_s = self._deadline_s(request, deadline_s)
        self._aim(request, deadline_s)
        served = self._checked(request, deadline_s)
        if served.spec.decoupled:
            raise InferenceFailed(_DECOUPLED.format(model=request.model))
        answer = CallAnswer()
        self._submit_request(served, request, answer, deadline_s)
        response = self._outcome(answer.future, deadline_s)
        if response.failure is not None:
            raise raised(response.failure, request.model)
        if response.index:
            raise InferenceFailed(f"model '{request.model}' gave several responses; a call takes one")
        return response

    def stream(self, request: OutgoingRequest, deadline_s: float) -> CallResponses:
        """Implements `ModelCaller.stream`."""
        deadline_s = self._deadline_s(request, deadline_s)
        self._aim(request, deadline_s)
        served = self._checked(request, deadline_s)
        inbox = StreamInbox(self._submission.pending.cancel)
        self._submit_request(served, request, inbox, deadline_s)
        return CallResponses(self._loop, inbox, request.model, lambda: deadline_s - self._now_s())

    async def follow(self) -> None:
        """Follows the catalog; returns once it was read."""
        await self.listen()
        if not self._is_following:
            await self._refresh(FRESH_S)
            self._is_following = True
            self._background.append(self._tasks.create_task(self._catalog.run()))

    def submit_step(
        self,
        step: PlanStep,
        request: OutgoingRequest,
        sink: ResponseSink,
        timeout_s: float,
        *,
        cached: bool = True,
        near: bool = True,
    ) -> "WaitingStep":
        """Submits a step of an ensemble, after `follow`; `near` allows the short cut."""
        if self._is_closed:
            raise Cancelled(_ENDING)
        entrance = self._submission.asked(step.model.name, step.version)
        if not cached:
            entrance = entrance.uncached
        served = entrance.served
        if request.holders and (reason := self._endless(request, served)):
            raise InferenceFailed(reason)
        request.generation = 0
        request, sink = traced(request, sink, self._now_s)
        timeout_s = min(timeout_s, served.spec.max_timeout_s)
        try:
            held = self._submit_held(entrance, request, sink, timeout_s, cached=cached)
            if held is not None:
                pending = held
            elif near:
                pending = entrance.submit_near(request, sink, timeout_s, self.local)
            else:
                pending = entrance.submit(request, sink, timeout_s)
        except QinferError:
            raise
        except Exception:
            logger.exception("step failed")
            raise _unexpected() from None
        self.local.called(served.lane)
        return WaitingStep(self._submission.pending, pending, self.local)

    async def look_again(self) -> None:
        """Reads the catalog anew: the gateway that let a request in may have known of a model sooner."""
        await self._refresh(RECHECK_S)

    def is_target(self, model: str, version: int) -> bool:
        """Returns whether a call to a model version is in progress."""
        return self._submission.pending.has_any_of(model, version)

    def close(self) -> "list[asyncio.Task[Any]]":
        """Refuses further calls, ends current calls, returns tasks to cancel."""
        self._is_closed = True
        self._submission.pending.fail_all(Cancelled(_ENDING))
        return [*self._open, *self._background]

    async def discard(self) -> None:
        """Removes abandoned requests from the queue."""
        await self._submission.pending.discard()

    def _now_s(self) -> float:
        return self._queue.clock.now_s()

    def _deadline_s(self, request: OutgoingRequest, deadline_s: float) -> float:
        if threading.get_ident() == self._loop_thread:
            raise InferenceFailed("a batch that the event loop executes can't call another model")
        return min(deadline_s, self._now_s() + request.timeout_s) if request.timeout_s else deadline_s

    def _submit_request(
        self, served: ServedVersion, request: OutgoingRequest, answer: CallAnswer | StreamInbox, deadline_s: float
    ) -> None:
        timeout_s = min(deadline_s - self._now_s(), served.spec.max_timeout_s)
        if timeout_s <= 0:
            raise DeadlineExceeded(EXPIRED)
        request.timeout_s = 0.0  # the deadline includes it
        check(request, served)
        try:
            self._loop.call_soon_threadsafe(self._submit, served, request, answer, timeout_s)
        except RuntimeError:  # the loop is closed
            raise Cancelled(_ENDING) from None

    def _aim(self, request: OutgoingRequest, deadline_s: float) -> None:
        endpoints = self.endpoints
        if endpoints is None:
            return
        if not self._is_following_endpoints or self._now_s() - self._refreshed_at > FRESH_S:
            self._outcome(self._on_loop(self._within(self._refresh_models(), deadline_s)), deadline_s)
        endpoints.view.choose(request, request.tenant)

    def _checked(self, request: OutgoingRequest, deadline_s: float) -> ServedVersion:
        holders = request.holders
        if depth_of(holders) > self._max_depth:
            raise InferenceFailed(
                f"model '{request.model}' can't be called: calls between models may be {self._max_depth} deep, and "
                f"this one is deeper ({names_of(holders, request.model)}); end the recursion sooner, or raise "
                "QINFER_LIMITS__MAX_CALL_DEPTH"
            )
        served = self._served(request.model, request.version, deadline_s)
        if self._endless(request, served):
            self._outcome(self._on_loop(self._refresh(RECHECK_S)), deadline_s)
            served = self._served(request.model, request.version, deadline_s)
            if reason := self._endless(request, served):
                raise InferenceFailed(reason)
        return served

    def _endless(self, request: OutgoingRequest, served: ServedVersion) -> str:
        spec, version = served.spec, served.version
        if served.wait_s or spec.steps:
            return ""  # no worker has it yet; an ensemble's steps are checked
        workers = sum(worker.is_ready(spec.name, version) for worker in self._catalog.workers())
        return endless(request.holders, spec.name, version, workers * spec.instance_count)

    def _served(self, model: str, version: int, deadline_s: float) -> ServedVersion:
        """Uses a fresh view in this thread: views are never changed."""
        if self._now_s() - self._refreshed_at <= FRESH_S:
            with suppress(ModelNotFound, ModelNotReady):
                return self._catalog.unpaused(model, version)
        return self._outcome(self._on_loop(self._within(self._resolve(model, version), deadline_s)), deadline_s)

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise Cancelled(_ENDING) from None

    def _submit(
        self, served: ServedVersion, request: OutgoingRequest, answer: CallAnswer | StreamInbox, timeout_s: float
    ) -> None:
        if self._is_closed:
            answer.fail(Cancelled(_ENDING))
            return
        request, sink = traced(request, answer, self._now_s)
        try:
            entrance = self._submission.of(served)
            held = self._submit_held(entrance, request, sink, timeout_s)
            answer.submitted(held or entrance.submit(request, sink, timeout_s))
        except QinferError as error:
            answer.fail(error)
        except Exception:  # the boundary: no failure of a call may end the worker
            logger.exception("call failed")
            answer.fail(_unexpected())
        else:
            self._called(served.lane)

    def _submit_held(
        self, entrance: Entrance, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, *, cached: bool = True
    ) -> PendingCall | None:
        """Submits a call past the lane, where requests that wait for its callers may be ahead; `None` = use it."""
        limiter, served, spec = self.limiter, entrance.served, entrance.spec
        if limiter is None or not spec.is_limited:
            held = level_of(request.holders, spec.name, served.version)
            if not held or (spec.is_cached and cached) or not self.local.has_more(spec.name, served.version, held):
                return None
        elif not limiter.holds(request.holders):
            return None
        elif (spec.decoupled or not self.local.serves(spec.name, served.version)) and (
            reason := limiter.conflict(spec.name, request.holders)
        ):
            raise InferenceFailed(reason)
        self._called(served.lane)
        # A batcher of another generation refuses it: the lane is used then.
        return entrance.lane.submit_here(request, sink, timeout_s, self.local)

    def _outcome(self, outcome: "Future[T]", deadline_s: float) -> T:
        try:
            return outcome.result(max(deadline_s - self._now_s(), 0.0) + GRACE_S)
        except TimeoutError:
            raise DeadlineExceeded(EXPIRED) from None
        except CancelledError:
            raise Cancelled(_ENDING) from None

    async def _refresh_models(self) -> None:
        await self.listen()
        await self._refresh(FRESH_S)
        if self.endpoints is not None and not self._is_following_endpoints:
            await self.endpoints.load_endpoints()
            if not self._is_following_endpoints:  # another call may have begun to
                self._is_following_endpoints = True
                self._background.append(self._tasks.create_task(self.endpoints.run()))

    async def _resolve(self, model: str, version: int) -> ServedVersion:
        await self.listen()
        await self._refresh(FRESH_S)
        with suppress(ModelNotFound, ModelNotReady):
            return self._catalog.unpaused(model, version)
        await self._refresh(RECHECK_S)
        return self._catalog.asked(model, version)

    async def _within(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        if self._is_closed:
            work.close()
            raise Cancelled(_ENDING)
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            async with asyncio.timeout(max(deadline_s - self._now_s(), 0.0)):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(EXPIRED) from None
        except QinferError:
            raise
        except Exception:
            logger.exception("call failed")
            raise _unexpected() from None
        finally:
            self._open.discard(task)

    async def _refresh(self, older_than_s: float) -> None:
        """Without the store, or while its data is restored, the last view stays."""
        async with self._refreshing:
            if self._now_s() - self._refreshed_at <= older_than_s:
                return
            try:
                is_new = await self._catalog.refresh()
                if not is_new and self._refreshed_at == float("-inf"):
                    raise BrokerUnavailable("models are being restored; try again")
            except BrokerUnavailable:
                if self._refreshed_at == float("-inf"):
                    raise
                return
            if is_new:
                self._refreshed_at = self._now_s()

    async def listen(self) -> None:
        """Reads the reply stream; returns once it exists."""
        if not self._background:
            pending = self._submission.pending
            listener = self._queue.listen(self._owner, self._receive, self._listening.set, pending.lose_all)
            self._background = [self._tasks.create_task(listener), self._tasks.create_task(self._submission.run())]
        await self._listening.wait()

    def _receive(self, blob: bytes) -> None:
        if not is_credits(blob):
            self._submission.pending.receive(blob)
            return
        try:
            self.credited(decode_credits(blob))
        except CorruptEntry:
            logger.exception("credits dropped: they can't be decoded")


class FarSteps(NamedTuple):
    """Submits steps without the short cut."""

    caller: WorkerCaller

    def submit_step(
        self, step: PlanStep, request: OutgoingRequest, sink: ResponseSink, timeout_s: float
    ) -> "WaitingStep":
        """Submits a step through its lane."""
        return self.caller.submit_step(step, request, sink, timeout_s, near=False)

    async def look_again(self) -> None:
        """Reads the catalog anew; see `WorkerCaller.look_again`."""
        await self.caller.look_again()


class WaitingStep(NamedTuple):
    """A step of an ensemble that waits for its answer."""

    table: PendingRequests
    pending: PendingCall
    local: LocalSteps

    @property
    def is_taken(self) -> bool:
        """Whether the queue has the sequence's step."""
        return self.pending.step is not None and self.pending.step.place is not None

    def cancel(self) -> None:
        """Takes the step out of the queue or its batcher."""
        self.table.cancel(self.pending)
        self.local.abandon_step(self.pending)

    def took(self, nbytes: int) -> None:
        """Reports bytes taken of responses."""
        if self.pending.stream is not None:
            self.pending.stream.took(nbytes)


def _deliver_response(pending: PendingCall, response: Response) -> None:
    pending.sink.deliver(response)


def _deliver_failure(pending: PendingCall, error: Exception) -> None:
    pending.sink.deliver(Response(request_id=pending.request_id, failure=Failure.from_error(error)))


def _unexpected() -> InferenceFailed:
    return InferenceFailed("a call to another model failed; the worker's log says why")
