"""Bulk jobs in the queue: their records, their shards on the way to workers, and what became of these.

    create ──▶ validating ─▶ planning ──plan──▶ running ──finish_shard …──▶ finalizing ─▶ completed
                                │ todo ──advance──▶ bulk1 | bulk2 | bulk3 ──fetch──▶ lease

A *shard* is an entry on one of its model version's bulk lanes, fetched, renewed, released and reclaimed as any entry.
Its frame is opaque here. The promises, each a test in `tests/contract/`:

1. `create` stores a record once; `move` changes a job's state if it is one of those expected, in one step.
2. `plan` is idempotent: it adds each shard once, not one that succeeded or is in the lane, and only while the job is
   `planning`. With `complete` the job runs.
3. A shard is in `todo`, in the lane or settled: `advance` moves it in one step, the lowest index first, at most twice
   as many as may run at a time. `finish_shard` refills the lane in the same step.
4. `finish_shard` is the only terminal step of a shard: it removes the entry, whoever owns it, records the outcome and
   the counts once, and leaves a notice when nothing is left to run or too many rows failed.
5. A notice is a delivery of kind `JOBS`; at most one that was not looked at yet exists for a job.
6. `stop` ends a job and takes its shards out of `todo` and lane, and no other job's; `requeue` makes it run again.
7. Each change raises the record's `revision`.
8. A job that has ended is known for `kept_s` seconds; every other one for ever.

A job's keys are in partition 0 of its model, in the slot of its lanes, but for the index of all jobs (`JobIndex`). A
shard that the queue lost (its stream was deleted) is named by `missing`, to be requeued from the plan.
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
    Change,
    JobRecord,
    LogLine,
    Page,
    Place,
    ShardOutcome,
    Standing,
    line_of,
    new_words,
    outcome_of,
    record_of,
    service_order,
    words_of,
)
from qinfer.models.work import OpenRows
from qinfer.queue import keys
from qinfer.queue.connection import Argument
from qinfer.queue.dead_letters import MAX_AGE_S, MAX_BYTES
from qinfer.queue.entries import Entry, Lane, Lease, divided_of
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Call, Script, load_script, run_script, ttl_ms
from qinfer.queue.submitter import PLACING

POLL_S = 0.5
"""The pause between two looks of `wait_for_change`."""

_REQUEUED = frozenset(JobState) - {JobState.VALIDATING, JobState.COMPLETED, JobState.CANCELLING}
_SCAN_COUNT = 1000  # outcomes read at once
_STEP_BYTES = 2**20  # of frames that are put away in one step

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
    """Bulk jobs; every coroutine raises `BrokerUnavailable` when Redis can't be reached.

    Args:
        queue: The connected queue, of which the shards are entries.
    """

    def __init__(self, queue: Queue) -> None:
        self._router = queue.router
        self._durability = queue.durability
        self._clock = queue.clock
        self._places = queue.places
        self._index = JobIndex(queue.router, queue.clock)

    async def create(self, record: JobRecord) -> bool:
        """Stores a job, as durably as the settings ask; False when there is one of that id.

        Raises:
            QueueFull: The broker has no memory left.
            BrokerUnavailable: It may have been stored.
        """
        place = Place.of(record)
        created_ms = int((record.created_at or self._clock.now_s()) * 1000)
        if not await self._index.add(place, created_ms, record.deadline_at):
            return False
        new = msgspec.structs.replace(record, created_at=created_ms / 1000)
        # The script may run twice: the first word tells this creation from others.
        words = (secrets.token_hex(8), *new_words(new, self._places.weigh(new.tenant)))

        async def write(call: Call) -> bool:
            return bool(await run_script(call, _CREATE, [place.record], *words))

        return await self._durability.write(record.model, record.partition, write)

    async def get(self, job_id: str) -> JobRecord | None:
        """Returns the record of a job; `None` = there is none, or no longer."""
        place = await self._index.find(job_id)
        if place is None:
            return None
        found = await self._call(place)(b"HGETALL", place.record)
        return record_of(place, dict(zip(found[::2], found[1::2], strict=True))) if found else None

    async def list(
        self,
        tenant: str | None = None,
        state: str | None = None,
        after: str = "",
        count: int = 100,
        wanted: Callable[[JobRecord], bool] = lambda _: True,
    ) -> Page:
        """Returns up to `count` jobs, the newest first, of one tenant and in one state where these are given.

        Args:
            tenant: Only this one's jobs; `None` = all.
            state: Only jobs in this state; `None` = all.
            after: The `Page.after` of the page before.
            count: How many at most; a page may be shorter though there are more: `Page.after` tells.
            wanted: Whether a job of these belongs to the listing.

        Raises:
            InvalidRequest: `after` is not what a page said.
        """

        def fits(record: JobRecord) -> bool:
            return tenant in (None, record.tenant) and state in (None, record.state) and wanted(record)

        return await self._index.page(self._readable, fits, after, count)

    async def unfinished(self) -> Sequence[JobRecord]:
        """Returns the jobs that have not ended; those to be served first come first."""
        return await self._open(await self._index.open_ids())

    async def states(self, newest: int = 500) -> Mapping[str, int]:
        """Counts jobs by state: all that have not ended, and of the newest so many those that have."""
        return await self._index.states(newest)

    async def open_rows(self) -> Sequence[OpenRows]:
        """Returns of each job that has not ended what it has yet to do; in a few round trips."""
        return await self._index.open_rows()

    async def models(self) -> Sequence[tuple[str, int]]:
        """Returns the models, with their partitions, that may have jobs which have not ended."""
        return await self._index.models()

    async def overdue(self) -> Sequence[JobRecord]:
        """Returns the jobs that have not ended though their deadline has passed."""
        return await self._open(await self._index.open_ids(due_at=self._clock.now_s()))

    async def move(self, job_id: str, expected: Collection[str], state: str, **change: Unpack[Change]) -> bool:
        """Changes a job's state if it is one of those expected; False otherwise, or when it is unknown.

        From `running` it becomes `finalizing` only if none of its shards waits or is in hand.

        A state that ends it also sets `ended_at`, begins `kept_s`, and has its webhook told. From `running` a job is
        ended by `stop`, which takes its shards back.

        Args:
            job_id: The job.
            expected: The states that it may have.
            state: Its new state; it may be the old one, to change nothing but fields.
            change: Fields of the record to be set with it.
        """
        if unknown := change.keys() - Change.__annotations__.keys():  # the counts are the scripts' own
            raise TypeError(f"the field {min(unknown)!r} of a job can't be set")
        place = await self._index.find(job_id)
        if place is None:
            return False
        reopens = state not in TERMINAL and (not TERMINAL.isdisjoint(expected) or "deadline_at" in change)
        if reopens:  # before, so that no job is without; and after, for somebody may see it ended, and close it
            await self._reopen(place)
        moved = bool(await self._run(place, _MOVE, job_id, state, len(expected), *expected, *words_of(change)))
        if reopens:
            await self._reopen(place)
        elif moved and state in TERMINAL:
            await self._index.close(job_id)
        return moved

    async def plan(
        self, job_id: str, shards: Sequence[tuple[int, bytes]], rows: int = 0, *, complete: bool = False
    ) -> bool:
        """Adds shards, index and frame, to what is to be run; for many, call it again and again.

        Shards that succeeded before or are in the lane are left out; the outcome of one that failed is forgotten.

        Args:
            job_id: The job.
            shards: Some of its shards, or none.
            rows: With `complete`: how many rows the job has.
            complete: They were the last: the job becomes `running`. A notice is left, so that its lane is filled.

        Returns:
            False when the job is not `planning`: nothing was done.
        """
        return await self._plan(job_id, shards, rows if complete else None, is_last=complete)

    async def requeue(
        self, job_id: str, shards: Sequence[tuple[int, bytes]], *, expected: Collection[str] = _REQUEUED
    ) -> bool:
        """Has shards run though they may have been settled, and their job with them; the counts follow.

        For a part that is broken, and a shard that is `missing`. While they are added the job is `planning`: where the
        caller dies meanwhile, it is to be planned again.

        Args:
            job_id: The job.
            shards: Index and frame of each; none = those that wait, if any.
            expected: The states that the job may have.

        Returns:
            False when the job has another state, or is unknown: nothing was done.
        """
        if not await self.move(job_id, expected, JobState.PLANNING):
            return False
        return await self._plan(job_id, shards, None, is_last=True, is_forced=True)

    async def advance(self, job_id: str, *, workers: int = 1) -> Standing | None:
        """Fills the lane of one job, and tells where it stands; from now on its next notice is a new one.

        Args:
            job_id: The job.
            workers: How many workers live for its model version, at least one is reckoned with; counts where the job
                has no `max_parallel`.

        Returns:
            `None` when the job is unknown.
        """
        record = await self.get(job_id)
        if record is None:
            return None
        found = await self._run(Place.of(record), _TOP_UP, max(1, workers), TOP_UP_COUNT, keys.GROUP, lane=record.lane)
        if found is None:
            return None
        state, moved, waiting, in_lane, has_failed = found
        return Standing(state.decode(), moved, waiting, in_lane, bool(has_failed))

    async def finish_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome) -> bool:
        """Ends a shard: removes its entry in any case, and records the outcome if it is the first and the job lives.

        Returns:
            False when another has ended it, or the job is over or unknown: nothing was counted.
        """
        return await self._end_shard("finish", job_id, lease, outcome)

    async def bury_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome, code: str) -> bool:
        """Gives a shard up, as `finish_shard` finishes one: its entry goes to the dead letters in the same step.

        Args:
            job_id: The job; also the dead letter's request id.
            lease: The shard; its owner must still be this one.
            outcome: Its outcome; `error` is also the dead letter's reason.
            code: The dead letter's error code.

        Returns:
            False when the entry is gone or another's: nothing was done.
        """
        lane = lease.entry.lane
        about = (lease.consumer, f"{lane.version}:{lane.name}", code, outcome.error, ttl_ms(MAX_AGE_S), MAX_BYTES)
        return await self._end_shard("bury", job_id, lease, outcome, *about)

    async def drop_shard(self, job_id: str, lease: Lease, index: int) -> None:
        """Removes a shard's entry without an outcome; if its job wants it (again), it waits in `todo` as before."""
        await self._end_shard("drop", job_id, lease, ShardOutcome(index, 0))

    async def keep(self, job_id: str, lease: Lease, index: int, was: bytes, now: bytes, line: str = "") -> bool:
        """Notes what is known of a shard that is being run, until the shard ends.

        Args:
            job_id: The job.
            lease: The lease on the shard.
            index: The shard.
            was: The text that its owner has read, or noted last; empty = there was no text.
            now: The new text.
            line: A line for the job's log; empty = no line.

        Returns:
            False when the lease is another's, or more is known than its owner has read: nothing was done.
        """
        lane = lease.entry.lane
        place = Place(lane.model, lane.partition, job_id)
        about = (index, _place(lease.entry), keys.GROUP, lease.consumer, was, now, line[:MAX_LINE_CHARACTERS])
        return bool(await self._run(place, _KEEP, *about, MAX_LOG_LINES, lane=divided_of(lane)[0]))

    async def outcomes(self, job_id: str) -> dict[int, ShardOutcome]:
        """Returns the outcomes of a job's settled shards by index."""
        place = await self._index.find(job_id)
        found: dict[int, ShardOutcome] = {}
        cursor = b"0"
        while place is not None:
            words = (b"HSCAN", place.part("outcomes"), cursor, b"COUNT", _SCAN_COUNT)
            cursor, pairs = await self._call(place)(*words)
            for index, text in zip(pairs[::2], pairs[1::2], strict=True):
                found[int(index)] = outcome_of(index, text)
            if cursor == b"0":
                break
        return found

    async def missing(self, job_id: str) -> Sequence[int]:
        """Returns which shards should be in the lane and are not: their stream was deleted. They are to be requeued."""
        record = await self.get(job_id)
        if record is None:
            return ()
        place = Place.of(record)
        names = [place.part("in_lane"), keys.lane(record.lane)]
        return sorted(map(int, await run_script(self._call(place), _MISSING, names)))

    async def note(self, job_id: str, text: str) -> None:
        """Adds a line to a job's log; the oldest of more than `MAX_LOG_LINES` go. An unknown job has no log."""
        place = await self._index.find(job_id)
        if place is not None:
            await self._run(place, _NOTE, text[:MAX_LINE_CHARACTERS], MAX_LOG_LINES)

    async def log(self, job_id: str) -> Sequence[LogLine]:
        """Returns a job's log, the oldest line first."""
        place = await self._index.find(job_id)
        if place is None:
            return ()
        return [line_of(text) for text in await self._call(place)(b"LRANGE", place.part("log"), 0, -1)]

    async def stop(self, job_id: str, state: str, *, error: str = "", in_hand: bool = False) -> bool:
        """Stops a job that has not ended: takes what waits of it out of `todo` and lane, in bounded steps.

        Repeat it when it fails: it goes on where it stopped. A notice is left when nothing of the job is in the lane.

        Args:
            job_id: The job.
            state: Its new state: `cancelling`, or one that ends it.
            error: Why it ended, for its record and log.
            in_hand: Take back what workers hold, too: they learn it at their next renewal.

        Returns:
            False when the job had ended in another state, or is unknown: nothing was done.
        """
        record = await self.get(job_id)
        if record is None:
            return False
        place = Place.of(record)
        if not await self._run(place, _STOP, job_id, state, error[:MAX_LINE_CHARACTERS], MAX_LOG_LINES):
            return False
        held = await self._call(place)(b"HGETALL", place.part("in_lane"))
        for start in range(0, max(1, len(held)), 2 * TOP_UP_COUNT):
            await self._withdraw(record, held[start : start + 2 * TOP_UP_COUNT], in_hand=in_hand)
        if state in TERMINAL:
            await self._index.close(job_id)
        return True

    async def delete(self, job_id: str) -> bool:
        """Forgets a job that has ended, or whose time was over; False when it has not ended, or is unknown."""
        place = await self._index.find(job_id)
        if place is None:
            return False
        deleted = int(await self._run(place, _DELETE))
        if deleted:
            await self._index.remove(job_id)
        return deleted > 0

    async def report(self, job_id: str, lease: Lease, index: int, rows: int, put_off: str = "") -> bool:
        """Notes how many rows are scored of a shard that is being run, until the shard ends or is reported again.

        Args:
            job_id: The job.
            lease: The lease on the shard.
            index: The shard.
            rows: How many; 0 = it is not being run any more.
            put_off: Why the shard can't go on now, which the job's log says too; empty with rows = it goes on.

        Returns:
            Whether the shard is worth being run: the job is `running`, or about to be again.
        """
        place = await self._index.find(job_id)
        if place is None:
            return False
        about = (index, _place(lease.entry), rows, put_off[:MAX_LINE_CHARACTERS], MAX_LOG_LINES)
        return bool(await self._run(place, _REPORT, *about))

    async def wait_for_change(self, job_id: str, since: int, timeout_s: float) -> JobRecord | None:
        """Waits until a job's `revision` is above `since`, and returns its record then, or after the timeout.

        Redis is asked twice a second: a waiter costs two short reads a second, and sees a change so late.

        Returns:
            `None` when the job is unknown.
        """
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
        place, parts = Place.of(record), list(_parts(shards))
        for number, part in enumerate(parts, 1):
            last = is_last and number == len(parts)
            about = (job_id, keys.GROUP, int(last), int(is_forced), rows if last and rows is not None else "")
            words = [word for shard in part for word in shard]
            if not await self._run(place, _PLAN, *about, *words, lane=record.lane):
                return False
        return True

    async def _end_shard(self, what: str, job_id: str, lease: Lease, outcome: ShardOutcome, *about: Argument) -> bool:
        """Ends a shard as `finish.lua` says; `about` is what only a shard that is buried has."""
        lane = lease.entry.lane
        place = Place(lane.model, lane.partition, job_id)
        letters = [keys.dead_letters(lane.model, lane.partition).encode()] if about else []
        error = outcome.error[:MAX_LINE_CHARACTERS]
        text = f"{outcome.rows} {outcome.failed_rows} {int(bool(outcome.error))} {error}"
        entry = (job_id, keys.GROUP, _place(lease.entry), outcome.index, what, text)
        names = [*place.names(), keys.lane(divided_of(lane)[0]), *letters]
        return bool(await run_script(self._call(place), _FINISH, names, *entry, MAX_LOG_LINES, TOP_UP_COUNT, *about))

    async def _withdraw(self, record: JobRecord, shards: Sequence[bytes], *, in_hand: bool) -> None:
        """Takes shards, index and entry of each, of a stopped job out of the lane; with `in_hand` also held ones."""
        about = (record.id, keys.GROUP, keys.RELEASED, keys.SUSPECTS, int(in_hand))
        await self._run(Place.of(record), _WITHDRAW, *about, *shards, lane=record.lane)

    async def _open(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        """Returns the jobs that have not ended; the others leave the index of open ones."""
        found = await asyncio.gather(*map(self._readable, job_ids))
        records = [record for record in found if not isinstance(record, CorruptEntry)]
        for job_id, record in zip(job_ids, found, strict=True):
            if record is None:
                await self._index.forget(job_id)
            elif isinstance(record, JobRecord) and record.is_over:
                await self._index.close(job_id)
                again = await self.get(job_id)
                if again is not None and not again.is_over:  # it was resumed in this moment
                    await self._index.open(job_id, again.deadline_at)
        return sorted((record for record in records if record is not None and not record.is_over), key=service_order)

    async def _readable(self, job_id: str) -> JobRecord | CorruptEntry | None:
        """Returns what is known of a job, one of many: that it is damaged, or a newer qinfer's, hides no other."""
        try:
            return await self.get(job_id)
        except CorruptEntry as error:
            self._index.skip(job_id, error)
            return error

    async def _reopen(self, place: Place) -> None:
        """Notes the deadline of a job that has not ended, or goes on."""
        deadline_ms = await self._call(place)(b"HGET", place.record, b"deadline_at")
        await self._index.open(place.job_id, int(deadline_ms or 0) / 1000)

    async def _field(self, job_id: str, name: bytes) -> bytes | None:
        place = await self._index.find(job_id)
        return None if place is None else await self._call(place)(b"HGET", place.record, name)

    async def _run(self, place: Place, script: Script, *arguments: Argument, lane: Lane | None = None) -> Any:
        """Runs a script that has the keys of a job, and where it is given the lane of its shards."""
        names = [*place.names(), *([keys.lane(lane)] if lane is not None else [])]
        return await run_script(self._call(place), script, names, *arguments)

    def _call(self, place: Place) -> Call:
        return partial(self._router.call, keys.slot(place.record))


def _place(entry: Entry) -> str:
    """Returns the place of a shard's entry in its lane; see job.lua."""
    _, number = divided_of(entry.lane)
    return f"{entry.entry_id}~{number}" if number else entry.entry_id


def _parts(shards: Sequence[tuple[int, bytes]]) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Cuts shards into groups of which each is put away in one step; there is at least one."""
    part: list[tuple[int, bytes]] = []
    size = 0
    for shard in shards:
        if part and (len(part) == TOP_UP_COUNT or size + len(shard[1]) > _STEP_BYTES):
            yield part
            part, size = [], 0
        part.append(shard)
        size += len(shard[1])
    yield part
