"""Outages of Redis itself: its disk, its folder, its memory, its settings, its replicas, its connections, its nodes.

Each is brought about at a real Redis by what causes it in the field, not by a setting that only looks like it.
"""

import contextlib
import resource
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis

from qinfer.testing import wait_until
from tests.support.outages.scene import Scene
from tests.support.servers.servers import RedisServer, command, system_redis

FOREIGN_KEYS = 64
"""Keys of a megabyte each that another program has in the same Redis."""
MOST_CLIENTS = 100
SAVE_AFTER_S = 15


@asynccontextmanager
async def append_only(scene: Scene) -> AsyncIterator[None]:
    """Redis writes an append-only file."""
    with scene.redis.client() as client:
        client.config_set("appendonly", "yes")
        wait_until(lambda: command(client, "INFO", "persistence")["aof_rewrite_in_progress"] == 0, 60, "its file")
    yield


@asynccontextmanager
async def saves(scene: Scene) -> AsyncIterator[None]:
    """Redis takes a snapshot every few seconds, as its own defaults have it every few minutes."""
    with scene.redis.client() as client:
        client.config_set("save", f"{SAVE_AFTER_S} 1")
    yield


@asynccontextmanager
async def replicated(scene: Scene) -> AsyncIterator[None]:
    """A replica follows Redis."""
    home = scene.directory / "replica"
    home.mkdir()
    replica = scene.stack.enter_context(
        RedisServer(system_redis(), home, "--replicaof", f"127.0.0.1 {scene.redis.port}")
    )
    scene.nodes.append(replica)
    with replica.client() as client:
        wait_until(lambda: command(client, "INFO", "replication")["master_link_status"] == "up", 60, "the replica")
    yield


async def fill_disk(scene: Scene) -> None:
    """No file of Redis can grow any more."""
    resource.prlimit(scene.redis.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))


async def lose_folder(scene: Scene) -> None:
    """The folder of Redis' files is gone; files that are open can be written on. A rewrite begins."""
    shutil.rmtree(scene.redis_home)
    with scene.redis.client() as client, contextlib.suppress(redis.ResponseError):  # Redis 7 says so at once
        command(client, "BGREWRITEAOF")


async def lose_folder_of_snapshots(scene: Scene) -> None:
    """The folder of Redis' snapshots is gone."""
    shutil.rmtree(scene.redis_home)


async def evict(scene: Scene) -> None:
    """Somebody makes a cache of Redis: it deletes what was used least, and has less memory than it uses."""
    with scene.redis.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", int(command(client, "INFO", "memory")["used_memory"] * 0.95))


async def share_memory(scene: Scene) -> None:
    """Another program keeps much in the same Redis, which has little memory left."""
    with scene.redis.client() as client:
        for number in range(FOREIGN_KEYS):
            client.set(f"foreign-{number}", bytes(10**6))
        client.config_set("maxmemory", int(command(client, "INFO", "memory")["used_memory"] / 0.87))


async def kill_replica(scene: Scene) -> None:
    """The only replica is killed."""
    scene.nodes[-1].kill()


async def hang_replica(scene: Scene) -> None:
    """The only replica does nothing any more, with its connections open."""
    process = scene.nodes[-1].process
    process.send_signal(signal.SIGSTOP)
    scene.stack.callback(process.send_signal, signal.SIGCONT)


async def leak_connections(scene: Scene) -> None:
    """Another program opens connections, and closes none."""
    with scene.redis.client() as client:
        client.config_set("maxclients", MOST_CLIENTS)
    for _ in range(MOST_CLIENTS):
        scene.stack.enter_context(socket.create_connection(("127.0.0.1", scene.redis.port)))


async def kill_node(scene: Scene) -> None:
    """A node of the cluster is killed, and has no replica."""
    scene.nodes[-1].kill()
