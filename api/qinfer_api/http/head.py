"""Heads of infer requests: which requests can take the fast path, and which of their heads came before.

Nothing here waits, and nothing here refuses: a head that is not plain is left to the parser and the route.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from qinfer.errors import InvalidRequest
from qinfer_api.auth import ANONYMOUS, Context, caller_of
from qinfer_api.http.infer import Encoding, Headers, Target, forwarded, parse_version, response_encoding

MAX_FAST_BYTES = 256 * 1024
"""Larger bodies take the route, which decodes them off the event loop."""

_INTERESTING = {  # what the fast path reads of a request's headers; all others mean nothing to an infer request
    b"content-length": "length",
    b"inference-header-content-length": "json",
    b"traceparent": "traceparent",
    b"content-encoding": "coding",
    b"accept-encoding": "accept",
    b"authorization": "authorization",
    b"x-api-key": "x-api-key",
    b"transfer-encoding": "special",
    b"expect": "special",
    b"prefer": "special",
    b"upgrade": "special",
}
_MAX_URL_BYTES = 1024
_NO_HEADERS: Mapping[str, str] = {}


class Head(NamedTuple):
    """The parts of a request's head that the fast path needs; `json_length` is the header's text, unchecked."""

    target: Target
    length: int
    json_length: str | None
    context: Context
    encoding: Encoding | None
    forwarded: Mapping[str, str] = _NO_HEADERS


def parse_target(url: bytes) -> Target | None:
    """Reads an infer URL; `None` if it is none, or one that the route has to look at (escapes, query, bad version)."""
    return _parse_target(url) if len(url) <= _MAX_URL_BYTES else None


@lru_cache(maxsize=1024)
def _parse_target(url: bytes) -> Target | None:
    parts = url.split(b"/")
    if len(parts) not in (5, 7) or parts[:3] != [b"", b"v2", b"models"] or parts[-1] != b"infer" or not parts[3]:
        return None
    if b"%" in url or b"?" in url or b"#" in url or not url.isascii():
        return None
    if len(parts) == 5:
        return Target(parts[3].decode(), 0)
    try:
        return Target(parts[3].decode(), parse_version(parts[5].decode())) if parts[4] == b"versions" else None
    except InvalidRequest:
        return None


def read_head(
    url: bytes, headers: Headers, max_bytes: int = MAX_FAST_BYTES, forward: re.Pattern[str] | None = None
) -> Head | None:
    """Decides whether a POST can take the fast path; `None` if it can't.

    Args:
        url: The URL as it was sent.
        headers: All headers.
        max_bytes: The largest body that may take it.
        forward: The names of the headers that become parameters of the request.
    """
    target = parse_target(url)
    if target is None:
        return None
    found: dict[str, bytes] = {}
    for name, value in headers:
        meaning = _INTERESTING.get(name.lower())
        if meaning is not None:
            if meaning in found:
                return None  # sent twice: the route knows which one counts
            found[meaning] = value
    if "special" in found or found.get("coding", b"").strip().lower() not in (b"", b"identity"):
        return None
    length = int(found.get("length", b"-1"))  # the parser has checked it
    if not 0 <= length <= max_bytes:
        return None
    json_length = found["json"].decode("latin-1") if "json" in found else None
    context = ANONYMOUS
    if "traceparent" in found or "authorization" in found or "x-api-key" in found:
        context = caller_of({meaning: value.decode("latin-1") for meaning, value in found.items()}.get)
    encoding = _accepted(found["accept"]) if "accept" in found else None
    forwarding = _NO_HEADERS if forward is None else forwarded(forward, headers)
    return Head(target, length, json_length, context, encoding, forwarding)


@lru_cache(maxsize=256)
def _accepted(header: bytes) -> Encoding | None:
    return response_encoding(header.decode("latin-1"))


def transfer_codings(headers: Headers) -> list[bytes]:
    """Returns the transfer codings of a request in lower case, in the order in which they were applied."""
    sent = [value for name, value in headers if name.lower() == b"transfer-encoding"]
    return [coding.strip().lower() for coding in b",".join(sent).split(b",")] if sent else []


_END_OF_HEAD = b"\r\n\r\n"
_MAX_CACHED = 1024
_MAX_CACHED_BYTES = 4096


class HeadCache:
    """Caches request heads by their bytes, as the parser read them: clients mostly send the same head again and again.

    Head and body that arrive in one packet, as small requests do, then need no parsing: equal bytes mean the same.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}
        self._last: tuple[bytes, int, Head] | None = None  # the head found last, and the length of its packets

    def find(self, packet: bytes) -> tuple[Head, bytes] | None:
        """Splits a packet that is exactly one request whose head is cached; `None` for any other."""
        if self._last is not None:
            begin, length, head = self._last
            if len(packet) == length and packet.startswith(begin):
                return head, packet[len(begin) :]
        end = packet.find(_END_OF_HEAD) + 4
        begin = packet[:end]
        found = self._heads.get(begin)
        if found is None or len(packet) - end != found.length:
            return None
        self._last = begin, len(packet), found
        return found, packet[end:]

    def learn(self, packet: bytes, head: Head) -> None:
        """Remembers the head of a packet in which the parser found exactly one request, and that by its end.

        One with an API key may be: equal bytes are an equal key. One that is traced comes once only.
        """
        end = packet.find(_END_OF_HEAD) + 4
        if end <= _MAX_CACHED_BYTES and len(packet) - end == head.length and not head.context.trace:
            if len(self._heads) >= _MAX_CACHED:
                self._heads.clear()
            self._heads[packet[:end]] = head
