"""Bodies of rows, as JSON lines or Arrow → a request's tensors, by the same rules as the rows of bulk jobs.

One message is one request: a row that no tensor can be made of refuses the message, and its number is in the reason.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns.inputs import Decoded, InputColumns
from qinfer.jobs.job import shown
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Bytes, Tensor, from_numpy
from qinfer.wire.kserve_json import check_depth
from qinfer_workers.bridge.bodies.arrow import BROKEN, ArrowForm, ArrowLimits, explained, read_batch, read_schema
from qinfer_workers.bridge.config import BodyOptions

_MAX_KNOWN_SCHEMAS = 64
_SHOWN = 20
_ABSENT = object()


class RowInputs:
    """Makes a model's inputs of rows; one for each route and configuration.

    Args:
        options: The route's columns and limits.
        spec: The model.

    Raises:
        InvalidRequest: The columns are of no input, or can't fill one.
    """

    def __init__(self, options: BodyOptions, spec: ModelSpec) -> None:
        self._spec = spec
        self._job = options.job(spec.name)
        self._max_depth = options.max_json_depth
        self._limits = ArrowLimits(spec.max_batch_size or 1, options.max_bytes)
        self._known: dict[pa.Schema, InputColumns] = {}
        self._decoder = msgspec.json.Decoder(dict[str, Any])
        self._check_columns()

    def decode(self, body: Bytes, form: str) -> tuple[Tensor, ...]:
        """Makes the tensors of a body.

        Args:
            body: The body.
            form: `jsonl`, `arrow-stream` or `arrow-file`.

        Raises:
            InvalidRequest: It can't be read, has too many rows or none, or a row does not fit.
        """
        try:
            record = self._of_lines(body) if form == "jsonl" else self._of_arrow(body, form)
            decoded = self._inputs(record.schema).decode(record)
        except BROKEN as error:
            raise InvalidRequest(f"the rows can't be read: {explained(error)}") from None
        return self._tensors(decoded)

    def _check_columns(self) -> None:
        known = {tensor.name: tensor for tensor in self._spec.inputs}
        for name in self._job.columns:
            given = self._job.columns_of(name)
            kind = pa.null() if len(given.columns) > 1 or not given.shape else pa.list_(pa.null())
            inputs = (known[name],) if name in known else self._spec.inputs
            if name not in known or len(given.columns) > 1 or given.shape:
                job = msgspec.structs.replace(self._job, columns={name: given})
                schema = pa.schema([(column, kind) for column in dict.fromkeys(given.columns)])
                InputColumns(job, replace(self._spec, inputs=inputs), schema)

    def _inputs(self, schema: pa.Schema) -> InputColumns:
        found = self._known.get(schema)
        if found is None:
            if len(self._known) >= _MAX_KNOWN_SCHEMAS:
                self._known.clear()
            found = self._known[schema] = InputColumns(self._job, self._spec, schema)
        return found

    def _of_arrow(self, body: Bytes, form: str) -> pa.RecordBatch:
        kind: ArrowForm = "arrow-file" if form == "arrow-file" else "arrow-stream"
        schema = read_schema(body, kind)
        columns = self._inputs(schema).columns
        if not columns:
            raise InvalidRequest(self._none_of_them(schema.names))
        return read_batch(body, kind, columns, self._limits)

    def _of_lines(self, body: Bytes) -> pa.RecordBatch:
        rows = list(self._rows(bytes(body)))
        if not rows:
            raise InvalidRequest("the message has no rows")
        columns: dict[str, pa.Array] = {}
        for tensor in self._spec.inputs:
            names = self._job.columns_of(tensor.name).columns
            if self._is_left_out(tensor, names, rows):
                continue
            columns.update({name: _array(name, rows, tensor) for name in names if name not in columns})
        if not columns:
            raise InvalidRequest(self._none_of_them(rows[0]))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _rows(self, body: bytes) -> Iterator[Mapping[str, Any]]:
        count = 0
        for line in body.split(b"\n"):
            if not line or line.isspace():
                continue
            count += 1
            if count > self._limits.rows:
                raise InvalidRequest(self._limits.too_many_rows())
            try:
                check_depth(line, self._max_depth)
                yield self._decoder.decode(line)
            except InvalidRequest as error:
                raise InvalidRequest(f"row {count}: {error.message}") from None
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidRequest(f"row {count} is no JSON object: {explained(error)}") from None

    def _is_left_out(self, tensor: TensorSpec, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bool:
        return tensor.optional and tensor.name not in self._job.columns and not any(names[0] in row for row in rows)

    def _none_of_them(self, names: Sequence[str] | Mapping[str, Any]) -> str:
        inputs = ", ".join(tensor.name for tensor in self._spec.inputs) or "none"
        return f"the rows have {_listed(names)}, and no column for an input of '{self._spec.name}', which has {inputs}"

    def _tensors(self, decoded: Decoded) -> tuple[Tensor, ...]:
        errors, pieces = decoded.errors, decoded.pieces
        if (bad := errors.bad) is not None:
            row = int(np.flatnonzero(bad)[0])
            more = f" (and {errors.count - 1} more rows can't be used)" if errors.count > 1 else ""
            raise InvalidRequest(f"row {row + 1}: {errors.columns()[1][row].as_py()}{more}")
        if len(pieces) > 1:
            row = next(int(piece.rows[0]) for piece in pieces if piece.rows is not None and piece.rows[0])
            raise InvalidRequest(
                f"row {row + 1} has another shape than row 1; send rows of different shapes in messages of their own"
            )
        (piece,) = pieces
        datatypes = {tensor.name: tensor.datatype for tensor in self._spec.inputs}
        is_batched = self._spec.max_batch_size > 0
        return tuple(
            from_numpy(name, array if is_batched else array[0], datatypes[name]) for name, array in piece.inputs.items()
        )


def _array(name: str, rows: Sequence[Mapping[str, Any]], tensor: TensorSpec) -> pa.Array:
    """Makes a column of the rows' values."""
    values = [row.get(name, _ABSENT) for row in rows]
    if _ABSENT in values:
        row = values.index(_ABSENT)
        raise InvalidRequest(
            f"row {row + 1} lacks '{shown(name)}', which input '{tensor.name}' is made of; it has {_listed(rows[row])}"
        )
    try:
        return pa.array(values)
    except BROKEN as error:
        # The shortest run of rows that can't be one column ends with the row that does not fit.
        row = bisect_left(range(len(values)), True, key=lambda end: not _is_column(values[: end + 1]))
        raise InvalidRequest(
            f"row {row + 1}: '{shown(name)}' does not fit the rows before, or is mixed in itself: {explained(error)}"
        ) from None


def _is_column(values: Sequence[Any]) -> bool:
    try:
        pa.array(values)
    except BROKEN:
        return False
    return True


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    first = [shown(name) for name in names][:_SHOWN]
    return ", ".join(first) + (", …" if len(names) > _SHOWN else "") if first else "none"
