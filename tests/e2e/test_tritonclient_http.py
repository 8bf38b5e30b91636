"""Triton's own HTTP client, unchanged, against the whole server."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import Stack
from tests.models import MAX_BATCH_SIZE

pytestmark = pytest.mark.slow

Array = npt.NDArray[Any]

SAMPLES: dict[str, Array] = {
    "BOOL": np.array([[True, False, True]]),
    "UINT8": np.array([[0, 1, 255]], np.uint8),
    "UINT16": np.array([[0, 1, 65535]], np.uint16),
    "UINT32": np.array([[0, 1, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 1, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 0, 127]], np.int8),
    "INT16": np.array([[-32768, 0, 32767]], np.int16),
    "INT32": np.array([[-(2**31), 0, 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 0, 2**63 - 1]], np.int64),
    "FP16": np.array([[-1.5, 0.0, 65504.0]], np.float16),
    "BF16": np.array([[-1.5, 0.0, 256.0]], ml_dtypes.bfloat16),
    "FP32": np.array([[-1.5, 1e-30, 3.4e38]], np.float32),
    "FP64": np.array([[-1.5, 1e-300, 1.7e308]], np.float64),
    "BYTES": np.array([["", "grüße", "a" * 300]], dtype=object),
}
ONLY_BINARY = {"FP16", "BF16"}


def tensor(name: str, array: Array, datatype: str, *, binary: bool = True) -> triton.InferInput:
    result = triton.InferInput(name, list(array.shape), datatype)
    result.set_data_from_numpy(array, binary_data=binary)
    return result


def addends(rows: int = 1, *, binary: bool = True) -> tuple[Array, Array, list[triton.InferInput]]:
    a = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    b = np.full((rows, 4), 0.5, np.float32)
    return a, b, [tensor("a", a, "FP32", binary=binary), tensor("b", b, "FP32", binary=binary)]


def plain(array: Array) -> list[Any]:
    """Returns nested lists, BYTES as text."""
    decode: Callable[[Any], Any] = lambda e: e.decode() if isinstance(e, bytes) else e  # noqa: E731
    return [[decode(element) for element in row] for row in array.tolist()]


@pytest.fixture
def client(stack: Stack) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(stack.address, concurrency=4) as client:
        yield client


def test_health(client: triton.InferenceServerClient) -> None:
    """The server is live and ready, and so is its model."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert client.is_model_ready("add_sub", "1")


def test_unknown_models_are_not_ready(client: triton.InferenceServerClient) -> None:
    """A model, or a version, that does not exist is not ready."""
    assert not client.is_model_ready("nothing")
    assert not client.is_model_ready("add_sub", "9")


def test_server_metadata(client: triton.InferenceServerClient) -> None:
    """The server calls itself what Triton's examples expect, and offers the binary extension."""
    metadata = client.get_server_metadata()

    assert metadata["name"] == "triton"
    assert "binary_tensor_data" in metadata["extensions"]


def test_model_metadata(client: triton.InferenceServerClient) -> None:
    """Shapes in the metadata begin with the batch dimension."""
    metadata = client.get_model_metadata("add_sub")

    assert metadata["versions"] == ["1"]
    assert metadata["inputs"][0] == {"name": "a", "datatype": "FP32", "shape": [-1, 4]}
    assert [output["name"] for output in metadata["outputs"]] == ["sum", "difference"]


def test_model_config(client: triton.InferenceServerClient) -> None:
    """The configuration is the normalised one."""
    config = client.get_model_config("add_sub")

    assert config["max_batch_size"] == MAX_BATCH_SIZE
    assert config["dynamic_batching"]["preferred_batch_size"] == [MAX_BATCH_SIZE]


@pytest.mark.parametrize("datatype", SAMPLES)
def test_binary_tensors_come_back(client: triton.InferenceServerClient, datatype: str) -> None:
    """Every datatype survives the way there and back as raw bytes."""
    sample = SAMPLES[datatype]

    reply = client.infer(f"identity_{datatype.lower()}", [tensor("x", sample, datatype)])

    output = reply.get_output("y")
    assert output["datatype"] == datatype
    assert output["shape"] == list(sample.shape)
    assert plain(reply.as_numpy("y")) == plain(sample)


@pytest.mark.parametrize("datatype", sorted(SAMPLES.keys() - ONLY_BINARY))
def test_json_tensors_come_back(client: triton.InferenceServerClient, datatype: str) -> None:
    """Every datatype that has a JSON form survives it."""
    sample = SAMPLES[datatype]

    reply = client.infer(
        f"identity_{datatype.lower()}",
        [tensor("x", sample, datatype, binary=False)],
        outputs=[triton.InferRequestedOutput("y", binary_data=False)],
    )

    assert "data" in reply.get_output("y")
    assert plain(reply.as_numpy("y")) == plain(sample)


def test_json_and_binary_mix(client: triton.InferenceServerClient) -> None:
    """One input as JSON and one as bytes; one output each way."""
    a, b, _ = addends()

    reply = client.infer(
        "add_sub",
        [tensor("a", a, "FP32", binary=False), tensor("b", b, "FP32")],
        outputs=[
            triton.InferRequestedOutput("sum", binary_data=True),
            triton.InferRequestedOutput("difference", binary_data=False),
        ],
    )

    assert plain(reply.as_numpy("sum")) == plain(a + b)
    assert plain(reply.as_numpy("difference")) == plain(a - b)


def test_outputs_can_be_selected(client: triton.InferenceServerClient) -> None:
    """Only what was asked for comes back."""
    a, b, inputs = addends()

    reply = client.infer("add_sub", inputs, outputs=[triton.InferRequestedOutput("difference")])

    assert reply.as_numpy("sum") is None
    assert plain(reply.as_numpy("difference")) == plain(a - b)


def test_several_string_inputs(client: triton.InferenceServerClient) -> None:
    """BYTES tensors of two inputs are joined element by element."""
    greetings, names = np.array([[b"hello ", b""]], object), np.array([[b"world", "Zoë".encode()]], object)

    reply = client.infer("greet", [tensor("greeting", greetings, "BYTES"), tensor("name", names, "BYTES")])

    assert plain(reply.as_numpy("text")) == [["hello world", "Zoë"]]


@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("wanted", [None, "gzip", "deflate"])
def test_compression(client: triton.InferenceServerClient, sent: str | None, wanted: str | None) -> None:
    """Requests and answers may be compressed, each by itself."""
    a, b, inputs = addends(rows=4)

    reply = client.infer("add_sub", inputs, request_compression_algorithm=sent, response_compression_algorithm=wanted)

    assert plain(reply.as_numpy("sum")) == plain(a + b)


def test_the_request_id_comes_back(client: triton.InferenceServerClient) -> None:
    """A client's own id is in the answer."""
    *_, inputs = addends()

    assert client.infer("add_sub", inputs, request_id="mine").get_response()["id"] == "mine"


def test_a_version_can_be_named(client: triton.InferenceServerClient) -> None:
    """The answer says which version answered."""
    *_, inputs = addends()

    assert client.infer("add_sub", inputs, model_version="1").get_response()["model_version"] == "1"


def test_requests_in_flight_together(client: triton.InferenceServerClient) -> None:
    """Answers of concurrent requests go to those who asked."""
    expected, pending = [], []
    for number in range(16):
        a, b, _ = addends()
        expected.append(plain(a + number + b))
        pending.append(client.async_infer("add_sub", [tensor("a", a + number, "FP32"), tensor("b", b, "FP32")]))

    assert [plain(request.get_result().as_numpy("sum")) for request in pending] == expected


def test_a_batch_in_one_request(client: triton.InferenceServerClient) -> None:
    """A request may have as many rows as the model takes."""
    a, b, inputs = addends(rows=MAX_BATCH_SIZE)

    assert plain(client.infer("add_sub", inputs).as_numpy("sum")) == plain(a + b)


def too_many_rows() -> tuple[str, str, list[triton.InferInput]]:
    return "add_sub", "", addends(rows=MAX_BATCH_SIZE + 1)[2]


def unknown_model() -> tuple[str, str, list[triton.InferInput]]:
    return "nothing", "", addends()[2]


def unknown_version() -> tuple[str, str, list[triton.InferInput]]:
    return "add_sub", "9", addends()[2]


def wrong_datatype() -> tuple[str, str, list[triton.InferInput]]:
    return "add_sub", "", [tensor(name, np.zeros((1, 4), np.int32), "INT32") for name in "ab"]


def wrong_shape() -> tuple[str, str, list[triton.InferInput]]:
    return "add_sub", "", [tensor(name, np.zeros((1, 5), np.float32), "FP32") for name in "ab"]


def missing_input() -> tuple[str, str, list[triton.InferInput]]:
    return "add_sub", "", addends()[2][:1]


@pytest.mark.parametrize(
    ("bad", "status", "text"),
    [
        (too_many_rows, "400", "inference request batch-size must be <= 8 for 'add_sub'"),
        (unknown_model, "404", "Request for unknown model: 'nothing' is not found"),
        (unknown_version, "404", "Request for unknown model: 'add_sub' version 9 is not found"),
        (wrong_datatype, "400", "inference input 'a' data-type is 'INT32', but model 'add_sub' expects 'FP32'"),
        (wrong_shape, "400", "unexpected shape for input 'a' for model 'add_sub'. Expected [-1,4], got [1,5]"),
        (missing_input, "400", "expected 2 inputs but got 1 inputs for model 'add_sub'"),
    ],
)
def test_errors(
    client: triton.InferenceServerClient,
    bad: Callable[[], tuple[str, str, list[triton.InferInput]]],
    status: str,
    text: str,
) -> None:
    """The client raises with Triton's own status and text."""
    model, version, inputs = bad()

    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, inputs, model_version=version)

    assert raised.value.status() == status
    assert text in raised.value.message()


def test_the_server_answers_after_errors(client: triton.InferenceServerClient) -> None:
    """A connection is as good after a refused request as before."""
    a, b, inputs = addends()
    with pytest.raises(InferenceServerException):
        client.infer("nothing", inputs)

    assert plain(client.infer("add_sub", inputs).as_numpy("sum")) == plain(a + b)


async def test_aio_requests_in_flight_together(stack: Stack) -> None:
    """The asyncio client: answers of concurrent requests go to those who asked."""
    a, b, _ = addends()
    async with triton_aio.InferenceServerClient(stack.address) as client:
        replies = await asyncio.gather(
            *(
                client.infer("add_sub", [tensor("a", a + number, "FP32"), tensor("b", b, "FP32")])
                for number in range(32)
            )
        )

    assert [plain(reply.as_numpy("sum")) for reply in replies] == [plain(a + number + b) for number in range(32)]


async def test_aio_json(stack: Stack) -> None:
    """The asyncio client, without binary tensors."""
    a, b, inputs = addends(binary=False)
    async with triton_aio.InferenceServerClient(stack.address) as client:
        reply = await client.infer(
            "add_sub", inputs, outputs=[triton.InferRequestedOutput("sum", binary_data=False)], request_id="aio"
        )

    assert reply.get_response()["id"] == "aio"
    assert plain(reply.as_numpy("sum")) == plain(a + b)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_aio_compression(stack: Stack, algorithm: str) -> None:
    """The asyncio client, compressed both ways."""
    a, b, inputs = addends()
    async with triton_aio.InferenceServerClient(stack.address) as client:
        reply = await client.infer(
            "add_sub", inputs, request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
        )

    assert plain(reply.as_numpy("sum")) == plain(a + b)


async def test_aio_errors(stack: Stack) -> None:
    """The asyncio client raises with Triton's own text."""
    *_, inputs = addends()
    async with triton_aio.InferenceServerClient(stack.address) as client:
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'nothing' is not found"):
            await client.infer("nothing", inputs)
