"""The queues that the delivery contract is tested on."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

from qinfer.core.settings import LimitSettings, RedisSettings
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.lanes import Queue
from tests.support.servers import servers
from tests.support.servers.servers import RedisCluster, RedisServer, redis_6_2, system_redis

PERMANENT = (
    "config",
    "dlq",
    "due",
    "deliveries:jobs",
    "deliveries:jobs|later",
    "sequences",
    "sequence-counts",
    "sequence-numbers",
    "sequence-endings",
    "sequence-owners",
    "sequence-lanes",
)  # of a partition; lanes and statistics are told by their numbers
WHOLE = {"qinfer:desired", "qinfer:control", "qinfer:workers", "qinfer:jobs", "qinfer:jobs:places", "qinfer:jobs:open"}
WHOLE |= {"qinfer:scaler-counts", "qinfer:installation", "qinfer:settings", "qinfer:pauses"}
WHOLE |= {"qinfer:operations", "qinfer:operations:open"}
WHOLE |= {"qinfer:{.endpoints#0}:declared", "qinfer:{.endpoints#0}:trials"}
WHOLE |= {"qinfer:{counts}:asked", "qinfer:{counts}:added"}
ENDED = {"completed", "failed", "cancelled", "expired"}


class RedisQueue:
    """A queue on real servers, emptied first; `connect` gives what another process would have."""

    def __init__(self, nodes: list[RedisServer], *, cluster: bool = False, store: Path | None = None) -> None:
        self.nodes = nodes
        self.limits = LimitSettings()
        if store is not None:  # payloads and results of more than a byte are objects there
            self.limits = LimitSettings(payload_url=store.as_uri(), payload_url_min_bytes=1)
        self.settings = RedisSettings.model_validate({"url": nodes[0].url, "cluster": cluster})
        self._open: list[Queue] = []
        self._admin: list[redis.Redis] = [server.client() for server in nodes]
        for client in self._admin:
            client.flushall()

    async def connect(self, **changes: Any) -> Queue:
        delivery = await Queue.connect(self.settings.model_copy(update=changes), self.limits)
        self._open.append(delivery)
        return delivery

    def on_every_node(self, *words: Any) -> list[Any]:
        return [servers.command(client, *words) for client in self._admin]

    def on_owner(self, *words: Any) -> Any:
        """Runs a command on the node that has its key."""
        for client in self._admin:
            with suppress(redis.exceptions.MovedError):
                return servers.command(client, *words)
        raise AssertionError(f"no node takes {words!r}")

    def leaked(self) -> list[str]:
        """Names every key that would stay for ever and is not one of those that should."""
        keys = [
            key.decode()
            for client in self._admin
            for key in servers.command(client, "KEYS", "*")
            if client.pttl(key) == -1
        ]
        return [key for key in keys if not (_may_stay(key) or self._is_unfinished(key))]

    def _is_unfinished(self, key: str) -> bool:
        """Tells whether a key belongs to a bulk job that has not ended."""
        found = re.fullmatch(r"(.*}:job)[^:]*(:.*)", key)
        if found is None:
            return False
        state = self.on_owner("HGET", "".join(found.groups()), "state")
        return state is not None and state.decode() not in ENDED

    async def close(self) -> None:
        for delivery in self._open:
            await delivery.close()
        for client in self._admin:
            client.close()


def _may_stay(key: str) -> bool:
    if key in WHOLE:
        return True
    _, _, of_partition = key.partition("}:")
    name, _, _ = of_partition.partition(":")
    if name.startswith("sequences~"):  # of tenants with open sequences
        return True
    return name.isdecimal() or name in {"stats", "sequence-owned"} or of_partition in PERMANENT


@pytest.fixture(scope="session")
def old_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(redis_6_2(), tmp_path_factory.mktemp("redis-6.2")) as server:
        yield server


@pytest.fixture(scope="session")
def new_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(system_redis(), tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(system_redis(), tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


REDIS = ["redis-system", *servers.matrix("redis-6.2", "redis-cluster")]


def _redis_queue(request: pytest.FixtureRequest, kind: str, store: Path | None = None) -> RedisQueue:
    if kind == "redis-objects":
        return RedisQueue([request.getfixturevalue("new_redis")], store=request.getfixturevalue("tmp_path"))
    if kind == "redis-cluster":
        return RedisQueue(request.getfixturevalue("redis_cluster").nodes, cluster=True, store=store)
    return RedisQueue([request.getfixturevalue("old_redis" if kind == "redis-6.2" else "new_redis")], store=store)


@pytest.fixture(params=[*REDIS, *servers.matrix("redis-objects")])
async def queue(request: pytest.FixtureRequest) -> AsyncIterator[RedisQueue]:
    """Each kind of server, and one with a directory for large values."""
    queue = _redis_queue(request, request.param)
    yield queue
    await queue.close()
    assert not queue.leaked()


@pytest.fixture(params=REDIS)
async def redis_queue(request: pytest.FixtureRequest) -> AsyncIterator[RedisQueue]:
    """Each kind of server, for what only a server can do."""
    queue = _redis_queue(request, request.param)
    yield queue
    await queue.close()
    assert not queue.leaked()


@pytest.fixture(params=REDIS)
async def object_queue(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RedisQueue]:
    """Each kind of server, with a directory for large payloads and results: those of more than a byte."""
    queue = _redis_queue(request, request.param, tmp_path)
    yield queue
    await queue.close()
    assert not queue.leaked()


@pytest.fixture
async def own_redis(tmp_path: Path) -> AsyncIterator[RedisQueue]:
    """A server of the test's own, to stop and start again; what it holds survives in its append-only file."""
    with RedisServer(system_redis(), tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        queue = RedisQueue([server])
        yield queue
        await queue.close()


class ControlPair(NamedTuple):
    """One store, as two processes have it."""

    one: ControlStore
    other: ControlStore


@pytest.fixture
async def stores(queue: RedisQueue) -> AsyncIterator[ControlPair]:
    """The control store, on each kind of server."""
    pair = ControlPair(*(ControlStore(admin_client(queue.settings)) for _ in range(2)))
    yield pair
    for store in pair:
        await store.close()
