"""Heads that are read without the parser: only those that every parser reads alike, and as it does."""

import re
from typing import Any

import httptools
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qinfer_api.http import head as heads
from qinfer_api.http.head import HeadReader, RequestHead, read_head
from qinfer_api.http.infer import UrlTarget

TRACE = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LENGTH = b"Content-Length: 4"


def packet(*lines: bytes, first: bytes = b"POST /v2/models/m/infer HTTP/1.1", body: bytes = b"body") -> bytes:
    return b"".join(line + b"\r\n" for line in (first, *lines)) + b"\r\n" + body


class _Parsed:
    """What the connection's parser reads of a packet."""

    def __init__(self, whole: bytes, forward: re.Pattern[str] | None) -> None:
        self.url, self.body, self.headers, self.ended = b"", b"", [], 0
        self._forward = forward
        self._parser = httptools.HttpRequestParser(self)
        self.is_http = True
        try:
            self._parser.feed_data(whole)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.is_http = False

    headers: list[tuple[bytes, bytes]]

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ended += 1

    def result(self) -> tuple[RequestHead, bytes] | None:
        if not self.is_http or self.ended != 1 or self._parser.get_method() != b"POST":
            return None
        if self._parser.get_http_version() != "1.1" or not self._parser.should_keep_alive():
            return None
        head = read_head(self.url, self.headers, forward=self._forward)
        return None if head is None else (head, self.body)


def comparable(found: tuple[RequestHead, bytes] | None) -> tuple[RequestHead, bytes, bytes] | None:
    """Returns a head with its headers one by one, in whichever form it has them, its origin, and the body.

    Spaces behind a value are no part of it (RFC 9110 §5.5); httptools leaves them there.
    """
    if found is None:
        return None
    head, body = found
    headers = [(name, value.rstrip()) for name, value in head.headers()]
    return msgspec.structs.replace(head, sent=headers), head.origin().rstrip(), body


_NAMES = st.sampled_from(
    [
        *(*heads._MEANINGS, b"connection", b"Proxy-Connection", b"x-request-id", b"X-Tenant", b"Host", b"content"),
        *(b"Origin", b"origin", b"te st"),
    ]
)
_VALUES = st.sampled_from(
    (
        *(b"4", b"004", b"+4", b"4 ", b" 4", b"", b"a b", b" a ", b"a\tb", b"\x00", b"\xe9", b"a\rb", b"a\nb: c"),
        *(b"gzip", b"identity", b"chunked", b"keep-alive", b"Keep-Alive", b"keep-alive, close", b"close", b"h2c"),
        *(TRACE, b"Bearer k"),
    )
)
_LINES = st.builds(
    lambda name, colon, value: name + colon + value,
    _NAMES,
    st.sampled_from([b": ", b": ", b": ", b":", b" : "]),
    _VALUES,
)
_PLAIN = b"POST /v2/models/m/infer HTTP/1.1"
_FIRST = st.sampled_from(
    [_PLAIN] * 5
    + [
        b"GET /v2/models/m/infer HTTP/1.1",
        b"POST /v2/models/m/infer HTTP/1.0",
        b"POST /v2/models/m/versions/3/infer HTTP/1.1",
    ]
    + [b"POST  /v2/models/m/infer HTTP/1.1", b"POST /v2/models/m/infer?a HTTP/1.1", b"post /v2/models/m/infer HTTP/1.1"]
)


@given(
    first=_FIRST,
    lines=st.lists(_LINES, max_size=5),
    has_length=st.booleans(),
    body=st.sampled_from([b"body", b"bod", b"bodybody", b"\r\n\r\n"]),
    forward=st.sampled_from([None, re.compile("x-.*|accept.*", re.IGNORECASE)]),
)
@example(first=_PLAIN, lines=[b"x-request-id: 4 "], has_length=True, body=b"body", forward=None)
@example(first=_PLAIN, lines=[b"Origin: 4 "], has_length=True, body=b"body", forward=None)
def test_what_is_read_is_what_the_parser_reads(
    *, first: bytes, lines: list[bytes], has_length: bool, body: bytes, forward: re.Pattern[str] | None
) -> None:
    """A first time, and remembered; what is not read is left to the parser."""
    whole = packet(*lines, *([LENGTH] if has_length else []), first=first, body=body)
    reader = HeadReader(forward=forward)

    for _ in range(2):
        found = reader.find(whole)
        assert found is None or comparable(found) == comparable(_Parsed(whole, forward).result())


@pytest.mark.parametrize(
    "lines",
    [
        [LENGTH],
        [b"Host: h", b"content-length: 4", b"Connection: Keep-Alive", b"x-request-id: 1"],
        [LENGTH, b"traceparent: " + TRACE],
        [LENGTH, b"traceparent: " + TRACE, b"tracestate: vendor=1, other=2"],
        [LENGTH, b"tracestate: vendor=1"],
        [LENGTH, b"Authorization: Bearer abc", b"X-API-Key: k"],
        [LENGTH, b"Accept-Encoding: gzip, deflate", b"Inference-Header-Content-Length: 2", b"Empty: "],
    ],
)
def test_plain_heads_need_no_parser(lines: list[bytes]) -> None:
    """Whatever of it was there before."""
    reader, whole = HeadReader(), packet(*lines)

    found = [reader.find(whole), reader.find(whole), reader.find(whole.replace(b"body", b"else"))]

    expected = _Parsed(whole, None).result()
    assert expected is not None
    assert [*map(comparable, found)] == [*map(comparable, [expected, expected, (expected[0], b"else")])]


def test_ids_traces_and_lengths_may_differ() -> None:
    """Each request has its own, and of traces none is kept."""
    reader = HeadReader()
    for number in range(1, 50):
        ids = [b"x-request-id: %d" % number, b"traceparent: %055d" % number, b"Content-Length: %d" % number]

        found = reader.find(packet(*ids, body=bytes(number)))

        assert found is not None
        assert (found[0].target, found[0].length) == (UrlTarget("m", 0), number)
        assert found[0].context.trace == f"{number:055d}"
    assert not any(reader._known)


def test_only_whole_single_requests_are_taken() -> None:
    """Less than one, and more than one, are the parser's: first seen, or with a head that is known."""
    for reader in (HeadReader(), known := HeadReader()):
        if reader is known:
            assert reader.find(packet(LENGTH)) is not None
        whole = packet(LENGTH)

        assert reader.find(whole[:-1]) is None
        assert reader.find(whole + whole) is None
        assert reader.find(whole[:-4]) is None
        assert reader.find(b"\r\n" + whole) is None


@pytest.mark.parametrize(
    "lines",
    [
        [LENGTH, b"Connection: close"],
        [LENGTH, b"content-length: 4"],
        [LENGTH, b"Transfer-Encoding: chunked"],
        [LENGTH, b"Expect: 100-continue"],
        [LENGTH, b"Name:value"],
        [LENGTH, b" folded: a"],
        [LENGTH, b"Name : value"],
        [LENGTH, b"Name: a\tb"],
        [LENGTH, b"traceparent: " + TRACE, b"Traceparent: " + TRACE],
        [LENGTH, b"Big: " + b"a" * 4096],
        [],
    ],
)
def test_other_heads_are_left_to_the_parser(lines: list[bytes]) -> None:
    """Those that end a connection or have a body of another kind, and all that one parser may read otherwise."""
    assert HeadReader().find(packet(*lines)) is None


@pytest.mark.parametrize(("limit", "is_taken"), [(4, True), (3, False), (-1, False)])
def test_a_body_above_the_limit_is_left_to_the_route(limit: int, is_taken: bool) -> None:  # noqa: FBT001
    """None takes the fast path where it is off."""
    assert (HeadReader(limit).find(packet(LENGTH)) is not None) is is_taken


@pytest.mark.parametrize(
    ("lines", "origin"),
    [
        ([b"Origin: https://a"], b"https://a"),
        ([b"origin: https://a", b"Origin: https://b"], b""),
        ([b"X-Origin: https://a"], b""),
    ],
)
def test_one_origin_is_read(lines: list[bytes], origin: bytes) -> None:
    """In a first head and in a remembered one."""
    reader, whole = HeadReader(), packet(LENGTH, *lines)

    found = [reader.find(whole), reader.find(whole)]

    assert [each and each[0].origin() for each in found] == [origin, origin]


def test_an_equal_head_has_an_equal_key() -> None:
    """And another key is another head."""
    reader = HeadReader()
    whole = packet(LENGTH, b"Authorization: Bearer abc")

    keys = [reader.find(each) for each in (whole, whole, whole.replace(b"abc", b"abd"), whole)]

    assert [found and found[0].context.key for found in keys] == ["abc", "abc", "abd", "abc"]


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head for each length of packets, of so many."""
    monkeypatch.setattr(heads, "_MAX_KNOWN", 3)
    reader = HeadReader()
    for number in range(20):
        whole = packet(LENGTH, b"Name: " + b"a" * number)
        found: Any = [reader.find(whole), reader.find(whole)]

        assert found[0] == found[1] is not None

    assert len(reader._known) == 3


def test_a_hostile_head_takes_linear_time() -> None:
    """Spaces and lines that nearly match cost one look each: else this would take hours."""
    for value in (b"a" + b" " * 3900, b" " * 3900, b"a " * 1950):
        assert HeadReader().find(packet(LENGTH, b"Accept-Encoding: " + value + b"\x01")) is None
    assert HeadReader().find(packet(*[b"a: b"] * 600, b"\x01")) is None


@pytest.mark.parametrize(
    ("path", "lines", "size", "is_fast"),
    [
        (b"/models/m", b"accept-encoding: gzip\r\n", 2, True),
        (b"/models/m", b"", 32 * 1024, True),
        (b"/models/m", b"", 32 * 1024 + 1, False),
        (b"/models/other", b"", 2, False),
        (b"/models/m", b"inference-header-content-length: 1\r\n", 2, False),
        (b"/models/m", b"endpoint-load-metrics-format: text\r\n", 2, False),
        (b"/v2/models/m", b"", 2, False),
    ],
)
def test_plain_json_is_read_for_models_that_are_taken(path: bytes, lines: bytes, size: int, *, is_fast: bool) -> None:
    whole = b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n%b\r\n%b" % (path, size, lines, b" " * size)
    headers = [tuple(line.split(b": ")) for line in (b"content-length: %d\r\n" % size + lines).split(b"\r\n")[:-1]]
    reader = HeadReader(takes_plain=lambda model: model == "m")

    found = [reader.find(whole), reader.find(whole)]
    parsed = reader.read(path, headers)  # type: ignore[arg-type]

    assert [each is not None and each[0].is_plain for each in found] == [is_fast, is_fast]
    assert (parsed is not None and parsed.is_plain) is is_fast
    assert not is_fast or (parsed is not None and parsed.encoding is None)


def test_a_known_head_of_plain_json_is_not_read_when_its_model_is_not_taken_any_more() -> None:
    taken = {"m"}
    reader = HeadReader(takes_plain=taken.__contains__)
    whole = b"POST /models/m HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"

    first = reader.find(whole)
    taken.clear()

    assert first is not None
    assert reader.find(whole) is None
