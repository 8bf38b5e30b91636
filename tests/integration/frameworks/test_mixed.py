"""An ensemble of TensorFlow, JAX, a forest and LiteRT: equal to the frameworks in one process, also in a bulk job."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as over_grpc
import tritonclient.http.aio as over_http

from qinfer.jobs.queue.records import ShardOutcome
from qinfer.models.readiness import ExecutedVersion, executed, joint_hash
from qinfer.testing import eventually
from tests.support.framework_models import build, needs, sample
from tests.support.framework_scene import asked, framework_served, load
from tests.support.jobs.shard_runs import job_spec, outcomes, read_parts, shards_of, submit_job
from tests.support.served_models import ServedModels

pytestmark = [
    needs("mixed"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

ROUNDING = 1e-5
"""Relative: other batch sizes may add in another order."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedModels]:
    async with framework_served(build("mixed", tmp_path_factory.mktemp("mixed") / "models")) as one:
        for model in ("scores", "bend", "price", "scale", "mixed"):
            await load(one, model)
        yield one


async def test_each_request_passes_four_frameworks(scene: ServedModels) -> None:
    """Over both protocols, in batches and alone."""
    inputs, outputs = sample(scene.repository, "mixed")
    for client, module in ((scene.http, over_http), (scene.grpc, over_grpc)):
        for rows in (slice(0, 4), slice(4, 5), slice(62, 64)):
            answer = await asked(client, module, "mixed", {"x": inputs["x"][rows]})

            for name, expected in outputs.items():
                np.testing.assert_allclose(answer.as_numpy(name), expected[rows], rtol=ROUNDING)


async def test_a_bulk_job_passes_four_frameworks(scene: ServedModels, tmp_path: Path) -> None:
    inputs, expected = sample(scene.repository, "mixed")
    column = pa.array(inputs["x"].tolist(), pa.list_(pa.float32(), 4))
    pq.write_table(pa.table({"x": column}), tmp_path / "in.parquet", row_group_size=24)
    (tmp_path / "out").mkdir()
    url = f"file://{tmp_path / 'in.parquet'}"
    shards = shards_of(url)

    steps: tuple[ExecutedVersion, ...] = ()

    async def are_known() -> bool:
        nonlocal steps
        steps = executed(await scene.store.workers(), "mixed", 1)
        return bool(steps)

    await eventually(are_known, 20.0, "what the ensemble executes")
    spec = job_spec([url], tmp_path / "out", model="mixed")
    await submit_job(scene.gateway._delivery, spec, shards, model_hash=joint_hash(steps), executes=steps)
    found = await outcomes(scene.gateway._delivery, len(shards), timeout_s=60)

    assert [step.model for step in steps] == ["mixed", "scores", "bend", "price", "scale"]
    assert found == [ShardOutcome(shard.index, shard.rows) for shard in shards]
    table = read_parts(tmp_path / "out")
    assert table.column("_row").to_pylist() == list(range(64))
    np.testing.assert_allclose(table.column("scores").to_pylist(), expected["scores"], rtol=ROUNDING)
    totals = [value[0] if isinstance(value, list) else value for value in table.column("total").to_pylist()]
    np.testing.assert_allclose(totals, expected["total"][:, 0], rtol=ROUNDING)
