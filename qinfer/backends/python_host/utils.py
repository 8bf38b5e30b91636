"""`triton_python_backend_utils`: Triton's names, this package's implementations."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qinfer.backends.python_host.errors import TritonError, TritonModelException, text
from qinfer.backends.python_host.inference import (
    RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    connected,
)
from qinfer.backends.python_host.messages import SEQUENCE_END, SEQUENCE_START, Manage
from qinfer.backends.python_host.responses import FINAL, InferenceResponse, InferenceResponseSender
from qinfer.backends.python_host.telemetry import Logger, Metric, MetricFamily, MetricKind
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

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = SEQUENCE_END
TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RESCHEDULE
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
_REQUIRED = ("name", "data_type", "dims")

_FILE = "file:"


def set_model_dir(directory: str) -> None:
    """Sets the result of `get_model_dir`; Triton has no such function."""
    global _model_dir  # noqa: PLW0603  a module of functions has no other place
    _model_dir = directory


def get_model_dir() -> str:
    """Returns the directory of the model's version."""
    return _model_dir


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Returns the input of that name, or `None`."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Returns the output of that name, or `None`."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the named input's configuration, if any."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the named output's configuration, if any."""
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Returns whether the configuration makes the model decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> type:
    """Returns a datatype's numpy type; BF16 is float32."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type | None:
    """Returns a datatype number's numpy type, if any."""
    return _TYPES.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Returns a numpy type's datatype number, if any."""
    dtype = np.dtype(data_type)
    if dtype.kind in "OS":
        return NUMBERS["BYTES"]
    return next((number for number, kind in _TYPES.items() if dtype == kind), None)


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> Any:
    """Encodes strings, each after its length; an empty array as `()`."""
    if not input_tensor.size:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return bytes(from_numpy("", input_tensor).data)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> npt.NDArray[Any]:
    """Decodes the result of `serialize_byte_tensor`, flat."""
    elements = [bytes(element) for element in iter_bytes(encoded_tensor)]
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


class ModelConfig:
    """The configuration to complete; rules and texts are Triton's."""

    def __init__(self, model_config: str) -> None:
        self._model_config: dict[str, Any] = json.loads(model_config)

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def as_dict(self) -> dict[str, Any]:
        """Returns the configuration."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets `max_batch_size`, up to the configured one."""
        configured = self._model_config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Sets `dynamic_batching`; raises `ValueError` for another scheduler."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Adds or completes an input: `name`, `data_type` (such as `TYPE_FP32`), `dims`, and maybe `optional`."""
        self._add("input", input, (*_REQUIRED, "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Adds or completes an output; as `add_input`, without `optional`."""
        self._add("output", output, _REQUIRED)

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Sets `model_transaction_policy`."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                    "property other than 'decoupled'."
                )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        if policy.setdefault("decoupled", wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{policy['decoupled']}'."
            )

    def _add(self, kind: str, added: Mapping[str, Any], known: tuple[str, ...]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        for key in added:
            if key not in known:
                listed = ", ".join(f"'{k}'" for k in known[:-1])
                raise ValueError(
                    f"{kind} '{added.get('name', '')}' {where} contains property other than {listed} and '{known[-1]}'."
                )
        if "name" not in added:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        for key in _REQUIRED:
            if key not in added:
                raise ValueError(f"{kind} '{added['name']}' {where} is missing '{key}' property.")
        tensors = self._model_config.setdefault(kind, [])
        for tensor in tensors:
            if tensor["name"] == added["name"]:
                self._merge(kind, tensor, added)
                return
        tensors.append({key: list(value) if key == "dims" else value for key, value in added.items()})

    def _merge(self, kind: str, tensor: dict[str, Any], added: Mapping[str, Any]) -> None:
        name, configured = added["name"], tensor.get("data_type", "TYPE_INVALID")
        if configured not in ("TYPE_INVALID", added["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {configured} for {kind} "
                f"'{name}', model provides {added['data_type']}"
            )
        for key in ("dims", "optional"):
            if key not in added:
                continue
            wanted = list(added[key]) if key == "dims" else added[key]
            has = tensor.get(key)
            if has != wanted and (has if key == "dims" else has is not None):
                raise ValueError(
                    f"model '{self._name}', tensor '{name}': the model expects {key} {wanted} but the model "
                    f"configuration specifies {key} {has}"
                )
            tensor[key] = wanted
        tensor["data_type"] = added["data_type"]


def _named(tensors: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


# The Model Loading API, executed by the worker:
# https://github.com/triton-inference-server/python_backend#model-loading-api
def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads or reloads a model; returns when it is ready.

    Args:
        model_name: Its name.
        config: A configuration in JSON in place of its `config.pbtxt`.
        files: `file:<version>/<file>` → content, in place of its files; only with `config`.
    """
    named, contents = [], []
    for key, content in (files or {}).items():
        if not key.startswith(_FILE):
            raise TritonModelException(f"unrecognized load parameter '{key[:100]}'; 'file:…' is known")
        named.append(text(key.removeprefix(_FILE), "the name of a file"))
        contents.append(bytes(content))
    asked = Manage("load", text(model_name, "model_name"), config=text(config, "config"), files=named)
    connected().manage(asked, contents)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:  # noqa: FBT001, FBT002  (Triton's)
    """Unloads a model, and those that only this ensemble uses if `unload_dependents`; waiting requests are answered."""
    connected().manage(
        Manage("unload", text(model_name, "model_name"), unload_dependents=bool(unload_dependents)),
    )


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Returns whether a model can be called; an empty version is any."""
    version = 0
    if model_version:
        try:
            version = int(model_version)
        except ValueError:
            version = 0
        if version < 1:
            raise TritonModelException(
                f"failed to get model version from specified version string '{model_version}', "
                "version should be an integral value > 0"
            )
    return connected().manage(Manage("ready", text(model_name, "model_name"), version))
