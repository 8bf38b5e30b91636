"""API keys at the door, the same on the fast path and on the route."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from qinfer.cli.client import GatewayClient
from qinfer.cli.main import app
from qinfer.client.connection import API_KEY_VARIABLE
from qinfer.core.api_keys import Scope, add_key
from qinfer.errors import Unauthorized
from qinfer.testing import eventually
from tests.support.gateway import Running, running_gateway, settings_of

BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/echo/infer"
MISSING = "this server asks for an API key; send it as 'Authorization: Bearer <key>' or 'X-API-Key: <key>'"


class Door:
    """A gateway that asks for keys, a client of it, and a key of each kind."""

    def __init__(self, running: Running, client: httpx.AsyncClient, keys: dict[str, str]) -> None:
        self.running, self.client, self.keys = running, client, keys

    def bearer(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}

    async def infer(self, headers: dict[str, str], model: str = "echo", body: Any = BODY) -> httpx.Response:
        return await self.client.post(f"/v2/models/{model}/infer", json=body, headers=headers)


@pytest.fixture(params=["fast", "route"])
async def door(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Door]:
    file = tmp_path / "keys.json"
    keys = {name: add_key(file, name, (Scope.INFER,), name)[1] for name in ("acme", "slow", "busy")}
    keys["admin"] = add_key(file, "ops", (Scope.ADMIN,), "admin")[1]
    entries = json.loads(file.read_text())
    for entry in entries["keys"]:
        if entry["id"] == "slow":
            entry.update(rate_per_s=0.01, burst=2)
        if entry["id"] == "busy":
            entry.update(max_in_flight=1)
    file.write_text(json.dumps(entries))
    settings = settings_of({"fast_path": request.param == "fast"}, auth={"mode": "keys", "keys_file": str(file)})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        yield Door(running, client, keys)


async def test_a_known_key_is_served(door: Door) -> None:
    """In either header, again and again on one connection; the tenant travels with the request."""
    replies = [await door.infer(door.bearer("acme")) for _ in range(3)]
    replies.append(await door.infer({"x-api-key": door.keys["admin"]}))

    assert [reply.status_code for reply in replies] == [200] * 4
    assert [request.tenant for request in door.running.requests] == ["acme", "acme", "acme", "ops"]


async def test_without_a_known_key_nothing_is_told(door: Door) -> None:
    """Neither whether the model exists nor what is wrong with the body."""
    missing = [await door.infer({}), await door.infer({}, model="thought up"), await door.infer({}, body=[])]
    unknown = await door.infer({"authorization": "Bearer wrong"})

    for reply in missing:
        assert (reply.status_code, reply.json()) == (401, {"error": MISSING})
    assert (unknown.status_code, unknown.json()) == (401, {"error": "the API key is not known; ask for another"})
    assert {reply.headers["www-authenticate"] for reply in (*missing, unknown)} == {"Bearer"}
    assert door.running.requests == []


async def test_a_key_that_was_seen_serves_no_other_head(door: Door) -> None:
    """Heads are remembered whole, key and all."""
    for name in ("acme", "wrong", "acme", "acme", "wrong"):
        headers = {"authorization": f"Bearer {door.keys.get(name, 'x' * 43)}"}
        assert (await door.infer(headers)).status_code == (200 if name == "acme" else 401)


@pytest.mark.parametrize("path", ["/v2", "/v2/models/echo", "/v2/models/echo/versions/1", "/v2/models/echo/config"])
async def test_what_is_known_of_models_needs_a_key(door: Door, path: str) -> None:
    """As inference does."""
    refused = await door.client.get(path)
    shown = await door.client.get(path, headers=door.bearer("acme"))

    assert (refused.status_code, refused.json(), refused.headers["www-authenticate"]) == (
        401,
        {"error": MISSING},
        "Bearer",
    )
    assert shown.status_code == 200


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/models/echo/ready", "/metrics", "/openapi.json"])
async def test_probes_need_no_key(door: Door, path: str) -> None:
    """Whoever looks after the process has none."""
    assert (await door.client.get(path)).status_code == 200


async def test_the_document_which_needs_no_key_names_no_model(door: Door) -> None:
    paths = (await door.client.get("/openapi.json")).json()["paths"]

    assert [path for path in paths if path.startswith("/models/")] == ["/models/{model}"]


async def test_a_rate_that_is_used_up(door: Door) -> None:
    """503 on /v2, as Triton's clients expect, and when to come back."""
    replies = [await door.infer(door.bearer("slow")) for _ in range(3)]

    assert [reply.status_code for reply in replies] == [200, 200, 503]
    assert replies[2].json() == {
        "error": "tenant 'slow' has used up its rate of 0.01 requests a second; send fewer",
    }
    assert 90 <= int(replies[2].headers["retry-after"]) <= 100
    assert (await door.infer(door.bearer("acme"))).status_code == 200


async def test_as_many_in_flight_as_a_tenant_may(door: Door) -> None:
    """A client that goes away makes room."""
    waiting = asyncio.create_task(door.infer(door.bearer("busy"), model="stuck"))
    await eventually(lambda: door.running.gateway.dispatcher.in_flight == 1, description="the first request")
    refused = await door.infer(door.bearer("busy"))
    waiting.cancel()
    await asyncio.wait([waiting])
    await eventually(lambda: door.running.gateway.dispatcher.in_flight == 0, description="the end of the first")
    served = await door.infer(door.bearer("busy"))

    assert refused.status_code == 503
    assert refused.json()["error"] == (
        "tenant 'busy' has 1 requests in flight, the most that it may have; wait for an answer"
    )
    assert refused.headers["retry-after"] == "1"
    assert served.status_code == 200


async def test_without_keys_any_header_will_do() -> None:
    """What a proxy adds means nothing where everyone may call."""
    async with running_gateway() as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.post(INFER, json=BODY, headers={"authorization": "Basic abc", "x-api-key": "k"})

        assert reply.status_code == 200
        assert running.requests[0].tenant == ""


async def test_the_command_line_presents_its_key(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its environment."""

    def ask() -> tuple[str, ...]:
        with GatewayClient(door.running.url) as client:
            return client.metadata("echo").versions

    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with pytest.raises(Unauthorized):
        await asyncio.to_thread(ask)

    monkeypatch.setenv(API_KEY_VARIABLE, door.keys["acme"])
    assert await asyncio.to_thread(ask) == ("1", "2")


def test_a_server_for_other_machines_asks_who_may_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`qinfer up` says so before it starts anything."""
    monkeypatch.delenv("QINFER_AUTH__MODE", raising=False)
    data = tmp_path / "data"

    result = CliRunner().invoke(app, ["up", "--host", "0.0.0.0", "-m", str(tmp_path), "--data-dir", str(data)])

    assert result.exit_code == 64
    assert "QINFER_HTTP__HOST=0.0.0.0 serves other machines, and authentication is not set" in result.stderr
    assert not data.exists()


def test_a_gateway_for_other_machines_asks_who_may_call() -> None:
    """It does not start until somebody has said so; and never because Redis is away."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("QINFER_")}
    done = subprocess.run(
        [sys.executable, "-m", "qinfer_api"],
        env={**env, "QINFER_HTTP__HOST": "0.0.0.0", "QINFER_HTTP__PORT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert "set QINFER_AUTH__MODE=keys (with QINFER_AUTH__KEYS_FILE), or QINFER_AUTH__MODE=none" in done.stderr
