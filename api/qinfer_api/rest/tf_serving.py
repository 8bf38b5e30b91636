"""TensorFlow Serving's REST paths: `/v1/models/<name>:predict`, and a model's status and metadata.

A body has rows (`instances` → `predictions`) or columns (`inputs` → `outputs`), and bytes as `{"b64": …}`. A model's
only input or output needs no name. https://www.tensorflow.org/tfx/serving/api_rest
"""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import InvalidRequest, ModelNotFound, QinferError
from qinfer.models.catalog import Catalog
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.models.state import State
from qinfer.tensors import Bytes, Tensor, iter_bytes, pack_bytes
from qinfer.wire.json_pieces import Document, JsonBounds, LongArray
from qinfer_api.http.infer import HttpReply
from qinfer_api.rest.infer import JsonRequest, StreamSink, one_reply, pack_value, reply_of, submit_json, twice_given
from qinfer_api.rest.openapi import Json, body, describe_response, errors, operation
from qinfer_api.rest.plain import innermost, nest, nested_shape
from qinfer_api.rest.services import INFER_ERRORS, REQUEST_TIMEOUT, Services, guarded, send_json, target_of

_ROWS, _COLUMNS, _SIGNATURE, _BASE64 = "instances", "inputs", "signature_name", "b64"
_DEFAULT_SIGNATURE = "serving_default"
_SIGNATURE_PARAMETERS = ("TF_SIGNATURE_DEF", "signature")
_BINARY_SUFFIX = "_bytes"
_STATES = {State.READY: "AVAILABLE", State.LOADING: "LOADING", State.UNLOADING: "UNLOADING", State.UNAVAILABLE: "END"}
_DTYPES = {
    "FP16": "DT_HALF",
    "FP32": "DT_FLOAT",
    "FP64": "DT_DOUBLE",
    "BF16": "DT_BFLOAT16",
    "BYTES": "DT_STRING",
    "BOOL": "DT_BOOL",
    **{f"{kind}{bits}": f"DT_{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)},
}

_BODY: Json = {
    "type": "object",
    "properties": {
        _ROWS: {"description": "Rows: values of the only input, or objects with a value for each input."},
        _COLUMNS: {"description": "Columns: the only input, or an object with each input, with all rows."},
        _SIGNATURE: {"type": "string", "description": "The signature that the model serves, or empty."},
    },
    "example": {"instances": [[1.0, 2.0, 5.0]]},
}
_PREDICT = operation(
    "Run a model, as in TensorFlow Serving",
    {
        200: describe_response(
            "`predictions` for rows, `outputs` for columns.", {"type": "object"}, example={"predictions": [[2.5, 3.0]]}
        ),
        **INFER_ERRORS,
    },
    REQUEST_TIMEOUT,
    takes=body(_BODY),
)
_DESCRIBED = describe_response("As of TensorFlow Serving.", {"type": "object"})
_STATUS = operation("Status of a model, as in TensorFlow Serving", {200: _DESCRIBED, **errors(400, 401, 403, 404)})
_METADATA = operation(
    "Metadata of a model, as in TensorFlow Serving", {200: _DESCRIBED, **errors(400, 401, 403, 404, 503)}
)


class PredictRequest(JsonRequest):
    """A decoded request, in rows or columns."""

    spec: ModelSpec
    in_rows: bool


def tf_serving_routes(services: Services) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["inference"])
    runs, found = guarded(services, "inference"), guarded(services, "metadata", Scope.VIEWER)
    versions = "/v1/models/{model}/versions/{version}"

    @router.post(f"{versions}:predict", name="predict_version", dependencies=runs, **_PREDICT)
    @router.post("/v1/models/{model}:predict", name="predict", dependencies=runs, **_PREDICT)
    async def predict(request: Request) -> HttpResponse:
        """Runs the highest ready version of a model, or the version in the path, on rows or columns."""
        sink = StreamSink()
        pending, asked = await submit_json(services, target_of(request), request, sink, read_predict)
        return await one_reply(services, request, sink, pending, partial(_reply_of, asked))

    @router.get(f"{versions}/metadata", name="tf_version_metadata", dependencies=found, **_METADATA)
    @router.get("/v1/models/{model}/metadata", name="tf_metadata", dependencies=found, **_METADATA)
    async def metadata(request: Request) -> HttpResponse:
        """Describes inputs and outputs of a model as the signature that it serves."""
        name, version = target_of(request)
        served = services.catalog.resolve(*services.dispatcher.endpoints.stable(name, version))
        return send_json(_metadata(name, served.version, served.spec))

    @router.get(versions, name="tf_version_status", dependencies=found, **_STATUS)
    @router.get("/v1/models/{model}", name="tf_status", dependencies=found, **_STATUS)
    async def status(request: Request) -> HttpResponse:
        """Returns the states of a model's versions, or of the version in the path."""
        stable = services.dispatcher.endpoints.stable(*target_of(request))
        return send_json({"model_version_status": _statuses(services.catalog, *stable)})

    return router


async def _reply_of(asked: PredictRequest, response: Response) -> HttpReply:
    return await reply_of(response, asked.request.endpoint, partial(encode_predict, asked, response))


def read_predict(text: Bytes, model: str, version: int, spec: ModelSpec, bounds: JsonBounds) -> PredictRequest:
    """Decodes a body, or raises `InvalidRequest`."""
    read = Document(text, bounds)
    document, left = read.value, bounds.nbytes
    if not isinstance(document, dict) or (_ROWS in document) == (_COLUMNS in document):
        raise InvalidRequest(f"the body must be a JSON object with either '{_ROWS}' (rows) or '{_COLUMNS}' (columns)")
    if (twice := twice_given(read.rest, document)) is not None:
        raise InvalidRequest(f"member '{twice}' is given twice")
    _check_signature(document.get(_SIGNATURE), spec)
    in_rows = _ROWS in document
    columns = _of_rows(document[_ROWS], spec) if in_rows else _of_columns(document[_COLUMNS], spec)
    inputs = {expected.name: expected for expected in spec.inputs}
    for name in columns:
        if name not in inputs:
            raise InvalidRequest(f"unknown input '{name[:100]}'; model '{spec.name}' takes {', '.join(inputs)}")
    tensors = []
    for name, expected in inputs.items():
        if name in columns:
            tensors.append(_tensor(expected, columns[name], left, spec))
            left -= tensors[-1].nbytes
        elif not expected.optional:
            raise InvalidRequest(f"input '{name}' is missing; model '{spec.name}' takes {', '.join(inputs)}")
    read.check()
    request = OutgoingRequest(model=model, inputs=tuple(tensors), version=version)
    return PredictRequest(request, False, spec, in_rows)


def _signature_of(spec: ModelSpec) -> str:
    named = (spec.parameters[key] for key in _SIGNATURE_PARAMETERS if spec.parameters.get(key))
    return next(named, _DEFAULT_SIGNATURE)


def _check_signature(asked: object, spec: ModelSpec) -> None:
    served = _signature_of(spec)
    if asked not in (None, "", served):
        raise InvalidRequest(
            f"{_SIGNATURE} is '{str(asked)[:100]}', and model '{spec.name}' serves '{served}'; leave it out, or serve "
            f"that signature as a model of its own, by the parameter {_SIGNATURE_PARAMETERS[0]}"
        )


def _of_rows(value: Any, spec: ModelSpec) -> Mapping[str, Any]:
    """Returns the values of each input."""
    if isinstance(value, LongArray) and not value.is_text:
        return {_only_input(spec): value}
    if not isinstance(value, list):
        raise InvalidRequest(f"'{_ROWS}' must be a list of rows")
    if not (value and _has_names(value[0])):
        return {_only_input(spec): value}
    names = value[0].keys()
    if not all(_has_names(row) and row.keys() == names for row in value):
        raise InvalidRequest(f"the rows of '{_ROWS}' must be objects with the same members: {', '.join(names)[:200]}")
    return {name: [row[name] for row in value] for name in names}


def _of_columns(value: Any, spec: ModelSpec) -> Mapping[str, Any]:
    return value if _has_names(value) else {_only_input(spec): value}


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() != {_BASE64}


def _only_input(spec: ModelSpec) -> str:
    if len(spec.inputs) != 1:
        names = ", ".join(each.name for each in spec.inputs)
        raise InvalidRequest(f"model '{spec.name}' has several inputs; name them: {names}")
    return spec.inputs[0].name


def _tensor(expected: TensorSpec, value: Any, most: int, spec: ModelSpec) -> Tensor:
    name, wanted = expected.name, (-1, *expected.dims) if spec.max_batch_size else expected.dims
    shape = given = nested_shape(expected, value)
    if len(given) == len(wanted) - 1 and wanted[-1] == 1:
        shape = (*given, 1)  # a scalar of a row
    if len(shape) != len(wanted) or any(want not in (-1, size) for want, size in zip(wanted, shape, strict=True)):
        raise InvalidRequest(f"input '{name}' of model '{spec.name}' has shape {list(wanted)}, got {list(given)}")
    if 0 in shape:
        raise InvalidRequest(f"input '{name}' is empty")
    try:
        return Tensor(name, expected.datatype, shape, _packed(expected, value, shape, most))
    except QinferError as error:
        reason = error.message.removeprefix("Unable to parse 'data': ")
        raise InvalidRequest(f"input '{name}' of model '{spec.name}' is {expected.datatype}: {reason}") from None


def _packed(expected: TensorSpec, value: Any, shape: Sequence[int], most: int) -> Bytes:
    if isinstance(value, list) and any(isinstance(each, LongArray) and not each.is_text for each in value):
        out = bytearray()
        for each in value:
            out += _packed(expected, each, shape[1:], most - len(out))
        return out
    if isinstance(value, LongArray) or not any(isinstance(leaf, dict) for leaf in _leaves(value)):
        return pack_value(expected, value, shape, most)
    if expected.datatype != "BYTES":
        raise InvalidRequest(f"an object such as {{'{_BASE64}': …}} is for strings only")
    return b"".join(bytes(_string(expected, leaf, most)) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _string(expected: TensorSpec, leaf: Any, most: int) -> Bytes:
    if not isinstance(leaf, dict):
        return pack_value(expected, leaf, [1], most)
    if leaf.keys() != {_BASE64}:
        raise InvalidRequest(f"a string is text, or an object with the only member '{_BASE64}'")
    try:
        (text,) = iter_bytes(pack_value(expected, leaf[_BASE64], [1], most))
        return pack_bytes([b64decode(bytes(text), validate=True)])
    except binascii.Error as error:
        raise InvalidRequest(f"'{_BASE64}' is not base64: {error}") from None


def encode_predict(asked: PredictRequest, response: Response) -> bytes:
    """Encodes a response, or raises `QinferError`."""
    tensors = [(tensor, _shape(tensor, asked.spec)) for tensor in response.outputs]
    has_one = len(asked.spec.outputs) == 1
    if has_one or not asked.in_rows:
        whole = {tensor.name: msgspec.Raw(nest(_lists(tensor, shape, asked), shape)) for tensor, shape in tensors}
        value: object = whole if not has_one else next(iter(whole.values()), None) or []
        return msgspec.json.encode({"predictions" if asked.in_rows else "outputs": value})
    counts = {shape[:1] for _, shape in tensors}
    if len(counts) != 1 or counts == {()}:
        raise InvalidRequest(f"the outputs have no common number of rows; send '{_COLUMNS}' in place of '{_ROWS}'")
    columns = {tensor.name: _by_row(tensor, shape, asked) for tensor, shape in tensors}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return msgspec.json.encode({"predictions": rows})


def _shape(tensor: Tensor, spec: ModelSpec) -> tuple[int, ...]:
    """Returns the shape that the model's file has: the protocol adds a dimension to scalars."""
    scalars = {port.name for port in spec.outputs if port.reshape == ()}
    return tensor.shape[:-1] if tensor.name in scalars and tensor.shape[-1:] == (1,) else tensor.shape


def _lists(tensor: Tensor, shape: Sequence[int], asked: PredictRequest) -> list[bytes]:
    if not tensor.name.endswith(_BINARY_SUFFIX) or tensor.datatype != "BYTES":
        return innermost(tensor, shape, strict=asked.strict)
    values = [{_BASE64: b64encode(bytes(element)).decode()} for element in iter_bytes(tensor.data)]
    size = (shape[-1] if shape else 1) or 1
    return [msgspec.json.encode(values[at : at + size]) for at in range(0, len(values), size)]


def _by_row(tensor: Tensor, shape: Sequence[int], asked: PredictRequest) -> list[msgspec.Raw]:
    """Returns the JSON of each row."""
    inner = shape[1:]
    lists = _lists(tensor, shape if inner else (*shape, 1), asked)
    if not inner:
        return [msgspec.Raw(text[1:-1]) for text in lists]
    each = len(lists) // shape[0] if shape[0] else 0
    return [msgspec.Raw(nest(lists[at * each : (at + 1) * each], inner)) for at in range(shape[0])]


def _statuses(catalog: Catalog, name: str, version: int) -> list[Json]:
    states = catalog.status(name).versions
    if version and version not in states:
        raise ModelNotFound(f"model '{name}' has no version {version}")
    return [
        {
            "version": str(number),
            "state": _STATES[state.state],
            "status": {"error_code": "UNKNOWN" if state.reason else "OK", "error_message": state.reason},
        }
        for number, state in sorted(states.items(), reverse=True)
        if version in (0, number)
    ]


def _metadata(name: str, version: int, spec: ModelSpec) -> Json:
    signature = {
        "inputs": {port.name: _described(port, spec) for port in spec.inputs},
        "outputs": {port.name: _described(port, spec) for port in spec.outputs},
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(version)},
        "metadata": {"signature_def": {"signature_def": {_signature_of(spec): signature}}},
    }


def _described(port: TensorSpec, spec: ModelSpec) -> Json:
    dims = [{"size": str(size), "name": ""} for size in port.file_shape(batched=spec.max_batch_size > 0)]
    shape = {"dim": dims, "unknown_rank": False}
    return {"dtype": _DTYPES[port.datatype], "tensor_shape": shape, "name": port.name}
