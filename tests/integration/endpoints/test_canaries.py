"""Canaries on trial at gateways: promoted by themselves, rolled back by themselves, and by hand."""

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer.core.settings import RequestSettings, WebhookSettings
from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from qinfer_api.requests.webhooks import sign
from tests.support.endpoints import BODY, gateways, seen, split
from tests.support.gateway import Running, declare_more, settings_of, work
from tests.support.servers.receiver import receiving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANARY = {"model": "echo", "version": 2}
STEP = {"weight": 0.3, "least_s": 0, "least_requests": 20}
PLAN = {"steps": [STEP, STEP | {"weight": 0.6}], "checks": [{"of": "errors"}, {"of": "latency", "quantile": 0.99}]}
LONGER = PLAN | {"steps": [STEP | {"least_s": 4}, STEP]}
PATIENT = PLAN | {"steps": [STEP | {"least_s": 3600}, STEP]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[list[Running]]:
    async with gateways(2, settings_of()) as running:
        yield running


class Callers:
    """Asks an endpoint at all gateways until it is left; counts the versions that answered, and the failures."""

    def __init__(self, gateways: list[Running], name: str, **parameters: Any) -> None:
        self._urls = [one.url for one in gateways]
        self._name = name
        self._body = {**BODY, "parameters": parameters}
        self.answered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._asking: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Callers":
        self._asking = [asyncio.create_task(self._ask(url)) for url in self._urls]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.wait(self._asking)
        for task in self._asking:
            with contextlib.suppress(asyncio.CancelledError):
                task.result()

    async def _ask(self, url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            while True:
                reply = await client.post(f"/v2/models/{self._name}/infer", json=self._body)
                counts = self.answered if reply.status_code == 200 else self.failed
                counts[reply.headers["qinfer-target"]] += 1
                await asyncio.sleep(0.01)  # a rate that callers have


async def call(gateway: Running, method: str, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        reply = await client.request(method, f"/v1/endpoints/{path}", **fields)
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def until(gateway: Running, name: str, *words: str, also_missing: bool = False) -> dict[str, Any]:
    """Waits until the canary of an endpoint is in a state; returns the endpoint's."""
    found: dict[str, Any] = {}

    async def is_so() -> bool:
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            reply = await client.get(f"/v1/endpoints/{name}")
        assert reply.status_code == 200 or also_missing, reply.text
        found.update(reply.json())
        return (found.get("canary") or {}).get("state") in words

    await eventually(is_so, timeout_s=60, description=f"a canary that is {' or '.join(words)}")
    return found


def events(state: dict[str, Any]) -> list[str]:
    return [event["event"] for event in reversed(state["events"])]


async def test_a_version_that_fails_is_rolled_back(both: list[Running]) -> None:
    """Within 200 of its requests; and what came after the end of the rollback it does not answer."""
    await call(both[0], "PUT", "bad", json=split(CANARY, canary=PLAN))

    async with Callers(both, "bad", fails_in=2) as callers:
        state = await until(both[1], "bad", "rolled back")
        before = callers.failed.total()
        asked = callers.answered["echo:1"]

        async def went_on() -> bool:
            return callers.answered["echo:1"] >= asked + 100

        await eventually(went_on, timeout_s=60, description="requests after the rollback")

    assert before <= 200
    assert callers.failed.total() <= before + len(both)  # those that were under way
    assert events(state) == ["begin", "roll back", "rolled back everywhere"]
    assert "errors" in state["canary"]["reason"]
    errors = state["canary"]["checks"][0]
    assert errors["canary_bad"] == errors["canary_requests"] > 0 == errors["stable_bad"]
    assert errors["evidence"] >= errors["decides"]
    async with httpx.AsyncClient(base_url=both[0].url) as client:
        reply = await client.post("/v2/models/bad/versions/2/infer", json=BODY)
    assert (reply.status_code, "targets of that endpoint are echo:1" in reply.text) == (404, True)


@pytest.mark.slow
async def test_a_good_version_is_promoted(both: list[Running]) -> None:
    """By itself, step by step; `latest` stays the canary, for the next version."""
    await call(both[0], "PUT", "good", json=split(CANARY | {"version": "latest"}, canary=PLAN))

    async with Callers(both, "good") as callers:
        state = await until(both[1], "good", "promoted", "rolled back")

    assert events(state) == ["begin", "promote", "finish"]
    assert not callers.failed
    targets = {one["role"]: one for one in state["targets"]}
    assert targets["stable"]["target"] == "echo:2"
    assert (targets["canary"]["target"], targets["canary"]["weight"]) == ("echo:latest", 0)
    assert targets["stable"]["requests"] > 0 == targets["canary"]["requests"]  # none is shown twice
    async with httpx.AsyncClient(base_url=both[0].url) as client:
        reply = await client.post("/v2/models/good/infer", json=BODY)
    assert reply.headers["qinfer-target"] == "echo:2"


async def test_people_decide_too(both: list[Running]) -> None:
    await call(both[0], "PUT", "hands", json=split(CANARY, canary=PATIENT))
    await until(both[0], "hands", "running")

    assert (await call(both[1], "POST", "hands/pause"))["canary"]["state"] == "paused"
    assert "paused already" in (await call(both[1], "POST", "hands/pause", 409))["error"]
    assert (await call(both[0], "POST", "hands/resume"))["canary"]["state"] == "running"
    assert (await call(both[0], "POST", "hands/promote"))["canary"]["step"] == 2
    back = await call(both[1], "POST", "hands/rollback")
    assert back["canary"]["state"] in ("rolling back", "rolled back")
    assert [one["weight"] for one in back["targets"]] == [1, 0]
    state = await until(both[0], "hands", "rolled back")
    assert events(state) == ["begin", "pause", "resume", "promote", "roll back", "rolled back everywhere"]
    assert "no canary on trial" in (await call(both[0], "POST", "hands/promote", 409))["error"]
    assert "use promote, rollback, pause, resume" in (await call(both[0], "POST", "hands/stop", 400))["error"]

    again = await call(both[0], "POST", "hands/resume")
    assert (again["canary"]["state"], again["canary"]["step"]) == ("running", 1)


async def test_a_declaration_of_old_leaves_a_bad_version_out(both: list[Running]) -> None:
    """One that is put again, as a pipeline may do: only `resume` tries again what was rolled back."""
    declaration = split(CANARY, canary=PATIENT)
    await call(both[0], "PUT", "again", json=declaration)
    await until(both[0], "again", "running")
    await call(both[0], "POST", "again/rollback")
    await until(both[0], "again", "rolled back")

    put = await call(both[0], "PUT", "again", json=declaration)

    assert [one["weight"] for one in put["targets"]] == [1, 0]
    revision = put["endpoint"]["revision"]
    await call(both[0], "PUT", "other", json=split(CANARY, canary=PATIENT))
    await until(both[0], "other", "running")  # the controller has been there since
    assert (await call(both[0], "GET", "again"))["endpoint"]["revision"] == revision


async def test_what_redis_has_lost_is_written_again(both: list[Running]) -> None:
    """A trial goes on where it was, and what was rolled back stays out."""
    await call(both[0], "PUT", "lost", json=split(CANARY, canary=PATIENT))
    await call(both[0], "PUT", "out", json=split(CANARY, canary=PATIENT))
    await until(both[0], "lost", "running")
    await until(both[0], "out", "running")
    await call(both[0], "POST", "lost/promote")
    await call(both[0], "POST", "out/rollback")
    await until(both[0], "out", "rolled back")

    async def are_known() -> bool:
        trials = [one.gateway.dispatcher.endpoints.trials for one in both]
        return all(each["lost"].state.step == 1 and each["out"].done_s for each in trials)

    await eventually(are_known, timeout_s=60, description="the trials at both gateways")
    await both[0].store.client.unlink(keys.trials(), keys.endpoints())

    state = await until(both[1], "lost", "running", also_missing=True)
    assert (state["canary"]["step"], [one["weight"] for one in state["targets"]]) == (2, [0.7, 0.3])
    state = await until(both[1], "out", "rolled back", also_missing=True)
    assert [one["weight"] for one in state["targets"]] == [1, 0]


async def test_what_waits_is_moved_for_every_gateway(both: list[Running]) -> None:
    """By the one that decides; each tells its callers who has answered, and counts that."""
    await declare_more(both[0], "waits", versions=(1, 2), is_ready=True)  # nobody executes anything yet
    for gateway in both:
        await gateway.refresh()
    canary = {"model": "waits", "version": 2, "when": [{"headers": {"x-try": "new"}}]}
    await call(both[0], "PUT", "moved", json=split(canary, stable="waits:1", canary=PATIENT))
    await until(both[0], "moved", "running")
    await seen(both, (await call(both[0], "GET", "moved"))["endpoint"]["revision"])
    lanes = [Lane("waits", 1), Lane("waits", 2)]

    async def ask(gateway: Running) -> httpx.Response:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            return await client.post("/v2/models/moved/infer", json=BODY, headers={"X-Try": "new"})

    async def have_come() -> bool:
        return sum(await both[0].delivery.depth(lanes)) == 20

    async def are_moved() -> bool:
        return await both[0].delivery.depth(lanes) == [20, 0]

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(both[number % 2])) for number in range(20)]
        await eventually(have_come, timeout_s=60)
        # All of them, unless a gateway has not heard of changes for two seconds: it asks stable targets only.
        _, waiting = await both[0].delivery.depth(lanes)
        assert waiting
        await call(both[1], "POST", "moved/rollback")
        await eventually(are_moved, timeout_s=60)
        working = group.create_task(work(both[0], "waits"))
        state = await until(both[0], "moved", "rolled back")
        replies = await asyncio.gather(*asked)
        working.cancel()

    assert {(one.status_code, one.headers["qinfer-target"]) for one in replies} == {(200, "waits:1")}
    assert {one.json()["model_version"] for one in replies} == {"1"}
    assert f"; {waiting} requests that waited for it were moved to version 1" in state["events"][0]["reason"]
    for gateway in both:
        state = await call(gateway, "GET", "moved")
        assert [one["requests"] for one in state["targets"]] == [10, 0]
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            page = (await client.get("/metrics")).text
        counts = re.findall(r'^qinfer_requests_total\{model="waits",[^}]*version="(.)"\} (\d+)', page, re.M)
        assert sorted(counts) == [("1", "10"), ("2", "0")]


@pytest.mark.long
async def test_another_gateway_decides_when_one_is_gone() -> None:
    async with gateways(2, settings_of()) as running:
        await call(running[0], "PUT", "e", json=split(CANARY, canary=LONGER))
        left, gone = running
        await left.store.client.set(keys.trial_lease(), gone.gateway.name, px=10_000)
        await until(left, "e", "running")
        assert await left.store.client.get(keys.trial_lease()) == gone.gateway.name.encode()

        gone.gateway.stop()
        async with Callers([left], "e") as callers:
            state = await until(left, "e", "promoted", "rolled back")

    assert events(state)[-1] == "finish"
    assert not callers.failed


async def test_each_event_is_told_by_a_webhook() -> None:
    """Signed, once; a URL that webhooks may not go to is refused when it is declared."""
    async with receiving() as receiver:
        webhooks = WebhookSettings.model_validate(
            {"allow": [f"127.0.0.1:{receiver.port}"], "secret": "s", "allow_private": True}
        )
        changes = {"webhooks": webhooks, "requests": RequestSettings(sweep_every_s=0.05)}
        async with gateways(1, settings_of().model_copy(update=changes)) as running:
            declared = split(CANARY, canary=PATIENT, webhook="http://127.0.0.1:1/")
            assert "127.0.0.1" in (await call(running[0], "PUT", "told", 400, json=declared))["error"]
            await call(running[0], "PUT", "told", json=declared | {"webhook": receiver.url()})
            await until(running[0], "told", "running")
            await call(running[0], "POST", "told/rollback")
            await until(running[0], "told", "rolled back")
            await eventually(lambda: len(receiver.received) == 3, timeout_s=60)

    about = sorted((json.loads(body) for _, _, body in receiver.received), key=lambda one: one["data"]["at_s"])
    assert [one["type"] for one in about] == ["canary.begin", "canary.roll_back", "canary.rolled_back_everywhere"]
    assert (about[0]["data"]["endpoint"], about[0]["data"]["version"]) == ("told", 2)
    _, told, body = receiver.received[0]
    assert told["webhook-signature"] == sign(b"s", told["webhook-id"], int(told["webhook-timestamp"]), body)
