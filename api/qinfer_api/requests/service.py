"""Asynchronous requests: submission, status, waiting, results and cancellation.

Gateways keep no request, so a client may ask any of them.

Long polls and event streams wait: a *hint* on the reply stream wakes the waiters of a request. A hint may be lost, and
the start of execution sends none, so waiters also read the record every `REREAD_S` seconds. The waiters of one request
share their reads, and go on in turns of the event loop, because hundreds may wait for one end.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from qinfer.core.messages import Failure, IdFactory, OutgoingRequest, Response
from qinfer.core.settings import RequestSettings
from qinfer.errors import LEFT, Cancelled, CorruptEntry, Overloaded, QinferError
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.config.to_spec import DEFAULT_TIMEOUT, MAX_TIMEOUT
from qinfer.observe.stats import GatewayTally
from qinfer.observe.tracing import REQUEST_ID
from qinfer.queue import keys
from qinfer.queue.entries import Acceptance, AcceptOutcome, EntryAddress, Lane, RequestRecord, RequestState, Settlement
from qinfer.queue.lanes import Queue
from qinfer.queue.requests import Requests
from qinfer.queue.values import Room
from qinfer.submission.memory import tensor_bytes
from qinfer.submission.submit import check_stateless
from qinfer.traffic.store import Kept, KeptTargets, names_of
from qinfer.wire.frame import decode_responses
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import ANONYMOUS, CallerContext
from qinfer_api.dispatcher import Dispatcher, Ending, bound, checked_timeout_s
from qinfer_api.receiving import AnswerMemory, ReceivingBudget
from qinfer_api.requests.records import chosen_address, conflict, expired, failed_outcome, lost, own_record, shown_id
from qinfer_api.requests.webhooks import Targets
from qinfer_api.status import of_request, told
from qinfer_api.turns import SharedLimit, Turns

REREAD_S = 1.0

SHARED_S = 0.25
"""The age up to which a read, unless a hint has come since, serves other waiters of its request."""

MAX_WAITS = 4096
"""Each request that is waited for costs a read a second."""


class _Watched:
    """A request with waiters."""

    def __init__(self) -> None:
        self.events: set[asyncio.Event] = set()
        self.reading: asyncio.Future[RequestRecord | None] | None = None
        self.is_hinted = False  # a hint will come to this gateway
        self.read_s = 0.0

    def wake(self) -> None:
        """Lets all waiters go on."""
        for event in self.events:
            event.set()

    def end_read(self, done: "asyncio.Future[RequestRecord | None]") -> None:
        """Lets the next waiter read anew after an error."""
        if (done.cancelled() or done.exception() is not None) and self.reading is done:
            self.reading, self.is_hinted = None, False


class Waits:
    """The waiters of a gateway; while `ending`, no new waiter begins."""

    def __init__(self, requests: Requests, reply_to: str) -> None:
        self._requests = requests
        self._reply_to = reply_to
        self._watched: dict[str, dict[EntryAddress, _Watched]] = {}  # models may have requests of the same id
        self._places = SharedLimit()
        self._turns = Turns()
        self.ending = False

    def is_full(self, tenant: str) -> bool:
        """Returns whether a tenant has too many waiters, or the gateway shuts down."""
        return self.ending or not self._places.has_room(MAX_WAITS, tenant)

    def wake(self, request_id: str) -> None:
        """Wakes the waiters of a request."""
        for watched in self._watched.get(request_id, {}).values():
            watched.reading = None
            watched.wake()

    def end_waits(self) -> None:
        """Ends all waits, as the gateway shuts down."""
        self.ending = True
        for requests in self._watched.values():
            for watched in requests.values():
                watched.wake()

    async def wait_for_end(
        self, address: EntryAddress, wait_s: float, check: Callable[[], None], tenant: str
    ) -> RequestRecord | None:
        """Waits until the request ends, at most `wait_s`; returns its record, if any."""
        ends_s = time.monotonic() + wait_s
        with self._waiting(address, tenant) as event:
            record = await self._read(address)
            while record is not None and not record.state.is_terminal and not self.ending:
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    break
                await _news(event, left_s)
                record = await self._read(address)
                check()
        return record

    async def changes(
        self, address: EntryAddress, heartbeat_s: float, check: Callable[[], None], tenant: str
    ) -> AsyncIterator[RequestRecord | None]:
        """Yields a request's record at each change and new response, and `None` after `heartbeat_s` without either.

        It ends after the terminal state, when the request is gone, and at a shutdown.
        """
        with self._waiting(address, tenant) as event:
            last: tuple[str, int, int] | None = None
            said_s = time.monotonic()
            record = await self._read(address)
            while record is not None:
                now = (record.state, record.attempts, record.responses)
                if last != now:
                    last, said_s = now, time.monotonic()
                    yield record
                elif time.monotonic() - said_s >= heartbeat_s:
                    said_s = time.monotonic()
                    yield None
                if record.state.is_terminal or self.ending:
                    return
                await _news(event, max(said_s + heartbeat_s - time.monotonic(), 0.0))
                record = await self._read(address)
                check()

    async def _read(self, address: EntryAddress) -> RequestRecord | None:
        """Reads a watched request's record, or waits for another waiter's read; returns in a turn."""
        watched, now_s = self._watched[address.id][address], time.monotonic()
        if watched.reading is None or now_s > watched.read_s + SHARED_S:
            watcher, watched.is_hinted = "" if watched.is_hinted else self._reply_to, True
            watched.reading, watched.read_s = asyncio.ensure_future(self._requests.record(address, watcher)), now_s
            watched.reading.add_done_callback(watched.end_read)
        record = await asyncio.shield(watched.reading)
        await self._turns.start()
        return record

    @contextlib.contextmanager
    def _waiting(self, address: EntryAddress, tenant: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        requests = self._watched.setdefault(address.id, {})
        watched = requests.setdefault(address, _Watched())
        watched.events.add(event)
        try:
            with self._places.place(tenant):
                yield event
        finally:
            watched.events.discard(event)
            if not watched.events:
                del requests[address]
            if not requests:
                del self._watched[address.id]


async def _news(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(REREAD_S, seconds)):
            await event.wait()
    event.clear()


logger = logging.getLogger(__name__)

_GRACE_S = 5.0
# Seconds for which the choice of a target outlives the request's record.
_KEPT_LONGER_S = 600.0


WatchEnd = Callable[[OutgoingRequest, Ending, str, float], None]
"""Watches the end of a request to an endpoint; gets its tenant for a `SharedLimit`, and its caller's timeout."""


class SubmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a request besides its body.

    `timeout_s` `None` is the default. `request_id` is the client's id; empty = the server makes one. A part of the
    server that submits the request gets its end by `outbox`, which excludes a webhook.
    """

    body_hash: str
    timeout_s: float | None = None
    request_id: str = ""
    idempotency_key: str = ""
    webhook: str = ""
    outbox: str = ""
    notes: bytes = b""
    result_ttl_s: float = 0.0


class RequestTicket(msgspec.Struct, frozen=True):
    """A request's record, and whether `submit` created it."""

    record: RequestRecord
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRequests:
    """Handles asynchronous requests; `kept` remembers the targets of repeatable requests to endpoints."""

    delivery: Queue
    catalog: Catalog
    dispatcher: Dispatcher
    tally: GatewayTally
    settings: RequestSettings
    inline_max_bytes: int
    targets: Targets
    waits: Waits
    kept: KeptTargets
    watch_end: WatchEnd
    receiving: ReceivingBudget
    ids: IdFactory = field(default_factory=IdFactory)

    def now_s(self) -> float:
        """Returns the time of Redis' clock, which records use."""
        return self.delivery.clock.now_s()

    def resolve(self, model: str, version: int) -> ServedVersion:
        """Returns the version, perhaps unloaded, that accepts a request."""
        return self.of_model(*self.dispatcher.endpoints.stable(model, version))

    def of_model(self, model: str, version: int) -> ServedVersion:
        """Resolves like `resolve`, without endpoints."""
        if self.dispatcher.draining:
            raise Overloaded("Server exiting")
        served = self.catalog.accepting(model, version)
        check_stateless(served)
        return served

    def refuse(self, model: str, version: int, error: QinferError, context: CallerContext = ANONYMOUS) -> QinferError:
        """Counts a refused request and returns its error."""
        try:
            served = self.catalog.accepting(*self.dispatcher.endpoints.stable(model, version))
        except QinferError:
            self.tally.failed(*self.dispatcher.named(model, version), error.code)
        else:
            self.tally.failed(served.spec.name, served.version, error.code)
            if isinstance(error, Overloaded):
                self.tally.count_ended(served.spec.name, served.version, error.code)
        self.dispatcher.note_refusal(model, version, error, context)
        return error

    async def submit(
        self, context: CallerContext, request: OutgoingRequest, plan: OutputPlan, options: SubmitOptions
    ) -> RequestTicket:
        """Accepts or finds a request; stamps `request` in place."""
        self.check_up(request.model, request.partition)
        if request.endpoint and (names := names_of(options.request_id, options.idempotency_key)):
            plan = await self._keep_target(context, request, plan, options, names)
        served = self.of_model(request.model, request.version)
        if not request.generation or request.generation != served.generation:
            self.dispatcher.check(request, served)
        acceptance = self._acceptance(context, request, served, plan, options)
        self.dispatcher.charge(context)
        if options.webhook:
            await self.targets.check(options.webhook)
        try:
            accepted = await self._accept(context, request, served, acceptance)
        except Overloaded as error:
            error.args = (of_request(request.client_id or acceptance.address.id) + error.message,)
            raise
        return await self._ticket(acceptance, accepted, options)

    async def repeated(self, context: CallerContext, model: str, options: SubmitOptions) -> RequestTicket | None:
        """Finds an earlier request with this id or idempotency key."""
        model = await self.model_of(model, context.tenant, options.request_id, options.idempotency_key)
        address = self._address(context, Lane(model, 0), options.request_id)
        self.check_up(address.model, address.partition)
        found = await self.delivery.requests.find(
            address, options.body_hash, tenant=context.tenant, idempotency_key=options.idempotency_key
        )
        if found is None:
            return None
        _check_repetition(address, found, options)
        record = await self.delivery.requests.record(msgspec.structs.replace(address, id=found.id))
        return None if record is None else RequestTicket(record, is_new=False)

    async def model_of(self, name: str, tenant: str, request_id: str, idempotency_key: str = "") -> str:
        """Returns the model to which an endpoint sent an earlier request."""
        if name not in self.dispatcher.endpoints.by_name:
            return name
        kept = await self.kept.find(name, tenant, names_of(request_id, idempotency_key))
        return name if kept is None else kept.model

    async def _keep_target(
        self,
        context: CallerContext,
        request: OutgoingRequest,
        plan: OutputPlan,
        options: SubmitOptions,
        names: Sequence[str],
    ) -> OutputPlan:
        """A repeated request goes to the same target."""
        served = self.of_model(request.model, request.version)
        settings, chosen = self.settings, Kept(request.model, served.version)
        record_s = self._timeout_s(served, options.timeout_s) + settings.result_ttl_s + settings.tombstone_ttl_s
        keep = functools.partial(
            self.kept.keep, request.endpoint, context.tenant, names, chosen, record_s + _KEPT_LONGER_S
        )
        kept = await keep()
        if kept != chosen and not self.dispatcher.endpoints.has(request.endpoint, *kept):
            # A removed target takes no new requests. Another gateway may accept this one elsewhere meanwhile.
            found = await self.repeated(context, request.endpoint, options)
            kept = await (keep() if found else keep(kept))
        if kept == chosen:
            return plan
        request.model, request.version, request.generation = kept.model, kept.version, 0
        request.moves = True  # the earlier choice may be rolled back
        return bound(plan, self.of_model(*kept)) if plan.special is not None else plan

    async def record(self, context: CallerContext, address: EntryAddress) -> RequestRecord:
        """Returns a request's record, or raises `RequestNotFound`."""
        self.check_up(address.model, address.partition)
        return own_record(context, address, await self.delivery.requests.record(address))

    async def wait(self, context: CallerContext, address: EntryAddress, wait_s: float) -> RequestRecord:
        """Waits until the request ends, at most `wait_s`, or not at all if too many wait."""
        record = await self.record(context, address)
        tenant = self.dispatcher.sharing(context)
        if record.state.is_terminal or wait_s <= 0 or self.waits.is_full(tenant):
            return record
        wait_s = min(wait_s, self.settings.max_wait_s)
        check = functools.partial(self.dispatcher.recheck, context)
        return own_record(context, address, await self.waits.wait_for_end(address, wait_s, check, tenant))

    def decode_plan(self, record: RequestRecord) -> OutputPlan:
        """Decodes the plan of the outputs: how they travel."""
        return msgspec.msgpack.decode(record.plan, type=OutputPlan) if record.plan else OutputPlan()

    async def result(self, record: RequestRecord, room: Room | None = None) -> tuple[Response, OutputPlan]:
        """Returns an ended request's response."""
        plan = self.decode_plan(record)
        if record.state is not RequestState.SUCCEEDED:
            if record.expires_at <= self.now_s():
                raise expired(record)
            failure = told(Failure(record.code, record.message), record.client_id or record.address.id)
            return Response(request_id=record.address.id, failure=failure), plan
        try:
            blob = await self.delivery.requests.result(record.address, record.tenant, room)
        except CorruptEntry as error:
            logger.error("stored result lost", extra={"request_id": record.address.id, "reason": error.message})
            raise lost(record) from error
        if blob is None:
            raise expired(record)
        (response,) = decode_responses(blob)
        return response, plan

    async def stored(self, record: RequestRecord, index: int = 0) -> AsyncIterator[Response]:
        """Yields a decoupled model's stored responses but the final one."""
        while index < record.responses:
            blobs = await self.delivery.requests.responses.read(record.address, index)
            if not blobs:
                raise expired(record)
            for blob in blobs:
                (response,) = decode_responses(blob)
                yield response
            index += len(blobs)

    async def cancel(self, context: CallerContext, address: EntryAddress) -> RequestRecord:
        """Cancels a request, or removes an ended one's result."""
        record = await self.record(context, address)
        if record.state.is_terminal:
            await self.delivery.requests.remove_result(address)
            return await self.record(context, address)
        outcome = failed_outcome(address, RequestState.CANCELLED, Cancelled(LEFT), record.version)
        (is_first,) = await self.delivery.requests.settle([Settlement(address=address, outcome=outcome)])
        if is_first:
            self.count_cancelled(record)
        else:
            await self.delivery.requests.remove_result(address)
        return await self.record(context, address)

    def count_cancelled(self, record: RequestRecord) -> None:
        """Counts a request that was cancelled."""
        self.tally.failed(record.address.model, record.version, Cancelled.code)
        self.tally.count_ended(record.address.model, record.version, Cancelled.code)

    def check_up(self, model: str, partition: int = 0) -> None:
        """Refuses at once while the queue is unreachable."""
        self.delivery.router.check_up(keys.slot(keys.confirm(model, partition)))

    def _timeout_s(self, served: ServedVersion, asked_s: float | None) -> float:
        """Returns the timeout; the model's configuration precedes the settings."""
        own = served.spec.parameters
        longest_s = float(own.get(MAX_TIMEOUT, self.settings.max_timeout_s))
        if asked_s is None:
            return min(float(own.get(DEFAULT_TIMEOUT, self.settings.default_timeout_s)), longest_s)
        return checked_timeout_s(asked_s, longest_s)

    def _address(self, context: CallerContext, lane: Lane, chosen: str) -> EntryAddress:
        if chosen:
            return chosen_address(lane.model, chosen, context.tenant)
        return EntryAddress(lane.model, lane.partition, self.ids.request_id(lane.model, lane.partition))

    async def _ticket(self, acceptance: Acceptance, accepted: AcceptOutcome, options: SubmitOptions) -> RequestTicket:
        _check_repetition(acceptance.address, accepted, options)
        found = msgspec.structs.replace(acceptance.address, id=accepted.id)
        record = None if accepted.is_new else await self.delivery.requests.record(found)
        return RequestTicket(record or self._first_record(found, acceptance), accepted.is_new)

    async def _accept(
        self, context: CallerContext, request: OutgoingRequest, served: ServedVersion, acceptance: Acceptance
    ) -> AcceptOutcome:
        """If the request is not admitted, finds an earlier acceptance."""
        request.tenant = context.tenant
        try:
            stamp = self.dispatcher.store(request, served, acceptance.address, acceptance.timeout_s)
        except Overloaded as refusal:
            if not acceptance.idempotency_key and shown_id(acceptance.address) == acceptance.address.id:
                raise
            found = await self.delivery.requests.find(
                acceptance.address,
                acceptance.body_hash,
                tenant=context.tenant,
                idempotency_key=acceptance.idempotency_key,
                notes=acceptance.notes if acceptance.outbox else None,
            )
            if found is None:
                raise refusal from None
            return found
        request.trace = self.dispatcher.traces.trace_of(context, served, {REQUEST_ID: acceptance.address.id})
        is_large = tensor_bytes(request) > self.inline_max_bytes
        with self.dispatcher.traces.trace_stored(request) as trace:
            stamped = await asyncio.to_thread(stamp) if is_large else stamp()
            accepted = await self.delivery.requests.accept(msgspec.structs.replace(acceptance, **stamped._asdict()))
            if not accepted.is_new:
                return accepted
            sharing = self.dispatcher.sharing(context)
            ending = functools.partial(self._ending, acceptance.address, acceptance.timeout_s, sharing)
            trace(ending)
        if request.endpoint and not self.waits.is_full(sharing):
            given_s = acceptance.timeout_s
            own_s = self._timeout_s(served, None)
            self.watch_end(request, ending, sharing, given_s if given_s < own_s else math.inf)
        return accepted

    @contextlib.asynccontextmanager
    async def _ending(
        self, address: EntryAddress, timeout_s: float, tenant: str
    ) -> AsyncIterator[tuple[RequestRecord | None, Response | None]]:
        record = await self.waits.wait_for_end(address, timeout_s + _GRACE_S, lambda: None, tenant)
        memory = AnswerMemory(self.receiving, tenant or address)
        try:
            read = self.delivery.requests.result
            blob = None if record is None else await read(address, record.tenant, memory.reserve_memory)
            yield record, decode_responses(blob)[-1] if blob else None
        finally:
            memory.release()

    def _acceptance(
        self,
        context: CallerContext,
        request: OutgoingRequest,
        served: ServedVersion,
        plan: OutputPlan,
        options: SubmitOptions,
    ) -> Acceptance:
        settings = self.settings
        kept_s = settings.result_ttl_s + settings.tombstone_ttl_s
        return Acceptance(
            address=self._address(context, served.lane, options.request_id),
            lane=served.lane,
            frame=b"",
            timeout_s=self._timeout_s(served, options.timeout_s),
            body_hash=options.body_hash,
            result_ttl_s=options.result_ttl_s or settings.result_ttl_s,
            tombstone_ttl_s=settings.tombstone_ttl_s,
            tenant=context.tenant,
            client_id=request.client_id,
            plan=msgspec.msgpack.encode(plan),
            decoupled=served.spec.decoupled,
            idempotency_key=options.idempotency_key,
            idempotency_ttl_s=min(settings.idempotency_ttl_s, kept_s),
            webhook=options.webhook,
            outbox=options.outbox,
            notes=options.notes,
            share=self.dispatcher.sharing(context),
        )

    def _first_record(self, address: EntryAddress, acceptance: Acceptance) -> RequestRecord:
        now_s = self.now_s()
        return RequestRecord(
            address=address,
            state=RequestState.QUEUED,
            version=acceptance.lane.version,
            tenant=acceptance.tenant,
            client_id=acceptance.client_id,
            created_at=now_s,
            deadline_at=now_s + acceptance.timeout_s,
            decoupled=acceptance.decoupled,
            webhook=acceptance.webhook,
        )


def _check_repetition(address: EntryAddress, accepted: AcceptOutcome, options: SubmitOptions) -> None:
    if accepted.body_hash != options.body_hash:
        raise conflict(options.request_id if accepted.id == address.id else "")
