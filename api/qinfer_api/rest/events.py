"""`GET …/requests/{id}/events`: a request's states as server-sent events (WHATWG HTML, "Server-sent events").

    event: state          the record as data, now and at each change; the stream ends after the terminal state
    : a comment           every `HEARTBEAT_S` seconds, so that proxies keep the connection

A browser comes back by itself when a stream ends, with the id of the last event it saw: one that saw the end is told
so by 204, which stops it; others are not told again what they know.
"""

from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from qinfer.delivery.requests import Address, RequestRecord
from qinfer.errors import DeliveryError, Overloaded
from qinfer_api.auth import Context
from qinfer_api.records import shown_record
from qinfer_api.rest.openapi import LAST_EVENT, errors, followed, operation
from qinfer_api.rest.requests import located
from qinfer_api.rest.services import Services

HEARTBEAT_S = 15.0
"""Seconds without an event after which a comment is sent."""

_EVENT = 'event: state\nid: 1-succeeded\ndata: {"id": "…", "state": "succeeded", …}\n\n'
_EVENTS = operation(
    "Follow a request",
    {
        **followed("Server-sent events: the record at each change, until the end.", _EVENT),
        **errors(401, 403, 404, 503),
    },
    LAST_EVENT,
)
_HEARTBEAT = b": still here\n\n"


def event_routes(services: Services) -> APIRouter:
    """Returns the routes of event streams."""
    router = APIRouter(tags=["asynchronous requests"])

    @router.get("/v1/models/{model}/requests/{request_id}/events", name="events_of_model", **_EVENTS)
    @router.get("/v1/requests/{request_id}/events", name="events", **_EVENTS)
    async def events(request: Request) -> HttpResponse:
        """Tells each change of a request's state until its end; of an id that its client chose, below its model."""
        return await _events(services, request)

    return router


async def _events(services: Services, request: Request) -> HttpResponse:
    context, address = located(services, request)
    record = await services.requests.record(context, address)
    seen = request.headers.get("last-event-id", "")
    if record.state.is_terminal and seen == _event_id(record):
        return HttpResponse(status_code=204)
    if services.dispatcher.draining:
        raise Overloaded("Server exiting")
    if services.requests.waits.is_full:
        raise Overloaded("too many clients wait at this server for requests to end; poll, or try again later")
    return StreamingResponse(
        _stream(services, context, address, seen),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _stream(services: Services, context: Context, address: Address, seen: str) -> AsyncIterator[bytes]:
    with suppress(DeliveryError):  # the stream ends; whoever listens comes again, and is told then
        async for record in services.requests.waits.changes(address, HEARTBEAT_S):
            if record is None:
                yield _HEARTBEAT
            elif record.tenant == context.tenant and _event_id(record) != seen:
                seen = _event_id(record)
                data = msgspec.json.encode(shown_record(record, services.requests.now_s()))
                yield b"event: state\nid: %b\ndata: %b\n\n" % (seen.encode(), data)


def _event_id(record: RequestRecord) -> str:
    return f"{record.attempts}-{record.state.value}"
