"""`POST /v2/models/{m}[/versions/{v}]/infer` below ASGI: which requests, and each one's way from its head to its reply.

Small plain requests take it (`http/protocol.py` calls); the FastAPI route (`rest/infer.py`) takes all others. Both read
and answer by `http/infer.py`, so that they answer alike to the byte. Nothing here waits.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

from qinfer.core.api_keys import Scope
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import InvalidRequest, QinferError
from qinfer.submission.pending import Pending
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import ANONYMOUS, Context, presented_key
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.forwarding import forwarded
from qinfer_api.http.infer import (
    DECOUPLED,
    Encoding,
    Headers,
    InferCodec,
    Reply,
    Target,
    error_reply,
    failure_reply,
    parse_version,
    response_encoding,
    with_headers,
)

logger = logging.getLogger(__name__)


MAX_FAST_BYTES = 256 * 1024
"""Larger bodies take the route, which decodes them off the event loop."""

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
_NO_HEADERS: Mapping[str, str] = {}
_GONE = Reply(400, b"")  # the reply of a call whose connection was lost


class Head(NamedTuple):
    """What the fast path needs of a request's head; `json_length` is the header's text, unchecked."""

    target: Target
    length: int
    json_length: str | None
    context: Context
    encoding: Encoding | None
    forwarded: Mapping[str, str] = _NO_HEADERS


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


def read_head(
    url: bytes, headers: Headers, max_bytes: int = MAX_FAST_BYTES, forward: re.Pattern[str] | None = None
) -> Head | None:
    """Decides whether a POST can take the fast path; `None` if it can't.

    Args:
        url: The URL as it was sent.
        headers: All headers.
        max_bytes: The largest body that may take it.
        forward: The names of the headers that become parameters of the request.
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
    encoding = _accepted(found["accept"]) if "accept" in found else None
    if forward is None:
        return Head(target, length, json_length, context, encoding)
    return Head(target, length, json_length, context, encoding, forwarded(forward, headers))


@lru_cache(maxsize=256)
def _accepted(header: bytes) -> Encoding | None:
    return response_encoding(header.decode("latin-1"))


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

    frontend = "HTTP"
    __slots__ = ("_codec", "_connection", "_pending", "_plan", "_request", "head", "parts", "reply")

    def __init__(self, connection: Connection, head: Head | None) -> None:
        self._connection = connection
        self._pending: Pending | None = None
        self._codec: InferCodec
        self._plan: OutputPlan
        self._request: InferRequest
        self.head = head
        self.parts: list[bytes] = []
        self.reply: Reply | None = None

    def deliver(self, response: Response) -> None:
        """Takes the response; a large one takes milliseconds to encode, and is encoded off the loop."""
        if not response.final or self.reply is not None:
            if self.reply is None:
                self.answer(error_reply(501, DECOUPLED))
            return
        size = 0
        for tensor in response.outputs:
            size += tensor.nbytes
        if size <= MAX_FAST_BYTES:
            self.answer(self._encoded(response))
        else:
            thread = asyncio.get_running_loop().run_in_executor(None, self._encoded, response)
            thread.add_done_callback(self._encoded_in_thread)

    def _encoded(self, response: Response) -> Reply:
        reply = self._codec.encode(response, self._request.client_id, self._plan)
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

    def start(self, dispatcher: Dispatcher, codec: InferCodec) -> None:
        """Decodes and submits the request whose body is complete; what is wrong with it is its answer."""
        head = self.head
        assert head is not None
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts = []
        self._codec = codec
        try:
            context = dispatcher.authorize(head.context, Scope.INFER)
            if codec.shares_memory and codec.reads_memory(body):
                thread = asyncio.get_running_loop().run_in_executor(None, self._read_checked, dispatcher, head, body)
                thread.add_done_callback(partial(self._read_in_thread, dispatcher, head, context))
                return
            request, self._plan = codec.decode(head.target, body, head.json_length)
            if head.forwarded:
                with_headers(request, head.forwarded)
            self._request = request
            pending = dispatcher.submit(context, request, self)
        except QinferError as error:
            self.answer(failure_reply(dispatcher.refuse(head.target.model, head.target.version, error)))
        except Exception as error:  # the boundary of a request: a defect of ours may not look like bad HTTP
            logger.exception("request failed", extra={"model": head.target.model})
            self.answer(failure_reply(error))
        else:
            if self.reply is None:
                self._pending = pending

    def _read_checked(self, dispatcher: Dispatcher, head: Head, body: bytes) -> None:
        served = dispatcher.resolve(head.target.model, head.target.version)
        self._request, self._plan = self._codec.decode(head.target, body, head.json_length, served)
        with_headers(self._request, head.forwarded)
        dispatcher.check(self._request, served)

    def _read_in_thread(
        self, dispatcher: Dispatcher, head: Head, context: Context, done: "asyncio.Future[None]"
    ) -> None:
        if self.reply is not None:
            return  # the client left
        try:
            done.result()
            pending = dispatcher.submit(context, self._request, self)
        except QinferError as error:
            self.answer(failure_reply(dispatcher.refuse(head.target.model, head.target.version, error)))
        except Exception as error:  # as in `start`
            logger.exception("request failed", extra={"model": head.target.model})
            self.answer(failure_reply(error))
        else:
            if self.reply is None:
                self._pending = pending

    def cancel(self, dispatcher: Dispatcher) -> None:
        """Forgets the request: its connection is gone."""
        if self._pending is not None:
            dispatcher.cancel(self._pending)
            self._pending = None
        elif self.reply is None:
            self.reply = _GONE


_END_OF_HEAD = b"\r\n\r\n"
_MAX_KNOWN = 1024
_MAX_KNOWN_BYTES = 4096


class HeadCache:
    """Caches request heads by their bytes, learned from the parser: clients mostly send the same head again and again.

    Head and body that arrive in one packet, as small requests do, then need no parsing: equal bytes mean the same.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}
        self._last: tuple[bytes, int, Head] | None = None  # the head found last, and the length of its packets

    def find(self, packet: bytes) -> tuple[Head, bytes] | None:
        """Splits a packet that is exactly one request whose head is known; `None` for any other."""
        if self._last is not None:
            begin, length, head = self._last
            if len(packet) == length and packet.startswith(begin):
                return head, packet[len(begin) :]
        end = packet.find(_END_OF_HEAD) + 4
        begin = packet[:end]
        found = self._heads.get(begin)
        if found is None or len(packet) - end != found.length:
            return None
        self._last = begin, len(packet), found
        return found, packet[end:]

    def learn(self, packet: bytes, head: Head) -> None:
        """Remembers the head of a packet in which the parser found exactly one request, and that by its end.

        One with an API key may be: equal bytes are an equal key. One that is traced comes once only.
        """
        end = packet.find(_END_OF_HEAD) + 4
        if end <= _MAX_KNOWN_BYTES and len(packet) - end == head.length and not head.context.trace:
            if len(self._heads) >= _MAX_KNOWN:
                self._heads.clear()
            self._heads[packet[:end]] = head
