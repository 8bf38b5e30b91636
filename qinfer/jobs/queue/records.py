"""Records of bulk jobs in the queue: types, limits and storage.

A record is a hash. `about` has the fixed fields that no script reads. `spec`, `head` and `grant` are separate, since
they change and may have megabytes. Instants in fields are milliseconds.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypedDict

import msgspec

from qinfer.core.settings import StoreSettings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import CorruptEntry
from qinfer.jobs.job import TERMINAL, JobSpec, JobState
from qinfer.models.state import OpenRows
from qinfer.queue import keys
from qinfer.queue.connection import Argument
from qinfer.queue.deliveries import JOBS, WEBHOOKS
from qinfer.queue.entries import BULK_LANES, Lane
from qinfer.queue.router import ttl_ms
from qinfer.wire.versions import Record

KEPT_S = 7 * 86400.0

_COUNTS = (
    *("rows", "rows_done", "rows_failed", "rows_before", "shards", "shards_done", "shards_failed", "in_lane"),
    *("max_parallel", "max_errors", "revision"),
)
_INSTANTS = ("started_at", "ended_at", "resumed_at", "deadline_at", "updated_at")
_TEXTS = ("state", "error", "waiting", "webhook", "webhook_state", "endpoint")
_BYTES = ("spec", "head", "grant")
# Prefixes of fields, before the index of a shard: its scored rows, why it was put off, and the note for its next run.
_SCORED = "scored:"
_PUT_OFF = "put_off:"
_RESUME = "resume:"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a job; instants are seconds on Redis' clock, 0 = not yet or never.

    Attributes:
        priority: The number of its bulk lane.
        rows_before: Rows that were settled at `resumed_at`.
        spec: The JSON of its `JobSpec`.
        head: The JSON of its `PlanHead`; opaque here.
        grant: The JSON of its tenant's `UrlGrant`.
        rows_done: Rows of settled shards with an output.
        rows_scored: Rows scored by running shards.
        in_lane: Shards in the lane, waiting or held.
        waiting: The reason why the job can't go on now.
        put_off: The reason why one of the job's shards can't go on now.
        max_errors: The most rows that may fail; -1 = all rows.
        kept_s: The time for which the record is kept after the job's end.
        trace: W3C `traceparent` of the creating request.
        webhook_state: `` | pending | delivered | failed.
        resumptions: Notes on interrupted shards, by index; opaque here.
    """

    id: str
    model: str
    version: int
    partition: int = 0
    tenant: str = ""
    state: str = "validating"
    priority: int = 2
    created_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    resumed_at: float = 0.0
    rows_before: int = 0
    deadline_at: float = 0.0
    updated_at: float = 0.0
    spec: bytes = b""
    head: bytes = b""
    grant: bytes = b""
    rows: int = 0
    rows_done: int = 0
    rows_failed: int = 0
    rows_scored: int = 0
    shards: int = 0
    shards_done: int = 0
    shards_failed: int = 0
    in_lane: int = 0
    max_parallel: int = 0
    error: str = ""
    waiting: str = ""
    put_off: str = ""
    max_errors: int = -1
    kept_s: float = KEPT_S
    trace: str = ""
    webhook: str = ""
    webhook_state: str = ""
    endpoint: str = ""
    revision: int = 0
    resumptions: Mapping[int, bytes] = {}

    @property
    def lane(self) -> Lane:
        """The lane of the job's shards."""
        return Lane(self.model, self.version, BULK_LANES[self.priority - 1], self.partition)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.state in TERMINAL


class ShardOutcome(msgspec.Struct, frozen=True):
    """The outcome of a shard; with an `error` the shard was given up and has no part."""

    index: int
    rows: int
    failed_rows: int = 0
    error: str = ""


class Standing(msgspec.Struct, frozen=True):
    """The state of a job, and the numbers of its shards: moved to the lane just now, in `todo`, and in the lane."""

    state: str
    moved: int
    waiting: int
    in_lane: int
    has_failed: bool

    @property
    def is_settled(self) -> bool:
        """Whether no shard is waiting or running."""
        return not (self.waiting or self.in_lane)


class LogLine(msgspec.Struct, frozen=True):
    """A line of a job's log; `at` is in seconds on Redis' clock."""

    at: float
    text: str


class Page(NamedTuple):
    """A page of a listing; `after` begins the next one."""

    records: list[JobRecord]
    after: str


def open_rows(record: JobRecord, now_s: float) -> OpenRows:
    """Returns a job's remaining work; a job without a plan counts as one row, because it needs a worker."""
    settled = record.rows_done + record.rows_failed
    left = max(record.rows - settled, 0) if record.state in {JobState.PLANNING, JobState.RUNNING} else 0
    if record.state == JobState.PLANNING and not record.rows:
        left = 1
    began_s = max(record.started_at, record.resumed_at)
    return OpenRows(
        model=record.model,
        version=record.version,
        partition=record.partition,
        rows=left,
        rows_per_s=max(settled - record.rows_before, 0) / (now_s - began_s) if 0 < began_s < now_s else 0.0,
    )


class _About(msgspec.Struct, array_like=True, frozen=True):
    version: int
    tenant: str
    priority: int
    created_at: float
    trace: str


_ABOUT = Record(_About, "the record of a bulk job")
_DAMAGES = (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


class RecordChange(TypedDict, total=False):
    """Fields that `move` sets."""

    error: str
    waiting: str
    spec: bytes
    head: bytes
    grant: bytes
    rows: int
    max_errors: int
    max_parallel: int
    deadline_at: float
    resumed_at: float
    rows_before: int


class JobAddress(NamedTuple):
    """Location of a job's keys."""

    model: str
    partition: int
    job_id: str

    @classmethod
    def from_record(cls, record: JobRecord) -> "JobAddress":
        """Returns the location of a record's job."""
        return cls(record.model, record.partition, record.id)

    @property
    def record(self) -> bytes:
        """The key of the job's record."""
        return keys.job(*self).encode()

    def part(self, name: str) -> bytes:
        """Returns the key of the job's `todo`, `in_lane`, `outcomes` or `log`."""
        return keys.job_part(*self, name).encode()

    def names(self) -> list[bytes]:
        """Returns the first keys of all job scripts."""
        parts = (self.part(name) for name in ("todo", "in_lane", "outcomes", "log"))
        queues = (keys.deliveries(*self[:2], kind) for kind in (WEBHOOKS, JOBS.name))
        return [self.record, *parts, *(name.encode() for name in queues)]


def new_words(record: JobRecord, weight: int) -> list[Argument]:
    """Returns a new record for a script, with its tenant's `weight` (0 = unknown)."""
    about = _About(record.version, record.tenant, record.priority, record.created_at, record.trace)
    names = (*_TEXTS, *_BYTES, *_COUNTS, *_INSTANTS[:-1])
    owner = {"tenant": record.tenant, "weight": weight}
    fields = {name: getattr(record, name) for name in names}
    return words_of({"about": _ABOUT.encode(about), "kept_ms": ttl_ms(record.kept_s), **fields, **owner})


def words_of(fields: Mapping[str, object]) -> list[Argument]:
    """Returns fields and values for a script."""
    words: list[Argument] = []
    for name, value in fields.items():
        if isinstance(value, int | float):
            words += (name, int(value * 1000) if name in _INSTANTS else int(value))
        else:
            assert isinstance(value, str | bytes)
            words += (name, value)
    return words


def record_of(place: JobAddress, fields: Mapping[bytes, bytes]) -> JobRecord:
    """Decodes a record; absent fields have their defaults."""
    with damage_told(place.job_id):
        return _record_of(place, {name.decode(): value for name, value in fields.items()})


def _record_of(place: JobAddress, found: dict[str, bytes]) -> JobRecord:
    about = _ABOUT.decode(found.pop("about"))
    values: dict[str, object] = {"id": place.job_id, "model": place.model, "partition": place.partition}
    values |= msgspec.structs.asdict(about)
    values |= {name: int(found[name]) for name in _COUNTS if name in found}
    values |= {name: int(found[name]) / 1000 for name in _INSTANTS if name in found}
    values |= {name: found[name].decode() for name in _TEXTS if name in found}
    values |= {name: found[name] for name in _BYTES if name in found}
    values["rows_scored"] = sum(int(rows) for name, rows in found.items() if name.startswith(_SCORED))
    values["put_off"] = next((why.decode() for name, why in sorted(found.items()) if name.startswith(_PUT_OFF)), "")
    resumptions = {int(name.removeprefix(_RESUME)): text for name, text in found.items() if name.startswith(_RESUME)}
    values |= {"resumptions": resumptions} if resumptions else {}
    if "kept_ms" in found:
        values["kept_s"] = int(found["kept_ms"]) / 1000
    return msgspec.convert(values, JobRecord)


def outcome_of(index: bytes, text: bytes) -> ShardOutcome:
    """Decodes an outcome: `rows failed given_up error`."""
    rows, failed, _, error = text.decode().split(" ", 3)
    return ShardOutcome(int(index), int(rows), int(failed), error)


def line_of(text: bytes) -> LogLine:
    """Decodes a line of a log: milliseconds, then text."""
    at_ms, _, said = text.decode().partition(" ")
    return LogLine(int(at_ms) / 1000, said)


def spec_of(record: JobRecord) -> JobSpec:
    """Decodes the specification of a stored job."""
    with damage_told(record.id):
        return msgspec.json.decode(record.spec, type=JobSpec)


def granted(record: JobRecord, stores: StoreSettings) -> UrlGrant:
    """Returns the URL prefixes that the gateway's grant (if stored) and this process allow."""
    here = stores.grant_of(record.tenant)
    with damage_told(record.id):
        return msgspec.json.decode(record.grant, type=UrlGrant).narrowed(here) if record.grant else here


@contextmanager
def damage_told(job_id: str) -> Iterator[None]:
    """Raises `CorruptEntry` for a damaged record."""
    try:
        yield
    except _DAMAGES as error:
        raise CorruptEntry(f"the record of job '{job_id}' is damaged: {error}") from None


def why_failed(outcomes: Iterable[ShardOutcome], max_errors: int, shards: int) -> str:
    """Returns why a job can't complete; `max_errors` -1 = any row may fail."""
    settled = list(outcomes)
    failed_rows = sum(outcome.failed_rows for outcome in settled)
    given_up = [outcome for outcome in settled if outcome.error]
    lost = ""
    if given_up:
        first = min(given_up, key=lambda outcome: outcome.index)
        lost = f"{len(given_up)} of {shards} shards were given up; the first, {first.index}: {first.error}"
    if 0 <= max_errors < failed_rows:
        return f"{too_many(failed_rows, max_errors)}; {lost or 'the column error_message of the parts says why'}"
    return lost


def too_many(failed_rows: int, max_errors: int) -> str:
    """Returns the message that too many rows failed."""
    rows = "1 row" if failed_rows == 1 else f"{failed_rows} rows"
    return f"{rows} failed; the job allows {max_errors} (error_threshold)"
