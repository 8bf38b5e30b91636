"""The metrics port: `GET /metrics` for scrapers without a key."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from qinfer.core.settings import HttpSettings, Settings
from qinfer_api.http.connection import HttpPort
from qinfer_api.http.head import Visitors
from qinfer_api.http.server import HttpServer, bound_socket, netloc
from qinfer_api.rest.services import ERROR_HANDLERS

_CONTENT_TYPE = "text/plain; charset=utf-8"  # Triton's, for Prometheus' text
Render = Callable[[str, str], Awaitable[tuple[bytes, str]]]


def open_metrics_port(settings: Settings) -> socket.socket | None:
    """Opens the port; `None` if it is off."""
    metrics = settings.metrics
    if not metrics.enabled:
        return None
    advice = "choose another port, 0 is any, or set QINFER_METRICS__ENABLED=false"
    return bound_socket("METRICS", metrics.host or settings.http.host, metrics.port, advice)


class MetricsPort:
    """Serves the metrics on an open socket."""

    def __init__(self, listener: socket.socket, render: Render, visitors: Visitors | None = None) -> None:
        self.url = f"http://{netloc(*listener.getsockname()[:2])}/metrics"
        self._listener = listener
        http = HttpSettings(drain_s=0)
        self._server = HttpServer(http, _app(render), HttpPort(http, visitors=visitors))

    async def serve(self) -> None:
        """Serves until cancelled."""
        try:
            await self._server.serve(self._listener)
        except asyncio.CancelledError:
            await self._server.shut_down()
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Closes the socket, as `serve` does."""
        self._listener.close()


def _app(render: Render) -> FastAPI:
    async def metrics(request: Request) -> Response:
        text, kind = await render(request.query_params.get("scope", ""), request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind or _CONTENT_TYPE})

    app = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers=ERROR_HANDLERS)
    app.add_route("/metrics", metrics)
    return app
