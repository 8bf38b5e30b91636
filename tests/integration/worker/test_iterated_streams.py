"""Iterative models that are decoupled, in real processes: each execution of a request may send responses of it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qinfer.testing import eventually
from tests.support.python_models import DECOUPLED, HEADER, write_model
from tests.support.served_models import ServedModels, models_served, tensor

pytestmark = pytest.mark.timeout(60)

COUNTDOWN = HEADER + (
    """
LOG = os.path.join(pb_utils.get_model_dir(), "log")

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    {kind} execute(self, requests):
        time.sleep(0.01)
        with open(LOG, "a") as log:
            print(os.getpid(), *[int(x(request).item()) for request in requests], file=log)
        for request in requests:
            self.step(request)

    def step(self, request):
        key = request.correlation_id()
        if not key:  # a row of padding
            return
        sender = request.get_response_sender()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.left[key] = int(x(request).item())
        self.left[key] -= 1
        response = reply(np.full_like(x(request), self.left[key]))
        if self.left[key]:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            sender.send(response)
        else:
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
"""Sends one response with each execution of a request: how many more it sends. Logs its process, and `x` of batches."""

OLDEST = "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 8 } }"
DIRECT = "sequence_batching { iterative_sequence: true }"
ENDLESS = 1_000_000


class Countdowns:
    """The served model, and its log."""

    def __init__(self, served: ServedModels, log: Path) -> None:
        self.served = served
        self._log = log

    async def responses(self, numbers: Sequence[int]) -> dict[str, list[float | str]]:
        """Sends requests on one stream; returns the outputs of each by its id. An error is that of the first one."""

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in numbers:
                x = tensor("x", np.full((1, 1), number, np.float32))
                yield {"model_name": "countdown", "inputs": [x], "request_id": str(number)}

        found: dict[str, list[float | str]] = {str(number): [] for number in numbers}
        answers = self.served.grpc.stream_infer(requests())
        try:
            async for result, error in answers:
                if error is not None:
                    found[str(numbers[0])].append("failed")
                else:
                    found[result.get_response().id].append(float(result.as_numpy("y").item()))
        finally:
            answers.cancel()  # a reader who is cancelled cancels the call only if it waits
        return found

    def executed(self) -> list[list[int]]:
        """Returns the process and the `x` of each execution."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [[int(word) for word in line.split()] for line in lines]

    async def iterated(self, number: int, least: int) -> None:
        """Waits until a request was executed so many times at least."""
        await eventually(lambda: sum(number in one[1:] for one in self.executed()) >= least, 30.0, "executions")


@pytest.fixture(params=[(OLDEST, 8, "def"), (DIRECT, 4, "def"), (DIRECT, 0, "def"), (OLDEST, 8, "async def")])
async def countdowns(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Countdowns]:
    """Both strategies, a model without a batch dimension, and one whose `execute` is a coroutine."""
    scheduling, rows, kind = request.param
    code, options = COUNTDOWN.replace("{kind}", kind), {"dims": 1 if rows else "1, 1", "more": DECOUPLED}
    directory = write_model(
        tmp_path / "repository", code, "countdown", max_batch_size=rows, scheduling=scheduling, **options
    )
    async with models_served(tmp_path / "repository") as served:
        await served.http.load_model("countdown")
        yield Countdowns(served, directory / "log")


async def test_each_execution_sends_its_response(countdowns: Countdowns) -> None:
    assert await countdowns.responses([3, 1, 5]) == {"3": [2, 1, 0], "1": [0], "5": [4, 3, 2, 1, 0]}
    await eventually(lambda: countdowns.served.waits("countdown", 0), description="an empty queue")


async def test_a_cancelled_request_is_executed_no_more(countdowns: Countdowns) -> None:
    left = asyncio.create_task(countdowns.responses([ENDLESS]))
    await countdowns.iterated(ENDLESS, 3)

    left.cancel()
    await asyncio.wait([left])
    await eventually(lambda: countdowns.served.waits("countdown", 0), description="an empty queue")

    async def is_gone() -> bool:
        await countdowns.responses([1])
        return ENDLESS not in countdowns.executed()[-1]

    await eventually(is_gone, 30.0, "an execution without it")


async def test_a_request_fails_with_the_process_that_had_its_state(countdowns: Countdowns) -> None:
    """It has had responses, so that it can't begin anew; later requests have another process."""
    broken = asyncio.create_task(countdowns.responses([ENDLESS]))
    await countdowns.iterated(ENDLESS, 3)

    os.kill(countdowns.executed()[-1][0], signal.SIGKILL)
    found = (await broken)[str(ENDLESS)]

    assert found[-1] == "failed"
    assert found[:-1] == [ENDLESS - number for number in range(1, len(found))]
    assert await countdowns.responses([2]) == {"2": [1, 0]}
