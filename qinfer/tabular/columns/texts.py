"""Text columns with values of other types. Pure.

A column in the job's `types` is text with the type in its metadata; `TypedColumns` converts it, and a row with another
value fails. Copied columns without a declared type stay as written.
"""

import re
from collections.abc import Iterator
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from qinfer.errors import ErrorCode
from qinfer.tabular.batches import RowBatch, RowErrors
from qinfer.tabular.spec import shown

READ_AS = b"qinfer.read_as"
"""The type that inputs convert a text column to."""

DECLARED = b"qinfer.type"
"""The name of a text column's type in the job's `types`."""

JSON_NUMBER = b"qinfer.json_number"
"""Marks texts that are JSON numbers."""

_DECIMAL = re.compile(r"decimal128\((?P<digits>\d+), ?(?P<fraction>\d+)\)")


@cache
def _nulls() -> pa.Array:
    # pyarrow imports pandas, where it is installed, with the first array: no program needs it to start.
    return pa.array(pa.csv.ConvertOptions().null_values)


def type_of(name: str) -> pa.DataType:
    """Returns the type of a name in `COLUMN_TYPES`, or a decimal."""
    if decimal := _DECIMAL.fullmatch(name):
        return pa.decimal128(int(decimal["digits"]), int(decimal["fraction"]))
    plain, zone, _ = name.partition(", tz=UTC")
    return pa.timestamp(plain.removeprefix("timestamp["), "UTC") if zone else pa.type_for_alias(plain)


def declared(field: pa.Field, name: str, *, is_json: bool = False) -> pa.Field:
    """Returns a column as text with a declared type."""
    notes = {DECLARED: name, JSON_NUMBER: "1"} if is_json else {DECLARED: name}
    return field.with_type(pa.string()).with_metadata(notes)


def is_declared(field: pa.Field | None) -> bool:
    """Returns whether a column is text with a declared type."""
    return field is not None and DECLARED in (field.metadata or {})


def typed(schema: pa.Schema) -> pa.Schema:
    """Returns columns in their declared types."""
    return pa.schema([_typed(field) for field in schema])


def _typed(field: pa.Field) -> pa.Field:
    if is_declared(field):
        return field.with_type(read_type(field)).remove_metadata()
    if pa.types.is_struct(field.type):
        return field.with_type(pa.struct([_typed(inner) for inner in field.type]))
    return field


def leaf_of(field: pa.Field) -> pa.DataType:
    """Returns the type that inputs read a field as."""
    notes = field.metadata or {}
    if DECLARED in notes:
        return type_of(notes[DECLARED].decode())
    return pa.type_for_alias(notes[READ_AS].decode()) if READ_AS in notes else field.type


def read_type(field: pa.Field) -> pa.DataType:
    """Returns the type that inputs read a column as, with nested fields."""
    kind = field.type
    if pa.types.is_struct(kind):
        return pa.struct([inner.with_type(read_type(inner)) for inner in kind])
    if pa.types.is_list(kind):
        item = read_type(kind.value_field)
        return kind if item.equals(kind.value_type) else pa.list_(item)
    return leaf_of(field)


def numbers(texts: pa.Array, field: pa.Field, decimal_point: str, errors: RowErrors) -> pa.Array:
    """Converts a text column; marks rows with other values."""
    kind = read_type(field)
    if JSON_NUMBER in (field.metadata or {}) or pa.types.is_nested(kind):
        return texts.cast(kind)
    values, wrong = _parsed(_plain(texts, kind, decimal_point), kind)
    if wrong:
        message = f"column '{field.name}' has a value that is no {kind}, such as '{texts[wrong[0]].as_py()[:40]}'"
        errors.mark(np.array(wrong), ErrorCode.INVALID_REQUEST, message)
    return values


class TypedColumns:
    """Converts columns to their declared types."""

    def __init__(self, schema: pa.Schema, decimal_point: str) -> None:
        self._fields = [field for field in schema if is_declared(field)]
        self._decimal_point = decimal_point

    def parse_texts(self, batch: RowBatch, errors: RowErrors) -> RowBatch:
        """Converts the columns of a batch; marks rows with other values."""
        record = batch.record
        for field in self._fields:
            texts, kind = record.column(field.name), read_type(field)
            is_json = JSON_NUMBER in field.metadata
            values, wrong = _parsed(texts if is_json else _plain(texts, kind, self._decimal_point), kind)
            for row, (number, url) in _places(batch, wrong):
                text = shown(texts[row].as_py())
                message = f"column '{field.name}' has '{text}' in row {number} of '{url}', which is no {kind}"
                errors.mark(np.array([row]), ErrorCode.INVALID_REQUEST, message)
            record = record.set_column(record.schema.get_field_index(field.name), field.name, values)
        return batch._replace(record=record)


def _places(batch: RowBatch, rows: list[int]) -> Iterator[tuple[int, tuple[int, str]]]:
    segments, first = iter(batch.segments), 0
    segment = next(segments, None)
    for row in rows:
        while segment is not None and row >= first + segment.rows:
            first += segment.rows
            segment = next(segments, None)
        assert segment is not None
        yield row, (segment.first_row + row - first, segment.url)


def _plain(texts: pa.Array, kind: pa.DataType, decimal_point: str) -> pa.Array:
    """Trims CSV cells; empty cells and `NA` are null."""
    if pa.types.is_string(kind):
        return texts
    plain = pc.utf8_trim_whitespace(texts)
    plain = pc.if_else(pc.is_in(plain, _nulls()), None, plain)
    if decimal_point == "." or pa.types.is_temporal(kind):
        return plain
    return pc.if_else(pc.match_substring(plain, "."), "?", pc.replace_substring(plain, decimal_point, "."))


def _parsed(texts: pa.Array, kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Returns values, null where invalid, and the invalid rows."""
    try:
        values = texts.cast(kind)
        wrong = _endless(texts, values)
    except pa.ArrowInvalid:
        wrong = [row for row, text in enumerate(texts) if not _can_be(text, kind)]
    if not wrong:
        return values, wrong
    mask = np.zeros(len(texts), np.bool_)
    mask[wrong] = True
    return pc.if_else(pa.array(mask), None, texts).cast(kind), wrong


def _endless(texts: pa.Array, values: pa.Array) -> list[int]:
    """Returns the rows whose finite numbers became infinite."""
    if not pa.types.is_floating(values.type) or not pc.any(pc.is_inf(values)).as_py():
        return []
    finite = pc.and_(pc.is_inf(values), pc.match_substring_regex(texts, "[0-9]"))
    return [int(row) for row in np.flatnonzero(finite.fill_null(False).to_numpy(zero_copy_only=False))]


def _can_be(text: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        value = text.cast(kind)
    except pa.ArrowInvalid:
        return False
    return not _endless(pa.array([text.as_py()], pa.string()), pa.array([value.as_py()], kind))
