"""Converts a model's outputs to columns, in the input's row order, beside copied columns and the rows' origins.

A tensor with one element per row becomes a plain column, `[k]` lists of fixed size, `[a, b]` lists in lists, and a
variable dimension lists of any size. BYTES become strings, which must be UTF-8, unless the model parameter
`qinfer.binary_outputs` (comma-separated names) makes them binary. `top_k` ranks like Triton's classification
(`qinfer.wire.outputs.greatest`). With a decoupled model, a row has a list with one item per response. A failed row has
nulls.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from math import prod
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from qinfer.errors import ErrorCode, InvalidRequest, OutputMismatch
from qinfer.jobs.columns import (
    ERROR_COLUMNS,
    PLACE_COLUMNS,
    copied_columns,
    has_place,
    output_columns,
    problems,
    written_outputs,
)
from qinfer.jobs.job import JobSpec
from qinfer.models.config.to_spec import BINARY_OUTPUTS
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tabular.batches import Array, Indices, RowBatch, RowErrors, Segment
from qinfer.tabular.schemas import as_read, list_type, lists_of, select
from qinfer.tabular.texts import JSON_NUMBER
from qinfer.tensors import Tensor, numpy_dtype, to_numpy
from qinfer.wire.outputs import greatest


class ScoredRows(NamedTuple):
    """Outputs of the model for some rows (`None` = all) of a batch.

    BYTES are objects of `bytes` or `str`. For a decoupled model, an output is `[rows]` of tuples with an array per
    response.
    """

    rows: Indices | None
    outputs: Mapping[str, Array | Tensor]


class OutputColumns:
    """Makes the columns of a job's output.

    `good` and `failed` are the columns of a part and its file of failed rows.
    """

    def __init__(self, spec: JobSpec, model: ModelSpec, schema: pa.Schema, urls: Sequence[str] = ()) -> None:
        if found := next(problems(spec, model, schema), None):
            raise InvalidRequest(found)
        binary = {name.strip() for name in model.parameters.get(BINARY_OUTPUTS, "").split(",")}
        self._outputs: list[_Output] = []
        for t in written_outputs(spec, model):
            names = output_columns(spec, t)
            if model.decoupled:
                self._outputs.append(_ListedOutput(t, names, is_binary=t.name in binary))
            elif count := spec.output.top_k.get(t.name, 0):
                self._outputs.append(_RankedOutput(t, names, count))
            else:
                self._outputs.append(_Output(t, names, is_binary=t.name in binary))
        self.copied = copied_columns(spec, schema)
        self._urls = {url: number for number, url in enumerate(dict.fromkeys(urls))}
        self._url_column = pa.array(list(self._urls), pa.string())
        self._has_place = has_place(spec)
        fields = [pa.field(*pair) for output in self._outputs for pair in output.columns]
        fields += [
            pa.field(field.name, as_read(field.type), metadata=_notes(field)) for field in select(schema, self.copied)
        ]
        if self._has_place:
            kinds = (pa.dictionary(pa.int32(), pa.string()), pa.int32(), pa.int64())
            fields += [pa.field(*pair, nullable=False) for pair in zip(PLACE_COLUMNS, kinds, strict=True)]
        fields += [pa.field(name, pa.string()) for name in ERROR_COLUMNS]
        self.schema = pa.schema(fields)
        asides = {*ERROR_COLUMNS, *(PLACE_COLUMNS if spec.key else ())}
        outputs = {name for output in self._outputs for name, _ in output.columns}
        self.good = [name for name in self.schema.names if name not in asides]
        self.failed = [name for name in self.schema.names if name not in outputs]

    def encode(self, batch: RowBatch, scored: Sequence[ScoredRows], errors: RowErrors) -> pa.RecordBatch:
        """Makes the output rows of a batch; marks rows without a column value."""
        place = None
        if len(scored) != 1 or scored[0].rows is not None:
            place = _place(batch.record.num_rows, scored)
        rows = batch.record.num_rows
        columns = [column for output in self._outputs for column in output.columns_of(scored, place, rows, errors)]
        if errors.count:
            columns = [_without(column, errors) for column in columns]
        columns += [batch.record.column(name) for name in self.copied]
        if self._has_place:
            columns += self._places(batch.segments)
        return pa.RecordBatch.from_arrays([*columns, *errors.columns()], schema=self.schema)

    def _places(self, segments: Sequence[Segment]) -> list[pa.Array]:
        if len(segments) == 1:
            (one,) = segments
            files = np.full(one.rows, self._urls[one.url], np.int32)
            groups = np.full(one.rows, one.row_group, np.int32)
            rows = np.arange(one.first_row, one.first_row + one.rows, dtype=np.int64)
        else:
            counts = [segment.rows for segment in segments]
            files = np.repeat(np.array([self._urls[segment.url] for segment in segments], np.int32), counts)
            groups = np.repeat(np.array([segment.row_group for segment in segments], np.int32), counts)
            rows = np.concatenate([np.arange(s.first_row, s.first_row + s.rows, dtype=np.int64) for s in segments])
        numbers = pa.DictionaryArray.from_arrays(pa.array(files), self._url_column)
        return [numbers, pa.array(groups), pa.array(rows)]


class _Output:
    def __init__(self, tensor: TensorSpec, names: tuple[str, ...], *, is_binary: bool = False) -> None:
        self._tensor = tensor
        self._dims = () if all(dim == 1 for dim in tensor.dims) else tensor.dims
        self._is_text = tensor.datatype == "BYTES" and not is_binary
        if tensor.datatype == "BYTES":
            self._element = pa.binary() if is_binary else pa.string()
        else:
            self._element = pa.from_numpy_dtype(numpy_dtype(tensor.datatype))
        kind = self._element
        for dim in reversed(self._dims):
            kind = list_type(kind, dim)
        self._kind = kind
        self.columns: list[tuple[str, pa.DataType]] = [(name, kind) for name in names]

    def columns_of(
        self, scored: Sequence[ScoredRows], place: pa.Array | None, rows: int, errors: RowErrors
    ) -> list[pa.Array]:
        """Returns the columns of `rows` rows.

        `place` has each row's number among the executed rows, or null; `None` = all rows, in order.
        """
        parts = [self._part(part, rows, errors) for part in scored]
        if place is None:
            return parts[0]
        if not parts:
            return [pa.nulls(rows, kind) for _, kind in self.columns]
        columns = zip(*parts, strict=True)
        return [(arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)).take(place) for arrays in columns]

    def _part(self, part: ScoredRows, all_rows: int, errors: RowErrors) -> list[pa.Array]:
        return self._columns(self._array(part.outputs, part.rows, all_rows), part.rows, errors)

    def _array(self, outputs: Mapping[str, Array | Tensor], rows: Indices | None, all_rows: int) -> Array:
        tensor = self._tensor
        value = outputs.get(tensor.name)
        if value is None:
            raise OutputMismatch(f"the model returned no output '{tensor.name}'")
        array = to_numpy(value) if isinstance(value, Tensor) else value
        count = all_rows if rows is None else len(rows)
        dims = array.shape[1:]
        fits = len(dims) == len(tensor.dims) and all(e in (-1, d) for e, d in zip(tensor.dims, dims, strict=True))
        if array.ndim == 0 or len(array) != count or not fits:
            raise OutputMismatch(
                f"output '{tensor.name}' has shape {list(array.shape)} for {count} rows of {list(tensor.dims)}"
            )
        if tensor.datatype == "BYTES":
            if array.dtype.kind not in "OSU":
                raise OutputMismatch(f"output '{tensor.name}' is an array of {array.dtype}, not of BYTES")
        elif array.dtype != numpy_dtype(tensor.datatype):
            raise OutputMismatch(f"output '{tensor.name}' is an array of {array.dtype}, not of {tensor.datatype}")
        return array

    def _columns(self, array: Array, rows: Indices | None, errors: RowErrors) -> list[pa.Array]:
        flat = np.ascontiguousarray(array).reshape(-1)
        values = self._texts(flat, len(array), rows, errors) if self._tensor.datatype == "BYTES" else pa.array(flat)
        dims = array.shape[1:] if self._dims else ()
        kinds = [self._kind]
        for _ in dims:
            kinds.append(kinds[-1].value_type)
        for level in reversed(range(len(dims))):
            values = lists_of(values, kinds[level], dims[level], prod(dims[:level]) * len(array))
        return [values]

    def _texts(self, flat: Array, count: int, rows: Indices | None, errors: RowErrors) -> pa.Array:
        if self._is_text and flat.size and isinstance(flat[0], str):
            with suppress(pa.ArrowException, UnicodeEncodeError):  # it has bytes as well
                return pa.array(flat, pa.string())
        values = pa.array(flat.astype(object, copy=False), pa.binary())
        if not self._is_text:
            return values
        try:
            return values.cast(pa.string())
        except pa.ArrowInvalid:
            texts = [value.decode(errors="replace") for value in values.to_pylist()]
        wrong = np.array([text.encode() for text in texts], object) != values.to_numpy(zero_copy_only=False)
        own = np.flatnonzero(wrong.reshape(count, -1).any(axis=1))
        errors.mark(
            own if rows is None else rows[own],
            ErrorCode.OUTPUT_MISMATCH,
            f"output '{self._tensor.name}' has bytes that are not UTF-8; name it in the model's parameter "
            f"'{BINARY_OUTPUTS}' to get the bytes unchanged",
        )
        return pa.array(texts, pa.string())


class _ListedOutput(_Output):
    def __init__(self, tensor: TensorSpec, names: tuple[str, ...], *, is_binary: bool) -> None:
        super().__init__(tensor, names, is_binary=is_binary)
        self._list = list_type(self._kind, -1)
        self.columns = [(name, self._list) for name in names]

    def _part(self, part: ScoredRows, all_rows: int, errors: RowErrors) -> list[pa.Array]:
        rows = part.outputs[self._tensor.name]
        assert isinstance(rows, np.ndarray)
        sizes = np.array([len(responses) for responses in rows], np.int32)
        owners = np.repeat(np.arange(all_rows) if part.rows is None else part.rows, sizes)
        elements = [pa.array([], self._kind)]
        first = 0
        for _, alike in groupby(chain.from_iterable(rows), np.shape):
            values = np.stack(list(alike))
            numbers = owners[first : first + len(values)]
            first += len(values)
            array = self._array({self._tensor.name: values}, numbers, all_rows)
            elements += self._columns(array, numbers, errors)
        offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
        return [pa.ListArray.from_arrays(offsets, pa.concat_arrays(elements), type=self._list)]


class _RankedOutput(_Output):
    def __init__(self, tensor: TensorSpec, names: tuple[str, ...], count: int) -> None:
        super().__init__(tensor, ())
        self._count = count
        # The null is for classes without a label.
        self._labels = pa.array([label or None for label in tensor.labels] + [None], pa.string())
        kinds = [pa.string()] * bool(tensor.labels) + [pa.int32(), self._element]
        self._size = -1 if -1 in tensor.dims else count
        if count > 1:
            kinds = [list_type(kind, self._size, nullable=pa.types.is_string(kind)) for kind in kinds]
        self.columns = list(zip(names, kinds, strict=True))

    def _columns(self, array: Array, rows: Indices | None, errors: RowErrors) -> list[pa.Array]:
        values = array.reshape(len(array), -1 if array.size else prod(array.shape[1:]))
        kept = min(self._count, values.shape[1])
        if kept < self._count == 1:  # rows without elements have no greatest
            return [pa.nulls(len(array), kind) for _, kind in self.columns]
        best = greatest(values, kept) if kept else np.empty((len(array), 0), np.int64)
        flat = [pa.array(best.ravel().astype(np.int32)), pa.array(np.take_along_axis(values, best, 1).ravel())]
        if len(self._labels) > 1:
            flat.insert(0, self._labels.take(pa.array(np.minimum(best.ravel(), len(self._labels) - 1))))
        if self._count == 1:
            return flat
        kinds = (kind for _, kind in self.columns)
        return [lists_of(one, kind, kept, len(array)) for one, kind in zip(flat, kinds, strict=True)]


def _notes(field: pa.Field) -> dict[bytes, bytes] | None:
    return {JSON_NUMBER: b"1"} if JSON_NUMBER in (field.metadata or {}) else None


def _place(rows: int, scored: Sequence[ScoredRows]) -> pa.Array:
    """Returns each row's number among the executed rows; null = the row was not executed."""
    place = np.full(rows, -1, np.int64)
    first = 0
    for part in scored:
        chosen = np.arange(rows) if part.rows is None else part.rows
        place[chosen] = np.arange(first, first + len(chosen))
        first += len(chosen)
    return pa.array(place, mask=place < 0)


def _without(column: pa.Array, errors: RowErrors) -> pa.Array:
    bad = errors.bad
    assert bad is not None
    if column.is_null().to_numpy(zero_copy_only=False)[bad].all():
        return column
    return column.take(pa.array(np.arange(len(column)), mask=bad))
