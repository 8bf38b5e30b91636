"""The `pytorch` backend: TorchScript `model.pt`, and `model.pt2` of torch.export or AOTInductor, on CPU and CUDA.

Settings, by Triton's names: parameters `INFERENCE_MODE`, `DISABLE_OPTIMIZED_EXECUTION`, `INTRA_OP_THREAD_COUNT`,
`INTER_OP_THREAD_COUNT`, `DISABLE_CUDNN`, `ENABLE_CACHE_CLEANING`, `ENABLE_JIT_EXECUTOR`, `ENABLE_JIT_PROFILING`,
`ENABLE_TENSOR_FUSER`. qinfer's own: `qinfer.torch_amp` (`float16`, `bfloat16`) and `qinfer.torch_compile` (a mode of
torch.compile, such as `default`). Inputs and outputs are bound by Triton's naming conventions; in order, control inputs
and states come last. https://github.com/triton-inference-server/pytorch_backend#model-configuration

Model files are opened without unpickling objects; archives with some are refused. No format is safe against its author:
a model file is a program.
"""

import inspect
import io
import json
import logging
import threading
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.export
from torch.export.passes import move_to_device_pass
from torch.jit import _fuser

from qinfer.backends.base import Array, Batch, Context, respond_rows
from qinfer.backends.cuda import end_if_lost
from qinfer.backends.parameters import choice, cleaned, cores_each, count, flag, model_file, say_once
from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed, OutputMismatch, QinferError
from qinfer.models.config.optimization import AUTO_MIXED_PRECISION
from qinfer.models.config.to_spec import TORCH_AMP, TORCH_COMPILE
from qinfer.models.spec import Device, ModelSpec
from qinfer.observe.host import MemoryUse
from qinfer.tensors import DATATYPES

logger = logging.getLogger(__name__)

_DTYPES: dict[str, torch.dtype] = {
    d.name: getattr(torch, np.dtype(d.numpy).name) for d in DATATYPES.values() if d.numpy
} | {"BF16": torch.bfloat16}
_AMP: dict[str, torch.dtype | None] = {
    "float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "none": None,
}  # fmt: skip
_COMPILE = {m: m for m in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")} | {"none": ""}
_PINNED_MIN_BYTES = 64 * 1024  # below this, ordinary memory is quicker

_thread = threading.local()


_deprecations = threading.Lock()  # warning filters are not thread-safe
_archives = threading.Lock()  # PyTorch compiles one model.pt2 at a time
_SEPARATOR = "__"


class OpenedModel(NamedTuple):
    """An open model file, of `kind` `torchscript`, `export` or `aoti`; `arguments` are those of `forward`, if known."""

    call: Callable[..., Any]
    arguments: tuple[str, ...]
    takes_dict: bool
    kind: str
    nbytes: int


def open_model(path: Path, device: torch.device) -> OpenedModel:
    """Opens a model file on a device; blocking."""
    if not zipfile.is_zipfile(path):
        raise ModelLoadFailed(
            f"'{path.name}' is not a PyTorch archive; save the model with torch.export.save or torch.jit.save"
        )
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        if "constants.pkl" in names:
            return _torchscript(path, device)
        if any(name.startswith("data/aotinductor/") for name in names):
            refuse_pickle(archive, names)
            with _archives:
                return _aoti(path, device)
        if any(name.startswith("models/") for name in names):
            refuse_pickle(archive, names)
            with _archives:
                return _exported(path, device)
        if "data.pkl" in names:
            raise ModelLoadFailed(
                f"'{path.name}' is a pickled module or state dict, which is never loaded, because a pickle may run any "
                "code; save the model with torch.export.save or torch.jit.save"
            )
    raise ModelLoadFailed(f"'{path.name}' has an unknown PyTorch format; save the model again")


def refuse_pickle(archive: zipfile.ZipFile, names: dict[str, str]) -> None:
    """Raises `ModelLoadFailed` for archives that need a full unpickling."""
    for name, full in names.items():
        if name.endswith(("_weights_config.json", "_constants_config.json")):
            for tensor, entry in json.loads(archive.read(full)).get("config", {}).items():
                if entry.get("use_pickle") or "custom_obj" in str(entry.get("path_name", "")):
                    raise ModelLoadFailed(f"the model holds '{tensor}' as a pickled object, which is never loaded")
        elif name.startswith("data/sample_inputs/") and (raw := archive.read(full)):
            try:
                torch.load(io.BytesIO(raw), weights_only=True)
            except Exception as error:
                raise ModelLoadFailed(
                    "the model's sample inputs hold pickled objects, which are never loaded; export it with tensors"
                ) from error


def _torchscript(path: Path, device: torch.device) -> OpenedModel:
    with _deprecations, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the format stays readable
        module = torch.jit.load(str(path), map_location=device)  # type: ignore[no-untyped-call]  # it has no types
    module.eval()
    arguments = module.forward.schema.arguments[1:]
    takes_dict = len(arguments) == 1 and arguments[0].type.kind() == "DictType"
    return OpenedModel(module, tuple(a.name for a in arguments), takes_dict, "torchscript", _weights_bytes(module))


def _exported(path: Path, device: torch.device) -> OpenedModel:
    program = torch.export.load(path)
    if device.type != "cpu":
        program = move_to_device_pass(program, device)
    module = program.module()
    return OpenedModel(
        module, tuple(inspect.signature(module.forward).parameters), False, "export", _weights_bytes(module)
    )


def _aoti(path: Path, device: torch.device) -> OpenedModel:
    index = -1 if device.type == "cpu" else device.index or 0
    loaded = torch._inductor.aoti_load_package(str(path), device_index=index)  # the documented way
    compiled_for = loaded.get_metadata().get("AOTI_DEVICE_KEY", device.type)
    if compiled_for != device.type:
        raise ModelLoadFailed(
            f"'{path.name}' was compiled for {compiled_for}, but its instance group is on {device.type}; "
            "compile it for that, or set the group's kind"
        )
    return OpenedModel(loaded, (), False, "aoti", path.stat().st_size)  # the file contains the weights


def _weights_bytes(module: torch.nn.Module) -> int:
    """Returns the size of parameters and buffers; each counts once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class TorchBackend:
    """Runs PyTorch models."""

    short_on_loop = False

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Opens the model file, and assigns arguments to inputs."""
        for tensor in (*spec.file_inputs, *spec.file_outputs):
            if tensor.datatype not in _DTYPES:
                raise ModelLoadFailed(
                    f"model '{spec.name}': '{tensor.name}' is {tensor.datatype}, which PyTorch has no tensors of"
                )
        self._device = _device(spec, device)
        self._spec = spec
        self._threads = count(spec, "INTRA_OP_THREAD_COUNT") or cores_each(spec)
        _configure(spec)
        path = model_file(spec, version_dir, "model.pt", "model.pt2")
        self._modes = _Modes(spec, self._device)
        set_threads(self._threads)
        try:
            opened = open_model(path, self._device)
        except ModelLoadFailed as error:
            raise ModelLoadFailed(f"PyTorch can't load model '{spec.name}': {error.message}") from error
        except Exception as error:  # PyTorch raises a dozen classes
            raise ModelLoadFailed(f"PyTorch can't load model '{spec.name}': {_first_line(error, path)}") from error
        self._memory = (MemoryUse(device.kind.upper(), device.number, opened.nbytes),)
        if self._modes.amp and opened.kind == "aoti":
            say_once(spec.name, AUTO_MIXED_PRECISION, "a compiled package computes in its own types")
        self._bind(spec, opened)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            priority = -1 if spec.urgent else 0
            self._stream = torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]  # PyTorch annotates no arguments

        self._compile(spec, opened)
        # A compilation, or a busy device, would block the event loop.
        self.short_on_loop = self._device.type == "cpu" and not self._compiled

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Calls the model."""
        if getattr(_thread, "count", 0) != self._threads:
            set_threads(self._threads)
        try:
            if self._stream is None:
                outputs = self._run_module(batch.inputs)
            else:
                outputs = self._run_on_stream(batch.inputs, self._stream)
        except QinferError:
            raise
        except Exception as error:  # as in `load`
            logger.warning("execution failed", extra={"model": self._spec.name, "reason": str(error)})
            if self._stream is not None:
                end_if_lost(self._device.index)
            raise InferenceFailed(f"PyTorch execute failure: {_reason(error)}") from error
        respond_rows(batch, ctx, outputs, self._datatypes, names=self._names)

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns the size of parameters and buffers."""
        return self._memory

    def unload(self) -> None:
        """Frees the model and its device memory."""
        del self._call
        if self._stream is not None:
            torch.cuda.empty_cache()

    def _bind(self, spec: ModelSpec, opened: OpenedModel) -> None:
        self._call = opened.call
        self._takes_dict = opened.takes_dict
        self._arguments = opened.arguments
        self._inputs = inputs = spec.file_inputs
        names = [i.name for i in inputs]
        self._positions = [] if opened.takes_dict else input_positions(spec.name, names, opened.arguments)
        contiguous = sorted(self._positions) == list(range(len(names)))
        if not (opened.takes_dict or contiguous or opened.arguments):
            raise ModelLoadFailed(f"model '{spec.name}': the inputs {', '.join(names)} leave a position out")
        by_position = dict(zip(self._positions, inputs, strict=False))
        self._ordered = tuple(by_position[p].name for p in sorted(by_position)) if contiguous else ()
        self._narrow = {i.name: _DTYPES["BF16"] for i in inputs if i.datatype == "BF16"}
        outputs = spec.file_outputs
        self._names = [output.name for output in spec.outputs]
        self._datatypes = {output.name: output.datatype for output in outputs}
        positions = output_positions(spec.name, list(self._datatypes))
        self._outputs = [(o.name, p, _DTYPES[o.datatype]) for o, p in zip(outputs, positions, strict=True)]

    def _compile(self, spec: ModelSpec, opened: OpenedModel) -> None:
        mode = choice(spec, TORCH_COMPILE, _COMPILE, "")
        self._compiled = bool(mode)
        if not mode:
            return
        if any(i.ragged for i in self._inputs):
            raise ModelLoadFailed(
                f"parameter '{TORCH_COMPILE}' of model '{spec.name}' is not offered with ragged batches; remove it"
            )
        if opened.kind != "export":
            raise ModelLoadFailed(
                f"parameter '{TORCH_COMPILE}' of model '{spec.name}' needs a model.pt2 of torch.export.save; "
                f"this model is {opened.kind}"
            )
        self._call = torch.compile(opened.call, mode=mode)
        with _archives:
            self._compile_now(spec)

    def _compile_now(self, spec: ModelSpec) -> None:
        """Compiles by calls of several sizes, because one row has code of its own."""
        for rows in (1, 2, spec.max_batch_size) if spec.max_batch_size > 1 else (spec.max_batch_size,):
            lead = (rows,) if rows else ()
            zeros = {
                i.name: torch.zeros(
                    (*lead, *(max(d, 1) for d in i.dims)), dtype=_DTYPES[i.datatype], device=self._device
                )
                for i in self._inputs
            }
            try:
                self._called(zeros)
            except Exception as error:
                raise ModelLoadFailed(f"torch.compile of model '{spec.name}' failed: {_first_line(error)}") from error

    def _run_module(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        narrow = self._narrow
        tensors = {name: _to_torch(array) for name, array in inputs.items()}
        for name in narrow:
            if name in tensors:
                tensors[name] = tensors[name].to(narrow[name])
        return {name: _array(tensor) for name, tensor in self._results(self._called(tensors)).items()}

    def _run_on_stream(self, inputs: Mapping[str, Array], stream: "torch.cuda.Stream") -> dict[str, Array]:
        """Waits only for this instance's stream."""
        with torch.cuda.stream(stream):
            tensors = {}
            for name, array in inputs.items():
                tensor = _to_torch(array)
                if array.nbytes >= _PINNED_MIN_BYTES and self._spec.pins_inputs:
                    tensor = tensor.pin_memory()
                tensors[name] = tensor.to(self._device, self._narrow.get(name), non_blocking=True)
            results = self._results(self._called(tensors))
            # A copy that does not block goes to pinned memory.
            pinned = self._spec.pins_outputs
            results = {name: tensor.detach().to("cpu", non_blocking=pinned) for name, tensor in results.items()}
            stream.synchronize()
        self._modes.after()
        return {name: _array(tensor) for name, tensor in results.items()}

    def _called(self, tensors: dict[str, torch.Tensor]) -> Any:
        with self._modes.context():
            if self._takes_dict:
                return self._call(tensors)
            if len(tensors) == len(self._ordered):
                return self._call(*[tensors[name] for name in self._ordered])
            if not self._arguments:
                missing = next(name for name in self._ordered if name not in tensors)
                raise InvalidRequest(f"input '{missing}' is missing, and the model requires it")
            keywords = {
                self._arguments[p]: tensors[i.name]
                for p, i in zip(self._positions, self._inputs, strict=True)
                if i.name in tensors
            }
            return self._call(**keywords)

    def _results(self, returned: Any) -> dict[str, torch.Tensor]:
        if isinstance(returned, torch.Tensor):
            returned = (returned,)
        results: dict[str, torch.Tensor] = {}
        for name, position, dtype in self._outputs:
            try:
                tensor = returned[name] if isinstance(returned, dict) else returned[position]
            except (KeyError, IndexError, TypeError):
                raise OutputMismatch(f"the model returned {_described(returned)} without output '{name}'") from None
            if self._modes.amp and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor = tensor.to(dtype) if dtype.is_floating_point else tensor
            if not isinstance(tensor, torch.Tensor) or tensor.dtype is not dtype:
                found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise OutputMismatch(
                    f"output '{name}' of the model is {found}, its configuration {self._datatypes[name]}"
                )
            results[name] = tensor
        return results


class _Modes:
    """Switches off PyTorch's defaults."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        inference = flag(spec, "INFERENCE_MODE", default=True)
        self.amp = amp = _amp(spec, device)
        self._guard: Callable[[], Any] = torch.inference_mode if inference else torch.no_grad
        self._more: list[Callable[[], Any]] = []
        if amp is not None:
            self._more.append(lambda: torch.autocast(device.type, amp))
        if flag(spec, "DISABLE_OPTIMIZED_EXECUTION"):
            self._more.append(lambda: _fuser.optimized_execution(False))
        if flag(spec, "DISABLE_CUDNN"):
            self._more.append(lambda: torch.backends.cudnn.flags(enabled=False))
        self._clean = flag(spec, "ENABLE_CACHE_CLEANING")

    def context(self) -> Any:
        if not self._more:
            return self._guard()
        stack = ExitStack()
        for make in (self._guard, *self._more):
            stack.enter_context(make())
        return stack

    def after(self) -> None:
        if self._clean:
            torch.cuda.empty_cache()


def _amp(spec: ModelSpec, device: torch.device) -> torch.dtype | None:
    """Returns the type of autocast, by the parameter before the accelerator."""
    if TORCH_AMP in spec.parameters:
        return choice(spec, TORCH_AMP, _AMP, None)
    if not spec.accelerates(AUTO_MIXED_PRECISION, Device("gpu" if device.type == "cuda" else "cpu")):
        return None
    if device.type == "cuda":
        return torch.float16
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        say_once(spec.name, AUTO_MIXED_PRECISION, "the processor has no BF16")
        return None
    return torch.bfloat16


def set_threads(threads: int) -> None:
    """Sets PyTorch's number of threads, which it keeps per calling thread."""
    torch.set_num_threads(threads)
    _thread.count = threads


def _device(spec: ModelSpec, device: Device) -> torch.device:
    if device.kind == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise ModelLoadFailed(
            f"model '{spec.name}' is for GPU {device.number}, and the installed PyTorch {torch.__version__} finds "
            "none; install a build for CUDA, or set the instance group's kind to KIND_CPU"
        )
    if device.number >= found:
        raise ModelLoadFailed(f"model '{spec.name}' is for GPU {device.number}; this machine has {found}, from 0")
    return torch.device("cuda", device.number)


def _configure(spec: ModelSpec) -> None:
    """Sets options of the whole process; as in Triton, the first or last model wins."""
    threads = count(spec, "INTER_OP_THREAD_COUNT")
    if threads and threads != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(threads)
        except RuntimeError:
            logger.warning("INTER_OP_THREAD_COUNT has no effect: it was set already", extra={"model": spec.name})
    for name, apply in (
        ("ENABLE_JIT_EXECUTOR", torch._C._jit_set_profiling_executor),
        ("ENABLE_JIT_PROFILING", torch._C._jit_set_profiling_mode),
        ("ENABLE_TENSOR_FUSER", torch._C._jit_set_texpr_fuser_enabled),
    ):
        if name in spec.parameters:
            apply(flag(spec, name))


def _to_torch(array: Array) -> torch.Tensor:
    """Shares the array's memory, but copies a request's own bytes."""
    return torch.from_numpy(array if array.flags.writeable else np.array(array))


def _array(tensor: torch.Tensor) -> Array:
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    array: Array = tensor.numpy(force=tensor.requires_grad)
    return array


def _described(returned: Any) -> str:
    if isinstance(returned, dict):
        return f"a dictionary of {', '.join(map(str, returned))}"
    return f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"


def _reason(error: BaseException) -> str:
    """Returns the error's last line where TorchScript shows the author's code before it, else its first."""
    text = str(error).strip()
    if "Traceback of TorchScript" in text:
        return text.splitlines()[-1].removeprefix("builtins.")
    return _first_line(error)


def _first_line(error: BaseException, path: Path | None = None) -> str:
    return (cleaned(error, path).splitlines() or [type(error).__name__])[0]


def input_positions(model: str, inputs: Sequence[str], arguments: Sequence[str]) -> list[int]:
    """Returns the position in `forward` of each configured input.

    Names are those of the arguments, or all end in `__<position>`, or are in order.
    """
    if arguments and set(inputs) <= set(arguments):
        return [arguments.index(name) for name in inputs]
    limit = len(arguments) or len(inputs)
    if len(inputs) > limit:
        raise ModelLoadFailed(
            f"model '{model}' has {limit} inputs ({', '.join(arguments)}), its configuration {len(inputs)}"
        )
    return _by_index(model, "input", inputs, limit) or list(range(len(inputs)))


def output_positions(model: str, outputs: Sequence[str]) -> list[int]:
    """Returns each output's position: `__<position>`, else in order."""
    return _by_index(model, "output", outputs, None) or list(range(len(outputs)))


def _by_index(model: str, kind: str, names: Sequence[str], limit: int | None) -> list[int] | None:
    endings = [name.rpartition(_SEPARATOR) for name in names]
    if not all(stem and end.isascii() and end.isdecimal() for stem, _, end in endings):
        return None
    positions = [int(end) for _, _, end in endings]
    if len(set(positions)) < len(positions):
        raise ModelLoadFailed(f"model '{model}' has two {kind}s of the same position: {', '.join(names)}")
    if limit is not None and max(positions) >= limit:
        raise ModelLoadFailed(
            f"model '{model}': {kind} '{names[positions.index(max(positions))]}' has no such position; "
            f"the model has {limit} {kind}s, counted from 0"
        )
    return positions
