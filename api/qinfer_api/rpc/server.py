"""The gRPC server: Triton's 20 calls, health and reflection on one port."""

import asyncio
import contextlib
import socket
import ssl

from qinfer.core.settings import GrpcSettings, Settings
from qinfer.errors import SettingsError
from qinfer.wire.protos import grpc_service_pb2, health_pb2
from qinfer_api.http.head import Visitors
from qinfer_api.http.server import Listeners, bound_socket, netloc, read_certificate, read_tls_file
from qinfer_api.receiving import ReceivingBudget
from qinfer_api.rest.services import Services
from qinfer_api.rpc.calls import CallGuard
from qinfer_api.rpc.frames import ConnectionLimits
from qinfer_api.rpc.headers import Method
from qinfer_api.rpc.heads import Server
from qinfer_api.rpc.http2 import Http2Connection
from qinfer_api.rpc.infer import Infer
from qinfer_api.rpc.management import health_calls, model_calls, repository_calls, settings_calls, shared_memory_calls
from qinfer_api.rpc.reflection import reflection_methods

SERVICE: str = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_CHECK_EVERY_S = 1.0
_LAST_REPLIES_S = 1.0


def open_port(settings: Settings) -> "RpcServer":
    """Opens the configured port."""
    rpc = settings.grpc
    context = _tls(rpc)
    listener = bound_socket("GRPC", rpc.host or settings.http.host, rpc.port, "choose another, 0 is any")
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
    return RpcServer(listener, context, rpc)


def _tls(rpc: GrpcSettings) -> ssl.SSLContext | None:
    if read_certificate("GRPC", rpc.tls_certfile, rpc.tls_keyfile) is None:
        if rpc.tls_client_ca_file:
            raise SettingsError(
                "QINFER_GRPC__TLS_CLIENT_CA_FILE is set without a certificate of the server; set "
                "QINFER_GRPC__TLS_CERTFILE and QINFER_GRPC__TLS_KEYFILE too"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(rpc.tls_certfile, rpc.tls_keyfile)
    context.set_alpn_protocols(["h2"])
    if rpc.tls_client_ca_file:
        roots = read_tls_file("QINFER_GRPC__TLS_CLIENT_CA_FILE", rpc.tls_client_ca_file)
        try:
            context.load_verify_locations(cadata=roots.decode())
        except (OSError, ValueError):
            raise SettingsError(
                f"QINFER_GRPC__TLS_CLIENT_CA_FILE={rpc.tls_client_ca_file}: it does not contain PEM certificates"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class RpcServer:
    """Serves gRPC at `url`; opened first, so that a wrong setting shows at the start."""

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext | None, settings: GrpcSettings) -> None:
        self._listeners = Listeners(self._connect, listener)
        self._tls = tls
        self._settings = settings
        host, port = listener.getsockname()[:2]
        self.url = f"{'grpc' if tls is None else 'grpcs'}://{netloc(host, port)}"
        self._calls = Server({}, ConnectionLimits(), ReceivingBudget(0))
        self._checks: asyncio.Task[None] | None = None

    def set_services(self, services: Services) -> None:
        """Sets the use cases, before the start."""
        guard = CallGuard(services)
        self._infer = Infer(guard, services)
        calls = {
            **model_calls(guard, services),
            **repository_calls(guard, services.models, services.dispatcher.endpoints),
            **shared_memory_calls(guard, services.codec.memory),
            **settings_calls(guard, services.reporting.trace_settings, services.reporting.log_settings),
            **self._infer.methods(),
        }
        methods: dict[str, Method] = {f"/{SERVICE}/{name}": method for name, method in calls.items()}
        methods |= {f"/{HEALTH_SERVICE}/{name}": method for name, method in health_calls(guard, services).items()}
        methods |= reflection_methods(guard, (SERVICE, HEALTH_SERVICE))
        rpc = services.settings.grpc
        limits = ConnectionLimits(
            age_s=rpc.max_connection_age_s,
            idle_s=rpc.max_connection_idle_s,
            ping_s=rpc.keepalive_s,
            pong_s=rpc.keepalive_timeout_s,
        )
        self._calls = Server(methods, limits, services.receiving, Visitors.from_settings(services.settings))

    async def start(self) -> None:
        """Starts to accept connections."""
        await self._listeners.listen(self._tls)
        self._checks = asyncio.create_task(self._check_connections())

    async def show_certificate(self) -> None:
        """Reloads the TLS files for new connections."""
        tls = await asyncio.to_thread(_tls, self._settings)
        if self._checks is not None and tls is not None:
            await self._listeners.listen(tls)

    def _connect(self) -> Http2Connection:
        return Http2Connection(self._calls)

    async def _check_connections(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            now_s = asyncio.get_running_loop().time
            async for connection in self._calls.turns.in_turns(tuple(self._calls.connections)):
                if connection in self._calls.connections:
                    connection.check(now_s())
            self._infer.check_callers()

    async def turn_away(self) -> None:
        """Closes the port, and returns when no connection accepts calls.

        Calls that are under way are still admitted.
        """
        self._calls.is_closing = True
        self._listeners.close()
        await asyncio.gather(*[connection.shut() for connection in tuple(self._calls.connections)])

    async def stop(self, within_s: float) -> None:
        """Ends once every call is answered, or a second after `within_s`."""
        self._infer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s + _LAST_REPLIES_S):
                await self._calls.wait_idle()
        await self.close()

    async def close(self) -> None:
        """Ends at once, also before a start."""
        if self._checks is not None:
            self._checks.cancel()
        self._listeners.close()
        for connection in tuple(self._calls.connections):
            connection.close_now()
