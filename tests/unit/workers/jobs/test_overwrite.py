"""Jobs that overwrite an output: what of an earlier job goes, what stays, and what a crash leaves."""

from pathlib import Path

import msgspec
import pytest

from qinfer.errors import StoreUnavailable
from qinfer.jobs.job import JobState, Output
from qinfer_workers.jobs import documents
from tests.support.jobs.bulk_bench import Bench, bench, record_of, spec, write_inputs
from tests.support.servers.servers import Database

pytestmark = pytest.mark.usefixtures("timed")


async def completed(database: Database, directory: Path, job_id: str = "job") -> Bench:
    """Returns a bench whose job of 25 rows in three parts is complete."""
    write_inputs(directory / "in", [20, 5])
    one = await bench(database, directory)
    await one.jobs.create(record_of(spec(directory), job_id))
    await one.planner().run(job_id)
    await one.settle()
    await one.finaliser().run(job_id)
    assert (await one.record(job_id)).state == JobState.COMPLETED
    return one


def names(directory: Path) -> set[str]:
    """Returns the files in the output."""
    out = directory / "out"
    return {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}


async def test_an_earlier_output_is_removed_when_the_job_is_planned(database: Database, tmp_path: Path) -> None:
    one = await completed(database, tmp_path)
    (tmp_path / "in" / "in-0.parquet").unlink()
    await one.jobs.create(record_of(spec(tmp_path, overwrite=True), "second"))

    await one.planner().run("second")

    assert names(tmp_path) == {"_plan.json"}
    assert (one.plan().job_id, one.plan().rows) == ("second", 5)
    assert "removed 6 files of job 'job'" in await one.texts("second")


async def test_files_that_no_job_has_written_stay(database: Database, tmp_path: Path) -> None:
    one = await completed(database, tmp_path)
    foreign = {"notes.txt", "part-00007.parquet", "_failed/mine.csv", "_commits/mine/1.json", "_input/mine.csv"}
    foreign |= {"_resume/mine.csv", "_resume/01/mine/ab"}
    own = {
        *("_broken/part-00000.parquet-1", "_failed/part-00001-0123456789abcdef.parquet", "_manifest.partial.json"),
        *("_commits/part-00002.parquet/ab.json", "_input/0123-000000000000000.zst", "_failed/_broken/"),
        "_resume/01/part-00000.parquet/ab",
    }
    for name in foreign | own:
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text("x")
    await one.jobs.create(record_of(spec(tmp_path, overwrite=True), "second"))

    await one.planner().run("second")

    assert names(tmp_path) == {"_plan.json", *foreign}


async def test_an_output_stays_whole_until_the_new_job_is_planned(database: Database, tmp_path: Path) -> None:
    one = await completed(database, tmp_path)
    before = names(tmp_path)
    (tmp_path / "in" / "in-1.parquet").write_bytes(b"PAR1 torn")
    await one.jobs.create(record_of(spec(tmp_path, overwrite=True), "second"))

    await one.planner().run("second")

    assert (await one.record("second")).state == JobState.FAILED
    assert names(tmp_path) == before


@pytest.mark.parametrize("survivors", range(1, 6))
async def test_a_crash_while_an_output_is_removed_leaves_what_the_next_attempt_ends(
    database: Database, tmp_path: Path, survivors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_SUCCESS` goes first and the plan last, so that nobody takes the rest for whole, and it is known whose it is."""
    one = await completed(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path, overwrite=True), "second"))
    delete, left = one.objects.delete, 6 - survivors

    def fails_later(url: str) -> None:
        nonlocal left
        if not left:
            raise StoreUnavailable("the store is away")
        left -= 1
        delete(url)

    monkeypatch.setattr(one.objects, "delete", fails_later)
    with pytest.raises(StoreUnavailable):
        await one.planner().run("second")
    there = names(tmp_path)
    monkeypatch.undo()

    assert "_plan.json" in there
    assert "_SUCCESS" not in there
    await one.planner().run("second")
    assert names(tmp_path) == {"_plan.json"}
    assert one.plan().job_id == "second"


async def test_a_job_that_has_not_ended_keeps_its_output(database: Database, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", [20])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    await one.planner().run("job")
    await one.jobs.create(record_of(spec(tmp_path, overwrite=True), "second"))

    await one.planner().run("second")

    record = await one.record("second")
    assert record.state == JobState.FAILED
    assert "belongs to job 'job', which is running; cancel that one" in record.error
    assert one.plan().job_id == "job"


async def test_a_job_of_the_same_id_is_another_one(database: Database, tmp_path: Path) -> None:
    """Its record was deleted, its plan is there: the new job has its own rows."""
    one = await completed(database, tmp_path)
    await one.jobs.delete("job")
    write_inputs(tmp_path / "in", [20, 5, 7])
    await one.jobs.create(record_of(spec(tmp_path, overwrite=True)))

    await one.planner().run("job")

    assert (await one.record()).rows == one.plan().rows == 32
    assert names(tmp_path) == {"_plan.json"}


async def test_a_job_that_overwrites_is_planned_once(database: Database, tmp_path: Path) -> None:
    """A planner that died after it wrote the plan left the new job's output, which stays."""
    one = await completed(database, tmp_path)
    asked = spec(tmp_path, overwrite=True)
    await one.jobs.create(record_of(asked, "second"))
    await one.planner().run("second")
    plan, record = one.plan(), await one.record("second")
    write_inputs(tmp_path / "in", [20, 5, 7])
    await one.jobs.stop("second", JobState.CANCELLED, in_hand=True)
    await one.jobs.move("second", {JobState.CANCELLED}, JobState.PLANNING, head=b"")

    await one.planner().run("second")

    assert one.plan() == plan
    assert (await one.record("second")).rows == record.rows


async def test_what_another_process_has_made_meanwhile_stays(database: Database, tmp_path: Path) -> None:
    """A task may come twice: the slower process lists the earlier files, and finds others of their names."""
    one = await completed(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path, overwrite=True), "second"))
    record = await one.record("second")
    listed = documents.earlier_output(lambda _: one.objects, record)
    assert listed is not None
    await one.planner().run("second")
    (_, shard), *_ = await one.fetch()
    part = one.commit(shard, "second")

    documents.clear(lambda _: one.objects, listed, threads=2)

    assert names(tmp_path) == {"_plan.json", part.name}
    assert one.plan().job_id == "second"
    assert documents.earlier_output(lambda _: one.objects, record) is None


async def test_a_new_output_needs_no_earlier_one(database: Database, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path)
    asked = spec(tmp_path, overwrite=True, output=Output(f"file://{tmp_path}/new"))
    await one.jobs.create(record_of(asked))

    await one.planner().run("job")

    assert (await one.record()).state == JobState.RUNNING
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["_plan.json"]


async def test_a_job_whose_output_was_overwritten_is_not_resumed(database: Database, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in", [20])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    await one.planner().run("job")
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
    await one.jobs.create(record_of(spec(tmp_path, overwrite=True), "second"))
    await one.planner().run("second")
    plan = one.plan()

    await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)
    await one.planner().run("job")

    assert "belongs to job 'second'" in (await one.record()).error
    assert one.plan() == plan


def test_only_jobs_that_overwrite_say_so(tmp_path: Path) -> None:
    """A process of the former release refuses those, and reads all others."""
    plain, anew = spec(tmp_path, overwrite=False), spec(tmp_path, overwrite=True)

    assert b'"overwrite"' not in msgspec.json.encode(plain)
    assert b'"overwrite":true' in msgspec.json.encode(anew)
