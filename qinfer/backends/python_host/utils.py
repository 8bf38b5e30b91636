"""What a `model.py` imports as `triton_python_backend_utils`: Triton's names, this package's implementations."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qinfer.backends.python_host.errors import TritonError, TritonModelException
from qinfer.backends.python_host.inference import (
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    PreferredMemory,
)
from qinfer.backends.python_host.model_config import ModelConfig
from qinfer.backends.python_host.services import (
    Logger,
    Metric,
    MetricFamily,
    MetricKind,
    is_model_ready,
    load_model,
    unload_model,
)
from qinfer.backends.python_host.tensor import NUMBERS, Tensor
from qinfer.tensors import DATATYPES, from_numpy, iter_bytes

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 1

TRITON_STRING_TO_NUMPY: dict[str, type] = {
    d.config: bool if d.name == "BOOL" else np.dtype(d.numpy).type for d in DATATYPES.values() if d.numpy
} | {"TYPE_STRING": np.object_, "TYPE_BF16": np.float32}

_TYPES = {NUMBERS[d.name]: np.dtype(d.numpy).type for d in DATATYPES.values() if d.numpy} | {
    NUMBERS["BYTES"]: np.object_,
    NUMBERS["BF16"]: np.float32,
}
_model_dir = ""


def set_model_dir(directory: str) -> None:
    """Says what `get_model_dir` returns; not part of Triton's interface."""
    global _model_dir  # noqa: PLW0603  a module of functions has no other place
    _model_dir = directory


def get_model_dir() -> str:
    """Returns the directory of the model's version."""
    return _model_dir


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Returns the input of that name, or `None`."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Returns the output of that name, or `None`."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the configuration of the input of that name, or `None`."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the configuration of the output of that name, or `None`."""
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Tells whether the configuration says that the model is decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> type:
    """Returns the numpy type of a configuration's datatype, such as `TYPE_FP32`; BF16 is float32."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type | None:
    """Returns the numpy type of a datatype's number, or `None`."""
    return _TYPES.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Returns the number of the datatype of a numpy type, or `None`."""
    dtype = np.dtype(data_type)
    if dtype.kind in "OS":
        return NUMBERS["BYTES"]
    return next((number for number, kind in _TYPES.items() if dtype == kind), None)


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> Any:
    """Encodes an array of strings as the wire does: each with its length before it; `()` of an empty one."""
    if not input_tensor.size:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return bytes(from_numpy("", input_tensor).data)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> npt.NDArray[Any]:
    """Decodes what `serialize_byte_tensor` made, as an array of one dimension."""
    elements = [bytes(element) for element in iter_bytes(encoded_tensor)]
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


def _named(tensors: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)
