"""The extensions of infer, the same through every way: the fast path, the route with the fast path off, by header."""

import gzip
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from qinfer.tensors import pack_bytes
from tests.support.gateway import Running, running_gateway, settings_of

WAYS = ("fast", "route", "encoded", "large")
URL = "/v2/models/echo/infer"
JSON_LENGTH = "inference-header-content-length"
Ask = Callable[..., Awaitable[httpx.Response]]

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one gateway for each way


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(way: str) -> AsyncIterator[Running]:
    settings = settings_of({"fast_path": way != "route", "header_forward_pattern": "x-tell-.*|told_.*"})
    async with running_gateway(settings) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ask(running: Running, way: str) -> AsyncIterator[Ask]:
    """Posts a body: `encoded` with gzip both ways, `large` with so much white space that it is decoded in a thread."""
    accept = "gzip" if way == "encoded" else "identity"
    async with httpx.AsyncClient(base_url=running.url, headers={"accept-encoding": accept}) as client:

        async def post(url: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = dict(headers or {})
            if way == "encoded":
                content, headers["content-encoding"] = gzip.compress(content), "gzip"
            if way == "large" and JSON_LENGTH not in headers:
                content += b" " * 300_000
            return await client.post(url, content=content, headers=headers)

        yield post


def question(values: list[float], rows: int = 1, **changes: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [rows, 4], "datatype": "FP32", "data": values}], **changes}


def wanted(**parameters: Any) -> list[dict[str, Any]]:
    return [{"name": "y", "parameters": parameters}]


async def test_the_best_classes(ask: Ask) -> None:
    """Ranked row by row, with the model's labels where it has them."""
    body = question([0.1, 0.5, 0.2, 0.9, 4, 3, 2, 1], rows=2, outputs=wanted(classification=2))

    reply = await ask(URL, body)

    assert reply.json()["outputs"] == [
        {
            "name": "y",
            "datatype": "BYTES",
            "shape": [2, 2],
            "data": ["0.900000:3", "0.500000:1:one", "4.000000:0:zero", "3.000000:1:one"],
        }
    ]


async def test_the_best_classes_as_binary_data(ask: Ask) -> None:
    """In the layout of BYTES; more classes than there are elements are no mistake."""
    body = question([1, 2, 3, 4], outputs=wanted(classification=9, binary_data=True))

    reply = await ask(URL, body)

    length = int(reply.headers[JSON_LENGTH])
    raw = pack_bytes([b"4.000000:3", b"3.000000:2:two", b"2.000000:1:one", b"1.000000:0:zero"])
    assert reply.content[length:] == raw
    assert json.loads(reply.content[:length])["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [1, 4], "parameters": {"binary_data_size": len(raw)}}
    ]


async def test_classes_of_a_datatype_that_has_none(ask: Ask) -> None:
    """Triton's text."""
    inputs = [{"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}]

    reply = await ask("/v2/models/text/infer", {"inputs": inputs, "outputs": wanted(classification=1)})

    assert reply.status_code == 400
    assert reply.json()["error"] == "class result not available for output due to unsupported type 'BYTES'"


async def test_an_output_asked_for_twice(ask: Ask) -> None:
    """Triton's text."""
    reply = await ask(URL, question([1, 2, 3, 4], outputs=[*wanted(), *wanted()]))

    assert reply.status_code == 400
    request_id = reply.headers["qinfer-request-id"]
    assert reply.json()["error"] == f"[request id: {request_id}] output 'y' already exists in request"


async def test_a_raw_binary_request(ask: Ask) -> None:
    """No JSON: the body is the one input, in one row; all outputs are binary."""
    raw = np.arange(4, dtype="<f4").tobytes()

    reply = await ask(URL, raw, {JSON_LENGTH: "0"})

    length = int(reply.headers[JSON_LENGTH])
    assert json.loads(reply.content[:length])["outputs"][0]["shape"] == [1, 4]
    assert reply.content[length:] == raw


@pytest.mark.parametrize(
    ("model", "raw", "shape", "back"),
    [
        ("vary", bytes(24), [2, 3], bytes(24)),
        ("one", b"abc", [1], b"\x03\0\0\0abc"),
        ("half", bytes(4), [1, 2], bytes(4)),
    ],
)
async def test_raw_requests_of_other_shapes(ask: Ask, model: str, raw: bytes, shape: list[int], back: bytes) -> None:
    """One variable dimension, one element of BYTES, a datatype without JSON."""
    reply = await ask(f"/v2/models/{model}/versions/1/infer", raw, {JSON_LENGTH: "0"})

    length = int(reply.headers[JSON_LENGTH])
    assert json.loads(reply.content[:length])["outputs"][0]["shape"] == shape
    assert reply.content[length:] == back


@pytest.mark.parametrize(
    ("model", "raw", "status", "text"),
    [
        (
            "pair",
            bytes(8),
            400,
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'pair'",
        ),
        ("wide", bytes(8), 400, "The shape of the raw input 'x' can not be deduced"),
        ("text", b"abc", 400, "For BYTE datatype raw input 'x', the model must have input shape [1]"),
        ("echo", bytes(15), 400, "input byte size mismatch for input 'x' for model 'echo'. Expected 16, got 15"),
        ("nope", bytes(16), 404, "Request for unknown model: 'nope' is not found"),
    ],
)
async def test_raw_requests_that_can_not_be_read(ask: Ask, model: str, raw: bytes, status: int, text: str) -> None:
    """Triton's texts."""
    reply = await ask(f"/v2/models/{model}/infer", raw, {JSON_LENGTH: "0"})

    assert (reply.status_code, text in reply.json()["error"]) == (status, True), reply.text


async def test_binary_and_json_outputs_mix(ask: Ask) -> None:
    """An output's own `binary_data` goes before the request's `binary_data_output`."""
    inputs = [{"name": name, "shape": [1, 2], "datatype": "INT32", "data": [1, 2]} for name in "ab"]
    outputs = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}]
    body = {"inputs": inputs, "outputs": outputs, "parameters": {"binary_data_output": True}}

    reply = await ask("/v2/models/pair/infer", body)

    length = int(reply.headers[JSON_LENGTH])
    first, second = json.loads(reply.content[:length])["outputs"]
    assert first["parameters"] == {"binary_data_size": 8}
    assert second["data"] == [1, 2]
    assert reply.content[length:] == struct.pack("<2i", 1, 2)


async def test_what_a_model_says_besides_its_outputs(ask: Ask) -> None:
    """Parameters of all four types, there and back."""
    told = {"told_text": "a", "told_int": 1, "told_bool": True, "told_double": 0.5}

    reply = await ask(URL, question([1, 2, 3, 4], id="7", parameters=told))

    assert reply.json()["parameters"] == told
    assert set(reply.json()) == {"id", "model_name", "model_version", "parameters", "outputs"}


async def test_headers_become_parameters(ask: Ask, running: Running) -> None:
    """Those whose names match, as they were sent, instead of parameters of the same name."""
    headers = {"X-Tell-Tenant": "a", "Told_Text": "b", "X-Other": "c", "told_int": "d"}

    reply = await ask(URL, question([1, 2, 3, 4], parameters={"told_int": 1, "mine": 2}), headers)

    assert running.requests[-1].parameters == {"X-Tell-Tenant": "a", "Told_Text": "b", "told_int": "d", "mine": 2}
    assert reply.json()["parameters"] == {"told_int": "d"}


@pytest.mark.parametrize("responses", [2, 5])
async def test_several_responses_are_refused(ask: Ask, running: Running, responses: int) -> None:
    """Infer over HTTP has one; whoever gives more is a decoupled model. Nothing is left behind."""
    reply = await ask(URL, question([1, 2, 3, 4], parameters={"responses": responses}))

    assert reply.status_code == 501
    assert reply.json()["error"] == "HTTP end point doesn't support models with decoupled transaction policy"
    assert (await ask(URL, question([1, 2, 3, 4]))).status_code == 200
    assert running.gateway.dispatcher.in_flight == 0


async def test_shared_memory_is_off(ask: Ask) -> None:
    """Triton's text, for inputs and outputs."""
    there = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    source = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": there}]}

    for body in (source, question([1, 2, 3, 4], outputs=wanted(**there))):
        reply = await ask(URL, body)
        assert reply.status_code == 501
        assert reply.json()["error"] == (
            "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        )


async def test_an_asynchronous_request_is_answered_alike(ask: Ask) -> None:
    """Its classes are ranked when its result is read; its headers become parameters too."""
    body = question([0.1, 0.5, 0.2, 0.9], outputs=wanted(classification=2))

    reply = await ask("/v1/models/echo/requests", body, {"prefer": "wait=5", "told_text": "b"})

    assert reply.status_code == 200, reply.text
    assert reply.json()["outputs"][0]["data"] == ["0.900000:3", "0.500000:1:one"]
    assert reply.json()["parameters"] == {"told_text": "b"}


async def test_an_asynchronous_raw_request(ask: Ask) -> None:
    """Binary in and out."""
    raw = np.arange(4, dtype="<f4").tobytes()

    reply = await ask("/v1/models/echo/requests", raw, {"prefer": "wait=5", JSON_LENGTH: "0"})

    assert reply.content[int(reply.headers[JSON_LENGTH]) :] == raw
