"""Models with control inputs and implicit states: every backend takes them beside the inputs, and returns the states.

One model, an accumulator, in the formats of several runtimes: `OUTPUT = INPUT + STATE_IN`, `STATE_OUT = OUTPUT`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper

from qinfer.backends.base import Array, Backend, Batch
from qinfer.backends.onnx import OnnxBackend
from qinfer.backends.openvino import OpenvinoBackend
from qinfer.backends.shapes import with_shapes
from qinfer.backends.stub import StubBackend
from qinfer.backends.tensorrt_build import profiles
from qinfer.backends.torch import TorchBackend
from qinfer.core.messages import InferRequest
from qinfer.errors import ModelLoadFailed
from qinfer.models.config import config
from qinfer.models.config.file_tensors import FileTensors, read_onnx
from qinfer.models.config.sequences import to_sequence_spec
from qinfer.models.repository.files import LocalFiles
from qinfer.models.sequence_spec import ControlKind, ControlSpec, DirectSpec, SequenceSpec, StateSpec
from qinfer.models.spec import ModelSpec, TensorSpec
from tests.support import models
from tests.support.backends import CPU, Answers, save_torchscript, spec, tensors

STATE = StateSpec(input="STATE_IN", output="STATE_OUT", datatype="FP32", dims=(1,), initial_dims=(1,))
START = ControlSpec(name="START", kind=ControlKind.START, datatype="FP32", true=1)
OWN = tensors(("INPUT", "FP32", (1,)))
ANSWERED = tensors(("OUTPUT", "FP32", (1,)))


def stateful(backend: str = "onnxruntime", *, states: tuple[StateSpec, ...] = (STATE,), **changes: object) -> ModelSpec:
    """Returns the configuration of an accumulator."""
    controls = changes.pop("controls", ())
    sequences = SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=4, states=states, controls=controls)  # type: ignore[arg-type]
    fields = {"inputs": OWN, "outputs": ANSWERED, "sequences": sequences, "max_batch_size": 4, **changes}
    return spec(backend, **fields)  # type: ignore[arg-type]


STATES = 'state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 1 ] }'


class Accumulator(torch.nn.Module):
    """Of a state whose argument stands before the input, and whose output stands before the answer."""

    def forward(self, state: torch.Tensor, x: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + state * (1 - start)
        return total, total


def onnx_file(repository: Path) -> Path:
    return repository / models.accumulator(repository) / "1"


def script_file(repository: Path) -> Path:
    one = torch.ones(2, 1)
    save_torchscript(Accumulator(), repository / "1" / "model.pt", (one, one, one))
    return repository / "1"


def columns(**values: list[float]) -> dict[str, Array]:
    return {name: np.array(column, np.float32).reshape(-1, 1) for name, column in values.items()}


def run(backend: Backend, inputs: dict[str, Array], *wanted: tuple[str, ...]) -> Answers:
    answers = Answers()
    requests = [InferRequest(model="m", inputs=(), outputs=outputs) for outputs in wanted]
    states = ("STATE_OUT",)
    backend.execute(Batch(requests=requests, rows=[1] * len(wanted), inputs=inputs, states=states), answers)
    return answers


@pytest.mark.parametrize("make", [OnnxBackend, OpenvinoBackend])
def test_the_states_follow_what_each_item_wants(make: Callable[[], Backend], tmp_path: Path) -> None:
    backend = make()
    backend.load(stateful(), onnx_file(tmp_path), CPU)

    answers = run(backend, columns(INPUT=[1, 2], STATE_IN=[10, 20]), (), ("OUTPUT",))

    assert [tensor.name for tensor in answers.outputs(0)] == ["OUTPUT", "STATE_OUT"]
    assert answers.array(1, 1).tolist() == [[22]]
    backend.unload()


def test_torch_counts_states_and_controls_by_their_numbers(tmp_path: Path) -> None:
    numbered = StateSpec(input="STATE__0", output="STATE_OUT__0", datatype="FP32", dims=(1,), initial_dims=(1,))
    start = ControlSpec(name="START__2", kind=ControlKind.START, datatype="FP32", true=1)
    inputs, outputs = tensors(("INPUT__1", "FP32", (1,))), tensors(("OUTPUT__1", "FP32", (1,)))
    backend = TorchBackend()
    backend.load(
        stateful("pytorch", states=(numbered,), controls=(start,), inputs=inputs, outputs=outputs),
        script_file(tmp_path),
        CPU,
    )
    answers = Answers()
    arrays = columns(INPUT__1=[1, 2], STATE__0=[10, 20], START__2=[1, 0])

    request = InferRequest(model="m", inputs=())
    backend.execute(Batch(requests=[request] * 2, rows=[1, 1], inputs=arrays, states=("STATE_OUT__0",)), answers)

    assert [tensor.name for tensor in answers.outputs(0)] == ["OUTPUT__1", "STATE_OUT__0"]
    assert [answers.array(item, 1).item() for item in (0, 1)] == [1, 22]


def test_torch_takes_states_by_the_names_of_arguments(tmp_path: Path) -> None:
    state = StateSpec(input="state", output="after", datatype="FP32", dims=(1,), initial_dims=(1,))
    start = ControlSpec(name="start", kind=ControlKind.START, datatype="FP32", true=1)
    backend = TorchBackend()
    backend.load(
        stateful("pytorch", states=(state,), controls=(start,), inputs=tensors(("x", "FP32", (1,)))),
        script_file(tmp_path),
        CPU,
    )
    answers = Answers()

    arrays = columns(x=[1], state=[10], start=[0])
    request = InferRequest(model="m", inputs=())
    backend.execute(Batch(requests=[request], rows=[1], inputs=arrays, states=("after",)), answers)

    assert answers.array(0, 1).tolist() == [[11]]


def test_torch_has_no_states_of_strings(tmp_path: Path) -> None:
    state = StateSpec(input="state", output="after", datatype="BYTES", dims=(1,), initial_dims=(1,))

    with pytest.raises(ModelLoadFailed, match="'state' is BYTES, which PyTorch has no tensors of"):
        TorchBackend().load(stateful("pytorch", states=(state,)), script_file(tmp_path), CPU)


@pytest.mark.parametrize("make", [OnnxBackend, OpenvinoBackend])
def test_a_state_that_is_answered_too_comes_twice(make: Callable[[], Backend], tmp_path: Path) -> None:
    """Whoever names no outputs gets all of the configuration, the state among them."""
    backend = make()
    backend.load(stateful(outputs=tensors(("STATE_OUT", "FP32", (1,)))), onnx_file(tmp_path), CPU)

    answers = run(backend, columns(INPUT=[1, 2], STATE_IN=[10, 20]), (), ("STATE_OUT",))

    assert [[tensor.name for tensor in answers.outputs(item)] for item in (0, 1)] == [["STATE_OUT"] * 2] * 2
    backend.unload()


def test_a_state_is_not_reshaped_as_the_output_of_its_name(tmp_path: Path) -> None:
    answered = TensorSpec(name="STATE_OUT", datatype="FP32", dims=(1, 1), reshape=(1,))
    model = stateful(outputs=(answered,))
    backend = with_shapes(OnnxBackend(), model)
    backend.load(model, onnx_file(tmp_path), CPU)

    answers = run(backend, columns(INPUT=[1, 2], STATE_IN=[10, 20]), (), ())

    assert [tensor.shape for tensor in answers.outputs(1)] == [(1, 1, 1), (1, 1)]


@pytest.mark.parametrize("make", [OnnxBackend, OpenvinoBackend])
def test_all_control_inputs_reach_the_model(make: Callable[[], Backend], tmp_path: Path) -> None:
    name = models.accumulator(tmp_path, controls=True)
    parsed = config.parse((tmp_path / name / "config.pbtxt").read_text())
    backend = make()
    backend.load(stateful(sequences=to_sequence_spec(parsed)), tmp_path / name / "1", CPU)
    inputs = columns(INPUT=[1], STATE_IN=[2], START=[1], END=[0], READY=[1]) | {"CORRID": np.array([[7]])}

    assert run(backend, inputs, ("OUTPUT",)).array().tolist() == [[3]]
    backend.unload()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"states": ()}, r"needs inputs that its configuration lacks: \['STATE_IN'\]"),
        ({"controls": (START,)}, "unexpected inference input 'START'"),
        ({"states": (replace(STATE, datatype="FP64"),)}, "the model has FP32, its configuration FP64"),
        ({"states": (replace(STATE, dims=(2,)),)}, "'STATE_IN': the model has shape"),
        ({"states": (replace(STATE, output="other"),)}, "unexpected inference output 'other'"),
    ],
)
def test_states_and_controls_are_compared_with_the_file(changed: dict[str, object], text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=text):
        OnnxBackend().load(stateful(**changed), onnx_file(tmp_path), CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(("datatype", "dtype"), [("BF16", "<f4"), ("BYTES", object), ("FP16", "<f2")])
def test_states_of_every_width(datatype: str, dtype: str, tmp_path: Path) -> None:
    """A state that the model returns as it was."""
    nodes = [helper.make_node("Identity", ["STATE_IN"], ["STATE_OUT"]), helper.make_node("Identity", ["x"], ["y"])]
    inputs: list[models.Port] = [("x", "FP32", (1,)), ("STATE_IN", datatype, (2,))]
    version = models.write(tmp_path, "m", nodes, inputs, [("y", "FP32", (1,)), ("STATE_OUT", datatype, (2,))])
    state = replace(STATE, datatype=datatype, dims=(2,))
    backend = OnnxBackend()
    backend.load(
        stateful(states=(state,), inputs=tensors(("x", "FP32", (1,))), outputs=tensors(("y", "FP32", (1,)))),
        version,
        CPU,
    )
    kept = np.array([[b"a", b""]], dtype=object) if datatype == "BYTES" else np.array([[1, 0]]).astype(dtype)

    answers = run(backend, columns(x=[1]) | {"STATE_IN": kept}, ())

    assert answers.outputs(0)[1].datatype == datatype
    np.testing.assert_array_equal(answers.array(0, 1), kept)


def test_the_stub_keeps_a_state() -> None:
    backend = StubBackend()
    backend.load(stateful("stub", parameters={"mode": "add"}), Path(), CPU)

    answers = run(backend, columns(INPUT=[1, 2], STATE_IN=[10, 20]), (), ())

    assert [answers.array(item, 1).item() for item in (0, 1)] == [11, 22]


def test_an_engine_has_shapes_of_states_and_controls() -> None:
    found = profiles(stateful("tensorrt", controls=(START,)), FileTensors(inputs=(), outputs=()), {})

    assert found["STATE_IN"] == found["START"] == ((1, 1), (4, 1), (4, 1))


def test_states_and_controls_are_not_completed_as_inputs_and_outputs(tmp_path: Path) -> None:
    """A configuration that has no inputs and outputs gets those of requests only."""
    version = tmp_path / models.accumulator(tmp_path, controls=True) / "1"
    with LocalFiles(version).blob("model.onnx", (version / "model.onnx").stat().st_size) as blob:
        declared = read_onnx(blob, "model.onnx")
    bare = config.parse(models.config("m", [], [], 4, models.sequence_batching(models.OLDEST, models.CONTROLS, STATES)))

    config.complete(bare, declared)

    assert [i.name for i in bare.input] == ["INPUT"]
    assert [o.name for o in bare.output] == ["OUTPUT", "SEEN"]
    assert bare.WhichOneof("scheduling_choice") == "sequence_batching"
