"""The certificate of HTTP is read again when the gateway is asked to."""

import asyncio
import hashlib
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from qinfer.testing import eventually
from tests.support.certificates import write_certificate
from tests.support.gateway import Running, running_gateway, settings_of


def settings(directory: Path) -> dict[str, Any]:
    return {"tls_certfile": str(directory / "server.pem"), "tls_keyfile": str(directory / "server.key")}


def fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


def of_file(directory: Path) -> str:
    certificate = x509.load_pem_x509_certificate((directory / "server.pem").read_bytes())
    return fingerprint(certificate.public_bytes(Encoding.DER))


async def shown(running: Running) -> str:
    """Returns the fingerprint of the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=context)
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return fingerprint(certificate)


async def test_new_connections_are_shown_the_new_certificate(tmp_path: Path) -> None:
    """Again and again; open ones stay, and the port is closed at the end as ever."""
    write_certificate(tmp_path, "server")
    async with running_gateway(settings_of(settings(tmp_path))) as running:
        async with httpx.AsyncClient(base_url=running.url, verify=False) as client:
            assert (await client.get("/v2/health/live")).status_code == 200
            for _ in range(3):
                write_certificate(tmp_path, "server")
                expected = of_file(tmp_path)
                running.gateway.reload()

                async def is_shown(wanted: str = expected) -> bool:
                    return await shown(running) == wanted

                await eventually(is_shown, description="the new certificate")
                assert (await client.get("/v2/health/live")).status_code == 200
            (connection,) = running.gateway._server.port.connections
            assert connection is not None
        port = running.port
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_key_of_another_certificate_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As when only one of the files was replaced yet."""
    write_certificate(tmp_path, "server")
    before = of_file(tmp_path)
    write_certificate(tmp_path, "other")
    async with running_gateway(settings_of(settings(tmp_path))) as running:
        (tmp_path / "other.key").rename(tmp_path / "server.key")
        running.gateway.reload()
        await eventually(lambda: "certificate can't be read" in caplog.text, description="the error")

        assert await shown(running) == before
