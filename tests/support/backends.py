"""What tests of backends share: a specification, a batch, a context that keeps the answers, and small Torch models."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.backends.base import Array, Backend, Batch, OneResponse
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import QinferError
from qinfer.models.spec import Device, ModelSpec, TensorSpec
from qinfer.tensors import Tensor, to_numpy

CPU, GPU = Device(), Device("gpu", 0)


class Answers(OneResponse):
    """A context that keeps what it is told.

    Args:
        call: Answers calls to other models.
        cancelled: The items that nobody waits for.
    """

    def __init__(self, call: Callable[[InferRequest], Response] | None = None, cancelled: Sequence[int] = ()) -> None:
        self.by_item: dict[int, tuple[Tensor, ...] | QinferError] = {}
        self.parameters: dict[int, Mapping[str, Scalar]] = {}
        self.made_for: list[int] = []
        self._call = call
        self._cancelled = cancelled

    def respond(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        assert item not in self.by_item
        self.by_item[item] = outputs
        if parameters:
            self.parameters[item] = parameters

    def cancelled(self, item: int) -> bool:
        return item in self._cancelled

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        assert self._call is not None
        self.made_for.append(made_for)
        return self._call(request)

    def array(self, item: int = 0, output: int = 0) -> Array:
        return to_numpy(self.outputs(item)[output])

    def arrays(self, item: int = 0) -> dict[str, Array]:
        return {tensor.name: to_numpy(tensor) for tensor in self.outputs(item)}

    def outputs(self, item: int = 0) -> tuple[Tensor, ...]:
        outputs = self.by_item[item]
        assert isinstance(outputs, tuple), outputs
        return outputs

    def error(self, item: int = 0) -> QinferError:
        error = self.by_item[item]
        assert isinstance(error, QinferError)
        return error


def tensors(*ports: tuple[str, str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    """Makes tensor specifications of (name, datatype, dims)."""
    return tuple(TensorSpec(name=name, datatype=datatype, dims=dims) for name, datatype, dims in ports)


def spec(backend: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], **changes: Any) -> ModelSpec:
    """Makes a model specification with a batch dimension."""
    fields = {"max_batch_size": 8, **changes}
    return ModelSpec(name="m", backend=backend, inputs=tuple(inputs), outputs=tuple(outputs), **fields)


def run(
    backend: Backend, inputs: Mapping[str, Array], rows: Sequence[int] = (1,), outputs: Sequence[str] = ()
) -> Answers:
    """Executes one batch."""
    answers = Answers()
    requests = [InferRequest(model="m", inputs=(), outputs=tuple(outputs)) for _ in rows]
    backend.execute(Batch(requests=requests, rows=list(rows), inputs=inputs), answers)
    return answers


def read_only(array: Array) -> Array:
    """Returns the array over memory that may not be written, as a request's own bytes are."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def save_torchscript(module: Any, path: Path, example: tuple[Any, ...] | None = None) -> None:
    """Writes a module as TorchScript: traced with an example, or scripted without one."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        make = torch.jit.script if example is None else partial(torch.jit.trace, example_inputs=example)
        scripted = make(module)
        torch.jit.save(scripted, str(path))


def save_exported(module: Any, path: Path, example: tuple[Any, ...], variable: Sequence[int] = (0,)) -> None:
    """Writes a module with torch.export; the `variable` dimensions of every input are so, and the same in all."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    names = {axis: torch.export.Dim(f"d{axis}", max=512) for axis in variable}
    shapes = tuple(names for _ in example)
    torch.export.save(torch.export.export(module, example, dynamic_shapes=shapes), path)
