"""Triton's own HTTP clients, unchanged, against the whole server: what only HTTP has, such as tensors as JSON."""

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
from tests.support.models import MAX_BATCH_SIZE

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
