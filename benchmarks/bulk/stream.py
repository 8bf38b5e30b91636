"""An open stream of requests: each is sent when it is due, whether or not those before it are answered.

A request's latency runs from the moment it was due. The client shares the cores with what it measures, so it does as
little as it can for each request: a write, a read, and no task (half of what asyncio's streams and tasks take).
"""

import asyncio
import re
import time
from collections import deque
from typing import NamedTuple, cast

import numpy as np
import uvloop

CONNECTIONS = 256
"""Opened before a stream begins; where all wait for answers, requests wait for one of them."""
ANSWERED_WITHIN_S = 60.0
"""Seconds after the last request was due within which all are answered."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Latencies(NamedTuple):
    """Of one stream of requests, in milliseconds, and how many of them failed."""

    p50: float
    p99: float
    failed: int


def stream(port: int, request: bytes, rate: float, seconds: float) -> Latencies:
    """Sends a request `rate` times a second for `seconds` to a server on this machine.

    Raises:
        TimeoutError: Not all were answered in time.
        ConnectionError: The server closed a connection.
    """
    return uvloop.run(_stream(port, request, rate, seconds))


async def _stream(port: int, request: bytes, rate: float, seconds: float) -> Latencies:
    loop = asyncio.get_running_loop()
    pace = _Pace(loop, request, rate, int(rate * seconds))
    connections = [
        await loop.create_connection(lambda: _Connection(pace), "127.0.0.1", port) for _ in range(CONNECTIONS)
    ]
    pace.begin([connection for _, connection in connections])
    async with asyncio.timeout(seconds + ANSWERED_WITHIN_S):
        await pace.done
    for transport, _ in connections:
        transport.close()
    p50, p99 = np.percentile(np.array(pace.latencies) * 1000, [50, 99])
    return Latencies(float(p50), float(p99), pace.failed)


class _Pace:
    """Sends what is due, over connections that wait for nothing.

    Attributes:
        latencies: Of each answered request, in seconds.
        failed: How many of the answers were not 200.
        done: Set when all are answered.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, request: bytes, rate: float, count: int) -> None:
        self._loop = loop
        self._request = request
        self._interval_s = 1 / rate
        self._count = count
        self._sent = 0
        self._begin_s = 0.0
        self._free: deque[_Connection] = deque()
        self.latencies: list[float] = []
        self.failed = 0
        self.done: asyncio.Future[None] = loop.create_future()

    def begin(self, connections: list["_Connection"]) -> None:
        """Begins to send."""
        self._free.extend(connections)
        self._begin_s = time.perf_counter()
        self._tick()

    def _tick(self) -> None:
        self._send()
        if self._sent < self._count:  # also where no connection is free: another look does no harm
            self._loop.call_later(self._interval_s, self._tick)

    def _send(self) -> None:
        now_s = time.perf_counter()
        while self._free and self._sent < self._count:
            due_s = self._begin_s + self._sent * self._interval_s
            if due_s > now_s:
                return
            self._sent += 1
            self._free.popleft().ask(self._request, due_s)

    def answered(self, connection: "_Connection", due_s: float, *, fine: bool) -> None:
        """Takes note of an answer; its connection is free."""
        self.latencies.append(time.perf_counter() - due_s)
        self.failed += not fine
        self._free.append(connection)
        if len(self.latencies) == self._count:
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
        self._due_s = 0.0
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is of no class of asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        self._pace.lost()

    def ask(self, request: bytes, due_s: float) -> None:
        self._due_s = due_s
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        answer = self._answer + data
        head = answer.find(b"\r\n\r\n")
        length = _LENGTH.search(answer, 0, head + 2) if head >= 0 else None
        if length is None or len(answer) < head + 4 + int(length[1]):
            self._answer = answer
            return
        self._answer = b""
        self._pace.answered(self, self._due_s, fine=answer.startswith(b"HTTP/1.1 200"))
