"""The fast path: `POST /v2/models/{m}[/versions/{v}]/infer` below ASGI.

The fast path and the FastAPI route (`rest/infer.py`) both use `http/infer.py`, so their answers are equal to the byte.
Nothing here waits.

A request behind an unfinished ASGI request takes the ASGI path, because it may depend on it. An ASGI request waits for
the calls before it, and reading pauses meanwhile.
"""

from qinfer.core.api_keys import Scope
from qinfer.core.settings import Settings
from qinfer.errors import Overloaded, QinferError
from qinfer_api.auth import Restrictions
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.call import FastCall
from qinfer_api.http.connection import MAX_PIPELINED, HttpConnection, HttpPort
from qinfer_api.http.cors import Cors
from qinfer_api.http.cycle import Cycle
from qinfer_api.http.head import MAX_FAST_BYTES, HeadReader, RequestHead
from qinfer_api.http.infer import InferCodec, compile_forward
from qinfer_api.http.visitors import Visitors
from qinfer_api.receiving import SPENT, ReceivingBudget, Reservation

UNCOUNTED_BYTES = 16 * 1024
"""Larger bodies are counted as received."""


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
        self.heads = HeadReader(max_bytes, self.forward, self.visitors)
        self.call_type: type[FastCall] = FastCall

    def connect(self) -> "QinferHttpProtocol":
        """Creates the protocol of a connection."""
        return QinferHttpProtocol(self)

    def tick(self, now_s: float) -> None:
        """Checks timeouts, and gives up bodies that arrive too slowly."""
        super().tick(now_s)
        self.receiving.second_passed()


class QinferHttpProtocol(HttpConnection):
    """One connection with a fast path."""

    def __init__(self, fast: FastPath) -> None:
        super().__init__(fast)
        self._fast = fast
        self._memory: Reservation | None = None

    def data_received(self, data: bytes) -> None:
        """Starts a request at once if `data` is one whole request with a known head; else parses the data."""
        if not (self._receiving or self._closing or self._unparsed or self._has_cycle()):
            known = self._fast.heads.find(data)
            if known is not None:
                self._quiet_since_s = 0.0
                head, body = known
                call = self._append(head)
                call.parts.append(body)
                call.start(self._fast.dispatcher, self._fast.codec)
                if len(self._queue) >= MAX_PIPELINED:
                    self.go_on()
                return
        super().data_received(data)
        call_read = self._reading
        if isinstance(call_read, FastCall) and self._memory is None and not self._unparsed:
            self._reserve(call_read)

    def is_behind(self, call: FastCall) -> bool:
        """Returns whether another reply is written first."""
        return bool(self._queue) and self._queue[0] is not call

    def _has_cycle(self) -> bool:
        return bool(self._queue) and isinstance(self._queue[-1], Cycle)

    def _append(self, head: RequestHead) -> FastCall:
        call = self._fast.call_type(self, head)
        self._queue.append(call)
        return call

    def _dispatch_request(self) -> None:
        head = None
        if not self._has_cycle() and self._parser.get_method() == b"POST" and not self._is_old():
            head = self._fast.heads.read(self._url, self.headers)
        if head is None:
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
            call.start(self._fast.dispatcher, self._fast.codec)

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
            self._memory.watch(
                lambda: head.length if self._is_paused else head.length - self._body_left, self._time_out
            )
        except QinferError as error:
            self._drop(call, head, error)
        else:
            self.go_on()

    def _let_in(self) -> None:
        self._quiet_since_s = 0.0
        self.go_on()

    def _drop(self, call: FastCall, head: RequestHead, error: QinferError) -> None:
        self._release()
        self._reading, self._refused = None, self._closing
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
