"""Asynchronous requests: accepted into the queue, looked at, waited for, cancelled; and how clients see them.

The use case behind `/v1` and `Prefer` on `/v2`. What a caller may ask and how much is the dispatcher's rule, as for
synchronous requests; the lane, the record and the result are `Requests`'. Nothing of a request is kept here: any
gateway can be asked for it.

A server-made id is shown as it is. An id that the client chose is `<id>@<tenant>` inside, so that tenants can't meet;
outside it is what the client chose, and lives below its model: `/v1/models/{model}/requests/{id}`.
"""

import asyncio
import contextlib
import functools
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec
from msgspec import UNSET, UnsetType

from qinfer.core.messages import Failure, IdFactory, InferRequest, Response, parse_request_id
from qinfer.core.settings import RequestSettings
from qinfer.errors import (
    Cancelled,
    Conflict,
    CorruptEntry,
    InvalidRequest,
    Overloaded,
    QinferError,
    RequestNotFound,
    ResultExpired,
)
from qinfer.models.catalog import Catalog, Served
from qinfer.models.config.to_spec import DEFAULT_TIMEOUT, MAX_TIMEOUT
from qinfer.models.repository.reader import is_model_name
from qinfer.observe.stats import GatewayTally
from qinfer.observe.tracing import REQUEST_ID
from qinfer.queue.entries import Acceptance, Accepted, Address, Lane, Outcome, RequestRecord, RequestState, Settlement
from qinfer.queue.lanes import Queue
from qinfer.submission.submit import check_stateless, prepare, tensor_bytes
from qinfer.wire.frame import decode_responses, encode_responses
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import ANONYMOUS, Context
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.requests.targets import Targets
from qinfer_api.requests.waits import Waits
from qinfer_api.status import of_request

_CHOSEN = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._~-]{1,128}")  # clients drop . and .. from paths
_MAX_ID_CHARACTERS = 512
_CHOSEN_PARTITION = 0
_GRACE_S = 5.0  # for a janitor to end what has expired


class RequestProblem(msgspec.Struct, frozen=True):
    """Why a request has no outputs.

    Attributes:
        code: A name for the kind of failure, such as `deadline_exceeded`.
    """

    code: str
    message: str


class WebhookBody(msgspec.Struct, frozen=True):
    """The webhook that is informed of the end.

    Attributes:
        state: waiting (for the end) | pending | delivered | failed
    """

    url: str
    state: str


class RequestLinks(msgspec.Struct, frozen=True, rename={"own": "self"}):
    """Paths of the request."""

    own: str
    result: str
    events: str


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """An asynchronous request; instants are RFC 3339 in UTC, null before they occur.

    Attributes:
        state: queued | running | succeeded | failed | expired | cancelled; the last four are final
        deadline_at: When it expires, unless it has ended.
        expires_at: When its result will be gone.
        age_s: Seconds since it was accepted; once it has ended, seconds that it took.
        attempts: How often a worker has taken it.
        responses: How many responses are stored before the final one; left out for models that give one.

    Example:
        {"id": "01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.digits", "model": "digits", "version": 1, "state": "queued",
         "created_at": "2026-01-31T12:00:00.000Z", "deadline_at": "2026-01-31T13:00:00.000Z", "finished_at": null,
         "expires_at": null, "age_s": 0.25, "attempts": 0, "error": null, "webhook": null,
         "links": {"self": "/v1/requests/01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.digits",
                   "result": "/v1/requests/01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.digits/result",
                   "events": "/v1/requests/01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.digits/events"}}
    """

    id: str
    model: str
    version: int
    state: RequestState
    created_at: str
    deadline_at: str
    finished_at: str | None
    expires_at: str | None
    age_s: float
    attempts: int
    error: RequestProblem | None
    webhook: WebhookBody | None
    links: RequestLinks
    responses: int | UnsetType = UNSET


def chosen_address(model: str, request_id: str, tenant: str) -> Address:
    """Returns the address of a request whose id its client chose.

    Raises:
        InvalidRequest: The id has other characters, is too long, or looks like one that a server made.
    """
    if not _CHOSEN.fullmatch(request_id):
        raise InvalidRequest(
            f"'{request_id[:100]}' can't be a request id; use 1 to 128 letters, digits, '.', '_', '~' and '-', and not "
            "'.' or '..' alone"
        )
    if _made_by_server(request_id + "@") is not None:
        raise InvalidRequest(f"'{request_id}' has the form of the ids that the server makes; choose another")
    return Address(model, _CHOSEN_PARTITION, f"{request_id}@{tenant}")


def address_of(request_id: str, tenant: str, model: str | None = None) -> Address:
    """Finds where a request is that a path names; that there is one is not known yet.

    Args:
        request_id: The id in the path.
        tenant: Who asks.
        model: The model in the path; `None` without one, where only ids made by a server are known.

    Raises:
        RequestNotFound: No request can have that id here.
    """
    made = _made_by_server(request_id)
    name = model if made is None else made.model
    if name is not None and not is_model_name(name):
        raise unknown(request_id)  # braces in it would put a request's keys into several slots of a cluster
    if made is not None and model in (None, made.model):
        return made
    if model is None or made is not None:
        raise unknown(request_id)
    try:
        return chosen_address(model, request_id, tenant)
    except InvalidRequest:
        raise unknown(request_id) from None


def unknown(request_id: str) -> RequestNotFound:
    """Returns the error for an unknown id, or that of another tenant's request."""
    return RequestNotFound(
        f"request '{request_id[:100]}' is not known: it was not accepted, or it ended too long ago; "
        "a request with an id of your own is below its model: /v1/models/<model>/requests/<id>"
    )


def own_record(tenant: str, address: Address, record: RequestRecord | None) -> RequestRecord:
    """Returns a record if it is the tenant's.

    Raises:
        RequestNotFound: There is none, or it is another's.
    """
    if record is None or record.tenant != tenant:
        raise unknown(shown_id(address))
    return record


def conflict(request_id: str) -> Conflict:
    """Returns the error for an id, or where it is empty for an idempotency key, that another body came with."""
    what = f"request id '{request_id}'" if request_id else "Idempotency-Key"
    return Conflict(f"the {what} belongs to a request with another body; repeat that body, or choose another")


def expired(record: RequestRecord) -> ResultExpired:
    """Returns the error for a result that was there."""
    return ResultExpired(f"the result of request '{shown_id(record.address)}' was there; its time to live is over")


def failed_outcome(address: Address, state: RequestState, error: QinferError, version: int = 0) -> Outcome:
    """Returns how a request ends without being executed."""
    failure = Failure.of(error)
    response = Response(request_id=address.id, model=address.model, version=version, failure=failure)
    return Outcome(state=state, blob=encode_responses([response]), code=failure.code, message=failure.message)


def shown_id(address: Address) -> str:
    """Returns the id as the client knows it."""
    return address.id if _made_by_server(address.id) is not None else address.id.partition("@")[0]


def path_of(address: Address) -> str:
    """Returns the path of a request."""
    shown = shown_id(address)
    if shown == address.id:
        return f"/v1/requests/{quote(shown, safe='')}"
    return f"/v1/models/{quote(address.model, safe='')}/requests/{quote(shown, safe='')}"


def shown_record(record: RequestRecord, now_s: float) -> RequestBody:
    """Returns a record as clients have it."""
    path = path_of(record.address)
    ended = record.state.is_terminal
    failed = ended and record.code and record.state is not RequestState.SUCCEEDED
    return RequestBody(
        id=shown_id(record.address),
        model=record.address.model,
        version=record.version,
        state=record.state,
        created_at=written(record.created_at),
        deadline_at=written(record.deadline_at),
        finished_at=instant(record.finished_at),
        expires_at=instant(record.expires_at),
        age_s=round(max((record.finished_at if ended else now_s) - record.created_at, 0.0), 3),
        attempts=record.attempts,
        error=RequestProblem(record.code, record.message) if failed else None,
        webhook=shown_webhook(record.webhook, record.webhook_state),
        links=RequestLinks(path, f"{path}/result", f"{path}/events"),
        responses=record.responses if record.decoupled else UNSET,
    )


def shown_webhook(url: str, state: str) -> WebhookBody | None:
    """Returns a webhook as clients have it; none where the URL is empty."""
    return WebhookBody(url, state or "waiting") if url else None


def instant(at_s: float) -> str | None:
    """Writes an instant as RFC 3339 in UTC with milliseconds; `None` for 0."""
    return written(at_s) if at_s else None


def written(at_s: float) -> str:
    """Writes an instant as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _made_by_server(request_id: str) -> Address | None:
    if len(request_id) > _MAX_ID_CHARACTERS:
        return None
    try:
        ulid, partition, model = parse_request_id(request_id)
    except InvalidRequest:
        return None
    return None if "@" in ulid else Address(model, partition, request_id)


MIN_TIMEOUT_S = 0.001

_CANCELLED = "the request was cancelled"


class SubmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a request: all that a caller gives besides its body.

    Attributes:
        body_hash: Identifies model, version and body.
        timeout_s: From now to its deadline; `None` = the default.
        request_id: The id that the caller chose; empty = the server makes one.
        idempotency_key: The hash of the caller's key; empty without one.
        webhook: The URL that is informed of its end; empty = none.
        outbox: Which outbox its end goes to, for a part of the server that reads it; empty = none. Not with a webhook.
        notes: For whoever reads the outbox.
        result_ttl_s: How long its result can be read once it has ended; 0 = as the settings say.
    """

    body_hash: str
    timeout_s: float | None = None
    request_id: str = ""
    idempotency_key: str = ""
    webhook: str = ""
    outbox: str = ""
    notes: bytes = b""
    result_ttl_s: float = 0.0


class Ticket(msgspec.Struct, frozen=True):
    """A request's record, and whether `submit` accepted it now or found it."""

    record: RequestRecord
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRequests:
    """One per gateway.

    Attributes:
        delivery: The queue.
        catalog: Which models accept requests.
        dispatcher: Who may ask, and how much.
        tally: Counts refusals and cancellations.
        settings: Timeouts and times to live.
        inline_max_bytes: Larger tensors travel beside the stream.
        targets: Where webhooks may go.
        waits: Those that wait here for a request's end.
        ids: Makes ids.
    """

    delivery: Queue
    catalog: Catalog
    dispatcher: Dispatcher
    tally: GatewayTally
    settings: RequestSettings
    inline_max_bytes: int
    targets: Targets
    waits: Waits
    ids: IdFactory = field(default_factory=IdFactory)

    def now_s(self) -> float:
        """Returns the broker's time, which records are written in."""
        return self.delivery.clock.now_s()

    def resolve(self, model: str, version: int) -> Served:
        """Finds the model version of a request; no live worker need have loaded the version yet.

        Raises:
            Overloaded: The gateway is shutting down.
            ModelNotFound: No such model or version.
            ModelNotReady: It can't be loaded.
            InvalidRequest: It keeps state from request to request.
        """
        if self.dispatcher.draining:
            raise Overloaded("Server exiting")
        served = self.catalog.accepting(model, version)
        check_stateless(served)
        return served

    def refuse(self, model: str, version: int, error: QinferError, context: Context = ANONYMOUS) -> QinferError:
        """Counts a request that was not accepted, and returns the error for its client."""
        try:
            served = self.catalog.accepting(model, version)
        except QinferError:
            self.tally.failed(*self.catalog.named(model, version), error.code)
        else:
            self.tally.failed(model, served.version, error.code)
            if isinstance(error, Overloaded):
                self.tally.ended(model, served.version, error.code)
        self.dispatcher.note_refusal(model, version, error, context)
        return error

    async def submit(self, context: Context, request: InferRequest, plan: OutputPlan, options: SubmitOptions) -> Ticket:
        """Accepts a request, or finds the one that was accepted before with the same id or idempotency key.

        Args:
            context: Who asks, authorized.
            request: The decoded request; it is stamped in place.
            plan: How its result is to be encoded.
            options: All that its caller gave besides its body.

        Raises:
            QinferError: It is refused, as `Dispatcher.submit` refuses; or its timeout or webhook is wrong; `Conflict`:
                the id or the key belongs to a request with another body.
        """
        served = self.resolve(request.model, request.version)
        if not request.generation or request.generation != served.generation:
            self.dispatcher.check(request, served)
        acceptance = self._acceptance(context, request, served, plan, options)
        self.dispatcher.charge(context)
        if options.webhook:
            await self.targets.check(options.webhook)
        try:
            accepted = await self._accept(context, request, served, acceptance)
        except Overloaded as error:
            error.args = (of_request(request.client_id) + error.message,)
            raise
        return await self._ticket(acceptance, accepted, options)

    async def repeated(self, context: Context, model: str, options: SubmitOptions) -> Ticket | None:
        """Finds an earlier request with the same id or idempotency key, also if its model no longer exists.

        Raises:
            QinferError: The queue can't be asked; or `Conflict`, as `submit`.
        """
        address = self._address(context, Lane(model, 0), options.request_id)
        found = await self.delivery.requests.find(
            address, options.body_hash, tenant=context.tenant, idempotency_key=options.idempotency_key
        )
        if found is None:
            return None
        _check_repetition(address, found, options)
        record = await self.delivery.requests.record(msgspec.structs.replace(address, id=found.id))
        return None if record is None else Ticket(record, is_new=False)

    async def record(self, context: Context, address: Address) -> RequestRecord:
        """Returns the record of a request.

        Raises:
            RequestNotFound: Nothing is, or it is another tenant's.
        """
        return own_record(context.tenant, address, await self.delivery.requests.record(address))

    async def wait(self, context: Context, address: Address, wait_s: float) -> RequestRecord:
        """Returns the record of a request after its end, after `wait_s` seconds, or at once if too many wait here.

        Raises:
            Unauthorized: The caller's key was revoked meanwhile, or has expired.
            Forbidden: The key lacks the scope now.
            RequestNotFound: Nothing is known of it, or it is another tenant's.
        """
        record = await self.record(context, address)
        if record.state.is_terminal or wait_s <= 0 or self.waits.is_full:
            return record
        wait_s = min(wait_s, self.settings.max_wait_s)
        check = functools.partial(self.dispatcher.recheck, context)
        return own_record(context.tenant, address, await self.waits.ended(address, wait_s, check))

    def plan(self, record: RequestRecord) -> OutputPlan:
        """Returns the form in which the outputs of a request travel."""
        return msgspec.msgpack.decode(record.plan, type=OutputPlan) if record.plan else OutputPlan()

    async def result(self, record: RequestRecord) -> tuple[Response, OutputPlan]:
        """Returns the response of a request that ended, outputs or failure, as a synchronous call would have had it.

        Raises:
            ResultExpired: Its time to live is over.
            BrokerUnavailable: The queue can't be reached.
        """
        plan = self.plan(record)
        if record.state is not RequestState.SUCCEEDED:
            if record.expires_at <= self.now_s():
                raise expired(record)
            failure = Failure(record.code, of_request(record.client_id) + record.message)
            return Response(request_id=record.address.id, failure=failure), plan
        blob = None
        with contextlib.suppress(CorruptEntry):  # it was deleted in the payload store, before its time
            blob = await self.delivery.requests.result(record.address)
        if blob is None:
            raise expired(record)
        (response,) = decode_responses(blob)
        return response, plan

    async def stored(self, record: RequestRecord, index: int = 0) -> AsyncIterator[Response]:
        """Yields the responses of a decoupled model that are stored, from an index on; the final one is the result.

        Raises:
            ResultExpired: The time to live of the result is over.
            BrokerUnavailable: The queue can't be reached.
        """
        while index < record.responses:
            blobs = await self.delivery.requests.responses.read(record.address, index)
            if not blobs:
                raise expired(record)
            for blob in blobs:
                (response,) = decode_responses(blob)
                yield response
            index += len(blobs)

    async def cancel(self, context: Context, address: Address) -> RequestRecord:
        """Ends a request, unless it has ended; returns its record then.

        Raises:
            RequestNotFound: Nothing is known of it, or it is another tenant's.
        """
        record = await self.record(context, address)
        if record.state.is_terminal:
            return record
        outcome = failed_outcome(address, RequestState.CANCELLED, Cancelled(_CANCELLED), record.version)
        (is_first,) = await self.delivery.requests.settle([Settlement(address=address, outcome=outcome)])
        if is_first:
            self.tally.failed(address.model, record.version, Cancelled.code)
            self.tally.ended(address.model, record.version, Cancelled.code)
        return await self.record(context, address)

    def _timeout_s(self, served: Served, asked_s: float | None) -> float:
        """Returns a request's timeout; the model's configuration takes precedence over the settings."""
        own = served.spec.parameters
        longest_s = float(own.get(MAX_TIMEOUT, self.settings.max_timeout_s))
        if asked_s is None:
            return min(float(own.get(DEFAULT_TIMEOUT, self.settings.default_timeout_s)), longest_s)
        if not (math.isfinite(asked_s) and MIN_TIMEOUT_S <= asked_s <= longest_s):
            raise InvalidRequest(
                f"a request timeout of {asked_s:g} s is not possible; "
                f"choose one from {MIN_TIMEOUT_S:g} to {longest_s:g} seconds"
            )
        return asked_s

    def _address(self, context: Context, lane: Lane, chosen: str) -> Address:
        if chosen:
            return chosen_address(lane.model, chosen, context.tenant)
        return Address(lane.model, lane.partition, self.ids.request_id(lane.model, lane.partition))

    async def _ticket(self, acceptance: Acceptance, accepted: Accepted, options: SubmitOptions) -> Ticket:
        _check_repetition(acceptance.address, accepted, options)
        found = msgspec.structs.replace(acceptance.address, id=accepted.id)
        record = None if accepted.is_new else await self.delivery.requests.record(found)
        return Ticket(record or self._first_record(found, acceptance), accepted.is_new)

    async def _accept(
        self, context: Context, request: InferRequest, served: Served, acceptance: Acceptance
    ) -> Accepted:
        """Admits, encodes and enqueues a request; where it is not admitted, it may still have been accepted before."""
        try:
            timeout_s, tenant = acceptance.timeout_s, context.tenant
            route = self.dispatcher.admit(served, request.priority, timeout_s, request.timeout_s, tenant=tenant)
        except Overloaded as refusal:
            if not acceptance.idempotency_key and shown_id(acceptance.address) == acceptance.address.id:
                raise  # its id was made just now
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
        stamp = functools.partial(
            prepare,
            request,
            served,
            address=acceptance.address,
            timeout_s=acceptance.timeout_s,
            inline_max_bytes=self.inline_max_bytes,
            tenant=context.tenant,
            trace=self.dispatcher.trace_of(context, served, {REQUEST_ID: acceptance.address.id}),
            route=route,
        )
        is_large = tensor_bytes(request) > self.inline_max_bytes
        stamped = await asyncio.to_thread(stamp) if is_large else stamp()
        began_s = self.now_s()
        accepted = await self.delivery.requests.accept(msgspec.structs.replace(acceptance, **stamped._asdict()))
        if accepted.is_new:
            ending = functools.partial(self._ending, acceptance.address, acceptance.timeout_s)
            self.dispatcher.trace_stored(request, began_s, ending)
        return accepted

    async def _ending(self, address: Address, timeout_s: float) -> tuple[RequestRecord | None, Response | None]:
        """Waits until a request has ended; returns its record, and its last response."""
        record = await self.waits.ended(address, timeout_s + _GRACE_S, lambda: None)
        blob = None if record is None else await self.delivery.requests.result(address)
        return record, decode_responses(blob)[-1] if blob else None

    def _acceptance(
        self, context: Context, request: InferRequest, served: Served, plan: OutputPlan, options: SubmitOptions
    ) -> Acceptance:
        """Returns the acceptance of a request, without its lane, frame and payload.

        No idempotency key outlives the record that it leads to.
        """
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
        )

    def _first_record(self, address: Address, acceptance: Acceptance) -> RequestRecord:
        """Returns the record of a request that was accepted just now, which saves reading it."""
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


def _check_repetition(address: Address, accepted: Accepted, options: SubmitOptions) -> None:
    """Raises `Conflict` where the id or the key belongs to a request with another body."""
    if accepted.body_hash != options.body_hash:
        raise conflict(options.request_id if accepted.id == address.id else "")
