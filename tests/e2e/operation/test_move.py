"""Moves to another Redis under load: nothing that was accepted is lost, with a stop of the programs and without."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from qinfer.testing import wait_until
from tests.e2e.async_load import Load, wrong
from tests.support import models
from tests.support.installation import WITHIN_S, Callers, Installation
from tests.support.proxy import Proxy
from tests.support.servers.servers import RedisCluster, RedisServer, SentinelSetup, command, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

MODEL = "add_sub"
DURABLE = ("--maxmemory-policy", "noeviction", "--appendonly", "yes")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.add_sub(tmp_path / "models", MODEL)
    return tmp_path / "models"


class Pair:
    """A Redis, and the empty one that follows it.

    Args:
        directory: For their files.
        stack: Ends them.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        for name in ("old", "new"):
            (directory / name).mkdir()
        self.old = stack.enter_context(RedisServer(system_redis(), directory / "old", *DURABLE))
        following = ("--replicaof", f"127.0.0.1 {self.old.port}")
        self.new = stack.enter_context(RedisServer(system_redis(), directory / "new", *DURABLE, *following))

    def promote(self) -> None:
        """Waits until the new one has everything, makes it the primary, and ends the old one."""
        wait_until(lambda: replication(self.new)["master_link_status"] == "up", WITHIN_S, "the copy")
        written = int(str(replication(self.old)["master_repl_offset"]))
        wait_until(
            lambda: int(str(replication(self.new)["master_repl_offset"])) >= written, WITHIN_S, "the last writes"
        )
        with self.new.client() as client:
            command(client, "REPLICAOF", "NO", "ONE")
        self.old.kill()


def replication(server: RedisServer) -> dict[str, object]:
    with server.client() as client:
        return dict(command(client, "INFO", "replication"))


@contextmanager
def running(installation: Installation) -> Iterator[tuple[str, Load]]:
    """Runs a gateway and a worker, and a load of asynchronous requests until the block ends."""
    with installation.gateway() as url, installation.worker():
        installation.serves(url, [MODEL])
        load = Load(url, [MODEL], pause_s=0.005)
        load.start()
        try:
            wait_until(lambda: len(load.accepted) > 100, WITHIN_S, "requests")
            yield url, load
        finally:
            load.stop()


def test_with_a_stop(tmp_path: Path, repository: Path) -> None:
    """Gateways and workers are stopped, and started on the new Redis."""
    with ExitStack() as stack:
        pair = Pair(tmp_path, stack)
        with running(Installation(tmp_path, repository, pair.old.url)) as (_, load):
            pass

        pair.promote()
        installation = Installation(tmp_path, repository, pair.new.url)
        with installation.gateway() as url, installation.worker():
            installation.serves(url, [MODEL])
            lost = wrong(url, load.accepted)

    assert lost == {}


def switch(installation: Installation, move: Callable[[], None]) -> list[str]:
    """Runs programs under load, moves, and returns what callers who wait were told; nothing accepted may be lost."""
    with running(installation) as (url, load):
        with Callers([url], MODEL) as callers:
            callers.more(20)
            move()
            answered, accepted = callers.answered.total(), len(load.accepted)
            wait_until(lambda: callers.answered.total() > answered + 100, WITHIN_S, "answers from the new Redis")
            wait_until(lambda: len(load.accepted) > accepted + 100, WITHIN_S, "requests in the new Redis")
        load.stop()
        assert wrong(url, load.accepted) == {}
    return callers.refused


def are_retryable(refused: list[str]) -> bool:
    return all(problem.startswith("503") and "try again" in problem for problem in refused)


def test_by_a_name_that_leads_elsewhere(tmp_path: Path, repository: Path) -> None:
    """No program is restarted: writes are paused, the new Redis is promoted, the name points to it."""
    with ExitStack() as stack:
        pair = Pair(tmp_path, stack)
        name = stack.enter_context(Proxy(pair.old.port))

        def move() -> None:
            wait_until(lambda: replication(pair.new)["master_link_status"] == "up", WITHIN_S, "the copy")
            with pair.old.client() as client:
                command(client, "CLIENT", "PAUSE", 30_000, "WRITE")
            name.target = pair.new.port
            pair.promote()

        refused = switch(Installation(tmp_path, repository, f"redis://127.0.0.1:{name.port}/0"), move)

    assert are_retryable(refused)


def test_by_a_failover_of_sentinels(tmp_path: Path, repository: Path) -> None:
    """Writes are paused before: what a primary accepts until it hears that it is none any more would be lost."""
    setup = SentinelSetup(system_redis(), tmp_path)
    try:
        old = setup.primary()

        def move() -> None:
            with old.client() as client:
                command(client, "CLIENT", "PAUSE", 20_000, "WRITE")
                written = int(str(replication(old)["master_repl_offset"]))
                for node in setup.nodes:
                    wait_until(lambda n=node: int(str(replication(n)["master_repl_offset"])) >= written, WITHIN_S)  # type: ignore[misc]  # a lambda's default has no type
            with redis.Redis(port=setup.ports[0], protocol=2) as client:
                command(client, "SENTINEL", "FAILOVER", SentinelSetup.service)
            wait_until(lambda: setup.primary() is not old, WITHIN_S, "another primary")

        refused = switch(Installation(tmp_path, repository, setup.url), move)
    finally:
        setup.stop()

    assert are_retryable(refused)


def test_by_a_failover_of_a_cluster(tmp_path: Path, repository: Path) -> None:
    """Each replica takes its primary's place; the cluster pauses writes itself."""
    setup = RedisCluster(system_redis(), tmp_path, replicated=True)
    try:

        def move() -> None:
            for replica in setup.replicas:
                with replica.client() as client:
                    command(client, "CLUSTER", "FAILOVER")
                    wait_until(lambda c=client: command(c, "ROLE")[0] == b"master", WITHIN_S, "another primary")  # type: ignore[misc]  # as above

        refused = switch(Installation(tmp_path, repository, setup.url, QINFER_REDIS__CLUSTER="true"), move)
    finally:
        setup.stop()

    assert are_retryable(refused)
