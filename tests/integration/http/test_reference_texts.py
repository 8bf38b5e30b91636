"""The texts that the protocol reference fixes are those that qinfer says, by a request where one can be made.

A text is in quotation marks in the reference, or the error of a reply in JSON. One that is added there fails here
until it has a case.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
import tritonclient.grpc.service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from qinfer.core.settings import RepositorySettings
from qinfer_api.shared_memory import DIRECTORY
from tests.support.gateway import settings_of
from tests.support.threaded_gateway import Server

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs/builders/triton-protocol.md"
MAX_BYTES = 200_000
ROW = [1, 2, 3, 4]
BINARY = {"Inference-Header-Content-Length": "0"}


class Scene(NamedTuple):
    """Two gateways: one takes what clients may do, the other is closed to them."""

    open: str
    closed: str
    stub: Any
    closed_stub: Any


Told = tuple[int | str, str]
Case = Callable[[Scene], Told]


def _told(reply: httpx.Response) -> Told:
    return reply.status_code, reply.json()["error"]


def get(path: str) -> Case:
    return lambda scene: _told(httpx.get(f"{scene.open}{path}"))


def post(path: str, body: Any, headers: Mapping[str, str] | None = None) -> Case:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    return lambda scene: _told(httpx.post(f"{scene.open}{path}", headers=headers, **sent))


def closed(path: str, body: Any) -> Case:
    return lambda scene: _told(httpx.post(f"{scene.closed}{path}", json=body))


def infer(model: str = "echo", outputs: Any = (), of_request: Any = None, **fields: Any) -> Case:
    """Asks a model with an input whose fields differ from those of a good one."""
    one = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROW} | fields
    given = {name: value for name, value in one.items() if value is not None}
    body: dict[str, Any] = {"inputs": [given], "outputs": [{"name": name} for name in outputs]}
    return post(f"/v2/models/{model}/infer", body | ({"parameters": of_request} if of_request else {}))


def binary(data: bytes, size: int, model: str = "text", shape: str = "[1,1]", datatype: str = "BYTES") -> Case:
    """Asks a model with an input in binary form."""
    one = f'{{"name":"x","shape":{shape},"datatype":"{datatype}","parameters":{{"binary_data_size":{size}}}}}'
    head = f'{{"inputs":[{one}]}}'.encode()
    return post(f"/v2/models/{model}/infer", head + data, {"Inference-Header-Content-Length": str(len(head))})


def register(key: str, times: int = 1) -> Case:
    """Registers a region of shared memory so many times; the first is taken if there are several."""

    def ask(scene: Scene) -> Told:
        url = f"{scene.open}/v2/systemsharedmemory/region/r/register"
        path = Path(DIRECTORY) / "qinfer-reference-texts"
        path.write_bytes(bytes(8))
        try:
            return [_told_or_done(httpx.post(url, json={"key": key, "byte_size": 8})) for _ in range(times)][-1]
        finally:
            path.unlink()

    return ask


def _told_or_done(reply: httpx.Response) -> Told:
    return (200, "") if reply.status_code == 200 else _told(reply)


def rpc(call: Callable[[Scene], Any]) -> Case:
    def ask(scene: Scene) -> Told:
        with pytest.raises(grpc.RpcError) as raised:
            call(scene)
        return raised.value.code().name, raised.value.details() or ""

    return ask


def without_data(scene: Scene) -> None:
    request = pb.ModelInferRequest(model_name="echo")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    scene.stub.ModelInfer(request)


PAIR: dict[str, Any] = {"inputs": [{"name": "a", "shape": [1, 2], "datatype": "INT32", "data": [1, 2]}]}
OTHER_ROWS = {"inputs": [*PAIR["inputs"], {"name": "b", "shape": [2, 2], "datatype": "INT32", "data": [1, 2, 3, 4]}]}
STEP = {"sequence_id": 5}

BY_REQUEST: dict[str, tuple[int | str, Case]] = {
    "Method Not Allowed": (405, get("/v2/models/echo/infer")),
    "Not Found": (404, get("/v2/")),
    "Model version not ready": (400, get("/v2/models/loading/ready")),
    "failed to get model version from specified version string …": (400, get("/v2/models/echo/versions/0x1/ready")),
    "This API is restricted, expecting header '<name>'": (403, closed("/v2/repository/index", {})),
    "This protocol is restricted, expecting header '…'": (
        "UNAVAILABLE",
        rpc(lambda scene: scene.closed_stub.RepositoryIndex(pb.RepositoryIndexRequest())),
    ),
    "attempt to access JSON non-unsigned-integer as unsigned-integer": (500, infer(shape=[1, -4])),
    "JSON nesting depth exceeds maximum allowed limit (100)": (
        400,
        post("/v2/repository/index", b"[" * 101 + b"]" * 101),
    ),
    "Request JSON size of N bytes exceeds the maximum allowed value of M bytes. …": (
        400,
        post("/v2/models/echo/infer", b" " * (MAX_BYTES + 1)),
    ),
    "Request for unknown model: 'x' is not found": (404, get("/v2/models/nothing/versions/3")),
    "'x' version N is not found": (404, get("/v2/models/echo/versions/9")),
    "'x' version N is not at ready state": (503, get("/v2/models/loading/versions/1/ready")),
    "'x' has no available versions": (404, get("/v2/models/loading")),
    "requested model 'x' is not available": (400, get("/v2/models/nothing/stats")),
    "requested model version is not available for model 'x'": (400, get("/v2/models/echo/versions/9/stats")),
    "Input must set only one of the following fields…": (400, infer(data=None)),
    "output 'X' already exists in request": (400, infer(outputs=["y", "y"])),
    "unexpected additional input data for model …": (400, binary(b"\1\0\0\0a" + b"more", 5)),
    "unexpected size for input 'X', expecting N additional bytes for model …": (400, binary(b"\1\0\0\0", 5)),
    "receiving/sending FP16 data via JSON is not supported. …": (
        400,
        infer("half", shape=[1, 2], datatype="FP16", data=[1, 2]),
    ),
    "incomplete string length indicator": (400, binary(b"\1\0", 2)),
    "unexpected number of string elements": (400, binary(b"\1\0\0\0a" * 2, 10)),
    "expected N string elements … got M": (400, binary(b"", 0)),
    "inference request batch-size must be <= N for 'm'": (400, infer(shape=[9, 4], data=ROW * 9)),
    "input 'X' batch size does not match other inputs for 'm'": (400, post("/v2/models/pair/infer", OTHER_ROWS)),
    "unexpected shape for input 'X' for model 'm'. Expected [..], got [..]": (400, infer(shape=[1, 3], data=[1, 2, 3])),
    "inference input 'X' data-type is 'A', but model 'm' expects 'B'": (400, infer(datatype="INT32")),
    "expected N inputs but got M inputs for model 'm'. Got input(s) [...], but missing required input(s) [...]. "
    "Please provide all required input(s).": (400, post("/v2/models/pair/infer", PAIR)),
    "unexpected inference input 'X' for model 'm'": (400, infer(name="z")),
    "unexpected inference output 'X' for model 'm'": (400, infer(outputs=["z"])),
    "input byte size mismatch for input 'X' for model 'm'. Expected E, got G": (
        400,
        binary(bytes(8), 8, "echo", "[1,4]", "FP32"),
    ),
    "HTTP end point doesn't support models with decoupled transaction policy": (501, infer("flow")),
    "Unsupported compression type": (
        501,
        post("/v2/models/echo/infer", b"{}", {"Content-Encoding": "br"}),
    ),
    "explicit model load / unload is not allowed if polling is enabled": (
        503,
        lambda scene: _told(httpx.post(f"{scene.closed}/v2/repository/models/echo/load", headers={"x-open": "sesame"})),
    ),
    "failed to load 'm', failed to poll from model repository": (500, post("/v2/repository/models/nothing/load", b"")),
    "request JSON size of N bytes exceeds the maximum allowed input size. …": (
        400,
        post("/v2/repository/models/echo/load", b" " * (MAX_BYTES + 1)),
    ),
    "Model name cannot be empty…": (400, post("/v2/repository/models/%20/load", b"")),
    "model name must not contain path traversal characters": (400, post("/v2/repository/models/%20../load", b"")),
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.": (
        501,
        closed("/v2/systemsharedmemory/region/r/register", {"key": "r", "byte_size": 8}),
    ),
    "cannot register shared memory region 'x' with key 'k' as the key contains the reserved prefix "
    "'triton_python_backend_shm_region_'": (400, register("///triton_python_backend_shm_region_1")),
    "shared memory region 'x' already in manager": (400, register("///qinfer-reference-texts", times=2)),
    "Unable to find shared memory region: 'x'": (
        404,
        infer(data=None, parameters={"shared_memory_region": "none", "shared_memory_byte_size": 16}),
    ),
    "trace file location can not be updated through network protocol": (
        501,
        post("/v2/trace/setting", {"trace_file": "a"}),
    ),
    "generate expects model to produce exactly 1 response, use generate stream…": (
        400,
        post("/v2/models/echo/generate", {"x": ROW, "responses": 3}),
    ),
    "unable to find data for input tensor 'X' for model 'm' in request.": ("INVALID_ARGUMENT", rpc(without_data)),
    "ModelInfer RPC doesn't support models with decoupled transaction policy": (
        "UNIMPLEMENTED",
        rpc(lambda scene: scene.stub.ModelInfer(pb.ModelInferRequest(model_name="flow"))),
    ),
    "… must specify batch-size 1 due to requirements of sequence batcher": (
        400,
        infer("stateful", shape=[2, 4], data=ROW * 2, of_request=STEP),
    ),
    "… must specify a non-zero or non-empty correlation ID": (400, infer("stateful")),
    "inference request for sequence N to model 'm' must specify the START flag on the first request of the sequence": (
        400,
        infer("stateful", of_request=STEP),
    ),
    "must specify the START flag": (400, infer("stateful", of_request=STEP)),
}
"""Text → the status, and the request that is answered with it."""

IN_SOURCE: dict[str, tuple[str, ...]] = {
    "Server exiting": (),
    "Exceeds maximum queue size": (),
    "Request timeout expired": (),
    "unloaded": (),
    "expected number of inputs between a and b but got c inputs for model 'm'…": (
        "number of inputs between a and b",
        "expected N but got c inputs for model 'm'",
    ),
    "unexpected inference input 'X', allowed inputs are: …": ("unexpected inference N 'X', allowed Ns are: …",),
    "… no version is available": (),
    "load failed for model 'm': version N is at UNAVAILABLE state: Internal: …;": (
        "load failed for model 'm': …",
        "version N is at UNAVAILABLE state: Internal: …;",
    ),
    "GRPC server is shutting down and has stopped accepting new requests.": (),
    "failed to run warmup sample 's': …": (),
    "timeout of the corresponding sequence has been expired": (),
    "sequence batching control 'x' data-type is 'BYTES', but model 'm' expects 'INT32'": (),
}
"""Texts that take a worker that fails, a full queue, or an end; the source has them, or these parts of them."""

NOT_SAID = {
    "Invalid config override: …": "it is in Triton's log only",
    "failed to unload 'm', versions that are still available: …": "an unload here has no such end",
    "Timeout N: Found X …": "it is in Triton's log only",
    "Exit timeout expired. Exiting immediately.": "it is in Triton's log only",
    "model id was not returned in the response": "perf_analyzer says it",
    "Concurrency: N, throughput: X infer/sec, latency Y usec": "perf_analyzer says it",
}
"""Texts that a server does not tell its clients, and why."""

NO_TEXTS = {
    *("reference §1.2", "triton", "16", "1000", "-1", "0", "q:err,…", "open"),
    *("current payload", "Response Cache Memory Leak", "0 < t < 0"),
}
"""What is in quotation marks and is no text of a server."""

HOLE = "\0"
_PLACES = {
    r"'[^' ]+'": "'.+?'",
    r"\\\[(?:\\\.)+\\\]": r"\\[.*\\]",
    r"…": ".*",
    r"\b[NMEG](?=\b|s)": ".+?",
    r"\ba\\ and\\ b\b": ".+? and .+?",
    r"\bgot\\ c\b": "got .+?",
    r"receiving/sending\\ FP16": "(receiving|sending) .+?",
}
"""Parts of the reference's texts that stand for others, and patterns of what they stand for."""


def fixed_texts() -> list[str]:
    """Returns the texts that the reference fixes, each once."""
    written = REFERENCE.read_text(encoding="utf-8")
    paragraphs = re.sub(r"(?<=\S)\n *(?=[^\s|#`-])", " ", written)  # a text may go on in the next line
    prose = re.sub(r"`[^`\n]*`", "`", paragraphs)
    found = chain(re.findall(r'\{"error":"([^"]+)"\}', written), re.findall(r'"([^"\n]+)"', prose))
    return list(dict.fromkeys(found))


def pattern_of(text: str) -> "re.Pattern[str]":
    pattern = re.escape(text)
    for place, meaning in _PLACES.items():
        pattern = re.sub(place, meaning, pattern)
    return re.compile(pattern, re.DOTALL)


@pytest.fixture(scope="module")
def templates() -> str:
    """Returns all texts in the source of the library and the programs, with holes for what they insert."""
    files = chain(*((ROOT / folder).rglob("*.py") for folder in ("qinfer", "api/qinfer_api", "workers/qinfer_workers")))
    return "\n".join(chain(*(_templates_of(file) for file in files)))


def _templates_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, templates: str) -> Iterator[Scene]:
    del templates  # made before the gateways run, whose threads would wait for it
    directory = tmp_path_factory.mktemp("texts")
    (directory / "models").mkdir()
    repository = RepositorySettings(
        path=str(directory / "models"), overlay=str(directory / "overlay"), control_mode="explicit"
    )
    settings = settings_of({"max_input_bytes": MAX_BYTES}, grpc={})
    opened = Server(settings.model_copy(update={"allow_client_shm": True, "repository": repository}))
    shut = Server(
        settings_of({"restricted": ("model-repository:x-open=sesame",)}, grpc={"restricted": ("model-repository:k=s",)})
    )
    with opened as url, shut as closed_url:
        assert opened.running is not None
        assert shut.running is not None
        with (
            grpc.insecure_channel(opened.running.grpc_target) as channel,
            grpc.insecure_channel(shut.running.grpc_target) as other,
        ):
            yield Scene(url, closed_url, _stub(channel), _stub(other))


def _stub(channel: Any) -> Any:
    return GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]  # generated


def test_each_text_of_the_reference_has_a_case() -> None:
    known = {*BY_REQUEST, *IN_SOURCE, *NOT_SAID, *NO_TEXTS}
    assert [f"no case for {text!r}" for text in fixed_texts() if text not in known] == []
    assert known - set(fixed_texts()) == set()


@pytest.mark.parametrize("text", IN_SOURCE)
def test_the_source_has_the_text(templates: str, text: str) -> None:
    absent = [part for part in IN_SOURCE[text] or (text,) if not pattern_of(part).search(templates)]

    assert absent == []


@pytest.mark.parametrize("text", BY_REQUEST)
def test_a_request_is_answered_with_the_text(scene: Scene, text: str) -> None:
    expected, ask = BY_REQUEST[text]

    status, said = ask(scene)

    assert (status, bool(pattern_of(text).search(said))) == (expected, True), said
