"""Assembles batches: the key that requests of a batch share, and its arrays; pure."""

import mmap
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from itertools import chain
from math import prod

import msgspec
import numpy as np

from qinfer.backends.base import Array, Batch, Room
from qinfer.core.messages import InferRequest
from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec
from qinfer.tensors import Bytes, Tensor, datatype, object_array, string_elements, to_numpy

LONG_BYTES = 64 * 1024
"""Strings of this size take some milliseconds."""

KeyFunction = Callable[[InferRequest], Hashable]


def key_function(spec: ModelSpec) -> KeyFunction:
    """Returns the function of a batching key: requests with equal keys may share a batch (reference §3.3 step 4).

    Names and shapes count only with optional inputs and variable dimensions; ragged shapes never do.
    """
    if all((i.ragged or -1 not in i.dims) and not i.optional for i in spec.inputs):
        return no_key
    if any(i.ragged for i in spec.inputs):
        return partial(_ragged_key, frozenset(i.name for i in spec.inputs if i.ragged))
    if len(spec.inputs) == 1:
        return _single_input_key
    return _many_inputs_key


def no_key(_: InferRequest) -> Hashable:
    """Returns the same key for every request."""
    return None


def _single_input_key(request: InferRequest) -> Hashable:
    return request.inputs[0].shape[1:] if request.inputs else ()


def _many_inputs_key(request: InferRequest) -> Hashable:
    return tuple(sorted((tensor.name, tensor.shape[1:]) for tensor in request.inputs))


def _ragged_key(ragged: Collection[str], request: InferRequest) -> Hashable:
    return tuple(sorted((tensor.name, () if tensor.name in ragged else tensor.shape[1:]) for tensor in request.inputs))


def assemble(
    requests: Sequence[InferRequest], rows: Sequence[int], ragged: Collection[str] = (), room: Room | None = None
) -> Batch:
    """Builds a batch; without `room`, a single request's inputs share its memory unless that is another process's."""
    first = requests[0].inputs
    if room is not None and (inputs := _placed(requests, sum(rows), room)) is not None:
        return Batch(requests=requests, rows=rows, inputs=inputs)
    if len(requests) == 1:
        if requests[0].memory is not None:
            first = tuple([_copied(tensor) for tensor in first])
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


def _copied(tensor: Tensor) -> Tensor:
    data = tensor.data
    is_mapped = isinstance(data, memoryview) and isinstance(data.obj, mmap.mmap)
    return msgspec.structs.replace(tensor, data=bytes(data)) if is_mapped else tensor


def is_large(requests: Sequence[InferRequest]) -> bool:
    """Returns whether `room` pays."""
    return len(requests) * sum([len(tensor.data) for tensor in requests[0].inputs]) > LONG_BYTES


def takes_long(requests: Sequence[InferRequest]) -> bool:
    """Returns whether an instance's thread should build many strings."""
    nbytes = sum([len(t.data) for request in requests for t in request.inputs if t.datatype == "BYTES"])
    return nbytes > LONG_BYTES


def strings_of(requests: Sequence[InferRequest]) -> int:
    """Counts the strings of requests."""
    return sum([prod(t.shape) for request in requests for t in request.inputs if t.datatype == "BYTES"])


def _column(requests: Sequence[InferRequest], position: int, name: str) -> list[Tensor]:
    column = [request.inputs[position] for request in requests]
    for index in [index for index, tensor in enumerate(column) if tensor.name != name]:
        column[index] = next(t for t in requests[index].inputs if t.name == name)
    return column


def _placed(requests: Sequence[InferRequest], total: int, room: Room) -> dict[str, Array] | None:
    first = requests[0].inputs
    columns = [_column(requests, position, t.name) for position, t in enumerate(first)]
    places = room([sum([len(tensor.data) for tensor in column]) for column in columns])
    if places is None:
        return None
    for column, place in zip(columns, places, strict=True):
        begin = 0
        for tensor in column:
            if size := len(tensor.data):
                place[begin : begin + size] = np.frombuffer(tensor.data, np.uint8)
                begin += size
    if len(requests) == 1:
        return {
            t.name: to_numpy(Tensor(t.name, t.datatype, t.shape, place.data))
            for t, place in zip(first, places, strict=True)
        }
    return {
        t.name: stack(t, column, total, place.data) for t, column, place in zip(first, columns, places, strict=True)
    }


def joined(column: list[Tensor]) -> Array:
    """Concatenates the elements of tensors."""
    return np.concatenate([to_numpy(tensor).reshape(-1) for tensor in column])


def stack(first: Tensor, column: list[Tensor], total: int, data: Bytes = b"") -> Array:
    """Joins tensors, unless `data` has them, to `total` rows."""
    dtype = datatype(first.datatype).numpy
    shape = (total, *first.shape[1:])
    try:
        if first.datatype == "BYTES":
            return object_array(list(chain.from_iterable(map(string_elements, column)))).reshape(shape)
        if dtype is None:
            return np.concatenate([to_numpy(tensor) for tensor in column]).reshape(shape)
        return np.frombuffer(data or b"".join([tensor.data for tensor in column]), dtype=dtype).reshape(shape)
    except ValueError:
        nbytes = sum(tensor.nbytes for tensor in column)
        raise InvalidRequest(f"input '{first.name}' has {nbytes} bytes, which do not fill {list(shape)}") from None
