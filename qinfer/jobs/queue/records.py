"""Records of bulk jobs in the queue: the types of `qinfer.jobs.queue.jobs`, its limits, and how they are stored.

A record is a hash. What is fixed at a job's creation and no script reads is one value, `about`; `spec`, `head` and
`grant` are values of their own, which may be megabytes and change; the rest are the fields that scripts read and
write. Instants are whole milliseconds there.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypedDict

import msgspec

from qinfer.core.settings import StoreSettings
from qinfer.core.store_urls import Grant
from qinfer.errors import CorruptEntry
from qinfer.jobs.job import TERMINAL, JobSpec, JobState
from qinfer.models.work import OpenRows
from qinfer.queue import keys
from qinfer.queue.connection import Argument
from qinfer.queue.deliveries import JOBS, WEBHOOKS
from qinfer.queue.entries import BULK_LANES, Lane
from qinfer.queue.router import ttl_ms
from qinfer.wire.versions import Record

TOP_UP_COUNT = 200
"""So many shards move to a lane in one step; at most so many of a job's are put away in one, too."""

MAX_LOG_LINES = 200
"""The latest lines of a job's log that are kept."""

MAX_LINE_CHARACTERS = 2000
"""The longest line of a log, and the longest error of a shard."""

KEPT_S = 7 * 86400.0
"""How long a job is known after its end, if its record does not say."""

_COUNTS = (
    *("rows", "rows_done", "rows_failed", "rows_before", "shards", "shards_done", "shards_failed", "in_lane"),
    *("max_parallel", "max_errors", "revision"),
)
_INSTANTS = ("started_at", "ended_at", "resumed_at", "deadline_at", "updated_at")
_TEXTS = ("state", "error", "waiting", "webhook", "webhook_state", "endpoint")
_BYTES = ("spec", "head", "grant")
_SCORED = "scored:"  # and the index of a shard that is being run: how many of its rows are scored
_PUT_OFF = "put_off:"  # and the index of a shard that was put off: why
_RESUME = "resume:"  # and the index of a shard whose run was broken off: what is known of it

OPEN_FIELDS = tuple(b"about state rows rows_done rows_failed rows_before started_at resumed_at".split())
"""The fields of a record that `open_rows` looks at."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a job; instants in seconds of the broker's time, 0 = not yet or never.

    Attributes:
        id: Its id, unique over all models.
        model: The model's name.
        version: Its version, > 0; of which the shards' lanes are.
        partition: The queue partition of its keys and lanes.
        tenant: Whose job it is.
        state: Where it is; see `qinfer.jobs.job.JobState`.
        priority: 1 … 3: the number of its bulk lane.
        created_at: When it was created; `create` fills it in.
        started_at: When it ran first.
        ended_at: When it ended.
        resumed_at: When it was resumed last; 0 = never.
        rows_before: How many rows were settled at that time.
        deadline_at: When it expires; 0 = never.
        updated_at: When anything about it changed last.
        spec: The JSON of its `JobSpec`.
        head: What workers need of its plan, once it is planned; bytes that are opaque here.
        grant: The JSON of the `Grant` that its tenant had when it was created or resumed last.
        rows: How many rows it has, once it is planned.
        rows_done: How many of them have an output.
        rows_failed: How many of them have an error; together with `rows_done` those of all settled shards.
        rows_scored: How many rows are scored of the shards that are being run; they have a part only when those end.
        shards: How many shards it has, once it is planned.
        shards_done: How many of them were committed.
        shards_failed: How many of them were given up; the rest is waiting or in hand.
        in_lane: How many of them are in the lane, waiting or in a worker's hand.
        max_parallel: How many may run at a time; 0 = as many as there are workers.
        error: Why it failed; empty otherwise.
        waiting: Why it can't go on now; empty otherwise.
        put_off: Why a shard of it can't go on now; empty = no shard was put off.
        max_errors: How many rows may fail before it does; -1 = all.
        kept_s: How long it is known after its end.
        trace: W3C `traceparent` of what created it; empty = nobody records it.
        webhook: Where its end is told; empty = nowhere.
        webhook_state: `` | pending | delivered | failed.
        endpoint: The endpoint that it named, whose stable target it was given then; empty = it named the model.
        revision: Raised by each change.
        resumptions: Notes on shards whose run was broken off, by index; bytes that are opaque here.
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
        """The lane of its shards."""
        return Lane(self.model, self.version, BULK_LANES[self.priority - 1], self.partition)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in TERMINAL


class ShardOutcome(msgspec.Struct, frozen=True):
    """Outcome of a shard.

    Attributes:
        index: Which shard of its job.
        rows: How many rows it has.
        failed_rows: How many of them have an error.
        error: Why the whole shard was given up, and has no part; empty = it was committed.
    """

    index: int
    rows: int
    failed_rows: int = 0
    error: str = ""


class Standing(msgspec.Struct, frozen=True):
    """Where a job stands after its lane was filled, seen in one step.

    Attributes:
        state: Its state.
        moved: How many shards were moved to the lane.
        waiting: How many are in `todo` still.
        in_lane: How many are in the lane, waiting or in hand.
        has_failed: Whether more rows failed than may.
    """

    state: str
    moved: int
    waiting: int
    in_lane: int
    has_failed: bool

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to run or running."""
        return not (self.waiting or self.in_lane)


class LogLine(msgspec.Struct, frozen=True):
    """A line of a job's log: when, in the broker's time, and what."""

    at: float
    text: str


class Page(NamedTuple):
    """Part of a listing; `after` begins the next one, empty = this was the last."""

    records: list[JobRecord]
    after: str


def open_rows(record: JobRecord, now_s: float) -> OpenRows:
    """Returns what a job has yet to do; of its record only the counts, state and instants are looked at.

    A job that is not planned counts as one row, for it waits until a worker tells what it executes.
    """
    settled = record.rows_done + record.rows_failed
    began_s = max(record.started_at, record.resumed_at)
    return OpenRows(
        model=record.model,
        version=record.version,
        partition=record.partition,
        rows=_rows_left(record, settled),
        rows_per_s=max(settled - record.rows_before, 0) / (now_s - began_s) if 0 < began_s < now_s else 0.0,
    )


def _rows_left(record: JobRecord, settled: int) -> int:
    if record.state == JobState.PLANNING and not record.rows:
        return 1
    return max(record.rows - settled, 0) if record.state in {JobState.PLANNING, JobState.RUNNING} else 0


def service_order(record: JobRecord) -> tuple[int, float, str]:
    """Orders jobs as they are served: by priority, then the oldest first."""
    return record.priority, record.created_at, record.id


class _About(msgspec.Struct, array_like=True, frozen=True):
    """The part of a job that is fixed at its creation, and read by no script."""

    version: int
    tenant: str
    priority: int
    created_at: float
    trace: str


_ABOUT = Record(_About, "the record of a bulk job")


class Change(TypedDict, total=False):
    """The fields of a record that `move` sets; see `JobRecord`."""

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


class Place(NamedTuple):
    """Where the keys of a job are."""

    model: str
    partition: int
    job_id: str

    @classmethod
    def of(cls, record: JobRecord) -> "Place":
        """Returns where the job of a record is."""
        return cls(record.model, record.partition, record.id)

    @property
    def record(self) -> bytes:
        """The key of its record."""
        return keys.job(*self).encode()

    def part(self, name: str) -> bytes:
        """Returns the key of what belongs to it: `todo`, `in_lane`, `outcomes` or `log`."""
        return keys.job_part(*self, name).encode()

    def names(self) -> list[bytes]:
        """Returns the keys that all scripts of jobs have first; see job.lua."""
        parts = (self.part(name) for name in ("todo", "in_lane", "outcomes", "log"))
        queues = (keys.deliveries(*self[:2], kind) for kind in (WEBHOOKS, JOBS.name))
        return [self.record, *parts, *(name.encode() for name in queues)]


def new_words(record: JobRecord, weight: int) -> list[Argument]:
    """Returns the fields and values of a record that is to be created.

    Args:
        record: The record.
        weight: That of its tenant; 0 = not known. Scripts read both, to put its shards into the tenant's share.
    """
    about = _About(record.version, record.tenant, record.priority, record.created_at, record.trace)
    names = (*_TEXTS, *_BYTES, *_COUNTS, *_INSTANTS[:-1])
    owner = {"tenant": record.tenant, "weight": weight}
    fields = {name: getattr(record, name) for name in names}
    return words_of({"about": _ABOUT.encode(about), "kept_ms": ttl_ms(record.kept_s), **fields, **owner})


def words_of(fields: Mapping[str, object]) -> list[Argument]:
    """Returns fields and values as a script takes them."""
    words: list[Argument] = []
    for name, value in fields.items():
        if isinstance(value, int | float):
            words += (name, int(value * 1000) if name in _INSTANTS else int(value))
        else:
            assert isinstance(value, str | bytes)
            words += (name, value)
    return words


def record_of(place: Place, fields: Mapping[bytes, bytes]) -> JobRecord:
    """Reads a record.

    Args:
        place: Whose it is.
        fields: Its fields, `about` among them; those that are left out are at their defaults.

    Raises:
        NewerVersion: A newer qinfer wrote it.
        CorruptEntry: It is damaged.
    """
    with damage_told(place.job_id):
        return _record_of(place, {name.decode(): value for name, value in fields.items()})


def _record_of(place: Place, found: dict[str, bytes]) -> JobRecord:
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
    """Reads an outcome as the scripts have it: `rows failed given_up error`."""
    rows, failed, _, error = text.decode().split(" ", 3)
    return ShardOutcome(int(index), int(rows), int(failed), error)


def line_of(text: bytes) -> LogLine:
    """Reads a line of a log: milliseconds and what."""
    at_ms, _, said = text.decode().partition(" ")
    return LogLine(int(at_ms) / 1000, said)


def spec_of(record: JobRecord) -> JobSpec:
    """Returns the specification of a stored job.

    Raises:
        CorruptEntry: It is damaged.
    """
    with damage_told(record.id):
        return msgspec.json.decode(record.spec, type=JobSpec)


def granted(record: JobRecord, stores: StoreSettings) -> Grant:
    """Returns the URL prefixes that a job may use in this process: those that a gateway granted, and it allows itself.

    Args:
        record: The job; without a grant, an older gateway has stored it.
        stores: The settings of this process.

    Raises:
        CorruptEntry: The grant is damaged.
    """
    here = stores.grant_of(record.tenant)
    with damage_told(record.id):
        return msgspec.json.decode(record.grant, type=Grant).narrowed(here) if record.grant else here


@contextmanager
def damage_told(job_id: str) -> Iterator[None]:
    """Has `CorruptEntry` raised of a record whose fields can't be read."""
    try:
        yield
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
        RecursionError,
        msgspec.MsgspecError,
    ) as error:
        raise CorruptEntry(f"the record of job '{job_id}' is damaged: {error}") from None


def why_failed(outcomes: Iterable[ShardOutcome], max_errors: int, shards: int) -> str:
    """Says why a job can't be complete, whatever its parts are; empty = it can.

    Args:
        outcomes: What became of its settled shards.
        max_errors: How many rows may fail; -1 = all.
        shards: How many shards it has.
    """
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
    """Says that more rows of a job have failed than may."""
    return f"{failed_rows} rows failed; the job allows {max_errors} (error_threshold)"
