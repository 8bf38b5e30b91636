"""The console on a port of its own: what that serves, to whom, and what the port of HTTP then does not."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import Settings
from qinfer.core.settings_sections import ConsoleSettings
from qinfer.errors import SettingsError
from qinfer_api.rest.side_ports import SidePort, open_console_port
from tests.integration.console.test_console_pages import token_of
from tests.support.certificates import write_certificate
from tests.support.gateway import Running, running_gateway, settings_of

FOREIGN = {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
OPEN: Mapping[str, Any] = {"http": {"host": "0.0.0.0"}, "auth": {"mode": "none"}}


def settings(host: str = "", **sections: Mapping[str, Any]) -> Settings:
    """Returns settings of a gateway whose console has a port of its own."""
    return settings_of(**sections).model_copy(update={"console": ConsoleSettings(host=host, port=0)})


@contextlib.asynccontextmanager
async def apart(chosen: Settings) -> AsyncIterator[tuple[Running, SidePort]]:
    """Runs a gateway, and serves its console as the gateway does."""
    async with running_gateway(chosen) as running:
        await running.refresh()
        listener = open_console_port(chosen)
        assert listener is not None
        running.gateway.serve_console(listener, chosen)
        port = running.gateway.console
        assert port is not None
        serving = asyncio.create_task(port.serve())
        try:
            yield running, port
        finally:
            serving.cancel()
            await asyncio.wait([serving])


async def test_the_console_is_on_its_port_alone() -> None:
    async with apart(settings()) as (running, port), httpx.AsyncClient(follow_redirects=True) as client:
        entered = await client.get(port.url.removesuffix("console/"))
        page = await client.get(f"{port.url}models")
        elsewhere = [
            (await client.get(url)).status_code
            for url in (f"{running.url}/console", f"{running.url}/console/", port.url.replace("console/", "v2"))
        ]

    assert str(entered.url) == port.url
    assert (page.status_code, "echo" in page.text) == (200, True)
    assert "../docs" not in page.text
    assert elsewhere == [404, 404, 404]


async def test_forms_are_sent_to_its_port() -> None:
    async with (
        apart(settings()) as (_, port),
        httpx.AsyncClient(base_url=port.url, follow_redirects=True) as client,
    ):
        token = token_of((await client.get("try/echo")).text)

        reply = await client.post("try/echo", data={"csrf": token, "do": "run", "in:x": "1, 2.5, 3, 4"})

    assert "Version 2 answered" in reply.text


async def test_a_gateway_for_other_machines_has_a_console_for_its_own() -> None:
    """The console takes only names of this machine and its own pages, though the port of HTTP has neither rule."""
    async with apart(settings("127.0.0.1", **OPEN)) as (_, port), httpx.AsyncClient() as client:
        found = [
            (await client.get(f"{port.url}sign-in", headers=headers)).status_code
            for headers in ({}, {"host": "evil.example"}, FOREIGN)
        ]

    assert found == [303, 403, 403]


async def test_keys_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "ops", (Scope.ADMIN,), "root")[1]
    chosen = settings("0.0.0.0", auth={"mode": "keys", "keys_file": str(file)})
    async with apart(chosen) as (_, port):
        url = port.url.replace("0.0.0.0", "127.0.0.1")
        async with httpx.AsyncClient(base_url=url, follow_redirects=True) as client:
            before = await client.get("models")
            entered = await client.post("sign-in", data={"key": key})

    assert "echo" not in before.text
    assert "Overview" in entered.text


async def test_it_has_the_certificate_of_http(tmp_path: Path) -> None:
    write_certificate(tmp_path, "one")
    files = {"tls_certfile": str(tmp_path / "one.pem"), "tls_keyfile": str(tmp_path / "one.key")}
    trust = ssl.create_default_context(cafile=tmp_path / "one.pem")
    async with apart(settings(http=files)) as (running, port), httpx.AsyncClient(verify=trust) as client:
        reply = await client.get(port.url)

        assert reply.status_code == 303
        assert port.url.startswith("https://")
        assert port.show_certificate in running.gateway._reloading.certificates


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (settings("0.0.0.0", **OPEN), "bind its own port to loopback addresses"),
        (settings("127.0.0.1", http={"allow_hosts": ("*",)}), "without QINFER_HTTP__ALLOW_HOSTS=*"),
    ],
)
def test_without_keys_it_is_off_where_others_reach_it(
    chosen: Settings, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_console_port(chosen) is None
    assert said in caplog.records[-1].reason  # type: ignore[attr-defined]


def test_no_decision_about_keys_is_refused_where_others_reach_it() -> None:
    """The console's port has the rule of HTTP and gRPC."""
    with pytest.raises(SettingsError, match=r"QINFER_CONSOLE__HOST=0\.0\.0\.0 serves other machines"):
        open_console_port(settings("0.0.0.0"))


def test_a_console_that_is_off_opens_no_port() -> None:
    off = settings_of().model_copy(update={"console": ConsoleSettings(enabled=False, port=0)})

    assert open_console_port(off) is None
    assert open_console_port(settings_of()) is None


def test_an_address_needs_a_port() -> None:
    alone = settings_of().model_copy(update={"console": ConsoleSettings(host="127.0.0.1")})

    with pytest.raises(SettingsError, match="QINFER_CONSOLE__HOST needs QINFER_CONSOLE__PORT"):
        open_console_port(alone)
