"""The gateway from its start to its end: what it opens it closes, and it does not live on by half."""

import asyncio
import socket

import grpc
import httpx
import pytest

from qinfer.core.settings import AuthSettings, GrpcSettings, HttpSettings, Settings
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import SettingsError
from qinfer.models.state import GATEWAY, State, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.testing import eventually
from qinfer_api.app import Gateway, bind, build
from qinfer_api.rpc.server import open_port
from tests.support.gateway import Running, declare_models, running_gateway, settings_of
from tests.support.rpc import infer_request, rpc, value_of
from tests.support.servers.servers import Database, free_port

BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


async def test_a_start_that_fails_leaves_no_port_open() -> None:
    """The port of gRPC is opened last: the others are given back."""
    http, metrics = free_port(), free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(
            http=HttpSettings(port=http),
            grpc=GrpcSettings(port=taken.getsockname()[1]),
            metrics=MetricsSettings(port=metrics),
            auth=AuthSettings(),
        )
        with pytest.raises(SettingsError, match="QINFER_GRPC__PORT"):
            await build(settings)

    for port in (http, metrics):
        socket.create_server(("127.0.0.1", port)).close()


async def test_nobody_waits_for_a_gateway_that_does_not_serve_yet(database: Database) -> None:
    """One that is ended before it serves would reset the connections of those who do."""
    settings, store = settings_of(grpc={}), database.store()
    gateway = Gateway(settings, await database.delivery(), store, bind(settings.http), rpc=open_port(settings))
    assert gateway.rpc is not None
    ports = [int(url.rpartition(":")[2]) for url in (gateway.url, gateway.rpc.url)]
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    gateway.stop()
    await gateway.serve()

    assert not gateway.started.is_set()


class _Broken(ControlStore):
    """Has a defect, from a moment on."""

    is_broken = False

    async def settings(self) -> dict[str, str]:
        if self.is_broken:
            raise RuntimeError("a defect")
        return await super().settings()


async def test_a_part_that_dies_ends_the_whole(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its error; nobody is accepted any more, by neither protocol."""
    monkeypatch.setattr("qinfer.models.store.FOLLOW_EVERY_S", 0.01)
    settings, store = settings_of(grpc={}), database.store(_Broken)
    listener = bind(settings.http)
    gateway = Gateway(settings, await database.delivery(), store, listener, rpc=open_port(settings))
    assert gateway.rpc is not None
    ports = [int(url.rpartition(":")[2]) for url in (gateway.url, gateway.rpc.url)]
    serving = asyncio.create_task(gateway.serve())
    await gateway.started.wait()

    store.is_broken = True
    with pytest.raises(ExceptionGroup) as raised:
        await serving

    assert raised.group_contains(RuntimeError, match="a defect")
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


async def test_who_waits_is_told_when_a_part_dies(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 instead of a connection that breaks off."""
    monkeypatch.setattr("qinfer.models.store.FOLLOW_EVERY_S", 0.01)
    settings, store, delivery = settings_of(), database.store(_Broken), await database.delivery()
    gateway = Gateway(settings, delivery, store, bind(settings.http))
    await declare_models(store, delivery)
    serving = asyncio.create_task(gateway.serve())
    await gateway.started.wait()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        asking = asyncio.create_task(client.post("/v2/models/stuck/infer", json=BODY))
        await eventually(lambda: gateway.dispatcher.in_flight == 1, description="a request waits")

        store.is_broken = True
        await asyncio.wait([serving])
        reply = await asking

    assert isinstance(serving.exception(), ExceptionGroup)
    request_id = reply.headers["qinfer-request-id"]
    assert (reply.status_code, reply.json()["error"]) == (503, f"[request id: {request_id}] Server exiting")


async def _beat(running: Running) -> None:
    """Lets a worker say that it serves every model of the desired state; the gateway looks before and after."""
    await running.refresh()
    wishes, stored = await running.store.desired(), running.gateway.catalog
    models = {
        name: {version: VersionState(State.READY, wish.generation) for version in stored.status(name).versions}
        for name, wish in wishes.items()
    }
    await running.store.heartbeat(WorkerRecord(id="w1", started_at=0.0, models=models), ttl_s=3600)
    await running.refresh()


async def test_redis_without_its_data() -> None:
    """Who waits is told to try again, the server is not ready until all is written again, and then it answers."""
    async with (
        rpc(repository={"strict_readiness": True}) as server,
        httpx.AsyncClient(base_url=server.running.url, timeout=30.0) as client,
    ):
        running = server.running
        await _beat(running)
        before = await client.get("/v2/health/ready")
        by_http = asyncio.create_task(client.post("/v2/models/stuck/infer", json=BODY))
        by_grpc = server.stub.ModelInfer(infer_request("stuck"))
        await eventually(lambda: running.gateway.dispatcher.in_flight == 2, description="requests wait")

        await running.store.client.flushdb()
        refused = await by_http
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await by_grpc
        await running.refresh()
        meanwhile = await client.get("/v2/health/ready")
        await _beat(running)
        after = await client.get("/v2/health/ready")
        answers = [await client.post("/v2/models/echo/infer", json=BODY), await server.stub.ModelInfer(infer_request())]

    assert (before.status_code, meanwhile.status_code, after.status_code) == (200, 400, 200)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert "send the request again" in refused.json()["error"]
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "grpc-retry-pushback-ms" in str(error.value.trailing_metadata())
    assert answers[0].json()["outputs"][0]["data"] == BODY["inputs"][0]["data"]
    assert value_of(answers[1]) == 1.0


async def test_who_waits_for_a_stored_request_that_is_lost_is_told() -> None:
    """404 as for any unknown id, long before the end of the time to wait."""
    async with rpc() as server, httpx.AsyncClient(base_url=server.running.url, timeout=60.0) as client:
        accepted = await client.post("/v1/models/stuck/requests", json=BODY)
        link = accepted.headers["Location"]
        waiting = asyncio.create_task(client.get(f"{link}/result", params={"wait": "30"}))
        await eventually(lambda: server.running.gateway.requests.waits._places.taken == 1, description="a reader waits")

        await server.running.store.client.flushdb()
        reply = await waiting

    assert reply.status_code == 404


async def test_a_gateway_says_that_it_is_live() -> None:
    """So that `qinfer status` and `doctor` know of all of them."""
    async with running_gateway() as running:

        async def is_known() -> bool:
            return await running.store.live_processes(GATEWAY) != []

        await eventually(is_known, description="a sign of life")
        (name,) = await running.store.live_processes(GATEWAY)

    assert name.startswith("gateway-")
    assert name.endswith(f"@{socket.gethostname()}")
