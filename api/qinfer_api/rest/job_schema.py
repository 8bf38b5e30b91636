"""What `/docs` and `/openapi.json` say about bulk jobs. Documentation only, as `schema` is."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response as HttpResponse

from qinfer.bulk.job import COMPRESSIONS, JobState
from qinfer_api.rest.schema import errors

MAX_LIMIT = 1000
"""The most jobs of one listing."""

_ID = "01JX3M3TC8Z6Q5RYB7WS2K4D9F"
_STATES = [state.value for state in JobState]
_ASKED: dict[str, Any] = {
    "model": "digits",
    "inputs": ["s3://bucket/in/*.parquet"],
    "columns": {"image": "pixels"},
    "key": "id",
    "output": {"url": "s3://bucket/out", "format": "parquet"},
}
_EXAMPLE: dict[str, Any] = {
    "id": _ID,
    "model": "digits",
    "version": 1,
    "state": "running",
    "priority": "normal",
    "created_at": "2026-01-31T12:00:00.000Z",
    "started_at": "2026-01-31T12:00:00.500Z",
    "ended_at": None,
    "deadline_at": None,
    "rows": {"total": 1000, "done": 499, "failed": 1},
    "shards": {"total": 4, "done": 2, "failed": 0, "active": 2},
    "progress": 0.5,
    "rows_per_s": 250.0,
    "eta_s": 2.0,
    "error": None,
    "output_url": "s3://bucket/out",
    "manifest_url": None,
    "metadata": {},
    "webhook": None,
    "spec": _ASKED,
    "links": {"self": f"/v1/jobs/{_ID}", "events": f"/v1/jobs/{_ID}/events", "log": f"/v1/jobs/{_ID}/log"},
}
_NAMES = {"type": "array", "items": {"type": "string", "minLength": 1}}
_COLUMNS: dict[str, Any] = {
    "oneOf": [
        {"type": "string", "minLength": 1, "description": "One column."},
        {**_NAMES, "minItems": 1, "description": "Scalar columns: the elements of a row."},
        {
            "type": "object",
            "required": ["columns"],
            "additionalProperties": False,
            "properties": {
                "columns": {**_NAMES, "minItems": 1},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
            },
        },
    ]
}
_OUTPUT: dict[str, Any] = {
    "type": "object",
    "required": ["url"],
    "additionalProperties": False,
    "properties": {
        "url": {"type": "string", "description": "A folder's URL; nothing may be in it yet."},
        "format": {"enum": ["parquet", "arrow"], "default": "parquet"},
        "compression": {
            "enum": sorted({name for names in COMPRESSIONS.values() for name in names}),
            "description": "Arrow has lz4, none and zstd only.",
        },
        "rows_per_part": {"type": "integer", "minimum": 0, "description": "0 = the server decides."},
        "columns": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Output tensor → the name of its column.",
        },
    },
}
_SPEC: dict[str, Any] = {
    "type": "object",
    "required": ["model", "inputs", "output"],
    "additionalProperties": False,
    "properties": {
        "id": {
            "type": "string",
            "pattern": "^[A-Za-z0-9._~-]{1,128}$",
            "description": "An id of your own: the same id with the same job is one job.",
        },
        "model": {"type": "string"},
        "version": {"type": "integer", "minimum": 0, "description": "0 = the newest."},
        "inputs": {
            **_NAMES,
            "minItems": 1,
            "maxItems": 1000,
            "description": "URLs of files, and patterns such as `s3://bucket/in/*.parquet`.",
        },
        "input_format": {"enum": ["", "parquet", "arrow", "csv", "jsonl"], "description": "Empty = by extension."},
        "columns": {
            "type": "object",
            "additionalProperties": _COLUMNS,
            "description": "Input tensor → its columns; by default the column of its name.",
        },
        "key": {"type": "string", "description": "A column that tells rows apart, copied to the output."},
        "passthrough": {**_NAMES, "description": "Columns that are copied to the output; `*` = all."},
        "exclude": {**_NAMES, "description": "With `*`: but for these."},
        "output": _OUTPUT,
        "priority": {"enum": ["high", "normal", "low"], "default": "normal"},
        "error_threshold": {
            "type": "number",
            "minimum": -1,
            "description": "More failed rows than this fail the job: a number, a fraction below 1, or -1 = no limit.",
        },
        "max_parallel": {"type": "integer", "minimum": 0, "description": "Shards that run at a time; 0 = no limit."},
        "deadline_s": {"type": "number", "minimum": 0, "description": "Seconds until it expires; 0 = never."},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "webhook": {"type": "string", "description": "Is told of the end by a signed POST."},
    },
    "example": _ASKED,
}


_CHANGES: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {name: _SPEC["properties"][name] for name in ("error_threshold", "max_parallel", "deadline_s")},
    "example": {"error_threshold": -1},
}


class JobCounts(BaseModel):
    """How many there are, how many are done, and how many have failed; each is in one of these at the end."""

    total: int | None = Field(description="Null until the job is planned.")
    done: int
    failed: int


class JobShardCounts(JobCounts):
    """The same of shards, and how many are on their way."""

    active: int = Field(description="How many wait in the model's queue or are in a worker's hands.")


class JobWebhook(BaseModel):
    """Who is told of the end."""

    url: str
    state: str = Field(description="waiting (for the end) | pending | delivered | failed")


class JobLinks(BaseModel):
    """Paths of the job."""

    self: str
    events: str
    log: str


class JobBody(BaseModel):
    """A bulk job; instants are RFC 3339 in UTC."""

    model_config = ConfigDict(json_schema_extra={"example": _EXAMPLE})

    id: str
    model: str
    version: int
    state: str = Field(description=f"{' | '.join(_STATES)}; after completed, failed, cancelled and expired it is over")
    priority: Literal["high", "normal", "low"]
    created_at: str
    started_at: str | None
    ended_at: str | None
    deadline_at: str | None
    rows: JobCounts
    shards: JobShardCounts
    progress: float = Field(description="The share of its rows that are done or failed, 0 … 1.")
    rows_per_s: float | None
    eta_s: float | None = Field(description="Seconds that the rest will take.")
    error: str | None = Field(description="Why it failed.")
    output_url: str
    manifest_url: str | None = Field(description="The list of the parts, once the job is completed.")
    metadata: dict[str, str]
    webhook: JobWebhook | None
    spec: dict[str, Any] = Field(description="What was asked for, its version resolved, its URLs in one spelling.")
    links: JobLinks


class JobsBody(BaseModel):
    """A page of jobs, the newest first."""

    jobs: list[JobBody]
    next: str | None = Field(description="`after` of the next page; null = this was the last.")


class JobLine(BaseModel):
    """Something that happened to a job."""

    at: str | None
    text: str


class JobLog(BaseModel):
    """The latest lines of a job's log, the oldest first."""

    log: list[JobLine]


def _query(name: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def _header(name: str, description: str, **schema: Any) -> dict[str, Any]:
    schema.setdefault("type", "string")
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


def _told(name: str, description: str) -> dict[str, Any]:
    return {name: {"description": description, "schema": {"type": "string"}}}


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    meaning = {
        400: "A field, a column or a URL can't be; the text names it.",
        403: "The API key does not allow it, or a URL is in no store that this server may use.",
        404: "No such job, model or version.",
        409: "The id belongs to another job, or the job's state does not allow it.",
        501: "This server takes no jobs, or lacks what they need; the text says what.",
    }
    return {status: {**body, **_described(meaning.get(int(status)))} for status, body in errors(*statuses).items()}


def _described(text: str | None) -> dict[str, str]:
    return {} if text is None else {"description": text}


_JOB = {200: {"model": JobBody, "description": "The job."}}

CREATE: dict[str, Any] = {
    "summary": "Create a job",
    "status_code": 201,
    "response_class": HttpResponse,
    "responses": {
        201: {
            "model": JobBody,
            "description": "Created: its model, inputs and output fit together.",
            "headers": _told("Location", "The path of the job."),
        },
        200: {
            "model": JobBody,
            "description": "It had been created before, with the same id or key.",
            "headers": {
                **_told("Location", "The path of the job."),
                **_told("Idempotent-Replayed", "`true`: it had been created before."),
            },
        },
        **_refusals(400, 401, 403, 404, 409, 429, 500, 501, 503),
    },
    "openapi_extra": {
        "parameters": [
            _header(
                "Idempotency-Key",
                "Visible ASCII, instead of an `id`. The same key with the same job is one job.",
                pattern="^[!-~]{1,255}$",
            )
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _SPEC}}},
    },
}
LIST: dict[str, Any] = {
    "summary": "List the jobs",
    "response_class": HttpResponse,
    "responses": {200: {"model": JobsBody, "description": "The jobs."}, **_refusals(400, 401, 403, 503)},
    "openapi_extra": {
        "parameters": [
            _query("state", "Only jobs in this state.", enum=_STATES),
            _query("after", "`next` of the page before.", type="string"),
            _query("limit", "How many at most.", type="integer", minimum=1, maximum=MAX_LIMIT, default=100),
        ]
    },
}
SHOW: dict[str, Any] = {
    "summary": "Look at a job",
    "response_class": HttpResponse,
    "responses": {**_JOB, **_refusals(401, 403, 404, 503)},
}
DELETE: dict[str, Any] = {
    "summary": "Forget a job",
    "status_code": 204,
    "response_class": HttpResponse,
    "responses": {204: {"description": "Forgotten; its output stays."}, **_refusals(401, 403, 404, 409, 503)},
}
CANCEL: dict[str, Any] = {
    "summary": "Cancel a job",
    "response_class": HttpResponse,
    "responses": {
        200: {"model": JobBody, "description": "The job: cancelling, cancelled, or as it had ended before."},
        **_refusals(401, 403, 404, 503),
    },
}
RESUME: dict[str, Any] = {
    "summary": "Resume a job",
    "response_class": HttpResponse,
    "responses": {
        200: {"model": JobBody, "description": "The job, which is planned again or at work."},
        **_refusals(400, 401, 403, 404, 409, 429, 501, 503),
    },
    "openapi_extra": {"requestBody": {"required": False, "content": {"application/json": {"schema": _CHANGES}}}},
}
LOG: dict[str, Any] = {
    "summary": "Read a job's log",
    "response_class": HttpResponse,
    "responses": {200: {"model": JobLog, "description": "Its latest lines."}, **_refusals(401, 403, 404, 503)},
}
EVENTS: dict[str, Any] = {
    "summary": "Follow a job",
    "response_class": HttpResponse,
    "responses": {
        200: {
            "description": "Server-sent events: the job at each change, until its end.",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": 'event: progress\nid: 7\ndata: {"id": "…", "state": "running", …}\n\n',
                }
            },
        },
        204: {"description": "`Last-Event-ID` was the end already: do not come back."},
        **_refusals(401, 403, 404, 503),
    },
    "openapi_extra": {"parameters": [_header("Last-Event-ID", "The last event that was seen.")]},
}
