"""Requests of a load test from a file: JSON lines, Parquet, or perf_analyzer's JSON (`--input-data`).

.jsonl      {"x": [[1.0, 2.0]]} in each line: a value for each input
.parquet    a column for each input, a request for each row
.json       {"data": [{"x": {"content": [1.0, 2.0], "shape": [2]}}, …]}, also {"x": [1.0, 2.0]} and {"x": {"b64": …}}
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.cli.client import Array, GatewayClient, add_batch_dimension, concrete, fill, random, read_inputs
from qinfer.client import TensorMetadata
from qinfer.client.model_flows import as_array
from qinfer.errors import InvalidRequest
from qinfer.tensors import Tensor, from_numpy, numpy_dtype

MOST = 10_000
"""Further requests of a file are not read."""
MOST_BYTES = 512 * 2**20


def requests_of(
    client: GatewayClient, model: str, version: int, inputs: Sequence[str] | None, data: Path | None
) -> list[list[Tensor]]:
    """Returns the inputs of requests: of a file, of `--input` options, or one of random data.

    Raises:
        InvalidRequest: As `read_requests` and `read_inputs`.
    """
    wanted = client.metadata(model, version).inputs
    if data is not None:
        return read_requests(data, wanted)
    return [read_inputs(inputs, wanted, model) if inputs else fill(wanted, random)]


def read_requests(path: Path, inputs: Sequence[TensorMetadata]) -> list[list[Tensor]]:
    """Reads the inputs of at most `MOST` requests; a missing batch dimension is added.

    Args:
        path: The file; its name tells its format.
        inputs: The inputs of the model.

    Raises:
        InvalidRequest: The file can't be read, has no request, or a value does not fit; the error names the place.
    """
    readers = {".jsonl": _json_lines, ".parquet": _parquet, ".json": _perf_analyzer}
    if path.suffix not in readers:
        raise InvalidRequest(f"{path}: the name ends with none of {', '.join(readers)}, so its format is unknown")
    found: list[list[Tensor]] = []
    nbytes = 0
    try:
        for number, row in enumerate(islice(readers[path.suffix](path), MOST), 1):
            found.append([_tensor(wanted, row, f"{path}, request {number}") for wanted in inputs])
            nbytes += sum(len(tensor.data) for tensor in found[-1])
            if nbytes > MOST_BYTES:
                raise InvalidRequest(f"{path}: more than {MOST_BYTES // 2**20} MiB of tensors; use a smaller file")
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror or error}") from None
    if not found:
        raise InvalidRequest(f"{path} has no request")
    return found


def _tensor(wanted: TensorMetadata, row: Mapping[str, Any], place: str) -> Tensor:
    if wanted.name not in row:
        raise InvalidRequest(f"{place} has no '{wanted.name}'; it has {', '.join(sorted(row)) or 'nothing'}")
    try:
        array = _elements(wanted, row[wanted.name])
        return from_numpy(wanted.name, add_batch_dimension(array, wanted.shape), wanted.datatype)
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error.message}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"{place}: '{wanted.name}' is not {wanted.datatype}: {error}") from None


def _elements(wanted: TensorMetadata, value: Any) -> Array:
    if not isinstance(value, dict):
        value = value if isinstance(value, list) else [value]
        flat = as_array(wanted.name, wanted.datatype, value)
        return _shaped(flat, wanted) if flat.ndim == 1 else flat
    if "b64" in value:
        raw = base64.b64decode(value["b64"], validate=True)
        if wanted.datatype == "BYTES":
            return np.array([raw], dtype=object)
        return _shaped(np.frombuffer(raw, numpy_dtype(wanted.datatype)), wanted)
    if "content" not in value:
        raise InvalidRequest(f"'{wanted.name}' has neither 'content' nor 'b64'")
    flat = as_array(wanted.name, wanted.datatype, value["content"])
    return flat.reshape(value["shape"]) if "shape" in value else _shaped(flat, wanted)


def _shaped(flat: Array, wanted: TensorMetadata) -> Array:
    """Gives a list of elements the model's shape, where it has just as many."""
    shape = concrete(wanted.shape)
    return flat.reshape(shape) if flat.size == int(np.prod(shape)) else flat


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _object(_loads(line, f"{path}, line {number}"), f"{path}, line {number}")


def _perf_analyzer(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.stat().st_size > MOST_BYTES:
        raise InvalidRequest(f"{path} is larger than {MOST_BYTES // 2**20} MiB; use JSON lines")
    rows = _object(_loads(path.read_bytes(), str(path)), str(path)).get("data")
    if not isinstance(rows, list):
        raise InvalidRequest(f"{path} has no list 'data', as files for perf_analyzer have")
    for row in rows:
        for step in row if isinstance(row, list) else [row]:  # a list has the steps of a sequence
            yield _object(step, f"{path}, 'data'")


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                yield from batch.to_pylist()
    except ArrowException as error:
        raise InvalidRequest(f"{path} is not readable as Parquet: {error}") from None


def _loads(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place} is not JSON: {error}") from None


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place}: expected an object with a value for each input")
    return value
