"""Records of bulk jobs in the queue: the types of `qinfer.jobs.queue.jobs`, and its limits."""

from typing import NamedTuple

import msgspec

from qinfer.models.work import OpenRows
from qinfer.queue.entries import BULK_LANES, Lane

PLANNING, RUNNING, FINALIZING, CANCELLING = "planning", "running", "finalizing", "cancelling"
"""The states that the queue itself knows, as `qinfer.jobs.job.JobState` spells them."""

ENDED = frozenset({"completed", "failed", "cancelled", "expired"})
"""The states of a job that has ended."""

TOP_UP_COUNT = 200
"""So many shards move to a lane in one step; at most so many of a job's are put away in one, too."""

MAX_LOG_LINES = 200
"""The latest lines of a job's log that are kept."""

MAX_LINE_CHARACTERS = 2000
"""The longest line of a log, and the longest error of a shard."""

KEPT_S = 7 * 86400.0
"""How long a job is known after its end, if its record does not say."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a job; instants in seconds of the broker's time, 0 = not yet or never.

    Attributes:
        id: Its id, unique over all models.
        model: The model's name.
        version: Its version, > 0; of which the shards' lanes are.
        partition: The queue partition of its keys and lanes.
        tenant: Whose job it is.
        state: Where it is; see `qinfer.jobs.job.JobState`.
        priority: 1 … 3: the number of its bulk lane.
        created_at: When it was created; `create` fills it in.
        started_at: When it ran first.
        ended_at: When it ended.
        resumed_at: When it was resumed last; 0 = never.
        rows_before: How many rows were settled at that time.
        deadline_at: When it expires; 0 = never.
        updated_at: When anything about it changed last.
        spec: The JSON of its `JobSpec`.
        head: What workers need of its plan, once it is planned; bytes that are opaque here.
        rows: How many rows it has, once it is planned.
        rows_done: How many of them have an output.
        rows_failed: How many of them have an error; together with `rows_done` those of all settled shards.
        shards: How many shards it has, once it is planned.
        shards_done: How many of them were committed.
        shards_failed: How many of them were given up; the rest is waiting or in hand.
        in_lane: How many of them are in the lane, waiting or in a worker's hand.
        max_parallel: How many may run at a time; 0 = as many as there are workers.
        error: Why it failed; empty otherwise.
        max_errors: How many rows may fail before it does; -1 = all.
        kept_s: How long it is known after its end.
        trace: W3C `traceparent` of what created it; empty = nobody records it.
        webhook: Where its end is told; empty = nowhere.
        webhook_state: `` | pending | delivered | failed.
        revision: Raised by each change.
    """

    id: str
    model: str
    version: int
    partition: int = 0
    tenant: str = ""
    state: str = "validating"
    priority: int = 2
    created_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    resumed_at: float = 0.0
    rows_before: int = 0
    deadline_at: float = 0.0
    updated_at: float = 0.0
    spec: bytes = b""
    head: bytes = b""
    rows: int = 0
    rows_done: int = 0
    rows_failed: int = 0
    shards: int = 0
    shards_done: int = 0
    shards_failed: int = 0
    in_lane: int = 0
    max_parallel: int = 0
    error: str = ""
    max_errors: int = -1
    kept_s: float = KEPT_S
    trace: str = ""
    webhook: str = ""
    webhook_state: str = ""
    revision: int = 0

    @property
    def lane(self) -> Lane:
        """The lane of its shards."""
        return Lane(self.model, self.version, BULK_LANES[self.priority - 1], self.partition)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED


class ShardOutcome(msgspec.Struct, frozen=True):
    """Outcome of a shard.

    Attributes:
        index: Which shard of its job.
        rows: How many rows it has.
        failed_rows: How many of them have an error.
        error: Why the whole shard was given up, and has no part; empty = it was committed.
    """

    index: int
    rows: int
    failed_rows: int = 0
    error: str = ""


class Standing(msgspec.Struct, frozen=True):
    """Where a job stands after its lane was filled, seen in one step.

    Attributes:
        state: Its state.
        moved: How many shards were moved to the lane.
        waiting: How many are in `todo` still.
        in_lane: How many are in the lane, waiting or in hand.
        has_failed: Whether more rows failed than may.
    """

    state: str
    moved: int
    waiting: int
    in_lane: int
    has_failed: bool

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to run or running."""
        return not (self.waiting or self.in_lane)


class LogLine(msgspec.Struct, frozen=True):
    """A line of a job's log: when, in the broker's time, and what."""

    at: float
    text: str


class Page(NamedTuple):
    """Part of a listing; `after` begins the next one, empty = this was the last."""

    records: list[JobRecord]
    after: str


def open_rows(record: JobRecord, now_s: float) -> OpenRows:
    """Returns what a job has yet to do; of its record only the counts, state and instants are looked at."""
    settled = record.rows_done + record.rows_failed
    began_s = max(record.started_at, record.resumed_at)
    return OpenRows(
        model=record.model,
        version=record.version,
        partition=record.partition,
        rows=max(record.rows - settled, 0) if record.state in {PLANNING, RUNNING} else 0,
        rows_per_s=max(settled - record.rows_before, 0) / (now_s - began_s) if 0 < began_s < now_s else 0.0,
    )


def service_order(record: JobRecord) -> tuple[int, float, str]:
    """Orders jobs as they are served: by priority, then the oldest first."""
    return record.priority, record.created_at, record.id
