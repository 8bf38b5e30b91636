"""Bulk jobs in the queue: records, shards on the way to workers, and their outcomes.

    create ──▶ validating ─▶ planning ──add_shards──▶ running ──finish_shard …──▶ finalizing ─▶ completed
                                │ todo ──advance──▶ bulk1 | bulk2 | bulk3 ──fetch──▶ lease

A *shard* is an entry on a bulk lane of its model version, leased like any entry; its frame is opaque here. The
promises, each with a test in `tests/contract/`:

1. `create` stores a record once; `move` changes an expected state in one step.
2. `add_shards` is idempotent: it adds each shard once, skips shards that succeeded or are in the lane, and works only
   while the job is `planning`. Its argument `complete` makes the job run.
3. A shard is in `todo`, in the lane or settled. `advance` moves shards to the lane in one step, the lowest index
   first; the lane holds at most twice as many as may run. `finish_shard` refills it in the same step.
4. `finish_shard` is the only terminal step of a shard: it removes the entry regardless of its owner, records outcome
   and counts once, and leaves a notice when no shard is left or too many rows failed.
5. A notice is a delivery of kind `JOBS`; a job has at most one unread notice.
6. `stop` ends a job and removes its shards from `todo` and lane; `requeue` makes it run again.
7. Each change increments the record's `revision`.
8. An ended job expires after `kept_s` seconds; other jobs never expire.

A job's keys are in partition 0 of its model, in the slot of its lanes. `missing` names shards whose stream was deleted;
requeue them from the plan.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import msgspec

from qinfer.errors import CorruptEntry
from qinfer.jobs.job import TERMINAL, JobState
from qinfer.jobs.queue.index import JobIndex
from qinfer.jobs.queue.records import (
    MAX_LINE_CHARACTERS,
    MAX_LOG_LINES,
    TOP_UP_COUNT,
    JobAddress,
    JobRecord,
    LogLine,
    Page,
    RecordChange,
    ShardOutcome,
    Standing,
    line_of,
    new_words,
    outcome_of,
    record_of,
    service_order,
    words_of,
)
from qinfer.models.state import OpenRows
from qinfer.queue import keys
from qinfer.queue.connection import Argument
from qinfer.queue.dead_letters import MAX_AGE_S, MAX_BYTES
from qinfer.queue.entries import Entry, Lane, Lease, divided_of
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Call, Script, load_script, run_script, ttl_ms
from qinfer.queue.submitter import PLACING

POLL_S = 0.5

_REQUEUED = frozenset(JobState) - {JobState.VALIDATING, JobState.COMPLETED, JobState.CANCELLING}
_SCAN_COUNT = 1000
_STEP_BYTES = 2**20

_load = partial(load_script, package="qinfer.jobs")
_SHARED = (*PLACING, "deliveries", "job")
_CREATE = _load("create", "now_ms")
_DELETE = _load("delete", *_SHARED)
_FINISH = _load("finish", *_SHARED, "trim_letters")
_KEEP = _load("keep", *_SHARED)
_MISSING = _load("missing", *_SHARED)
_MOVE = _load("move", *_SHARED)
_NOTE = _load("note", *_SHARED)
_PLAN = _load("plan", *_SHARED)
_REPORT = _load("report", *_SHARED)
_STOP = _load("stop", *_SHARED)
_TOP_UP = _load("top_up", *_SHARED)
_WITHDRAW = _load("withdraw", *_SHARED)


class Jobs:
    """Bulk jobs of a connected queue; raises `BrokerUnavailable` if Redis can't be reached."""

    def __init__(self, queue: Queue) -> None:
        self._router = queue.router
        self._durability = queue.durability
        self._clock = queue.clock
        self._places = queue.places
        self._index = JobIndex(queue.router, queue.clock)

    async def create(self, record: JobRecord) -> bool:
        """Stores a job as durably as configured; returns false if its id exists.

        After `BrokerUnavailable` the job may be stored.
        """
        place = JobAddress.from_record(record)
        created_ms = int((record.created_at or self._clock.now_s()) * 1000)
        if not await self._index.add(place, created_ms, record.deadline_at):
            return False
        new = msgspec.structs.replace(record, created_at=created_ms / 1000)
        # identifies this creation, since the script may run twice
        words = (secrets.token_hex(8), *new_words(new, self._places.weigh(new.tenant)))

        async def write(call: Call) -> bool:
            return bool(await run_script(call, _CREATE, [place.record], *words))

        return await self._durability.write(record.model, record.partition, write)

    async def get(self, job_id: str) -> JobRecord | None:
        """Returns a job's record, if it is known."""
        place = await self._index.find(job_id)
        if place is None:
            return None
        found = await self._call_for(place)(b"HGETALL", place.record)
        return record_of(place, dict(zip(found[::2], found[1::2], strict=True))) if found else None

    async def list(
        self,
        tenant: str | None = None,
        state: str | None = None,
        after: str = "",
        count: int = 100,
        wanted: Callable[[JobRecord], bool] = lambda _: True,
    ) -> Page:
        """Returns jobs, the newest first; a page may be short although more follow."""

        def fits(record: JobRecord) -> bool:
            return tenant in (None, record.tenant) and state in (None, record.state) and wanted(record)

        return await self._index.page(self._readable, fits, after, count)

    async def unfinished(self) -> Sequence[JobRecord]:
        """Returns the open jobs in the order of service."""
        return await self._read_open(await self._index.open_ids())

    async def states(self, newest: int = 500) -> Mapping[str, int]:
        """Counts by state all open jobs, and the ended jobs among the `newest`."""
        return await self._index.states(newest)

    async def open_rows(self) -> Sequence[OpenRows]:
        """Returns the remaining work of each open job."""
        return await self._index.open_rows()

    async def models(self) -> Sequence[tuple[str, int]]:
        """Returns the models and partitions that may have open jobs."""
        return await self._index.models()

    async def overdue(self) -> Sequence[JobRecord]:
        """Returns the open jobs whose deadline has passed."""
        return await self._read_open(await self._index.open_ids(due_at=self._clock.now_s()))

    async def move(self, job_id: str, expected: Collection[str], state: str, **change: Unpack[RecordChange]) -> bool:
        """Changes a job's state if the current one is expected; else returns false.

        `running` becomes `finalizing` only when no shard waits or is held. A terminal state also sets `ended_at`,
        starts `kept_s` and queues the webhook; use `stop` to end a `running` job.
        """
        if unknown := change.keys() - RecordChange.__annotations__.keys():
            raise TypeError(f"the field {min(unknown)!r} of a job can't be set")
        place = await self._index.find(job_id)
        if place is None:
            return False
        reopens = state not in TERMINAL and (not TERMINAL.isdisjoint(expected) or "deadline_at" in change)
        if reopens:  # before, so that every open job is listed; after, since a reader may close it in between
            await self._reopen(place)
        moved = bool(await self._run_script(place, _MOVE, job_id, state, len(expected), *expected, *words_of(change)))
        if reopens:
            await self._reopen(place)
        elif moved and state in TERMINAL:
            await self._index.close(job_id)
        return moved

    async def add_shards(
        self, job_id: str, shards: Sequence[tuple[int, bytes]], rows: int = 0, *, complete: bool = False
    ) -> bool:
        """Adds shards (index, frame) to `todo`; adds none and returns false if the job is not `planning`.

        Shards that succeeded or are in the lane are skipped, and failures are forgotten. `complete` makes the job
        `running` and leaves a notice.
        """
        return await self._plan(job_id, shards, rows if complete else None, is_last=complete)

    async def requeue(
        self, job_id: str, shards: Sequence[tuple[int, bytes]], *, expected: Collection[str] = _REQUEUED
    ) -> bool:
        """Runs shards again, settled or not, and thereby the job; returns false if its state is not expected.

        Without shards, the shards in `todo` run. The job is `planning` meanwhile: if the caller dies, it is planned
        again.
        """
        if not await self.move(job_id, expected, JobState.PLANNING):
            return False
        return await self._plan(job_id, shards, None, is_last=True, is_forced=True)

    async def advance(self, job_id: str, *, workers: int = 1) -> Standing | None:
        """Fills a job's lane and returns its standing; allows a new notice."""
        record = await self.get(job_id)
        if record is None:
            return None
        found = await self._run_script(
            JobAddress.from_record(record), _TOP_UP, max(1, workers), TOP_UP_COUNT, keys.GROUP, lane=record.lane
        )
        if found is None:
            return None
        state, moved, waiting, in_lane, has_failed = found
        return Standing(state.decode(), moved, waiting, in_lane, bool(has_failed))

    async def finish_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome) -> bool:
        """Removes a shard's entry and records the outcome; returns false if the outcome does not count."""
        return await self._end_shard("finish", job_id, lease, outcome)

    async def bury_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome, code: str) -> bool:
        """Records a shard as given up and buries its entry in one step; returns false if the lease is lost."""
        lane = lease.entry.lane
        about = (lease.consumer, f"{lane.version}:{lane.name}", code, outcome.error, ttl_ms(MAX_AGE_S), MAX_BYTES)
        return await self._end_shard("bury", job_id, lease, outcome, *about)

    async def drop_shard(self, job_id: str, lease: Lease, index: int) -> None:
        """Removes a shard's entry without an outcome; a running job gets it back in `todo`."""
        await self._end_shard("drop", job_id, lease, ShardOutcome(index, 0))

    async def keep(self, job_id: str, lease: Lease, index: int, was: bytes, now: bytes, line: str = "") -> bool:
        """Replaces the note on a held shard, and logs `line`.

        Does nothing and returns false if the lease was lost or the stored note is not `was`.
        """
        lane = lease.entry.lane
        place = JobAddress(lane.model, lane.partition, job_id)
        about = (index, _place(lease.entry), keys.GROUP, lease.consumer, was, now, line[:MAX_LINE_CHARACTERS])
        return bool(await self._run_script(place, _KEEP, *about, MAX_LOG_LINES, lane=divided_of(lane)[0]))

    async def outcomes(self, job_id: str) -> dict[int, ShardOutcome]:
        """Returns the outcomes of settled shards by index."""
        place = await self._index.find(job_id)
        found: dict[int, ShardOutcome] = {}
        cursor = b"0"
        while place is not None:
            words = (b"HSCAN", place.part("outcomes"), cursor, b"COUNT", _SCAN_COUNT)
            cursor, pairs = await self._call_for(place)(*words)
            for index, text in zip(pairs[::2], pairs[1::2], strict=True):
                found[int(index)] = outcome_of(index, text)
            if cursor == b"0":
                break
        return found

    async def missing(self, job_id: str) -> Sequence[int]:
        """Returns the shards whose stream in the lane was deleted."""
        record = await self.get(job_id)
        if record is None:
            return ()
        place = JobAddress.from_record(record)
        names = [place.part("in_lane"), keys.lane(record.lane)]
        return sorted(map(int, await run_script(self._call_for(place), _MISSING, names)))

    async def note(self, job_id: str, text: str) -> None:
        """Adds a line to a job's log."""
        place = await self._index.find(job_id)
        if place is not None:
            await self._run_script(place, _NOTE, text[:MAX_LINE_CHARACTERS], MAX_LOG_LINES)

    async def log(self, job_id: str) -> Sequence[LogLine]:
        """Returns a job's log, the oldest line first."""
        place = await self._index.find(job_id)
        if place is None:
            return ()
        return [line_of(text) for text in await self._call_for(place)(b"LRANGE", place.part("log"), 0, -1)]

    async def stop(self, job_id: str, state: str, *, error: str = "", in_hand: bool = False) -> bool:
        """Stops an open job: removes its waiting shards, in bounded steps; repeatable.

        `in_hand` takes back the shards that workers hold, too; the workers learn of it at their next renewal. A notice
        follows when the lane is empty. Returns false if the job had ended in another state.
        """
        record = await self.get(job_id)
        if record is None:
            return False
        place = JobAddress.from_record(record)
        if not await self._run_script(place, _STOP, job_id, state, error[:MAX_LINE_CHARACTERS], MAX_LOG_LINES):
            return False
        held = await self._call_for(place)(b"HGETALL", place.part("in_lane"))
        for start in range(0, max(1, len(held)), 2 * TOP_UP_COUNT):
            await self._withdraw(record, held[start : start + 2 * TOP_UP_COUNT], in_hand=in_hand)
        if state in TERMINAL:
            await self._index.close(job_id)
        return True

    async def delete(self, job_id: str) -> bool:
        """Deletes an ended job, or the rest of one; false if it has not ended or is unknown."""
        place = await self._index.find(job_id)
        if place is None:
            return False
        deleted = int(await self._run_script(place, _DELETE))
        if deleted:
            await self._index.remove(job_id)
        return deleted != 0

    async def report(self, job_id: str, lease: Lease, index: int, rows: int, put_off: str = "") -> bool:
        """Records a held shard's scored rows and why it was put off; returns whether it is wanted."""
        place = await self._index.find(job_id)
        if place is None:
            return False
        about = (index, _place(lease.entry), rows, put_off[:MAX_LINE_CHARACTERS], MAX_LOG_LINES)
        return bool(await self._run_script(place, _REPORT, *about))

    async def wait_for_change(self, job_id: str, since: int, timeout_s: float) -> JobRecord | None:
        """Returns a job's record once its `revision` exceeds `since`, or after the timeout."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            revision = await self._field(job_id, b"revision")
            left_s = until_s - loop.time()
            if revision is None or int(revision) > since or left_s <= 0:
                return await self.get(job_id)
            await asyncio.sleep(min(POLL_S, left_s))

    async def _plan(
        self,
        job_id: str,
        shards: Sequence[tuple[int, bytes]],
        rows: int | None,
        *,
        is_last: bool,
        is_forced: bool = False,
    ) -> bool:
        record = await self.get(job_id)
        if record is None:
            return False
        place, parts = JobAddress.from_record(record), list(_parts(shards))
        for number, part in enumerate(parts, 1):
            last = is_last and number == len(parts)
            about = (job_id, keys.GROUP, int(last), int(is_forced), rows if last and rows is not None else "")
            words = [word for shard in part for word in shard]
            if not await self._run_script(place, _PLAN, *about, *words, lane=record.lane):
                return False
        return True

    async def _end_shard(self, what: str, job_id: str, lease: Lease, outcome: ShardOutcome, *about: Argument) -> bool:
        lane = lease.entry.lane
        place = JobAddress(lane.model, lane.partition, job_id)
        letters = [keys.dead_letters(lane.model, lane.partition).encode()] if about else []
        error = outcome.error[:MAX_LINE_CHARACTERS]
        text = f"{outcome.rows} {outcome.failed_rows} {int(bool(outcome.error))} {error}"
        entry = (job_id, keys.GROUP, _place(lease.entry), outcome.index, what, text)
        names = [*place.names(), keys.lane(divided_of(lane)[0]), *letters]
        return bool(
            await run_script(self._call_for(place), _FINISH, names, *entry, MAX_LOG_LINES, TOP_UP_COUNT, *about)
        )

    async def _withdraw(self, record: JobRecord, shards: Sequence[bytes], *, in_hand: bool) -> None:
        about = (record.id, keys.GROUP, keys.RELEASED, keys.SUSPECTS, int(in_hand))
        await self._run_script(JobAddress.from_record(record), _WITHDRAW, *about, *shards, lane=record.lane)

    async def _read_open(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        """Jobs that have ended leave the index of open jobs."""
        found = await asyncio.gather(*map(self._readable, job_ids))
        records = [record for record in found if not isinstance(record, CorruptEntry)]
        for job_id, record in zip(job_ids, found, strict=True):
            if record is None:
                await self._index.drop_unrecorded(job_id)
            elif isinstance(record, JobRecord) and record.is_over:
                await self._index.close(job_id)
                again = await self.get(job_id)
                if again is not None and not again.is_over:  # resumed in between
                    await self._index.open(job_id, again.deadline_at)
        return sorted((record for record in records if record is not None and not record.is_over), key=service_order)

    async def _readable(self, job_id: str) -> JobRecord | CorruptEntry | None:
        """Returns the error for a record that is damaged or of a newer qinfer, which must not hide other records."""
        try:
            return await self.get(job_id)
        except CorruptEntry as error:
            self._index.skip(job_id, error)
            return error

    async def _reopen(self, place: JobAddress) -> None:
        deadline_ms = await self._call_for(place)(b"HGET", place.record, b"deadline_at")
        await self._index.open(place.job_id, int(deadline_ms or 0) / 1000)

    async def _field(self, job_id: str, name: bytes) -> bytes | None:
        place = await self._index.find(job_id)
        return None if place is None else await self._call_for(place)(b"HGET", place.record, name)

    async def _run_script(
        self, place: JobAddress, script: Script, *arguments: Argument, lane: Lane | None = None
    ) -> Any:
        names = [*place.names(), *([keys.lane(lane)] if lane is not None else [])]
        return await run_script(self._call_for(place), script, names, *arguments)

    def _call_for(self, place: JobAddress) -> Call:
        return partial(self._router.call, keys.slot(place.record))


def _place(entry: Entry) -> str:
    _, number = divided_of(entry.lane)
    return f"{entry.entry_id}~{number}" if number else entry.entry_id


def _parts(shards: Sequence[tuple[int, bytes]]) -> Iterator[Sequence[tuple[int, bytes]]]:
    part: list[tuple[int, bytes]] = []
    size = 0
    for shard in shards:
        if part and (len(part) == TOP_UP_COUNT or size + len(shard[1]) > _STEP_BYTES):
            yield part
            part, size = [], 0
        part.append(shard)
        size += len(shard[1])
    yield part
