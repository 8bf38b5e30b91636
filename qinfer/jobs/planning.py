"""Making a job's plan: all footers are read, several at a time, and the files' columns compared."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa

from qinfer.errors import InvalidRequest
from qinfer.jobs.check import check, copied_columns
from qinfer.jobs.columns.inputs import InputColumns
from qinfer.jobs.columns.schemas import common_type, encode_schema
from qinfer.jobs.intake import common_format
from qinfer.jobs.job import JobSpec, shown
from qinfer.jobs.plan import InputFile, Plan, Source, Unplanned
from qinfer.jobs.rows.source import Footer, find_files, read_footer
from qinfer.jobs.rows.text_types import text_types, without_null
from qinfer.jobs.shards import Pace, plan_shards, shard_sizes
from qinfer.models.spec import ModelSpec
from qinfer.storage.store import Stat

Reading = Callable[[str], AbstractContextManager[None]]
"""Is entered around the reading of a file, with its URL."""

_AHEAD = 4
_MOST_SCHEMAS = 64


def make_plan(job: Unplanned, pace: Pace, *, threads: int = 16, reading: Reading = lambda _: nullcontext()) -> Plan:
    """Plans a job; it blocks until every footer is read.

    Args:
        job: The job.
        pace: What is known of the model's speed.
        threads: Footers that are read at once.
        reading: Learns which files are being read.

    Raises:
        InvalidRequest: A file is damaged, lacks a column, or has another type than the others.
        StoreError: A store can't be read.
    """
    spec = job.spec
    files = find_files(spec.inputs)
    format_ = common_format(files, spec)
    columns = _CommonColumns(spec, job.model, is_csv=format_ == "csv")
    types = text_types(spec, job.model)
    planned: list[InputFile] = []

    def footer_of(file: Stat) -> Footer:
        with reading(file.url):
            return read_footer(file, format_, types)

    for file, footer in _footers(files, footer_of, threads):
        columns.add(len(planned), file, footer)
        planned.append(InputFile(Source(file.url, file.etag, file.size_bytes, footer.rows), footer.groups))
    rows = sum(file.source.rows for file in planned)
    sizes = shard_sizes(spec.output.rows_per_part, rows, pace)
    return Plan(
        job_id=job.job_id,
        spec=spec,
        model_hash=job.model_hash,
        schema=encode_schema(columns.schema()),
        sources=tuple(file.source for file in planned),
        shards=plan_shards(planned, sizes, spec.output.format, example=columns.example),
        rows=rows,
    )


def _footers(files: Sequence[Stat], footer_of: Callable[[Stat], Footer], threads: int) -> Iterator[tuple[Stat, Footer]]:
    """Reads the files' footers some files ahead; the first error in the files' order ends it."""
    waiting: deque[tuple[Stat, Future[Footer]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="qinfer-footer") as pool:
        try:
            for file in files:
                waiting.append((file, pool.submit(footer_of, file)))
                if len(waiting) >= threads * _AHEAD:
                    first, footer = waiting.popleft()
                    yield first, footer.result()
            while waiting:
                first, footer = waiting.popleft()
                yield first, footer.result()
        finally:
            for _, footer in waiting:
                footer.cancel()


class _CommonColumns:
    """Common columns of a job's files: a type for each, which the values of all files have or get."""

    def __init__(self, spec: JobSpec, model: ModelSpec, *, is_csv: bool) -> None:
        self._spec = spec
        self._model = model
        self._is_csv = is_csv
        self._first = ""  # the URL of the first file with rows; of one without until there is one that has some
        self._schema = pa.schema([])
        self._has_rows = False
        self._fine: list[pa.Schema] = []
        self.example = 0  # the number of that file

    def add(self, number: int, file: Stat, footer: Footer) -> None:
        """Checks the columns of one more file.

        Raises:
            InvalidRequest: The model can't be fed with them, or they do not go with those of the first file.
        """
        schema = footer.schema
        if not (schema.names or footer.rows) or any(schema.equals(fine) for fine in self._fine):
            return
        try:
            check(self._spec, self._model, schema)
        except InvalidRequest as error:
            raise InvalidRequest(f"'{file.url}': {error.message}") from None
        if self._has_rows and footer.rows:
            self._merge(file.url, schema)
        elif footer.rows or not self._schema.names:
            self._first, self._schema, self.example = file.url, schema.remove_metadata(), number
            self._has_rows = bool(footer.rows)
        if footer.rows and len(self._fine) < _MOST_SCHEMAS:
            self._fine.append(schema)

    def schema(self) -> pa.Schema:
        """Returns the columns of the first file, in the types that all files' values can have.

        Raises:
            InvalidRequest: The model can't be fed with those.
        """
        schema = without_null(self._schema) if self._is_csv else self._schema
        check(self._spec, self._model, schema)
        return schema

    def _merge(self, url: str, schema: pa.Schema) -> None:
        copied = {*copied_columns(self._spec, schema), *copied_columns(self._spec, self._schema)}
        fed = {*self._fed(schema), *self._fed(self._schema)}
        for name in sorted(copied | fed):
            if name not in schema.names or name not in self._schema.names:
                has, lacks = (self._first, url) if name in self._schema.names else (url, self._first)
                raise InvalidRequest(
                    f"'{has}' has the column '{shown(name)}', and '{lacks}' lacks it; add it there, or leave it out of "
                    f"{'passthrough' if name in copied else 'both'}"
                )
            here, there = schema.field(name).type, self._schema.field(name).type
            common = common_type(here, there)
            if common is None and self._is_csv and name not in fed:
                common = pa.string()  # which all values of CSV are
            if common is None:
                raise InvalidRequest(
                    f"column '{shown(name)}' is {here} in '{url}' and {there} in '{self._first}'; convert one of them"
                    + (", or leave it out of 'passthrough'" if name in copied - fed else "")
                )
            field = self._schema.field(name)
            nullable = field.nullable or schema.field(name).nullable
            merged = field.with_type(common).with_nullable(nullable)
            self._schema = self._schema.set(self._schema.get_field_index(name), merged)

    def _fed(self, schema: pa.Schema) -> tuple[str, ...]:
        return InputColumns(self._spec, self._model, schema).columns
