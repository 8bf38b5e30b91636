"""The heads of gRPC calls, which of them become calls, and how many are under way."""

import asyncio
from collections.abc import Mapping

from qinfer.core.messages import IdFactory
from qinfer_api.http.visitors import Visitors
from qinfer_api.receiving import ReceivingBudget
from qinfer_api.rpc import frames, hpack
from qinfer_api.rpc.headers import Abort, Head, Method, choose_packing, read_encoding, read_timeout, trailers_only
from qinfer_api.rpc.http2 import Connection
from qinfer_api.rpc.protocol import Call
from qinfer_api.turns import Turns


class Server:
    """Reads the heads of calls; one for all connections.

    Args:
        methods: By path, as `/package.Service/Method`.
        limits: The bounds of each connection.
        receiving: The memory of messages that have not come in whole.
        visitors: Refuses calls that may come from a stranger's page; `None` = refuses none.

    Attributes:
        limits: As given.
        receiving: As given.
        turns: Says how long a connection is read at a time.
        connections: Those that are open.
        is_closing: No more connections are taken.
        new_id: Makes the ids of calls that become no request.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: frames.Limits,
        receiving: ReceivingBudget,
        visitors: Visitors | None = None,
    ) -> None:
        self._methods = {path.encode(): method for path, method in methods.items()}
        self.limits = limits
        self.receiving = receiving
        self.turns = Turns()
        self._visitors = visitors
        self.new_id = IdFactory().ulid
        self.connections: set[Connection] = set()
        self.is_closing = False
        self._calls = 0
        self._ended = asyncio.Event()

    def read_head(self, fields: list[hpack.Field] | None) -> Head:
        """Reads the head of a call.

        Raises:
            Malformed: It is not that of a request.
        """
        if fields is None:
            text = f"the metadata is larger than {self.limits.header_bytes} bytes"
            return Head(None, trailers_only(Abort("RESOURCE_EXHAUSTED", text), 431))
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
            return Head(None, refusal)
        method = self._methods.get(path)
        if method is None:
            return Head(None, trailers_only(Abort("UNIMPLEMENTED", "Method not found!")))
        head = Head(method, places=places, values=values)
        try:
            if "grpc-timeout" in places:
                head.timeout_s = read_timeout(values[places["grpc-timeout"]])
            if "grpc-encoding" in places:
                head.encoding = read_encoding(values[places["grpc-encoding"]])
        except Abort as abort:
            return Head(None, trailers_only(abort))
        head.packing = choose_packing(head.first("grpc-accept-encoding") or "", method.compression)
        head.fields = fields
        return head

    def _refusal(self, verb: bytes, content: bytes, fields: list[hpack.Field]) -> bytes:
        """Returns the header block that answers what is no call, or may be a stranger's page's; empty = neither."""
        if not content.startswith(b"application/grpc"):
            return hpack.status(415)
        if verb != b"POST":
            return hpack.status(405) + hpack.field(b"allow", b"POST")
        problem = "" if self._visitors is None else self._visitors.problem(fields)
        return trailers_only(Abort("PERMISSION_DENIED", problem)) if problem else b""

    def stream(self, connection: Connection, number: int, head: Head, *, is_ended: bool) -> Call:
        """Makes a call."""
        self._calls += _is_awaited(head)
        return Call(self, connection, number, head, is_ended=is_ended)

    def closed(self, head: Head) -> None:
        """Counts a call that has ended."""
        self._calls -= _is_awaited(head)
        if not self._calls:
            self._ended.set()

    async def ended(self) -> None:
        """Returns when no call is under way that is awaited."""
        while self._calls:
            self._ended.clear()
            await self._ended.wait()


def _is_awaited(head: Head) -> bool:
    return head.method is None or head.method.is_awaited
