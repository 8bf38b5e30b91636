"""`qinfer endpoints`, and who may change what, as the audit log has it."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from qinfer.cli.main import app
from qinfer.core.api_keys import Scope, add_key
from tests.support.endpoints import BODY, canary, split
from tests.support.gateway import Running, running_gateway, settings_of


async def run(running: Running, *words: str, key: str = "") -> tuple[int, str, str]:
    """Runs a command against the gateway; returns exit code, stdout and stderr."""
    command = ["endpoints", *words, "--url", running.url]
    shown = await asyncio.to_thread(CliRunner().invoke, app, command, env={"QINFER_API_KEY": key, "COLUMNS": "200"})
    return shown.exit_code, shown.stdout, " ".join(shown.stderr.split())


def written(directory: Path, declaration: dict[str, Any], name: str = "reader") -> str:
    path = directory / f"{name}.json"
    path.write_bytes(msgspec.json.encode(declaration))
    return str(path)


async def test_an_endpoint_from_its_file_to_its_end(tmp_path: Path) -> None:
    async with running_gateway() as running:
        put = await run(running, "put", written(tmp_path, split(canary(0.25), sticky="tenant")), "--json")
        assert put[0] == 0, put
        revision = json.loads(put[1])["endpoint"]["revision"]

        async with httpx.AsyncClient(base_url=running.url) as client:
            for _ in range(3):
                await client.post("/v2/models/reader/versions/2/infer", json=BODY)
            await client.post("/v2/models/reader/versions/1/infer", json=BODY)
        _, shown, _ = await run(running, "show", "reader")
        assert f"reader, revision {revision}, sticky by tenant" in shown
        assert [line.split()[-5:] for line in shown.splitlines() if "echo:" in line] == [
            ["75", "%", "1", "25", "%"],
            ["25", "%", "3", "75", "%"],
        ]

        _, listed, _ = await run(running, "list")
        assert "echo:1 stable 75 %, echo:2 canary 25 %" in listed

        late = await run(running, "put", written(tmp_path, split()), "--revision", str(revision + 1))
        assert (late[0], f"now has revision {revision}" in late[2]) == (64, True)
        assert (await run(running, "put", written(tmp_path, split()), "--revision", str(revision)))[0] == 0
        assert (await run(running, "delete", "reader"))[:2] == (0, "reader is removed\n")
        gone = await run(running, "show", "reader")
        assert (gone[0], "there is no endpoint 'reader'" in gone[2]) == (64, True)


async def test_a_file_that_is_none_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async with running_gateway() as running:
        code, _, said = await run(running, "put", written(tmp_path, {"targets": []}))

    assert (code, "one target must have the role stable, not 0" in said) == (64, True)


async def test_changes_need_an_administrator_and_are_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys.json"
    _, user = add_key(keys, "acme", (Scope.INFER,))
    admin, secret = add_key(keys, "ops", (Scope.ADMIN,))
    caplog.set_level(logging.INFO, "qinfer.audit")
    async with running_gateway(settings_of(auth={"mode": "keys", "keys_file": str(keys)})) as running:
        file = written(tmp_path, split(canary(0.5)))

        refused = await run(running, "put", file, key=user)
        assert (refused[0], "does not have the scope 'admin'" in refused[2]) == (64, True)
        assert (await run(running, "put", file, key=secret))[0] == 0
        assert (await run(running, "show", "reader", key=user))[0] == 0
        assert (await run(running, "delete", "reader", key=user))[0] == 64

    acts = [record.__dict__ for record in caplog.records if record.getMessage() == "administrative act"]
    assert [(act["act"], act["path"], act["key"], act["outcome"]) for act in acts] == [
        ("PUT", "/v1/endpoints/reader", admin.id, "done")
    ]


async def test_a_tenant_may_have_a_target_of_its_own(tmp_path: Path) -> None:
    """The tenant is that of the key, whatever the request says."""
    keys = tmp_path / "keys.json"
    _, testers = add_key(keys, "testers", (Scope.INFER,))
    _, others = add_key(keys, "others", (Scope.INFER,))
    _, secret = add_key(keys, "ops", (Scope.ADMIN,))
    async with running_gateway(settings_of(auth={"mode": "keys", "keys_file": str(keys)})) as running:
        await run(running, "put", written(tmp_path, split(canary(0, when=[{"tenant": "testers"}]))), key=secret)
        targets = []
        async with httpx.AsyncClient(base_url=running.url) as client:
            for key in (testers, others):
                reply = await client.post("/v2/models/reader/infer", json=BODY, headers={"x-api-key": key})
                targets.append(reply.headers["qinfer-target"])

    assert targets == ["echo:2", "echo:1"]
