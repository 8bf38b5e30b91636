"""Marks of entries that execute, have sent responses, or are cancelled.

<lane>~executing        of lanes with a limit
…:sent:<lane>:<entry>   a response of the entry's stream has left: whichever worker reclaims it does not execute it
…:cancels               the entries that `Queue.cancel` removed while a worker held them
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from qinfer.errors import BrokerUnavailable
from qinfer.queue import keys
from qinfer.queue.connection import Argument, CommandRefused, pack
from qinfer.queue.entries import Entry, Lane, Lease, by_lane, grouped, owner_of
from qinfer.queue.router import Router, load_script, ttl_ms

_MOST_AT_ONCE = 1000

_BEGIN = load_script("lanes/begin", "holder")


class StreamMarks:
    """The marks of entries."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def mark_begun(self, leases: Sequence[Lease]) -> None:
        """Marks entries as executing, for their lane's limit; never blocks."""
        for (lane, consumer, _), group in grouped(leases, owner_of):
            ids = [lease.entry.entry_id for lease in group]
            for start in range(0, len(ids), _MOST_AT_ONCE):
                self._mark_in_lane(lane, consumer, ids[start : start + _MOST_AT_ONCE])

    def _mark_in_lane(self, lane: Lane, consumer: str, ids: Sequence[str]) -> None:
        slot = keys.lane_slot(lane)
        words: tuple[Argument, ...] = (1, keys.lane(lane), keys.GROUP, consumer, *ids)

        def answered(reply: Any) -> None:
            if type(reply) is CommandRefused and reply.kind == "NOSCRIPT":
                self._send_command(slot, (b"EVAL", _BEGIN.text, *words), lambda _: None)

        self._send_command(slot, (b"EVALSHA", _BEGIN.sha, *words), answered)

    def _send_command(self, slot: int, words: tuple[Argument, ...], answered: Callable[[Any], None]) -> None:
        with suppress(BrokerUnavailable):
            self._router.send(slot, pack(words), answered)

    async def mark_sent(self, entry: Entry, ttl_s: float) -> None:
        """Marks an entry before a response is sent, for `ttl_s` seconds."""
        key = keys.sent(entry.lane, entry.entry_id)
        await self._router.call(keys.lane_slot(entry.lane), b"SET", key, b"", b"PX", ttl_ms(ttl_s))

    async def was_sent(self, entry: Entry) -> bool:
        """Tells whether a response may have been sent."""
        slot, key = keys.lane_slot(entry.lane), keys.sent(entry.lane, entry.entry_id)
        return bool(await self._router.call(slot, b"EXISTS", key))

    async def remove_marks(self, entries: Sequence[Entry]) -> None:
        """Removes the marks of ended entries."""
        for lane, group in by_lane(entries):
            await self._router.call(keys.lane_slot(lane), b"UNLINK", *[keys.sent(lane, one.entry_id) for one in group])

    async def list_cancelled(self, model: str, partition: int, after: str) -> list[tuple[str, Lane, str]]:
        """Returns mark, lane and id of the last thousand cancelled entries of workers.

        `after` is the last known mark, or an instant in ms of Redis' time.
        """
        key = keys.cancels(model, partition)
        found = await self._router.call(keys.slot(key), b"XRANGE", key, f"({after}", b"+")
        return [_cancelled(model, partition, mark, fields) for mark, fields in found]


def _cancelled(model: str, partition: int, mark: bytes, fields: Sequence[bytes]) -> tuple[str, Lane, str]:
    version, name, entry_id = fields[1].decode().split(":")
    return mark.decode(), Lane(model, int(version), name, partition), entry_id
