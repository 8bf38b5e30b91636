"""Stored requests to endpoints: each is executed once, however often it is sent and whatever the weights become."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer.traffic.store import Kept, KeptTargets
from tests.support.endpoints import BODY, canary, declare, gateways, split
from tests.support.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = "späte modelle:1"
"""A target in another model: what is found by an id there is not found beside the stable target."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[list[Running]]:
    async with gateways(2) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(both: list[Running]) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with httpx.AsyncClient(base_url=both[0].url) as one, httpx.AsyncClient(base_url=both[1].url) as other:
        yield [one, other]


def body(name: str, **more: Any) -> dict[str, Any]:
    return {**BODY, "id": name, **more}


async def executed(both: list[Running], client: httpx.AsyncClient, reply: httpx.Response, name: str) -> list[str]:
    """Waits for the end of a request; returns the targets that have executed a request of that name."""
    result = await client.get(reply.json()["links"]["result"] + "?wait=20")
    assert result.status_code == 200, result.text
    return [f"{one.model}:{one.version}" for one in both[0].requests if one.client_id == name]


async def fill(client: httpx.AsyncClient, url: str) -> None:
    """Fills the lane of an endpoint's target, in which three requests may wait, and which nobody serves."""
    replies = [await client.post(url, json=BODY, headers={"request-id": f"fills-{number}"}) for number in range(4)]
    assert replies[-1].status_code == 429


@pytest.mark.parametrize(
    "headers",
    [
        {"request-id": "by-id"},
        {"idempotency-key": "by-key"},
        {"request-id": "by-both", "idempotency-key": "and-key"},
    ],
    ids=["id", "key", "both"],
)
async def test_a_repetition_follows_the_first_request(
    both: list[Running], clients: list[httpx.AsyncClient], headers: dict[str, str]
) -> None:
    name, url = f"r-{len(headers)}-{min(headers.values())}", "/v1/models/moving/requests"
    await declare(both, "moving", split(canary(1, OTHER)))
    first = await clients[0].post(url, json=body(name), headers=headers)
    await declare(both, "moving", split(canary(0, OTHER)))

    again = await clients[1].post(url, json=body(name), headers=headers)

    assert [first.status_code, again.status_code] == [202, 202], again.text
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["idempotent-replayed"] == "true"
    assert await executed(both, clients[1], again, name) == [OTHER]
    assert (await clients[0].post(url, json=body("changed"), headers=headers)).status_code == 409


async def test_a_repetition_follows_to_a_target_that_was_removed(
    both: list[Running], clients: list[httpx.AsyncClient]
) -> None:
    url, headers = "/v1/models/shrinking/requests", {"request-id": "kept"}
    await declare(both, "shrinking", split(canary(1, OTHER)))
    first = await clients[0].post(url, json=body("kept"), headers=headers)
    await declare(both, "shrinking", split())

    again = await clients[1].post(url, json=body("kept"), headers=headers)

    assert again.headers["idempotent-replayed"] == "true"
    assert await executed(both, clients[1], first, "kept") == [OTHER]


async def test_what_was_not_accepted_does_not_go_to_a_target_that_was_removed(
    both: list[Running], clients: list[httpx.AsyncClient]
) -> None:
    """Its target was kept, but the lane was full, or the gateway died: a rollback has moved it."""
    url, headers = "/v1/models/rolled-back/requests", {"request-id": "refused"}
    await declare(both, "rolled-back", split(canary(1, "bounded:1")))
    await fill(clients[0], url)
    assert (await clients[0].post(url, json=body("refused"), headers=headers)).status_code == 429
    await declare(both, "rolled-back", split())

    replies = await asyncio.gather(*(client.post(url, json=body("refused"), headers=headers) for client in clients))

    assert [reply.status_code for reply in replies] == [202, 202]
    assert await executed(both, clients[0], replies[0], "refused") == ["echo:1"]


async def test_a_repetition_follows_one_that_another_gateway_accepts_meanwhile(
    both: list[Running], clients: list[httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gateway has read that a removed target is kept, when the other accepts the request for a new target."""
    url, headers = "/v1/models/overtaken/requests", {"request-id": "overtaken"}
    await declare(both, "overtaken", split(canary(1, "bounded:1")))
    await fill(clients[0], url)
    assert (await clients[0].post(url, json=body("overtaken"), headers=headers)).status_code == 429
    await declare(both, "overtaken", split())
    keep, overtaking = KeptTargets.keep, list[httpx.Response]()

    async def keep_late(kept: KeptTargets, *given: Any) -> Kept:
        found = await keep(kept, *given)
        if not overtaking:
            monkeypatch.undo()
            overtaking.append(await clients[0].post(url, json=body("overtaken"), headers=headers))
        return found

    monkeypatch.setattr(KeptTargets, "keep", keep_late)
    overtaken = await clients[1].post(url, json=body("overtaken"), headers=headers)

    assert [overtaken.status_code, overtaking[0].status_code] == [202, 202], overtaken.text
    assert overtaken.json()["id"] == overtaking[0].json()["id"]
    assert await executed(both, clients[1], overtaken, "overtaken") == ["echo:1"]


async def test_of_repetitions_at_once_one_is_executed(both: list[Running], clients: list[httpx.AsyncClient]) -> None:
    """Each gateway draws by chance, and both go where the first of them went; the weights change meanwhile."""
    await declare(both, "racing", split(canary(0.5, OTHER)))
    names = [f"race-{number}" for number in range(20)]

    async def send(client: httpx.AsyncClient, name: str) -> httpx.Response:
        return await client.post("/v1/models/racing/requests", json=body(name), headers={"request-id": name})

    sent = [send(client, name) for name in names for client in clients]
    replies, _ = await asyncio.gather(asyncio.gather(*sent), declare(both, "racing", split(canary(0.1, OTHER))))

    assert {reply.status_code for reply in replies} == {202}
    for name, reply in zip(names, replies[::2], strict=True):
        assert len(await executed(both, clients[1], reply, name)) == 1
    targets = Counter(one.model for one in both[0].requests if one.client_id in names)
    assert set(targets) == {"echo", "späte modelle"}


async def test_a_result_has_the_endpoints_name(both: list[Running], clients: list[httpx.AsyncClient]) -> None:
    await declare(both, "named", split(canary(1, OTHER)))
    wanted = {"outputs": [{"name": "y", "parameters": {"classification": 1}}]}

    reply = await clients[0].post(
        "/v2/models/named/infer", json=body("n", **wanted), headers={"prefer": "wait=20", "request-id": "named-1"}
    )

    found = reply.json()
    assert (reply.status_code, found["model_name"], found["model_version"]) == (200, "named", "1")
    assert reply.headers["qinfer-target"] == "sp%C3%A4te modelle:1"
    assert found["outputs"][0]["data"] == ["4.000000:3"]


@pytest.mark.parametrize("headers", [{}, {"request-id": "looked-up"}], ids=["the server's id", "an id of one's own"])
async def test_a_request_is_found_below_its_endpoint(
    both: list[Running], clients: list[httpx.AsyncClient], headers: dict[str, str]
) -> None:
    await declare(both, "found", split(canary(1, OTHER)))
    reply = await clients[0].post("/v1/models/found/requests", json=BODY, headers=headers)
    below = f"/v1/models/found/requests/{reply.json()['id']}"

    result = await clients[1].get(f"{below}/result?wait=20")
    record, events = await clients[1].get(below), await clients[1].get(f"{below}/events")
    unknown = await clients[1].get("/v1/models/found/requests/nobodys")

    assert (result.status_code, result.json()["model_name"]) == (200, "found")
    assert (record.json()["state"], record.json()["model"]) == ("succeeded", "späte modelle")
    assert "event: state" in events.text
    assert (await clients[1].delete(below)).json()["state"] == "succeeded"
    assert unknown.status_code == 404
