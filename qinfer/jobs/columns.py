"""The columns of a job: the form and types of its inputs, partition columns, and whether they fit the model. Pure."""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from io import BytesIO
from itertools import islice
from math import prod

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.errors import InvalidRequest
from qinfer.jobs.job import JobSpec
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.storage.hive import Values, number_columns, partition_folders, partition_values
from qinfer.tabular.inputs import InputColumns, is_left_out
from qinfer.tabular.schemas import Fields, as_read, has_runs
from qinfer.tabular.spec import shown
from qinfer.tabular.tensor_columns import FLOATS
from qinfer.tabular.text_streams import KEPT_FOLDER, InputForm
from qinfer.tabular.texts import TextTypes, csv_column, declared, is_declared, json_texts, type_of, typed

ERROR_COLUMNS = ("error_code", "error_message")
PLACE_COLUMNS = ("_file", "_row_group", "_row")
"""A row's origin, in outputs without a key."""
TOP_K_PARTS = ("label", "index", "score")

_MOST_PROBLEMS = 5
_MOST_NAMES = 8
_MOST_COMPARED, _LONGEST_COMPARED = 1000, 200  # for guessing the intended name


def check(spec: JobSpec, model: ModelSpec, schema: pa.Schema) -> None:
    """Checks that a file's columns fit the model, and that output columns have different names.

    Names that differ only in case are rejected only here, since shards of earlier releases may have such names.
    """
    found = list(islice(_untyped(spec, model, schema), _MOST_PROBLEMS))
    schema = typed(schema)
    found = found or list(islice(problems(spec, model, schema), _MOST_PROBLEMS))
    found = found or list(islice(_cases(spec, model, schema), _MOST_PROBLEMS))
    if found:
        raise InvalidRequest("; ".join(found))
    InputColumns(spec, model, schema)


def problems(spec: JobSpec, model: ModelSpec, schema: pa.Schema) -> Iterator[str]:
    """Yields messages about unknown and ambiguous names."""
    fields = Fields(schema)
    yield from _unknown("columns", spec.columns, [tensor.name for tensor in model.inputs], f"input of '{model.name}'")
    outputs, written = [tensor.name for tensor in model.outputs], written_outputs(spec, model)
    for field in ("tensors", "columns", "top_k"):
        given = getattr(spec.output, field)
        yield from _unknown(f"output.{field}", given, outputs, f"output of '{model.name}'")
        for name in given:
            if name in outputs and name not in [tensor.name for tensor in written]:
                yield f"field 'output.{field}' names '{shown(name)}', which 'output.tensors' leaves out; add it there"
    if model.sequences is not None:
        yield (
            f"model '{model.name}' has 'sequence_batching', and the rows of a job are no sequence; choose another model"
        )
    yield from _unranked(spec, model, written)
    for tensor in model.inputs:
        if not is_left_out(spec, tensor, schema):
            yield from _column_problems(f"columns.{tensor.name}", spec.columns_of(tensor.name).columns, fields)
    if spec.key:
        yield from _column_problems("key", [spec.key], fields)
    yield from _column_problems("passthrough", [name for name in spec.passthrough if name != "*"], fields)
    # `exclude` works on whole columns.
    yield from _column_problems("exclude", spec.exclude, Fields(pa.schema([(n, pa.null()) for n in schema.names])))
    yield from _collisions(spec, written, schema)
    yield from _unwritable(spec, schema)


def _untyped(spec: JobSpec, model: ModelSpec, schema: pa.Schema) -> Iterator[str]:
    fields, copied = Fields(schema), copied_columns(spec, schema)
    read = {*copied}.union(*(spec.columns_of(tensor.name).columns for tensor in model.inputs))
    for name, kind in spec.column_types.items():
        found, field = fields.field(name), f"field 'types' names '{shown(name)}'"
        whole = next((column for column in copied if name != column and name.startswith(f"{column}.")), None)
        if found is None:
            yield from _column_problems("types", [name], fields)
        elif whole is not None and len(fields.places(name)[0]) > 1:
            yield f"{field}, and '{shown(whole)}' is copied whole; name '{shown(name)}' in 'passthrough' in its place"
        elif name not in read:
            yield f"{field}, which the job neither copies nor feeds to an input; leave it out"
        elif not (is_declared(found) or found.type == type_of(kind)):
            yield (
                f"{field}, whose type is {shown(str(found.type))} in the inputs; types are for columns of CSV, single "
                "texts and numbers of JSON lines, and partition columns"
            )


def written_outputs(spec: JobSpec, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Returns the output tensors that a job writes."""
    return tuple(t for t in model.outputs if not spec.output.tensors or t.name in spec.output.tensors)


def output_columns(spec: JobSpec, tensor: TensorSpec) -> tuple[str, ...]:
    """Returns the columns for an output tensor."""
    name = spec.column_of(tensor.name)
    if tensor.name not in spec.output.top_k:
        return (name,)
    return tuple(f"{name}_{part}" for part in TOP_K_PARTS if part != "label" or tensor.labels)


def has_place(spec: JobSpec) -> bool:
    """Returns whether output rows have their origin."""
    return not spec.key or spec.output.is_split


def copied_columns(spec: JobSpec, schema: pa.Schema) -> tuple[str, ...]:
    """Returns the columns that are copied to the output."""
    names = spec.passthrough
    if names == ("*",):
        left_out = {*spec.exclude, *spec.output.partition_by}
        names = tuple(name for name in schema.names if name not in left_out)
    return names if not spec.key or spec.key in names else (*names, spec.key)


def _unknown(field: str, given: Iterable[str], known: list[str], what: str) -> Iterator[str]:
    for name in given:
        if name not in known:
            yield f"field '{field}' names '{shown(name)}', which is no {what}; {_instead(name, known)}"


def _column_problems(field: str, wanted: Sequence[str], fields: Fields) -> Iterator[str]:
    for name in wanted:
        count = len(fields.places(name))
        if not count:
            instead = _instead(name, fields.names, fields.paths())
            yield f"the inputs have no column '{shown(name)}' of field '{field}'; {instead}"
        elif count > 1:
            yield f"the inputs have {count} columns named '{shown(name)}', of field '{field}'; rename them"


def _unranked(spec: JobSpec, model: ModelSpec, written: Sequence[TensorSpec]) -> Iterator[str]:
    for tensor in written:
        count, elements = spec.output.top_k.get(tensor.name, 0), prod(tensor.dims)
        if count and model.decoupled:
            yield (
                f"field 'output.top_k' names '{tensor.name}' of '{model.name}', which is decoupled: a row has any "
                "number of responses, which are written whole; leave it out of 'output.top_k'"
            )
        elif count and tensor.datatype in ("BOOL", "BYTES"):
            yield f"field 'output.top_k' names '{tensor.name}', whose elements are {tensor.datatype} and have no order"
        elif -1 not in tensor.dims and count > elements:
            yield f"field 'output.top_k.{tensor.name}' is {count}; the output has {elements} element(s) a row"


def _server_columns(spec: JobSpec) -> tuple[str, ...]:
    return (*ERROR_COLUMNS, *(PLACE_COLUMNS if has_place(spec) else ()))


def _collisions(spec: JobSpec, written: Sequence[TensorSpec], schema: pa.Schema) -> Iterator[str]:
    taken = dict.fromkeys(_server_columns(spec), "the server's own column")
    for tensor in written:
        for name in output_columns(spec, tensor):
            if not name:
                yield f"field 'output.columns.{tensor.name}' is empty; name a column"
            elif name in taken:
                yield (
                    f"output '{tensor.name}' and {taken[name]} would both be the column '{shown(name)}'; name another "
                    f"in 'output.columns.{tensor.name}'"
                )
            taken.setdefault(name, f"output '{tensor.name}'")
    for name, count in Counter(copied_columns(spec, schema)).items():
        if name in taken:
            remedy = "exclude it" if "*" in spec.passthrough and name != spec.key else "rename one of them"
            yield f"the copied column '{shown(name)}' and {taken[name]} would have the same name; {remedy}"
        elif count > 1:
            yield f"the inputs have {count} columns named '{shown(name)}'; exclude or rename them"


def _cases(spec: JobSpec, model: ModelSpec, schema: pa.Schema) -> Iterator[str]:
    """Yields a problem for names that differ only in case, which many engines treat as equal."""
    outputs = [name for tensor in written_outputs(spec, model) for name in output_columns(spec, tensor)]
    taken: dict[str, str] = {}
    for name in (*_server_columns(spec), *outputs, *copied_columns(spec, schema)):
        other = taken.setdefault(name.lower(), name)
        if other != name:
            yield (
                f"the output would have the columns '{shown(other)}' and '{shown(name)}', which many readers take for "
                "one; rename one of them, by 'output.columns' if it is an output"
                + (", or exclude it" if "*" in spec.passthrough else "")
            )


def _unwritable(spec: JobSpec, schema: pa.Schema) -> Iterator[str]:
    format_name, has = _FORMATS[spec.output.format]
    there = Fields(schema)
    fields = [field for name in copied_columns(spec, schema) if (field := there.field(name)) is not None]
    for field in () if has(fields) else fields:
        if not has([field]):
            name = field.name
            remedy = "exclude it" if "*" in spec.passthrough else "leave it out of 'passthrough'"
            remedy = "name another 'key'" if name == spec.key else remedy
            remedy += "" if has_runs(field.type) else ", or make 'output.format' arrow"
            yield (
                f"the copied column '{shown(name)}' is of type {shown(str(field.type))}, which "
                f"{format_name} does not have; {remedy}"
            )


def _parquet_has(fields: Sequence[pa.Field]) -> bool:
    try:
        pq.ParquetWriter(BytesIO(), pa.schema([field.with_type(as_read(field.type)) for field in fields])).close()
    except (pa.ArrowException, OSError):
        return False
    return True


def _has_texts(fields: Sequence[pa.Field], texts: Callable[[pa.Array], pa.Array]) -> bool:
    try:
        for field in fields:
            texts(pa.nulls(1, as_read(field.type)))
    except (pa.ArrowException, TypeError):
        return False
    return _arrow_has(fields)


def _arrow_has(fields: Sequence[pa.Field]) -> bool:
    return not any(has_runs(field.type) for field in fields)


_FORMATS: Mapping[str, tuple[str, Callable[[Sequence[pa.Field]], bool]]] = {
    "parquet": ("Parquet", _parquet_has),
    "arrow": ("Arrow", _arrow_has),
    "csv": ("CSV", lambda fields: _has_texts(fields, lambda column: csv_column(column).cast(pa.string()))),
    "jsonl": ("JSON lines", lambda fields: _has_texts(fields, json_texts)),
}


def _instead(name: str, known: list[str], compared: Iterable[str] | None = None) -> str:
    some = islice(known if compared is None else compared, _MOST_COMPARED)
    near = get_close_matches(name, some, n=3) if len(name) <= _LONGEST_COMPARED else ()
    if near:
        return f"did you mean {' or '.join(map(repr, map(shown, near)))}?"
    more = f", and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"there are {', '.join(map(shown, known[:_MOST_NAMES])) or 'none'}{more}"


def input_form(spec: JobSpec) -> InputForm:
    """Returns the form of text that a job names.

    Jobs that overwrite name the pieces' folder by the form, since an earlier job may have decoded differently.
    """
    kept_url = f"{spec.output.url.rstrip('/')}/{KEPT_FOLDER}"
    if spec.overwrite:
        form = msgspec.json.encode([spec.input_format, spec.compression_of_inputs, spec.csv_form])
        kept_url += f"/{hashlib.sha256(form).hexdigest()[:16]}"
    return InputForm(spec.input_format, spec.compression_of_inputs, spec.csv_form, kept_url)


def text_types(spec: JobSpec, model: ModelSpec) -> TextTypes:
    """Returns the types that a job needs of text files."""
    wanted: dict[str, pa.DataType | None] = {}
    for tensor in model.inputs:
        kind = _kind(tensor.datatype)
        for name in spec.columns_of(tensor.name).columns:
            wanted[name] = kind if wanted.get(name, kind) == kind else None
    copied = frozenset(spec.passthrough).union({spec.key} - {""})
    return TextTypes(wanted, spec.key, input_form(spec), copied, spec.column_types)


class Partitions:
    """A job's partition columns; files with different names raise `InvalidRequest`."""

    def __init__(self, urls: Sequence[str], spec: JobSpec, types: TextTypes) -> None:
        self._output = spec.output.partition_by
        self.schema = _schema(urls, types) if spec.partitioning else pa.schema([])
        for name in self._output:
            if name not in self.schema.names:
                there = ", ".join(map(shown, self.schema.names)) or "none"
                raise InvalidRequest(
                    f"field 'output.partition_by' names '{shown(name)}', but no folder of the inputs has that name; "
                    f"there are {there}: an output is partitioned as its inputs are"
                )

    def beside(self, columns: pa.Schema, url: str) -> pa.Schema:
        """Returns a file's columns, then its partition columns."""
        if twice := [name for name in self.schema.names if name in columns.names]:
            raise InvalidRequest(
                f"'{url}' has the column '{shown(twice[0])}', and its folder has one of that name; leave out "
                "'partitioning' to read the files' column"
            )
        return pa.schema([*columns, *self.schema]) if self.schema.names else columns

    def check_read(self, columns: Collection[str]) -> None:
        """Raises `InvalidRequest` if a job reads only partition columns."""
        if not set(columns) - set(self.schema.names):
            raise InvalidRequest(
                "the job reads only names of folders; name a column of the files, as 'key' for example"
            )

    def folder_of(self, url: str) -> str:
        """Returns the output folder of a file's rows, such as `country=de/`."""
        if not self._output:
            return ""
        folders = partition_folders(url)
        return "".join(f"{folders[name]}/" for name in self._output)


def partition_arrays(url: str, schema: pa.Schema, rows: int) -> dict[str, pa.Array]:
    """Returns the partition columns of a file's rows."""
    values = partition_values(url)
    arrays = {}
    for field in schema:
        value = values[field.name]
        plain = int(value) if value is not None and pa.types.is_integer(field.type) else value
        arrays[field.name] = pa.repeat(pa.scalar(plain, field.type), rows)
    return arrays


def _kind(datatype: str) -> pa.DataType:
    if datatype in FLOATS:
        return pa.float64()
    return {"BYTES": pa.string(), "BOOL": pa.bool_(), "UINT64": pa.uint64()}.get(datatype, pa.int64())


def _schema(urls: Sequence[str], types: TextTypes) -> pa.Schema:
    names = partition_values(urls[0])
    copied = [name for name in names if types.is_copied(name) and name not in types.wanted]
    texts = {name for name in names if name == types.key and name not in types.wanted}

    def checked() -> Iterator[Values]:
        for url in urls:
            values = partition_values(url)
            if values.keys() != names.keys():
                raise InvalidRequest(_different(urls[0], names, url, values))
            texts.update(name for name in copied if _changes(values[name]))
            yield values

    numbers = number_columns(checked())
    whole = {name for name in numbers - texts if types.wanted.get(name) != pa.string()}
    fields = [pa.field(name, pa.int64() if name in whole else pa.string()) for name in names]
    given = types.declared
    return pa.schema([declared(field, given[field.name]) if field.name in given else field for field in fields])


def _changes(value: str | None) -> bool:
    """Returns whether the value is a whole number that would change, such as `07`."""
    return value is not None and value.isascii() and value.lstrip("+-").isdigit() and str(int(value)) != value


def _different(first: str, there: Values, url: str, here: Values) -> str:
    missing = there.keys() - here.keys()
    has, lacks = (first, url) if missing else (url, first)
    name = min(missing or here.keys() - there.keys())
    return f"'{has}' is in a folder '{shown(name)}=…', and '{lacks}' is in none; move one, or leave out 'partitioning'"
