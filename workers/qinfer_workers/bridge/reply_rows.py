"""Outputs → rows: as JSON lines, or as an Arrow batch. Pure.

An output of one element a row becomes a plain value, `[k]` a list, `[a, b]` lists in lists, as the columns of a bulk
job's output. BYTES become texts, unless the model's parameter `qinfer.binary_outputs` names the output.
"""

import io
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.models.config.to_spec import BINARY_OUTPUTS
from qinfer.tensors import Tensor, to_numpy

_encoder = msgspec.json.Encoder()


class OutputColumn(msgspec.Struct, frozen=True, array_like=True):
    """An output whose column can't be told from one response alone.

    Attributes:
        name: The output.
        dims: Its dimensions without the batch dimension; -1 is variable.
        is_binary: Whether its BYTES are no text.
    """

    name: str
    dims: tuple[int, ...]
    is_binary: bool = False


def json_lines(outputs: Iterable[Tensor], columns: Mapping[str, OutputColumn], *, is_batched: bool) -> bytes:
    """Returns a JSON object for each row; NaN and infinities are null.

    Args:
        outputs: The outputs.
        columns: What is known of some of them, by name.
        is_batched: Whether the first dimension counts rows.

    Raises:
        InvalidRequest: An output's bytes are not UTF-8.
        OutputMismatch: An output's bytes do not fill its shape, or it has another number of rows.
    """
    values = {}
    for tensor in outputs:
        array, dims = _rows(tensor, columns.get(tensor.name), is_batched=is_batched)
        if tensor.datatype == "BYTES":
            array = _texts(tensor.name, array)
        values[tensor.name] = (array if dims else array.reshape(len(array))).tolist()
    _check_counts(values)
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return _encoder.encode_lines(rows)


def arrow_batch(
    outputs: Iterable[Tensor], columns: Mapping[str, OutputColumn], *, is_batched: bool, is_file: bool
) -> bytes:
    """Returns a record batch with a column for each output, as Arrow's stream or file.

    Args:
        outputs: The outputs.
        columns: What is known of some of them, by name.
        is_batched: Whether the first dimension counts rows.
        is_file: Whether it is to be a file.

    Raises:
        InvalidRequest: An output's bytes are not UTF-8, and it is not known to be no text.
        OutputMismatch: An output's bytes do not fill its shape, or it has another number of rows.
    """
    values = {}
    for tensor in outputs:
        column = columns.get(tensor.name)
        array, dims = _rows(tensor, column, is_batched=is_batched)
        values[tensor.name] = _column(tensor, array, dims, is_binary=column is not None and column.is_binary)
    _check_counts(values)
    batch = pa.RecordBatch.from_arrays(list(values.values()), names=list(values))
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batch.schema) if is_file else pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _rows(tensor: Tensor, column: OutputColumn | None, *, is_batched: bool) -> tuple[Any, tuple[int, ...]]:
    """Returns an output as an array of rows, and the dimensions of a row; none when it has one element."""
    array = to_numpy(tensor)
    if not is_batched:
        array = array[np.newaxis]
    dims = column.dims if column is not None else array.shape[1:]
    return array, () if all(dim == 1 for dim in dims) else dims


def _texts(name: str, array: Any) -> Any:
    texts = np.empty(array.shape, object)
    try:
        texts.reshape(-1)[:] = [value.decode() for value in array.reshape(-1).tolist()]
    except UnicodeDecodeError:
        raise _no_text(name) from None
    return texts


def _no_text(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"output '{name}' has bytes that are not UTF-8; name it in the model's parameter '{BINARY_OUTPUTS}' and set "
        "'reply' of the route's 'body' to arrow, or to kserve"
    )


def _column(tensor: Tensor, array: Any, dims: tuple[int, ...], *, is_binary: bool) -> pa.Array:
    flat = array.reshape(-1)
    if tensor.datatype == "BYTES":
        values = pa.array(flat, pa.binary())
        if not is_binary:
            try:
                values = values.cast(pa.string())
            except pa.ArrowInvalid:
                raise _no_text(tensor.name) from None
    else:
        values = pa.array(flat)
    shape = array.shape[1:]
    for level in reversed(range(len(dims))):
        field = pa.field("element", values.type, nullable=False)
        if dims[level] != -1:
            values = pa.FixedSizeListArray.from_arrays(values, type=pa.list_(field, shape[level]))
        else:
            count = len(array) * int(np.prod(shape[:level], dtype=np.int64))
            offsets = pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(shape[level]))
            values = pa.ListArray.from_arrays(offsets, values, type=pa.list_(field))
    return values


def _check_counts(values: Mapping[str, Any]) -> None:
    counts = {name: len(column) for name, column in values.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"'{name}' {count}" for name, count in counts.items())
        raise OutputMismatch(f"the outputs have different numbers of rows: {told}")
