"""Programs that start while Redis is away, or loses it in the middle of their start: they wait for it, and say so."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.models.state import BRIDGE, BULK, GATEWAY
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.testing import eventually
from tests.e2e.conftest import clean_environment
from tests.support.programs import ForkedProgram
from tests.support.proxy import Proxy
from tests.support.servers.servers import RedisServer, free_port, system_redis

pytestmark = pytest.mark.slow

ROUTES = """
routes:
  - name: one
    model: m
    source: {{url: "{url}", queue: asked, declare: true}}
    sink: {{routing_key: answered, declare: true}}
"""
WORKER, AUTOSCALE = "worker", "autoscale"
COMMANDS = {
    GATEWAY: ["qinfer_api"],
    WORKER: ["qinfer_workers.inference"],
    BULK: ["qinfer_workers.jobs"],
    BRIDGE: ["qinfer_workers.bridge", "routes.yaml"],
    AUTOSCALE: ["qinfer.cli.main", "autoscale", "--min", "0", "--max", "1"],
}
WITH_FILES = [WORKER, BULK, BRIDGE]
"""Programs whose probes look at a file."""
WAIT_AT_ONCE = [GATEWAY, WORKER, BULK, BRIDGE]
"""Programs that wait before they start anything; the others begin, and try again and again."""
WAITING = "start waits for redis"
LATER = [*((program, 2) for program in COMMANDS), (GATEWAY, 3), (WORKER, 3)]
BREAKS = [
    *((program, 1) for program in COMMANDS),
    *(pytest.param(*each, marks=pytest.mark.long) for each in LATER),
]
"""Programs, and how many connections they make before Redis is away: a first one, and a few more."""


class Breaking(Proxy):
    """A way to Redis that breaks when another connection is made than the first ones, and stays broken until mended.

    Attributes:
        tries: How many connections were refused since.
    """

    def __init__(self, target: int, connections: int) -> None:
        super().__init__(target)
        self.tries = 0
        self._left = connections
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def mend(self) -> None:
        self._left = 1_000_000

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._left:
            self._left -= 1
            self._open.add(writer)
            await super()._pass_on(reader, writer)
            return
        self.tries += 1
        for one in (*self._open, writer):
            one.transport.abort()
        self._open.clear()


class Late:
    """A Redis that is not there yet, and the programs that want it."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server = server
        self.settings = RedisSettings(url=SecretStr(server.url))
        self.http = f"http://127.0.0.1:{free_port()}"
        self._directory = directory

    @contextmanager
    def run(self, program: str, url: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """Runs a program; it is killed at the end, if it has not ended."""
        url = url or self.server.url
        (self._directory / "routes.yaml").write_text(ROUTES.format(url=url))
        (self._directory / "models").mkdir()
        env = clean_environment() | {
            "QINFER_REDIS__URL": url,
            "QINFER_REDIS__CONNECT_TIMEOUT_S": "0.2",
            "QINFER_REPOSITORY__PATH": str(self._directory / "models"),
            "QINFER_HTTP__PORT": self.http.rpartition(":")[2],
            "QINFER_GRPC__ENABLED": "false",
            "QINFER_METRICS__PORT": "0",
            "QINFER_WORKER__HEALTH_DIR": str(self.health),
        }
        with self.log.open("wb") as output:
            process = ForkedProgram(COMMANDS[program], env, cwd=self._directory, log=output)
        with process:
            try:
                yield process
            finally:
                process.kill()

    @property
    def health(self) -> Path:
        return self._directory / "health"

    @property
    def log(self) -> Path:
        return self._directory / "log"

    async def says(self, text: str) -> None:
        await eventually(lambda: text in self.log.read_text(), 30.0, text)

    async def waits(self, program: str) -> None:
        """Waits until the program is live and, if it says so to load balancers, not ready."""
        if program in WITH_FILES:
            await eventually((self.health / "live").exists, 30.0, "a file for probes")
            os.utime(self.health / "live", (0, 0))
            await eventually(lambda: (self.health / "live").stat().st_mtime > time.time() - 60, 30.0, "a young file")
            assert not (self.health / "ready").exists()
        elif program == GATEWAY:
            await eventually(lambda: self._status("live") == 200, 30.0, "liveness")
            assert self._status("ready") == 503

    async def serves(self, program: str) -> None:
        """Waits until the program has Redis."""
        store = ControlStore(admin_client(self.settings))

        async def is_so() -> bool:
            if program == GATEWAY:
                return self._status("ready") == 200
            if program == WORKER:
                return (self.health / "ready").exists()
            return bool(await (store.scalers() if program == AUTOSCALE else store.live_processes(program)))

        try:
            await eventually(is_so, 30.0, program)
        finally:
            await store.close()

    def _status(self, what: str) -> int:
        try:
            return httpx.get(f"{self.http}/v2/health/{what}", timeout=10).status_code
        except httpx.HTTPError:
            return 0


@pytest.fixture
async def late(tmp_path: Path) -> AsyncIterator[Late]:
    directory = tmp_path / "redis"
    directory.mkdir()
    with RedisServer(system_redis(), directory) as server:
        await asyncio.to_thread(server.stop)
        yield Late(server, tmp_path)


@pytest.mark.parametrize("program", COMMANDS)
async def test_it_waits_and_goes_on(late: Late, program: str) -> None:
    """The log says so once, not with each try."""
    with late.run(program) as process:
        if program in WAIT_AT_ONCE:
            await late.says(WAITING)
        await late.waits(program)
        await asyncio.to_thread(late.server.start)
        await late.serves(program)
        log = late.log.read_text()
        process.terminate()
        code = await asyncio.to_thread(process.wait, 20)

    told = int(program in WAIT_AT_ONCE)
    assert (code, log.count(WAITING), log.count("redis is there: start goes on")) == (0, told, told)
    assert "redis can't be reached" not in log


@pytest.mark.parametrize(("program", "connections"), BREAKS)
async def test_redis_goes_away_while_it_starts(late: Late, program: str, connections: int) -> None:
    """Between the first connection and the first look, and a little later."""
    await asyncio.to_thread(late.server.start)
    with Breaking(late.server.port, connections) as way, late.run(program, way.url) as process:
        await eventually(lambda: way.tries > 5, 30.0, "a few tries")
        await late.waits(program)
        assert process.poll() is None
        way.mend()
        await late.serves(program)
        process.terminate()
        code = await asyncio.to_thread(process.wait, 20)

    assert code == 0


@pytest.mark.parametrize(
    ("program", "connections"),
    [
        *(pytest.param(program, 0, marks=pytest.mark.long) for program in COMMANDS),
        *(each if hasattr(each, "marks") else pytest.param(*each, marks=pytest.mark.long) for each in BREAKS),
    ],
)
async def test_it_can_be_stopped_while_it_waits(late: Late, program: str, connections: int) -> None:
    """The two tests named `test_process.py` have the gateway and the worker that never had a connection."""
    await asyncio.to_thread(late.server.start)
    with Breaking(late.server.port, connections) as way, late.run(program, way.url) as process:
        await eventually(lambda: way.tries > 5, 30.0, "a few tries")
        process.terminate()
        code = await asyncio.to_thread(process.wait, 20)

    assert (code, "Traceback" in late.log.read_text()) == (0, False)
