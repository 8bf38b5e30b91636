"""Finishing jobs: once, twice, at the same time, after a crash, and with parts that are broken or gone."""

import asyncio
from pathlib import Path

import pytest

from qinfer.errors import StoreUnavailable
from qinfer.jobs.examiner_pool import ExaminerDied
from qinfer.jobs.job import JobState
from qinfer.jobs.parts import set_aside
from qinfer.jobs.plan import ExpectedParts, Manifest, decode_manifest, decode_success
from qinfer_workers.jobs.steps import MAX_ROUNDS, Finaliser
from tests.support.jobs.bulk_bench import Bench, bench, record_of, spec, write_inputs
from tests.support.jobs.bulk_data import ANY_FILE
from tests.support.servers.servers import Database

pytestmark = pytest.mark.usefixtures("timed")  # the databases are on it


async def scored(database: Database, directory: Path, *, failed: int = 0, **changes: object) -> Bench:
    """Returns a bench whose job of 25 rows has all its parts, and is to be finished."""
    write_inputs(directory / "in", [20, 5])
    one = await bench(database, directory)
    await one.jobs.create(record_of(spec(directory, **changes)))
    await one.planner().run("job")
    await one.settle(failed=failed)
    return one


def manifest_of(directory: Path) -> Manifest:
    """Returns the manifest of an output that is complete."""
    data = (directory / "out" / "_manifest.json").read_bytes()
    decode_success((directory / "out" / "_SUCCESS").read_bytes(), data)
    return decode_manifest(data)


def partial_of(directory: Path) -> Manifest:
    """Returns the list of the parts of an output that is not complete."""
    return decode_manifest((directory / "out" / "_manifest.partial.json").read_bytes())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "out").iterdir())


async def test_a_job_whose_parts_are_whole_is_completed(database: Database, tmp_path: Path) -> None:
    """The manifest has the parts in order, and the counts."""
    one = await scored(database, tmp_path, failed=1, error_threshold=3)

    await one.finaliser().run("job")

    record, manifest = await one.record(), manifest_of(tmp_path)
    assert (record.state, record.error) == (JobState.COMPLETED, "")
    assert [part.name for part in manifest.parts] == [f"part-0000{n}.parquet" for n in range(3)]
    assert (manifest.rows, manifest.ok, manifest.errors) == (25, 22, 3)
    assert manifest.job == "job"
    assert "y: float" in manifest.schema
    assert (await one.texts())[-1] == "completed: 25 rows, 3 of them failed"


async def test_success_is_written_last(database: Database, tmp_path: Path) -> None:
    """Who sees it may read everything."""
    one = await scored(database, tmp_path)

    await one.finaliser().run("job")

    assert one.objects.puts == ["_plan.json", "_manifest.json", "_SUCCESS"]


async def test_two_processes_that_finish_at_once_leave_one_output(database: Database, tmp_path: Path) -> None:
    """The one takes the other's manifest."""
    one = await scored(database, tmp_path)
    other = Finaliser(one.other_services())

    await asyncio.gather(one.finaliser().run("job"), other.run("job"))

    assert (await one.record()).state == JobState.COMPLETED
    assert manifest_of(tmp_path).rows == 25
    assert sum("completed: " in text for text in await one.texts()) == 1


async def test_finishing_a_completed_job_changes_nothing(database: Database, tmp_path: Path) -> None:
    """A task may come twice."""
    one = await scored(database, tmp_path)
    await one.finaliser().run("job")
    before = (await one.record(), manifest_of(tmp_path), names(tmp_path))
    one.clock.advance(10)

    await one.finaliser().run("job")

    assert (await one.record(), manifest_of(tmp_path), names(tmp_path)) == before


@pytest.mark.parametrize("name", ["_manifest.json", "_SUCCESS"])
async def test_a_finaliser_that_fails_between_the_steps_goes_on_later(
    database: Database, tmp_path: Path, name: str
) -> None:
    """What it had written is taken as it is."""
    one = await scored(database, tmp_path)
    one.objects.before[name] = StoreUnavailable("the store has no space")
    with pytest.raises(StoreUnavailable):
        await one.finaliser().run("job")
    record = await one.record()
    assert (record.state, record.waiting) == (
        JobState.FINALIZING,
        "finishing is tried again: the store has no space",
    )
    assert "_SUCCESS" not in names(tmp_path)
    one.clock.advance(10)

    await one.finaliser().run("job")

    assert (await one.record()).state == JobState.COMPLETED
    assert manifest_of(tmp_path).rows == 25


async def test_deaths_over_a_jobs_parts_are_attempts_at_finishing(database: Database, tmp_path: Path) -> None:
    """After a few of them the job fails."""
    one = await scored(database, tmp_path)
    one.examiners.deaths = 5
    for _ in range(4):
        with pytest.raises(ExaminerDied):
            await one.finaliser().run("job")

    await one.finaliser().run("job")

    record = await one.record()
    assert record.state == JobState.FAILED
    assert record.error.startswith(
        "finishing was interrupted 5 times: the process that read 'file:///bad.parquet' died"
    )


async def test_a_part_that_is_cut_off_is_set_aside_and_made_again(database: Database, tmp_path: Path) -> None:
    """Its rows only; then the job is completed."""
    one = await scored(database, tmp_path)
    part = tmp_path / "out" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-30])

    await one.finaliser().run("job")

    assert (await one.record()).state == JobState.RUNNING
    assert [path.name for path in (tmp_path / "out" / "_broken").iterdir()] == ["part-00001.parquet-1"]
    ((lease, shard),) = await one.fetch()
    assert shard.index == 1
    one.commit(shard)
    await one.finish(lease, shard)
    assert await one.jobs.move("job", {"running"}, "finalizing")
    await one.finaliser().run("job")
    record = await one.record()
    assert (record.state, record.rows_done, record.shards_done) == (JobState.COMPLETED, 25, 3)


async def test_parts_that_are_gone_or_of_something_else_are_made_again(database: Database, tmp_path: Path) -> None:
    """One was deleted, one is of another model."""
    one = await scored(database, tmp_path)
    (tmp_path / "out" / "part-00000.parquet").unlink()
    (tmp_path / "out" / "part-00002.parquet").unlink()
    one.commit(one.plan().shards[2], model_hash="another")

    await one.finaliser().run("job")

    assert {shard.index for _, shard in await one.fetch()} == {0, 2}
    assert (await one.texts())[-1].startswith("2 parts are made again: ")
    assert "_manifest.json" not in names(tmp_path)


async def test_parts_that_break_again_and_again_fail_the_job(database: Database, tmp_path: Path) -> None:
    """Something else is wrong then."""
    one = await scored(database, tmp_path)
    part = tmp_path / "out" / "part-00001.parquet"
    for _ in range(MAX_ROUNDS):
        part.write_bytes(b"PAR1")
        await one.finaliser().run("job")
        ((lease, shard),) = await one.fetch()
        await one.finish(lease, shard)
        assert await one.jobs.move("job", {"running"}, "finalizing")
    part.write_bytes(b"PAR1")

    await one.finaliser().run("job")

    record = await one.record()
    assert record.state == JobState.FAILED
    assert "part-00001.parquet" in record.error


async def test_a_part_that_broke_after_success_is_in_a_new_manifest(database: Database, tmp_path: Path) -> None:
    """The finaliser died before it could say that the job was completed; then somebody wrote into the output."""
    one = await scored(database, tmp_path)
    await one.finaliser().run("job")
    first = manifest_of(tmp_path)
    later = await bench(database, tmp_path)
    await later.jobs.create(record_of(spec(tmp_path), state="finalizing", max_errors=0))
    one.commit(one.plan().shards[1])  # its time is another now

    await later.finaliser().run("job")

    assert (await later.record()).state == JobState.COMPLETED
    assert manifest_of(tmp_path).parts[1].etag != first.parts[1].etag


async def test_a_shard_that_was_given_up_fails_the_job(database: Database, tmp_path: Path) -> None:
    """The output can't be complete; what is there is listed."""
    write_inputs(tmp_path / "in", [20, 5])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path, error_threshold=-1)))
    await one.planner().run("job")
    (first, shard), (second, other) = await one.fetch()
    one.commit(shard)
    await one.finish(first, shard)
    await one.finish(second, other, error="input 'in-0.parquet' has changed")
    ((third, last),) = await one.fetch()
    one.commit(last)
    await one.finish(third, last)
    assert await one.jobs.move("job", {"running"}, "finalizing")

    await one.finaliser().run("job")

    record = await one.record()
    assert record.state == JobState.FAILED
    assert record.error == "1 of 3 shards were given up; the first, 1: input 'in-0.parquet' has changed"
    partial = partial_of(tmp_path)
    assert [part.name for part in partial.parts] == ["part-00000.parquet", "part-00002.parquet"]
    assert partial.rows == 15
    assert "_SUCCESS" not in names(tmp_path)


async def test_more_failed_rows_than_allowed_fail_the_job(database: Database, tmp_path: Path) -> None:
    """The threshold is the user's."""
    one = await scored(database, tmp_path, failed=1, error_threshold=2)

    await one.finaliser().run("job")

    record = await one.record()
    assert (record.state, record.error) == (
        JobState.FAILED,
        "3 rows failed; the job allows 2 (error_threshold); the column error_message of the parts says why",
    )


async def test_a_cancelled_job_lists_what_is_there(database: Database, tmp_path: Path) -> None:
    """Partial results can be read, and are not taken for complete ones."""
    write_inputs(tmp_path / "in", [20, 5])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    await one.planner().run("job")
    ((lease, shard), *_) = await one.fetch()
    one.commit(shard)
    await one.finish(lease, shard)
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)

    await one.finaliser().run("job")

    partial = partial_of(tmp_path)
    assert [part.rows for part in partial.parts] == [10]
    assert (await one.record()).state == JobState.CANCELLED


async def test_a_complete_output_says_nothing_of_an_end(database: Database, tmp_path: Path) -> None:
    """There is one list only."""
    one = await scored(database, tmp_path)

    await one.finaliser().run("job")

    assert b"ended_at" not in (tmp_path / "out" / "_manifest.json").read_bytes()


async def test_a_resumed_job_has_its_broken_part_made_again_and_no_partial_list(
    database: Database, tmp_path: Path
) -> None:
    """What was committed before and is whole stays."""
    one = await scored(database, tmp_path)
    await one.jobs.stop("job", JobState.CANCELLED)
    await one.finaliser().run("job")
    assert "_manifest.partial.json" in names(tmp_path)
    (tmp_path / "out" / "part-00001.parquet").write_bytes(b"PAR1")
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)

    await one.planner().run("job")

    fetched = await one.fetch()
    assert [shard.index for _, shard in fetched] == [1]
    one.commit(fetched[0][1])
    await one.finish(*fetched[0])
    assert await one.jobs.move("job", {"running"}, "finalizing")
    await one.finaliser().run("job")
    assert manifest_of(tmp_path).rows == 25
    assert "_manifest.partial.json" not in names(tmp_path)


async def test_a_job_without_rows_is_completed(database: Database, tmp_path: Path) -> None:
    """One empty part tells the columns."""
    write_inputs(tmp_path / "in", [0])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    await one.planner().run("job")
    await one.settle()

    await one.finaliser().run("job")

    assert (await one.record()).state == JobState.COMPLETED
    assert manifest_of(tmp_path).rows == 0


async def test_a_part_that_was_made_again_meanwhile_is_not_set_aside(database: Database, tmp_path: Path) -> None:
    """Two looked at the broken one; a worker was quicker than the second."""
    one = await scored(database, tmp_path)
    plan = one.plan()
    one.commit(plan.shards[0])

    set_aside(
        one.objects,
        ExpectedParts(plan.job_id, plan.model_hash, plan.spec.output.url, plan.shards, ANY_FILE),
        plan.shards[0],
    )

    assert (tmp_path / "out" / "part-00000.parquet").exists()
    assert "_broken" not in names(tmp_path)
