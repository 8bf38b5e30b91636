"""Writes pre-annotations from a bulk job's output, in bounded memory."""

import os
import secrets
import stat
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from qinfer.cli.console import CommandFailed
from qinfer.cli.jobs.output_rows import JobRows, Row
from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.labeling.exports import Format, Task
from qinfer.labeling.mapping import Mapping as Labels
from qinfer.labeling.mapping import model_version
from qinfer.labeling.rules import LabelConfig, wanted_outputs

_STDOUT = ("-", "/dev/stdout")
_MAX_UNFIT = 100
"""If none of these rows fits, the mapping is wrong."""


class AnnotationFormat(NamedTuple):
    """The output format of pre-annotations.

    `fields` maps a task's fields to columns; an empty `key` identifies rows by number.
    """

    labels: Labels
    label_config: LabelConfig | None
    format: Format
    fields: Mapping[str, str]
    key: str


class RowReport:
    """Counts of written and omitted rows: rows that `failed`, or are `unfit` for the mapping."""

    def __init__(self) -> None:
        self.written = self.failed = self.unfit = 0
        self.first = ""

    def leave_out(self, row: Row, why: str, *, failed: bool) -> None:
        """Counts an omitted row."""
        self.failed, self.unfit = self.failed + failed, self.unfit + (not failed)
        self.first = self.first or f"row {row.number}: {why}"

    def left_out(self) -> str:
        """Returns a text about any omitted rows."""
        if not (self.failed or self.unfit):
            return ""
        return (
            f"omitted: {self.failed:,} rows with errors of the job, and {self.unfit:,} that do not fit the mapping; "
            f"the first is {self.first}"
        )


def chosen_fields(rows: JobRows, labels: Labels, given: Sequence[str]) -> dict[str, str]:
    """Returns the given fields, else all columns that tools can show."""
    if not given:
        return {name: name for name in rows.fields(wanted_outputs(labels.results))}
    fields: dict[str, str] = {}
    for text in given:
        name, _, column = text.partition("=")
        if not name:
            raise InvalidRequest(f"--field '{text}' has no name; write NAME or NAME=COLUMN")
        fields[name] = column or name
    return fields


def write_annotations(
    rows: JobRows, chosen: AnnotationFormat, out: str, *, by_confidence: bool, limit: int
) -> RowReport:
    """Writes the file atomically; `limit` 0 = all."""
    report = RowReport()
    scored = _scored(rows, chosen, report)
    with _opened(out) as file:
        if by_confidence:
            with tempfile.TemporaryFile() as spool:
                _write_lines(_sorted(scored, spool, limit), file, chosen.format, 0, report)
        else:
            _write_lines(scored, file, chosen.format, limit, report)
        if not report.written and (left_out := report.left_out()):
            raise CommandFailed(f"no row could be written; {left_out}")
    return report


def _scored(rows: JobRows, chosen: AnnotationFormat, report: RowReport) -> Iterator[tuple[float, bytes]]:
    version = model_version(rows.model, rows.version)
    fields = dict(chosen.fields)
    # no column has this name
    own_key = "" if not chosen.key or chosen.key in fields.values() else "\0key"
    if own_key:
        fields[own_key] = chosen.key
    key_field = own_key or next((name for name, column in fields.items() if column == chosen.key), "")
    fitting = 0
    for row in rows.rows(wanted_outputs(chosen.labels.results), fields):
        if row.error:
            report.leave_out(row, row.error, failed=True)
            continue
        key = row.fields.get(key_field)
        row.fields.pop(own_key, None)
        try:
            task = _task(row, _row_key(key, row.number, chosen.format), chosen, version)
            line = chosen.format.encode(chosen.labels, task)
        except (InvalidRequest, OutputMismatch) as error:
            report.leave_out(row, error.message, failed=False)
            if not fitting and report.unfit >= _MAX_UNFIT:
                raise CommandFailed(f"the first {_MAX_UNFIT} rows do not fit the mapping; {report.first}") from None
            continue
        fitting += 1
        yield task.prediction.score, line


def _row_key(value: object, number: int, kind: Format) -> str | int:
    if value is None:
        return number
    return value if isinstance(value, int) and kind.layout != "labels" else str(value)


def _task(row: Row, key: str | int, chosen: AnnotationFormat, version: str) -> Task:
    task = {"id": key, "data": row.fields}
    prediction = chosen.labels.prediction_of(task, row.outputs, version, chosen.label_config)
    return Task(row.number, key, row.fields, prediction)


def _sorted(scored: Iterable[tuple[float, bytes]], spool: BinaryIO, limit: int) -> Iterator[tuple[float, bytes]]:
    """Lines go to disk; 16 bytes of each stay in memory."""
    scores, ends = array("d"), array("Q", [0])
    try:
        for score, line in scored:
            spool.write(line)
            scores.append(score)
            ends.append(ends[-1] + len(line))
        spool.flush()
    except OSError as error:
        where = tempfile.gettempdir()
        raise CommandFailed(f"rows can't be sorted in {where}: {error.strerror}; set TMPDIR to another") from None
    order = np.argsort(np.frombuffer(scores, np.float64), kind="stable")
    for i in order[: limit or None]:
        spool.seek(ends[i])
        yield scores[i], spool.read(ends[i + 1] - ends[i])


def _write_lines(
    lines: Iterable[tuple[float, bytes]], file: BinaryIO, kind: Format, limit: int, report: RowReport
) -> None:
    start, end = kind.frame
    file.write(start)
    is_first = True
    for _, line in lines:
        if line:
            file.write(line if is_first else kind.separator + line)
            is_first = False
        report.written += 1
        if report.written == limit:
            break
    if not (is_first and kind.layout == "lines"):
        file.write(end)


@contextmanager
def _opened(out: str) -> Iterator[BinaryIO]:
    if "://" in out:
        raise InvalidRequest(f"--out {out} is not a file of this machine: write a local file, and copy it there")
    if not out or out.endswith("/") or os.path.isdir(out):
        raise InvalidRequest(f"--out '{out}' is a folder; name a file")
    try:
        if out in _STDOUT:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        # a pipe or a device is not replaced
        elif os.path.exists(out) and not stat.S_ISREG(os.stat(out).st_mode):
            with open(out, "wb") as file:
                yield file
        else:
            with _replaced(Path(os.path.realpath(out))) as file:
                yield file
    except BrokenPipeError:
        # the reader has ended
        raise
    except OSError as error:
        name = "stdout" if out in _STDOUT else out
        raise CommandFailed(f"{name} can't be written: {error.strerror}") from None


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    new = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with new.open("xb") as file:
            yield file
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
