"""Response → settlement: how an asynchronous request ended, in the words of its record."""

from qinfer.batching.execution import Pending
from qinfer.codec.frame import encode_responses
from qinfer.delivery.requests import Address, Outcome, RequestState, Settlement
from qinfer.errors import ErrorCode
from qinfer.messages import Response

_STATES = {
    ErrorCode.DEADLINE_EXCEEDED.value: RequestState.EXPIRED,
    ErrorCode.CANCELLED.value: RequestState.CANCELLED,
}


def settlement_of(item: Pending, response: Response, *, attempt: int | None = None) -> Settlement:
    """Returns what ends a request.

    Args:
        item: The request; its `reply_to` is empty.
        response: Its final response, outputs or failure.
        attempt: The execution that ended it; by default the response's own, and 0, which lets the queue count, where
            it was not executed.
    """
    request, failure = item.request, response.failure
    if attempt is None:
        attempt = response.attempt if response.timing is not None else 0
    blob = encode_responses([response])
    if failure is None:
        outcome = Outcome(state=RequestState.SUCCEEDED, blob=blob, attempt=attempt)
    else:
        state = _STATES.get(failure.code, RequestState.FAILED)
        outcome = Outcome(state=state, blob=blob, code=failure.code, message=failure.message, attempt=attempt)
    return Settlement(
        address=Address(request.model, request.partition, request.id), outcome=outcome, entry=item.lease.entry
    )
