"""Assembly of batches: the key that requests share which fit one another, and the arrays of a `Batch`; pure."""

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from math import prod

import numpy as np

from qinfer.backends.base import Array, Batch
from qinfer.core.messages import InferRequest
from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec
from qinfer.tensors import Tensor, datatype, to_numpy

LONG_BYTES = 64 * 1024
"""Strings of so many bytes are up to 16,384, which take some milliseconds."""

KeyFunction = Callable[[InferRequest], Hashable]


def key_function(spec: ModelSpec) -> KeyFunction:
    """Returns what two requests must have in common to share a batch (reference §3.3 step 4).

    Nothing when every dimension is fixed and every input required; else the inputs' names and their shapes without the
    batch dimension. The shapes of ragged inputs do not count.
    """
    if all((i.ragged or -1 not in i.dims) and not i.optional for i in spec.inputs):
        return no_key
    if any(i.ragged for i in spec.inputs):
        return partial(_ragged_key, frozenset(i.name for i in spec.inputs if i.ragged))
    if len(spec.inputs) == 1:
        return _single_input_key
    return _many_inputs_key


def no_key(_: InferRequest) -> Hashable:
    """Any two requests may share a batch."""
    return None


def _single_input_key(request: InferRequest) -> Hashable:
    return request.inputs[0].shape[1:] if request.inputs else ()


def _many_inputs_key(request: InferRequest) -> Hashable:
    return tuple(sorted((tensor.name, tensor.shape[1:]) for tensor in request.inputs))


def _ragged_key(ragged: Collection[str], request: InferRequest) -> Hashable:
    return tuple(sorted((tensor.name, () if tensor.name in ragged else tensor.shape[1:]) for tensor in request.inputs))


def assemble(requests: Sequence[InferRequest], rows: Sequence[int], ragged: Collection[str] = ()) -> Batch:
    """Builds a batch.

    Args:
        requests: The requests, in batch order, with equal keys.
        rows: Rows of each.
        ragged: The names of ragged inputs.

    Returns:
        Inputs as `dtype[sum(rows), …]`, ragged ones of several requests as `dtype[elements]`; those of a single
        request share its memory, read-only.

    Raises:
        InvalidRequest: A tensor's bytes do not fill its shape, or its shapes do not make up `sum(rows)`.
        UnsupportedDatatype: No such datatype.
    """
    first = requests[0].inputs
    if len(requests) == 1:
        return Batch(requests=requests, rows=rows, inputs={t.name: to_numpy(t) for t in first})
    total = sum(rows)
    return Batch(
        requests=requests,
        rows=rows,
        inputs={
            t.name: joined(_column(requests, position, t.name))
            if t.name in ragged
            else stack(t, _column(requests, position, t.name), total)
            for position, t in enumerate(first)
        },
    )


def takes_long(requests: Sequence[InferRequest]) -> bool:
    """Tells whether a batch is to be built in the thread of an instance: each of its strings becomes an object."""
    nbytes = sum([len(t.data) for request in requests for t in request.inputs if t.datatype == "BYTES"])
    return nbytes > LONG_BYTES


def strings_of(requests: Sequence[InferRequest]) -> int:
    """Counts the strings of requests."""
    return sum([prod(t.shape) for request in requests for t in request.inputs if t.datatype == "BYTES"])


def _column(requests: Sequence[InferRequest], position: int, name: str) -> list[Tensor]:
    """Returns each request's tensor of that name; requests mostly list their inputs in the same order."""
    column = [request.inputs[position] for request in requests]
    for index in [index for index, tensor in enumerate(column) if tensor.name != name]:
        column[index] = next(t for t in requests[index].inputs if t.name == name)
    return column


def joined(column: list[Tensor]) -> Array:
    """Makes one dimension of the elements of tensors of any shapes, one tensor after the other.

    Raises:
        InvalidRequest: Bytes do not fill a shape.
        UnsupportedDatatype: No such datatype.
    """
    return np.concatenate([to_numpy(tensor).reshape(-1) for tensor in column])


def stack(first: Tensor, column: list[Tensor], total: int) -> Array:
    """Makes one array of the tensors of one name, which the first tells about; they have `total` rows altogether.

    Raises:
        InvalidRequest: Their bytes do not fill the shape.
    """
    dtype = datatype(first.datatype).numpy
    shape = (total, *first.shape[1:])
    try:
        if dtype is None:
            return np.concatenate([to_numpy(tensor) for tensor in column]).reshape(shape)
        return np.frombuffer(b"".join([tensor.data for tensor in column]), dtype=dtype).reshape(shape)
    except ValueError:
        nbytes = sum(tensor.nbytes for tensor in column)
        raise InvalidRequest(f"input '{first.name}' has {nbytes} bytes, which do not fill {list(shape)}") from None
