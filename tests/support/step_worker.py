"""A worker of a stateful model, played by hand: it takes steps of sequences as gateways submit them, and sums.

await worker.take() ──▶ worker.steps ──▶ await worker.answer(step): commit, publish, finish
"""

from dataclasses import dataclass

from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import LEFT, Cancelled
from qinfer.models.config.config import normalise, parse, to_spec
from qinfer.models.spec import ModelSpec
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import answer_rest, answer_step
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import CommittedStep, DeliveredStep, Delivery, OwnedLife, SequenceId, UnansweredStep
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import PayloadApart, decode_request, encode_responses

SUM = """
name: "sum" backend: "stub" max_batch_size: 2
input { name: "x" data_type: TYPE_UINT8 dims: [ -1 ] } output { name: "y" data_type: TYPE_UINT8 dims: [ -1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  state { input_name: "s" output_name: "t" data_type: TYPE_UINT8 dims: [ 1 ] }
}
"""
"""The first element of `y` is the sum of the first elements of `x` so far; the others are those of `x`."""


def sum_spec() -> ModelSpec:
    """Returns the model that sums."""
    return to_spec(normalise(parse(SUM), "sum", ["model.stub"]), LimitSettings())


@dataclass(frozen=True)
class TakenStep:
    """A step that the worker has taken, and its request."""

    taken: DeliveredStep
    request: InferRequest

    @property
    def value(self) -> int:
        """What is to be added."""
        return bytes(self.request.inputs[0].data)[0]


class StepWorker:
    """See the module docstring.

    Args:
        queue: The queue.
        name: The worker's name.
    """

    def __init__(self, queue: Queue, name: str = "w1") -> None:
        self._queue = queue
        self._name = name
        self._ticket = ""
        self._totals: dict[tuple[SequenceId, int], int] = {}
        self._owned: dict[SequenceId, OwnedLife] = {}
        self.sequences: Sequences = queue.sequences("sum", 0)
        self.steps: list[TakenStep] = []
        self.cancelled: list[DeliveredStep] = []

    async def join(self) -> "StepWorker":
        """Begins its lease."""
        await self.sequences.join(self._name, [1], 3600.0)
        return self

    async def take(self, count: int) -> list[TakenStep]:
        """Takes until it has so many steps that are not answered; returns them."""

        async def has_enough() -> bool:
            await self._take_new()
            return len(self.steps) >= count

        await eventually(has_enough, description=f"{count} steps")
        return list(self.steps)

    async def answer(self, step: TakenStep, *, size: int = 1) -> None:
        """Executes a step, unless it is committed, and publishes its stored response with an output of that size."""
        taken, request = step.taken, step.request
        place, lease = taken.place, taken.lease
        assert lease is not None
        life = (place.sequence, place.life)
        if place.number > self._owned[place.sequence].committed and await self.sequences.response(place) is None:
            total = self._totals[life] = self._totals.get(life, 0) + step.value
            y = Tensor("y", "UINT8", (1, size), bytes([total]) * size)
            response = Response(request_id=request.id, model="sum", version=request.version, outputs=(y,))
            committed = CommittedStep(
                place=place, token=taken.token, response=encode_responses([response]), state=bytes([total])
            )
            assert await self.sequences.commit([committed]) == [True]
        await answer_step(self._queue, self.sequences, UnansweredStep(place, lease.entry, lease.frame, None))
        self.steps.remove(step)

    async def work(self, count: int) -> None:
        """Answers the next steps, one after the other."""
        for _ in range(count):
            await self.answer((await self.take(1))[0])

    async def answer_rest(self) -> None:
        """Answers what is left of lives that have ended, as workers and janitors do."""
        await answer_rest(self._queue, self.sequences)

    async def end_cancelled(self) -> None:
        """Waits until it is told of a step whose caller has left, and ends its sequence there."""

        async def is_told() -> bool:
            await self._take_new()
            return bool(self.cancelled)

        await eventually(is_told, description="the word of a cancelled step")
        taken = self.cancelled.pop()
        await self.sequences.fail(taken.place, Failure.from_error(Cancelled(LEFT)), taken.token)

    async def _take_new(self) -> None:
        for owned in await self.sequences.own(self._name, 1, 10) or []:
            self._owned[owned.sequence] = owned
        news = await self.sequences.take_steps(self._name, 1, self._ticket)
        assert news is not None, "its lease goes on"
        self._ticket = news.ticket
        for taken in news.taken:
            if taken.what is Delivery.CANCEL:
                self.cancelled.append(taken)
            elif taken.lease is None:
                self.steps = [step for step in self.steps if step.taken.token != taken.token]
            elif all(step.taken.lease != taken.lease for step in self.steps):
                self.steps.append(TakenStep(taken, await self._read(taken)))

    async def _read(self, taken: DeliveredStep) -> InferRequest:
        assert taken.lease is not None
        try:
            return decode_request(taken.lease.frame)
        except PayloadApart as apart:
            payload = await self._queue.payload(taken.lease.entry, apart.request.id)
            return decode_request(taken.lease.frame, payload)
