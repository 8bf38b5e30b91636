"""Inference routes: `…/infer` beyond the fast path, `…/generate`, `…/generate_stream` and `…/infer_stream`.

`infer` gets large, compressed, chunked or otherwise special requests; the functions of `http/infer.py` read them. The
first response of `generate_stream` decides the status; later failures come in the stream. `infer_stream` sends each
response as an event with exact tensors.

In free-form JSON (reference §1.18), keys that name inputs become tensors and others parameters, including the members
of `parameters`; the reply has each output under its name.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from qinfer.core.messages import Failure, OutgoingRequest, Response, Scalar
from qinfer.errors import InvalidRequest, MalformedJson, QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.submission.pending import PendingCall, ResponseSink
from qinfer.submission.validate import check_announced
from qinfer.tensors import Bytes, Tensor, element_count
from qinfer.wire.json_pieces import Document, JsonBounds, LongArray
from qinfer.wire.json_scan import repeated_key
from qinfer.wire.kserve_exact import SEQUENCE_KEYS, STRICT_JSON, apply_parameters, custom_parameter, flat, read_input
from qinfer.wire.kserve_json import elements, pack
from qinfer.wire.kserve_types import INPUTS, InputParameters
from qinfer.wire.outputs import OutputPlan
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.cycle import BORROWER
from qinfer_api.http.infer import (
    CACHE_HEADER,
    TARGET_HEADER,
    FutureSink,
    HttpReply,
    UrlTarget,
    answered_by,
    coded_refusal,
    encode_event,
    error_reply,
    event_text,
    failure_reply,
    header_value,
    refusal,
    request_encoding,
)
from qinfer_api.observe.reporting import LOAD_FORMAT_HEADER
from qinfer_api.requests.routes import ACCEPTED, PREFER, submit
from qinfer_api.rest.openapi import Json, body, describe_response, header, operation
from qinfer_api.rest.services import (
    INFER_BODY,
    INFER_ERRORS,
    JSON_LENGTH,
    OUTPUTS,
    REQUEST_TIMEOUT,
    Services,
    answers,
    authorize,
    caller,
    context_of,
    decoded_infer,
    decoded_tensors,
    encoded,
    forward_headers,
    is_strict,
    read_preferences,
    received,
    recheck,
    send,
    send_outputs,
    target_of,
    timeout_of,
    unless_left,
)

_INFER = operation(
    "Run a model", {200: OUTPUTS, 202: ACCEPTED, **INFER_ERRORS}, JSON_LENGTH, REQUEST_TIMEOUT, PREFER, takes=INFER_BODY
)

_FREE: Json = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "Echoed in the reply."},
        "parameters": {"type": "object", "description": "More members, handled like those beside it."},
    },
    "additionalProperties": {
        "description": "The elements of the input of that name, a scalar or a flat list; or else a parameter, a scalar."
    },
    "example": {"image": [0.0, 0.5, 0.5, 1.0], "temperature": 0.5},
}
_OUTPUTS = describe_response(
    "Each output under its own name, flat; one element is a scalar.",
    {"type": "object"},
    example={"model_name": "digits", "model_version": "1", "label": 7},
)
_STREAM = describe_response(
    'Server-sent events: one for each response; a later failure is `{"error": …}`.',
    {"type": "string"},
    kind="text/event-stream",
    example='data: {"label": 7, …}\n\n',
)
_INFER_STREAM = operation(
    "Run a model, and stream its responses",
    {
        200: describe_response(
            "Server-sent events: `response` with the JSON of each, and with the bytes of binary outputs in base64 as a "
            "second line of `data`; `error` with text and code, which ends the stream.",
            {"type": "string"},
            kind="text/event-stream",
            example='event: response\ndata: {"model_name": "digits", …}\n\n',
        ),
        **INFER_ERRORS,
    },
    JSON_LENGTH,
    REQUEST_TIMEOUT,
    takes=INFER_BODY,
)
_LOAD = header(LOAD_FORMAT_HEADER, "Has the reply carry `endpoint-load-metrics` (ORCA): `text` or `json`.")
_GENERATE = operation(
    "Run a model on free-form JSON", {200: _OUTPUTS, **INFER_ERRORS}, REQUEST_TIMEOUT, _LOAD, takes=body(_FREE)
)
_GENERATE_STREAM = operation(
    "Run a model on free-form JSON, and stream its responses",
    {200: _STREAM, **INFER_ERRORS},
    REQUEST_TIMEOUT,
    _LOAD,
    takes=body(_FREE),
)


def infer_routes(services: Services) -> APIRouter:
    """Returns the inference routes."""
    router = APIRouter(tags=["inference"])

    @router.post("/v2/models/{model}/versions/{version}/infer", name="infer_version", **_INFER)
    @router.post("/v2/models/{model}/infer", name="infer", **_INFER)
    async def infer(request: Request) -> HttpResponse:
        """Runs the highest ready version of a model, or the version in the path, on the tensors of the request."""
        return await _infer(services, target_of(request), request)

    @router.post("/v1/models/{model}/versions/{version}/infer_stream", name="infer_stream_version", **_INFER_STREAM)
    @router.post("/v1/models/{model}/infer_stream", name="infer_stream", **_INFER_STREAM)
    async def infer_stream(request: Request) -> HttpResponse:
        """Runs a model as infer does, and streams its responses: one, or those of a decoupled model."""
        return await _infer_stream(services, target_of(request), request)

    @router.post("/v2/models/{model}/versions/{version}/generate", name="generate_version", **_GENERATE)
    @router.post("/v2/models/{model}/generate", name="generate", **_GENERATE)
    async def generate(request: Request) -> HttpResponse:
        """Runs the highest ready version of a model, or the version in the path, on free-form JSON."""
        return await _generate(services, target_of(request), request)

    stream_path = "/v2/models/{model}/versions/{version}/generate_stream"

    @router.post(stream_path, name="generate_stream_version", **_GENERATE_STREAM)
    @router.post("/v2/models/{model}/generate_stream", name="generate_stream", **_GENERATE_STREAM)
    async def generate_stream(request: Request) -> HttpResponse:
        """Runs a model (its highest ready version, or that in the path) on free-form JSON; streams its responses."""
        return await _generate_stream(services, target_of(request), request)

    return router


async def _infer(services: Services, target: UrlTarget, request: Request) -> HttpResponse:
    preferences = read_preferences(request.headers.getlist("prefer"))
    if preferences.is_async:
        return await submit(services, target, request, preferences)
    sink = FutureSink()
    pending, client_id, plan = await _submit_infer(services, target, request, sink)
    try:
        response = await unless_left(request.receive, sink.wait())
    finally:
        services.dispatcher.cancel(pending)
    return await send_outputs(services, request, response, client_id, plan)


async def _submit_infer(
    services: Services, target: UrlTarget, request: Request, sink: ResponseSink
) -> tuple[PendingCall, str, OutputPlan]:
    dispatcher = services.dispatcher
    try:
        context, asked_s = authorize(services, request), timeout_of(request)
        served = dispatcher.resolve(target.model, target.version)
        async with received(services, request, services.settings.http.max_input_bytes) as content:
            decoded, plan = await decoded_infer(services, served, target, request, content)
        answers(request, decoded)
        pending = hold_memory(request, dispatcher.submit(context, decoded, sink, asked_s=asked_s))
        return pending, decoded.client_id, plan
    except QinferError as error:
        raise dispatcher.refuse(target.model, target.version, error, context_of(request)) from None


class _InTurn:
    """Holds the memory of ASGI replies."""

    def is_behind(self) -> bool:
        return False


_IN_TURN = _InTurn()


def hold_memory(request: Request, pending: PendingCall) -> PendingCall:
    """Has a reply hold the memory of a large answer until it is sent."""
    pending.holder = _IN_TURN
    request.scope["state"][BORROWER] = pending
    return pending


_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


J = TypeVar("J", bound="JsonRequest")
ReadJson = Callable[[Bytes, str, int, ModelSpec, JsonBounds], J]
EncodeResponse = Callable[[Response], Awaitable[HttpReply]]


class StreamSink:
    """Any number of responses, for one reader.

    A decoupled model's worker sends a window of them, and waits until they are read.
    """

    frontend = "HTTP"
    no_stream = ""

    def __init__(self) -> None:
        self._responses: asyncio.Queue[Response] = asyncio.Queue()

    def deliver(self, response: Response) -> None:
        """Adds a response."""
        self._responses.put_nowait(response)

    async def responses(self, pending: PendingCall) -> AsyncIterator[Response]:
        """Yields responses; each counts as read when the next is requested."""
        while True:
            response = await self._responses.get()
            if response.says_something:
                yield response
            if response.final:
                return
            if pending.stream is not None:
                pending.stream.took(response.nbytes)


class _Events(StreamingResponse):
    """Cancels its request when it ends."""

    def __init__(
        self, events: AsyncIterator[bytes], first: list[HttpReply], dispatcher: Dispatcher, pending: PendingCall
    ) -> None:
        super().__init__(events, first[0].status if first else 200)
        self.raw_headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        if first and first[0].target:
            self.raw_headers.append((TARGET_HEADER, header_value(first[0].target)))
        if first and first[0].cache:
            self.raw_headers.append((CACHE_HEADER, first[0].cache.encode()))
        if first and first[0].retry_after_s:
            self.raw_headers.append((b"retry-after", b"%d" % first[0].retry_after_s))
        self._dispatcher = dispatcher
        self._pending = pending

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._dispatcher.cancel(self._pending)


async def submit_json(
    services: Services, target: UrlTarget, request: Request, sink: StreamSink, read: "ReadJson[J]"
) -> tuple[PendingCall, J]:
    """Submits a request whose body is JSON that `read` understands."""
    dispatcher = services.dispatcher
    try:
        context, asked_s = authorize(services, request), timeout_of(request)
        served = dispatcher.resolve(target.model, target.version)
        if not _is_identity(request):
            raise InvalidRequest("Unsupported content-encoding, only 'identity' is supported.")
        async with received(services, request, services.settings.http.max_input_bytes) as content:
            decode = partial(_decode, services, served, target, request, content, read)
            asked = await decoded_tensors(services, len(content), len(content), decode)
        answers(request, asked.request)
        return hold_memory(request, dispatcher.submit(context, asked.request, sink, asked_s=asked_s)), asked
    except QinferError as error:
        raise dispatcher.refuse(target.model, target.version, error, context_of(request)) from None


def _decode(
    services: Services, served: ServedVersion, target: UrlTarget, request: Request, content: Bytes, read: "ReadJson[J]"
) -> J:
    asked = read(content, target.model, target.version, served.spec, services.codec.bounds)
    decoded = asked.request
    asked.strict = is_strict(request) or asked.strict
    forward_headers(services, request, decoded)
    answers(request, decoded)
    services.dispatcher.aim(caller(request), decoded, request.headers.get)
    services.dispatcher.check(decoded, served)
    return asked


async def _generate(services: Services, target: UrlTarget, request: Request) -> HttpResponse:
    sink = StreamSink()
    pending, asked = await submit_json(services, target, request, sink, read_generate)
    return await one_reply(services, request, sink, pending, partial(_encoded, asked))


async def one_reply(
    services: Services, request: Request, sink: StreamSink, pending: PendingCall, encode: "EncodeResponse"
) -> HttpResponse:
    """Waits for the only response; several are an error."""
    try:
        responses = await unless_left(request.receive, _all(sink.responses(pending)))
    finally:
        services.dispatcher.cancel(pending)
    failed = [response for response in responses if response.failure is not None]
    if failed or len(responses) == 1:
        reply = send(await encode((failed or responses)[0]))
    else:
        reply = send(error_reply(400, _NOT_ONE))
    reply.headers.update(await _load(services, request))
    return reply


async def _load(services: Services, request: Request) -> dict[str, str]:
    form = request.headers.get(LOAD_FORMAT_HEADER)
    if form is None:
        return {}
    return await services.reporting.load.load_header(services.dispatcher.named(*target_of(request))[0], form)


async def _generate_stream(services: Services, target: UrlTarget, request: Request) -> HttpResponse:
    sink = StreamSink()
    pending, asked = await submit_json(services, target, request, sink, read_generate)
    return await stream(services, request, sink, pending, partial(as_data, partial(_encoded, asked)))


async def _infer_stream(services: Services, target: UrlTarget, request: Request) -> HttpResponse:
    sink = StreamSink()
    pending, client_id, plan = await _submit_infer(services, target, request, sink)
    return await stream(services, request, sink, pending, partial(_inferred, services, client_id, plan))


async def stream(
    services: Services, request: Request, sink: StreamSink, pending: PendingCall, event: EncodeResponse
) -> HttpResponse:
    """The first response decides the status."""
    responses = sink.responses(pending)
    try:
        replies = await unless_left(request.receive, _first(responses, event))
        load = await _load(services, request)
    except BaseException:
        services.dispatcher.cancel(pending)
        raise
    events = _events(replies, responses, event, partial(recheck, services, request))
    reply = _Events(events, replies, services.dispatcher, pending)
    reply.headers.update(load)
    return reply


async def as_data(encode: EncodeResponse, response: Response) -> HttpReply:
    """Encodes a response as an event without a name."""
    reply = await encode(response)
    return msgspec.structs.replace(reply, body=b"data: %b\n\n" % reply.body)


async def _inferred(services: Services, client_id: str, plan: OutputPlan, response: Response) -> HttpReply:
    if response.failure is None:
        reply = await encoded(response.nbytes, plan, encode_event, services.codec, response, client_id, plan)
    else:
        reply = coded_refusal(response.failure)
    name = b"response" if reply.status == 200 else b"error"
    return msgspec.structs.replace(reply, body=event_text(name, reply.body))


async def _all(responses: AsyncIterator[Response]) -> list[Response]:
    read = []
    async for response in responses:
        read.append(response)
        if len(read) > 1:
            break
    return read


async def _first(responses: AsyncIterator[Response], event: EncodeResponse) -> list[HttpReply]:
    async for response in responses:
        return [await event(response)]
    return []


async def _events(
    first: list[HttpReply], responses: AsyncIterator[Response], event: EncodeResponse, check: Callable[[], None]
) -> AsyncIterator[bytes]:
    """Ends with an error once `check` refuses the caller."""
    for reply in first:
        yield reply.body
    try:
        async for response in responses:
            check()
            yield (await event(response)).body
    except QinferError as error:
        yield (await event(Response(request_id="", failure=Failure.from_error(error)))).body


async def _encoded(asked: "JsonRequest", response: Response) -> HttpReply:
    decoded = asked.request
    named = msgspec.structs.replace(response, model=decoded.endpoint) if decoded.endpoint else response
    encode = partial(encode_generate, named, decoded.client_id, strict=asked.strict)
    return await reply_of(response, decoded.endpoint, encode)


async def reply_of(response: Response, endpoint: str, encode: Callable[[], bytes]) -> HttpReply:
    """Encodes a response as JSON, or its failure."""
    target = answered_by(response, endpoint)
    if response.failure is not None:
        return refusal(response.failure, target)
    try:
        body = await encoded(response.nbytes, OutputPlan(), encode)
        return HttpReply(200, body, cache=response.cache, target=target)
    except QinferError as error:
        return failure_reply(error)


def _is_identity(request: Request) -> bool:
    try:
        return request_encoding(request.headers.get("content-encoding")) is None
    except QinferError:
        return False


_NESTED = "parameters"
_CONVERTING = f"Converting keyword: '{_NESTED}': "
_ID = "id"


class JsonRequest(msgspec.Struct):
    """A decoded request; `strict` refuses NaN and infinities."""

    request: OutgoingRequest
    strict: bool


def read_generate(text: Bytes, model: str, version: int, spec: ModelSpec, bounds: JsonBounds) -> JsonRequest:
    """Decodes a generate request."""
    read = Document(text, bounds)
    document, left = _checked(read.value), bounds.nbytes
    inputs = {expected.name: expected for expected in spec.inputs}
    if (twice := twice_given(read.rest, (*document, *document.get(_NESTED, ())), _NESTED)) is not None:
        raise InvalidRequest(f"{'input' if twice in inputs else 'parameter'} '{twice}' already exists in request")
    if _NESTED in document and _NESTED in inputs:
        raise InvalidRequest(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Scalar] = {}
    flags: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for members in (document, document.get(_NESTED, {})):
        for key, value in members.items():
            if key in inputs:
                if key in tensors:
                    raise InvalidRequest(f"input '{key}' already exists in request")
                tensors[key] = _parse_tensor(inputs[key], value, left, spec)
                left -= tensors[key].nbytes
            elif key == STRICT_JSON or (key in SEQUENCE_KEYS and spec.sequences is not None):
                flags[key] = value
            elif members is not document or key not in (_ID, _NESTED):
                parameters[key] = custom_parameter(key, value, "" if members is document else _CONVERTING)
    read.check()
    form = apply_parameters(flags, fields)
    request = OutgoingRequest(
        model=model,
        inputs=tuple(tensors.values()),
        version=version,
        client_id=document.get(_ID, ""),
        parameters=parameters,
        **fields,
    )
    return JsonRequest(request, form.strict)


def encode_generate(response: Response, client_id: str, *, strict: bool = False) -> bytes:
    """Encodes a response; an output of one element becomes a scalar.

    For equal names, the server's members precede the response's parameters, and these outputs.
    """
    rendered: dict[str, Any] = {_ID: client_id} if client_id else {}
    rendered |= {"model_name": response.model, "model_version": str(response.version)}
    members: Mapping[str, Any] = {**response.parameters, **rendered}
    outputs = {
        tensor.name: msgspec.Raw(_encode_elements(tensor, strict=strict))
        for tensor in response.outputs
        if tensor.name not in members
    }
    return msgspec.json.encode({**rendered, **outputs, **members})


def _checked(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise MalformedJson("attempt to get members for non-object")
    if not isinstance(document.get(_ID, ""), str):
        raise MalformedJson("Unable to parse 'id': attempt to access JSON non-string as string")
    if not isinstance(document.get(_NESTED, {}), dict):
        raise MalformedJson(f"Expected JSON object for keyword: '{_NESTED}'")
    return document


def twice_given(text: bytes, keys: Iterable[str], nested: str | None = None) -> str | None:
    """Returns the first key that an object, or its member `nested`, has twice; a fast scan settles nearly all."""
    is_likely = b"\\" in text or any(text.count(b'"%b"' % key.encode()) > 1 for key in keys)  # spellings vary
    return repeated_key(text, nested) if is_likely else None


def _encode_elements(tensor: Tensor, *, strict: bool) -> bytes:
    text = elements(tensor, strict=strict)
    return text[1:-1] if element_count(tensor.shape) == 1 else text


def _parse_tensor(expected: TensorSpec, value: Any, most: int, spec: ModelSpec) -> Tensor:
    count = value.top if isinstance(value, LongArray) else len(value) if isinstance(value, list) else 1
    shape = _shape(expected, count, batched=spec.max_batch_size > 0)
    if isinstance(value, LongArray):
        check_announced(expected.name, expected.datatype, shape, spec)
    return Tensor(expected.name, expected.datatype, tuple(shape), pack_value(expected, value, shape, most))


def pack_value(expected: TensorSpec, value: Any, shape: Sequence[int], most: int) -> Bytes:
    """Packs the value of a member: a list of elements, or one element, which may be a giant string."""
    name, datatype = expected.name, expected.datatype
    if isinstance(value, LongArray) and value.is_text and datatype != "BYTES":
        return pack(read_input({"name": name, "datatype": datatype, "shape": list(shape), "data": value}), most)
    data = value if isinstance(value, LongArray) else flat(value if isinstance(value, list) else [value], datatype)
    return pack(INPUTS[datatype](name, tuple(shape), InputParameters(), data if 0 not in shape else []), most)


def _shape(expected: TensorSpec, count: int, *, batched: bool) -> list[int]:
    """Returns a shape of `count` elements; the innermost variable dimension takes the rest."""
    shape = [-1, *expected.dims] if batched else list(expected.dims)
    for size in shape:
        if size != -1:
            if not size or count % size:
                raise _unfit(expected.name)
            count //= size
    for position in reversed(range(len(shape))):
        if shape[position] == -1:
            shape[position], count = count, 1
    if count != 1:
        raise _unfit(expected.name)
    return shape


def _unfit(name: str) -> InvalidRequest:
    return InvalidRequest(f"The schema can not convert input '{name}' to tensor with proper shape")
