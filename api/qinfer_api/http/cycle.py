"""One request on the ASGI path: what its application receives and sends."""

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Protocol

from starlette.types import Message, Scope

from qinfer.submission.pending import Memory
from qinfer_api.http.infer import HttpReply, failure_reply

if TYPE_CHECKING:
    from qinfer_api.http.connection import HttpConnection

logger = logging.getLogger(__name__)

SENT_HEADERS = "sent_headers"
"""ASGI state: headers with names as sent."""

IN_REPLY_TO = "in_reply_to"
"""ASGI state: the object whose `id` the reply names."""

ON_LEAVE = "on_leave"
"""ASGI state: a callback for the loss of the client."""

BORROWER = "borrower"
"""ASGI state: the reply's `MemoryBorrower`."""

CLOSE = "close"
"""Scope extension: closes the connection."""

WRITTEN = HttpReply(0, b"")

_MOST_UNTAKEN_BYTES = 64 * 1024
_HEADER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [^\x00-\x08\x0a-\x1f\x7f]*\r\n")
_WITHOUT_BODY = (204, 304)


class MemoryBorrower(Protocol):
    """May hold budgeted memory for a reply."""

    @property
    def memory(self) -> Memory | None:
        """The memory, once reserved."""
        ...


class Cycle:
    """One request; its application starts when it is first in the queue."""

    head = None

    def __init__(self, connection: "HttpConnection", scope: Scope, *, expects_continue: bool) -> None:
        self._connection = connection
        self.scope = scope
        self.reply: HttpReply | None = None
        self.has_begun = self.closes = False
        self._expects_continue = expects_continue
        self._is_started = self._is_gone = self._awaits_turn = False
        self._body = bytearray()
        self._is_whole = self._is_taken = False
        self._news = asyncio.Event()
        self._has_body = self._is_chunked = False  # of the reply
        self._unsent_bytes = 0  # of a reply with a length

    @property
    def request_id(self) -> str:
        """The resulting request's id, or empty."""
        request = self.scope["state"].get(IN_REPLY_TO)
        return "" if request is None else str(request.id)

    @property
    def memory(self) -> Memory | None:
        """The reserved memory of a large reply."""
        borrower: MemoryBorrower | None = self.scope["state"].get(BORROWER)
        return None if borrower is None else borrower.memory

    @property
    def stalls(self) -> bool:
        """Whether reading pauses."""
        return not self._is_started or len(self._body) > _MOST_UNTAKEN_BYTES

    def start(self) -> None:
        """Runs the application, once, in its turn; a connection with more requests has its turns after the others."""
        if self._is_started or self._awaits_turn or self._is_gone:
            return
        if self._connection.has_more or not self._connection.port.turns.may_start():
            self._wait_for_turn()
        else:
            self._run()

    def _wait_for_turn(self) -> None:
        connection = self._connection
        turns, is_flood = connection.port.turns, connection.has_more
        if is_flood and turns.is_full:
            connection.cut()
        else:
            self._awaits_turn = True
            turns.wait(self._start_in_turn, is_fresh=not is_flood)

    def _start_in_turn(self) -> None:
        self._awaits_turn = False
        connection = self._connection
        if self._is_gone:
            return
        if connection.is_abandoned():
            connection.transport.abort()
        elif not connection.port.turns.may_start():
            self._wait_for_turn()
        else:
            self._run()
            connection.go_on()  # reading was paused until now

    def _run(self) -> None:
        self._is_started = True
        tasks = self._connection.port.tasks
        task = asyncio.get_running_loop().create_task(self._run_app())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def come_first(self) -> None:
        """Starts the application."""
        self.start()

    def feed(self, body: bytes) -> None:
        """Adds a piece of the body."""
        if self.reply is None:
            self._body += body
            self._news.set()

    def end_body(self) -> None:
        """Marks the body as complete."""
        self._is_whole = True
        self._news.set()

    def disconnect(self) -> None:
        """Notifies a started application in its turn that the client has left: hundreds may leave at once."""
        self._is_gone = True
        if self._is_started:
            self._notify_in_turn()

    def _notify_in_turn(self) -> None:
        turns = self._connection.port.turns
        if not turns.may_start():
            turns.wait(self._notify_in_turn, is_fresh=True)
            return
        self._news.set()
        on_leave = self.scope["state"].get(ON_LEAVE)
        if on_leave is not None:
            on_leave()

    async def _run_app(self) -> None:
        try:
            await self._connection.port.app(self.scope, self._receive, self._send_message)
            if self.reply is None and not self._is_gone:
                raise RuntimeError("the application has not sent a whole reply")
        except Exception as error:
            logger.error("request failed", exc_info=error, extra={"path": self.scope["path"]})
            if self._is_gone or self.reply is not None:
                return
            if self.has_begun:
                self._connection.transport.close()
            else:
                reply = failure_reply(error)
                self._reply(reply if self.scope["method"] != "HEAD" else HttpReply(reply.status, b""))
        finally:
            if self._is_gone and self.memory is not None:
                self.memory.release()

    def _reply(self, reply: HttpReply) -> None:
        self.reply = reply
        self._body.clear()
        self._news.set()
        self._connection.on_reply()

    async def _receive(self) -> Message:
        if self._expects_continue and not (self._body or self._is_whole or self.has_begun or self._is_gone):
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False
        while not (self._is_gone or self.reply or (not self._is_taken and (self._body or self._is_whole))):
            self._news.clear()
            self._connection.go_on()
            await self._news.wait()
        if self._is_gone or self.reply:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._is_taken = self._is_whole
        return {"type": "http.request", "body": body, "more_body": not self._is_whole}

    async def _send_message(self, message: Message) -> None:
        await self._connection.writable.wait()
        if self._is_gone:
            return
        expected = "http.response.body" if self.has_begun else "http.response.start"
        if message["type"] != expected or self.reply is not None:
            raise RuntimeError(f"the application has sent {message['type']} out of turn")
        if self.has_begun:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            self._send_head(message)

    def _send_head(self, message: Message) -> None:
        """Sends the head; the server, not the application, decides framing and `connection`."""
        lines, length = [], None
        for given, value in message.get("headers", ()):
            name = given.lower()
            if name == b"connection":
                self.closes = self.closes or b"close" in value.lower()
            elif name != b"transfer-encoding":
                line = b"%b: %b\r\n" % (name, value)
                if _HEADER_LINE.fullmatch(line) is None:
                    raise RuntimeError(f"the application has sent {line!r}, which is no header")
                lines.append(line)
                length = int(value) if name == b"content-length" else length
        status, connection = message["status"], self._connection
        self._has_body = self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        if self._has_body and length is None:
            self._is_chunked = self.scope["http_version"] == "1.1"  # in HTTP/1.0 the body ends with the connection
            if self._is_chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
        self._unsent_bytes = -1 if length is None else length
        if length is not None and self.memory is not None:
            self.memory.become(length)
        if self.closes or connection.is_last(self):
            lines.append(b"connection: close\r\n")
        begin = connection.writer_of(self).encode_head(
            status, connection.port.common, self.request_id or connection.port.new_id()
        )
        self.has_begun = True
        connection.transport.write(b"%b%b\r\n" % (begin, b"".join(lines)))

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        transport = self._connection.transport
        if not self._has_body:
            pass
        elif self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            transport.write(chunk + b"0\r\n\r\n" if is_last else chunk)
        else:
            if self._unsent_bytes >= 0:
                self._unsent_bytes -= len(body)
                if self._unsent_bytes < 0 or (is_last and self._unsent_bytes):
                    raise RuntimeError("the application has sent a body of another length than its Content-Length")
            transport.write(body)
        if is_last:
            self._reply(WRITTEN)
