"""Types of the columns of CSV and JSON lines, text columns with values of other types, and values as text. Pure.

A copied column of CSV stays text. A column that feeds an input has the input's type, or the type of its first values;
if it is copied as well, it is text that `InputColumns` converts. A column in the job's `types` is text with the type in
its metadata; `TypedColumns` converts it, and a row with another value fails. A JSON field has a type that fits all
lines.

A copied field with numbers that reading and writing would change, such as 1.10, 1e3 and very long ones, is text: a
block's numbers are put in quotes, and pyarrow reads strings. Metadata marks the field, so that inputs parse it and JSON
lines are written without quotes.

Written numbers have the shortest form that reads back as the same number; NaN and infinities are null in JSON. Lists,
structs and maps are JSON in both formats, bytes are base64, and instants, dates and times are as Arrow prints them. In
copied text, replacement characters stand for invalid UTF-8.
"""

import re
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from qinfer.errors import ErrorCode
from qinfer.tabular.batches import RowBatch, RowErrors
from qinfer.tabular.schemas import run_values
from qinfer.tabular.spec import shown
from qinfer.tabular.tensor_columns import is_number
from qinfer.tabular.text_streams import PLAIN, InputForm

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


def text_values(texts: pa.Array, field: pa.Field, decimal_point: str, errors: RowErrors) -> pa.Array:
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
            for row, (number, url) in zip(wrong, batch.origins(wrong), strict=True):
                text = shown(texts[row].as_py())
                message = f"column '{field.name}' has '{text}' in row {number} of '{url}', which is no {kind}"
                errors.mark(np.array([row]), ErrorCode.INVALID_REQUEST, message)
            record = record.set_column(record.schema.get_field_index(field.name), field.name, values)
        return batch._replace(record=record)


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
