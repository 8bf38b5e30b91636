"""The fast path below ASGI: `POST /v2/models/{m}[/versions/{v}]/infer`, and `POST /models/{m}` with one response.

The fast path and the FastAPI routes use the same codecs, `http/infer.py` and that of `rest/plain.py`, so their answers
are equal to the byte. Nothing here waits.

A request behind an unfinished ASGI request takes the ASGI path, because it may depend on it. An ASGI request waits for
the calls before it, and reading pauses meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from qinfer.core.api_keys import Scope
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.core.settings import Settings
from qinfer.errors import Overloaded, QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.submission.memory import Landing
from qinfer.submission.pending import Memory, PendingCall
from qinfer.tensors import Bytes
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import CallerContext, Restrictions
from qinfer_api.dispatcher import NO_PLAN, Dispatcher
from qinfer_api.http.connection import HEAD_READ_BYTES, MAX_PIPELINED, HttpConnection, HttpPort
from qinfer_api.http.cors import Cors
from qinfer_api.http.cycle import Cycle
from qinfer_api.http.head import MAX_BINARY_BYTES, MAX_FAST_BYTES, HeadReader, RequestHead, Visitors, json_bytes
from qinfer_api.http.infer import (
    DECOUPLED,
    IN_SHARED_MEMORY,
    JSON_BYTES,
    HttpReply,
    InferCodec,
    UrlTarget,
    compile_forward,
    encoder_of,
    error_reply,
    failure_reply,
    fills_its_memory,
    is_slow,
    reply_bytes,
    strictly,
    with_headers,
)
from qinfer_api.receiving import NO_ROOM, SPENT, ReceivingBudget, Reservation
from qinfer_api.shared_memory import Land, TakesLong, forgets_regions

logger = logging.getLogger(__name__)

UNCOUNTED_BYTES = 16 * 1024
"""Larger bodies are counted as received."""

LEAST_LANDED_BYTES = 64 * 1024
"""Larger bodies are received into memory: of others, a copy costs less than the head's own read."""

_GONE = HttpReply(400, b"")


class CallCodec(Protocol):
    """Decodes the body of a call, and encodes its response."""

    shares_memory: bool

    def decode(
        self,
        target: UrlTarget,
        body: Bytes,
        json_length: str | None,
        tenant: str,
        served: ServedVersion | None = None,
        land: Land | None = None,
    ) -> tuple[OutgoingRequest, OutputPlan]:
        """Decodes a body."""
        ...

    def encode(self, response: Response, client_id: str, plan: OutputPlan, *, apart: bool = False) -> HttpReply:
        """Encodes a response or a failure."""
        ...


class FastCall(msgspec.Struct, eq=False):
    """One request on the fast path, and its sink; the connection releases `memory`."""

    frontend = "HTTP"
    no_stream = DECOUPLED
    _connection: "QinferHttpProtocol"
    _codec: CallCodec
    head: RequestHead
    parts: list[bytes | bytearray] = []
    _pending: PendingCall | None = None
    _plan: OutputPlan = NO_PLAN
    memory: Memory | None = None
    landing: Landing | None = None
    reply: HttpReply | None = None
    request: OutgoingRequest | None = None
    request_id: str = ""
    client_id: str = ""

    __repr__ = object.__repr__  # no payload is logged

    def feed(self, body: bytes) -> None:
        """Adds a piece of the body; those of a large one are joined as they come."""
        if self.head.length <= MAX_FAST_BYTES:
            self.parts.append(body)
        elif self.parts:
            self.parts[0] += body
        else:
            self.parts.append(bytearray(body))

    def is_behind(self) -> bool:
        """Returns whether another reply is written first."""
        return self._connection.is_behind(self)

    def come_first(self) -> None:
        """Notes that this reply is the next one."""
        if self._pending is not None:
            self._pending.comes_first()

    def deliver(self, response: Response) -> None:
        """Encodes the response, in a thread if that takes long."""
        if not response.final or self.reply is not None:
            if self.reply is None:
                self.set_reply(error_reply(501, DECOUPLED))
            return
        if (nbytes := response.nbytes) > JSON_BYTES and self._plan.special is not None:
            nbytes = reply_bytes(response, self._plan)
        if nbytes <= JSON_BYTES or not is_slow(nbytes, self._plan):
            self.set_reply(self._encoded(response))
        elif self._is_plain(response):
            self.set_reply(self._codec.encode(response, self.client_id, self._plan, apart=True))
        else:
            run = asyncio.get_running_loop().run_in_executor
            thread = run(encoder_of(nbytes), self._encoded, response)
            thread.add_done_callback(self._encoded_in_thread)

    def _is_plain(self, response: Response) -> bool:
        if self.head.encoding is not None or self._plan.special is not None:
            return False
        return fills_its_memory(response) and all(self._plan.is_binary(output.name) for output in response.outputs)

    def _encoded(self, response: Response) -> HttpReply:
        reply = self._codec.encode(response, self.client_id, self._plan)
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
            memory.become(reply.nbytes)
            self.memory = memory
        if self.landing is not None:
            self.forget_landing()
        self._pending = None  # breaks the reference cycle call - pending
        self._plan = NO_PLAN  # the plan may hold shared memory
        if self.request is not None:
            self.request_id = self.request.id
        self.reply = reply
        self._connection.on_reply()

    def start(self, dispatcher: Dispatcher) -> None:
        """Decodes and submits the request."""
        head, landing = self.head, self.landing
        body: Bytes = b"".join(self.parts) if len(self.parts) != 1 else self.parts[0]
        if landing is not None:
            body = landing.body
        self.parts = []
        try:
            context = dispatcher.authorize(head.context, Scope.INFER, self._connection.peer)
            decoded = self._read_body(dispatcher, context, body)
            if decoded is None:
                run = asyncio.get_running_loop().run_in_executor
                thread = run(None, self._read_checked, dispatcher, head, context, body)
                thread.add_done_callback(partial(self._read_in_thread, dispatcher, head, context))
                return
            request, self._plan = decoded
            if head.strict:
                self._plan = strictly(self._plan)
            if head.forwarded:
                with_headers(request, head.forwarded)
            if dispatcher.endpoints.by_name:
                self._plan = dispatcher.aim(context, request, head.header, self._plan)
            self._enter(dispatcher, context, request)
        except Exception as error:  # noqa: BLE001 - the boundary of a request: a defect may not look like bad HTTP
            self.refuse(dispatcher, head, error)

    def _read_body(
        self, dispatcher: Dispatcher, context: CallerContext, body: Bytes
    ) -> tuple[OutgoingRequest, OutputPlan] | None:
        """Decodes the body, unless strings are to be checked, tensors hashed, or much copied."""
        head, codec, land = self.head, self._codec, None
        if head.length > MAX_BINARY_BYTES and self.landing is None:
            return None
        if (is_large := head.length > MAX_FAST_BYTES) or codec.shares_memory:
            text = body if isinstance(body, bytes) else bytes(body[: json_bytes(head.json_length)])
            reads_memory = codec.shares_memory and IN_SHARED_MEMORY in text
            if (is_large or reads_memory) and (b"BYTES" in text or dispatcher.reads_all(head.target.model)):
                return None
            if reads_memory:
                land = partial(self._land, dispatcher, context.tenant)
        had_landed = self.landing is not None
        try:
            return codec.decode(head.target, body, head.json_length, context.tenant, land=land)
        except TakesLong:
            if not had_landed:
                self.forget_landing()
            return None

    def _land(self, dispatcher: Dispatcher, tenant: str, nbytes: int) -> memoryview | None:
        """Takes memory for inputs once: a request refers to one slab."""
        target = self.head.target
        if self.landing is not None:
            return None
        self.landing = landing = dispatcher.landing(target.model, target.version, nbytes, 0, tenant)
        return None if landing is None else landing.body

    @forgets_regions
    def _read_checked(
        self, dispatcher: Dispatcher, head: RequestHead, context: CallerContext, body: Bytes
    ) -> OutgoingRequest:
        served = dispatcher.resolve(head.target.model, head.target.version)
        request, plan = self._codec.decode(head.target, body, head.json_length, context.tenant, served)
        if head.strict:
            plan = strictly(plan)
        with_headers(request, head.forwarded)
        plan = dispatcher.aim(context, request, head.header, plan, served)
        dispatcher.check(request, served)
        self._plan = plan
        return request

    def _read_in_thread(
        self, dispatcher: Dispatcher, head: RequestHead, context: CallerContext, done: asyncio.Future[OutgoingRequest]
    ) -> None:
        if self.reply is not None:
            return  # the client left
        try:
            self._enter(dispatcher, context, done.result())
        except Exception as error:  # noqa: BLE001 - as in `start`
            self.refuse(dispatcher, head, error)
        finally:
            del done  # its error refers to this frame

    def _enter(self, dispatcher: Dispatcher, context: CallerContext, request: OutgoingRequest) -> None:
        self.request, self.client_id, landing = request, request.client_id, self.landing
        if landing is not None:
            landing.enter(request)
        pending = dispatcher.submit(context, request, self, asked_s=self.head.timeout_s)
        if landing is not None:
            self.landing = None
            landing.leave()
        if self.reply is None:
            self._pending, pending.holder = pending, self

    def forget_landing(self) -> None:
        """Gives back the memory that tensors landed in."""
        landing, self.landing = self.landing, None
        if landing is not None:
            landing.leave()

    def refuse(self, dispatcher: Dispatcher, head: RequestHead, error: Exception) -> None:
        """Answers with an error and counts it."""
        if isinstance(error, QinferError):
            error = dispatcher.refuse(head.target.model, head.target.version, error, head.context)
        else:
            logger.error("request failed", exc_info=error, extra={"model": head.target.model})
        self.set_reply(failure_reply(error))

    def cancel(self, dispatcher: Dispatcher) -> None:
        """Cancels the request of a lost connection."""
        self._plan = NO_PLAN
        self.forget_landing()
        if self._pending is not None:
            dispatcher.cancel(self._pending)
            self._pending.forget_memory()
            self._pending = None
        elif self.reply is None:
            self.reply = _GONE


class FastPath(HttpPort):
    """State shared by all connections; off if `restrictions` cover inference."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: Settings,
        codec: InferCodec,
        restrictions: Restrictions,
        receiving: ReceivingBudget,
    ) -> None:
        http = settings.http
        super().__init__(http, Cors.from_settings(settings.cors), Visitors.from_settings(settings))
        self.dispatcher, self.codec, self.receiving = dispatcher, codec, receiving
        self.forward = compile_forward("QINFER_HTTP__HEADER_FORWARD_PATTERN", http.header_forward_pattern)
        enabled = http.fast_path and not restrictions.covers("inference")
        max_bytes = min(MAX_FAST_BYTES, http.max_input_bytes) if enabled else -1
        most_binary = http.max_input_bytes if enabled else -1
        self.heads = HeadReader(max_bytes, self.forward, self.visitors, most_binary, self._takes_plain)
        self.call_type: type[FastCall] = FastCall
        self.plain: Callable[[], CallCodec] | None = None

    def connect(self) -> "QinferHttpProtocol":
        """Creates the protocol of a connection."""
        return QinferHttpProtocol(self)

    def codec_of(self, head: RequestHead) -> CallCodec:
        """Returns the codec of a call."""
        return self.plain() if head.is_plain and self.plain is not None else self.codec

    def _takes_plain(self, model: str) -> bool:
        try:
            return self.plain is not None and not self.dispatcher.resolve(model, 0).spec.decoupled
        except QinferError:
            return False  # the route says what is wrong

    async def tick(self) -> None:
        """Checks timeouts, and gives up bodies that arrive too slowly."""
        self.receiving.second_passed()
        await super().tick()


class QinferHttpProtocol(HttpConnection):
    """One connection with a fast path."""

    def __init__(self, fast: FastPath) -> None:
        super().__init__(fast)
        self._fast = fast
        self._memory: Reservation | None = None

    def data_received(self, data: bytes) -> None:
        """Starts a request at once if `data` is one whole request with a known head; else parses the data."""
        queue = self._queue
        if not (self._receiving or self._closing or self._unparsed or (queue and self._has_cycle())):
            if self._lands and len(data) == HEAD_READ_BYTES:
                if self._land_at_once(data):
                    return
                self._lands = False
            known = self._fast.heads.find(data)
            if known is not None:
                self._quiet_since_s = 0.0
                head, body = known
                call = self._fast.call_type(self, self._fast.codec_of(head), head, [body])
                queue.append(call)
                call.start(self._fast.dispatcher)
                if len(queue) >= MAX_PIPELINED:
                    self.go_on()
                return
        super().data_received(data)
        call_read = self._reading
        if isinstance(call_read, FastCall) and self._memory is None and not self._unparsed:
            self._reserve(call_read)

    def _land_at_once(self, data: bytes) -> bool:
        """Lets a body land without the parser, if its head is plain and memory is there."""
        fast = self._fast
        found = None if len(self._queue) >= MAX_PIPELINED or not self.writable.is_set() else fast.heads.begin(data)
        if found is None:
            return False
        head, body = found
        if head.length <= LEAST_LANDED_BYTES:
            return False
        try:
            tenant = fast.dispatcher.authorize(head.context, Scope.INFER, self.peer).tenant
        except QinferError:
            return False  # it is refused as others are
        memory = fast.receiving.reserve(tenant or self, head.length, self._let_in)
        landing = self._landing_for(head, tenant) if memory is not None and memory.is_granted else None
        if landing is None or memory is None:
            if memory is not None:
                memory.release()
            return False
        self._quiet_since_s = 0.0
        self._reading = call = self._append(head)
        self._memory, call.landing, self._receiving = memory, landing, True
        self._body_left = head.length - len(body)
        self._watch(memory, head)
        self._land(landing, [body])
        return True

    def _landing_for(self, head: RequestHead, tenant: str) -> Landing | None:
        begin, target = json_bytes(head.json_length), head.target
        if begin is None or head.length <= LEAST_LANDED_BYTES:
            return None
        return self._fast.dispatcher.landing(target.model, target.version, head.length, begin, tenant, head.length)

    def _may_land(self, head: RequestHead) -> bool:
        target, dispatcher = head.target, self._fast.dispatcher
        try:
            tenant = dispatcher.authorize(head.context, Scope.INFER, self.peer).tenant
        except QinferError:
            return False  # the route refuses it
        return dispatcher.may_land(target.model, target.version, head.length, tenant)

    def _watch(self, memory: Reservation, head: RequestHead) -> None:
        memory.watch(lambda: head.length if self._is_paused else head.length - self._body_left, self._time_out)

    def is_behind(self, call: FastCall) -> bool:
        """Returns whether another reply is written first."""
        return bool(self._queue) and self._queue[0] is not call

    def _has_cycle(self) -> bool:
        return bool(self._queue) and isinstance(self._queue[-1], Cycle)

    def _append(self, head: RequestHead) -> FastCall:
        call = self._fast.call_type(self, self._fast.codec_of(head), head)
        self._queue.append(call)
        return call

    def _dispatch_request(self) -> None:
        head = None
        if not self._has_cycle() and self._parser.get_method() == b"POST" and not self._is_old():
            head = self._fast.heads.read(self._url, self.headers)
        if head is None or not (head.length <= MAX_BINARY_BYTES or self._may_land(head)):
            super()._dispatch_request()
        else:
            self._reading = self._append(head)
            self._body_left = head.length

    def on_message_complete(self) -> None:
        """Starts the call whose body is complete."""
        call = self._reading
        super().on_message_complete()
        if isinstance(call, FastCall):
            self._release()
            call.start(self._fast.dispatcher)

    def _reserve(self, call: FastCall) -> None:
        head, fast = call.head, self._fast
        assert head is not None
        if head.length <= UNCOUNTED_BYTES:
            return
        try:
            tenant = fast.dispatcher.authorize(head.context, Scope.INFER, self.peer).tenant
            self._memory = fast.receiving.reserve(tenant or self, head.length, self._let_in)
            if self._memory is None:
                raise Overloaded(SPENT)
            self._watch(self._memory, head)
        except QinferError as error:
            self._drop(call, head, error)
        else:
            self._begin_landing()
            self.go_on()

    def _let_in(self) -> None:
        self._quiet_since_s = 0.0
        self._begin_landing()
        self.go_on()

    def _begin_landing(self) -> None:
        """Lets the rest of a binary body land, once it may come."""
        call, memory = self._reading, self._memory
        if not isinstance(call, FastCall) or memory is None or not memory.is_granted or self._unparsed:
            return
        landing = self._landing_for(call.head, memory.owner if isinstance(memory.owner, str) else "")
        if landing is not None:
            call.landing = landing
            self._land(landing, call.parts)
            del self._parser  # it waits for the body
            call.parts = []
        elif call.head.length > MAX_BINARY_BYTES:  # others have the memory now
            self._drop(call, call.head, Overloaded(NO_ROOM))

    def _refuse_landing(self) -> None:
        if isinstance(call := self._reading, FastCall):
            target, error = call.head.target, Overloaded(NO_ROOM)
            self._fast.dispatcher.refuse(target.model, target.version, error, call.head.context)
        super()._refuse_landing()

    def _drop(self, call: FastCall, head: RequestHead, error: QinferError) -> None:
        self._release()
        self._reading, self._landing, self._refused = None, None, self._closing
        call.refuse(self._fast.dispatcher, head, error)
        self.go_on()

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    def _waits_for_memory(self) -> bool:
        return self._memory is not None and not self._memory.is_granted

    def _withdraw(self) -> bool:
        self._release()
        if isinstance(self._reading, FastCall):
            self._reading.forget_landing()
        return super()._withdraw()

    def _time_out(self) -> None:
        call = self._reading
        if self.writable.is_set() and self._waits_for_memory() and isinstance(call, FastCall) and call.head is not None:
            self._drop(call, call.head, Overloaded(SPENT))
        else:
            super()._time_out()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the requests of a closed connection."""
        for call in self._queue:
            if isinstance(call, FastCall):
                call.cancel(self._fast.dispatcher)
        self._release()
        super().connection_lost(exc)
