"""Models in the shape of Triton's own examples, as their users write them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from qinfer.backends.base import Array, Batch
from qinfer.backends.python import PythonBackend, complete_config
from qinfer.core.messages import InferRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import InferenceFailed
from qinfer.models.config import config
from qinfer.models.spec import Device, ModelSpec
from qinfer.tensors import from_numpy, to_numpy
from tests.support.backends import Answers
from tests.support.decoupled_models import REPEAT, REPEAT_CONFIG, SQUARE, SQUARE_CONFIG
from tests.support.python_examples import (
    ADD_SUB,
    AUTO_COMPLETE,
    BLS_ASYNC,
    BLS_SYNC,
    CUSTOM_METRICS,
    INPUTS,
    INSTANCE_KIND,
    MODEL_NAME,
    OUTPUTS,
)
from tests.support.python_models import DECOUPLED, Streamed


def write(directory: Path, code: str, text: str) -> ModelSpec:
    version = directory / "model" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    read = config.parse(f'name: "model" backend: "python" {text}')
    return config.to_spec(config.normalise(read, "model", ["model.py"]), LimitSettings())


def ask(
    directory: Path, spec: ModelSpec, answers: Answers, device: Device | None = None, **inputs: Array
) -> dict[str, list[float]]:
    """Loads a model, has it answer one request, unloads it."""
    backend = PythonBackend()
    backend.load(spec, directory / "model" / "1", device or Device())
    try:
        request = InferRequest(model="model", inputs=())
        backend.execute(Batch(requests=[request], rows=[1], inputs=inputs), answers)
    finally:
        backend.unload()
    outputs = answers.by_item[0]
    assert isinstance(outputs, tuple), outputs
    return {tensor.name: to_numpy(tensor).ravel().tolist() for tensor in outputs}


def add_sub(request: InferRequest) -> Response:
    """Answers calls as the model `add_sub` does, which there is, or `pytorch`, which adds the same."""
    if request.model not in ("add_sub", "pytorch"):
        raise InferenceFailed(f"Request for unknown model: '{request.model}' is not found")
    a, b = (to_numpy(tensor) for tensor in request.inputs)
    return Response(request_id="", outputs=(from_numpy("OUTPUT0", a + b), from_numpy("OUTPUT1", a - b)))


A, B = np.array([1, 2, 3, 4], "<f4"), np.array([4, 3, 2, 1], "<f4")
RESULT = {"OUTPUT0": [5, 5, 5, 5], "OUTPUT1": [-3, -1, 1, 3]}


def test_add_sub(tmp_path: Path) -> None:
    """The first example of all."""
    spec = write(tmp_path, ADD_SUB, INPUTS + OUTPUTS)

    assert ask(tmp_path, spec, Answers(), INPUT0=A, INPUT1=B) == RESULT


def test_auto_complete(tmp_path: Path) -> None:
    """Whatever the configuration says already."""
    write(tmp_path, AUTO_COMPLETE, INPUTS + OUTPUTS)
    partial = config.parse(f'name: "model" backend: "python" {INPUTS}')

    complete = config.normalise(complete_config(partial, tmp_path / "model" / "1"), "model", ["model.py"])

    spec = config.to_spec(complete, LimitSettings())
    assert (spec.max_batch_size, [i.name for i in spec.inputs]) == (4, ["INPUT0", "INPUT1"])
    assert json.loads(spec.config_json)["dynamic_batching"]["preferred_batch_size"] == [4]
    assert ask(tmp_path, spec, Answers(), INPUT0=A.reshape(1, 4), INPUT1=B.reshape(1, 4)) == RESULT


def test_business_logic_scripting(tmp_path: Path) -> None:
    """One call after the other, the model named by a string of the request."""
    spec = write(tmp_path, BLS_SYNC, INPUTS + MODEL_NAME + OUTPUTS)
    name = np.array([b"add_sub"], dtype=object)

    assert ask(tmp_path, spec, Answers(add_sub), INPUT0=A, INPUT1=B, MODEL_NAME=name) == RESULT
    with pytest.raises(InferenceFailed, match="TritonModelException: Request for unknown model: 'nobody'"):
        ask(tmp_path, spec, Answers(add_sub), INPUT0=A, INPUT1=B, MODEL_NAME=np.array([b"nobody"], dtype=object))


def test_asynchronous_business_logic_scripting(tmp_path: Path) -> None:
    """Two calls at once."""
    spec = write(tmp_path, BLS_ASYNC, INPUTS + OUTPUTS)

    assert ask(tmp_path, spec, Answers(add_sub), INPUT0=A, INPUT1=B) == RESULT


def test_custom_metrics(tmp_path: Path) -> None:
    """The model runs; the metric is the process's own."""
    spec = write(tmp_path, CUSTOM_METRICS, INPUTS + OUTPUTS)

    assert ask(tmp_path, spec, Answers(), INPUT0=A, INPUT1=B) == RESULT


def test_instance_kind(tmp_path: Path) -> None:
    """The model is told its device, and chooses it itself."""
    spec = write(tmp_path, INSTANCE_KIND, INPUTS + OUTPUTS)

    assert ask(tmp_path, spec, Answers(), Device("gpu", 1), INPUT0=A, INPUT1=B) == RESULT


def test_a_model_completes_its_transaction_policy(tmp_path: Path) -> None:
    code = AUTO_COMPLETE.replace("set_dynamic_batching()", 'set_model_transaction_policy({"decoupled": True})')
    write(tmp_path, code, INPUTS + OUTPUTS)
    complete = complete_config(config.parse('backend: "python"'), tmp_path / "model" / "1")

    spec = config.to_spec(config.normalise(complete, "model", ["model.py"]), LimitSettings())

    assert spec.decoupled


@contextmanager
def started(directory: Path, code: str, text: str) -> Iterator[PythonBackend]:
    """Loads a decoupled model."""
    backend = PythonBackend()
    backend.load(write(directory, code, text + DECOUPLED), directory / "model" / "1", Device())
    try:
        yield backend
    finally:
        backend.unload()


def send(backend: PythonBackend, **inputs: Array) -> Streamed:
    """Sends one request to a decoupled model."""
    responses = Streamed()
    backend.execute(Batch(requests=[InferRequest(model="model", inputs=())], rows=[1], inputs=inputs), responses)
    return responses


def test_repeat(tmp_path: Path) -> None:
    """A response for each number, each after a delay of its own; `execute` returns when the request says so."""
    with started(tmp_path, REPEAT, REPEAT_CONFIG) as backend:
        numbers = np.array([4, 2, 0, 1], "<i4")
        slow = send(backend, IN=numbers, DELAY=np.full(4, 20, "<u4"), WAIT=np.array([0], "<u4"))
        none = send(backend, IN=numbers[:0], DELAY=np.zeros(0, "<u4"), WAIT=np.array([1], "<u4"))

        assert (none.final(), slow.final()) == ((), ())

    assert (none.numbers, slow.numbers) == ({}, {0: [4.0, 2.0, 0.0, 1.0]})


def test_square(tmp_path: Path) -> None:
    """As many responses as the number says, for each request of a batch, from a thread each."""
    with started(tmp_path, SQUARE, SQUARE_CONFIG) as backend:
        responses = Streamed()
        requests = [InferRequest(model="model", inputs=()) for _ in range(3)]
        numbers = np.array([[3], [0], [5]], "<i4")
        backend.execute(Batch(requests=requests, rows=[1, 1, 1], inputs={"IN": numbers}), responses)

        assert [responses.final(item) for item in range(3)] == [(), (), ()]

    assert responses.numbers == {0: [3.0] * 3, 2: [5.0] * 5}
