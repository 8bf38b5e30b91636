"""From a `Webhook-Url` to the signed POST: through the outbox and the janitor, in memory and on Redis."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from qinfer.core.settings import RequestSettings, Settings, WebhookSettings
from qinfer.errors import SettingsError
from qinfer.testing import eventually
from qinfer_api.app import build
from qinfer_api.requests.webhooks import read_secret, sign
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.servers.receiver import Receiver, receiving

BODY: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


def with_webhooks(*allow: str, **changes: Any) -> Settings:
    webhooks = WebhookSettings.model_validate({"allow": allow, "secret": "s", "timeout_s": 5.0, **changes})
    return settings_of().model_copy(update={"webhooks": webhooks, "requests": RequestSettings(sweep_every_s=0.02)})


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def running(receiver: Receiver) -> AsyncIterator[Running]:
    settings = with_webhooks(f"127.0.0.1:{receiver.port}", allow_private=True)
    async with running_gateway(settings) as running:
        yield running


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as opened:
        yield opened


@pytest.mark.parametrize(("model", "state"), [("echo", "succeeded"), ("fails", "failed"), ("loading", "expired")])
async def test_every_end_is_told(client: httpx.AsyncClient, receiver: Receiver, model: str, state: str) -> None:
    """Once, signed, with the path of the result; the record says that it was."""
    timeout = "0.05" if model == "loading" else "60"
    headers = {"webhook-url": receiver.url(), "request-timeout": timeout}
    accepted = (await client.post(f"/v1/models/{model}/requests", json=BODY, headers=headers)).json()
    self_url = accepted["links"]["self"]

    async def is_delivered() -> bool:
        return bool((await client.get(self_url)).json()["webhook"]["state"] == "delivered")

    await eventually(is_delivered)

    ((_, told, body),) = receiver.received
    about = json.loads(body)
    assert (about["type"], about["data"]["id"], about["data"]["model"]) == (f"request.{state}", accepted["id"], model)
    assert about["data"]["result_url"] == accepted["links"]["result"]
    assert told["webhook-signature"] == sign(b"s", told["webhook-id"], int(told["webhook-timestamp"]), body)
    assert (await client.get(about["data"]["result_url"])).headers["qinfer-request-state"] == state


async def test_a_cancelled_request_is_told_too(client: httpx.AsyncClient, receiver: Receiver) -> None:
    """Another's DELETE is news to whoever waits for the webhook."""
    url = "/v1/models/stuck/requests"
    accepted = (await client.post(url, json=BODY, headers={"webhook-url": receiver.url()})).json()
    assert accepted["webhook"] == {"url": receiver.url(), "state": "waiting"}

    await client.delete(accepted["links"]["self"])

    await eventually(lambda: bool(receiver.received))
    assert json.loads(receiver.received[0].body)["type"] == "request.cancelled"


async def test_a_private_target_is_refused_at_once(receiver: Receiver) -> None:
    """Before the request is accepted."""
    settings = with_webhooks(f"127.0.0.1:{receiver.port}")
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        headers = {"webhook-url": receiver.url()}
        reply = await client.post("/v1/models/stuck/requests", json=BODY, headers=headers)

        assert (reply.status_code, await running.depth("stuck")) == (400, 0)
        assert reply.json()["error"] == (
            "webhook host '127.0.0.1' leads into a private network; QINFER_WEBHOOKS__ALLOW_PRIVATE allows such hosts"
        )


async def test_webhooks_without_a_secret_are_a_wrong_setting() -> None:
    """Said at the start, before anything is opened."""
    with pytest.raises(SettingsError, match="QINFER_WEBHOOKS__SECRET is not set"):
        await build(with_webhooks("example.org", secret=""))
    assert read_secret(with_webhooks("example.org").webhooks) == b"s"
