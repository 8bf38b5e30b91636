"""The `onnxruntime` backend: one `InferenceSession` per model instance.

Settings, by Triton's names: parameters `intra_op_thread_count`, `inter_op_thread_count`, `execution_mode` (0
sequential, 1 parallel), `enable_mem_arena`, `enable_mem_pattern`, `memory.enable_memory_arena_shrinkage`,
`session.use_device_allocator_for_initializers`; `optimization.graph.level` (-1 basic, 1 extended, 2 none; all by
default).

An instance on the CPU has the CPU provider, after OpenVINO if
`optimization.execution_accelerators.cpu_execution_accelerator` asks for it. An instance on a GPU has CUDA, after
TensorRT if `…gpu_execution_accelerator` asks for it, and the CPU for operators that both lack.
https://github.com/triton-inference-server/onnxruntime_backend#model-config-options
"""

import ctypes
import functools
import importlib.util
import io
import logging
import os
import threading
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

# Unless this is set, the official builds of 1.31 send events to their makers, and keep a device id in the home
# directory (Privacy.md of the package).
os.putenv("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

from qinfer.backends.base import Array, Batch, Context, respond_rows
from qinfer.backends.cuda import end_if_lost
from qinfer.backends.onnx_amp import KEPT, half_copy
from qinfer.backends.parameters import (
    choice,
    cleaned,
    compare,
    cores_each,
    count,
    engine_cache,
    files_use,
    flag,
    model_file,
    say_once,
)
from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed
from qinfer.models.config.optimization import AUTO_MIXED_PRECISION
from qinfer.models.spec import Device, ModelSpec, TensorSpec
from qinfer.observe.host import MemoryUse
from qinfer.tensors import DATATYPES, from_bf16, to_bf16

logger = logging.getLogger(__name__)

ONNX_DATATYPES = {f"tensor({np.dtype(d.numpy).name})": d.name for d in DATATYPES.values() if d.numpy} | {
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(string)": "BYTES",
}
_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16
_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_EXECUTION_MODES = {"0": ort.ExecutionMode.ORT_SEQUENTIAL, "1": ort.ExecutionMode.ORT_PARALLEL}
_SHRINK = "memory.enable_memory_arena_shrinkage"
_DEVICE_INITIALIZERS = "session.use_device_allocator_for_initializers"
_NOBODY: frozenset[int] = frozenset()
_FATAL = 4  # ORT's log would show paths
CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
_OPENVINO_PLUGIN = "onnxruntime_ep_openvino"
_NOT_THIS_CPU = (
    "onnxruntime-ep-openvino does not run on this machine's CPU, only on Intel's; install onnxruntime-openvino "
    "in place of onnxruntime, or serve the model by backend 'openvino'"
)
_one_by_one = threading.Lock()

Provider = tuple[str, dict[str, str]]
"""A provider's name and its options."""

# Triton's `parameters` → CUDAExecutionProvider's.
_CUDA_PARAMETERS: Mapping[str, Mapping[str, str] | None] = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "gpu_mem_limit": None,
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "do_copy_in_default_stream": {"0": "0", "1": "1"},
}
_PRECISIONS: Mapping[str, dict[str, str]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}
_ROUGH = ("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable")
_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_FLAGS = {"true": "1", "false": "0"}


class OnnxBackend:
    """Runs ONNX models."""

    short_on_loop = True

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Opens the session, and compares model and configuration."""
        path = model_file(spec, version_dir, "model.onnx")
        if path.is_dir():  # reference §3.1
            path /= "model.onnx"
        if spec.accelerates(AUTO_MIXED_PRECISION, device):
            path = half_copy(spec, path, version_dir.parent)
        wanted = providers(spec, device, _available(), engine_cache())
        if device.kind == "gpu":
            _find_cuda()
        try:
            self._session = _open_session(spec, path, wanted)
        except ModelLoadFailed:
            raise
        except Exception as error:  # onnxruntime raises a dozen classes
            raise ModelLoadFailed(f"onnxruntime can't load model '{spec.name}': {cleaned(error, path)}") from error
        _check_device(spec, device, wanted, self._session.get_providers())
        if kept := self._session.get_modelmeta().custom_metadata_map.get(KEPT):
            say_once(spec.name, AUTO_MIXED_PRECISION, kept)
        inputs = spec.file_inputs
        _compare(spec, "input", inputs, self._session.get_inputs())
        _compare(spec, "output", spec.file_outputs, self._session.get_outputs())
        self._names = [output.name for output in spec.outputs]
        self._datatypes = {output.name: output.datatype for output in spec.file_outputs}
        self._strings = [i.name for i in inputs if i.datatype == "BYTES"]
        self._narrow = {i.name for i in inputs if i.datatype == "BF16"}
        self._has_bf16 = bool(self._narrow) or "BF16" in self._datatypes.values()
        self._memory = files_use(path, device)
        self._run_options = _run_options(spec, device)
        self.short_on_loop = device.kind == "cpu"
        self._gpu = device.number if device.kind == "gpu" else None
        bound = device.kind == "gpu" and not (self._strings or "BYTES" in self._datatypes.values())
        self._run = self._run_bf16 if self._has_bf16 else self._run_plain
        if bound and not self._has_bf16:
            self._binding = self._session.io_binding()
            self._run = self._run_bound

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Runs the session."""
        inputs, refused = batch.inputs, _NOBODY
        if self._strings:
            inputs, refused = self._decoded(batch, ctx)
        names = self._wanted(batch)
        if batch.states:
            names = [*names, *(name for name in batch.states if name not in names)]
        try:
            arrays = self._run(names, inputs)
        except UnicodeDecodeError:
            raise InferenceFailed("the model returned strings that are not UTF-8") from None
        except Exception as error:  # as in `load`
            if self._gpu is not None:
                end_if_lost(self._gpu)
            raise InferenceFailed(f"onnx runtime error: {error}") from error
        respond_rows(batch, ctx, dict(zip(names, arrays, strict=True)), self._datatypes, refused, self._names)

    def unload(self) -> None:
        """Frees the session."""
        del self._run
        self.__dict__.pop("_binding", None)
        del self._session

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns the size of the weights, without arenas."""
        return self._memory

    def _wanted(self, batch: Batch) -> list[str]:
        wanted: set[str] = set()
        for request in batch.requests:
            if not request.outputs:
                return self._names
            wanted.update(request.outputs)
        return [name for name in self._names if name in wanted]

    def _decoded(self, batch: Batch, ctx: Context) -> tuple[Mapping[str, Array], frozenset[int]]:
        """Decodes BYTES to `str`: onnxruntime's strings are UTF-8; returns the refused items, too."""
        inputs = dict(batch.inputs)
        refused: set[int] = set()
        for name in self._strings:
            if name not in inputs:
                continue
            array = inputs[name]
            decoded = np.empty(array.size, dtype=object)
            ends = list(accumulate(_sizes(batch, name, array.size)))
            for index, element in enumerate(array.ravel().tolist()):
                try:
                    decoded[index] = element.decode()
                except UnicodeDecodeError:
                    decoded[index] = ""
                    item = bisect_right(ends, index)
                    if item not in refused:
                        refused.add(item)
                        text = f"input '{name}' holds bytes that are not UTF-8, which onnxruntime's strings must be"
                        ctx.respond(item, InvalidRequest(text))
            inputs[name] = decoded.reshape(array.shape)
        return inputs, frozenset(refused)

    def _run_plain(self, names: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
        arrays: Sequence[Array] = self._session.run(names, inputs, self._run_options)
        return arrays

    def _run_bound(self, names: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Runs the session with one copy each way; takes no strings and no BF16."""
        binding = self._binding
        try:
            for name, array in inputs.items():
                binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, "cuda", self._gpu))
            for name in names:
                binding.bind_output(name, "cuda", self._gpu)
            self._session.run_with_iobinding(binding, self._run_options)
            return [output.numpy() for output in binding.get_outputs()]
        finally:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()

    def _run_bf16(self, names: Sequence[str], inputs: Mapping[str, Array]) -> list[Array]:
        """Passes the bits unchanged."""
        values = {name: self._to_ort_value(name, array) for name, array in inputs.items()}
        outputs = self._session.run_with_ort_values(names, values, self._run_options)
        return [_widened(o) if o.data_type() == "tensor(bfloat16)" else o.numpy() for o in outputs]

    def _to_ort_value(self, name: str, array: Array) -> Any:
        if name in self._narrow:
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(to_bf16(array), _ONNX_BFLOAT16)
        return ort.OrtValue.ortvalue_from_numpy(array)


def _sizes(batch: Batch, name: str, size: int) -> list[int]:
    if name in batch.shapes:
        return [prod(shape) for shape in batch.shapes[name]]
    return [size] if len(batch.rows) == 1 else [size // max(batch.size, 1) * rows for rows in batch.rows]


def _widened(value: Any) -> Array:
    """Reads a BF16 value by its address; returns it as float32."""
    shape = tuple(value.shape())
    raw = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape)))
    return from_bf16(np.frombuffer(raw, dtype="<u2")).reshape(shape)


def _options(spec: ModelSpec) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = count(spec, "intra_op_thread_count") or cores_each(spec)
    options.inter_op_num_threads = count(spec, "inter_op_thread_count") or 1
    options.execution_mode = choice(spec, "execution_mode", _EXECUTION_MODES, ort.ExecutionMode.ORT_SEQUENTIAL)
    options.enable_cpu_mem_arena = flag(spec, "enable_mem_arena", default=True)
    options.enable_mem_pattern = flag(spec, "enable_mem_pattern", default=True)
    # Spinning takes cores from the gateway and Redis.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if flag(spec, _DEVICE_INITIALIZERS):
        options.add_session_config_entry(_DEVICE_INITIALIZERS, "1")
    if spec.graph_level:
        if spec.graph_level not in _LEVELS:  # as in Triton, all are on
            say_once(spec.name, "graph.level", f"{spec.graph_level} is none of -1, 0, 1 and 2")
        options.graph_optimization_level = _LEVELS.get(spec.graph_level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    return options


def _run_options(spec: ModelSpec, device: Device) -> ort.RunOptions | None:
    """Returns `None` without options, which is quicker."""
    if _SHRINK not in spec.parameters:
        return None
    options = ort.RunOptions()
    arenas = spec.parameters[_SHRINK].replace(" ", "")
    known = {"cpu:0", f"gpu:{device.number}"}
    if not set(arenas.split(";")) <= known:
        raise ModelLoadFailed(
            f"parameter '{_SHRINK}' of model '{spec.name}' is '{arenas}'; it must be of {', '.join(sorted(known))}"
        )
    options.add_run_config_entry(_SHRINK, arenas)
    return options


def _available() -> list[str]:
    found: list[str] = ort.get_available_providers()
    return found if importlib.util.find_spec(_OPENVINO_PLUGIN) is None else [*found, OPENVINO]


def _open_session(spec: ModelSpec, path: Path, wanted: Sequence[Provider]) -> ort.InferenceSession:
    """Returns a session of the file; with OpenVINO, opens one at a time, as Triton does."""
    options, (first, own) = _options(spec), wanted[0]
    if first != OPENVINO:
        return ort.InferenceSession(str(path), options, providers=wanted)
    with _one_by_one:
        if OPENVINO in ort.get_available_providers():  # the package onnxruntime-openvino has it
            chosen = [(OPENVINO, {"device_type": "CPU"} | own), *wanted[1:]]
            return ort.InferenceSession(str(path), options, providers=chosen, enable_fallback=0)
        if not (devices := _openvino_devices()):
            return ort.InferenceSession(str(path), options, providers=wanted[1:])
        options.add_provider_for_devices(devices, own)
        return ort.InferenceSession(str(path), options)


@functools.cache
def _openvino_devices() -> list[Any]:
    plugin = importlib.import_module(_OPENVINO_PLUGIN)
    ort.register_execution_provider_library(OPENVINO, plugin.get_library_path())
    own = [found for found in ort.get_ep_devices() if found.ep_name == plugin.get_ep_name()]
    return [found for found in own if found.ep_metadata.get("ov_device") == "CPU"]


@functools.cache
def _find_cuda() -> None:
    """Loads CUDA's libraries from NVIDIA's packages."""
    said = io.StringIO()
    with redirect_stdout(said):  # it prints missing libraries
        ort.preload_dlls()
    for line in said.getvalue().splitlines():
        logger.warning("CUDA is not complete", extra={"reason": line})


def _check_device(spec: ModelSpec, device: Device, wanted: Sequence[Provider], got: Sequence[str]) -> None:
    """Raises if onnxruntime fell back to the CPU silently; an accelerator that it left out is logged."""
    first, options = wanted[0]
    if first in got or first == CPU:
        return
    if first == OPENVINO:
        has_devices = OPENVINO in ort.get_available_providers() or _openvino_devices()
        say_once(spec.name, "openvino", "it could not start" if has_devices else _NOT_THIS_CPU)
    elif first == TENSORRT and CUDA in got:
        _leave_out_tensorrt(spec, options, "it could not start")
    else:
        raise ModelLoadFailed(
            f"model '{spec.name}' is for GPU {device.number}, and {first} could not start there; check the driver, "
            "CUDA and cuDNN (the worker's log says more), or set the instance group's kind to KIND_CPU"
        )


def _compare(spec: ModelSpec, kind: str, configured: Sequence[TensorSpec], found: Sequence[Any]) -> None:
    """Takes `[]` for an unknown shape, as onnxruntime reports it.

    An undeclared output, of any rank, is configured as [-1].
    """
    open_outputs = {tensor.name for tensor in configured if kind == "output" and tensor.dims == (-1,)}
    actual = {
        node.name: (
            ONNX_DATATYPES.get(node.type, node.type),
            [dim if isinstance(dim, int) else -1 for dim in node.shape]
            if node.shape and (spec.max_batch_size or node.name not in open_outputs)
            else None,
        )
        for node in found
    }
    if kind == "input" and (missing := set(actual) - {c.name for c in configured}):
        raise ModelLoadFailed(f"model '{spec.name}' needs inputs that its configuration lacks: {sorted(missing)}")
    for tensor in configured:
        compare(spec, kind, tensor, actual)
        _, dims = actual[tensor.name]
        if spec.max_batch_size > 1 and dims and dims[0] not in (-1, spec.max_batch_size):
            raise ModelLoadFailed(
                f"model '{spec.name}', {kind} '{tensor.name}': its first dimension is fixed to {dims[0]}, "
                f"so max_batch_size {spec.max_batch_size} is impossible; set it to 0 and give the full dims"
            )


def providers(spec: ModelSpec, device: Device, available: Collection[str], cache: Path) -> list[Provider]:
    """Returns an instance's providers, the preferred one first."""
    if device.kind == "cpu":
        return [*_cpu_accelerators(spec, available), (CPU, {})]
    chosen: list[Provider] = []
    cuda = _cuda_parameters(spec)
    for accelerator in spec.gpu_accelerators:
        if accelerator.name == "tensorrt":
            options = tensorrt_options(spec, device, accelerator.parameters, cache)
            if TENSORRT in available:
                chosen.append((TENSORRT, options))
            else:
                _leave_out_tensorrt(spec, options, "the installed onnxruntime lacks it")
        elif accelerator.name == "cuda":
            cuda |= accelerator.parameters
        elif accelerator.name != AUTO_MIXED_PRECISION:
            raise ModelLoadFailed(
                f"model '{spec.name}': gpu_execution_accelerator '{accelerator.name}' is not known; "
                f"use 'tensorrt', 'cuda' or '{AUTO_MIXED_PRECISION}'"
            )
    _require(spec, device, CUDA, available)
    return [*chosen, (CUDA, {"device_id": str(device.number)} | cuda), (CPU, {})]


def _cpu_accelerators(spec: ModelSpec, available: Collection[str]) -> list[Provider]:
    chosen: list[Provider] = []
    for accelerator in spec.cpu_accelerators:
        if accelerator.name == AUTO_MIXED_PRECISION:
            continue
        if accelerator.name != "openvino":
            raise ModelLoadFailed(
                f"model '{spec.name}': cpu_execution_accelerator '{accelerator.name}' is not known; "
                f"use 'openvino' or '{AUTO_MIXED_PRECISION}'"
            )
        if OPENVINO not in available:
            say_once(
                spec.name,
                "openvino",
                f"{OPENVINO} is not installed; run: pip install onnxruntime-ep-openvino, or serve the model by backend "
                "'openvino'",
            )
            continue
        threads = count(spec, "intra_op_thread_count") or cores_each(spec)
        chosen = [(OPENVINO, {"num_of_threads": str(threads), **accelerator.parameters})]
    return chosen


def _leave_out_tensorrt(spec: ModelSpec, options: Mapping[str, str], reason: str) -> None:
    """Logs that CUDA executes in place of TensorRT, unless the answers would be of another precision."""
    if rough := [name for name in _ROUGH if options.get(name) == "1"]:
        raise ModelLoadFailed(
            f"model '{spec.name}': accelerator 'tensorrt' with {rough[0]} can't run, because {reason}, and CUDA "
            "would answer in FP32; run: pip install tensorrt, or remove the precision"
        )
    say_once(spec.name, "tensorrt", f"{reason}; CUDA executes")


def tensorrt_options(spec: ModelSpec, device: Device, parameters: Mapping[str, str], cache: Path) -> dict[str, str]:
    """Translates an accelerator's parameters to TensorrtExecutionProvider's."""
    options = {
        "device_id": str(device.number),
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(cache / "onnxruntime" / spec.name),
    }
    for key, value in parameters.items():
        if key == "precision_mode":
            if value.upper() not in _PRECISIONS:
                raise ModelLoadFailed(
                    f"model '{spec.name}': precision_mode is '{value}'; it must be one of {', '.join(_PRECISIONS)}"
                )
            options |= _PRECISIONS[value.upper()]
        elif key in _RENAMED or key.startswith("trt_"):
            options[_RENAMED.get(key, key)] = _FLAGS.get(value.lower(), value)
        else:
            raise ModelLoadFailed(
                f"model '{spec.name}': parameter '{key}' of accelerator 'tensorrt' is not known; "
                f"use precision_mode, {', '.join(_RENAMED)}, or an option of onnxruntime that begins with trt_"
            )
    return options


def _cuda_parameters(spec: ModelSpec) -> dict[str, str]:
    options = {}
    for name, values in _CUDA_PARAMETERS.items():
        text = spec.parameters.get(name)
        if text is None:
            continue
        known = values or ({text: text} if text.isascii() and text.isdecimal() else {})
        if text not in known:
            expected = " or ".join(values) if values else "a number of bytes"
            raise ModelLoadFailed(f"parameter '{name}' of model '{spec.name}' is '{text}'; it must be {expected}")
        options[name] = known[text]
    return options


def _require(spec: ModelSpec, device: Device, provider: str, available: Collection[str]) -> None:
    if provider not in available:
        raise ModelLoadFailed(
            f"model '{spec.name}' is for GPU {device.number}, which needs {provider}; the installed onnxruntime has "
            f"{', '.join(sorted(available))}; run: pip install 'qinfer-ml[onnx-gpu]' (and uninstall onnxruntime), "
            "or set the instance group's kind to KIND_CPU"
        )
