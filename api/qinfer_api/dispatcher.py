"""The gateway's side of `Submission`: the stages of a request, counts, order, and error texts for clients.

An error before the request is queued is raised; a later error reaches the sink as a failed `Response`.

Models with `preserve_ordering` answer in the order of the requests' submission at this gateway. An answer that comes
before an earlier answer of the same model version is counted and encoded in its turn. A large one is fetched only then,
so that it does not hold memory that an earlier one needs.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from qinfer.core.api_keys import Scope
from qinfer.core.clock import SystemClock
from qinfer.core.messages import Failure, IdFactory, OutgoingRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import (
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QinferError,
    QueueFull,
    QuotaExceeded,
    Unauthorized,
    UnsupportedFeature,
)
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.observe.stats import GatewayTally
from qinfer.observe.tracing import Attributes
from qinfer.queue.entries import FULL, EntryAddress, RequestRecord
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import is_callers
from qinfer.submission.memory import MOST_BYTES, Landing, TensorMemory
from qinfer.submission.pending import Counter, Inner, PendingCall, PendingRequests, ResponseSink
from qinfer.submission.submit import Entrance, StampedRequest, Submission, check
from qinfer.traffic.routing import Endpoints, Header, no_header
from qinfer.traffic.tally import TargetTally
from qinfer.wire.outputs import OutputPlan, bind
from qinfer_api.auth import ANONYMOUS, Auth, CallerContext, Principal
from qinfer_api.stages import Passage, QuotaStage, Stage, wrappers_of
from qinfer_api.status import has_id, of_request, told


class OrderedEntrance(Entrance):
    """Answers in order; at most `most` requests wait."""

    def __init__(self, inner: Entrance, order: "AnswerOrder", most: int) -> None:
        super().__init__(inner.served, inner)
        self._inner, self._order, self._most = inner, order, most

    def submit(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, quota: Counter | None = None
    ) -> PendingCall:
        """See `Entrance.submit`."""
        order = self._order
        if len(order) >= self._most:
            raise QueueFull(FULL)
        place = OrderedSink(order, self.lane.table, sink)
        order.append(place)
        try:
            pending = place.pending = self._inner.submit(request, place, timeout_s, quota)
        except BaseException:
            place.give_up_place()
            raise
        order.advance()
        return pending


class Ordering:
    """Wraps entrances; each version has one order."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._orders: WeakValueDictionary[tuple[str, int], AnswerOrder] = WeakValueDictionary()

    def wrap(self, entrance: Entrance) -> Entrance:
        """Lets an entrance answer in order, if its model wants it."""
        if not entrance.spec.preserves_order:
            return entrance
        key = entrance.spec.name, entrance.served.version
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = AnswerOrder()
        return OrderedEntrance(entrance, order, self._max_in_flight)


class AnswerOrder(deque["OrderedSink"]):
    """The unanswered requests of a version."""

    def advance(self) -> None:
        """Delivers the answers whose turn has come."""
        while self and self[0].is_ready:
            self.popleft().take_turn()
        if self and (first := self[0].pending) is not None:
            first.comes_first()


class OrderedSink(Inner):
    """A request's sink until its turn."""

    __slots__ = ("_came", "_has_left", "_inner", "_order", "_table", "pending")

    def __init__(self, order: AnswerOrder, table: PendingRequests, inner: ResponseSink) -> None:
        self._order, self._table, self._inner = order, table, inner
        self._came: list[tuple[Callable[[PendingCall, Any], None], Response | Exception]] = []
        self._has_left = False
        self.pending: PendingCall | None = None

    @property
    def is_ready(self) -> bool:
        """Whether later requests may answer."""
        return self._has_left or (self.pending is not None and bool(self._came))

    def is_behind(self) -> bool:
        """Returns whether earlier answers come first."""
        return self._order[0] is not self

    def deliver(self, response: Response) -> None:
        """Stores the response for its turn."""
        self._came.append((self._table.answer_caller, response))
        self._order.advance()

    def fail(self, error: Exception) -> None:
        """Stores the failure for its turn."""
        self._came.append((self._table.fail, error))
        self._order.advance()

    def give_up_place(self) -> None:
        """Gives up the place: the caller has left."""
        self._has_left = True
        self._came.clear()
        if self.pending is not None:
            self.pending.sink = self._inner
        self._order.advance()

    def take_turn(self) -> None:
        """Delivers the stored responses; later responses bypass this object."""
        pending, came = self.pending, self._came
        if pending is None or not came:
            return
        pending.sink = self._inner
        if pending not in self._table:
            pending.load = None  # counted when the answer came
        for tell, outcome in came:
            tell(pending, outcome)


# 0 means no timeout
_SHORTEST_S = 0.001

NO_PLAN = OutputPlan()

Ending = Callable[[], AbstractAsyncContextManager[tuple[RequestRecord | None, Response | None]]]


class Anyone:
    """Stands for `Auth` where no keys are required."""

    tenants: frozenset[str] = frozenset()

    def authorize(self, context: CallerContext, scope: Scope, peer: str = "") -> CallerContext:
        """Admits a caller."""
        return context

    def recheck(self, context: CallerContext) -> None:
        """Admits a caller again."""

    def identify(self, context: CallerContext) -> CallerContext:
        """Knows no keys."""
        return context

    def charge(self, principal: Principal) -> None:
        """Counts nothing."""


class StoredTraces:
    """No traces of stored requests and jobs."""

    def trace_of(self, context: CallerContext, served: ServedVersion, name: Attributes) -> str:
        """Returns a stored request's or job's `traceparent`."""
        return context.trace

    @contextmanager
    def trace_stored(self, request: OutgoingRequest) -> Iterator[Callable[[Ending], None]]:
        """Traces a request that the block stores; for a new one, the block calls the yielded function."""
        yield lambda _: None


class Dispatcher:
    """Submits requests and passes responses to their sinks; each gateway has one."""

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
        self._auth: Auth | Anyone = auth or Anyone()
        self.authorize, self.recheck = self._auth.authorize, self._auth.recheck
        self._clock = SystemClock()
        self._new_id = IdFactory().ulid
        self.submission = Submission(delivery, catalog, limits, owner, self._on_response, self._on_failure)
        self.submission.outermost = Ordering(limits.max_in_flight).wrap
        self.endpoints = Endpoints(catalog)
        self.targets = TargetTally(self.endpoints, owner)
        self.stages: tuple[Stage, ...] = () if auth is None else (QuotaStage(auth),)
        self.endpoint_stages: tuple[Stage, ...] = self.stages
        self.traces = StoredTraces()
        self.draining = False

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        return len(self.submission.pending)

    @property
    def has_tenants(self) -> bool:
        """Whether several tenants have keys."""
        return len(self._auth.tenants) > 1

    def sharing(self, context: CallerContext) -> str:
        """Returns the tenant for a `SharedLimit`; empty = the only one."""
        return context.tenant if self.has_tenants else ""

    def charge(self, context: CallerContext) -> None:
        """Charges a request outside `submit` to its tenant's rate."""
        if context.principal is not None:
            self._auth.charge(context.principal)

    def store(
        self, request: OutgoingRequest, served: ServedVersion, address: EntryAddress, timeout_s: float
    ) -> Callable[[], StampedRequest]:
        """See `Entrance.store`."""
        if self.draining:
            raise Overloaded("Server exiting")
        return self.submission.of(served).store(request, address, timeout_s)

    def resolve(self, model: str, version: int, *, is_taken: bool = False) -> ServedVersion:
        """Returns the version that serves a model, or an endpoint's stable target, now or soon.

        Version 0 is the highest ready one. With `is_taken`, an accepted request is served even during a shutdown.
        """
        if self.draining and not is_taken:
            raise Overloaded("Server exiting")
        return self._catalog.asked(*self.endpoints.stable(model, version))

    def aim(
        self,
        context: CallerContext,
        request: OutgoingRequest,
        header: Header = no_header,
        plan: OutputPlan = NO_PLAN,
        served: ServedVersion | None = None,
    ) -> OutputPlan:
        """Chooses an endpoint request's target, and binds its plan; the body was read for `served`."""
        if not self.endpoints.choose(request, context.tenant, header):
            return plan
        request.generation = 0  # its codec may have checked it for another target
        plan = msgspec.structs.replace(plan, endpoint=request.endpoint)
        return plan if plan.special is None else bound(plan, self._target_of(request, served))

    def _target_of(self, request: OutgoingRequest, served: ServedVersion | None) -> ServedVersion:
        place = request.model, request.version
        if served is not None and (not request.endpoint or (served.spec.name, served.version) == place):
            return served
        return self.of_model(*place)

    def landing(
        self, model: str, version: int, nbytes: int, begin: int, tenant: str, most: int = MOST_BYTES
    ) -> Landing | None:
        """Returns memory for at most `most` tensor bytes behind `begin`, if none is needed after the submission."""
        memory = self._lands(model, version, nbytes - begin)
        return None if memory is None else memory.land(nbytes, begin, model, tenant, most)

    def may_land(self, model: str, version: int, nbytes: int, tenant: str) -> bool:
        """Returns whether a body of so many bytes, more than `MOST_BYTES`, is received into memory now."""
        memory = self._lands(model, version, nbytes)
        return memory is not None and memory.may_land(nbytes, model, tenant)

    def _lands(self, model: str, version: int, nbytes: int) -> TensorMemory | None:
        memory = self.submission.memory
        if memory is None or model in self.endpoints.by_name or type(self.traces) is not StoredTraces:
            return None
        try:
            entrance = self.submission.asked(model, version)
        except QinferError:  # `submit` raises it again
            return None
        # Workers would copy all of a large request for each of its parts.
        return memory if entrance.lands and (nbytes <= MOST_BYTES or not entrance.spec.splits) else None

    def reads_all(self, model: str) -> bool:
        """Returns whether requests' tensors may be hashed before they enter the queue."""
        spec = self._catalog.spec(model)
        return model in self.endpoints.by_name or (spec is not None and spec.is_cached)

    def of_model(self, model: str, version: int) -> ServedVersion:
        """Resolves like `resolve`, without endpoints."""
        return self._catalog.asked(model, version)

    def submit(
        self,
        context: CallerContext,
        request: OutgoingRequest,
        sink: ResponseSink,
        within_s: float = math.inf,
        *,
        asked_s: float | None = None,
        is_taken: bool = False,
    ) -> PendingCall:
        """Submits a request, stamped in place; its responses or failure go to the sink, on the event loop.

        See `timeout_of` for `asked_s` and `within_s`.
        """
        if self.draining and not is_taken:
            raise Overloaded("Server exiting")
        stages = self.endpoint_stages if request.endpoint else self.stages
        if not stages:
            return self._enter(context, request, sink, None, asked_s, within_s)
        passage = Passage(context, request, sink, asked_s, within_s)
        try:
            for stage in stages:
                stage.before(passage)
            pending = self._enter(passage.context, request, passage.sink, passage.quota, asked_s, within_s)
        except QinferError as error:
            for wrapper in wrappers_of(passage.sink):
                wrapper.refused(error)
            raise
        for wrapper in wrappers_of(passage.sink):
            wrapper.submitted(request, pending)
        return pending

    def _enter(
        self,
        context: CallerContext,
        request: OutgoingRequest,
        sink: ResponseSink,
        quota: Counter | None,
        asked_s: float | None,
        within_s: float,
    ) -> PendingCall:
        entrance = self.submission.asked(request.model, request.version)
        request.tenant, request.trace = context.tenant, context.trace
        if entrance.spec.decoupled and sink.no_stream:
            raise UnsupportedFeature(sink.no_stream)
        is_usual = asked_s is None and within_s == math.inf
        timeout_s = entrance.usual_timeout_s if is_usual else timeout_of(entrance, asked_s, within_s)
        try:
            return entrance.submit(request, sink, timeout_s, quota)
        except (InvalidRequest, Overloaded) as error:
            self._add_request_id(request, error)
            raise

    def _add_request_id(self, request: OutgoingRequest, error: QinferError) -> None:
        if not request.client_id and not request.id:
            request.id = self._new_id()
        if has_id(error):
            error.args = (of_request(request.client_id or request.id) + error.message,)

    def check(self, request: OutgoingRequest, served: ServedVersion | None = None) -> None:
        """Checks a request, read for `served`, as `submit` does."""
        served = self._target_of(request, served)
        try:
            check(request, served)
        except InvalidRequest as error:
            self._add_request_id(request, error)
            raise

    def refuse(self, model: str, version: int, error: QinferError, context: CallerContext = ANONYMOUS) -> QinferError:
        """Counts a request refused before the queue, and returns its client's error.

        Errors about authorization or quotas stay; an error about the model precedes others.
        """
        told = self._counted(model, version, error)
        self.note_refusal(model, version, told, context)
        return told

    def note_refusal(self, model: str, version: int, error: QinferError, context: CallerContext) -> None:
        """Notes a refused request."""
        if not self.stages:
            return
        if context.principal is None:
            context = self._auth.identify(context)
        named = self.named(model, version)
        for stage in self.stages:
            stage.refused(context, named, error.code)

    def note_accepted(self, context: CallerContext, request: OutgoingRequest, request_id: str) -> None:
        """Notes a stored request."""
        for stage in self.endpoint_stages if request.endpoint else self.stages:
            stage.accepted(context, request, request_id)

    def _counted(self, model: str, version: int, error: QinferError) -> QinferError:
        if isinstance(error, Unauthorized | Forbidden | QuotaExceeded):
            known = self.named(model, version) if isinstance(error, QuotaExceeded) else ("", 0)
            self._tally.failed(*known, error.code)
            if isinstance(error, QuotaExceeded):
                with suppress(QinferError):
                    served = self.resolve(model, version)
                    self._tally.count_ended(served.spec.name, served.version, error.code)
            return error
        try:
            served = self.resolve(model, version)
        except QinferError as first:
            self._tally.failed(*self.named(model, version), first.code)
            # Its traceback's frames would keep the caller's message in a reference cycle.
            return first.with_traceback(None)
        self._tally.failed(served.spec.name, served.version, error.code)
        if isinstance(error, Overloaded):
            self._tally.count_ended(served.spec.name, served.version, error.code)
        return error

    def named(self, model: str, version: int) -> tuple[str, int]:
        """Returns the model and version that a request counts for."""
        with suppress(ModelNotFound):
            model, version = self.endpoints.stable(model, version)
        return self._catalog.named(model, version)

    def cancel(self, pending: PendingCall) -> None:
        """Cancels and dequeues a request whose caller left."""
        is_waiting = is_unanswered = self.submission.pending.cancel(pending)
        if isinstance(pending.sink, OrderedSink):
            is_waiting = True
            pending.sink.give_up_place()
        if is_unanswered:
            self._tally.count_ended(pending.model, pending.version, "cancelled", pending.started_s)
        if is_waiting:
            for sink in wrappers_of(pending.sink):
                sink.left(pending.request_id, pending.version)

    def _on_response(self, pending: PendingCall, response: Response) -> None:
        if self.stages and response.final:
            for stage in self.stages:
                stage.ended(pending, response)
        if response.failure is not None:
            if response.final:
                self._tally.failed(pending.model, pending.version, response.failure.code)
            if pending.step is not None and is_callers(response.failure):
                self._tally.count_ended(pending.model, pending.version, response.failure.code, pending.started_s)
            failure = told(response.failure, pending.client_id or pending.request_id)
            response = msgspec.structs.replace(response, failure=failure)
        elif response.final:
            self._tally.count_answered(pending.model, pending.version, self._clock.monotonic_s() - pending.started_s)
        pending.sink.deliver(response)

    def _on_failure(self, pending: PendingCall, error: Exception) -> None:
        failure = Failure.from_error(error)
        if pending.step is None or not is_callers(failure):  # counted when answered
            self._tally.count_ended(pending.model, pending.version, failure.code, pending.started_s)
        answer = Response(request_id=pending.request_id, model=pending.model, version=pending.version, failure=failure)
        self._on_response(pending, answer)


def bound(plan: OutputPlan, served: ServedVersion) -> OutputPlan:
    """Binds a special plan to a model's outputs."""
    labels = {output.name: output.labels for output in served.spec.outputs}
    return bind(plan, labels, batched=served.spec.max_batch_size > 0)


def timeout_of(entrance: Entrance, asked_s: float | None, within_s: float) -> float:
    """Returns a request's timeout; `asked_s` replaces the model's, `within_s` only shortens it."""
    longest_s = entrance.spec.max_timeout_s
    timeout_s = entrance.usual_timeout_s if asked_s is None else checked_timeout_s(asked_s, longest_s)
    return timeout_s if timeout_s <= within_s else max(within_s, _SHORTEST_S)


def checked_timeout_s(asked_s: float, longest_s: float) -> float:
    """Returns a timeout within the limits, or raises `InvalidRequest`."""
    if not _SHORTEST_S <= asked_s <= longest_s:
        raise InvalidRequest(
            f"a request timeout of {asked_s:g} s is not possible; "
            f"choose one from {_SHORTEST_S:g} to {longest_s:g} seconds"
        )
    return asked_s
