"""Ragged batches: a wrapper around any backend makes batch inputs, and cuts outputs by the shapes of inputs.

Counts are of a request's elements, shapes are listed per row, as in Triton's `backend_input_collector.cc` and
`backend_output_responder.cc`. Models of the backend `python` get each request's own tensors instead.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from qinfer.backends.base import Array, Backend, Batch, Context, Shape, item_shapes, memory_of, metrics_of
from qinfer.models.spec import BatchInputKind, BatchInputSpec, BatchOutputSpec, Device, ModelSpec
from qinfer.observe.host import MemoryUse
from qinfer.observe.model_metrics import ModelSeries

_OWN_TENSORS = "python"
"""The backend whose models see requests."""


def with_ragged_batches(backend: Backend, spec: ModelSpec) -> Backend:
    """Wraps a backend whose model has ragged or batch tensors."""
    has_any = spec.batch_inputs or spec.batch_outputs or any(i.ragged for i in spec.inputs)
    return _RaggedInput(backend) if has_any and spec.backend != _OWN_TENSORS else backend


class _RaggedInput:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.short_on_loop = backend.short_on_loop
        self.interrupt = getattr(backend, "interrupt", None)
        self.unready = getattr(backend, "unready", None)

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        self._ragged = [i.name for i in spec.inputs if i.ragged]
        self._batch_inputs = spec.batch_inputs
        self._batch_outputs = spec.batch_outputs
        of_inputs, of_outputs = (
            {made.source for made in spec.batch_inputs},
            {made.source for made in spec.batch_outputs},
        )
        self._sources = of_inputs | of_outputs | set(self._ragged)
        self._backend.load(spec, version_dir, device)
        self.short_on_loop = self._backend.short_on_loop  # perhaps known only after the load

    def execute(self, batch: Batch, ctx: Context) -> None:
        shapes = {name: item_shapes(batch, name) for name in self._sources if name in batch.inputs}
        inputs = dict(batch.inputs)
        for name in self._ragged:
            if name in inputs:
                inputs[name] = inputs[name].reshape(-1)
        for made in self._batch_inputs:
            inputs[made.name] = batch_input(made, shapes[made.source])
        cuts = {made.name: cuts_of(made, shapes[made.source]) for made in self._batch_outputs}
        self._backend.execute(msgspec.structs.replace(batch, inputs=inputs, shapes=shapes, cuts=cuts), ctx)

    def memory(self) -> tuple[MemoryUse, ...]:
        return memory_of(self._backend)

    def metrics(self) -> Sequence[ModelSeries]:
        return metrics_of(self._backend)

    def unload(self) -> None:
        self._backend.unload()


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
