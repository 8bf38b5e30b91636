"""`POST /models/<name>`: plain JSON, such as `{"text": ["a", "b"]}` → `{"embedding": [[…], […]]}`, for every model.

A member is an input: a list of items, nested as its dimensions, or one item. A body of single items gets single items
back. Tensors of dimensions [1] are scalars, those that `qinfer.base64` names are base64, and null leaves an optional
input out. The responses of a decoupled model are server-sent events.
"""

import binascii
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import InvalidRequest, MalformedJson, QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.models.config.to_spec import BASE64
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import DATATYPES, Bytes, Tensor, from_numpy, iter_bytes, numpy_dtype, pack_bytes, to_numpy
from qinfer.wire.json_pieces import STRUCT_CODES, Document, JsonBounds, LongArray
from qinfer.wire.kserve_exact import SEQUENCE_KEYS, apply_parameters
from qinfer.wire.kserve_json import elements
from qinfer.wire.kserve_types import ELEMENTS, UNPARSABLE
from qinfer.wire.outputs import OutputPlan
from qinfer_api.dispatcher import NO_PLAN, Dispatcher
from qinfer_api.http.infer import HttpReply, UrlTarget, answered_by, failure_reply, refusal
from qinfer_api.rest.infer import (
    JsonRequest,
    StreamSink,
    as_data,
    one_reply,
    pack_value,
    reply_of,
    stream,
    submit_json,
    twice_given,
)
from qinfer_api.rest.openapi import Json, body, describe_response, operation
from qinfer_api.rest.services import INFER_ERRORS, REQUEST_TIMEOUT, Services, target_of
from qinfer_api.shared_memory import Land

_FIELDS: Json = {
    "type": "object",
    "additionalProperties": {"description": "The input of that name: one item, or a list of items."},
    "example": {"text": ["a", "b"]},
}
_PLAIN = operation(
    "Run a model on plain JSON",
    {
        200: describe_response(
            "Each output under its name; of a decoupled model, server-sent events with such an object as `data`.",
            {"type": "object"},
            example={"embedding": [[0.1, 0.2], [0.3, 0.4]]},
        ),
        **INFER_ERRORS,
    },
    REQUEST_TIMEOUT,
    takes=body(_FIELDS),
)
_MOST_DOCUMENTED = 200
_USUAL_DEPTH = 2
_MOST_GROWTH = 4
"""A number of two bytes of JSON is a tensor element of at most eight."""

_HALVES = ("FP16", "BF16")
_FLAGS = {"'sequence_id'": "a string, or an integer of 0 or more"}
_NUMBERS = {"BOOL": "boolean", "FP32": "number", "FP64": "number", "FP16": "number", "BF16": "number"}


class PlainRequest(JsonRequest):
    """A request of plain JSON for a model; `is_one` if it has single items."""

    spec: ModelSpec
    is_one: bool


def plain_routes(services: Services) -> APIRouter:
    """Returns the route."""
    router = APIRouter(tags=["inference"])

    @router.post("/models/{model}", name="plain", **_PLAIN)
    async def plain(request: Request) -> HttpResponse:
        """Runs the highest ready version of a model on the members of a JSON object: its inputs, as items."""
        sink = StreamSink()
        pending, asked = await submit_json(services, target_of(request), request, sink, read_plain)
        encode = partial(_plain_reply, asked)
        if asked.spec.decoupled:
            return await stream(services, request, sink, pending, partial(as_data, encode))
        return await one_reply(services, request, sink, pending, encode)

    return router


async def _plain_reply(asked: PlainRequest, response: Response) -> HttpReply:
    return await reply_of(response, asked.request.endpoint, partial(encode_plain, asked, response))


class PlainForm:
    """The usual bodies of a model, scalars that one typed decoder reads, and its usual answers, one item each.

    All others, and every mistake, are left to `read_plain` and `encode_plain`, with which it agrees.
    """

    def __init__(self, spec: ModelSpec, bounds: JsonBounds) -> None:
        self.spec = spec
        coded, names = _base64(spec), [expected.name for expected in spec.inputs]
        is_usual = spec.max_batch_size and not spec.sequences and bounds.depth >= _USUAL_DEPTH
        for one in spec.inputs:
            is_plain = one.dims == (1,) and one.datatype in ELEMENTS and one.name not in coded
            is_usual = is_usual and is_plain and one.name.isascii() and one.name.isidentifier()
        self._longest = bounds.nbytes // _MOST_GROWTH if is_usual else -1
        self._quoted = [b'"%b"' % name.encode() for name in names]
        fields = [_field(f"f{at}", one) for at, one in enumerate(spec.inputs)] if is_usual else []
        rename = {f"f{at}": name for at, name in enumerate(names)}
        self._decode = msgspec.json.Decoder(
            msgspec.defstruct("Body", fields, rename=rename, forbid_unknown_fields=True, kw_only=True, gc=False)
        ).decode
        strings = sum(one.datatype == "BYTES" for one in spec.inputs)
        self.checked_rows = 0 if spec.is_cached else min(spec.max_batch_size, spec.max_strings // max(strings, 1))
        """The most rows of inputs that are checked as soon as they are read."""
        self._outputs = {
            one.name: (b",%b:" % msgspec.json.encode(one.name), one.datatype, (1, *one.dims))
            for one in spec.outputs
            if len(one.dims) == 1 and one.name not in coded and one.datatype not in _HALVES
        }

    def read(self, text: bytes) -> tuple[tuple[Tensor, ...], bool] | None:
        """Returns the inputs, and whether they are one item; `None` if they are not usual."""
        # A name may have another spelling, or come twice.
        if len(text) > self._longest or b"\\u00" in text or [True for name in self._quoted if text.count(name) > 1]:
            return None
        try:
            values = msgspec.structs.astuple(self._decode(text))
        except UNPARSABLE:
            return None
        rows, tensors = -1, list[Tensor]()
        for expected, value in zip(self.spec.inputs, values, strict=True):
            if value is None:
                continue
            count = len(value) if type(value) is list else 0
            if rows not in (-1, count) or value == []:
                return None
            rows, items = count, value if count else [value]
            try:
                if expected.datatype == "BYTES":
                    data = pack_bytes([item.encode() for item in items])
                else:
                    data = struct.pack(f"<{len(items)}{STRUCT_CODES[expected.datatype]}", *items)
            except (struct.error, OverflowError, UnicodeError):
                return None
            tensors.append(Tensor(expected.name, expected.datatype, (len(items), 1), data))
        return (tuple(tensors), not rows) if tensors else None

    def encode(self, response: Response, *, strict: bool) -> bytes | None:
        """Returns the JSON of one item's outputs; `None` if they are not usual."""
        parts: list[bytes] = []
        for tensor in response.outputs:
            begin, *usual = self._outputs.get(tensor.name, (b"",))
            if usual != [tensor.datatype, tensor.shape]:
                return None
            text = elements(tensor, strict=strict)
            parts += (begin, text[1:-1] if tensor.shape == (1, 1) else text)
        return b"{%b}" % b"".join(parts)[1:]


def _field(name: str, expected: TensorSpec) -> Any:
    kind = ELEMENTS[expected.datatype]
    of: Any = kind | list[kind]  # type: ignore[valid-type]  # as a struct's field
    return (name, of | None, None) if expected.optional else (name, of)


class PlainCodec:
    """The codec of one call of the fast path; `forms` has those of the models, by name."""

    shares_memory = False

    def __init__(self, dispatcher: Dispatcher, bounds: JsonBounds, forms: dict[str, PlainForm]) -> None:
        self._dispatcher, self._bounds, self._forms = dispatcher, bounds, forms

    def decode(
        self,
        target: UrlTarget,
        body: Bytes,
        json_length: str | None,
        tenant: str,
        served: ServedVersion | None = None,
        land: Land | None = None,
    ) -> tuple[OutgoingRequest, OutputPlan]:
        """Decodes a body, or raises `QinferError`."""
        del json_length, tenant, land  # those of binary tensors
        served = served or self._dispatcher.resolve(target.model, target.version)
        spec = served.spec
        form = self._forms.get(spec.name)
        if form is None or form.spec is not spec:
            form = self._forms[spec.name] = PlainForm(spec, self._bounds)
        self._form, found = form, form.read(bytes(body))
        if found is None:
            self._asked = read_plain(body, target.model, target.version, spec, self._bounds)
            return self._asked.request, OutputPlan(strict=self._asked.strict)
        inputs, is_one = found
        request = OutgoingRequest(model=target.model, inputs=inputs, version=target.version)
        if inputs[0].shape[0] <= form.checked_rows:
            request.generation = served.generation
        self._asked = PlainRequest(request, False, spec, is_one)
        return request, NO_PLAN

    def encode(self, response: Response, client_id: str, plan: OutputPlan, *, apart: bool = False) -> HttpReply:
        """Encodes a response or a failure."""
        del client_id, apart
        self._asked.strict = plan.strict
        target = answered_by(response, self._asked.request.endpoint)
        if response.failure is not None:
            return refusal(response.failure, target)
        try:
            body = self._form.encode(response, strict=plan.strict) if self._asked.is_one else None
            body = encode_plain(self._asked, response) if body is None else body
            return HttpReply(200, body, cache=response.cache, target=target)
        except QinferError as error:
            return failure_reply(error)


def read_plain(text: Bytes, model: str, version: int, spec: ModelSpec, bounds: JsonBounds) -> PlainRequest:
    """Decodes a body, or raises `InvalidRequest`, whose message names the field."""
    read = Document(text, bounds)
    document, left = read.value, bounds.nbytes
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body must be a JSON object, such as {_example(spec)}")
    if (twice := twice_given(read.rest, document)) is not None:
        raise InvalidRequest(f"field '{twice}' is given twice")
    inputs = {expected.name: expected for expected in spec.inputs}
    flags = {key: document[key] for key in SEQUENCE_KEYS if key in document and spec.sequences is not None}
    given = {key: value for key, value in document.items() if value is not None and key not in flags}
    _check_names(given, spec)
    shapes = {name: _shape(inputs[name], value, spec) for name, value in given.items()}
    ones = {is_one for _, is_one in shapes.values()}
    if len(ones) > 1:
        one = next(name for name, (_, is_one) in shapes.items() if is_one)
        raise InvalidRequest(f"field '{one}' is one item and others are lists of items; send lists, or one item each")
    tensors = []
    for name, value in given.items():
        tensor = _tensor(inputs[name], value, shapes[name][0], left, spec)
        left -= tensor.nbytes
        tensors.append(tensor)
    read.check()
    fields: dict[str, Any] = {}
    try:
        form = apply_parameters(flags, fields)
    except MalformedJson as error:
        wrong = error.message.removeprefix("Unable to parse ").partition(":")[0]
        raise InvalidRequest(f"field {wrong} must be {_FLAGS.get(wrong, 'true or false')}") from None
    request = OutgoingRequest(model=model, inputs=tuple(tensors), version=version, **fields)
    return PlainRequest(request, form.strict, spec, ones == {True} and spec.max_batch_size > 0)


def _check_names(given: Mapping[str, Any], spec: ModelSpec) -> None:
    known = ", ".join(expected.name for expected in spec.inputs)
    if unknown := given.keys() - {expected.name for expected in spec.inputs}:
        raise InvalidRequest(f"unknown field '{min(unknown)[:100]}'; model '{spec.name}' takes {known}")
    for expected in spec.inputs:
        if expected.name not in given and not expected.optional:
            raise InvalidRequest(f"field '{expected.name}' is missing; send, for example, {_example(spec)}")
    if spec.max_batch_size and spec.inputs and not given:
        raise InvalidRequest(f"no field is given; send one of {known}")


def _shape(expected: TensorSpec, value: Any, spec: ModelSpec) -> tuple[tuple[int, ...], bool]:
    """Returns the shape of a value, and whether it is one item of a model that takes batches."""
    nested = nested_shape(expected, value)
    rank = len(_plain_dims(expected))
    is_one = len(nested) == rank
    if not is_one and (len(nested) != rank + 1 or not spec.max_batch_size):
        raise InvalidRequest(f"field '{expected.name}' must be {_said(expected, spec)}, got {_depth(len(nested))}")
    if 0 in nested:
        raise InvalidRequest(f"field '{expected.name}' is empty; it must be {_said(expected, spec)}")
    item = nested if is_one else nested[1:]
    if any(want not in (-1, size) for want, size in zip(_plain_dims(expected), item, strict=True)):
        raise InvalidRequest(f"field '{expected.name}' must be {_said(expected, spec)}, got items of {list(item)}")
    rows = () if not spec.max_batch_size else (1,) if is_one else nested[:1]
    return (*rows, *(item or (1,))), is_one


def nested_shape(expected: TensorSpec, value: Any) -> tuple[int, ...]:
    """Returns the lengths of a value's nested lists, which must be even."""
    if isinstance(value, LongArray):
        return _nested_long(expected, value)
    if not isinstance(value, list):
        return ()
    inner = {nested_shape(expected, each) for each in value}
    if len(inner) > 1:
        raise InvalidRequest(f"field '{expected.name}' has lists of different lengths, or lists beside values")
    return (len(value), *(inner.pop() if inner else ()))


def _nested_long(expected: TensorSpec, value: LongArray) -> tuple[int, ...]:
    if value.is_text:
        return ()
    if value.least == value.most:
        return (value.top,)
    if expected.datatype == "BYTES":
        raise InvalidRequest(f"field '{expected.name}' is too long for lists of strings in plain JSON; send it to /v2")
    skeleton = value.skeleton
    depth = len(skeleton) - len(skeleton.lstrip(b"["))
    row = skeleton[depth - 1 : skeleton.find(b"]") + 1]
    shape: tuple[int, ...] = (row.count(b",") + 1,)
    while len(shape) < depth:
        level = len(shape)
        end = skeleton.find(b"]" * (level + 1)) + level
        count = max((end - (depth - level) + 1) // (len(row) + 1), 0)
        row, shape = b"[%b]" % b",".join([row] * count), (count, *shape)
    if row != skeleton:
        raise InvalidRequest(f"field '{expected.name}' has lists of different lengths, or lists beside values")
    return shape


def plain_tensor(expected: TensorSpec, value: Any, most: int, spec: ModelSpec) -> Tensor:
    """Returns one input, or raises `InvalidRequest`."""
    return _tensor(expected, value, _shape(expected, value, spec)[0], most, spec)


def _tensor(expected: TensorSpec, value: Any, shape: Sequence[int], most: int, spec: ModelSpec) -> Tensor:
    name, datatype = expected.name, expected.datatype
    try:
        packed = _packed(expected, value, shape, most)
    except QinferError as error:
        reason = error.message.removeprefix("Unable to parse 'data': ")
        raise InvalidRequest(f"field '{name}' must be {_said(expected, spec)}: {reason}") from None
    if name in _base64(spec):
        try:
            packed = pack_bytes([b64decode(bytes(element), validate=True) for element in iter_bytes(packed)])
        except binascii.Error as error:
            raise InvalidRequest(f"field '{name}' must be base64: {error}") from None
    return Tensor(name, datatype, tuple(shape), packed)


def _packed(expected: TensorSpec, value: Any, shape: Sequence[int], most: int) -> Bytes:
    """Packs a value; numbers of 16 bits, which JSON has only here, are rounded from 64 bits.

    Raises `QinferError`.
    """
    if expected.datatype not in _HALVES:
        return pack_value(expected, value, shape, most)
    wide = np.frombuffer(pack_value(replace(expected, datatype="FP64"), value, shape, 4 * most), "<f8")
    with np.errstate(over="ignore"):
        narrow = wide.astype(numpy_dtype(expected.datatype))
    if np.any(np.isinf(narrow) & np.isfinite(wide)):
        raise InvalidRequest(f"it has a value outside the range of {expected.datatype}")
    return from_numpy(expected.name, narrow, expected.datatype).data


def encode_plain(asked: PlainRequest, response: Response) -> bytes:
    """Encodes the outputs of a response, or raises `QinferError`."""
    return msgspec.json.encode(plain_outputs(asked, response))


def plain_outputs(asked: PlainRequest, response: Response) -> dict[str, msgspec.Raw]:
    """Returns the JSON of each output, or raises `QinferError`."""
    spec = asked.spec
    scalars = {output.name for output in spec.outputs if output.dims == (1,)}
    coded = _base64(spec)
    rendered = {}
    for each in response.outputs:
        tensor = each
        if each.datatype in _HALVES:
            tensor = from_numpy(each.name, to_numpy(each).astype("<f4"))
        shape = tensor.shape[:-1] if tensor.name in scalars and tensor.shape[-1:] == (1,) else tensor.shape
        if asked.is_one and shape[:1] == (1,):
            shape = shape[1:]
        items = _coded_rows(tensor, shape) if tensor.name in coded else innermost(tensor, shape, strict=asked.strict)
        rendered[tensor.name] = msgspec.Raw(nest(items, shape))
    return rendered


def innermost(tensor: Tensor, shape: Sequence[int], *, strict: bool) -> list[bytes]:
    """Returns the JSON of each innermost list of a tensor in this shape."""
    if 0 in tensor.shape:
        return []
    size = shape[-1] if shape else 1
    if tensor.datatype == "BYTES":
        whole = elements(tensor, strict=strict)
        if prod(tensor.shape) == size:
            return [whole]
        values = msgspec.json.decode(whole)
        return [msgspec.json.encode(values[at : at + size]) for at in range(0, len(values), size)]
    step = size * DATATYPES[tensor.datatype].itemsize
    view = memoryview(tensor.data)
    cut = (Tensor(tensor.name, tensor.datatype, (size,), view[at : at + step]) for at in range(0, len(view), step))
    return [elements(row, strict=strict) for row in cut]


def _coded_rows(tensor: Tensor, shape: Sequence[int]) -> list[bytes]:
    values, size = (
        [b64encode(bytes(element)).decode() for element in iter_bytes(tensor.data)],
        shape[-1] if shape else 1,
    )
    return [msgspec.json.encode(values[at : at + size]) for at in range(0, len(values), size or 1)]


def nest(rows: list[bytes], shape: Sequence[int]) -> bytes:
    """Joins the JSON of innermost lists to that of the whole shape."""
    if not shape:
        return rows[0][1:-1]
    if not shape[0]:
        return b"[]"
    if 0 in shape:
        return b"[%b]" % b",".join([nest(rows, shape[1:])] * shape[0])
    for size in reversed(shape[:-1]):
        rows = [b"[%b]" % b",".join(rows[at : at + size]) for at in range(0, len(rows), size)]
    return rows[0]


def _plain_dims(tensor: TensorSpec) -> tuple[int, ...]:
    return () if tensor.dims == (1,) else tensor.dims


def _base64(spec: ModelSpec) -> frozenset[str]:
    return frozenset(spec.parameters.get(BASE64, "").split(","))


def _said(expected: TensorSpec, spec: ModelSpec) -> str:
    kind = _kind(expected, spec)
    dims = _plain_dims(expected)
    article = "an" if kind == "integer" else "a"
    item = f"a list of {kind}s of shape {list(dims)}" if dims else f"{article} {kind}"
    return f"{item}, or a list of such items" if spec.max_batch_size else item


def _kind(tensor: TensorSpec, spec: ModelSpec) -> str:
    if tensor.datatype == "BYTES":
        return "base64 string" if tensor.name in _base64(spec) else "string"
    return _NUMBERS.get(tensor.datatype, "integer")


def _depth(depth: int) -> str:
    return "a single value" if not depth else "a list" if depth == 1 else f"lists nested {depth} deep"


def _example(spec: ModelSpec) -> str:
    return msgspec.json.encode(_example_of(spec.inputs, spec)).decode()


def _example_of(tensors: Iterable[TensorSpec], spec: ModelSpec) -> Json:
    """Returns short items; an optional input is left out."""
    known = {"base64 string": "YQ==", "string": "a", "boolean": True, "integer": 1, "number": 0.5}

    def item(tensor: TensorSpec) -> Any:
        value: Any = known[_kind(tensor, spec)]
        for size in reversed(_plain_dims(tensor)):
            value = [value] * (2 if size == -1 else min(size, 4))
        return [value] if spec.max_batch_size else value

    return {tensor.name: item(tensor) for tensor in tensors if not tensor.optional}


def _of_sequence(spec: ModelSpec) -> Json:
    return {} if spec.sequences is None else {"sequence_id": 1, "sequence_start": True}


def with_models(document: Callable[[], Json], specs: Callable[[], Mapping[str, ModelSpec]]) -> Callable[[], Json]:
    """Returns `app.openapi` with the plain JSON of each model, as far as they are known now."""

    def openapi() -> Json:
        whole = document()
        known = sorted(specs().items())[:_MOST_DOCUMENTED]
        paths = {f"/models/{name}": {"post": _documented(spec)} for name, spec in known}
        return whole | {"paths": whole["paths"] | paths}

    return openapi


def _documented(spec: ModelSpec) -> Json:
    kind = "text/event-stream" if spec.decoupled else "application/json"
    answer = {"type": "string"} if spec.decoupled else _schema(spec.outputs, spec)
    return {
        "tags": ["models"],
        "summary": f"Run model {spec.name}",
        "operationId": f"plain_{spec.name}",
        "requestBody": body(
            _schema(spec.inputs, spec) | {"example": _of_sequence(spec) | _example_of(spec.inputs, spec)}
        ),
        "responses": {
            "200": describe_response("The outputs.", answer, kind=kind),
            "400": describe_response("The request is wrong.", {"$ref": "#/components/schemas/ErrorBody"}),
        },
    }


def _schema(tensors: Sequence[TensorSpec], spec: ModelSpec) -> Json:
    properties = {tensor.name: _property(tensor, spec) for tensor in tensors}
    needed = [tensor.name for tensor in tensors if not tensor.optional]
    return {"type": "object", "properties": properties, "required": needed}


def _property(tensor: TensorSpec, spec: ModelSpec) -> Json:
    kind = _kind(tensor, spec)
    found: Json = {"type": "string", "contentEncoding": "base64"} if kind == "base64 string" else {"type": kind}
    for size in reversed(_plain_dims(tensor)):
        found = {"type": "array", "items": found} | ({} if size == -1 else {"minItems": size, "maxItems": size})
    if not spec.max_batch_size:
        return found
    return {"anyOf": [{"type": "array", "items": found, "minItems": 1}, found]}
