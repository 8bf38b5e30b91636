"""Jobs over an ensemble whose step is rolled out, and whose workers are killed, in the middle: each row once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest

from qinfer.client import Client, Job
from qinfer.errors import QinferError
from qinfer.testing import wait_until
from tests.e2e.conftest import Stack, clean_environment, running
from tests.support.ensembles import chain, scale
from tests.support.jobs.job_proof import Place, Verdict, compare, parquet, rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROWS = 6_000
WITHIN_S = 240.0


class Rollout:
    """A server with the ensemble `line`: `twice`, then `same`; and rows for it."""

    def __init__(self, stack: Stack, client: Client, folder: Path) -> None:
        self.client = client
        self._stack, self._folder = stack, folder
        self._place = Place(f"file://{folder}")
        self.inputs = rows_of(0, ROWS, ROWS, nulls=False)
        self._place.put("in/rows.parquet", parquet(self.inputs))

    def submit(self, out: str) -> Job:
        urls = (f"{self._place.url}/in/*.parquet", f"{self._place.url}/{out}")
        return self.client.submit_job("line", *urls, key="id", rows_per_part=10, max_parallel=1)

    def begun(self, job: Job) -> Job:
        wait_until(lambda: job.status().rows_done > 0, WITHIN_S, "the first rows")
        return job

    def sync(self) -> None:
        command = ["models", "sync", "-m", str(self._folder / "models"), "--data-dir", str(self._folder / "data")]
        full = [sys.executable, "-m", "qinfer.cli.main", *command]
        subprocess.run(full, env=clean_environment(), check=True, capture_output=True)

    def answers(self, factor: float) -> None:
        """Waits until a caller gets `factor · x`."""
        x = np.ones((1, 2), np.float32)

        def is_so() -> bool:
            try:
                return bool(self.client.infer("line", {"x": x})["y"][0, 0] == factor)
            except QinferError:
                return False

        wait_until(is_so, WITHIN_S, f"{factor} · x")

    def kill_workers(self) -> None:
        for process in psutil.Process(self._stack.pid).children(recursive=True):
            if "qinfer_workers.inference" in process.cmdline():
                os.kill(process.pid, signal.SIGKILL)

    def verdict(self, job: Job, out: str, factor: int) -> Verdict:
        """Compares a job's output with the rows that `factor · x` gives."""
        status = job.wait(timeout_s=WITHIN_S)
        assert status.state == "completed", status.error
        output = self._place.table(out)
        halves = [[value * 2 / factor for value in row] for row in output["y"].to_pylist()]
        column = pa.array(halves, output.schema.field("y").type)
        return compare(self.inputs, output.set_column(output.schema.get_field_index("y"), "y", column))


def test_a_job_keeps_the_versions_of_all_steps_through_rollouts_and_deaths(tmp_path: Path) -> None:
    """One that is planned after the rollout of a step has the new version; both survive killed workers."""
    repository = tmp_path / "models"
    scale(repository, "twice", 2.0)
    scale(repository, "same", 1.0)
    chain(repository, "line", "twice", "same")
    settings = {"QINFER_STORES__ALLOW": f'["file://{tmp_path}"]', "QINFER_BULK__SWEEP_EVERY_S": "1"}
    with (
        running(repository, tmp_path, 2, **settings) as stack,
        Client(f"http://{stack.address}") as client,
    ):
        rollout = Rollout(stack, client, tmp_path)
        before = rollout.begun(rollout.submit("before"))

        scale(repository, "twice", 4.0, version=2)
        rollout.sync()
        rollout.answers(4)
        assert not before.status().has_ended
        rollout.kill_workers()
        rollout.answers(4)
        after = rollout.begun(rollout.submit("after"))
        rollout.kill_workers()

        exact = Verdict(ROWS, ROWS, 0)
        assert rollout.verdict(before, "before", 2) == exact, "missing=0 duplicates=0, of version 1"
        assert rollout.verdict(after, "after", 4) == exact, "missing=0 duplicates=0, of version 2"
