"""The HTTP server: sockets, TLS and shutdown; and the port while a gateway waits for Redis."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qinfer.core.retry import REMIND_S, OutageLog
from qinfer.core.settings import HttpSettings
from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.queue.clients import wait_for_redis
from qinfer.queue.connection import DOWN
from qinfer_api.http.connection import HttpPort
from qinfer_api.http.cors import CorsApp

logger = logging.getLogger(__name__)

T = TypeVar("T")

BACKLOG = 2048

ACCEPTS = 8
"""Connections accepted in one turn of the event loop."""


def bound_socket(section: str, host: str, port: int, advice: str) -> socket.socket:
    """Binds a socket that does not listen yet; `section` names the variables in errors."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise SettingsError(
            f"QINFER_{section}__HOST={host} QINFER_{section}__PORT={port}: {error.strerror}; {advice}"
        ) from None
    return opened


class Listeners:
    """Several servers of one socket: each accepts one connection a turn of the event loop."""

    def __init__(self, connect: Callable[[], asyncio.BaseProtocol], listener: socket.socket) -> None:
        self._connect, self._listener = connect, listener
        self._servers: list[asyncio.Server] = []

    async def listen(self, tls: ssl.SSLContext | None) -> None:
        """Accepts connections, or replaces the TLS context: earlier connections stay open."""
        replaced, self._servers = self._servers, []
        loop = asyncio.get_running_loop()
        while len(self._servers) < ACCEPTS and self._listener.fileno() >= 0:
            opened = socket.socket(fileno=os.dup(self._listener.fileno()))
            try:
                server = await loop.create_server(self._connect, sock=opened, ssl=tls, backlog=BACKLOG)
            except BaseException:
                opened.close()
                self._servers += replaced
                raise
            self._servers.append(server)
        for server in replaced:
            server.close()
        if self._listener.fileno() < 0:
            self.close()

    def close(self) -> None:
        """Accepts no more."""
        for server in self._servers:
            server.close()
        self._listener.close()


def netloc(host: str, port: int) -> str:
    """Formats an address for a URL."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def read_certificate(section: str, certificate: str, key: str) -> tuple[bytes, bytes] | None:
    """Reads a PEM certificate chain and its matching key."""
    if not certificate and not key:
        return None
    for variable, path in (("TLS_CERTFILE", certificate), ("TLS_KEYFILE", key)):
        if not path:
            raise SettingsError(f"QINFER_{section}__{variable} is not set; TLS needs a certificate and its key")
    chain = read_tls_file(f"QINFER_{section}__TLS_CERTFILE", certificate)
    private = read_tls_file(f"QINFER_{section}__TLS_KEYFILE", key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # no prompt
    except (OSError, ValueError):
        raise SettingsError(
            f"QINFER_{section}__TLS_CERTFILE={certificate} QINFER_{section}__TLS_KEYFILE={key}: not a PEM certificate "
            "and its key without a password"
        ) from None
    return chain, private


def read_tls_file(variable: str, path: str) -> bytes:
    """Reads the file that a setting names."""
    try:
        return Path(path).read_bytes()
    except OSError:
        raise SettingsError(f"{variable}={path}: there is no such file, or it can't be read") from None


_LAST_REPLIES_S = 1.0


class HttpServer:
    """Serves an ASGI application, and below it the port's own requests."""

    def __init__(
        self, http: HttpSettings, app: ASGIApp, port: HttpPort, serving: Callable[[], None] | None = None
    ) -> None:
        self.port = port
        port.app = app if port.cors is None else CorsApp(app, port.cors)
        self._http = http
        self._serving = serving
        self._listeners: Listeners | None = None
        self._ends = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Serves until `turn_away`, then drains."""
        tls = _tls(self._http)
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._tick(listener))
            self._listeners = Listeners(self.port.connect, listener)
            await self._listeners.listen(tls)
            if self._serving is not None:
                self._serving()
            await self._ends.wait()
            await self.shut_down()
            ticking.cancel()

    async def _tick(self, listener: socket.socket) -> None:
        descriptors = OutageLog(logger, "file descriptors used up: new connections are closed", remind_s=REMIND_S)
        while True:
            await self.port.tick()
            note_descriptors(descriptors, listener)
            await asyncio.sleep(1)

    def turn_away(self) -> None:
        """Stops accepting connections and requests."""
        self._ends.set()
        if self._listeners is not None:
            self._listeners.close()
        for connection in tuple(self.port.connections):
            connection.shutdown()

    async def shut_down(self) -> None:
        """Drains the requests in flight, then aborts the rest."""
        self.turn_away()
        port = self.port
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._http.drain_s + _LAST_REPLIES_S):
                while port.connections:
                    port.is_idle.clear()
                    await port.is_idle.wait()
                if port.tasks:
                    await asyncio.wait(port.tasks)
        for connection in tuple(port.connections):
            connection.transport.abort()
        for task in port.tasks:
            task.cancel()
        if port.tasks:
            await asyncio.wait(port.tasks, timeout=_LAST_REPLIES_S)

    async def show_certificate(self) -> None:
        """Reloads the certificate files for new connections."""
        tls = await asyncio.to_thread(_tls, self._http)
        if self._listeners is not None and tls is not None:
            await self._listeners.listen(tls)


def note_descriptors(outage: OutageLog, listener: socket.socket) -> None:
    """Logs the lack of file descriptors, which the event loop hides."""
    if listener.fileno() < 0:
        return
    try:
        os.close(os.dup(listener.fileno()))
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            outage.failed(f"{error.strerror}; raise the limit (ulimit -n), or let connections end sooner")
    else:
        outage.over()


def _tls(http: HttpSettings) -> ssl.SSLContext | None:
    if read_certificate("HTTP", http.tls_certfile, http.tls_keyfile) is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(http.tls_certfile, http.tls_keyfile)
    return context


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
