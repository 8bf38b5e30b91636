"""Values of a mapping: fields of tasks, and a model's outputs as arrays."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.tensors import Tensor, to_numpy

Task = Mapping[str, Any]
"""`id`, and `data` with its fields; other members that Label Studio sends are ignored."""

Array = npt.NDArray[Any]
Outputs = Mapping[str, Array]
"""BYTES are objects of `bytes` or `str`."""


def outputs_of(tensors: Iterable[Tensor]) -> dict[str, Array]:
    """Returns the outputs of a response as arrays."""
    return {tensor.name: to_numpy(tensor) for tensor in tensors}


def field_of(task: Task, field: str) -> Any:
    """Returns a field of a task; dots lead into objects, unless a field has the whole name."""
    data = task.get("data")
    if not isinstance(data, Mapping):
        raise InvalidRequest("the task has no object 'data'")
    value: Any = data
    parts = [field] if field in data else field.split(".")
    for number, part in enumerate(parts, 1):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(str(name)[:60] for name in list(data)[:20]) or "none"
            raise InvalidRequest(f"the task's data has no field '{field}'; it has {known}")
        value = value[part]
        if value is None:
            raise InvalidRequest(f"field '{'.'.join(parts[:number])}' of the task's data is null")
    return value


def numbers(outputs: Outputs, name: str) -> npt.NDArray[np.float64]:
    """Returns an output's numbers in one dimension."""
    array = output(outputs, name)
    if array.dtype.kind not in "biuf":
        raise OutputMismatch(f"output '{name}' has {_kind(array)}, not numbers")
    return array.astype(np.float64).reshape(-1)


def texts(outputs: Outputs, name: str) -> list[str]:
    """Returns an output's texts in one dimension; invalid UTF-8 is replaced."""
    array = output(outputs, name)
    if array.dtype.kind not in "OSU":
        raise OutputMismatch(f"output '{name}' has {_kind(array)}, not text")
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in array.ravel()]


def output(outputs: Outputs, name: str) -> Array:
    """Returns an output."""
    try:
        return outputs[name]
    except KeyError:
        raise OutputMismatch(f"there is no output '{name}'; there are {', '.join(outputs) or 'none'}") from None


def _kind(array: Array) -> str:
    return "text" if array.dtype.kind in "OSU" else f"values of {array.dtype}"
