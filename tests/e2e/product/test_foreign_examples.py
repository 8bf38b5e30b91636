"""The examples in Go, JavaScript and Java, compiled and run against the whole server, which asks for keys and is busy.

Each program has a key of its own tenant, whose rate lets one request pass: the second waits as long as it is told.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

import qinfer
from examples import digits
from qinfer.core.api_keys import Scope, add_key
from qinfer.wire.protos import grpc_service_pb2
from tests.e2e.conftest import Stack, running
from tests.support.foreign import Ended, Program, end_of, go_build, program, protoc, run, tool

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

CLIENTS = Path(__file__).parents[3] / "examples" / "clients"
PIXELS = (np.arange(64) % 17).astype(np.float32).reshape(1, 64)
MODEL = "model: digits 1 image FP32"
UNKNOWN = "Request for unknown model: 'nothing' is not found"


def javascript(directory: Path) -> Path:
    """Copies the programs to where the packages are that `npm install` would fetch."""
    modules = tool("grpc_js", "node_modules/@grpc/grpc-js") / "node_modules"
    there = directory / "javascript"
    shutil.copytree(CLIENTS / "javascript", there)
    shutil.copy(CLIENTS / "inference.proto", directory)
    (there / "node_modules").symlink_to(modules)
    return there


def javascript_http(directory: Path) -> Program:
    return Program([program("node"), str(CLIENTS / "javascript" / "http.mjs")], {})


def javascript_grpc(directory: Path) -> Program:
    return Program([program("node"), str(javascript(directory) / "grpc.mjs")], {})


def java_http(directory: Path) -> Program:
    system = tool("java", "bin/javac")
    libraries = f"{system}/usr/share/java/*"
    source = CLIENTS / "java" / "Client.java"
    run(
        [
            str(system / "bin/javac"),
            "-Xlint:all,-path,-serial",
            "-Werror",
            "-cp",
            libraries,
            "-d",
            str(directory),
            str(source),
        ]
    )
    return Program([str(system / "bin/java"), "-cp", f"{directory}:{libraries}", "Client"], {})


def go_http(directory: Path) -> Program:
    system = tool("grpc_go", "usr/bin/protoc-gen-go")
    return Program([str(go_build(system, directory, CLIENTS / "go" / "http" / "main.go"))], {})


def go_grpc(directory: Path) -> Program:
    system = tool("grpc_go", "usr/bin/protoc-gen-go")
    (directory / "src").mkdir()
    protoc(system, f"-I{CLIENTS}", f"--go_out=plugins=grpc:{directory / 'src'}", str(CLIENTS / "inference.proto"))
    binary = go_build(system, directory, CLIENTS / "go" / "grpc" / "main.go")
    return Program([str(binary)], {"GRPC_GO_RETRY": "on"})  # which Debian's grpc-go has off, as newer ones have on


HTTP, GRPC = (javascript_http, java_http, go_http), (javascript_grpc, go_grpc)
NAMES = [make.__name__ for make in (*HTTP, *GRPC)]


class Server(NamedTuple):
    """The server, the key of each program, and what the model says to the programs' image."""

    stack: Stack
    keys: dict[str, str]
    label: int


class Client(NamedTuple):
    """A compiled program, and the server that it is to ask."""

    name: str
    program: Program
    server: Server

    async def run(self, key: str) -> Ended:
        stack, environment = self.server.stack, self.program.environment
        target = stack.grpc_address if self.name.endswith("grpc") else f"http://{stack.address}"
        return await end_of(*self.program.command, target, **environment, QINFER_API_KEY=key)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("examples")
    digits.build(directory / "models")
    file = directory / "keys.json"
    keys = {name: add_key(file, name, (Scope.INFER,), name)[1] for name in (*NAMES, "python")}
    entries = json.loads(file.read_text())
    for entry in entries["keys"]:
        entry.update(rate_per_s=0.3, burst=1)
    file.write_text(json.dumps(entries))
    settings = {"QINFER_AUTH__MODE": "keys", "QINFER_AUTH__KEYS_FILE": str(file)}
    with running(directory / "models", directory, **settings) as stack:
        with qinfer.Client(f"http://{stack.address}", api_key=keys["python"]) as client:
            label = int(client.infer("digits", {"image": PIXELS})["label"].item())
        yield Server(stack, keys, label)


@pytest.fixture(scope="module", params=[*HTTP, *GRPC], ids=NAMES)
def client(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Client:
    make: Callable[[Path], Program] = request.param
    return Client(make.__name__, make(tmp_path_factory.mktemp("client")), server)


async def test_an_example_does_what_it_shows(client: Client) -> None:
    """Health, metadata, inference in each form, an error; it waits where its rate is used up."""
    label, is_http = client.server.label, client.name.endswith("http")

    ended = await client.run(client.server.keys[client.name])

    assert ended.status == 0, ended.errors
    lines = ended.printed.splitlines()
    asked = ["JSON", "binary", "submitted"] if is_http else ["binary", "binary"]
    assert lines[:-1] == ["ready", MODEL, *(f"{form}: {label}" for form in asked)]
    refused = ["404"] if is_http else ["NOT_FOUND", "NotFound"]
    assert lines[-1] in [f"refused: {status} {UNKNOWN}" for status in refused]
    if is_http:  # libraries of gRPC wait by themselves
        assert [status for status in ("503", "429") if f"s: {status} tenant" in ended.errors] == ["503", "429"]


async def test_an_example_without_a_key_says_so(client: Client) -> None:
    ended = await client.run("")

    assert ended.status != 0
    assert "this server asks for an API key" in ended.errors


def test_maven_compiles_the_java_example(tmp_path: Path) -> None:
    """With what is in Maven's own repository on this machine; nothing is fetched."""
    there = tmp_path / "java"
    shutil.copytree(CLIENTS / "java", there)

    command = [program("mvn"), "--offline", "--batch-mode", "--file", str(there), "compile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    if "in offline mode" in done.stdout:
        pytest.skip("Maven has not its plugins or Jackson here; `mvn compile` in examples/clients/java fetches them")
    assert done.returncode == 0, done.stdout
    assert (there / "target" / "classes" / "Client.class").exists()


def fields_of(message: DescriptorProto) -> dict[str, set[str]]:
    """Returns the fields of a message, and of those within it."""
    fields = {f"{one.name} {one.number} {one.type} {one.label} {one.type_name}" for one in message.field}
    inner = {name: of for each in message.nested_type for name, of in fields_of(each).items()}
    return {message.name: fields} | inner


def test_the_proto_is_a_part_of_tritons(tmp_path: Path) -> None:
    """Names, numbers and types of its fields and calls are those of the whole file."""
    system, found = tool("grpc_go", "usr/bin/protoc"), tmp_path / "found.pb"
    protoc(system, f"-I{CLIENTS}", f"--descriptor_set_out={found}", str(CLIENTS / "inference.proto"))
    (part,) = FileDescriptorSet.FromString(found.read_bytes()).file
    whole = FileDescriptorProto.FromString(grpc_service_pb2.DESCRIPTOR.serialized_pb)
    known = {name: fields for message in whole.message_type for name, fields in fields_of(message).items()}

    shown = {name: fields for message in part.message_type for name, fields in fields_of(message).items()}

    assert part.package == whole.package
    assert {name for name, fields in shown.items() if not fields <= known[name]} == set()
    calls = {(call.name, call.input_type, call.output_type) for call in part.service[0].method}
    assert calls <= {(call.name, call.input_type, call.output_type) for call in whole.service[0].method}
