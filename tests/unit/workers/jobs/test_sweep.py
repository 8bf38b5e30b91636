"""Jobs that nobody moves on: what the sweep does about them, and what it leaves alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import BrokerUnavailable, StoreUnavailable
from qinfer.jobs.job import JobState, encode_spec
from qinfer.jobs.tasks import BulkTasks
from qinfer.models.readiness import Pin
from qinfer.models.state import DesiredState
from qinfer.testing import eventually
from qinfer_workers.jobs import steps
from qinfer_workers.jobs.services import PIN_TTL_S
from qinfer_workers.jobs.steps import CREATION_S, RESUMED_S, Sweeper
from tests.support.jobs.bulk_bench import HASH, Bench, bench, record_of, spec, write_inputs
from tests.support.servers.servers import Database

pytestmark = pytest.mark.usefixtures("timed")  # the databases are on it


class Sent(BulkTasks):
    """Notes which tasks were sent; the first is kept by `trouble`."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, str]] = []
        self.trouble: Exception | None = None

    def request_plan(self, job_id: str) -> None:
        if self.trouble is not None:
            error, self.trouble = self.trouble, None
            raise error
        self.tasks.append(("plan", job_id))

    def finalise(self, job_id: str) -> None:
        self.tasks.append(("finalise", job_id))


class Scene:
    """A bench, and what a sweep sends."""

    def __init__(self, one: Bench) -> None:
        self.bench = one
        self.sent = Sent()
        self._sweeper = Sweeper(one.services, self.sent)

    async def sweep(self, after_s: float = 0.0) -> list[tuple[str, str]]:
        """Sweeps after some time; returns what was sent."""
        self.bench.clock.advance(after_s)
        self.sent.tasks.clear()
        await self._sweeper.run()
        return list(self.sent.tasks)


STALE_S = 0.7
LONG_S = 1000.0


@pytest.fixture
def scene(database: Database, tmp_path: Path) -> Callable[..., Awaitable[Scene]]:
    async def make(state: str = "planning", deadline_at: float = 0.0) -> Scene:
        write_inputs(tmp_path / "in", [20, 5])
        one = await bench(database, tmp_path)
        await one.jobs.create(record_of(spec(tmp_path), state=state, deadline_at=deadline_at))
        return Scene(one)

    return make


Make = Callable[..., Awaitable[Scene]]


@pytest.mark.parametrize(("state", "task"), [("planning", "plan"), ("finalizing", "finalise")])
async def test_a_lost_task_is_sent_again_once(scene: Make, state: str, task: str) -> None:
    """Not before its job is stale, and not again before it is once more."""
    one = await scene(state)

    assert await one.sweep() == []
    assert await one.sweep(STALE_S) == [(task, "job")]
    assert await one.sweep() == []
    assert await one.sweep(STALE_S) == [(task, "job")]


async def test_a_job_that_this_process_works_on_is_left_alone(scene: Make) -> None:
    """However long it takes."""
    one = await scene()

    async with one.bench.services._hold(await one.bench.record(), frozenset()):
        assert await one.sweep(STALE_S) == []


async def test_a_job_whose_creation_was_broken_off_fails(scene: Make) -> None:
    """The gateway died after it had stored the record."""
    one = await scene("validating")
    await one.sweep(STALE_S)
    assert (await one.bench.record()).state == JobState.VALIDATING

    await one.sweep(CREATION_S)

    assert (await one.bench.record()).error == "its creation was interrupted"


async def test_a_job_s_model_version_is_pinned_until_its_end(scene: Make) -> None:
    """By the sweep, even if no task has pinned it; with the content of its plan once there is one."""
    one = await scene()
    store, jobs = one.bench.store, one.bench.jobs
    await one.sweep()
    (new,) = await store.pins()
    await one.bench.planner().run("job")
    (planned,) = await store.pins()
    await one.sweep(PIN_TTL_S * 0.4)
    (same,) = await store.pins()
    await one.sweep(PIN_TTL_S * 0.2)
    (renewed,) = await store.pins()

    await jobs.stop("job", JobState.CANCELLED, in_hand=True)
    await one.sweep()

    assert (new.model, new.version, new.content_hash, new.holder) == ("stub", 1, "", "job")
    assert (planned.content_hash, same) == (HASH, planned)
    assert renewed.expires_at > planned.expires_at
    assert await store.pins() == []


async def running(scene: Make, tmp_path: Path, **changes: object) -> Scene:
    """Returns a scene with a running job whose model version was replaced meanwhile."""
    one = await scene()
    job = spec(tmp_path, **changes)
    await one.bench.jobs.move("job", {JobState.PLANNING}, JobState.PLANNING, spec=encode_spec(job))
    await one.bench.planner().run("job")
    await one.bench.beat("sha256:other")
    return one


WHY = "version 1 of model 'stub' can't be kept: its files or configuration have changed"


async def test_a_job_whose_version_can_t_be_kept_says_so_until_it_is_back(scene: Make, tmp_path: Path) -> None:
    """In its record and log, once."""
    one = await running(scene, tmp_path)

    for _ in range(3):
        await one.sweep()
    lost = await one.bench.record()
    await one.bench.beat()
    await one.sweep()

    assert (lost.state, lost.waiting) == (JobState.RUNNING, WHY)
    assert (await one.bench.record()).waiting == ""
    assert (await one.bench.texts())[-2:] == [f"waits: {WHY}", "goes on"]


async def test_a_job_that_is_not_to_wait_for_its_version_fails(scene: Make, tmp_path: Path) -> None:
    """At the second look: files that are being changed may be away for a moment."""
    one = await running(scene, tmp_path, on_version_change="fail")

    first = await one.sweep()
    second = await one.sweep()

    record = await one.bench.record()
    assert (first, second) == ([], [("finalise", "job")])
    assert (record.state, record.error) == (JobState.FAILED, WHY)


async def test_a_job_that_was_resumed_waits_until_workers_have_looked_again(scene: Make, tmp_path: Path) -> None:
    """What they report is of before the files were put back."""
    one = await running(scene, tmp_path, on_version_change="fail")
    now_s = one.bench.delivery.clock.now_s()
    await one.bench.jobs.move("job", {JobState.RUNNING}, JobState.RUNNING, resumed_at=now_s)

    for _ in range(3):
        await one.sweep()
    waiting = (await one.bench.record()).state
    await one.sweep(RESUMED_S)

    assert (waiting, (await one.bench.record()).state) == (JobState.RUNNING, JobState.FAILED)


async def test_a_job_of_a_model_that_was_unloaded_says_so(scene: Make, tmp_path: Path) -> None:
    """No worker reports anything of it."""
    one = await scene()
    await one.bench.planner().run("job")
    await one.bench.store.set_desired(DesiredState("stub", 1, load=False))

    await one.sweep()

    why = "version 1 of model 'stub' can't be kept: the model was unloaded"
    assert (await one.bench.record()).waiting == why


async def test_the_pins_of_others_are_left_alone(scene: Make) -> None:
    """They renew and remove them."""
    one = await scene()
    other = Pin(model="stub", version=1, reason="sequence", holder="s1", expires_at=1.0)
    await one.bench.store.put_pin(other, 60.0)

    await one.sweep()

    assert other in await one.bench.store.pins()


async def test_the_lane_of_a_running_job_is_filled(scene: Make) -> None:
    """Nobody acted on the notice that it was planned."""
    one = await scene()
    await one.bench.jobs.add_shards("job", [(0, b"a"), (1, b"b"), (2, b"c")], 25, complete=True)

    assert await one.sweep(STALE_S) == []

    assert (await one.bench.record()).in_lane == 2


async def test_a_settled_job_is_finished(scene: Make) -> None:
    """Nobody acted on the notice of its last shard."""
    one = await scene()
    await one.bench.planner().run("job")
    while fetched := await one.bench.fetch():
        for lease, shard in fetched:
            await one.bench.finish(lease, shard)

    assert await one.sweep(STALE_S) == [("finalise", "job")]

    assert (await one.bench.record()).state == JobState.FINALIZING


async def test_a_job_with_too_many_failed_rows_fails(scene: Make) -> None:
    """Before the rest of its shards are run."""
    one = await scene()
    await one.bench.planner().run("job")
    ((lease, shard), *_) = await one.bench.fetch()
    await one.bench.finish(lease, shard, failed=4)

    assert await one.sweep(STALE_S) == [("finalise", "job")]

    record = await one.bench.record()
    assert (record.state, record.error) == (
        JobState.FAILED,
        "4 rows failed; the job allows 0 (error_threshold); the column error_message of the parts says why",
    )


async def test_shards_that_the_queue_lost_are_run_again(scene: Make) -> None:
    """Somebody deleted the lane."""
    one = await scene()
    await one.bench.planner().run("job")
    lost = [lease.entry for lease, _ in await one.bench.fetch()]
    await one.bench.delivery.finish(lost)

    await one.sweep(STALE_S)

    assert [shard.index for _, shard in await one.bench.fetch()] == [0, 1]
    assert "2 shards were lost by the queue and are run again" in await one.bench.texts()


async def test_a_job_whose_lost_shards_can_not_be_found_fails(scene: Make) -> None:
    """Its plan is gone too: it would run for ever."""
    one = await scene()
    await one.bench.planner().run("job")
    await one.bench.delivery.finish([lease.entry for lease, _ in await one.bench.fetch()])
    (one.bench.directory / "out" / "_plan.json").unlink()

    assert await one.sweep(STALE_S) == [("finalise", "job")]

    record = await one.bench.record()
    assert (record.state, record.error) == (
        JobState.FAILED,
        "2 shards were lost by the queue; the job's plan is gone from its output; make a new job",
    )


@pytest.mark.parametrize("error", [StoreUnavailable("the store is away"), RuntimeError("a defect")])
async def test_trouble_with_one_job_does_not_keep_the_sweep_from_the_others(scene: Make, error: Exception) -> None:
    """The first in order comes first each time."""
    one = await scene()
    for job_id in ("early", "late"):
        await one.bench.jobs.create(record_of(spec(one.bench.directory), job_id, created_at=float(len(job_id))))
    one.sent.trouble = error

    assert {job_id for _, job_id in await one.sweep(STALE_S)} <= {"job", "early", "late"}
    assert len(one.sent.tasks) == 2


@contextlib.asynccontextmanager
async def rounds(*sweepers: Sweeper) -> AsyncIterator[None]:
    """Bulk workers' loops."""
    tasks = [asyncio.create_task(one.run_rounds()) for one in sweepers]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_of_all_bulk_workers_sweeps(database: Database, tmp_path: Path) -> None:
    """The first to ask; the others have looked, too."""
    one = await bench(database, tmp_path, sweep_every_s=LONG_S)
    take, look, turns, looks = one.store.take_sweep, one.jobs.unfinished, list[bool](), list[int]()

    async def take_sweep(ttl_s: float) -> bool:
        turns.append(await take(ttl_s))
        return turns[-1]

    async def unfinished() -> Any:
        looks.append(1)
        return await look()

    one.store.take_sweep = take_sweep  # type: ignore[method-assign]
    one.jobs.unfinished = unfinished  # type: ignore[method-assign]
    async with rounds(*(Sweeper(one.services, Sent()) for _ in range(3))):
        await eventually(lambda: len(turns) == 3 and bool(looks))

    assert (sorted(turns), len(looks)) == ([False, False, True], 1)


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), RuntimeError("a defect"), None])
async def test_a_sweep_that_fails_or_hangs_is_followed_by_another(
    database: Database, tmp_path: Path, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`None` hangs, until its limit."""
    one = await bench(database, tmp_path, sweep_every_s=0.01)
    looks: list[int] = []
    if error is None:
        monkeypatch.setattr(steps, "SWEEP_LIMIT_S", 0.1)

    async def unfinished() -> Any:
        looks.append(1)
        if error is not None:
            raise error
        await asyncio.Event().wait()

    one.jobs.unfinished = unfinished  # type: ignore[method-assign]
    async with rounds(Sweeper(one.services, Sent())):
        await eventually(lambda: len(looks) >= 3)


async def test_a_job_past_its_deadline_expires(scene: Make) -> None:
    """What is there is listed."""
    one = await scene(deadline_at=1.0)

    assert await one.sweep() == [("finalise", "job")]

    record = await one.bench.record()
    assert (record.state, record.error) == (JobState.EXPIRED, "its deadline has passed")


async def test_a_job_that_is_being_cancelled_for_long_is_cancelled(scene: Make) -> None:
    """Those who hold its shards are gone."""
    one = await scene()
    await one.bench.planner().run("job")
    await one.bench.fetch()
    await one.bench.jobs.stop("job", JobState.CANCELLING)

    assert await one.sweep(STALE_S) == [("finalise", "job")]

    assert (await one.bench.record()).state == JobState.CANCELLED
