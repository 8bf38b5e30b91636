"""The response cache in Redis, shared by all gateways and workers: a string for each response, with a time to live.

The queue's Redis is durable and evicts nothing, so that the cache bounds itself. Time is cut into spans of an eighth of
the time to live, so that entries of nine spans exist at a time. Each span has a ninth of the bytes, counted by a key
that outlives it; a response that would be more is not stored.
"""

import asyncio

from qinfer.core.clock import ServerClock
from qinfer.queue import keys
from qinfer.queue.connection import packable
from qinfer.queue.router import Router
from qinfer.tensors import Bytes

MAX_BYTES = 2**20
"""The largest entry: a command waits for those before it on its connection."""

_SPANS = 8
_ENTRY_BYTES = 128  # about what Redis needs for a key


class CachedResponses:
    """See the module docstring.

    Args:
        router: The way to Redis.
        clock: Redis' time.
        size_bytes: The most that all entries take.
        ttl_s: How long an entry is kept.
    """

    def __init__(self, router: Router, clock: ServerClock, size_bytes: int, ttl_s: float) -> None:
        self._router = router
        self._now_s = clock.now_s
        self._share_bytes = size_bytes // (_SPANS + 1)
        self._ttl_ms = max(int(ttl_s * 1000), 1)
        self._span_ms = max(self._ttl_ms // _SPANS, 1)

    def takes(self, size: int) -> bool:
        """Tells whether an entry of so many bytes may be stored at all."""
        return size <= MAX_BYTES and size + _ENTRY_BYTES <= self._share_bytes

    async def find(self, key: bytes) -> bytes | None:
        """Returns an entry; `None` where there is none.

        Raises:
            BrokerUnavailable: Redis can't be reached, at once.
        """
        name = keys.cached_response(key.hex())
        self._router.check_up(keys.slot(name))
        found: bytes | None = await self._router.call(keys.slot(name), b"GET", name)
        return found

    async def put(self, key: bytes, entry: Bytes) -> bool:
        """Stores an entry, and returns whether there was room.

        Raises:
            QueueFull: Redis has no memory left.
            BrokerUnavailable: It may have been stored.
        """
        size = len(entry) + _ENTRY_BYTES
        count = keys.cached_bytes(int(self._now_s() * 1000) // self._span_ms)
        slot, call = keys.slot(count), self._router.call
        # They are sent in this order, on one connection.
        _, used = await asyncio.gather(
            call(slot, b"SET", count, 0, b"NX", b"PX", 2 * self._span_ms), call(slot, b"INCRBY", count, size)
        )
        if used > self._share_bytes:
            await call(slot, b"DECRBY", count, size)
            return False
        name = keys.cached_response(key.hex())
        await call(keys.slot(name), b"SET", name, packable(entry), b"PX", self._ttl_ms)
        return True
