"""`qinfer label` as people type it: what is read of a job's output, what is written, and how it exits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from qinfer.cli import client
from qinfer.cli.jobs import annotations, output_rows
from qinfer.cli.main import app
from qinfer.client import Client
from qinfer.jobs.job import OutputFormat
from tests.support.jobs.job_outputs import write_job_output
from tests.support.scripted_gateway import Server, reply
from tests.unit.client.test_jobs import shown

MAPPING = """
model: m
inputs: {TEXT: {field: text}}
results:
  - {type: choices, from_name: mood, to_name: text, scores: PROBS, labels: [neg, pos]}
"""
CONFIG = '<View><Choices name="mood" toName="text"><Choice value="neg"/><Choice value="{}"/></Choices></View>'
SURE = [0.9, 0.6, 0.75, 0.55, 0.8]


def table(first: int = 0, last: int = 5, **columns: Any) -> pa.Table:
    """Returns rows of a job that scored texts: two fields, one output, and what tools do not show."""
    sure = SURE[first:last]
    probabilities = pa.array([[1 - s, s] for s in sure], pa.list_(pa.float32(), 2))
    fields = {
        "id": [f"r{i}" for i in range(first, last)],
        "text": [f"text {i}" for i in range(first, last)],
        "PROBS": probabilities,
        "EMBEDDING": [[0.0]] * len(sure),
        "raw": [b"\xff"] * len(sure),
    }
    return pa.table({**fields, **columns})


@pytest.fixture
def mapping(tmp_path: Path) -> Path:
    path = tmp_path / "mood.yaml"
    path.write_text(MAPPING)
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["label", *map(str, arguments)])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("output_format", ["parquet", "arrow", "csv", "jsonl"])
def test_tasks_of_a_job(tmp_path: Path, mapping: Path, output_format: OutputFormat) -> None:
    """All rows of all parts in order; fields are what tools can show, with confidence and version."""
    folder = write_job_output(
        tmp_path / "out", [table(0, 3), table(3, 5)], key="id", version=4, output_format=output_format
    )

    code, out, err = run(folder, "--mapping", mapping)

    assert (code, err) == (0, "5 rows written")
    found = lines(out)
    assert [task["data"] for task in found] == [{"id": f"r{i}", "text": f"text {i}"} for i in range(5)]
    predictions = [prediction for task in found for prediction in task["predictions"]]
    assert [prediction["score"] for prediction in predictions] == pytest.approx(SURE)
    assert {prediction["model_version"] for prediction in predictions} == {"m:4"}
    assert {prediction["result"][0]["value"]["choices"][0] for prediction in predictions} == {"pos"}


def test_parts_without_failed_rows_have_no_errors(tmp_path: Path, mapping: Path) -> None:
    """Failed rows that have files of their own are no tasks."""
    folder = write_job_output(tmp_path / "out", [table(0, 3), table(3, 5)], failed_rows="separate")

    code, out, err = run(folder, "--mapping", mapping)

    assert (code, err) == (0, "5 rows written")
    assert [task["data"]["id"] for task in lines(out)] == [f"r{i}" for i in range(5)]


@pytest.mark.parametrize(("limit", "expected"), [(0, ["r3", "r1", "r2", "r4", "r0"]), (2, ["r3", "r1"])])
def test_the_least_sure_first(tmp_path: Path, mapping: Path, limit: int, expected: list[str]) -> None:
    """What a person's label teaches most; a file has its name when it is whole."""
    folder = write_job_output(tmp_path / "out", [table(0, 3), table(3, 5)])
    out = tmp_path / "tasks.json"

    code, _, err = run(folder, "--mapping", mapping, "--order", "confidence", "--limit", limit, "--out", out)

    assert (code, err) == (0, f"{len(expected)} rows written")
    assert [task["data"]["id"] for task in json.loads(out.read_text())] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mood.yaml", "out", "tasks.json"]


def test_the_numbers_of_rows_as_json(tmp_path: Path, mapping: Path) -> None:
    """On stdout, where no rows may be then."""
    folder, out = write_job_output(tmp_path / "out", [table()]), tmp_path / "tasks.json"

    code, report, err = run(folder, "-m", mapping, "--json", "--out", out)
    refused = run(folder, "-m", mapping, "--json")

    assert (code, err) == (0, "")
    assert json.loads(report) == {"out": str(out), "written": 5, "failed": 0, "unfit": 0}
    assert (refused[0], "--out" in refused[2]) == (64, True)


def test_a_limit_in_the_order_of_the_input(tmp_path: Path, mapping: Path) -> None:
    """The rest is not read."""
    folder = write_job_output(tmp_path / "out", [table()])

    assert [task["data"]["id"] for task in lines(run(folder, "-m", mapping, "--limit", 2)[1])] == ["r0", "r1"]


def test_rows_that_failed_are_left_out_and_counted(tmp_path: Path, mapping: Path) -> None:
    """A row without outputs has no prediction; a row whose outputs are wrong neither."""
    codes = pa.array([None, "invalid_request", None, None, None], pa.string())
    messages = pa.array([None, "column 'text' is null", None, None, None], pa.string())
    probabilities = pa.array([[0.1, 0.9], None, [7, 1], [0, 1], [0, 1]], pa.list_(pa.float32(), 2))
    rows = table(PROBS=probabilities, error_code=codes, error_message=messages)
    folder = write_job_output(tmp_path / "out", [rows])

    code, out, err = run(folder, "--mapping", mapping, "--order", "confidence")

    assert code == 0
    assert [task["data"]["id"] for task in lines(out)] == ["r0", "r3", "r4"]
    assert "3 rows written omitted: 1 rows with errors of the job, and 1 that do not fit the mapping" in err
    assert "the first is row 2: invalid_request: column 'text' is null" in err


def test_no_row_fits(tmp_path: Path, mapping: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that is wrong is told at once, and nothing is left."""
    rows = table(PROBS=pa.array([[3, 4]] * 5, pa.list_(pa.float32(), 2)))
    folder = write_job_output(tmp_path / "out", [rows])
    out = tmp_path / "tasks.jsonl"

    out.write_text("of a better mapping")
    code, _, err = run(folder, "--mapping", mapping, "--out", out)
    assert code == 1
    assert "no row could be written; omitted: 0 rows with errors of the job, and 5 that do not fit" in err
    assert out.read_text() == "of a better mapping"
    out.unlink()

    monkeypatch.setattr(annotations, "_MAX_UNFIT", 3)
    code, _, err = run(folder, "--mapping", mapping, "--out", out)
    assert code == 1
    assert "the first 3 rows do not fit the mapping; row 1: output 'PROBS' has the score 3" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mood.yaml", "out"]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([[[1.0, 0.0]], [[0.25, 0.75]]], pa.list_(pa.list_(pa.float64(), 2), 1), [1.0, 0.75]),
        ([[[1.0], [0.0]], [[0.25], [0.75]]], pa.list_(pa.list_(pa.float32())), [1.0, 0.75]),
        ([[1.0, 0.0], [0.25, 0.75]], pa.large_list(pa.float32()), [1.0, 0.75]),
    ],
)
def test_shapes_of_outputs(
    tmp_path: Path, mapping: Path, values: list[Any], kind: pa.DataType, expected: list[float]
) -> None:
    """Lists in lists, of fixed and of any size, after others that were cut off."""
    column = pa.array([*values[:1], *values], kind)[1:]
    folder = write_job_output(tmp_path / "out", [pa.table({"text": ["a", "b"], "P2": column})], columns={"PROBS": "P2"})

    found = lines(run(folder, "--mapping", mapping)[1])

    assert [task["predictions"][0]["score"] for task in found] == expected
    assert found[0]["data"] == {"text": "a"}


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.list_(pa.list_(pa.int64(), 2)), pa.list_(pa.list_(pa.int64()), 1)]
)
def test_slices_of_lists(kind: pa.DataType) -> None:
    """A slice's rows are its own."""
    rows: list[Any] = [[1, 2], [3], None, [4, 5, 6]]
    if kind != pa.list_(pa.int64()):
        rows = [[[1, 2]], [[3, 4]], None, [[5, 6]]]
    whole = pa.array(rows, kind)

    for first in range(4):
        found = [array.tolist() for array in output_rows._arrays(whole.slice(first))]
        flat = [list(np.ravel(row).astype(int)) if row else None for row in rows[first:]]
        assert [a for a, b in zip(found, flat, strict=True) if b] == [b for b in flat if b]


def test_text_and_boxes(tmp_path: Path, mapping: Path) -> None:
    """Texts in a column of texts, boxes in lists of lists, sizes in columns; coco's ids are the key's."""
    mapping.write_text("""
model: m
results:
  - {type: rectanglelabels, from_name: b, to_name: i, boxes: B, scores: S, label: L, labels: [cat, dog],
     size: {width_field: w, height_field: h}}
  - {type: textarea, from_name: t, to_name: i, text: T}
""")
    rows = pa.table(
        {
            "n": [5, 6],
            "w": [100, 200],
            "h": [50, 60],
            "B": pa.array([[[0, 0, 10, 20], [1, 2, 3, 4]], []], pa.list_(pa.list_(pa.float32(), 4))),
            "S": pa.array([[0.5, 0.75], []], pa.list_(pa.float32())),
            "L": pa.array([["cat", "dog"], []], pa.list_(pa.string())),
            "T": ["words", ""],
        }
    )
    folder = write_job_output(tmp_path / "out", [rows], key="n")

    found = lines(run(folder, "-m", mapping)[1])
    assert [[item["type"] for item in task["predictions"][0]["result"]] for task in found] == [
        ["rectanglelabels", "rectanglelabels", "textarea"],
        [],
    ]
    assert found[0]["data"] == {"n": 5, "w": 100, "h": 50}

    code, out, err = run(folder, "-m", mapping, "-f", "coco")
    assert (code, err) == (0, "2 rows written")
    boxes = json.loads(out)
    assert [(box["image_id"], box["category_id"], box["bbox"]) for box in boxes] == [
        (5, 2, [1, 2, 2, 2]),
        (5, 1, [0, 0, 10, 20]),
    ]


def test_fields_that_are_chosen(tmp_path: Path, mapping: Path) -> None:
    """Renamed as the label config calls them; the key need not be among them."""
    folder = write_job_output(tmp_path / "out", [table()], key="id")

    code, out, err = run(folder, "-m", mapping, "--field", "body=text", "-f", "argilla", "--limit", 1)

    assert code == 0
    assert "the tasks have no field 'text', which the mapping names: add --field text, or give --field text=COL" in err
    (record,) = lines(out)
    assert (record["id"], record["fields"], record["metadata"]) == ("r0", {"body": "text 0"}, {})


@pytest.mark.parametrize("state", ["running", "cancelling"])
def test_a_job_that_has_not_ended(tmp_path: Path, mapping: Path, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its id and by its folder."""
    folder = tmp_path / "out"
    server = Server(reply(200, **shown(state, output_url=f"file://{folder}")))
    monkeypatch.setattr(client, "GatewayClient", lambda url: server.client(max_retries=0))
    write_job_output(folder, [table()])
    (folder / "_manifest.json").unlink()

    code, _, err = run("j1", "--mapping", mapping)
    assert (code, err) == (1, f"Error: job 'j1' is {state}: wait for its end with `qinfer jobs wait j1`")
    code, _, err = run(folder, "--mapping", mapping)
    assert code == 1
    assert "has not ended: wait for it" in err


def test_a_job_by_its_id(tmp_path: Path, mapping: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway knows where its output is."""
    folder = write_job_output(tmp_path / "out", [table()])
    server = Server(reply(200, **shown("completed", output_url=f"file://{folder}")))

    def connected(url: str) -> Client:
        return server.client(max_retries=0)

    monkeypatch.setattr(client, "GatewayClient", connected)

    code, out, _ = run("j1", "--mapping", mapping)

    assert (code, len(lines(out))) == (0, 5)


def test_an_output_that_is_not_complete(tmp_path: Path, mapping: Path) -> None:
    """It is read when that is asked for."""
    folder = write_job_output(tmp_path / "out", [table()], partial=True)

    code, _, err = run(folder, "--mapping", mapping)
    assert code == 1
    assert "is incomplete; resume the job, or give --partial" in err
    assert len(lines(run(folder, "--mapping", mapping, "--partial")[1])) == 5


def test_an_empty_output(tmp_path: Path, mapping: Path) -> None:
    """A job without rows makes an empty file, and a valid one."""
    folder = write_job_output(tmp_path / "out", [])

    assert run(folder, "--mapping", mapping)[:2] == (0, "")
    out = tmp_path / "o.json"
    assert run(folder, "--mapping", mapping, "--out", out)[0] == 0
    assert json.loads(out.read_text()) == []


Change = Callable[[Path, Path], list[object]]


def _without_part(folder: Path, mapping: Path) -> list[object]:
    (folder / "part-00000.parquet").unlink()
    return []


def _other_model(folder: Path, mapping: Path) -> list[object]:
    mapping.write_text(MAPPING.replace("model: m", "model: other"))
    return []


def _other_output(folder: Path, mapping: Path) -> list[object]:
    mapping.write_text(MAPPING.replace("PROBS", "LOGITS"))
    return []


def _label_config(folder: Path, mapping: Path) -> list[object]:
    path = mapping.with_name("config.xml")
    path.write_text(CONFIG.format("positive"))
    return ["--label-config", path]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda *_: ["--format", "coco"], 64, "coco has boxes only"),
        (lambda *_: ["--field", "=x"], 64, "--field '=x' has no name"),
        (lambda *_: ["--field", "x"], 64, "no column 'x'; it has id, text, PROBS"),
        (lambda *_: ["--id", "x"], 64, "no column 'x'"),
        (lambda *_: ["--out", "."], 64, "--out '.' is a folder; name a file"),
        (lambda *_: ["--out", ""], 64, "is a folder"),
        (lambda *_: ["--out", "new/"], 64, "is a folder"),
        (lambda *_: ["--out", "s3://bucket/tasks.json"], 64, "is not a file of this machine"),
        (lambda *_: ["--out", "/nowhere/at/all"], 1, "/nowhere/at/all can't be written: No such file"),
        (lambda *_: ["--label-config", "/nowhere"], 64, "--label-config /nowhere can't be read"),
        (_label_config, 64, "control 'mood' has no label 'pos'; it has 'neg', 'positive'"),
        (_without_part, 1, "is incomplete, a file is missing"),
        (_other_model, 64, "is for model 'other' version any; the job was scored by 'm' version 1"),
        (_other_output, 64, "no column 'LOGITS'"),
    ],
)
def test_what_does_not_go(tmp_path: Path, mapping: Path, change: Change, code: int, said: str) -> None:
    """The message says what, and nothing is written."""
    folder = Path(write_job_output(tmp_path / "out", [table()]))
    more = change(folder, mapping)

    found, out, err = run(folder, "--mapping", mapping, *more)

    assert (found, out) == (code, "")
    assert said in err


def test_a_folder_without_an_output(tmp_path: Path, mapping: Path) -> None:
    """Whatever it is, it is no job's."""
    code, _, err = run(tmp_path, "--mapping", mapping)

    assert code == 1
    assert "there is no output of a completed job" in err
