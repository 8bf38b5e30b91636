"""Validation: each mistake gets Triton's text, good requests their batch size."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from qinfer.core.messages import InferRequest
from qinfer.errors import InvalidRequest, PayloadTooLarge
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.submission.validate import check_announced, validate
from qinfer.tensors import Tensor, from_numpy, pack_bytes

BATCHED = ModelSpec(
    name="m",
    backend="stub",
    max_batch_size=8,
    inputs=(
        TensorSpec(name="a", datatype="FP32", dims=(4,)),
        TensorSpec(name="b", datatype="INT64", dims=(-1, 2)),
    ),
    outputs=(TensorSpec(name="y", datatype="FP32", dims=(1,)), TensorSpec(name="z", datatype="FP32", dims=(1,))),
)
FIXED = replace(
    BATCHED,
    inputs=(TensorSpec(name="a", datatype="FP32", dims=(4,)), TensorSpec(name="b", datatype="INT64", dims=(2,))),
)
SCALAR = replace(BATCHED, inputs=(TensorSpec(name="a", datatype="FP32", dims=()),))
PLAIN = replace(BATCHED, max_batch_size=0, inputs=(TensorSpec(name="a", datatype="FP32", dims=(2, -1)),))
OPTIONAL = replace(
    BATCHED,
    inputs=(
        TensorSpec(name="a", datatype="FP32", dims=(4,)),
        TensorSpec(name="o", datatype="FP32", dims=(1,), optional=True),
        TensorSpec(name="p", datatype="FP32", dims=(1,), optional=True),
    ),
)
STRINGS = replace(BATCHED, inputs=(TensorSpec(name="s", datatype="BYTES", dims=(2,)),))


def a(*shape: int) -> Tensor:
    return from_numpy("a", np.zeros(shape, "<f4"))


def b(*shape: int) -> Tensor:
    return from_numpy("b", np.zeros(shape, "<i8"))


def raw(*shape: int) -> Tensor:
    """A tensor whose dimensions are negative, as no array's are."""
    return Tensor("a", "FP32", shape, bytes(4 * abs(prod(shape))))


def replace_data(tensor: Tensor, data: bytes) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def s(*elements: bytes, shape: tuple[int, ...] = (1, 2), cut: int = 0) -> Tensor:
    data = pack_bytes(elements)
    return Tensor("s", "BYTES", shape, data[: len(data) - cut])


def _request(*inputs: Tensor, outputs: tuple[str, ...] = ()) -> InferRequest:
    return InferRequest(model="m", inputs=inputs, outputs=outputs)


@pytest.mark.parametrize(
    ("spec", "inputs", "batch_size"),
    [
        (BATCHED, (a(3, 4), b(3, 5, 2)), 3),
        (BATCHED, (b(8, 0, 2), a(8, 4)), 8),
        (FIXED, (a(3, 4), b(3, 2)), 3),
        (FIXED, (b(8, 2), a(8, 4)), 8),
        (replace(FIXED, max_batch_size=0), (a(4), b(2)), 1),
        (SCALAR, (a(5),), 5),
        (PLAIN, (a(2, 7),), 1),
        (PLAIN, (a(2, 0),), 1),
        (OPTIONAL, (a(1, 4),), 1),
        (OPTIONAL, (from_numpy("p", np.zeros((2, 1), "<f4")), a(2, 4)), 2),
        (STRINGS, (s(b"", b"long"),), 1),
        (STRINGS, (s(b"1", b"2", b"3", b"4", shape=(2, 2)),), 2),
    ],
)
def test_good_requests(spec: ModelSpec, inputs: tuple[Tensor, ...], batch_size: int) -> None:
    """Inputs in any order, variable dimensions and left-out optional inputs are fine."""
    assert validate(_request(*inputs), spec) == batch_size
    assert validate(_request(*inputs, outputs=("z", "y")), spec) == batch_size


NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)

BAD: list[tuple[ModelSpec, tuple[Tensor, ...], str]] = [
    (BATCHED, (a(9, 4), b(9, 1, 2)), "inference request batch-size must be <= 8 for 'm'"),
    (BATCHED, (a(2, 4), b(3, 1, 2)), "input 'b' batch size does not match other inputs for 'm'"),
    (BATCHED, (a(), b(1, 1, 2)), "input 'a' has no shape but model requires batch dimension for 'm'"),
    (
        BATCHED,
        (a(1, 5), b(1, 1, 2)),
        "unexpected shape for input 'a' for model 'm'. Expected [-1,4], got [1,5]." + NOTE,
    ),
    (BATCHED, (a(4), b(4, 1, 2)), "unexpected shape for input 'a' for model 'm'. Expected [-1,4], got [4]." + NOTE),
    (
        BATCHED,
        (a(1, 4), b(1, 2)),
        "unexpected shape for input 'b' for model 'm'. Expected [-1,-1,2], got [1,2]." + NOTE,
    ),
    (PLAIN, (a(3, 7),), "unexpected shape for input 'a' for model 'm'. Expected [2,-1], got [3,7]."),
    (
        PLAIN,
        (Tensor("a", "FP32", (2, -1), b""),),
        "All input dimensions should be specified for input 'a' for model 'm', got [2,-1]",
    ),
    (
        PLAIN,
        (from_numpy("a", np.zeros((2, 1))),),
        "inference input 'a' data-type is 'FP64', but model 'm' expects 'FP32'",
    ),
    (
        BATCHED,
        (a(1, 4),),
        "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['a'], but missing required input(s) ['b']. "
        "Please provide all required input(s).",
    ),
    (
        BATCHED,
        (),
        "expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) ['a','b']. "
        "Please provide all required input(s).",
    ),
    (
        OPTIONAL,
        (),
        "expected number of inputs between 1 and 3 but got 0 inputs for model 'm'. Got input(s) [], but missing "
        "required input(s) ['a']. Please provide all required input(s).",
    ),
    (
        OPTIONAL,
        (from_numpy("p", np.zeros((1, 1), "<f4")),),
        "expected number of inputs between 1 and 3 but got 1 inputs for model 'm'. Got input(s) ['p'], but missing "
        "required input(s) ['a']. Please provide all required input(s).",
    ),
    (BATCHED, (a(1, 4), from_numpy("x", np.zeros(1))), "unexpected inference input 'x' for model 'm'"),
    (BATCHED, (a(1, 4), a(1, 4)), "input 'a' already exists in request"),
    (
        PLAIN,
        (Tensor("a", "FP32", (2, 2), bytes(12)),),
        "input byte size mismatch for input 'a' for model 'm'. Expected 16, got 12",
    ),
    (BATCHED, (a(0, 4), b(0, 1, 2)), "input byte size mismatch for input 'a' for model 'm'. Expected 16, got 0"),
    (STRINGS, (s(shape=(0, 2)),), "expected 2 string elements for inference input 's' for model 'm', got 0"),
    (
        STRINGS,
        (s(b"1"),),
        "expected 2 string elements for inference input 's' for model 'm', got 1",
    ),
    (
        STRINGS,
        (s(b"1", b"2", b"3"),),
        "unexpected number of string elements 3 for inference input 's' for model 'm', expecting 2",
    ),
    (
        STRINGS,
        (s(b"1", b"", cut=2),),
        "incomplete string length indicator for inference input 's' for model 'm', expecting 4 bytes but only 2 bytes "
        "available. Please make sure the string length indicator is in one buffer.",
    ),
    (
        STRINGS,
        (s(b"1", b"four", cut=1),),
        "incomplete string data for inference input 's' for model 'm', expecting string of length 4 but only 3 bytes "
        "available.",
    ),
]


@pytest.mark.parametrize(("spec", "inputs", "text"), BAD)
def test_bad_inputs(spec: ModelSpec, inputs: tuple[Tensor, ...], text: str) -> None:
    """The whole text is Triton's."""
    with pytest.raises(InvalidRequest) as caught:
        validate(_request(*inputs), spec)

    assert caught.value.message == text


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (("y", "x"), "unexpected inference output 'x' for model 'm'"),
        (("y", "z", "y"), "output 'y' already exists in request"),
    ],
)
def test_bad_outputs(outputs: tuple[str, ...], text: str) -> None:
    """Unknown outputs, and an output asked for twice."""
    with pytest.raises(InvalidRequest) as caught:
        validate(_request(a(1, 4), b(1, 1, 2), outputs=outputs), BATCHED)

    assert caught.value.message == text


@pytest.mark.parametrize(
    ("spec", "inputs", "text"),
    [
        (FIXED, (a(9, 4), b(9, 2)), "batch-size must be <= 8"),
        (FIXED, (a(0, 4), b(0, 2)), "byte size mismatch"),
        (FIXED, (a(1, 4), b(2, 2)), "input 'b' batch size does not match"),
        (FIXED, (a(1, 4), b(1, 3)), "unexpected shape for input 'b'"),
        (FIXED, (a(1, 4), replace_data(b(1, 2), bytes(15))), "Expected 16, got 15"),
        (FIXED, (a(1, 4), from_numpy("b", np.zeros((1, 2), "<i4"))), "data-type is 'INT32'"),
        (FIXED, (a(1, 4),), "expected 2 inputs but got 1"),
        (FIXED, (a(1, 4), a(1, 4)), "input 'a' already exists"),
        (SCALAR, (a(),), "has no shape"),
        (replace(FIXED, max_batch_size=0), (a(1, 4), b(1, 2)), "unexpected shape for input 'a'"),
        (
            replace(SCALAR, inputs=(TensorSpec(name="a", datatype="FP32", dims=(-1, -1)),)),
            (raw(1, -1, -1),),
            "specified",
        ),
    ],
)
def test_bad_requests_to_models_of_fixed_dimensions(spec: ModelSpec, inputs: tuple[Tensor, ...], text: str) -> None:
    """What settles good requests at a glance lets no bad one through."""
    with pytest.raises(InvalidRequest) as caught:
        validate(_request(*inputs), spec)

    assert text in caught.value.message


def test_an_empty_batch_of_empty_rows_is_refused() -> None:
    """A batch of no rows is never handed to a backend, whatever its sizes say."""
    spec = replace(BATCHED, inputs=(TensorSpec(name="a", datatype="FP32", dims=(-1,)),))

    with pytest.raises(InvalidRequest, match="batch-size must be > 0"):
        validate(_request(a(0, 0)), spec)


def test_batch_sizes_differ_when_the_first_is_empty() -> None:
    """A first input without rows does not let the others choose."""
    with pytest.raises(InvalidRequest, match="input 'b' batch size does not match other inputs for 'm'"):
        validate(InferRequest(model="m", inputs=(a(0, 4), b(3, 1, 2))), BATCHED)


def test_nothing_of_a_shape_larger_than_any_array_is_refused() -> None:
    """Beside a dimension of 0 any size would fit the bytes, and no backend could make an array of it."""
    spec = replace(BATCHED, max_batch_size=0, inputs=(TensorSpec(name="a", datatype="FP32", dims=(-1, -1)),))

    with pytest.raises(InvalidRequest, match="larger than any tensor can be"):
        validate(_request(Tensor("a", "FP32", (0, 2**62), b"")), spec)

    assert validate(_request(Tensor("a", "FP32", (0, 2**40), b"")), spec) == 1


def test_more_strings_than_a_model_takes_are_refused_uncounted() -> None:
    """Each would be an object in the worker; their number is that of the shape."""
    spec = ModelSpec(
        name="m",
        backend="b",
        inputs=(TensorSpec(name="x", datatype="BYTES", dims=(-1,)),),
        outputs=(),
        max_strings=1000,
    )
    fits = InferRequest(model="m", inputs=(Tensor("x", "BYTES", (1000,), bytes(4000)),))
    grows = InferRequest(model="m", inputs=(Tensor("x", "BYTES", (1001,), bytes(4004)),))

    assert validate(fits, spec) == 1
    with pytest.raises(PayloadTooLarge, match="at least 1001 strings for model 'm', which takes 1000 at a time"):
        validate(grows, spec)


def test_the_strings_of_all_inputs_count() -> None:
    inputs = (TensorSpec(name="x", datatype="BYTES", dims=(-1,)), TensorSpec(name="y", datatype="BYTES", dims=(-1,)))
    spec = ModelSpec(name="m", backend="b", inputs=inputs, outputs=(), max_strings=1000)
    tensors = tuple(Tensor(name, "BYTES", (501,), bytes(2004)) for name in ("x", "y"))

    with pytest.raises(PayloadTooLarge, match="at least 1002 strings"):
        validate(InferRequest(model="m", inputs=tensors), spec)


ANNOUNCED = {
    "another name": ("z", "BYTES", (1,), "unexpected inference input 'z' for model 'm'"),
    "another datatype": ("x", "FP32", (1, 2), "data-type is 'FP32', but model 'm' expects 'BYTES'"),
    "another rank": ("x", "BYTES", (1, 2, 3), r"Expected \[-1,-1\], got \[1,2,3\]"),
    "too many rows": ("x", "BYTES", (9, 1), "batch-size must be <= 8"),
    "too many strings": ("x", "BYTES", (8, 200), "has at least 1600 strings for model 'm', which takes 1000"),
}


@pytest.mark.parametrize(("name", "datatype", "shape", "text"), ANNOUNCED.values(), ids=ANNOUNCED)
def test_what_a_request_says_of_an_input_is_checked_alone(
    name: str, datatype: str, shape: tuple[int, ...], text: str
) -> None:
    inputs = (TensorSpec(name="x", datatype="BYTES", dims=(-1,)),)
    spec = ModelSpec(name="m", backend="b", inputs=inputs, outputs=(), max_batch_size=8, max_strings=1000)
    check_announced("x", "BYTES", (8, 100), spec)

    with pytest.raises((InvalidRequest, PayloadTooLarge), match=text):
        check_announced(name, datatype, shape, spec)
