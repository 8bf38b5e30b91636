"""Bulk jobs on workers in this process: shards fetched, run between online requests, finished, released, given up."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import StoreUnavailable
from qinfer.jobs.job import JobSpec
from qinfer.jobs.parts import PartWriter
from qinfer.jobs.plan import Shard
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.observe import stats
from qinfer.queue.entries import BULK_LANES, Lane
from qinfer.testing import eventually
from qinfer_workers.inference.bulk import shard_files, shard_loop
from qinfer_workers.inference.bulk.shard_loop import GivenUp, PutOff
from tests.support.inline_workers import InlineWorkers, value
from tests.support.jobs.shard_runs import JOB, job_spec, outcomes, scored_rows, shards_of, submit_job, write_rows

LANES = [Lane("stub", 1, name) for name in BULK_LANES]
QUICK: dict[str, Any] = {"lease_s": 0.4, "renew_every_s": 0.1}


class Work:
    """A file with rows, and what becomes of them."""

    def __init__(self, folder: Path, rows: int, group: int = 0) -> None:
        self.output = folder / "out"
        self.output.mkdir()
        self.rows = rows
        self.url = write_rows(folder / "in.parquet", rows, group=group)
        self.shards: list[Shard] = shards_of(self.url)
        self.spec: JobSpec = job_spec([self.url], self.output)

    async def submit(self, scene: InlineWorkers) -> None:
        """Puts the job into the queue."""
        await submit_job(scene.delivery, self.spec, self.shards)

    def check(self, found: list[ShardOutcome]) -> None:
        """Checks that each row was scored once, and is in order."""
        assert found == [ShardOutcome(shard.index, shard.rows) for shard in self.shards]
        assert scored_rows(self.output) == [(row, float(row)) for row in range(self.rows)]

    def parts(self) -> list[str]:
        """Returns what was committed."""
        return [path.name for path in self.output.iterdir() if path.is_file()]


async def begin(scene: InlineWorkers, work: Work, worker_id: str = "w1") -> None:
    """Submits a job, and waits until the worker executes its first batch, which ends with `scene.go`."""
    scene.hold()
    await work.submit(scene)
    await scene.started(worker_id)


async def test_a_job_is_scored_by_the_model_s_workers(scene: InlineWorkers, tmp_path: Path) -> None:
    """Every row once, in order, by two workers; its counts tell the same."""
    work = Work(tmp_path, 500, 50)
    await scene.model()
    await scene.worker("w1")
    await scene.worker("w2")
    await work.submit(scene)

    work.check(await outcomes(scene.delivery, 10))
    record = await Jobs(scene.delivery).get(JOB)
    assert record is not None
    assert (record.rows_done, record.rows_failed, record.shards_done, record.in_lane) == (500, 0, 10, 0)


async def test_the_executions_of_a_job_are_in_the_statistics(scene: InlineWorkers, tmp_path: Path) -> None:
    """As those of requests are, but for the requests; planners learn the model's speed from them."""
    work = Work(tmp_path, 500, 50)
    await scene.model()
    await scene.worker()
    await work.submit(scene)
    work.check(await outcomes(scene.delivery, 10))
    await scene.stop()

    found = await scene.store.stats("stub", 1)
    sizes = stats.batches(found)
    assert sum(size.rows * size.executions for size in sizes) == found[stats.INFERENCE_COUNT] == 500
    assert found[stats.JOB_ROWS_SCORED] == found[stats.ROWS_DONE] == 500
    assert sum(size.executions for size in sizes) == found[stats.EXECUTION_COUNT]
    assert stats.SUCCESS_COUNT not in found
    assert found[stats.LAST_INFERENCE_MS] / 1000 == pytest.approx(scene.delivery.clock.now_s(), abs=60.0)
    assert found[stats.JOB_SCORING_NS] > 0


async def test_online_requests_go_first(scene: InlineWorkers, tmp_path: Path) -> None:
    """One that comes during a bulk batch is the next to be executed, of any size; then the job goes on."""
    work = Work(tmp_path, 100)
    await scene.model()
    worker = await scene.worker()
    await begin(scene, work)
    answer = scene.submit(3.0, rows=7)
    await eventually(lambda: any(batcher.has_work for batcher in worker._batchers()), description="a request in hand")
    scene.go()

    assert value(await answer) == 3.0
    assert scene.backends["w1"][0].sizes[1] == 7
    work.check(await outcomes(scene.delivery, 1))


async def test_a_worker_that_drains_releases_its_shard(scene: InlineWorkers, tmp_path: Path) -> None:
    """At the next batch, as if it had not been delivered; nothing of it is committed."""
    work = Work(tmp_path, 2000)
    await scene.model()
    worker = await scene.worker()
    await begin(scene, work)
    stopping = asyncio.create_task(scene.stop())
    await eventually(lambda: all(loop.cancelling() for loop in worker._bulk.loops()), description="the drain")
    scene.go()
    await stopping

    (lease,) = await scene.delivery.fetch(LANES, "other", 1, 1.0)
    assert lease.deliveries == 1
    assert not work.parts()


async def test_a_model_that_is_unloaded_leaves_its_shards_to_others(scene: InlineWorkers, tmp_path: Path) -> None:
    """They wait for a worker that loads it."""
    work = Work(tmp_path, 2000)
    await scene.model()
    worker = await scene.worker()
    await begin(scene, work)
    wish = await scene.unload()
    await eventually(lambda: not worker._bulk.loops(), description="the end of the loop")
    scene.go()
    await eventually(lambda: not scene.backends["w1"][0].loaded, description="an unloaded model")
    before = work.parts()
    await scene.store.set_desired(wish)
    await scene.store.wake()

    work.check(await outcomes(scene.delivery, 1))
    assert not before


async def test_a_job_that_is_stopped_commits_nothing_more(
    scene: InlineWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker asks for it, and takes its entry out of the lane."""
    monkeypatch.setattr(shard_loop, "WANTED_EVERY_S", 0.05)
    work = Work(tmp_path, 2000)
    await scene.model()
    await scene.worker()
    await begin(scene, work)
    asked = asyncio.Event()
    report = Jobs.report

    async def noted(self: Jobs, *about: Any) -> bool:
        wanted = await report(self, *about)
        if not wanted:
            asyncio.get_running_loop().call_soon(asked.set)  # when the worker knows
        return wanted

    monkeypatch.setattr(Jobs, "report", noted)
    await Jobs(scene.delivery).stop(JOB, "cancelling")
    await asked.wait()
    scene.go()

    async def is_empty() -> bool:
        return not any(await scene.delivery.depth(LANES))

    await eventually(is_empty, description="empty lanes")
    assert not work.parts()
    assert not await Jobs(scene.delivery).outcomes(JOB)


async def test_progress_moves_within_a_shard(
    scene: InlineWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows are scored, none is done; what is released has to be scored again."""
    monkeypatch.setattr(shard_loop, "WANTED_EVERY_S", 0.02)
    work = Work(tmp_path, 20_000)
    await scene.model()
    worker = await scene.worker()
    await begin(scene, work)
    scene.go()
    await scene.started()
    scene.hold()

    async def scored() -> bool:
        found.append(await Jobs(scene.delivery).get(JOB))
        return found[-1] is not None and found[-1].rows_scored > 0

    found: list[JobRecord | None] = []
    await eventually(scored, description="a report of scored rows")
    assert found[-1] is not None
    assert (found[-1].rows_done, found[-1].rows_scored < 20_000) == (0, True)

    stopping = asyncio.create_task(scene.stop())
    await eventually(lambda: all(loop.cancelling() for loop in worker._bulk.loops()), description="the drain")
    scene.go()
    await stopping
    record = await Jobs(scene.delivery).get(JOB)
    assert record is not None
    assert record.rows_scored == 0


async def test_a_job_that_can_not_be_run_now_holds_up_no_other(scene: InlineWorkers, tmp_path: Path) -> None:
    """Its shards came first, and stay in their lane as they were; they are tried again and again."""
    work = Work(tmp_path, 500, 50)
    await scene.model()
    await submit_job(scene.delivery, work.spec, work.shards, job_id="stuck", model_hash="of other files")
    await work.submit(scene)
    worker = await scene.worker()
    work.check(await outcomes(scene.delivery, 10))

    await scene.stop()
    assert not await Jobs(scene.delivery).outcomes("stuck")
    assert await Jobs(scene.delivery).missing("stuck") == []
    assert await scene.delivery.depth(LANES) == [0, 10, 0]
    assert not worker._keeper.held()


async def test_a_shard_that_was_put_off_is_run_later(
    scene: InlineWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any worker; a try that did not begin is none that did not end."""
    monkeypatch.setattr(shard_loop, "_FIRST_REST_S", 0.01)
    monkeypatch.setattr(shard_loop, "_LAST_REST_S", 0.01)
    work = Work(tmp_path, 100)
    await scene.model()
    tries: list[int] = []
    make_run = shard_loop.ScoredVersion.make_run

    def hesitant(*words: Any) -> Any:
        _, held, *_ = words
        tries.append(held.lease.deliveries)
        if len(tries) <= 5:
            raise PutOff("the store is away")
        return make_run(*words)

    monkeypatch.setattr(shard_loop.ScoredVersion, "make_run", hesitant)
    await scene.worker(max_deliveries=1)
    await work.submit(scene)

    work.check(await outcomes(scene.delivery, 1))
    assert tries == [1] * 6


async def test_a_job_whose_store_is_full_says_so_and_holds_up_no_other(
    scene: InlineWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scored parts are committed when there is space, by the worker that has them."""
    monkeypatch.setattr(shard_files, "_LAST_COMMIT_S", 0.01)
    monkeypatch.setattr(shard_files, "_FIRST_COMMIT_S", 0.01)
    monkeypatch.setattr(shard_loop, "WANTED_EVERY_S", 0.01)
    monkeypatch.setattr(shard_loop, "_LEFT_TO_OTHERS_S", 0.01)
    (tmp_path / "full").mkdir()
    work, other, jobs = Work(tmp_path / "full", 500, 100), Work(tmp_path, 100), Jobs(scene.delivery)
    is_full, commit = True, shard_files.ShardFiles._commit

    def refuse(files: shard_files.ShardFiles, path: Path, writer: PartWriter) -> ShardOutcome:
        if is_full and "/full/" in files._task.url:
            raise StoreUnavailable("there is no space left")
        return commit(files, path, writer)

    monkeypatch.setattr(shard_files.ShardFiles, "_commit", refuse)
    await scene.model()
    await scene.worker()
    await work.submit(scene)

    async def reason() -> str:
        record = await jobs.get(JOB)
        return record.put_off if record else ""

    async def is_told() -> bool:
        return bool(await reason())

    await eventually(is_told, description="the reason in the record")
    await submit_job(scene.delivery, other.spec, other.shards, job_id="other")
    assert await outcomes(scene.delivery, 1, job_id="other") == [ShardOutcome(0, 100)]
    assert await reason() == "there is no space left"
    assert "a shard waits: there is no space left" in [line.text for line in await jobs.log(JOB)]
    is_full = False

    work.check(await outcomes(scene.delivery, 5))
    assert not await reason()
    await scene.stop()
    assert (await scene.store.stats("stub", 1))[stats.JOB_ROWS_SCORED] == 600


async def test_a_lost_lease_ends_the_run(scene: InlineWorkers, tmp_path: Path) -> None:
    """Somebody took it; the worker learns that when it renews, and goes on with the next job."""
    work = Work(tmp_path, 2000)
    await scene.model()
    worker = await scene.worker(**QUICK)
    await begin(scene, work)
    await Jobs(scene.delivery).stop(JOB, "cancelled", in_hand=True)
    await eventually(lambda: not worker._keeper.held(), description="a renewal")
    scene.go()
    await submit_job(scene.delivery, work.spec, work.shards, job_id="job2")
    found = await outcomes(scene.delivery, 1, job_id="job2")

    assert found == [ShardOutcome(0, 2000)]
    assert work.parts() == ["part-00000.parquet"]


async def test_a_dead_worker_s_shard_is_run_by_another(scene: InlineWorkers, tmp_path: Path) -> None:
    """Exactly once, as far as the output shows."""
    work = Work(tmp_path, 2000, 1000)
    await scene.model()
    await scene.worker("w1", **QUICK)
    await begin(scene, work)
    await scene.kill("w1")
    scene.go()
    await scene.worker("w2", **QUICK)

    work.check(await outcomes(scene.delivery, 2))


async def test_deaths_of_workers_fail_no_row(scene: InlineWorkers, tmp_path: Path) -> None:
    """They say nothing of the rows, but that those are to be run a range at a time."""
    work = Work(tmp_path, 20)
    await scene.model()
    await work.submit(scene)
    await scene.delivery.fetch(LANES, "dead1", 1, 1.0)
    for name in ("dead2", "dead3", "dead4", "dead5"):
        await asyncio.sleep(0.01)
        assert await scene.delivery.reclaim(LANES, name, 0.005, 1)
    await scene.worker(**QUICK)

    work.check(await outcomes(scene.delivery, 1))
    assert await scene.delivery.depth(LANES) == [0, 0, 0]


async def test_a_shard_that_ends_workers_without_an_end_is_given_up(
    scene: InlineWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes a dead letter, and its rows count as failed."""
    work = Work(tmp_path, 20)
    await scene.model()

    def give_up(*_: Any) -> Any:
        raise GivenUp("it ends workers")

    monkeypatch.setattr(shard_loop.ScoredVersion, "make_run", give_up)
    await scene.worker()
    await work.submit(scene)

    assert await outcomes(scene.delivery, 1) == [ShardOutcome(0, 20, 20, "it ends workers")]
    assert "shard 0 was given up: it ends workers" in [line.text for line in await Jobs(scene.delivery).log(JOB)]
    assert not work.parts()
    assert await scene.delivery.depth(LANES) == [0, 0, 0]


async def test_what_is_no_shard_is_buried(scene: InlineWorkers, tmp_path: Path) -> None:
    """It would be fetched again and again."""
    work = Work(tmp_path, 20)
    await scene.model()
    await scene.worker()
    scene.delivery.submit(LANES[0], b"\xff no shard", lambda _: None)
    await work.submit(scene)

    work.check(await outcomes(scene.delivery, 1))
    assert await scene.delivery.depth(LANES) == [0, 0, 0]


async def test_a_suspect_request_runs_without_a_shard_beside_it(scene: InlineWorkers, tmp_path: Path) -> None:
    """The shard is released for so long: a crash would count against it."""
    work = Work(tmp_path, 2000)
    await scene.model()
    answer = scene.submit(5.0)
    await scene.queued(1)
    assert await scene.delivery.fetch([scene.lane], "dead", 1, 1.0)
    await scene.worker(**QUICK)
    await work.submit(scene)

    assert value(await answer) == 5.0
    work.check(await outcomes(scene.delivery, 1))
