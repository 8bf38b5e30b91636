"""What a queue in one process's memory holds: the lanes with their entries, and the values stored beside them.

`memory`, `memory_requests` and `memory_dead_letters` share one of these. Its methods never wait and hold the lock each
for itself: on one event loop what is called in a row is one step, and only `renew` comes from another thread.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.errors import QueueFull
from qinfer.queue.base import DELAYED, FULL, Entry, Lane, LaneSize, Lease, Payload
from qinfer.tensors import Bytes

ValueKey = tuple[str, str, int, str]
"""What kind of value (`payload`, `result`), and whose: model, partition, request id."""


class Item(msgspec.Struct, eq=False):
    """An entry in a lane; it waits while it has no owner.

    Attributes:
        entry: Where it is now; `MemoryLanes.move` writes another one here.
        frame: What was submitted.
        owner: The consumer that holds it; empty while it waits.
        renewed_at: When the owner took it or renewed last, on the monotonic clock.
        deliveries: How often it has been handed out.
        is_released: It waits and was held before: it is fetched first of its lane.
        is_suspect: It waits for `reclaim`, not for `fetch`.
    """

    entry: Entry
    frame: bytes
    owner: str = ""
    renewed_at: float = 0.0
    deliveries: int = 0
    is_released: bool = False
    is_suspect: bool = False


class MemoryLanes:
    """Lanes, entries, and values that end by themselves.

    Args:
        clock: Stamps entries.
        monotonic_s: Says when leases and values end.
    """

    def __init__(self, clock: ServerClock, monotonic_s: Callable[[], float]) -> None:
        self.arrived = asyncio.Event()
        """Set whenever there may be something to fetch."""
        self.on_replay: Callable[[str, Item], None] = lambda _, __: None
        """Called with a request's id and its new item when a dead letter was put back."""
        self._clock = clock
        self._monotonic_s = monotonic_s
        self._lanes: dict[Lane, dict[str, Item]] = {}
        self._values: dict[ValueKey, tuple[bytes, float]] = {}
        self._last_id = (0, 0)
        self._lock = threading.RLock()  # `renew` comes from another thread

    def ensure(self, lanes: Sequence[Lane]) -> None:
        """Creates lanes."""
        with self._lock:
            for lane in lanes:
                self._lanes.setdefault(lane, {})

    def add(self, lane: Lane, frame: Bytes, payload: Payload | None = None, limit: int = 0) -> Item:
        """Appends an entry, with its payload.

        Raises:
            QueueFull: So many as `limit` wait already; nothing was stored.
        """
        with self._lock:
            if limit and self.waiting(lane) >= limit:
                raise QueueFull(FULL)
            entry = Entry(lane, self._next_id(), payload_id=payload.request_id if payload is not None else "")
            if payload is not None:
                self.put(("payload", lane.model, lane.partition, payload.request_id), payload.data, payload.ttl_s)
            return self._append(Item(entry, bytes(frame)))

    def get(self, entry: Entry) -> Item | None:
        """Returns the item of an entry; `None` when it is gone."""
        return self._lanes.get(entry.lane, {}).get(entry.entry_id)

    def waiting(self, lane: Lane) -> int:
        """Returns how many entries wait in a lane and its `.delayed` lane."""
        delayed = Lane(lane.model, lane.version, lane.name + DELAYED, lane.partition)
        with self._lock:
            return sum(not item.owner for of in (lane, delayed) for item in self._lanes.get(of, {}).values())

    def depth(self, lane: Lane) -> int:
        """Returns how many entries a lane holds, waiting and in flight."""
        return len(self._lanes.get(lane, {}))

    def in_flight(self, lane: Lane) -> int:
        """Returns how many entries of a lane a consumer holds."""
        with self._lock:
            return sum(bool(item.owner) for item in self._items([lane]))

    def size(self, lane: Lane) -> LaneSize:
        """Returns how many entries a lane holds, waiting and in flight, and how long ago its first was enqueued."""
        with self._lock:
            items = self._items([lane])
            first = items[0].entry.enqueued_s if items else math.inf
            return LaneSize(len(items), max(self._clock.now_s() - first, 0.0))

    def oldest(self, lane: Lane, age_s: float, count: int, after: str) -> list[Item]:
        """Returns entries that came into a lane so long ago, the oldest first; those behind `after`, if it is given."""
        end = (int((self._clock.now_s() - age_s) * 1000) + 1, 0)
        start = _place(after) if after else (-1, 0)
        with self._lock:
            items = self._items([lane])
            return [item for item in items if start < _place(item.entry.entry_id) < end][:count]

    def take(self, lanes: Sequence[Lane], consumer: str, count: int) -> list[Lease]:
        """Leases up to `count` entries, lane after lane: of each, released ones first."""
        with self._lock:
            waiting: list[Item] = []
            for lane in lanes:
                found = [item for item in self._items([lane]) if not item.owner and not item.is_suspect]
                waiting += sorted(found, key=lambda item: not item.is_released)  # stable
            return [self._lease(item, consumer) for item in waiting[:count]]

    def reclaim(self, lanes: Sequence[Lane], consumer: str, idle_s: float, count: int) -> list[Lease]:
        """Leases up to `count` entries, as suspects: given back ones, and those whose owner was silent so long."""
        with self._lock:
            silent_since_s = self._monotonic_s() - idle_s
            dead = [
                item
                for item in self._items(lanes)
                if item.is_suspect or (item.owner and item.renewed_at <= silent_since_s)
            ]
            return [self._lease(item, consumer, suspect=True) for item in dead[:count]]

    def renew(self, lease: Lease) -> bool:
        """Renews a lease; False when it is lost. For any thread."""
        with self._lock:
            item = self.owned(lease)
            if item is not None:
                item.renewed_at = self._monotonic_s()
            return item is not None

    def owned(self, lease: Lease) -> Item | None:
        """Returns the item of a lease; `None` when it is gone, or another's."""
        item = self.get(lease.entry)
        return item if item is not None and item.owner == lease.consumer else None

    def release(self, lease: Lease) -> None:
        """Gives an entry back, its delivery count as before; does nothing when it is gone, or another's."""
        with self._lock:
            item = self.owned(lease)
            if item is not None:
                item.owner = ""
                item.deliveries -= 1
                item.is_released, item.is_suspect = not lease.suspect, lease.suspect
                self.arrived.set()

    def move(self, lease: Lease, name: str) -> Item | None:
        """Moves an entry to the end of another lane of its version; `None` when it is gone, or another's."""
        with self._lock:
            item = self.owned(lease)
            if item is None:
                return None
            old = item.entry
            del self._lanes[old.lane][old.entry_id]
            lane = Lane(old.lane.model, old.lane.version, name, old.lane.partition)
            item.entry = Entry(lane, self._next_id(), old.origin or old.entry_id, old.payload_id)
            item.owner, item.deliveries = "", 0
            return self._append(item)

    def remove(self, entry: Entry) -> Item | None:
        """Removes an entry and its payload, whoever owns it; returns it, `None` when it was gone."""
        with self._lock:
            item = self._lanes.get(entry.lane, {}).pop(entry.entry_id, None)
            payload_id = entry.payload_id if item is None else item.entry.payload_id
            if item is not None:
                item.owner, item.deliveries = "", 0  # the record of its request may outlive it
            if payload_id:
                self.pop(("payload", entry.lane.model, entry.lane.partition, payload_id))
            return item

    def put(self, key: ValueKey, data: Bytes, ttl_s: float) -> None:
        """Stores a value for `ttl_s` seconds, and forgets those whose time is over."""
        now_s = self._monotonic_s()
        with self._lock:
            for old in [old for old, (_, ends_s) in self._values.items() if ends_s <= now_s]:
                del self._values[old]
            self._values[key] = bytes(data), now_s + ttl_s

    def value(self, key: ValueKey) -> bytes | None:
        """Returns a value; `None` when it is gone."""
        data, ends_s = self._values.get(key, (None, 0.0))
        return data if ends_s > self._monotonic_s() else None

    def pop(self, key: ValueKey) -> bytes | None:
        """Returns and removes a value; `None` when it is gone."""
        data = self.value(key)
        self._values.pop(key, None)
        return data

    def _append(self, item: Item) -> Item:
        self._lanes.setdefault(item.entry.lane, {})[item.entry.entry_id] = item
        self.arrived.set()
        return item

    def _items(self, lanes: Sequence[Lane]) -> list[Item]:
        return [item for lane in lanes for item in self._lanes.get(lane, {}).values()]

    def _lease(self, item: Item, consumer: str, *, suspect: bool = False) -> Lease:
        item.owner = consumer
        item.renewed_at = self._monotonic_s()
        item.deliveries += 1
        item.is_released = item.is_suspect = False
        return Lease(item.entry, consumer, item.frame, item.deliveries, suspect)

    def _next_id(self) -> str:
        millisecond, sequence = self._last_id
        now_ms = int(self._clock.now_s() * 1000)
        self._last_id = (now_ms, 0) if now_ms > millisecond else (millisecond, sequence + 1)
        return f"{self._last_id[0]}-{self._last_id[1]}"


def _place(entry_id: str) -> tuple[int, int]:
    """Returns an entry's id as numbers, to compare."""
    millisecond, _, sequence = entry_id.partition("-")
    return int(millisecond), int(sequence)
