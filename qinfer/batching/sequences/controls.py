"""A batch's control inputs and padding (reference §3.4)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qinfer.backends.base import Array
from qinfer.batching.policy import Item
from qinfer.batching.sequences.steps import SequenceStep
from qinfer.models.sequence_spec import ControlKind, ControlSpec
from qinfer.tensors import datatype

Rows = Sequence[SequenceStep[Any] | None]


def control_inputs(rows: Rows, controls: Sequence[ControlSpec], *, batched: bool) -> dict[str, Array]:
    """Makes the control inputs: `datatype[rows, 1]`, or `datatype[1]` without a batch dimension.

    In padding (`None`), all control inputs are false, 0 or empty. A correlation ID too large for the datatype of CORRID
    loses its high bits, as in Triton; in a text input it is decimal.
    """
    shape = (len(rows), 1) if batched else (1,)
    return {control.name: _values(rows, control).reshape(shape) for control in controls}


def padded(inputs: Mapping[str, Array], rows: Rows) -> Mapping[str, Array]:
    """Spreads inputs over the rows of a batch; rows of padding get zeros, or empty BYTES."""
    taken = [position for position, step in enumerate(rows) if step is not None]
    if len(taken) == len(rows):
        return inputs
    return {name: _spread(array, taken, len(rows)) for name, array in inputs.items()}


def _spread(array: Array, taken: list[int], rows: int) -> Array:
    filling: Any = b"" if array.dtype == object else 0
    spread = np.full((rows, *array.shape[1:]), filling, dtype=array.dtype)
    spread[taken] = array
    return spread


def _values(rows: Rows, control: ControlSpec) -> Array:
    if control.kind is ControlKind.CORRID:
        return _correlation_ids(rows, control.datatype)
    holds = [_holds(control.kind, step) for step in rows]
    return np.where(holds, control.true, control.false).astype(datatype(control.datatype).numpy)


def _holds(kind: ControlKind, step: SequenceStep[Item] | None) -> bool:
    if step is None:
        return False
    return {ControlKind.START: step.start, ControlKind.END: step.end, ControlKind.READY: True}[kind]


def _correlation_ids(rows: Rows, name: str) -> Array:
    ids = [None if step is None else _sequence_id(step) for step in rows]
    kind = datatype(name)
    if kind.numpy is None:
        texts = np.empty(len(ids), dtype=object)
        texts[:] = [b"" if of_step is None else str(of_step).encode() for of_step in ids]
        return texts
    low_bits = 2 ** (8 * kind.itemsize) - 1
    numbers = [of_step & low_bits if isinstance(of_step, int) else 0 for of_step in ids]
    return np.array(numbers, dtype=f"<u{kind.itemsize}").view(kind.numpy)


def _sequence_id(step: SequenceStep[Any]) -> int | str | None:
    if step.told_id is not None or step.sequence is None:
        return step.told_id
    return step.sequence.correlation_id
