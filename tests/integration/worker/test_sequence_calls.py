"""Models that call models with sequences: a sequence within one request, and one over several requests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qinfer.core.messages import Response
from qinfer.tensors import to_numpy
from tests.support.python_models import execute, write_accumulator, write_model
from tests.support.worker_processes import WorkerProcesses, worker_processes

pytestmark = pytest.mark.timeout(120)

CALLER = execute(
    """
START, END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
responses = []
for request in requests:
    what = float(x(request).flat[0])
    for flags in (START, 0, END) if what > 0 else (START,) if what == 0 else (0,):
        call = pb_utils.InferenceRequest(
            model_name="accumulator", requested_output_names=["y"], correlation_id=int(abs(what)) + 1, flags=flags,
            inputs=[pb_utils.Tensor("x", x(request))])
        answer = call.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
    responses.append(pb_utils.InferenceResponse(answer.output_tensors(), parameters=json.loads(answer.parameters())))
return responses
"""
)
"""Sends `x` to the accumulator: a whole sequence if it is more than 0, its beginning if it is 0, else its middle."""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    write_model(tmp_path / "repository", CALLER, "caller", dims="1", max_batch_size=1)
    write_accumulator(tmp_path / "repository")
    async with worker_processes(tmp_path) as one:
        yield one


def told(answer: Response) -> object:
    return answer.failure.message if answer.failure is not None else float(to_numpy(answer.outputs[0]).item())


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_model_sends_whole_sequences(pool: WorkerProcesses, workers: int) -> None:
    """Each step finds what the one before left, wherever it is executed; sequences of several requests stay apart."""
    for _ in range(workers):
        await pool.worker()

    answers = await pool.answered(*[pool.submit(float(value), "caller") for value in range(1, 7)])

    assert [told(answer) for answer in answers] == [3.0 * value for value in range(1, 7)]
    assert answers[0].parameters == {"correlation_id": 2, "flags": 2}


async def test_a_step_of_no_sequence_is_the_models_failure(pool: WorkerProcesses) -> None:
    """By Triton's text; the sequence that was begun and not ended goes on at the next request."""
    await pool.worker()

    (begun,) = await pool.answered(pool.submit(0.0, "caller"))
    (refused,) = await pool.answered(pool.submit(-5.0, "caller"))

    assert told(begun) == 0.0
    assert "must specify the START flag on the first request of the sequence" in str(told(refused))
