"""How a request is laid out in the queue: its tensors within its entry, or beside the stream where they are large.

What is not tensors (ids, names, parameters) is always in the entry, and bounded: a lane holds so many entries.
"""

from qinfer.codec.frame import encode_request, encode_request_apart
from qinfer.delivery.base import Payload
from qinfer.errors import PayloadTooLarge
from qinfer.messages import InferRequest

MAX_HEAD_BYTES = 2**20
"""What of a request is not tensors may be so large."""

PAYLOAD_MARGIN_S = 60.0
"""Tensors beside the stream outlive the deadline by so much."""


def tensor_bytes(request: InferRequest) -> int:
    """Returns how many bytes the tensors of a request have."""
    size = 0
    for tensor in request.inputs:
        size += len(tensor.data)
    return size


def lay_out(request: InferRequest, size: int, inline_max_bytes: int) -> tuple[bytes, Payload | None]:
    """Encodes a stamped request.

    Args:
        request: The request; its field `payload` is set here.
        size: Bytes of its tensors.
        inline_max_bytes: Larger tensors go beside the stream.

    Returns:
        The frame, and what is to be stored with it.

    Raises:
        PayloadTooLarge: It is too large without its tensors.
    """
    if size <= inline_max_bytes:
        frame = encode_request(request)
        check_head(len(frame) - size)
        return frame, None
    request.payload = True
    frame, data = encode_request_apart(request)
    check_head(len(frame))
    return frame, Payload(request.id, data, request.timeout_s + PAYLOAD_MARGIN_S)


def check_head(size: int) -> None:
    """Checks how large a request is without its tensors.

    Raises:
        PayloadTooLarge: It is more than `MAX_HEAD_BYTES`.
    """
    if size > MAX_HEAD_BYTES:
        raise PayloadTooLarge(
            f"the id, names and parameters of the request take {size} bytes, more than {MAX_HEAD_BYTES}; "
            "send what is large as a tensor"
        )
