"""Bulk jobs in one process's memory, beside `MemoryDelivery`'s lanes; nothing outlives it."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Unpack

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.jobs.queue.index import cursor_of, place_of
from qinfer.jobs.queue.records import (
    FINALIZING,
    PLANNING,
    RUNNING,
    JobRecord,
    LogLine,
    OpenRows,
    Page,
    ShardOutcome,
    Standing,
    open_rows,
    service_order,
)
from qinfer.jobs.queue.scripts import Change, check_change
from qinfer.queue.base import Lease
from qinfer.queue.memory_job_table import Job, JobTable
from qinfer.queue.memory_lanes import MemoryLanes

_REQUEUED = (PLANNING, RUNNING, FINALIZING, "failed", "cancelled", "expired")


class MemoryJobs:
    """`Jobs` without a broker.

    Args:
        lanes: What the shards wait in.
        clock: The queue's time.
        bury: Moves a leased entry to the dead letters: `Delivery.bury`.
        tell: Has the webhook of a job that has ended told: its model, partition and id.
    """

    def __init__(
        self,
        lanes: MemoryLanes,
        clock: ServerClock,
        bury: Callable[[Lease, str, str, str], bool],
        tell: Callable[[str, int, str], None],
    ) -> None:
        self._lanes = lanes
        self._clock = clock
        self._bury = bury
        self._table = JobTable(lanes, clock, tell)

    async def create(self, record: JobRecord) -> bool:
        """See `Jobs.create`."""
        if self._table.known(record.id) is not None:
            return False
        now_s = self._clock.now_s()
        created = msgspec.structs.replace(record, created_at=record.created_at or now_s, updated_at=now_s)
        self._table.jobs[record.id] = Job(created)
        return True

    async def get(self, job_id: str) -> JobRecord | None:
        """See `Jobs.get`."""
        await asyncio.sleep(0)  # as with a broker, others get their turn
        job = self._table.known(job_id)
        return None if job is None else job.record

    async def list(
        self, tenant: str | None = None, state: str | None = None, after: str = "", count: int = 100
    ) -> Page:
        """See `Jobs.list`."""
        place = place_of(after) if after else (math.inf, "")
        known = [record for job_id in tuple(self._table.jobs) if (record := await self.get(job_id)) is not None]
        fitting = sorted(
            (_place(record), record)
            for record in known
            if tenant in (None, record.tenant) and state in (None, record.state) and _place(record) < place
        )
        page = [record for _, record in reversed(fitting)][:count]
        return Page(page, cursor_of(*_place(page[-1])) if len(fitting) > count else "")

    async def unfinished(self, *, model: str | None = None) -> Sequence[JobRecord]:
        """See `Jobs.unfinished`."""
        records = [job.record for job in self._table.jobs.values()]
        return sorted(
            (record for record in records if not record.is_over and model in (None, record.model)), key=service_order
        )

    async def states(self, newest: int = 500) -> Mapping[str, int]:
        """See `Jobs.states`."""
        latest = sorted((_place(job.record), job.record) for job in self._table.jobs.values())[-newest:]
        ended = [record.state for _, record in latest if record.is_over]
        return Counter([*ended, *(record.state for record in await self.unfinished())])

    async def open_rows(self) -> Sequence[OpenRows]:
        """See `Jobs.open_rows`."""
        return [open_rows(record, self._clock.now_s()) for record in await self.unfinished()]

    async def models(self) -> Sequence[tuple[str, int]]:
        """See `Jobs.models`."""
        return list(dict.fromkeys((record.model, record.partition) for record in await self.unfinished()))

    async def overdue(self) -> Sequence[JobRecord]:
        """See `Jobs.overdue`."""
        now_s = self._clock.now_s()
        return [record for record in await self.unfinished() if 0 < record.deadline_at <= now_s]

    async def move(self, job_id: str, expected: Collection[str], state: str, **change: Unpack[Change]) -> bool:
        """See `Jobs.move`."""
        check_change(change)
        job = self._table.known(job_id)
        if job is None or job.record.state not in expected:
            return False
        if (job.record.state, state) == (RUNNING, FINALIZING) and (job.todo or job.in_lane):
            return False
        self._table.become(job, state, **change)
        return True

    async def plan(
        self, job_id: str, shards: Sequence[tuple[int, bytes]], rows: int = 0, *, complete: bool = False
    ) -> bool:
        """See `Jobs.plan`."""
        job = self._table.known(job_id)
        if job is None or job.record.state != PLANNING:
            return False
        for index, frame in shards:
            known = job.outcomes.get(index)
            if index not in job.in_lane and (known is None or known.error):
                self._table.forget(job, index)
                job.todo[index] = bytes(frame)
        self._table.change(job)
        if complete:
            self._table.run(job, rows=rows)
        return True

    async def requeue(
        self,
        job_id: str,
        shards: Sequence[tuple[int, bytes]],
        *,
        expected: Collection[str] = _REQUEUED,
        deadline_at: float | None = None,
    ) -> bool:
        """See `Jobs.requeue`."""
        job = self._table.known(job_id)
        if job is None or job.record.state not in expected:
            return False
        for index, frame in shards:
            self._table.forget(job, index)
            if index in job.in_lane:
                self._lanes.remove(job.in_lane.pop(index))
            job.todo[index] = bytes(frame)
        self._table.run(job, deadline_at=job.record.deadline_at if deadline_at is None else deadline_at)
        return True

    async def advance(self, job_id: str, *, workers: int = 1) -> Standing | None:
        """See `Jobs.advance`."""
        await asyncio.sleep(0)
        job = self._table.known(job_id)
        if job is None:
            return None
        job.is_noticed = False
        moved = 0
        if job.record.state == RUNNING and not job.has_failed:
            job.parallel = job.record.max_parallel or max(1, workers)
            moved = self._table.refill(job)
        if moved:
            self._table.change(job)
        return Standing(job.record.state, moved, len(job.todo), len(job.in_lane), job.has_failed)

    async def finish_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome) -> bool:
        """See `Jobs.finish_shard`."""
        await asyncio.sleep(0)
        self._lanes.remove(lease.entry)
        return self._table.settle(job_id, lease, outcome.index, outcome)

    async def bury_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome, code: str) -> bool:
        """See `Jobs.bury_shard`."""
        await asyncio.sleep(0)
        if not self._bury(lease, job_id, code, outcome.error):
            return False
        self._table.settle(job_id, lease, outcome.index, outcome)
        return True

    async def drop_shard(self, job_id: str, lease: Lease, index: int) -> None:
        """See `Jobs.drop_shard`."""
        await asyncio.sleep(0)
        self._lanes.remove(lease.entry)
        self._table.settle(job_id, lease, index, None)

    async def outcomes(self, job_id: str) -> dict[int, ShardOutcome]:
        """See `Jobs.outcomes`."""
        job = self._table.known(job_id)
        return {} if job is None else dict(job.outcomes)

    async def missing(self, job_id: str) -> Sequence[int]:
        """See `Jobs.missing`."""
        job = self._table.known(job_id)
        return () if job is None else sorted(i for i, entry in job.in_lane.items() if self._lanes.get(entry) is None)

    async def note(self, job_id: str, text: str) -> None:
        """See `Jobs.note`."""
        job = self._table.known(job_id)
        if job is not None:
            self._table.note(job, text)
            self._table.change(job)

    async def log(self, job_id: str) -> Sequence[LogLine]:
        """See `Jobs.log`."""
        job = self._table.known(job_id)
        return () if job is None else tuple(job.log)

    async def stop(self, job_id: str, state: str, *, error: str = "", in_hand: bool = False) -> bool:
        """See `Jobs.stop`."""
        await asyncio.sleep(0)
        job = self._table.known(job_id)
        if job is None or (job.record.is_over and job.record.state != state):
            return False
        if job.record.state != state:
            self._table.become(job, state, error=error)
            self._table.note(job, f"{state}: {error}" if error else state)
        job.todo.clear()
        for index, entry in tuple(job.in_lane.items()):
            item = self._lanes.get(entry)
            if item is not None and (in_hand or not item.owner):
                self._lanes.remove(entry)
                del job.in_lane[index]
        self._table.change(job)
        if not job.in_lane and not job.record.is_over:
            self._table.notify(job)
        return True

    async def delete(self, job_id: str) -> bool:
        """See `Jobs.delete`."""
        job = self._table.known(job_id)
        return job is not None and job.record.is_over and self._table.jobs.pop(job_id, None) is not None

    async def is_wanted(self, job_id: str) -> bool:
        """See `Jobs.is_wanted`."""
        job = self._table.known(job_id)
        return job is not None and job.record.state in {RUNNING, PLANNING}

    async def wait_for_change(self, job_id: str, since: int, timeout_s: float) -> JobRecord | None:
        """See `Jobs.wait_for_change`."""
        try:
            async with asyncio.timeout(timeout_s):
                while (record := await self.get(job_id)) is not None and record.revision <= since:
                    await self._table.changed.wait()
        except TimeoutError:
            return await self.get(job_id)
        return record

    def told(self, job_id: str, state: str) -> None:
        """Notes what became of a job's webhook: delivered | failed."""
        job = self._table.known(job_id)
        if job is not None:
            job.record = msgspec.structs.replace(job.record, webhook_state=state)


def _place(record: JobRecord) -> tuple[int, str]:
    return int(record.created_at * 1000), record.id
