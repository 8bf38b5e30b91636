"""Pausing and resuming models over HTTP: which requests are refused and which wait, and who may do it."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.gateway import Running, running_gateway, settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
PATH = "/v1/models/echo"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fast", "route"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    async with running_gateway(settings_of({"fast_path": request.param == "fast"})) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as opened:
        yield opened
        for path in (PATH, f"{PATH}/versions/1", f"{PATH}/versions/2"):
            await opened.post(f"{path}/resume")


async def infer(client: httpx.AsyncClient, version: int = 0) -> httpx.Response:
    of = f"/versions/{version}" if version else ""
    return await client.post(f"/v2/models/echo{of}/infer", json=BODY)


async def test_a_paused_model_refuses_synchronous_requests(client: httpx.AsyncClient) -> None:
    found = await client.post(f"{PATH}/pause", json={"reason": "the feature store is down"})

    refused = await infer(client)

    assert found.status_code == 200
    assert [(one["model"], one["version"], one["reason"]) for one in found.json()] == [
        ("echo", 0, "the feature store is down")
    ]
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "paused: the feature store is down" in refused.json()["error"]
    assert (await client.post("/v2/models/text/infer", json=BODY)).status_code == 400
    assert (await client.post(f"{PATH}/resume")).json() == []
    assert (await infer(client)).status_code == 200


async def test_a_paused_model_accepts_stored_requests(client: httpx.AsyncClient) -> None:
    await client.post(f"{PATH}/pause")

    accepted = await client.post(f"{PATH}/requests", json=BODY)
    preferred = await client.post("/v2/models/echo/infer", json=BODY, headers={"prefer": "respond-async"})

    assert (accepted.status_code, preferred.status_code) == (202, 202)


async def test_one_version_is_paused(client: httpx.AsyncClient) -> None:
    """Requests without a version go to the highest ready one, or are refused if that is paused."""
    await client.post(f"{PATH}/versions/1/pause")
    first = [(await infer(client, version)).status_code for version in (0, 1, 2)]
    await client.post(f"{PATH}/versions/2/pause")
    second = [(await infer(client, version)).status_code for version in (0, 1, 2)]
    left = (await client.post(f"{PATH}/versions/1/resume")).json()

    assert (first, second) == ([200, 503, 200], [503, 503, 503])
    assert [one["version"] for one in left] == [2]
    assert [one["version"] for one in (await client.get("/v1/pauses")).json()] == [2]
    assert (await infer(client, 1)).status_code == 200


async def test_a_paused_model_stays_ready_and_known(client: httpx.AsyncClient) -> None:
    """Load balancers keep the gateway, and callers can read what the model takes."""
    await client.post(f"{PATH}/pause")

    for path in ("/v2/models/echo", "/v2/models/echo/config", "/v2/models/echo/ready", "/v1/models/echo/backlog"):
        assert (await client.get(path)).status_code == 200
    assert (await client.get("/v1/models/echo/backlog")).json()["work_s"] == 0


async def test_pauses_hold_in_every_gateway(client: httpx.AsyncClient, running: Running) -> None:
    """A gateway that starts later reads them with the models."""
    await client.post(f"{PATH}/pause")

    async with running_gateway(settings_of(), await running.database.delivery(), running.database.store()) as other:
        await other.refresh()
        async with httpx.AsyncClient(base_url=other.url) as beside:
            refused = await infer(beside)

    assert refused.status_code == 503
    assert "is paused" in refused.json()["error"]


async def test_what_can_not_be_paused_is_told(client: httpx.AsyncClient) -> None:
    unknown = await client.post("/v1/models/unknown/pause")
    wrong = await client.post(f"{PATH}/pause", json={"reason": 1})
    long = await client.post(f"{PATH}/pause", json={"reason": "x" * 501})

    assert (unknown.status_code, wrong.status_code, long.status_code) == (404, 400, 400)
    assert (await client.get("/v1/pauses")).json() == []
