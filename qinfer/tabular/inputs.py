"""Converts columns of an Arrow batch to a model's input arrays, without work per row.

Unusable rows are marked in the batch's `RowErrors` and left out. With variable dimensions, rows of one shape form a
`Piece`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tabular.batches import Array, Indices, RowErrors
from qinfer.tabular.schemas import Fields, pick, schema_without_views, select, without_views
from qinfer.tabular.spec import ColumnChoice, Columns
from qinfer.tabular.tensor_columns import ListColumn, ScalarColumns
from qinfer.tabular.texts import read_type, text_values

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows (`None` = all) of a batch whose tensors have one shape.

    Arrays may be read-only; BYTES are objects of `bytes`, BF16 is float32.
    """

    rows: Indices | None
    count: int
    inputs: Mapping[str, Array]


class DecodedBatch(NamedTuple):
    """Executable pieces, and errors of other rows."""

    pieces: tuple[Piece, ...]
    errors: RowErrors


def is_left_out(spec: ColumnChoice, tensor: TensorSpec, schema: pa.Schema) -> bool:
    """Returns whether the model runs without an optional input."""
    return tensor.optional and tensor.name not in spec.columns and not Fields(schema).places(tensor.name)


class InputColumns:
    """Makes a model's inputs from rows' columns, for every batch."""

    def __init__(self, spec: ColumnChoice, model: ModelSpec, schema: pa.Schema) -> None:
        known = {tensor.name for tensor in model.inputs}
        if unknown := [name for name in spec.columns if name not in known]:
            raise InvalidRequest(
                f"field 'columns' names input '{unknown[0]}', which model '{model.name}' lacks; "
                f"it has {', '.join(sorted(known))}"
            )
        fields = Fields(schema)
        self._tensors = [
            _tensor_columns(tensor, spec.columns_of(tensor.name), schema, fields)
            for tensor in model.inputs
            if not is_left_out(spec, tensor, schema)
        ]
        self.columns = tuple(dict.fromkeys(name for tensor in self._tensors for name in tensor.columns))
        flat = select(schema, self.columns)
        self._texts = [field for field in flat if read_type(field) != field.type]
        self._decimal_point = spec.csv_form.decimal_point
        self._has_views = schema_without_views(flat).types != flat.types

    def decode(self, record: pa.RecordBatch, errors: RowErrors | None = None) -> DecodedBatch:
        """Makes the arrays of a batch."""
        record = pick(record, self.columns)
        if self._has_views:
            record = without_views(record)
        errors = RowErrors(record.num_rows) if errors is None else errors
        for field in self._texts:
            values = text_values(record.column(field.name), field, self._decimal_point, errors)
            record = record.set_column(record.schema.get_field_index(field.name), field.name, values)
        shapes: list[Indices] = []
        for tensor in self._tensors:
            found = tensor.check(record, errors)
            if found is not None:
                shapes.append(found)
        rows: Indices | None = None
        if (bad := errors.bad) is not None:
            rows = np.flatnonzero(~bad)
            record = record.take(pa.array(rows))
            shapes = [found[rows] for found in shapes]
        if not record.num_rows:
            return DecodedBatch((), errors)
        if not shapes:
            return DecodedBatch((self._piece(record, rows),), errors)
        return DecodedBatch(tuple(self._by_shape(record, rows, np.concatenate(shapes, axis=1))), errors)

    def _piece(self, record: pa.RecordBatch, rows: Indices | None) -> Piece:
        inputs = {tensor.name: tensor.convert(record) for tensor in self._tensors}
        return Piece(rows, record.num_rows, inputs)

    def _by_shape(self, record: pa.RecordBatch, rows: Indices | None, shapes: Indices) -> list[Piece]:
        if (shapes == shapes[0]).all():
            return [self._piece(record, rows)]
        _, group = np.unique(shapes, axis=0, return_inverse=True)
        group = group.reshape(-1)
        order = np.argsort(group, kind="stable")
        pieces = []
        for chosen in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            own = chosen if rows is None else rows[chosen]
            pieces.append(self._piece(record.take(pa.array(chosen)), own))
        return pieces


def _tensor_columns(
    tensor: TensorSpec, given: Columns, schema: pa.Schema, fields: Fields
) -> ScalarColumns | ListColumn:
    chosen = []
    for name in given.columns:
        field = fields.field(name)
        if field is None:
            raise InvalidRequest(_absent(tensor, name, schema, len(fields.places(name))))
        chosen.append(field.with_type(read_type(field)))
    shape = _shape(tensor, given)
    kinds = schema_without_views(pa.schema(chosen)).types
    if len(given.columns) == 1 and ListColumn.reads(kinds[0]):
        return ListColumn(tensor, given, kinds[0], shape)
    return ScalarColumns(tensor, given, kinds, shape)


def _absent(tensor: TensorSpec, name: str, schema: pa.Schema, count: int) -> str:
    if count:
        return f"the inputs have {count} columns named '{name}'; rename all but one"
    names = schema.names
    there = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return (
        f"input '{tensor.name}' is made of column '{name}', which the inputs lack; they have {there}. "
        f'Name its column in \'columns\', such as {{"{tensor.name}": "{names[0] if names else "x"}"}}'
    )


def _shape(tensor: TensorSpec, given: Columns) -> tuple[int, ...]:
    if not given.shape:
        return tensor.dims
    dims = tensor.dims
    if len(given.shape) != len(dims) or any(d not in (-1, s) for d, s in zip(dims, given.shape, strict=True)):
        raise InvalidRequest(
            f"field 'columns.{tensor.name}.shape' is {list(given.shape)}; the input's dimensions are {list(dims)}, "
            "where -1 can be any number"
        )
    return given.shape
