"""`triton_python_backend_utils`: names, types and texts that models of Triton rely on."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qinfer.backends.python_host import utils as pb_utils
from qinfer.errors import UnsupportedDatatype


@pytest.mark.parametrize(
    ("config", "number", "dtype"),
    [
        ("TYPE_BOOL", 1, np.bool_),
        ("TYPE_UINT8", 2, np.uint8),
        ("TYPE_UINT16", 3, np.uint16),
        ("TYPE_UINT32", 4, np.uint32),
        ("TYPE_UINT64", 5, np.uint64),
        ("TYPE_INT8", 6, np.int8),
        ("TYPE_INT16", 7, np.int16),
        ("TYPE_INT32", 8, np.int32),
        ("TYPE_INT64", 9, np.int64),
        ("TYPE_FP16", 10, np.float16),
        ("TYPE_FP32", 11, np.float32),
        ("TYPE_FP64", 12, np.float64),
        ("TYPE_STRING", 13, np.object_),
    ],
)
def test_datatypes_have_tritons_numbers(config: str, number: int, dtype: type) -> None:
    """And numpy types."""
    assert np.dtype(pb_utils.triton_string_to_numpy(config)) == np.dtype(dtype)
    assert pb_utils.numpy_to_triton_type(dtype) == number
    assert pb_utils.triton_to_numpy_type(number) is dtype
    assert pb_utils.Tensor("x", np.zeros(1, dtype)).triton_dtype() == number


def test_types_that_are_none() -> None:
    """No number, no type."""
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.triton_to_numpy_type(99) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13


def test_strings_as_the_wire_has_them() -> None:
    """There and back."""
    array = np.array([b"a", "ü", b""], dtype=object)

    encoded = pb_utils.serialize_byte_tensor(array)

    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == [b"a", "ü".encode(), b""]
    assert pb_utils.serialize_byte_tensor(np.empty(0, object)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(1)) is None


def test_tensors_and_configurations_by_name() -> None:
    """`None` for a name that is not there."""
    x, y = pb_utils.Tensor("x", np.zeros(1)), pb_utils.Tensor("y", np.zeros(1))
    request = pb_utils.InferenceRequest(inputs=[x], requested_output_names=["y"], model_name="m")
    response = pb_utils.InferenceResponse([y])
    config = {"input": [{"name": "x"}], "output": [{"name": "y"}]}

    assert pb_utils.get_input_tensor_by_name(request, "x") is x
    assert pb_utils.get_input_tensor_by_name(request, "y") is None
    assert pb_utils.get_output_tensor_by_name(response, "y") is y
    assert pb_utils.get_output_tensor_by_name(response, "x") is None
    assert pb_utils.get_input_config_by_name(config, "x") == {"name": "x"}
    assert pb_utils.get_output_config_by_name(config, "x") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(config)
    assert pb_utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}})


def test_dlpack_shares_memory() -> None:
    """With PyTorch, in both directions, by tensor and by capsule."""
    array = np.arange(4, dtype=np.float32)
    tensor = pb_utils.Tensor("x", array)

    torch.utils.dlpack.from_dlpack(tensor)[0] = 9
    torch.utils.dlpack.from_dlpack(tensor.to_dlpack())[1] = 8
    back = pb_utils.Tensor.from_dlpack("y", torch.tensor([1.0, 2.0]))
    capsule = pb_utils.Tensor.from_dlpack("y", torch.tensor([3.0]).__dlpack__())

    assert array.tolist() == [9, 8, 2, 3]
    assert (back.name(), back.as_numpy().tolist(), back.shape(), back.is_cpu()) == ("y", [1.0, 2.0], [2], True)
    assert capsule.as_numpy().tolist() == [3.0]


def test_bf16_by_dlpack() -> None:
    """PyTorch has it, numpy does not."""
    tensor = pb_utils.Tensor.from_dlpack("y", torch.tensor([1.5], dtype=torch.bfloat16))

    assert (tensor.triton_dtype(), tensor.to_wire(None).datatype, tensor.as_numpy().tolist()) == (14, "BF16", [1.5])


def wrong(value: object) -> Any:
    """Hides a value's type from the type checker, as a model's author may."""
    return value


class _OnDevice:
    """A tensor of another library that is on a GPU."""

    def __dlpack__(self) -> None: ...

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def get(self) -> object:
        return np.ones(2)


def test_a_tensor_on_a_device_is_copied_to_the_host() -> None:
    """If its library offers that."""
    assert pb_utils.Tensor.from_dlpack("y", _OnDevice()).as_numpy().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: pb_utils.Tensor("x", np.array(["a"])), pb_utils.TritonModelException, "Please use np.object_ instead"),
        (lambda: pb_utils.Tensor("x", wrong([1])), TypeError, "tensor 'x' is made of a numpy array, got list"),
        (
            lambda: pb_utils.Tensor("x", np.array([b"a"], object)).to_dlpack(),
            pb_utils.TritonModelException,
            "DLPack does not have support for string tensors.",
        ),
        (lambda: pb_utils.Tensor("x", np.zeros(1, "c8")).to_wire(None), UnsupportedDatatype, "complex64"),
        (
            lambda: pb_utils.InferenceResponse([wrong(np.zeros(1))]),
            TypeError,
            "output_tensors are pb_utils.Tensor objects",
        ),
        (lambda: pb_utils.InferenceResponse(error=wrong("no")), TypeError, "error is a pb_utils.TritonError, got str"),
        (
            lambda: pb_utils.InferenceRequest("", 0, [wrong(1)], [], "m"),
            TypeError,
            "inputs are pb_utils.Tensor objects, got int",
        ),
        (
            lambda: pb_utils.InferenceRequest("7", 0, [wrong(None)], [], "m"),
            pb_utils.TritonModelException,
            "Input tensor for request with id '7' and model name 'm' should not be empty.",
        ),
        (
            lambda: pb_utils.InferenceRequest("7", 0, [], [""], "m"),
            pb_utils.TritonModelException,
            "Requested output name for request with id '7' and model name 'm' should not be empty.",
        ),
        (
            lambda: pb_utils.InferenceResponse([wrong(None)]),
            pb_utils.TritonModelException,
            "Output tensor for inference response should not be empty.",
        ),
        (
            lambda: pb_utils.Tensor("", np.zeros(1)),
            pb_utils.TritonModelException,
            "Tensor name cannot be an empty string.",
        ),
        (lambda: pb_utils.Tensor("", wrong(None)), TypeError, "is made of a numpy array, got NoneType"),
        (
            lambda: pb_utils.Tensor.from_dlpack("", None),
            pb_utils.TritonModelException,
            "Tensor name cannot be an empty string.",
        ),
        (
            lambda: pb_utils.Tensor.from_dlpack("x", None),
            pb_utils.TritonModelException,
            "Provided tensor is not supported. Tensor must be a DLPack capsule or have a `__dlpack__` attribute",
        ),
        (lambda: pb_utils.Logger.log_info(wrong(None)), TypeError, "the message of a log is a str, got NoneType"),
        (lambda: pb_utils.Logger.log("a", wrong(1)), TypeError, "the level of a message is one of Logger.INFO"),
        (
            lambda: pb_utils.InferenceRequest("", wrong([]), [], [], "m"),
            pb_utils.TritonModelException,
            "Correlation ID must be",
        ),
        (
            lambda: pb_utils.InferenceResponse(parameters=wrong({1: 2})),
            pb_utils.TritonModelException,
            "Expect parameters keys to have type str, found type <class 'int'>",
        ),
        (
            lambda: pb_utils.InferenceResponse(parameters=wrong({"a": []})),
            pb_utils.TritonModelException,
            "Expect parameters values to have type bool/int/str, found type <class 'list'>",
        ),
        (
            lambda: pb_utils.InferenceResponse(parameters=wrong({"a": 0.5})),
            pb_utils.TritonModelException,
            "Expect parameters values to have type bool/int/str, found type <class 'float'>",
        ),
        (lambda: pb_utils.TritonError(wrong(1)), TypeError, "the message of a TritonError is a str, got int"),
        (lambda: pb_utils.TritonError("a", 99), TypeError, "the code of a TritonError is one of TritonError.UNKNOWN"),
    ],
)
def test_what_is_wrong_is_said(make: Callable[[], object], kind: type[Exception], text: str) -> None:
    """Where the model does it, not later."""
    with pytest.raises(kind) as caught:
        make()

    assert text in str(caught.value)


@pytest.mark.parametrize("missing", ["inputs", "requested_output_names", "model_name"])
def test_a_request_needs_inputs_outputs_and_a_model(missing: str) -> None:
    given: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "m"}
    del given[missing]

    with pytest.raises(TypeError, match="needs inputs, requested_output_names and model_name"):
        pb_utils.InferenceRequest(**given)


def test_a_capsule_keeps_its_tensor() -> None:
    """Models count the references."""
    tensor = pb_utils.Tensor("x", np.arange(3, dtype="f4"))
    before = sys.getrefcount(tensor)

    capsule = tensor.to_dlpack()
    held = sys.getrefcount(tensor)
    array = pb_utils.Tensor.from_dlpack("y", capsule).as_numpy()
    del capsule
    kept = sys.getrefcount(tensor)

    assert np.shares_memory(array, tensor.as_numpy())
    del array
    assert (held - before, kept - before, sys.getrefcount(tensor) - before) == (1, 1, 0)


def test_a_response_sender_sends_one_response() -> None:
    """As a model that is not decoupled may."""
    request = pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="m")
    response = pb_utils.InferenceResponse([])
    sender = request.get_response_sender()

    sender.send(response)
    with pytest.raises(pb_utils.TritonModelException, match="cannot send more than one response"):
        sender.send(response)
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    with pytest.raises(pb_utils.TritonModelException, match="Response sender has been closed"):
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    with pytest.raises(pb_utils.TritonModelException, match="Unsupported flag provided"):
        sender.send(response, flags=5)

    assert request.get_response_sender() is sender
    reply = request.reply()
    assert reply is not None
    assert reply.response() is response
