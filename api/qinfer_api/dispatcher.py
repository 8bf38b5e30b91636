"""THE use case: a decoded request goes into the queue, its responses come back to its sink.

REST, the fast path and gRPC all call `Dispatcher.submit`. What is wrong before the request is in the queue is raised;
what goes wrong later arrives at the sink as a `Response` with a failure. On the good path nothing is awaited, no task
is made and nothing is logged.
"""

import asyncio
import logging
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import msgspec

from qinfer.clock import Clock, SystemClock
from qinfer.codec.frame import decode_responses, encode_request
from qinfer.control.catalog import Catalog, Served
from qinfer.delivery.base import Delivery, Entry, Lane, reply_address
from qinfer.errors import (
    CorruptEntry,
    DeadlineExceeded,
    DeliveryError,
    ModelNotReady,
    Overloaded,
    QinferError,
    QueueFull,
)
from qinfer.messages import Failure, IdFactory, InferRequest, Response
from qinfer.observability.metrics import GatewayTally
from qinfer.repository.validate import validate
from qinfer.settings import LimitSettings
from qinfer_api.sinks import Pending, Sink, SinkTable

logger = logging.getLogger(__name__)


class Context(NamedTuple):
    """Who asks: what the transport knows about a request besides its body.

    Attributes:
        tenant: Whose request it is.
        trace: W3C `traceparent`; empty when the request is not traced.
    """

    tenant: str = ""
    trace: str = ""


ANONYMOUS = Context()


class Dispatcher:
    """Submits requests and routes responses; one per gateway process.

    Args:
        delivery: The queue.
        catalog: Which models are served, and where their lanes are.
        tally: Counts answers and failures.
        limits: What is refused.
        owner: This process's name; replies come to `reply:<owner>`.
        clock: The monotonic clock.
    """

    def __init__(
        self,
        delivery: Delivery,
        catalog: Catalog,
        tally: GatewayTally,
        limits: LimitSettings,
        owner: str,
        clock: Clock | None = None,
    ) -> None:
        self._delivery = delivery
        self._catalog = catalog
        self._tally = tally
        self._max_in_flight = limits.max_in_flight
        self._clock = clock or SystemClock()
        self._reply_to = reply_address(owner)
        self._new_id = IdFactory().request_id
        self._sinks = SinkTable(self._clock, asyncio.get_running_loop().call_later, self._expired)
        self._discarded: list[Entry] = []
        self._work = asyncio.Event()
        self.draining = False

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        return len(self._sinks)

    def resolve(self, model: str, version: int) -> Served:
        """Finds where a model version is served; version 0 is the highest ready one.

        Raises:
            Overloaded: The gateway is shutting down.
            ModelNotFound: No such model or version.
            ModelNotReady: It is known, and not ready.
        """
        if self.draining:
            raise Overloaded("Server exiting")
        return self._catalog.resolve(model, version)

    def submit(self, context: Context, request: InferRequest, sink: Sink) -> Pending:
        """Puts a request into the queue of its model version; its responses, or its failure, go to the sink.

        Args:
            context: Who asks.
            request: The decoded request; it is stamped in place.
            sink: Called on the event loop.

        Raises:
            QinferError: The request is refused: the model is unknown or not ready, the request does not fit it, or too
                many are in flight. The texts of the last two begin with `[request id: …] ` (reference §1.2).
        """
        served = self.resolve(request.model, request.version)
        spec = served.spec
        if len(self._sinks) >= self._max_in_flight:
            raise QueueFull(_prefix(request.client_id) + "Exceeds maximum queue size")
        if not request.generation or request.generation != served.generation:
            self.check(request, served)
        timeout_s = min(spec.default_timeout_s, spec.max_timeout_s)
        request.id = self._new_id(spec.name, served.lane.partition)
        request.version = served.version
        request.partition = served.lane.partition
        request.timeout_s = timeout_s
        request.reply_to = self._reply_to
        request.tenant = context.tenant
        request.trace = context.trace
        frame = encode_request(request)
        now_s = self._clock.monotonic_s()
        pending = Pending(request.id, request.client_id, spec.name, served.version, sink, now_s)
        self._sinks.add(pending, now_s + timeout_s)
        try:
            self._delivery.submit(served.lane, frame, partial(self._submitted, pending))
        except QinferError:
            self._sinks.remove(pending)
            raise
        return pending

    def check(self, request: InferRequest, served: Served) -> None:
        """Checks a request against its model; `submit` does it, unless it was done before, in a thread for a large one.

        Raises:
            InvalidRequest: It does not fit; the text begins with `[request id: …] ` (reference §1.2).
        """
        try:
            validate(request, served.spec)
        except QinferError as error:
            error.args = (_prefix(request.client_id) + error.message,)
            raise
        request.generation = served.generation

    def refuse(self, model: str, version: int, error: QinferError) -> QinferError:
        """Counts a request that never came into the queue, and returns what to tell its client.

        That the model is unknown or not ready goes before what is wrong with the request.
        """
        try:
            served = self.resolve(model, version)
        except ModelNotReady as first:
            self._tally.failed(model, version, first.code)
            return first
        except QinferError as first:
            self._tally.failed("", 0, first.code)  # clients may not make series of names they think up
            return first
        self._tally.failed(model, served.version, error.code)
        return error

    def cancel(self, pending: Pending) -> None:
        """Forgets a request whose caller went away, and takes it out of the queue if it is still there."""
        if self._sinks.remove(pending):
            self._abandon(pending)

    def receive(self, blob: bytes) -> None:
        """Hands the responses of one reply blob to their sinks; those nobody waits for are dropped."""
        try:
            responses = decode_responses(blob)
        except CorruptEntry:
            logger.exception("reply dropped: it can't be decoded")
            return
        for response in responses:
            pending = self._sinks.take(response)
            if pending is None:
                continue
            try:
                self._deliver(pending, response)
            except Exception as error:  # the loop that answers everyone: one bad answer may not end it
                logger.exception("answer failed", extra={"request_id": response.request_id})
                self._fail(pending, error)

    def fail_all(self, error: QinferError) -> None:
        """Fails every request that waits, and takes them out of the queue."""
        for pending in self._sinks.clear():
            self._abandon(pending)
            self._fail(pending, error)

    async def run(self) -> None:
        """Takes abandoned requests out of the queue, in the background, until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            await self.discard()

    async def discard(self) -> None:
        """Finishes the entries of abandoned requests now; what Redis can't be told, the worker's deadline ends."""
        by_lane: defaultdict[Lane, list[Entry]] = defaultdict(list)
        for entry in self._discarded:
            by_lane[entry.lane].append(entry)
        self._discarded.clear()
        for entries in by_lane.values():
            try:
                await self._delivery.finish(entries)
            except DeliveryError as error:
                logger.warning("abandoned requests stay queued", extra={"count": len(entries), "error": error.message})

    def _submitted(self, pending: Pending, outcome: Entry | QinferError) -> None:
        if isinstance(outcome, QinferError):
            if self._sinks.remove(pending):
                self._fail(pending, outcome)
            return
        pending.entry = outcome
        if pending.abandoned:
            self._abandon(pending)

    def _deliver(self, pending: Pending, response: Response) -> None:
        if response.failure is not None:
            code, message, retryable = response.failure.code, response.failure.message, response.failure.retryable
            self._tally.failed(pending.model, pending.version, code)
            failure = Failure(code, _prefix(pending.client_id) + message, retryable)
            response = msgspec.structs.replace(response, failure=failure)
        elif response.final:
            self._tally.answered(pending.model, pending.version, self._clock.monotonic_s() - pending.started_s)
        pending.sink.deliver(response)

    def _fail(self, pending: Pending, error: Exception) -> None:
        failure = Failure.of(error)
        self._deliver(
            pending,
            Response(request_id=pending.request_id, model=pending.model, version=pending.version, failure=failure),
        )

    def _expired(self, pending: Pending) -> None:
        self._abandon(pending)
        self._fail(pending, DeadlineExceeded("Request timeout expired"))

    def _abandon(self, pending: Pending) -> None:
        pending.abandoned = True
        if pending.entry is not None:
            self._discarded.append(pending.entry)
            self._work.set()


def _prefix(client_id: str) -> str:
    return f"[request id: {client_id or '<id_unknown>'}] "
