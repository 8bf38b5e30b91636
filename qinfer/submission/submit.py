"""Submission to the queue: resolve → validate → route and admit → stamp → place the payload → enqueue.

`Submission` serves callers that wait: a gateway's clients, and a worker's models that call other models. `prepare`
serves stored requests (`/v1`, bridges), which `Requests.accept` enqueues. Similar requests are neither checked nor laid
out again (`Layouts`). Large tensors travel beside the entry; the size of an entry is bounded, because lanes are limited
by entries.

The `timeout` of a sequence's step counts until the sequence has a slot. A request for a version that no live worker has
loaded is withdrawn after `ServedVersion.wait_s`.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from qinfer.core.clock import SystemClock
from qinfer.core.messages import IdFactory, OutgoingRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import (
    BACKLOG_TIMED_OUT,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    PayloadTooLarge,
    QinferError,
    QueueFull,
    UnsupportedFeature,
)
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.routes import LaneRoute
from qinfer.models.sequence_spec import check_sequence
from qinfer.queue.entries import FULL, EntryAddress, Lane, Payload, reply_address, shadow_lane
from qinfer.queue.lanes import Queue
from qinfer.submission.backlog import LaneLoads, queue_timeout_s
from qinfer.submission.caches import inputs_digest
from qinfer.submission.lane_load import LaneLoad
from qinfer.submission.pending import Counter, Inner, PendingCall, PendingRequests, ResponseSink
from qinfer.submission.response_cache import Flight, ResponseCache
from qinfer.submission.splits import check_whole, is_large, submit_parts
from qinfer.submission.steps import SequenceSteps
from qinfer.submission.validate import validate
from qinfer.tensors import Bytes, Tensor
from qinfer.traffic.endpoints import why_no_shadow
from qinfer.wire.frame import Repeats, RequestForm, encode_request, encode_request_apart, timeout_width

MAX_HEAD_BYTES = 2**20
"""The most bytes of a request without its tensors."""

PAYLOAD_MARGIN_S = 60.0
"""How long tensors beside the stream outlive the deadline."""

TAKEN_S = 0.2
"""Workers with free slots may take this long before a sequence counts as waiting."""

_MAX_LAYOUTS = 1024

Kind = tuple[object, ...]
"""The common properties of requests of one layout."""


class LocalBatcher(Protocol):
    """A way past the lane into a batcher of this process."""

    def try_admit(
        self,
        served: ServedVersion,
        request: OutgoingRequest,
        rows: int,
        waiting: PendingCall,
        *,
        next_batch: bool = True,
    ) -> bool:
        """Admits a checked and stamped request, with `next_batch` only into the next batch; returns whether it did."""
        ...


class Submission:
    """Submits one process's requests and waits for answers; made on its event loop.

    `owner` names this process: replies come to `reply:<owner>`.
    """

    def __init__(
        self,
        queue: Queue,
        catalog: Catalog,
        limits: LimitSettings,
        owner: str,
        answered: Callable[[PendingCall, Response], None],
        failed: Callable[[PendingCall, Exception], None],
    ) -> None:
        self._queue = queue
        self._catalog = catalog
        self._max_in_flight = limits.max_in_flight
        self._clock = SystemClock()
        self._reply_to = reply_address(owner)
        self._new_id = IdFactory().request_id
        self._layouts = Layouts(limits.inline_max_bytes)
        call_later = asyncio.get_running_loop().call_later
        window_bytes = limits.stream_window_bytes
        self.pending = PendingRequests(queue, self._clock, call_later, answered, failed, window_bytes)
        self.backlog = LaneLoads(queue, catalog)
        self.pending.load_of = self.backlog.known
        self._steps = SequenceSteps(queue, limits, self.pending)
        self._cache: ResponseCache | None = None

    def set_cache(self, cache: ResponseCache) -> None:
        """Caches responses of models that enable it; call before `run`."""
        cache.serve(self)
        self._cache = cache

    def submit(
        self,
        served: ServedVersion,
        request: OutgoingRequest,
        sink: ResponseSink,
        timeout_s: float,
        quota: Counter | None = None,
    ) -> PendingCall:
        """Submits a request with tenant and trace, stamped in place; its responses, or its failure, go to the sink.

        The request's `timeout_s` is its queue timeout, the argument the time to its deadline; a stream also needs a
        first response in the model's default timeout. `quota` counts the request while it is in flight.
        """
        spec = served.spec
        if (spec.is_cached or spec.splits or spec.sequences is not None) and (
            special := self._submit_special(served, request, sink, timeout_s, quota)
        ) is not None:
            return special
        route = None if served.routes.are_plain else served.routes.for_priority(request.priority)
        lane = served.lane if route is None else route.lane
        is_usual = route is None or route.is_usual
        if len(self.pending) >= self._max_in_flight:
            raise QueueFull(FULL)
        kind = form = None
        if is_usual and not served.wait_s and not spec.decoupled and not (spec.steps and request.timeout_s):
            kind = kind_of(request, lane, served.generation, timeout_s)
            form = None if kind is None else self._layouts.find(kind)
        if form is None and (not request.generation or request.generation != served.generation):
            check(request, served)
        tenant = request.tenant
        load = self.backlog.load(served, self._queue.places.last(lane, tenant) if tenant else lane)
        waiting, default_s = load.own + load.others + load.beside, spec.default_timeout_s
        # A shorter timeout allows proportionally fewer.
        if not is_usual or waiting * default_s >= load.most * min(timeout_s, default_s):
            worth_s = min(timeout_s, default_s) if spec.decoupled else timeout_s
            self.admit(served, route or served.routes.default, worth_s, request.timeout_s, tenant=tenant)
        request.id = self._new_id(spec.name, lane.partition)
        request.version = served.version
        now_s = self._clock.monotonic_s()
        pending = PendingCall(
            request.id, request.client_id, spec.name, served.version, sink, now_s, load=load, quota=quota
        )
        try:
            if form is None:
                self._submit_anew(pending, request, served, route or served.routes.default, timeout_s, kind)
            else:
                request.timeout_s = timeout_s
                self.pending.add(pending, now_s + timeout_s)
                limit, by = 0 if route is None else route.policy.max_queue_size, request.moves_by
                done = partial(self.pending.submitted, pending)
                self._queue.submit(lane, form.fill(request), done, limit=limit, tenant=tenant, endpoint=by)
        except QinferError:
            self.pending.remove(pending)
            raise
        return pending

    def submit_near(
        self, served: ServedVersion, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, local: LocalBatcher
    ) -> PendingCall:
        """Submits a plain request to a batcher of this process if nothing waits, else by `submit`."""
        spec = served.spec
        is_plain = served.routes.are_plain and not (served.wait_s or spec.decoupled or spec.is_stateful)
        if not is_plain or spec.is_cached or spec.splits or self._is_crowded(served):
            return self.submit(served, request, sink, timeout_s)
        pending = self._submit_local(served, request, sink, timeout_s, partial(local.try_admit, next_batch=True))
        return pending or self.submit(served, request, sink, timeout_s)

    def submit_here(
        self, served: ServedVersion, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, local: LocalBatcher
    ) -> PendingCall | None:
        """Submits to a batcher of this process, past all waiting requests; `None` if it refuses."""
        spec = served.spec
        # The reader of the lane chooses the sequence id that the model sees.
        names_sequence = spec.sequences is not None or request.sequence is not None
        if spec.decoupled or names_sequence or validate(request, spec) > max(spec.max_batch_size, 1):
            return None
        return self._submit_local(served, request, sink, timeout_s, partial(local.try_admit, next_batch=False))

    def _is_crowded(self, served: ServedVersion) -> bool:
        load = self.backlog.load(served, served.lane)
        return load.others > 0 or load.beside > 0

    def _submit_local(
        self,
        served: ServedVersion,
        request: OutgoingRequest,
        sink: ResponseSink,
        timeout_s: float,
        try_admit: Callable[..., bool],
    ) -> PendingCall | None:
        now_s, rows = self._clock.monotonic_s(), validate(request, served.spec)
        request.id = self._new_id(served.spec.name, served.lane.partition)
        request.version, request.generation, request.timeout_s = served.version, served.generation, timeout_s
        pending = PendingCall(request.id, request.client_id, served.spec.name, served.version, sink, now_s)
        if not try_admit(served, request, rows, pending):
            request.timeout_s = 0.0  # plain models need no policy
            return None
        self.pending.add(pending, now_s + timeout_s)
        return pending

    def enqueue(self, waiting: PendingCall, request: OutgoingRequest, lane: Lane) -> None:
        """Enqueues a pending request that a local batcher admitted and did not execute."""
        if waiting not in self.pending:
            return
        self.pending.count(waiting, self.backlog.known(lane))
        request.reply_to = self._reply_to
        frame, payload = self._layouts.lay_out(request, None)
        done = partial(self.pending.submitted, waiting)
        self._queue.submit(lane, frame, done, payload=payload, tenant=request.tenant, endpoint=request.moves_by)

    def admit(
        self, served: ServedVersion, route: LaneRoute, timeout_s: float, asked_s: float, *, tenant: str = ""
    ) -> None:
        """Raises `Overloaded` as `LaneLoads.judge` decides."""
        refusal = self.backlog.judge(served, route, timeout_s, asked_s, tenant=tenant)
        if refusal is not None:
            raise refusal

    def prepare(self, request: OutgoingRequest, served: ServedVersion) -> None:
        """Checks a request before its cached response is looked up."""
        if len(self.pending) >= self._max_in_flight:
            raise QueueFull(FULL)
        if not request.generation or request.generation != served.generation:
            check(request, served)

    def new_id(self, served: ServedVersion) -> str:
        """Returns a request id."""
        return self._new_id(served.spec.name, served.lane.partition)

    async def run(self) -> None:
        """Runs the background work of this process's submissions until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._cache is not None:
                group.create_task(self._cache.run())
            group.create_task(self.pending.run())
            group.create_task(self.backlog.run())
            group.create_task(self._steps.run())

    def _submit_anew(
        self,
        pending: PendingCall,
        request: OutgoingRequest,
        served: ServedVersion,
        route: LaneRoute,
        timeout_s: float,
        kind: Kind | None,
    ) -> None:
        policy, spec = route.policy, served.spec
        _stamp(request, served, route, timeout_s, self._reply_to)
        frame, payload = self._layouts.lay_out(request, kind)
        if spec.decoupled:
            pause_s = min(spec.default_timeout_s, timeout_s)
            self.pending.open_stream(pending, resumes=spec.stream_resume, pause_s=pause_s, timeout_s=timeout_s)
            timeout_s = pause_s
        first_s = timeout_s
        if not policy.delay and 0 < request.queue_timeout_s < first_s:
            first_s = request.queue_timeout_s
        if 0 < served.wait_s < first_s:
            first_s, pending.untaken = served.wait_s, partial(self._untaken, served)
        if first_s < timeout_s:
            pending.deadline_s, timeout_s = pending.started_s + timeout_s, first_s
        self.pending.add(pending, pending.started_s + timeout_s)
        done = partial(self.pending.submitted, pending)
        limit, tenant, endpoint = policy.max_queue_size, request.tenant, request.moves_by
        self._queue.submit(route.lane, frame, done, payload=payload, limit=limit, tenant=tenant, endpoint=endpoint)

    def _submit_special(
        self,
        served: ServedVersion,
        request: OutgoingRequest,
        sink: ResponseSink,
        timeout_s: float,
        quota: Counter | None,
    ) -> PendingCall | None:
        if served.spec.is_stateful:
            if len(self.pending) >= self._max_in_flight:
                raise QueueFull(FULL)
            return self._submit_step(served, request, sink, timeout_s, quota)
        if served.spec.splits and is_large(request, served.spec):
            return self._submit_parts(served, request, sink, timeout_s, quota)
        if self._cache is None or not served.spec.is_cached or type(sink) is Flight:
            return None
        return self._cache.submit(served, request, sink, timeout_s, quota)

    def _submit_parts(
        self,
        served: ServedVersion,
        request: OutgoingRequest,
        sink: ResponseSink,
        timeout_s: float,
        quota: Counter | None,
    ) -> PendingCall:
        self.prepare(request, served)
        request.id, request.version, now_s = self.new_id(served), served.version, self._clock.monotonic_s()
        model = served.spec.name
        pending = PendingCall(request.id, request.client_id, model, served.version, sink, now_s, quota=quota)
        submit_parts(self, served, request, pending, timeout_s)
        return pending

    def _submit_step(
        self,
        served: ServedVersion,
        request: OutgoingRequest,
        sink: ResponseSink,
        timeout_s: float,
        quota: Counter | None,
    ) -> PendingCall:
        """Submits a step, whose limits are checked when it is appended."""
        spec = served.spec
        if not request.generation or request.generation != served.generation:
            check(request, served)
        request.id = self._new_id(spec.name, served.lane.partition)
        backlog_s = 0.0 if spec.steps else request.timeout_s
        _stamp(request, served, served.routes.default, timeout_s, self._reply_to)
        frame, payload = self._layouts.lay_out(request, None)
        now_s, load = self._clock.monotonic_s(), LaneLoad(served.lane, 0)
        pending = PendingCall(
            request.id, request.client_id, spec.name, served.version, sink, now_s, load=load, quota=quota
        )
        first_s = timeout_s
        if backlog_s and (slot_s := max(backlog_s, TAKEN_S)) < first_s:
            first_s, pending.untaken = slot_s, partial(DeadlineExceeded, BACKLOG_TIMED_OUT)
        if 0 < served.wait_s < first_s:
            first_s, pending.untaken = served.wait_s, partial(self._untaken, served)
        if first_s < timeout_s:
            pending.deadline_s = now_s + timeout_s
        self._steps.submit(pending, request, served, frame, payload)
        self.pending.add(pending, now_s + first_s)
        return pending

    def _untaken(self, served: ServedVersion) -> QinferError | None:
        model, version = served.spec.name, served.version
        try:
            if not self._catalog.asked(model, version).wait_s:
                return None
        except (ModelNotFound, ModelNotReady) as error:
            return error
        return ModelNotReady(
            f"no worker took the request for '{model}' version {version} within {served.wait_s:g} s; "
            "try again when one has loaded it"
        )


def check(request: OutgoingRequest, served: ServedVersion) -> None:
    """Checks a request against its model, once; usable in any thread."""
    rows = validate(request, served.spec, served.spec.max_request_rows)
    if served.spec.sequences is not None:
        check_sequence(request, rows, served.spec.sequences)
    if served.spec.is_cached and not request.inputs_digest:
        request.inputs_digest = inputs_digest(request.inputs)
    request.generation = served.generation


def check_stateless(served: ServedVersion) -> None:
    """Raises `InvalidRequest` for a stateful model."""
    spec = served.spec
    if spec.sequences is not None and spec.is_stateful:
        raise InvalidRequest(
            f"model '{spec.name}' keeps state from request to request: /v1, bulk jobs, bridges and labeling can't use "
            "it; send the requests of a sequence one after the other to its infer route"
        )


class StampedRequest(NamedTuple):
    """A request that is ready for the queue."""

    lane: Lane
    frame: bytes
    payload: Bytes
    limit: int
    reports_start: bool
    endpoint: str


def prepare(  # noqa: PLR0913 - keywords: what a request is stamped with
    request: OutgoingRequest,
    served: ServedVersion,
    *,
    address: EntryAddress,
    timeout_s: float,
    inline_max_bytes: int,
    tenant: str = "",
    trace: str = "",
    route: LaneRoute | None = None,
    max_waiting: int = 0,
) -> StampedRequest:
    """Stamps and encodes a checked request; call it in a thread if its tensors do not fit the frame.

    The call modifies the request: keep the result for a repetition. The request's `timeout_s` is its queue timeout, the
    argument the time to its deadline. Tensors above `inline_max_bytes` travel beside the stream. `max_waiting` limits
    waiting entries, beside the policy's and the lane's limits; 0 = unlimited.
    """
    check_stateless(served)
    check_whole(request, served.spec)
    if route is None:
        route = served.routes.for_priority(request.priority)
    request.id = address.id
    request.tenant = tenant
    request.trace = trace
    _stamp(request, served, route, timeout_s)
    request.partition = address.partition
    frame, payload = lay_out(request, inline_max_bytes)
    limits = (route.policy.max_queue_size, served.spec.lane_capacity, max_waiting)
    limit = min((limit for limit in limits if limit), default=0)
    reports_start = served.spec.batching is not None and served.spec.batching.is_bounded
    return StampedRequest(
        route.lane, frame, payload.data if payload is not None else b"", limit, reports_start, request.moves_by
    )


def _stamp(
    request: OutgoingRequest, served: ServedVersion, route: LaneRoute, timeout_s: float, reply_to: str = ""
) -> None:
    request.version = served.version
    request.partition = route.lane.partition
    # An ensemble's queue timeout is for its steps.
    asked_s = request.timeout_s
    request.queue_timeout_s = asked_s if served.spec.steps else queue_timeout_s(route.policy, asked_s)
    request.timeout_s = timeout_s
    request.reply_to = reply_to


class Layouts:
    """A cache: a similar request is neither checked nor laid out again."""

    def __init__(self, inline_max_bytes: int) -> None:
        self._inline_max_bytes = inline_max_bytes
        self._forms: dict[Kind, RequestForm] = {}
        self._repeats = Repeats()

    def find(self, kind: Kind) -> RequestForm | None:
        """Returns the form of a kind."""
        return self._forms.get(kind)

    def lay_out(self, request: OutgoingRequest, kind: Kind | None) -> tuple[bytes, Payload | None]:
        """Encodes a stamped request; the second of its kind makes the layout known."""
        frame, payload = lay_out(request, self._inline_max_bytes)
        if kind is not None and payload is None and self._repeats.has(kind):
            if len(self._forms) >= _MAX_LAYOUTS:
                self._forms.clear()
            self._forms[kind] = RequestForm(request)
        return frame, payload


def kind_of(request: OutgoingRequest, lane: Lane, generation: int, timeout_s: float) -> Kind | None:
    """Returns the kind of an unstamped request.

    `None` if its frame is unique or its bytes must be checked.
    """
    if request.client_id or request.parameters or request.priority or request.sequence is not None or request.holders:
        return None
    if request.calls is not None:
        return None
    trace = request.trace
    if trace and not trace.isascii():
        return None
    inputs = request.inputs
    spares = request.spares_outputs
    kind = (lane, generation, request.tenant, request.outputs, spares, len(trace), timeout_width(timeout_s))
    if len(inputs) != 1:
        return None if any(t.datatype == "BYTES" for t in inputs) else (*kind, *[_kind_of(tensor) for tensor in inputs])
    return None if inputs[0].datatype == "BYTES" else (*kind, _kind_of(inputs[0]))


def _kind_of(tensor: Tensor) -> Kind:
    return tensor.name, tensor.datatype, tensor.shape, len(tensor.data)


def tensor_bytes(request: OutgoingRequest) -> int:
    """Returns the bytes of a request's tensors."""
    size = 0
    for tensor in request.inputs:
        size += len(tensor.data)
    return size


def lay_out(request: OutgoingRequest, inline_max_bytes: int) -> tuple[bytes, Payload | None]:
    """Encodes a stamped request and sets its `payload`; returns the frame, and a payload beside it."""
    size = tensor_bytes(request)
    if size <= inline_max_bytes:
        frame = encode_request(request)
        check_head(len(frame) - size)
        return frame, None
    request.payload = True
    frame, data = encode_request_apart(request)
    check_head(len(frame))
    return frame, Payload(request.id, data, request.timeout_s + PAYLOAD_MARGIN_S)


def check_head(size: int) -> None:
    """Raises `PayloadTooLarge` if the request is too large without its tensors."""
    if size > MAX_HEAD_BYTES:
        raise PayloadTooLarge(
            f"the id, names and parameters of the request take {size} bytes, more than {MAX_HEAD_BYTES}; "
            "send what is large as a tensor"
        )


def submit_shadow(
    submission: Submission,
    served: ServedVersion,
    request: OutgoingRequest,
    sink: Inner,
    monotonic_s: Callable[[], float],
) -> PendingCall:
    """Puts a copy of a request into the shadow lane of a model version, which workers read while idle.

    It bypasses response cache and quotas. Abandoned shadows are removed, and workers drop those of dead workers.
    """
    spec = served.spec
    if reason := why_no_shadow(spec):
        raise UnsupportedFeature(reason)
    validate(request, spec)
    lane = shadow_lane(spec.name, served.version, served.lane.partition)
    request.id, request.version, request.partition = submission.new_id(served), served.version, lane.partition
    request.generation, request.timeout_s, request.queue_timeout_s = served.generation, spec.default_timeout_s, 0.0
    now_s = monotonic_s()
    pending = PendingCall(request.id, request.client_id, spec.name, served.version, sink, now_s)
    submission.pending.add(pending, now_s + spec.default_timeout_s)
    try:
        submission.enqueue(pending, request, lane)
    except QinferError:
        submission.pending.remove(pending)
        raise
    return pending
