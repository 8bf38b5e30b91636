"""A private server on which configurations are tried: `qinfer up` in a directory of its own, on free ports."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qinfer.cli.analyze.journal import digest
from qinfer.cli.client import GatewayClient
from qinfer.cli.console import CommandFailed
from qinfer.cli.local.machine import read_run
from qinfer.errors import QinferError
from qinfer.observe.host import ProcessUse, read_use

START_S = 120.0
AGAIN_S = 0.1
STOP_S = 20.0
_LOG = "up.log"


class Stack:
    """The server.

    Attributes:
        url: Its address.
        client: A client of it.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        log: Path,
        url: str,
        client: GatewayClient,
        repositories: Sequence[str] = (),
    ) -> None:
        self.url, self.client = url, client
        self._process, self._log, self._repositories = process, log, repositories

    def configure(self, model: str, config: Mapping[str, Any]) -> None:
        """Loads a model with a configuration, and waits until it is ready."""
        self.client.load(model, config=config)

    def check(self) -> None:
        """Raises `CommandFailed` if the server has ended."""
        if self._process.poll() is not None:
            raise CommandFailed(f"the private server has ended; the same command goes on:\n{_end_of(self._log)}")

    def files_digest(self, model: str) -> str:
        """Returns a digest of a model's files."""
        places = [Path(one) / model for one in self._repositories]
        return next((digest(place) for place in places if place.is_dir()), "")

    def told(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a configuration as the model's own, which it is."""
        return config

    def use(self) -> ProcessUse:
        """Returns CPU time and memory of the server's processes."""
        return read_use(pid=self._process.pid) or ProcessUse(0.0, 0)


@contextmanager
def private_stack(repositories: Sequence[str], models: Sequence[str], workers: int = 1) -> Iterator[Stack]:
    """Starts a server that serves some models of repositories, and stops it at the end.

    Args:
        repositories: Their paths.
        models: The models that it loads.
        workers: Worker processes.

    Raises:
        CommandFailed: The server ended, or the models were not ready in time; the error has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="qinfer-analyze-") as home:
        # as a child, it ends with this process, even by SIGKILL: the pipe of its standard input closes
        command = [sys.executable, "-P", "-m", "qinfer.cli.local.child", "", "qinfer.cli.main", "up"]
        command += [part for one in repositories for part in ("--model-repository", one)]
        command += ["--data-dir", home, "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        command += ["--workers", str(workers), "--model-control-mode", "explicit"]
        command += [part for model in models for part in ("--load-model", model)]
        log = Path(home) / _LOG
        with log.open("wb") as opened:
            process = subprocess.Popen(  # noqa: S603  our own interpreter
                command, stdin=subprocess.PIPE, stdout=opened, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            url = _started(process, Path(home), log, models)
            with GatewayClient(url) as client:
                yield Stack(process, log, url, client, repositories)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()


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


def config_text(config: Mapping[str, Any]) -> str:
    """Returns a configuration as `config.pbtxt`."""
    from google.protobuf import text_format

    from qinfer.models.config.message import from_json

    return text_format.MessageToString(from_json(json.dumps(config)))
