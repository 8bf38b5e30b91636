"""Clients of redis-py, for set-up, control, and the renewal of leases; starts of programs while Redis is away."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import msgspec
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import BrokerUnavailable
from qinfer.queue.address import Sentinels, log_unreadable, parse_place

if TYPE_CHECKING:  # keeps a worker's renewer, which imports this module, small
    from qinfer.core.settings import RedisSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_ADMIN_BLOCK_S = 2.0


class Login(msgspec.Struct, array_like=True, frozen=True):
    """The part of `RedisSettings` for clients; URL and password are secret."""

    url: str
    sentinel_password: str
    cluster: bool
    connect_timeout_s: float
    command_timeout_s: float

    @classmethod
    def from_settings(cls, settings: "RedisSettings") -> Self:
        """Returns that part of the settings."""
        return cls(
            settings.url.get_secret_value(),
            settings.sentinel_password.get_secret_value(),
            settings.cluster,
            settings.connect_timeout_s,
            settings.command_timeout_s,
        )


def admin_client(settings: "RedisSettings") -> "redis.asyncio.Redis | redis.asyncio.RedisCluster":
    """Returns a client for set-up and control: replies are bytes, reads may block for 2 s."""
    longest_s = settings.command_timeout_s + _LONGEST_ADMIN_BLOCK_S  # redis-py 8 would cut reads off after 5 s
    client: redis.asyncio.Redis = _client(redis.asyncio, _AsyncPrimary, Login.from_settings(settings), longest_s)
    _have_files_read(client)
    return client


def blocking_client(login: Login) -> "redis.Redis | redis.RedisCluster":
    """Returns a client for a thread."""
    retry = Retry(NoBackoff(), 1)  # a pooled connection may have died since the last renewal
    client: redis.Redis = _client(redis, _Primary, login, login.command_timeout_s, retry=retry)
    return client


class _ReadsFiles:
    """Reads TLS files at each connect of an asynchronous client, not only at the first."""

    last: ClassVar[ssl.SSLContext | None] = None

    async def connect(self) -> None:
        connection, kind = cast(Any, self), type(self)
        if not connection.is_connected:
            files = connection.ssl_context
            files.context = None
            try:
                kind.last = await asyncio.to_thread(files.get)
            except OSError as error:
                if kind.last is None:
                    reason = error.strerror or str(error)
                    raise redis.ConnectionError(f"a TLS file of Redis can't be read: {reason}") from None
                files.context = kind.last
                log_unreadable(error)
        await super().connect()  # type: ignore[misc]  # that of the class that it is mixed into


def _have_files_read(client: Any) -> None:
    if isinstance(client, redis.asyncio.RedisCluster):
        client.connection_kwargs["connection_class"] = _reading(client.connection_kwargs["connection_class"])
        places: list[Any] = list(client.nodes_manager.startup_nodes.values())
    else:
        asked = getattr(client.connection_pool, "sentinel_manager", None)
        places = [client.connection_pool, *(one.connection_pool for one in (asked.sentinels if asked else ()))]
    for place in places:
        place.connection_class = _reading(place.connection_class)


def _reading(kind: type) -> type:
    return type(kind.__name__, (_ReadsFiles, kind), {}) if issubclass(kind, redis.asyncio.SSLConnection) else kind


class _AsyncPrimary(redis.asyncio.Redis):
    """A client that also closes its connections to the Sentinels, which redis-py leaves open."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:  # noqa: FBT001 - redis-py's signature
        await super().aclose(close_connection_pool)
        for sentinel in self.connection_pool.sentinel_manager.sentinels:  # type: ignore[attr-defined]  # its pool has one
            await sentinel.aclose()


class _Primary(redis.Redis):
    def close(self) -> None:
        super().close()
        for sentinel in self.connection_pool.sentinel_manager.sentinels:  # type: ignore[attr-defined]  # as above
            sentinel.close()


def _client(clients: Any, primary: type, login: Login, timeout_s: float, **more: Any) -> Any:
    options = _options(login, timeout_s) | more
    place = parse_place(login.url)
    if isinstance(place, Sentinels):
        # Connections to Sentinels are encrypted like those to the node, but have a password of their own.
        encryption = {name: value for name, value in place.options.items() if name.startswith("ssl")}
        theirs = (
            _options(login, login.connect_timeout_s / 2) | encryption | {"password": login.sentinel_password or None}
        )
        asked = clients.sentinel.Sentinel(list(place.places), sentinel_kwargs=theirs)
        return asked.master_for(place.service, redis_class=primary, **options, **place.options)
    return (clients.RedisCluster if login.cluster else clients.Redis).from_url(login.url, **options)


def _options(login: Login, timeout_s: float) -> dict[str, Any]:
    return {
        "protocol": 2,  # as `RedisConnection` speaks it
        "socket_connect_timeout": login.connect_timeout_s,
        "socket_timeout": timeout_s,
    }


async def wait_for_redis(work: Callable[[], Awaitable[T]], stop: asyncio.Event | None = None) -> T:
    """Repeats a step of a start while Redis is away; logs so once a minute."""
    stop = stop or asyncio.Event()
    outage = OutageLog(logger, "start waits for redis", "redis is there: start goes on", remind_s=REMIND_S)
    backoff = Backoff(longest_s=1.0, jitter=0.5)
    while True:
        try:
            done = await work()
        except BrokerUnavailable as error:
            outage.failed(error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await stop.wait()
            if stop.is_set():
                raise
            continue
        outage.over()
        return done
