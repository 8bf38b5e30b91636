"""Calls between models: a request of a model's code goes into the queue, its answer to the thread that waits for it.

    instance thread ── resolve, check, encode ──▶ event loop ── submit ──▶ lane ──▶ any worker
          ▲                                           │
          └──────────── outcome ──────────────────────┴◀── reply:worker-<id>

The worker is a client of the queue here, as a gateway is: it calls models that it does not host. Until the first call
it has no reply stream and reads no catalog.
"""

import asyncio
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from qinfer.codec.frame import decode_responses, encode_request, encode_request_apart
from qinfer.control.catalog import Catalog, Served
from qinfer.delivery.base import Delivery, Entry, Lane, Payload, reply_address
from qinfer.errors import (
    BrokerUnavailable,
    Cancelled,
    CorruptEntry,
    DeadlineExceeded,
    InferenceFailed,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    QinferError,
    QueueFull,
)
from qinfer.messages import IdFactory, InferRequest, Response
from qinfer.repository.validate import validate

logger = logging.getLogger(__name__)

FRESH_S = 2.0
"""A view of the models that is older is read again before a call, as in a gateway."""

RECHECK_S = 0.25
"""A refusal by a view that is older counts only when another look confirms it."""

INLINE_MAX_BYTES = 256 * 1024
"""Tensors of a call above this travel beside the stream."""

PAYLOAD_MARGIN_S = 60.0
"""They outlive the deadline by so much."""

_READ_AGAIN_S = 0.2
_GRACE_S = 1.0  # in which the event loop tells of a deadline; a thread that outlives the loop waits no longer
_ENDING = "the worker ends"
_EXPIRED = "Request timeout expired"
_RAISED: dict[str, type[QinferError]] = {
    error.code: error for error in (Cancelled, DeadlineExceeded, InvalidRequest, ModelNotReady, QueueFull)
}

T = TypeVar("T")


class _Call:
    """A submitted request: its answer to come, and its place in the queue once the broker confirmed it."""

    __slots__ = ("answer", "entry", "is_abandoned")

    def __init__(self, answer: "asyncio.Future[Response]") -> None:
        self.answer = answer
        self.entry: Entry | None = None
        self.is_abandoned = False


class Caller:
    """The `Caller` of a worker's executions; made on the event loop, called from the threads of its instances.

    Args:
        delivery: The queue.
        catalog: Which models are served; the caller refreshes it.
        worker_id: Names the reply address, `reply:worker-<id>`.
        tasks: Owns the tasks.
        called: Told each model version (as a lane of it) that is about to be called, on the event loop.
        inline_max_bytes: Larger tensors travel beside the stream.
    """

    def __init__(
        self,
        delivery: Delivery,
        catalog: Catalog,
        worker_id: str,
        tasks: asyncio.TaskGroup,
        called: Callable[[Lane], None] = lambda _: None,
        inline_max_bytes: int = INLINE_MAX_BYTES,
    ) -> None:
        self._delivery = delivery
        self._catalog = catalog
        self._owner = f"worker-{worker_id}"
        self._tasks = tasks
        self._called = called
        self._inline_max_bytes = inline_max_bytes
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._new_id = IdFactory().request_id
        self._id_lock = threading.Lock()
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._listening = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, _Call] = {}
        self._targets: Counter[tuple[str, int]] = Counter()
        self._abandoned: list[Entry] = []
        self._work = asyncio.Event()
        self._is_closed = False

    def call(self, request: InferRequest, deadline_s: float) -> Response:
        """See `qinfer.batching.execution.Caller.call`."""
        if threading.get_ident() == self._loop_thread:
            raise InferenceFailed("a batch that the event loop executes can't call another model")
        if request.timeout_s:
            deadline_s = min(deadline_s, self._now_s() + request.timeout_s)
        served = self._served(request.model, request.version, deadline_s)
        stamped = self._stamped(request, served, deadline_s)
        frame, payload = self._laid_out(stamped)
        response = self._run(partial(self._ask, stamped.id, served.lane, frame, payload), deadline_s)
        if response.failure is not None:
            raised = _RAISED.get(response.failure.code)
            if raised is not None:
                raise raised(response.failure.message)
            raise InferenceFailed(f"model '{request.model}' failed: {response.failure.message}")
        if response.index:
            raise InferenceFailed(f"model '{request.model}' gave several responses; a call takes one")
        return response

    def is_target(self, model: str, version: int) -> bool:
        """Tells whether a call to a model version is under way."""
        return self._targets[model, version] > 0

    def close(self) -> "list[asyncio.Task[None]]":
        """Refuses further calls; returns the tasks to be cancelled, upon which whoever waits gets `Cancelled`."""
        self._is_closed = True
        return [*self._open, *self._background]

    async def discard(self) -> None:
        """Takes abandoned requests out of the queue now; what the broker can't be told, the deadline ends."""
        by_lane: defaultdict[Lane, list[Entry]] = defaultdict(list)
        for entry in self._abandoned:
            by_lane[entry.lane].append(entry)
        self._abandoned.clear()
        for entries in by_lane.values():
            try:
                await self._delivery.finish(entries)
            except QinferError as error:
                logger.warning("abandoned calls stay queued", extra={"count": len(entries), "reason": error.message})

    def _now_s(self) -> float:
        return self._delivery.clock.now_s()

    def _served(self, model: str, version: int, deadline_s: float) -> Served:
        """Finds the model; without the event loop if the view is fresh: a view is replaced whole, never changed."""
        if self._now_s() - self._refreshed_at <= FRESH_S:
            with suppress(ModelNotFound, ModelNotReady):
                return self._catalog.resolve(model, version)
        return self._run(partial(self._resolve, model, version), deadline_s)

    def _stamped(self, request: InferRequest, served: Served, deadline_s: float) -> InferRequest:
        timeout_s = min(deadline_s - self._now_s(), served.spec.max_timeout_s)
        if timeout_s <= 0:
            raise DeadlineExceeded(_EXPIRED)
        with self._id_lock:
            request_id = self._new_id(served.spec.name, served.lane.partition)
        stamped = msgspec.structs.replace(
            request,
            id=request_id,
            version=served.version,
            partition=served.lane.partition,
            timeout_s=timeout_s,
            reply_to=reply_address(self._owner),
            generation=served.generation,
            attempt=0,
            queue_timeout_s=0.0,
            payload=False,
        )
        validate(stamped, served.spec)
        return stamped

    def _laid_out(self, request: InferRequest) -> tuple[bytes, Payload | None]:
        """Encodes a stamped request; large tensors are stored beside the stream."""
        if sum(len(tensor.data) for tensor in request.inputs) <= self._inline_max_bytes:
            return encode_request(request), None
        request.payload = True
        frame, data = encode_request_apart(request)
        return frame, Payload(request.id, data, request.timeout_s + PAYLOAD_MARGIN_S)

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]], deadline_s: float) -> T:
        """Runs a coroutine on the event loop until the deadline; blocks this thread."""
        outcome: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._spawn, work, deadline_s, outcome)
        except RuntimeError:  # the loop is closed
            raise Cancelled(_ENDING) from None
        try:
            return outcome.result(max(deadline_s - self._now_s(), 0.0) + _GRACE_S)
        except TimeoutError:
            raise DeadlineExceeded(_EXPIRED) from None

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, T]], deadline_s: float, outcome: "Future[T]") -> None:
        if self._is_closed:
            outcome.set_exception(Cancelled(_ENDING))
            return

        def ended(task: "asyncio.Task[None]") -> None:
            self._open.discard(task)
            if not outcome.done():  # it was cancelled, maybe before it began
                outcome.set_exception(Cancelled(_ENDING))

        task = self._tasks.create_task(self._settle(work, deadline_s, outcome))
        self._open.add(task)
        task.add_done_callback(ended)

    async def _settle(
        self, work: Callable[[], Coroutine[Any, Any, T]], deadline_s: float, outcome: "Future[T]"
    ) -> None:
        try:
            async with asyncio.timeout(max(deadline_s - self._now_s(), 0.0)):
                outcome.set_result(await work())
        except TimeoutError:
            outcome.set_exception(DeadlineExceeded(_EXPIRED))
        except QinferError as error:
            outcome.set_exception(error)
        except Exception:  # the boundary: a call that fails oddly may not end the worker
            logger.exception("call failed")
            outcome.set_exception(InferenceFailed("a call to another model failed; the worker's log says why"))

    async def _resolve(self, model: str, version: int) -> Served:
        await self._refresh(FRESH_S)
        with suppress(ModelNotFound, ModelNotReady):
            return self._catalog.resolve(model, version)
        await self._refresh(RECHECK_S)
        return self._catalog.resolve(model, version)

    async def _refresh(self, older_than_s: float) -> None:
        """Reads the models again if the view is older; with the store away, the last view serves on."""
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

    async def _ask(self, request_id: str, lane: Lane, frame: bytes, payload: Payload | None) -> Response:
        """Submits a request and waits for its final response; one that nobody waits for leaves the queue."""
        call = self._waiting[request_id] = _Call(self._loop.create_future())
        self._targets[lane.model, lane.version] += 1
        self._called(lane)
        try:
            await self._listen()
            self._delivery.submit(lane, frame, partial(self._submitted, call), payload=payload)
            response = await call.answer
            return await self._stored(lane, response) if response.stored else response
        finally:
            self._targets[lane.model, lane.version] -= 1
            del self._waiting[request_id]
            if call.answer.cancelled() or not call.answer.done():
                self._abandon(call)

    async def _stored(self, lane: Lane, response: Response) -> Response:
        """Reads an answer whose outputs are too large for a reply stream; tries again while they can't be read."""
        while True:
            try:
                blob = await self._delivery.take_result(lane, response.request_id)
                break
            except BrokerUnavailable as error:
                logger.info("outputs are read again", extra={"reason": error.message})
                await asyncio.sleep(_READ_AGAIN_S)
        if blob is None:
            raise InferenceFailed(f"model '{lane.model}' answered, and its outputs are gone; try again")
        (whole,) = decode_responses(blob)
        return whole

    async def _listen(self) -> None:
        """Has the reply stream read, from the first call on; returns once it exists."""
        if not self._background:
            listener = self._delivery.listen(self._owner, self._receive, self._listening.set)
            self._background = [self._tasks.create_task(listener), self._tasks.create_task(self._discard_loop())]
        await self._listening.wait()

    def _receive(self, blob: bytes) -> None:
        """Takes the first final response to each request: of one attempt, and once; others are dropped."""
        try:
            responses = decode_responses(blob)
        except CorruptEntry:
            logger.exception("reply dropped: it can't be decoded")
            return
        for response in responses:
            call = self._waiting.get(response.request_id)
            if call is not None and response.final and not call.answer.done():
                call.answer.set_result(response)

    def _submitted(self, call: _Call, outcome: Entry | QinferError) -> None:
        if isinstance(outcome, QinferError):
            if not call.answer.done():
                call.answer.set_exception(outcome)
            return
        call.entry = outcome
        if call.is_abandoned:
            self._abandon(call)

    def _abandon(self, call: _Call) -> None:
        call.is_abandoned = True
        if call.entry is not None:
            self._abandoned.append(call.entry)
            self._work.set()

    async def _discard_loop(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await self.discard()
