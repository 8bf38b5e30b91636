"""Beat as a process of its own beside bulk workers that have none, on a real Redis."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
from pydantic import SecretStr

from qinfer.core.settings import BulkSettings, RedisSettings, Settings
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.job import JobState
from qinfer.jobs.tasks import QUEUE, BulkTasks
from qinfer.models.state import BEAT, BULK
from qinfer.testing import eventually, wait_until
from qinfer_workers.jobs import beat as program
from tests.support.jobs.bulk_processes import WITHIN_S, BulkProcesses, check_output, opened
from tests.support.servers.servers import RedisServer, free_port, system_redis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(system_redis(), tmp_path_factory.mktemp("redis"), "--appendonly", "yes") as one:
        yield one


@pytest.fixture
async def bulk(server: RedisServer, tmp_path: Path) -> AsyncIterator[BulkProcesses]:
    async with opened(server, tmp_path) as one:
        yield one


async def test_beats_move_a_job_on_that_nobody_sent_a_task_for(bulk: BulkProcesses) -> None:
    """A worker without a beat looks for nothing by itself; beats that overlap for a moment are no harm."""
    worker = bulk.run("qinfer_workers.jobs", QINFER_BULK__BEAT="false")
    await eventually(lambda: bulk.signed(BULK, [worker]), WITHIN_S, f"the worker; see {bulk.log}")
    assert await bulk.store.live_processes(BEAT) == []

    beats = [bulk.run("qinfer_workers.jobs.beat") for _ in range(2)]
    await bulk.becomes(JobState.RUNNING)
    await eventually(lambda: bulk.signed(BEAT, beats), WITHIN_S, f"both beats; see {bulk.log}")
    for process in (worker, *beats):
        process.send_signal(signal.SIGHUP)  # which means gateways
    await bulk.settle()
    await bulk.becomes(JobState.COMPLETED)

    check_output(bulk.directory)
    for beat, number in zip(beats, (signal.SIGTERM, signal.SIGINT), strict=True):
        beat.send_signal(number)
        assert await bulk.ended(beat) == 0, bulk.log.read_text()
    assert worker.poll() is None


def test_what_waits_is_counted(server: RedisServer) -> None:
    """Also where there has never been a task, and none where nobody can be asked."""
    with server.client() as client:
        client.flushall()
    tasks = BulkTasks(Settings(redis=RedisSettings(url=SecretStr(server.url))))
    nobody = RedisSettings(url=SecretStr(f"redis://127.0.0.1:{free_port()}"), connect_timeout_s=1.0)

    before = tasks.waiting()
    tasks.request_plan("a")
    tasks.finalise("b")

    assert (before, tasks.waiting()) == (0, 2)
    tasks.close()
    with pytest.raises(BrokerUnavailable):
        BulkTasks(Settings(redis=nobody)).waiting()


def test_beat_sends_no_more_than_is_of_use(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bulk worker nobody takes what it sends, and Redis would fill; where tasks were taken it goes on."""
    with server.client() as client:
        client.flushall()
    settings = Settings(redis=RedisSettings(url=SecretStr(server.url)), bulk=BulkSettings(sweep_every_s=0.01))
    monkeypatch.setattr(program, "MOST_WAITING", 3)
    tasks = BulkTasks(settings)
    asked = 0

    def count(one: BulkTasks) -> int:
        nonlocal asked
        asked += 1
        return waiting(one)

    def has_asked(times: int) -> bool:
        return asked >= times

    waiting = BulkTasks.waiting
    monkeypatch.setattr(BulkTasks, "waiting", count)
    beat = program.Beat(settings)
    beat.start()
    try:
        for _ in range(2):
            wait_until(partial(has_asked, asked + 10), WITHIN_S, lambda: "ten looks more")
            assert waiting(tasks) == 3
            with server.client() as client:
                client.delete(QUEUE)
    finally:
        beat.stop()
        wait_until(lambda: not beat.is_alive, WITHIN_S, lambda: "the end of beat")
        tasks.close()


def test_a_broker_that_celery_can_not_use_is_told() -> None:
    """As by bulk workers, with the exit code for wrong settings."""
    env = {**os.environ, "QINFER_REDIS__URL": "redis://:secret@127.0.0.1", "QINFER_REDIS__CLUSTER": "true"}

    ended = subprocess.run(
        [sys.executable, "-m", "qinfer_workers.jobs.beat"], env=env, capture_output=True, text=True, check=False
    )

    assert (ended.returncode, "QINFER_BULK__BROKER_URL is not set" in ended.stderr) == (2, True)
    assert "secret" not in ended.stderr
