"""Addresses of Redis nodes: parsed `redis://`, `rediss://` or `unix://` URLs.

`redis+sentinel://` and `rediss+sentinel://` name Sentinels, which know the primary. redis-py parses the URL, so that
`Router` and redis-py's clients agree.
"""

import logging
import ssl
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

import msgspec
from redis.asyncio.connection import SSLConnection, parse_url

from qinfer.errors import SettingsError

logger = logging.getLogger(__name__)

_KNOWN = {"connection_class", "host", "port", "path", "username", "password", "db"}
SENTINEL_PORT = 26379

_SENTINEL = "+sentinel"
_UNREADABLE = "it can't be read; in a password write / as %2F, @ as %40, : as %3A, # as %23 and ? as %3F"
_FILES = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}
_TLS = _FILES | {"ssl_check_hostname", "ssl_cert_reqs"}


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
