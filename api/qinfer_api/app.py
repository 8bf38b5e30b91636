"""The gateway's composition root: settings in, a serving process out.

`Gateway` owns the tasks (reply reader, catalog, discards, janitor) and uvicorn's server; `build` makes the Redis
adapters. If a task dies the gateway ends with its error, and the supervisor starts it anew: half a gateway helps
nobody.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from qinfer.control.api_keys import check_exposure
from qinfer.control.base import ControlStore
from qinfer.control.catalog import Catalog
from qinfer.control.models import ModelControl, ModelSource
from qinfer.control.redis_store import RedisControlStore
from qinfer.control.sync import start
from qinfer.delivery.base import Delivery, reply_address
from qinfer.delivery.clients import admin_client
from qinfer.delivery.redis import RedisDelivery
from qinfer.errors import Overloaded, SettingsError
from qinfer.messages import IdFactory
from qinfer.observability.metrics import GatewayTally
from qinfer.settings import HttpSettings, Settings
from qinfer_api.auth import load_auth
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.infer import InferCodec
from qinfer_api.http.protocol import FastPath, QinferHttpProtocol
from qinfer_api.janitor import Janitor
from qinfer_api.metrics_port import MetricsPort, open_metrics_port
from qinfer_api.quiet_server import QuietServer
from qinfer_api.reporting import Reporting
from qinfer_api.repository_watch import RepositoryWatch, note_errors, open_here
from qinfer_api.requests import AsyncRequests
from qinfer_api.rest.app import build_app
from qinfer_api.rest.services import Services
from qinfer_api.restrictions import Restrictions
from qinfer_api.shared_memory import SharedMemory
from qinfer_api.targets import Targets
from qinfer_api.tls import read_certificate
from qinfer_api.waits import Waits
from qinfer_api.webhooks import Webhooks, read_secret

if TYPE_CHECKING:
    from qinfer_api.rpc.port import RpcPort
    from qinfer_api.rpc.server import RpcServer

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_TICKS_PER_S = 10  # of uvicorn's main loop
_LAST_REPLIES_S = 1.0  # to write the refusals of what was not answered within the drain time


async def build(settings: Settings) -> "Gateway":
    """Connects to Redis, synchronises the model repository if there is one here, and makes the gateway.

    Raises:
        BrokerUnavailable: Redis can't be reached.
        SettingsError: Who may call is not set or can't be read, webhooks can't be signed, an address can't be bound,
            Redis refuses the credentials, or a model repository can't be read.
    """
    load_auth(settings.auth, settings.http.host)  # what is wrong with it shows before anything is opened
    read_secret(settings.webhooks)
    Restrictions.for_http(settings.http.restricted)
    if settings.grpc.enabled:
        Restrictions.for_grpc(settings.grpc.restricted)
        check_exposure(settings.auth, settings.grpc.host or settings.http.host, "QINFER_GRPC__HOST")
    async with contextlib.AsyncExitStack() as opened:  # and closed again, should anything of it fail
        listener = opened.enter_context(bind(settings.http))
        metrics_listener = open_metrics_port(settings)
        if metrics_listener is not None:
            opened.enter_context(metrics_listener)
        rpc_port = None
        if settings.grpc.enabled:
            from qinfer_api.rpc.port import open_port

            rpc_port = open_port(settings)  # a server that was never started gives its port back when it is collected
        delivery = await RedisDelivery.connect(settings.redis, settings.limits)
        opened.push_async_callback(delivery.close)
        store = RedisControlStore(admin_client(settings.redis))
        opened.push_async_callback(store.close)
        source = open_here(settings.repository)
        if source is not None:
            note_errors(await start(source, store, delivery, settings.repository))
        gateway = Gateway(settings, delivery, store, listener, source, rpc_port)
        if metrics_listener is not None:
            gateway.serve_metrics(metrics_listener)
        opened.pop_all()
    return gateway


def bind(http: HttpSettings) -> socket.socket:
    """Opens the listening socket.

    Raises:
        SettingsError: The address is taken or not ours, or a TLS file can't be used.
    """
    read_certificate("HTTP", http.tls_certfile, http.tls_keyfile)  # uvicorn reads them itself, when it is too late
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        return socket.create_server((http.host, http.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"QINFER_HTTP__HOST={http.host} QINFER_HTTP__PORT={http.port}: {error.strerror}; choose another, 0 is any"
        ) from None


class Gateway:
    """One gateway process; made on its event loop.

    Args:
        settings: Everything that can be set.
        delivery: The queue.
        store: Desired state, heartbeats, statistics.
        listener: The socket to serve on.
        source: The model repositories; `None` where there are none here.
        rpc_port: The port to serve gRPC on; `None` = gRPC is not served.

    Attributes:
        catalog: The models.
        models: Loads and unloads them.
        dispatcher: The use case, for other transports.
        requests: That of asynchronous requests.
        memory: What clients on this host share with this process.
        url: Where it serves.
        rpc: The gRPC server; `None` = gRPC is not served.
        metrics: The server on the metrics' own port; `None` = there is none.
        started: Set once connections are accepted.
    """

    def __init__(
        self,
        settings: Settings,
        delivery: Delivery,
        store: ControlStore,
        listener: socket.socket,
        source: ModelSource | None = None,
        rpc_port: "RpcPort | None" = None,
    ) -> None:
        self._delivery = delivery
        self._store = store
        self._listener = listener
        self._drain_s = settings.http.drain_s
        self._owner = f"gateway-{IdFactory().ulid()}"
        self.catalog = Catalog(store, settings.limits)
        self.models = ModelControl(source, store, delivery, settings.repository, self.catalog.refresh)
        self._watch = (
            None
            if source is None or settings.repository.control_mode != "poll"
            else RepositoryWatch(source, store, delivery, settings.repository.poll_s)
        )
        tally = GatewayTally()
        auth = load_auth(settings.auth, settings.http.host)
        self.dispatcher = Dispatcher(delivery, self.catalog, tally, settings.limits, self._owner, auth)
        tally.in_flight = lambda: self.dispatcher.in_flight
        self._reporting = Reporting(settings, self.catalog, store, delivery, tally)
        targets = Targets(settings.webhooks)
        webhooks = Webhooks(settings.webhooks, delivery.requests, delivery.clock, targets)
        sweep_every_s = settings.requests.sweep_every_s
        self._janitor = Janitor(delivery, self.catalog, tally, sweep_every_s, webhooks, consumer=self._owner)
        self.requests = AsyncRequests(
            delivery=delivery,
            catalog=self.catalog,
            dispatcher=self.dispatcher,
            tally=tally,
            settings=settings.requests,
            inline_max_bytes=settings.limits.inline_max_bytes,
            targets=targets,
            waits=Waits(delivery.requests, reply_address(self._owner)),
        )
        self.dispatcher.unclaimed = self.requests.waits.wake
        self.memory = SharedMemory(allowed=settings.allow_client_shm)
        codec = InferCodec(self.dispatcher, self.memory, settings)
        fast = FastPath(self.dispatcher, settings.http, codec)
        services = Services(
            settings=settings,
            dispatcher=self.dispatcher,
            requests=self.requests,
            catalog=self.catalog,
            codec=codec,
            shared_memory=self.memory,
            forward=fast.forward,
            models=self.models,
            statistics=self._reporting.statistics,
            log_settings=self._reporting.log_settings,
            trace_settings=self._reporting.trace_settings,
            restrictions=Restrictions.for_http(settings.http.restricted),
            metrics=self._reporting.metrics,
        )
        self.started, self._stopping = asyncio.Event(), asyncio.Event()
        self.url = _url(listener, tls=bool(settings.http.tls_certfile))
        self._server = _Server(_uvicorn_config(settings.http, build_app(services), fast), self._serving)
        self.rpc = None if rpc_port is None else _rpc_server(rpc_port, services)
        self.metrics: MetricsPort | None = None

    def serve_metrics(self, listener: socket.socket) -> None:
        """Makes `serve` serve the metrics on a port of their own, too."""
        self.metrics = MetricsPort(listener, self._reporting.metrics)

    async def serve(self) -> None:
        """Serves until `stop`, then answers what is in flight within `http.drain_s`, and closes the adapters."""
        listening = asyncio.Event()
        try:
            await self.catalog.refresh()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._delivery.listen(self._owner, self.dispatcher.receive, listening.set)),
                    group.create_task(self.catalog.run()),
                    group.create_task(self.dispatcher.run()),
                    group.create_task(self._janitor.run()),
                    group.create_task(self._reporting.run()),
                ]
                if self.metrics is not None:
                    tasks.append(group.create_task(self.metrics.serve()))
                if self._watch is not None:
                    tasks.append(group.create_task(self._watch.run()))
                await listening.wait()
                await self._serve_all()
                self._give_up()
                await self.dispatcher.discard()
                await self._reporting.flush()
                for task in tasks:
                    task.cancel()
        finally:
            self._give_up()  # if a task has died, nobody was told yet
            self._server.turn_away()
            self._listener.close()
            if self.metrics is not None:
                self.metrics.close()
            if self.rpc is not None:
                await self.rpc.close()
            self.memory.close()
            await self._delivery.close()
            await self._store.close()

    async def _serve_all(self) -> None:
        if self.rpc is None:
            await self._server.serve(sockets=[self._listener])
            return
        await self.rpc.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._serve_rpc(self.rpc))
            await self._server.serve(sockets=[self._listener])

    async def _serve_rpc(self, rpc: "RpcServer") -> None:
        await self._stopping.wait()
        await rpc.stop(self._drain_s)

    def stop(self) -> None:
        """Begins to drain: health answers 503, no connection and no request is accepted any more."""
        if not self._server.should_exit:
            self.dispatcher.draining = True
            self._stopping.set()
            self.requests.waits.end()
            self._server.should_exit = True
            self._server.turn_away()
            asyncio.get_running_loop().call_later(self._drain_s, self._give_up)

    def _give_up(self) -> None:
        self.models.end()
        self.dispatcher.fail_all(Overloaded("Server exiting"))

    def _serving(self) -> None:
        where = {"url": self.url} if self.rpc is None else {"url": self.url, "grpc": self.rpc.url}
        if self.metrics is not None:
            where["metrics"] = self.metrics.url
        logger.info("gateway serving", extra=where)
        self.started.set()


class _Server(QuietServer):
    """uvicorn's server, with its signal handling left to the program and its tick used for timeouts."""

    def __init__(self, config: uvicorn.Config, serving: Callable[[], None]) -> None:
        super().__init__(config)
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


def _rpc_server(port: "RpcPort", services: Services) -> "RpcServer":
    from qinfer_api.rpc.server import RpcServer  # loads gRPC, which a gateway without it need not have

    return RpcServer(port, services)


def _uvicorn_config(http: HttpSettings, app: Any, fast: FastPath) -> uvicorn.Config:
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


def _url(listener: socket.socket, *, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
