"""Clients of redis-py, and the addresses in their URLs, for set-up, control, and the renewal of leases.

`redis://`, `rediss://` or `unix://` name a node; `redis+sentinel://` and `rediss+sentinel://` name Sentinels, which
know the primary. redis-py parses the URL, so that `Router` and redis-py's clients agree.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar, cast
from urllib.parse import SplitResult, urlsplit

import msgspec
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.connection import SSLConnection, parse_url
from redis.backoff import NoBackoff
from redis.retry import Retry

from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import BrokerUnavailable, SettingsError

if TYPE_CHECKING:  # keeps a worker's renewer, which imports this module, small
    from qinfer.core.settings import RedisSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_ADMIN_BLOCK_S = 2.0

_KNOWN = {"connection_class", "host", "port", "path", "username", "password", "db"}
SENTINEL_PORT = 26379

_SENTINEL = "+sentinel"
_UNREADABLE = "it can't be read; in a password write / as %2F, @ as %40, : as %3A, # as %23 and ? as %3F"
_FILES = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
_TLS = _FILES | {"ssl_check_hostname", "ssl_cert_reqs"}


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


class NodeAddress(msgspec.Struct, frozen=True):
    """One node: TCP, or a unix socket if `path` is set."""

    host: str = "127.0.0.1"
    port: int = 6379
    path: str = ""
    db: int = 0
    username: str = ""
    password: str = ""
    tls: "Tls | None" = None

    def __repr__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    __str__ = __repr__

    @property
    def label(self) -> str:
        """The name without the path."""
        return "socket" if self.path else f"{self.host}:{self.port}"

    def at(self, host: str, port: int) -> "NodeAddress":
        """Returns another node of the cluster."""
        return msgspec.structs.replace(self, host=host, port=port)


class Sentinels(msgspec.Struct, frozen=True):
    """Sentinels, and the service whose primary they know; `options` has the credentials in redis-py's names."""

    places: tuple[tuple[str, int], ...]
    service: str
    node: NodeAddress
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.service} of {', '.join(f'{host}:{port}' for host, port in self.places)}"

    __str__ = __repr__

    @property
    def label(self) -> str:
        """The service's name."""
        return self.service


def parse_place(url: str) -> NodeAddress | Sentinels:
    """Reads a URL of a node or Sentinels."""
    parts = _split(url)
    return _sentinels(parts) if parts.scheme.endswith(_SENTINEL) else parse(url)


def parse(url: str) -> NodeAddress:
    """Reads a Redis URL; raises `SettingsError`."""
    return _address(_fields(url))


def _split(url: str) -> SplitResult:
    """Refuses a URL in which part of a password would be parsed, and shown, as something else."""
    try:
        parts = urlsplit(url)
    except ValueError:
        _refuse(_UNREADABLE)
    if "@" in parts.query or parts.fragment or ("@" in parts.path and parts.scheme != "unix"):
        _refuse(_UNREADABLE)
    return parts


def _sentinels(parts: SplitResult) -> Sentinels:
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        _refuse("the Sentinels' service has no name")
    try:
        named = [urlsplit(f"//{host}") for host in hosts.split(",")]
        places = tuple((place.hostname or "", place.port or SENTINEL_PORT) for place in named)
    except ValueError:
        _refuse("a Sentinel's host or port can't be read")
    if not all(host for host, _ in places):
        _refuse("a Sentinel's host is empty")
    if db and not db.isdecimal():
        _refuse("the database is not a number")
    scheme, query = parts.scheme.removesuffix(_SENTINEL), f"?{parts.query}" if parts.query else ""
    fields = _fields(f"{scheme}://{credentials}{'@' if credentials else ''}sentinel/{db}{query}")
    node = _address(fields)
    options = {name: value for name, value in fields.items() if name not in {"connection_class", "host", "port"}}
    return Sentinels(places, service, node, options | ({"ssl": True} if node.tls else {}))


def _fields(url: str) -> dict[str, Any]:
    _split(url)
    try:
        fields: dict[str, Any] = dict(parse_url(url))
    # The error quotes the supposed port, perhaps half of a password.
    except ValueError:
        _refuse(_UNREADABLE)
    encrypted = fields.get("connection_class") is SSLConnection
    unknown = fields.keys() - _KNOWN - (_TLS if encrypted else set())
    if unknown:
        _refuse(f"unknown option {', '.join(sorted(unknown))}")
    return fields


def _address(fields: dict[str, Any]) -> NodeAddress:
    return NodeAddress(
        host=fields.get("host", "127.0.0.1"),
        port=fields.get("port", 6379),
        path=fields.get("path", ""),
        db=fields.get("db", 0),
        username=fields.get("username", ""),
        password=fields.get("password", ""),
        tls=_tls(fields) if fields.get("connection_class") is SSLConnection else None,
    )


class Tls:
    """The encryption of connections; its files are read again for each connection."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._has_files = not fields.keys().isdisjoint(_FILES)
        self._context = _context(fields)

    def context(self) -> ssl.SSLContext:
        """Returns a new context, or the last one after an ERROR in the log."""
        if self._has_files:
            try:
                self._context = _context(self._fields)
            except OSError as error:
                log_unreadable(error)
        return self._context


def log_unreadable(error: OSError) -> None:
    """Logs an unreadable TLS file."""
    reason = error.strerror or str(error)
    logger.error("a TLS file of Redis can't be read; the previous one is used", extra={"reason": reason})


def _tls(fields: dict[str, Any]) -> Tls:
    try:
        return Tls(fields)
    except OSError as error:  # ssl.SSLError is one
        _refuse(f"a TLS file can't be read: {error}")


def _context(fields: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=fields.get("ssl_ca_certs"))
    if "ssl_certfile" in fields:
        context.load_cert_chain(fields["ssl_certfile"], fields.get("ssl_keyfile"))
    context.check_hostname = fields.get("ssl_check_hostname", True)
    if fields.get("ssl_cert_reqs", "required") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _refuse(problem: str) -> NoReturn:
    raise SettingsError(
        f"QINFER_REDIS__URL: {problem}; expected redis://[user:password@]host[:port][/db], rediss://…, "
        "unix://path[?db=n], or redis+sentinel://[user:password@]host[:port],host…/service[/db]"
    ) from None
