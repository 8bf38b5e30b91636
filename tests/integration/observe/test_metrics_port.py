"""Metrics on a port of their own."""

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from qinfer.core.settings import HttpSettings, Settings
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import SettingsError
from qinfer.observe.exposition import OPENMETRICS
from qinfer_api.observe.metrics import scopes_of
from qinfer_api.rest.side_ports import MetricsPort, open_metrics_port


def settings_of(port: int = 0, **metrics: object) -> Settings:
    return Settings(metrics=MetricsSettings.model_validate({"port": port, **metrics}))


async def rendered(scope: str, accept: str) -> tuple[bytes, str]:
    scopes_of(scope)
    kind = OPENMETRICS if OPENMETRICS in accept else ""
    return f"qinfer_store_up 1.0\n{scope}".encode(), kind


@pytest.fixture
async def port() -> AsyncIterator[MetricsPort]:
    listener = open_metrics_port(settings_of())
    assert listener is not None
    port = MetricsPort(listener, rendered)
    serving = asyncio.create_task(port.serve())
    yield port
    serving.cancel()
    await asyncio.wait([serving])
    assert serving.cancelled()


async def test_metrics(port: MetricsPort) -> None:
    """As Prometheus reads them, without a key."""
    async with httpx.AsyncClient() as client:
        reply = await client.get(port.url)

    assert (reply.status_code, reply.text) == (200, "qinfer_store_up 1.0\n")
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"


async def test_a_scope(port: MetricsPort) -> None:
    """It is handed on, and a wrong one is refused with the choices."""
    async with httpx.AsyncClient() as client:
        process = await client.get(port.url, params={"scope": "process"})
        wrong = await client.get(port.url, params={"scope": "all"})

    assert (process.status_code, process.text) == (200, "qinfer_store_up 1.0\nprocess")
    assert wrong.status_code == 400
    assert wrong.json() == {"error": "unknown scope 'all': it must be cluster or process, or be left out for both"}


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "", 404, "Not Found"),
        ("GET", "/metrics/", 404, "Not Found"),
        ("GET", "/v2/health/ready", 404, "Not Found"),
        ("POST", "/v2/models/m/infer", 404, "Not Found"),
        ("POST", "/metrics", 405, "Method Not Allowed"),
    ],
)
async def test_nothing_else_is_there(port: MetricsPort, method: str, path: str, status: int, error: str) -> None:
    """Whoever reaches this port reaches no model."""
    async with httpx.AsyncClient() as client:
        reply = await client.request(method, port.url.removesuffix("/metrics") + path)

    assert (reply.status_code, reply.json()) == (status, {"error": error})


async def test_who_takes_openmetrics_may_get_it(port: MetricsPort) -> None:
    """With its content type; others get Triton's."""
    async with httpx.AsyncClient() as client:
        text = await client.get(port.url)
        openmetrics = await client.get(port.url, headers={"Accept": f"{OPENMETRICS};version=1.0.0,text/plain;q=0.5"})

    assert text.headers["content-type"] == "text/plain; charset=utf-8"
    assert openmetrics.headers["content-type"] == OPENMETRICS


async def test_it_ends_with_a_connection_open() -> None:
    """A scraper that keeps its connection does not hold the gateway up."""
    listener = open_metrics_port(settings_of())
    assert listener is not None
    port = MetricsPort(listener, rendered)
    serving = asyncio.create_task(port.serve())
    async with httpx.AsyncClient() as client:
        await client.get(port.url)

        serving.cancel()
        await asyncio.wait([serving])

        with pytest.raises(httpx.TransportError):
            await client.get(port.url)


def test_a_taken_port_is_a_wrong_setting() -> None:
    """The error names the variables and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]

        with pytest.raises(SettingsError, match=f"QINFER_METRICS__HOST=127.0.0.1 QINFER_METRICS__PORT={number}: "):
            open_metrics_port(settings_of(number))


def test_where_it_serves() -> None:
    """On the host of HTTP unless another is set; nowhere when it is off."""
    assert open_metrics_port(settings_of(enabled=False)) is None
    for settings, host in (
        (Settings(http=HttpSettings(host="127.0.0.2"), metrics=MetricsSettings(port=0)), "127.0.0.2"),
        (settings_of(host="127.0.0.3"), "127.0.0.3"),
    ):
        listener = open_metrics_port(settings)
        assert listener is not None
        with listener:
            assert listener.getsockname()[0] == host
