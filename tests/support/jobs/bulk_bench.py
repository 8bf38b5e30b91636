"""The services of a bulk worker, with Parquet inputs in a directory and a job to be planned."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from qinfer.core.settings import BulkSettings, LimitSettings, Settings, StoreSettings
from qinfer.jobs.examiner_pool import ExaminerDied
from qinfer.jobs.job import JobSpec, Output, encode_spec
from qinfer.jobs.parts import PartWriter, part_metadata, part_of, set_aside
from qinfer.jobs.plan import (
    ExpectedParts,
    JobPlan,
    PartInfo,
    Shard,
    UnplannedJob,
    decode_plan,
    decode_ticket,
    encode_plan,
)
from qinfer.jobs.planning import make_plan
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.jobs.shards import ShardPace
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.state import State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.queue.entries import Lease, bulk_lanes
from qinfer.queue.lanes import Queue
from qinfer.storage.local import LocalStore
from qinfer.storage.open import store_for
from qinfer.storage.store import CommitOutcome
from qinfer.testing import EmbeddedServer
from qinfer_workers.jobs.services import JobServices
from qinfer_workers.jobs.steps import Finaliser, JobPlanner
from tests.support.servers.servers import Database

T = TypeVar("T")

_CONFIG = """
backend: "stub"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_FP32 dims: [1] }
"""
MODEL = StoredModel("stub", 1, to_json(normalise(parse(_CONFIG), "stub")), (1,), content_hash="hash-1")
HASH = "sha256:1"
"""What the worker of a bench executes."""


def write_inputs(directory: Path, rows: Sequence[int], *, group: int = 1000, column: str = "x") -> None:
    """Writes a Parquet file for each number of rows, named `in-<number>.parquet`."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(rows):
        table = pa.table({column: pa.array(range(count), pa.float32())})
        pq.write_table(table, directory / f"in-{number}.parquet", row_group_size=group)


def spec(directory: Path, **changes: Any) -> JobSpec:
    """Returns a job that reads `<directory>/in` and writes `<directory>/out`, 10 rows a part."""
    output = Output(f"file://{directory}/out", rows_per_part=10)
    plain = JobSpec("stub", (f"file://{directory}/in/*.parquet",), output, version=1)
    return msgspec.structs.replace(plain, **changes)


def record_of(job: JobSpec, job_id: str = "job", state: str = "planning", **changes: Any) -> JobRecord:
    """Returns the record of a job as the gateway stores it."""
    return JobRecord(id=job_id, model=job.model, version=1, state=state, spec=encode_spec(job), **changes)


class FaultyStore(LocalStore):
    """A directory that can fail before an object of a certain name is created."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, BaseException] = {}
        self.puts: list[str] = []

    def put_if_absent(self, data: bytes, url: str) -> CommitOutcome:
        name = url.rpartition("/")[2]
        if name in self.before:
            raise self.before.pop(name)
        outcome = super().put_if_absent(data, url)
        self.puts.append(name)
        return outcome


class InlineExaminers:
    """Examines files in this process, so that tests need not start an examiner.

    Attributes:
        deaths: So many of the next ones die.
        threads: Those of each request.
    """

    def __init__(self) -> None:
        self.deaths = 0
        self.threads: list[int] = []

    async def plan(self, job: UnplannedJob, pace: ShardPace, threads: int) -> bytes:
        return await self._do(lambda: encode_plan(make_plan(job, pace, threads=threads)), threads)

    async def read_parts(self, parts: ExpectedParts, threads: int) -> list[PartInfo | str]:
        store = store_for(parts.output_url)
        return await self._do(lambda: [part_of(store, parts, shard) for shard in parts.shards], threads)

    async def set_aside(self, parts: ExpectedParts, threads: int) -> None:
        store = store_for(parts.output_url)

        def each() -> None:
            for shard in parts.shards:
                set_aside(store, parts, shard)

        await self._do(each, threads)

    async def _do(self, work: Callable[[], T], threads: int) -> T:
        self.threads.append(threads)
        if self.deaths:
            self.deaths -= 1
            raise ExaminerDied("SIGSEGV", ["file:///bad.parquet"])
        return await asyncio.to_thread(work)


class Bench:
    """The services of a bulk worker, and the actions of an inference worker."""

    clock: EmbeddedServer

    def __init__(self, directory: Path, delivery: Queue, store: ControlStore, **bulk: Any) -> None:
        self.directory = directory
        self.delivery = delivery
        self.store = store
        self.objects = FaultyStore()
        self.settings = Settings(
            bulk=BulkSettings(**{"sweep_every_s": 0.2, "plan_threads": 2, **bulk}),
            stores=StoreSettings(allow=(f"file://{directory}",)),
        )
        self.examiners: Any = InlineExaminers()
        self.jobs = Jobs(delivery)
        self.services = self.other_services()

    def other_services(self) -> JobServices:
        """Returns the services of another process."""
        return JobServices(
            settings=self.settings.bulk,
            stores=self.settings.stores,
            jobs=self.jobs,
            store=self.store,
            clock=self.delivery.clock,
            store_for=lambda _: self.objects,
            examiners=self.examiners,
        )

    async def beat(self, executed_hash: str = HASH, **changes: Any) -> None:
        """Has the worker report version 1 of the model."""
        state = VersionState(State.READY, 1, executed_hash=executed_hash)
        models = {"stub": {1: msgspec.structs.replace(state, **changes)}}
        await self.store.heartbeat(WorkerRecord(id="w1", started_at=0.0, models=models), 1e9)

    def planner(self) -> JobPlanner:
        return JobPlanner(self.services, LimitSettings())

    def finaliser(self) -> Finaliser:
        return Finaliser(self.services)

    async def record(self, job_id: str = "job") -> JobRecord:
        record = await self.jobs.get(job_id)
        assert record is not None
        return record

    async def texts(self, job_id: str = "job") -> list[str]:
        return [line.text for line in await self.jobs.log(job_id)]

    async def has_begun(self) -> bool:
        return "planning began" in await self.texts()

    def plan(self) -> JobPlan:
        """Returns the plan in the output."""
        return decode_plan((self.directory / "out" / "_plan.json").read_bytes())

    async def fetch(self, count: int = 100, consumer: str = "w1") -> list[tuple[Lease, Shard]]:
        """Takes shards as a worker does."""
        lanes = bulk_lanes("stub", 1)
        leases = await self.delivery.fetch(lanes, consumer, count, 0.0)
        return [(lease, decode_ticket(lease.frame).shard) for lease in leases]

    def commit(self, shard: Shard, job_id: str = "job", *, failed: int = 0, model_hash: str = HASH) -> Path:
        """Writes the part of a shard as a worker does, its first `failed` rows with errors."""
        path = self.directory / "out" / shard.part
        codes = pa.array(["bad_row"] * failed + [None] * (shard.rows - failed), pa.string())
        values = pa.array([float(row) for row in range(shard.rows)], pa.float32())
        table = pa.table({"y": values, "error_code": codes, "error_message": codes})
        output = Output(f"file://{self.directory}/out")
        with PartWriter(path, table.schema, output, part_metadata(job_id, shard, model_hash)) as part:
            for batch in table.to_batches():
                part.write(batch)
        return path

    async def settle(self, *, failed: int = 0) -> None:
        """Completes all shards, and sets the job's state as the last shard's notice does."""
        standing = await self.jobs.advance("job")
        while standing is not None and not standing.is_settled:
            for lease, shard in await self.fetch():
                self.commit(shard, failed=failed)
                await self.finish(lease, shard, failed=failed)
            standing = await self.jobs.advance("job")
        await self.jobs.move("job", {"running"}, "finalizing")  # or a sweep has done so

    async def finish(self, lease: Lease, shard: Shard, job_id: str = "job", failed: int = 0, error: str = "") -> None:
        """Ends a shard as a worker does."""
        outcome = ShardOutcome(shard.index, shard.rows, failed, error)
        assert await self.jobs.finish_shard(job_id, lease, outcome)


async def bench(database: Database, directory: Path, **bulk: Any) -> Bench:
    """Returns a bench with a model, and a live worker that has it; on another database of the same server."""
    own = database.another()
    store, delivery = own.store(), await own.delivery()
    await store.put_model(MODEL)
    await delivery.ensure(bulk_lanes("stub", 1))
    one = Bench(directory, delivery, store, **bulk)
    one.clock = own.server
    await one.beat()
    return one
