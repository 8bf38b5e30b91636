"""A shard whose run is broken off goes on behind what is kept: each row is executed once, and counts once."""

import asyncio
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.backends.base import Batch, Context
from qinfer.errors import StoreUnavailable
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import FAILED, Shard
from qinfer.jobs.queue.records import ShardOutcome
from qinfer.jobs.resumption import CHECKPOINTS, MOST_DEATHS, Resumption, rows_of
from qinfer.jobs.shard_rows import ShardReader
from qinfer.storage.local import LocalStore
from qinfer.storage.store import CommitOutcome
from qinfer.testing import eventually, stub_spec
from qinfer_workers.inference.bulk import shard_files
from qinfer_workers.inference.bulk.shard_loop import Abandoned, GivenUp, PutOff
from qinfer_workers.inference.bulk.shard_run import ShardRun
from tests.support.jobs.bulk_data import shard_of, write
from tests.support.jobs.shard_runs import job_spec, read_parts, scored_rows, shards_of
from tests.unit.workers.inference.bulk.test_row_streams import Streaming
from tests.unit.workers.inference.bulk.test_shard_run import Ground, Model, one_shard

ROWS = 1000


class Stopping(Model):
    """Has the run stopped, as a worker that drains does, in the batch of a row; notes what it executes."""

    def __init__(self) -> None:
        super().__init__()
        self.at: float | None = None
        self.run: asyncio.Task[ShardOutcome] | None = None
        self.shard: ShardRun | None = None
        self.loop = asyncio.get_running_loop()
        self.seen: list[float] = []

    def execute(self, batch: Batch, ctx: Context) -> None:
        """See the class."""
        values = next(iter(batch.inputs.values()))
        found = [float(value) for value in values.reshape(len(values), -1)[:, 0]]
        self.stop_at(found)
        super().execute(batch, ctx)
        self.seen += found

    def stop_at(self, found: list[float]) -> None:
        """Has the run stopped if one of the values is the row of that."""
        if self.at in found:
            assert self.run is not None
            self.at = None
            self.loop.call_soon_threadsafe(self.run.cancel)
            assert self.shard is not None
            assert self.shard._chunks.wait_stopped(30.0)


async def stopped_at(ground: Ground, shard: Shard, spec: JobSpec, at: float, **options: object) -> None:
    """Runs a shard until a row is executed, and stops it as a worker that drains does."""
    model = ground.model
    assert isinstance(model, Stopping)
    model.shard = ground.run(shard, spec, **options)  # type: ignore[arg-type]
    model.at, model.run = at, asyncio.create_task(model.shard.run())
    with pytest.raises(asyncio.CancelledError):
        await model.run


def pieces(ground: Ground) -> list[Path]:
    return [path for path in (ground.output / CHECKPOINTS).rglob("*") if path.is_file()]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("format_", ["parquet", "arrow", "csv", "jsonl"])
async def test_a_shard_that_is_stopped_again_and_again_has_each_row_once(
    tmp_path: Path, format_: str, *, is_split: bool
) -> None:
    """Output and counts are those of a run that nobody stopped; failed rows too."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    results = []
    for name, stops in (("one", ()), ("two", (300.0, 610.0, 640.0))):
        folder = tmp_path / name
        ground, (shard, spec) = Ground(folder, Stopping()), one_shard(folder, ROWS, nulls=[3, 700])
        ground.model.bad = {5.0, 500.0, 999.0}
        output = Output(url=spec.output.url, format=format_, failed_rows="separate" if is_split else "inline")  # type: ignore[arg-type]
        spec = msgspec.structs.replace(spec, output=output)
        shard = msgspec.structs.replace(shard, part=f"part-00000.{format_}")
        for at in stops:
            await stopped_at(ground, shard, spec, at)
            assert not ground.left()
        if stops:
            assert Resumption.decoded(ground.noted[-1]).done > 600
            assert not list(ground.output.glob("part-*"))
        results.append(await ground.run(shard, spec).run())
        assert isinstance(ground.model, Stopping)
        assert sorted(ground.model.seen) == [float(row) for row in range(ROWS) if row not in {3, 5, 500, 700, 999}]
        assert not ground.left()
        assert not pieces(ground)

    assert results == [ShardOutcome(0, ROWS, 5)] * 2
    for path in filter(Path.is_file, (tmp_path / "one" / "out").rglob(f"*.{format_}")):
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        if FAILED in path.parts:
            [other] = (tmp_path / "two" / "out" / FAILED).iterdir()
        assert rows_in(other, "two") == rows_in(path, "one")


def rows_in(path: Path, name: str) -> object:
    if path.suffix == ".parquet":
        text = str(pq.read_table(path).to_pylist())
    elif path.suffix == ".arrow":
        text = str(pa.ipc.open_file(path).read_all().to_pylist())
    else:
        text = path.read_text()
    return text.replace(f"/{name}/", "/").encode()


async def test_a_stop_keeps_the_rows_of_a_chunk_that_is_not_scored_whole(tmp_path: Path) -> None:
    """A slow model has a chunk of 256 rows for minutes."""
    ground, (shard, spec) = Ground(tmp_path, Stopping()), one_shard(tmp_path, 256)
    assert isinstance(ground.model, Stopping)

    await stopped_at(ground, shard, spec, 5.0)

    known = Resumption.decoded(ground.noted[-1])
    assert known.done == len(ground.model.seen) < 256


async def test_rows_of_several_shapes_come_to_an_end_however_often_they_are_stopped(tmp_path: Path) -> None:
    """Their batches are not in the rows' order: what is kept may be nothing, and then less is begun at a time."""
    (tmp_path / "out").mkdir()
    rows = [[float(row)] * (1 + row % 2) for row in range(200)]
    pq.write_table(
        pa.table({"x": pa.array(rows, pa.list_(pa.float32())), "id": list(range(200))}), tmp_path / "in.parquet"
    )
    stub = stub_spec(max_batch_size=4)
    spec_of_model = replace(
        stub, inputs=(replace(stub.inputs[0], dims=(-1,)),), outputs=(replace(stub.outputs[0], dims=(-1,)),)
    )
    ground = Ground(tmp_path, Stopping(), spec=spec_of_model)
    url = f"file://{tmp_path}/in.parquet"
    shard, spec = shards_of(url)[0], job_spec([url], tmp_path / "out")
    model = ground.model
    assert isinstance(model, Stopping)
    for _ in range(300):
        model.run = asyncio.create_task(ground.run(shard, spec).run())
        run, count = model.run, len(model.seen)
        await eventually(lambda count=count, run=run: len(model.seen) > count or run.done(), 20.0, "a batch")  # type: ignore[misc]
        run.cancel()
        with suppress(asyncio.CancelledError):
            assert await run == ShardOutcome(0, 200, 0)
            break

    assert scored_rows(tmp_path / "out") == [(row, float(row)) for row in range(200)]


async def test_a_part_that_is_uploaded_as_its_worker_is_stopped_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground, (shard, spec) = Ground(tmp_path, Stopping()), one_shard(tmp_path, 100)
    began, goes_on, commit = threading.Event(), threading.Event(), LocalStore.commit_if_absent

    def wait(store: LocalStore, local: Path, url: str) -> CommitOutcome:
        began.set()
        goes_on.wait()
        return commit(store, local, url)

    monkeypatch.setattr(LocalStore, "commit_if_absent", wait)
    running = asyncio.create_task(ground.run(shard, spec).run())
    await eventually(began.is_set, description="an upload")
    running.cancel()
    await asyncio.sleep(0)
    goes_on.set()

    assert await running == ShardOutcome(0, 100, 0)
    assert not ground.noted


async def test_who_is_in_a_hurry_waits_for_no_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ground, (shard, spec) = Ground(tmp_path, Stopping()), one_shard(tmp_path, ROWS)
    goes_on, began, commit = threading.Event(), threading.Event(), LocalStore.commit_if_absent

    def wait(store: LocalStore, local: Path, url: str) -> CommitOutcome:
        began.set()
        goes_on.wait()
        return commit(store, local, url)

    monkeypatch.setattr(LocalStore, "commit_if_absent", wait)
    stopping = asyncio.create_task(stopped_at(ground, shard, spec, 300.0))
    await eventually(began.is_set, description="an upload")
    ground.hurry.set()
    await stopping
    assert not ground.noted
    goes_on.set()


async def test_a_suspect_runs_in_ranges_that_are_marked_before_and_kept_behind(tmp_path: Path) -> None:
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, ROWS)

    assert await ground.run(shard, spec, is_again=True, is_suspect=True).run() == ShardOutcome(0, ROWS, 0)

    known = [Resumption.decoded(noted) for noted in ground.noted]
    assert [one.begun is not None for one in known] == [True, False] * 8
    assert [one.done for one in known[1::2]] == [125 * step for step in range(1, 9)]
    assert scored_rows(ground.output) == [(row, float(row)) for row in range(ROWS)]
    assert not pieces(ground)


async def test_a_row_that_was_alone_at_two_deaths_fails_and_is_named(tmp_path: Path) -> None:
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 10)
    resuming = ground.run(shard, spec, is_suspect=True).resuming
    for worker in ("w8", "w9"):
        known = msgspec.structs.replace(resuming.known, size=1, until=0)
        resuming.known = known.begins(known.step(10), worker).taken(10, is_suspect=True)
    ground.noted.append(resuming.known.encoded())

    outcome = await ground.run(shard, spec, is_suspect=True).run()

    table = read_parts(ground.output)
    assert outcome == ShardOutcome(0, 10, 1)
    assert table.column("error_code").to_pylist() == ["execution_failed"] + [None] * 9
    assert table.column("error_message")[0].as_py() == shard_files.DEADLY
    assert ground.model.sizes[0] == 1
    assert sum(ground.model.sizes) == 9
    [line] = ground.log
    assert line == f"row 0 of 'file://{tmp_path}/in.parquet' failed: it killed w8 and w9 while it was executed alone"


async def test_a_shard_that_ends_workers_without_an_end_is_given_up(tmp_path: Path) -> None:
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, 10)
    known = ground.run(shard, spec, is_suspect=True).resuming.known
    ground.noted.append(msgspec.structs.replace(known, size=1, alone=("w",) * MOST_DEATHS + ("v",)).encoded())

    with pytest.raises(GivenUp, match=r"6 workers died or hung over row 0 of 'file://.*in.parquet'"):
        await ground.run(shard, spec, is_suspect=True).run()


@pytest.mark.parametrize("damage", ["gone", "cut"])
async def test_rows_are_scored_again_where_what_is_kept_is_damaged(tmp_path: Path, damage: str) -> None:
    ground, (shard, spec) = Ground(tmp_path, Stopping()), one_shard(tmp_path, ROWS)
    await stopped_at(ground, shard, spec, 300.0)
    for path in pieces(ground):
        path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(PutOff):
        await ground.run(shard, spec).run()

    assert await ground.run(shard, spec).run() == ShardOutcome(0, ROWS, 0)
    assert scored_rows(ground.output) == [(row, float(row)) for row in range(ROWS)]


async def test_what_another_plan_or_model_has_scored_is_not_used(tmp_path: Path) -> None:
    ground, (shard, spec) = Ground(tmp_path, Stopping()), one_shard(tmp_path, ROWS)
    await stopped_at(ground, shard, spec, 300.0)
    known = Resumption.decoded(ground.noted[-1])
    ground.noted.append(msgspec.structs.replace(known, bound="another").encoded())

    run = ground.run(shard, spec)

    assert run.resuming.known.done == 0
    assert run.resuming.known.attempt > known.attempt
    assert await run.run() == ShardOutcome(0, ROWS, 0)


async def test_failed_rows_that_are_kept_count_against_the_threshold(tmp_path: Path) -> None:
    ground, (shard, spec) = Ground(tmp_path, Stopping()), one_shard(tmp_path, ROWS)
    ground.model.bad = {5.0, 6.0, 900.0}
    await stopped_at(ground, shard, spec, 300.0, max_errors=2)

    outcome = await ground.run(shard, spec, max_errors=2).run()

    assert ground.model.raised
    assert (outcome.failed_rows, outcome.error.partition(" such")[0]) == (3, "3 of its first 1000 rows failed,")


async def test_a_shard_that_another_has_taken_is_abandoned(tmp_path: Path) -> None:
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, ROWS)
    run = ground.run(shard, spec, is_suspect=True)

    async def refuse(*_: object) -> bool:
        return False

    run.resuming.note = refuse

    with pytest.raises(Abandoned):
        await run.run()
    assert not ground.left()
    assert not ground.model.sizes


async def test_a_mark_is_taken_off_where_a_store_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count as a death."""
    ground, (shard, spec) = Ground(tmp_path, Model()), one_shard(tmp_path, ROWS)

    def fail(*_: object) -> None:
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(shard_files.ShardFiles, "read", fail)
    run = ground.run(shard, spec, is_suspect=True)
    with pytest.raises(PutOff):
        await run.run()
    await run.resuming.let_go()

    assert Resumption.decoded(ground.noted[-1]).begun is None


async def test_progress_counts_what_is_kept(tmp_path: Path) -> None:
    ground, (shard, spec) = Ground(tmp_path, Stopping()), one_shard(tmp_path, ROWS)
    await stopped_at(ground, shard, spec, 300.0)

    run = ground.run(shard, spec)

    assert run.rows_scored == Resumption.decoded(ground.noted[-1]).done > 250
    await run.run()
    assert run.rows_scored == ROWS


async def test_the_threshold_is_looked_at_where_the_rows_that_are_left_do_not_fail(tmp_path: Path) -> None:
    ground, (shard, spec) = Ground(tmp_path, Stopping()), one_shard(tmp_path, ROWS)
    ground.model.bad = {5.0, 6.0}
    await stopped_at(ground, shard, spec, 300.0)

    outcome = await ground.run(shard, spec, max_errors=1).run()

    assert outcome.failed_rows == 2
    assert outcome.error.endswith("rows failed")


async def test_a_decoupled_model_has_each_row_once(tmp_path: Path) -> None:
    """A row of the output has the responses to its row, however many; a chunk of 64 rows is broken off within."""

    class Both(Streaming, Stopping):
        def execute(self, batch: Batch, ctx: Context) -> None:
            self.stop_at([float(value) for value in next(iter(batch.inputs.values()))[:, 0]])
            Streaming.execute(self, batch, ctx)

    spec_of_model = replace(stub_spec(max_batch_size=8), decoupled=True)
    ground, (shard, spec) = Ground(tmp_path, Both(), spec=spec_of_model), one_shard(tmp_path, 200, nulls=[4])
    for at in (70.0, 130.0):
        await stopped_at(ground, shard, spec, at)

    outcome = await ground.run(shard, spec).run()

    expected = [[[row + index / 4] * 2 for index in range(row % 3)] for row in range(200)]
    assert outcome == ShardOutcome(0, 200, 2)
    assert read_parts(ground.output)["y"].to_pylist() == [
        None if row in (4, 7) else expected[row] for row in range(200)
    ]
    assert sum(ground.model.sizes) in (199, 200)


@pytest.mark.parametrize("extension", ["parquet", "arrow", "csv", "jsonl"])
def test_some_rows_of_a_shard_are_read_from_every_format(tmp_path: Path, extension: str) -> None:
    table = pa.table({"a": list(range(100)), "b": [f"row {row}" for row in range(100)]})
    url = write(tmp_path / f"in.{extension}", table, group=30)
    shard = shard_of(url, first=10, rows=80)

    def values(part: Shard) -> list[int]:
        with closing(ShardReader(part, ["a"], table.schema)) as reader:
            batches = list(iter(lambda: reader.read(7), None))
        return [value for batch in batches for value in batch.record.column("a").to_pylist()]

    assert values(rows_of(shard, 15, 60)) == values(shard)[15:60] == list(range(25, 70))
