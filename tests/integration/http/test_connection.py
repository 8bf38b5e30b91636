"""Connections, byte by byte: order of replies, pieces, limits, slow and vanishing clients, draining, TLS."""

import asyncio
import contextlib
import errno
import json
import socket
import ssl
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from qinfer.core.settings import HttpSettings
from qinfer_api.app import bind
from qinfer_api.http.connection import (
    LESS_READ_BYTES,
    MAX_CHUNKS,
    MAX_FRAMING_BYTES,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    MOST_HELD_BYTES,
    HttpConnection,
    HttpPort,
)
from qinfer_api.http.fast import QinferHttpProtocol
from qinfer_api.turns import SMALL_BYTES, Turns
from tests.support.gateway import Running, running_gateway, settings_of

URL = "/v2/models/echo/infer"
TIMEOUT_S = 20


def body_of(client_id: str) -> bytes:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    return json.dumps({"id": client_id, "inputs": [tensor]}).encode()


def infer(client_id: str, *headers: str, url: str = URL, version: str = "1.1") -> bytes:
    body = body_of(client_id)
    head = [f"POST {url} HTTP/{version}", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def chunked(pieces: bytes, coding: str = "chunked") -> bytes:
    """Returns a request whose body is sent as it stands."""
    return f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: {coding}\r\n\r\n".encode() + pieces


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers]).encode() + b"\r\n\r\n"


class Client:
    """One connection that sends raw bytes and reads replies."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Reads one reply: status, headers, body."""
        async with asyncio.timeout(TIMEOUT_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            status = int(head[0].split()[1])
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
            return status, headers, body

    async def client_id(self) -> str:
        """Reads one reply to `infer` and returns the id in it."""
        status, _, body = await self.reply()
        assert status == 200, body
        return str(json.loads(body)["id"])

    async def is_closed(self) -> bool:
        """Waits for the end of the connection; tells whether nothing came before it."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._reader.read() == b""


@contextlib.asynccontextmanager
async def connected(running: Running, context: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=context)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


def the_connection(running: Running) -> QinferHttpProtocol:
    """Returns the server's side of the only connection."""
    (connection,) = running.gateway._server.port.connections
    assert isinstance(connection, QinferHttpProtocol)
    return connection


async def the_one_connection(running: Running) -> QinferHttpProtocol:
    """Waits for the server's side of the only connection."""
    async with asyncio.timeout(TIMEOUT_S):
        while not running.gateway._server.port.connections:  # noqa: ASYNC110 - a set has no event
            await asyncio.sleep(0)
    return the_connection(running)


async def until_in_flight(running: Running, count: int) -> None:
    """Waits until the dispatcher has that many unanswered requests."""
    async with asyncio.timeout(TIMEOUT_S):
        while running.gateway.dispatcher.in_flight != count:  # noqa: ASYNC110 - a count has no event
            await asyncio.sleep(0)


async def test_a_connection_is_kept_alive() -> None:
    """One request after the other."""
    async with running_gateway() as running, connected(running) as client:
        for number in range(3):
            client.send(infer(str(number)))
            assert await client.client_id() == str(number)


async def test_two_requests_in_one_packet() -> None:
    """Both are answered, in order."""
    async with running_gateway() as running, connected(running) as client:
        client.send(infer("a") + infer("b"))

        assert [await client.client_id(), await client.client_id()] == ["a", "b"]


async def test_a_request_byte_by_byte() -> None:
    """However a request is cut, it is one request."""
    async with running_gateway() as running, connected(running) as client:
        client.writer.get_extra_info("socket").setsockopt(6, 1, 1)  # TCP_NODELAY
        for byte in infer("a"):
            client.send(bytes([byte]))
            await asyncio.sleep(0)

        assert await client.client_id() == "a"


async def test_mixed_pipelined_requests_are_answered_in_order() -> None:
    """Fast, ASGI, ASGI infer, fast, fast: the replies come in the order of the requests."""
    async with running_gateway() as running, connected(running) as client:
        client.send(infer("a") + infer("b") + get("/v2") + infer("c", "Prefer: x") + infer("d") + infer("e"))

        first = [await client.client_id(), await client.client_id()]
        _, _, metadata = await client.reply()
        last = [await client.client_id() for _ in range(3)]

        assert (first, json.loads(metadata)["name"], last) == (["a", "b"], "triton", ["c", "d", "e"])


async def test_a_slow_fast_request_holds_back_what_is_behind_it() -> None:
    """An ASGI request behind an unfinished fast one waits for it, and so does the fast one behind that."""
    async with running_gateway(settings_of(limits={"default_timeout_s": 0.2})) as running, connected(running) as client:
        client.send(infer("s", url="/v2/models/stuck/infer") + get("/v2") + infer("c"))

        statuses = [(await client.reply())[0] for _ in range(3)]

        assert statuses == [503, 200, 200]


async def test_connections_read_less_while_much_is_unparsed() -> None:
    """Pipelined requests wait in the sockets then: the server's memory is bounded, however many connections flood."""
    flood = get("/v2/health/live") * 8000
    async with running_gateway() as running:
        port = running.gateway._server.port
        port.held_bytes = MOST_HELD_BYTES  # as by others
        async with connected(running) as client:
            cast(asyncio.Transport, client.writer.transport).pause_reading()
            client.send(flood)
            connection = await the_one_connection(running)
            await until_paused(connection)

            assert 0 < len(connection._unparsed) <= LESS_READ_BYTES < len(flood)
            assert port.held_bytes == MOST_HELD_BYTES + memoryview(connection._unparsed.obj).nbytes
            client.writer.transport.abort()
        async with asyncio.timeout(TIMEOUT_S):
            await port.is_idle.wait()

        assert port.held_bytes == MOST_HELD_BYTES


async def test_idle_connections_read_less_once_much_is_unparsed() -> None:
    flood = get("/v2/health/live") * 8000
    async with running_gateway() as running, connected(running) as client:
        connection = await the_one_connection(running)
        running.gateway._server.port.note_unparsed(MOST_HELD_BYTES)  # of others
        cast(asyncio.Transport, client.writer.transport).pause_reading()
        client.send(flood)
        await until_paused(connection)

        assert 0 < len(connection._unparsed) <= LESS_READ_BYTES < len(flood)
        client.writer.transport.abort()


async def until_paused(connection: QinferHttpProtocol) -> None:
    """Waits until a connection reads no more."""
    async with asyncio.timeout(TIMEOUT_S):
        while not connection._is_paused:  # noqa: ASYNC110 - a flag has no event
            await asyncio.sleep(0)


async def test_small_reads_of_a_flood_wait_for_turns() -> None:
    """A connection that reads less at once parses no more beside others than one that reads much."""
    async with running_gateway() as running:
        port = running.gateway._server.port
        port.held_bytes = MOST_HELD_BYTES  # as by others
        port.turns.may_read = lambda: False  # type: ignore[method-assign]
        async with connected(running) as client:
            client.send(get("/v2/health/live") * 2000)
            connection = await the_one_connection(running)
            await until_paused(connection)

            assert (len(connection._unparsed), connection._queue) == (LESS_READ_BYTES, deque())
            client.writer.transport.abort()


async def test_a_small_rest_keeps_no_whole_read() -> None:
    """Unparsed bytes behind the most requests that a connection may have are copied, and counted by their length."""
    sent = infer("a", url="/v2/models/stuck/infer") * (MAX_PIPELINED + 10)
    async with running_gateway() as running, connected(running) as client:
        client.send(sent)
        connection = await the_one_connection(running)
        async with asyncio.timeout(TIMEOUT_S):
            while len(connection._queue) < MAX_PIPELINED:  # noqa: ASYNC110 - a queue has no event
                await asyncio.sleep(0)
        await until_paused(connection)

        kept = memoryview(connection._unparsed.obj).nbytes
        assert 0 < len(connection._unparsed) == kept < SMALL_BYTES < len(sent)
        assert running.gateway._server.port.held_bytes == kept
        connection.transport.abort()  # paused, it would see its client leave only after the replies


async def test_a_lost_connection_takes_turns_for_started_applications_only() -> None:
    """Floods that end before their requests start cost others nothing."""
    waiting = list[Callable[[], None]]()
    async with running_gateway() as running:
        port = running.gateway._server.port
        port.turns.may_start = lambda: False  # type: ignore[method-assign]
        port.turns.wait = lambda go_on, *, is_fresh: waiting.append(go_on)  # type: ignore[method-assign]
        async with connected(running) as client:
            client.send(get("/v2/health/live"))
            connection = await the_one_connection(running)
            await until_paused(connection)
            connection.transport.abort()
        async with asyncio.timeout(TIMEOUT_S):
            await port.is_idle.wait()

        assert len(waiting) == 1
        waiting.pop()()
        assert (waiting, port.tasks) == ([], set())


async def test_a_flood_ends_with_its_client_while_others_are_served() -> None:
    """While others wait for turns, requests that a client left behind are not answered, and its connection closes."""
    async with running_gateway() as running:
        port = running.gateway._server.port
        port.turns.may_start = lambda: False  # type: ignore[method-assign]  # as beside a flood of others

        def wait_again() -> None:
            port.turns.wait(wait_again, is_fresh=False)

        wait_again()
        async with connected(running) as client:
            client.send(get("/v2/health/live") * 2000)
            await the_one_connection(running)
            client.writer.write_eof()

            with contextlib.suppress(ConnectionResetError):  # as after `close` with unread bytes
                assert await client.is_closed()
            assert not port.tasks


async def test_a_client_that_has_ended_its_side_gets_its_replies() -> None:
    """Requests of one connection take turns, for which no other waits."""
    count, turns_over = 2000, 0
    async with running_gateway() as running:
        turns = running.gateway._server.port.turns
        may_start = turns.may_start

        def may_start_at_second_try() -> bool:
            nonlocal turns_over
            turns_over += 1
            return turns_over % 2 == 0 and may_start()

        turns.may_start = may_start_at_second_try  # type: ignore[method-assign]
        async with connected(running) as client:
            client.send(get("/v2/health/live") * count)
            client.writer.write_eof()

            statuses = [(await client.reply())[0] for _ in range(count)]
            assert statuses == [200] * count
            assert await client.is_closed()


class Recorded(Turns):
    """Turns with time for all, which note who waits for one all the same, and may be full."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = list[bool]()  # whether it is fresh
        self.is_said_full = False

    @property
    def is_full(self) -> bool:
        return self.is_said_full

    def may_start(self) -> bool:
        return True

    def wait(self, go_on: Callable[[], None], *, is_fresh: bool) -> None:
        self.waits.append(is_fresh)
        super().wait(go_on, is_fresh=is_fresh)


async def test_a_request_with_others_behind_it_waits_for_a_turn() -> None:
    """A request with others behind it goes behind those of others, even if turns have time left.

    The first one of a small read is not known to have more behind it, and the last one has none.
    """
    async with running_gateway() as running, connected(running) as client:
        turns = running.gateway._server.port.turns = Recorded()
        client.send(get("/v2/health/live"))
        alone = ((await client.reply())[0], list(turns.waits))
        client.send(get("/v2/health/live") * 3)
        statuses = [(await client.reply())[0] for _ in range(3)]

    assert alone == (200, [])
    assert (statuses, turns.waits) == ([200] * 3, [False])


async def test_floods_are_cut_while_the_most_wait_and_others_are_not() -> None:
    async with running_gateway() as running:
        turns = running.gateway._server.port.turns = Recorded()
        turns.is_said_full = True
        async with connected(running) as flood, connected(running) as other, connected(running) as uploading:
            flood.send(get("/v2/health/live") * 3)
            other.send(get("/v2/health/live"))
            uploading.send(chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body_of("a")), body_of("a"))))

            replies = [await flood.reply()]
            while replies[-1][0] == 200:  # of requests that had begun
                replies.append(await flood.reply())
            status, headers, _ = replies[-1]
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert await flood.is_closed()
            assert (await other.reply())[0] == 200
            assert await uploading.client_id() == "a"


async def test_a_check_of_timeouts_that_takes_turns_has_the_time_of_each_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection that became idle during the check must not be closed as if it had been idle since its beginning."""
    now_s = 100.0

    class Checked:
        def __init__(self) -> None:
            self.times = list[float]()

        def check_timeouts(self, at_s: float) -> None:
            nonlocal now_s
            self.times.append(at_s)
            now_s += 50.0

    monkeypatch.setattr("qinfer_api.http.connection.time", SimpleNamespace(monotonic=lambda: now_s))
    port, checked = HttpPort(HttpSettings()), [Checked(), Checked()]
    port.connections = cast(set[HttpConnection], set(checked))

    await port.tick()

    assert sorted(one.times for one in checked) == [[100.0], [150.0]]


async def test_a_connection_makes_its_parser_when_it_needs_one() -> None:
    """Idle connections have none."""
    async with running_gateway() as running, connected(running) as client:
        connection = await the_one_connection(running)
        before = "_parser" in vars(connection)
        client.send(get("/v2/health/live"))
        await client.reply()

        assert (before, "_parser" in vars(connection)) == (False, True)


async def test_a_request_that_waited_for_a_turn_lets_its_connection_read_on() -> None:
    """Reading pauses until the application starts, so that the end of a connection is noticed while it runs."""
    started, gone = asyncio.Event(), asyncio.Event()

    async def application(*_: object) -> None:
        started.set()
        await gone.wait()

    async with running_gateway() as running:
        port = running.gateway._server.port
        turns, answers = port.turns, iter([False])
        turns.may_start = lambda: turns.may_read() and next(answers, True)  # type: ignore[method-assign]
        port.app = application
        async with connected(running) as client, asyncio.timeout(TIMEOUT_S):
            client.send(get("/"))
            await started.wait()
            assert next(answers, None) is None
        async with asyncio.timeout(TIMEOUT_S):
            await port.is_idle.wait()
        gone.set()


async def test_hundreds_of_pipelined_requests() -> None:
    """More than may be in flight on one connection: reading pauses, and all are answered in order."""
    ids = [str(number) for number in range(500)]
    async with running_gateway() as running, connected(running) as client:
        client.send(b"".join(infer(client_id) for client_id in ids))

        assert [await client.client_id() for _ in ids] == ids


async def test_expect_100_continue() -> None:
    """The interim reply comes before the body is sent."""
    whole = infer("a", "Expect: 100-continue")
    head, _, body = whole.partition(b"\r\n\r\n")
    async with running_gateway() as running, connected(running) as client:
        client.send(head + b"\r\n\r\n")
        interim = await client.reply()
        client.send(body)

        assert interim[0] == 100
        assert await client.client_id() == "a"


async def test_a_chunked_body() -> None:
    """Bodies without a length take the route."""
    body = body_of("a")
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with running_gateway() as running, connected(running) as client:
        client.send(head + b"%x\r\n" % 10 + body[:10] + b"\r\n%x\r\n" % (len(body) - 10) + body[10:] + b"\r\n0\r\n\r\n")

        assert await client.client_id() == "a"


async def test_http_1_0() -> None:
    """Answered, and closed."""
    async with running_gateway() as running, connected(running) as client:
        client.send(infer("a", version="1.0"))

        assert await client.client_id() == "a"
        assert await client.is_closed()


async def test_connection_close_is_honoured() -> None:
    """The reply says so, requests behind it are ignored, and the connection ends."""
    async with running_gateway() as running, connected(running) as client:
        client.send(infer("a", "Connection: close") + infer("b"))
        status, headers, _ = await client.reply()

        assert (status, headers["connection"]) == (200, "close")
        assert await client.is_closed()


async def test_garbage_is_refused_after_the_replies_before_it() -> None:
    """What came before is answered; then 400 and the end."""
    async with running_gateway() as running, connected(running) as client:
        client.send(infer("a") + b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        answered = await client.client_id()
        status, headers, body = await client.reply()

        assert (answered, status, headers["connection"]) == ("a", 400, "close")
        assert json.loads(body) == {"error": "Invalid HTTP request received."}
        assert await client.is_closed()


async def test_a_head_without_end_is_refused() -> None:
    """Memory for headers is bounded."""
    async with running_gateway() as running, connected(running) as client:
        client.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n")
        for _ in range(2 * MAX_HEAD_BYTES // 1024 + 300):
            client.send(b"X-Filler: " + b"x" * 1012 + b"\r\n")
        status, _, _ = await client.reply()

        assert status == 431


async def test_a_conflicting_content_length_is_refused() -> None:
    """Two lengths, or a length and chunks, are how requests are smuggled."""
    for extra in ("Content-Length: 3", "Transfer-Encoding: chunked"):
        async with running_gateway() as running, connected(running) as client:
            client.send(infer("a", extra))

            assert (await client.reply())[0] == 400


async def test_a_client_that_leaves_cancels_its_requests() -> None:
    """On both ways; the entries leave the queue."""
    for headers in ((), ("Prefer: x",)):
        async with running_gateway() as running:
            async with connected(running) as client:
                client.send(infer("a", *headers, url="/v2/models/stuck/infer"))
                await until_in_flight(running, 1)
            await until_in_flight(running, 0)

            await running.emptied("stuck")


async def test_too_many_in_flight_are_refused() -> None:
    """Triton's text for a full queue, as 503."""
    settings = settings_of(limits={"max_in_flight": 1})
    async with running_gateway(settings) as running, connected(running) as first, connected(running) as second:
        first.send(infer("a", url="/v2/models/stuck/infer"))
        await until_in_flight(running, 1)
        second.send(infer("b"))
        status, _, body = await second.reply()

        assert (status, json.loads(body)) == (503, {"error": "[request id: b] Exceeds maximum queue size"})


async def test_a_client_that_does_not_read_is_not_read_from() -> None:
    """Replies nobody takes stop the requests: what is queued stays bounded, and goes on once the client reads."""
    count = 3000
    ids = [f"{number:05}" + "x" * 10_000 for number in range(count)]
    async with running_gateway() as running, connected(running) as client:
        sending = asyncio.create_task(_send_all(client, ids))
        answered = await _until_stalled(running)
        replies = [(await client.client_id())[:5] for _ in ids]
        await sending

    assert answered < count
    assert replies == [client_id[:5] for client_id in ids]


async def _send_all(client: Client, ids: list[str]) -> None:
    for client_id in ids:
        client.send(infer(client_id))
        await client.writer.drain()


async def _until_stalled(running: Running) -> int:
    """Returns how many requests were executed when the gateway had stopped taking more."""
    while True:
        before = len(running.requests)
        await asyncio.sleep(0.2)  # no event tells that nothing happens
        if before and before == len(running.requests):
            return before


async def test_an_idle_connection_is_closed() -> None:
    """After `keep_alive_s`."""
    async with running_gateway(settings_of({"keep_alive_s": 0.05})) as running, connected(running) as client:
        client.send(infer("a"))
        await client.reply()

        assert await client.is_closed()


async def test_a_request_that_takes_too_long_to_arrive_is_cut_off() -> None:
    """Half a head, then silence; on the way of the fast path half a body."""
    for part in (infer("a")[:20], infer("a")[:-5]):
        settings = settings_of({"request_read_timeout_s": 0.05})
        async with running_gateway(settings) as running, connected(running) as client:
            client.send(part)

            assert await client.is_closed()


async def test_draining_answers_what_is_in_flight() -> None:
    """Requests in flight are answered with `connection: close`, idle connections end, and the gateway ends."""
    settings = settings_of({"drain_s": 10}, {"default_timeout_s": 0.6})
    async with running_gateway(settings) as running, connected(running) as busy, connected(running) as idle:
        idle.send(infer("i"))
        await idle.client_id()
        busy.send(infer("a", url="/v2/models/stuck/infer"))
        await until_in_flight(running, 1)
        running.gateway.stop()
        status, headers, body = await busy.reply()

        assert (status, headers["connection"]) == (503, "close")
        assert "Request timeout expired" in json.loads(body)["error"]
        assert await idle.is_closed()
        assert await busy.is_closed()


async def test_draining_is_bounded() -> None:
    """What is not answered within `drain_s` is refused, on both ways."""
    for headers in ((), ("Prefer: x",)):
        await _drain_runs_out(*headers)


async def _drain_runs_out(*headers: str) -> None:
    async with running_gateway(settings_of({"drain_s": 0.1})) as running, connected(running) as client:
        client.send(infer("a", *headers, url="/v2/models/stuck/infer"))
        await until_in_flight(running, 1)
        running.gateway.stop()
        status, _, body = await client.reply()

        assert (status, json.loads(body)) == (503, {"error": "[request id: a] Server exiting"})


async def test_health_while_draining() -> None:
    """503 and Triton's text, on a connection that is still busy."""
    async with running_gateway() as running, connected(running) as client:
        client.send(get("/v2/health/live"))
        running.gateway.dispatcher.draining = True
        live = await client.reply()
        client.send(get("/v2/health/ready"))
        ready = await client.reply()
        client.send(infer("a"))
        refused = await client.reply()

    assert [live[0], ready[0], refused[0]] == [503, 503, 503]
    assert json.loads(live[2]) == {"error": "Server exiting"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *options.split(), *names], check=True, capture_output=True)
    return cert, key


async def test_tls(certificate: tuple[Path, Path]) -> None:
    """Both ways work over TLS."""
    cert, key = certificate
    settings = settings_of({"tls_certfile": str(cert), "tls_keyfile": str(key)})
    context = ssl.create_default_context(cafile=cert)
    async with running_gateway(settings) as running, connected(running, context) as client:
        client.send(infer("a") + infer("b", "Prefer: x"))

        assert running.url.startswith("https://")
        assert [await client.client_id(), await client.client_id()] == ["a", "b"]


async def test_answered_requests_are_not_kept() -> None:
    """However the packets fall: here each ends within the next request."""
    async with running_gateway() as running, connected(running) as client:
        stream = b"".join(infer(f"{number}") for number in range(20))
        step = len(stream) // 20 + 7
        for start in range(0, len(stream), step):
            client.send(stream[start : start + step])
            await client.writer.drain()
        assert [await client.client_id() for _ in range(20)] == [str(number) for number in range(20)]

        assert not the_connection(running)._queue


async def test_trailers_are_not_kept() -> None:
    """Nobody reads them, and a client may send them without end."""
    async with running_gateway() as running, connected(running) as client:
        body = body_of("a")
        client.send(
            f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode()
        )
        client.send(body + b"\r\n0\r\n" + b"x: y\r\n" * 1000 + b"\r\n")
        assert await client.client_id() == "a"

        protocol = the_connection(running)
        assert len(protocol.headers) == 2


async def test_too_many_chunks_are_refused() -> None:
    """Triton's limit."""
    async with running_gateway() as running, connected(running) as client:
        client.send(chunked(b"1\r\n \r\n" * (MAX_CHUNKS + 2)))
        status, headers, body = await client.reply()

        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body) == {"error": f"request body has more than {MAX_CHUNKS} chunks"}
        assert await client.is_closed()


FLOOD = b"0" * 8 * MAX_FRAMING_BYTES  # more than one packet, whatever the machine


@pytest.mark.parametrize(
    "pieces",
    [FLOOD, b"1;" + FLOOD, b"1;a=" + FLOOD, b"0\r\n" + FLOOD, b"0\r\nx: " + FLOOD, b"0\r\n" + b"x: y\r\n" * len(FLOOD)],
    ids=["size", "extension", "extension value", "trailer name", "trailer value", "trailers"],
)
async def test_what_frames_a_body_is_bounded(pieces: bytes) -> None:
    """Its client may still send: it reads why all the same."""
    async with running_gateway() as running, connected(running) as client:
        client.send(chunked(pieces))
        status, headers, body = await client.reply()

        assert (status, headers["connection"]) == (400, "close")
        assert f"chunk extensions and trailers exceed {MAX_FRAMING_BYTES} bytes" in json.loads(body)["error"]
        assert await client.is_closed()


async def test_many_small_chunks_and_a_few_trailers_are_no_flood() -> None:
    """What chunks need beside their data is not counted, however many they are."""
    body = body_of("a")
    chunks = b"1\r\n \r\n" * (MAX_FRAMING_BYTES // 4) + b"%x;a=b\r\n%b\r\n0\r\n" % (len(body), body)
    async with running_gateway() as running, connected(running) as client:
        client.send(chunked(chunks + b"x: y\r\n" * 1000 + b"\r\n"))
        assert await client.client_id() == "a"

        client.send(infer("b"))
        assert await client.client_id() == "b"


BROKEN = chunked(b"1\r\n{\r\nzz\r\n\r\n")


@pytest.mark.parametrize(
    "pieces", [b"zz\r\n", b"-1\r\n", b"1\r\nxyz", b"f" * 17 + b"\r\n", b"1\r\nx\r\n0\r\nno trailer\r\n"]
)
async def test_broken_chunks_are_refused(pieces: bytes) -> None:
    """The route has begun to read the body: nothing comes of it but the error."""
    async with running_gateway() as running, connected(running) as client:
        client.send(chunked(pieces))
        status, headers, body = await client.reply()

        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body) == {"error": "Invalid HTTP request received."}
        assert await client.is_closed()


@pytest.mark.parametrize("last", [BROKEN, b"\x16\x03\x01\r\n\r\n", chunked(b"", "gzip")])
@pytest.mark.parametrize("first", [infer("a"), get("/v2"), infer("a") + get("/v2"), get("/v2") + infer("a")])
async def test_an_error_is_the_last_reply(first: bytes, last: bytes) -> None:
    """Behind requests of both ways; requests behind it are ignored."""
    async with running_gateway() as running, connected(running) as client:
        client.send(first + last + infer("b"))
        statuses = [(await client.reply())[0] for _ in range(first.count(b"HTTP/1.1"))]
        refused, headers, _ = await client.reply()

        assert set(statuses) == {200}
        assert (refused, headers["connection"]) == (501 if b"gzip" in last else 400, "close")
        assert await client.is_closed()


async def test_a_request_that_was_answered_is_not_refused_as_well() -> None:
    """Its body was too large, which needed no more of it; what comes then is broken."""
    async with running_gateway(settings_of({"max_input_bytes": 10})) as running, connected(running) as client:
        client.send(chunked(b"20\r\n" + b" " * 32 + b"\r\n"))
        status, _, body = await client.reply()
        client.send(b"zz\r\n")

        assert (status, "exceeds the maximum allowed value" in json.loads(body)["error"]) == (400, True)
        assert await client.is_closed()


@pytest.mark.parametrize(
    "coding", ["gzip, chunked", "gzip", "identity", "x, Chunked", "gzip\r\nTransfer-Encoding: chunked"]
)
async def test_other_transfer_codings_are_not_supported(coding: str) -> None:
    """RFC 9112 §6.1: the body would be read as what it is not."""
    async with running_gateway() as running, connected(running) as client:
        client.send(chunked(b"0\r\n\r\n", coding))
        status, headers, body = await client.reply()

        assert (status, headers["connection"]) == (501, "close")
        assert json.loads(body)["error"].startswith("transfer coding '")
        assert await client.is_closed()


async def test_a_client_that_resets_while_it_is_refused_is_no_fault(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the reply, the connection can't be shut down by half any more."""

    def reset() -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async with running_gateway() as running, connected(running) as client:
        client.send(infer("1"))
        await client.client_id()
        monkeypatch.setattr(the_connection(running).transport, "write_eof", reset)
        client.send(chunked(b"0\r\n\r\n", "gzip"))
        with contextlib.suppress(ConnectionError):
            await client.is_closed()
        assert not running.gateway._server.port.connections
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("coding", ["chunked, chunked", "chunked, gzip", "chunked\r\nTransfer-Encoding: chunked"])
async def test_chunked_is_the_last_transfer_coding(coding: str) -> None:
    """RFC 9112 §6.1: where the body ends is not certain otherwise."""
    async with running_gateway() as running, connected(running) as client:
        client.send(chunked(b"0\r\n\r\n", coding))

        assert (await client.reply())[0] == 400


def test_replies_do_not_wait_for_acknowledgements() -> None:
    """Head and body of a route's reply are two writes; the second would wait for what the client delays."""
    with bind(HttpSettings(port=0)) as listener:
        listener.listen()
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
