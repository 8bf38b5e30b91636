"""How a program makes a decoded request ready for the queue: its lane, its stamps, its layout, and its lane's limit.

For requests that are accepted, not only submitted: those of `/v1`, and those that a bridge takes from another queue.
"""

from typing import NamedTuple

from qinfer.control.admission import queue_timeout_s
from qinfer.control.catalog import Served
from qinfer.control.routes import Route
from qinfer.delivery.base import Lane
from qinfer.delivery.layout import lay_out, tensor_bytes
from qinfer.delivery.requests import Address
from qinfer.messages import InferRequest
from qinfer.tensors import Bytes


class Stamped(NamedTuple):
    """A request as `Acceptance` takes it.

    Attributes:
        lane: Where it goes.
        frame: The encoded request.
        payload: Its tensors, where they are too large for the frame; empty otherwise.
        limit: The lane takes no more when so many entries wait in it.
    """

    lane: Lane
    frame: bytes
    payload: Bytes
    limit: int


def prepare(  # noqa: PLR0913 - keywords: what a request is stamped with
    request: InferRequest,
    served: Served,
    *,
    address: Address,
    timeout_s: float,
    inline_max_bytes: int,
    tenant: str = "",
    trace: str = "",
    route: Route | None = None,
    max_waiting: int = 0,
) -> Stamped:
    """Stamps and encodes a request that was checked against its model.

    It takes as long as its tensors are large: where these do not fit the frame, call it in a thread.

    Args:
        request: The decoded request, which is written to: prepare it once, and keep what it gives for a repetition. Its
            `timeout_s` is the queue timeout that it asks for, if any.
        served: The model version that it is for.
        address: Its id and partition.
        timeout_s: From its acceptance to its deadline.
        inline_max_bytes: Larger tensors travel beside the stream.
        tenant: Whose request it is.
        trace: W3C `traceparent`; empty when it is not traced.
        route: Where it goes and how it may wait there; `None` = as its priority says.
        max_waiting: A limit of the caller's own for what waits in the lane; 0 = none.

    Returns:
        What is to be stored; its limit is the lowest of the queue policy's, the lane's capacity, and `max_waiting`.

    Raises:
        PayloadTooLarge: It is too large without its tensors.
    """
    if route is None:
        route = served.routes.of(request.priority)
    request.id = address.id
    request.version = served.version
    request.partition = address.partition
    request.queue_timeout_s = queue_timeout_s(route.policy, request.timeout_s)
    request.timeout_s = timeout_s
    request.reply_to = ""
    request.tenant = tenant
    request.trace = trace
    frame, payload = lay_out(request, tensor_bytes(request), inline_max_bytes)
    limits = (route.policy.max_queue_size, served.spec.lane_capacity, max_waiting)
    limit = min((limit for limit in limits if limit), default=0)
    return Stamped(route.lane, frame, payload.data if payload is not None else b"", limit)
