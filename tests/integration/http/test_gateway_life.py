"""The gateway from its start to its end: what it opens it closes, and it does not live on by half."""

import asyncio
import socket

import httpx
import pytest

from qinfer.core.settings import AuthSettings, GrpcSettings, HttpSettings, MetricsSettings, Settings
from qinfer.errors import SettingsError
from qinfer.models.store import ControlStore
from qinfer.testing import eventually
from qinfer_api.app import Gateway, bind, build
from qinfer_api.rpc.server import open_port
from tests.support.gateway import declare_models, settings_of
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


class _Broken(ControlStore):
    """Has a defect, from a moment on."""

    is_broken = False

    async def settings(self) -> dict[str, str]:
        if self.is_broken:
            raise RuntimeError("a defect")
        return await super().settings()


async def test_a_part_that_dies_ends_the_whole(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its error; nobody is accepted any more, by neither protocol."""
    monkeypatch.setattr("qinfer.models.shared_settings.FOLLOW_EVERY_S", 0.01)
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
    monkeypatch.setattr("qinfer.models.shared_settings.FOLLOW_EVERY_S", 0.01)
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
    assert (reply.status_code, reply.json()["error"]) == (503, "[request id: <id_unknown>] Server exiting")
