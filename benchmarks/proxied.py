"""Requests as they arrive behind a proxy: different bodies, and ids that no two requests share.

They are recorded before the run, byte by byte, so that making them takes no time from the servers. A recording of HTTP
holds requests, which any connection may send. One of gRPC holds for each connection what it sends in order, because a
header block depends on those before it (RFC 7541): all headers go into the dynamic table, as Envoy's and Go's encoders
put them there, and new ids push out old entries. A connection whose requests are used up is opened anew.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import hpack
import onnxruntime

from benchmarks.bodies import GRPC, GRPC_PATH, JSON, Body, encode
from benchmarks.connections import call_frames
from benchmarks.models import BenchModel

JSON_PROXIED, GRPC_PROXIED = "json-proxied", "grpc-proxied"
PLAIN = {JSON_PROXIED: JSON, GRPC_PROXIED: GRPC}
"""Encoding of a recording → that of its bodies."""
ENCODINGS = tuple(PLAIN)

MODEL = "tiny"
"""The only model: the way to a model is measured, not the model."""
CONNECTIONS = 64
REQUESTS_EACH = 1000
"""Requests of a connection in a recording of gRPC; one of HTTP has as many for all connections together."""
BODIES = 2000
CHECKED = 16
"""Number of bodies whose answers are checked before and after a measurement."""

_SEED = 11


def write_recording(model: BenchModel, encoding: str, session: onnxruntime.InferenceSession, directory: Path) -> Body:
    """Records the requests of one encoding.

    Args:
        model: The model that is asked.
        encoding: One of `ENCODINGS`.
        session: The model in process, for the expected answers.
        directory: Where the recording goes.
    """
    plain, examples = PLAIN[encoding], model.example(BODIES)
    pairs = [encode(model.name, plain, example[None]) for example in examples]
    recorded = directory / f"{model.name}.{encoding}"
    samples = []
    for number, (content, headers) in enumerate(pairs[:CHECKED]):
        expected = session.run(None, {"x": examples[number][None]})[0]
        path = recorded.with_suffix(f"{recorded.suffix}.{number}")
        path.write_bytes(content)
        samples.append(Body(model=model, encoding=plain, path=path, headers=headers, expected=expected))
    contents = [content for content, _ in pairs]
    _write(recorded, _http(model, contents) if plain == JSON else _grpc(contents))
    return replace(samples[0], encoding=encoding, path=recorded, samples=tuple(samples))


def read_recording(path: Path) -> list[bytes]:
    """Returns the requests of a recording in their order."""
    data, at, requests = path.read_bytes(), 0, []
    while at < len(data):
        end_of_line = data.index(b"\n", at)
        end = end_of_line + 1 + int(data[at:end_of_line])
        requests.append(data[end_of_line + 1 : end])
        at = end
    return requests


def _write(path: Path, requests: Iterable[bytes]) -> None:
    """Writes each request after a line with its length, which Lua reads as easily as Python."""
    with path.open("wb") as file:
        for request in requests:
            file.write(b"%d\n%b" % (len(request), request))


def _ids() -> Iterator[tuple[str, str]]:
    """Yields values of `x-request-id` (a UUID of version 4) and `traceparent`, always the same sequence."""
    generator = random.Random(_SEED)
    while True:
        a, b, c, d, e = (generator.getrandbits(bits) for bits in (32, 16, 12, 12, 48))
        trace, span = generator.getrandbits(128), generator.getrandbits(64)
        yield f"{a:08x}-{b:04x}-4{c:03x}-a{d:03x}-{e:012x}", f"00-{trace:032x}-{span:016x}-01"


def _http(model: BenchModel, contents: list[bytes]) -> Iterator[bytes]:
    line = f"POST /v2/models/{model.name}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    for number, (request_id, trace) in enumerate(islice(_ids(), CONNECTIONS * REQUESTS_EACH)):
        content = contents[number % BODIES]
        ids = f"Content-Length: {len(content)}\r\nx-request-id: {request_id}\r\ntraceparent: {trace}\r\n\r\n"
        yield (line + ids).encode() + content


def _grpc(contents: list[bytes]) -> Iterator[bytes]:
    ids, number, timeout = _ids(), count(), random.Random(_SEED)
    for _ in range(CONNECTIONS):
        encoder = hpack.Encoder()
        for stream in range(1, 2 * REQUESTS_EACH, 2):
            request_id, trace = next(ids)
            block = encoder.encode(
                [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":path", GRPC_PATH),
                    (":authority", "127.0.0.1"),
                    ("te", "trailers"),
                    ("content-type", "application/grpc"),
                    ("user-agent", "grpc-go/1.60.1"),
                    # What is left of a deadline of 30 s when the proxy passes the call on.
                    ("grpc-timeout", f"{timeout.randrange(20_000, 30_000)}m"),
                    ("x-request-id", request_id),
                    ("traceparent", trace),
                ]
            )
            content = contents[next(number) % BODIES]
            yield call_frames(block, content, stream)
