"""`/v1/operations`: changes of many requests and dead letters by a filter, by which keys, and where a gateway dies."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer.core.messages import InferRequest
from qinfer.errors import BrokerUnavailable, CorruptEntry
from qinfer.observe.logs import AUDIT
from qinfer.queue.dead_letters import head_of
from qinfer.queue.entries import Lane, RequestState, Settlement
from qinfer.queue.operations import Operation, OperationProgress
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request
from qinfer_api.requests import operations
from qinfer_api.requests.records import failed_outcome
from tests.support.gateway import TenantScene, declare_more
from tests.support.requests import acceptance

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


class Scene(TenantScene):
    """A gateway with models of which each test has its own."""

    _models = 0

    async def model(self, *, more: str = "") -> str:
        self._models += 1
        name = f"own{self._models}"
        await declare_more(self.running, name, is_ready=True, more=more)
        await self.running.refresh()
        return name

    async def accept(self, model: str, count: int, tenant: str = "acme") -> list[str]:
        """Stores requests that no worker takes."""
        names = [f"{tenant}-{number:03}@{tenant}" for number in range(count)]
        for name in names:
            frame = encode_request(InferRequest(model=model, inputs=(), id=name, version=1, tenant=tenant))
            changes = {"frame": frame, "tenant": tenant, "timeout_s": 600.0}
            await self.running.delivery.requests.accept(acceptance(name, model, **changes))
        return names

    async def bury(self, model: str, count: int, tenant: str = "acme", reason: str = "out of memory") -> None:
        """Stores requests, and makes each a dead letter that has failed."""
        delivery, lane = self.running.delivery, Lane(model, 1)
        await self.accept(model, count, tenant)
        while leases := await delivery.fetch([lane], "burier", 64, 0.0):
            for lease in leases:
                request = head_of(lease.frame)
                assert request is not None
                await delivery.bury(lease, request.id, "inference_failed", reason)
                address = acceptance(request.id, model).address
                outcome = failed_outcome(address, RequestState.FAILED, BrokerUnavailable(reason))
                await delivery.requests.settle([Settlement(address=address, outcome=outcome)])

    async def ask(self, name: str, action: str, *, dry_run: bool = False, **chosen: Any) -> httpx.Response:
        body = {"action": action, "filter": chosen, "dry_run": dry_run}
        return await self.clients[name].post("/v1/operations", json=body)

    async def done(self, name: str, operation: dict[str, Any]) -> dict[str, Any]:
        found = operation

        async def is_over() -> bool:
            nonlocal found
            found = (await self.clients[name].get(f"/v1/operations/{operation['id']}")).json()
            return bool(found["state"] != "running")

        await eventually(is_over, description="the end of the operation")
        return found

    async def operate(self, name: str, action: str, *, dry_run: bool = False, **chosen: Any) -> dict[str, Any]:
        reply = await self.ask(name, action, dry_run=dry_run, **chosen)
        assert reply.status_code == 202, reply.text
        return await self.done(name, reply.json())

    async def states(self, model: str) -> dict[str, int]:
        reply = await self.clients["admin"].get("/v1/requests", params={"model": model, "limit": 1000})
        counts: dict[str, int] = {}
        for one in reply.json()["requests"]:
            counts[one["state"]] = counts.get(one["state"], 0) + 1
        return counts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with Scene.opened(tmp_path_factory.mktemp("keys") / "keys.json") as scene:
        yield scene


async def test_a_dry_run_counts_and_changes_nothing(scene: Scene) -> None:
    model = await scene.model()
    names = await scene.accept(model, 120)

    found = await scene.operate("acme", "cancel", dry_run=True, model=model, id_prefix="acme-1")

    assert (found["found"], found["changed"], found["refused"]) == (20, 0, 0)
    assert found["sample"] == [name.partition("@")[0] for name in names[100:110]]
    assert await scene.states(model) == {"queued": 120}


async def test_requests_are_cancelled_by_a_filter(scene: Scene) -> None:
    model = await scene.model()
    await scene.accept(model, 230)
    await scene.accept(model, 5, "other")

    found = await scene.operate("acme", "cancel", model=model)

    assert (found["state"], found["found"], found["changed"]) == ("done", 230, 230)
    assert await scene.states(model) == {"queued": 5, "cancelled": 230}
    assert await scene.running.depth(model) == 5
    again = await scene.operate("acme", "cancel", model=model)
    assert (again["found"], again["changed"]) == (0, 0)


async def test_dead_letters_are_replayed_by_a_filter(scene: Scene) -> None:
    model = await scene.model()
    await scene.bury(model, 130)
    await scene.bury(model, 4, "other")

    dry = await scene.operate("acme", "replay", dry_run=True, model=model, error="MEMORY")
    none = await scene.operate("acme", "replay", model=model, error="no such text")
    found = await scene.operate("acme", "replay", model=model, error="out of")

    assert (dry["found"], dry["changed"], none["changed"]) == (130, 0, 0)
    assert (found["found"], found["changed"]) == (130, 130)
    assert await scene.states(model) == {"queued": 130, "failed": 4}
    assert await scene.running.depth(model) == 130


async def test_two_operations_replay_each_letter_once(scene: Scene) -> None:
    model = await scene.model()
    await scene.bury(model, 150)

    first, second = [(await scene.ask("admin", "replay", model=model)).json() for _ in range(2)]
    ended = [await scene.done("admin", each) for each in (first, second)]

    assert sum(each["changed"] for each in ended) == 150
    assert await scene.running.depth(model) == 150


async def test_results_are_purged_and_letters_discarded(scene: Scene) -> None:
    model = await scene.model()
    await scene.bury(model, 12)

    purged = await scene.operate("acme", "purge", model=model, state=["failed"])
    discarded = await scene.operate("acme", "discard", model=model)

    assert (purged["changed"], discarded["changed"]) == (12, 12)
    assert await scene.running.delivery.dead_letters.count(model) == 0
    assert await scene.states(model) == {"failed": 12}


async def test_an_operation_leaves_later_requests_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await scene.model()
    await scene.accept(model, 3)
    operations = scene.running.gateway._operations
    monkeypatch.setattr(operations._operations, "lead", _never)
    asked = (await scene.ask("acme", "cancel", model=model)).json()
    later = await scene.clients["acme"].post(f"/v1/models/{model}/requests", json=BODY)
    monkeypatch.undo()

    found = await scene.done("acme", asked)

    assert (later.status_code, found["changed"]) == (202, 3)
    assert await scene.states(model) == {"queued": 1, "cancelled": 3}


async def _never(*_: Any) -> bool:
    return False


async def _always(*_: Any) -> bool:
    return True


@pytest.fixture
def deaths(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations at whose every other portion the gateway has died, before it noted the portion."""
    operations, found, saved = scene.running.gateway._operations._operations, list[str](), 0
    save = operations.save

    async def dies(operation: Operation, progress: OperationProgress) -> bool:
        nonlocal saved
        saved += 1
        if saved % 2:
            found.append(operation.id)
            raise BrokerUnavailable("killed")
        return await save(operation, progress)

    monkeypatch.setattr(operations, "save", dies)
    return found


async def test_an_operation_goes_on_where_its_gateway_died(scene: Scene, deaths: list[str]) -> None:
    """A portion that was changed and not noted is repeated, and counts once."""
    model = await scene.model()
    await scene.accept(model, 250)

    found = await scene.operate("acme", "cancel", model=model)

    assert (found["changed"], deaths.count(found["id"]) > 1) == (250, True)
    assert await scene.states(model) == {"cancelled": 250}


async def test_a_dry_run_counts_exactly_where_its_gateway_died(scene: Scene, deaths: list[str]) -> None:
    model = await scene.model()
    await scene.accept(model, 250)

    found = await scene.operate("acme", "cancel", dry_run=True, model=model)

    assert (found["found"], deaths.count(found["id"]) > 1) == (250, True)


async def test_replays_wait_while_half_of_a_lane_is_full(scene: Scene) -> None:
    model = await scene.model(more='parameters { key: "qinfer.lane_capacity" value { string_value: "150" } }')
    await scene.bury(model, 130)
    asked = (await scene.ask("acme", "replay", model=model)).json()

    await eventually(lambda: _depth_is(scene, model, 100), description="the first portion")
    await scene.running.gateway._operations.round()
    assert await scene.running.depth(model) == 100
    await scene.operate("acme", "cancel", model=model)

    found = await scene.done("acme", asked)
    assert found["changed"] == 130


async def _depth_is(scene: Scene, model: str, depth: int) -> bool:
    return await scene.running.depth(model) == depth


async def test_dead_letters_are_listed_and_read(scene: Scene) -> None:
    """By their tenant and administrators; a viewer reads neither reasons nor tensors."""
    model = await scene.model()
    await scene.bury(model, 3)
    await scene.bury(model, 2, "other", "no such file")

    async def listed(name: str, **params: Any) -> list[dict[str, Any]]:
        found, following = [], ""
        while following is not None:
            more = {"after": following} if following else {}
            reply = await scene.clients[name].get("/v1/dead-letters", params={"model": model, **params, **more})
            found += reply.json()["dead_letters"]
            following = reply.json()["next"]
        return found

    own, others, everything = [await listed(name, limit=2) for name in ("acme", "other", "admin")]
    viewed = await listed("viewer")

    assert (len(own), len(others), len(everything)) == (3, 2, 5)
    assert {one["reason"] for one in own} == {"out of memory"}
    assert {one["tenant"] for one in everything} == {"acme", "other"}
    assert {(one["code"], one["reason"]) for one in viewed} == {("inference_failed", "")}
    assert (await listed("viewer", error="memory"), await listed("acme", error="file")) == ([], [])
    path = f"/v1/dead-letters/{model}/{own[0]['id']}"
    statuses = [(await scene.clients[name].get(path)).status_code for name in ("acme", "admin", "other", "viewer")]
    inputs = [(await scene.clients[n].get(f"{path}/inputs")).status_code for n in ("acme", "other", "viewer")]
    assert (statuses, inputs) == ([200, 200, 404, 403], [200, 404, 403])
    unknown = await scene.clients["admin"].get(f"/v1/dead-letters/{model}/nonsense")
    assert unknown.status_code == 404


async def test_the_inputs_of_a_dead_letter_are_shown(scene: Scene) -> None:
    model = await scene.model()
    record = (await scene.clients["acme"].post(f"/v1/models/{model}/requests", json=BODY)).json()
    delivery = scene.running.delivery
    [lease] = await delivery.fetch([Lane(model, 1)], "burier", 64, 0.0)
    await delivery.bury(lease, record["id"], "inference_failed", "no")
    [letter] = await delivery.dead_letters.list(model)

    found = await scene.clients["acme"].get(f"/v1/dead-letters/{model}/{letter.id}/inputs")

    [tensor] = found.json()["outputs"]
    assert (tensor["name"], tensor["data"]) == ("x", [1.0, 2.0, 3.0, 4.0])


async def test_an_operation_can_be_stopped(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await scene.model()
    await scene.accept(model, 3)
    monkeypatch.setattr(scene.running.gateway._operations._operations, "lead", _never)
    asked = (await scene.ask("acme", "cancel", model=model)).json()

    stopped = await scene.clients["acme"].delete(f"/v1/operations/{asked['id']}")
    monkeypatch.undo()

    assert (stopped.status_code, stopped.json()["state"]) == (200, "stopped")
    assert await scene.states(model) == {"queued": 3}


async def test_a_tenant_leaves_operations_to_others(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await scene.model()
    monkeypatch.setattr(scene.running.gateway._operations._operations, "lead", _never)
    monkeypatch.setattr(operations, "MOST_OPEN", 3)

    asked = [await scene.ask(name, "cancel", model=model) for name in ("acme", "acme", "acme", "other", "admin")]
    monkeypatch.undo()

    assert [reply.status_code for reply in asked] == [202, 202, 503, 202, 503]
    assert "operations are running" in asked[2].json()["error"]
    for reply in asked:
        if reply.status_code == 202:
            await scene.done("admin", reply.json())


async def test_a_dead_letter_is_shown_without_reading_its_tensors(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await scene.model()
    await scene.bury(model, 1)
    (letter,) = (await scene.clients["acme"].get("/v1/dead-letters", params={"model": model})).json()["dead_letters"]

    async def show(*_: Any) -> None:
        raise AssertionError("the tensors are read")

    monkeypatch.setattr(scene.running.delivery.dead_letters, "show", show)
    monkeypatch.setattr(scene.running.gateway._delivery.dead_letters, "show", show)
    path = f"/v1/dead-letters/{model}/{letter['id']}"

    assert (await scene.clients["acme"].get(path)).json()["code"] == "inference_failed"
    assert (await scene.clients["other"].get(f"{path}/inputs")).status_code == 404


async def test_tenants_change_and_see_their_own_alone(scene: Scene) -> None:
    model = await scene.model()
    await scene.bury(model, 2, "other")
    await scene.accept(model, 2)

    forbidden = await scene.ask("other", "cancel", model=model, tenant="acme")
    viewed = await scene.ask("viewer", "cancel", dry_run=True, model=model)
    cancelled = await scene.operate("other", "cancel", model=model)
    replayed = await scene.operate("acme", "replay", model=model)
    own = (await scene.clients["other"].get("/v1/operations")).json()["operations"]
    others = await scene.clients["acme"].get(f"/v1/operations/{cancelled['id']}")
    stopped = await scene.clients["acme"].delete(f"/v1/operations/{cancelled['id']}")
    shown = await scene.clients["viewer"].get(f"/v1/operations/{replayed['id']}")
    unstopped = await scene.clients["viewer"].delete(f"/v1/operations/{replayed['id']}")

    assert (forbidden.status_code, viewed.status_code) == (403, 403)
    assert (cancelled["found"], replayed["found"]) == (0, 0)
    assert {one["filter"]["tenant"] for one in own} == {"other"}
    assert (others.status_code, stopped.status_code) == (404, 404)
    assert (shown.status_code, unstopped.status_code) == (200, 403)
    assert (cancelled["total"], cancelled["looked"]) == (None, None)
    everything = await scene.operate("admin", "cancel", model=model)
    assert (everything["changed"], everything["total"]) == (2, 2)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"action": "cancel", "filter": {}}, "names a model"),
        ({"action": "cancel", "filter": {"model": "a/b"}}, "names a model"),
        ({"action": "replay", "filter": {"model": "echo", "state": ["failed"]}}, "no state"),
        ({"action": "cancel", "filter": {"model": "echo", "colour": "red"}}, "colour"),
        ({"action": "cancel", "filter": {"model": "echo", "older_than_s": -1}}, "older_than_s"),
        ({"action": "forget", "filter": {"model": "echo"}}, ""),
    ],
)
async def test_a_wrong_operation_is_refused(scene: Scene, body: dict[str, Any], text: str) -> None:
    reply = await scene.clients["acme"].post("/v1/operations", json=body)

    assert reply.status_code == 400
    assert text in reply.json()["error"]


async def test_unknown_operations_are_not_found(scene: Scene) -> None:
    for name in ("nonsense", "01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.echo", "01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.a}b"):
        assert (await scene.clients["admin"].get(f"/v1/operations/{name}")).status_code == 404


@pytest_asyncio.fixture(loop_scope="module")
async def damaged(scene: Scene) -> AsyncIterator[str]:
    """The id of an open operation whose record is damaged."""
    model = await scene.model()
    operation_id: str = (await scene.ask("acme", "replay", dry_run=True, model=model)).json()["id"]
    client, key = scene.running.store.client, f"qinfer:{{{model}#0}}:operation:{operation_id}"
    await client.hset(key, mapping={"state": "running", "about": "{"})
    await client.zadd("qinfer:operations:open", {operation_id: 0})
    yield operation_id
    await client.delete(key)


async def test_a_damaged_operation_stops_no_other(scene: Scene, damaged: str) -> None:
    model = await scene.model()
    await scene.accept(model, 2)

    found = await scene.operate("acme", "cancel", model=model)
    listed = (await scene.clients["acme"].get("/v1/operations")).json()["operations"]

    assert found["changed"] == 2
    assert found["id"] in [one["id"] for one in listed]
    assert damaged not in [one["id"] for one in listed]


async def test_a_damaged_operation_delays_no_other(scene: Scene, damaged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next portion of another follows at once."""
    model, own = await scene.model(), scene.running.gateway._operations
    await scene.accept(model, 120)
    second = operations.RequestOperations(own._requests, "second")
    monkeypatch.setattr(own._operations, "lead", _never)
    monkeypatch.setattr(second._operations, "lead", _always)
    asked = (await scene.ask("acme", "cancel", model=model)).json()

    busy = [await second.round() for _ in range(2)]

    assert busy == [True, True]
    assert (await scene.done("acme", asked))["changed"] == 120
    with pytest.raises(CorruptEntry):
        await second.round()


async def test_operations_are_audited(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    model = await scene.model()
    await scene.accept(model, 2)

    with caplog.at_level("INFO", logger=AUDIT):
        found = await scene.operate("acme", "cancel", model=model)

    acts = [record for record in caplog.records if record.message == "administrative act"]
    [ended] = [record for record in caplog.records if record.message == "operation done"]
    assert [(act.act, act.path, act.key) for act in acts] == [("POST", "/v1/operations", "acme")]  # type: ignore[attr-defined]
    told = (ended.operation, ended.action, ended.model, ended.key, ended.changed)  # type: ignore[attr-defined]
    assert told == (found["id"], "cancel", model, "acme", 2)
