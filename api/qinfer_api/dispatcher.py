"""THE use case: a decoded request goes into the queue, its responses come back to its sink.

REST, the fast path and gRPC all call `Dispatcher.submit`. What is wrong before the request is in the queue is raised;
what goes wrong later arrives at the sink as a `Response` with a failure. On the good path nothing is awaited, no task
is made and nothing is logged: that is left to `aftercare`, for requests that nobody waits for any more, that waited too
long, or whose outputs are beside the reply stream.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from qinfer.clock import SystemClock
from qinfer.codec.frame import decode_responses
from qinfer.control.admission import queue_timeout_s
from qinfer.control.api_keys import Scope
from qinfer.control.catalog import Catalog, Served
from qinfer.control.routes import Route
from qinfer.delivery.base import Delivery, Entry, reply_address
from qinfer.delivery.layout import Kind, Layouts, kind_of
from qinfer.errors import (
    TIMED_OUT,
    CorruptEntry,
    DeadlineExceeded,
    Forbidden,
    ModelNotReady,
    Overloaded,
    QinferError,
    QueueFull,
    QuotaExceeded,
    Unauthorized,
)
from qinfer.messages import Failure, IdFactory, InferRequest, Response
from qinfer.observability.metrics import GatewayTally
from qinfer.repository.validate import validate
from qinfer.settings import LimitSettings
from qinfer_api.aftercare import Aftercare
from qinfer_api.auth import Auth, Context
from qinfer_api.backlog import Backlog
from qinfer_api.sinks import Pending, Sink, SinkTable
from qinfer_api.status import of_request

logger = logging.getLogger(__name__)

_SHORTEST_S = 0.001  # a timeout of 0 means none


class Dispatcher:
    """Submits requests and routes responses; one per gateway process.

    Args:
        delivery: The queue.
        catalog: Which models are served, and where their lanes are.
        tally: Counts answers and failures.
        limits: What is refused.
        owner: This process's name; replies come to `reply:<owner>`.
        auth: Who may call; `None` = everyone.

    Attributes:
        backlog: How much waits in the lanes.
        draining: The gateway is shutting down.
        unclaimed: Called with the id of a response that no sink waits for: the hint that a stored request has ended.
    """

    def __init__(
        self,
        delivery: Delivery,
        catalog: Catalog,
        tally: GatewayTally,
        limits: LimitSettings,
        owner: str,
        auth: Auth | None = None,
    ) -> None:
        self._delivery = delivery
        self._catalog = catalog
        self._tally = tally
        self._max_in_flight = limits.max_in_flight
        self._auth = auth
        self._clock = SystemClock()
        self._reply_to = reply_address(owner)
        self._new_id = IdFactory().request_id
        self._layouts = Layouts(limits.inline_max_bytes)
        self._sinks = SinkTable(self._clock, asyncio.get_running_loop().call_later, self._expired)
        self._aftercare = Aftercare(delivery, self._sinks, self._withdrawn, self._receive, self._fail)
        self.backlog = Backlog(delivery, catalog)
        self.draining = False
        self.unclaimed: Callable[[str], None] = lambda _: None

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        return len(self._sinks)

    def authorize(self, context: Context, scope: Scope) -> Context:
        """Finds out who asks, and whether they may: see `Auth.authorize`; does nothing where everyone may."""
        return context if self._auth is None else self._auth.authorize(context, scope)

    def charge(self, context: Context) -> None:
        """Counts a request against the rate of its tenant; `submit` does it by itself.

        Raises:
            QuotaExceeded: The rate is used up.
        """
        if self._auth is not None and context.principal is not None:
            self._auth.charge(context.principal)

    def admit(self, served: Served, priority: int, timeout_s: float) -> Route:
        """Decides whether a request that the caller enqueues itself may wait; `submit` does it by itself.

        Args:
            served: The model version it is for.
            priority: The level it asks for.
            timeout_s: How long its answer is worth waiting for.

        Returns:
            Where it goes.

        Raises:
            Overloaded: It is refused, or the gateway is shutting down.
        """
        if self.draining:
            raise Overloaded("Server exiting")
        route = served.routes.of(priority)
        refusal = self.backlog.judge(served, route, served.spec.lane_capacity, timeout_s)
        if refusal is not None:
            raise refusal
        return route

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

    def submit(self, context: Context, request: InferRequest, sink: Sink, within_s: float = math.inf) -> Pending:
        """Puts a request into the queue of its model version; its responses, or its failure, go to the sink.

        Args:
            context: Who asks; authorized here, if that was not done before.
            request: The decoded request; it is stamped in place.
            sink: Called on the event loop.
            within_s: How long its caller will wait, if that is known; it only shortens the model's own timeout.

        Raises:
            QinferError: The request is refused: its caller may not ask or not so much, the model is unknown or not
                ready, the request is too large or does not fit it, or too many wait or are in flight. The texts of
                the last three begin with `[request id: …] ` (reference §1.2).
        """
        if self._auth is not None:
            context = self._auth.admit(context)
        served = self.resolve(request.model, request.version)
        spec = served.spec
        route = None if served.routes.are_plain else served.routes.of(request.priority)
        lane = served.lane if route is None else route.lane
        if len(self._sinks) >= self._max_in_flight:
            raise QueueFull(of_request(request.client_id) + "Exceeds maximum queue size")
        kind = form = None
        timeout_s = spec.default_timeout_s
        if within_s < timeout_s:
            timeout_s = max(within_s, _SHORTEST_S)
        elif route is None and not context.trace:
            kind = kind_of(request, lane, served.generation, context.tenant)
            form = None if kind is None else self._layouts.find(kind)
        if form is None and (not request.generation or request.generation != served.generation):
            self.check(request, served)
        load = self.backlog.load(served, lane)
        if route is not None or load.own + load.others >= load.most:
            self._judge(request, served, route or served.routes.default, timeout_s)
        request.id = self._new_id(spec.name, lane.partition)
        request.version = served.version
        now_s = self._clock.monotonic_s()
        pending = Pending(request.id, request.client_id, spec.name, served.version, sink, now_s)
        pending.load = load
        if context.principal is not None:
            pending.quota = context.principal.quota
        try:
            if form is None:
                self._submit_anew(pending, request, route or served.routes.default, timeout_s, context, kind)
            else:
                self._sinks.add(pending, now_s + timeout_s)
                self._delivery.submit(lane, form.fill(request), partial(self._submitted, pending))
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
            error.args = (of_request(request.client_id) + error.message,)
            raise
        request.generation = served.generation

    def refuse(self, model: str, version: int, error: QinferError) -> QinferError:
        """Counts a request that never came into the queue, and returns what to tell its client.

        That the caller may not ask goes before all else, then that the model is unknown or not ready.
        """
        if isinstance(error, Unauthorized | Forbidden | QuotaExceeded):
            self._tally.failed("", 0, error.code)
            if isinstance(error, QuotaExceeded):
                with suppress(QinferError):
                    self._tally.ended(model, self.resolve(model, version).version, error.code)
            return error
        try:
            served = self.resolve(model, version)
        except QinferError as first:  # clients may not make series of names they think up
            known = (model, version) if isinstance(first, ModelNotReady) else ("", 0)
            self._tally.failed(*known, first.code)
            return first
        self._tally.failed(model, served.version, error.code)
        if isinstance(error, Overloaded):
            self._tally.ended(model, served.version, error.code)
        return error

    def cancel(self, pending: Pending) -> None:
        """Forgets a request whose caller went away, and takes it out of the queue if it is still there."""
        if self._sinks.remove(pending):
            self._tally.ended(pending.model, pending.version, "cancelled", pending.started_s)
            self._abandon(pending)

    def receive(self, blob: bytes) -> None:
        """Hands the responses of one reply blob to their sinks; those nobody waits for are dropped."""
        try:
            responses = decode_responses(blob)
        except CorruptEntry:
            logger.exception("reply dropped: it can't be decoded")
            return
        for response in responses:
            self._receive(response)

    def fail_all(self, error: QinferError) -> None:
        """Fails every request that waits, and takes them out of the queue."""
        for pending in self._sinks.clear():
            self._abandon(pending)
            self._fail(pending, error)

    async def run(self) -> None:
        """Does what is left to do for requests and looks at the lanes, in the background, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._aftercare.run())
            group.create_task(self.backlog.run())

    async def discard(self) -> None:
        """Finishes the entries of abandoned requests now; what Redis can't be told, the worker's deadline ends."""
        await self._aftercare.discard()

    def _judge(self, request: InferRequest, served: Served, route: Route, timeout_s: float) -> None:
        refusal = self.backlog.judge(served, route, served.spec.lane_capacity, timeout_s)
        if refusal is not None:
            refusal.args = (of_request(request.client_id) + refusal.message,)
            raise refusal

    def _submit_anew(
        self, pending: Pending, request: InferRequest, route: Route, first_s: float, context: Context, kind: Kind | None
    ) -> None:
        """Stamps, lays out and submits a request of no known kind: new, special, large, or under a policy."""
        policy = route.policy
        request.queue_timeout_s, request.timeout_s = queue_timeout_s(policy, request.timeout_s), first_s
        request.partition, request.reply_to = route.lane.partition, self._reply_to
        request.tenant, request.trace = context.tenant, context.trace
        frame, payload = self._layouts.lay_out(request, kind)
        if not policy.delay and 0 < request.queue_timeout_s < first_s:
            pending.deadline_s, first_s = pending.started_s + first_s, request.queue_timeout_s
        self._sinks.add(pending, pending.started_s + first_s)
        done = partial(self._submitted, pending)
        self._delivery.submit(route.lane, frame, done, payload=payload, limit=policy.max_queue_size)

    def _submitted(self, pending: Pending, outcome: Entry | QinferError) -> None:
        if isinstance(outcome, QinferError):
            if self._sinks.remove(pending):
                self._fail(pending, outcome)
            return
        pending.entry = outcome
        if pending.abandoned:
            self._abandon(pending)
        elif pending.is_late:
            self._aftercare.withdraw(pending)

    def _receive(self, response: Response) -> None:
        pending = self._sinks.take(response)
        if pending is None:
            self.unclaimed(response.request_id)
            return
        if response.stored:
            self._aftercare.fetch(pending)
            return
        try:
            self._deliver(pending, response)
        except Exception as error:  # the loop that answers everyone: one bad answer may not end it
            extra = {"request_id": response.request_id, "model": pending.model, "version": pending.version}
            logger.exception("answer failed", extra=extra)
            self._fail(pending, error)

    def _deliver(self, pending: Pending, response: Response) -> None:
        if response.failure is not None:
            code, message, retryable = response.failure.code, response.failure.message, response.failure.retryable
            self._tally.failed(pending.model, pending.version, code)
            failure = Failure(code, of_request(pending.client_id) + message, retryable)
            response = msgspec.structs.replace(response, failure=failure)
        elif response.final:
            self._tally.answered(pending.model, pending.version, self._clock.monotonic_s() - pending.started_s)
        pending.sink.deliver(response)

    def _fail(self, pending: Pending, error: Exception) -> None:
        failure = Failure.of(error)
        self._tally.ended(pending.model, pending.version, failure.code, pending.started_s)
        answer = Response(request_id=pending.request_id, model=pending.model, version=pending.version, failure=failure)
        self._deliver(pending, answer)

    def _expired(self, pending: Pending) -> None:
        if not pending.deadline_s:
            self._abandon(pending)
            self._fail(pending, DeadlineExceeded(TIMED_OUT))
            return
        # Its queue timeout is over: that concerns it only while it waits. Otherwise it has until its deadline.
        deadline_s, pending.deadline_s = pending.deadline_s, 0.0
        self._sinks.add(pending, deadline_s)
        pending.is_late = True
        if pending.entry is not None:
            self._aftercare.withdraw(pending)

    def _withdrawn(self, pending: Pending) -> None:
        """Answers a request that waited too long, after it was taken out of the queue."""
        if self._sinks.remove(pending):
            self._fail(pending, DeadlineExceeded(TIMED_OUT))

    def _abandon(self, pending: Pending) -> None:
        pending.abandoned = True
        if pending.entry is not None:
            self._aftercare.abandon(pending.entry)
