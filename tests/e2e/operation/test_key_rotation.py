"""Keys turn under load: those of callers and the password of Redis, without a refused request."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.testing import wait_until
from tests.e2e.async_load import body
from tests.e2e.conftest import clean_environment
from tests.support import models
from tests.support.installation import WITHIN_S, Callers, Installation
from tests.support.servers.servers import RedisServer, command, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

MODEL = "add_sub"


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(system_redis(), tmp_path, "--appendonly", "yes", "--maxmemory-policy", "noeviction") as server:
        yield server


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.add_sub(tmp_path / "models", MODEL)
    return tmp_path / "models"


def keys(file: Path, *words: str) -> Any:
    """Runs `qinfer keys`; returns what it prints."""
    argv = [sys.executable, "-m", "qinfer.cli.main", "keys", *words, "--file", str(file), "--json"]
    done = subprocess.run(argv, env=clean_environment(), capture_output=True, check=False, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def answers(url: str, key: str, status: int) -> bool:
    """Tells whether a gateway answers a request with this key so."""
    headers = {"authorization": f"Bearer {key}"}
    reply = httpx.post(f"{url}/v2/models/{MODEL}/infer", json=body(1), headers=headers, timeout=30.0)
    return reply.status_code == status


def test_an_api_key_is_rotated_under_load(tmp_path: Path, repository: Path, redis_server: RedisServer) -> None:
    """Both keys are valid until all callers have the new one; the old one is refused once it is revoked."""
    file = tmp_path / "keys" / "keys.json"
    file.parent.mkdir()
    old = keys(file, "new", "--tenant", "acme", "--id", "acme-1")
    auth = {"QINFER_AUTH__MODE": "keys", "QINFER_AUTH__KEYS_FILE": str(file)}
    installation = Installation(tmp_path, repository, redis_server.url, **auth)
    with ExitStack() as stack:
        urls = [stack.enter_context(installation.gateway()) for _ in range(2)]
        stack.enter_context(installation.worker())
        for url in urls:
            installation.serves(url, [MODEL])
        callers = stack.enter_context(Callers(urls, MODEL, old["key"]))
        callers.more()

        new = keys(file, "rotate", "acme-1", "--overlap", "1h")
        for url in urls:
            wait_until(partial(answers, url, new["key"], 200), WITHIN_S, "the new key")
        callers.more()
        callers.key = new["key"]
        callers.more()
        keys(file, "revoke", "acme-1")
        for url in urls:
            wait_until(partial(answers, url, old["key"], 401), WITHIN_S, "the end of the old key")
        callers.more()

    assert callers.refused == []
    assert min(callers.answered.values()) >= 50
    assert set(callers.answered) == {old["key"], new["key"]}


def test_the_password_of_redis_is_rotated_under_load(
    tmp_path: Path, repository: Path, redis_server: RedisServer
) -> None:
    """A user of Redis has both passwords until all programs were replaced by others with the new one."""

    def installation(password: str) -> Installation:
        return Installation(tmp_path, repository, redis_server.url.replace("//", f"//qinfer:{password}@"))

    with redis_server.client() as client, ExitStack() as stack, ExitStack() as before:
        command(client, "ACL", "SETUSER", "qinfer", "on", ">old", "~*", "&*", "+@all")
        first = before.enter_context(installation("old").gateway())
        before.enter_context(installation("old").worker())
        installation("old").serves(first, [MODEL])
        with Callers([first], MODEL) as callers:
            callers.more()
            command(client, "ACL", "SETUSER", "qinfer", ">new")
            second = stack.enter_context(installation("new").gateway())
            stack.enter_context(installation("new").worker())
            installation("new").serves(second, [MODEL])
            installation("new").has_workers(2, [MODEL])
            callers.more()
        with Callers([second], MODEL) as others:
            others.more()
            before.close()
            command(client, "ACL", "SETUSER", "qinfer", "<old")
            others.more()
        command(client, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        installation("new").serves(second, [MODEL])
        with Callers([second], MODEL) as last:
            last.more()

    assert [callers.refused, others.refused, last.refused] == [[], [], []]
