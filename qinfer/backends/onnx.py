"""The `onnxruntime` backend: one `InferenceSession` per model instance.

Settings, by Triton's names: parameters `intra_op_thread_count`, `inter_op_thread_count` and `execution_mode`
(0 sequential, 1 parallel); `optimization.graph.level` (-1 basic, 1 extended; all optimisations by default).
https://github.com/triton-inference-server/onnxruntime_backend#model-config-options
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from qinfer.backends.base import Array, Batch, Context, respond_rows
from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed
from qinfer.repository.spec import Device, ModelSpec, TensorSpec

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16
_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
}
_FATAL = 4  # ORT's own log would show paths and repeat what is raised anyway


class OnnxBackend:
    """See the module docstring."""

    short_on_loop = True

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Opens the session, and compares the model with its configuration.

        Raises:
            ModelLoadFailed: The file can't be loaded, a parameter is wrong, or model and configuration disagree.
        """
        del device
        path = version_dir / (spec.filename or "model.onnx")
        if not path.exists():
            raise ModelLoadFailed(f"model '{spec.name}' has no file '{path.name}' in version {version_dir.name}")
        try:
            self._session = ort.InferenceSession(str(path), _options(spec), providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises a dozen unrelated classes; they are mapped here, once
            raise ModelLoadFailed(f"onnxruntime can't load model '{spec.name}': {_cleaned(error, path)}") from error
        _compare(spec, "input", spec.inputs, self._session.get_inputs())
        _compare(spec, "output", spec.outputs, self._session.get_outputs())
        self._names = [output.name for output in spec.outputs]
        self._datatypes = {output.name: output.datatype for output in spec.outputs}
        self._strings = [i.name for i in spec.inputs if i.datatype == "BYTES"]
        self._narrow = {i.name for i in spec.inputs if i.datatype == "BF16"}
        self._has_bf16 = bool(self._narrow) or "BF16" in self._datatypes.values()

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Runs the session for the outputs that some request wants.

        Raises:
            InferenceFailed: onnxruntime refused the batch, or returned strings that are not UTF-8.
        """
        inputs, refused = batch.inputs, frozenset[int]()
        if self._strings:
            inputs, refused = self._decoded(batch, ctx)
        names = self._wanted(batch)
        try:
            arrays = self._run_bf16(names, inputs) if self._has_bf16 else self._session.run(names, inputs)
        except UnicodeDecodeError:
            raise InferenceFailed("the model returned strings that are not UTF-8") from None
        except Exception as error:  # as in `load`
            raise InferenceFailed(f"onnx runtime error: {error}") from error
        respond_rows(batch, ctx, dict(zip(names, arrays, strict=True)), self._datatypes, refused)

    def unload(self) -> None:
        """Frees the session."""
        del self._session

    def _wanted(self, batch: Batch) -> list[str]:
        wanted: set[str] = set()
        for request in batch.requests:
            if not request.outputs:
                return self._names
            wanted.update(request.outputs)
        return [name for name in self._names if name in wanted]

    def _decoded(self, batch: Batch, ctx: Context) -> tuple[Mapping[str, Array], frozenset[int]]:
        """Makes `str` of BYTES: onnxruntime's strings are UTF-8. An item with other bytes is refused, its mates run on.

        Returns:
            The inputs, and the positions of refused items, whose strings became empty.
        """
        inputs = dict(batch.inputs)
        owners = np.repeat(np.arange(len(batch.rows)), batch.rows)
        refused: set[int] = set()
        for name in self._strings:
            if name not in inputs:
                continue
            array = inputs[name]
            decoded = np.empty(array.size, dtype=object)
            per_row = max(array.size // max(len(owners), 1), 1)
            for index, element in enumerate(array.ravel().tolist()):
                try:
                    decoded[index] = element.decode()
                except UnicodeDecodeError:
                    decoded[index] = ""
                    item = int(owners[index // per_row]) if len(batch.requests) > 1 else 0
                    if item not in refused:
                        refused.add(item)
                        text = f"input '{name}' holds bytes that are not UTF-8, which onnxruntime's strings must be"
                        ctx.respond(item, InvalidRequest(text))
            inputs[name] = decoded.reshape(array.shape)
        return inputs, frozenset(refused)

    def _run_bf16(self, names: Sequence[str], inputs: Mapping[str, Array]) -> list[Array]:
        """Runs a model that has BF16 tensors, for which numpy has no dtype: their bits go in and out as they are."""
        values = {name: self._value(name, array) for name, array in inputs.items()}
        outputs = self._session.run_with_ort_values(names, values)
        return [_widened(o) if o.data_type() == "tensor(bfloat16)" else o.numpy() for o in outputs]

    def _value(self, name: str, array: Array) -> Any:
        if name in self._narrow:
            bits = (np.ascontiguousarray(array, dtype="<f4").view("<u4") >> 16).astype("<u2")
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)
        return ort.OrtValue.ortvalue_from_numpy(array)


def _widened(value: Any) -> Array:
    """Returns a BF16 value as float32; onnxruntime offers no array of it, only its address."""
    shape = tuple(value.shape())
    raw = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape)))
    return (np.frombuffer(raw, dtype="<u2").astype("<u4") << 16).view("<f4").reshape(shape)


def _options(spec: ModelSpec) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    # All instances compute at once: together they get the cores once, not each of them all.
    cores = max(len(os.sched_getaffinity(0)) // spec.instance_count, 1)
    options.intra_op_num_threads = _count(spec, "intra_op_thread_count") or cores
    options.inter_op_num_threads = _count(spec, "inter_op_thread_count") or 1
    if _count(spec, "execution_mode"):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    # Spinning between batches takes the cores from gateway and Redis on the same machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if spec.graph_level:
        options.graph_optimization_level = _LEVELS[1 if spec.graph_level > 0 else -1]
    return options


def _count(spec: ModelSpec, parameter: str) -> int:
    """Reads a whole number from the parameters; 0 when it is not there."""
    text = spec.parameters.get(parameter, "0")
    if not text.isdecimal():
        raise ModelLoadFailed(f"parameter '{parameter}' of model '{spec.name}' is '{text}'; it must be a number >= 0")
    return int(text)


def _compare(spec: ModelSpec, kind: str, configured: Sequence[TensorSpec], found: Sequence[Any]) -> None:
    """Checks that the configuration's tensors exist in the model with the same datatype and compatible dimensions."""
    actual = {tensor.name: tensor for tensor in found}
    if kind == "input" and (missing := set(actual) - {c.name for c in configured}):
        raise ModelLoadFailed(f"model '{spec.name}' needs inputs that its configuration lacks: {sorted(missing)}")
    for tensor in configured:
        if tensor.name not in actual:
            raise ModelLoadFailed(
                f"unexpected inference {kind} '{tensor.name}' for model '{spec.name}', "
                f"allowed {kind}s are: {', '.join(sorted(actual))}"
            )
        node = actual[tensor.name]
        datatype = _DATATYPES.get(node.type, node.type)
        if datatype != tensor.datatype:
            raise ModelLoadFailed(
                f"model '{spec.name}', {kind} '{tensor.name}': the model has {datatype}, "
                f"its configuration {tensor.datatype}"
            )
        dims = [dim if isinstance(dim, int) else -1 for dim in node.shape]
        seen = tensor.dims if tensor.reshape is None else tensor.reshape
        expected = [*([-1] if spec.max_batch_size else []), *seen]
        agree = len(dims) == len(expected) and all(d == e or -1 in (d, e) for d, e in zip(dims, expected, strict=True))
        if not agree:
            raise ModelLoadFailed(
                f"model '{spec.name}', {kind} '{tensor.name}': the model has shape {dims}, its configuration {expected}"
            )
        if spec.max_batch_size > 1 and dims and dims[0] not in (-1, spec.max_batch_size):
            raise ModelLoadFailed(
                f"model '{spec.name}', {kind} '{tensor.name}': its first dimension is fixed to {dims[0]}, "
                f"so max_batch_size {spec.max_batch_size} is impossible; set it to 0 and give the full dims"
            )


def _cleaned(error: Exception, path: Path) -> str:
    """Keeps the machine's paths out of what clients read."""
    return str(error).replace(str(path), path.name).replace(str(path.parent), "")
