"""A RabbitMQ of one's own on loopback: started, killed, started again on its data, and stopped.

It is the one that `scripts/tools` fetches, or Debian's, if that is installed. Where there is none, tests are skipped
with the reason. The node has a name, a cookie, a directory, ports and an epmd of its own, and both end when this
process does.
"""

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import quote

import pytest
from kombu import Connection

from tests.support.servers.servers import free_port, is_listening, wait_until

NO_RABBITMQ = "RabbitMQ is not installed; scripts/tools fetches it from Debian's packages"

_FETCHED = Path(__file__).resolve().parents[3] / ".venv" / "tools" / "rabbitmq"
_START_S = 50.0
_STOP_S = 20.0
_WITH_ITS_STARTER = "spawn(fun()->io:get_line([]),halt(1)end)."
"""Ends the node when its standard input does: when whoever started it is gone."""
_EPMD = '"$@" & read -r _; kill $!; wait'
"""The same for epmd."""
_CONFIG = """
listeners.tcp.1 = 127.0.0.1:{port}
default_user = {user}
default_pass = {password}
vm_memory_high_watermark.absolute = 1GiB
disk_free_limit.absolute = 50MB
log.file.level = warning
log.console = false
"""


def rabbitmq_root() -> Path:
    """Returns the directory that RabbitMQ is below, as Debian lays it out."""
    roots = [root for root in (_FETCHED, Path("/")) if (root / "usr/lib/rabbitmq/bin/rabbitmq-server").exists()]
    return roots[0] if roots else pytest.skip(NO_RABBITMQ)


class RabbitServer:
    """One node.

    Args:
        directory: Of its data, logs and configuration.

    Attributes:
        port: Where it speaks AMQP.
        user: Who may do everything.
        password: The password.
        process: The node.
    """

    user = "guest"

    def __init__(self, directory: Path) -> None:
        root = rabbitmq_root()
        self._directory = directory
        self._program = root / "usr/lib/rabbitmq/bin/rabbitmq-server"
        self.port = free_port()
        self.password = secrets.token_hex(8)
        self._epmd_port, distribution_port = free_port(), free_port()
        self._write_files()
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("RABBITMQ_")}
        self._environment |= {
            "PATH": f"{root / 'usr/lib/erlang/bin'}:{os.environ['PATH']}",
            "HOME": str(directory),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": f"qinfer{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "none.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "generated"),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} -start_epmd false",
            "RABBITMQ_SERVER_START_ARGS": f"-noshell -eval {_WITH_ITS_STARTER}",
            "RABBITMQ_ALLOW_INPUT": "true",  # the node takes the place of the shell that starts it
        }
        epmd = next((root / "usr/lib/erlang").glob("erts-*/bin/epmd"))
        self._epmd = self._spawn(["sh", "-c", _EPMD, "sh", str(epmd), "-address", "127.0.0.1"])
        try:
            wait_until(lambda: is_listening(self._epmd_port))
            self.process = self._launch()
        except BaseException:
            self._end_epmd()
            raise

    @property
    def url(self) -> str:
        """The URL for kombu."""
        return self.url_of(self.password)

    def url_of(self, password: str, port: int = 0) -> str:
        """Returns the URL with another password, or through another port."""
        return f"amqp://{self.user}:{quote(password, safe='')}@127.0.0.1:{port or self.port}//"

    def connect(self) -> Connection:
        """Returns a connection of kombu, open."""
        connection = Connection(self.url, connect_timeout=10.0)
        connection.ensure_connection(max_retries=1)
        return connection

    def kill(self) -> None:
        """SIGKILL: nothing is written any more but what the system has."""
        self.process.kill()
        self._reap()

    def end(self) -> None:
        """SIGTERM: it puts everything in order first."""
        self.process.terminate()
        self._reap()

    def start(self) -> None:
        """Starts it again on its data, and waits until clients can connect."""
        self.process = self._launch()

    def stop(self) -> None:
        """Ends the node, then its epmd."""
        try:
            self.end()
        finally:
            self._end_epmd()

    def _reap(self) -> None:
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _end_epmd(self) -> None:
        assert self._epmd.stdin is not None
        self._epmd.stdin.close()
        self._epmd.wait(_STOP_S)

    def _write_files(self) -> None:
        directory = self._directory
        (directory / "rabbitmq.conf").write_text(_CONFIG.format(port=self.port, user=self.user, password=self.password))
        (directory / "enabled_plugins").write_text("[].\n")
        cookie = directory / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)

    def _launch(self) -> "subprocess.Popen[bytes]":
        process = self._spawn([str(self._program)])
        try:
            wait_until(lambda: process.poll() is not None or is_listening(self.port), _START_S)
            assert process.poll() is None, f"RabbitMQ ended at once:\n{self.log()}"
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def _spawn(self, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self._directory / "output").open("ab") as output:
            return subprocess.Popen(command, env=self._environment, stdin=subprocess.PIPE, stdout=output, stderr=output)

    def log(self) -> str:
        """Returns the end of what it said."""
        files = [self._directory / "output", *(self._directory / "log").glob("*.log")]
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in files if file.exists())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def running_rabbitmq(directory: Path) -> Iterator[RabbitServer]:
    """Runs a node with everything of it in a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    with RabbitServer(directory) as server:
        yield server
