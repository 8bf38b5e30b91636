"""The HTTP server and its ASGI side, with applications of the tests: framing, failures, bounds, what is left behind."""

import asyncio
import contextlib
import gc
import json
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qinfer.core.settings import HttpSettings
from qinfer_api.http.connection import HEADS_BYTES, MAX_PIPELINED, SLICE_BYTES, HttpPort
from qinfer_api.http.server import HttpServer
from qinfer_api.turns import SMALL_BYTES
from tests.support.http2 import Short

TIMEOUT_S = 20
GET = b"GET /a%20b?c=d HTTP/1.1\r\nHost: q\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: q\r\nConnection: close\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def piece(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def answering(*messages: Message) -> ASGIApp:
    """Makes an application that sends the same to each request."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


async def body_of(receive: Receive) -> bytes:
    """Reads a whole body."""
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body, more = body + message["body"], message["more_body"]
    return body


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body of the request."""
    body = await body_of(receive)
    await send(start(200, (b"content-length", b"%d" % len(body))))
    await send(piece(body))


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[tuple[HttpPort, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serves an application, and connects to it."""
    http = HttpSettings(port=0, drain_s=0)
    port, ready = HttpPort(http), asyncio.Event()
    server = HttpServer(http, app, port, ready.set)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        task = asyncio.create_task(server.serve(listener))
        await ready.wait()
        reader, writer = await asyncio.open_connection(*address)
        try:
            yield port, reader, writer
        finally:
            writer.close()
            server.turn_away()
            await task


async def exchange(app: ASGIApp, *sent: bytes) -> bytes:
    """Returns what comes until the connection ends; sends one piece after the other."""
    async with serving(app) as (_, reader, writer), asyncio.timeout(TIMEOUT_S):
        for one in sent:
            writer.write(one)
            await asyncio.sleep(0)
        return await reader.read()


def split(reply: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Returns status line, headers and the rest."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    line, *lines = head.split(b"\r\n")
    return line, dict(each.split(b": ", 1) for each in lines), rest


async def test_the_scope() -> None:
    """What applications read of a request."""
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await answering(start(204), piece(b""))(scope, receive, send)

    await exchange(app, b"GET /a%20b?c=d HTTP/1.1\r\nHoSt: q\r\nConnection: close\r\n\r\n")

    (scope,) = scopes
    assert scope["headers"] == [(b"host", b"q"), (b"connection", b"close")]
    assert scope["client"][0] == scope["server"][0] == "127.0.0.1"
    wanted: dict[str, Any] = {"type": "http", "method": "GET", "http_version": "1.1", "scheme": "http", "root_path": ""}
    wanted |= {"path": "/a b", "raw_path": b"/a%20b", "query_string": b"c=d"}
    assert {key: scope[key] for key in wanted} == wanted


async def test_a_body_without_length_is_chunked() -> None:
    """Empty pieces end nothing."""
    app = answering(start(), piece(b"abc", more=True), piece(b"", more=True), piece(b"d"))

    line, headers, body = split(await exchange(app, LAST))

    assert (line, headers[b"transfer-encoding"]) == (b"HTTP/1.1 200 OK", b"chunked")
    assert body == b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"


async def test_to_http_1_0_nothing_is_chunked() -> None:
    """RFC 9112 §6.1; the end of the connection ends the body."""
    app = answering(start(), piece(b"abc", more=True), piece(b"d"))

    _, headers, body = split(await exchange(app, b"GET / HTTP/1.0\r\n\r\n"))

    assert (b"transfer-encoding" in headers, headers[b"connection"], body) == (False, b"close", b"abcd")


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304)])
async def test_replies_without_body(method: bytes, status: int) -> None:
    """Whatever the application sends."""
    request = method + b" / HTTP/1.1\r\nHost: q\r\nConnection: close\r\n\r\n"

    _, headers, body = split(await exchange(answering(start(status), piece(b"abc")), request))

    assert (b"transfer-encoding" in headers, body) == (False, b"")


@pytest.mark.parametrize(("length", "body"), [(b"2", b"abc"), (b"4", b"abc")])
async def test_a_body_of_another_length_is_cut_off(length: bytes, body: bytes) -> None:
    """Its reader sees that it is not whole, or reads what was promised."""
    app = answering(start(200, (b"content-length", length)), piece(body))

    assert len(split(await exchange(app, GET))[2]) < int(length)


@pytest.mark.parametrize(
    "messages",
    [
        (),
        (piece(b"a"),),
        (start(200, (b"x", b"a\r\nb: c")),),
        (start(200, (b"x y", b"a")),),
        (start(200, (b"content-length", b"x")),),
    ],
    ids=["nothing", "no head", "two headers in one", "no header name", "no length"],
)
async def test_an_application_that_fails_before_its_reply(messages: tuple[Message, ...]) -> None:
    """An error as any other, and the connection goes on."""
    reply = await exchange(answering(*messages), GET + LAST)

    first, headers, rest = split(reply)
    assert first == b"HTTP/1.1 500 Internal Server Error"
    assert "error" in json.loads(rest[: int(headers[b"content-length"])])
    assert reply.count(first) == 2


async def test_an_application_that_fails_within_its_reply() -> None:
    """The reply is cut off, and requests behind it are not answered."""
    app = answering(start(), piece(b"abc", more=True), start())

    assert split(await exchange(app, GET + GET))[2] == b"3\r\nabc\r\n"


async def test_an_application_may_end_the_connection() -> None:
    """By its own header."""
    reply = await exchange(answering(start(204, (b"connection", b"close")), piece(b"")), GET + GET)

    assert reply.count(b"HTTP/1.1 204") == reply.count(b"connection: close") == 1


@pytest.mark.parametrize("is_whole", [True, False])
async def test_who_waits_to_send_the_body_is_told_to(is_whole: bool) -> None:  # noqa: FBT001
    """RFC 9110 §10.1.1; who does not wait is not."""
    head = b"POST / HTTP/1.1\r\nHost: q\r\nContent-Length: 3\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    async with serving(echo) as (_, reader, writer), asyncio.timeout(TIMEOUT_S):
        writer.write(head + b"abc" if is_whole else head)
        if not is_whole:
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"abc")
        reply = await reader.read()

    assert (reply.startswith(OK), split(reply)[2]) == (True, b"abc")


@pytest.mark.parametrize("body", [b"", b"abc"])
async def test_an_upgrade_is_ignored(body: bytes) -> None:
    """RFC 9110 §7.8: the request is one of HTTP/1.1, with its body; so is the one behind it."""
    head = b"POST / HTTP/1.1\r\nHost: q\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )

    reply = await exchange(echo, head + body + LAST)

    _, headers, rest = split(reply)
    assert (headers[b"content-length"], rest[: len(body)]) == (b"%d" % len(body), body)
    assert reply.count(OK) == 2


async def test_connect_is_refused() -> None:
    """No proxy is here."""
    assert (await exchange(echo, b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_requests_of_one_read_are_taken_a_few_at_a_time() -> None:
    """Thousands of small ones may come at once; all are answered."""
    small = b"GET / HTTP/1.1\r\n\r\n"
    count, most, most_of_much = 10_000, 0, 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal most, most_of_much
        (connection,) = port.connections
        most = max(most, len(connection._queue))
        if len(connection._unparsed) > SMALL_BYTES:
            most_of_much = max(most_of_much, len(connection._queue))
        await answering(start(204), piece(b""))(scope, receive, send)

    async with serving(app) as (port, reader, writer), asyncio.timeout(TIMEOUT_S):
        writer.write(small * count + LAST)
        replies = await reader.read()

    assert replies.count(b"HTTP/1.1 204") == count + 1
    assert most <= MAX_PIPELINED + SLICE_BYTES // len(small) + 1
    assert 1 < most_of_much <= HEADS_BYTES // len(small) + 2


async def test_who_has_sent_much_is_read_between_others() -> None:
    """Chunks of a byte cost much; the connection is paused, goes on, and all of it is answered."""
    count = 30_000

    async with serving(echo) as (port, reader, writer), asyncio.timeout(TIMEOUT_S):
        port.turns = turns = Short()
        writer.write(b"POST / HTTP/1.1\r\nHost: q\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"1\r\nx\r\n" * count + b"0\r\n\r\n" + LAST)
        replies = await reader.read()

    assert turns.waits > 3
    assert replies.count(OK) == 2
    assert b"x" * count in replies


async def test_an_idle_connection_keeps_no_read() -> None:
    """A read may have a quarter of a megabyte."""
    async with serving(echo) as (port, reader, writer), asyncio.timeout(TIMEOUT_S):
        writer.write(b"POST / HTTP/1.1\r\nHost: q\r\nContent-Length: 50000\r\n\r\n" + b"x" * 50_000)
        await reader.readuntil(b"\r\n\r\n" + b"x" * 50_000)
        (connection,) = port.connections

        assert connection._unparsed.obj == b""


async def test_a_body_is_read_as_it_is_taken() -> None:
    """An application that takes nothing holds a read or two."""
    total, held = 4 * 2**20, 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal held
        (connection,) = port.connections
        if scope["method"] == "POST":
            await _until(lambda: connection._is_paused)
            held = len((await receive())["body"])
        await answering(start(204), piece(b""))(scope, receive, send)

    async with serving(app) as (port, reader, writer), asyncio.timeout(TIMEOUT_S):
        writer.write(b"POST / HTTP/1.1\r\nHost: q\r\nContent-Length: %d\r\n\r\n" % total + b"x" * total + LAST)
        replies = await reader.read()

    assert 0 < held < 2**19
    assert replies.count(b"HTTP/1.1 204") == 2


async def test_who_is_answered_before_it_has_sent_all_reads_the_answer() -> None:
    """A reset would destroy it; the rest is read and dropped."""
    app = answering(start(413, (b"content-length", b"3")), piece(b"abc"))
    head = b"POST / HTTP/1.1\r\nHost: q\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"

    assert split(await exchange(app, head % 2**22 + b"x" * 2**22))[2] == b"abc"


async def test_a_client_that_leaves() -> None:
    """The application is told, and what it sends then is dropped."""
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        await send(start())
        told.set_result(await receive())
        await send(piece(b"abc"))

    async with serving(app) as (_, reader, writer), asyncio.timeout(TIMEOUT_S):
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

        assert await told == {"type": "http.disconnect"}


@pytest.mark.parametrize("sent", [GET, b"not HTTP\r\n\r\n", GET[:20]], ids=["answered", "refused", "cut off"])
@pytest.mark.usefixtures("collected")
async def test_a_lost_connection_leaves_no_cycle_of_references(sent: bytes) -> None:
    """Thousands come and go; the garbage collector runs rarely."""
    async with serving(answering(start(204), piece(b""))) as (port, reader, writer), asyncio.timeout(TIMEOUT_S):
        writer.write(sent)
        if sent != GET[:20]:
            await reader.readuntil(b"\r\n\r\n")
        gc.collect()
        gc.disable()
        try:
            await _until(lambda: len(port.connections) == 1)
            (left,) = map(weakref.ref, port.connections)
            writer.close()
            await _until(lambda: left() is None)
        finally:
            gc.enable()


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - a reference count has no event
        await asyncio.sleep(0)
