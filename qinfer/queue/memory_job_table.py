"""What bulk jobs in one process's memory are, and the steps that change them; `memory_jobs` is the port."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.jobs.queue.records import (
    ENDED,
    MAX_LINE_CHARACTERS,
    MAX_LOG_LINES,
    PLANNING,
    RUNNING,
    TOP_UP_COUNT,
    JobRecord,
    LogLine,
    ShardOutcome,
)
from qinfer.queue.base import Entry, Lease
from qinfer.queue.memory_lanes import MemoryLanes


class Job(msgspec.Struct, eq=False):
    """One job: its record, and where its shards are."""

    record: JobRecord
    todo: dict[int, bytes] = {}
    in_lane: dict[int, Entry] = {}
    outcomes: dict[int, ShardOutcome] = {}
    log: deque[LogLine] = msgspec.field(default_factory=lambda: deque(maxlen=MAX_LOG_LINES))
    parallel: int = 1
    is_noticed: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether more rows failed than may."""
        return 0 <= self.record.max_errors < self.record.rows_failed


class Noticed(msgspec.Struct, eq=False):
    """One notice that is not confirmed yet."""

    record: JobRecord
    deliveries: int = 0
    taken_at: float = 0.0


class JobTable:
    """All jobs; each of its methods is one step, as a script is on Redis.

    Args:
        lanes: What the shards wait in.
        clock: The queue's time.
        tell: Has the webhook of a job that has ended told: its model, partition and id.
    """

    def __init__(self, lanes: MemoryLanes, clock: ServerClock, tell: Callable[[str, int, str], None]) -> None:
        self._lanes = lanes
        self._clock = clock
        self._tell = tell
        self.jobs: dict[str, Job] = {}
        self.notices: dict[str, Noticed] = {}
        self.changed = asyncio.Event()
        """Set, and replaced, when a job has changed."""
        self._last_notice = 0

    def known(self, job_id: str) -> Job | None:
        """Returns a job; `None` where it is unknown, or its time is over."""
        job = self.jobs.get(job_id)
        if job is not None and job.record.is_over and self._clock.now_s() >= job.record.ended_at + job.record.kept_s:
            del self.jobs[job_id]
            return None
        return job

    def change(self, job: Job, **fields: object) -> None:
        """Notes that something about a job has changed, with the fields given."""
        known = {"in_lane": len(job.in_lane), "updated_at": self._clock.now_s(), "revision": job.record.revision + 1}
        job.record = msgspec.structs.replace(job.record, **known, **fields)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def become(self, job: Job, state: str, **fields: object) -> None:
        """Gives a job a state, with fields; has its webhook told of its end."""
        was, now_s = job.record, self._clock.now_s()
        started_s = now_s if state == RUNNING and not was.started_at else was.started_at
        ended_s = (was.ended_at or now_s) if state in ENDED else 0.0
        self.change(job, state=state, started_at=started_s, ended_at=ended_s, **fields)
        if state in ENDED and not was.is_over and was.webhook:
            job.record = msgspec.structs.replace(job.record, webhook_state="pending")
            self._tell(was.model, was.partition, was.id)

    def run(self, job: Job, **fields: object) -> None:
        """Lets a planned job run, and leaves a notice."""
        shards = len(job.todo) + len(job.in_lane) + len(job.outcomes)
        self.become(job, RUNNING, shards=shards, error="", **fields)
        self.notify(job)

    def notify(self, job: Job) -> None:
        """Leaves a notice of a job, unless there is one that nobody has looked at yet."""
        if not job.is_noticed:
            job.is_noticed = True
            self._last_notice += 1
            self.notices[f"{int(self._clock.now_s() * 1000)}-{self._last_notice}"] = Noticed(job.record)

    def note(self, job: Job, text: str) -> None:
        """Adds a line to a job's log."""
        job.log.append(LogLine(self._clock.now_s(), text[:MAX_LINE_CHARACTERS]))

    def refill(self, job: Job) -> int:
        """Moves shards to the lane, of which it holds at most twice as many as may run; returns how many."""
        room = min(2 * job.parallel - len(job.in_lane), TOP_UP_COUNT)
        chosen = heapq.nsmallest(max(room, 0), job.todo)
        for index in chosen:
            job.in_lane[index] = self._lanes.add(job.record.lane, job.todo.pop(index)).entry
        return len(chosen)

    def _count(self, job: Job, outcome: ShardOutcome, sign: int) -> None:
        known, is_lost = job.record, int(bool(outcome.error))
        job.record = msgspec.structs.replace(
            known,
            rows_done=known.rows_done + sign * (outcome.rows - outcome.failed_rows),
            rows_failed=known.rows_failed + sign * outcome.failed_rows,
            shards_done=known.shards_done + sign * (1 - is_lost),
            shards_failed=known.shards_failed + sign * is_lost,
        )

    def forget(self, job: Job, index: int) -> None:
        """Takes the outcome of a shard out of its job's counts, if it has one."""
        outcome = job.outcomes.pop(index, None)
        if outcome is not None:
            self._count(job, outcome, -1)

    def settle(self, job_id: str, lease: Lease, index: int, outcome: ShardOutcome | None) -> bool:
        """Records what became of a shard whose entry is gone; `None` = nothing. Returns whether it was counted."""
        job = self.known(job_id)
        if job is None or job.in_lane.get(index) != lease.entry:
            return False
        del job.in_lane[index]
        is_counted = outcome is not None and not job.record.is_over
        if outcome is not None and is_counted:
            self.forget(job, index)
            job.outcomes[index] = outcome
            self._count(job, outcome, 1)
            if outcome.error:
                self.note(job, f"shard {index} was given up: {outcome.error}")
        elif job.record.state in {RUNNING, PLANNING}:
            job.todo[index] = lease.frame
        if job.record.state == RUNNING and not job.has_failed:
            self.refill(job)
        self.change(job)
        if not job.record.is_over and (job.has_failed or not (job.in_lane or job.todo)):
            self.notify(job)
        return is_counted
