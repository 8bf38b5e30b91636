"""qinfer's own client against a gateway that serves on a real socket."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

import qinfer
from qinfer import errors
from qinfer.client import InferResult, RequestHandle
from qinfer.tensors import from_numpy
from tests.support.gateway import Running, running_gateway

X = np.array([[1.0, 2.0, 3.0, 4.0]], dtype=np.float32)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as running:
        yield running


@pytest.fixture
async def client(running: Running) -> AsyncIterator[qinfer.AsyncClient]:
    async with qinfer.AsyncClient(running.url, timeout_s=20) as client:
        yield client


def number(outcome: InferResult | errors.QinferError) -> float:
    assert isinstance(outcome, InferResult), outcome
    return float(outcome["y"][0, 0])


async def test_infer(client: qinfer.AsyncClient) -> None:
    """A batch goes in, the same comes out of `echo`."""
    result = await client.infer("echo", {"x": X}, version=2, id="mine")

    assert result["y"].tolist() == X.tolist()
    assert (result.model, result.version, result.id) == ("echo", 2, "mine")


async def test_the_blocking_client(running: Running) -> None:
    """The same from a thread."""

    def ask() -> InferResult:
        with qinfer.Client(running.url) as client:
            assert client.is_live()
            assert client.is_ready("echo")
            assert not client.is_ready("loading")
            return client.infer("späte modelle", {"x": X})

    assert (await asyncio.to_thread(ask))["y"].tolist() == X.tolist()


async def test_texts_and_half_floats(client: qinfer.AsyncClient) -> None:
    """BYTES come back as `bytes`, whatever they are; FP16 has no form but the binary one."""
    texts = np.array([["grüße", "b"], [b"\xff\x00", ""]], dtype=object)
    half = np.array([[0.5, 1.5]], dtype=np.float16)

    found = await client.infer("text", {"x": texts})
    halves = await client.infer("half", {"x": half})

    assert found["y"].tolist() == [["grüße".encode(), b"b"], [b"\xff\x00", b""]]
    assert (halves["y"].dtype.name, halves["y"].tolist()) == ("float16", half.tolist())


async def test_several_inputs_and_a_chosen_output(client: qinfer.AsyncClient) -> None:
    """Outputs are asked for by name."""
    a, b = np.array([[1, 2]], np.int32), np.array([[3, 4]], np.int32)

    result = await client.infer("pair", {"a": a, "b": b}, outputs=["b"])

    assert {name: array.tolist() for name, array in result.items()} == {"b": [[3, 4]]}


@pytest.mark.parametrize(
    ("model", "inputs", "raised", "message"),
    [
        ("fails", {"x": X}, errors.InferenceFailed, "the model raised: boom"),
        ("nobody", {"x": X}, errors.ModelNotFound, "unknown model: 'nobody'"),
        ("echo", {"z": X}, errors.InvalidRequest, "z"),
        ("echo", {"x": X.astype(np.float64)}, errors.InvalidRequest, "FP64"),
    ],
    ids=["fails", "unknown", "input", "datatype"],
)
async def test_errors_are_the_servers(
    client: qinfer.AsyncClient, model: str, inputs: dict[str, Any], raised: type[errors.QinferError], message: str
) -> None:
    """Each kind of failure has its class, with the server's text."""
    with pytest.raises(raised) as caught:
        await client.infer(model, inputs)

    assert message in caught.value.message


async def test_no_answer_in_time(running: Running) -> None:
    """The client gives up by itself, and its request is not left behind."""
    async with qinfer.AsyncClient(running.url, timeout_s=0.2) as client:
        with pytest.raises(errors.DeadlineExceeded, match=r"no answer within 0\.2 s"):
            await client.infer("stuck", {"x": X})


async def test_no_gateway(unused_tcp_port: int) -> None:
    """A refused connection says what to do."""
    async with qinfer.AsyncClient(f"http://127.0.0.1:{unused_tcp_port}", max_retries=0) as client:
        assert not await client.is_live()
        with pytest.raises(errors.Unreachable, match="qinfer up"):
            await client.infer("echo", {"x": X})


async def test_metadata(client: qinfer.AsyncClient) -> None:
    """What one needs to make the arrays."""
    metadata = await client.metadata("echo")

    assert metadata.versions == ("1", "2")
    assert [(t.name, t.datatype, t.shape) for t in metadata.inputs] == [("x", "FP32", (-1, 4))]


async def test_stream(running: Running, client: qinfer.AsyncClient) -> None:
    """Many inputs, in order, with a tensor that names its datatype among them."""
    inputs = ({"x": from_numpy("x", X * n)} if n % 2 else {"x": X * n} for n in range(200))

    found = [(n, number(outcome)) async for n, outcome in client.stream("echo", inputs, concurrency=16)]

    assert found == [(n, float(n)) for n in range(200)]


async def test_stream_from_threads(running: Running) -> None:
    """The blocking client's, unordered; one failure does not end it."""
    inputs = [{"x": X * n} if n != 5 else {"z": X} for n in range(100)]

    def ask() -> dict[int, InferResult | errors.QinferError]:
        with qinfer.Client(running.url) as client:
            return dict(client.stream("echo", inputs, concurrency=8, ordered=False))

    found = await asyncio.to_thread(ask)

    assert isinstance(found.pop(5), errors.InvalidRequest)
    assert {n: number(outcome) for n, outcome in found.items()} == {n: float(n) for n in range(100) if n != 5}


async def test_submit_and_result(client: qinfer.AsyncClient) -> None:
    """Handed over now, fetched later, as often as one likes, by handle or by id."""
    handle = await client.submit("echo", {"x": X}, id="mine")

    result = await client.result(handle)
    again = await client.result(handle.id)
    status = await client.status(handle)

    assert result["y"].tolist() == again["y"].tolist() == X.tolist()
    assert result.id == "mine"
    assert (status.state, status.model, status.has_ended) == ("succeeded", "echo", True)


async def test_a_key_makes_one_request(client: qinfer.AsyncClient) -> None:
    """The same key and content are one request; other content is a conflict."""
    key = str(uuid.uuid4())

    first = await client.submit("echo", {"x": X}, idempotency_key=key)
    second = await client.submit("echo", {"x": X}, idempotency_key=key)

    assert first == second
    with pytest.raises(errors.Conflict):
        await client.submit("echo", {"x": X + 1}, idempotency_key=key)


async def test_an_id_of_ones_own(client: qinfer.AsyncClient) -> None:
    """Another process finds the request by its model and id."""
    await client.submit("echo", {"x": X}, request_id="row-17")

    result = await client.result(RequestHandle.named("echo", "row-17"))

    assert result["y"].tolist() == X.tolist()


async def test_no_result_yet_and_cancel(client: qinfer.AsyncClient) -> None:
    """A request that waits can be looked at and cancelled; its result is then that it was."""
    handle = await client.submit("stuck", {"x": X})

    with pytest.raises(errors.ResultNotFound, match="is queued"):
        await client.result(handle, wait_s=0)
    assert await client.cancel(handle) == "cancelled"
    with pytest.raises(errors.Cancelled):
        await client.result(handle)


async def test_a_request_that_fails(client: qinfer.AsyncClient) -> None:
    """The model's error is the result."""
    handle = await client.submit("fails", {"x": X})

    with pytest.raises(errors.InferenceFailed, match="the model raised: boom"):
        await client.result(handle)


async def test_an_unknown_request(client: qinfer.AsyncClient) -> None:
    """404 is about the request, not about a model."""
    with pytest.raises(errors.RequestNotFound):
        await client.result("01ARZ3NDEKTSV4RRFFQ69G5FAV.0.echo")


async def test_hedged_requests_are_executed_once(running: Running) -> None:
    """Each is sent twice, with one key, before the first is answered."""
    async with qinfer.AsyncClient(running.url, timeout_s=20, hedge_after=1e-6, retry_share=None) as client:
        executed = len(running.requests)

        handles = [await client.submit("echo", {"x": X + n}) for n in range(20)]
        results = [await client.result(handle, wait_s=20) for handle in handles]

    assert [number(result) for result in results] == [1.0 + n for n in range(20)]
    assert len({handle.id for handle in handles}) == len(running.requests) - executed == 20


async def test_a_stream_is_resumed_by_its_keys(running: Running, client: qinfer.AsyncClient) -> None:
    """The second time the results are only read."""

    async def ask() -> list[tuple[int, float]]:
        inputs = ({"x": X * n} for n in range(20))
        stream = client.stream("echo", inputs, concurrency=4, keys=lambda index, item: f"night-{index}")
        return [(n, number(outcome)) async for n, outcome in stream]

    first = await ask()
    executed = len(running.requests)

    assert await ask() == first == [(n, float(n)) for n in range(20)]
    assert len(running.requests) == executed


async def test_other_clients_of_the_protocol_get_json(running: Running) -> None:
    """The gateway answers in JSON unless it is asked for binary: the client asks for it."""
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}

    async with httpx.AsyncClient() as plain:
        reply = await plain.post(f"{running.url}/v2/models/echo/infer", json=body)

    assert reply.json()["outputs"][0]["data"] == [1, 2, 3, 4]
