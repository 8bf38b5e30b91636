"""The response cache, an entrance: a repeated request is answered without being executed (ADR 0021).

    request ─▶ key ─▶ in memory? ─▶ answered at once
                 └─▶ an execution of it in progress? ─▶ waits for that one
                       └─▶ in Redis? ─▶ answered       otherwise executed, its response stored and delivered to all

A *flight* is an execution that several requests wait for: its deadline is the latest of theirs, and the last one to
leave cancels it. Failures are never stored. Errors of Redis are misses.

    SHA-256( tenant · model · version · generation · outputs · parameters · SHA-256(inputs by name) ), cut to 128 bits

The key's parts are MessagePack, which is self-delimiting. Ids, priorities, timeouts and tensor encodings are left out.

In memory, the least recently used responses go first. In Redis, which evicts nothing, the cache bounds itself: time is
divided into spans of an eighth of the time to live, each with a ninth of the bytes, because nine spans have live
entries. A key that outlives its span counts them.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import sha256
from operator import attrgetter
from typing import NamedTuple, Protocol

import msgspec

from qinfer.core.clock import ServerClock, SystemClock
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.core.settings_sections import CachePlan
from qinfer.errors import QinferError, QueueFull
from qinfer.models.catalog import ServedVersion
from qinfer.models.spec import LaneRoute
from qinfer.observe import stats
from qinfer.observe.latencies import CACHE_HIT, CACHE_MISS, QUEUE, REQUEST, field_of
from qinfer.observe.stats import ModelCounts
from qinfer.queue import keys
from qinfer.queue.connection import packable
from qinfer.queue.entries import FULL, Lane
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Router
from qinfer.submission.pending import Counter, Inner, PendingCall, PendingRequests, ResponseSink
from qinfer.submission.validate import are_declared
from qinfer.tensors import Bytes, Tensor
from qinfer.wire.frame import decode_responses, encode_responses

logger = logging.getLogger(__name__)

LARGEST_SHARE = 1 / 8
"""An entry takes at most this share of the cache."""

_ENTRY_BYTES, _PART_BYTES = 512, 256
"""Python's overhead of an entry, and of a tensor or parameter in it."""

KEY_BYTES = 16
_FORM = 1  # keys of different forms never match
_encode = msgspec.msgpack.Encoder().encode
_by_name = attrgetter("name")

MAX_BYTES = 2**20
"""Commands behind the largest entry wait."""

_SPANS = 8
_OVERHEAD_BYTES = 128  # of a key in Redis

_MAX_UNWRITTEN_BYTES = 32 * 2**20  # the size of responses on their way to Redis

_Place = tuple[bytes, Lane, float]
"""Key, lane and queue timeout, which the requests of a flight share."""


class _CachedResponse(NamedTuple):
    response: Response
    size: int


class LocalCache:
    """The response cache of one event loop."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._entries: OrderedDict[bytes, _CachedResponse] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> Response | None:
        """Returns a cached response, and marks it as used."""
        kept = self._entries.get(key)
        if kept is None:
            return None
        self._entries.move_to_end(key)
        return kept.response

    def put(self, key: bytes, response: Response) -> None:
        """Caches a response, unless it exceeds its share."""
        size = size_of(response)
        if size > LARGEST_SHARE * self._size_bytes:
            return
        old = self._entries.pop(key, None)
        self.used_bytes += size - (old.size if old is not None else 0)
        self._entries[key] = _CachedResponse(_apart(response), size)
        while self.used_bytes > self._size_bytes:
            _, gone = self._entries.popitem(last=False)
            self.used_bytes -= gone.size


def size_of(response: Response) -> int:
    """Returns the approximate bytes of a response."""
    size = _ENTRY_BYTES
    for tensor in response.outputs:
        size += _PART_BYTES + len(tensor.data)
    for name, value in response.parameters.items():
        size += _PART_BYTES + len(name) + (len(value) if isinstance(value, str) else 0)
    return size


def _apart(response: Response) -> Response:
    outputs = tuple(Tensor(o.name, o.datatype, o.shape, bytes(o.data)) for o in response.outputs)
    return msgspec.structs.replace(response, request_id="", outputs=outputs, timing=None, called=())


def response_key(request: OutgoingRequest, served: ServedVersion) -> bytes | None:
    """Returns a request's key; `None` if its parameters can't be encoded."""
    spec = served.spec
    tenant = None if spec.cached_for_all else request.tenant
    try:
        about = _encode(
            (
                _FORM,
                tenant,
                spec.name,
                served.version,
                served.generation,
                request.outputs,
                sorted(request.parameters.items()),
                request.sequence,
            )
        )
    except (OverflowError, ValueError):  # an integer of more than 64 bits, or half of a surrogate pair
        return None
    return sha256(about + (request.inputs_digest or inputs_digest(request.inputs))).digest()[:KEY_BYTES]


def inputs_digest(inputs: Iterable[Tensor]) -> bytes:
    """Hashes a request's inputs, independent of their order."""
    digest = sha256()
    for tensor in sorted(inputs, key=_by_name):
        digest.update(_encode((tensor.name, tensor.datatype, tensor.shape, len(tensor.data))))
        digest.update(tensor.data)
    return digest.digest()


class CachedResponses:
    """The response cache of `size_bytes` in Redis."""

    def __init__(self, router: Router, clock: ServerClock, size_bytes: int, ttl_s: float) -> None:
        self._router = router
        self._now_s = clock.now_s
        self._share_bytes = size_bytes // (_SPANS + 1)
        self._ttl_ms = max(int(ttl_s * 1000), 1)
        self._span_ms = max(self._ttl_ms // _SPANS, 1)

    def takes(self, size: int) -> bool:
        """Tells whether an entry of this size may be stored."""
        return size <= MAX_BYTES and size + _OVERHEAD_BYTES <= self._share_bytes

    async def find(self, key: bytes) -> bytes | None:
        """Returns an entry, or `None`; raises `BrokerUnavailable` at once without a link."""
        name = keys.cached_response(key.hex())
        self._router.check_up(keys.slot(name))
        found: bytes | None = await self._router.call(keys.slot(name), b"GET", name)
        return found

    async def put(self, key: bytes, entry: Bytes) -> bool:
        """Stores an entry if there is room."""
        size = len(entry) + _OVERHEAD_BYTES
        count = keys.cached_bytes(int(self._now_s() * 1000) // self._span_ms)
        slot, call = keys.slot(count), self._router.call
        # One connection keeps this order.
        _, used = await asyncio.gather(
            call(slot, b"SET", count, 0, b"NX", b"PX", 2 * self._span_ms), call(slot, b"INCRBY", count, size)
        )
        if used > self._share_bytes:
            await call(slot, b"DECRBY", count, size)
            return False
        name = keys.cached_response(key.hex())
        await call(keys.slot(name), b"SET", name, packable(entry), b"PX", self._ttl_ms)
        return True


class Executes(Protocol):
    """The entrance behind the cache."""

    served: ServedVersion

    def submit(self, request: OutgoingRequest, sink: Inner, timeout_s: float) -> PendingCall:
        """Puts a request into the queue."""
        ...

    def admit(self, request: OutgoingRequest, route: LaneRoute, timeout_s: float) -> None:
        """Refuses a request that may not wait."""
        ...

    def check_room(self, request: OutgoingRequest) -> None:
        """Checks a request, and refuses it if too many are in flight."""
        ...

    def begin(self, request: OutgoingRequest, sink: ResponseSink, quota: Counter | None = None) -> PendingCall:
        """Stamps id and version."""
        ...


class Flight(Inner):
    """An execution that equal requests wait for, and the sink of its response; `first` is its first caller."""

    __slots__ = (
        "_cache", "callers", "ends_s", "first", "inner", "is_whole", "looked_ns", "pending", "place", "request",
    )  # fmt: skip

    def __init__(
        self, cache: "ResponseCache", place: _Place, inner: Executes, request: OutgoingRequest, first: PendingCall
    ) -> None:
        self._cache = cache
        self.place = place
        self.inner = inner
        self.request = request
        self.first = first
        self.callers: dict[PendingCall, None] = {first: None}
        self.ends_s = 0.0
        self.pending: PendingCall | None = None
        self.is_whole = True
        self.looked_ns = 0

    def deliver(self, response: Response) -> None:
        """Stores and delivers the response."""
        self._cache.landed(self, response)

    def fail(self, error: Exception) -> None:
        """Fails the callers that wait for this execution."""
        self._cache.crashed(self, error)

    def left(self, caller: PendingCall) -> None:
        """Removes a caller; the last one ends the execution."""
        self.callers.pop(caller, None)
        if not self.callers:
            self._cache.abandon(self)


class _Write(NamedTuple):
    key: bytes
    blob: bytes


class ResponseCache:
    """The response cache of one event loop.

    `at_once` delivers a response in memory during the submission instead of soon afterwards.
    """

    def __init__(
        self,
        plan: CachePlan,
        queue: Queue,
        counts: ModelCounts,
        max_in_flight: int,
        *,
        at_once: bool = True,
        summaries: bool = False,
    ) -> None:
        self._local = LocalCache(plan.size_bytes) if plan.kind == "local" else None
        self._shared: CachedResponses | None = None
        if plan.kind == "redis":
            self._shared = CachedResponses(queue.router, queue.clock, plan.size_bytes, plan.ttl_s)
        self._counts = counts
        self._summaries = summaries
        self._max_in_flight = max_in_flight
        self._call_soon = None if at_once else asyncio.get_running_loop().call_soon
        self._now_s: Callable[[], float] = SystemClock().monotonic_s
        self._table: PendingRequests
        self._flights: dict[_Place, Flight] = {}
        self._unseen: list[Flight] = []
        self._unwritten: list[_Write] = []
        self._unwritten_bytes = 0
        self._work = asyncio.Event()

    @property
    def looks_up(self) -> bool:
        """Whether requests wait for an answer of Redis before they are executed."""
        return self._shared is not None

    def serve(self, table: PendingRequests) -> None:
        """Begins to answer requests of a table."""
        self._table = table

    def submit(
        self,
        inner: Executes,
        request: OutgoingRequest,
        sink: ResponseSink,
        timeout_s: float,
        quota: Counter | None,
    ) -> PendingCall | None:
        """Answers a request or lets it wait; `None` if it can't be cached."""
        started_s, served = self._now_s(), inner.served
        key = response_key(request, served)
        if key is None:
            return None
        pending = inner.begin(request, sink, quota)
        pending.started_s = started_s
        found = None if self._local is None else self._local.find(key)
        if found is not None:
            self._count_hit(pending)
            if self._call_soon is None:
                self._table.answer_caller(pending, _of(pending, found, "hit"))
            else:
                self._call_soon(self._table.answer_caller, pending, _of(pending, found, "hit"))
            return pending
        route = served.routes.default if served.routes.are_plain else served.routes.for_priority(request.priority)
        place = (key, route.lane, 0.0 if served.routes.are_plain else request.timeout_s)
        flight = self._flights.get(place)
        if flight is None or flight.ends_s < started_s + timeout_s:
            self._take_off(place, inner, request, pending, timeout_s)
            return pending
        if len(self._table) >= self._max_in_flight:
            raise QueueFull(FULL)
        flight.callers[pending] = None
        pending.shared = flight
        self._table.add(pending, started_s + timeout_s)
        return pending

    async def run(self) -> None:
        """Works with Redis until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._work.wait()
                self._work.clear()
                unseen, self._unseen = self._unseen, []
                unwritten, self._unwritten = self._unwritten, []
                for flight in unseen:
                    group.create_task(self._look_up(flight), name="cached response")
                for write in unwritten:
                    group.create_task(self._write_shared(write), name="response to be cached")

    def landed(self, flight: Flight, response: Response) -> None:
        """Stores the response of a flight and delivers it."""
        if not response.final:  # its model's responses are not cached; its sinks refuse it
            flight.is_whole = False
            for caller in flight.callers:
                self._table.answer_caller(caller, _of(caller, response, ""))
            return
        callers, stored_ns = self._detach_flight(flight), 0
        is_whole = response.failure is None and flight.is_whole and not response.index
        if is_whole and are_declared(response.outputs, flight.request, flight.inner.served.spec):
            started_s = self._now_s()
            self._store(flight.place[0], response)
            stored_ns = _ns(self._now_s() - started_s)
            self._counts.add(response.model, response.version, stats.CACHE_MISS_NS, stored_ns)
        if self._summaries:
            first = flight.first
            self._counts.add(first.model, first.version, field_of(CACHE_MISS, flight.looked_ns + stored_ns))
        for caller in callers:
            if not self._table.remove(caller):
                continue
            if caller is not flight.first:
                self._count_joined(caller, response)
            how = "miss" if caller is flight.first else "hit"
            self._table.answer_caller(caller, _of(caller, response, how if response.failure is None else ""))

    def crashed(self, flight: Flight, error: Exception) -> None:
        """Fails the callers of a flight."""
        for caller in self._detach_flight(flight):
            if self._table.remove(caller):
                self._table.fail(caller, error)

    def abandon(self, flight: Flight) -> None:
        """Cancels a flight."""
        pending = flight.pending
        self._detach_flight(flight)
        if pending is not None:
            self._table.cancel(pending)

    def _take_off(
        self, place: _Place, inner: Executes, request: OutgoingRequest, pending: PendingCall, timeout_s: float
    ) -> None:
        """Executes a request for all its callers, for up to twice the model's timeout because of later callers."""
        served, spec = inner.served, inner.served.spec
        # It is cached for the requested version.
        flight = Flight(self, place, inner, msgspec.structs.replace(request, moves=False), pending)
        flight.ends_s = pending.started_s + max(timeout_s, min(2 * spec.default_timeout_s, spec.max_timeout_s))
        inner.check_room(flight.request)
        # Admission uses the timeout of the caller, not that of the flight.
        inner.admit(request, served.routes.for_priority(request.priority), timeout_s)
        pending.shared = flight
        self._flights[place] = flight
        self._table.add(pending, pending.started_s + timeout_s)
        if self._shared is not None:
            self._unseen.append(flight)
            self._work.set()
            return
        self._count_miss(flight)
        try:
            self._execute(flight)
        except QinferError:
            self._table.remove(pending)
            self._detach_flight(flight)
            raise

    def _execute(self, flight: Flight) -> None:
        left_s = max(flight.ends_s - self._now_s(), 0.001)
        pending = flight.inner.submit(flight.request, flight, left_s)
        if flight.callers:  # it has not failed already
            flight.pending = pending

    def _detach_flight(self, flight: Flight) -> tuple[PendingCall, ...]:
        if self._flights.get(flight.place) is flight:
            del self._flights[flight.place]
        callers = tuple(flight.callers)
        flight.callers.clear()
        flight.pending = None
        return callers

    def _store(self, key: bytes, response: Response) -> None:
        if self._local is not None:
            self._local.put(key, response)
            return
        assert self._shared is not None, "a cache is local or shared"
        if not self._shared.takes(response.nbytes) or self._unwritten_bytes > _MAX_UNWRITTEN_BYTES:
            return
        blob = encode_responses([msgspec.structs.replace(response, request_id="", timing=None, attempt=1, called=())])
        self._unwritten.append(_Write(key, blob))
        self._unwritten_bytes += len(blob)
        self._work.set()

    async def _write_shared(self, write: _Write) -> None:
        assert self._shared is not None, "only responses for Redis wait"
        try:
            if self._shared.takes(len(write.blob)):
                await self._shared.put(write.key, write.blob)
        except QinferError as error:
            logger.debug("response not cached", extra={"reason": error.message})
        finally:
            self._unwritten_bytes -= len(write.blob)

    async def _look_up(self, flight: Flight) -> None:
        assert self._shared is not None, "only flights of a shared cache are looked up"
        found = None
        try:
            blob = await self._shared.find(flight.place[0])
            if blob is not None:
                (found,) = decode_responses(blob)
        except (QinferError, ValueError) as error:
            logger.debug("response not read from the cache", extra={"reason": str(error)})
        if not flight.callers:
            return
        if found is None:
            self._count_miss(flight)
            try:
                self._execute(flight)
            except QinferError as error:
                self.crashed(flight, error)
            return
        for caller in self._detach_flight(flight):
            if self._table.remove(caller):
                self._count_hit(caller)
                self._table.answer_caller(caller, _of(caller, found, "hit"))

    def _count_hit(self, caller: PendingCall) -> None:
        """Counts a cache hit, which is a success, too, as in Triton."""
        add, model, version, ns = self._counts.add, caller.model, caller.version, _ns(self._now_s() - caller.started_s)
        add(model, version, stats.CACHE_HIT_COUNT)
        add(model, version, stats.CACHE_HIT_NS, ns)
        add(model, version, stats.SUCCESS_COUNT)
        add(model, version, stats.SUCCESS_NS, ns)
        if self._summaries:
            for which, took_ns in ((CACHE_HIT, ns), (REQUEST, ns), (QUEUE, 0)):
                add(model, version, field_of(which, took_ns))

    def _count_miss(self, flight: Flight) -> None:
        first = flight.first
        flight.looked_ns = _ns(self._now_s() - first.started_s)
        self._counts.add(first.model, first.version, stats.CACHE_MISS_COUNT)
        self._counts.add(first.model, first.version, stats.CACHE_MISS_NS, flight.looked_ns)

    def _count_joined(self, caller: PendingCall, response: Response) -> None:
        """Counts a joined call, which the worker does not count."""
        if response.failure is None:
            self._count_hit(caller)
        else:
            self._counts.add(caller.model, caller.version, stats.FAILURES + response.failure.code)


def _of(caller: PendingCall, response: Response, cache: str) -> Response:
    return msgspec.structs.replace(response, request_id=caller.request_id, cache=cache)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
