"""How bulk jobs look: their ids, their paths, their records as `/v1/jobs` and its events have them. Pure.

An id that the server makes has the form of a ULID, and is shown as it is. One that the client chose is `<id>@<tenant>`
inside, so that tenants can't meet; where there are no tenants it is the same inside and outside.
"""

import base64
import hashlib
import re
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from qinfer.bulk.job import PRIORITIES, JobSpec, JobState, encode_spec
from qinfer.delivery.jobs import JobRecord, LogLine
from qinfer.errors import InvalidRequest, JobNotFound
from qinfer_api.records import instant

MANIFEST = "_manifest.json"
"""The name of the list of parts, within the output."""

PRIORITY_NAMES = {1: "high", 2: "normal", 3: "low"}

_CHOSEN = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_MADE = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_BASE32, _CROCKFORD = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_SHOWN = 128


class Progress(NamedTuple):
    """How far a job is.

    Attributes:
        share: Of its rows that are settled, 0 … 1.
        rows_per_s: Settled rows a second since it began to run, or was resumed; `None` before the first.
        eta_s: Seconds until all are, at that rate; `None` = not known, or it does not run.
    """

    share: float
    rows_per_s: float | None
    eta_s: float | None


def progress_of(record: JobRecord, now_s: float) -> Progress:
    """Computes how far a job is, and how long the rest will take.

    The rate is that up to the last change: shards end seconds apart, and between two of them it would only seem to
    fall.

    Args:
        record: The job.
        now_s: The broker's time.
    """
    settled = record.rows_done + record.rows_failed
    share = min(settled / record.rows, 1.0) if record.rows else float(record.state == JobState.COMPLETED)
    since_s = max(record.started_at, record.resumed_at)
    measured_s = max(record.ended_at or record.updated_at, since_s) - since_s
    settled_since = settled - record.rows_before
    if not (settled_since > 0 and record.started_at and measured_s > 0):
        return Progress(share, None, None)
    rate = settled_since / measured_s
    if record.state != JobState.RUNNING:
        return Progress(share, rate, 0.0 if record.state == JobState.FINALIZING else None)
    rest_s = max(record.rows - settled, 0) / rate
    return Progress(share, rate, max(rest_s - max(now_s - record.updated_at, 0.0), 0.0))


def chosen_id(job_id: str, tenant: str) -> str:
    """Returns the id inside of a job whose id its client chose.

    Raises:
        InvalidRequest: The id has other characters, is too long, or looks like one that a server made.
    """
    if not _CHOSEN.fullmatch(job_id):
        raise InvalidRequest(
            f"'{job_id[:_SHOWN]}' can't be a job id; use 1 to 128 letters, digits, '.', '_', '~' and '-'"
        )
    if _MADE.fullmatch(job_id) or job_id in (".", ".."):
        raise InvalidRequest(f"'{job_id}' can't be a job id: the server makes such ids itself, or paths mean others")
    return f"{job_id}@{tenant}" if tenant else job_id


def keyed_id(key: str, tenant: str) -> str:
    """Returns the id of the job that an idempotency key makes: always the same, and in the form of the server's."""
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}:{key}".encode()).digest()
    return base64.b32encode(digest).decode().translate(str.maketrans(_BASE32, _CROCKFORD))[:26]


def inner_id(job_id: str, tenant: str) -> str:
    """Returns the id inside of the job that a path names; that there is one is not known yet.

    Raises:
        JobNotFound: No job can have that id.
    """
    if _MADE.fullmatch(job_id):
        return job_id
    try:
        return chosen_id(job_id, tenant)
    except InvalidRequest:
        raise unknown_job(job_id) from None


def unknown_job(job_id: str) -> JobNotFound:
    """Returns the error for an id that nobody knows, or that another tenant's job has."""
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
    """Returns the record of a job that is to be planned.

    Args:
        job_id: Its id inside.
        spec: What is asked for, its version known.
        tenant: Whose it is.
        now_s: The broker's time.
        kept_s: How long it is known after its end.
        trace: W3C `traceparent` of its creation; empty = nobody records it.
    """
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
    """Returns when a job expires that is created or resumed now; 0 = never."""
    return now_s + spec.deadline_s if spec.deadline_s else 0.0


def spec_of(record: JobRecord) -> JobSpec:
    """Returns the specification of a stored job."""
    return msgspec.json.decode(record.spec, type=JobSpec)


def shown_job(record: JobRecord, now_s: float) -> dict[str, Any]:
    """Returns a job as JSON has it; instants are RFC 3339 in UTC, null where they have not come."""
    progress, path = progress_of(record, now_s), job_path(record)
    spec: dict[str, Any] = msgspec.json.decode(record.spec)  # with fields that a newer gateway may have written
    url = spec["output"]["url"]
    return {
        "id": shown_job_id(record),
        "model": record.model,
        "version": record.version,
        "state": record.state,
        "priority": PRIORITY_NAMES.get(record.priority, "normal"),
        "created_at": instant(record.created_at),
        "started_at": instant(record.started_at),
        "ended_at": instant(record.ended_at),
        "deadline_at": instant(record.deadline_at),
        "rows": _counts(record.rows, record.rows_done, record.rows_failed, planned=bool(record.shards)),
        "shards": {
            **_counts(record.shards, record.shards_done, record.shards_failed, planned=bool(record.shards)),
            "active": record.in_lane,
        },
        "progress": round(progress.share, 6),
        "rows_per_s": None if progress.rows_per_s is None else round(progress.rows_per_s, 3),
        "eta_s": None if progress.eta_s is None else round(progress.eta_s, 3),
        "error": record.error or None,
        "output_url": url,
        "manifest_url": f"{url}/{MANIFEST}" if record.state == JobState.COMPLETED else None,
        "metadata": spec.get("metadata", {}),
        "webhook": {"url": record.webhook, "state": record.webhook_state or "waiting"} if record.webhook else None,
        "spec": spec,
        "links": {"self": path, "events": f"{path}/events", "log": f"{path}/log"},
    }


def shown_line(line: LogLine) -> dict[str, Any]:
    """Returns a line of a job's log as JSON has it."""
    return {"at": instant(line.at), "text": line.text}


def _counts(total: int, done: int, failed: int, *, planned: bool) -> dict[str, int | None]:
    return {"total": total if planned else None, "done": done, "failed": failed}
