"""`qinfer requests` and `qinfer models pause`, against a gateway."""

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from qinfer.cli.main import app
from qinfer.client import AsyncClient
from tests.support.gateway import Running, running_gateway

X = {"x": [[1.0, 2.0, 3.0, 4.0]]}


async def run(running: Running, *words: str) -> tuple[int, str, str]:
    """Runs a command; returns exit code, stdout and stderr."""
    command = [*words, "--url", running.url]
    shown = await asyncio.to_thread(CliRunner().invoke, app, command, env={"COLUMNS": "200"})
    return shown.exit_code, shown.stdout, " ".join(shown.stderr.split())


async def as_json(running: Running, *words: str) -> Any:
    code, text, problem = await run(running, *words, "--json")
    assert code == 0, problem
    return json.loads(text)


async def test_requests_from_list_to_purge() -> None:
    async with running_gateway() as running, AsyncClient(running.url) as client:
        done = await client.submit("echo", X)
        await client.result(done, wait_s=20)
        await client.submit("stuck", X)
        await client.submit("stuck", X, request_id="mine")

        listed = await as_json(running, "requests", "list")
        assert [(one["model"], one["state"]) for one in listed] == [
            ("echo", "succeeded"),
            ("stuck", "queued"),
            ("stuck", "queued"),
        ]
        chosen = await as_json(running, "requests", "list", "--state", "queued", "--id", "mine")
        assert [one["id"] for one in chosen] == ["mine"]
        _, table, _ = await run(running, "requests", "list", "--model", "stuck", "--older-than", "0")
        assert table.count("stuck:1") == 2
        assert (await run(running, "requests", "list", "--state", "lost"))[0] == 64

        shown = await as_json(running, "requests", "show", done.id)
        assert [event["event"] for event in shown["events"]] == ["queued", "succeeded"]
        _, details, _ = await run(running, "requests", "show", "mine", "--model", "stuck")
        assert "Timeline" in details

        dry = await as_json(running, "requests", "cancel", "--model", "stuck", "--dry-run")
        assert (dry["found"], dry["changed"], len(dry["sample"])) == (2, 0, 2)
        code, table, progress = await run(running, "requests", "cancel", "--model", "stuck", "--id", "mine")
        assert (code, "cancel done: 1 found, 1 changed" in progress, "cancel" in table) == (0, True, True)
        assert (await run(running, "requests", "purge", "--model", "echo"))[0] == 64
        assert (await as_json(running, "requests", "purge", "--model", "echo", "--yes"))["changed"] == 1
        for action in ("replay", "discard"):
            assert (await as_json(running, "requests", action, "--model", "echo", "--yes"))["changed"] == 0

        operations = await as_json(running, "requests", "operations")
        assert [one["action"] for one in operations] == ["discard", "replay", "purge", "cancel", "cancel"]
        started = await as_json(running, "requests", "cancel", "--model", "stuck", "--no-wait")
        stopped = await as_json(running, "requests", "stop", started["id"])
        assert stopped["state"] in ("stopped", "done")


async def test_a_model_is_paused_and_resumed() -> None:
    async with running_gateway() as running:
        [pause] = await as_json(running, "models", "pause", "echo", "--version", "2", "--reason", "its store is down")
        assert (pause["model"], pause["version"], pause["reason"]) == ("echo", 2, "its store is down")

        refused = await run(running, "infer", "echo", "--input", "x=zeros")
        _, table, _ = await run(running, "models", "pauses")
        resumed = await as_json(running, "models", "resume", "echo", "--version", "2")

        assert (refused[0], "is paused: its store is down" in refused[2]) == (69, True)
        assert "its store is down" in table
        assert resumed == []
        assert (await run(running, "infer", "echo", "--input", "x=zeros"))[0] == 0
        assert (await run(running, "models", "pause", "unknown"))[0] == 64


@pytest.mark.parametrize("limit", [1, 500])
async def test_the_client_pages_through_requests(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinfer.client.steps.PAGE", limit)
    async with running_gateway() as running, AsyncClient(running.url) as client:
        handles = [await client.submit("stuck", X) for _ in range(3)]

        found = await client.requests(limit=10)
        first = await client.requests(limit=2)

    assert {one.id for one in found} == {one.id for one in handles}
    assert len(first) == 2
