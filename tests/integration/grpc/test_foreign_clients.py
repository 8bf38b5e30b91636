"""Clients of other languages, and tools that speak HTTP/2, against a real gateway.

Each program in `clients/` makes the same calls, and prints what came back; scripts/tools fetches what they are made of.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qinfer.wire.protos import grpc_service_pb2
from tests.support.certificates import write_certificate
from tests.support.foreign import PROTOS, Program, cpp_build, descriptors, go_build, output, program, protoc, tool
from tests.support.rpc import Rpc, infer_request, rpc

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

CLIENTS = Path(__file__).parent / "clients"
MANY, LARGE = 300, 2**21
CANCELLED, DEADLINE_EXCEEDED, NOT_FOUND = 1, 4, 5
SERVING = 1
UNKNOWN = "Request for unknown model: 'nothing' is not found"


def javascript(directory: Path) -> Program:
    modules = tool("grpc_js", "node_modules/@grpc/grpc-js") / "node_modules"
    command = [program("node"), str(CLIENTS / "client.js")]
    return Program([*command, str(descriptors(directory))], {"NODE_PATH": str(modules)})


def cpp(directory: Path) -> Program:
    return cpp_build(directory, CLIENTS / "client.cc")


def go(directory: Path) -> Program:
    system = tool("grpc_go", "usr/bin/protoc-gen-go")
    package = directory / "src" / "triton"
    package.mkdir(parents=True)
    options = ",".join(["plugins=grpc", *(f"M{name}=triton" for name in PROTOS)])
    files = f"--descriptor_set_in={descriptors(directory)}"
    protoc(system, files, f"--go_out={options}:{package}", *PROTOS[:2])
    return Program([str(go_build(system, directory, CLIENTS / "client.go"))], {})


@pytest.fixture(scope="module", params=[javascript, cpp, go], ids=lambda make: make.__name__)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    make: Callable[[Path], Program] = request.param
    return make(tmp_path_factory.mktemp("client"))


def check(found: dict[str, Any]) -> None:
    """Checks what a client got for each of its calls."""
    assert found["live"] is True
    assert found["values"] == [2.0, 4.0, 6.0, 8.0]
    assert found["many"] is True
    assert found["large"] == LARGE
    assert found["unknown"] == [NOT_FOUND, UNKNOWN]
    assert found["deadline"] == DEADLINE_EXCEEDED
    assert found["stream"] == {"found": [*map(float, range(MANY)), UNKNOWN], "code": 0}
    assert found["cancelled"] == CANCELLED
    assert found["watched"] == SERVING


async def test_calls_of_all_kinds(client: Program) -> None:
    """Unary and streamed, one and many at once, large ones, errors, deadlines, cancellation."""
    async with rpc() as server:
        found = await output(*client.command, server.running.grpc_target, "", **client.environment)
        await server.running.emptied("stuck")  # whose calls the client has given up

    check(json.loads(found))


async def test_calls_of_all_kinds_over_tls(client: Program, tmp_path: Path) -> None:
    authority = write_certificate(tmp_path, "ca")
    write_certificate(tmp_path, "server", authority)
    settings = {"tls_certfile": str(tmp_path / "server.pem"), "tls_keyfile": str(tmp_path / "server.key")}

    async with rpc(settings) as server:
        trusted = str(tmp_path / "ca.pem")
        found = await output(*client.command, server.running.grpc_target, trusted, **client.environment)

    check(json.loads(found))


def body(directory: Path, *messages: Any) -> Path:
    """Writes the body of a call."""
    path = directory / "body"
    encoded = [message.SerializeToString() for message in messages]
    path.write_bytes(b"".join(b"\0" + len(one).to_bytes(4) + one for one in encoded))
    return path


def url(server: Rpc, method: str) -> str:
    return f"http://{server.running.grpc_target}/inference.GRPCInferenceService/{method}"


HEADERS = ("content-type: application/grpc", "te: trailers")


async def test_curl(tmp_path: Path) -> None:
    """Curl sends a message that its windows hold only in pieces, and shows statuses among the headers and trailers."""
    reply = tmp_path / "reply"
    request = infer_request(value=3.0, id="x" * 300_000)
    command = [program("curl"), "--silent", "--show-error", "--http2-prior-knowledge", "--dump-header", "-"]
    command += ["--output", str(reply), "--header", HEADERS[1], "--data-binary"]
    large = f"@{body(tmp_path, request)}"
    grpc, text = ("--header", HEADERS[0]), ("--header", "content-type: text/plain")

    async with rpc() as server:
        answered = await output(*command, large, *grpc, url(server, "ModelInfer"))
        content = reply.read_bytes()
        unknown = await output(*command, "", *grpc, url(server, "Nothing"))
        plain = await output(*command, "", *text, url(server, "ServerLive"))
        old = await output(*command, "", *grpc, "--http1.1", url(server, "ServerLive"))

    message = grpc_service_pb2.ModelInferResponse.FromString(content[5:])
    assert message.id == request.id
    assert "grpc-status: 0" in answered
    assert "grpc-status: 12" in unknown
    assert plain.startswith("HTTP/2 415")
    assert old.startswith("HTTP/1.1 400")


async def test_nghttp(tmp_path: Path) -> None:
    """Nghttp makes many calls on one connection, also through a window of 1 KiB."""
    system = tool("h2load", "usr/bin/nghttp")
    libraries = {"LD_LIBRARY_PATH": str(next(system.glob("usr/lib/*-linux-gnu")))}
    command = [str(system / "usr/bin/nghttp"), "--stat", "--null-out", "--data", str(body(tmp_path, infer_request()))]
    command += [part for header in HEADERS for part in ("--header", header)]

    async with rpc() as server:
        many = await output(*command, "--multiply=500", url(server, "ModelInfer"), **libraries)
        narrow = await output(*command, "--window-bits=10", "--multiply=50", url(server, "ModelInfer"), **libraries)

    assert many.count(" 200 ") == 500
    assert narrow.count(" 200 ") == 50
