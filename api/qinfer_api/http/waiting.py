"""The HTTP port while a gateway waits for Redis: it answers that it is live, and refuses all other requests."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from qinfer.core.settings import HttpSettings
from qinfer.errors import BrokerUnavailable
from qinfer.queue.clients import wait_for_redis
from qinfer.queue.connection import DOWN
from qinfer_api.http.connection import HttpPort
from qinfer_api.http.server import HttpServer

T = TypeVar("T")


async def patiently(
    http: HttpSettings, listener: socket.socket, work: Callable[[], Awaitable[T]], stop: asyncio.Event | None = None
) -> T:
    """Runs a start's step; serves liveness while Redis is unreachable."""
    with contextlib.suppress(BrokerUnavailable):
        return await work()
    async with live_only(http, listener):
        return await wait_for_redis(work, stop)


@contextlib.asynccontextmanager
async def live_only(http: HttpSettings, listener: socket.socket) -> AsyncIterator[None]:
    """Serves liveness until the block ends, and leaves the socket open."""
    server = HttpServer(http, _refuse, HttpPort(http))
    own = socket.socket(fileno=os.dup(listener.fileno()))
    serving = asyncio.create_task(server.serve(own))
    try:
        yield
    finally:
        server.turn_away()
        await serving


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/v2/health/live":
        response = Response()
    else:
        response = JSONResponse({"error": DOWN}, 503, {"retry-after": "1"})
    await response(scope, receive, send)
