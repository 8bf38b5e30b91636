"""`qinfer compare` as people type it: the jobs that are submitted, what is shown of their outputs, and how it exits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from qinfer.cli import client
from qinfer.cli.jobs.compare import beside, read_target
from qinfer.cli.main import app
from qinfer.client import Client
from tests.support.jobs.job_outputs import write_job_output
from tests.support.scripted_gateway import Scripted, Server, reply
from tests.unit.client.test_jobs import job

METADATA: dict[str, Any] = {"name": "m", "versions": ["3", "4"], "platform": "onnxruntime_onnx", "inputs": []}
ROWS = 6
PROBABILITIES = [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3], [0.5, 0.5], [0.1, 0.9]]


def metadata(*outputs: str) -> httpx.Response:
    return reply(200, **METADATA, outputs=[{"name": name, "datatype": "FP32", "shape": [-1, 2]} for name in outputs])


def table(**changes: Any) -> pa.Table:
    """Returns the output of a job: a label, its probabilities and a text."""
    columns = {
        "id": [f"r{i}" for i in range(ROWS)],
        "label": pa.array(np.argmax(PROBABILITIES, axis=1)),
        "probabilities": pa.array(PROBABILITIES, pa.list_(pa.float32(), 2)),
        "text": ["cat"] * ROWS,
        **changes,
    }
    return pa.table(columns)


def changed(**rows: Any) -> pa.Table:
    """Returns the same with another value in some rows: `r2=[0.4, 0.6]` of the probabilities."""
    probabilities = [rows.get(f"r{i}", old) for i, old in enumerate(PROBABILITIES)]
    return table(
        probabilities=pa.array(probabilities, pa.list_(pa.float32(), 2)),
        label=pa.array([int(np.argmax(one)) if one else None for one in probabilities], pa.int64()),
    )


class Scene:
    """A gateway that accepts and completes two jobs, whose outputs exist."""

    def __init__(self, folder: Path, connect: Callable[[Server], None]) -> None:
        self._folder = folder
        self._connect = connect
        self.server = Server(reply(500))

    def outputs(self, stable: list[pa.Table], canary: list[pa.Table], known: Any = None, key: str = "id") -> None:
        folders = []
        for version, tables in ((3, stable), (4, canary)):
            folders.append(write_job_output(self._folder / str(version), tables, version=version, key=key))
        done = [
            job("completed", id=f"j{number}", version=version, output_url=folder)
            for number, version, folder in ((1, 3, folders[0]), (2, 4, folders[1]))
        ]
        known = known or [metadata("label", "probabilities", "text")] * 2
        submitted = [job("planning", 201, id="j1"), job("planning", 201, id="j2")]
        self.answers(*known, *submitted, *done)

    def answers(self, *replies: Scripted) -> None:
        self.server = Server(*replies)
        self._connect(self.server)

    def run(self, *more: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["compare", "m:3", "m:4", str(self._folder / "in" / "rows.parquet"), *more])
        return result.exit_code, result.stdout, result.stderr

    def found(self, *more: str) -> tuple[int, dict[str, Any]]:
        code, out, err = self.run("--json", *more)
        assert out, err
        return code, json.loads(out)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("COLUMNS", "200")

    def connect(server: Server) -> None:
        def connected(url: str) -> Client:
            return server.client(max_retries=0)

        monkeypatch.setattr(client, "GatewayClient", connected)

    return Scene(tmp_path, connect)


def test_two_jobs_of_the_same_rows_are_submitted(scene: Scene, tmp_path: Path) -> None:
    scene.outputs([table()], [table()])

    code, out, err = scene.run("--sample", "1000", "--column", "x=a", "--key", "id", "--priority", "low")

    assert code == 0, out + err
    bodies = [json.loads(one.content) for one in scene.server.requests if one.method == "POST"]
    assert [(body["model"], body["version"]) for body in bodies] == [("m", 3), ("m", 4)]
    folder = f"file://{tmp_path}/in/_compare"
    assert [body["output"]["url"] for body in bodies] == [f"{folder}/m-3", f"{folder}/m-4"]
    for body in bodies:
        assert (body["limit"], body["columns"], body["key"], body["priority"]) == (1000, {"x": "a"}, "id", "low")
        assert (body["error_threshold"], body["overwrite"]) == (-1, True)


def test_text_has_the_options_of_submit(scene: Scene) -> None:
    scene.outputs([table()], [table()])
    options = (
        "--input-format csv --input-compression gzip --delimiter ; --quote ' --escape none --decimal-point , "
        "--encoding latin-1 --no-header --column-names id,x --merge-schema --type id=int64"
    )

    code, _, err = scene.run(*options.split())

    assert code == 0, err
    bodies = [json.loads(one.content) for one in scene.server.requests if one.method == "POST"]
    assert [(body["input_format"], body["input_compression"]) for body in bodies] == [("csv", "gzip")] * 2
    assert [(body["merge_schema"], body["types"]) for body in bodies] == [(True, {"id": "int64"})] * 2
    assert [body["csv"] for body in bodies] == [
        {
            "delimiter": ";",
            "quote": "'",
            "escape": "none",
            "decimal_point": ",",
            "encoding": "latin-1",
            "header": False,
            "column_names": ["id", "x"],
        }
    ] * 2


def test_equal_outputs_agree(scene: Scene) -> None:
    scene.outputs([table()], [table()])

    code, out, _ = scene.run()

    assert code == 0
    assert "m:4 compared with m:3" in out
    assert "0 of 6 rows differ (0.00%); 0.00% may" in out
    assert "differ most" not in out


def test_rows_that_differ_are_shown_and_fail(scene: Scene) -> None:
    """Whatever the parts are: each output with its agreement and distances, and the most different rows first."""
    other = changed(r1=[0.25, 0.75], r2=[0.3, 0.7])
    scene.outputs([table().slice(0, 4), table().slice(4)], [other.slice(0, 1), other.slice(1)])

    code, found = scene.found()

    assert code == 1
    assert (found["stable"], found["canary"], found["rows"], found["differing"]) == ("m:3", "m:4", 6, 1)
    outputs = {one.pop("output"): one for one in found["outputs"]}
    assert {name: (one["by"], one["agreeing"]) for name, one in outputs.items()} == {
        "label": ("equal", 5),
        "probabilities": ("argmax", 5),
        "text": ("equal", 6),
    }
    assert outputs["probabilities"]["largest"] == pytest.approx(0.3)
    assert outputs["probabilities"]["mean"] == pytest.approx(0.35 / 6)
    assert outputs["text"]["largest"] is outputs["label"]["largest"] is None
    samples = [(one["row"], one["output"], one["stable"], one["canary"], one["agrees"]) for one in found["samples"]]
    assert samples == [
        ("r2", "label", "0", "1", False),
        ("r2", "probabilities", "[0.6, 0.4]", "[0.3, 0.7]", False),
        ("r1", "probabilities", "[0.2, 0.8]", "[0.25, 0.75]", True),
    ]


def test_a_share_may_differ(scene: Scene) -> None:
    scene.outputs([table()], [changed(r2=[0.3, 0.7])])

    assert scene.run("--allow", "0.2")[0] == 0

    scene.outputs([table()], [changed(r2=[0.3, 0.7])])
    assert scene.run("--allow", "0.1")[0] == 1


def test_the_rule_of_an_output_can_be_chosen(scene: Scene) -> None:
    outputs = [table()], [changed(r1=[0.25, 0.75])]

    scene.outputs(*outputs)
    assert scene.found("--agree", "probabilities=within")[1]["differing"] == 1
    scene.outputs(*outputs)
    assert scene.found("--agree", "probabilities=within", "--tolerance", "0.1")[1]["differing"] == 0


def test_values_can_be_redacted(scene: Scene) -> None:
    scene.outputs([table()], [changed(r2=[0.3, 0.7])])

    samples = scene.found("--redact", "--show", "1")[1]["samples"]

    assert [(one["output"], one["row"], one["stable"], one["canary"]) for one in samples] == [
        ("label", "r2", "", ""),
        ("probabilities", "r2", "", ""),
    ]


def test_rows_that_one_target_cannot_score_differ(scene: Scene) -> None:
    def failing(*rows: int) -> pa.Table:
        codes = [("inference_failed" if i in rows else None) for i in range(ROWS)]
        whole = changed(**{f"r{i}": None for i in rows})
        columns = {name: pa.array(codes, pa.string()) for name in ("error_code", "error_message")}
        return pa.table({**{name: whole[name] for name in whole.column_names}, **columns})

    scene.outputs([failing(0, 1)], [failing(1, 2, 3)])

    code, found = scene.found()

    assert code == 1
    assert (found["rows"], found["differing"]) == (6, 3)
    assert found["failed"] == {"stable": 1, "canary": 2, "both": 1}
    assert found["outputs"][0]["rows"] == 2


def test_outputs_of_one_target_are_named(scene: Scene) -> None:
    scene.outputs([table()], [table()], known=[metadata("label", "text"), metadata("label", "scores")])

    code, found = scene.found()

    assert code == 0
    assert [one["output"] for one in found["outputs"]] == ["label"]
    assert found["others"] == ["scores", "text"]


def test_inputs_that_have_changed_are_an_error(scene: Scene) -> None:
    scene.outputs([table()], [table(id=[f"s{i}" for i in range(ROWS)])])
    code, _, err = scene.run()
    assert code == 1
    assert "inputs have changed" in err

    scene.outputs([table()], [table().slice(1)])
    assert "inputs have changed" in scene.run()[2]


def test_a_job_that_fails_ends_the_comparison(scene: Scene) -> None:
    """The other job is cancelled."""
    submitted = [job("planning", 201, id="j1"), job("planning", 201, id="j2")]
    failed = job("failed", id="j1", error="no such file")
    scene.answers(*[metadata("label")] * 2, *submitted, failed, job("cancelled", id="j2"))

    code, _, err = scene.run()

    assert code == 1
    assert "job j1 is failed: no such file" in err
    assert scene.server.paths[-1] == "POST /v1/jobs/j2/cancel"


def test_a_refusal_of_the_second_job_cancels_the_first(scene: Scene) -> None:
    refused = reply(400, error="no file", code="invalid_request")
    scene.answers(*[metadata("label")] * 2, job("planning", 201, id="j1"), refused, job("cancelled", id="j1"))

    code, _, err = scene.run()

    assert code == 64
    assert "no file" in err
    assert scene.server.paths[-1] == "POST /v1/jobs/j1/cancel"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["m:3", "m:3", "a"], "compared with itself"),
        (["m:3", ":4", "a"], "names no model"),
        (["m:3", "m:4", "a", "--agree", "y=nearly"], "expected argmax, equal, within"),
        (["m:3", "m:4", "a", "--agree", "y=equal"], "'y' can't be compared; both have the outputs: label"),
        (["m:3", "m:4", "a", "--allow", "2"], "--allow"),
    ],
)
def test_wrong_usage(scene: Scene, arguments: list[str], text: str) -> None:
    scene.answers(metadata("label"))

    result = CliRunner().invoke(app, ["compare", *arguments])

    assert result.exit_code == 64
    assert text in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("text", "target"),
    [("m:3", ("m", 3)), ("m", ("m", 0)), ("a:b", ("a:b", 0)), ("a:b:12", ("a:b", 12))],
)
def test_targets(text: str, target: tuple[str, int]) -> None:
    assert read_target(text) == target


@pytest.mark.parametrize(
    ("location", "folder"),
    [
        ("rows.parquet", "_compare"),
        ("data/rows.parquet", "data/_compare"),
        ("data/in/", "data/_compare"),
        ("s3://b/in/*.parquet", "s3://b/in/_compare"),
        ("s3://b/in-*/a.parquet", "s3://b/_compare"),
        ("s3://b/in/**/*.parquet", "s3://b/_compare"),
        ("in/**/*.parquet", "_compare"),
    ],
)
def test_the_folder_beside_the_inputs(location: str, folder: str) -> None:
    assert beside(location) == folder
