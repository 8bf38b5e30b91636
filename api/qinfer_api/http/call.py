"""One request on the fast path, from its head to its reply."""

import asyncio
import logging
from functools import partial
from typing import Protocol

from qinfer.core.api_keys import Scope
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import QinferError
from qinfer.submission.pending import Memory, PendingCall
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import CallerContext
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.head import RequestHead
from qinfer_api.http.infer import (
    DECOUPLED,
    ENCODERS,
    HttpReply,
    InferCodec,
    error_reply,
    failure_reply,
    hold,
    is_slow,
    strictly,
    with_headers,
)

logger = logging.getLogger(__name__)

_NO_REQUEST = OutgoingRequest(model="", inputs=())
_NO_PLAN = OutputPlan()
_GONE = HttpReply(400, b"")


class FastConnection(Protocol):
    """The connection of a call."""

    peer: str

    def on_reply(self) -> None:
        """Notes that a call has a reply."""
        ...

    def is_behind(self, call: "FastCall") -> bool:
        """Returns whether another reply is written first."""
        ...


class FastCall:
    """One request on the fast path, and its sink; the connection releases `memory`."""

    frontend = "HTTP"
    no_stream = DECOUPLED
    __slots__ = ("_codec", "_connection", "_pending", "_plan", "head", "memory", "parts", "reply", "request")

    def __init__(self, connection: FastConnection, head: RequestHead) -> None:
        self._connection = connection
        self._pending: PendingCall | None = None
        self._codec: InferCodec
        self._plan: OutputPlan
        self.head = head
        self.memory: Memory | None = None
        self.parts: list[bytes] = []
        self.reply: HttpReply | None = None
        self.request = _NO_REQUEST

    @property
    def request_id(self) -> str:
        """The id of the resulting request; empty before."""
        return self.request.id

    def feed(self, body: bytes) -> None:
        """Adds a piece of the body."""
        self.parts.append(body)

    def is_behind(self) -> bool:
        """Returns whether another reply is written first."""
        return self._connection.is_behind(self)

    def come_first(self) -> None:
        """Notes that this reply is the next one."""
        if self._pending is not None:
            self._pending.comes_first()

    def deliver(self, response: Response) -> None:
        """Encodes the response, in a thread if the response is large."""
        if not response.final or self.reply is not None:
            if self.reply is None:
                self.set_reply(error_reply(501, DECOUPLED))
            return
        if not is_slow(response.nbytes, self._plan):
            self.set_reply(self._encoded(response))
        else:
            thread = asyncio.get_running_loop().run_in_executor(ENCODERS, self._encoded, response)
            thread.add_done_callback(self._encoded_in_thread)

    def _encoded(self, response: Response) -> HttpReply:
        reply = self._codec.encode(response, self.request.client_id, self._plan)
        encoding = self.head.encoding
        return reply if encoding is None or reply.status != 200 else reply.compressed(encoding)

    def _encoded_in_thread(self, done: "asyncio.Future[HttpReply]") -> None:
        error = done.exception()
        if error is not None:
            logger.error("reply could not be encoded", exc_info=error)
        self.set_reply(done.result() if error is None else failure_reply(error))

    def set_reply(self, reply: HttpReply) -> None:
        """Sets the reply and notifies the connection."""
        if self._pending is not None and (memory := self._pending.memory) is not None:
            memory.become(len(reply.body))
            self.memory = memory
        self._pending = None  # breaks the reference cycle call - pending
        self._plan = _NO_PLAN  # the plan may hold shared memory
        self.reply = reply
        self._connection.on_reply()

    def start(self, dispatcher: Dispatcher, codec: InferCodec) -> None:
        """Decodes and submits the request."""
        head = self.head
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts = []
        self._codec = codec
        try:
            context = dispatcher.authorize(head.context, Scope.INFER, self._connection.peer)
            if codec.shares_memory and codec.reads_memory(body):
                run = asyncio.get_running_loop().run_in_executor
                thread = run(None, self._read_checked, dispatcher, head, context, body)
                thread.add_done_callback(partial(self._read_in_thread, dispatcher, head, context))
                return
            request, self._plan = codec.decode(head.target, body, head.json_length, context.tenant)
            if head.strict:
                self._plan = strictly(self._plan)
            if head.forwarded:
                with_headers(request, head.forwarded)
            if dispatcher.endpoints.by_name and dispatcher.choose(context, request, head.header):
                self._plan = codec.routed(request, self._plan)
            self.request = request
            pending = dispatcher.submit(context, request, self, asked_s=head.timeout_s)
            if self.reply is None:
                self._pending, pending.holder = pending, self
                if self._plan.held is not None:
                    hold(self._plan)
        except Exception as error:  # noqa: BLE001 - the boundary of a request: a defect may not look like bad HTTP
            self.refuse(dispatcher, head, error)

    def _read_checked(self, dispatcher: Dispatcher, head: RequestHead, context: CallerContext, body: bytes) -> None:
        served = dispatcher.resolve(head.target.model, head.target.version)
        request, plan = self._codec.decode(head.target, body, head.json_length, context.tenant, served)
        if head.strict:
            plan = strictly(plan)
        with_headers(request, head.forwarded)
        if dispatcher.choose(context, request, head.header):
            served, plan = dispatcher.of_model(request.model, request.version), self._codec.routed(request, plan)
        dispatcher.check(request, served)
        self.request, self._plan = request, plan

    def _read_in_thread(
        self, dispatcher: Dispatcher, head: RequestHead, context: CallerContext, done: asyncio.Future[None]
    ) -> None:
        if self.reply is not None:
            return  # the client left
        try:
            done.result()
            pending = dispatcher.submit(context, self.request, self, asked_s=head.timeout_s)
            if self.reply is None:
                self._pending, pending.holder = pending, self
                hold(self._plan)
        except Exception as error:  # noqa: BLE001 - as in `start`
            self.refuse(dispatcher, head, error)

    def refuse(self, dispatcher: Dispatcher, head: RequestHead, error: Exception) -> None:
        """Answers with an error and counts it."""
        if isinstance(error, QinferError):
            error = dispatcher.refuse(head.target.model, head.target.version, error, head.context)
        else:
            logger.error("request failed", exc_info=error, extra={"model": head.target.model})
        self.set_reply(failure_reply(error))

    def cancel(self, dispatcher: Dispatcher) -> None:
        """Cancels the request of a lost connection."""
        self._plan = _NO_PLAN
        if self._pending is not None:
            dispatcher.cancel(self._pending)
            self._pending.forget_memory()
            self._pending = None
        elif self.reply is None:
            self.reply = _GONE
