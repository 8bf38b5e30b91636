"""Attacks by objects, floods and what tenants share: each function sends something bounded once, and returns.

`python -m tests.fuzz.attacks NAME SECONDS < SERVER` repeats one of them as the tenant `evil`, at the lowest priority of
the CPU, until the time is over; `harmless` sends plain requests and computes as much as it is told to.
"""

import contextlib
import gzip
import http.client
import io
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import msgspec
import pyarrow as pa
import redis

from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer_api.rpc import frames
from tests.fuzz.server import MAX_INPUT_BYTES, MIB, WholeServer
from tests.fuzz.test_objects import field
from tests.support.http2 import Requests, settings_frame
from tests.support.jobs.arrow_bytes import file_of_one_name

ANSWER_S = 60.0
SIZE = MAX_INPUT_BYTES - 4096
RATE_BYTES = MAX_INPUT_BYTES // 4
"""What floods send at a time."""
EVIL = "evil"
INFER = "/v2/models/{}/infer"

Attack = Callable[[WholeServer], None]
ATTACKS: dict[str, Attack] = {}
"""All attacks, by what they send."""


def attack(name: str) -> Callable[[Attack], Attack]:
    """Registers an attack."""

    def register(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return register


def ask(
    server: WholeServer, path: str, body: bytes, who: str = EVIL, method: str = "POST", **headers: str
) -> tuple[int, bytes]:
    """Makes a request; returns status and body, 0 where it was refused by its head."""
    connection = http.client.HTTPConnection(server.http, timeout=ANSWER_S)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, body, {"x-api-key": server.keys[who], **named})
        reply = connection.getresponse()
        return reply.status, reply.read()
    except (BrokenPipeError, ConnectionResetError):
        return 0, b""
    finally:
        connection.close()


def many(unit: str, size: int = SIZE) -> tuple[bytes, int]:
    """Returns an array of many values, and how many it has."""
    count = size // len(unit)
    return f"[{unit * count}{unit[:-1]}]".encode(), count + 1


def request(data: bytes, shape: str, datatype: str = "BYTES") -> bytes:
    """Returns an infer request."""
    head = f'{{"inputs":[{{"name":"x","shape":{shape},"datatype":"{datatype}","data":'
    return b"%b%b}]}" % (head.encode(), data)


def sends(
    path: str, body: Callable[[], bytes], who: str = EVIL, method: str = "POST", *, packed: bool = False
) -> Attack:
    """Returns an attack that sends one body by HTTP."""

    def send(server: WholeServer) -> None:
        text, headers = body(), {}
        if packed:
            text, headers = gzip.compress(text, 1), {"content_encoding": "gzip"}
        status, answer = ask(server, path, text, who, method, **headers)
        assert status != 500 or b"error" in answer, answer[:300]

    return send


def valid_strings() -> bytes:
    """Returns as many empty strings as a request may have, or as fit."""
    data, count = many('"",', min(SIZE, 2_900_000))
    return request(data, f"[1,{count}]")


def valid_numbers() -> bytes:
    """Returns numbers that are as long as they can be: half of the largest body."""
    data, count = many("-1.2345678e-30,", SIZE // 2)
    return request(data, f"[1,{count}]", "FP32")


def config(fields: bytes) -> bytes:
    """Returns a load with a `config` override."""
    text = json.dumps(fields.decode())
    return f'{{"parameters":{{"config":{text}}}}}'.encode()


NESTED = b"[" * (SIZE // 2) + b"]" * (SIZE // 2)
LOAD = "/v2/repository/models/text/load"
ATTACKS |= {
    "JSON: nested arrays": sends(INFER.format("text"), lambda: b'{"inputs":%b}' % NESTED),
    "JSON: empty strings, of another shape": sends(INFER.format("text"), lambda: request(many('"",')[0], "[1,1]")),
    "JSON: the same, 1000 times smaller by gzip": sends(
        INFER.format("text"), lambda: request(many('"",')[0], "[1,1]"), packed=True
    ),
    "JSON: as many strings as may be": sends(INFER.format("text"), valid_strings),
    "JSON: a string of quotes without an end": sends(
        INFER.format("text"), lambda: b'{"inputs":[{"name":"' + b'\\"' * (SIZE // 2)
    ),
    "JSON: empty objects": sends(INFER.format("text"), lambda: b'{"inputs":%b}' % many("{},")[0]),
    "JSON: empty arrays as data": sends(INFER.format("text"), lambda: request(many("[],")[0], "[1,4]", "FP32")),
    "JSON: one member again and again": sends(
        INFER.format("text"), lambda: b'{"parameters":{%b"z":0}}' % (b'"a":1,' * (SIZE // 6))
    ),
    "JSON: nothing but commas and spaces": sends(INFER.format("text"), lambda: b'{"inputs":%b}' % many(" ,")[0]),
    "JSON: long numbers and their answer": sends(INFER.format("identity_fp32"), valid_numbers),
    "generate: empty arrays": sends("/v2/models/text/generate", lambda: b'{"x":%b}' % many("[],")[0]),
    "generate: empty strings": sends("/v2/models/text/generate", lambda: b'{"x":%b}' % many('"",')[0]),
    "stored request: empty objects": sends("/v1/models/text/requests", lambda: b'{"inputs":%b}' % many("{},")[0]),
    "infer_stream: empty strings": sends("/v1/models/text/infer_stream", lambda: request(many('"",')[0], "[1,1]")),
    "Label Studio predict: empty tasks": sends(
        "/label-studio/text/predict", lambda: b'{"project":"2","tasks":%b}' % many("{},")[0]
    ),
    "Label Studio predict: nested data": sends(
        "/label-studio/text/predict", lambda: b'{"project":"2","tasks":[{"id":1,"data":{"text":%b}}]}' % NESTED
    ),
    "Label Studio webhook: empty arrays": sends(
        "/label-studio/text/webhook",
        lambda: b'{"action":"TASKS_CREATED","project":{"id":2},"tasks":%b}' % many("[],")[0],
    ),
    "Label Studio setup: a schema of many objects": sends(
        "/label-studio/text/setup", lambda: b'{"project":"2.1","schema":%b}' % many("{},")[0]
    ),
    "endpoint: targets": sends("/v1/endpoints/e", lambda: b'{"targets":%b}' % many("{},")[0], "root", "PUT"),
    "endpoint: nested conditions": sends("/v1/endpoints/e", lambda: b'{"rules":%b}' % NESTED, "root", "PUT"),
    "config override: inputs": sends(LOAD, lambda: config(b'{"input":%b}' % many("{},", SIZE // 4)[0]), "root"),
    "config override: nested": sends(
        LOAD, lambda: config(b'{"parameters":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001), "root"
    ),
    "config override: one field again and again": sends(
        LOAD, lambda: config(b'{"backend":"python"%b}' % (b',"max_batch_size":1' * (SIZE // 40))), "root"
    ),
    "jobs: inputs": sends("/v1/jobs", lambda: b'{"model":"text","inputs":%b,"output":{"url":"x"}}' % many("{},")[0]),
    "repository index: empty objects": sends("/v2/repository/index", lambda: b'{"a":%b}' % many("{},")[0]),
}


def tensor(datatype: bytes, shape: bytes, contents: bytes, model: bytes = b"text") -> bytes:
    """Returns a ModelInferRequest with typed contents."""
    entry = field(1, b"x") + field(2, datatype) + field(3, shape) + field(5, contents)
    return field(1, model) + field(5, entry)


def calls(message: Callable[[], bytes], method: str = "ModelInfer", who: str = EVIL, *, packed: bool = True) -> Attack:
    """Returns an attack that sends one message by gRPC, compressed unless told otherwise."""

    def call(server: WholeServer) -> None:
        how = grpc.Compression.Gzip if packed else grpc.Compression.NoCompression
        path = f"/inference.GRPCInferenceService/{method}"
        asked: dict[str, Any] = {
            "metadata": (("x-api-key", server.keys[who]),),
            "timeout": ANSWER_S,
            "compression": how,
        }
        with (
            grpc.insecure_channel(server.grpc, options=[("grpc.max_send_message_length", -1)]) as channel,
            contextlib.suppress(grpc.RpcError),
        ):
            if method == "ModelStreamInfer":
                list(channel.stream_stream(path, None, None)(iter((message(),)), **asked))
            else:
                channel.unary_unary(path, None, None)(message(), **asked)

    return call


EMPTY = field(8, b"") * (SIZE // 2)
ATTACKS |= {
    "gRPC: empty bytes_contents": calls(lambda: tensor(b"BYTES", b"\1\1", EMPTY), packed=False),
    "gRPC: the same by gzip": calls(lambda: tensor(b"BYTES", b"\1\1", EMPTY)),
    "gRPC: the same on a stream": calls(lambda: tensor(b"BYTES", b"\1\1", EMPTY), "ModelStreamInfer"),
    "gRPC: bytes_contents of a byte": calls(lambda: tensor(b"BYTES", b"\1\1", field(8, b"a") * (SIZE // 3))),
    "gRPC: packed bools": calls(lambda: tensor(b"BOOL", b"\1\1", field(1, b"\1" * SIZE))),
    "gRPC: packed integers": calls(lambda: tensor(b"INT64", b"\1\1", field(3, b"\1" * SIZE))),
    "gRPC: integers one by one": calls(lambda: tensor(b"INT64", b"\1\1", b"\x18\1" * (SIZE // 2))),
    "gRPC: empty inputs": calls(lambda: field(1, b"text") + field(5, b"") * (SIZE // 2)),
    "gRPC: empty raw_input_contents": calls(lambda: field(1, b"text") + field(7, b"") * (SIZE // 2)),
    "gRPC: one parameter again and again": calls(
        lambda: field(1, b"text") + field(4, field(1, b"a") + field(2, b"\x10\1")) * (SIZE // 11)
    ),
    "gRPC: config override": calls(
        lambda: (
            field(2, b"text")
            + field(3, field(1, b"config") + field(2, field(3, b'{"input":%b}' % many("{},", SIZE // 4)[0])))
        ),
        "RepositoryModelLoad",
        "root",
    ),
}


@attack("answers of tiny requests: 100 times the largest body")
def wide(server: WholeServer) -> None:
    """Asks for large answers on many connections, and reads them late."""
    count = MAX_INPUT_BYTES // 16
    body = request(b"[%d]" % count, "[1,1]", "FP32")
    head = f"POST {INFER.format('wide')} HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.keys[EVIL]}\r\n"
    text = head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with contextlib.ExitStack() as held:
        made = [held.enter_context(connected(server.http)) for _ in range(16)]
        for one in made:
            one.sendall(text * 8)
        time.sleep(2.0)
        for one in made:
            one.settimeout(0.5)
            with contextlib.suppress(OSError):
                one.recv(2**20)


def connected(address: str) -> socket.socket:
    """Connects to an address."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=ANSWER_S)


ARROWS: dict[str, Callable[[], bytes]] = {
    "columns of one long name": lambda: file_of_one_name("x" * MIB, 2000),
    "a hundred thousand columns": lambda: ipc(pa.schema([(f"c{number}", pa.null()) for number in range(100_000)])),
    "types nested a thousand deep": lambda: ipc(pa.schema([("x", nested_type(1000))])),
    "a million empty record batches": lambda: batches(SIZE // 400),
    "empty strings": lambda: ipc(pa.schema([("x", pa.string())]), pa.table({"x": pa.array([""] * (SIZE // 4))})),
    "a run of 2^31 rows": lambda: ipc(
        pa.schema([("x", pa.run_end_encoded(pa.int32(), pa.string()))]),
        pa.table({"x": pa.RunEndEncodedArray.from_arrays(pa.array([2**31 - 1], pa.int32()), pa.array(["a"]))}),
    ),
}


def nested_type(depth: int) -> pa.DataType:
    """Returns lists within lists."""
    kind = pa.int8()
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


def ipc(schema: pa.Schema, table: pa.Table | None = None) -> bytes:
    """Returns an Arrow file."""
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema) as writer:
        if table is not None:
            writer.write_table(table)
    return sink.getvalue()


def batches(count: int) -> bytes:
    """Returns an Arrow file of many record batches without rows."""
    sink, schema = io.BytesIO(), pa.schema([("x", pa.string())])
    empty = pa.record_batch({"x": pa.array([], pa.string())})
    with pa.ipc.new_file(sink, schema) as writer:
        for _ in range(count):
            writer.write_batch(empty)
    return sink.getvalue()


def job_of(name: str, data: Callable[[], bytes]) -> Attack:
    """Returns an attack that has a job's file examined."""

    def send(server: WholeServer) -> None:
        file = server.folder / "lake" / EVIL / f"{name.replace(' ', '-')}-{time.monotonic_ns()}.arrow"
        file.write_bytes(data())
        spec = {"model": "text", "inputs": [f"file://{file}"], "output": {"url": f"{file.parent.as_uri()}/out"}}
        try:
            status, answer = ask(server, "/v1/jobs/validate", json.dumps(spec).encode())
            assert status < 500 or b"error" in answer, answer[:300]
        finally:
            file.unlink()

    return send


ATTACKS |= {f"Arrow: {name}": job_of(name, data) for name, data in ARROWS.items()}

HEADERS: dict[str, Callable[[], bytes]] = {
    "nils": lambda: b"\xdd" + struct.pack(">I", SIZE) + b"\xc0" * SIZE,
    "nested arrays": lambda: b"\x91" * SIZE,
    "empty maps": lambda: b"\xdd" + struct.pack(">I", SIZE) + b"\x80" * SIZE,
    "more elements than bytes": lambda: b"\xdd\xff\xff\xff\xff" + b"\xc0" * 1000,
    "parameters": lambda: header({str(number): None for number in range(200_000)}),
    "inputs": lambda: header({}, [("x", "FP32", (1,), 0, 4)] * 80_000),
}


def header(parameters: Any, inputs: Any = ()) -> bytes:
    """Returns the header of a request."""
    fields = ["id", "", "text", 1, list(inputs), [], parameters, 0, 10**7, "", "", "", 0, 1, 0, None, ""]
    return msgspec.msgpack.encode(fields)


def frame_of(kind: int, data: Callable[[], bytes]) -> Attack:
    """Returns an attack that writes a frame to Redis: to a lane, or to the reply streams of the gateways."""

    def send(server: WholeServer) -> None:
        text = data()
        frame = struct.pack("<BBHI", 1, kind, 0, len(text)) + text
        with redis.Redis(unix_socket_path=server.redis) as client:
            if kind == 0:
                client.xadd(keys.lane(Lane("text", 1)), {b"f": frame})
                return
            for name in client.scan_iter("*reply*gateway-*", count=1000):
                client.xadd(name, {b"r": frame})

    return send


ATTACKS |= {f"frame in a lane: {name}": frame_of(0, data) for name, data in HEADERS.items()}
ATTACKS |= {
    f"frame in a reply stream: {name}": frame_of(1, data)
    for name, data in HEADERS.items()
    if name in ("nils", "nested arrays", "empty maps")
}


@attack("pipelined requests that are not read")
def pipelined(server: WholeServer) -> None:
    """Sends heads of 18 bytes, and closes."""
    line = b"GET / HTTP/1.1\r\n\r\n"
    with contextlib.ExitStack() as held:
        for _ in range(4):
            one = held.enter_context(connected(server.http))
            one.settimeout(2.0)
            with contextlib.suppress(OSError):
                one.sendall(line * (262_144 // len(line)))


def http2(server: WholeServer) -> socket.socket:
    """Begins a connection of HTTP/2."""
    one = connected(server.grpc)
    one.sendall(frames.PREFACE + settings_frame())
    return one


def heads(server: WholeServer, count: int) -> list[bytes]:
    """Returns the heads of calls."""
    requests, key = Requests(), ("x-api-key", server.keys[EVIL])
    blocks = [requests.block("/inference.GRPCInferenceService/ModelInfer", key) for _ in range(count)]
    return [frames.frame(frames.HEADERS, frames.END_HEADERS, 2 * place + 1, one) for place, one in enumerate(blocks)]


@attack("HTTP/2: claims of large messages that drip")
def claims(server: WholeServer) -> None:
    """Announces messages, and sends ten bytes of each."""
    prefix = b"\0" + (SIZE * 3 // 4).to_bytes(4, "big") + b"a" * 10
    with contextlib.closing(http2(server)) as one, contextlib.suppress(OSError):
        for place, head in enumerate(heads(server, 60)):
            one.sendall(head + frames.frame(frames.DATA, 0, 2 * place + 1, prefix))
        time.sleep(2.0)


@attack("HTTP/2: settings")
def settings(server: WholeServer) -> None:
    """Sends frames of many settings."""
    one_frame = frames.frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535) * 2500)
    with contextlib.closing(http2(server)) as one, contextlib.suppress(OSError):
        for _ in range(200):
            one.sendall(one_frame)


@attack("HTTP/2: streams that are reset at once")
def resets(server: WholeServer) -> None:
    """Opens calls and resets them."""
    with contextlib.closing(http2(server)) as one, contextlib.suppress(OSError):
        for place, head in enumerate(heads(server, 500)):
            one.sendall(head + frames.frame(frames.RST_STREAM, 0, 2 * place + 1, b"\0\0\0\x08"))


@attack("shares: long polls")
def polls(server: WholeServer) -> None:
    """Waits for a request that does not end, on many connections."""
    body = request(b"[1]", "[1,1]", "FP32")
    _, answer = ask(server, "/v1/models/slow/requests", body)
    identity = json.loads(answer).get("id", "none")
    line = f"GET /v1/requests/{identity}/result?wait=60 HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.keys[EVIL]}\r\n\r\n"
    with contextlib.ExitStack() as held:
        for _ in range(200):
            held.enter_context(connected(server.http)).sendall(line.encode())
        time.sleep(1.0)


@attack("shares: stored results")
def stored(server: WholeServer) -> None:
    """Has large results stored, and removes them."""
    made = []
    for _ in range(4):
        status, answer = ask(server, "/v1/models/wide/requests", request(b"[%d]" % (4 * MIB), "[1,1]", "FP32"))
        if status == 202:
            made.append(json.loads(answer)["id"])
    time.sleep(2.0)
    for identity in made:
        ask(server, f"/v1/requests/{identity}", b"", method="DELETE")


@attack("shares: streams that are not read")
def unread(server: WholeServer) -> None:
    """Begins streams of a decoupled model, and reads nothing."""
    body = request(b"[1]", "[1]", "FP32")
    head = f"POST /v2/models/many/generate_stream HTTP/1.1\r\nHost: x\r\nX-API-Key: {server.keys[EVIL]}\r\n"
    body = b'{"x":[1]}'
    with contextlib.ExitStack() as held:
        for _ in range(8):
            one = held.enter_context(connected(server.http))
            one.sendall(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        time.sleep(2.0)


@attack("shares: slots of sequences")
def slots(server: WholeServer) -> None:
    """Begins sequences that it does not end."""
    for number in range(16):
        parameters = {"sequence_id": 1000 + number, "sequence_start": True}
        entry = {"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}
        body = {"inputs": [entry], "parameters": parameters}
        ask(server, INFER.format("accumulator"), json.dumps(body).encode(), request_timeout="1")


@attack("shares: a model that calls itself")
def calls_itself(server: WholeServer) -> None:
    """Begins chains of calls without end."""
    ask(server, INFER.format("calls"), request(b"[1]", "[1]", "FP32"), request_timeout="2")


@attack("shares: regions of shared memory")
def regions(server: WholeServer) -> None:
    """Registers, lists and unregisters regions, also those of others."""
    body = json.dumps({"key": "/qinfer-acme", "offset": 0, "byte_size": 64}).encode()
    for name in ("acme", "mine"):
        ask(server, f"/v2/systemsharedmemory/region/{name}/register", body)
    ask(server, "/v2/systemsharedmemory/status", b"", method="GET")
    ask(server, "/v2/systemsharedmemory/unregister", b"{}")


@attack("plain requests, as fast as they are answered")
def flood(server: WholeServer) -> None:
    """Sends plain requests one after the other."""
    body = request(b"[1]", "[1,1]", "FP32")
    for _ in range(200):
        ask(server, INFER.format("identity_fp32"), body)


def repeat(server: WholeServer, name: str, seconds: float) -> None:
    """Repeats an attack until the time is over."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            ATTACKS[name](server)


def harmless(server: WholeServer, seconds: float) -> None:
    """Sends plain requests, and computes; each line of standard input says how long to pause and how much to compute.

    The line is two numbers: the seconds between two requests of a connection, and the part of a CPU that is used.
    """
    until_s, told = time.monotonic() + seconds, [0.01, 0.0]
    threads = [threading.Thread(target=ask_plainly, args=(server, until_s, told), daemon=True) for _ in range(4)]
    threads += [threading.Thread(target=listen, args=(told,), daemon=True)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until_s:
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < 0.05 * told[1]:
            pass
        time.sleep(0.05 * (1.0 - told[1]) + 0.001)


def listen(told: list[float]) -> None:
    """Takes what it is told by standard input."""
    for line in sys.stdin:
        told[:] = map(float, line.split())


def ask_plainly(server: WholeServer, until_s: float, told: list[float]) -> None:
    """Sends plain requests over one connection."""
    body = request(b"[1]", "[1,1]", "FP32")
    connection = http.client.HTTPConnection(server.http, timeout=ANSWER_S)
    while time.monotonic() < until_s:
        connection.request("POST", INFER.format("identity_fp32"), body, {"x-api-key": server.keys[EVIL]})
        connection.getresponse().read()
        time.sleep(told[0])


def main() -> None:
    """Runs the program."""
    name, seconds = sys.argv[1], float(sys.argv[2])
    os.nice(19)
    server = WholeServer.load(sys.stdin.readline())
    if name == "harmless":
        harmless(server, seconds)
    else:
        repeat(server, name, seconds)


if __name__ == "__main__":
    main()
