"""Shards of real files for tests of the worker's side of bulk jobs: inputs, a job in a queue, and what came out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.jobs.job import JobSpec, Output, encode_spec
from qinfer.jobs.plan import JobPlan, Shard, ShardTicket, encode_plan_head, encode_ticket
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.models.readiness import ExecutedVersion
from qinfer.queue.lanes import Queue
from qinfer.storage.open import store_for
from qinfer.tabular.schemas import encode_schema
from qinfer.tabular.spec import Range
from qinfer.testing import eventually

JOB = "job1"


def write_rows(
    path: Path, rows: int = 0, *, numbers: Sequence[int] = (), group: int = 0, nulls: Sequence[int] = ()
) -> str:
    """Writes a Parquet file with the columns `x`, two floats that are the row's number, and `id`; returns its URL."""
    ids = list(numbers or range(rows))
    values = [None if number in nulls else [float(number)] * 2 for number in ids]
    table = pa.table({"x": pa.array(values, pa.list_(pa.float32(), 2)), "id": pa.array(ids, pa.int64())})
    pq.write_table(table, path, row_group_size=group or max(len(ids), 1))
    return f"file://{path}"


def shards_of(*urls: str, rows: int = 0) -> list[Shard]:
    """Returns a shard for each row group of some files; of so many rows each where that is given."""
    shards: list[Shard] = []
    for url in urls:
        stat = store_for(url).stat(url)
        assert stat is not None
        with store_for(url).open(url) as content:
            metadata = pq.read_metadata(content)
        first = 0
        for group in range(metadata.num_row_groups):
            count = metadata.row_group(group).num_rows
            for start in range(0, count, rows or count):
                size = min(rows or count, count - start)
                part = Range(url, stat.etag, group, first + start, size, start)
                shards.append(Shard(len(shards), f"part-{len(shards):05d}.parquet", size, (part,)))
            first += count
    return shards


def job_spec(urls: Sequence[str], folder: Path, **options: Any) -> JobSpec:
    """Returns a job that scores `x` with the model `stub`, unless told otherwise."""
    options = {"model": "stub", "error_threshold": -1, **options}
    return JobSpec(version=1, inputs=tuple(urls), output=Output(url=f"file://{folder}"), **options)


def plan_head(shards: Sequence[Shard], model_hash: str = "", executes: Sequence[ExecutedVersion] = ()) -> bytes:
    """Returns what a record says of the plan: all files have the columns of the first."""
    url = shards[0].ranges[0].url
    with store_for(url).open(url) as content:
        schema = encode_schema(pq.read_schema(content))
    spec = JobSpec(model="stub", inputs=("file:///in",), output=Output(url="file:///out"))
    plan = JobPlan(
        job_id=JOB,
        spec=spec,
        model_hash=model_hash,
        schema=schema,
        sources=(),
        shards=(),
        rows=0,
        executes=tuple(executes),
    )
    return encode_plan_head(plan)


async def submit_job(
    delivery: Queue,
    spec: JobSpec,
    shards: Sequence[Shard],
    *,
    job_id: str = JOB,
    model_hash: str = "",
    executes: Sequence[ExecutedVersion] = (),
) -> None:
    """Puts a planned job into the queue, as gateway and planner do."""
    rows = sum(shard.rows for shard in shards)
    record = JobRecord(
        id=job_id,
        model=spec.model,
        version=1,
        state="planning",
        spec=encode_spec(spec),
        head=plan_head(shards, model_hash, executes),
        max_errors=spec.max_errors(rows),
        max_parallel=100,
    )
    assert await Jobs(delivery).create(record)
    frames = [(shard.index, encode_ticket(ShardTicket(job_id, shard))) for shard in shards]
    assert await Jobs(delivery).add_shards(job_id, frames, rows, complete=True)
    assert await Jobs(delivery).advance(job_id)


async def outcomes(delivery: Queue, count: int, *, job_id: str = JOB, timeout_s: float = 20.0) -> list[ShardOutcome]:
    """Waits until so many shards are settled; returns their outcomes in order."""

    async def is_settled() -> bool:
        return len(await Jobs(delivery).outcomes(job_id)) == count

    await eventually(is_settled, timeout_s, f"{count} settled shards")
    found = await Jobs(delivery).outcomes(job_id)
    return [found[index] for index in sorted(found)]


def read_parts(folder: Path) -> pa.Table:
    """Returns the rows of all parts in order."""
    parts = sorted(folder.glob("part-*.parquet"))
    return pa.concat_tables([pq.read_table(part) for part in parts])


def scored_rows(folder: Path) -> list[tuple[int, float | None]]:
    """Returns (row number, first element of the output or `None`) of all rows of all parts, in order."""
    table = read_parts(folder)
    outputs = [value[0] if isinstance(value, list) else value for value in table.column("y").to_pylist()]
    return list(zip(table.column("_row").to_pylist(), outputs, strict=True))
