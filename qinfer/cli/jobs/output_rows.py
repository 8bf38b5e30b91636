"""Reads and compares outputs of bulk jobs in bounded memory: a batch of rows, or a part of text, at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from qinfer.cli.console import CommandFailed
from qinfer.client.job_output import MANIFEST, PARTIAL, open_folder, read_text, store_errors, text_schema
from qinfer.errors import InvalidRequest, ResultNotFound
from qinfer.jobs.columns import ERROR_COLUMNS, PLACE_COLUMNS
from qinfer.jobs.job import TEXT_FORMATS, JobSpec
from qinfer.jobs.plan import Manifest, decode_manifest
from qinfer.labeling.results import Array
from qinfer.traffic.differences import Rule, Sample, Samples, Summary, compared

_PLAN = "_plan.json"
_ROWS = 2048
_MICROSECONDS: dict[type[pa.DataType], Callable[[Any], pa.DataType]] = {
    pa.TimestampType: lambda kind: pa.timestamp("us", kind.tz),
    pa.DurationType: lambda _: pa.duration("us"),
    pa.Time64Type: lambda _: pa.time64("us"),
}
"""Python has no nanoseconds."""


class Row(NamedTuple):
    """A row of an output, numbered from 1; a failed row has no outputs."""

    number: int
    fields: dict[str, Any]
    outputs: dict[str, Array]
    error: str


class _StoredPlan(msgspec.Struct):
    spec: JobSpec


class JobRows:
    """The rows of a job's output; `partial` accepts a job that ended early."""

    def __init__(self, url: str, *, partial: bool = False) -> None:
        self._url = url
        self._files, self._folder = open_folder(url, {})
        with store_errors(self._url):
            self._manifest = self._read_manifest(partial=partial)
            spec = msgspec.json.decode(self._files.cat_file(f"{self._folder}/{_PLAN}"), type=_StoredPlan).spec
        self.model, self.version, self.key = self._manifest.model, self._manifest.version, spec.key
        self._columns = spec.output.columns
        self._schema: pa.Schema | None = None

    def fields(self, outputs: Sequence[str]) -> list[str]:
        """Returns the default columns: all but lists, bytes, errors and these outputs."""
        taken = {*ERROR_COLUMNS, *map(self._column, outputs)}
        return [field.name for field in self.schema if field.name not in taken and _is_plain(field.type)]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the output."""
        if self._schema is None:
            with store_errors(self._url):
                self._schema = self._read_schema()
        return self._schema

    def rows(self, outputs: Sequence[str], fields: Mapping[str, str]) -> Iterator[Row]:
        """Reads the rows in order; `fields` maps names to columns."""
        columns = {name: self._column(name) for name in outputs}
        is_split = self._manifest.failed_rows == "separate"
        errors = () if is_split else ERROR_COLUMNS
        wanted = list(dict.fromkeys([*columns.values(), *fields.values(), *errors]))
        if self._manifest.parts:
            self._check_columns(wanted)
        number = 0
        for batch in self.batches(wanted):
            with store_errors(self._url):
                rows = [_values(batch.column(column)) for column in fields.values()]
                values = {name: _arrays(batch.column(column)) for name, column in columns.items()}
                codes, messages = [batch.column(name).to_pylist() for name in errors] or [[None] * batch.num_rows] * 2
            for i in range(batch.num_rows):
                number += 1
                data = dict(zip(fields, (column[i] for column in rows), strict=True))
                if codes[i] is not None:
                    yield Row(number, data, {}, f"{codes[i]}: {messages[i]}")
                else:
                    yield Row(number, data, {name: column[i] for name, column in values.items()}, "")
        expected = self._manifest.ok if is_split else self._manifest.rows
        if number != expected:
            raise ResultNotFound(f"the output has {number} rows, and its manifest says {expected}")

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Reads columns in order, in batches of the parts' sizes."""
        import pyarrow.ipc
        import pyarrow.parquet as pq

        for part in self._manifest.parts:
            if self._manifest.output_format in TEXT_FORMATS:
                with store_errors(self._url):
                    table = read_text(self._files, f"{self._folder}/{part.name}", self.schema)
                    batches = table.select(columns).combine_chunks().to_batches(_ROWS)
                yield from batches
                continue
            with store_errors(self._url), self._open_file(part.name) as file:
                if self._manifest.output_format == "arrow":
                    reader = pyarrow.ipc.open_file(file)
                    for i in range(reader.num_record_batches):
                        yield reader.get_batch(i).select(columns)
                    continue
                with pq.ParquetFile(file) as parquet:
                    for batch in parquet.iter_batches(_ROWS, columns=columns):
                        yield batch.select(columns)

    def _column(self, output: str) -> str:
        return self._columns.get(output, output)

    def _check_columns(self, columns: Sequence[str]) -> None:
        known = self.schema.names
        if unknown := next((name for name in columns if name not in known), ""):
            raise InvalidRequest(f"the job's output has no column '{unknown}'; it has {', '.join(known)}")

    def _read_manifest(self, *, partial: bool) -> Manifest:
        try:
            return decode_manifest(self._files.cat_file(f"{self._folder}/{MANIFEST}"))
        except FileNotFoundError:
            if not self._files.exists(f"{self._folder}/{PARTIAL}"):
                raise ResultNotFound(self._why_none()) from None
        if not partial:
            raise ResultNotFound(f"the output at {self._url} is incomplete; resume the job, or give --partial")
        return decode_manifest(self._files.cat_file(f"{self._folder}/{PARTIAL}"))

    def _why_none(self) -> str:
        if self._files.exists(f"{self._folder}/{_PLAN}"):
            return f"the job that writes to {self._url} has not ended: wait for its end (qinfer jobs list)"
        return f"there is no output of a completed job at {self._url}"

    def _read_schema(self) -> pa.Schema:
        import pyarrow.ipc
        import pyarrow.parquet as pq

        if not self._manifest.parts:
            return pa.schema([])
        if self._manifest.output_format in TEXT_FORMATS:
            return text_schema(self._manifest.schema)
        with self._open_file(self._manifest.parts[0].name) as file:
            if self._manifest.output_format == "arrow":
                return pyarrow.ipc.open_file(file).schema
            return pq.read_schema(file)

    def _open_file(self, name: str) -> Any:
        return self._files.open(f"{self._folder}/{name}", "rb", cache_type="none")


def _is_plain(kind: pa.DataType) -> bool:
    """Returns whether labeling tools can show values of a type."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _values(column: pa.Array) -> list[Any]:
    """Instants are in microseconds; invalid UTF-8 gets replacement characters."""
    kind = column.type
    if pa.types.is_temporal(kind) and getattr(kind, "unit", "") == "ns":
        column = column.cast(_MICROSECONDS[type(kind)](kind), safe=False)
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        if pa.types.is_dictionary(kind):
            column = column.dictionary_decode()
        found = column.cast(pa.large_binary()).to_pylist()
        return [value if value is None else value.decode(errors="replace") for value in found]
    return values


def stacked(column: pa.Array) -> Array | Sequence[Array]:
    """Returns values as one array, or row by row if sizes vary."""
    shape, values = [len(column)], column
    while pa.types.is_fixed_size_list(values.type):
        shape.append(values.type.list_size)
        values = values.flatten()
    return _arrays(column) if pa.types.is_nested(values.type) else _flat(values).reshape(shape)


def _arrays(column: pa.Array) -> Sequence[Array]:
    offsets = np.arange(len(column) + 1, dtype=np.int64)
    values = column
    while pa.types.is_nested(values.type):
        if pa.types.is_fixed_size_list(values.type):
            offsets = (offsets + values.offset) * values.type.list_size
        else:
            offsets = values.offsets.to_numpy()[offsets]
        # includes values outside of a slice
        values = values.values
    flat = _flat(values)
    return [flat[offsets[i] : offsets[i + 1]] for i in range(len(column))]


def _flat(values: pa.Array) -> Array:
    if pa.types.is_string(values.type) or pa.types.is_binary(values.type):
        array = np.empty(len(values), object)
        array[:] = ["" if value is None else value for value in values.to_pylist()]
        return array
    numbers: Array = values.to_numpy(zero_copy_only=False)
    return numbers


class OutputDifferences(msgspec.Struct, frozen=True):
    """The differences of an output over rows that both scored; `unmeasured` = one NaN, or other shapes."""

    output: str
    by: str
    rows: int
    agreeing: int
    agreement: float
    largest: float | None
    mean: float | None
    unmeasured: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The differences of two targets.

    `differing` rows disagree, or only one target scored them; `differ` = more than allowed. `others` are outputs of one
    target.
    """

    stable: str
    canary: str
    rows: int
    differing: int
    allowed: float
    differ: bool
    failed: dict[str, int]
    outputs: list[OutputDifferences]
    others: list[str]
    samples: list[Sample]


class OutputComparison:
    """Compares two jobs' outputs; `rules[""]` is the default, `redact` keeps no values."""

    def __init__(self, outputs: Sequence[str], rules: Mapping[str, Rule], show: int, *, redact: bool) -> None:
        self._rules = {name: rules.get(name, rules[""]) for name in outputs}
        self._sums = dict.fromkeys(outputs, Summary())
        self._samples = {name: Samples(show, redact=redact) for name in outputs}
        self._rows = self._differing = 0
        self._failed = {"stable": 0, "canary": 0, "both": 0}

    def read(self, stable: JobRows, canary: JobRows) -> None:
        """Reads and compares all rows."""
        key = [stable.key] if stable.key else list(PLACE_COLUMNS)
        columns = list(dict.fromkeys([*self._sums, *key, *ERROR_COLUMNS]))
        for batch, other in _side_by_side(stable.batches(columns), canary.batches(columns)):
            if any(not batch.column(name).equals(other.column(name)) for name in key):
                raise CommandFailed("the inputs have changed between the two jobs; compare again")
            self._compare_batches(batch, other, key)

    def result(self, stable: str, canary: str, others: Sequence[str], allowed: float) -> Comparison:
        """Returns the comparison."""
        return Comparison(
            stable=stable,
            canary=canary,
            rows=self._rows,
            differing=self._differing,
            allowed=allowed,
            differ=self._differing > allowed * self._rows,
            failed=self._failed,
            outputs=[_row(name, self._rules[name].agree, found) for name, found in self._sums.items()],
            others=list(others),
            samples=[sample for samples in self._samples.values() for sample in samples.all()],
        )

    def _compare_batches(self, stable: pa.RecordBatch, canary: pa.RecordBatch, key: Sequence[str]) -> None:
        failed = [np.asarray(one.column(ERROR_COLUMNS[0]).is_valid()) for one in (stable, canary)]
        self._rows += stable.num_rows
        masks = failed[0] & ~failed[1], failed[1] & ~failed[0], failed[0] & failed[1]
        for name, mask in zip(self._failed, masks, strict=True):
            self._failed[name] += int(np.count_nonzero(mask))
        scored = pa.array(~(failed[0] | failed[1]))
        stable, canary = stable.filter(scored), canary.filter(scored)
        agrees = np.ones(stable.num_rows, np.bool_)
        names = _names([stable.column(name) for name in key]) if stable.num_rows else []
        for name in self._sums if stable.num_rows else ():
            values = stacked(stable.column(name)), stacked(canary.column(name))
            self._rules[name] = self._rules[name].for_values(values[0])
            rows = compared(self._rules[name], *values)
            self._sums[name] = self._sums[name].with_rows(rows)
            self._samples[name].add_rows(name, names, *values, rows)
            agrees &= rows.agrees
        self._differing += int(np.count_nonzero(failed[0] ^ failed[1]) + np.count_nonzero(~agrees))


def _side_by_side(
    first: Iterator[pa.RecordBatch], second: Iterator[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """The parts of two outputs may have other sizes."""
    one = other = None
    while True:
        one = one if one is not None and one.num_rows else next(first, None)
        other = other if other is not None and other.num_rows else next(second, None)
        if one is None and other is None:
            return
        if one is None or other is None:
            raise CommandFailed(
                "the jobs have scored different numbers of rows: the inputs have changed; compare again"
            )
        rows = min(one.num_rows, other.num_rows)
        if rows:
            yield one.slice(0, rows), other.slice(0, rows)
        one, other = one.slice(rows), other.slice(rows)


def _names(key: Sequence[pa.Array]) -> list[str]:
    values: list[list[Any]] = [column.to_pylist() for column in key]
    if len(values) > 1:
        values[0] = [str(url).rpartition("/")[2] for url in values[0]]
    return [":".join(map(str, parts)) for parts in zip(*values, strict=True)]


def _row(name: str, by: str, found: Summary) -> OutputDifferences:
    has_distances = bool(found.measured or found.unmeasured)
    distances: tuple[float | None, float | None] = (found.largest, found.mean) if has_distances else (None, None)
    return OutputDifferences(name, by, found.rows, found.agreeing, found.agreement, *distances, found.unmeasured)
