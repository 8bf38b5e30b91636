"""An upgrade to references, and its way back: images go through Redis while a worker lives that reads no memory.

The earlier version is the last one that knew no references. Images have 602 KB, and answers as many.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import httpx
import pytest

from qinfer.testing import wait_until
from tests.support.images import MODEL, held_bytes, problem_of, request_of, ways_of, write_model
from tests.support.installation import WITHIN_S, Installation, earlier_version
from tests.support.servers.servers import RedisServer, command, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

FIRST_FILE = "qinfer/segments/__init__.py"


def asked(client: httpx.Client, number: int) -> str:
    """Sends an image; returns what is wrong with its answer, empty = nothing."""
    path, body, headers = request_of(number)
    try:
        return problem_of(number, client.post(path, content=body, headers=headers))
    except httpx.HTTPError as error:
        return repr(error)


class Images:
    """Two callers that send images again and again while the block runs.

    Attributes:
        url: The gateway.
        answered: How many answers were right.
        wrong: What was wrong with the others.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered = 0
        self.wrong: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(1000 * n,), daemon=True) for n in range(2)]

    def more(self, count: int = 10) -> None:
        """Waits for so many more answers."""
        wanted = self.answered + count
        wait_until(lambda: self.answered >= wanted or bool(self.wrong), WITHIN_S, "answers")
        assert self.wrong == []

    def ways(self) -> dict[str, int]:
        """Returns how many requests went which way."""
        return ways_of(self._metrics())

    def held(self) -> float:
        """Returns the bytes of pending requests in the gateway's memory."""
        return held_bytes(self._metrics())

    def _metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics?scope=process", timeout=10.0).text

    def go_by(self, way: str) -> None:
        """Waits until requests go one way only."""
        found: list[int] = []

        def is_only_one() -> bool:
            before = self.ways()
            self.more()
            after = self.ways()
            found[:] = [sum(after.values()) - sum(before.values()), after.get(way, 0) - before.get(way, 0)]
            return found[0] == found[1] > 0

        wait_until(is_only_one, WITHIN_S, f"requests that go by {way}")

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=30.0) as client:
            while not self._over.wait(0.005):
                number += 1
                if problem := asked(client, number):
                    self.wrong.append(problem)
                else:
                    self.answered += 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Ends the callers when they are answered."""
        self._over.set()
        for thread in self._threads:
            thread.join(WITHIN_S)

    def __exit__(self, *_: object) -> None:
        self.stop()


class Site:
    """A queue, and programs of both versions; those of this one share memory."""

    def __init__(self, directory: Path, url: str, stack: ExitStack) -> None:
        self.old = earlier_version(directory / "earlier", FIRST_FILE)
        write_model(directory / "models")
        # Leases are short, so that a request that a stopped worker holds is soon another's.
        settings = {"QINFER_WORKER__LEASE_S": "3", "QINFER_WORKER__RENEW_EVERY_S": "1"}
        self.programs = Installation(directory, directory / "models", url, **settings)
        self.shares = {"QINFER_SEGMENTS__DIRECTORY": str(directory / "memory")}
        self.stack = stack

    def begun(self) -> ExitStack:
        """Returns a stack for a program that may end before the others."""
        return self.stack.enter_context(ExitStack())

    def images(self, gateway: ExitStack, *, is_old: bool = False) -> Images:
        """Starts a gateway, and callers of it."""
        how = self.programs.gateway(self.old) if is_old else self.programs.gateway(more=self.shares)
        url = gateway.enter_context(how)
        self.programs.serves(url, [MODEL])
        return gateway.enter_context(Images(url))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with _redis(tmp_path) as server, ExitStack() as stack:
        yield Site(tmp_path, server.url, stack)
        with server.client() as redis:
            assert not any(command(redis, "XLEN", name) for name in redis.scan_iter("*}:dlq"))


@contextmanager
def _redis(directory: Path) -> Iterator[RedisServer]:
    with RedisServer(system_redis(), directory, "--appendonly", "yes", "--maxmemory-policy", "noeviction") as server:
        yield server


def test_gateways_before_workers_and_back(site: Site) -> None:
    """Requests refer to memory only while all live workers read it."""
    old, new, late = site.begun(), site.begun(), site.begun()
    old.enter_context(site.programs.worker(site.old))
    images = site.images(site.begun())
    images.go_by("old_worker")
    assert "memory" not in images.ways()

    new.enter_context(site.programs.worker(more=site.shares))
    site.programs.has_workers(2, [MODEL])
    images.more()
    assert "memory" not in images.ways()

    old.close()
    images.go_by("memory")

    late.enter_context(site.programs.worker(site.old))
    site.programs.has_workers(2, [MODEL])
    images.go_by("old_worker")
    new.close()
    images.go_by("old_worker")

    assert set(images.ways()) == {"memory", "old_worker"}
    assert images.wrong == []


def test_workers_before_gateways_and_back(site: Site) -> None:
    """A worker of this version serves gateways of both, at the same time."""
    site.begun().enter_context(site.programs.worker(more=site.shares))
    before, during = site.begun(), site.begun()
    first = site.images(before, is_old=True)
    first.more()

    second = site.images(during)
    second.go_by("memory")
    first.more()
    before.close()
    second.more()

    third = site.images(site.begun(), is_old=True)
    third.more()
    during.close()
    third.more()

    assert first.wrong + second.wrong + third.wrong == []


def test_references_in_the_queue_outlive_a_downgrade_of_workers(site: Site) -> None:
    """The worker stands still; one of the earlier version leaves what it can't read to one of this version."""
    images: list[str] = []
    stands = site.stack.enter_context(site.programs.worker(more=site.shares))
    gateway = site.begun()
    load = site.images(gateway)
    load.go_by("memory")
    load.stop()
    before = load.ways()["memory"]
    stands.send_signal(signal.SIGSTOP)
    site.stack.callback(stands.send_signal, signal.SIGCONT)

    def ask(number: int) -> None:
        with httpx.Client(base_url=load.url, timeout=WITHIN_S) as client:
            images.append(asked(client, number))

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: load.ways()["memory"] == before + 6, WITHIN_S, "references in the queue")
    with site.programs.worker(site.old):
        wait_until(lambda: "frame of a newer qinfer released" in site.programs.log(), WITHIN_S, "a released reference")
        assert images == []
        site.begun().enter_context(site.programs.worker(more=site.shares))
        for thread in threads:
            thread.join(WITHIN_S)
        wait_until(lambda: load.held() == 0, WITHIN_S, "a gateway that holds nothing")

    assert images == [""] * 6
