"""Callers that send steps of sequences, plain requests in the same way, or requests of streams; a process of its own.

`python -m benchmarks.callers CALLS SECONDS` prints a line for `load.parse`; CALLS is a `Calls` in JSON. Each caller has
one connection, and sends its next request when the one before is answered. A request is encoded when it differs from
the one before: of a sequence the first, the second and the last.
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, overload

import hpack
import msgspec
import numpy as np

from benchmarks.bodies import GRPC, GRPC_PATH, GRPC_STREAM_PATH, JSON, encode
from benchmarks.connections import (
    WINDOW_BYTES,
    Connection,
    GrpcConnection,
    HttpConnection,
    Run,
    StreamConnection,
    call_frames,
    message_frame,
)

FIRST_ID = 10**9
"""The first id has as many digits, and bytes in a varint, as those after it: all bodies have one length."""
_FOR_EVER = 2**30
"""Requests of a connection: HTTP/2 has so many calls."""


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, where to.

    Attributes:
        host: The server's address.
        port: Its port.
        model: The model that is asked.
        encoding: `json` or `grpc`.
        callers: Number of connections.
        example: The row that each request has.
        steps: Steps of a sequence; 0 = requests are no steps.
        responses: Responses to a request of a stream; 0 = requests have one answer.
        reply_bytes: Length of what answers a request of gRPC.
    """

    host: str
    port: int
    model: str
    encoding: str
    callers: int
    example: list[float]
    steps: int = 0
    responses: int = 0
    reply_bytes: int = 0

    def body(self, parameters: dict[str, int | bool]) -> bytes:
        """Encodes a request, for gRPC with its prefix."""
        return encode(self.model, self.encoding, np.array([self.example], np.float32), parameters)[0]


class Requests(Sequence[bytes]):
    """The requests of one connection, as its protocol has them.

    Args:
        calls: What is sent.
        ids: Ids of sequences that nobody else has.
    """

    def __init__(self, calls: Calls, ids: "count[int]") -> None:
        self._calls, self._ids, self._id = calls, ids, 0
        self._body = b"" if calls.steps else calls.body({})

    def __len__(self) -> int:
        return WINDOW_BYTES // len(self._body) if self._calls.responses else _FOR_EVER

    @overload
    def __getitem__(self, number: int) -> bytes: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[bytes]: ...

    def __getitem__(self, number: int | slice) -> bytes | Sequence[bytes]:
        assert isinstance(number, int)
        if self._calls.steps:
            self._encode_step(number % self._calls.steps)
        if self._calls.encoding == JSON:
            return _http_head(self._calls.model, len(self._body)) + self._body
        if not self._calls.responses:
            return call_frames(_header_block(GRPC_PATH, first=not number), self._body, 2 * number + 1)
        if number:
            return message_frame(self._body, 1)
        return call_frames(_header_block(GRPC_STREAM_PATH, first=True), self._body, 1, end=False)

    def _encode_step(self, step: int) -> None:
        last = step == self._calls.steps - 1
        if step == 0:
            self._id = next(self._ids)
        if step <= 1 or last:
            parameters = {"sequence_id": self._id, "sequence_start": step == 0, "sequence_end": last}
            self._body = self._calls.body(parameters)


@cache
def _http_head(model: str, length: int) -> bytes:
    line = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    return f"{line}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


@cache
def _header_block(path: str, *, first: bool) -> bytes:
    """Returns the headers of a connection's first call, or of the others: by then all are in the dynamic table."""
    encoder = hpack.Encoder()
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "127.0.0.1"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    blocks = [encoder.encode(headers), encoder.encode(headers)]
    return blocks[not first]


def call(calls: Calls, seconds: float) -> dict[str, Any]:
    """Makes calls for `seconds`, and then ends the sequences; returns what `load.parse` reads."""
    run = Run((calls.host, calls.port), calls.reply_bytes, calls.steps or 1)
    ids = count(FIRST_ID)
    kind: type[Connection] = GrpcConnection if calls.encoding == GRPC else HttpConnection
    for _ in range(calls.callers):
        (StreamConnection if calls.responses else kind)(run, Requests(calls, ids))
    result = run.until(seconds)
    if calls.responses:
        result["requests"] = run.received * calls.responses // calls.reply_bytes
        result["late"] = run.late_bytes * calls.responses // calls.reply_bytes
    return result


def main(arguments: list[str]) -> None:
    calls, seconds = arguments
    result = call(msgspec.json.decode(calls, type=Calls), float(seconds))
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main(sys.argv[1:])
