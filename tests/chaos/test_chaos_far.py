"""Images between machines: a gateway and workers that share no directory, and reach one another by TCP only.

The processes are real. A network namespace and a cable need root; without, that test is skipped.
"""

import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.member import Role
from tests.chaos.test_chaos_memory import Site, served
from tests.support.images import MODEL, ways_of
from tests.support.small_disk import SmallDisk

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(240)]


def listening(host: str) -> dict[str, str]:
    """Returns the settings of a gateway that listens at an address."""
    return {"QINFER_SEGMENTS__LISTEN_HOST": host, "QINFER_SEGMENTS__LISTEN_PORT": "0"}


class Cable:
    """A network between this machine and the namespace of a small disk."""

    def __init__(self, disk: SmallDisk) -> None:
        self._name = f"q{secrets.token_hex(4)}"
        subnet = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
        self.here, there = f"{subnet}.1", f"{subnet}.2"
        process = str(disk._holder.pid)
        self._run("ip", "link", "add", "dev", self._name, "type", "veth", "peer", "name", "far", "netns", process)
        self._run("ip", "addr", "add", f"{self.here}/30", "dev", self._name)
        self._run(*disk.enter(), "ip", "addr", "add", f"{there}/30", "dev", "far")
        self._run(*disk.enter(), "ip", "link", "set", "far", "up")
        self.plug()

    def plug(self) -> None:
        """Connects both."""
        self._run("ip", "link", "set", self._name, "up")

    def pull(self) -> None:
        """Cuts them: neither hears of an end."""
        self._run("ip", "link", "set", self._name, "down")

    def close(self) -> None:
        self._run("ip", "link", "del", self._name)

    @staticmethod
    def _run(*command: str) -> None:
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network can be made here: {error}")


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[SmallDisk]:
    """A mount namespace in which the directory is another one."""
    (tmp_path / "m").mkdir(mode=0o700)
    disk = SmallDisk(tmp_path / "m", "8m,mode=0700")
    yield disk
    disk.close()


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[tuple[SmallDisk, Cable]]:
    """The same, with a network of its own and a cable to it."""
    if os.geteuid():
        pytest.skip("a cable between networks needs root")
    (tmp_path / "m").mkdir(mode=0o700)
    disk = SmallDisk(tmp_path / "m", "8m,mode=0700", ["net"])
    try:
        cable = Cable(disk)
        yield disk, cable
        cable.close()
    finally:
        disk.close()


async def test_images_between_directories_until_either_side_is_killed(tmp_path: Path, apart: SmallDisk) -> None:
    """The worker that comes, and the gateway that comes, are connected to those that are there."""
    async with served(tmp_path, tmp_path / "m", of_gateway=listening("127.0.0.1")) as site:
        far = await site.worker(apart.enter())
        await site.goes_by("memory")
        near = await site.worker()
        await site.goes_by("memory")
        said = await site.doctor()
        await site.worker(apart.enter())
        far.end_for_good()
        near.end_for_good()
        await site.goes_by("memory", at_once=16)
        (gateway,) = site.cluster.of(Role.GATEWAY)
        gateway.kill()
        await site.cluster.ready((MODEL,))
        await site.goes_by("memory")
        await site.is_empty()
    assert [text for text in said if "1 of 2 live workers do not share" in text and "over TCP" in text]


async def test_a_cable_that_is_pulled(tmp_path: Path, cable: tuple[SmallDisk, Cable]) -> None:
    """In the middle of images, each of which has its answer, through Redis; later they travel beside it again."""
    disk, wire = cable
    async with served(tmp_path, tmp_path / "m", of_gateway=listening(wire.here)) as site:
        await site.worker(disk.enter())
        await site.goes_by("memory")
        asked = asyncio.create_task(keep_asking(site, 6))
        wire.pull()
        await asked
        found = ways_of(await site.metrics())
        assert found.get("unreachable", 0) + found.get("old_worker", 0)
        wire.plug()
        await site.goes_by("memory")
        await site.is_empty()


async def keep_asking(site: Site, times: int) -> None:
    """Sends images in turns."""
    for _ in range(times):
        await site.ask(8)
