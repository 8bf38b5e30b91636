"""An operator's day, from the installation on and under load: what was accepted is answered, whatever is done."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.testing import wait_until
from scripts import clean_room
from scripts.rooms import INSTALL_WITHIN_S, Room
from tests.chaos.repository import write_stub
from tests.e2e.async_load import Load, wrong
from tests.e2e.conftest import clean_environment
from tests.support import models
from tests.support.servers.servers import RedisServer, free_port, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(INSTALL_WITHIN_S + 300)]

FAST, SLOW = "add_sub", "slow"
WITHIN_S = 60.0
DEEP = 40
"""Requests in the slow model's lane at which one looks at the workers."""


class Operator:
    """Who runs the commands.

    Args:
        directory: Where the models, the data and the logs are.
        python: The interpreter of the environment into which qinfer is installed.
        redis: The queue.
    """

    def __init__(self, directory: Path, python: Path, redis: RedisServer) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._python = (str(python), "-I", "-m")  # none of this checkout's code
        self._environment = clean_environment() | {
            "QINFER_REDIS__URL": redis.url,
            "QINFER_REPOSITORY__PATH": str(directory / "models"),
            "QINFER_REPOSITORY__CONTROL_MODE": "explicit",
            "QINFER_REPOSITORY__OVERLAY": str(directory / "overlay"),
            "QINFER_HTTP__PORT": str(self.port),
            "QINFER_GRPC__PORT": "0",
            "QINFER_METRICS__PORT": "0",
        }

    @contextmanager
    def program(self, *argv: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Runs a program; it must drain and end with 0 when it is asked to, if it was not before."""
        log = self._directory / "log"
        with log.open("ab") as output:
            process = subprocess.Popen([*self._python, *argv], env=self._environment, stdout=output, stderr=output)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()

    def qinfer(self, *argv: str) -> Any:
        """Runs a command; returns what it prints as JSON."""
        command = [*self._python, "qinfer.cli.main", *argv, "--json"]
        done = subprocess.run(command, env=self._environment, capture_output=True, check=False, timeout=WITHIN_S)
        assert done.returncode == 0, (argv, done.stderr.decode(), done.stdout.decode())
        return json.loads(done.stdout)

    def is_live(self) -> bool:
        """Tells whether the gateway answers."""
        try:
            return httpx.get(f"{self.url}/v2/health/live").status_code == 200
        except httpx.HTTPError:
            return False

    def load(self, model: str, *options: str) -> None:
        """Loads a model, or its changes."""
        self.qinfer("models", "load", model, "--url", self.url, *options)

    def workers(self) -> set[str]:
        """Returns the workers that serve both models."""
        rows = self.qinfer("workers")["workers"]
        return {row["id"] for row in rows if {f"{FAST}:1", f"{SLOW}:1"} <= set(row["ready"])}

    def depth(self, model: str) -> int:
        """Returns how many requests a model's lanes hold."""
        found = self.qinfer("queues", "--model", model)
        return sum(int(row["requests"]) for row in found)

    def max_batch_size(self, model: str) -> int:
        """Returns that of the configuration that is served."""
        return int(httpx.get(f"{self.url}/v2/models/{model}/config").raise_for_status().json()["max_batch_size"])


def autoscale(*, at_most: int) -> tuple[str, ...]:
    options = ("--min", "1", "--max", str(at_most), "--target-s", "1", "--cooldown-s", "1")
    return ("qinfer.cli.main", "autoscale", *options)


def test_nothing_is_lost_from_morning_to_evening(tmp_path: Path) -> None:
    """Install, load two models, depth rises, workers follow, upgrade a worker and a model, roll both back, drain."""
    room = Room(tmp_path / "room")
    room.install(f"{clean_room.make_wheel(tmp_path)}[{clean_room.SERVER}]")
    models.add_sub(tmp_path / "models", FAST)
    write_stub(tmp_path / "models", SLOW, dim=4, max_batch_size=2, delay_s=0.3)
    (tmp_path / "overlay").mkdir()
    server = RedisServer(system_redis(), tmp_path, "--appendonly", "yes", "--maxmemory-policy", "noeviction")
    with server, ExitStack() as day:
        operator = Operator(tmp_path, room.bin / "python", server)
        assert {finding["level"] for finding in operator.qinfer("doctor", "--no-runtimes")["findings"]} <= {
            "ok",
            "warning",
        }
        day.enter_context(operator.program("qinfer_api"))
        wait_until(operator.is_live, WITHIN_S, "the gateway")
        scaler = day.enter_context(operator.program(*autoscale(at_most=2)))
        for model in (FAST, SLOW):
            operator.load(model)
        load = Load(operator.url, [FAST, SLOW], pause_s=0.01)
        day.callback(load.stop)
        load.start()

        wait_until(lambda: operator.depth(SLOW) >= DEEP, WITHIN_S, "depth")
        wait_until(lambda: len(operator.workers()) == 2, WITHIN_S, "a second worker")

        old = operator.workers()
        with operator.program("qinfer_workers.inference") as upgraded:
            wait_until(lambda: bool(operator.workers() - old), WITHIN_S, "the upgraded worker")
            scaler.send_signal(signal.SIGTERM)
            assert scaler.wait(WITHIN_S) == 0
            assert not operator.workers() & old
            before = operator.qinfer("workers")
            day.enter_context(operator.program(*autoscale(at_most=2)))  # it was a bad upgrade
            wait_until(lambda: len(operator.workers()) > 1, WITHIN_S, "a worker as before")
            assert len(before["workers"]) == 1
            upgraded.send_signal(signal.SIGTERM)
            assert upgraded.wait(WITHIN_S) == 0

        first = operator.max_batch_size(FAST)
        config = httpx.get(f"{operator.url}/v2/models/{FAST}/config").json()
        operator.load(FAST, "--config", json.dumps(config | {"max_batch_size": first + 1}))
        operator.load(FAST)  # with the configuration of the load before
        assert operator.max_batch_size(FAST) == first + 1
        operator.load(FAST, "--config", json.dumps(config))
        assert operator.max_batch_size(FAST) == first

        load.stop()
        assert wrong(operator.url, load.accepted) == {}
        assert (operator.depth(FAST), operator.depth(SLOW)) == (0, 0)
        assert [operator.qinfer("dlq", "list", model) for model in (FAST, SLOW)] == [[], []]
    assert len(load.accepted) > 2 * DEEP
