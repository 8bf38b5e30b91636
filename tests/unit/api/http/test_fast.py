"""What the fast path reads of a request, and what it leaves to the route."""

import asyncio
from typing import Any, cast

import pytest

from qinfer.core.api_keys import Scope
from qinfer.core.messages import Response
from qinfer.core.settings import Settings
from qinfer.errors import InvalidRequest, ModelNotFound, QinferError
from qinfer.tensors import Bytes, Tensor
from qinfer_api.auth import CallerContext
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.http.fast import FastCall, QinferHttpProtocol
from qinfer_api.http.head import MAX_FAST_BYTES, parse_target, read_head
from qinfer_api.http.infer import (
    HttpReply,
    InferCodec,
    UrlTarget,
    Writer,
    compile_forward,
    fills_its_memory,
    parse_json_length,
    parse_version,
)
from qinfer_api.shared_memory import SharedMemory

URL = b"/v2/models/m/infer"
LENGTH = (b"Content-Length", b"10")


@pytest.mark.parametrize(
    ("url", "target"),
    [
        (b"/v2/models/m/infer", UrlTarget("m", 0)),
        (b"/v2/models/m/versions/12/infer", UrlTarget("m", 12)),
        (b"/models/m", UrlTarget("m", 0)),
        (b"/models/m/n", None),
        (b"/models/", None),
        (b"/v2/models/m/infer/", None),
        (b"/v2/models//infer", None),
        (b"/v2/models/m/versions/x/infer", None),
        (b"/v2/models/m/versions/0/infer", None),
        (b"/v2/models/m/other/1/infer", None),
        (b"/v2/models/m%20n/infer", None),
        (b"/v2/models/m/infer?a=1", None),
        (b"http://host/v2/models/m/infer", None),
        (b"/v2/models/m/ready", None),
    ],
)
def test_parse_target(url: bytes, target: UrlTarget | None) -> None:
    """Only plain infer URLs; everything odd is the route's."""
    assert parse_target(url) == target


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.0", "٣", "9223372036854775808"])
def test_a_version_is_an_integer_above_zero(text: str) -> None:
    """Reference §1.1."""
    with pytest.raises(InvalidRequest, match="failed to get model version from specified version string"):
        parse_version(text)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"Content-Length", b"%d" % (MAX_FAST_BYTES + 1))],
        [LENGTH, (b"Content-Encoding", b"gzip")],
        [LENGTH, (b"Expect", b"100-continue")],
        [LENGTH, (b"Prefer", b"respond-async")],
        [LENGTH, (b"Upgrade", b"h2c")],
        [(b"Transfer-Encoding", b"chunked")],
    ],
)
def test_special_requests_are_left_to_the_route(headers: list[tuple[bytes, bytes]]) -> None:
    """Large, encoded, chunked, and everything with a protocol of its own."""
    assert read_head(URL, headers) is None


@pytest.mark.parametrize(
    ("json_length", "length", "is_fast"),
    [
        (b"200", 1_000_000, True),
        (b"200", 1_000_001, False),
        (b"65536", 1_000_000, True),
        (b"65537", 1_000_000, False),  # much JSON, which is decoded elsewhere
        (b"0", 1_000_000, False),
        (b"-1", 1_000_000, False),
        (b"2 0", 1_000_000, False),
        ("²".encode("latin-1"), 1_000_000, False),
        (b"1" * 5000, 1_000_000, False),
    ],
)
def test_large_bodies_with_little_json_are_fast(json_length: bytes, length: int, *, is_fast: bool) -> None:
    headers = [(b"Content-Length", b"%d" % length), (b"Inference-Header-Content-Length", json_length)]

    assert (read_head(URL, headers, most_binary_bytes=1_000_000) is not None) == is_fast


@pytest.mark.parametrize(("accepted", "encoding"), [(b"gzip, deflate", "gzip"), (b"deflate", "deflate"), (b"br", None)])
def test_the_reply_may_be_compressed(accepted: bytes, encoding: str | None) -> None:
    """What many clients send by themselves does not cost them the fast path."""
    head = read_head(URL, [LENGTH, (b"Accept-Encoding", accepted)])

    assert head is not None
    assert head.encoding == encoding


def test_the_head_of_a_plain_request() -> None:
    """Header names have no case; identity encodings are none; other headers mean nothing."""
    headers = [
        LENGTH,
        (b"CONTENT-ENCODING", b"Identity"),
        (b"Inference-Header-Content-Length", b"7"),
        (b"traceparent", b"00-1-2-01"),
        (b"X-Other", b"1"),
    ]

    head = read_head(URL, headers)

    assert head is not None
    assert (head.target, head.json_length, head.context.trace) == (UrlTarget("m", 0), "7", "00-1-2-01")


def test_headers_are_forwarded_only_when_asked_for() -> None:
    """Without a pattern nothing is looked at; with one, whole names count, and are kept as they were sent."""
    headers = [LENGTH, (b"X-Tenant", b"a"), (b"X-Tenant-Id", b"b")]
    plain, told = read_head(URL, headers), read_head(URL, headers, forward=compile_forward("V", "x-tenant"))

    assert plain is not None
    assert told is not None
    assert plain.forwarded == {}
    assert told.forwarded == {"X-Tenant": "a"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "Unable to parse Inference-Header-Content-Length, got: x"),
        ("-1", r"inference header size should be in range \(0, 10\), got: -1"),
        ("11", r"inference header size should be in range \(0, 10\), got: 11"),
    ],
)
def test_a_json_length_outside_the_body_is_refused(text: str, message: str) -> None:
    """Triton's texts."""
    with pytest.raises(InvalidRequest, match=message):
        parse_json_length(text, 10)


def test_a_reply_is_one_piece_of_bytes() -> None:
    """Status line, common headers, own headers, body."""
    whole = Writer().render(HttpReply(400, b"{}"), [(b"date", b"today")], "ID.0.é", close=True)

    assert whole == (
        b"HTTP/1.1 400 Bad Request\r\ndate: today\r\nqinfer-request-id: ID.0.%C3%A9\r\n"
        b"content-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
    )


@pytest.mark.parametrize("close", [False, True])
def test_the_body_of_a_large_reply_is_not_copied(*, close: bool) -> None:
    body = b"0," * 200_000
    reply = HttpReply(200, body)

    begin, rest = Writer().pieces(reply, [(b"date", b"today")], "ID", close=close)

    assert rest is body
    assert b"".join((begin, rest)) == Writer().render(reply, [(b"date", b"today")], "ID", close=close)


def test_the_tensors_of_a_large_reply_are_not_copied() -> None:
    tensors = [memoryview(bytes([number]) * 200_000) for number in range(2)]
    whole = HttpReply(200, b"{}" + b"".join(tensors), 2)

    begin, text, *rest = Writer().pieces(HttpReply(200, b"{}", 2, tensors=tensors), [], "ID", close=False)

    assert all(one is other for one, other in zip(rest, tensors, strict=True))
    assert b"".join((begin, text, *rest)) == Writer().render(whole, [], "ID", close=False)


def test_the_common_headers_are_renewed() -> None:
    """The server puts a new list in place each second."""
    writer = Writer()
    writer.render(HttpReply(200, b""), [(b"date", b"then")], "", close=False)

    assert b"date: now\r\n" in writer.render(HttpReply(200, b""), [(b"date", b"now")], "", close=False)


@pytest.mark.parametrize("text", ["9" * 19, "0" * 20 + "1", "1" * 5000])
def test_endless_versions_are_refused(text: str) -> None:
    """Neither is a version that Python can't convert a crash, nor one that no version can be."""
    with pytest.raises(InvalidRequest, match="failed to get model version from specified version string"):
        parse_version(text)


def test_a_header_sent_twice_is_left_to_the_route() -> None:
    """One of the two counts; the route knows which."""
    assert read_head(URL, [LENGTH, (b"Accept-Encoding", b"gzip"), (b"accept-encoding", b"br")]) is None


def test_the_limit_may_be_below_that_of_the_fast_path() -> None:
    """What exceeds `max_input_bytes` is refused by the route."""
    assert read_head(URL, [(b"Content-Length", b"100")], max_bytes=99) is None


def test_a_reply_tells_when_to_try_again_and_what_to_present() -> None:
    """As headers of its own."""
    assert b"\r\nretry-after: 7\r\n" in HttpReply(503, b"{}", retry_after_s=7).head()
    assert HttpReply(401, b"{}").head().endswith(b"\r\nwww-authenticate: Bearer\r\n")
    assert b"retry-after" not in HttpReply(503, b"{}").head()


class _Connection:
    peer = "127.0.0.1"

    def __init__(self) -> None:
        self.has_reply = asyncio.Event()

    def on_reply(self) -> None:
        self.has_reply.set()

    def is_behind(self, call: FastCall) -> bool:
        return False


class _Dispatcher:
    """Counts what is submitted."""

    def __init__(self) -> None:
        self.submitted = 0

    def authorize(self, context: CallerContext, scope: Scope, peer: str) -> CallerContext:
        return context

    def resolve(self, model: str, version: int) -> Any:
        raise ModelNotFound("gone")

    def refuse(self, model: str, version: int, error: QinferError, *_: Any) -> QinferError:
        return error

    def submit(self, *_: Any, **__: Any) -> None:
        self.submitted += 1


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_may_leave_while_its_inputs_are_read(leaves: bool) -> None:  # noqa: FBT001
    """Strings in shared memory are read in a thread: what it gives is submitted only for those who still wait."""
    dispatcher, memory = _Dispatcher(), SharedMemory(allowed=True)
    codec = InferCodec(cast(Dispatcher, dispatcher), memory, Settings())
    connection = _Connection()
    head = read_head(URL, [LENGTH])
    assert head is not None
    call = FastCall(cast(QinferHttpProtocol, connection), codec, head, [b'{"shared_memory_region": "BYTES"}'])

    call.start(cast(Dispatcher, dispatcher))
    if leaves:
        call.cancel(cast(Dispatcher, dispatcher))
    else:
        await connection.has_reply.wait()
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)

    assert call.reply is not None
    assert call.reply.status == (400 if leaves else 404)
    assert connection.has_reply.is_set() is not leaves
    assert dispatcher.submitted == 0


BLOB = memoryview(bytes(1200))


@pytest.mark.parametrize(
    ("outputs", "fills"),
    [([bytes(400)], True), ([BLOB[:700]], True), ([BLOB[:400], BLOB[400:800]], True), ([BLOB[:400]], False)],
)
def test_a_part_of_a_batch_s_replies_is_not_kept_as_a_view(outputs: list[Bytes], *, fills: bool) -> None:
    """A slow reader of one reply would keep those of the whole batch."""
    tensors = tuple(Tensor(f"y{place}", "UINT8", (len(data),), data) for place, data in enumerate(outputs))

    assert fills_its_memory(Response(request_id="r", outputs=tensors)) is fills
