"""Routes of asynchronous requests (`/v1/…/requests`), and of `Prefer` on `/v2/…/infer`.

Events are server-sent (WHATWG HTML, "Server-sent events"):

    event: state          the record as data, now and at each change; the stream ends after the terminal state
    event: response       each response of a decoupled model, while it executes and after (`qinfer_api.http.infer`)
    : a comment           every `HEARTBEAT_S` seconds, so that proxies keep the connection

An event's id is `<attempts>-<state>`, then `.<responses>` if there were any. Browsers reconnect by themselves with the
last id: a browser that saw the end gets 204, which stops it; any other browser gets only newer events.
"""

import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.core.messages import Response
from qinfer.errors import Conflict, InvalidRequest, ModelError, Overloaded, QinferError, RequestError, ResultExpired
from qinfer.queue.entries import EntryAddress, RequestRecord, RequestState
from qinfer.queue.values import LARGE_BYTES, Room
from qinfer.tensors import Bytes
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import CallerContext
from qinfer_api.http.infer import JSON_LENGTH_HEADER, HttpReply, UrlTarget, encode_event, read_seconds, strictly
from qinfer_api.requests.listing import (
    LIST_QUERY,
    RequestsBody,
    TimelineBody,
    checked_limit,
    filter_of,
    list_page,
    timeline_of,
)
from qinfer_api.requests.records import RequestBody, address_of, made_by_server, path_of, shown_record
from qinfer_api.requests.service import RequestTicket, SubmitOptions
from qinfer_api.rest.openapi import LAST_EVENT, describe_response, errors, followed, header, operation, query
from qinfer_api.rest.services import (
    INFER_BODY,
    JSON_LENGTH,
    OUTPUTS,
    REQUEST_TIMEOUT,
    Preferences,
    ServerSentEvent,
    Services,
    answers,
    authorize,
    authorize_read,
    context_of,
    decoded_infer,
    encoded,
    event_stream,
    idempotency_key,
    is_strict,
    off_loop,
    read_preferences,
    received,
    recheck,
    room_of_answer,
    send,
    send_json,
    send_outputs,
    target_of,
    timeout_of,
    unless_left,
)

AGAIN_S = 1
HEARTBEAT_S = 15.0


PREFER = header(
    "Prefer",
    "RFC 7240: `respond-async`, `wait=<seconds>`. Either makes the request asynchronous: 202, or the result if it is "
    "there within `wait` seconds.",
    examples=["respond-async, wait=5"],
)

OF_TENANT = query(
    "tenant", "With the scope `admin`: the tenant whose request has this id of its own choice.", type="string"
)
_LIST = 'Of a decoupled model the object is `{"responses": […]}`: a list of such objects.'
_STATE = {"Qinfer-Request-State": "The state."}
ACCEPTED = describe_response(
    "Accepted: it will end in exactly one terminal state.",
    RequestBody,
    headers={
        "Location": "The path of the request.",
        "Idempotent-Replayed": "`true`: it had been accepted before.",
        "Preference-Applied": "The preferences that were honoured.",
        **_STATE,
    },
)
_SUBMIT = operation(
    "Submit a request",
    {
        202: ACCEPTED,
        200: {**OUTPUTS, "description": "With `Prefer: wait`: the result."},
        **errors(400, 401, 403, 404, 409, 429, 500, 501, 503),
    },
    JSON_LENGTH,
    REQUEST_TIMEOUT,
    header(
        "Idempotency-Key",
        "Visible ASCII. The same key with the same body is the same request; with another body it is refused.",
        maxLength=255,
    ),
    header("Request-Id", "An id of your own, unique within the model.", pattern="^[A-Za-z0-9._~-]{1,128}$"),
    header("Webhook-Url", "Is informed of the end by a signed POST.", format="uri"),
    PREFER,
    takes=INFER_BODY,
)
_LIST_REQUESTS = operation(
    "List the requests",
    {200: describe_response("The requests.", RequestsBody), **errors(400, 401, 403, 503)},
    *LIST_QUERY,
    scope=Scope.VIEWER,
)
_RECORD = operation(
    "Look at a request",
    {200: describe_response("The request.", RequestBody), **errors(401, 403, 404, 503)},
    OF_TENANT,
    scope=Scope.VIEWER,
)
_TIMELINE = operation(
    "Look at the steps of a request",
    {200: describe_response("The steps.", TimelineBody), **errors(401, 403, 404, 503)},
    OF_TENANT,
    scope=Scope.VIEWER,
)
_RESULT = operation(
    "Read a result",
    {
        200: {**OUTPUTS, **describe_response(f"{OUTPUTS['description']} {_LIST}", headers=_STATE)},
        202: describe_response(
            "It has not ended.", RequestBody, headers={"Retry-After": "When to ask again, in seconds.", **_STATE}
        ),
        **errors(400, 401, 403, 404, 410, 500, 503),
    },
    query("wait", "Seconds to wait for the end.", type="number", minimum=0),
    OF_TENANT,
)
_CANCEL = operation(
    "Cancel a request, or remove its result",
    {200: describe_response("The request as it ended.", RequestBody), **errors(401, 403, 404, 503)},
    OF_TENANT,
)

_EVENT = 'event: state\nid: 1-succeeded\ndata: {"id": "…", "state": "succeeded", …}\n\n'
_EVENTS = operation(
    "Follow a request",
    {
        **followed(
            "Server-sent events: the record at each change, until the end, and each response of a decoupled model. A "
            "second line of `data` has the bytes of its binary outputs in base64.",
            _EVENT,
        ),
        **errors(401, 403, 404, 503),
    },
    LAST_EVENT,
    OF_TENANT,
)


def request_routes(services: Services) -> APIRouter:
    """Returns the routes of asynchronous requests."""
    router = APIRouter(tags=["asynchronous requests"])

    @router.post("/v1/models/{model}/versions/{version}/requests", name="submit_version", **_SUBMIT)
    @router.post("/v1/models/{model}/requests", name="submit", **_SUBMIT)
    async def submit_request(request: Request) -> HttpResponse:
        """Accepts a request for the highest ready version of a model, or for the version in the path.

        The request is accepted even if no worker of the model is alive.
        """
        preferences = read_preferences(request.headers.getlist("prefer"))
        return await submit(services, target_of(request), request, preferences)

    @router.get("/v1/models/{model}/requests/{request_id}", name="record_of_model", **_RECORD)
    @router.get("/v1/requests/{request_id}", name="record", **_RECORD)
    async def record(request: Request) -> HttpResponse:
        """Returns the state of a request; one with a client's id is below its model."""
        context, address = await _located(services, request, Scope.VIEWER)
        return _send_state(services, await services.requests.record(context, address), 200, context=context)

    @router.get("/v1/models/{model}/requests/{request_id}/result", name="result_of_model", **_RESULT)
    @router.get("/v1/requests/{request_id}/result", name="result", **_RESULT)
    async def result(request: Request) -> HttpResponse:
        """Returns the result of a request, repeatedly until its time to live is over.

        The result of a request with a client's id is below its model.
        """
        return await _result(services, request)

    @router.delete("/v1/models/{model}/requests/{request_id}", name="cancel_of_model", **_CANCEL)
    @router.delete("/v1/requests/{request_id}", name="cancel", **_CANCEL)
    async def cancel(request: Request) -> HttpResponse:
        """Cancels a request, or removes the result of an ended request: reading it then gives 410.

        The record and the idempotency key stay. A request with a client's id is below its model.
        """
        context, address = await _located(services, request)
        return _send_state(services, await services.requests.cancel(context, address), 200)

    @router.get("/v1/models/{model}/requests/{request_id}/events", name="events_of_model", **_EVENTS)
    @router.get("/v1/requests/{request_id}/events", name="events", **_EVENTS)
    async def events(request: Request) -> HttpResponse:
        """Streams each change of a request's state until its end; a request with a client's id is below its model."""
        return await _events(services, request)

    return router


def list_routes(services: Services) -> APIRouter:
    """Returns the routes that show states of asynchronous requests without their contents."""
    router = APIRouter(tags=["asynchronous requests"])

    @router.get("/v1/requests", name="list_requests", **_LIST_REQUESTS)
    async def list_requests(request: Request) -> HttpResponse:
        """Lists the stored requests of the caller's tenant, with the scope `admin` those of all, by a filter.

        Synchronous requests, such as those of `/v2/…/infer`, are not stored: metrics count them, and traces show them.
        """
        context, params = authorize_read(services, request, Scope.VIEWER), request.query_params
        limit = checked_limit(params.get("limit"))
        found = await list_page(services.requests, context, filter_of(params), params.get("after", ""), limit)
        bodies = [shown_record(record, services.requests.now_s(), context) for record in found.records]
        return send_json(RequestsBody(bodies, found.next or None))

    @router.get("/v1/models/{model}/requests/{request_id}/timeline", name="timeline_of_model", **_TIMELINE)
    @router.get("/v1/requests/{request_id}/timeline", name="timeline", **_TIMELINE)
    async def timeline(request: Request) -> HttpResponse:
        """Returns when and by which worker a request was fetched, executed and ended, and the size of its batch.

        Of several executions it tells the last one. A request with a client's id is below its model.
        """
        context, address = await _located(services, request, Scope.VIEWER)
        return send_json(timeline_of(await services.requests.record(context, address)))

    return router


async def submit(services: Services, target: UrlTarget, request: Request, preferences: Preferences) -> HttpResponse:
    """Submits a request; returns its result within the preferred wait."""
    requests = services.requests
    try:
        context = authorize(services, request)
        ticket = await _accepted(services, context, target, request, _options(request))
    except QinferError as error:
        raise requests.refuse(target.model, target.version, error, context_of(request)) from None
    record, address = ticket.record, ticket.record.address
    answers(request, address)
    if preferences.wait_s is not None:
        preferences = preferences._replace(wait_s=min(preferences.wait_s, int(services.settings.requests.max_wait_s)))
        record = await unless_left(request.receive, requests.wait(context, address, preferences.wait_s or 0))
    ended = record.state.is_terminal and preferences.wait_s is not None
    response = await _outcome(services, request, record) if ended else _send_state(services, record, 202)
    response.headers["location"] = path_of(address)
    if not ticket.is_new:
        response.headers["idempotent-replayed"] = "true"
    if applied := preferences.applied(ended=ended):
        response.headers["preference-applied"] = applied
    return response


async def _located(
    services: Services, request: Request, scope: Scope = Scope.INFER
) -> tuple[CallerContext, EntryAddress]:
    """Returns caller and address; a path below an endpoint covers all its targets."""
    context = authorize(services, request, scope)
    tenant = request.query_params.get("tenant", context.tenant) if context.sees_all else context.tenant
    request_id, model = request.path_params["request_id"], request.path_params.get("model")
    if model is not None and model in services.dispatcher.endpoints.by_name:
        made = made_by_server(request_id)
        model = made.model if made else await services.requests.model_of(model, tenant, request_id)
    address = address_of(request_id, tenant, model)
    answers(request, address)
    return context, address


async def _accepted(
    services: Services, context: CallerContext, target: UrlTarget, request: Request, options: SubmitOptions
) -> RequestTicket:
    """Finds an earlier acceptance, even if the model is gone."""
    requests = services.requests
    try:
        served = requests.resolve(target.model, target.version)
    except (RequestError, ModelError):
        if ticket := await _repeated(services, context, target, request, options):
            return ticket
        raise
    async with received(services, request, services.settings.http.max_input_bytes) as body:
        try:
            decoded, plan = await decoded_infer(services, served, target, request, body)
            ticket = await requests.submit(context, decoded, plan, await _hashed(options, target, request, body))
            if ticket.is_new:
                services.dispatcher.note_accepted(context, decoded, ticket.record.address.id)
            return ticket
        except Conflict:
            raise
        except (RequestError, ModelError):
            if ticket := await _repeated(services, context, target, request, options, body):
                return ticket
            raise


async def _repeated(
    services: Services,
    context: CallerContext,
    target: UrlTarget,
    request: Request,
    options: SubmitOptions,
    body: Bytes | None = None,
) -> RequestTicket | None:
    if not (options.request_id or options.idempotency_key):
        return None
    if body is None:
        async with received(services, request, services.settings.http.max_input_bytes) as read:
            return await _repeated(services, context, target, request, options, read)
    return await services.requests.repeated(context, target.model, await _hashed(options, target, request, body))


async def _result(services: Services, request: Request) -> HttpResponse:
    context, address = await _located(services, request)
    record = await unless_left(request.receive, services.requests.wait(context, address, _wait_s(request)))
    if record.state.is_terminal:
        return await _outcome(services, request, record)
    return _send_state(services, record, 202, AGAIN_S)


def _send_state(
    services: Services, record: RequestRecord, status: int, again_s: int = 0, context: CallerContext | None = None
) -> HttpResponse:
    response = send(HttpReply(status, _state(services, record, context), retry_after_s=again_s))
    response.headers["qinfer-request-state"] = record.state.value
    return response


async def _outcome(services: Services, request: Request, record: RequestRecord) -> HttpResponse:
    """Has no `Retry-After`: repetition would change nothing."""
    room = room_of_answer(services, request)

    async def read() -> tuple[Response, OutputPlan]:
        if record.stored_bytes > LARGE_BYTES:
            await room(record.stored_bytes)
        return await services.requests.result(record, room)

    outcome, plan = await unless_left(request.receive, read())
    if record.decoupled and outcome.failure is None:
        responses = [one async for one in services.requests.stored(record)]
        if outcome.says_something:
            responses.append(outcome)
        response = await send_outputs(services, request, responses, record.client_id, plan)
    else:
        response = await send_outputs(services, request, outcome, record.client_id, plan)
    del response.headers["retry-after"]
    response.headers["qinfer-request-state"] = record.state.value
    return response


async def _events(services: Services, request: Request) -> HttpResponse:
    strict = is_strict(request)
    context, address = await _located(services, request)
    record = await services.requests.record(context, address)
    seen = request.headers.get("last-event-id", "")
    if record.state.is_terminal and _seen(seen)[0] == _state_tag(record):
        return HttpResponse(status_code=204)
    if services.dispatcher.draining:
        raise Overloaded("Server exiting")
    tenant = services.dispatcher.sharing(context)
    if services.requests.waits.is_full(tenant):
        raise Overloaded("too many clients wait at this server for requests to end; poll, or try again later")
    changes = services.requests.waits.changes(address, HEARTBEAT_S, partial(recheck, services, request), tenant)
    own = (one async for one in changes if one is None or context.sees(one.tenant))
    room = room_of_answer(services, request)
    return event_stream(_told_events(services, own, *_seen(seen), room, strict=strict), seen)


async def _told_events(
    services: Services, changes: AsyncIterator[RequestRecord | None], told: str, taken: int, room: Room, *, strict: bool
) -> AsyncIterator[ServerSentEvent | None]:
    """Yields the events of a request, the last state after all responses.

    The client has seen state `told` and `taken` responses.
    """
    async for record in changes:
        if record is None:
            yield None
            continue
        if not record.state.is_terminal and told != _state_tag(record):
            told = _state_tag(record)
            yield ServerSentEvent("state", _event_id(told, taken), _state(services, record))
        if record.decoupled:
            async for data in _responses(services, record, taken, room, strict=strict):
                taken += 1
                yield ServerSentEvent("response", _event_id(told, taken), data)
        if record.state.is_terminal:
            yield ServerSentEvent("state", _event_id(_state_tag(record), taken), _state(services, record))


async def _responses(
    services: Services, record: RequestRecord, index: int, room: Room, *, strict: bool
) -> AsyncIterator[bytes]:
    requests = services.requests
    plan = strictly(requests.decode_plan(record)) if strict else requests.decode_plan(record)
    with suppress(ResultExpired):
        async for response in requests.stored(record, index):
            yield await _encoded(services, response, record.client_id, plan)
        if record.state is RequestState.SUCCEEDED and index <= record.responses:
            outcome, _ = await requests.result(record, room)
            if outcome.says_something:
                yield await _encoded(services, outcome, record.client_id, plan)


async def _encoded(services: Services, response: Response, client_id: str, plan: OutputPlan) -> bytes:
    size = sum(output.nbytes for output in response.outputs)
    return (await encoded(size, plan, encode_event, services.codec, response, client_id, plan)).body


def _state(services: Services, record: RequestRecord, context: CallerContext | None = None) -> bytes:
    return msgspec.json.encode(shown_record(record, services.requests.now_s(), context))


def _state_tag(record: RequestRecord) -> str:
    return f"{record.attempts}-{record.state.value}"


def _event_id(told: str, taken: int) -> str:
    return f"{told}.{taken}" if taken else told


def _seen(event_id: str) -> tuple[str, int]:
    told, _, taken = event_id.partition(".")
    return told, int(taken) if taken.isascii() and taken.isdecimal() and len(taken) < 10 else 0


async def _hashed(options: SubmitOptions, target: UrlTarget, request: Request, body: Bytes) -> SubmitOptions:
    def body_hash() -> str:
        about = [target.model, target.version, request.headers.get(JSON_LENGTH_HEADER)]
        content = hashlib.sha256(msgspec.json.encode(about))
        content.update(body)
        return content.hexdigest()

    return msgspec.structs.replace(options, body_hash=await off_loop(len(body), body_hash))


def _options(request: Request) -> SubmitOptions:
    headers = request.headers
    key = idempotency_key(request)
    if headers.get("request-id") == "":
        raise InvalidRequest("the Request-Id is empty; leave it out to have the server make one")
    return SubmitOptions(
        body_hash="",
        timeout_s=timeout_of(request),
        request_id=headers.get("request-id", ""),
        idempotency_key="" if key is None else hashlib.sha256(key.encode()).hexdigest(),
        webhook=headers.get("webhook-url", ""),
    )


def _wait_s(request: Request) -> float:
    text = request.query_params.get("wait")
    return 0.0 if text is None else read_seconds("wait", text)
