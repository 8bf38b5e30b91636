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
import logging
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.errors import CorruptEntry, InvalidRequest
from qinfer.jobs.job import TERMINAL, JobState
from qinfer.jobs.queue import records
from qinfer.jobs.queue.records import JobAddress, JobRecord, LogLine, Page, RecordChange, ShardOutcome, Standing
from qinfer.models.state import OpenRows
from qinfer.queue import keys
from qinfer.queue.connection import Argument
from qinfer.queue.dead_letters import MAX_AGE_S, MAX_BYTES
from qinfer.queue.entries import Entry, Lane, Lease, divided_of
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Call, Router, load_script, run_script, ttl_ms
from qinfer.queue.submitter import PLACING

logger = logging.getLogger(__name__)

POLL_S = 0.5

TOP_UP_COUNT = 200
"""The most shards that one script moves or stores."""
MAX_LOG_LINES = 200
MAX_LINE_CHARACTERS = 2000

Frames = Sequence[tuple[int, bytes]]
"""Shards: index and ticket."""

_REQUEUED = frozenset(JobState) - {JobState.VALIDATING, JobState.COMPLETED, JobState.CANCELLING}
_FOLLOWING: dict[str, JobState] = {JobState.RUNNING: JobState.FINALIZING, JobState.CANCELLING: JobState.CANCELLED}
_SCAN_COUNT = 1000
_OPEN_FIELDS = tuple(b"about state rows rows_done rows_failed rows_before started_at resumed_at".split())
_STEP_BYTES = 2**20

_SHARED = (*PLACING, "deliveries", "job")
_load = partial(load_script, package="qinfer.jobs")
_CREATE, _FINISH = _load("create", "now_ms"), _load("finish", *_SHARED, "trim_letters")
_SCRIPTS = {
    name: _load(name, *_SHARED)
    for name in ("delete", "keep", "missing", "move", "note", "plan", "report", "stop", "top_up", "withdraw")
}
_CREATION_S = 60.0
_MOST_SKIPPED = 1000
_JOBS, _OPEN, _PLACES = keys.jobs().encode(), keys.open_jobs().encode(), keys.job_places().encode()
# The most reads for a page: a page with few matches ends before it is full.
_LOOKS = 10
_PAGE = 100
_CURSOR = re.compile(r"([0-9]{1,15})-(.+)")
_TOGETHER = 20
_PAGE_BYTES = 8 * 2**20


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
        words = (secrets.token_hex(8), *records.new_words(new, self._places.weigh(new.tenant)))

        async def write(call: Call) -> bool:
            return bool(await run_script(call, _CREATE, [place.record], *words))

        return await self._durability.write(record.model, record.partition, write)

    async def get(self, job_id: str) -> JobRecord | None:
        """Returns a job's record, if it is known."""
        place = await self._index.find(job_id)
        if place is None:
            return None
        found = await self._call_for(place)(b"HGETALL", place.record)
        return records.record_of(place, dict(zip(found[::2], found[1::2], strict=True))) if found else None

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
        words = (job_id, state, len(expected), *expected, *records.words_of(change))
        moved = bool(await self._run_script(place, "move", *words))
        if reopens:
            await self._reopen(place)
        elif moved and state in TERMINAL:
            await self._index.close(job_id)
        return moved

    async def add_shards(self, job_id: str, shards: Frames, rows: int = 0, *, complete: bool = False) -> bool:
        """Adds shards (index, frame) to `todo`; adds none and returns false if the job is not `planning`.

        Shards that succeeded or are in the lane are skipped, and failures are forgotten. `complete` makes the job
        `running` and leaves a notice.
        """
        return await self._plan(job_id, shards, rows if complete else None, is_last=complete)

    async def requeue(self, job_id: str, shards: Frames, *, expected: Collection[str] = _REQUEUED) -> bool:
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
            JobAddress.from_record(record), "top_up", max(1, workers), TOP_UP_COUNT, keys.GROUP, lane=record.lane
        )
        if found is None:
            return None
        state, moved, waiting, in_lane, has_failed = found
        return Standing(state.decode(), moved, waiting, in_lane, bool(has_failed))

    async def settle(self, record: JobRecord, standing: Standing) -> str:
        """Moves a job without shards left, or with too many failed rows, to its next state; returns its state."""
        if standing.state == JobState.RUNNING and standing.has_failed:
            error = records.why_failed((await self.outcomes(record.id)).values(), record.max_errors, record.shards)
            await self.stop(record.id, JobState.FAILED, error=error, in_hand=True)
            return JobState.FAILED
        following = _FOLLOWING.get(standing.state)
        if following and standing.is_settled and await self.move(record.id, {standing.state}, following):
            logger.info("job state changed", extra={"job_id": record.id, "state": following})
            return following
        return standing.state

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
        return bool(await self._run_script(place, "keep", *about, MAX_LOG_LINES, lane=divided_of(lane)[0]))

    async def outcomes(self, job_id: str) -> dict[int, ShardOutcome]:
        """Returns the outcomes of settled shards by index."""
        place = await self._index.find(job_id)
        found: dict[int, ShardOutcome] = {}
        cursor = b"0"
        while place is not None:
            words = (b"HSCAN", place.part("outcomes"), cursor, b"COUNT", _SCAN_COUNT)
            cursor, pairs = await self._call_for(place)(*words)
            for index, text in zip(pairs[::2], pairs[1::2], strict=True):
                found[int(index)] = records.outcome_of(index, text)
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
        return sorted(map(int, await run_script(self._call_for(place), _SCRIPTS["missing"], names)))

    async def note(self, job_id: str, text: str) -> None:
        """Adds a line to a job's log."""
        place = await self._index.find(job_id)
        if place is not None:
            await self._run_script(place, "note", text[:MAX_LINE_CHARACTERS], MAX_LOG_LINES)

    async def log(self, job_id: str) -> Sequence[LogLine]:
        """Returns a job's log, the oldest line first."""
        place = await self._index.find(job_id)
        if place is None:
            return ()
        return [records.line_of(text) for text in await self._call_for(place)(b"LRANGE", place.part("log"), 0, -1)]

    async def stop(self, job_id: str, state: str, *, error: str = "", in_hand: bool = False) -> bool:
        """Stops an open job: removes its waiting shards, in bounded steps; repeatable.

        `in_hand` takes back the shards that workers hold, too; the workers learn of it at their next renewal. A notice
        follows when the lane is empty. Returns false if the job had ended in another state.
        """
        record = await self.get(job_id)
        if record is None:
            return False
        place = JobAddress.from_record(record)
        if not await self._run_script(place, "stop", job_id, state, error[:MAX_LINE_CHARACTERS], MAX_LOG_LINES):
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
        deleted = int(await self._run_script(place, "delete"))
        if deleted:
            await self._index.remove(job_id)
        return deleted != 0

    async def report(self, job_id: str, lease: Lease, index: int, rows: int, put_off: str = "") -> bool:
        """Records a held shard's scored rows and why it was put off; returns whether it is wanted."""
        place = await self._index.find(job_id)
        if place is None:
            return False
        about = (index, _place(lease.entry), rows, put_off[:MAX_LINE_CHARACTERS], MAX_LOG_LINES)
        return bool(await self._run_script(place, "report", *about))

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
        self, job_id: str, shards: Frames, rows: int | None, *, is_last: bool, is_forced: bool = False
    ) -> bool:
        record = await self.get(job_id)
        if record is None:
            return False
        place, parts = JobAddress.from_record(record), list(_parts(shards))
        for number, part in enumerate(parts, 1):
            last = is_last and number == len(parts)
            about = (job_id, keys.GROUP, int(last), int(is_forced), rows if last and rows is not None else "")
            words = [word for shard in part for word in shard]
            if not await self._run_script(place, "plan", *about, *words, lane=record.lane):
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
        await self._run_script(JobAddress.from_record(record), "withdraw", *about, *shards, lane=record.lane)

    async def _read_open(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        """Jobs that have ended leave the index of open jobs."""
        found = await asyncio.gather(*map(self._readable, job_ids))
        for job_id, record in zip(job_ids, found, strict=True):
            if record is None:
                await self._index.drop_unrecorded(job_id)
            elif isinstance(record, JobRecord) and record.is_over:
                await self._index.close(job_id)
                again = await self.get(job_id)
                if again is not None and not again.is_over:  # resumed in between
                    await self._index.open(job_id, again.deadline_at)
        still = [record for record in found if isinstance(record, JobRecord) and not record.is_over]
        return sorted(still, key=lambda record: (record.priority, record.created_at, record.id))

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

    async def _run_script(self, place: JobAddress, script: str, *arguments: Argument, lane: Lane | None = None) -> Any:
        names = [*place.names(), *([keys.lane(lane)] if lane is not None else [])]
        return await run_script(self._call_for(place), _SCRIPTS[script], names, *arguments)

    def _call_for(self, place: JobAddress) -> Call:
        return partial(self._router.call, keys.slot(place.record))


def _place(entry: Entry) -> str:
    _, number = divided_of(entry.lane)
    return f"{entry.entry_id}~{number}" if number else entry.entry_id


def _parts(shards: Frames) -> Iterator[Frames]:
    part: list[tuple[int, bytes]] = []
    size = 0
    for shard in shards:
        if part and (len(part) == TOP_UP_COUNT or size + len(shard[1]) > _STEP_BYTES):
            yield part
            part, size = [], 0
        part.append(shard)
        size += len(shard[1])
    yield part


class JobIndex:
    """The keys by which `Jobs` finds jobs: by creation, open jobs by deadline, and the place of each job's keys.

    They are in other slots than the jobs, so they may list ended jobs and jobs without a record. Readers remove such
    jobs; they remove a job without a record once it is older than a creation can take.
    """

    def __init__(self, router: Router, clock: ServerClock) -> None:
        self._router = router
        self._clock = clock
        self._skipped: set[str] = set()

    async def add(self, place: JobAddress, created_ms: int, deadline_at: float) -> bool:
        """Adds an open job; returns false if another model has its id. An id without a record is freed."""
        where = f"{place.partition} {place.model}".encode()
        if not await self._send_command(b"HSETNX", _PLACES, place.job_id, where):
            known = await self.find(place.job_id)
            if known is not None and not await self._send_command(b"EXISTS", known.record):
                await self.drop_unrecorded(place.job_id)
                await self._send_command(b"HSETNX", _PLACES, place.job_id, where)
                known = await self.find(place.job_id)
            if known != place:
                return False
        await self._send_command(b"ZADD", _JOBS, b"NX", created_ms, place.job_id)
        await self.open(place.job_id, deadline_at)
        return True

    async def find(self, job_id: str) -> JobAddress | None:
        """Returns a job's location."""
        (place,) = await self._find_all([job_id])
        return place

    async def _find_all(self, job_ids: Sequence[str]) -> list[JobAddress | None]:
        """Reads the addresses without a cache, since an id may be used again for another model."""
        if not job_ids:
            return []
        found = await self._send_command(b"HMGET", _PLACES, *job_ids)
        return [where and _address(job_id, where) for job_id, where in zip(job_ids, found, strict=True)]

    async def open(self, job_id: str, deadline_at: float) -> None:
        """Marks a job as open, with its deadline (0 = none)."""
        await self._send_command(b"ZADD", _OPEN, int(deadline_at * 1000) if deadline_at else b"+inf", job_id)

    async def close(self, job_id: str) -> None:
        """Marks a job as ended."""
        await self._send_command(b"ZREM", _OPEN, job_id)

    async def open_ids(self, *, due_at: float | None = None) -> Sequence[str]:
        """Returns the jobs that may be open, all or those due."""
        end = b"+inf" if due_at is None else int(due_at * 1000)
        return [found.decode() for found in await self._send_command(b"ZRANGEBYSCORE", _OPEN, b"-inf", end)]

    async def models(self) -> Sequence[tuple[str, int]]:
        """Returns the models and partitions with open jobs."""
        places = await self._find_all(await self.open_ids())
        return list(dict.fromkeys(place[:2] for place in places if place is not None))

    async def states(self, newest: int) -> Mapping[str, int]:
        """Counts jobs by state: all open jobs, and the ended jobs among the `newest`."""
        words = (b"ZREVRANGE", _JOBS, 0, newest - 1)
        open_ids, latest = await asyncio.gather(self.open_ids(), self._send_command(*words))
        ids = list(dict.fromkeys([*open_ids, *(job_id.decode() for job_id in latest)]))
        places = [place for place in await self._find_all(ids) if place is not None]
        states = await asyncio.gather(*(self._send_command(b"HGET", place.record, b"state") for place in places))
        return Counter(state.decode() for state in states if state is not None)

    async def open_rows(self) -> Sequence[OpenRows]:
        """Returns the remaining work of each open job."""
        places = await self._find_all(await self.open_ids())
        known = [place for place in places if place is not None]
        read = await asyncio.gather(*(self._send_command(b"HMGET", place.record, *_OPEN_FIELDS) for place in known))
        now_s = self._clock.now_s()
        found: list[OpenRows] = []
        for place, values in zip(known, read, strict=True):
            if values[0] is None:
                continue
            try:
                record = records.record_of(place, dict(zip(_OPEN_FIELDS, values, strict=True)))
            except CorruptEntry as error:
                self.skip(place.job_id, error)
                continue
            if not record.is_over:
                found.append(records.open_rows(record, now_s))
        return found

    async def page(
        self,
        read: Callable[[str], Awaitable[JobRecord | CorruptEntry | None]],
        fits: Callable[[JobRecord], bool],
        after: str,
        count: int,
    ) -> Page:
        """Returns a page of jobs that fit, the newest first."""
        place = place_of(after) if after else None
        found: list[JobRecord] = []
        left_bytes = _PAGE_BYTES
        for _ in range(_LOOKS):
            pairs, is_last = await self._behind(place)
            for start in range(0, len(pairs), _TOGETHER):
                some = pairs[start : start + _TOGETHER]
                found_here = await asyncio.gather(*(read(job_id) for _, job_id in some))
                for place, record in zip(some, found_here, strict=True):
                    if record is None:
                        await self.drop_unrecorded(place[1], place[0])
                    elif isinstance(record, JobRecord) and fits(record):
                        found.append(record)
                        left_bytes -= len(record.spec)
                    if len(found) == count or left_bytes < 0:
                        return Page(found, cursor_of(*place))
            if is_last:
                return Page(found, "")
        return Page(found, cursor_of(*place) if place is not None else "")

    def skip(self, job_id: str, error: CorruptEntry) -> None:
        """Logs an unreadable job once."""
        if job_id not in self._skipped:
            if len(self._skipped) >= _MOST_SKIPPED:
                self._skipped.clear()
            self._skipped.add(job_id)
            logger.error("job unreadable", extra={"job": job_id, "reason": error.message})

    async def drop_unrecorded(self, job_id: str, created_ms: int | None = None) -> None:
        """Removes a job without a record, unless it may be just being created."""
        if created_ms is None:
            score = await self._send_command(b"ZSCORE", _JOBS, job_id)
            if score is None:
                return
            created_ms = int(float(score))
        if created_ms / 1000 < self._clock.now_s() - _CREATION_S:
            await self.remove(job_id)

    async def remove(self, job_id: str) -> None:
        """Removes a job."""
        await self.close(job_id)
        await self._send_command(b"ZREM", _JOBS, job_id)
        await self._send_command(b"HDEL", _PLACES, job_id)

    async def _behind(self, place: tuple[int, str] | None) -> tuple[list[tuple[int, str]], bool]:
        start = b"+inf" if place is None else place[0]
        skipped = 0
        while True:
            words = (b"ZREVRANGEBYSCORE", _JOBS, start, b"-inf", b"WITHSCORES", b"LIMIT", skipped, _PAGE)
            found = await self._send_command(*words)
            pairs = [
                (int(float(score)), job_id.decode()) for job_id, score in zip(found[::2], found[1::2], strict=True)
            ]
            older = [pair for pair in pairs if place is None or pair < place]
            if older or len(pairs) < _PAGE:
                return older, len(pairs) < _PAGE
            skipped += _PAGE

    async def _send_command(self, command: bytes, key: bytes, *words: str | int | bytes) -> Any:
        return await self._router.call(keys.slot(key), command, key, *words)


def _address(job_id: str, where: bytes) -> JobAddress:
    partition, _, model = where.decode().partition(" ")
    return JobAddress(model, int(partition), job_id)


def cursor_of(created_ms: int, job_id: str) -> str:
    """Returns the `after` of the page that follows a job."""
    return f"{created_ms}-{job_id}"


def place_of(after: str) -> tuple[int, str]:
    """Decodes `cursor_of`."""
    found = _CURSOR.fullmatch(after)
    if found is None:
        raise InvalidRequest(
            f"'{after[:60]}' is not the beginning of a page of jobs; pass the 'next' of the previous page"
        )
    return int(found[1]), found[2]
