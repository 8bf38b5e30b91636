"""Records of asynchronous requests as clients see them, with their ids and paths.

A server-made id is shown unchanged. A client's id is stored as `<id>@<tenant>`, so that tenants can't collide, and its
path is below the model: `/v1/models/{model}/requests/{id}`.
"""

import re
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec
from msgspec import UNSET, UnsetType

from qinfer.core.messages import Failure, Response, parse_request_id
from qinfer.errors import (
    Conflict,
    InvalidRequest,
    QinferError,
    RequestNotFound,
    ResultExpired,
)
from qinfer.models.repository.open import is_model_name
from qinfer.queue.entries import EntryAddress, RequestOutcome, RequestRecord, RequestState
from qinfer.wire.frame import encode_responses
from qinfer_api.auth import CallerContext

_CHOSEN = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._~-]{1,128}")  # HTTP clients drop the path segments `.` and `..`
_MAX_ID_CHARACTERS = 512
_CHOSEN_PARTITION = 0


class RequestProblem(msgspec.Struct, frozen=True):
    """The reason why a request has no outputs.

    Attributes:
        code: The kind of failure, such as `deadline_exceeded`.
    """

    code: str
    message: str


class WebhookBody(msgspec.Struct, frozen=True):
    """The webhook that is called at the request's end.

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
        deadline_at: The time at which the request expires, unless it has ended.
        expires_at: The time at which the result is removed.
        age_s: Seconds since the request was accepted, up to its end.
        attempts: The number of times that a worker has taken the request.
        error: Of a key with the scope `viewer` without its message; `webhook` is `null` then.
        responses: Stored responses before the final response; omitted for models with a single response.
        tenant: The tenant; omitted if it is the caller's own.

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
    tenant: str | UnsetType = UNSET


def chosen_address(model: str, request_id: str, tenant: str) -> EntryAddress:
    """Returns the address for a client's id, if valid."""
    if not _CHOSEN.fullmatch(request_id):
        raise InvalidRequest(
            f"'{request_id[:100]}' can't be a request id; use 1 to 128 letters, digits, '.', '_', '~' and '-', and not "
            "'.' or '..' alone"
        )
    if made_by_server(request_id + "@") is not None:
        raise InvalidRequest(f"'{request_id}' has the form of the ids that the server makes; choose another")
    return EntryAddress(model, _CHOSEN_PARTITION, f"{request_id}@{tenant}")


def address_of(request_id: str, tenant: str, model: str | None = None) -> EntryAddress:
    """Returns the address that a path names."""
    made = made_by_server(request_id)
    name = model if made is None else made.model
    if name is not None and not is_model_name(name):
        raise unknown(request_id)  # a name with braces would spread the request's keys over cluster slots
    if made is not None and model in (None, made.model):
        return made
    if model is None or made is not None:
        raise unknown(request_id)
    try:
        return chosen_address(model, request_id, tenant)
    except InvalidRequest:
        raise unknown(request_id) from None


def unknown(request_id: str) -> RequestNotFound:
    """Returns the error for an unknown id."""
    return RequestNotFound(
        f"request '{request_id[:100]}' is not known: it was not accepted, or it ended too long ago; "
        "a request with an id of your own is below its model: /v1/models/<model>/requests/<id>"
    )


def own_record(context: CallerContext, address: EntryAddress, record: RequestRecord | None) -> RequestRecord:
    """Returns a record that the caller may see, or raises `RequestNotFound`."""
    if record is None or not context.sees(record.tenant):
        raise unknown(shown_id(address))
    return record


def conflict(request_id: str) -> Conflict:
    """Returns the error for a known id, or a known key if the id is empty, with another body."""
    what = f"request id '{request_id}'" if request_id else "Idempotency-Key"
    return Conflict(
        f"the {what} belongs to a request with another body; send that body again, or choose another id or key"
    )


def lost(record: RequestRecord) -> ResultExpired:
    """Returns the error for a result that was deleted or damaged in the payload store."""
    about = shown_id(record.address)
    return ResultExpired(f"the result of request '{about}' is lost: it was deleted or damaged in the payload store")


def expired(record: RequestRecord) -> ResultExpired:
    """Returns the error for a removed result."""
    return ResultExpired(f"the result of request '{shown_id(record.address)}' has expired: its time to live is over")


def failed_outcome(address: EntryAddress, state: RequestState, error: QinferError, version: int = 0) -> RequestOutcome:
    """Returns the outcome of a request that never executed."""
    failure = Failure.from_error(error)
    response = Response(request_id=address.id, model=address.model, version=version, failure=failure)
    return RequestOutcome(state=state, blob=encode_responses([response]), code=failure.code, message=failure.message)


def shown_id(address: EntryAddress) -> str:
    """Returns the id as the client knows it."""
    return address.id if made_by_server(address.id) is not None else address.id.partition("@")[0]


def path_of(address: EntryAddress) -> str:
    """Returns the path of a request."""
    shown = shown_id(address)
    if shown == address.id:
        return f"/v1/requests/{quote(shown, safe='')}"
    return f"/v1/models/{quote(address.model, safe='')}/requests/{quote(shown, safe='')}"


def shown_record(record: RequestRecord, now_s: float, context: CallerContext | None = None) -> RequestBody:
    """Returns a record as its tenant, or the caller of a `context`, sees it."""
    path, query, reads = path_of(record.address), "", context is None or context.reads
    is_others = context is not None and context.tenant != record.tenant
    if is_others and shown_id(record.address) != record.address.id:
        query = f"?tenant={quote(record.tenant, safe='')}"
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
        error=RequestProblem(record.code, record.message if reads else "") if failed else None,
        webhook=shown_webhook(record.webhook if reads else "", record.webhook_state),
        links=RequestLinks(f"{path}{query}", f"{path}/result{query}", f"{path}/events{query}"),
        responses=record.responses if record.decoupled else UNSET,
        tenant=record.tenant if is_others else UNSET,
    )


def shown_webhook(url: str, state: str) -> WebhookBody | None:
    """Returns a webhook as clients see it."""
    return WebhookBody(url, state or "waiting") if url else None


def instant(at_s: float) -> str | None:
    """Formats an instant as RFC 3339; `None` for 0."""
    return written(at_s) if at_s else None


def written(at_s: float) -> str:
    """Formats an instant as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def made_by_server(request_id: str) -> EntryAddress | None:
    """Returns a server-made id's address."""
    if len(request_id) > _MAX_ID_CHARACTERS:
        return None
    try:
        ulid, partition, model = parse_request_id(request_id)
    except InvalidRequest:
        return None
    return None if "@" in ulid else EntryAddress(model, partition, request_id)
