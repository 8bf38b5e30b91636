"""Submission of the steps of sequences, which go to their sequence instead of a lane, and end it if they fail.

    step ─▶ Sequences.submit ─▶ pending, until its response comes      a stored response is delivered at once
              └─▶ cancelled, or too late ─▶ Sequences.fail, or cancel, which asks the owner: the sequence ends, later
                                            steps get an error that says why

A numbered step (`qinfer_step`) may be sent again after a broken connection, so a caller that leaves does not end the
sequence.
"""

import asyncio
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from qinfer.core.messages import OutgoingRequest
from qinfer.core.settings import LimitSettings
from qinfer.errors import QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.queue.entries import Payload
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import stored_response
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import SequenceId, SequencePin, StepRequest, SubmitLimits, SubmittedStep
from qinfer.submission.pending import OfStep, PendingCall, PendingRequests

# The only partition, until models are spread over several.
_PARTITION = 0


class SequenceSteps:
    """Submits the steps of sequences."""

    def __init__(self, queue: Queue, limits: LimitSettings, pending: PendingRequests) -> None:
        self._queue = queue
        self._limits = SubmitLimits(steps=limits.max_sequence_steps, open=limits.max_sequences)
        self._pending = pending
        self._waiting: list[_WaitingStep] = []
        self._work = asyncio.Event()

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
        step = StepRequest(
            frame=frame,
            timeout_s=request.timeout_s,
            start=_pin(served) if flags.start else None,
            end=flags.end,
            number=flags.step,
            digest=_digest(request) if flags.start and flags.step else "",
            payload=payload,
            weight=self._queue.places.weigh(request.tenant) if flags.start and request.tenant else 0,
        )
        sequences = self._queue.sequences(served.spec.name, _PARTITION)
        sequences.check_up()
        pending.step = OfStep(sequences, is_numbered=flags.step > 0)
        self._waiting.append(_WaitingStep(pending, sequences, SequenceId(request.tenant, flags.id), step))
        self._work.set()

    async def run(self) -> None:
        """Submits until cancelled: all steps of a tick together, except those with or behind large payloads."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._work.wait()
                self._work.clear()
                waiting, self._waiting = self._waiting, []
                together: dict[Sequences, list[_WaitingStep]] = {}
                alone: list[_WaitingStep] = []
                behind: set[SequenceId] = set()
                for each in waiting:
                    if each.step.payload is None and each.sequence not in behind and each.of.is_free(each.sequence):
                        together.setdefault(each.of, []).append(each)
                    else:
                        behind.add(each.sequence)
                        alone.append(each)
                # Tasks begin in this order: of one sequence's steps those submitted together go first.
                for sequences, steps in together.items():
                    group.create_task(self._submit(sequences, steps), name="steps of sequences")
                for each in alone:
                    group.create_task(self._submit(each.of, [each]), name="step of a sequence")

    async def _submit(self, sequences: Sequences, steps: "list[_WaitingStep]") -> None:
        outcomes: list[SubmittedStep | QinferError]
        try:
            outcomes = await sequences.submit_together([(each.sequence, each.step) for each in steps], self._limits)
        except QinferError as error:
            outcomes = [error] * len(steps)
        for each, outcome in zip(steps, outcomes, strict=True):
            await self._handle_outcome(each.pending, outcome)

    async def _handle_outcome(self, pending: PendingCall, outcome: SubmittedStep | QinferError) -> None:
        of_step = pending.step
        assert of_step is not None, "it is a step"
        if isinstance(outcome, QinferError):
            self._pending.submitted(pending, outcome)
            return
        of_step.place, of_step.entry = outcome.place, outcome.entry
        if outcome.entry is not None:
            self._pending.submitted(pending, outcome.entry)
            return
        try:
            await self._deliver_stored(pending, of_step)
        except QinferError as error:
            self._pending.submitted(pending, error)

    async def _deliver_stored(self, pending: PendingCall, of_step: OfStep) -> None:
        assert of_step.place is not None, "it has one"
        self._pending.deliver(await stored_response(of_step.sequences, of_step.place, pending.request_id))


class _WaitingStep(NamedTuple):
    pending: PendingCall
    of: Sequences
    sequence: SequenceId
    step: StepRequest


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
