"""A wrapper around any backend that applies `reshape` (`Reshape` of `qinfer/models/spec.py`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from qinfer.backends.base import Backend, Batch, Context, memory_of, metrics_of
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import OutputMismatch, QinferError
from qinfer.models.spec import Device, ModelSpec, Reshape, inward, outward
from qinfer.observe.host import MemoryUse
from qinfer.observe.model_metrics import ModelSeries
from qinfer.tensors import Tensor, element_count


def reshaped(backend: Backend, spec: ModelSpec) -> Backend:
    """Wraps a backend whose model reshapes tensors."""
    if any(tensor.reshape is not None for tensor in (*spec.inputs, *spec.outputs)):
        return _ReshapedTensor(backend)
    return backend


class _ReshapedTensor:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.short_on_loop = backend.short_on_loop
        self.interrupt = getattr(backend, "interrupt", None)
        self.unready = getattr(backend, "unready", None)

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        self._inward, self._outward = inward(spec), outward(spec)
        self._backend.load(spec, version_dir, device)
        self.short_on_loop = self._backend.short_on_loop  # perhaps known only after the load

    def execute(self, batch: Batch, ctx: Context) -> None:
        inputs = dict(batch.inputs)
        for name, reshape in self._inward.items():
            if name in inputs:
                inputs[name] = inputs[name].reshape(reshape.apply_to(inputs[name].shape))
        seen = msgspec.structs.replace(batch, inputs=inputs)
        self._backend.execute(seen, _Answers(ctx, self._outward, len(batch.states)))

    def memory(self) -> tuple[MemoryUse, ...]:
        return memory_of(self._backend)

    def metrics(self) -> Sequence[ModelSeries]:
        return metrics_of(self._backend)

    def unload(self) -> None:
        self._backend.unload()


class _Answers:
    """Gives outputs the clients' shapes; states stay."""

    def __init__(self, ctx: Context, outward: Mapping[str, Reshape], states: int) -> None:
        self._ctx = ctx
        self._outward = outward
        self._states = states

    def respond(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        if not isinstance(outputs, QinferError):
            count = len(outputs) - self._states
            outputs = (*map(self._reshaped, outputs[:count]), *outputs[count:])
        self._ctx.respond(item, outputs, final=final, parameters=parameters)

    @property
    def is_decoupled(self) -> bool:
        return self._ctx.is_decoupled

    @property
    def window_bytes(self) -> int:
        return self._ctx.window_bytes

    def offer(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        if not isinstance(outputs, QinferError):
            outputs = tuple(map(self._reshaped, outputs))
        self._ctx.offer(item, outputs, final=final, parameters=parameters)

    def reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        self._ctx.reschedule(item, states)

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        self._ctx.on_taken(item, callback)

    def cancelled(self, item: int) -> bool:
        return self._ctx.cancelled(item)

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        return self._ctx.call(request, made_for)

    def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
        return self._ctx.stream(request, made_for)

    def _reshaped(self, tensor: Tensor) -> Tensor:
        reshape = self._outward.get(tensor.name)
        if reshape is None:
            return tensor
        shape = reshape.apply_to(tensor.shape)
        if element_count(shape) != element_count(tensor.shape):
            raise OutputMismatch(
                f"the model returned output '{tensor.name}' as {tensor.datatype}{list(tensor.shape)}; "
                f"its configuration reshapes it to {list(shape)}"
            )
        return Tensor(tensor.name, tensor.datatype, shape, tensor.data)
