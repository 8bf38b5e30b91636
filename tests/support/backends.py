"""A specification and small models of Torch and ONNX for tests of backends."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.backends.base import Array
from qinfer.models.spec import BatchOutputSpec, Device, ModelSpec, TensorSpec
from qinfer.testing.backend_contract import Answers, run
from tests.support.models import ELEMENT_TYPES

__all__ = [
    "CPU", "GPU", "Answers", "ragged", "read_only", "run", "save_exported", "save_scaled", "save_torchscript", "spec",
    "tensors", "xy",
]  # fmt: skip
CPU, GPU = Device(), Device("gpu", 0)


def tensors(*ports: tuple[str, str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    """Makes tensor specifications of (name, datatype, dims)."""
    return tuple(TensorSpec(name=name, datatype=datatype, dims=dims) for name, datatype, dims in ports)


def spec(backend: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], **changes: Any) -> ModelSpec:
    """Makes a model specification with a batch dimension."""
    fields = {"max_batch_size": 8, **changes}
    return ModelSpec(name="m", backend=backend, inputs=tuple(inputs), outputs=tuple(outputs), **fields)


def xy(backend: str, datatype: str, width: int = 2) -> ModelSpec:
    """Returns the specification of `y = f(x)`, both `datatype[batch, width]`."""
    return spec(backend, tensors(("x", datatype, (width,))), tensors(("y", datatype, (width,))))


def ragged(backend: str, **changes: Any) -> ModelSpec:
    """Returns the specification of `y = f(x)` for requests of different lengths in a batch."""
    x, y = (TensorSpec(name=name, datatype="FP32", dims=(-1,), ragged=True) for name in "xy")
    return spec(backend, [x], [y], **{"batch_outputs": (BatchOutputSpec("y", (-1, -1), "x"),), **changes})


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


def save_scaled(directory: Path, datatype: str, factor: int = 1, shape: Sequence[int | str] = ("n", 2)) -> None:
    """Writes `y = factor * x` as ONNX."""
    import onnx
    from onnx import helper

    kind = ELEMENT_TYPES[datatype]
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    if factor != 1:
        value = helper.make_tensor("factor", kind, [], [factor])
        nodes = [helper.make_node("Constant", [], ["f"], value=value), helper.make_node("Mul", ["x", "f"], ["y"])]
    ports = [helper.make_tensor_value_info(name, kind, shape) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, directory / "model.onnx")
