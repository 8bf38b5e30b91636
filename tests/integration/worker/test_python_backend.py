"""Python models in real worker processes: what their crashes cost, and what is left when a worker ends."""

import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from qinfer.core.messages import Failure, IdFactory, InferRequest, Response
from qinfer.models.state import State
from qinfer.queue.entries import Lane, reply_address
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer.testing import eventually, wait_until
from qinfer.wire.frame import encode_request
from tests.support.faulty_backend import write_model as write_faulty_model
from tests.support.python_models import ECHO, execute, write_model
from tests.support.worker_processes import WorkerProcesses, worker_processes

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "python_model"

PID, CRASH = 111.0, 666.0

FRAGILE = execute(
    """
for request in requests:
    if x(request) == 666:
        ctypes.string_at(0)
return [reply(np.array([[os.getpid()]], "f4") if x(r) == 111 else x(r)) for r in requests]
""",
    before="""
def finalize(self):
    open(os.path.join(pb_utils.get_model_dir(), "finalized"), "w").close()
""",
)

FRONT = execute(
    """
responses = []
for request in requests:
    call = pb_utils.InferenceRequest(
        model_name="faulty", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x(request))])
    response = call.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    responses.append(pb_utils.InferenceResponse(response.output_tensors()))
return responses
"""
)


def submit(pool: WorkerProcesses, model: str, tensor: Tensor, generation: int = 1) -> str:
    """Sends a request with any input; returns its id."""
    request = InferRequest(
        model=model,
        version=1,
        id=IdFactory().request_id(model),
        inputs=(tensor,),
        timeout_s=30.0,
        reply_to=reply_address("caller"),
        generation=generation,
    )
    pool.delivery.submit(Lane(model, 1), encode_request(request), lambda _: None)
    return request.id


def value(response: Response) -> float:
    assert response.failure is None, response.failure
    return float(to_numpy(response.outputs[0]).item())


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[WorkerProcesses]:
    repository = directory / "repository"
    write_model(repository, FRAGILE, "fragile", dims="1", delay_us=100_000)
    write_model(repository, FRONT, "front", dims="1")
    write_model(repository, ECHO, "wide", dims="-1", delay_us=20_000)
    write_faulty_model(repository)
    async with worker_processes(directory) as one:
        yield one


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    async with opened(tmp_path) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcesses]:
    """One with a worker that serves, for all tests that leave it serving."""
    async with opened(tmp_path_factory.mktemp("serving")) as one:
        await one.worker()
        yield one


@pytest.mark.asyncio(loop_scope="module")
async def test_a_crash_costs_one_request(serving: WorkerProcesses) -> None:
    """The other requests of its batch are answered by the same worker, and so are other models'."""
    pool, (worker,) = serving, serving.processes
    values = [1.0, 2.0, CRASH, 4.0, 5.0, 6.0]
    ids = [pool.submit(v, "fragile") for v in values]
    (other,) = await pool.answered(pool.submit(7.0))

    answers = await pool.answered(*ids)

    bad = answers.pop(values.index(CRASH))
    assert bad.failure is not None
    assert bad.failure.code == "inference_failed"
    assert bad.failure.message == "the process of model 'fragile' died (signal 11: SIGSEGV)"
    assert [value(answer) for answer in answers] == [v for v in values if v != CRASH]
    assert value(other) == 7.0
    assert worker.poll() is None
    await pool.empty("fragile")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_calls_another_by_the_queue(serving: WorkerProcesses) -> None:
    """As Triton's business logic scripting does."""
    answers = await serving.answered(*[serving.submit(float(v), "front") for v in range(1, 6)])

    assert [value(answer) for answer in answers] == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.asyncio(loop_scope="module")
async def test_large_tensors_reach_their_callers(serving: WorkerProcesses) -> None:
    """Answers are views of shared memory until they are published; no later batch may write over them."""
    arrays = [np.full((1, 100_000), n, "<f4") for n in range(40)]

    answers = await serving.answered(*[submit(serving, "wide", from_numpy("x", array)) for array in arrays])

    for array, answer in zip(arrays, answers, strict=True):
        assert answer.failure is None, answer.failure
        np.testing.assert_array_equal(to_numpy(answer.outputs[0]), array)


async def test_the_death_of_a_worker_leaves_no_process(pool: WorkerProcesses) -> None:
    """Not even by SIGKILL."""
    worker = await pool.worker()
    (answer,) = await pool.answered(pool.submit(PID, "fragile"))
    pid = int(value(answer))
    assert is_running(pid)

    worker.kill()
    worker.wait()

    wait_until(lambda: not is_running(pid), description="the end of the model's process")


async def test_a_worker_that_drains_finalizes_its_models(pool: WorkerProcesses, tmp_path: Path) -> None:
    """And their processes have ended with it."""
    worker = await pool.worker()
    (answer,) = await pool.answered(pool.submit(PID, "fragile"))

    worker.send_signal(signal.SIGTERM)
    status = worker.wait(30)

    assert status == 0
    assert (tmp_path / "repository" / "fragile" / "1" / "finalized").exists()
    assert not is_running(int(value(answer)))


def is_running(pid: int) -> bool:
    """Tells whether a process runs; one that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_a_model_without_a_configuration_is_served(tmp_path: Path) -> None:
    """The example of the docs: a worker asks the model for its configuration, stores that, and loads it."""
    shutil.copytree(EXAMPLE, tmp_path / "repository", ignore=shutil.ignore_patterns("__pycache__"))
    texts = np.array([[b"to be or not to be"], ["über".encode()], [b"\xff"]], dtype=object)
    async with worker_processes(tmp_path) as pool:
        pool.start()

        async def is_ready() -> bool:
            return any(
                state.state is State.READY
                for record in await pool.store.workers()
                for state in record.models.get("sentences", {}).values()
            )

        await eventually(is_ready, 30.0, "a model that completed itself")
        stored = await pool.store.model("sentences")
        assert stored is not None
        tensors = [from_numpy("text", row.reshape(1, 1)) for row in texts]
        ids = [submit(pool, "sentences", tensor, stored.generation) for tensor in tensors]
        *good, bad = await pool.answered(*ids)

    counts = [{tensor.name: to_numpy(tensor).item() for tensor in answer.outputs} for answer in good]
    assert counts == [{"words": 6, "letters": 13}, {"words": 1, "letters": 4}]
    assert bad.failure == Failure("invalid_request", "text is not UTF-8")
