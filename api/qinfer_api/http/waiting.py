"""The HTTP port of a gateway that waits for Redis at its start: it is live, and refuses everything else."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from qinfer.core.settings import HttpSettings
from qinfer.queue.connection import DOWN
from qinfer_api.http.connection import HttpPort
from qinfer_api.http.server import HttpServer


@contextlib.asynccontextmanager
async def live_only(http: HttpSettings, listener: socket.socket) -> AsyncIterator[None]:
    """Serves liveness on a socket until the block ends, and leaves the socket to the gateway's own server."""
    server = HttpServer(http, _refuse, HttpPort(http))
    own = socket.socket(fileno=os.dup(listener.fileno()))  # closing a server closes its own
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(own))
        try:
            yield
        finally:
            server.turn_away()


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/v2/health/live":
        response = Response()
    else:
        response = JSONResponse({"error": DOWN}, 503, {"retry-after": "1"})
    await response(scope, receive, send)
