"""An HTTP/1.1 connection over httptools: parses requests, writes replies in order, and bounds both.

Only the first request in the queue may write. Each request becomes a `Cycle`, which runs the ASGI application when it
is first; a subclass may answer some below ASGI. The parser, made when it is first needed, gets small slices and stops
when a request stalls, because one read may hold thousands of requests.
"""

import asyncio
import logging
import select
import time
from collections import deque
from collections.abc import Iterable
from email.utils import formatdate
from functools import cached_property
from typing import Protocol
from urllib.parse import unquote

from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserInvalidURLError,
    HttpParserUpgrade,
    HttpRequestParser,
    parse_url,
)
from starlette.types import ASGIApp, Scope

from qinfer.core.messages import IdFactory
from qinfer.core.settings import HttpSettings
from qinfer.submission.memory import Landing
from qinfer.submission.pending import Memory
from qinfer.tensors import Bytes
from qinfer_api.http.cors import Cors
from qinfer_api.http.cycle import CLOSE, SENT_HEADERS, WRITTEN, Cycle
from qinfer_api.http.head import RequestHead, Visitors, transfer_codings
from qinfer_api.http.infer import LARGE_BYTES, Headers, HttpReply, Writer, error_reply
from qinfer_api.receiving import AGAIN_S, NO_ROOM, READ_BYTES, SwitchingConnection
from qinfer_api.turns import SMALL_BYTES, Turns

logger = logging.getLogger(__name__)

MAX_PIPELINED = 64

MOST_HELD_BYTES = 32 * 1024 * 1024
"""The bytes of unparsed reads of a port's connections from which each reads less at once, but for bodies."""

HEAD_READ_BYTES = 4096
"""The bytes read of a request whose body is to be received into memory."""

LESS_READ_BYTES = 2 * SMALL_BYTES
"""More than `SMALL_BYTES`, so that small reads of a flood wait for turns as well."""

SLICE_BYTES = 1024
"""The bytes that are parsed at once, unless they are of one body: about `MAX_PIPELINED` of the shortest requests."""

HEADS_BYTES = 64
"""The bytes that are parsed at once of a large read that may hold many heads: a few of the shortest requests."""

_TOO_MANY_WAIT = "too many pipelined requests wait at the gateway; try again, with one request at a time"

MAX_CHUNKS = 65536
"""The most chunks of one chunked body (reference §1.2)."""

MAX_HEAD_BYTES = 64 * 1024
"""The most bytes of a head beyond its first slice."""

MAX_FRAMING_BYTES = 64 * 1024
"""Bytes of chunk extensions, long sizes and trailers in one chunked body."""

_NOTHING = memoryview(b"")
_ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR  # Linux sees the end behind unread bytes
_INVALID = "Invalid HTTP request received."
_CHUNK_BYTES = 16  # size line and two line ends
_LINGER_S = 2.0
_LONGEST_LINGER_S = 30.0


def has_ended(transport: asyncio.Transport) -> bool:
    """Returns whether the client sends no more; reads nothing."""
    opened = transport.get_extra_info("socket")
    if opened is None or opened.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(opened.fileno(), _ENDED)
    return bool(poll.poll(0))


class Exchange(Protocol):
    """A request in the queue of its connection."""

    @property
    def head(self) -> RequestHead | None:
        """The head on the fast path, else `None`."""
        ...

    @property
    def reply(self) -> HttpReply | None:
        """`None` until the request is answered."""
        ...

    @property
    def request_id(self) -> str:
        """The id that the reply names; empty = the connection makes a new id."""
        ...

    @property
    def memory(self) -> Memory | None:
        """The reserved memory of a large reply."""
        ...

    def feed(self, body: bytes) -> None:
        """Adds a piece of the body."""
        ...

    def come_first(self) -> None:
        """Notes that this reply is the next one."""
        ...


class _RefusedRequest:
    head = memory = None
    request_id = ""

    def __init__(self, reply: HttpReply) -> None:
        self.reply = reply

    def feed(self, body: bytes) -> None:
        """Drops the piece."""

    def come_first(self) -> None:
        """Does nothing: the reply exists."""


class HttpPort:
    """State shared by all connections of a server."""

    app: ASGIApp

    def __init__(self, http: HttpSettings, cors: Cors | None = None, visitors: Visitors | None = None) -> None:
        self.cors, self.visitors, self.writer = cors, visitors, Writer()
        self.common: Headers = ()
        self.keep_alive_s, self.read_timeout_s = http.keep_alive_s, http.request_read_timeout_s
        self.turns = Turns()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.less_buffer, self.head_buffer = self.buffer[:LESS_READ_BYTES], self.buffer[:HEAD_READ_BYTES]
        self.held_bytes = 0  # of unparsed reads, of all connections
        self.connections: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_idle = asyncio.Event()
        self.new_id = IdFactory().ulid

    def connect(self) -> "HttpConnection":
        """Creates the protocol of a connection."""
        return HttpConnection(self)

    def note_unparsed(self, nbytes: int) -> None:
        """Counts unparsed bytes; when they are many, all connections read less at once."""
        was_less = self.held_bytes >= MOST_HELD_BYTES
        self.held_bytes += nbytes
        if not was_less and self.held_bytes >= MOST_HELD_BYTES:
            for connection in self.connections:
                connection.read_into_buffers()

    async def tick(self) -> None:
        """Renews the `date` header and checks timeouts."""
        self.common = [(b"date", formatdate(usegmt=True).encode())]
        async for connection in self.turns.in_turns(tuple(self.connections)):
            if connection in self.connections:
                connection.check_timeouts(time.monotonic())


class HttpConnection(SwitchingConnection):
    """One connection; `writable` is set while the client reads its replies."""

    transport: asyncio.Transport

    def __init__(self, port: HttpPort) -> None:
        self.port = port
        self.peer = ""
        self._ends: Scope = {}
        self.headers: list[tuple[bytes, bytes]] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self._queue: deque[Exchange] = deque()
        self._reading: Exchange | None = None  # receives a body; `None`: it is ignored
        self._unparsed = _NOTHING
        self._held_bytes = 0  # counted at the port
        self._is_parsing = self._is_paused = self._awaits_turn = False
        self._closing = False
        self._refused = False
        self._lingers, self._still_sends = False, True  # after a refusal
        self._receiving = self._in_head = self._is_chunked = False
        self._url = b""
        self._framing_bytes = 0  # of this message, beyond its first slice
        self._chunks = 0
        self._body_left = 0  # negative without Content-Length
        self._landing: Landing | None = None  # takes the rest of a body past the parser
        self._lands = False  # the next body probably lands as well
        self._unwritten_bytes = 0
        self._lent: list[Memory] = []  # the memory of unread replies
        self._later_bytes = 0  # bytes written behind those: no sign of progress
        self._quiet_since_s = 0.0  # 0 = set at the next check

    @cached_property
    def _parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # -- reading ------------------------------------------------------------------------------------------------------

    def read_into_buffers(self) -> None:
        """Reads into `get_buffer` from now on."""
        self._buffer_reads(self.transport, is_paused=self._is_paused)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns a buffer of all connections: `buffer_updated` copies what was read."""
        if self._landing is not None and not self._refused:
            return self._landing.room
        port = self.port
        if self._reading is None and self._lands and not self._refused:
            return port.head_buffer
        is_less = port.held_bytes >= MOST_HELD_BYTES and self._body_left <= LESS_READ_BYTES
        return port.less_buffer if is_less else port.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Takes the bytes that were read."""
        landing = self._landing
        if landing is not None and not self._refused:
            landing.came(nbytes)
            self._body_left -= nbytes
            if not landing.rest:
                self._end_landing()
            elif not (landing.room or landing.has_room()):
                self._refuse_landing()
            return
        self.data_received(self.port.buffer[:nbytes].tobytes())

    def _land(self, landing: Landing, parts: Iterable[Bytes]) -> None:
        self._landing, self._lands = landing, True
        for part in parts:
            if not landing.has_room(len(part)):
                self._refuse_landing()
                return
            landing.add(part)
        if not landing.has_room():
            self._refuse_landing()
        elif not self._is_buffered:
            self.read_into_buffers()

    def _refuse_landing(self) -> None:
        self._refuse(503, NO_ROOM, AGAIN_S)

    def _end_landing(self) -> None:
        self._landing = None
        self.on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parses data until a request stalls."""
        if self._refused:
            self._still_sends = True
            return
        self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
        self.go_on()

    def go_on(self) -> None:
        """Parses until a request stalls; pauses or resumes the transport."""
        if self._is_parsing:
            return
        self._is_parsing, is_fresh = True, True
        try:
            while self._unparsed and not self._stalls():
                if len(self._unparsed) > max(SMALL_BYTES, self._body_left) and not self.port.turns.may_read():
                    self._awaits_turn = True
                    self.port.turns.wait(self._take_turn, is_fresh=is_fresh)
                    break
                self._parse_slice(self._slice_bytes())
                is_fresh = False
        finally:
            self._is_parsing = False
        if self._unparsed or self._held_bytes:
            self._count_held()
        stalls = self._stalls()
        if stalls != self._is_paused and not self.transport.is_closing():
            self._is_paused = stalls
            if stalls:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _count_held(self) -> None:
        """Counts the whole read, which an unparsed rest keeps in memory; a small rest is copied."""
        held_bytes = memoryview(self._unparsed.obj).nbytes
        if len(self._unparsed) <= SMALL_BYTES < held_bytes:
            self._unparsed = memoryview(bytes(self._unparsed))
            held_bytes = len(self._unparsed)
        self.port.note_unparsed(held_bytes - self._held_bytes)
        self._held_bytes = held_bytes

    def _take_turn(self) -> None:
        self._awaits_turn = False
        self.go_on()

    @property
    def has_more(self) -> bool:
        """Whether the client has sent more requests behind the one that is next."""
        return len(self._queue) > 1 or (len(self._unparsed) > max(self._body_left, 0) and not self._is_chunked)

    def is_abandoned(self) -> bool:
        """Returns whether a flood's client has ended its side: while others wait, the rest is not worth its time."""
        if len(self._unparsed) <= SMALL_BYTES or not self.port.turns.is_awaited:
            return False
        return self.has_more and has_ended(self.transport)

    def _stalls(self) -> bool:
        queue = self._queue
        if self._refused:
            return not self._lingers
        if self._awaits_turn:
            return True
        if len(queue) >= MAX_PIPELINED or not self.writable.is_set() or self._waits_for_memory():
            return True
        return bool(queue) and isinstance(last := queue[-1], Cycle) and last.stalls

    def _waits_for_memory(self) -> bool:
        return False

    def _slice_bytes(self) -> int:
        """Returns how much is parsed at once: a body, or so little of heads that few requests exist at a time."""
        if self._body_left > 0:
            return max(self._body_left, HEADS_BYTES)
        may_be_many = len(self._unparsed) > SMALL_BYTES and not self._is_chunked and self._framing_bytes < SLICE_BYTES
        return HEADS_BYTES if may_be_many else SLICE_BYTES

    def _parse_slice(self, nbytes: int) -> None:
        data = self._unparsed
        taken = min(nbytes, len(data))
        self._unparsed = data[taken:] or _NOTHING  # while it is parsed, too, `has_more` is about what follows
        self._framing_bytes += taken  # the callbacks subtract body data, and reset it for a new message
        try:
            try:
                self._parser.feed_data(data[:taken])
            except HttpParserUpgrade as upgrade:
                self._unparsed = data[upgrade.args[0] :] or _NOTHING
                self._ignore_upgrade()
        except (HttpParserError, HttpParserUpgrade) as error:
            if isinstance(error, HttpParserCallbackError):
                logger.error("request could not be taken", exc_info=error)
            self._refuse(400, _INVALID)
        self._framing_bytes = max(self._framing_bytes, 0)
        if self._receiving and self._in_head and self._framing_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"request header exceeds {MAX_HEAD_BYTES} bytes")
        elif self._receiving and self._framing_bytes > MAX_FRAMING_BYTES:
            self._refuse(400, f"chunk extensions and trailers exceed {MAX_FRAMING_BYTES} bytes; send the data only")

    def _ignore_upgrade(self) -> None:
        """Parses the head again without `Upgrade` (RFC 9110 §7.8)."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        kept = [b"%b: %b\r\n" % header for header in self.headers if header[0].lower() != b"upgrade"]
        del self._parser
        self._parser.feed_data(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(kept)))

    def on_message_begin(self) -> None:
        """Resets the state for a new request."""
        self._url = b""
        self.headers = []
        self._reading = None
        self._receiving = self._in_head = True
        self._framing_bytes = self._chunks = self._body_left = 0
        self._is_chunked = False
        self._quiet_since_s = 0.0

    def on_url(self, url: bytes) -> None:
        """Adds a piece of the URL."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stores a header unchanged; drops trailers."""
        if self._in_head:
            self.headers.append((name, value))

    def on_chunk_header(self) -> None:
        """Counts chunks."""
        self._chunks += 1
        self._framing_bytes -= _CHUNK_BYTES
        if self._chunks > MAX_CHUNKS + 1:
            self._refuse(400, f"request body has more than {MAX_CHUNKS} chunks")

    def on_headers_complete(self) -> None:
        """Queues the request."""
        self._in_head = False
        self._framing_bytes = 0
        if not (self._closing or self._parser.should_upgrade()):
            problem = "" if self.port.visitors is None else self.port.visitors.problem(self.headers)
            if problem:
                self._refuse(403, problem)
            else:
                self._dispatch_request()
            self._closing = self._closing or self._is_old() or not self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Passes on a piece of the body."""
        self._framing_bytes -= len(body)
        self._body_left -= len(body)
        if self._reading is not None:
            self._reading.feed(body)

    def on_message_complete(self) -> None:
        """Ends the body of the current request."""
        cycle, self._reading = self._reading, None
        self._receiving = self._is_chunked = False
        if isinstance(cycle, Cycle):
            cycle.end_body()

    def _is_old(self) -> bool:
        return self._parser.get_http_version() != "1.1"

    def _dispatch_request(self) -> None:
        """Puts a request into the queue, unless its transfer coding is unknown (RFC 9112 §6.1)."""
        codings = transfer_codings(self.headers)
        if codings and codings != [b"chunked"]:
            given = b", ".join(codings).decode("latin-1")[:100]
            self._refuse(501, f"transfer coding '{given}' is not supported; send the body chunked, or with its length")
            return
        try:
            scope = self._scope()
        except (HttpParserInvalidURLError, UnicodeDecodeError):
            self._refuse(400, _INVALID)
            return
        sent = dict(scope["headers"])
        waits = sent.get(b"expect", b"").lower() == b"100-continue" and not self._is_old()
        self._body_left, self._is_chunked = int(sent.get(b"content-length", b"0")), bool(codings)
        self._reading = cycle = Cycle(self, scope, expects_continue=waits)
        self._queue.append(cycle)
        if len(self._queue) == 1:
            cycle.start()

    def _scope(self) -> Scope:
        url = parse_url(self._url)
        raw_path = url.path or b"/"
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "path": unquote(raw_path.decode("ascii")),
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in self.headers],
            **self._ends,
            "state": {SENT_HEADERS: self.headers},
        }

    # -- answering ----------------------------------------------------------------------------------------------------

    def on_reply(self) -> None:
        """Writes finished replies; starts the next request."""
        queue, port = self._queue, self.port
        while queue:
            first = queue[0]
            reply = first.reply
            if reply is None:
                first.come_first()
                break
            queue.popleft()
            close = self._closing and not queue
            if reply is not WRITTEN:
                writer = port.writer if port.cors is None else self.writer_of(first)
                request_id = first.request_id or port.new_id()
                if self._lent or reply.tensors or len(reply.body) > LARGE_BYTES:
                    self._write_pieces(writer.pieces(reply, port.common, request_id, close=close))
                else:
                    self.transport.write(writer.render(reply, port.common, request_id, close=close))
            if first.memory is not None:
                self._lend(first.memory)
            self._quiet_since_s = 0.0
            if close or (isinstance(first, Cycle) and first.closes):
                self._close()
                return
        if self._is_paused:
            self.go_on()

    def _write_pieces(self, pieces: Iterable[Bytes]) -> None:
        unread = self.transport.get_write_buffer_size()
        self.transport.writelines(pieces)
        if self._lent:
            self._later_bytes += self.transport.get_write_buffer_size() - unread

    def _lend(self, memory: Memory) -> None:
        if self.writable.is_set():
            memory.release()
            return
        unread, abort = self.transport.get_write_buffer_size, self.transport.abort
        begin = unread() - self._later_bytes
        memory.watch(lambda: begin + self._later_bytes - unread(), abort)
        self._lent.append(memory)

    def _give_back(self) -> None:
        for memory in self._lent:
            memory.release()
        self._lent.clear()
        self._later_bytes = 0

    def writer_of(self, exchange: Exchange) -> Writer:
        """Returns a reply's writer."""
        cors = self.port.cors
        if cors is None:
            return self.port.writer
        return cors.writer(exchange.head, exchange.scope["headers"] if isinstance(exchange, Cycle) else self.headers)

    def is_last(self, exchange: Exchange) -> bool:
        """Returns whether the connection closes after this reply."""
        return self._closing and self._queue[-1] is exchange

    def _close(self) -> None:
        """Drops further bytes until the client closes: a reset would hide the reply (RFC 9112 §9.6)."""
        if (self._refused or self._receiving) and self.transport.can_write_eof():
            self._refused = self._lingers = True
            self._unparsed = _NOTHING
            try:
                self.transport.write_eof()
            except OSError:
                self.transport.abort()
                return
            self.go_on()
            self._linger(asyncio.get_running_loop().time() + _LONGEST_LINGER_S)
        else:
            self.transport.close()

    def _linger(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._still_sends and now_s < until_s:
            self._still_sends = False
            loop.call_later(min(_LINGER_S, until_s - now_s), self._linger, until_s)
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, again_s: int = 0) -> None:
        if self._refused:
            return
        is_past_last = self._closing and self._reading is None
        self._closing = self._refused = True
        self._unparsed = _NOTHING
        self.go_on()
        if is_past_last:
            return
        if self._withdraw():
            self._queue.append(_RefusedRequest(error_reply(status, message, again_s)))
            self.on_reply()
        else:
            self.transport.close()

    def cut(self) -> None:
        """Ends a flood with a 503, and without reading on, which would cost others more than the requests do."""
        if self.transport.get_write_buffer_size():  # the client does not read
            self.transport.abort()
            return
        reply, port = error_reply(503, _TOO_MANY_WAIT, AGAIN_S), self.port
        self.transport.write(self.writer_of(self._queue[0]).render(reply, port.common, port.new_id(), close=True))
        self.transport.close()

    def _withdraw(self) -> bool:
        """Takes back the request being read; returns false if its reply has begun."""
        exchange, self._reading = self._reading, None
        if isinstance(exchange, Cycle):
            if exchange.has_begun or exchange.reply is not None:
                return False
            exchange.disconnect()
        if exchange is not None:
            self._queue.pop()
        return True

    # -- connection ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Records the transport and the addresses."""
        self.transport = transport
        self.port.connections.add(self)
        if self.port.held_bytes >= MOST_HELD_BYTES:
            self.read_into_buffers()
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.peer = str(peer[0]) if peer else ""
        scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._ends = {
            "scheme": scheme,
            "client": peer[:2] if peer else None,
            "server": own[:2] if own else None,
            "extensions": {CLOSE: transport.close},
        }

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies applications and releases memory."""
        self.port.connections.discard(self)
        if not self.port.connections:
            self.port.is_idle.set()
        for exchange in self._queue:
            if exchange.memory is not None:
                exchange.memory.release()
            if isinstance(exchange, Cycle):
                exchange.disconnect()
        self._give_back()
        self._queue.clear()
        self._reading = self._landing = None
        self._refused, self._unparsed = True, _NOTHING
        self._count_held()
        self.writable.set()
        vars(self).pop("_parser", None)  # each refers to the other

    def shutdown(self) -> None:
        """Closes after the open requests."""
        self._closing = True
        if not self._queue:
            self.transport.close()

    def pause_writing(self) -> None:
        """Pauses reading while replies are unread."""
        self.writable.clear()
        self._quiet_since_s = 0.0
        self.go_on()

    def resume_writing(self) -> None:
        """Resumes reading."""
        self._give_back()
        self.writable.set()
        self.go_on()

    def check_timeouts(self, now_s: float) -> None:
        """Closes an idle or stuck connection."""
        write_paused = not self.writable.is_set()
        unwritten_bytes = self.transport.get_write_buffer_size() if write_paused else 0
        if unwritten_bytes < self._unwritten_bytes:
            self._quiet_since_s = now_s  # slow, but the client reads
        self._unwritten_bytes = unwritten_bytes
        waiting = len(self._queue) > (self._reading is not None)  # on replies
        stuck = write_paused or (self._receiving and not self._is_paused and not waiting) or self._waits_for_memory()
        if not self._quiet_since_s or (self._queue and not stuck):
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s > (self.port.read_timeout_s if stuck else self.port.keep_alive_s):
            self._time_out()

    def _time_out(self) -> None:
        if self.writable.is_set():
            self.transport.close()
        else:
            self.transport.abort()  # `close` would wait until the client reads
