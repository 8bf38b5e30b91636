"""Triton's four clients: shapes without elements, `reshape`, and every datatype in system shared memory."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from onnx import helper
from tritonclient.utils import serialize_byte_tensor

from qinfer.tensors import DATATYPES, from_numpy
from tests.e2e.conftest import Stack, running
from tests.e2e.triton.test_tritonclient_http import SAMPLES, plain
from tests.e2e.triton_clients import KINDS, Array, TritonClient, connected
from tests.support import models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:Unclosed connection:ResourceWarning"),  # http.aio's
]

SIZE, HALF = 4096, 2048
UNTOUCHED = 0xEE
RESHAPED = """
name: "columns" backend: "onnxruntime" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4, 1 ] reshape { shape: [ -1, 2, 2 ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ 4, -1 ] reshape { shape: [ 2, 2, -1 ] } }
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("models")
    for datatype in models.ELEMENT_TYPES:
        models.identity(path, datatype)
    nodes = [helper.make_node("Transpose", ["x"], ["y"], perm=[0, 2, 3, 1])]
    models.write(path, "columns", nodes, [("x", "FP32", (-1, 2, 2))], [("y", "FP32", (2, 2, -1))])
    (path / "columns" / "config.pbtxt").write_text(RESHAPED)
    with running(path, tmp_path_factory.mktemp("up"), QINFER_ALLOW_CLIENT_SHM="true") as one:
        yield one


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, stack: Stack) -> AsyncIterator[TritonClient]:
    async with connected(request.param, stack) as one:
        yield one


async def test_tensors_without_elements(client: TritonClient) -> None:
    """Of every datatype; the reply has their shape, and no bytes."""
    for datatype, sample in SAMPLES.items():
        inputs = [client.input("x", sample[:, :0], datatype)]

        result = await client.call("infer", f"identity_{datatype.lower()}", inputs)

        assert result.as_numpy("y").size == 0, datatype
        (output,) = result.get_response()["outputs"] if client.is_http else result.get_response().outputs
        assert list(output["shape"] if client.is_http else output.shape) == [1, 0], datatype


async def test_a_batch_without_rows_is_refused(client: TritonClient) -> None:
    for datatype, text in (("FP32", "Expected 12, got 0"), ("BYTES", "expected 3 string elements")):
        one = client.input("x", SAMPLES[datatype][:0], datatype)

        code, told = await client.refusal("infer", f"identity_{datatype.lower()}", [one])

        assert (code, text in told) == ("INVALID_ARGUMENT", True), told


@pytest.mark.parametrize("length", [0, 1, 5])
async def test_reshape_keeps_variable_dimensions(client: TritonClient, length: int) -> None:
    """The model sees [2, -1, 2, 2], and gives [2, 2, 2, -1]; the client knows of neither."""
    rows = np.arange(2 * length * 4, dtype=np.float32).reshape(2, length, 4, 1)

    answer = await client.infer("columns", {"x": rows})

    assert answer.result.as_numpy("y").tolist() == rows[..., 0].transpose(0, 2, 1).tolist()


async def test_a_shape_that_does_not_fit_what_clients_see(client: TritonClient) -> None:
    one = client.input("x", np.zeros((1, 3, 2, 2), np.float32))

    code, text = await client.refusal("infer", "columns", [one])

    assert (code, "Expected [-1,-1,4,1], got [1,3,2,2]" in text) == ("INVALID_ARGUMENT", True), text


@contextmanager
def region() -> Iterator[tuple[str, Any]]:
    """Makes an object of `SIZE` bytes, all of them `UNTOUCHED`."""
    name = f"region_{uuid4().hex}"
    handle = shm.create_shared_memory_region(name, f"/{name}", SIZE)
    try:
        shm.set_shared_memory_region(handle, [np.full(SIZE, UNTOUCHED, np.uint8)])
        yield name, handle
    finally:
        shm.destroy_shared_memory_region(handle)


def encoded(sample: Array, datatype: str) -> bytes:
    """Returns the bytes of a tensor as they are in shared memory."""
    return bytes(serialize_byte_tensor(sample).item() if datatype == "BYTES" else from_numpy("x", sample).data)


def read(handle: Any, offset: int, size: int) -> bytes:
    return bytes(shm.get_contents_as_numpy(handle, np.uint8, [size], offset=offset))


def placed(one: Any, name: str, size: int, offset: int) -> Any:
    """Says that an input or an output is in a region."""
    one.set_shared_memory(name, size, offset=offset)
    return one


async def test_every_datatype_in_shared_memory(client: TritonClient) -> None:
    """Read there, written there into a larger part, and read there but sent back in the reply."""
    with region() as (name, handle):
        await client.call("register_system_shared_memory", name, f"/{name}", SIZE)
        for offset, (datatype, sample) in enumerate(SAMPLES.items()):
            data, model = encoded(sample, datatype), f"identity_{datatype.lower()}"
            shm.set_shared_memory_region(handle, [np.frombuffer(data, np.uint8)], offset=offset)
            blank = np.full(HALF, UNTOUCHED, np.uint8)
            shm.set_shared_memory_region(handle, [blank], offset=HALF)
            x = placed(client.module.InferInput("x", list(sample.shape), datatype), name, len(data), offset)
            y = placed(client.output("y"), name, len(data) + 8, HALF + offset)

            reply = (await client.call("infer", model, [x], outputs=[y])).get_response()
            sent = await client.call("infer", model, [x])

            written = read(handle, HALF, HALF)
            assert written[offset : offset + len(data)] == data, datatype
            assert set(written[:offset] + written[offset + len(data) :]) == {UNTOUCHED}, datatype
            assert not ("parameters" in reply["outputs"][0] if client.is_http else reply.raw_output_contents[0])
            assert plain(sent.as_numpy("y")) == plain(sample), datatype
        await client.call("unregister_system_shared_memory", name)


async def test_parts_of_shared_memory_that_do_not_fit(client: TritonClient) -> None:
    """Nothing is read beyond a region or written beyond its part; an input that is cut is told from one too long."""
    with region() as (name, handle):
        await client.call("register_system_shared_memory", name, f"/{name}", HALF)
        for datatype, sample in SAMPLES.items():
            data, model = encoded(sample, datatype), f"identity_{datatype.lower()}"
            shm.set_shared_memory_region(handle, [np.frombuffer(data, np.uint8)])

            async def refused(
                size: int, offset: int = 0, output: tuple[int, int] | None = None, model: str = model
            ) -> tuple[str, str]:
                one = client.module.InferInput("x", list(sample.shape), datatype)  # noqa: B023 - called at once
                outputs = None if output is None else [placed(client.output("y"), name, *output)]
                return await client.refusal("infer", model, [placed(one, name, size, offset)], outputs=outputs)

            short, long = await refused(len(data) - 1), await refused(len(data) + 1)
            beyond, outside = await refused(len(data), HALF - len(data) + 1), await refused(len(data), HALF)
            small = await refused(len(data), output=(len(data) - 1, 1000))
            last = await refused(len(data), output=(len(data), HALF - len(data) + 1))

            text = "string" if DATATYPES[datatype].name == "BYTES" else f"Expected {len(data)}, got {len(data) - 1}"
            assert (short[0], text in short[1]) == ("INVALID_ARGUMENT", True), short
            assert long[0] == "INVALID_ARGUMENT", long
            for refusal in (beyond, last):
                assert refusal == (
                    "INVALID_ARGUMENT",
                    f"Invalid offset + byte size for shared memory region: '{name}'",
                )
            assert outside == ("INVALID_ARGUMENT", f"Invalid offset for shared memory region: '{name}'")
            assert small[0] == "INTERNAL", small
            assert f"should be at least {len(data)} bytes to hold the results" in small[1]
        assert set(read(handle, 1000, SIZE - 1000)) == {UNTOUCHED}
        await client.call("unregister_system_shared_memory", name)


async def test_regions_and_parts_that_overlap(client: TritonClient) -> None:
    """Two regions of one object; an output over its own input, and over a half of it."""
    values = np.arange(4, dtype=np.float32)
    with region() as (name, handle):
        shm.set_shared_memory_region(handle, [values], offset=100)
        await client.call("register_system_shared_memory", f"{name}_all", f"/{name}", SIZE)
        await client.call("register_system_shared_memory", f"{name}_part", f"/{name}", 32, offset=100)
        x = placed(client.module.InferInput("x", [1, 4], "FP32"), f"{name}_all", 16, 100)

        for begin in (0, 8):
            y = placed(client.output("y"), f"{name}_part", 16, begin)
            await client.call("infer", "identity_fp32", [x], outputs=[y])

            assert read(handle, 100 + begin, 16) == values.tobytes()
        assert read(handle, 100, 8) == values[:2].tobytes()
        for part in ("all", "part"):
            await client.call("unregister_system_shared_memory", f"{name}_{part}")


async def test_compressed_calls_with_shared_memory(client: TritonClient) -> None:
    """What is in shared memory is never compressed; the rest of the request and of the reply is."""
    values = np.arange(4, dtype=np.float32)
    zipped = {"compression_algorithm": "gzip"}
    if client.is_http:
        zipped = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"}
    with region() as (name, handle):
        shm.set_shared_memory_region(handle, [values])
        await client.call("register_system_shared_memory", name, f"/{name}", SIZE)
        x = placed(client.module.InferInput("x", [1, 4], "FP32"), name, 16, 0)

        await client.call("infer", "identity_fp32", [x], outputs=[placed(client.output("y"), name, 16, HALF)], **zipped)

        assert read(handle, HALF, 16) == values.tobytes()
        await client.call("unregister_system_shared_memory", name)
