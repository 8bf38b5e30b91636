"""Attacks by objects, not by bytes: nested, many, empty, repeated, over every route, call and kind of body.

Whatever is sent, and however many send it at once, the gateway's memory grows by four times its largest body at most,
with a margin for what threads and allocators keep; each attack is answered as prescribed, and other callers are.
"""

import gzip
import http.client
import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from qinfer.wire.protos import grpc_service_pb2 as pb
from tests.fuzz.gateway import MAX_INPUT_BYTES, FuzzedGateway
from tests.fuzz.test_calls import DEFECTS, METHODS
from tests.support.fuzzing import fuzz, within_limits
from tests.support.threaded_gateway import is_prescribed

pytestmark = within_limits

ANSWER_S = 30.0
AT_ONCE = 3
MOST_BYTES = 4 * MAX_INPUT_BYTES + 56 * 2**20
"""What the gateway may grow by: before elements were counted, one attack took 200 to 400 MB."""
SIZE = MAX_INPUT_BYTES - 2000

ELEMENTS = ('"",', "0,", "{},", "[],", "[0],", "[[]],", "null,", '{"a":1},', "1e9,", '"\\u00e9",', "true,", " ,")
MEMBERS = ('"a":1,', '"":"",', '"a":{},', '"a":[],')
PLACES = (
    "@",
    '{"inputs":@}',
    '{"inputs":[{"name":"x","shape":[1,4],"datatype":"BYTES","data":@}]}',
    '{"inputs":[{"name":"x","shape":[1,#],"datatype":"BYTES","data":@}]}',
    '{"inputs":[{"name":"x","shape":[1,#],"datatype":"FP32","data":@}]}',
    '{"inputs":[{"name":"x","shape":[#,4],"datatype":"INT64","data":@}]}',
    '{"inputs":[{"name":"x","shape":@,"datatype":"FP32","data":[0]}]}',
    '{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[0,0,0,0]}],"outputs":@}',
    '{"inputs":[],"parameters":@}',
    '{"x":@}',
    '{"parameters":{"config":@}}',
    '{"parameters":{"file:1/model.py":@}}',
    '{"tasks":@,"project":"1"}',
    '{"tasks":[{"id":1,"data":@}],"project":"1"}',
    '{"action":"TASKS_CREATED","project":{"id":1},"tasks":@}',
    '{"model":"echo","inputs":@,"output":{"url":"x"}}',
    '{"model":"echo","inputs":["x"],"columns":@}',
    '{"stable":@}',
    '{"trace_level":@}',
    '{"log_verbose_level":@}',
)


def many(chance: random.Random, size: int) -> tuple[str, int]:
    """Returns a JSON value of many objects, and how many it has."""
    kind = chance.random()
    if kind < 0.1:
        return "[" * (size // 2) + "]" * (size // 2), 0
    if kind < 0.3:
        unit = chance.choice(MEMBERS)
        count = size // len(unit)
        return "{" + unit * count + '"z":0}', count
    unit = chance.choice(ELEMENTS)
    count = size // len(unit)
    return "[" + unit * count + unit[:-1] + "]", count + 1


def attack(chance: random.Random) -> bytes:
    """Returns a body."""
    value, count = many(chance, SIZE)
    return chance.choice(PLACES).replace("#", str(count)).replace("@", value).encode()


def all_at_once(gateway: FuzzedGateway, one: Callable[[], None]) -> None:
    """Makes some calls at the same time, and sees what they cost."""
    with gateway.growing_within(MOST_BYTES), ThreadPoolExecutor(AT_ONCE) as pool:
        calls = [pool.submit(one) for _ in range(AT_ONCE)]
        for call in calls:
            call.result()


class Routes:
    """The routes that take JSON."""

    def __init__(self, gateway: FuzzedGateway) -> None:
        self._gateway = gateway
        document = httpx.get(f"{gateway.http}/openapi.json", timeout=ANSWER_S).json()
        self._routes = [
            (method.upper(), path)
            for path, methods in document["paths"].items()
            for method, entry in methods.items()
            if "requestBody" in entry
        ]

    def attack(self, chance: random.Random) -> None:
        """Sends one body to one route, several times."""
        method, route = chance.choice(self._routes)
        values = {"model": chance.choice(("echo", "text")), "version": "1", "endpoint": "e", "region": "r"}
        path = re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], "x"), route)
        body = attack(chance)
        headers = {"authorization": f"Bearer {self._gateway.tenants[chance.choice((0, 2))].key}"}
        if chance.random() < 0.4:
            body, headers["content-encoding"] = gzip.compress(body, 1), "gzip"

        def one() -> None:
            status, text = self._answer(method, path, body, headers)
            assert status != 500 or is_prescribed(status, text), f"{status} {text}"

        try:
            all_at_once(self._gateway, one)
        except AssertionError as error:
            error.add_note(f"{method} {path} {headers} {attack_shown(body)}")
            raise

    def _answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(urlsplit(self._gateway.http).netloc, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read(3000).decode(errors="replace")
        except BrokenPipeError:  # it was refused by its head
            return 0, ""
        finally:
            connection.close()


def attack_shown(body: bytes) -> str:
    """Returns the begin of a body, as it is before compression."""
    return repr((gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)[:200])


@pytest.mark.long
def test_every_route(fuzzed: FuzzedGateway) -> None:
    routes = Routes(fuzzed)

    def one(chance: random.Random) -> None:
        routes.attack(chance)
        fuzzed.check()

    fuzz(0.15, one)


def number(value: int) -> bytes:
    """Returns a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(place: int, value: bytes) -> bytes:
    """Returns a field with a length."""
    return number(place << 3 | 2) + number(len(value)) + value


def objects(chance: random.Random, kind: Any, size: int) -> bytes:
    """Returns a message of many fields, somewhere in it."""
    lists = [one for one in kind.fields if one.message_type is not None or one.is_repeated]
    if not lists:
        return b"\x78\x00" * (size // 2)
    one = chance.choice(lists)
    if one.message_type is not None and chance.random() < 0.6:
        return field(one.number, objects(chance, one.message_type, size - 12))
    if one.message_type is None and one.cpp_type != one.CPPTYPE_STRING:
        return field(one.number, bytes([chance.choice((0, 1))]) * (size - size % 8))
    unit = field(one.number, b"a" * chance.choice((0, 0, 1)))
    return unit * (size // len(unit))


CONTENTS = {"BOOL": 1, "INT8": 2, "INT64": 3, "UINT16": 4, "UINT64": 5, "FP32": 6, "FP64": 7, "BYTES": 8}


def contents(chance: random.Random, size: int) -> bytes:
    """Returns a ModelInferRequest with many elements in the typed contents of its input."""
    datatype = chance.choice(list(CONTENTS))
    place = CONTENTS[datatype]
    if datatype == "BYTES":
        unit = field(8, b"a" * chance.choice((0, 0, 1, 200)))
        count = size // len(unit)
        data = unit * count
    else:
        width = {"FP32": 4, "FP64": 8}.get(datatype, 1)
        count = size // 8 * 8 // width
        data = field(place, b"\1" * (count * width)) if chance.random() < 0.8 else number(place << 3) * size
    shape = chance.choice(([1, count], [1, 4], [count // 4, 4], [-1], [1] * 1000))
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=shape)
    head = pb.ModelInferRequest(model_name=chance.choice(("echo", "text")))
    return bytes(head.SerializeToString()) + field(5, tensor.SerializeToString() + field(5, data))


@pytest.mark.long
def test_every_call(fuzzed: FuzzedGateway) -> None:
    with grpc.insecure_channel(fuzzed.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:

        def one(chance: random.Random) -> None:
            method = chance.choice(METHODS)
            is_infer = method.name in ("ModelInfer", "ModelStreamInfer") or chance.random() < 0.4
            path = f"/{method.containing_service.full_name}/{method.name}"
            if is_infer:
                path = f"/inference.GRPCInferenceService/{chance.choice(('ModelInfer', 'ModelStreamInfer'))}"
            is_contents = is_infer and chance.random() < 0.7
            kind = pb.ModelInferRequest.DESCRIPTOR if is_infer else method.input_type
            text = contents(chance, SIZE) if is_contents else objects(chance, kind, SIZE)
            metadata = (("authorization", f"Bearer {fuzzed.tenants[chance.choice((0, 2))].key}"),)
            packed = chance.choice((grpc.Compression.Gzip, grpc.Compression.NoCompression))

            def call() -> None:
                if path.endswith(("ModelStreamInfer", "ServerReflectionInfo")):
                    ask = channel.stream_stream(path, None, None)
                    replies = ask(iter((text,)), metadata=metadata, timeout=ANSWER_S, compression=packed)
                    status = _status(lambda: list(replies))
                else:
                    unary = channel.unary_unary(path, None, None)
                    status = _status(lambda: unary(text, metadata=metadata, timeout=ANSWER_S, compression=packed))
                assert status not in DEFECTS, f"{path}: {status}"

            try:
                all_at_once(fuzzed, call)
            except AssertionError as error:
                error.add_note(f"{path} {text[:100]!r}")
                raise
            fuzzed.check()

        fuzz(0.15, one)


def _status(ask: Callable[[], object]) -> grpc.StatusCode:
    try:
        ask()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


WORST = {
    "strings of a wrong shape": ('{"inputs":[{"name":"x","shape":[1,1],"datatype":"BYTES","data":@}]}', '"",'),
    "strings of the right shape": ('{"inputs":[{"name":"x","shape":[1,#],"datatype":"BYTES","data":@}]}', '"",'),
    "numbers": ('{"inputs":[{"name":"x","shape":[#,1],"datatype":"FP32","data":@}]}', "0,"),
    "objects": ('{"inputs":@}', "{},"),
    "arrays": ('{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":@}]}', "[],"),
}


@pytest.mark.parametrize("kind", WORST)
@pytest.mark.parametrize("route", ["/v2/models/text/infer", "/v2/models/text/generate", "/v1/models/text/requests"])
def test_json_that_grows(fuzzed: FuzzedGateway, route: str, kind: str) -> None:
    place, unit = WORST[kind]
    count = SIZE // len(unit)
    body = place.replace("#", str(count + 1)).replace("@", f"[{unit * count}{unit[:-1]}]").encode()
    headers = {"authorization": f"Bearer {fuzzed.tenants[0].key}"}

    def one() -> None:
        reply = httpx.post(f"{fuzzed.http}{route}", content=body, headers=headers, timeout=ANSWER_S)
        assert reply.status_code in (400, 500, 503), reply.text
        assert json.loads(reply.content)["error"]

    all_at_once(fuzzed, one)
    fuzzed.check()


@pytest.mark.parametrize("text", [b"\x42\x00", b"\x42\x01a"], ids=["empty", "of a byte"])
def test_strings_of_typed_contents_that_grow(fuzzed: FuzzedGateway, text: bytes) -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="BYTES", shape=[1, 1])
    head = pb.ModelInferRequest(model_name="text").SerializeToString()
    message = head + field(5, tensor.SerializeToString() + field(5, text * (SIZE // len(text))))
    metadata = (("authorization", f"Bearer {fuzzed.tenants[0].key}"),)

    with grpc.insecure_channel(fuzzed.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)

        def one() -> None:
            assert (
                _status(lambda: ask(message, metadata=metadata, timeout=ANSWER_S)) == grpc.StatusCode.INVALID_ARGUMENT
            )

        all_at_once(fuzzed, one)
    fuzzed.check()
