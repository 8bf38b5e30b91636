"""`POST /v2/models/{m}[/versions/{v}]/infer`: from bytes to the dispatcher, and from a response to reply bytes.

Two callers share everything here, so that they answer alike to the byte: the fast path below ASGI (`http/protocol.py`),
for small plain requests, and the FastAPI route (`rest/infer.py`), for all others. Nothing here waits.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple, Protocol

import msgspec

from qinfer.codec.kserve_json import OutputPlan, decode_infer, encode_infer
from qinfer.control.api_keys import Scope
from qinfer.errors import InvalidRequest, Overloaded, QinferError
from qinfer.messages import Failure, InferRequest, Response
from qinfer.tensors import Bytes
from qinfer_api.auth import ANONYMOUS, Context, presented_key
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.compression import Encoding, compress, response_encoding
from qinfer_api.sinks import Pending
from qinfer_api.status import http_status, retry_after_s

logger = logging.getLogger(__name__)

MAX_FAST_BYTES = 256 * 1024
"""Larger bodies take the route, which decodes them off the event loop."""

JSON_LENGTH_HEADER = "Inference-Header-Content-Length"

Headers = Sequence[tuple[bytes, bytes]]

_INTERESTING = {  # what the fast path reads of a request's headers; all others mean nothing to an infer request
    b"content-length": "length",
    b"inference-header-content-length": "json",
    b"traceparent": "trace",
    b"content-encoding": "coding",
    b"accept-encoding": "accept",
    b"authorization": "authorization",
    b"x-api-key": "key",
    b"transfer-encoding": "special",
    b"expect": "special",
    b"prefer": "special",
    b"upgrade": "special",
}
_MAX_URL_BYTES = 1024
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


class Target(NamedTuple):
    """What an infer URL names; version 0 is the highest ready one."""

    model: str
    version: int


class Head(NamedTuple):
    """What the fast path needs of a request's head; `json_length` is the header's text, unchecked."""

    target: Target
    length: int
    json_length: str | None
    context: Context
    encoding: Encoding | None


class Reply(msgspec.Struct, frozen=True, gc=False):
    """An answer before it is written.

    Attributes:
        status: The HTTP status.
        body: The body, in its encoding.
        json_length: Set when binary tensors follow the JSON: the JSON's length before compression.
        encoding: The body's content encoding; `None` is identity.
        retry_after_s: Seconds after which to try again; 0 = not told.
    """

    status: int
    body: bytes
    json_length: int | None = None
    encoding: Encoding | None = None
    retry_after_s: int = 0

    def head(self) -> bytes:
        """Returns the reply's own header lines."""
        if self.json_length is None:
            head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(self.body)
        else:
            head = (
                b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
                b"content-length: %d\r\n" % (self.json_length, len(self.body))
            )
        if self.encoding is not None:
            head += b"content-encoding: %b\r\nvary: accept-encoding\r\n" % self.encoding.encode()
        if self.retry_after_s:
            head += b"retry-after: %d\r\n" % self.retry_after_s
        if self.status == 401:
            head += b"www-authenticate: Bearer\r\n"
        return head

    def compressed(self, encoding: Encoding) -> "Reply":
        """Returns the reply with its body in that encoding."""
        return msgspec.structs.replace(self, body=compress(self.body, encoding), encoding=encoding)


def parse_version(text: str) -> int:
    """Reads the version of a URL.

    Raises:
        InvalidRequest: It is not an integer > 0.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) < 2**63):
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:100]}', "
            "version should be an integral value > 0"
        )
    return int(text)


def parse_json_length(text: str | None, body_length: int) -> int | None:
    """Reads the `Inference-Header-Content-Length` of a body; `None` when there is no such header.

    Raises:
        InvalidRequest: It is not an integer, or not within the body.
    """
    if text is None:
        return None
    try:
        length = int(text)
    except ValueError:
        raise InvalidRequest(f"Unable to parse {JSON_LENGTH_HEADER}, got: {text[:100]}") from None
    if not 0 <= length <= body_length:
        raise InvalidRequest(f"inference header size should be in range (0, {body_length}), got: {length}")
    return length


def parse_target(url: bytes) -> Target | None:
    """Reads an infer URL; `None` if it is none, or one that the route has to look at (escapes, query, bad version)."""
    return _parse_target(url) if len(url) <= _MAX_URL_BYTES else None


@lru_cache(maxsize=1024)
def _parse_target(url: bytes) -> Target | None:
    parts = url.split(b"/")
    if len(parts) not in (5, 7) or parts[:3] != [b"", b"v2", b"models"] or parts[-1] != b"infer" or not parts[3]:
        return None
    if b"%" in url or b"?" in url or b"#" in url or not url.isascii():
        return None
    if len(parts) == 5:
        return Target(parts[3].decode(), 0)
    try:
        return Target(parts[3].decode(), parse_version(parts[5].decode())) if parts[4] == b"versions" else None
    except InvalidRequest:
        return None


def read_head(url: bytes, headers: Headers, max_bytes: int = MAX_FAST_BYTES) -> Head | None:
    """Decides whether a POST can take the fast path; `None` if it can't.

    Args:
        url: The URL as it was sent.
        headers: All headers.
        max_bytes: The largest body that may take it.
    """
    target = parse_target(url)
    if target is None:
        return None
    found: dict[str, bytes] = {}
    for name, value in headers:
        meaning = _INTERESTING.get(name.lower())
        if meaning is not None:
            if meaning in found:
                return None  # sent twice: the route knows which one counts
            found[meaning] = value
    if "special" in found or found.get("coding", b"").strip().lower() not in (b"", b"identity"):
        return None
    length = int(found.get("length", b"-1"))  # the parser has checked it
    if not 0 <= length <= max_bytes:
        return None
    json_length = found["json"].decode("latin-1") if "json" in found else None
    context = ANONYMOUS
    if "trace" in found or "authorization" in found or "key" in found:
        text = {meaning: value.decode("latin-1") for meaning, value in found.items()}
        context = Context(trace=text.get("trace", ""), key=presented_key(text.get("authorization"), text.get("key")))
    return Head(target, length, json_length, context, _accepted(found["accept"]) if "accept" in found else None)


@lru_cache(maxsize=256)
def _accepted(header: bytes) -> Encoding | None:
    return response_encoding(header.decode("latin-1"))


def decode(target: Target, body: Bytes, json_length: str | None, max_depth: int) -> tuple[InferRequest, OutputPlan]:
    """Decodes the body of an infer request.

    Raises:
        RequestError: It is no infer request.
    """
    return decode_infer(body, parse_json_length(json_length, len(body)), target.model, target.version, max_depth)


def reply_of(response: Response, client_id: str, plan: OutputPlan) -> Reply:
    """Encodes a response as the client asked for it; a failure becomes its error reply."""
    if response.failure is not None:
        code = response.failure.code
        return error_reply(http_status(code), response.failure.message, retry_after_s(code))
    try:
        encoded = encode_infer(response, client_id, plan)
    except QinferError as error:
        return failure_reply(error)
    return Reply(200, encoded.body, encoded.json_length)


def failure_reply(error: BaseException, *, v1: bool = False) -> Reply:
    """Returns the reply of an error that was raised; `v1` for a route of `/v1`, where some statuses differ."""
    failure = Failure.of(error)
    v1 = v1 and type(error) is not Overloaded  # the server's own trouble, no queue's and no quota
    return error_reply(http_status(failure.code, v1=v1), failure.message, retry_after_s(failure.code, error))


def error_reply(status: int, message: str, again_s: int = 0) -> Reply:
    """Returns `{"error": message}`; `again_s` is its `Retry-After`, 0 = none."""
    return Reply(status, msgspec.json.encode({"error": message}), retry_after_s=again_s)


class Connection(Protocol):
    """What a call needs of its connection."""

    def answered(self) -> None:
        """Looks whether the call's reply can be written now."""
        ...


class Call:
    """One request on the fast path, from its head to its reply; the sink of its own response.

    Attributes:
        head: Its head; `None` for one that was refused while it was read.
        parts: The body, in the pieces in which it arrives.
        reply: Its answer, once there is one.
    """

    __slots__ = ("_connection", "_pending", "_plan", "_request", "head", "parts", "reply")

    def __init__(self, connection: Connection, head: Head | None) -> None:
        self._connection = connection
        self._pending: Pending | None = None
        self._plan: OutputPlan
        self._request: InferRequest
        self.head = head
        self.parts: list[bytes] = []
        self.reply: Reply | None = None

    def deliver(self, response: Response) -> None:
        """Takes the response; a large one takes milliseconds to encode, and is encoded off the loop."""
        size = 0
        for tensor in response.outputs:
            size += tensor.nbytes
        if size <= MAX_FAST_BYTES:
            self.answer(self._encoded(response))
        else:
            thread = asyncio.get_running_loop().run_in_executor(None, self._encoded, response)
            thread.add_done_callback(self._encoded_in_thread)

    def _encoded(self, response: Response) -> Reply:
        reply = reply_of(response, self._request.client_id, self._plan)
        encoding = self.head.encoding if self.head is not None else None
        return reply if encoding is None or reply.status != 200 else reply.compressed(encoding)

    def _encoded_in_thread(self, done: "asyncio.Future[Reply]") -> None:
        error = done.exception()
        if error is not None:
            logger.error("reply could not be encoded", exc_info=error)
        self.answer(done.result() if error is None else failure_reply(error))

    def answer(self, reply: Reply) -> None:
        """Sets the reply, and tells the connection."""
        self._pending = None  # breaks the cycle call - pending, which would wait for the garbage collector
        self.reply = reply
        self._connection.answered()

    def start(self, dispatcher: Dispatcher, max_depth: int) -> None:
        """Decodes and submits the request whose body is complete; what is wrong with it is its answer."""
        head = self.head
        assert head is not None
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts = []
        try:
            context = dispatcher.authorize(head.context, Scope.INFER)
            self._request, self._plan = decode(head.target, body, head.json_length, max_depth)
            pending = dispatcher.submit(context, self._request, self)
        except QinferError as error:
            self.answer(failure_reply(dispatcher.refuse(head.target.model, head.target.version, error)))
        except Exception as error:  # the boundary of a request: a defect of ours may not look like bad HTTP
            logger.exception("request failed")
            self.answer(failure_reply(error))
        else:
            if self.reply is None:
                self._pending = pending

    def cancel(self, dispatcher: Dispatcher) -> None:
        """Forgets the request: its connection is gone."""
        if self._pending is not None:
            dispatcher.cancel(self._pending)
            self._pending = None


class Writer:
    """Renders replies; keeps the block of headers that every reply carries, which uvicorn renews once a second."""

    def __init__(self) -> None:
        self._common: Headers = ()
        self._block = b""

    def render(self, reply: Reply, common: Headers, *, close: bool) -> bytes:
        """Returns the whole reply: status line, common headers, its own headers, body."""
        if common is not self._common:
            self._common, self._block = common, b"".join([b"%b: %b\r\n" % pair for pair in common])
        return b"".join(
            (
                _STATUS_LINES[reply.status],
                self._block,
                reply.head(),
                b"connection: close\r\n\r\n" if close else b"\r\n",
                reply.body,
            )
        )
