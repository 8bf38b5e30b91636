"""A caller of a stateful model in worker processes: submits steps as gateways do, and has their answers."""

import msgspec

from qinfer.core.messages import Response, SequenceFlags
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import SequenceId, SequencePin, StepRequest
from qinfer.tensors import to_numpy
from qinfer.wire.frame import encode_request
from tests.support.worker_processes import WorkerProcesses

TIMEOUT_S = 300.0
"""The deadline of a step: longer than any test waits."""


class SequenceCaller:
    """See the module docstring.

    Args:
        pool: The workers.
        model: The model, whose input is FP32[1].
        port: The input's name.
        is_explicit: Its state is in its own memory.
    """

    def __init__(self, pool: WorkerProcesses, model: str, port: str = "x", *, is_explicit: bool = False) -> None:
        self._pool = pool
        self._model = model
        self._port = port
        self._is_explicit = is_explicit
        self.sequences: Sequences = pool.delivery.sequences(model, 0)

    def step(
        self, number: float, correlation_id: int, *, start: bool = False, end: bool = False
    ) -> tuple[str, StepRequest]:
        """Makes a step; returns its request id, too."""
        request = self._pool.request(number, self._model)
        request.inputs = (msgspec.structs.replace(request.inputs[0], name=self._port),)
        request.timeout_s = TIMEOUT_S
        request.sequence = SequenceFlags(correlation_id, start, end)
        pin = SequencePin(version=1, generation=request.generation, is_explicit=self._is_explicit, idle_s=TIMEOUT_S)
        frame = encode_request(request)
        return request.id, StepRequest(frame=frame, timeout_s=TIMEOUT_S, start=pin if start else None, end=end)

    async def submit(self, number: float, correlation_id: int, *, start: bool = False, end: bool = False) -> str:
        """Submits a step; returns its request id."""
        request_id, step = self.step(number, correlation_id, start=start, end=end)
        await self.sequences.submit(SequenceId("", correlation_id), step)
        return request_id

    async def send(self, number: float, correlation_id: int, *, start: bool = False, end: bool = False) -> Response:
        """Submits a step, and waits for its answer."""
        (response,) = await self._pool.answered(await self.submit(number, correlation_id, start=start, end=end))
        return response


def value(response: Response) -> float:
    """Returns the number of an answer."""
    assert response.failure is None, response.failure
    return float(to_numpy(response.outputs[0]).item())
