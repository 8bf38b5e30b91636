"""How entries on Redis leave their lanes, or their owner: a script each, run once per lane and owner."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from qinfer.errors import BrokerUnavailable, CorruptEntry
from qinfer.queue import keys, scripts
from qinfer.queue.base import Entry, Lane, LaneSize, Lease
from qinfer.queue.connection import Argument, Refused, pack
from qinfer.queue.dead_letters import MAX_AGE_S, MAX_BYTES, head_of
from qinfer.queue.router import Router
from qinfer.queue.values import Reference, Values

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

LETTER_OBJECT_S = 2 * MAX_AGE_S
"""The tensors of a dead letter stay so long in an object store: it may go only when another one comes."""

_MAX_IDS = 1000  # of one script call: Lua's stack holds about 8000 values


class RedisEntries:
    """The part of `Delivery` that changes what happens to entries; see `Delivery` for each method.

    Args:
        router: The way to Redis.
        values: The payloads.
    """

    def __init__(self, router: Router, values: Values) -> None:
        self._router = router
        self._values = values

    async def release(self, leases: Sequence[Lease]) -> None:
        """See `Delivery.release`."""
        await _all(
            [
                self._run(
                    lane,
                    scripts.RELEASE,
                    (consumer, keys.SUSPECTS if suspect else keys.RELEASED),
                    [lease.entry for lease in group],
                )
                for (lane, consumer, suspect), group in grouped(leases, owner_of)
            ]
        )

    def give_back(self, leases: Sequence[Lease]) -> None:
        """Releases without waiting what a `fetch` took; what does not arrive is reclaimed when its lease ends."""
        for (lane, consumer, _), group in grouped(leases, owner_of):
            ids = [lease.entry.entry_id for lease in group]
            arguments: tuple[Argument, ...] = (keys.GROUP, consumer, keys.RELEASED, *ids)
            words: tuple[Argument, ...] = (b"EVAL", scripts.RELEASE.text, 1, keys.lane(lane), *arguments)
            try:
                self._router.send(keys.lane_slot(lane), pack(words), lambda _: None)
            except BrokerUnavailable:
                logger.warning("entries could not be given back", extra={"count": len(ids)})

    async def withdraw(self, entries: Sequence[Entry]) -> list[bool]:
        """See `Delivery.withdraw`."""
        removed: set[Entry] = set()

        async def run(lane: Lane, group: list[Entry]) -> None:
            group.sort(key=lambda entry: not entry.payload_id)
            for part in _parts(group):
                names = [keys.lane(lane), *_payloads(part)]
                counts, gone = await self._script(lane, scripts.WITHDRAW, names, (keys.RELEASED, keys.SUSPECTS), part)
                self._values.forget(gone)
                removed.update(entry for entry, count in zip(part, counts, strict=True) if count)

        await _all([run(lane, group) for lane, group in _by_lane(entries)])
        return [entry in removed for entry in entries]

    async def in_flight(self, lane: Lane) -> int:
        """Returns how many entries of a lane a consumer holds."""
        try:
            pending = await self._router.call(keys.lane_slot(lane), b"XPENDING", keys.lane(lane), keys.GROUP)
        except Refused as error:
            if error.kind != "NOGROUP":
                raise
            return 0
        idle = (keys.RELEASED, keys.SUSPECTS)
        return sum(int(count) for consumer, count in pending[3] or () if consumer not in idle)

    async def sizes(self, lanes: Sequence[Lane], now_s: float) -> list[LaneSize]:
        """See `Delivery.sizes`."""
        found: dict[Lane, LaneSize] = {}

        async def run(group: list[Lane]) -> None:
            call = partial(self._router.call, keys.lane_slot(group[0]))
            replies = iter(await scripts.run(call, scripts.SIZES, [keys.lane(lane) for lane in group]))
            for lane in group:
                entries, origin = next(replies), next(replies)
                enqueued_s = Entry(lane, origin.decode()).enqueued_s if origin else now_s
                found[lane] = LaneSize(entries, max(now_s - enqueued_s, 0.0))

        await _all([run(group) for _, group in grouped(dict.fromkeys(lanes), keys.lane_slot)])
        return [found[lane] for lane in lanes]

    async def delay(self, leases: Sequence[Lease], name: str) -> None:
        """See `Delivery.delay`."""
        await _all(
            [self._delay(lane, consumer, group, name) for (lane, consumer, _), group in grouped(leases, owner_of)]
        )

    async def bury(self, lease: Lease, request_id: str, code: str, reason: str) -> bool:
        """See `Delivery.bury`."""
        entry, lane = lease.entry, lease.entry.lane
        names = [keys.lane(lane), keys.dead_letters(lane.model, lane.partition).encode(), *_payloads([entry])]
        about = (f"{lane.version}:{lane.name}", request_id, code, reason)
        copy = await self._kept(entry) if entry.payload_id else None
        kept = (copy.name,) if copy is not None else ()
        arguments = (lease.consumer, entry.entry_id, *about, int(MAX_AGE_S * 1000), MAX_BYTES, *kept)
        buried = None
        try:
            buried = await self._script(lane, scripts.BURY, names, arguments, ())
        except Refused as error:
            if error.kind != "NOGROUP":
                raise  # else the lane was deleted
        if buried is None:
            self._values.forget(name.encode() for name in kept)
            return False
        self._values.forget(buried[1])
        return True

    async def finish(self, entries: Sequence[Entry]) -> None:
        """See `Delivery.finish`."""
        await _all([self._run(lane, scripts.FINISH, (), group) for lane, group in _by_lane(entries)])

    async def _kept(self, entry: Entry) -> Reference | None:
        """Copies an entry's payload to be kept as long as a dead letter is, where it is an object.

        While the store is away there is no copy, and the dead letter has the payload as long as the request would have.
        """
        lane = entry.lane
        key = keys.payload(lane.model, lane.partition, entry.payload_id)
        reference = await self._values.reference(keys.lane_slot(lane), key)
        if reference is None:
            return None
        try:
            return await self._values.copy_object(reference, key, LETTER_OBJECT_S)
        except (BrokerUnavailable, CorruptEntry) as error:
            about = {"request_id": entry.payload_id, "reason": error.message}
            logger.warning("the tensors of a dead letter are not kept beyond its request's time", extra=about)
            return None

    async def _delay(self, lane: Lane, consumer: str, leases: Sequence[Lease], name: str) -> None:
        """Moves entries of one lane; those whose frame tells their request first: they may have a record."""
        other = Lane(lane.model, lane.version, name, lane.partition)
        heads = [(lease.entry, head_of(lease.frame)) for lease in leases]
        known = [(entry, head.id) for entry, head in heads if head is not None and head.id and not head.reply_to]
        named = {entry for entry, _ in known}
        rest = [(entry, "") for entry, _ in heads if entry not in named]
        for part in _parts([*known, *rest]):
            records = [
                keys.request(lane.model, lane.partition, request_id).encode() for _, request_id in part if request_id
            ]
            names = [keys.lane(lane), keys.lane(other), *records]
            try:
                await self._script(lane, scripts.DELAY, names, (consumer, name), [entry for entry, _ in part])
            except Refused as error:
                if error.kind != "NOGROUP":
                    raise

    async def _run(
        self, lane: Lane, script: scripts.Script, arguments: Sequence[Argument], entries: Sequence[Entry]
    ) -> None:
        """Runs a script on entries of one lane; does nothing where the lane was deleted."""
        try:
            for part in (entries,) if len(entries) <= _MAX_IDS else _parts(entries):
                names = [keys.lane(lane), *(_payloads(part) if script is scripts.FINISH else ())]
                gone = await self._script(lane, script, names, arguments, part)
                if gone and script is scripts.FINISH:
                    self._values.forget(gone)
        except Refused as error:
            if error.kind != "NOGROUP":
                raise

    async def _script(
        self,
        lane: Lane,
        script: scripts.Script,
        names: Sequence[bytes],
        arguments: Sequence[Argument],
        entries: Sequence[Entry],
    ) -> Any:
        call = partial(self._router.call, keys.lane_slot(lane))
        ids = [entry.entry_id for entry in entries]
        return await scripts.run(call, script, names, keys.GROUP, *arguments, *ids)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> Iterable[tuple[K, list[T]]]:
    """Returns the items with the same key together."""
    groups: dict[K, list[T]] = {}
    for item in items:
        its_key = key(item)
        group = groups.get(its_key)
        if group is None:
            groups[its_key] = [item]
        else:
            group.append(item)
    return groups.items()


def owner_of(lease: Lease) -> tuple[Lane, str, bool]:
    """Returns what the leases of one script call have in common: lane, consumer, whether they are suspects."""
    return lease.entry.lane, lease.consumer, lease.suspect


def _by_lane(entries: Sequence[Entry]) -> Iterable[tuple[Lane, list[Entry]]]:
    """Returns the entries of each lane together; mostly all are of one."""
    lane = entries[0].lane if entries else None
    if lane is not None and not [True for entry in entries if entry.lane is not lane]:
        return ((lane, list(entries)),)
    return grouped(entries, lambda entry: entry.lane)


def _payloads(entries: Sequence[Entry]) -> list[bytes]:
    """Returns the keys of the entries' payloads, of those that have one."""
    return [
        keys.payload(entry.lane.model, entry.lane.partition, entry.payload_id).encode()
        for entry in entries
        if entry.payload_id
    ]


def _parts(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[start : start + _MAX_IDS] for start in range(0, len(items), _MAX_IDS))


async def _all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Awaits all; one, which is the common case, without a task of its own."""
    if len(calls) == 1:
        await calls[0]
    else:
        await asyncio.gather(*calls)
