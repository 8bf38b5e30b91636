"""A global resource over real worker processes, which are killed and stopped while they hold it."""

import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from qinfer.testing import eventually
from tests.support.python_models import execute, write_model
from tests.support.worker_processes import WorkerProcesses, resume, worker_processes

MODELS = ("left", "right")
LIMITED = {"QINFER_RATE_LIMIT__MODE": "execution_count"}
NEEDS = "instance_group { kind: KIND_CPU rate_limiter { resources { name: 'g' count: 1 global: true } } }"

RECORDING = """
for request in requests:
    begin = time.monotonic()
    if x(request).any():
        time.sleep(0.01)
        with open("%s", "a") as file:
            file.write(f"{begin} {time.monotonic()} {os.getppid()}\\n")
return [reply(x(request)) for request in requests]
"""
"""Writes when each execution began and ended, and in which worker; warm-up runs have zeros."""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    code = execute(RECORDING % (tmp_path / "intervals"))
    for name in MODELS:
        write_model(tmp_path / "repository", code, name, dims="1", max_batch_size=1, more=NEEDS)
    async with worker_processes(tmp_path) as one:
        yield one


def intervals(directory: Path) -> list[tuple[float, float, str]]:
    path = directory / "intervals"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((float(begin), float(end), worker) for begin, end, worker in map(str.split, lines))


async def test_executions_never_overlap_while_workers_are_killed(pool: WorkerProcesses, tmp_path: Path) -> None:
    for _ in range(2):
        await pool.worker(**LIMITED)
    ids: list[str] = []

    for victim in (0, 1):
        ids += [pool.submit(float(number), MODELS[number % 2]) for number in range(1, 51)]
        enough = len(intervals(tmp_path)) + 10
        await eventually(lambda enough=enough: len(intervals(tmp_path)) >= enough, 30.0, "executions")  # type: ignore[misc]
        pool.processes[victim].kill()
        await pool.worker(**LIMITED)
    answers = await pool.answered(*ids)

    assert [answer.failure for answer in answers] == [None] * 100
    found = intervals(tmp_path)
    assert len(found) >= 100
    assert len({worker for _, _, worker in found}) > 1
    overlaps = [(one, other) for one, other in pairwise(found) if other[0] < one[1]]
    assert overlaps == []


async def test_a_stopped_worker_holds_up_others_for_its_lease_only(pool: WorkerProcesses, tmp_path: Path) -> None:
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
    assert len(intervals(tmp_path)) >= 21
