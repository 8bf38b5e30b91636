"""The whole server, once for all tests: `qinfer up` with a repository of small models."""

import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from qinfer.testing import wait_until
from tests.support import models
from tests.support.servers.rabbitmq import RabbitServer, running_rabbitmq
from tests.support.servers.servers import free_port

EVERY_MODEL = {"QINFER_REPOSITORY__STRICT_READINESS": "true"}
"""Tests begin when every model is loaded."""
READY_WITHIN_S = 50.0
STOP_WITHIN_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running `qinfer up`: the ports of its gateway and its process id."""

    port: int
    pid: int
    grpc_port: int

    @property
    def address(self) -> str:
        """The gateway's address as Triton's clients want it."""
        return f"127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        """The address of its gRPC side."""
        return f"127.0.0.1:{self.grpc_port}"


def clean_environment() -> dict[str, str]:
    """Returns the environment without settings of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("QINFER_")}


def is_ready(address: str) -> bool:
    """Asks `host:port`, or `https://host:port`, whose certificate is not checked."""
    url = address if "://" in address else f"http://{address}"
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5, context=context) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for datatype in models.ELEMENT_TYPES:
        models.identity(path, datatype)
    models.add_sub(path)
    models.add_sub(path, "counted")  # of which nobody asks but the test of statistics
    models.greet(path)
    return path


@pytest.fixture(scope="session")
def stack(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(repository, tmp_path_factory.mktemp("up")) as stack:
        yield stack


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    with running_rabbitmq(tmp_path_factory.mktemp("rabbitmq")) as server:
        yield server


@contextmanager
def running(
    repository: Path | str, directory: Path, workers: int = 1, options: Sequence[str] = (), /, **settings: str
) -> Iterator[Stack]:
    """Runs `qinfer up` with data and log in `directory`, and more options; it must end well when it is asked to."""
    port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "qinfer.cli.main", "up", "--model-repository", str(repository)]
    command += ["--data-dir", str(directory / "data"), "--http-port", str(port)]
    command += ["--grpc-port", str(grpc_port), "--metrics-port", "0", "--workers", str(workers), *options]
    log = directory / "log"
    with log.open("wb") as output:
        env = clean_environment() | EVERY_MODEL | settings
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    try:
        scheme = "https" if "QINFER_HTTP__TLS_CERTFILE" in settings else "http"
        wait_until_up(process, f"{scheme}://127.0.0.1:{port}", log)
        yield Stack(port=port, pid=process.pid, grpc_port=grpc_port)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert status == 0, log.read_text()


def wait_until_up(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    """Waits until every model is ready; fails with the server's own words when it does not get there."""
    try:
        wait_until(lambda: process.poll() is not None or is_ready(address), READY_WITHIN_S, "readiness")
    except TimeoutError as error:
        raise AssertionError(f"{error}; its log:\n{log.read_text()}") from None
    assert process.poll() is None, log.read_text()
