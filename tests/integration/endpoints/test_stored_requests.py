"""Stored requests to endpoints tell of versions on trial, and have shadows, as far as their gateway sees their ends."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.messages import Response
from qinfer.queue.entries import RequestOutcome, RequestState, Settlement
from qinfer.queue.values import LARGE_BYTES
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import encode_responses
from qinfer_api.endpoints import shadows as ends
from qinfer_api.requests.records import address_of
from tests.support.endpoints import BODY, declare, gateways, shadow, split
from tests.support.ensembles import scale
from tests.support.gateway import Running
from tests.support.requests import settle
from tests.support.served_models import models_served

SIZE = 2 * LARGE_BYTES
CANARY = {"model": "echo", "version": 2}
STEP = {"weight": 0.5, "least_s": 0, "least_requests": 20}
PLAN = {"steps": [STEP, STEP | {"least_s": 3600}], "checks": [{"of": "errors"}]}


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with gateways(1) as (running,):
        yield running


async def send(client: httpx.AsyncClient, name: str, body: dict[str, Any]) -> None:
    reply = await client.post(f"/v1/models/{name}/requests", json=body)
    assert reply.status_code in (202, 429), reply.text


async def trial(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    return (await client.get(f"/v1/endpoints/{name}")).json()["canary"] or {}


@pytest.mark.timeout(90)
async def test_a_version_that_fails_stored_requests_is_rolled_back(gateway: Running) -> None:
    await declare([gateway], "reader", split(CANARY, canary=PLAN))
    async with httpx.AsyncClient(base_url=gateway.url) as client:

        async def is_rolled_back() -> bool:
            await send(client, "reader", {**BODY, "parameters": {"fails_in": 2}})
            return (await trial(client, "reader")).get("state") == "rolled back"

        await eventually(is_rolled_back, timeout_s=60, description="a rollback")


@pytest.mark.timeout(90)
async def test_one_that_answers_them_goes_on(gateway: Running) -> None:
    await declare([gateway], "reader", split(CANARY, canary=PLAN))
    async with httpx.AsyncClient(base_url=gateway.url) as client:

        async def is_further() -> bool:
            await send(client, "reader", BODY)
            return (await trial(client, "reader")).get("step") == 2

        await eventually(is_further, timeout_s=60, description="the second step")


async def test_so_many_are_waited_for_and_the_others_are_stored_all_the_same(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "MOST", 3)
    stuck = split({"model": "stuck", "version": 1, "weight": 1.0}, canary=None)
    await declare([gateway], "slow", stuck)
    found = gateway.gateway._ends
    gateway.gateway.dispatcher.targets.observed.by_target["slow", "stuck:1"] = object()  # type: ignore[assignment]
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        await asyncio.gather(*(send(client, "slow", BODY) for _ in range(6)))

    assert len(found._tasks) == 3
    assert await gateway.depth("stuck") == 6


async def test_stored_requests_have_shadows(tmp_path: Path) -> None:
    scale(tmp_path, "twice", 2.0, version=1)
    scale(tmp_path, "twice", 3.0, version=2)
    with (tmp_path / "twice" / "config.pbtxt").open("a") as file:
        file.write("version_policy: { all { } }")
    body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}
    rules = {"y": {"agree": "within", "tolerance": 0.1}}
    declaration = split(shadow("twice:2"), stable="twice:1", compare=rules)
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("twice")
        declared = await client.put("/v1/endpoints/doubled", json=declaration)
        assert declared.status_code == 200, declared.text
        for _ in range(5):
            await send(client, "doubled", body)

        async def are_compared() -> bool:
            found = (await client.get("/v1/endpoints/doubled/differences")).json()["targets"][0]["shadows"]
            return bool(found["disagreed"] == 5)

        await eventually(are_compared, timeout_s=30, description="the shadows of stored requests")


async def test_a_large_result_that_is_only_watched_waits_for_memory(gateway: Running) -> None:
    """A version on trial, a shadow or a trace gives its memory back after a moment."""
    budget, requests = gateway.gateway.receiving, gateway.gateway.requests
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        reply = await client.post("/v1/models/stuck/requests", json=BODY)
    address = address_of(reply.json()["id"], "", "stuck")
    large = encode_responses([Response(request_id=address.id, outputs=(Tensor("y", "UINT8", (SIZE,), bytes(SIZE)),))])
    outcome = RequestOutcome(state=RequestState.SUCCEEDED, blob=large)
    body = budget.reserve("body", budget._max_bytes, lambda: None)
    assert body is not None

    async def watch() -> int:
        async with requests._ending(address, 30.0, "") as (_, response):
            assert response is not None
            return budget.held_bytes

    watching = asyncio.create_task(watch())
    assert await settle(gateway.delivery, Settlement(address=address, outcome=outcome)) == [True]
    await eventually(lambda: budget.waiting == 1, description="one that waits for memory")
    body.release()

    assert await watching > SIZE
    assert budget.held_bytes == 0
