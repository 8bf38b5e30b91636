"""The queue of deliveries beside the lanes: items that are delivered again until they are done.

    put ──▶ ready ──take──▶ later ──done──▶ gone
                              └── due again ──take …

Each *kind* of delivery has a queue in each partition of a model: webhooks, bulk jobs to look after, the ended requests
of each outbox, the tasks of each labeling project. `put` is a function of `lua/common/deliveries.lua`, called by the
scripts that end a record or store one: both happen, or neither. The promises, each a test in `tests/contract/`:

1. An item is handed out until it is done, to one caller at a time: it is due again when its kind's patience is over,
   which doubles with each attempt. It keeps its id, and its attempts are counted.
2. However many items rest, or are due again, new ones are handed out too.
3. An item that nobody takes is there as long as `put` said, and the queue no longer than its last item.
4. All this works while Redis's memory is full: what is delivered makes room.
5. No item counts as work that waits for a model.
"""

from collections.abc import Sequence

import msgspec

from qinfer.queue import keys
from qinfer.queue.router import Router, load_script

_MAX_IDS = 1000  # of one script call: Lua's stack holds about 8000 values

_TAKE = load_script("deliveries/take", "now_ms", "deliveries")
_DONE = load_script("deliveries/done", "now_ms", "deliveries")


class Kind(msgspec.Struct, frozen=True):
    """A kind of delivery.

    Attributes:
        name: What its keys are named after.
        pause_s: How long an item that was taken rests before it is handed out again. It should not be less than one
            delivery may take.
        longest_pause_s: That pause doubles with each attempt, up to this.
    """

    name: str
    pause_s: float
    longest_pause_s: float


WEBHOOKS = "webhooks"
"""The kind of webhooks; an item is `request:<id>`, `job:<id>` or `endpoint:<name>`. Settings say how patient it is."""

JOBS = Kind("jobs", 2.0, 60.0)
"""Bulk jobs to be looked at: planned, settled, stopped, or with too many failed rows; an item is a job's id."""


def outbox(name: str, pause_s: float) -> Kind:
    """Returns the kind of the ended requests that named an outbox, for the program that reads it.

    Args:
        name: The outbox's name.
        pause_s: An end that was taken comes again after so long; `Requests.endings` takes them, with their results.
    """
    return Kind(f"outbox:{name}", pause_s, pause_s)


class DeliveryItem(msgspec.Struct, frozen=True):
    """Something that is to be delivered.

    Attributes:
        model: The model that it is of, and
        partition: its partition.
        id: Its own id, the same at each attempt; unique within its queue.
        text: What it is about, such as a request's id.
        notes: What was given with it.
        attempts: How often it was handed out, this time included; 1023 = as often or more.
    """

    model: str
    partition: int
    id: str
    text: str
    notes: bytes = b""
    attempts: int = 1


class Deliveries:
    """The deliveries of all models; every coroutine raises `BrokerUnavailable` when the broker can't be reached.

    Args:
        router: The way to Redis.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    async def take(self, model: str, partition: int, kind: Kind, count: int) -> list[DeliveryItem]:
        """Takes up to `count` items of a kind, due again or new; no other caller gets them for a while."""
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
        kind: Kind,
        ids: Sequence[str],
        *,
        note: tuple[bytes, str, str] | None = None,
    ) -> None:
        """Removes items, even if another caller took them; may be repeated.

        Args:
            model: The model, and
            partition: its partition.
            kind: The kind.
            ids: Those of the items.
            note: A record's key, and a field and value to be set in it where it is still there, in the same step.
        """
        name = keys.deliveries(model, partition, kind.name).encode()
        record, field, value = note or (b"", "", "")
        names = [name, record] if record else [name]
        for start in range(0, len(ids), _MAX_IDS):
            part = ids[start : start + _MAX_IDS]
            await self._router.run(keys.slot(name), _DONE, names, field, value, *part)
