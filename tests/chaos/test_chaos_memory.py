"""Images while memory can't be shared: separate namespaces, no memory, no descriptors. Each has its answer.

The processes are real, and so are the limits; where the machine makes no namespaces, those tests are skipped.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from qinfer.segments.shelf import CHALLENGE_BYTES, connected, owners, socket_path
from qinfer.segments.shelf import _address as address
from qinfer.testing import eventually
from tests.chaos.cluster import READY_WITHIN_S, Cluster, running_cluster
from tests.chaos.member import Member, Role
from tests.support.images import MODEL, held_bytes, problem_of, request_of, ways_of, write_model
from tests.support.small_disk import SmallDisk
from tests.support.small_memory import SmallMemory

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(240)]

PIDS = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
"""A container's own process ids."""


class Site:
    """A gateway and its workers, who share a directory unless the test has it otherwise.

    Attributes:
        cluster: The processes.
        memory: The directory.
    """

    def __init__(self, cluster: Cluster, memory: Path, client: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.memory = memory
        self._client = client
        self._numbers = iter(range(1, 10**6))

    async def worker(self, enter: Sequence[str] = ()) -> Member:
        """Starts a worker, whose command begins with `enter`; returns once the gateway has heard of it."""
        before = len(await self.cluster.serving(MODEL))
        self.cluster.enter = enter
        member = self.cluster.add(Role.WORKER)

        async def is_there() -> bool:
            return len(await self.cluster.serving(MODEL)) > before

        await eventually(is_there, READY_WITHIN_S, "another worker")
        await self.cluster.ready((MODEL,))
        return member

    async def ask(self, count: int) -> None:
        """Sends some images at once; each has its answer."""
        problems = await asyncio.gather(*[self._ask(next(self._numbers)) for _ in range(count)])
        assert problems == [""] * count

    async def _ask(self, number: int) -> str:
        path, body, headers = request_of(number)
        return problem_of(number, await self._client.post(path, content=body, headers=headers))

    async def metrics(self) -> str:
        return (await self._client.get("/metrics?scope=process")).text

    async def goes_by(self, way: str, *, at_once: int = 4) -> None:
        """Waits until requests go one way only."""

        async def is_only_one() -> bool:
            before = ways_of(await self.metrics())
            await self.ask(at_once)
            after = ways_of(await self.metrics())
            return after == before | {way: before.get(way, 0) + at_once}

        await eventually(is_only_one, 40.0, f"requests that go by {way}")

    async def is_empty(self) -> None:
        """Waits until the gateway holds nothing."""

        async def holds_nothing() -> bool:
            return held_bytes(await self.metrics()) == 0

        await eventually(holds_nothing, 10.0, "a gateway that holds nothing")

    async def doctor(self) -> list[str]:
        """Returns what `qinfer doctor` says of large tensors."""
        argv = [sys.executable, "-m", "qinfer.cli.main", "doctor", "--no-runtimes", "--json"]
        ran = await asyncio.to_thread(subprocess.run, argv, env=self.cluster.env, capture_output=True, timeout=60)
        findings = json.loads(ran.stdout)["findings"]
        return [one["text"] for one in findings if one["subject"] == "large tensors"]


@asynccontextmanager
async def served(
    directory: Path,
    memory: Path,
    enter: Sequence[str] = (),
    of_gateway: Mapping[str, str] | None = None,
    of_all: Mapping[str, str] | None = None,
) -> AsyncIterator[Site]:
    """Runs a gateway, with settings of its own and of all programs, without a worker."""
    write_model(directory / "models")
    settings = {"QINFER_SEGMENTS__DIRECTORY": str(memory), "QINFER_LIMITS__WAIT_FOR_WORKERS_S": "30", **(of_all or {})}
    async with running_cluster(directory, directory / "models", gateways=0, workers=0, settings=settings) as cluster:
        cluster.enter = enter
        cluster.add(Role.GATEWAY, settings=of_gateway)
        async with httpx.AsyncClient(base_url=cluster.urls[0], timeout=60.0) as client:
            yield Site(cluster, memory, client)


@pytest.fixture(params=["mount", "net"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, SmallDisk]]:
    """A directory, and namespaces in which it is another, empty one; without a network, too."""
    (tmp_path / "m").mkdir(mode=0o700)
    disk = SmallDisk(tmp_path / "m", "8m,mode=0700", [] if request.param == "mount" else ["net"])
    yield tmp_path / "m", disk
    disk.close()


async def test_a_worker_with_a_directory_of_its_own_gets_whole_requests(
    tmp_path: Path, far: tuple[Path, SmallDisk]
) -> None:
    """Requests travel as to another machine, which `qinfer doctor` explains, until that worker has gone."""
    memory, disk = far
    async with served(tmp_path, memory) as site:
        apart = await site.worker(disk.enter())
        await site.goes_by("old_worker")
        await site.worker()
        await site.goes_by("old_worker")
        said = await site.doctor()
        apart.end_for_good()
        await site.goes_by("memory")
        await site.is_empty()

        assert ways_of(await site.metrics()).keys() == {"memory", "old_worker"}
    assert [text for text in said if text.startswith("1 of 2 live workers do not share")]


class Between(threading.Thread):
    """A program between a worker, in whose directory it listens, and a gateway.

    It passes on `half` of the gateway's first message and stays, or cuts the connection there, or passes on all.
    """

    def __init__(self, listener: socket.socket, gateway: Path, how: str) -> None:
        super().__init__(daemon=True)
        self.heard = threading.Event()
        self._listener, self._gateway, self._how = listener, gateway, how

    def run(self) -> None:
        with ExitStack() as stack:
            while True:
                try:
                    near = stack.enter_context(self._listener.accept()[0])
                except OSError:  # it is over
                    return
                with suppress(OSError):  # the worker also looks whether somebody listens
                    self._pass_on(near, stack.enter_context(connected(self._gateway)))

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        for connection in (near, far):
            connection.settimeout(10.0)
        challenge = far.recv(CHALLENGE_BYTES)
        near.send(challenge if self._how == "all" else challenge[: len(challenge) // 2])
        if self._how == "all":
            far.send(near.recv(1024))
        self.heard.set()
        if self._how == "cut":
            far.close()
            near.close()


@pytest.mark.parametrize("how", ["half", "cut", "all"])
async def test_a_program_between_worker_and_gateway_holds_nothing_up(tmp_path: Path, how: str) -> None:
    """The program can't pass a proof on, which names the process that the worker sees; so tensors go through Redis."""
    memory = tmp_path / "m"
    memory.mkdir(mode=0o700)
    with ExitStack() as stack:
        disk = SmallDisk(memory, "8m,mode=0700")
        stack.callback(disk.close)
        async with served(tmp_path, memory) as site:
            await eventually(lambda: bool(owners(memory)), 60.0, "the gateway's socket")
            (name,) = owners(memory)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            with address(socket_path(disk.seen, name)) as place:
                listener.bind(place)
            listener.listen()
            between = Between(listener, socket_path(memory, name), how)
            between.start()
            await site.worker(disk.enter())
            await eventually(between.heard.is_set, 20.0, "a worker at the program between")
            for _ in range(3):
                await site.goes_by("old_worker")
            await site.is_empty()
            listener.shutdown(socket.SHUT_RDWR)

            assert ways_of(await site.metrics()).keys() == {"old_worker"}


@pytest.fixture
def container() -> Sequence[str]:
    """The beginning of a command that runs with its own process ids."""
    try:
        subprocess.run([*PIDS, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no namespace of process ids can be made here: {error}")
    return PIDS


async def test_containers_with_a_volume_share_memory(tmp_path: Path, container: Sequence[str]) -> None:
    """Neither sees the other's process id."""
    async with served(tmp_path, tmp_path / "m", container) as site:
        await site.worker(container)
        await site.goes_by("memory")
        await site.is_empty()
        for member in site.cluster.members:  # unshare(1) passes no signal on
            member.end_for_good()
            member.kill()


@contextmanager
def limited(member: Member, what: int, most: int) -> Iterator[None]:
    """Bounds a process while the block runs."""
    before = resource.prlimit(member.pid, what)
    resource.prlimit(member.pid, what, (most, before[1]))
    yield
    resource.prlimit(member.pid, what, before)


def without_descriptors(member: Member) -> int:
    """Returns the bound that lets a process open nothing more."""
    used = {int(name) for name in os.listdir(f"/proc/{member.pid}/fd")}
    return min(set(range(len(used) + 1)) - used)


def connections(memory: Path) -> int:
    """Returns how many connections there are at the sockets in a directory."""
    names = tuple(path.name for path in memory.iterdir())
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(words[-1].endswith(names) and words[5] == "03" for words in lines)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A gateway and a worker that are connected, and have no segment yet."""
    async with served(tmp_path, tmp_path / "m") as site:
        await site.worker()
        await eventually(lambda: connections(site.memory) == 2, 10.0, "both connections")
        yield site


@pytest.fixture
def small() -> Iterator[SmallMemory]:
    memory = SmallMemory(f"qinfer-test-{os.getpid()}", 2**30)
    yield memory
    memory.close()


async def test_a_gateway_whose_cgroup_is_full_sends_requests_whole(tmp_path: Path, small: SmallMemory) -> None:
    """At the limit the kernel would kill it; all requests are answered, those of later, too, and in memory."""
    budget = {"QINFER_LIMITS__MAX_RECEIVING_BYTES": str(8 * 2**20)}
    async with served(tmp_path, tmp_path / "m", small.enter(), of_all=budget) as site:
        worker = await site.worker()
        (gateway,) = site.cluster.of(Role.GATEWAY)
        await site.goes_by("memory")
        small.limit(small.used_bytes + 64 * 2**20)
        worker.send(signal.SIGSTOP)
        asked = asyncio.create_task(site.ask(90))

        async def are_submitted() -> bool:
            return sum(ways_of(await site.metrics()).values()) >= 90

        await eventually(are_submitted, 20.0, "90 images in the queue")
        worker.send(signal.SIGCONT)
        await asked
        ways = ways_of(await site.metrics())
        await site.goes_by("memory")
        await site.is_empty()

        assert ways["no_memory"] > 0
        assert (small.killed, gateway.starts) == (0, 1)


@pytest.mark.parametrize("limit", ["size", "descriptors"])
async def test_a_gateway_without_memory_sends_requests_whole(site: Site, limit: str) -> None:
    """A gateway that may make no segment counts `no_memory`, and uses memory once there is some."""
    (gateway,) = site.cluster.of(Role.GATEWAY)
    await site.metrics()  # opens the connection
    what, most = resource.RLIMIT_FSIZE, 2**20
    if limit == "descriptors":
        what, most = resource.RLIMIT_NOFILE, without_descriptors(gateway)
    with limited(gateway, what, most):
        await site.goes_by("no_memory", at_once=1)
        assert "memory" not in ways_of(await site.metrics())
    await site.goes_by("memory")
    await site.is_empty()


async def test_a_worker_without_descriptors_gets_whole_requests(site: Site) -> None:
    """A worker can't map the gateway's first segment; the request that lies there is answered when it can."""
    (worker,) = site.cluster.of(Role.WORKER)
    with limited(worker, resource.RLIMIT_NOFILE, without_descriptors(worker)):
        first = asyncio.create_task(site.ask(1))
        await site.goes_by("old_worker")
    await first
    await site.goes_by("memory")
    await site.is_empty()
