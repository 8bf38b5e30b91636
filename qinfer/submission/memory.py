"""Requests whose tensors stay in this process's memory; their entries refer to them (ADR 0041).

Only synchronous requests can: when this process ends, their callers' connections have ended, too, or another worker
executes the requests anew that made them. All live workers that may execute the request must share the memory; others
would have to put the request back.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator

from qinfer.core.messages import KeptTensors, OutgoingRequest
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.readiness import is_placed
from qinfer.observe import catalogue
from qinfer.observe.exposition import Family, family
from qinfer.queue.entries import worker_owner
from qinfer.segments.memory import PIECE_BYTES, HeldTensors
from qinfer.segments.sharing import SegmentSharing
from qinfer.segments.slabs import LARGE_BYTES
from qinfer.submission.layouts import check_head, places_of, tensor_bytes
from qinfer.tensors import Bytes
from qinfer.wire.frame import encode_referring_request, landed_places, tensor_parts

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
        if request.landed is not None:
            held = request.landed.hold()
        else:
            parts, size = tensor_parts(request.inputs)
            held = self._memory.write(parts, size, request.tenant)
        self.ways[NO_MEMORY if held is None else MEMORY] += 1
        return held

    def may_land(self, nbytes: int, model: str, tenant: str) -> bool:
        """Returns whether there is memory for so many bytes of a body, beside other tenants'."""
        return self._memory.has_room(nbytes + ALIGNMENT, tenant) and self._way(model) is MEMORY

    def land(self, nbytes: int, begin: int, model: str, tenant: str, most: int) -> "Landing | None":
        """Returns memory for a body whose tensors have `most` bytes; `None` if it is to travel through Redis."""
        if not self.least_bytes <= nbytes - begin <= most or self._way(model) is not MEMORY:
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
        """Returns `MEMORY` if all workers that may load a model read the memory, or why its tensors go another way."""
        known = self._way_of.get(model)
        if known is None:
            live = self._catalog.workers()
            may_load = {worker_owner(worker.id) for worker in live if is_placed(model, worker.places)}
            is_read = bool(may_load) and may_load <= self._sharing.readers
            known = self._way_of[model] = UNREACHABLE if model in self._left else MEMORY if is_read else OLD_WORKER
        return known
