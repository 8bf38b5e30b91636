"""How a request lies in the queue: as one frame, as a frame and a payload beside it, or with its tensors in memory.

Similar requests are neither checked nor laid out again (`Layouts`). The size of an entry is bounded, because lanes are
limited by entries.

Tensors may stay in this process's memory, and entries refer to them (ADR 0041): only those of synchronous requests.
When this process ends, their callers' connections have ended, too, or another worker executes the requests anew that
made them. All live workers that may execute the request must share the memory; others would have to put the request
back.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache

from qinfer.core.messages import MAX_SEQUENCE_ID_BYTES, KeptTensors, MemoryReference, OutgoingRequest, SequenceFlags
from qinfer.errors import PayloadTooLarge
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.readiness import is_placed
from qinfer.observe import catalogue
from qinfer.observe.exposition import Family, family
from qinfer.queue.entries import Payload, worker_owner
from qinfer.segments.memory import PIECE_BYTES, HeldTensors
from qinfer.segments.sharing import SegmentSharing
from qinfer.segments.slabs import LARGE_BYTES
from qinfer.tensors import Bytes
from qinfer.wire.frame import (
    TIMEOUT_BYTES,
    USUAL_FROM_S,
    USUAL_TO_S,
    ReferringForm,
    Repeats,
    RequestForm,
    encode_flags,
    encode_referring_request,
    encode_request,
    encode_request_apart,
    landed_places,
    tensor_parts,
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

    `None` if its frame is unique, or has strings that nothing has checked yet.
    """
    if request.client_id or request.parameters or request.priority or request.holders or request.calls is not None:
        return None
    trace, sequence = request.trace, request.sequence
    if trace and not trace.isascii():
        return None
    inputs = request.inputs
    spares = request.spares_outputs
    width = TIMEOUT_BYTES if USUAL_FROM_S <= timeout_s <= USUAL_TO_S else timeout_width(timeout_s)
    kind: Kind = (entrance, request.tenant, request.outputs, spares, len(trace), width, request.landed_at)
    if sequence is not None:
        if type(sequence.id) is str and len(sequence.id) > MAX_SEQUENCE_ID_BYTES:  # flags are remembered
            return None
        kind += _kind_of_flags(sequence)
    for tensor in inputs:
        if tensor.datatype == "BYTES" and not request.generation:
            return None
        kind += (tensor.name, tensor.datatype, tensor.shape, len(tensor.data))
    return kind


@lru_cache(maxsize=8192)
def _kind_of_flags(sequence: SequenceFlags) -> Kind:
    """Returns what a frame and `check_sequence` tell apart."""
    of = sequence.id
    return type(of), bool(of), len(of.encode()) if isinstance(of, str) else 0, len(encode_flags(sequence))


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


logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Tensors of a body that is received into memory begin at a multiple of so many bytes."""

MOST_BYTES = LARGE_BYTES
"""Larger requests travel through Redis, unless they are received in pieces: a copy would hold the event loop up."""

MEMORY, NO_MEMORY, OLD_WORKER, UNREACHABLE = "memory", "no_memory", "old_worker", "unreachable"

LEFT_S = 30.0
"""A model, a worker of which could not read tensors, gets them through Redis for so long."""


class Landing:
    """A body that is received into memory; its tensors are aligned there.

    Attributes:
        body: All of it.
        rest: The part that has not come yet.
        room: The begin of `rest` that may be written, at most `PIECE_BYTES` if memory is taken `in_pieces`.
    """

    def __init__(self, held: HeldTensors, before: int, begin: int, *, in_pieces: bool) -> None:
        self.held = held
        self._in_pieces = in_pieces
        self.body = self.rest = self.room = held.view()[before:]
        self._tensors_at = before + begin
        self._before = before
        self._is_left = False

    def has_room(self, nbytes: int = 1) -> bool:
        """Returns whether there is room for the next bytes, and makes some."""
        if not self._in_pieces:
            return True
        self.room = self.rest[:PIECE_BYTES]
        came = self._before + len(self.body) - len(self.rest)
        return self.held.has_pages(came + max(nbytes, len(self.room)))

    def add(self, part: Bytes) -> None:
        """Copies a part that came before, for which there is room."""
        self.rest[: len(part)] = part
        self.came(len(part))

    def enter(self, request: OutgoingRequest) -> None:
        """Tells a request that its tensors lie here, unless they are not aligned."""
        request.landed_at = landed_places(request.inputs, self._tensors_at, self.held.reference.size)
        request.landed = self.held if request.landed_at else None

    def came(self, nbytes: int) -> None:
        """Notes bytes that were received into `rest`."""
        self.rest, self.room = self.rest[nbytes:], self.room[nbytes:]

    def leave(self) -> None:
        """Gives the memory back, unless a pending request holds it; may be repeated."""
        if not self._is_left:
            self._is_left = True
            self.held.release()


class TensorMemory:
    """Lays out requests of `least_bytes` to `MOST_BYTES`, and larger ones that were received into memory.

    `ways` counts requests: those that are kept in memory, and those that went through Redis, by reason.
    """

    def __init__(self, sharing: SegmentSharing, least_bytes: int, catalog: Catalog) -> None:
        self.least_bytes = least_bytes
        self.ways = Counter[str]()
        self._sharing, self._memory, self.others = sharing, sharing.own, sharing.others
        self._catalog = catalog
        self._way_of: dict[str, str] = {}
        self._left: dict[str, asyncio.TimerHandle] = {}
        self.changed: Callable[[], None] = lambda: None
        """Called when other workers may read this memory."""

    def serve(self, replied: Callable[[Bytes], None]) -> None:
        """Follows the readers of the memory; `replied` gets replies of other machines."""
        self._sharing.serve_readers(self.forget, replied)

    @property
    def held_bytes(self) -> int:
        """Bytes with tensors of pending requests, or outputs that were not confirmed."""
        return self._memory.held_bytes

    def forget(self) -> None:
        """Looks anew for the workers of each model."""
        self._way_of.clear()
        self.changed()

    def leave(self, model: str) -> None:
        """Sends a model's tensors through Redis for `LEFT_S`, because a worker can't read them."""
        if model not in self._left:
            extra = {"model": model, "seconds": LEFT_S}
            logger.warning("a worker can't read tensors, which go through Redis", extra=extra)
            self._left[model] = asyncio.get_running_loop().call_later(LEFT_S, self._return_to, model)
            self.forget()

    def _return_to(self, model: str) -> None:
        del self._left[model]
        self.forget()

    def lay_out(self, request: OutgoingRequest, served: ServedVersion) -> tuple[bytes, KeptTensors] | None:
        """Encodes a stamped request, and keeps its tensors; `None` if they are to travel through Redis."""
        size = tensor_bytes(request)
        if size < self.least_bytes or (size > MOST_BYTES and request.landed is None):
            return None
        if (way := self._way(served.spec.name)) is not MEMORY:
            self.ways[way] += 1
            return None
        held = self.keep(request)
        if held is None:
            return None
        try:
            frame = encode_referring_request(request, held.reference, places_of(request))
            check_head(len(frame))
        except BaseException:
            held.release()
            raise
        return frame, held

    def keep(self, request: OutgoingRequest) -> KeptTensors | None:
        """Holds a request's tensors where they landed, or copies them; `None` without room."""
        held: KeptTensors | None
        inputs = request.inputs
        if request.landed is not None:
            held = request.landed.hold()
        elif len(inputs) == 1:
            data = inputs[0].data
            held = self._memory.write((data,), len(data), request.tenant)
        else:
            held = self._memory.write(*tensor_parts(inputs), request.tenant)
        self.ways[NO_MEMORY if held is None else MEMORY] += 1
        return held

    def may_land(self, nbytes: int, model: str, tenant: str) -> bool:
        """Returns whether there is memory for so many bytes of a body, beside other tenants'."""
        return self._memory.has_room(nbytes + ALIGNMENT, tenant) and self._way(model) is MEMORY

    def land(self, nbytes: int, begin: int, model: str, tenant: str, most: int) -> "Landing | None":
        """Returns memory for a body whose tensors have `most` bytes; `None` if it is to travel through Redis."""
        if not self.least_bytes <= nbytes - begin <= most:
            return None
        if self._way_of.get(model) is not MEMORY and self._way(model) is not MEMORY:
            return None
        before = -begin % ALIGNMENT
        in_pieces = nbytes - begin > MOST_BYTES
        held = self._memory.take(before + nbytes, tenant, in_pieces=in_pieces)
        return None if held is None else Landing(held, before, begin, in_pieces=in_pieces)

    def families(self) -> Iterator[Family]:
        """Yields the metrics."""
        own, memory, held = {"process": self._memory.owner}, self._memory, self.held_bytes
        bytes_of = (("held", held), ("idle", memory.paged_bytes - held))
        yield family(catalogue.SEGMENT_BYTES, ((nbytes, {"state": state, **own}) for state, nbytes in bytes_of))
        yield family(catalogue.SEGMENT_OLDEST, [(memory.oldest_s, own)])
        yield family(catalogue.SEGMENT_REQUESTS, ((count, {"way": way, **own}) for way, count in self.ways.items()))

    def _way(self, model: str) -> str:
        """Returns `MEMORY` if all workers that may load a model read the memory, or why not."""
        known = self._way_of.get(model)
        if known is None:
            live = self._catalog.workers()
            may_load = {worker_owner(worker.id) for worker in live if is_placed(model, worker.places)}
            is_read = bool(may_load) and may_load <= self._sharing.readers
            known = self._way_of[model] = UNREACHABLE if model in self._left else MEMORY if is_read else OLD_WORKER
        return known
