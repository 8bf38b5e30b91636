"""A private server on which configurations are tried: `qinfer up` in a directory of its own, on free ports."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from qinfer.cli.client import GatewayClient
from qinfer.cli.console import CommandFailed
from qinfer.cli.local.machine import read_run
from qinfer.errors import QinferError
from qinfer.observe.host import ProcessUse, read_use

START_S = 120.0
AGAIN_S = 0.1
STOP_S = 20.0
_LOG = "up.log"


class TrialServer(NamedTuple):
    """A server on which configurations are tried; `prefix` begins the models' names there.

    The process, or its children, execute the models; `check` raises `CommandFailed` if no more load may be sent.
    """

    url: str
    client: GatewayClient
    process: "subprocess.Popen[bytes]"
    check: Callable[[], None]
    prefix: str = ""

    def use(self) -> ProcessUse:
        """Returns CPU time and memory of the process and its children."""
        return read_use(pid=self.process.pid) or ProcessUse(0.0, 0)


@contextmanager
def private_stack(repositories: Sequence[str], models: Sequence[str]) -> Iterator[TrialServer]:
    """Starts a server that serves some models of repositories, and stops it at the end.

    Raises:
        CommandFailed: The server ended, or the models were not ready in time; the error has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="qinfer-analyze-") as home:
        # as a child, it ends with this process, even by SIGKILL: the pipe of its standard input closes
        command = [sys.executable, "-P", "-m", "qinfer.cli.local.child", "", "qinfer.cli.main", "up"]
        command += [part for one in repositories for part in ("--model-repository", one)]
        command += ["--data-dir", home, "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        command += ["--workers", "1", "--model-control-mode", "explicit"]
        command += [part for model in models for part in ("--load-model", model)]
        log = Path(home) / _LOG
        with log.open("wb") as opened:
            process = subprocess.Popen(  # noqa: S603  our own interpreter
                command, stdin=subprocess.PIPE, stdout=opened, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            url = _started(process, Path(home), log, models)
            with GatewayClient(url) as client:
                yield TrialServer(url, client, process, partial(check_running, process, log))
        finally:
            end_child(process)


def check_running(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Raises `CommandFailed` if the server has ended."""
    if process.poll() is not None:
        raise CommandFailed(f"the private server has ended; the same command goes on:\n{_end_of(log)}")


def end_child(process: "subprocess.Popen[bytes]") -> None:
    """Closes the standard input of a child, which drains then and ends; kills it if it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _started(process: "subprocess.Popen[bytes]", home: Path, log: Path, models: Sequence[str]) -> str:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        if (run := read_run(home)) is not None:
            with GatewayClient(run.url) as client, suppress(QinferError):
                if all(client.is_ready(model) for model in models):
                    return run.url
        with suppress(subprocess.TimeoutExpired):
            process.wait(AGAIN_S)
    raise CommandFailed(f"the private server did not get ready with {', '.join(models)}:\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
