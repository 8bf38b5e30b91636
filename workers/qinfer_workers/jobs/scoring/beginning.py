"""Makes the run of a shard of what is known of it, its job and the model: the part of `work` that needs pyarrow."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from qinfer.batching.batcher import Batcher
from qinfer.core.clock import ServerClock
from qinfer.errors import QinferError
from qinfer.jobs.job import decode_spec
from qinfer.jobs.plan import ShardTicket, decode_plan_head
from qinfer.jobs.queue.records import JobRecord
from qinfer_workers.jobs.scoring.arbiter import DeviceArbiter
from qinfer_workers.jobs.scoring.batch_size import BatchSize
from qinfer_workers.jobs.scoring.desk import PutOff
from qinfer_workers.jobs.scoring.errand import STALLED_S
from qinfer_workers.jobs.scoring.hands import HeldShard
from qinfer_workers.jobs.scoring.scoring import Purpose
from qinfer_workers.jobs.scoring.shard_files import ShardFiles, Task, clear_spool
from qinfer_workers.jobs.scoring.shard_run import Device, ShardRun

__all__ = ["Place", "begin", "clear_spool"]

MODEL_LOADS_WITHIN_S = 600.0
"""A worker whose model is not the plan's may still have to load it, as long as the job has not run for so long."""

pa.set_cpu_count(1)  # pyarrow's own threads would take the cores from online requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where shards of a model version are run.

    Attributes:
        batcher: Its batcher.
        arbiter: Gives turns on its devices.
        size: How many rows a batch should have.
        line: Held by the shard that is scored.
        clock: The broker's time.
        model_hash: What the model's files are.
        spool: A folder for parts until they are committed.
        read_bytes: About so many bytes of rows are held at once.
        hurry: Set when nobody waits any longer for executions to end.
    """

    batcher: Batcher
    arbiter: DeviceArbiter
    size: BatchSize
    line: asyncio.Lock
    clock: ServerClock
    model_hash: str
    spool: Path
    read_bytes: int
    hurry: asyncio.Event


def begin(place: Place, held: HeldShard, ticket: ShardTicket, record: JobRecord, free: asyncio.Event) -> ShardRun:
    """Makes the run of a shard; see `desk.Begin`.

    Raises:
        PutOff: This worker can't read the job: it is a newer qinfer's. Or it has not the plan's files of the model, and
            may have yet to load them.
    """
    try:
        spec, head = decode_spec(record.spec), decode_plan_head(record.head)
    except QinferError as error:
        raise PutOff(error.message) from error
    model = place.batcher.model
    if head.model_hash != place.model_hash and place.clock.now_s() < record.started_at + MODEL_LOADS_WITHIN_S:
        raise PutOff("the model is not loaded here as the job was planned with it")

    def progress() -> None:
        held.deadline_s = place.clock.now_s() + STALLED_S

    task = Task(
        job_id=record.id,
        spec=spec,
        shard=ticket.shard,
        model=model.spec,
        head=head,
        model_hash=place.model_hash,
        max_errors=record.max_errors,
        spool=place.spool,
        read_bytes=place.read_bytes,
    )
    name = f"{record.id}-{ticket.shard.index}"
    purpose = Purpose(model=model, clock=place.clock, request_id=name, tenant=record.tenant, progress=progress)
    device = Device(batcher=place.batcher, arbiter=place.arbiter, size=place.size, line=place.line, hurry=place.hurry)
    is_again = held.lease.suspect or held.lease.deliveries > 1
    return ShardRun(ShardFiles(task), purpose, device, free, is_again=is_again)
