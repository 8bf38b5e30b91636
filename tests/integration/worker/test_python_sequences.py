"""Stateful python models in real worker processes: whose sums are in the memory of a process that is killed."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qinfer.core.messages import Response
from qinfer.errors import SequenceLost
from qinfer.queue.sequences.answers import answer_rest
from qinfer.testing import eventually
from tests.support.python_models import ACCUMULATOR, write_accumulator
from tests.support.sequence_caller import SequenceCaller, value
from tests.support.worker_processes import WorkerProcesses, worker_processes

SLOW = 888.0
TELLING = ACCUMULATOR.replace('"flags": request.flags()', '"pid": os.getpid()').replace(
    "        return [self.step",
    """        for request in requests:
            if x(request) == 888:
                open(os.path.join(os.path.dirname(__file__), "executes"), "w").close()
                time.sleep(100)
        return [self.step""",
)
"""Says which process it runs in; 888 takes it longer than anybody waits."""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    """A worker with a model of two processes, each with four sequences."""
    version = write_accumulator(tmp_path / "repository", more="instance_group { count: 2 kind: KIND_CPU }")
    (version / "model.py").write_text(TELLING)
    async with worker_processes(tmp_path) as one:
        await one.worker()
        yield one


@pytest.fixture
async def caller(pool: WorkerProcesses) -> SequenceCaller:
    return SequenceCaller(pool, "accumulator", is_explicit=True)


def pid_of(response: Response) -> int:
    """Returns the process of the model that has answered."""
    return int(response.parameters["pid"])


async def outcome(caller: SequenceCaller, number: float, correlation_id: int) -> str | float:
    """Sends a step; returns the sum, or the code of the failure."""
    try:
        response = await caller.send(number, correlation_id)
    except SequenceLost as error:
        return error.code
    return response.failure.code if response.failure else value(response)


async def test_sequences_of_both_processes_sum(caller: SequenceCaller) -> None:
    ids = range(1, 9)
    first = [await caller.send(n, n, start=True) for n in ids]
    second = [await caller.send(n, n) for n in ids]
    last = [await caller.send(n, n, end=True) for n in ids]

    assert [value(each) for each in last] == [3 * n for n in ids]
    assert len({pid_of(each) for each in first}) == 2
    assert [pid_of(each) for each in second] == [pid_of(each) for each in first]


async def test_a_process_that_is_killed_takes_its_sequences_with_it(
    pool: WorkerProcesses, caller: SequenceCaller
) -> None:
    """Those of the other process go on, and the worker serves new ones with a new process."""
    first = {n: await caller.send(n, n, start=True) for n in range(1, 9)}
    killed = pid_of(first[1])

    os.kill(killed, signal.SIGKILL)
    outcomes = {n: await outcome(caller, n, n) for n in first}
    again = [await caller.send(n, n, start=True) for n in first if outcomes[n] == SequenceLost.code]

    expected = {n: SequenceLost.code if pid_of(response) == killed else 2 * n for n, response in first.items()}
    assert outcomes == expected
    assert list(expected.values()).count(SequenceLost.code) == 4
    assert killed not in {pid_of(each) for each in again}
    assert [value(each) for each in again] == [n for n in first if pid_of(first[n]) == killed]
    assert pool.processes[0].poll() is None


async def test_a_step_in_a_process_that_is_killed_is_answered(
    pool: WorkerProcesses, caller: SequenceCaller, tmp_path: Path
) -> None:
    """As are those that wait behind it, and those of other sequences that wait for the process."""
    first = {n: await caller.send(n, n, start=True) for n in range(1, 9)}
    killed = pid_of(first[1])
    mine = [n for n, response in first.items() if pid_of(response) == killed]
    slow = await caller.submit(SLOW, 1)
    executes = tmp_path / "repository" / "accumulator" / "1" / "executes"
    await eventually(executes.exists, 30.0, "a step that executes")
    ids = [slow, *[await caller.submit(1.0, n) for n in mine]]

    os.kill(killed, signal.SIGKILL)
    answers = await pool.answered(*ids)

    assert {answer.failure and answer.failure.code for answer in answers} == {SequenceLost.code}
    assert all(answer.failure is not None and answer.failure.retryable for answer in answers)
    other = next(n for n in first if n not in mine)
    assert value(await caller.send(1.0, other)) == other + 1
    assert value(await caller.send(1.0, 1, start=True)) == 1


async def test_sequences_in_memory_end_with_their_worker(pool: WorkerProcesses, caller: SequenceCaller) -> None:
    """The next worker has new ones."""
    await caller.send(1.0, 1, start=True)
    pool.processes[0].kill()
    waiting = await caller.submit(1.0, 1)
    await pool.worker()

    async def are_reaped() -> bool:
        return bool(await caller.sequences.reap())

    await eventually(are_reaped, 30.0, "the end of a lease")
    await answer_rest(pool.delivery, caller.sequences)
    (answer,) = await pool.answered(waiting)

    assert answer.failure is not None
    assert answer.failure.code == SequenceLost.code
    assert await outcome(caller, 1.0, 1) == SequenceLost.code
    assert value(await caller.send(5.0, 1, start=True)) == 5
