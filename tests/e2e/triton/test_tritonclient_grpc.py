"""Triton's own gRPC clients, unchanged, against the whole server: what only gRPC has, such as streams."""

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from tests.e2e.conftest import Stack
from tests.e2e.triton.test_tritonclient_http import Array

pytestmark = pytest.mark.slow


def tensor(name: str, array: Array, datatype: str) -> triton.InferInput:
    result = triton.InferInput(name, list(array.shape), datatype)
    result.set_data_from_numpy(array)
    return result


def addends(value: float = 0.5, rows: int = 1) -> tuple[Array, Array, list[triton.InferInput]]:
    a = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    b = np.full((rows, 4), value, np.float32)
    return a, b, [tensor("a", a, "FP32"), tensor("b", b, "FP32")]


@pytest.fixture
def client(stack: Stack) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(stack.grpc_address) as one:
        yield one


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_outputs_can_be_chosen(client: triton.InferenceServerClient, algorithm: str | None) -> None:
    """And a request has its id, whether it is compressed or not."""
    a, b, inputs = addends(rows=3)

    result = client.infer(
        "add_sub",
        inputs,
        outputs=[triton.InferRequestedOutput("difference")],
        request_id="7",
        compression_algorithm=algorithm,
    )

    assert np.array_equal(result.as_numpy("difference"), a - b)
    assert result.as_numpy("sum") is None
    assert result.get_response().id == "7"


def test_asynchronous_calls(client: triton.InferenceServerClient) -> None:
    """The client's callbacks get every answer, and an error for a wrong request."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for number in range(20):
        client.async_infer("add_sub", addends(number)[2], lambda result, error: answers.put((result, error)))
    client.async_infer("add_sub", [], lambda result, error: answers.put((result, error)))

    got = [answers.get(timeout=30) for _ in range(21)]

    assert sorted(float(result.as_numpy("sum")[0, 0]) for result, error in got if error is None) == list(range(20))
    (error,) = [error for _, error in got if error is not None]
    assert "expected 2 inputs but got 0 inputs" in error.message()


def test_a_stream_keeps_the_order(client: triton.InferenceServerClient) -> None:
    """Hundreds of requests on one call; an error in their middle is told in its turn."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(200):
        model = "nothing" if number == 100 else "add_sub"
        client.async_stream_infer(model, addends(number)[2], request_id=str(number))
    got = [answers.get(timeout=30) for _ in range(200)]
    client.stop_stream()

    errors = [number for number, (_, error) in enumerate(got) if error is not None]
    assert errors == [100]
    assert "'nothing' is not found" in got[100][1].message()
    assert [float(r.as_numpy("sum")[0, 0]) for r, error in got if error is None] == [n for n in range(200) if n != 100]


async def test_the_asyncio_client(stack: Stack) -> None:
    """Many at once, and a stream."""
    async with triton_aio.InferenceServerClient(stack.grpc_address) as client:
        results = await asyncio.gather(*[client.infer("add_sub", addends(n)[2]) for n in range(50)])

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in range(50):
                yield {"model_name": "add_sub", "inputs": addends(number)[2]}

        streamed = [result async for result, _ in client.stream_infer(requests())]

    for got in (results, streamed):
        assert [float(result.as_numpy("sum")[0, 0]) for result in got] == list(range(50))
