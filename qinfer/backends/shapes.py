"""Wrappers around any backend that change tensors' shapes: `reshape`, and ragged batches.

A ragged batch's inputs are joined, its batch inputs made, and its outputs cut by the shapes of inputs. Counts are of a
request's elements, shapes are listed per row, as in Triton's `backend_input_collector.cc` and
`backend_output_responder.cc`. Models of the backend `python` get each request's own tensors instead.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qinfer.backends.base import Array, Backend, Batch, Context, Shape, Wrapper, item_shapes
from qinfer.errors import OutputMismatch, QinferError
from qinfer.models.spec import (
    BatchInputKind,
    BatchInputSpec,
    BatchOutputSpec,
    Device,
    ModelSpec,
    Reshape,
    inward,
    outward,
)
from qinfer.tensors import Tensor, element_count

_OWN_TENSORS = "python"
"""The backend whose models see requests."""


def with_shapes(backend: Backend, spec: ModelSpec) -> Backend:
    """Wraps a backend whose model has ragged, batch or reshaped tensors."""
    has_any = spec.batch_inputs or spec.batch_outputs or any(i.ragged for i in spec.inputs)
    if has_any and spec.backend != _OWN_TENSORS:
        backend = _RaggedInput(backend)
    if any(tensor.reshape is not None for tensor in (*spec.inputs, *spec.outputs)):
        backend = _ReshapedTensor(backend)
    return backend


class _RaggedInput(Wrapper):
    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        self._ragged = [i.name for i in spec.inputs if i.ragged]
        self._batch_inputs = spec.batch_inputs
        self._batch_outputs = spec.batch_outputs
        self._sources = {made.source for made in spec.batch_inputs} | {made.source for made in spec.batch_outputs}
        self._sources |= set(self._ragged)
        self.inner.load(spec, version_dir, device)

    def execute(self, batch: Batch, ctx: Context) -> None:
        shapes = {name: item_shapes(batch, name) for name in self._sources if name in batch.inputs}
        inputs = dict(batch.inputs)
        for name in self._ragged:
            if name in inputs:
                inputs[name] = inputs[name].reshape(-1)
        for made in self._batch_inputs:
            inputs[made.name] = batch_input(made, shapes[made.source])
        cuts = {made.name: cuts_of(made, shapes[made.source]) for made in self._batch_outputs}
        self.inner.execute(msgspec.structs.replace(batch, inputs=inputs, shapes=shapes, cuts=cuts), ctx)


class _ReshapedTensor(Wrapper):
    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        self._inward, self._outward = inward(spec), outward(spec)
        self.inner.load(spec, version_dir, device)

    def execute(self, batch: Batch, ctx: Context) -> None:
        inputs = dict(batch.inputs)
        for name, reshape in self._inward.items():
            if name in inputs:
                inputs[name] = inputs[name].reshape(reshape.apply_to(inputs[name].shape))
        seen = msgspec.structs.replace(batch, inputs=inputs)
        self.inner.execute(seen, _Answers(ctx, self._outward, len(batch.states)))


class _Answers(Wrapper):
    """A context that gives outputs the clients' shapes; states, which are the last ones of a response, stay."""

    def __init__(self, ctx: Context, outward: Mapping[str, Reshape], states: int) -> None:
        super().__init__(ctx)
        self._outward = outward
        self._states = states

    def respond(self, item: int, outputs: tuple[Tensor, ...] | QinferError, **more: Any) -> None:
        self.inner.respond(item, self._reshaped(outputs), **more)

    def offer(self, item: int, outputs: tuple[Tensor, ...] | QinferError, **more: Any) -> None:
        self.inner.offer(item, self._reshaped(outputs), **more)

    def _reshaped(self, outputs: tuple[Tensor, ...] | QinferError) -> tuple[Tensor, ...] | QinferError:
        if isinstance(outputs, QinferError):
            return outputs
        count = len(outputs) - self._states
        return (*map(self._reshaped_output, outputs[:count]), *outputs[count:])

    def _reshaped_output(self, tensor: Tensor) -> Tensor:
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


def batch_input(made: BatchInputSpec, shapes: Sequence[Shape]) -> Array:
    """Makes a batch input from the shapes of each request's source input.

    Counts are `[requests]`, or one more with a zero; the largest count is the length of zeros; shapes of rows are
    `[rows, rank]`, or flattened.
    """
    dtype = np.dtype("<f4" if made.datatype == "FP32" else "<i4")
    counts = [prod(shape) for shape in shapes]
    match made.kind:
        case BatchInputKind.ELEMENT_COUNT:
            return np.array(counts, dtype)
        case BatchInputKind.ACCUMULATED:
            return np.array(list(accumulate(counts)), dtype)
        case BatchInputKind.ACCUMULATED_WITH_ZERO:
            return np.array(list(accumulate(counts, initial=0)), dtype)
        case BatchInputKind.MAX_AS_SHAPE:
            return np.zeros(max(counts), dtype)
    rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
    array = np.array(rows, dtype).reshape(len(rows), made.rank)
    return array if made.kind is BatchInputKind.ITEM_SHAPE else array.reshape(-1)


def cuts_of(made: BatchOutputSpec, shapes: Sequence[Shape]) -> list[Shape]:
    """Returns each request's shape of a batch output."""
    return [tuple(shape[place] if size == -1 else size for place, size in enumerate(made.dims)) for shape in shapes]
