"""An open stream of requests: each is sent when it is due, whether or not those before it are answered.

A request's latency runs from the moment it was due. The client shares the cores with what it measures, so it does as
little as it can for each request: a write, a read, and no task (half of what asyncio's streams and tasks take).
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import uvloop

CONNECTIONS = 256
"""Opened before a stream begins; where all wait for answers, requests wait for one of them."""
ANSWERED_WITHIN_S = 60.0
"""Seconds after the last request was due within which all are answered."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Latencies(NamedTuple):
    """The latencies of one stream of requests, in milliseconds, and how many of them failed."""

    p50: float
    p99: float
    failed: int


class Answer(NamedTuple):
    """One answer of a stream.

    Attributes:
        kind: The number of the request among those that the stream sends in turn.
        latency_s: From the moment at which the request was due.
        lag_s: How much later than that it was sent.
        status: The HTTP status; 0 = there was none in time, and the latency is how long it was waited for.
    """

    kind: int
    latency_s: float
    lag_s: float
    status: int


def stream(port: int, request: bytes, rate: float, seconds: float) -> Latencies:
    """Sends a request `rate` times a second for `seconds` to a server on this machine.

    Raises:
        ConnectionError: The server closed a connection.
    """
    answers = offer(port, [request], rate, seconds)
    p50, p99 = np.percentile(np.array([answer.latency_s for answer in answers]) * 1000, [50, 99])
    return Latencies(float(p50), float(p99), sum(answer.status != 200 for answer in answers))


def offer(
    port: int,
    requests: Sequence[bytes],
    rate: float,
    seconds: float,
    connections: int = CONNECTIONS,
    patience_s: float = ANSWERED_WITHIN_S,
) -> list[Answer]:
    """Sends requests in turn, `rate` a second for `seconds`, to a server on this machine; returns all answers.

    Args:
        port: The server's.
        requests: What to send, as it goes over the socket.
        rate: Requests a second, whatever becomes of them.
        seconds: For how long.
        connections: How many requests may be without an answer; more are sent late.
        patience_s: How long to wait for the rest of the answers.

    Raises:
        ConnectionError: The server closed a connection.
    """
    pace = uvloop.run(_offer(port, requests, rate, seconds, connections, patience_s))
    return pace.answers


async def _offer(
    port: int, requests: Sequence[bytes], rate: float, seconds: float, connections: int, patience_s: float
) -> "_Pace":
    loop = asyncio.get_running_loop()
    pace = _Pace(loop, requests, rate, int(rate * seconds))
    opened = [await loop.create_connection(lambda: _Connection(pace), "127.0.0.1", port) for _ in range(connections)]
    pace.begin([connection for _, connection in opened])
    try:
        async with asyncio.timeout(seconds + patience_s):
            await pace.done
    except TimeoutError:
        for _, connection in opened:
            connection.give_up()
    for transport, _ in opened:
        transport.close()
    return pace


class _Pace:
    """Sends what is due, over connections that wait for nothing.

    Attributes:
        answers: Those that have come.
        done: Set when all have.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, requests: Sequence[bytes], rate: float, count: int) -> None:
        self._loop = loop
        self._requests = requests
        self._interval_s = 1 / rate
        # Timers of less than this would only spin.
        self._tick_s = max(self._interval_s, 0.001)
        self._count = count
        self._sent = 0
        self._begin_s = 0.0
        self._free: deque[_Connection] = deque()
        self.answers: list[Answer] = []
        self.done: asyncio.Future[None] = loop.create_future()

    def begin(self, connections: list["_Connection"]) -> None:
        """Begins to send."""
        self._free.extend(connections)
        self._begin_s = time.perf_counter()
        self._tick()

    def _tick(self) -> None:
        self._send()
        if self._sent < self._count:  # also where no connection is free: another look does no harm
            self._loop.call_later(self._tick_s, self._tick)

    def _send(self) -> None:
        now_s = time.perf_counter()
        while self._free and self._sent < self._count:
            due_s = self._begin_s + self._sent * self._interval_s
            if due_s > now_s:
                return
            kind = self._sent % len(self._requests)
            self._sent += 1
            self._free.popleft().ask(self._requests[kind], kind, due_s)

    def answered(self, connection: "_Connection", status: int) -> None:
        """Takes note of an answer; its connection is free."""
        due_s, lag_s = connection.due_s, connection.sent_s - connection.due_s
        self.answers.append(Answer(connection.kind, time.perf_counter() - due_s, lag_s, status))
        self._free.append(connection)
        if len(self.answers) == self._count and not self.done.done():
            self.done.set_result(None)

    def lost(self) -> None:
        """Ends the stream: a server closes no connection by itself."""
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server closed a connection of the stream"))


class _Connection(asyncio.Protocol):
    """One keep-alive connection, with one request at a time."""

    def __init__(self, pace: _Pace) -> None:
        self._pace = pace
        self._transport: asyncio.WriteTransport
        self.kind = 0
        self.due_s = self.sent_s = 0.0
        self._answer = b""
        self._is_waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is of no class of asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        self._pace.lost()

    def ask(self, request: bytes, kind: int, due_s: float) -> None:
        self.kind, self.due_s, self.sent_s = kind, due_s, time.perf_counter()
        self._is_waiting = True
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        answer = self._answer + data
        head = answer.find(b"\r\n\r\n")
        length = _LENGTH.search(answer, 0, head + 2) if head >= 0 else None
        if length is None or len(answer) < head + 4 + int(length[1]):
            self._answer = answer
            return
        self._answer, self._is_waiting = b"", False
        self._pace.answered(self, int(answer[9:12]))

    def give_up(self) -> None:
        """Counts a request that waits for its answer as failed."""
        if self._is_waiting:
            self._pace.answered(self, 0)
