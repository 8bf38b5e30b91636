"""Converts scalar columns, or a column of lists, to an input tensor.

Integer tensors take whole numbers within their range. Float tensors take any number, rounded, but no values that
would become infinite, and no integers beyond 2^53 that FP64 would round: these are rather identifiers than measures.
Booleans are 0 and 1, and vice versa. Floats never become integers, nor texts numbers.
"""

from collections.abc import Callable, Sequence
from math import nan, prod
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qinfer.errors import ErrorCode, InvalidRequest
from qinfer.models.spec import TensorSpec
from qinfer.tabular.batches import Array, Indices, Mask, RowErrors
from qinfer.tabular.schemas import as_list, run_values
from qinfer.tabular.spec import Columns, Null, shown
from qinfer.tensors import DATATYPES, numpy_dtype

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


def fill_of(null: Null, datatype: str) -> Any:
    """Returns the element that replaces a null, or raises `ValueError`."""
    if datatype == "BYTES":
        if isinstance(null, str) and null != "nan":
            return null.encode()
        raise ValueError
    if null == "nan" and datatype in FLOATS:
        return nan
    if isinstance(null, str):
        raise ValueError
    low, high = (0, 1) if datatype == "BOOL" else _extremes(_DTYPES[datatype])
    if not low <= null <= high or (float(null) if datatype in FLOATS else int(null)) != null:
        raise ValueError
    return null


def to_array(values: pa.Array, datatype: str, fill: Any = None) -> Array:
    """Returns fitting values as a flat array."""
    if fill is not None and values.null_count:
        array = np.full(len(values), fill, numpy_dtype(datatype))
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


def _is_rounded(integers: Array) -> Mask:
    """Returns where FP64 can't represent a 64-bit integer."""
    floats = integers.astype(np.float64)
    has_place = floats < 2.0 ** (64 if integers.dtype.kind == "u" else 63)  # the largest integers round up to this
    back = np.where(has_place, floats, 0.0).astype(integers.dtype)
    rounded: Mask = ~has_place | (back != integers)
    return rounded


def _extremes(dtype: np.dtype[Any]) -> tuple[int | float, int | float]:
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


_RAGGED = -1
_MESSAGES = 100
_NULL_REMEDY = "'null' of its input can give it a value"


class ScalarColumns:
    """Makes a tensor of scalar columns; `shape` is of a row."""

    def __init__(
        self, tensor: TensorSpec, given: Columns, kinds: Sequence[pa.DataType], shape: tuple[int, ...]
    ) -> None:
        self.name = tensor.name
        self.columns = given.columns
        self._datatype = tensor.datatype
        found = list(zip(self.columns, kinds, map(plain, kinds), strict=True))
        for column, kind, fine in found:
            _check_type(tensor, column, fine, kind)
        self._shape = _filled(tensor, shape, self.columns)
        self._columns = [
            _Scalar(column, bounds(fine, tensor.datatype), _fill(tensor, given, column)) for column, kind, fine in found
        ]

    def check(self, record: pa.RecordBatch, errors: RowErrors) -> Indices | None:
        """Marks unusable rows; all others have one shape."""
        notes = _RowMarks(errors, None)
        for column in self._columns:
            values = as_plain(record.column(column.name))  # dictionaries may have nulls that `null_count` misses
            if values.null_count and column.fill is None:
                mask = values.is_null().to_numpy(zero_copy_only=False)
                notes.mark(mask, f"column '{column.name}' is null; {_NULL_REMEDY}")
            if column.allowed and (misfits := beyond(values, column.allowed)) is not None:
                notes.mark_beyond(misfits, misfits.places, column.name, self._datatype)
        return None

    def convert(self, record: pa.RecordBatch) -> Array:
        """Returns the array `[rows, *shape]` of valid rows."""
        rows = record.num_rows
        arrays = (to_array(as_plain(record.column(c.name)), self._datatype, c.fill) for c in self._columns)
        if len(self.columns) == 1:
            return next(arrays).reshape(rows, *self._shape)
        whole = np.empty((rows, len(self.columns)), numpy_dtype(self._datatype))
        for index, array in enumerate(arrays):
            whole[:, index] = array
        return whole.reshape(rows, *self._shape)


class _Scalar(NamedTuple):
    name: str
    allowed: ValueBounds | None
    fill: Any


class ListColumn:
    """Makes a tensor of a column of lists, nested like the tensor, or flat in row-major order.

    In `shape`, of one row, -1 may differ from row to row.
    """

    def __init__(self, tensor: TensorSpec, given: Columns, kind: pa.DataType, shape: tuple[int, ...]) -> None:
        self.name = tensor.name
        self.columns = (column,) = given.columns
        self._column = column
        self._datatype = tensor.datatype
        self._fill = _fill(tensor, given, column)
        sizes, element = _levels(kind)
        _check_type(tensor, column, element, kind)
        self._depth = len(sizes)
        self._layout = _ElementLayout.from_type(kind)
        if self._layout is not None and not given.shape:
            shape = _of_tensors(tensor, column, shape, self._layout)
        self._is_flat = self._depth == 1 and len(shape) != 1
        self._shape = _resolved(tensor, column, kind, shape, sizes)
        self._is_fixed = _RAGGED not in self._shape
        self._remedy = f"; {_NULL_REMEDY}" if self._fill is None else ", of no known length"

    @staticmethod
    def reads(kind: pa.DataType) -> bool:
        """Returns whether a type is a list type."""
        return _is_list(plain(kind))

    def check(self, record: pa.RecordBatch, errors: RowErrors) -> Indices | None:
        """Marks unusable rows; returns what separates the others into arrays, if anything.

        That is their shape `[rows, dimensions]`, or with a fixed shape `[rows, 1]` whether a row is a filled null.
        """
        array = as_plain(record.column(self._column))
        rows = is_filled = None
        if array.null_count:
            mask = array.is_null().to_numpy(zero_copy_only=False)
            if self._fill is not None and self._is_fixed:
                is_filled = mask[:, np.newaxis].astype(np.int64)
            else:
                _RowMarks(errors, None).mark(mask, f"column '{self._column}' is null{self._remedy}")
            rows = np.flatnonzero(~mask)
            array = array.drop_null()
        shapes = np.zeros((len(array), len(self._shape)), np.int64)
        if len(array):
            notes = _RowMarks(errors, rows)
            found = _walk(array, self._depth)
            self._check_sizes(found, notes)
            if found.has_null is not None:
                notes.mark(found.has_null, f"column '{self._column}' has a list with a null in it")
            self._check_values(found, notes)
            shapes = self._shapes(found.sizes)
        if rows is None or self._is_fixed:
            return is_filled if self._is_fixed else shapes
        whole = np.zeros((record.num_rows, shapes.shape[1]), np.int64)
        whole[rows] = shapes
        return whole

    def convert(self, record: pa.RecordBatch) -> Array:
        """Returns the array `[rows, …]` of valid rows of one shape."""
        array = as_plain(record.column(self._column))
        rows = len(array)
        shape = self._shape
        if array.null_count:  # all are null: broadcast one element
            return np.broadcast_to(np.array(self._fill, numpy_dtype(self._datatype)), (rows, *shape))
        if not self._is_fixed:
            shape = tuple(self._shapes(_walk(array.slice(0, 1), self._depth).sizes)[0].tolist())
        for _ in range(self._depth):
            array = as_plain(array.flatten())
        values = to_array(array, self._datatype, self._fill)
        if self._layout is not None:
            values = self._layout.in_order(values, rows)
        return values.reshape(rows, *shape)

    def _check_sizes(self, found: "_ListElements", notes: "_RowMarks") -> None:
        for level in range(self._depth):
            sizes = found.sizes[:, level]
            if (ragged := sizes == _RAGGED).any():
                notes.mark(ragged, f"column '{self._column}' has lists of different lengths in one row")
            if self._is_flat:
                step = prod(dim for dim in self._shape if dim != _RAGGED)
                wrong = sizes != step if self._is_fixed else sizes % step != 0
                expected = str(step) if self._is_fixed else f"a multiple of {step}"
            elif self._shape[level] == _RAGGED:
                continue
            else:
                wrong, expected = sizes != self._shape[level], str(self._shape[level])
            places = np.flatnonzero(wrong & ~ragged)
            notes.mark_each(places, sizes[places], self._size_text(expected))

    def _size_text(self, expected: str) -> Callable[[object], str]:
        return lambda size: (
            f"column '{self._column}' has a list of {'a wrong length' if size is None else size}, not {expected}"
        )

    def _check_values(self, found: "_ListElements", notes: "_RowMarks") -> None:
        if found.values.null_count and self._fill is None:
            places = np.flatnonzero(found.values.is_null().to_numpy(zero_copy_only=False))
            notes.mark(found.rows_of(places), f"column '{self._column}' has a null in its list{self._remedy}")
        allowed = bounds(found.values.type, self._datatype)
        if allowed and (misfits := beyond(found.values, allowed)) is not None:
            notes.mark_beyond(misfits, found.rows_of(misfits.places), self._column, self._datatype)

    def _shapes(self, sizes: Indices) -> Indices:
        if not self._is_flat:
            return sizes
        step = prod(dim for dim in self._shape if dim != _RAGGED)
        shapes = np.empty((len(sizes), len(self._shape)), np.int64)
        for index, dim in enumerate(self._shape):
            shapes[:, index] = sizes[:, 0] // step if dim == _RAGGED else dim
        return shapes


class _ElementLayout(NamedTuple):
    """Fixed-shape tensors (https://arrow.apache.org/docs/format/CanonicalExtensions.html).

    `order` has the stored dimension of each dimension.
    """

    stored: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def from_type(cls, kind: pa.DataType) -> "_ElementLayout | None":
        if not isinstance(kind, pa.FixedShapeTensorType):
            return None
        return cls(tuple(kind.shape), tuple(kind.permutation or range(len(kind.shape))))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored[dimension] for dimension in self.order)

    def in_order(self, values: Array, rows: int) -> Array:
        return values.reshape(rows, *self.stored).transpose(0, *(dimension + 1 for dimension in self.order))


class _RowMarks:
    """Marks rows by their number among those that are not null."""

    def __init__(self, errors: RowErrors, rows: Indices | None) -> None:
        self._errors = errors
        self._rows = rows

    def mark(self, places: Mask | Indices, message: str) -> None:
        chosen = np.flatnonzero(places) if places.dtype == np.bool_ else places
        chosen = chosen if self._rows is None else self._rows[chosen]
        self._errors.mark(chosen, ErrorCode.INVALID_REQUEST, message)

    def mark_each(self, places: Indices, values: Array, text: Callable[[object], str]) -> None:
        found = np.unique(values)
        if len(found) > _MESSAGES:
            self.mark(places, text(None))
            return
        for value in found.tolist():
            self.mark(places[values == value], text(value))

    def mark_beyond(self, misfits: Misfits, places: Indices, column: str, datatype: str) -> None:
        places, first = np.unique(places, return_index=True)
        remedy = "convert the column in the inputs, or map it to another input"

        def text(value: object) -> str:
            has = "a value that" if value is None else f"the value {value}, which"
            return f"column '{column}' has {has} {datatype} can't hold; {remedy}"

        self.mark_each(places, misfits.values[first], text)


class _ListElements(NamedTuple):
    """`sizes` are by row and level, `_RAGGED` if they differ within a row; `owner` is the row of each element."""

    sizes: Indices
    values: pa.Array
    owner: Indices | None
    has_null: Mask | None

    def rows_of(self, places: Indices) -> Indices:
        if self.owner is not None:
            return self.owner[places]
        return places // (len(self.values) // len(self.sizes))


def _walk(array: pa.Array, depth: int) -> _ListElements:
    rows = len(array)
    sizes = np.empty((rows, depth), np.int64)
    owner: Indices | None = None
    has_null: Mask | None = None
    for level in range(depth):
        if level and array.null_count:
            own = np.repeat(np.arange(rows), len(array) // rows) if owner is None else owner
            valid = array.is_valid().to_numpy(zero_copy_only=False)
            has_null = np.zeros(rows, np.bool_) if has_null is None else has_null
            has_null[own[~valid]] = True
            array, owner = array.drop_null(), own[valid]
        lengths = _lengths(array)
        uniform = isinstance(lengths, int) or not len(lengths) or bool((lengths == lengths[0]).all())
        if owner is None and uniform and rows:
            sizes[:, level] = lengths if isinstance(lengths, int) else (lengths[0] if len(lengths) else 0)
        else:
            each = np.full(len(array), lengths) if isinstance(lengths, int) else lengths
            owner = np.repeat(np.arange(rows), len(array) // rows if rows else 0) if owner is None else owner
            sizes[:, level] = _common(each, owner, rows)
            owner = np.repeat(owner, each)
        array = as_plain(array.flatten())
    return _ListElements(sizes, array, owner, has_null)


def _lengths(array: pa.Array) -> int | Indices:
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    lengths: Indices = np.diff(offsets).astype(np.int64, copy=False)
    return lengths


def _common(lengths: Indices, owner: Indices, rows: int) -> Indices:
    """Returns each row's common length: `_RAGGED` = they differ, 0 = no lists."""
    least = np.full(rows, np.iinfo(np.int64).max)
    most = np.zeros(rows, np.int64)
    np.minimum.at(least, owner, lengths)
    np.maximum.at(most, owner, lengths)
    return np.where(least >= most, most, _RAGGED)


def _is_list(kind: pa.DataType) -> bool:
    return any((pa.types.is_list(kind), pa.types.is_large_list(kind), pa.types.is_fixed_size_list(kind)))


def _levels(kind: pa.DataType) -> tuple[list[int], pa.DataType]:
    """Returns the size of each list level, -1 = variable, and the element type."""
    sizes = []
    kind = plain(kind)
    while _is_list(kind):
        sizes.append(int(kind.list_size) if pa.types.is_fixed_size_list(kind) else _RAGGED)
        kind = plain(kind.value_type)
    return sizes, kind


def _of_tensors(tensor: TensorSpec, column: str, dims: tuple[int, ...], layout: _ElementLayout) -> tuple[int, ...]:
    """Rows have the tensors' shape, flat, or with other dimensions of 1."""
    shape = layout.shape
    if len(dims) == len(shape) and all(dim in (_RAGGED, size) for dim, size in zip(dims, shape, strict=True)):
        return shape
    if len(dims) == 1 and dims[0] in (_RAGGED, prod(shape)):
        return (prod(shape),)
    sizes = [size for size in shape if size != 1]
    asked = [dim for dim in dims if dim != 1]
    if len(sizes) != len(asked) or any(d not in (_RAGGED, size) for d, size in zip(asked, sizes, strict=True)):
        raise InvalidRequest(
            f"column '{column}' has tensors of the shape {list(shape)}; a row of input '{tensor.name}' has the shape "
            f"{list(dims)}; map another column, or give 'shape' to have their elements in row-major order"
        )
    rest = iter(sizes)
    return tuple(1 if dim == 1 else next(rest) for dim in dims)


def _resolved(
    tensor: TensorSpec, column: str, kind: pa.DataType, shape: tuple[int, ...], sizes: list[int]
) -> tuple[int, ...]:
    text = f"column '{column}' is of type {kind}; a row of input '{tensor.name}' has the shape {list(shape)}"
    if len(sizes) == len(shape):
        if any(_RAGGED not in (size, dim) and size != dim for size, dim in zip(sizes, shape, strict=True)):
            raise InvalidRequest(f"{text}, another size; map another column, or give 'shape'")
        return tuple(size if dim == _RAGGED else dim for size, dim in zip(sizes, shape, strict=True))
    if len(sizes) > 1:
        raise InvalidRequest(f"{text}; nest the lists {len(shape)} deep, or make them flat")
    if shape.count(_RAGGED) > 1:
        raise InvalidRequest(f"{text}, which a flat list does not determine; give 'shape' with at most one -1")
    step = prod(dim for dim in shape if dim != _RAGGED)
    if sizes[0] == _RAGGED:
        return shape
    if sizes[0] % step or (_RAGGED not in shape and sizes[0] != step):
        raise InvalidRequest(f"{text}, another number of elements; map another column, or give 'shape'")
    return tuple(sizes[0] // step if dim == _RAGGED else dim for dim in shape)


def _check_type(tensor: TensorSpec, column: str, kind: pa.DataType, shown: pa.DataType) -> None:
    if fits(kind, tensor.datatype):
        return
    remedy = "map another column to it, or convert the column in the inputs"
    if pa.types.is_struct(kind) and kind.num_fields:
        remedy = f"map one of its fields to it, such as '{column}.{kind.field(0).name}'"
    raise InvalidRequest(
        f"column '{column}' is of type {shown}, which does not fit input '{tensor.name}' of {tensor.datatype}; {remedy}"
    )


def _fill(tensor: TensorSpec, given: Columns, column: str) -> Any:
    null = given.null_of(column)
    if null == "error":
        return None
    try:
        return fill_of(null, tensor.datatype)
    except ValueError:
        what = "a text" if tensor.datatype == "BYTES" else f"a value of {tensor.datatype}"
        raise InvalidRequest(
            f"field 'columns.{shown(tensor.name)}.null' is {shown(str(null))!r}; input '{tensor.name}' is of "
            f'{tensor.datatype}: give {what}, or "error"' + (', or "nan"' if tensor.datatype in FLOATS else "")
        ) from None


def _filled(tensor: TensorSpec, shape: tuple[int, ...], columns: Sequence[str]) -> tuple[int, ...]:
    count = len(columns)
    fixed = prod(dim for dim in shape if dim != -1)
    variable = sum(dim == -1 for dim in shape)
    if variable == 0 and fixed == count:
        return shape
    if variable == 1 and fixed and count % fixed == 0:
        return tuple(count // fixed if dim == -1 else dim for dim in shape)
    if variable > 1 and fixed == count == 1:
        return tuple(abs(dim) for dim in shape)
    number = f"the scalar column '{columns[0]}' makes" if count == 1 else f"{count} columns make"
    raise InvalidRequest(
        f"{number} {count} element(s) of input '{tensor.name}', whose rows have the shape {list(shape)}; "
        "map as many columns as a row has elements, a list column, or give 'shape'"
    )
