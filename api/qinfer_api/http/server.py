"""uvicorn's server with the connections of `protocol.py`."""

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn

from qinfer.core.settings import HttpSettings
from qinfer_api.http.protocol import FastPath, QinferHttpProtocol
from qinfer_api.quiet_server import QuietServer

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
        super().__init__(_config(http, app, fast))
        self._serving = serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tells when connections are accepted."""
        await super().startup(sockets)
        self._serving()

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


def _config(http: HttpSettings, app: Any, fast: FastPath) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(QinferHttpProtocol, fast)),  # all uvicorn does with it is call it
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=cast(int, http.keep_alive_s),  # it only goes to `call_later`
        timeout_graceful_shutdown=cast(int, http.drain_s + _LAST_REPLIES_S),  # and this to `wait_for`
        ssl_certfile=http.tls_certfile or None,
        ssl_keyfile=http.tls_keyfile or None,
    )
