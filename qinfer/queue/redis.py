"""The queue on Redis Streams: one stream per lane, one consumer group, Lua where two steps must be one.

    submit ──▶ lane ──fetch──▶ lease ──▶ publish ──▶ finish          finish is the only terminal transition
                 ▲                │
                 └── release, reclaim (a dead owner's)

The promises, each a test in `tests/contract/`:

1. An entry whose `submit` was confirmed is fetched at least once, unless it is finished first.
2. Between two `fetch`es by different consumers an entry has one owner; `renew` keeps it, raises no delivery count, and
   never takes an entry back from a new owner.
3. `release` gives an entry to the `fetch` of any consumer within half a second, its delivery count as it was before.
4. `reclaim` takes entries whose owner has not renewed for the lease time, and marks them `suspect`.
5. `finish` removes an entry, delivered or not, whoever owns it; to finish it again is no error.
6. So `depth` is always waiting + in flight.
7. `publish` to a reply stream that no longer exists does not create it, and says so.
8. `listen` delivers what was published while the connection was down; consumers drop what they saw before.
9. `submit` with a limit enqueues nothing beyond it: so many entries wait in a lane, those in flight not counted.
10. `withdraw` removes an entry that waits, and leaves one alone that a consumer holds.
11. `delay` moves an entry to another lane of its partition in one step; when it was enqueued stays known.
12. `bury` moves an entry to the dead letters in one step, frame and payload, with why and how often it was tried.
13. `oldest` shows what has been in a lane for so long, and changes nothing.

Asynchronous requests, whose terminal step does more, are in `requests`; dead letters in `dead_letters`.

submit   XADD, in one write with the tick's others    fetch    fetch.lua, else a blocking XREADGROUP (`readers`)
renew    renew.lua, from its own thread               release, reclaim, finish, …    a script per lane (`redis_entries`)
publish  XADD NOMKSTREAM                              listen   `readers`

An entry is a stream entry with the field `f`, the frame, and where they apply `p`, the id of the request whose payload
is stored with it, and `o`, the id that the entry had in its first lane. Readers skip fields that they do not know.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Self

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from qinfer.core.clock import Clock, ServerClock, SystemClock
from qinfer.core.settings import LimitSettings, RedisSettings
from qinfer.errors import BrokerUnavailable, QinferError, QueueFull
from qinfer.labeling.tasks import LabelTasks
from qinfer.queue import keys, scripts
from qinfer.queue.base import BULK_LANES, Entry, Lane, LaneSize, Lease, Payload
from qinfer.queue.clients import blocking_client
from qinfer.queue.connection import Refused, Template, pack, packable
from qinfer.queue.dead_letters import DeadLetters
from qinfer.queue.deliveries import Deliveries
from qinfer.queue.durability import Durability
from qinfer.queue.readers import REPLY_TTL_MS, LaneReader, ReplyReader, leases_of
from qinfer.queue.redis_entries import RedisEntries, grouped, owner_of
from qinfer.queue.redis_submit import RedisSubmits
from qinfer.queue.requests import Requests
from qinfer.queue.router import Router
from qinfer.queue.values import Values
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

_CLOCK_EVERY_S = 5.0
_CONSUMER_GONE_MS = 3_600_000
_TIME = pack((b"TIME",))


class Delivery:
    """The queue, on Redis 6.2 or newer, single or cluster; made by `connect`.

    Lanes passed to one call must be of one model version and partition. Every coroutine raises `BrokerUnavailable` when
    Redis can't be reached in time.

    Attributes:
        clock: Redis' time, kept current.
        router: The way to Redis, for features with keys of their own.
        durability: Makes a write as durable as the settings ask.
        requests: Asynchronous requests in the same queue.
        dead_letters: What `bury` has put away.
        label_tasks: Tasks of labeling projects, whose requests are entries of this queue.
    """

    def __init__(self, settings: RedisSettings, router: Router, clock: Clock) -> None:
        self.clock = ServerClock(clock)
        self._monotonic_s = clock.monotonic_s
        self._settings = settings
        self.router = router
        self.durability = Durability(settings, router)
        self._values = Values(router, is_cluster=settings.cluster)
        self.requests = Requests(router, self._values, self.durability)
        self._submits = RedisSubmits(router, self._values)
        self._entries = RedisEntries(router, self._values)
        self.dead_letters = DeadLetters(router, self._values)
        self.deliveries = Deliveries(router)
        self.label_tasks = LabelTasks(router, self.durability, self.deliveries)
        self._readers: dict[tuple[str, int, int, bool], LaneReader] = {}
        self._clock_timer: asyncio.TimerHandle | None = None
        self._renewer: Any = None

    @classmethod
    async def connect(
        cls, settings: RedisSettings, limits: LimitSettings | None = None, *, clock: Clock | None = None
    ) -> Self:
        """Connects, takes the server's time, and tries the payload store if there is one.

        Args:
            settings: Where Redis is.
            limits: Where large payloads are; `None` = in Redis, and what is in a store can't be read.
            clock: This machine's.

        Raises:
            BrokerUnavailable: Redis can't be reached in `connect_timeout_s`.
            SettingsError: It refuses the credentials, is older than 6.2, is (no) cluster against the settings, may
                evict what is queued, or can't be as durable as the settings ask; or the payload store does not work.
        """
        delivery = cls(settings, await Router.connect(settings), clock or SystemClock())
        try:
            sent_s = delivery._monotonic_s()
            delivery._observe(sent_s, await delivery.router.call(0, b"TIME"))
            await delivery.durability.check()
            if limits is not None and limits.payload_url:
                from qinfer.queue.object_store import ObjectStore

                delivery._values.objects = await ObjectStore.open(limits, settings, delivery.clock.now_s)
        except BaseException:
            await delivery.close()
            raise
        delivery._ask_time()
        return delivery

    def submit(
        self,
        lane: Lane,
        frame: Bytes,
        done: Callable[[Entry | QinferError], None],
        *,
        payload: Payload | None = None,
        limit: int = 0,
    ) -> None:
        """Appends an entry; never blocks. All submits of one event-loop tick leave in one write.

        Args:
            lane: Where to.
            frame: The encoded request.
            done: Called once, on the event loop, with the entry, or with why it may not have been enqueued (it may: a
                caller that submits again must tell its answers apart by request id). `QueueFull` = it was not.
            payload: Tensors that do not travel in the frame; stored first, removed with the entry.
            limit: Refuse it when so many entries wait in the lane and its `.delayed` lane; 0 = no limit.

        Raises:
            BrokerUnavailable: At once, when the connection is down or its buffer full.
        """
        if limit or payload is not None:
            self._submits.add(lane, frame, done, payload, limit)
            return

        def answered(reply: Any) -> None:
            done(Entry(lane, reply.decode()) if type(reply) is bytes else reply)

        slot, adding = _adding(lane)
        self.router.send(slot, adding.pack(frame), answered)

    async def ensure(self, lanes: Sequence[Lane]) -> None:
        """Creates the lanes and their consumer group where they do not exist, starting at their first entry."""
        await asyncio.gather(*(self._ensure(lane) for lane in lanes))

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """Takes up to `count` entries, lanes in the order given; of each lane, released ones first.

        Waits up to `wait_s` seconds for the first when there is none, and then may return fewer than there are. Reads
        of one model version share a connection, those of its bulk lanes another one: call it for either one at a time.
        """
        if count <= 0:
            return []
        reader = self._readers.get(place := _reading(lanes))
        if reader is None:
            slot = keys.lane_slot(lanes[0])
            reader = LaneReader(self.router, slot, self.ensure, self._entries.give_back, self._monotonic_s)
            self._readers[place] = reader
        return await reader.fetch(lanes, consumer, count, wait_s)

    async def leave(self, lanes: Sequence[Lane]) -> None:
        """Frees what `fetch` keeps for these lanes, of which no fetch is under way; another may come later."""
        reader = self._readers.pop(_reading(lanes), None)
        if reader is not None:
            await reader.close()

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Renews leases; blocking, for a thread of its own, over a connection of its own.

        Returns:
            The leases that are lost: finished by another, or owned by another.

        Raises:
            BrokerUnavailable: Nothing is known; try again before the lease time ends.
        """
        lost: list[Lease] = []
        failure: Exception | None = None
        for (lane, consumer, _), group in grouped(leases, owner_of):
            try:
                lost.extend(self._renew(lane, consumer, group))
            except (RedisError, RedisClusterException, OSError) as error:
                failure = error  # of this lane's node: the others may be well
        if failure is not None and not lost:
            raise BrokerUnavailable("leases can't be renewed now; try again") from failure
        return lost

    async def reclaim(self, lanes: Sequence[Lane], consumer: str, idle_s: float, count: int) -> list[Lease]:
        """Takes up to `count` entries whose owner has not renewed them for `idle_s` seconds, as suspects.

        They may have been `consumer`'s own: its connection broke while a fetch's reply was on the way. A consumer that
        still holds one, because its renewals failed for so long, drops the second lease.
        """
        call = partial(self.router.call, keys.lane_slot(lanes[0]))
        names = [keys.lane(lane) for lane in lanes]
        arguments = (keys.GROUP, consumer, keys.RELEASED, count, int(idle_s * 1000), _CONSUMER_GONE_MS)
        try:
            found = await scripts.run(call, scripts.RECLAIM, names, *arguments)
        except Refused as error:
            if error.kind != "NOGROUP":
                raise
            return []  # a lane was deleted: there is nothing to reclaim; `fetch` creates it again
        return leases_of(lanes, consumer, found, suspect=True)

    async def release(self, leases: Sequence[Lease]) -> None:
        """Gives back entries that did not begin to execute; entries meanwhile owned by another stay theirs.

        Suspects stay suspects: `reclaim` returns them, at once, and `fetch` does not.
        """
        await self._entries.release(leases)

    async def withdraw(self, entries: Sequence[Entry]) -> list[bool]:
        """Removes those entries that wait, undelivered or released, with their payloads; tells which were removed."""
        return await self._entries.withdraw(entries)

    async def delay(self, leases: Sequence[Lease], name: str) -> None:
        """Moves leased entries to the end of the lane called `name` in their partition, as never delivered.

        They have new addresses then, which the records of asynchronous requests know and submitters do not: to `finish`
        the old one removes the payload, if any, and leaves the rest to the entry's deadline.
        """
        await self._entries.delay(leases, name)

    async def bury(self, lease: Lease, request_id: str, code: str, reason: str) -> bool:
        """Moves an entry to the dead letters; `request_id` is empty where the frame can't be decoded.

        Returns:
            False when the entry was gone or owned by another: nothing was done.
        """
        return await self._entries.bury(lease, request_id, code, reason)

    async def payload(self, entry: Entry, request_id: str) -> bytes | None:
        """Returns the payload stored with an entry; `None` when it is gone, as the entry is then."""
        lane = entry.lane
        return await self._values.get(keys.lane_slot(lane), keys.payload(lane.model, lane.partition, request_id))

    async def store_result(self, lane: Lane, request_id: str, blob: Bytes, ttl_s: float) -> None:
        """Stores outputs too large for a reply stream, for `take_result`."""
        key = keys.result(lane.model, lane.partition, request_id)
        await self._values.set(keys.lane_slot(lane), key, blob, ttl_s)

    async def take_result(self, lane: Lane, request_id: str) -> bytes | None:
        """Returns what `store_result` stored, and removes it once it has been read; `None` when it is gone.

        Raises:
            BrokerUnavailable: It can't be read now; it is still there.
        """
        return await self._values.take(keys.lane_slot(lane), keys.result(lane.model, lane.partition, request_id))

    async def finish(self, entries: Sequence[Entry]) -> None:
        """Removes entries from their lanes, with their payloads."""
        await self._entries.finish(entries)

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        """Appends encoded responses to a reply stream.

        Returns:
            False when that stream is gone: nobody waits for the responses.
        """
        slot, key = _reply_stream(reply_to)
        try:
            added = await self.router.call(slot, b"XADD", key, b"NOMKSTREAM", b"*", b"r", packable(blob))
        except QueueFull:  # full of what is to be answered: only answers make room
            call = partial(self.router.call, slot)
            added = await scripts.run(call, scripts.PUBLISH, [key], REPLY_TTL_MS, packable(blob))
        return added is not None

    async def listen(
        self, owner: str, deliver: Callable[[bytes], None], ready: Callable[[], None] | None = None
    ) -> None:
        """Reads the reply stream of `owner` until cancelled: creates it, calls `deliver` with each blob, trims it.

        Survives reconnects: reads again from the start, so that blobs may come twice.

        Args:
            owner: Whose replies; `reply_address(owner)` is where to send them.
            deliver: Called with each blob, on the event loop.
            ready: Called once the stream exists: no reply to what is submitted from then on is lost.
        """
        reader = ReplyReader(self.router, owner, deliver, self._monotonic_s)
        try:
            await reader.run(ready)
        finally:
            await reader.close()

    async def depth(self, lanes: Sequence[Lane]) -> list[int]:
        """Returns how many entries each lane holds, waiting and in flight."""
        return await asyncio.gather(  # type: ignore[no-any-return]  # XLEN replies with an integer
            *(self.router.call(keys.lane_slot(lane), b"XLEN", keys.lane(lane)) for lane in lanes)
        )

    async def in_flight(self, lanes: Sequence[Lane]) -> list[int]:
        """Returns how many entries of each lane a consumer holds; those given back or never taken wait instead."""
        return await asyncio.gather(*map(self._entries.in_flight, lanes))

    async def sizes(self, lanes: Sequence[Lane]) -> list[LaneSize]:
        """Returns how many entries each lane holds and how old its first is, of any models; in one round trip."""
        return await self._entries.sizes(lanes, self.clock.now_s())

    async def oldest(self, lane: Lane, age_s: float, count: int, after: str = "") -> list[tuple[Entry, bytes]]:
        """Returns up to `count` entries with their frames that came into a lane more than `age_s` ago, oldest first.

        Waiting or in flight; nothing about them changes.

        Args:
            lane: The lane.
            age_s: How old they are at least.
            count: How many at most.
            after: The `entry_id` to begin behind.
        """
        end = max(int((self.clock.now_s() - age_s) * 1000), 0)
        words = (b"XRANGE", keys.lane(lane), f"({after}" if after else b"-", end, b"COUNT", count)
        found = await self.router.call(keys.lane_slot(lane), *words)
        leases = leases_of([lane], "", [(1, entry_id, fields, 0) for entry_id, fields in found])
        return [(lease.entry, lease.frame) for lease in leases]

    async def sweep(self) -> int:
        """Deletes what processes that died left in an object store, once it has expired; a bounded number at a time.

        Several may do so at once.

        Returns:
            How many objects were deleted.
        """
        return await self._values.sweep()

    async def close(self) -> None:
        """Closes the connections; what was submitted and is unconfirmed fails with `BrokerUnavailable`."""
        if self._clock_timer is not None:
            self._clock_timer.cancel()
        await self._submits.close()
        for reader in self._readers.values():
            await reader.settle()
        await self._values.close()
        await self.router.close()
        if self._renewer is not None:
            self._renewer.close()

    def _renew(self, lane: Lane, consumer: str, leases: Sequence[Lease]) -> list[Lease]:
        """Renews leases of one lane; returns those that are lost."""
        if self._renewer is None:
            self._renewer = blocking_client(self._settings)
        by_id = {lease.entry.entry_id.encode(): lease for lease in leases}
        try:
            # EVAL with the text, each 3 s, spares the dance of NOSCRIPT
            gone = self._renewer.eval(scripts.RENEW.text, 1, keys.lane(lane), keys.GROUP, consumer, *by_id)
        except ResponseError as error:
            if "NOGROUP " not in str(error):  # in 6.2 somewhere in the text
                raise
            return list(leases)  # the lane was deleted
        return [by_id[entry_id] for entry_id in gone]

    async def _ensure(self, lane: Lane) -> None:
        create = (b"XGROUP", b"CREATE", keys.lane(lane), keys.GROUP, b"0", b"MKSTREAM")
        try:
            await self.router.call(keys.lane_slot(lane), *create)
        except Refused as error:
            if error.kind != "BUSYGROUP":
                raise

    def _ask_time(self) -> None:
        sent_s = self._monotonic_s()
        self._clock_timer = asyncio.get_running_loop().call_later(_CLOCK_EVERY_S, self._ask_time)
        try:
            self.router.send(0, _TIME, partial(self._observe, sent_s))
        except BrokerUnavailable:
            return  # the next reading will do

    def _observe(self, sent_s: float, reply: Any) -> None:
        if not isinstance(reply, QinferError):
            seconds, microseconds = reply
            self.clock.observe(int(seconds) + int(microseconds) / 1e6, sent_s, self._monotonic_s())


def _reading(lanes: Sequence[Lane]) -> tuple[str, int, int, bool]:
    """Returns what tells one reader of lanes from another."""
    first = lanes[0]
    return first.model, first.version, first.partition, first.name in BULK_LANES


@lru_cache(maxsize=1024)
def _reply_stream(reply_to: str) -> tuple[int, bytes]:
    """Returns the slot and the key of a reply stream."""
    key = keys.reply(reply_to).encode()
    return keys.slot(key), key


@lru_cache(maxsize=65536)  # one call per request
def _adding(lane: Lane) -> tuple[int, Template]:
    """Returns a lane's slot, and the command that adds a frame to it."""
    return keys.lane_slot(lane), Template(b"XADD", keys.lane(lane), b"*", b"f")
