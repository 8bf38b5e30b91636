"""Gateways and workers as processes on a Redis, of this checkout or of another one, and callers who count refusals."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from qinfer.testing import wait_until
from tests.e2e.async_load import body
from tests.e2e.conftest import clean_environment
from tests.support.servers.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0
_NO_MORE: Mapping[str, str] = {}
_PATHS = ("", "api", "workers")  # of the packages, within a checkout


class Installation:
    """Programs that share a Redis and a model repository; each drains and ends with 0 at the end of its block.

    Args:
        directory: For the log.
        models: The model repository.
        url: Of Redis.
        settings: More settings of all programs.
    """

    def __init__(self, directory: Path, models: Path, url: str, **settings: str) -> None:
        self._log = directory / "log"
        self._env = clean_environment() | {"QINFER_REDIS__URL": url, "QINFER_REPOSITORY__PATH": str(models)} | settings

    @contextmanager
    def gateway(self, checkout: Path = ROOT, more: Mapping[str, str] = _NO_MORE) -> Iterator[str]:
        """Runs a gateway, with more settings; yields its URL once it answers."""
        port = free_port()
        ports = {"QINFER_HTTP__PORT": str(port), "QINFER_GRPC__PORT": "0", "QINFER_METRICS__PORT": "0"}
        url = f"http://127.0.0.1:{port}"
        with self._program("qinfer_api", checkout, ports | dict(more)) as process:
            wait_until(lambda: process.poll() is not None or is_live(url), WITHIN_S, "a gateway")
            assert process.poll() is None, self._log.read_text()
            yield url

    @contextmanager
    def worker(self, checkout: Path = ROOT, more: Mapping[str, str] = _NO_MORE) -> Iterator["subprocess.Popen[bytes]"]:
        """Runs a worker, with more settings."""
        with self._program("qinfer_workers.inference", checkout, more) as process:
            yield process

    @contextmanager
    def bulk_worker(self, checkout: Path = ROOT) -> Iterator["subprocess.Popen[bytes]"]:
        """Runs a bulk worker."""
        with self._program("qinfer_workers.jobs", checkout, {}) as process:
            yield process

    def serves(self, url: str, models: Sequence[str]) -> None:
        """Waits until models are ready at a gateway."""
        for model in models:
            wait_until(partial(is_ready, url, model), WITHIN_S, f"{model} at {url}")

    def has_workers(self, count: int, models: Sequence[str]) -> None:
        """Waits until so many workers have loaded version 1 of some models."""
        wanted = {f"{model}:1" for model in models}

        def are_there() -> bool:
            return sum(wanted <= set(row["ready"]) for row in self._qinfer("workers")["workers"]) >= count

        wait_until(are_there, WITHIN_S, f"{count} workers")

    def depth(self) -> int:
        """Returns how many requests the lanes hold."""
        return sum(int(row["requests"]) for row in self._qinfer("queues"))

    def log(self) -> str:
        """Returns what all programs have logged."""
        return self._log.read_text()

    def _qinfer(self, command: str) -> Any:
        argv = [sys.executable, "-m", "qinfer.cli.main", command, "--json"]
        done = subprocess.run(argv, env=self._env, capture_output=True, check=True, timeout=WITHIN_S)
        return json.loads(done.stdout)

    @contextmanager
    def _program(self, module: str, checkout: Path, settings: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
        paths = {"PYTHONPATH": os.pathsep.join(str(checkout / part) for part in _PATHS)}
        with self._log.open("ab") as log:
            command = [sys.executable, "-P", "-m", module]
            process = subprocess.Popen(command, env=self._env | paths | dict(settings), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        assert code == 0, self._log.read_text()


class Callers:
    """Threads that ask gateways again and again while the block runs, and keep what was not answered as it should.

    Args:
        urls: The gateways.
        model: A model that adds.
        key: The API key that is sent; empty = none. It may be changed.

    Attributes:
        answered: Key → how many requests were answered with it.
        refused: What was answered otherwise, or not.
    """

    def __init__(self, urls: list[str], model: str, key: str = "") -> None:
        self.key = key
        self.answered: Counter[str] = Counter()
        self.refused: list[str] = []
        self._model = model
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url,), daemon=True) for url in urls]

    def more(self, count: int = 50) -> None:
        """Waits for so many more answers to the key that is sent now."""
        wanted = self.answered[self.key] + count
        wait_until(lambda: self.answered[self.key] >= wanted or bool(self.refused), WITHIN_S, "answers")
        assert self.refused == []

    def _ask(self, url: str) -> None:
        number = 0
        with httpx.Client(base_url=url, timeout=30.0) as client:
            while not self._over.wait(0.005):
                number, key = number + 1, self.key
                if problem := self._wrong(client, number, key):
                    self.refused.append(problem)
                else:
                    self.answered[key] += 1

    def _wrong(self, client: httpx.Client, number: int, key: str) -> str:
        """Asks once; returns what is wrong with the answer, empty = nothing."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            reply = client.post(f"/v2/models/{self._model}/infer", json=body(number), headers=headers)
        except httpx.HTTPError as error:
            return repr(error)
        if reply.status_code != 200:
            return f"{reply.status_code} {reply.text}"
        data = reply.json()["outputs"][0]["data"]
        return "" if data == [number + 1.0] * 4 else f"{number}: {data}"

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(WITHIN_S)


def is_live(url: str) -> bool:
    """Tells whether a gateway answers."""
    return _status(f"{url}/v2/health/live") == 200


def is_ready(url: str, model: str) -> bool:
    """Tells whether a model is ready at a gateway."""
    return _status(f"{url}/v2/models/{model}/ready") == 200


def _status(address: str) -> int:
    try:
        return httpx.get(address, timeout=5.0).status_code
    except httpx.HTTPError:
        return 0


EARLIER_COMMITS = 200
"""How old the earlier version is where there is no release: so many commits."""


def earlier_version(directory: Path, without: str = "") -> Path:
    """Writes an earlier version of this project to a folder and returns it; skips the test where there is none.

    It is the last one `without` a file. Else, `QINFER_TEST_EARLIER` names a commit; otherwise it is the last release,
    or what was there 200 commits ago.
    """
    given = os.environ.get("QINFER_TEST_EARLIER", "")
    if without:
        given = f"{_git('log', '--diff-filter=A', '--format=%H', '--', without).decode().strip()}^"
    tag = _git("describe", "--tags", "--abbrev=0", "HEAD^").decode().strip()
    commit = given or tag or f"HEAD~{EARLIER_COMMITS}"
    archive = _git("archive", "--format=tar", commit, "qinfer", "api", "workers")
    if not archive:
        pytest.skip(
            f"no earlier version: git has no commit {commit} here; fetch the whole history, or set QINFER_TEST_EARLIER"
        )
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")
    return directory


def _git(*words: str) -> bytes:
    """Returns what git prints; nothing where it fails, or is not there."""
    try:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False).stdout
    except FileNotFoundError:
        return b""
