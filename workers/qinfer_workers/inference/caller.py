"""Calls between models: a request of a model's code goes into the queue, its answer to the thread that waits for it.

    instance thread ── resolve, check ──▶ event loop ── Submission.submit ──▶ lane ──▶ any worker
          ▲                                   │
          └──────────── answer ───────────────┴◀── reply:worker-<id>

The worker is a client of the queue here, as a gateway is: it calls models that it does not host. Until the first call
it has no reply stream and reads no catalog. The credits of its own streams come by that stream, too.

A call may name an endpoint; its target is chosen here, by the declarations that gateways go by. Steps of ensembles name
models only.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from qinfer.core.call_chain import depth_of, endless, level_of, names_of
from qinfer.core.messages import Credit, Failure, Holder, InferRequest, Response
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
from qinfer.models.catalog import Catalog, Served
from qinfer.models.ensemble_graph import PlanStep
from qinfer.models.spec import ModelSpec
from qinfer.queue.entries import Lane, reply_address
from qinfer.queue.lanes import Queue
from qinfer.submission.pending import Pending, PendingRequests, Sink
from qinfer.submission.response_cache import ResponseCache
from qinfer.submission.submit import Submission, check
from qinfer.traffic.controller import EndpointFollower
from qinfer.wire.frame import decode_credits, is_credits
from qinfer_workers.inference.call_answers import EXPIRED, GRACE_S, Answer, Inbox, Responses, raised
from qinfer_workers.inference.call_traces import traced
from qinfer_workers.inference.ensembles.local import LocalSteps

logger = logging.getLogger(__name__)

FRESH_S = 2.0
"""A view of the models that is older is read again before a call, as in a gateway."""

RECHECK_S = 0.25
"""A refusal by a view that is older counts only when another look confirms it."""

_ENDING = "the worker ends"
_DECOUPLED = (
    "Model {model} is using the decoupled. The current BLS request call doesn't support models using the decoupled "
    "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models."
)
T = TypeVar("T")


class CallLimits(Protocol):
    """The rate limiter, as calls need it."""

    def holds(self, callers: Sequence[Holder]) -> bool:
        """Tells whether executions that wait for a call hold resources."""
        ...

    def conflict(self, spec: ModelSpec, callers: Sequence[Holder]) -> str:
        """Returns why a model can't be called elsewhere by executions that hold what it needs; empty = it can."""
        ...


class Caller:
    """The `Caller` of a worker's executions; made on the event loop, called from the threads of its instances.

    Args:
        queue: The queue.
        catalog: Which models are served; the caller refreshes it.
        worker_id: Names the reply address, `reply:worker-<id>`.
        tasks: Owns the tasks.
        limits: What is refused, and which tensors are large.
        called: Told each model version (as a lane of it) that was called, on the event loop.

    Attributes:
        address: Where its replies go, and the credits of the worker's streams.
        credited: Told the credits that came, on the event loop.
        local: The short cut of steps of ensembles.
        limiter: Tells which calls hold resources of the rate limiter; `None` = it is off.
        endpoints: The endpoints that calls may name, followed from the first call on; `None` = there are none.
    """

    local: LocalSteps
    limiter: CallLimits | None = None
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
        self._owner = f"worker-{worker_id}"
        self._tasks = tasks
        self._called = called
        self._is_following_endpoints = False
        self.address = reply_address(self._owner)
        self.credited: Callable[[list[Credit]], None] = lambda _: None
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._max_depth = limits.max_call_depth
        self._submission = Submission(queue, catalog, limits, self._owner, _answered, _failed)
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._listening = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._is_following = False

    def go_short(self, local: LocalSteps) -> None:
        """Lets steps of ensembles take a short cut; to be called before the first step."""
        self.local = local
        local.submission = self._submission

    def use(self, cache: ResponseCache) -> None:
        """Has the responses of called models cached; to be called before the first call."""
        self._submission.use(cache)

    def call(self, request: InferRequest, deadline_s: float) -> Response:
        """See `qinfer.batching.execution.Caller.call`."""
        deadline_s = self._deadline_s(request, deadline_s)
        request = self._aimed(request, deadline_s)
        served = self._checked(request, deadline_s)
        if served.spec.decoupled:
            raise InferenceFailed(_DECOUPLED.format(model=request.model))
        answer = Answer()
        self._send(served, request, answer, deadline_s)
        response = self._outcome(answer.future, deadline_s)
        if response.failure is not None:
            raise raised(response.failure, request.model)
        if response.index:
            raise InferenceFailed(f"model '{request.model}' gave several responses; a call takes one")
        return response

    def stream(self, request: InferRequest, deadline_s: float) -> Responses:
        """See `qinfer.batching.execution.Caller.stream`."""
        deadline_s = self._deadline_s(request, deadline_s)
        request = self._aimed(request, deadline_s)
        served = self._checked(request, deadline_s)
        inbox = Inbox(self._submission.pending.cancel)
        self._send(served, request, inbox, deadline_s)
        return Responses(self._loop, inbox, request.model, lambda: deadline_s - self._now_s())

    async def follow(self) -> None:
        """Follows the catalog from the first time on, for steps of ensembles; returns once it was read.

        Raises:
            BrokerUnavailable: It can't be read now.
        """
        await self.listen()
        if not self._is_following:
            await self._refresh(FRESH_S)
            self._is_following = True
            self._background.append(self._tasks.create_task(self._catalog.run()))

    def submit_step(
        self,
        step: PlanStep,
        request: InferRequest,
        sink: Sink,
        timeout_s: float,
        *,
        cached: bool = True,
        near: bool = True,
    ) -> "Submitted":
        """Submits a step of an ensemble; on the event loop, after `follow`.

        Args:
            step: The step.
            request: Its request.
            sink: Takes the answer.
            timeout_s: From now to its deadline.
            cached: Whether the response may be a cached one, or become one.
            near: Whether it may take the short cut.

        Raises:
            QinferError: It is refused.
        """
        if self._is_closed:
            raise Cancelled(_ENDING)
        served = self._catalog.asked(step.model.name, step.version)
        if served.spec.is_cached and not cached:
            served = replace(served, spec=replace(served.spec, is_cached=False))
        if request.holders and (reason := self._endless(request, served)):
            raise InferenceFailed(reason)
        request.generation = 0
        request, sink = traced(request, sink, self._now_s)
        timeout_s = min(timeout_s, served.spec.max_timeout_s)
        try:
            held = self._submit_held(served, request, sink, timeout_s)
            if held is not None:
                pending = held
            elif near:
                pending = self._submission.submit_near(served, request, sink, timeout_s, self.local)
            else:
                pending = self._submission.submit(served, request, sink, timeout_s)
        except QinferError:
            raise
        except Exception:  # the boundary, as in `_submit`
            logger.exception("step failed")
            raise _unexpected() from None
        self.local.called(served.lane)
        return Submitted(self._submission.pending, pending, self.local)

    def is_target(self, model: str, version: int) -> bool:
        """Returns whether a call to a model version is in progress."""
        return self._submission.pending.has_any_of(model, version)

    def close(self) -> "list[asyncio.Task[Any]]":
        """Refuses further calls and ends those in progress with `Cancelled`; returns the tasks to be cancelled."""
        self._is_closed = True
        self._submission.pending.fail_all(Cancelled(_ENDING))
        return [*self._open, *self._background]

    async def discard(self) -> None:
        """Removes abandoned requests from the queue now; if Redis is away, their deadlines end them."""
        await self._submission.pending.discard()

    def _now_s(self) -> float:
        return self._queue.clock.now_s()

    def _deadline_s(self, request: InferRequest, deadline_s: float) -> float:
        """Returns the deadline of a request of this thread, shortened by its own timeout."""
        if threading.get_ident() == self._loop_thread:
            raise InferenceFailed("a batch that the event loop executes can't call another model")
        return min(deadline_s, self._now_s() + request.timeout_s) if request.timeout_s else deadline_s

    def _send(self, served: Served, request: InferRequest, answer: Answer | Inbox, deadline_s: float) -> None:
        """Has the event loop submit a request."""
        timeout_s = min(deadline_s - self._now_s(), served.spec.max_timeout_s)
        if timeout_s <= 0:
            raise DeadlineExceeded(EXPIRED)
        # The submission writes to it. Its own timeout is part of the deadline, and none for the queue.
        request = msgspec.structs.replace(request, generation=0, attempt=0, timeout_s=0.0, payload=False)
        check(request, served)
        try:
            self._loop.call_soon_threadsafe(self._submit, served, request, answer, timeout_s)
        except RuntimeError:  # the loop is closed
            raise Cancelled(_ENDING) from None

    def _aimed(self, request: InferRequest, deadline_s: float) -> InferRequest:
        """Returns a request for the target that was chosen, if it names an endpoint; blocks this thread.

        Raises:
            ModelNotFound: It names a version that no target has.
            BrokerUnavailable: It names another version than the stable one, and no changes of endpoints are heard of.
        """
        endpoints = self.endpoints
        if endpoints is None:
            return request
        if not self._is_following_endpoints or self._now_s() - self._refreshed_at > FRESH_S:
            self._outcome(self._on_loop(self._within(self._look(), deadline_s)), deadline_s)
        if request.model not in endpoints.view.by_name:
            return request
        aimed = msgspec.structs.replace(request)
        endpoints.view.choose(aimed, aimed.tenant)
        return aimed

    def _checked(self, request: InferRequest, deadline_s: float) -> Served:
        """Finds the model of a call, and makes sure that the call does not wait for itself; blocks this thread.

        Raises:
            InferenceFailed: It would, or models call one another too deep.
        """
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

    def _endless(self, request: InferRequest, served: Served) -> str:
        """Returns why a request would wait for itself; empty = it would not, as far as this view tells."""
        spec, version = served.spec, served.version
        if served.wait_s or spec.steps:
            return ""  # no worker has it yet; an ensemble holds no instance, its steps are checked
        workers = sum(worker.is_ready(spec.name, version) for worker in self._catalog.workers())
        return endless(request.holders, spec.name, version, workers * spec.instance_count)

    def _served(self, model: str, version: int, deadline_s: float) -> Served:
        """Finds the model; without the event loop if the view is fresh: a view is replaced whole, never changed."""
        if self._now_s() - self._refreshed_at <= FRESH_S:
            with suppress(ModelNotFound, ModelNotReady):
                return self._catalog.resolve(model, version)
        return self._outcome(self._on_loop(self._within(self._resolve(model, version), deadline_s)), deadline_s)

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Has the event loop run a coroutine."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise Cancelled(_ENDING) from None

    def _submit(self, served: Served, request: InferRequest, answer: Answer | Inbox, timeout_s: float) -> None:
        """Submits a request; on the event loop."""
        if self._is_closed:
            answer.fail(Cancelled(_ENDING))
            return
        request, sink = traced(request, answer, self._now_s)
        try:
            held = self._submit_held(served, request, sink, timeout_s)
            answer.submitted(held or self._submission.submit(served, request, sink, timeout_s))
        except QinferError as error:
            answer.fail(error)
        except Exception:  # the boundary: a call that fails oddly may not end the worker
            logger.exception("call failed")
            answer.fail(_unexpected())
        else:
            self._called(served.lane)

    def _submit_held(self, served: Served, request: InferRequest, sink: Sink, timeout_s: float) -> Pending | None:
        """Submits a call by executions that hold what it needs: resources, or instances; `None` = it goes as any other.

        In the lane it could stay behind requests that wait for what its caller holds, so that it goes to the batcher.

        Raises:
            InferenceFailed: The model needs what its callers hold, and can't have it.
        """
        limiter, spec = self.limiter, served.spec
        if limiter is None or not spec.is_limited:
            held = level_of(request.holders, spec.name, served.version)
            if not held or spec.is_cached or not self.local.has_more(spec.name, served.version, held):
                return None
            self._called(served.lane)
            return self._submission.submit_here(served, request, sink, timeout_s, self.local)
        if not limiter.holds(request.holders):
            return None
        is_here = self.local.serves(spec.name, served.version) and not spec.decoupled
        if not is_here and (reason := limiter.conflict(spec, request.holders)):
            raise InferenceFailed(reason)
        self._called(served.lane)  # its batcher may be paused
        # While the model is loaded anew, the batcher may be of another generation: then it goes by the lane.
        return self._submission.submit_here(served, request, sink, timeout_s, self.local)

    def _outcome(self, outcome: "Future[T]", deadline_s: float) -> T:
        """Waits for a result of the event loop; blocks this thread."""
        try:
            return outcome.result(max(deadline_s - self._now_s(), 0.0) + GRACE_S)
        except TimeoutError:
            raise DeadlineExceeded(EXPIRED) from None
        except CancelledError:  # `close` ended it
            raise Cancelled(_ENDING) from None

    async def _look(self) -> None:
        """Reads models and endpoints, and follows the endpoints from the first time on."""
        await self.listen()
        await self._refresh(FRESH_S)
        if self.endpoints is not None and not self._is_following_endpoints:
            await self.endpoints.look()
            if not self._is_following_endpoints:  # by another call meanwhile
                self._is_following_endpoints = True
                self._background.append(self._tasks.create_task(self.endpoints.run()))

    async def _resolve(self, model: str, version: int) -> Served:
        """Finds the model on the event loop, after reading the view again if necessary."""
        await self.listen()
        await self._refresh(FRESH_S)
        with suppress(ModelNotFound, ModelNotReady):
            return self._catalog.resolve(model, version)
        await self._refresh(RECHECK_S)
        return self._catalog.asked(model, version)

    async def _within(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Does work for a call on the event loop until the call's deadline, or the worker's end."""
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
        except Exception:  # the boundary, as in `_submit`
            logger.exception("call failed")
            raise _unexpected() from None
        finally:
            self._open.discard(task)

    async def _refresh(self, older_than_s: float) -> None:
        """Reads the models again if the view is older; while the store is away, the last view remains in use."""
        async with self._refreshing:
            if self._now_s() - self._refreshed_at <= older_than_s:
                return
            try:
                await self._catalog.refresh()
            except BrokerUnavailable:
                if self._refreshed_at == float("-inf"):
                    raise
                return
            self._refreshed_at = self._now_s()

    async def listen(self) -> None:
        """Starts the reader of the reply stream the first time; returns once the stream exists."""
        if not self._background:
            pending = self._submission.pending
            listener = self._queue.listen(self._owner, self._receive, self._listening.set, pending.lose_all)
            self._background = [self._tasks.create_task(listener), self._tasks.create_task(self._submission.run())]
        await self._listening.wait()

    def _receive(self, blob: bytes) -> None:
        """Takes answers of calls, or credits."""
        if not is_credits(blob):
            self._submission.pending.receive(blob)
            return
        try:
            self.credited(decode_credits(blob))
        except CorruptEntry:
            logger.exception("credits dropped: they can't be decoded")


class FarSteps(NamedTuple):
    """The way of steps that take no short cut.

    Attributes:
        caller: Submits them.
    """

    caller: Caller

    def submit_step(self, step: PlanStep, request: InferRequest, sink: Sink, timeout_s: float) -> "Submitted":
        """Submits a step; see `Caller.submit_step`."""
        return self.caller.submit_step(step, request, sink, timeout_s, near=False)


class Submitted(NamedTuple):
    """A step of an ensemble that waits for its answer."""

    table: PendingRequests
    pending: Pending
    local: LocalSteps

    @property
    def is_taken(self) -> bool:
        """Whether it is a step of a sequence, and known to be there."""
        return self.pending.step is not None and self.pending.step.place is not None

    def cancel(self) -> None:
        """Takes it out of the queue, or its batcher; nothing is delivered any more."""
        self.table.cancel(self.pending)
        self.local.leave(self.pending)

    def took(self, nbytes: int) -> None:
        """Has the worker of a decoupled step told what was taken of its responses."""
        if self.pending.stream is not None:
            self.pending.stream.took(nbytes)


def _answered(pending: Pending, response: Response) -> None:
    pending.sink.deliver(response)


def _failed(pending: Pending, error: Exception) -> None:
    pending.sink.deliver(Response(request_id=pending.request_id, failure=Failure.of(error)))


def _unexpected() -> InferenceFailed:
    return InferenceFailed("a call to another model failed; the worker's log says why")
