"""The objects that large requests become while they are decoded take a few times their bytes, and no multiple of it."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from qinfer.errors import QinferError
from qinfer.tensors import Tensor
from qinfer.wire.json_pieces import JsonBounds
from qinfer.wire.kserve_grpc import decode_infer as decode_grpc
from qinfer.wire.kserve_grpc import parse_infer, prefix
from qinfer.wire.kserve_json import decode_infer, elements
from qinfer.wire.outputs import NO_REGIONS
from qinfer.wire.protos import grpc_service_pb2 as pb

SIZE = 2 * 2**20
MOST = 2 * SIZE + 24 * 2**20
"""The tensor, what was appended to it, and the objects of a piece: that of 256 KiB of `"",` takes some 10 MB."""


@contextmanager
def within(most_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


JSON = {
    "strings": ('"",', "BYTES", "[1,#]"),
    "strings of another shape": ('"",', "BYTES", "[1,1]"),
    "numbers": ("0,", "INT8", "[#]"),
    "numbers of another shape": ("1.5,", "FP64", "[3]"),
    "nested": ("[0],", "INT8", "[#]"),
    "empty arrays": ("[],", "INT8", "[1]"),
    "objects": ("{},", "FP32", "[1]"),
}


@pytest.mark.parametrize(("unit", "datatype", "shape"), JSON.values(), ids=JSON)
def test_json(unit: str, datatype: str, shape: str) -> None:
    count = SIZE // len(unit)
    data = f"[{unit * count}{unit[:-1]}]"
    shape = shape.replace("#", str(count + 1))
    body = f'{{"inputs":[{{"name":"x","shape":{shape},"datatype":"{datatype}","data":{data}}}]}}'.encode()

    with within(MOST):
        ignoring_refusals(lambda: decode_infer(body, None, "m", 0, JsonBounds(nbytes=SIZE)))


CONTENTS = {
    "strings": (b"\x42\x00", "BYTES", 2, False),
    "strings of another shape": (b"\x42\x00", "BYTES", 0, False),
    "numbers": (b"\x01", "INT8", 1, True),
    "numbers by themselves": (b"\x10\x01", "INT8", 2, False),
}


@pytest.mark.parametrize(("unit", "datatype", "each", "is_packed"), CONTENTS.values(), ids=CONTENTS)
def test_typed_contents(unit: bytes, datatype: str, each: int, *, is_packed: bool) -> None:
    data = unit * (SIZE // len(unit))
    contents = prefix(2, len(data)) + data if is_packed else data
    shape = [SIZE // each] if each else [1]
    shell = pb.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=shape).SerializeToString()
    tensor = shell + prefix(5, len(contents)) + contents
    message = prefix(5, len(tensor)) + tensor

    with within(MOST + 2 * SIZE):
        ignoring_refusals(lambda: decode_grpc(parse_infer(message), NO_REGIONS, 2 * SIZE))


def test_outputs() -> None:
    tensor = Tensor("y", "FP32", (SIZE // 4,), bytes(SIZE))

    with within(3 * SIZE + 24 * 2**20):
        text = elements(tensor)

    assert len(text) == SIZE + 1


def ignoring_refusals(decode: Callable[[], object]) -> None:
    with suppress(QinferError):
        decode()
