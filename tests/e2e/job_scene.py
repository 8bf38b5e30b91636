"""A running server for tests of bulk jobs over files in a directory."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from qinfer.client import Client, Job
from qinfer.client.job_flows import JobStatus
from qinfer.errors import InvalidRequest
from tests.e2e.conftest import Stack, running
from tests.support.jobs.job_proof import MODEL, Place, compare, write_model

WITHIN_S = 100.0


class Server:
    """A server whose only model is `job_proof`'s, and that may use a directory."""

    def __init__(self, stack: Stack, client: Client, folder: Path) -> None:
        self.stack = stack
        self.client = client
        self._folder = folder
        self._numbers = count()

    def scene(self) -> "Scene":
        """Returns a scene with a folder of its own."""
        return Scene(self.stack, self.client, Place(f"file://{self._folder}/{next(self._numbers)}"))


@contextmanager
def serving(folder: Path, workers: int = 1, /, **settings: str) -> Iterator[Server]:
    """Runs a server, with the models that are in the folder already, too."""
    write_model(folder / "models")
    with ExitStack() as opened:
        settings["QINFER_STORES__ALLOW"] = f'["file://{folder}"]'
        stack = opened.enter_context(running(folder / "models", folder, workers, **settings))
        yield Server(stack, opened.enter_context(Client(f"http://{stack.address}")), folder)


class Scene:
    """A running server that may use a directory.

    Attributes:
        stack: The server.
        place: A folder of this test's own.
        client: A client of it.
    """

    def __init__(self, stack: Stack, client: Client, place: Place) -> None:
        self.stack = stack
        self.place = place
        self.client = client

    def submit(self, pattern: str = "*.parquet", model: str = MODEL, out: str = "out", **options: Any) -> Job:
        """Has the files of `in` scored."""
        plain = {"key": "id", "error_threshold": -1, **options}
        return self.client.submit_job(model, f"{self.place.url}/in/{pattern}", f"{self.place.url}/{out}", **plain)

    def done(self, pattern: str = "*.parquet", **options: Any) -> JobStatus:
        """Does the same, and waits for the end."""
        return self.submit(pattern, **options).wait(timeout_s=WITHIN_S)

    def refusal(self, pattern: str = "*.parquet", **options: Any) -> str:
        """Returns why a job is refused when it is created, its folder left out."""
        with pytest.raises(InvalidRequest) as caught:
            self.submit(pattern, **options)
        return self.short(caught.value.message)

    def failure(self, pattern: str = "*.parquet", **options: Any) -> str:
        """Returns why a job fails, its folder left out."""
        status = self.done(pattern, **options)
        assert status.state == "failed", status
        assert "_SUCCESS" not in (self.place.names("out") if self.place.files.exists(self.place.path("out")) else [])
        return self.short(status.error)

    def short(self, text: str) -> str:
        return text.replace(f"{self.place.url}/in/", "")

    def check(self, status: JobStatus, *tables: pa.Table) -> None:
        """Checks that the output has each row of some tables once, in order."""
        assert status.state == "completed", status.error
        inputs, output = pa.concat_tables(tables), self.place.table("out")
        verdict = compare(inputs, output)
        assert verdict.is_exact, verdict
        assert output["id"].to_pylist() == inputs["id"].to_pylist()

    @contextmanager
    def without_workers(self) -> Iterator[None]:
        """Stops the inference worker; what is submitted is planned meanwhile, and waits."""
        found = psutil.Process(self.stack.pid).children(recursive=True)
        children = [child for child in found if child.status() != psutil.STATUS_ZOMBIE]
        workers = [child.pid for child in children if "qinfer_workers.inference" in child.cmdline()]
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
