"""The interface of an adapter, what adapters share, and the adapter's model in the host process."""

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from qinfer.backends.python_host.messages import (
    DeclaredTensor,
    ExecutedRows,
    FrameworkLoaded,
    LoadFramework,
    TensorMeta,
)
from qinfer.backends.python_host.tensor import Array
from qinfer.errors import InferenceFailed, ModelLoadFailed
from qinfer.tensors import NUMPY_DATATYPES, Bytes, from_numpy

_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Framework(Protocol):
    """A loaded file, in the host process; a module of this package makes it by `load(asked)`.

    Attributes:
        inputs: The inputs that the file declares.
        outputs: Likewise.
    """

    inputs: Sequence[DeclaredTensor]
    outputs: Sequence[DeclaredTensor]

    def execute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Runs the model.

        Args:
            inputs: Name → array as in `Batch.inputs`; read-only after the call.
            wanted: The outputs that requests want; others may be left out.

        Returns:
            Name → array. BYTES are object arrays of `bytes`, BF16 are float32 or `ml_dtypes.bfloat16`.

        Raises:
            InferenceFailed: The model refuses the inputs.
        """
        ...


class LoadedFramework:
    """The model of a host process."""

    def __init__(self, asked: LoadFramework) -> None:
        self._model: Framework = import_module(f"{__package__}.{asked.framework}").load(asked)
        self.declared = FrameworkLoaded(list(self._model.inputs), list(self._model.outputs))
        self._narrow = {port.name for port in self._model.outputs if port.datatype == "BF16"}

    def execute(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> tuple[ExecutedRows, list[Bytes]]:
        """Runs the model, and returns the message of its outputs."""
        outputs = self._model.execute(inputs, wanted)
        wires = [
            from_numpy(name, array, "BF16" if name in self._narrow and array.dtype == "float32" else None)
            for name, array in outputs.items()
            if name in wanted
        ]
        metas = [TensorMeta(wire.name, wire.datatype, wire.shape) for wire in wires]
        return ExecutedRows(metas, []), [wire.data for wire in wires]


def number(asked: LoadFramework, parameter: str, default: int) -> int:
    """Reads a whole number from the parameters; 0 = the default."""
    text = asked.parameters.get(parameter, "0")
    if not (text.isascii() and text.isdecimal()):
        raise ModelLoadFailed(f"parameter '{parameter}' is '{text}'; it must be a number >= 0")
    return int(text) or default


def flag(asked: LoadFramework, parameter: str, *, default: bool = False) -> bool:
    """Reads a switch: true, 1, yes, false, 0 or no."""
    text = asked.parameters.get(parameter)
    if text is None:
        return default
    if text.lower() not in _FLAGS:
        raise ModelLoadFailed(f"parameter '{parameter}' is '{text}'; it must be one of {', '.join(_FLAGS)}")
    return _FLAGS[text.lower()]


def datatype_of(name: str, dtype: Any) -> str:
    """Returns the wire datatype of a tensor by its numpy dtype."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind in "OSU":
        return "BYTES"
    if found.name == "bfloat16":
        return "BF16"
    if found not in NUMPY_DATATYPES:
        raise ModelLoadFailed(f"tensor '{name}' has the type {dtype}, which the protocol can't carry")
    return NUMPY_DATATYPES[found]


def taken(inputs: Mapping[str, Array], name: str) -> Array:
    """Returns an input, or raises `InferenceFailed`."""
    if name not in inputs:
        raise InferenceFailed(f"input '{name}' is missing, and the model requires it")
    return inputs[name]
