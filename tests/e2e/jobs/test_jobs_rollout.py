"""Models are rolled out and back in the middle of jobs, which never notice: each row once, of the version pinned."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

import numpy as np
import psutil
import pyarrow as pa
import pytest
from onnx import helper

from qinfer.client import Client, Job
from qinfer.client.job_flows import JobOptions
from qinfer.errors import QinferError
from qinfer.testing import wait_until
from tests.e2e.conftest import Stack, clean_environment, running
from tests.support import models
from tests.support.jobs.job_proof import MODEL, Place, Verdict, compare, parquet, rows_of, write_model
from tests.support.servers import object_stores

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROWS = 6_000
FEW_ROWS = 1_500
WITHIN_S = 240.0


class Rollout:
    """A server, its model repository, and two jobs' worth of rows."""

    def __init__(self, stack: Stack, client: Client, repository: Place, place: Place, rows: int) -> None:
        self.client = client
        self._stack, self._repository, self._place = stack, repository, place
        self._folder = Path(place.url.removeprefix("file://"))
        self._config = (self._folder / "models" / MODEL / "config.pbtxt").read_text()
        self.inputs = rows_of(0, rows, rows, nulls=False)
        place.put("in/rows.parquet", parquet(self.inputs))

    def submit(self, out: str, **more: Unpack[JobOptions]) -> Job:
        urls = (f"{self._place.url}/in/*.parquet", f"{self._place.url}/{out}")
        options: JobOptions = {"key": "id", "rows_per_part": 10, "max_parallel": 1, **more}
        return self.client.submit_job(MODEL, *urls, **options)

    def begun(self, job: Job) -> Job:
        wait_until(lambda: job.status().rows_done > 0, WITHIN_S, "the first rows")
        return job

    def add_version(self, factor: int) -> None:
        """Writes version 2, which answers `y = factor · x`."""
        nodes = [
            helper.make_node("Constant", [], ["k"], value_float=float(factor)),
            helper.make_node("Mul", ["x", "k"], ["y"]),
        ]
        ports = ([("x", "FP32", (2,))], [("y", "FP32", (2,))])
        version = models.write(self._folder / "next", MODEL, nodes, *ports, max_batch_size=64, version=2)
        self._repository.put(f"{MODEL}/2/model.onnx", (version / "model.onnx").read_bytes())

    def set_policy(self, policy: str) -> None:
        self._repository.put(f"{MODEL}/config.pbtxt", f"{self._config}version_policy {{ {policy} }}\n".encode())

    def sync(self, environment: dict[str, str]) -> None:
        command = ["models", "sync", "-m", self._repository.url.removeprefix("file://")]
        self.cli(*command, "--data-dir", str(self._folder / "data"), environment=environment)

    def cli(self, *command: str, environment: dict[str, str] | None = None) -> str:
        env = clean_environment() | (environment or {})
        full = [sys.executable, "-m", "qinfer.cli.main", *command]
        return subprocess.run(full, env=env, check=True, capture_output=True, text=True).stdout

    def answers(self, factor: float, version: int = 0) -> None:
        """Waits until a caller, who may name a version, gets `factor · x`."""
        x = np.ones((1, 2), np.float32)

        def is_so() -> bool:
            try:
                return bool(self.client.infer(MODEL, {"x": x}, version=version)["y"][0, 0] == factor)
            except QinferError:
                return False

        wait_until(is_so, WITHIN_S, f"version {version} answers {factor}")

    def kill_workers(self) -> None:
        for process in psutil.Process(self._stack.pid).children(recursive=True):
            if "qinfer_workers.inference" in process.cmdline():
                os.kill(process.pid, signal.SIGKILL)

    def verdict(self, job: Job, out: str, factor: int) -> Verdict:
        """Compares a job's output with the rows that a version answers with `factor · x`."""
        status = job.wait(timeout_s=WITHIN_S)
        assert status.state == "completed", status.error
        output = self._place.table(out)
        halves = [[value * 2 / factor for value in row] for row in output["y"].to_pylist()]
        column = pa.array(halves, output.schema.field("y").type)
        return compare(self.inputs, output.set_column(output.schema.get_field_index("y"), "y", column))


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(
    kind: str, folder: Path, opened: ExitStack, policy: str = "", rows: int = ROWS
) -> tuple[Rollout, dict[str, str]]:
    """Starts a server whose model repository is a directory or a bucket; returns also how that is found."""
    environment: dict[str, str] = {}
    write_model(folder / "models")
    repository = Place(f"file://{folder}/models")
    if kind == "s3":
        store = opened.enter_context(object_stores.s3())
        environment = {**store.environment, "QINFER_REPOSITORY__CACHE_DIR": str(folder / "cache")}
        repository = Place(store.upload(folder / "models"), dict(store.options))
    settings = {"QINFER_STORES__ALLOW": f'["file://{folder}"]', "QINFER_BULK__SWEEP_EVERY_S": "1", **environment}
    url = repository.url.removeprefix("file://")
    stack = opened.enter_context(running(url, folder, **settings))
    client = opened.enter_context(Client(f"http://{stack.address}"))
    rollout = Rollout(stack, client, repository, Place(f"file://{folder}"), rows)
    if policy:
        rollout.set_policy(policy)
        rollout.sync(environment)
    return rollout, environment


@pytest.mark.parametrize("policy", ["", "all { }"], ids=["latest", "all"])
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_jobs_keep_their_version_through_a_rollout_and_back(
    kind: str, policy: str, tmp_path: Path, opened: ExitStack
) -> None:
    """Also where the workers are killed after either; callers who name no version get that of the policy."""
    rollout, environment = start(kind, tmp_path, opened, policy)
    before = rollout.begun(rollout.submit("before"))

    rollout.add_version(4)
    rollout.sync(environment)
    rollout.answers(4)
    assert not before.status().has_ended
    rollout.kill_workers()
    rollout.answers(4)
    rollout.answers(2, version=1)
    during = rollout.begun(rollout.submit("during"))
    rollout.set_policy("specific { versions: 1 }")
    rollout.sync(environment)
    rollout.answers(2)
    assert not during.status().has_ended
    rollout.kill_workers()
    rollout.answers(2)
    rollout.answers(4, version=2)

    exact = Verdict(ROWS, ROWS, 0)
    assert rollout.verdict(before, "before", 2) == exact, "missing=0 duplicates=0, of version 1"
    assert rollout.verdict(during, "during", 4) == exact, "missing=0 duplicates=0, of version 2"


def test_a_job_whose_version_is_gone_says_so_and_waits_or_fails(tmp_path: Path, opened: ExitStack) -> None:
    """Until it is back; a job that failed is resumed then, though there is a newer version."""
    rollout, environment = start("file", tmp_path, opened, rows=FEW_ROWS)
    waits = rollout.begun(rollout.submit("waits"))
    fails = rollout.submit("fails", on_version_change="fail")
    wait_until(lambda: fails.status().shards > 0, WITHIN_S, "the plan of the second job")
    model = tmp_path / "models" / MODEL / "1" / "model.onnx"
    content = model.read_bytes()

    rollout.add_version(4)
    model.write_bytes((model.parents[1] / "2" / "model.onnx").read_bytes())
    rollout.sync(environment)
    rollout.kill_workers()
    failed = fails.wait(timeout_s=WITHIN_S)
    wait_until(lambda: bool(waits.status().fields["waiting"]), WITHIN_S, "why the job waits")
    why = waits.status().fields["waiting"]
    data_dir = ("--data-dir", str(tmp_path / "data"))
    shown = [rollout.cli("status", *data_dir, "--json"), rollout.cli("models", "list", *data_dir, "--json")]
    model.write_bytes(content)
    resumed = fails.resume()

    assert failed.state == "failed"
    assert failed.error == why
    assert why.startswith(f"version 1 of model '{MODEL}' can't be kept: its files or configuration")
    assert all(why in text for text in shown)
    assert any(line.text == f"waits: {why}" for line in waits.log())
    assert resumed.state == "planning"
    for job, out in ((waits, "waits"), (fails, "fails")):
        assert rollout.verdict(job, out, 2) == Verdict(FEW_ROWS, FEW_ROWS, 0), "missing=0 duplicates=0"
