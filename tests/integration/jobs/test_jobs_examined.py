"""Jobs are looked at beside the gateway: what becomes of requests when a file harms whoever parses it."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.jobs import examiner_pool
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer_api.jobs import service as use_case
from tests.integration.jobs.test_jobs import JOBS, job_settings
from tests.support.gateway import Running, running_gateway
from tests.support.jobs.examiner_stub import STUB, looking
from tests.support.servers.servers import RedisServer

INFER = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    yield f"file://{tmp_path}"
    assert looking() == set()


async def serving(
    server: RedisServer, folder: str, monkeypatch: pytest.MonkeyPatch, command: Sequence[str] = STUB
) -> AbstractAsyncContextManager[Running]:
    monkeypatch.setattr(examiner_pool, "COMMAND", command)
    settings = job_settings(server, folder)
    return running_gateway(settings, await Queue.connect(settings.redis))


def body(folder: str, name: str) -> dict[str, Any]:
    return {"model": "echo", "inputs": [f"{folder}/{name}"], "output": {"url": f"{folder}/out"}}


async def test_a_process_is_started_with_the_gateway(
    redis_server: RedisServer, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the first job does not wait for it; it ends with the gateway."""
    async with await serving(redis_server, folder, monkeypatch, examiner_pool.COMMAND):
        await eventually(lambda: len(looking()) == 1, description="a process is started")


async def test_a_file_that_crashes_its_reader(
    redis_server: RedisServer, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 with its URL, also again and again; others are answered meanwhile, and right jobs are taken."""
    async with (
        await serving(redis_server, folder, monkeypatch) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30.0) as client,
        asyncio.TaskGroup() as tasks,
    ):
        crashing = [tasks.create_task(client.post(JOBS, json=body(folder, "crash"))) for _ in range(3)]
        online = [await client.post("/v2/models/echo/infer", json=INFER) for _ in range(20)]
        replies = [await task for task in crashing]
        taken = await client.post(JOBS, json=body(folder, "fine"))
        online.append(await client.post("/v2/models/echo/infer", json=INFER))

    text = f"the inputs can't be read, '{folder}/crash': the process that read them died (SIGSEGV); is a file damaged?"
    assert [(reply.status_code, reply.json()["error"]) for reply in replies] == [(400, text)] * 3
    assert {reply.status_code for reply in online} == {200}
    assert taken.status_code == 201, taken.text


async def test_a_store_that_hangs(
    redis_server: RedisServer, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 in time, with the URLs; what hung is ended, and the next job finds a process."""
    async with (
        await serving(redis_server, folder, monkeypatch) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30.0) as client,
    ):
        await client.post(JOBS, json=body(folder, "fine"))
        held = looking()
        monkeypatch.setattr(use_case, "EXAMINE_S", 0.05)
        reply = await client.post(JOBS, json=body(folder, "hang"))
        monkeypatch.undo()
        await eventually(lambda: not looking() & held, description="it is ended")
        taken = await client.post(JOBS, json=body(folder, "fine"))

    assert reply.status_code == 503
    assert reply.json()["error"] == (
        f"the stores of '{folder}/hang' and '{folder}/out' did not answer within 0.05 s; try again"
    )
    assert reply.headers["retry-after"] == "1"
    assert taken.status_code == 201, taken.text


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ((*STUB, "pyarrow"), 501, "bulk jobs need pyarrow: pip install 'qinfer-ml[bulk]'"),
        (
            ("/nowhere",),
            503,
            "the process that checks jobs can't be started now (No such file or directory); try again",
        ),
    ],
    ids=["library missing", "can't be started"],
)
async def test_jobs_that_nobody_can_look_at(
    redis_server: RedisServer,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    command: Sequence[str],
    status: int,
    text: str,
) -> None:
    """The remedy is told."""
    async with (
        await serving(redis_server, folder, monkeypatch, command) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30.0) as client,
    ):
        reply = await client.post(JOBS, json=body(folder, "fine"))

    assert (reply.status_code, reply.json()["error"]) == (status, text)
    assert reply.headers.get("retry-after") == ("1" if status == 503 else None)


async def test_a_defect_there_is_one_of_the_gateway(
    redis_server: RedisServer, folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """500 without details; the log has them."""
    async with (
        await serving(redis_server, folder, monkeypatch) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30.0) as client,
    ):
        reply = await client.post(JOBS, json=body(folder, "divide"))

    assert (reply.status_code, "ZeroDivision" in reply.text) == (500, False)
    assert "ZeroDivisionError" in caplog.text
