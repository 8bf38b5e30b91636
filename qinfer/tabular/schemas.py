"""Encoding, common types, plain types and paths of a job's columns. Pure.

pyarrow can neither take nor filter rows of string views, binary views and run lengths (`array_take has no kernel`), so
they are converted.

Columns and struct fields are named by path, such as `image.bytes`; a column whose name equals the path takes
precedence. A field is null where its struct is. Fields within lists and maps have no path; neither have unions and runs
within structs, which pyarrow can't extract.
"""

import binascii
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qinfer.errors import CorruptEntry

_UNITS = ("s", "ms", "us", "ns")
_MOST_DIGITS_OF_INTEGERS = 20
_DECIMAL128_DIGITS = 38
_EXACT_DIGITS = 15
"""Decimals of up to this many digits survive as doubles."""
INT96_INSTANT = b"qinfer:int96"
"""Marks INT96 timestamps: without a zone, but in UTC."""


def encode_schema(schema: pa.Schema) -> str:
    """Encodes columns as base64."""
    return binascii.b2a_base64(schema.remove_metadata().serialize().to_pybytes(), newline=False).decode()


def decode_schema(text: str) -> pa.Schema:
    """Decodes `encode_schema`."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(binascii.a2b_base64(text, strict_mode=True)))
    except (ValueError, OSError) as error:
        raise CorruptEntry(f"the columns of the job's inputs can't be read: {error}") from None


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Returns the type for values of both types.

    Timestamps with zones become UTC; a timestamp without a zone could be in any zone.
    """
    one, other = as_read(one), as_read(other)
    if one == other:
        return one
    for decimal, whole in ((one, other), (other, one)):
        if pa.types.is_decimal(decimal) and pa.types.is_integer(whole):
            digits = max(decimal.precision - decimal.scale, _MOST_DIGITS_OF_INTEGERS) + decimal.scale
            return (pa.decimal128 if digits <= _DECIMAL128_DIGITS else pa.decimal256)(digits, decimal.scale)
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other) and one.tz and other.tz:
        return pa.timestamp(max(one.unit, other.unit, key=_UNITS.index), one.tz if one.tz == other.tz else "UTC")
    if _is_structure(one) or _is_structure(other):
        return None
    try:
        schemas = [pa.schema([("column", kind)]) for kind in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def are_rounded(one: pa.DataType, other: pa.DataType) -> bool:
    """Returns whether a common float type may round decimals."""
    kinds = (as_read(one), as_read(other))
    is_rounded = any(pa.types.is_decimal(kind) and kind.precision > _EXACT_DIGITS for kind in kinds)
    return is_rounded and any(pa.types.is_floating(kind) for kind in kinds)


def common_field(one: pa.Field, other: pa.Field) -> pa.Field | None:
    """Returns the first field in the common type."""
    kinds = [one.type, other.type]
    instants = [INT96_INSTANT in (field.metadata or {}) for field in (one, other)]
    for number, is_int96 in enumerate(instants):
        beside = kinds[1 - number]
        if is_int96 and pa.types.is_timestamp(kinds[number]) and pa.types.is_timestamp(beside) and beside.tz:
            kinds[number] = pa.timestamp(kinds[number].unit, "UTC")
    common = common_type(*kinds)
    if common is None:
        return None
    merged = one.with_type(common).with_nullable(one.nullable or other.nullable)
    return merged if instants[0] == instants[1] else merged.remove_metadata()


def filled(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Appends the columns that only another file has."""
    missing = [field.with_nullable(True) for field in other if field.name not in schema.names]
    return pa.schema([*schema, *missing])


def _is_structure(kind: pa.DataType) -> bool:
    while pa.types.is_nested(kind) and not pa.types.is_map(kind) and hasattr(kind, "value_type"):
        kind = kind.value_type
    return bool(pa.types.is_nested(kind))


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Replaces views."""
    schema = schema_without_views(batch.schema)
    if schema.types == batch.schema.types:
        return batch
    columns = [cast(column, field.type) for column, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def schema_without_views(schema: pa.Schema) -> pa.Schema:
    """Returns the columns of `without_views`."""
    return pa.schema([(field.name, _not_a_view(field.type)) for field in schema])


def _not_a_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        plain = pa.struct([field.with_type(_not_a_view(field.type)) for field in kind])
    elif pa.types.is_map(kind):
        plain = pa.map_(_not_a_view(kind.key_type), kind.item_field.with_type(_not_a_view(kind.item_type)))
    elif pa.types.is_dictionary(kind):
        plain = pa.dictionary(kind.index_type, _not_a_view(kind.value_type))
    elif pa.types.is_fixed_size_list(kind):
        plain = pa.list_(kind.value_field.with_type(_not_a_view(kind.value_type)), kind.list_size)
    elif pa.types.is_nested(kind) and hasattr(kind, "value_field"):
        plain = pa.large_list(kind.value_field.with_type(_not_a_view(kind.value_type)))
    else:
        return kind
    return kind if plain.equals(kind) or not _has_views(kind) else plain


def _has_views(kind: pa.DataType) -> bool:
    return "_view" in str(kind)


def as_read(kind: pa.DataType) -> pa.DataType:
    """Returns a type without dictionary, run lengths and views."""
    while pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.value_type
    return _not_a_view(kind)


def has_runs(kind: pa.DataType) -> bool:
    """Returns whether nested values are run-end encoded."""
    return "run_end_encoded" in str(as_read(kind))


def cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Casts a column to the type of reading."""
    if column.type == kind:
        return column
    if pa.types.is_run_end_encoded(column.type):
        return cast(run_values(column), kind)
    if pa.types.is_dictionary(column.type):  # no cast supports a dictionary of views
        values = cast(column.dictionary, as_read(column.type))
        column = pa.DictionaryArray.from_arrays(column.indices, values)
    elif pa.types.is_nested(column.type):
        # A cast would include items outside of the slice.
        column = _without_list_views(pa.concat_arrays([column]))
    return pc.cast(column, kind)


def run_values(array: pa.RunEndEncodedArray) -> pa.Array:
    """Decodes runs of any type; Arrow's own function lacks some types."""
    values = cast(array.values, as_read(array.values.type))
    rows = np.arange(array.offset, array.offset + len(array))
    return values.take(pa.array(np.searchsorted(array.run_ends.to_numpy(), rows, side="right")))


def as_list(lists: pa.Array) -> pa.Array:
    """Converts list views; Arrow's cast ignores nulls and the beginning of a slice."""
    return _relisted(lists, lists.flatten())


def _relisted(lists: pa.Array, items: pa.Array) -> pa.Array:
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return pa.LargeListArray.from_arrays(offsets, items, mask=lists.is_null())


def _without_list_views(array: pa.Array) -> pa.Array:
    kind = array.type
    if "list_view" not in str(kind):
        return array
    if pa.types.is_struct(kind):
        inner = [_without_list_views(array.field(number)) for number in range(kind.num_fields)]
        fields = [field.with_type(own.type) for field, own in zip(kind, inner, strict=True)]
        return pa.StructArray.from_arrays(inner, fields=fields, mask=array.is_null())
    if pa.types.is_map(kind):
        items = _without_list_views(array.items)
        return pa.MapArray.from_arrays(array.offsets, _without_list_views(array.keys), items, mask=array.is_null())
    if pa.types.is_fixed_size_list(kind):
        items = _without_list_views(array.values)
        return pa.FixedSizeListArray.from_arrays(items, kind.list_size, mask=array.is_null())
    return _relisted(array, _without_list_views(array.flatten()))


def list_type(element: pa.DataType, dim: int, *, nullable: bool = False) -> pa.DataType:
    """Returns the type of lists of `dim` elements; -1 = any number."""
    field = pa.field("element", element, nullable=nullable)
    return pa.list_(field) if dim == -1 else pa.list_(field, dim)


def lists_of(values: pa.Array, kind: pa.DataType, size: int, count: int) -> pa.Array:
    """Splits values into `count` lists."""
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(size))
    return pa.ListArray.from_arrays(offsets, values, type=kind)


# The most dots in a path.
_MOST_DOTS = 100

Place = tuple[int, ...]
"""Numbers of a column and nested fields."""


class Fields:
    """The fields of a schema or of a struct, by path."""

    def __init__(self, fields: Iterable[pa.Field], *, in_struct: bool = False) -> None:
        self._fields = tuple(fields)
        self._numbers: dict[str, list[int]] = {}
        for number, field in enumerate(self._fields):
            if not (in_struct and (pa.types.is_union(field.type) or pa.types.is_run_end_encoded(field.type))):
                self._numbers.setdefault(field.name, []).append(number)
        self._within: dict[int, Fields] = {}

    @property
    def names(self) -> list[str]:
        """The names of the top-level fields."""
        return list(self._numbers)

    def places(self, path: str) -> list[Place]:
        """Returns the places of a path's fields, several if names repeat."""
        if path in self._numbers:
            return [(number,) for number in self._numbers[path]]
        if path.count(".") > _MOST_DOTS:
            return []
        return [
            (number, *inner)
            for head, tail in _splits(path)
            for number in self._numbers.get(head, ())
            for inner in self._struct(number).places(tail)
        ]

    def field(self, path: str) -> pa.Field | None:
        """Returns the only field of a path, or `None`."""
        places = self.places(path)
        if len(places) != 1:
            return None
        fields, nullable = self, False
        for number in places[0]:
            found = fields._fields[number]
            nullable = nullable or found.nullable
            fields = fields._struct(number)
        return pa.field(path, found.type, nullable, found.metadata)

    def paths(self) -> Iterator[str]:
        """Yields all paths, outer fields first."""
        yield from self._numbers
        for number, field in enumerate(self._fields):
            for path in self._struct(number).paths():
                yield f"{field.name}.{path}"

    def _struct(self, number: int) -> "Fields":
        if number not in self._within:
            kind = self._fields[number].type
            self._within[number] = Fields(kind if pa.types.is_struct(kind) else (), in_struct=True)
        return self._within[number]


def select(schema: pa.Schema, paths: Iterable[str]) -> pa.Schema:
    """Returns a schema of fields with unique paths."""
    fields, chosen = Fields(schema), []
    for path in paths:
        found = fields.field(path)
        if found is None:
            raise KeyError(path)
        chosen.append(found)
    return pa.schema(chosen)


def pick(record: pa.RecordBatch, paths: Sequence[str]) -> pa.RecordBatch:
    """Returns fields of a batch as columns."""
    if set(paths) <= set(record.schema.names):
        return record.select(paths)
    fields, columns = Fields(record.schema), []
    for path in paths:
        ((first, *inner),) = fields.places(path)
        column = record.column(first)
        columns.append(pc.struct_field(column, inner) if inner else column)
    return pa.RecordBatch.from_arrays(columns, names=list(paths))


def pruned(schema: pa.Schema, paths: Iterable[str]) -> pa.Schema:
    """Returns the columns that contain fields, reduced to these."""
    fields = Fields(schema)
    return pa.schema(_pruned(list(schema), [place for path in paths for place in fields.places(path)]))


def replaced(schema: pa.Schema, path: str, field: pa.Field) -> pa.Schema:
    """Replaces a field's type, nullability and metadata."""
    ((first, *inner),) = Fields(schema).places(path)
    return schema.set(first, _replaced(schema.field(first), inner, field))


def _splits(path: str) -> Iterator[tuple[str, str]]:
    end = path.find(".")
    while end >= 0:
        yield path[:end], path[end + 1 :]
        end = path.find(".", end + 1)


def _pruned(fields: Sequence[pa.Field], places: Sequence[Place]) -> list[pa.Field]:
    inner: dict[int, list[Place]] = {}
    for first, *rest in places:
        inner.setdefault(first, []).append(tuple(rest))
    return [
        fields[number]
        if () in rests
        else fields[number].with_type(pa.struct(_pruned(list(fields[number].type), rests)))
        for number, rests in sorted(inner.items())
    ]


def _replaced(whole: pa.Field, place: Sequence[int], field: pa.Field) -> pa.Field:
    if not place:
        return whole.with_type(field.type).with_nullable(field.nullable).with_metadata(field.metadata)
    inside = list(whole.type)
    inside[place[0]] = _replaced(inside[place[0]], place[1:], field)
    return whole.with_type(pa.struct(inside))
