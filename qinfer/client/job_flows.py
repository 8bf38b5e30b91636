"""The client's calls about bulk jobs as flows (`qinfer.client.steps`), without I/O, and how their progress is shown."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec

from qinfer.client.flows import header_value
from qinfer.client.steps import JSON, Flow, Pause, Policy, Send, call, converted, encode_json, json_object, pages
from qinfer.core.retry import Backoff
from qinfer.errors import DeadlineExceeded, InputMissing, InvalidRequest, JobFailed, JobNotFound, QinferError
from qinfer.wire.bodies import JobEstimate, JobLogLine, JobPreview

Location = str | os.PathLike[str]
"""A URL such as `s3://bucket/in/*.parquet`, or a path, which has to be the same for the gateway and the workers."""

OnStatus = Callable[["JobStatus"], object]

OnMissing = Callable[[str, float], object]
"""Receives the reason for a missing input, and the seconds left to wait for it."""

INPUT_POLLS_S = (1.0, 5.0)
POLLS_S = (0.1, 2.0)
LEAST_POLL_S = 1.0
WAIT_RETRIES = 8

_ENDED = ("completed", "failed", "cancelled", "expired")


class JobOptions(TypedDict, total=False):
    """The options of a job besides model, inputs and output; the server has defaults for all of them.

    Attributes:
        id: An id of your own, so that a repeated submission finds the job; by default each call makes one job.
        version: The model's version; the highest that is ready by default.
        format: Output format: `parquet`, `arrow`, `csv` or `jsonl`.
        input_format: `parquet`, `arrow`, `csv` or `jsonl`; by default by file extension.
        input_compression: `gzip`, `zstd`, `bz2` or `none`, of CSV and JSON lines; by default by file extension.
        csv: The form of CSV inputs: `{"delimiter": ";", "quote": "'", "escape": "none", "decimal_point": ",",
            "encoding": "latin-1", "header": False, "column_names": […]}`, or some of these.
        columns: Input tensor → its column, a list of scalar columns that are its elements, or
            `{"columns": […], "shape": […], "null": …}`; by default the column has the tensor's name.
        tensors: The output tensors to ask for and to write; by default all.
        output_columns: Output tensor → the name of its column; by default the tensor's name.
        top_k: Output tensor → the number of its greatest elements to write instead of all, with indices and labels.
        key: The column that identifies rows, copied to the output; by default file, row group and row number.
        passthrough: Columns to copy to the output; `["*"]` = all.
        exclude: With `["*"]`: columns to leave out.
        merge_schema: Let columns be missing in some files: they are null there.
        types: Column of CSV, field of JSON lines, or partition column → the type of its values, such as `int64`; by
            default copied columns are text as written.
        partitioning: `hive` = folders such as `country=de` in the files' URLs are columns.
        partition_by: Partition columns that are also folders of the output.
        bad_files: `fail` or `skip`: the handling of input files that can't be read.
        failed_rows: `inline` in the parts, or `separate` in files of their own.
        compression: Compression of the output, such as `zstd`, `snappy`, `none`.
        compression_level: The level of the compression; 0 = its default.
        rows_per_part: Maximum rows of one part.
        priority: `high`, `normal` or `low`.
        on_version_change: `wait` for the model version, or `fail`, if it is changed or gone.
        error_threshold: Failed rows that fail the job when exceeded: a number, a fraction below 1, or -1 = no limit.
        max_parallel: Maximum workers that score the job at a time.
        deadline_s: Seconds after which the job expires.
        limit: Score only this many rows, the first of the inputs.
        overwrite: Remove the files of an ended job from the output folder, and no others; with `resume`, a completed
            job is run anew.
        metadata: Metadata of your own, kept with the job.
        webhook: A URL to notify when the job ends.
    """

    id: str
    version: int
    format: str
    input_format: str
    input_compression: str
    csv: Mapping[str, object] | None
    columns: Mapping[str, object]
    tensors: Sequence[str]
    output_columns: Mapping[str, str]
    top_k: Mapping[str, int]
    failed_rows: str
    key: str
    passthrough: Sequence[str]
    exclude: Sequence[str]
    merge_schema: bool
    types: Mapping[str, str]
    partitioning: str
    partition_by: Sequence[str]
    bad_files: str
    compression: str
    compression_level: int
    rows_per_part: int
    priority: str
    on_version_change: str
    error_threshold: float
    max_parallel: int
    deadline_s: float
    limit: int
    overwrite: bool
    metadata: Mapping[str, str]
    webhook: str


_OF_OUTPUT = {
    **{name: name for name in ("format", "compression", "compression_level", "rows_per_part", "partition_by")},
    **{name: name for name in ("tensors", "top_k", "failed_rows")},
    "output_columns": "columns",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The state and the progress of a bulk job.

    Attributes:
        id: The job's id.
        model: The model.
        version: The model's version.
        state: `planning`, `running`, `finalizing`, `completed`, `failed`, `cancelling`, `cancelled` or `expired`.
        rows: Rows of the inputs; 0 before they are counted.
        rows_done: Rows with outputs.
        rows_failed: Rows with an error instead.
        rows_scored: Rows of unfinished shards that are scored but not written.
        shards: Shards of the job, each of which becomes a file; 0 before the job is planned.
        shards_done: Finished shards.
        shards_failed: Failed shards.
        skipped_files: Unreadable input files that were left out.
        progress: The share of the rows that are done, failed or scored, 0 … 1.
        rows_per_s: Rows per second so far; 0 before the first.
        eta_s: Estimated seconds until the end; `None` = unknown.
        error: The error of a failed job; empty otherwise.
        output_url: The folder of the output.
        fields: All fields of the gateway's answer.
    """

    id: str
    model: str = ""
    version: int = 0
    state: str
    rows: int = 0
    rows_done: int = 0
    rows_failed: int = 0
    rows_scored: int = 0
    shards: int = 0
    shards_done: int = 0
    shards_failed: int = 0
    skipped_files: int = 0
    progress: float = 0.0
    rows_per_s: float = 0.0
    eta_s: float | None = None
    error: str = ""
    output_url: str = ""
    fields: Mapping[str, Any]

    @property
    def rows_processed(self) -> int:
        """Rows that are done, failed or scored."""
        return self.rows_done + self.rows_failed + self.rows_scored

    @property
    def has_ended(self) -> bool:
        """True if the state is final, unless the job is resumed."""
        return self.state in _ENDED


def as_url(location: Location) -> str:
    """Makes a URL of a local path or pattern."""
    text = os.fspath(location)
    return text if "://" in text or not text else f"file://{os.path.abspath(text)}"


def job_body(
    model: str, inputs: Location | Sequence[Location], output: Location, options: JobOptions
) -> dict[str, Any]:
    """Returns the body that creates a job; refuses unknown options and wrong types."""
    if unknown := sorted(options.keys() - JobOptions.__annotations__.keys()):
        raise InvalidRequest(f"jobs have no option '{unknown[0]}'; they have {', '.join(JobOptions.__annotations__)}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value not in (None, "", [], {})}
    if any(isinstance(given.get(name), str) for name in ("passthrough", "exclude", "tensors")):
        raise InvalidRequest("passthrough, exclude and tensors are lists of names; one name is a list, too")
    sources = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    target = {field: given.pop(name) for name, field in _OF_OUTPUT.items() if name in given}
    body = {
        "model": model,
        "inputs": [as_url(source) for source in sources],
        "output": {"url": as_url(output), **target},
    }
    return body | given


def submit_job(
    policy: Policy,
    body: Mapping[str, Any],
    *,
    resume: bool = False,
    wait_s: float = 0.0,
    on_missing: OnMissing | None = None,
) -> Flow[JobStatus]:
    """Creates a job; one without an id gets a key, which makes repetitions safe.

    `resume` waits for a job that is being cancelled. Inputs have `wait_s` to appear.
    """
    headers = dict(JSON)
    if resume and not body.get("id"):
        raise InvalidRequest("a job is resumed by its id; name the id that it was submitted with")
    if not body.get("id"):
        headers["Idempotency-Key"] = str(uuid4())
    send = Send("POST", "/v1/jobs?resume=true" if resume else "/v1/jobs", headers, encode_json("the job", body))
    reply = yield from _with_inputs(policy, send, wait_s, on_missing or (lambda *_: None))
    ends_s, pauses = policy.clock.monotonic_s() + policy.timeout_s, polls()
    while True:
        status = _status(policy, reply)
        if not resume or status.state != "cancelling":
            return status
        if policy.clock.monotonic_s() >= ends_s:
            raise DeadlineExceeded(f"job '{status.id}' is still being cancelled; resume it later")
        yield Pause(pauses.next_s())
        reply = yield from call(policy, send)


def _with_inputs(policy: Policy, send: Send, wait_s: float, on_missing: OnMissing) -> Flow[httpx.Response]:
    """Passing errors count as a missing input."""
    ends_s, pauses = policy.clock.monotonic_s() + wait_s, Backoff(*INPUT_POLLS_S, factor=1.5)
    why = ""
    while True:
        try:
            return (yield from call(policy, send))
        except InputMissing as error:
            why = error.message
        except QinferError as error:
            if not (why and error.retryable):
                raise
        left_s = ends_s - policy.clock.monotonic_s()
        if left_s <= 0:
            raise InputMissing(f"{why}; waited {wait_s:g} s for it" if wait_s > 0 else why)
        on_missing(why, left_s)
        yield Pause(min(pauses.next_s(), left_s))


def validate_job(policy: Policy, body: Mapping[str, Any]) -> Flow[JobEstimate]:
    """Checks and estimates a job; creates nothing."""
    reply = yield from call(policy, Send("POST", "/v1/jobs/validate", JSON, encode_json("the job", body)))
    return converted(policy, json_object(policy, reply), JobEstimate, "estimate")


def job(policy: Policy, job_id: str) -> Flow[JobStatus]:
    """Returns the status of a job."""
    reply = yield from call(policy, Send("GET", job_path(job_id), {}), not_found=JobNotFound)
    return _status(policy, reply)


class JobFilters(TypedDict, total=False):
    """The filters of a list of jobs.

    Attributes:
        state: The state, such as `running`.
        model: The model or endpoint.
        output: The folder that jobs write to, including folders below it.
        metadata: Entries that a job's metadata must have.
    """

    state: str
    model: str
    output: Location
    metadata: Mapping[str, str]


def newest_jobs(policy: Policy, limit: int, filters: JobFilters) -> Flow[list[JobStatus]]:
    """Returns the newest jobs, page by page."""
    if unknown := sorted(filters.keys() - JobFilters.__annotations__.keys()):
        raise InvalidRequest(f"jobs can't be listed by '{unknown[0]}'; by {', '.join(JobFilters.__annotations__)}")
    wanted = {
        "state": filters.get("state", ""),
        "model": filters.get("model", ""),
        "output": as_url(filters.get("output", "")),
        "metadata": [f"{name}={text}" for name, text in filters.get("metadata", {}).items()],
    }
    query = {name: value for name, value in wanted.items() if value}
    return [_status_of(policy, entry) for entry in (yield from pages(policy, "/v1/jobs", "jobs", query, limit))]


def change_job(policy: Policy, job_id: str, what: str, **changes: float | None) -> Flow[JobStatus]:
    """Cancels or resumes a job; `what` is the last part of the path."""
    given = {name: value for name, value in changes.items() if value is not None}
    send = Send("POST", f"{job_path(job_id)}/{what}", {})
    if given:
        send = send._replace(headers=JSON, content=encode_json("the changes", given))
    reply = yield from call(policy, send, not_found=JobNotFound)
    return _status(policy, reply)


def delete_job(policy: Policy, job_id: str) -> Flow[None]:
    """Deletes the record of an ended job; its output is kept."""
    yield from call(policy, Send("DELETE", job_path(job_id), {}), not_found=JobNotFound)


def job_log(policy: Policy, job_id: str) -> Flow[list[JobLogLine]]:
    """Returns the log of a job."""
    reply = yield from call(policy, Send("GET", f"{job_path(job_id)}/log", {}), not_found=JobNotFound)
    lines = json_object(policy, reply).get("log", ())
    return [JobLogLine(at=str(line.get("at", "")), text=str(line.get("text", ""))) for line in lines]


def job_preview(policy: Policy, job_id: str, of: str, rows: int) -> Flow[JobPreview]:
    """Returns the first rows of a job."""
    path = f"{job_path(job_id)}/preview?of={quote(header_value('of', of), safe='')}&rows={rows}"
    reply = yield from call(policy, Send("GET", path, {}), not_found=JobNotFound)
    return converted(policy, json_object(policy, reply), JobPreview, "preview")


def polls() -> Backoff:
    """Returns the pauses between two polls of a job."""
    return Backoff(*POLLS_S, factor=1.5)


def wait_for_job(policy: Policy, job_id: str, timeout_s: float, observe: OnStatus) -> Flow[JobStatus]:
    """Polls a job until it has ended, through restarts of the gateway."""
    now_s = policy.clock.monotonic_s
    ends_s = now_s() + timeout_s
    most = policy.max_retries
    patient = policy._replace(max_retries=None if most is None else max(most, WAIT_RETRIES))
    pauses = polls()
    while True:
        left_s = max(LEAST_POLL_S, ends_s - now_s())
        status = yield from job(patient._replace(timeout_s=min(policy.timeout_s, left_s)), job_id)
        observe(status)
        if status.has_ended:
            return status
        if now_s() >= ends_s:
            raise DeadlineExceeded(
                f"job '{job_id}' is {status.state} after {timeout_s:g} s and continues: wait again, or cancel it"
            )
        yield Pause(min(pauses.next_s(), ends_s - now_s()))


def completed(status: JobStatus) -> JobStatus:
    """Returns the last status of a completed job, or raises `JobFailed`."""
    if status.state != "completed":
        reason = f": {status.error}" if status.error else ""
        raise JobFailed(f"job '{status.id}' is {status.state}{reason}", status.state)
    return status


def job_path(job_id: str) -> str:
    """Returns the path of a job."""
    return f"/v1/jobs/{quote(header_value('the job id', job_id), safe='')}"


def _status(policy: Policy, reply: httpx.Response) -> JobStatus:
    return _status_of(policy, json_object(policy, reply))


def _status_of(policy: Policy, fields: Mapping[str, Any]) -> JobStatus:
    flat = dict(fields)
    for name in ("rows", "shards", "skipped_files"):
        found = converted(policy, fields.get(name) or {}, _Counts, "job")
        flat |= {name: found.total, f"{name}_done": found.done, f"{name}_failed": found.failed}
        flat[f"{name}_scored"] = found.scored
    known = {name: value for name, value in flat.items() if value is not None}
    return converted(policy, {**known, "fields": fields}, JobStatus, "job")


class _Counts(msgspec.Struct, frozen=True):
    total: int | None = None
    done: int = 0
    failed: int = 0
    scored: int = 0


EVERY_S = 5.0
"""Seconds between two lines while a job's state does not change."""

PATIENCE_S = 10.0
"""Planning that takes longer hints that no bulk worker may be running."""

_BAR_WIDTH = 10
_HINT = "waits for the bulk worker, or for its inputs to be read; see its log"


def progress_observer(on_status: OnStatus | None, *, progress: bool) -> AbstractContextManager[OnStatus]:
    """Returns a context with the observer of statuses: the display on stderr, or the caller's own."""
    return shown_progress() if progress else nullcontext(on_status or (lambda _: None))


@contextmanager
def shown_progress(*, on_terminal: bool | None = None) -> Iterator[OnStatus]:
    """Shows a job's progress on stderr until the block ends; `on_terminal` `None` detects a terminal."""
    if sys.stderr.isatty() if on_terminal is None else on_terminal:
        with _bar() as show:
            yield show
    else:
        yield Lines(lambda text: sys.stderr.write(f"{text}\n"))


class Lines:
    """Writes a line when the state changes, and every `EVERY_S` seconds while there is progress."""

    def __init__(self, write: Callable[[str], object], now_s: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._now_s = now_s
        self._state, self._text, self._said_s, self._since_s = "", "", 0.0, 0.0

    def __call__(self, status: JobStatus) -> None:
        """Handles a status."""
        text, now_s = progress_line(status), self._now_s()
        if status.state != self._state:
            self._since_s = now_s
        if hint := planning_hint(status, now_s - self._since_s):
            text = f"{text}; {hint}"
        if status.state == self._state and (text == self._text or now_s - self._said_s < EVERY_S):
            return
        self._state, self._text, self._said_s = status.state, text, now_s
        self._write(text)


def progress_line(status: JobStatus) -> str:
    """Describes the job's progress in a line."""
    processed, failed = f"{status.rows_processed:,}", f"{status.rows_failed:,} rows failed"
    progress = [f"{processed} of {status.rows:,} rows", f"{status.shards_done} of {status.shards} shards"]
    found = _figures(status, progress, failed, "{} rows/s", "{} left")
    return ", ".join([f"{status.id}: {status.state}", *found])


def beside_bar(status: JobStatus) -> str:
    """Describes the job's progress for a terminal of 80 columns."""
    processed, failed = f"{status.rows_processed:,}", f"{status.rows_failed:,} failed"
    progress = [f"{processed}/{status.rows:,} rows", f"{status.shards_done}/{status.shards} shards"]
    return ", ".join(_figures(status, progress, failed, "{}/s", "{}"))


def _figures(status: JobStatus, progress: list[str], failed: str, speed: str, left: str) -> list[str]:
    """Returns the known figures; empty before the job is planned."""
    if not status.shards:
        return []
    found = [*progress, *([failed] if status.rows_failed else [])]
    if status.skipped_files:
        found.append(f"{status.skipped_files:,} files skipped")
    if status.rows_per_s:
        found.append(speed.format(rate(status.rows_per_s)))
    if status.eta_s is not None and not status.has_ended:
        found.append(left.format(duration(status.eta_s)))
    return found


def planning_hint(status: JobStatus, seconds: float) -> str:
    """Returns a hint for a job that is planned for too long; else empty."""
    return _HINT if status.state == "planning" and not status.shards and seconds >= PATIENCE_S else ""


def rate(rows_per_s: float) -> str:
    """Formats a rate: whole numbers from 10, two digits below, such as 0.3."""
    return f"{rows_per_s:,.0f}" if rows_per_s >= 10 else f"{rows_per_s:.2g}"


def duration(seconds: float) -> str:
    """Formats a duration, such as 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def _bar() -> Iterator[OnStatus]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.fields[state]}", markup=False),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None, state="", figures="")
        began_s = time.monotonic()

        def show(status: JobStatus) -> None:
            figures = beside_bar(status) or planning_hint(status, time.monotonic() - began_s)
            processed = status.rows_processed
            progress.update(task, total=status.rows or None, completed=processed, state=status.state, figures=figures)

        yield show
