"""Calls between models: a request of a model's code goes into the queue, its answer to the thread that waits for it.

    instance thread ── resolve, check ──▶ event loop ── Submission.submit ──▶ lane ──▶ any worker
          ▲                                   │
          └──────────── answer ───────────────┴◀── reply:worker-<id>

The worker is a client of the queue here, as a gateway is: it calls models that it does not host. Until the first call
it has no reply stream and reads no catalog.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import (
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    InferenceFailed,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    QinferError,
    QueueFull,
)
from qinfer.models.catalog import Catalog, Served
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer.submission.pending import Pending
from qinfer.submission.submit import Submission, check

logger = logging.getLogger(__name__)

FRESH_S = 2.0
"""A view of the models that is older is read again before a call, as in a gateway."""

RECHECK_S = 0.25
"""A refusal by a view that is older counts only when another look confirms it."""

_GRACE_S = 1.0  # for the event loop to report a deadline; a thread that outlives the loop waits no longer
_ENDING = "the worker ends"
_EXPIRED = "Request timeout expired"
_RAISED: dict[str, type[QinferError]] = {
    error.code: error
    for error in (BrokerUnavailable, Cancelled, DeadlineExceeded, InvalidRequest, ModelNotReady, QueueFull)
}

T = TypeVar("T")


class _Answer:
    """The sink of a call: a future that a thread waits for."""

    def __init__(self) -> None:
        self.future: Future[Response] = Future()

    def deliver(self, response: Response) -> None:
        """Delivers the final response."""
        if response.final and not self.future.done():
            self.future.set_result(response)


class Caller:
    """The `Caller` of a worker's executions; made on the event loop, called from the threads of its instances.

    Args:
        queue: The queue.
        catalog: Which models are served; the caller refreshes it.
        worker_id: Names the reply address, `reply:worker-<id>`.
        tasks: Owns the tasks.
        limits: What is refused, and which tensors are large.
        called: Told each model version (as a lane of it) that was called, on the event loop.
    """

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
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._submission = Submission(queue, catalog, limits, self._owner, _answered, _failed)
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._listening = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def call(self, request: InferRequest, deadline_s: float) -> Response:
        """See `qinfer.batching.execution.Caller.call`."""
        if threading.get_ident() == self._loop_thread:
            raise InferenceFailed("a batch that the event loop executes can't call another model")
        if request.timeout_s:
            deadline_s = min(deadline_s, self._now_s() + request.timeout_s)
        served = self._served(request.model, request.version, deadline_s)
        timeout_s = min(deadline_s - self._now_s(), served.spec.max_timeout_s)
        if timeout_s <= 0:
            raise DeadlineExceeded(_EXPIRED)
        # The submission writes to it. Its own timeout is part of the deadline, and none for the queue.
        request = msgspec.structs.replace(request, generation=0, attempt=0, timeout_s=0.0, payload=False)
        check(request, served)
        answer = _Answer()
        try:
            self._loop.call_soon_threadsafe(self._submit, served, request, answer, timeout_s)
        except RuntimeError:  # the loop is closed
            raise Cancelled(_ENDING) from None
        response = self._outcome(answer.future, deadline_s)
        if response.failure is not None:
            raised = _RAISED.get(response.failure.code)
            if raised is not None:
                raise raised(response.failure.message)
            raise InferenceFailed(f"model '{request.model}' failed: {response.failure.message}")
        if response.index:
            raise InferenceFailed(f"model '{request.model}' gave several responses; a call takes one")
        return response

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

    def _served(self, model: str, version: int, deadline_s: float) -> Served:
        """Finds the model; without the event loop if the view is fresh: a view is replaced whole, never changed."""
        if self._now_s() - self._refreshed_at <= FRESH_S:
            with suppress(ModelNotFound, ModelNotReady):
                return self._catalog.resolve(model, version)
        resolving = self._resolve(model, version, deadline_s)
        try:
            outcome = asyncio.run_coroutine_threadsafe(resolving, self._loop)
        except RuntimeError:  # the loop is closed
            resolving.close()
            raise Cancelled(_ENDING) from None
        return self._outcome(outcome, deadline_s)

    def _submit(self, served: Served, request: InferRequest, answer: _Answer, timeout_s: float) -> None:
        """Submits a request; on the event loop."""
        if self._is_closed:
            answer.future.set_exception(Cancelled(_ENDING))
            return
        try:
            self._submission.submit(served, request, answer, timeout_s)
        except QinferError as error:
            answer.future.set_exception(error)
        except Exception:  # the boundary: a call that fails oddly may not end the worker
            logger.exception("call failed")
            answer.future.set_exception(_unexpected())
        else:
            self._called(served.lane)

    def _outcome(self, outcome: "Future[T]", deadline_s: float) -> T:
        """Waits for a result of the event loop; blocks this thread."""
        try:
            return outcome.result(max(deadline_s - self._now_s(), 0.0) + _GRACE_S)
        except TimeoutError:
            raise DeadlineExceeded(_EXPIRED) from None
        except CancelledError:  # `close` ended it
            raise Cancelled(_ENDING) from None

    async def _resolve(self, model: str, version: int, deadline_s: float) -> Served:
        """Finds the model on the event loop, after reading the view again if necessary."""
        if self._is_closed:
            raise Cancelled(_ENDING)
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            async with asyncio.timeout(max(deadline_s - self._now_s(), 0.0)):
                await self._listen()
                await self._refresh(FRESH_S)
                with suppress(ModelNotFound, ModelNotReady):
                    return self._catalog.resolve(model, version)
                await self._refresh(RECHECK_S)
                return self._catalog.asked(model, version)
        except TimeoutError:
            raise DeadlineExceeded(_EXPIRED) from None
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

    async def _listen(self) -> None:
        """Starts the reader of the reply stream at the first call; returns once the stream exists."""
        if not self._background:
            pending = self._submission.pending
            listener = self._queue.listen(self._owner, pending.receive, self._listening.set, pending.lose_all)
            self._background = [self._tasks.create_task(listener), self._tasks.create_task(self._submission.run())]
        await self._listening.wait()


def _answered(pending: Pending, response: Response) -> None:
    pending.sink.deliver(response)


def _failed(pending: Pending, error: Exception) -> None:
    pending.sink.deliver(Response(request_id=pending.request_id, failure=Failure.of(error)))


def _unexpected() -> InferenceFailed:
    return InferenceFailed("a call to another model failed; the worker's log says why")
