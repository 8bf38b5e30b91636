"""The way into the queue: each served version has an *entrance*, composed once from its configuration.

    lane | policy (priorities, queue timeouts, streams, waits for workers) | sequence
    cache(lane), split(lane), split(cache(lane))

The catalog's refresh replaces all entrances at once; requests in flight keep theirs. Stored requests (`/v1`) enter by
`Entrance.store`, those of bridges by `prepare`. Similar requests are neither checked nor laid out again
(`Layouts`). Large tensors travel beside the entry.

The `timeout` of a sequence's step counts until the sequence has a slot. A request for a version that no live worker has
loaded is withdrawn after `ServedVersion.wait_s`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from qinfer.core.clock import SystemClock
from qinfer.core.messages import IdFactory, OutgoingRequest, Response, end_of_id
from qinfer.core.settings import LimitSettings
from qinfer.errors import (
    BACKLOG_TIMED_OUT,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    QinferError,
    QueueFull,
    UnsupportedFeature,
)
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.sequence_spec import check_sequence
from qinfer.models.spec import LaneRoute
from qinfer.queue.entries import FULL, EntryAddress, Lane, Payload, reply_address, shadow_lane
from qinfer.queue.lanes import Queue
from qinfer.submission.backlog import LaneLoad, LaneLoads, queue_timeout_s
from qinfer.submission.memory import Kind, Layouts, TensorMemory, kind_of, lay_out
from qinfer.submission.pending import Counter, Inner, PendingCall, PendingRequests, ResponseSink
from qinfer.submission.response_cache import ResponseCache, inputs_digest
from qinfer.submission.splits import check_whole, is_large, parts_of, submit_parts
from qinfer.submission.steps import SequenceSteps
from qinfer.submission.validate import validate
from qinfer.tensors import Bytes
from qinfer.traffic.endpoints import why_no_shadow
from qinfer.wire.frame import RequestForm

TAKEN_S = 0.2
"""Workers with free slots may take this long before a sequence counts as waiting."""


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
    """The entrances of one process, made on its event loop.

    `owner` names this process: replies come to `reply:<owner>`. `outermost` wraps entrances.
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
        self.queue = queue
        self.catalog = catalog
        self.max_in_flight = limits.max_in_flight
        self.clock = SystemClock()
        self.reply_to = reply_address(owner)
        self.new_id = IdFactory().new_id
        self.layouts = Layouts(limits.inline_max_bytes)
        call_later = asyncio.get_running_loop().call_later
        window_bytes = limits.stream_window_bytes
        self.pending = PendingRequests(queue, self.clock, call_later, answered, failed, window_bytes)
        self.backlog = LaneLoads(queue, catalog)
        self.pending.load_of = self.backlog.known
        self.steps = SequenceSteps(queue, limits, self.pending)
        self.outermost: Callable[[Entrance], Entrance] = lambda entrance: entrance
        self.memory: TensorMemory | None = None
        self._cache: ResponseCache | None = None
        self._entrances: dict[tuple[str, int], Entrance] = {}
        catalog.shown = self._show

    def set_cache(self, cache: ResponseCache) -> None:
        """Sets the cache, before the first refresh."""
        cache.serve(self.pending)
        self._cache = cache

    def set_memory(self, memory: TensorMemory) -> None:
        """Keeps large tensors of requests in memory, and reads outputs in that of workers; before the first refresh."""
        memory.serve(self.pending.receive)
        memory.changed = self.layouts.forget_referring
        self.memory, self.pending.kept, self.pending.unread = memory, memory.others, memory.leave
        self.layouts.remembered_bytes = memory.least_bytes - 1

    def asked(self, model: str, version: int) -> "Entrance":
        """Returns an entrance, as `Catalog.asked`."""
        return self._entrances.get((model, version)) or self.compose(self.catalog.asked(model, version))

    def of(self, served: ServedVersion) -> "Entrance":
        """Returns a version's entrance."""
        entrance = self._entrances.get((served.spec.name, served.version))
        return entrance if entrance is not None and entrance.served is served else self.compose(served)

    def compose(self, served: ServedVersion) -> "Entrance":
        """Composes a version's entrance."""
        spec = served.spec
        if spec.is_stateful:
            return self.outermost(SequenceEntrance(self, served))
        is_plain = served.routes.are_plain and not (served.wait_s or spec.decoupled or spec.steps)
        entrance: Entrance = (LaneEntrance if is_plain else PolicyEntrance)(self, served)
        if spec.is_cached and self._cache is not None:
            entrance = CacheEntrance(self._cache, entrance.lane)
        if spec.splits:
            entrance = SplitEntrance(entrance)
        return self.outermost(entrance)

    def recompose(self, model: str) -> None:
        """Composes a model's entrances again, because `outermost` wraps them in another way now."""
        fresh: dict[int, Entrance] = {}
        for (name, version), entrance in list(self._entrances.items()):
            if name == model:
                served = entrance.served
                self._entrances[name, version] = fresh.get(id(served)) or fresh.setdefault(
                    id(served), self.compose(served)
                )

    def enqueue(self, waiting: PendingCall, request: OutgoingRequest, lane: Lane) -> None:
        """Enqueues a pending request that a local batcher admitted and did not execute."""
        if waiting not in self.pending:
            return
        self.pending.count(waiting, self.backlog.known(lane))
        request.reply_to = self.reply_to
        frame, payload = self.layouts.lay_out(request, None)
        done = partial(self.pending.submitted, waiting)
        self.queue.submit(lane, frame, done, payload=payload, tenant=request.tenant, endpoint=request.moves_by)

    async def run(self) -> None:
        """Works in the background until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._cache is not None:
                group.create_task(self._cache.run())
            group.create_task(self.pending.run())
            group.create_task(self.backlog.run())
            group.create_task(self.steps.run())

    def _show(self, versions: Mapping[tuple[str, int], ServedVersion]) -> None:
        """Unchanged versions keep their entrances."""
        if self.memory is not None:
            self.memory.forget()
        known = {id(entrance.served): entrance for entrance in self._entrances.values()}
        self._entrances = {
            key: known.get(id(served)) or known.setdefault(id(served), self.compose(served))
            for key, served in versions.items()
        }


class Entrance(ABC):
    """The way into a served version; `lane` is the innermost entrance, `uncached` the one past the response cache."""

    def __init__(self, served: ServedVersion, inner: "Entrance | None" = None) -> None:
        self.served, self.spec = served, served.spec
        self.lane: LaneEntrance
        self.uncached: Entrance = self
        self.lands = False
        """Whether bodies may be received into the memory of their tensors."""
        self.usual_timeout_s = self.spec.max_timeout_s if self.spec.decoupled else self.spec.default_timeout_s
        if inner is not None:
            self.lane, self.uncached = inner.lane, inner.uncached

    @abstractmethod
    def submit(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, quota: Counter | None = None
    ) -> PendingCall:
        """Submits a request with tenant and trace, stamped in place; its responses, or its failure, go to the sink.

        The request's `timeout_s` is its queue timeout, the argument the time to its deadline; a stream also needs a
        first response in the model's default timeout. `quota` counts the request while it is in flight.
        """

    def submit_near(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, local: LocalBatcher
    ) -> PendingCall:
        """Submits a plain request to a batcher of this process, if nothing waits."""
        return self.submit(request, sink, timeout_s)

    def store(
        self, request: OutgoingRequest, address: EntryAddress, timeout_s: float
    ) -> Callable[[], "StampedRequest"]:
        """Admits a checked request to be stored; returns its `prepare`."""
        return self.lane.store(request, address, timeout_s)


class LaneEntrance(Entrance):
    """The entrance of requests that are alike."""

    def __init__(self, submission: Submission, served: ServedVersion) -> None:
        super().__init__(served)
        spec, route = served.spec, served.routes.default
        self.lane = self
        self._model, self._version = spec.name, served.version
        self._new_id = partial(submission.new_id, end_of_id(spec.name, route.lane.partition))
        self._submission, self._queue, self.table = submission, submission.queue, submission.pending
        self._layouts, self._now_s, self._memory = submission.layouts, submission.clock.monotonic_s, submission.memory
        self._max_in_flight, self._load = submission.max_in_flight, submission.backlog.load
        self._lane, self._route, self._limit = route.lane, route, route.policy.max_queue_size
        self._default_s = spec.default_timeout_s
        self.lands = not spec.is_stateful

    def submit(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, quota: Counter | None = None
    ) -> PendingCall:
        """See `Entrance.submit`."""
        served, lane, tenant = self.served, self._lane, request.tenant
        if len(self.table.by_id) >= self._max_in_flight:
            raise QueueFull(FULL)
        kind = kind_of(request, self, timeout_s)
        form = None if kind is None else self._layouts.find(kind)
        if form is None:
            self.check(request)
        load = self._load(served, self._queue.places.last(lane, tenant) if tenant else lane)
        waiting, default_s = load.own + load.others + load.beside, self._default_s
        # A shorter timeout allows proportionally fewer.
        if waiting * default_s >= load.most * min(timeout_s, default_s):
            self.admit(request, self._route, timeout_s)
        request.id, request.version = self._new_id(), self._version
        now_s, table, client_id = self._now_s(), self.table, request.client_id
        pending = PendingCall(request.id, client_id, self._model, self._version, sink, now_s, load=load, quota=quota)
        try:
            if form is None:
                _stamp(request, served, self._route, timeout_s, self._submission.reply_to)
                frame, payload = self._laid_out(request, pending, kind)
            elif isinstance(form, RequestForm):
                request.timeout_s = timeout_s
                frame, payload = form.fill(request), None
            elif self._memory is not None and (held := self._memory.keep(request)) is not None:
                request.timeout_s, pending.tensors = timeout_s, held
                frame, payload = form.fill(request, held.reference), None
            else:
                frame, payload = self._without_memory(request, timeout_s)
            table.add(pending, now_s + timeout_s)
            done, by = partial(table.submitted, pending), request.moves_by if request.endpoint else ""
            self._queue.submit(lane, frame, done, payload=payload, limit=self._limit, tenant=tenant, endpoint=by)
        except QinferError:
            table.remove(pending)
            raise
        return pending

    def submit_near(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, local: LocalBatcher
    ) -> PendingCall:
        """See `Entrance.submit_near`."""
        pending = None
        if self.served.routes.are_plain and not (self.served.wait_s or self.spec.decoupled):
            load = self._load(self.served, self._lane)
            if not (load.others or load.beside):
                pending = self._submit_local(request, sink, timeout_s, local, next_batch=True)
        return pending or self.submit(request, sink, timeout_s)

    def submit_here(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, local: LocalBatcher
    ) -> PendingCall | None:
        """Submits to a batcher of this process, past all waiting requests, or returns `None`."""
        spec = self.spec
        # The reader of the lane chooses the sequence id that the model sees.
        names_sequence = spec.sequences is not None or request.sequence is not None
        if spec.decoupled or names_sequence or validate(request, spec) > max(spec.max_batch_size, 1):
            return None
        return self._submit_local(request, sink, timeout_s, local, next_batch=False)

    def submit_shadow(self, request: OutgoingRequest, sink: Inner) -> PendingCall:
        """Puts a copy of a request into the version's shadow lane, which workers read while idle.

        It bypasses response cache and quotas. Abandoned shadows are removed, and workers drop those of dead workers.
        """
        spec = self.spec
        if reason := why_no_shadow(spec):
            raise UnsupportedFeature(reason)
        validate(request, spec)
        lane = shadow_lane(spec.name, self.served.version, self._lane.partition)
        pending = self.begin(request, sink)
        request.partition, request.generation = lane.partition, self.served.generation
        request.timeout_s, request.queue_timeout_s = self._default_s, 0.0
        self.table.add(pending, pending.started_s + self._default_s)
        try:
            self._submission.enqueue(pending, request, lane)
        except QinferError:
            self.table.remove(pending)
            raise
        return pending

    def store(
        self, request: OutgoingRequest, address: EntryAddress, timeout_s: float
    ) -> Callable[[], "StampedRequest"]:
        """See `Entrance.store`."""
        self.admit(request, self.served.routes.for_priority(request.priority), timeout_s)
        return partial(prepare, request, self.served, address, timeout_s, self._layouts.inline_max_bytes)

    def check_room(self, request: OutgoingRequest) -> None:
        """Checks a request, and that the table of pending requests has room."""
        if len(self.table) >= self._max_in_flight:
            raise QueueFull(FULL)
        self.check(request)

    def check(self, request: OutgoingRequest) -> None:
        """Checks a request once."""
        if not request.generation or request.generation != self.served.generation:
            check(request, self.served)

    def admit(self, request: OutgoingRequest, route: LaneRoute, timeout_s: float) -> None:
        """Raises `Overloaded` as `LaneLoads.judge` decides."""
        judge = self._submission.backlog.judge
        if (refusal := judge(self.served, route, timeout_s, request.timeout_s, tenant=request.tenant)) is not None:
            raise refusal

    def begin(
        self, request: OutgoingRequest, sink: ResponseSink, quota: Counter | None = None, load: LaneLoad | None = None
    ) -> PendingCall:
        """Stamps id and version; returns the pending request."""
        model, version, now_s = self._model, self._version, self._now_s()
        request.id, request.version = self._new_id(), version
        return PendingCall(request.id, request.client_id, model, version, sink, now_s, load=load, quota=quota)

    def _laid_out(
        self, request: OutgoingRequest, pending: PendingCall, kind: Kind | None
    ) -> tuple[bytes, Payload | None]:
        if self._memory is not None and (laid := self._memory.lay_out(request, self.served)) is not None:
            frame, pending.tensors = laid
            if kind is not None:
                self._layouts.learn_referring(kind, request, pending.tensors.reference)
            return frame, None
        return self._layouts.lay_out(request, kind)

    def _without_memory(self, request: OutgoingRequest, timeout_s: float) -> tuple[bytes, Payload | None]:
        """Lays out a request of a known layout that refers to memory; without room, its tensors go through Redis."""
        _stamp(request, self.served, self._route, timeout_s, self._submission.reply_to)
        request.generation = self.served.generation
        return self._layouts.lay_out(request, None)

    def _submit_local(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, local: LocalBatcher, *, next_batch: bool
    ) -> PendingCall | None:
        rows = validate(request, self.spec)
        pending = self.begin(request, sink)
        request.generation, request.timeout_s = self.served.generation, timeout_s
        if not local.try_admit(self.served, request, rows, pending, next_batch=next_batch):
            request.timeout_s = 0.0  # plain models need no policy
            return None
        self.table.add(pending, pending.started_s + timeout_s)
        return pending

    def _add(self, pending: PendingCall, first_s: float, timeout_s: float) -> None:
        """Adds a request with a first and a last deadline."""
        if 0 < self.served.wait_s < first_s:
            first_s, pending.untaken = self.served.wait_s, self._untaken
        if first_s < timeout_s:
            pending.deadline_s = pending.started_s + timeout_s
        self.table.add(pending, pending.started_s + first_s)

    def _untaken(self) -> QinferError | None:
        model, version, wait_s = self.spec.name, self.served.version, self.served.wait_s
        try:
            if not self._submission.catalog.asked(model, version).wait_s:
                return None
        except (ModelNotFound, ModelNotReady) as error:
            return error
        return ModelNotReady(
            f"no worker took the request for '{model}' version {version} within {wait_s:g} s; "
            "try again when one has loaded it"
        )


class PolicyEntrance(LaneEntrance):
    """A lane with more than one kind of request."""

    def __init__(self, submission: Submission, served: ServedVersion) -> None:
        super().__init__(submission, served)
        self._is_usual = self._route.is_usual and not (served.wait_s or self.spec.decoupled)

    def submit(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, quota: Counter | None = None
    ) -> PendingCall:
        """See `Entrance.submit`."""
        spec = self.spec
        if self._is_usual and not (request.priority or (spec.steps and request.timeout_s)):
            return super().submit(request, sink, timeout_s, quota)
        route = self.served.routes.for_priority(request.priority)
        self.check_room(request)
        tenant, default_s = request.tenant, self._default_s
        load = self._load(self.served, self._queue.places.last(route.lane, tenant) if tenant else route.lane)
        waiting = load.own + load.others + load.beside
        if not route.is_usual or waiting * default_s >= load.most * min(timeout_s, default_s):
            self.admit(request, route, min(timeout_s, default_s) if spec.decoupled else timeout_s)
        pending = self.begin(request, sink, quota, load)
        try:
            _stamp(request, self.served, route, timeout_s, self._submission.reply_to)
            frame, payload = self._laid_out(request, pending, None)
            if spec.decoupled:
                pause_s = min(default_s, timeout_s)
                self.table.open_stream(pending, resumes=spec.stream_resume, pause_s=pause_s, timeout_s=timeout_s)
                timeout_s = pause_s
            queue_s = 0.0 if route.policy.delay else request.queue_timeout_s
            self._add(pending, min(queue_s or timeout_s, timeout_s), timeout_s)
            done, limit, by = partial(self.table.submitted, pending), route.policy.max_queue_size, request.moves_by
            self._queue.submit(route.lane, frame, done, payload=payload, limit=limit, tenant=tenant, endpoint=by)
        except QinferError:
            self.table.remove(pending)
            raise
        return pending


class SequenceEntrance(LaneEntrance):
    """Limits of steps are checked when they are appended."""

    submit_near = Entrance.submit_near

    def __init__(self, submission: Submission, served: ServedVersion) -> None:
        super().__init__(submission, served)
        self._steps = submission.steps.of(served.spec.name)
        self._uncounted = LaneLoad(self._lane, 0)

    def submit(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, quota: Counter | None = None
    ) -> PendingCall:
        """See `Entrance.submit`."""
        backlog_s = 0.0 if self.spec.steps else request.timeout_s
        kind = None if request.timeout_s else kind_of(request, self, timeout_s)
        form = None if kind is None else self._layouts.find(kind)
        if form is None:
            self.check_room(request)
        elif len(self.table) >= self._max_in_flight:
            raise QueueFull(FULL)
        pending = self.begin(request, sink, quota, self._uncounted)
        if isinstance(form, RequestForm):
            request.timeout_s = timeout_s
            frame, payload = form.fill(request), None
        else:
            _stamp(request, self.served, self._route, timeout_s, self._submission.reply_to)
            frame, payload = self._layouts.lay_out(request, kind)
        first_s = timeout_s
        if backlog_s and (slot_s := max(backlog_s, TAKEN_S)) < first_s:
            first_s, pending.untaken = slot_s, partial(DeadlineExceeded, BACKLOG_TIMED_OUT)
        self._steps.submit(pending, request, self.served, frame, payload)
        self._add(pending, first_s, timeout_s)
        return pending


class SplitEntrance(Entrance):
    """Splits large requests."""

    def __init__(self, inner: Entrance) -> None:
        super().__init__(inner.served, inner)
        self._inner = inner
        self.lands = inner.lands and self.spec.copies_once  # else workers would copy all parts for each
        self.uncached = self if inner.uncached is inner else SplitEntrance(inner.uncached)

    def submit(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, quota: Counter | None = None
    ) -> PendingCall:
        """See `Entrance.submit`."""
        if not is_large(request, self.spec):
            return self._inner.submit(request, sink, timeout_s, quota)
        self.lane.check_room(request)
        pending = self.lane.begin(request, sink, quota)
        parts = parts_of(request, self.spec.max_batch_size)
        submit_parts(self._inner.submit, self.lane.table, parts, pending, timeout_s)
        return pending


class CacheEntrance(Entrance):
    """Answers repeated requests."""

    def __init__(self, cache: ResponseCache, inner: LaneEntrance) -> None:
        super().__init__(inner.served, inner)
        self._cache, self._inner = cache, inner
        self.lands = inner.lands and not cache.looks_up

    def submit(
        self, request: OutgoingRequest, sink: ResponseSink, timeout_s: float, quota: Counter | None = None
    ) -> PendingCall:
        """See `Entrance.submit`."""
        pending = self._cache.submit(self._inner, request, sink, timeout_s, quota)
        return pending or self._inner.submit(request, sink, timeout_s, quota)


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


def prepare(
    request: OutgoingRequest,
    served: ServedVersion,
    address: EntryAddress,
    timeout_s: float,
    inline_max_bytes: int,
    max_waiting: int = 0,
) -> StampedRequest:
    """Stamps and encodes a checked request with tenant and trace; in a thread if its tensors do not fit the frame.

    The call modifies the request: keep the result for a repetition. `timeout_s` is as for `Entrance.submit`.
    `max_waiting` limits waiting entries, beside the policy's and the lane's limits; 0 = unlimited.
    """
    check_stateless(served)
    if served.spec.splits:
        check_whole(request, served.spec)
    route = served.routes.for_priority(request.priority)
    request.id = address.id
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
