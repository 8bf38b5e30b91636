"""Allowed targets of webhooks: listed hosts, and private addresses only if a setting allows them.

A target is checked when a request names it and again at each delivery, because names can change.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import qinfer
from qinfer.core.settings import WebhookSettings
from qinfer.errors import InvalidRequest, SettingsError, Unreachable

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_URL_CHARACTERS = 2048

_PORTS = {"https": 443, "http": 80}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_RESOLVE_TIMEOUT_S = 5.0
_resolver = ThreadPoolExecutor(4, "webhook-names")  # a look-up may hang


class TargetTexts(NamedTuple):
    """Terms of error texts: the target, its refusal, and the settings that would allow it."""

    name: str
    refused: str
    allow: str
    private: str


OF_WEBHOOKS = TargetTexts(
    "webhook", "webhooks may not go to", "QINFER_WEBHOOKS__ALLOW", "QINFER_WEBHOOKS__ALLOW_PRIVATE"
)


class WebhookTarget(NamedTuple):
    """A checked URL, and its IP address."""

    url: "httpx.URL"
    host: str
    address: str

    def stream(
        self,
        client: "httpx.AsyncClient",
        method: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        content: bytes | None = None,
    ) -> "AbstractAsyncContextManager[httpx.Response]":
        """Sends a request to the checked address."""
        named = {**headers, "host": self.url.netloc.decode("ascii")}
        at, sni = self.url.copy_with(host=self.address), {"sni_hostname": self.host}
        return client.stream(method, at, content=content, headers=named, extensions=sni)


def open_client(timeout_s: float, headers: Mapping[str, str]) -> "httpx.AsyncClient":
    """Returns a client for `WebhookTarget.stream`, which resolves no name and follows no redirect."""
    import httpx

    return httpx.AsyncClient(
        timeout=timeout_s,
        trust_env=False,  # a proxy would resolve again
        follow_redirects=False,
        limits=httpx.Limits(max_keepalive_connections=0),  # hosts at one address must not share connections
        headers={"user-agent": f"qinfer/{qinfer.__version__}", **headers},
    )


class _AllowedHost(NamedTuple):
    """An entry of the allow-list; port 0 = the scheme's default."""

    host: str
    port: int

    def matches(self, url: "httpx.URL", host: str) -> bool:
        port = url.port or _PORTS[url.scheme]
        if port != (self.port or _PORTS[url.scheme]):
            return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:]) and len(host) > len(self.host) - 1
        return host == self.host


class Targets:
    """Checks URLs; `words` adapts the error texts."""

    def __init__(
        self, settings: WebhookSettings, resolve: Resolve | None = None, words: TargetTexts = OF_WEBHOOKS
    ) -> None:
        self._words = words
        self._allowed = [_parse(entry, words) for entry in settings.allow]
        self._allow_private = settings.allow_private
        self._resolve = resolve or _resolve

    async def check(self, url: str) -> WebhookTarget:
        """Checks a URL and resolves its host."""
        words = self._words
        parsed = _parsed(url, words.name)
        host = parsed.raw_host.decode("ascii").lower()
        if not any(entry.matches(parsed, host) for entry in self._allowed):
            raise InvalidRequest(
                f"{words.refused} '{parsed.netloc.decode('ascii')}'; {words.allow} lists the allowed hosts"
            )
        addresses = await self._addresses(host, parsed.port or _PORTS[parsed.scheme])
        for address in addresses:
            if not (self._allow_private or is_public(address)):
                raise InvalidRequest(
                    f"{words.name} host '{host}' leads into a private network; {words.private} allows such hosts"
                )
        return WebhookTarget(parsed, host, addresses[0])

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        with suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                addresses = await self._resolve(host, port)
        except UnicodeError:
            raise InvalidRequest(f"{self._words.name} host '{host}' is not a valid host name; check it") from None
        except (OSError, TimeoutError):
            addresses = []
        if not addresses:
            raise Unreachable(f"{self._words.name} host '{host}' can't be resolved now; check its name, or try again")
        return addresses


def is_public(address: str) -> bool:
    """Returns whether an address, or its inner IPv4 one, is public."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _parsed(url: str, name: str) -> "httpx.URL":
    """Parses a URL; errors do not repeat it, because it may hold a secret."""
    if len(url) > MAX_URL_CHARACTERS or not (url.isascii() and url.isprintable()):
        raise InvalidRequest(f"a {name} URL has at most {MAX_URL_CHARACTERS} printable ASCII characters")
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"the {name} URL is not a URL: {error}") from None
    if parsed.scheme not in _PORTS or not parsed.raw_host:
        raise InvalidRequest(f"a {name} URL begins with https:// or http:// and names a host")
    if parsed.userinfo:
        raise InvalidRequest(f"a {name} URL must have no user name and no password; leave them out")
    if parsed.fragment:
        raise InvalidRequest(f"a {name} URL has no fragment (#…); leave it out")
    return parsed


def _parse(entry: str, words: TargetTexts) -> _AllowedHost:
    """Parses `example.org`, `*.example.org`, `host:port` or `[::1]:port`."""
    host, port = entry.strip().lower(), "0"
    name, colon, digits = host.rpartition(":")
    if colon and digits.isdecimal() and (":" not in name or name.endswith("]")):
        host, port = name, digits
    host = host.removeprefix("[").removesuffix("]")
    wrong = not host or any(c in host for c in "/@ ") or "*" in host.removeprefix("*.") or int(port) > 65535
    if wrong:
        raise SettingsError(f"{words.allow}: '{entry}' is not a host; write example.org, *.example.org or host:port")
    return _AllowedHost(host, int(port))


async def _resolve(host: str, port: int) -> Sequence[str]:
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolver, lookup)
    return [str(entry[4][0]) for entry in found]
