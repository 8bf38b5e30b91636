"""Reads the output of a bulk job by its manifest: the parts in order, several at a time."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import msgspec

from qinfer.client.job_flows import JobStatus, polls
from qinfer.errors import InvalidRequest, QinferError, ResultNotFound, StoreError, UnsupportedFeature
from qinfer.storage.open import remedy

if TYPE_CHECKING:
    import pandas
    import pyarrow

MANIFEST, PARTIAL = "_manifest.json", "_manifest.partial.json"
"""The names of the list of parts: of a complete output, and of an incomplete one."""

LISTED_S = 10.0
"""Seconds to wait for the list of an incomplete output: it is written after the job's end."""

_THREADS = 8
_SAME_END_S = 0.001
"""Statuses have a resolution of milliseconds."""


class _Part(msgspec.Struct):
    name: str
    rows: int


class _Manifest(msgspec.Struct):
    """The fields of a manifest that reading needs."""

    output_format: str
    rows: int
    parts: list[_Part]
    ended_at: float = 0.0


def read_output(
    status: JobStatus, columns: Sequence[str] | None, storage_options: Mapping[str, Any] | None, *, partial: bool
) -> "pyarrow.Table":
    """Reads a job's output; see `Job.to_arrow`.

    Raises:
        InvalidRequest: `columns` is empty.
        ResultNotFound: The job has not ended, or its output does not exist, or does not have the rows of its manifest.
        UnsupportedFeature: A library is missing.
        StoreError: The store can't be read.
    """
    if columns is not None and not columns:
        raise InvalidRequest("columns is empty; name at least one, or leave it out to read all")
    if status.state != "completed" and not (partial and status.has_ended):
        raise ResultNotFound(f"job '{status.id}' is {status.state}: {_remedy(status)}")
    name = MANIFEST if status.state == "completed" else PARTIAL
    files, folder = open_folder(status.output_url, storage_options or {})
    with store_errors(status.output_url):
        manifest = _manifest(files, f"{folder}/{name}") if name == MANIFEST else _listed(files, folder, status)
        table = _read(files, folder, manifest, columns)
    if table.num_rows != manifest.rows:
        raise ResultNotFound(
            f"the output of job '{status.id}' has {table.num_rows} rows; its {name} says {manifest.rows}"
        )
    return table


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turns the errors of a store's driver, each of which has its own, into qinfer's.

    Args:
        url: The folder of the output.

    Raises:
        ResultNotFound: A file is missing.
        StoreError: The store can't be read.
    """
    try:
        yield
    except (QinferError, GeneratorExit):
        raise
    except FileNotFoundError as error:
        raise ResultNotFound(f"the output at {url} is incomplete, a file is missing: {error}") from None
    except Exception as error:
        raise StoreError(f"the output at {url} can't be read: {type(error).__name__}: {error}") from error


def as_pandas(table: "pyarrow.Table") -> "pandas.DataFrame":
    """Returns a table as a data frame.

    Raises:
        UnsupportedFeature: pandas is not installed.
    """
    try:
        return table.to_pandas()
    except ImportError:
        raise UnsupportedFeature("a data frame needs pandas: pip install pandas; or take to_arrow()") from None


def _manifest(files: Any, path: str) -> _Manifest:
    return msgspec.json.decode(files.cat_file(path), type=_Manifest)


def _listed(files: Any, folder: str, status: JobStatus) -> _Manifest:
    """Returns the list of the parts of a job that ended early; waits for it, since it is written after the end.

    Raises:
        ResultNotFound: The list does not exist.
    """
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


def _is_of_end(manifest: _Manifest, status: JobStatus) -> bool:
    """Tells whether a list was written after the job's last end, and not before the job was resumed."""
    ended_at = status.fields.get("ended_at")
    return not ended_at or abs(datetime.fromisoformat(ended_at).timestamp() - manifest.ended_at) < _SAME_END_S


def _remedy(status: JobStatus) -> str:
    if not status.has_ended:
        return "wait() for its end"
    return "resume() it, or read the existing parts with partial=True"


def open_folder(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the file system of a folder, and the folder's path in it."""
    try:
        import fsspec
    except ImportError:
        raise UnsupportedFeature("reading the output needs fsspec: pip install 'qinfer-ml[bulk]'") from None
    scheme = url.partition("://")[0]
    try:
        files, path = fsspec.core.url_to_fs(url, **options)
    except ImportError:
        raise UnsupportedFeature(f"reading {scheme}:// needs a library: {remedy(scheme)}") from None
    except ValueError as error:
        raise StoreError(f"the output at {url} can't be opened: {error}") from None
    return files, path.rstrip("/")


def _read(files: Any, folder: str, manifest: _Manifest, columns: Sequence[str] | None) -> "pyarrow.Table":
    try:
        import pyarrow as pa
    except ImportError:
        raise UnsupportedFeature("reading the output needs pyarrow: pip install 'qinfer-ml[bulk]'") from None
    if not manifest.parts:
        return pa.table({})
    paths = [f"{folder}/{part.name}" for part in manifest.parts]
    read = _read_arrow if manifest.output_format == "arrow" else _read_parquet
    with ThreadPoolExecutor(min(_THREADS, len(paths)), "qinfer-output") as threads:
        tables = list(threads.map(lambda path: read(files, path, columns), paths))
    return pa.concat_tables(tables).replace_schema_metadata(None).unify_dictionaries()


def _read_parquet(files: Any, path: str, columns: Sequence[str] | None) -> "pyarrow.Table":
    import pyarrow.parquet as pq

    with files.open(path, "rb", cache_type="none") as file, pq.ParquetFile(file, pre_buffer=True) as part:
        chosen = _chosen(part.schema_arrow.names, columns)
        return part.read(columns=chosen).select(chosen)


def _read_arrow(files: Any, path: str, columns: Sequence[str] | None) -> "pyarrow.Table":
    import pyarrow.ipc

    with files.open(path, "rb", cache_type="none") as file, pyarrow.ipc.open_file(file) as part:
        return part.read_all().select(_chosen(part.schema.names, columns))


def _chosen(names: list[str], columns: Sequence[str] | None) -> list[str]:
    """Returns the requested columns, in the requested order."""
    if columns is None:
        return names
    unknown = [name for name in columns if name not in names]
    if unknown:
        raise ResultNotFound(f"the output has no column '{unknown[0]}'; it has {', '.join(names)}")
    return list(columns)
