"""Context that a worker's shard loops share.

A worker holds any number of healthy shards, or one suspect alone: it may kill the worker, and shards beside it would
count an execution without fault.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from qinfer.core.clock import ServerClock
from qinfer.core.settings import StoreSettings
from qinfer.errors import ErrorCode, QinferError
from qinfer.jobs.examiner_pool import ExaminerPool
from qinfer.jobs.plan import ShardTicket
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord
from qinfer.observe.stats import ModelCounts
from qinfer.queue.entries import Lease
from qinfer.queue.lanes import Queue
from qinfer_workers.inference.bulk.arbiter import BatchSize, DeviceArbiter, JobBatcher
from qinfer_workers.inference.bulk.ensembles import EnsembleParts
from qinfer_workers.inference.loader import LoadedVersion
from qinfer_workers.inference.publisher import LeaseKeeper
from qinfer_workers.inference.tracing import Spans

if TYPE_CHECKING:
    from qinfer_workers.inference.bulk.shard_run import ShardRun


class HeldShard:
    """A held shard, renewed until `deadline_s`.

    `lost` = another worker runs it, or its job does not want it.
    """

    def __init__(self, lease: Lease, deadline_s: float) -> None:
        self.lease = lease
        self.deadline_s = deadline_s
        self.lost = False
        self.on_lost: Callable[[], None] = lambda: None

    def lose(self) -> None:
        """Marks the lease as lost."""
        self.lost = True
        self.on_lost()


class ShardSlots:
    """A worker's slots for shards; for the event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._alone = asyncio.Lock()
        self._waiting: dict[object, Callable[[], None]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_empty(self) -> bool:
        """Whether no shard is held."""
        return not self._count

    async def ready(self) -> None:
        """Waits until no suspect is held or waiting."""
        async with self._alone:
            return

    def take_slot(self, *, is_suspect: bool = False) -> bool:
        """Takes a slot; returns false while a suspect is to be alone."""
        if self._alone.locked() and not is_suspect:
            return False
        self._count += 1
        self._empty.clear()
        return True

    def on_suspect(self, holder: object, stop: Callable[[], None] | None) -> None:
        """Registers how to stop a shard that waits for its store."""
        if stop is None:
            self._waiting.pop(holder, None)
        elif self._alone.locked():
            stop()
        else:
            self._waiting[holder] = stop

    def free_slot(self) -> None:
        """Returns a slot."""
        self._count -= 1
        if not self._count:
            self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Waits for all slots, and keeps them free."""
        async with self._alone:
            for stop in list(self._waiting.values()):
                stop()
            await self._empty.wait()
            yield
            await self._empty.wait()


@dataclass(slots=True, kw_only=True)
class ScoredVersion:
    """A served model version, its shard loop, and how its shards are scored.

    `hurry` is set when running executions are no longer waited for. `spool` is a folder for uncommitted parts. The
    scored shard holds `line`; the next one is read meanwhile. `is_open` is set while the model has open jobs.
    """

    batcher: JobBatcher
    loaded: LoadedVersion
    arbiter: DeviceArbiter
    size: BatchSize
    clock: ServerClock
    hurry: asyncio.Event
    spool: Path
    read_bytes: int
    footer_bytes: int
    stores: StoreSettings
    readers: ExaminerPool
    ensembles: EnsembleParts | None = None
    line: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    loop: "asyncio.Task[None] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContext:
    """The parts of a worker that its shard loops share."""

    delivery: Queue
    jobs: Jobs
    keeper: LeaseKeeper
    worker_id: str
    slots: ShardSlots
    lease_s: float
    max_wait_s: float
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    counts: ModelCounts = field(default_factory=ModelCounts)
    spans: Spans | None = None


class PutOff(Exception):
    """A shard can't run now; `code` is for the metric."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.MODEL_NOT_READY) -> None:
        super().__init__(text)
        self.code = code

    @classmethod
    def by(cls, error: QinferError) -> "PutOff":
        """Wraps the error that is the reason."""
        return cls(error.message, error.code)


class GivenUp(Exception):
    """A shard kills workers repeatedly."""


class Abandoned(Exception):
    """A shard was stopped, and its work is discarded."""


MakeRun = Callable[[HeldShard, ShardTicket, JobRecord, asyncio.Event], Awaitable["ShardRun"]]
