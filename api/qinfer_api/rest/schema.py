"""What `/docs` and `/openapi.json` say about bodies. Documentation only: no body is parsed or checked by it."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Scalar = bool | int | float | str

_INPUTS = [{"name": "image", "shape": [1, 4], "datatype": "FP32", "data": [0.0, 0.5, 0.5, 1.0]}]
_REPLY: dict[str, Any] = {
    "id": "42",
    "model_name": "digits",
    "model_version": "1",
    "outputs": [{"name": "label", "shape": [1], "datatype": "INT64", "data": [7]}],
}
_JSON_LENGTH = "Inference-Header-Content-Length"
_IN_SHARED_MEMORY: dict[str, Any] = {
    "shared_memory_region": {"type": "string", "description": "A registered region that has the data."},
    "shared_memory_offset": {"type": "integer", "minimum": 0},
    "shared_memory_byte_size": {"type": "integer", "minimum": 0},
}
_TENSOR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string", "examples": ["FP32", "INT64", "BYTES"]},
        "parameters": {
            "type": "object",
            "properties": {
                "binary_data_size": {"type": "integer", "description": "Bytes after the JSON part."},
                **_IN_SHARED_MEMORY,
            },
        },
        "data": {"type": "array", "items": {}, "description": "Elements in row-major order, nested or flat."},
    },
}
_REQUEST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": {"type": "string", "description": "Echoed in the reply."},
        "parameters": {
            "type": "object",
            "description": "`binary_data_output`, `priority`, `timeout` (µs), and your own.",
        },
        "inputs": {"type": "array", "items": _TENSOR_SCHEMA},
        "outputs": {
            "type": "array",
            "description": "The outputs wanted; all of them if left out.",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "binary_data": {"type": "boolean"},
                            "classification": {
                                "type": "integer",
                                "minimum": 0,
                                "description": "So many best classes, as BYTES `value:index[:label]`.",
                            },
                            **_IN_SHARED_MEMORY,
                        },
                    },
                },
            },
        },
    },
    "example": {"id": "42", "inputs": _INPUTS},
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}

INFER_BODY: dict[str, Any] = {
    "parameters": [
        {
            "name": _JSON_LENGTH,
            "in": "header",
            "required": False,
            "schema": {"type": "integer", "minimum": 0},
            "description": "Length of the JSON part when raw tensor bytes follow it; 0: the body is the data of the "
            "model's one input.",
        }
    ],
    "requestBody": {
        "required": True,
        "description": "JSON, or JSON followed by the raw bytes of each binary input. May be gzip or deflate encoded.",
        "content": {"application/json": {"schema": _REQUEST_SCHEMA}, "application/octet-stream": _BINARY},
    },
}


class ErrorBody(BaseModel):
    """Every error: what happened, the value, and what to do."""

    model_config = ConfigDict(json_schema_extra={"example": {"error": "Request for unknown model: 'x' is not found"}})

    error: str


class OutputTensor(BaseModel):
    """An output of a model; `data`, or `parameters.binary_data_size` bytes after the JSON part."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Scalar] = Field(default_factory=dict)
    data: list[Any] | None = None


class InferBody(BaseModel):
    """The answer of a model."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_extra={"example": _REPLY})

    id: str = Field("", description="The request's id; left out if it had none.")
    model_name: str
    model_version: str
    parameters: dict[str, Scalar] = Field(default_factory=dict, description="What the model says besides its outputs.")
    outputs: list[OutputTensor]


class TensorMetadata(BaseModel):
    """An input or output of a model; -1 in the shape is variable, the batch dimension included."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """What a model is called, takes and gives."""

    name: str
    versions: list[str] = Field(description="The versions that are ready.")
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(BaseModel):
    """What this server is and which extensions of the protocol it has."""

    name: str
    version: str
    extensions: list[str]


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses` of the given error statuses."""
    meaning = {
        400: "The request is wrong, or too large.",
        401: "No API key, or one that is not known.",
        403: "The API key does not allow it.",
        404: "No such model, version or request.",
        409: "The id or the idempotency key belongs to a request with another body.",
        410: "The result was there; its time to live is over.",
        429: "Too much waits, or the tenant's quota is used up: try again after `Retry-After` seconds.",
        500: "A JSON value has the wrong type, or the model failed.",
        501: "The server does not offer this.",
        503: "Not ready, overloaded, past its deadline, or shutting down: try again.",
    }
    return {status: {"model": ErrorBody, "description": meaning[status]} for status in statuses}


INFER_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": InferBody,
        "description": f"The outputs. Binary outputs follow the JSON, whose length `{_JSON_LENGTH}` then tells.",
        "content": {"application/octet-stream": _BINARY},
    },
    **errors(400, 401, 403, 404, 500, 501, 503),
}
