"""Planning jobs: once, twice, at the same time, again, and in trouble."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qinfer.core.settings import BulkSettings, LimitSettings, Settings, StoreSettings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import BrokerUnavailable, ModelNotReady, StoreUnavailable
from qinfer.jobs.examiner_pool import ExaminerDied, ExaminerPool
from qinfer.jobs.job import JobState
from qinfer.jobs.plan import encode_plan
from qinfer.jobs.shards import rows_per_s
from qinfer.jobs.tasks import BulkTasks
from qinfer.models.readiness import joint_hash
from qinfer.models.state import DesiredState, State, StepVersion, VersionState, WorkerRecord
from qinfer.observe.stats import JOB_ROWS_SCORED, JOB_SCORING_NS, PUT_OFF, StatsTally
from qinfer.queue import keys
from qinfer.testing import eventually
from qinfer_workers.jobs import services
from qinfer_workers.jobs.steps import JobPlanner, Sweeper
from tests.support.jobs.bulk_bench import HASH, MODEL, Bench, bench, record_of, spec, write_inputs
from tests.support.jobs.examiner_stub import STUB
from tests.support.servers.servers import Database

pytestmark = pytest.mark.usefixtures("timed")  # the databases are on it


DEATH = "the process that read 'file:///bad.parquet' died (SIGSEGV)"


async def planned(database: Database, directory: Path, **changes: object) -> Bench:
    """Returns a bench whose job of 25 rows in two files was planned."""
    write_inputs(directory / "in", [20, 5])
    one = await bench(database, directory)
    await one.jobs.create(record_of(spec(directory, **changes)))
    await one.planner().run("job")
    return one


async def test_a_job_becomes_shards_that_workers_fetch(database: Database, tmp_path: Path) -> None:
    """The plan is in the output, the shards in the lane, the numbers in the record."""
    one = await planned(database, tmp_path, error_threshold=0.5)

    record, plan, fetched = await one.record(), one.plan(), await one.fetch()
    assert (record.state, record.rows, record.shards, record.max_errors) == (JobState.RUNNING, 25, 3, 12)
    assert (plan.job_id, plan.rows, plan.model_hash, plan.spec.version) == ("job", 25, HASH, 1)
    assert [shard for _, shard in fetched] == list(plan.shards[:2])  # twice as many as there are workers
    assert [shard.rows for shard in plan.shards] == [10, 10, 5]
    assert (await one.texts())[-1] == "planned: 3 shards of 2 files, 25 rows"


async def test_planning_a_job_that_runs_changes_nothing(database: Database, tmp_path: Path) -> None:
    """A task may come twice."""
    one = await planned(database, tmp_path)
    before = await one.record()

    await one.planner().run("job")

    assert await one.record() == before


async def test_an_unknown_job_is_no_error(database: Database, tmp_path: Path) -> None:
    """It was deleted while its task waited."""
    one = await bench(database, tmp_path)

    await one.planner().run("job")


async def test_a_job_waits_while_redis_lacks_the_models(database: Database, tmp_path: Path) -> None:
    """Its model comes back, when a gateway writes it again; one that never was there fails the job."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    await one.store.client.delete(keys.config(MODEL.model))

    with pytest.raises(BrokerUnavailable, match="Redis has lost its data"):
        await one.planner().run("job")
    assert (await one.record()).state == JobState.PLANNING

    await one.store.exchange_installation("", "here")
    await one.planner().run("job")
    record = await one.record()
    assert (record.state, record.error) == (
        JobState.FAILED,
        "model 'stub' is not known any more; load it, and resume the job",
    )


async def test_two_processes_that_plan_at_once_make_one_plan(database: Database, tmp_path: Path) -> None:
    """Each row is in one shard of one plan, though the two saw different speeds."""
    write_inputs(tmp_path / "in", [200], group=10)
    one = await bench(database, tmp_path)
    other = Bench(tmp_path, one.delivery, one.store, default_rows_per_shard=50)
    free = msgspec.structs.replace(spec(tmp_path).output, rows_per_part=0)
    await one.jobs.create(record_of(spec(tmp_path, output=free)))

    await asyncio.gather(one.planner().run("job"), other.planner().run("job"))

    record = await one.record()
    assert (record.state, record.rows, record.shards) == (JobState.RUNNING, 200, len(one.plan().shards))


async def test_two_tasks_in_one_process_do_not_read_the_footers_twice(database: Database, tmp_path: Path) -> None:
    """The second has nothing to do."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    planner = one.planner()

    await asyncio.gather(planner.run("job"), planner.run("job"))

    assert one.objects.puts == ["_plan.json"]
    assert (await one.record()).state == JobState.RUNNING


async def test_a_planner_that_died_after_its_plan_is_replaced_by_one_that_reads_it(
    database: Database, tmp_path: Path
) -> None:
    """The plan that is there counts, though more files would match by now."""
    one = await planned(database, tmp_path)
    before = one.plan()
    later = await bench(database, tmp_path)
    await later.jobs.create(record_of(spec(tmp_path)))
    write_inputs(tmp_path / "in", [20, 5, 7])

    await later.planner().run("job")

    assert later.plan() == before
    assert (await later.record()).rows == 25


async def test_an_output_with_another_jobs_plan_is_refused(database: Database, tmp_path: Path) -> None:
    """Its parts would be mixed with ours."""
    one = await planned(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path), "second"))

    await one.planner().run("second")

    record = await one.record("second")
    assert record.state == JobState.FAILED
    assert "belongs to job 'job'; make a new job with an empty output" in record.error


async def test_a_damaged_plan_is_refused(database: Database, tmp_path: Path) -> None:
    """Somebody wrote into the output."""
    write_inputs(tmp_path / "in", [5])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "_plan.json").write_text('{"job_id": "jo')
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))

    await one.planner().run("job")

    assert "is no plan that can be read" in (await one.record()).error


async def test_a_file_without_the_column_fails_the_job_by_name(database: Database, tmp_path: Path) -> None:
    """Only the first was looked at when the job was created."""
    write_inputs(tmp_path / "in", [5, 5])
    write_inputs(tmp_path / "other", [5], column="z")
    (tmp_path / "other" / "in-0.parquet").rename(tmp_path / "in" / "in-9.parquet")
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))

    await one.planner().run("job")

    record = await one.record()
    assert record.state == JobState.FAILED
    assert "in-9.parquet" in record.error
    assert "'x'" in record.error
    assert not (tmp_path / "out" / "_plan.json").exists()


async def test_a_truncated_file_fails_the_job_by_name(database: Database, tmp_path: Path) -> None:
    """Its footer is gone."""
    write_inputs(tmp_path / "in", [5, 5])
    file = tmp_path / "in" / "in-1.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))

    await one.planner().run("job")

    record = await one.record()
    assert record.state == JobState.FAILED
    assert "in-1.parquet" in record.error


async def test_a_store_in_trouble_is_tried_again_and_the_log_says_so_once(database: Database, tmp_path: Path) -> None:
    """The user sees what is waited for, in the record too, until it is planned; each try counts for the alert."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    planner = one.planner()
    for _ in range(2):
        one.objects.before["_plan.json"] = StoreUnavailable("the store has no space")
        with pytest.raises(StoreUnavailable):
            await planner.run("job")
        assert (await one.record()).waiting == "planning is tried again: the store has no space"

    await planner.run("job")

    assert (await one.texts())[:2] == ["planning began", "planning is tried again: the store has no space"]
    record = await one.record()
    assert (record.state, record.waiting) == (JobState.RUNNING, "")
    assert (await one.store.stats(record.model, 1))[f"{PUT_OFF}store_unavailable"] == 2


async def test_trouble_that_does_not_end_fails_the_job(database: Database, tmp_path: Path) -> None:
    """After `bulk.plan_timeout_s`, with the last reason."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path, plan_timeout_s=60)
    await one.jobs.create(record_of(spec(tmp_path)))
    one.objects.before["_plan.json"] = StoreUnavailable("the store has no space")
    with pytest.raises(StoreUnavailable):
        await one.planner().run("job")
    one.clock.advance(61)

    await one.planner().run("job")

    record = await one.record()
    assert record.state == JobState.FAILED
    assert record.error == "planning took more than 60 s: the store has no space"


@pytest.mark.parametrize("is_swept", [False, True])
async def test_the_time_that_no_bulk_worker_ran_is_not_that_of_planning(
    database: Database, tmp_path: Path, *, is_swept: bool
) -> None:
    """`qinfer up` was stopped over night; the task that was left, or the sweep, goes on in the morning."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path, plan_timeout_s=60)
    await one.jobs.create(record_of(spec(tmp_path)))
    one.objects.before["_plan.json"] = StoreUnavailable("the store has no space")
    with pytest.raises(StoreUnavailable):
        await one.planner().run("job")
    one.clock.advance(36_000)
    if is_swept:
        await Sweeper(one.services, Unsent(Settings())).run()

    await one.planner().run("job")

    assert (await one.record()).state == JobState.RUNNING
    assert "no bulk worker ran for 36000 s" in await one.texts()


class Unsent(BulkTasks):
    """Sends no tasks: the test runs them."""

    def _send_task(self, name: str, job_id: str) -> None:
        del name, job_id


async def test_planning_that_hangs_fails_the_job_in_time(database: Database, tmp_path: Path) -> None:
    """A store that never answers; what was spent before counts."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path, plan_timeout_s=60)
    await one.jobs.create(record_of(spec(tmp_path)))
    await one.jobs.note("job", services.PLANNING.began)
    one.clock.advance(59.95)
    one.services.in_thread = lambda *_: asyncio.Event().wait()  # type: ignore[method-assign,assignment]

    await one.planner().run("job")

    record = await one.record()
    assert (record.state, record.error) == (
        JobState.FAILED,
        "planning took more than 60 s; is a store slow or stuck? resume the job when it has recovered",
    )


async def test_a_defect_fails_the_job_and_does_not_come_again_and_again(database: Database, tmp_path: Path) -> None:
    """Users see that something is wrong; the text of the exception stays in the server's log."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    one.objects.before["_plan.json"] = RuntimeError("/secret/path")

    await one.planner().run("job")

    assert (await one.record()).error == "planning failed: RuntimeError; the bulk worker's log says more"


async def test_a_job_that_is_cancelled_while_it_is_planned_stays_so(database: Database, tmp_path: Path) -> None:
    """The planner learns it by its next mark on the record."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path, sweep_every_s=0.02)
    await one.jobs.create(record_of(spec(tmp_path)))

    async def never() -> None:
        await asyncio.Event().wait()

    one.services.in_thread = lambda *_: never()  # type: ignore[method-assign,assignment]
    planning = asyncio.create_task(one.planner().run("job"))
    await eventually(one.has_begun)
    await one.jobs.stop("job", JobState.CANCELLED)

    await planning

    assert (await one.record()).state == JobState.CANCELLED


async def test_planning_goes_on_after_its_own_change_of_the_state(database: Database, tmp_path: Path) -> None:
    """A mark on the record that finds the job running is refused, and does not break the planner off."""
    write_inputs(tmp_path / "in", [20, 5])
    one = await bench(database, tmp_path, sweep_every_s=0.02)
    await one.jobs.create(record_of(spec(tmp_path)))
    refused, move, workers_for = asyncio.Event(), one.jobs.move, one.services.workers_for

    async def noticed(*arguments: Any, **fields: Any) -> bool:
        moved = await move(*arguments, **fields)
        if not moved:
            refused.set()
        return moved

    async def after_a_refused_mark(record: Any) -> int:
        if (await one.record()).state == JobState.RUNNING:
            await refused.wait()
        return await workers_for(record)

    one.jobs.move = noticed  # type: ignore[method-assign]
    one.services.workers_for = after_a_refused_mark  # type: ignore[method-assign]

    await one.planner().run("job")

    assert len(await one.fetch()) == 2


async def test_a_planner_that_is_stopped_says_so(database: Database, tmp_path: Path) -> None:
    """So that the next does not take the job for what ended the process."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    one.services.in_thread = lambda *_: asyncio.Event().wait()  # type: ignore[method-assign,assignment]
    planning = asyncio.create_task(one.planner().run("job"))
    await eventually(one.has_begun)

    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning

    assert (await one.texts())[-1] == "planning is tried again: the bulk worker was stopped"


async def test_a_job_that_ends_the_process_each_time_is_given_up(database: Database, tmp_path: Path) -> None:
    """A beginning without an end is a process that was killed."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path)))
    for _ in range(services.MAX_DEATHS):
        await one.jobs.note("job", services.PLANNING.began)

    await one.planner().run("job")

    assert (await one.record()).error.startswith("planning was interrupted 5 times")


async def test_a_death_over_a_jobs_files_is_another_attempt(database: Database, tmp_path: Path) -> None:
    """It reads fewer files at once, and the log says what happened."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path, plan_threads=16)
    one.examiners.deaths = 2
    await one.jobs.create(record_of(spec(tmp_path)))
    for _ in range(2):
        with pytest.raises(ExaminerDied):
            await one.planner().run("job")

    await one.planner().run("job")

    assert (await one.record()).state == JobState.RUNNING
    assert (await one.texts())[:3] == ["planning began", *[f"planning is tried again: {DEATH}"] * 2]
    assert one.examiners.threads == [16, 8, 4]


async def test_deaths_over_a_jobs_files_fail_it_in_the_end(database: Database, tmp_path: Path) -> None:
    """Whichever bulk worker had the attempts; the last reads one file at a time, which is named."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path, plan_threads=16)
    one.examiners.deaths = services.MAX_DEATHS
    await one.jobs.create(record_of(spec(tmp_path)))
    for _ in range(services.MAX_DEATHS - 1):
        with pytest.raises(ExaminerDied):
            await JobPlanner(one.other_services(), LimitSettings()).run("job")

    await one.planner().run("job")

    record = await one.record()
    assert (record.state, record.error) == (
        JobState.FAILED,
        f"planning was interrupted 5 times: {DEATH}; is a file damaged?",
    )
    assert one.examiners.threads[-1] == 1


@pytest.mark.parametrize(
    ("how", "text"),
    [("crash", "SIGSEGV"), ("grow", "it needs more memory than QINFER_BULK__MAX_EXAMINE_BYTES"), ("lock", "SIGALRM")],
)
async def test_what_a_file_does_to_its_reader_it_does_not_do_to_the_bulk_worker(
    database: Database, tmp_path: Path, how: str, text: str
) -> None:
    """A crash, too much memory, a parser that does not end: other jobs are planned meanwhile, and that one fails."""
    one = await bench(database, tmp_path)
    settings = Settings(bulk=BulkSettings(max_examine_bytes=512 * 2**20))
    pool = ExaminerPool(settings, os.environ, STUB)
    one.services.examiners = pool
    await one.jobs.create(record_of(spec(tmp_path, inputs=(f"file://{tmp_path}/{how}",))))
    for _ in range(services.MAX_DEATHS - 1):
        await one.jobs.note("job", f"planning is tried again: {DEATH}")
    await one.jobs.create(record_of(spec(tmp_path / "other", inputs=(f"file://{tmp_path}/fine",)), "other"))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pool.run())
        await asyncio.sleep(0)
        planner = one.planner()
        await asyncio.gather(planner.run("job"), planner.run("other"))
        running.cancel()

    record = await one.record()
    assert (await one.record("other")).error == ""
    assert (record.state, record.error) == (
        JobState.FAILED,
        f"planning was interrupted 5 times: the process that read 'file://{tmp_path}/{how}' died ({text}); "
        "is a file damaged?",
    )


async def test_a_job_goes_on_with_what_is_missing(database: Database, tmp_path: Path) -> None:
    """A resumed job runs the shards that failed or waited; what was committed stays."""
    one = await planned(database, tmp_path)
    (first, shard), (second, other) = await one.fetch()
    await one.finish(first, shard, error="the input was gone")
    await one.finish(second, other, error="the input was gone")
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)

    await one.planner().run("job")

    record = await one.record()
    assert (record.state, record.shards, record.shards_failed) == (JobState.RUNNING, 3, 0)
    assert [shard.index for _, shard in await one.fetch()] == [0, 1]


async def test_a_resumed_job_that_is_cancelled_again_is_not_woken_by_a_broken_part(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cancelled between the two steps that put its shards into the queue."""
    one = await planned(database, tmp_path)
    ((lease, shard), *_) = await one.fetch()
    await one.finish(lease, shard)  # and there is no part
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)
    plan = one.jobs.add_shards

    async def plan_and_cancel(*arguments: Any, **options: Any) -> bool:
        is_planned = await plan(*arguments, **options)
        await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
        return is_planned

    monkeypatch.setattr(one.jobs, "add_shards", plan_and_cancel)

    await one.planner().run("job")

    assert (await one.record()).state == JobState.CANCELLED


async def test_a_job_does_not_go_on_with_an_input_that_has_changed(database: Database, tmp_path: Path) -> None:
    """The file that a shard needs still is named."""
    one = await planned(database, tmp_path)
    ((lease, shard), *_) = await one.fetch()
    await one.finish(lease, shard, error="a bad disk")
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)
    write_inputs(tmp_path / "in", [21])

    await one.planner().run("job")

    record = await one.record()
    assert record.state == JobState.FAILED
    assert "in-0.parquet' has changed since the job was planned" in record.error


async def test_a_job_is_resumed_though_its_model_has_changed(database: Database, tmp_path: Path) -> None:
    """One output is of one model: its shards wait for a worker that has that, and the version is pinned."""
    one = await planned(database, tmp_path)
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)
    await one.beat("sha256:2")

    await one.planner().run("job")

    (pin,) = await one.store.pins()
    assert (await one.record()).state == JobState.RUNNING
    assert pin.content_hash == one.plan().model_hash == HASH


async def test_a_job_of_an_ensemble_pins_all_its_steps(database: Database, tmp_path: Path) -> None:
    """With what each executes; the plan's hash is that of all, and the sweep keeps the pins."""
    one = await bench(database, tmp_path)
    steps = (StepVersion("a", 0, 3), StepVersion("b", 1, 1))
    config = {"platform": "ensemble", "ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}]}}
    text = json.dumps({**json.loads(MODEL.config), **config})
    await one.store.put_model(msgspec.structs.replace(MODEL, generation=2, config=text))
    models = {
        "stub": {1: VersionState(State.READY, 1, executed_hash=HASH, steps=steps)},
        "a": {3: VersionState(State.READY, 1, executed_hash="sha256:a")},
        "b": {1: VersionState(State.READY, 1, executed_hash="sha256:b")},
    }
    await one.store.heartbeat(WorkerRecord(id="w1", started_at=0.0, models=models), 1e9)
    write_inputs(tmp_path / "in", [25])
    await one.jobs.create(record_of(spec(tmp_path)))

    await one.planner().run("job")

    plan, pins = one.plan(), await one.store.pins()
    assert [(e.model, e.version, e.asked) for e in plan.executes] == [("stub", 1, 0), ("a", 3, 0), ("b", 1, 1)]
    assert plan.model_hash == joint_hash(plan.executes)
    assert {(pin.model, pin.version, pin.content_hash) for pin in pins} == {
        ("stub", 1, HASH),
        ("a", 3, "sha256:a"),
        ("b", 1, "sha256:b"),
    }
    assert one.services.why_lost(await one.record(), await one.store.workers(), {}) == ""
    gone = DesiredState("a", 1, load=False)
    why = one.services.why_lost(await one.record(), await one.store.workers(), {"a": gone})
    assert why == "version 3 of model 'a' can't be kept: the model was unloaded"


async def test_a_job_goes_on_though_the_model_s_directory_has_changed(database: Database, tmp_path: Path) -> None:
    """Another version was added, or files were touched: what is executed is the same."""
    one = await planned(database, tmp_path)
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)
    await one.store.put_model(msgspec.structs.replace(MODEL, generation=2, versions=(1, 2), content_hash="hash-2"))

    await one.planner().run("job")

    assert (await one.record()).state == JobState.RUNNING


async def test_a_plan_of_an_earlier_qinfer_is_compared_by_its_own_kind_of_hash(
    database: Database, tmp_path: Path
) -> None:
    """That one names the model's whole directory."""
    one = await planned(database, tmp_path)
    earlier = one.directory / "out" / "_plan.json"
    earlier.write_bytes(encode_plan(msgspec.structs.replace(one.plan(), model_hash=MODEL.content_hash)))
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)

    await one.planner().run("job")

    assert (await one.record()).state == JobState.RUNNING


async def test_a_plan_of_an_earlier_qinfer_does_not_go_on_with_other_files(database: Database, tmp_path: Path) -> None:
    """Nothing tells whether these would execute the same."""
    one = await planned(database, tmp_path)
    earlier = one.directory / "out" / "_plan.json"
    earlier.write_bytes(encode_plan(msgspec.structs.replace(one.plan(), model_hash="another")))
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING)

    await one.planner().run("job")

    assert (await one.record()).error.startswith("model 'stub' has changed since the job was planned")


async def test_a_job_waits_until_a_worker_tells_what_it_executes(database: Database, tmp_path: Path) -> None:
    """Its record and log say so, once; that is no attempt at planning, so that it may take any time."""
    write_inputs(tmp_path / "in", [5])
    one = await bench(database, tmp_path)
    await one.beat(state=State.LOADING)
    await one.jobs.create(record_of(spec(tmp_path)))

    for _ in range(2):
        with pytest.raises(ModelNotReady, match="no worker has version 1 of model 'stub' ready yet"):
            await one.planner().run("job")
    waiting = await one.record()
    await one.beat()
    await one.planner().run("job")

    why = "no worker has version 1 of model 'stub' ready yet"
    assert (waiting.state, waiting.waiting) == (JobState.PLANNING, why)
    assert ((await one.record()).state, (await one.record()).waiting) == (JobState.RUNNING, "")
    assert (await one.texts())[:3] == [f"waits: {why}", "goes on", "planning began"]


def test_the_speed_is_that_of_the_best_batch_size() -> None:
    """Online requests come in small batches; a size that ran once says nothing yet."""
    tally = StatsTally()
    for _ in range(5):
        tally.executed(1, [0], 0, 1_000_000, 0)
        tally.executed(100, [0], 1_000_000, 8_000_000, 1_000_000)
    tally.executed(1000, [0], 0, 1_000, 0)

    assert rows_per_s(tally.drain()) == pytest.approx(10_000)
    assert rows_per_s({}) == 0


# --- what it may use ---


def grant(directory: Path, read: str = "", write: str = "") -> bytes:
    """Returns the grant of a tenant that has a folder to read and one to write."""
    return msgspec.json.encode(UrlGrant((f"file://{directory}/{read}",), (f"file://{directory}/{write}",), "acme"))


@pytest.mark.parametrize(("read", "write", "use"), [("other", "out", "read"), ("in", "other", "write")])
async def test_a_job_uses_no_more_than_was_granted(
    database: Database, tmp_path: Path, read: str, write: str, use: str
) -> None:
    """Nothing is planned, and nothing is written where its output was to be."""
    write_inputs(tmp_path / "in", [20])
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path), grant=grant(tmp_path, read, write)))

    await one.planner().run("job")

    record = await one.record()
    assert record.state == JobState.FAILED
    assert f"tenant 'acme' may {use}" in record.error
    assert not (tmp_path / "out").exists()


async def test_a_file_that_is_a_link_out_of_what_was_granted_fails_the_job(database: Database, tmp_path: Path) -> None:
    """It may have become one since the job was created."""
    write_inputs(tmp_path / "in", [20])
    write_inputs(tmp_path / "other", [20])
    (tmp_path / "in" / "more.parquet").symlink_to("../other/in-0.parquet")
    one = await bench(database, tmp_path)
    await one.jobs.create(record_of(spec(tmp_path), grant=grant(tmp_path, "in", "out")))

    await one.planner().run("job")

    record = await one.record()
    assert (record.state, "more.parquet" in record.error) == (JobState.FAILED, True)


async def test_a_resumed_job_reads_only_what_is_granted_now(database: Database, tmp_path: Path) -> None:
    """Its plan has the former files."""
    one = await planned(database, tmp_path, max_parallel=1)
    for lease, shard in await one.fetch(1):
        one.commit(shard)
        await one.finish(lease, shard)
    await one.jobs.stop("job", JobState.CANCELLED, in_hand=True)
    now = grant(tmp_path, "other", "out")
    assert await one.jobs.move("job", {JobState.CANCELLED}, JobState.PLANNING, grant=now)

    await one.planner().run("job")

    record = await one.record()
    assert (record.state, "may read" in record.error) == (JobState.FAILED, True)


async def test_a_process_narrows_what_was_granted_to_its_own_settings(database: Database, tmp_path: Path) -> None:
    """A prefix that is not allowed any more is not, whatever a record says."""
    write_inputs(tmp_path / "in", [20])
    one = await bench(database, tmp_path)
    settings = StoreSettings(allow=(f"file://{tmp_path}/elsewhere",))
    one.settings = one.settings.model_copy(update={"stores": settings})
    one.services = one.other_services()
    await one.jobs.create(record_of(spec(tmp_path), grant=grant(tmp_path, "in", "out")))

    await one.planner().run("job")

    assert (await one.record()).state == JobState.FAILED


def test_the_speed_of_jobs_counts_once_they_took_some_seconds() -> None:
    """Reading and writing are part of it; a few small shards say less than the executions in them."""
    tally = StatsTally()
    for _ in range(5):
        tally.executed(100, (), 0, 10_000_000, 0)
    executed = tally.drain()

    assert rows_per_s(executed | {JOB_ROWS_SCORED: 500, JOB_SCORING_NS: 10**9}) == pytest.approx(10_000)
    assert rows_per_s(executed | {JOB_ROWS_SCORED: 20_000, JOB_SCORING_NS: 5 * 10**9}) == pytest.approx(4_000)
