"""The ports beside that of HTTP: metrics for scrapers without a key, and the console where it has a port of its own."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from qinfer.core.api_keys import check_exposure, own_console_host, why_no_console
from qinfer.core.settings import HttpSettings, Settings
from qinfer.errors import SettingsError
from qinfer_api.http.connection import HttpPort
from qinfer_api.http.head import Visitors
from qinfer_api.http.server import HttpServer, bound_socket, netloc
from qinfer_api.rest.services import ERROR_HANDLERS

logger = logging.getLogger(__name__)

_CONTENT_TYPE = "text/plain; charset=utf-8"  # Triton's, for Prometheus' text
Render = Callable[[str, str], Awaitable[tuple[bytes, str]]]


def open_metrics_port(settings: Settings) -> socket.socket | None:
    """Opens the port of metrics; `None` if it is off."""
    metrics = settings.metrics
    if not metrics.enabled:
        return None
    advice = "choose another port, 0 is any, or set QINFER_METRICS__ENABLED=false"
    return bound_socket("METRICS", metrics.host or settings.http.host, metrics.port, advice)


def open_console_port(settings: Settings) -> socket.socket | None:
    """Opens the console's own port; `None` if it has none, or is off."""
    host, port = own_console_host(settings), settings.console.port
    if settings.console.host and port is None:
        raise SettingsError("QINFER_CONSOLE__HOST needs QINFER_CONSOLE__PORT: the console has no port of its own")
    if port is None or not settings.console.enabled:
        return None
    check_exposure(settings.auth, host, "QINFER_CONSOLE__HOST")
    if reason := why_no_console(settings):
        logger.warning("no console", extra={"reason": reason})
        return None
    return bound_socket("CONSOLE", host, port, "choose another, 0 is any, or unset it: the console shares HTTP's then")


class SidePort:
    """Serves an application on an open socket, without draining; with TLS if the settings have a certificate."""

    def __init__(
        self, listener: socket.socket, app: ASGIApp, http: HttpSettings, visitors: Visitors | None = None
    ) -> None:
        scheme = "https" if http.tls_certfile else "http"
        self.url = f"{scheme}://{netloc(*listener.getsockname()[:2])}"
        self._listener = listener
        self._server = HttpServer(http, app, HttpPort(http, visitors=visitors))
        self.show_certificate = self._server.show_certificate

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


class MetricsPort(SidePort):
    """Serves the metrics on an open socket."""

    def __init__(self, listener: socket.socket, render: Render, visitors: Visitors | None = None) -> None:
        super().__init__(listener, _app(render), HttpSettings(drain_s=0), visitors)
        self.url += "/metrics"


def console_port(listener: socket.socket, app: ASGIApp, settings: Settings) -> SidePort:
    """Returns the console's own port, which admits the visitors that its address allows."""
    visitors = Visitors.from_settings(settings, own_console_host(settings))
    port = SidePort(listener, app, settings.http.model_copy(update={"drain_s": 0.0}), visitors)
    port.url += "/console/"
    return port


def _app(render: Render) -> FastAPI:
    async def metrics(request: Request) -> Response:
        text, kind = await render(request.query_params.get("scope", ""), request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind or _CONTENT_TYPE})

    app = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers=ERROR_HANDLERS)
    app.add_route("/metrics", metrics)
    return app
