"""Messages of many objects are refused before they become those."""

import tracemalloc

import pytest

from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer_workers.bridge.config import BodyOptions
from qinfer_workers.bridge.decode import BodyCodec

SPEC = ModelSpec(
    name="m",
    backend="b",
    inputs=(TensorSpec(name="X", datatype="FP32", dims=(1,)),),
    outputs=(TensorSpec(name="Y", datatype="FP32", dims=(1,)),),
    max_batch_size=8,
)
SIZE = 2**20
MOST_BYTES = 6 * SIZE
"""A row of such objects would take 25 times its size."""

JSON, LINES = "application/json", "application/x-ndjson"
UNITS = ("{},", "[],", '"",', '{"a":1},')


def body(kind: str, unit: str) -> bytes:
    values = f"[{unit * (SIZE // len(unit))}{unit[:-1]}]"
    return {"row": f'{{"X":{values}}}', "kserve": f'{{"inputs":{values}}}', "tensor": TENSOR.replace("@", values)}[
        kind
    ].encode()


TENSOR = '{"inputs":[{"name":"X","datatype":"FP32","shape":[1,1],"data":@}]}'


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("kind", "content_type"), [("row", LINES), ("kserve", JSON), ("tensor", JSON)])
def test_json(kind: str, content_type: str, unit: str) -> None:
    text = body(kind, unit)
    codec = BodyCodec(BodyOptions(max_bytes=SIZE + 2**20), SPEC)

    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            codec.decode(text, content_type)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_empty_lines_become_no_objects() -> None:
    codec = BodyCodec(BodyOptions(), SPEC)

    tracemalloc.start()
    try:
        rows = codec.decode(b"\n" * SIZE + b'{"X":1}\n{"X":2}' + b"\n" * SIZE, LINES).rows
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()

    assert rows == 2
