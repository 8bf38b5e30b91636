"""What the loops of a worker share, and the words between a loop, an errand and a run."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from qinfer.jobs.plan import ShardTicket
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.observe.stats import ModelCounts
from qinfer.queue.base import Delivery
from qinfer_workers.inference.leases import LeaseKeeper
from qinfer_workers.inference.tracing import Spans
from qinfer_workers.jobs.scoring.hands import Hands, HeldShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What the loops of a worker share.

    Attributes:
        delivery: The queue.
        keeper: Has leases renewed.
        worker_id: The consumer.
        hands: The shards that are held.
        lease_s: As in the worker's settings, like the next two.
        max_deliveries: See there.
        max_wait_s: See there.
        hurry: Set when nobody waits any longer for executions to end.
        counts: The rows that were settled.
        spans: Records what becomes of shards; `None` = nobody wants to know.
    """

    delivery: Delivery
    keeper: LeaseKeeper
    worker_id: str
    hands: Hands
    lease_s: float
    max_deliveries: int
    max_wait_s: float
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    counts: ModelCounts = field(default_factory=ModelCounts)
    spans: Spans | None = None


class PutOff(Exception):
    """A shard can't be run now: a store, the broker or a called model is away. The text says why."""


class Abandoned(Exception):
    """A shard was told to stop: nothing of it counts."""


class Run(Protocol):
    """A shard that runs; `shard_run.ShardRun`.

    Attributes:
        is_stuck: It was cancelled, and an execution of it did not end in time.
    """

    is_stuck: bool

    async def run(self) -> ShardOutcome:
        """Runs the shard; cancelled, it stops at the next batch, and ends once it has the model's instances back.

        Raises:
            PutOff: Another try may help.
            Abandoned: `stop` was called.
        """
        ...

    def stop(self) -> None:
        """Has it stop at the next batch."""
        ...


Begin = Callable[[HeldShard, ShardTicket, JobRecord, asyncio.Event], Run]
"""Makes the run of a shard, which sets the event when the model has no more to do for it, or will have in a moment."""
