"""Requests of load tests from files."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from qinfer.cli.request_data import read_requests
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

    assert all([tensor.shape for tensor in each] == [(1, 2), (1, 1)] for each in found)
    assert to_numpy(found[0][0]).tolist() == [[1.0, 2.0]]
    assert (to_numpy(found[0][1]).item(), to_numpy(found[-1][1]).item()) == (first, last)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv", [], "the name ends with none of"),
        ("a.jsonl", [], "has no request"),
        ("a.jsonl", [{"x": [1.0, 2.0]}], "request 1 has no 'text'; it has x"),
        ("a.jsonl", [{"x": ["one", "two"], "text": ["a"]}], "request 1: input 'x' can't be read as FP32"),
        ("a.jsonl", [[1]], "line 1: expected an object"),
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
