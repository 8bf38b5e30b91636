"""The `openvino` backend: `model.xml` (or an ONNX file) on the CPU, one infer request per model instance.

Settings, by Triton's names: parameters `PERFORMANCE_HINT`, `NUM_STREAMS`, `INFERENCE_NUM_THREADS`,
`COMPILATION_NUM_THREADS`, `HINT_BF16`, `SKIP_OV_DYNAMIC_BATCHSIZE`, `ENABLE_BATCH_PADDING`, `RESHAPE_IO_LAYERS`,
`TARGET_DEVICE`; also their older names `CPU_THREADS_NUM`, `CPU_THROUGHPUT_STREAMS`, `ENFORCE_BF16` and
`SKIP_DYNAMIC_BATCHSIZE`. https://github.com/triton-inference-server/openvino_backend#parameters
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino.preprocess import PrePostProcessor

from qinfer.backends.base import Array, Batch, Context, respond_rows
from qinfer.backends.parameters import (
    choice,
    cleaned,
    compare,
    cores_each,
    count,
    files_use,
    flag,
    model_file,
    say_once,
)
from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed
from qinfer.models.config.optimization import AUTO_MIXED_PRECISION
from qinfer.models.spec import Device, ModelSpec, TensorSpec
from qinfer.observe.host import MemoryUse

_DATATYPES = {"boolean": "BOOL", "bf16": "BF16"} | {
    f"{kind}{bits}": f"{name}{bits}"
    for kind, name, sizes in (("u", "UINT", (8, 16, 32, 64)), ("i", "INT", (8, 16, 32, 64)), ("f", "FP", (16, 32, 64)))
    for bits in sizes
}
_HINTS = {"latency": "LATENCY", "throughput": "THROUGHPUT", "cumulative_throughput": "CUMULATIVE_THROUGHPUT"}
_REFUSED = ("CPU_EXTENSION_PATH", "CPU_BIND_THREAD")


class OpenvinoBackend:
    """Runs OpenVINO models."""

    short_on_loop = True

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Compiles the model, and compares it with its configuration."""
        if device.kind != "cpu":
            raise ModelLoadFailed(
                f"model '{spec.name}' is for GPU {device.number}, where backend 'openvino' can't run; "
                "set the instance group's kind to KIND_CPU"
            )
        path = model_file(spec, version_dir, "model.xml", "model.onnx")
        target = spec.parameters.get("TARGET_DEVICE", "CPU")
        core = _core()
        if target.partition(".")[0] not in {d.partition(".")[0] for d in core.available_devices}:
            raise ModelLoadFailed(
                f"parameter 'TARGET_DEVICE' of model '{spec.name}' is '{target}'; OpenVINO finds "
                f"{', '.join(core.available_devices)} on this machine"
            )
        options = properties(spec)
        if spec.accelerates(AUTO_MIXED_PRECISION, device):
            if "BF16" in core.get_property(target, "OPTIMIZATION_CAPABILITIES"):
                options["INFERENCE_PRECISION_HINT"] = "bf16"
            else:
                say_once(spec.name, AUTO_MIXED_PRECISION, "the processor has no BF16")
        try:
            model = core.read_model(path)
            _reshape(spec, model)
            ports = (
                _compared(spec, "input", spec.file_inputs, model.inputs),
                _compared(spec, "output", spec.file_outputs, model.outputs),
            )
            compiled = core.compile_model(_widened(spec, model, *ports), target, options)
            self._request = compiled.create_infer_request()
        except ModelLoadFailed:
            raise
        except Exception as error:
            raise ModelLoadFailed(f"OpenVINO can't load model '{spec.name}': {_reason(error, path)}") from error
        self._memory = files_use(path, device)
        self._inputs = dict(zip((i.name for i in spec.file_inputs), ports[0], strict=True))
        self._names = [output.name for output in spec.outputs]
        self._datatypes = {output.name: output.datatype for output in spec.file_outputs}
        self._outputs = dict(zip(self._datatypes, ports[1], strict=True))
        self._padded = spec.max_batch_size if flag(spec, "ENABLE_BATCH_PADDING") else 0

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Runs the model."""
        request, size = self._request, batch.size
        missing = max(self._padded - size, 0)
        tensors = []  # they borrow the arrays' memory, and must outlive the run
        for name, position in self._inputs.items():
            array = batch.inputs.get(name)
            if array is None:
                raise InvalidRequest(f"input '{name}' is missing, and the model requires it")
            if missing:
                array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
            tensors.append((position, _borrowed(array)))
        try:
            for position, tensor in tensors:
                request.set_input_tensor(position, tensor)
            request.infer()
        except Exception as error:  # as in `load`
            raise InferenceFailed(f"OpenVINO error: {_reason(error)}") from error
        outputs = {name: np.array(request.get_output_tensor(p).data) for name, p in self._outputs.items()}
        if missing:
            outputs = {name: array[:size] for name, array in outputs.items()}
        respond_rows(batch, ctx, outputs, self._datatypes, names=self._names)

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns the size of the weights."""
        return self._memory

    def unload(self) -> None:
        """Frees the model."""
        del self._request


@cache
def _core() -> Any:
    """Returns the process's only core, made in a thread that ends, and never destroyed.

    The CPU plugin gives the thread that creates it a signal stack, and unmaps it at the plugin's end. It detaches the
    stack only if it ends in that thread, before any later plugin; otherwise the thread's next signal kills the process
    silently.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="openvino") as threads:
        return threads.submit(_core_with_plugins).result()


def _core_with_plugins() -> Any:
    core = ov.Core()
    _ = core.available_devices  # creates the device plugins
    return core


def properties(spec: ModelSpec) -> dict[str, str]:
    """Translates a model's parameters to OpenVINO's properties."""
    for name in _REFUSED:
        if name in spec.parameters:
            raise ModelLoadFailed(f"parameter '{name}' of model '{spec.name}' is not supported; remove it")
    threads = count(spec, "INFERENCE_NUM_THREADS") or count(spec, "CPU_THREADS_NUM") or cores_each(spec)
    found = {"INFERENCE_NUM_THREADS": str(threads), "NUM_STREAMS": _streams(spec)}
    if hint := choice(spec, "PERFORMANCE_HINT", _HINTS, ""):
        found["PERFORMANCE_HINT"] = hint
    if compilation := count(spec, "COMPILATION_NUM_THREADS"):
        found["COMPILATION_NUM_THREADS"] = str(compilation)
    # Rounding to BF16, OpenVINO's default, would make results depend on the CPU.
    rough = flag(spec, "HINT_BF16") or flag(spec, "ENFORCE_BF16")
    found["INFERENCE_PRECISION_HINT"] = "bf16" if rough else "f32"
    return found


def _streams(spec: ModelSpec) -> str:
    """Returns the number of streams; one by default, for one request at a time."""
    name = "NUM_STREAMS" if "NUM_STREAMS" in spec.parameters else "CPU_THROUGHPUT_STREAMS"
    text = spec.parameters.get(name, "1").upper()
    if text in ("AUTO", "NUMA"):
        return text
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ModelLoadFailed(
            f"parameter '{name}' of model '{spec.name}' is '{text}'; it must be a number above 0, auto or numa"
        )
    return text


def _reshape(spec: ModelSpec, model: Any) -> None:
    """Makes the batch dimension variable; `RESHAPE_IO_LAYERS` sets the other dimensions, too."""
    if flag(spec, "RESHAPE_IO_LAYERS"):
        lead = [-1] if spec.max_batch_size else []
        model.reshape({i.name: ov.PartialShape([*lead, *(i.reshape or i.dims)]) for i in spec.file_inputs})
        return
    skip = flag(spec, "SKIP_OV_DYNAMIC_BATCHSIZE") or flag(spec, "SKIP_DYNAMIC_BATCHSIZE")
    if not spec.max_batch_size or skip:
        return
    fixed = {port: dims for port in model.inputs if (dims := _dims(port)) and dims[0] != -1}
    if fixed:
        model.reshape({port: ov.PartialShape([-1, *dims[1:]]) for port, dims in fixed.items()})


def _compared(spec: ModelSpec, kind: str, configured: Sequence[TensorSpec], ports: Sequence[Any]) -> list[int]:
    """Compares configured tensors with the model's ports; returns their positions among the ports."""
    names = {name: position for position, port in enumerate(ports) for name in port.get_names()}
    types = [port.element_type.get_type_name() for port in ports]
    found = {name: (_DATATYPES.get(types[at], types[at]), _dims(ports[at])) for name, at in names.items()}
    for tensor in configured:
        compare(spec, kind, tensor, found)
    positions = [names[tensor.name] for tensor in configured]
    if kind == "input" and len(positions) < len(ports):
        raise ModelLoadFailed(f"model '{spec.name}' has {len(ports)} inputs, its configuration {len(positions)}")
    return positions


def _dims(port: Any) -> list[int] | None:
    """Returns the dimensions, -1 where one is variable; `None` if the rank is unknown."""
    shape = port.partial_shape
    if shape.rank.is_dynamic:
        return None
    return [dim.get_length() if dim.is_static else -1 for dim in shape]


def _widened(spec: ModelSpec, model: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Any:
    """Uses float32 for BF16, which numpy lacks."""
    process, used = PrePostProcessor(model), False
    for tensors, positions, ports in (
        (spec.file_inputs, inputs, process.input),
        (spec.file_outputs, outputs, process.output),
    ):
        for tensor, position in zip(tensors, positions, strict=True):
            if tensor.datatype == "BF16":
                ports(position).tensor().set_element_type(ov.Type.f32)
                used = True
    return process.build() if used else model


def _borrowed(array: Array) -> Any:
    flags = array.flags
    if not (flags.c_contiguous and flags.writeable):
        array = np.array(array, order="C")
    return ov.Tensor(array, shared_memory=True)


def _reason(error: BaseException, path: Path | None = None) -> str:
    """Returns the error's text without the places in OpenVINO's source."""
    lines = [line.strip() for line in cleaned(error, path).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Exception from", "Check '", "FrontEnd API"))]
    return " ".join(told or lines)
