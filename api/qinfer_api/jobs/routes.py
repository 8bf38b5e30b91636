"""`/v1/jobs`: bulk jobs over HTTP (docs/reference/jobs-api.md)."""

from contextlib import suppress

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.errors import CorruptEntry, InvalidRequest
from qinfer.jobs.job import JobState
from qinfer.jobs.queue.records import JobRecord
from qinfer.queue import keys
from qinfer.wire.bodies import JobEstimate
from qinfer.wire.json_scan import check_depth
from qinfer_api.auth import CallerContext
from qinfer_api.jobs.records import (
    Changes,
    JobBody,
    JobFilter,
    JobLog,
    JobsBody,
    NewJob,
    decode_changes,
    job_path,
    shown_job,
    shown_log,
)
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
    authorize,
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
        201: describe_response("Created: its model, inputs and output fit together.", JobBody, headers=_LOCATION),
        200: describe_response(
            "It had been created before, with the same id or key.",
            JobBody,
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
    takes=body(NewJob),
)
_VALIDATE = operation(
    "Validate a job",
    {
        200: describe_response("The job could be created, and has this size.", JobEstimate),
        **_refusals(400, 401, 403, 404, 429, 500, 501, 503),
    },
    takes=body(NewJob),
)
_LIST = operation(
    "List the jobs",
    {200: describe_response("The jobs.", JobsBody), **_refusals(400, 401, 403, 503)},
    query("state", "Only jobs in this state.", enum=list(JobState)),
    query("model", "Only jobs of this model or endpoint.", type="string"),
    query("output", "Only jobs that write to this folder, or below it.", type="string"),
    query("metadata", "`NAME=TEXT`: only jobs with that metadata; repeat it to require several.", type="string"),
    query("after", "`next` of the page before.", type="string"),
    query("limit", "How many at most.", type="integer", minimum=1, maximum=MAX_LIMIT, default=_DEFAULT_LIMIT),
)
_SHOW = operation("Look at a job", {200: describe_response("The job.", JobBody), **_refusals(401, 403, 404, 503)})
_DELETE = operation(
    "Delete a job", {204: describe_response("Deleted; its output stays."), **_refusals(401, 403, 404, 409, 503)}
)
_CANCEL = operation(
    "Cancel a job",
    {
        200: describe_response("The job: cancelling, cancelled, or ended before.", JobBody),
        **_refusals(401, 403, 404, 503),
    },
)
_RESUME = operation(
    "Resume a job",
    {
        200: describe_response("The job, planned again or active.", JobBody),
        **_refusals(400, 401, 403, 404, 409, 429, 501, 503),
    },
    takes=body(Changes, required=False),
)
_LOG = operation(
    "Read a job's log", {200: describe_response("Its latest lines.", JobLog), **_refusals(401, 403, 404, 503)}
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
    router = APIRouter(tags=["bulk jobs"])
    _add_validation(router, services, jobs)

    @router.post("/v1/jobs", name="create_job", **_CREATE)
    async def create(request: Request) -> HttpResponse:
        """Checks a job and has it planned; the reply means that model, inputs and output fit together."""
        return await _create(services, jobs, request)

    @router.get("/v1/jobs", name="list_jobs", **_LIST)
    async def list_all(request: Request) -> HttpResponse:
        """Lists the jobs, newest first."""
        return await _list(services, jobs, request)

    @router.get("/v1/jobs/{job_id}", name="job", **_SHOW)
    async def show(job_id: str, request: Request) -> HttpResponse:
        """Returns a job."""
        return _send_record(jobs, await jobs.get(_context(services, request), job_id))

    @router.delete("/v1/jobs/{job_id}", name="delete_job", **_DELETE)
    async def delete(job_id: str, request: Request) -> HttpResponse:
        """Deletes the record of an ended job; its output stays."""
        await jobs.delete(_context(services, request), job_id)
        return HttpResponse(status_code=204)

    @router.post("/v1/jobs/{job_id}/cancel", name="cancel_job", **_CANCEL)
    async def cancel(job_id: str, request: Request) -> HttpResponse:
        """Stops a job, unless it has ended; its parts stay, and it can be resumed."""
        return _send_record(jobs, await jobs.cancel(_context(services, request), job_id))

    @router.post("/v1/jobs/{job_id}/resume", name="resume_job", **_RESUME)
    async def resume(job_id: str, request: Request) -> HttpResponse:
        """Resumes a failed, expired or cancelled job; finished work is kept."""
        context = _context(services, request)
        changes = decode_changes(await _body_of(services, request))
        return _send_record(jobs, await jobs.resume(context, job_id, changes))

    @router.get("/v1/jobs/{job_id}/log", name="job_log", **_LOG)
    async def log(job_id: str, request: Request) -> HttpResponse:
        """Returns the log of a job."""
        lines = await jobs.log(_context(services, request), job_id)
        return send_json(shown_log(lines))

    @router.get("/v1/jobs/{job_id}/events", name="job_events", **_EVENTS)
    async def events(job_id: str, request: Request) -> HttpResponse:
        """Streams each change of a job until its end."""
        return await _events(services, jobs, request, job_id)

    return router


def _add_validation(router: APIRouter, services: Services, jobs: BulkJobs) -> None:
    @router.post("/v1/jobs/validate", name="validate_job", **_VALIDATE)
    async def validate(request: Request) -> HttpResponse:
        """Checks a job and all its input files, and estimates it; nothing is created."""
        context = _context(services, request)
        return send_json(await jobs.validate(context, await _body_of(services, request)))


async def _create(services: Services, jobs: BulkJobs, request: Request) -> HttpResponse:
    context = _context(services, request)
    key = idempotency_key(request)
    resume = _flag(request, "resume")
    ticket = await jobs.create(context, await _body_of(services, request), key or "", resume=resume)
    response = _send_record(jobs, ticket.record, 201 if ticket.is_new else 200)
    response.headers["location"] = job_path(ticket.record)
    if not ticket.is_new:
        response.headers["idempotent-replayed"] = "true"
    return response


async def _list(services: Services, jobs: BulkJobs, request: Request) -> HttpResponse:
    context, query = _context(services, request), request.query_params
    state, after = query.get("state", ""), query.get("after", "")
    given = [_pair(text) for text in query.getlist("metadata")]
    wanted = JobFilter(query.get("model", ""), query.get("output", ""), frozenset(given))
    found, following = await jobs.list(context, state, after, _limit(query.get("limit")), wanted)
    bodies = []
    for record in found:
        with suppress(CorruptEntry):  # a damaged record must not hide other records
            bodies.append(_body(jobs, record))
    return send_json(JobsBody(bodies, following or None))


async def _body_of(services: Services, request: Request) -> bytes:
    text = await read_body(services, request, min(MAX_BODY_BYTES, services.settings.http.max_input_bytes), bytes)
    check_depth(text, services.settings.limits.max_json_depth)
    return text


async def _events(services: Services, jobs: BulkJobs, request: Request, job_id: str) -> HttpResponse:
    context = _context(services, request)
    record = await jobs.get(context, job_id)
    seen = request.headers.get("last-event-id", "")
    if record.is_over and seen == str(record.revision):
        return HttpResponse(status_code=204)
    jobs.check_watchers(context)
    changes = jobs.changes(context, record, HEARTBEAT_S)
    events = (None if one is None else _progress(jobs, one) async for one in changes)
    return event_stream(events, seen)


def _progress(jobs: BulkJobs, record: JobRecord) -> ServerSentEvent:
    return ServerSentEvent("progress", str(record.revision), msgspec.json.encode(_body(jobs, record)))


def _context(services: Services, request: Request) -> CallerContext:
    """Refuses at once while the queue is unreachable."""
    context = authorize(services, request)
    services.requests.delivery.router.check_up(keys.slot(keys.job_places()))
    return context


def _body(jobs: BulkJobs, record: JobRecord) -> JobBody:
    return shown_job(record, jobs.now_s())


def _send_record(jobs: BulkJobs, record: JobRecord, status: int = 200) -> HttpResponse:
    return send_json(_body(jobs, record), status)


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


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequest(f"limit is a number of jobs from 1 to {MAX_LIMIT}; got '{text[:40]}'")
    return int(text)
