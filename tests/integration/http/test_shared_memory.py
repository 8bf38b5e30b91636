"""Shared memory over HTTP, driven by Triton's own client, and by hand where that does not go."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from qinfer.testing import eventually
from tests.support.gateway import Running, running_gateway, settings_of

OFF = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
VALUES = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fast", "route"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    settings = settings_of({"fast_path": request.param == "fast", "max_input_bytes": 2_000_000})
    async with running_gateway(settings.model_copy(update={"allow_client_shm": True})) as gateway:
        yield gateway
        assert gateway.gateway.memory.status() == [], "a test left a region behind"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as client:
        yield client


@pytest.fixture
def client(running: Running) -> Iterator[triton.InferenceServerClient]:
    """Triton's client; its calls block, and are made in threads."""
    with triton.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
        yield client


@pytest.fixture
def key(running: Running) -> Iterator[str]:
    """Names an object of 2 MB that begins with the values; its regions are forgotten at the end."""
    name = f"/qinfer-test-{uuid4().hex}"
    handle = shm.create_shared_memory_region("object", name, 2_000_000)
    shm.set_shared_memory_region(handle, [VALUES])
    yield name
    running.gateway.memory.unregister()
    shm.destroy_shared_memory_region(handle)


def read(key: str, offset: int, shape: tuple[int, ...]) -> list[Any]:
    with open(f"/dev/shm{key}", "rb") as file:
        values: list[Any] = np.frombuffer(file.read(), np.float32, int(np.prod(shape)), offset).reshape(shape).tolist()
    return values


def source(region: str, size: int = 16, offset: int = 0, rows: int = 1) -> dict[str, Any]:
    where = {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}
    return {"inputs": [{"name": "x", "shape": [rows, 4], "datatype": "FP32", "parameters": where}]}


def target(region: str, size: int = 16, offset: int = 0) -> dict[str, Any]:
    where = {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}
    inputs = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [5, 6, 7, 8]}]
    return {"inputs": inputs, "outputs": [{"name": "y", "parameters": where}]}


async def test_tritons_client_sends_and_gets_tensors(client: triton.InferenceServerClient, key: str) -> None:
    """As in its own example: register, infer, look, unregister."""

    def use() -> None:
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()  # as perf_analyzer does, whichever kind it is going to use
        client.register_system_shared_memory("in", key, 16)
        client.register_system_shared_memory("out", key, 16, offset=4096)
        assert client.get_system_shared_memory_status() == [
            {"name": "in", "key": key, "offset": 0, "byte_size": 16},
            {"name": "out", "key": key, "offset": 4096, "byte_size": 16},
        ]
        tensor = triton.InferInput("x", [1, 4], "FP32")
        tensor.set_shared_memory("in", 16)
        output = triton.InferRequestedOutput("y")
        output.set_shared_memory("out", 16)

        result = client.infer("echo", [tensor], outputs=[output], request_id="7")

        told = result.get_response()
        assert told["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 4]}]
        assert told["id"] == "7"
        client.unregister_system_shared_memory("in")
        assert [region["name"] for region in client.get_system_shared_memory_status()] == ["out"]
        assert client.get_system_shared_memory_status("out")[0]["offset"] == 4096

    await asyncio.to_thread(use)

    assert read(key, 4096, (1, 4)) == VALUES.tolist()


async def test_tritons_client_is_told_what_is_wrong(client: triton.InferenceServerClient, key: str) -> None:
    """With the texts that its own tests look for."""

    def refused(call: Any, *arguments: Any, **more: Any) -> tuple[str, str]:
        with pytest.raises(InferenceServerException) as caught:
            call(*arguments, **more)
        return str(caught.value.status()), str(caught.value.message())

    def use() -> None:
        register, status = client.register_system_shared_memory, client.get_system_shared_memory_status
        register("in", key, 16)
        assert refused(register, "in", key, 16) == ("400", "shared memory region 'in' already in manager")
        assert refused(register, "b", key, 2_000_001)[1] == "failed to register shared memory region 'b': invalid args"
        assert refused(register, "b", "/nothing", 1) == ("500", "Unable to open shared memory region: '/nothing'")
        assert refused(status, "no") == ("404", "Unable to find system shared memory region: 'no'")
        cuda = refused(client.register_cuda_shared_memory, "c", b"raw", 0, 16)
        assert cuda == ("400", "failed to register CUDA shared memory region: 'c', GPUs not supported")
        assert client.get_cuda_shared_memory_status() == []
        assert refused(client.get_cuda_shared_memory_status, "c") == (
            "404",
            "Unable to find cuda shared memory region: 'c'",
        )
        client.unregister_cuda_shared_memory("c")

    await asyncio.to_thread(use)


async def test_large_inputs_come_from_small_bodies(http: httpx.AsyncClient, running: Running, key: str) -> None:
    """A megabyte, copied when the request is read."""
    running.gateway.memory.register("in", key, 0, 2_000_000)
    body = {
        "inputs": [{**source("in", 1_000_000)["inputs"][0], "name": "x", "shape": [2, 125_000], "datatype": "INT32"}]
    }
    body["inputs"][0]["datatype"] = "INT32"

    reply = await http.post("/v2/models/vary/infer", json={**body, "parameters": {"binary_data_output": True}})

    assert reply.status_code == 200, reply.text
    assert reply.content.endswith(bytes(1000))
    assert running.requests[-1].inputs[0].nbytes == 1_000_000


@pytest.mark.parametrize(("sizes", "text"), [((2, 2), ""), ((2, 3), "incomplete"), ((1, 2), "incomplete")])
async def test_strings_are_checked_as_they_were_copied(
    http: httpx.AsyncClient, running: Running, key: str, sizes: tuple[int, ...], text: str
) -> None:
    """In a thread, where there are many."""
    running.gateway.memory.register("in", key, 0, 12)
    content = b"".join(size.to_bytes(4, "little") + b"ab" for size in sizes)
    running.gateway.memory.write("in", 0, content)
    given = {**source("in", 12)["inputs"][0], "shape": [1, 2], "datatype": "BYTES"}

    reply = await http.post("/v2/models/text/infer", json={"inputs": [given]})

    if text:
        assert (reply.status_code, text in reply.json()["error"]) == (400, True), reply.text
    else:
        assert reply.json()["outputs"][0]["data"] == ["ab", "ab"]


async def test_an_empty_output_fits(http: httpx.AsyncClient, running: Running, key: str) -> None:
    """Nothing is written."""
    running.gateway.memory.register("out", key, 0, 16)
    where = {"shared_memory_region": "out", "shared_memory_byte_size": 0}
    inputs = [{"name": "x", "shape": [2, 0], "datatype": "INT32", "data": []}]

    reply = await http.post(
        "/v2/models/vary/infer", json={"inputs": inputs, "outputs": [{"name": "y", "parameters": where}]}
    )

    assert reply.json()["outputs"] == [{"name": "y", "datatype": "INT32", "shape": [2, 0]}]
    assert read(key, 0, (4,)) == VALUES[0].tolist()


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (source("no"), 404, "Unable to find shared memory region: 'no'"),
        (source("in", 17), 400, "Invalid offset + byte size for shared memory region: 'in'"),
        (source("in", 16, 16), 400, "Invalid offset for shared memory region: 'in'"),
        (source("in", 12), 400, "input byte size mismatch for input 'x' for model 'echo'. Expected 16, got 12"),
        (target("no"), 404, "Unable to find shared memory region: 'no'"),
        (target("in", 17), 400, "Invalid offset + byte size for shared memory region: 'in'"),
        (
            target("in", 8),
            500,
            "shared memory size specified with the request for output 'y' (8 bytes) should be at least 16 bytes to "
            "hold the results",
        ),
        (
            source("all", 1_500_000) | {"inputs": source("all", 1_500_000)["inputs"] * 2},
            400,
            "exceed the maximum allowed",
        ),
    ],
)
async def test_requests_that_do_not_fit(
    http: httpx.AsyncClient, running: Running, key: str, body: Any, status: int, text: str
) -> None:
    """Refused before anything is queued, or when the output is known."""
    running.gateway.memory.register("in", key, 0, 16)
    running.gateway.memory.register("all", key, 0, 2_000_000)

    reply = await http.post("/v2/models/echo/infer", json=body)

    assert (reply.status_code, text in reply.json()["error"]) == (status, True), reply.text
    assert read(key, 0, (4,)) == VALUES[0].tolist()
    assert running.gateway.dispatcher.in_flight == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("region/a/register", {"byte_size": 1}, 400, "Shared memory register request has no 'key' field"),
        ("region/a/register", {"key": "/a"}, 400, "Shared memory register request has no 'byte_size' field"),
        ("region/a/register", {"key": 1, "byte_size": 1}, 500, "attempt to access JSON non-string as string"),
        ("region/a/register", {"key": "/a", "byte_size": -1}, 500, "non-unsigned-integer as unsigned-integer"),
        ("region/a/register", {"key": "/a", "byte_size": 1, "offset": "1"}, 500, "non-unsigned-integer"),
        ("region/a/register", [], 400, "Shared memory register request has no 'key' field"),
        ("register", {}, 400, "'region name' is necessary to register system shared memory region"),
    ],
)
async def test_registrations_that_are_wrong(
    http: httpx.AsyncClient, path: str, body: Any, status: int, text: str
) -> None:
    """Triton's texts, and its status for values of the wrong type."""
    reply = await http.post(f"/v2/systemsharedmemory/{path}", json=body)

    assert (reply.status_code, text in reply.json()["error"]) == (status, True), reply.text


async def test_what_is_no_json_is_refused(http: httpx.AsyncClient) -> None:
    """400, as in infer."""
    reply = await http.post("/v2/systemsharedmemory/region/a/register", content=b"{")

    assert reply.status_code == 400
    assert reply.json()["error"].startswith("failed to parse the request JSON buffer")


async def test_a_region_that_goes_while_a_request_waits(http: httpx.AsyncClient, running: Running, key: str) -> None:
    """It is listed until the request has ended, also for whoever asks meanwhile."""
    memory = running.gateway.memory
    memory.register("in", key, 0, 16)
    asked = asyncio.create_task(http.post("/v2/models/stuck/infer", json=source("in")))
    while not running.gateway.dispatcher.in_flight:  # noqa: ASYNC110 - a count has no event
        await asyncio.sleep(0.001)

    memory.unregister("in")

    assert [region.name for region in memory.status()] == ["in"]
    assert (await http.post("/v2/models/echo/infer", json=source("in"))).status_code == 200
    assert [region.name for region in memory.status()] == ["in"]
    asked.cancel()
    await eventually(lambda: memory.status() == [], description="the end of the region")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (method, f"/v2/{kind}sharedmemory{region}/{action}")
        for kind in ("system", "cuda")
        for region in ("", "/region/a")
        for method, action in (("GET", "status"), ("POST", "register"), ("POST", "unregister"))
    ],
)
async def test_every_route_is_off_by_default(method: str, path: str, default: httpx.AsyncClient) -> None:
    """501 with Triton's text, whatever the body; only that there are no regions can be asked."""
    reply = await default.request(method, path, content=b"{}" if method == "POST" else b"")

    if method == "POST":
        assert (reply.status_code, reply.json()) == (501, {"error": OFF})
    elif "/region/" in path:
        assert (reply.status_code, reply.json()["error"].startswith("Unable to find")) == (404, True)
    else:
        assert (reply.status_code, reply.json()) == (200, [])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def default() -> AsyncIterator[httpx.AsyncClient]:
    async with running_gateway(settings_of()) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        yield client


async def test_the_wrong_method_is_refused(http: httpx.AsyncClient) -> None:
    """405 on each route."""
    for method, path in (("POST", "status"), ("GET", "region/a/register"), ("GET", "unregister")):
        reply = await http.request(method, f"/v2/systemsharedmemory/{path}")
        assert (reply.status_code, json.loads(reply.content)) == (405, {"error": "Method Not Allowed"})
