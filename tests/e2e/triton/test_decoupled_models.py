"""Triton's decoupled examples, asked by its gRPC client and by `generate_stream`, on a whole server."""

import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import Stack, running
from tests.support.decoupled_models import write_examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    write_examples(repository)
    with running(repository, tmp_path_factory.mktemp("up")) as stack:
        yield stack


class Stream:
    """A stream of Triton's blocking client; keeps what comes, by request id."""

    def __init__(self, client: InferenceServerClient) -> None:
        self._client = client
        self._came: queue.Queue[tuple[InferResult | None, InferenceServerException | None]] = queue.Queue()
        client.start_stream(callback=lambda result, error: self._came.put((result, error)))

    def send(self, model: str, request_id: str, **inputs: Any) -> None:
        """Sends a request, which asks for an empty final response."""
        tensors = []
        for name, array in inputs.items():
            datatype = {"int32": "INT32", "uint32": "UINT32"}[array.dtype.name]
            tensors.append(InferInput(name, array.shape, datatype).set_data_from_numpy(array))
        self._client.async_stream_infer(model, tensors, request_id=request_id, enable_empty_final_response=True)

    def take(self, count: int) -> dict[str, list[list[int]]]:
        """Waits for the final responses of so many requests; returns the outputs of all, by request id."""
        outputs: dict[str, list[list[int]]] = {}
        while count:
            result, error = self._came.get(timeout=PATIENCE_S)
            assert error is None
            assert result is not None
            response = result.get_response()
            numbers = [int(result.as_numpy(output.name).item()) for output in response.outputs]
            outputs.setdefault(response.id, []).append(numbers)
            count -= response.parameters["triton_final_response"].bool_param
        return outputs


@pytest.fixture
def stream(stack: Stack) -> Iterator[Stream]:
    with InferenceServerClient(stack.grpc_address) as client:
        yield Stream(client)
        client.stop_stream()


def test_requests_of_one_instance_interleave(stream: Stream) -> None:
    """Each in its own order; one with no number has the empty final response only."""
    delays = np.array([20, 20, 20], np.uint32)
    wait = np.zeros(1, np.uint32)
    stream.send("repeat_int32", "slow", IN=np.array([4, 2, 0], np.int32), DELAY=delays, WAIT=wait)
    stream.send("repeat_int32", "quick", IN=np.array([1, 9], np.int32), DELAY=delays[:2] * 0, WAIT=wait)
    stream.send("repeat_int32", "none", IN=np.zeros(0, np.int32), DELAY=delays[:0], WAIT=wait)

    assert stream.take(3) == {
        "slow": [[4, 0], [2, 1], [0, 2], []],
        "quick": [[1, 0], [9, 1], []],
        "none": [[]],
    }


def test_many_requests_at_once(stream: Stream) -> None:
    """In batches: each has as many responses as it asks for."""
    counts = [number % 7 for number in range(60)]
    for number, count in enumerate(counts):
        stream.send("square_int32", str(number), IN=np.array([[count]], np.int32))

    assert stream.take(60) == {str(n): [[count]] * count + [[]] for n, count in enumerate(counts)}


def test_events(stack: Stack) -> None:
    """By HTTP, which leaves an empty final response out."""
    events = []
    with httpx.stream(
        "POST", f"http://{stack.address}/v2/models/square_int32/generate_stream", json={"IN": [3]}
    ) as reply:
        assert reply.status_code == 200
        events = [json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line]

    assert [event["OUT"] for event in events] == [3, 3, 3]


def test_a_single_call_is_refused(stack: Stack) -> None:
    tensor = InferInput("IN", [1, 1], "INT32").set_data_from_numpy(np.ones((1, 1), np.int32))
    with InferenceServerClient(stack.grpc_address) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("square_int32", [tensor])

    assert "ModelInfer RPC doesn't support models with decoupled transaction policy" in str(caught.value)
