"""One shard, from its rows to its part: with real files and a model that makes trouble, without a queue."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.backends.base import Batch, Context, respond_rows
from qinfer.backends.stub import StubBackend
from qinfer.batching.batcher import Batcher, LoadedModel
from qinfer.batching.execution import WorkItem
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest
from qinfer.core.settings import Settings, StoreSettings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import InferenceFailed, QueueFull, StoreUnavailable
from qinfer.jobs.examiner_pool import ExaminerPool
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.parts import part_of
from qinfer.jobs.plan import RECORDS, PlanHead, Shard, decode_plan_head
from qinfer.jobs.queue.records import ShardOutcome
from qinfer.jobs.shard_rows import ShardReader
from qinfer.models.spec import Device as DeviceSpec
from qinfer.models.spec import ModelSpec
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.storage.local import LocalStore
from qinfer.storage.open import store_for
from qinfer.storage.store import CommitOutcome
from qinfer.tabular.schemas import encode_schema
from qinfer.tabular.spec import Range
from qinfer.tensors import from_numpy
from qinfer.testing import eventually, stub_spec
from qinfer_workers.inference.bulk import scoring, shard_files
from qinfer_workers.inference.bulk.arbiter import BatchSize, DeviceArbiter
from qinfer_workers.inference.bulk.chunks import Chunk
from qinfer_workers.inference.bulk.scoring import Purpose
from qinfer_workers.inference.bulk.shard_files import SPOOL_PREFIX, ScoringTask, ShardFiles, clear_spool
from qinfer_workers.inference.bulk.shard_loop import Abandoned, PutOff, ScoredVersion
from qinfer_workers.inference.bulk.shard_run import Resuming, ShardRun
from qinfer_workers.inference.executor import ThreadExecutor
from qinfer_workers.inference.loader import LoadedVersion
from tests.support.batching import Bench
from tests.support.jobs.bulk_data import ANY_FILE
from tests.support.jobs.shard_runs import job_spec, plan_head, read_parts, scored_rows, shards_of, write_rows


class Model(StubBackend):
    """Echoes; raises for batches with one of some values, and does what a test wants with others.

    Attributes:
        bad: Values that it raises for.
        error: What it raises.
        raised: Sizes of the batches that it raised for.
        wanted: The outputs that were asked of it.
    """

    def __init__(self, gate: threading.Event | None = None) -> None:
        super().__init__(gate)
        self.bad: Collection[float] = ()
        self.raised: list[int] = []
        self.wanted: set[tuple[str, ...]] = set()
        self.error: Exception = ValueError("no such number")

    def execute(self, batch: Batch, ctx: Context) -> None:
        """See the class."""
        values = next(iter(batch.inputs.values()))
        self.wanted.update(request.outputs for request in batch.requests)
        if self.bad and np.isin(values, list(self.bad)).any():
            self.sizes.append(batch.size)
            self.raised.append(batch.size)
            raise self.error
        super().execute(batch, ctx)


class Ground:
    """A model, and what its shards need."""

    def __init__(self, folder: Path, *instances: Model, spec: ModelSpec | None = None) -> None:
        self.folder, self.output = folder, folder / "out"
        self.spec = spec or stub_spec(max_batch_size=64)
        self.model, self.instances = instances[0], instances
        for instance in instances:
            instance.load(self.spec, folder, DeviceSpec())
        self.executor = ThreadExecutor(instances, asyncio.get_running_loop(), "stub")
        self.loaded = LoadedModel(spec=self.spec, version=1, generation=1, executor=self.executor)
        self.bench = Bench()
        self.clock = ServerClock()
        self.batcher = Batcher(self.loaded, self.clock, self.bench)
        self.arbiter = DeviceArbiter()
        self.arbiter.place(self.batcher, [DeviceSpec()])
        self.free, self.hurry, self.line = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self.progress: Callable[[], None] = lambda: None
        self.worker, self.noted, self.log = "w1", list[bytes](), list[str]()

    def task(self, shard: Shard, spec: JobSpec, **options: Any) -> ScoringTask:
        head = decode_plan_head(plan_head([shard], "h"))
        options = {
            "head": head,
            "model_hash": "h",
            "max_errors": -1,
            "spool": self.folder,
            "read_bytes": 2**26,
            "grant": ANY_FILE,
            "open_reader": ShardReader.opened,
            "read_part": lambda parts: part_of(store_for(parts.output_url), parts, parts.shards[0]),
            **options,
        }
        return ScoringTask(job_id="job1", spec=spec, shard=shard, model=self.spec, **options)

    async def note(self, was: bytes, now: bytes, line: str) -> bool:
        """Notes what is known of the one shard, as the queue does."""
        assert was == (self.noted[-1] if self.noted else b"")
        self.noted.append(now)
        self.log += [line] * bool(line)
        return True

    def run(
        self, shard: Shard, spec: JobSpec, *, is_again: bool = False, is_suspect: bool = False, **options: Any
    ) -> ShardRun:
        files = ShardFiles(self.task(shard, spec, **options))
        size = BatchSize(self.spec.max_batch_size, 1.0)
        served = ScoredVersion(
            batcher=self.batcher,
            loaded=LoadedVersion(spec=self.spec, version=1, generation=1, identity="", devices=()),
            arbiter=self.arbiter,
            size=size,
            clock=self.clock,
            hurry=self.hurry,
            spool=self.folder,
            read_bytes=2**26,
            stores=StoreSettings(allow=ANY_FILE.read),
            readers=ExaminerPool(Settings(), {}),
            line=self.line,
        )
        purpose = Purpose(
            model=self.loaded,
            clock=self.clock,
            request_id="job1-0",
            progress=self.progress,
            outputs=spec.output.tensors,
        )
        lease = Lease(Entry(Lane("stub", 1, "bulk2"), "1-0"), self.worker, b"", 1 + is_again, suspect=is_suspect)
        resuming = Resuming(lease, shard, "b", self.noted[-1] if self.noted else b"")
        resuming.note = self.note
        return ShardRun(files, purpose, served, self.free, resuming)

    def left(self) -> list[str]:
        """Returns what is in the spool folder still."""
        return [path.name for path in self.folder.glob(f"{SPOOL_PREFIX}*")]


def identity(path: Path) -> tuple[int, int, int]:
    """Returns what tells whether a file was written anew; to read it changes none of it."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def one_shard(folder: Path, rows: int, **options: Any) -> tuple[Shard, JobSpec]:
    (folder / "out").mkdir(exist_ok=True)
    url = write_rows(folder / "in.parquet", rows, **options)
    return shards_of(url)[0], job_spec([url], folder / "out")


async def test_rows_come_out_in_order_with_their_outputs(tmp_path: Path) -> None:
    """More than one chunk of them."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 5000)

    outcome = await ground.run(shard, spec).run()

    assert outcome == ShardOutcome(0, 5000, 0)
    assert scored_rows(ground.output) == [(row, float(row)) for row in range(5000)]
    assert ground.free.is_set()
    assert not ground.left()


async def test_only_chosen_outputs_are_asked_of_the_model(tmp_path: Path) -> None:
    stub = stub_spec(max_batch_size=64)
    two = replace(stub, outputs=(stub.outputs[0], replace(stub.outputs[0], name="z")))
    ground, (shard, spec) = Ground(tmp_path, Model(), spec=two), one_shard(tmp_path, 100)
    chosen = msgspec.structs.replace(spec, output=msgspec.structs.replace(spec.output, tensors=("y",)))

    outcome = await ground.run(shard, chosen).run()

    assert outcome == ShardOutcome(0, 100, 0)
    assert ground.model.wanted == {("y",)}
    assert "z" not in read_parts(ground.output).column_names


async def test_several_instances_score_one_shard(tmp_path: Path) -> None:
    """Each takes the next batch; the order stays."""
    gate = threading.Event()
    ground, (shard, spec) = Ground(tmp_path, *(Model(gate) for _ in range(3))), one_shard(tmp_path, 20_000)
    running = asyncio.create_task(ground.run(shard, spec).run())
    for instance in ground.instances:
        await eventually(partial(instance.started.acquire, blocking=False), description="a batch on each instance")
    gate.set()
    await running

    assert scored_rows(ground.output) == [(row, float(row)) for row in range(20_000)]


async def test_time_between_two_batches_counts_for_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond a row, asleep, and one of work after each batch: 32 rows cost 3 % more than infinitely many."""
    passed_s = worked_s = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds

    def work() -> None:
        nonlocal worked_s
        worked_s += 1e-3
        pass_time(1e-3)

    class Slow(Model):
        def execute(self, batch: Batch, ctx: Context) -> None:
            pass_time(1e-3 * sum(batch.rows))
            super().execute(batch, ctx)

    clock = SimpleNamespace(
        perf_counter=lambda: passed_s, perf_counter_ns=lambda: int(passed_s * 1e9), thread_time=lambda: worked_s
    )
    monkeypatch.setattr(scoring, "time", clock)
    ground, (shard, spec) = Ground(tmp_path, Slow()), one_shard(tmp_path, 2000)
    ground.progress = work

    await ground.run(shard, spec).run()

    assert ground.model.sizes[-2] >= 16


async def test_rows_that_fail_cost_no_other_row_its_output(tmp_path: Path) -> None:
    """Nulls have no tensor, and with some the model raises."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 1000, nulls=[3])
    ground.model.bad = {500.0, 501.0, 999.0}

    outcome = await ground.run(shard, spec).run()

    table = read_parts(ground.output)
    codes = {row: code for row, code in enumerate(table.column("error_code").to_pylist()) if code}
    assert outcome == ShardOutcome(0, 1000, 4)
    assert codes.pop(3) not in ("", "execution_failed")
    assert codes == dict.fromkeys((500, 501, 999), "execution_failed")
    assert table.column("error_message").to_pylist()[500] == "no such number"
    missing = {3, 500, 501, 999}
    assert scored_rows(ground.output) == [(row, None if row in missing else float(row)) for row in range(1000)]


async def test_finding_a_bad_row_takes_few_executions(tmp_path: Path) -> None:
    """Its batch is halved; the other half is not."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 2000)
    ground.model.bad = {1999.0}

    await ground.run(shard, spec).run()

    assert ground.model.raised[-1] == 1
    assert len(ground.model.raised) <= 7  # of 64 rows, 32, 16, 8, 4, 2, 1


async def test_a_model_without_a_batch_dimension_gets_row_after_row(tmp_path: Path) -> None:
    """Its tensors have exactly the configured dimensions."""
    spec = stub_spec(max_batch_size=0)
    ground, (shard, job) = Ground(tmp_path, Model(), spec=spec), one_shard(tmp_path, 50)
    ground.model.bad = {7.0}

    outcome = await ground.run(shard, job).run()

    assert outcome == ShardOutcome(0, 50, 1)
    assert scored_rows(ground.output) == [(row, None if row == 7 else float(row)) for row in range(50)]


async def test_too_many_failed_rows_end_the_shard(tmp_path: Path) -> None:
    """What is committed would count; the text says why the first failed."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 1000)
    ground.model.bad = {1.0, 2.0, 3.0}

    outcome = await ground.run(shard, spec, max_errors=2).run()

    assert (outcome.rows, outcome.failed_rows) == (3, 3)  # what is known of its rows
    assert outcome.error.startswith("3 of its first 256 rows failed, such as row 1 of 'file:///")
    assert "in.parquet': " in outcome.error
    assert "no such number" in outcome.error
    assert not list(ground.output.iterdir())
    assert not ground.left()


async def test_a_file_that_was_replaced_fails_the_shard(tmp_path: Path) -> None:
    """At once: another try would see the same."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 10)
    write_rows(tmp_path / "in.parquet", 11)

    outcome = await ground.run(shard, spec).run()

    assert "in.parquet" in outcome.error
    assert outcome.failed_rows == 10
    assert not list(ground.output.iterdir())


async def test_what_a_called_model_lacks_puts_the_shard_off(tmp_path: Path) -> None:
    """Its queue is full; that says nothing about the rows."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 10)
    ground.model.bad, ground.model.error = {5.0}, QueueFull("full")

    with pytest.raises(PutOff, match="full"):
        await ground.run(shard, spec).run()

    assert not list(ground.output.iterdir())
    assert not ground.left()


async def test_a_part_that_is_there_counts(tmp_path: Path) -> None:
    """Whoever committed it died before it could say so: the outcome is the same, and nothing is scored again."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 100)
    ground.model.bad = {5.0}
    first = await ground.run(shard, spec).run()
    before = identity(ground.output / shard.part)
    ground.model.sizes.clear()

    again = await ground.run(shard, spec, is_again=True).run()
    scored = list(ground.model.sizes)
    late = await ground.run(shard, spec).run()  # did not know, and finds it when it commits

    assert first == again == late == ShardOutcome(0, 100, 1)
    assert not scored
    assert identity(ground.output / shard.part) == before
    assert not ground.left()


async def test_a_part_is_committed_when_its_rows_are_no_longer_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers of stores keep exceptions, and so the frames that these have passed."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 100)
    committed, held = LocalStore.commit_if_absent, list[object]()

    def commit(store: LocalStore, path: Path, url: str) -> CommitOutcome:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            held.extend(value for value in frame.f_locals.values() if isinstance(value, Chunk | pa.RecordBatch))
            frame = frame.f_back
        return committed(store, path, url)

    monkeypatch.setattr(LocalStore, "commit_if_absent", commit)

    assert await ground.run(shard, spec).run() == ShardOutcome(0, 100, 0)
    assert not held


async def test_a_broken_part_is_set_aside(tmp_path: Path) -> None:
    """And made again."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 100)
    (ground.output / shard.part).write_bytes(b"PAR1 cut off")

    outcome = await ground.run(shard, spec, is_again=True).run()

    assert outcome == ShardOutcome(0, 100, 0)
    assert len(scored_rows(ground.output)) == 100
    (aside,) = (ground.output / "_broken").iterdir()
    assert aside.read_bytes() == b"PAR1 cut off"


async def test_a_shard_of_no_rows_has_a_part(tmp_path: Path) -> None:
    """With the columns that all have."""
    ground = Ground(tmp_path, Model())
    ground.output.mkdir()
    url = write_rows(tmp_path / "in.parquet", 10)
    (full,) = shards_of(url)
    shard = Shard(0, full.part, 0, (Range(url, full.ranges[0].etag, 0, 0, 0, 0),))

    outcome = await ground.run(shard, job_spec([url], ground.output)).run()

    assert outcome == ShardOutcome(0, 0, 0)
    assert pq.read_table(ground.output / shard.part).num_rows == 0


async def test_stopped_it_commits_nothing_and_frees_the_instance(tmp_path: Path) -> None:
    """At the next batch."""
    gate = threading.Event()
    ground, (shard, spec) = Ground(tmp_path, Model(gate)), one_shard(tmp_path, 1000)
    run = ground.run(shard, spec)
    running = asyncio.create_task(run.run())
    await eventually(lambda: ground.model.started.acquire(blocking=False), description="a batch")
    run.stop()
    gate.set()

    with pytest.raises(Abandoned):
        await running

    assert len(ground.model.sizes) == 1
    assert not list(ground.output.iterdir())
    await eventually(lambda: not ground.left(), description="an empty spool")


async def test_cancelled_it_returns_when_the_instance_is_back(tmp_path: Path) -> None:
    """A worker that drains, or runs a suspect, must know that nothing executes."""
    gate = threading.Event()
    ground, (shard, spec) = Ground(tmp_path, Model(gate)), one_shard(tmp_path, 1000)
    running = asyncio.create_task(ground.run(shard, spec).run())
    await eventually(lambda: ground.model.started.acquire(blocking=False), description="a batch")
    running.cancel()
    await asyncio.sleep(0.05)
    before = running.done()
    gate.set()
    await asyncio.wait([running])

    assert (before, running.cancelled(), len(ground.model.sizes)) == (False, True, 1)


async def test_cancelled_in_a_hurry_it_does_not_wait(tmp_path: Path) -> None:
    """The model hangs; whoever asks is told."""
    gate = threading.Event()
    ground, (shard, spec) = Ground(tmp_path, Model(gate)), one_shard(tmp_path, 1000)
    run = ground.run(shard, spec)
    running = asyncio.create_task(run.run())
    await eventually(lambda: ground.model.started.acquire(blocking=False), description="a batch")
    running.cancel()
    await asyncio.sleep(0)
    ground.hurry.set()
    await asyncio.wait([running])

    assert (running.cancelled(), run.is_stuck) == (True, True)
    gate.set()


async def test_online_requests_go_first_at_each_batch(tmp_path: Path) -> None:
    """The order of executions tells: one bulk batch, then what came meanwhile, then bulk again."""
    gate = threading.Event()
    ground, (shard, spec) = Ground(tmp_path, Model(gate)), one_shard(tmp_path, 64)
    order: list[str] = []
    execute = ground.model.execute

    def noted(batch: Batch, ctx: Context) -> None:
        order.append("bulk" if batch.requests[0].id.startswith("job1") else batch.requests[0].id)
        execute(batch, ctx)

    ground.model.execute = noted  # type: ignore[method-assign]
    running = asyncio.create_task(ground.run(shard, spec).run())
    await eventually(lambda: ground.model.started.acquire(blocking=False), description="a batch")
    ground.batcher.add_items([online(ground, "a"), online(ground, "b")])
    gate.set()
    await running

    assert order[0] == "bulk"
    assert order[1] == "a"
    assert set(order[2:]) == {"bulk"}
    assert [item.request.id for item, _ in ground.bench.answered] == ["a", "b"]


async def test_the_next_shard_may_begin_while_the_last_rows_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before everything is read, and there is little left at the pace of the rows before."""
    monkeypatch.setattr("qinfer_workers.inference.bulk.chunks.AHEAD_S", 1e9)
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 200)
    execute, proceed, is_free = ground.model.execute, threading.Semaphore(1), []

    def noted(batch: Batch, ctx: Context) -> None:
        proceed.acquire()
        is_free.append(ground.free.is_set())
        execute(batch, ctx)

    ground.model.execute = noted  # type: ignore[method-assign]
    run = asyncio.create_task(ground.run(shard, spec).run())
    await eventually(ground.free.is_set, description="leave for the next, after the first batch")
    is_over = run.done()
    proceed.release(1000)
    await run

    assert (is_over, is_free[0], is_free[-1]) == (False, False, True)


async def test_a_shard_is_scored_after_the_one_before(tmp_path: Path) -> None:
    """It is read meanwhile."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 200)
    await ground.line.acquire()
    shard_run = ground.run(shard, spec)
    chunks = shard_run._chunks  # what was read shows nowhere else
    run = asyncio.create_task(shard_run.run())
    await eventually(lambda: chunks.has_work, description="rows")
    before = list(ground.model.sizes)
    ground.line.release()

    assert (before, await run, ground.line.locked()) == ([], ShardOutcome(0, 200, 0), False)


async def test_a_shard_is_left_to_others_when_the_one_before_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model hangs, say."""
    monkeypatch.setattr("qinfer_workers.inference.bulk.shard_run.WAITS_S", 0.01)
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 200)
    await ground.line.acquire()

    with pytest.raises(PutOff, match="previous shard"):
        await ground.run(shard, spec).run()

    assert (ground.model.sizes, ground.left(), ground.line.locked()) == ([], [], True)


@pytest.mark.parametrize("when", ["before it waits", "while it waits"])
async def test_a_shard_that_waits_for_the_one_before_can_be_stopped(tmp_path: Path, when: str) -> None:
    """At once: its job may have been cancelled, and the shard before may be at work for a while."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 200)
    await ground.line.acquire()
    run = ground.run(shard, spec)
    if when == "before it waits":
        run.stop()
    running = asyncio.create_task(run.run())
    if when == "while it waits":
        await eventually(lambda: bool(ground.line._waiters), description="a shard in line")  # it shows nowhere else
        run.stop()
        await asyncio.sleep(0)
        run.stop()  # the job and the lease may end together

    with pytest.raises(Abandoned):
        await running

    assert (ground.model.sizes, ground.left(), ground.line.locked()) == ([], [], True)


async def test_a_model_that_was_loaded_anew_does_not_go_on_with_a_part(tmp_path: Path) -> None:
    """One part, one model."""
    gate = threading.Event()
    ground, (shard, spec) = Ground(tmp_path, Model(gate)), one_shard(tmp_path, 1000)
    running = asyncio.create_task(ground.run(shard, spec).run())
    await eventually(lambda: ground.model.started.acquire(blocking=False), description="a batch")
    newer = ThreadExecutor([Model()], asyncio.get_running_loop(), "stub")
    ground.batcher.replace(replace(ground.loaded, executor=newer, generation=2))
    gate.set()

    with pytest.raises(PutOff, match="reloaded"):
        await running
    newer.retire()


async def test_a_model_that_answers_wrongly_says_so_in_each_row(tmp_path: Path) -> None:
    """No single row is to blame, so that none is looked for."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 100)

    def execute(batch: Batch, ctx: Context) -> None:
        ground.model.sizes.append(batch.size)
        respond_rows(batch, ctx, {"y": np.ones((batch.size, 3), "<f4")}, {"y": "FP32"})

    ground.model.execute = execute  # type: ignore[method-assign]
    outcome = await ground.run(shard, spec).run()

    assert outcome.failed_rows == 100
    assert sum(ground.model.sizes) == 100
    failed = read_parts(ground.output)
    assert set(failed.column("error_code").to_pylist()) == {"output_mismatch"}
    assert "a bulk job takes outputs only as they are declared" in failed.column("error_message").to_pylist()[0]


async def test_an_error_that_the_model_answers_with_is_the_rows_(tmp_path: Path) -> None:
    """It may answer with one instead of raising it."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 10)

    def execute(batch: Batch, ctx: Context) -> None:
        (x,) = batch.inputs.values()
        is_bad = bool((x == 4.0).any())
        ctx.respond(0, InferenceFailed("not four") if is_bad else (from_numpy("y", x),))

    ground.model.execute = execute  # type: ignore[method-assign]
    await ground.run(shard, spec).run()

    assert [row for row, value in scored_rows(ground.output) if value is None] == [4]


def test_what_dead_workers_left_in_the_spool_goes(tmp_path: Path) -> None:
    """What was touched since stays: somebody may be writing it."""
    old, new, other = (tmp_path / name for name in (f"{SPOOL_PREFIX}1-a", f"{SPOOL_PREFIX}2-b", "other"))
    for path in (old, new, other):
        path.write_bytes(b"x")
    at = new.stat().st_mtime
    for path in (old, other):
        os.utime(path, (at - 100, at - 100))

    clear_spool(tmp_path, at - 50)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([new.name, other.name])


def online(ground: Ground, name: str) -> WorkItem:
    """Returns an online request that has just come."""
    now_s = ground.clock.now_s()
    item = WorkItem(
        rows=1,
        key=None,
        enqueued_s=now_s,
        deadline_s=now_s + 60,
        lease=Lease(Entry(Lane("stub", 1), f"1000-{name}"), "w1", b""),
        request=InferRequest(model="stub", inputs=(from_numpy("x", np.ones((1, 2), "<f4")),), id=name),
    )
    ground.batcher.classify(item)
    return item


async def test_files_of_other_types_are_read_as_the_plan_says(tmp_path: Path) -> None:
    """A shard may span files: one has whole numbers where another has fractions."""
    (tmp_path / "out").mkdir()
    urls = []
    for name, values in (("a", [1, 2]), ("b", [0.5])):
        pq.write_table(pa.table({"x": pa.array([[value] * 2 for value in values])}), tmp_path / f"{name}.parquet")
        urls.append(f"file://{tmp_path}/{name}.parquet")
    shard = msgspec.structs.replace(
        shards_of(urls[0])[0], rows=3, ranges=tuple(one.ranges[0] for one in shards_of(*urls))
    )
    head = PlanHead(model_hash="h", schema=encode_schema(pa.schema([("x", pa.list_(pa.float64()))])))
    ground = Ground(tmp_path, Model())

    outcome = await ground.run(shard, job_spec(urls, ground.output), head=head).run()

    assert outcome == ShardOutcome(0, 3, 0)
    assert [value for _, value in scored_rows(ground.output)] == [1.0, 2.0, 0.5]


async def test_another_model_than_the_plan_s_scores_nothing(tmp_path: Path) -> None:
    """One output must not be of two models."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 10)

    outcome = await ground.run(shard, spec, model_hash="another").run()

    assert "has changed since the job was planned" in outcome.error
    assert not list(ground.output.iterdir())


async def test_a_part_that_is_there_counts_though_the_model_has_changed_here(tmp_path: Path) -> None:
    """It is of the plan's model, whichever this worker has."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 10)
    first = await ground.run(shard, spec).run()

    again = await ground.run(shard, spec, is_again=True, model_hash="another").run()

    assert again == first == ShardOutcome(0, 10, 0)


@pytest.mark.parametrize(("read", "write", "use"), [("other", "out", "read"), ("", "other", "write")])
async def test_a_shard_beyond_what_was_granted_is_not_scored(tmp_path: Path, read: str, write: str, use: str) -> None:
    """A plan says what is to be read and written; what may be is decided here, too."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 100)
    grant = UrlGrant((f"file://{tmp_path}/{read}".rstrip("/"),), (f"file://{tmp_path}/{write}",), "acme")

    outcome = await ground.run(shard, spec, grant=grant).run()

    assert (outcome.rows, outcome.failed_rows) == (100, 100)
    assert f"tenant 'acme' may {use}" in outcome.error
    assert not list(ground.output.iterdir())


async def test_a_part_is_not_written_through_a_link_out_of_what_was_granted(tmp_path: Path) -> None:
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 100)
    (tmp_path / "other").mkdir()
    grant = UrlGrant((f"file://{tmp_path}",), (f"file://{tmp_path}/own",), "acme")
    spec = msgspec.structs.replace(spec, output=msgspec.structs.replace(spec.output, url=f"file://{tmp_path}/own/out"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "out").symlink_to("../other")

    outcome = await ground.run(shard, spec, grant=grant).run()

    assert "may write" in outcome.error
    assert not list((tmp_path / "other").iterdir())


class FullStore(LocalStore):
    """Has no space for a part the first times."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.fails = fails

    def commit_if_absent(self, local: Path, url: str) -> CommitOutcome:
        self.fails -= 1
        if self.fails >= 0:
            raise StoreUnavailable(f"there is no space left for '{url}'")
        return super().commit_if_absent(local, url)


async def test_a_scored_part_whose_store_is_full_is_committed_later_and_not_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "_FIRST_COMMIT_S", 0.001)
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 100)
    store, reasons = FullStore(3), list[str]()
    run = ground.run(shard, spec, store_for=lambda _: store)
    run.on_delay = lambda error: reasons.append(error.message)

    outcome = await run.run()

    assert outcome == ShardOutcome(0, 100, 0)
    assert sum(ground.model.sizes) == 100
    assert reasons == [f"there is no space left for '{spec.output.url}/{shard.part}'"] * 3
    assert not ground.left()


class LostStore(LocalStore):
    """Fails where a part would be committed: what was written before stays."""

    def commit_if_absent(self, local: Path, url: str) -> CommitOutcome:
        raise StoreUnavailable(f"'{local}' does not reach '{url}'")


@pytest.mark.parametrize("format_", ["csv", "jsonl"])
async def test_an_attempt_that_ends_before_its_part_is_there_does_not_count(tmp_path: Path, format_: Any) -> None:
    """Its commit record is there, of other errors than the attempt that follows has."""
    ground, (whole, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 100)
    shard = msgspec.structs.replace(whole, part=f"part-00000.{format_}")
    spec = msgspec.structs.replace(spec, output=Output(spec.output.url, format_))
    ground.model.bad = {5.0}
    first = ground.run(shard, spec, store_for=lambda _: LostStore())
    first.on_delay = lambda _: first.stop()
    with pytest.raises(Abandoned):
        await first.run()
    ground.model.bad = ()

    outcome = await ground.run(shard, spec, is_again=True).run()
    again = await ground.run(shard, spec, is_again=True).run()

    assert outcome == again == ShardOutcome(0, 100, 0)
    assert len(list((ground.output / RECORDS / shard.part).iterdir())) == 2
    assert not ground.left()
