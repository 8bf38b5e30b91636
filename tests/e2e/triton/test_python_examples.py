"""Models in the shape of the examples of Triton's Python backend, asked by clients in the shape of theirs."""

import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from qinfer.backends.base import Array
from tests.e2e.conftest import Stack, running
from tests.support.python_examples import write_examples

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

PATIENCE_S = 30.0
SUM, DIFFERENCE = "OUTPUT0", "OUTPUT1"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    write_examples(repository)
    with running(repository, tmp_path_factory.mktemp("up")) as stack:
        yield stack


@pytest.fixture
def http(stack: Stack) -> Iterator[Any]:
    with over_http.InferenceServerClient(stack.address) as client:
        yield client


@pytest.fixture
def grpc(stack: Stack) -> Iterator[Any]:
    with over_grpc.InferenceServerClient(stack.grpc_address) as client:
        yield client


def given(module: Any, **arrays: Array) -> list[Any]:
    """Makes the inputs of a request."""
    inputs = []
    for name, array in arrays.items():
        one = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        one.set_data_from_numpy(array)
        inputs.append(one)
    return inputs


def infer(client: Any, model: str, outputs: tuple[str, ...], **arrays: Array) -> Any:
    """Asks over HTTP for outputs by their names."""
    wanted = [over_http.InferRequestedOutput(name) for name in outputs]
    return client.infer(model, given(over_http, **arrays), request_id="1", outputs=wanted)


def added(client: Any, model: str, **more: Array) -> None:
    """Checks sum and difference of two random rows."""
    a, b = np.random.default_rng(0).random((2, 4), np.float32)
    result = infer(client, model, (SUM, DIFFERENCE), INPUT0=a, INPUT1=b, **more)
    np.testing.assert_allclose(result.as_numpy(SUM), a + b)
    np.testing.assert_allclose(result.as_numpy(DIFFERENCE), a - b)


@pytest.mark.parametrize("model", ["add_sub", "bls_async", "custom_metrics"])
def test_sum_and_difference(http: Any, model: str) -> None:
    added(http, model)


@pytest.mark.parametrize("model", ["add_sub", "pytorch"])
def test_a_model_calls_the_one_that_its_client_names(http: Any, model: str) -> None:
    added(http, "bls_sync", MODEL_NAME=np.array([model], object))


def test_the_client_names_no_model(http: Any) -> None:
    with pytest.raises(InferenceServerException) as refused:
        added(http, "bls_sync", MODEL_NAME=np.array(["undefined_model"], object))

    assert "Failed for execute the inference request. Model 'undefined_model' is not ready." in refused.value.message()


@pytest.mark.parametrize(("model", "calls"), [("bls_decoupled_sync", 1), ("bls_decoupled_async", 2)])
def test_a_model_sums_the_responses_of_a_decoupled_one(http: Any, model: str, calls: int) -> None:
    """The square of each number for each call, also of the one that has no response."""
    numbers = [4, 2, 0, 1]

    sums = [infer(http, model, ("SUM",), IN=np.array([n], np.int32)).as_numpy("SUM").tolist() for n in numbers]

    assert sums == [[calls * n * n] for n in numbers]


@pytest.mark.parametrize("code", range(8))
def test_the_code_of_an_error_reaches_the_calling_model(http: Any, code: int) -> None:
    result = infer(http, "error_caller", ("RECEIVED_CODE", "ERROR_MESSAGE"), ERROR_CODE=np.array([code], np.int32))

    assert result.as_numpy("RECEIVED_CODE").tolist() == [code]
    assert f"an error of code {code}" in result.as_numpy("ERROR_MESSAGE")[0].decode()


@pytest.mark.parametrize(("model", "rows"), [("batch_auto_complete", 4), ("nobatch_auto_complete", 0)])
def test_a_model_that_completes_its_configuration(http: Any, model: str, rows: int) -> None:
    config = http.get_model_config(model)

    assert config["max_batch_size"] == rows
    assert ("dynamic_batching" in config) == bool(rows)
    for kind in ("input", "output"):
        ports = [(port["name"], port["data_type"], port["dims"]) for port in config[kind]]
        assert ports == [(f"{kind.upper()}{n}", "TYPE_FP32", [4]) for n in range(2)]


def test_metrics_of_the_models_own(stack: Stack) -> None:
    metrics = httpx.get(f"http://{stack.address}/metrics").text

    assert "# HELP requests_process_latency_ns Cumulative time spent processing requests" in metrics
    assert "# TYPE requests_process_latency_ns counter" in metrics
    assert 'requests_process_latency_ns{model="custom_metrics",version="1"} 5\n' in metrics


def test_a_rescheduled_request_is_answered_once(grpc: Any) -> None:
    a, b = np.random.default_rng(0).random((2, 4), np.float32)
    for _ in range(2):
        result = grpc.infer("rescheduled_add_sub", given(over_grpc, INPUT0=a, INPUT1=b))

        assert np.array_equal(result.as_numpy(SUM), a + b)
        assert np.array_equal(result.as_numpy(DIFFERENCE), a - b)


def test_each_iteration_sends_a_response(grpc: Any) -> None:
    """Without an empty last response, as the client asks for none."""
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    grpc.start_stream(lambda result, error: came.put((result, error)))
    for _ in range(2):
        grpc.async_stream_infer("iterative_sequence", given(over_grpc, IN=np.array([3], np.int32)))
        results = [came.get(timeout=PATIENCE_S) for _ in range(3)]

        assert [error for _, error in results] == [None] * 3
        assert [int(result.as_numpy("OUT")[0]) for result, _ in results] == [2, 1, 0]
    grpc.stop_stream()
    assert came.empty()


def test_a_request_that_has_ended_can_not_be_rescheduled(grpc: Any) -> None:
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    grpc.start_stream(lambda result, error: came.put((result, error)))
    for _ in range(2):
        inputs = given(over_grpc, IN=np.array([1], np.int32))
        grpc.async_stream_infer("final_flag_first", inputs, enable_empty_final_response=True)
        (one, no_error), (last, none) = (came.get(timeout=PATIENCE_S) for _ in range(2))

        assert (no_error, none) == (None, None)
        assert one.as_numpy("OUT").tolist() == [0]
        assert list(last.get_response().outputs) == []
        assert last.get_response().parameters["triton_final_response"].bool_param
    grpc.stop_stream()
    assert came.empty()


def test_a_model_calls_models_that_reschedule(http: Any) -> None:
    """One that answers once, one that sends a response with each execution, and one that returns what it must not."""
    result = infer(http, "bls_rescheduling", ("TOLD",), IN=np.array([3], np.int32))

    told = json.loads(result.as_numpy("TOLD")[0])
    assert (told["sums"], told["counted"]) == ([0.0, 2.0, 4.0, 6.0], [2, 1, 0])
    assert "Expected a None object in the execute function return list for reschduled request" in told["wrong"]


def test_a_model_knows_its_instance(http: Any) -> None:
    row = np.arange(4, dtype=np.float32)

    result = infer(http, "instance_kind", ("OUTPUT", "TOLD"), INPUT=row)

    assert result.as_numpy("OUTPUT").tolist() == (row * 2).tolist()
    assert json.loads(result.as_numpy("TOLD")[0]) == {
        "instance_kind": "CPU",
        "instance_device_id": "0",
        "version": "1",
        "name": "instance_kind",
    }


@pytest.mark.parametrize("colour", range(3))
def test_an_image_is_decoded_before_its_classification(grpc: Any, colour: int) -> None:
    """The client sends the bytes of a file to an ensemble, and reads the label of the largest score."""
    pixels = np.full((5, 7, 3), 20, np.uint8)
    pixels[..., colour] = 250
    file = np.frombuffer(b"P6\n7 5\n255\n" + pixels.tobytes(), np.uint8)
    wanted = [over_grpc.InferRequestedOutput("OUTPUT")]

    result = grpc.infer("ensemble_python_colours", given(over_grpc, INPUT=file[np.newaxis]), outputs=wanted)

    assert result.as_numpy("OUTPUT").shape == (1, 3)
    assert np.argmax(result.as_numpy("OUTPUT"), axis=1).tolist() == [colour]
