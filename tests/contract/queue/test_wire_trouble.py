"""`Link` and `Router` when the server is a replica, full, loading or busy, and when Sentinels say where it is."""

import asyncio
import contextlib
import resource
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.models.store import ControlStore
from qinfer.queue import keys
from qinfer.queue.clients import Login, Sentinels, admin_client, blocking_client, parse_place
from qinfer.queue.connection import SentinelResolver
from qinfer.queue.router import Router
from tests.support.servers.servers import RedisCluster, RedisServer, SentinelSetup, command, system_redis

SHORT = {"connect_timeout_s": 0.3, "command_timeout_s": 0.3}


@contextlib.asynccontextmanager
async def connected(url: str, **changes: Any) -> AsyncIterator[Router]:
    router = await Router.connect(RedisSettings.model_validate({"url": url, **changes}))
    try:
        yield router
    finally:
        await router.close()


@contextlib.asynccontextmanager
async def store_of(server: RedisServer) -> AsyncIterator[ControlStore]:
    store = ControlStore(admin_client(RedisSettings.model_validate({"url": server.url})))
    try:
        yield store
    finally:
        await store.close()


async def until_it_answers(router: Router, *words: Any) -> Any:
    """Repeats a command until the server takes it; whatever else than `BrokerUnavailable` comes, fails the test."""
    while True:
        try:
            return await router.call(0, *words)
        except BrokerUnavailable:
            await asyncio.sleep(0.02)


async def until_refused(router: Router) -> None:
    """Asks until an answer is an error."""
    while True:
        await router.call(0, b"PING")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "qinfer.queue.connection"]


async def test_a_replica_is_not_taken_for_the_queue(tmp_path: Path) -> None:
    """It answers reads, and would refuse the first request."""
    refused = pytest.raises(BrokerUnavailable, match="it is a replica, which takes no writes; see QINFER_REDIS__URL")
    with RedisServer(system_redis(), tmp_path, "--replicaof", "127.0.0.1 1") as server, refused:
        await Router.connect(RedisSettings.model_validate({"url": server.url, **SHORT}))


async def test_a_full_disk_leaves_reads(tmp_path: Path) -> None:
    """Redis refuses PING, too, then: whoever connects may read nevertheless, and every refusal tells why."""
    refused = pytest.raises(BrokerUnavailable, match="the queue can't write to its disk")
    with RedisServer(system_redis(), tmp_path, "--appendonly", "yes") as server:
        async with connected(server.url, **SHORT) as router:
            await router.call(0, b"SET", b"x", b"1")
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            with refused:
                while True:
                    await router.call(0, b"SET", b"x", b"2")
        async with connected(server.url, **SHORT) as router, store_of(server) as store:
            assert await router.call(0, b"GET", b"x") is not None
            with refused:
                await store.wake()


async def test_a_primary_that_becomes_a_replica_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Commands fail while it is one; the log says so once, however often they are tried."""
    with RedisServer(system_redis(), tmp_path) as server, server.client() as client:
        async with connected(server.url, **SHORT) as router:
            command(client, "REPLICAOF", "127.0.0.1", "1")
            for _ in range(3):
                with pytest.raises(BrokerUnavailable):
                    await router.call(0, b"SET", b"x", b"1")
            command(client, "REPLICAOF", "NO", "ONE")

            assert await until_it_answers(router, b"SET", b"x", b"1") == b"OK"

    assert len(warnings_of(caplog)) == 2  # lost; can't be reached


async def test_too_few_replicas_are_waited_for(tmp_path: Path) -> None:
    """The primary may have been cut off, with another in its place: the connection is made anew."""
    with RedisServer(system_redis(), tmp_path, "--min-replicas-to-write", "1") as server, server.client() as client:
        async with connected(server.url) as router:
            with pytest.raises(BrokerUnavailable, match="too few replicas"):
                await router.call(0, b"SET", b"x", b"1")
            command(client, "CONFIG", "SET", "min-replicas-to-write", "0")

            assert await until_it_answers(router, b"SET", b"x", b"1") == b"OK"


async def test_a_server_without_room_for_a_connection_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start it is reported; later the link gets in when there is room."""
    with RedisServer(system_redis(), tmp_path, "--maxclients", "2") as server, server.client() as first:
        first.ping()
        async with connected(server.url) as router:
            with pytest.raises(BrokerUnavailable, match=r"maxclients|broke before it answered"):
                await Router.connect(RedisSettings.model_validate({"url": server.url, **SHORT}))
            command(first, "CONFIG", "SET", "maxclients", "1")
            command(first, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            with pytest.raises(BrokerUnavailable):
                await router.call(0, b"PING")
            command(first, "CONFIG", "SET", "maxclients", "2")

            assert await until_it_answers(router, b"PING") == b"PONG"

    assert "Exception" not in caplog.text


async def test_data_that_is_still_loaded_is_waited_for(tmp_path: Path) -> None:
    """The connection is not used before: every command would be refused."""
    slowly = ("--key-load-delay", "300", "--loading-process-events-interval-bytes", "1024")
    with RedisServer(system_redis(), tmp_path, *slowly) as server:
        with server.client() as client:
            client.mset({f"key-{number}": "x" * 100 for number in range(2000)})
            client.save()
        server.stop()
        server.start(loaded=False)

        async with connected(server.url, connect_timeout_s=50) as router:
            assert await router.call(0, b"DBSIZE") == 2000


async def test_a_server_that_is_busy_with_a_script_is_unavailable(tmp_path: Path) -> None:
    """Until the script ends."""
    with RedisServer(system_redis(), tmp_path, "--lua-time-limit", "1") as server, server.client() as client:
        async with connected(server.url) as router:
            endless = threading.Thread(target=_run_endlessly, args=(server,))
            endless.start()
            with pytest.raises(BrokerUnavailable, match="busy with a script"):
                await until_refused(router)
            command(client, "SCRIPT", "KILL")
            endless.join()

            assert await until_it_answers(router, b"PING") == b"PONG"


def _run_endlessly(server: RedisServer) -> None:
    with server.client() as client, contextlib.suppress(redis.ResponseError):
        client.eval("while true do end", 0)


async def test_a_server_that_is_away_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And is not asked in a tight loop: the pauses grow."""
    with RedisServer(system_redis(), tmp_path) as server:
        async with connected(server.url, **SHORT) as router:
            server.stop()
            for _ in range(5):
                with pytest.raises(BrokerUnavailable):
                    await router.call(0, b"PING")
            server.start()

            assert await until_it_answers(router, b"PING") == b"PONG"

    assert len(warnings_of(caplog)) <= 3  # lost; refused; and perhaps: it loads


async def test_an_operation_follows_its_slot(redis_cluster: RedisCluster) -> None:
    """All of it goes over one connection, to the node that has the slot now."""
    async with connected(redis_cluster.url, cluster=True) as router:
        slot = keys.slot(b"moved")
        router._table[slot] = next(link for link in set(router._table) if link is not router._table[slot])
        blocking = router.blocking(slot, "test", 0.5)

        async def operation(call: Callable[..., Any]) -> Any:
            await call(b"SET", b"moved", b"1", b"PX", b"1000")
            return await call(b"GET", b"moved")

        connection, value = await blocking.run(operation)

        assert value == b"1"
        assert not connection.lost.is_set()


# --- Sentinels ---


def test_a_url_of_sentinels_is_read() -> None:
    """Places, service, and how to greet the node they name; without the password in what may be logged."""
    place = parse_place("redis+sentinel://me:s%40cret@one:26380,two,[::1]/queue/3")

    assert isinstance(place, Sentinels)
    assert place.places == (("one", 26380), ("two", 26379), ("::1", 26379))
    assert (place.service, place.node.db, place.node.username, place.node.password) == ("queue", 3, "me", "s@cret")
    assert "cret" not in repr(place)


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://one:26379",
        "redis+sentinel://one:secret,two/queue",
        "redis+sentinel://,two/queue",
        "redis+sentinel://one/queue/db",
        "http+sentinel://one/queue",
        "redis+sentinel://one/queue?colour=red",
    ],
)
def test_a_url_of_sentinels_that_is_none_names_the_setting(url: str) -> None:
    """And what it accepts; the password is not repeated."""
    with pytest.raises(SettingsError, match=r"QINFER_REDIS__URL.*expected redis://") as raised:
        parse_place(url)

    assert "secret" not in raised.value.message


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:secret/@one:6379/0",
        "redis://:12/secret@one",
        "redis://:a?secret=b@one",
        "redis://:a#secret@one",
        "redis://:secret@[::1",
        "unix://:a?secret=b@/tmp/redis.sock",
        "rediss+sentinel://:12/secret@one/queue",
        "secret@one:6379",
    ],
)
def test_a_url_whose_password_is_not_encoded_is_refused_without_it(url: str) -> None:
    """The password would be taken for a port, a path or an option, and be shown as such."""
    with pytest.raises(SettingsError, match=r"QINFER_REDIS__URL: .*%2F.*expected redis://") as raised:
        parse_place(url)

    assert "secret" not in raised.value.message


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSetup]:
    setup = SentinelSetup(system_redis(), tmp_path_factory.mktemp("sentinels"))
    yield setup
    setup.stop()


async def test_sentinels_lead_every_client_to_the_primary(sentinels: SentinelSetup) -> None:
    """The hot way, its blocking reads, and redis-py's two."""
    settings = RedisSettings.model_validate({"url": sentinels.url})
    async with connected(sentinels.url) as router:
        await router.call(0, b"SET", b"x", b"1")
        blocking = router.blocking(0, "test", 0.1)
        admin, renewing = admin_client(settings), blocking_client(Login.from_settings(settings))

        assert await blocking.call(b"GET", b"x") == b"1"
        assert await admin.get("x") == b"1"
        assert renewing.get("x") == b"1"
        await admin.aclose()
        renewing.close()


async def test_each_question_begins_at_another_sentinel() -> None:
    """One that is cut off names an old primary for ever: the next is asked when that one turns out to be none."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"queue\r\n")
        port = b"%d" % writer.get_extra_info("sockname")[1]  # so that the answer tells who gave it
        writer.write(b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%b\r\n" % (len(port), port))
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    settings = RedisSettings.model_validate(
        {"url": f"redis+sentinel://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/queue/0"}
    )
    place = parse_place(settings.url.get_secret_value())
    assert isinstance(place, Sentinels)
    resolver = SentinelResolver(place, settings)

    named = [(await resolver.resolve()).port for _ in range(4)]

    assert named in (ports * 2, ports[::-1] * 2)
    for server in servers:
        server.close()
        await server.wait_closed()


async def test_a_sentinel_that_is_gone_is_passed_over(sentinels: SentinelSetup) -> None:
    """One that answers is enough."""
    async with connected(sentinels.url.replace("//", "//127.0.0.1:1,", 1)) as router:
        for link in router.nodes():
            for _ in range(4):
                assert (await link.resolve()).port == sentinels.primary().port


@pytest.mark.parametrize(
    ("url", "changes", "problem"),
    [
        ("/other/0", {}, "the Sentinels know no service 'other'"),
        (
            "/queue/0",
            {"sentinel_password": "x"},
            "QINFER_REDIS__SENTINEL_PASSWORD: the Sentinels use none; unset it",
        ),
        ("/queue/0", {"cluster": True}, "QINFER_REDIS__CLUSTER=false"),
    ],
    ids=["service", "password", "cluster"],
)
async def test_a_wrong_setting_for_sentinels_is_told(
    sentinels: SentinelSetup, url: str, changes: dict[str, Any], problem: str
) -> None:
    """At once: to wait would not help."""
    with pytest.raises(SettingsError, match=problem):
        async with connected(sentinels.url.replace("/queue/0", url), **changes):
            pass


async def test_what_is_no_sentinel_is_told(tmp_path: Path) -> None:
    """The port of the Redis itself, perhaps."""
    with RedisServer(system_redis(), tmp_path) as server, pytest.raises(QinferError, match="not a Sentinel"):
        await Router.connect(
            RedisSettings.model_validate({"url": f"redis+sentinel://127.0.0.1:{server.port}/queue", **SHORT})
        )
