"""A full disk behind the file of Redis: nothing that was accepted is lost, and all goes on once there is room."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qinfer.testing import wait_until
from tests.integration.queue.test_redis_outages import READY_WITHIN_S, Server, load_on
from tests.support import models
from tests.support.servers.servers import RedisServer, system_redis

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(180)]

SIZE = "48m"
LEFT_BYTES = 128 * 1024
"""The room that is left on the full disk: some tens of requests."""
BODY = {
    "inputs": [{"name": name, "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]} for name in "ab"],
}


class SmallDisk:
    """A file system of its own in memory, in a mount namespace that needs no root; `home` is its folder."""

    def __init__(self, folder: Path) -> None:
        self.home = folder
        mount = f'mount -t tmpfs -o size={SIZE} none "$0" && touch "$0/mounted" && exec cat'
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder)]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        self._seen = Path(f"/proc/{self._holder.pid}/root{folder}")
        wait_until(lambda: self._holder.poll() is not None or (self._seen / "mounted").exists())
        if self._holder.poll() is not None:
            said = self._holder.communicate()[1].decode().strip()
            pytest.skip(f"no file system can be mounted in a namespace here: {said}")

    def enter(self) -> list[str]:
        """Returns the beginning of a command that runs where the disk is."""
        return ["nsenter", "--user", "--mount", "--preserve-credentials", "--target", str(self._holder.pid)]

    def fill(self) -> None:
        """Takes up the room but for a little."""
        state = os.statvfs(self._seen)
        with (self._seen / "ballast").open("wb") as file:
            file.write(bytes(state.f_bavail * state.f_frsize - LEFT_BYTES))

    def make_room(self) -> None:
        (self._seen / "ballast").unlink()

    def close(self) -> None:
        self._holder.communicate()


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
    if not shutil.which("unshare") or not shutil.which("nsenter"):
        pytest.skip("there is no unshare and nsenter (util-linux)")
    (folder / "disk").mkdir()
    models.add_sub(folder / "models")
    disk = SmallDisk(folder / "disk")
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
            disk.fill()
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
            disk.fill()
            accepted = await accept_until_refused(server.url)
            await asyncio.to_thread(redis.process.wait, 20)
            await load.refused()
            disk.make_room()
            await asyncio.to_thread(redis.start)

            await load.answered()
        await read_all(server.url, accepted)
