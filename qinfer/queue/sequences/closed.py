"""Closed lanes of former owners, which the next owners of their sequences read (ADR 0044).

Entries stay where they are until they are finished. Of each lane, the ids are read once: a closed lane gets no more.
"""

import asyncio
from collections.abc import Sequence as Items

import msgspec

from qinfer.queue import keys
from qinfer.queue.connection import Argument
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.router import Router
from qinfer.queue.sequences.records import DeliveredStep, Delivery, OwnedLife, StepPlace, done_name

_PAGE = 100


class ClosedLanes:
    """The closed lanes of one partition of a model."""

    def __init__(self, router: Router, slot: int, model: str, partition: int) -> None:
        self._router = router
        self._slot = slot
        self._model = model
        self._partition = partition
        self._entries: dict[str, dict[bytes, list[bytes]]] = {}
        """The ids of a lane's entries, by sequence."""

    async def take_up(self, names: Items[str]) -> None:
        """Reads the lanes that are new, and forgets others: one that an owner still needs is read again."""
        self._entries = {name: self._entries[name] for name in names if name in self._entries}
        for name in names:
            await self._entries_of(name)

    async def left_steps(self, worker_id: str, owned: OwnedLife, stream: Lane) -> list[DeliveredStep]:
        """Returns the unfinished steps of a life in its former owners' lanes and its own `stream`, in order.

        Steps in the stream were sent before its first owner, or after the one that is their token. If lanes have no
        steps, tickets tell of those in the stream.
        """
        name, left = owned.sequence.name.encode(), list[_LeftEntry]()
        for closed in owned.closed:
            lane = self._lane(closed)
            ids = (await self._entries_of(closed)).get(name, ())
            for found in await asyncio.gather(*[self._range(lane, one, one) for one in ids]):
                left += found
        if not any(b"f" in each.fields for each in left):
            return []
        left += await self._range(stream, "-", "+")
        left = sorted((each for each in left if _int(each.fields, b"l") == owned.life), key=_LeftEntry.order)
        end = next((at for at, each in enumerate(left) if b"r" in each.fields), len(left))
        steps = [self._left_step(each, worker_id, owned) for each in left[:end]]
        for at, (each, step) in enumerate(zip(left, steps, strict=False)):
            if step.lease is None or done_name(step.lease.entry) in owned.done:
                continue
            if (deaths := min(owned.deaths, owned.token - each.token - each.order()[1])) > 0:
                suspect = msgspec.structs.replace(step.lease, deliveries=deaths + 1, suspect=True)
                steps[at] = msgspec.structs.replace(step, lease=suspect)
            break
        return steps

    async def _range(self, lane: Lane, first: str | bytes, last: str | bytes, *more: Argument) -> "list[_LeftEntry]":
        found = await self._router.call(self._slot, b"XRANGE", keys.lane(lane), first, last, *more)
        return [_LeftEntry(lane, one, dict(zip(words[::2], words[1::2], strict=True))) for one, words in found]

    async def _entries_of(self, closed: str) -> dict[bytes, list[bytes]]:
        if (known := self._entries.get(closed)) is None:
            known = self._entries[closed] = await self._list_entries(closed)
        return known

    async def _list_entries(self, closed: str) -> dict[bytes, list[bytes]]:
        """Returns the entries of a closed lane by sequence; none comes later."""
        found: dict[bytes, list[bytes]] = {}
        lane, first = self._lane(closed), b"-"
        while page := await self._range(lane, first, b"+", b"COUNT", _PAGE):
            for each in page:
                if b"e" not in each.fields:
                    found.setdefault(each.fields.get(b"s", b""), []).append(each.entry_id)
            first = b"(" + page[-1].entry_id
        return found

    def _left_step(self, left: "_LeftEntry", worker_id: str, owned: OwnedLife) -> DeliveredStep:
        fields, place = left.fields, StepPlace(owned.sequence, owned.life, _int(left.fields, b"n"))
        if b"f" not in fields:
            entry_id, code = fields.get(b"x", b"").decode(), fields.get(b"c", b"").decode(errors="replace")
            return DeliveredStep(place, owned.token, None, Delivery.CANCEL, entry_id=entry_id, code=code)
        entry = Entry(left.lane, left.entry_id.decode(), payload_id=fields.get(b"p", b"").decode(errors="replace"))
        what = Delivery.STEP if b"s" in fields else Delivery.TICKET
        return DeliveredStep(place, owned.token, Lease(entry, worker_id, fields[b"f"], 1), what)

    def _lane(self, closed: str) -> Lane:
        return Lane(self._model, 0, closed.removeprefix("0:"), self._partition)


class _LeftEntry(msgspec.Struct, frozen=True):
    """An entry of a closed lane, or of a sequence's own stream."""

    lane: Lane
    entry_id: bytes
    fields: dict[bytes, bytes]

    @property
    def token(self) -> int:
        """The owner of its lane, or the last owner before it was sent by script."""
        return _int(self.fields, b"t") or _int(self.fields, b"o")

    def order(self) -> tuple[int, bool]:
        """Steps sent by script came after those in the lane of the owner that had the sequence last."""
        return self.token, b"s" not in self.fields


def _int(fields: dict[bytes, bytes], name: bytes) -> int:
    value = fields.get(name, b"")
    return int(value) if value.isdigit() else 0
