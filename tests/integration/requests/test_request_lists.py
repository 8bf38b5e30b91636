"""`GET /v1/requests` and timelines: filters, pages, and what keys of each scope and tenant see."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer.client import AsyncClient
from qinfer.errors import Forbidden, InvalidRequest
from qinfer.queue.requests import ListPlace
from qinfer_api.requests import listing
from tests.support.gateway import TenantScene

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
OWN_ID = "secret-of-acme"


class Scene(TenantScene):
    """The requests that two tenants have at a gateway."""

    async def submit(self, name: str, model: str, **headers: str) -> dict[str, Any]:
        reply = await self.clients[name].post(f"/v1/models/{model}/requests", json=BODY, headers=headers)
        found: dict[str, Any] = reply.json()
        assert reply.status_code == 202, found
        return found

    async def get(self, name: str, path: str, **params: Any) -> httpx.Response:
        return await self.clients[name].get(path, params=params or None)

    async def listed(self, name: str, **params: Any) -> list[dict[str, Any]]:
        """Reads all pages."""
        found: list[dict[str, Any]] = []
        following: str | None = ""
        while following is not None:
            reply = await self.get(name, "/v1/requests", **params, **({"after": following} if following else {}))
            assert reply.status_code == 200, reply.text
            found += reply.json()["requests"]
            following = reply.json()["next"]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with Scene.opened(tmp_path_factory.mktemp("keys") / "keys.json") as scene:
        await scene.submit("acme", "stuck")
        await scene.submit("acme", "stuck", **{"request-id": OWN_ID})
        await scene.submit("other", "stuck")
        for name, model in (("acme", "echo"), ("acme", "fails"), ("other", "fails")):
            record = await scene.submit(name, model)
            await scene.get(name, record["links"]["result"], wait=20)
        yield scene


def seen(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["model"], one["state"]) for one in found]


async def test_a_tenant_sees_its_own_requests(scene: Scene) -> None:
    own, others = await scene.listed("acme"), await scene.listed("other")

    assert seen(own) == [("echo", "succeeded"), ("fails", "failed"), ("stuck", "queued"), ("stuck", "queued")]
    assert seen(others) == [("fails", "failed"), ("stuck", "queued")]
    assert not {one["id"] for one in own} & {one["id"] for one in others}
    assert not [one for one in (*own, *others) if "tenant" in one]


async def test_an_administrator_sees_all_tenants(scene: Scene) -> None:
    found = await scene.listed("admin")

    assert len(found) == 6
    assert {one["tenant"] for one in found} == {"acme", "other"}
    assert seen(await scene.listed("admin", tenant="other")) == [("fails", "failed"), ("stuck", "queued")]
    for one in found:
        assert (await scene.get("admin", one["links"]["self"])).json()["id"] == one["id"]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"model": "fails"}, [("fails", "failed")]),
        ({"state": "queued"}, [("stuck", "queued"), ("stuck", "queued")]),
        ({"state": ["failed", "succeeded"]}, [("echo", "succeeded"), ("fails", "failed")]),
        ({"error": "BOOM"}, [("fails", "failed")]),
        ({"error": "no such text"}, []),
        ({"id_prefix": OWN_ID[:6]}, [("stuck", "queued")]),
        ({"version": 2}, [("echo", "succeeded")]),
        ({"version": 3}, []),
        ({"older_than_s": 3600}, []),
        ({"newer_than_s": 3600, "model": "echo"}, [("echo", "succeeded")]),
        ({"model": "unknown"}, []),
        ({"model": "no/model"}, []),
    ],
)
async def test_requests_are_chosen(scene: Scene, params: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert seen(await scene.listed("acme", **params)) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"state": "lost"},
        {"colour": "red"},
        {"older_than_s": -1},
        {"limit": 0},
        {"limit": "many"},
        {"after": "x"},
        {"after": "k6VzdHVjawE="},
        {"after": listing._Cursor("echo", ListPlace(score="lost")).written()},
        {"version": "one"},
    ],
)
async def test_a_wrong_filter_is_refused_with_the_reason(scene: Scene, params: dict[str, Any]) -> None:
    reply = await scene.get("acme", "/v1/requests", **params)

    assert reply.status_code == 400
    assert next(iter(params)) in reply.json()["error"] or "filter" in reply.json()["error"]


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_pages_have_each_request_once(scene: Scene, limit: int) -> None:
    found = await scene.listed("acme", limit=limit)

    assert seen(found) == seen(await scene.listed("acme"))
    assert len({one["id"] for one in found}) == 4


async def test_short_pages_lead_past_other_tenants_and_name_none_of_their_requests(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a page may read few records, it ends at requests of others, and its cursor does not tell their ids."""
    monkeypatch.setattr(listing, "AT_ONCE", 1)
    monkeypatch.setattr(listing, "MOST_READ", 1)
    others = {one["id"] for one in await scene.listed("acme")}
    cursors: list[str] = []

    following: str | None = ""
    found: list[dict[str, Any]] = []
    while following is not None and len(cursors) < 30:
        page = (await scene.get("other", "/v1/requests", **({"after": following} if following else {}))).json()
        found += page["requests"]
        following = page["next"]
        cursors.append(following or "")

    assert seen(found) == [("fails", "failed"), ("stuck", "queued")]
    told = [listing._Cursor.read(cursor).place.id for cursor in cursors if cursor]
    assert not others & set(told)
    assert OWN_ID not in "".join(told)


async def test_a_page_goes_on_behind_many_requests_of_one_instant(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tenant that gives its requests the same deadline can't stop the list."""
    database = scene.running.database
    monkeypatch.setattr(listing, "AT_ONCE", 1)
    monkeypatch.setattr(listing, "MOST_READ", 1)
    due = "qinfer:{stuck#0}:due"
    client = database.store().client
    before = await client.zrange(due, 0, -1, withscores=True)
    await client.zadd(due, {member: 10**13 for member, _ in before})
    try:
        pages, following = 0, ""
        while following is not None and pages < 50:
            page = (
                await scene.get("other", "/v1/requests", model="stuck", **({"after": following} if pages else {}))
            ).json()
            following, pages = page["next"], pages + 1
    finally:
        await client.zadd(due, dict(before))

    assert pages < 50


async def test_a_viewer_sees_states_and_no_contents(scene: Scene) -> None:
    found = {one["model"]: one for one in await scene.listed("viewer")}
    one = found["fails"]

    assert one["error"] == {"code": "inference_failed", "message": ""}
    assert seen(await scene.listed("viewer", error="boom")) == []
    assert seen(await scene.listed("viewer", error="inference")) == [("fails", "failed")]
    record = await scene.get("viewer", one["links"]["self"])
    assert (record.status_code, record.json()["error"]["message"]) == (200, "")
    assert (await scene.get("viewer", one["links"]["self"] + "/timeline")).status_code == 200
    for method, path in (("GET", "result"), ("GET", "events"), ("DELETE", "self")):
        reply = await scene.clients["viewer"].request(method, one["links"][path])
        assert reply.status_code == 403
    reply = await scene.clients["viewer"].post("/v1/models/echo/requests", json=BODY)
    assert reply.status_code == 403
    reply = await scene.clients["viewer"].post("/v2/models/echo/infer", json=BODY)
    assert reply.status_code == 403


async def test_other_tenants_requests_are_not_there(scene: Scene) -> None:
    """The filter, the path and the name of the tenant lead to none of them."""
    [one] = await scene.listed("other", state="failed")

    for name in ("acme", "viewer"):
        assert (await scene.get(name, "/v1/requests", tenant="other")).status_code == 403
        for path in (one["links"]["self"], one["links"]["self"] + "/timeline"):
            assert (await scene.get(name, path)).status_code == 404
    chosen = f"/v1/models/stuck/requests/{OWN_ID}"
    assert (await scene.get("other", chosen, tenant="acme")).status_code == 404
    assert (await scene.get("other", f"{chosen}/timeline", tenant="acme")).status_code == 404
    assert (await scene.get("admin", chosen, tenant="acme")).status_code == 200


async def test_a_timeline_tells_the_steps_of_a_request(scene: Scene) -> None:
    [queued, *_], [done] = await scene.listed("acme", state="queued"), await scene.listed("acme", model="echo")

    waiting = (await scene.get("acme", queued["links"]["self"] + "/timeline")).json()
    ended = (await scene.get("acme", done["links"]["self"] + "/timeline")).json()

    assert [event["event"] for event in waiting["events"]] == ["queued"]
    assert [event["event"] for event in ended["events"]] == ["queued", "succeeded"]
    assert ended["events"][0]["at"] == done["created_at"]
    assert ended["events"][-1]["at"] == done["finished_at"]


async def test_the_client_lists_requests(scene: Scene) -> None:
    async with AsyncClient(scene.running.url, api_key=scene.keys["acme"]) as client:
        found = await client.requests(limit=3)
        failed = await client.requests(state=["failed"], model="fails")
        events = await client.timeline(failed[0].id)
        with pytest.raises(Forbidden):
            await client.requests(tenant="other")
        with pytest.raises(InvalidRequest, match="colour"):
            await client.requests(colour="red")  # type: ignore[call-arg]  # as a caller may

    assert len(found) == 3
    assert [(one.model, one.state, one.has_ended) for one in failed] == [("fails", "failed", True)]
    assert [event["event"] for event in events] == ["queued", "failed"]
