"""The index of all bulk jobs on Redis: jobs by creation, open jobs by deadline, and the place of each job's keys.

The index is in other slots than the jobs, so it may list ended jobs and jobs without a record. Readers remove such jobs
from it; they remove a job without a record once it is older than a creation can take.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from qinfer.core.clock import ServerClock
from qinfer.errors import CorruptEntry, InvalidRequest
from qinfer.jobs.queue.records import OPEN_FIELDS, JobAddress, JobRecord, Page, open_rows, record_of
from qinfer.models.state import OpenRows
from qinfer.queue import keys
from qinfer.queue.router import Router

logger = logging.getLogger(__name__)

_CREATION_S = 60.0
_MOST_SKIPPED = 1000
_JOBS, _OPEN, _PLACES = keys.jobs().encode(), keys.open_jobs().encode(), keys.job_places().encode()
# The most reads for a page: a page with few matches ends before it is full.
_LOOKS = 10
_PAGE = 100
_CURSOR = re.compile(r"([0-9]{1,15})-(.+)")
_TOGETHER = 20
_PAGE_BYTES = 8 * 2**20


class JobIndex:
    """The keys by which `Jobs` finds jobs."""

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
        return [where and _place(job_id, where) for job_id, where in zip(job_ids, found, strict=True)]

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
        read = await asyncio.gather(*(self._send_command(b"HMGET", place.record, *OPEN_FIELDS) for place in known))
        now_s = self._clock.now_s()
        found: list[OpenRows] = []
        for place, values in zip(known, read, strict=True):
            if values[0] is None:
                continue
            try:
                record = record_of(place, dict(zip(OPEN_FIELDS, values, strict=True)))
            except CorruptEntry as error:
                self.skip(place.job_id, error)
                continue
            if not record.is_over:
                found.append(open_rows(record, now_s))
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
                records = await asyncio.gather(*(read(job_id) for _, job_id in some))
                for place, record in zip(some, records, strict=True):
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


def _place(job_id: str, where: bytes) -> JobAddress:
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
