"""The delivery port on Redis Streams: one stream per lane, one consumer group, Lua where two steps must be one.

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
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import BULK_LANES
from qinfer.labeling.tasks import LabelTasks
from qinfer.queue import keys, scripts
from qinfer.queue.base import Entry, Lane, LaneSize, Lease, Payload
from qinfer.queue.clients import blocking_client
from qinfer.queue.connection import Refused, Template, pack, packable
from qinfer.queue.dead_letters import DeadLetters
from qinfer.queue.deliveries import Deliveries
from qinfer.queue.durability import Durability
from qinfer.queue.readers import REPLY_TTL_MS, LaneReader, ReplyReader, leases_of
from qinfer.queue.redis_dead_letters import RedisDeadLetters
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


class RedisDelivery:
    """`Delivery` on Redis 6.2 or newer, single or cluster; made by `connect`."""

    def __init__(self, settings: RedisSettings, router: Router, clock: Clock) -> None:
        self.clock = ServerClock(clock)
        self._monotonic_s = clock.monotonic_s
        self._settings = settings
        self._router = router
        self._durability = Durability(settings, router)
        self._values = Values(router, is_cluster=settings.cluster)
        self.requests = Requests(router, self._values, self._durability)
        self._submits = RedisSubmits(router, self._values)
        self._entries = RedisEntries(router, self._values)
        self.dead_letters: DeadLetters = RedisDeadLetters(router, self._values)
        self.deliveries = Deliveries(router)
        self.jobs = Jobs(router, self._durability, self.clock)
        self.label_tasks = LabelTasks(router, self._durability, self.deliveries)
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
            delivery._observe(sent_s, await delivery._router.call(0, b"TIME"))
            await delivery._durability.check()
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
        """See `Delivery.submit`."""
        if limit or payload is not None:
            self._submits.add(lane, frame, done, payload, limit)
            return

        def answered(reply: Any) -> None:
            done(Entry(lane, reply.decode()) if type(reply) is bytes else reply)

        slot, adding = _adding(lane)
        self._router.send(slot, adding.pack(frame), answered)

    async def ensure(self, lanes: Sequence[Lane]) -> None:
        """See `Delivery.ensure`."""
        await asyncio.gather(*(self._ensure(lane) for lane in lanes))

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """See `Delivery.fetch`."""
        if count <= 0:
            return []
        reader = self._readers.get(place := _reading(lanes))
        if reader is None:
            slot = keys.lane_slot(lanes[0])
            reader = LaneReader(self._router, slot, self.ensure, self._entries.give_back, self._monotonic_s)
            self._readers[place] = reader
        return await reader.fetch(lanes, consumer, count, wait_s)

    async def leave(self, lanes: Sequence[Lane]) -> None:
        """See `Delivery.leave`."""
        reader = self._readers.pop(_reading(lanes), None)
        if reader is not None:
            await reader.close()

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """See `Delivery.renew`."""
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
        """See `Delivery.reclaim`."""
        call = partial(self._router.call, keys.lane_slot(lanes[0]))
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
        """See `Delivery.release`."""
        await self._entries.release(leases)

    async def withdraw(self, entries: Sequence[Entry]) -> list[bool]:
        """See `Delivery.withdraw`."""
        return await self._entries.withdraw(entries)

    async def delay(self, leases: Sequence[Lease], name: str) -> None:
        """See `Delivery.delay`."""
        await self._entries.delay(leases, name)

    async def bury(self, lease: Lease, request_id: str, code: str, reason: str) -> bool:
        """See `Delivery.bury`."""
        return await self._entries.bury(lease, request_id, code, reason)

    async def payload(self, entry: Entry, request_id: str) -> bytes | None:
        """See `Delivery.payload`."""
        lane = entry.lane
        return await self._values.get(keys.lane_slot(lane), keys.payload(lane.model, lane.partition, request_id))

    async def store_result(self, lane: Lane, request_id: str, blob: Bytes, ttl_s: float) -> None:
        """See `Delivery.store_result`."""
        key = keys.result(lane.model, lane.partition, request_id)
        await self._values.set(keys.lane_slot(lane), key, blob, ttl_s)

    async def take_result(self, lane: Lane, request_id: str) -> bytes | None:
        """See `Delivery.take_result`."""
        return await self._values.take(keys.lane_slot(lane), keys.result(lane.model, lane.partition, request_id))

    async def finish(self, entries: Sequence[Entry]) -> None:
        """See `Delivery.finish`."""
        await self._entries.finish(entries)

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        """See `Delivery.publish`."""
        slot, key = _reply_stream(reply_to)
        try:
            added = await self._router.call(slot, b"XADD", key, b"NOMKSTREAM", b"*", b"r", packable(blob))
        except QueueFull:  # full of what is to be answered: only answers make room
            call = partial(self._router.call, slot)
            added = await scripts.run(call, scripts.PUBLISH, [key], REPLY_TTL_MS, packable(blob))
        return added is not None

    async def listen(
        self, owner: str, deliver: Callable[[bytes], None], ready: Callable[[], None] | None = None
    ) -> None:
        """See `Delivery.listen`."""
        reader = ReplyReader(self._router, owner, deliver, self._monotonic_s)
        try:
            await reader.run(ready)
        finally:
            await reader.close()

    async def depth(self, lanes: Sequence[Lane]) -> list[int]:
        """See `Delivery.depth`."""
        return await asyncio.gather(  # type: ignore[no-any-return]  # XLEN replies with an integer
            *(self._router.call(keys.lane_slot(lane), b"XLEN", keys.lane(lane)) for lane in lanes)
        )

    async def in_flight(self, lanes: Sequence[Lane]) -> list[int]:
        """See `Delivery.in_flight`."""
        return await asyncio.gather(*map(self._entries.in_flight, lanes))

    async def sizes(self, lanes: Sequence[Lane]) -> list[LaneSize]:
        """See `Delivery.sizes`."""
        return await self._entries.sizes(lanes, self.clock.now_s())

    async def oldest(self, lane: Lane, age_s: float, count: int, after: str = "") -> list[tuple[Entry, bytes]]:
        """See `Delivery.oldest`."""
        end = max(int((self.clock.now_s() - age_s) * 1000), 0)
        words = (b"XRANGE", keys.lane(lane), f"({after}" if after else b"-", end, b"COUNT", count)
        found = await self._router.call(keys.lane_slot(lane), *words)
        leases = leases_of([lane], "", [(1, entry_id, fields, 0) for entry_id, fields in found])
        return [(lease.entry, lease.frame) for lease in leases]

    async def sweep(self) -> int:
        """See `Delivery.sweep`."""
        return await self._values.sweep()

    async def close(self) -> None:
        """See `Delivery.close`."""
        if self._clock_timer is not None:
            self._clock_timer.cancel()
        await self._submits.close()
        for reader in self._readers.values():
            await reader.settle()
        await self._values.close()
        await self._router.close()
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
            await self._router.call(keys.lane_slot(lane), *create)
        except Refused as error:
            if error.kind != "BUSYGROUP":
                raise

    def _ask_time(self) -> None:
        sent_s = self._monotonic_s()
        self._clock_timer = asyncio.get_running_loop().call_later(_CLOCK_EVERY_S, self._ask_time)
        try:
            self._router.send(0, _TIME, partial(self._observe, sent_s))
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
