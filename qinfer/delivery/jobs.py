"""Bulk jobs in the queue: their records, their shards on the way to workers, and what became of these (DESIGN.md §6).

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

A job's keys are in partition 0 of its model, but for the index of all jobs. A shard that the queue lost (its stream was
deleted) is named by `missing`, to be requeued from the plan.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, Unpack

from qinfer.delivery.base import Lease
from qinfer.delivery.job_records import (
    BULK_LANES,
    CANCELLING,
    ENDED,
    FINALIZING,
    PLANNING,
    RUNNING,
    JobRecord,
    LogLine,
    OpenRows,
    Page,
    ShardOutcome,
    Standing,
    bulk_lanes,
)
from qinfer.delivery.job_scripts import Change

__all__ = [
    "BULK_LANES",
    "CANCELLING",
    "ENDED",
    "FINALIZING",
    "PLANNING",
    "RUNNING",
    "JobRecord",
    "Jobs",
    "LogLine",
    "OpenRows",
    "Page",
    "ShardOutcome",
    "Standing",
    "bulk_lanes",
]


class Jobs(Protocol):
    """The port; every coroutine raises `BrokerUnavailable` when the broker can't be reached."""

    async def create(self, record: JobRecord) -> bool:
        """Stores a job, as durably as the settings ask; False when there is one of that id.

        Raises:
            QueueFull: The broker has no memory left.
            BrokerUnavailable: It may have been stored.
        """
        ...

    async def get(self, job_id: str) -> JobRecord | None:
        """Returns what is known of a job; `None` = nothing, or not any more."""
        ...

    async def list(
        self, tenant: str | None = None, state: str | None = None, after: str = "", count: int = 100
    ) -> Page:
        """Returns up to `count` jobs, the newest first, of one tenant and in one state where these are given.

        Args:
            tenant: Only this one's jobs; `None` = all.
            state: Only jobs in this state; `None` = all.
            after: The `Page.after` of the page before.
            count: How many at most; a page may be shorter though there are more: `Page.after` tells.

        Raises:
            InvalidRequest: `after` is not what a page said.
        """
        ...

    async def unfinished(self, *, model: str | None = None) -> Sequence[JobRecord]:
        """Returns the jobs that have not ended, of one model or all; those to be served first come first."""
        ...

    async def states(self, newest: int = 500) -> Mapping[str, int]:
        """Counts jobs by state: all that have not ended, and of the newest so many those that have."""
        ...

    async def open_rows(self) -> Sequence[OpenRows]:
        """Returns of each job that has not ended what it has yet to do; in a few round trips."""
        ...

    async def models(self) -> Sequence[tuple[str, int]]:
        """Returns the models, with their partitions, that may have jobs which have not ended."""
        ...

    async def overdue(self) -> Sequence[JobRecord]:
        """Returns the jobs that have not ended though their deadline has passed."""
        ...

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
        ...

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
        ...

    async def requeue(
        self,
        job_id: str,
        shards: Sequence[tuple[int, bytes]],
        *,
        expected: Collection[str] = (PLANNING, RUNNING, FINALIZING, "failed", "cancelled", "expired"),
        deadline_at: float | None = None,
    ) -> bool:
        """Has shards run though they may have been settled, and their job with them; the counts follow.

        For a job to be resumed, a part that is broken, and a shard that is `missing`. While they are added the job is
        `planning`: where the caller dies meanwhile, it is to be planned again.

        Args:
            job_id: The job.
            shards: Index and frame of each; none = those that wait, if any.
            expected: The states that the job may have.
            deadline_at: Its new deadline, 0 = none; `None` = as it was.

        Returns:
            False when the job has another state, or is unknown: nothing was done.
        """
        ...

    async def advance(self, job_id: str, *, workers: int = 1) -> Standing | None:
        """Fills the lane of one job, and tells where it stands; from now on its next notice is a new one.

        Args:
            job_id: The job.
            workers: How many workers live for its model version, at least one is reckoned with; counts where the job
                has no `max_parallel`.

        Returns:
            `None` when the job is unknown.
        """
        ...

    async def finish_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome) -> bool:
        """Ends a shard: removes its entry in any case, and records the outcome if it is the first and the job lives.

        Returns:
            False when another has ended it, or the job is over or unknown: nothing was counted.
        """
        ...

    async def bury_shard(self, job_id: str, lease: Lease, outcome: ShardOutcome, code: str) -> bool:
        """As `finish_shard`, for a shard that is given up: its entry goes to the dead letters, in the same step.

        Args:
            job_id: The job; also the dead letter's request id.
            lease: The shard; its owner must still be this one.
            outcome: Its outcome; `error` is also the dead letter's reason.
            code: The dead letter's error code.

        Returns:
            False when the entry is gone or another's: nothing was done.
        """
        ...

    async def drop_shard(self, job_id: str, lease: Lease, index: int) -> None:
        """Removes a shard's entry without an outcome; if its job wants it (again), it waits in `todo` as before."""
        ...

    async def outcomes(self, job_id: str) -> dict[int, ShardOutcome]:
        """Returns the outcomes of a job's settled shards by index."""
        ...

    async def missing(self, job_id: str) -> Sequence[int]:
        """Returns which shards should be in the lane and are not: their stream was deleted. They are to be requeued."""
        ...

    async def note(self, job_id: str, text: str) -> None:
        """Adds a line to a job's log; the oldest of more than `MAX_LOG_LINES` go. An unknown job has no log."""
        ...

    async def log(self, job_id: str) -> Sequence[LogLine]:
        """Returns a job's log, the oldest line first."""
        ...

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
        ...

    async def delete(self, job_id: str) -> bool:
        """Forgets a job that has ended, or whose time was over; False when it has not ended, or is unknown."""
        ...

    async def is_wanted(self, job_id: str) -> bool:
        """Tells whether a shard of the job is worth being run: it is `running`, or about to be again."""
        ...

    async def wait_for_change(self, job_id: str, since: int, timeout_s: float) -> JobRecord | None:
        """Waits until a job's `revision` is above `since`, and returns its record then, or after the timeout.

        Redis is asked twice a second: a waiter costs two short reads a second, and sees a change so late.

        Returns:
            `None` when the job is unknown.
        """
        ...
