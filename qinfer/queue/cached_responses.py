"""The response cache in Redis: a string per response, with a time to live.

The queue's Redis evicts nothing, so the cache bounds itself: time is divided into spans of an eighth of the time to
live, each with a ninth of the bytes, because nine spans have live entries. A key that outlives its span counts them.
"""

import asyncio

from qinfer.core.clock import ServerClock
from qinfer.queue import keys
from qinfer.queue.connection import packable
from qinfer.queue.router import Router
from qinfer.tensors import Bytes

MAX_BYTES = 2**20
"""Commands behind the largest entry wait."""

_SPANS = 8
# Memory that a key takes in Redis beside its value.
_ENTRY_BYTES = 128


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
        return size <= MAX_BYTES and size + _ENTRY_BYTES <= self._share_bytes

    async def find(self, key: bytes) -> bytes | None:
        """Returns an entry, or `None`; raises `BrokerUnavailable` at once without a link."""
        name = keys.cached_response(key.hex())
        self._router.check_up(keys.slot(name))
        found: bytes | None = await self._router.call(keys.slot(name), b"GET", name)
        return found

    async def put(self, key: bytes, entry: Bytes) -> bool:
        """Stores an entry if there is room."""
        size = len(entry) + _ENTRY_BYTES
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
