"""Checks of a job before it is accepted: its URLs, its inputs, the first file's columns, and the output folder."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from qinfer.core.store_urls import check_url
from qinfer.errors import InvalidRequest
from qinfer.jobs.check import check
from qinfer.jobs.job import JobSpec
from qinfer.jobs.rows.source import FileFormat, find_files, format_of, read_schema
from qinfer.jobs.rows.text_types import TextTypes, text_types
from qinfer.models.spec import ModelSpec
from qinfer.storage.local import local_path
from qinfer.storage.open import store_for
from qinfer.storage.store import Stat

ENOUGH_FILES = 10_000
"""So many files of a folder are looked at here; planning looks at all."""
LISTING_S = 50.0
"""Seconds that looking for the inputs may take."""

_MOST_EMPTY = 20


class Examined(NamedTuple):
    """A job that can be taken.

    Attributes:
        spec: The job, its URLs in their one spelling: this is to be kept.
        files: Its input files in order, perhaps not all.
        format: Their format.
        schema: The columns of the first file that has any.
    """

    spec: JobSpec
    files: tuple[Stat, ...]
    format: FileFormat
    schema: pa.Schema


def examine(spec: JobSpec, model: ModelSpec, allow: Sequence[str]) -> Examined:
    """Looks whether a job can be taken; it blocks for as long as the stores take to list the inputs.

    Args:
        spec: The job, as `decode_spec` returns it.
        model: The model's configuration.
        allow: The URL prefixes that jobs may read and write (`stores.allow`).

    Raises:
        InvalidRequest: An input is not there or not readable, its columns do not fit, or the output is not empty.
        Forbidden: A URL is not allowed.
        StoreError: A store can't be read.
    """
    spec = with_checked_urls(spec, allow)
    check_output_empty(spec.output.url)
    files = find_files(spec.inputs, enough=ENOUGH_FILES, within_s=LISTING_S)
    format_ = common_format(files, spec)
    file, schema = first_schema(files, format_, text_types(spec, model))
    try:
        check(spec, model, schema)
    except InvalidRequest as error:
        if len(files) == 1:
            raise
        raise InvalidRequest(f"{error.message} (columns of '{file.url}')") from None
    return Examined(spec, tuple(files), format_, schema)


def with_checked_urls(spec: JobSpec, allow: Sequence[str]) -> JobSpec:
    """Returns a job with its URLs in their one spelling.

    Raises:
        InvalidRequest: One is no URL of a store, or could mean more than it says.
        Forbidden: One is not allowed.
    """
    inputs = tuple(check_url(url, allow) for url in spec.inputs)
    output = msgspec.structs.replace(spec.output, url=check_url(spec.output.url, allow))
    return msgspec.structs.replace(spec, inputs=tuple(dict.fromkeys(inputs)), output=output)


def check_output_empty(url: str) -> None:
    """Checks that nothing is in a job's output folder.

    Raises:
        InvalidRequest: Something is, or a file has that name or the name of a folder above.
        StoreError: The store can't be read.
    """
    store = store_for(url)
    if store.stat(url) is not None:
        raise InvalidRequest(f"output '{url}' is a file; name a folder")
    if file := _file_above(url):
        raise InvalidRequest(f"output '{url}' would be beneath '{file}', which is a file; name a folder")
    found = next(iter(store.scan(url)), None)
    if found is not None:
        name = found.url.removeprefix(url).lstrip("/")
        raise InvalidRequest(f"output '{url}' is not empty, it has '{name}'; name a new folder, or empty this one")


def _file_above(url: str) -> str:
    """Returns the URL of the file that is where a folder above would have to be; empty = there is none.

    Only directories have such: in an object store a name may go on after an object's.
    """
    path = local_path(url)
    above = next((folder for folder in path.parents if folder.is_file()), None) if path else None
    return f"file://{above}" if above else ""


def common_format(files: Sequence[Stat], spec: JobSpec) -> FileFormat:
    """Returns the format of a job's files.

    Raises:
        InvalidRequest: A file's extension does not tell it, or they have several.
    """
    first = format_of(files[0].url, spec.input_format)
    for file in files:
        if format_of(file.url, spec.input_format) != first:
            raise InvalidRequest(
                f"the inputs are of several formats, such as '{files[0].url}' and '{file.url}'; make a job of each"
            )
    return first


def first_schema(files: Sequence[Stat], format_: FileFormat, types: TextTypes) -> tuple[Stat, pa.Schema]:
    """Returns the first file that has any columns, and these.

    Args:
        files: The files in order.
        format_: What they are.
        types: What the job needs of the columns of CSV and JSON lines.

    Raises:
        InvalidRequest: The files are empty, or damaged.
        StoreError: A store can't be read.
    """
    for file in files[:_MOST_EMPTY]:
        schema = read_schema(file, format_, types)
        if schema.names:
            return file, schema
    raise InvalidRequest(
        f"input '{files[0].url}' and those after it are empty; without a row their columns are unknown"
    )
