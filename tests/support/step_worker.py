"""A worker of a stateful model, played by hand: it takes steps of sequences as gateways submit them, and sums.

await worker.take() ──▶ worker.steps ──▶ await worker.answer(step): commit, publish, finish
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import LEFT, TIMED_OUT, Cancelled, DeadlineExceeded
from qinfer.models.config.config import normalise, parse, to_spec
from qinfer.models.spec import ModelSpec
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import answer_lost, answer_rest, answer_step
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import (
    CommittedStep,
    DeliveredStep,
    Delivery,
    OwnedLife,
    SequenceId,
    StepPlace,
    UnansweredStep,
    done_name,
)
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import PayloadApart, decode_request, encode_responses

T = TypeVar("T")

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

    @property
    def unanswered(self) -> UnansweredStep:
        """What is to be answered."""
        lease = self.taken.lease
        assert lease is not None
        return UnansweredStep(self.taken.place, lease.entry, lease.frame, None)


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
        self._accepted: dict[SequenceId, int] = {}
        self._restarted: set[SequenceId] = set()
        self._over: set[SequenceId] = set()
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
            flags = request.sequence
            committed = CommittedStep(
                place=place,
                token=taken.token,
                response=encode_responses([response]),
                state=bytes([total]),
                ends=flags is not None and flags.end,
                entry_id=done_name(lease.entry),
            )
            assert await self.sequences.commit([committed]) == [True]
        await answer_step(self._queue, self.sequences, step.unanswered)
        self.steps.remove(step)
        await self._make_way(place.sequence)

    async def work(self, count: int) -> None:
        """Answers the next steps, one after the other."""
        for _ in range(count):
            await self.answer((await self.take(1))[0])

    async def meanwhile(self, awaited: Coroutine[Any, Any, T]) -> T:
        """Takes steps until something else is done."""
        task = asyncio.create_task(awaited)

        async def is_done() -> bool:
            await self._take_new()
            return task.done()

        await eventually(is_done, description="the end of a task")
        return await task

    async def answer_rest(self) -> None:
        """Answers what is left of lives that have ended, as workers and janitors do."""
        await answer_rest(self._queue, self.sequences)

    async def end_cancelled(self) -> None:
        """Waits until it is told of a step that is cancelled or late, and ends its sequence there."""

        async def is_told() -> bool:
            await self._take_new()
            return bool(self.cancelled)

        await eventually(is_told, description="the word of a cancelled step")
        taken = self.cancelled.pop()
        error = DeadlineExceeded(TIMED_OUT) if taken.code == DeadlineExceeded.code else Cancelled(LEFT)
        await self.sequences.fail(taken.place, Failure.from_error(error), taken.token)
        await self.answer_rest()

    async def _take_new(self) -> None:
        for owned in await self.sequences.own(self._name, 1, 10) or []:
            self._owned[owned.sequence], self._accepted[owned.sequence] = owned, owned.committed
            self._over.discard(owned.sequence)
        news = await self.sequences.take_steps(self._name, 1, self._ticket)
        assert news is not None, "its lease goes on"
        self._ticket = news.ticket
        for taken in news.taken:
            if taken.what is Delivery.CANCEL:
                self.cancelled.append(self._named(taken))
            elif taken.what is Delivery.RESTART:
                self._restarted.add(taken.place.sequence)
                await self._make_way(taken.place.sequence)
            elif taken.lease is None:
                if taken.token == self._owned[taken.place.sequence].token:
                    self._over.add(taken.place.sequence)
                self.steps = [step for step in self.steps if step.taken.token != taken.token]
            elif taken.token != self._owned[taken.place.sequence].token or taken.place.sequence in self._over:
                lost = UnansweredStep(taken.place, taken.lease.entry, taken.lease.frame, None, taken.sender)
                await answer_lost(self._queue, self.sequences, lost, taken.token)
            elif all(step.taken.lease != taken.lease for step in self.steps):
                self.steps.append(await self._numbered(taken))

    def _named(self, taken: DeliveredStep) -> DeliveredStep:
        """Returns the word of a cancelled step with its place, if it was told by its entry."""
        places = [each.taken.place for each in self.steps if each.unanswered.entry.entry_id == taken.entry_id]
        if not places:
            return taken
        return msgspec.structs.replace(taken, place=places[0], token=self._owned[places[0].sequence].token)

    async def _make_way(self, sequence: SequenceId) -> None:
        """Ends a life without steps for the one behind it."""
        if sequence in self._restarted and all(step.taken.place.sequence != sequence for step in self.steps):
            self._restarted.remove(sequence)
            owned = self._owned[sequence]
            await self.sequences.end_idle(StepPlace(sequence, owned.life, self._accepted[sequence]), owned.token)

    async def _numbered(self, taken: DeliveredStep) -> TakenStep:
        request, sequence = await self._read(taken), taken.place.sequence
        number = (request.sequence.step if request.sequence else 0) or self._accepted[sequence] + 1
        self._accepted[sequence] = max(self._accepted[sequence], number)
        place = StepPlace(sequence, taken.place.life, number)
        return TakenStep(msgspec.structs.replace(taken, place=place), request)

    async def _read(self, taken: DeliveredStep) -> InferRequest:
        assert taken.lease is not None
        try:
            return decode_request(taken.lease.frame)
        except PayloadApart as apart:
            payload = await self._queue.payload(taken.lease.entry, apart.request.id)
            return decode_request(taken.lease.frame, payload)
