"""What `/docs` and `/openapi.json` say about generate and shared memory. Documentation only, as `schema` is."""

from typing import Any

from pydantic import BaseModel, Field
from starlette.responses import Response as HttpResponse

from qinfer_api.rest.schema import errors

_ANSWER: dict[str, Any] = {"model_name": "digits", "model_version": "1", "label": 7}
_FREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "Echoed in the reply."},
        "parameters": {"type": "object", "description": "More members, taken as those beside it."},
    },
    "additionalProperties": {
        "description": "The elements of the input of that name, a scalar or a flat list; or else a parameter, a scalar."
    },
    "example": {"image": [0.0, 0.5, 0.5, 1.0], "temperature": 0.5},
}
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": _FREE}}}}
_INFER_ERRORS = errors(400, 401, 403, 404, 500, 501, 503)


class Region(BaseModel):
    """A registered region of system shared memory."""

    name: str = Field(description="What requests call it.")
    key: str = Field(description="The name of the shared memory object, as `shm_open` takes it.")
    offset: int = Field(description="Where the region begins in the object, in bytes.")
    byte_size: int


GENERATE: dict[str, Any] = {
    "summary": "Run a model on free-form JSON",
    "response_class": HttpResponse,
    "responses": {
        200: {
            "description": "Each output under its own name, flat; one element is a scalar.",
            "content": {"application/json": {"schema": {"type": "object"}, "example": _ANSWER}},
        },
        **_INFER_ERRORS,
    },
    "openapi_extra": _BODY,
}

GENERATE_STREAM: dict[str, Any] = {
    "summary": "Run a model on free-form JSON, and stream its responses",
    "response_class": HttpResponse,
    "responses": {
        200: {
            "description": 'Server-sent events: one for each response; a later failure is `{"error": …}`.',
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": 'data: {"label": 7, …}\n\n'}},
        },
        **_INFER_ERRORS,
    },
    "openapi_extra": _BODY,
}

REGION_STATUS: dict[str, Any] = {
    "summary": "Look at shared memory regions",
    "response_class": HttpResponse,
    "responses": {200: {"model": list[Region], "description": "The regions."}, **errors(400, 401, 403, 404, 501)},
}

REGION_ACTION: dict[str, Any] = {
    "summary": "Forget shared memory regions",
    "response_class": HttpResponse,
    "responses": {200: {"description": "Done."}, **errors(400, 401, 403, 501)},
}


def _register(summary: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "required": required, "properties": properties}
    return {
        "summary": summary,
        "response_class": HttpResponse,
        "responses": {200: {"description": "Done."}, **errors(400, 401, 403, 500, 501)},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


REGION_REGISTER = _register(
    "Register a system shared memory region",
    ["key", "byte_size"],
    key={"type": "string", "examples": ["/images"], "description": "As `shm_open` takes it."},
    offset={"type": "integer", "minimum": 0, "default": 0},
    byte_size={"type": "integer", "minimum": 1},
)

CUDA_REGISTER = _register(
    "Register a CUDA shared memory region (always refused)",
    ["raw_handle", "device_id", "byte_size"],
    raw_handle={"type": "object", "properties": {"b64": {"type": "string"}}},
    device_id={"type": "integer", "minimum": 0},
    byte_size={"type": "integer", "minimum": 1},
)
