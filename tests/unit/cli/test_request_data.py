"""Requests of load tests from files."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from qinfer.cli.recorded import ARRIVAL, PARAMETERS
from qinfer.cli.request_data import gaps_of, read_requests
from qinfer.client import TensorMetadata
from qinfer.errors import InvalidRequest
from qinfer.tensors import to_numpy

INPUTS = [
    TensorMetadata(name="x", datatype="FP32", shape=(-1, 2)),
    TensorMetadata(name="text", datatype="BYTES", shape=(-1, 1)),
]


def written(path: Path, content: Any) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(content), path)
    else:
        path.write_text("\n".join(map(json.dumps, content)) if path.suffix == ".jsonl" else json.dumps(content))
    return path


PLAIN = [{"x": [1.0, 2.0], "text": ["a"]}, {"x": [[3.0, 4.0]], "text": [["ü"]]}]
RAW = base64.b64encode(np.array([1.0, 2.0], np.float32).tobytes()).decode()
PERF_ANALYZER = {
    "data": [
        {"x": {"content": [1.0, 2.0], "shape": [2]}, "text": {"b64": base64.b64encode(b"a").decode()}},
        [{"x": {"b64": RAW}, "text": ["b"]}, {"x": {"content": [5.0, 6.0]}, "text": {"content": ["c"]}}],
    ]
}


@pytest.mark.parametrize(
    ("name", "content", "first", "last"),
    [
        ("a.jsonl", PLAIN, b"a", "ü".encode()),
        ("a.parquet", [{"x": [1.0, 2.0], "text": "a"}, {"x": [3.0, 4.0], "text": "ü"}], b"a", "ü".encode()),
        ("a.json", PERF_ANALYZER, b"a", b"c"),
    ],
)
def test_each_format_gives_tensors_of_the_models_shape(
    tmp_path: Path, name: str, content: Any, first: bytes, last: bytes
) -> None:
    found = read_requests(written(tmp_path / name, content), INPUTS)

    assert all([tensor.shape for tensor in each.tensors] == [(1, 2), (1, 1)] for each in found)
    assert to_numpy(found[0].tensors[0]).tolist() == [[1.0, 2.0]]
    assert (to_numpy(found[0].tensors[1]).item(), to_numpy(found[-1].tensors[1]).item()) == (first, last)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv", [], "the name ends with none of"),
        ("a.jsonl", [], "has no request"),
        ("a.jsonl", [{"x": [1.0, 2.0]}], "request 1 has no 'text'; it has x"),
        ("a.jsonl", [{"x": ["one", "two"], "text": ["a"]}], "request 1: input 'x' can't be read as FP32"),
        ("a.jsonl", [[1]], "line 1: expected an object"),
        ("a.parquet", [{"x": [[1.0, 2.0], [3.0]], "text": "a"}], "'x' can't be read as FP32"),
        ("a.parquet", [{"x": [1.0, 2.0], "text": "a", PARAMETERS: "[1]"}], "qinfer.parameters: expected an object"),
        ("a.json", {"rows": []}, "has no list 'data'"),
        ("a.json", {"data": [{"x": {"b64": "%"}, "text": ["a"]}]}, "'x' is not FP32"),
        ("a.json", {"data": [{"x": {"shape": [2]}, "text": ["a"]}]}, "'x' has neither 'content' nor 'b64'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: Any, error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        read_requests(written(tmp_path / name, content), INPUTS)


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be read"):
        read_requests(tmp_path / "missing.jsonl", INPUTS)
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    with pytest.raises(InvalidRequest, match="is not readable as Parquet"):
        read_requests(tmp_path / "broken.parquet", INPUTS)
    (tmp_path / "broken.jsonl").write_bytes(b'{"x": ')
    with pytest.raises(InvalidRequest, match="line 1 is not JSON"):
        read_requests(tmp_path / "broken.jsonl", INPUTS)


def test_requests_come_in_the_order_of_their_arrivals_with_their_gaps(tmp_path: Path) -> None:
    """The last gap, before the requests are repeated, is the mean of the others."""
    rows = [{"x": [float(n), 0.0], "text": "a", ARRIVAL: at} for n, at in enumerate((500.0, 0.0, 100.0))]

    found = read_requests(written(tmp_path / "a.parquet", rows), INPUTS)

    assert [to_numpy(one.tensors[0])[0, 0] for one in found] == [1.0, 2.0, 0.0]
    assert gaps_of(found, tmp_path / "a.parquet") == pytest.approx([0.1, 0.4, 0.25])


def test_requests_without_arrivals_have_no_gaps(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", PLAIN)

    with pytest.raises(InvalidRequest, match=r"a.jsonl has no arrivals; give --data with a file of `qinfer record`"):
        gaps_of(read_requests(file, INPUTS), file)
    with pytest.raises(InvalidRequest, match="the request has no arrivals"):
        gaps_of([], None)


def test_an_input_that_is_null_is_left_out(tmp_path: Path) -> None:
    found = read_requests(written(tmp_path / "a.jsonl", [{"x": [1.0, 2.0], "text": None}]), INPUTS)

    assert [tensor.name for tensor in found[0].tensors] == ["x"]
