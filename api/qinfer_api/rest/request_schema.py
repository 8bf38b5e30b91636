"""What `/docs` and `/openapi.json` say about asynchronous requests. Documentation only, as `schema` is."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response as HttpResponse

from qinfer_api.rest.schema import INFER_BODY, INFER_RESPONSES, errors

_ID = "01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.digits"
_EXAMPLE: dict[str, Any] = {
    "id": _ID,
    "model": "digits",
    "version": 1,
    "state": "queued",
    "created_at": "2026-01-31T12:00:00.000Z",
    "deadline_at": "2026-01-31T13:00:00.000Z",
    "finished_at": None,
    "expires_at": None,
    "age_s": 0.25,
    "attempts": 0,
    "error": None,
    "webhook": None,
    "links": {
        "self": f"/v1/requests/{_ID}",
        "result": f"/v1/requests/{_ID}/result",
        "events": f"/v1/requests/{_ID}/events",
    },
}
_EVENT = 'event: state\nid: 1-succeeded\ndata: {"id": "…", "state": "succeeded", …}\n\n'


class RequestError(BaseModel):
    """Why a request has no outputs."""

    code: str = Field(description="A name for the kind of failure, such as `deadline_exceeded`.")
    message: str


class RequestWebhook(BaseModel):
    """Who is told of the end."""

    url: str
    state: str = Field(description="waiting (for the end) | pending | delivered | failed")


class RequestLinks(BaseModel):
    """Paths of the request."""

    self: str
    result: str
    events: str


class RequestBody(BaseModel):
    """An asynchronous request; instants are RFC 3339 in UTC."""

    model_config = ConfigDict(json_schema_extra={"example": _EXAMPLE})

    id: str
    model: str
    version: int
    state: str = Field(
        description="queued | running | succeeded | failed | expired | cancelled; the last four are final"
    )
    created_at: str
    deadline_at: str = Field(description="When it expires, unless it has ended.")
    finished_at: str | None
    expires_at: str | None = Field(description="When its result will be gone.")
    age_s: float = Field(description="Seconds since it was accepted; once it has ended, seconds that it took.")
    attempts: int = Field(description="How often a worker has taken it.")
    error: RequestError | None
    webhook: RequestWebhook | None
    links: RequestLinks


def _header(name: str, description: str, **schema: Any) -> dict[str, Any]:
    schema.setdefault("type", "string")
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


def _told(name: str, description: str) -> dict[str, Any]:
    return {name: {"description": description, "schema": {"type": "string"}}}


PREFER = _header(
    "Prefer",
    "RFC 7240: `respond-async`, `wait=<seconds>`. Either makes the request asynchronous: 202, or the result if it is "
    "there within `wait` seconds.",
    examples=["respond-async, wait=5"],
)
"""The header that `/v2/…/infer` takes too."""

_STATE = _told("Qinfer-Request-State", "The state.")
_REQUEST = {"model": RequestBody, "description": "The request."}

ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {
        "model": RequestBody,
        "description": "Accepted: it will end in exactly one terminal state.",
        "headers": {
            **_told("Location", "The path of the request."),
            **_told("Idempotent-Replayed", "`true`: it had been accepted before."),
            **_told("Preference-Applied", "The preferences that were honoured."),
            **_STATE,
        },
    }
}

SUBMIT: dict[str, Any] = {
    "summary": "Submit a request",
    "status_code": 202,
    "response_class": HttpResponse,
    "responses": {
        **ACCEPTED,
        200: {**INFER_RESPONSES[200], "description": "With `Prefer: wait`: the result."},
        **errors(400, 401, 403, 404, 409, 429, 500, 501, 503),
    },
    "openapi_extra": {
        **INFER_BODY,
        "parameters": [
            *INFER_BODY["parameters"],
            _header("Request-Timeout", "Seconds until it expires.", type="number", exclusiveMinimum=0, examples=[600]),
            _header(
                "Idempotency-Key",
                "Visible ASCII. The same key with the same body is the same request; with another body it is refused.",
                maxLength=255,
            ),
            _header("Request-Id", "An id of your own, unique within the model.", pattern="^[A-Za-z0-9._~-]{1,128}$"),
            _header("Webhook-Url", "Is told of the end by a signed POST.", format="uri"),
            PREFER,
        ],
    },
}

RECORD: dict[str, Any] = {
    "summary": "Look at a request",
    "response_class": HttpResponse,
    "responses": {200: _REQUEST, **errors(401, 403, 404, 503)},
}

RESULT: dict[str, Any] = {
    "summary": "Read a result",
    "response_class": HttpResponse,
    "responses": {
        200: {**INFER_RESPONSES[200], "headers": _STATE},
        202: {
            "model": RequestBody,
            "description": "It has not ended.",
            "headers": {**_told("Retry-After", "When to ask again, in seconds."), **_STATE},
        },
        **errors(400, 401, 403, 404, 410, 500, 503),
    },
    "openapi_extra": {
        "parameters": [
            {
                "name": "wait",
                "in": "query",
                "required": False,
                "schema": {"type": "number", "minimum": 0},
                "description": "Seconds to wait for the end.",
            }
        ]
    },
}

CANCEL: dict[str, Any] = {
    "summary": "Cancel a request",
    "response_class": HttpResponse,
    "responses": {200: {**_REQUEST, "description": "The request as it ended."}, **errors(401, 403, 404, 503)},
}

EVENTS: dict[str, Any] = {
    "summary": "Follow a request",
    "response_class": HttpResponse,
    "responses": {
        200: {
            "description": "Server-sent events: the record at each change, until the end.",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EVENT}},
        },
        204: {"description": "`Last-Event-ID` was the end already: do not come back."},
        **errors(401, 403, 404, 503),
    },
    "openapi_extra": {"parameters": [_header("Last-Event-ID", "The last event that was seen.")]},
}
