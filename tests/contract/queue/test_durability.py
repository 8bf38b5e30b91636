"""What the settings promise of a write, against real servers: refused set-ups, waits for replicas and for the disk."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.queue import durability, keys
from qinfer.queue.durability import Durability
from qinfer.queue.entries import Acceptance, EntryAddress, Lane, RequestState
from qinfer.queue.lanes import Queue
from qinfer.queue.router import Call, Router
from qinfer.testing import eventually
from tests.support.servers.servers import RedisServer, SentinelSetup, command, matrix, system_redis, valkey, wait_until

KEY = "qinfer:{m#0}:written"
ON_DISK = ("--appendonly", "yes", "--appendfsync")
ADDRESS = EntryAddress("m", 0, "r1")
SHORT = {"command_timeout_s": 0.5}

T = TypeVar("T")


def settings_of(server: RedisServer | SentinelSetup, **changes: Any) -> RedisSettings:
    return RedisSettings.model_validate({"url": server.url, **changes})


@contextlib.asynccontextmanager
async def durable(server: RedisServer | SentinelSetup, **changes: Any) -> AsyncIterator[Durability]:
    settings = settings_of(server, **changes)
    router = await Router.connect(settings)
    try:
        durability = Durability(settings, router)
        await durability.check()
        yield durability
    finally:
        await router.close()


@contextlib.asynccontextmanager
async def connected(server: RedisServer, **changes: Any) -> AsyncIterator[Queue]:
    delivery = await Queue.connect(settings_of(server, **changes))
    try:
        yield delivery
    finally:
        await delivery.close()


async def add(durability: Durability, member: int) -> None:
    """Writes once: a repetition changes nothing, as with `accept`."""

    async def operation(call: Call) -> Any:
        return await call(b"SADD", KEY, member)

    await durability.write("m", 0, operation)


# --- what is refused at the start ---


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_policy_that_evicts_requests_is_refused(tmp_path: Path, policy: str) -> None:
    """Redis must refuse writes when its memory is full, not drop streams."""
    refused = pytest.raises(SettingsError, match=f"maxmemory-policy {policy}.*CONFIG SET maxmemory-policy noeviction")
    with RedisServer(system_redis(), tmp_path, "--maxmemory-policy", policy) as server, refused:
        await Queue.connect(settings_of(server))


async def test_where_config_is_forbidden_the_checks_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As managed services do it; one line of the log says so."""
    with RedisServer(system_redis(), tmp_path, "--rename-command", "CONFIG", "") as server:
        async with durable(server, durability="always") as durability:
            await add(durability, 1)

    assert [record.message for record in caplog.records if "CONFIG" in record.message] == [
        "redis forbids CONFIG GET: its eviction and durability settings are not checked"
    ]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--appendonly", "no"), "keeps no append-only file"),
        ((*ON_DISK, "everysec"), "appendfsync everysec and no WAITAOF"),
        ((*ON_DISK, "no"), "never syncs its append-only file"),
        ((*ON_DISK, "always", "--no-appendfsync-on-rewrite", "yes"), "does not sync .* while it rewrites it"),
    ],
    ids=["no file", "everysec", "never synced", "not synced while rewritten"],
)
async def test_always_is_refused_where_it_cannot_be_kept(
    tmp_path: Path, options: tuple[str, ...], problem: str
) -> None:
    """With what to set."""
    refused = pytest.raises(SettingsError, match=f"QINFER_REDIS__DURABILITY=always: .*{problem}; set .* in redis.conf")
    with RedisServer(system_redis(), tmp_path, *options) as server, refused:
        async with durable(server, durability="always"):
            pass


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (("--appendonly", "no"), "redis keeps no append-only file"),
        ((*ON_DISK, "no"), "redis never syncs its file"),
    ],
    ids=["no file", "never synced"],
)
async def test_a_server_that_loses_more_than_a_second_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: tuple[str, ...], warning: str
) -> None:
    """But it may be used: for development it is good enough."""
    with RedisServer(system_redis(), tmp_path, *options) as server:
        async with durable(server) as durability:
            await add(durability, 1)

    assert warning in caplog.text


async def test_always_needs_no_wait_where_each_write_is_synced(tmp_path: Path) -> None:
    """Redis syncs before it replies."""
    with RedisServer(system_redis(), tmp_path, *ON_DISK, "always") as server, server.client() as client:
        async with durable(server, durability="always") as durability:
            await add(durability, 1)

        assert client.smembers(KEY) == {b"1"}
        assert client.keys("*confirm*") == []


# --- the disk ---


async def test_always_waits_for_the_disk_where_redis_syncs_each_second(tmp_path: Path) -> None:
    """Many writes share a wait: else each of them would take up to a second."""
    with RedisServer(valkey(), tmp_path, *ON_DISK, "everysec") as server, server.client() as client:
        async with durable(server, durability="always") as durability:
            await asyncio.gather(*(add(durability, number) for number in range(200)))

        assert client.scard(KEY) == 200
        assert command(client, "INFO", "commandstats")["cmdstat_waitaof"]["calls"] <= 5
        server.kill()
        server.start()
        assert client.scard(KEY) == 200


async def test_a_repetition_waits_for_the_disk_where_redis_was_killed_before_the_first_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first acceptance was written and never confirmed; the repetition that finds it waits in its place."""
    acceptance = Acceptance(address=ADDRESS, lane=Lane("m", 1), frame=b"frame", body_hash="same", timeout_s=600.0)
    join = durability._Rounds.join

    async def killed(rounds: durability._Rounds) -> None:
        monkeypatch.setattr(durability._Rounds, "join", join)
        server.kill()
        await join(rounds)

    with RedisServer(valkey(), tmp_path, *ON_DISK, "everysec") as server:
        async with connected(server, durability="always") as delivery:
            monkeypatch.setattr(durability._Rounds, "join", killed)
            with pytest.raises(BrokerUnavailable, match="may have been accepted"):
                await delivery.requests.accept(acceptance)
        server.start()

        async with connected(server, durability="always") as delivery:
            with server.client() as client:
                before = _waits(client)  # the check of the settings asked once
                found = await delivery.requests.find(ADDRESS, "same")

                assert _waits(client) == before + 1
        assert found is not None
        assert not found.is_new


def _waits(client: Any) -> int:
    return int(command(client, "INFO", "commandstats")["cmdstat_waitaof"]["calls"])


# --- replicas ---


@pytest.fixture(params=[system_redis, *matrix(valkey)], ids=["redis-system", "valkey"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary and its replica; since 7.2 only writes move what a wait waits for."""
    binary = request.param
    homes = [tmp_path / name for name in ("primary", "replica")]
    for home in homes:
        home.mkdir()
    with RedisServer(binary(), homes[0], "--repl-diskless-sync-delay", "0") as primary:
        options = ("--replicaof", f"127.0.0.1 {primary.port}")
        with RedisServer(binary(), homes[1], *options) as replica, replica.client() as client:
            wait_until(lambda: command(client, "INFO", "replication")["master_link_status"] == "up")
            yield primary, replica


async def test_a_write_returns_when_the_replica_has_it(pair: tuple[RedisServer, RedisServer]) -> None:
    """Not before."""
    primary, replica = pair
    async with durable(primary, min_replicas=1) as durability:
        await asyncio.gather(*(add(durability, number) for number in range(200)))

    with primary.client() as client, replica.client() as copy:
        assert copy.scard(KEY) == 200
        assert command(client, "INFO", "commandstats")["cmdstat_wait"]["calls"] <= 5


async def test_a_write_that_the_replica_has_not_is_in_doubt(pair: tuple[RedisServer, RedisServer]) -> None:
    """So is its repetition over another connection, which writes nothing; once the replica is back, it is safe."""
    primary, replica = pair
    with replica.paused():
        for _ in range(2):
            async with durable(primary, min_replicas=1, **SHORT) as durability:
                with pytest.raises(BrokerUnavailable, match="only 0 of 1 replicas have it; repeat it with the same id"):
                    await add(durability, 1)

    async with durable(primary, min_replicas=1) as durability:
        await add(durability, 1)

    with replica.client() as copy:
        assert copy.smembers(KEY) == {b"1"}


async def test_a_repetition_that_the_replica_has_not_is_in_doubt(pair: tuple[RedisServer, RedisServer]) -> None:
    """Found by another gateway, it is told only once a replica has it: then the primary may be lost."""
    primary, replica = pair
    acceptance = Acceptance(address=ADDRESS, lane=Lane("m", 1), frame=b"frame", body_hash="same", timeout_s=600.0)
    with replica.paused():
        async with connected(primary, min_replicas=1, **SHORT) as delivery:
            with pytest.raises(BrokerUnavailable, match="only 0 of 1 replicas have it"):
                await delivery.requests.accept(acceptance)
        async with connected(primary, min_replicas=1, **SHORT) as delivery:
            with pytest.raises(BrokerUnavailable, match="only 0 of 1 replicas have it"):
                await delivery.requests.find(ADDRESS, "same")

    async with connected(primary, min_replicas=1) as delivery:
        assert await delivery.requests.find(ADDRESS, "same") is not None
    primary.kill()

    with replica.client() as copy:
        assert copy.exists(keys.request("m", 0, ADDRESS.id)) == 1


async def test_a_write_whose_connection_breaks_is_in_doubt(pair: tuple[RedisServer, RedisServer]) -> None:
    """A wait on another connection would say nothing about it."""
    primary, replica = pair
    async with durable(primary, min_replicas=1) as durability:
        with replica.paused(), primary.client() as client:
            writing = asyncio.create_task(add(durability, 1))
            await asyncio.to_thread(wait_until, lambda: "blocked_clients:1" in _clients(client))
            command(client, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

            with pytest.raises(BrokerUnavailable, match="may have been accepted"):
                await writing

        await add(durability, 1)


def _clients(client: Any) -> str:
    return f"blocked_clients:{command(client, 'INFO', 'clients')['blocked_clients']}"


async def test_a_cancelled_writer_costs_the_others_nothing(pair: tuple[RedisServer, RedisServer]) -> None:
    """They share its wait."""
    primary, replica = pair
    async with durable(primary, min_replicas=1) as durability:
        with replica.paused():
            writers = [asyncio.create_task(add(durability, number)) for number in range(3)]
            with primary.client() as client:
                await asyncio.to_thread(wait_until, lambda: "blocked_clients:1" in _clients(client))
            writers[0].cancel()

        await asyncio.gather(*writers[1:])

    assert writers[0].cancelled()


# --- failover ---


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_failover_loses_no_confirmed_write(tmp_path: Path) -> None:
    """With `min_replicas`: whatever returned before the primary was killed is there after its replica took over."""
    setup = SentinelSetup(system_redis(), tmp_path)
    try:
        async with durable(setup, min_replicas=1, command_timeout_s=1.0) as durability:
            safe: set[int] = set()
            old = setup.primary()

            await _write_until(durability, safe, 500)
            old.kill()
            await _write_until(durability, safe, 1000)

        await eventually(lambda: setup.primary() is not old, description="the Sentinel that is asked to know it")
        with setup.primary().client() as client:
            there = {int(member) for member in client.smembers(KEY)}
        assert safe <= there
    finally:
        setup.stop()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_failover_loses_no_accepted_request(tmp_path: Path) -> None:
    """Each is accepted once, whatever was repeated, and is found with the new primary."""
    setup = SentinelSetup(system_redis(), tmp_path)
    try:
        delivery = await Queue.connect(settings_of(setup, min_replicas=1, command_timeout_s=1.0))
        accepted: set[str] = set()
        old = setup.primary()

        await _accept_until(delivery, accepted, 100)
        old.kill()
        await _accept_until(delivery, accepted, 200)

        records = [await _read(partial(delivery.requests.record, EntryAddress("m", 0, name))) for name in accepted]
        assert {record.state for record in records if record is not None} == {RequestState.QUEUED}
        assert None not in records
        assert await _read(partial(delivery.depth, [Lane("m", 1)])) == [200]
        await eventually(lambda: setup.primary() is not old, description="the Sentinel that is asked to know it")
        await delivery.close()
    finally:
        setup.stop()


@pytest.mark.slow
async def test_killing_redis_loses_no_accepted_request(tmp_path: Path) -> None:
    """With `always`, again and again."""
    with RedisServer(system_redis(), tmp_path, *ON_DISK, "always") as server:
        delivery = await Queue.connect(settings_of(server, durability="always", command_timeout_s=1.0))
        accepted: set[str] = set()

        for count in (50, 100, 150):
            filling = asyncio.create_task(_accept_until(delivery, accepted, count))
            await eventually(lambda count=count: len(accepted) > count - 30, description="some accepted")  # type: ignore[misc]
            server.kill()
            await asyncio.to_thread(server.start)
            await filling

        assert None not in [await delivery.requests.record(EntryAddress("m", 0, name)) for name in accepted]
        assert await delivery.depth([Lane("m", 1)]) == [150]
        await delivery.close()


async def _read(read: Callable[[], Awaitable[T]]) -> T:
    """Reads until it is answered; a failover may go on for a while after the first writes."""
    while True:
        try:
            return await read()
        except BrokerUnavailable:
            await asyncio.sleep(0.05)


async def _accept_until(delivery: Queue, accepted: set[str], count: int) -> None:
    """Hands in requests, several at a time; what is in doubt is repeated with the same id."""

    async def accept(number: int) -> None:
        name = f"request-{number}"
        acceptance = Acceptance(address=EntryAddress("m", 0, name), lane=Lane("m", 1), frame=b"frame", timeout_s=600.0)
        while name not in accepted:
            try:
                await delivery.requests.accept(acceptance)
            except BrokerUnavailable:
                await asyncio.sleep(0.05)
            else:
                accepted.add(name)

    for first in range(len(accepted), count, 10):
        await asyncio.gather(*(accept(number) for number in range(first, first + 10)))


async def _write_until(durability: Durability, safe: set[int], count: int) -> None:
    """Writes numbers, several at a time, until so many are confirmed; what fails is repeated."""

    async def write(number: int) -> None:
        while number not in safe:
            try:
                await add(durability, number)
            except BrokerUnavailable:
                await asyncio.sleep(0.05)
            else:
                safe.add(number)

    for first in range(len(safe), count, 20):
        await asyncio.gather(*(write(number) for number in range(first, first + 20)))
