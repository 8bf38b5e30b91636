"""Bulk workers that find stuck jobs by themselves, on a real Redis."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from qinfer.jobs.job import JobState
from qinfer.testing import eventually
from tests.support.jobs.bulk_processes import WITHIN_S, BulkProcesses, check_output, opened
from tests.support.servers.servers import RedisServer, system_redis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(system_redis(), tmp_path_factory.mktemp("redis"), "--appendonly", "yes") as one:
        yield one


@pytest.fixture
async def bulk(server: RedisServer, tmp_path: Path) -> AsyncIterator[BulkProcesses]:
    async with opened(server, tmp_path) as one:
        yield one


async def test_a_job_goes_on_that_nobody_sent_a_task_for(bulk: BulkProcesses) -> None:
    """Nor for its end; also after the death of the worker that took the turns so far."""
    first = bulk.start()
    await bulk.becomes(JobState.RUNNING)
    first.kill()
    await bulk.ended(first)

    workers = [bulk.start() for _ in range(2)]
    await eventually(lambda: bulk.log.read_text().count("bulk worker started") == 3, WITHIN_S, "both workers")
    for process in workers:
        process.send_signal(signal.SIGHUP)  # which means gateways
    await bulk.settle()
    await bulk.becomes(JobState.COMPLETED)

    check_output(bulk.directory)
    for process, number in zip(workers, (signal.SIGTERM, signal.SIGINT), strict=True):
        process.send_signal(number)
        assert await bulk.ended(process) == 0, bulk.log.read_text()


def test_an_old_deployment_of_beat_is_told() -> None:
    """That program is gone."""
    ended = subprocess.run(
        [sys.executable, "-m", "qinfer_workers.jobs.beat"], capture_output=True, text=True, check=False
    )

    assert (ended.returncode, "bulk workers find stuck jobs themselves" in ended.stderr) == (1, True)
