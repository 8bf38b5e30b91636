"""How a request lies in the queue: as one frame, or as a frame and a payload beside it.

Similar requests are neither checked nor laid out again (`Layouts`). The size of an entry is bounded, because lanes are
limited by entries.
"""

from qinfer.core.messages import MemoryReference, OutgoingRequest
from qinfer.errors import PayloadTooLarge
from qinfer.queue.entries import Payload
from qinfer.tensors import Tensor
from qinfer.wire.frame import (
    ReferringForm,
    Repeats,
    RequestForm,
    encode_request,
    encode_request_apart,
    timeout_width,
    usual_places,
)

MAX_HEAD_BYTES = 2**20
"""The most bytes of a request without its tensors."""

PAYLOAD_MARGIN_S = 60.0
"""How long tensors beside the stream outlive the deadline."""

_MAX_LAYOUTS = 1024

Kind = tuple[object, ...]


class Layouts:
    """The layouts of similar requests."""

    def __init__(self, inline_max_bytes: int) -> None:
        self.inline_max_bytes = self.remembered_bytes = inline_max_bytes
        self._forms: dict[Kind, RequestForm | ReferringForm] = {}
        self._referring: set[Kind] = set()
        self.find = self._forms.get
        self._repeats = Repeats()

    def lay_out(self, request: OutgoingRequest, kind: Kind | None) -> tuple[bytes, Payload | None]:
        """Encodes a stamped request; the second of its kind makes the layout known."""
        frame, payload = lay_out(request, self.inline_max_bytes)
        if kind is None or payload is not None or tensor_bytes(request) > self.remembered_bytes:
            return frame, payload
        if self._repeats.has(kind):
            self._learn(kind, RequestForm(request))
        return frame, payload

    def learn_referring(self, kind: Kind, request: OutgoingRequest, memory: MemoryReference) -> None:
        """Makes the layout of requests known whose tensors are in memory, until `forget_referring`."""
        if self._repeats.has(kind):
            self._learn(kind, ReferringForm(request, memory, places_of(request)))
            self._referring.add(kind)

    def forget_referring(self) -> None:
        """Forgets them, because the memory may no longer be read by all workers."""
        while self._referring:
            self._forms.pop(self._referring.pop(), None)

    def _learn(self, kind: Kind, form: RequestForm | ReferringForm) -> None:
        if len(self._forms) >= _MAX_LAYOUTS:
            self._forms.clear()
            self._referring.clear()
        self._forms[kind] = form


def kind_of(request: OutgoingRequest, entrance: object, timeout_s: float) -> Kind | None:
    """Returns the kind of an unstamped request to an entrance.

    `None` if its frame is unique or its bytes must be checked.
    """
    if request.client_id or request.parameters or request.priority or request.sequence is not None or request.holders:
        return None
    if request.calls is not None:
        return None
    trace = request.trace
    if trace and not trace.isascii():
        return None
    inputs = request.inputs
    spares = request.spares_outputs
    kind = (entrance, request.tenant, request.outputs, spares, len(trace), timeout_width(timeout_s), request.landed_at)
    if len(inputs) != 1:
        return None if any(t.datatype == "BYTES" for t in inputs) else (*kind, *[_kind_of(tensor) for tensor in inputs])
    return None if inputs[0].datatype == "BYTES" else (*kind, _kind_of(inputs[0]))


def _kind_of(tensor: Tensor) -> Kind:
    return tensor.name, tensor.datatype, tensor.shape, len(tensor.data)


def places_of(request: OutgoingRequest) -> tuple[int, ...]:
    """Returns where a request's tensors are in memory."""
    return request.landed_at or usual_places(request.inputs)


def tensor_bytes(request: OutgoingRequest) -> int:
    """Returns the bytes of a request's tensors."""
    return sum([len(tensor.data) for tensor in request.inputs])


def lay_out(request: OutgoingRequest, inline_max_bytes: int) -> tuple[bytes, Payload | None]:
    """Encodes a stamped request and sets its `payload`; returns the frame, and a payload beside it."""
    size = tensor_bytes(request)
    if size <= inline_max_bytes:
        frame = encode_request(request)
        check_head(len(frame) - size)
        return frame, None
    request.payload = True
    frame, data = encode_request_apart(request)
    check_head(len(frame))
    return frame, Payload(request.id, data, request.timeout_s + PAYLOAD_MARGIN_S)


def check_head(size: int) -> None:
    """Raises `PayloadTooLarge` if the request is too large without its tensors."""
    if size > MAX_HEAD_BYTES:
        raise PayloadTooLarge(
            f"the id, names and parameters of the request take {size} bytes, more than {MAX_HEAD_BYTES}; "
            "send what is large as a tensor"
        )
