"""Connections that each make one request at a time, for the load generators in Python: no client of others is as cheap.

    Run                what the connections of a process share: who has something to read, what was counted
    Connection         sends requests in their order, one after the answer to the other
    HttpConnection     over HTTP/1.1
    GrpcConnection     over HTTP/2, each request a call with one answer
    StreamConnection   over HTTP/2, all requests in one call, each with a number of answers

A connection has its requests as bytes, in frames where there are any. What is answered is cut into frames and counted.
Header blocks are decoded for the first reply of each connection, where the `grpc-status` is checked; for the others the
length of the message tells, which an error does not have.
"""

import math
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hpack

LAST_ANSWERS_S = 10.0
"""How long answers are awaited when the time is over."""
HEAD_BYTES = 9
"""Before the payload of each frame of HTTP/2 (RFC 9113, section 4.1)."""
WINDOW_BYTES = 65_535
"""Bytes that a connection, or a stream, may send before the other side allows more (section 6.9.2)."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM = _ACK = 1
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_LARGEST_WINDOW_BYTES = 2**31 - 1
_WHOLE_CONNECTION = bytes(4)
_EMPTY_SETTINGS = bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
_LARGE_STREAMS = bytes((0, 0, 6, _SETTINGS, 0, 0, 0, 0, 0, 0, _INITIAL_WINDOW_SIZE)) + _LARGEST_WINDOW_BYTES.to_bytes(4)
_SETTINGS_ACK = bytes((0, 0, 0, _SETTINGS, _ACK, 0, 0, 0, 0))
_LARGE_CONNECTION = bytes((0, 0, 4, _WINDOW_UPDATE, 0, 0, 0, 0, 0)) + (_LARGEST_WINDOW_BYTES - WINDOW_BYTES).to_bytes(4)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Lays out a frame of HTTP/2 (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def call_frames(block: bytes, message: bytes, stream: int, *, end: bool = True) -> bytes:
    """Lays out a call: its headers, and a message, which is the only one if it is the `end`."""
    return frame(_HEADERS, 4, stream, block) + message_frame(message, stream, end=end)


def message_frame(message: bytes, stream: int, *, end: bool = False) -> bytes:
    """Lays out a message of a call."""
    return frame(_DATA, _END_STREAM if end else 0, stream, message)


class Run:
    """The state that the connections share.

    Args:
        address: Host and port of the server.
        reply_bytes: Length of all that answers one request of gRPC: messages with their prefixes.
        together: Requests of a connection that belong together, such as the steps of a sequence: all of them are
            sent.

    Attributes:
        poll: Tells whose socket has something to read.
        connections: Descriptor → connection.
        latencies: Nanoseconds of each good reply.
        received: Bytes of the messages of streams.
        late: Good replies after the time, which count for CPU time only.
        late_bytes: Bytes of the messages of streams after the time.
        errors: Kind of error → count.
        is_over: No requests are sent any longer but those that belong to earlier ones.
    """

    def __init__(self, address: tuple[str, int], reply_bytes: int = 0, together: int = 1) -> None:
        self.address, self.reply_bytes, self.together = address, reply_bytes, together
        self.poll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.latencies: list[int] = []
        self.received = self.late = self.late_bytes = 0
        self.errors: Counter[str] = Counter()
        self.is_over = False

    def until(self, seconds: float) -> dict[str, Any]:
        """Serves the connections for `seconds`, and then ends them; returns what `load.parse` reads."""
        cpu_s, started_at = time.process_time(), time.perf_counter()
        while time.perf_counter() - started_at < seconds:
            self._serve()
        duration_s = time.perf_counter() - started_at
        latencies = sorted(self.latencies) or [0]
        requests = len(self.latencies) + sum(self.errors.values())
        self._finish()
        return {
            "requests": requests,
            "duration_us": round(duration_s * 1e6),
            **{f"p{q}_us": latencies[math.ceil(q / 100 * len(latencies)) - 1] / 1000 for q in (50, 99)},
            "max_us": latencies[-1] / 1000,
            "client_cpu_s": time.process_time() - cpu_s,
            "late": self.late,
            "errors": self.errors,
        }

    def _serve(self) -> None:
        for descriptor, _ in self.poll.poll(0.1):
            if connection := self.connections.get(descriptor):
                connection.receive()

    def _finish(self) -> None:
        self.is_over = True
        give_up_at = time.perf_counter() + LAST_ANSWERS_S
        while self.connections and time.perf_counter() < give_up_at:
            self._serve()
        if self.connections:
            self.errors["unanswered"] = len(self.connections)
        for connection in list(self.connections.values()):
            connection.close()
        self.poll.close()


class Connection:
    """One connection, with its requests in order; opened anew when they are used up, or when the server ends it."""

    def __init__(self, run: Run, requests: Sequence[bytes]) -> None:
        self._run, self._requests = run, requests
        self.open()

    def open(self) -> None:
        """Connects and sends the first request."""
        self._socket = socket.create_connection(self._run.address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._run.poll.register(self._socket, select.EPOLLIN)
        self._run.connections[self._socket.fileno()] = self
        self._next, self._rest = 0, b""
        self._greet()
        self._ask()

    def close(self) -> None:
        """Ends the connection."""
        del self._run.connections[self._socket.fileno()]
        self._run.poll.unregister(self._socket)
        self._socket.close()

    def receive(self) -> None:
        """Reads what came, counts a reply that is complete, and sends the next request."""
        try:
            data = self._socket.recv(65_536)
        except ConnectionError:
            data = b""
        if not data:
            self._run.errors["closed"] += 1
            self._again()
        elif self._read(self._rest + data):
            self._go_on()

    def _go_on(self) -> None:
        if self._run.is_over:
            done, together = self._next - 1, self._run.together
            last = done - done % together + together - 1
            if done >= last:
                self.close()
                return
            self._next = last
        if self._next < len(self._requests):
            self._ask()
        else:
            self._again()

    def _again(self) -> None:
        self.close()
        if not self._run.is_over:
            self.open()

    def _greet(self) -> None:
        """Sends what the protocol has before requests."""

    def _ask(self) -> None:
        request = self._requests[self._next]
        self._next += 1
        self._asked_at = time.perf_counter_ns()
        self._socket.sendall(request)

    def _read(self, data: bytes) -> bool:
        """Reads what is complete and keeps the rest; returns whether the request was answered."""
        raise NotImplementedError

    def _count(self, *, good: bool, error: str) -> None:
        if not good:
            self._run.errors[error] += 1
        elif self._run.is_over:
            self._run.late += 1
        else:
            self._run.latencies.append(time.perf_counter_ns() - self._asked_at)


class HttpConnection(Connection):
    """A connection of HTTP/1.1: a good answer has status 200."""

    def _read(self, data: bytes) -> bool:
        self._rest = data
        head = data.find(b"\r\n\r\n")
        if head < 0:
            return False
        lower = data[:head].lower() + b"\r\n"
        at = lower.index(b"\r\ncontent-length:") + 17
        if len(data) - head - 4 < int(lower[at : lower.index(b"\r\n", at)]):
            return False
        self._rest = b""
        self._count(good=data[9:12] == b"200", error="status")
        return True


class GrpcConnection(Connection):
    """A connection of HTTP/2 with one call after the other."""

    settings = _EMPTY_SETTINGS

    def _greet(self) -> None:
        self._socket.sendall(_PREFACE + self.settings + _LARGE_CONNECTION)
        self._window, self._waits_for_window = WINDOW_BYTES, False
        self._received = 0
        self._decoder: hpack.Decoder | None = hpack.Decoder()

    def _ask(self) -> None:
        request = self._requests[self._next]
        body_bytes = _data_bytes(request)
        self._waits_for_window = body_bytes > self._window
        if not self._waits_for_window:
            self._window -= body_bytes
            super()._ask()

    def _read(self, data: bytes) -> bool:
        at, ended = 0, False
        while len(data) - at >= HEAD_BYTES:
            end = at + HEAD_BYTES + int.from_bytes(data[at : at + 3])
            if end > len(data):
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == _DATA:
                ended |= self._message_received(end - at - HEAD_BYTES)
            elif kind == _HEADERS:
                if self._decoder:
                    self._check_status(data[at + HEAD_BYTES : end])
                if flags & _END_STREAM:
                    self._call_ended()
                    ended = True
            else:
                ended |= self._control(kind, flags, data[at + 5 : at + HEAD_BYTES], data[at + HEAD_BYTES : end])
            at = end
        self._rest = data[at:]
        return ended

    def _message_received(self, size: int) -> bool:
        """Counts a piece of a message; returns whether the request was answered by it."""
        self._received += size
        return False

    def _call_ended(self) -> None:
        self._count(good=self._received == self._run.reply_bytes, error="length")
        self._received = 0

    def _check_status(self, block: bytes) -> None:
        """Decodes the header blocks of a connection's first reply."""
        assert self._decoder
        headers = dict(self._decoder.decode(block))
        if "grpc-status" in headers:
            self._decoder = None
            if headers["grpc-status"] != "0":
                self._run.errors["status"] += 1

    def _control(self, kind: int, flags: int, stream: bytes, payload: bytes) -> bool:
        """Does what other frames ask for; returns whether they end the call."""
        if kind == _SETTINGS and not flags & _ACK:
            _check_settings(payload)
            self._socket.sendall(_SETTINGS_ACK)
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(bytes((0, 0, 8, _PING, _ACK, 0, 0, 0, 0)) + payload)
        elif kind == _WINDOW_UPDATE and stream == _WHOLE_CONNECTION:
            self._window += int.from_bytes(payload)
            if self._waits_for_window:
                self._ask()
        elif kind in (_RST_STREAM, _GOAWAY):
            self._run.errors["reset" if kind == _RST_STREAM else "goaway"] += 1
            self._next = len(self._requests)
            return True
        return False


class StreamConnection(GrpcConnection):
    """A connection with one call, whose requests are answered by so many messages as have `reply_bytes` together.

    Its requests must be few enough for the window of the call: they fit into `WINDOW_BYTES`.
    """

    settings = _LARGE_STREAMS

    def _message_received(self, size: int) -> bool:
        if self._run.is_over:
            self._run.late_bytes += size
        else:
            self._run.received += size
        self._received += size
        if self._received < self._run.reply_bytes:
            return False
        self._count(good=self._received == self._run.reply_bytes, error="length")
        self._received = 0
        return True

    def _call_ended(self) -> None:
        self._run.errors["ended"] += 1
        self._next = len(self._requests)


def _data_bytes(frames: bytes) -> int:
    """Returns the bytes of payload in DATA frames, which alone count for windows."""
    at = total = 0
    while at < len(frames):
        size = int.from_bytes(frames[at : at + 3])
        total += size if frames[at + 3] == _DATA else 0
        at += HEAD_BYTES + size
    return total


def _check_settings(payload: bytes) -> None:
    for at in range(0, len(payload), 6):
        key, value = int.from_bytes(payload[at : at + 2]), int.from_bytes(payload[at + 2 : at + 6])
        if key == _HEADER_TABLE_SIZE and value < hpack.Encoder().header_table_size:
            raise SystemExit(f"the server takes a dynamic table of {value} bytes only; the requests need 4096")
