"""`qinfer bridge` as a process, what it tells of itself, and a line to its broker that can be held and cut."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import yaml

from qinfer.testing import eventually
from tests.e2e.conftest import clean_environment
from tests.support.servers.servers import free_port

_STOP_S = 20.0
_TAIL = 4000


class BridgeProcess:
    """One `qinfer bridge`.

    Args:
        directory: Where its file and its log are put.
        document: The file, but for the port of its metrics.
        options: Of the command.
        environment: Variables besides.
    """

    def __init__(
        self, directory: Path, document: Mapping[str, Any], *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._port = free_port()
        self._log = directory / f"bridge-{self._port}.log"
        config = directory / f"bridge-{self._port}.yaml"
        config.write_text(yaml.safe_dump({**document, "metrics_port": self._port}))
        command = [sys.executable, "-m", "qinfer.cli.main", "bridge", str(config), *options]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=clean_environment() | dict(environment or {})
            )

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric over the series with these labels; 0 where there is none, or no answer yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=5) as reply:
                lines = reply.read().decode().splitlines()
        except OSError:
            return 0.0
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        mine = [line for line in lines if line.startswith(f"{name}{{") and all(one in line for one in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in mine)

    async def reaches(self, name: str, value: float, **labels: str) -> None:
        """Waits until a metric is this large."""

        async def is_there() -> bool:
            assert self.process.poll() is None, self.log()
            return await asyncio.to_thread(self.metric, name, **labels) >= value

        try:
            await eventually(is_there, _STOP_S, f"{name} = {value}")
        except TimeoutError as error:
            raise AssertionError(f"{error}; the log ends with\n{self.log()}") from None

    async def says(self, text: str) -> None:
        """Waits until something is in the log."""
        try:
            await eventually(lambda: text in self.log(), _STOP_S, text)
        except TimeoutError as error:
            raise AssertionError(f"{error}; the log ends with\n{self.log()}") from None

    def log(self) -> str:
        """Returns the end of the log."""
        return self._log.read_text(errors="replace")[-_TAIL:]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    async def stop(self) -> None:
        """SIGTERM: it must end well."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(self.process.wait, _STOP_S)
        finally:
            self.kill()
        assert code == 0, self.log()


@asynccontextmanager
async def running_bridge(
    directory: Path, document: Mapping[str, Any], *options: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[BridgeProcess]:
    """Runs a bridge, which must end well when it is asked to."""
    bridge = BridgeProcess(directory, document, *options, environment=environment)
    try:
        yield bridge
    except BaseException:
        bridge.kill()
        raise
    await bridge.stop()


class Line:
    """A TCP line to a server: it passes bytes on, until it is held or cut.

    Args:
        port: Where the server is.
        own_port: Where it listens; default: any.

    Attributes:
        port: Where clients connect.
    """

    def __init__(self, port: int, own_port: int = 0) -> None:
        self._to = port
        self._server = socket.create_server(("127.0.0.1", own_port))
        self.port = int(self._server.getsockname()[1])
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._passing = threading.Event()
        self._passing.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Keeps from now on what clients send, until `cut`: the server does not see it."""
        self._passing.clear()

    def cut(self) -> None:
        """Breaks all connections, with what was kept; passes on what comes over new ones."""
        with self._lock:
            broken, self._open = self._open, []
        for each in broken:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._passing.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_held: bool) -> None:  # noqa: FBT001 - a thread's
        with suppress(OSError), source:
            while data := source.recv(65536):
                if is_held:
                    self._passing.wait()
                with self._lock:
                    if source not in self._open:
                        return
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
