"""The same wrong infer request over HTTP and gRPC: one text, and the codes of one row of `status.STATUSES`."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.tensors import pack_bytes
from qinfer.testing import eventually
from tests.support.both_protocols import over_grpc, over_http, status_of
from tests.support.rpc import Rpc

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one gateway for all

ROW = bytes(16)


class Input(NamedTuple):
    """An input; `data` travels as binary data."""

    name: str = "x"
    datatype: str = "FP32"
    shape: Sequence[int] = (1, 4)
    data: bytes = ROW
    parameters: Mapping[str, Any] = {}


class Infer(NamedTuple):
    """An infer request that both protocols can say; the values of parameters are strings and integers."""

    model: str = "echo"
    version: str = ""
    inputs: Sequence[Input] = (Input(),)
    outputs: Sequence[tuple[str, Mapping[str, Any]]] = ()
    id: str = ""
    tail: bytes = b""


def to_http(request: Infer) -> tuple[str, bytes, dict[str, str]]:
    """Returns URL, body and headers."""
    document = {
        "id": request.id,
        "inputs": [
            {
                "name": i.name,
                "datatype": i.datatype,
                "shape": i.shape,
                "parameters": i.parameters or {"binary_data_size": len(i.data)},
            }
            for i in request.inputs
        ],
        "outputs": [{"name": name, "parameters": parameters} for name, parameters in request.outputs],
    }
    text = json.dumps(document).encode()
    version = f"/versions/{request.version}" if request.version else ""
    data = b"".join(i.data for i in request.inputs if not i.parameters)
    length = {"inference-header-content-length": str(len(text))}
    return f"/v2/models/{quote(request.model)}{version}/infer", text + data + request.tail, length


def to_grpc(request: Infer) -> Any:
    """Returns the message."""
    message = pb.ModelInferRequest(model_name=request.model, model_version=request.version, id=request.id)
    for i in request.inputs:
        message.inputs.add(name=i.name, datatype=i.datatype, shape=i.shape, parameters=_parameters(i.parameters))
    for name, parameters in request.outputs:
        message.outputs.add(name=name, parameters=_parameters(parameters))
    tail = [request.tail] if request.tail else []
    message.raw_input_contents.extend([i.data for i in request.inputs if not i.parameters] + tail)
    return message


def _parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: pb.InferParameter(**{"string_param" if isinstance(value, str) else "int64_param": value})
        for name, value in values.items()
    }


async def _infer_both(server: Rpc, request: Infer) -> tuple[tuple[int, str], tuple[str, str]]:
    first = await over_http(server, "POST", *to_http(request))
    return first, await over_grpc(server.stub.ModelInfer(to_grpc(request)))


def texts(*elements: bytes) -> bytes:
    return pack_bytes(elements)


def pair(**changes: Any) -> tuple[Input, Input]:
    a = Input("a", "INT32", (1, 2), bytes(8))
    return a, a._replace(name="b", **changes)


def in_memory(**more: Any) -> Mapping[str, Any]:
    return {"shared_memory_region": "r", "shared_memory_byte_size": 16, **more}


WRONG = {
    "unknown model": Infer("nothing"),
    "model of no name that is allowed": Infer("späte {modelle}"),
    "unknown version": Infer(version="9"),
    "version that is no number": Infer(version="x"),
    "version 0": Infer(version="0"),
    "version too large": Infer(version=str(2**63)),
    "not ready": Infer("loading", version="1"),
    "the model fails": Infer("fails", id="an id"),
    "no inputs": Infer(inputs=()),
    "unknown input": Infer(inputs=(Input("z"),)),
    "too many inputs": Infer(inputs=(Input(), Input("z"))),
    "one input twice": Infer("pair", inputs=(pair()[0], pair()[0])),
    "input missing": Infer("pair", inputs=pair()[:1], id="an id"),
    "wrong datatype": Infer(inputs=(Input(datatype="INT32"),)),
    "wrong shape": Infer(inputs=(Input(shape=(1, 2, 2)),)),
    "wrong size": Infer(inputs=(Input(shape=(1, 5), data=bytes(20)),)),
    "no batch dimension": Infer(inputs=(Input(shape=()),)),
    "batch too large": Infer(inputs=(Input(shape=(9, 4), data=bytes(144)),)),
    "empty batch": Infer(inputs=(Input(shape=(0, 4), data=b""),)),
    "batches that differ": Infer("pair", inputs=pair(shape=(2, 2), data=bytes(16))),
    "too few bytes": Infer(inputs=(Input(data=bytes(12)),)),
    "too many bytes": Infer(inputs=(Input(data=bytes(20)),)),
    "data of no input": Infer(tail=b"more"),
    "too few strings": Infer("text", inputs=(Input("x", "BYTES", (1, 2), texts(b"a")),)),
    "too many strings": Infer("text", inputs=(Input("x", "BYTES", (1, 1), texts(b"a", b"b")),)),
    "half a length": Infer("text", inputs=(Input("x", "BYTES", (1, 1), b"\1\0"),)),
    "half a string": Infer("text", inputs=(Input("x", "BYTES", (1, 1), b"\5\0\0\0ab"),)),
    "unknown output": Infer(outputs=(("z", {}),)),
    "one output twice": Infer(outputs=(("y", {}), ("y", {}))),
    "classes of texts": Infer(
        "text", inputs=(Input("x", "BYTES", (1, 1), texts(b"a")),), outputs=(("y", {"classification": 1}),)
    ),
    "input in memory that is off": Infer(inputs=(Input(parameters=in_memory()),)),
    "output in memory that is off": Infer(outputs=(("y", in_memory()),)),
}


def _without_id(text: str) -> str:
    """Leaves out the id that each reply gives a request without one."""
    return re.sub(r"^\[request id: [0-9A-Z]{26}\]", "[request id]", text)


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_infer_request(common_server: Rpc, name: str) -> None:
    """Both tell the same, and their codes are one."""
    (status, text), (code, details) = await _infer_both(common_server, WRONG[name])

    assert _without_id(details) == _without_id(text)
    assert status == status_of(code)


async def test_a_full_queue(common_server: Rpc) -> None:
    """Neither waits."""
    full = Infer("bounded", id="one too many")
    waiting = [common_server.stub.ModelInfer(to_grpc(full)) for _ in range(3)]

    async def is_full() -> bool:
        return await common_server.running.depth("bounded") == 3

    await eventually(is_full, description="three requests wait")
    (status, text), (code, details) = await _infer_both(common_server, full)

    assert (status, code) == (503, "UNAVAILABLE")
    assert details == text == "[request id: one too many] Exceeds maximum queue size"
    for call in waiting:
        call.cancel()


IN_MEMORY = {
    "region of an input that is not there": Infer(inputs=(Input(parameters=in_memory()),)),
    "region of an output that is not there": Infer(outputs=(("y", in_memory()),)),
    "input beyond the end": Infer(inputs=(Input(parameters=in_memory(shared_memory_region="have")),)),
    "offset beyond the end": Infer(
        inputs=(Input(parameters=in_memory(shared_memory_region="have", shared_memory_offset=2**62)),)
    ),
    "output beyond the end": Infer(outputs=(("y", in_memory(shared_memory_region="have")),)),
    "output too small": Infer(outputs=(("y", in_memory(shared_memory_region="have", shared_memory_byte_size=4)),)),
    "classes in memory": Infer(
        outputs=(("y", in_memory(shared_memory_region="have", shared_memory_byte_size=8, classification=1)),)
    ),
    "too few bytes": Infer(
        inputs=(Input(parameters=in_memory(shared_memory_region="have", shared_memory_byte_size=8)),)
    ),
}


@pytest.mark.parametrize("name", IN_MEMORY)
async def test_wrong_shared_memory_of_a_request(common_server_with_memory: Rpc, name: str, tmp_path: Path) -> None:
    """A region that is unknown, or smaller than what is to be in it."""
    key = f"qinfer-alike-{tmp_path.parent.name}-{tmp_path.name}"[:200]
    file = Path("/dev/shm") / key
    await asyncio.to_thread(file.write_bytes, bytes(8))
    try:
        register = pb.SystemSharedMemoryRegisterRequest(name="have", key=f"/{key}", byte_size=8)
        await common_server_with_memory.stub.SystemSharedMemoryRegister(register)
        (status, text), (code, details) = await _infer_both(common_server_with_memory, IN_MEMORY[name])
        await common_server_with_memory.stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
    finally:
        file.unlink()

    assert _without_id(details) == _without_id(text)
    assert status == status_of(code)
