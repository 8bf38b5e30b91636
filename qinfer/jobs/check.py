"""Whether a job, a model and the inputs' columns fit together. Pure; every problem names its column or field."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from io import BytesIO
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns.inputs import InputColumns, is_left_out
from qinfer.jobs.job import JobSpec, shown
from qinfer.models.spec import ModelSpec

ERROR_COLUMNS = ("error_code", "error_message")
PLACE_COLUMNS = ("_file", "_row_group", "_row")
"""Where a row is from, in the output of a job without a key."""

_MOST_PROBLEMS = 5
_MOST_NAMES = 8
_MOST_COMPARED, _LONGEST_COMPARED = 1000, 200  # to guess what was meant


def check(spec: JobSpec, model: ModelSpec, schema: pa.Schema) -> None:
    """Checks that a model can be fed with a file's columns, and that the output's columns have different names.

    Raises:
        InvalidRequest: It can't; the message has the first problems.
    """
    found = list(islice(problems(spec, model, schema), _MOST_PROBLEMS))
    if found:
        raise InvalidRequest("; ".join(found))
    InputColumns(spec, model, schema)


def problems(spec: JobSpec, model: ModelSpec, schema: pa.Schema) -> Iterator[str]:
    """Finds names that are of nothing, and names that several would have; in words."""
    names = Counter(schema.names)
    yield from _unknown("columns", spec.columns, [tensor.name for tensor in model.inputs], f"input of '{model.name}'")
    outputs = [tensor.name for tensor in model.outputs]
    yield from _unknown("output.columns", spec.output.columns, outputs, f"output of '{model.name}'")
    for tensor in model.inputs:
        if not is_left_out(spec, tensor, schema):
            yield from _column_problems(f"columns.{tensor.name}", spec.columns_of(tensor.name).columns, names)
    if spec.key:
        yield from _column_problems("key", [spec.key], names)
    yield from _column_problems("passthrough", [name for name in spec.passthrough if name != "*"], names)
    yield from _column_problems("exclude", spec.exclude, names)
    yield from _collisions(spec, outputs, schema)
    if spec.output.format == "parquet":
        yield from _unwritable(spec, schema)


def copied_columns(spec: JobSpec, schema: pa.Schema) -> tuple[str, ...]:
    """Returns the columns that are copied to the output: `passthrough` in its order or the inputs', then the key."""
    names = spec.passthrough
    if names == ("*",):
        names = tuple(name for name in schema.names if name not in spec.exclude)
    return names if not spec.key or spec.key in names else (*names, spec.key)


def _unknown(field: str, given: Iterable[str], known: list[str], what: str) -> Iterator[str]:
    for name in given:
        if name not in known:
            yield f"field '{field}' names '{shown(name)}', which is no {what}; {_instead(name, known)}"


def _column_problems(field: str, wanted: Sequence[str], names: Counter[str]) -> Iterator[str]:
    for name in wanted:
        if name not in names:
            yield f"the inputs have no column '{shown(name)}' of field '{field}'; {_instead(name, list(names))}"
        elif names[name] > 1:
            yield f"the inputs have {names[name]} columns named '{shown(name)}', of field '{field}'; rename them"


def _collisions(spec: JobSpec, outputs: Sequence[str], schema: pa.Schema) -> Iterator[str]:
    """Finds columns of the output that would have the same name."""
    taken = dict.fromkeys((*ERROR_COLUMNS, *(() if spec.key else PLACE_COLUMNS)), "the server's own column")
    for tensor in outputs:
        name = spec.column_of(tensor)
        if not name:
            yield f"field 'output.columns.{tensor}' is empty; name a column"
        elif name in taken:
            yield (
                f"output '{tensor}' and {taken[name]} would both be the column '{shown(name)}'; name another in "
                f"'output.columns.{tensor}'"
            )
        taken.setdefault(name, f"output '{tensor}'")
    for name, count in Counter(copied_columns(spec, schema)).items():
        if name in taken:
            remedy = "exclude it" if "*" in spec.passthrough and name != spec.key else "rename one of them"
            yield f"the copied column '{shown(name)}' and {taken[name]} would have the same name; {remedy}"
        elif count > 1:
            yield f"the inputs have {count} columns named '{shown(name)}'; exclude or rename them"


def _unwritable(spec: JobSpec, schema: pa.Schema) -> Iterator[str]:
    """Finds copied columns of types that Parquet does not have."""
    known = {field.name: field for field in schema}
    fields = [known[name] for name in copied_columns(spec, schema) if name in known]
    for field in () if _parquet_has(fields) else fields:
        if not _parquet_has([field]):
            name = field.name
            remedy = "exclude it" if "*" in spec.passthrough else "leave it out of 'passthrough'"
            remedy = "name another 'key'" if name == spec.key else remedy
            yield (
                f"the copied column '{shown(name)}' is of type {shown(str(field.type))}, which Parquet does not have; "
                f"{remedy}, or make 'output.format' arrow"
            )


def _parquet_has(fields: Sequence[pa.Field]) -> bool:
    try:
        pq.ParquetWriter(BytesIO(), pa.schema(fields)).close()
    except (pa.ArrowException, OSError):
        return False
    return True


def _instead(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known[:_MOST_COMPARED], n=3) if len(name) <= _LONGEST_COMPARED else ()
    if near:
        return f"did you mean {' or '.join(map(repr, map(shown, near)))}?"
    more = f", and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"there are {', '.join(map(shown, known[:_MOST_NAMES])) or 'none'}{more}"
