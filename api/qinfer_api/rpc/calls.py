"""Shared by all calls: authorization, parsing, and the status of an error.

Handlers get the encoded request and return the encoded reply: protobuf's work is then ours to place, and a request that
is no protobuf is the client's mistake (INVALID_ARGUMENT) instead of an exception in the server.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from qinfer.core.api_keys import Scope
from qinfer.core.messages import Failure, Scalar
from qinfer.errors import Forbidden, QinferError, Unauthorized
from qinfer.wire.kserve_grpc import malformed
from qinfer_api.auth import ANONYMOUS, Context, Restrictions, caller_of
from qinfer_api.http.infer import compile_forward
from qinfer_api.rest.services import Services
from qinfer_api.status import grpc_status

logger = logging.getLogger(__name__)

Metadata = Iterable[tuple[str, str | bytes]]
Call = grpc.aio.ServicerContext[bytes, bytes]
Handler = Callable[[bytes, Call], Awaitable[bytes]]
Serve = Callable[[bytes, Call, Context], Awaitable[bytes]]

LARGE_BYTES = 256 * 1024
"""Larger messages take milliseconds to read and write, and are read and written off the event loop."""

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."

INFERENCE = "inference"
"""The group of the infer calls, of those that restrictions name."""

_MEANINGS = frozenset(("authorization", "x-api-key", "traceparent"))

# A status's text is metadata, of which clients take 8 KiB by default; ASCII takes up to 3 bytes there, others 12.
_MAX_ASCII, _MAX_OTHER = 2000, 500


class InFlight:
    """Counts the calls that are not at their end; a context manager around each."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = asyncio.Event()

    def __enter__(self) -> None:
        """Counts one more."""
        self._count += 1

    def __exit__(self, *_: object) -> None:
        """Counts one less."""
        self._count -= 1
        if not self._count:
            self._ended.set()

    async def ended(self) -> None:
        """Returns when there is none."""
        while self._count:
            self._ended.clear()
            await self._ended.wait()


class Guard:
    """Decides who may call.

    Args:
        services: The dispatcher, which knows the keys and whether the gateway is shutting down, and the settings: which
            groups of calls need a secret in their metadata, and which metadata goes along with infer requests.

    Attributes:
        in_flight: The calls that were let in and have not ended.

    Raises:
        SettingsError: One of these settings is wrong.
    """

    def __init__(self, services: Services) -> None:
        rpc = services.settings.grpc
        self._dispatcher = services.dispatcher
        self._restrictions = Restrictions.for_grpc(rpc.restricted)
        self._forward = compile_forward("QINFER_GRPC__HEADER_FORWARD_PATTERN", rpc.header_forward_pattern)
        self.in_flight = InFlight()

    async def enter(self, call: Call, group: str, scope: Scope | None, *, even_draining: bool = False) -> Context:
        """Lets a call in; one that may not ends here.

        Args:
            call: The call.
            group: The group of calls that it belongs to.
            scope: What its key must allow; `None` = it needs none.
            even_draining: It is let in while the gateway shuts down, too.

        Returns:
            Who asks.
        """
        if self._dispatcher.draining and not even_draining:
            await call.abort(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        metadata = call.invocation_metadata() or ()
        try:
            if self._restrictions.covers(group):
                self._restrictions.check(group, lambda name: _first(metadata, name))
            context = context_of(metadata)
            return context if scope is None else self._dispatcher.authorize(context, scope)
        except (Unauthorized, Forbidden) as error:
            await refuse(call, self._dispatcher.refuse("", 0, error) if group == INFERENCE else error)
        except QinferError as error:
            await refuse(call, error)

    def forwarded(self, call: Call) -> dict[str, Scalar] | None:
        """Returns the metadata that goes along with an infer request; `None` = none does."""
        if self._forward is None:
            return None
        matches = self._forward.fullmatch
        return {
            name: value for name, value in call.invocation_metadata() or () if isinstance(value, str) and matches(name)
        }

    def unary(
        self, name: str, serve: Serve, group: str, scope: Scope | None = Scope.INFER, *, even_draining: bool = False
    ) -> Handler:
        """Makes the handler of a call that takes a message and gives one; an error becomes its status.

        Args:
            name: The call, for the log.
            serve: From the encoded request, the call, and who asks, to the encoded reply.
            group: The group of calls that it belongs to.
            scope: What its key must allow; `None` = it needs none.
            even_draining: It is served while the gateway shuts down, too.
        """

        async def handle(blob: bytes, call: Call) -> bytes:
            context = await self.enter(call, group, scope, even_draining=even_draining)
            with self.in_flight:
                try:
                    return await serve(blob, call, context)
                except QinferError as error:
                    await refuse(call, error)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # the boundary of a call: clients see no stack text
                    logger.exception("call failed", extra={"call": name})
                    await refuse(call, error)

        return handle

    def question(
        self,
        request: Any,
        use_case: Callable[[Any], Awaitable[Any]],
        group: str,
        scope: Scope | None = Scope.INFER,
        is_change: Callable[[Any], bool] | None = None,
    ) -> Handler:
        """Makes the handler of a call that is a question and an answer, both small.

        Args:
            request: The class of the request message.
            use_case: From the request to the reply message; may raise a `QinferError`.
            group: The group of calls that it belongs to.
            scope: What its key must allow; `None` = it needs none.
            is_change: Tells of a request whether its key must allow `admin`; `None` = no request's must.
        """

        async def serve(blob: bytes, call: Call, _: Context) -> bytes:
            message = await read(request, blob)
            if is_change is not None and is_change(message):
                self._dispatcher.authorize(context_of(call.invocation_metadata() or ()), Scope.ADMIN)
            reply = await use_case(message)
            return bytes(reply.SerializeToString())

        return self.unary(request.__name__, serve, group, scope)


async def read(message: Any, blob: bytes) -> Any:
    """Parses a message, off the event loop if it is large.

    Raises:
        InvalidRequest: It is none of that class.
    """
    return parse(message, blob) if len(blob) <= LARGE_BYTES else await asyncio.to_thread(parse, message, blob)


def parse(message: Any, blob: bytes) -> Any:
    """Parses a message.

    Raises:
        InvalidRequest: It is none of that class.
    """
    try:
        return message.FromString(blob)
    except DecodeError:
        raise malformed() from None


def context_of(metadata: Metadata) -> Context:
    """Returns the caller named in the metadata; `Dispatcher.authorize` checks it."""
    found: dict[str, str] = {}
    for name, value in metadata:
        if name in _MEANINGS and isinstance(value, str):
            found.setdefault(name, value)
    return caller_of(found.get) if found else ANONYMOUS


async def refuse(call: Call, error: Exception) -> NoReturn:
    """Ends a call with the status of an error."""
    await fail(call, Failure.of(error))


async def fail(call: Call, failure: Failure) -> NoReturn:
    """Ends a call with the status of a failure."""
    remaining_s = call.time_remaining()
    code = grpc_status(failure.code)
    if failure.code == "deadline_exceeded" and remaining_s is not None and remaining_s <= 0:
        code = "DEADLINE_EXCEEDED"  # it was the client's own deadline
    await call.abort(grpc.StatusCode[code], shortened(failure.message))
    raise AssertionError("abort raises")


def shortened(text: str) -> str:
    """Returns a text that a status can carry: the middle of a longer one is left out."""
    most = _MAX_ASCII if text.isascii() else _MAX_OTHER
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _first(metadata: Metadata, name: str) -> str | None:
    for key, value in metadata:
        if key == name:
            return value if isinstance(value, str) else None
    return None
