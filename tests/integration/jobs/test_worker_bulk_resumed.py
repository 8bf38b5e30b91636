"""Worker processes that are killed and stopped again and again in the middle of a shard: it goes on where it was."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import ShardOutcome
from qinfer.jobs.resumption import CHECKPOINTS
from qinfer.testing import eventually
from tests.integration.jobs.test_worker_bulk_faults import Job as FaultyJob
from tests.integration.jobs.test_worker_bulk_faults import record_of
from tests.support.faulty_backend import CRASH, HOLD_GIL, SLOW, executed, write_model
from tests.support.jobs.shard_runs import JOB, outcomes, scored_rows
from tests.support.python_models import execute
from tests.support.python_models import write_model as write_python
from tests.support.worker_processes import Process, WorkerProcesses, resume, worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Job(FaultyJob):
    """Rows of which none makes trouble but those that a test names."""

    left_out = frozenset({CRASH, SLOW, HOLD_GIL})


@pytest.fixture
async def trace(tmp_path: Path) -> Path:
    return write_model(tmp_path / "repository", hold_s=30.0)


@pytest.fixture
async def work(tmp_path: Path, trace: Path) -> AsyncIterator[WorkerProcesses]:
    async with worker_processes(tmp_path) as one:
        yield one


async def settled(work: WorkerProcesses, job: Job) -> None:
    """Keeps a worker running until all shards are settled."""
    async with asyncio.TaskGroup() as tasks:
        supervisor = tasks.create_task(work.supervise())
        await outcomes(work.delivery, len(job.shards), timeout_s=200.0)
        supervisor.cancel()


async def slow_ones(trace: Path, count: int) -> None:
    """Waits until the slow row has begun so often."""
    await eventually(lambda: trace.read_text().count(str(SLOW)) >= count, 60.0, "the slow row")


async def begun(work: WorkerProcesses, job: Job, trace: Path) -> Process:
    """Has a worker begin a job, and returns it when it executes the slow row."""
    first = await work.worker(**job.environment)
    await job.submit(work)
    await slow_ones(trace, 1)
    return first


@pytest.mark.long
async def test_five_kills_of_workers_fail_no_row(work: WorkerProcesses, tmp_path: Path, trace: Path) -> None:
    job = Job(tmp_path, SLOW)
    await job.submit(work)
    for count in range(1, 6):
        process = await work.worker(**job.environment)
        await slow_ones(trace, count)
        process.kill()
        await asyncio.to_thread(process.wait)
    trace.with_suffix(".go").touch()
    await work.worker(**job.environment)

    await job.check(work)


@pytest.mark.long
async def test_a_row_that_kills_workers_fails_alone_and_is_named(work: WorkerProcesses, tmp_path: Path) -> None:
    job = Job(tmp_path, CRASH)
    await job.submit(work)
    await settled(work, job)

    assert await outcomes(work.delivery, 2) == [
        ShardOutcome(0, job.shards[0].rows, 1),
        ShardOutcome(1, job.shards[1].rows),
    ]
    place = job.numbers.index(int(CRASH))
    expected = [(row, None if row == place else float(number)) for row, number in enumerate(job.numbers)]
    assert scored_rows(job.output) == expected
    log = [line.text for line in await Jobs(work.delivery).log(JOB)]
    assert [line for line in log if f"row {place} of '" in line and "failed: it killed" in line]
    record = await record_of(work)
    assert (record.rows_done, record.rows_failed, record.shards_failed) == (len(job.numbers) - 1, 1, 0)
    assert not list((job.output / CHECKPOINTS).rglob("*.*"))


async def test_what_was_scored_before_a_stop_is_not_scored_again(
    work: WorkerProcesses, tmp_path: Path, trace: Path
) -> None:
    """Each worker is told to end once the row that makes the model slow is executed."""
    job = Job(tmp_path, SLOW)
    first = await begun(work, job, trace)
    first.send_signal(signal.SIGTERM)
    trace.with_suffix(".go").touch()
    assert await asyncio.to_thread(first.wait) == 0
    seen = len(executed(trace))
    await work.worker(**job.environment)

    await job.check(work)
    again = {value for batch in executed(trace)[seen:] for value in batch}
    assert not {value for batch in executed(trace)[:seen] for value in batch} - {0.0} & again


async def test_a_stopped_owner_of_a_shard_notes_nothing_any_more(
    work: WorkerProcesses, tmp_path: Path, trace: Path
) -> None:
    """It sleeps while another scores the shard as a suspect, and is told to end when it wakes."""
    job = Job(tmp_path, SLOW)
    first = await begun(work, job, trace)
    first.send_signal(signal.SIGSTOP)
    second = await work.worker(**job.environment)
    await slow_ones(trace, 2)

    async def is_noted() -> bool:
        return bool((await record_of(work)).resumptions)

    await eventually(is_noted, 20.0, "a resumption of the second owner")
    first.send_signal(signal.SIGTERM)
    resume(first)
    trace.with_suffix(".go").touch()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0)

    await job.check(work)
    await asyncio.to_thread(first.wait)


@pytest.mark.long
async def test_a_row_that_hangs_alone_twice_costs_no_other_row(tmp_path: Path) -> None:
    """The runtime is in the worker's process, and holds the interpreter's lock."""
    limit = 'parameters { key: "qinfer.execute_timeout_s" value { string_value: "1" } }'
    write_model(tmp_path / "repository", hold_s=100.0, beside=limit)
    async with worker_processes(tmp_path) as work:
        job = Job(tmp_path, HOLD_GIL)
        await job.submit(work)
        await settled(work, job)
        found = scored_rows(job.output)

        assert [number for (_, value), number in zip(found, job.numbers, strict=True) if value is None] == [HOLD_GIL]
        assert (await record_of(work)).rows_failed == 1


async def test_a_row_that_ends_the_process_of_a_python_model_fails_alone(tmp_path: Path) -> None:
    """The worker lives on; one row of 10,000."""
    dies = "if any((x(request) == 666).any() for request in requests): os._exit(1)\n"
    body = f"import os\n{dies}return [reply(x(request)) for request in requests]"
    write_python(tmp_path / "repository", execute(body), "faulty", dims=1)
    async with worker_processes(tmp_path) as work:
        job = Job(tmp_path, CRASH, rows=10_000)
        worker = await work.worker(**job.environment)
        await job.submit(work)
        await outcomes(work.delivery, len(job.shards), timeout_s=200.0)
        found = scored_rows(job.output)

        assert [number for (_, value), number in zip(found, job.numbers, strict=True) if value != number] == [CRASH]
        assert worker.poll() is None


@pytest.mark.long
async def test_a_row_in_ten_thousand_that_kills_workers_fails_alone(work: WorkerProcesses, tmp_path: Path) -> None:
    job = Job(tmp_path, CRASH, rows=10_000)
    await job.submit(work)
    await settled(work, job)
    found = scored_rows(job.output)

    assert [number for (_, value), number in zip(found, job.numbers, strict=True) if value != number] == [CRASH]
    assert len(found) == len(job.numbers)


@pytest.mark.long
async def test_a_worker_that_is_stopped_every_few_moments_comes_to_an_end(tmp_path: Path) -> None:
    """Each is told to end when it has begun two batches."""
    slow = "import time\ntime.sleep(0.1)\n"
    trace = tmp_path / "trace"
    trace.touch()
    notes = f"open({str(trace)!r}, 'a').writelines(' '.join(map(str, x(one).ravel())) + chr(10) for one in requests)\n"
    body = f"{slow}{notes}return [reply(x(request)) for request in requests]"
    write_python(tmp_path / "repository", execute(body), "faulty", dims=1, max_batch_size=4)
    async with worker_processes(tmp_path) as work:
        job = Job(tmp_path, rows=100)
        await job.submit(work)
        stops = 0
        while (await record_of(work)).shards_done < len(job.shards):
            process, seen = await work.worker(**job.environment), len(executed(trace))
            stops += 1

            async def has_gone_on(seen: int = seen) -> bool:
                done = (await record_of(work)).shards_done == len(job.shards)
                return done or len(executed(trace)) >= seen + 2

            await eventually(has_gone_on, 30.0, "two batches")
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0

        assert stops > 2
        await job.check(work)
        scored = [value for batch in executed(trace) for value in batch if value]
        assert len(scored) <= len(job.numbers) + 1
