"""Shards that examiners read for workers: the same rows, and files that kill examiners."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from qinfer.core.settings import Settings, StoreSettings
from qinfer.errors import InvalidRequest
from qinfer.jobs.examiner import OpenShard
from qinfer.jobs.examiner_pool import READ_SHARES, ExaminerPool
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import ExpectedParts, Shard
from qinfer.jobs.shard_rows import ExaminedShard, RowReader, ShardReader, examined_part
from qinfer.storage.open import store_for
from qinfer.tabular.batches import RowBatch
from qinfer.tabular.schemas import encode_schema
from qinfer.tabular.spec import Range
from tests.support.jobs import parquet_bytes as raw
from tests.support.jobs.arrow_bytes import file_of_one_name
from tests.support.jobs.bulk_data import ANY_FILE, write

SCHEMA = pa.schema([("x", pa.int64()), ("t", pa.string())])
ROWS = 1000


def work_of(*urls: str, bad_files: str = "") -> OpenShard:
    """Returns a shard of whole files of one row group."""
    stats = [store_for(url).stat(url) for url in urls]
    ranges = tuple(Range(stat.url, stat.etag, 0, 0, ROWS, 0) for stat in stats if stat is not None)
    output = Output("file:///out")
    more: dict[str, Any] = {"bad_files": bad_files} if bad_files else {}
    spec = JobSpec(model="m", inputs=urls, output=output, **more)
    shard = Shard(0, "part-00000.parquet", len(urls) * ROWS, ranges)
    return OpenShard(shard, ("x", "t"), encode_schema(SCHEMA), spec, ANY_FILE, 2**26)


def good(path: Path, begin: int = 0) -> str:
    return write(path, pa.table({"x": range(begin, begin + ROWS), "t": ["word"] * ROWS}, SCHEMA))


def deadly(path: Path) -> str:
    """Writes a file whose columns share a name, which makes Arrow abort at the memory limit."""
    path.write_bytes(file_of_one_name("x" * 2**20, 2000))
    return f"file://{path}"


def examiner_processes() -> list[psutil.Process]:
    """Returns the examiners of this process, whose other children are servers of many tests."""
    return [one for one in psutil.Process().children() if "qinfer.jobs.examiner" in one.cmdline()]


def read_all(reader: RowReader, rows: int = 300) -> list[RowBatch]:
    batches = []
    with closing(reader):
        while (batch := reader.read(rows)) is not None:
            batches.append(batch)
    return batches


@asynccontextmanager
async def examiners() -> AsyncIterator[ExaminerPool]:
    settings = Settings(stores=StoreSettings(allow=ANY_FILE.read))
    pool = ExaminerPool(settings, os.environ, shares=READ_SHARES)
    running = asyncio.create_task(pool.run())
    await asyncio.sleep(0)
    try:
        yield pool
    finally:
        running.cancel()
        await asyncio.wait([running])


@asynccontextmanager
async def examined() -> AsyncIterator[Callable[[OpenShard], ExaminedShard]]:
    async with examiners() as pool:
        yield lambda work: ExaminedShard(pool, asyncio.get_running_loop(), work)


async def test_rows_are_those_of_this_process(tmp_path: Path) -> None:
    """One process reads several shards, one after the other."""
    work = work_of(good(tmp_path / "a.parquet"), good(tmp_path / "b.arrow", ROWS))
    expected = read_all(ShardReader.opened(work))
    async with examined() as reader:
        processes = set()
        for _ in range(2):
            assert await asyncio.to_thread(read_all, reader(work)) == expected
            processes |= {one.pid for one in examiner_processes()}
        assert len(processes) == 1


async def test_a_process_that_is_killed_is_replaced(tmp_path: Path) -> None:
    work = work_of(good(tmp_path / "a.parquet"), good(tmp_path / "b.parquet", ROWS))
    async with examined() as reader:
        reading = reader(work)
        first = await asyncio.to_thread(reading.read, 300)
        assert first is not None
        for child in examiner_processes():
            child.kill()
        rest = await asyncio.to_thread(read_all, reading)
        records = [batch.record for batch in (first, *rest)]
        assert pa.Table.from_batches(records).column("x").to_pylist() == list(range(2 * ROWS))


async def test_a_file_that_kills_its_readers_costs_no_other(tmp_path: Path) -> None:
    urls = good(tmp_path / "a.parquet"), deadly(tmp_path / "b.arrow"), good(tmp_path / "c.parquet", ROWS)
    async with examined() as reader:
        with pytest.raises(InvalidRequest, match=rf"'{urls[1]}' can't be read; is it damaged\? the process that read"):
            await asyncio.to_thread(read_all, reader(work_of(*urls)))
        batches = await asyncio.to_thread(read_all, reader(work_of(*urls, bad_files="skip")))
        values = pa.Table.from_batches([batch.record for batch in batches]).column("x").to_pylist()
        assert values == [*range(ROWS), *[None] * ROWS, *range(ROWS, 2 * ROWS)]
        faults = [fault for batch in batches for fault in batch.faults]
        assert sum(fault.rows for fault in faults) == ROWS
        assert all(urls[1] in fault.message and "SIGABRT" in fault.message for fault in faults)


async def test_a_part_that_was_replaced_costs_an_examiner_at_most(tmp_path: Path) -> None:
    """Column chunks of three bytes take 800 each: these would take 480 MiB of the worker."""
    shard = Shard(0, "part-00000.parquet", 1, ())
    chunk = raw.thrift({2: (raw.I64, 0)})
    group = raw.thrift({1: (raw.LIST, (raw.STRUCT, [chunk] * 99_000)), 2: (raw.I64, 0), 3: (raw.I64, 0)})
    (tmp_path / shard.part).write_bytes(raw.parquet(1, extra={4: (raw.LIST, (raw.STRUCT, [group] * 6))}))
    parts = ExpectedParts("job", "hash", tmp_path.as_uri(), (shard,), ANY_FILE)
    loop, before_kib = asyncio.get_running_loop(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with examiners() as pool:
        found = await asyncio.to_thread(examined_part, pool, loop, parts)

    assert isinstance(found, str)
    assert "memory" in found or "is no whole part" in found
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before_kib + 100 * 1024
