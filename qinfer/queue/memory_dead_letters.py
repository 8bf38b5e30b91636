"""Dead letters in one process's memory."""

from collections.abc import Sequence

import msgspec

from qinfer.core.clock import ServerClock
from qinfer.queue.base import Lease, Payload
from qinfer.queue.dead_letters import MAX_AGE_S, MAX_BYTES, DeadLetter, payload_ttl_s, place_after
from qinfer.queue.memory_lanes import MemoryLanes


class MemoryDeadLetters:
    """`DeadLetters` beside `MemoryDelivery`.

    Args:
        lanes: The queue.
        clock: Its time.
    """

    def __init__(self, lanes: MemoryLanes, clock: ServerClock) -> None:
        self._lanes = lanes
        self._clock = clock
        self._letters: dict[str, dict[str, DeadLetter]] = {}
        self._count = 0

    def bury(self, lease: Lease, request_id: str, code: str, reason: str) -> bool:
        """See `Delivery.bury`."""
        item = self._lanes.owned(lease)
        if item is None:
            return False
        entry, deliveries = lease.entry, item.deliveries
        payload = b""
        if entry.payload_id:
            payload = self._lanes.value(("payload", entry.lane.model, entry.lane.partition, entry.payload_id)) or b""
        self._lanes.remove(entry)
        self._count += 1
        now_s = self._clock.now_s()
        letter = DeadLetter(
            id=f"{int(now_s * 1000)}-{self._count}",
            lane=entry.lane,
            request_id=request_id,
            code=code,
            reason=reason,
            deliveries=deliveries,
            buried_at=now_s,
            size=len(lease.frame) + len(payload),
            frame=lease.frame,
            payload=payload,
        )
        self._letters.setdefault(entry.lane.model, {})[letter.id] = letter
        self._trim(entry.lane.model)
        return True

    async def list(self, model: str, *, after: str = "", count: int = 100) -> list[DeadLetter]:
        """See `DeadLetters.list`."""
        self._trim(model)
        place = place_after(after)
        letters = [letter for letter in self._of(model).values() if place_after(letter.id) > place]
        return [msgspec.structs.replace(letter, frame=b"", payload=b"") for letter in letters[:count]]

    async def count(self, model: str) -> int:
        """See `DeadLetters.count`."""
        self._trim(model)
        return len(self._of(model))

    async def show(self, model: str, letter_id: str) -> DeadLetter | None:
        """See `DeadLetters.show`."""
        return self._of(model).get(letter_id)

    async def replay(self, model: str, letter_id: str) -> bool:
        """See `DeadLetters.replay`."""
        letter = self._of(model).pop(letter_id, None)
        if letter is None:
            return False
        payload = None
        if letter.payload:
            payload = Payload(letter.request_id, letter.payload, payload_ttl_s(letter.frame))
        item = self._lanes.add(letter.lane, letter.frame, payload)
        self._lanes.on_replay(letter.request_id, item)
        return True

    async def purge(self, model: str, letter_ids: Sequence[str] | None = None) -> int:
        """See `DeadLetters.purge`."""
        letters = self._of(model)
        wanted = list(letters) if letter_ids is None else letter_ids
        return sum(letters.pop(letter_id, None) is not None for letter_id in wanted)

    def _of(self, model: str) -> dict[str, DeadLetter]:
        return self._letters.get(model, {})

    def _trim(self, model: str) -> None:
        """Drops what is too old, and the oldest while all together are too large; the newest is never too large."""
        letters = self._of(model)
        oldest_s = self._clock.now_s() - MAX_AGE_S
        excess = sum(letter.size for letter in letters.values()) - MAX_BYTES
        for letter in list(letters.values()):
            if letter.buried_at >= oldest_s and (excess <= 0 or len(letters) == 1):
                break
            excess -= letter.size
            del letters[letter.id]
