"""Fields of JSON lines with values of several kinds. Pure.

pyarrow refuses such lines, unless it ignores the field. A field that the job does not name must not fail it, so another
parser determines the types of the other fields like pyarrow.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from qinfer.tabular.spec import shown

MAX_FIELDS = 10_000
"""The most tracked fields, nested ones included."""

Path = tuple[str, ...]
"""The names of the field's ancestors, then the name of the field."""

_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
_SCALARS = (int, float, str)
_INT64 = range(-(2**63), 2**63)  # pyarrow reads larger numbers as floats


class MixedField(NamedTuple):
    """A field with values of two kinds, also in its lists; `line` is the first line with the other kind."""

    path: Path
    first: str
    other: str
    line: int

    def __str__(self) -> str:
        return f"field '{self.name}' is {self.first} at first and {self.other} in line {self.line}"

    @property
    def name(self) -> str:
        """The path in a message."""
        return shown(".".join(self.path))

    def is_read(self, named: Collection[str]) -> bool:
        """Returns whether a name overlaps this field."""
        own = ".".join(self.path)
        return any(f"{own}.".startswith(f"{name}.") or name.startswith(f"{own}.") for name in named)


class _Field:
    """`inner` has an object's fields by name, or a list's items under an empty name."""

    __slots__ = ("inner", "is_mixed", "kind")

    def __init__(self) -> None:
        self.kind: type | None = None
        self.inner: dict[str, _Field] = {}
        self.is_mixed = False


class JsonFields:
    """Finds fields other than the `known` fields; `declared` fields are text."""

    def __init__(self, known: pa.Schema, lines: int, declared: Collection[str] = ()) -> None:
        self.rows = 0
        self.mixed: list[MixedField] = []
        self._line = lines
        self._count = 0
        self._declared = declared
        self._whole = self._of_type(pa.struct(list(known)))

    def add(self, block: bytes) -> None:
        """Adds lines; raises `ValueError` if a line is no JSON object."""
        for line in block.splitlines():
            self._line += 1
            if not line or line.isspace():
                continue
            found = msgspec.json.decode(line)
            if not isinstance(found, dict):
                raise ValueError(f"line {self._line} is no object")
            self._add_value(self._whole, found, (), None)
            self.rows += 1

    def schema(self) -> pa.Schema:
        """Returns the fields of one kind."""
        return without(pa.schema(list(_type(self._whole))), [each.path for each in self.mixed])

    def _add_value(self, field: _Field, value: Any, path: Path, owner: _Field | None) -> None:
        """Notes a value's kind; within lists, `path` and `owner` are of the outermost list's field."""
        if value is None or (owner or field).is_mixed:
            return
        kind = float if type(value) is int and value not in _INT64 else type(value)
        if self._declared and owner is None and ".".join(path) in self._declared and kind in _SCALARS:
            kind = str
        if field.kind is None or {field.kind, kind} == {int, float}:
            field.kind = kind if field.kind is None else float
        elif field.kind is not kind:
            self.mixed.append(MixedField(path, _WORDS[field.kind], _WORDS[kind], self._line))
            (owner or field).is_mixed = True
            return
        if kind is dict:
            for name, inner in value.items():
                self._add_value(self._inner(field, name), inner, path if owner else (*path, name), owner)
        elif kind is list:
            for item in value:
                self._add_value(self._inner(field, ""), item, path, owner or field)

    def _inner(self, field: _Field, name: str) -> _Field:
        found = field.inner.get(name)
        if found is None:
            self._count += 1
            if self._count > MAX_FIELDS:
                raise ValueError(f"its lines have more than {MAX_FIELDS} fields")
            found = field.inner[name] = _Field()
        return found

    def _of_type(self, kind: pa.DataType) -> _Field:
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
    """Removes fields, and objects that become empty."""
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
