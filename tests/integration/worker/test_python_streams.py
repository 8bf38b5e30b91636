"""Decoupled Python models in real worker processes: order, windows, cancellation, and processes that die."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from qinfer.batching.streams import OVERHEAD_BYTES
from qinfer.core.messages import Credit, Response
from qinfer.errors import QinferError
from qinfer.queue.entries import Entry, Lane
from qinfer.tensors import to_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import encode_credits, encode_request
from tests.support.faulty_backend import write_model as write_faulty_model
from tests.support.python_models import DECOUPLED, execute, write_model
from tests.support.worker_processes import WorkerProcesses, worker_processes

COUNT = 100
WINDOW_BYTES = 64 * 1024
FULL = WINDOW_BYTES // (OVERHEAD_BYTES + 4)
"""So many responses of one number use a window up."""

# Sends 0, 1, … from a thread that begins when a second request has come; the final flag comes alone.
COUNTER = (
    execute(
        """
import threading
self.gate = getattr(self, "gate", None) or threading.Barrier(2)
for request in requests:
    threading.Thread(target=count, args=(self.gate, request.get_response_sender()), daemon=True).start()
"""
    )
    + f"""
def count(gate, sender):
    gate.wait(20)
    for number in range({COUNT}):
        sender.send(reply(np.array([[number]], "f4")))
    sender.send(flags=1)
"""
)

# Sends its process's number without an end.
ENDLESS = execute(
    """
import threading
def work(sender):
    try:
        while True:
            sender.send(reply(np.array([[os.getpid()]], "f4")))
    except pb_utils.TritonModelException:
        with open(os.path.join(pb_utils.get_model_dir(), "left"), "a") as file:
            file.write(f"{sender.is_cancelled()} ")
for request in requests:
    threading.Thread(target=work, args=(request.get_response_sender(),), daemon=True).start()
"""
)


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[WorkerProcesses]:
    repository = directory / "repository"
    write_model(repository, COUNTER, "counter", dims="1", more=DECOUPLED)
    write_model(repository, ENDLESS, "endless", dims="1", more=DECOUPLED)
    write_faulty_model(repository)
    async with worker_processes(directory) as one:
        await one.worker(QINFER_LIMITS__STREAM_WINDOW_BYTES=str(WINDOW_BYTES))
        yield one


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    async with opened(tmp_path) as one:
        yield one


async def ended(pool: WorkerProcesses, request_id: str) -> list[Response]:
    """Waits for all responses to a request."""
    await eventually(
        lambda: request_id in pool.responses and pool.responses[request_id][-1].final, 30.0, "a final response"
    )
    return pool.responses[request_id]


async def came(pool: WorkerProcesses, request_id: str, count: int) -> None:
    """Waits until a request has so many responses."""
    await eventually(lambda: len(pool.responses.get(request_id, ())) >= count, 30.0, f"{count} responses")


def numbers(responses: list[Response]) -> list[float]:
    return [float(to_numpy(response.outputs[0]).item()) for response in responses if response.outputs]


async def test_two_requests_of_one_instance_stream_at_once(pool: WorkerProcesses) -> None:
    """From threads, after `execute` has returned; each in its own order, and each response once."""
    ids = [pool.submit(1.0, "counter"), pool.submit(2.0, "counter")]

    for request_id in ids:
        responses = await ended(pool, request_id)

        assert numbers(responses) == [float(n) for n in range(COUNT)]
        assert [response.index for response in responses] == list(range(COUNT + 1))
        assert [response.final for response in responses] == [False] * COUNT + [True]
        assert responses[-1].failure is None
    await pool.empty("counter")


async def test_a_model_is_no_faster_than_its_caller(pool: WorkerProcesses) -> None:
    """It waits while the window is used up, and goes on when the caller takes."""
    slow, other = pool.submit(1.0, "endless"), pool.submit(2.0, "endless")
    for request_id in (slow, other):
        await came(pool, request_id, FULL)
    responses = pool.responses[slow]
    assert len(responses) == FULL

    credit = Credit(slow, responses[0].attempt, taken_bytes=4 * FULL)
    await pool.delivery.publish(responses[0].credit_to, encode_credits([credit]))
    await came(pool, slow, 2 * FULL)

    assert [response.index for response in responses] == list(range(2 * FULL))
    assert len(pool.responses[other]) == FULL


async def test_the_death_of_a_model_ends_its_streams(pool: WorkerProcesses) -> None:
    """With an error each, and the next request has a new process."""
    ids = [pool.submit(1.0, "endless"), pool.submit(2.0, "endless")]
    for request_id in ids:
        await came(pool, request_id, FULL)
    (pid,) = {int(numbers(pool.responses[request_id])[0]) for request_id in ids}

    os.kill(pid, signal.SIGKILL)

    for request_id in ids:
        failure = (await ended(pool, request_id))[-1].failure
        assert failure is not None
        assert failure.message == "the process of model 'endless' died (signal 9: SIGKILL)"
    await pool.empty("endless")
    later = pool.submit(3.0, "endless")
    await eventually(lambda: later in pool.responses, 30.0, "the first response of a new process")
    assert int(numbers(pool.responses[later])[0]) != pid


async def test_a_cancelled_request_reaches_the_model(pool: WorkerProcesses, tmp_path: Path) -> None:
    """Also one whose model waits for room."""
    request = pool.request(1.0, "endless")
    entries: list[Entry] = []

    def enqueued(outcome: Entry | QinferError) -> None:
        assert isinstance(outcome, Entry)
        entries.append(outcome)

    pool.delivery.submit(Lane("endless", 1), encode_request(request), enqueued)
    await came(pool, request.id, FULL)

    await pool.delivery.cancel(entries)

    left = tmp_path / "repository" / "endless" / "1" / "left"
    await eventually(lambda: left.exists() and left.read_text() == "True ", 30.0, "the end of the model's thread")
