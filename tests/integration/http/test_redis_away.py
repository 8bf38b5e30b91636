"""Every operation while Redis is away: what needs it is refused at once, with when to try again, and the rest works."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.settings import (
    BulkSettings,
    GrpcSettings,
    RedisSettings,
    RepositorySettings,
    Settings,
    StoreSettings,
)
from qinfer.core.settings_sections import TraceSettings
from qinfer.errors import BrokerUnavailable
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.lanes import Queue
from qinfer.submission.response_cache import CachedResponses
from qinfer.testing import eventually
from tests.integration.console.test_console_pages import PAGES, token_of
from tests.integration.labeling.test_label_studio_push import event, settings_for
from tests.support.endpoints import BODY, declare, split
from tests.support.gateway import Running, running_gateway
from tests.support.rpc import infer_request
from tests.support.servers.label_studio_server import LabelStudioServer, label_studio
from tests.support.servers.servers import RedisServer, system_redis

COMMAND_TIMEOUT_S = 3600.0
HANGS_S = 15.0
"""An answer that takes so long has waited for Redis."""
INFERENCE = ("infer", "infer_stream", "generate", "generate_stream", "requests")
PLACES = {
    "version": "1",
    "region": "r",
    "endpoint": "split",
    "decision": "promote",
    "project": "12",
    "task": "1",
    "job_id": "01JX0000000000000000000000",
}
TEXTS = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}]}
STEP = {**BODY, "parameters": {"sequence_id": 7, "sequence_start": True}}
FLOW = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
LARGE = {"inputs": [{"name": "x", "shape": [600, 600], "datatype": "FP32", "data": [0.5] * 360_000}]}
NEED_NO_REDIS = (
    "GET /v2/health/live",
    "GET /metrics",
    "GET /ping",
    "GET /v1/models/{model}",
    "GET /v1/models/{model}/metadata",
    "GET /v1/workers",
    "GET /v2",
    "GET /v2/models/{model}",
    "GET /v2/models/{model}/config",
    "GET /v2/models/{model}/ready",
    "GET /v2/health/ready",
    "GET /label-studio/{model}/health",
    "GET /label-studio/{model}/versions",
    "POST /label-studio/{model}/setup",
)
"""What a gateway answers by what it has seen last."""
GRPC_NEEDS_NO_REDIS = {"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig"}
KINDS: list[tuple[str, str, Any, dict[str, str]]] = [
    ("stateful", "/v2/models/{model}/infer", STEP, {}),
    ("wide", "/v2/models/{model}/infer", LARGE, {}),
    ("wide", "/v1/models/{model}/requests", LARGE, {}),
    ("bounded", "/v2/models/{model}/infer", BODY, {}),
    ("levels", "/v2/models/{model}/infer", {**BODY, "parameters": {"priority": 3}}, {}),
    ("text", "/v2/models/{model}/infer", TEXTS, {}),
    ("flow", "/v1/models/{model}/infer_stream", FLOW, {}),
    ("flow", "/v2/models/{model}/generate_stream", {"x": [1]}, {}),
    ("split", "/v2/models/{model}/infer", BODY, {}),
    ("split", "/v2/models/{model}/generate", {"x": [1, 2, 3, 4]}, {}),
    ("split", "/v1/models/{model}/requests", BODY, {"idempotency-key": "one"}),
    ("echo", "/v1/models/{model}/requests", BODY, {"idempotency-key": "one"}),
    ("echo", "/v1/models/{model}/requests", BODY, {"prefer": "wait=10"}),
    ("echo", "/v2/models/{model}/infer", BODY, {"prefer": "respond-async"}),
]
"""Model, route, body and headers of requests that go different ways."""


class Away:
    """A gateway without Redis."""

    def __init__(self, running: Running, client: httpx.AsyncClient, bodies: dict[str, Any], request_id: str) -> None:
        self.running, self.client = running, client
        self._bodies = bodies
        self.places = {
            **PLACES,
            **dict.fromkeys(("request_id", "letter_id", "operation_id", "recording", "worker"), request_id),
        }

    async def operations(self) -> list[tuple[str, str]]:
        """Returns method and path of each."""
        paths = (await self.client.get("/openapi.json")).json()["paths"]
        for path, methods in paths.items():
            if path.startswith("/models/"):
                example = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["example"]
                self._bodies[path.rpartition("/")[2]] = example
        self._bodies["{model}"] = self._bodies["echo"]
        del paths["/models/half"]  # JSON can't carry FP16
        return [(method.upper(), path) for path, methods in paths.items() for method in methods]

    async def call(self, method: str, path: str, model: str = "echo", body: Any = None, **headers: str) -> str:
        """Returns a status, and whether the answer says when to try again."""
        last = path.rpartition("/")[2]
        if body is None and last in INFERENCE:
            body = {"x": [1, 2, 3, 4]} if last.startswith("generate") else BODY
        model = "text" if "label-studio" in path else model
        model = "stuck" if "{request_id}" in path else model
        target = path.format(model=model, **self.places)
        try:
            reply = await self.client.request(method, target, json=body or self._bodies.get(last), headers=headers)
        except httpx.TimeoutException:
            return "hangs"
        return f"{reply.status_code}{' later' if 'retry-after' in reply.headers else ''}"


def bodies_of(data: Path, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what operations take, by the end of their path."""
    job = {"model": "echo", "inputs": [f"file://{data}/rows.parquet"], "output": {"url": f"file://{data}/out"}}
    return {
        "jobs": job,
        "validate": job,
        "webhook": event(tasks),
        "predict": {"tasks": tasks, "project": "12.1"},
        "setup": {"project": "12.1", "schema": "<View/>"},
        "logging": {"log_verbose_level": 1},
        "setting": {"trace_level": ["TIMESTAMPS"]},
        "{endpoint}": split(),
        "{version}": {"x": [[1, 2, 3, 4]]},
        "operations": {"action": "cancel", "filter": {"model": "echo"}},
        "{model}:predict": {"instances": [[1, 2, 3, 4]]},
        "{version}:predict": {"instances": [[1, 2, 3, 4]]},
    }


def settings_of_all(studio: LabelStudioServer, redis: RedisSettings, place: Path) -> Settings:
    """Returns settings with every feature."""
    (place / "traces").mkdir()
    return settings_for(studio, place / "mappings").model_copy(
        update={
            "redis": redis,
            "grpc": GrpcSettings(port=0),
            "stores": StoreSettings(allow=(f"file://{place}",)),
            "bulk": BulkSettings(broker_url=redis.url),
            "repository": RepositorySettings(control_mode="explicit", load_timeout_s=COMMAND_TIMEOUT_S),
            "trace": TraceSettings(file=str(place / "traces" / "t.json")),
            "allow_client_shm": True,
        }
    )


@pytest.fixture
async def away(tmp_path: Path) -> AsyncIterator[Away]:
    """A gateway with every feature, whose Redis has just gone."""
    home = tmp_path / "redis"
    home.mkdir()
    pq.write_table(pa.table({"x": pa.array([[1.0, 2.0, 3.0, 4.0]], pa.list_(pa.float32()))}), tmp_path / "rows.parquet")
    with RedisServer(system_redis(), home, "--appendonly", "yes") as server:
        redis = RedisSettings(url=SecretStr(server.url), command_timeout_s=COMMAND_TIMEOUT_S)
        queue, store = await Queue.connect(redis), ControlStore(admin_client(redis))
        async with label_studio() as studio:
            bodies = bodies_of(tmp_path, studio.add("pos"))
            async with (
                running_gateway(settings_of_all(studio, redis, tmp_path), queue, store) as running,
                httpx.AsyncClient(base_url=running.url, timeout=HANGS_S) as client,
            ):
                await declare([running], "split", split())
                stored = (await client.post("/v1/models/stuck/requests", json=BODY)).json()["id"]
                async with gone(server, queue):
                    yield Away(running, client, bodies, stored)


@contextlib.asynccontextmanager
async def gone(server: RedisServer, queue: Queue) -> AsyncIterator[None]:
    """Has no Redis during the block."""
    await asyncio.to_thread(server.stop)
    await eventually(lambda: not any(link.is_up for link in queue.router.nodes()))
    try:
        yield
    finally:
        await asyncio.to_thread(server.start)
        await eventually(lambda: any(link.is_up for link in queue.router.nodes()))


async def test_each_operation_is_refused_at_once(away: Away) -> None:
    """But for those that a gateway answers by what it has seen, or that concern it alone."""
    found = {f"{method} {path}": await away.call(method, path) for method, path in await away.operations()}

    local = {
        name for name in found if "sharedmemory" in name or name.replace("/versions/{version}", "") in NEED_NO_REDIS
    }
    assert {name: status for name, status in found.items() if name not in local and status != "503 later"} == {}
    assert {name: found[name] for name in local if found[name][0] not in "24" and "cuda" not in name} == {}
    assert "hangs" not in found.values()


async def test_each_kind_of_request_is_refused_at_once(away: Away) -> None:
    found = [await away.call("POST", route, model, body, **headers) for model, route, body, headers in KINDS]

    assert [kind[:2] for kind, status in zip(KINDS, found, strict=True) if status != "503 later"] == []


async def test_pages_of_the_console_are_refused_at_once(away: Away) -> None:
    """Other pages show what the gateway has seen last."""
    request_id = away.places["request_id"]
    browser = httpx.AsyncClient(base_url=f"{away.running.url}/console/", timeout=HANGS_S, follow_redirects=True)
    async with browser:
        overview = await browser.get("")
        pages = [*PAGES, "history", "jobs/x", f"requests/{request_id}", f"operations/{request_id}", "letters/echo/1-0"]
        found = dict(zip(pages, await asyncio.gather(*map(browser.get, pages)), strict=True))
        form = {"csrf": token_of((await browser.get("try/echo")).text), "do": "run", "in:x": "1, 2, 3, 4"}
        acted = [await browser.post(page, data=form) for page in ("try/echo", "jobs/x", "letters?model=echo")]

    assert "Redis does not answer" in overview.text
    shown = {page for page, reply in found.items() if reply.status_code == 200}
    assert shown == {"", "try", "try/echo", "tenants"}
    assert {reply.status_code for page, reply in found.items() if page not in shown} == {503}
    assert [reply.status_code for reply in acted] == [503] * 3


def message(method: Any) -> Any:
    """Returns a message that a call takes."""
    if method.name == "ModelInfer":
        return infer_request()
    sent = getattr(pb, method.input_type.name)()
    for name in ("name", "model_name"):
        if name in sent.DESCRIPTOR.fields_by_name:
            setattr(sent, name, "echo")
    if method.name == "LogSettings":
        sent.settings["log_verbose_level"].uint32_param = 1
    return sent


async def test_each_call_of_grpc_is_refused_at_once(away: Away) -> None:
    methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    asked = [one for one in methods if one.name != "ModelStreamInfer" and "SharedMemory" not in one.name]
    found = {}
    async with grpc.aio.insecure_channel(away.running.grpc_target) as channel:
        for method in asked:
            path = f"/inference.GRPCInferenceService/{method.name}"
            call = channel.unary_unary(path, lambda one: one.SerializeToString(), None)
            found[method.name] = (await call(message(method), timeout=HANGS_S).code()).name

    assert found == {name: "OK" if name in GRPC_NEEDS_NO_REDIS else "UNAVAILABLE" for name in found}


async def test_requests_of_a_stream_of_grpc_are_refused_at_once(away: Away) -> None:
    step = infer_request("stateful")
    step.parameters["sequence_id"].int64_param = 7
    step.parameters["sequence_start"].bool_param = True
    async with grpc.aio.insecure_channel(away.running.grpc_target) as channel:
        call = cast(Any, channel).stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )(timeout=HANGS_S)
        answers = []
        for request in (infer_request(), step, infer_request("flow")):
            await call.write(request)
            answers.append((await call.read()).error_message)
        call.cancel()

    assert ["connection to the queue is down" in answer for answer in answers] == [True] * 3, answers


async def test_a_cached_response_is_not_waited_for(away: Away) -> None:
    """It is a miss, and what executes in its place is refused."""
    cache = CachedResponses(away.running.delivery.router, away.running.delivery.clock, 2**20, 60.0)

    with pytest.raises(BrokerUnavailable):
        await cache.find(b"key")
