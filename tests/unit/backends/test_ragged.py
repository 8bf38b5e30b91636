"""Ragged batches: batch inputs of every kind, outputs cut by the shapes of inputs, and models of every backend."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.backends.base import Array, Backend, Batch, cut
from qinfer.backends.onnx import OnnxBackend
from qinfer.backends.shapes import batch_input, cuts_of, with_shapes
from qinfer.backends.torch import TorchBackend
from qinfer.batching.assemble import assemble, key_function
from qinfer.core.messages import InferRequest
from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.models.config import config
from qinfer.models.spec import BatchInputKind, BatchInputSpec, BatchOutputSpec, ModelSpec, TensorSpec
from qinfer.tensors import Tensor, from_numpy
from tests.support.backends import CPU, Answers, save_torchscript, tensors
from tests.support.backends import spec as spec_of
from tests.support.python_models import execute as execute_code
from tests.support.python_models import load as load_python
from tests.support.python_models import spec_of as python_spec
from tests.support.python_models import write_model
from tests.support.ragged_models import write_ragged

X = TensorSpec(name="x", datatype="FP32", dims=(-1,), ragged=True)


def request(array: Array, *outputs: str) -> InferRequest:
    return InferRequest(model="m", inputs=(from_numpy("x", array),), outputs=outputs)


def execute(backend: Backend, spec: ModelSpec, requests: Sequence[InferRequest]) -> Answers:
    """Executes requests as one batch, as the batcher makes it."""
    rows = [each.inputs[0].shape[0] for each in requests]
    answers = Answers()
    backend.execute(assemble(requests, rows, frozenset(i.name for i in spec.inputs if i.ragged)), answers)
    return answers


def load(directory: Path) -> tuple[Backend, ModelSpec]:
    text = (directory / "config.pbtxt").read_text()
    spec = config.to_spec(config.normalise(config.parse(text), directory.name, ["model.onnx"]))
    backend = with_shapes(OnnxBackend(), spec)
    backend.load(spec, directory / "1", CPU)
    return backend, spec


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Backend, ModelSpec]]:
    repository = tmp_path_factory.mktemp("ragged")
    backend, spec = load(repository / write_ragged(repository))
    yield backend, spec
    backend.unload()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (BatchInputKind.ELEMENT_COUNT, [4, 2, 4]),
        (BatchInputKind.ACCUMULATED, [4, 6, 10]),
        (BatchInputKind.ACCUMULATED_WITH_ZERO, [0, 4, 6, 10]),
        (BatchInputKind.MAX_AS_SHAPE, [0, 0, 0, 0]),
        (BatchInputKind.ITEM_SHAPE, [[1, 2], [1, 2], [2, 1], [2, 2]]),
        (BatchInputKind.ITEM_SHAPE_FLATTEN, [1, 2, 1, 2, 2, 1, 2, 2]),
    ],
)
@pytest.mark.parametrize(("datatype", "dtype"), [("INT32", "<i4"), ("FP32", "<f4")])
def test_batch_inputs(kind: BatchInputKind, expected: list[object], datatype: str, dtype: str) -> None:
    """Counts are of a request in all its rows, shapes of each row, as Triton's test `batch_input_test.py` has them."""
    made = batch_input(BatchInputSpec(kind, "i", datatype, "x", 2), [(2, 1, 2), (1, 2, 1), (1, 2, 2)])

    assert made.dtype == dtype
    np.testing.assert_array_equal(made, np.array(expected, dtype))


def test_variable_dimensions_of_an_output_are_those_of_its_source() -> None:
    cuts = cuts_of(BatchOutputSpec("y", (-1, -1, 3), "x"), [(1, 4), (2, 5)])

    assert cuts == [(1, 4, 3), (2, 5, 3)]


def test_requests_of_different_shapes_share_a_batch() -> None:
    """The shapes of ragged inputs do not tell requests apart, those of others do."""
    ragged, plain = key_function(spec_of("stub", [X], [])), TensorSpec(name="z", datatype="FP32", dims=(-1,))
    mixed = key_function(spec_of("stub", [X, plain], []))

    def both(x: int, z: int) -> InferRequest:
        arrays = {"x": np.ones((1, x), "f4"), "z": np.ones((1, z), "f4")}
        return InferRequest(model="m", inputs=tuple(from_numpy(name, array) for name, array in arrays.items()))

    assert ragged(request(np.ones((1, 2), "f4"))) == ragged(request(np.ones((1, 5), "f4")))
    assert mixed(both(2, 3)) == mixed(both(5, 3))
    assert mixed(both(2, 3)) != mixed(both(2, 4))


@pytest.mark.parametrize("datatype", ["FP32", "BF16", "BYTES"])
def test_elements_follow_one_another(datatype: str) -> None:
    """Of every width, and of texts."""
    arrays = [np.ones((1, 2), "f4"), np.zeros((2, 1), "f4")]
    if datatype == "BYTES":
        arrays = [np.array([[b"a", b""]], object), np.array([[b"b"], [b"c"]], object)]
    narrow = "BF16" if datatype == "BF16" else None
    requests = [InferRequest(model="m", inputs=(from_numpy("x", array, narrow),)) for array in arrays]

    joined = assemble(requests, [1, 2], {"x"}).inputs["x"]

    assert joined.tolist() == [element for array in arrays for element in array.ravel().tolist()]


def test_bytes_that_do_not_fill_a_shape_are_an_error_of_the_request() -> None:
    bad = InferRequest(model="m", inputs=(Tensor("x", "FP32", (1, 3), bytes(4)),))

    with pytest.raises(InvalidRequest):
        assemble([bad, bad], [1, 1], {"x"})


@given(numbers=st.lists(st.lists(st.integers(-1000, 1000), max_size=9), min_size=1, max_size=8))
def test_a_ragged_batch_answers_as_each_request_alone(
    sums: tuple[Backend, ModelSpec], numbers: list[list[int]]
) -> None:
    requests = [request(np.array([each], np.float32)) for each in numbers]

    together = execute(*sums, requests)

    for item, (one, own) in enumerate(zip(requests, numbers, strict=True)):
        alone = execute(*sums, [one]).arrays()
        mine = together.arrays(item)
        assert {name: array.tolist() for name, array in mine.items()} == {n: a.tolist() for n, a in alone.items()}
        assert mine["sum"].tolist() == [[sum(own)]]
        assert mine["twice"].tolist() == [[2 * number for number in own]]
        assert mine["count"].tolist() == [[len(own)]]


def test_a_request_gets_the_outputs_that_it_names(sums: tuple[Backend, ModelSpec]) -> None:
    requests = [request(np.ones((1, 2), "f4"), "twice"), request(np.ones((1, 3), "f4"), "sum")]

    answers = execute(*sums, requests)

    assert {name: array.tolist() for name, array in answers.arrays(0).items()} == {"twice": [[2, 2]]}
    assert {name: array.tolist() for name, array in answers.arrays(1).items()} == {"sum": [[3]]}


def test_rows_without_tensors_of_their_own_are_alike(sums: tuple[Backend, ModelSpec]) -> None:
    """As in warm-up and bulk jobs, whose one request has no tensors; several rows count as one request there too."""
    backend, _ = sums
    answers = Answers()
    plain = InferRequest(model="m", inputs=(), outputs=("twice",))

    backend.execute(Batch(requests=[plain], rows=[2], inputs={"x": np.ones((2, 3), "f4")}), answers)

    assert answers.array().tolist() == [[2, 2, 2], [2, 2, 2]]


def test_an_output_of_another_size_is_the_models_failure() -> None:
    with pytest.raises(OutputMismatch, match="output 'y' has 3 elements; the shapes of its batch's requests make 4"):
        cut("y", np.ones(3, "f4"), [(1, 2), (2, 1)])


def test_torch(tmp_path: Path) -> None:
    """A model with the sizes of its requests as an argument."""
    import torch

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            return x * torch.repeat_interleave(sizes, sizes)

    save_torchscript(Scaled(), tmp_path / "1" / "model.pt")
    spec = spec_of(
        "pytorch",
        [X],
        [TensorSpec(name="y", datatype="FP32", dims=(-1,), ragged=True)],
        batch_inputs=(BatchInputSpec(BatchInputKind.ELEMENT_COUNT, "sizes", "INT32", "x", 1),),
        batch_outputs=(BatchOutputSpec("y", (-1, -1), "x"),),
    )
    backend = with_shapes(TorchBackend(), spec)
    backend.load(spec, tmp_path / "1", CPU)

    answers = execute(backend, spec, [request(np.ones((1, n), "f4")) for n in (3, 1, 2)])

    assert [answers.array(item).tolist() for item in range(3)] == [[[3, 3, 3]], [[1]], [[2, 2]]]


def test_what_needs_none_is_not_wrapped() -> None:
    backend = OnnxBackend()
    plain = spec_of("onnxruntime", tensors(("x", "FP32", (-1,))), ())

    assert with_shapes(backend, plain) is backend


def test_python_models_get_each_requests_own_tensors(tmp_path: Path) -> None:
    """Of its own shape, and no batch inputs."""
    code = execute_code("return [reply(np.array([[x(r).shape[1], x(r).sum()]], 'f4')) for r in requests]")
    directory = write_model(tmp_path, code)
    file = directory.parent / "config.pbtxt"
    file.write_text(file.read_text().replace("dims: [ -1 ] }", "dims: [ -1 ] allow_ragged_batch: true }", 1))
    spec = python_spec(directory)
    assert spec.inputs[0].ragged
    backend = with_shapes(load_python(directory), spec)

    try:
        answers = execute(backend, spec, [request(np.full((1, n), n, "f4")) for n in (3, 1, 2)])
    finally:
        backend.unload()

    assert [answers.array(item).tolist() for item in range(3)] == [[[3, 9]], [[1, 1]], [[2, 4]]]
