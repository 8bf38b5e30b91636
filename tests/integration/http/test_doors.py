"""Who may use what: every route that the OpenAPI document names and every call of gRPC, with keys and restrictions."""

import re
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.api_keys import Scope, add_key
from qinfer_api.auth import GROUPS
from tests.support.gateway import running_gateway, settings_of
from tests.support.rpc import Rpc, rpc

PROBES = {
    "GET /v2/health/live",
    "GET /v2/health/ready",
    "GET /v2/models/echo/ready",
    "GET /v2/models/echo/versions/1/ready",
    "GET /metrics",
    "GET /ping",
}
CHANGES = {
    "POST /v2/repository/models/echo/load",
    "POST /v2/repository/models/echo/unload",
    "POST /v2/repository/x/models/echo/load",
    "POST /v2/repository/x/models/echo/unload",
    "POST /v1/models/echo/pause",
    "POST /v1/models/echo/resume",
    "POST /v1/models/echo/versions/1/pause",
    "POST /v1/models/echo/versions/1/resume",
    "POST /v1/models/echo/recordings",
    "GET /v1/recordings/x",
    "DELETE /v1/recordings/x",
    "GET /v1/workers/x/log",
    "POST /v1/workers/x/drain",
    "POST /v2/logging",
    "POST /v2/trace/setting",
    "POST /v2/models/echo/trace/setting",
    "PUT /v1/endpoints/x",
    "DELETE /v1/endpoints/x",
    "POST /v1/endpoints/x/x",
    "GET /v1/endpoints/x/differences",
}


async def routes_of(client: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Returns every route as (method, path), its parameters filled in."""
    paths = (await client.get("/openapi.json")).json()["paths"]
    named = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    hidden = [("POST", "/v2/repository/{r}/index")]
    hidden += [("POST", f"/v2/repository/{{r}}/models/{{model}}/{what}") for what in ("load", "unload")]
    values = {"{model}": "echo", "{version}": "1"}
    filled = [(m, re.sub(r"{\w+}", lambda found: values.get(found[0], "x"), path)) for m, path in (*named, *hidden)]
    return list(dict.fromkeys(filled))  # the document also has the plain JSON of each model


async def refused(client: httpx.AsyncClient, status: int) -> tuple[set[str], int]:
    """Asks every route; returns those that answer with a status, and how many there are."""
    routes = await routes_of(client)
    replies = {f"{m} {path}": await client.request(m, path, json={} if m == "POST" else None) for m, path in routes}
    return {route for route, reply in replies.items() if reply.status_code == status}, len(routes)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


async def test_every_route_but_the_probes_asks_for_a_key(keys_file: Path) -> None:
    """Also one that somebody adds tomorrow."""
    add_key(keys_file, "acme", (Scope.INFER,), "acme")
    settings = settings_of(auth={"mode": "keys", "keys_file": str(keys_file)})
    async with running_gateway(settings) as running, httpx.AsyncClient(base_url=running.url) as client:
        asked, count = await refused(client, 401)
        all_routes = {f"{method} {path}" for method, path in await routes_of(client)}

    assert all_routes - asked == PROBES
    assert count > 40


async def test_what_changes_the_server_takes_an_admin(keys_file: Path) -> None:
    """A key for inference reads; it changes neither models nor settings."""
    key = add_key(keys_file, "acme", (Scope.INFER,), "acme")[1]
    settings = settings_of(auth={"mode": "keys", "keys_file": str(keys_file)})
    headers = {"x-api-key": key}
    async with (
        running_gateway(settings) as running,
        httpx.AsyncClient(base_url=running.url, headers=headers) as client,
    ):
        forbidden, _ = await refused(client, 403)

    assert forbidden == CHANGES


async def test_every_route_is_in_a_group_that_can_be_restricted() -> None:
    """All but the metrics, which Triton restricts neither."""
    settings = settings_of({"restricted": [f"{','.join(GROUPS)}:x-secret=s"]})
    async with running_gateway(settings) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            closed, count = await refused(client, 403)
        async with httpx.AsyncClient(base_url=running.url, headers={"x-secret": "s"}) as client:
            still_closed, _ = await refused(client, 403)

    assert (len(closed), still_closed) == (count - 1, set())


async def test_every_grpc_call_is_in_a_group_that_can_be_restricted() -> None:
    """All of Triton's service; each answers with the name of the key that it expects."""
    names = [method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
    async with rpc({"restricted": (f"{','.join(GROUPS)}:k=s",)}) as server:
        told = {name: await _told(server, name) for name in names}

    assert len(names) == 20
    assert set(told.values()) == {
        ("UNAVAILABLE", "This protocol is restricted, expecting header 'triton-grpc-protocol-k'")
    }


async def _told(server: Rpc, name: str) -> tuple[str, str]:
    call: Any = getattr(server.stub, name)
    request = getattr(
        pb, pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[name].input_type.name
    )()
    try:
        if name == "ModelStreamInfer":
            await call(iter([request])).read()
        else:
            await call(request)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""
