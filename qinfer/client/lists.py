"""Converts lists and numbers to arrays of a wire datatype, which the model's metadata names.

Values that would change are refused, except by the usual rounding of floats.
"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest
from qinfer.tensors import datatype

Array = npt.NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the numpy dtype of a wire datatype: object for BYTES, float32 for BF16."""
    return np.dtype({"BYTES": "O", "BF16": "<f4"}.get(name) or datatype(name).numpy)


def as_array(name: str, wire: str, value: object) -> Array:
    """Converts nested lists, or an array, to a wire datatype; refuses ragged lists and elements that do not fit."""
    try:
        if wire == "BYTES":
            elements: Array = np.vectorize(_to_bytes, otypes=[object])(np.array(value, dtype=object))
            return elements
        return _numbers(numpy_dtype(wire), value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"input '{name}' can't be read as {wire}: {error}") from None


def _numbers(wanted: np.dtype[Any], value: object) -> Array:
    # numpy would convert [1, 2**63] to floats
    if wanted.kind in "iu" and not isinstance(value, np.ndarray):
        integers: Array = np.vectorize(_to_int, otypes=[object])(np.array(value, dtype=object))
        return integers.astype(wanted)
    natural = np.asarray(value)
    if natural.dtype.kind not in "biuf":
        raise ValueError("its elements are not numbers")
    with np.errstate(invalid="ignore", over="ignore"):
        array = natural.astype(wanted)
        if wanted.kind == "f":
            fits = np.isinf(array) <= np.isinf(natural.astype(np.float64))
        elif wanted.kind in "iu" and natural.dtype.kind == "f":
            fits = (array == natural) & (natural < float(np.iinfo(wanted).max) + 1)
        else:
            fits = array == natural
    if not np.all(fits):
        raise ValueError(f"{natural[~fits].flat[0]} does not fit")
    return array


def _to_int(element: object) -> int:
    if isinstance(element, int) or (isinstance(element, float) and element.is_integer()):
        return int(element)
    raise ValueError(f"{_describe(element)} instead of an integer")


def _to_bytes(element: object) -> bytes:
    if isinstance(element, bytes):
        return element
    if isinstance(element, str | int | float) and not isinstance(element, bool):
        return str(element).encode()
    raise ValueError(f"{_describe(element)} instead of a text")


def _describe(element: object) -> str:
    return "lists of different lengths" if isinstance(element, list) else json.dumps(element)
