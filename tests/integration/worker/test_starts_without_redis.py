"""Programs that start while Redis is away: they wait for it, and say so."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.models.state import BEAT, BRIDGE, BULK
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.testing import eventually
from tests.e2e.conftest import clean_environment
from tests.support.servers.servers import RedisServer, system_redis

ROUTES = """
routes:
  - name: one
    model: m
    source: {{url: "{url}", queue: asked, declare: true}}
    sink: {{routing_key: answered, declare: true}}
"""
MODULES = {BULK: "qinfer_workers.jobs", BEAT: "qinfer_workers.jobs.beat", BRIDGE: "qinfer_workers.bridge"}
WAITING = "start waits for redis"


class Late:
    """A Redis that is not there yet, and the programs that want it."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server = server
        self._directory = directory
        self.settings = RedisSettings(url=SecretStr(server.url))

    @contextmanager
    def run(self, program: str) -> Iterator[subprocess.Popen[bytes]]:
        """Runs a program; it is told to stop at the end, if it has not ended."""
        routes = self._directory / "routes.yaml"
        routes.write_text(ROUTES.format(url=self.server.url))
        words = [MODULES[program], str(routes)] if program == BRIDGE else [MODULES[program]]
        env = clean_environment() | {
            "QINFER_REDIS__URL": self.server.url,
            "QINFER_REDIS__CONNECT_TIMEOUT_S": "0.2",
            "QINFER_WORKER__HEALTH_DIR": str(self.health),
        }
        with self.log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-m", *words], env=env, stdout=output, stderr=output)
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

    async def is_live(self, program: str) -> None:
        store = ControlStore(admin_client(self.settings))

        async def is_so() -> bool:
            return bool(await store.live_processes(program))

        try:
            await eventually(is_so, 30.0, program)
        finally:
            await store.close()


@pytest.fixture
async def late(tmp_path: Path) -> AsyncIterator[Late]:
    directory = tmp_path / "redis"
    directory.mkdir()
    with RedisServer(system_redis(), directory) as server:
        await asyncio.to_thread(server.stop)
        yield Late(server, tmp_path)


@pytest.mark.parametrize("program", [BULK, BRIDGE])
async def test_it_waits_and_goes_on(late: Late, program: str) -> None:
    """The log says so once, not with each try."""
    with late.run(program) as process:
        await late.says(WAITING)
        await asyncio.to_thread(late.server.start)
        await late.is_live(program)
        log = late.log.read_text()
        process.terminate()
        code = await asyncio.to_thread(process.wait, 20)

    assert (code, log.count(WAITING), log.count("redis is there: start goes on")) == (0, 1, 1)
    assert "redis can't be reached" not in log


async def test_beat_waits_and_goes_on(late: Late) -> None:
    with late.run(BEAT) as process:
        await late.says("beat started")
        await asyncio.to_thread(late.server.start)
        await late.is_live(BEAT)
        process.terminate()
        code = await asyncio.to_thread(process.wait, 20)

    assert code == 0


@pytest.mark.parametrize("program", [BULK, BRIDGE])
async def test_it_can_be_stopped_while_it_waits(late: Late, program: str) -> None:
    with late.run(program) as process:
        await late.says(WAITING)
        process.terminate()
        code = await asyncio.to_thread(process.wait, 20)

    assert (code, "Traceback" in late.log.read_text()) == (0, False)


@pytest.mark.parametrize("program", [BULK, BEAT, BRIDGE])
async def test_its_file_is_young_while_it_waits(late: Late, program: str) -> None:
    """Probes look at it: no restart brings Redis back."""
    with late.run(program):
        await late.says("beat started" if program == BEAT else WAITING)
        os.utime(late.health / "live", (0, 0))

        await eventually(lambda: (late.health / "live").stat().st_mtime > time.time() - 60, 30.0, "a young file")
