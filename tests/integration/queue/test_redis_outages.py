"""Outages of Redis of every kind, under load: gateway and worker are processes, and nobody restarts them.

Callers may wait, and may get 503; nothing else, and no wrong answer. Afterwards all is well by itself.
"""

import asyncio
import contextlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from qinfer.testing import eventually, wait_until
from tests.support import models
from tests.support.programs import ForkedProgram
from tests.support.servers.servers import RedisServer, SentinelSetup, command, free_port, system_redis

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(180)]

READY_WITHIN_S = 40.0
RECOVERED_WITHIN_S = 30.0
CALLERS = 8
SETTINGS = {
    "QINFER_REDIS__COMMAND_TIMEOUT_S": "1",
    "QINFER_REDIS__CONNECT_TIMEOUT_S": "5",
    "QINFER_WORKER__LEASE_S": "2",
    "QINFER_WORKER__RENEW_EVERY_S": "0.5",
    "QINFER_LOG__LEVEL": "WARNING",
}


_IDLE = """
local function now_s() local time = redis.call('TIME') return time[1] + time[2] / 1e6 end
local until_s = now_s() + ARGV[1]
repeat until now_s() > until_s
"""


class Server:
    """A gateway and a worker, as processes, on some Redis."""

    def __init__(self, redis_url: str, repository: Path, **settings: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        mine = {name: value for name, value in os.environ.items() if not name.startswith("QINFER_")} | SETTINGS
        mine |= {"QINFER_REDIS__URL": redis_url, "QINFER_REPOSITORY__PATH": str(repository)}
        mine |= {"QINFER_HTTP__PORT": str(port), "QINFER_GRPC__PORT": "0", "QINFER_METRICS__PORT": "0"} | settings
        self.processes: list[subprocess.Popen[bytes]] = []
        for program in ("qinfer_api", "qinfer_workers.inference"):
            self.processes.append(ForkedProgram([program], mine))

    def wait_until_ready(self) -> None:
        wait_until(lambda: self._is_ready() or not self.lives, READY_WITHIN_S, "readiness")
        assert self.lives

    @property
    def lives(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/v2/models/add_sub/ready", timeout=5.0).status_code == 200
        return False


class Load:
    """Callers who ask and ask; each of their requests has an answer of its own."""

    def __init__(self, url: str) -> None:
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self._url = f"{url}/v2/models/add_sub/infer"
        self._numbers = iter(range(1_000_000))
        self._is_over = False

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=60.0) as client, asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._call(client))

    def stop(self) -> None:
        self._is_over = True

    async def answered(self, count: int = 10 * CALLERS) -> None:
        """Waits for so many more right answers."""
        wanted = self.statuses[200] + count
        await eventually(lambda: self.statuses[200] >= wanted, RECOVERED_WITHIN_S, f"{count} answers")

    async def refused(self) -> None:
        """Waits for a 503 more."""
        wanted = self.statuses[503] + 1
        await eventually(lambda: self.statuses[503] >= wanted, RECOVERED_WITHIN_S, "a refusal")

    async def _call(self, client: httpx.AsyncClient) -> None:
        while not self._is_over:
            number = next(self._numbers) % 100_000
            reply = await client.post(self._url, content=_body(number))
            self.statuses[reply.status_code] += 1
            if reply.status_code == 503:
                if not reply.headers.get("retry-after", "").isdecimal():
                    self.wrong.append(f"{number}: 503 without Retry-After: {reply.text[:300]}")
                await asyncio.sleep(0.02)  # a caller who is refused does not hammer
                continue
            await asyncio.sleep(0.01)  # enough to have requests on their way all the time
            if reply.status_code != 200 or reply.json()["outputs"][0]["data"] != [number + 0.5] * 4:
                self.wrong.append(f"{number}: {reply.status_code} {reply.text[:300]}")


def _body(number: int) -> bytes:
    inputs = [
        {"name": name, "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}
        for name, value in (("a", number), ("b", 0.5))
    ]
    return json.dumps({"inputs": inputs, "outputs": [{"name": "sum"}]}).encode()


@contextlib.asynccontextmanager
async def load_on(server: Server) -> AsyncIterator[Load]:
    """Keeps callers busy during the block; afterwards every answer must have been right or 503."""
    load = Load(server.url)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        try:
            await load.answered()
            yield load
            await load.answered()
        finally:
            load.stop()
    assert load.wrong == []
    assert server.lives


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    models.add_sub(path)
    return path


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(system_redis(), tmp_path_factory.mktemp("redis"), "--appendonly", "yes") as server:
        yield server


@pytest.fixture(scope="module")
def server(redis_server: RedisServer, repository: Path) -> Iterator[Server]:
    """One for all tests: each begins with what the one before has left."""
    server = Server(redis_server.url, repository)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


async def test_redis_is_restarted(server: Server, redis_server: RedisServer) -> None:
    """What was queued is in its file; gateway and worker find it again."""
    async with load_on(server):
        await asyncio.to_thread(redis_server.stop)
        await asyncio.to_thread(redis_server.start)


async def test_redis_is_away_for_a_while(server: Server, redis_server: RedisServer) -> None:
    """New requests are refused meanwhile; those that were taken are answered afterwards."""
    async with load_on(server) as load:
        await asyncio.to_thread(redis_server.kill)
        await load.refused()
        await asyncio.to_thread(redis_server.start)

        await load.answered()


async def test_redis_is_killed_and_restarted(server: Server, redis_server: RedisServer) -> None:
    """SIGKILL, again and again: the append-only file has all that it had taken."""
    async with load_on(server) as load:
        for _ in range(3):
            await asyncio.to_thread(redis_server.kill)
            await asyncio.to_thread(redis_server.start)
            await load.answered()


async def test_redis_is_paused_for_longer_than_a_command_may_take(server: Server, redis_server: RedisServer) -> None:
    """The connections are given up, and made anew when it goes on; leases have run out meanwhile."""
    async with load_on(server) as load:
        with redis_server.paused():
            await load.refused()
            await asyncio.sleep(3.0)  # longer than a lease and than two command time-outs

        await load.answered()


async def test_every_connection_is_cut(server: Server, redis_server: RedisServer) -> None:
    """At once, several times, in the middle of whatever was on its way."""
    async with load_on(server) as load:
        with redis_server.client() as client:
            for _ in range(5):
                command(client, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await load.answered(50)


async def test_redis_takes_no_more_connections(server: Server, redis_server: RedisServer) -> None:
    """The lost ones can't be replaced until there is room again."""
    async with load_on(server) as load:
        with redis_server.client() as client:
            client.ping()
            _, before = command(client, "CONFIG", "GET", "maxclients")
            command(client, "CONFIG", "SET", "maxclients", "1")
            command(client, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await load.refused()
            command(client, "CONFIG", "SET", "maxclients", before)

        await load.answered()


async def test_the_memory_of_redis_is_full(server: Server, redis_server: RedisServer) -> None:
    """New requests are refused; what was taken is answered all the same, and makes room."""
    async with load_on(server) as load:
        with redis_server.client() as client:
            command(client, "CONFIG", "SET", "maxmemory", "1")
            await load.refused()
            await eventually(lambda: _queued(redis_server) == 0, RECOVERED_WITHIN_S, "an empty lane")
            command(client, "CONFIG", "SET", "maxmemory", "0")

        await load.answered()


def _queued(server: RedisServer) -> int:
    with server.client() as client:
        return sum(int(command(client, "XLEN", key)) for key in client.keys("qinfer:{*}:1:p*"))


async def test_redis_is_busy_with_a_script(server: Server, redis_server: RedisServer) -> None:
    """It answers BUSY to everything."""
    async with load_on(server) as load:
        with redis_server.client() as client:
            command(client, "CONFIG", "SET", "lua-time-limit", "10")
        refused = load.statuses[503]
        while load.statuses[503] == refused:  # where all callers wait for answers, nothing new comes meanwhile
            await asyncio.to_thread(_run_for, redis_server, 1.5)
            await load.answered()


def _run_for(server: RedisServer, seconds: float) -> None:
    """Runs a script that does nothing for so long."""
    with server.client() as client:
        client.eval(_IDLE, 0, str(seconds))


@pytest.mark.matrix
async def test_a_failover(repository: Path, tmp_path: Path) -> None:
    """The primary is killed; Sentinels make a replica the primary, and everybody goes there."""
    setup = SentinelSetup(system_redis(), tmp_path)
    server = None
    try:
        server = Server(setup.url, repository, QINFER_REDIS__MIN_REPLICAS="1")
        await asyncio.to_thread(server.wait_until_ready)
        old = setup.primary()
        async with load_on(server) as load:
            await asyncio.to_thread(old.kill)
            await load.refused()
            await load.answered()
            await asyncio.to_thread(old.start)  # it comes back as a replica
        await eventually(lambda: setup.primary() is not old, description="the Sentinel that is asked to know it")
    finally:
        if server is not None:
            server.stop()
        setup.stop()
