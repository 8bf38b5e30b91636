"""What the suites about bulk jobs share: how one is made, run and looked at."""

import msgspec

from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.queue.deliveries import JOBS
from qinfer.queue.entries import Lane, Lease, bulk_lanes
from qinfer.queue.lanes import Queue

LANES = bulk_lanes("digits", 1)


def record(job_id: str = "j1", **changes: object) -> JobRecord:
    plain = JobRecord(id=job_id, model="digits", version=1, spec=b'{"model":"digits"}', max_parallel=2)
    return msgspec.structs.replace(plain, **changes)


def shards(*indices: int, job_id: str = "j1") -> list[tuple[int, bytes]]:
    return [(index, f"{job_id}:{index}".encode()) for index in indices]


async def planned(delivery: Queue, count: int, job_id: str = "j1", **changes: object) -> None:
    """Makes a job of so many shards with ten rows each run; nothing is in its lane yet."""
    assert await Jobs(delivery).create(record(job_id, **{"state": "planning"} | changes))
    assert await Jobs(delivery).add_shards(job_id, shards(*range(count), job_id=job_id), 10 * count, complete=True)


async def running(delivery: Queue, count: int, job_id: str = "j1", **changes: object) -> None:
    """As `planned`, with its lane filled, and its first notice gone."""
    await planned(delivery, count, job_id, **changes)
    await Jobs(delivery).advance(job_id)
    await noticed(delivery)


async def top_up(jobs: Jobs, model: str, workers: int = 1) -> int:
    """Fills the lanes of a model's running jobs, the most important first; returns how many shards moved."""
    moved = 0
    for one in await jobs.unfinished():
        if one.model == model and one.state == "running":
            standing = await jobs.advance(one.id, workers=workers)
            assert standing is not None
            moved += standing.moved
    return moved


async def fetch(delivery: Queue, count: int = 1, consumer: str = "a", lanes: tuple[Lane, ...] = LANES) -> list[Lease]:
    return await delivery.fetch(lanes, consumer, count, 0.0)


def index_of(lease: Lease) -> int:
    return int(lease.frame.partition(b":")[2])


def fine(lease: Lease, failed_rows: int = 0) -> ShardOutcome:
    return ShardOutcome(index_of(lease), 10, failed_rows)


async def finish(delivery: Queue, lease: Lease, job_id: str = "j1", failed_rows: int = 0) -> bool:
    return await Jobs(delivery).finish_shard(job_id, lease, fine(lease, failed_rows))


async def noticed(delivery: Queue) -> list[str]:
    """Takes what is to be looked at, and is done with it; returns which jobs these are."""
    found = await delivery.deliveries.take_due("digits", 0, JOBS, 100)
    await delivery.deliveries.done("digits", 0, JOBS, [item.id for item in found])
    return [item.text for item in found]


async def known(delivery: Queue, job_id: str = "j1") -> JobRecord:
    found = await Jobs(delivery).get(job_id)
    assert found is not None
    return found


async def counts(delivery: Queue, job_id: str = "j1") -> tuple[int, int, int, int]:
    """Returns rows and shards: done and failed of each."""
    found = await known(delivery, job_id)
    return found.rows_done, found.rows_failed, found.shards_done, found.shards_failed
