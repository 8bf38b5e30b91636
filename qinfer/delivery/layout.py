"""How a request is laid out in the queue: its tensors within its entry, or beside the stream where they are large.

What is not tensors (ids, names, parameters) is always in the entry, and bounded: a lane holds so many entries.
"""

from qinfer.codec.frame import encode_request, encode_request_apart
from qinfer.codec.request_form import Repeats, RequestForm
from qinfer.delivery.base import Lane, Payload
from qinfer.errors import PayloadTooLarge
from qinfer.messages import InferRequest
from qinfer.tensors import Tensor

MAX_HEAD_BYTES = 2**20
"""What of a request is not tensors may be so large."""

PAYLOAD_MARGIN_S = 60.0
"""Tensors beside the stream outlive the deadline by so much."""

_MAX_KNOWN = 1024

Kind = tuple[object, ...]
"""What requests have in common that are laid out alike."""


class Layouts:
    """How requests were laid out before: one that is alike is neither checked nor laid out again.

    Args:
        inline_max_bytes: Larger tensors go beside the stream.
    """

    def __init__(self, inline_max_bytes: int) -> None:
        self._inline_max_bytes = inline_max_bytes
        self._forms: dict[Kind, RequestForm] = {}
        self._repeats = Repeats()

    def find(self, kind: Kind) -> RequestForm | None:
        """Returns the form of requests of that kind."""
        return self._forms.get(kind)

    def lay_out(self, request: InferRequest, kind: Kind | None) -> tuple[bytes, Payload | None]:
        """Encodes a stamped request that fits its model, as `lay_out` does; the second of its kind makes it known.

        An equal kind means equal names, datatypes, shapes and sizes: they fit, too.

        Raises:
            PayloadTooLarge: It is too large without its tensors.
        """
        frame, payload = lay_out(request, tensor_bytes(request), self._inline_max_bytes)
        if kind is not None and payload is None and self._repeats.has(kind):
            if len(self._forms) >= _MAX_KNOWN:
                self._forms.clear()
            self._forms[kind] = RequestForm(request)
        return frame, payload


def kind_of(request: InferRequest, lane: Lane, generation: int, tenant: str) -> Kind | None:
    """Tells what a request has in common with others; `None` where it is too special, or its bytes have to be checked.

    Args:
        request: The request, not stamped yet.
        lane: The lane it is for, which also tells model and version.
        generation: The model's.
        tenant: Whose it is.
    """
    if request.client_id or request.parameters or request.priority or request.sequence is not None:
        return None
    inputs, kind = request.inputs, (lane, generation, tenant, request.outputs)
    if len(inputs) != 1:
        return None if any(t.datatype == "BYTES" for t in inputs) else (*kind, *[_kind_of(tensor) for tensor in inputs])
    return None if inputs[0].datatype == "BYTES" else (*kind, _kind_of(inputs[0]))


def _kind_of(tensor: Tensor) -> Kind:
    return tensor.name, tensor.datatype, tensor.shape, len(tensor.data)


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
