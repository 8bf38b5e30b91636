"""The `pytorch` backend: TorchScript `model.pt`, and `model.pt2` of torch.export or AOTInductor, on CPU and CUDA.

Settings, by Triton's names: parameters `INFERENCE_MODE`, `DISABLE_OPTIMIZED_EXECUTION`, `INTRA_OP_THREAD_COUNT`,
`INTER_OP_THREAD_COUNT`, `DISABLE_CUDNN`, `ENABLE_CACHE_CLEANING`, `ENABLE_JIT_EXECUTOR`, `ENABLE_JIT_PROFILING`,
`ENABLE_TENSOR_FUSER`. qinfer's own: `qinfer.torch_amp` (`float16`, `bfloat16`) and `qinfer.torch_compile` (a mode of
torch.compile, such as `default`).
https://github.com/triton-inference-server/pytorch_backend#model-configuration
"""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.jit import _fuser

from qinfer.backends.base import Array, Batch, Context, respond_rows
from qinfer.backends.parameters import choice, cleaned, cores_each, count, flag, model_file
from qinfer.backends.torch_files import Opened, open_model
from qinfer.backends.torch_names import input_positions, output_positions
from qinfer.errors import InferenceFailed, InvalidRequest, ModelLoadFailed, OutputMismatch, QinferError
from qinfer.models.config.to_spec import TORCH_AMP, TORCH_COMPILE
from qinfer.models.spec import Device, ModelSpec

logger = logging.getLogger(__name__)

_DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
_AMP = {"float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
_AMP_CHOICES: dict[str, torch.dtype | None] = {**_AMP, "none": None}
_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_COMPILE_CHOICES = {**{mode: mode for mode in _COMPILE_MODES}, "none": ""}
_PINNED_MIN_BYTES = 64 * 1024  # below that, a copy from ordinary memory is over sooner

_thread = threading.local()


class TorchBackend:
    """See the module docstring."""

    short_on_loop = False

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Opens the model file, and reads which argument is which input.

        Raises:
            ModelLoadFailed: The file can't be loaded, a parameter is wrong, the GPU is not there, or the configuration
                does not fit the model.
        """
        for tensor in (*spec.inputs, *spec.outputs):
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
        except Exception as error:  # PyTorch raises a dozen unrelated classes; they are mapped here, once
            raise ModelLoadFailed(f"PyTorch can't load model '{spec.name}': {_first_line(error, path)}") from error
        self._bind(spec, opened)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # PyTorch annotates no arguments

        self._compile(spec, opened)
        # A compiled function may compile again, and a device may be busy: both would hold the worker's loop up.
        self.short_on_loop = self._device.type == "cpu" and not self._compiled

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Calls the model.

        Raises:
            InferenceFailed: The model raised.
            InvalidRequest: An input that the model can't do without is missing.
            OutputMismatch: The results are not those of the configuration.
        """
        if getattr(_thread, "count", 0) != self._threads:
            set_threads(self._threads)
        try:
            if self._stream is None:
                outputs = self._run(batch.inputs)
            else:
                outputs = self._run_on_stream(batch.inputs, self._stream)
        except QinferError:
            raise
        except Exception as error:  # as in `load`
            logger.warning("execution failed", extra={"model": self._spec.name, "reason": str(error)})
            raise InferenceFailed(f"PyTorch execute failure: {_reason(error)}") from error
        respond_rows(batch, ctx, outputs, self._datatypes)

    def unload(self) -> None:
        """Frees the model, and what its device holds for it."""
        del self._call
        if self._stream is not None:
            torch.cuda.empty_cache()

    def _bind(self, spec: ModelSpec, opened: Opened) -> None:
        self._call = opened.call
        self._takes_dict = opened.takes_dict
        self._arguments = opened.arguments
        names = [i.name for i in spec.inputs]
        self._positions = [] if opened.takes_dict else input_positions(spec.name, names, opened.arguments)
        contiguous = sorted(self._positions) == list(range(len(names)))
        if not (opened.takes_dict or contiguous or opened.arguments):
            raise ModelLoadFailed(f"model '{spec.name}': the inputs {', '.join(names)} leave a position out")
        by_position = dict(zip(self._positions, spec.inputs, strict=False))
        self._ordered = tuple(by_position[p].name for p in sorted(by_position)) if contiguous else ()
        self._narrow = {i.name: _DTYPES["BF16"] for i in spec.inputs if i.datatype == "BF16"}
        self._datatypes = {output.name: output.datatype for output in spec.outputs}
        positions = output_positions(spec.name, list(self._datatypes))
        self._outputs = [(o.name, p, _DTYPES[o.datatype]) for o, p in zip(spec.outputs, positions, strict=True)]

    def _compile(self, spec: ModelSpec, opened: Opened) -> None:
        mode = choice(spec, TORCH_COMPILE, _COMPILE_CHOICES, "")
        self._compiled = bool(mode)
        if not mode:
            return
        if opened.kind != "export":
            raise ModelLoadFailed(
                f"parameter '{TORCH_COMPILE}' of model '{spec.name}' needs a model.pt2 of torch.export.save; "
                f"this model is {opened.kind}"
            )
        self._call = torch.compile(opened.call, mode=mode)
        # Now, not at the first requests: one row, the size that is compiled apart, then any other number.
        for rows in (1, 2, spec.max_batch_size) if spec.max_batch_size > 1 else (spec.max_batch_size,):
            shapes = {i.name: ((rows,) if rows else ()) + tuple(max(d, 1) for d in i.dims) for i in spec.inputs}
            zeros = {
                i.name: torch.zeros(shapes[i.name], dtype=_DTYPES[i.datatype], device=self._device) for i in spec.inputs
            }
            try:
                self._called(zeros)
            except Exception as error:
                raise ModelLoadFailed(f"torch.compile of model '{spec.name}' failed: {_first_line(error)}") from error

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        narrow = self._narrow
        tensors = {name: _tensor(array) for name, array in inputs.items()}
        for name in narrow:
            if name in tensors:
                tensors[name] = tensors[name].to(narrow[name])
        return {name: _array(tensor) for name, tensor in self._results(self._called(tensors)).items()}

    def _run_on_stream(self, inputs: Mapping[str, Array], stream: "torch.cuda.Stream") -> dict[str, Array]:
        """Copies, runs and copies back on this instance's own stream; waits for that alone."""
        with torch.cuda.stream(stream):
            tensors = {}
            for name, array in inputs.items():
                tensor = _tensor(array)
                if array.nbytes >= _PINNED_MIN_BYTES:
                    tensor = tensor.pin_memory()
                tensors[name] = tensor.to(self._device, self._narrow.get(name), non_blocking=True)
            results = self._results(self._called(tensors))
            results = {name: tensor.detach().to("cpu", non_blocking=True) for name, tensor in results.items()}
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
                raise InvalidRequest(f"input '{missing}' is missing, which the model can't do without")
            keywords = {
                self._arguments[p]: tensors[i.name]
                for p, i in zip(self._positions, self._spec.inputs, strict=True)
                if i.name in tensors
            }
            return self._call(**keywords)

    def _results(self, returned: Any) -> dict[str, torch.Tensor]:
        """Names what the model returned: a tensor, a sequence of tensors, or a dictionary of them."""
        if isinstance(returned, torch.Tensor):
            returned = (returned,)
        results: dict[str, torch.Tensor] = {}
        for name, position, dtype in self._outputs:
            try:
                tensor = returned[name] if isinstance(returned, dict) else returned[position]
            except (KeyError, IndexError, TypeError):
                raise OutputMismatch(
                    f"the model returned {_described(returned)}, in which output '{name}' is not to be found"
                ) from None
            if not isinstance(tensor, torch.Tensor) or tensor.dtype is not dtype:
                found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise OutputMismatch(
                    f"output '{name}' of the model is {found}, its configuration {self._datatypes[name]}"
                )
            results[name] = tensor
        return results


class _Modes:
    """The switches that hold while a model runs; a context is made only for those that are not PyTorch's defaults."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        inference = flag(spec, "INFERENCE_MODE", default=True)
        amp = choice(spec, TORCH_AMP, _AMP_CHOICES, None)
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
        """Gives the device's cached memory back, where the configuration says so."""
        if self._clean:
            torch.cuda.empty_cache()


def set_threads(threads: int) -> None:
    """Sets how many threads the operators that this thread calls use; PyTorch keeps that for each calling thread."""
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
    """Sets what PyTorch keeps once for the whole process: as in Triton, the first or last model that says so wins."""
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


def _tensor(array: Array) -> torch.Tensor:
    """Shares an array's memory, unless that is a request's own bytes, which the model must not write into."""
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
    """Returns what a client may read: of an error of TorchScript, which shows the author's code, its last line."""
    text = str(error).strip()
    if "Traceback of TorchScript" in text:
        return text.splitlines()[-1].removeprefix("builtins.")
    return _first_line(error)


def _first_line(error: BaseException, path: Path | None = None) -> str:
    """PyTorch's messages end in pages of stack; the first line says what is the matter."""
    return (cleaned(error, path).splitlines() or [type(error).__name__])[0]
