"""`qinfer analyze` with several models, streams and sequences on a private server, and beside callers on a live one."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner, Result

from qinfer import Client
from qinfer.cli.analyze.journal import FILE
from qinfer.cli.client import GatewayClient
from qinfer.cli.local.machine import read_run
from qinfer.cli.main import app
from qinfer.testing import wait_until
from tests.integration.cli.test_up import Up
from tests.support import models, python_models
from tests.support.ensembles import chain, scale

QINFER = [sys.executable, "-m", "qinfer.cli.main"]
SMALL = ["--instances", "1", "--max-batch-size", "4", "--delay-ms", "0", "--threads", "1"]
QUICK = ["--mode", "brute", "--window-s", "0.1"]
STREAMER = python_models.execute(
    """
for request in requests:
    sender = request.get_response_sender()
    for _ in range(3):
        sender.send(reply(x(request)))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
return None
""".strip()
)

pytestmark = pytest.mark.timeout(300)


def analyzed(repository: Path, output: Path, *arguments: str, small: bool = True) -> Any:
    """Runs an analysis; returns its JSON, and its exit code as `code`."""
    command = [*QINFER, "analyze", *arguments, "--model-repository", str(repository), "--output", str(output), "--json"]
    done = subprocess.run(
        [*command, *QUICK, *(SMALL if small else [])], check=False, capture_output=True, text=True, timeout=250
    )
    assert done.stdout, done.stderr
    return {**json.loads(done.stdout), "code": done.returncode, "stderr": done.stderr}


@pytest.mark.long
def test_a_mix_tunes_each_model_and_the_steps_of_ensembles(tmp_path: Path) -> None:
    """Each has a report; all measurements are in one file; the answers of another batch size agree."""
    repository, output = tmp_path / "models", tmp_path / "found"
    scale(repository, "twice", 2.0)
    scale(repository, "thrice", 3.0)
    scale(repository, "four", 4.0)
    chain(repository, "chained", "twice", "thrice")

    found = analyzed(repository, output, "chained=2", "four=1", "--concurrency", "2", "--accuracy", "0.99")

    assert found["code"] == 0, found["stderr"]
    assert [one["model"] for one in found["models"]] == ["twice", "thrice", "four"]
    assert all(one["requests_per_s"] > 0 and one["accuracy"] == 1.0 for one in found["models"])
    assert len({tuple(one["gain"].values()) for one in found["models"]}) == 1
    assert len((output / FILE).read_text().splitlines()) > sum(one["measurements"] for one in found["models"])
    assert (output / "measurements.parquet").exists()
    for name in ("twice", "thrice", "four"):
        assert f'name: "{name}"' in (output / name / "config.pbtxt").read_text()
        assert (output / name / "report.html").exists()


@pytest.mark.long
def test_streams_and_sequences_are_loads(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    python_models.write_model(
        repository, STREAMER, "flow", dims=1, max_batch_size=0, scheduling="", more=python_models.DECOUPLED
    )
    models.accumulator(repository, "sums")

    streams = analyzed(repository, tmp_path / "a", "flow", "--concurrency", "2", "--instances", "1", small=False)
    sequences = analyzed(
        repository, tmp_path / "b", "sums", "--concurrency", "2", "--steps-per-sequence", "4", "--threads", "1"
    )

    assert streams["code"] == sequences["code"] == 0, streams["stderr"] + sequences["stderr"]
    assert streams["first_response_p99_ms"] > 0
    assert streams["between_responses_p99_ms"] > 0
    assert sequences["requests_per_s"] > 0
    refused = analyzed(repository, tmp_path / "c", "sums", "--accuracy", "0.9")
    assert "answers by sequences, which are not compared" in refused["error"]["message"]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Up]:
    scale(tmp_path / "models", "twice", 2.0)
    up = Up(
        tmp_path / "models", tmp_path / "data", "--model-control-mode", "explicit", "--load-model", "twice", env={}
    ).wait_ready()
    yield up
    assert up.stop() == 0, up.log.read_text()


class Callers:
    """Asks a model until stopped."""

    def __init__(self, url: str) -> None:
        self.answers = 0
        self.errors: list[Exception] = []
        self._stopping = Event()
        self._thread = Thread(target=self._ask_on, args=(url,))
        self._thread.start()

    def __enter__(self) -> "Callers":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _ask_on(self, url: str) -> None:
        with Client(url, max_retries=0) as client:
            while not self._stopping.wait(0.01):
                try:
                    answer = client.infer("twice", {"x": np.ones((1, 2), np.float32)})
                    assert answer["y"].tolist() == [[2.0, 2.0]]
                    self.answers += 1
                except Exception as error:  # noqa: BLE001  all are reported
                    self.errors.append(error)


def in_place(tmp_path: Path, model: str = "twice") -> Result:
    """Analyses a live model in this process."""
    run = read_run(tmp_path / "data")
    assert run is not None
    command = ["analyze", model, "--in-place", "--url", run.url, "--redis", run.redis_url, "--concurrency", "1"]
    command += ["--model-repository", str(tmp_path / "models"), "--output", str(tmp_path / "found"), "--json"]
    with GatewayClient(run.url) as client:
        before = client.index(ready=True)
        result = CliRunner().invoke(app, [*command, *QUICK, *SMALL])
        assert client.index(ready=True) == before
    children = psutil.Process(os.getpid()).children(recursive=True)
    assert not [one for one in children if "qinfer_workers.inference" in one.cmdline() and one.ppid() == os.getpid()]
    return result


@pytest.mark.long
def test_in_place_callers_are_answered_and_nothing_is_left(
    tmp_path: Path, live: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the guard, because this machine may be busy."""
    monkeypatch.setattr("qinfer.cli.analyze.guard.TRIPS_AT", math.inf)

    with Callers(live.url) as callers:
        found = json.loads(in_place(tmp_path).stdout)

    assert (found["model"], callers.errors) == ("twice", [])
    assert callers.answers > 100
    assert "files_of" not in found["config"]
    assert 'name: "twice"' in found["config"]


@pytest.mark.long
def test_in_place_an_ensemble_is_tuned_by_copies_of_its_steps(
    tmp_path: Path, live: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies execute the load; nothing of them is left, neither at the gateway nor in what is written."""
    monkeypatch.setattr("qinfer.cli.analyze.guard.TRIPS_AT", math.inf)
    scale(tmp_path / "models", "thrice", 3.0)
    chain(tmp_path / "models", "chained", "twice", "thrice")
    with GatewayClient(live.url) as client:
        client.load("chained")
        with Callers(live.url) as callers:
            result = in_place(tmp_path, "chained")

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["models"]
    assert [one["model"] for one in found] == ["twice", "thrice"]
    assert all("~" not in one["config"] and "files_of" not in one["config"] for one in found)
    assert callers.errors == []
    lines = [json.loads(line) for line in (tmp_path / "found" / FILE).read_text().splitlines()[1:]]
    assert {line["model"] for line in lines} == {"~twice", "~thrice"}
    assert all(line["figures"][1] > 0 for line in lines), "a mean batch of the copy"


@pytest.mark.long
def test_in_place_the_guard_stops_the_search(tmp_path: Path, live: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinfer.cli.analyze.guard.TRIPS_AT", 0.5)

    result = in_place(tmp_path)

    assert result.exit_code == 1
    assert "stopped, because callers would notice" in json.loads(result.stdout)["error"]["message"]


@pytest.mark.long
def test_the_winner_is_tried_as_a_canary_under_the_models_name(tmp_path: Path, live: Up) -> None:
    """The model has one instance that waits half a second, so a better configuration is found."""
    config = tmp_path / "models" / "twice" / "config.pbtxt"
    slow = "dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 200000 }"
    config.write_text(config.read_text().replace("dynamic_batching { }", slow))
    run = read_run(tmp_path / "data")
    assert run is not None
    with GatewayClient(run.url) as client:
        client.load("twice")
        arguments = ["twice", "--concurrency", "1", "--apply", "canary", "--url", run.url]

        found = analyzed(tmp_path / "models", tmp_path / "found", *arguments)

        assert found["code"] == 0, found["stderr"]
        assert found["gain"]["mean"] > 1
        with Callers(run.url) as callers:
            wait_until(lambda: client.endpoint("twice").get("canary") is not None, 20.0, "the begin of the trial")
            wait_until(lambda: callers.answers > 20, 20.0, "answers through the endpoint")
        state = client.endpoint("twice")
    assert callers.errors == []
    assert [one["target"] for one in state["targets"]] == ["twice:1", "twice-tuned:1"]
    assert state["canary"]["state"] == "running"
    assert "qinfer endpoints show twice" in found["stderr"]
