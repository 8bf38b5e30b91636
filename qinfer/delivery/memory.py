"""The delivery port in one process's memory: for tests, notebooks and trying things out; nothing outlives it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from qinfer.clock import Clock, ServerClock, SystemClock
from qinfer.delivery.base import Entry, Lane, Lease, reply_address
from qinfer.errors import QinferError
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)


class _Item(msgspec.Struct, eq=False):
    """One entry: waiting while it has no owner."""

    frame: bytes
    owner: str = ""
    renewed_at: float = 0.0
    deliveries: int = 0
    was_released: bool = False


class MemoryDelivery:
    """`Delivery` without a broker. Everyone who shares the queue shares the object.

    Args:
        clock: The monotonic clock; a `FakeClock` makes leases end when a test says so.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        monotonic = clock or SystemClock()
        self.clock = ServerClock(monotonic)
        self._monotonic_s = monotonic.monotonic_s
        self._lanes: dict[Lane, dict[str, _Item]] = {}
        self._replies: dict[str, asyncio.Queue[bytes]] = {}
        self._arrived = asyncio.Event()
        self._last_id = (0, 0)
        self._lock = threading.Lock()  # `renew` comes from another thread

    def submit(self, lane: Lane, frame: Bytes, done: Callable[[Entry | QinferError], None]) -> None:
        """See `Delivery.submit`."""
        millisecond, sequence = self._last_id
        now_ms = int(self.clock.now_s() * 1000)
        self._last_id = (now_ms, 0) if now_ms > millisecond else (millisecond, sequence + 1)
        entry = Entry(lane, f"{self._last_id[0]}-{self._last_id[1]}")
        with self._lock:
            self._lanes.setdefault(lane, {})[entry.entry_id] = _Item(bytes(frame))
        self._arrived.set()
        asyncio.get_running_loop().call_soon(done, entry)

    async def ensure(self, lanes: Sequence[Lane]) -> None:
        """See `Delivery.ensure`."""
        for lane in lanes:
            self._lanes.setdefault(lane, {})

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """See `Delivery.fetch`."""
        until_s = asyncio.get_running_loop().time() + wait_s
        await asyncio.sleep(0)  # as with a broker, others get their turn
        while True:
            self._arrived.clear()
            leases = self._take(lanes, consumer, count)
            if leases:
                return leases
            try:
                async with asyncio.timeout_at(until_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """See `Delivery.renew`."""
        lost = []
        with self._lock:
            for lease in leases:
                item = self._owned(lease)
                if item is None:
                    lost.append(lease)
                else:
                    item.renewed_at = self._monotonic_s()
        return lost

    async def reclaim(self, lanes: Sequence[Lane], consumer: str, idle_s: float, count: int) -> list[Lease]:
        """See `Delivery.reclaim`."""
        dead_before_s = self._monotonic_s() - idle_s
        with self._lock:
            dead = [
                (Entry(lane, entry_id), item)
                for lane in lanes
                for entry_id, item in self._lanes.get(lane, {}).items()
                if item.owner and item.renewed_at <= dead_before_s
            ]
            return [self._lease(entry, item, consumer, suspect=True) for entry, item in dead[:count]]

    async def release(self, leases: Sequence[Lease]) -> None:
        """See `Delivery.release`."""
        with self._lock:
            for lease in leases:
                item = self._owned(lease)
                if item is not None:
                    item.owner = ""
                    item.deliveries -= 1
                    item.was_released = True
        self._arrived.set()

    async def finish(self, entries: Sequence[Entry]) -> None:
        """See `Delivery.finish`."""
        with self._lock:
            for entry in entries:
                self._lanes.get(entry.lane, {}).pop(entry.entry_id, None)

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        """See `Delivery.publish`."""
        replies = self._replies.get(reply_to)
        if replies is None:
            return False
        replies.put_nowait(bytes(blob))
        return True

    async def listen(
        self, owner: str, deliver: Callable[[bytes], None], ready: Callable[[], None] | None = None
    ) -> None:
        """See `Delivery.listen`."""
        replies = self._replies.setdefault(reply_address(owner), asyncio.Queue())
        if ready is not None:
            ready()
        try:
            while True:
                blob = await replies.get()
                try:
                    deliver(blob)
                except Exception:  # the loop boundary: one bad blob must not cost the others' callers their answers
                    logger.exception("a reply could not be delivered")
        finally:
            self._replies.pop(reply_address(owner), None)

    async def depth(self, lanes: Sequence[Lane]) -> list[int]:
        """See `Delivery.depth`."""
        return [len(self._lanes.get(lane, {})) for lane in lanes]

    async def close(self) -> None:
        """See `Delivery.close`: there is nothing to close, and others may share the object."""

    def _take(self, lanes: Sequence[Lane], consumer: str, count: int) -> list[Lease]:
        with self._lock:
            waiting = [
                (Entry(lane, entry_id), item)
                for lane in lanes
                for entry_id, item in self._lanes.get(lane, {}).items()
                if not item.owner
            ]
            waiting.sort(key=lambda pair: not pair[1].was_released)  # stable: lanes stay in order
            return [self._lease(entry, item, consumer) for entry, item in waiting[:count]]

    def _lease(self, entry: Entry, item: _Item, consumer: str, *, suspect: bool = False) -> Lease:
        item.owner = consumer
        item.renewed_at = self._monotonic_s()
        item.deliveries += 1
        item.was_released = False
        return Lease(entry, consumer, item.frame, item.deliveries, suspect)

    def _owned(self, lease: Lease) -> _Item | None:
        item = self._lanes.get(lease.entry.lane, {}).get(lease.entry.entry_id)
        return item if item is not None and item.owner == lease.consumer else None
