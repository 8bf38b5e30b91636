"""Label Studio's calls and a job's tasks over an ensemble, through the whole server."""

import json
from collections.abc import Iterator
from math import exp
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from qinfer.cli.main import app
from qinfer.client import Client
from tests.e2e.conftest import Stack, running
from tests.support.ensembles import chain, scale
from tests.support.servers.label_studio_server import CONFIG

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

ROWS = 40
MAPPING = """
name: line
model: line
project: 12
inputs: {x: {field: x, kind: tensor}}
results: [{type: choices, from_name: label, to_name: text, scores: y, labels: [neg, pos], activation: softmax}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the ensemble `line`, y = 6 x in two steps, and the mapping of its scores to labels."""
    folder = tmp_path_factory.mktemp("labeling")
    scale(folder / "models", "twice", 2.0)
    scale(folder / "models", "thrice", 3.0)
    chain(folder / "models", "line", "twice", "thrice")
    (folder / "mappings").mkdir()
    (folder / "mappings" / "line.yaml").write_text(MAPPING)
    return folder


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    settings = {
        "QINFER_LABELING__MAPPINGS": str(folder / "mappings"),
        "QINFER_STORES__ALLOW": f'["file://{folder}"]',
    }
    with running(folder / "models", folder, **settings) as stack:
        yield stack


def test_tasks_are_predicted_by_an_ensemble(stack: Stack) -> None:
    tasks = [{"id": number, "project": 12, "data": {"x": [0.1, number / 10]}} for number in range(4)]
    call = {"project": "12.1735689600", "label_config": CONFIG, "tasks": tasks, "params": {"context": None}}

    reply = httpx.post(f"http://{stack.address}/label-studio/line/predict", json=call, timeout=60)

    assert reply.status_code == 200, reply.text
    results = reply.json()["results"]
    assert [one["result"][0]["value"]["choices"] for one in results] == [["neg"], ["neg"], ["pos"], ["pos"]]
    sure = [1 / (1 + exp(-abs(6 * number / 10 - 0.6))) for number in range(4)]
    assert [one["score"] for one in results] == pytest.approx(sure, abs=1e-4)


def test_a_job_over_an_ensemble_becomes_tasks(stack: Stack, folder: Path) -> None:
    (folder / "in").mkdir()
    table = pa.table({"id": list(range(ROWS)), "x": [[0.5, number / 100] for number in range(ROWS)]})
    pq.write_table(table, folder / "in" / "rows.parquet")
    out = folder / "tasks.json"
    with Client(f"http://{stack.address}") as client:
        urls = (f"file://{folder}/in/*.parquet", f"file://{folder}/out")
        job = client.submit_job("line", *urls, key="id", passthrough=["x"])
        assert job.wait(timeout_s=100.0).state == "completed"

    command = ["label", job.id, "--mapping", str(folder / "mappings" / "line.yaml"), "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--url", f"http://{stack.address}"])

    assert result.exit_code == 0, result.stderr
    tasks = json.loads(out.read_text())
    assert sorted(task["data"]["id"] for task in tasks) == list(range(ROWS))
    assert {task["predictions"][0]["model_version"] for task in tasks} == {"line:1"}
    assert [task["predictions"][0]["result"][0]["value"]["choices"] for task in tasks] == [["neg"]] * ROWS
