"""Metrics on a port of their own, which a scraper reaches without a key: `GET /metrics`, and nothing else."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qinfer.core.settings import Settings
from qinfer.errors import QinferError, SettingsError
from qinfer_api.http.infer import error_reply, failure_reply
from qinfer_api.http.server import QuietServer
from qinfer_api.rest.services import send

_CONTENT_TYPE = "text/plain; charset=utf-8"  # Triton's; Prometheus takes it as its text format
_BACKLOG = 128
_LAST_REPLIES_S = 1


def open_metrics_port(settings: Settings) -> socket.socket | None:
    """Opens the port; `None` where metrics are not served on one.

    Raises:
        SettingsError: The address is taken or not ours.
    """
    if not settings.metrics.enabled:
        return None
    host, port = settings.metrics.host or settings.http.host, settings.metrics.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"QINFER_METRICS__HOST={host} QINFER_METRICS__PORT={port}: {error.strerror}; choose another port, "
            "0 is any, or set QINFER_METRICS__ENABLED=false"
        ) from None


class MetricsPort:
    """Serves the metrics on an open socket.

    Args:
        listener: The socket.
        render: Returns the text of a scope; empty = of all.

    Attributes:
        url: Where it serves.
    """

    def __init__(self, listener: socket.socket, render: Callable[[str], Awaitable[bytes]]) -> None:
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
        self._listener = listener
        self._server = QuietServer(
            uvicorn.Config(
                _app(render),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_LAST_REPLIES_S,
            )
        )

    async def serve(self) -> None:
        """Serves until cancelled."""
        try:
            await self._server.serve(sockets=[self._listener])
        except asyncio.CancelledError:
            if self._server.started:
                await self._server.shutdown(sockets=[self._listener])
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Closes the socket; `serve` does it too."""
        self._listener.close()


def _app(render: Callable[[str], Awaitable[bytes]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send_: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        if request.url.path != "/metrics":
            response = send(error_reply(404, "Not Found"))
        elif request.method not in ("GET", "HEAD"):
            response = send(error_reply(405, "Method Not Allowed"))
        else:
            try:
                response = Response(
                    await render(request.query_params.get("scope", "")), headers={"content-type": _CONTENT_TYPE}
                )
            except QinferError as error:
                response = send(failure_reply(error))
        await response(scope, receive, send_)

    return app
