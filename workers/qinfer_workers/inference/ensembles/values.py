"""Tensors between the steps of an ensemble: names and shapes change, bytes are never copied."""

from collections.abc import Mapping

import msgspec

from qinfer.core.messages import Scalar
from qinfer.errors import InvalidRequest
from qinfer.models.ensemble_checks import fit, refit
from qinfer.models.spec import Reshape
from qinfer.tensors import Tensor, element_count


class Value(msgspec.Struct, frozen=True):
    """A tensor, with its response's parameters; `rows` = 0: no batch dimension."""

    tensor: Tensor
    rows: int
    parameters: Mapping[str, Scalar] = {}


def renamed(value: Value, name: str, dims: tuple[int, ...], *, batched: bool) -> Tensor:
    """Returns a tensor as a model's input, or as the ensemble's output."""
    tensor = value.tensor
    return Tensor(name, tensor.datatype, fit(tensor.shape, value.rows, dims, batched=batched), tensor.data)


def reshaped(values: list[tuple[str, Value]], reshapes: Mapping[str, tuple[Reshape, ...]]) -> list[tuple[str, Value]]:
    """Returns tensors in the shapes that ensembles on their way give them."""
    found = []
    for name, value in values:
        tensor = value.tensor
        shape, rows = refit(tensor.shape, value.rows, reshapes.get(name, ()))
        if element_count(shape) != element_count(tensor.shape):
            raise InvalidRequest(
                f"'{name}' gets {tensor.datatype}{list(tensor.shape)}, but an ensemble's configuration reshapes it to "
                f"{list(shape)}"
            )
        reshaped_tensor = Tensor(tensor.name, tensor.datatype, shape, tensor.data)
        found.append((name, Value(reshaped_tensor, rows, value.parameters)))
    return found
