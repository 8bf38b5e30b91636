"""Sequences on inline workers: a stateful stub that sums, and callers that send its steps."""

import asyncio
from dataclasses import dataclass, field

from qinfer.core.messages import InferRequest, Response, SequenceFlags
from qinfer.queue.entries import Entry, Payload
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import SequenceId, SequencePin, StepRequest, SubmittedStep
from qinfer.wire.frame import encode_request, encode_request_apart
from tests.support.inline_workers import InlineWorkers, value

STATE = 'state {{ input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ {} ] }}'
"""With mode `add`, `y = x + s`, and `t` is the same."""

CONTROL = """control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }"""


def scheduler(*, explicit: bool = False, strategy: str = "direct { }", idle_s: float = 60.0, dims: int = 2) -> str:
    """Returns `sequence_batching` for a stub."""
    more = "" if explicit else STATE.format(dims)
    return f"sequence_batching {{ {strategy} {more} max_sequence_idle_microseconds: {round(idle_s * 1e6)} }}"


@dataclass
class Sequencing:
    """Callers of the stateful stub of a scene."""

    scene: InlineWorkers
    explicit: bool = False
    idle_s: float = 60.0
    version: int = 1
    generation: int = 0
    width: int = 2
    submitted: list[SubmittedStep] = field(default_factory=list)

    @property
    def sequences(self) -> Sequences:
        """The sequences of the stub."""
        return self.scene.delivery.sequences("stub", 0)

    async def model(
        self,
        *,
        versions: tuple[int, ...] = (1,),
        instances: int = 1,
        strategy: str = "direct { }",
        dims: int = 2,
        more: str = "",
    ) -> None:
        """Stores the stub."""
        text = scheduler(explicit=self.explicit, idle_s=self.idle_s, strategy=strategy, dims=dims)
        self.generation = await self.scene.model(
            versions=versions, mode="add", scheduler=text, instances=instances, dims=dims, more=more
        )

    def request(self, number: float, sequence: SequenceFlags, timeout_s: float) -> InferRequest:
        """Returns the request of a step."""
        request = self.scene.request(number, width=self.width, timeout_s=timeout_s)
        request.sequence = sequence
        return request

    async def send(
        self,
        number: float,
        correlation_id: int | str = 1,
        *,
        start: bool = False,
        end: bool = False,
        step: int = 0,
        timeout_s: float = 30.0,
        apart: bool = False,
    ) -> "asyncio.Future[Response]":
        """Submits a step; returns its answer to come."""
        request = self.request(number, SequenceFlags(correlation_id, start, end, step), timeout_s)
        payload = None
        if apart:
            request.payload = True
            frame, data = encode_request_apart(request)
            payload = Payload(request.id, data, 60.0)
        else:
            frame = encode_request(request)
        pin = SequencePin(
            version=self.version, generation=self.generation, is_explicit=self.explicit, idle_s=self.idle_s
        )
        answer = self.scene.expect(request.id)
        of_step = StepRequest(
            frame=frame,
            timeout_s=timeout_s,
            start=pin if start else None,
            end=end,
            number=step,
            digest=str(number),
            payload=payload,
        )
        submitted = await self.sequences.submit(SequenceId("", correlation_id), of_step)
        self.submitted.append(submitted)
        if submitted.entry is None:
            blob = await self.sequences.response(submitted.place)
            assert blob is not None
            self.scene.deliver_as(request.id, blob)
        return answer

    async def sum(self, *numbers: float, correlation_id: int | str = 1) -> list[float]:
        """Sends a whole sequence, one step after the answer to the other; returns the answers."""
        answers: list[float] = []
        for position, number in enumerate(numbers):
            start, end = position == 0, position == len(numbers) - 1
            answers.append(value(await (await self.send(number, correlation_id, start=start, end=end))))
        return answers


def entry_of(submitted: SubmittedStep) -> Entry:
    """Returns the entry of a step that was appended."""
    assert submitted.entry is not None
    return submitted.entry
