"""The gRPC client of a recording: connections that each make one call at a time, in a process of its own.

`python -m benchmarks.replay HOST PORT RECORDING SECONDS REPLY_BYTES` prints a line for `load.parse`. h2load can't do
this: its headers are the same in every call. What a call sends was laid out before; what is answered is cut into frames
and counted. Header blocks are decoded for the first reply of each connection, where the `grpc-status` is checked; for
the others the length of the message tells, which an error does not have.
"""

import json
import math
import select
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hpack

from benchmarks.proxied import REQUESTS_EACH, read_recording

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM = _ACK = 1
_HEADER_TABLE_SIZE = 1
_HEAD_BYTES = 9
_WINDOW_BYTES = 65_535
"""Bytes that a connection may send before the server allows more (RFC 9113, section 6.9.2)."""
_WHOLE_CONNECTION = bytes(4)
_EMPTY_SETTINGS = bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
_SETTINGS_ACK = bytes((0, 0, 0, _SETTINGS, _ACK, 0, 0, 0, 0))
_LARGEST_WINDOW = bytes((0, 0, 4, _WINDOW_UPDATE, 0, 0, 0, 0, 0)) + (2**31 - 1 - _WINDOW_BYTES).to_bytes(4, "big")


class Run:
    """The state that the connections share.

    Attributes:
        poll: Tells whose socket has something to read.
        connections: Descriptor → connection.
        reply_bytes: Length of a good reply's message with its prefix.
        latencies: Nanoseconds of each good reply.
        errors: Kind of error → count.
    """

    def __init__(self, reply_bytes: int) -> None:
        self.poll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.reply_bytes = reply_bytes
        self.latencies: list[int] = []
        self.errors: Counter[str] = Counter()


class Connection:
    """One connection, with its calls in order; opened anew when they are used up, or when the server ends it."""

    def __init__(self, run: Run, address: tuple[str, int], requests: list[bytes]) -> None:
        self._run, self._address, self._requests = run, address, requests
        self.open()

    def open(self) -> None:
        """Connects and makes the first call."""
        self._socket = socket.create_connection(self._address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(_PREFACE + _EMPTY_SETTINGS + _LARGEST_WINDOW)
        self._run.poll.register(self._socket, select.EPOLLIN)
        self._run.connections[self._socket.fileno()] = self
        self._next, self._window, self._waits_for_window = 0, _WINDOW_BYTES, False
        self._rest, self._received = b"", 0
        self._decoder: hpack.Decoder | None = hpack.Decoder()
        self._ask()

    def close(self) -> None:
        """Ends the connection."""
        del self._run.connections[self._socket.fileno()]
        self._run.poll.unregister(self._socket)
        self._socket.close()

    def receive(self) -> None:
        """Reads what came, counts a reply that is complete, and makes the next call."""
        try:
            data = self._socket.recv(65_536)
        except ConnectionError:
            data = b""
        if not data:
            self._run.errors["closed"] += 1
            self._again()
        elif self._read(self._rest + data):
            if self._next < len(self._requests):
                self._ask()
            else:
                self._again()

    def _again(self) -> None:
        self.close()
        self.open()

    def _ask(self) -> None:
        request = self._requests[self._next]
        body_bytes = len(request) - 2 * _HEAD_BYTES - int.from_bytes(request[:3], "big")
        self._waits_for_window = body_bytes > self._window
        if self._waits_for_window:
            return
        self._window -= body_bytes
        self._next += 1
        self._asked_at = time.perf_counter_ns()
        self._socket.sendall(request)

    def _read(self, data: bytes) -> bool:
        """Reads whole frames and keeps the rest; returns whether the call has ended."""
        at, ended = 0, False
        while len(data) - at >= _HEAD_BYTES:
            end = at + _HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
            if end > len(data):
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == _DATA:
                self._received += end - at - _HEAD_BYTES
            elif kind == _HEADERS:
                if self._decoder:
                    self._check_status(data[at + _HEAD_BYTES : end])
                if flags & _END_STREAM:
                    ended = True
                    self._count()
            else:
                ended |= self._control(kind, flags, data[at + 5 : at + _HEAD_BYTES], data[at + _HEAD_BYTES : end])
            at = end
        self._rest = data[at:]
        return ended

    def _check_status(self, block: bytes) -> None:
        """Decodes the header blocks of a connection's first reply."""
        assert self._decoder
        headers = dict(self._decoder.decode(block))
        if "grpc-status" in headers:
            self._decoder = None
            if headers["grpc-status"] != "0":
                self._run.errors["status"] += 1

    def _count(self) -> None:
        if self._received == self._run.reply_bytes:
            self._run.latencies.append(time.perf_counter_ns() - self._asked_at)
        else:
            self._run.errors["length"] += 1
        self._received = 0

    def _control(self, kind: int, flags: int, stream: bytes, payload: bytes) -> bool:
        """Does what other frames ask for; returns whether they end the call."""
        if kind == _SETTINGS and not flags & _ACK:
            _check_settings(payload)
            self._socket.sendall(_SETTINGS_ACK)
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(bytes((0, 0, 8, _PING, _ACK, 0, 0, 0, 0)) + payload)
        elif kind == _WINDOW_UPDATE and stream == _WHOLE_CONNECTION:
            self._window += int.from_bytes(payload, "big")
            if self._waits_for_window:
                self._ask()
        elif kind in (_RST_STREAM, _GOAWAY):
            self._run.errors["reset" if kind == _RST_STREAM else "goaway"] += 1
            self._next = len(self._requests)
            return True
        return False


def _check_settings(payload: bytes) -> None:
    for at in range(0, len(payload), 6):
        key, value = int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
        if key == _HEADER_TABLE_SIZE and value < hpack.Encoder().header_table_size:
            raise SystemExit(f"the server takes a dynamic table of {value} bytes only; the recording needs 4096")


def replay(address: tuple[str, int], requests: list[bytes], seconds: float, reply_bytes: int) -> dict[str, Any]:
    """Makes calls for `seconds`, and returns what `load.parse` reads."""
    run = Run(reply_bytes)
    cpu_s, started_at = time.process_time(), time.perf_counter()
    for first in range(0, len(requests), REQUESTS_EACH):
        Connection(run, address, requests[first : first + REQUESTS_EACH])
    while time.perf_counter() - started_at < seconds:
        for descriptor, _ in run.poll.poll(0.1):
            run.connections[descriptor].receive()
    duration_s, cpu_s = time.perf_counter() - started_at, time.process_time() - cpu_s
    for connection in list(run.connections.values()):
        connection.close()
    run.poll.close()
    latencies = sorted(run.latencies) or [0]
    return {
        "requests": len(run.latencies) + sum(run.errors.values()),
        "duration_us": round(duration_s * 1e6),
        **{f"p{q}_us": latencies[math.ceil(q / 100 * len(latencies)) - 1] / 1000 for q in (50, 99)},
        "max_us": latencies[-1] / 1000,
        "client_cpu_s": cpu_s,
        "errors": run.errors,
    }


def main(arguments: list[str]) -> None:
    host, port, recording, seconds, reply_bytes = arguments
    result = replay((host, int(port)), read_recording(Path(recording)), float(seconds), int(reply_bytes))
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main(sys.argv[1:])
