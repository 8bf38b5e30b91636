"""`qinfer label` on the output of a job that the whole server scored."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from qinfer.cli.main import app
from tests.e2e.job_scene import WITHIN_S, Server, serving
from tests.support.jobs.job_proof import MODEL, NULL_EVERY, parquet, rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

ROWS = 120
MAPPING = f"""
model: {MODEL}
inputs: {{x: {{field: name, kind: tensor}}}}
results:
  - {{type: choices, from_name: which, to_name: text, scores: y, labels: [first, second], activation: softmax}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("jobs")) as one:
        yield one


@pytest.mark.parametrize("output_format", ["parquet", "arrow"])
def test_each_scored_row_is_a_task(server: Server, tmp_path: Path, output_format: str) -> None:
    """By the job's id; the least sure first; rows that could not be scored are left out and counted."""
    scene = server.scene()
    scene.place.put("in/a.parquet", parquet(rows_of(0, ROWS, ROWS)))
    job = scene.submit(passthrough=["name"], format=output_format, rows_per_part=50)
    assert job.wait(timeout_s=WITHIN_S).state == "completed"
    (tmp_path / "which.yaml").write_text(MAPPING)
    out = tmp_path / "tasks.json"

    address = f"http://{scene.stack.address}"
    command = ["label", job.id, "--mapping", str(tmp_path / "which.yaml"), "--order", "confidence", "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--url", address])

    assert result.exit_code == 0, result.stderr
    failed = len(range(0, ROWS, NULL_EVERY))
    assert f"omitted: {failed} rows with errors of the job, and 0" in result.stderr
    tasks = json.loads(out.read_text())
    ids = [task["data"]["id"] for task in tasks]
    assert sorted(ids) == [i for i in range(ROWS) if i % NULL_EVERY]
    scores = [task["predictions"][0]["score"] for task in tasks]
    assert scores == sorted(scores)
    expected = {i: 1 / (1 + np.exp(-float(i))) for i in ids}  # softmax of 2·i and i
    assert scores == pytest.approx([expected[i] for i in ids], abs=1e-5)
    assert {task["predictions"][0]["model_version"] for task in tasks} == {f"{MODEL}:1"}
