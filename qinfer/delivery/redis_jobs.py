"""Bulk jobs on Redis: each step is one Lua script, and a job's keys share the slot of its model's lanes.

create, move, plan, stop, delete, …   see `job_scripts`

All jobs are in an index: `jobs`, by creation; `open_jobs`, those that may not have ended; `job_places`, their models.
It is in other slots, so that it may name jobs whose record is gone, or that have ended: readers drop these from it.
"""

import asyncio
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Unpack

import msgspec

from qinfer.clock import ServerClock
from qinfer.codec.versions import NewerVersion
from qinfer.delivery import job_scripts, keys
from qinfer.delivery.base import Lease
from qinfer.delivery.durability import Durability
from qinfer.delivery.job_index import JobIndex, skip
from qinfer.delivery.job_records import (
    ENDED,
    FINALIZING,
    PLANNING,
    RUNNING,
    TOP_UP_COUNT,
    JobRecord,
    LogLine,
    OpenRows,
    Page,
    ShardOutcome,
    Standing,
    service_order,
)
from qinfer.delivery.job_scripts import Change, Place, line_of, outcome_of, record_of
from qinfer.delivery.router import Router
from qinfer.delivery.scripts import Call

POLL_S = 0.5
"""The pause between two looks of `wait_for_change`."""

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

    async def create(self, record: JobRecord) -> bool:
        """See `Jobs.create`."""
        place = Place.of(record)
        created_ms = int((record.created_at or self._clock.now_s()) * 1000)
        if not await self._index.add(place, created_ms, record.deadline_at):
            return False
        new = msgspec.structs.replace(record, created_at=created_ms / 1000)
        write = partial(job_scripts.create, record=new, nonce=secrets.token_hex(8))
        return await self._durability.write(record.model, record.partition, write)

    async def get(self, job_id: str) -> JobRecord | None:
        """See `Jobs.get`."""
        place = await self._index.find(job_id)
        if place is None:
            return None
        found = await self._call(place)(b"HGETALL", place.record)
        return record_of(place, dict(zip(found[::2], found[1::2], strict=True))) if found else None

    async def list(
        self, tenant: str | None = None, state: str | None = None, after: str = "", count: int = 100
    ) -> Page:
        """See `Jobs.list`."""

        def fits(record: JobRecord) -> bool:
            return tenant in (None, record.tenant) and state in (None, record.state)

        return await self._index.page(self._readable, fits, after, count)

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

    async def move(self, job_id: str, expected: Collection[str], state: str, **change: Unpack[Change]) -> bool:
        """See `Jobs.move`."""
        place = await self._index.find(job_id)
        if place is None:
            return False
        reopens = state not in ENDED and (not ENDED.isdisjoint(expected) or "deadline_at" in change)
        if reopens:  # before, so that no job is without; and after, for somebody may see it ended, and close it
            await self._reopen(place)
        moved = await job_scripts.move(self._call(place), place, expected, state, change)
        if reopens:
            await self._reopen(place)
        elif moved and state in ENDED:
            await self._index.close(job_id)
        return moved

    async def plan(
        self, job_id: str, shards: Sequence[tuple[int, bytes]], rows: int = 0, *, complete: bool = False
    ) -> bool:
        """See `Jobs.plan`."""
        return await self._plan(job_id, shards, rows if complete else None, is_last=complete)

    async def requeue(
        self,
        job_id: str,
        shards: Sequence[tuple[int, bytes]],
        *,
        expected: Collection[str] = (PLANNING, RUNNING, FINALIZING, "failed", "cancelled", "expired"),
        deadline_at: float | None = None,
    ) -> bool:
        """See `Jobs.requeue`."""
        change: Change = {} if deadline_at is None else {"deadline_at": deadline_at}
        if not await self.move(job_id, expected, PLANNING, **change):
            return False
        return await self._plan(job_id, shards, None, is_last=True, is_forced=True)

    async def advance(self, job_id: str, *, workers: int = 1) -> Standing | None:
        """See `Jobs.advance`."""
        record = await self.get(job_id)
        return None if record is None else await job_scripts.top_up(self._call(Place.of(record)), record, workers)

    async def finish_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome) -> bool:
        """See `Jobs.finish_shard`."""
        return await job_scripts.finish(self._of(lease), job_id, lease, outcome)

    async def bury_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome, code: str) -> bool:
        """See `Jobs.bury_shard`."""
        return await job_scripts.bury(self._of(lease), job_id, lease, outcome, code)

    async def drop_shard(self, job_id: str, lease: Lease, index: int) -> None:
        """See `Jobs.drop_shard`."""
        await job_scripts.drop(self._of(lease), job_id, lease, index)

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
        return () if record is None else await job_scripts.missing(self._call(Place.of(record)), record)

    async def note(self, job_id: str, text: str) -> None:
        """See `Jobs.note`."""
        place = await self._index.find(job_id)
        if place is not None:
            await job_scripts.note(self._call(place), place, text)

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
        place = Place.of(record)
        if not await job_scripts.stop(self._call(place), place, state, error):
            return False
        held = await self._call(place)(b"HGETALL", place.part("in_lane"))
        for start in range(0, max(1, len(held)), 2 * TOP_UP_COUNT):
            part = held[start : start + 2 * TOP_UP_COUNT]
            await job_scripts.withdraw(self._call(place), record, part, in_hand=in_hand)
        if state in ENDED:
            await self._index.close(job_id)
        return True

    async def delete(self, job_id: str) -> bool:
        """See `Jobs.delete`."""
        place = await self._index.find(job_id)
        if place is None:
            return False
        deleted = await job_scripts.delete(self._call(place), place)
        if deleted is not False:
            await self._index.remove(job_id)
        return bool(deleted)

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
        call = self._call(Place.of(record))
        parts = list(_parts(shards))
        for number, part in enumerate(parts, 1):
            last = is_last and number == len(parts)
            of_last = rows if last else None
            if not await job_scripts.plan(call, record, part, rows=of_last, is_last=last, is_forced=is_forced):
                return False
        return True

    async def _open(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        """Returns the jobs that have not ended; the others leave the index of open ones."""
        found = await asyncio.gather(*map(self._readable, job_ids))
        records = [record for record in found if not isinstance(record, NewerVersion)]
        for job_id, record in zip(job_ids, found, strict=True):
            if record is None:
                await self._index.forget(job_id)
            elif isinstance(record, JobRecord) and record.is_over:
                await self._index.close(job_id)
                again = await self.get(job_id)
                if again is not None and not again.is_over:  # it was resumed in this moment
                    await self._index.open(job_id, again.deadline_at)
        return sorted((record for record in records if record is not None and not record.is_over), key=service_order)

    async def _readable(self, job_id: str) -> JobRecord | NewerVersion | None:
        """Returns what is known of a job, one of many: that it is a newer qinfer's hides no other."""
        try:
            return await self.get(job_id)
        except NewerVersion as error:
            skip(job_id, error)
            return error

    async def _reopen(self, place: Place) -> None:
        """Notes the deadline of a job that has not ended, or goes on."""
        deadline_ms = await self._call(place)(b"HGET", place.record, b"deadline_at")
        await self._index.open(place.job_id, int(deadline_ms or 0) / 1000)

    async def _field(self, job_id: str, name: bytes) -> bytes | None:
        place = await self._index.find(job_id)
        return None if place is None else await self._call(place)(b"HGET", place.record, name)

    def _of(self, lease: Lease) -> Call:
        return partial(self._router.call, keys.lane_slot(lease.entry.lane))

    def _call(self, place: Place) -> Call:
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
