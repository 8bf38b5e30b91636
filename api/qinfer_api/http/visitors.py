"""Refuses requests that a stranger's web page may have made a browser send.

A server without keys trusts every client, including a browser on its machine, which acts for any page: by a request
without preflight (the Fetch standard, "CORS-safelisted request"), or under a name that points at this machine (DNS
rebinding). So pages of other origins need CORS, and a server on loopback addresses accepts only its machine's names.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping

from qinfer.core.api_keys import is_loopback
from qinfer.core.settings import Settings
from qinfer.core.settings_sections import ANY
from qinfer_api.http.infer import Headers

_LOCAL_NAMES = frozenset(("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"))
_TELLING = frozenset((b"host", b":authority", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"))
_PLAIN = re.compile(rb"\r\n(?i:host): (?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?\r\n")
_PAGE = re.compile(rb"\r\n(?i:origin|sec-fetch-[a-z]+):")


class Visitors:
    """Judges requests by their headers; `None` allows all origins, or all hosts.

    Addresses are always allowed: a browser sends one only to that address.
    """

    def __init__(self, origins: Iterable[str] | None, hosts: Iterable[str] | None) -> None:
        self._origins = None if origins is None else frozenset(origins)
        self._hosts = None if hosts is None else frozenset(hosts)

    @classmethod
    def from_settings(cls, settings: Settings) -> "Visitors | None":
        """Returns the rules of the settings; `None` allows every request."""
        cors, named = settings.cors.allow_origins, settings.http.allow_hosts
        has_keys = settings.auth.mode == "keys"
        origins = None if has_keys or ANY in cors else cors
        is_checked = bool(named) or (not has_keys and _is_local(settings))
        hosts = (*map(str.lower, named), *_LOCAL_NAMES) if is_checked else None
        if ANY in named:
            hosts = None
        return None if origins is None and hosts is None else cls(origins, hosts)

    def is_plain(self, head: bytes) -> bool:
        """Returns whether no web page sent a raw head, and it names an allowed host."""
        return not _PAGE.search(head) and (self._hosts is None or _PLAIN.search(head) is not None)

    def problem(self, headers: Headers) -> str:
        """Returns a refusal's reason, or empty."""
        sent: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            if (low := name.lower()) in _TELLING:
                sent.setdefault(low, []).append(value)
        if not sent:
            return ""
        hosts = [text.decode("latin-1").lower() for text in (*sent.get(b"host", ()), *sent.get(b":authority", ()))]
        return self._of_hosts(hosts) or self._of_pages(sent, hosts)

    def _of_hosts(self, hosts: list[str]) -> str:
        if self._hosts is None:
            return ""
        strange = next((host for host in hosts if not self._is_ours(_name_of(host))), None)
        return "" if strange is None else f"'{strange[:200]}' is not a name of this server: QINFER_HTTP__ALLOW_HOSTS"

    def _is_ours(self, name: str) -> bool:
        assert self._hosts is not None
        return name in self._hosts or name.endswith(".localhost") or not name or _is_address(name)

    def _of_pages(self, sent: Mapping[bytes, list[bytes]], hosts: list[str]) -> str:
        if self._origins is None:
            return ""
        for each in sent.get(b"origin", ()):
            origin = each.decode("latin-1")
            own = origin.lower().partition("://")[2]
            if origin not in self._origins and not (own and own in hosts):
                return f"pages of '{origin[:200]}' may not call this server: QINFER_CORS__ALLOW_ORIGINS"
        is_read = b"origin" in sent
        if b"cross-site" in sent.get(b"sec-fetch-site", ()) and not is_read and not _is_visit(sent):
            return "pages of other sites may not call this server: QINFER_CORS__ALLOW_ORIGINS"
        return ""


def _is_visit(sent: Mapping[bytes, list[bytes]]) -> bool:
    return sent.get(b"sec-fetch-mode") == [b"navigate"] and sent.get(b"sec-fetch-dest") == [b"document"]


def _is_local(settings: Settings) -> bool:
    http, grpc, metrics = settings.http, settings.grpc, settings.metrics
    hosts = [http.host]
    if grpc.enabled:
        hosts.append(grpc.host or http.host)
    if metrics.enabled:
        hosts.append(metrics.host or http.host)
    return all(map(is_loopback, hosts))


def _name_of(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
