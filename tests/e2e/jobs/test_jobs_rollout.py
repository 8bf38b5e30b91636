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

from qinfer.client import Client
from qinfer.client.job_flows import JobOptions
from qinfer.client.jobs import Job
from qinfer.errors import QinferError
from qinfer.testing import wait_until
from tests.e2e.conftest import Stack, clean_environment, running
from tests.support import models
from tests.support.jobs.job_proof import MODEL, Place, Verdict, compare, parquet, rows_of, write_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROWS = 6_000
WITHIN_S = 240.0


class Rollout:
    """A server, its model repository, and two jobs' worth of rows."""

    def __init__(self, stack: Stack, client: Client, repository: Place, place: Place) -> None:
        self.client = client
        self._stack, self._repository, self._place = stack, repository, place
        self._folder = Path(place.url.removeprefix("file://"))
        self.inputs = rows_of(0, ROWS, ROWS, nulls=False)
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
        config = (self._folder / "models" / MODEL / "config.pbtxt").read_text()
        self._repository.put(f"{MODEL}/config.pbtxt", f"{config}version_policy {{ {policy} }}\n".encode())

    def sync(self) -> None:
        command = ["models", "sync", "-m", str(self._folder / "models"), "--data-dir", str(self._folder / "data")]
        full = [sys.executable, "-m", "qinfer.cli.main", *command]
        subprocess.run(full, env=clean_environment(), check=True, capture_output=True)

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


def start(folder: Path, opened: ExitStack) -> Rollout:
    """Starts a server whose model repository is a directory."""
    write_model(folder / "models")
    repository = Place(f"file://{folder}/models")
    settings = {"QINFER_STORES__ALLOW": f'["file://{folder}"]', "QINFER_BULK__SWEEP_EVERY_S": "1"}
    stack = opened.enter_context(running(folder / "models", folder, **settings))
    client = opened.enter_context(Client(f"http://{stack.address}"))
    return Rollout(stack, client, repository, Place(f"file://{folder}"))


def test_jobs_keep_their_version_through_a_rollout_and_back(tmp_path: Path, opened: ExitStack) -> None:
    """Also where the workers are killed after either; callers who name no version get that of the policy."""
    rollout = start(tmp_path, opened)
    before = rollout.begun(rollout.submit("before"))

    rollout.add_version(4)
    rollout.sync()
    rollout.answers(4)
    assert not before.status().has_ended
    rollout.kill_workers()
    rollout.answers(4)
    rollout.answers(2, version=1)
    during = rollout.begun(rollout.submit("during"))
    rollout.set_policy("specific { versions: 1 }")
    rollout.sync()
    rollout.answers(2)
    assert not during.status().has_ended
    rollout.kill_workers()
    rollout.answers(2)
    rollout.answers(4, version=2)

    exact = Verdict(ROWS, ROWS, 0)
    assert rollout.verdict(before, "before", 2) == exact, "missing=0 duplicates=0, of version 1"
    assert rollout.verdict(during, "during", 4) == exact, "missing=0 duplicates=0, of version 2"
