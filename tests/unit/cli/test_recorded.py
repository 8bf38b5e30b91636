"""Files of `qinfer record`, written and read."""

import json
from pathlib import Path

import numpy as np
import pytest

from qinfer.cli.console import CommandFailed
from qinfer.cli.recorded import opened_writer
from qinfer.cli.request_data import read_requests
from qinfer.client import RecordedRequest, TensorMetadata
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer.wire.bodies import RecordedTensor

INPUTS = [
    TensorMetadata(name="image", datatype="FP16", shape=(-1, 2, -1)),
    TensorMetadata(name="ids", datatype="INT64", shape=(-1, 2)),
    TensorMetadata(name="text", datatype="BYTES", shape=(-1, 1)),
    TensorMetadata(name="flag", datatype="BOOL", shape=(-1, 1)),
]


def recorded(arrival_ms: float, *tensors: Tensor, **parameters: bool | int | str) -> RecordedRequest:
    inputs = tuple(
        RecordedTensor(name=one.name, datatype=one.datatype, shape=one.shape, data=bytes(one.data)) for one in tensors
    )
    return RecordedRequest(arrival_ms=arrival_ms, inputs=inputs, parameters=parameters)


def tensors_of(rows: int, text: bytes = b"a", length: int = 3) -> list[Tensor]:
    image = np.arange(rows * 2 * length, dtype=np.float16).reshape(rows, 2, length) / 8
    ids = np.full((rows, 2), 2**62 + 1, np.int64)
    texts = np.full((rows, 1), text, dtype=object)
    flags = np.ones((rows, 1), np.bool_)
    values = (("image", image, "FP16"), ("ids", ids, "INT64"), ("text", texts, "BYTES"), ("flag", flags, "BOOL"))
    return [from_numpy(name, array, datatype) for name, array, datatype in values]


@pytest.mark.parametrize("name", ["a.parquet", "a.json"])
def test_a_file_gives_the_requests_back(tmp_path: Path, name: str) -> None:
    """Shapes, values, parameters and arrivals survive, also of requests with several rows."""
    sent = [recorded(0.5, *tensors_of(1), tone="kind"), recorded(20.0, *tensors_of(3, b"b", 5), n=2)]

    with opened_writer(tmp_path / name, INPUTS) as write:
        write(sent[:1])
        write(sent[1:])
    found = read_requests(tmp_path / name, INPUTS)

    assert [one.arrival_ms for one in found] == [0.5, 20.0]
    assert [dict(one.parameters) for one in found] == [{"tone": "kind"}, {"n": 2}]
    for one, before in zip(found, sent, strict=True):
        for tensor, was in zip(one.tensors, before.tensors, strict=True):
            assert (tensor.name, tensor.datatype, tensor.shape) == (was.name, was.datatype, was.shape)
            assert to_numpy(tensor).tolist() == to_numpy(was).tolist()


def test_an_optional_input_may_be_missing(tmp_path: Path) -> None:
    sent = [recorded(0.0, *tensors_of(1)[:1], *tensors_of(1)[2:]), recorded(1.0, *tensors_of(1))]

    with opened_writer(tmp_path / "a.parquet", INPUTS) as write:
        write(sent)
    found = read_requests(tmp_path / "a.parquet", INPUTS)

    assert [[tensor.name for tensor in one.tensors] for one in found] == [
        ["image", "text", "flag"],
        ["image", "ids", "text", "flag"],
    ]


def test_json_has_the_form_of_perf_analyzer(tmp_path: Path) -> None:
    """Its items have no batch dimension."""
    with opened_writer(tmp_path / "a.json", INPUTS) as write:
        write([recorded(3.0, *tensors_of(1))])

    document = json.loads((tmp_path / "a.json").read_text())
    assert document["data"][0]["ids"] == {"content": [2**62 + 1] * 2, "shape": [2]}
    assert document["data"][0]["image"]["shape"] == [2, 3]


def test_bytes_that_are_no_text_need_parquet(tmp_path: Path) -> None:
    with (
        pytest.raises(CommandFailed, match=r"no UTF-8; give a FILE.parquet"),
        opened_writer(tmp_path / "a.json", INPUTS) as write,
    ):
        write([recorded(3.0, *tensors_of(1, b"\xff"))])

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(CommandFailed, match="can't be written"),
        opened_writer(tmp_path / "missing" / "a.json", INPUTS),
    ):
        pass
