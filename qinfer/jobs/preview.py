"""The first rows of a job's files as text for people, read in an examiner (`qinfer.jobs.examiner`).

Rows, columns, characters of a value, bytes of a batch, files and time are bounded. A file that can't be read is passed
over if a later one can. Values of CSV are shown as written, all others as an output in CSV has them.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import pyarrow as pa

from qinfer.errors import InputMissing
from qinfer.jobs.columns import ERROR_COLUMNS, input_form
from qinfer.jobs.examiner import PreviewJob
from qinfer.jobs.parts import part_of_failed
from qinfer.jobs.plan import FAILED, url_of
from qinfer.jobs.planning import ENOUGH_FILES
from qinfer.jobs.shards import part_name
from qinfer.storage.open import readable, writable
from qinfer.storage.store import Stat
from qinfer.tabular.row_files import WantedColumns, first_rows
from qinfer.tabular.schemas import as_read, cast
from qinfer.tabular.source import ReadLimits, SourceBroken, find_files, format_of, is_text, read_footer, reason_of
from qinfer.tabular.text_streams import InputForm, open_stream
from qinfer.tabular.texts import TextTypes, csv_column
from qinfer.wire.bodies import JobPreview, PreviewColumn

MOST_COLUMNS = 50
MOST_CHARACTERS = 200
MOST_FILES = 1000
"""Files that one preview opens at most, such as empty ones."""
WITHIN_S = 5.0
_BATCH_BYTES = 4 * 2**20  # a row beyond that loses its largest values

Row = tuple[str | None, ...]


class _Batch(NamedTuple):
    url: str
    columns: tuple[PreviewColumn, ...]
    columns_left_out: int
    rows: Sequence[Row]


def preview(work: PreviewJob, footer_bytes: int) -> JobPreview:
    """Reads the first rows of a job's inputs or parts, or its failed rows from several parts; blocks."""
    found = JobPreview(of=work.of)
    for batch in _Reading(work, footer_bytes).batches():
        if found.rows and batch.columns != found.columns:
            break
        found = JobPreview(
            of=work.of,
            file=found.file if found.rows else batch.url,
            columns=batch.columns,
            columns_left_out=batch.columns_left_out,
            rows=(*found.rows, *batch.rows)[: work.rows],
        )
        if len(found.rows) == work.rows:
            break
    return found


class _Reading:
    def __init__(self, work: PreviewJob, footer_bytes: int) -> None:
        self._work, self._until_s = work, time.monotonic() + WITHIN_S
        is_input = work.of == "input"
        self._stores = readable(work.grant) if is_input else writable(work.grant)
        self._form = input_form(work.spec) if is_input else InputForm()
        self._limits = ReadLimits(_BATCH_BYTES, footer_bytes)

    def batches(self) -> Iterator[_Batch]:
        has_rows, problem = False, None
        for file in islice(self._files(), MOST_FILES):
            try:
                for batch in self._read_batches(file):
                    has_rows = has_rows or bool(batch.rows)
                    yield batch
                    if self._is_late:
                        break
            except SourceBroken as error:
                problem = problem or error
            if (has_rows and self._work.of != "failed") or self._is_late:
                break
        if problem is not None and not has_rows:
            raise problem

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._until_s

    def _files(self) -> Iterator[Stat]:
        """Yields the inputs, or the files of the shards in `PreviewJob.shards`."""
        work, check = self._work, self._stores.check
        if work.of == "input":
            yield from find_files(work.spec.inputs, check, enough=ENOUGH_FILES, within_s=WITHIN_S)
            return
        output, is_apart = work.spec.output, work.of == "failed" and work.spec.output.is_split
        wanted = {part_name(shard, output.extension) for shard in work.shards}
        folder = url_of(output.url, FAILED) if is_apart else output.url
        with suppress(InputMissing):  # no shard is written yet
            for file in find_files((folder,), check, enough=ENOUGH_FILES, within_s=WITHIN_S, looks_above=False):
                name = file.url.rpartition("/")[2]
                part = part_of_failed(name) if is_apart else name
                if part in wanted:
                    wanted.remove(part)  # attempts may have left several files of failed rows
                    yield file

    def _read_batches(self, file: Stat) -> Iterator[_Batch]:
        format_, limits = format_of(file.url, self._form.format), self._limits
        types = TextTypes({}, form=self._form)
        schema = read_footer(file, format_, types, columns_only=True, footer_bytes=limits.footer_bytes).schema
        counts = Counter(schema.names)
        names = [name for name, count in counts.items() if count == 1]
        if self._work.of == "failed":
            names = [*ERROR_COLUMNS, *(name for name in names if name not in ERROR_COLUMNS)]
        if not names:
            return
        names = names[:MOST_COLUMNS]
        if format_ == "csv":
            schema = pa.schema([field.with_type(pa.string()) for field in schema])
        try:
            columns = tuple(PreviewColumn(name=_cut(name), type=_cut(str(schema.field(name).type))) for name in names)
            with self._stores(file.url).open_known(file, sequential=is_text(format_)) as content:
                text = open_stream(content, file.url, format_, self._form) if is_text(format_) else content
                wanted = WantedColumns.from_paths(schema, names)
                for record in first_rows(text, format_, wanted, file.url, limits, self._form.csv):
                    yield _Batch(file.url, columns, len(schema) - len(names), self._rows(record))
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            raise SourceBroken(f"'{file.url}' can't be read; is it damaged? {reason_of(error)}") from None

    def _rows(self, record: pa.RecordBatch) -> Sequence[Row]:
        if self._work.of == "failed":
            record = record.filter(record.column(ERROR_COLUMNS[0]).is_valid())
        return list(zip(*map(_texts, record.slice(0, self._work.rows).columns), strict=True))


def _texts(column: pa.Array) -> list[str | None]:
    kind = as_read(column.type)
    try:
        values = csv_column(cast(column, pa.float32() if pa.types.is_float16(kind) else kind))
        return [None if text is None else _cut(text) for text in values.cast(pa.string()).to_pylist()]
    except (pa.ArrowException, TypeError, ValueError):
        return [f"({kind})"[:MOST_CHARACTERS]] * len(column)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
