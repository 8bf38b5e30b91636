"""The queue on Redis Streams: a stream per lane, one consumer group, and Lua scripts for steps that must be atomic.

    submit ──▶ lane ──fetch──▶ lease ──▶ publish ──▶ finish          finish is the only terminal transition
                 ▲                │
                 └── release, reclaim (a dead owner's)

The guarantees, each with a test in `tests/contract/`:

1. An entry whose `submit` was confirmed is fetched at least once, unless it is finished first.
2. Between two `fetch`es an entry has one owner. `renew` keeps it, raises no delivery count, and takes it from no other.
3. `release` makes an entry available within half a second, or after the given rest, and restores its delivery count.
4. `reclaim` takes entries that were not renewed for the lease time, and marks them as suspects.
5. `finish` removes any entry, and may be repeated. `cancel` also notifies the worker that holds the entry.
6. `depth` is always the sum of the waiting entries and the entries in flight.
7. `publish` does not recreate a deleted reply stream.
8. `listen` delivers replies that were published while the connection was down; callers drop duplicates.
9. `submit` enqueues nothing beyond a limit. Executing entries, reported by `marks.begin`, do not count.
10. `withdraw` removes only waiting entries.
11. `delay` moves an entry to another lane of its partition atomically, with its first enqueue time.
12. `bury` moves an entry to the dead letters atomically.
13. `oldest` changes nothing.
14. Tenants share a lane by weight: `fetch` takes from each in turn, and others use an idle share.
15. `moves.move` moves waiting entries to another version, each atomically; `cancel` and `withdraw` find them there.

The fields of a stream entry: `f`, the frame; `p`, the id of the request whose payload is stored; `o`, the id in its
first lane; `d`, a mark that the lane has a new share; and those of `moves`. Readers skip unknown fields.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Self, TypeVar

from qinfer.core.clock import Clock, ServerClock, SystemClock
from qinfer.core.settings import LimitSettings, RedisSettings
from qinfer.errors import BrokerUnavailable, QinferError, QueueFull, QuotaExceeded
from qinfer.queue import keys
from qinfer.queue.connection import Argument, CommandRefused, Reply, pack, packable
from qinfer.queue.dead_letters import MAX_AGE_S, MAX_BYTES, DeadLetters, head_of
from qinfer.queue.deliveries import Deliveries
from qinfer.queue.doorbell import Doorbell
from qinfer.queue.durability import Durability
from qinfer.queue.entries import (
    BULK_LANES,
    SHADOW_LANE,
    Entry,
    Lane,
    LaneSize,
    Lease,
    Payload,
    Share,
    by_lane,
    grouped,
    owner_of,
    share_of,
)
from qinfer.queue.readers import REPLY_TTL_MS, LaneReader, ReplyReader, leases_of
from qinfer.queue.requests import Requests
from qinfer.queue.router import Router, Script, load_script, run_script, ttl_ms
from qinfer.queue.sequences.ownership import Sequences, may_lose
from qinfer.queue.stored_responses import TOO_MUCH_STORED, StreamMarks
from qinfer.queue.submitter import PLACING, Moves, Submitter
from qinfer.queue.tenants import Places
from qinfer.queue.values import Room, ValueKind, Values
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_IDS = 1000  # Lua's stack holds about 8000 values
_CLOCK_EVERY_S = 5.0
_CONSUMER_GONE_MS = 3_600_000
_ONLINE = "online"
_TIME = pack((b"TIME",))

_RECLAIM = load_script("lanes/reclaim", *PLACING)
_RELEASE = load_script("lanes/release", "holder")
_WITHDRAW = load_script("lanes/withdraw", "drop", "notes")
_DELAY = load_script("lanes/delay", "holder")
_BURY = load_script("lanes/bury", "holder", "trim_letters")
_FINISH = load_script("lanes/finish", "drop", "holder")
_CANCEL = load_script("lanes/cancel", "drop", "holder", "notes")
_SIZES = load_script("lanes/sizes", "shares")
_SHARES = load_script("lanes/shares", "holder", "shares", "waiting")
_PUBLISH = load_script("lanes/publish")
_COUNT_RESULT = load_script("lanes/count_result", "now_ms", "requests/stored")

RENEW = load_script("lanes/renew", "holder")
"""A worker's renewer runs this script's text."""


class Queue(Submitter):
    """The queue, on Redis 6.2 or newer, single or cluster; made by `connect`.

    All lanes in one call belong to one model version and partition. Every coroutine may raise `BrokerUnavailable`.
    """

    def __init__(self, settings: RedisSettings, router: Router, clock: Clock) -> None:
        self.clock = ServerClock(clock)
        self._monotonic_s = clock.monotonic_s
        self.doorbell = Doorbell(router, clock.monotonic_s)
        self.durability = Durability(settings, router)
        super().__init__(router, Values(router, is_cluster=settings.cluster), Places(clock.monotonic_s))
        self.requests = Requests(router, self._values, self.durability, self.places)
        self.dead_letters = DeadLetters(router, self._values)
        self.deliveries = Deliveries(router)
        self.marks = StreamMarks(router)
        self.moves = Moves(router)
        parts = (router, self._values, self.durability)
        self.sequences = cache(partial(Sequences, *parts, is_fragile=may_lose(settings)))
        self._readers: dict[tuple[str, int, int, str], LaneReader] = {}
        self._clock_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def connect(
        cls, settings: RedisSettings, limits: LimitSettings | None = None, *, clock: Clock | None = None
    ) -> Self:
        """Connects, reads the server's time, and tries the payload store."""
        queue = cls(settings, await Router.connect(settings), clock or SystemClock())
        try:
            sent_s = queue._monotonic_s()
            queue._observe(sent_s, await queue.router.call(0, b"TIME"))
            await queue.durability.check()
            if limits is not None and limits.payload_url:
                from qinfer.queue.object_store import ObjectStore

                queue._values.objects = await ObjectStore.open(limits, settings, queue.clock.now_s)
        except BaseException:
            await queue.close()
            raise
        queue._ask_time()
        return queue

    async def ensure(self, lanes: Sequence[Lane]) -> None:
        """Creates missing lanes and their consumer group."""
        await asyncio.gather(*(self._ensure(lane) for lane in lanes))

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """Takes up to `count` entries: lanes in the given order, a lane's shares by turns; waits up to `wait_s`.

        Online, bulk and shadow lanes of a model version allow one fetch at a time each.
        """
        if count <= 0:
            return []
        reader = self._readers.get(place := _reading(lanes))
        if reader is None:
            slot = keys.lane_slot(lanes[0])
            bell = self.doorbell if place[-1] == _ONLINE else None  # the others are read only during jobs
            reader = LaneReader(self.router, slot, self.ensure, self._give_back, self._monotonic_s, bell)
            self._readers[place] = reader
        return await reader.fetch(lanes, consumer, count, wait_s)

    def sources(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Returns the lanes, and the shares that `fetch` found last."""
        reader = self._readers.get(_reading(lanes))
        return [*lanes, *(reader.shares if reader is not None else ())]

    def is_stirred(self, lanes: Sequence[Lane]) -> bool:
        """Tells whether a recent event may have left leases that no consumer renews."""
        reader = self._readers.get(_reading(lanes))
        return reader is None or self.doorbell.is_stirred(reader.stirred_at_s)

    async def close_reader(self, lanes: Sequence[Lane]) -> None:
        """Frees what `fetch` keeps for these lanes."""
        reader = self._readers.pop(_reading(lanes), None)
        if reader is not None:
            await reader.close()

    async def reclaim(self, lanes: Sequence[Lane], consumer: str, idle_s: float, count: int) -> list[Lease]:
        """Takes up to `count` entries that were not renewed for `idle_s` seconds, as suspects.

        `consumer` may be the former owner, if the reply to its fetch was lost; while it still holds an entry, it drops
        the second lease.
        """
        names = [keys.lane(lane) for lane in lanes]
        arguments = (consumer, keys.RELEASED, keys.SUSPECTS, count, int(idle_s * 1000), _CONSUMER_GONE_MS)
        found = await self._script(lanes[0], _RECLAIM, names, arguments, ())
        return leases_of(lanes, consumer, found or (), suspect=True)

    async def release(self, leases: Sequence[Lease], *, rest_s: float = 0.0) -> None:
        """Gives unexecuted entries back to their lanes after `rest_s`, less than an hour; suspects go to `reclaim`."""
        await _all(
            [
                self._run_on_entries(
                    lane,
                    _RELEASE,
                    (consumer, keys.SUSPECTS if suspect else keys.RELEASED, int(rest_s * 1000)),
                    [lease.entry for lease in group],
                )
                for (lane, consumer, suspect), group in grouped(leases, owner_of)
            ]
        )
        for lane in {lease.entry.lane for lease in leases}:
            if rest_s > 0:
                asyncio.get_running_loop().call_later(rest_s, self.doorbell.ring, lane)
            else:
                self.doorbell.ring(lane)

    async def withdraw(self, entries: Sequence[Entry]) -> list[bool]:
        """Removes waiting entries, moved ones included, and their payloads; returns whether each was removed."""
        removed: set[Entry] = set()

        async def run(lane: Lane, group: list[Entry]) -> None:
            group.sort(key=lambda entry: not entry.payload_id)
            for part in _parts(group):
                names = [keys.lane(lane), _moved(lane), *_payloads(part)]
                words = (keys.RELEASED, keys.SUSPECTS, f"{lane.version}:{lane.name}")
                counts, gone = await self._script(lane, _WITHDRAW, names, words, part)
                self._values.delete_objects(gone)
                removed.update(entry for entry, count in zip(part, counts, strict=True) if count)

        await _all([run(lane, group) for lane, group in by_lane(entries)])
        return [entry in removed for entry in entries]

    async def delay(self, leases: Sequence[Lease], name: str) -> None:
        """Moves leased entries to the end of the lane `name`, with a delivery count that begins anew.

        Submitters do not learn the new address: their `finish` removes only the payload.
        """
        await _all(
            [self._delay(lane, consumer, group, name) for (lane, consumer, _), group in grouped(leases, owner_of)]
        )

    async def bury(self, lease: Lease, request_id: str, code: str, reason: str, frame: bytes = b"") -> bool:
        """Moves an entry to the dead letters, with `frame` instead of its own; returns false if its lease was lost."""
        entry, lane = lease.entry, lease.entry.lane
        names = [keys.lane(lane), keys.dead_letters(lane.model, lane.partition).encode(), *_payloads([entry])]
        about = (f"{lane.version}:{lane.name}", request_id, code, reason)
        copy = await self.dead_letters.keep_payload(entry) if entry.payload_id else None
        kept = "" if copy is None else copy.name
        request = head_of(frame or lease.frame)
        tenant = "" if request is None else request.tenant
        arguments = (lease.consumer, entry.entry_id, *about, int(MAX_AGE_S * 1000), MAX_BYTES, kept, frame, tenant)
        buried = await self._script(lane, _BURY, names, arguments, ())
        if buried is None:
            self._values.delete_objects([kept.encode()] if kept else [])
            return False
        self._values.delete_objects(buried[1])
        return True

    async def put_payload(self, entry: Entry, payload: Payload, tenant: str) -> None:
        """Stores tensors that an entry lacks, for `payload`; they are removed when their time is over."""
        lane = entry.lane
        key = keys.payload(lane.model, lane.partition, payload.request_id)
        await self._values.set(keys.lane_slot(lane), key, payload.data, payload.ttl_s, tenant=tenant)

    async def payload(self, entry: Entry, request_id: str, tenant: str = "") -> bytes | None:
        """Returns the payload of an entry; `None` if it is gone."""
        lane = entry.lane
        key = keys.payload(lane.model, lane.partition, request_id)
        return await self._values.get(keys.lane_slot(lane), key, tenant)

    async def store_result(self, lane: Lane, request_id: str, blob: Bytes, ttl_s: float, tenant: str = "") -> None:
        """Stores outputs for `take_result`."""
        key, size = keys.result(lane.model, lane.partition, request_id), len(blob)
        in_redis = not self._values.is_object(size)
        if not in_redis and tenant and (free := await self._values.free_bytes()) is not None:
            in_redis = not await self._count_result(lane, request_id, tenant, size, ttl_s, free)
        if in_redis and not await self._count_result(lane, request_id, tenant, size, ttl_s):
            raise QuotaExceeded(TOO_MUCH_STORED)
        slot = keys.lane_slot(lane)
        await self._values.set(slot, key, blob, ttl_s, tenant=tenant, kind=ValueKind.ANSWER, in_redis=in_redis)

    async def take_result(
        self, lane: Lane, request_id: str, tenant: str = "", room: Room | None = None
    ) -> bytes | None:
        """Reads and removes stored outputs, awaiting `room` before large ones; `None` if they are gone."""
        key = keys.result(lane.model, lane.partition, request_id)
        value = await self._values.take(keys.lane_slot(lane), key, tenant, room)
        if value is not None:
            with suppress(BrokerUnavailable):  # it expires
                await self._count_result(lane, request_id, tenant)
        return value

    async def drop_result(self, lane: Lane, request_id: str, tenant: str = "") -> None:
        """Removes stored outputs unread."""
        await self._values.remove(keys.lane_slot(lane), keys.result(lane.model, lane.partition, request_id))
        await self._count_result(lane, request_id, tenant)

    async def _count_result(
        self, lane: Lane, request_id: str, tenant: str, nbytes: int = 0, ttl_s: float = 0.0, free: int | str = ""
    ) -> bool:
        if not tenant:
            return True
        key = keys.result(lane.model, lane.partition, request_id)
        arguments = (keys.prefix(lane.model, lane.partition), tenant, request_id, nbytes, ttl_ms(ttl_s), free)
        return bool(await self.router.run(keys.lane_slot(lane), _COUNT_RESULT, [key.encode()], *arguments))

    async def finish(self, entries: Sequence[Entry]) -> None:
        """Removes entries with their payloads."""
        await _all([self._run_on_entries(lane, _FINISH, (), group) for lane, group in by_lane(entries)])

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        """Appends responses to a reply stream; returns false if the stream is gone."""
        slot, key = keys.reply_stream(reply_to)
        try:
            added = await self.router.call(slot, b"XADD", key, b"NOMKSTREAM", b"*", b"r", packable(blob))
        except QueueFull:  # only replies can free the full memory
            added = await self.router.run(slot, _PUBLISH, [key], REPLY_TTL_MS, packable(blob))
        return added is not None

    def publish_now(self, reply_to: str, blob: Bytes, reply: Reply) -> None:
        """Appends responses to a reply stream as `publish` does, in the write of this event-loop tick.

        `reply` gets the entry's id, `None` if the stream is gone, or an error. Raises what the connection
        broke with, mostly `BrokerUnavailable`, if nothing can be written now.
        """
        slot, key = keys.reply_stream(reply_to)
        self.router.send(slot, pack((b"XADD", key, b"NOMKSTREAM", b"*", b"r", packable(blob))), reply)

    async def listen(
        self,
        owner: str,
        deliver: Callable[[bytes], None],
        ready: Callable[[], None] | None = None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the reply stream of `owner` until cancelled: creates it, calls `deliver` with each blob, trims it.

        After a reconnect blobs may come twice. `ready` is called once it exists, `lost` when it had vanished.
        """
        reader = ReplyReader(self.router, owner, deliver, self._monotonic_s, lost)
        try:
            await reader.run(ready)
        finally:
            await reader.close()

    async def cancel(self, entries: Sequence[Entry]) -> None:
        """Removes entries as `finish` does, and notifies their workers."""
        lanes = by_lane(entries)
        await _all(
            [self._run_on_entries(lane, _CANCEL, (f"{lane.version}:{lane.name}",), group) for lane, group in lanes]
        )

    async def shares(self, lanes: Sequence[Lane], *, named: bool = False) -> list[list[Share]]:
        """Returns each lane's shares, itself first; `named` adds waiting entries and tenants."""
        found: dict[Lane, list[Share]] = {}

        async def run(group: list[Lane]) -> None:
            names, more = [keys.lane(lane) for lane in group], (_MAX_IDS, keys.GROUP) if named else ()
            slot = keys.lane_slot(group[0])
            for lane, shares in zip(group, await self.router.run(slot, _SHARES, names, *more), strict=True):
                found[lane] = [_share(lane, *share) for share in shares]

        await _all([run(group) for _, group in grouped(dict.fromkeys(lanes), keys.lane_slot)])
        return [found[lane] for lane in lanes]

    async def depth(self, lanes: Sequence[Lane]) -> list[int]:
        """Counts each lane's entries with its shares, waiting and in flight."""
        return [sum(share.entries for share in shares) for shares in await self.shares(lanes)]

    async def in_flight(self, lanes: Sequence[Lane]) -> list[int]:
        """Counts each lane's entries that a consumer holds."""
        shares = await self.shares(lanes)
        held = iter(await asyncio.gather(*(self._in_flight(share.lane) for each in shares for share in each)))
        return [sum(next(held) for _ in each) for each in shares]

    async def sizes(self, lanes: Sequence[Lane]) -> list[LaneSize]:
        """Returns size and age of each lane with its shares."""
        found: dict[Lane, LaneSize] = {}
        now_s = self.clock.now_s()

        async def run(group: list[Lane]) -> None:
            names = [keys.lane(lane) for lane in group]
            replies = iter(await self.router.run(keys.lane_slot(group[0]), _SIZES, names))
            for lane in group:
                entries, origin = next(replies), next(replies)
                enqueued_s = Entry(lane, origin.decode()).enqueued_s if origin else now_s
                found[lane] = LaneSize(entries, max(now_s - enqueued_s, 0.0))

        await _all([run(group) for _, group in grouped(dict.fromkeys(lanes), keys.lane_slot)])
        return [found[lane] for lane in lanes]

    async def oldest(self, lane: Lane, age_s: float, count: int, after: str = "") -> list[tuple[Entry, bytes]]:
        """Lists up to `count` entries older than `age_s`, oldest first, behind the id `after`."""
        end = max(int((self.clock.now_s() - age_s) * 1000), 0)
        words = (b"XRANGE", keys.lane(lane), f"({after}" if after else b"-", end, b"COUNT", count)
        found = await self.router.call(keys.lane_slot(lane), *words)
        leases = leases_of([lane], "", [(1, entry_id, fields, 0, 0) for entry_id, fields in found])
        return [(lease.entry, lease.frame) for lease in leases]

    async def sweep(self) -> int:
        """Deletes some expired objects of dead processes; returns how many."""
        return await self._values.sweep()

    async def close(self) -> None:
        """Closes the connections; unconfirmed submissions fail."""
        if self._clock_timer is not None:
            self._clock_timer.cancel()
        await self._end_large()
        await self.doorbell.close()
        for reader in self._readers.values():
            await reader.wait_for_release()
        await self._values.close()
        await self.router.close()

    def _give_back(self, leases: Sequence[Lease]) -> None:
        for (lane, consumer, _), group in grouped(leases, owner_of):
            ids = [lease.entry.entry_id for lease in group]
            arguments: tuple[Argument, ...] = (keys.GROUP, consumer, keys.RELEASED, 0, *ids)
            words: tuple[Argument, ...] = (b"EVAL", _RELEASE.text, 1, keys.lane(lane), *arguments)
            try:
                self.router.send(keys.lane_slot(lane), pack(words), partial(self.doorbell.ring, lane))
            except BrokerUnavailable:
                logger.warning("entries could not be given back", extra={"count": len(ids)})

    async def _in_flight(self, lane: Lane) -> int:
        try:
            pending = await self.router.call(keys.lane_slot(lane), b"XPENDING", keys.lane(lane), keys.GROUP)
        except CommandRefused as error:
            if error.kind != "NOGROUP":
                raise
            return 0
        idle = (keys.RELEASED, keys.SUSPECTS)
        return sum(int(count) for consumer, count in pending[3] or () if consumer not in idle)

    async def _delay(self, lane: Lane, consumer: str, leases: Sequence[Lease], name: str) -> None:
        """Entries of asynchronous requests go first: they have records."""
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
            await self._script(lane, _DELAY, names, (consumer, name), [entry for entry, _ in part])

    async def _run_on_entries(
        self, lane: Lane, script: Script, arguments: Sequence[Argument], entries: Sequence[Entry]
    ) -> None:
        for part in (entries,) if len(entries) <= _MAX_IDS else _parts(entries):
            is_end = script in (_FINISH, _CANCEL)
            names = [keys.lane(lane), *(_payloads(part) if is_end else ())]
            if script is _CANCEL:
                names.insert(1, _moved(lane))
                names.append(keys.cancels(lane.model, lane.partition).encode())
            gone = await self._script(lane, script, names, arguments, part)
            if gone and is_end:
                self._values.delete_objects(gone)

    async def _script(
        self,
        lane: Lane,
        script: Script,
        names: Sequence[bytes],
        arguments: Sequence[Argument],
        entries: Sequence[Entry],
    ) -> Any:
        call = partial(self.router.call, keys.lane_slot(lane))
        ids = [entry.entry_id for entry in entries]
        try:
            return await run_script(call, script, names, keys.GROUP, *arguments, *ids)
        except CommandRefused as error:
            if error.kind != "NOGROUP":
                raise
            return None

    async def _ensure(self, lane: Lane) -> None:
        create = (b"XGROUP", b"CREATE", keys.lane(lane), keys.GROUP, b"0", b"MKSTREAM")
        try:
            await self.router.call(keys.lane_slot(lane), *create)
        except CommandRefused as error:
            if error.kind != "BUSYGROUP":
                raise

    def _ask_time(self) -> None:
        sent_s = self._monotonic_s()
        self._clock_timer = asyncio.get_running_loop().call_later(_CLOCK_EVERY_S, self._ask_time)
        try:
            self.router.send(0, _TIME, partial(self._observe, sent_s))
        except BrokerUnavailable:
            return

    def _observe(self, sent_s: float, reply: Any) -> None:
        if not isinstance(reply, QinferError):
            seconds, microseconds = reply
            self.clock.observe(int(seconds) + int(microseconds) / 1e6, sent_s, self._monotonic_s())


def _reading(lanes: Sequence[Lane]) -> tuple[str, int, int, str]:
    first = lanes[0]
    kind = "bulk" if first.name in BULK_LANES else SHADOW_LANE if first.name == SHADOW_LANE else _ONLINE
    return first.model, first.version, first.partition, kind


def _share(
    lane: Lane, number: int, entries: int, weight: int, tenants: Sequence[bytes] = (), waiting: int = 0
) -> Share:
    return Share(share_of(lane, number), entries, weight, tuple(sorted(name.decode() for name in tenants)), waiting)


def _moved(lane: Lane) -> bytes:
    return keys.moved(lane.model, lane.partition).encode()


def _payloads(entries: Sequence[Entry]) -> list[bytes]:
    return [
        keys.payload(entry.lane.model, entry.lane.partition, entry.payload_id).encode()
        for entry in entries
        if entry.payload_id
    ]


def _parts(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[start : start + _MAX_IDS] for start in range(0, len(items), _MAX_IDS))


async def _all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    if len(calls) == 1:
        await calls[0]
    else:
        await asyncio.gather(*calls)
