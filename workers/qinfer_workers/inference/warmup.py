"""Warms up loaded model instances.

The samples of `model_warmup` must succeed before READY, as in Triton. Models of built-in runtimes also run a row of
zeros twice, which may fail; the second run teaches the latency model t(1). Python models and custom backends get no
made-up data: they may count or send it. A call of another model ends a run without a failure.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.backends.base import Array, Backend, Batch, OneResponse
from qinfer.batching.policy import LatencyModel
from qinfer.batching.sequences.execution import control_inputs
from qinfer.batching.sequences.steps import SequenceStep
from qinfer.core import messages
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import ModelLoadFailed, ModelNotReady, QinferError
from qinfer.models.spec import ModelSpec, WarmupInput
from qinfer.tensors import DATATYPES, Tensor, to_numpy

logger = logging.getLogger(__name__)

WARMUP_DIRECTORY = "warmup"

_AUTOMATIC = frozenset(("onnxruntime", "openvino", "pytorch", "tensorrt", "stub"))

_Inputs = Mapping[str, WarmupInput]


class _Unheard(OneResponse):
    """Discards answers; `called` says that a call was refused, after which an execution proves nothing."""

    def __init__(self) -> None:
        self.called = False

    def respond(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        del item, final, parameters
        if isinstance(outputs, QinferError):
            raise outputs

    def reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        del item, states

    def cancelled(self, item: int) -> bool:
        del item
        return False

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        del made_for
        self.called = True
        raise ModelNotReady(f"model '{request.model}' can't be called during warm-up")


def warm_up(backend: Backend, spec: ModelSpec, model_dir: Path = Path(), states: Sequence[Tensor] = ()) -> None:
    """Runs an instance with its configuration's samples."""
    for sample in spec.warmup:
        batch = _batch(spec, sample.inputs, sample.batch_size, states, model_dir)
        ctx = _Unheard()
        try:
            for _ in range(sample.count):
                backend.execute(batch, ctx)
        except Exception as error:
            if ctx.called:
                continue
            raise ModelLoadFailed(f"failed to run warmup sample '{sample.name}': {error}") from error


def warm_up_with_zeros(
    backend: Backend, spec: ModelSpec, latency: LatencyModel, now_s: float, states: Sequence[Tensor] = ()
) -> None:
    """Runs an instance with zeros, unless its model is code or may answer endlessly; teaches `latency`."""
    if spec.decoupled or spec.backend not in _AUTOMATIC:
        return
    zeros = {i.name: WarmupInput(i.datatype, tuple(max(d, 1) for d in i.dims)) for i in spec.inputs if not i.optional}
    batch = _batch(spec, zeros, 1, states)
    ctx = _Unheard()
    try:
        backend.execute(batch, ctx)
        begin_s = time.perf_counter()
        backend.execute(batch, ctx)
    except Exception as error:  # noqa: BLE001  the boundary to the model's code
        if not ctx.called:
            logger.info("automatic warm-up failed", extra={"model": spec.name, "reason": str(error)})
        return
    if not ctx.called:
        latency.observe(1, time.perf_counter() - begin_s, now_s)


def _batch(spec: ModelSpec, inputs: _Inputs, count: int, states: Sequence[Tensor], model_dir: Path = Path()) -> Batch:
    rows = (count,) if spec.max_batch_size else ()
    given = {
        name: _read_rows(name, data, rows, model_dir)
        if data.file
        else _array(data.datatype, (*rows, *data.dims), random=data.random)
        for name, data in inputs.items()
    }
    if spec.sequences is None:
        return Batch(requests=[InferRequest(model=spec.name, inputs=())] * count, rows=[1] * count, inputs=given)
    steps = [SequenceStep[Any](item=None, start=True, end=True)] * count
    kept = {state.name: np.repeat(to_numpy(state), count, axis=0) if rows else to_numpy(state) for state in states}
    controls = control_inputs(steps, spec.sequences.controls, batched=bool(rows))
    flags = messages.SequenceFlags(id=0, start=True, end=True)
    return Batch(
        requests=[InferRequest(model=spec.name, inputs=(), sequence=flags)] * count,
        rows=[1] * count,
        inputs={**kept, **controls, **given},
        states=tuple(state.output for state in spec.sequences.states),
    )


def _read_rows(name: str, data: WarmupInput, rows: tuple[int, ...], model_dir: Path) -> Array:
    size = prod(data.dims) * DATATYPES[data.datatype].itemsize
    try:
        content = (model_dir / WARMUP_DIRECTORY / data.file).read_bytes()
        row = to_numpy(Tensor(name, data.datatype, data.dims, content[:size] if size else content))
    except (OSError, QinferError) as error:
        reason = error.message if isinstance(error, QinferError) else error.strerror
        raise ModelLoadFailed(f"warm-up file '{data.file}' can't be used for input '{name}': {reason}") from None
    return np.broadcast_to(row, (*rows, *row.shape)).copy()


def _array(datatype: str, shape: tuple[int, ...], *, random: bool) -> Array:
    if datatype == "BYTES":
        array = np.empty(shape, dtype=object)
        array.fill(b"")
        return array
    dtype = np.dtype(DATATYPES[datatype].numpy or "<f4")
    if not random:
        return np.zeros(shape, dtype)
    generator = np.random.default_rng(0)
    return generator.random(shape).astype(dtype) if dtype.kind == "f" else generator.integers(0, 2, shape).astype(dtype)
