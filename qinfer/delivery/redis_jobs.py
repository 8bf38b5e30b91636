"""Bulk jobs on Redis: each step is one Lua script, and a job's keys share the slot of its model's lanes (DESIGN.md §3).

create, move, plan, stop, delete, note   job_<step>.lua        advance           job_top_up.lua
finish_shard, bury_shard, drop_shard     job_finish.lua        notices           notices.lua, as of requests

All jobs are in an index: `jobs`, by creation; `open_jobs`, those that may not have ended; `job_places`, their models.
It is in other slots, so that it may name jobs whose record is gone, or that have ended: readers drop these from it.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from qinfer.clock import ServerClock
from qinfer.delivery import keys, scripts
from qinfer.delivery.base import Lease
from qinfer.delivery.connection import Argument
from qinfer.delivery.dead_letters import MAX_AGE_S, MAX_BYTES
from qinfer.delivery.durability import Durability
from qinfer.delivery.job_fields import line_of, outcome_of, outcome_text, record_of, settable, words_of
from qinfer.delivery.job_index import JobIndex, Place
from qinfer.delivery.job_records import (
    ENDED,
    FINALIZING,
    MAX_LINE_CHARACTERS,
    MAX_LOG_LINES,
    MAX_RETRY_S,
    PLANNING,
    RUNNING,
    TOP_UP_COUNT,
    JobNotice,
    JobRecord,
    LogLine,
    OpenRows,
    Page,
    ShardOutcome,
    Standing,
    service_order,
)
from qinfer.delivery.router import Router

POLL_S = 0.5
"""The pause between two looks of `wait_for_change`."""

_CONSUMER_GONE_MS = 3_600_000
_SCAN_COUNT = 1000  # outcomes read at once
_STEP_BYTES = 2**20  # of frames that are put away in one step


class RedisJobs:
    """`Jobs` beside `RedisDelivery`'s lanes.

    Args:
        router: The way to Redis.
        durability: Makes what was created as safe as the settings ask.
        clock: The broker's time.
    """

    def __init__(self, router: Router, durability: Durability, clock: ServerClock) -> None:
        self._router = router
        self._durability = durability
        self._clock = clock
        self._index = JobIndex(router, clock)
        self._looked_at: dict[tuple[str, int], bytes] = {}  # how far in the unconfirmed notices

    async def create(self, record: JobRecord) -> bool:
        """See `Jobs.create`."""
        place = Place(record.model, record.partition, record.id)
        created_ms = int((record.created_at or self._clock.now_s()) * 1000)
        if not await self._index.add(place, created_ms, record.deadline_at):
            return False
        words = [*words_of(record), "created_at", created_ms]
        nonce = secrets.token_hex(8)

        async def write(call: Callable[..., Awaitable[Any]]) -> Any:
            return await scripts.run(call, scripts.JOB_CREATE, [place.record], nonce, *words)

        return bool(await self._durability.write(record.model, record.partition, write))

    async def get(self, job_id: str) -> JobRecord | None:
        """See `Jobs.get`."""
        place = await self._index.find(job_id)
        if place is None:
            return None
        found = await self._call(place)(b"HGETALL", place.record)
        return record_of(job_id, found) if found else None

    async def list(
        self, tenant: str | None = None, state: str | None = None, after: str = "", count: int = 100
    ) -> Page:
        """See `Jobs.list`."""

        def fits(record: JobRecord) -> bool:
            return tenant in (None, record.tenant) and state in (None, record.state)

        return await self._index.page(self.get, fits, after, count)

    async def unfinished(self, *, model: str | None = None) -> Sequence[JobRecord]:
        """See `Jobs.unfinished`."""
        return await self._open(await self._index.open_ids(model=model))

    async def states(self, newest: int = 500) -> Mapping[str, int]:
        """See `Jobs.states`."""
        return await self._index.states(newest)

    async def open_rows(self) -> Sequence[OpenRows]:
        """See `Jobs.open_rows`."""
        return await self._index.open_rows()

    async def models(self) -> Sequence[tuple[str, int]]:
        """See `Jobs.models`."""
        return await self._index.models()

    async def overdue(self) -> Sequence[JobRecord]:
        """See `Jobs.overdue`."""
        return await self._open(await self._index.open_ids(due_at=self._clock.now_s()))

    async def move(self, job_id: str, expected: Collection[str], state: str, **fields: str | bytes | float) -> bool:
        """See `Jobs.move`."""
        words = settable(fields)
        place = await self._index.find(job_id)
        if place is None:
            return False
        arguments = (job_id, state, len(expected), *expected, *words)
        reopens = state not in ENDED and (not ENDED.isdisjoint(expected) or "deadline_at" in fields)
        if reopens:  # before, so that no job is without; and after, for somebody may see it ended, and close it
            await self._reopen(place)
        moved = bool(await self._run(scripts.JOB_MOVE, place, *arguments))
        if reopens:
            await self._reopen(place)
        elif moved and state in ENDED:
            await self._index.close(job_id)
        return moved

    async def plan(
        self, job_id: str, shards: Sequence[tuple[int, bytes]], rows: int = 0, *, complete: bool = False
    ) -> bool:
        """See `Jobs.plan`."""
        return await self._plan(job_id, shards, str(rows) if complete else "", is_last=complete)

    async def requeue(
        self,
        job_id: str,
        shards: Sequence[tuple[int, bytes]],
        *,
        expected: Collection[str] = (PLANNING, RUNNING, FINALIZING, "failed", "cancelled", "expired"),
        deadline_at: float | None = None,
    ) -> bool:
        """See `Jobs.requeue`."""
        fields = {} if deadline_at is None else {"deadline_at": deadline_at}
        if not await self.move(job_id, expected, PLANNING, **fields):
            return False
        return await self._plan(job_id, shards, "", is_last=True, is_forced=True)

    async def advance(self, job_id: str, *, workers: int = 1) -> Standing | None:
        """See `Jobs.advance`."""
        record = await self.get(job_id)
        if record is None:
            return None
        place, lane = Place(record.model, record.partition, job_id), keys.lane(record.lane)
        found = await self._run(scripts.JOB_TOP_UP, place, max(1, workers), TOP_UP_COUNT, more=[lane])
        if found is None:
            return None
        state, moved, waiting, in_lane, has_failed = found
        return Standing(state.decode(), moved, waiting, in_lane, bool(has_failed))

    async def finish_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome) -> bool:
        """See `Jobs.finish_shard`."""
        return await self._finish(job_id, lease, outcome, b"finish")

    async def bury_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome, code: str) -> bool:
        """See `Jobs.bury_shard`."""
        lane = lease.entry.lane
        about = (lease.consumer, f"{lane.version}:{lane.name}", code, outcome.error, int(MAX_AGE_S * 1000), MAX_BYTES)
        return await self._finish(job_id, lease, outcome, b"bury", *about)

    async def drop_shard(self, job_id: str, lease: Lease, index: int) -> None:
        """See `Jobs.drop_shard`."""
        await self._finish(job_id, lease, ShardOutcome(index, 0), b"drop")

    async def outcomes(self, job_id: str) -> dict[int, ShardOutcome]:
        """See `Jobs.outcomes`."""
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
        """See `Jobs.missing`."""
        record = await self.get(job_id)
        if record is None:
            return ()
        place = Place(record.model, record.partition, job_id)
        names = [place.part("in_lane"), keys.lane(record.lane)]
        return sorted(map(int, await scripts.run(self._call(place), scripts.JOB_MISSING, names)))

    async def note(self, job_id: str, text: str) -> None:
        """See `Jobs.note`."""
        place = await self._index.find(job_id)
        if place is not None:
            await self._run(scripts.JOB_NOTE, place, text[:MAX_LINE_CHARACTERS], MAX_LOG_LINES)

    async def log(self, job_id: str) -> Sequence[LogLine]:
        """See `Jobs.log`."""
        place = await self._index.find(job_id)
        if place is None:
            return ()
        return [line_of(text) for text in await self._call(place)(b"LRANGE", place.part("log"), 0, -1)]

    async def stop(self, job_id: str, state: str, *, error: str = "", in_hand: bool = False) -> bool:
        """See `Jobs.stop`."""
        record = await self.get(job_id)
        if record is None:
            return False
        place, lane = Place(record.model, record.partition, job_id), keys.lane(record.lane)
        said = error[:MAX_LINE_CHARACTERS]
        if not await self._run(scripts.JOB_STOP, place, job_id, state, said, MAX_LOG_LINES):
            return False
        held = await self._call(place)(b"HGETALL", place.part("in_lane"))
        arguments = (job_id, keys.GROUP, keys.RELEASED, keys.SUSPECTS, int(in_hand))
        for start in range(0, max(1, len(held)), 2 * TOP_UP_COUNT):
            part = held[start : start + 2 * TOP_UP_COUNT]
            await self._run(scripts.JOB_WITHDRAW, place, *arguments, *part, more=[lane])
        if state in ENDED:
            await self._index.close(job_id)
        return True

    async def delete(self, job_id: str) -> bool:
        """See `Jobs.delete`."""
        place = await self._index.find(job_id)
        if place is None:
            return False
        deleted = await self._run(scripts.JOB_DELETE, place)
        if deleted:
            await self._index.remove(job_id)
        return bool(deleted == 1)

    async def is_wanted(self, job_id: str) -> bool:
        """See `Jobs.is_wanted`."""
        return await self._field(job_id, b"state") in {RUNNING.encode(), PLANNING.encode()}

    async def wait_for_change(self, job_id: str, since: int, timeout_s: float) -> JobRecord | None:
        """See `Jobs.wait_for_change`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            revision = await self._field(job_id, b"revision")
            left_s = until_s - loop.time()
            if revision is None or int(revision) > since or left_s <= 0:
                return await self.get(job_id)
            await asyncio.sleep(min(POLL_S, left_s))

    async def notices(
        self, model: str, partition: int, consumer: str, count: int, *, retry_s: float = 1.0
    ) -> Sequence[JobNotice]:
        """See `Jobs.notices`."""
        name = keys.job_notices(model, partition).encode()
        start = self._looked_at.get((model, partition), b"-")
        times = int(retry_s * 1000), int(MAX_RETRY_S * 1000)
        arguments = (keys.JANITORS, consumer, count, *times, start, _CONSUMER_GONE_MS)
        next_start, found = await scripts.run(
            partial(self._router.call, keys.slot(name)), scripts.NOTICES, [name], *arguments
        )
        self._looked_at[model, partition] = next_start
        return [
            JobNotice(notice_id.decode(), model, partition, job_id.decode(), deliveries)
            for notice_id, job_id, deliveries, *_ in found
        ]

    async def confirm(self, notice: JobNotice) -> None:
        """See `Jobs.confirm`."""
        name = keys.job_notices(notice.model, notice.partition).encode()
        call = partial(self._router.call, keys.slot(name))
        await scripts.run(call, scripts.FINISH, [name], keys.JANITORS, notice.id)

    async def _plan(
        self, job_id: str, shards: Sequence[tuple[int, bytes]], rows: str, *, is_last: bool, is_forced: bool = False
    ) -> bool:
        record = await self.get(job_id)
        if record is None:
            return False
        place, lane = Place(record.model, record.partition, job_id), keys.lane(record.lane)
        parts = list(_parts(shards))
        for number, part in enumerate(parts, 1):
            last = is_last and number == len(parts)
            arguments = (job_id, keys.GROUP, int(last), int(is_forced), rows if last else "")
            words = [word for shard in part for word in shard]
            if not await self._run(scripts.JOB_PLAN, place, *arguments, *words, more=[lane]):
                return False
        return True

    async def _finish(self, job_id: str, lease: Lease, outcome: ShardOutcome, what: bytes, *about: Argument) -> bool:
        lane = lease.entry.lane
        place = Place(lane.model, lane.partition, job_id)
        names = [keys.lane(lane), *([keys.dead_letters(lane.model, lane.partition).encode()] if about else [])]
        entry = (lease.entry.entry_id, outcome.index, what, outcome_text(outcome))
        arguments = (job_id, keys.GROUP, *entry, MAX_LOG_LINES, TOP_UP_COUNT, *about)
        return bool(await self._run(scripts.JOB_FINISH, place, *arguments, more=names))

    async def _open(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        """Returns the jobs that have not ended; the others leave the index of open ones."""
        records = await asyncio.gather(*map(self.get, job_ids))
        for job_id, record in zip(job_ids, records, strict=True):
            if record is None:
                await self._index.forget(job_id)
            elif record.is_over:
                await self._index.close(job_id)
                again = await self.get(job_id)
                if again is not None and not again.is_over:  # it was resumed in this moment
                    await self._index.open(job_id, again.deadline_at)
        return sorted((record for record in records if record is not None and not record.is_over), key=service_order)

    async def _reopen(self, place: Place) -> None:
        """Notes the deadline of a job that has not ended, or goes on."""
        deadline_ms = await self._call(place)(b"HGET", place.record, b"deadline_at")
        await self._index.open(place.job_id, int(deadline_ms or 0) / 1000)

    async def _field(self, job_id: str, name: bytes) -> bytes | None:
        place = await self._index.find(job_id)
        return None if place is None else await self._call(place)(b"HGET", place.record, name)

    async def _run(self, script: scripts.Script, place: Place, *arguments: Argument, more: Sequence[bytes] = ()) -> Any:
        """Runs a script that has the keys of a job first."""
        return await scripts.run(self._call(place), script, [*place.names(), *more], *arguments)

    def _call(self, place: Place) -> Callable[..., Awaitable[Any]]:
        return partial(self._router.call, keys.slot(place.record))


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
