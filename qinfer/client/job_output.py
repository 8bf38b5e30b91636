"""Reads the output of a bulk job by its manifest: the parts in order, several at a time.

CSV and JSON lines are read with the manifest's types: numbers, booleans, texts, lists of them, and bytes. Columns of
other types are read as text.
"""

import re
from binascii import a2b_base64
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import msgspec

from qinfer.client.job_flows import JobStatus, polls
from qinfer.errors import InvalidRequest, QinferError, ResultNotFound, StoreError, UnsupportedFeature
from qinfer.storage.hive import Values, number_columns, partition_values
from qinfer.storage.open import remedy, url_to_fs

if TYPE_CHECKING:
    import pandas
    import pyarrow

MANIFEST, PARTIAL = "_manifest.json", "_manifest.partial.json"
"""The list of parts: of a complete output, and of an incomplete one."""

LISTED_S = 10.0
"""The list of an incomplete output is written after the job's end."""

_THREADS = 8
_CODECS = {"gz": "gzip", "zst": "zstd"}
_LIST = re.compile(r"(?:fixed_size_)?list<\w+: (?P<element>(?!binary).*?)(?: not null)?>(?:\[\d+\])?")
_PLAIN = re.compile(r"u?int\d+|halffloat|float|double|bool|string|binary")
_TEXT = re.compile(
    r"(?:large_)?string|(?:timestamp|date|time|decimal).*|dictionary<values=(?:large_)?string.*", re.DOTALL
)
_SAME_END_S = 0.001
"""Statuses have a resolution of milliseconds."""


class _OutputPart(msgspec.Struct):
    name: str
    rows: int


class _Manifest(msgspec.Struct):
    output_format: str
    rows: int
    ok: int
    parts: list[_OutputPart]
    job: str = ""
    schema: str = ""
    failed_rows: str = "inline"
    ended_at: float = 0.0


def read_output(
    status: JobStatus, columns: Sequence[str] | None, storage_options: Mapping[str, Any] | None, *, partial: bool
) -> "pyarrow.Table":
    """Reads a job's output; see `Job.to_arrow`."""
    if columns is not None and not columns:
        raise InvalidRequest("columns is empty; name at least one, or leave it out to read all")
    if status.state != "completed" and not (partial and status.has_ended):
        raise ResultNotFound(f"job '{status.id}' is {status.state}: {_remedy(status)}")
    name = MANIFEST if status.state == "completed" else PARTIAL
    files, folder = open_folder(status.output_url, storage_options or {})
    with store_errors(status.output_url):
        manifest = _manifest(files, f"{folder}/{name}") if name == MANIFEST else _listed(files, folder, status)
        _check_own(manifest, status)
        table = _read_table(files, folder, manifest, columns)
        if name == MANIFEST:  # otherwise its parts may be those of two jobs
            _check_own(_manifest(files, f"{folder}/{name}"), status)
    rows = manifest.ok if manifest.failed_rows == "separate" else manifest.rows
    if table.num_rows != rows:
        raise ResultNotFound(f"the output of job '{status.id}' has {table.num_rows} rows; its {name} says {rows}")
    return table


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Converts a store driver's errors to `ResultNotFound` for a missing file, else `StoreError`."""
    try:
        yield
    except (QinferError, GeneratorExit):
        raise
    except FileNotFoundError as error:
        raise ResultNotFound(f"the output at {url} is incomplete, a file is missing: {error}") from None
    except Exception as error:
        raise StoreError(f"the output at {url} can't be read: {type(error).__name__}: {error}") from error


def as_pandas(table: "pyarrow.Table") -> "pandas.DataFrame":
    """Returns a table as a data frame."""
    try:
        return table.to_pandas()
    except ImportError:
        raise UnsupportedFeature("a data frame needs pandas: pip install pandas; or take to_arrow()") from None


def _manifest(files: Any, path: str) -> _Manifest:
    return msgspec.json.decode(files.cat_file(path), type=_Manifest)


def _listed(files: Any, folder: str, status: JobStatus) -> _Manifest:
    """Waits for the list, because it is written after the job's end."""
    ends_s, pauses = monotonic() + LISTED_S, polls()
    while True:
        try:
            manifest = _manifest(files, f"{folder}/{PARTIAL}")
            if _is_of_end(manifest, status):
                return manifest
        except FileNotFoundError:
            if not status.shards:
                text = f"job '{status.id}' was {status.state} before it was planned; it has written nothing"
                raise ResultNotFound(text) from None
        left_s = ends_s - monotonic()
        if left_s <= 0:
            raise ResultNotFound(
                f"job '{status.id}' is {status.state}, and the list of its parts, {PARTIAL}, is still being written; "
                "try again, or resume() the job"
            )
        sleep(min(pauses.next_s(), left_s))


def _check_own(manifest: _Manifest, status: JobStatus) -> None:
    """Another job may have overwritten the output; stored ids may end with `@<tenant>`."""
    writer = manifest.job.partition("@")[0]
    if writer != status.id:
        raise ResultNotFound(f"the output of job '{status.id}' was overwritten by job '{writer}'")


def _is_of_end(manifest: _Manifest, status: JobStatus) -> bool:
    ended_at = status.fields.get("ended_at")
    return not ended_at or abs(datetime.fromisoformat(ended_at).timestamp() - manifest.ended_at) < _SAME_END_S


def _remedy(status: JobStatus) -> str:
    if not status.has_ended:
        return "wait() for its end"
    return "resume() it, or read the existing parts with partial=True"


def open_folder(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the file system of a folder, and the folder's path in it."""
    scheme = url.partition("://")[0]
    try:
        files, path = url_to_fs(url, options)
    except ImportError as error:
        if error.name == "fsspec":
            raise UnsupportedFeature("reading the output needs fsspec: pip install 'qinfer-ml[bulk]'") from None
        raise UnsupportedFeature(f"reading {scheme}:// needs a library: {remedy(scheme)}") from None
    except ValueError as error:
        raise StoreError(f"the output at {url} can't be opened: {error}") from None
    return files, path.rstrip("/")


def _read_table(files: Any, folder: str, manifest: _Manifest, columns: Sequence[str] | None) -> "pyarrow.Table":
    try:
        import pyarrow as pa
    except ImportError:
        raise UnsupportedFeature("reading the output needs pyarrow: pip install 'qinfer-ml[bulk]'") from None
    if not manifest.parts:
        return pa.table({})
    paths = [f"{folder}/{part.name}" for part in manifest.parts]
    read = {"arrow": _read_arrow, "parquet": _read_parquet}.get(manifest.output_format)
    read = read or partial(_read_text, text_schema(manifest.schema))
    partitions = [partition_values(part.name) for part in manifest.parts]
    stored = columns and [name for name in columns if name not in partitions[0]]
    with ThreadPoolExecutor(min(_THREADS, len(paths)), "qinfer-output") as threads:
        tables = list(threads.map(lambda path: read(files, path, stored), paths))
    if partitions[0]:
        numbers = number_columns(partitions)
        tables = [_beside(table, values, numbers) for table, values in zip(tables, partitions, strict=True)]
    table = pa.concat_tables(tables).replace_schema_metadata(None).unify_dictionaries()
    return table.select(columns) if columns else table


def _beside(table: "pyarrow.Table", values: Values, numbers: Collection[str]) -> "pyarrow.Table":
    """Returns the rows of a part with the columns of its folders."""
    import pyarrow as pa

    for name, value in values.items():
        if name in numbers:
            scalar = pa.scalar(None if value is None else int(value), pa.int64())
        else:
            scalar = pa.scalar(value, pa.string())
        table = table.append_column(name, pa.repeat(scalar, table.num_rows))
    return table


def _read_parquet(files: Any, path: str, columns: Sequence[str] | None) -> "pyarrow.Table":
    import pyarrow.parquet as pq

    with files.open(path, "rb", cache_type="none") as file, pq.ParquetFile(file, pre_buffer=True) as part:
        chosen = _chosen(part.schema_arrow.names, columns)
        return part.read(columns=chosen).select(chosen)


def _read_arrow(files: Any, path: str, columns: Sequence[str] | None) -> "pyarrow.Table":
    import pyarrow.ipc

    with files.open(path, "rb", cache_type="none") as file, pyarrow.ipc.open_file(file) as part:
        return part.read_all().select(_chosen(part.schema.names, columns))


def _read_text(schema: "pyarrow.Schema", files: Any, path: str, columns: Sequence[str] | None) -> "pyarrow.Table":
    return read_text(files, path, schema).select(_chosen(schema.names, columns))


def text_schema(text: str) -> "pyarrow.Schema":
    """Returns the schema of text parts, from the manifest's lines of `name: type`."""
    import pyarrow as pa

    pairs = (line.partition(": ") for line in text.split("\n") if line)
    return pa.schema([(name, _type_of(kind)) for name, _, kind in pairs])


def _type_of(text: str) -> "pyarrow.DataType":
    import pyarrow as pa

    if match := _LIST.fullmatch(text):
        element = _type_of(match["element"])
        is_text = pa.types.is_string(element) and not _TEXT.fullmatch(match["element"])  # of objects, for example
        return element if is_text else pa.list_(element)
    return pa.type_for_alias(text) if _PLAIN.fullmatch(text) else pa.string()


def read_text(files: Any, path: str, schema: "pyarrow.Schema") -> "pyarrow.Table":
    """Reads a part in CSV or JSON lines; its name tells format and compression."""
    import pyarrow as pa

    extension = path.rpartition("part-")[2].split(".")[1:]
    with files.open(path, "rb") as file:
        data = file.read()
    if len(extension) > 1:
        data = pa.CompressedInputStream(pa.BufferReader(data), _CODECS[extension[1]]).read()
    return _csv_table(data, schema) if extension[0] == "csv" else _json_table(data, schema)


def _csv_table(data: bytes, schema: "pyarrow.Schema") -> "pyarrow.Table":
    import pyarrow as pa
    from pyarrow import csv

    # The types for the CSV reader, which knows neither lists, nor base64, nor half floats.
    types = {field.name: field.type for field in schema}
    read_as = {
        name: pa.float32() if pa.types.is_float16(kind) else pa.string() if _is_coded(kind) else kind
        for name, kind in types.items()
    }
    table = csv.read_csv(
        pa.BufferReader(data),
        read_options=csv.ReadOptions(block_size=len(data) + 1),  # one block: no row is cut
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(
            column_types=read_as, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )
    columns = [table.column(name) for name in types]
    for number, kind in enumerate(types.values()):
        if pa.types.is_list(kind):
            texts = columns[number].to_pylist()
            values = [None if text is None else msgspec.json.decode(text) for text in texts]
            columns[number] = pa.chunked_array([pa.array(values, kind)])
        elif pa.types.is_binary(kind):
            columns[number] = pa.chunked_array([_decoded(columns[number].to_pylist())])
    return pa.table([column.cast(kind) for column, kind in zip(columns, types.values(), strict=True)], schema=schema)


def _json_table(data: bytes, schema: "pyarrow.Schema") -> "pyarrow.Table":
    import pyarrow as pa

    rows = msgspec.json.Decoder(dict[str, Any]).decode_lines(data)
    columns = []
    for field in schema:
        values = [row[field.name] for row in rows]
        if pa.types.is_string(field.type):
            values = [_text_of(value) for value in values]
        columns.append(_decoded(values) if pa.types.is_binary(field.type) else pa.array(values, field.type))
    return pa.table(columns, schema=schema)


def _is_coded(kind: "pyarrow.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_binary(kind))


def _decoded(texts: Sequence[str | None]) -> "pyarrow.Array":
    import pyarrow as pa

    return pa.array([None if text is None else a2b_base64(text) for text in texts], pa.binary())


def _text_of(value: object) -> str | None:
    """An object or a list stays JSON."""
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _chosen(names: list[str], columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        return names
    unknown = [name for name in columns if name not in names]
    if unknown:
        raise ResultNotFound(f"the output has no column '{unknown[0]}'; it has {', '.join(names)}")
    return list(columns)
