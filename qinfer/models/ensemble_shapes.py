"""The shape of a tensor between models of an ensemble, with batch dimensions and `reshape`s. Pure."""

from collections.abc import Iterable, Sequence

from qinfer.models.ensemble_checks import is_like
from qinfer.models.reshapes import Reshape


def fit(shape: tuple[int, ...], rows: int, dims: Sequence[int], *, batched: bool) -> tuple[int, ...]:
    """Returns a tensor's shape for the next model; `rows` 0 = no batch dimension.

    As in Triton's `EnsembleContext::ReshapeTensorDims`, a model without a batch dimension takes a batch as one tensor,
    or a batch of one row without its first dimension, if only that fits.
    """
    if batched and not rows and is_like(dims, shape):
        return (1, *shape)
    if not batched and rows == 1 and not is_like(dims, shape):
        return shape[1:]
    return shape


def refit(shape: tuple[int, ...], rows: int, reshapes: Iterable[Reshape]) -> tuple[tuple[int, ...], int]:
    """Returns shape and rows after reshapes; a misfit changes the number of elements."""
    for reshape in reshapes:
        shape = reshape.apply_to(fit(shape, rows, reshape.before, batched=reshape.batched))
        rows = shape[0] if reshape.batched and shape else 0
    return shape, rows
