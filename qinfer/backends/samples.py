"""The inputs of warm-up samples as arrays, by the configuration and the files of a model's directory `warmup`."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np

from qinfer.backends.base import Array
from qinfer.errors import ModelLoadFailed, QinferError
from qinfer.models.spec import ModelSpec, TensorSpec, WarmupInput
from qinfer.tensors import DATATYPES, Tensor, to_numpy

WARMUP_DIRECTORY = "warmup"
_ROWS = 4


def sample_inputs(
    spec: ModelSpec, inputs: Mapping[str, WarmupInput], count: int, model_dir: Path = Path()
) -> dict[str, Array]:
    """Returns the inputs of a sample of `count` rows."""
    rows = (count,) if spec.max_batch_size else ()
    return {
        name: _read_rows(name, data, rows, model_dir)
        if data.file
        else _filled(data.datatype, (*rows, *data.dims), random=data.random)
        for name, data in inputs.items()
    }


def whole_samples(spec: ModelSpec, model_dir: Path) -> Iterator[dict[str, Array]]:
    """Yields each sample of the configuration, or a random one, with all inputs of the model's file."""
    for sample in spec.warmup:
        missing = {i.name: _shaped(i, random=False) for i in spec.file_inputs if i.name not in sample.inputs}
        yield sample_inputs(spec, {**sample.inputs, **missing}, sample.batch_size, model_dir)
    if not spec.warmup:
        rows = min(spec.max_batch_size, _ROWS)
        yield sample_inputs(spec, {i.name: _shaped(i, random=True) for i in spec.file_inputs}, rows)


def _shaped(tensor: TensorSpec, *, random: bool) -> WarmupInput:
    return WarmupInput(tensor.datatype, tuple(max(dim, 1) for dim in tensor.seen_dims), random)


def _read_rows(name: str, data: WarmupInput, rows: tuple[int, ...], model_dir: Path) -> Array:
    size = prod(data.dims) * DATATYPES[data.datatype].itemsize
    try:
        content = (model_dir / WARMUP_DIRECTORY / data.file).read_bytes()
        row = to_numpy(Tensor(name, data.datatype, data.dims, content[:size] if size else content))
    except (OSError, QinferError) as error:
        reason = error.message if isinstance(error, QinferError) else error.strerror
        raise ModelLoadFailed(f"warm-up file '{data.file}' can't be used for input '{name}': {reason}") from None
    return np.broadcast_to(row, (*rows, *row.shape)).copy()


def _filled(datatype: str, shape: tuple[int, ...], *, random: bool) -> Array:
    if datatype == "BYTES":
        array = np.empty(shape, dtype=object)
        array.fill(b"")
        return array
    dtype = np.dtype(DATATYPES[datatype].numpy or "<f4")
    if not random:
        return np.zeros(shape, dtype)
    generator = np.random.default_rng(0)
    return generator.random(shape).astype(dtype) if dtype.kind == "f" else generator.integers(0, 2, shape).astype(dtype)
