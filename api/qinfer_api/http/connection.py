"""A connection of HTTP/1.1 over httptools: requests in, replies out in the order of the requests; bounds; its end.

Each request that is taken waits in a queue until it is answered, and only the first may write. Here each becomes a
`Cycle`, which runs the ASGI application once it is the first; a subclass may answer some below ASGI. The parser gets
small slices, and only as long as no request stalls it: one read may have thousands of small requests. A connection that
has sent much is read in turns with others (`Turns`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from email.utils import formatdate
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
from qinfer.submission.pending import Memory
from qinfer_api.http.cors import Cors
from qinfer_api.http.cycle import CLOSE, SENT_HEADERS, WRITTEN, Cycle
from qinfer_api.http.head import Head, transfer_codings
from qinfer_api.http.infer import LARGE_BYTES, Headers, Reply, Writer, error_reply
from qinfer_api.http.visitors import Visitors
from qinfer_api.turns import SMALL_BYTES, Turns

logger = logging.getLogger(__name__)

MAX_PIPELINED = 64
"""Requests of one connection without an answer before its reading pauses."""

SLICE_BYTES = 16 * 1024
"""Bytes that are parsed at once, or more of one body: the requests in them are taken, however many there are."""

MAX_CHUNKS = 65536
"""Chunks of one chunked body (reference §1.2)."""

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a head beyond the first slice of it."""

MAX_FRAMING_BYTES = 64 * 1024
"""Bytes of a chunked body beside its data, beyond those that chunks need: extensions, long sizes, trailers."""

_NOTHING = memoryview(b"")
_INVALID = "Invalid HTTP request received."
_CHUNK_BYTES = 16  # what a chunk needs beside its data, with room to spare: its size and the ends of two lines
_LINGER_S = 2.0  # between what a refused client sends, and the end of its connection
_LONGEST_LINGER_S = 30.0


class Exchange(Protocol):
    """A request that was taken."""

    @property
    def head(self) -> Head | None:
        """The head of a request on the fast path; `None` for others."""
        ...

    @property
    def reply(self) -> Reply | None:
        """The answer, once there is one."""
        ...

    @property
    def request_id(self) -> str:
        """The id that its reply names; empty = a new one."""
        ...

    @property
    def memory(self) -> Memory | None:
        """The memory of its answer, where that is large."""
        ...

    def feed(self, body: bytes) -> None:
        """Takes a piece of its body."""
        ...

    def come_first(self) -> None:
        """Takes note that its answer is the next one to be written."""
        ...


class _Refused:
    """A request, or no HTTP at all, that is read no further and answered with an error."""

    head = memory = None
    request_id = ""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    def feed(self, body: bytes) -> None:
        """Drops a piece of the body."""

    def come_first(self) -> None:
        """Does nothing: the answer is there."""


class HttpPort:
    """State that all connections of a server share.

    Args:
        http: The timeouts.
        cors: The headers for browsers, by the origin of the page; `None` = CORS is off.
        visitors: Refuses requests that may come from a stranger's page; `None` = refuses none.

    Attributes:
        app: The ASGI application; the server sets it.
        cors: As given.
        visitors: As given.
        writer: Renders replies, unless CORS has another for their origin.
        common: The headers of every reply; another list each second.
        turns: Says how long a connection is read at a time.
        connections: The open ones.
        tasks: One for each application that runs.
        is_idle: Set when no connection is left.
        new_id: Makes the ids of replies to what became no request.
    """

    app: ASGIApp

    def __init__(self, http: HttpSettings, cors: Cors | None = None, visitors: Visitors | None = None) -> None:
        self.cors, self.visitors, self.writer = cors, visitors, Writer()
        self.common: Headers = ()
        self.keep_alive_s, self.read_timeout_s = http.keep_alive_s, http.request_read_timeout_s
        self.turns = Turns()
        self.connections: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_idle = asyncio.Event()
        self.new_id = IdFactory().ulid

    def connect(self) -> "HttpConnection":
        """Makes the protocol of a connection."""
        return HttpConnection(self)

    def tick(self, now_s: float) -> None:
        """Renews the date, and looks after the connections' timeouts; called once a second, with the monotonic time."""
        self.common = [(b"date", formatdate(usegmt=True).encode())]
        for connection in tuple(self.connections):
            connection.check_timeouts(now_s)


class HttpConnection(asyncio.Protocol):
    """One connection.

    Attributes:
        port: The state that it shares with the others.
        transport: Its transport.
        peer: The address of the client; empty = not known.
        headers: As they were sent, of the request that the parser reads.
        writable: Set while the client reads its replies.
    """

    transport: asyncio.Transport

    def __init__(self, port: HttpPort) -> None:
        self.port = port
        self.peer = ""
        self._ends: Scope = {}  # what the scopes of its requests have in common
        self.headers: list[tuple[bytes, bytes]] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self._queue: deque[Exchange] = deque()
        self._reading: Exchange | None = None  # the request whose body comes in, unless that is ignored
        self._unparsed = _NOTHING
        self._parser = self._new_parser()
        self._is_parsing = self._is_paused = self._awaits_turn = False
        self._closing = False  # no request is taken any more
        self._refused = False  # nothing is read any more
        self._lingers, self._still_sends = False, True  # after it was refused
        self._receiving = self._in_head = False
        self._url = b""
        self._framing_bytes = 0  # of the message being read: what is no data of its body, beyond its first slice
        self._chunks = 0
        self._body_left = 0  # of a body with a length that is taken; less than 0 of others
        self._unwritten_bytes = 0
        self._lent: list[Memory] = []  # of replies that the client has yet to read
        self._later_bytes = 0  # of replies behind the first of those, which are no progress of their client's
        self._quiet_since_s = 0.0  # 0 = since the next look

    def _new_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # what comes then is ignored here
        return parser

    # -- reading ------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parses received data, or as much of it as is wanted now; the transport reads no more before the rest."""
        if self._refused:
            self._still_sends = True
            return
        self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
        self.go_on()

    def go_on(self) -> None:
        """Parses what came in until a request stalls that; then has the transport read on, or wait."""
        if self._is_parsing:
            return
        self._is_parsing, is_fresh = True, True
        try:
            while self._unparsed and not self._stalls():
                if len(self._unparsed) > max(SMALL_BYTES, self._body_left) and not self.port.turns.may_read():
                    self._awaits_turn = True
                    self.port.turns.wait(self._take_turn, is_fresh=is_fresh)
                    break
                taken, is_fresh = self._parse(self._unparsed[: max(SLICE_BYTES, self._body_left)]), False
                self._unparsed = self._unparsed[taken:] or _NOTHING  # not the end of a read, which would keep that
        finally:
            self._is_parsing = False
        stalls = self._stalls()
        if stalls != self._is_paused and not self.transport.is_closing():
            self._is_paused = stalls
            if stalls:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _take_turn(self) -> None:
        self._awaits_turn = False
        self.go_on()

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

    def _parse(self, piece: memoryview) -> int:
        """Parses; neither a head nor what frames a chunked body may grow without bound. Returns the bytes it took."""
        taken = len(piece)
        self._framing_bytes += taken  # the callbacks take off what is data, or begins a message
        try:
            try:
                self._parser.feed_data(piece)
            except HttpParserUpgrade as upgrade:
                taken = upgrade.args[0]
                self._ignore_upgrade()
        except (HttpParserError, HttpParserUpgrade) as error:  # that of CONNECT can not be ignored
            if isinstance(error, HttpParserCallbackError):
                logger.error("request could not be taken", exc_info=error)
            self._refuse(400, _INVALID)
        self._framing_bytes = max(self._framing_bytes, 0)
        if self._receiving and self._in_head and self._framing_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"request header exceeds {MAX_HEAD_BYTES} bytes")
        elif self._receiving and self._framing_bytes > MAX_FRAMING_BYTES:
            self._refuse(400, f"chunk extensions and trailers exceed {MAX_FRAMING_BYTES} bytes; send the data only")
        return taken

    def _ignore_upgrade(self) -> None:
        """Reads a head without its `Upgrade` (RFC 9110 §7.8): the parser reads no body behind one that has it."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        kept = [b"%b: %b\r\n" % header for header in self.headers if header[0].lower() != b"upgrade"]
        self._parser = self._new_parser()
        self._parser.feed_data(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(kept)))

    def on_message_begin(self) -> None:
        """Begins a request."""
        self._url = b""
        self.headers = []
        self._reading = None
        self._receiving = self._in_head = True
        self._framing_bytes = self._chunks = self._body_left = 0
        self._quiet_since_s = 0.0

    def on_url(self, url: bytes) -> None:
        """Keeps a piece of the URL."""
        self._url += url

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
        """Takes the request, unless it came after the last one, or its head will be read anew."""
        self._in_head = False
        self._framing_bytes = 0
        if not (self._closing or self._parser.should_upgrade()):
            problem = "" if self.port.visitors is None else self.port.visitors.problem(self.headers)
            if problem:
                self._refuse(403, problem)
            else:
                self._take()
            self._closing = self._closing or self._is_old() or not self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Keeps a piece of the body."""
        self._framing_bytes -= len(body)
        self._body_left -= len(body)
        if self._reading is not None:
            self._reading.feed(body)

    def on_message_complete(self) -> None:
        """Ends a request."""
        cycle, self._reading = self._reading, None
        self._receiving = False
        if isinstance(cycle, Cycle):
            cycle.end()

    def _is_old(self) -> bool:
        return self._parser.get_http_version() != "1.1"

    def _take(self) -> None:
        """Takes a request for ASGI, unless its body has a transfer coding that is not known (RFC 9112 §6.1)."""
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
        self._body_left = int(sent.get(b"content-length", b"0"))  # the parser has checked it
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

    def answered(self) -> None:
        """Writes the next replies in order, and gives the request behind them its turn."""
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
                writer, request_id = self.writer_of(first), first.request_id or port.new_id()
                if self._lent or len(reply.body) > LARGE_BYTES:
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

    def _write_pieces(self, pieces: Iterable[bytes]) -> None:
        """Writes a large reply, or one behind a reply that the client has yet to read."""
        unread = self.transport.get_write_buffer_size()
        for piece in pieces:
            self.transport.write(piece)
        if self._lent:
            self._later_bytes += self.transport.get_write_buffer_size() - unread

    def _lend(self, memory: Memory) -> None:
        """Gives the memory of a reply back once its client has read it."""
        if self.writable.is_set():
            memory.release()
            return
        unread, abort = self.transport.get_write_buffer_size, self.transport.abort
        begin = unread() - self._later_bytes
        memory.watch(lambda: begin + self._later_bytes - unread(), abort)
        self._lent.append(memory)

    def _give_back(self) -> None:
        """Gives the memory of replies back that the client has read, or never will."""
        for memory in self._lent:
            memory.release()
        self._lent.clear()
        self._later_bytes = 0

    def writer_of(self, exchange: Exchange) -> Writer:
        """Returns what renders the reply of a request."""
        cors = self.port.cors
        if cors is None:
            return self.port.writer
        return cors.writer(exchange.head, exchange.scope["headers"] if isinstance(exchange, Cycle) else self.headers)

    def is_last(self, exchange: Exchange) -> bool:
        """Tells whether the connection ends with the reply of a request."""
        return self._closing and self._queue[-1] is exchange

    def _close(self) -> None:
        """Closes behind the last reply.

        A client that was refused, or answered before its request was read, may still send. Unread bytes would reset
        the connection before it has read why: they are read and dropped for a while, until it closes (RFC 9112 §9.6).
        """
        if (self._refused or self._receiving) and self.transport.can_write_eof():
            self._refused = self._lingers = True
            self._unparsed = _NOTHING
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection behind what it sent
                self.transport.abort()
                return
            self.go_on()
            self._linger(asyncio.get_running_loop().time() + _LONGEST_LINGER_S)
        else:
            self.transport.close()

    def _linger(self, until_s: float) -> None:
        """Closes when the client has sent nothing for a while, or sends for too long."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._still_sends and now_s < until_s:
            self._still_sends = False
            loop.call_later(min(_LINGER_S, until_s - now_s), self._linger, until_s)
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Reads no more; the error is the last reply, in place of that to the request being read, if there is one."""
        if self._refused:
            return
        is_past_last = self._closing and self._reading is None
        self._closing = self._refused = True
        self._unparsed = _NOTHING
        self.go_on()
        if is_past_last:
            return
        if self._withdraw():
            self._queue.append(_Refused(error_reply(status, message)))
            self.answered()
        else:
            self.transport.close()

    def _withdraw(self) -> bool:
        """Takes the request being read back; `False` if its reply has begun: nothing can be put behind that."""
        exchange, self._reading = self._reading, None
        if isinstance(exchange, Cycle):
            if exchange.has_begun or exchange.reply is not None:
                return False
            exchange.leave()
        if exchange is not None:
            self._queue.pop()
        return True

    # -- connection ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes note of who connects."""
        self.transport = transport
        self.port.connections.add(self)
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
        """Tells the applications, and breaks the cycles of references."""
        self.port.connections.discard(self)
        if not self.port.connections:
            self.port.is_idle.set()
        for exchange in self._queue:
            if exchange.memory is not None:
                exchange.memory.release()
            if isinstance(exchange, Cycle):
                exchange.leave()
        self._give_back()
        self._queue.clear()
        self._reading = None
        self._refused, self._unparsed = True, _NOTHING
        self.writable.set()
        del self._parser  # it has this object's methods

    def shutdown(self) -> None:
        """Accepts no more requests; closes once open requests are answered."""
        self._closing = True
        if not self._queue:
            self.transport.close()

    def pause_writing(self) -> None:
        """Stops reading from a client that does not read its replies."""
        self.writable.clear()
        self._quiet_since_s = 0.0
        self.go_on()

    def resume_writing(self) -> None:
        """Reads on."""
        self._give_back()
        self.writable.set()
        self.go_on()

    def check_timeouts(self, now_s: float) -> None:
        """Closes the connection if it was idle, or stuck in one request or reply, for too long.

        Called about once a second for every connection, instead of a timer for every request.

        Args:
            now_s: The monotonic time.
        """
        write_paused = not self.writable.is_set()
        unwritten_bytes = self.transport.get_write_buffer_size() if write_paused else 0
        if unwritten_bytes < self._unwritten_bytes:
            self._quiet_since_s = now_s  # slow, but it reads
        self._unwritten_bytes = unwritten_bytes
        waiting = len(self._queue) > (self._reading is not None)  # for answers, besides the request that still arrives
        stuck = write_paused or (self._receiving and not self._is_paused and not waiting) or self._waits_for_memory()
        if not self._quiet_since_s or (self._queue and not stuck):
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s > (self.port.read_timeout_s if stuck else self.port.keep_alive_s):
            self._time_out()

    def _time_out(self) -> None:
        if self.writable.is_set():
            self.transport.close()
        else:
            self.transport.abort()  # `close` would wait for the client to read
