"""What a gateway writes about each request, about administrative acts, and about keys that it refuses."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import LogSettings, Settings
from qinfer.core.settings_sections import MetricsSettings
from qinfer.observe.logs import ACCESS, AUDIT
from qinfer.testing import eventually
from qinfer_api.auth import MOST_A_SECOND, RefusedKeys
from tests.support.gateway import running_gateway, settings_of
from tests.support.rpc import Rpc, infer_request, stub_of

QUESTION = {"id": "mine", "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


class Scene:
    """A gateway that writes a line for each request, and its lines."""

    def __init__(self, server: Rpc, keys: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
        self.server, self._keys, self._caplog = server, keys, caplog

    def key(self, name: str) -> dict[str, str]:
        return {"x-api-key": self._keys[name]}

    def lines(self, logger: str) -> list[dict[str, Any]]:
        return [{"event": of.message, **vars(of)} for of in self._caplog.records if of.name == logger]

    async def line(self) -> dict[str, Any]:
        """Waits for the only line of the access log."""
        await eventually(lambda: bool(self.lines(ACCESS)))
        (line,) = self.lines(ACCESS)
        return line


def settings(keys: Path, share: float = 1.0) -> Settings:
    made = settings_of(auth={"mode": "keys", "keys_file": str(keys)}, grpc={})
    return made.model_copy(update={"log": LogSettings(access=share)})


@pytest_asyncio.fixture
async def scene(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Scene]:
    for logger in (ACCESS, AUDIT):
        caplog.set_level(logging.INFO, logger)
    file = tmp_path / "keys.json"
    keys = {scope.value: add_key(file, "acme", (scope,), f"the-{scope}")[1] for scope in (Scope.INFER, Scope.ADMIN)}
    async with (
        running_gateway(settings(file)) as running,
        grpc.aio.insecure_channel(running.grpc_target) as channel,
    ):
        yield Scene(Rpc(running=running, channel=channel, stub=stub_of(channel)), keys, caplog)


@pytest_asyncio.fixture
async def client(scene: Scene) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=scene.server.running.url, headers=scene.key("infer")) as client:
        yield client


@pytest.mark.parametrize("way", ["fast", "route", "grpc"])
async def test_a_request_has_a_line(scene: Scene, client: httpx.AsyncClient, way: str) -> None:
    """Whichever way it came: who asked for what, what came of it, how much and how long; nothing of its content."""
    if way == "grpc":
        await scene.server.stub.ModelInfer(infer_request(), metadata=tuple(scene.key("infer").items()))
    else:
        body = json.dumps(QUESTION).encode()
        headers = {"expect": "100-continue"} if way == "route" else {}
        assert (await client.post("/v2/models/echo/infer", content=body, headers=headers)).status_code == 200

    line = await scene.line()
    assert (line["tenant"], line["key"], line["model"], line["version"]) == ("acme", "the-infer", "echo", 2)
    assert (line["code"], line["status"], line["responses"]) == ("ok", 200, 1)
    assert line["protocol"] == ("GRPC" if way == "grpc" else "HTTP")
    assert line["bytes_in"] == line["bytes_out"] > 0
    assert line["request_id"]
    assert line["total_ms"] > 0
    if way != "grpc":
        assert line["id"] == "mine"
    assert "[1, 2, 3, 4]" not in str(line)


async def test_refusals_have_a_line(scene: Scene, client: httpx.AsyncClient) -> None:
    """Also of those whose key is not known; a model that somebody thinks up is not named."""
    assert (await client.post("/v2/models/nothing/infer", json=QUESTION)).status_code == 404
    wrong = {"x-api-key": "wrong-key"}
    assert (await client.post("/v2/models/echo/infer", json=QUESTION, headers=wrong)).status_code == 401
    with pytest.raises(grpc.aio.AioRpcError):
        await scene.server.stub.ModelInfer(infer_request("loading"), metadata=tuple(scene.key("infer").items()))

    unknown, unauthorized, unready = scene.lines(ACCESS)
    assert (unknown["code"], unknown["status"], unknown["model"], unknown["key"]) == (
        "model_not_found",
        404,
        "",
        "the-infer",
    )
    assert (unauthorized["code"], unauthorized["status"], unauthorized["key"]) == ("unauthorized", 401, "")
    assert (unready["code"], unready["model"], unready["tenant"]) == ("model_not_ready", "loading", "acme")
    assert "wrong-key" not in str([unknown, unauthorized, unready])


async def test_a_caller_who_leaves_has_a_line(scene: Scene, client: httpx.AsyncClient) -> None:
    """Cancelled, as it is counted."""
    dispatcher = scene.server.running.gateway.dispatcher
    asking = asyncio.create_task(client.post("/v2/models/stuck/infer", json=QUESTION))
    await eventually(lambda: dispatcher.in_flight == 1)
    asking.cancel()

    line = await scene.line()
    assert (line["code"], line["model"], line["version"], line["responses"]) == ("cancelled", "stuck", 1, 0)
    assert line["request_id"]


async def test_a_stored_request_has_a_line(scene: Scene, client: httpx.AsyncClient) -> None:
    """When it is accepted, with its id."""
    reply = await client.post("/v2/models/echo/infer", json=QUESTION, headers={"prefer": "respond-async"})

    line = await scene.line()
    assert (line["code"], line["status"], line["key"]) == ("accepted", 202, "the-infer")
    assert line["request_id"] == reply.json()["id"]


async def test_a_share_of_requests_has_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of those that did not fail; all others have theirs."""
    caplog.set_level(logging.INFO, ACCESS)
    chosen = settings_of().model_copy(update={"log": LogSettings(access=1e-9)})
    async with running_gateway(chosen) as running, httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.post("/v2/models/echo/infer", json=QUESTION)).status_code == 200
        assert (await client.post("/v2/models/nothing/infer", json=QUESTION)).status_code == 404

    assert [record.__dict__["code"] for record in caplog.records if record.name == ACCESS] == ["model_not_found"]


async def test_tenants_have_metrics_where_they_are_wanted(tmp_path: Path) -> None:
    """What is answered, refused and stored counts for the tenant of the key; an unknown key for nobody."""
    file = tmp_path / "keys.json"
    key = {"x-api-key": add_key(file, "acme", (Scope.INFER,), "the-infer")[1]}
    chosen = settings(file, 0.0).model_copy(update={"metrics": MetricsSettings(tenants=5)})
    async with running_gateway(chosen) as running, httpx.AsyncClient(base_url=running.url) as client:
        for model, more in (("echo", {}), ("nothing", {}), ("echo", {"prefer": "respond-async"})):
            await client.post(f"/v2/models/{model}/infer", json=QUESTION, headers=key | more)
        await client.post("/v2/models/echo/infer", json=QUESTION, headers={"x-api-key": "wrong"})
        text = (await client.get("/metrics?scope=process")).text

    lines = {line.partition("process=")[0]: line.rpartition(" ")[2] for line in text.splitlines() if "_tenant_" in line}
    assert lines['qinfer_tenant_requests_total{model="echo",'] == "2.0"
    assert lines['qinfer_tenant_requests_total{model="",'] == "1.0"
    failed = [line for line in text.splitlines() if line.startswith("qinfer_tenant_request_failures_total{")]
    assert [(each.count('reason="model_not_found",tenant="acme"'), each[-3:]) for each in failed] == [(1, "1.0")]
    (count,) = [line for line in text.splitlines() if line.startswith("qinfer_tenant_request_duration_seconds_count")]
    assert count.endswith('tenant="acme"} 1.0')


async def test_administrative_acts_have_a_line(scene: Scene, client: httpx.AsyncClient) -> None:
    """Who did what, from where, and whether it was done; over both protocols."""
    admin = scene.key("admin")
    assert (await client.post("/v2/logging", json={"log_info": True}, headers=admin)).status_code == 200
    await client.post("/v2/repository/models/echo/unload", headers=admin)
    await client.post("/v2/repository/models/ec%0aho/load", headers=admin)
    metadata = tuple(admin.items())
    with pytest.raises(grpc.aio.AioRpcError):
        await scene.server.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), metadata=metadata)
    await scene.server.stub.LogSettings(pb.LogSettingsRequest(), metadata=metadata)  # reads

    logging_, unload, odd, load = scene.lines(AUDIT)
    assert (logging_["act"], logging_["path"], logging_["outcome"]) == ("POST", "/v2/logging", "done")
    assert (unload["path"], unload["outcome"]) == ("/v2/repository/models/echo/unload", "control_disabled")
    assert odd["path"] == "/v2/repository/models/ec\nho/load"
    assert (load["act"], load["path"], load["outcome"]) == ("gRPC", "RepositoryModelLoad/m", "control_disabled")
    assert {(line["tenant"], line["key"]) for line in (logging_, unload, load)} == {("acme", "the-admin")}
    assert {line["peer"] for line in (unload, load)} == {"127.0.0.1"}


async def test_refused_keys_have_lines_up_to_a_number(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Ten for each reason, then how many more there were; and anew."""
    keys = RefusedKeys(second_s=0.01)
    for _ in range(MOST_A_SECOND + 5):
        keys.note("unknown", "", "")
    keys.note("scope", "the-infer", "")
    await eventually(lambda: any(line["event"] == "keys refused" for line in scene.lines(AUDIT)))
    keys.note("unknown", "", "")

    lines = [(line["event"], line["reason"]) for line in scene.lines(AUDIT)]
    assert lines[:MOST_A_SECOND] == [("key refused", "unknown")] * MOST_A_SECOND
    assert lines[MOST_A_SECOND:] == [("key refused", "scope"), ("keys refused", "unknown"), ("key refused", "unknown")]
    assert scene.lines(AUDIT)[MOST_A_SECOND + 1]["without_a_line"] == 5


async def test_why_a_key_is_refused(scene: Scene, client: httpx.AsyncClient) -> None:
    """The reason, the key's id where it is known, and where it came from; a request is refused once."""
    for size in (0, 20_000):  # a large one is looked at when its head is there
        await client.post("/v2/models/echo/infer", content=b" " * size, headers={"x-api-key": "wrong"})
    await client.get("/v2/models/echo", headers={"x-api-key": "wrong"})
    await client.get("/v2/models/echo", headers={"x-api-key": ""})
    await client.post("/v2/logging", json={"log_info": True})
    stub, wrong = scene.server.stub, (("x-api-key", "wrong"),)
    for method, request, metadata in (
        (stub.ModelInfer, infer_request(), wrong),
        (stub.LogSettings, pb.LogSettingsRequest(), wrong),
        (stub.LogSettings, pb.LogSettingsRequest(), None),
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await method(request, metadata=metadata)

    told = [(line["reason"], line["key"]) for line in scene.lines(AUDIT)]
    over_grpc = [("unknown", ""), ("unknown", ""), ("missing", "")]
    assert told == [("unknown", "")] * 3 + [("missing", ""), ("scope", "the-infer"), *over_grpc]
    assert {line["peer"] for line in scene.lines(AUDIT)} == {"127.0.0.1"}
