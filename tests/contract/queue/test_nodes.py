"""What nodes of Redis say of themselves, and the metrics of it, on each kind of server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.queue import nodes
from qinfer.queue.lanes import Queue
from qinfer.queue.nodes import Nodes
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue
from tests.support.servers.servers import RedisServer, SentinelSetup, command, system_redis

Shown = dict[tuple[str, str], float]
OF_EACH = {
    "qinfer_redis_up": 1.0,
    "qinfer_redis_info": 1.0,
    "qinfer_redis_loading": 0.0,
    "qinfer_redis_evicted_keys_total": 0.0,
    "qinfer_redis_replicas": 0.0,
    "qinfer_redis_persistence_failed": 0.0,
}


async def shown(queue: Queue, settings: RedisSettings) -> Shown:
    """Returns what a gateway that has just started shows: (metric, node) → value; of files the worst."""
    found: Shown = {}
    for family in nodes.families(await Nodes(queue.router, settings).read()):
        for _, labels, value, _ in family.samples:
            key = family.info.name, dict(labels)["node"]
            found[key] = max(value, found.get(key, value))
    return found


async def answers(queue: Queue, settings: RedisSettings) -> Shown:
    """Returns the same once every node has answered: a starved machine may be slower than a scrape waits."""
    found: Shown = {}

    async def are_up() -> bool:
        found.update(await shown(queue, settings))
        return all(value == 1 for (name, _), value in found.items() if name == "qinfer_redis_up")

    await eventually(are_up, 20.0, "answers of all nodes")
    return found


def told(server: RedisServer) -> int:
    """Returns how often a server was asked for INFO, this time not counted."""
    with server.client() as client:
        counts = command(client, "INFO", "commandstats").get("cmdstat_info", {"calls": 0})
    return int(counts["calls"])


async def test_each_node_is_shown(redis_queue: RedisQueue) -> None:
    """Once, by the place that the map names, whichever name the gateway was given."""
    queue = await redis_queue.connect()

    found = await answers(queue, redis_queue.settings)

    assert {node for _, node in found} == {f"127.0.0.1:{server.port}" for server in redis_queue.nodes}
    for server in redis_queue.nodes:
        of = {name: value for (name, node), value in found.items() if node == f"127.0.0.1:{server.port}"}
        assert of | OF_EACH == of
        assert of["qinfer_redis_memory_used_bytes"] > 100_000
        assert 0 < of["qinfer_redis_memory_used_ratio"] < 1
        assert of["qinfer_redis_clients_max"] > of["qinfer_redis_clients"] > 0


async def test_a_node_is_asked_once_however_often_it_is_shown(own_redis: RedisQueue) -> None:
    queue = await own_redis.connect()
    reader = Nodes(queue.router, own_redis.settings)
    before = told(own_redis.nodes[0])

    found = [await reader.read() for _ in range(20)]

    assert told(own_redis.nodes[0]) - before == 2  # its own question, and the first of these
    assert all(each is found[0] for each in found)


@pytest.mark.parametrize("rule", ["-info", "+@all"])
async def test_a_node_that_forbids_info_is_up_and_says_nothing(own_redis: RedisQueue, rule: str) -> None:
    server = own_redis.nodes[0]
    with server.client() as client:
        command(client, "ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", rule)
    settings = RedisSettings(url=SecretStr(f"redis://limited:secret@127.0.0.1:{server.port}/0"))
    queue = await Queue.connect(settings)
    try:
        found = await answers(queue, settings)
    finally:
        await queue.close()

    assert found["qinfer_redis_up", f"127.0.0.1:{server.port}"] == 1
    assert (len(found) == 1) == (rule == "-info")


async def test_a_node_that_is_gone_is_down(own_redis: RedisQueue) -> None:
    server = own_redis.nodes[0]
    queue = await own_redis.connect()
    server.kill()

    found = await shown(queue, own_redis.settings)
    server.start()

    assert found == {("qinfer_redis_up", f"127.0.0.1:{server.port}"): 0}


async def test_a_node_that_loads_its_data_says_so(tmp_path: Path) -> None:
    """Its connections are refused meanwhile, but for one that asks."""
    slowly = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
    with RedisServer(system_redis(), tmp_path, *slowly) as server:
        settings = RedisSettings(url=SecretStr(server.url))
        queue = await Queue.connect(settings)
        with server.client() as client:
            client.mset({f"key-{number}": "x" * 100 for number in range(2000)})
            client.save()
        server.stop()
        server.start(loaded=False)

        async def is_loading() -> bool:
            found = await shown(queue, settings)
            return found.get(("qinfer_redis_loading", f"127.0.0.1:{server.port}")) == 1

        try:
            await eventually(is_loading, 20.0, "a node that loads its data")
        finally:
            server.kill()
            await queue.close()


async def test_memory_is_full_when_writes_are_refused(own_redis: RedisQueue) -> None:
    server = own_redis.nodes[0]
    queue = await own_redis.connect()
    with server.client() as client:
        client.set("qinfer:large", bytes(3_000_000), ex=60)
        client.config_set("maxmemory", "2mb")

    found = await answers(queue, own_redis.settings)

    assert found["qinfer_redis_memory_max_bytes", f"127.0.0.1:{server.port}"] == 2 * 2**20
    assert found["qinfer_redis_memory_used_ratio", f"127.0.0.1:{server.port}"] > 1


async def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    home = tmp_path / "gone"
    home.mkdir()
    with RedisServer(system_redis(), home, "--logfile", "") as server:
        settings = RedisSettings(url=SecretStr(server.url))
        queue = await Queue.connect(settings)
        reader = Nodes(queue.router, settings)
        with server.client() as client:
            client.set("qinfer:some", b"x")
            home.rmdir()
            client.bgsave()
            await eventually(lambda: client.info()["rdb_last_bgsave_status"] == "err", 20.0, "a save that fails")
        (node,) = await reader.read()
        await queue.close()

    assert node.info is not None
    assert nodes.failed_files(node.info) == {"aof": False, "aof_rewrite": False, "rdb": True}


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSetup]:
    setup = SentinelSetup(system_redis(), tmp_path_factory.mktemp("sentinels"))
    yield setup
    setup.stop()


@pytest.mark.matrix
async def test_replicas_and_their_lag_are_shown(sentinels: SentinelSetup, tmp_path: Path) -> None:
    """The primary counts them, by the name of the service; one that hangs falls behind."""
    settings = RedisSettings(url=SecretStr(sentinels.url))
    queue = await Queue.connect(settings)

    async def shows(name: str, least: float) -> bool:
        return (await shown(queue, settings)).get((name, SentinelSetup.service), -1.0) >= least

    async def has_both() -> bool:
        return await shows("qinfer_redis_replicas", 2)

    async def is_behind() -> bool:
        return await shows("qinfer_redis_replica_lag_seconds", 2) and await shows("qinfer_redis_replica_lag_bytes", 1)

    try:
        await eventually(has_both, 20.0, "two replicas")
        replica = next(node for node in sentinels.nodes if node is not sentinels.primary())
        with replica.paused():
            with sentinels.primary().client() as client:
                client.set("qinfer:some", b"x")
            await eventually(is_behind, 20.0, "a replica that falls behind")
    finally:
        await queue.close()


def test_fields_that_a_server_does_not_know_are_left_out() -> None:
    """No value is invented: an older server, or a service that hides some."""
    found = [family for family in nodes.families([nodes.RedisNode("h:1", {"used_memory": "7"})]) if family.samples]

    assert {family.info.name: family.samples[0].value for family in found} == {
        "qinfer_redis_up": 1,
        "qinfer_redis_info": 1,
        "qinfer_redis_memory_used_bytes": 7,
        "qinfer_redis_replicas": 0,
    }
