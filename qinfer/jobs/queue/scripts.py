"""The scripts of bulk jobs: a function for each, `lua/<name>.lua`, and how records, outcomes and log lines are spelled.

A record is a hash. What is fixed at a job's creation and no script reads is one value, `about`; `spec` and `head` are
values of their own, which may be megabytes and change; the rest are the fields that scripts read and write. Instants
are whole milliseconds there.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypedDict

import msgspec

from qinfer.jobs.queue.records import (
    MAX_LINE_CHARACTERS,
    MAX_LOG_LINES,
    TOP_UP_COUNT,
    JobRecord,
    LogLine,
    ShardOutcome,
    Standing,
)
from qinfer.queue import keys, scripts
from qinfer.queue.connection import Argument
from qinfer.queue.dead_letters import MAX_AGE_S, MAX_BYTES
from qinfer.queue.deliveries import JOBS, WEBHOOKS
from qinfer.queue.entries import Lease
from qinfer.queue.scripts import Call, ttl_ms
from qinfer.wire.versions import Record

_CREATE = scripts.load("create", "now_ms", package="qinfer.jobs")
_DELETE = scripts.load("delete", "now_ms", "deliveries", "job", package="qinfer.jobs")
_FINISH = scripts.load("finish", "now_ms", "deliveries", "job", "trim_letters", package="qinfer.jobs")
_MISSING = scripts.load("missing", package="qinfer.jobs")
_MOVE = scripts.load("move", "now_ms", "deliveries", "job", package="qinfer.jobs")
_NOTE = scripts.load("note", "now_ms", "deliveries", "job", package="qinfer.jobs")
_PLAN = scripts.load("plan", "now_ms", "deliveries", "job", package="qinfer.jobs")
_STOP = scripts.load("stop", "now_ms", "deliveries", "job", package="qinfer.jobs")
_TOP_UP = scripts.load("top_up", "now_ms", "deliveries", "job", package="qinfer.jobs")
_WITHDRAW = scripts.load("withdraw", "now_ms", "deliveries", "job", package="qinfer.jobs")

_COUNTS = (
    *("rows", "rows_done", "rows_failed", "rows_before", "shards", "shards_done", "shards_failed", "in_lane"),
    *("max_parallel", "max_errors", "revision"),
)
_INSTANTS = ("started_at", "ended_at", "resumed_at", "deadline_at", "updated_at")
_TEXTS = ("state", "error", "webhook", "webhook_state")
_BYTES = ("spec", "head")

OPEN_FIELDS = tuple(b"about state rows rows_done rows_failed rows_before started_at resumed_at".split())
"""The fields of a record that `open_rows` looks at."""


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
    spec: bytes
    head: bytes
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


async def create(call: Call, record: JobRecord, nonce: str) -> bool:
    """Stores a record unless there is one; True also where this creation's first run stored it, which `nonce` tells."""
    about = _About(record.version, record.tenant, record.priority, record.created_at, record.trace)
    names = (*_TEXTS, *_BYTES, *_COUNTS, *_INSTANTS[:-1])
    words = _words({name: getattr(record, name) for name in names})
    fixed = ("about", _ABOUT.encode(about), "kept_ms", ttl_ms(record.kept_s))
    return bool(await scripts.run(call, _CREATE, [Place.of(record).record], nonce, *fixed, *words))


async def delete(call: Call, place: Place) -> bool | None:
    """Forgets a job that has ended; False = it has not, `None` = its record was gone already."""
    deleted = await scripts.run(call, _DELETE, place.names())
    return None if deleted == -1 else bool(deleted)


async def move(call: Call, place: Place, expected: Collection[str], state: str, change: Change) -> bool:
    """Changes a job's state if it is one of those expected; from running to finalizing if nothing is left to run."""
    check_change(change)
    arguments = (place.job_id, state, len(expected), *expected, *_words(change))
    return bool(await scripts.run(call, _MOVE, place.names(), *arguments))


async def plan(
    call: Call,
    record: JobRecord,
    shards: Sequence[tuple[int, bytes]],
    *,
    rows: int | None,
    is_last: bool,
    is_forced: bool,
) -> bool:
    """Adds shards to what is to be run of a job that is being planned; False = it is not.

    Args:
        call: The way to Redis.
        record: The job's; of it only what never changes is looked at.
        shards: Index and frame of each.
        rows: How many rows the job has; `None` = as many as it has.
        is_last: These are the last ones: the job runs.
        is_forced: Also those that succeeded or are in the lane.
    """
    place = Place.of(record)
    about = (place.job_id, keys.GROUP, int(is_last), int(is_forced), "" if rows is None else rows)
    words = [word for shard in shards for word in shard]
    return bool(await scripts.run(call, _PLAN, [*place.names(), keys.lane(record.lane)], *about, *words))


async def top_up(call: Call, record: JobRecord, workers: int) -> Standing | None:
    """Fills the lane of a running job, and tells where it stands; `None` = it is unknown."""
    names = [*Place.of(record).names(), keys.lane(record.lane)]
    found = await scripts.run(call, _TOP_UP, names, max(1, workers), TOP_UP_COUNT)
    if found is None:
        return None
    state, moved, waiting, in_lane, has_failed = found
    return Standing(state.decode(), moved, waiting, in_lane, bool(has_failed))


async def finish(call: Call, job_id: str, lease: Lease, outcome: ShardOutcome) -> bool:
    """Removes a shard's entry, and records its outcome; False = it is not the first, or the job is over."""
    return await _finish(call, job_id, lease, outcome, "finish")


async def drop(call: Call, job_id: str, lease: Lease, index: int) -> None:
    """Removes a shard's entry without an outcome; it waits as before where its job wants it."""
    await _finish(call, job_id, lease, ShardOutcome(index, 0), "drop")


async def bury(call: Call, job_id: str, lease: Lease, outcome: ShardOutcome, code: str) -> bool:
    """Moves a shard's entry to the dead letters, and records its outcome; False = it is another's, or gone."""
    lane = lease.entry.lane
    about = (lease.consumer, f"{lane.version}:{lane.name}", code, outcome.error, ttl_ms(MAX_AGE_S), MAX_BYTES)
    return await _finish(call, job_id, lease, outcome, "bury", *about)


async def missing(call: Call, record: JobRecord) -> list[int]:
    """Names the shards that should be in the lane and are not."""
    names = [Place.of(record).part("in_lane"), keys.lane(record.lane)]
    return sorted(map(int, await scripts.run(call, _MISSING, names)))


async def note(call: Call, place: Place, text: str) -> None:
    """Adds a line to a job's log."""
    await scripts.run(call, _NOTE, place.names(), text[:MAX_LINE_CHARACTERS], MAX_LOG_LINES)


async def stop(call: Call, place: Place, state: str, error: str) -> bool:
    """Stops a job that has not ended: none of its shards comes to the lane any more; False = it ended otherwise."""
    arguments = (place.job_id, state, error[:MAX_LINE_CHARACTERS], MAX_LOG_LINES)
    return bool(await scripts.run(call, _STOP, place.names(), *arguments))


async def withdraw(call: Call, record: JobRecord, shards: Sequence[bytes], *, in_hand: bool) -> bool:
    """Takes shards of a stopped job out of the lane; False = it is not stopped any more.

    Args:
        call: The way to Redis.
        record: The job's; of it only what never changes is looked at.
        shards: Index and entry of each, one after the other.
        in_hand: Those that workers hold, too.
    """
    names = [*Place.of(record).names(), keys.lane(record.lane)]
    about = (record.id, keys.GROUP, keys.RELEASED, keys.SUSPECTS, int(in_hand))
    return bool(await scripts.run(call, _WITHDRAW, names, *about, *shards))


def check_change(change: Change) -> None:
    """Raises `TypeError` where a field can't be set: the counts are the scripts' own."""
    for name in change:
        if name not in Change.__annotations__:
            raise TypeError(f"the field {name!r} of a job can't be set")


def record_of(place: Place, fields: Mapping[bytes, bytes]) -> JobRecord:
    """Reads a record.

    Args:
        place: Whose it is.
        fields: Its fields, `about` among them; those that are left out are at their defaults.

    Raises:
        NewerVersion: A newer qinfer wrote it.
    """
    found = {name.decode(): value for name, value in fields.items()}
    about = _ABOUT.decode(found.pop("about"))
    values: dict[str, str | bytes | float] = {"id": place.job_id, "model": place.model, "partition": place.partition}
    values |= msgspec.structs.asdict(about)
    values |= {name: int(found[name]) for name in _COUNTS if name in found}
    values |= {name: int(found[name]) / 1000 for name in _INSTANTS if name in found}
    values |= {name: found[name].decode() for name in _TEXTS if name in found}
    values |= {name: found[name] for name in _BYTES if name in found}
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


async def _finish(call: Call, job_id: str, lease: Lease, outcome: ShardOutcome, what: str, *about: Argument) -> bool:
    lane = lease.entry.lane
    place = Place(lane.model, lane.partition, job_id)
    letters = [keys.dead_letters(lane.model, lane.partition).encode()] if about else []
    error = outcome.error[:MAX_LINE_CHARACTERS]
    text = f"{outcome.rows} {outcome.failed_rows} {int(bool(outcome.error))} {error}"
    entry = (lease.entry.entry_id, outcome.index, what, text)
    arguments = (job_id, keys.GROUP, *entry, MAX_LOG_LINES, TOP_UP_COUNT, *about)
    return bool(await scripts.run(call, _FINISH, [*place.names(), keys.lane(lane), *letters], *arguments))


def _words(fields: Mapping[str, object]) -> list[Argument]:
    """Returns fields and values as a script takes them."""
    words: list[Argument] = []
    for name, value in fields.items():
        if isinstance(value, int | float):
            words += (name, int(value * 1000) if name in _INSTANTS else int(value))
        else:
            assert isinstance(value, str | bytes)
            words += (name, value)
    return words
