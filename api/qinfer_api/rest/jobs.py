"""`/v1/jobs`: bulk jobs over HTTP (docs/reference/jobs-api.md)."""

from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from qinfer.codec.json_depth import check_depth
from qinfer.control.api_keys import Scope
from qinfer.delivery.jobs import JobRecord
from qinfer.errors import DeliveryError, InvalidRequest
from qinfer_api.auth import Context
from qinfer_api.http.replies import Reply
from qinfer_api.job_intake import decode_changes
from qinfer_api.job_records import job_path, shown_job, shown_line
from qinfer_api.rest.bodies import read_body
from qinfer_api.rest.job_schema import CANCEL, CREATE, DELETE, EVENTS, LIST, LOG, MAX_LIMIT, RESUME, SHOW
from qinfer_api.rest.services import Services, context_of, send

HEARTBEAT_S = 15.0
"""Seconds without an event after which a comment is sent."""
MAX_BODY_BYTES = 4 * 2**20
"""The largest job; its record is as large."""

_DEFAULT_LIMIT = 100
_HEARTBEAT = b": still here\n\n"


def job_routes(services: Services) -> APIRouter:
    """Returns the routes of bulk jobs."""
    router = APIRouter(tags=["bulk jobs"])

    @router.post("/v1/jobs", name="create_job", **CREATE)
    async def create(request: Request) -> HttpResponse:
        """Checks a job and has it planned: its model, inputs and output fit together once this answers."""
        return await _create(services, request)

    @router.get("/v1/jobs", name="list_jobs", **LIST)
    async def list_all(request: Request) -> HttpResponse:
        """Lists the jobs, the newest first."""
        return await _list(services, request)

    @router.get("/v1/jobs/{job_id}", name="job", **SHOW)
    async def show(job_id: str, request: Request) -> HttpResponse:
        """Tells where a job is."""
        return _shown(services, await services.jobs.get(_context(services, request), job_id))

    @router.delete("/v1/jobs/{job_id}", name="delete_job", **DELETE)
    async def delete(job_id: str, request: Request) -> HttpResponse:
        """Forgets a job that has ended; its output stays."""
        await services.jobs.delete(_context(services, request), job_id)
        return HttpResponse(status_code=204)

    @router.post("/v1/jobs/{job_id}/cancel", name="cancel_job", **CANCEL)
    async def cancel(job_id: str, request: Request) -> HttpResponse:
        """Stops a job, unless it has ended; what it has written stays, and it can be resumed."""
        return _shown(services, await services.jobs.cancel(_context(services, request), job_id))

    @router.post("/v1/jobs/{job_id}/resume", name="resume_job", **RESUME)
    async def resume(job_id: str, request: Request) -> HttpResponse:
        """Has a job that ended early go on: what is there and whole is not done again."""
        context = _context(services, request)
        changes = decode_changes(await _body_of(services, request))
        return _shown(services, await services.jobs.resume(context, job_id, changes))

    @router.get("/v1/jobs/{job_id}/log", name="job_log", **LOG)
    async def log(job_id: str, request: Request) -> HttpResponse:
        """Tells what happened to a job."""
        lines = await services.jobs.log(_context(services, request), job_id)
        return _reply(200, {"log": [shown_line(line) for line in lines]})

    @router.get("/v1/jobs/{job_id}/events", name="job_events", **EVENTS)
    async def events(job_id: str, request: Request) -> HttpResponse:
        """Tells each change of a job until its end."""
        return await _events(services, request, job_id)

    return router


async def _create(services: Services, request: Request) -> HttpResponse:
    context = _context(services, request)
    key = request.headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= 255 and all("!" <= c <= "~" for c in key)):
        raise InvalidRequest("an Idempotency-Key has 1 to 255 visible ASCII characters")
    try:
        body = await _body_of(services, request)
    except ClientDisconnect:
        return HttpResponse()  # nobody reads it
    ticket = await services.jobs.create(context, body, key or "")
    response = _shown(services, ticket.record, 201 if ticket.is_new else 200)
    response.headers["location"] = job_path(ticket.record)
    if not ticket.is_new:
        response.headers["idempotent-replayed"] = "true"
    return response


async def _list(services: Services, request: Request) -> HttpResponse:
    context, query = _context(services, request), request.query_params
    state, after = query.get("state", ""), query.get("after", "")
    found, following = await services.jobs.list(context, state, after, _limit(query.get("limit")))
    return _reply(200, {"jobs": [_body(services, record) for record in found], "next": following or None})


async def _body_of(services: Services, request: Request) -> bytes:
    body = bytes(await read_body(request, min(MAX_BODY_BYTES, services.settings.http.max_input_bytes)))
    check_depth(body, services.settings.limits.max_json_depth)
    return body


async def _events(services: Services, request: Request, job_id: str) -> HttpResponse:
    record = await services.jobs.get(_context(services, request), job_id)
    seen = request.headers.get("last-event-id", "")
    if record.is_over and seen == str(record.revision):
        return HttpResponse(status_code=204)
    services.jobs.check_watchers()
    return StreamingResponse(
        _stream(services, record, seen),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _stream(services: Services, record: JobRecord, seen: str) -> AsyncIterator[bytes]:
    with suppress(DeliveryError):  # the stream ends; whoever listens comes again, and is told then
        async for changed in services.jobs.changes(record, HEARTBEAT_S):
            if changed is None:
                yield _HEARTBEAT
            elif str(changed.revision) != seen:
                seen = str(changed.revision)
                data = msgspec.json.encode(_body(services, changed))
                yield b"event: progress\nid: %b\ndata: %b\n\n" % (seen.encode(), data)


def _context(services: Services, request: Request) -> Context:
    return services.dispatcher.authorize(context_of(request), Scope.INFER)


def _body(services: Services, record: JobRecord) -> dict[str, object]:
    return shown_job(record, services.jobs.now_s())


def _shown(services: Services, record: JobRecord, status: int = 200) -> HttpResponse:
    return _reply(status, _body(services, record))


def _reply(status: int, body: object) -> HttpResponse:
    return send(Reply(status, msgspec.json.encode(body)))


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequest(f"limit is a number of jobs from 1 to {MAX_LIMIT}; got '{text[:40]}'")
    return int(text)
