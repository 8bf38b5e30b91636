"""The gRPC server: Triton's 20 calls and the health check on one port, beside HTTP and on the same use cases.

The port is opened before anything else, so that a wrong setting shows at the start.
"""

import asyncio
import contextlib
import ssl
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.settings import Settings
from qinfer.errors import SettingsError
from qinfer_api.http.server import netloc, read_certificate, read_tls_file
from qinfer_api.rest.services import Services
from qinfer_api.rpc.calls import INFERENCE, Guard
from qinfer_api.rpc.infer import Infer
from qinfer_api.rpc.management import health_check, model_calls, repository_calls, settings_calls, shared_memory_calls

_MAX_METADATA_BYTES = 64 * 1024


def open_port(settings: Settings) -> "RpcServer":
    """Opens the port that the settings say; called on the event loop that will serve.

    Raises:
        SettingsError: The address is taken or not ours, or a TLS file can't be used.
    """
    rpc = settings.grpc
    host = rpc.host or settings.http.host
    credentials = _credentials(rpc.tls_certfile, rpc.tls_keyfile, rpc.tls_client_ca_file)
    server = grpc.aio.server(options=_options(rpc.max_message_bytes))
    try:
        address = netloc(host, rpc.port)
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise SettingsError(
            f"QINFER_GRPC__HOST={host} QINFER_GRPC__PORT={rpc.port}: the address is in use, or not of this machine; "
            "choose another, 0 is any"
        )
    return RpcServer(server, f"{'grpc' if credentials is None else 'grpcs'}://{netloc(host, port)}")


def _options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error: two gateways would share it by chance
        ("grpc.keepalive_time_ms", 7_200_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),  # clients may ping every 10 s …
        ("grpc.keepalive_permit_without_calls", 1),  # … also while they wait between calls
    ]


def _credentials(certificate: str, key: str, authorities: str) -> grpc.ServerCredentials | None:
    pair = read_certificate("GRPC", certificate, key)
    if pair is None:
        if authorities:
            raise SettingsError(
                "QINFER_GRPC__TLS_CLIENT_CA_FILE is set without a certificate of the server; set "
                "QINFER_GRPC__TLS_CERTFILE and QINFER_GRPC__TLS_KEYFILE too"
            )
        return None
    chain, private = pair
    roots = read_tls_file("QINFER_GRPC__TLS_CLIENT_CA_FILE", authorities) if authorities else None
    if roots is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=roots.decode())
        except (OSError, ValueError):
            raise SettingsError(
                f"QINFER_GRPC__TLS_CLIENT_CA_FILE={authorities}: these are no PEM certificates"
            ) from None
    return grpc.ssl_server_credentials([(private, chain)], roots, require_client_auth=roots is not None)


SERVICE: str = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_LAST_REPLIES_S = 1.0  # to write what was answered last


class RpcServer:
    """Serves gRPC on a port that is open already.

    Args:
        server: The server, which has its port, and neither handlers nor connections.
        url: Where it serves, as `grpc://host:port` or `grpcs://host:port`.

    Attributes:
        url: As given.
    """

    def __init__(self, server: grpc.aio.Server, url: str) -> None:
        self._server = server
        self.url = url

    def use(self, services: Services) -> None:
        """Sets the use cases; called once, before the start.

        Raises:
            SettingsError: A setting of gRPC is wrong.
        """
        self._guard = guard = Guard(services)
        self._infer = infer = Infer(guard, services)
        calls = {
            **model_calls(guard, services),
            **repository_calls(guard, services.models),
            **shared_memory_calls(guard, services.codec.memory),
            **settings_calls(guard, services.reporting.trace_settings, services.reporting.log_settings),
            "ModelInfer": guard.unary("ModelInferRequest", infer.answer, INFERENCE),
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in calls.items()}
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(infer.stream)
        health = {"Check": grpc.unary_unary_rpc_method_handler(health_check(guard, services))}
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, handlers),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
            )
        )

    async def start(self) -> None:
        """Accepts connections from now on."""
        await self._server.start()

    async def stop(self, within_s: float) -> None:
        """Ends once every call has its answer; new ones are refused meanwhile, and health answers NOT_SERVING.

        Args:
            within_s: How long that may take; the gateway refuses then what it has not answered.
        """
        self._infer.drain()
        with contextlib.suppress(TimeoutError):  # a client that does not read its answers keeps nobody
            async with asyncio.timeout(within_s + _LAST_REPLIES_S):
                await self._guard.in_flight.ended()
        await self._server.stop(_LAST_REPLIES_S)

    async def close(self) -> None:
        """Ends at once, also when it was never started."""
        await self._server.stop(None)
