"""`/v1/workers`: which are alive, the end of a log, and the drain of one; and the commands that ask for them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from qinfer.models.state import State, VersionState, WorkerRecord
from qinfer.observe.logs import AUDIT, RecentLine, WorkerLog
from tests.integration.cli.test_operator import run as run_command
from tests.support.gateway import Running, TenantScene, running_gateway

LINE = RecentLine(
    at="2026-01-31T09:00:00.123Z", level="ERROR", logger="qinfer", event="load failed", about={"model": "digits"},
    exception="Traceback: no such file",
)  # fmt: skip
DRAIN, LOG = "/v1/workers/w1/drain", "/v1/workers/w1/log"


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as one:
        await one.store.put_worker_log("w1", WorkerLog([LINE]), 60.0)
        await one.store.put_worker_log("ended", WorkerLog([LINE]), 60.0)
        yield one


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as client:
        yield client


async def test_the_live_workers_are_listed(client: httpx.AsyncClient, running: Running) -> None:
    states = {"broken": {1: VersionState(State.UNAVAILABLE, 1)}}
    record = WorkerRecord(id="w2", started_at=3.0, models=states, host="gpu1", executing=3, memory_bytes=9)
    await running.store.heartbeat(record, 3600)
    await running.refresh()

    listed = {one["id"]: one for one in (await client.get("/v1/workers")).json()}

    assert listed["w1"]["state"] == "ready"
    assert listed["w2"] == {
        "id": "w2", "host": "gpu1", "device": "cpu", "state": "trouble", "started_at": "1970-01-01T00:00:03.000Z",
        "executing": 3, "memory_bytes": 9,
    }  # fmt: skip


async def test_a_live_worker_is_asked_to_drain(client: httpx.AsyncClient, running: Running) -> None:
    reply = await client.post(DRAIN)

    assert (reply.status_code, reply.content) == (202, b"")
    (record,) = await running.store.workers()
    assert await running.store.heartbeat(record, 3600) == ""


async def test_the_end_of_a_log_is_read_also_of_a_worker_that_has_ended(client: httpx.AsyncClient) -> None:
    replies = [await client.get(f"/v1/workers/{worker}/log") for worker in ("w1", "ended")]

    assert [reply.json() for reply in replies] == [[{
        "at": LINE.at, "level": "ERROR", "logger": "qinfer", "event": "load failed", "about": {"model": "digits"},
        "exception": "Traceback: no such file",
    }]] * 2  # fmt: skip


async def test_an_unknown_worker_is_told(client: httpx.AsyncClient) -> None:
    replies = [await client.post("/v1/workers/gone/drain"), await client.get("/v1/workers/gone/log")]

    assert [reply.status_code for reply in replies] == [404, 404]
    assert all("no worker 'gone' is alive" in reply.json()["error"] for reply in replies)


async def test_only_administrators_drain_and_read_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=AUDIT)
    async with TenantScene.opened(tmp_path / "keys.json") as scene:
        refused = {
            (await scene.clients[name].request(method, path)).status_code
            for name in ("acme", "viewer")
            for method, path in (("POST", DRAIN), ("GET", LOG))
        }
        listed = (await scene.clients["viewer"].get("/v1/workers")).status_code
        done = (await scene.clients["admin"].post(DRAIN)).status_code
        (record,) = await scene.running.store.workers()
        asked_by = await scene.running.store.heartbeat(record, 3600)

    assert (refused, listed, done, asked_by) == ({403}, 200, 202, "admin")
    acts = [(record.key, record.path) for record in caplog.records if record.message == "administrative act"]  # type: ignore[attr-defined]
    assert ("admin", DRAIN) in acts


async def test_the_command_line_does_the_same(running: Running) -> None:
    def ask(*words: str) -> object:
        return asyncio.to_thread(run_command, "workers", *words, "--url", running.url)

    shown, gone, drained = [await ask(*words) for words in (("log", "w1"), ("log", "gone"), ("drain", "w1"))]  # type: ignore[misc]

    assert "ERROR   load failed model=digits\nTraceback: no such file" in shown.stdout
    assert (gone.code, "no worker 'gone' is alive" in gone.stderr) == (64, True)
    assert "w1 drains, and ends" in drained.stdout
    (record,) = await running.store.workers()
    assert await running.store.heartbeat(record, 3600) == ""
