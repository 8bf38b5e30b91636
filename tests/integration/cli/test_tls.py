"""The command line asks gateways whose certificates are of an authority of one's own."""

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from qinfer.cli.client import GatewayClient
from qinfer.errors import Unreachable
from tests.support.servers.servers import make_certificate


class Ready(BaseHTTPRequestHandler):
    """Answers every POST with an empty index."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server that speaks TLS: its URL and certificate."""
    key, certificate = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with HTTPServer(("127.0.0.1", 0), Ready) as http:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"https://127.0.0.1:{http.server_port}", certificate
        finally:
            http.shutdown()
            thread.join()


def test_an_authority_of_ones_own_is_named_by_a_variable(
    server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSL_CERT_FILE, as for Python and OpenSSL; the refusal says so."""
    url, certificate = server
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(Unreachable, match="SSL_CERT_FILE"), GatewayClient(url) as client:
        client.index()

    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with GatewayClient(url) as client:
        assert client.index() == []
