"""Asynchronous requests of several tenants: nobody sees, reads or ends another's."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings_sections import MetricsSettings
from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from tests.support.gateway import Running, running_gateway, settings_of

ECHO = "/v1/models/echo/requests"
BODY: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


class Callers:
    """A gateway that asks for keys, and clients of two tenants and of nobody."""

    def __init__(self, running: Running, keys: dict[str, str]) -> None:
        self.running, self._keys = running, keys
        self._client = httpx.AsyncClient(base_url=running.url, limits=httpx.Limits(max_connections=None), timeout=30)

    async def ask(self, who: str, method: str, url: str, body: Any = None, **headers: str) -> httpx.Response:
        if who in self._keys:
            headers["authorization"] = f"Bearer {self._keys[who]}"
        names = {name.replace("_", "-"): text for name, text in headers.items()}
        return await self._client.request(method, url, json=body, headers=names)

    async def close(self) -> None:
        await self._client.aclose()


@pytest.fixture
async def callers(tmp_path: Path) -> AsyncIterator[Callers]:
    file = tmp_path / "keys.json"
    keys = {name: add_key(file, name, (Scope.INFER,), name)[1] for name in ("acme", "other", "slow")}
    entries = json.loads(file.read_text())
    entries["keys"][-1].update(rate_per_s=0.01, burst=1)
    entries["keys"][1].update(weight=3)
    file.write_text(json.dumps(entries))
    settings = settings_of(auth={"mode": "keys", "keys_file": str(file)})
    settings = settings.model_copy(update={"metrics": MetricsSettings(tenants=1)})
    async with running_gateway(settings) as running:
        callers = Callers(running, keys)
        yield callers
        await callers.close()


@pytest.mark.parametrize("chosen", ["", "row-1"])
async def test_a_request_is_its_tenants(callers: Callers, chosen: str) -> None:
    """For another tenant it does not exist; without a key nothing does."""
    headers = {"request_id": chosen} if chosen else {}
    reply = await callers.ask("acme", "POST", ECHO, BODY, **headers)
    links = reply.json()["links"]

    for url in links.values():
        assert (await callers.ask("other", "GET", url)).status_code == 404
        assert (await callers.ask("nobody", "GET", url)).status_code == 401
    assert (await callers.ask("other", "DELETE", links["self"])).status_code == 404
    result = await callers.ask("acme", "GET", links["result"] + "?wait=20")

    assert (reply.status_code, result.status_code) == (202, 200)
    assert callers.running.requests[-1].tenant == "acme"


async def test_ids_and_keys_of_tenants_do_not_meet(callers: Callers) -> None:
    """The same id and the same idempotency key are two requests."""
    for headers in ({"request_id": "same"}, {"idempotency_key": "same"}):
        replies = [await callers.ask(who, "POST", ECHO, BODY, **headers) for who in ("acme", "other")]

        assert [reply.status_code for reply in replies] == [202, 202]
        assert not any("idempotent-replayed" in reply.headers for reply in replies)


async def test_a_rate_counts_on_v1_too(callers: Callers) -> None:
    """429 there, with when to come back."""
    first, second = [await callers.ask("slow", "POST", ECHO, BODY) for _ in range(2)]

    assert (first.status_code, second.status_code) == (202, 429)
    assert int(second.headers["retry-after"]) >= 1


INFER: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


async def test_a_tenant_that_fills_a_lane_keeps_no_other_out(callers: Callers) -> None:
    """A tenant that has 50 requests in the lane is refused, another is let in up to its share."""
    running = callers.running
    asked: list[asyncio.Task[httpx.Response]] = []

    async def has_all() -> bool:
        return await running.depth("small") == len(asked)

    for _ in range(50):  # one by one: a gateway's count of many at once is an estimate
        asked.append(asyncio.create_task(callers.ask("acme", "POST", "/v2/models/small/infer", INFER)))
        await eventually(has_all, description="the next in the lane")
    refused = [await callers.ask("acme", "POST", "/v2/models/small/infer", INFER) for _ in range(10)]
    for _ in range(10):
        asked.append(asyncio.create_task(callers.ask("other", "POST", "/v2/models/small/infer", INFER)))
        await eventually(has_all, description="the other's in the lane")
    [shares] = await running.delivery.shares([Lane("small", 1)], named=True)

    assert {reply.status_code for reply in refused} == {503}
    assert not any(call.done() for call in asked)
    assert [(share.tenants, share.weight) for share in shares] == [(("acme",), 1), (("other",), 3)]
    assert sum(share.entries for share in shares) == 60
    for call in asked:
        call.cancel()
    await running.emptied("small")


async def test_shares_of_tenants_are_shown(callers: Callers) -> None:
    """With their weights, of lanes that have tenants; a tenant without a name of its own is one of the others."""
    for who in ("acme", "other"):
        assert (await callers.ask(who, "POST", "/v2/models/echo/infer", INFER)).status_code == 200

    page = (await callers.ask("acme", "GET", "/metrics?scope=cluster")).text

    shares = re.findall(r'qinfer_tenant_share_ratio\{lane="p1",model="echo",tenant="(\S+)",version="2"\} (\S+)', page)
    assert dict(shares) == {"acme": "0.25", "(others)": "0.75"}


async def test_a_tenants_long_polls_leave_some_to_the_others(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them at most; those above its share are answered at once, and its event streams refused."""
    monkeypatch.setattr("qinfer_api.requests.service.MAX_WAITS", 6)
    waits = callers.running.gateway.requests.waits
    stuck = {
        who: (await callers.ask(who, "POST", "/v1/models/stuck/requests", BODY)).json()["links"]
        for who in ("acme", "other")
    }
    polls = [asyncio.create_task(callers.ask("acme", "GET", stuck["acme"]["result"] + "?wait=30")) for _ in range(9)]
    await eventually(lambda: sum(poll.done() for poll in polls) == 6, description="the polls that are too many")

    refused = await callers.ask("acme", "GET", stuck["acme"]["events"])
    waiting = asyncio.create_task(callers.ask("other", "GET", stuck["other"]["result"] + "?wait=30"))
    await eventually(lambda: waits._places.taken == 4, description="the other tenant's poll")

    assert {poll.result().status_code for poll in polls if poll.done()} == {202}
    assert refused.status_code == 503
    for who, links in stuck.items():
        await callers.ask(who, "DELETE", links["self"])
    assert [(await poll).status_code for poll in (*polls, waiting)].count(400) == 4


async def test_stored_requests_share_the_memory_of_results(callers: Callers) -> None:
    """Each tenant's are counted, so that none takes it all (`tests/contract/requests/test_stored_shares.py`)."""
    links = (await callers.ask("acme", "POST", ECHO, BODY)).json()["links"]
    await callers.ask("acme", "GET", links["result"] + "?wait=20")
    client = callers.running.store.client
    stored = keys.stored("echo", 0, "acme")
    before = await client.hget(stored, "")

    await callers.ask("acme", "DELETE", links["self"])

    assert int(before) > 0
    assert await client.exists(stored) == 0
