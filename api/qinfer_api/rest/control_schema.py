"""What `/docs` and `/openapi.json` say of statistics, repository and settings. Documentation only, as `schema` is."""

from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response as HttpResponse

from qinfer_api.rest.schema import errors


class Duration(BaseModel):
    """How often something happened, and for how many nanoseconds altogether."""

    count: int
    ns: int


class InferStats(BaseModel):
    """Requests by how they ended, and where their time went."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchStats(BaseModel):
    """Executions of one batch size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class VersionStats(BaseModel):
    """What one model version did."""

    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since the epoch; 0 = never.")
    inference_count: int = Field(description="Rows executed.")
    execution_count: int = Field(description="Batches executed.")
    inference_stats: InferStats
    response_stats: dict[str, Any] = Field(description="Of decoupled models; there are none.")
    batch_stats: list[BatchStats]
    memory_usage: list[Any]


class ModelStats(BaseModel):
    """What model versions did."""

    model_stats: list[VersionStats]


class IndexLine(BaseModel):
    """A version of a model; a model that was never loaded has its name only."""

    name: str
    version: str = ""
    state: Literal["", "UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"] = ""
    reason: str = Field("", description="Why it is not READY.")


class LogValues(BaseModel):
    """What is logged."""

    log_file: str = Field(description="Always empty: logs go to stderr.")
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int = Field(ge=0, description="Above 0, what is for debugging is logged.")
    log_format: Literal["default", "ISO8601"]


class TraceValues(BaseModel):
    """What is to be traced."""

    trace_level: list[Literal["OFF", "TIMESTAMPS", "TENSORS"]]
    trace_rate: str
    trace_count: str
    log_frequency: str
    trace_file: str = Field(description="The name of the file; empty: no traces are written here.")
    trace_mode: str


def _body(properties: dict[str, Any], *, required: bool, example: object) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "example": example}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def _nullable(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": [kind, "null"], **more}


_DONE: dict[int | str, dict[str, Any]] = {200: {"description": "Done."}}
_PARAMETERS = {
    "type": "object",
    "properties": {"config": {"type": "string", "description": "A model configuration in JSON."}},
    "additionalProperties": {"type": "string", "description": "`file:<version>/<name>`: the file in base64."},
}
_UNLOAD_PARAMETERS = {"type": "object", "properties": {"unload_dependents": {"type": "boolean"}}}
_NUMBER = {"pattern": "^[+-]?[0-9]+$"}

INDEX: dict[str, Any] = {
    "summary": "List the models",
    "response_class": HttpResponse,
    "responses": {200: {"model": list[IndexLine]}, **errors(400, 401, 403, 500, 501, 503)},
    "openapi_extra": _body({"ready": {"type": "boolean"}}, required=False, example={"ready": True}),
}
LOAD: dict[str, Any] = {
    "summary": "Load a model",
    "response_class": HttpResponse,
    "responses": {**_DONE, **errors(400, 401, 403, 500, 501, 503)},
    "openapi_extra": _body(
        {"parameters": _PARAMETERS}, required=False, example={"parameters": {"config": '{"max_batch_size": 16}'}}
    ),
}
UNLOAD: dict[str, Any] = {
    "summary": "Unload a model",
    "response_class": HttpResponse,
    "responses": {**_DONE, **errors(400, 401, 403, 500, 501, 503)},
    "openapi_extra": _body(
        {"parameters": _UNLOAD_PARAMETERS}, required=False, example={"parameters": {"unload_dependents": False}}
    ),
}
LOG_READ: dict[str, Any] = {
    "response_class": HttpResponse,
    "responses": {200: {"model": LogValues}, **errors(401, 403, 503)},
}
LOG_UPDATE: dict[str, Any] = {
    "response_class": HttpResponse,
    "responses": {200: {"model": LogValues}, **errors(400, 401, 403, 500, 501, 503)},
    "openapi_extra": _body(
        {
            "log_info": _nullable("boolean"),
            "log_warning": _nullable("boolean"),
            "log_error": _nullable("boolean"),
            "log_verbose_level": _nullable("integer", minimum=0),
            "log_format": _nullable("string", enum=["default", "ISO8601", None]),
        },
        required=True,
        example={"log_verbose_level": 1},
    ),
}
TRACE_READ: dict[str, Any] = {
    "response_class": HttpResponse,
    "responses": {200: {"model": TraceValues}, **errors(400, 401, 403, 503)},
}
TRACE_UPDATE: dict[str, Any] = {
    "response_class": HttpResponse,
    "responses": {200: {"model": TraceValues}, **errors(400, 401, 403, 500, 501, 503)},
    "openapi_extra": _body(
        {
            "trace_level": _nullable("array", items={"enum": ["OFF", "TIMESTAMPS", "TENSORS"]}),
            "trace_rate": _nullable("string", **_NUMBER),
            "trace_count": _nullable("string", **_NUMBER),
            "log_frequency": _nullable("string", **_NUMBER),
        },
        required=True,
        example={"trace_level": ["TIMESTAMPS"], "trace_rate": "100"},
    ),
}
