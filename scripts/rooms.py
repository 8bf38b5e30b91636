"""An empty environment in a directory of its own: made, filled by pip, used, and thrown away."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INSTALL_WITHIN_S, USE_WITHIN_S, READY_WITHIN_S, STOP_WITHIN_S = 900.0, 120.0, 90.0, 60.0
PORTS = ("http", "grpc", "metrics")


class RoomFailed(Exception):
    """Something in a room did not work; the message says what, and what it printed."""


class Room:
    """A virtual environment, and a directory to work in.

    Attributes:
        work: Where its commands run.
        bin: Where its programs are: the only place on PATH, so that a Redis of the system is not found.
    """

    def __init__(self, directory: Path) -> None:
        self.work, self.bin = directory / "work", directory / "venv" / "bin"
        self.work.mkdir(parents=True)
        self._home = directory
        _checked([sys.executable, "-m", "venv", str(directory / "venv")], self.work, None, INSTALL_WITHIN_S)

    def install(self, *requirements: str) -> None:
        """Installs what pip is told, as pip is configured on this machine.

        Args:
            requirements: Wheels with extras, names, directories.
        """
        command = [str(self.bin / "python"), "-I", "-m", "pip", "install", "--quiet", *requirements]
        _checked(command, self.work, None, INSTALL_WITHIN_S)

    def run(self, program: str, *arguments: str, **settings: str) -> str:
        """Runs a program of the environment, and returns what it printed.

        Args:
            program: Its name, such as `qinfer`.
            arguments: What it is called with.
            settings: Environment variables.
        """
        command = [str(self.bin / program), *arguments]
        return _checked(command, self.work, self._environment() | settings, USE_WITHIN_S)

    def fails(self, program: str, *arguments: str) -> str:
        """Runs a program of the environment that has to fail, and returns what it printed about it.

        Raises:
            RoomFailed: It did not fail.
        """
        command = [str(self.bin / program), *arguments]
        done = subprocess.run(
            command,
            check=False,
            cwd=self.work,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=USE_WITHIN_S,
        )
        if not done.returncode:
            raise RoomFailed(f"{' '.join(command)} did not fail:\n{done.stdout}")
        return done.stderr

    def python(self, code: str) -> str:
        """Runs a few lines of Python in the environment, and returns what they printed."""
        return self.run("python", "-W", "error::SyntaxWarning", "-c", code)

    @contextmanager
    def serving(self, *options: str, program: Path | None = None) -> Iterator[str]:
        """Runs `qinfer up` until the block ends, which has to end well; gives the gateway's URL.

        Args:
            options: What `qinfer up` is called with, besides ports.
            program: The `qinfer` to run; default: that of the environment.
        """
        ports = {name: free_port() for name in PORTS}
        command = [str(program or self.bin / "qinfer"), "up", *options]
        command += [word for name in PORTS for word in (f"--{name}-port", str(ports[name]))]
        log = self.work / "up.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=self.work, env=self._environment(), stdout=output, stderr=output, start_new_session=True
            )
        url = f"http://127.0.0.1:{ports['http']}"
        try:
            _wait(process, url, log)
            yield url
        finally:
            _stop(process)
        if process.returncode:
            raise RoomFailed(f"qinfer up ended with {process.returncode}; its log:\n{log.read_text()}")

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": str(self.bin),
            "HOME": str(self._home),
            "LANG": "C.UTF-8",
            "COLUMNS": "120",
            "QINFER_REPOSITORY__STRICT_READINESS": "true",  # who waits for the server wants every model
        }


def _checked(command: list[str], directory: Path, environment: dict[str, str] | None, within_s: float) -> str:
    done = subprocess.run(
        command, check=False, cwd=directory, env=environment, capture_output=True, text=True, timeout=within_s
    )
    if done.returncode:
        raise RoomFailed(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Waits until the server is ready."""
    until_s = time.monotonic() + READY_WITHIN_S
    while not _is_ready(url):
        if process.poll() is not None or time.monotonic() > until_s:
            raise RoomFailed(f"qinfer up is not ready; its log:\n{log.read_text()}")
        time.sleep(0.1)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5) as reply:  # noqa: S310 - our own http:// URL
            return bool(reply.status == 200)
    except OSError:
        return False


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
