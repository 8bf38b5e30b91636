"""The port that gRPC is served on: opened before anything else, so that a wrong setting shows at the start."""

import ssl
from typing import Any, NamedTuple

import grpc
import grpc.aio

from qinfer.core.settings import Settings
from qinfer.errors import SettingsError
from qinfer_api.tls import read_certificate, read_tls_file

_MAX_METADATA_BYTES = 64 * 1024


class RpcPort(NamedTuple):
    """A server that has its port, and neither handlers nor connections.

    Attributes:
        server: The server.
        url: Where it will serve, as `grpc://host:port` or `grpcs://host:port`.
    """

    server: grpc.aio.Server
    url: str


def open_port(settings: Settings) -> RpcPort:
    """Opens the port that the settings say; called on the event loop that will serve.

    Raises:
        SettingsError: The address is taken or not ours, or a TLS file can't be used.
    """
    rpc = settings.grpc
    host = rpc.host or settings.http.host
    name = f"[{host}]" if ":" in host else host
    credentials = _credentials(rpc.tls_certfile, rpc.tls_keyfile, rpc.tls_client_ca_file)
    server = grpc.aio.server(options=_options(rpc.max_message_bytes))
    try:
        if credentials is None:
            port = server.add_insecure_port(f"{name}:{rpc.port}")
        else:
            port = server.add_secure_port(f"{name}:{rpc.port}", credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise SettingsError(
            f"QINFER_GRPC__HOST={host} QINFER_GRPC__PORT={rpc.port}: the address is in use, or not of this machine; "
            "choose another, 0 is any"
        )
    return RpcPort(server, f"{'grpc' if credentials is None else 'grpcs'}://{name}:{port}")


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
