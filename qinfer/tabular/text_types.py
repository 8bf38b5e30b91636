"""Types of the columns of CSV and JSON lines. Pure.

A copied column of CSV stays text. A column that feeds an input has the input's type, or the type of its first values;
if it is copied as well, it is text that `InputColumns` converts. A column in the job's `types` is text that
`TypedColumns` converts. A JSON field has a type that fits all lines.

A copied field with numbers that reading and writing would change, such as 1.10, 1e3 and very long ones, is text: a
block's numbers are put in quotes, and pyarrow reads strings. Metadata marks the field, so that inputs parse it and JSON
lines are written without quotes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qinfer.tabular.casts import is_number
from qinfer.tabular.text_streams import PLAIN, InputForm
from qinfer.tabular.texts import JSON_NUMBER, READ_AS, declared, is_declared, json_texts, leaf_of


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


def numbers_as_texts(schema: pa.Schema, types: TextTypes) -> pa.Schema:
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


Path = tuple[str, ...]
"""The names of the field's ancestors, then the name of the field; the items of a list have an empty name."""

_LARGE = 10**15
"""Floats from here on have an exponent."""

_OF_NUMBERS = np.zeros(256, np.bool_)
_OF_NUMBERS[np.frombuffer(b"0123456789+-.eE", np.uint8)] = True
_BEGINS = np.zeros(256, np.bool_)
_BEGINS[np.frombuffer(b"0123456789-", np.uint8)] = True


def quoted(lines: bytes) -> bytes:
    """Puts all numbers in quotes."""
    plain = lines
    if b"\\" in lines:  # escaped characters end no string
        plain = lines.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    data = np.frombuffer(plain, np.uint8)
    is_outside = np.bitwise_xor.accumulate((data == ord('"')).view(np.uint8)) == 0
    runs = (_OF_NUMBERS[data] & is_outside).astype(np.int8)
    edges = np.diff(runs, prepend=np.int8(0), append=np.int8(0))
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    are = _BEGINS[data[begins]]  # the e of true begins no number
    places = np.sort(np.concatenate([begins[are], ends[are]]))
    return np.insert(np.frombuffer(lines, np.uint8), places, ord('"')).tobytes()


def texts_of(schema: pa.Schema) -> pa.Schema:
    """Replaces numbers by text."""
    return pa.schema([_mapped(field, (field.name,), lambda one, _: one.with_type(pa.string())) for field in schema])


def plain(field: pa.Field) -> pa.Field:
    """Replaces marked texts by numbers."""
    return _mapped(field, (field.name,), lambda one, _: _unmarked(one))


def marked(field: pa.Field, paths: set[Path]) -> pa.Field:
    """Replaces the numbers at some paths by marked text."""
    return _mapped(field, (field.name,), lambda one, path: _marked(one) if path in paths else one)


def marks(field: pa.Field) -> set[Path]:
    """Returns the paths of marked texts."""
    return {path for path, one in _fields(field, (field.name,)) if JSON_NUMBER in (one.metadata or {})}


def numbers(field: pa.Field) -> dict[Path, pa.DataType]:
    """Returns the paths and types of a field's numbers."""
    return {path: one.type for path, one in _fields(field, (field.name,)) if is_number(one.type)}


def changed(table: pa.Table, texts: pa.Table) -> set[Path]:
    """Returns the paths of numbers that writing would change; `texts` has them as written."""
    found = set()
    for name in table.schema.names:
        pairs = zip(_leaves(_whole(table, name), (name,)), _leaves(_whole(texts, name), (name,)), strict=False)
        for (path, values), (_, written) in pairs:
            if is_number(values.type) and not json_texts(values).cast(pa.string()).equals(written.cast(pa.string())):
                found.add(path)
    return found


def large(table: pa.Table) -> set[Path]:
    """Returns the paths of whole numbers that would change as floats."""
    found = set()
    for name in table.schema.names:
        for path, values in _leaves(_whole(table, name), (name,)):
            if pa.types.is_integer(values.type):
                extremes = pc.min_max(values).as_py()
                if max(abs(extremes["min"] or 0), abs(extremes["max"] or 0)) >= _LARGE:
                    found.add(path)
    return found


def read(block: Callable[[bytes, pa.Schema], pa.Table], lines: bytes, schema: pa.Schema) -> pa.Table:
    """Reads lines; keeps marked numbers as written."""
    if not len(schema):
        return block(lines, schema)  # rows without columns are counted
    raw, others = ([field for field in schema if bool(marks(field)) == is_raw] for is_raw in (True, False))
    texts: Any = block(quoted(lines), texts_of(pa.schema([plain(field) for field in raw]))) if raw else None
    table: Any = block(lines, pa.schema(others)) if others else None
    columns = []
    for field in schema:
        column = (texts if marks(field) else table).column(field.name)
        columns.append(column if column.type.equals(field.type) else pc.cast(column, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _unmarked(field: pa.Field) -> pa.Field:
    if JSON_NUMBER not in (field.metadata or {}):
        return field
    return (field if is_declared(field) else field.with_type(leaf_of(field))).remove_metadata()


def _marked(field: pa.Field) -> pa.Field:
    if not is_number(field.type):
        return field
    return field.with_type(pa.string()).with_metadata({READ_AS: str(field.type), JSON_NUMBER: "1"})


def _mapped(field: pa.Field, path: Path, change: Callable[[pa.Field, Path], pa.Field]) -> pa.Field:
    kind = field.type
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_mapped(inner, (*path, inner.name), change) for inner in kind]))
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_mapped(kind.value_field, (*path, ""), change)))
    is_text = JSON_NUMBER in (field.metadata or {})
    return change(field, path) if is_text or is_number(kind) else field


def _fields(field: pa.Field, path: Path) -> Iterator[tuple[Path, pa.Field]]:
    if pa.types.is_struct(field.type):
        for inner in field.type:
            yield from _fields(inner, (*path, inner.name))
    elif pa.types.is_list(field.type):
        yield from _fields(field.type.value_field, (*path, ""))
    else:
        yield path, field


def _whole(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _leaves(array: pa.Array, path: Path) -> Iterator[tuple[Path, pa.Array]]:
    if pa.types.is_struct(array.type):
        for field, inner in zip(array.type, array.flatten(), strict=True):
            yield from _leaves(inner, (*path, field.name))
    elif pa.types.is_list(array.type):
        yield from _leaves(array.flatten(), (*path, ""))
    else:
        yield path, array
