"""Where a Redis node is and how to greet it: the parsed form of a `redis://`, `rediss://` or `unix://` URL.

redis-py's own parser reads the URL, so that `wire` and the admin client understand the same one.
"""

import ssl
from typing import Any, NoReturn

import msgspec
from redis.asyncio.connection import SSLConnection, parse_url

from qinfer.errors import SettingsError

_KNOWN = {"connection_class", "host", "port", "path", "username", "password", "db"}
_TLS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs"}


class Address(msgspec.Struct, frozen=True):
    """One node.

    Attributes:
        host: Its name or IP; unused with `path`.
        port: Its TCP port.
        path: Its unix socket; empty for TCP.
        db: The database number.
        username: The ACL user; empty for `default`.
        password: Empty when there is none.
        tls: How to encrypt; `None` in the clear.
    """

    host: str = "127.0.0.1"
    port: int = 6379
    path: str = ""
    db: int = 0
    username: str = ""
    password: str = ""
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        """Names the place without the credentials; for logs."""
        return self.path or f"{self.host}:{self.port}"

    __str__ = __repr__

    def at(self, host: str, port: int) -> "Address":
        """Returns another node of the same cluster, greeted alike."""
        return msgspec.structs.replace(self, host=host, port=port)


def parse(url: str) -> Address:
    """Reads a Redis URL.

    Raises:
        SettingsError: It is none, or has an option that is not known.
    """
    try:
        fields: dict[str, Any] = dict(parse_url(url))
    except ValueError as error:
        _refuse(str(error))
    encrypted = fields.pop("connection_class", None) is SSLConnection
    unknown = fields.keys() - _KNOWN - (_TLS if encrypted else set())
    if unknown:
        _refuse(f"unknown option {', '.join(sorted(unknown))}")
    return Address(
        host=fields.get("host", "127.0.0.1"),
        port=fields.get("port", 6379),
        path=fields.get("path", ""),
        db=fields.get("db", 0),
        username=fields.get("username", ""),
        password=fields.get("password", ""),
        tls=_context(fields) if encrypted else None,
    )


def _context(fields: dict[str, Any]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=fields.get("ssl_ca_certs"))
        if "ssl_certfile" in fields:
            context.load_cert_chain(fields["ssl_certfile"], fields.get("ssl_keyfile"))
    except OSError as error:  # ssl.SSLError is one
        _refuse(f"a TLS file can't be read: {error}")
    context.check_hostname = fields.get("ssl_check_hostname", True)
    if fields.get("ssl_cert_reqs", "required") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _refuse(problem: str) -> NoReturn:
    raise SettingsError(
        f"QINFER_REDIS__URL: {problem}; expected redis://[user:password@]host[:port][/db], rediss://… or unix://path[?db=n]"
    ) from None
