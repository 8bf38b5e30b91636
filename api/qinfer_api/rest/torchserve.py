"""TorchServe's inference paths: `/predictions/<name>`, with or without a version, and `/ping`.

A model has no handler here: its inputs take the place of a handler's `data` and `body`. A BYTES input takes the body,
or a field of a form, as it is; others take JSON. https://github.com/pytorch/serve/blob/master/docs/inference_api.md
"""

from collections.abc import Mapping
from email.message import Message
from email.parser import BytesHeaderParser
from functools import partial
from urllib.parse import parse_qsl

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Bytes, Tensor, iter_bytes, pack_bytes
from qinfer.wire.json_pieces import Document, JsonBounds
from qinfer_api import about
from qinfer_api.http.infer import HttpReply, UrlTarget, parse_version
from qinfer_api.rest.infer import StreamSink, one_reply, reply_of, submit_json
from qinfer_api.rest.openapi import Json, describe_response, operation
from qinfer_api.rest.plain import PlainRequest, plain_outputs, plain_tensor, read_plain
from qinfer_api.rest.services import INFER_ERRORS, REQUEST_TIMEOUT, Services, guarded, send_json

_FORM, _PARTS = "application/x-www-form-urlencoded", "multipart/form-data"
_MOST_FIELDS = 100
_UNNAMED = ("data", "body")
"""TorchServe's names of a request's data, which stand for a model's only input."""

_BINARY: Json = {"schema": {"type": "string", "format": "binary"}}
_PREDICT = operation(
    "Run a model on one item, as in TorchServe",
    {
        200: describe_response("The only output: text as it is, others as JSON; or an object with each output.")
        | {"content": {"application/json": {"schema": {}}, "text/plain": _BINARY, "application/octet-stream": _BINARY}},
        **INFER_ERRORS,
    },
    REQUEST_TIMEOUT,
    takes={
        "required": True,
        "description": "The data of the only input, or JSON or a form with each input.",
        "content": {"application/octet-stream": _BINARY, "application/json": {"schema": {}}},
    },
)
_PING = operation(
    "Health, as in TorchServe",
    {
        200: describe_response("Requests are answered.", {"type": "object"}, example={"status": "Healthy"}),
        500: describe_response("Not yet.", {"type": "object"}, example={"status": "Unhealthy"}),
    },
)


def torchserve_routes(services: Services) -> APIRouter:
    """Returns the routes."""
    router = APIRouter(tags=["inference"])
    runs = guarded(services, "inference")

    # `curl -T` sends PUT
    @router.put("/predictions/{model}/{version}", name="put_prediction_version", dependencies=runs, **_PREDICT)
    @router.put("/predictions/{model}", name="put_prediction", dependencies=runs, **_PREDICT)
    @router.post("/predictions/{model}/{version}", name="prediction_version", dependencies=runs, **_PREDICT)
    @router.post("/predictions/{model}", name="prediction", dependencies=runs, **_PREDICT)
    async def prediction(request: Request) -> HttpResponse:
        """Runs the highest ready version of a model, or the version in the path (`1.0` is 1), on one item."""
        sink, path = StreamSink(), request.path_params
        version = parse_version(path["version"].removesuffix(".0")) if "version" in path else 0
        read = partial(read_prediction, request.headers.get("content-type", ""))
        pending, asked = await submit_json(services, UrlTarget(path["model"], version), request, sink, read)
        reply = await one_reply(services, request, sink, pending, partial(_torch_reply, asked))
        if reply.status_code == 200 and _is_text(asked):
            reply.headers["content-type"] = _kind_of(bytes(reply.body))
        return reply

    @router.get("/ping", dependencies=guarded(services, "health"), **_PING)
    async def ping() -> HttpResponse:
        """Returns 200 once a model is ready, in strict mode while all are."""
        dispatcher = services.dispatcher
        is_ready = about.is_server_ready(services.settings, services.catalog, draining=dispatcher.draining)
        return send_json({"status": "Healthy" if is_ready else "Unhealthy"}, 200 if is_ready else 500)

    return router


def _kind_of(text: bytes) -> str:
    try:
        text.decode()
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "text/plain; charset=utf-8"


async def _torch_reply(asked: PlainRequest, response: Response) -> HttpReply:
    return await reply_of(response, asked.request.endpoint, partial(encode_prediction, asked, response))


def read_prediction(
    kind: str, text: Bytes, model: str, version: int, spec: ModelSpec, bounds: JsonBounds
) -> PlainRequest:
    """Decodes a body of a content type, or raises `InvalidRequest`."""
    only = spec.inputs[0] if len(spec.inputs) == 1 else None
    fields = _parts_of(kind, text)
    if fields is None and (only is None or only.datatype != "BYTES"):
        is_object = bytes(text[:_MOST_FIELDS]).lstrip()[:1] == b"{"
        whole = text if is_object or only is None else b"{%b:%b}" % (msgspec.json.encode(only.name), bytes(text))
        return read_plain(whole, model, version, spec, bounds)
    named = {expected.name: expected for expected in spec.inputs}
    if only is not None:
        named = dict.fromkeys(_UNNAMED, only) | named
    tensors = []
    for name, content in ({_UNNAMED[0]: text} if fields is None else fields).items():
        if name not in named:
            raise InvalidRequest(f"unknown field '{name[:100]}'; model '{spec.name}' takes {', '.join(named)}")
        tensors.append(_tensor(named[name], content, spec, bounds))
    request = OutgoingRequest(model=model, inputs=tuple(tensors), version=version)
    return PlainRequest(request, False, spec, spec.max_batch_size > 0)


def _main(kind: str) -> str:
    return kind.partition(";")[0].strip().lower()


def _parts_of(kind: str, text: Bytes) -> Mapping[str, Bytes] | None:
    """Returns the fields of a form; `None` if the body is none, as where `curl -d` sends JSON under a form's name."""
    if _main(kind) == _FORM and bytes(text[:1]) not in (b"{", b"["):
        try:
            pairs = parse_qsl(bytes(text).decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError as error:
            raise InvalidRequest(f"the form can't be read: {error}") from None
        return {name: value.encode() for name, value in pairs}
    return _parts(kind, bytes(text)) if _main(kind) == _PARTS else None


def _parts(kind: str, text: bytes) -> Mapping[str, Bytes]:
    """Returns the parts of a form (RFC 7578)."""
    head = Message()
    head["content-type"] = kind
    boundary = head.get_boundary()
    if not boundary:
        raise InvalidRequest(f"content-type '{kind[:200]}' has no boundary")
    _, *parts = (b"\r\n" + text).split(b"\r\n--" + boundary.encode(), _MOST_FIELDS + 1)
    if len(parts) > _MOST_FIELDS or not parts or not parts.pop().startswith(b"--"):
        raise InvalidRequest(f"the form is cut off, or has more than {_MOST_FIELDS} fields")
    found = {}
    for part in parts:
        about_part, _, content = part.partition(b"\r\n\r\n")
        name = BytesHeaderParser().parsebytes(about_part.lstrip()).get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise InvalidRequest("a part of the form has no name")
        if name in found:
            raise InvalidRequest(f"field '{name[:100]}' is given twice; send one item with each request")
        found[name] = content
    return found


def _tensor(expected: TensorSpec, content: Bytes, spec: ModelSpec, bounds: JsonBounds) -> Tensor:
    if expected.datatype != "BYTES":
        read = Document(content, bounds)
        tensor = plain_tensor(expected, read.value, bounds.nbytes, spec)
        read.check()
        return tensor
    if any(size not in (1, -1) for size in expected.dims):
        raise InvalidRequest(f"input '{expected.name}' takes strings of shape {list(expected.dims)}; send JSON")
    shape = (1,) * (len(expected.dims) + (spec.max_batch_size > 0))
    return Tensor(expected.name, "BYTES", shape, pack_bytes([bytes(content)]))


def encode_prediction(asked: PlainRequest, response: Response) -> bytes:
    """Encodes a response, or raises `QinferError`."""
    if _is_text(asked):
        return b"".join(bytes(element) for output in response.outputs for element in iter_bytes(output.data))
    found = plain_outputs(asked, response)
    return msgspec.json.encode(next(iter(found.values()), []) if len(asked.spec.outputs) == 1 else found)


def _is_text(asked: PlainRequest) -> bool:
    """Returns whether the answer is one string."""
    spec = asked.spec
    has_one = len(spec.outputs) == 1 and spec.outputs[0].datatype == "BYTES" and spec.outputs[0].dims == (1,)
    return has_one and (asked.is_one or not spec.max_batch_size)
