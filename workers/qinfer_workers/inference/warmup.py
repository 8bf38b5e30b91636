"""Warm-up: the samples of `model_warmup`, and one batch of a single row that every model gets, before it is READY.

Samples of the configuration must succeed, as in Triton; the automatic run may fail, because zeros in made-up shapes are
not every model's idea of an input. Its second repetition also tells the latency model about t(1).

A run ends where it calls another model, which may not be loaded yet; that fails neither.
"""

import logging
import time
from collections.abc import Mapping

import numpy as np

from qinfer.backends.base import Array, Backend, Batch
from qinfer.batching.latency import LatencyModel
from qinfer.errors import ModelLoadFailed, ModelNotReady, QinferError
from qinfer.messages import InferRequest, Response, Scalar
from qinfer.repository.spec import ModelSpec
from qinfer.tensors import DATATYPES, Tensor

logger = logging.getLogger(__name__)

_Inputs = Mapping[str, tuple[str, tuple[int, ...], bool]]


class _Unheard:
    """A context whose answers nobody waits for.

    Attributes:
        called: Whether a call was asked for, and refused: what the backend does from there on tells nothing.
    """

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
        """Raises the item's own failure, if it is one."""
        del item, final, parameters
        if isinstance(outputs, QinferError):
            raise outputs

    def cancelled(self, item: int) -> bool:
        """Tells that somebody waits."""
        del item
        return False

    def call(self, request: InferRequest) -> Response:
        """Refuses: a model that is being loaded can't wait for another that may be loaded after it."""
        self.called = True
        raise ModelNotReady(f"model '{request.model}' can't be called during warm-up")


def warm_up(backend: Backend, spec: ModelSpec, latency: LatencyModel, now_s: float) -> None:
    """Runs a loaded instance until its lazy initialisation is behind it.

    Args:
        backend: The instance.
        spec: The model's configuration.
        latency: Learns from the last run.
        now_s: The present, in the broker's time.

    Raises:
        ModelLoadFailed: A sample of the configuration failed.
    """
    for sample in spec.warmup:
        batch = _batch(spec, sample.inputs, sample.batch_size)
        ctx = _Unheard()
        try:
            for _ in range(sample.count):
                backend.execute(batch, ctx)
        except Exception as error:  # the boundary to the model's code
            if ctx.called:
                continue
            raise ModelLoadFailed(f"warm-up sample '{sample.name}' of model '{spec.name}' failed: {error}") from error
    zeros = {i.name: (i.datatype, tuple(max(d, 1) for d in i.dims), False) for i in spec.inputs if not i.optional}
    batch = _batch(spec, zeros, min(spec.max_batch_size, 1))
    ctx = _Unheard()
    try:
        backend.execute(batch, ctx)
        begin_s = time.perf_counter()
        backend.execute(batch, ctx)
    except Exception as error:  # noqa: BLE001  the boundary to the model's code
        if not ctx.called:
            logger.warning("automatic warm-up failed", extra={"model": spec.name, "reason": str(error)})
        return
    if not ctx.called:
        latency.observe(1, time.perf_counter() - begin_s, now_s)


def _batch(spec: ModelSpec, inputs: _Inputs, rows: int) -> Batch:
    """Makes a batch of one request; `rows` is 0 for a model without a batch dimension."""
    arrays = {
        name: _array(datatype, (rows, *dims) if rows else dims, random=random)
        for name, (datatype, dims, random) in inputs.items()
    }
    return Batch(requests=[InferRequest(model=spec.name, inputs=())], rows=[max(rows, 1)], inputs=arrays)


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
