"""The `tensorrt` backend: `model.plan`, or `model.onnx`, whose engine it builds once and caches (`tensorrt_build`).

Each instance has its own CUDA stream, pinned host memory, and buffers. With `optimization { cuda { graphs: true } }`,
the second execution of each shape is recorded as a CUDA graph, with its copies, and then replayed. Written against the
API of TensorRT 10 and 11. https://docs.nvidia.com/deeplearning/tensorrt/latest/api/python_api/
"""

import logging
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import tensorrt as trt

from qinfer.backends.base import Array, Batch, Context, respond_rows
from qinfer.backends.cuda import TO_DEVICE, TO_HOST, Cuda, end_if_lost
from qinfer.backends.parameters import build_once, cleaned, engine_cache, model_file
from qinfer.backends.tensorrt_build import build_of, cache_key
from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed, QinferError
from qinfer.models.config.file_tensors import read_onnx
from qinfer.models.repository.files import LocalFiles
from qinfer.models.spec import Device, ModelSpec
from qinfer.tensors import DATATYPES, from_bf16, to_bf16

logger = logging.getLogger(__name__)

_DATATYPES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "BOOL": "BOOL",
    "UINT8": "UINT8",
}
_MAX_GRAPHS = 64  # each has an execution context


Shape = tuple[int, ...]


class Port(NamedTuple):
    """An engine's tensor, with its largest shape."""

    name: str
    datatype: str
    shape: Shape


class Buffers:
    """An instance's buffers for the largest shapes, on the GPU and the host.

    The instance's GPU must be selected. Executions share `scratch_bytes`: they never overlap.
    """

    def __init__(self, cuda: Cuda, ports: list[Port], scratch_bytes: int) -> None:
        self._cuda = cuda
        self._ports = {port.name: port for port in ports}
        self._host: dict[str, tuple[int, Array]] = {}
        self.addresses: dict[str, int] = {}
        """Name → address on the GPU."""
        self.scratch, self.scratch_bytes = 0, scratch_bytes
        try:
            self.scratch = cuda.allocate(scratch_bytes)
            for port in ports:
                size_bytes = prod(port.shape) * _itemsize(port)
                self.addresses[port.name] = cuda.allocate(size_bytes)
                self._host[port.name] = cuda.allocate_pinned(size_bytes)
        except BaseException:
            self.free()
            raise

    def fill(self, name: str, array: Array) -> None:
        """Copies an input into its pinned buffer."""
        port = self._ports[name]
        if port.datatype == "BF16":
            array = to_bf16(array)
        view = self._host[name][1][: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(view, array)

    def read(self, name: str, shape: Shape) -> Array:
        """Copies an output from its pinned buffer."""
        port = self._ports[name]
        raw = self._host[name][1][: self._size_bytes(name, shape)]
        if port.datatype == "BF16":
            return from_bf16(raw.view("<u2")).reshape(shape)
        copied: Array = raw.view(DATATYPES[port.datatype].numpy or "<u2").reshape(shape).copy()
        return copied

    def to_device(self, name: str, shape: Shape, stream: int) -> None:
        """Queues an input's copy."""
        size_bytes = self._size_bytes(name, shape)
        self._cuda.copy(self.addresses[name], self._host[name][0], size_bytes, TO_DEVICE, stream)

    def to_host(self, name: str, shape: Shape, stream: int) -> None:
        """Queues an output's copy."""
        self._cuda.copy(self._host[name][0], self.addresses[name], self._size_bytes(name, shape), TO_HOST, stream)

    def free(self) -> None:
        """Frees all buffers."""
        for address in (self.scratch, *self.addresses.values()):
            if address:
                self._cuda.free(address)
        for address, _ in self._host.values():
            self._cuda.free_pinned(address)
        self.scratch = 0
        self.addresses.clear()
        self._host.clear()

    def _size_bytes(self, name: str, shape: Shape) -> int:
        return prod(shape) * _itemsize(self._ports[name])


def _itemsize(port: Port) -> int:
    return DATATYPES[port.datatype].itemsize


class TensorrtBackend:
    """Runs TensorRT engines."""

    short_on_loop = False

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Opens or builds the engine, and allocates buffers."""
        self._cuda = Cuda()
        found = self._cuda.device_count()
        if device.kind != "gpu" or device.number >= found:
            where = f"GPU {device.number}" if device.kind == "gpu" else "the CPU"
            raise ModelLoadFailed(
                f"model '{spec.name}' is for {where}, and TensorRT runs on GPUs only, of which this machine "
                f"has {found}; "
                "set the instance group's kind to KIND_GPU and its gpus to existing ones"
            )
        self._device, self._name = device.number, spec.name
        self._cuda.set_device(device.number)
        path = model_file(spec, version_dir, "model.plan", "model.onnx")
        if path.suffix == ".onnx":
            path = _engine_of(self._cuda, spec, path, device.number)
        try:
            self._open_engine(spec, path)
        except QinferError:
            raise
        except Exception as error:  # pybind11 raises any class
            raise ModelLoadFailed(f"TensorRT can't load model '{spec.name}': {cleaned(error, path)}") from error

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Runs a batch, with copies both ways."""
        missing = [name for name in self._shapes_max if name not in batch.inputs]
        if missing:
            raise InvalidRequest(f"input '{missing[0]}' is missing, and the model requires it")
        try:
            self._cuda.set_device(self._device)  # per thread
            outputs = self._run_engine(batch.inputs)
        except QinferError:
            raise
        except Exception as error:  # as in `load`
            end_if_lost(self._device)
            raise InferenceFailed(f"TensorRT error: {error}") from error
        respond_rows(batch, ctx, outputs, self._datatypes, names=self._names)

    def unload(self) -> None:
        """Frees all GPU memory."""
        self._cuda.set_device(self._device)
        for graph in self._graphs.values():
            self._cuda.destroy_graph(graph)
        self._graphs.clear()
        self._contexts.clear()
        del self._context, self._engine
        self._buffers.free()
        self._cuda.destroy_stream(self._stream)

    def _open_engine(self, spec: ModelSpec, path: Path) -> None:
        log = trt.Logger(trt.Logger.WARNING)
        trt.init_libnvinfer_plugins(log, "")
        self._runtime = trt.Runtime(log)
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise ModelLoadFailed(
                f"TensorRT {trt.__version__} can't read '{path.name}' of model '{spec.name}': a plan fits only the GPU "
                "and the version that it was built with; build it again, or replace it by the model.onnx"
            )
        self._engine = engine
        self._graphs: dict[tuple[Shape, ...], int] = {}
        self._contexts: dict[tuple[Shape, ...], trt.IExecutionContext] = {}
        self._use_graphs = spec.cuda_graphs
        ports = self._ports(spec)
        self._names = [output.name for output in spec.outputs]
        self._datatypes = {output.name: output.datatype for output in spec.file_outputs}
        self._stream = self._cuda.stream(urgent=spec.urgent)
        self._buffers = Buffers(self._cuda, ports, engine.device_memory_size_v2)
        self._context = self._new_context()

    def _ports(self, spec: ModelSpec) -> list[Port]:
        """Returns each tensor's largest shape."""
        engine = self._engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self._shapes_max = {name: tuple(engine.get_tensor_profile_shape(name, 0)[2]) for name in inputs}
        self._shapes_min = {name: tuple(engine.get_tensor_profile_shape(name, 0)[0]) for name in inputs}
        for kind, configured, found in (
            ("input", spec.file_inputs, inputs),
            ("output", spec.file_outputs, [name for name in names if name not in inputs]),
        ):
            wanted = {tensor.name: tensor.datatype for tensor in configured}
            for name in sorted(set(wanted) ^ set(found)):
                if kind == "output" and name in found:
                    continue
                raise ModelLoadFailed(
                    f"unexpected inference {kind} '{name}' for model '{spec.name}': the engine has {', '.join(found)}"
                )
            for name, datatype in wanted.items():
                has = _DATATYPES.get(engine.get_tensor_dtype(name).name, engine.get_tensor_dtype(name).name)
                if has != datatype:
                    raise ModelLoadFailed(
                        f"model '{spec.name}', {kind} '{name}': the engine has {has}, its configuration {datatype}"
                    )
        return _largest(engine, names, self._shapes_max, spec.name)

    def _new_context(self) -> trt.IExecutionContext:
        """Makes a context that uses the shared scratch memory."""
        context = self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        context.set_device_memory(self._buffers.scratch, self._buffers.scratch_bytes)
        if context.active_optimization_profile != 0:
            context.set_optimization_profile_async(0, self._stream)
            self._cuda.synchronize(self._stream)
        for name, address in self._buffers.addresses.items():
            context.set_tensor_address(name, address)
        return context

    def _run_engine(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        shapes = tuple(tuple(inputs[name].shape) for name in self._shapes_max)
        for name in self._shapes_max:
            self._fits(name, inputs[name].shape)
            self._buffers.fill(name, inputs[name])
        graph = self._graphs.get(shapes)
        context = self._contexts.get(shapes, self._context)
        if graph is not None:
            self._cuda.launch(graph, self._stream)
        else:
            for name in self._shapes_max:
                context.set_input_shape(name, tuple(inputs[name].shape))
            self._queue(context, inputs)
        self._cuda.synchronize(self._stream)
        outputs = {name: self._buffers.read(name, tuple(context.get_tensor_shape(name))) for name in self._datatypes}
        if self._use_graphs and graph is None:
            self._record(shapes, inputs)
        return outputs

    def _queue(self, context: trt.IExecutionContext, inputs: Mapping[str, Array]) -> None:
        for name in self._shapes_max:
            self._buffers.to_device(name, tuple(inputs[name].shape), self._stream)
        if not context.execute_async_v3(self._stream):
            raise InferenceFailed("TensorRT could not start the execution; its own messages are in the worker's log")
        for name in self._datatypes:
            self._buffers.to_host(name, tuple(context.get_tensor_shape(name)), self._stream)

    def _record(self, shapes: tuple[Shape, ...], inputs: Mapping[str, Array]) -> None:
        """Records a graph in a context of its own that has run once, as TensorRT requires."""
        if shapes not in self._contexts:
            if len(self._contexts) < _MAX_GRAPHS:
                self._contexts[shapes] = self._new_context()
            return
        if shapes in self._graphs:
            return
        try:
            self._cuda.begin_capture(self._stream)
            try:
                self._queue(self._contexts[shapes], inputs)
            finally:
                graph = self._cuda.end_capture(self._stream)
        except Exception as error:  # noqa: BLE001  pybind11 and CUDA; it is an optimisation only
            self._use_graphs = False
            logger.warning("no CUDA graphs for this model", extra={"model": self._name, "reason": str(error)})
        else:
            self._graphs[shapes] = graph

    def _fits(self, name: str, shape: Shape) -> None:
        low, high = self._shapes_min[name], self._shapes_max[name]
        if len(shape) != len(high) or any(not a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
            raise InferenceFailed(
                f"input '{name}' has shape {list(shape)}; the engine takes {list(low)} to {list(high)}"
            )


def _largest(engine: trt.ICudaEngine, names: list[str], inputs: Mapping[str, Shape], model: str) -> list[Port]:
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    for name, shape in inputs.items():
        context.set_input_shape(name, shape)
    ports = []
    for name in names:
        if engine.is_shape_inference_io(name):
            raise ModelLoadFailed(f"model '{model}': '{name}' is a shape tensor, which is not supported")
        shape = inputs.get(name) or tuple(context.get_tensor_shape(name))
        datatype = _DATATYPES.get(engine.get_tensor_dtype(name).name)
        if datatype is None or any(dim < 0 for dim in shape):
            what = "a shape that depends on the data" if datatype else f"type {engine.get_tensor_dtype(name).name}"
            raise ModelLoadFailed(f"model '{model}': '{name}' has {what}, which is not supported")
        ports.append(Port(name, datatype, shape))
    return ports


def _engine_of(cuda: Cuda, spec: ModelSpec, onnx: Path, device: int) -> Path:
    """Returns the cached engine of an ONNX file, or builds it; one process builds at a time."""
    with LocalFiles(onnx.parent).blob(onnx.name, onnx.stat().st_size) as blob:
        declared = read_onnx(blob, onnx.name)
    build = build_of(spec, declared)
    key = cache_key(build, onnx.parent, cuda.describe(device), trt.__version__)
    plan = engine_cache() / "tensorrt" / f"{key}.plan"
    build.onnx, build.plan, build.device = str(onnx), str(plan), device
    build_once(spec, "engine", plan, "qinfer.backends.tensorrt_build", msgspec.json.encode(build))
    return plan
