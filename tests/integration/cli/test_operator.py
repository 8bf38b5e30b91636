"""The operator's commands on a real Redis, with a worker: what they see, and what is wrong."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from pydantic import SecretStr
from typer.testing import CliRunner

import qinfer
from qinfer.cli.console import model_names
from qinfer.cli.main import app
from qinfer.core.settings import RedisSettings, variable_names
from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.state import BULK, GATEWAY
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import bulk_lanes
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from tests.support.bulk_jobs import fetch, running
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.servers.servers import RedisServer, command, system_redis

PASSWORD = "geheimes-passwort"
GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "run-with-your-own-redis.md"


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)

    @property
    def findings(self) -> dict[str, tuple[str, str, str]]:
        return {f["subject"]: (f["level"], f["text"], f["remedy"]) for f in self.document["findings"]}


def run(*words: str) -> Ended:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    for name in variable_names():
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def busy(redis_server: RedisServer) -> AsyncIterator[InlineWorkers]:
    """A worker that executes one request while two wait, beside a bulk worker's sign."""
    redis_server.client().flushall()
    redis_server.client().config_resetstat()
    settings = RedisSettings(url=SecretStr(redis_server.url))
    delivery, store = await Queue.connect(settings), ControlStore(admin_client(settings))
    async with inline_workers(delivery, store) as one:
        await one.model("digits")
        await one.worker("w1")
        await store.report_liveness(BULK, f"b@{socket.gethostname()}", 60.0)
        await store.report_liveness(GATEWAY, f"g@{socket.gethostname()}", 60.0)
        yield one
    await store.close()
    await delivery.close()


async def test_lanes_work_and_workers_are_shown(busy: InlineWorkers, redis_server: RedisServer) -> None:
    """As JSON in one document, and as tables."""
    busy.hold("digits")
    first = busy.submit(1.0, model="digits")
    await busy.started()
    more = [busy.submit(float(n), model="digits") for n in range(9)]
    await busy.queued(10, model="digits")
    to = ("--redis", redis_server.url)

    status, queues, workers = [
        await asyncio.to_thread(run, name, *to, "--json") for name in ("status", "queues", "workers")
    ]
    text = await asyncio.to_thread(run, "status", *to)
    busy.go("digits")
    await asyncio.gather(first, *more)

    (work,) = queues.document
    assert (work["model"], work["version"], work["requests"], work["workers"]) == ("digits", 1, 10, 1)
    assert work["work_s"] > 0
    assert work["lanes"][0]["depth"] == 10
    assert 1 <= work["lanes"][0]["in_flight"] <= 10
    assert [lane["depth"] for lane in status.document["lanes"]] == [10]
    (worker,) = workers.document["workers"]
    assert (worker["id"], worker["host"], worker["state"]) == ("w1", socket.gethostname(), "ready")
    assert [(m["model"], m["state"]) for m in worker["models"]] == [("digits", "READY")]
    assert workers.document["bulk_workers"] == [f"b@{socket.gethostname()}"]
    assert "digits" in text.stdout
    assert "bulk workers: b@" in text.stdout
    assert status.document["gateways"] == [f"g@{socket.gethostname()}"]
    assert "gateways: g@" in text.stdout


async def test_status_says_why_a_job_does_not_go_on(busy: InlineWorkers, redis_server: RedisServer) -> None:
    """Until its shards go on; a job that goes on has no line."""
    await running(busy.delivery, 1, "fine", version=2)
    await running(busy.delivery, 1, "full", model="full")
    (lease,) = await fetch(busy.delivery, lanes=bulk_lanes("full", 1))
    assert await Jobs(busy.delivery).report("full", lease, 0, 0, "No space left on device")
    to = ("--redis", redis_server.url)

    document = (await asyncio.to_thread(run, "status", *to, "--json")).document
    text = await asyncio.to_thread(run, "status", *to)

    job = {"id": "full", "model": "full", "version": 1, "state": "running", "waiting": "No space left on device"}
    assert document["waiting_jobs"] == [job]
    assert "job full (full 1, running) waits: No space left on device" in text.stdout


async def test_one_model_can_be_asked_for(busy: InlineWorkers, redis_server: RedisServer) -> None:
    """One that is not known is an error on stderr, and as JSON on stdout; names can be completed."""
    to = ("--redis", redis_server.url)

    known = await asyncio.to_thread(run, "queues", "--model", "digits", *to, "--json")
    unknown = await asyncio.to_thread(run, "queues", "--model", "digit", *to, "--json")
    context = typer.Context(typer.main.get_command(app))
    context.params = {"redis": redis_server.url}

    assert [row["model"] for row in known.document] == ["digits"]
    assert unknown.code == 64
    assert unknown.document["error"]["code"] == "model_not_found"
    assert unknown.document["error"]["exit_code"] == 64
    assert "model 'digit' is not among the models to load" in unknown.stderr
    assert await asyncio.to_thread(model_names, context, "dig") == ["digits"]


async def test_the_health_of_this_host_is_told(busy: InlineWorkers, redis_server: RedisServer) -> None:
    """Live as long as something of this host beats; a worker that has stopped does not."""
    to = ("--redis", redis_server.url)

    before = [await asyncio.to_thread(run, "healthcheck", name, *to, "--ready") for name in ("worker", "bulk")]
    await busy.stop("w1")
    await busy.store.report_liveness(BULK, f"b@{socket.gethostname()}", 0.0)
    await busy.store.report_liveness(BULK, "c@elsewhere", 60.0)
    after = [await asyncio.to_thread(run, "healthcheck", name, *to) for name in ("worker", "bulk")]

    assert [ended.code for ended in before] == [0, 0], before
    assert [ended.code for ended in after] == [1, 1]
    assert "1 on other hosts do" in after[1].stderr


async def test_a_worker_that_drains_says_so(busy: InlineWorkers, redis_server: RedisServer) -> None:
    """It ends what it has in hand, and is told from one that serves."""
    busy.hold("digits")
    held = busy.submit(1.0, model="digits")
    await busy.started()
    stopping = asyncio.create_task(busy.stop("w1"))

    async def drains() -> bool:
        return any(worker.draining for worker in await busy.store.workers())

    await eventually(drains, description="a worker that drains")

    shown = await asyncio.to_thread(run, "workers", "--redis", redis_server.url, "--json")
    busy.go("digits")
    await asyncio.gather(held, stopping)

    assert [worker["state"] for worker in shown.document["workers"]] == ["draining"]


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    with RedisServer(system_redis(), tmp_path / "redis", "--appendonly", "yes") as server:
        yield server


def doctor(*words: str) -> Ended:
    return run("doctor", "--no-runtimes", "--json", *words)


def test_the_doctor_finds_a_sound_redis_well(own_redis: RedisServer) -> None:
    """No problem but what belongs to this machine; and it leaves no key behind."""
    found = doctor("--redis", own_redis.url).findings

    about_redis = ("Redis version", "eviction", "durability", "clock of Redis", "permissions", "models")
    assert [found[subject][0] for subject in about_redis] == ["ok"] * len(about_redis)
    assert found["workers"][0] == found["gateways"][0] == "warning"
    assert own_redis.client().keys("*") == []


def test_the_doctor_finds_what_is_wrong_with_redis(own_redis: RedisServer) -> None:
    """Exit code 1; each problem says what to do."""
    own_redis.client().config_set("maxmemory-policy", "allkeys-lru")

    ended = doctor("--redis", own_redis.url)

    assert ended.code == 1
    assert ended.findings["eviction"][0] == "problem"
    assert "CONFIG SET maxmemory-policy noeviction" in ended.findings["eviction"][2]


def test_the_doctor_finds_what_a_user_may_not(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and keys by name, and what would allow them; never the password. What it says to run makes it right."""
    client = own_redis.client()
    rules = ["on", f">{PASSWORD}", "~qinfer:{*", "+@all", "-xadd", "-eval", "-config"]
    command(client, "ACL", "SETUSER", "app", *rules)
    monkeypatch.setenv("QINFER_REDIS__URL", f"redis://app:{PASSWORD}@127.0.0.1:{own_redis.port}/0")

    narrow = doctor()
    remedies = [remedy for subject, _, remedy in _all(narrow) if subject == "permissions"]
    for remedy in remedies:
        command(client, *remedy.split())
    wide = doctor()

    told = " ".join(text for subject, text, _ in _all(narrow) if subject == "permissions")
    assert narrow.code == 1
    assert "may not run EVAL, XADD" in told
    assert "qinfer:desired" in told
    assert narrow.findings["Redis settings"][0] == "warning"
    assert PASSWORD not in narrow.stdout + narrow.stderr
    assert wide.findings["permissions"][0] == "ok", wide.findings["permissions"]


def test_the_documented_rules_are_enough(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bulk jobs, whose tasks are in the same Redis."""
    (rule,) = (line for line in GUIDE.read_text().splitlines() if line.startswith("ACL SETUSER"))
    command(own_redis.client(), *rule.replace("PASSWORD", PASSWORD).split())
    monkeypatch.setenv("QINFER_REDIS__URL", f"redis://qinfer:{PASSWORD}@127.0.0.1:{own_redis.port}/0")
    monkeypatch.setenv("QINFER_STORES__ALLOW", '["file:///tmp"]')

    found = doctor().findings

    for subject in ("permissions", "Redis version", "eviction", "durability"):
        assert found[subject][0] == "ok", found[subject]


def test_the_documented_rules_cover_the_scripts(own_redis: RedisServer) -> None:
    """No script calls a command that the rules take away; they give INFO back."""
    scripts = "".join(path.read_text() for path in Path(qinfer.__file__).parent.rglob("lua/**/*.lua"))
    called = set(re.findall(r"redis\.p?call\('(\w+)'", scripts))
    admin, dangerous = (command(own_redis.client(), "ACL", "CAT", category) for category in ("admin", "dangerous"))

    assert "XADD" in called
    assert {name.lower() for name in called} & {name.decode() for name in (*admin, *dangerous)} == {"info"}


def _all(ended: Ended) -> list[tuple[str, str, str]]:
    return [(f["subject"], f["text"], f["remedy"]) for f in ended.document["findings"]]


def test_the_doctor_tells_of_a_redis_that_is_away(own_redis: RedisServer) -> None:
    """And goes on with the rest."""
    own_redis.stop()

    found = doctor("--redis", own_redis.url).findings

    assert found["Redis"][0] == "problem"
    assert "open files" in found


def test_watching_survives_a_redis_that_is_away(own_redis: RedisServer) -> None:
    """It says so, shows what it saw before, sees it come back, and ends by Ctrl-C with 0."""
    words = [sys.executable, "-m", "qinfer.cli.main", "status", "--watch", "--interval", "0.1"]
    environment = {**os.environ, "QINFER_REDIS__URL": own_redis.url, "QINFER_REDIS__CONNECT_TIMEOUT_S": "0.3"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as watching:
        assert watching.stdout is not None
        seen = iter(watching.stdout.readline, "")
        _until(seen, "Lanes:")
        own_redis.stop()
        _until(seen, "retrying")
        _until(seen, "last state:")
        own_redis.start()
        while "since" in _until(seen, "Ctrl-C ends it", then=1):
            pass
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()

    assert watching.returncode == 0


def _until(lines: Iterator[str], text: str, then: int = 0) -> str:
    """Reads to a line that has a text, and so many more; returns the last."""
    line = next(line for line in lines if text in line)
    for _ in range(then):
        line = next(lines)
    return line
