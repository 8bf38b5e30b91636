"""Corners of Triton's protocols, asked by its own clients, and by hand where they can't: status and text of each."""

import json
import socket
from collections.abc import Iterator
from uuid import uuid4

import httpx
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from qinfer.core.settings import RepositorySettings
from qinfer.core.settings_sections import TraceSettings
from qinfer_api.http.connection import MAX_CHUNKS
from tests.support.gateway import settings_of
from tests.support.threaded_gateway import Server

FORWARD = {"header_forward_pattern": ".*"}
RESERVED = (
    "priority",
    "timeout",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "binary_data_output",
    "headers",
    "triton_final_response",
    "Priority",
)
ROW = np.array([[1, 2, 3, 4]], np.float32)
OVERFLOW = 2**64 - 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("corners")
    (directory / "models").mkdir()
    repository = RepositorySettings(
        path=str(directory / "models"), overlay=str(directory / "overlay"), control_mode="explicit"
    )
    trace = TraceSettings(file=str(directory / "trace.json"), level="TIMESTAMPS", rate=7, count=50)
    settings = settings_of({**FORWARD, "max_input_bytes": 2_000_000}, grpc=FORWARD)
    settings = settings.model_copy(update={"allow_client_shm": True, "repository": repository, "trace": trace})
    one = Server(settings)
    with one:
        yield one


class Client:
    """One of Triton's two clients."""

    def __init__(self, server: Server, protocol: str) -> None:
        assert server.running is not None
        self.is_http = protocol == "http"
        self.kind = over_http if self.is_http else over_grpc
        target = f"127.0.0.1:{server.running.port}" if self.is_http else server.running.grpc_target
        self.raw = self.kind.InferenceServerClient(target)

    def refusal(self, method: str, *arguments: object, **options: object) -> tuple[str, str]:
        """Calls what is refused; returns the status, in gRPC's words, and the text."""
        with pytest.raises(InferenceServerException) as raised:
            getattr(self.raw, method)(*arguments, **options)
        status = str(raised.value.status()).removeprefix("StatusCode.")
        return {"400": "INVALID_ARGUMENT", "500": "INTERNAL"}.get(status, status), str(raised.value.message())

    def input(self) -> object:
        given = self.kind.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(ROW)
        return given


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    one = Client(server, request.param)
    yield one
    one.raw.close()


def url_of(server: Server) -> str:
    assert server.running is not None
    return server.running.url


@pytest.mark.parametrize("name", RESERVED)
def test_no_header_is_a_reserved_parameter(client: Client, name: str) -> None:
    """A request with such a header would be answered as if its client had asked for that."""
    name = name if client.is_http else name.lower()  # as HTTP/2 has them

    status, text = client.refusal("infer", "echo", [client.input()], headers={name: "1"})

    assert status == "INVALID_ARGUMENT"
    assert f"parameter '{name}' is reserved for Triton usage" in text


def test_other_headers_are_forwarded(client: Client) -> None:
    answer = client.raw.infer("echo", [client.input()], headers={"told_by": "me"}).get_response()

    told = answer["parameters"]["told_by"] if client.is_http else answer.parameters["told_by"].string_param
    assert told == "me"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("  ", "Model name cannot be empty. Please enter a valid name to deploy."),
        (" ..", "model name must not contain path traversal characters"),
        ("..", "model name must not contain path traversal characters"),
    ],
)
def test_names_that_no_model_has(client: Client, name: str, text: str) -> None:
    assert client.refusal("load_model", name) == ("INVALID_ARGUMENT", text)


def test_unloading_looks_for_no_traversal(client: Client) -> None:
    """What nobody has loaded is unloaded already."""
    client.raw.unload_model("..")

    assert client.refusal("unload_model", " ")[1].startswith("Model name cannot be empty")


def test_an_object_that_is_not_there(client: Client) -> None:
    status, text = client.refusal("register_system_shared_memory", "r", "/qinfer-is-not-there", 16)

    assert (status, text) == ("INTERNAL", "Unable to open shared memory region: '/qinfer-is-not-there'")


def test_a_key_that_is_none(client: Client) -> None:
    status, text = client.refusal("register_system_shared_memory", "r", "/a/../b", 16)

    assert (status, "invalid shm key" in text) == ("INVALID_ARGUMENT", True)


def test_a_part_of_a_region_beyond_all_numbers(server: Server) -> None:
    client, key = Client(server, "http"), f"/qinfer-test-{uuid4().hex}"
    handle = shm.create_shared_memory_region("object", key, 64)
    try:
        client.raw.register_system_shared_memory("overflow", key, 64)
        wanted = over_http.InferRequestedOutput("y")
        wanted.set_shared_memory("overflow", OVERFLOW, offset=32)
        status, text = client.refusal("infer", "echo", [client.input()], outputs=[wanted])
        client.raw.unregister_system_shared_memory("overflow")
    finally:
        shm.destroy_shared_memory_region(handle)

    assert (status, "Integer overflow detected: byte_size " in text) == ("INVALID_ARGUMENT", True)


def test_trace_settings_begin_as_the_operator_says(client: Client) -> None:
    """And clearing them returns to that."""
    shown = client.raw.update_trace_settings("", settings={"trace_level": ["OFF"], "trace_rate": "3"})
    cleared = client.raw.update_trace_settings(
        "", settings={"trace_level": None, "trace_rate": None, "trace_count": None}
    )

    names = ("trace_level", "trace_rate", "trace_count")
    if client.is_http:
        changed, again = ([values[name] for name in names] for values in (shown, cleared))
    else:
        changed, again = ([list(values.settings[name].value) for name in names] for values in (shown, cleared))
        changed, again = ([values[0], values[1][0], values[2][0]] for values in (changed, again))
    assert changed == [["OFF"], "3", "50"]
    assert again == [["TIMESTAMPS"], "7", "50"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"x": [1, 2, 3, 4], "x": [5, 6, 7, 8]}', "input 'x' already exists in request"),
        ('{"x": [1, 2, 3, 4], "\\u0078": [5, 6, 7, 8]}', "input 'x' already exists in request"),
        ('{"x": [1, 2, 3, 4], "told_a": 1, "told_a": 2}', "parameter 'told_a' already exists in request"),
        ('{"x": [1, 2, 3, 4], "parameters": {"a": 1, "a": NaN}}', "parameter 'a' already exists in request"),
    ],
)
@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_a_key_that_is_twice_in_a_generate_body(server: Server, route: str, body: str, text: str) -> None:
    reply = httpx.post(f"{url_of(server)}/v2/models/echo/{route}", content=body)

    assert (reply.status_code, reply.json()["error"]) == (400, text)


def test_a_value_that_looks_like_a_key_is_none(server: Server) -> None:
    reply = httpx.post(f"{url_of(server)}/v2/models/echo/generate", content='{"x": [1, 2, 3, 4], "told_a": "x"}')

    assert (reply.status_code, reply.json()["told_a"]) == (200, "x")


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ([2**4, 2**60 + 2], "causes total element count to exceed maximum size of"),
        ([2**2, 2**60 + 2], "byte size overflow for input 'x'"),
    ],
)
def test_shapes_beyond_all_numbers(server: Server, shape: list[int], text: str) -> None:
    inputs = [{"name": "x", "datatype": "FP32", "shape": shape, "data": [1.0]}]

    reply = httpx.post(f"{url_of(server)}/v2/models/echo/infer", json={"inputs": inputs})

    assert (reply.status_code, text in reply.json()["error"]) == (400, True)


def test_json_that_is_too_large(server: Server) -> None:
    reply = httpx.post(f"{url_of(server)}/v2/models/echo/infer", content=b" " * 2_000_001)

    assert reply.status_code == 400
    assert reply.json()["error"].startswith(
        "Request JSON size of 2000001 bytes exceeds the maximum allowed value of 2000000 bytes. "
        "Use --http-max-input-size to increase the limit"
    )


@pytest.mark.parametrize("path", ["repository/models/echo/load", "repository/index", "trace/setting"])
def test_json_that_is_no_inference_and_too_large(server: Server, path: str) -> None:
    reply = httpx.post(f"{url_of(server)}/v2/{path}", content=b" " * 2_000_001)

    assert reply.status_code == 400
    assert reply.json()["error"].startswith(
        "request JSON size of 2000001 bytes exceeds the maximum allowed input size. It is 2000000 bytes. "
        "Use --http-max-input-size to increase the limit"
    )


def test_a_flag_that_is_none(server: Server) -> None:
    reply = httpx.post(f"{url_of(server)}/v2/repository/index", json={"ready": 1})

    assert reply.status_code == 500
    assert reply.json()["error"].startswith("Invalid value for 'ready': expected a boolean")


def chunked(server: Server, count: int) -> bytes:
    """Sends a body of so many chunks, all of it before anything is read; returns the reply."""
    assert server.running is not None
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.running.port), timeout=30) as connection:
        connection.sendall(head + b"1\r\n \r\n" * count + b"0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("count", [MAX_CHUNKS + 1, 5 * MAX_CHUNKS])
def test_more_chunks_than_there_may_be(server: Server, count: int) -> None:
    """Whoever sends them all first reads why all the same."""
    reply = chunked(server, count)

    assert reply.startswith(b"HTTP/1.1 400 ")
    assert json.loads(reply.partition(b"\r\n\r\n")[2]) == {"error": f"request body has more than {MAX_CHUNKS} chunks"}


def test_as_many_chunks_as_there_may_be(server: Server) -> None:
    """They are read: it is their text that is no JSON."""
    assert b"failed to parse the request JSON buffer" in chunked(server, MAX_CHUNKS)


def test_regions_where_client_memory_is_off() -> None:
    """There are none; registering one is refused."""
    one = Server(settings_of(grpc={}))
    with one:
        for protocol in ("http", "grpc"):
            client = Client(one, protocol)
            for kind in ("system", "cuda"):
                found = getattr(client.raw, f"get_{kind}_shared_memory_status")()
                assert not (found if client.is_http else found.regions)
            status, _ = client.refusal("register_system_shared_memory", "r", "/r", 16)
            assert status in ("501", "UNIMPLEMENTED")
            client.raw.close()
