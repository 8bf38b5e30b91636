"""The delivery port on Redis Streams: one stream per lane, one consumer group, Lua where two steps must be one.

submit   XADD, in one write with the tick's others    fetch    fetch.lua, else a blocking XREADGROUP (`lane_reader`)
renew    renew.lua, from its own thread               release, reclaim, finish    a script per lane
publish  XADD NOMKSTREAM                              listen   `replies`
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError
from redis.retry import Retry

from qinfer.clock import Clock, ServerClock, SystemClock
from qinfer.delivery import keys, scripts
from qinfer.delivery.base import Entry, Lane, Lease
from qinfer.delivery.connection import Argument, Refused, pack
from qinfer.delivery.lane_reader import LaneReader, leases_of
from qinfer.delivery.replies import ReplyReader
from qinfer.delivery.router import Router
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.settings import RedisSettings
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

_CLOCK_EVERY_S = 5.0
_CONSUMER_GONE_MS = 3_600_000
_LONGEST_ADMIN_BLOCK_S = 2.0
_MAX_IDS = 1000  # of one script call: Lua's stack holds about 8000 values
_TIME = pack((b"TIME",))


class RedisDelivery:
    """`Delivery` on Redis 6.2 or newer, single or cluster; made by `connect`."""

    def __init__(self, settings: RedisSettings, router: Router, clock: Clock) -> None:
        self.clock = ServerClock(clock)
        self._monotonic_s = clock.monotonic_s
        self._settings = settings
        self._router = router
        self._readers: dict[tuple[str, int, int], LaneReader] = {}
        self._clock_timer: asyncio.TimerHandle | None = None
        self._renewer: Any = None

    @classmethod
    async def connect(cls, settings: RedisSettings, *, clock: Clock | None = None) -> "RedisDelivery":
        """Connects, and takes the server's time.

        Raises:
            BrokerUnavailable: Redis can't be reached in `connect_timeout_s`.
            SettingsError: It refuses the credentials, is older than 6.2, or is (no) cluster against the settings.
        """
        delivery = cls(settings, await Router.connect(settings), clock or SystemClock())
        try:
            sent_s = delivery._monotonic_s()
            delivery._observe(sent_s, await delivery._router.call(0, b"TIME"))
            await delivery._check_policy()
        except BaseException:
            await delivery.close()
            raise
        delivery._ask_time()
        return delivery

    def submit(self, lane: Lane, frame: Bytes, done: Callable[[Entry | QinferError], None]) -> None:
        """See `Delivery.submit`."""

        def answered(reply: Any) -> None:
            done(Entry(lane, reply.decode()) if type(reply) is bytes else reply)

        packed = pack((b"XADD", keys.lane(lane), b"*", b"f", _packable(frame)))
        self._router.send(keys.lane_slot(lane), packed, answered)

    async def ensure(self, lanes: Sequence[Lane]) -> None:
        """See `Delivery.ensure`."""
        await asyncio.gather(*(self._ensure(lane) for lane in lanes))

    async def fetch(self, lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        """See `Delivery.fetch`."""
        if count <= 0:
            return []
        first = lanes[0]
        place = (first.model, first.version, first.partition)
        reader = self._readers.get(place)
        if reader is None:
            slot = keys.lane_slot(first)
            reader = LaneReader(self._router, slot, self.ensure, self._give_back, self._monotonic_s)
            self._readers[place] = reader
        return await reader.fetch(lanes, consumer, count, wait_s)

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """See `Delivery.renew`."""
        lost: list[Lease] = []
        failure: Exception | None = None
        for (lane, consumer), group in _grouped(leases, _owner):
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
        await _all(
            [
                self._run(lane, scripts.RELEASE, (consumer, keys.RELEASED), [lease.entry for lease in group])
                for (lane, consumer), group in _grouped(leases, _owner)
            ]
        )

    async def finish(self, entries: Sequence[Entry]) -> None:
        """See `Delivery.finish`."""
        groups = _grouped(entries, lambda entry: entry.lane)
        await _all([self._run(lane, scripts.FINISH, (), group) for lane, group in groups])

    async def publish(self, reply_to: str, blob: Bytes) -> bool:
        """See `Delivery.publish`."""
        key = keys.reply(reply_to).encode()
        added = await self._router.call(keys.slot(key), b"XADD", key, b"NOMKSTREAM", b"*", b"r", _packable(blob))
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

    async def close(self) -> None:
        """See `Delivery.close`."""
        if self._clock_timer is not None:
            self._clock_timer.cancel()
        for reader in self._readers.values():
            await reader.settle()
        await self._router.close()
        if self._renewer is not None:
            self._renewer.close()

    def _renew(self, lane: Lane, consumer: str, leases: Sequence[Lease]) -> list[Lease]:
        """Renews leases of one lane; returns those that are lost."""
        if self._renewer is None:
            self._renewer = _blocking_client(self._settings)
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

    async def _run(
        self, lane: Lane, script: scripts.Script, arguments: Sequence[Argument], entries: Sequence[Entry]
    ) -> None:
        """Runs a script on entries of one lane; does nothing where the lane was deleted."""
        call = partial(self._router.call, keys.lane_slot(lane))
        try:
            for start in range(0, len(entries), _MAX_IDS):
                ids = [entry.entry_id for entry in entries[start : start + _MAX_IDS]]
                await scripts.run(call, script, [keys.lane(lane)], keys.GROUP, *arguments, *ids)
        except Refused as error:
            if error.kind != "NOGROUP":
                raise

    def _give_back(self, leases: Sequence[Lease]) -> None:
        """Releases without waiting; what does not arrive is reclaimed when its lease ends."""
        for (lane, consumer), group in _grouped(leases, _owner):
            ids = [lease.entry.entry_id for lease in group]
            words: tuple[Argument, ...] = (
                b"EVAL",
                scripts.RELEASE.text,
                1,
                keys.lane(lane),
                keys.GROUP,
                consumer,
                keys.RELEASED,
                *ids,
            )
            try:
                self._router.send(keys.lane_slot(lane), pack(words), lambda _: None)
            except BrokerUnavailable:
                logger.warning("entries could not be given back", extra={"count": len(ids)})

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

    async def _check_policy(self) -> None:
        try:
            reply = await self._router.call(0, b"CONFIG", b"GET", b"maxmemory-policy")
        except QinferError:
            return  # managed services forbid CONFIG
        if reply and reply[1] != b"noeviction":
            logger.warning(
                "redis may evict queued requests; set maxmemory-policy noeviction", extra={"policy": reply[1].decode()}
            )


def admin_client(settings: RedisSettings) -> "redis.asyncio.Redis | redis.asyncio.RedisCluster":
    """Returns redis-py's own client, for set-up and control: replies are bytes, blocking reads may last 2 s."""
    options: dict[str, Any] = {
        "protocol": 2,  # as `wire` speaks it
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": settings.command_timeout_s
        + _LONGEST_ADMIN_BLOCK_S,  # redis-py 8 would cut reads off after 5 s
    }
    url = settings.url.get_secret_value()
    if settings.cluster:
        return redis.asyncio.RedisCluster.from_url(url, **options)
    return redis.asyncio.Redis.from_url(url, **options)


def _blocking_client(settings: RedisSettings) -> "redis.Redis | redis.RedisCluster":
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": settings.command_timeout_s,
        "retry": Retry(NoBackoff(), 1),  # a pooled connection may have died since the last renewal
    }
    url = settings.url.get_secret_value()
    if settings.cluster:
        return redis.RedisCluster.from_url(url, **options)
    return redis.Redis.from_url(url, **options)


async def _all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Awaits all; one, which is the common case, without a task of its own."""
    if len(calls) == 1:
        await calls[0]
    else:
        await asyncio.gather(*calls)


def _owner(lease: Lease) -> tuple[Lane, str]:
    return lease.entry.lane, lease.consumer


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> Iterable[tuple[K, list[T]]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups.items()


def _packable(data: Bytes) -> bytes | memoryview:
    return memoryview(data) if isinstance(data, bytearray) else data  # hiredis packs these two without a copy before
