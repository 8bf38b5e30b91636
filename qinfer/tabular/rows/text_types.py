"""Types of the columns of CSV and JSON lines. Pure.

A copied column of CSV stays text. A column that feeds an input has the input's type, or the type of its first values;
if it is copied as well, it is text that `InputColumns` converts. A column in the job's `types` is text that
`TypedColumns` converts. A JSON field has a type that fits all lines.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pyarrow as pa

from qinfer.tabular.columns.casts import is_number
from qinfer.tabular.columns.texts import READ_AS, declared
from qinfer.tabular.rows.text_streams import PLAIN, InputForm


class TextTypes(NamedTuple):
    """Column types that a job requires of text files.

    Attributes:
        wanted: Column → the type for its inputs; `None` = inputs need different types.
        copied: Copied columns with the key; `*` = all.
    """

    wanted: Mapping[str, pa.DataType | None]
    key: str = ""
    form: InputForm = PLAIN
    copied: frozenset[str] = frozenset()
    declared: Mapping[str, str] = {}

    def is_copied(self, name: str) -> bool:
        """Returns whether a column or field is copied."""
        return "*" in self.copied or any(f"{name}.".startswith(f"{copied}.") for copied in self.copied)


NOTHING_WANTED = TextTypes({})


def csv_schema(guessed: pa.Schema, types: TextTypes) -> pa.Schema:
    """Returns CSV columns, guessed from first values, in the types to read."""
    return pa.schema([_decided(field, types) for field in guessed])


def without_null(schema: pa.Schema) -> pa.Schema:
    """Replaces the null type by text."""
    return pa.schema([field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema])


def json_schema(guessed: pa.Schema) -> pa.Schema:
    """Returns JSON fields in the types to read: dates are text."""
    return pa.schema([(field.name, _as_text(field.type)) for field in guessed])


def json_texts(schema: pa.Schema, types: TextTypes) -> pa.Schema:
    """Turns numbers into text where the job declares types."""
    return _at_declared(
        schema, types, lambda field, _: field.with_type(pa.string()) if is_number(field.type) else field
    )


def json_declared(schema: pa.Schema, types: TextTypes) -> pa.Schema:
    """Marks text and null fields with declared types."""
    kinds = (pa.string(), pa.null())
    return _at_declared(
        schema, types, lambda field, name: declared(field, name, is_json=True) if field.type in kinds else field
    )


def _at_declared(
    schema: pa.Schema, types: TextTypes, change: Callable[[pa.Field, str], pa.Field], within: str = ""
) -> pa.Schema:
    if not types.declared:
        return schema
    fields = []
    for field in schema:
        path = within + field.name
        if path in types.declared:
            fields.append(change(field, types.declared[path]))
        elif pa.types.is_struct(field.type):
            fields.append(
                field.with_type(pa.struct(_at_declared(pa.schema(list(field.type)), types, change, f"{path}.")))
            )
        else:
            fields.append(field)
    return pa.schema(fields)


def joined(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Merges the fields of two parts of JSON lines."""
    try:
        return pa.unify_schemas([one, other], promote_options="permissive")
    except pa.ArrowTypeError as error:
        raise pa.ArrowInvalid(f"a field has values of different kinds: {error}") from None


def _decided(guessed: pa.Field, types: TextTypes) -> pa.Field:
    kind = guessed.type
    if guessed.name in types.declared:
        return declared(guessed, types.declared[guessed.name])
    if pa.types.is_binary(kind):  # bytes that are not UTF-8
        return guessed
    if guessed.name not in types.wanted:
        return guessed.with_type(pa.string())
    wanted = types.wanted[guessed.name]
    can_be = pa.types.is_null(kind) or (wanted == pa.float64() and pa.types.is_integer(kind)) or wanted == pa.string()
    kind = wanted if wanted is not None and can_be else kind  # refused later if unsuitable
    if not types.is_copied(guessed.name) or not (is_number(kind) or pa.types.is_boolean(kind)):
        return guessed.with_type(kind)
    return pa.field(guessed.name, pa.string(), metadata={READ_AS: str(kind)})


def _as_text(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_text(field.type)) for field in kind])
    return kind
