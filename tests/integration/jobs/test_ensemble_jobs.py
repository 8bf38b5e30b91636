"""Bulk jobs over ensembles, on workers in this process: their steps, versions, failures, and deaths."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from onnx import helper, numpy_helper

from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import ShardOutcome
from qinfer.models.readiness import ExecutedVersion, Pin, executed, joint_hash
from qinfer.observe import stats
from qinfer.testing import eventually
from tests.support import models, python_models
from tests.support.ensembles import EnsemblesServed, add, chain, ensemble, ensembles_served, scale
from tests.support.jobs.shard_runs import JOB, job_spec, outcomes, read_parts, scored_rows, shards_of, write_rows
from tests.support.jobs.shard_runs import submit_job as put_job

pytestmark = pytest.mark.timeout(60)

ROWS, GROUP = 160, 20
SHARDS = ROWS // GROUP


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Returns a repository of `nested`, y = 5 x · 6 · 2, whose steps are two ensembles and a model."""
    path = tmp_path / "repository"
    for name, factor in (("twice", 2.0), ("thrice", 3.0)):
        scale(path, name, factor)
    add(path)
    chain(path, "line", "twice", "thrice")
    branches = ("twice", {"x": "x"}, {"y": "l"}), ("thrice", {"x": "x"}, {"y": "r"})
    ensemble(path, "fork", *branches, ("add", {"a": "l", "b": "r"}, {"y": "y"}))
    chain(path, "nested", "fork", "line", "twice")
    return path


@pytest.fixture
async def scene(repository: Path) -> AsyncIterator[EnsemblesServed]:
    async with ensembles_served(repository) as one:
        yield one


class Work:
    """A job over `nested`, unless told otherwise, and what it was planned with."""

    def __init__(self, scene: EnsemblesServed, folder: Path, model: str = "nested") -> None:
        self.output = folder / "out"
        self.output.mkdir()
        url = write_rows(folder / "in.parquet", ROWS, group=GROUP)
        self.shards = shards_of(url)
        self.spec = job_spec([url], self.output, model=model)
        self.executes: tuple[ExecutedVersion, ...] = ()
        self._scene = scene

    async def submit(self) -> None:
        """Puts the job into the queue, and pins what it runs, as the planner does."""
        store, model = self._scene.store, self.spec.model
        await eventually(self._is_known, description="what the model executes")
        self.executes = executed(await store.workers(), model, 1)
        for one in self.executes:
            pin = Pin(
                model=one.model,
                version=one.version,
                content_hash=one.content_hash,
                reason="job",
                holder=JOB,
                expires_at=2e9,
            )
            await store.put_pin(pin, 3600.0)
        queue = self._scene.gateway._delivery
        await put_job(queue, self.spec, self.shards, model_hash=joint_hash(self.executes), executes=self.executes)

    async def _is_known(self) -> bool:
        return bool(executed(await self._scene.store.workers(), self.spec.model, 1))

    async def check(self, factor: float) -> None:
        """Waits for the end; each row is there once, and is what `factor` makes of it."""
        found = await outcomes(self._scene.gateway._delivery, SHARDS)
        assert found == [ShardOutcome(shard.index, shard.rows) for shard in self.shards]
        assert scored_rows(self.output) == [(row, factor * row) for row in range(ROWS)]


async def test_a_job_runs_the_steps_of_ensembles_in_ensembles(scene: EnsemblesServed, tmp_path: Path) -> None:
    """Every row once, in order; its executions count on the ensemble, and as requests on the steps' models."""
    work = Work(scene, tmp_path)
    await scene.sync()
    await scene.worker()
    await scene.ready()

    await work.submit()
    await work.check(60.0)
    await scene.close()

    assert [one.model for one in work.executes] == ["nested", "fork", "line", "twice", "thrice", "add"]
    found = await scene.store.stats("nested", 1)
    assert found[stats.INFERENCE_COUNT] == found[stats.ROWS_DONE] == ROWS
    assert (await scene.store.stats("twice", 1))[stats.INFERENCE_COUNT] == 3 * ROWS


async def test_a_job_over_an_ensemble_with_reshapes(scene: EnsemblesServed, tmp_path: Path) -> None:
    scale(scene.repository, "box", 2.0, width=(2, 1))
    ensemble(scene.repository, "boxed", ("box", {"x": "x"}, {"y": "y"}), reshape=(2, 1))
    work = Work(scene, tmp_path, "boxed")
    await scene.sync()
    await scene.worker()
    await scene.ready("boxed")

    await work.submit()

    await work.check(2.0)


async def test_steps_in_other_workers(scene: EnsemblesServed, tmp_path: Path) -> None:
    work = Work(scene, tmp_path)
    await scene.sync()
    await scene.worker("w1", models=("nested", "line", "fork"))
    await scene.worker("w2", models=("t*", "add"))
    await scene.ready()

    await work.submit()

    await work.check(60.0)


async def test_rows_with_which_a_step_fails_cost_no_other_row(scene: EnsemblesServed, tmp_path: Path) -> None:
    """Their error names ensemble and step."""
    table = numpy_helper.from_array(np.arange(150, dtype=np.float32), "table")
    nodes = [helper.make_node("Cast", ["x"], ["i"], to=7), helper.make_node("Gather", ["table", "i"], ["y"])]
    nodes.insert(0, helper.make_node("Constant", [], ["table"], value=table))
    models.write(scene.repository, "lookup", nodes, [("x", "FP32", (2,))], [("y", "FP32", (2,))])
    chain(scene.repository, "picky", "lookup", "twice")
    work = Work(scene, tmp_path, "picky")
    await scene.sync()
    await scene.worker()
    await scene.ready()

    await work.submit()

    assert (await outcomes(scene.gateway._delivery, SHARDS))[-1] == ShardOutcome(SHARDS - 1, GROUP, 10)
    rows = scored_rows(work.output)
    assert rows[:150] == [(row, 2.0 * row) for row in range(150)]
    assert [value for _, value in rows[150:]] == [None] * 10
    assert "in ensemble 'picky', step of model 'lookup': " in read_parts(work.output)["error_message"][-1].as_py()


SEVERAL = python_models.HEADER + (
    """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, row = request.get_response_sender(), x(request)
            for number in range(int(row[0, 0]) % 4):
                if row[0, 0] == 159:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no such row")))
                    break
                sender.send(reply(row + number))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
"""Gives x, x + 1, … : a remainder's worth of responses to a row, and an error to the last."""


async def test_rows_of_a_decoupled_ensemble_have_all_responses(scene: EnsemblesServed, tmp_path: Path) -> None:
    """Those of each row in its order; a row whose step fails has the error."""
    python_models.write_model(scene.repository, SEVERAL, "several", dims="2", more=python_models.DECOUPLED)
    chain(scene.repository, "streamed", "several", "twice")
    work = Work(scene, tmp_path, "streamed")
    await scene.sync()
    await scene.worker()
    await scene.ready("streamed")

    await work.submit()

    assert (await outcomes(scene.gateway._delivery, SHARDS))[-1] == ShardOutcome(SHARDS - 1, GROUP, 1)
    table = read_parts(work.output)
    expected = [[[2.0 * (row + number)] * 2 for number in range(row % 4)] for row in range(ROWS - 1)]
    assert table["_row"].to_pylist() == list(range(ROWS))
    assert table["y"].to_pylist()[:-1] == expected
    assert "step of model 'several': no such row" in table["error_message"][-1].as_py()


async def test_outputs_have_the_labels_of_the_step_that_makes_them(scene: EnsemblesServed, tmp_path: Path) -> None:
    config = scene.repository / "thrice" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "y"', 'name: "y" label_filename: "labels.txt"'))
    (config.parent / "labels.txt").write_text("first\nsecond\n")
    work = Work(scene, tmp_path, "line")
    work.spec = msgspec.structs.replace(work.spec, output=msgspec.structs.replace(work.spec.output, top_k={"y": 1}))
    await scene.sync()
    await scene.worker()
    await scene.ready("line")

    await work.submit()

    await outcomes(scene.gateway._delivery, SHARDS)
    table = read_parts(work.output)
    assert set(table["y_label"].to_pylist()) == {"first"}
    assert table["y_score"].to_pylist() == [6.0 * row for row in range(ROWS)]


async def test_a_rollout_of_a_step_changes_no_job_that_was_planned(scene: EnsemblesServed, tmp_path: Path) -> None:
    """It goes on with the version of its plan, while callers get the new one."""
    work = Work(scene, tmp_path, "line")
    await scene.sync()
    await scene.worker("w1", models=("t*", "line"))
    await scene.ready("line")
    await work.submit()
    await outcomes(scene.gateway._delivery, SHARDS)
    before = work.executes

    scale(scene.repository, "twice", 20.0, version=2)
    await scene.sync()
    await scene.ready("line")
    assert await scene.infer("line") == [60.0, 120.0]
    (tmp_path / "second").mkdir()
    second = Work(scene, tmp_path / "second", "line")
    pinned = {one.model: one for one in before}
    queue = scene.gateway._delivery
    await put_job(queue, second.spec, second.shards, job_id="job2", model_hash=joint_hash(before), executes=before)

    assert pinned["twice"].version == 1
    await outcomes(queue, SHARDS, job_id="job2")
    assert scored_rows(second.output) == [(row, 6.0 * row) for row in range(ROWS)]
    now = executed(await scene.store.workers(), "line", 1)
    assert {one.model: one.version for one in now}["twice"] == 2
    assert joint_hash(now) != joint_hash(before)


async def test_a_step_whose_content_has_changed_stops_the_job(
    scene: EnsemblesServed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until it is back: no output is of two models."""
    work = Work(scene, tmp_path, "line")
    await scene.sync()
    await scene.worker("w1", models=("t*", "line"))
    await scene.ready("line")
    planned = executed(await scene.store.workers(), "line", 1)

    scale(scene.repository, "twice", 20.0)
    await scene.sync()
    await scene.ready("line")
    work.executes = planned
    queue = scene.gateway._delivery
    await put_job(queue, work.spec, work.shards, model_hash=joint_hash(planned), executes=planned)
    await eventually(lambda: "shard put off" in caplog.text, description="a shard that is put off")
    assert joint_hash(executed(await scene.store.workers(), "line", 1)) != joint_hash(planned)
    assert await Jobs(queue).outcomes(JOB) == {}
    scale(scene.repository, "twice", 2.0)
    await scene.sync()

    await work.check(6.0)


async def test_another_worker_runs_the_shards_of_a_dead_one(scene: EnsemblesServed, tmp_path: Path) -> None:
    """It died while a step waited for its turn; no row is lost, and none is there twice."""
    work = Work(scene, tmp_path, "line")
    await scene.sync()
    await scene.worker("w1", models=("line",))
    steps = await scene.worker("w2", models=("t*",))
    await scene.ready("line")
    batcher = steps._serving["thrice", 1].batcher
    await batcher.pause_batching()
    await work.submit()
    await eventually(lambda: waits(scene, "thrice"), description="a step in its lane")

    await scene.kill("w1")
    batcher.resume_batching()
    await scene.worker("w3", models=("line",))

    await work.check(6.0)


async def waits(scene: EnsemblesServed, model: str) -> bool:
    return await scene.depth(model) > 0
