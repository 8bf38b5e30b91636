"""The outboxes that programs named, in one process's memory."""

from collections.abc import Sequence

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.queue.request_records import Address

_Place = tuple[str, int, str]


class Told(msgspec.Struct, eq=False):
    """One entry of an outbox.

    Attributes:
        address: The request that ended.
        notes: What was given with it.
        deliveries: How often it was taken.
        taken_at: When it was taken last, in the queue's time.
    """

    address: Address
    notes: bytes
    deliveries: int = 0
    taken_at: float = 0.0


class MemoryOutboxes:
    """What has ended and is not confirmed, by model, partition and outbox.

    Args:
        clock: The queue's time.
    """

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._told: dict[_Place, dict[str, Told]] = {}
        self._count = 0

    def tell(self, outbox: str, address: Address, notes: bytes) -> str:
        """Appends the end of a request; returns the entry's id."""
        self._count += 1
        told_id = f"{int(self._clock.now_s() * 1000)}-{self._count}"
        self._told.setdefault((address.model, address.partition, outbox), {})[told_id] = Told(address, notes)
        return told_id

    def has(self, outbox: str, address: Address, told_id: str) -> bool:
        """Tells whether an entry is not confirmed yet."""
        return told_id in self._told.get((address.model, address.partition, outbox), {})

    def take(self, place: _Place, count: int, retry_s: float) -> list[tuple[str, Told]]:
        """Takes up to `count` entries: those that were taken so long ago, then new ones."""
        now_s = self._clock.now_s()
        entries = list(self._told.get(place, {}).items())
        late = [pair for pair in entries if pair[1].deliveries and now_s - pair[1].taken_at >= retry_s]
        taken = (late + [pair for pair in entries if not pair[1].deliveries])[:count]
        for _, told in taken:
            told.deliveries += 1
            told.taken_at = now_s
        return taken

    def remove(self, place: _Place, ids: Sequence[str]) -> None:
        """Removes entries."""
        entries = self._told.get(place, {})
        for told_id in ids:
            entries.pop(told_id, None)
