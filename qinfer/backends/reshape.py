"""`reshape` of a configuration: what the client sees as `dims`, the model sees as another shape (reference §3.2).

A wrapper around any backend, so that none has to know of it. Elements stay in place: only shapes change. Variable
dimensions of the one shape become those of the other in their order: `[-1, 4, -1]` and `[-1, 2, 2, -1]`.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from qinfer.backends.base import Backend, Batch, Context, memory_of
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import OutputMismatch, QinferError
from qinfer.models.spec import Device, ModelSpec
from qinfer.observe.host import MemoryUse
from qinfer.tensors import Tensor, element_count

Dims = tuple[int, ...]
Shapes = dict[str, tuple[Dims, Dims]]
"""Tensor → its dimensions before and after, without the batch dimension; -1 is variable."""


def reshaped(backend: Backend, spec: ModelSpec) -> Backend:
    """Returns a backend that reshapes as the configuration says: the same one, if it does not say so."""
    if any(tensor.reshape is not None for tensor in (*spec.inputs, *spec.outputs)):
        return _Reshaped(backend)
    return backend


class _Reshaped:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.short_on_loop = backend.short_on_loop

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Loads the model."""
        self._lead = 1 if spec.max_batch_size else 0
        self._model_shapes: Shapes = {i.name: (i.dims, i.reshape) for i in spec.inputs if i.reshape is not None}
        self._client_shapes: Shapes = {o.name: (o.reshape, o.dims) for o in spec.outputs if o.reshape is not None}
        self._backend.load(spec, version_dir, device)
        self.short_on_loop = self._backend.short_on_loop  # some know it only by then

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Runs the batch with the model's shapes, and answers with the client's."""
        inputs = dict(batch.inputs)
        for name, dims in self._model_shapes.items():
            if name in inputs:
                inputs[name] = inputs[name].reshape(_shape(inputs[name].shape, *dims, self._lead))
        seen = msgspec.structs.replace(batch, inputs=inputs)
        self._backend.execute(seen, _Answers(ctx, self._client_shapes, self._lead, len(batch.states)))

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns what the model holds."""
        return memory_of(self._backend)

    def unload(self) -> None:
        """Unloads the model."""
        self._backend.unload()


class _Answers:
    """A context that gives outputs the shapes that clients expect, and leaves states as they are."""

    def __init__(self, ctx: Context, shapes: Shapes, lead: int, states: int) -> None:
        self._ctx = ctx
        self._shapes = shapes
        self._lead = lead
        self._states = states

    def respond(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Passes an answer on."""
        if not isinstance(outputs, QinferError):
            count = len(outputs) - self._states
            outputs = (*map(self._reshaped, outputs[:count]), *outputs[count:])
        self._ctx.respond(item, outputs, final=final, parameters=parameters)

    @property
    def is_decoupled(self) -> bool:
        """Whether an item may have several responses."""
        return self._ctx.is_decoupled

    @property
    def window_bytes(self) -> int:
        """Bytes of one item on their way; other shapes have as many."""
        return self._ctx.window_bytes

    def offer(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Passes an answer on, without waiting."""
        if not isinstance(outputs, QinferError):
            outputs = tuple(map(self._reshaped, outputs))
        self._ctx.offer(item, outputs, final=final, parameters=parameters)

    def reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        """Asks the batch's own context; states are not reshaped."""
        self._ctx.reschedule(item, states)

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        """Has the batch's own context call back."""
        self._ctx.on_taken(item, callback)

    def cancelled(self, item: int) -> bool:
        """Asks the batch's own context."""
        return self._ctx.cancelled(item)

    def call(self, request: InferRequest) -> Response:
        """Calls through the batch's own context."""
        return self._ctx.call(request)

    def stream(self, request: InferRequest) -> Iterator[Response]:
        """Calls through the batch's own context."""
        return self._ctx.stream(request)

    def _reshaped(self, tensor: Tensor) -> Tensor:
        dims = self._shapes.get(tensor.name)
        if dims is None:
            return tensor
        shape = _shape(tensor.shape, *dims, self._lead)
        if element_count(shape) != element_count(tensor.shape):
            raise OutputMismatch(
                f"the model returned output '{tensor.name}' as {tensor.datatype}{list(tensor.shape)}; "
                f"its configuration reshapes it to {list(shape)}"
            )
        return Tensor(tensor.name, tensor.datatype, shape, tensor.data)


def _shape(shape: Dims, before: Dims, after: Dims, lead: int) -> Dims:
    """Returns a shape with the dimensions `after` in the place of `before`, behind `lead` others.

    A variable dimension that the shape lacks has no elements, so that the shapes differ in size.
    """
    sizes = iter([size for size, dim in zip(shape[lead:], before, strict=False) if dim == -1])
    return shape[:lead] + tuple([next(sizes, 0) if dim == -1 else dim for dim in after])
