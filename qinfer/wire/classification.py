"""The classification extension: the best classes of an output instead of its numbers (reference §1.9).

Each element of the answer is `value:index` or `value:index:label`, the value printed as C++'s `std::to_string` does:
integers plain, floats with six decimals.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.tensors import DATATYPES, Tensor, pack_bytes, to_numpy

MAX_ELEMENTS = 2**20
"""Elements of a row that can be ranked (reference §1.9)."""

_FLOATS = ("FP32", "FP64")
_CLASSIFIABLE = frozenset(d.name for d in DATATYPES.values() if d.name[:3] in ("INT", "UIN")) | frozenset(_FLOATS)


def classify(tensor: Tensor, count: int, labels: Sequence[str] = (), *, batched: bool) -> Tensor:
    """Replaces an output by its best classes.

    Equal values keep the order of their indices; NaN comes last.

    Args:
        tensor: The output.
        count: How many classes of each row are wanted; fewer are there if a row has fewer elements.
        labels: The names of the classes, by index; classes beyond its end have none.
        batched: The first dimension counts rows, each of which is ranked by itself.

    Returns:
        A BYTES tensor `[rows, classes]`, or `[classes]` when it is not batched.

    Raises:
        InvalidRequest: The output's datatype can't be ranked, or it has too many elements.
        OutputMismatch: The output's bytes do not fill its shape.
    """
    if tensor.datatype not in _CLASSIFIABLE:
        raise InvalidRequest(f"class result not available for output due to unsupported type '{tensor.datatype}'")
    is_batched = batched and len(tensor.shape) > 0
    rows = tensor.shape[0] if is_batched else 1
    elements = prod(tensor.shape[1:] if is_batched else tensor.shape)
    if elements > MAX_ELEMENTS:
        raise InvalidRequest(
            f"classification of output '{tensor.name}' ranks at most {MAX_ELEMENTS} elements, got {elements}; "
            "ask for its values instead"
        )
    if tensor.nbytes != rows * elements * DATATYPES[tensor.datatype].itemsize:
        raise OutputMismatch(f"output tensor shape does not match size of output for '{tensor.name}'")
    kept = min(count, elements)
    texts: list[bytes] = []
    if kept:
        plain = tensor.datatype not in _FLOATS
        for row in to_numpy(tensor).reshape(rows, elements):
            best = _best(row, kept)
            texts += [
                _text(value, index, labels, plain=plain)
                for value, index in zip(row[best].tolist(), best.tolist(), strict=True)
            ]
    shape = (rows, kept) if is_batched else (kept,)
    return Tensor(tensor.name, "BYTES", shape, pack_bytes(texts))


def _best(row: npt.NDArray[np.generic], count: int) -> npt.NDArray[np.intp]:
    """Returns the indices of the `count` greatest elements, greatest first, equal ones by ascending index.

    Sorted as they are, ascending, and read from behind: negating would overflow unsigned integers.
    """
    backwards = row[::-1]
    if backwards.dtype.kind == "f" and np.isnan(backwards).any():
        backwards = np.where(np.isnan(backwards), -np.inf, backwards)
        order = np.lexsort((~np.isnan(row[::-1]), backwards))  # among the least, NaN is less than -Infinity
        return (len(row) - 1 - order[::-1])[:count]
    if count * 8 < len(row):
        threshold = np.partition(backwards, len(row) - count)[len(row) - count]
        candidates = np.flatnonzero(backwards >= threshold)
        order = candidates[np.argsort(backwards[candidates], kind="stable")]
    else:
        order = np.argsort(backwards, kind="stable")
    return (len(row) - 1 - order[::-1])[:count]


def _text(value: float, index: int, labels: Sequence[str], *, plain: bool) -> bytes:
    text = f"{value}:{index}" if plain else f"{value:.6f}:{index}"
    return (f"{text}:{labels[index]}" if index < len(labels) and labels[index] else text).encode()
