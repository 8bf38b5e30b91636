"""Shared memory of several tenants of one gateway, over both protocols: each has regions of its own."""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.api_keys import Scope, add_key
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.rpc import stub_of

REGION = "/v2/systemsharedmemory"
Headers = Mapping[str, str]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Headers]:
    """Makes a key for each of two tenants; returns their headers."""
    file = tmp_path / "keys.json"
    made = {name: add_key(file, name, (Scope.INFER,), name)[1] for name in ("acme", "evil")}
    return {name: {"authorization": f"Bearer {key}"} for name, key in made.items()}


@pytest.fixture(params=["fast", "route"])
async def running(request: pytest.FixtureRequest, tmp_path: Path, keys: dict[str, Headers]) -> AsyncIterator[Running]:
    auth = {"mode": "keys", "keys_file": str(tmp_path / "keys.json")}
    settings = settings_of({"fast_path": request.param == "fast"}, grpc={}, auth=auth)
    async with running_gateway(settings.model_copy(update={"allow_client_shm": True})) as gateway:
        yield gateway


@pytest.fixture
async def http(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as client:
        yield client


@pytest.fixture
async def stub(running: Running) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(running.grpc_target) as channel:
        yield stub_of(channel)


@pytest.fixture
def objects() -> Iterator[dict[str, Path]]:
    """Makes an object for each tenant, of other values."""
    made = {name: Path("/dev/shm", f"qinfer-test-{uuid4().hex}") for name in ("acme", "evil")}
    for value, path in enumerate(made.values(), start=1):
        path.write_bytes(np.full(8, value, "<f4").tobytes())
    yield made
    for path in made.values():
        path.unlink()


@pytest.fixture
async def registered(http: httpx.AsyncClient, keys: dict[str, Headers], objects: dict[str, Path]) -> None:
    """Registers each tenant's object, by one name."""
    for name, path in objects.items():
        body = {"key": f"/{path.name}", "byte_size": 32}
        reply = await http.post(f"{REGION}/region/r/register", json=body, headers=keys[name])
        assert reply.status_code == 200, reply.text


async def names(http: httpx.AsyncClient, headers: Headers) -> list[str]:
    reply = await http.get(f"{REGION}/status", headers=headers)
    return [region["key"] for region in reply.json()]


async def test_a_tenant_sees_and_unregisters_its_own_regions(
    http: httpx.AsyncClient, registered: None, keys: dict[str, Headers], objects: dict[str, Path]
) -> None:
    assert await names(http, keys["evil"]) == [f"/{objects['evil'].name}"]

    for path in ("/region/r/unregister", "/unregister"):
        assert (await http.post(f"{REGION}{path}", headers=keys["evil"])).status_code == 200

    assert await names(http, keys["evil"]) == []
    assert await names(http, keys["acme"]) == [f"/{objects['acme'].name}"]
    assert (await http.get(f"{REGION}/region/r/status", headers=keys["evil"])).status_code == 404


async def test_the_same_over_grpc(
    stub: Any, registered: None, keys: dict[str, Headers], objects: dict[str, Path]
) -> None:
    evil, acme = (tuple(keys[name].items()) for name in ("evil", "acme"))
    seen = await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(), metadata=evil)
    assert [region.key for region in seen.regions.values()] == [f"/{objects['evil'].name}"]

    for name in ("r", ""):
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=name), metadata=evil)

    left = await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(), metadata=acme)
    assert [region.key for region in left.regions.values()] == [f"/{objects['acme'].name}"]


async def test_requests_use_the_regions_of_their_tenant(
    http: httpx.AsyncClient, registered: None, keys: dict[str, Headers], objects: dict[str, Path]
) -> None:
    where = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    inputs = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": where}]
    outputs = [{"name": "y", "parameters": {**where, "shared_memory_offset": 16}}]

    reply = await http.post("/v2/models/echo/infer", json={"inputs": inputs}, headers=keys["evil"])
    objects["evil"].write_bytes(np.full(8, 5, "<f4").tobytes())
    await http.post("/v2/models/echo/infer", json={"inputs": inputs, "outputs": outputs}, headers=keys["evil"])
    await http.post(f"{REGION}/unregister", headers=keys["evil"])
    refused = await http.post("/v2/models/echo/infer", json={"inputs": inputs}, headers=keys["evil"])

    assert reply.json()["outputs"][0]["data"] == [2.0] * 4
    assert np.fromfile(objects["acme"], "<f4").tolist() == [1.0] * 8
    assert (refused.status_code, refused.json()["error"]) == (404, "Unable to find shared memory region: 'r'")


async def test_requests_over_grpc_use_the_regions_of_their_tenant(
    stub: Any, registered: None, keys: dict[str, Headers], objects: dict[str, Path]
) -> None:
    message = pb.ModelInferRequest(model_name="echo")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    output = message.outputs.add(name="y")
    for of, offset in ((tensor, 0), (output, 16)):
        of.parameters["shared_memory_region"].string_param = "r"
        of.parameters["shared_memory_byte_size"].int64_param = 16
        of.parameters["shared_memory_offset"].int64_param = offset
    objects["evil"].write_bytes(np.array([7] * 4 + [0] * 4, "<f4").tobytes())

    await stub.ModelInfer(message, metadata=tuple(keys["evil"].items()))

    assert np.fromfile(objects["evil"], "<f4").tolist() == [7.0] * 8
    assert np.fromfile(objects["acme"], "<f4").tolist() == [1.0] * 8
