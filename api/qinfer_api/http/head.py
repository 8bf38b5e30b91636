"""Heads of requests: what they say, which infer requests take the fast path, and which a web page may not send."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import msgspec

from qinfer.core.api_keys import is_local, is_loopback
from qinfer.core.settings import Settings
from qinfer.core.settings_sections import ANY
from qinfer.errors import InvalidRequest
from qinfer.observe.tracing import context_text
from qinfer_api.auth import ANONYMOUS, CallerContext, presented_key
from qinfer_api.http.infer import (
    TIMEOUT_HEADER,
    Encoding,
    Headers,
    UrlTarget,
    forwarded,
    parse_version,
    read_seconds,
    response_encoding,
    wants_strict,
)

MAX_FAST_BYTES = 256 * 1024
"""Larger bodies are decoded off the event loop, unless all but `MAX_JSON_BYTES` of them are binary."""

MAX_BINARY_BYTES = 8 * 2**20
"""Larger binary bodies are, too, unless they are received in pieces: a copy would hold the loop up for milliseconds."""

MAX_JSON_BYTES = 64 * 1024

MAX_PLAIN_BYTES = 32 * 1024
"""Larger bodies of plain JSON are decoded off the event loop."""

_MAX_DIGITS = 9

_MEANINGS = {
    b"content-length": "length",
    b"inference-header-content-length": "json",
    b"traceparent": "traceparent",
    b"tracestate": "tracestate",
    b"content-encoding": "coding",
    b"accept-encoding": "accept",
    b"accept": "types",
    b"request-timeout": "timeout",
    b"authorization": "authorization",
    b"x-api-key": "x-api-key",
    b"endpoint-load-metrics-format": "load",
    b"transfer-encoding": "special",
    b"expect": "special",
    b"prefer": "special",
    b"upgrade": "special",
}
_MAX_URL_BYTES = 1024
_PLAIN_JSON = b"/models/"
_NO_HEADERS: Mapping[str, str] = {}


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """The parts of a head that the fast path needs; `json_length` is unchecked, and `is_plain` = plain JSON."""

    target: UrlTarget
    length: int
    json_length: str | None
    context: CallerContext
    encoding: Encoding | None
    forwarded: Mapping[str, str] = _NO_HEADERS
    sent: bytes | Headers = b""
    strict: bool = False
    timeout_s: float | None = None
    is_plain: bool = False

    def headers(self) -> Headers:
        """Returns all headers."""
        return _ANY_LINE.findall(self.sent) if isinstance(self.sent, bytes) else self.sent

    def origin(self) -> bytes:
        """Returns the `Origin` header; empty unless there is exactly one."""
        return _only(_ORIGIN.findall(self.sent)) if isinstance(self.sent, bytes) else origin_in(self.sent)

    def header(self, name: str) -> str | None:
        """Returns the first value of a lower-case name."""
        wanted = name.encode()
        return next((value.decode("latin-1") for each, value in self.headers() if each.lower() == wanted), None)


def parse_target(url: bytes) -> UrlTarget | None:
    """Parses a URL of infer or of plain JSON; `None` = the route handles it."""
    return _parse_target(url) if len(url) <= _MAX_URL_BYTES else None


@lru_cache(maxsize=1024)
def _parse_target(url: bytes) -> UrlTarget | None:
    parts = url.split(b"/")
    if len(parts) == 3 and parts[:2] == [b"", b"models"]:
        parts = [b"", b"v2", b"models", parts[2], b"infer"]
    if len(parts) not in (5, 7) or parts[:3] != [b"", b"v2", b"models"] or parts[-1] != b"infer" or not parts[3]:
        return None
    if b"%" in url or b"?" in url or b"#" in url or not url.isascii():
        return None
    if len(parts) == 5:
        return UrlTarget(parts[3].decode(), 0)
    try:
        return UrlTarget(parts[3].decode(), parse_version(parts[5].decode())) if parts[4] == b"versions" else None
    except InvalidRequest:
        return None


def read_head(
    url: bytes,
    headers: Headers,
    max_bytes: int = MAX_FAST_BYTES,
    forward: re.Pattern[str] | None = None,
    most_binary_bytes: int = 0,
) -> RequestHead | None:
    """Returns a POST's head for the fast path; `most_binary_bytes` limits a body of binary tensors and little JSON."""
    target = parse_target(url)
    if target is None:
        return None
    found: dict[str, bytes] = {}
    for name, value in headers:
        meaning = _MEANINGS.get(name.lower())
        if meaning is not None:
            if meaning in found:
                return None
            found[meaning] = value
    is_plain = url.startswith(_PLAIN_JSON)
    is_special = "special" in found or (is_plain and ("json" in found or "load" in found))
    if is_special or found.get("coding", b"").strip().lower() not in (b"", b"identity"):
        return None
    length = int(found.get("length", b"-1"))
    json_length = found["json"].decode("latin-1") if "json" in found else None
    if json_bytes(json_length) is not None:
        max_bytes = max(max_bytes, most_binary_bytes)
    if not 0 <= length <= max_bytes:
        return None
    trace = _trace(found.get("traceparent"), found.get("tracestate"))
    context = _caller(trace, found.get("authorization"), found.get("x-api-key"))
    encoding = _accepted(found["accept"]) if "accept" in found and not is_plain else None
    forwarding = _NO_HEADERS if forward is None else forwarded(forward, headers)
    try:
        strict, timeout_s = _wishes(found.get("types"), found.get("timeout"))
    except InvalidRequest:
        return None  # the route refuses it
    return RequestHead(target, length, json_length, context, encoding, forwarding, headers, strict, timeout_s, is_plain)


@lru_cache(maxsize=64)
def json_bytes(json_length: str | None) -> int | None:
    """Returns the bytes of JSON before binary tensors, of which there are few; `None` = another body."""
    if json_length is None or not json_length.isdecimal() or len(json_length) > _MAX_DIGITS:
        return None
    count = int(json_length)
    return count if 0 < count <= MAX_JSON_BYTES else None


def origin_in(headers: Headers) -> bytes:
    """Returns the `Origin` header; empty unless there is exactly one."""
    return _only([value for name, value in headers if name.lower() == b"origin"])


def _only(values: list[bytes]) -> bytes:
    return values[0] if len(values) == 1 else b""


def _caller(trace: str, authorization: bytes | None, key: bytes | None) -> CallerContext:
    if authorization is None and key is None:
        return CallerContext("", trace) if trace else ANONYMOUS
    return CallerContext("", trace, presented_key(_decode_header(authorization), _decode_header(key)))


def _trace(parent: bytes | None, state: bytes | None) -> str:
    return "" if parent is None else context_text(_decode_header(parent), _decode_header(state))


def _decode_header(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1")


@lru_cache(maxsize=256)
def _accepted(header: bytes) -> Encoding | None:
    return response_encoding(header.decode("latin-1"))


def _wishes(accept: bytes | None, timeout: bytes | None) -> tuple[bool, float | None]:
    timeout_s = None if timeout is None else read_seconds(TIMEOUT_HEADER, timeout.decode("latin-1"))
    return accept is not None and wants_strict(accept.decode("latin-1")), timeout_s


def transfer_codings(headers: Headers) -> list[bytes]:
    """Returns the lower-case transfer codings, as applied."""
    sent = [value for name, value in headers if name.lower() == b"transfer-encoding"]
    return [coding.strip().lower() for coding in b",".join(sent).split(b",")] if sent else []


_END_OF_HEAD = b"\r\n\r\n"
_MAX_HEAD_BYTES = 4096
_MAX_KNOWN = 1024


def _once(group: int, meaning: str, value: bytes) -> bytes:
    (name,) = (name for name, known in _MEANINGS.items() if known == meaning)
    return rb"(?i:%b): (?(%d)(?!))(%b)\r\n" % (name, group, value)


_NAME = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"  # RFC 9110 §5.6.2
_VALUE = rb"[!-~](?:[ -~]*[!-~])?"
_OTHERS = rb"(?!(?i:%b|connection|proxy-connection):)%b: [ -~]*+\r\n" % (b"|".join(_MEANINGS), _NAME)
_LINES = (  # the most frequent first
    _once(2, "length", rb"[0-9]{1,9}"),
    _once(3, "traceparent", rb"[!-~]++"),
    _OTHERS,
    _once(4, "json", _VALUE),
    _once(5, "accept", _VALUE),
    _once(6, "authorization", _VALUE),
    _once(7, "x-api-key", _VALUE),
    _once(8, "tracestate", _VALUE),
    _once(9, "types", _VALUE),
    _once(10, "timeout", _VALUE),
    rb"(?i:connection: keep-alive)\r\n",
)
_PLAIN_HEAD = re.compile(rb"POST ((?:/v2)?/models/[/.:@_~0-9A-Za-z-]++) HTTP/1\.1\r\n(?:%b)*+\r\n" % b"|".join(_LINES))
"""Every parser reads these alike; matching takes linear time."""

_ORIGIN = re.compile(rb"\r\n(?i:origin): *+((?:%b)?)" % _VALUE)
_ANY_LINE = re.compile(rb"\r\n(%b): *+((?:%b)?)" % (_NAME, _VALUE))


_LOCAL_NAMES = frozenset(("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"))
_TELLING = frozenset((b"host", b":authority", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"))
_PLAIN = re.compile(rb"\r\n(?i:host): (?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?\r\n")
_PAGE = re.compile(rb"\r\n(?i:origin|sec-fetch-[a-z]+):")


class Visitors:
    """Refuses requests that a stranger's web page may have made a browser send.

    A server without keys trusts every client, including a browser on its machine, which acts for any page: by a request
    without preflight (the Fetch standard, "CORS-safelisted request"), or under a name that points at this machine (DNS
    rebinding). So pages of other origins need CORS, and a server on loopback addresses accepts only its machine's
    names; addresses are always allowed, because a browser sends one only to that address. `None` allows all origins, or
    all hosts.
    """

    def __init__(self, origins: Iterable[str] | None, hosts: Iterable[str] | None) -> None:
        self._origins = None if origins is None else frozenset(origins)
        self._hosts = None if hosts is None else frozenset(hosts)

    @classmethod
    def from_settings(cls, settings: Settings, own_host: str = "") -> "Visitors | None":
        """Returns the rules of the settings, for the address `own_host` alone if given; `None` allows every request."""
        cors, named = () if own_host else settings.cors.allow_origins, settings.http.allow_hosts
        has_keys = settings.auth.mode == "keys"
        origins = None if has_keys or ANY in cors else cors
        is_near = is_loopback(own_host) if own_host else is_local(settings)
        is_checked = bool(named) or (not has_keys and is_near)
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


class HeadReader:
    """Reads small requests that arrive in one packet, without the connection's parser.

    A regular expression reads the head, because proxies vary ids, traces and lengths. Other clients repeat heads, so
    the last one of each packet length is cached. A negative `max_bytes` switches the fast path off. `takes_plain` says
    whether plain JSON for a model is read here.
    """

    def __init__(
        self,
        max_bytes: int = MAX_FAST_BYTES,
        forward: re.Pattern[str] | None = None,
        visitors: Visitors | None = None,
        most_binary_bytes: int = 0,
        takes_plain: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._max_bytes = max_bytes
        self._takes_plain = takes_plain
        self._most_binary_bytes = most_binary_bytes
        self._forward = forward
        self._visitors = visitors
        self._known: list[tuple[bytes, int, RequestHead] | None] = [None] * _MAX_KNOWN  # head, packet length
        self._begun: tuple[bytes, RequestHead] | None = None

    def read(self, url: bytes, headers: Headers) -> RequestHead | None:
        """Calls `read_head` for a parsed POST."""
        head = read_head(url, headers, self._max_bytes, self._forward, self._most_binary_bytes)
        return head if head is not None and self._takes(head) else None

    def find(self, packet: bytes) -> tuple[RequestHead, bytes] | None:
        """Splits a packet that is one plain request."""
        size = len(packet)
        known = self._known[size % _MAX_KNOWN]
        if known is not None and known[1] == size and packet.startswith(known[0]):
            return (known[2], packet[len(known[0]) :]) if self._takes(known[2]) else None
        is_head_alone = packet.endswith(_END_OF_HEAD)
        match = None if is_head_alone else _PLAIN_HEAD.match(packet, 0, _MAX_HEAD_BYTES)
        if match is None or (length := size - match.end()) > self._max_bytes:
            return None
        head = self._read_match(match, length)
        if head is None or not self._takes(head):
            return None
        if not head.context.trace:
            self._known[size % _MAX_KNOWN] = packet[: match.end()], size, head
        return head, packet[match.end() :]

    def begin(self, packet: bytes) -> tuple[RequestHead, bytes] | None:
        """Splits a packet that is the beginning of a plain request with a large binary body."""
        known = self._begun
        if known is not None and packet.startswith(known[0]) and len(packet) - len(known[0]) < known[1].length:
            return known[1], packet[len(known[0]) :]
        match = _PLAIN_HEAD.match(packet, 0, _MAX_HEAD_BYTES)
        if match is None or match[2] is None:
            return None
        length, body = int(match[2]), packet[match.end() :]
        head = self._read_match(match, length) if len(body) < length <= self._most_binary_bytes else None
        if head is None or json_bytes(head.json_length) is None:
            return None
        if not head.context.trace:
            self._begun = packet[: match.end()], head
        return head, body

    def _takes(self, head: RequestHead) -> bool:
        """A model is looked up each time, because a decoupled one, whose responses stream, may replace another."""
        return not head.is_plain or (head.length <= MAX_PLAIN_BYTES and self._takes_plain(head.target.model))

    def _read_match(self, match: re.Match[bytes], body_bytes: int) -> RequestHead | None:
        url, length, trace, json_length, accept, authorization, key, state, types, timeout = match.groups()
        target, sent = parse_target(url), match[0]
        is_plain = url.startswith(_PLAIN_JSON)
        if target is None or length is None or body_bytes != int(length) or (is_plain and json_length is not None):
            return None
        try:
            strict, timeout_s = _wishes(types, timeout)
        except InvalidRequest:
            return None
        if self._visitors is not None and not self._visitors.is_plain(sent):
            return None
        return RequestHead(
            target,
            body_bytes,
            None if json_length is None else json_length.decode(),
            _caller(_trace(trace, state), authorization, key),
            None if accept is None or is_plain else _accepted(accept),
            _NO_HEADERS if self._forward is None else forwarded(self._forward, _ANY_LINE.findall(sent)),
            sent,
            strict,
            timeout_s,
            is_plain,
        )
