"""`Link` and `Router` against real servers: order, size, bounds, time-outs, reconnects, redirects."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.queue import keys
from qinfer.queue.clients import admin_client, parse
from qinfer.queue.connection import CommandRefused, RedisConnection, pack
from qinfer.queue.router import Router
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.support.servers.servers import RedisCluster, RedisServer, make_certificate, system_redis

PING = pack((b"PING",))


class Answers:
    """Collects replies until there are as many as expected."""

    def __init__(self, count: int = 1) -> None:
        self.replies: list[Any] = []
        self._count = count
        self._done = asyncio.Event()

    def __call__(self, reply: Any) -> None:
        self.replies.append(reply)
        if len(self.replies) == self._count:
            self._done.set()

    async def all(self) -> list[Any]:
        await self._done.wait()
        return self.replies


class Deaf(asyncio.Transport):
    """Writes to nobody."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        pass


async def connect(server: RedisServer, **changes: Any) -> Router:
    return await Router.connect(RedisSettings.model_validate({"url": server.url, **changes}))


async def test_ten_thousand_sends_of_one_tick_are_answered_in_order(new_redis: RedisServer) -> None:
    """Callbacks are first in, first out."""
    router = await connect(new_redis)
    answers = Answers(10_000)

    for number in range(10_000):
        router.send(0, pack((b"ECHO", b"%d" % number)), answers)

    assert await answers.all() == [b"%d" % number for number in range(10_000)]
    await router.close()


async def test_a_large_value_passes_both_ways(new_redis: RedisServer) -> None:
    """Far more than a socket's buffer."""
    router = await connect(new_redis)
    value = os.urandom(2**20) * 30

    assert await router.call(0, b"ECHO", value) == value
    await router.close()


async def test_an_error_reply_goes_to_the_command_that_caused_it(new_redis: RedisServer) -> None:
    """As a value to a callback, and raised from a call."""
    router = await connect(new_redis)
    answers = Answers(3)

    for words in ((b"PING",), (b"NONSENSE",), (b"PING",)):
        router.send(0, pack(words), answers)
    _, error, _ = await answers.all()

    assert isinstance(error, CommandRefused)
    with pytest.raises(CommandRefused, match="unknown command"):
        await router.call(0, b"NONSENSE")
    await router.close()


async def test_a_callback_that_raises_costs_the_others_nothing(
    new_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the next callback gets its reply."""
    router = await connect(new_redis)
    answers = Answers()

    def fail(_: Any) -> None:
        raise ValueError("callback")

    router.send(0, PING, fail)
    router.send(0, PING, answers)

    assert await answers.all() == [b"PONG"]
    assert "callback of a redis reply failed" in caplog.text
    await router.close()


async def test_a_reply_that_comes_with_the_cancellation_is_not_lost() -> None:
    """It goes where late replies go: a fetch's entries must be given back."""
    connection, late = RedisConnection(RedisSettings(), timeout_s=60.0), Answers()
    connection.connection_made(Deaf())
    call = asyncio.create_task(connection.call(b"PING", late=late))
    await asyncio.sleep(0)

    connection.data_received(b"+PONG\r\n")
    call.cancel()
    await asyncio.wait([call])

    assert call.cancelled()
    assert await late.all() == [b"PONG"]
    connection.connection_lost(None)


async def test_a_full_buffer_refuses_at_once(new_redis: RedisServer) -> None:
    """Memory is bounded; what was accepted before is still answered."""
    router = await connect(new_redis, max_buffered_bytes=1000)
    answers = Answers(2)
    router.send(0, pack((b"ECHO", bytes(600))), answers)
    router.send(0, pack((b"ECHO", bytes(600))), answers)

    with pytest.raises(BrokerUnavailable, match="too much"):
        router.send(0, PING, answers)

    assert await answers.all() == [bytes(600), bytes(600)]
    assert await router.call(0, b"PING") == b"PONG"
    await router.close()


async def test_a_server_that_is_silent_for_too_long_counts_as_lost(tmp_path: Path) -> None:
    """The watchdog fails what is owed, and the link comes back when the server does."""
    with RedisServer(system_redis(), tmp_path) as server:
        router = await connect(server, command_timeout_s=0.2)
        answers = Answers()
        server.process.send_signal(signal.SIGSTOP)
        try:
            router.send(0, PING, answers)
            [lost] = await answers.all()
        finally:
            server.process.send_signal(signal.SIGCONT)

        assert isinstance(lost, BrokerUnavailable)
        assert await _eventually(router, b"PING") == b"PONG"
        await router.close()


async def test_a_process_that_was_stopped_does_not_blame_the_server(new_redis: RedisServer) -> None:
    """The timers of such a process are due before it has read what came meanwhile; so it waits once more."""
    router = await connect(new_redis, command_timeout_s=0.5)
    answers = Answers()
    new_redis.process.send_signal(signal.SIGSTOP)
    try:
        router.send(0, PING, answers)
        await asyncio.sleep(0)
        time.sleep(1.2)  # noqa: ASYNC251 - stands for a stopped process
        await asyncio.sleep(0.01)
        assert answers.replies == []
    finally:
        new_redis.process.send_signal(signal.SIGCONT)

    assert await answers.all() == [b"PONG"]
    await router.close()


async def test_a_killed_connection_comes_back_by_itself(new_redis: RedisServer) -> None:
    """What is owed fails; a call waits for the new connection."""
    router = await connect(new_redis)
    with new_redis.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    assert await _eventually(router, b"PING") == b"PONG"
    await router.close()


async def _eventually(router: Router, *command: Any) -> Any:
    while True:
        try:
            return await router.call(0, *command)
        except BrokerUnavailable:
            continue


async def test_no_server_is_reported_in_time() -> None:
    """With what to look at, and without the password."""
    settings = RedisSettings.model_validate({"url": "redis://:secret@127.0.0.1:1/0", "connect_timeout_s": 0.2})

    with pytest.raises(BrokerUnavailable, match="QINFER_REDIS__URL") as raised:
        await Router.connect(settings)

    assert "secret" not in str(raised.value)


async def test_credentials_are_sent_and_refused_clearly(tmp_path: Path) -> None:
    """User and password of the URL; wrong ones end the start at once."""
    with RedisServer(system_redis(), tmp_path) as server, server.client() as admin:
        admin.acl_setuser("me", enabled=True, passwords=["+let-me-in"], keys=["*"], categories=["+@all"])
        admin.acl_setuser("default", enabled=True, reset_passwords=True, passwords=["+other"])
        good = await Router.connect(RedisSettings.model_validate({"url": _url(server, "me:let-me-in@")}))
        assert await good.call(0, b"ACL", b"WHOAMI") == b"me"
        await good.close()

        for wrong in ("me:guess@", ""):
            with pytest.raises(SettingsError, match="password"):
                await Router.connect(RedisSettings.model_validate({"url": _url(server, wrong)}))


def _url(server: RedisServer, credentials: str) -> str:
    return f"redis://{credentials}127.0.0.1:{server.port}/0"


async def test_the_database_of_the_url_is_selected(new_redis: RedisServer) -> None:
    """`/3` is number 3."""
    router = await connect(new_redis, url=new_redis.url.removesuffix("/0") + "/3")

    assert b"db=3" in await router.call(0, b"CLIENT", b"INFO")
    await router.close()


async def test_a_tls_server_is_reached_and_verified(tmp_path: Path) -> None:
    """With its certificate authority; without, the connection is refused."""
    key, certificate = make_certificate(tmp_path)
    options = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with RedisServer(system_redis(), tmp_path, *options, tls=True) as server:
        url = f"rediss://127.0.0.1:{server.port}/0"
        router = await Router.connect(RedisSettings.model_validate({"url": f"{url}?ssl_ca_certs={certificate}"}))
        assert await router.call(0, b"ECHO", bytes(10**6)) == bytes(10**6)
        await router.close()

        with pytest.raises(BrokerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await Router.connect(RedisSettings.model_validate({"url": url, "connect_timeout_s": 1.0}))


async def test_new_connections_read_the_files_of_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Certificates are renewed while programs run; a file that can't be read leaves what was read before."""
    key, certificate = make_certificate(tmp_path)
    authorities = tmp_path / "ca.pem"
    authorities.write_bytes(certificate.read_bytes())
    options = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with RedisServer(system_redis(), tmp_path, *options, tls=True) as server:
        settings = RedisSettings.model_validate(
            {"url": f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={authorities}", "connect_timeout_s": 1.0}
        )
        router, client = await Router.connect(settings), admin_client(settings)

        async def come_back() -> None:
            """Cuts all connections, and waits until there are new ones."""
            with contextlib.suppress(redis.exceptions.ConnectionError):
                await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")

            async def is_back() -> bool:
                try:
                    await asyncio.gather(client.ping(), router.call(0, b"PING"))
                except (BrokerUnavailable, redis.exceptions.ConnectionError):
                    return False
                return True

            await eventually(is_back, description="new connections")

        await come_back()
        make_certificate(tmp_path)
        authorities.write_bytes(certificate.read_bytes())
        await client.execute_command("CONFIG", "SET", "tls-cert-file", str(certificate), "tls-key-file", str(key))
        await come_back()

        authorities.write_bytes(b"nothing")
        caplog.clear()
        await come_back()
        assert {record.getMessage() for record in caplog.records if record.levelname == "ERROR"} == {
            "a TLS file of Redis can't be read; the previous one is used"
        }
        await router.close()
        await client.aclose()


# --- clusters ---


def _misled(router: Router, key: bytes) -> int:
    """Makes the router believe that another node owns `key`'s slot; returns the slot."""
    slot = keys.slot(key)
    router._table[slot] = next(link for link in set(router._table) if link is not router._table[slot])
    return slot


@pytest.fixture
async def cluster_router(redis_cluster: RedisCluster) -> Any:
    router = await Router.connect(RedisSettings.model_validate({"url": redis_cluster.url, "cluster": True}))
    yield router
    await router.close()


async def test_moved_is_followed_by_calls_and_sends(cluster_router: Router) -> None:
    """And remembered: the next command goes straight to the owner."""
    slot = _misled(cluster_router, b"moved")
    answers = Answers()
    cluster_router.send(slot, pack((b"SET", b"moved", b"1", b"PX", b"1000")), answers)
    assert await answers.all() == [b"OK"]

    assert _misled(cluster_router, b"moved") == slot
    wrong = cluster_router._table[slot]
    assert await cluster_router.call(slot, b"GET", b"moved") == b"1"
    assert cluster_router._table[slot] is not wrong


async def test_moved_is_followed_by_blocking_reads(cluster_router: Router) -> None:
    """The connection moves to the owner."""
    blocking = cluster_router.blocking(_misled(cluster_router, b"list"), "test", 0.5)

    assert await blocking.call(b"BLPOP", b"list", b"0.01") is None


async def test_ask_is_followed_while_a_slot_moves(redis_cluster: RedisCluster, cluster_router: Router) -> None:
    """A key that is not at its old home any more is asked for at its new one."""
    slot = keys.slot(b"asked")
    owner, target = await _owner_and_other(redis_cluster, slot)
    with owner.client() as source, target.client() as destination:
        source_id, target_id = source.execute_command("CLUSTER MYID"), destination.execute_command("CLUSTER MYID")
        destination.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        answers = Answers()

        cluster_router.send(slot, pack((b"SET", b"asked", b"1", b"PX", b"1000")), answers)
        assert await answers.all() == [b"OK"]
        assert await cluster_router.call(slot, b"GET", b"asked") == b"1"

        destination.execute_command("ASKING")
        destination.execute_command("DEL", "asked")
        for client in (source, destination):
            client.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")


async def _owner_and_other(cluster: RedisCluster, slot: int) -> tuple[RedisServer, RedisServer]:
    with cluster.nodes[0].client() as client:
        for first, last, (_, port, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                owner = next(node for node in cluster.nodes if node.port == port)
                return owner, next(node for node in cluster.nodes if node is not owner)
    raise AssertionError("the slot has no owner")


async def test_keys_of_all_nodes_are_reached(redis_queue: RedisQueue) -> None:
    """Commands to many slots at once, on any kind of server."""
    router = await Router.connect(redis_queue.settings)
    names = [b"{%d}" % number for number in range(100)]

    await asyncio.gather(*(router.call(keys.slot(name), b"SET", name, name, b"PX", b"5000") for name in names))

    assert await asyncio.gather(*(router.call(keys.slot(name), b"GET", name) for name in names)) == names
    await router.close()


# --- addresses ---


def test_an_address_shows_no_password() -> None:
    """It may be logged."""
    assert repr(parse("redis://me:secret@queue:6380/1")) == "queue:6380"


@pytest.mark.parametrize("url", ["http://queue", "redis://queue?colour=red", "queue:6379"])
def test_a_url_that_is_none_names_the_setting(url: str) -> None:
    """And what it accepts."""
    with pytest.raises(SettingsError, match=r"QINFER_REDIS__URL.*expected redis://"):
        parse(url)


def test_a_unix_socket_may_have_any_path() -> None:
    """Escaped as in any URL."""
    address = parse("unix:///tmp/a%20b.sock?db=2")

    assert (address.path, address.db) == ("/tmp/a b.sock", 2)


def test_every_refusal_of_the_server_is_a_qinfer_error() -> None:
    """Nothing foreign leaves the connection."""
    assert issubclass(CommandRefused, QinferError)
