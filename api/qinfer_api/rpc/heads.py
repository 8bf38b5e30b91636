"""Parses heads of gRPC calls; counts calls in flight."""

import asyncio
from collections.abc import Mapping

from qinfer.core.messages import IdFactory
from qinfer_api.http.head import Visitors
from qinfer_api.receiving import READ_BYTES, ReceivingBudget
from qinfer_api.rpc import frames, hpack
from qinfer_api.rpc.headers import Abort, CallHead, Method, choose_packing, read_encoding, read_timeout, trailers_only
from qinfer_api.rpc.http2 import Http2Connection
from qinfer_api.rpc.protocol import GrpcCall
from qinfer_api.turns import Turns


class Server:
    """Creates all connections' calls; methods are keyed by path, as `/package.Service/Method`."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: frames.ConnectionLimits,
        receiving: ReceivingBudget,
        visitors: Visitors | None = None,
    ) -> None:
        self._methods = {path.encode(): method for path, method in methods.items()}
        self.limits = limits
        self.receiving = receiving
        self.turns = Turns()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._visitors = visitors
        self.new_id = IdFactory().ulid
        self.connections: set[Http2Connection] = set()
        self.is_closing = False
        self._calls = 0
        self._ended = asyncio.Event()

    def read_head(self, fields: list[hpack.Field] | None) -> CallHead:
        """Parses a call's head; `None` = fields over the limit."""
        if fields is None:
            text = f"the metadata is larger than {self.limits.header_bytes} bytes"
            return CallHead(None, trailers_only(Abort("RESOURCE_EXHAUSTED", text), 431))
        names, values = zip(*fields, strict=True) if fields else ((), ())
        places = frames.places(names)
        try:
            verb, scheme, path = values[places[":method"]], values[places[":scheme"]], values[places[":path"]]
        except KeyError as missing:
            raise frames.Malformed(f"{missing.args[0]} is missing") from None
        if not (verb and scheme and path):
            raise frames.Malformed("one of :method, :scheme and :path is empty")
        content = values[places["content-type"]] if "content-type" in places else b""
        if refusal := self._refusal(verb, content, fields):
            return CallHead(None, refusal)
        method = self._methods.get(path)
        if method is None:
            return CallHead(None, trailers_only(Abort("UNIMPLEMENTED", "Method not found!")))
        head = CallHead(method, places=places, values=values)
        try:
            if "grpc-timeout" in places:
                head.timeout_s = read_timeout(values[places["grpc-timeout"]])
            if "grpc-encoding" in places:
                head.encoding = read_encoding(values[places["grpc-encoding"]])
        except Abort as abort:
            return CallHead(None, trailers_only(abort))
        head.packing = choose_packing(head.first("grpc-accept-encoding") or "", method.compression)
        head.fields = fields
        return head

    def _refusal(self, verb: bytes, content: bytes, fields: list[hpack.Field]) -> bytes:
        if not content.startswith(b"application/grpc"):
            return hpack.status(415)
        if verb != b"POST":
            return hpack.status(405) + hpack.field(b"allow", b"POST")
        problem = "" if self._visitors is None else self._visitors.problem(fields)
        return trailers_only(Abort("PERMISSION_DENIED", problem)) if problem else b""

    def stream(self, connection: Http2Connection, number: int, head: CallHead, *, is_ended: bool) -> GrpcCall:
        """Creates a call."""
        self._calls += head.is_awaited
        return GrpcCall(
            server=self,
            connection=connection,
            number=number,
            head=head,
            is_ended=is_ended,
            send_window=connection.output.initial_window,
            receive_window=self.limits.window_bytes,
        )

    def closed(self, head: CallHead) -> None:
        """Counts an ended call."""
        self._calls -= head.is_awaited
        if not self._calls:
            self._ended.set()

    async def wait_idle(self) -> None:
        """Waits until no awaited call is in flight."""
        while self._calls:
            self._ended.clear()
            await self._ended.wait()
