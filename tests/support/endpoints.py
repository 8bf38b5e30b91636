"""Several gateways on one Redis, and endpoints that they all know."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from qinfer.core.settings import Settings
from qinfer.testing import eventually
from qinfer_api.app import bind
from qinfer_api.rpc.server import open_port
from tests.support.gateway import Running, lean_gateway, running_gateway, settings_of

BODY: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
"""A request for a model `x` → `y` of FP32[4]."""


@contextlib.asynccontextmanager
async def gateways(count: int, settings: Settings | None = None) -> AsyncIterator[list[Running]]:
    """Runs gateways on one database; the first one's worker serves them all."""
    settings = settings or settings_of()
    async with running_gateway(settings) as first, contextlib.AsyncExitStack() as opened:
        others = [await opened.enter_async_context(another(first, settings)) for _ in range(count - 1)]
        yield [first, *others]


@contextlib.asynccontextmanager
async def another(first: Running, settings: Settings) -> AsyncIterator[Running]:
    """Runs a gateway beside another one, on its database."""
    delivery, store = await first.database.delivery(), first.database.store()
    rpc = open_port(settings) if settings.grpc.enabled else None
    gateway = lean_gateway(settings, delivery, store, bind(settings.http), rpc=rpc)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(gateway.serve())
        try:
            await gateway.started.wait()
            yield Running(
                gateway=gateway, delivery=delivery, store=store, requests=first.requests, database=first.database
            )
        finally:
            gateway.stop()
            await asyncio.wait([serving])


def split(*others: dict[str, Any], stable: str = "echo:1", **fields: Any) -> dict[str, Any]:
    """Returns a declaration of a stable target, and of others."""
    model, _, version = stable.rpartition(":")
    return {"targets": [{"model": model, "version": int(version), "role": "stable"}, *others], **fields}


def canary(weight: float, target: str = "echo:2", **fields: Any) -> dict[str, Any]:
    """Returns the declaration of a canary."""
    model, _, version = target.rpartition(":")
    return {"model": model, "version": version if version == "latest" else int(version), "weight": weight, **fields}


def shadow(target: str, weight: float = 1.0) -> dict[str, Any]:
    """Returns the declaration of a shadow."""
    model, _, version = target.rpartition(":")
    return {"model": model, "version": int(version), "role": "shadow", "weight": weight}


async def declare(gateways: list[Running], name: str, declaration: dict[str, Any]) -> int:
    """Declares an endpoint at the first gateway; returns its revision once all have seen it."""
    async with httpx.AsyncClient(base_url=gateways[0].url) as client:
        reply = await client.put(f"/v1/endpoints/{name}", json=declaration)
    assert reply.status_code == 200, reply.text
    revision: int = reply.json()["endpoint"]["revision"]
    await seen(gateways, revision)
    return revision


async def seen(gateways: list[Running], revision: int) -> None:
    """Waits until all gateways go by a revision."""

    async def have_seen() -> bool:
        return all(one.gateway.dispatcher.endpoints.revision >= revision for one in gateways)

    await eventually(have_seen, description="a revision at all gateways")
