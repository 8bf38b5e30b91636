"""Answers to unexecuted steps of sequences, with the stored response or a failure.

A repeated step gets the stored response of the first. A step left by an ended life gets its stored response, or the
failure that ended the life.
"""

import msgspec

from qinfer.core.messages import Failure, InferRequest, Response
from qinfer.errors import (
    BACKLOG_TIMED_OUT,
    LEFT,
    Cancelled,
    CorruptEntry,
    QinferError,
    QuotaExceeded,
    SequenceEnded,
)
from qinfer.queue.dead_letters import head_of
from qinfer.queue.entries import CHUNK_BYTES, STORED_TTL_S
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import NOBODYS, NOT_KEPT, StepPlace, UnansweredStep
from qinfer.wire.frame import decode_responses, encode_responses


def is_callers(failure: Failure) -> bool:
    """Tells whether the step's gateway counts the failure."""
    return (failure.code == Cancelled.code and LEFT in failure.message) or failure.message == BACKLOG_TIMED_OUT


async def answer_rest(queue: Queue, sequences: Sequences) -> list[tuple[InferRequest, Failure]]:
    """Answers ended lives' steps; returns the failed requests. Safe to run concurrently."""
    failed: list[tuple[InferRequest, Failure]] = []
    while left := await sequences.unanswered():
        for each in left:
            if each.place.number == 0:
                failed += await answer_lost(queue, sequences, each)
                continue
            request = await answer_step(queue, sequences, each)
            if request is not None and each.failure is not None:
                failed.append((request, each.failure))
    return failed


async def answer_step(queue: Queue, sequences: Sequences, step: UnansweredStep) -> InferRequest | None:
    """Answers a step and removes it; returns its request, if readable."""
    request = head_of(step.frame)
    if request is not None and request.reply_to:
        response = await _response(sequences, step.place, request, step.failure)
        await _publish(queue, step, request.reply_to, response)
    await sequences.finish([(step.place, step.entry)])
    return request


async def answer_lost(
    queue: Queue, sequences: Sequences, step: UnansweredStep, token: int = NOBODYS
) -> list[tuple[InferRequest, Failure]]:
    """Submits a step anew whose life the owner of its lane does not own, or answers it; returns the failed request.

    `token` is that of `Sequences.move`.
    """
    request = head_of(step.frame)
    if request is None or request.sequence is None:
        await sequences.finish([(step.place, step.entry)])
        return []
    outcome = await sequences.move(step, request, token)
    if isinstance(outcome, QinferError):
        failure = Failure.from_error(outcome)
        await answer_step(queue, sequences, msgspec.structs.replace(step, failure=failure))
        return [(request, failure)]
    if outcome is not None and outcome.entry is None:
        await answer_step(queue, sequences, msgspec.structs.replace(step, place=outcome.place))
    return []


async def stored_response(sequences: Sequences, place: StepPlace, request_id: str) -> Response:
    """Returns a repeated step's response; `SequenceEnded` if it is no longer kept."""
    blob = await sequences.response(place)
    if blob is None:
        raise SequenceEnded(NOT_KEPT)
    responses = decode_responses(blob)
    if len(responses) != 1:
        raise CorruptEntry(f"a step has {len(responses)} stored responses instead of one")
    return msgspec.structs.replace(responses[0], request_id=request_id)


async def _response(sequences: Sequences, place: StepPlace, request: InferRequest, failure: Failure | None) -> Response:
    if failure is None:
        try:
            return await stored_response(sequences, place, request.id)
        except (SequenceEnded, CorruptEntry) as error:
            failure = Failure.from_error(error)
    return Response(request_id=request.id, model=request.model, version=request.version, failure=failure)


async def _publish(queue: Queue, step: UnansweredStep, reply_to: str, response: Response) -> None:
    blob = encode_responses([response])
    if response.nbytes > CHUNK_BYTES:
        tenant = step.place.sequence.tenant
        apart = msgspec.structs.replace(response, outputs=(), stored=True)
        try:
            await queue.store_result(step.entry.lane, response.request_id, blob, STORED_TTL_S, tenant)
        except QuotaExceeded as error:
            apart = msgspec.structs.replace(response, outputs=(), failure=Failure.from_error(error))
        blob = encode_responses([apart])
    await queue.publish(reply_to, blob)
