"""How many of a project's tasks may wait, and how fast they become requests: what is taken in is not lost."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.api_keys import ApiKey, hash_key
from qinfer.errors import BrokerUnavailable
from qinfer.labeling.tasks import Board
from qinfer.queue.tenants import QuotaLease, Quotas
from qinfer.testing import FakeClock, eventually
from qinfer_api.auth import Auth
from qinfer_api.labeling.intake import TaskIntake, TaskPace
from tests.integration.labeling.test_label_studio_push import MAPPING, TASKS, event, settings_for
from tests.support.gateway import Running, running_gateway
from tests.support.servers.label_studio_server import LabelStudioServer, label_studio

WEBHOOK = "/label-studio/text/webhook"
KEY = {"x-api-key": "a-key"}
ECHO = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.fixture
async def studio() -> AsyncIterator[LabelStudioServer]:
    async with label_studio() as studio:
        yield studio


async def counts(client: httpx.AsyncClient, path: str = TASKS) -> dict[str, int]:
    found: dict[str, int] = (await client.get(path)).json()["counts"]
    return found


async def are_done(client: httpx.AsyncClient, count: int) -> None:
    async def is_so() -> bool:
        return (await counts(client))["done"] == count

    await eventually(is_so, 40.0)  # hundreds of them, on a machine with other work


def with_rate(monkeypatch: pytest.MonkeyPatch, clock: FakeClock, rate_per_s: float, burst: int) -> Auth:
    """Makes gateways ask for the key of a tenant with a rate, which counts by the clock alone.

    Redis, which would fill the rate by its own clock however slowly the test runs, does not answer for quotas.
    """

    async def away(*_: Any) -> QuotaLease:
        raise BrokerUnavailable("no quota is exchanged")

    key = ApiKey(id="k1", sha256=hash_key("a-key"), tenant="acme", rate_per_s=rate_per_s, burst=burst)
    auth = Auth([key], clock)
    monkeypatch.setattr("qinfer_api.app.load_auth", lambda *_: auth)
    monkeypatch.setattr(Quotas, "exchange", away)
    monkeypatch.setattr("qinfer_api.labeling.intake.LOOK_AGAIN_S", 0.02)
    return auth


def pusher_of(running: Running) -> Any:
    pusher = running.gateway._labeling.pusher
    assert pusher is not None
    return pusher


def stop_feeding(patch: pytest.MonkeyPatch) -> None:
    """Keeps all tasks waiting, as while their model is away."""

    async def nothing(self: TaskIntake, board: Board) -> int:
        return 0

    patch.setattr(TaskIntake, "feed", nothing)


async def test_a_project_has_so_many_waiting_tasks(
    studio: LabelStudioServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one call as many as fit; the text says what brings the others in, and they are taken when there is room."""
    settings = settings_for(studio, tmp_path / "mappings", max_waiting_tasks=5)
    tasks = studio.add(*["pos"] * 8)
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        with monkeypatch.context() as patch:
            stop_feeding(patch)
            refused = await client.post(WEBHOOK, json=event(tasks))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
            assert refused.json()["error"] == (
                "3 tasks of project 12 were not queued for model 'text', 5 were: 5 wait, the most that "
                "QINFER_LABELING__MAX_WAITING_TASKS allows; queue the others later by "
                "POST /v1/label-studio/text/projects/12/tasks"
            )
            assert (await counts(client))["queued"] == 5
            known = await client.post(WEBHOOK, json=event(tasks[:5]))
            assert (known.status_code, known.json()["queued"]) == (201, 0)
            body = {"project": "12", "tasks": tasks[5:]}
            assert (await client.post("/label-studio/text/predict", json=body)).status_code == 503
            ordered = await client.post(TASKS)
            assert (ordered.status_code, ordered.headers["retry-after"]) == (429, "10")
            await eventually(partial(_are_counted, client, 3))
        await are_done(client, 5)

        assert (await client.post(TASKS)).json() == {"found": 3, "queued": 3, "next": None}
        await are_done(client, 8)


async def test_an_order_goes_on_where_there_was_no_room(
    studio: LabelStudioServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the page that was begun: what is queued of it already is not queued twice."""
    settings = settings_for(studio, tmp_path / "mappings", max_waiting_tasks=150)
    studio.add(*["pos"] * 230)
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        with monkeypatch.context() as patch:
            stop_feeding(patch)
            first = (await client.post(TASKS)).json()
            assert (first["queued"], first["next"]) == (150, 2)
            assert (await client.post(TASKS, params={"page": 2})).status_code == 429
        await are_done(client, 150)

        assert (await client.post(TASKS, params={"page": 2})).json() == {"found": 80, "queued": 80, "next": None}
        await are_done(client, 230)
    assert len(running.requests) == 230


async def test_tasks_become_requests_at_the_tenants_rate(
    studio: LabelStudioServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may bring more than the rate ever allows at once; half of the burst is left to those who wait."""
    clock = FakeClock()
    with_rate(monkeypatch, clock, rate_per_s=1.0, burst=4)
    settings = settings_for(studio, tmp_path / "mappings")
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url, headers=KEY) as client:
        reply = await client.post(WEBHOOK, json=event(studio.add(*["pos"] * 10)))
        assert reply.json()["queued"] == 10
        await are_done(client, 2)
        assert await pusher_of(running).feed() == 0
        statuses = [(await client.post("/v2/models/echo/infer", json=ECHO)).status_code for _ in range(3)]
        assert statuses == [200, 200, 503]
        assert (await counts(client))["queued"] == 8

        clock.advance(3.0)
        await are_done(client, 3)
        for done in (5, 7, 9, 10):
            clock.advance(2.0)
            await are_done(client, done)

    assert len([request for request in running.requests if request.model == "text"]) == 10


async def test_a_rate_that_others_used_up_puts_tasks_off(
    studio: LabelStudioServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait, with the reason, for as long as it takes."""

    async def none_fails(*_: Any) -> None:
        raise AssertionError("a task gives up for a rate")

    clock = FakeClock()
    with_rate(monkeypatch, clock, rate_per_s=100.0, burst=2)
    monkeypatch.setattr(TaskPace, "task_capacity", lambda _self, _board, most: most)
    monkeypatch.setattr(TaskIntake, "_wait", none_fails)
    settings = settings_for(studio, tmp_path / "mappings")
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url, headers=KEY) as client:
        await client.post(WEBHOOK, json=event(studio.add(*["pos"] * 3)))
        await are_done(client, 2)

        async def says_why() -> bool:
            found = (await client.get(f"{TASKS}/3")).json()
            return found["state"] == "queued" and "tenant 'acme' has used up its rate" in (found["error"] or "")

        await eventually(says_why)
        clock.advance(1.0)
        await are_done(client, 3)


async def test_what_a_lane_refuses_is_not_charged(
    studio: LabelStudioServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that wait for a model are tried again and again; the tenant's rate is for what becomes of them."""
    refused, wait = 0, TaskIntake._wait

    async def noted(self: TaskIntake, *words: Any) -> None:
        nonlocal refused
        refused += 1
        await wait(self, *words)

    monkeypatch.setattr(TaskIntake, "_wait", noted)
    auth = with_rate(monkeypatch, FakeClock(), rate_per_s=1.0, burst=200)
    settings = settings_for(studio, tmp_path / "mappings")
    _map_vectors(tmp_path / "mappings", "small")
    path = "/v1/label-studio/small/projects/12/tasks"
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url, headers=KEY) as client:
        tasks = [{"id": number, "data": {"vector": [1.0, 2.0, 3.0, 4.0]}} for number in range(1, 61)]
        await client.post("/label-studio/small/webhook", json=event(tasks))
        await eventually(lambda: refused >= 10)
        await eventually(lambda: auth.spare("acme") == 50.0)
        assert await running.depth("small") == 50
        assert (await counts(client, path))["queued"] == 60


async def _are_counted(client: httpx.AsyncClient, count: int) -> bool:
    shown = (await client.get("/metrics", params={"scope": "cluster"})).text
    return f'qinfer_refused_requests_total{{model="text",reason="queue_full",version="1"}} {count}.0' in shown


def _map_vectors(directory: Path, model: str) -> None:
    text = MAPPING.format(model=model, mode="push").replace("field: text", "field: vector, kind: tensor")
    (directory / f"{model}.yaml").write_text(text)
