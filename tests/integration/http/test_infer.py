"""`POST …/infer`, the same through every way: the fast path, the route with the fast path off, the route by header."""

import gzip
import json
import re
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qinfer_api.http.infer import ID_HEADER, LARGE_BYTES
from tests.support.gateway import Running, running_gateway, settings_of

WAYS = ("fast", "route", "encoded")
URL = "/v2/models/echo/infer"
TIMEOUT_S = 0.5
"""Of all models: short for the one that is stuck, and long enough for the others on a busy machine."""
Ask = Callable[..., Awaitable[httpx.Response]]


pytestmark = pytest.mark.asyncio(loop_scope="module")  # one gateway for each way


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(way: str) -> AsyncIterator[Running]:
    settings = settings_of({"fast_path": way != "route", "max_input_bytes": 600_000}, {"default_timeout_s": TIMEOUT_S})
    async with running_gateway(settings) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ask(running: Running, way: str) -> AsyncIterator[Ask]:
    """Posts a body; `encoded` asks for compressed replies."""
    accept = "gzip" if way == "encoded" else "identity"
    async with httpx.AsyncClient(base_url=running.url, headers={"accept-encoding": accept}) as client:

        async def post(url: str, body: Any, **headers: str) -> httpx.Response:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.post(url, content=content, headers=names)

        yield post


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4], **changes}


def question(**changes: Any) -> dict[str, Any]:
    return {"inputs": [tensor()], **changes}


async def test_json_is_answered(ask: Ask) -> None:
    """The outputs, the model, and the highest ready version as a string; no `id` where none was given."""
    reply = await ask(URL, question())

    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == {
        "model_name": "echo",
        "model_version": "2",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}],
    }


async def test_a_long_reply_is_whole(ask: Ask) -> None:
    """The numbers of a tensor are encoded in pieces, and the reply is written apart from its head."""
    numbers = [7.0, 0.5] * 35_000
    request = {"inputs": [tensor(shape=[2, 35_000], data=numbers)]}

    reply = await ask("/v2/models/wide/infer", request)

    assert len(reply.content) > LARGE_BYTES
    assert reply.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2, 35_000], "data": numbers}]


async def test_the_id_is_echoed(ask: Ask) -> None:
    """perf_analyzer matches replies by it (reference §1.19)."""
    assert (await ask(URL, question(id="a ☃"))).json()["id"] == "a ☃"


async def test_a_version_can_be_named(ask: Ask) -> None:
    """The URL's version answers."""
    assert (await ask("/v2/models/echo/versions/1/infer", question())).json()["model_version"] == "1"


async def test_a_model_name_may_be_escaped(ask: Ask) -> None:
    """Clients quote names."""
    reply = await ask("/v2/models/sp%C3%A4te%20modelle/infer?a=1", question())

    assert reply.json()["model_name"] == "späte modelle"


async def test_binary_in_and_out(ask: Ask) -> None:
    """Raw tensors after the JSON, both ways (reference §1.7)."""
    raw = struct.pack("<4f", 1, 2, 3, 4)
    head = json.dumps(
        {
            "parameters": {"binary_data_output": True},
            "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}],
        }
    ).encode()

    reply = await ask(URL, head + raw, inference_header_content_length=str(len(head)))

    length = int(reply.headers["inference-header-content-length"])
    assert reply.headers["content-type"] == "application/octet-stream"
    assert json.loads(reply.content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert reply.content[length:] == raw


async def test_bytes_tensors(ask: Ask) -> None:
    """Strings as JSON."""
    reply = await ask(
        "/v2/models/text/infer", question(inputs=[tensor(shape=[1, 2], datatype="BYTES", data=["a", "ü"])])
    )

    assert reply.json()["outputs"][0]["data"] == ["a", "ü"]


async def test_outputs_are_selected(ask: Ask) -> None:
    """Only the outputs asked for come back."""
    inputs = [tensor(name=name, shape=[1, 2], datatype="INT32", data=[1, 2]) for name in "ab"]

    reply = await ask("/v2/models/pair/infer", question(inputs=inputs, outputs=[{"name": "b"}]))

    assert [output["name"] for output in reply.json()["outputs"]] == ["b"]


async def test_the_frame_carries_what_workers_need(ask: Ask, running: Running) -> None:
    """Version, generation, timeout, reply address and trace are stamped."""
    await ask(URL, question(id="7"), traceparent="00-aa-bb-01")

    request = running.requests[-1]
    assert (request.model, request.version, request.generation, request.client_id) == ("echo", 2, 1, "7")
    assert (request.timeout_s, request.trace) == (TIMEOUT_S, "00-aa-bb-01")
    assert request.id.endswith(".0.echo")
    assert request.reply_to.startswith("reply:gateway-")


async def test_outputs_that_json_cannot_carry(ask: Ask) -> None:
    """FP16 travels as binary only (reference §1.8)."""
    head = json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP16", "parameters": {"binary_data_size": 4}}]}
    ).encode()

    reply = await ask("/v2/models/half/infer", head + bytes(4), inference_header_content_length=str(len(head)))

    assert reply.status_code == 400
    assert "FP16 data via JSON is not supported" in reply.json()["error"]


@pytest.mark.parametrize(
    ("url", "body", "status", "text"),
    [
        ("/v2/models/nope/infer", question(), 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/nope/infer", b"{", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/echo/versions/9/infer", question(), 404, "'echo' version 9 is not found"),
        ("/v2/models/loading/versions/1/infer", question(), 503, "'loading' version 1 is not at ready state"),
        ("/v2/models/echo/versions/x/infer", question(), 400, "failed to get model version from specified version"),
        ("/v2/models/echo/versions/0/infer", question(), 400, "failed to get model version from specified version"),
        (URL, b"", 400, ""),
        (URL, b"{", 400, ""),
        (URL, b"[" * 101 + b"]" * 101, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
        (URL, question(inputs=[tensor(shape=[1, -4])]), 500, "unsigned-integer"),
        (
            URL,
            question(inputs=[tensor(datatype="FP64")]),
            400,
            "] inference input 'x' data-type",
        ),
        (
            URL,
            question(id="i7", inputs=[]),
            400,
            "[request id: i7] expected 1 inputs but got 0 inputs for model 'echo'",
        ),
        (URL, question(inputs=[tensor(shape=[1, 5], data=[1] * 5)]), 400, "unexpected shape for input 'x' for model"),
        (URL, question(inputs=[tensor(shape=[9, 4], data=[1] * 36)]), 400, "batch-size must be <= 8 for 'echo'"),
        (URL, question(outputs=[{"name": "nope"}]), 400, "unexpected inference output 'nope' for model 'echo'"),
        ("/v2/models/fails/infer", question(id="f"), 500, "the model raised: boom"),
        ("/v2/models/stuck/infer", question(), 503, "Request timeout expired"),
    ],
)
async def test_what_is_wrong_is_said(ask: Ask, url: str, body: Any, status: int, text: str) -> None:
    """Every error is `{"error": text}` with Triton's status and text, and never compressed."""
    reply = await ask(url, body)

    assert (reply.status_code, list(reply.json())) == (status, ["error"])
    assert text in reply.json()["error"]
    assert_named(reply)
    assert reply.headers["content-type"] == "application/json"
    assert "content-encoding" not in reply.headers


def assert_named(reply: httpx.Response) -> None:
    """Asserts that the text of an error about a request has the id that the client gave, else that of the header."""
    named = re.match(r"\[request id: (.+?)\] ", reply.json()["error"])
    assert named is None or named[1] in {reply.headers["qinfer-request-id"], "i7"}


async def test_an_expired_request_leaves_the_queue(ask: Ask, running: Running) -> None:
    """Nobody executes what nobody waits for."""
    await ask("/v2/models/stuck/infer", question())

    await running.emptied("stuck")


async def test_a_json_length_beyond_the_body(ask: Ask) -> None:
    """The header is checked against the body."""
    reply = await ask(URL, b"{}", inference_header_content_length="3")

    assert reply.status_code == 400
    assert reply.json()["error"] == "inference header size should be in range (0, 2), got: 3"


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_requests(ask: Ask, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    """Both encodings of the protocol; the JSON length is that of the uncompressed body."""
    reply = await ask(URL, pack(json.dumps(question()).encode()), content_encoding=encoding)

    assert reply.json()["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]


async def test_an_unknown_encoding_names_the_known_ones(ask: Ask) -> None:
    """501 and `Accept-Encoding: gzip, deflate` (reference §1.11)."""
    reply = await ask(URL, b"", content_encoding="br")

    assert (reply.status_code, reply.json()) == (501, {"error": "Unsupported compression type"})
    assert reply.headers["accept-encoding"] == "gzip, deflate"


async def test_a_decompression_bomb_is_refused(ask: Ask) -> None:
    """The limit counts the bytes after decompression."""
    reply = await ask(URL, gzip.compress(bytes(100_000_000)), content_encoding="gzip")

    assert reply.status_code == 400
    assert "exceeds the maximum allowed value of 600000 bytes" in reply.json()["error"]


async def test_a_body_above_the_limit_is_refused(ask: Ask) -> None:
    """Triton's status for it is 400."""
    reply = await ask(URL, bytes(600_001))

    assert reply.status_code == 400
    assert " size of 600001 bytes exceeds the maximum allowed value" in reply.json()["error"]


async def test_a_body_above_the_fast_limit_is_answered(ask: Ask) -> None:
    """Large bodies take the route, and are decoded in a thread."""
    reply = await ask(URL, question(id="x" * 300_000))

    assert len(reply.json()["id"]) == 300_000


async def test_the_answers_are_the_same_to_the_byte() -> None:
    """Fast path and route send the same status line, headers and body, but for the request's id."""
    async with running_gateway(settings_of()) as fast, running_gateway(settings_of({"fast_path": False})) as route:
        for url, body in (
            (URL, question(id="1")),
            (URL, b"{"),
            ("/v2/models/nope/infer", question()),
            ("/v2/models/fails/infer", question()),
            (URL, question(parameters={"binary_data_output": True})),
        ):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            replies = []
            for running in (fast, route):
                async with httpx.AsyncClient(base_url=running.url, headers={"accept-encoding": "identity"}) as client:
                    reply = await client.post(url, content=content)
                    headers = [pair for pair in reply.headers.raw if pair[0] not in (b"date", ID_HEADER)]
                    text = reply.content.replace(reply.headers.get("qinfer-request-id", "none").encode(), b"ID")
                    replies.append((reply.status_code, reply.reason_phrase, headers, text))

            assert replies[0] == replies[1]
