"""Numbers that are text, since they are copied as well and have to stay as they are written. Pure."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from qinfer.errors import ErrorCode
from qinfer.jobs.columns.row_errors import RowErrors

READ_AS = b"qinfer.read_as"
"""In the notes of a column of text: the type that inputs read its values as."""

JSON_NUMBER = b"qinfer.json_number"
"""In the notes of a field of text: the texts are numbers as JSON has them."""

_NULLS = pa.array(pa.csv.ConvertOptions().null_values)


def leaf_of(field: pa.Field) -> pa.DataType:
    """Returns the type that inputs read a field's values as: its own, or that of the numbers that are text."""
    noted = (field.metadata or {}).get(READ_AS)
    return pa.type_for_alias(noted.decode()) if noted else field.type


def read_type(field: pa.Field) -> pa.DataType:
    """Returns the type that inputs read a column as: as `leaf_of`, within lists and structs, too."""
    kind = field.type
    if pa.types.is_struct(kind):
        return pa.struct([inner.with_type(read_type(inner)) for inner in kind])
    if pa.types.is_list(kind):
        item = read_type(kind.value_field)
        return kind if item.equals(kind.value_type) else pa.list_(item)
    return leaf_of(field)


def numbers(texts: pa.Array, field: pa.Field, decimal_point: str, errors: RowErrors) -> pa.Array:
    """Returns the numbers of a column of text; marks the rows with other texts.

    Args:
        texts: The column.
        field: The column's name, and its type.
        decimal_point: The character before the fraction of a number.
        errors: The errors of the rows.
    """
    kind = read_type(field)
    if JSON_NUMBER in (field.metadata or {}) or pa.types.is_nested(kind):
        return texts.cast(kind)
    plain = pc.utf8_trim_whitespace(texts)
    plain = pc.if_else(pc.is_in(plain, _NULLS), None, plain)
    if decimal_point != ".":
        plain = pc.if_else(pc.match_substring(plain, "."), "?", pc.replace_substring(plain, decimal_point, "."))
    try:
        return plain.cast(kind)
    except pa.ArrowInvalid:
        wrong = [number for number, text in enumerate(plain) if not _can_be(text, kind)]
    message = f"column '{field.name}' has a value that is no {kind}, such as '{texts[wrong[0]].as_py()[:40]}'"
    errors.mark(np.array(wrong), ErrorCode.INVALID_REQUEST, message)
    mask = np.zeros(len(plain), np.bool_)
    mask[wrong] = True
    return pc.if_else(pa.array(mask), None, plain).cast(kind)


def _can_be(text: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        text.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True
