"""A global resource over real worker processes, which are killed and stopped while they hold it."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qinfer.testing import eventually
from tests.support.limited_models import intervals, overlaps, write_recording
from tests.support.worker_processes import WorkerProcesses, resume, worker_processes

MODELS = ("left", "right")
LIMITED = {"QINFER_RATE_LIMIT__MODE": "execution_count"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "intervals"


@pytest.fixture
async def pool(tmp_path: Path, log: Path) -> AsyncIterator[WorkerProcesses]:
    for name in MODELS:
        write_recording(tmp_path / "repository", name, log)
    async with worker_processes(tmp_path) as one:
        yield one


@pytest.mark.long
async def test_executions_never_overlap_while_workers_are_killed(pool: WorkerProcesses, log: Path) -> None:
    for _ in range(2):
        await pool.worker(**LIMITED)
    ids: list[str] = []

    for victim in (0, 1):
        ids += [pool.submit(float(number), MODELS[number % 2]) for number in range(1, 51)]
        enough = len(intervals(log)) + 10
        await eventually(lambda enough=enough: len(intervals(log)) >= enough, 30.0, "executions")  # type: ignore[misc]
        pool.processes[victim].kill()
        await pool.worker(**LIMITED)
    answers = await pool.answered(*ids)

    assert [answer.failure for answer in answers] == [None] * 100
    found = intervals(log)
    assert len(found) >= 100
    assert len({one.worker for one in found}) > 1
    assert overlaps(found) == []


@pytest.mark.slow
async def test_a_stopped_worker_holds_up_others_for_its_lease_only(pool: WorkerProcesses, log: Path) -> None:
    """What it goes on with afterwards is answered, too."""
    stopped = await pool.worker(**LIMITED)
    await pool.answered(pool.submit(1.0, "left"))
    await pool.worker(**LIMITED)

    stopped.send_signal(signal.SIGSTOP)
    ids = [pool.submit(float(number), name) for number in range(1, 6) for name in MODELS]
    answers = await pool.answered(*ids)
    resume(stopped)

    assert [answer.failure for answer in answers] == [None] * 10
    more = await pool.answered(*[pool.submit(float(number), name) for number in range(1, 6) for name in MODELS])
    assert [answer.failure for answer in more] == [None] * 10
    assert len(intervals(log)) >= 21
