"""A full disk behind the file of Redis: nothing that was accepted is lost, and all goes on once there is room."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.integration.queue.test_redis_outages import READY_WITHIN_S, Server, load_on
from tests.support import models
from tests.support.servers.servers import RedisServer, system_redis
from tests.support.small_disk import SmallDisk

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(180)]

LEFT_BYTES = 128 * 1024
"""The room that is left on the full disk: some tens of requests."""
BODY = {
    "inputs": [{"name": name, "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]} for name in "ab"],
}


class RedisOnDisk(RedisServer):
    """A Redis whose file is on a small disk."""

    def __init__(self, disk: SmallDisk, log: Path, policy: str) -> None:
        self._disk = disk
        options = ("--appendonly", "yes", "--appendfsync", policy, "--logfile", str(log))
        super().__init__(system_redis(), disk.home, *options)

    def _launch(self) -> "subprocess.Popen[bytes]":
        if self._command[0] != "nsenter":
            self._command[:0] = self._disk.enter()
        return super()._launch()


@contextmanager
def full_scene(folder: Path, policy: str) -> Iterator[tuple[SmallDisk, RedisOnDisk, Server]]:
    """Runs a gateway and a worker on such a Redis until the block ends."""
    (folder / "disk").mkdir()
    models.add_sub(folder / "models")
    disk = SmallDisk(folder / "disk", "48m")
    try:
        with RedisOnDisk(disk, folder / "redis.log", policy) as redis:
            server = Server(redis.url, folder / "models", QINFER_REDIS__DURABILITY=policy)
            try:
                server.wait_until_ready()
                yield disk, redis, server
            finally:
                server.stop()
    finally:
        disk.close()


async def accept_until_refused(url: str) -> list[str]:
    """Sends asynchronous requests until one is refused; returns where the results of the others will be."""
    results = []
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        while (reply := await client.post("/v1/models/add_sub/requests", json=BODY)).status_code == 202:
            results.append(reply.json()["links"]["result"])
        assert reply.status_code == 503, reply.text
    return results


async def read_all(url: str, results: list[str]) -> None:
    """Sees that each of them has its result."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        for result in results:
            reply = await client.get(result, params={"wait": READY_WITHIN_S})
            assert reply.status_code == 200, reply.text
            assert reply.json()["outputs"]


async def test_everysec(tmp_path: Path) -> None:
    """Redis refuses to write, and goes on by itself once there is room; what was accepted is answered."""
    with full_scene(tmp_path, "everysec") as (disk, redis, server):
        async with load_on(server) as load:
            disk.fill(LEFT_BYTES)
            accepted = await accept_until_refused(server.url)
            await load.refused()
            assert redis.process.poll() is None
            disk.make_room()

            await load.answered()
        await read_all(server.url, accepted)


async def test_always(tmp_path: Path) -> None:
    """Redis ends; started again with room, it has all that was accepted."""
    with full_scene(tmp_path, "always") as (disk, redis, server):
        async with load_on(server) as load:
            disk.fill(LEFT_BYTES)
            accepted = await accept_until_refused(server.url)
            await asyncio.to_thread(redis.process.wait, 20)
            await load.refused()
            disk.make_room()
            await asyncio.to_thread(redis.start)

            await load.answered()
        await read_all(server.url, accepted)
