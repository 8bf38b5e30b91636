"""Compares the outputs of two bulk jobs over the same rows, in bounded memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from qinfer.cli.console import CommandFailed
from qinfer.cli.jobs.output_rows import JobRows, stacked
from qinfer.jobs.check import ERROR_COLUMNS, PLACE_COLUMNS
from qinfer.traffic.differences import Rule, Sample, Samples, Summary, compared


class OutputDifferences(msgspec.Struct, frozen=True, kw_only=True):
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
        for name, mask in (
            ("stable", failed[0] & ~failed[1]),
            ("canary", failed[1] & ~failed[0]),
            ("both", failed[0] & failed[1]),
        ):
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
    return OutputDifferences(
        output=name,
        by=by,
        rows=found.rows,
        agreeing=found.agreeing,
        agreement=found.agreement,
        largest=found.largest if has_distances else None,
        mean=found.mean if has_distances else None,
        unmeasured=found.unmeasured,
    )
