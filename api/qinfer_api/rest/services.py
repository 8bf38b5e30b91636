"""Helpers of all routes; slow steps (decompression, a large body or reply) run in a thread."""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar, TypeVarTuple

import msgspec
from fastapi import Depends, Security
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse
from starlette.types import Receive

from qinfer.core.api_keys import Scope
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.core.settings import Settings
from qinfer.errors import DeliveryError, Forbidden, InvalidRequest, QinferError, Unauthorized
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.control import ModelControl
from qinfer.queue import keys
from qinfer.queue.entries import EntryAddress
from qinfer.queue.values import Room
from qinfer.tensors import Bytes
from qinfer.wire.json_scan import LARGE_BYTES, check_size
from qinfer.wire.kserve_types import InputParameters, OutputParameters
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import ANONYMOUS, CallerContext, Restrictions, administrative, caller_of
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.cycle import BORROWER, CLOSE, IN_REPLY_TO, ON_LEAVE, SENT_HEADERS
from qinfer_api.http.head import MAX_FAST_BYTES
from qinfer_api.http.infer import (
    JSON_LENGTH_HEADER,
    TIMEOUT_HEADER,
    HttpReply,
    InferCodec,
    UrlTarget,
    decompress,
    encode_list,
    encoder_of,
    error_reply,
    event_text,
    failure_reply,
    forwarded,
    is_slow,
    parse_json_length,
    parse_version,
    read_seconds,
    request_encoding,
    response_encoding,
    room_of,
    strictly,
    too_large,
    wants_strict,
    with_headers,
)
from qinfer_api.observe.reporting import Reporting
from qinfer_api.receiving import SMALL_BYTES, AnswerMemory, ReceivingBudget, Reservation
from qinfer_api.requests.service import AsyncRequests
from qinfer_api.rest.openapi import Json, errors, header
from qinfer_api.shared_memory import forgets_regions
from qinfer_api.status import decode_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The use cases behind the routes."""

    settings: Settings
    dispatcher: Dispatcher
    requests: AsyncRequests
    catalog: Catalog
    codec: InferCodec
    forward: re.Pattern[str] | None
    models: ModelControl
    reporting: Reporting
    restrictions: Restrictions
    receiving: ReceivingBudget


def context_of(request: Request) -> CallerContext:
    """Returns the caller named by the headers, unchecked."""
    return caller_of(request.headers.get, request.headers.getlist)


def peer_of(request: Request) -> str:
    """Returns the client's address, or empty."""
    return "" if request.client is None else request.client.host


def target_of(request: Request) -> UrlTarget:
    """Returns the model and version in a path."""
    path = request.path_params
    return UrlTarget(path["model"], parse_version(path["version"]) if "version" in path else 0)


def idempotency_key(request: Request) -> str | None:
    """Returns the validated `Idempotency-Key`, if there is one."""
    key = request.headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= 255 and all("!" <= c <= "~" for c in key)):
        raise InvalidRequest("an Idempotency-Key has 1 to 255 visible ASCII characters")
    return key


def forward_headers(services: Services, request: Request, decoded: OutgoingRequest) -> None:
    """Adds the forwarded headers to a request's parameters."""
    if services.forward is not None:
        with_headers(decoded, forwarded(services.forward, request.scope["state"][SENT_HEADERS]))


def authorize(
    services: Services, request: Request, scope: Scope = Scope.INFER, context: CallerContext | None = None
) -> CallerContext:
    """Authorizes a request's caller; `context` replaces the headers."""
    context = services.dispatcher.authorize(context or context_of(request), scope, peer_of(request))
    request.state.caller = context
    return context


def authorize_read(services: Services, request: Request, scope: Scope = Scope.INFER) -> CallerContext:
    """Authorizes a request's caller, and refuses at once while Redis is unreachable."""
    context = authorize(services, request, scope)
    check_up(services)
    return context


def check_up(services: Services) -> None:
    """Raises `BrokerUnavailable` while Redis is unreachable, where a read would wait for it."""
    services.requests.delivery.router.check_up(keys.slot(keys.job_places()))


def recheck(services: Services, request: Request) -> None:
    """Checks that a caller is still allowed."""
    services.dispatcher.recheck(caller(request))


def caller(request: Request) -> CallerContext:
    """Returns the caller of an authorized request."""
    found: CallerContext = getattr(request.state, "caller", ANONYMOUS)
    return found


def answers(request: Request, asked: OutgoingRequest | EntryAddress) -> None:
    """Notes the request whose id the reply names."""
    setattr(request.state, IN_REPLY_TO, asked)


def guarded(services: Services, group: str, scope: Scope | None = None) -> list[Any]:
    """Returns a group's dependencies; without a `scope` the route checks the key itself."""

    async def check_header(request: Request) -> None:
        services.restrictions.check(group, request.headers.get)

    async def check_key(request: Request) -> None:
        authorize(services, request, scope or Scope.INFER)

    async def check_administrator(request: Request) -> AsyncIterator[None]:
        context = authorize(services, request, Scope.ADMIN)
        with administrative(context, request.method, request.scope["path"], peer_of(request)):
            yield

    checks: list[Any] = [Depends(check_header)] if services.restrictions.covers(group) else []
    if scope is not None:
        checks.append(Security(check_administrator if scope is Scope.ADMIN else check_key, scopes=[scope]))
    return checks


def send_json(body: object, status: int = 200) -> HttpResponse:
    """Returns the HTTP response with a JSON body."""
    return send(HttpReply(status, msgspec.json.encode(body)))


def send(reply: HttpReply) -> HttpResponse:
    """Returns a reply with exactly the fast path's headers."""
    response = HttpResponse(status_code=reply.status)
    response.body = reply.body
    name_values = (line.split(b": ", 1) for line in reply.head().splitlines())
    response.raw_headers = [(name, value) for name, value in name_values]
    return response


async def _on_qinfer_error(request: Request, error: Exception) -> HttpResponse:
    response = send(failure_reply(error, v1=request.url.path.startswith("/v1/")))
    if isinstance(error, QinferError) and "content-encoding" in request.headers and response.status_code == 501:
        response.headers["accept-encoding"] = "gzip, deflate"  # reference §1.11
    return response


async def _on_unknown_route(request: Request, error: Exception) -> HttpResponse:
    status = getattr(error, "status_code", 404)
    message = {404: "Not Found", 405: "Method Not Allowed"}.get(status, str(getattr(error, "detail", error)))
    response = send(error_reply(status, message))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


async def _on_left(request: Request, error: Exception) -> HttpResponse:
    return HttpResponse()


async def _on_defect(request: Request, error: Exception) -> HttpResponse:
    return send(failure_reply(error))


ERROR_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, HttpResponse]]] = {
    QinferError: _on_qinfer_error,
    HTTPException: _on_unknown_route,
    ClientDisconnect: _on_left,
    Exception: _on_defect,
}


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_Scalar = bool | int | float | str


# These bodies serve as schemas: `qinfer.wire` reads and writes them.


class InferInput(msgspec.Struct, frozen=True):
    """An input of a model; `data`, or `parameters.binary_data_size` bytes after the JSON part.

    Attributes:
        datatype: Such as `FP32`, `INT64` or `BYTES`.
        data: The elements in row-major order, nested or flat.
    """

    name: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    datatype: str
    parameters: InputParameters | UnsetType = UNSET
    data: list[Any] | UnsetType = UNSET


class WantedOutput(msgspec.Struct, frozen=True):
    """A requested output."""

    name: str
    parameters: OutputParameters | UnsetType = UNSET


class InferCall(msgspec.Struct, frozen=True):
    """A request to a model.

    Attributes:
        id: Echoed in the reply.
        parameters: `binary_data_output`, `qinfer_strict_json`, `priority`, `timeout` (µs), and your own.
        outputs: The requested outputs; all if omitted.

    Example:
        {"id": "42", "inputs": [{"name": "image", "shape": [1, 4], "datatype": "FP32", "data": [0.0, 0.5, 0.5, 1.0]}]}
    """

    inputs: list[InferInput]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[WantedOutput] = []


class OutputTensor(msgspec.Struct, frozen=True):
    """An output of a model; `data`, or `parameters.binary_data_size` bytes after the JSON part."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, _Scalar] = {}
    data: list[Any] | UnsetType = UNSET


class InferBody(msgspec.Struct, frozen=True):
    """The answer of a model.

    Attributes:
        id: The request's id; omitted if the request had no id.
        parameters: Additional values of the model.

    Example:
        {"id": "42", "model_name": "digits", "model_version": "1",
         "outputs": [{"name": "label", "shape": [1], "datatype": "INT64", "data": [7]}]}
    """

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str = ""
    parameters: dict[str, _Scalar] = {}


_BINARY = {"schema": {"type": "string", "format": "binary"}}

JSON_LENGTH = header(
    JSON_LENGTH_HEADER,
    "Length of the JSON part when raw tensor bytes follow it; 0: the body is the data of the model's one input.",
    type="integer",
    minimum=0,
)
REQUEST_TIMEOUT = header(TIMEOUT_HEADER, "Seconds until it expires.", type="number", exclusiveMinimum=0, examples=[600])
INFER_BODY: Json = {
    "required": True,
    "description": "JSON, or JSON followed by the raw bytes of each binary input. May be gzip or deflate encoded.",
    "content": {"application/json": {"schema": InferCall}, "application/octet-stream": _BINARY},
}
OUTPUTS: Json = {
    "description": f"The outputs. Binary outputs follow the JSON, whose length `{JSON_LENGTH_HEADER}` then tells.",
    "content": {"application/octet-stream": _BINARY, "application/json": {"schema": InferBody}},
}
INFER_ERRORS = errors(400, 401, 403, 404, 500, 501, 503)


# The most tensor bytes that a byte of JSON gives: `0,` is an INT64.
_MOST_OF_TEXT = 4
_MAX_TURN_S = 30.0


async def read_body(services: Services, request: Request, max_bytes: int, decode: Callable[[Bytes], T]) -> T:
    """Reads and decodes a body outside inference."""
    async with received(services, request, max_bytes, is_inference=False) as body:
        if len(body) <= MAX_FAST_BYTES:
            return decode(body)
        depth, most = services.settings.limits.max_json_depth, services.settings.http.max_input_bytes
        size = await asyncio.to_thread(check_size, body, depth, most)
        async with services.receiving.decoding(size):
            return await asyncio.to_thread(decode, body)


@asynccontextmanager
async def received(
    services: Services, request: Request, max_bytes: int, *, is_inference: bool = True
) -> AsyncIterator[Bytes]:
    """Reads and decompresses the body, reserving its memory.

    Triton has its own error for large bodies of inferences.
    """
    encoding = request_encoding(request.headers.get("content-encoding"))
    declared = request.headers.get("content-length", "")
    what = "body" if encoding or JSON_LENGTH_HEADER in request.headers else "JSON"
    what = what if is_inference else ""
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large(int(declared), max_bytes, what)
    room = partial(room_of, encoding=encoding, max_bytes=max_bytes)
    size = room(max(int(declared), 1)) if declared.isdecimal() else SMALL_BYTES
    owner = caller(request).tenant or request.client
    within_s = min(_MAX_TURN_S, services.settings.http.request_read_timeout_s / 2)

    def waits(one: Reservation) -> None:
        request.scope["state"][ON_LEAVE] = one.withdraw

    async with services.receiving.reserved(owner, size, within_s, waits) as memory:
        body = bytearray()
        memory.watch(body.__len__, request.scope["extensions"][CLOSE])
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise too_large(None, max_bytes, what)
            memory.grow(room(len(body)))
        memory.unwatch()
        recheck(services, request)
        content: Bytes = body
        if encoding is not None:
            content = await asyncio.to_thread(decompress, body, encoding, max_bytes)
            body.clear()
            memory.shrink(max(len(content), 1))
        yield content


async def read_json(
    services: Services, request: Request, kind: type[T], *, prefix: str = "", may_be_empty: bool = False
) -> T:
    """Reads a JSON object, perhaps from no body."""
    depth, most = services.settings.limits.max_json_depth, services.settings.http.max_input_bytes

    def decode(body: Bytes) -> T:
        return decode_json(body if body or not may_be_empty else b"{}", kind, depth, prefix=prefix)

    return await read_body(services, request, most, decode)


async def decoded_tensors(services: Services, json_bytes: int, nbytes: float, decode: Callable[[], T]) -> T:
    """Decodes tensors; large JSON waits for its turn."""
    if json_bytes <= LARGE_BYTES:
        return await off_loop(nbytes, decode)
    most = services.settings.http.max_input_bytes
    async with services.receiving.decoding(min(_MOST_OF_TEXT * json_bytes, most)):
        return await asyncio.to_thread(decode)


async def decoded_infer(
    services: Services, served: ServedVersion, target: UrlTarget, request: Request, body: Bytes
) -> tuple[OutgoingRequest, OutputPlan]:
    """Decodes an infer request and chooses its target."""

    @forgets_regions
    def decode() -> tuple[OutgoingRequest, OutputPlan]:
        length, tenant = request.headers.get(JSON_LENGTH_HEADER), caller(request).tenant
        decoded, plan = services.codec.decode(target, body, length, tenant, served)
        plan = as_accepted(request, plan)
        forward_headers(services, request, decoded)
        answers(request, decoded)
        plan = services.dispatcher.aim(caller(request), decoded, request.headers.get, plan, served)
        services.dispatcher.check(decoded, served)
        return decoded, plan

    length = parse_json_length(request.headers.get(JSON_LENGTH_HEADER), len(body))
    nbytes = math.inf if services.codec.shares_memory else len(body)
    return await decoded_tensors(services, len(body) if length is None else length, nbytes, decode)


def as_accepted(request: Request, plan: OutputPlan) -> OutputPlan:
    """Applies strict JSON if `Accept` wants it."""
    return strictly(plan) if is_strict(request) else plan


def timeout_of(request: Request) -> float | None:
    """Returns the requested timeout in seconds."""
    text = request.headers.get(TIMEOUT_HEADER)
    return None if text is None else read_seconds(TIMEOUT_HEADER, text)


def is_strict(request: Request) -> bool:
    """Returns whether JSON excludes NaN and infinities."""
    return wants_strict(",".join(request.headers.getlist("accept")))


def room_of_answer(services: Services, request: Request) -> Room:
    """Returns a wait for the reply's memory."""
    borrowed = AnswerMemory(services.receiving, caller(request).tenant or request.client)
    request.scope["state"][BORROWER] = borrowed
    return borrowed.reserve_memory


async def off_loop(nbytes: float, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Calls a function, in a thread if slow."""
    return await asyncio.to_thread(work, *arguments) if nbytes > MAX_FAST_BYTES else work(*arguments)


async def encoded(nbytes: int, plan: OutputPlan, encode: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Encodes outputs of `nbytes`, in a thread if slow."""
    if not is_slow(nbytes, plan):
        return encode(*arguments)
    return await asyncio.get_running_loop().run_in_executor(encoder_of(nbytes), encode, *arguments)


async def send_outputs(
    services: Services, request: Request, response: Response | Sequence[Response], client_id: str, plan: OutputPlan
) -> HttpResponse:
    """Encodes responses as requested; several become one list."""
    plan = as_accepted(request, plan)
    if isinstance(response, Response):
        reply = await encoded(response.nbytes, plan, services.codec.encode, response, client_id, plan)
    else:
        nbytes = sum([one.nbytes for one in response])
        reply = await encoded(nbytes, plan, encode_list, services.codec, response, client_id, plan)
    encoding = response_encoding(request.headers.get("accept-encoding"))
    if encoding is not None and reply.status == 200:
        reply = await off_loop(len(reply.body), reply.compressed, encoding)
    return send(reply)


class ServerSentEvent(NamedTuple):
    """Each line of data becomes a field."""

    name: str
    id: str
    data: bytes


def event_stream(events: AsyncIterator[ServerSentEvent | None], seen: str) -> HttpResponse:
    """Returns the server-sent events after the event that the client has `seen`.

    `None` becomes a comment, which keeps the connection open. The stream ends if the caller's key is revoked.
    """

    async def lines() -> AsyncIterator[bytes]:
        last = seen
        with suppress(DeliveryError, Unauthorized, Forbidden):
            async for event in events:
                if event is None:
                    yield b": still here\n\n"
                elif event.id != last:
                    last = event.id
                    yield event_text(event.name.encode(), event.data, last.encode())

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`; cancels it and raises `ClientDisconnect` if the client leaves."""

    async def caught() -> T | QinferError:
        try:
            return await work
        except QinferError as error:  # the group would wrap it
            return error

    async def watch(task: asyncio.Task[T | QinferError]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(caught())
        watcher = group.create_task(watch(task))
        await asyncio.wait([task])
        watcher.cancel()
    if task.cancelled():
        raise ClientDisconnect
    outcome = task.result()
    if isinstance(outcome, QinferError):
        raise outcome
    return outcome


_ITEM = re.compile(r"""(?:[^,"]|"(?:[^"\\]|\\.)*(?:"|\\?$))+""")
_PREFERENCE = re.compile(r"""\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*(?:=\s*("(?:[^"\\]|\\.)*"|[^\s;,"]*)\s*)?(?:;.*)?""")
_MAX_CHARACTERS = 1000


class Preferences(NamedTuple):
    """`respond-async`, and the seconds to wait (`None` = not given)."""

    respond_async: bool = False
    wait_s: int | None = None

    @property
    def is_async(self) -> bool:
        """Whether the request is stored."""
        return self.respond_async or self.wait_s is not None

    def applied(self, *, ended: bool) -> str:
        """Returns `Preference-Applied`, or empty."""
        words = ["respond-async"] if self.respond_async and not ended else []
        if self.wait_s is not None:
            words.append(f"wait={self.wait_s}")
        return ", ".join(words)


def read_preferences(headers: Sequence[str]) -> Preferences:
    """Parses `Prefer`; the first of equal preferences counts, unknown preferences are ignored (RFC 7240 §2)."""
    found: dict[str, str] = {}
    for item in _ITEM.findall(",".join(headers)[:_MAX_CHARACTERS]):
        preference = _PREFERENCE.fullmatch(item.rstrip())
        if preference is not None:
            found.setdefault(preference[1].lower(), (preference[2] or "").strip('"'))
    wait = found.get("wait", "")
    is_number = wait.isascii() and wait.isdigit() and len(wait) < 10
    return Preferences("respond-async" in found, int(wait) if is_number else None)
