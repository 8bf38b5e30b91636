"""Types of the columns of CSV and JSON lines: those that a job needs, else those of their values. Pure.

CSV has no types. The first block of a file shows what its values look like; what a job does with a column goes before.
In JSON lines a text is a text and a number a number, and a field has the type that holds the values of all lines.
"""

from collections.abc import Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns.fields import Fields
from qinfer.jobs.job import JobSpec, shown
from qinfer.jobs.rows.text_streams import PLAIN, InputForm
from qinfer.models.spec import ModelSpec

_FLOATS = ("FP16", "BF16", "FP32", "FP64")
_NOT_AS_WRITTEN = r"^\s*[+-]?0[0-9xX]"  # 007, 0x1F
_LONG = r"^\s*[+-]?[0-9]{16,}\s*$"  # more digits than a double has


class TextTypes(NamedTuple):
    """Column types that a job requires of text files.

    Attributes:
        wanted: Column → the type that its use asks for; `None` = its uses ask for different ones.
        key: The column that tells rows apart; empty = there is none.
        form: What the job says of the files.
        named: The columns that the job names: inputs, the key, and those that are copied.
    """

    wanted: Mapping[str, pa.DataType | None]
    key: str = ""
    form: InputForm = PLAIN
    named: frozenset[str] = frozenset()


NOTHING_WANTED = TextTypes({})


def text_types(spec: JobSpec, model: ModelSpec) -> TextTypes:
    """Returns what a job needs of the columns of text files, for `csv_schema` and `check_key`."""
    wanted: dict[str, pa.DataType | None] = {}
    for tensor in model.inputs:
        kind = _kind(tensor.datatype)
        for name in spec.columns_of(tensor.name).columns:
            wanted[name] = kind if wanted.get(name, kind) == kind else None
    if spec.key:
        is_rounded = wanted.get(spec.key) == pa.float64()
        wanted[spec.key] = None if is_rounded else wanted.get(spec.key, pa.string())
    named = frozenset(wanted).union(name for name in spec.passthrough if name != "*")
    return TextTypes(wanted, spec.key, InputForm.of(spec), named)


def csv_schema(guessed: pa.Schema, types: TextTypes) -> pa.Schema:
    """Returns the columns of a CSV file in the types that they are read as.

    Args:
        guessed: The columns in the types that their first values look like.
        types: What the job needs.
    """
    return pa.schema([(field.name, _decided(field.type, types.wanted.get(field.name))) for field in guessed])


def loses(values: pa.Array, kind: pa.DataType) -> bool:
    """Tells whether values of CSV are not what they were once they are numbers, such as `007` and very long ones.

    Args:
        values: The values as text.
        kind: The type of the numbers.
    """
    pattern = f"{_NOT_AS_WRITTEN}|{_LONG}" if pa.types.is_floating(kind) else _NOT_AS_WRITTEN
    return bool(pc.any(pc.match_substring_regex(values, pattern)).as_py())


def check_key(schema: pa.Schema, types: TextTypes, url: str) -> None:
    """Checks that keys of a text file stay different from each other.

    Raises:
        InvalidRequest: They would be rounded.
    """
    key = Fields(schema).field(types.key)
    if key is not None and pa.types.is_floating(key.type):
        raise InvalidRequest(
            f"the key column '{shown(types.key)}' of '{url}' has fractions or whole numbers beyond 2^63, which "
            "would be rounded; make its values text, or leave 'key' out"
        )


def without_null(schema: pa.Schema) -> pa.Schema:
    """Returns the columns of CSV files with text for those that have no value as far as they were looked at."""
    return pa.schema([field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in schema])


def json_schema(guessed: pa.Schema) -> pa.Schema:
    """Returns fields of JSON lines in the types that they are read as: what looks like a date is a text, too."""
    return pa.schema([(field.name, _as_text(field.type)) for field in guessed])


def joined(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Returns all fields of two parts of a JSON lines file, in types that hold the values of both.

    Raises:
        pyarrow.ArrowInvalid: A field has values of different kinds; the text names it.
    """
    try:
        return pa.unify_schemas([one, other], promote_options="permissive")
    except pa.ArrowTypeError as error:
        raise pa.ArrowInvalid(f"a field has values of different kinds: {error}") from None


def _kind(datatype: str) -> pa.DataType:
    """Returns the type of CSV's values for an input."""
    if datatype in _FLOATS:
        return pa.float64()
    return {"BYTES": pa.string(), "BOOL": pa.bool_(), "UINT64": pa.uint64()}.get(datatype, pa.int64())


def _decided(guessed: pa.DataType, wanted: pa.DataType | None) -> pa.DataType:
    if wanted is None:
        return guessed
    if wanted == pa.string():
        return guessed if pa.types.is_binary(guessed) else wanted  # bytes that are not UTF-8 are no string
    can_be = pa.types.is_null(guessed) or (wanted == pa.float64() and pa.types.is_integer(guessed))
    return wanted if can_be else guessed  # what does not fit the input is refused with its type


def _as_text(kind: pa.DataType) -> pa.DataType:
    """Returns a type that pyarrow guessed for JSON, with text in place of points in time."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_text(field.type)) for field in kind])
    return kind
