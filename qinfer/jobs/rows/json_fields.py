"""Fields of JSON lines whose values are of several kinds, such as a number in one line and a text in another. Pure.

pyarrow reads no lines in which a field has two kinds of values, but for fields that it is told to ignore. A field that
no one names must not fail a job: so the types of the others are found here by another parser, line by line, as pyarrow
would find them.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from qinfer.jobs.job import shown

MAX_FIELDS = 10_000
"""So many fields are followed, those within others included."""

Path = tuple[str, ...]
"""The names of the fields on the way to one, its own last."""

_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
_SCALARS = (int, float, str)
_INT64 = range(-(2**63), 2**63)  # beyond it, pyarrow takes numbers for floats


class Mixed(NamedTuple):
    """A field with values of two kinds.

    Attributes:
        path: Where it is; what is within a list counts for the field that has the list.
        first: The kind of its first values, in words.
        other: The other kind.
        line: The number of the first line with the other, from 1.
    """

    path: Path
    first: str
    other: str
    line: int

    def __str__(self) -> str:
        return f"field '{self.name}' is {self.first} at first and {self.other} in line {self.line}"

    @property
    def name(self) -> str:
        """The names of the path, as messages show them."""
        return shown(".".join(self.path))

    def is_read(self, named: Collection[str]) -> bool:
        """Tells whether one of some columns or fields is this one, is within it, or has it within."""
        own = ".".join(self.path)
        return any(f"{own}.".startswith(f"{name}.") or name.startswith(f"{own}.") for name in named)


class _Field:
    """A field, or the items of a list, by the values that were seen.

    Attributes:
        kind: `bool`, `int`, `float`, `str`, `list` or `dict`; `None` = there were only nulls.
        inner: The fields of objects by name; of a list its items, by an empty name.
        is_mixed: There were values of another kind, here or within lists.
    """

    __slots__ = ("inner", "is_mixed", "kind")

    def __init__(self) -> None:
        self.kind: type | None = None
        self.inner: dict[str, _Field] = {}
        self.is_mixed = False


class JsonFields:
    """The fields of lines, and those that are of several kinds.

    Args:
        known: The fields of the lines before.
        lines: How many lines that were.
        declared: The fields to which the job gives types: numbers and texts of them are one kind, text.

    Attributes:
        rows: How many objects were added.
        mixed: The fields of several kinds.
    """

    def __init__(self, known: pa.Schema, lines: int, declared: Collection[str] = ()) -> None:
        self.rows = 0
        self.mixed: list[Mixed] = []
        self._line = lines
        self._count = 0
        self._declared = declared
        self._whole = self._of_type(pa.struct(list(known)))

    def add(self, block: bytes) -> None:
        """Takes more lines.

        Raises:
            ValueError: A line is no JSON object, or there are too many fields.
        """
        for line in block.splitlines():
            self._line += 1
            if not line or line.isspace():
                continue
            found = msgspec.json.decode(line)
            if not isinstance(found, dict):
                raise ValueError(f"line {self._line} is no object")
            self._take(self._whole, found, (), None)
            self.rows += 1

    def schema(self) -> pa.Schema:
        """Returns the fields that are of one kind, in the types that hold all their values."""
        return without(pa.schema(list(_type(self._whole))), [each.path for each in self.mixed])

    def _take(self, field: _Field, value: Any, path: Path, owner: _Field | None) -> None:
        """Adds a value.

        Args:
            field: What it is a value of.
            value: The value.
            path: Where that is; within lists, where the outermost of them is.
            owner: The field that has the outermost list; `None` = it is in no list.
        """
        if value is None or (owner or field).is_mixed:
            return
        kind = float if type(value) is int and value not in _INT64 else type(value)
        if self._declared and owner is None and ".".join(path) in self._declared and kind in _SCALARS:
            kind = str
        if field.kind is None or {field.kind, kind} == {int, float}:
            field.kind = kind if field.kind is None else float
        elif field.kind is not kind:
            self.mixed.append(Mixed(path, _WORDS[field.kind], _WORDS[kind], self._line))
            (owner or field).is_mixed = True
            return
        if kind is dict:
            for name, inner in value.items():
                self._take(self._inner(field, name), inner, path if owner else (*path, name), owner)
        elif kind is list:
            for item in value:
                self._take(self._inner(field, ""), item, path, owner or field)

    def _inner(self, field: _Field, name: str) -> _Field:
        found = field.inner.get(name)
        if found is None:
            self._count += 1
            if self._count > MAX_FIELDS:
                raise ValueError(f"its lines have more than {MAX_FIELDS} fields")
            found = field.inner[name] = _Field()
        return found

    def _of_type(self, kind: pa.DataType) -> _Field:
        """Returns the field of values that pyarrow has read."""
        field = _Field()
        if pa.types.is_struct(kind):
            field.kind = dict
            field.inner = {inner.name: self._of_type(inner.type) for inner in kind}
        elif pa.types.is_list(kind):
            field.kind = list
            field.inner = {"": self._of_type(kind.value_type)}
        elif not pa.types.is_null(kind):
            field.kind = {pa.bool_(): bool, pa.int64(): int, pa.float64(): float}.get(kind, str)
        self._count += 1
        return field


def without(schema: pa.Schema, paths: Collection[Path]) -> pa.Schema:
    """Returns a schema without some fields, and without objects of which nothing is left."""
    return pa.schema(_without(list(schema), paths)) if paths else schema


def _without(fields: list[pa.Field], paths: Collection[Path]) -> list[pa.Field]:
    inner: dict[str, set[Path]] = {}
    for first, *rest in paths:
        inner.setdefault(first, set()).add(tuple(rest))
    kept = []
    for field in fields:
        rests = inner.get(field.name, set())
        if not (rests and pa.types.is_struct(field.type)):
            kept += [field] if () not in rests else []
        elif () not in rests and (left := _without(list(field.type), rests)):
            kept.append(field.with_type(pa.struct(left)))
    return kept


def _type(field: _Field) -> pa.DataType:
    if field.is_mixed:
        return pa.null()
    if field.kind is dict:
        return pa.struct([(name, _type(each)) for name, each in field.inner.items()])
    if field.kind is list:
        return pa.list_(_type(field.inner[""]) if field.inner else pa.null())
    simple = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    return simple[field.kind] if field.kind else pa.null()
