"""The queue of deliveries beside the lanes: items that are delivered again until they are done.

Each *kind* (webhooks, bulk jobs, outboxes, labeling tasks) has a queue in each partition. Scripts that store or end a
record also `put` the item (`lua/common/deliveries.lua`). The guarantees, each with a test in `tests/contract/`:

1. An item goes to one caller at a time until it is done; it is due again after a pause that doubles with each attempt.
2. New items are handed out however many others are due again.
3. An untaken item stays as long as `put` said, and the queue no longer than its last item.
4. All this works with full memory, because deliveries free it.
5. Items do not count as work that waits for a model.
"""

from collections.abc import Sequence

import msgspec

from qinfer.queue import keys
from qinfer.queue.router import Router, load_script

_MAX_IDS = 1000  # Lua's stack holds about 8000 values

_TAKE = load_script("deliveries/take", "now_ms", "deliveries")
_DONE = load_script("deliveries/done", "now_ms", "deliveries")


class DeliveryKind(msgspec.Struct, frozen=True):
    """A kind of delivery.

    A taken item rests for `pause_s`, at least the time of one delivery, doubling up to `longest_pause_s`.
    """

    name: str
    pause_s: float
    longest_pause_s: float


WEBHOOKS = "webhooks"
"""`request:<id>`, `job:<id>` or `endpoint:<name>`; settings have the pauses."""

JOBS = DeliveryKind("jobs", 2.0, 60.0)


def outbox(name: str, pause_s: float) -> DeliveryKind:
    """Returns the kind of an outbox's ended requests."""
    return DeliveryKind(f"outbox:{name}", pause_s, pause_s)


class DeliveryItem(msgspec.Struct, frozen=True):
    """An item to be delivered; `attempts` stops at 1023."""

    model: str
    partition: int
    id: str
    text: str
    notes: bytes = b""
    attempts: int = 1


class Deliveries:
    """The deliveries of all models."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def take_due(self, model: str, partition: int, kind: DeliveryKind, count: int) -> list[DeliveryItem]:
        """Takes up to `count` due items, which others do not get for a while."""
        name = keys.deliveries(model, partition, kind.name).encode()
        times = (int(kind.pause_s * 1000), int(kind.longest_pause_s * 1000))
        return [
            DeliveryItem(model, partition, item_id.decode(), text.decode(), notes, attempts)
            for item_id, attempts, text, notes in await self._router.run(keys.slot(name), _TAKE, [name], count, *times)
        ]

    async def done(
        self,
        model: str,
        partition: int,
        kind: DeliveryKind,
        ids: Sequence[str],
        *,
        note: tuple[bytes, str, str] | None = None,
    ) -> None:
        """Removes items, and sets a field of an existing record (`note`)."""
        name = keys.deliveries(model, partition, kind.name).encode()
        record, field, value = note or (b"", "", "")
        names = [name, record] if record else [name]
        for start in range(0, len(ids), _MAX_IDS):
            part = ids[start : start + _MAX_IDS]
            await self._router.run(keys.slot(name), _DONE, names, field, value, *part)
