"""A message → an acceptance: decoded, checked, stamped and encoded in a thread; then accepted on the loop.

The model version is that of the route, or its endpoint chooses. Requests, their ids and the outbox belong to a model.
So that a redelivered message finds its request, a route uses only targets in one model; the stable target replaces
targets in other models.

Each batch of acceptances is one write. If the lane is full or the queue unreachable, messages are retried in order,
fewer at a time; the source stops at its prefetch.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial

import msgspec

from qinfer.bridge.reports import RouteTally
from qinfer.core.messages import IdFactory, OutgoingRequest
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import Conflict, InvalidRequest, ModelNotReady, Overloaded, QinferError, RequestError
from qinfer.models.catalog import ServedVersion
from qinfer.models.spec import ModelSpec
from qinfer.observe.tracing import context_text
from qinfer.queue.entries import MAX_NOTES_BYTES, Acceptance, AcceptOutcome, EntryAddress
from qinfer.submission.submit import prepare
from qinfer.traffic.routing import Endpoints, Header
from qinfer.wire.outputs import OutputPlan
from qinfer_workers.bridge.config import RouteOptions
from qinfer_workers.bridge.decode import BodyCodec
from qinfer_workers.bridge.messages import Note, Receipt, Refused, SourceMessage, body_hash, identity, request_id
from qinfer_workers.bridge.replies import ReplyEncoding


class RouteVersions:
    """Chooses the version for a route's messages; for any thread."""

    def __init__(self, route: RouteOptions, endpoints: Endpoints) -> None:
        self._route = route
        self._endpoints = endpoints
        routed = endpoints.by_name.get(route.model)
        self.model = route.model if routed is None else routed.stable.model

    @property
    def is_endpoint(self) -> bool:
        """Whether the route names an endpoint now."""
        return self._route.model in self._endpoints.by_name

    def resolve(self) -> ServedVersion:
        """Returns the version for which bodies are read: that of the route, the newest, or the stable target's version.

        Raises `ModelNotReady` if it can't be loaded, or the stable target is now in another model; `BrokerUnavailable`
        if the route names a canary's version, and endpoints can't be followed.
        """
        route, endpoints = self._route, self._endpoints
        asked = OutgoingRequest(model=route.model, version=route.version, inputs=())
        if route.version:
            endpoints.choose(asked, route.tenant)
        else:
            asked.model, asked.version = endpoints.stable(route.model, 0)
        if asked.model != self.model:
            raise ModelNotReady(
                f"'{route.model}' is answered by model '{asked.model}' now, and by '{self.model}' when the bridge "
                "started; restart the bridge once all its messages are answered"
            )
        return endpoints.catalog.accepting(asked.model, asked.version)

    def choose(self, request: OutgoingRequest, header: Header, stable: ServedVersion) -> ServedVersion:
        """Returns the version that executes a message, or else `stable`."""
        route, endpoints = self._route, self._endpoints
        if route.version:
            return stable
        request.model, request.version = route.model, 0
        endpoints.choose(request, route.tenant, header)
        model, version = request.model, request.version
        request.model, request.version = self.model, stable.version
        if model != self.model:
            return stable
        with suppress(QinferError):  # it was READY a moment ago
            return endpoints.catalog.accepting(model, version)
        return stable

    def left_out(self) -> Iterator[str]:
        """Describes targets that get no messages."""
        routed = self._endpoints.by_name.get(self._route.model)
        for target in () if routed is None else routed.endpoint.answering:
            if target.model != self.model:
                yield f"target '{target.label}' gets no messages: bridges use the versions of '{self.model}' only"


PARTITION = 0

_MAX_SHORT_BYTES = 255  # the limit of AMQP
_NO_ARROW_LIST = (
    "the model is decoupled, and a reply in Arrow can't be a list of its responses; set the route's 'responses' to "
    "each, or 'reply' of its 'body' to jsonl or kserve"
)


class Work(msgspec.Struct, frozen=True):
    """A message that was read; `is_identified` tells whether its other deliveries are recognised."""

    message: SourceMessage
    acceptance: Acceptance
    is_identified: bool


class Reader:
    """Reads a route's messages, in one thread; `watcher` hears of ended requests."""

    def __init__(
        self, route: RouteOptions, result_ttl_s: float, watcher: str, inline_max_bytes: int, versions: RouteVersions
    ) -> None:
        self._route = route
        self._result_ttl_s = result_ttl_s
        self._watcher = watcher
        self._inline_max_bytes = inline_max_bytes
        self._versions = versions
        self._ids = IdFactory()
        self._served: ServedVersion | None = None
        self._codec: BodyCodec | None = None

    def set_model(self, served: ServedVersion) -> None:
        """Sets the model version to read for."""
        if served is not self._served:
            self._codec = body_codec(self._route, served)
            self._served = served

    def read(self, message: SourceMessage) -> Work:
        """Makes a request of a message, after `set_model`."""
        served, codec, route = self._served, self._codec, self._route
        assert served is not None
        assert codec is not None
        if message.broken:
            raise InvalidRequest(message.broken)
        decoded = codec.decode(message.body, message.content_type, message.headers, message.content_encoding)
        if _is_list(route, served.spec) and decoded.reply.form.startswith("arrow"):
            raise InvalidRequest(_NO_ARROW_LIST)
        message_id = identity(message, route.source.id_header)
        request, reply = decoded.request, decoded.reply
        if self._versions.is_endpoint:
            served = self._versions.choose(request, partial(_header_in_any_case, message), served)
            reply = self._named(reply)
        notes = self._notes(message, message_id, reply)
        model = served.spec.name
        name = request_id(route.name, message_id, model) if message_id else self._ids.request_id(model, PARTITION)
        address = EntryAddress(model, PARTITION, name)
        request.generation = served.generation
        request.priority = request.priority or route.priority
        request.tenant = route.tenant
        request.trace = context_text(_header(message, "traceparent"), _header(message, "tracestate"))
        max_waiting = route.max_waiting or max(served.spec.lane_capacity // 2, 1)
        stamped = prepare(request, served, address, route.timeout_s, self._inline_max_bytes, max_waiting)
        acceptance = Acceptance(
            **stamped._asdict(),
            address=address,
            timeout_s=route.timeout_s,
            body_hash=body_hash(message),
            result_ttl_s=self._result_ttl_s,
            tombstone_ttl_s=self._result_ttl_s,
            tenant=route.tenant,
            client_id=reply.client_id,
            outbox=route.outbox,
            notes=notes,
            watcher=self._watcher,
            decoupled=served.spec.decoupled,
        )
        return Work(message, acceptance, bool(message_id))

    def _named(self, reply: ReplyEncoding) -> ReplyEncoding:
        plan = msgspec.structs.replace(reply.plan or OutputPlan(), endpoint=self._route.model)
        return msgspec.structs.replace(reply, plan=plan)

    def _notes(self, message: SourceMessage, message_id: bytes, reply: ReplyEncoding) -> bytes:
        """Refuses too much data, or a message without a destination."""
        sink = self._route.sink
        reply_to = message.reply_to if sink.reply_to else b""
        if not reply_to and not sink.is_fixed:
            raise InvalidRequest(
                "the message has no reply_to, and the route has no other place for its prediction; set reply_to, or "
                "give the route's sink a routing_key"
            )
        for name, value in (("reply_to", reply_to), ("correlation_id", message.correlation_id)):
            if len(value) > _MAX_SHORT_BYTES:
                raise InvalidRequest(f"the {name} of the message takes {len(value)} bytes; use at most 255")
        carried = {name: text for name in sink.carry_headers if (text := _header(message, name))}
        notes = msgspec.msgpack.encode(
            Note(reply, message_id[:_MAX_SHORT_BYTES], reply_to, message.correlation_id, carried)
        )
        if len(notes) > MAX_NOTES_BYTES:
            raise InvalidRequest(
                f"ids and headers that the reply needs take {len(notes)} bytes, more than {MAX_NOTES_BYTES}; "
                "make them shorter"
            )
        return notes


def _header_in_any_case(message: SourceMessage, name: str) -> str | None:
    named = (key for key in message.headers if isinstance(key, str) and key.lower() == name)
    return next((_header(message, key) for key in named), None)


def body_codec(route: RouteOptions, served: ServedVersion) -> BodyCodec:
    """Returns the codec for the bodies of a route's messages."""
    if _is_list(route, served.spec) and route.body.reply == "arrow":
        raise InvalidRequest(_NO_ARROW_LIST)
    return BodyCodec(route.body, served.spec, served.version)


def _is_list(route: RouteOptions, spec: ModelSpec) -> bool:
    return spec.decoupled and route.responses == "one"


def _header(message: SourceMessage, name: str) -> str:
    value = message.headers.get(name)
    if value is None:
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


logger = logging.getLogger(__name__)

MOST_AT_ONCE = 256
FEWEST_AT_ONCE = 16
ROOM_S = 1.0

_QUIET_S = 10.0  # each answer frees a little room
_SHORTEST_S = 0.02
_AWAY_S = 0.1
_ID_USED = "the id of the message was used before with another body; give each its own id"


class Disposition(Enum):
    """The outcome for a message: accepted now or before, refused, or to be tried again."""

    NEW = "new"
    KNOWN = "known"
    REFUSE = "refuse"
    FULL = "full"
    AWAY = "away"


def disposition_of(work: Work, result: AcceptOutcome | QinferError) -> tuple[Disposition, QinferError | None]:
    """Returns a message's disposition, and the error behind it."""
    if isinstance(result, AcceptOutcome):
        if result.body_hash == work.acceptance.body_hash:
            return (Disposition.NEW if result.is_new else Disposition.KNOWN), None
        return Disposition.REFUSE, Conflict(_ID_USED)
    if isinstance(result, Overloaded):
        return Disposition.FULL, result
    if isinstance(result, RequestError):
        return Disposition.REFUSE, result
    return Disposition.AWAY, result


class MessageIntake:
    """The acceptance of a route's messages.

    `again` publishes a repeated message's reply again. Messages of earlier connections (`epoch`) are delivered again.
    """

    def __init__(  # noqa: PLR0913 - keywords: what a message passes through
        self,
        *,
        name: str,
        accept: Callable[[Sequence[Acceptance]], Awaitable[Sequence[AcceptOutcome | QinferError]]],
        done: Callable[[Sequence[Receipt]], None],
        refuse: Callable[[Sequence[Refused]], None],
        again: Callable[[], None],
        epoch: Callable[[], int],
        tally: RouteTally,
    ) -> None:
        self._accept = accept
        self._done = done
        self._refuse = refuse
        self._again = again
        self._epoch = epoch
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Work] = deque()
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._is_scheduled = False
        self._stopping = False
        self._size = MOST_AT_ONCE
        self._backoff = Backoff(_AWAY_S, ROOM_S)
        self._full = OutageLog(
            logger,
            "the model's lane is full, messages wait in the source",
            remind_s=REMIND_S,
            quiet_s=_QUIET_S,
            route=name,
        )
        self._away = OutageLog(logger, "Redis is away, messages wait in the source", remind_s=REMIND_S, route=name)

    def add(self, works: Sequence[Work]) -> None:
        """Takes messages; for any thread."""
        self._waiting.extend(works)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._wake_intake)

    def notify_room(self) -> None:
        """Notes that the lane may have room."""
        self._room.set()

    def stop(self) -> None:
        """Ends `run` after the current batch."""
        self._stopping = True
        self._some.set()
        self._room.set()

    async def run(self) -> None:
        """Accepts until `stop`."""
        while not self._stopping:
            if not self._waiting:
                self._some.clear()
                if not self._waiting:
                    await self._some.wait()
                continue
            disposition = await self._accept_batch()
            if disposition is not None and not self._stopping:
                await self._pause(disposition)

    def _wake_intake(self) -> None:
        self._is_scheduled = False
        self._some.set()

    async def _accept_batch(self) -> Disposition | None:
        self._room.clear()
        epoch, batch = self._epoch(), list[Work]()
        while self._waiting and len(batch) < self._size:
            work = self._waiting.popleft()
            if work.message.receipt.epoch == epoch:
                batch.append(work)
        results = await self._accept([work.acceptance for work in batch])
        done: list[Receipt] = []
        refused: list[Refused] = []
        left: list[Work] = []
        repeated = 0
        waits_for: Disposition | None = None
        for work, result in zip(batch, results, strict=True):
            disposition, error = disposition_of(work, result)
            if disposition in (Disposition.FULL, Disposition.AWAY):
                left.append(work)
                waits_for = disposition
                (self._full if disposition is Disposition.FULL else self._away).failed(error.message if error else "")
            elif error is None:
                done.append(work.message.receipt)
                self._tally.accepted += disposition is Disposition.NEW
                repeated += disposition is Disposition.KNOWN
            else:
                refused.append((work.message, error))
        if done:
            self._done(done)
        if repeated:
            self._tally.repeated += repeated
            self._again()
        if refused:
            self._refuse(refused)
        self._waiting.extendleft(reversed(left))
        if waits_for is None:
            self._size = min(self._size * 2, MOST_AT_ONCE)
            self._backoff.reset()
            self._full.over()
            self._away.over()
        return waits_for

    async def _pause(self, disposition: Disposition) -> None:
        began_s = time.monotonic()
        self._size = FEWEST_AT_ONCE
        if disposition is Disposition.FULL:
            await asyncio.sleep(_SHORTEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_S):
                    await self._room.wait()
        else:
            await asyncio.sleep(self._backoff.next_s())
        self._tally.paused_s += time.monotonic() - began_s
