"""Values as text, for CSV and JSON lines.

Numbers have the shortest form that reads back as the same number; NaN and infinities are null in JSON. Lists, structs
and maps are JSON in both formats, bytes are base64, and instants, dates and times are as Arrow prints them. In copied
text, replacement characters stand for invalid UTF-8.
"""

from binascii import b2a_base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qinfer.tabular.columns.schemas import run_values
from qinfer.tabular.columns.texts import JSON_NUMBER

_ESCAPED = r'["\\\x00-\x1f]'
"""Escaped in JSON (RFC 8259 §7)."""


def csv_column(column: pa.Array, field: pa.Field | None = None) -> pa.Array:
    """Converts a column for CSV, where numbers and instants stay."""
    kind = column.type
    if (stored := _stored(column)) is not None:
        return csv_column(stored)
    if pa.types.is_nested(kind):
        return json_texts(column, field).cast(pa.string())
    if _is_binary(kind):
        return _base64(column)
    if _is_text(kind):
        return _utf8(column)
    return column


def json_texts(values: pa.Array, field: pa.Field | None = None) -> pa.Array:
    """Returns values as JSON texts; nulls stay null."""
    kind = values.type
    if (stored := _stored(values)) is not None:
        return json_texts(stored)
    if pa.types.is_nested(kind):
        return _nested(values, (field or pa.field("", kind)).type)
    if field is not None and JSON_NUMBER in (field.metadata or {}):
        return values
    if pa.types.is_duration(kind):
        values = values.cast(pa.int64())
    elif pa.types.is_float16(kind):
        # Arrow can't tell whether half floats are finite.
        values = values.cast(pa.float32())
    if pa.types.is_floating(values.type):
        return pc.if_else(pc.is_finite(values), values.cast(pa.string()), None)
    if (pa.types.is_primitive(values.type) and not pa.types.is_temporal(values.type)) or pa.types.is_null(kind):
        return values.cast(pa.string())
    return _quoted(values)


def _stored(values: pa.Array) -> pa.Array | None:
    """Decodes dictionaries, runs and extension types."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return values.dictionary_decode()
    if pa.types.is_run_end_encoded(kind):
        return run_values(values)
    if not isinstance(kind, pa.BaseExtensionType):
        return None
    if isinstance(kind, pa.UuidType):
        texts = [None if value is None else str(value) for value in values.to_pylist()]
        return pa.array(texts, pa.string())
    return values.storage.cast(pa.bool_()) if isinstance(kind, pa.Bool8Type) else values.storage


def json_objects(fields: Sequence[pa.Field], columns: Sequence[pa.Array]) -> pa.Array:
    """Returns rows as JSON objects."""
    pieces: list[Any] = []
    for number, (field, column) in enumerate(zip(fields, columns, strict=True)):
        pieces.append(f"{',' if number else '{'}{msgspec.json.encode(field.name).decode()}:")
        pieces.append(json_texts(column, field).fill_null("null"))
    return pc.binary_join_element_wise(*pieces, "}", "")


def _nested(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_map(kind):
        pairs = pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
        return _nested(values.cast(pairs), pairs)
    if pa.types.is_struct(kind):
        texts = (
            json_objects(list(kind), values.flatten())
            if kind.num_fields
            else pa.array(["{}"] * len(values), pa.string())
        )
    else:
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        elements = json_texts(pc.list_flatten(values), kind.value_field).fill_null("null")
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), elements), ",")
        texts = pc.binary_join_element_wise("[", joined, "]", "")
    return pc.if_else(values.is_valid(), texts, None)


def _quoted(values: pa.Array) -> pa.Array:
    if _is_binary(values.type):
        return pc.binary_join_element_wise('"', _base64(values), '"', "")
    texts = _utf8(values) if _is_text(values.type) else values.cast(pa.string())
    quoted = pc.binary_join_element_wise('"', texts, '"', "")
    special = pc.match_substring_regex(texts, _ESCAPED).fill_null(False)
    if not special.true_count:
        return quoted
    escaped = [msgspec.json.encode(text).decode() for text in texts.filter(special).to_pylist()]
    return pc.replace_with_mask(quoted, special, pa.array(escaped, pa.string()))


def _utf8(texts: pa.Array) -> pa.Array:
    try:
        texts.validate(full=True)
        return texts.cast(pa.string())
    except pa.ArrowInvalid:
        found = texts.cast(pa.large_binary()).to_pylist()
        return pa.array([value if value is None else value.decode(errors="replace") for value in found], pa.string())


def _base64(values: pa.Array) -> pa.Array:
    found = values.to_pylist()
    texts = [value if value is None else b2a_base64(value, newline=False).decode() for value in found]
    return pa.array(texts, pa.string())


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: pa.DataType) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(check(kind) for check in checks)
