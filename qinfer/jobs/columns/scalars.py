"""Scalar columns → one input tensor: a column each element of a row, in the order given."""

from collections.abc import Sequence
from math import prod

import numpy as np
import pyarrow as pa

from qinfer.errors import ErrorCode, InvalidRequest
from qinfer.jobs.columns import casts
from qinfer.jobs.columns.row_errors import Array, Indices, RowErrors
from qinfer.models.spec import TensorSpec


class ScalarColumns:
    """Makes one tensor of one or several scalar columns.

    Args:
        tensor: The input.
        columns: Their names.
        kinds: Their types.
        shape: The shape of one row; one dimension may be -1.

    Raises:
        InvalidRequest: A type does not fit, or the columns do not fill a row.
    """

    def __init__(
        self, tensor: TensorSpec, columns: Sequence[str], kinds: Sequence[pa.DataType], shape: tuple[int, ...]
    ) -> None:
        self.name = tensor.name
        self.columns = tuple(columns)
        self._datatype = tensor.datatype
        for column, kind in zip(columns, kinds, strict=True):
            check_type(tensor, column, casts.plain(kind), kind)
        self._shape = _filled(tensor, shape, columns)
        plain = [casts.plain(kind) for kind in kinds]
        self._columns = [
            (column, fine == kind, casts.bounds(fine, tensor.datatype))
            for column, kind, fine in zip(columns, kinds, plain, strict=True)
        ]

    def check(self, record: pa.RecordBatch, errors: RowErrors) -> Indices | None:
        """Marks the rows of a batch that no tensor can be made of; returns `None`: all rows have one shape."""
        for column, is_plain, allowed in self._columns:
            values = _values(record, column, is_plain=is_plain)
            if values.null_count:
                mask = values.is_null().to_numpy(zero_copy_only=False)
                errors.mark(mask, ErrorCode.INVALID_REQUEST, f"column '{column}' is null")
            if allowed and (mask := casts.beyond(values, allowed)) is not None:
                errors.mark(mask, ErrorCode.INVALID_REQUEST, beyond_text(column, self._datatype))
        return None

    def convert(self, record: pa.RecordBatch) -> Array:
        """Returns the array `[rows, *shape]` of a batch whose rows are all fine."""
        rows = record.num_rows
        if len(self.columns) == 1:
            values = casts.as_plain(record.column(self.columns[0]))
            return casts.to_array(values, self._datatype).reshape(rows, *self._shape)
        array = np.empty((rows, len(self.columns)), casts.target_dtype(self._datatype))
        for index, (column, is_plain, _) in enumerate(self._columns):
            array[:, index] = casts.to_array(_values(record, column, is_plain=is_plain), self._datatype)
        return array.reshape(rows, *self._shape)


def _values(record: pa.RecordBatch, column: str, *, is_plain: bool) -> pa.Array:
    values = record.column(column)
    return values if is_plain else casts.as_plain(values)  # a dictionary may have a null that `null_count` passes over


def check_type(tensor: TensorSpec, column: str, kind: pa.DataType, shown: pa.DataType) -> None:
    """Checks that values of a type can become a tensor's elements.

    Args:
        tensor: The input.
        column: Its column.
        kind: The plain type of the values.
        shown: The column's own type, for the message.

    Raises:
        InvalidRequest: They can't.
    """
    if not casts.fits(kind, tensor.datatype):
        raise InvalidRequest(
            f"column '{column}' is of type {shown}, which does not fit input '{tensor.name}' of {tensor.datatype}; "
            "map another column to it, or convert the column in the inputs"
        )


def beyond_text(column: str, datatype: str) -> str:
    """Returns the message of a row with a number that does not fit."""
    return f"column '{column}' has a value that {datatype} can't hold"


def _filled(tensor: TensorSpec, shape: tuple[int, ...], columns: Sequence[str]) -> tuple[int, ...]:
    """Returns the shape of a row that has as many elements as there are columns."""
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
