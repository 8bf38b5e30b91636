"""Bytes of any kind on every port: HTTP, gRPC and metrics, whole and in pieces, by clients that may hang up."""

import contextlib
import random
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from qinfer_api.rpc import frames
from tests.fuzz.gateway import FuzzedGateway
from tests.support.fuzzing import damaged, fuzz, within_limits
from tests.support.http2 import Requests, prefixed, settings_frame

pytestmark = within_limits

ANSWER_S = 15.0
"""Seconds after which a connection that its client has closed for writing is closed by the gateway, too."""
MOST_BYTES = 8 * 2**20

BODY = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
HEAD = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer KEY\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
HTTP = [
    b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"%bContent-Length: %d\r\n\r\n%b" % (HEAD, len(BODY), BODY),
    b"%bTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nX: y\r\n\r\n" % (HEAD, len(BODY), BODY),
    b"%bExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}" % HEAD,
    b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % UPGRADE,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    bytes(64),
]


def http2() -> bytes:
    """Returns a connection's bytes: a call, a stream that is reset, a ping."""
    requests = Requests()
    sent = frames.PREFACE + settings_frame((frames.INITIAL_WINDOW_SIZE, 65_535))
    for number, name in ((1, "ServerLive"), (3, "ModelInfer")):
        sent += requests.headers(number, requests.block(f"/inference.GRPCInferenceService/{name}"))
        sent += frames.frame(frames.DATA, frames.END_STREAM, number, prefixed(b"\x0a\x04echo" if number == 3 else b""))
    return sent + frames.frame(frames.PING, 0, 0, b"sign of ")


class Closed(Exception):
    """The other side has closed the connection."""


def exchange(chance: random.Random, place: tuple[str, int], data: bytes) -> None:
    """Sends bytes and reads until the other side closes, or hangs up before."""
    with socket.create_connection(place, timeout=ANSWER_S) as connection, contextlib.suppress(Closed):
        pieces = chance.choice((1, 1, 2, 7))
        for number in range(pieces):
            tell(connection.sendall, data[len(data) * number // pieces : len(data) * (number + 1) // pieces])
        if chance.random() < 0.2:
            return
        tell(connection.shutdown, socket.SHUT_WR)
        came = 0
        while part := tell(connection.recv, 2**16):
            came += len(part)
            assert came < MOST_BYTES, part[:1000]
            assert b"Traceback" not in part


def tell(do: Callable[[Any], Any], what: Any) -> Any:
    """Does something with a connection; that the other side is silent is a failure, that it has closed is none."""
    try:
        return do(what)
    except TimeoutError:
        raise
    except OSError:
        raise Closed from None


def test_all_ports(fuzzed: FuzzedGateway) -> None:
    """Whatever comes, the connection ends, and the next one is served."""
    metrics, http = urlsplit(fuzzed.metrics), urlsplit(fuzzed.http)
    rpc = urlsplit(f"grpc://{fuzzed.grpc}")
    ports = [(str(place.hostname), int(place.port or 0)) for place in (http, metrics, rpc)]
    key = fuzzed.tenants[0].key.encode()

    def one(chance: random.Random) -> None:
        for _ in range(10):
            data = chance.choice([*HTTP, *[http2()] * 5]).replace(b"KEY", key)
            data = data if chance.random() < 0.1 else damaged(chance, data)
            place = chance.choice(ports)
            try:
                exchange(chance, place, data)
            except (AssertionError, OSError) as error:
                error.add_note(f"port {ports.index(place)} of HTTP, metrics, gRPC got {data!r}"[:3000])
                raise
        fuzzed.check()

    fuzz(0.1, one)
