"""The context that the shard loops of a worker share: its slots for shards, and the types of a shard's run.

A worker holds any number of shards that are fine, or one suspect alone. A suspect is a shard whose worker died: if it
is the reason, it takes this worker down as well, and each shard held beside it would count an execution that it is not
to blame for, and in the end be given up with it.
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
from qinfer.jobs.plan import ShardTicket
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord
from qinfer.observe.stats import ModelCounts
from qinfer.queue.entries import Lease
from qinfer.queue.lanes import Queue
from qinfer_workers.inference.loader import Loaded
from qinfer_workers.inference.publisher import LeaseKeeper
from qinfer_workers.inference.tracing import Spans
from qinfer_workers.jobs.scoring.arbiter import DeviceArbiter, JobBatcher
from qinfer_workers.jobs.scoring.batch_size import BatchSize
from qinfer_workers.jobs.scoring.ensembles import EnsembleParts

if TYPE_CHECKING:
    from qinfer_workers.jobs.scoring.shard_run import ShardRun


class HeldShard:
    """A shard that this worker holds, whose lease is renewed (`leases.Held`).

    Args:
        lease: The lease on its entry.
        deadline_s: Until when it is renewed, in the broker's time; moved on as long as it makes progress.

    Attributes:
        lost: The lease is lost: somebody else runs it, or nobody wants it.
        on_lost: Called when that happens.
    """

    def __init__(self, lease: Lease, deadline_s: float) -> None:
        self.lease = lease
        self.deadline_s = deadline_s
        self.lost = False
        self.on_lost: Callable[[], None] = lambda: None

    def lose(self) -> None:
        """Takes note that the lease is lost."""
        self.lost = True
        self.on_lost()


class Slots:
    """The slots of a worker for shards; used on the event loop."""

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
        """Waits until no suspect is held or waits for a slot."""
        async with self._alone:
            return

    def take(self, *, is_suspect: bool = False) -> bool:
        """Takes a slot; false = a suspect that came meanwhile is to be alone."""
        if self._alone.locked() and not is_suspect:
            return False
        self._count += 1
        self._empty.clear()
        return True

    def on_suspect(self, holder: object, stop: Callable[[], None] | None) -> None:
        """Has a shard that waits for its store stopped when a suspect is to be alone; `None` = it waits no more."""
        if stop is None:
            self._waiting.pop(holder, None)
        elif self._alone.locked():
            stop()
        else:
            self._waiting[holder] = stop

    def give_back(self) -> None:
        """Gives a slot back."""
        self._count -= 1
        if not self._count:
            self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Waits until all slots are free, and keeps others from taking one until the end."""
        async with self._alone:
            for stop in list(self._waiting.values()):
                stop()
            await self._empty.wait()
            yield
            await self._empty.wait()


@dataclass(slots=True, kw_only=True)
class Served:
    """A model version that is served, its shard loop, and how its shards are scored.

    Attributes:
        batcher: Its batcher.
        loaded: Its generation that is loaded.
        arbiter: Gives turns on its devices.
        size: How many rows a batch should have; it learns.
        clock: The broker's time.
        hurry: Set when nobody waits any longer for executions to end.
        spool: A folder for parts until they are committed.
        read_bytes: About so many bytes of rows are held at once.
        footer_bytes: The size that the footer of an input file may have.
        stores: The stores that jobs may use.
        ensembles: What ensembles are run by.
        line: Held by the shard that is scored; the one behind it is read meanwhile.
        is_open: Set while there are jobs of the model that have not ended.
        loop: The task of its shard loop.
    """

    batcher: JobBatcher
    loaded: Loaded
    arbiter: DeviceArbiter
    size: BatchSize
    clock: ServerClock
    hurry: asyncio.Event
    spool: Path
    read_bytes: int
    footer_bytes: int
    stores: StoreSettings
    ensembles: EnsembleParts | None = None
    line: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    loop: "asyncio.Task[None] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContext:
    """The parts of a worker that its shard loops share.

    Attributes:
        delivery: The queue.
        jobs: The bulk jobs in it.
        keeper: Has leases renewed.
        worker_id: The consumer.
        slots: Limit which shards are held at a time.
        lease_s: The worker's setting, like the next.
        max_wait_s: The worker's setting.
        hurry: Set when nobody waits any longer for executions to end.
        counts: The rows that were settled.
        spans: Records the executions of shards; `None` = nobody wants to know.
    """

    delivery: Queue
    jobs: Jobs
    keeper: LeaseKeeper
    worker_id: str
    slots: Slots
    lease_s: float
    max_wait_s: float
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    counts: ModelCounts = field(default_factory=ModelCounts)
    spans: Spans | None = None


class PutOff(Exception):
    """A shard can't be run now: a store, the broker or a called model is away. The text says why.

    Args:
        text: See above.
        code: The kind of the reason, for the metric.
    """

    def __init__(self, text: str, code: ErrorCode = ErrorCode.MODEL_NOT_READY) -> None:
        super().__init__(text)
        self.code = code

    @classmethod
    def by(cls, error: QinferError) -> "PutOff":
        """Returns what puts a shard off because of an error."""
        return cls(error.message, error.code)


class GivenUp(Exception):
    """A shard ends workers again and again; the text says how."""


class Abandoned(Exception):
    """A shard was stopped: its work is discarded."""


MakeRun = Callable[[HeldShard, ShardTicket, JobRecord, asyncio.Event], Awaitable["ShardRun"]]
"""Makes the run of a shard, which sets the event when the model has no more to do for it, or will have in a moment."""
