"""`infer_stream` of both clients, against a gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
import pytest_asyncio

import qinfer
from qinfer.errors import InferenceFailed
from tests.support.gateway import Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

X = np.array([[1 / 3, np.inf, -0.0, 1e-45]], np.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as gateway:
        yield gateway


@pytest.mark.parametrize("responses", [0, 1, 3])
async def test_every_response_is_a_result(running: Running, responses: int) -> None:
    def blocking() -> list[bytes]:
        with qinfer.Client(running.url) as client:
            results = client.infer_stream("echo", {"x": X}, parameters={"responses": responses})
            return [result["y"].tobytes() for result in results]

    async with qinfer.AsyncClient(running.url) as client:
        results = client.infer_stream("echo", {"x": X}, parameters={"responses": responses})
        awaited = [result["y"].tobytes() async for result in results]

    assert await asyncio.to_thread(blocking) == awaited == [X.tobytes()] * responses


@pytest.mark.parametrize("model", ["echo", "text"])
async def test_inputs_may_be_lists(running: Running, model: str) -> None:
    """The datatypes of the model's inputs are read before, in a call of their own."""
    values = [[1.5, 2.0, 3.0, 4.0]] if model == "echo" else [["a", "ü"]]

    def blocking() -> list[list[object]]:
        with qinfer.Client(running.url) as client:
            return [result["y"].tolist() for result in client.infer_stream(model, {"x": values})]

    async with qinfer.AsyncClient(running.url) as client:
        awaited = [result["y"].tolist() async for result in client.infer_stream(model, {"x": values})]

    expected = [[[1.5, 2.0, 3.0, 4.0]]] if model == "echo" else [[[b"a", "ü".encode()]]]
    assert await asyncio.to_thread(blocking) == awaited == expected


async def test_any_bytes_are_exact(running: Running) -> None:
    texts = np.array([[bytes(range(256)), b""]], object)

    async with qinfer.AsyncClient(running.url) as client:
        [result] = [one async for one in client.infer_stream("text", {"x": texts})]

    assert result["y"].tolist() == texts.tolist()


async def test_a_failure_is_raised_by_its_code(running: Running) -> None:
    async with qinfer.AsyncClient(running.url, max_retries=0) as client:
        with pytest.raises(InferenceFailed, match="boom"):
            await anext(client.infer_stream("fails", {"x": X}))


async def test_a_stream_that_is_left_frees_its_connection(running: Running) -> None:
    """The next call takes it, and reads nothing of the former."""
    async with qinfer.AsyncClient(running.url) as client:
        stream = client.infer_stream("echo", {"x": X}, parameters={"responses": 3})
        async with aclosing(stream) as results:  # type: ignore[type-var]  # it is a generator
            await anext(results)
        again = await client.infer("echo", {"x": X + 1})

    assert again["y"].tobytes() == (X + 1).tobytes()
