"""Tensors in Triton's traces (level `TENSORS`): copied while a request is handled, formatted later in a thread.

Only their first bytes are kept.
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/trace.md
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from qinfer.core.messages import CalledTensor
from qinfer.errors import InvalidRequest
from qinfer.tensors import DATATYPES, Tensor, iter_bytes, to_numpy

INPUT, OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"

MOST_BYTES = 64 * 1024
"""The most bytes of a tensor that a trace keeps."""

Taken = list[tuple[str, Tensor]]


def copy_tensors(activity: str, tensors: Sequence[Tensor]) -> Taken:
    """Copies the beginnings of tensors."""
    return [(activity, Tensor(t.name, t.datatype, t.shape, bytes(memoryview(t.data)[:MOST_BYTES]))) for t in tensors]


def called(tensors: Sequence[CalledTensor]) -> Taken:
    """Returns a call's tensors."""
    return [(OUTPUT if t.is_output else INPUT, Tensor(t.name, t.datatype, t.shape, t.data)) for t in tensors]


def weight_of(taken: Taken) -> int:
    """Returns how many plain traces take the same memory."""
    return sum(len(tensor.data) for _, tensor in taken) // 256


def written(number: int, activity: str, tensor: Tensor) -> dict[str, Any]:
    """Returns a tensor in Triton's format."""
    shown = {
        "name": tensor.name,
        "data": ",".join(_elements(tensor)),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }
    return {"id": number, "activity": activity, "tensor": shown}


def _elements(tensor: Tensor) -> list[str]:
    if tensor.datatype == "BYTES":
        found: list[str] = []
        with suppress(InvalidRequest):
            for element in iter_bytes(tensor.data):
                found.append(json.dumps(bytes(element).decode(errors="replace"), ensure_ascii=False))  # noqa: PERF401
        return found
    size = DATATYPES[tensor.datatype].itemsize
    count = len(tensor.data) // size
    array = to_numpy(Tensor(tensor.name, tensor.datatype, (count,), tensor.data[: count * size]))
    return list(map(str, array.astype("u1") if tensor.datatype == "BOOL" else array))
