"""Authorization, parsing and encoded replies of all calls; large messages are parsed off the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from qinfer.core.api_keys import Scope
from qinfer.core.messages import Scalar
from qinfer.errors import Forbidden, Unauthorized
from qinfer.tensors import Bytes
from qinfer.wire.typed_contents import check_fields, malformed
from qinfer_api.auth import GROUPS, CallerContext, Restrictions, administrative, caller_of
from qinfer_api.http.infer import compile_forward
from qinfer_api.receiving import AGAIN_S
from qinfer_api.rest.services import Services
from qinfer_api.rpc.headers import Abort, CallHead, Method
from qinfer_api.rpc.protocol import LARGE_BYTES, MAX_MESSAGE_BYTES, GrpcCall

Serve = Callable[[Bytes, GrpcCall], Awaitable[Bytes]]

STRANGERS_BYTES = 64 * 1024

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."

INFERENCE = "inference"


class CallGuard:
    """Decides who may call, and makes methods that ask it."""

    def __init__(self, services: Services) -> None:
        rpc = services.settings.grpc
        self._dispatcher = services.dispatcher
        self._restrictions = Restrictions.for_grpc(rpc.restricted)
        self._restricted = frozenset(filter(self._restrictions.covers, GROUPS))
        self._forward = compile_forward("QINFER_GRPC__HEADER_FORWARD_PATTERN", rpc.header_forward_pattern)
        self.forwards = self._forward is not None
        self._max_message_bytes = rpc.max_message_bytes

    def admit(
        self, group: str, scope: Scope | None, head: CallHead, peer: str, *, even_draining: bool = False
    ) -> CallerContext:
        """Authorizes a call by its head; `scope` `None` needs no key."""
        if self._dispatcher.draining and not even_draining:
            raise Abort("UNAVAILABLE", SHUTTING_DOWN, AGAIN_S)
        try:
            if group in self._restricted:
                self._restrictions.check(group, head.first)
            context: CallerContext | None = head.memo
            if context is None:
                context = head.memo = caller_of(head.first, head.every)
            return context if scope is None else self._dispatcher.authorize(context, scope, peer)
        except (Unauthorized, Forbidden) as error:
            raise self._dispatcher.refuse("", 0, error) if group == INFERENCE else error from None

    def forwarded(self, head: CallHead) -> dict[str, Scalar] | None:
        """Returns the metadata that an infer request forwards."""
        if self._forward is None:
            return None
        matches = self._forward.fullmatch
        return {name: value for name, value in head.metadata if matches(name)}

    def method(
        self, start: Callable[[GrpcCall, Bytes], None], group: str, scope: Scope | None, *, takes_stream: bool = False
    ) -> Method:
        """Makes a method that calls `start` after `admit`."""
        # Loaded models exceed any request.
        most = MAX_MESSAGE_BYTES if scope is Scope.ADMIN else self._max_message_bytes
        if scope is None:
            most = min(most, STRANGERS_BYTES)
        return Method(partial(self.admit, group, scope), start, takes_stream, most)

    def unary(self, serve: Serve, group: str, scope: Scope | None = Scope.INFER) -> Method:
        """Makes a unary method."""

        async def answer(call: GrpcCall, message: Bytes) -> None:
            self._dispatcher.recheck(call.context)  # the key may have been revoked meanwhile
            call.finish((await serve(message, call),))

        return self.method(lambda call, message: call.run(answer(call, message), has_deadline=True), group, scope)

    def question(
        self,
        request: Any,
        use_case: Callable[[Any], Awaitable[Any]],
        group: str,
        scope: Scope | None = Scope.INFER,
        is_change: Callable[[Any], bool] | None = None,
    ) -> Method:
        """Makes a unary method with small messages; changes need the scope `admin`."""
        name = request.DESCRIPTOR.name.removesuffix("Request")

        async def serve(blob: Bytes, call: GrpcCall) -> Bytes:
            message = await read(request, blob)
            call.taken()
            context, peer = call.context, call.connection.peer
            is_act = scope is Scope.ADMIN
            if is_change is not None and is_change(message):
                is_act, caller = True, caller_of(call.head.first, call.head.every)
                context = self._dispatcher.authorize(caller, Scope.ADMIN, peer)
            what = f"{name}/{message.model_name}" if hasattr(message, "model_name") else name
            with administrative(context, "gRPC", what, peer) if is_act else nullcontext():
                reply = await use_case(message)
            return bytes(reply.SerializeToString())

        return self.unary(serve, group, scope)


async def read(message: Any, blob: Bytes) -> Any:
    """Parses a message, in a thread if large."""
    return parse(message, blob) if len(blob) <= LARGE_BYTES else await asyncio.to_thread(parse, message, blob)


def parse(message: Any, blob: Bytes) -> Any:
    """Parses a message."""
    if len(blob) > LARGE_BYTES:
        check_fields(blob, message.DESCRIPTOR)
    try:
        return message.FromString(bytes(blob))
    except DecodeError:
        raise malformed() from None
