"""Frames of requests that are alike: what differs is the id and the tensors' bytes, all else is looked at once."""

from collections.abc import Hashable

import msgspec

from qinfer.codec.frame import ALIGNMENT, decode_request, encode_request, tensor_places
from qinfer.messages import InferRequest
from qinfer.tensors import Bytes, Tensor

_PLAIN = b"\x01\x00\x00\x00"  # how the frame of a request begins
_LONG_ID = b"\xdc\x00\x11\xd9"  # how its header begins: an array of 17, a text of 32 to 255 bytes
_ID_AT = 13  # behind these, the header's size between them, and the text's size
_MAX_KNOWN = 1024
_SMALL_BYTES = 16 * 1024  # up to here a copy is cheaper than a view


class Repeats:
    """Tells what comes again: to remember what comes once only would cost more than it gains."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def has(self, key: Hashable) -> bool:
        """Tells whether it came before, and notes that it did."""
        if key in self._seen:
            return True
        if len(self._seen) >= _MAX_KNOWN:
            self._seen.clear()
        self._seen.add(key)
        return False


class RequestForm:
    """The frame of one request, to be filled with the ids and elements of others.

    They are alike in all that a frame tells but `id`, which has the same length: server-made ids of one lane do. Their
    tensors are alike in name, datatype, shape and size.

    Args:
        request: The first of them, stamped; its tensors travel in the frame.
    """

    __slots__ = ("_begin", "_end", "_paddings")

    def __init__(self, request: InferRequest) -> None:
        frame, name = encode_request(request), request.id.encode()
        position = frame.index(name)  # the header's first field
        area, _ = tensor_places(frame)
        self._begin, self._end = frame[:position], frame[position + len(name) : area]
        self._paddings = [bytes(-len(tensor.data) % ALIGNMENT) for tensor in request.inputs]

    def fill(self, request: InferRequest) -> bytes:
        """Encodes a request that is alike: to the byte what `encode_request` makes of it."""
        inputs = request.inputs
        if len(inputs) == 1:
            return b"".join((self._begin, request.id.encode(), self._end, inputs[0].data, self._paddings[0]))
        parts: list[Bytes] = [self._begin, request.id.encode(), self._end]
        for tensor, padding in zip(inputs, self._paddings, strict=True):
            parts += (tensor.data, padding)
        return b"".join(parts)


class _Known(msgspec.Struct, gc=False):
    """A request without id and tensors, and of each tensor what it is and where in the tensors' area."""

    request: InferRequest
    tensors: list[tuple[str, str, tuple[int, ...], int, int]]
    size: int


class RequestReader:
    """Decodes frames, and what they have in common once.

    Only what repeats itself is remembered: nothing that has a client's id, a trace or parameters.
    """

    def __init__(self) -> None:
        self._spans: dict[bytes, tuple[int, int, int]] = {}
        self._known: dict[bytes, _Known] = {}
        self._repeats = Repeats()

    def decode(self, frame: Bytes) -> InferRequest:
        """Decodes a request as `decode_request` does; small tensors are copied."""
        if not isinstance(frame, bytes):
            return decode_request(frame)
        span = self._spans.get(frame[:_ID_AT])
        if span is None:
            return self._learn(frame)
        begin, end, area = span
        known = self._known.get(frame[begin:end])
        if known is None:
            return self._learn(frame)
        try:
            name = frame[_ID_AT:begin].decode()
        except UnicodeDecodeError:
            return decode_request(frame)  # which tells what is wrong
        if len(frame) < area + known.size:
            return decode_request(frame)  # as above
        data = frame if len(frame) <= _SMALL_BYTES else memoryview(frame)
        tensors = []
        for tensor, datatype, shape, first, last in known.tensors:
            tensors.append(Tensor(tensor, datatype, shape, data[area + first : area + last]))
        return msgspec.structs.replace(known.request, id=name, inputs=tuple(tensors), parameters={})

    def _learn(self, frame: bytes) -> InferRequest:
        """Decodes a request, and remembers what its frame says around its id, if it comes again."""
        request = decode_request(frame)
        is_special = request.client_id or request.trace or request.parameters or request.sequence is not None
        if is_special or frame[:4] != _PLAIN or frame[8:12] != _LONG_ID:
            return request
        begin, end = _ID_AT + frame[_ID_AT - 1], 8 + int.from_bytes(frame[4:8], "little")
        if not self._repeats.has(frame[begin:end]):
            return request
        if max(len(self._known), len(self._spans)) >= _MAX_KNOWN:
            self._known.clear()
            self._spans.clear()
        area, places = tensor_places(frame)
        tensors = [
            (tensor.name, tensor.datatype, tensor.shape, first, last)
            for tensor, (first, last) in zip(request.inputs, places, strict=True)
        ]
        known = msgspec.structs.replace(request, id="", inputs=())
        self._known[frame[begin:end]] = _Known(known, tensors, max((last for _, last in places), default=0))
        self._spans[frame[:_ID_AT]] = begin, end, area
        return request
