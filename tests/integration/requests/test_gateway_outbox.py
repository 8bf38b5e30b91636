"""Requests that a part of the gateway submits by itself, and whose ends it reads from an outbox of its own."""

from qinfer.core.messages import OutgoingRequest
from qinfer.queue.deliveries import outbox
from qinfer.queue.entries import Ending, RequestState
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses
from qinfer.wire.outputs import OutputPlan
from qinfer_api.auth import ANONYMOUS
from qinfer_api.requests.service import SubmitOptions
from tests.support.gateway import Running, running_gateway

BOX = "label-studio"
KIND = outbox(BOX, 60.0)
SUBMISSION = SubmitOptions(body_hash="h", idempotency_key="project 1, task 7", outbox=BOX, notes=b"task 7")


def request(model: str) -> OutgoingRequest:
    return OutgoingRequest(model=model, inputs=(Tensor("x", "FP32", (1, 4), bytes(16)),))


async def ended(running: Running, model: str) -> Ending:
    """Takes and confirms the one end that comes."""
    found: list[Ending] = []

    async def is_told() -> bool:
        found.extend(await running.delivery.requests.endings(model, 0, KIND, 10))
        return bool(found)

    await eventually(is_told)
    [ending] = found
    await running.delivery.deliveries.done(model, 0, KIND, [ending.id])
    return ending


async def test_the_end_of_a_submission_reaches_its_outbox() -> None:
    """With its notes and its answer; submitted again it is told again, and is not run twice."""
    async with running_gateway() as running:
        submit = running.gateway.requests.submit

        ticket = await submit(ANONYMOUS, request("echo"), OutputPlan(), SUBMISSION)
        first = await ended(running, "echo")
        repeated = await submit(ANONYMOUS, request("echo"), OutputPlan(), SUBMISSION)
        again = await ended(running, "echo")

        assert (ticket.is_new, repeated.is_new) == (True, False)
        for ending in (first, again):
            assert (ending.request_id, ending.notes) == (ticket.record.address.id, b"task 7")
            assert ending.record is not None
            assert ending.record.state is RequestState.SUCCEEDED
            assert ending.blob is not None
            [response] = decode_responses(ending.blob)
            assert response.failure is None
        assert len(running.requests) == 1


async def test_a_failure_reaches_the_outbox() -> None:
    """With its error in the record."""
    async with running_gateway() as running:
        await running.gateway.requests.submit(ANONYMOUS, request("fails"), OutputPlan(), SUBMISSION)

        ending = await ended(running, "fails")

        assert ending.record is not None
        assert ending.record.state is RequestState.FAILED
        assert ending.record.message
