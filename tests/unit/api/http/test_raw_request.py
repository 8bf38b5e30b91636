"""Raw binary requests: the shape of the one input, from a number of bytes."""

from typing import Any

import pytest

from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer_api.http.infer import read_raw


def spec(datatype: str, *dims: int, rows: int = 0, inputs: int = 1) -> ModelSpec:
    tensors = tuple(TensorSpec(name=f"x{number}", datatype=datatype, dims=dims) for number in range(inputs))
    return ModelSpec(name="m", backend="b", inputs=tensors, outputs=tensors, max_batch_size=rows)


@pytest.mark.parametrize(
    ("model", "size", "shape"),
    [
        (spec("FP32", 4), 16, (4,)),
        (spec("FP32", 4, rows=8), 16, (1, 4)),
        (spec("INT16", 3, -1, 2), 24, (3, 2, 2)),
        (spec("UINT8", -1, rows=1), 5, (1, 5)),
        (spec("BF16", -1), 6, (3,)),
        (spec("FP64", -1), 0, (0,)),
    ],
)
def test_the_shape_is_deduced(model: ModelSpec, size: int, shape: tuple[int, ...]) -> None:
    """One variable dimension takes what there is; a batch has one row."""
    request, plan = read_raw(bytes(size), "m", 3, model)

    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, tensor.shape, tensor.nbytes) == ("x0", model.inputs[0].datatype, shape, size)
    assert (request.model, request.version, plan.is_binary("y")) == ("m", 3, True)


@pytest.mark.parametrize("dims", [(1,), (1, 1)])
def test_bytes_are_one_element(dims: tuple[int, ...]) -> None:
    """The length goes before it."""
    request, _ = read_raw(b"abc", "m", 0, spec("BYTES", *dims))

    assert (request.inputs[0].shape, bytes(request.inputs[0].data)) == (dims, b"\x03\0\0\0abc")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            spec("FP32", 1, inputs=3),
            r"Raw request must only have 1 input \(found 1\) to be deduced but got 3 inputs in 'm' model configuration",
        ),
        (
            spec("FP32", -1, -1),
            "The shape of the raw input 'x0' can not be deduced because there are more than one variable-sized",
        ),
        (spec("BYTES", -1), r"For BYTE datatype raw input 'x0', the model must have input shape \[1\]"),
        (spec("BYTES", 2), r"For BYTE datatype raw input 'x0', the model must have input shape \[1\]"),
    ],
)
def test_what_can_not_be_deduced_is_refused(model: ModelSpec, text: Any) -> None:
    """With Triton's texts."""
    with pytest.raises(InvalidRequest, match=r"^\[request id: <id_unknown>\] " + text):
        read_raw(bytes(8), "m", 0, model)
