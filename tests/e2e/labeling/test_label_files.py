"""The tutorial's program on this repository's own files: killed in the middle, started again, and then complete."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import magika
import pytest

import qinfer
from examples.label_files import label, model
from examples.label_files.label import SHORTEST, paths_of, read
from qinfer.testing import wait_until
from tests.e2e.conftest import Stack, clean_environment, running

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "qinfer"
ANOTHER = "another"
RUN_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    model.build(folder)
    models, mapping = folder / "models", folder / "filetypes.yaml"
    shutil.copytree(models / model.NAME, models / ANOTHER)  # for tests whose executions are not to be counted
    config = models / ANOTHER / "config.pbtxt"
    config.write_text(config.read_text().replace(f'"{model.NAME}"', f'"{ANOTHER}"'))
    (folder / f"{ANOTHER}.yaml").write_text(mapping.read_text().replace(f"model: {model.NAME}", f"model: {ANOTHER}"))
    return folder


@pytest.fixture(scope="module")
def stack(made: Path) -> Iterator[Stack]:
    with running(made / "models", made) as stack:
        yield stack


def start(made: Path, stack: Stack, folder: Path, out: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "examples.label_files.label", str(folder), "--out", str(out)]
    command += ["--mapping", str(made / "filetypes.yaml"), "--url", f"http://{stack.address}", *options]
    return subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stderr=subprocess.PIPE, text=True)


def run(made: Path, stack: Stack, folder: Path, out: Path, *options: str) -> str:
    """Runs the program to its end, which is a good one; returns what it says."""
    process = start(made, stack, folder, out, *options)
    _, said = process.communicate(timeout=RUN_WITHIN_S)
    assert process.returncode == 0, said
    return said


def scored(stack: Stack) -> int:
    """Returns how many files the model has been executed for."""
    reply = httpx.get(f"http://{stack.address}/v2/models/{model.NAME}/stats", timeout=10, trust_env=False).json()
    return sum(int(each["inference_count"]) for each in reply["model_stats"])


def contents_of(folder: Path) -> dict[str, bytes]:
    """Returns the files that are labeled: name → content."""
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in paths_of(folder)}
    return {name: content for name, content in contents.items() if len(content) >= SHORTEST}


@pytest.mark.long
def test_it_goes_on_where_it_was_killed(made: Path, stack: Stack) -> None:
    """Nothing is scored twice, the file is complete and in order, and says of each file what magika itself says."""
    out = made / "labels.jsonl"
    contents = contents_of(FOLDER)
    distinct = {read(FOLDER / name, name).features.tobytes() for name in contents}  # type: ignore[union-attr]

    first = start(made, stack, FOLDER, out, "--concurrency", "2")
    assert first.stderr is not None
    assert next(iter(first.stderr)).startswith("100 files labeled")
    first.kill()
    first.communicate()
    before = scored(stack)
    assert not out.exists()
    said = run(made, stack, FOLDER, out)
    wait_until(lambda: scored(stack) >= len(distinct), 10.0, "the statistics")

    assert before < len(distinct)
    assert scored(stack) == len(distinct)
    assert f"{len(contents)} files labeled, 0 failed" in said
    tasks = [json.loads(line) for line in out.read_text().splitlines()]
    assert [task["data"]["path"] for task in tasks] == list(contents)
    check(tasks, contents)

    assert run(made, stack, FOLDER, out, "--concurrency", "64").endswith(f"; see {out}\n")
    wait_until(lambda: scored(stack) == len(distinct), 10.0, "no further executions")
    assert [json.loads(line) for line in out.read_text().splitlines()] == tasks


def check(tasks: list[dict[str, Any]], contents: dict[str, bytes]) -> None:
    library = magika.Magika(prediction_mode=magika.PredictionMode.BEST_GUESS)
    for task in tasks:
        (prediction,) = task["predictions"]
        expected = library.identify_bytes(contents[task["data"]["path"]]).prediction
        assert prediction["result"][0]["value"]["choices"] == [str(expected.dl.label)], task["data"]["path"]
        assert prediction["score"] == pytest.approx(expected.score, abs=1e-3)  # batches differ
        assert prediction["model_version"] == "magika:1"


def test_files_of_all_kinds(made: Path, stack: Stack, tmp_path: Path) -> None:
    """Short and unreadable ones are skipped, links and hidden ones not looked at; what is no text is not shown."""
    folder = tmp_path / "files"
    (folder / "deeper").mkdir(parents=True)
    (folder / ".hidden").write_text("hidden " * 10)
    (folder / "empty").write_text("")
    (folder / "link").symlink_to(ROOT / "README.md")
    (folder / "deeper" / "page.html").write_text("<!DOCTYPE html><html><body><h1>Title</h1></body></html>")
    (folder / "same.html").write_text("<!DOCTYPE html><html><body><h1>Title</h1></body></html>")
    (folder / "zip").write_bytes(b"PK\x03\x04\x14\x00\x00\x00\x08\x00" + bytes(range(256)) * 20)

    said = run(made, stack, folder, tmp_path / "labels.json", "--mapping", str(made / f"{ANOTHER}.yaml"))

    tasks = json.loads((tmp_path / "labels.json").read_text())
    assert [task["data"]["path"] for task in tasks] == ["same.html", "zip", "deeper/page.html"]
    assert tasks[0]["predictions"][0]["result"][0]["value"] == {"choices": ["html"]}
    assert tasks[1]["data"]["text"] == "(this is no text)"
    assert re.search(r"3 files labeled, 0 failed, 1 skipped", said)


def test_a_server_that_is_not_there(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stops and says so, instead of failing on file after file; there is no output then."""
    out = tmp_path / "labels.json"
    options = ["--mapping", str(made / "filetypes.yaml"), "--out", str(out), "--url", "http://127.0.0.1:1"]
    monkeypatch.setattr(sys, "argv", ["label", str(FOLDER), *options])
    monkeypatch.setattr(qinfer, "AsyncClient", partial(qinfer.AsyncClient, max_retries=0))

    assert label.main() == 1

    assert "start it again to go on" in capsys.readouterr().err
    assert not out.exists()
