"""uvicorn's server with the connections of `fast.py`, the sockets it listens on, and the certificate that it shows."""

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvicorn.config
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qinfer.core.settings import HttpSettings
from qinfer.errors import SettingsError
from qinfer_api.http.cors import CorsApp
from qinfer_api.http.fast import IN_REPLY_TO, FastPath, QinferHttpProtocol
from qinfer_api.http.infer import ID_HEADER, header_value

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def bound_socket(section: str, host: str, port: int, advice: str) -> socket.socket:
    """Opens a socket on an address; its server listens, once it serves.

    Until then connections are refused. One that waited for a server which ends before it serves would be reset.

    Args:
        section: The section of the settings, in capitals: the error names the variables `QINFER_<section>__HOST` and
            `QINFER_<section>__PORT`.
        host: The address.
        port: The port; 0 is any.
        advice: The end of the error's text.

    Raises:
        SettingsError: The address is taken or not ours.
    """
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


async def listen_anew(
    server: asyncio.Server, connect: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext
) -> asyncio.Server:
    """Listens on the port of a server with another TLS context, and closes the server; its connections stay.

    Args:
        server: The server.
        connect: Makes the protocol of a connection.
        tls: The context of new connections.

    Returns:
        The server that takes new connections.

    Raises:
        OSError: The socket can't be used again: too many files are open.
    """
    listener = socket.socket(fileno=os.dup(server.sockets[0].fileno()))  # closing a server closes its own
    try:
        loop = asyncio.get_running_loop()
        successor = await loop.create_server(connect, sock=listener, ssl=tls, backlog=BACKLOG)
    except BaseException:
        listener.close()
        raise
    server.close()
    return successor


def netloc(host: str, port: int) -> str:
    """Returns an address as URLs have it."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def read_certificate(section: str, certificate: str, key: str) -> tuple[bytes, bytes] | None:
    """Reads a certificate and its key, and checks that they belong together.

    Args:
        section: The section of the settings, in capitals: the errors name the variables `QINFER_<section>__TLS_…`.
        certificate: The path of the PEM certificate chain.
        key: The path of its PEM private key.

    Returns:
        Both, as in the files; `None` where neither is set.

    Raises:
        SettingsError: Only one of them is set, or they can't be read or used.
    """
    if not certificate and not key:
        return None
    for variable, path in (("TLS_CERTFILE", certificate), ("TLS_KEYFILE", key)):
        if not path:
            raise SettingsError(f"QINFER_{section}__{variable} is not set; TLS needs a certificate and its key")
    chain = read_tls_file(f"QINFER_{section}__TLS_CERTFILE", certificate)
    private = read_tls_file(f"QINFER_{section}__TLS_KEYFILE", key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # never asks for one
    except (OSError, ValueError):
        raise SettingsError(
            f"QINFER_{section}__TLS_CERTFILE={certificate} QINFER_{section}__TLS_KEYFILE={key}: not a PEM certificate "
            "and its key without a password"
        ) from None
    return chain, private


def read_tls_file(variable: str, path: str) -> bytes:
    """Reads a file that a setting names.

    Raises:
        SettingsError: It is not there, or can't be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError:
        raise SettingsError(f"{variable}={path}: there is no such file, or it can't be read") from None


class QuietServer(uvicorn.Server):
    """Captures no signals: uvicorn would raise them again at the end, and the exit code would be the signal's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class _Named:
    """An ASGI application whose replies name the id of their request, as those of the fast path do.

    Args:
        app: The application.
        new_id: Makes the ids of replies to what became no request.
    """

    def __init__(self, app: ASGIApp, new_id: Callable[[], str]) -> None:
        self._app = app
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                request = scope["state"].get(IN_REPLY_TO)
                request_id = (request.id if request is not None else "") or self._new_id()
                message["headers"] = [(ID_HEADER, header_value(request_id)), *message["headers"]]
            await send(message)

        await self._app(scope, receive, send_named)


_TICKS_PER_S = 10  # of uvicorn's main loop
_LAST_REPLIES_S = 1.0  # to write the refusals of what was not answered within the drain time


class HttpServer(QuietServer):
    """uvicorn's server, with its signal handling left to the program and its tick used for timeouts.

    Args:
        http: Timeouts and TLS.
        app: The ASGI application, for what does not take the fast path.
        fast: What its connections share.
        serving: Called once connections are accepted.
    """

    def __init__(self, http: HttpSettings, app: Any, fast: FastPath, serving: Callable[[], None]) -> None:
        app = app if fast.cors is None else CorsApp(app, fast.cors)
        super().__init__(_config(http, _Named(app, fast.new_id), fast))
        self._http = http
        self._serving = serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tells when connections are accepted."""
        await super().startup(sockets)
        self._serving()

    async def show_certificate(self) -> None:
        """Shows new connections the certificate that its files have now.

        Raises:
            SettingsError: The files can't be read or used.
            OSError: No new context or socket can be made.
        """
        if not self.started:
            return
        tls = await asyncio.to_thread(self._context)
        (server,) = self.servers
        successor = await listen_anew(server, self._connect, tls)
        self.servers = [successor]
        if self.should_exit:  # meanwhile
            successor.close()

    def _context(self) -> ssl.SSLContext:
        http, config = self._http, self.config
        read_certificate("HTTP", http.tls_certfile, http.tls_keyfile)
        return uvicorn.config.create_ssl_context(
            http.tls_certfile,
            http.tls_keyfile,
            config.ssl_keyfile_password,
            config.ssl_version,
            config.ssl_cert_reqs,
            config.ssl_ca_certs,
            config.ssl_ciphers,
        )

    def _connect(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        connection: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    def turn_away(self) -> None:
        """Takes no connection and no request from now on; uvicorn would only at its next tick, and refuse till then."""
        if not self.started:
            return
        for server in self.servers:
            server.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()

    async def on_tick(self, counter: int) -> bool:
        """Looks after the connections' timeouts once a second."""
        if counter % _TICKS_PER_S == 0:
            now_s = time.monotonic()
            for connection in tuple(self.server_state.connections):
                cast(QinferHttpProtocol, connection).check_timeouts(now_s)
        return await super().on_tick(counter)


def quiet_config(app: Any, **options: Any) -> uvicorn.Config:
    """Returns a configuration of uvicorn that logs nothing and adds nothing of its own."""
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        **options,
    )


def _config(http: HttpSettings, app: Any, fast: FastPath) -> uvicorn.Config:
    return quiet_config(
        app,
        http=partial(QinferHttpProtocol, fast),
        timeout_keep_alive=http.keep_alive_s,
        timeout_graceful_shutdown=http.drain_s + _LAST_REPLIES_S,
        ssl_certfile=http.tls_certfile or None,
        ssl_keyfile=http.tls_keyfile or None,
    )
