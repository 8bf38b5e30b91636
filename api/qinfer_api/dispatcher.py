"""The gateway's side of `Submission`: authorization, counts, and the error texts that clients read.

REST, the fast path, gRPC and labeling all call `Dispatcher.submit`. What is wrong before the request is in the queue is
raised; what goes wrong later arrives at the sink as a `Response` with a failure.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress

import msgspec

from qinfer.core.api_keys import Scope
from qinfer.core.clock import SystemClock
from qinfer.core.messages import Failure, IdFactory, InferRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import (
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QinferError,
    QuotaExceeded,
    Unauthorized,
    UnsupportedFeature,
)
from qinfer.models.catalog import Catalog, Served
from qinfer.models.routes import Route
from qinfer.models.spec import ModelSpec
from qinfer.observe.stats import GatewayTally
from qinfer.observe.tenants import TenantTally
from qinfer.observe.tracing import Attributes
from qinfer.queue.entries import RequestRecord
from qinfer.queue.lanes import Queue
from qinfer.queue.sequence_answers import is_callers
from qinfer.submission.pending import Pending, Sink
from qinfer.submission.submit import Submission, check
from qinfer.traffic.choice import Header, no_header
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.tally import TargetTally, key_of, witness_of
from qinfer_api.access_log import AccessLog, wrappers_of
from qinfer_api.auth import ANONYMOUS, Auth, Context
from qinfer_api.ordering import OrderedSink, Ordering
from qinfer_api.quotas import Quota
from qinfer_api.shadows import Shadow, Shadows
from qinfer_api.status import has_id, of_request, told
from qinfer_api.target_sink import TargetSink

_SHORTEST_S = 0.001  # a timeout of 0 means none

Ending = Callable[[], AbstractAsyncContextManager[tuple[RequestRecord | None, Response | None]]]
"""Waits for the end of a stored request; has its record then, and its last response while that may be in memory."""


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
        access: The access log; `None` = nobody asked for it.
        tenants: Counts by tenant; `None` = nobody asked for them.
        draining: The gateway is shutting down.
        endpoints: The names that stand for several models or versions.
        targets: Counts by their targets.
        shadows: Those of endpoints; `None` = none are executed.
        submission: The way into the queue.
    """

    def __init__(
        self,
        delivery: Queue,
        catalog: Catalog,
        tally: GatewayTally,
        limits: LimitSettings,
        owner: str,
        auth: Auth | None = None,
    ) -> None:
        self._catalog = catalog
        self._tally = tally
        self._auth = auth
        self._clock = SystemClock()
        self._new_id = IdFactory().ulid
        self.submission = Submission(delivery, catalog, limits, owner, self._answered, self._failed)
        self._ordering = Ordering(self.submission, limits.max_in_flight)
        self.endpoints = Endpoints(catalog)
        self.targets = TargetTally(self.endpoints, owner)
        self.access: AccessLog | None = None
        self.tenants: TenantTally | None = None
        self.shadows: Shadows | None = None
        self.draining = False

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        return len(self.submission.pending) - (0 if self.shadows is None else self.shadows.waiting)

    @property
    def has_tenants(self) -> bool:
        """Whether several tenants have keys: what one has is then kept from the others."""
        return self._auth is not None and len(self._auth.tenants) > 1

    def sharing(self, context: Context) -> str:
        """Returns the tenant that shares a limit with others (`SharedLimit`); empty = there are no others."""
        return context.tenant if self.has_tenants else ""

    def authorize(self, context: Context, scope: Scope, peer: str = "") -> Context:
        """Finds out who asks, and whether they may: see `Auth.authorize`; does nothing where everyone may."""
        return context if self._auth is None else self._auth.authorize(context, scope, peer)

    def recheck(self, context: Context) -> None:
        """Checks that a caller who was authorized still would be: see `Auth.recheck`; does nothing where everyone may.

        Raises:
            Unauthorized: The key was revoked, or has expired.
            Forbidden: The key does not allow any more what it did.
        """
        if self._auth is not None:
            self._auth.recheck(context)

    def charge(self, context: Context) -> None:
        """Counts a request against the rate of its tenant; `submit` does it by itself.

        Raises:
            QuotaExceeded: The rate is used up.
        """
        if self._auth is not None and context.principal is not None:
            self._auth.charge(context.principal)

    def admit(
        self, served: Served, priority: int, timeout_s: float, asked_s: float = 0.0, *, tenant: str = ""
    ) -> Route:
        """Decides whether a request that the caller enqueues itself may wait; `submit` does it by itself.

        Args:
            served: The model version it is for.
            priority: The level it asks for.
            timeout_s: How long its answer is worth waiting for.
            asked_s: The queue timeout that it asks for; 0 = none.
            tenant: Whose it is; empty = nobody's.

        Returns:
            Where it goes.

        Raises:
            Overloaded: It is refused, or the gateway is shutting down.
        """
        if self.draining:
            raise Overloaded("Server exiting")
        route = served.routes.of(priority)
        self.submission.admit(served, route, timeout_s, asked_s, tenant=tenant)
        return route

    def trace_of(self, context: Context, served: Served, name: Attributes) -> str:
        """Returns the `traceparent` that the frame of a stored request carries, or the record of a job.

        Args:
            context: Who asks.
            served: The model version it is for.
            name: Its id, by its attribute.
        """
        return context.trace

    @contextmanager
    def trace_stored(self, request: InferRequest) -> Iterator[Callable[[Ending], None]]:
        """Traces a request that is stored in the block: yields what is told its end, unless it was stored before."""
        yield lambda _: None

    def resolve(self, model: str, version: int, *, is_taken: bool = False) -> Served:
        """Finds where a model version is served, or will be soon; version 0 is the highest ready one.

        An endpoint is served where its stable target is.

        Args:
            model: The model's name, or an endpoint's.
            version: The version asked for.
            is_taken: Its client was told that the request is still taken, though the gateway may be shutting down.

        Raises:
            Overloaded: The gateway is shutting down.
            ModelNotFound: No such model or version.
            ModelNotReady: It is known, can't be served, and is not worth waiting for.
        """
        if self.draining and not is_taken:
            raise Overloaded("Server exiting")
        return self._catalog.asked(*self.endpoints.stable(model, version))

    def choose(self, context: Context, request: InferRequest, header: Header = no_header) -> bool:
        """Chooses the target of a request that names an endpoint; returns whether it names one.

        To be called before `submit`, which knows models only.

        Args:
            context: Who asks, authorized.
            request: The decoded request; its model and version become the target's.
            header: Returns a header that it came with, by its name in lower case.

        Raises:
            ModelNotFound: It names a version that no target has.
        """
        return self.endpoints.choose(request, context.tenant, header)

    def of_model(self, model: str, version: int) -> Served:
        """Does what `resolve` does, for who names models only: such as a request whose target was chosen.

        Raises:
            ModelNotFound: No such model or version.
            ModelNotReady: It is known, can't be served, and is not worth waiting for.
        """
        return self._catalog.asked(model, version)

    def submit(
        self,
        context: Context,
        request: InferRequest,
        sink: Sink,
        within_s: float = math.inf,
        *,
        asked_s: float | None = None,
        is_taken: bool = False,
    ) -> Pending:
        """Puts a request into the queue of its model version; its responses, or its failure, go to the sink.

        Args:
            context: Who asks; authorized here, if that was not done before.
            request: The decoded request; it is stamped in place.
            sink: Called on the event loop.
            within_s: How long its caller will wait, if that is known; it only shortens the model's own timeout.
            asked_s: The time until its deadline that it asks for, up to the model's longest; `None` = the model's own.
            is_taken: As `resolve` has it.

        Raises:
            QinferError: The request is refused: its caller may not ask or not so much, the model is unknown or not
                ready, or decoupled where the sink takes one response, the request is too large or does not fit it, or
                too many wait or are in flight. The texts of the last three begin with `[request id: …] `, unless they
                are about its sequence (reference §1.2).
        """
        quota = None
        if self._auth is not None:
            context = self._auth.admit(context)
            if context.principal is not None:
                quota = context.principal.quota
        if self.draining and not is_taken:
            raise Overloaded("Server exiting")
        served = self._catalog.asked(request.model, request.version)
        request.tenant, request.trace = context.tenant, context.trace
        spec = served.spec
        if spec.decoupled and sink.no_stream:
            raise UnsupportedFeature(sink.no_stream)
        timeout_s = spec.max_timeout_s if spec.decoupled else spec.default_timeout_s
        if asked_s is not None:
            timeout_s = checked_timeout_s(asked_s, spec.max_timeout_s)
        if within_s < timeout_s:
            timeout_s = max(within_s, _SHORTEST_S)
        shadows = self.shadows.drawn(request) if request.endpoint and self.shadows is not None else ()
        given_s = math.inf
        if request.endpoint:
            given_s = _given_s(request, spec, timeout_s)
            sink = TargetSink(self.targets, sink, request, shadows, given_s)
        sink = sink if self.access is None else self.access.noted(sink, context, request)
        submit = self._ordering.submit if spec.preserves_order else self.submission.submit
        try:
            pending = submit(served, request, sink, timeout_s, quota)
        except QinferError as error:
            self._refused(request, error, shadows, given_s)
            raise
        for shadow in shadows:
            shadow.start(request)
        return pending

    def _refused(self, request: InferRequest, error: QinferError, shadows: Sequence[Shadow], given_s: float) -> None:
        """Ends the shadows of a request that came not into the queue, and counts it if it was its caller's to know."""
        for shadow in shadows:
            shadow.left()
        if isinstance(error, InvalidRequest | Overloaded):
            if request.endpoint:
                self.targets.failed(key_of(request), error.code, witness_of(request), given_s)
            self._name(request, error)

    def _name(self, request: InferRequest, error: QinferError) -> None:
        """Writes the id of a refused request into the error's text; a request without one gets one for its reply."""
        if not request.client_id and not request.id:
            request.id = self._new_id()
        if has_id(error):
            error.args = (of_request(request.client_id or request.id) + error.message,)

    def check(self, request: InferRequest, served: Served) -> None:
        """Checks a request against its model; `submit` does it, unless it was done before, in a thread for a large one.

        Raises:
            InvalidRequest: It does not fit; the text begins with `[request id: …] `, unless it is about its sequence
                (reference §1.2).
        """
        try:
            check(request, served)
        except InvalidRequest as error:
            self._name(request, error)
            raise

    def refuse(self, model: str, version: int, error: QinferError, context: Context = ANONYMOUS) -> QinferError:
        """Counts a request that never came into the queue, and returns the error for its client.

        That the caller may not ask goes before all else, then that the model is unknown or not ready.

        Args:
            model: The model that it named.
            version: The version that it named; 0 = none.
            error: Why it is refused.
            context: Who asks, authorized or not.
        """
        told = self._counted(model, version, error)
        self.note_refusal(model, version, told, context)
        return told

    def note_refusal(self, model: str, version: int, error: QinferError, context: Context) -> None:
        """Notes a refused request in the access log and the counts by tenant, if there are any."""
        if self.access is None and self.tenants is None:
            return
        if self._auth is not None and context.principal is None:
            context = self._auth.identify(context)
        named = self.named(model, version)
        if self.access is not None:
            self.access.refused(context, named, error.code)
        if self.tenants is not None and context.principal is not None:
            self.tenants.failed(context.tenant, named[0], error.code)

    def note_accepted(self, context: Context, request: InferRequest, request_id: str) -> None:
        """Notes a request that was stored, as `note_refusal` notes one that is refused."""
        if self.access is not None:
            self.access.accepted(context, request, request_id)
        if self.tenants is not None and context.principal is not None:
            self.tenants.accepted(context.tenant, request.model)
        if request.endpoint:
            self.targets.accepted(request)

    def _counted(self, model: str, version: int, error: QinferError) -> QinferError:
        if isinstance(error, Unauthorized | Forbidden | QuotaExceeded):
            known = self.named(model, version) if isinstance(error, QuotaExceeded) else ("", 0)
            self._tally.failed(*known, error.code)
            if isinstance(error, QuotaExceeded):
                with suppress(QinferError):
                    served = self.resolve(model, version)
                    self._tally.ended(served.spec.name, served.version, error.code)
            return error
        try:
            served = self.resolve(model, version)
        except QinferError as first:
            self._tally.failed(*self.named(model, version), first.code)
            # Its frames lead to whoever holds it: a cycle, which would keep the message until the collector comes.
            return first.with_traceback(None)
        self._tally.failed(served.spec.name, served.version, error.code)
        if isinstance(error, Overloaded):
            self._tally.ended(served.spec.name, served.version, error.code)
        return error

    def named(self, model: str, version: int) -> tuple[str, int]:
        """Returns what a request named as counts may name it: of an endpoint its stable target."""
        with suppress(ModelNotFound):
            model, version = self.endpoints.stable(model, version)
        return self._catalog.named(model, version)

    def cancel(self, pending: Pending) -> None:
        """Forgets a request whose caller went away, and takes it out of the queue if it is still there."""
        is_waiting = is_unanswered = self.submission.pending.cancel(pending)
        if isinstance(pending.sink, OrderedSink):  # its answer may be there, and wait for its turn
            is_waiting = True
            pending.sink.leave()
        if is_unanswered:  # no worker has counted it
            self._tally.ended(pending.model, pending.version, "cancelled", pending.started_s)
        if is_waiting:
            for sink in wrappers_of(pending.sink):
                sink.left(pending.request_id, pending.version)

    def _answered(self, pending: Pending, response: Response) -> None:
        if self.tenants is not None and response.final and isinstance(pending.quota, Quota):
            self._count_for(pending.quota.tenant, self.tenants, pending, response)
        if response.failure is not None:
            if response.final:
                self._tally.failed(pending.model, pending.version, response.failure.code)
            if pending.step is not None and is_callers(response.failure):
                self._tally.ended(pending.model, pending.version, response.failure.code, pending.started_s)
            failure = told(response.failure, pending.client_id or pending.request_id)
            response = msgspec.structs.replace(response, failure=failure)
        elif response.final:
            self._tally.answered(pending.model, pending.version, self._clock.monotonic_s() - pending.started_s)
        pending.sink.deliver(response)

    def _count_for(self, tenant: str, tally: TenantTally, pending: Pending, response: Response) -> None:
        if response.failure is not None:
            tally.failed(tenant, pending.model, response.failure.code)
        else:
            tally.answered(tenant, pending.model, self._clock.monotonic_s() - pending.started_s)

    def _failed(self, pending: Pending, error: Exception) -> None:
        failure = Failure.of(error)
        if pending.step is None or not is_callers(failure):  # those are counted where they are answered
            self._tally.ended(pending.model, pending.version, failure.code, pending.started_s)
        answer = Response(request_id=pending.request_id, model=pending.model, version=pending.version, failure=failure)
        self._answered(pending, answer)


def _given_s(request: InferRequest, spec: ModelSpec, timeout_s: float) -> float:
    """Returns the time that a caller gives its request; infinite where that is what the model's configuration gives."""
    own_s = spec.max_timeout_s if spec.decoupled else spec.default_timeout_s
    return min(timeout_s if timeout_s < own_s else math.inf, request.timeout_s or math.inf)


def checked_timeout_s(asked_s: float, longest_s: float) -> float:
    """Returns the timeout that a request asks for.

    Raises:
        InvalidRequest: It is too short, or longer than it may be.
    """
    if not _SHORTEST_S <= asked_s <= longest_s:
        raise InvalidRequest(
            f"a request timeout of {asked_s:g} s is not possible; "
            f"choose one from {_SHORTEST_S:g} to {longest_s:g} seconds"
        )
    return asked_s
