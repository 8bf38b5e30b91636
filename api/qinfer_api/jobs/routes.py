"""`/v1/jobs`: bulk jobs over HTTP (docs/reference/jobs-api.md)."""

from contextlib import suppress
from typing import get_args

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.errors import CorruptEntry, InvalidRequest
from qinfer.jobs.examiner import PreviewOf
from qinfer.jobs.job import JobState
from qinfer.jobs.queue.records import JobRecord
from qinfer.wire.bodies import JobEstimate, JobPreview
from qinfer.wire.json_scan import check_depth
from qinfer_api.auth import ANONYMOUS, CallerContext
from qinfer_api.jobs import records
from qinfer_api.jobs.service import BulkJobs
from qinfer_api.rest.openapi import (
    LAST_EVENT,
    Json,
    body,
    describe_response,
    errors,
    followed,
    header,
    operation,
    query,
)
from qinfer_api.rest.services import (
    ServerSentEvent,
    Services,
    authorize_read,
    event_stream,
    idempotency_key,
    read_body,
    send_json,
)

MAX_LIMIT = 1000
HEARTBEAT_S = 15.0
MAX_BODY_BYTES = 4 * 2**20
"""The largest job, which its record contains."""

_DEFAULT_LIMIT = 100
MOST_PREVIEW_ROWS = 100
PREVIEW_ROWS = 20
PREVIEWS: tuple[PreviewOf, ...] = get_args(PreviewOf)


def _refusals(*statuses: int) -> dict[int, Json]:
    return errors(
        *statuses,
        s400="A field, a column or a URL can't be; the text names it.",
        s403="The API key does not allow it, or a URL is in no store that this server may use.",
        s404="No such job, model or version.",
        s409="The id belongs to another job, or the job's state does not allow it.",
        s501="This server accepts no jobs, or a library or Celery's broker is missing; the text says which.",
    )


_LOCATION = {"Location": "The path of the job."}
_CREATE = operation(
    "Create a job",
    {
        201: describe_response(
            "Created: its model, inputs and output fit together.", records.JobBody, headers=_LOCATION
        ),
        200: describe_response(
            "It had been created before, with the same id or key.",
            records.JobBody,
            headers={**_LOCATION, "Idempotent-Replayed": "`true`: it had been created before."},
        ),
        **_refusals(400, 401, 403, 404, 409, 429, 500, 501, 503),
    },
    header(
        "Idempotency-Key",
        "Visible ASCII, instead of an `id`. The same key with the same job is one job.",
        pattern="^[!-~]{1,255}$",
    ),
    query(
        "resume",
        "Resume the job of that id or key if it has failed, has expired or was cancelled.",
        type="boolean",
        default=False,
    ),
    takes=body(records.NewJob),
)
_VALIDATE = operation(
    "Validate a job",
    {
        200: describe_response("The job could be created, and has this size.", JobEstimate),
        **_refusals(400, 401, 403, 404, 429, 500, 501, 503),
    },
    takes=body(records.NewJob),
)
_LIST = operation(
    "List the jobs",
    {200: describe_response("The jobs.", records.JobsBody), **_refusals(400, 401, 403, 503)},
    query("state", "Only jobs in this state.", enum=list(JobState)),
    query("model", "Only jobs of this model or endpoint.", type="string"),
    query("output", "Only jobs that write to this folder, or below it.", type="string"),
    query("metadata", "`NAME=TEXT`: only jobs with that metadata; repeat it to require several.", type="string"),
    query("after", "`next` of the page before.", type="string"),
    query("limit", "How many at most.", type="integer", minimum=1, maximum=MAX_LIMIT, default=_DEFAULT_LIMIT),
    scope=Scope.VIEWER,
)
_SHOW = operation(
    "Look at a job",
    {200: describe_response("The job.", records.JobBody), **_refusals(401, 403, 404, 503)},
    scope=Scope.VIEWER,
)
_DELETE = operation(
    "Delete a job", {204: describe_response("Deleted; its output stays."), **_refusals(401, 403, 404, 409, 503)}
)
_CANCEL = operation(
    "Cancel a job",
    {
        200: describe_response("The job: cancelling, cancelled, or ended before.", records.JobBody),
        **_refusals(401, 403, 404, 503),
    },
)
_RESUME = operation(
    "Resume a job",
    {
        200: describe_response("The job, planned again or active.", records.JobBody),
        **_refusals(400, 401, 403, 404, 409, 429, 501, 503),
    },
    takes=body(records.Changes, required=False),
)
_LOG = operation(
    "Read a job's log", {200: describe_response("Its latest lines.", records.JobLog), **_refusals(401, 403, 404, 503)}
)
_PREVIEW = operation(
    "Look at rows of a job",
    {
        200: describe_response("The rows; none if there is no file yet.", JobPreview),
        **_refusals(400, 401, 403, 404, 429, 500, 501, 503),
    },
    query("of", "The inputs, the output so far, or its failed rows.", enum=list(PREVIEWS), default="output"),
    query("rows", "How many at most.", type="integer", minimum=1, maximum=MOST_PREVIEW_ROWS, default=PREVIEW_ROWS),
)
_EVENT = 'event: progress\nid: 7\ndata: {"id": "…", "state": "running", …}\n\n'
_EVENTS = operation(
    "Follow a job",
    {
        **followed("Server-sent events: the job at each change, until its end.", _EVENT),
        **_refusals(401, 403, 404, 503),
    },
    LAST_EVENT,
)


def job_routes(services: Services, jobs: BulkJobs) -> APIRouter:
    """Returns the routes of bulk jobs."""
    router, routes = APIRouter(tags=["bulk jobs"]), _JobRoutes(services, jobs)
    all_jobs, one = "/v1/jobs", "/v1/jobs/{job_id}"
    for method, path, name, described, handler in (
        ("POST", f"{all_jobs}/validate", "validate_job", _VALIDATE, routes.validate),
        ("POST", all_jobs, "create_job", _CREATE, routes.create),
        ("GET", all_jobs, "list_jobs", _LIST, routes.list_all),
        ("GET", one, "job", _SHOW, routes.show),
        ("DELETE", one, "delete_job", _DELETE, routes.delete),
        ("POST", f"{one}/cancel", "cancel_job", _CANCEL, routes.cancel),
        ("POST", f"{one}/resume", "resume_job", _RESUME, routes.resume),
        ("GET", f"{one}/log", "job_log", _LOG, routes.log),
        ("GET", f"{one}/preview", "preview_job", _PREVIEW, routes.preview),
        ("GET", f"{one}/events", "job_events", _EVENTS, routes.events),
    ):
        router.add_api_route(path, handler, methods=[method], name=name, **described)
    return router


class _JobRoutes:
    def __init__(self, services: Services, jobs: BulkJobs) -> None:
        self._services, self._jobs = services, jobs

    async def validate(self, request: Request) -> HttpResponse:
        """Checks a job and all its input files, and estimates it; nothing is created."""
        context = self._context(request)
        return send_json(await self._jobs.validate(context, await self._body_of(request)))

    async def create(self, request: Request) -> HttpResponse:
        """Checks a job and has it planned; the reply means that model, inputs and output fit together."""
        context = self._context(request)
        key = idempotency_key(request)
        resume = _flag(request, "resume")
        record, is_new = await self._jobs.create(context, await self._body_of(request), key or "", resume=resume)
        response = self._send(record, 201 if is_new else 200)
        response.headers["location"] = records.job_path(record)
        if not is_new:
            response.headers["idempotent-replayed"] = "true"
        return response

    async def list_all(self, request: Request) -> HttpResponse:
        """Lists the jobs, newest first."""
        context, query = self._context(request, Scope.VIEWER), request.query_params
        state, after = query.get("state", ""), query.get("after", "")
        given = [_pair(text) for text in query.getlist("metadata")]
        wanted = records.JobFilter(query.get("model", ""), query.get("output", ""), frozenset(given))
        found, following = await self._jobs.list(context, state, after, _limit(query.get("limit"), "limit"), wanted)
        bodies = []
        for record in found:
            with suppress(CorruptEntry):  # a damaged record must not hide other records
                bodies.append(self._body(record, context))
        return send_json(records.JobsBody(bodies, following or None))

    async def show(self, job_id: str, request: Request) -> HttpResponse:
        """Returns a job."""
        context = self._context(request, Scope.VIEWER)
        return send_json(self._body(await self._jobs.get(context, job_id), context))

    async def delete(self, job_id: str, request: Request) -> HttpResponse:
        """Deletes the record of an ended job; its output stays."""
        await self._jobs.delete(self._context(request), job_id)
        return HttpResponse(status_code=204)

    async def cancel(self, job_id: str, request: Request) -> HttpResponse:
        """Stops a job, unless it has ended; its parts stay, and it can be resumed."""
        return self._send(await self._jobs.cancel(self._context(request), job_id))

    async def resume(self, job_id: str, request: Request) -> HttpResponse:
        """Resumes a failed, expired or cancelled job; finished work is kept."""
        context = self._context(request)
        changes = records.decode_changes(await self._body_of(request))
        return self._send(await self._jobs.resume(context, job_id, changes))

    async def log(self, job_id: str, request: Request) -> HttpResponse:
        """Returns the log of a job."""
        return send_json(records.shown_log(await self._jobs.log(self._context(request), job_id)))

    async def preview(self, job_id: str, request: Request) -> HttpResponse:
        """Returns the first rows of a job's inputs or output, or those that failed, as text."""
        context, query = self._context(request), request.query_params
        rows = _limit(query.get("rows"), "rows", MOST_PREVIEW_ROWS, PREVIEW_ROWS)
        return send_json(await self._jobs.preview(context, job_id, preview_of(query.get("of", "output")), rows))

    async def events(self, job_id: str, request: Request) -> HttpResponse:
        """Streams each change of a job until its end."""
        context = self._context(request)
        record = await self._jobs.get(context, job_id)
        seen = request.headers.get("last-event-id", "")
        if record.is_over and seen == str(record.revision):
            return HttpResponse(status_code=204)
        self._jobs.check_watchers(context)
        changes = self._jobs.changes(context, record, HEARTBEAT_S)
        return event_stream((None if one is None else self._progress(one) async for one in changes), seen)

    async def _body_of(self, request: Request) -> bytes:
        settings = self._services.settings
        text = await read_body(self._services, request, min(MAX_BODY_BYTES, settings.http.max_input_bytes), bytes)
        check_depth(text, settings.limits.max_json_depth)
        return text

    def _context(self, request: Request, scope: Scope = Scope.INFER) -> CallerContext:
        return authorize_read(self._services, request, scope)

    def _progress(self, record: JobRecord) -> ServerSentEvent:
        return ServerSentEvent("progress", str(record.revision), msgspec.json.encode(self._body(record)))

    def _body(self, record: JobRecord, context: CallerContext = ANONYMOUS) -> records.JobBody:
        return records.shown_job(record, self._jobs.now_s(), reads=context.reads)

    def _send(self, record: JobRecord, status: int = 200) -> HttpResponse:
        return send_json(self._body(record), status)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} is true or false; got '{text[:40]}'")
    return text == "true"


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise InvalidRequest(f"metadata is NAME=TEXT; got '{text[:40]}'")
    return name, value


def preview_of(text: str) -> PreviewOf:
    """Reads which rows of a job are asked for."""
    for name in PREVIEWS:
        if name == text:
            return name
    raise InvalidRequest(f"a preview is of one of {', '.join(PREVIEWS)}; got '{text[:40]}'")


def _limit(text: str | None, name: str, most: int = MAX_LIMIT, default: int = _DEFAULT_LIMIT) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= most):
        raise InvalidRequest(f"{name} is a number from 1 to {most}; got '{text[:40]}'")
    return int(text)
