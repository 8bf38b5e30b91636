"""Submission of the steps of sequences, which go to their sequence instead of a lane, and end it if they fail.

    step ─▶ Sequences.append, if the owner is known, ─▶ pending, until its response comes
              │ else Sequences.submit_together          a stored response is delivered at once
              └─▶ cancelled, or too late ─▶ Sequences.fail, or cancel, which asks the owner: the sequence ends, later
                                            steps get an error that says why

A step is sent after the reply to the one before of its sequence. Steps that go by script take those behind them along.

A numbered step (`qinfer_step`) may be sent again after a broken connection, so a caller that leaves does not end the
sequence.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from hashlib import blake2b

import msgspec

from qinfer.core.messages import OutgoingRequest, SequenceFlags
from qinfer.core.settings import LimitSettings
from qinfer.errors import QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.queue.entries import Payload
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import stored_response
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import SequenceId, SequencePin, StepRequest, SubmitLimits, SubmittedStep
from qinfer.queue.tenants import Places
from qinfer.submission.pending import OfStep, PendingCall, PendingRequests

# The only partition, until models are spread over several.
_PARTITION = 0


class SequenceSteps:
    """Submits the steps of sequences."""

    def __init__(self, queue: Queue, limits: LimitSettings, pending: PendingRequests) -> None:
        self._queue = queue
        self._limits = SubmitLimits(steps=limits.max_sequence_steps, open=limits.max_sequences)
        self._pending = pending
        self._models: dict[str, ModelSteps] = {}
        self._work = asyncio.Event()

    def of(self, model: str) -> "ModelSteps":
        """Returns what submits the steps of a model, of all its versions."""
        steps = self._models.get(model)
        if steps is None:
            sequences, places = self._queue.sequences(model, _PARTITION), self._queue.places
            steps = self._models[model] = ModelSteps(sequences, places, self._limits, self._pending, self._work.set)
        return steps

    async def run(self) -> None:
        """Submits by script until cancelled: all steps of a tick together, except those with large payloads."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._work.wait()
                self._work.clear()
                for of_model in self._models.values():
                    for steps in of_model.take_waiting():
                        group.create_task(of_model.submit_together(steps), name="steps of sequences")


class _Step(msgspec.Struct, eq=False, gc=False):
    pending: PendingCall
    sequence: SequenceId
    flags: SequenceFlags
    start: SequencePin | None
    digest: str
    timeout_s: float
    frame: bytes
    payload: Payload | None


class ModelSteps:
    """Submits the steps of one model's sequences."""

    def __init__(
        self,
        sequences: Sequences,
        places: Places,
        limits: SubmitLimits,
        pending: PendingRequests,
        wake: Callable[[], None],
    ) -> None:
        self._sequences = sequences
        self._places = places
        self._limits = limits
        self._pending = pending
        self._wake = wake
        self._behind: dict[SequenceId, deque[_Step] | None] = {}
        """The sequences of which a step is on its way, and the steps behind it, if any."""
        self._by_script: list[_Step] = []

    def submit(
        self,
        pending: PendingCall,
        request: OutgoingRequest,
        served: ServedVersion,
        frame: bytes,
        payload: Payload | None,
    ) -> None:
        """Submits a checked step; its outcome goes to the pending requests."""
        flags = request.sequence
        assert flags is not None, "a request to a stateful model names its sequence"
        sequence = SequenceId(request.tenant, flags.id)
        pending.step = OfStep(self._sequences, is_numbered=flags.step > 0)
        start = _pin(served) if flags.start else None
        digest = _digest(request) if flags.start and flags.step else ""
        step = _Step(pending, sequence, flags, start, digest, request.timeout_s, frame, payload)
        if sequence in self._behind:
            self._sequences.check_up()
            behind = self._behind[sequence]
            self._behind[sequence] = behind = deque() if behind is None else behind
            behind.append(step)
        elif self._append(step):
            self._behind[sequence] = None
        else:
            self._sequences.check_up()
            self._behind[sequence] = None
            self._send_by_script(step)

    def take_waiting(self) -> Iterator[list[_Step]]:
        """Yields the steps that go by script, each with those behind it; the last are all without payloads."""
        waiting, self._by_script = self._by_script, []
        together: list[_Step] = []
        for step in waiting:
            behind = self._behind[step.sequence]
            self._behind[step.sequence] = None
            steps = [step, *(behind or ())]
            if any(one.payload is not None for one in steps):
                yield steps
            else:
                together += steps
        if together:
            yield together

    async def submit_together(self, steps: Items[_Step]) -> None:
        """Submits steps by script, and goes on with those behind them."""
        outcomes: list[SubmittedStep | QinferError]
        requests = [(step.sequence, self._request_of(step)) for step in steps]
        try:
            outcomes = await self._sequences.submit_together(requests, self._limits)
        except QinferError as error:
            outcomes = [error] * len(steps)
        stored: list[PendingCall] = []
        for step, outcome in zip(steps, outcomes, strict=True):
            if self._is_stored(step.pending, outcome):
                stored.append(step.pending)
        for sequence in dict.fromkeys(step.sequence for step in steps):
            self._go_on(sequence)
        for pending in stored:
            await self._deliver_stored(pending)

    def _append(self, step: _Step) -> bool:
        """Appends a step to its owner's lane, if that is known; `_appended` gets the outcome."""
        if step.payload is not None or step.start is not None:
            return False
        lane = self._sequences.owners_lane(step.sequence, self._limits.steps, is_end=step.flags.end)
        if lane is None:
            return False
        self._sequences.append(lane, step.frame, partial(self._appended, step))
        return True

    def _appended(self, step: _Step, outcome: SubmittedStep | QinferError | None) -> None:
        if outcome is None:
            self._send_by_script(step)
            return
        try:
            self._is_stored(step.pending, outcome)
        finally:  # a caller's mistake holds no other step up
            if self._behind[step.sequence]:
                self._go_on(step.sequence)
            else:
                del self._behind[step.sequence]

    def _send_by_script(self, step: _Step) -> None:
        self._by_script.append(step)
        self._wake()

    def _go_on(self, sequence: SequenceId) -> None:
        """Sends the next step of a sequence, behind the one whose reply has come."""
        behind = self._behind[sequence]
        while behind:
            step = behind.popleft()
            try:
                if not self._append(step):
                    self._send_by_script(step)
            except QinferError as error:
                self._pending.submitted(step.pending, error)
            else:
                return
        del self._behind[sequence]

    def _is_stored(self, pending: PendingCall, outcome: SubmittedStep | QinferError) -> bool:
        """Notes a step's place or failure; returns whether its response is stored already."""
        of_step = pending.step
        assert of_step is not None, "it is a step"
        if isinstance(outcome, QinferError):
            self._pending.submitted(pending, outcome)
            return False
        of_step.place, of_step.entry = outcome.place, outcome.entry
        if outcome.entry is None:
            return True
        self._pending.submitted(pending, outcome.entry)
        return False

    async def _deliver_stored(self, pending: PendingCall) -> None:
        of_step = pending.step
        assert of_step is not None, "it is a step"
        assert of_step.place is not None, "it has one"
        try:
            self._pending.deliver(await stored_response(of_step.sequences, of_step.place, pending.request_id))
        except QinferError as error:
            self._pending.submitted(pending, error)

    def _request_of(self, step: _Step) -> StepRequest:
        tenant, flags = step.sequence.tenant, step.flags
        return StepRequest(
            frame=step.frame,
            timeout_s=step.timeout_s,
            start=step.start,
            end=flags.end,
            number=flags.step,
            digest=step.digest,
            payload=step.payload,
            weight=self._places.weigh(tenant) if flags.start and tenant else 0,
        )


def _pin(served: ServedVersion) -> SequencePin:
    sequences = served.spec.sequences
    assert sequences is not None, "only stateful models have sequences"
    return SequencePin(
        version=served.version,
        generation=served.generation,
        is_explicit=sequences.is_explicit,
        idle_s=sequences.max_idle_s,
    )


def _digest(request: OutgoingRequest) -> str:
    """Returns a request's hash, or its key: earlier steps of an ensemble may change the content at a repetition."""
    if request.step_key:
        return request.step_key
    digest = blake2b(digest_size=16)
    about = [(tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs]
    digest.update(msgspec.json.encode((about, request.outputs, sorted(request.parameters.items()))))
    for tensor in request.inputs:
        digest.update(tensor.data)
    return digest.hexdigest()
