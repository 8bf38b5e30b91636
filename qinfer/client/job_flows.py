"""What each call about bulk jobs does, step by step, without doing it: `steps` says what a flow is."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict
from urllib.parse import quote, urlencode
from uuid import uuid4

import httpx
import msgspec

from qinfer.client.flows import header_value
from qinfer.client.steps import Flow, Pause, Policy, Send, call
from qinfer.errors import DeadlineExceeded, InvalidRequest, JobNotFound, Unreachable

Location = str | os.PathLike[str]
"""A URL such as `s3://bucket/in/*.parquet`, or a path, which has to be the same for the gateway and the workers."""

OnStatus = Callable[["JobStatus"], object]
"""Takes a job's status after each poll."""

FIRST_POLL_S, LAST_POLL_S = 0.1, 2.0
"""Seconds between two looks at a job that is waited for: they grow from the first to the last."""
PAGE = 500
"""The most jobs that are asked for at once."""
LEAST_LOOK_S = 1.0
"""A look at a job may take so long, though less is left to wait."""
WAIT_RETRIES = 8
"""How often each of these looks is repeated, at least."""

_ENDED = ("completed", "failed", "cancelled", "expired")


class JobOptions(TypedDict, total=False):
    """What may be said of a job besides model, inputs and output; what is left out is as the server has it.

    Attributes:
        id: An id of your own, so that a repeated submission finds the job; by default each call makes one job.
        version: The model's version; the highest that is ready by default.
        format: Of the output: `parquet` or `arrow`.
        input_format: `parquet`, `arrow`, `csv` or `jsonl`; by default what the inputs' names say.
        columns: Input tensor → its column, a list of scalar columns that are its elements, or
            `{"columns": […], "shape": […]}`; by default the column has the tensor's name.
        output_columns: Output tensor → the name of its column; by default the tensor's.
        key: The column that tells rows apart, copied to the output; by default file, row group and row number are.
        passthrough: Columns that are copied to the output; `["*"]` = all.
        exclude: With `["*"]`: but for these.
        compression: Of the output, such as `zstd`, `snappy`, `none`.
        rows_per_part: At most so many rows are in one part.
        priority: `high`, `normal` or `low`.
        error_threshold: How many rows may fail before the job does: a number, a fraction below 1, or -1 = all.
        max_parallel: At most so many workers score it at a time.
        deadline_s: Seconds after which it expires.
        metadata: Words of your own.
        webhook: A URL to be told when it has ended.
    """

    id: str
    version: int
    format: str
    input_format: str
    columns: Mapping[str, object]
    output_columns: Mapping[str, str]
    key: str
    passthrough: Sequence[str]
    exclude: Sequence[str]
    compression: str
    rows_per_part: int
    priority: str
    error_threshold: float
    max_parallel: int
    deadline_s: float
    metadata: Mapping[str, str]
    webhook: str


_OF_OUTPUT = {
    "format": "format",
    "compression": "compression",
    "rows_per_part": "rows_per_part",
    "output_columns": "columns",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Where a bulk job is.

    Attributes:
        id: The job's id.
        model: The model asked.
        version: Its version.
        state: `planning`, `running`, `finalizing`, `completed`, `failed`, `cancelling`, `cancelled` or `expired`.
        rows: Rows of the inputs; 0 before they are counted.
        rows_done: Rows that have outputs.
        rows_failed: Rows that have an error instead.
        shards: Pieces that the rows are worked on in; each becomes a file.
        shards_done: Those that are done.
        shards_failed: Those that were given up.
        progress: The share of its rows that are done or failed, 0 … 1.
        rows_per_s: Rows a second so far; 0 before the first.
        eta_s: Seconds that the rest will take; `None` = not known.
        error: Why it has failed; empty otherwise.
        output_url: The folder of the output.
        fields: All that the gateway says of it.
    """

    id: str
    model: str
    version: int
    state: str
    rows: int
    rows_done: int
    rows_failed: int
    shards: int
    shards_done: int
    shards_failed: int
    progress: float
    rows_per_s: float
    eta_s: float | None
    error: str
    output_url: str
    fields: Mapping[str, Any]

    @property
    def has_ended(self) -> bool:
        """Whether the state is final, but for `resume`."""
        return self.state in _ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLogLine:
    """A line of a job's log; `at` is an instant in RFC 3339."""

    at: str
    text: str


def as_url(location: Location) -> str:
    """Returns a URL as it is, and a path on this machine as an absolute file:// URL; patterns stay patterns."""
    text = os.fspath(location)
    return text if "://" in text or not text else f"file://{os.path.abspath(text)}"


def job_body(
    model: str, inputs: Location | Sequence[Location], output: Location, options: JobOptions
) -> dict[str, Any]:
    """Returns what is sent to create a job.

    Raises:
        InvalidRequest: An option has a name that jobs do not have, or an argument is not of its type.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value not in (None, "")}
    if unknown := sorted(given.keys() - JobOptions.__annotations__.keys()):
        raise InvalidRequest(f"jobs have no option '{unknown[0]}'; they have {', '.join(JobOptions.__annotations__)}")
    if isinstance(given.get("passthrough"), str) or isinstance(given.get("exclude"), str):
        raise InvalidRequest("passthrough and exclude are lists of columns; one name is a list, too")
    sources = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    target = {field: given.pop(name) for name, field in _OF_OUTPUT.items() if name in given}
    body = {
        "model": model,
        "inputs": [as_url(source) for source in sources],
        "output": {"url": as_url(output), **target},
    }
    return body | given


def submit_job(policy: Policy, body: Mapping[str, Any]) -> Flow[JobStatus]:
    """Creates a job; one without an id of its own gets a key, which makes repetitions safe."""
    headers = {"Content-Type": "application/json"}
    if not body.get("id"):
        headers["Idempotency-Key"] = str(uuid4())
    try:
        content = msgspec.json.encode(body)
    except TypeError as error:
        raise InvalidRequest(f"the job can't be written as JSON: {error}") from None
    return _status(policy, (yield from call(policy, Send("POST", "/v1/jobs", headers, content))))


def job(policy: Policy, job_id: str) -> Flow[JobStatus]:
    """Returns where a job is."""
    reply = yield from call(policy, Send("GET", job_path(job_id), {}), not_found=JobNotFound)
    return _status(policy, reply)


def jobs(policy: Policy, state: str, limit: int, after: str) -> Flow[tuple[list[JobStatus], str]]:
    """Returns the newest jobs, and after which one the next page begins; empty = there is none."""
    query = urlencode({"limit": limit} | ({"state": state} if state else {}) | ({"after": after} if after else {}))
    reply = yield from call(policy, Send("GET", f"/v1/jobs?{query}", {}))
    fields = _object(policy, reply)
    found = [_status_of(policy, entry) for entry in fields.get("jobs", ())]
    return found, str(fields.get("next") or "")


def newest_jobs(policy: Policy, state: str, limit: int) -> Flow[list[JobStatus]]:
    """Returns the newest jobs, so many pages as it takes."""
    found: list[JobStatus] = []
    after = ""
    while len(found) < limit:
        page, after = yield from jobs(policy, state, min(limit - len(found), PAGE), after)
        found += page
        if not after:
            break
    return found


def change_job(policy: Policy, job_id: str, what: str, **changes: float | None) -> Flow[JobStatus]:
    """Cancels a job or resumes it; `what` is the last part of the path, changes that are `None` are none."""
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        body = msgspec.json.encode(given) if given else b""
    except TypeError as error:
        raise InvalidRequest(f"the changes can't be written as JSON: {error}") from None
    headers = {"Content-Type": "application/json"} if given else {}
    reply = yield from call(policy, Send("POST", f"{job_path(job_id)}/{what}", headers, body), not_found=JobNotFound)
    return _status(policy, reply)


def delete_job(policy: Policy, job_id: str) -> Flow[None]:
    """Deletes what is known of a job that has ended; its output stays."""
    yield from call(policy, Send("DELETE", job_path(job_id), {}), not_found=JobNotFound)


def job_log(policy: Policy, job_id: str) -> Flow[list[JobLogLine]]:
    """Returns the job's log."""
    reply = yield from call(policy, Send("GET", f"{job_path(job_id)}/log", {}), not_found=JobNotFound)
    lines = _object(policy, reply).get("log", ())
    return [JobLogLine(at=str(line.get("at", "")), text=str(line.get("text", ""))) for line in lines]


def wait_for_job(policy: Policy, job_id: str, timeout_s: float, observe: OnStatus) -> Flow[JobStatus]:
    """Polls a job until it has ended, through restarts of the gateway; each status is observed."""
    now_s = policy.clock.monotonic_s
    ends_s = now_s() + timeout_s
    patient = policy._replace(max_retries=max(policy.max_retries, WAIT_RETRIES))
    pause_s = FIRST_POLL_S
    while True:
        left_s = max(LEAST_LOOK_S, ends_s - now_s())
        status = yield from job(patient._replace(timeout_s=min(policy.timeout_s, left_s)), job_id)
        observe(status)
        if status.has_ended:
            return status
        if now_s() >= ends_s:
            raise DeadlineExceeded(
                f"job '{job_id}' is {status.state} after {timeout_s:g} s; it goes on: wait again, or cancel it"
            )
        yield Pause(min(pause_s, ends_s - now_s()))
        pause_s = min(pause_s * 1.5, LAST_POLL_S)


def job_path(job_id: str) -> str:
    """Returns the path of a job.

    Raises:
        InvalidRequest: The id is empty, or can't be part of a path.
    """
    return f"/v1/jobs/{quote(header_value('the job id', job_id), safe='')}"


def _status(policy: Policy, reply: httpx.Response) -> JobStatus:
    return _status_of(policy, _object(policy, reply))


def _status_of(policy: Policy, fields: Mapping[str, Any]) -> JobStatus:
    try:
        known = msgspec.convert(fields, _Known)
    except msgspec.ValidationError as error:
        raise Unreachable(f"what answers at {policy.url} sent no job ({error}); is it a gateway?") from None
    return JobStatus(
        id=known.id,
        model=known.model,
        version=known.version,
        state=known.state,
        rows=known.rows.total or 0,
        rows_done=known.rows.done,
        rows_failed=known.rows.failed,
        shards=known.shards.total or 0,
        shards_done=known.shards.done,
        shards_failed=known.shards.failed,
        progress=known.progress,
        rows_per_s=known.rows_per_s or 0.0,
        eta_s=known.eta_s,
        error=known.error or "",
        output_url=known.output_url,
        fields=fields,
    )


class _Counts(msgspec.Struct, frozen=True):
    total: int | None = None
    done: int = 0
    failed: int = 0


class _Known(msgspec.Struct, frozen=True):
    """What this version knows of a job as the gateway shows it."""

    id: str
    state: str
    model: str = ""
    version: int = 0
    rows: _Counts = _Counts()
    shards: _Counts = _Counts()
    progress: float = 0.0
    rows_per_s: float | None = None
    eta_s: float | None = None
    error: str | None = None
    output_url: str = ""


def _object(policy: Policy, reply: httpx.Response) -> dict[str, Any]:
    try:
        return msgspec.json.decode(reply.content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unreachable(f"what answers at {policy.url} sent no JSON object; is it a gateway?") from None
