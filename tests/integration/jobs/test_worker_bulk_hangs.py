"""A bulk job over a model that hangs at one row."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.jobs.test_worker_bulk_faults import Job, record_of
from tests.support.hanging import HANG, write_hanging
from tests.support.jobs.shard_runs import outcomes, scored_rows
from tests.support.worker_processes import worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def test_a_row_that_passes_the_limit_alone_costs_no_other_row_its_outputs(tmp_path: Path) -> None:
    """Its batch is executed again, a row at a time."""
    write_hanging(tmp_path / "repository", 1.0, "faulty")
    async with worker_processes(tmp_path) as work:
        job = Job(tmp_path, HANG)
        worker = await work.worker(**job.environment)
        await job.submit(work)

        found = await outcomes(work.delivery, len(job.shards), timeout_s=50.0)
        record = await record_of(work)

        assert [outcome.failed_rows for outcome in found] == [1, 0]
        assert (record.rows_done, record.rows_failed) == (len(job.numbers) - 1, 1)
        assert {value for _, value in scored_rows(job.output) if value is not None} == {
            float(number) for number in job.numbers if number != HANG
        }
        assert await asyncio.to_thread(worker.poll) is None
