"""A route that names an endpoint: its messages are shared among versions, and each is executed once all the same."""

from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from qinfer.errors import QinferError
from qinfer.testing import eventually
from qinfer_workers.bridge.__main__ import Bridge
from tests.support.bridge_scene import DEAD, TASKS, Broker, bridge, routes
from tests.support.endpoints import BODY, canary, declare, gateways, split
from tests.support.gateway import Running

pytestmark = pytest.mark.timeout(90)

PLAN = {"steps": [{"weight": 0.5, "least_s": 0, "least_requests": 20}, {"weight": 0.6}], "checks": [{"of": "errors"}]}


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with gateways(1) as (running,):
        yield running


def on(gateway: Running) -> Any:
    """Returns what a bridge needs of a gateway's installation."""
    return SimpleNamespace(store=gateway.store, delivery=gateway.delivery)


def message(**parameters: Any) -> bytes:
    return msgspec.json.encode({**BODY, "parameters": parameters})


def version_of(prediction: Any) -> str:
    """Returns the version that answered, which headers and body agree on, as on the name."""
    body = msgspec.json.decode(prediction.body)
    assert prediction.headers["x-qinfer-model"] == body["model_name"] == "reader"
    assert prediction.headers["x-qinfer-version"] == body["model_version"]
    return str(body["model_version"])


async def changed(one: Bridge, gateway: Running, declaration: dict[str, Any]) -> None:
    """Declares the endpoint anew, and waits until the bridge goes by it."""
    revision = await declare([gateway], "reader", declaration)
    await eventually(lambda: one._endpoints.view.revision >= revision, description="a revision at the bridge")


async def test_messages_are_shared_out_and_keep_their_version_by_a_header(gateway: Running, broker: Broker) -> None:
    await declare([gateway], "reader", split(canary(0.5), sticky="header:x-user"))
    for number in range(80):
        broker.put(message(), message_id=f"m{number}", headers={"X-User": f"u{number % 40}"})

    async with bridge(on(gateway), routes(broker.url, model="reader", sink={"carry_headers": ["X-User"]})):
        predictions = await broker.take(80)

    versions: dict[str, set[str]] = {}
    for prediction in predictions:
        versions.setdefault(prediction.headers["X-User"], set()).add(version_of(prediction))
    assert all(len(found) == 1 for found in versions.values())
    shares = Counter(next(iter(found)) for found in versions.values())
    assert set(shares) == {"1", "2"}
    assert broker.size(TASKS) == 0


async def test_a_message_that_comes_again_after_a_change_is_executed_once(gateway: Running, broker: Broker) -> None:
    await declare([gateway], "reader", split(canary(1)))
    async with bridge(on(gateway), routes(broker.url, model="reader")) as one:
        broker.put(message(), message_id="m1")
        (first,) = await broker.take()
        await changed(one, gateway, split(canary(0)))

        broker.put(message(), message_id="m1")
        (again,) = await broker.take()
        broker.put(message(), message_id="m2")
        (other,) = await broker.take()

    assert [version_of(each) for each in (first, again, other)] == ["2", "2", "1"]
    assert first.headers["x-qinfer-request-id"] == again.headers["x-qinfer-request-id"]
    assert (again.body, one.routes[0].tally.repeated) == (first.body, 1)
    assert Counter(request.version for request in gateway.requests) == {2: 1, 1: 1}


async def test_a_bridge_that_hears_of_no_changes_asks_the_stable_version(
    gateway: Running, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await declare([gateway], "reader", split(canary(1)))
    async with bridge(on(gateway), routes(broker.url, model="reader")) as one:
        broker.put(message(), message_id="m1")
        (before,) = await broker.take()
        monkeypatch.setattr(type(one._endpoints.view), "is_stale", True)
        broker.put(message(), message_id="m2")
        (during,) = await broker.take()

    assert [version_of(before), version_of(during)] == ["2", "1"]


async def test_targets_in_other_models_get_no_messages(gateway: Running, broker: Broker) -> None:
    """Requests of a route belong to one model: else a message that comes again would not be recognised."""
    await declare([gateway], "reader", split(canary(1, "späte modelle:1")))
    async with bridge(on(gateway), routes(broker.url, model="reader")):
        broker.put(message(), message_id="m1")
        (prediction,) = await broker.take()

    assert version_of(prediction) == "1"
    assert [request.model for request in gateway.requests] == ["echo"]


async def test_messages_wait_where_an_endpoint_has_moved_to_another_model(gateway: Running, broker: Broker) -> None:
    """The answers of the first model are in its outbox; so a restart is for a person to decide."""
    await declare([gateway], "reader", split())
    async with bridge(on(gateway), routes(broker.url, model="reader")) as one:
        await changed(one, gateway, split(stable="späte modelle:1"))
        broker.put(message(), message_id="m1")

        await eventually(lambda: one.routes[0].tally.received == 1)
        with pytest.raises(QinferError, match="restart the bridge"):
            one.routes[0].versions.resolve()
    assert (gateway.requests, broker.size(DEAD)) == ([], 0)


async def test_a_version_that_fails_messages_is_rolled_back(gateway: Running, broker: Broker) -> None:
    """What the bridge counts is evidence, and the rollback is done when the bridge has confirmed it, too."""
    endpoint = split({"model": "echo", "version": 2}, canary=PLAN)
    await declare([gateway], "reader", endpoint)

    async with bridge(on(gateway), routes(broker.url, model="reader")) as one, httpx.AsyncClient() as client:
        sent = 0

        async def state() -> Any:
            nonlocal sent
            for _ in range(20):
                broker.put(message(fails_in=2), message_id=f"m{sent}")
                sent += 1
            found = (await client.get(f"{gateway.url}/v1/endpoints/reader")).json()["canary"] or {}
            return found.get("state") == "rolled back"

        await eventually(state, timeout_s=60, description="a rollback")
        confirmed = await gateway.gateway._endpoints.store.trials.heard()
        assert confirmed[one.process] == gateway.gateway.dispatcher.endpoints.revision
        for number in range(20):
            broker.put(message(told_late=1), message_id=f"late{number}")
        late: list[int] = []

        def are_answered() -> bool:
            late[:] = [each.version for each in gateway.requests if "told_late" in each.parameters]
            return len(late) == 20

        await eventually(are_answered, description="the messages that came after the rollback")

    assert late == [1] * 20
    assert {request.version for request in gateway.requests} == {1, 2}
