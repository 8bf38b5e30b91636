"""`POST /v2/models/{m}[/versions/{v}]/infer` below ASGI: which requests, each one's way to its reply, and connections.

Small plain requests take the fast path; the FastAPI route (`rest/infer.py`) takes all others. Both read and answer by
`http/infer.py`, so that they answer alike to the byte. Nothing here waits.

A connection is a subclass of uvicorn's httptools protocol. An infer request that `read_head` accepts becomes a `Call`
in `_calls`, and never an ASGI cycle; every other request is replayed into uvicorn's own callbacks. Replies leave in the
order of the requests, by three rules:

- calls wait in `_calls`, and only its head may be written;
- a request behind an unfinished ASGI cycle takes the ASGI way too, where uvicorn queues it;
- an ASGI request behind unfinished calls is held, its reading paused, until they are answered.

What hangs on `cycle` in uvicorn (shutdown, a lost connection, timeouts, flow control) is done here for calls as well.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from qinfer.core.api_keys import Scope
from qinfer.core.messages import InferRequest, Response
from qinfer.core.settings import HttpSettings
from qinfer.errors import InvalidRequest, QinferError
from qinfer.submission.pending import Pending
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import ANONYMOUS, Context, Restrictions, caller_of
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.infer import (
    DECOUPLED,
    Encoding,
    Headers,
    InferCodec,
    Reply,
    Target,
    Writer,
    compile_forward,
    error_reply,
    failure_reply,
    forwarded,
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
    b"traceparent": "traceparent",
    b"content-encoding": "coding",
    b"accept-encoding": "accept",
    b"authorization": "authorization",
    b"x-api-key": "x-api-key",
    b"transfer-encoding": "special",
    b"expect": "special",
    b"prefer": "special",
    b"upgrade": "special",
}
_MAX_URL_BYTES = 1024
_NO_HEADERS: Mapping[str, str] = {}
_GONE = Reply(400, b"")  # the reply of a call whose connection was lost


class Head(NamedTuple):
    """The parts of a request's head that the fast path needs; `json_length` is the header's text, unchecked."""

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
    if "traceparent" in found or "authorization" in found or "x-api-key" in found:
        context = caller_of({meaning: value.decode("latin-1") for meaning, value in found.items()}.get)
    encoding = _accepted(found["accept"]) if "accept" in found else None
    forwarding = _NO_HEADERS if forward is None else forwarded(forward, headers)
    return Head(target, length, json_length, context, encoding, forwarding)


@lru_cache(maxsize=256)
def _accepted(header: bytes) -> Encoding | None:
    return response_encoding(header.decode("latin-1"))


class Call:
    """One request on the fast path, from its head to its reply; the sink of its own response.

    Attributes:
        head: Its head; `None` for one that was refused while it was read.
        parts: The body, in the pieces in which it arrives.
        reply: Its answer, once there is one.
    """

    frontend = "HTTP"
    __slots__ = ("_codec", "_connection", "_pending", "_plan", "_request", "head", "parts", "reply")

    def __init__(self, connection: "QinferHttpProtocol", head: Head | None) -> None:
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
        """Sets the reply, and notifies the connection."""
        self._pending = None  # breaks the cycle call - pending, which would wait for the garbage collector
        self.reply = reply
        self._connection.answered()

    def start(self, dispatcher: Dispatcher, codec: InferCodec) -> None:
        """Decodes and submits the request whose body is complete; answers an invalid one with its error."""
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
            if self.reply is None:
                self._pending = pending
        except Exception as error:  # noqa: BLE001 - the boundary of a request: a defect may not look like bad HTTP
            self._refuse(dispatcher, head, error)

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
            if self.reply is None:
                self._pending = pending
        except Exception as error:  # noqa: BLE001 - as in `start`
            self._refuse(dispatcher, head, error)

    def _refuse(self, dispatcher: Dispatcher, head: Head, error: Exception) -> None:
        if isinstance(error, QinferError):
            error = dispatcher.refuse(head.target.model, head.target.version, error)
        else:
            logger.error("request failed", exc_info=error, extra={"model": head.target.model})
        self.answer(failure_reply(error))

    def cancel(self, dispatcher: Dispatcher) -> None:
        """Forgets the request: its connection is gone."""
        if self._pending is not None:
            dispatcher.cancel(self._pending)
            self._pending = None
        elif self.reply is None:
            self.reply = _GONE


_END_OF_HEAD = b"\r\n\r\n"
_MAX_CACHED = 1024
_MAX_CACHED_BYTES = 4096


class HeadCache:
    """Caches request heads by their bytes, as the parser read them: clients mostly send the same head again and again.

    Head and body that arrive in one packet, as small requests do, then need no parsing: equal bytes mean the same.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}
        self._last: tuple[bytes, int, Head] | None = None  # the head found last, and the length of its packets

    def find(self, packet: bytes) -> tuple[Head, bytes] | None:
        """Splits a packet that is exactly one request whose head is cached; `None` for any other."""
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
        if end <= _MAX_CACHED_BYTES and len(packet) - end == head.length and not head.context.trace:
            if len(self._heads) >= _MAX_CACHED:
                self._heads.clear()
            self._heads[packet[:end]] = head


SENT_HEADERS = "sent_headers"
"""Key of a request's ASGI state: the headers as they were sent, if headers are forwarded."""

MAX_PIPELINED = 64
"""Calls of one connection in flight before its reading pauses."""

MAX_CHUNKS = 65536
"""Chunks of one chunked body (reference §1.2)."""

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a head beyond the first packet of it."""


class FastPath:
    """State that all connections of a server share.

    Args:
        dispatcher: Takes the requests.
        http: Whether the fast path is on, the timeouts, and which headers are forwarded.
        codec: Reads requests and makes replies.
        restrictions: Which routes need a header; the fast path checks none, so that it is off where inference does.

    Attributes:
        call_type: What a request becomes.

    Raises:
        SettingsError: The pattern of the forwarded headers is no regular expression.
    """

    def __init__(
        self, dispatcher: Dispatcher, http: HttpSettings, codec: InferCodec, restrictions: Restrictions
    ) -> None:
        self.dispatcher = dispatcher
        self.codec = codec
        self.enabled = http.fast_path and not restrictions.covers("inference")
        self.forward = compile_forward("QINFER_HTTP__HEADER_FORWARD_PATTERN", http.header_forward_pattern)
        self.max_bytes = min(MAX_FAST_BYTES, http.max_input_bytes)
        self.keep_alive_s = http.keep_alive_s
        self.read_timeout_s = http.request_read_timeout_s
        self.writer = Writer()
        self.heads = HeadCache()
        self.call_type: type[Call] = Call


class QinferHttpProtocol(HttpToolsProtocol):
    """One connection; uvicorn makes them with the last four arguments, `functools.partial` adds the first."""

    def __init__(
        self,
        fast: FastPath,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._fast = fast
        self._calls: deque[Call] = deque()
        self._call: Call | None = None  # the call whose body is being read
        self._held: tuple[RequestResponseCycle, ASGI3Application] | None = None
        self._closing = False  # no request is taken any more
        self._refused = False  # nothing is read any more
        self._ignoring = False  # the request being read came after the last one taken
        self._receiving = False
        self._in_head = False
        self._head_bytes = 0
        self._chunks = 0
        self._unwritten_bytes = 0
        self._completed: list[Call | None] = []  # what the present packet completed; `None` is another's request
        self._quiet_since_s = 0.0  # 0 = since the next look

    # -- reading ------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Reads received data: a whole request with a cached head directly, all else through the parser."""
        if self._refused:
            return
        if self._receiving or self._closing or self._cycle_runs():
            self._parse(data)
            self._completed.clear()
            return
        known = self._fast.heads.find(data)
        if known is not None:
            self._quiet_since_s = 0.0
            head, body = known
            call = self._take(head)
            call.parts.append(body)
            call.start(self._fast.dispatcher, self._fast.codec)
            return
        self._parse(data)
        if len(self._completed) == 1 and not (self._receiving or self._closing):
            completed = self._completed[0]
            if completed is not None and completed.head is not None:
                self._fast.heads.learn(data, completed.head)
        self._completed.clear()

    def _parse(self, data: bytes) -> None:
        """Parses; a head may not grow without bound."""
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"request header exceeds {MAX_HEAD_BYTES} bytes")

    def _take(self, head: Head) -> Call:
        call = self._fast.call_type(self, head)
        self._calls.append(call)
        if len(self._calls) >= MAX_PIPELINED:
            self.flow.pause_reading()
        return call

    def on_message_begin(self) -> None:
        """Begins a request; uvicorn's ASGI scope is built only when one is needed."""
        self.url = b""
        self.headers = []
        self._call = None
        self._ignoring = False
        self._receiving = self._in_head = True
        self._head_bytes = self._chunks = 0
        self._quiet_since_s = 0.0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header unchanged; drops trailers, which are never read."""
        if self._in_head:
            self.headers.append((name, value))

    def on_chunk_header(self) -> None:
        """Counts the chunks of a body."""
        self._chunks += 1
        if self._chunks > MAX_CHUNKS and not self._refused:
            self._refuse(400, f"request body has more than {MAX_CHUNKS} chunks")

    def on_headers_complete(self) -> None:
        """Chooses the request's way."""
        self._in_head = False
        if self._closing:
            self._ignoring = True
            return
        head = self._fast_head()
        if head is None:
            self._replay_head()
            return
        self._call = self._take(head)
        if not self.parser.should_keep_alive():
            self._closing = True

    def on_body(self, body: bytes) -> None:
        """Keeps a piece of the body."""
        if self._call is not None:
            self._call.parts.append(body)
        elif not self._ignoring:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Starts the call whose body is complete."""
        self._receiving = False
        call = self._call
        self._completed.append(call)
        if call is not None:
            self._call = None
            call.start(self._fast.dispatcher, self._fast.codec)
        elif not self._ignoring:
            super().on_message_complete()

    def _fast_head(self) -> Head | None:
        fast = self._fast
        if not fast.enabled or self._cycle_runs() or self.parser.get_method() != b"POST":
            return None
        head = read_head(self.url, self.headers, fast.max_bytes, fast.forward)
        return head if head is not None and self.parser.get_http_version() == "1.1" else None

    def _replay_head(self) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        if self._fast.forward is not None:
            self.scope["state"][SENT_HEADERS] = headers  # uvicorn gives their names in lower case
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()

    def _cycle_runs(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete

    # -- answering ----------------------------------------------------------------------------------------------------

    def answered(self) -> None:
        """Writes the next replies in order, then releases what waited for them."""
        calls = self._calls
        while calls:
            reply = calls[0].reply
            if reply is None:
                break
            calls.popleft()
            close = self._closing and not calls and self._held is None
            self.transport.write(self._fast.writer.render(reply, self.server_state.default_headers, close=close))
            self.server_state.total_requests += 1
            self._quiet_since_s = 0.0
            if close:
                self.transport.close()
                return
        if not calls and self._held is not None:
            (cycle, app), self._held = self._held, None
            super()._start_asgi_task(cycle, app)
        if self.flow.read_paused:
            self._resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if self._calls:
            self._held = (cycle, app)
            self.flow.pause_reading()
        else:
            super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Refuses data that is not HTTP, after the replies to earlier requests."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        self._closing = self._refused = True
        self.flow.pause_reading()
        if self._cycle_runs():  # its reply may be half written: nothing can be put between
            self.transport.close()
            return
        call = self._call
        if call is None:
            call = Call(self, None)
            self._calls.append(call)
        call.answer(error_reply(status, message))

    # -- connection ---------------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the requests of a closed connection."""
        for call in self._calls:
            call.cancel(self._fast.dispatcher)
        self._calls.clear()
        self._call = None
        self._held = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Accepts no more requests; closes once open requests are answered."""
        self._closing = True
        if self._cycle_runs():
            self.cycle.keep_alive = False
        elif not self._calls:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Ends an ASGI request; `check_timeouts` looks after idle connections, instead of uvicorn's timer for each."""
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self._quiet_since_s = 0.0

    def pause_writing(self) -> None:
        """Stops reading from a client that does not read its replies."""
        super().pause_writing()
        self._quiet_since_s = 0.0
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        """Reads on."""
        super().resume_writing()
        self._resume_reading()

    def _resume_reading(self) -> None:
        stalled = self.flow.write_paused or len(self._calls) >= MAX_PIPELINED
        if not (stalled or self._held or self.pipeline or self._refused):
            self.flow.resume_reading()

    def check_timeouts(self, now_s: float) -> None:
        """Closes the connection if it was idle, or stuck in one request or reply, for too long.

        Called about once a second for every connection, instead of a timer for every request.

        Args:
            now_s: The monotonic time.
        """
        unwritten_bytes = self.transport.get_write_buffer_size() if self.flow.write_paused else 0
        if unwritten_bytes < self._unwritten_bytes:
            self._quiet_since_s = now_s  # slow, but it reads
        self._unwritten_bytes = unwritten_bytes
        waiting = len(self._calls) > (self._call is not None)  # for answers, besides the call that still arrives
        stuck = self.flow.write_paused or (self._receiving and not self.flow.read_paused and not waiting)
        busy = bool(self._calls) or self._cycle_runs()
        if not self._quiet_since_s or (busy and not stuck):
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s > (self._fast.read_timeout_s if stuck else self._fast.keep_alive_s):
            if self.flow.write_paused:
                self.transport.abort()  # `close` would wait for the client to read
            else:
                self.transport.close()
