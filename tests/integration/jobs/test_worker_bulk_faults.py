"""Worker processes that are killed, stopped and crashed in the middle of a shard: each row counts once."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobAddress, JobRecord, ShardOutcome
from qinfer.queue import keys
from qinfer.queue.entries import BULK_LANES, Lane
from qinfer.testing import eventually
from tests.support.faulty_backend import CRASH, SLOW, write_model
from tests.support.jobs.shard_runs import JOB, job_spec, outcomes, scored_rows, shards_of, submit_job, write_rows
from tests.support.worker_processes import WorkerProcesses, resume, worker_processes

LANES = [Lane("faulty", 1, name) for name in BULK_LANES]
ROWS, GROUP = 2000, 1000


class Job:
    """Rows whose numbers are what the model gets; some of them make it slow, or crash."""

    left_out = frozenset({CRASH, SLOW})

    def __init__(self, folder: Path, *numbers: float, rows: int = ROWS) -> None:
        self.output, self.spool = folder / "out", folder / "spool"
        self.output.mkdir()
        self.spool.mkdir()
        self.numbers = [number for number in range(rows) if number not in self.left_out or number in numbers]
        url = write_rows(folder / "in.parquet", numbers=self.numbers, group=rows // 2)
        self.shards = shards_of(url)
        self.spec = job_spec([url], self.output, model="faulty", columns={"x": "id"}, passthrough=("id",))

    async def submit(self, work: WorkerProcesses) -> None:
        """Puts the job into the queue."""
        model = await work.store.model(self.spec.model)
        assert model is not None
        await submit_job(work.delivery, self.spec, self.shards, model_hash=model.content_hash)

    @property
    def environment(self) -> dict[str, str]:
        """Tells a worker where to write parts."""
        return {"QINFER_BULK__SPOOL_DIR": str(self.spool)}

    async def check(self, work: WorkerProcesses) -> None:
        """Waits until all shards are settled; checks the rows, the counts, and that nothing is left."""
        found = await outcomes(work.delivery, len(self.shards), timeout_s=40.0)
        assert found == [ShardOutcome(shard.index, shard.rows) for shard in self.shards]
        assert [value for _, value in scored_rows(self.output)] == [float(number) for number in self.numbers]
        record = await record_of(work)
        assert (record.rows_done, record.rows_failed, record.shards_done) == (len(self.numbers), 0, len(self.shards))
        assert await work.delivery.depth(LANES) == [0, 0, 0]


async def record_of(work: WorkerProcesses) -> JobRecord:
    record = await Jobs(work.delivery).get(JOB)
    assert record is not None
    return record


async def scoring(trace: Path) -> None:
    """Waits until a worker executes the row that makes the model slow."""
    await eventually(lambda: str(SLOW) in trace.read_text(), 40.0, "the slow row")


@pytest.fixture
async def trace(tmp_path: Path) -> Path:
    return write_model(tmp_path / "repository", hold_s=1.0)


@pytest.fixture
async def work(tmp_path: Path, trace: Path) -> AsyncIterator[WorkerProcesses]:
    async with worker_processes(tmp_path) as one:
        yield one


@pytest.mark.long
async def test_a_killed_worker_s_shard_is_finished_by_another(
    work: WorkerProcesses, tmp_path: Path, trace: Path
) -> None:
    """Nothing of what it did is seen."""
    job = Job(tmp_path, SLOW)
    first = await work.worker(**job.environment)
    await job.submit(work)
    await scoring(trace)
    first.kill()
    await work.worker(**job.environment)

    await job.check(work)


async def logged(text: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Waits until workers have logged something; returns what they logged so far."""
    told = list[str]()

    def is_told() -> bool:
        told.append(capfd.readouterr().err)
        return text in "".join(told)

    await eventually(is_told, 40.0, text)
    return "".join(told)


@pytest.mark.parametrize(("field", "damage"), [("about", b"\x01\xc1"), ("grant", b"{"), ("rows", b"x")])
async def test_a_job_whose_record_is_damaged_rests_until_it_is_well(
    work: WorkerProcesses, tmp_path: Path, capfd: pytest.CaptureFixture[str], field: str, damage: bytes
) -> None:
    """The worker goes on with requests; entries that are no requests become dead letters."""
    job, client = Job(tmp_path), work.store.client
    process = await work.worker(**job.environment)
    lane = Lane("faulty", 1)
    process.send_signal(signal.SIGSTOP)
    await job.submit(work)
    place = JobAddress("faulty", lane.partition, JOB).record
    whole = await client.hget(place, field)
    await client.hset(place, field, damage)
    for fields in ({"f": b"\xff"}, {"f": b"\x01" + bytes(40)}, {b"\xff": b""}):
        await client.xadd(keys.lane(lane), fields)
    resume(process)
    log = await logged("shard put off", capfd)
    [answer] = await work.answered(work.submit(7.0))
    assert answer.failure is None
    assert process.poll() is None
    assert "Traceback" not in log
    await (client.hdel(place, field) if whole is None else client.hset(place, field, whole))

    await job.check(work)
    assert process.poll() is None


async def test_a_damaged_wish_or_configuration_unloads_nothing(
    work: WorkerProcesses, capfd: pytest.CaptureFixture[str]
) -> None:
    client = work.store.client
    process = await work.worker()
    await client.hset(keys.desired(), "faulty", b"{")
    await client.hset(keys.config("faulty"), "model", b"{")
    await work.store.wake()
    log = await logged('"kind":"StoredModel"', capfd)
    [answer] = await work.answered(work.submit(7.0))

    assert answer.failure is None
    assert "Traceback" not in log
    await work.ready(process)


@pytest.mark.long
async def test_two_workers_on_one_shard_make_one_part(work: WorkerProcesses, tmp_path: Path, trace: Path) -> None:
    """One is stopped for longer than a lease and goes on afterwards, when another has run its shard."""
    job = Job(tmp_path, SLOW)
    first = await work.worker(**job.environment)
    await job.submit(work)
    await scoring(trace)
    first.send_signal(signal.SIGSTOP)
    await work.worker(**job.environment)
    await outcomes(work.delivery, len(job.shards), timeout_s=40.0)
    before = {path.name: path.stat().st_mtime_ns for path in job.output.iterdir()}
    resume(first)
    await eventually(lambda: len(list(job.spool.iterdir())) == 0, 40.0, "an empty spool")
    first.terminate()
    await asyncio.to_thread(first.wait)

    assert {path.name: path.stat().st_mtime_ns for path in job.output.iterdir()} == before
    await job.check(work)
