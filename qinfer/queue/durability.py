"""Durability of accepted requests: checks of Redis' settings, and waits behind writes.

`everysec` relies on the append-only file alone. `always` and `min_replicas` may need a wait behind each write, which
blocks its connection and covers only that connection's server. Such writes have connections of their own, and a wait
counts only if the connection lived until its reply. Writes that end during a wait share the next one (group commit).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.queue import keys
from qinfer.queue.connection import CommandRefused, Link, RedisConnection, pack
from qinfer.queue.router import BlockingLink, Call, Router

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MARKER_TTL_MS = 60_000
_IN_DOUBT = "the request may have been accepted, but {}; repeat it with the same id"


class Durability:
    """Makes writes as safe as the settings ask."""

    def __init__(self, settings: RedisSettings, router: Router) -> None:
        self._settings = settings
        self._router = router
        self._waits = _waits(settings, needs_sync=settings.durability == "always")
        self._lines: dict[int, _NodeWrites] = {}

    async def check(self) -> None:
        """Checks every node, and decides which waits writes need; call it first."""
        needs_sync = False
        for link in self._router.nodes():
            needs_sync |= await _inspect(link, self._settings)
        self._waits = _waits(self._settings, needs_sync=needs_sync)

    async def write(self, model: str, partition: int, operation: Callable[[Call], Awaitable[T]]) -> T:
        """Runs `operation` on a connection to the partition's node; returns once the write is safe.

        `operation` sends only through its `call`, and must be idempotent: it runs again if the slot moved, and callers
        repeat it with the same id after `BrokerUnavailable`.
        """
        slot = keys.slot(keys.confirm(model, partition))
        if not self._waits:
            return await operation(partial(self._router.call, slot))
        place = slot if self._settings.cluster else 0
        line = self._lines.get(place)
        if line is None:
            block_s = len(self._waits) * self._settings.command_timeout_s
            link = self._router.blocking(slot, "qinfer-accept", block_s)
            line = self._lines[place] = _NodeWrites(link, keys.confirm(model, partition), self._waits)
        return await line.write(operation)


async def _inspect(link: Link, settings: RedisSettings) -> bool:
    policy = await _config(link, b"maxmemory-policy")
    if policy not in {None, "noeviction"}:
        raise SettingsError(
            f"Redis may evict queued requests (maxmemory-policy {policy}): run CONFIG SET maxmemory-policy noeviction, "
            "and put it into redis.conf"
        )
    appendonly, appendfsync = await _config(link, b"appendonly"), await _config(link, b"appendfsync")
    if policy is None or appendonly is None or appendfsync is None:
        logger.warning("redis forbids CONFIG GET: its eviction and durability settings are not checked")
    if settings.durability == "everysec":
        _warn_of_loss(appendonly, appendfsync)
        return False
    return await _must_wait(link, appendonly, appendfsync)


async def _must_wait(link: Link, appendonly: str | None, appendfsync: str | None) -> bool:
    if appendonly == "no":
        raise SettingsError(f"QINFER_REDIS__DURABILITY=always: Redis keeps no append-only file; {_REMEDY}")
    if appendfsync == "no":  # and a wait would never end
        raise SettingsError(f"QINFER_REDIS__DURABILITY=always: Redis never syncs its append-only file; {_REMEDY}")
    if appendfsync == "always":
        if await _config(link, b"no-appendfsync-on-rewrite") == "yes":
            raise SettingsError(
                "QINFER_REDIS__DURABILITY=always: Redis does not sync its append-only file while it rewrites it; "
                "set no-appendfsync-on-rewrite no in redis.conf"
            )
        return False
    if await _knows_waitaof(link):
        return True
    if appendfsync is None:
        return False  # unknown; a warning was logged
    raise SettingsError(
        f"QINFER_REDIS__DURABILITY=always: Redis has appendfsync {appendfsync} and no WAITAOF; {_REMEDY}"
    )


_REMEDY = "set appendonly yes and appendfsync always in redis.conf, or QINFER_REDIS__DURABILITY=everysec"


def _warn_of_loss(appendonly: str | None, appendfsync: str | None) -> None:
    if appendonly == "no":
        logger.warning("redis keeps no append-only file: a restart loses queued requests; set appendonly yes")
    elif appendfsync == "no":
        logger.warning("redis never syncs its file: power loss costs about 30 s of requests; set appendfsync everysec")


async def _config(link: Link, name: bytes) -> str | None:
    try:
        reply = await link.call(b"CONFIG", b"GET", name)
    except (CommandRefused, SettingsError):  # unknown if renamed, NOPERM if forbidden
        return None
    return reply[1].decode() if reply else None


async def _knows_waitaof(link: Link) -> bool:
    try:
        await link.call(b"WAITAOF", 1, 0, 1)  # replies at once on a connection that wrote nothing
    except CommandRefused as error:
        if "appendonly is disabled" in error.message:
            raise SettingsError(f"QINFER_REDIS__DURABILITY=always: {error.message}; {_REMEDY}") from None
        return False
    except SettingsError:
        return False
    return True


class _Wait(NamedTuple):
    packed: bytes
    shortfall: Callable[[Any], str]


def _waits(settings: RedisSettings, *, needs_sync: bool) -> list[_Wait]:
    timeout_ms = int(settings.command_timeout_s * 1000)
    waits = []
    if wanted := settings.min_replicas:

        def too_few(reply: Any) -> str:
            return "" if reply >= wanted else f"only {reply} of {wanted} replicas have it"

        waits.append(_Wait(pack((b"WAIT", wanted, timeout_ms)), too_few))
    if needs_sync:
        unsynced = "it is not on disk yet"
        waits.append(_Wait(pack((b"WAITAOF", 1, 0, timeout_ms)), lambda reply: "" if reply[0] >= 1 else unsynced))
    return waits


class _NodeWrites:
    """The confirmed writes to one node, over a connection of their own.

    The `marker` is written before the waits: a repeated accept writes nothing, though its first attempt may not be
    safe.
    """

    def __init__(self, link: BlockingLink, marker: str, waits: Sequence[_Wait]) -> None:
        self._link = link
        self._mark = pack((b"SET", marker, b"", b"PX", _MARKER_TTL_MS))
        self._waits = waits
        self._rounds: _Rounds | None = None

    async def write(self, operation: Callable[[Call], Awaitable[T]]) -> T:
        connection, result = await self._link.run(operation)
        if self._rounds is None or self._rounds.connection is not connection:
            self._rounds = _Rounds(connection, self._mark, self._waits)
        await self._rounds.join()
        return result


class _Rounds:
    """A round confirms what was written before it was sent."""

    def __init__(self, connection: RedisConnection, mark: bytes, waits: Sequence[_Wait]) -> None:
        self.connection = connection
        self._mark = mark
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[str] | None = None
        self._is_waiting = False

    async def join(self) -> None:
        if self._next is None:
            self._next = self._loop.create_future()
            if not self._is_waiting:
                self._loop.call_soon(self._start_round)  # covers all writes answered in this tick
        problem = await asyncio.shield(self._next)
        if problem:
            raise BrokerUnavailable(_IN_DOUBT.format(problem))

    def _start_round(self) -> None:
        current, self._next = self._next, None
        if current is None:
            return
        self._is_waiting = True
        replies: list[Any] = []

        def collect(reply: Any) -> None:
            replies.append(reply)
            if len(replies) > len(self._waits):
                self._finish_round(current, replies)

        try:
            self.connection.send(self._mark, collect)
            for wait in self._waits:
                self.connection.send(wait.packed, collect)
        except BrokerUnavailable as error:
            self._finish_round(current, [error])

    def _finish_round(self, current: "asyncio.Future[str]", replies: Sequence[Any]) -> None:
        self._is_waiting = False
        if not current.done():
            current.set_result(_problem(replies, self._waits))
        if self._next is not None:
            self._start_round()


def _problem(replies: Sequence[Any], waits: Sequence[_Wait]) -> str:
    for reply in replies:
        if isinstance(reply, QinferError):
            return reply.message.removesuffix("; try again")
    return next((text for wait, reply in zip(waits, replies[1:], strict=True) if (text := wait.shortfall(reply))), "")
