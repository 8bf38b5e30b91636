"""redis-py's own clients, for what is not once per request: set-up, control, and the renewal of leases.

They read the same URL as `wire`: one node, a cluster, or Sentinels that know where the primary is.
"""

from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from qinfer.queue.address import Sentinels, parse_place

if TYPE_CHECKING:  # the renewer of a worker's leases imports this module, and must stay small
    from qinfer.core.settings import RedisSettings

_LONGEST_ADMIN_BLOCK_S = 2.0


def admin_client(settings: "RedisSettings") -> "redis.asyncio.Redis | redis.asyncio.RedisCluster":
    """Returns a client for set-up and control: replies are bytes, blocking reads may last 2 s.

    Raises:
        SettingsError: The URL can't be read.
    """
    longest_s = settings.command_timeout_s + _LONGEST_ADMIN_BLOCK_S  # redis-py 8 would cut reads off after 5 s
    options = _options(settings, longest_s)
    url = settings.url.get_secret_value()
    place = parse_place(url)
    if isinstance(place, Sentinels):
        asked = redis.asyncio.sentinel.Sentinel(list(place.places), sentinel_kwargs=_for_sentinels(place, settings))  # type: ignore[no-untyped-call]
        return asked.master_for(place.service, redis_class=_AsyncPrimary, **options, **place.options)  # type: ignore[no-any-return]
    if settings.cluster:
        return redis.asyncio.RedisCluster.from_url(url, **options)
    return redis.asyncio.Redis.from_url(url, **options)


def blocking_client(settings: "RedisSettings") -> "redis.Redis | redis.RedisCluster":
    """Returns a client for a thread of its own.

    Raises:
        SettingsError: The URL can't be read.
    """
    options = _options(settings, settings.command_timeout_s)
    options["retry"] = Retry(NoBackoff(), 1)  # a pooled connection may have died since the last renewal
    url = settings.url.get_secret_value()
    place = parse_place(url)
    if isinstance(place, Sentinels):
        asked = redis.sentinel.Sentinel(list(place.places), sentinel_kwargs=_for_sentinels(place, settings))  # type: ignore[no-untyped-call]
        return asked.master_for(place.service, redis_class=_Primary, **options, **place.options)  # type: ignore[no-any-return, no-untyped-call]
    if settings.cluster:
        return redis.RedisCluster.from_url(url, **options)
    return redis.Redis.from_url(url, **options)


class _AsyncPrimary(redis.asyncio.Redis):
    """Closes its connections to the Sentinels too, which redis-py leaves open."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:  # noqa: FBT001 - redis-py's signature
        await super().aclose(close_connection_pool)
        for sentinel in self.connection_pool.sentinel_manager.sentinels:  # type: ignore[attr-defined]  # its pool has one
            await sentinel.aclose()


class _Primary(redis.Redis):
    """Closes its connections to the Sentinels too, which redis-py leaves open."""

    def close(self) -> None:
        super().close()
        for sentinel in self.connection_pool.sentinel_manager.sentinels:  # type: ignore[attr-defined]  # as above
            sentinel.close()


def _options(settings: "RedisSettings", timeout_s: float) -> dict[str, Any]:
    return {
        "protocol": 2,  # as `wire` speaks it
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": timeout_s,
    }


def _for_sentinels(place: Sentinels, settings: "RedisSettings") -> dict[str, Any]:
    """Returns how to talk to the Sentinels themselves: encrypted as the node is, with their own password."""
    encryption = {name: value for name, value in place.options.items() if name.startswith("ssl")}
    password = settings.sentinel_password.get_secret_value() or None
    return _options(settings, settings.connect_timeout_s / 2) | encryption | {"password": password}
