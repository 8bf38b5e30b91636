"""The response cache's key, and its two stores, in memory and in Redis.

    SHA-256( tenant · model · version · generation · outputs · parameters · SHA-256(inputs by name) ), cut to 128 bits

The key's parts are MessagePack, which is self-delimiting. Ids, priorities, timeouts and tensor encodings are left out.

In memory, the cache is bounded by bytes; the least recently used go first. In Redis, it is a string per response, with
a time to live. The queue's Redis evicts nothing, so the cache bounds itself: time is divided into spans of an eighth of
the time to live, each with a ninth of the bytes, because nine spans have live entries. A key that outlives its span
counts them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from operator import attrgetter
from typing import NamedTuple

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.models.catalog import ServedVersion
from qinfer.queue import keys
from qinfer.queue.connection import packable
from qinfer.queue.router import Router
from qinfer.tensors import Bytes, Tensor

LARGEST_SHARE = 1 / 8
"""An entry takes at most this share of the cache."""

_ENTRY_BYTES, _PART_BYTES = 512, 256
"""Python's overhead of an entry, and of a tensor or parameter in it."""

KEY_BYTES = 16
_FORM = 1  # keys of different forms never match
_encode = msgspec.msgpack.Encoder().encode
_by_name = attrgetter("name")

MAX_BYTES = 2**20
"""Commands behind the largest entry wait."""

_SPANS = 8
_OVERHEAD_BYTES = 128  # of a key in Redis


class _CachedResponse(NamedTuple):
    response: Response
    size: int


class LocalCache:
    """The response cache of one event loop."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._entries: OrderedDict[bytes, _CachedResponse] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> Response | None:
        """Returns a cached response, and marks it as used."""
        kept = self._entries.get(key)
        if kept is None:
            return None
        self._entries.move_to_end(key)
        return kept.response

    def put(self, key: bytes, response: Response) -> None:
        """Caches a response, unless it exceeds its share."""
        size = size_of(response)
        if size > LARGEST_SHARE * self._size_bytes:
            return
        old = self._entries.pop(key, None)
        self.used_bytes += size - (old.size if old is not None else 0)
        self._entries[key] = _CachedResponse(_apart(response), size)
        while self.used_bytes > self._size_bytes:
            _, gone = self._entries.popitem(last=False)
            self.used_bytes -= gone.size


def size_of(response: Response) -> int:
    """Returns the approximate bytes of a response."""
    size = _ENTRY_BYTES
    for tensor in response.outputs:
        size += _PART_BYTES + len(tensor.data)
    for name, value in response.parameters.items():
        size += _PART_BYTES + len(name) + (len(value) if isinstance(value, str) else 0)
    return size


def _apart(response: Response) -> Response:
    outputs = tuple(Tensor(o.name, o.datatype, o.shape, bytes(o.data)) for o in response.outputs)
    return msgspec.structs.replace(response, request_id="", outputs=outputs, timing=None, called=())


def response_key(request: OutgoingRequest, served: ServedVersion) -> bytes | None:
    """Returns a request's key; `None` if its parameters can't be encoded."""
    spec = served.spec
    tenant = None if spec.cached_for_all else request.tenant
    try:
        about = _encode(
            (
                _FORM,
                tenant,
                spec.name,
                served.version,
                served.generation,
                request.outputs,
                sorted(request.parameters.items()),
                request.sequence,
            )
        )
    except (OverflowError, ValueError):  # an integer of more than 64 bits, or half of a surrogate pair
        return None
    return sha256(about + (request.inputs_digest or inputs_digest(request.inputs))).digest()[:KEY_BYTES]


def inputs_digest(inputs: Iterable[Tensor]) -> bytes:
    """Hashes a request's inputs, independent of their order."""
    digest = sha256()
    for tensor in sorted(inputs, key=_by_name):
        digest.update(_encode((tensor.name, tensor.datatype, tensor.shape, len(tensor.data))))
        digest.update(tensor.data)
    return digest.digest()


class CachedResponses:
    """The response cache of `size_bytes` in Redis."""

    def __init__(self, router: Router, clock: ServerClock, size_bytes: int, ttl_s: float) -> None:
        self._router = router
        self._now_s = clock.now_s
        self._share_bytes = size_bytes // (_SPANS + 1)
        self._ttl_ms = max(int(ttl_s * 1000), 1)
        self._span_ms = max(self._ttl_ms // _SPANS, 1)

    def takes(self, size: int) -> bool:
        """Tells whether an entry of this size may be stored."""
        return size <= MAX_BYTES and size + _OVERHEAD_BYTES <= self._share_bytes

    async def find(self, key: bytes) -> bytes | None:
        """Returns an entry, or `None`; raises `BrokerUnavailable` at once without a link."""
        name = keys.cached_response(key.hex())
        self._router.check_up(keys.slot(name))
        found: bytes | None = await self._router.call(keys.slot(name), b"GET", name)
        return found

    async def put(self, key: bytes, entry: Bytes) -> bool:
        """Stores an entry if there is room."""
        size = len(entry) + _OVERHEAD_BYTES
        count = keys.cached_bytes(int(self._now_s() * 1000) // self._span_ms)
        slot, call = keys.slot(count), self._router.call
        # One connection keeps this order.
        _, used = await asyncio.gather(
            call(slot, b"SET", count, 0, b"NX", b"PX", 2 * self._span_ms), call(slot, b"INCRBY", count, size)
        )
        if used > self._share_bytes:
            await call(slot, b"DECRBY", count, size)
            return False
        name = keys.cached_response(key.hex())
        await call(keys.slot(name), b"SET", name, packable(entry), b"PX", self._ttl_ms)
        return True
