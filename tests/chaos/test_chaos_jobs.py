"""The proof of what bulk jobs promise: whatever is killed or stopped, each row of the input is in the output once.

Each test ends with a comparison of input and output by duckdb, both ways, and prints one line. `make chaos` gives the
random one a fifth of its time and kills; `CHAOS_SEED` repeats its faults, though not their exact moment in the work.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from qinfer.client import AsyncClient, AsyncJob
from qinfer.client.job_flows import JobStatus
from qinfer.errors import JobNotFound
from qinfer.testing import eventually
from tests.chaos import faults
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.faulty import name_of
from tests.chaos.member import Role
from tests.chaos.verdict import leftovers
from tests.support.jobs import job_proof
from tests.support.jobs.job_proof import MODEL, Place, Verdict
from tests.support.servers.s3_server import S3Server

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60")) / 5
KILLS = round(int(os.environ.get("CHAOS_KILLS", "30")) / 5)
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
STORES = ["file", "s3"] if "CHAOS_SECONDS" in os.environ else ["file"]  # the latter takes long

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 2 + 240)]

WITHIN_S = 150.0
ROWS = 1600
GROUPS = {"a": [137] * 7 + [41], "b": [1, 599]}

WORKER_STEPS = [
    "kill before unwritten/part-00003.parquet",
    "kill after unconfirmed/part-00003.parquet",
    "kill while scored/part-00003.parquet",
    "stop before late/part-00002.parquet",
    "stop after too-late/part-00002.parquet",
]
"""A worker ends before its part is there, between that and the queue's knowing of it, and in the middle; or it sleeps
for longer than its lease, so that another has run its shard, and goes on."""

BULK_STEPS = [
    "kill before unplanned/_plan.json",
    "kill after planned/_plan.json",
    "kill before unlisted/_manifest.json",
    "kill before unfinished/_SUCCESS",
    "kill after finished/_SUCCESS",
]


class Field:
    """A cluster, its files and a client.

    Attributes:
        cluster: The processes.
        place: Where inputs and outputs are.
        url: The same place, as the processes of the cluster see it.
        inputs: All rows of `in`.
    """

    def __init__(self, cluster: Cluster, client: AsyncClient, place: Place, inputs: pa.Table) -> None:
        self.cluster = cluster
        self.place = place
        self.url = place.url
        self.inputs = inputs
        self._client = client

    async def submit(self, folder: str, rows_per_part: int) -> AsyncJob:
        """Has all rows scored, and written to a folder."""
        source, target = f"{self.url}/in/*.parquet", f"{self.url}/{folder}"
        return await self._client.submit_job(
            MODEL, source, target, key="id", rows_per_part=rows_per_part, error_threshold=-1
        )

    async def prove(self, folder: str, status: JobStatus) -> Verdict:
        """Checks that an output is complete and exact, and in order; returns what was counted."""
        assert status.state == "completed", f"{status}; the logs end with\n{self.cluster.logs()}"
        output = self.place.table(folder)
        verdict = job_proof.compare(self.inputs, output)
        assert verdict.is_exact, (folder, verdict)
        assert output["id"].to_pylist() == self.inputs["id"].to_pylist()
        assert (status.rows, status.rows_done, status.rows_failed) == verdict[:3], folder
        job_proof.check_documents(self.place, folder, verdict)
        return verdict

    def check_queue(self) -> None:
        """Checks that nothing is left in the queue."""
        keys = self.cluster.keys()
        assert leftovers([key for key in keys if key.name.startswith("qinfer:")]) == []


@contextlib.asynccontextmanager
async def opened(
    directory: Path,
    *,
    workers: int,
    bulk: int,
    steps: Mapping[Role, Sequence[str]] | None = None,
    store: tuple[Place, Mapping[str, str]] | None = None,
) -> AsyncIterator[Field]:
    """Runs a gateway, workers and bulk workers that may use a directory, or another store, with inputs."""
    place, environment = store or (Place(f"file://{directory}/data"), {})
    inputs = write_inputs(place)
    (directory / "spool").mkdir()
    job_proof.write_model(directory / "models")
    settings = {
        "QINFER_STORES__ALLOW": f'["{place.url}"]',
        "QINFER_BULK__SPOOL_DIR": str(directory / "spool"),
        "QINFER_BULK__SWEEP_EVERY_S": "0.5",
        "QINFER_WORKER__MAX_DELIVERIES": "100",
        **environment,
    }
    running = running_cluster(
        directory,
        directory / "models",
        gateways=1,
        workers=workers,
        bulk=bulk,
        durability="always",
        settings=settings,
        steps=steps,
    )
    async with running as cluster, AsyncClient(cluster.urls[0], max_retries=20) as client:
        await cluster.ready((MODEL,))
        yield Field(cluster, client, place, inputs)


def write_inputs(place: Place) -> pa.Table:
    """Writes all rows of `in`, and returns them."""
    tables, first = [], 0
    for name, groups in GROUPS.items():
        tables.append(job_proof.rows_of(first, sum(groups), ROWS))
        place.put(f"in/{name}.parquet", job_proof.parquet(tables[-1], groups))
        first += sum(groups)
    return pa.concat_tables(tables)


def say(capsys: pytest.CaptureFixture[str], what: str, verdict: Verdict, kills: int) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{what}: {verdict.line} kills={kills}\n")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[tuple[Place, Mapping[str, str]] | None]:
    if request.param == "file":
        yield None
        return
    with S3Server() as server:
        url = server.make_bucket("chaos")
        key, secret = (server.environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
        options = {"endpoint_url": server.endpoint, "key": key, "secret": secret, "use_listings_cache": False}
        yield Place(url, options), server.environment


async def test_each_row_once_whichever_step_is_broken_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: tuple[Place, Mapping[str, str]] | None
) -> None:
    """A job for each step; all at once, so that what is killed for one is in the middle of others."""
    steps = {Role.WORKER: WORKER_STEPS, Role.BULK: BULK_STEPS}
    async with opened(tmp_path, workers=3, bulk=2, steps=steps, store=store) as field:

        async def one(step: str) -> Verdict:
            kind, _, what = step.split()
            folder = what.partition("/")[0]
            job = await field.submit(folder, rows_per_part=150)
            status = await job.wait(timeout_s=WITHIN_S)
            before = field.place.marks(folder)
            mark = tmp_path / name_of(step)
            assert mark.exists(), f"{step} has not happened"
            if kind == "stop":
                await awake(int(mark.read_text()), tmp_path / "spool")
            assert field.place.marks(folder) == before
            return await field.prove(folder, status)

        verdicts = await asyncio.gather(*map(one, (*WORKER_STEPS, *BULK_STEPS)))
        for step, verdict in zip((*WORKER_STEPS, *BULK_STEPS), verdicts, strict=True):
            say(capsys, step, verdict, int(step.startswith("kill")))
        field.check_queue()


async def awake(pid: int, spool: Path) -> None:
    """Lets a worker that was stopped go on, and waits until it is done with what it had in hand."""
    os.kill(pid, signal.SIGCONT)
    await eventually(lambda: not list(spool.glob(f"*-{pid}-*")), WITHIN_S, "an empty spool")


async def test_a_job_outlives_redis_and_is_cancelled_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Redis is killed in the middle, again while the job is cancelled, and a worker after it was resumed."""
    async with opened(tmp_path, workers=2, bulk=1) as field:
        cluster, place = field.cluster, field.place
        job = await field.submit("out", rows_per_part=10)

        async def reaches(shards: int) -> None:
            async def is_there() -> bool:
                return (await job.status()).shards_done >= shards

            await eventually(is_there, WITHIN_S, f"{shards} shards")

        await reaches(5)
        await asyncio.to_thread(cluster.restart_broker, kill=True)
        await reaches(20)
        await job.cancel()
        assert (await job.wait(timeout_s=WITHIN_S)).state == "cancelled"
        await asyncio.to_thread(cluster.restart_broker, kill=True)
        await eventually(lambda: "_manifest.partial.json" in place.names("out"), WITHIN_S, "a partial manifest")
        before = place.marks("out")
        assert 20 <= len(before) < ROWS / 10

        await job.resume()
        await reaches(len(before) + 5)
        (await cluster.running(Role.WORKER, 1)).kill()
        verdict = await field.prove("out", await job.wait(timeout_s=WITHIN_S))

        assert place.marks("out").items() >= before.items()
        say(capsys, "Redis killed, cancelled, resumed", verdict, 3)
        field.check_queue()


async def test_bulk_workers_outlive_the_data_of_redis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of before is not known any more; the next one waits for its model, and ends; nothing is started again."""
    async with opened(tmp_path, workers=2, bulk=1) as field:
        starts = [member.starts for member in field.cluster.members]
        lost = await field.submit("lost", rows_per_part=10)

        async def is_half_done() -> bool:
            return (await lost.status()).shards_done >= 5

        await eventually(is_half_done, WITHIN_S, "a job under way")
        with field.cluster.redis() as client:
            client.flushall()
        with pytest.raises(JobNotFound):
            await lost.wait(timeout_s=WITHIN_S)
        job = await field.submit("out", rows_per_part=20)
        verdict = await field.prove("out", await job.wait(timeout_s=WITHIN_S))

        say(capsys, "Redis emptied", verdict, 0)
        await eventually(partial(nothing_open, field), WITHIN_S, "an empty queue")
        field.check_queue()
        assert [member.starts for member in field.cluster.members] == starts


async def test_each_row_once_under_random_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One job after the other, while processes of every kind are killed, stopped, drained and cut off."""
    async with opened(tmp_path, workers=2, bulk=1) as field:
        chaos = faults.Chaos(field.cluster, faults.plan(SEED, SECONDS, KILLS, more=[Role.BULK, Role.BULK]))
        total, jobs = Verdict(0, 0, 0), 0
        async with asyncio.TaskGroup() as group:
            hurting = group.create_task(chaos.run())
            while not (hurting.done() and jobs):
                job = await field.submit(f"out-{jobs}", rows_per_part=20)
                status = await job.wait(timeout_s=WITHIN_S)
                total = job_proof.add(total, await field.prove(f"out-{jobs}", status))
                jobs += 1
        await field.cluster.ready((MODEL,))
        await eventually(partial(nothing_open, field), WITHIN_S, "an empty queue")
        field.check_queue()
    say(capsys, f"{jobs} jobs, CHAOS_SEED={SEED}", total, chaos.kills)
    assert chaos.kills == KILLS


def nothing_open(field: Field) -> bool:
    with field.cluster.redis() as client:
        return not client.zcard("qinfer:jobs:open")
