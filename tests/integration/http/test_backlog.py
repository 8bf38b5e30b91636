"""`GET /v1/models/{model}/backlog`: what it says, to whom, and when it can't."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.api_keys import Scope, add_key
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord
from qinfer.models.state import DesiredState, Speed, StoredModel
from qinfer.queue.sequences.records import SequenceId
from qinfer.testing import eventually
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.sequences import STATEFUL, first, stored

QUESTION = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
NO_SEQUENCES = {"open": 0, "waiting": 0, "workers": 0}
IDLE = {"requests": 0, "rows": 0, "work_s": 0.0, "oldest_age_s": 0.0, "sequences": NO_SEQUENCES}


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as gateway:
        yield gateway


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as client:
        yield client


async def shown(client: httpx.AsyncClient, model: str) -> dict[str, Any]:
    reply = await client.get(f"/v1/models/{model}/backlog")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def shows(client: httpx.AsyncClient, model: str, requests: int) -> bool:
    return bool((await shown(client, model))["requests"] == requests)


async def test_an_idle_model_has_no_work(client: httpx.AsyncClient) -> None:
    """All its versions are shown, each with its lanes; one worker has them."""
    found = await shown(client, "echo")

    versions = found.pop("versions")
    assert found == {"model": "echo", "workers": 1, **IDLE}
    assert [(one["version"], one["workers"], one["work_s"]) for one in versions] == [(1, 1, 0.0), (2, 1, 0.0)]
    assert versions[0]["lanes"] == [{"lane": "p1", "partition": 0, "entries": 0, "oldest_age_s": 0.0}]
    assert [lane["lane"] for lane in (await shown(client, "levels"))["versions"][0]["lanes"]] == [
        "p1",
        "p2",
        "p3",
        "p3.delayed",
    ]


async def test_requests_of_either_kind_count_without_a_worker(running: Running, client: httpx.AsyncClient) -> None:
    """By the speed that was measured last; one that is given up counts no more."""
    await running.store.put_speed("asleep", 1, Speed(4.0))
    asking = asyncio.create_task(client.post("/v2/models/asleep/infer", json=QUESTION))
    await eventually(lambda: shows(client, "asleep", 1))
    assert (await client.post("/v1/models/asleep/requests", json=QUESTION)).status_code == 202

    found = await shown(client, "asleep")

    assert (found["requests"], found["rows"], found["work_s"], found["workers"]) == (2, 2, 0.5, 0)
    (version,) = found["versions"]
    assert (version["requests"], version["rows_per_s"], version["lanes"][0]["entries"]) == (2, 4.0, 2)
    asking.cancel()
    await asyncio.wait([asking])
    await eventually(lambda: shows(client, "asleep", 1))


async def test_little_work_is_not_shown_as_none(running: Running, client: httpx.AsyncClient) -> None:
    """Who scales from zero looks whether it is above 0."""
    await running.store.put_speed("asleep", 1, Speed(1e6))
    await client.post("/v1/models/asleep/requests", json=QUESTION)

    assert (await shown(client, "asleep"))["work_s"] == 0.001


async def test_all_versions_and_bulk_jobs_add_up(running: Running, client: httpx.AsyncClient) -> None:
    """A job's rows are those of its version."""
    await running.store.put_speed("echo", 2, Speed(10.0))
    await running.store.put_speed("echo", 1, Speed(10.0))
    job = JobRecord(id="j", model="echo", version=2, state="planning")
    assert await Jobs(running.delivery).create(job)
    assert await Jobs(running.delivery).add_shards("j", [(0, b"frame")], 500, complete=True)

    found = await shown(client, "echo")

    assert (found["requests"], found["rows"], found["work_s"]) == (0, 500, 50.0)
    assert [one["bulk_rows"] for one in found["versions"]] == [0, 500]
    assert "bulk2" in {lane["lane"] for lane in found["versions"][1]["lanes"]}


async def test_a_model_that_cannot_be_loaded_has_no_work(running: Running, client: httpx.AsyncClient) -> None:
    """It is known, so that it is no error: an autoscaler would keep what it has."""
    await running.store.put_model(StoredModel("bad", 1, "", (), error="no version"))
    await running.store.set_desired(DesiredState("bad", 1))
    await running.refresh()

    assert await shown(client, "bad") == {"model": "bad", "workers": 0, "versions": [], **IDLE}


async def test_sequences_are_shown_and_measured(running: Running, client: httpx.AsyncClient) -> None:
    """Each has a slot while it is open; series exist of stateful models only."""
    await running.store.put_model(stored(STATEFUL, 1))
    await running.store.set_desired(DesiredState("sum", 1))
    await running.refresh()
    sequences = running.delivery.sequences("sum", 0)
    for number in range(5):
        await sequences.submit(SequenceId("acme", number), first(1))

    found = await shown(client, "sum")
    page = (await client.get("/metrics", params={"scope": "cluster"})).text

    assert found["sequences"] == {"open": 5, "waiting": 5, "workers": 2}
    assert (await shown(client, "echo"))["sequences"] == NO_SEQUENCES
    assert [line for line in page.splitlines() if line.startswith("qinfer_sequences") and '"sum"' in line] == [
        'qinfer_sequences_open{model="sum"} 5.0',
        'qinfer_sequences_waiting{model="sum"} 5.0',
        'qinfer_sequences_handed_over_total{model="sum"} 0.0',
        'qinfer_sequences_lost_total{model="sum"} 0.0',
    ]


async def test_an_unknown_model_is_an_error(client: httpx.AsyncClient) -> None:
    """In the protocol's words, whatever the name is."""
    for model in ("nothing", "x" * 500):
        reply = await client.get(f"/v1/models/{model}/backlog")
        assert (reply.status_code, reply.json()["error"]) == (404, f"Request for unknown model: '{model}' is not found")
    for model in ("n%2Fo", "%00", "%FF", "%7B%7D"):
        reply = await client.get(f"/v1/models/{model}/backlog")
        assert reply.status_code == 404
        assert reply.json()["error"]


async def test_a_queue_that_is_away_is_503(
    running: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a backlog of nothing, at which an autoscaler would stop all workers."""

    async def away(*_: object) -> None:
        raise BrokerUnavailable("the queue can't be reached; try again")

    monkeypatch.setattr(running.delivery, "sizes", away)

    reply = await client.get("/v1/models/echo/backlog")

    assert (reply.status_code, reply.json()) == (503, {"error": "the queue can't be reached; try again"})


async def test_a_key_is_needed_and_the_header_of_statistics(tmp_path: Path) -> None:
    """As for other reads: the scope `infer`; who restricts statistics restricts this, too."""
    file = tmp_path / "keys.json"
    key = add_key(file, "k", (Scope.INFER,), "k")[1]
    settings = settings_of({"restricted": ("statistics:X-Ops=yes",)}, auth={"mode": "keys", "keys_file": str(file)})
    known, ops = {"x-api-key": key}, {"x-ops": "yes"}
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        replies = [
            (await client.get("/v1/models/echo/backlog", headers=headers)).status_code
            for headers in (ops, known, known | ops)
        ]

    assert replies == [401, 403, 200]
