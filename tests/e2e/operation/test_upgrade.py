"""An upgrade, and its way back: programs of two versions of this project share a queue under load, and lose nothing."""

from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from qinfer.testing import wait_until
from tests.chaos.repository import write_stub
from tests.e2e.async_load import Load, wrong
from tests.support import models
from tests.support.installation import WITHIN_S, Callers, Installation, earlier_version
from tests.support.servers.servers import RedisServer, command, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(480)]

FAST, SLOW = "add_sub", "slow"


class Traffic:
    """Callers of both models at one gateway while the block runs: two who wait for their answers, one who does not.

    Args:
        url: The gateway.
        first: The number of the first asynchronous request.

    Attributes:
        callers: Those who wait.
        load: The asynchronous requests.
    """

    def __init__(self, url: str, first: int) -> None:
        self.callers = [Callers([url], FAST), Callers([url], SLOW)]
        self.load = Load(url, [FAST, SLOW], pause_s=0.02, first=first)
        self._stack = ExitStack()

    def more(self) -> None:
        """Waits until many more requests were answered and accepted."""
        accepted = len(self.load.accepted)
        for callers in self.callers:
            callers.more(20)
        wait_until(lambda: len(self.load.accepted) > accepted + 20, WITHIN_S, "accepted requests")

    @property
    def refused(self) -> list[str]:
        return [problem for callers in self.callers for problem in callers.refused]

    def __enter__(self) -> Self:
        for callers in self.callers:
            self._stack.enter_context(callers)
        self._stack.callback(self.load.stop)
        self.load.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def test_two_versions_share_a_queue(tmp_path: Path) -> None:
    """Workers are replaced before gateways, and both are put back, under load: each request has its answer."""
    old = earlier_version(tmp_path / "earlier")
    repository = tmp_path / "models"
    models.add_sub(repository, FAST)
    write_stub(repository, SLOW, dim=4, max_batch_size=4, delay_s=0.1)
    server = RedisServer(system_redis(), tmp_path, "--appendonly", "yes", "--maxmemory-policy", "noeviction")
    with server, server.client() as redis, ExitStack() as stack:
        installation = Installation(tmp_path, repository, server.url)
        gateways, workers, traffic = ([stack.enter_context(ExitStack()) for _ in range(3)] for _ in range(3))
        seen: list[Traffic] = []

        def begin(number: int, checkout: Path | None) -> str:
            """Starts a gateway, and the traffic to it; returns its URL."""
            url = gateways[number].enter_context(installation.gateway(*(checkout,) if checkout else ()))
            installation.serves(url, [FAST, SLOW])
            seen.append(traffic[number].enter_context(Traffic(url, 100_000 * number)))
            seen[-1].more()
            return url

        workers[0].enter_context(installation.worker(old))
        begin(0, old)
        workers[1].enter_context(installation.worker())
        installation.has_workers(2, [FAST, SLOW])
        seen[0].more()
        workers[0].close()
        seen[0].more()
        begin(1, None)
        traffic[0].close()  # as a load balancer does before a gateway ends
        gateways[0].close()
        seen[1].more()

        workers[2].enter_context(installation.worker(old))
        installation.has_workers(2, [FAST, SLOW])
        seen[1].more()
        workers[1].close()
        seen[1].more()
        last = begin(2, old)
        traffic[1].close()
        gateways[1].close()
        seen[2].more()
        traffic[2].close()

        lost = [wrong(last, each.load.accepted) for each in seen]
        letters = [command(redis, "XLEN", name) for name in redis.scan_iter("*}:dlq")]

    assert lost == [{}] * 3
    assert [each.refused for each in seen] == [[]] * 3
    assert not any(letters)
