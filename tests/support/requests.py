"""Helpers of the suites about asynchronous requests: one is made, ended and taken."""

import msgspec

from qinfer.core.messages import InferRequest
from qinfer.queue.deliveries import WEBHOOKS, DeliveryItem, DeliveryKind
from qinfer.queue.entries import (
    Acceptance,
    AcceptOutcome,
    Entry,
    EntryAddress,
    Lane,
    Lease,
    RequestOutcome,
    RequestState,
    Settlement,
)
from qinfer.queue.lanes import Queue
from qinfer.wire.frame import encode_request

LANE = Lane("digits", 1, "p1")
LONG_S = 60.0
HOOKS = DeliveryKind(WEBHOOKS, 60.0, 900.0)


def address(request_id: str = "r1", model: str = "digits") -> EntryAddress:
    return EntryAddress(model, 0, request_id)


def acceptance(request_id: str = "r1", model: str = "digits", **changes: object) -> Acceptance:
    plain = Acceptance(
        address=address(request_id, model),
        lane=Lane(model, 1, "p1"),
        frame=request_id.encode(),
        body_hash=f"hash of {request_id}",
        timeout_s=LONG_S,
    )
    return msgspec.structs.replace(plain, **changes)


async def accept(delivery: Queue, request_id: str = "r1", model: str = "digits", **changes: object) -> AcceptOutcome:
    return await delivery.requests.accept(acceptance(request_id, model, **changes))


def frame_of(request_id: str) -> bytes:
    """Returns a frame that tells its request's id, as the move to another lane needs it."""
    return encode_request(InferRequest(model="digits", inputs=(), id=request_id, version=1))


def outcome(state: RequestState = RequestState.SUCCEEDED, **changes: object) -> RequestOutcome:
    return msgspec.structs.replace(RequestOutcome(state=state, blob=b"blob of " + state.encode()), **changes)


def ended(
    request_id: str = "r1",
    state: RequestState = RequestState.SUCCEEDED,
    entry: Entry | None = None,
    model: str = "digits",
    **changes: object,
) -> Settlement:
    return Settlement(address=address(request_id, model), outcome=outcome(state, **changes), entry=entry)


async def settle(delivery: Queue, *settlements: Settlement) -> list[bool]:
    return await delivery.requests.settle(settlements)


async def webhooks(delivery: Queue, model: str = "digits") -> list[DeliveryItem]:
    return await delivery.deliveries.take_due(model, 0, HOOKS, 10)


async def fetch(delivery: Queue, consumer: str = "a", lane: Lane = LANE) -> list[Lease]:
    await delivery.ensure([lane])
    return await delivery.fetch([lane], consumer, 100, 0.0)
