"""Bulk jobs as clients see them: new jobs, and the records of `/v1/jobs`. Pure.

A server's id is a ULID. A client's id is stored as `<id>@<tenant>`, without tenants unchanged.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, NamedTuple
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, UnsetType

from qinfer.core.store_urls import UrlGrant
from qinfer.errors import Conflict, CorruptEntry, InvalidRequest, JobNotFound
from qinfer.jobs.job import (
    PRIORITIES,
    JobSpec,
    JobState,
    Natural,
    Priority,
    Seconds,
    Threshold,
    check_spec,
    decode_spec_as,
    encode_spec,
    with_checked_urls,
)
from qinfer.jobs.plan import MANIFEST_NAME, Estimate, SkippedFiles
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord, LogLine, damage_told, spec_of
from qinfer.jobs.shards import ShardPace
from qinfer.tabular.spec import shown
from qinfer.wire.bodies import JobEstimate, JobLogLine
from qinfer_api.requests.records import WebhookBody, instant, shown_webhook, written
from qinfer_api.requests.webhooks import WebhookMessage, envelope

_PRIORITY_NAMES: dict[int, Priority] = {1: "high", 2: "normal", 3: "low"}
_CHOSEN = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_MADE = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_BASE32, _CROCKFORD = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_SHOWN = 128
_MOST_DIFFERENCES = 5
_LEAST_S = 1e-6  # clocks are coarser
# Seconds without news after which a job's rate falls: more than two reports of a worker.
_QUIET_S = 5.0
# The shortest estimate of the time left, because scored rows remain to be written.
_LEAST_ETA_S = 1.0


_OWN_ID = "An id of your own: the same id with the same job is one job."


class NewJob(JobSpec, frozen=True, forbid_unknown_fields=True):  # noqa: D101 - as its base
    __doc__ = (JobSpec.__doc__ or "").replace("Attributes:", f"Attributes:\n        id: {_OWN_ID}")
    id: Annotated[str, Meta(extra_json_schema={"pattern": "^[A-Za-z0-9._~-]{1,128}$"})] | UnsetType = UNSET


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of a resumed job; omitted and null fields do not change.

    Attributes:
        error_threshold: The job fails when more rows fail: a number of rows, a fraction between 0 and 1, or -1 = never.
        max_parallel: Shards that run at a time; 0 = one per worker.
        deadline_s: Seconds from now at which the job expires; 0 = never.

    Example:
        {"error_threshold": -1}
    """

    error_threshold: Threshold | None = None
    max_parallel: Natural | None = None
    deadline_s: Seconds | None = None


class JobCounts(msgspec.Struct, frozen=True):
    """Counts of all rows or shards, and of those done and failed; at the end each is done or failed.

    Attributes:
        total: Null until the job is planned.
    """

    total: int | None
    done: int
    failed: int


class JobRowCounts(JobCounts, frozen=True):
    """Counts of rows.

    Attributes:
        total: Null until the job is planned.
        scored: Rows of unfinished shards that are scored but not written.
    """

    scored: int


class JobShardCounts(JobCounts, frozen=True):
    """Counts of shards.

    Attributes:
        total: Null until the job is planned.
        active: Shards in the model's queue or being executed.
    """

    active: int


class JobLinks(msgspec.Struct, frozen=True, rename={"own": "self"}):
    """Paths of the job."""

    own: str
    events: str
    log: str


class JobBody(msgspec.Struct, frozen=True, kw_only=True):
    """A bulk job; instants are RFC 3339 in UTC, null before they occur.

    Attributes:
        endpoint: The requested endpoint, whose stable target is model and version; null if a model was requested.
        state: validating | planning | running | finalizing | completed | failed | cancelling | cancelled | expired;
            completed, failed, cancelled and expired are final
        skipped_files: Unreadable input files that were left out; null before planning.
        progress: The share of the job's rows that are done, failed or scored, 0 … 1.
        eta_s: Estimated seconds to the end.
        error: The reason why the job failed; `null` for a key with the scope `viewer`, as `webhook`.
        waiting: The reason why the job can't continue now.
        manifest_url: The list of the parts, once the job is completed.
        spec: The requested job, with its version resolved and its URLs normalized.

    Example:
        {"id": "01JX3M3TC8Z6Q5RYB7WS2K4D9F", "model": "digits", "version": 1, "endpoint": null, "state": "running",
         "priority": "normal",
         "created_at": "2026-01-31T12:00:00.000Z", "started_at": "2026-01-31T12:00:00.500Z", "ended_at": null,
         "deadline_at": null, "rows": {"total": 1000, "done": 374, "failed": 1, "scored": 125},
         "shards": {"total": 4, "done": 2, "failed": 0, "active": 2}, "skipped_files": {"total": 0, "first": []},
         "progress": 0.5, "rows_per_s": 250.0, "eta_s": 2.0, "error": null, "waiting": null,
         "output_url": "s3://bucket/out", "manifest_url": null, "metadata": {}, "webhook": null,
         "spec": {"model": "digits", "inputs": ["s3://bucket/in/*.parquet"], "columns": {"image": "pixels"},
                  "key": "id", "output": {"url": "s3://bucket/out", "format": "parquet"}},
         "links": {"self": "/v1/jobs/01JX3M3TC8Z6Q5RYB7WS2K4D9F",
                   "events": "/v1/jobs/01JX3M3TC8Z6Q5RYB7WS2K4D9F/events",
                   "log": "/v1/jobs/01JX3M3TC8Z6Q5RYB7WS2K4D9F/log"}}
    """

    id: str
    model: str
    version: int
    endpoint: str | None
    state: JobState
    priority: Priority
    created_at: str
    started_at: str | None
    ended_at: str | None
    deadline_at: str | None
    rows: JobRowCounts
    shards: JobShardCounts
    skipped_files: SkippedFiles | None
    progress: float
    rows_per_s: float | None
    eta_s: float | None
    error: str | None
    waiting: str | None
    output_url: str
    manifest_url: str | None
    metadata: dict[str, str]
    webhook: WebhookBody | None
    spec: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]
    links: JobLinks


class JobFilter(NamedTuple):
    """A listing's filter; empty fields match all jobs. `output` includes folders below it."""

    model: str = ""
    output: str = ""
    metadata: frozenset[tuple[str, str]] = frozenset()

    def fits(self, record: JobRecord) -> bool:
        """Returns whether a job matches; a damaged one never does."""
        if self.model and self.model not in (record.model, record.endpoint):
            return False
        if not (self.output or self.metadata):
            return True
        try:
            spec = spec_of(record)
        except CorruptEntry:
            return False
        folder = f"{self.output.rstrip('/')}/"
        is_there = not self.output or f"{spec.output.url.rstrip('/')}/".startswith(folder)
        return is_there and self.metadata <= spec.metadata.items()


class JobsBody(msgspec.Struct, frozen=True):
    """A page of jobs, newest first.

    Attributes:
        next: `after` of the next page; null = the last page.
    """

    jobs: list[JobBody]
    next: str | None


class JobLog(msgspec.Struct, frozen=True):
    """The latest lines of a job's log, oldest first."""

    log: list[JobLogLine]


class JobProgress(NamedTuple):
    """`share` covers settled and scored rows; `rows_per_s` counts since the start or last resumption."""

    share: float
    rows_per_s: float | None
    eta_s: float | None


def progress_of(record: JobRecord, now_s: float) -> JobProgress:
    """Computes a job's progress.

    The rate ends at the last change, as workers report every two seconds; after a longer silence it falls.
    """
    settled = record.rows_done + record.rows_failed + _rows_scored(record)
    share = min(settled / record.rows, 1.0) if record.rows else float(record.state == JobState.COMPLETED)
    since_s = max(record.started_at, record.resumed_at)
    is_running = record.state == JobState.RUNNING
    until_s = max(record.updated_at, now_s - _QUIET_S) if is_running else record.ended_at or record.updated_at
    measured_s = max(until_s - since_s, 0.0)
    settled_since = settled - record.rows_before
    if not (settled_since > 0 and record.started_at and measured_s >= _LEAST_S):
        return JobProgress(share, None, None)
    rate = settled_since / measured_s
    if not is_running:
        return JobProgress(share, rate, 0.0 if record.state == JobState.FINALIZING else None)
    return JobProgress(share, rate, max((record.rows - settled) / rate, _LEAST_ETA_S))


def _rows_scored(record: JobRecord) -> int:
    return record.rows_scored if record.state == JobState.RUNNING else 0


def chosen_id(job_id: str, tenant: str) -> str:
    """Returns a valid client's id as stored."""
    if not _CHOSEN.fullmatch(job_id):
        raise InvalidRequest(
            f"'{job_id[:_SHOWN]}' can't be a job id; use 1 to 128 letters, digits, '.', '_', '~' and '-'"
        )
    if _MADE.fullmatch(job_id) or job_id in (".", ".."):
        raise InvalidRequest(f"'{job_id}' can't be a job id: it has the server's form, or a meaning in paths")
    return f"{job_id}@{tenant}" if tenant else job_id


def keyed_id(key: str, tenant: str) -> str:
    """Derives a job's id from an idempotency key."""
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}:{key}".encode()).digest()
    return base64.b32encode(digest).decode().translate(str.maketrans(_BASE32, _CROCKFORD))[:26]


def inner_id(job_id: str, tenant: str) -> str:
    """Returns the stored id of a path."""
    if _MADE.fullmatch(job_id):
        return job_id
    try:
        return chosen_id(job_id, tenant)
    except InvalidRequest:
        raise unknown_job(job_id) from None


def unknown_job(job_id: str) -> JobNotFound:
    """Returns the error for an unknown id."""
    return JobNotFound(
        f"job '{job_id[:_SHOWN]}' is not known: it was not created, was deleted, or ended too long ago; "
        "GET /v1/jobs lists those that are"
    )


def shown_job_id(record: JobRecord) -> str:
    """Returns the id as the client knows it."""
    return record.id.removesuffix(f"@{record.tenant}") if record.tenant else record.id


def job_path(record: JobRecord) -> str:
    """Returns the path of a job."""
    return f"/v1/jobs/{quote(shown_job_id(record), safe='')}"


def new_record(job_id: str, spec: JobSpec, *, tenant: str, now_s: float, kept_s: float, trace: str) -> JobRecord:
    """Returns a new job's record, kept `kept_s` after its end."""
    return JobRecord(
        id=job_id,
        model=spec.model,
        version=spec.version,
        tenant=tenant,
        state=JobState.PLANNING,
        priority=PRIORITIES[spec.priority],
        deadline_at=deadline_at(spec, now_s),
        spec=encode_spec(spec),
        max_parallel=spec.max_parallel,
        kept_s=kept_s,
        trace=trace,
        webhook=spec.webhook,
    )


def deadline_at(spec: JobSpec, now_s: float) -> float:
    """Returns when a job expires; 0 = never."""
    return now_s + spec.deadline_s if spec.deadline_s else 0.0


def shown_job(record: JobRecord, now_s: float, *, reads: bool = True) -> JobBody:
    """Returns a job as shown, or raises `CorruptEntry`; a caller who `reads` no contents gets no messages."""
    progress, path = progress_of(record, now_s), job_path(record)
    with damage_told(record.id):
        state, spec = JobState(record.state), msgspec.json.decode(record.spec, type=_ShownSpec)
        skipped = msgspec.json.decode(record.head, type=_ShownHead).skipped if record.head else None
    is_planned = bool(record.shards)
    return JobBody(
        id=shown_job_id(record),
        model=record.model,
        version=record.version,
        endpoint=record.endpoint or None,
        state=state,
        priority=_PRIORITY_NAMES.get(record.priority, "normal"),
        created_at=written(record.created_at),
        started_at=instant(record.started_at),
        ended_at=instant(record.ended_at),
        deadline_at=instant(record.deadline_at),
        rows=JobRowCounts(
            record.rows if is_planned else None, record.rows_done, record.rows_failed, _rows_scored(record)
        ),
        shards=JobShardCounts(record.shards or None, record.shards_done, record.shards_failed, record.in_lane),
        skipped_files=skipped,
        progress=round(progress.share, 6),
        rows_per_s=None if progress.rows_per_s is None else round(progress.rows_per_s, 3),
        eta_s=None if progress.eta_s is None else round(progress.eta_s, 3),
        error=(record.error if reads else "") or None,
        waiting=None if record.is_over else record.waiting or (record.put_off if reads else "") or None,
        output_url=spec.output.url,
        manifest_url=f"{spec.output.url}/{MANIFEST_NAME}" if record.state == JobState.COMPLETED else None,
        metadata=spec.metadata,
        webhook=shown_webhook(record.webhook if reads else "", record.webhook_state),
        spec=msgspec.Raw(record.spec if reads else _without_webhook(record.spec)),
        links=JobLinks(path, f"{path}/events", f"{path}/log"),
    )


def _without_webhook(spec: bytes) -> bytes:
    fields = msgspec.json.decode(spec, type=dict[str, msgspec.Raw])
    fields.pop("webhook", None)
    return msgspec.json.encode(fields)


def shown_estimate(spec: JobSpec, size: Estimate, pace: ShardPace) -> JobEstimate:
    """Returns a job's size and duration."""
    workers = min(pace.workers, size.shards, spec.max_parallel or pace.workers)
    rate = workers * pace.rows_per_s
    return JobEstimate(
        model=spec.model,
        version=spec.version,
        files=size.files,
        rows=size.rows,
        shards=size.shards,
        workers=pace.workers,
        rows_per_s=round(pace.rows_per_s, 3) or None,
        estimated_s=round(size.rows / rate, 3) if rate else None,
    )


def shown_log(lines: Sequence[LogLine]) -> JobLog:
    """Returns a job's log as clients see it."""
    return JobLog([JobLogLine(at=written(line.at), text=line.text) for line in lines])


def decode_job(body: bytes, grant: UrlGrant) -> tuple[JobSpec, str]:
    """Parses a job, and the client's id or ""."""
    asked = decode_spec_as(body, NewJob)
    if asked.id == "":
        raise InvalidRequest("field 'id' is empty; leave it out to have the server make one")
    fields = {name: getattr(asked, name) for name in JobSpec.__struct_fields__}
    return with_checked_urls(JobSpec(**fields), grant), asked.id or ""


def decode_changes(body: bytes) -> Changes:
    """Parses a job's changes."""
    try:
        return msgspec.json.decode(body, type=Changes) if body else Changes()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"the changes can't be read: {error}; a job has {', '.join(Changes.__struct_fields__)}"
        ) from None


def changed(spec: JobSpec, changes: Changes) -> JobSpec:
    """Returns a job with changes; refuses invalid values."""
    given = {name: value for name, value in msgspec.structs.asdict(changes).items() if value is not None}
    found = msgspec.structs.replace(spec, **given)
    check_spec(found)
    return found


def check_same(tenant: str, known: JobRecord, asked: JobSpec, *, any_limits: bool) -> None:
    """Checks that a repeated creation asks for the existing job.

    With `any_limits`, the fields that `resume` can change may differ; `overwrite` may always differ.
    """
    there, here = (_flat(spec) for spec in (spec_of(known), asked))
    here["version"] = asked.version or known.version
    if known.endpoint and asked.model == known.endpoint:
        here["model"] = known.model
    free = ("overwrite", *(Changes.__struct_fields__ if any_limits else ()))
    differing = [name for name in there if there[name] != here[name] and name not in free]
    if known.tenant != tenant or differing:
        fields = [f"'{name}': {_json(there[name])}, now {_json(here[name])}" for name in differing[:_MOST_DIFFERENCES]]
        more = f", and {len(differing) - _MOST_DIFFERENCES} more fields" if len(differing) > _MOST_DIFFERENCES else ""
        raise Conflict(
            "the id or Idempotency-Key belongs to another job"
            + (f", which differs in {'; '.join(fields)}{more}" if known.tenant == tenant else "")
            + "; repeat the body of that job, or choose another id or key"
        )


def check_unshared(tenant: str, asked: JobSpec, unfinished: Sequence[JobRecord]) -> None:
    """Raises `Conflict` if an unfinished job's output would be overwritten."""
    for record in unfinished:
        with damage_told(record.id):
            spec = msgspec.json.decode(record.spec, type=_ShownSpec)
        if spec.output.url == asked.output.url and (asked.overwrite or spec.overwrite):
            name = f"job '{shown_job_id(record)}'" if record.tenant == tenant else "a job of another tenant"
            raise Conflict(
                f"{name}, which is {record.state}, writes to output '{spec.output.url}', and one of the two "
                "overwrites it; cancel that job, wait for its end, or name another folder"
            )


def _flat(spec: JobSpec) -> dict[str, object]:
    fields = msgspec.structs.asdict(spec)
    output = msgspec.structs.asdict(fields.pop("output"))
    return fields | {f"output.{name}": value for name, value in output.items()}


def _json(value: object) -> str:
    return shown(msgspec.json.encode(None if value is UNSET else value).decode())


class _ShownHead(msgspec.Struct, frozen=True):
    skipped: SkippedFiles = SkippedFiles()


class _ShownOutput(msgspec.Struct, frozen=True):
    url: str


class _ShownSpec(msgspec.Struct, frozen=True):
    """May have fields of a newer gateway."""

    output: _ShownOutput
    metadata: dict[str, str] = {}
    overwrite: bool = False


async def message_of(jobs: Jobs, job_id: str) -> WebhookMessage | None:
    """Renders a job's webhook, if it has ended and has one."""
    record = await jobs.get(job_id)
    if record is None or not record.webhook or not record.is_over:
        return None
    return WebhookMessage(record.webhook, partial(_webhook_body, record))


def _webhook_body(record: JobRecord, now_s: float) -> bytes:
    return envelope(f"job.{record.state}", instant(record.ended_at), record.tenant, shown_job(record, now_s))
