"""Casts Arrow values to numpy arrays of a tensor's datatype. Pure.

Integer tensors take whole numbers within their range. Float tensors take any number, rounded, but no values that
would become infinite, and no integers beyond 2^53 that FP64 would round: these are rather identifiers than measures.
Booleans are 0 and 1, and vice versa. Floats never become integers, nor texts numbers.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qinfer.tabular.batches import Array, Indices
from qinfer.tabular.schemas import as_list, run_values
from qinfer.tabular.spec import Null
from qinfer.tensors import DATATYPES

FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})

_EXACT = 2**53
"""FP64 represents all integers up to this."""
_DTYPES = {name: np.dtype(kind.numpy or "<f4") for name, kind in DATATYPES.items() if name != "BYTES"}


class ValueBounds(NamedTuple):
    """Values that fit; `or_exact` adds all integers of FP64."""

    low: Any
    high: Any
    or_exact: bool = False


class Misfits(NamedTuple):
    """Elements that do not fit."""

    places: Indices
    values: Array


def plain(kind: pa.DataType) -> pa.DataType:
    """Returns a type without dictionary, run lengths, extension and decimals."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        elif pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
            kind = pa.large_list(kind.value_type)
        elif pa.types.is_decimal(kind):
            kind = pa.float64()
        else:
            return kind


def as_plain(array: pa.Array) -> pa.Array:
    """Casts an array to its `plain` type."""
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        elif isinstance(array, pa.RunEndEncodedArray):
            array = run_values(array)
        elif pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
            array = as_list(array)
        elif pa.types.is_decimal(array.type):
            array = pc.cast(array, pa.float64())
        else:
            return array


def is_number(kind: pa.DataType) -> bool:
    """Returns whether a type holds integers or floats."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a type holds strings or bytes."""
    checks = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary")
    return any(getattr(pa.types, f"is_{check}")(kind) for check in checks)


def fits(kind: pa.DataType, datatype: str) -> bool:
    """Returns whether a type suits a datatype, apart from single values."""
    if pa.types.is_null(kind):  # a column without values
        return True
    if datatype == "BYTES":
        return is_text(kind)
    if pa.types.is_floating(kind):
        return datatype in FLOATS
    return any((pa.types.is_integer(kind), pa.types.is_boolean(kind)))


def bounds(kind: pa.DataType, datatype: str) -> ValueBounds | None:
    """Returns the values of a suitable type that fit; `None` = all."""
    if datatype == "BYTES" or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return None
    source = np.dtype(kind.to_pandas_dtype())
    low, high = (0, 1) if datatype == "BOOL" else _extremes(_DTYPES[datatype])
    least, most = _extremes(source)
    is_rounded = datatype in FLOATS and source.kind in "iu" and high > _EXACT
    if is_rounded:
        low, high = -_EXACT, _EXACT
    if low <= least and most <= high:
        return None
    if source.kind == "f":
        return ValueBounds(float(low), float(high))
    return ValueBounds(max(int(low), least), min(int(high), most), is_rounded)


def beyond(values: pa.Array, allowed: ValueBounds) -> Misfits | None:
    """Finds numbers that do not fit."""
    extremes = pc.min_max(values)
    low, high = extremes["min"].as_py(), extremes["max"].as_py()
    if low is None or (low >= allowed.low and high <= allowed.high):
        return None
    numbers = _numbers(values.fill_null(0) if values.null_count else values)
    mask = (numbers < allowed.low) | (numbers > allowed.high)
    if numbers.dtype.kind == "f":
        mask &= np.isfinite(numbers)
    places = np.flatnonzero(mask)
    if allowed.or_exact:
        places = places[_is_rounded(numbers[places])]
    return Misfits(places, numbers[places]) if places.size else None


def target_dtype(datatype: str) -> np.dtype[Any]:
    """Returns a datatype's numpy dtype: float32 for BF16, object for BYTES."""
    if datatype == "BYTES":
        return np.dtype(object)
    return _DTYPES[datatype]


def fill_of(null: Null, datatype: str) -> Any:
    """Returns the element that replaces a null, or raises `ValueError`."""
    if datatype == "BYTES":
        if isinstance(null, str) and null != "nan":
            return null.encode()
        raise ValueError
    if null == "nan" and datatype in FLOATS:
        return math.nan
    if isinstance(null, str):
        raise ValueError
    low, high = (0, 1) if datatype == "BOOL" else _extremes(_DTYPES[datatype])
    if not low <= null <= high or (float(null) if datatype in FLOATS else int(null)) != null:
        raise ValueError
    return null


def to_array(values: pa.Array, datatype: str, fill: Any = None) -> Array:
    """Returns fitting values as a flat array."""
    if fill is not None and values.null_count:
        array = np.full(len(values), fill, target_dtype(datatype))
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        array[valid] = to_array(values.drop_null(), datatype)
        return array
    if datatype == "BYTES":
        return _objects(values)
    return _numbers(values).astype(_DTYPES[datatype], copy=False)


def _numbers(values: pa.Array) -> Array:
    numbers: Array = values.to_numpy(zero_copy_only=False)
    return numbers


def _objects(values: pa.Array) -> Array:
    if pa.types.is_string(values.type):
        values = values.cast(pa.binary())
    elif pa.types.is_large_string(values.type) or pa.types.is_string_view(values.type):
        values = values.cast(pa.large_binary())
    array: Array = values.to_numpy(zero_copy_only=False)
    return array


def _is_rounded(integers: Array) -> npt.NDArray[np.bool_]:
    """Returns where FP64 can't represent a 64-bit integer."""
    floats = integers.astype(np.float64)
    has_place = floats < 2.0 ** (64 if integers.dtype.kind == "u" else 63)  # the largest integers round up to this
    back = np.where(has_place, floats, 0.0).astype(integers.dtype)
    rounded: npt.NDArray[np.bool_] = ~has_place | (back != integers)
    return rounded


def _extremes(dtype: np.dtype[Any]) -> tuple[int | float, int | float]:
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
