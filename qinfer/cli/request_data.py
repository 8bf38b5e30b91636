"""Requests of a load test from a file: JSON lines, Parquet, or perf_analyzer's JSON (`--input-data`).

.jsonl      {"x": [[1.0, 2.0]]} in each line: a value for each input
.parquet    a column for each input, a request for each row
.json       {"data": [{"x": {"content": [1.0, 2.0], "shape": [2]}}, …]}, also {"x": [1.0, 2.0]} and {"x": {"b64": …}}

Files of `qinfer record` have parameters and arrivals, too; null in place of an input leaves it out.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qinfer.cli.client import Array, GatewayClient, add_batch_dimension, concrete, fill, random, read_inputs
from qinfer.cli.recorded import ARRIVAL, ARRIVALS_OF_JSON, PARAMETERS, PARAMETERS_OF_JSON
from qinfer.client import TensorMetadata
from qinfer.client.model_flows import as_array
from qinfer.core.messages import Scalar
from qinfer.errors import InvalidRequest
from qinfer.tensors import Tensor, from_numpy, numpy_dtype

MOST = 10_000
"""Further requests of a file are not read."""
MOST_BYTES = 512 * 2**20


class DataRequest(NamedTuple):
    """A request of a load test.

    Attributes:
        tensors: The inputs.
        parameters: The parameters.
        arrival_ms: Milliseconds from the begin of the recording to the arrival; `None` = the file tells no arrivals.
    """

    tensors: list[Tensor]
    parameters: Mapping[str, Scalar] = {}
    arrival_ms: float | None = None


def requests_of(
    client: GatewayClient, model: str, version: int, inputs: Sequence[str] | None, data: Path | None
) -> list[DataRequest]:
    """Returns requests: of a file, of `--input` options, or one of random data.

    Raises:
        InvalidRequest: As `read_requests` and `read_inputs`.
    """
    wanted = client.metadata(model, version).inputs
    if data is not None:
        return read_requests(data, wanted)
    return [DataRequest(read_inputs(inputs, wanted, model) if inputs else fill(wanted, random))]


def read_requests(path: Path, inputs: Sequence[TensorMetadata]) -> list[DataRequest]:
    """Reads at most `MOST` requests, in the order of their arrivals; a missing batch dimension is added.

    Args:
        path: The file; its name tells its format.
        inputs: The inputs of the model.

    Raises:
        InvalidRequest: The file can't be read, has no request, or a value does not fit; the error names the place.
    """
    readers = {".jsonl": _json_lines, ".parquet": _parquet, ".json": _perf_analyzer}
    if path.suffix not in readers:
        raise InvalidRequest(f"{path}: the name ends with none of {', '.join(readers)}, so its format is unknown")
    found: list[DataRequest] = []
    nbytes = 0
    try:
        for number, row in enumerate(islice(readers[path.suffix](path), MOST), 1):
            place = f"{path}, request {number}"
            # an optional input may be null
            tensors = [_tensor(wanted, row, place) for wanted in inputs if row.get(wanted.name, "") is not None]
            found.append(DataRequest(tensors, _parameters_of(row, place), row.get(ARRIVAL)))
            nbytes += sum(len(tensor.data) for tensor in tensors)
            if nbytes > MOST_BYTES:
                raise InvalidRequest(f"{path}: more than {MOST_BYTES // 2**20} MiB of tensors; use a smaller file")
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror or error}") from None
    if not found:
        raise InvalidRequest(f"{path} has no request")
    return sorted(found, key=lambda one: one.arrival_ms or 0.0)


def gaps_of(requests: Sequence[DataRequest], path: Path | None) -> list[float]:
    """Returns the seconds from each arrival to the next; from the last to the first, the mean of the others.

    Raises:
        InvalidRequest: A request has no arrival, or all arrive at one instant.
    """
    arrivals_s = [one.arrival_ms / 1000 for one in requests if isinstance(one.arrival_ms, int | float)]
    if path is None or not arrivals_s or len(arrivals_s) < len(requests):
        raise InvalidRequest(f"{path or 'the request'} has no arrivals; give --data with a file of `qinfer record`")
    between = [later - earlier for earlier, later in pairwise(arrivals_s)]
    if not sum(between):
        raise InvalidRequest(f"{path} has requests of one instant only, so there are no gaps to repeat")
    return [*between, sum(between) / len(between)]


def _parameters_of(row: Mapping[str, Any], place: str) -> dict[str, Scalar]:
    found = row.get(PARAMETERS) or {}
    found = _loads(found.encode(), f"{place}, {PARAMETERS}") if isinstance(found, str) else found
    return dict(_object(found, f"{place}, {PARAMETERS}"))


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
        value = value if isinstance(value, list | np.ndarray) else [value]
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
    document = _object(_loads(path.read_bytes(), str(path)), str(path))
    rows = document.get("data")
    if not isinstance(rows, list):
        raise InvalidRequest(f"{path} has no list 'data', as files for perf_analyzer have")
    beside = {ARRIVAL: document.get(ARRIVALS_OF_JSON), PARAMETERS: document.get(PARAMETERS_OF_JSON)}
    lists = {name: values for name, values in beside.items() if isinstance(values, list) and len(values) == len(rows)}
    for number, row in enumerate(rows):
        for step in row if isinstance(row, list) else [row]:  # a list has the steps of a sequence
            yield {**_object(step, f"{path}, 'data'"), **{name: values[number] for name, values in lists.items()}}


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for number in range(batch.num_rows):
                    yield {name: _plain(batch[name][number]) for name in batch.schema.names}
    except ArrowException as error:
        raise InvalidRequest(f"{path} is not readable as Parquet: {error}") from None


def _plain(scalar: Any) -> Any:
    """Returns a cell as Python's value, and nested lists of numbers as an array, which takes far less time."""
    from pyarrow import types

    values = getattr(scalar, "values", None)
    if values is None:
        return scalar.as_py()
    shape = [len(values)]
    while types.is_list(values.type):
        lengths = values.value_lengths().unique()
        if values.null_count or len(lengths) != 1:  # ragged, which the conversion refuses
            return scalar.as_py()
        shape.append(lengths[0].as_py())
        values = values.flatten()
    if values.null_count or not types.is_primitive(values.type):
        return scalar.as_py()
    return values.to_numpy(zero_copy_only=False).reshape(shape)


def _loads(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place} is not JSON: {error}") from None


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place}: expected an object with a value for each input")
    return value
