"""Looks up columns and struct fields by path, such as `image.bytes`. Pure.

A column whose name equals the path takes precedence. A field is null where its struct is. Fields within lists and maps
have no path; neither have unions and runs within structs, which pyarrow can't extract.
"""

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

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
