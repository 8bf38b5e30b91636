"""The inputs of a job, for its readers: the form and types of text, and partition columns. Pure."""

import hashlib
from collections.abc import Collection, Iterator, Sequence

import msgspec
import pyarrow as pa

from qinfer.errors import InvalidRequest
from qinfer.jobs.job import JobSpec
from qinfer.models.spec import ModelSpec
from qinfer.storage.hive import Values, number_columns, partition_folders, partition_values
from qinfer.tabular.spec import shown
from qinfer.tabular.text_streams import KEPT_FOLDER, InputForm
from qinfer.tabular.text_types import TextTypes
from qinfer.tabular.texts import declared

_FLOATS = ("FP16", "BF16", "FP32", "FP64")


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
    if datatype in _FLOATS:
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
