"""`POST /v2/models/{m}[/versions/{v}]/infer` below ASGI: which requests, each one's way to its reply, and connections.

Small plain requests take the fast path; the FastAPI route (`rest/infer.py`) takes all others. Both read and answer by
`http/infer.py`, so that they answer alike to the byte. Nothing here waits.

A connection is a subclass of uvicorn's httptools protocol. An infer request that `HeadReader` accepts becomes a `Call`
in `_calls`, and never an ASGI cycle; every other request is replayed into uvicorn's own callbacks. Replies leave in the
order of the requests, by three rules:

- calls wait in `_calls`, and only its head may be written;
- a request behind an unfinished ASGI cycle takes the ASGI way too, where uvicorn queues it;
- an ASGI request behind unfinished calls is held, its reading paused, until they are answered.

What hangs on `cycle` in uvicorn (shutdown, a lost connection, timeouts, flow control) is done here for calls as well.
"""

import asyncio
import logging
from collections import deque
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from qinfer.core.api_keys import Scope
from qinfer.core.messages import IdFactory
from qinfer.core.settings import Settings
from qinfer.errors import Overloaded, QinferError
from qinfer_api.auth import Restrictions
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.call import Call
from qinfer_api.http.cors import Cors
from qinfer_api.http.head import MAX_FAST_BYTES, Head, HeadReader, transfer_codings
from qinfer_api.http.infer import (
    InferCodec,
    Reply,
    Writer,
    compile_forward,
    error_reply,
)
from qinfer_api.receiving import SPENT, ReceivingBudget, Reservation

logger = logging.getLogger(__name__)

SENT_HEADERS = "sent_headers"
"""Key of a request's ASGI state: the headers as they were sent, if headers are forwarded."""

IN_REPLY_TO = "in_reply_to"
"""Key of a request's ASGI state: what has the id that its reply names, once it has one."""

MAX_PIPELINED = 64
"""Calls of one connection in flight before its reading pauses."""

MAX_CHUNKS = 65536
"""Chunks of one chunked body (reference §1.2)."""

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a head beyond the first packet of it."""

MAX_FRAMING_BYTES = 64 * 1024
"""Bytes of a chunked body beside its data, beyond those that chunks need: extensions, long sizes, trailers."""

UNCOUNTED_BYTES = 16 * 1024
"""Bodies up to this size are not counted as received: the connection itself takes as much."""

_CHUNK_BYTES = 16  # what a chunk needs beside its data, with room to spare: its size and the ends of two lines
_LINGER_S = 2.0  # between what a refused client sends, and the end of its connection
_LONGEST_LINGER_S = 30.0


class FastPath:
    """State that all connections of a server share.

    Args:
        dispatcher: Takes the requests.
        settings: Whether the fast path is on, the timeouts, which headers are forwarded, and CORS.
        codec: Reads requests and makes replies.
        restrictions: Which routes need a header; the fast path checks none, so that it is off where inference does.
        receiving: The memory of bodies that have not come in whole.

    Attributes:
        cors: What browsers are told of other origins; `None` = nothing.
        call_type: What a request becomes.
        new_id: Makes the ids of replies to what became no request.

    Raises:
        SettingsError: The pattern of the forwarded headers is no regular expression.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: Settings,
        codec: InferCodec,
        restrictions: Restrictions,
        receiving: ReceivingBudget,
    ) -> None:
        http, self.cors = settings.http, Cors.of(settings.cors)
        self.dispatcher, self.codec, self.receiving = dispatcher, codec, receiving
        self.forward = compile_forward("QINFER_HTTP__HEADER_FORWARD_PATTERN", http.header_forward_pattern)
        enabled = http.fast_path and not restrictions.covers("inference")
        max_bytes = min(MAX_FAST_BYTES, http.max_input_bytes) if enabled else -1
        self.keep_alive_s, self.read_timeout_s = http.keep_alive_s, http.request_read_timeout_s
        self.writer = Writer()
        self.heads = HeadReader(max_bytes, self.forward)
        self.call_type: type[Call] = Call
        self.new_id = IdFactory().ulid


class QinferHttpProtocol(HttpToolsProtocol):
    """One connection; uvicorn makes them with the last four arguments, `functools.partial` adds the first.

    Attributes:
        peer: The address of the client; empty = not known.
    """

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
        self.peer = ""
        self.headers = []  # of the request that the parser reads
        self._calls: deque[Call] = deque()
        self._call: Call | None = None  # the call whose body is being read
        self._memory: Reservation | None = None  # of that body, unless it came with its head
        self._held: tuple[RequestResponseCycle, ASGI3Application] | None = None
        self._closing = False  # no request is taken any more
        self._refused = False  # nothing is read any more
        self._still_sends = True  # after it was refused
        self._ignoring = False  # the request being read came after the last one taken
        self._receiving = False
        self._in_head = False
        self._in_cycle = False  # the request being read is an ASGI cycle's
        self._framing_bytes = 0  # of the message being read: what is no data of its body, beyond its first packet
        self._chunks = 0
        self._refusal: Reply | None = None  # the last reply, which waits for those of ASGI cycles
        self._unwritten_bytes = 0
        self._quiet_since_s = 0.0  # 0 = since the next look

    # -- reading ------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Reads received data: a whole request with a plain head directly, all else through the parser."""
        if self._refused:
            self._still_sends = True
            return
        if not (self._receiving or self._closing or self._cycle_runs()):
            known = self._fast.heads.find(data)
            if known is not None:
                self._quiet_since_s = 0.0
                head, body = known
                call = self._take(head)
                call.parts.append(body)
                call.start(self._fast.dispatcher, self._fast.codec)
                return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parses; neither a head nor what frames a chunked body may grow without bound."""
        self._framing_bytes += len(data)  # the callbacks take off what is data, or begins a message
        super().data_received(data)
        self._framing_bytes = max(self._framing_bytes, 0)
        if self._receiving and self._in_head and self._framing_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"request header exceeds {MAX_HEAD_BYTES} bytes")
        elif self._receiving and self._framing_bytes > MAX_FRAMING_BYTES:
            self._refuse(400, f"chunk extensions and trailers exceed {MAX_FRAMING_BYTES} bytes; send the data only")
        elif self._call is not None and self._memory is None:
            self._reserve(self._call)

    def _reserve(self, call: Call) -> None:
        """Checks the caller whose body did not come with its head, and has the body wait for memory."""
        head, fast = call.head, self._fast
        assert head is not None
        if head.length <= UNCOUNTED_BYTES:
            return
        try:
            tenant = fast.dispatcher.authorize(head.context, Scope.INFER, self.peer).tenant
            self._memory = fast.receiving.reserve(tenant or self, head.length, self._let_in)
            if self._memory is None:
                raise Overloaded(SPENT)
        except QinferError as error:
            self._drop(call, head, error)
        else:
            if not self._memory.is_granted:
                self.flow.pause_reading()

    def _let_in(self) -> None:
        self._quiet_since_s = 0.0
        self._resume_reading()

    def _drop(self, call: Call, head: Head, error: QinferError) -> None:
        """Answers the call with an error, and reads over the rest of its body, which is small."""
        self._release()
        self._call, self._ignoring, self._refused = None, True, self._closing
        call.refuse(self._fast.dispatcher, head, error)
        self._resume_reading()

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.release()
            self._memory = None

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
        self._ignoring = self._in_cycle = False
        self._receiving = self._in_head = True
        self._framing_bytes = self._chunks = 0
        self._quiet_since_s = 0.0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header unchanged; drops trailers, which are never read."""
        if self._in_head:
            self.headers.append((name, value))

    def on_chunk_header(self) -> None:
        """Counts the chunks of a body; the empty one, which ends it, may be one more."""
        self._chunks += 1
        self._framing_bytes -= _CHUNK_BYTES
        if self._chunks > MAX_CHUNKS + 1:
            self._refuse(400, f"request body has more than {MAX_CHUNKS} chunks")

    def on_headers_complete(self) -> None:
        """Chooses the request's way."""
        self._in_head = False
        self._framing_bytes = 0
        if self._closing:
            self._ignoring = True
            return
        head = self._fast_head()
        if head is None:
            self._take_asgi_way()
            return
        self._call = self._take(head)
        if not self.parser.should_keep_alive():
            self._closing = True

    def on_body(self, body: bytes) -> None:
        """Keeps a piece of the body."""
        self._framing_bytes -= len(body)
        if self._call is not None:
            self._call.parts.append(body)
        elif not self._ignoring:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Starts the call whose body is complete."""
        self._receiving = self._in_cycle = False
        call = self._call
        if call is not None:
            self._call = None
            self._release()
            call.start(self._fast.dispatcher, self._fast.codec)
        elif not self._ignoring:
            super().on_message_complete()

    def _fast_head(self) -> Head | None:
        if self._cycle_runs() or self.parser.get_method() != b"POST":
            return None
        head = self._fast.heads.read(self.url, self.headers)
        return head if head is not None and self.parser.get_http_version() == "1.1" else None

    def _take_asgi_way(self) -> None:
        """Hands the request to uvicorn, unless its body has a transfer coding that is not known (RFC 9112 §6.1)."""
        codings = transfer_codings(self.headers)
        if codings and codings != [b"chunked"]:
            given = b", ".join(codings).decode("latin-1")[:100]
            self._refuse(501, f"transfer coding '{given}' is not supported; send the body chunked, or with its length")
        else:
            self._replay_head()

    def _replay_head(self) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        if self._fast.forward is not None:
            self.scope["state"][SENT_HEADERS] = headers  # uvicorn gives their names in lower case
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()
        self._in_cycle = True

    def _cycle_runs(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete

    # -- answering ----------------------------------------------------------------------------------------------------

    def answered(self) -> None:
        """Writes the next replies in order, then releases what waited for them."""
        calls, fast = self._calls, self._fast
        while calls:
            reply = calls[0].reply
            if reply is None:
                break
            call = calls.popleft()
            close = self._closing and not calls and self._held is None
            writer = fast.writer if fast.cors is None else fast.cors.writer(call.head, self.headers)
            common, request_id = self.server_state.default_headers, call.request.id or fast.new_id()
            self.transport.write(writer.render(reply, common, request_id, close=close))
            self.server_state.total_requests += 1
            self._quiet_since_s = 0.0
            if close:
                self._close()
                return
        if not calls and self._held is not None:
            (cycle, app), self._held = self._held, None
            super()._start_asgi_task(cycle, app)
        if self.flow.read_paused:
            self._resume_reading()

    def _close(self) -> None:
        """Closes behind the last reply.

        A client that was refused may still send. What is not read would reset the connection before it has read why:
        it is read and dropped for a while, until the client closes (RFC 9112 §9.6).
        """
        if self._refused and self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
            self._linger(self.loop.time() + _LONGEST_LINGER_S)
        else:
            self.transport.close()

    def _linger(self, until_s: float) -> None:
        """Closes when the client has sent nothing for a while, or sends for too long."""
        now_s = self.loop.time()
        if self._still_sends and now_s < until_s:
            self._still_sends = False
            self.loop.call_later(min(_LINGER_S, until_s - now_s), self._linger, until_s)
        else:
            self.transport.close()

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
        """Reads no more; the error is the last reply, in place of that to the request being read, if there is one."""
        if self._refused:
            return
        ending, self._closing, self._refused, self._ignoring = self._closing, True, True, True
        self.flow.pause_reading()
        self._release()
        reply = error_reply(status, message)
        call, self._call = self._call, None
        if call is not None:
            call.answer(reply)
            return
        if self._in_cycle and not self._withdraw():
            self.transport.close()
            return
        if ending and not self._in_cycle:
            return  # it came after the last request that is answered
        if self._cycle_runs():
            self._refusal = reply
        else:
            self._answer_last(reply)

    def _withdraw(self) -> bool:
        """Takes the request being read from uvicorn; `False` if its reply has begun: nothing can be put behind that."""
        cycle = self.cycle
        if cycle.response_started:
            return False
        if self.pipeline:
            self.pipeline.popleft()
            return True
        self._held = None
        cycle.disconnected = cycle.response_complete = True
        cycle.message_event.set()
        return True

    def _answer_last(self, reply: Reply) -> None:
        call = Call(self, None)
        self._calls.append(call)
        call.answer(reply)

    # -- connection ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes note of who connects."""
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the requests of a closed connection."""
        for call in self._calls:
            call.cancel(self._fast.dispatcher)
        self._calls.clear()
        self._call = None
        self._release()
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
        is_last = not self.pipeline
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self._quiet_since_s = 0.0
        if is_last and self._refusal is not None and not self.transport.is_closing():
            self._answer_last(self._refusal)

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
        stalled = self.flow.write_paused or len(self._calls) >= MAX_PIPELINED or self._waits_for_memory()
        if not (stalled or self._held or self.pipeline or self._refused):
            self.flow.resume_reading()

    def _waits_for_memory(self) -> bool:
        return self._memory is not None and not self._memory.is_granted

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
        stuck = stuck or self._waits_for_memory()
        busy = bool(self._calls) or self._cycle_runs()
        if not self._quiet_since_s or (busy and not stuck):
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s > (self._fast.read_timeout_s if stuck else self._fast.keep_alive_s):
            call = self._call
            if self.flow.write_paused:
                self.transport.abort()  # `close` would wait for the client to read
            elif self._waits_for_memory() and call is not None and call.head is not None:
                self._drop(call, call.head, Overloaded(SPENT))
            else:
                self.transport.close()
