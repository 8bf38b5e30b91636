"""A backup of Redis is restored into an empty one: what was accepted before it is answered there."""

import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from qinfer.testing import wait_until
from tests.chaos.repository import write_stub
from tests.e2e.async_load import Load, wrong
from tests.support import models
from tests.support.installation import WITHIN_S, Installation
from tests.support.servers.servers import RedisServer, command, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

FAST, SLOW = "add_sub", "slow"
MODELS = (FAST, SLOW)
DURABLE = ("--maxmemory-policy", "noeviction", "--appendonly", "yes")
DEEP = 100


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.add_sub(tmp_path / "models", FAST)
    write_stub(tmp_path / "models", SLOW, dim=4, max_batch_size=2, delay_s=0.2)
    return tmp_path / "models"


def started(home: Path, *options: str) -> RedisServer:
    home.mkdir(exist_ok=True)
    return RedisServer(system_redis(), home, *options)


def fields(server: RedisServer, section: str) -> dict[str, object]:
    with server.client() as client:
        return dict(command(client, "INFO", section))


def snapshot(server: RedisServer, source: Path, target: Path) -> RedisServer:
    """Takes a snapshot over the network, and starts a Redis from it that has an append-only file from then on."""
    if shutil.which("redis-cli") is None:
        pytest.skip("needs redis-cli")
    target.mkdir()
    words = ["redis-cli", "-p", str(server.port), "--rdb", str(target / "dump.rdb")]
    subprocess.run(words, check=True, capture_output=True, timeout=WITHIN_S)
    server.kill()
    restored = started(target, "--maxmemory-policy", "noeviction", "--appendonly", "no")
    with restored.client() as client:
        wait_until(lambda: fields(restored, "persistence")["loading"] == 0, WITHIN_S, "the snapshot")
        client.config_set("appendonly", "yes")
        wait_until(lambda: fields(restored, "persistence")["aof_rewrite_in_progress"] == 0, WITHIN_S, "its file")
    return restored


def copy(server: RedisServer, source: Path, target: Path) -> RedisServer:
    """Copies the append-only files of a running Redis, and starts another one with them."""
    with server.client() as client:
        client.config_set("auto-aof-rewrite-percentage", 0)  # a rewrite would replace files under the copy
        wait_until(lambda: fields(server, "persistence")["aof_rewrite_in_progress"] == 0, WITHIN_S, "no rewrite")
        target.mkdir()
        shutil.copytree(source / "appendonlydir", target / "appendonlydir")
        client.config_set("auto-aof-rewrite-percentage", 100)
    server.kill()
    return started(target, *DURABLE)


@pytest.mark.parametrize("back_up", [snapshot, copy])
def test_a_backup_is_restored_into_an_empty_redis(
    tmp_path: Path, repository: Path, back_up: Callable[[RedisServer, Path, Path], RedisServer]
) -> None:
    """Taken under load: results that were there can be read, and what waited is executed."""
    source = tmp_path / "source"
    with ExitStack() as stack:
        server = started(source, *DURABLE, "--appendfsync", "always")
        with ExitStack() as before:
            installation = Installation(tmp_path, repository, server.url)
            url = before.enter_context(installation.gateway())
            before.enter_context(installation.worker())
            installation.serves(url, MODELS)
            load = Load(url, MODELS, pause_s=0.002)
            before.callback(load.stop)
            load.start()
            wait_until(lambda: installation.depth() > DEEP, WITHIN_S, "a backlog")
            accepted = dict(load.accepted)
            restored = stack.enter_context(back_up(server, source, tmp_path / "restored"))
            load.stop()

        installation = Installation(tmp_path, repository, restored.url)
        waited = installation.depth()
        url = stack.enter_context(installation.gateway())
        stack.enter_context(installation.worker())
        lost = wrong(url, accepted)
        wait_until(lambda: installation.depth() == 0, WITHIN_S, "empty lanes")

    assert DEEP // 2 < waited < len(load.accepted)
    assert len(accepted) > DEEP
    assert lost == {}
