"""What `/docs` and `/openapi.json` say about Label Studio's calls. Documentation only, as `schema` is."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response as HttpResponse

from qinfer_api.labeling.status import MAX_LIMIT, STATES
from qinfer_api.rest.schema import errors

_CONFIG = '<View><Text name="text" value="$text"/><Choices name="label" toName="text">…</Choices></View>'
_TASK: dict[str, Any] = {"id": 7, "project": 12, "data": {"text": "I like it"}}
_RESULT: dict[str, Any] = {
    "id": "q7-0",
    "type": "choices",
    "from_name": "label",
    "to_name": "text",
    "value": {"choices": ["pos"]},
}
_PREDICTION: dict[str, Any] = {"result": [_RESULT], "score": 0.97, "model_version": "sentiment:1"}
_SHOWN: dict[str, Any] = {
    "task": 7,
    "state": "done",
    "error": None,
    "score": 0.97,
    "model_version": "sentiment:1",
    "attempt": 1,
    "updated_at": "2026-01-31T12:00:00.000Z",
    "request": "/v1/models/sentiment/requests/ls-12-7-v1-0123456789abcdef",
}
_COUNTS: dict[str, Any] = {"queued": 4, "processing": 8, "sending": 0, "done": 87, "failed": 1}


class LabelHealth(BaseModel):
    """The model takes tasks."""

    status: str = Field(description="UP")
    model_class: str


class LabelSetup(BaseModel):
    """The project fits."""

    model_version: str = Field(description="What predictions will call the model: `<model>:<version>`.")


class LabelVersions(BaseModel):
    """The versions that are ready, the newest first."""

    versions: list[str]


class LabelPredictions(BaseModel):
    """An answer for each task, in their order."""

    model_config = ConfigDict(json_schema_extra={"example": {"results": [_PREDICTION], "model_version": "m:1"}})

    results: list[dict[str, Any] | list[Any]] = Field(
        description='A prediction; or `{"error": …}`, without `result`, for a task that failed; or `[]` for one whose '
        "prediction is pushed later."
    )
    model_version: str


class LabelEvent(BaseModel):
    """What a webhook has led to."""

    action: str
    queued: int = Field(description="New tasks that are safe in the queue now.")


class LabelCounts(BaseModel):
    """How many tasks are in each state."""

    queued: int
    processing: int
    sending: int
    done: int
    failed: int


class LabelTaskBody(BaseModel):
    """A task whose prediction is pushed."""

    model_config = ConfigDict(json_schema_extra={"example": _SHOWN})

    task: int
    state: str = Field(
        description="queued | processing | sending (scored, and Label Studio has not taken it yet) | done | failed"
    )
    error: str | None = Field(description="Why it failed, or why it is not sent yet.")
    score: float | None
    model_version: str
    attempt: int = Field(description="1, and one more each time that it was ordered again.")
    updated_at: str | None
    request: str = Field(description="The path of its request, while that is known.")


class LabelTasksBody(BaseModel):
    """A page of a project's tasks."""

    model_config = ConfigDict(json_schema_extra={"example": {"counts": _COUNTS, "tasks": [_SHOWN], "next": None}})

    counts: LabelCounts
    tasks: list[LabelTaskBody]
    next: int | None = Field(description="The `after` of the next page; null after the last.")


class LabelOrder(BaseModel):
    """What an order has led to."""

    found: int = Field(description="Tasks that were looked at.")
    queued: int = Field(description="Those of them that are queued now, and were not before.")
    next: int | None = Field(
        description="The `page` to go on with, one that was begun where no more tasks may wait; null when that was all."
    )


def _query(name: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def _body(example: dict[str, Any], required: list[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "required": required, "properties": properties, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_PROJECT = {
    "type": ["string", "integer"],
    "description": "The project's id; Label Studio appends when it was made: `12.1735689600`.",
}
_TASKS = {"type": "array", "items": {"type": "object", "required": ["id", "data"]}}
_REFUSALS = errors(400, 401, 403, 404, 500, 501, 503)


def _about(
    summary: str, status: int, model: type[BaseModel], description: str, *refusals: int, **more: Any
) -> dict[str, Any]:
    return {
        "summary": summary,
        "status_code": status,
        "response_class": HttpResponse,
        "responses": {status: {"model": model, "description": description}, **_REFUSALS, **errors(*refusals)},
        **more,
    }


HEALTH = _about("Is the model up?", 200, LabelHealth, "It takes tasks.")
SETUP = _about(
    "Connect a project",
    200,
    LabelSetup,
    "Mapping, label config and model fit.",
    openapi_extra=_body(
        {"project": "12.1735689600", "schema": _CONFIG},
        ["schema"],
        project=_PROJECT,
        schema={"type": "string", "description": "The project's label config."},
    ),
)
VERSIONS = _about("List the versions", 200, LabelVersions, "The versions.")
PREDICT = _about(
    "Predict tasks",
    200,
    LabelPredictions,
    "The predictions.",
    openapi_extra=_body(
        {"project": "12.1735689600", "label_config": _CONFIG, "tasks": [_TASK]},
        ["tasks"],
        project=_PROJECT,
        label_config={"type": "string"},
        tasks=_TASKS,
        params={"type": ["object", "null"], "description": "With a `context`, a person waits for one task."},
    ),
)
EVENT = _about(
    "Tell of an event",
    201,
    LabelEvent,
    "What it says is safe.",
    openapi_extra=_body(
        {"action": "TASKS_CREATED", "project": {"id": 12}, "tasks": [_TASK]},
        ["action"],
        action={"type": "string", "description": "TASKS_CREATED is acted upon; others are taken and left alone."},
        project={"type": ["object", "integer", "string", "null"]},
        tasks=_TASKS,
    ),
)
TASKS = _about(
    "Where are the tasks of a project?",
    200,
    LabelTasksBody,
    "A page of them, by id.",
    openapi_extra={
        "parameters": [
            _query("state", "Only tasks in this state; a page may have fewer then.", enum=list(STATES)),
            _query("after", "`next` of the page before.", type="integer", minimum=0),
            _query("limit", "How many at most.", type="integer", minimum=1, maximum=MAX_LIMIT, default=100),
        ]
    },
)
TASK = _about("Where is a task?", 200, LabelTaskBody, "The task.")
ORDER = _about(
    "Queue the tasks of a project",
    202,
    LabelOrder,
    "They are queued.",
    429,
    openapi_extra={
        "parameters": [
            _query("page", "`next` of the call before.", type="integer", minimum=1),
            _query("all", "Those too that have predictions of others.", type="boolean", default=False),
        ]
    },
)
