"""Decodes infer requests and encodes responses, so that fast path and routes answer alike.

Nothing here waits; callers run slow calls in a thread. Several responses to one request are one JSON list, or
server-sent events; each reads like a reply of infer:

    list    {"responses": [each as infer would answer it]} ‖ the bytes of all binary outputs, in the responses' order
    event   `data:` each as infer would answer it; binary outputs follow in a second `data:`, their bytes in base64
"""

import asyncio
import math
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from http import HTTPStatus
from math import prod
from typing import Literal, NamedTuple
from urllib.parse import quote

import msgspec

from qinfer.core.messages import Failure, OutgoingRequest, Response, Scalar
from qinfer.core.settings import Settings
from qinfer.errors import (
    ErrorCode,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    QinferError,
    SettingsError,
    UnsupportedFeature,
)
from qinfer.models.catalog import ServedVersion
from qinfer.models.spec import ModelSpec
from qinfer.submission.validate import check_announced
from qinfer.tensors import DATATYPES, Bytes, Tensor
from qinfer.wire.json_pieces import JsonBounds
from qinfer.wire.kserve_exact import check_forwarded
from qinfer.wire.kserve_json import decode_infer, encode_infer
from qinfer.wire.outputs import OutputPlan, Regions
from qinfer_api.dispatcher import Dispatcher, bound
from qinfer_api.shared_memory import MOST_KNOWN_BYTES, Land, RequestRegions, SharedMemory
from qinfer_api.status import http_status, of_request, retry_after_s

Encoding = Literal["gzip", "deflate"]

_WINDOW_BITS: dict[Encoding, int] = {"gzip": 31, "deflate": 15}  # `deflate` in HTTP is the zlib container
_EITHER_CONTAINER = 47
_STRICT = re.compile(r"(?i);[ \t]*strict[ \t]*=([^;,]*)")
_STEP_BYTES = 256 * 1024
_PIECE_BYTES = 64 * 1024
_MAX_EXPANSION = 1032
_MAX_MEMBERS = 1000


def request_encoding(header: str | None) -> Encoding | None:
    """Parses `Content-Encoding`; `None` is identity."""
    encoding = (header or "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding == "gzip":
        return "gzip"
    if encoding == "deflate":
        return "deflate"
    raise UnsupportedFeature("Unsupported compression type")


def response_encoding(header: str | None) -> Encoding | None:
    """Chooses by q-value; the first wins a tie (RFC 9110 §12.5.3)."""
    weights: dict[str, float] = {}
    for item in (header or "").lower().split(","):
        name, _, parameters = item.partition(";")
        weights[name.strip()] = _weight(parameters)
    for encoding in _WINDOW_BITS:
        weights.setdefault(encoding, weights.get("*", 0.0))
    best = max((name for name in weights if name == "identity" or name in _WINDOW_BITS), key=weights.__getitem__)
    return best if best in _WINDOW_BITS and weights[best] > 0 else None


def read_seconds(name: str, text: str) -> float:
    """Parses seconds ≥ 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InvalidRequest(f"{name} is a number of seconds, such as 2.5; got '{text[:100]}'")
    return seconds


@lru_cache(maxsize=256)
def wants_strict(header: str) -> bool:
    """Returns whether `Accept` has `strict=true`."""
    values = [value.strip(' \t"').lower() for value in _STRICT.findall(header)]
    for value in values:
        if value not in ("true", "false"):
            raise InvalidRequest(f"'{value[:40]}' is not a value of strict in Accept: use true or false")
    return "true" in values


def compress(body: bytes, encoding: Encoding, level: int = 1) -> bytes:
    """Compresses a reply at a fast level, because floats shrink little at any level."""
    compressor = zlib.compressobj(level=level, wbits=_WINDOW_BITS[encoding])
    return compressor.compress(body) + compressor.flush()


def decompress(body: Bytes, encoding: Encoding, max_bytes: int) -> bytes:
    """Decompresses a body, at most a step beyond `max_bytes`; as in Triton, the first bytes tell gzip from deflate."""
    out = bytearray()
    view, position = memoryview(body), 0
    try:
        for _ in range(_MAX_MEMBERS):
            decompressor = zlib.decompressobj(wbits=_EITHER_CONTAINER)
            while position < len(view) and not decompressor.eof:
                piece = view[position : position + _PIECE_BYTES]
                out += decompressor.decompress(piece, min(_STEP_BYTES, max_bytes - len(out) + 1))
                if len(out) > max_bytes:
                    raise too_large(None, max_bytes)
                position += len(piece) - len(decompressor.unconsumed_tail) - len(decompressor.unused_data)
            if not decompressor.eof:
                raise InvalidRequest(f"the {encoding} body is cut off; send all of it")
            if position == len(view):
                return bytes(out)
        raise InvalidRequest(f"the {encoding} body has more than {_MAX_MEMBERS} members; compress it as one")
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}: {error}") from None


def room_of(size: int, encoding: Encoding | None, max_bytes: int) -> int:
    """Returns the memory of a body and its decompressed form."""
    return size if encoding is None else size + min(size * _MAX_EXPANSION, max_bytes)


def too_large(size: int | None, max_bytes: int, what: str = "body") -> PayloadTooLarge:
    """Returns Triton's error; `what` is empty outside inference."""
    many = "" if size is None else f" of {size} bytes"
    text = (
        f"Request {what} size{many} exceeds the maximum allowed value of {max_bytes} bytes."
        if what
        else f"request JSON size{many} exceeds the maximum allowed input size. It is {max_bytes} bytes."
    )
    return PayloadTooLarge(
        f"{text} Use --http-max-input-size to increase the limit, which is QINFER_HTTP__MAX_INPUT_BYTES here."
    )


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                weight = float(value)
            except ValueError:
                return 0.0
            return weight if 0.0 <= weight <= 1.0 else 0.0
    return 1.0


Headers = Sequence[tuple[bytes, bytes]]

ID_HEADER = b"qinfer-request-id"

CACHE_HEADER = b"qinfer-cache"

TIMEOUT_HEADER = "Request-Timeout"
"""Request header: seconds until the request expires."""

TARGET_HEADER = b"qinfer-target"

UNQUOTED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")

LARGE_BYTES = 256 * 1024
"""Larger bodies are written apart from the head."""

JSON_BYTES = 32 * 1024
"""Larger outputs are written as JSON in a thread: they take more than a millisecond."""

GIANT_BYTES = 2**20
"""Larger outputs take tens of milliseconds as JSON, in a thread of their own, so that no others wait behind them."""

_ENCODER = ThreadPoolExecutor(1, thread_name_prefix="qinfer-encoder")
_GIANT_ENCODER = ThreadPoolExecutor(1, thread_name_prefix="qinfer-giant-encoder")
"""More threads would be no faster, and the event loop would wait longer for the GIL."""

_CLOSE = b"connection: close\r\n\r\n"
_JSON_BEGIN = b"content-type: application/json\r\ncontent-length: "
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


def header_value(text: str) -> bytes:
    """Percent-encodes everything but visible ASCII."""
    return text.encode() if text.isascii() and text.isprintable() else quote(text, safe=UNQUOTED).encode()


class HttpReply(msgspec.Struct, frozen=True, gc=False):
    """An unwritten answer; `json_length` is set if uncompressed binary tensors follow the JSON, in it or `tensors`."""

    status: int
    body: bytes
    json_length: int | None = None
    encoding: Encoding | None = None
    retry_after_s: int = 0
    cache: str = ""
    target: str = ""
    tensors: Sequence[Bytes] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all."""
        return len(self.body) + sum(map(len, self.tensors))

    def head(self) -> bytes:
        """Returns the reply's own header lines."""
        if self.json_length is None:
            head = b"%b%d\r\n" % (_JSON_BEGIN, len(self.body))
        else:
            head = (
                b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
                b"content-length: %d\r\n" % (self.json_length, len(self.body) + sum(map(len, self.tensors)))
            )
        if self.encoding is not None:
            head += b"content-encoding: %b\r\nvary: accept-encoding\r\n" % self.encoding.encode()
        if self.retry_after_s:
            head += b"retry-after: %d\r\n" % self.retry_after_s
        if self.cache:
            head += b"%b: %b\r\n" % (CACHE_HEADER, self.cache.encode())
        if self.target:
            head += _target_line(self.target)
        if self.status == 401:
            head += b"www-authenticate: Bearer\r\n"
        return head

    def compressed(self, encoding: Encoding) -> "HttpReply":
        """Returns the reply with a compressed body."""
        return msgspec.structs.replace(self, body=compress(self.body, encoding), encoding=encoding)


def failure_reply(error: BaseException, *, v1: bool = False) -> HttpReply:
    """Returns the reply to an exception."""
    failure = Failure.from_error(error)
    v1 = v1 and type(error) is not Overloaded
    return error_reply(http_status(failure.code, v1=v1), failure.message, retry_after_s(failure.code, error))


def refusal(failure: Failure, target: str = "") -> HttpReply:
    """Returns a failed response's reply."""
    reply = error_reply(http_status(failure.code), failure.message, retry_after_s(failure.code))
    return msgspec.structs.replace(reply, target=target) if target else reply


def answered_by(response: Response, endpoint: str) -> str:
    """Returns the endpoint's target, or empty."""
    return f"{response.model}:{response.version}" if endpoint and response.model else ""


def error_reply(status: int, message: str, again_s: int = 0) -> HttpReply:
    """Returns an error; `again_s` is the `Retry-After`, 0 = no header."""
    return HttpReply(status, msgspec.json.encode({"error": message}), retry_after_s=again_s)


@lru_cache(maxsize=1024)
def _target_line(target: str) -> bytes:
    return b"%b: %b\r\n" % (TARGET_HEADER, header_value(target))


class Writer:
    """Renders replies, and caches the header lines that all replies share."""

    def __init__(self, own: Headers = ()) -> None:
        self._own = own
        self._common: Headers = ()
        self._block = self._ok = b""

    def pieces(self, reply: HttpReply, common: Headers, request_id: str, *, close: bool) -> list[Bytes]:
        """Renders a reply; large parts are pieces of their own, to save copies."""
        if len(reply.body) <= LARGE_BYTES and not reply.tensors:
            return [self.render(reply, common, request_id, close=close)]
        begin, end = self.encode_head(reply.status, common, request_id), _CLOSE if close else b"\r\n"
        return [b"".join((begin, reply.head(), end)), reply.body, *reply.tensors]

    def render(self, reply: HttpReply, common: Headers, request_id: str, *, close: bool) -> bytes:
        """Renders a whole reply without `tensors`."""
        if common is not self._common:
            self._renew(common)
        body, name = reply.body, header_value(request_id)
        if (
            reply.status == 200
            and reply.json_length is None
            and reply.encoding is None
            and not (close or reply.retry_after_s or reply.cache)
        ):
            begin = _JSON_BEGIN if not reply.target else _target_line(reply.target) + _JSON_BEGIN
            return b"%b%b\r\n%b%d\r\n\r\n%b" % (self._ok, name, begin, len(body), body)
        end = _CLOSE if close else b"\r\n"
        return b"".join((_STATUS_LINES[reply.status], self._block, name, b"\r\n", reply.head(), end, body))

    def encode_head(self, status: int, common: Headers, request_id: str) -> bytes:
        """Renders status line, common headers and request id."""
        if common is not self._common:
            self._renew(common)
        return b"%b%b%b\r\n" % (_STATUS_LINES[status], self._block, header_value(request_id))

    def _renew(self, common: Headers) -> None:
        lines = [b"%b: %b\r\n" % pair for pair in (*common, *self._own)]
        self._common, self._block = common, b"".join((*lines, ID_HEADER, b": "))
        self._ok = _STATUS_LINES[200] + self._block


JSON_LENGTH_HEADER = "Inference-Header-Content-Length"

DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"

IN_SHARED_MEMORY = b"shared_memory_region"


class UrlTarget(NamedTuple):
    """Model and version of an infer URL; version 0 is the highest ready version."""

    model: str
    version: int


class InferCodec:
    """Decodes requests and encodes responses; each gateway has one."""

    def __init__(self, dispatcher: Dispatcher, memory: SharedMemory, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._max_input_bytes = settings.http.max_input_bytes
        self.bounds = JsonBounds(settings.limits.max_json_depth, settings.http.max_input_bytes)
        self.memory = memory
        self.shares_memory = memory.allowed

    def decode(
        self,
        target: UrlTarget,
        body: Bytes,
        json_length: str | None,
        tenant: str,
        served: ServedVersion | None = None,
        land: Land | None = None,
    ) -> tuple[OutgoingRequest, OutputPlan]:
        """Decodes the body of an infer request."""
        memory = self.memory
        regions: Regions = memory
        if self.shares_memory:
            memory = memory.for_tenant(tenant) if tenant else memory
            known = None if land is None or len(body) > MOST_KNOWN_BYTES else memory.texts.get(bytes(body))
            if known is not None and land is not None and json_length is None:
                return known.read(target.model, target.version, land), known.plan
            regions = memory.limited(self._max_input_bytes, land)
        length = parse_json_length(json_length, len(body))
        if length == 0:
            served = served or self._dispatcher.resolve(target.model, target.version)
            return read_raw(body, target.model, target.version, served.spec)
        bounds = self.bounds
        if served is not None and served.spec.name == target.model:
            bounds = bounds._replace(check=partial(check_announced, spec=served.spec))
        request, plan = decode_infer(body, length, target.model, target.version, bounds, regions)
        if isinstance(regions, RequestRegions) and regions.used:
            plan = msgspec.structs.replace(plan, held=regions)
            if land is not None and length is None:
                regions.learn(memory.texts, body, request, plan, "")
        if plan.special is not None and plan.ranks:
            plan = bound(plan, served or self._dispatcher.resolve(target.model, target.version))
        return request, plan

    def encode(self, response: Response, client_id: str, plan: OutputPlan, *, apart: bool = False) -> HttpReply:
        """Encodes a response or failure, as requested, or tensors `apart`."""
        target = answered_by(response, plan.endpoint) if plan.endpoint else ""
        if response.failure is not None:
            return refusal(response.failure, target)
        try:
            regions = self.memory if plan.special is None else regions_of(plan, self.memory)
            encoded = encode_infer(response, client_id, plan, regions, apart=apart)
        except QinferError as error:
            return failure_reply(error)
        body, json_length, tensors = encoded.body, encoded.json_length, encoded.tensors
        return HttpReply(200, body, json_length, cache=response.cache, target=target, tensors=tensors)


def encoder_of(nbytes: int) -> ThreadPoolExecutor:
    """Returns the thread that writes slow responses with outputs of `nbytes`."""
    return _ENCODER if nbytes <= GIANT_BYTES else _GIANT_ENCODER


def is_slow(nbytes: int, plan: OutputPlan) -> bool:
    """Returns whether a response with outputs of `nbytes` is to be written in a thread (`encoder_of`)."""
    is_binary = all(plan.overrides.values()) if plan.overrides else plan.binary
    return nbytes > (LARGE_BYTES if is_binary else JSON_BYTES)


def strictly(plan: OutputPlan) -> OutputPlan:
    """Returns a plan that refuses NaN and infinities in JSON."""
    return msgspec.structs.replace(plan, strict=True)


def regions_of(plan: OutputPlan, default: Regions) -> Regions:
    """Returns the shared memory for outputs."""
    return plan.held if isinstance(plan.held, RequestRegions) else default


def reply_bytes(response: Response, plan: OutputPlan) -> int:
    """Returns the bytes of outputs that are not quickly copied into regions."""
    nbytes, special, regions = response.nbytes, plan.special, plan.held
    if special is None or nbytes > GIANT_BYTES or not isinstance(regions, RequestRegions) or regions.are_on_gpu:
        return nbytes
    return sum([len(one.data) for one in response.outputs if one.name not in special or special[one.name].classes])


def fills_its_memory(response: Response) -> bool:
    """Returns whether outputs are most of the memory that views of them keep, as of one reply to a whole batch."""
    kept = {id(view.obj): memoryview(view.obj).nbytes for view in (memoryview(one.data) for one in response.outputs)}
    return sum(kept.values()) <= 2 * response.nbytes


def with_headers(request: OutgoingRequest, forwarded: Mapping[str, Scalar]) -> None:
    """Adds forwarded headers to the parameters; refuses reserved names."""
    for name in forwarded:
        check_forwarded(name)
    request.parameters = {**request.parameters, **forwarded}


def parse_version(text: str) -> int:
    """Parses a URL's version."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) < 2**63):
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:100]}', "
            "version should be an integral value > 0"
        )
    return int(text)


@lru_cache(maxsize=64)
def parse_json_length(text: str | None, body_length: int) -> int | None:
    """Parses `Inference-Header-Content-Length`; `None` without the header."""
    if text is None:
        return None
    try:
        length = int(text)
    except ValueError:
        raise InvalidRequest(f"Unable to parse {JSON_LENGTH_HEADER}, got: {text[:100]}") from None
    if not 0 <= length <= body_length:
        raise InvalidRequest(f"inference header size should be in range (0, {body_length}), got: {length}")
    return length


class FutureSink:
    """Takes the one response of a request; several become an error."""

    frontend = "HTTP"
    no_stream = DECOUPLED

    def __init__(self) -> None:
        self.response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Response:
        """Waits for the response."""
        return await self.response

    def deliver(self, response: Response) -> None:
        """Completes the future, unless its waiter has left."""
        if self.response.done():
            return
        if not response.final:
            failure = Failure(ErrorCode.UNSUPPORTED_FEATURE, DECOUPLED)
            response = Response(request_id=response.request_id, failure=failure)
        self.response.set_result(response)


_CASE_SENSITIVE = "(?-i)"  # RE2's flag, as Triton documents it


def compile_forward(variable: str, pattern: str) -> re.Pattern[str] | None:
    """Compiles a pattern of header names; without `(?-i)` it ignores case."""
    if not pattern:
        return None
    sensitive = pattern.startswith(_CASE_SENSITIVE)
    try:
        return re.compile(pattern.removeprefix(_CASE_SENSITIVE), re.NOFLAG if sensitive else re.IGNORECASE)
    except re.error as error:
        raise SettingsError(
            f"{variable}={pattern}: {error}; it takes a regular expression such as x-tenant-.*"
        ) from None


def forwarded(pattern: re.Pattern[str], headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns the headers that `header_forward_pattern` forwards; of equal names the last counts."""
    found: dict[str, str] = {}
    for name, value in headers:
        text = name.decode("latin-1")
        if pattern.fullmatch(text):
            found[text] = value.decode("latin-1")
    return found


_LENGTH = struct.Struct("<I")
_PLAN = OutputPlan(binary=True)


def read_raw(body: Bytes, model: str, version: int, spec: ModelSpec) -> tuple[OutgoingRequest, OutputPlan]:
    """Returns a raw body's request: one row if there is a batch dimension."""
    if len(spec.inputs) != 1:
        raise _request_error(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(spec.inputs)} inputs in "
            f"'{spec.name}' model configuration"
        )
    (expected,) = spec.inputs
    variable = [position for position, size in enumerate(expected.dims) if size == -1]
    if len(variable) > 1:
        raise _request_error(
            f"The shape of the raw input '{expected.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    shape, data = list(expected.dims), body
    fixed = prod(size for size in shape if size != -1)
    if expected.datatype == "BYTES":
        if variable or fixed != 1:
            raise _request_error(f"For BYTE datatype raw input '{expected.name}', the model must have input shape [1]")
        data = _LENGTH.pack(len(body)) + body
    elif variable:
        shape[variable[0]] = len(body) // (fixed * DATATYPES[expected.datatype].itemsize)
    rows = (1,) if spec.max_batch_size else ()
    tensor = Tensor(expected.name, expected.datatype, (*rows, *shape), data)
    return OutgoingRequest(model=model, inputs=(tensor,), version=version), _PLAN


def encode_list(codec: InferCodec, responses: Sequence[Response], client_id: str, plan: OutputPlan) -> HttpReply:
    """Encodes all responses as one reply, or the error of one."""
    texts, outputs, target = list[bytes](), list[bytes](), ""
    for response in responses:
        reply = codec.encode(response, client_id, plan)
        if reply.status != 200:
            return reply
        target = reply.target
        text, binary = _parts(reply)
        texts.append(text)
        outputs.append(binary)
    text, binary = b'{"responses":[%b]}' % b",".join(texts), b"".join(outputs)
    return HttpReply(200, text + binary, len(text) if binary else None, target=target)


def encode_event(codec: InferCodec, response: Response, client_id: str, plan: OutputPlan) -> HttpReply:
    """Encodes an event's data; binary outputs are a second line."""
    reply = codec.encode(response, client_id, plan)
    text, binary = _parts(reply)
    data = b"%b\n%b" % (text, b64encode(binary)) if binary else text
    return HttpReply(reply.status, data, cache=reply.cache, target=reply.target)


def coded_refusal(failure: Failure) -> HttpReply:
    """Returns a failure's reply with its code."""
    body = msgspec.json.encode({"error": failure.message, "code": failure.code})
    return msgspec.structs.replace(refusal(failure), body=body)


def event_text(name: bytes, data: bytes, event_id: bytes = b"") -> bytes:
    """Formats a server-sent event (WHATWG HTML, "Server-sent events")."""
    lines = data.replace(b"\n", b"\ndata: ")
    return b"event: %b\n%bdata: %b\n\n" % (name, b"id: %b\n" % event_id if event_id else b"", lines)


def _parts(reply: HttpReply) -> tuple[bytes, bytes]:
    length = reply.json_length
    return (reply.body, b"") if length is None else (reply.body[:length], reply.body[length:])


def _request_error(text: str) -> InvalidRequest:
    return InvalidRequest(of_request("") + text)
