"""The frame encodes requests, responses and credits in Redis; golden files in `tests/unit/wire` fix it.

    byte 0      the frame version
    byte 1      the content: 0 = one request, 1 = responses, 2 = credits
    bytes 2-3   zero
    bytes 4-7   length of the header, uint32 little-endian
    bytes 8-…   the header: msgpack arrays, whose fields are only ever appended
    then        the tensors' raw bytes, if any; each begins at a multiple of 8 from the frame's start

A header has each tensor's offset (from the end of the padded header) and size. A reader accepts its own version and the
one before, skips unknown header fields, and raises `NewerVersion` for later versions. No pickle, ever.

A request with tensors beside the stream (claim check) has a `payload` field; its offsets are positions in the payload,
of the same layout. So are those of a request with a `memory` field, whose tensors the submitting process keeps; its
frame has version 2. Fields appended later are written only if set, so other frames stay the same to the byte.
"""

import struct
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Items
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec

from qinfer.core.messages import (
    MAX_SEQUENCE_ID_BYTES,
    CallRecord,
    CallTraces,
    Credit,
    Failure,
    InferRequest,
    MemoryReference,
    ResourceHolder,
    Response,
    Scalar,
    SequenceFlags,
    Timing,
)
from qinfer.errors import CorruptEntry, DeliveryError
from qinfer.tensors import DATATYPES, Bytes, Tensor
from qinfer.wire.versions import NewerVersion

FRAME_VERSION = 2
"""The newest version, of requests that refer to memory."""

USUAL_VERSION = 1
"""The version of all other frames."""

OLDEST_READABLE = 1
ALIGNMENT = 8
"""The alignment of tensors, in bytes from the frame's start."""

MAX_HEADER_BYTES = 2 * 2**20
"""A larger header is damaged, or an attack."""

_REQUEST, _RESPONSES, _CREDITS = 0, 1, 2
NOTHING_KEPT: Mapping[str, MemoryReference] = {}
_PRELUDE = struct.Struct("<BBHI")
_BESIDE, _IN_MEMORY = "redis", "memory"
_PADDING = tuple(bytes(n) for n in range(ALIGNMENT))

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class TensorPlace(msgspec.Struct, array_like=True, gc=False):
    """A tensor without its bytes, and where they lie in its frame, payload or memory."""

    name: str
    datatype: str
    shape: tuple[_Natural, ...]
    offset: _Natural
    size: _Natural


class PayloadApart(DeliveryError):
    """The tensors are in `Queue.payload`, or in memory, at `places`; `request` lacks only its inputs."""

    def __init__(self, request: InferRequest, places: Items[TensorPlace]) -> None:
        super().__init__(f"the tensors of request {request.id} are stored beside the stream")
        self.request, self.places = request, places


class _RequestHeader(msgspec.Struct, array_like=True, gc=False):
    id: str
    client_id: str
    model: str
    version: _Natural
    inputs: list[TensorPlace]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Scalar]
    priority: _Natural
    timeout_us: _Natural
    reply_to: str
    tenant: str
    trace: str
    partition: _Natural
    generation: _Natural
    attempt: _Natural
    sequence: SequenceFlags | None
    payload: str = ""  # or `_BESIDE`, `_IN_MEMORY`
    queue_timeout_us: _Natural = 0
    holders: tuple[ResourceHolder, ...] = ()
    spares_outputs: bool = False
    traces: _Natural = 0  # 1 = wanted, 2 = with tensors
    memory: MemoryReference | None = None


class _ResponseHeader(msgspec.Struct, array_like=True, gc=False):
    request_id: str
    attempt: _Natural
    index: _Natural
    final: bool
    model: str
    version: _Natural
    outputs: list[TensorPlace]
    failure: Failure | None
    timing: Timing | None
    stored: bool = False
    parameters: Mapping[str, Scalar] = {}
    credit_to: str = ""
    called: tuple[CallRecord, ...] = ()
    memory: MemoryReference | None = None


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(_RequestHeader)
_responses_decoder = msgspec.msgpack.Decoder(list[_ResponseHeader])
_reference_decoder = msgspec.msgpack.Decoder(MemoryReference)
_flags_decoder = msgspec.msgpack.Decoder(SequenceFlags)
_credits_decoder = msgspec.msgpack.Decoder(list[Credit])


def encode_request(request: InferRequest) -> bytes:
    """Encodes a request; copies its tensors once."""
    parts: list[Bytes] = []
    inputs, _ = _lay_out(request.inputs, parts, 0)
    return _join(_REQUEST, _encode_header(request, inputs, ""), parts)


def encode_request_apart(request: InferRequest) -> tuple[bytes, bytes]:
    """Encodes a request as frame and payload."""
    parts: list[Bytes] = []
    inputs, _ = _lay_out(request.inputs, parts, 0)
    return _join(_REQUEST, _encode_header(request, inputs, _BESIDE), []), b"".join(parts)


def take_apart(frame: Bytes, memory: Bytes) -> tuple[bytes, Bytes]:
    """Encodes a request in memory as `encode_request_apart` does, without a copy."""
    places: Items[TensorPlace] = ()
    try:
        request = decode_request(frame)
    except PayloadApart as apart:
        request, places = apart.request, apart.places
        tensors_at(places, memory)
    if not places:
        raise CorruptEntry("the request refers to no tensors in memory")
    begin = places[0].offset // ALIGNMENT * ALIGNMENT
    inputs = [msgspec.structs.replace(place, offset=place.offset - begin) for place in places]
    data = memoryview(memory)[begin : places[-1].offset + places[-1].size]
    return _join(_REQUEST, _encode_header(request, inputs, _BESIDE), []), data


def landed_places(inputs: Items[Tensor], begin: int, end: int) -> tuple[int, ...]:
    """Returns where tensors lie that were received into memory, one behind the other from `begin` to `end`.

    Empty if they don't lie there, or if one is not aligned to its elements.
    """
    places, position = [], begin
    for tensor in inputs:
        if not isinstance(tensor.data, memoryview) or position % max(DATATYPES[tensor.datatype].itemsize, 1):
            return ()
        places.append(position)
        position += len(tensor.data)
    return tuple(places) if position == end else ()


def usual_places(inputs: Items[Tensor]) -> tuple[int, ...]:
    """Returns where tensors lie whose `tensor_parts` were written."""
    return tuple([place.offset for place in _lay_out(inputs, [], 0)[0]])


def encode_referring_request(request: InferRequest, memory: MemoryReference, places: Items[int]) -> bytes:
    """Encodes a request whose tensors lie in memory, at these places."""
    inputs = [
        TensorPlace(tensor.name, tensor.datatype, tensor.shape, place, len(tensor.data))
        for tensor, place in zip(request.inputs, places, strict=True)
    ]
    return _join(_REQUEST, _encode_header(request, inputs, _IN_MEMORY, memory), [], FRAME_VERSION)


def _encode_header(
    request: InferRequest, inputs: list[TensorPlace], payload: str, memory: MemoryReference | None = None
) -> bytes:
    header: tuple[object, ...] = (
        request.id,
        request.client_id,
        request.model,
        request.version,
        inputs,
        request.outputs,
        request.parameters,
        request.priority,
        round(request.timeout_s * 1e6),
        request.reply_to,
        request.tenant,
        request.trace,
        request.partition,
        request.generation,
        request.attempt,
        _flags(request.sequence),
        payload,
    )
    calls = request.calls
    if request.queue_timeout_s or request.holders or request.spares_outputs or calls is not None or memory is not None:
        traces = 0 if calls is None else 2 if calls.has_tensors else 1
        wait_us = round(request.queue_timeout_s * 1e6)
        header += _up_to_last(wait_us, request.holders, request.spares_outputs, traces, memory)
    return _encoder.encode(header)


def _up_to_last(*later: object) -> tuple[object, ...]:
    """Returns the fields up to the last one that is set; earlier readers know fewer fields."""
    last = len(later)
    while last and not later[last - 1]:
        last -= 1
    return later[:last]


def _flags(sequence: SequenceFlags | None) -> Any:
    return sequence if sequence is None or sequence.step else (sequence.id, sequence.start, sequence.end)


def decode_request(frame: Bytes, payload: Bytes | None = None) -> InferRequest:
    """Decodes a request; its tensors are views into `frame` or `payload`.

    Raises:
        PayloadApart: The tensors are beside the stream or in memory, and `payload` is `None`.
        NewerVersion: The frame's version is above `FRAME_VERSION`.
        CorruptEntry: The frame or the payload is damaged.
    """
    view, end = _read_prelude(frame, _REQUEST)
    if end > MAX_HEADER_BYTES:
        raise CorruptEntry(f"frame header of {end} bytes is larger than {MAX_HEADER_BYTES}")
    try:
        header = _request_decoder.decode(view[_PRELUDE.size : end])
    except _UNREADABLE as error:
        raise _corrupt(error) from None
    inputs: tuple[Tensor, ...] = ()
    if not header.payload:
        inputs, _ = _cut(header.inputs, view[_aligned(end) :], 0)
    elif payload is not None:
        inputs, _ = _cut(header.inputs, memoryview(payload), 0)
    request = InferRequest(
        model=header.model,
        inputs=inputs,
        version=header.version,
        id=header.id,
        client_id=header.client_id,
        outputs=header.outputs,
        parameters=header.parameters,
        priority=header.priority,
        timeout_s=header.timeout_us / 1e6,
        reply_to=header.reply_to,
        tenant=header.tenant,
        trace=header.trace,
        partition=header.partition,
        generation=header.generation,
        attempt=header.attempt,
    )
    # Set apart, because a call with more than 15 keywords takes twice as long.
    request.sequence = header.sequence
    request.queue_timeout_s = header.queue_timeout_us / 1e6
    request.payload = header.payload == _BESIDE
    request.memory = header.memory if header.payload == _IN_MEMORY else None
    request.holders = header.holders
    request.spares_outputs = header.spares_outputs
    if header.traces:
        request.calls = CallTraces(has_tensors=header.traces > 1)
    if header.payload and payload is None:
        raise PayloadApart(request, header.inputs)
    return request


def tensors_at(places: Items[TensorPlace], payload: Bytes) -> tuple[Tensor, ...]:
    """Returns tensors as views into their payload or memory; raises `CorruptEntry` if they leave it."""
    return _cut(places, memoryview(payload), 0)[0]


def tensor_parts(tensors: Items[Tensor]) -> tuple[list[Bytes], int]:
    """Returns the bytes of tensors as they lie in memory, in parts, and their size."""
    parts: list[Bytes] = []
    _, size = _lay_out(tensors, parts, 0)
    return parts, size


def encode_responses(responses: Items[Response], kept: Mapping[str, MemoryReference] = NOTHING_KEPT) -> bytes:
    """Encodes one reply stream's responses; `kept` has the request ids of those whose outputs are in memory."""
    parts: list[Bytes] = []
    headers: list[tuple[object, ...]] = []
    cursor = 0
    for response in responses:
        memory = kept.get(response.request_id)
        if memory is None:
            outputs, cursor = _lay_out(response.outputs, parts, cursor)
        else:
            outputs, _ = _lay_out(response.outputs, [], 0)
        header: tuple[object, ...] = (
            response.request_id,
            response.attempt,
            response.index,
            response.final,
            response.model,
            response.version,
            outputs,
            response.failure,
            response.timing,
        )
        if response.stored or response.parameters or response.credit_to or response.called or memory is not None:
            later = (response.stored, response.parameters, response.credit_to, response.called, memory)
            header += _up_to_last(*later)
        headers.append(header)
    return _join(_RESPONSES, _encoder.encode(headers), parts, FRAME_VERSION if kept else USUAL_VERSION)


def decode_responses(blob: Bytes, read: Callable[[str, MemoryReference], Bytes | None] | None = None) -> list[Response]:
    """Decodes responses; their tensors are views into `blob`.

    `read` returns the outputs of a request that are in memory, or `None` if its response is to be left out.
    """
    view, end = _read_prelude(blob, _RESPONSES)
    try:
        headers = _responses_decoder.decode(view[_PRELUDE.size : end])
    except _UNREADABLE as error:
        raise _corrupt(error) from None
    area = view[_aligned(end) :]
    responses: list[Response] = []
    cursor = 0
    for header in headers:
        if header.memory is None:
            outputs, cursor = _cut(header.outputs, area, cursor)
        else:
            kept = None if read is None else read(header.request_id, header.memory)
            if kept is None:
                continue
            outputs, _ = _cut(header.outputs, memoryview(kept), 0)
        responses.append(
            Response(
                request_id=header.request_id,
                model=header.model,
                version=header.version,
                outputs=outputs,
                failure=header.failure,
                attempt=header.attempt,
                index=header.index,
                final=header.final,
                timing=header.timing,
                stored=header.stored,
                parameters=header.parameters,
                credit_to=header.credit_to,
                called=header.called,
            )
        )
    return responses


def encode_credits(credits_: Items[Credit]) -> bytes:
    """Encodes one worker's credits."""
    fields = [msgspec.structs.astuple(credit)[: 4 if credit.cancelled else 3] for credit in credits_]
    return _join(_CREDITS, _encoder.encode(fields), [])


def decode_credits(blob: Bytes) -> list[Credit]:
    """Decodes credits; raises as `decode_responses`."""
    view, end = _read_prelude(blob, _CREDITS)
    try:
        return _credits_decoder.decode(view[_PRELUDE.size : end])
    except _UNREADABLE as error:
        raise _corrupt(error) from None


def is_credits(blob: Bytes) -> bool:
    """Returns whether a blob has credits, not responses."""
    return len(blob) > 1 and blob[1] == _CREDITS


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _corrupt(error: Exception) -> CorruptEntry:
    return CorruptEntry(f"frame header can't be decoded: {error}")


def _aligned(position: int) -> int:
    return (position + ALIGNMENT - 1) & -ALIGNMENT


def _lay_out(tensors: Items[Tensor], parts: list[Bytes], cursor: int) -> tuple[list[TensorPlace], int]:
    headers: list[TensorPlace] = []
    for tensor in tensors:
        data = tensor.data
        size = len(data)
        headers.append(TensorPlace(tensor.name, tensor.datatype, tensor.shape, cursor, size))
        parts.append(data)
        cursor += size
        if padding := -cursor % ALIGNMENT:
            parts.append(_PADDING[padding])
            cursor += padding
    return headers, cursor


def _join(kind: int, header: bytes, parts: list[Bytes], version: int = USUAL_VERSION) -> bytes:
    size = len(header)
    prelude = _PRELUDE.pack(version, kind, 0, size)
    return b"".join((prelude, header, _PADDING[-size % ALIGNMENT], *parts))


def _read_prelude(frame: Bytes, kind: int) -> tuple[memoryview, int]:
    view = memoryview(frame)
    if len(view) < _PRELUDE.size:
        raise CorruptEntry(f"frame of {len(view)} bytes is too short")
    version, found, _, size = _PRELUDE.unpack_from(view)
    if version > FRAME_VERSION:
        raise NewerVersion("a frame", version, FRAME_VERSION)
    if version < OLDEST_READABLE or found != kind:
        raise CorruptEntry(f"not a frame of this kind: version {version}, kind {found}, expected kind {kind}")
    end: int = _PRELUDE.size + size
    if end > len(view):
        raise CorruptEntry(f"frame header of {size} bytes is cut off")
    return view, end


def tensor_places(frame: Bytes) -> tuple[int, list[tuple[int, int]]]:
    """Returns the tensor area's offset, and each tensor's range."""
    view, end = _read_prelude(frame, _REQUEST)
    headers = _request_decoder.decode(view[_PRELUDE.size : end]).inputs
    return _aligned(end), [(header.offset, header.offset + header.size) for header in headers]


def _cut(headers: Items[TensorPlace], area: memoryview, cursor: int) -> tuple[tuple[Tensor, ...], int]:
    tensors: list[Tensor] = []
    size = len(area)
    for header in headers:
        begin = header.offset
        end = begin + header.size
        if begin < cursor or end > size:
            raise CorruptEntry(f"tensor '{header.name}' at {begin}:{end} overlaps another or leaves the frame")
        tensors.append(Tensor(header.name, header.datatype, header.shape, area[begin:end]))
        cursor = end
    return tuple(tensors), cursor


_LONG_ID = b"\xdc\x00\x11\xd9"  # the first bytes of its header: an array of 17, a text of 32 to 255 bytes
_LONG_ID_REFERRING = b"\xdc\x00\x16\xd9"  # an array of 22
_ID_AT = 13  # the id is behind these bytes, the size of the header and the size of the text
_MAX_KNOWN = 1024
TIMEOUT_BYTES = 5
USUAL_FROM_S, USUAL_TO_S = (1 << 16) / 1e6, ((1 << 32) - 1) / 1e6
"""Timeouts between these take `TIMEOUT_BYTES` in a frame."""
_SMALL_BYTES = 16 * 1024  # up to here a copy is cheaper


class Repeats:
    """Detects repeated keys: remembering unique keys does not pay."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def has(self, key: Hashable) -> bool:
        """Adds a key; returns whether it came before."""
        if key in self._seen:
            return True
        if len(self._seen) >= _MAX_KNOWN:
            self._seen.clear()
        self._seen.add(key)
        return False


class RequestForm:
    """A frame for similar requests: only id, timeout, trace, sequence and tensor bytes differ, of equal lengths."""

    __slots__ = (
        "_begin", "_end", "_mid", "_numbers", "_paddings", "_rest", "_sequence", "_timeout_s", "_trace", "_trace_mark"
    )  # fmt: skip

    def __init__(self, request: InferRequest) -> None:
        frame, name = encode_request(request), request.id.encode()
        position = frame.index(name)
        area, _ = tensor_places(frame)
        timeout, trace, sequence = _own_fields(frame, request)
        self._begin, self._mid = frame[:position], frame[position + len(name) : timeout.start]
        self._trace_mark, self._numbers = frame[timeout.stop : trace.start], frame[trace.stop : sequence.start]
        self._end, self._rest = frame[sequence.stop : area], frame[position + len(name) : area]
        self._timeout_s, self._trace, self._sequence = request.timeout_s, request.trace, request.sequence
        self._paddings = [bytes(-len(tensor.data) % ALIGNMENT) for tensor in request.inputs]

    def fill(self, request: InferRequest) -> bytes:
        """Encodes a similar request as `encode_request` does."""
        inputs, rest, of = request.inputs, self._rest, request.sequence
        if request.timeout_s != self._timeout_s or request.trace != self._trace or of != self._sequence:
            timeout, trace, flags = round(request.timeout_s * 1e6), request.trace.encode(), encode_flags(of)
            parts = (self._mid, _encoder.encode(timeout), self._trace_mark, trace, self._numbers, flags, self._end)
            rest = b"".join(parts)
        if len(inputs) == 1:
            return b"".join((self._begin, request.id.encode(), rest, inputs[0].data, self._paddings[0]))
        pieces: list[Bytes] = [self._begin, request.id.encode(), rest]
        for tensor, padding in zip(inputs, self._paddings, strict=True):
            pieces += (tensor.data, padding)
        return b"".join(pieces)


class ReferringForm:
    """A frame for similar requests whose tensors are in memory: they also differ in their place there."""

    __slots__ = ("_begin", "_end", "_mid", "_numbers", "_trace_mark")

    def __init__(self, request: InferRequest, memory: MemoryReference, places: Items[int]) -> None:
        frame, name = encode_referring_request(request, memory, places), request.id.encode()
        position = frame.index(name)
        timeout, trace, sequence = _own_fields(frame, request, memory)
        end = _PRELUDE.size + int.from_bytes(frame[4:8], "little") - len(_encoder.encode(memory))
        self._begin, self._mid = frame[_PRELUDE.size : position], frame[position + len(name) : timeout.start]
        self._trace_mark, self._numbers = frame[timeout.stop : trace.start], frame[trace.stop : sequence.start]
        self._end = frame[sequence.stop : end]

    def fill(self, request: InferRequest, memory: MemoryReference) -> bytes:
        """Encodes a similar request as `encode_referring_request` does."""
        encode, trace = _encoder.encode, request.trace.encode() if request.trace else b""
        begin = (self._begin, request.id.encode(), self._mid, encode(round(request.timeout_s * 1e6)), self._trace_mark)
        flags, place = encode_flags(request.sequence), encode(memory)
        header = b"".join((*begin, trace, self._numbers, flags, self._end, place))
        prelude = _PRELUDE.pack(FRAME_VERSION, _REQUEST, 0, len(header))
        return b"".join((prelude, header, _PADDING[-len(header) % ALIGNMENT]))


def timeout_width(timeout_s: float) -> int:
    """Returns a timeout's bytes in a frame."""
    return len(_encoder.encode(round(timeout_s * 1e6)))


@lru_cache(maxsize=8192)
def encode_flags(sequence: SequenceFlags | None) -> bytes:
    """Encodes sequence flags as a frame has them."""
    return _encoder.encode(_flags(sequence))


def _own_fields(
    frame: bytes, request: InferRequest, memory: MemoryReference | None = None
) -> tuple[slice, slice, slice]:
    """Returns the places of the timeout, of the trace text and of the sequence flags."""
    wait_us = round(request.queue_timeout_s * 1e6)
    long = _up_to_last(wait_us, request.holders, request.spares_outputs, 0, memory)
    payload = _IN_MEMORY if memory is not None else _BESIDE if request.payload else ""
    encode, size = _encoder.encode, int.from_bytes(frame[4:8], "little")
    stop = _PRELUDE.size + size - sum(len(encode(field)) for field in (payload, *long))
    sequence = slice(stop - len(encode_flags(request.sequence)), stop)
    numbers = (request.partition, request.generation, request.attempt)
    stop = sequence.start - sum(len(encode(field)) for field in numbers)
    trace = slice(stop - len(request.trace.encode()), stop)
    stop -= len(encode(request.trace)) + len(encode(request.tenant)) + len(encode(request.reply_to))
    return slice(stop - len(encode(round(request.timeout_s * 1e6))), stop), trace, sequence


class _FrameLayout(NamedTuple):
    """Ends of id, timeout, trace, sequence flags and header; tensors; `rest` is what similar frames have in common."""

    begin: int
    timeout: slice
    trace: slice
    sequence: slice
    end: int
    area: int
    rest: tuple[slice, ...]

    def common(self, frame: bytes) -> bytes:
        return b"".join(map(frame.__getitem__, self.rest))


class _KnownRequest(msgspec.Struct, gc=False):
    request: InferRequest
    tensors: list[tuple[str, str, tuple[int, ...], int, int]]
    size: int
    places: Items[TensorPlace] = ()  # of tensors in memory


class RequestReader:
    """Decodes frames, and remembers the common part of similar frames.

    The reader never remembers a client's id or parameters, or requests that a model made.
    """

    def __init__(self) -> None:
        self._layouts: dict[bytes, _FrameLayout] = {}
        self._known: dict[bytes, _KnownRequest] = {}
        self._repeats = Repeats()

    def decode(self, frame: Bytes) -> InferRequest:
        """Decodes a request; copies small tensors."""
        if not isinstance(frame, bytes):
            return decode_request(frame)
        layout = self._layouts.get(frame[:_ID_AT])
        if layout is None:
            return self._learn(frame)
        known = self._known.get(layout.common(frame))
        if known is None:
            return self._learn(frame)
        begin, timeout, trace, sequence, end, area, _ = layout
        try:
            name, trace_text = frame[_ID_AT:begin].decode(), frame[trace].decode()
            flags = _flags_decoder.decode(frame[sequence]) if sequence.start < sequence.stop else None
            memory = _reference_decoder.decode(frame[end:area]) if known.places else None
        except _UNREADABLE:
            return decode_request(frame)  # raises the error
        if len(frame) < area + known.size:
            return decode_request(frame)  # as above
        data = frame if len(frame) <= _SMALL_BYTES else memoryview(frame)
        tensors = []
        for tensor, datatype, shape, first, last in known.tensors:
            tensors.append(Tensor(tensor, datatype, shape, data[area + first : area + last]))
        request = msgspec.structs.replace(known.request, id=name, inputs=tuple(tensors), parameters={})
        request.trace, request.sequence = trace_text, flags
        if timeout.start < timeout.stop:
            request.timeout_s = int.from_bytes(frame[timeout]) / 1e6
        if memory is not None:
            request.memory = memory
            raise PayloadApart(request, known.places)
        return request

    def _learn(self, frame: bytes) -> InferRequest:
        try:
            request = decode_request(frame)
        except PayloadApart as apart:
            if apart.request.memory is not None and apart.places:
                self._note(frame, apart.request, apart.places)
            raise
        self._note(frame, request, ())
        return request

    def _note(self, frame: bytes, request: InferRequest, kept: Items[TensorPlace]) -> None:
        """Remembers the second of similar frames; `kept` has the tensors that are in memory."""
        of = request.sequence.id if request.sequence is not None else 0
        is_long = type(of) is str and len(of) > MAX_SEQUENCE_ID_BYTES  # flags are remembered
        is_special = is_long or request.client_id or request.parameters or request.holders
        if is_special or request.calls is not None or frame[8:12] != (_LONG_ID_REFERRING if kept else _LONG_ID):
            return
        begin, end = _ID_AT + frame[_ID_AT - 1], 8 + int.from_bytes(frame[4:8], "little")
        timeout, trace, sequence = _own_fields(frame, request, request.memory)
        if request.sequence is None:
            sequence = slice(trace.stop, trace.stop)
        elif frame[sequence] != encode_flags(request.sequence):
            return  # another program's, of other lengths
        # The first byte gives the size.
        is_usual = timeout.stop - timeout.start == TIMEOUT_BYTES
        number = slice(timeout.start + 1, timeout.stop) if is_usual else slice(timeout.start, timeout.start)
        area, places = tensor_places(frame)
        if kept:
            area, end, places = end, end - len(_encoder.encode(request.memory)), []
        rest: list[slice] = [slice(begin, number.start), slice(number.stop, trace.start), slice(trace.stop, end)]
        if request.sequence is not None:
            rest[2:] = slice(trace.stop, sequence.start), slice(sequence.stop, end)
        layout = _FrameLayout(begin, number, trace, sequence, end, area, tuple(rest))
        common = layout.common(frame)
        if not self._repeats.has(common):
            return
        if max(len(self._known), len(self._layouts)) >= _MAX_KNOWN:
            self._known.clear()
            self._layouts.clear()
        tensors = [
            (tensor.name, tensor.datatype, tensor.shape, first, last)
            for tensor, (first, last) in zip(request.inputs, places, strict=True)
        ]
        known = msgspec.structs.replace(request, id="", inputs=(), trace="", sequence=None, memory=None)
        size = max((last for _, last in places), default=0)
        self._known[common] = _KnownRequest(known, tensors, size, kept)
        self._layouts[frame[:_ID_AT]] = layout
