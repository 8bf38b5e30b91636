"""The onnxruntime backend against models made with the `onnx` package."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from qinfer.backends.base import Array, Batch, Context
from qinfer.backends.onnx import OnnxBackend
from qinfer.backends.registry import factory
from qinfer.backends.shapes import with_shapes
from qinfer.backends.stub import StubBackend
from qinfer.core.messages import InferRequest
from qinfer.errors import (
    InferenceFailed,
    InvalidRequest,
    ModelLoadFailed,
    OutputMismatch,
)
from qinfer.models.spec import Device, ModelSpec, TensorSpec
from qinfer.testing.backend_contract import ALL_DATATYPES, BackendContract
from tests.support.backends import Answers, ragged, save_scaled, xy


def save(directory: Path, kind: int, shape: Sequence[int | str] = ("n", 2), op: str = "Identity") -> Path:
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"]), helper.make_node("Shape", ["x"], ["s"])],
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [
            helper.make_tensor_value_info("y", kind, shape),
            helper.make_tensor_value_info("s", TensorProto.INT64, [len(shape)]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, directory / "model.onnx")
    return directory


def spec(datatype: str, **changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "name": "m",
        "backend": "onnxruntime",
        "max_batch_size": 8,
        "inputs": (TensorSpec(name="x", datatype=datatype, dims=(2,)),),
        "outputs": (TensorSpec(name="y", datatype=datatype, dims=(2,)),),
        **changes,
    }
    return ModelSpec(**fields)  # type: ignore[arg-type]


def batch(array: Array, rows: Sequence[int], outputs: tuple[str, ...] = ()) -> Batch:
    request = InferRequest(model="m", inputs=(), outputs=outputs)
    return Batch(requests=[request] * len(rows), rows=rows, inputs={"x": array})


def loaded(directory: Path, model: ModelSpec) -> OnnxBackend:
    backend = OnnxBackend()
    backend.load(model, directory, Device())
    return backend


class TestContract(BackendContract):
    datatypes = ("FP32", *(name for name in ALL_DATATYPES if name != "FP32"))
    thread_parameter = "intra_op_thread_count"

    def create(self) -> OnnxBackend:
        return OnnxBackend()

    def write(self, version_dir: Path, datatype: str, factor: int) -> ModelSpec:
        save_scaled(version_dir, datatype, factor)
        return xy("onnxruntime", datatype)

    def write_ragged(self, version_dir: Path) -> ModelSpec:
        save_scaled(version_dir, "FP32", shape=("n",))
        return ragged("onnxruntime")


def test_strings_that_are_not_utf8_fail_their_item_only(tmp_path: Path) -> None:
    """A bad item is refused, its batch-mates are answered."""
    backend, answers = loaded(save(tmp_path, TensorProto.STRING), spec("BYTES")), Answers()
    rows = np.array([[b"a", b"b"], [b"\xff", b"c"], [b"d", b"e"]], dtype=object)

    backend.execute(batch(rows, [1, 1, 1]), answers)

    assert isinstance(answers.by_item[1], InvalidRequest)
    assert answers.array(2).tolist() == [[b"d", b"e"]]


def test_only_wanted_outputs_are_returned(tmp_path: Path) -> None:
    """An item that names its outputs gets these, in its order."""
    outputs = (
        TensorSpec(name="y", datatype="FP32", dims=(2,)),
        TensorSpec(name="s", datatype="INT64", dims=(2,)),
    )
    backend, answers = (
        loaded(
            save(tmp_path, TensorProto.FLOAT),
            spec(
                "FP32",
                max_batch_size=0,
                inputs=(TensorSpec(name="x", datatype="FP32", dims=(-1, 2)),),
                outputs=(TensorSpec(name="y", datatype="FP32", dims=(-1, 2)), outputs[1]),
            ),
        ),
        Answers(),
    )

    backend.execute(batch(np.zeros((3, 2), "f4"), [1], ("s",)), answers)

    assert answers.array(0).tolist() == [3, 2]


def test_refused_batch_has_the_runtimes_message(tmp_path: Path) -> None:
    """What onnxruntime says reaches the client."""
    backend = loaded(save(tmp_path, TensorProto.FLOAT), spec("FP32"))

    with pytest.raises(InferenceFailed, match="onnx runtime error"):
        backend.execute(batch(np.zeros((3, 5), "f4"), [3]), Answers())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inputs": (TensorSpec(name="z", datatype="FP32", dims=(2,)),)}, "needs inputs that its configuration lacks"),
        ({"outputs": (TensorSpec(name="z", datatype="FP32", dims=(2,)),)}, "unexpected inference output 'z'"),
        ({"outputs": (TensorSpec(name="y", datatype="FP64", dims=(2,)),)}, "the model has FP32"),
        ({"outputs": (TensorSpec(name="y", datatype="FP32", dims=(3,)),)}, r"shape \[-1, 2\]"),
        ({"parameters": {"intra_op_thread_count": "many"}}, "must be a number"),
        ({"filename": "other.onnx"}, "no file 'other.onnx'"),
    ],
)
def test_load_says_what_is_wrong(tmp_path: Path, changes: dict[str, object], text: str) -> None:
    """Each contradiction between model and configuration is named."""
    with pytest.raises(ModelLoadFailed, match=text):
        loaded(save(tmp_path, TensorProto.FLOAT), spec("FP32", **changes))


def test_fixed_batch_dimension_is_refused(tmp_path: Path) -> None:
    """A model whose first dimension is fixed can't be batched."""
    with pytest.raises(ModelLoadFailed, match="first dimension is fixed to 1"):
        loaded(save(tmp_path, TensorProto.FLOAT, (1, 2)), spec("FP32"))


def test_thread_parameters_are_accepted(tmp_path: Path) -> None:
    """Triton's names for onnxruntime's options load a working session."""
    parameters = {"intra_op_thread_count": "1", "inter_op_thread_count": "2", "execution_mode": "1"}
    backend, answers = (
        loaded(save(tmp_path, TensorProto.FLOAT), spec("FP32", parameters=parameters, graph_level=-1)),
        Answers(),
    )

    backend.execute(batch(np.ones((1, 2), "f4"), [1]), answers)

    assert answers.array(0).tolist() == [[1, 1]]


def test_registry_knows_the_backend() -> None:
    """The name in a configuration leads to the class."""
    assert factory("onnxruntime") is OnnxBackend


def test_reshape_gives_model_and_client_their_own_shapes(tmp_path: Path) -> None:
    """A model of scalars, `[n]`, serves clients that see `[n, 1]`."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx"
    )
    scalar = {"datatype": "FP32", "dims": (1,), "reshape": ()}
    model = spec("FP32", inputs=(TensorSpec(name="x", **scalar),), outputs=(TensorSpec(name="y", **scalar),))  # type: ignore[arg-type]
    backend = with_shapes(OnnxBackend(), model)
    backend.load(model, tmp_path, Device())
    answers = Answers()

    requests = [InferRequest(model="m", inputs=()), InferRequest(model="m", inputs=())]
    batch = Batch(requests=requests, rows=[1, 2], inputs={"x": np.array([[1], [2], [3]], np.float32)})
    backend.execute(batch, answers)

    assert answers.array(0).tolist() == [[1.0]]
    assert answers.array(1).tolist() == [[2.0], [3.0]]


@pytest.mark.parametrize(
    ("dims", "reshape"), [((2,), (2, 1)), ((-1, 2), (-1, 2, 1)), ((-1, -1, 1), (-1, -1)), ((4, -1), (2, 2, -1))]
)
def test_reshape_refuses_an_output_of_another_size(dims: tuple[int, ...], reshape: tuple[int, ...]) -> None:
    """A model that returns more or fewer elements than the client's shape holds, or lacks a dimension, is told so."""
    shape = TensorSpec(name="y", datatype="FP32", dims=dims, reshape=reshape)
    model = spec("FP32", backend="stub", outputs=(shape,))
    backend = with_shapes(StubBackend(), model)
    backend.load(model, Path(), Device())

    with pytest.raises(OutputMismatch, match=r"'y' as FP32\[1, 3\]"):
        backend.execute(batch(np.ones((1, 3), "f4"), [1]), Answers())


@pytest.mark.parametrize(
    ("dims", "reshape", "sent", "seen"),
    [
        ((-1, 1), (-1,), (2, 3, 1), (2, 3)),
        ((-1, 1), (-1,), (2, 0, 1), (2, 0)),
        ((-1, 4, -1), (-1, 2, 2, -1), (1, 3, 4, 5), (1, 3, 2, 2, 5)),
        ((2, -1, 3, -1, 1), (1, 2, -1, 3, -1), (1, 2, 4, 3, 5, 1), (1, 1, 2, 4, 3, 5)),
    ],
)
def test_variable_dimensions_keep_their_order(
    dims: tuple[int, ...], reshape: tuple[int, ...], sent: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    """The model sees them in the other shape, and what it answers comes back in the client's."""
    x, y = (TensorSpec(name=name, datatype="FP32", dims=dims, reshape=reshape) for name in "xy")
    model = spec("FP32", backend="stub", inputs=(x,), outputs=(y,))
    stub, answers = _Seeing(), Answers()
    backend = with_shapes(stub, model)
    backend.load(model, Path(), Device())

    backend.execute(batch(np.ones(sent, "f4"), [sent[0]]), answers)

    assert stub.seen == seen
    assert answers.array(0).shape == sent


class _Seeing(StubBackend):
    """Notes the shape that it gets."""

    def execute(self, batch: Batch, ctx: Context) -> None:
        self.seen = batch.inputs["x"].shape
        super().execute(batch, ctx)
