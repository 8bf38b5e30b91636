"""The bulk worker as a process, on a real Redis: tasks, kills at every step, a broker that restarts, Flower."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import redis
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings, Settings
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.job import JobState
from qinfer.jobs.tasks import QUEUE, BulkTasks
from qinfer.testing import eventually
from tests.support.jobs.bulk_processes import WITHIN_S, BulkProcesses, check_output, opened
from tests.support.servers.servers import RedisServer, make_certificate, system_redis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with RedisServer(system_redis(), tmp_path_factory.mktemp("redis"), *options) as one:
        yield one


@pytest.fixture
async def bulk(server: RedisServer, tmp_path: Path) -> AsyncIterator[BulkProcesses]:
    async with opened(server, tmp_path) as one:
        yield one


@pytest.mark.long
@pytest.mark.parametrize(
    ("planning", "finishing"),
    [
        ([("after", "_plan.json")], [("before", "_SUCCESS")]),
        pytest.param(
            [("before", "_plan.json"), ("after", "_plan.json")],
            [("before", "_manifest.json"), ("before", "_SUCCESS"), ("after", "_SUCCESS")],
            marks=pytest.mark.long,
        ),
    ],
    ids=["one step", "each step"],
)
async def test_a_job_is_planned_and_finished_whenever_the_process_dies(
    bulk: BulkProcesses, planning: list[tuple[str, str]], finishing: list[tuple[str, str]]
) -> None:
    """Each process is killed at another step, and the next goes on; those that end a step were told by the sweep."""
    for fault in planning:
        await bulk.send("request_plan")
        assert await bulk.ended(bulk.start(*fault)) == -signal.SIGKILL
        assert (await bulk.record()).state == JobState.PLANNING
    plan = bulk.directory / "out" / "_plan.json"
    before = plan.read_bytes()
    planner = bulk.start()
    await bulk.becomes(JobState.RUNNING)
    planner.kill()
    await bulk.ended(planner)  # while it dies, Redis may still hand it the next task
    assert plan.read_bytes() == before

    await bulk.settle()

    for fault in finishing:
        await bulk.send("finalise")
        assert await bulk.ended(bulk.start(*fault)) == -signal.SIGKILL
        assert (await bulk.record()).state == JobState.FINALIZING
    bulk.start()
    await bulk.becomes(JobState.COMPLETED)
    check_output(bulk.directory)


async def test_a_process_that_is_asked_to_stop_hands_its_task_back(bulk: BulkProcesses, server: RedisServer) -> None:
    """The thread that reads never comes back, and is not waited for."""
    await bulk.send("request_plan")
    process = bulk.start("hang", "store")
    await eventually(lambda: "the store hangs" in bulk.log.read_text(), WITHIN_S, f"a reader; see {bulk.log}")

    process.send_signal(signal.SIGTERM)

    assert await bulk.ended(process) == 0, bulk.log.read_text()
    assert (await bulk.texts())[-1] == "planning is tried again: the bulk worker was stopped"
    with server.client() as client:
        assert "qinfer.bulk.plan" in str(client.lrange(QUEUE, 0, -1))
    bulk.start()
    await bulk.becomes(JobState.RUNNING)


async def test_a_process_that_hangs_ends_itself_and_the_next_goes_on(bulk: BulkProcesses) -> None:
    """With what its threads did in the log; a supervisor starts the next."""
    await bulk.send("request_plan")

    assert await bulk.ended(bulk.start("hang", "loop")) == os.EX_SOFTWARE

    log = bulk.log.read_text()
    assert "the event loop hangs" in log
    assert "in _hang" in log
    bulk.start()
    await bulk.becomes(JobState.RUNNING)


async def ends_well(bulk: BulkProcesses, process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """A worker with nothing in hand ends when it is asked to."""
    process.send_signal(number)

    assert await bulk.ended(process) == 0, bulk.log.read_text()
    assert "bulk worker stopped" in bulk.log.read_text()


async def test_tasks_come_through_a_restart_of_redis(bulk: BulkProcesses, server: RedisServer) -> None:
    """The worker connects again, and so does the producer; then it ends well."""
    process = bulk.start()
    await bulk.send("request_plan")
    await bulk.becomes(JobState.RUNNING)
    await bulk.settle()

    server.stop()
    server.start()

    await bulk.send("finalise")
    await bulk.becomes(JobState.COMPLETED)
    check_output(bulk.directory)
    await ends_well(bulk, process, signal.SIGTERM)


async def test_a_lost_connection_does_not_hang_the_worker(bulk: BulkProcesses, server: RedisServer) -> None:
    """Any of them, at any moment: one for `PUBSUB` would be made again and read, without data and without a limit."""
    process = bulk.start()
    await bulk.send("request_plan")
    await bulk.becomes(JobState.RUNNING)
    await bulk.settle()
    with server.client() as client:
        for kind in ("pubsub", "normal", "pubsub"):
            client.execute_command("CLIENT", "KILL", "TYPE", kind)
            await asyncio.sleep(0.5)  # in which it would connect again, and hang

    await bulk.send("finalise")
    await bulk.becomes(JobState.COMPLETED)
    check_output(bulk.directory)
    await ends_well(bulk, process, signal.SIGINT)


@pytest.mark.long
async def test_flower_shows_the_worker_and_its_tasks(bulk: BulkProcesses) -> None:
    """Where users of Celery look."""
    port = bulk.start_flower()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10.0) as flower:

        async def has(path: str, word: str) -> bool:
            try:
                return word in (await flower.get(path)).text
            except httpx.TransportError:
                return False

        await eventually(lambda: has("/api/tasks", "{"), WITHIN_S, f"what Flower shows; see {bulk.log}")
        bulk.start()
        await bulk.send("request_plan")

        await eventually(lambda: has("/api/tasks", "qinfer.bulk.plan"), WITHIN_S, f"what Flower shows; see {bulk.log}")
        await eventually(lambda: has("/workers?json=1", "qinfer-bulk-"), WITHIN_S, f"what Flower shows; see {bulk.log}")
    assert (await bulk.record()).state in (JobState.PLANNING, JobState.RUNNING)


def producer(url: str) -> BulkTasks:
    redis = RedisSettings(url=SecretStr(url), connect_timeout_s=2.0)
    return BulkTasks(Settings(redis=redis))


def test_tasks_go_through_a_unix_socket(tmp_path: Path) -> None:
    """As with the private Redis of `qinfer up`; the path and the database are those of the URL."""
    socket = tmp_path / "a b.sock"
    with RedisServer(system_redis(), tmp_path, "--unixsocket", str(socket)) as server:
        tasks = producer(f"unix://{quote(str(socket))}?db=3")
        tasks.request_plan("job")
        tasks.close()

        with redis.Redis(port=server.port, db=3) as client:
            assert client.llen(QUEUE) == 1


def test_tasks_are_sent_over_tls_and_to_nobody_unknown(tmp_path: Path) -> None:
    """With the certificate authority; without, nothing is sent."""
    key, certificate = make_certificate(tmp_path)
    options = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with RedisServer(system_redis(), tmp_path, *options, tls=True) as server:
        url = f"rediss://127.0.0.1:{server.port}"
        tasks = producer(f"{url}/0?ssl_ca_certs={certificate}")
        tasks.request_plan("job")
        tasks.close()
        with pytest.raises(BrokerUnavailable):
            producer(f"{url}/1").request_plan(
                "job"
            )  # another database: kombu shares the connections of one in a process

        with redis.Redis(port=server.port, ssl=True, ssl_ca_certs=str(certificate)) as client:
            assert client.llen(QUEUE) == 1


def test_what_keeps_it_from_starting_is_told() -> None:
    """By the exit code, to the supervisor; by a message that shows no secret, to people."""
    env = {**os.environ, "QINFER_REDIS__URL": "redis://:secret@127.0.0.1:1", "QINFER_REDIS__CLUSTER": "true"}

    ended = subprocess.run(
        [sys.executable, "-m", "qinfer_workers.jobs"], env=env, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 2
    assert "QINFER_BULK__BROKER_URL is not set" in ended.stderr
    assert "secret" not in ended.stderr
