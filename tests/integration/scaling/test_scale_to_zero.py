"""A model may have no worker: it is known, accepts, its work shows, and nothing is lost on the way there and back.

Redis, gateway and worker processes are real.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer_api.app import bind
from tests.support.faulty_backend import SLOW, executed, write_model
from tests.support.gateway import lean_gateway, settings_of
from tests.support.worker_processes import Process, WorkerProcesses, worker_processes

BATCHING = """
priority_levels: 2 default_priority_level: 1
default_queue_policy { default_timeout_microseconds: 60000000 timeout_action: DELAY }
"""
MAY_HAVE_NONE = 'parameters { key: "qinfer.min_workers" value { string_value: "0" } }'


def write(directory: Path, *, more: str = "", **options: float) -> Path:
    """Writes the model `faulty`, which is READY without a worker; returns where it notes what it executes."""
    trace = write_model(directory / "repository", "faulty", more=more, **options)
    config = directory / "repository" / "faulty" / "config.pbtxt"
    config.write_text(config.read_text() + MAY_HAVE_NONE)
    return trace


@asynccontextmanager
async def gateway(one: WorkerProcesses) -> AsyncIterator[httpx.AsyncClient]:
    """Runs a gateway on the worker_processes's Redis, and yields a client of it."""
    settings = settings_of()
    delivery = await Queue.connect(one._settings)
    store = ControlStore(admin_client(one._settings))
    made = lean_gateway(settings, delivery, store, bind(settings.http))
    serving = asyncio.create_task(made.serve())
    await made.started.wait()
    async with httpx.AsyncClient(base_url=made.url, timeout=60.0) as client:
        try:
            yield client
        finally:
            made.stop()
            await serving


def body(value: float) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]}]}


async def ask(client: httpx.AsyncClient, value: float) -> float:
    """Asks and waits for the answer."""
    reply = await client.post("/v2/models/faulty/infer", json=body(value))
    assert reply.status_code == 200, reply.text
    return float(reply.json()["outputs"][0]["data"][0])


async def accept(client: httpx.AsyncClient, value: float) -> str:
    """Hands in an asynchronous request; returns its id."""
    reply = await client.post("/v1/models/faulty/requests", json=body(value))
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])


async def backlog(client: httpx.AsyncClient) -> dict[str, Any]:
    reply = await client.get("/v1/models/faulty/backlog")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def drain(process: Process) -> None:
    """Stops a worker as an autoscaler does."""
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 30) == 0


async def test_lanes_and_groups_exist_before_any_worker(tmp_path: Path) -> None:
    """A sync makes all of them, those of bulk jobs too: what reads their lengths finds 0 and no error."""
    write(tmp_path, more=BATCHING)
    async with worker_processes(tmp_path) as one:
        client = admin_client(one._settings)
        names = ["p1", "p1.delayed", "p2", "p2.delayed", "bulk1", "bulk2", "bulk3"]
        for name in names:
            (group,) = await client.xinfo_groups(keys.lane(Lane("faulty", 1, name)))
            assert group["name"] == keys.GROUP, name
            assert group["last-delivered-id"] == b"0-0"  # so that what comes before the first worker is read
        assert await one.delivery.depth([Lane("faulty", 1, name) for name in names]) == [0] * len(names)
        await client.aclose()


async def test_a_model_without_a_worker_is_ready_and_accepts(tmp_path: Path) -> None:
    """The server is ready with it, requests of either kind wait, and they are work; without Redis nothing is said."""
    write(tmp_path)
    async with worker_processes(tmp_path) as one, gateway(one) as client:
        for path in ("/v2/health/ready", "/v2/models/faulty/ready"):
            assert (await client.get(path)).status_code == 200, path
        before = await backlog(client)
        asking = asyncio.create_task(ask(client, 1.0))
        await accept(client, 2.0)

        async def are_two() -> bool:
            return bool((await backlog(client))["requests"] == 2)

        await eventually(are_two)
        found = await backlog(client)
        assert (before["requests"], before["work_s"], before["workers"]) == (0, 0.0, 0)
        assert (found["rows"], found["workers"]) == (2, 0)
        assert found["work_s"] > 0
        assert (await client.get("/v2/health/ready")).status_code == 200
        asking.cancel()
        await asyncio.wait([asking])


@pytest.mark.slow
async def test_to_zero_and_back_loses_nothing(tmp_path: Path) -> None:
    """What waits without a worker wakes one; one that leaves under load answers or gives back what it has."""
    trace = write(tmp_path, max_batch_size=1, hold_s=0.4)
    async with worker_processes(tmp_path) as one, gateway(one) as client:
        waiting = [asyncio.create_task(ask(client, 1.0)), asyncio.create_task(ask(client, 2.0))]
        ids = [await accept(client, 3.0)]
        first = await one.worker()
        assert await asyncio.gather(*waiting) == [1.0, 2.0]

        await show_work_while_a_batch_is_in_flight(one, client, trace)

        ids += [await accept(client, SLOW) for _ in range(6)]
        await one.began(trace, 3 + 1 + 1)
        await drain(first)
        left = await backlog(client)
        assert left["workers"] == 0
        assert left["requests"] >= 1  # so there is something to wake the next one for
        assert left["work_s"] > 0
        assert left["versions"][0]["rows_per_s"] > 0  # as the one that left had measured
        assert (await client.get("/v2/models/faulty/ready")).status_code == 200

        second = await one.worker()
        for request_id in ids:
            await until_succeeded(client, request_id)
        await drain(second)
        assert (await backlog(client))["rows"] == 0
        done = [batch for batch in executed(trace) if batch != [0.0]]  # without warm-ups
        assert sorted(done) == sorted([[1.0], [2.0], [3.0], *[[SLOW]] * 7])  # each once: a drain repeats nothing


async def show_work_while_a_batch_is_in_flight(one: WorkerProcesses, client: httpx.AsyncClient, trace: Path) -> None:
    """Asks one slow request with nothing else in the queue: until its answer is there it is work."""
    await one.empty()
    began = sum(batch == [SLOW] for batch in executed(trace))
    asking = asyncio.create_task(ask(client, SLOW))
    await eventually(lambda: sum(batch == [SLOW] for batch in executed(trace)) > began, 30.0, "an execution")
    looks = 0
    while not asking.done():
        found = await backlog(client)
        if not asking.done():  # an entry leaves its lane after its answer
            assert (found["requests"], found["workers"]) == (1, 1)
            assert found["work_s"] > 0
            looks += 1
    assert looks
    assert await asking == SLOW


async def until_succeeded(client: httpx.AsyncClient, request_id: str) -> None:
    """Waits until an asynchronous request has its result."""

    async def has() -> bool:
        state = (await client.get(f"/v1/requests/{request_id}", params={"wait": 10})).json()["state"]
        assert state in {"queued", "running", "succeeded"}, state
        return bool(state == "succeeded")

    await eventually(has, 40.0, "the end of a request")
