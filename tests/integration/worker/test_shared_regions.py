"""Large inputs in clients' shared memory: copied once, into the gateway's memory, when a request is accepted."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import grpc
import httpx
import numpy as np
import pytest
from onnx import helper
from tritonclient.grpc import service_pb2 as pb

from qinfer.core.settings_sections import CacheSettings, SegmentSettings
from qinfer.submission.memory import MEMORY, MOST_BYTES
from qinfer.testing import eventually
from qinfer.wire.kserve_grpc import parse_infer
from qinfer_api import shared_memory
from qinfer_api.http.fast import FastCall
from qinfer_api.rpc.infer import Infer
from qinfer_api.rpc.protocol import GrpcCall
from tests.integration.endpoints.test_shadows import counted, declared
from tests.integration.worker.test_shared_tensors import IMAGE, answer_of, body_of, held, opened, shared, ways
from tests.support.endpoints import shadow, split
from tests.support.ensembles import scale
from tests.support.models import write
from tests.support.rpc import stub_of
from tests.support.served_models import Array, ServedModels, models_served

pytestmark = pytest.mark.timeout(90)

OBJECT_BYTES = 12 * 2**20
OUTPUT_AT = 11 * 2**20


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[ServedModels]:
    repository = tmp_path / "repository"
    for name, more in (
        ("double", ""),
        ("cached", "response_cache { enable: true }"),
        ("split", 'parameters { key: "qinfer.split" value { string_value: "true" } }'),
    ):
        scale(repository, name, 2.0, width=-1)
        with (repository / name / "config.pbtxt").open("a") as file:
            file.write(more)
    add = [("a", "FP32", (-1,)), ("b", "FP32", (-1,))]
    write(repository, "add", [helper.make_node("Add", ["a", "b"], ["y"])], add, [("y", "FP32", (-1,))])
    segments = SegmentSettings(directory=str(tmp_path / "m"), least_bytes=16_384)
    sections = {"segments": segments, "allow_client_shm": True, "cache": CacheSettings(config="local,size=67108864")}
    async with models_served(repository, sections) as scene:
        for name in ("double", "cached", "split", "add"):
            await scene.http.load_model(name)
        await shared(scene, "w1")
        yield scene


@pytest.fixture
def region(scene: ServedModels) -> Iterator[np.memmap[Any, Any]]:
    """Registers an object as `r`, and returns its numbers."""
    path = Path("/dev/shm", f"qinfer-test-{uuid4().hex}")
    path.write_bytes(bytes(OBJECT_BYTES))
    scene.gateway.memory.register("r", f"/{path.name}", 0, OBJECT_BYTES)
    numbers = np.memmap(path, "f4")
    numbers[: IMAGE.size] = IMAGE[0]
    yield numbers
    path.unlink()


@pytest.fixture
async def http(scene: ServedModels) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=scene.gateway.url) as client:
        yield client


def source(name: str = "x", shape: tuple[int, ...] = IMAGE.shape, offset: int = 0) -> dict[str, Any]:
    """Returns an input in the region."""
    size = 4 * int(np.prod(shape))
    where = {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": offset}
    return {"name": name, "shape": list(shape), "datatype": "FP32", "parameters": where}


async def post(http: httpx.AsyncClient, model: str, *inputs: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"inputs": list(inputs), "parameters": {"binary_data_output": True}, **more}
    return await http.post(f"/v2/models/{model}/infer", json=body)


async def ask(http: httpx.AsyncClient, model: str, *inputs: dict[str, Any]) -> Array:
    reply = await post(http, model, *inputs)
    assert reply.status_code == 200, reply.text
    return np.frombuffer(reply.content[int(reply.headers["inference-header-content-length"]) :], "f4")


async def ask_images(http: httpx.AsyncClient, region: np.memmap[Any, Any], model: str, numbers: Iterable[int]) -> None:
    """Asks for one image after the other, in the same place, and compares the answers."""
    for number in numbers:
        region[: IMAGE.size] = IMAGE[0] + number
        assert np.array_equal(await ask(http, model, source()), (IMAGE[0] + number) * 2)


@pytest.fixture
def one_copy(scene: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which an input is copied anywhere but into the gateway's memory, or read in a thread."""
    segments = scene.gateway._segments
    assert segments is not None
    copied = Mock(side_effect=AssertionError("tensors were copied"))
    monkeypatch.setattr(segments.own, "write", copied)
    monkeypatch.setattr(shared_memory, "bytearray", copied, raising=False)
    monkeypatch.setattr(FastCall, "_read_checked", copied)


@pytest.mark.usefixtures("one_copy")
async def test_an_image_is_copied_once(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any]
) -> None:
    await ask_images(http, region, "double", range(5))

    assert await ways(scene) == {"memory": 5}
    assert held(scene) == 0


async def test_many_requests_of_one_region_at_once(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any]
) -> None:
    answers = await asyncio.gather(*[ask(http, "double", source(offset=4 * number)) for number in range(30)])

    assert all(np.array_equal(a, region[n : n + IMAGE.size] * 2) for n, a in enumerate(answers))
    assert held(scene) == 0


@pytest.mark.parametrize("change", ["other values", "shorter", "unregistered"])
async def test_a_request_is_what_it_was_when_it_was_accepted(
    scene: ServedModels,
    http: httpx.AsyncClient,
    region: np.memmap[Any, Any],
    change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client may do with the region what it wants once its request is accepted."""
    memory = scene.gateway.dispatcher.submission.memory
    assert memory is not None
    await scene.kill("w1")
    monkeypatch.setattr(memory, "_way", lambda _: MEMORY)
    asked = asyncio.create_task(ask(http, "double", source()))
    await eventually(lambda: held(scene) > 0, description="tensors in memory")
    if change == "other values":
        region[:] = -1
    elif change == "shorter":
        os.truncate(str(region.filename), 10)
    else:
        scene.gateway.memory.unregister("r")
    await scene.worker("w2")

    assert np.array_equal(await asked, IMAGE[0] * 2)
    assert held(scene) == 0


@pytest.mark.parametrize("asked_before", [0, 3])
@pytest.mark.parametrize("model", ["double", "cached", "split"])
async def test_a_region_that_was_made_shorter_is_an_error(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any], model: str, asked_before: int
) -> None:
    await ask_images(http, region, model, range(asked_before))
    os.truncate(str(region.filename), 300_000)
    refused = await post(http, model, source())

    assert (refused.status_code, "shorter than when it was registered" in refused.json()["error"]) == (400, True)
    assert held(scene) == 0
    os.truncate(str(region.filename), OBJECT_BYTES)
    assert (await ask(http, model, source())).shape == IMAGE[0].shape


async def test_repeated_requests_with_outputs_in_regions(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is copied anew, until the region is unregistered; another one may have its name then."""
    monkeypatch.setattr(FastCall, "_encoded_in_thread", Mock(side_effect=AssertionError("encoded in a thread")))
    place = {"shared_memory_region": "r", "shared_memory_byte_size": IMAGE.nbytes, "shared_memory_offset": OUTPUT_AT}
    target = {"name": "y", "parameters": place}
    output = region[OUTPUT_AT // 4 : OUTPUT_AT // 4 + IMAGE.size]
    for number in range(4):
        region[: IMAGE.size] = IMAGE[0] + number
        reply = await post(http, "double", source(), outputs=[target])
        assert reply.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": list(IMAGE.shape)}]
        assert np.array_equal(output, (IMAGE[0] + number) * 2)

    scene.gateway.memory.unregister("r")
    refused = await post(http, "double", source(), outputs=[target])
    assert scene.gateway.memory.status() == []
    scene.gateway.memory.register("r", f"/{Path(str(region.filename)).name}", 4, OBJECT_BYTES - 4)
    answer = await ask(http, "double", source(shape=(1, 1000)))

    assert (refused.status_code, refused.json()["error"]) == (404, "Unable to find shared memory region: 'r'")
    assert np.array_equal(answer, region[1:1001] * 2)
    assert held(scene) == 0


@pytest.mark.parametrize("problem", ["shape", "offset", "input", "second"])
async def test_a_request_that_is_refused_gives_the_memory_back(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any], problem: str
) -> None:
    given = source()
    inputs = [given]
    if problem == "shape":
        given["shape"] = [1, 150_527]
    elif problem == "offset":
        given["parameters"]["shared_memory_offset"] = OBJECT_BYTES - 100
    elif problem == "input":
        given["name"] = "z"
    else:
        inputs.append({**source("b"), "parameters": {"shared_memory_region": "no", "shared_memory_byte_size": 40_000}})

    refused = await post(http, "double", *inputs)

    assert refused.status_code in (400, 404)
    assert held(scene) == 0


@pytest.mark.parametrize("b", ["region", "small", "body"])
async def test_one_of_several_inputs_in_shared_memory(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any], b: str
) -> None:
    """A request refers to one piece of memory, so that others are copied beside it."""
    count = 100 if b == "small" else 50_000
    given = source("b", (1, count), 4 * 50_000)
    if b == "body":
        given = {"name": "b", "shape": [1, count], "datatype": "FP32", "data": region[50_000:100_000].tolist()}

    answer = await ask(http, "add", source("a", (1, count)), given)

    assert np.array_equal(answer, region[:count] + region[50_000 : 50_000 + count])
    assert held(scene) == 0


async def test_bodies_with_tensors_are_received_into_memory_where_regions_are_allowed(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any]
) -> None:
    """Also if another input is in a region."""
    reader, writer = await opened(scene)
    writer.write(body_of(IMAGE))
    assert np.array_equal(await answer_of(reader), IMAGE[0] * 2)
    count = 40_000
    mixed = body_of(IMAGE[:, :count], "add", "a", source("b", (1, count), 400))
    for size in (500, len(mixed) - 500):
        writer.write(mixed[:size])
        await writer.drain()
        mixed = mixed[size:]
    assert np.array_equal(await answer_of(reader), IMAGE[0, :count] + region[100 : 100 + count])
    writer.close()
    assert held(scene) == 0


async def test_requests_above_the_bound_pass_through_redis(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any]
) -> None:
    count = MOST_BYTES // 4 + 1
    region[:count] = np.arange(count)

    assert np.array_equal(await ask(http, "double", source(shape=(1, count))), region[:count] * 2)
    assert await ways(scene) == {}


async def test_a_cached_request_is_hashed_as_it_was_copied(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any]
) -> None:
    """Each hit is the answer to the same values."""
    await ask_images(http, region, "cached", (0, 1, 0, 1))

    assert await ways(scene) == {"memory": 2}
    assert held(scene) == 0


async def test_the_parts_of_a_split_request_are_of_one_copy(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any]
) -> None:
    rows = 20  # of at most 8 in a batch
    asked = asyncio.create_task(ask(http, "split", source(shape=(rows, 7000))))
    await eventually(lambda: scene.gateway.dispatcher.in_flight > 0, description="an accepted request")
    before = region[: rows * 7000].copy()
    region[:] = -1

    assert np.array_equal(await asked, before * 2)
    assert held(scene) == 0


async def test_a_shadow_gets_what_was_accepted(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any]
) -> None:
    """The shadow's answer is compared long after the caller has its own."""
    await declared(http, "e", split(shadow("cached:1"), stable="double:1"))

    answer = await ask(http, "e", source())
    region[:] = -1

    assert np.array_equal(answer, IMAGE[0] * 2)
    assert (await counted(http, "e", compared=1))["shadows"]["disagreed"] == 0


async def test_an_output_is_written_only_while_its_request_is_pending(
    scene: ServedModels, http: httpx.AsyncClient, region: np.memmap[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests may name the same bytes, and the answer of one that has ended may come late."""
    memory = scene.gateway.dispatcher.submission.memory
    assert memory is not None
    await scene.kill("w1")
    monkeypatch.setattr(memory, "_way", lambda _: MEMORY)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": IMAGE.nbytes}
    target = {"name": "y", "parameters": {**place, "shared_memory_offset": OUTPUT_AT - IMAGE.nbytes}}
    asked = asyncio.create_task(post(http, "double", source(), outputs=[target]))
    await eventually(lambda: held(scene) > 0, description="tensors in memory")
    asked.cancel()
    await eventually(lambda: held(scene) == 0, description="the end of the request")
    await scene.worker("w2")
    again = {**target, "parameters": {**place, "shared_memory_offset": OUTPUT_AT - 2 * IMAGE.nbytes}}

    reply = await post(http, "double", source(), outputs=[again])

    assert reply.status_code == 200, reply.text
    end = OUTPUT_AT // 4
    assert not region[end - IMAGE.size : end].any()
    assert np.array_equal(region[end - 2 * IMAGE.size : end - IMAGE.size], IMAGE[0] * 2)


def message(model: str, *inputs: tuple[str, int, int]) -> pb.ModelInferRequest:
    """Returns a request for inputs in the region, of which each has a name, a count and an offset in numbers."""
    asked = pb.ModelInferRequest(model_name=model)
    for name, count, offset in inputs:
        given = asked.inputs.add(name=name, datatype="FP32", shape=[1, count])
        given.parameters["shared_memory_region"].string_param = "r"
        given.parameters["shared_memory_byte_size"].int64_param = 4 * count
        given.parameters["shared_memory_offset"].int64_param = 4 * offset
    return asked


def output_of(answer: pb.ModelInferResponse) -> Array:
    return np.frombuffer(answer.raw_output_contents[0], "f4")


@pytest.fixture
async def stub(scene: ServedModels) -> AsyncIterator[Any]:
    assert scene.gateway.rpc is not None
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(scene.gateway.rpc.url.partition("://")[2], options) as channel:
        yield stub_of(channel)


@pytest.mark.usefixtures("one_copy")
async def test_an_image_is_copied_once_over_grpc(
    scene: ServedModels, stub: Any, region: np.memmap[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a stream."""
    monkeypatch.setattr(Infer, "submit_slowly", Mock(side_effect=AssertionError("read in a thread")))
    one = message("double", ("x", IMAGE.size, 0))
    streamed = stub.ModelStreamInfer(iter([one, one, one]))

    answers = [await stub.ModelInfer(one), *[answer.infer_response async for answer in streamed]]

    assert all(np.array_equal(output_of(answer), IMAGE[0] * 2) for answer in answers)
    assert await ways(scene) == {"memory": 4}
    assert held(scene) == 0


async def test_repeated_requests_over_grpc(
    scene: ServedModels, stub: Any, region: np.memmap[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protobuf reads the first two; outputs in regions are written on the event loop, too."""
    parsed = Mock(side_effect=parse_infer)
    monkeypatch.setattr("qinfer_api.rpc.infer.parse_infer", parsed)
    monkeypatch.setattr(GrpcCall, "packed", Mock(side_effect=AssertionError("encoded in a thread")))
    asked = message("double", ("x", IMAGE.size, 0))
    asked.id, asked.model_version = "7", "1"
    target = asked.outputs.add(name="y")
    for name, value in (("byte_size", IMAGE.nbytes), ("offset", OUTPUT_AT)):
        target.parameters[f"shared_memory_{name}"].int64_param = value
    target.parameters["shared_memory_region"].string_param = "r"
    for number in range(5):
        region[: IMAGE.size] = IMAGE[0] + number
        answer = await stub.ModelInfer(asked)
        assert (answer.id, answer.raw_output_contents[0]) == ("7", b"")
        assert np.array_equal(region[OUTPUT_AT // 4 :][: IMAGE.size], (IMAGE[0] + number) * 2)

    scene.gateway.memory.unregister("r")
    with pytest.raises(grpc.aio.AioRpcError, match="Unable to find shared memory region: 'r'"):
        await stub.ModelInfer(asked)

    assert parsed.call_count == 3
    assert scene.gateway.memory.status() == []
    assert held(scene) == 0


async def test_other_inputs_over_grpc(scene: ServedModels, stub: Any, region: np.memmap[Any, Any]) -> None:
    """Two in the region, of which one lands; one that is hashed; one that is too large."""
    both = await stub.ModelInfer(message("add", ("a", 70_000, 0), ("b", 70_000, 1000)))
    cached = [await stub.ModelInfer(message("cached", ("x", IMAGE.size, 0))) for _ in range(2)]
    large = await stub.ModelInfer(message("double", ("x", MOST_BYTES // 4 + 1, 0)))

    assert np.array_equal(output_of(both), region[:70_000] + region[1000:71_000])
    assert all(np.array_equal(output_of(answer), IMAGE[0] * 2) for answer in cached)
    assert np.array_equal(output_of(large), region[: MOST_BYTES // 4 + 1] * 2)
    assert held(scene) == 0


@pytest.mark.parametrize("problem", ["shape", "shorter", "model"])
async def test_a_refusal_over_grpc_gives_the_memory_back(
    scene: ServedModels, stub: Any, region: np.memmap[Any, Any], problem: str
) -> None:
    asked = message("double", ("x", IMAGE.size, 0))
    if problem == "shape":
        asked.inputs[0].shape[1] = 7
    elif problem == "shorter":
        os.truncate(str(region.filename), 300_000)
    else:
        asked.model_name = "no"

    with pytest.raises(grpc.aio.AioRpcError):
        await stub.ModelInfer(asked)

    assert held(scene) == 0
