"""Iterative models in workers, mostly real processes: a `model.py` that has requests executed again and again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qinfer.core.messages import Response
from qinfer.errors import QinferError
from qinfer.queue.entries import Entry, Lane
from qinfer.tensors import to_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request
from tests.support.inline_workers import InlineWorkers
from tests.support.inline_workers import value as inline_value
from tests.support.python_models import HEADER, write_model
from tests.support.worker_processes import WorkerProcesses, worker_processes

COUNTDOWN = HEADER + (
    """
LOG = os.path.join(pb_utils.get_model_dir(), "log")

class TritonPythonModel:
    def initialize(self, args):
        self.done = {}

    def execute(self, requests):
        time.sleep(0.02)
        with open(LOG, "a") as log:
            print(*[int(x(request).item()) for request in requests], file=log)
        return [self.step(request) for request in requests]

    def step(self, request):
        key = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.done[key] = 0
        self.done[key] += 1
        if self.done[key] < x(request).item():
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        return reply(np.full_like(x(request), self.done.pop(key)))
"""
)
"""Executes a request as often as `x` says, and answers with how often it was; logs the `x` of each execution."""

ITERATIVE = "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 8 } }"
ENDLESS = 1e6


class Countdowns:
    """Worker processes with the model.

    Attributes:
        processes: The same.
    """

    def __init__(self, processes: WorkerProcesses, log: Path) -> None:
        self.processes = processes
        self._log = log

    def submit(self, times: float) -> str:
        """Sends a request that is to be executed so many times; returns its id."""
        return self.processes.submit(times, "countdown")

    def executed(self) -> list[list[float]]:
        """Returns the `x` of each execution since the log was forgotten, warm-up aside."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        executions = [[float(word) for word in line.split()] for line in lines]
        return [values for values in executions if any(values)]

    async def iterated(self, times: float, least: int) -> None:
        """Waits until a request was executed so many times at least."""
        await eventually(
            lambda: sum(times in values for values in self.executed()) >= least, 30.0, f"{least} executions"
        )

    def forget(self) -> None:
        """Forgets what was executed so far."""
        self._log.unlink()


@pytest.fixture
async def countdowns(tmp_path: Path) -> AsyncIterator[Countdowns]:
    """Provides the model, which no worker serves yet."""
    directory = write_model(
        tmp_path / "repository",
        COUNTDOWN,
        "countdown",
        dims="1",
        max_batch_size=8,
        scheduling=ITERATIVE,
    )
    async with worker_processes(tmp_path) as processes:
        yield Countdowns(processes, directory / "log")


def value(response: Response) -> float:
    """Returns the first element of an answer."""
    assert response.failure is None, response.failure
    return float(to_numpy(response.outputs[0]).item())


async def test_requests_join_the_running_batch_and_leave_when_they_are_done(countdowns: Countdowns) -> None:
    pool = countdowns.processes
    await pool.worker()
    long = countdowns.submit(100)
    await countdowns.iterated(100, 3)
    later = [countdowns.submit(times) for times in (5, 1, 3)]

    assert [value(answer) for answer in await pool.answered(*later)] == [5, 1, 3]
    assert long not in pool.responses
    assert [value(answer) for answer in await pool.answered(long)] == [100]
    assert any({100.0, 5.0} <= set(values) for values in countdowns.executed())
    assert all(len(responses) == 1 for responses in pool.responses.values())
    await pool.empty("countdown")


async def test_a_cancelled_request_is_executed_no_more(countdowns: Countdowns) -> None:
    pool = countdowns.processes
    await pool.worker()
    request, entries = pool.request(ENDLESS, "countdown"), list[Entry | QinferError]()
    pool.delivery.submit(Lane("countdown", 1), encode_request(request), entries.append)
    await countdowns.iterated(ENDLESS, 3)
    await pool.delivery.cancel([entry for entry in entries if isinstance(entry, Entry)])

    async def is_gone() -> bool:
        await pool.answered(countdowns.submit(1))
        return countdowns.executed()[-1] == [1]

    await eventually(is_gone, 30.0, "an execution without it")
    assert request.id not in pool.responses
    await pool.empty("countdown")


async def test_a_request_of_a_dead_worker_begins_anew_at_another(countdowns: Countdowns) -> None:
    pool = countdowns.processes
    first = await pool.worker()
    request = countdowns.submit(60)
    await countdowns.iterated(60, 5)
    first.kill()
    first.wait()
    countdowns.forget()
    await pool.worker()

    (answer,) = await pool.answered(request)

    assert (value(answer), answer.attempt) == (60, 2)
    assert sum(60.0 in values for values in countdowns.executed()) == 60
    assert len(pool.responses[request]) == 1
    await pool.empty("countdown")


async def test_a_worker_that_drains_ends_what_has_begun(countdowns: Countdowns) -> None:
    pool = countdowns.processes
    worker = await pool.worker()
    request = countdowns.submit(60)
    await countdowns.iterated(60, 5)
    worker.terminate()
    await asyncio.to_thread(worker.wait, 30)

    (answer,) = await pool.answered(request)

    assert (value(answer), answer.attempt, worker.returncode) == (60, 1, 0)
    await pool.empty("countdown")


async def test_a_model_becomes_iterative_and_plain_again(scene: InlineWorkers) -> None:
    """What executes ends as it has begun; what waits goes on as the new configuration has it."""
    await scene.model()
    await scene.worker()
    for scheduler in (ITERATIVE, "dynamic_batching { }"):
        first = await scene.busy()
        waiting = scene.submit(1.0)
        wide = scene.submit(2.0, rows=2)
        await scene.model(scheduler=scheduler)
        await scene.ready()
        later = scene.submit(3.0)

        assert [inline_value(await answer) for answer in (waiting, later)] == [1, 3]
        failure = (await wide).failure
        assert (failure is not None) is (scheduler == ITERATIVE)
        scene.go()
        assert inline_value(await first) == 0
    await scene.queued(0)
