"""Checks and plans bulk jobs: lists and reads files chosen by a user, in an examiner.

`examine` checks a job's URLs, inputs, output folder and the columns of the first file. `make_plan` reads all footers
and compares the files' columns.
"""

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from typing import NamedTuple

import msgspec
import pyarrow as pa

from qinfer.core.store_urls import UrlGrant
from qinfer.errors import InvalidRequest, StoreDenied
from qinfer.jobs.columns import Partitions, check, copied_columns, input_form, text_types
from qinfer.jobs.job import JobSpec, with_checked_urls
from qinfer.jobs.plan import PLAN_NAME, SHOWN_FILES, BadFile, Estimate, InputFile, JobPlan, SourceFile, UnplannedJob
from qinfer.jobs.shards import ShardPace, plan_shards, shard_sizes
from qinfer.models.spec import ModelSpec
from qinfer.storage.local import local_path
from qinfer.storage.open import readable, store_for, writable
from qinfer.storage.store import Stat, patiently
from qinfer.tabular.footers import FOOTER_BYTES
from qinfer.tabular.inputs import InputColumns
from qinfer.tabular.schemas import Fields, are_rounded, common_field, encode_schema, filled, replaced
from qinfer.tabular.source import FileFormat, Footer, SourceBroken, find_files, format_of, is_text, read_footer
from qinfer.tabular.spec import shown
from qinfer.tabular.text_streams import BLOCK_BYTES, PieceKeeper, guessed_escape, open_stream
from qinfer.tabular.texts import Path, TextTypes, is_declared, joined, marked, marks, numbers, plain, without_null

Reading = Callable[[str], AbstractContextManager[None]]
"""Is entered around the reading of a file."""

ENOUGH_FILES = 10_000
"""Files of a folder that `examine` lists at most."""
LISTING_S = 50.0

_MOST_EMPTY = 20
_HINT_LINES = 20
_DELIMITERS = (";", "\t", "|")  # common alternatives to the comma
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9.]*[0-9],[0-9]+")
_LISTED_CHARACTERS = 1700
_AHEAD = 4
_MOST_SCHEMAS = 64


class ExaminedJob(NamedTuple):
    """A checked job with normalized URLs.

    `files` may be incomplete; `schema` is empty if only planning can find it.
    """

    spec: JobSpec
    files: tuple[Stat, ...]
    format: FileFormat
    schema: pa.Schema


def examine(spec: JobSpec, model: ModelSpec, grant: UrlGrant, footer_bytes: int = FOOTER_BYTES) -> ExaminedJob:
    """Checks that a job can run; blocks."""
    spec = with_checked_urls(spec, grant)
    writable(grant).check(spec.output.url)
    check_output(spec)
    files = find_files(spec.inputs, readable(grant).check, enough=ENOUGH_FILES, within_s=LISTING_S)
    format_ = common_format(files, spec)
    spec = _with_escape(spec, files) if format_ == "csv" else spec
    types = text_types(spec, model)
    partitions = Partitions([file.url for file in files], spec, types)
    try:
        file, schema = first_schema(files, format_, spec, types, footer_bytes)
    except InvalidRequest as error:
        raise InvalidRequest(error.message + _csv_hint(files, format_, spec)) from None
    if file is not None:
        try:
            schema = partitions.beside(schema, file.url)
            if not spec.merge_schema or len(files) == 1:  # planning looks at the others
                check(spec, model, schema)
        except InvalidRequest as error:
            of_file = f" (columns of '{file.url}')" if len(files) > 1 else ""
            raise InvalidRequest(error.message + of_file + _csv_hint([file], format_, spec)) from None
    return ExaminedJob(spec, tuple(files), format_, schema)


def _with_escape(spec: JobSpec, files: Sequence[Stat]) -> JobSpec:
    form = input_form(spec)
    if spec.csv is not msgspec.UNSET and spec.csv.escape:
        return spec
    url, head = _csv_head(spec, files)
    return spec.with_escape(guessed_escape(url, head, form.csv, is_whole=len(head) < BLOCK_BYTES)) if head else spec


def _csv_head(spec: JobSpec, files: Sequence[Stat]) -> tuple[str, bytes]:
    file = next((file for file in files[:_MOST_EMPTY] if file.size_bytes), None)
    if file is None:
        return "", b""
    try:
        with store_for(file.url).open_known(file) as content:
            return file.url, open_stream(content, file.url, "csv", input_form(spec)).peek(BLOCK_BYTES)
    except (pa.ArrowException, ValueError, OSError, StoreDenied):  # the next reader of the file reports it
        return file.url, b""


def _csv_hint(files: Sequence[Stat], format_: FileFormat, spec: JobSpec) -> str:
    if format_ != "csv":
        return ""
    csv = spec.csv_form
    first, *rows = _csv_head(spec, files)[1].decode(errors="replace").splitlines()[:_HINT_LINES] or [""]
    other = next((mark for mark in _DELIMITERS if mark in first), "") if csv.delimiter not in first else ""
    cells = ";".join(rows).split(other or csv.delimiter)
    has_commas = csv.decimal_point == "." and (other or csv.delimiter) != ","
    has_commas = has_commas and any(_DECIMAL_COMMA.fullmatch(cell.strip().strip('"')) for cell in cells)
    shown_mark = "a tab" if other == "\t" else f"'{other}'"
    hints = [f"its first line has {shown_mark}: set 'csv.delimiter' (--delimiter) to that"] if other else []
    if has_commas:
        hints.append("numbers have a decimal comma: set 'csv.decimal_point' (--decimal-point) to ','")
    return "".join(f"; {hint}" for hint in hints)


def estimate(job: UnplannedJob, pace: ShardPace, threads: int, footer_bytes: int = FOOTER_BYTES) -> Estimate:
    """Checks a job and returns its size; blocks."""
    spec = examine(job.spec, job.model, job.grant, footer_bytes).spec
    plan = make_plan(job._replace(spec=spec), pace, threads=threads, footer_bytes=footer_bytes)
    return Estimate(len(plan.sources), plan.rows, len(plan.shards))


def check_output(spec: JobSpec) -> None:
    """Checks that a job's output folder is empty, or that the job overwrites it."""
    url = spec.output.url
    store = store_for(url)
    if store.stat(url) is not None:
        raise InvalidRequest(f"output '{url}' is a file; name a folder")
    if file := _file_above(url):
        raise InvalidRequest(f"output '{url}' would be beneath '{file}', which is a file; name a folder")
    found = next(iter(store.scan(url)), None)
    if found is None or (spec.overwrite and store.stat(f"{url.rstrip('/')}/{PLAN_NAME}") is not None):
        return
    name = found.url.removeprefix(url).lstrip("/")
    if spec.overwrite:
        raise InvalidRequest(
            f"output '{url}' has '{name}' and no {PLAN_NAME}, so no job has written it, and 'overwrite' leaves it; "
            "name another folder, or empty this one"
        )
    raise InvalidRequest(
        f"output '{url}' is not empty, it has '{name}'; name a new folder, empty this one, or have an earlier job's "
        "files removed by 'overwrite': true (qinfer submit --overwrite)"
    )


def _file_above(url: str) -> str:
    path = local_path(url)
    above = next((folder for folder in path.parents if folder.is_file()), None) if path else None
    return f"file://{above}" if above else ""


def common_format(files: Sequence[Stat], spec: JobSpec) -> FileFormat:
    """Returns the format of a job's files, which must be the same."""
    first = format_of(files[0].url, spec.input_format)
    for file in files:
        if format_of(file.url, spec.input_format) != first:
            raise InvalidRequest(
                f"the inputs are of several formats, such as '{files[0].url}' and '{file.url}'; make a job of each"
            )
    return first


def first_schema(
    files: Sequence[Stat], format_: FileFormat, spec: JobSpec, types: TextTypes, footer_bytes: int = FOOTER_BYTES
) -> tuple[Stat | None, pa.Schema]:
    """Returns the first file with columns, if early enough."""
    bad: list[BadFile] = []
    for file in files[:_MOST_EMPTY]:
        try:
            schema = read_footer(file, format_, types, columns_only=True, footer_bytes=footer_bytes).schema
        except SourceBroken as error:
            bad.append(_bad_file(file, error))
        else:
            if schema.names and (spec.bad_files == "skip" or not bad):
                return file, schema
    if bad and (spec.bad_files == "fail" or len(bad) == len(files)):
        raise InvalidRequest(_cannot_be_read(bad, len(files), is_sure=len(files) <= _MOST_EMPTY))
    if len(files) <= _MOST_EMPTY:
        url = files[0].url
        raise InvalidRequest(f"input '{url}' and those after it are empty; without a row their columns are unknown")
    return None, pa.schema([])


def make_plan(
    job: UnplannedJob,
    pace: ShardPace,
    *,
    threads: int = 16,
    reading: Reading = lambda _: nullcontext(),
    footer_bytes: int = FOOTER_BYTES,
) -> JobPlan:
    """Plans a job; blocks until every footer is read, `threads` at once."""
    spec, check_read = job.spec, readable(job.grant).check
    files = find_files(spec.inputs, check_read, looks_above=False)
    format_ = common_format(files, spec)
    spec = _with_escape(spec, files) if format_ == "csv" else spec
    columns = _CommonColumns(spec, job.model, format_)
    types = text_types(spec, job.model)
    partitions = Partitions([file.url for file in files], spec, types)

    def footer_of(file: Stat) -> Footer | BadFile:
        with reading(file.url):
            check_read(file.url)  # much time may have passed since the listing
            try:
                footer = patiently(lambda: _read_and_kept(file, format_, types, job, footer_bytes))
            except SourceBroken as error:
                return _bad_file(file, error)
        return footer._replace(schema=partitions.beside(footer.schema, file.url)) if footer.schema.names else footer

    with closing(_footers(files, footer_of, threads)) as footers:
        planned, bad = _sorted_out(footers, columns, spec)
    if bad and (spec.bad_files == "fail" or not planned):
        raise InvalidRequest(_cannot_be_read(bad, len(files), is_sure=len(bad) < SHOWN_FILES))
    rows = sum(file.source.rows for file in planned)
    rows = min(rows, spec.limit) if spec.limit else rows
    sizes = shard_sizes(spec.output.rows_per_part, rows, pace)
    extension, folder_of = spec.output.extension, partitions.folder_of
    shards = plan_shards(planned, sizes, extension, example=columns.example, limit=spec.limit, folder_of=folder_of)
    schema = columns.schema()
    if partitions.schema.names:
        partitions.check_read({*InputColumns(spec, job.model, schema).columns, *copied_columns(spec, schema)})
    return JobPlan(
        job_id=job.job_id,
        spec=spec,
        model_hash=job.model_hash,
        schema=encode_schema(schema),
        sources=tuple(file.source for file in planned),
        shards=shards,
        rows=rows,
        skipped=tuple(bad),
        created_at=job.created_at,
        executes=job.executes,
    )


def _read_and_kept(file: Stat, format_: FileFormat, types: TextTypes, job: UnplannedJob, footer_bytes: int) -> Footer:
    if not (is_text(format_) and types.form.is_decoded(file.url, format_)):
        return read_footer(file, format_, types, footer_bytes=footer_bytes)
    keeper = PieceKeeper(writable(job.grant), types.form.kept_url, file.url, file.etag)
    footer = read_footer(file, format_, types, on_block=keeper.add)
    keeper.finish()
    return footer


def _sorted_out(
    footers: Iterable[tuple[Stat, Footer | BadFile]], columns: "_CommonColumns", spec: JobSpec
) -> tuple[list[InputFile], list[BadFile]]:
    planned: list[InputFile] = []
    bad: list[BadFile] = []
    rows = 0
    for file, footer in footers:
        if isinstance(footer, BadFile):
            bad.append(footer)
        else:
            columns.add(len(planned), file, footer)
            planned.append(
                InputFile(SourceFile(file.url, file.etag, file.size_bytes, footer.rows), footer.groups, footer.cuts)
            )
            rows += footer.rows
        if (spec.bad_files == "fail" and len(bad) == SHOWN_FILES) or (spec.limit and rows >= spec.limit):
            break
    return planned, bad


def _bad_file(file: Stat, error: SourceBroken) -> BadFile:
    return BadFile(file.url, error.message.removeprefix(f"'{file.url}' "))


def _cannot_be_read(bad: Sequence[BadFile], files: int, *, is_sure: bool) -> str:
    if len(bad) == files:
        remedy = "are they of another format than it seems?"
    else:
        remedy = f"repair or remove {'it' if len(bad) == 1 else 'them'}, or skip such files by 'bad_files': \"skip\""
    if len(bad) == 1:
        return f"{bad[0]}; {remedy}"
    named = bad[:SHOWN_FILES]
    room = max(0, _LISTED_CHARACTERS - sum(len(file.url) for file in named)) // len(named)
    listed = (f"'{file.url}' {file.reason}"[: len(file.url) + 2 + room] for file in named)
    many = f"{len(bad)} of {files}" if is_sure or len(bad) == files else f"at least {len(bad)} of {files}"
    return f"{many} input files can't be read; {remedy} {'; '.join(listed)}"


def _footers(
    files: Sequence[Stat], footer_of: Callable[[Stat], Footer | BadFile], threads: int
) -> Generator[tuple[Stat, Footer | BadFile], None, None]:
    """Reads ahead; yields and fails in the order of the files."""
    waiting: deque[tuple[Stat, Future[Footer | BadFile]]] = deque()
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
    """Common columns of a job's files.

    Fields of JSON lines that only `passthrough: ["*"]` copies may be missing.
    """

    def __init__(self, spec: JobSpec, model: ModelSpec, format_: FileFormat) -> None:
        self._spec = spec
        self._model = model
        self._is_csv, self._is_json = format_ == "csv", format_ == "jsonl"
        self._types = text_types(spec, model)
        self._has_unnamed = format_ == "jsonl" and spec.passthrough == ("*",)
        self._merges = spec.merge_schema is True
        self._from: dict[str, str] = {}  # column → URL of the first file with it
        self._first = ""  # the first file with rows; until then, with columns
        self._schema = pa.schema([])
        self._has_rows = False
        self._fine: list[pa.Schema] = []
        self.example = 0

    def add(self, number: int, file: Stat, footer: Footer) -> None:
        schema = footer.schema
        if not footer.rows:  # without rows, columns may lack a type, or be missing
            if schema.names and not self._schema.names:
                self._first, self._schema, self.example = file.url, schema.remove_metadata(), number
            return
        if any(schema.equals(fine) for fine in self._fine):
            return
        self._check_file(file.url, schema)
        if self._has_rows:
            if self._merges:
                new = schema
                schema, self._schema = filled(schema, self._schema), filled(self._schema, new)
                self._from.update({name: file.url for name in new.names if name not in self._from})
            self._merge(file.url, schema)
        else:
            self._first, self._schema, self.example = file.url, schema.remove_metadata(), number
            self._has_rows = True
            self._from = dict.fromkeys(schema.names, file.url)
        if len(self._fine) < _MOST_SCHEMAS:
            self._fine.append(schema)

    def _check_file(self, url: str, schema: pa.Schema) -> None:
        if self._merges:
            if not (self._used(schema) or copied_columns(self._spec, schema) == schema.names):
                raise InvalidRequest(f"'{url}' has none of the columns that the job reads; leave it out")
            return
        try:
            check(self._spec, self._model, schema)
        except InvalidRequest as error:
            raise InvalidRequest(f"'{url}': {error.message}") from None

    def _used(self, schema: pa.Schema) -> set[str]:
        fields = Fields(schema)
        names = {*copied_columns(self._spec, schema)}.union(
            *(self._spec.columns_of(tensor.name).columns for tensor in self._model.inputs)
        )
        return {name for name in names if fields.places(name)}

    def schema(self) -> pa.Schema:
        if not (self._has_rows or self._schema.names):
            raise InvalidRequest("the inputs are empty; without a row their columns are unknown")
        schema = without_null(self._schema) if self._is_csv else self._schema
        check(self._spec, self._model, schema)
        return schema

    def _merge(self, url: str, schema: pa.Schema) -> None:
        copied = {*copied_columns(self._spec, schema), *copied_columns(self._spec, self._schema)}
        if self._merges:
            fed = self._used(schema) - copied
            copied &= self._used(schema)
        else:
            fed = {*self._fed(schema), *self._fed(self._schema)}
        new, known = Fields(schema), Fields(self._schema)
        for name in sorted(copied | fed):
            here, there = new.field(name), known.field(name)
            if is_declared(here) and is_declared(there):
                continue
            if self._has_unnamed and name not in fed and name != self._spec.key:
                self._merge_unnamed(url, here, there)
                continue
            if here is None or there is None:
                has, lacks = (self._first, url) if here is None else (url, self._first)
                raise InvalidRequest(
                    f"'{has}' has the column '{shown(name)}', and '{lacks}' lacks it; add it there, make it null with "
                    f"'merge_schema': true (--merge-schema), or {self._remedy(name, copied)}"
                )
            texts = self._texts(here, there)
            here, there = plain(here), plain(there)
            is_changed = name in copied and are_rounded(here.type, there.type)
            merged = None if is_changed else common_field(here, there)
            first = self._from.get(name.partition(".")[0], self._first)
            if len(new.places(name)[0]) != len(known.places(name)[0]):
                raise InvalidRequest(
                    f"'{shown(name)}' is a column in one of '{url}' and '{first}', and a field of a struct in "
                    "the other; rename one of them"
                )
            if merged is None and self._is_csv and name not in fed:
                merged = here.with_type(pa.string())
            if merged is None:
                raise InvalidRequest(
                    f"column '{shown(name)}' is {here.type} in '{url}' and {there.type} in '{first}'; convert one of "
                    "them" + (f", or {self._remedy(name, copied)}" if name in copied - fed else "")
                )
            self._schema = replaced(self._schema, name, marked(merged, texts))

    def _remedy(self, name: str, copied: set[str]) -> str:
        if name == self._spec.key:
            return "name another 'key'"
        return "leave it out of 'passthrough'" if name in copied else "leave it out of both"

    def _texts(self, here: pa.Field, there: pa.Field) -> set[Path]:
        """Numbers are copied as text if a file marks them, or types differ."""
        if not (self._is_json and self._types.is_copied(here.name)):
            return set()
        one, other = numbers(plain(here)), numbers(plain(there))
        return marks(here) | marks(there) | {path for path, kind in one.items() if other.get(path, kind) != kind}

    def _merge_unnamed(self, url: str, here: pa.Field | None, there: pa.Field | None) -> None:
        if here is None:
            return
        if there is None:
            self._schema = self._schema.append(here)
            return
        texts = self._texts(here, there)
        try:
            merged = marked(joined(pa.schema([plain(there)]), pa.schema([plain(here)])).field(0), texts)
        except pa.ArrowInvalid:
            raise InvalidRequest(
                f"column '{shown(here.name)}' is {here.type} in '{url}' and {there.type} in '{self._first}'; convert "
                "one of them, or name it in 'exclude'"
            ) from None
        self._schema = replaced(self._schema, here.name, merged)

    def _fed(self, schema: pa.Schema) -> tuple[str, ...]:
        return InputColumns(self._spec, self._model, schema).columns
